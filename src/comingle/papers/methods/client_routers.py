"""What routers of users do beside their steps, and what the server makes of those of each layer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from comingle.methods.client import Part
from comingle.methods.cohort import ROUTERS, Cohort, Phase
from comingle.utils.trees import Tree


@dataclass(frozen=True)
class WarmUp(Part):
    """The router takes some steps before the others, at the start of each round; maybe from what it was at first."""

    steps: int
    forget: bool
    roles = ROUTERS

    @property
    def resets(self) -> bool:
        """Whether it asks for the router of before any training."""
        return self.forget

    def begin(self, cohort: Cohort) -> None:
        """Forget, then warm up."""
        if self.forget:
            cohort.reset(ROUTERS)
            cohort.forget(ROUTERS)
        for phase in self.before:
            cohort.take_steps(phase)

    @property
    def before(self) -> tuple[Phase, ...]:
        """The router's steps."""
        return (Phase(roles=ROUTERS, steps=self.steps, optimizer="router"),) if self.steps else ()


def by_layer(mixtures: Float[Tensor, "users *layers clusters"], names: Collection[str]) -> Tree:
    """The vector that each adaptor's tensor is mixed by; layers are numbered in the order of the names."""
    if mixtures.ndim == 2:
        return dict.fromkeys(names, mixtures)
    places = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    return {name: mixtures[:, places.index(name.rpartition(".")[0])].contiguous() for name in names}
