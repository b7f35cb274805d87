"""Which methods and settings a rule applies to; the others are refused with the reason."""

from __future__ import annotations

from collections.abc import Collection

from comingle.config.settings import Aggregation, Privacy
from comingle.methods.base import Method
from comingle.utils.errors import RecipeError

WEIGHTED = ("geometric-median", "norm-bound")
"""Rules in which users' weights are of use."""


def check_robust(
    method: Method, aggregation: Aggregation, *, weighting: str, select: str, privacy: Privacy | None
) -> None:
    """Whether the rule can take the place of the method's mean.

    Raises:
        RecipeError: it cannot; says why.
    """
    rule = aggregation.rule
    if method.placement.pooled:
        raise RecipeError(f"aggregation: method {method.name} pools everybody's data, among which no rule chooses")
    if not method.shared:
        return
    if why := _unbounded(method) if rule == "norm-bound" else _unknown(method):
        raise RecipeError(f"aggregation: {rule} with method {method.name}: {why}")
    if weighting != "uniform" and rule not in WEIGHTED:
        raise RecipeError(
            f"training.weighting: got {weighting}, but {rule} gives all users the same weight, as amounts of data "
            f"can be lies; allowed: uniform, or aggregation {' or '.join(WEIGHTED)}"
        )
    if select == "best":
        raise RecipeError(
            "aggregation: evaluation.select: best goes by the mean of users' validation losses, of which one false "
            "one decides; allowed: last"
        )
    if privacy is not None and privacy.secure_aggregation is not None:
        raise RecipeError(
            f"aggregation: {rule} with privacy.secure_aggregation, where the server sees a sum and no upload that it "
            "could judge; allowed: mean, or no secure_aggregation"
        )
    if privacy is not None and privacy.mechanism == "central":
        raise RecipeError(
            f"aggregation: {rule} with privacy.mechanism: central, whose noise covers a sum of clipped changes and "
            "nothing else; its clip norm bounds each user's influence already; allowed: mean, or mechanism: local"
        )


def check_rounds(aggregation: Aggregation, sizes: Collection[int], *, same_ranks: bool) -> None:
    """Whether rounds of so many users are large enough, and uploads have the same coordinates.

    Raises:
        RecipeError: they are not.
    """
    rule = aggregation.rule
    for size in sorted(sizes):
        if not aggregation.enough(size):
            hostile = aggregation.hostile_among(size)
            raise RecipeError(
                f"aggregation: {rule} needs {aggregation.needed(hostile)} users in a round with {hostile} hostile ones "
                f"among them, and training.participation leaves {size}; allowed: more users, a smaller "
                "aggregation.hostile, or another rule"
            )
    if rule != "norm-bound" and not same_ranks:
        raise RecipeError(
            f"aggregation: {rule} compares users coordinate by coordinate, and adapters.rank differs between them; "
            "allowed: one rank, or norm-bound"
        )


def _unbounded(method: Method) -> str:
    """Why no change can be bounded."""
    if method.server.knows_starts:
        return ""
    if method.server.peer_to_peer:
        return "users mix each other's uploads themselves, so the server makes nothing of them"
    return (
        f"what its server ({type(method.server).__name__}) makes of uploads follows from more than their change "
        "against what was downloaded, so a bound on that bounds nothing"
    )


def _unknown(method: Method) -> str:
    """Why uploads cannot be put together without looking at who sent them."""
    if method.server.clipped_mean:
        return ""
    allowed = "" if _unbounded(method) else "; allowed: norm-bound"
    return f"its server ({type(method.server).__name__}) makes no mean whose weights no upload decides on{allowed}"
