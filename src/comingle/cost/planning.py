"""From a recipe to its plan: the costs of every method before training, and how to make them fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch

from comingle.config import Recipe
from comingle.config.settings import EVERYBODY, MEMORY, protects_examples
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
from comingle.data.populations import LazyPopulation, names_of
from comingle.data.samples.reading import Population
from comingle.data.samples.samples import SPLITS
from comingle.data.text.streams import UserData
from comingle.methods import make, settings_beside
from comingle.models.base import Base, logger
from comingle.models.generation import check_places
from comingle.models.hardware import free_bytes
from comingle.models.quantised import packed_parameters
from comingle.privacy.accounting import sample_size
from comingle.runs.api import without_sums
from comingle.runs.given import HANDED_OVER, NOTHING
from comingle.runs.session import build, prepare
from comingle.training.backends.local import InProcess, federate
from comingle.training.client import Clients, batch_size
from comingle.training.kinds.base import RunData, adapt_base, check_recipe, kind_of
from comingle.training.kinds.text import TextBatchSource
from comingle.training.plan import make_plan, planned_releases, server_mechanisms
from comingle.training.settings import Portions, portions, round_sizes
from comingle.training.storage.disk import check_storable
from comingle.utils.errors import DataError, RecipeError

Participation = float | Sequence[Sequence[str]]
"""A fraction of the users, or the names of those who take part in each round."""

NONE_FITS = "no smaller pass fits; take a smaller base, fewer users or a smaller adapters.rank"
_USERS, _SEQUENCES = "runtime.users_per_step", "runtime.micro_batch"


def with_method(recipe: Recipe, name: str, for_all: Mapping[str, object] = MappingProxyType({})) -> Recipe:
    """The recipe with another method and its defaults; ``for_all`` are settings for whichever method has them.

    Who takes part in which round does not change what a round costs one user. Language models are not compiled.
    """
    settings = settings_beside(name, recipe.method.name, recipe.method.settings, for_all)
    changes: dict[str, Any] = {"method": {"name": name, **settings}, "training.participation": 1.0}
    if kind_of(recipe).needs_base:  # compiled code for nets takes what is known, and little time
        changes["runtime.compile"] = False
    return recipe.with_changes(changes)


def with_privacy(
    cost: MethodCost, recipe: Recipe, names: Sequence[str], participation: Participation, *, whole: Recipe | None = None
) -> MethodCost:
    """The costs with what a run reveals, where the recipe has privacy; it depends on who takes part how often.

    ``whole`` is the recipe as it was, where ``recipe`` has other text that costs as much.

    Raises:
        RecipeError: so few take part that the recipe's rule of aggregation cannot be used.
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
    if protects_examples(recipe.privacy.mechanism):  # epsilon follows from how many a user has: their data is read
        read = (whole or recipe).with_changes({"training.participation": participation})
        mechanisms = build(read, prepare(read)).server.mechanisms
    account = next((one.account for one in mechanisms if one.account is not None), None)
    forecast = {} if account is None else account.forecast(planned_releases(plan, names))
    return replace(cost, privacy=forecast)


def check_count(users: int | None) -> None:
    """Whether there can be so many users.

    Raises:
        RecipeError: there cannot.
    """
    if users is not None and users < 1:
        raise RecipeError(f"--users: got {users}; allowed: whole numbers from 1")


def largest_round(participation: Participation, users: int) -> int:
    """How many of so many users take part in the round in which most do."""
    if isinstance(participation, float | int):
        return sample_size(participation, users)
    return max(len(set(members)) for members in participation)


def summarise(stage: Rehearsal, users: Sequence[UserCost], free: int, *, keep: int) -> MethodCost:
    """A method's costs, its memory among them; ``keep`` is how many checkpoints a run keeps."""
    method, machine = stage.federation.clients.method, memory(stage)
    portions, fits = stage.steps.portions, machine.total_bytes <= free
    return MethodCost(
        method=method.name,
        users=tuple(users),
        exchanges=count_exchanges(stage.federation),
        users_per_step=min(portions.users, stage.trainers * method.placement.copies),
        micro_batch=portions.sequences,
        machine=machine,
        own_device=memory(stage, alone=True),
        fits=fits,
        advice="" if fits else advise(stage, machine, free),
        store_bytes=_store_bytes(stage, keep),
    )


def _store_bytes(stage: Rehearsal, keep: int) -> int:
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
    """The largest pass that fits, as settings of the recipe; or that none does."""
    smaller = smaller_pass(stage, machine, free)
    return NONE_FITS if smaller is None else f"{_USERS}={smaller.users} {_SEQUENCES}={smaller.sequences}"


def smaller_pass(stage: Rehearsal, machine: MemoryCost, free: int) -> Portions | None:
    """The largest pass that fits where ``machine``, what the chosen one needs, does not."""
    if machine.fixed_bytes > free:
        return None
    smaller = _smaller(stage.steps.portions)
    return next((one for one in smaller if memory(stage, portions=one).total_bytes <= free), None)


def _smaller(now: Portions) -> Iterator[Portions]:
    """First fewer users, then fewer sequences of one user: half as many each time."""
    while now.users * now.sequences > 1:
        now = replace(now, users=now.users // 2) if now.users > 1 else replace(now, sequences=now.sequences // 2)
        yield now


def plan_nets(recipes: Sequence[Recipe], users: int | None = None, participation: Participation = 1.0) -> Plan:
    """The costs of one population under several methods; ``users`` replaces their number.

    Of who takes part (``participation``) privacy alone depends.

    Samples are read, or made, as their numbers and shapes decide on the costs; nothing is trained.

    Raises:
        RecipeError: a method or a setting is wrong.
        DataError: somebody's samples cannot be read.
    """
    if users is not None:
        check_count(users)
        recipes = [kind_of(recipe).of_users(recipe, users) for recipe in recipes]
    population = prepare(recipes[0]).common
    plain = rehearse_nets(with_method(recipes[0], "fedavg"), population)
    clients = plain.federation.clients
    base, free = measured_base(plain), free_bytes(clients.model.device)
    names = tuple(names_of(population.users))
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
    """Everything about one method; ``base`` is the net alone."""
    stage = rehearse_nets(recipe, population, participation)
    users = count_stacked(stage, loads_of(stage.federation.clients, population), base)
    return summarise(stage, users, free, keep=recipe.checkpoints.keep)


def rehearse_nets(
    recipe: Recipe,
    population: Population,
    participation: Participation = EVERYBODY,
    everybody: Sequence[str] | None = None,
) -> Rehearsal:
    """The federation of users of nets without their data; ``everybody`` as in :func:`bare_nets`."""
    federation = bare_nets(recipe, population, everybody)
    clients = federation.clients
    trainers = 1 if clients.method.placement.pooled else len(population.users)
    process_size = process_bytes("samples", clients.model.device)
    return rehearse(
        federation,
        trainers,
        present=largest_round(participation, len(population.users if everybody is None else everybody)),
        store=recipe.runtime.store,
        data_bytes=data_bytes(population, clients.model.dtype),
        reads_cohorts=isinstance(population.users, LazyPopulation),
        process_bytes=process_size,
    )


def loads_of(clients: Clients, population: Population) -> dict[str, Load]:
    """Every user's local work by name; a pooled one has it all."""
    users: Iterable[tuple[str, Any]] = ((user.name, user) for user in population.users)
    if clients.method.placement.pooled:
        users = [(f"all {len(population.users)} users as one", clients.trainers[0])]
    loads, known = dict[str, Load](), dict[Load, Load]()
    for name, user in users:
        sizes, swept = clients.feed.batch_sizes(user)
        load = Load(sizes=sizes, epochs=clients.plan.training.local_epochs, sweeps=len(swept), swept=sum(swept))
        loads[name] = known.setdefault(load, load)
    return loads


def data_bytes(population: Population, dtype: torch.dtype) -> int:
    """Everybody's samples, once as they were read and once as batches are gathered from them.

    Of those who lie in a file sizes are known: all splits have the shapes of the first user's.
    """
    users, total = population.users, 0
    if isinstance(users, LazyPopulation) and users.sizes is not None:
        one = data_bytes(replace(population, users=[users[0]]), dtype)
        return int(one * users.sizes.sum() / users.sizes[0].sum())
    for part in (user.split(split) for user in users for split in SPLITS):
        total += part.inputs.nbytes + part.targets.nbytes + part.inputs.numel() * dtype.itemsize
        total += part.targets.numel() * (dtype if part.targets.is_floating_point() else part.targets.dtype).itemsize
    return total


def plan(
    recipe: Recipe,
    methods: Sequence[str] = (),
    *,
    users: int | None = None,
    for_all: Mapping[str, object] = MappingProxyType({}),
) -> Plan:
    """The costs of a recipe's method, or of several; ``users`` is their number where the text is out of reach.

    The recipe's own method keeps its settings, another has its defaults; ``for_all`` goes to whichever has such a
    setting.

    Raises:
        RecipeError: a method or a setting is wrong.
        BaseModelError: the base cannot be used.
        DataError: who the users are cannot be found out, or text that is here is too little for a run.
    """
    present = recipe.training.participation
    recipes = [with_method(recipe, name, for_all) for name in methods or [recipe.method.name]]
    for one in recipes:
        check_recipe(one)
    if not (kind := kind_of(recipe)).needs_base:
        return plan_nets(recipes, users, present)
    check_count(users)
    _check_given(recipe, users)
    _check_examples(recipe, users)
    whole, runtime = recipes, recipe.runtime
    about = {"dtype": runtime.dtype, "device": runtime.device, "attention": runtime.attention}
    skeleton = cache(partial(load_skeleton, recipe.base, **about, quantise=recipe.quantise))
    base = skeleton()
    check_places("training.context", recipe.training.context, base.model)
    recipes, small, note = as_text(kind, recipes, users, skeleton)
    recipe = recipes[0]
    names = tuple(name for name in user_names(recipe, users) if name not in small)
    free, training = free_bytes(base.device), recipe.training
    costs = [
        with_privacy(method_cost(one, base, names, free, present), one, names, present, whole=was)
        for one, was in zip(recipes, whole, strict=True)
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


def _check_given(recipe: Recipe, users: int | None) -> None:
    """What a program handed over is not here; costs of a base by name need no more than the number of users."""
    NOTHING.check_base(recipe)
    if recipe.data.given and users is None:
        raise DataError(f"{HANDED_OVER}; to count without their data, say how many users there are: --users N")


def _check_examples(recipe: Recipe, users: int | None) -> None:
    """How much noised steps reveal of an example follows from how many each user has."""
    if users is not None and recipe.privacy is not None and protects_examples(recipe.privacy.mechanism):
        told = "with privacy.mechanism: example users' data is read, as epsilon follows from how many examples each has"
        raise RecipeError(f"--users: got {users}; {told}; leave it out")


def user_names(recipe: Recipe, users: int | None = None) -> tuple[str, ...]:
    """Who the users are, without reading text where that can be helped.

    Raises:
        DataError: they are groups of rows that cannot be read.
    """
    if users is not None:
        return tuple(f"user {i + 1}" for i in range(users))
    return kind_of(recipe).names_of(recipe)


# ---------------------------------------------------------------- one method


def federate_bare(recipe: Recipe, base: Base, names: tuple[str, ...], here: Sequence[int] | None = None) -> InProcess:
    """The federation of a recipe over a base without weights; users have names and no text.

    Of several processes only those are built who are ``here``, by number, in adapters as wide as everybody's. Where all
    users are alike, only as many as share a pass are.
    """
    method = make(recipe.method.name, **recipe.method.settings)
    plan = make_plan(recipe, method, names).updated("runtime", store=MEMORY)
    placement = method.placement
    alike = isinstance(placement.specialists, int) and isinstance(recipe.adapters.rank, int)
    numbers = range(len(names)) if here is None else here
    if alike and not placement.pooled:
        numbers = numbers[: portions(plan, base.device, plan.training.batch_size).users]
    people = [_nobody(names[number]) for number in numbers]
    trainers = [_nobody("everyone")] if placement.pooled else people
    if placement.mixture is not None and not placement.mixture.trains_apart:
        model = bare_mixture(recipe, base, method, len(trainers))
    else:
        unlike = not alike and not placement.pooled  # then everybody is listed
        among = len(names) if unlike else len(trainers)
        tokens = among * plan.iterations * plan.training.batch_size * plan.training.context
        model = adapt_base(recipe, base, method, among, tokens)
        model = model.only(numbers) if unlike else model
    feed = TextBatchSource(trainers, plan, batch_size(plan, len(people)))
    return federate(Clients(model, plan, trainers=trainers, users=people, feed=feed, reads=False))


def _nobody(name: str) -> UserData:
    nothing = torch.empty(0, dtype=torch.int32)
    return UserData(name=name, train=nothing, valid=nothing, test=nothing)


def method_cost(
    recipe: Recipe, base: Base, names: tuple[str, ...], free: int, participation: Participation = EVERYBODY
) -> MethodCost:
    """Everything about one method; ``free`` are the bytes that the machine has left."""
    stage = rehearse_text(recipe, base, names, participation)
    if stage.federation.clients.method.placement.mixture is None:
        users = count_users(stage.federation, names)
    else:
        loads = dict.fromkeys(names, text_load(stage.federation.clients))
        users = count_stacked(stage, loads, _language_base(recipe, base, names))
    return summarise(stage, users, free, keep=recipe.checkpoints.keep)


def rehearse_text(
    recipe: Recipe,
    base: Base,
    names: tuple[str, ...],
    participation: Participation = EVERYBODY,
    here: Sequence[int] | None = None,
) -> Rehearsal:
    """The federation of users of a language model without text; ``base`` may have weights or none.

    Of several processes that of those who are ``here``, all of whom may take part in one round.
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


def _language_base(recipe: Recipe, base: Base, names: tuple[str, ...]) -> BaseFlops:
    """The base's own part of what FedAvg's adapters cost: a pass a step over the same weights for each model."""
    fedavg = with_method(without_sums(recipe), "fedavg")
    user = count_users(federate_bare(fedavg, base, names[:1]), names[:1])[0]
    mixture = make(recipe.method.name, **recipe.method.settings).placement.mixture
    models = mixture.clusters if mixture is not None and mixture.trains_apart else 1
    forward, passes = (replace(spent, lora=0.0, router=0.0) * models for spent in (user.forward, user.round))
    return lambda load: (forward, passes)


# ---------------------------------------------------------------- beside the paper


def compare_with_paper(recipe: Recipe, base: Base) -> list[Difference]:
    """Table 3 of the paper for this base and these adapters: CoMiGS-1G1S against FedAvg, one user of the full rank."""
    recipe, rank = without_sums(recipe), recipe.adapters.rank
    one = recipe if isinstance(rank, int) else recipe.with_changes({"adapters.rank": max(rank)})
    accounts, parameters = [], []
    for name in ("fedavg", "comigs-1g1s"):
        federation = federate_bare(with_method(one, name), base, ("anybody",))
        (user,) = count_users(federation, ("anybody",))
        # Parameters and both moments of AdamW, as they are kept.
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
"""How much of a GPU's free memory is planned with: its allocator leaves gaps, which were never measured."""


def fit(recipe: Recipe, materials: RunData) -> Portions:
    """How many users, and sequences of each, go through the model at once: by default, or fewer where that is too much.

    Of several processes each asks for its own users. Base and data are loaded: what they take is not free any more.

    Raises:
        RecipeError: one sequence of one user is too much.
    """
    stage = _rehearsed(with_method(recipe, recipe.method.name), materials, recipe.training.participation)
    device = stage.steps.model.device
    here = stage.weights_bytes + stage.process_bytes + stage.data_bytes
    free = int(FREE_SHARE.get(device.type, 1.0) * free_bytes(device)) + here
    machine, chosen = memory(stage), stage.steps.portions
    if machine.total_bytes > free:
        smaller = smaller_pass(stage, machine, free)
        if smaller is None:
            needs = f"needs {machine.total_bytes / 1e9:,.2f} GB, {free / 1e9:,.2f} are free on {device}"
            raise RecipeError(f"runtime.users_per_step: auto: {needs}; {NONE_FITS}")
        chosen = smaller
    logger.info("users_per_step: auto: %d users with %d sequences or samples each", chosen.users, chosen.sequences)
    return chosen


def _rehearsed(recipe: Recipe, materials: RunData, participation: Participation) -> Rehearsal:
    kind, users, everybody = kind_of(recipe), materials.present, names_of(materials.users)
    if not kind.needs_base:
        return rehearse_nets(recipe, replace(materials.common, users=users), participation, everybody)
    (as_text,) = (
        as_long(kind, [recipe], users) if isinstance(users, LazyPopulation) else kind.as_text([recipe], len(users))[0]
    )
    assert materials.base is not None
    return rehearse_text(as_text, materials.base, tuple(everybody), participation, materials.here)
