"""The round loop: local work, evaluation, exchange, checkpoint."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from comingle.adapters import watching
from comingle.engines.events import Observer
from comingle.engines.faults import diverged
from comingle.engines.federation import AnyScore
from comingle.engines.mixing import mixtures
from comingle.engines.runtime import peak_memory_bytes
from comingle.engines.simulation import Simulation
from comingle.engines.training import participants
from comingle.records import Metrics, geometric

logger = logging.getLogger("comingle")


@dataclass(kw_only=True)
class Clock:
    """Time, tokens and bytes of a run, over all its processes: a resumed run starts from what the checkpoint says.

    ``user_rounds`` counts each round once for each user who took part.
    """

    train_seconds: float = 0.0
    tokens: int = 0
    upload_bytes: int = 0
    download_bytes: int = 0
    user_rounds: int = 0
    earlier_seconds: float = 0.0
    started: float = 0.0

    COUNTS: ClassVar = ("train_seconds", "tokens", "upload_bytes", "download_bytes", "user_rounds")

    @property
    def wall_seconds(self) -> float:
        """Seconds since the run began, without the time in which no process worked on it."""
        return self.earlier_seconds + time.perf_counter() - self.started


Checkpoint = Callable[[int, Clock], None]
"""Saves the state after a round (number of rounds done)."""


def run_rounds(
    sim: Simulation,
    *,
    observe: Observer,
    checkpoint: Checkpoint = lambda done, clock: None,
    first_round: int = 0,
    clock: Clock | None = None,
) -> Sequence[AnyScore]:
    """Train from ``first_round`` (from 0) to the end and return the last evaluation.

    One round: every participant's local steps; then the exchange. Where the model that counts is the local one
    (``training.evaluate``), the last exchange is left out, so a run ends with the models that were evaluated. Whatever
    the setting, a method that tunes starts from the exchanged model, and one that makes final models makes them after
    the last exchange. With ``training.select`` "best" the run ends with the models of the evaluated round whose
    validation loss was lowest, and the last evaluation is theirs.

    Raises:
        DivergenceError: a user's loss or tensors are not finite.
    """
    clock = clock or Clock()
    clock.started = time.perf_counter()
    training, method = sim.training, sim.method
    rounds = training.rounds if method.phases else 0
    scores: Sequence[AnyScore] = ()
    if rounds and first_round == 0 and training.evaluate_first:
        _evaluate(sim, 0, observe)  # where every curve starts: the pretrained model
    for number in range(first_round, rounds):
        members = participants(training, number, [trainer.name for trainer in sim.trainers])
        members = _local(sim, members, number, observe, clock)
        last = number + 1 == rounds
        due = last or (number + 1) % training.evaluate_every == 0
        before = training.evaluate == "local" and not (method.tunes or method.finish)
        if due and before:
            scores = _evaluate(sim, number + 1, observe)
        if method.exchanges(number + 1) and not (last and before):
            sim.exchange(members)
        if last:
            sim.finish()
        if due and not before:
            scores = _evaluate(sim, number + 1, observe)
        if last or (number + 1) % training.checkpoint_every == 0:
            checkpoint(number + 1, clock)
    sim.choose()
    if sim.chosen_round != rounds:
        scores = sim.evaluate()  # an event tells of them already
    # Without rounds there is nothing but this; a run resumed after its last round has these events already.
    return scores or _evaluate(sim, rounds, observe if first_round == 0 else lambda event: None)


def _local(sim: Simulation, members: list[int], number: int, observe: Observer, clock: Clock) -> list[int]:
    """Local work and its event. Returns whose work counts."""
    observe({"event": "step", "advance": 0, "round": number + 1})
    found = sim.local_round(members, number, lambda: observe({"event": "step", "advance": 1, "round": number + 1}))
    for member, what in found.rejected.items():
        name = sim.trainers[member].name
        logger.warning("user %r is left out of round %d: %s", name, number + 1, what)
        observe({"event": "rejected", "round": number + 1, "user": name, "reason": what})
    members = [member for member in members if member not in found.rejected]
    if not members:
        member, what = next(iter(found.rejected.items()))
        raise diverged(sim.trainers[member].name, what, sim.suspects(member, sim.state.rows[member]))
    clock.train_seconds += found.seconds
    clock.tokens += found.tokens
    sent, received = sim.exchanged_bytes(members) if sim.method.exchanges(number + 1) else (0, 0)
    clock.upload_bytes += sent
    clock.download_bytes += received
    clock.user_rounds += len(members)
    observe(
        {
            "event": "round",
            "round": number + 1,
            "train_loss_nats": {sim.trainers[m].name: loss for m, loss in found.losses.items()},
            "upload_bytes": sent,
            "download_bytes": received,
            "tokens": found.tokens,
            "seconds": found.seconds,
        }
    )
    return members


def _evaluate(sim: Simulation, done: int, observe: Observer) -> Sequence[AnyScore]:
    observe({"event": "step", "advance": 0, "round": done, "evaluating": True})
    with sim.tuned(done):  # once for both
        scores, loss = sim.evaluate(), sim.validate() if sim.state.best else None
    for user, row, score in zip(sim.users, sim.row_of, scores, strict=True):
        if not math.isfinite(score.mean_loss):
            suspects = sim.suspects(row, sim.state.rows[row]) if done else ()
            raise diverged(user.name, f"test loss is {score.mean_loss} after round {done}", suspects)
    users = {user.name: _measured(score) for user, score in zip(sim.users, scores, strict=True)}
    event = {
        "event": "evaluation",
        "round": done,
        "iterations": done * sim.local_steps,
        "users": users,
        f"mean_test_{measure_of(scores)}": mean_measure(scores),
        **geometric(users, measure_of(scores)),
    }
    observe(event | _validated(sim, done, loss) | _experts(sim, scores) | mixtures(sim))
    return scores


def _validated(sim: Simulation, done: int, loss: float | None) -> dict[str, Any]:
    """Where the best round is selected: the validation loss, and everything remembered if it is the lowest so far."""
    if loss is None:
        return {}
    if loss < sim.state.best["loss"]:
        sim.state.remember(done, loss)
    return {"mean_valid_loss": loss}


def _experts(sim: Simulation, scores: Sequence[AnyScore]) -> dict[str, Any]:
    """For methods with routers: each user's experts, and for each layer their mean gates over the test text."""
    if not sim.routed:
        return {}
    adapters = sim.adapted.adapters
    rows = zip(sim.users, sim.row_of, strict=True)
    names = {user.name: watching.expert_names(adapters, row) for user, row in rows}
    found = {
        name: [[round(gate, 4) for gate in layer[: len(experts)]] for layer in score.expert_scores]
        for (name, experts), score in zip(names.items(), scores, strict=True)
    }
    return {"experts": names, "expert_scores": found}


def _measured(score: AnyScore) -> dict[str, float]:
    return {f"test_{name}": value for name, value in score.measures.items()}


def start_event(sim: Simulation) -> dict[str, Any]:
    """What a run says first: what it is, and how much everybody has."""
    unit = sim.feed.unit
    return {
        "event": "start",
        "method": sim.method.name,
        "seed": sim.training.seed,
        "base": sim.model.name,
        "rounds": sim.training.rounds if sim.method.phases else 0,
        "users": {u.name: {f"train_{unit}": len(u.train), f"test_{unit}": len(u.test)} for u in sim.users},
        **sim.left_out(),
    }


def measure_of(scores: Sequence[AnyScore]) -> str:
    """What models are compared by."""
    return next(iter(scores[0].measures))


def mean_measure(scores: Sequence[AnyScore]) -> float:
    """Mean over users of what they are compared by, as in the papers' tables."""
    measure = measure_of(scores)
    return sum(s.measures[measure] for s in scores) / len(scores)


def summarise(sim: Simulation, scores: Sequence[AnyScore], clock: Clock, *, base: str) -> Metrics:
    """The metrics of a finished run."""
    parameters, sent = sim.trainable_parameters(), sim.upload_bytes()
    unit = sim.feed.unit
    users: dict[str, Any] = {
        user.name: {
            **_measured(score),
            f"test_{unit}": getattr(score, unit),
            f"train_{unit}": len(user.train),
            f"valid_{unit}": len(user.valid),
            "trainable_parameters": parameters[i],
            "upload_bytes_per_round": sent[i],
        }
        for i, (user, score) in enumerate(zip(sim.users, scores, strict=True))
    }
    return Metrics(
        method=sim.method.name,
        seed=sim.training.seed,
        base=base,
        rounds=sim.training.rounds if sim.method.phases else 0,
        selected_round=sim.chosen_round,
        measure=measure_of(scores),
        unit=unit,
        users=users,
        mean=mean_measure(scores),
        upload_bytes_per_user_round=clock.upload_bytes / max(1, clock.user_rounds),
        download_bytes_per_user_round=clock.download_bytes / max(1, clock.user_rounds),
        trainable_parameters=max(parameters),
        per_second=clock.tokens / clock.train_seconds if clock.train_seconds else 0.0,
        wall_seconds=clock.wall_seconds,
        peak_memory_bytes=peak_memory_bytes(),
        dtype=str(sim.model.dtype).removeprefix("torch."),
        device=str(sim.model.device),
    )
