"""What a method is: data (who holds what, which experts, which phases) and one function (the server).

A method never sees a recipe, a loop, an optimiser or a file; engines own those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from comingle.errors import RecipeError
from comingle.trees import Tree

Server = Callable[[Tree, Float[Tensor, " users"]], Tree]
"""Maps stacked uploads ``(users, ...)`` and the users' weights (summing to 1, 0 if absent) to stacked downloads."""

Stream = Literal["train", "valid"]


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Which tensors a user updates on which text, how often.

    After every ``every``-th of a user's own local iterations the phase takes ``steps`` optimiser steps on the roles it
    names, each on a fresh random batch of ``stream``. ``optimizer`` names whose settings and step count it uses.
    """

    roles: frozenset[str]
    stream: Stream = "train"
    every: int = 1
    steps: int = 1
    optimizer: Literal["experts", "router"] = "experts"


@dataclass(frozen=True, kw_only=True)
class Method:
    """A federated method.

    ``specialists`` is one number for all users or one per user. ``shared`` names the roles that are sent to the server
    and averaged there; every other role that a phase trains is local, the rest is frozen. ``pooled`` trains a single
    model on everybody's text (an upper bound that no federation may use).
    """

    name: str
    generalists: int = 1
    specialists: int | tuple[int, ...] = 0
    routed: bool = False
    shared: frozenset[str] = field(default_factory=frozenset)
    phases: tuple[Phase, ...] = ()
    server: Server
    pooled: bool = False

    @property
    def trained(self) -> frozenset[str]:
        """Every role that some phase trains."""
        return frozenset().union(*(phase.roles for phase in self.phases))

    @property
    def needs_validation(self) -> bool:
        """Whether some phase trains on validation text."""
        return any(phase.stream == "valid" for phase in self.phases)

    def specialists_of(self, users: int) -> tuple[int, ...]:
        """Number of specialists of each of ``users`` users.

        Raises:
            RecipeError: as many numbers were given as there are not users.
        """
        if isinstance(self.specialists, int):
            return (self.specialists,) * users
        if len(self.specialists) != users:
            raise RecipeError(
                f"method.specialists: {len(self.specialists)} numbers for {users} users; give one, or one per user"
            )
        return self.specialists
