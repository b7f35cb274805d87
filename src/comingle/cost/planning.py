"""Cost plan of a recipe: costs of every method before training, and settings that make them fit into memory."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch

from comingle.config import Recipe, parse_recipe
from comingle.config.settings import ALL_USERS, MEMORY, largest, protects_examples
from comingle.cost.counts import BaseFlops, Load, count_exchanges, count_stacked, count_users, measured_base, text_load
from comingle.cost.memory import (
    CLIENT_BYTES,
    Rehearsal,
    Writes,
    as_text,
    conversations_as_text,
    peak_memory,
    process_bytes,
    rehearse,
    storage_bytes,
    store_bytes,
    user_bytes,
)
from comingle.cost.records import (
    Account,
    Difference,
    MemoryChoice,
    MemoryCost,
    MethodCost,
    Plan,
    Sizes,
    UserCost,
    table3_columns,
)
from comingle.cost.skeleton import bare_mixture, bare_nets, load_skeleton
from comingle.data.samples.reading import Population
from comingle.data.samples.samples import SPLITS
from comingle.data.text.streams import UserData
from comingle.methods import make, settings_in_comparison
from comingle.models.base import Base, logger
from comingle.models.generation import check_context_length
from comingle.models.hardware import free_bytes, resolve_device, resolve_dtype
from comingle.models.injection import ranks_of
from comingle.models.layouts import decoder_layers
from comingle.models.lora import weight_shape
from comingle.models.quantised import CODES, QuantisedLinear, packed_parameters
from comingle.privacy.accounting import sample_size
from comingle.runs.api import recipe_for_one_user
from comingle.runs.given import NOTHING, USERS_MISSING
from comingle.runs.session import build, memory_limit, prepare, with_chosen_settings
from comingle.training.backends.local import InProcess, federate
from comingle.training.client import Clients, batch_size
from comingle.training.kinds.base import RunData, adapt_base, check_recipe, kind_of
from comingle.training.kinds.text import TextBatchSource
from comingle.training.plan import make_plan, planned_releases, server_mechanisms
from comingle.training.settings import PassSize, pass_size, round_sizes
from comingle.training.storage.disk import check_storable
from comingle.utils.errors import ComingleError, DataError, RecipeError

Participation = float | Sequence[Sequence[str]]
"""Fraction of the users in each round, or the names of each round's participants."""

NONE_FITS = "no smaller pass fits; use a smaller base, fewer users or a smaller adapters.rank"
_USERS, _SEQUENCES = "runtime.users_per_step", "runtime.micro_batch"


def with_method(recipe: Recipe, name: str, for_all: Mapping[str, object] = MappingProxyType({})) -> Recipe:
    """Return the recipe for counting the costs of a method, which may be another one than the recipe's.

    The recipe's own method keeps the recipe's settings; another method has its default settings. All users take part in
    every round, as participation does not change one user's costs per round. Language models are not compiled, as
    compilation takes long and changes no counts.

    Args:
        recipe: The recipe.
        name: Name of the method.
        for_all: Settings by name. In a method that has a setting of this name, it replaces the recipe's or the default.
    """
    settings = settings_in_comparison(name, recipe.method.name, recipe.method.settings, for_all)
    changes: dict[str, Any] = {"method": {"name": name, **settings}, "training.participation": 1.0}
    if kind_of(recipe).needs_base:  # nets compile fast
        changes["runtime.compile"] = False
    return recipe.with_changes(changes)


def add_privacy_forecast(
    cost: MethodCost,
    recipe: Recipe,
    names: Sequence[str],
    participation: Participation,
    *,
    with_real_data: Recipe | None = None,
) -> MethodCost:
    """Add a forecast of the privacy budget to a method's costs if the recipe has privacy.

    The forecast depends on how often users take part. Also check that all rounds have enough participants for the
    recipe's privacy mechanism and for its aggregation rule.

    Args:
        cost: Costs of a method.
        recipe: The recipe that the costs are for, with all users taking part; data may be replaced with text.
        names: Names of the users.
        participation: Participation of the user's recipe.
        with_real_data: The recipe with the users' own data; None if ``recipe`` has it.

    Raises:
        RecipeError: Rounds have too few participants.
    """
    if recipe.privacy is None and recipe.aggregation.is_mean:  # nothing to forecast or to check
        return cost
    recipe = recipe.with_changes({"training.participation": participation})
    method = make(recipe.method.name, **recipe.method.settings)
    plan = make_plan(recipe, method, names)
    mechanisms = server_mechanisms(plan, names)
    if method.shared:
        for mechanism in mechanisms:
            mechanism.check_rounds(round_sizes(plan, names), same_ranks=True)  # only sizes are checked here, not ranks
    if recipe.privacy is None:
        return cost
    if protects_examples(recipe.privacy.mechanism):  # epsilon depends on users' numbers of examples: data is read
        readable = (with_real_data or recipe).with_changes({"training.participation": participation})
        mechanisms = build(readable, prepare(readable)).server.mechanisms
    account = next((mechanism.account for mechanism in mechanisms if mechanism.account is not None), None)
    forecast = {} if account is None else account.forecast(planned_releases(plan, names))
    return replace(cost, privacy=forecast)


def check_num_users(users: int | None) -> None:
    """Check the number of users given on the command line (``--users``); None if none is given.

    Raises:
        RecipeError: The number is below 1.
    """
    if users is not None and users < 1:
        raise RecipeError(f"--users: got {users}; allowed: whole numbers from 1")


def largest_round(participation: Participation, users: int) -> int:
    """Return the number of participants in a run's largest round.

    Args:
        participation: Fraction of the users in each round, or the names of each round's participants.
        users: Size of the population.
    """
    if isinstance(participation, float | int):
        return sample_size(participation, users)
    return max(len(set(names)) for names in participation)


def complete_cost(rehearsal: Rehearsal, users: Sequence[UserCost], free: int, *, kept_checkpoints: int) -> MethodCost:
    """Return all costs of a method: those of its users, which are given, its memory and its bytes on disk.

    If memory is too small, the result advises smaller passes.

    Args:
        rehearsal: The run's federation, on fake tensors.
        users: Costs of the users.
        free: Free memory, in bytes.
        kept_checkpoints: Number of checkpoints that a run keeps.
    """
    method, machine = rehearsal.federation.clients.method, peak_memory(rehearsal)
    pass_size, fits = rehearsal.steps.pass_size, machine.total_bytes <= free
    return MethodCost(
        method=method.name,
        users=tuple(users),
        exchanges=count_exchanges(rehearsal.federation),
        # Copies of a user's model take places in a pass like users.
        users_per_step=min(pass_size.users, rehearsal.trainers * method.placement.copies),
        micro_batch=pass_size.sequences,
        machine=machine,
        own_device=peak_memory(rehearsal, alone=True),
        fits=fits,
        advice="" if fits else advise(rehearsal, machine, free),
        store_bytes=_largest_store_bytes(rehearsal, kept_checkpoints),
    )


def _largest_store_bytes(rehearsal: Rehearsal, kept_checkpoints: int) -> int:
    """Return the largest size of the users' records on disk during a run, in bytes; 0 if users are kept in memory.

    Each copy of a user's model, which some methods keep, has records like a user.

    Args:
        rehearsal: The run's federation, on fake tensors.
        kept_checkpoints: Number of checkpoints that a run keeps.
    """
    clients, plan = rehearsal.federation.clients, rehearsal.federation.clients.plan
    if rehearsal.store == MEMORY:
        return 0
    check_storable(clients)  # refuses methods whose users cannot be kept on disk
    copies = clients.method.placement.copies
    writes = Writes(
        users=rehearsal.trainers * copies,
        participants=rehearsal.participants * copies,
        evaluated_users=min(plan.evaluation.users or rehearsal.trainers, rehearsal.trainers) * copies,
        rounds=plan.training.rounds,
        evaluate_every=plan.period,
        checkpoint_every=plan.checkpoints.every,
        kept_checkpoints=kept_checkpoints,
    )
    return store_bytes(user_bytes(clients.state, rehearsal.store), writes)


def advise(rehearsal: Rehearsal, machine: MemoryCost, free: int) -> str:
    """Return text with the settings of the largest pass that fits into memory, or a sentence that none does.

    Args:
        rehearsal: The run's federation, on fake tensors.
        machine: Memory that the recipe's own settings need.
        free: Free memory, in bytes.
    """
    smaller = smaller_pass(rehearsal, machine, free)
    return NONE_FITS if smaller is None else f"{_USERS}={smaller.users} {_SEQUENCES}={smaller.sequences}"


def smaller_pass(rehearsal: Rehearsal, machine: MemoryCost, free: int) -> PassSize | None:
    """Return the largest pass below the run's that fits into memory; None if none does.

    Args:
        rehearsal: The run's federation, on fake tensors.
        machine: Memory that the run's own pass size needs.
        free: Free memory, in bytes.
    """
    if machine.fixed_bytes > free:  # weights and data alone, whatever the pass
        return None
    candidates = _halved_passes(rehearsal.steps.pass_size)
    return next((size for size in candidates if peak_memory(rehearsal, pass_size=size).total_bytes <= free), None)


def _halved_passes(size: PassSize) -> Iterator[PassSize]:
    """Yield smaller and smaller passes than ``size``: halve the users until there is 1, then the sequences of it."""
    while size.users * size.sequences > 1:
        size = replace(size, users=size.users // 2) if size.users > 1 else replace(size, sequences=size.sequences // 2)
        yield size


def plan_nets(recipes: Sequence[Recipe], users: int | None = None, participation: Participation = 1.0) -> Plan:
    """Return the costs of training small nets on users' samples, for one or several methods.

    Samples are read or generated, as costs depend on their numbers and shapes. Nothing is trained.

    Args:
        recipes: Recipes that differ in their method alone.
        users: Number of users that replaces the recipe's; None keeps it.
        participation: Fraction or names of the participants, on which only privacy and memory depend.

    Raises:
        RecipeError: A method or a setting is wrong.
        DataError: A user's samples cannot be read.
    """
    if users is not None:
        check_num_users(users)
        recipes = [kind_of(recipe).with_num_users(recipe, users) for recipe in recipes]
    population = prepare(recipes[0]).common
    # The FLOPs of the net alone, with which those of each method are compared, are those of FedAvg.
    fedavg = rehearse_nets(with_method(recipes[0], "fedavg"), population)
    clients, net_flops = fedavg.federation.clients, measured_base(fedavg)
    free, names = free_bytes(clients.model.device), tuple(population.users.names)
    costs = []
    for recipe in recipes:
        cost = net_cost(recipe, population, net_flops, free, participation)
        costs.append(add_privacy_forecast(cost, recipe, names, participation))
    return Plan(
        base=clients.model.name,
        base_parameters=clients.model.base_parameters,
        dtype=str(clients.model.dtype).removeprefix("torch."),
        device=str(clients.model.device),
        users=names,
        rounds=clients.plan.training.rounds,
        local_steps=max(load.steps for load in loads_of(clients, population).values()),
        batch_size=clients.plan.training.largest_batch_size,
        context=0,  # samples are no sequences
        base_flops=costs[0].users[0].forward.base,
        free_bytes=free,
        methods=tuple(costs),
        table3=(),  # the paper's table compares language models
        unit="sample",
    )


def net_cost(
    recipe: Recipe, population: Population, net_flops: BaseFlops, free: int, participation: Participation
) -> MethodCost:
    """Return the costs of training nets with the recipe's method: FLOPs and bytes of the users, and memory.

    Args:
        recipe: The recipe.
        population: Users and their samples.
        net_flops: Function from a user's local work in a round to the FLOPs of the net alone, without the method's
            additions.
        free: Free memory, in bytes.
        participation: Fraction or names of the participants.
    """
    rehearsal = rehearse_nets(recipe, population, participation)
    users = count_stacked(rehearsal, loads_of(rehearsal.federation.clients, population), net_flops)
    return complete_cost(rehearsal, users, free, kept_checkpoints=recipe.checkpoints.keep)


def rehearse_nets(
    recipe: Recipe,
    population: Population,
    participation: Participation = ALL_USERS,
    all_names: Sequence[str] | None = None,
) -> Rehearsal:
    """Return a federation of nets whose steps run on fake tensors, which have shapes but no values.

    Args:
        recipe: The recipe.
        population: Users of this process and their samples.
        participation: Fraction or names of the participants.
        all_names: Names of the users of all processes; None if there is one process.
    """
    federation = bare_nets(recipe, population, all_names)
    clients = federation.clients
    trainers = 1 if clients.method.placement.pooled else len(population.users)  # pooled: one net on all users' samples
    num_users = len(population.users if all_names is None else all_names)
    return rehearse(
        federation,
        trainers,
        participants=largest_round(participation, num_users),  # all may be in this process
        store=recipe.runtime.store,
        data_bytes=data_bytes(population, clients.model.dtype),
        reads_cohorts=not population.users.in_memory,
        process_bytes=process_bytes("samples", clients.model.device),
    )


def loads_of(clients: Clients, population: Population) -> dict[str, Load]:
    """Return every user's local work in a round by name; a pooled method has one entry with the work of all.

    The work is ``local_epochs`` epochs of training, and one sweep: a pass over all training samples without gradients.
    Some methods choose a model or a component with it.

    Args:
        clients: A federation's clients, whose batch source knows the sizes of batches.
        population: Users and their samples.
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
            sweep_batches=len(sweep_sizes),
            sweep_items=sum(sweep_sizes),
        )
        loads[name] = distinct.setdefault(load, load)
    return loads


def data_bytes(population: Population, dtype: torch.dtype) -> int:
    """Return the bytes of all users' samples: as read, and as copied for batches.

    Of users that are read on demand only the first is read. The bytes of all follow from its bytes per sample, as their
    samples have the same shapes.

    Args:
        population: Users and their samples.
        dtype: Dtype of the model, to which samples are converted in batches.
    """
    users, total = population.users, 0
    if users.sizes is not None:  # numbers of samples of each user, by split
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
    participants: Sequence[str] = (),
    for_all: Mapping[str, object] = MappingProxyType({}),
) -> Plan:
    """Return the costs of a recipe with its own method, or with each of several methods, without training.

    Args:
        recipe: The recipe. Its own method keeps its settings; others have their defaults.
        methods: Names of the methods; empty for the recipe's own.
        users: Number of users, if their data is not available; None reads the users from the recipe.
        participants: Names of the users of a federation, whose data is on other machines; used in place of ``users``.
        for_all: Settings for every method that has them.

    Raises:
        RecipeError: A method or a setting is wrong.
        BaseModelError: The base cannot be used.
        DataError: The users' names cannot be read, or available text is too short for a run.
    """
    if recipe.runtime.memory is not None:
        return _plan_within_memory(recipe, methods, users=users, participants=participants, for_all=for_all)
    participation = recipe.training.participation  # memory and privacy depend on it; the variants have all users
    recipes = [with_method(recipe, name, for_all) for name in methods or [recipe.method.name]]
    for variant in recipes:
        check_recipe(variant)
    if not (kind := kind_of(recipe)).needs_base:
        return plan_nets(recipes, users, participation)
    users = len(participants) if participants else users
    check_num_users(users)
    _check_passed_objects(recipe, users)
    _check_users_of_private_examples(recipe, users)
    runtime = recipe.runtime
    device_settings = {"dtype": runtime.dtype, "device": runtime.device, "attention": runtime.attention}
    load_cached = cache(partial(load_skeleton, recipe.base, **device_settings, quantise=recipe.quantise))
    base = load_cached()
    check_context_length("training.context", recipe.training.context, base.model)
    # Costs of language models are counted for text, so other data is replaced with text that costs as much.
    # `too_small` are the names of users that a run would leave out, as they have too little data.
    text_recipes, too_small, note = as_text(kind, recipes, users, load_cached)
    all_names = participants or user_names(text_recipes[0], users)
    names = tuple(name for name in all_names if name not in too_small)
    free, training = free_bytes(base.device), text_recipes[0].training
    costs = []
    for text_recipe, original in zip(text_recipes, recipes, strict=True):
        cost = method_cost(text_recipe, base, names, free, participation)
        costs.append(add_privacy_forecast(cost, text_recipe, names, participation, with_real_data=original))
    return Plan(
        base=base.name,
        base_parameters=base.model.num_parameters() + packed_parameters(base.model),
        dtype=str(base.dtype).removeprefix("torch."),
        device=str(base.device),
        users=names,
        rounds=training.rounds,
        local_steps=training.most_local_steps,
        batch_size=training.largest_batch_size,
        context=training.context,
        base_flops=costs[0].users[0].forward.base,
        free_bytes=free,
        methods=tuple(costs),
        table3=tuple(compare_with_paper(text_recipes[0], base)),
        note=note,
    )


def _check_passed_objects(recipe: Recipe, users: int | None) -> None:
    """Refuse the recipe of a run to which a program passed its base or its data as Python objects.

    A recipe file does not contain these objects, so ``comingle cost`` does not have them. Passed data is not needed if
    the number of users is given.

    Args:
        recipe: The recipe of the run.
        users: The number of users given on the command line, if any.

    Raises:
        BaseModelError: The base was passed.
        DataError: The data was passed, and there is no number of users.
    """
    NOTHING.check_base(recipe)  # `comingle cost` has no passed objects
    if recipe.data.given and users is None:
        raise DataError(f"{USERS_MISSING}; to count costs without their data, give the number of users: --users N")


def _check_users_of_private_examples(recipe: Recipe, users: int | None) -> None:
    """Refuse ``--users N`` with example-level privacy, as epsilon depends on each user's number of examples.

    Args:
        recipe: The recipe.
        users: The number of users given on the command line, if any.

    Raises:
        RecipeError: The number is given, and the recipe's privacy is per example.
    """
    if users is not None and recipe.privacy is not None and protects_examples(recipe.privacy.mechanism):
        reason = "with privacy.mechanism: example, users' data is read, because epsilon depends on each user's examples"
        raise RecipeError(f"--users: got {users}; {reason}; leave it out")


def user_names(recipe: Recipe, users: int | None = None) -> tuple[str, ...]:
    """Return the users' names, if possible without reading text; "user 1" and so on for a given number of users.

    Args:
        recipe: The recipe.
        users: The number of users given on the command line; None takes the users of the recipe.

    Raises:
        DataError: Users are groups of rows in a file that cannot be read.
    """
    if users is not None:
        return tuple(f"user {i + 1}" for i in range(users))
    return kind_of(recipe).names_of(recipe)


# ---------------------------------------------------------------- one method


def federate_bare(recipe: Recipe, base: Base, names: tuple[str, ...], here: Sequence[int] | None = None) -> InProcess:
    """Return a federation over a base without weights, whose users have names but no text, to count costs.

    If all users have the same numbers of experts and ranks, only those of one pass are built. A pooled method, which
    trains one model on the data of all users, has a single trainer.

    Args:
        recipe: The recipe.
        base: The base; weights are not needed.
        names: Names of the users of all processes.
        here: Indices in ``names`` of this process's users; None if there is one process. The adapters of all users are
            padded to the largest, so those of other processes determine the width here, too.
    """
    recipe = recipe.for_users(names)
    method = make(recipe.method.name, **recipe.method.settings)
    plan = make_plan(recipe, method, names).updated("runtime", store=MEMORY)
    placement = method.placement
    are_alike = isinstance(placement.specialists, int) and isinstance(recipe.adapters.rank, int)
    indices = range(len(names)) if here is None else here
    if are_alike and not placement.pooled:
        indices = indices[: pass_size(plan, base.device, plan.training.largest_batch_size).users]
    users = [_user_without_text(names[index]) for index in indices]
    trainers = [_user_without_text("everyone")] if placement.pooled else users
    if placement.mixture is not None and not placement.mixture.trains_independently:
        model = bare_mixture(recipe, base, method, len(trainers))
    else:
        # Users with different adapters are built for all processes, for the padding, and then reduced to those here.
        are_padded = not are_alike and not placement.pooled
        num_adapted = len(names) if are_padded else len(trainers)
        trained_tokens = num_adapted * plan.iterations * plan.training.largest_batch_size * plan.training.context
        model = adapt_base(recipe, base, method, num_adapted, trained_tokens)
        model = model.only(indices) if are_padded else model
    batch_source = TextBatchSource(trainers, plan, batch_size(plan, len(users)))
    # Without data to read, a check for validation data would fail.
    return federate(Clients(model, plan, trainers=trainers, users=users, batch_source=batch_source, reads=False))


def _user_without_text(name: str) -> UserData:
    """Return a user with three empty splits."""
    nothing = torch.empty(0, dtype=torch.int32)
    return UserData(name=name, train=nothing, valid=nothing, test=nothing)


def method_cost(
    recipe: Recipe, base: Base, names: tuple[str, ...], free: int, participation: Participation = ALL_USERS
) -> MethodCost:
    """Return the costs of training a language model with the recipe's method: costs of the users, and memory.

    FLOPs of adapters follow from formulas; those of client-level mixtures are measured on fake tensors.

    Args:
        recipe: The recipe.
        base: The base; weights are not needed.
        names: Names of the users.
        free: Free memory, in bytes.
        participation: Fraction or names of the participants.
    """
    rehearsal = rehearse_text(recipe, base, names, participation)
    if rehearsal.federation.clients.method.placement.mixture is None:
        users = count_users(rehearsal.federation, names)
    else:
        loads = dict.fromkeys(names, text_load(rehearsal.federation.clients))  # each user's local work in a round
        users = count_stacked(rehearsal, loads, _base_flops(recipe, base, names))
    return complete_cost(rehearsal, users, free, kept_checkpoints=recipe.checkpoints.keep)


def rehearse_text(
    recipe: Recipe,
    base: Base,
    names: tuple[str, ...],
    participation: Participation = ALL_USERS,
    here: Sequence[int] | None = None,
    *,
    process: int | None = None,
) -> Rehearsal:
    """Return the federation of a language model whose steps run on fake tensors, without weights and text.

    Args:
        recipe: The recipe.
        base: The base; weights are not needed.
        names: Names of the users of all processes.
        participation: Fraction or names of the participants.
        here: Indices in ``names`` of this process's users; None if there is one process.
        process: Bytes of a process without model and data; None: they are measured.
    """
    federation = federate_bare(recipe, base, names, here)
    num_users = len(names) if here is None else len(here)
    trainers = 1 if federation.clients.method.placement.pooled else num_users  # pooled: one model on all users' data
    return rehearse(
        federation,
        trainers=trainers,
        participants=largest_round(participation, len(names)),  # all may be in this process
        store=recipe.runtime.store,
        checkpointed=recipe.runtime.gradient_checkpointing,
        process_bytes=process_bytes("text", base.device) if process is None else process,
    )


def _base_flops(recipe: Recipe, base: Base, names: tuple[str, ...]) -> BaseFlops:
    """Return a function that gives the FLOPs of the base alone in a client-level mixture, without adapters and router.

    They are what the base takes under FedAvg, one pass per step. If the components of the mixture are trained
    independently, each is a whole model with a pass of its own, so the FLOPs are multiplied by their number.

    Args:
        recipe: The recipe; its method has a mixture.
        base: The base; weights are not needed.
        names: Names of the users.

    Returns:
        Function from a user's local work, which is the same for all users of a language model and is ignored, to the
        FLOPs of one token's forward pass and of a round.
    """
    fedavg = with_method(recipe_for_one_user(recipe, largest), "fedavg")
    user = count_users(federate_bare(fedavg, base, names[:1]), names[:1])[0]
    mixture = make(recipe.method.name, **recipe.method.settings).placement.mixture
    num_models = mixture.clusters if mixture is not None and mixture.trains_independently else 1
    forward_flops = replace(user.forward, lora=0.0, router=0.0) * num_models
    round_flops = replace(user.round, lora=0.0, router=0.0) * num_models
    return lambda load: (forward_flops, round_flops)


# ---------------------------------------------------------------- comparison with the paper


def compare_with_paper(recipe: Recipe, base: Base) -> list[Difference]:
    """Return Table 3 of the CoMiGS paper for this base and these adapters.

    It compares CoMiGS-1G1S with FedAvg, for one user with the largest rank of the recipe.

    Args:
        recipe: The recipe; its method is replaced.
        base: The base; weights are not needed.
    """
    recipe = recipe_for_one_user(recipe, largest)
    costs: dict[str, UserCost] = {}
    accounts: dict[str, Account] = {}
    for method in ("fedavg", "comigs-1g1s"):
        federation = federate_bare(with_method(recipe, method), base, ("anybody",))
        (cost,) = count_users(federation, ("anybody",))
        costs[method] = cost
        accounts[method] = Account(
            forward_flops=cost.forward.total * recipe.training.context,
            round_flops=cost.round.total,
            # Parameters and both moments of AdamW, in the dtype of the state.
            state_bytes=cost.trainable_parameters * 3 * federation.clients.state.rows.element_size(),
            upload_bytes=cost.upload_bytes,
        )
    parameters = costs["comigs-1g1s"].parameters  # by role
    sizes = Sizes(attention=parameters["attention"], expert=parameters["generalist"], router=parameters["router"])
    return table3_columns(sizes, recipe.training.context, fedavg=accounts["fedavg"], comigs=accounts["comigs-1g1s"])


FREE_SHARE = {"cuda": 0.9}
"""Usable fraction of a GPU's free memory. The rest allows for gaps of its allocator; an estimate, not measured."""


def fit(recipe: Recipe, run_data: RunData) -> PassSize:
    """Return how many users, and sequences of each, go through the model in one pass (``users_per_step: auto``).

    These are the default numbers, or the largest smaller ones that fit into memory. Each process chooses for its own
    users.

    Args:
        recipe: The recipe.
        run_data: Base and data of the run, which are in memory already.

    Raises:
        RecipeError: One sequence of one user does not fit.
    """
    for_counting = with_method(recipe, recipe.method.name)  # the same method, not compiled
    rehearsal = _rehearse(for_counting, run_data, recipe.training.participation)
    device = rehearsal.steps.model.device
    # `machine.total_bytes` includes base, data and process. They are not in free memory any more, so they are added.
    loaded_bytes = rehearsal.weights_bytes + rehearsal.process_bytes + rehearsal.data_bytes
    usable_bytes = int(FREE_SHARE.get(device.type, 1.0) * free_bytes(device)) + loaded_bytes
    machine, chosen = peak_memory(rehearsal), rehearsal.steps.pass_size
    if machine.total_bytes > usable_bytes:
        smaller = smaller_pass(rehearsal, machine, usable_bytes)
        if smaller is None:
            needs = f"needs {machine.total_bytes / 1e9:,.2f} GB, but {usable_bytes / 1e9:,.2f} GB are free on {device}"
            raise RecipeError(f"runtime.users_per_step: auto: {needs}; {NONE_FITS}")
        chosen = smaller
    logger.info("users_per_step: auto: %d users with %d sequences or samples each", chosen.users, chosen.sequences)
    return chosen


def _rehearse(recipe: Recipe, run_data: RunData, participation: Participation) -> Rehearsal:
    """Return a federation of this process's users on fake tensors, to measure a pass.

    Fake tensors have shapes but no data, so that measuring needs neither the memory nor the time of the pass.

    Args:
        recipe: The recipe.
        run_data: Base and data of the run.
        participation: Fraction or names of the participants.
    """
    kind, own_users, all_names = kind_of(recipe), run_data.present, run_data.users.names
    if not kind.needs_base:  # nets that train on samples; for them `run_data.common` is the task, a Population
        return rehearse_nets(recipe, replace(run_data.common, users=own_users), participation, all_names)
    # Passes over language data, conversations too, are measured on text that costs as much.
    if own_users.in_memory:
        # Too small users and the note on costs are for plans without a run. Here the data was read and checked already.
        (text_recipe,), _too_small, _note = kind.as_text([recipe], len(own_users))
    else:  # users on disk: text of equal cost follows from their stored sizes, without loading their data
        (text_recipe,) = conversations_as_text(kind, [recipe], own_users)
    assert run_data.base is not None
    return rehearse_text(text_recipe, run_data.base, tuple(all_names), participation, run_data.here)


# ---------------------------------------------------------------- a limit of memory


RETURNED_GAPS = 0.2
"""As :data:`comingle.cost.memory.ALLOCATOR_GAPS`, if freed blocks are returned to the system (``runtime.memory``)."""

LIBRARY_BYTES = 60_000_000
"""Memory that libraries keep on a CPU beside live tensors, mostly the matrix library's; measured with SmolLM2-135M."""

_SLOWER = {"checkpointing": 4 / 3, "halved pass": 1.3, "quantised": 1.05}
"""Factors of the time of a step. Checkpointing repeats the forward pass, a quarter of the work more. The others are
measured with SmolLM2-135M on two cores: passes of 128 in place of 512 tokens take 1.75 times the time."""


def memory_choices(
    recipe: Recipe, names: tuple[str, ...], *, here: Sequence[int] | None = None, process: int | None = None
) -> Iterator[MemoryChoice]:
    """Yield settings with which a language model needs less memory, those that change the model the least first.

    Smaller passes and checkpointing, which change results by rounding if at all, are ordered by time. Then follow
    bfloat16 for a base in float32, 8 bits and 4 bits, each with the same passes. Keys that the recipe sets are not
    changed.

    Args:
        recipe: The recipe.
        names: Names of the users of all processes.
        here: Index in ``names`` of a client's user, if it is on a machine of its own; None in a simulation.
        process: Bytes of a process without model and data; None: they are measured.

    Raises:
        RecipeError: The recipe is not for a language model with adapters.
        BaseModelError: The base cannot be used.
    """
    kind = kind_of(recipe)
    if not kind.needs_base or make(recipe.method.name, **recipe.method.settings).placement.mixture is not None:
        raise RecipeError(f"runtime.memory: got {recipe.runtime.memory!r}; allowed: for language models with adapters")

    @cache
    def traces(*changes: tuple[str, Any]) -> _Needs:
        return _Needs(recipe.with_changes(dict(changes)), names, here=here, process=process)

    for format_changes, bits, slowdown in _number_formats(recipe):
        choices, quantised = [], {"quantise": bits} if bits else {}
        saved = _saved_bytes(recipe.with_changes(format_changes | quantised)) if bits else 0
        for checkpointing in _checkpointing(recipe):
            needs, factor = traces(*(format_changes | checkpointing).items()), slowdown
            factor *= _SLOWER["checkpointing"] if checkpointing else 1
            changes = format_changes | quantised | checkpointing
            needed = needs.bytes_at(needs.pass_size) - saved
            choices.append(MemoryChoice(changes=changes, needed_bytes=needed, slowdown=factor))
            for size in _halved_passes(needs.pass_size) if _is_free(recipe, "micro_batch") else ():
                factor *= _SLOWER["halved pass"]
                of_pass = {"runtime.micro_batch": size.sequences}
                if here is None:  # a client trains one user at a time anyway
                    of_pass["runtime.users_per_step"] = size.users
                needed = needs.bytes_at(size) - saved
                choices.append(MemoryChoice(changes=changes | of_pass, needed_bytes=needed, slowdown=factor))
        yield from sorted(choices, key=lambda choice: choice.slowdown)


def _is_free(recipe: Recipe, key: str) -> bool:
    """Return whether the recipe leaves a key of ``runtime`` to :func:`memory_choices`."""
    return key not in recipe.runtime.model_fields_set


def _checkpointing(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Yield the changes for passes without gradient checkpointing and, unless the recipe decides that, with it."""
    yield {}
    if _is_free(recipe, "gradient_checkpointing"):
        yield {"runtime.gradient_checkpointing": True}


def _number_formats(recipe: Recipe) -> Iterator[tuple[dict[str, Any], str, float]]:
    """Yield changes of the number format with the format of quantised weights, and factors of time.

    They go from the recipe's own to the smallest. The format of quantised weights is empty where they stay as they are.
    """
    device = resolve_device(recipe.runtime.device)
    dtype = resolve_dtype(recipe.runtime.dtype, device)
    changes: dict[str, Any] = {}
    if _is_free(recipe, "native_code") and device.type == "cpu":  # native code keeps fewer tensors
        changes["runtime.native_code"] = True
    if _is_free(recipe, "compile"):  # the compiler alone takes 70 MB
        changes["runtime.compile"] = False
    yield changes, "", 1.0
    if _is_free(recipe, "dtype") and dtype == torch.float32 and device.type in ("cpu", "cuda"):
        changes = changes | {"runtime.dtype": "bfloat16"}
        yield changes, "", 1.0
    if "quantise" not in recipe.model_fields_set:
        for bits in CODES:
            yield changes, bits, _SLOWER["quantised"]


def _saved_bytes(recipe: Recipe) -> int:
    """Return the bytes that a base needs less when it is quantised as in the recipe.

    One weight at a time is unpacked.
    """
    runtime = recipe.runtime
    load = partial(load_skeleton, recipe.base, dtype=runtime.dtype, device=runtime.device, attention=runtime.attention)
    base, packed = load(), load(quantise=recipe.quantise)
    unpacked = max(weight_shape(m).numel() for m in packed.model.modules() if isinstance(m, QuantisedLinear))
    return storage_bytes(base.model) - storage_bytes(packed.model) - unpacked * base.dtype.itemsize


_TRACED_LAYERS = (1, 2)
"""Numbers of decoder layers that are traced. As layers are alike, the peak of the passes and that of the update are
affine in their number."""


class _Needs:
    """Memory that a recipe needs by the size of a pass, if freed blocks are returned to the system.

    A trace of 30 layers takes ten seconds, so the memory follows from traces of few.
    """

    def __init__(self, recipe: Recipe, names: tuple[str, ...], *, here: Sequence[int] | None, process: int | None):
        """Prepare the traces.

        Args:
            recipe: The recipe.
            names: Names of the users of all processes.
            here: Index of a client's user, as in :func:`memory_choices`.
            process: Bytes of a process without model and data; None: they are measured.
        """
        runtime = recipe.runtime
        settings: dict[str, Any] = {"dtype": runtime.dtype, "device": runtime.device, "attention": runtime.attention}
        load = partial(load_skeleton, recipe.base, **settings, quantise=recipe.quantise)
        self._num_layers = len(decoder_layers(load().model))
        traced = _TRACED_LAYERS if self._num_layers > max(_TRACED_LAYERS) else (self._num_layers,)
        (text_recipe,), _, _ = kind_of(recipe).as_text([recipe], len(names))
        text_recipe = with_method(text_recipe, recipe.method.name)
        self._num_users = len(names) if here is None else len(here)
        self._alone, self._device = here is not None, resolve_device(runtime.device)
        self._rehearsals = {
            layers: rehearse_text(text_recipe, load(layers=layers), names, here=here, process=process)
            for layers in traced
        }

    @property
    def pass_size(self) -> PassSize:
        """The size of a pass by the recipe's own settings, with no more users than there are."""
        size = next(iter(self._rehearsals.values())).steps.pass_size
        return replace(size, users=min(size.users, self._num_users))

    def bytes_at(self, size: PassSize) -> int:
        """Return the bytes of memory that the run needs with passes of ``size``."""
        cost = self._cost_at(size)
        if self._device.type != "cpu":
            return cost.total_bytes
        # With `runtime.memory` freed blocks are returned to the system: the gaps are smaller than `cost` assumes.
        bytes_without_gaps = cost.total_bytes - cost.allocator_bytes
        gap_bytes = int(RETURNED_GAPS * cost.pass_bytes)
        return bytes_without_gaps + gap_bytes + LIBRARY_BYTES

    def _cost_at(self, size: PassSize) -> MemoryCost:
        """Return the cost of passes of ``size``, extrapolated from models with 1 and 2 layers to all layers."""
        costs = [peak_memory(rehearsal, alone=self._alone, pass_size=size) for rehearsal in self._rehearsals.values()]
        if len(costs) == 1:  # a small model, rehearsed with all its layers
            return costs[0]
        few_layers, more_layers = self._rehearsals.keys()  # 1 and 2
        bytes_with_few, bytes_with_more = asdict(costs[0]), asdict(costs[1])
        extrapolated: dict[str, int] = {}
        for name, num_bytes in bytes_with_few.items():
            added_bytes = (self._num_layers - few_layers) * (bytes_with_more[name] - num_bytes)
            extrapolated[name] = num_bytes + added_bytes // (more_layers - few_layers)
        return MemoryCost(**extrapolated)


def choose_within(
    recipe: Recipe, limit: int, names: tuple[str, ...], *, here: Sequence[int] | None = None, process: int | None = None
) -> MemoryChoice:
    """Return the first settings with which a run fits into a limit.

    Args:
        recipe: The recipe.
        limit: Memory that the run may use, in bytes.
        names: Names of the users of all processes.
        here: Index of a client's user, as in :func:`memory_choices`.
        process: Bytes of a process without model and data; None: they are measured.

    Raises:
        RecipeError: None fits, or the recipe is not for a language model with adapters.
        BaseModelError: The base cannot be used.
    """
    tried: list[MemoryChoice] = []
    for choice in memory_choices(recipe, names, here=here, process=process):
        if choice.needed_bytes <= limit:
            return choice
        tried.append(choice)
    smallest = min(tried, key=lambda choice: choice.needed_bytes)
    raise RecipeError(
        f"runtime.memory: got {recipe.runtime.memory!r}; the smallest settings are {smallest.describe(limit)}; "
        "use a smaller base, training.context or adapters.rank"
    )


def _plan_within_memory(
    recipe: Recipe,
    methods: Sequence[str],
    *,
    users: int | None,
    participants: Sequence[str],
    for_all: Mapping[str, object],
) -> Plan:
    """Return the costs of a recipe with the settings that ``runtime.memory`` chooses, and all settings to choose from.

    If none fits, the costs are those of the smallest. Arguments and exceptions are those of :func:`plan`.
    """
    if len(methods) > 1:
        got = f"runtime.memory: got {recipe.runtime.memory!r} with {len(methods)} methods"
        raise RecipeError(f"{got}; allowed: with one, as settings are chosen for each")
    variant = with_method(recipe, methods[0] if methods else recipe.method.name, for_all)
    check_recipe(variant)
    names = tuple(participants) or user_names(recipe, users)
    here = [_largest_user(variant, names)] if participants else None
    process = CLIENT_BYTES if participants else None
    limit, choices = memory_limit(recipe), tuple(memory_choices(variant, names, here=here, process=process))
    fitting = (choice for choice in choices if choice.needed_bytes <= limit)
    settings = next(fitting, min(choices, key=lambda choice: choice.needed_bytes))
    chosen_recipe = with_chosen_settings(recipe, settings.changes | {"runtime.memory": None})
    costs = plan(chosen_recipe, methods, users=users, participants=participants, for_all=for_all)
    return replace(costs, limit=limit, choices=choices)


def _largest_user(recipe: Recipe, names: Sequence[str]) -> int:
    """Return the index of the user with the most parameters: the most specialists, and of these the largest rank."""
    recipe = recipe.for_users(names)
    specialists = make(recipe.method.name, **recipe.method.settings).placement.specialists_of(len(names))
    ranks = ranks_of(recipe.adapters, len(names)).tolist()
    return max(range(len(names)), key=lambda user: (specialists[user], ranks[user]))


def main() -> None:
    """Choose settings for the recipe on standard input, and print them: for a client, which stays small itself.

    Input and output are JSON: the recipe, the limit, the users, the client's index and the bytes of its process; and a
    :class:`MemoryChoice`, or an error.
    """
    asked = json.load(sys.stdin)
    try:
        recipe = parse_recipe(asked["recipe"])
        choice = choose_within(
            recipe, asked["limit"], tuple(asked["names"]), here=asked["here"], process=asked["process"]
        )
        print(json.dumps(asdict(choice) | {"text": choice.describe(asked["limit"])}))
    except ComingleError as error:
        print(json.dumps({"error": str(error)}))


if __name__ == "__main__":
    main()
