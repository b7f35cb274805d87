"""Evaluation of users' models: how often, cost so far, events and metrics.

Models are evaluated every 5 rounds, or less often so that evaluation takes at most 10% of training time. Times are
estimated from counts and never measured, so that all methods of a comparison, a resumed run, and clients in other
processes or on other machines get the same interval.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.config.settings import SHORTEST
from comingle.methods.base import Method
from comingle.methods.server import aggregation_weights
from comingle.models.hardware import peak_memory_bytes
from comingle.models.model import Model
from comingle.privacy.accounting import sample_size
from comingle.training.batch_sources import AnyScore, AnyUser
from comingle.training.checkpoints import Clock
from comingle.training.client import Clients
from comingle.training.events import JsonMapping, JsonObject
from comingle.training.server import ServerHalf, averaging_weights
from comingle.training.settings import RunPlan
from comingle.training.steps import diverged
from comingle.utils.records import GEOMETRIC, Metrics, geometric
from comingle.utils.trees import CLIENT_ROUTER

logger = logging.getLogger("comingle")


EVALUATION_SHARE = Fraction(1, 10)
"""Largest share of evaluation in the time of local steps."""
TRAIN_COST = Fraction(23, 10)
"""Time of training on a token, in units of the time of scoring one."""


def amounts_of(clients: Clients) -> list[int]:
    """Return how many evaluated users train, on how many tokens or samples a round, and how many are scored at once."""
    trainers, splits = (
        clients.scored_trainers,
        ("test", "valid") if clients.plan.evaluation.select == "best" else ("test",),
    )
    scored = [clients.batch_source.scoring(getattr(user, split)) for user in clients.scored_users for split in splits]
    return [len(trainers), sum(map(clients.batch_source.seen, trainers)), sum(scored)]


def period(plan: RunPlan, amounts: Sequence[int], users: int) -> int:
    """Return the number of rounds from one evaluation to the next.

    Warns if the evaluations that every run has take more than :data:`EVALUATION_SHARE`.

    Args:
        training: The settings of the run.
        amounts: As :func:`amounts_of`, of trainers that stand for all users.
        users: Number of all users.
    """
    (trainers, trained, scored), part = amounts, plan.participation
    if not trained or not scored:
        return SHORTEST
    present = sample_size(part, users) if isinstance(part, float | int) else Fraction(sum(map(len, part)), len(part))
    room = EVALUATION_SHARE * TRAIN_COST * plan.training.rounds * present * Fraction(trained, trainers) / scored
    others = plan.evaluation.first + (plan.evaluation.select == "best")  # whose models are scored once more
    every = max(SHORTEST, math.ceil(plan.training.rounds / max(1, math.floor(room) - others)))
    if (count := others + math.ceil(plan.training.rounds / every)) > room:
        less = f"lower {plan.test_limit}" if plan.test_limit else "give less test data"
        first = " or set evaluation.first: false" if plan.evaluation.first else ""
        _warn_once(float(100 * count * EVALUATION_SHARE / room), less + first)
    return every


@cache
def _warn_once(percent: float, advice: str) -> None:
    """Log the share of evaluation once, however many methods of a comparison have it."""
    logger.warning("evaluation takes %.0f%% of the time of training; %s", percent, advice)


PRECISION = 6


def own_mixtures(clients: Clients) -> dict[str, JsonObject]:
    """What that needs of each user who is here: its mixture, its true cluster, how much data it has."""
    known = mixture_at_users(clients)
    rows = [None] * len(clients.scored) if known is None else known.tolist()
    return {
        user.name: {"mixture": row, "cluster": getattr(user, "cluster", None), "count": len(user.train)}
        for user, row in zip(clients.scored_users, rows, strict=True)
    }


def merged_mixtures_event(clients: Clients, server: ServerHalf, users: Mapping[str, JsonMapping]) -> JsonObject:
    """The same of all users of a federation, some of whom may not be here."""
    shares, names = _known(server, users), list(users)
    if shares is None or not (event := mixtures_event(names, shares, clients.method)):
        return {}
    truth = [of_user["cluster"] for of_user in users.values()]
    if None not in truth:
        event["clusters"] = dict(zip(names, truth, strict=True))
    if None not in truth and _are_shares(shares):
        weights = _sizes([of_user["count"] for of_user in users.values()], clients.plan)
        event["aggregation_mismatch"] = round(float(mismatch(shares, torch.tensor(truth), weights).mean()), PRECISION)
    return event


def _known(server: ServerHalf, users: Mapping[str, JsonMapping]) -> Float[Tensor, "users clusters"] | None:
    """Everybody's mixture as the server knows it, else as users do."""
    if (merging := server.method.server.merging_weights(server.kept)) is not None:
        return merging[server.numbers(list(users))].double().cpu()
    rows = [of_user["mixture"] for of_user in users.values()]
    return None if None in rows else torch.tensor(rows, dtype=torch.float64)


def mixtures_event(names: Sequence[str], shares: Float[Tensor, "users clusters"], method: Method) -> JsonObject:
    """What an evaluation's event says of these users' mixtures; nothing of a single component."""
    if shares.shape[1] < 2:
        return {}
    rows = [[round(p, PRECISION) for p in row] for row in shares.tolist()]
    event: JsonObject = {"mixtures": dict(zip(names, rows, strict=True)), "component": method.components}
    if _are_shares(shares):
        event["router_entropy_nats"] = round(float(entropy(shares).mean()), PRECISION)
    return event


def _are_shares(shares: Float[Tensor, "users clusters"]) -> bool:
    """Merging weights without a softmax may be anything."""
    return bool((shares >= 0).all())


def mixture_at_users(clients: Clients) -> Float[Tensor, "users clusters"] | None:
    """Each user's mixture, without noise, or its choice, as users know it; the mean over layers that have their own."""
    mixture = clients.method.placement.mixture
    if not clients.scored:
        return None
    if mixture is not None:
        theta = clients.model.layout.views(clients.state.rows_of(clients.scored_rows))[CLIENT_ROUTER]
        shares = mixture.shares(theta.double()).cpu()
        return shares.mean(1) if mixture.per_layer else shares
    chosen = [part.shares(clients.cohort(clients.scored_rows, 0)) for part in clients.method.client.parts]
    return next((shares.double().cpu() for shares in chosen if shares is not None), None)


def _sizes(counts: Sequence[int], plan: RunPlan) -> Float[Tensor, " users"]:
    """Each user's share of the training data, p(k), or equal shares where means are uniform."""
    return averaging_weights(torch.tensor(counts) if plan.training.weighting != "uniform" else torch.ones(len(counts)))


def entropy(mixture: Float[Tensor, "users clusters"]) -> Float[Tensor, " users"]:
    """``-sum_c pi_c log pi_c`` in nats; 0 for a one-hot vector."""
    return -torch.xlogy(mixture, mixture).sum(-1)


def mismatch(
    mixture: Float[Tensor, "users clusters"], truth: Tensor, weights: Float[Tensor, " users"]
) -> Float[Tensor, " clusters"]:
    """``|delta_c|_1 = sum_k |p_hat(k|c) - p(k|c)|`` of each component (FLoRAL section 4).

    Components have no names, so each is held against the true cluster that makes most of it.
    """
    clusters = int(truth.max()) + 1
    true = aggregation_weights(torch.nn.functional.one_hot(truth, clusters).to(mixture), weights)
    learned = aggregation_weights(mixture, weights)
    distances = (learned.unsqueeze(2) - true.unsqueeze(1)).abs().sum(0)
    return distances.min(1).values


def users_report(clients: Clients, scores: Sequence[AnyScore]) -> JsonObject:
    """Return what an evaluation event says of the users of this process: scores, routing, mixtures."""
    users = {user.name: measured(score) for user, score in zip(clients.scored_users, scores, strict=True)}
    return {"users": users, "routing": experts_event(clients, scores), "mixtures": own_mixtures(clients)}


def merged(parts: Sequence[Mapping[str, Any]]) -> JsonObject:
    """Mappings of users, below the same names, as one, in the order of the parts."""
    if len(parts) == 1:
        return dict(parts[0])
    names = dict.fromkeys(name for part in parts for name in part)
    whole = {name: [part[name] for part in parts if name in part] for name in names}
    return {name: merged(some) if isinstance(some[0], Mapping) else some[0] for name, some in whole.items()}


def evaluation_event(users: Mapping[str, JsonMapping], measure: str, *, done: int, iterations: int) -> JsonObject:
    """What an event tells of users' scores after so many rounds."""
    of_users = {name: dict(of_user) for name, of_user in users.items()}
    event = {"event": "evaluation", "round": done, "iterations": iterations, "users": of_users}
    return event | {f"mean_test_{measure}": mean_of(users, measure)} | geometric(of_users, measure)


def sampled(clients: Clients, users: Mapping[str, JsonMapping], measure: str) -> JsonObject:
    """What is said where not everybody was evaluated: how many of how many, and a 95% interval for the mean of all.

    ``mean -+ t s sqrt((1 - n/N) / n)``: Student's t, drawn without replacement (Cochran 1977, section 2.6).
    """
    count, population = len(users), len(clients.population_names)
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


def check_finite(clients: Clients, scores: Sequence[AnyScore], done: int) -> None:
    """Check that every user's test loss is finite after ``done`` rounds.

    Raises:
        DivergenceError: one is not.
    """
    for user, row, score in zip(clients.scored_users, clients.scored_rows, scores, strict=True):
        if not math.isfinite(score.mean_loss):
            suspects = clients.steps.suspects(row, clients.state.rows_of([row])[0]) if done else ()
            raise diverged(user.name, f"test loss is {score.mean_loss} after round {done}", suspects)


def experts_event(clients: Clients, scores: Sequence[AnyScore]) -> JsonObject:
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


def users_routing(clients: Clients, scores: Sequence[AnyScore]) -> dict[str, JsonObject]:
    """How each user's model shares the work out: mean gates ``(layers, experts)`` over its test text, its mixture."""
    gates = experts_event(clients, scores).get("expert_scores", {})
    mixed = mixture_at_users(clients)
    of_users: dict[str, JsonObject] = {name: {"gates": layers} for name, layers in gates.items()}
    for user, mixture in zip(clients.scored_users, [] if mixed is None else mixed.tolist(), strict=False):
        of_users.setdefault(user.name, {})["mixture"] = mixture
    return {user.name: of_users.get(user.name, {}) for user in clients.scored_users}


def measured(score: AnyScore) -> dict[str, float]:
    """A score as events and metrics have it."""
    return {f"test_{name}": value for name, value in score.measures.items()}


def start_event(plan: RunPlan, base: str, users: Mapping[str, JsonMapping]) -> JsonObject:
    """What a run says first: what it is, and how much everybody has, by :func:`amounts`."""
    return {
        "event": "start",
        "method": plan.method.name,
        "seed": plan.seed,
        "base": base,
        "rounds": plan.training.rounds if plan.method.trains else 0,
        "users": users,
    }


def end_event(metrics: JsonMapping) -> JsonObject:
    """What a run says last: what its models are compared by."""
    means = (f"mean_test_{metrics['measure']}", GEOMETRIC)
    return {"event": "end"} | {key: metrics[key] for key in means if key in metrics}


def amounts(user: AnyUser, unit: str) -> dict[str, int]:
    """How much a user has, in the unit of its kind."""
    return {f"train_{unit}": len(user.train), f"test_{unit}": len(user.test)}


def measure_of(scores: Sequence[AnyScore]) -> str:
    """What models are compared by."""
    return next(iter(scores[0].measures))


def measure_among(users: Mapping[str, JsonMapping]) -> str:
    """The same, of what is told of users, none of whom may be here."""
    return next((key for of_user in users.values() for key in of_user), "test_loss").removeprefix("test_")


def mean_of(users: Mapping[str, JsonMapping], measure: str) -> float:
    """Mean over users of what they are compared by, as in the papers' tables."""
    return sum(of_user[f"test_{measure}"] for of_user in users.values()) / len(users) if users else math.nan


def users_metrics(clients: Clients, scores: Sequence[AnyScore]) -> dict[str, JsonObject]:
    """What a finished run's metrics say of each user."""
    parameters, sent = clients.trainable_parameters(), clients.upload_bytes()
    unit = clients.batch_source.unit
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
    clients: Clients, scores: Sequence[AnyScore], clock: Clock, users: dict[str, JsonObject] | None = None
) -> Metrics:
    """The metrics of a finished run; ``users`` are those of everybody, where some are not here."""
    return metrics_of(
        users_metrics(clients, scores) if users is None else users,
        clients.model,
        clients.plan,
        clock,
        rounds=clients.rounds_done,
        selected=clients.chosen_round,
        measure=measure_of(scores) if scores else measure_among(users or {}),
        unit=clients.batch_source.unit,
    )


def metrics_of(
    users: dict[str, JsonObject],
    model: Model,
    plan: RunPlan,
    clock: Clock,
    *,
    rounds: int,
    selected: int,
    measure: str,
    unit: str,
) -> Metrics:
    """The same out of what is known of each user."""
    return Metrics(
        method=plan.method.name,
        seed=plan.seed,
        base=model.name,
        rounds=rounds,
        planned_rounds=plan.training.rounds if rounds < plan.training.rounds * plan.method.trains else None,
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
