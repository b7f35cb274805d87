"""What a method is: a placement (who holds what), a client (what a user does), a server (what is done with uploads).

A method never sees a recipe, a loop, an optimiser or a file; engines own those.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from comingle.config.settings import Gating
from comingle.methods.client import Client
from comingle.methods.server import Server
from comingle.models.routers import ClientMixture
from comingle.utils.errors import RecipeError


@dataclass(frozen=True, kw_only=True)
class Placement:
    """What a user's model is made of, and what of it leaves the user.

    ``shared`` names the roles that are sent to the server; every other role that a phase trains is local, the rest is
    frozen. A role may be narrowed to one factor of its LoRA, as in "attention.a", or to a part of the model, as in
    "base.norm". ``received`` are the roles that a download has, where these are not the same.
    """

    shared: frozenset[str] = field(default_factory=frozenset)
    received: frozenset[str] | None = None
    generalists: int = 1
    specialists: int | tuple[int, ...] = 0
    """Experts of a user's own in each MLP: one number for all users, or one for each."""
    routed: bool = False
    """Whether a router mixes the experts, token by token."""
    gating: Gating | None = None
    """How it weighs them, where a softmax over logits does not."""
    gated: bool = False
    """Where nets are trained whole: a user has a shared and a local one, and a gate."""
    mixture: ClientMixture | None = None
    """Makes a user's model a mixture of components."""
    copies: int = 1
    """Sets of tensors trained side by side on the same text: the first is exchanged, the last is the user's model."""
    residual: int | None = None
    """On a language model: the rank of a frozen change of each adapted weight, which a server makes (role "residual");
    0 is as high as any change can have."""
    pooled: bool = False
    """A single model is trained on everybody's text: an upper bound that no federation may use."""
    needs: frozenset[str] = field(default_factory=frozenset)
    """Roles that a model must have some tensors of, or the method would be another one."""

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


@dataclass(frozen=True, kw_only=True)
class Method:
    """A federated method. ``components`` is what people call what its users mix or choose from."""

    name: str
    placement: Placement
    client: Client
    server: Server
    components: str = "model"

    @property
    def shared(self) -> frozenset[str]:
        """The roles that leave their user."""
        return self.placement.shared

    @property
    def received(self) -> frozenset[str]:
        """The roles that a user takes from a download."""
        return self.shared if self.placement.received is None else self.placement.received

    @property
    def trains(self) -> bool:
        """Whether anything is trained at all."""
        return bool(self.client.phases)

    def exchanges(self, done: int) -> bool:
        """Whether there is an exchange after round ``done`` (from 1)."""
        return bool(self.shared) and self.server.exchanges(done)
