"""Claims: statements with their measured and predicted values, and a row that summarises each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

RELATIVE_ROUNDING_ERROR = 1e-6
"""Largest relative rounding error of a measured value."""
DISTANCE_FLOOR = 1e-9
"""Smallest distance from the solution, relative to the first, that is not mostly rounding."""
VALUE_FLOOR = 1e-10
"""Smallest excess of an objective, relative to its value, that is not mostly rounding."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A paper's statement ``measured <= bound`` about one run; ``measured >= bound`` if ``at_least``.

    ``bound`` is None where the statement's conditions fail.
    """

    statement: str
    measured: float
    bound: float | None
    at_least: bool = False

    @property
    def covered(self) -> bool:
        """True if the statement applies to this run."""
        return self.bound is not None

    @property
    def tightness(self) -> float:
        """Ratio measured / bound, or bound / measured for a lower bound: above 1 the statement fails.

        The ratio is 0 if the statement does not apply to this run.
        """
        if self.bound is None:
            return 0.0
        if self.at_least:
            return self.bound / self.measured
        return self.measured / self.bound

    @property
    def holds(self) -> bool:
        """True if the measured value obeys the bound, up to rounding, or if the statement does not apply."""
        if self.bound is None:
            return True
        rounding_error = RELATIVE_ROUNDING_ERROR * abs(self.bound)
        if self.at_least:
            return self.measured >= self.bound - rounding_error
        return self.measured <= self.bound + rounding_error


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Residuals of an algorithm before every step, claims about the run, and predicted rates per step to draw.

    ``scheme`` names the kind of problem and ``instance`` numbers its random problems. ``rates`` are by statement, and
    ``notes`` are constants of the problem, by name.
    """

    scheme: str
    instance: int
    residuals: tuple[float, ...]
    claims: tuple[Claim, ...]
    rates: dict[str, float]
    notes: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A statement over all instances of a scheme; ``measured`` and ``bound`` are those of the tightest instance.

    ``covered`` counts the instances that have a bound, ``held`` those of them that obey it.
    """

    scheme: str
    statement: str
    instances: int
    covered: int
    held: int
    measured: float
    bound: float | None
    at_least: bool


def summarise(curves: list[Curve]) -> list[Row]:
    """Return a row for each kind of problem ("scheme") and each statement about it, in order of appearance."""
    groups: dict[tuple[str, str], list[Claim]] = {}
    for curve in curves:
        for claim in curve.claims:
            group = groups.setdefault((curve.scheme, claim.statement), [])
            group.append(claim)
    return [_summarise_claims(scheme, statement, claims) for (scheme, statement), claims in groups.items()]


def largest_step_ratio(residuals: Float[np.ndarray, " steps"], floor: float | None = None) -> float:
    """Return the largest ratio of the residual after a step to the residual before it.

    Steps from a residual at or below ``floor`` do not count, as their residuals are mostly rounding errors.

    Args:
        residuals: The residual before every step.
        floor: Smallest residual that counts; None for ``DISTANCE_FLOOR`` times the first residual.
    """
    if floor is None:
        floor = DISTANCE_FLOOR * float(residuals[0])
    before, after = residuals[:-1], residuals[1:]
    is_above_floor = before > floor
    ratios = after[is_above_floor] / before[is_above_floor]
    return float(ratios.max(initial=0.0))


def _summarise_claims(scheme: str, statement: str, claims: list[Claim]) -> Row:
    """Return the row of one statement: how many random problems ("instances") obey it, and the tightest of them.

    A statement covers an instance if its conditions hold there, so that it has a bound.

    Args:
        scheme: Name of the kind of problem, by which curves are grouped.
        statement: Name of the statement.
        claims: The statement about each instance.
    """
    covered = [claim for claim in claims if claim.covered]
    held = [claim for claim in covered if claim.holds]
    # Any claim without a bound is less tight than all with one.
    tightest = max(claims, key=lambda claim: (claim.covered, claim.tightness))
    return Row(
        scheme=scheme,
        statement=statement,
        instances=len(claims),
        covered=len(covered),
        held=len(held),
        measured=tightest.measured,
        bound=tightest.bound,
        at_least=tightest.at_least,
    )
