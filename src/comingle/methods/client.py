"""Clients: what a user does between two messages. Phases say what it trains; parts are whatever it does besides.

Engines hand a part the :class:`~comingle.methods.cohort.Cohort` that it is about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from comingle.methods.cohort import ROUTERS, Cohort, Phase, Stream
from comingle.methods.server import Reported
from comingle.utils.trees import ATTENTION, BASE, EXPERT_ROLES, GENERALIST, ROUTER, STATISTICS, Tree

MODEL = frozenset({ATTENTION, GENERALIST, BASE, STATISTICS})
"""All of a model that travels: LoRA beside a frozen base, or a net with its running statistics."""


class Part:
    """Something that a user does besides its phases; every hook that it leaves out does nothing."""

    roles: frozenset[str] = frozenset()
    """What it trains."""
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

    @property
    def resets(self) -> bool:
        """Whether it asks for what a user had before any training."""
        return False

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

    finishes: ClassVar[bool] = False
    """Whether there is something to be done once, after the last exchange."""

    def finish(self, cohort: Cohort) -> Float[Tensor, "users columns"]:
        """The users' final tensors."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Client:
    """A user's side of a method.

    With ``finetunes`` the model that counts is not what a user downloads, but what a local round of its own makes of
    it, by the phases of ``tuning`` if there are some, which is then forgotten. With ``drops_nonfinite`` a user whose
    tensors are not finite after its local steps is left out of the round instead of ending the run.
    """

    phases: tuple[Phase, ...] = ()
    parts: tuple[Part, ...] = ()
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
        return self.finetunes or any(part.finishes for part in self.parts)

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
