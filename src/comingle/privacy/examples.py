"""Privacy of single examples at the user (DP-SGD): which are drawn for a step, and the noise on their sum.

Source: Abadi et al. 2016, "Deep Learning with Differential Privacy", arXiv:1607.00133, Algorithm 1. An example is drawn
by itself with a chance of its own (Poisson sampling), and the sum of clipped gradients is divided by the number that is
expected. Neighbours are data sets of which one example is there, or adds nothing; how many there are is public.

Draws and noise depend on the user's key and on what the step begins with. So whoever asks for a round again with other
tensors gets another batch and other noise, and whoever asks with the same ones gets the same answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from comingle.config.settings import Privacy
from comingle.privacy.accounting import Release, epsilon, least_noise
from comingle.privacy.noise import add_noise, uniform
from comingle.utils.trees import Tree


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a user does in a run: ``steps`` with noise in each of ``rounds``, of ``batch`` examples in the mean."""

    examples: int
    batch: int
    steps: int
    rounds: int

    @property
    def rate(self) -> float:
        """The chance of an example to be in a batch."""
        return min(1.0, self.batch / max(1, self.examples))

    @property
    def expected(self) -> float:
        """How many examples a batch has in the mean, by which sums are divided: public, whoever was drawn."""
        return max(1.0, self.rate * self.examples)

    @property
    def planned(self) -> int:
        """Steps with noise of the whole run."""
        return self.steps * self.rounds


@lru_cache(maxsize=1 << 12)
def multiplier_of(privacy: Privacy, work: Work) -> float:
    """A user's noise multiplier: as given, or the least with which all that is planned spends epsilon.

    Raises:
        RecipeError: no noise is enough, or the package that computes it is not installed.
    """
    if privacy.noise_multiplier is not None:
        return privacy.noise_multiplier
    return least_noise(privacy, work.planned, lambda z: Release(noise=z, rate=work.rate))


def spent_by(privacy: Privacy, work: Work, steps: int) -> float:
    """Epsilon of a user's examples after so many steps with noise."""
    if steps == 0:
        return 0.0
    release = Release(noise=multiplier_of(privacy, work), rate=work.rate)
    return epsilon(release, steps, privacy.delta, privacy.accountant)


@dataclass(kw_only=True)
class Examples:
    """What users do; ``key`` is theirs, and never the server's."""

    privacy: Privacy
    key: str

    def draw(self, work: Work, *parts: str | int) -> Int64[Tensor, " drawn"]:
        """The numbers of those examples of a user that are in a batch."""
        return torch.from_numpy(np.flatnonzero(uniform(work.examples, self.key, *parts, "examples") < work.rate))

    def noised(self, sums: Tree, work: Work, *parts: str | int) -> Tree:
        """``(sum of clipped gradients + N(0, (z C)^2)) / expected``, float64, of one user."""
        deviation = multiplier_of(self.privacy, work) * self.privacy.first_bound
        found = add_noise(sums, deviation, self.key, *parts, "example noise")
        return {name: t / work.expected for name, t in found.items()}
