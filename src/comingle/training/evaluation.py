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
from comingle.training.server import ServerHalf, averaging_weights
from comingle.training.settings import RunPlan
from comingle.training.steps import diverged
from comingle.utils.records import GEOMETRIC, JsonMapping, JsonObject, Metrics, geometric
from comingle.utils.trees import CLIENT_ROUTER

logger = logging.getLogger("comingle")


EVALUATION_SHARE = Fraction(1, 10)
"""Largest time of evaluation, as a fraction of the time of local steps."""
TRAIN_COST = Fraction(23, 10)
"""Time to train on one token, in units of the time to score one."""


def amounts_of(clients: Clients) -> list[int]:
    """Return the amounts of data from which the evaluation interval follows.

    Returns:
        Number of evaluated trainers, tokens or samples that they train on per round, and tokens or samples that one
        evaluation scores.
    """
    batch_source, trainers = clients.batch_source, clients.scored_trainers
    splits = ("test", "valid") if clients.plan.evaluation.select == "best" else ("test",)
    scored = sum(batch_source.scoring_cost(getattr(user, split)) for user in clients.scored_users for split in splits)
    return [len(trainers), sum(map(batch_source.trained_amount, trainers)), scored]


def period(plan: RunPlan, amounts: Sequence[int], users: int) -> int:
    """Return the number of rounds between evaluations: 5, or more so that they take at most 10% of training time.

    Args:
        plan: Plan of the run.
        amounts: Number of trainers that represent all users, tokens or samples that they train on per round, and tokens
            or samples that one evaluation scores, as :func:`amounts_of` returns them.
        users: Number of all users.
    """
    return _plan_evaluations(plan, amounts, users)[0]


LEAST_WARNED_SECONDS = 10.0
"""Evaluations that together take less time give no warning."""


def warn_of_share(plan: RunPlan, amounts: Sequence[int], users: int, *, seconds: float = math.inf) -> None:
    """Log a warning if evaluations take more than 10% of training time even at the longest interval.

    Args:
        plan: Plan of the run.
        amounts: As in :func:`period`.
        users: Number of all users.
        seconds: Time of one evaluation; infinite if it is unknown.
    """
    _interval, count, affordable = _plan_evaluations(plan, amounts, users)
    if count > affordable and seconds * count >= LEAST_WARNED_SECONDS:
        less = f"lower {plan.test_limit}" if plan.test_limit else "use less test data"
        first = " or set evaluation.first: false" if plan.evaluation.first else ""
        _warn_once(float(100 * count * EVALUATION_SHARE / affordable), less + first)


def _plan_evaluations(plan: RunPlan, amounts: Sequence[int], users: int) -> tuple[int, int, Fraction]:
    """Return the interval between evaluations, their number, and the largest number that takes at most 10% of the time.

    Args:
        plan: Plan of the run.
        amounts: Number of trainers that represent all users, tokens or samples that they train on per round, and tokens
            or samples that one evaluation scores.
        users: Number of all users.
    """
    num_trainers, trained, scored = amounts
    if not trained or not scored:  # no data here to estimate times from: the shortest interval, 5 rounds
        return SHORTEST, 0, Fraction(0)
    rounds, participation = plan.training.rounds, plan.participation
    if isinstance(participation, float | int):
        mean_participants = sample_size(participation, users)
    else:
        mean_participants = Fraction(sum(map(len, participation)), len(participation))
    # Amounts are numbers of tokens or samples; training on one takes TRAIN_COST times as long as scoring one.
    train_amount = rounds * mean_participants * Fraction(trained, num_trainers)
    affordable = EVALUATION_SHARE * TRAIN_COST * train_amount / scored  # number of evaluations in 10% of the time
    others = plan.evaluation.first + (plan.evaluation.select == "best")  # evaluations besides the periodic ones
    every = max(SHORTEST, math.ceil(rounds / max(1, math.floor(affordable) - others)))
    return every, others + math.ceil(rounds / every), affordable


@cache
def _warn_once(percent: float, advice: str) -> None:
    """Log the share of evaluation; once per process and share, even if several methods are compared."""
    logger.warning("evaluation will take about %.0f%% of training time; %s", percent, advice)


PRECISION = 6
"""Number of decimals of mixtures in events."""


def own_mixtures(clients: Clients) -> dict[str, JsonObject]:
    """Return the mixture weights, true cluster and amount of training data of each evaluated user of this process.

    The mixture is None if the users of the method have none; the cluster is None for data without known clusters.
    """
    mixtures = mixture_at_users(clients)
    weights_of_users = [None] * len(clients.scored) if mixtures is None else mixtures.tolist()
    return {
        user.name: {"mixture": weights, "cluster": getattr(user, "cluster", None), "count": len(user.train)}
        for user, weights in zip(clients.scored_users, weights_of_users, strict=True)
    }


def merged_mixtures_event(clients: Clients, server: ServerHalf, users: Mapping[str, JsonMapping]) -> JsonObject:
    """Return the mixtures of all users, as part of an evaluation event; empty if the method has none.

    Keys are those of :func:`mixtures_event` and, if all users' true clusters are known:

    - "clusters": the true cluster by user, such as ``{"ada": 0, "ben": 1}``;
    - "aggregation_mismatch": mean distance of the components from the true clusters, from 0 (equal) to 2
      (:func:`mismatch`). It is left out if a mixture has negative weights.

    Args:
        clients: Clients of this process.
        server: The server, which may know mixtures.
        users: Results of :func:`own_mixtures` of all processes, by user.
    """
    mixtures = _mixture_weights(server, users)
    if mixtures is None:
        return {}
    names = list(users)
    event = mixtures_event(names, mixtures, clients.method)
    if not event:  # there is a single component
        return {}
    clusters = [of_user["cluster"] for of_user in users.values()]
    if None in clusters:
        return event
    event["clusters"] = dict(zip(names, clusters, strict=True))
    if _are_shares(mixtures):
        counts = [of_user["count"] for of_user in users.values()]
        data_shares = _data_shares(counts, clients.plan)
        distances = mismatch(mixtures, torch.tensor(clusters), data_shares)
        event["aggregation_mismatch"] = round(float(distances.mean()), PRECISION)
    return event


def _mixture_weights(server: ServerHalf, users: Mapping[str, JsonMapping]) -> Float[Tensor, "users clusters"] | None:
    """Return each user's mixture weights; None if the method has no mixture.

    If the server merges models for each user, they are its merging weights; otherwise the users have learned them.

    Args:
        server: The server.
        users: By user name, what :func:`own_mixtures` returns: the user's weights ("mixture", None without a mixture),
            true cluster and amount of data.
    """
    # ``server.kept`` has the tensors of the method, such as merging weights; other methods return None here.
    if (merging := server.method.server.merging_weights(server.kept)) is not None:
        return merging[server.numbers(list(users))].double().cpu()
    own_weights = [of_user["mixture"] for of_user in users.values()]
    return None if None in own_weights else torch.tensor(own_weights, dtype=torch.float64)


def mixtures_event(names: Sequence[str], shares: Float[Tensor, "users clusters"], method: Method) -> JsonObject:
    """Return the part of an evaluation event about mixtures.

    Its keys are "mixtures" (rounded weights by user), "component" (the name of what is mixed) and
    "router_entropy_nats" (mean over users; left out if weights are negative, as they have no entropy).

    Args:
        names: Names of the users.
        shares: Mixture weights of the users.
        method: Method of the run.

    Returns:
        Entries of the event; empty with a single component.
    """
    if shares.shape[1] < 2:
        return {}
    rounded = [[round(weight, PRECISION) for weight in weights] for weights in shares.tolist()]
    event: JsonObject = {"mixtures": dict(zip(names, rounded, strict=True)), "component": method.components}
    if _are_shares(shares):
        event["router_entropy_nats"] = round(float(entropy(shares).mean()), PRECISION)
    return event


def _are_shares(shares: Float[Tensor, "users clusters"]) -> bool:
    """Return whether no weight is negative, which merging weights without a softmax may be."""
    return bool((shares >= 0).all())


def mixture_at_users(clients: Clients) -> Float[Tensor, "users clusters"] | None:
    """Return the mixture weights of each evaluated user of this process; None if no user is evaluated.

    The weights follow from the logits that the user has learned, without router noise; mixtures per layer are averaged
    over layers. In methods whose users choose one of several models, the chosen model has weight 1. Other methods have
    no weights, and the result is None.
    """
    mixture = clients.method.placement.mixture
    if not clients.scored:
        return None
    if mixture is not None:
        logits = clients.model.layout.views(clients.state.rows_of(clients.scored_rows))[CLIENT_ROUTER]
        shares = mixture.shares(logits.double()).cpu()
        return shares.mean(1) if mixture.per_layer else shares
    any_round = 0  # choices do not depend on the round, but a cohort needs one
    choices = [hook.shares(clients.cohort(clients.scored_rows, any_round)) for hook in clients.method.client.parts]
    return next((shares.double().cpu() for shares in choices if shares is not None), None)


def _data_shares(counts: Sequence[int], plan: RunPlan) -> Float[Tensor, " users"]:
    """Return each user's share of the training data, p(k); equal shares if means over users are unweighted."""
    return averaging_weights(torch.tensor(counts) if plan.training.weighting != "uniform" else torch.ones(len(counts)))


def entropy(mixture: Float[Tensor, "users clusters"]) -> Float[Tensor, " users"]:
    """Return ``-sum_c pi_c log pi_c`` in nats; 0 for a one-hot vector."""
    return -torch.xlogy(mixture, mixture).sum(-1)


def mismatch(
    mixture: Float[Tensor, "users clusters"], truth: Tensor, weights: Float[Tensor, " users"]
) -> Float[Tensor, " clusters"]:
    """Return the distance of each learned component from the nearest true cluster, by who contributes to it.

    ``|delta_c|_1 = sum_k |p_hat(k|c) - p(k|c)|`` (FLoRAL, section 4), which is at most 2. Here ``p_hat(k|c)`` is the
    weight of user k in the mean of component c with the learned mixtures, and ``p(k|c)`` the one with the true
    clusters. Components have no fixed order, so each is compared with the nearest true cluster.

    Args:
        mixture: Learned mixture weights.
        truth: True cluster of each user.
        weights: Share of each user in the training data.
    """
    num_clusters = int(truth.max()) + 1
    true = aggregation_weights(torch.nn.functional.one_hot(truth, num_clusters).to(mixture), weights)
    learned = aggregation_weights(mixture, weights)
    distances = (learned.unsqueeze(2) - true.unsqueeze(1)).abs().sum(0)  # (components, true clusters)
    return distances.min(1).values


def users_report(clients: Clients, scores: Sequence[AnyScore]) -> JsonObject:
    """Return scores, routing and mixtures of the users of this process, for an evaluation event."""
    users = {user.name: measured(score) for user, score in zip(clients.scored_users, scores, strict=True)}
    return {"users": users, "routing": experts_event(clients, scores), "mixtures": own_mixtures(clients)}


def merged(parts: Sequence[Mapping[str, Any]]) -> JsonObject:
    """Merge nested mappings of several processes, in the order of the processes.

    Of other values under the same key, that of the first process is kept.

    >>> merged([{"users": {"ann": 1.0}, "unit": "tokens"}, {"users": {"bob": 2.0}, "unit": "tokens"}])
    {'users': {'ann': 1.0, 'bob': 2.0}, 'unit': 'tokens'}
    """
    if len(parts) == 1:
        return dict(parts[0])
    keys = dict.fromkeys(key for part in parts for key in part)
    values = {key: [part[key] for part in parts if key in part] for key in keys}
    return {key: merged(found) if isinstance(found[0], Mapping) else found[0] for key, found in values.items()}


def evaluation_event(users: Mapping[str, JsonMapping], measure: str, *, done: int, iterations: int) -> JsonObject:
    """Return an evaluation event: the scores of users and their mean.

    Args:
        users: Scores by user name.
        measure: Name of the measure that models are compared by.
        done: Number of rounds that are done.
        iterations: Number of local steps that are done.
    """
    of_users = {name: dict(of_user) for name, of_user in users.items()}
    event = {"event": "evaluation", "round": done, "iterations": iterations, "users": of_users}
    # ``geometric`` adds the geometric mean of perplexities; it is empty for other measures.
    return event | {f"mean_test_{measure}": mean_of(users, measure)} | geometric(of_users, measure)


def sample_entry(clients: Clients, users: Mapping[str, JsonMapping], measure: str) -> JsonObject:
    """Return the sample size and a 95% confidence interval for the mean over all users, if only a sample was evaluated.

    The interval is ``mean -+ t s sqrt((1 - n/N) / n)``: Student's t with a sample of n out of N drawn without
    replacement (Cochran 1977, section 2.6).

    Args:
        clients: Clients of the run.
        users: Scores of the evaluated users, by name.
        measure: Name of the measure.

    Returns:
        Entry "sample" of an evaluation event; empty if all users were evaluated. The interval is None for a single
        user or if a score is not finite.
    """
    count, population = len(users), len(clients.population_names)
    if clients.method.placement.pooled or count >= population:  # pooled: one model has the same score for all users
        return {}
    values = [of_user[f"test_{measure}"] for of_user in users.values()]
    interval = None
    if count > 1 and all(map(math.isfinite, values)):
        from scipy.special import stdtrit  # slow to import

        standard_error = statistics.stdev(values) * math.sqrt((1 - count / population) / count)
        half_width, mean = float(stdtrit(count - 1, 0.975)) * standard_error, statistics.fmean(values)
        interval = [mean - half_width, mean + half_width]
    return {"sample": {"users": count, "of": population, "interval": interval}}


def check_finite(clients: Clients, scores: Sequence[AnyScore], done: int) -> None:
    """Check that the test loss of every evaluated user is finite.

    Args:
        clients: Clients of the run.
        scores: Scores of the evaluated users.
        done: Number of rounds that are done.

    Raises:
        DivergenceError: A loss is not finite; names the user.
    """
    for user, row, score in zip(clients.scored_users, clients.scored_rows, scores, strict=True):
        if not math.isfinite(score.mean_loss):
            suspect_optimizers: Sequence[str] = ()
            if done:  # before any training, no optimizer can be the cause
                suspect_optimizers = clients.steps.suspect_optimizers(row, clients.state.rows_of([row])[0])
            raise diverged(user.name, f"test loss is {score.mean_loss} after round {done}", suspect_optimizers)


def experts_event(clients: Clients, scores: Sequence[AnyScore]) -> JsonObject:
    """Return the experts of each user and their mean gates per layer over the test data; empty without routers."""
    if not clients.scorer.routed:
        return {}
    experts, gates = {}, {}
    for user, row, score in zip(clients.scored_users, clients.scored_rows, scores, strict=True):
        experts[user.name] = clients.model.expert_names(row)
        num_experts = len(experts[user.name])  # gates are padded to the largest number of any user
        gates[user.name] = [[round(gate, 4) for gate in layer[:num_experts]] for layer in score.expert_scores]
    return {"experts": experts, "expert_scores": gates}


def users_routing(clients: Clients, scores: Sequence[AnyScore]) -> dict[str, JsonObject]:
    """Return how the model of each evaluated user weights its components, by user name.

    Entries are "gates", the mean gates ``(layers, experts)`` over the test data, if tokens are routed to experts, and
    "mixture", the weights of the user's mixture, if the method has one.
    """
    gates = experts_event(clients, scores).get("expert_scores", {})
    mixtures = mixture_at_users(clients)
    routing: dict[str, JsonObject] = {user.name: {} for user in clients.scored_users}
    for name, layers in gates.items():
        routing[name]["gates"] = layers
    if mixtures is not None:
        for user, weights in zip(clients.scored_users, mixtures.tolist(), strict=True):
            routing[user.name]["mixture"] = weights
    return routing


def measured(score: AnyScore) -> dict[str, float]:
    """Return the measures of a score under the keys of events and metrics."""
    return {f"test_{name}": value for name, value in score.measures.items()}


def start_event(plan: RunPlan, base: str, users: Mapping[str, JsonMapping]) -> JsonObject:
    """Return the first event of a run.

    Args:
        plan: Plan of the run.
        base: Name of the base model.
        users: Amounts of data by user name, from :func:`amounts`.
    """
    return {
        "event": "start",
        "method": plan.method.name,
        "seed": plan.seed,
        "base": base,
        "rounds": plan.training.rounds if plan.method.trains else 0,
        "users": users,
    }


def end_event(metrics: JsonMapping) -> JsonObject:
    """Return the last event of a run, with the means that methods are compared by."""
    means = (f"mean_test_{metrics['measure']}", GEOMETRIC)
    return {"event": "end"} | {key: metrics[key] for key in means if key in metrics}


def amounts(user: AnyUser, unit: str) -> dict[str, int]:
    """Return the amount of training and test data of a user, in the unit of its kind."""
    return {f"train_{unit}": len(user.train), f"test_{unit}": len(user.test)}


def measure_of(scores: Sequence[AnyScore]) -> str:
    """Return the name of the measure that models are compared by."""
    return next(iter(scores[0].measures))


def measure_among(users: Mapping[str, JsonMapping]) -> str:
    """Return the name of the measure that models are compared by, from the scores in an event."""
    return next((key for of_user in users.values() for key in of_user), "test_loss").removeprefix("test_")


def mean_of(users: Mapping[str, JsonMapping], measure: str) -> float:
    """Return the unweighted mean over users of a test measure; NaN without users."""
    return sum(of_user[f"test_{measure}"] for of_user in users.values()) / len(users) if users else math.nan


def users_metrics(clients: Clients, scores: Sequence[AnyScore]) -> dict[str, JsonObject]:
    """Return the entry of each evaluated user in the run's metrics, by name: scores, amounts of data and costs."""
    parameters, upload_bytes = clients.trainable_parameters(), clients.upload_bytes()
    unit = clients.batch_source.unit  # "tokens" or "samples"
    return {
        user.name: {
            **measured(score),
            f"test_{unit}": getattr(score, unit),
            f"train_{unit}": len(user.train),
            f"valid_{unit}": len(user.valid),
            "trainable_parameters": parameters[i],
            "upload_bytes_per_round": upload_bytes[i],
        }
        for i, (user, score) in enumerate(zip(clients.scored_users, scores, strict=True))
    }


def summarise(
    clients: Clients, scores: Sequence[AnyScore], clock: Clock, users: dict[str, JsonObject] | None = None
) -> Metrics:
    """Return the metrics of a finished run.

    Args:
        clients: Clients of this process.
        scores: Final scores of its evaluated users.
        clock: Time, tokens and bytes of the run.
        users: Metrics of the users of all processes; those of this process if None.
    """
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
    """Return the metrics of a finished run from the metrics of its users.

    Args:
        users: Metrics by user name.
        model: The model.
        plan: Plan of the run.
        clock: Time, tokens and bytes of the run.
        rounds: Number of rounds that are done.
        selected: Number of rounds after which the final models were trained.
        measure: Name of the measure.
        unit: Unit in which data is counted.
    """
    planned_rounds = plan.training.rounds if plan.method.trains else 0
    return Metrics(
        method=plan.method.name,
        seed=plan.seed,
        base=model.name,
        rounds=rounds,
        planned_rounds=planned_rounds if rounds < planned_rounds else None,  # only if the run ended early
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
