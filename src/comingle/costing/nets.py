"""From a recipe of users with samples to its plan: every method on their net."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from comingle.config import Recipe
from comingle.config.settings import EVERYBODY
from comingle.costing.bare import bare_nets
from comingle.costing.footprint import process_bytes
from comingle.costing.passes import Rehearsal, rehearse
from comingle.costing.records import MethodCost, Plan
from comingle.costing.stacked import BaseFlops, Load, count_stacked, measured_base
from comingle.costing.summaries import check_count, largest_round, summarise, with_method, with_privacy
from comingle.data.populations import Crowd, names_of
from comingle.data.samples.reading import Population
from comingle.data.samples.samples import SPLITS
from comingle.models.hardware import free_bytes
from comingle.runs.session import prepare
from comingle.training.client import Clients
from comingle.training.kinds.base import kind_of


def plan_nets(recipes: Sequence[Recipe], users: int | None = None, participation: Any = 1.0) -> Plan:
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
        rounds=clients.training.rounds,
        local_steps=max(load.steps for load in loads_of(clients, population).values()),
        batch_size=clients.training.batch_size,
        context=0,
        base_flops=costs[0].users[0].forward.base,
        free_bytes=free,
        methods=tuple(costs),
        table3=(),
        unit="sample",
    )


def net_cost(recipe: Recipe, population: Population, base: BaseFlops, free: int, participation: Any) -> MethodCost:
    """Everything about one method; ``base`` is the net alone."""
    stage = rehearse_nets(recipe, population, participation)
    users = count_stacked(stage, loads_of(stage.federation.clients, population), base)
    return summarise(stage, users, free, keep=recipe.checkpoints.keep)


def rehearse_nets(
    recipe: Recipe, population: Population, participation: Any = EVERYBODY, everybody: Sequence[str] | None = None
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
        reads_cohorts=isinstance(population.users, Crowd),
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
        load = Load(sizes=sizes, epochs=clients.training.local_epochs, sweeps=len(swept), swept=sum(swept))
        loads[name] = known.setdefault(load, load)
    return loads


def data_bytes(population: Population, dtype: torch.dtype) -> int:
    """Everybody's samples, once as they were read and once as batches are gathered from them.

    Of those who lie in a file sizes are known: all splits have the shapes of the first user's.
    """
    users, total = population.users, 0
    if isinstance(users, Crowd) and users.sizes is not None:
        one = data_bytes(replace(population, users=[users[0]]), dtype)
        return int(one * users.sizes.sum() / users.sizes[0].sum())
    for part in (user.split(split) for user in users for split in SPLITS):
        total += part.inputs.nbytes + part.targets.nbytes + part.inputs.numel() * dtype.itemsize
        total += part.targets.numel() * (dtype if part.targets.is_floating_point() else part.targets.dtype).itemsize
    return total
