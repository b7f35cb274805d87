"""Cost plan of a recipe: costs of every method before training, and settings that make them fit into memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch

from comingle.config import Recipe
from comingle.config.settings import ALL_USERS, MEMORY, protects_examples
from comingle.cost.counts import BaseFlops, Load, count_exchanges, count_stacked, count_users, measured_base, text_load
from comingle.cost.memory import (
    Rehearsal,
    Writes,
    as_long,
    as_text,
    memory,
    process_bytes,
    rehearse,
    store_bytes,
    user_bytes,
)
from comingle.cost.records import Account, Difference, MemoryCost, MethodCost, Plan, Sizes, UserCost, table3
from comingle.cost.skeleton import bare_mixture, bare_nets, load_skeleton
from comingle.data.samples.reading import Population
from comingle.data.samples.samples import SPLITS
from comingle.data.text.streams import UserData
from comingle.methods import make, settings_in_comparison
from comingle.models.base import Base, logger
from comingle.models.generation import check_context_length
from comingle.models.hardware import free_bytes
from comingle.models.quantised import packed_parameters
from comingle.privacy.accounting import sample_size
from comingle.runs.api import without_sums
from comingle.runs.given import NOTHING, USERS_MISSING
from comingle.runs.session import build, prepare
from comingle.training.backends.local import InProcess, federate
from comingle.training.client import Clients, batch_size
from comingle.training.kinds.base import RunData, adapt_base, check_recipe, kind_of
from comingle.training.kinds.text import TextBatchSource
from comingle.training.plan import make_plan, planned_releases, server_mechanisms
from comingle.training.settings import PassSize, pass_size, round_sizes
from comingle.training.storage.disk import check_storable
from comingle.utils.errors import DataError, RecipeError

Participation = float | Sequence[Sequence[str]]
"""Fraction of the users in each round, or the names of each round's participants."""

NONE_FITS = "no smaller pass fits; use a smaller base, fewer users or a smaller adapters.rank"
_USERS, _SEQUENCES = "runtime.users_per_step", "runtime.micro_batch"


def with_method(recipe: Recipe, name: str, for_all: Mapping[str, object] = MappingProxyType({})) -> Recipe:
    """Return the recipe with another method and that method's default settings, to count its costs.

    All users take part in every round, as participation does not change one user's costs per round. Language models are
    not compiled, as compilation takes long and changes no counts.

    Args:
        recipe: The recipe. Its own method keeps its settings.
        name: Name of the method.
        for_all: Settings that are applied if the method has them.
    """
    settings = settings_in_comparison(name, recipe.method.name, recipe.method.settings, for_all)
    changes: dict[str, Any] = {"method": {"name": name, **settings}, "training.participation": 1.0}
    if kind_of(recipe).needs_base:  # nets compile fast
        changes["runtime.compile"] = False
    return recipe.with_changes(changes)


def with_privacy(
    cost: MethodCost, recipe: Recipe, names: Sequence[str], participation: Participation, *, whole: Recipe | None = None
) -> MethodCost:
    """Return the costs with a forecast of the privacy budget that a run spends, and check the rounds' participants.

    The forecast depends on how often users take part. Without privacy the costs are returned unchanged, but rounds are
    still checked against the recipe's aggregation rule.

    Args:
        cost: Costs of a method.
        recipe: The recipe, whose text may be replaced with text of equal cost.
        names: Names of the users.
        participation: Participation of the original recipe.
        whole: The original recipe, if ``recipe`` has other text.

    Raises:
        RecipeError: Rounds have too few participants for the recipe's aggregation rule.
    """
    if recipe.privacy is None and recipe.aggregation.is_mean:
        return cost
    recipe = recipe.with_changes({"training.participation": participation})
    method = make(recipe.method.name, **recipe.method.settings)
    plan = make_plan(recipe, method, names)
    mechanisms = server_mechanisms(plan, names)
    if method.shared:
        for mechanism in mechanisms:
            mechanism.check_rounds(round_sizes(plan, names), same_ranks=True)
    if recipe.privacy is None:
        return cost
    if protects_examples(recipe.privacy.mechanism):  # epsilon depends on users' numbers of examples: data is read
        read = (whole or recipe).with_changes({"training.participation": participation})
        mechanisms = build(read, prepare(read)).server.mechanisms
    account = next((mechanism.account for mechanism in mechanisms if mechanism.account is not None), None)
    forecast = {} if account is None else account.forecast(planned_releases(plan, names))
    return replace(cost, privacy=forecast)


def check_count(users: int | None) -> None:
    """Check a number of users given on the command line.

    Raises:
        RecipeError: It is below 1.
    """
    if users is not None and users < 1:
        raise RecipeError(f"--users: got {users}; allowed: whole numbers from 1")


def largest_round(participation: Participation, users: int) -> int:
    """Return the number of participants in the largest round of a population of ``users`` users."""
    if isinstance(participation, float | int):
        return sample_size(participation, users)
    return max(len(set(members)) for members in participation)


def summarise(stage: Rehearsal, users: Sequence[UserCost], free: int, *, keep: int) -> MethodCost:
    """Return the costs of a method, including its memory.

    Args:
        stage: The rehearsal that is measured.
        users: Costs of the users.
        free: Free memory, in bytes.
        keep: Number of checkpoints that a run keeps.
    """
    method, machine = stage.federation.clients.method, memory(stage)
    pass_size, fits = stage.steps.pass_size, machine.total_bytes <= free
    return MethodCost(
        method=method.name,
        users=tuple(users),
        exchanges=count_exchanges(stage.federation),
        users_per_step=min(pass_size.users, stage.trainers * method.placement.copies),
        micro_batch=pass_size.sequences,
        machine=machine,
        own_device=memory(stage, alone=True),
        fits=fits,
        advice="" if fits else advise(stage, machine, free),
        store_bytes=_largest_store(stage, keep),
    )


def _largest_store(stage: Rehearsal, keep: int) -> int:
    """Return the largest size of the users' records on disk, in bytes; 0 if users are kept in memory.

    Args:
        stage: The rehearsal that is measured.
        keep: Number of checkpoints that a run keeps.
    """
    clients, plan = stage.federation.clients, stage.federation.clients.plan
    if stage.store == MEMORY:
        return 0
    check_storable(clients)
    copies = clients.method.placement.copies
    writes = Writes(
        users=stage.trainers * copies,
        present=stage.present * copies,
        evaluated=min(plan.evaluation.users or stage.trainers, stage.trainers) * copies,
        rounds=plan.training.rounds,
        evaluate_every=plan.period,
        every=plan.checkpoints.every,
        keep=keep,
    )
    return store_bytes(user_bytes(clients.state, stage.store), writes)


def advise(stage: Rehearsal, machine: MemoryCost, free: int) -> str:
    """Return the settings of the largest pass that fits into memory, or a sentence that none does.

    Args:
        stage: The rehearsal that is measured.
        machine: Memory that the current settings need.
        free: Free memory, in bytes.
    """
    smaller = smaller_pass(stage, machine, free)
    return NONE_FITS if smaller is None else f"{_USERS}={smaller.users} {_SEQUENCES}={smaller.sequences}"


def smaller_pass(stage: Rehearsal, machine: MemoryCost, free: int) -> PassSize | None:
    """Return the largest pass below the current one that fits into memory; None if none does.

    Args:
        stage: The rehearsal that is measured.
        machine: Memory that the current settings need.
        free: Free memory, in bytes.
    """
    if machine.fixed_bytes > free:
        return None
    candidates = _halved_passes(stage.steps.pass_size)
    return next((size for size in candidates if memory(stage, pass_size=size).total_bytes <= free), None)


def _halved_passes(now: PassSize) -> Iterator[PassSize]:
    """Yield ever smaller passes: halve the number of users until it is 1, then the number of sequences."""
    size = now
    while size.users * size.sequences > 1:
        size = replace(size, users=size.users // 2) if size.users > 1 else replace(size, sequences=size.sequences // 2)
        yield size


def plan_nets(recipes: Sequence[Recipe], users: int | None = None, participation: Participation = 1.0) -> Plan:
    """Return the costs of one population of samples under several methods.

    Samples are read or generated, as costs depend on their numbers and shapes. Nothing is trained.

    Args:
        recipes: Recipes that differ in their method alone.
        users: Number of users that replaces the recipe's; None keeps it.
        participation: Participation, on which only privacy and memory depend.

    Raises:
        RecipeError: A method or a setting is wrong.
        DataError: A user's samples cannot be read.
    """
    if users is not None:
        check_count(users)
        recipes = [kind_of(recipe).of_users(recipe, users) for recipe in recipes]
    population = prepare(recipes[0]).common
    plain = rehearse_nets(with_method(recipes[0], "fedavg"), population)
    clients = plain.federation.clients
    base, free = measured_base(plain), free_bytes(clients.model.device)
    names = tuple(population.users.names)
    costs = [
        with_privacy(net_cost(recipe, population, base, free, participation), recipe, names, participation)
        for recipe in recipes
    ]
    return Plan(
        base=clients.model.name,
        base_parameters=clients.model.base_parameters,
        dtype=str(clients.model.dtype).removeprefix("torch."),
        device=str(clients.model.device),
        users=names,
        rounds=clients.plan.training.rounds,
        local_steps=max(load.steps for load in loads_of(clients, population).values()),
        batch_size=clients.plan.training.batch_size,
        context=0,
        base_flops=costs[0].users[0].forward.base,
        free_bytes=free,
        methods=tuple(costs),
        table3=(),
        unit="sample",
    )


def net_cost(
    recipe: Recipe, population: Population, base: BaseFlops, free: int, participation: Participation
) -> MethodCost:
    """Return the costs of one method of users with samples, including its memory.

    Args:
        recipe: The recipe, with the method.
        population: Users and their samples.
        base: FLOPs of the net alone.
        free: Free memory, in bytes.
        participation: Fraction or names of the participants.
    """
    stage = rehearse_nets(recipe, population, participation)
    users = count_stacked(stage, loads_of(stage.federation.clients, population), base)
    return summarise(stage, users, free, keep=recipe.checkpoints.keep)


def rehearse_nets(
    recipe: Recipe,
    population: Population,
    participation: Participation = ALL_USERS,
    all_names: Sequence[str] | None = None,
) -> Rehearsal:
    """Return a rehearsal of a federation of nets, whose samples have shapes but no data.

    Args:
        recipe: The recipe.
        population: Users and their samples.
        participation: Fraction or names of the participants.
        all_names: Names of all users, if some are in other processes.
    """
    federation = bare_nets(recipe, population, all_names)
    clients = federation.clients
    trainers = 1 if clients.method.placement.pooled else len(population.users)
    process_size = process_bytes("samples", clients.model.device)
    return rehearse(
        federation,
        trainers,
        present=largest_round(participation, len(population.users if all_names is None else all_names)),
        store=recipe.runtime.store,
        data_bytes=data_bytes(population, clients.model.dtype),
        reads_cohorts=not population.users.in_memory,
        process_bytes=process_size,
    )


def loads_of(clients: Clients, population: Population) -> dict[str, Load]:
    """Return every user's local work in a round by name; a pooled method has one entry with the work of all.

    It consists of batches of training samples, for some epochs, and of sweeps: passes over all of a user's samples that
    a method takes without training, for example to choose a component.
    """
    users: Iterable[tuple[str, Any]] = ((user.name, user) for user in population.users)
    if clients.method.placement.pooled:
        users = [(f"all {len(population.users)} users as one", clients.trainers[0])]
    loads, distinct = dict[str, Load](), dict[Load, Load]()  # equal loads are one object, as there may be many users
    for name, user in users:
        epoch_sizes, sweep_sizes = clients.batch_source.batch_sizes(user)
        load = Load(
            sizes=epoch_sizes,
            epochs=clients.plan.training.local_epochs,
            sweeps=len(sweep_sizes),
            swept=sum(sweep_sizes),
        )
        loads[name] = distinct.setdefault(load, load)
    return loads


def data_bytes(population: Population, dtype: torch.dtype) -> int:
    """Return the bytes of all users' samples: as read, and as copied for batches.

    For users that are read on demand the bytes follow from their sizes: all splits have the shapes of the first user's.
    """
    users, total = population.users, 0
    if users.sizes is not None:
        one_user = data_bytes(replace(population, users=users.select([0])), dtype)
        return int(one_user * users.sizes.sum() / users.sizes[0].sum())
    for part in (user.split(split) for user in users for split in SPLITS):
        # Copies for batches have the model's dtype, but labels keep theirs.
        target_dtype = dtype if part.targets.is_floating_point() else part.targets.dtype
        total += part.inputs.nbytes + part.inputs.numel() * dtype.itemsize
        total += part.targets.nbytes + part.targets.numel() * target_dtype.itemsize
    return total


def plan(
    recipe: Recipe,
    methods: Sequence[str] = (),
    *,
    users: int | None = None,
    for_all: Mapping[str, object] = MappingProxyType({}),
) -> Plan:
    """Return the costs of a recipe's method, or of several methods.

    Args:
        recipe: The recipe. Its own method keeps its settings; others have their defaults.
        methods: Names of the methods; empty for the recipe's own.
        users: Number of users, if their text is not available.
        for_all: Settings for every method that has them.

    Raises:
        RecipeError: A method or a setting is wrong.
        BaseModelError: The base cannot be used.
        DataError: The users' names cannot be read, or available text is too short for a run.
    """
    present = recipe.training.participation
    recipes = [with_method(recipe, name, for_all) for name in methods or [recipe.method.name]]
    for variant in recipes:
        check_recipe(variant)
    if not (kind := kind_of(recipe)).needs_base:
        return plan_nets(recipes, users, present)
    check_count(users)
    _check_passed_objects(recipe, users)
    _check_num_users(recipe, users)
    original, runtime = recipes, recipe.runtime
    device_settings = {"dtype": runtime.dtype, "device": runtime.device, "attention": runtime.attention}
    skeleton = cache(partial(load_skeleton, recipe.base, **device_settings, quantise=recipe.quantise))
    base = skeleton()
    check_context_length("training.context", recipe.training.context, base.model)
    recipes, too_small, note = as_text(kind, recipes, users, skeleton)
    recipe = recipes[0]
    names = tuple(name for name in user_names(recipe, users) if name not in too_small)
    free, training = free_bytes(base.device), recipe.training
    costs = [
        with_privacy(method_cost(variant, base, names, free, present), variant, names, present, whole=was)
        for variant, was in zip(recipes, original, strict=True)
    ]
    return Plan(
        base=base.name,
        base_parameters=base.model.num_parameters() + packed_parameters(base.model),
        dtype=str(base.dtype).removeprefix("torch."),
        device=str(base.device),
        users=names,
        rounds=training.rounds,
        local_steps=training.local_steps,
        batch_size=training.batch_size,
        context=training.context,
        base_flops=costs[0].users[0].forward.base,
        free_bytes=free,
        methods=tuple(costs),
        table3=tuple(compare_with_paper(recipe, base)),
        note=note,
    )


def _check_passed_objects(recipe: Recipe, users: int | None) -> None:
    """Refuse objects that a program passed to a run and that ``comingle cost`` does not have.

    A base that was passed is refused. Data that was passed is not needed if the number of users is given.

    Args:
        recipe: The recipe of the run.
        users: The number of users given on the command line, if any.

    Raises:
        BaseModelError: The base was passed.
        RecipeError: A loss function was passed, which language models do not use.
        DataError: The data was passed, and there is no number of users.
    """
    NOTHING.check_base(recipe)
    if recipe.data.given and users is None:
        raise DataError(f"{USERS_MISSING}; to count costs without their data, give the number of users: --users N")


def _check_num_users(recipe: Recipe, users: int | None) -> None:
    """Refuse a given number of users with example-level privacy, as epsilon depends on each user's number of examples.

    Raises:
        RecipeError: The number is given, and the recipe's privacy is per example.
    """
    if users is not None and recipe.privacy is not None and protects_examples(recipe.privacy.mechanism):
        reason = "with privacy.mechanism: example, users' data is read, because epsilon depends on each user's examples"
        raise RecipeError(f"--users: got {users}; {reason}; leave it out")


def user_names(recipe: Recipe, users: int | None = None) -> tuple[str, ...]:
    """Return the users' names, if possible without reading text; "user 1" and so on for a given number of users.

    Raises:
        DataError: Users are groups of rows in a file that cannot be read.
    """
    if users is not None:
        return tuple(f"user {i + 1}" for i in range(users))
    return kind_of(recipe).names_of(recipe)


# ---------------------------------------------------------------- one method


def federate_bare(recipe: Recipe, base: Base, names: tuple[str, ...], here: Sequence[int] | None = None) -> InProcess:
    """Return a federation over a base without weights, whose users have names but no text.

    If all users are alike, only as many are built as go through the model in one pass.

    Args:
        recipe: The recipe.
        base: The base; weights are not needed.
        names: Names of all users.
        here: Indices of the users in this process, if there are several. Adapters are as wide as those of all users.
    """
    method = make(recipe.method.name, **recipe.method.settings)
    plan = make_plan(recipe, method, names).updated("runtime", store=MEMORY)
    placement = method.placement
    are_alike = isinstance(placement.specialists, int) and isinstance(recipe.adapters.rank, int)
    numbers = range(len(names)) if here is None else here
    if are_alike and not placement.pooled:
        numbers = numbers[: pass_size(plan, base.device, plan.training.batch_size).users]
    user_data = [_user_without_text(names[number]) for number in numbers]
    trainers = [_user_without_text("everyone")] if placement.pooled else user_data
    if placement.mixture is not None and not placement.mixture.trains_independently:
        model = bare_mixture(recipe, base, method, len(trainers))
    else:
        differ = not are_alike and not placement.pooled  # the widths of adapters then depend on all users
        num_users = len(names) if differ else len(trainers)
        tokens = num_users * plan.iterations * plan.training.batch_size * plan.training.context
        model = adapt_base(recipe, base, method, num_users, tokens)
        model = model.only(numbers) if differ else model
    batch_source = TextBatchSource(trainers, plan, batch_size(plan, len(user_data)))
    return federate(Clients(model, plan, trainers=trainers, users=user_data, batch_source=batch_source, reads=False))


def _user_without_text(name: str) -> UserData:
    """Return a user with three empty splits."""
    nothing = torch.empty(0, dtype=torch.int32)
    return UserData(name=name, train=nothing, valid=nothing, test=nothing)


def method_cost(
    recipe: Recipe, base: Base, names: tuple[str, ...], free: int, participation: Participation = ALL_USERS
) -> MethodCost:
    """Return the costs of one method of a language model, including its memory.

    Args:
        recipe: The recipe, with the method.
        base: The base; weights are not needed.
        names: Names of the users.
        free: Free memory, in bytes.
        participation: Fraction or names of the participants.
    """
    stage = rehearse_text(recipe, base, names, participation)
    if stage.federation.clients.method.placement.mixture is None:
        users = count_users(stage.federation, names)
    else:
        loads = dict.fromkeys(names, text_load(stage.federation.clients))
        users = count_stacked(stage, loads, _base_flops(recipe, base, names))
    return summarise(stage, users, free, keep=recipe.checkpoints.keep)


def rehearse_text(
    recipe: Recipe,
    base: Base,
    names: tuple[str, ...],
    participation: Participation = ALL_USERS,
    here: Sequence[int] | None = None,
) -> Rehearsal:
    """Return a rehearsal of a language model's federation, whose users have no text and whose base has no weights.

    Args:
        recipe: The recipe.
        base: The base; weights are not needed.
        names: Names of all users.
        participation: Fraction or names of the participants.
        here: Indices of the users in this process, if there are several. All of them may take part in one round.
    """
    federation = federate_bare(recipe, base, names, here)
    users = len(names) if here is None else len(here)
    trainers = 1 if federation.clients.method.placement.pooled else users
    return rehearse(
        federation,
        trainers=trainers,
        present=largest_round(participation, len(names)),
        store=recipe.runtime.store,
        checkpointed=recipe.runtime.gradient_checkpointing,
        process_bytes=process_bytes("text", base.device),
    )


def _base_flops(recipe: Recipe, base: Base, names: tuple[str, ...]) -> BaseFlops:
    """Return the base's FLOPs in a mixture; the overhead of the mixture is relative to them.

    These are the frozen base's FLOPs with FedAvg's adapters: one pass per step, times the number of whole models.

    Args:
        recipe: The recipe.
        base: The base; weights are not needed.
        names: Names of the users.
    """
    fedavg = with_method(without_sums(recipe), "fedavg")
    user = count_users(federate_bare(fedavg, base, names[:1]), names[:1])[0]
    mixture = make(recipe.method.name, **recipe.method.settings).placement.mixture
    models = mixture.clusters if mixture is not None and mixture.trains_independently else 1
    forward, passes = (replace(spent, lora=0.0, router=0.0) * models for spent in (user.forward, user.round))
    return lambda load: (forward, passes)


# ---------------------------------------------------------------- comparison with the paper


def compare_with_paper(recipe: Recipe, base: Base) -> list[Difference]:
    """Return Table 3 of the CoMiGS paper for this base and these adapters.

    It compares CoMiGS-1G1S with FedAvg, for one user with the largest rank of the recipe.

    Args:
        recipe: The recipe; its method is replaced.
        base: The base; weights are not needed.
    """
    recipe, rank = without_sums(recipe), recipe.adapters.rank
    uniform = recipe if isinstance(rank, int) else recipe.with_changes({"adapters.rank": max(rank)})
    accounts, parameters = [], []
    for name in ("fedavg", "comigs-1g1s"):
        federation = federate_bare(with_method(uniform, name), base, ("anybody",))
        (user,) = count_users(federation, ("anybody",))
        # Parameters and both moments of AdamW, in the dtype of the state.
        state = user.trainable_parameters * 3 * federation.clients.state.rows.element_size()
        accounts.append(
            Account(
                forward_flops=user.forward.total * recipe.training.context,
                round_flops=user.round.total,
                state_bytes=state,
                upload_bytes=user.upload_bytes,
            )
        )
        parameters.append(user.parameters)
    counts = parameters[1]
    sizes = Sizes(attention=counts["attention"], expert=counts["generalist"], router=counts["router"])
    return table3(sizes, recipe.training.context, *accounts)


FREE_SHARE = {"cuda": 0.9}
"""Usable fraction of a GPU's free memory. The rest allows for gaps of its allocator; an estimate, not measured."""


def fit(recipe: Recipe, run_data: RunData) -> PassSize:
    """Choose how many users, and sequences of each, go through the model in one pass.

    These are the default numbers, or the largest smaller ones that fit into memory. Each process chooses for its own
    users. Base and data are loaded already, so free memory does not include them.

    Args:
        recipe: The recipe.
        run_data: Base and data.

    Raises:
        RecipeError: One sequence of one user does not fit.
    """
    stage = _rehearse(with_method(recipe, recipe.method.name), run_data, recipe.training.participation)
    device = stage.steps.model.device
    # `machine.total_bytes` includes base, data and process, which are in memory already.
    loaded_bytes = stage.weights_bytes + stage.process_bytes + stage.data_bytes
    usable_bytes = int(FREE_SHARE.get(device.type, 1.0) * free_bytes(device)) + loaded_bytes
    machine, chosen = memory(stage), stage.steps.pass_size
    if machine.total_bytes > usable_bytes:
        smaller = smaller_pass(stage, machine, usable_bytes)
        if smaller is None:
            needs = f"needs {machine.total_bytes / 1e9:,.2f} GB, but {usable_bytes / 1e9:,.2f} GB are free on {device}"
            raise RecipeError(f"runtime.users_per_step: auto: {needs}; {NONE_FITS}")
        chosen = smaller
    logger.info("users_per_step: auto: %d users with %d sequences or samples each", chosen.users, chosen.sequences)
    return chosen


def _rehearse(recipe: Recipe, run_data: RunData, participation: Participation) -> Rehearsal:
    """Build the federation of this process without weights and data, to measure a pass.

    Args:
        recipe: The recipe.
        run_data: Base and data.
        participation: Fraction or names of the participants.
    """
    kind, users, all_names = kind_of(recipe), run_data.present, run_data.users.names  # here, and in all processes
    if not kind.needs_base:
        return rehearse_nets(recipe, replace(run_data.common, users=users), participation, all_names)
    (as_text,) = kind.as_text([recipe], len(users))[0] if users.in_memory else as_long(kind, [recipe], users)
    assert run_data.base is not None
    return rehearse_text(as_text, run_data.base, tuple(all_names), participation, run_data.here)
