"""Cost plan of a recipe: costs of every method before training, and settings that make them fit into memory."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch

from comingle.config import Recipe, parse_recipe
from comingle.config.settings import ALL_USERS, MEMORY, largest, protects_examples
from comingle.cost.counts import (
    BaseFlops,
    LocalWork,
    count_exchanges,
    count_stacked,
    count_users,
    local_work_on_text,
    measured_base,
)
from comingle.cost.memory import (
    CLIENT_BYTES,
    Rehearsal,
    Writes,
    conversations_as_text,
    measured_process_bytes,
    peak_memory,
    rehearse,
    storage_bytes,
    store_bytes,
    text_of_equal_cost,
    user_bytes,
)
from comingle.cost.records import (
    Account,
    BaseCost,
    Difference,
    Flops,
    MemoryChoice,
    MemoryChoices,
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
from comingle.models.base import Base
from comingle.models.generation import check_context_length
from comingle.models.hardware import free_bytes, resolve_device, resolve_dtype
from comingle.models.injection import ranks_of
from comingle.models.layouts import decoder_layers
from comingle.models.lora import weight_shape
from comingle.models.quantised import CODES, QuantisedLinear, packed_parameters
from comingle.privacy.accounting import sample_size
from comingle.runs.api import recipe_for_one_user
from comingle.runs.given import NOTHING, USERS_MISSING
from comingle.runs.guard import is_guarded
from comingle.runs.session import (
    build,
    chooses_specialists,
    memory_limit,
    prepare,
    with_chosen_settings,
)
from comingle.training.backends.local import InProcess, federate
from comingle.training.client import Clients, batch_size
from comingle.training.kinds.base import RunData, adapt_base, check_recipe, kind_of
from comingle.training.kinds.text import TextBatchSource
from comingle.training.plan import make_plan, planned_releases, server_mechanisms
from comingle.training.settings import PassSize, pass_size, round_sizes
from comingle.training.storage.disk import check_storable
from comingle.utils.errors import ComingleError, DataError, RecipeError, list_names
from comingle.utils.records import logger

Participation = float | Sequence[Sequence[str]]
"""Fraction of the users in each round, or the names of each round's participants."""

NONE_FITS = "no smaller pass fits; use a smaller base, fewer users or a smaller adapters.rank"
"""Advice if even passes of one user with one sequence need more memory than there is."""

_USERS, _SEQUENCES = "runtime.users_per_step", "runtime.micro_batch"


def with_method(recipe: Recipe, name: str, for_all: Mapping[str, object] = MappingProxyType({})) -> Recipe:
    """Return the recipe with a method, changed so that the method's costs can be counted.

    All users take part in every round, as one user's costs per round do not depend on participation. Language models
    are not compiled, as that takes long.

    Args:
        recipe: Settings of the run.
        name: Name of the method. The recipe's own method keeps the recipe's settings; others get their defaults.
        for_all: Settings for every method that has them, such as ``{"specialists": 2}``.
    """
    settings = settings_in_comparison(name, recipe.method.name, recipe.method.settings, for_all)
    changes: dict[str, Any] = {"method": {"name": name, **settings}, "training.participation": 1.0}
    is_language_model = kind_of(recipe).needs_base
    if is_language_model:
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
    """Return a method's costs with a forecast of the privacy budget, if the recipe has privacy.

    Also check that every round has enough participants for the privacy mechanism and the aggregation rule.

    Args:
        cost: Costs of a method.
        recipe: The recipe whose costs they are. Its data may be text that stands in for the users' conversations.
        names: Names of the users.
        participation: Fraction of the users in each round, or the names of each round's participants.
        with_real_data: The recipe before its data was replaced; None if it was not.

    Raises:
        RecipeError: Rounds have too few participants.
    """
    has_plain_mean = recipe.privacy is None and recipe.aggregation.is_mean
    if has_plain_mean:  # nothing to forecast or to check
        return cost
    recipe = recipe.with_changes({"training.participation": participation})
    method = make(recipe.method.name, **recipe.method.settings)
    plan = make_plan(recipe, method, names)
    mechanisms = server_mechanisms(plan, names)
    if method.shared:
        sizes = round_sizes(plan, names)
        for mechanism in mechanisms:
            # True skips the check for unequal LoRA ranks: only the numbers of participants are checked here.
            mechanism.check_rounds(sizes, same_ranks=True)
    if recipe.privacy is None:
        return cost
    if protects_examples(recipe.privacy.mechanism):
        # Epsilon depends on how many examples each user has, so the users' data is read.
        recipe_to_read = recipe if with_real_data is None else with_real_data
        recipe_to_read = recipe_to_read.with_changes({"training.participation": participation})
        mechanisms = build(recipe_to_read, prepare(recipe_to_read)).server.mechanisms
    for mechanism in mechanisms:
        if mechanism.account is not None:  # None: the mechanism adds no noise, so it has no epsilon
            return replace(cost, privacy=mechanism.account.forecast(planned_releases(plan, names)))
    return replace(cost, privacy={})  # no mechanism adds noise


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
    """Return all costs of a method: the given costs of its users, its memory and its bytes on disk.

    Args:
        rehearsal: The run's federation, on fake tensors (shapes without values).
        users: Costs of the users.
        free: Free memory in bytes, with which the run's memory is compared.
        kept_checkpoints: Number of checkpoints that a run keeps.
    """
    method = rehearsal.federation.clients.method
    if is_guarded(rehearsal.federation.clients.plan.evaluation, method):  # each user is trained alone, too
        users = [replace(user, training=user.training * 2, round=user.round * 2) for user in users]
    pass_size = rehearsal.steps.pass_size
    num_models = rehearsal.num_trainers * method.placement.copies  # a method may train several copies of a user's model
    memory = peak_memory(rehearsal)
    fits = memory.total_bytes <= free
    return MethodCost(
        method=method.name,
        users=tuple(users),
        exchanges=count_exchanges(rehearsal.federation),
        users_per_step=min(pass_size.users, num_models),
        micro_batch=pass_size.sequences,
        machine=memory,
        own_device=peak_memory(rehearsal, one_user=True),
        fits=fits,
        advice="" if fits else advise(rehearsal, memory, free),
        store_bytes=_largest_store_bytes(rehearsal, kept_checkpoints),
    )


def _largest_store_bytes(rehearsal: Rehearsal, kept_checkpoints: int) -> int:
    """Return the largest size of all users' states on disk during a run, in bytes; 0 if users are kept in memory.

    Args:
        rehearsal: The run's federation, on fake tensors (shapes without values).
        kept_checkpoints: Number of checkpoints that a run keeps.
    """
    if rehearsal.store == MEMORY:
        return 0
    clients = rehearsal.federation.clients
    check_storable(clients)  # raises the error that a run would raise if the method does not support users on disk
    plan = clients.plan
    num_users = rehearsal.num_trainers
    num_evaluated = min(plan.evaluation.users or num_users, num_users)
    copies = clients.method.placement.copies  # models per user; each has a record of its own
    writes = Writes(
        users=num_users * copies,
        participants=rehearsal.num_participants * copies,
        evaluated_users=num_evaluated * copies,
        rounds=plan.training.rounds,
        evaluate_every=plan.evaluation_interval,  # rounds between evaluations
        checkpoint_every=plan.checkpoints.every,
        kept_checkpoints=kept_checkpoints,
    )
    return store_bytes(user_bytes(clients.state, rehearsal.store), writes)


def advise(rehearsal: Rehearsal, memory: MemoryCost, free: int) -> str:
    """Return settings with which a run fits into memory, such as ``"runtime.users_per_step=2 runtime.micro_batch=8"``.

    They reduce the users and sequences in a forward and backward pass. If no numbers fit, return a sentence that says
    so.

    Args:
        rehearsal: The run's federation, on fake tensors (shapes without values).
        memory: Memory that the recipe's own settings need.
        free: Free memory, in bytes.
    """
    smaller = smaller_pass(rehearsal, memory, free)
    if smaller is None:
        return NONE_FITS
    return f"{_USERS}={smaller.users} {_SEQUENCES}={smaller.sequences}"


def smaller_pass(rehearsal: Rehearsal, memory: MemoryCost, free: int) -> PassSize | None:
    """Return with how many users and sequences per forward and backward pass a run fits into memory, if its own do not.

    Users are halved down to 1, then sequences.

    Args:
        rehearsal: The run's federation, on fake tensors (shapes without values).
        memory: Memory that the run needs with its own numbers of users and sequences.
        free: Free memory, in bytes.
    """
    if memory.fixed_bytes > free:  # weights and data alone do not fit
        return None
    for size in _halved_passes(rehearsal.steps.pass_size):
        if peak_memory(rehearsal, pass_size=size).total_bytes <= free:
            return size
    return None


def _halved_passes(size: PassSize) -> Iterator[PassSize]:
    """Yield ever fewer users and sequences that go through the model together, to find numbers that fit into memory.

    Users are halved down to 1, then sequences. From 4 users with 2 sequences each: 2 users with 2, 1 user with 2, 1
    user with 1.
    """
    while size.users > 1:
        size = replace(size, users=size.users // 2)
        yield size
    while size.sequences > 1:
        size = replace(size, sequences=size.sequences // 2)
        yield size


def plan_nets(recipes: Sequence[Recipe], users: int | None = None, participation: Participation = 1.0) -> Plan:
    """Return the computation, memory and messages of training small nets, for one or several methods.

    Samples are read or generated, as costs depend on their numbers and shapes. Nothing is trained.

    Args:
        recipes: Recipes that differ in their method alone.
        users: Number of users for which to count; None for the recipe's.
        participation: Fraction of the users in each round, or the names of each round's participants.

    Raises:
        RecipeError: A method or a setting is wrong.
        DataError: A user's samples cannot be read.
    """
    if users is not None:
        check_num_users(users)
        recipes = [kind_of(recipe).with_num_users(recipe, users) for recipe in recipes]
    population = prepare(recipes[0]).common  # users and their samples, which are the same for all methods
    # FedAvg trains the net without additions, so its FLOPs are those of the net; others of a method are its overhead.
    fedavg = rehearse_nets(with_method(recipes[0], "fedavg"), population)
    net_flops = measured_base(fedavg)
    free = free_bytes(fedavg.federation.clients.model.device)
    names = tuple(population.users.names)
    costs = []
    for recipe in recipes:
        cost = net_cost(recipe, population, net_flops, free, participation)
        costs.append(add_privacy_forecast(cost, recipe, names, participation))
    return _plan_of_nets(fedavg.federation.clients, population, costs, free)


def _plan_of_nets(clients: Clients, population: Population, costs: Sequence[MethodCost], free: int) -> Plan:
    """Return the costs of methods together with the facts about the net and the training that are the same for all.

    Args:
        clients: Clients that train the net with FedAvg.
        population: Users and their samples.
        costs: Costs of each method.
        free: Free memory in bytes.
    """
    model, training = clients.model, clients.plan.training
    base_cost = BaseCost(
        name=model.name,
        parameters=model.base_parameters,
        dtype=str(model.dtype).removeprefix("torch."),
        flops=costs[0].users[0].forward.base,
    )
    return Plan(
        base=base_cost,
        device=str(model.device),
        users=tuple(population.users.names),
        rounds=training.rounds,
        local_steps=max(work.steps for work in local_work_by_user(clients, population).values()),
        batch_size=training.largest_batch_size,
        context=0,  # samples are no sequences
        free_bytes=free,
        methods=tuple(costs),
        table3=(),  # the paper's table compares language models
        unit="sample",
    )


def net_cost(
    recipe: Recipe, population: Population, net_flops: BaseFlops, free: int, participation: Participation
) -> MethodCost:
    """Return the costs of training nets with the recipe's method.

    Args:
        recipe: Settings of the run.
        population: Users and their samples.
        net_flops: Function that returns the FLOPs of a net without the method's additions, for a user's local work.
        free: Free memory in bytes; the costs say whether the run fits into it, or which settings would make it fit.
        participation: Fraction of the users in each round, or the names of each round's participants.
    """
    rehearsal = rehearse_nets(recipe, population, participation)
    local_work = local_work_by_user(rehearsal.federation.clients, population)
    users = count_stacked(rehearsal, local_work, net_flops)
    return complete_cost(rehearsal, users, free, kept_checkpoints=recipe.checkpoints.keep)


def rehearse_nets(
    recipe: Recipe,
    population: Population,
    participation: Participation = ALL_USERS,
    all_names: Sequence[str] | None = None,
) -> Rehearsal:
    """Return a federation of nets whose steps run on fake tensors, which have shapes but no values.

    Args:
        recipe: Settings of the run.
        population: Users of this process and their samples.
        participation: Fraction of the users in each round, or the names of each round's participants.
        all_names: Names of the users of all processes; None if there is one process.
    """
    federation = bare_nets(recipe, population, all_names)
    clients, users = federation.clients, population.users
    trains_one_net = clients.method.placement.pooled  # one net on all users' samples
    num_all_users = len(users) if all_names is None else len(all_names)  # of all processes
    return rehearse(
        federation,
        num_trainers=1 if trains_one_net else len(users),
        num_participants=largest_round(participation, num_all_users),  # all of them may be in this process
        store=recipe.runtime.store,
        data_bytes=data_bytes(population, clients.model.dtype),
        reads_cohorts=not users.in_memory,
        process_bytes=measured_process_bytes("samples", clients.model.device),
    )


def local_work_by_user(clients: Clients, population: Population) -> dict[str, LocalWork]:
    """Return how many batches, samples and epochs each user trains on in a round, by the user's name.

    Also count the samples of a sweep, in which some methods compute losses on all training data. A pooled method, which
    trains one net on all users' samples, has a single entry: ``{"all 3 users as one": ...}``.

    Args:
        clients: A federation's clients, whose batch source knows the sizes of batches.
        population: Users and their samples.
    """
    users: Iterable[tuple[str, Any]] = ((user.name, user) for user in population.users)
    if clients.method.placement.pooled:
        users = [(f"all {len(population.users)} users as one", clients.trainers[0])]
    work_by_user: dict[str, LocalWork] = {}
    shared_work: dict[LocalWork, LocalWork] = {}  # one object for all users with equal work, which saves memory
    for name, user in users:
        epoch_sizes, sweep_sizes = clients.batch_source.batch_sizes(user)
        work = LocalWork(
            batch_sizes=epoch_sizes,
            epochs=clients.plan.training.local_epochs,
            sweep_batches=len(sweep_sizes),
            sweep_items=sum(sweep_sizes),
        )
        work_by_user[name] = shared_work.setdefault(work, work)
    return work_by_user


def data_bytes(population: Population, dtype: torch.dtype) -> int:
    """Return the bytes of all users' samples: as read, and as copied for batches.

    If users are on disk, only the first one is read; the others have as many bytes per sample.

    Args:
        population: Users and their samples.
        dtype: Dtype of the model, to which samples are converted in batches.
    """
    users = population.users
    if users.sizes is not None:  # users on disk: a row per user with its numbers of samples, by split
        first_user_bytes = data_bytes(replace(population, users=users.select([0])), dtype)
        samples_of_first, all_samples = users.sizes[0].sum(), users.sizes.sum()
        return int(first_user_bytes * all_samples / samples_of_first)
    total = 0
    for user in users:
        for split in SPLITS:
            samples = user.split(split)
            inputs, targets = samples.inputs, samples.targets
            # Copies for batches have the model's dtype, but labels (integers) keep theirs.
            copied_dtype = dtype if targets.is_floating_point() else targets.dtype
            total += inputs.nbytes + inputs.numel() * dtype.itemsize
            total += targets.nbytes + targets.numel() * copied_dtype.itemsize
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
        for_all: Settings for every method that has a setting of this name, such as ``{"specialists": 2}``.

    Raises:
        RecipeError: A method or a setting is wrong.
        BaseModelError: The base cannot be used.
        DataError: The users' names cannot be read, or available text is too short for a run.
    """
    # Each of these two chooses the settings that the recipe leaves open, then calls this function with them.
    if chooses_specialists(recipe):
        return _plan_with_specialists(recipe, methods, users=users, participants=participants, for_all=for_all)
    if recipe.runtime.memory is not None:
        return _plan_within_memory(recipe, methods, users=users, participants=participants, for_all=for_all)
    participation = recipe.training.participation  # `with_method` replaces it, but memory and privacy depend on it
    recipes = [with_method(recipe, name, for_all) for name in methods or [recipe.method.name]]
    for recipe_of_method in recipes:
        check_recipe(recipe_of_method)
    if not kind_of(recipe).needs_base:
        return plan_nets(recipes, users, participation)
    return _plan_language_model(recipe, recipes, users=users, participants=participants)


def _plan_language_model(
    recipe: Recipe, recipes: Sequence[Recipe], *, users: int | None, participants: Sequence[str]
) -> Plan:
    """Return the costs of training a language model, for one or several methods.

    Exceptions are those of :func:`plan`.

    Args:
        recipe: The recipe, with its own method and participation.
        recipes: The recipe with each method to plan for, from :func:`with_method`.
        users: Number of users, if their data is not available; None reads the users from the recipe.
        participants: Names of the users of a federation, whose data is on other machines; used in place of ``users``.
    """
    kind, participation = kind_of(recipe), recipe.training.participation
    if participants:
        users = len(participants)
    check_num_users(users)
    _check_passed_objects(recipe, users)
    _check_users_of_private_examples(recipe, users)

    @cache
    def load_base() -> Base:
        """Load the base without weights."""
        return load_skeleton(
            recipe.base,
            dtype=recipe.runtime.dtype,
            device=recipe.runtime.device,
            attention=recipe.runtime.attention,
            quantise=recipe.quantise,
        )

    base = load_base()
    check_context_length("training.context", recipe.training.context, base.model)
    # Costs of language models are counted for text, so other data is replaced with text that costs as much.
    text_recipes, too_small, note = text_of_equal_cost(kind, recipes, users, load_base)
    all_names = participants or user_names(text_recipes[0], users)
    names = tuple(name for name in all_names if name not in too_small)  # a run leaves out users with too little data
    free = free_bytes(base.device)
    costs = []
    for text_recipe, original in zip(text_recipes, recipes, strict=True):
        cost = method_cost(text_recipe, base, names, free, participation)
        costs.append(add_privacy_forecast(cost, text_recipe, names, participation, with_real_data=original))
    training = text_recipes[0].training
    base_cost = BaseCost(
        name=base.name,
        parameters=base.model.num_parameters() + packed_parameters(base.model),
        dtype=str(base.dtype).removeprefix("torch."),
        flops=costs[0].users[0].forward.base,
    )
    return Plan(
        base=base_cost,
        device=str(base.device),
        users=names,
        rounds=training.rounds,
        local_steps=training.most_local_steps,
        batch_size=training.largest_batch_size,
        context=training.context,
        free_bytes=free,
        methods=tuple(costs),
        table3=tuple(compare_with_paper(text_recipes[0], base)),
        note=note,
    )


def _check_passed_objects(recipe: Recipe, users: int | None) -> None:
    """Refuse a recipe whose base or data was passed as Python objects, which ``comingle cost`` does not have.

    Passed data is not needed if the number of users is given.

    Args:
        recipe: The recipe of the run.
        users: The number of users given on the command line, if any.

    Raises:
        BaseModelError: The base was passed.
        DataError: The data was passed, and there is no number of users.
    """
    NOTHING.check_base(recipe)  # raises if the recipe needs a passed base, as nothing was passed here
    if recipe.data.given and users is None:
        raise DataError(f"{USERS_MISSING}; to count costs without their data, give the number of users: --users N")


def _check_users_of_private_examples(recipe: Recipe, users: int | None) -> None:
    """Refuse ``--users N`` with example-level privacy, whose epsilon depends on each user's number of examples.

    Args:
        recipe: Settings of the run.
        users: The number of users given on the command line, if any.

    Raises:
        RecipeError: The number is given, and the recipe's privacy is per example.
    """
    if users is None or recipe.privacy is None:
        return
    if protects_examples(recipe.privacy.mechanism):
        reason = "with privacy.mechanism: example, epsilon depends on each user's number of examples, so data is read"
        raise RecipeError(f"--users: got {users}; {reason}; leave out --users")


def user_names(recipe: Recipe, users: int | None = None) -> tuple[str, ...]:
    """Return the names of the recipe's users, or ``("user 1", "user 2", ...)`` for a given number of users.

    Args:
        recipe: Settings of the run.
        users: The number of users given on the command line, if any.

    Raises:
        DataError: Users are groups of rows in a file that cannot be read.
    """
    if users is not None:
        return tuple(f"user {i + 1}" for i in range(users))
    return kind_of(recipe).names_of(recipe)


# ---------------------------------------------------------------- one method


def federate_bare(
    recipe: Recipe, base: Base, names: tuple[str, ...], own_indices: Sequence[int] | None = None
) -> InProcess:
    """Return a federation over a base without weights, whose users have names but no text, to count costs.

    If all users have the same ranks and numbers of experts, only the users of one pass are built.

    Args:
        recipe: Settings of the run.
        base: The base model; weights are not needed.
        names: Names of all users of the run, in all processes.
        own_indices: Positions in ``names`` of the users that this process trains; None if it trains all of them.
    """
    recipe = recipe.for_users(names)
    method = make(recipe.method.name, **recipe.method.settings)
    plan = make_plan(recipe, method, names).updated("runtime", store=MEMORY)
    placement = method.placement
    largest_batch_size = plan.training.largest_batch_size
    tokens_each = plan.iterations * largest_batch_size * plan.training.context  # training tokens of a model in the run
    models_are_alike = isinstance(placement.specialists, int) and isinstance(recipe.adapters.rank, int)
    indices = range(len(names)) if own_indices is None else own_indices
    if models_are_alike and not placement.pooled:  # the users of one pass are enough
        indices = indices[: pass_size(plan, base.device, largest_batch_size).users]
    users = [_user_without_text(names[index]) for index in indices]
    # A pooled method trains one model on the data of all users.
    trainers = [_user_without_text("everyone")] if placement.pooled else users
    if placement.mixture is not None and not placement.mixture.trains_independently:
        model = bare_mixture(recipe, base, method, len(trainers))
    elif models_are_alike or placement.pooled:
        num_trainers = len(trainers)
        model = adapt_base(recipe, base, method, num_trainers, num_tokens=num_trainers * tokens_each)
    else:
        # Adapters are padded to the largest rank of all users. So build all users' adapters, then keep this process's.
        num_trainers = len(names)
        model = adapt_base(recipe, base, method, num_trainers, num_tokens=num_trainers * tokens_each)
        model = model.only(indices)
    batch_source = TextBatchSource(trainers, plan, batch_size(plan, len(users)))
    # reads=False: there is no validation data, so a check for it would fail.
    return federate(Clients(model, plan, trainers=trainers, users=users, batch_source=batch_source, reads=False))


def _user_without_text(name: str) -> UserData:
    """Return a user without data, which stands for a real one where costs are counted: they depend on sizes only."""
    nothing = torch.empty(0, dtype=torch.int32)
    return UserData(name=name, train=nothing, valid=nothing, test=nothing)


def method_cost(
    recipe: Recipe, base: Base, names: tuple[str, ...], free: int, participation: Participation = ALL_USERS
) -> MethodCost:
    """Return the costs of training a language model with the recipe's method, for ``comingle cost``.

    Args:
        recipe: Settings of the run.
        base: The base model; weights are not needed.
        names: Names of the users.
        free: Free memory in bytes; the costs say whether the run fits into it, or which settings would make it fit.
        participation: Fraction of the users in each round, or the names of each round's participants.
    """
    # A federation whose steps run on fake tensors (shapes without values).
    rehearsal = rehearse_text(recipe, base, names, participation)
    clients = rehearsal.federation.clients
    if clients.method.placement.mixture is None:  # adapters, whose FLOPs follow from formulas
        users = count_users(rehearsal.federation, names)
    else:  # a client-level mixture, whose FLOPs are measured on fake tensors
        local_work = dict.fromkeys(names, local_work_on_text(clients))
        users = count_stacked(rehearsal, local_work, _base_flops(recipe, base, names))
    return complete_cost(rehearsal, users, free, kept_checkpoints=recipe.checkpoints.keep)


def rehearse_text(
    recipe: Recipe,
    base: Base,
    names: tuple[str, ...],
    participation: Participation = ALL_USERS,
    own_indices: Sequence[int] | None = None,
    *,
    process_bytes: int | None = None,
) -> Rehearsal:
    """Return the federation of a language model whose steps run on fake tensors, without weights and text.

    Its memory and FLOPs can be measured without those of a real step.

    Args:
        recipe: Settings of the run.
        base: The base model; weights are not needed.
        names: Names of all users of the run, in all processes.
        participation: Fraction of the users in each round, or the names of each round's participants.
        own_indices: Positions in ``names`` of the users that this process trains; None if it trains all of them.
        process_bytes: Bytes of a process without model and data; None to measure them.
    """
    federation = federate_bare(recipe, base, names, own_indices)
    trains_one_model = federation.clients.method.placement.pooled  # one model on all users' data
    num_own_users = len(names) if own_indices is None else len(own_indices)
    if process_bytes is None:
        process_bytes = measured_process_bytes("text", base.device)
    return rehearse(
        federation,
        num_trainers=1 if trains_one_model else num_own_users,
        num_participants=largest_round(participation, len(names)),  # all of them may be in this process
        store=recipe.runtime.store,
        checkpointed=recipe.runtime.gradient_checkpointing,
        process_bytes=process_bytes,
    )


def _base_flops(recipe: Recipe, base: Base, names: tuple[str, ...]) -> BaseFlops:
    """Return a function that gives the FLOPs of the base in a client-level mixture, without adapters and router.

    These are the FLOPs of the base under FedAvg. If the components of the mixture are whole models that are trained
    independently, the FLOPs are multiplied by the number of components.

    Args:
        recipe: The recipe; its method has a mixture.
        base: The base model; weights are not needed.
        names: Names of the users.

    Returns:
        Function that returns the FLOPs of one token's forward pass and of a round. It ignores its argument, a user's
        local work, which is the same for all users of a language model.
    """
    fedavg = with_method(recipe_for_one_user(recipe, largest), "fedavg")
    one_name = names[:1]
    (cost,) = count_users(federate_bare(fedavg, base, one_name), one_name)
    mixture = make(recipe.method.name, **recipe.method.settings).placement.mixture
    num_models = mixture.clusters if mixture is not None and mixture.trains_independently else 1
    forward_flops = replace(cost.forward, lora=0.0, router=0.0) * num_models
    round_flops = replace(cost.round, lora=0.0, router=0.0) * num_models

    def flops_of_base(_local_work: LocalWork) -> tuple[Flops, Flops]:
        """Return the FLOPs of a forward pass and of a round."""
        return forward_flops, round_flops

    return flops_of_base


# ---------------------------------------------------------------- comparison with the paper


def compare_with_paper(recipe: Recipe, base: Base) -> list[Difference]:
    """Return Table 3 of the CoMiGS paper for this base, as counted and as the paper would count it.

    The table has the costs of CoMiGS-1G1S minus those of FedAvg, here for one user with the largest rank of the recipe.

    Args:
        recipe: The recipe; its method is replaced.
        base: The base model; weights are not needed.
    """
    recipe = recipe_for_one_user(recipe, largest)
    context = recipe.training.context
    costs: dict[str, UserCost] = {}
    accounts: dict[str, Account] = {}
    for method in ("fedavg", "comigs-1g1s"):
        federation = federate_bare(with_method(recipe, method), base, ("anybody",))
        (cost,) = count_users(federation, ("anybody",))
        bytes_per_number = federation.clients.state.rows.element_size()
        costs[method] = cost
        accounts[method] = Account(
            forward_flops=cost.forward.total * context,
            round_flops=cost.round.total,
            state_bytes=cost.trainable_parameters * 3 * bytes_per_number,  # parameters and both moments of AdamW
            upload_bytes=cost.upload_bytes,
        )
    parameters = costs["comigs-1g1s"].parameters  # by role; the generalist and the specialist have equal sizes
    sizes = Sizes(attention=parameters["attention"], expert=parameters["generalist"], router=parameters["router"])
    return table3_columns(sizes, context, fedavg=accounts["fedavg"], comigs=accounts["comigs-1g1s"])


FREE_SHARE = {"cuda": 0.9}
"""Usable fraction of a GPU's free memory. The rest allows for gaps of its allocator; an estimate, not measured."""


def fit(recipe: Recipe, run_data: RunData) -> PassSize:
    """Return how many users, and sequences of each, go through the model at a time (``users_per_step: auto``).

    These are the default numbers, or the largest smaller ones that fit into memory.

    Args:
        recipe: Settings of the run.
        run_data: Base and data of the run, which are in memory already.

    Raises:
        RecipeError: One sequence of one user does not fit.
    """
    for_counting = with_method(recipe, recipe.method.name)  # the same method, not compiled
    rehearsal = _rehearse(for_counting, run_data, recipe.training.participation)
    device = rehearsal.steps.model.device
    # `memory.total_bytes` below includes the base, the data and the process. These are loaded already, so what they use
    # does not count as free and is added to it.
    loaded_bytes = rehearsal.weights_bytes + rehearsal.process_bytes + rehearsal.data_bytes
    usable_bytes = int(FREE_SHARE.get(device.type, 1.0) * free_bytes(device)) + loaded_bytes
    memory = peak_memory(rehearsal)
    chosen = rehearsal.steps.pass_size
    if memory.total_bytes > usable_bytes:
        smaller = smaller_pass(rehearsal, memory, usable_bytes)
        if smaller is None:
            needs = f"needs {memory.total_bytes / 1e9:,.2f} GB, but {usable_bytes / 1e9:,.2f} GB are free on {device}"
            raise RecipeError(f"runtime.users_per_step: auto: {needs}; {NONE_FITS}")
        chosen = smaller
    logger.info("users_per_step: auto: %d users with %d sequences or samples each", chosen.users, chosen.sequences)
    return chosen


def _rehearse(recipe: Recipe, run_data: RunData, participation: Participation) -> Rehearsal:
    """Return a federation of this process's users on fake tensors, to measure a step without its memory and time.

    Args:
        recipe: Settings of the run.
        run_data: Base and data of the run.
        participation: Fraction of the users in each round, or the names of each round's participants.
    """
    kind = kind_of(recipe)
    own_users = run_data.present
    all_names = run_data.users.names
    if not kind.needs_base:  # nets, which train on samples
        population = replace(run_data.common, users=own_users)
        return rehearse_nets(recipe, population, participation, all_names)
    # Conversations are replaced with text that costs as much.
    if own_users.in_memory:
        (text_recipe,), _too_small, _note = kind.as_text([recipe], len(own_users))
    else:  # users on disk: their stored sizes are enough, so their data is not loaded
        (text_recipe,) = conversations_as_text(kind, [recipe], own_users)
    assert run_data.base is not None
    return rehearse_text(text_recipe, run_data.base, tuple(all_names), participation, own_indices=run_data.here)


# ---------------------------------------------------------------- a limit of memory


RETURNED_GAPS = 0.2
"""As :data:`comingle.cost.memory.ALLOCATOR_GAPS`, if freed blocks are returned to the system (``runtime.memory``)."""

LIBRARY_BYTES = 60_000_000
"""Memory that libraries keep on a CPU beside live tensors, mostly the matrix library's; measured with SmolLM2-135M."""

_SLOWDOWNS = {"checkpointing": 4 / 3, "halved pass": 1.3, "quantised": 1.05}
"""Factors of the time of a step. Checkpointing repeats the forward pass, a quarter of the work more. The others are
measured with SmolLM2-135M on two cores: passes of 128 in place of 512 tokens take 1.75 times the time."""


def memory_choices(
    recipe: Recipe,
    names: tuple[str, ...],
    *,
    own_indices: Sequence[int] | None = None,
    process_bytes: int | None = None,
) -> Iterator[MemoryChoice]:
    """Yield settings with which a language model needs less memory, those that change the model the least first.

    First come fewer users or sequences in a forward and backward pass, and gradient checkpointing, which change results
    by rounding at most, then the same with the base in bfloat16, in 8 bits and in 4 bits. Each of these groups is
    ordered by time. Keys that the recipe sets are not changed.

    Args:
        recipe: Settings of the run.
        names: Names of all users of the run, in all processes.
        own_indices: For a client, the position of its user in ``names``; None for a run that trains all users here.
        process_bytes: Bytes of a process without model and data; None to measure them.

    Raises:
        RecipeError: The recipe is not for a language model with adapters.
        BaseModelError: The base cannot be used.
    """
    placement = make(recipe.method.name, **recipe.method.settings).placement
    if not kind_of(recipe).needs_base or placement.mixture is not None:
        raise RecipeError(f"runtime.memory: got {recipe.runtime.memory!r}; allowed: for language models with adapters")

    @cache
    def memory_with(*changes: tuple[str, Any]) -> _MemoryByPassSize:
        """Return the memory of the recipe with changes, pairs (key, value)."""
        changed = recipe.with_changes(dict(changes))
        return _MemoryByPassSize(changed, names, own_indices=own_indices, process_bytes=process_bytes)

    for format_changes, bits, format_slowdown in _number_formats(recipe):
        choices: list[MemoryChoice] = []
        quantised: dict[str, Any] = {}
        saved_bytes = 0
        if bits:  # "8bit" or "4bit"
            quantised = {"quantise": bits}
            saved_bytes = _bytes_saved_by_quantising(recipe.with_changes({**format_changes, **quantised}))
        for checkpointing in _checkpointing_choices(recipe):
            # Traced without quantisation, once for full, 8-bit and 4-bit weights; `saved_bytes` are subtracted later.
            memory = memory_with(*{**format_changes, **checkpointing}.items())
            changes = {**format_changes, **quantised, **checkpointing}
            slowdown = format_slowdown
            if checkpointing:
                slowdown *= _SLOWDOWNS["checkpointing"]
            largest_pass = MemoryChoice(
                changes=changes, needed_bytes=memory.bytes_at(memory.pass_size) - saved_bytes, slowdown=slowdown
            )
            choices.append(largest_pass)
            if _is_unset(recipe, "micro_batch"):  # otherwise the recipe fixes the number of sequences in a pass
                is_client = own_indices is not None
                choices.extend(_with_smaller_passes(largest_pass, memory, saved_bytes, is_client=is_client))
        yield from sorted(choices, key=lambda choice: choice.slowdown)


def _with_smaller_passes(
    choice: MemoryChoice, memory: _MemoryByPassSize, saved_bytes: int, *, is_client: bool
) -> Iterator[MemoryChoice]:
    """Yield the settings of a choice with ever fewer users and sequences in a forward and backward pass.

    Args:
        choice: Settings with the recipe's own numbers of users and sequences.
        memory: Memory that a run with these settings needs without quantisation.
        saved_bytes: Bytes that quantisation saves; 0 if the settings do not quantise the base.
        is_client: Whether the settings are for a client, which trains one user at a time anyway.
    """
    slowdown = choice.slowdown
    for size in _halved_passes(memory.pass_size):
        slowdown *= _SLOWDOWNS["halved pass"]
        pass_changes = {"runtime.micro_batch": size.sequences}
        if not is_client:
            pass_changes["runtime.users_per_step"] = size.users
        needed_bytes = memory.bytes_at(size) - saved_bytes
        yield MemoryChoice(changes={**choice.changes, **pass_changes}, needed_bytes=needed_bytes, slowdown=slowdown)


def _is_unset(recipe: Recipe, key: str) -> bool:
    """Return whether the recipe does not set a key of its section ``runtime``."""
    return key not in recipe.runtime.model_fields_set


def _checkpointing_choices(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Yield settings to try for less memory: no change, then gradient checkpointing unless the recipe sets that key."""
    yield {}
    if _is_unset(recipe, "gradient_checkpointing"):
        yield {"runtime.gradient_checkpointing": True}


def _number_formats(recipe: Recipe) -> Iterator[tuple[dict[str, Any], str, float]]:
    """Yield ways to store the base in ever less memory, from the recipe's own format to 4 bits.

    They are tried one after another until a run fits into ``runtime.memory``. Settings that the recipe has stay.

    Yields:
        Settings to change in the recipe, by dotted key; the format of quantised weights, such as ``"8bit"``, empty
        without quantisation; and the time of a step, relative to the recipe's own format.
    """
    device = resolve_device(recipe.runtime.device)
    dtype = resolve_dtype(recipe.runtime.dtype, device)
    changes: dict[str, Any] = {}
    if _is_unset(recipe, "native_code") and device.type == "cpu":  # native code keeps fewer tensors
        changes["runtime.native_code"] = True
    if _is_unset(recipe, "compile"):  # the compiler alone takes 70 MB
        changes["runtime.compile"] = False
    yield changes, "", 1.0
    if _is_unset(recipe, "dtype") and dtype == torch.float32 and device.type in ("cpu", "cuda"):
        changes = {**changes, "runtime.dtype": "bfloat16"}
        yield changes, "", 1.0
    if "quantise" not in recipe.model_fields_set:
        for bits in CODES:  # "8bit", then "4bit"
            yield changes, bits, _SLOWDOWNS["quantised"]


def _bytes_saved_by_quantising(recipe: Recipe) -> int:
    """Return how many bytes fewer the base needs with the recipe's quantisation than without.

    During a pass one weight at a time is unpacked, so the largest unpacked weight is subtracted.
    """
    runtime = recipe.runtime
    load = partial(load_skeleton, recipe.base, dtype=runtime.dtype, device=runtime.device, attention=runtime.attention)
    plain, quantised = load(), load(quantise=recipe.quantise)
    quantised_layers = [module for module in quantised.model.modules() if isinstance(module, QuantisedLinear)]
    largest_weight = max(weight_shape(layer).numel() for layer in quantised_layers)
    unpacked_bytes = largest_weight * plain.dtype.itemsize
    return storage_bytes(plain.model) - storage_bytes(quantised.model) - unpacked_bytes


_TRACED_LAYERS = (1, 2)
"""Numbers of decoder layers that are traced. As layers are alike, the peak of the passes and that of the update are
affine in their number."""


class _MemoryByPassSize:
    """Memory that a recipe needs, as a function of the size of a pass.

    Models with 1 and 2 decoder layers are traced, and the memory of all layers is extrapolated: a trace of 30 layers
    takes ten seconds. The memory is that with ``runtime.memory``, where freed blocks are returned to the system.
    """

    def __init__(
        self,
        recipe: Recipe,
        names: tuple[str, ...],
        *,
        own_indices: Sequence[int] | None,
        process_bytes: int | None,
    ):
        """Build small versions of the model, on which memory is measured without weights.

        They have 1 and 2 decoder layers, from which the memory of all layers is extrapolated. A model with few layers
        is built whole.

        Args:
            recipe: Settings of the run.
            names: Names of all users of the run, in all processes.
            own_indices: For a client, the position of its user in ``names``; None for a run that trains all users here.
            process_bytes: Bytes of a process without model and data; None to measure them.
        """
        runtime = recipe.runtime
        settings: dict[str, Any] = {"dtype": runtime.dtype, "device": runtime.device, "attention": runtime.attention}
        load = partial(load_skeleton, recipe.base, **settings, quantise=recipe.quantise)
        self._num_layers = len(decoder_layers(load().model))
        has_many_layers = self._num_layers > max(_TRACED_LAYERS)
        traced_layers = _TRACED_LAYERS if has_many_layers else (self._num_layers,)
        # Memory is measured for text, so conversations are replaced with text that needs as much.
        (text_recipe,), _too_small, _note = kind_of(recipe).as_text([recipe], len(names))
        text_recipe = with_method(text_recipe, recipe.method.name)
        self._num_users = len(names) if own_indices is None else len(own_indices)
        self._is_client = own_indices is not None
        self._device = resolve_device(runtime.device)
        # By number of layers: users and server whose training steps run on tensors that have shapes but no values.
        self._rehearsal_by_layers: dict[int, Rehearsal] = {}
        for num_layers in traced_layers:
            base = load(layers=num_layers)
            self._rehearsal_by_layers[num_layers] = rehearse_text(
                text_recipe, base, names, own_indices=own_indices, process_bytes=process_bytes
            )

    @property
    def pass_size(self) -> PassSize:
        """Numbers of users and sequences in one forward and backward pass by the recipe's own settings.

        The number of users is at most that of the run.
        """
        any_rehearsal = next(iter(self._rehearsal_by_layers.values()))
        size = any_rehearsal.steps.pass_size
        return replace(size, users=min(size.users, self._num_users))

    def bytes_at(self, size: PassSize) -> int:
        """Return the bytes of memory that the run needs with these numbers of users and sequences in a forward pass."""
        cost = self.cost_at(size)
        if self._device.type != "cpu":
            return cost.total_bytes
        # `cost` assumes an allocator that keeps freed blocks, with gaps between live tensors (`allocator_bytes`).
        # `runtime.memory` returns these blocks to the system, so the gaps are smaller: a measured share of a pass.
        bytes_without_gaps = cost.total_bytes - cost.allocator_bytes
        gap_bytes = int(RETURNED_GAPS * cost.pass_bytes)
        return bytes_without_gaps + gap_bytes + LIBRARY_BYTES  # the latter: what libraries keep, such as for matmuls

    def cost_at(self, size: PassSize) -> MemoryCost:
        """Return the memory that the run needs by kind of tensor, extrapolated from models with 1 and 2 layers.

        Args:
            size: Numbers of users and sequences in one forward and backward pass.
        """
        rehearsals = self._rehearsal_by_layers.values()
        costs = [peak_memory(rehearsal, one_user=self._is_client, pass_size=size) for rehearsal in rehearsals]
        if len(costs) == 1:  # a small model, rehearsed with all its layers
            return costs[0]
        few_layers, more_layers = self._rehearsal_by_layers.keys()  # 1 and 2
        bytes_with_few, bytes_with_more = asdict(costs[0]), asdict(costs[1])
        extrapolated: dict[str, int] = {}
        for name, num_bytes in bytes_with_few.items():  # 100 bytes with 1 layer and 130 with 2 are 190 with 4
            added_bytes = (self._num_layers - few_layers) * (bytes_with_more[name] - num_bytes)
            extrapolated[name] = num_bytes + added_bytes // (more_layers - few_layers)
        return MemoryCost(**extrapolated)


def choose_within(
    recipe: Recipe,
    limit: int,
    names: tuple[str, ...],
    *,
    own_indices: Sequence[int] | None = None,
    process_bytes: int | None = None,
) -> MemoryChoice:
    """Return the first of the :func:`memory_choices` with which a run fits into a limit.

    Args:
        recipe: Settings of the run.
        limit: Memory that the run may use, in bytes.
        names: Names of all users of the run.
        own_indices: For a client, the position of its user in ``names``; None for a run that trains all users here.
        process_bytes: Bytes of a process without model and data; None to measure them.

    Raises:
        RecipeError: None fits, or the recipe is not for a language model with adapters.
        BaseModelError: The base cannot be used.
    """
    too_large: list[MemoryChoice] = []
    for choice in memory_choices(recipe, names, own_indices=own_indices, process_bytes=process_bytes):
        if choice.needed_bytes <= limit:
            return choice
        too_large.append(choice)
    smallest = min(too_large, key=lambda choice: choice.needed_bytes)
    raise RecipeError(
        f"runtime.memory: got {recipe.runtime.memory!r}; the smallest settings are {smallest.describe(limit)}; "
        "use a smaller base, training.context or adapters.rank"
    )


# ---------------------------------------------------------------- specialists


MOST_SPECIALISTS = 3
"""Largest number that ``method.specialists: auto`` chooses, as of the users in CoMiGS's experiments (section 4.3)."""


def choose_specialists(
    recipe: Recipe,
    limit: int,
    names: tuple[str, ...],
    *,
    own_indices: Sequence[int] | None = None,
    process_bytes: int | None = None,
) -> dict[str, int]:
    """Return the number of specialists of each user for ``method.specialists: auto``.

    It is the largest number up to :data:`MOST_SPECIALISTS` with which the run fits into memory in the recipe's number
    format, and with which the user's local steps take at most ``training.max_seconds_per_round``. Local steps are
    measured only for users with such a limit.

    Args:
        recipe: Settings of the run.
        limit: Memory that the run may use, in bytes.
        names: Names of all users of the run.
        own_indices: For a client, the position of its user in ``names``; None to choose for all users.
        process_bytes: Bytes of a process without model and data; None to measure them.

    Raises:
        RecipeError: The recipe is not for a language model with adapters.
        BaseModelError: The base cannot be used.
    """

    def with_specialists(number: int) -> Recipe:
        return recipe.with_changes({"method.specialists": number})

    # The largest number that fits into memory, the same for all users.
    smallest = 0 if _has_generalists(recipe) else 1  # a model needs an expert
    most_in_memory = MOST_SPECIALISTS
    while most_in_memory > smallest:
        if _fits_in_own_format(with_specialists(most_in_memory), limit, names, own_indices, process_bytes):
            break
        most_in_memory -= 1

    # For each user, the largest number with which the local steps are fast enough. Users with the same LoRA rank and
    # batch size take the same time, so only the first of them is measured.
    method = make(recipe.method.name, **recipe.method.settings)
    recipe_of_users = recipe.for_users(names)
    plan, ranks = make_plan(recipe_of_users, method, names), ranks_of(recipe_of_users.adapters, len(names))

    def rank_and_batch_size(user: int) -> tuple[int, int]:
        return int(ranks[user]), plan.batch_size_of(names[user])

    first_user_with: dict[tuple[int, int], int] = {}  # by LoRA rank and batch size
    for user in range(len(names)):
        first_user_with.setdefault(rank_and_batch_size(user), user)

    @cache
    def measured_step_seconds(number: int, user: int) -> float:
        return step_seconds(with_specialists(number), names, user)

    def fits_into_round(number: int, user: int) -> bool:
        limit_seconds = plan.max_seconds_of(names[user])
        if limit_seconds == math.inf:
            return True
        measured_user = first_user_with[rank_and_batch_size(user)]
        return plan.local_steps_of(names[user]) * measured_step_seconds(number, measured_user) <= limit_seconds

    chosen: dict[str, int] = {}
    for user in range(len(names)) if own_indices is None else own_indices:
        number = most_in_memory
        while number > smallest and not fits_into_round(number, user):
            number -= 1
        chosen[names[user]] = number
    return chosen


def _has_generalists(recipe: Recipe) -> bool:
    """Return whether users have a shared expert, and so may be without specialists."""
    return make(recipe.method.name, **recipe.method.settings).placement.generalists > 0


def _fits_in_own_format(
    recipe: Recipe, limit: int, names: tuple[str, ...], own_indices: Sequence[int] | None, process_bytes: int | None
) -> bool:
    """Return whether a run fits into memory without converting the base model to smaller numbers, such as bfloat16.

    Without ``runtime.memory`` the recipe's own settings have to fit. With it the run may also have fewer users and
    sequences in a forward pass, and gradient checkpointing.

    Args:
        recipe: Settings of the run.
        limit: Memory that the run may use, in bytes.
        names: Names of all users of the run.
        own_indices: For a client, the position of its user in ``names``; None for a run that trains all users here.
        process_bytes: Bytes of a process without model and data; None to measure them.
    """
    if recipe.runtime.memory is None:
        memory = _MemoryByPassSize(recipe, names, own_indices=own_indices, process_bytes=process_bytes)
        own_pass_size = memory.pass_size  # numbers of users and sequences by the recipe's settings
        return memory.cost_at(own_pass_size).total_bytes <= limit
    # The choices with the recipe's own number format come first, then those with smaller formats.
    for choice in memory_choices(recipe, names, own_indices=own_indices, process_bytes=process_bytes):
        has_smaller_format = "runtime.dtype" in choice.changes or "quantise" in choice.changes
        if has_smaller_format:
            return False
        if choice.needed_bytes <= limit:
            return True
    return False


def step_seconds(recipe: Recipe, names: tuple[str, ...], user: int) -> float:
    """Return the seconds of a local step of one user, measured here with the recipe's base and batches of token 0.

    They decide how many specialists the user can train within ``training.max_seconds_per_round``. Seconds of a phase
    that runs after every n-th step, such as the router's, are divided by n. Each phase is measured twice after a
    warm-up; the shorter time counts.

    Args:
        recipe: Settings of the run.
        names: Names of all users.
        user: Index of the user in ``names``.
    """
    clients = federate_bare(recipe, NOTHING.load_base(recipe), names, own_indices=[user]).clients
    cohort = clients.cohort([0], 0)
    batch_size = clients.plan.batch_size_of(names[user])
    batch = clients.batch_source.blank(1, batch_size, partial(torch.zeros_like, device=clients.model.device))
    total_seconds = 0.0
    for phase in clients.method.client.phases:
        times = []
        for _ in range(3):
            began = time.perf_counter()
            _losses, gradients = clients.steps.gradient(cohort, batch, phase)
            clients.steps.descend(phase, cohort, gradients, 0)  # as local step 0
            times.append(time.perf_counter() - began)
        _warm_up, *step_times = times
        total_seconds += min(step_times) * phase.steps / phase.every
    return total_seconds


def _plan_within_memory(
    recipe: Recipe,
    methods: Sequence[str],
    *,
    users: int | None,
    participants: Sequence[str],
    for_all: Mapping[str, object],
) -> Plan:
    """Return the costs of a recipe with the settings that ``runtime.memory`` chooses, and all settings to choose from.

    If none fits, the costs are those with the smallest settings. Arguments and exceptions are those of :func:`plan`.
    """
    if len(methods) > 1:
        problem = f"runtime.memory: got {recipe.runtime.memory!r} with {len(methods)} methods"
        raise RecipeError(f"{problem}; allowed: with one method, as settings are chosen for each")
    method_name = methods[0] if methods else recipe.method.name
    recipe_of_method = with_method(recipe, method_name, for_all)
    check_recipe(recipe_of_method)
    names = tuple(participants) or user_names(recipe, users)
    own_indices, process_bytes = None, None
    if participants:  # a federation: choose for the client with the largest model
        own_indices, process_bytes = [_largest_user(recipe_of_method, names)], CLIENT_BYTES
    limit = memory_limit(recipe)
    choices = tuple(memory_choices(recipe_of_method, names, own_indices=own_indices, process_bytes=process_bytes))
    fitting = [choice for choice in choices if choice.needed_bytes <= limit]
    chosen = fitting[0] if fitting else min(choices, key=lambda choice: choice.needed_bytes)
    chosen_recipe = with_chosen_settings(recipe, {**chosen.changes, "runtime.memory": None})
    costs = plan(chosen_recipe, methods, users=users, participants=participants, for_all=for_all)
    return replace(costs, memory=MemoryChoices(limit_bytes=limit, choices=choices))


def _plan_with_specialists(
    recipe: Recipe,
    methods: Sequence[str],
    *,
    users: int | None,
    participants: Sequence[str],
    for_all: Mapping[str, object],
) -> Plan:
    """Return the costs of a recipe with ``method.specialists: auto``, and a note with the numbers that it stands for.

    These are the largest numbers of specialist experts for which this machine has the memory and the speed. Arguments
    and exceptions are those of :func:`plan`.
    """
    names = tuple(participants) or user_names(recipe, users)
    limit = memory_limit(recipe)
    if participants:  # a federation: every client is assumed to have this machine's memory and speed
        first_client = [0]
        number_of_first = choose_specialists(recipe, limit, names, own_indices=first_client, process_bytes=CLIENT_BYTES)
        numbers = dict.fromkeys(names, number_of_first[names[0]])
    else:
        numbers = choose_specialists(recipe, limit, names)
    chosen_recipe = recipe.with_changes({"method.specialists": numbers})
    costs = plan(chosen_recipe, methods, users=users, participants=participants, for_all=for_all)
    shown = list_names(f"{name} {number}" for name, number in numbers.items())
    note = f"method.specialists auto, on this machine: {shown}"
    return replace(costs, note=f"{costs.note}; {note}" if costs.note else note)


def _largest_user(recipe: Recipe, names: Sequence[str]) -> int:
    """Return the index of the user whose model needs the most memory: the most specialists, then the largest rank."""
    recipe = recipe.for_users(names)
    specialists = make(recipe.method.name, **recipe.method.settings).placement.specialists_of(len(names))
    ranks = ranks_of(recipe.adapters, len(names)).tolist()

    def num_specialists_and_rank(user: int) -> tuple[int, int]:
        """Return the key of a user in the comparison."""
        return specialists[user], ranks[user]

    return max(range(len(names)), key=num_specialists_and_rank)


def main() -> None:
    """Read a JSON request from standard input, choose settings for a client, and print them as JSON.

    A client starts this as a process of its own, whose memory is free again when it ends. The request has the keys
    ``recipe``, ``limit`` (in bytes), ``names`` (of all users), ``here`` (a list with the client's index in them) and
    ``process`` (bytes of the client's process). Printed are ``specialists``, for
    ``method.specialists: auto``; for ``runtime.memory`` the fields of the :class:`MemoryChoice` and its ``text``; or an
    ``error``.
    """
    request = json.load(sys.stdin)
    limit, names = request["limit"], tuple(request["names"])
    client = {"own_indices": request["here"], "process_bytes": request["process"]}
    output: dict[str, Any] = {}
    try:
        recipe = parse_recipe(request["recipe"])
        if chooses_specialists(recipe):
            (number,) = choose_specialists(recipe, limit, names, **client).values()
            recipe = recipe.with_changes({"method.specialists": number})
            output["specialists"] = number
        if recipe.runtime.memory is not None:
            choice = choose_within(recipe, limit, names, **client)
            output.update(asdict(choice), text=choice.describe(limit))
    except ComingleError as error:
        output = {"error": str(error)}
    print(json.dumps(output))


if __name__ == "__main__":
    main()
