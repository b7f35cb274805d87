"""What a method is: data (who holds what, which experts, which phases) and one function (the server).

A method never sees a recipe, a loop, an optimiser or a file; engines own those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor

from comingle.adapters.inject import ROUTER
from comingle.errors import RecipeError
from comingle.routers.mixtures import ClientMixture
from comingle.trees import Tree

Assess = Callable[[Tree], Float[Tensor, "users models"]]
"""Maps stacked models ``(models, ...)`` to the mean loss in nats of each on each user's training data.

The users do this, each on its own data; a user without any has zeros.
"""


Centre = Callable[[Tree, Float[Tensor, " clusters"]], Tree]
"""Maps aggregated base and components, and the components' p(c), to the same with the components' mean in the base."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a server knows in an exchange besides the uploads.

    ``weights`` sum to 1 and are 0 for the absent; ``ranks`` and ``scales`` are the users' LoRA ranks and factors.
    ``validate`` has every present user's model scored on every present user's validation text: entry (i, j) is the
    mean loss in nats of user j's model on user i's text, NaN where either is absent. ``memory`` is what the server
    itself keeps between rounds, changed in place. ``assess`` has models of the server's tried on training data.
    ``reports`` is what users said besides their tensors (:attr:`Method.report`), and ``clustered`` names the uploads
    whose second dimension is a mixture's components; ``centre`` knows which adaptor belongs to which base weight.
    """

    weights: Float[Tensor, " users"]
    ranks: Int[Tensor, " users"]
    scales: Float[Tensor, " users"]
    validate: Callable[[], Float[Tensor, "users users"]]
    memory: Tree
    assess: Assess
    reports: Tree = field(default_factory=dict)
    clustered: frozenset[str] = frozenset()
    centre: Centre | None = None


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What a server knows before the first round: differently initialised models, the users' names, the run's seed."""

    starts: Tree
    users: Sequence[str]
    seed: int


Server = Callable[[Tree, Context], Tree]
"""Maps stacked uploads ``(users, ...)`` to stacked downloads."""

Regulariser = Callable[[Tree, Int[Tensor, " users"]], Float[Tensor, " users"]]
"""Maps the users' tensors and ranks to a penalty that is added to each user's objective."""

Resize = Callable[[Tree, Tree, Int[Tensor, " users"]], Int[Tensor, " users"]]
"""Maps the users' tensors before and after their local steps, and their ranks, to their new, smaller ranks."""

Validate = Callable[[Float[Tensor, " columns"], int], float]
"""Mean loss in nats of a user's validation text (by number) under a model of its own."""

Reroute = Callable[[Float[Tensor, "users clusters"], float], Float[Tensor, "users clusters"]]
"""Maps each user's loss under each component, and the router's learning rate, to the users' new router logits."""

Finish = Callable[[Float[Tensor, "copies users columns"], Validate], Float[Tensor, "users columns"]]
"""Maps the users' copies, after the last exchange, to their final models."""

Welcome = Callable[[Tree, Assess], Tree]
"""Maps what the server keeps, in place, to the stacked downloads before the first round."""

Stream = Literal["train", "valid"]

ROUTERS = frozenset({ROUTER})


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Which tensors a user updates on which text, how often.

    After every ``every``-th of a user's own local iterations the phase takes ``steps`` optimiser steps on the roles it
    names, each on a fresh random batch of ``stream``. ``optimizer`` names whose settings and step count it uses;
    "both" descends on all roles together, the routers with the router's settings, everything else with the experts'.
    ``label`` names a random stream of its own for the batches.
    """

    roles: frozenset[str]
    stream: Stream = "train"
    every: int = 1
    steps: int = 1
    optimizer: Literal["experts", "router", "both"] = "experts"
    label: str = ""

    @property
    def purpose(self) -> str:
        """Whose random stream draws the batches: methods that train the same at one seed see the same."""
        if self.label:
            return self.label
        return "router" if self.optimizer == "router" else "experts"

    @property
    def optimizers(self) -> tuple[tuple[Literal["experts", "router"], frozenset[str]], ...]:
        """Which optimiser updates which roles."""
        if self.optimizer != "both":
            return ((self.optimizer, self.roles),)
        routers = self.roles & ROUTERS
        return (("experts", self.roles - routers), ("router", routers))


@dataclass(frozen=True, kw_only=True)
class Method:
    """A federated method.

    ``specialists`` is one number for all users or one per user. ``shared`` names the roles that are sent to the server
    in the rounds ``exchange_from``, then every ``exchange_every``-th; every other role that a phase trains is local,
    the rest is frozen. A role may be narrowed to one factor of its LoRA, as in "attention.a". ``gated`` says that where
    nets are trained whole a user has a shared and a local feature extractor, a gate and a head. ``pooled`` trains a
    single model on everybody's text (an upper bound that no federation may use). With ``peers`` every participant
    downloads the others' uploads instead of one answer. ``copies`` sets of tensors are trained side by side on the same
    text: only the first takes part in exchanges, and the last is the user's model. The server begins with ``starts``
    differently initialised models; ``memory`` is what it keeps of them, ``welcome`` what everybody downloads before the
    first round, and ``merging`` reads how much of each model a user has. With ``picks`` users download so many models,
    try them on their training data, keep one and say which. With ``tunes`` the model that counts is not what a user
    downloads, but what a local round of its own makes of it, which is then forgotten. ``validates`` says that
    validation text is needed beyond the phases'. ``proximal`` times the squared distance to where a round began is
    added to the users' objectives. Where the server is ``forgiving``, users who leave the real numbers are left out of
    a round instead of ending the run. ``mixture`` makes a user's model a mixture of components, and ``reroute`` sets
    its router, where no phase trains it, out of the components' losses as soon as it has received them. ``report`` is
    what a user says to the server besides its shared tensors, out of all its tensors. At the start of each round the
    roles in ``resets`` are as they were before any training, and the phases ``before`` come once before the others.
    ``kept_by_user`` names what of ``memory`` has the users on its leading dimension.
    """

    name: str
    generalists: int = 1
    specialists: int | tuple[int, ...] = 0
    routed: bool = False
    gated: bool = False
    shared: frozenset[str] = field(default_factory=frozenset)
    phases: tuple[Phase, ...] = ()
    server: Server
    pooled: bool = False
    exchange_from: int = 1
    exchange_every: int = 1
    peers: bool = False
    copies: int = 1
    starts: int = 1
    memory: Callable[[Beginning], Tree] | None = None
    kept_by_user: frozenset[str] = frozenset()
    welcome: Welcome | None = None
    merging: Callable[[Tree], Float[Tensor, "users models"]] | None = None
    proximal: float = 0.0
    forgiving: bool = False
    picks: int = 0
    tunes: bool = False
    regulariser: Regulariser | None = None
    resize: Resize | None = None
    finish: Finish | None = None
    validates: bool = False
    mixture: ClientMixture | None = None
    reroute: Reroute | None = None
    report: Callable[[Tree], Tree] | None = None
    resets: frozenset[str] = frozenset()
    before: tuple[Phase, ...] = ()

    def exchanges(self, done: int) -> bool:
        """Whether there is an exchange after round ``done`` (from 1)."""
        since = done - self.exchange_from
        return bool(self.shared) and since >= 0 and since % self.exchange_every == 0

    @property
    def trained(self) -> frozenset[str]:
        """Every role that some phase trains."""
        return frozenset().union(*(phase.roles for phase in (*self.before, *self.phases)))

    @property
    def needs_validation(self) -> bool:
        """Whether validation text is used for anything."""
        return self.validates or any(phase.stream == "valid" for phase in self.phases)

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
