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
    """A statement about one run. ``bound`` is None where its conditions fail; ``at_least`` marks a lower bound."""

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
        """Share of the bound that is used; above 1 the statement fails."""
        if self.bound is None:
            return 0.0
        return self.bound / self.measured if self.at_least else self.measured / self.bound

    @property
    def holds(self) -> bool:
        """True if the measured value obeys the bound, up to rounding."""
        if self.bound is None:
            return True
        slack = ROUNDING * abs(self.bound)
        return self.measured >= self.bound - slack if self.at_least else self.measured <= self.bound + slack


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One run: the residual before every step, the claims about it, and predicted rates to draw."""

    scheme: str
    instance: int
    residuals: tuple[float, ...]
    claims: tuple[Claim, ...]
    rates: dict[str, float]
    notes: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A statement over all instances of a scheme; ``measured`` and ``bound`` are those of the tightest instance."""

    scheme: str
    statement: str
    instances: int
    covered: int
    held: int
    measured: float
    bound: float | None
    at_least: bool


def summarise(curves: list[Curve]) -> list[Row]:
    """Return one row per scheme and statement, in order of appearance."""
    groups: dict[tuple[str, str], list[Claim]] = {}
    for curve in curves:
        for claim in curve.claims:
            groups.setdefault((curve.scheme, claim.statement), []).append(claim)
    return [_row(scheme, statement, claims) for (scheme, statement), claims in groups.items()]


def worst_step(residuals: Float[np.ndarray, " steps"], floor: float | None = None) -> float:
    """Return the largest ratio of successive residuals among steps that start above the rounding floor."""
    floor = DISTANCE_FLOOR * float(residuals[0]) if floor is None else floor
    before, after = residuals[:-1], residuals[1:]
    return float((after[before > floor] / before[before > floor]).max(initial=0.0))


def _row(scheme: str, statement: str, claims: list[Claim]) -> Row:
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
