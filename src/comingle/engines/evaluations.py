"""Evaluations: what an event says of everybody's models, and what a finished run's metrics are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from comingle.engines.client import Clients
from comingle.engines.clock import Clock, Federation
from comingle.engines.events import Observer
from comingle.engines.faults import diverged
from comingle.engines.local import finetuned
from comingle.engines.mixing import mixtures
from comingle.engines.runtime import peak_memory_bytes
from comingle.engines.scoring import AnyScore
from comingle.records import Metrics, geometric


def evaluate(federation: Federation, done: int, observe: Observer) -> Sequence[AnyScore]:
    """Score everybody's models after so many rounds, and tell of it.

    Where the best round is selected, everything is remembered if the mean validation loss is the lowest so far.

    Raises:
        DivergenceError: a user's loss is not finite.
    """
    clients = federation.clients
    observe({"event": "step", "advance": 0, "round": done, "evaluating": True})
    with finetuned(clients, done):  # once for both
        scores, losses = clients.evaluate(), clients.validate() if clients.state.best else {}
    _check_finite(clients, scores, done)
    users = {user.name: _measured(score) for user, score in zip(clients.users, scores, strict=True)}
    event = {
        "event": "evaluation",
        "round": done,
        "iterations": done * clients.steps.local_steps,
        "users": users,
        f"mean_test_{measure_of(scores)}": mean_measure(scores),
        **geometric(users, measure_of(scores)),
    }
    if losses:
        federation.select(done, losses)
        event["mean_valid_loss"] = fmean(losses.values())
    observe(event | _experts(clients, scores) | mixtures(clients, federation.server))
    return scores


def _check_finite(clients: Clients, scores: Sequence[AnyScore], done: int) -> None:
    for user, row, score in zip(clients.users, clients.row_of, scores, strict=True):
        if not math.isfinite(score.mean_loss):
            suspects = clients.steps.suspects(row, clients.state.rows[row]) if done else ()
            raise diverged(user.name, f"test loss is {score.mean_loss} after round {done}", suspects)


def _experts(clients: Clients, scores: Sequence[AnyScore]) -> dict[str, Any]:
    """For methods with routers: each user's experts, and for each layer their mean gates over the test text."""
    if not clients.scorer.routed:
        return {}
    rows = zip(clients.users, clients.row_of, strict=True)
    names = {user.name: clients.model.expert_names(row) for user, row in rows}
    by_user = {
        name: [[round(gate, 4) for gate in layer[: len(experts)]] for layer in score.expert_scores]
        for (name, experts), score in zip(names.items(), scores, strict=True)
    }
    return {"experts": names, "expert_scores": by_user}


def _measured(score: AnyScore) -> dict[str, float]:
    return {f"test_{name}": value for name, value in score.measures.items()}


def start_event(clients: Clients) -> dict[str, Any]:
    """What a run says first: what it is, and how much everybody has."""
    unit = clients.feed.unit
    return {
        "event": "start",
        "method": clients.method.name,
        "seed": clients.training.seed,
        "base": clients.model.name,
        "rounds": clients.training.rounds if clients.method.trains else 0,
        "users": {u.name: {f"train_{unit}": len(u.train), f"test_{unit}": len(u.test)} for u in clients.users},
        **clients.left_out,
    }


def measure_of(scores: Sequence[AnyScore]) -> str:
    """What models are compared by."""
    return next(iter(scores[0].measures))


def mean_measure(scores: Sequence[AnyScore]) -> float:
    """Mean over users of what they are compared by, as in the papers' tables."""
    measure = measure_of(scores)
    return sum(s.measures[measure] for s in scores) / len(scores)


def summarise(clients: Clients, scores: Sequence[AnyScore], clock: Clock, *, base: str) -> Metrics:
    """The metrics of a finished run."""
    parameters, sent = clients.trainable_parameters(), clients.upload_bytes()
    unit = clients.feed.unit
    users: dict[str, Any] = {
        user.name: {
            **_measured(score),
            f"test_{unit}": getattr(score, unit),
            f"train_{unit}": len(user.train),
            f"valid_{unit}": len(user.valid),
            "trainable_parameters": parameters[i],
            "upload_bytes_per_round": sent[i],
        }
        for i, (user, score) in enumerate(zip(clients.users, scores, strict=True))
    }
    return Metrics(
        method=clients.method.name,
        seed=clients.training.seed,
        base=base,
        rounds=clients.training.rounds if clients.method.trains else 0,
        selected_round=clients.chosen_round,
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
        dtype=str(clients.model.dtype).removeprefix("torch."),
        device=str(clients.model.device),
    )
