"""Methods: placement, client hooks and phases.

A method never sees a recipe, a loop, an optimizer or a file; the engine owns those. Client hooks get a :class:`Cohort`:
users in one batch, none of whom sees another one's data.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from jaxtyping import Float, Int
from torch import Tensor

from comingle.config.settings import Gating
from comingle.methods.server import Reported, Server
from comingle.models.routers import ClientMixture, Powers
from comingle.utils.errors import RecipeError
from comingle.utils.trees import ADAPTOR, ATTENTION, BASE, EXPERT_ROLES, GENERALIST, ROUTER, STATISTICS, Tree

Stream = Literal["train", "valid"]

ROUTERS = frozenset({ROUTER})

NET_ROLES = frozenset({BASE, ADAPTOR})
"""Roles of nets that can be trained and shared, besides routers."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Which tensors a user updates on which text, how often.

    After every ``every``-th of a user's own local iterations the phase takes ``steps`` optimiser steps on the roles it
    names, each on a fresh random batch of ``stream``; of every ``turns`` rounds it has one, the
    ``turn``-th (from 0). ``optimizer`` names whose settings and step count it uses;
    "both" descends on all roles together, the routers with the router's settings, everything else with the experts'.
    ``label`` names a random stream of its own for the batches. Of the roles that it ``leaves`` to other phases it
    computes gradients too, which are added up until a phase trains these roles and takes them with its own. The model
    of its passes is ``without`` some roles: what is left of a mixture's experts is averaged where its router is not.
    """

    roles: frozenset[str]
    stream: Stream = "train"
    every: int = 1
    steps: int = 1
    turn: int = 0
    turns: int = 1
    optimizer: Literal["experts", "router", "both"] = "experts"
    label: str = ""
    leaves: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()

    def rounds_of(self, rounds: int) -> int:
        """In how many of so many rounds it has a turn."""
        return len(range(self.turn, rounds, self.turns))

    @property
    def reached(self) -> frozenset[str]:
        """Every role of which it computes a gradient."""
        return self.roles | self.leaves

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


class CohortState(ABC):
    """What the users of a cohort train and keep. Tensors have the users on their leading dimension."""

    names: list[str]
    """The users' names."""

    @property
    @abstractmethod
    def tensors(self) -> Tree:
        """Everything that the users train, shared and local, to be changed in place."""

    @property
    @abstractmethod
    def began(self) -> Tree:
        """The same as it was when the round began; only for parts that say that they look back."""

    @property
    @abstractmethod
    def exchanged(self) -> Tree:
        """What their first copy, which is exchanged, was when the round began; only for parts that look across."""

    @property
    @abstractmethod
    def copy(self) -> Int[Tensor, " users"]:
        """Which copy of its user's tensors each row is, from 0; where methods have several, all of them take steps."""

    @property
    @abstractmethod
    def kept(self) -> Tree:
        """What parts keep of each user between rounds, to be changed in place."""

    @property
    @abstractmethod
    def ranks(self) -> Int[Tensor, " users"]:
        """LoRA ranks, to be changed in place."""

    @abstractmethod
    def copies(self) -> Float[Tensor, "copies users columns"]:
        """Return every set of tensors that the users train."""


class Cohort(CohortState):
    """Users trained in one batch, as client hooks see them: their state, local steps, and losses on their data."""

    @property
    @abstractmethod
    def router_rate(self) -> float:
        """The router's learning rate in this round."""

    @abstractmethod
    def reset(self, roles: frozenset[str]) -> None:
        """Make the tensors of some roles what they were before any training."""

    @abstractmethod
    def forget(self, roles: frozenset[str]) -> None:
        """Have optimisers forget what they remember of the tensors of some roles.

        Where these are all that an optimiser trains, it also forgets how many steps it has taken.
        """

    @abstractmethod
    def take_steps(self, phase: Phase) -> None:
        """The optimiser steps of a phase."""

    @abstractmethod
    def component_losses(self) -> Float[Tensor, "users clusters"]:
        """Mean training loss in nats under each component."""

    @abstractmethod
    def divide_samples(self) -> None:
        """Have each training sample mixed by shares of its own for the rest of the round, a user's by their mean."""

    @abstractmethod
    def training_losses(self, models: Tree) -> Float[Tensor, "users models"]:
        """Mean training loss in nats under each of its ``models (users, models, *shape)``; 0 for users without data."""

    @abstractmethod
    def validation_losses(self, models: Tree) -> Float[Tensor, "users models"]:
        """Mean validation loss in nats under each of its ``models (users, models, *shape)``."""

    @abstractmethod
    def held_out_losses(self, powers: Powers = None) -> Float[Tensor, "users clusters losses"]:
        """Every loss in nats on each user's validation data under each component, filled up with zeros.

        With ``powers`` under each taken to its own, in which the losses are differentiable.
        """

    @abstractmethod
    def router_directions(self, instances: int, *, whole: bool = False) -> Tree:
        """The mean of the unit vectors along what each token-level router reads, experts averaged, at the end of the
        prompts of random training instances (of whole windows where nothing is a prompt), the same at each call:
        ``(users, width)`` by the names of the routers' tensors. With ``whole`` along the mean of what it reads of each
        window, all of it. Only for language models with routers."""

    @abstractmethod
    def validate(self, candidate: Float[Tensor, " columns"], user: int) -> float:
        """Mean validation loss in nats of one user (by place) with these tensors as its model."""


MODEL = frozenset({ATTENTION, GENERALIST, BASE, STATISTICS})
"""All of a model that travels: LoRA beside a frozen base, or a net with its running statistics."""


class ClientHook:
    """What a method does on a client besides phases. A subclass overrides the hooks that it needs."""

    roles: frozenset[str] = frozenset()
    """What it trains."""
    resets: bool = False
    """Whether it asks for what a user had before any training."""
    validates: ClassVar[bool] = False
    """Whether it looks at validation text."""
    language_only: ClassVar[bool] = False
    """Whether it makes sense for language models alone."""
    resizes: ClassVar[bool] = False
    """Whether it changes ranks."""
    looks_back: ClassVar[bool] = False
    """Whether it asks for what a user had when the round began."""
    looks_across: ClassVar[bool] = False
    """Whether it asks, of any copy, for what the first one was when the round began."""
    forgets: ClassVar[bool] = False
    """Whether all that it does when a round begins is to forget moments, for which no data is read."""
    sweeps: ClassVar[bool] = False
    """Whether it asks, once a round, what each of several models or components loses on all training data."""

    def start(self, names: Sequence[str], seed: int) -> Tree:
        """What each user keeps for this part between rounds ``(users, ...)``, in :attr:`Cohort.kept`; never sent."""
        return {}

    def start_like(self, tensors: Tree) -> Tree:
        """The same, of the size of what users share: ``tensors (users, *shape)`` are theirs before any training."""
        return {}

    def receive(self, cohort: Cohort, models: Tree, senders: Sequence[str]) -> Tree | None:
        """One model ``(users, *shape)`` out of those that were downloaded; None: nothing to say about that."""

    def received(self, cohort: Cohort) -> None:
        """As soon as users have what they downloaded."""

    def begin(self, cohort: Cohort) -> None:
        """Before the local steps of a round."""

    @property
    def before(self) -> tuple[Phase, ...]:
        """Phases that it takes then."""
        return ()

    def penalty(self, tensors: Tree, ranks: Int[Tensor, " users"]) -> Float[Tensor, " users"] | float:
        """What is added to each user's objective."""
        return 0.0

    def correct(self, cohort: Cohort, gradients: Tree) -> None:
        """Change gradients in place, behind the passes."""

    def stepped(self, cohort: Cohort, trained: Tree, rate: float) -> None:
        """After an optimiser's step of this learning rate on ``trained``, views of the users' tensors."""

    def end(self, cohort: Cohort) -> None:
        """After the local steps of a round."""

    def report(self, cohort: Cohort) -> Tree:
        """Numbers ``(users, ...)`` that go with each upload."""
        return {}

    @property
    def reports(self) -> Mapping[str, Reported]:
        """What :meth:`report` says, so that a server can tell a report from anything else."""
        return {}

    def shares(self, cohort: Cohort) -> Float[Tensor, "users models"] | None:
        """How much of each of several models every user has, for people to look at."""
        return None

    def settle(self, cohort: Cohort) -> None:
        """Before users' models are scored, and so before a run ends: what follows from them and is not trained."""

    def finish(self, cohort: Cohort) -> Float[Tensor, "users columns"]:
        """Return the users' final tensors, once, after the last exchange."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Client:
    """A user's side of a method.

    With ``finetunes`` the model that counts is not what a user downloads, but what a local round of its own makes of
    it, by the phases of ``tuning`` if there are some, which is then forgotten. With ``drops_nonfinite`` a user whose
    tensors are not finite after its local steps is left out of the round instead of ending the run.
    """

    phases: tuple[Phase, ...] = ()
    parts: tuple[ClientHook, ...] = ()
    finetunes: bool = False
    tuning: tuple[Phase, ...] = ()
    drops_nonfinite: bool = False

    @property
    def trained(self) -> frozenset[str]:
        """Every role that something trains."""
        own = (*self.phases, *self.tuning, *self.parts)
        return frozenset().union(*(one.roles for one in own))

    @property
    def before(self) -> tuple[Phase, ...]:
        """Phases at the start of a round, before the others."""
        return tuple(phase for part in self.parts for phase in part.before)

    @property
    def sweeps(self) -> bool:
        """Whether something asks for losses on all training data, once a round."""
        return any(part.sweeps for part in self.parts)

    @property
    def optimizers(self) -> list[tuple[str, frozenset[str]]]:
        """Which optimiser updates which roles, phase after phase."""
        by_parts = [("router", part.roles) for part in self.parts if part.roles]
        return by_parts + [pair for phase in (*self.phases, *self.tuning) for pair in phase.optimizers]

    @property
    def accumulates(self) -> bool:
        """Whether phases leave gradients to each other."""
        return any(phase.leaves for phase in self.phases)

    @property
    def needs_validation(self) -> bool:
        """Whether validation text is used for anything."""
        return any(phase.stream == "valid" for phase in self.phases) or any(part.validates for part in self.parts)

    @property
    def resets(self) -> bool:
        """Whether what users had before any training is asked for later."""
        return any(part.resets for part in self.parts)

    @property
    def ends_exchanged(self) -> bool:
        """Whether models count as they are behind the exchange, whatever the run's setting."""
        return self.finetunes or bool(self.finishing)

    @property
    def finishing(self) -> tuple[ClientHook, ...]:
        """Parts that do something once, after the last exchange."""
        return tuple(part for part in self.parts if type(part).finish is not ClientHook.finish)

    @property
    def looks_across(self) -> bool:
        """Whether what the first copies were when the round began is asked for by the others."""
        return any(part.looks_across for part in self.parts)

    @property
    def looks_back(self) -> bool:
        """Whether what a user began a round with is asked for later in the round."""
        return self.drops_nonfinite or any(part.looks_back for part in self.parts)


# ---------------------------------------------------------------- phases


def joint(*, routed: bool) -> tuple[Phase, ...]:
    """Experts (or the base, where it is trained), and the router if there is one, together.

    Routers have settings of their own, whose rate is constant where the experts' follows a cosine (CoMiGS App. B.1).
    """
    if routed:
        return (Phase(roles=frozenset((*EXPERT_ROLES, ROUTER)), optimizer="both"),)
    return (Phase(roles=frozenset((*EXPERT_ROLES, BASE))),)


def alternating(router_stream: Stream, router_every: int, router_steps: int, *, accumulate: bool) -> tuple[Phase, ...]:
    """Experts on training text; after every ``router_every`` iterations the routers on ``router_stream``.

    The router's batches are drawn afresh also where they come from the training text (CoMiGS Table 5, part iii).
    With ``accumulate`` each side's gradients pile up while the other takes steps, as where one optimiser's step is
    followed by zeroing its own tensors' gradients alone: the routers' next step holds all gradients of the experts'
    iterations, and the experts' next step all gradients of the routers' steps.
    """
    experts = frozenset(EXPERT_ROLES)
    router = Phase(
        roles=ROUTERS,
        stream=router_stream,
        every=router_every,
        steps=router_steps,
        optimizer="router",
        leaves=experts if accumulate else frozenset(),
    )
    return (Phase(roles=experts, leaves=ROUTERS if accumulate else frozenset()), router)


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
    def applies_to(self) -> frozenset[str]:
        """The models that the method can train: ``language`` (adapters beside a frozen base), ``nets`` (as a whole)."""
        refusals = {"language": self.unfit_for_language, "nets": self.unfit_for_nets}
        return frozenset(model for model, why in refusals.items() if not why)

    @property
    def unfit_for_language(self) -> str:
        """Why the method cannot train adapters of a language model; empty where it can."""
        needs, mixture = self.placement.needs, self.placement.mixture
        if BASE in {role.partition(".")[0] for role in needs}:
            return f"is about {', '.join(sorted(needs))}, and a language model's base is frozen"
        if mixture is not None and not mixture.trains_apart and mixture.of != "adaptors":
            return "mixes whole models, which are small nets"
        return ""

    @property
    def unfit_for_nets(self) -> str:
        """Why the method cannot train whole nets; empty where it can."""
        if self.placement.gated:  # its experts and its router are nets
            return ""
        if self.trains and not self.client.trained & NET_ROLES:
            return "trains nothing of a net; it is for language models"
        if self.shared and not {role.partition(".")[0] for role in self.shared} & NET_ROLES:
            return "shares nothing of a net; it is for language models"
        if any(part.language_only for part in self.client.parts):
            return "needs a language model; users with samples have nets that are trained whole"
        return ""

    @property
    def sharing(self) -> list[Phase]:
        """Phases that train something that is sent."""
        shared = {role.partition(".")[0] for role in self.shared}
        return [phase for phase in self.client.phases if shared & {role.partition(".")[0] for role in phase.roles}]

    @property
    def needs_clusters(self) -> bool:
        """Whether users' true clusters must be known."""
        return self.placement.mixture is not None and self.placement.mixture.optimal

    @property
    def trains(self) -> bool:
        """Whether anything is trained at all."""
        return bool(self.client.phases)

    def exchanges(self, done: int) -> bool:
        """Whether there is an exchange after round ``done`` (from 1)."""
        return bool(self.shared) and self.server.exchanges(done)


def __getattr__(name: str) -> object:
    if name != "Part":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("comingle.methods.base.Part is now ClientHook", DeprecationWarning, stacklevel=2)
    return ClientHook
