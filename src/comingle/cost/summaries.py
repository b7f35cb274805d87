"""One method's costs together, its privacy, and how to make it fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from comingle.config import Recipe
from comingle.config.settings import MEMORY, protects_examples
from comingle.cost.counts import count_exchanges
from comingle.cost.memory import Rehearsal, memory
from comingle.cost.records import MemoryCost, MethodCost, UserCost
from comingle.cost.stored import Writes, store_bytes, user_bytes
from comingle.methods import make, settings_beside
from comingle.privacy.accounting import sample_size
from comingle.runs.session import build, prepare, training_settings
from comingle.training.kinds.base import kind_of
from comingle.training.privacy import planned_releases, server_mechanisms
from comingle.training.settings import Portions, round_sizes
from comingle.training.storage.disk import check_storable
from comingle.utils.errors import RecipeError

NONE_FITS = "no smaller pass fits; take a smaller base, fewer users or a smaller adapters.rank"
_USERS, _SEQUENCES = "runtime.users_per_step", "runtime.micro_batch"


def with_method(recipe: Recipe, name: str, for_all: Mapping[str, Any] = MappingProxyType({})) -> Recipe:
    """The recipe with another method and its defaults; ``for_all`` are settings for whichever method has them.

    Who takes part in which round does not change what a round costs one user. Language models are not compiled.
    """
    settings = settings_beside(name, recipe.method.name, recipe.method.settings, for_all)
    changes: dict[str, Any] = {"method": {"name": name, **settings}, "training.participation": 1.0}
    if not kind_of(recipe).read_for_costs:  # compiled code for nets takes what is known, and little time
        changes["runtime.compile"] = False
    return recipe.with_changes(changes)


def with_privacy(
    cost: MethodCost, recipe: Recipe, names: Sequence[str], participation: Any, *, whole: Recipe | None = None
) -> MethodCost:
    """The costs with what a run reveals, where the recipe has privacy; it depends on who takes part how often.

    ``whole`` is the recipe as it was, where ``recipe`` has other text that costs as much.

    Raises:
        RecipeError: so few take part that the recipe's rule of aggregation cannot be used.
    """
    if recipe.privacy is None and recipe.aggregation.is_mean:
        return cost
    recipe = recipe.with_changes({"training.participation": participation})
    method, training = make(recipe.method.name, **recipe.method.settings), training_settings(recipe, names)
    mechanisms = server_mechanisms(training, names)
    if method.shared:
        for mechanism in mechanisms:
            mechanism.check_rounds(round_sizes(training, names), same_ranks=True)
    if recipe.privacy is None:
        return cost
    if protects_examples(recipe.privacy.mechanism):  # epsilon follows from how many a user has: their data is read
        read = (whole or recipe).with_changes({"training.participation": participation})
        mechanisms = build(read, prepare(read)).server.mechanisms
    planned = planned_releases(training, method, names)
    return replace(cost, privacy={key: v for one in mechanisms for key, v in one.forecast(planned).items()})


def check_count(users: int | None) -> None:
    """Whether there can be so many users.

    Raises:
        RecipeError: there cannot.
    """
    if users is not None and users < 1:
        raise RecipeError(f"--users: got {users}; allowed: whole numbers from 1")


def largest_round(participation: Any, users: int) -> int:
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
    clients, training = stage.federation.clients, stage.federation.clients.training
    if stage.store == MEMORY:
        return 0
    check_storable(clients)
    copies = clients.method.placement.copies
    writes = Writes(
        users=stage.trainers * copies,
        present=stage.present * copies,
        evaluated=min(training.evaluate_users or stage.trainers, stage.trainers) * copies,
        rounds=training.rounds,
        evaluate_every=training.period,
        every=training.checkpoint_every,
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
