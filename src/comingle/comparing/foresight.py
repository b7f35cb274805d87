"""Checks before advice is trained for: reasons why it may say little, and how many seeds it needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from statistics import median

from comingle.comparing import trials
from comingle.config import Recipe
from comingle.data.samples.samples import SPLITS, Samples
from comingle.data.splits import REPEATED
from comingle.training.kinds.base import Materials
from comingle.utils.errors import list_names

_MANY = 5
"""Seeds where intervals would be wide with three: they hold together over all users."""

_FEW_TESTED = {"tokens": 2_000, "samples": 100}
"""With less test data a user's result differs between seeds more than methods do."""

_ALIKE, _PAIRS_UP_TO = 0.9, 50
"""Share of the smaller user's data from which on two users are alike, and for how many users pairs are compared."""

_LEAST_READ = 0.25
"""Share of the training data below which short runs say little about whole ones."""


def choose_seeds(recipe: Recipe, materials: Materials, unit: str) -> tuple[int, ...]:
    """Return the seeds that advice needs: three for two users with enough test data, else five.

    One where each seed would evaluate other users, or leave others out, which cannot be compared; with ``data.seed``
    the same are left out.
    """
    if recipe.evaluation.users or (materials.skipped and recipe.data.seed is None):
        return trials.SEEDS[:1]
    small = any(len(user.test) < _FEW_TESTED.get(unit, 0) for user in materials.users)
    return trials.SEEDS if len(materials.users) == 2 and not small else tuple(range(_MANY))


def foresee(recipe: Recipe, materials: Materials, seeds: Sequence[int], unit: str) -> Iterator[str]:
    """Yield what will make the advice weak or wrong, one line each.

    Args:
        recipe: of the short runs.
        materials: what the users have.
        seeds: of the runs.
        unit: what the users' data is counted in.
    """
    if len(seeds) == 1:
        yield "one seed gives no intervals, so no user can be shown to gain or be harmed; give --seeds 0,1,2"
    yield from _equal(materials)
    small = [user.name for user in materials.users if len(user.test) < _FEW_TESTED.get(unit, 0)]
    if small:
        least = min(len(user.test) for user in materials.users)
        yield (
            f"little test data ({least:,} {unit} at least): {list_names(small)}; intervals will be wide, which more "
            "test data or more --seeds narrow"
        )
    yield from _barely_read(recipe, materials, unit)
    for overlap in materials.overlaps():
        yield (
            f"user {overlap.user}: {overlap.test} of {overlap.test_documents} test {materials.documents} are "
            f"{REPEATED}, so training alone will look better than it is"
        )


def _equal(materials: Materials) -> Iterator[str]:
    """Look for users with the same data, whose gain from each other is that of more steps on it."""
    pieces = _pieces(materials)
    if len(pieces) > _PAIRS_UP_TO:
        return
    what = "documents" if materials.texts else "samples"
    for (one, its), (other, theirs) in combinations(pieces.items(), 2):
        fewest = min(len(its), len(theirs))
        if fewest and (common := len(its & theirs)) >= _ALIKE * fewest:
            yield (
                f"users {one} and {other} have {common:,} of {fewest:,} {what} in common: their gain from each other "
                "is not that of another user; give each data of its own, or leave one out"
            )


def _pieces(materials: Materials) -> dict[str, frozenset[int]]:
    """Return hashes of each user's documents or samples, of all splits together: each user's are split differently."""
    if materials.texts:
        return {t.name: frozenset(map(hash, (*t.train, *t.valid, *t.test))) for t in materials.texts}
    return {
        user.name: frozenset(
            hash((one.numpy().tobytes(), target.numpy().tobytes()))
            for split in SPLITS
            if isinstance(samples := getattr(user, split), Samples)
            for one, target in zip(samples.inputs, samples.targets, strict=True)
        )
        for user in materials.present
    }


def _barely_read(recipe: Recipe, materials: Materials, unit: str) -> Iterator[str]:
    """Compare the tokens of all rounds with the training text; passes read everything in each round."""
    training = recipe.training
    if unit != "tokens" or "training.local_steps" in recipe.data.unread:
        return
    read = training.rounds * training.local_steps * training.batch_size * training.context
    typical = median(len(user.train) for user in materials.users)
    if read < _LEAST_READ * typical:
        rounds = -(-typical * _LEAST_READ // (read / training.rounds))
        yield (
            f"{training.rounds} rounds read {read:,} tokens of each user, {100 * read / typical:.0f}% of "
            f"{typical:,.0f}: too few to tell who gains; give --rounds {rounds:.0f} or more"
        )
