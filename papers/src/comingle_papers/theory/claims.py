"""Claims: statements with their measured and predicted values, and a row that summarises each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

ROUNDING = 1e-6
"""Relative error that rounding leaves in a measured contraction above the floors below."""
DISTANCE_FLOOR = 1e-9
VALUE_FLOOR = 1e-10
"""Floor of relative residuals: differences of two values, each exact to some 1e-16."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement of a paper about one run, with the measured value and its bound.

    ``bound`` is None where the statement's conditions fail; ``at_least`` marks a lower bound.
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
        """Share of the bound that the measured value uses: measured / bound, or bound / measured for a lower bound.

        At 1 both are equal, above 1 the statement fails. The share is 0 if the statement does not apply.
        """
        if self.bound is None:
            return 0.0
        return self.bound / self.measured if self.at_least else self.measured / self.bound

    @property
    def holds(self) -> bool:
        """True if the measured value obeys the bound, up to rounding, or if the statement does not apply."""
        if self.bound is None:
            return True
        slack = ROUNDING * abs(self.bound)
        return self.measured >= self.bound - slack if self.at_least else self.measured <= self.bound + slack


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One run: the residual before every step, the claims about it, and predicted rates per step to draw.

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
    """Summarise the statements of all curves: one row per kind of problem ("scheme") and statement.

    Rows are in order of appearance.
    """
    groups: dict[tuple[str, str], list[Claim]] = {}
    for curve in curves:
        for claim in curve.claims:
            groups.setdefault((curve.scheme, claim.statement), []).append(claim)
    return [_summarise_claims(scheme, statement, claims) for (scheme, statement), claims in groups.items()]


def largest_step_ratio(residuals: Float[np.ndarray, " steps"], floor: float | None = None) -> float:
    """Return the largest factor by which a step multiplied the residual, to compare with a paper's bound on it.

    Only steps that start above the rounding floor count; below it residuals are mostly rounding errors.

    Args:
        residuals: The residual before every step.
        floor: The rounding floor; None for ``DISTANCE_FLOOR`` times the first residual.
    """
    floor = DISTANCE_FLOOR * float(residuals[0]) if floor is None else floor
    before, after = residuals[:-1], residuals[1:]
    is_measurable = before > floor
    return float((after[is_measurable] / before[is_measurable]).max(initial=0.0))


def _summarise_claims(scheme: str, statement: str, claims: list[Claim]) -> Row:
    """Summarise one statement about one algorithm ("scheme") over all random problems ("instances").

    The row says how many instances obey the statement, and has the values of the instance closest to its bound.

    Args:
        scheme: Name of the kind of problem.
        statement: The statement.
        claims: The claim of each instance. Claims with ``covered`` are of instances that meet the statement's
            conditions; only these have a bound.
    """
    # A claim with a bound comes before all claims without.
    tightest = max(claims, key=lambda claim: (claim.covered, claim.tightness))
    covered = [claim for claim in claims if claim.covered]
    return Row(
        scheme=scheme,
        statement=statement,
        instances=len(claims),
        covered=len(covered),
        held=sum(claim.holds for claim in covered),
        measured=tightest.measured,
        bound=tightest.bound,
        at_least=tightest.at_least,
    )
