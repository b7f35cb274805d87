"""Evaluations: what an event says of everybody's models, and what a finished run's metrics are."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from comingle.config.settings import Training
from comingle.engines.client import Clients
from comingle.engines.clock import Clock, Federation
from comingle.engines.events import Observer
from comingle.engines.faults import diverged
from comingle.engines.local import finetuned, settle
from comingle.engines.mixing import mixture_at_users, mixtures_told, own_mixtures
from comingle.engines.runtime import peak_memory_bytes
from comingle.engines.scoring import AnyScore
from comingle.methods.base import Method
from comingle.models.model import Model
from comingle.utils.records import GEOMETRIC, Metrics, geometric


def evaluate(federation: Federation, done: int, observe: Observer) -> Sequence[AnyScore]:
    """Score everybody's models after so many rounds, and tell of it.

    Where the best round is selected, everything is remembered if the mean validation loss is the lowest so far.

    Raises:
        DivergenceError: a user's loss is not finite.
    """
    clients = federation.clients
    observe({"event": "step", "advance": 0, "round": done, "evaluating": True})
    scores, losses = federation.each(lambda: _look(clients, done))
    mean_loss = {"mean_valid_loss": federation.select(done, losses)} if clients.state.best else {}
    told = merged(federation.gather(lambda: _told_of(clients, scores)))
    if federation.leads:
        measure = measure_among(told["users"])
        event = evaluation_event(told["users"], measure, done=done, iterations=done * clients.steps.local_steps)
        mixed = mixtures_told(clients, federation.server, told["mixtures"])
        observe(event | sampled(clients, told["users"], measure) | mean_loss | told["routing"] | mixed)
    return scores


def _look(clients: Clients, done: int) -> tuple[Sequence[AnyScore], dict[str, float]]:
    """Scores of those who are here, and where the best round is selected their validation losses."""
    settle(clients, ends=done >= clients.training.rounds or len(clients.scored) == len(clients.users))
    with finetuned(clients, done):  # once for both
        scores, losses = clients.evaluate(), clients.validate() if clients.state.best else {}
    _check_finite(clients, scores, done)
    return scores, losses


def _told_of(clients: Clients, scores: Sequence[AnyScore]) -> dict[str, Any]:
    """What an event tells of those who are here."""
    users = {user.name: measured(score) for user, score in zip(clients.scored_users, scores, strict=True)}
    return {"users": users, "routing": experts_event(clients, scores), "mixtures": own_mixtures(clients)}


def merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mappings of users, below the same names, as one, in the order of the parts."""
    if len(parts) == 1:
        return dict(parts[0])
    names = dict.fromkeys(name for part in parts for name in part)
    whole = {name: [part[name] for part in parts if name in part] for name in names}
    return {name: merged(some) if isinstance(some[0], Mapping) else some[0] for name, some in whole.items()}


def evaluation_event(
    users: Mapping[str, Mapping[str, float]], measure: str, *, done: int, iterations: int
) -> dict[str, Any]:
    """What an event tells of users' scores after so many rounds."""
    of_users = {name: dict(of_user) for name, of_user in users.items()}
    event = {"event": "evaluation", "round": done, "iterations": iterations, "users": of_users}
    return event | {f"mean_test_{measure}": mean_of(users, measure)} | geometric(of_users, measure)


def sampled(clients: Clients, users: Mapping[str, Mapping[str, Any]], measure: str) -> dict[str, Any]:
    """What is said where not everybody was evaluated: how many of how many, and a 95% interval for the mean of all.

    ``mean -+ t s sqrt((1 - n/N) / n)``: Student's t, drawn without replacement (Cochran 1977, section 2.6).
    """
    count, population = len(users), len(clients.everybody)
    if clients.method.placement.pooled or count >= population:
        return {}
    values = [of_user[f"test_{measure}"] for of_user in users.values()]
    interval = None
    if count > 1 and all(map(math.isfinite, values)):
        from scipy.special import stdtrit  # only such runs need it

        error = statistics.stdev(values) * math.sqrt((1 - count / population) / count)
        reach, mean = float(stdtrit(count - 1, 0.975)) * error, statistics.fmean(values)
        interval = [mean - reach, mean + reach]
    return {"sample": {"users": count, "of": population, "interval": interval}}


def _check_finite(clients: Clients, scores: Sequence[AnyScore], done: int) -> None:
    for user, row, score in zip(clients.scored_users, clients.scored_rows, scores, strict=True):
        if not math.isfinite(score.mean_loss):
            suspects = clients.steps.suspects(row, clients.state.rows_of([row])[0]) if done else ()
            raise diverged(user.name, f"test loss is {score.mean_loss} after round {done}", suspects)


def experts_event(clients: Clients, scores: Sequence[AnyScore]) -> dict[str, Any]:
    """For methods with routers: each user's experts, and for each layer their mean gates over the test text."""
    if not clients.scorer.routed:
        return {}
    rows = zip(clients.scored_users, clients.scored_rows, strict=True)
    names = {user.name: clients.model.expert_names(row) for user, row in rows}
    by_user = {
        name: [[round(gate, 4) for gate in layer[: len(experts)]] for layer in score.expert_scores]
        for (name, experts), score in zip(names.items(), scores, strict=True)
    }
    return {"experts": names, "expert_scores": by_user}


def users_routing(clients: Clients, scores: Sequence[AnyScore]) -> dict[str, dict[str, Any]]:
    """How each user's model shares the work out: mean gates ``(layers, experts)`` over its test text, its mixture."""
    gates = experts_event(clients, scores).get("expert_scores", {})
    mixed = mixture_at_users(clients)
    of_users: dict[str, dict[str, Any]] = {name: {"gates": layers} for name, layers in gates.items()}
    for user, mixture in zip(clients.scored_users, [] if mixed is None else mixed.tolist(), strict=False):
        of_users.setdefault(user.name, {})["mixture"] = mixture
    return {user.name: of_users.get(user.name, {}) for user in clients.scored_users}


def measured(score: AnyScore) -> dict[str, float]:
    """A score as events and metrics have it."""
    return {f"test_{name}": value for name, value in score.measures.items()}


def start_event(
    method: Method, training: Training, base: str, users: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """What a run says first: what it is, and how much everybody has, by :func:`amounts`."""
    return {
        "event": "start",
        "method": method.name,
        "seed": training.seed,
        "base": base,
        "rounds": training.rounds if method.trains else 0,
        "users": users,
    }


def end_event(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """What a run says last: what its models are compared by."""
    means = (f"mean_test_{metrics['measure']}", GEOMETRIC)
    return {"event": "end"} | {key: metrics[key] for key in means if key in metrics}


def amounts(user: Any, unit: str) -> dict[str, int]:
    """How much a user has, in the unit of its kind."""
    return {f"train_{unit}": len(user.train), f"test_{unit}": len(user.test)}


def measure_of(scores: Sequence[AnyScore]) -> str:
    """What models are compared by."""
    return next(iter(scores[0].measures))


def measure_among(users: Mapping[str, Mapping[str, Any]]) -> str:
    """The same, of what is told of users, none of whom may be here."""
    return next((key for of_user in users.values() for key in of_user), "test_loss").removeprefix("test_")


def mean_of(users: Mapping[str, Mapping[str, Any]], measure: str) -> float:
    """Mean over users of what they are compared by, as in the papers' tables."""
    return sum(of_user[f"test_{measure}"] for of_user in users.values()) / len(users) if users else math.nan


def users_metrics(clients: Clients, scores: Sequence[AnyScore]) -> dict[str, dict[str, Any]]:
    """What a finished run's metrics say of each user."""
    parameters, sent = clients.trainable_parameters(), clients.upload_bytes()
    unit = clients.feed.unit
    return {
        user.name: {
            **measured(score),
            f"test_{unit}": getattr(score, unit),
            f"train_{unit}": len(user.train),
            f"valid_{unit}": len(user.valid),
            "trainable_parameters": parameters[i],
            "upload_bytes_per_round": sent[i],
        }
        for i, (user, score) in enumerate(zip(clients.scored_users, scores, strict=True))
    }


def summarise(
    clients: Clients, scores: Sequence[AnyScore], clock: Clock, users: dict[str, dict[str, Any]] | None = None
) -> Metrics:
    """The metrics of a finished run; ``users`` are those of everybody, where some are not here."""
    return metrics_of(
        users_metrics(clients, scores) if users is None else users,
        clients.model,
        clients.method,
        clients.training,
        clock,
        rounds=clients.rounds_done,
        selected=clients.chosen_round,
        measure=measure_of(scores) if scores else measure_among(users or {}),
        unit=clients.feed.unit,
    )


def metrics_of(
    users: dict[str, dict[str, Any]],
    model: Model,
    method: Method,
    training: Training,
    clock: Clock,
    *,
    rounds: int,
    selected: int,
    measure: str,
    unit: str,
) -> Metrics:
    """The same out of what is known of each user."""
    return Metrics(
        method=method.name,
        seed=training.seed,
        base=model.name,
        rounds=rounds,
        planned_rounds=training.rounds if rounds < training.rounds * method.trains else None,
        selected_round=selected,
        measure=measure,
        unit=unit,
        users=users,
        mean=mean_of(users, measure),
        upload_bytes_per_user_round=clock.upload_bytes / max(1, clock.user_rounds),
        download_bytes_per_user_round=clock.download_bytes / max(1, clock.user_rounds),
        trainable_parameters=max((of_user["trainable_parameters"] for of_user in users.values()), default=0),
        per_second=clock.tokens / clock.train_seconds if clock.train_seconds else 0.0,
        wall_seconds=clock.wall_seconds,
        peak_memory_bytes=peak_memory_bytes(),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
    )
