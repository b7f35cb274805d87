"""The round loop: who takes part, what is sent, what is evaluated and kept.

One round, as messages:

1. The server names the participants and sends each a download, unless it has what the server has.
2. They receive it: assign, or make one model of several with data of their own.
3. They train, and upload copies of what is shared.
4. The server aggregates what arrived.
5. Who was absent downloads when it next takes part, or when it is evaluated.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from comingle.config.settings import Training
from comingle.engines.client import Clients
from comingle.engines.clock import Clock, Federation
from comingle.engines.evaluations import evaluate
from comingle.engines.events import Observer
from comingle.engines.faults import diverged
from comingle.engines.local import NOBODY, LocalRound, finetuned, finish, train
from comingle.engines.periods import settle
from comingle.engines.scoring import AnyScore
from comingle.engines.training import counts_exchanged, exchanged_after
from comingle.methods.base import Method

logger = logging.getLogger("comingle")


Checkpoint = Callable[[int, Clock], None]
"""Saves the state after a round (number of rounds done)."""


def run_rounds(
    federation: Federation,
    *,
    observe: Observer,
    checkpoint: Checkpoint = lambda done, clock: None,
    first_round: int = 0,
    clock: Clock | None = None,
) -> Sequence[AnyScore]:
    """Train from ``first_round`` (from 0) to the end and return the last evaluation.

    Where the model that counts is the local one (``training.evaluate``), the last exchange is left out, so a run ends
    with the models that were evaluated. Whatever the setting, a method that finetunes starts from the exchanged model,
    and one that makes final models makes them after the last exchange. With ``training.select`` "best" the run ends
    with the models of the evaluated round whose validation loss was lowest, and the last evaluation is theirs.

    Raises:
        DivergenceError: a user's loss or tensors are not finite.
    """
    clock = clock or Clock()
    clock.started = time.perf_counter()
    federation.upload_bytes, federation.download_bytes = clock.upload_bytes, clock.download_bytes
    clients = federation.clients
    scores: Sequence[AnyScore] | None = None
    settle(federation)
    training, guard = clients.training, federation.server.guard
    everyone, rounds = clients.scored_trainers, clients.rounds_done
    if rounds and first_round == 0 and training.evaluate_first:
        federation.download(everyone)
        scores = evaluate(federation, 0, observe)  # where every curve starts: the pretrained model
    for number in range(first_round, rounds):
        due = due_in(clients.method, training, clients.shares, number)
        members = federation.invite(number, releases=due.exchanges)
        if members is None:  # one more would exceed the privacy budget
            scores, rounds = _stop(federation, scores, number, observe), number
            clock.count(federation)
            checkpoint(number, clock)
            break
        federation.download(members)  # 1 and 2
        work, everybodys = _train(federation, members, number, observe)  # 3
        if due.exchanges:
            federation.upload(list(work.losses), number + 1, work.losses)
        _tell(federation, everybodys, number + 1, observe, clock)
        if due.evaluates == "local":
            federation.download([user for user in everyone if user not in work.losses])
            scores = evaluate(federation, number + 1, observe)
        if due.exchanges and (why := federation.aggregate()):  # 4
            observe({"event": "no_sum", "round": number + 1, "reason": why})
        if due.exchanges and (judged := federation.server.judged) is not None:
            observe(judged.as_event(number + 1))
        if guard is not None:
            observe({"event": "privacy", "round": number + 1, **guard.spent})
        if due.evaluates == "exchanged":
            federation.download(everyone)  # 5
            if due.ends:
                federation.each(lambda: finish(clients))
            scores = evaluate(federation, number + 1, observe)
        if due.saves:
            clock.count(federation)
            checkpoint(number + 1, clock)
    clock.count(federation)
    scores = _chosen(federation, scores, rounds)
    # Without rounds there is nothing but this; a run resumed after its last round has these events already.
    if scores is not None:
        return scores
    return evaluate(federation, rounds, observe if first_round == 0 else lambda event: None)


def _chosen(federation: Federation, scores: Sequence[AnyScore] | None, rounds: int) -> Sequence[AnyScore] | None:
    """End with the models of the round that counts, and their scores."""
    clients = federation.clients
    clients.choose()
    if clients.chosen_round == rounds:
        return scores
    return federation.each(lambda: _scores(clients))  # an event tells of them already


def _scores(clients: Clients) -> Sequence[AnyScore]:
    with finetuned(clients):
        return clients.evaluate()


def _stop(
    federation: Federation, scores: Sequence[AnyScore] | None, done: int, observe: Observer
) -> Sequence[AnyScore] | None:
    """End a run before round ``done + 1``, as it would have ended had it been planned so."""
    clients = federation.clients
    told = clients.method.name, done, clients.training.rounds
    logger.warning("%s: the privacy budget is spent after round %d of %d", *told)
    clients.stopped_after, finishes = done, False
    if counts_exchanged(clients.method, clients.training):
        federation.download(clients.scored_trainers)
        federation.each(lambda: finish(clients))
        finishes = any(part.finishes for part in clients.method.client.parts)
    known = done % clients.training.period == 0 and not finishes
    return scores if known else evaluate(federation, done, observe)


@dataclass(frozen=True, kw_only=True)
class Due:
    """What there is to do in a round besides local steps; where local models are evaluated, before the exchange."""

    ends: bool
    exchanges: bool
    evaluates: Literal["local", "exchanged"] | None
    saves: bool


def due_in(method: Method, training: Training, shares: bool, number: int) -> Due:
    """What is due in round ``number`` (from 0); ``shares`` says whether users have anything to send."""
    done = number + 1
    ends, counts = done == training.rounds, "exchanged" if counts_exchanged(method, training) else "local"
    return Due(
        ends=ends,
        exchanges=exchanged_after(method, training, shares, done),
        evaluates=counts if ends or done % training.period == 0 else None,
        saves=ends or done % training.checkpoint_every == 0,
    )


def _train(federation: Federation, members: list[int], number: int, observe: Observer) -> tuple[LocalRound, Worked]:
    """Local work of a round: that of those who are here, and as far as it is known here everybody's."""

    def step(advance: int) -> None:
        observe({"event": "step", "advance": advance, "round": number + 1})

    def work() -> LocalRound:
        if not members:
            return NOBODY
        step(0)
        return train(federation.clients, members, number, lambda: step(1))

    own = federation.each(work)
    return own, _gathered(federation, own, number, observe)


@dataclass(frozen=True, kw_only=True)
class Worked:
    """What one round of everybody's local work yielded, by names; ``suspects`` are of the first who was rejected."""

    losses: dict[str, float]
    rejected: dict[str, str]
    suspects: list[str]
    tokens: int
    seconds: float


def _gathered(federation: Federation, work: LocalRound, number: int, observe: Observer) -> Worked:
    """Everybody's local work, as far as it is known here.

    Raises:
        DivergenceError: nobody's can be used.
    """
    parts = [Worked(**part) for part in federation.gather(lambda: _by_name(federation.clients, work))]
    rejected = {name: what for part in parts for name, what in part.rejected.items()}
    losses = {name: loss for part in parts for name, loss in part.losses.items()}
    suspects = next((part.suspects for part in parts if part.rejected), [])
    for name, what in rejected.items():
        logger.warning("user %r is left out of round %d: %s", name, number + 1, what)
        observe({"event": "rejected", "round": number + 1, "user": name, "reason": what})

    def require_somebody() -> None:
        if rejected and not losses:
            raise diverged(*next(iter(rejected.items())), suspects)

    federation.share(require_somebody)
    tokens, seconds = sum(part.tokens for part in parts), max(part.seconds for part in parts)
    return Worked(losses=losses, rejected=rejected, suspects=suspects, tokens=tokens, seconds=seconds)


def _by_name(clients: Clients, work: LocalRound) -> dict[str, Any]:
    def named(values: dict[int, Any]) -> dict[str, Any]:
        return {clients.names[member]: value for member, value in values.items()}

    first = next(iter(work.rejected), None)
    suspects = [] if first is None else list(clients.steps.suspects(first, clients.state.rows_of([first])[0]))
    return {**asdict(work), "losses": named(work.losses), "rejected": named(work.rejected), "suspects": suspects}


def _tell(federation: Federation, work: Worked, done: int, observe: Observer, clock: Clock) -> None:
    """Count the round, and its event."""
    clock.count(federation)
    sent, received = clock.upload_bytes - clock.told_upload_bytes, clock.download_bytes - clock.told_download_bytes
    clock.told_upload_bytes, clock.told_download_bytes = clock.upload_bytes, clock.download_bytes
    clock.train_seconds += work.seconds
    clock.tokens += work.tokens
    clock.user_rounds += len(work.losses)
    observe(
        {
            "event": "round",
            "round": done,
            "train_loss_nats": work.losses,
            "upload_bytes": sent,
            "download_bytes": received,
            "tokens": work.tokens,
            "seconds": work.seconds,
        }
    )
