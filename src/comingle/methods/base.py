"""Placement, client hooks and phases: the parts that make up a method.

A method never sees a recipe, a loop, an optimizer or a file; the engine owns those. Client hooks get a :class:`Cohort`:
users trained in one batch, each on its own data only.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from jaxtyping import Float, Int
from torch import Tensor

from comingle.config.settings import Gating, values_in, values_in_order
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
    """Optimiser steps on some roles and one data stream.

    Args:
        roles: Roles of the tensors that the phase updates.
        stream: Data split of its batches.
        every: The phase runs after every ``every``-th of a user's own local steps.
        steps: Optimiser steps each time it runs, each on a fresh random batch.
        turn: In each group of ``turns`` rounds the phase runs in the ``turn``-th (from 0).
        turns: Number of rounds in a group.
        optimizer: Optimiser whose settings and step count it uses. "both" steps on all roles together, routers with the
            router's settings and all others with the experts'.
        label: Name of a separate random stream for the batches.
        leaves: Roles for which the phase computes gradients without updating them. These accumulate until a phase that
            trains the roles adds them to its own.
        without: Roles to leave out of the model in the forward pass. Without its router a mixture averages its experts.
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
        """Return in how many of ``rounds`` rounds the phase runs."""
        return len(range(self.turn, rounds, self.turns))

    @property
    def reached(self) -> frozenset[str]:
        """Roles for which the phase computes gradients."""
        return self.roles | self.leaves

    @property
    def purpose(self) -> str:
        """Name of the batches' random stream: methods with the same phases draw the same batches at the same seed."""
        if self.label:
            return self.label
        return "router" if self.optimizer == "router" else "experts"

    @property
    def optimizers(self) -> tuple[tuple[Literal["experts", "router"], frozenset[str]], ...]:
        """Optimisers of the phase, each with the roles that it updates.

        There are two optimisers with their own settings, "experts" and "router". A phase uses one of them for all its
        roles, or "both": "router" for the routers and "experts" for the other roles.
        """
        if self.optimizer != "both":
            return ((self.optimizer, self.roles),)
        routers = self.roles & ROUTERS
        return (("experts", self.roles - routers), ("router", routers))


class CohortState(ABC):
    """Tensors and state of a cohort, with the users on the leading dimension."""

    names: list[str]
    """Names of the users."""

    @property
    @abstractmethod
    def tensors(self) -> Tree:
        """All trained tensors, shared and local; may be changed in place."""

    @property
    @abstractmethod
    def began(self) -> Tree:
        """Values of :attr:`tensors` at the start of the round; only for hooks with ``looks_back``."""

    @property
    @abstractmethod
    def exchanged(self) -> Tree:
        """Each user's first copy, the shared one, at the start of the round; only for hooks with ``looks_across``."""

    @property
    @abstractmethod
    def copy(self) -> Int[Tensor, " users"]:
        """Number of each row's copy of its user's tensors, from 0. With several copies all of them are trained."""

    @property
    @abstractmethod
    def kept(self) -> Tree:
        """State of the hooks for each user, kept between rounds; may be changed in place."""

    @property
    @abstractmethod
    def ranks(self) -> Int[Tensor, " users"]:
        """LoRA rank of each user; may be changed in place."""

    @abstractmethod
    def copies(self) -> Float[Tensor, "copies users columns"]:
        """Return all copies of the users' tensors, flattened."""


class Cohort(CohortState):
    """State of users trained in one batch, with local steps and losses on their data, as client hooks see it."""

    @property
    @abstractmethod
    def router_rate(self) -> float:
        """Learning rate of the router in this round."""

    @abstractmethod
    def reset(self, roles: frozenset[str]) -> None:
        """Restore the tensors of ``roles`` to their values before any training."""

    @abstractmethod
    def reset_moments(self, roles: frozenset[str]) -> None:
        """Reset the optimisers' moments of ``roles``.

        An optimiser that trains no other roles resets its step count too.
        """

    def forget(self, roles: frozenset[str]) -> None:
        """Call :meth:`reset_moments`, whose former name this is."""
        warnings.warn("Cohort.forget is now Cohort.reset_moments", DeprecationWarning, stacklevel=2)
        self.reset_moments(roles)

    @abstractmethod
    def take_steps(self, phase: Phase) -> None:
        """Take the optimiser steps of a phase."""

    @abstractmethod
    def component_losses(self) -> Float[Tensor, "users clusters"]:
        """Return the mean training loss under each component, in nats."""

    @abstractmethod
    def divide_samples(self) -> None:
        """Compute mixture weights for each training sample, for the rest of the round.

        A user's mixture weights become the mean of its samples' weights.
        """

    @abstractmethod
    def training_losses(self, models: Tree) -> Float[Tensor, "users models"]:
        """Return the mean training loss under each of a user's models, in nats.

        Args:
            models: Tensors ``(users, models, *shape)``.

        Returns:
            Losses ``(users, models)``; 0 for users without data.
        """

    @abstractmethod
    def validation_losses(self, models: Tree) -> Float[Tensor, "users models"]:
        """Return the mean validation loss under each of a user's models, in nats.

        Args:
            models: Tensors ``(users, models, *shape)``.

        Returns:
            Losses ``(users, models)``.
        """

    @abstractmethod
    def held_out_losses(self, powers: Powers = None) -> Float[Tensor, "users clusters losses"]:
        """Return the loss of each token or sample of the users' validation data under each component, in nats.

        Args:
            powers: Exponents ``(users, clusters)`` to which each component's probabilities are raised before they are
                normalised; None for 1. The losses are differentiable in them.

        Returns:
            Losses ``(users, clusters, losses)``; rows of users with less data are padded with zeros.
        """

    @abstractmethod
    def router_directions(self, instances: int, *, whole: bool = False) -> Tree:
        """Return the mean direction of the input of each token-level router; only for language models with routers.

        The directions summarise a user's text, for methods that compare texts. Each input is scaled to a unit vector.
        Inputs are read with the experts averaged, at the end of the prompts of random training instances (of whole
        windows in text without prompts). Each call draws the same instances.

        Args:
            instances: Number of instances.
            whole: Use the mean input over each window instead of the input at the end of its prompt.

        Returns:
            Tensors ``(users, width)`` by the names of the routers' tensors.
        """

    @abstractmethod
    def validate(self, candidate: Float[Tensor, " columns"], user: int) -> float:
        """Return the mean validation loss of one user's model, in nats.

        Args:
            candidate: All tensors of the model, flattened.
            user: Index of the user in the cohort.
        """


MODEL = frozenset({ATTENTION, GENERALIST, BASE, STATISTICS})
"""Roles of a complete shared model: LoRA of a frozen base, or a net with its running statistics."""


class ClientHook:
    """Base class of what a method does on a client besides phases. Subclasses override the hooks that they need."""

    roles: frozenset[str] = frozenset()
    """Roles that the hook trains."""
    resets: bool = False
    """Whether the hook needs the users' tensors from before any training."""
    validates: ClassVar[bool] = False
    """Whether the hook reads validation data."""
    language_only: ClassVar[bool] = False
    """Whether the hook works for language models only."""
    resizes: ClassVar[bool] = False
    """Whether the hook changes ranks."""
    looks_back: ClassVar[bool] = False
    """Whether the hook reads the tensors from the start of the round (:attr:`CohortState.began`)."""
    looks_across: ClassVar[bool] = False
    """Whether the hook reads the first copy from the start of the round (:attr:`CohortState.exchanged`)."""
    only_resets_moments: ClassVar[bool] = False
    """Whether :meth:`begin` only resets moments, so that it needs no data."""
    sweeps: ClassVar[bool] = False
    """Whether the hook computes the losses of several models or components on all training data, once a round."""

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if "forgets" in vars(cls):
            warnings.warn("ClientHook.forgets is now only_resets_moments", DeprecationWarning, stacklevel=2)
            cls.only_resets_moments = cls.__dict__["forgets"]

    def start(self, names: Sequence[str], seed: int) -> Tree:
        """Return the hook's state for each user, ``(users, ...)``, kept in :attr:`Cohort.kept` and never sent."""
        return {}

    def start_like(self, tensors: Tree) -> Tree:
        """Return further initial state of the hook for each user, if its shapes depend on the shared tensors.

        State with other shapes is returned by :meth:`start`.

        Args:
            tensors: Shared tensors before any training, ``(users, *shape)``.
        """
        return {}

    def receive(self, cohort: Cohort, models: Tree, senders: Sequence[str]) -> Tree | None:
        """Return the model that users continue with, made from the models that they downloaded.

        Args:
            cohort: Users who are trained in one batch, with their tensors and state.
            models: Downloaded models, ``(users, models, *shape)``.
            senders: Names of the users who sent the models; empty unless the server is ``peer_to_peer``.

        Returns:
            One model for each user, ``(users, *shape)``, or None to leave that to other hooks.
        """

    def received(self, cohort: Cohort) -> None:
        """Run after users have stored what they downloaded."""

    def begin(self, cohort: Cohort) -> None:
        """Run before the local steps of a round."""

    @property
    def before(self) -> tuple[Phase, ...]:
        """Phases that :meth:`begin` runs."""
        return ()

    def penalty(self, tensors: Tree, ranks: Int[Tensor, " users"]) -> Float[Tensor, " users"] | float:
        """Return the term to add to each user's objective.

        Args:
            tensors: Trained tensors, ``(users, *shape)``.
            ranks: LoRA rank of each user.

        Returns:
            One value for each user, or 0.0 for no term. Any other number or shape ends the run.
        """
        return 0.0

    def correct(self, cohort: Cohort, gradients: Tree) -> None:
        """Change gradients in place, after the backward pass."""

    def stepped(self, cohort: Cohort, trained: Tree, rate: float) -> None:
        """Run after an optimiser step.

        Args:
            cohort: Users who are trained in one batch, with their tensors and state.
            trained: Views of the tensors that the step updated.
            rate: Learning rate of the step.
        """

    def end(self, cohort: Cohort) -> None:
        """Run after the local steps of a round."""

    def report(self, cohort: Cohort) -> Tree:
        """Return numbers ``(users, ...)`` to send with each upload."""
        return {}

    @property
    def reports(self) -> Mapping[str, Reported]:
        """Specification of what :meth:`report` returns, with which the server checks reports."""
        return {}

    def shares(self, cohort: Cohort) -> Float[Tensor, "users models"] | None:
        """Return each user's weight on each of several models, for display only."""
        return None

    def settle(self, cohort: Cohort) -> None:
        """Compute tensors that follow from the trained ones; runs before models are scored and before a run ends."""

    def finish(self, cohort: Cohort) -> Float[Tensor, "users columns"]:
        """Return the users' final tensors; runs once, after the last exchange."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Client:
    """The client side of a method.

    Args:
        phases: Phases of a round, in order.
        parts: Client hooks.
        finetunes: Whether the model that is scored is the download after one more local round, which is then discarded.
        tuning: Phases of that local round; by default ``phases``.
        drops_nonfinite: Whether a user with non-finite tensors after its local steps is left out of the round.
            Otherwise the run ends.
    """

    phases: tuple[Phase, ...] = ()
    parts: tuple[ClientHook, ...] = ()
    finetunes: bool = False
    tuning: tuple[Phase, ...] = ()
    drops_nonfinite: bool = False

    @property
    def trained(self) -> frozenset[str]:
        """Roles that any phase or hook trains."""
        trainers = (*self.phases, *self.tuning, *self.parts)
        return frozenset().union(*(trainer.roles for trainer in trainers))

    @property
    def before(self) -> tuple[Phase, ...]:
        """Phases that hooks run at the start of a round, before ``phases``."""
        return tuple(phase for part in self.parts for phase in part.before)

    @property
    def sweeps(self) -> bool:
        """Whether a hook computes losses on all training data once a round."""
        return any(part.sweeps for part in self.parts)

    @property
    def optimizers(self) -> list[tuple[str, frozenset[str]]]:
        """Pairs of an optimiser and the roles that it updates, of the hooks and then of each phase."""
        by_parts = [("router", part.roles) for part in self.parts if part.roles]
        return by_parts + [pair for phase in (*self.phases, *self.tuning) for pair in phase.optimizers]

    @property
    def accumulates(self) -> bool:
        """Whether a phase leaves gradients to other phases."""
        return any(phase.leaves for phase in self.phases)

    @property
    def needs_validation(self) -> bool:
        """Whether a phase or hook uses validation data."""
        return any(phase.stream == "valid" for phase in self.phases) or any(part.validates for part in self.parts)

    @property
    def resets(self) -> bool:
        """Whether a hook needs the users' tensors from before any training."""
        return any(part.resets for part in self.parts)

    @property
    def ends_exchanged(self) -> bool:
        """Whether models are scored as they are after the exchange, whatever ``evaluation.model`` says."""
        return self.finetunes or bool(self.finishing)

    @property
    def finishing(self) -> tuple[ClientHook, ...]:
        """Hooks that run once after the last exchange."""
        return tuple(part for part in self.parts if type(part).finish is not ClientHook.finish)

    @property
    def settling(self) -> tuple[ClientHook, ...]:
        """Hooks that run before scoring."""
        return tuple(part for part in self.parts if type(part).settle is not ClientHook.settle)

    @property
    def looks_across(self) -> bool:
        """Whether a hook reads the first copy from the start of the round."""
        return any(part.looks_across for part in self.parts)

    @property
    def looks_back(self) -> bool:
        """Whether the tensors from the start of a round are needed later in the round."""
        return self.drops_nonfinite or any(part.looks_back for part in self.parts)


# ---------------------------------------------------------------- phases


def joint(*, routed: bool) -> tuple[Phase, ...]:
    """Return one phase for all experts (or the base, where it is trained), together with the router if there is one.

    Routers have their own settings: their learning rate is constant, while the experts' follows a cosine (CoMiGS App.
    B.1).

    Args:
        routed: Whether the model has a router, which the phase trains too.
    """
    if routed:
        return (Phase(roles=frozenset((*EXPERT_ROLES, ROUTER)), optimizer="both"),)
    return (Phase(roles=frozenset((*EXPERT_ROLES, BASE))),)


def alternating(router_stream: Stream, router_every: int, router_steps: int, *, accumulate: bool) -> tuple[Phase, ...]:
    """Return a phase for experts on training data and one for routers on ``router_stream``.

    The router's batches are drawn anew even from the training split (CoMiGS Table 5, part iii).

    Args:
        router_stream: Data split of the routers' batches.
        router_every: Local steps of the experts between two runs of the routers' phase.
        router_steps: Optimiser steps of the routers each time.
        accumulate: Whether each phase also adds to the gradients of the other's roles. This is what happens if an
            optimiser zeroes only the gradients of its own tensors: the routers' next step uses all gradients of the
            experts' steps since then, and the experts' next step all gradients of the routers' steps.
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
    """Structure of a user's model, and which roles are shared, local or frozen.

    Roles that a phase trains and that are not shared are local; the rest is frozen. A role may be narrowed to one LoRA
    factor ("attention.a") or to a part of the model ("base.norm").

    Args:
        shared: Roles that are uploaded.
        received: Roles that a download has; by default ``shared``.
        generalists: Shared experts in each MLP.
    """

    shared: frozenset[str] = field(default_factory=frozenset)
    received: frozenset[str] | None = None
    generalists: int = 1
    specialists: int | tuple[int, ...] | Mapping[str, int] = 0
    """Local experts in each MLP: one number for all users, or one for each, in their order or by name."""
    routed: bool = False
    """Whether a router mixes the experts, token by token."""
    gating: Gating | None = None
    """How the router weighs experts; None for a softmax over its logits."""
    gated: bool = False
    """For nets: whether a user has a shared and a local net, mixed by a gate."""
    mixture: ClientMixture | None = None
    """Makes a user's model a mixture of components."""
    copies: int = 1
    """Copies of the tensors, all trained on the same data: the first is shared, the last is the user's model."""
    residual: int | None = None
    """For language models: rank of a frozen change of each adapted weight, made by the server (role "residual").

    0 is full rank; None is no such change.
    """
    pooled: bool = False
    """Whether a single model is trained on all users' data: an upper bound that no federation may use."""
    needs: frozenset[str] = field(default_factory=frozenset)
    """Roles that the model must have; without them the method would reduce to another one."""

    @property
    def most_specialists(self) -> int:
        """Largest number of specialists of a user."""
        return max(values_in(self.specialists))

    def for_users(self, names: Sequence[str], *, known: Collection[str] = ()) -> Placement:
        """Return the placement with numbers of specialists in the order of the users instead of by name.

        Args:
            names: Names of the users, in order.
            known: Names of further users, who were left out.

        Raises:
            RecipeError: The numbers name an unknown user, or lack one.
        """
        if not isinstance(self.specialists, Mapping):
            return self
        return replace(
            self, specialists=tuple(values_in_order(self.specialists, names, "method.specialists", known=known))
        )

    def specialists_of(self, users: int) -> tuple[int, ...]:
        """Return the number of specialists of each of ``users`` users.

        Raises:
            RecipeError: The list of specialists is not as long as there are users.
        """
        assert not isinstance(self.specialists, Mapping), "Placement.for_users was not called"
        if isinstance(self.specialists, int):
            return (self.specialists,) * users
        if len(self.specialists) != users:
            raise RecipeError(
                f"method.specialists: {len(self.specialists)} numbers for {users} users; give one, or one per user"
            )
        return self.specialists


@dataclass(frozen=True, kw_only=True)
class Method:
    """A federated method; ``components`` is the display name of what its users mix or choose from."""

    name: str
    placement: Placement
    client: Client
    server: Server
    components: str = "model"

    @property
    def shared(self) -> frozenset[str]:
        """Roles that are uploaded."""
        return self.placement.shared

    @property
    def received(self) -> frozenset[str]:
        """Roles that a user takes from a download."""
        return self.shared if self.placement.received is None else self.placement.received

    @property
    def applies_to(self) -> frozenset[str]:
        """Models that the method can train: ``language`` (adapters of a frozen base), ``nets`` (trained whole)."""
        refusals = {"language": self.unfit_for_language, "nets": self.unfit_for_nets}
        return frozenset(model for model, why in refusals.items() if not why)

    @property
    def unfit_for_language(self) -> str:
        """Reason why the method cannot train adapters of a language model; empty if it can."""
        needs, mixture = self.placement.needs, self.placement.mixture
        if BASE in {role.partition(".")[0] for role in needs}:
            return f"requires {', '.join(sorted(needs))}, but a language model's base is frozen"
        # Adapter sets can be mixed, and so can whole models that train independently and mix only their predictions.
        if mixture is not None and not mixture.trains_independently and mixture.of != "adaptors":
            return "mixes whole models, which must be nets"
        return ""

    @property
    def unfit_for_nets(self) -> str:
        """Reason why the method cannot train whole nets; empty if it can."""
        if self.placement.gated:  # its experts and its router are nets
            return ""
        if self.trains and not self.client.trained & NET_ROLES:
            return "trains no part of a net; it is for language models"
        # A shared role may name a part of a role: "base.head" is a part of the role "base".
        if self.shared and not {role.partition(".")[0] for role in self.shared} & NET_ROLES:
            return "shares no part of a net; it is for language models"
        if any(part.language_only for part in self.client.parts):
            return "requires a language model, but users with samples train whole nets"
        return ""

    @property
    def sharing(self) -> list[Phase]:
        """Phases that train shared roles."""
        shared = {role.partition(".")[0] for role in self.shared}
        return [phase for phase in self.client.phases if shared & {role.partition(".")[0] for role in phase.roles}]

    @property
    def needs_clusters(self) -> bool:
        """Whether the users' true clusters must be known."""
        return self.placement.mixture is not None and self.placement.mixture.optimal

    @property
    def trains(self) -> bool:
        """Whether the method trains anything."""
        return bool(self.client.phases)

    def exchanges(self, done: int) -> bool:
        """Return whether there is an exchange after round ``done`` (from 1)."""
        return bool(self.shared) and self.server.exchanges(done)


def __getattr__(name: str) -> object:
    if name != "Part":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("comingle.methods.base.Part is now ClientHook", DeprecationWarning, stacklevel=2)
    return ClientHook
