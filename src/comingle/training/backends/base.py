"""The backend of a run: where users train and how messages reach them.

:func:`comingle.training.rounds.run_rounds` drives every backend through the same rounds: all users in one process
(:mod:`comingle.training.backends.local`), users sharded over processes
(:mod:`comingle.training.backends.distributed`), users elsewhere (:mod:`comingle.federation.backend`).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, Literal, TypeVar

from comingle.training.checkpoints import Clock
from comingle.training.events import AN_EVENT, Event, Observer
from comingle.training.server import ServerHalf
from comingle.training.settings import RunPlan

logger = logging.getLogger("comingle")

S = TypeVar("S")
"""Type of the scores of a backend."""


@dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """Plan of a round, apart from its local steps.

    Attributes:
        number: The round, counted from 0.
        is_last: Whether it is the last planned round.
        exchanges: Whether participants upload and the server aggregates.
        evaluates: Models to evaluate: local ones, before the server aggregates, or exchanged ones; None for no
            evaluation.
        saves: Whether a checkpoint is written.
    """

    number: int
    is_last: bool
    exchanges: bool
    evaluates: Literal["local", "exchanged"] | None
    saves: bool

    @property
    def done(self) -> int:
        """Number of rounds that are done once this one has ended."""
        return self.number + 1


@dataclass(frozen=True, kw_only=True)
class RoundResult:
    """Result of the local steps of a round.

    Attributes:
        losses: Mean training loss in nats of each participant that reports it.
        users: Number of participants whose work counts.
        tokens: Number of training tokens or samples.
        seconds: Duration of the local steps; the longest one if users train in parallel.
        steps: Number of local steps of each participant that reports it.
    """

    losses: Mapping[str, float]
    users: int
    tokens: int
    seconds: float
    steps: Mapping[str, int] = field(default_factory=dict)


class Backend(ABC, Generic[S]):
    """Users and their server, driven by :func:`comingle.training.rounds.run_rounds`. Participants are numbers."""

    server: ServerHalf
    remote: ClassVar[bool] = False
    """Whether users are in other places: they may be absent, and rounds without an exchange are not reported."""

    @abstractmethod
    def start(self, observe: Observer, clock: Clock) -> tuple[RunPlan, int]:
        """Prepare the rounds of a run; replace ``evaluation.every: auto`` by a number of rounds between evaluations.

        Args:
            observe: Called with each event from now on.
            clock: Counts the time and the bytes of the run from now on.

        Returns:
            The plan of the run with this number, and the number of rounds after which the run ends.
        """

    @abstractmethod
    def select_participants(self, plan: RoundPlan) -> Sequence[int] | None:
        """Return the participants of a round; None ends the run because the privacy budget is spent."""

    @abstractmethod
    def train(self, plan: RoundPlan, participants: Sequence[int]) -> RoundResult:
        """Have participants download shared tensors, take their local steps, and upload if the round has an exchange.

        Args:
            plan: Plan of the round.
            participants: Numbers of the users that were selected for the round.

        Returns:
            The participants' training losses, and the number and duration of their steps.

        Raises:
            ComingleError: Too many participants are absent, rejected or diverged.
        """

    @abstractmethod
    def aggregate(self) -> str:
        """Aggregate the uploads of the round.

        Returns:
            Reason why the model stays unchanged, such as too few users for a secure sum; empty if it changes.
        """

    @abstractmethod
    def evaluate(self, done: int, *, receives: bool, finishes: bool, silent: bool) -> tuple[S | None, Event]:
        """Score the users' models.

        Args:
            done: Number of rounds that are done.
            receives: Whether users first download the newest shared tensors, if they have older ones.
            finishes: Whether users first make their final models, after the last exchange of the run.
            silent: Do not log this evaluation, as it was logged before the run was interrupted.

        Returns:
            The scores, None if no user was scored, and the event, empty if another process logs it.
        """

    @abstractmethod
    def choose(self, rounds: int, scores: S | None) -> S | None:
        """Return the final scores, after restoring the models of the best round with ``evaluation.select: best``.

        Args:
            rounds: Number of rounds that are done.
            scores: The scores after these rounds, which are final with ``select: last``; None if no user was scored.
        """


def log_rejection(observe: Observer, number: int, name: str, reason: str) -> None:
    """Log that the work of a user is left out of a round.

    Args:
        observe: Called with the event.
        number: The round, counted from 1.
        name: Name of the user.
        reason: Reason for the rejection.
    """
    logger.warning("user %r is left out of round %d: %s", name, number, reason, extra=AN_EVENT)
    observe({"event": "rejected", "round": number, "user": name, "reason": reason})
