"""From a recipe to its plan: every method on one base without weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch

from comingle.config import Recipe
from comingle.config.files import check_used
from comingle.config.settings import EVERYBODY
from comingle.costing.bare import bare_mixture
from comingle.costing.counts import count_users
from comingle.costing.footprint import process_bytes
from comingle.costing.nets import plan_nets
from comingle.costing.paper import Account, Difference, Sizes, table3
from comingle.costing.passes import Rehearsal, rehearse
from comingle.costing.reading import as_text
from comingle.costing.records import MethodCost, Plan
from comingle.costing.skeleton import load_skeleton
from comingle.costing.stacked import BaseFlops as BaseFlops
from comingle.costing.stacked import count_stacked, text_load
from comingle.costing.summaries import check_count, largest_round, summarise, with_method, with_privacy
from comingle.data.text.streams import UserData
from comingle.methods import make
from comingle.models.base import Base
from comingle.models.generation import check_places
from comingle.models.hardware import free_bytes
from comingle.models.quantised import packed_parameters
from comingle.runs.api import without_sums
from comingle.runs.given import HANDED_OVER, NOTHING
from comingle.runs.session import check_method, training_settings
from comingle.training.backends.local import InProcess, federate
from comingle.training.client import Clients, batch_size
from comingle.training.kinds.base import adapt_base, kind_of
from comingle.training.kinds.text import TextFeed
from comingle.training.settings import portions
from comingle.utils.errors import DataError, RecipeError


def plan(
    recipe: Recipe,
    methods: Sequence[str] = (),
    *,
    users: int | None = None,
    for_all: Mapping[str, Any] = MappingProxyType({}),
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
        check_method(one)
        check_used(one)
    if (kind := kind_of(recipe)).read_for_costs:
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
    if users is not None and recipe.privacy is not None and recipe.privacy.mechanism == "example":
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
    training = training_settings(recipe, names)
    placement = method.placement
    alike = isinstance(placement.specialists, int) and isinstance(recipe.adapters.rank, int)
    numbers = range(len(names)) if here is None else here
    if alike and not placement.pooled:
        numbers = numbers[: portions(training, base.device, training.batch_size).users]
    people = [_nobody(names[number]) for number in numbers]
    trainers = [_nobody("everyone")] if placement.pooled else people
    if placement.mixture is not None and not placement.mixture.trains_apart:
        model = bare_mixture(recipe, base, method, len(trainers))
    else:
        unlike = not alike and not placement.pooled  # then everybody is listed
        among = len(names) if unlike else len(trainers)
        tokens = among * training.iterations * training.batch_size * training.context
        model = adapt_base(recipe, base, method, among, tokens)
        model = model.only(numbers) if unlike else model
    feed = TextFeed(trainers, training, batch_size(method, training, len(people)))
    return federate(Clients(model, method, training, trainers=trainers, users=people, feed=feed, reads=False))


def _nobody(name: str) -> UserData:
    nothing = torch.empty(0, dtype=torch.int32)
    return UserData(name=name, train=nothing, valid=nothing, test=nothing)


def method_cost(
    recipe: Recipe, base: Base, names: tuple[str, ...], free: int, participation: Any = EVERYBODY
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
    participation: Any = EVERYBODY,
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
