"""One method's costs together, its privacy, and how to make it fit."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from comingle.config import Recipe
from comingle.config.settings import MEMORY, Privacy, Training
from comingle.cost.counts import count_exchanges
from comingle.cost.memory import Rehearsal, memory
from comingle.cost.records import MemoryCost, MethodCost, UserCost
from comingle.cost.stored import Writes, store_bytes, user_bytes
from comingle.methods import make, settings_beside
from comingle.methods.base import Method
from comingle.privacy.accounting import accountant_of, epsilon, release_of, sample_size
from comingle.privacy.guard import Ledger
from comingle.privacy.noise import Work, multiplier_of, spent_by
from comingle.privacy.robust import check_rounds
from comingle.runs.session import build, prepare, training_settings
from comingle.training.kinds.base import kind_of
from comingle.training.privacy import planned_releases
from comingle.training.settings import Portions, round_sizes
from comingle.training.storage.opening import check_storable
from comingle.utils.errors import RecipeError


def promise(training: Training, method: Method, users: Sequence[str]) -> dict[str, Any]:
    """What a whole run will have revealed of the user of whom most is; nothing where the recipe has no privacy.

    Where the noise is given and a budget too, a run of fewer rounds than planned stays within it.
    """
    privacy = training.privacy
    if privacy is None or not privacy.noisy:
        return {}
    release = release_of(privacy, training.participation, len(users))
    planned, accountant = planned_releases(training, method, users), accountant_of(privacy, release)

    def spends(count: int) -> float:
        return epsilon(release, count, privacy.delta, accountant)

    count = _affordable(privacy, planned, spends)
    return {
        "mechanism": privacy.mechanism,
        "epsilon": spends(count),
        "delta": privacy.delta,
        "noise_multiplier": privacy.multiplier,
        "clip_norm": privacy.clip_norm,
        "accountant": accountant,
        "releases": count,
        "planned_releases": planned,
    }


def promise_of_examples(ledger: Ledger) -> dict[str, Any]:
    """The same where single examples are hidden: of the user of whom most will have been revealed."""
    privacy = ledger.privacy

    def ends(work: Work) -> tuple[float, Work, int]:
        def spends(rounds: int) -> float:
            return spent_by(privacy, work, rounds * work.steps)

        rounds = _affordable(privacy, work.rounds, spends)
        return spends(rounds), work, rounds * work.steps

    most, work, steps = max((ends(work) for work in ledger.works().values()), key=lambda found: found[0])
    return {
        "mechanism": privacy.mechanism,
        "epsilon": most,
        "delta": privacy.delta,
        "noise_multiplier": multiplier_of(privacy, work),
        "clip_norm": privacy.clip_norm,
        "accountant": privacy.accountant,
        "releases": steps,
        "planned_releases": work.planned,
    }


def _affordable(privacy: Privacy, planned: int, spends: Callable[[int], float]) -> int:
    """How many of the planned rounds stay within the budget."""
    budget = math.inf if privacy.epsilon is None else privacy.epsilon
    return bisect_right(range(1, planned + 1), budget, key=spends)


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
    if training.aggregation is not None and method.shared:
        check_rounds(training.aggregation, round_sizes(training, names), same_ranks=True)
    if recipe.privacy is None:
        return cost
    if recipe.privacy.mechanism != "example":
        return replace(cost, privacy=promise(training, method, names))
    read = (whole or recipe).with_changes({"training.participation": participation})
    return replace(cost, privacy=_promise_of_examples(read))


def _promise_of_examples(recipe: Recipe) -> dict[str, Any]:
    """What a run reveals of single examples, which follows from how many each user has: their data is read."""
    guard = build(recipe, prepare(recipe)).server.guard
    assert isinstance(guard, Ledger)
    return promise_of_examples(guard)


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
