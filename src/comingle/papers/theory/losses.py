"""Convex losses of linear experts, as functions of one output and its target (CoMiGS eq. 21)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float
from scipy import special

LossName = Literal["logistic", "squared"]
PerSample = Float[np.ndarray, " samples"]


@dataclass(frozen=True)
class Logistic:
    """``ln(1 + exp(-y t))`` for targets y of -1 or 1."""

    name: LossName = "logistic"
    max_curvature: float = 0.25

    def value(self, outputs: PerSample, targets: PerSample) -> PerSample:
        """One loss for each sample, in nats."""
        return np.logaddexp(0.0, -targets * outputs)

    def slope(self, outputs: PerSample, targets: PerSample) -> PerSample:
        """First derivative by the output."""
        return -targets * special.expit(-targets * outputs)

    def curvature(self, outputs: PerSample, targets: PerSample) -> PerSample:
        """Second derivative by the output."""
        return special.expit(targets * outputs) * special.expit(-targets * outputs)

    def slope_bound(self, largest_output: float, targets: PerSample) -> float:
        """Largest absolute first derivative for outputs up to ``largest_output`` in size; at most 1."""
        return float(special.expit(largest_output))


@dataclass(frozen=True)
class Squared:
    """``(t - y)^2 / 2``. Its derivative is bounded only where outputs are, so rho of Proposition 1 needs a ball."""

    name: LossName = "squared"
    max_curvature: float = 1.0

    def value(self, outputs: PerSample, targets: PerSample) -> PerSample:
        """One loss for each sample."""
        return (outputs - targets) ** 2 / 2

    def slope(self, outputs: PerSample, targets: PerSample) -> PerSample:
        """First derivative by the output."""
        return outputs - targets

    def curvature(self, outputs: PerSample, targets: PerSample) -> PerSample:
        """Second derivative by the output."""
        return np.ones_like(outputs)

    def slope_bound(self, largest_output: float, targets: PerSample) -> float:
        """Largest absolute first derivative for outputs up to ``largest_output`` in size."""
        return largest_output + float(np.abs(targets).max())


Loss = Logistic | Squared
LOSSES: dict[str, Loss] = {"logistic": Logistic(), "squared": Squared()}
