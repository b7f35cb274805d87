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
"""The role of routers, as a set."""

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
        """Return the number of rounds in which the phase runs, of ``rounds`` in all.

        It runs in round ``turn``, counted from 0, and in each ``turns``-th round after it.
        """
        rounds_with_phase = range(self.turn, rounds, self.turns)
        return len(rounds_with_phase)

    @property
    def reached(self) -> frozenset[str]:
        """Roles for which the phase computes gradients: those it trains, and ``leaves``, which it does not update."""
        return self.roles | self.leaves

    @property
    def purpose(self) -> str:
        """Name of the random stream that draws the phase's batches: ``label`` if it has one, "router" or "experts".

        At the same seed, phases of two methods with the same name draw the same batches.
        """
        if self.label:
            return self.label
        if self.optimizer == "router":
            return "router"
        return "experts"

    @property
    def optimizers(self) -> tuple[tuple[Literal["experts", "router"], frozenset[str]], ...]:
        """Pairs of an optimiser of the phase, "experts" or "router", and the roles that it updates.

        For "both" there are two pairs: "router" updates the role "router", and "experts" all other roles.
        """
        if self.optimizer != "both":
            return ((self.optimizer, self.roles),)
        router_roles = self.roles & ROUTERS
        other_roles = self.roles - router_roles
        return (("experts", other_roles), ("router", router_roles))


class CohortState(ABC):
    """Tensors and state of a cohort, with the users on the leading dimension."""

    names: list[str]
    """Names of the users."""
    round_number: int
    """The round, counted from 0."""

    @property
    @abstractmethod
    def tensors(self) -> Tree:
        """Trained tensors of the users, ``(users, *shape)`` by name; a hook may change them in place."""

    @property
    @abstractmethod
    def began(self) -> Tree:
        """Values of :attr:`tensors` at the start of the round; only for hooks with ``looks_back``."""

    @property
    @abstractmethod
    def exchanged(self) -> Tree:
        """Tensors of each user's shared copy, at the start of the round; only for hooks with ``looks_across``.

        With ``Placement.copies`` above 1 a user has several copies of its tensors, of which the first is shared.
        """

    @property
    @abstractmethod
    def copy(self) -> Int[Tensor, " users"]:
        """Number of the copy of a user's model that each row of :attr:`tensors` is: 0 for the one that is shared.

        In some methods (``Placement.copies`` above 1) a user trains several copies of its model, each in a row of its
        own.
        """

    @property
    @abstractmethod
    def kept(self) -> Tree:
        """State that hooks keep for each user between rounds, by key; may be changed in place."""

    @property
    @abstractmethod
    def ranks(self) -> Int[Tensor, " users"]:
        """LoRA rank of each user; may be changed in place."""

    @abstractmethod
    def copies(self) -> Float[Tensor, "copies users columns"]:
        """Return the parameters of all copies of each user's model, as flat vectors; the first copy is the shared one.

        With ``Placement.copies`` above 1 a user trains several copies of its model.
        """


class Cohort(CohortState):
    """State of users trained in one batch, with local steps and losses on their data, as client hooks see it."""

    @property
    @abstractmethod
    def router_rate(self) -> float:
        """Learning rate of the router in this round."""

    @abstractmethod
    def reset(self, roles: frozenset[str]) -> None:
        """Set tensors of the users back to their values before any training.

        Args:
            roles: Roles of the tensors, such as "specialist".
        """

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
        """Train the users by further optimiser steps, in addition to those of the round, such as a router's warm-up.

        Args:
            phase: The kind of step: which tensors it trains, on which split of the data, and how many steps it takes.
        """

    @abstractmethod
    def component_losses(self) -> Float[Tensor, "users clusters"]:
        """Return the mean training loss under each component, in nats."""

    @abstractmethod
    def divide_samples(self) -> None:
        """Compute each training sample's weights on the components, which the losses of this round's steps use.

        Then set the user's mixture weights to the mean over its samples.
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
        """Return the mean of each router's inputs at the ends of random training prompts, scaled to unit vectors.

        It summarises a user's text. Only language models with token-level routers have it. The inputs are computed in a
        model that averages its experts. Each call draws the same prompts.

        Args:
            instances: Number of prompts, or of windows in text without prompts.
            whole: Use the mean input over all tokens of each window instead of the input at the end of its prompt.

        Returns:
            Tensors ``(users, width)`` by the names of the routers' tensors.
        """

    @property
    @abstractmethod
    def scales(self) -> Float[Tensor, " users"]:
        """LoRA scale of each user, ``alpha / sqrt(rank)``."""

    @abstractmethod
    def weight_gradients(self, user: int) -> Tree:
        """Return the gradients of the base's adapted weights on one training batch of a user, without its adapters.

        Args:
            user: Index of the user in the cohort.

        Returns:
            Gradients ``(*experts, d_in, d_out)`` of the mean loss by name of the LoRA; empty for a user without data.
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
    """Whether the hook reads users' shared copies from the start of the round (:attr:`CohortState.exchanged`)."""
    only_resets_moments: ClassVar[bool] = False
    """Whether :meth:`begin` only resets moments, so that it needs no data."""
    sweeps: ClassVar[bool] = False
    """Whether the hook computes the losses of several models or components on all training data, once a round."""

    def __init_subclass__(cls, **options: object) -> None:
        """Accept ``forgets``, the former name of the class attribute ``only_resets_moments``, with a warning."""
        super().__init_subclass__(**options)
        own_attributes = vars(cls)
        if "forgets" in own_attributes:
            warnings.warn("ClientHook.forgets is now only_resets_moments", DeprecationWarning, stacklevel=2)
            cls.only_resets_moments = own_attributes["forgets"]

    def start(self, names: Sequence[str], seed: int) -> Tree:
        """Return the initial state that the hook keeps for each user between rounds; by default none.

        The state stays on the client. Other hooks of the method find it in :attr:`Cohort.kept`.

        Args:
            names: Names of the users.
            seed: Seed of the run.

        Returns:
            Tensors ``(users, ...)`` by a name that the hook chooses.
        """
        return {}

    def start_like(self, tensors: Tree) -> Tree:
        """Return the part of the hook's initial state that has the shapes of the shared tensors, such as a momentum.

        :meth:`start` returns all other state.

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
        """Do nothing by default; called after users have copied a download into their models.

        Args:
            cohort: The users who have downloaded, with their tensors and state, which may be changed.
        """

    def begin(self, cohort: Cohort) -> None:
        """Do nothing by default; called before the local steps of a round, and may take optimiser steps itself.

        Args:
            cohort: Users who are trained in one batch, with their tensors and state, which may be changed.
        """

    @property
    def before(self) -> tuple[Phase, ...]:
        """Phases that :meth:`begin` runs, so that estimates of cost and privacy count their steps; by default none."""
        return ()

    def penalty(self, tensors: Tree, ranks: Int[Tensor, " users"]) -> Float[Tensor, " users"] | float:
        """Return a penalty that is added to the loss of each user in a local step; by default there is none.

        Args:
            tensors: Trained tensors, ``(users, *shape)``.
            ranks: LoRA rank of each user.

        Returns:
            One value for each user, or 0.0 for no term. Any other number or shape ends the run.
        """
        return 0.0

    def correct(self, cohort: Cohort, gradients: Tree) -> None:
        """Do nothing by default; called after each backward pass, to change the gradients in place.

        Args:
            cohort: Users who are trained in one batch, with their tensors and state.
            gradients: Gradients ``(users, *shape)`` by tensor name.
        """

    def stepped(self, cohort: Cohort, trained: Tree, rate: float) -> None:
        """Do nothing by default; called after each optimiser step.

        Args:
            cohort: Users who are trained in one batch, with their tensors and state.
            trained: Views of the tensors that the step updated.
            rate: Learning rate of the step.
        """

    def end(self, cohort: Cohort) -> None:
        """Do nothing by default; called after the local steps of a round.

        Args:
            cohort: Users who are trained in one batch, with their tensors and state, which may be changed.
        """

    def report(self, cohort: Cohort) -> Tree:
        """Return numbers that each user sends to the server with its upload; by default none.

        Args:
            cohort: The users who upload, with their tensors and state.

        Returns:
            Numbers ``(users, ...)`` by name.
        """
        return {}

    @property
    def reports(self) -> Mapping[str, Reported]:
        """Shape and range of each number that :meth:`report` returns, by name, with which the server checks them."""
        return {}

    def shares(self, cohort: Cohort) -> Float[Tensor, "users models"] | None:
        """Return each user's weight on each of several models, for display only."""
        return None

    def settle(self, cohort: Cohort) -> None:
        """Do nothing by default; called before models are scored, to compute tensors that follow from trained ones."""

    def finish(self, cohort: Cohort) -> Float[Tensor, "users columns"]:
        """Make the users' final models once, after the last exchange of a run; not called unless it is overridden.

        Args:
            cohort: The users, with their tensors and state.

        Returns:
            All parameters of each user's final model, as one row.
        """
        raise NotImplementedError


def uses_downloads(hook: ClientHook) -> bool:
    """Return whether a hook combines downloaded models, or runs after a download."""
    hook_class = type(hook)
    return hook_class.receive is not ClientHook.receive or hook_class.received is not ClientHook.received


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
        phases_and_hooks = (*self.phases, *self.tuning, *self.parts)
        return frozenset().union(*(each.roles for each in phases_and_hooks))

    @property
    def before(self) -> tuple[Phase, ...]:
        """Phases that hooks run at the start of a round, before ``phases``."""
        return tuple(phase for part in self.parts for phase in part.before)

    @property
    def sweeps(self) -> bool:
        """True if a hook computes losses on all training data once a round, which an estimate of cost has to count."""
        return any(part.sweeps for part in self.parts)

    @property
    def optimizers(self) -> list[tuple[str, frozenset[str]]]:
        """Pairs of an optimiser, "experts" or "router", and the roles that it updates: of hooks, then phases."""
        pairs: list[tuple[str, frozenset[str]]] = []
        for hook in self.parts:
            if hook.roles:
                pairs.append(("router", hook.roles))  # hooks train with the router's optimiser
        for phase in (*self.phases, *self.tuning):
            pairs.extend(phase.optimizers)
        return pairs

    @property
    def accumulates(self) -> bool:
        """True if a phase computes gradients that another phase adds to its own (:attr:`Phase.leaves`)."""
        return any(phase.leaves for phase in self.phases)

    @property
    def needs_validation(self) -> bool:
        """True if a phase or hook uses validation data."""
        phase_does = any(phase.stream == "valid" for phase in self.phases)
        hook_does = any(hook.validates for hook in self.parts)
        return phase_does or hook_does

    @property
    def resets(self) -> bool:
        """True if a hook resets tensors to their initial values; the run then keeps a copy of these values."""
        return any(part.resets for part in self.parts)

    @property
    def ends_exchanged(self) -> bool:
        """True if models are evaluated after the server's aggregation, even with ``evaluation.model: local``.

        That setting evaluates models right after the local steps. But a method with ``finetunes`` or a hook's
        ``finish`` makes a user's model from the downloaded one, which exists only after the aggregation.
        """
        return self.finetunes or bool(self.finishing)

    @property
    def finishing(self) -> tuple[ClientHook, ...]:
        """Hooks that make the users' final tensors once, after the run's last exchange (:meth:`ClientHook.finish`)."""
        return tuple(part for part in self.parts if type(part).finish is not ClientHook.finish)  # is overridden

    @property
    def settling(self) -> tuple[ClientHook, ...]:
        """Hooks that compute tensors from the trained ones before models are scored (:meth:`ClientHook.settle`)."""
        return tuple(part for part in self.parts if type(part).settle is not ClientHook.settle)  # is overridden

    @property
    def looks_across(self) -> bool:
        """True if a hook compares a user's local model with its copy of the shared model at the start of the round.

        Only then does a client keep these copies (:attr:`Cohort.exchanged`) during the round, as they need memory.
        """
        return any(part.looks_across for part in self.parts)

    @property
    def looks_back(self) -> bool:
        """True if tensors from the start of a round are needed later in it, so that a client keeps a copy of them.

        Hooks compare with them. With ``drops_nonfinite`` they replace the tensors of a user that is left out.
        """
        return self.drops_nonfinite or any(part.looks_back for part in self.parts)


# ---------------------------------------------------------------- phases


def joint(*, routed: bool) -> tuple[Phase, ...]:
    """Return a single phase, which trains attention and all experts, or a net's base; with ``routed`` also the router.

    The router keeps its own settings in the joint steps: its learning rate is constant, while the experts' follows a
    cosine (CoMiGS App. B.1).

    Args:
        routed: Whether the model has a router.
    """
    if routed:
        experts_and_router = frozenset((*EXPERT_ROLES, ROUTER))
        # "both": experts and router take their steps at the same time, each with the settings of its own optimiser.
        return (Phase(roles=experts_and_router, optimizer="both"),)
    experts_and_base = frozenset((*EXPERT_ROLES, BASE))
    return (Phase(roles=experts_and_base),)


def alternating(router_stream: Stream, router_every: int, router_steps: int, *, accumulate: bool) -> tuple[Phase, ...]:
    """Return two phases: one trains attention and experts on training data, the other routers on ``router_stream``.

    Args:
        router_stream: Data split of the routers' batches. From "train" they are other batches than the experts' (CoMiGS
            Table 5, part iii).
        router_every: The routers' phase runs after every ``router_every``-th local step of the experts.
        router_steps: Optimiser steps of the routers each time.
        accumulate: Whether each phase also computes gradients for the other phase's roles, which the other phase adds
            to its own in its next step.
    """
    experts = frozenset(EXPERT_ROLES)
    nothing: frozenset[str] = frozenset()
    expert_phase = Phase(roles=experts, leaves=ROUTERS if accumulate else nothing)
    router_phase = Phase(
        roles=ROUTERS,
        stream=router_stream,
        every=router_every,
        steps=router_steps,
        optimizer="router",
        leaves=experts if accumulate else nothing,
    )
    return (expert_phase, router_phase)


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
    middle: bool = False
    """For language models: whether each LoRA has a matrix R between its factors, ``s B R A`` (as in "attention.r")."""
    once: frozenset[str] = frozenset()
    """Shared roles that are in a user's messages only until it has downloaded an aggregated model."""
    pooled: bool = False
    """Whether a single model is trained on all users' data: an upper bound that no federation may use."""
    needs: frozenset[str] = field(default_factory=frozenset)
    """Roles that the model must have; without them the method would reduce to another one."""
    starts_equal: frozenset[str] | None = None
    """Roles whose initial values are the same for all users; by default ``shared``."""

    @property
    def most_specialists(self) -> int:
        """Largest number of specialists of a user."""
        return max(values_in(self.specialists))

    def for_users(self, names: Sequence[str], *, known: Collection[str] = ()) -> Placement:
        """Return the placement with specialists in the order of ``names``: ``{"ada": 3, "ben": 0}`` becomes ``(3, 0)``.

        Args:
            names: Names of the users, in order.
            known: Names of users who are left out of the run, which the mapping may have, too.

        Raises:
            RecipeError: The mapping has an unknown name, or lacks a user.
        """
        if not isinstance(self.specialists, Mapping):
            return self
        in_order = values_in_order(self.specialists, names, "method.specialists", ignored=known)
        return replace(self, specialists=tuple(in_order))

    def specialists_of(self, users: int) -> tuple[int, ...]:
        """Return the number of specialists of each user, such as ``(3, 0)`` for ``users=2``.

        Raises:
            RecipeError: ``specialists`` has another length than ``users``.
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
    router_rate: float = 2e-3
    """Learning rate of routers with ``training.router.learning_rate: auto``."""

    @property
    def shared(self) -> frozenset[str]:
        """Roles that are uploaded."""
        return self.placement.shared

    @property
    def received(self) -> frozenset[str]:
        """Roles that a user takes from a download: those that it uploads, unless the placement names others."""
        return self.shared if self.placement.received is None else self.placement.received

    def uploaded(self, version: int) -> frozenset[str]:
        """Return the roles in an upload of a user who has downloaded ``version`` of the server, 0 for none."""
        return self.shared if version < 1 else self.shared - self.placement.once

    def downloaded(self, version: int) -> frozenset[str]:
        """Return the roles in a download of a user who has downloaded ``version`` of the server before, 0 for none."""
        return self.received if version < 1 else self.received - self.placement.once

    @property
    def starts_equal(self) -> frozenset[str]:
        """Roles whose initial values are the same for all users: the shared ones, unless the placement names others."""
        return self.shared if self.placement.starts_equal is None else self.placement.starts_equal

    def alone(self) -> Method:
        """Return the method of a user who trains the same tensors, from the same initial values, on its data alone.

        Nothing is shared, and hooks that use downloads are left out. A user whose values are not finite keeps those of
        the round before.
        """
        placement = replace(self.placement, shared=frozenset(), received=None, starts_equal=self.starts_equal)
        hooks = tuple(hook for hook in self.client.parts if not uses_downloads(hook))
        client = replace(self.client, parts=hooks, drops_nonfinite=True)
        return replace(self, placement=placement, client=client, server=Server())

    @property
    def applies_to(self) -> frozenset[str]:
        """Models that the method can train: ``language`` (adapters of a frozen base), ``nets`` (trained whole)."""
        refusals = {"language": self.unfit_for_language, "nets": self.unfit_for_nets}
        return frozenset(model for model, reason in refusals.items() if reason == "")

    @property
    def unfit_for_language(self) -> str:
        """Reason why the method cannot train adapters of a language model; empty if it can."""
        needs, mixture = self.placement.needs, self.placement.mixture
        if BASE in _without_suffixes(needs):
            return f"requires {', '.join(sorted(needs))}, but a language model's base is frozen"
        if mixture is not None:
            mixes_adapters = mixture.of == "adaptors"
            mixes_only_predictions = mixture.trains_independently  # components are LoRA experts, trained separately
            if not mixes_adapters and not mixes_only_predictions:
                return "mixes whole models, which must be nets"
        return ""

    @property
    def unfit_for_nets(self) -> str:
        """Reason why the method cannot train whole nets; empty if it can."""
        if self.placement.gated:  # in a net, its experts are feature extractors and its router is a gate
            return ""
        trains_net = bool(self.client.trained & NET_ROLES)
        shares_net = bool(_without_suffixes(self.shared) & NET_ROLES)
        if self.trains and not trains_net:
            return "trains no part of a net; it is for language models"
        if self.shared and not shares_net:
            return "shares no part of a net; it is for language models"
        if any(part.language_only for part in self.client.parts):
            return "requires a language model, but users with samples train whole nets"
        return ""

    @property
    def sharing(self) -> list[Phase]:
        """Phases that train a role that is shared, wholly or in part, such as only its factor "attention.a".

        Only their steps cost privacy, as local tensors are not uploaded.
        """
        shared_roles = _without_suffixes(self.shared)
        return [phase for phase in self.client.phases if shared_roles & _without_suffixes(phase.roles)]

    @property
    def needs_clusters(self) -> bool:
        """True if the users' true clusters must be known, as the method gives each cluster its own component."""
        return self.placement.mixture is not None and self.placement.mixture.optimal

    @property
    def trains(self) -> bool:
        """True if the method trains anything."""
        return bool(self.client.phases)

    def exchanges(self, done: int) -> bool:
        """Return whether there is an exchange after round ``done`` (from 1)."""
        return bool(self.shared) and self.server.exchanges(done)


def _without_suffixes(roles: Collection[str]) -> set[str]:
    """Return roles without the suffix that narrows them to a part: "base" for "base.head"."""
    return {role.partition(".")[0] for role in roles}


def __getattr__(name: str) -> object:
    """Return ``ClientHook`` for its former name ``Part``, with a warning."""
    if name != "Part":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("comingle.methods.base.Part is now ClientHook", DeprecationWarning, stacklevel=2)
    return ClientHook
