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


def data_amounts(clients: Clients) -> list[int]:
    """Return amounts of data from which :func:`evaluation_interval` estimates the time of training and evaluation.

    Returns:
        ``[trainers, trained, scored]``, such as ``[50, 6400, 1200]``: evaluated trainers, tokens or samples that they
        train on per round, and tokens or samples that one evaluation scores.
    """
    batch_source, trainers = clients.batch_source, clients.scored_trainers
    trained_amount = sum(batch_source.trained_amount(trainer) for trainer in trainers)
    scored_amount = 0
    for user in clients.scored_users:
        scored_amount += batch_source.scoring_cost(user.test)
        if clients.plan.evaluation.select == "best":
            scored_amount += batch_source.scoring_cost(user.valid)
    return [len(trainers), trained_amount, scored_amount]


def evaluation_interval(plan: RunPlan, amounts: Sequence[int], users: int) -> int:
    """Return the number of rounds between evaluations: 5, or more so that they take at most 10% of training time.

    Args:
        plan: Settings of the run, in the form that training uses.
        amounts: Number of evaluated trainers, tokens or samples that they train on per round, and tokens or samples
            that one evaluation scores, from :func:`data_amounts`.
        users: Number of all users.
    """
    interval, _num_evaluations, _num_affordable = _plan_evaluations(plan, amounts, users)
    return interval


LEAST_WARNED_SECONDS = 10.0
"""Evaluations that together take less time give no warning."""


def warn_of_share(plan: RunPlan, amounts: Sequence[int], users: int, *, seconds: float = math.inf) -> None:
    """Log a warning if evaluations take more than 10% of training time even at the longest interval.

    There is none if they are known to take less than :data:`LEAST_WARNED_SECONDS` together.

    Args:
        plan: Settings of the run, in the form that training uses.
        amounts: Amounts of data from :func:`data_amounts`, from which the time of training and evaluation is estimated.
        users: Number of all users.
        seconds: Time of one evaluation; infinite if it is unknown.
    """
    _interval, num_evaluations, num_affordable = _plan_evaluations(plan, amounts, users)
    if num_evaluations <= num_affordable or seconds * num_evaluations < LEAST_WARNED_SECONDS:
        return
    # ``num_affordable`` evaluations would take the share that is allowed.
    percent = float(100 * num_evaluations * EVALUATION_SHARE / num_affordable)
    advice = f"lower {plan.test_limit}" if plan.test_limit else "use less test data"
    if plan.evaluation.first:
        advice += " or set evaluation.first: false"
    _warn_once(percent, advice)


def _plan_evaluations(plan: RunPlan, amounts: Sequence[int], users: int) -> tuple[int, int, Fraction]:
    """Return the interval between evaluations, their number, and the largest number that takes at most 10% of the time.

    Args:
        plan: Settings of the run, in the form that training uses.
        amounts: Number of trainers that represent all users, tokens or samples that they train on per round, and tokens
            or samples that one evaluation scores.
        users: Number of all users.
    """
    num_trainers, trained_per_round, scored_per_evaluation = amounts
    if not trained_per_round or not scored_per_evaluation:  # no data to estimate times from: every 5 rounds
        return SHORTEST, 0, Fraction(0)
    rounds, participation = plan.training.rounds, plan.participation
    if isinstance(participation, float | int):
        mean_participants = sample_size(participation, users)
    else:  # the participants of each round
        mean_participants = Fraction(sum(map(len, participation)), len(participation))
    trained = rounds * mean_participants * Fraction(trained_per_round, num_trainers)  # tokens or samples, in the run
    # Times in units of the time to score one token or sample.
    train_time = TRAIN_COST * trained
    num_affordable = EVALUATION_SHARE * train_time / scored_per_evaluation
    # One evaluation before the first round and one of the best round's models do not depend on the interval.
    num_extra = plan.evaluation.first + (plan.evaluation.select == "best")
    num_affordable_periodic = max(1, math.floor(num_affordable) - num_extra)
    interval = max(SHORTEST, math.ceil(rounds / num_affordable_periodic))
    num_evaluations = num_extra + math.ceil(rounds / interval)
    return interval, num_evaluations, num_affordable


@cache
def _warn_once(percent: float, advice: str) -> None:
    """Warn that evaluation takes much of the time; only once per process, even if several methods are compared.

    Args:
        percent: Time of evaluation in per cent of that of training. Another share is logged again.
        advice: What the user may change.
    """
    logger.warning("evaluation will take about %.0f%% of training time; %s", percent, advice)


PRECISION = 6
"""Number of decimals of mixtures in events."""


def mixtures_of_users(clients: Clients) -> dict[str, JsonObject]:
    """Return the mixture weights, true cluster and amount of training data of each evaluated user of this process.

    For example ``{"ann": {"mixture": [0.9, 0.1], "cluster": 0, "count": 1200}}``. The mixture is None if the method
    has none; the cluster is None for data without known clusters.
    """
    mixtures = mixture_at_users(clients)
    weights_of_users = [None] * len(clients.scored) if mixtures is None else mixtures.tolist()
    mixture_by_user: dict[str, JsonObject] = {}
    for user, weights in zip(clients.scored_users, weights_of_users, strict=True):
        cluster = getattr(user, "cluster", None)
        mixture_by_user[user.name] = {"mixture": weights, "cluster": cluster, "count": len(user.train)}
    return mixture_by_user


def merged_mixtures_event(clients: Clients, server: ServerHalf, users: Mapping[str, JsonMapping]) -> JsonObject:
    """Return the mixtures of all users, as part of an evaluation event; empty if the method has none.

    Keys are those of :func:`mixtures_event` and, if all users' true clusters are known:

    - "clusters": the true cluster by user, such as ``{"ada": 0, "ben": 1}``;
    - "aggregation_mismatch": mean distance of the components from the true clusters, from 0 (equal) to 2
      (:func:`mismatch`). It is left out if a mixture has negative weights.

    Args:
        clients: Clients of this process.
        server: The server; with some methods it has the mixtures, as it merges models for each user.
        users: Results of :func:`mixtures_of_users` of all processes, by user.
    """
    mixtures = _mixture_weights(server, users)
    if mixtures is None:
        return {}
    event = mixtures_event(list(users), mixtures, clients.method)
    if not event:  # there is a single component
        return {}
    cluster_by_user = {name: of_user["cluster"] for name, of_user in users.items()}
    if None in cluster_by_user.values():
        return event
    event["clusters"] = cluster_by_user
    if _has_no_negative(mixtures):
        counts = [of_user["count"] for of_user in users.values()]
        clusters = torch.tensor(list(cluster_by_user.values()))
        distances = mismatch(mixtures, clusters, _data_shares(counts, clients.plan))
        event["aggregation_mismatch"] = round(float(distances.mean()), PRECISION)
    return event


def _mixture_weights(server: ServerHalf, users: Mapping[str, JsonMapping]) -> Float[Tensor, "users clusters"] | None:
    """Return each user's mixture weights: those with which the server merges models, or those that users learned.

    None if the method has no mixture.

    Args:
        server: The run's server with its state.
        users: Results of :func:`mixtures_of_users`, with the weights that each user has learned under "mixture".
    """
    merging_weights = server.method.server.merging_weights(server.kept)
    if merging_weights is not None:  # the server merges models for each user, with these weights
        numbers = server.numbers(list(users))
        return merging_weights[numbers].double().cpu()
    learned_weights = [of_user["mixture"] for of_user in users.values()]
    if None in learned_weights:
        return None
    return torch.tensor(learned_weights, dtype=torch.float64)


def mixtures_event(names: Sequence[str], mixtures: Float[Tensor, "users clusters"], method: Method) -> JsonObject:
    """Return the part of an evaluation event about mixtures; empty with a single component.

    Its keys are "mixtures" (rounded weights by user), "component" (the name of what is mixed) and
    "router_entropy_nats" (mean over users; left out if weights are negative, as they have no entropy).

    Args:
        names: Names of the users.
        mixtures: Mixture weights of the users.
        method: Method of the run.
    """
    num_components = mixtures.shape[1]
    if num_components < 2:
        return {}
    weights_by_user: JsonObject = {}
    for name, weights in zip(names, mixtures.tolist(), strict=True):
        weights_by_user[name] = [round(weight, PRECISION) for weight in weights]
    event: JsonObject = {"mixtures": weights_by_user, "component": method.components}
    if _has_no_negative(mixtures):
        event["router_entropy_nats"] = round(float(entropy(mixtures).mean()), PRECISION)
    return event


def _has_no_negative(mixtures: Float[Tensor, "users clusters"]) -> bool:
    """Return whether no mixture weight is negative, as the entropy requires; weights that merge models may be."""
    return bool((mixtures >= 0).all())


def mixture_at_users(clients: Clients) -> Float[Tensor, "users clusters"] | None:
    """Return the mixture weights of each evaluated user of this process; None without mixtures or evaluated users.

    Weights are computed from the router logits that the user has learned, and averaged over layers. In methods whose
    users choose one of several models, the chosen model has weight 1.
    """
    if not clients.scored:
        return None
    mixture = clients.method.placement.mixture
    if mixture is not None:
        rows = clients.state.rows_of(clients.scored_rows)
        logits = clients.model.layout.views(rows)[CLIENT_ROUTER]
        weights = mixture.shares(logits.double()).cpu()  # (users, clusters), or (users, layers, clusters)
        return weights.mean(1) if mixture.per_layer else weights
    for hook in clients.method.client.parts:
        cohort = clients.cohort(clients.scored_rows, round_number=0)  # any round: choices do not depend on it
        one_hot_choices = hook.shares(cohort)
        if one_hot_choices is not None:
            return one_hot_choices.double().cpu()
    return None


def _data_shares(counts: Sequence[int], plan: RunPlan) -> Float[Tensor, " users"]:
    """Return each user's share of the training data, p(k); equal shares if means over users are unweighted."""
    if plan.training.weighting == "uniform":
        return averaging_weights(torch.ones(len(counts)))
    return averaging_weights(torch.tensor(counts))


def entropy(mixture: Float[Tensor, "users clusters"]) -> Float[Tensor, " users"]:
    """Return ``-sum_c pi_c log pi_c`` in nats; 0 for a one-hot vector."""
    return -torch.xlogy(mixture, mixture).sum(-1)


def mismatch(
    mixture: Float[Tensor, "users clusters"], truth: Tensor, weights: Float[Tensor, " users"]
) -> Float[Tensor, " clusters"]:
    """Return how far each learned component is from the nearest true cluster, comparing how they weight the users.

    The distance of component c is ``sum_k |p_hat(k|c) - p(k|c)|`` over users k (FLoRAL, section 4), from 0 to 2.
    Components have no fixed order, so each is compared with the nearest true cluster.

    Args:
        mixture: Learned mixture weights.
        truth: True cluster of each user.
        weights: Share of each user in the training data.
    """
    num_clusters = int(truth.max()) + 1
    true_mixture = torch.nn.functional.one_hot(truth, num_clusters).to(mixture)
    p = aggregation_weights(true_mixture, weights)  # p(k|c): weight of user k in the mean of true cluster c
    p_hat = aggregation_weights(mixture, weights)  # the same for learned component c
    # (users, components, 1) - (users, 1, true clusters), added up over users.
    distances = (p_hat.unsqueeze(2) - p.unsqueeze(1)).abs().sum(0)  # (components, true clusters)
    return distances.min(1).values


def users_report(clients: Clients, scores: Sequence[AnyScore]) -> JsonObject:
    """Return results of this process's users for the evaluation event, which is made of those of all processes.

    Args:
        clients: Clients of this process.
        scores: Scores of its evaluated users.

    Returns:
        "users" has the scores by user name, "routing" the mean gates of experts (:func:`experts_event`), and "mixtures"
        the mixture weights (:func:`mixtures_of_users`).
    """
    users = {user.name: measured(score) for user, score in zip(clients.scored_users, scores, strict=True)}
    return {"users": users, "routing": experts_event(clients, scores), "mixtures": mixtures_of_users(clients)}


def merged(mappings: Sequence[Mapping[str, Any]]) -> JsonObject:
    """Merge nested mappings of several processes, in the order of the processes.

    A key whose values are not mappings gets the value of the first process that has it.

    >>> merged([{"users": {"ann": 1.0}, "unit": "tokens"}, {"users": {"bob": 2.0}, "unit": "tokens"}])
    {'users': {'ann': 1.0, 'bob': 2.0}, 'unit': 'tokens'}
    """
    if len(mappings) == 1:
        return dict(mappings[0])
    values_by_key: dict[str, list[Any]] = {}
    for mapping in mappings:
        for key, value in mapping.items():
            values_by_key.setdefault(key, []).append(value)
    result: JsonObject = {}
    for key, values in values_by_key.items():
        first = values[0]
        result[key] = merged(values) if isinstance(first, Mapping) else first
    return result


def evaluation_event(users: Mapping[str, JsonMapping], measure: str, *, done: int, iterations: int) -> JsonObject:
    """Return an evaluation event: the scores of users and their mean.

    Args:
        users: Scores by user name.
        measure: Name of the measure that models are compared by.
        done: Number of rounds that are done.
        iterations: Number of local steps that are done.
    """
    scores_by_user = {name: dict(scores) for name, scores in users.items()}
    event: JsonObject = {
        "event": "evaluation",
        "round": done,
        "iterations": iterations,
        "users": scores_by_user,
        f"mean_test_{measure}": mean_of(users, measure),
    }
    event.update(geometric(scores_by_user, measure))  # geometric mean of perplexities; empty for other measures
    return event


def sample_entry(clients: Clients, users: Mapping[str, JsonMapping], measure: str) -> JsonObject:
    """Return the sample size and a 95% confidence interval for the mean over all users, if only a sample was evaluated.

    The interval is ``mean -+ t s sqrt((1 - n/N) / n)``: Student's t with a sample of n out of N drawn without
    replacement (Cochran 1977, section 2.6).

    Args:
        clients: Clients of the run.
        users: Scores of the evaluated users, by name.
        measure: Name of the measure that models are compared by, such as "loss".

    Returns:
        Entry "sample" of an evaluation event, such as ``{"users": 50, "of": 1000, "interval": [2.1, 2.3]}``; empty if
        all users were evaluated. The interval is None for a single user or if a score is not finite.
    """
    if clients.method.placement.pooled:  # one model has the same score for all users
        return {}
    n, population = len(users), len(clients.population_names)
    if n >= population:
        return {}
    scores = [of_user[f"test_{measure}"] for of_user in users.values()]
    interval = None
    if n > 1 and all(map(math.isfinite, scores)):
        from scipy.special import stdtrit  # slow to import

        standard_error = statistics.stdev(scores) * math.sqrt((1 - n / population) / n)
        t = float(stdtrit(n - 1, 0.975))
        half_width = t * standard_error
        mean = statistics.fmean(scores)
        interval = [mean - half_width, mean + half_width]
    return {"sample": {"users": n, "of": population, "interval": interval}}


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
        if math.isfinite(score.mean_loss):
            continue
        suspect_optimizers: Sequence[str] = ()
        if done:  # before any training, no optimizer can be the cause
            parameters = clients.state.rows_of([row])[0]
            suspect_optimizers = clients.steps.suspect_optimizers(row, parameters)
        raise diverged(user.name, f"test loss is {score.mean_loss} after round {done}", suspect_optimizers)


def experts_event(clients: Clients, scores: Sequence[AnyScore]) -> JsonObject:
    """Return the experts of each user and their mean gates per layer over the test data; empty without routers.

    For example ``{"experts": {"ann": ["generalist", "specialist"]}, "expert_scores": {"ann": [[0.7, 0.3], ...]}}``.
    """
    if not clients.scorer.routed:
        return {}
    experts_by_user, gates_by_user = {}, {}
    for user, row, score in zip(clients.scored_users, clients.scored_rows, scores, strict=True):
        experts = clients.model.expert_names(row)
        experts_by_user[user.name] = experts
        gates_by_user[user.name] = []
        for padded_gates in score.expert_scores:  # one list per layer, padded to the largest number of experts
            gates = padded_gates[: len(experts)]
            gates_by_user[user.name].append([round(gate, 4) for gate in gates])
    return {"experts": experts_by_user, "expert_scores": gates_by_user}


def users_routing(clients: Clients, scores: Sequence[AnyScore]) -> dict[str, JsonObject]:
    """Return how the model of each evaluated user weights its components, by user name.

    For example ``{"ann": {"gates": [[0.7, 0.3], ...], "mixture": [0.9, 0.1]}}``: the mean gates ``(layers, experts)``
    over the test data, if tokens are routed to experts, and the user's mixture, if the method has one.
    """
    routing: dict[str, JsonObject] = {user.name: {} for user in clients.scored_users}
    gates_by_user = experts_event(clients, scores).get("expert_scores", {})
    for name, gates in gates_by_user.items():
        routing[name]["gates"] = gates
    mixtures = mixture_at_users(clients)
    if mixtures is not None:
        for user, weights in zip(clients.scored_users, mixtures.tolist(), strict=True):
            routing[user.name]["mixture"] = weights
    return routing


def measured(score: AnyScore) -> dict[str, float]:
    """Return the measures of a test score under the keys of events and metrics, such as ``{"test_loss": 2.1}``."""
    return {f"test_{name}": value for name, value in score.measures.items()}


def start_event(plan: RunPlan, base: str, users: Mapping[str, JsonMapping]) -> JsonObject:
    """Return the first event of a run.

    Args:
        plan: Settings of the run, in the form that training uses.
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
    event: JsonObject = {"event": "end"}
    for key in (f"mean_test_{metrics['measure']}", GEOMETRIC):  # the geometric mean exists for some measures only
        if key in metrics:
            event[key] = metrics[key]
    return event


def amounts(user: AnyUser, unit: str) -> dict[str, int]:
    """Return the amount of training and test data of a user, such as ``{"train_tokens": 6400, "test_tokens": 800}``.

    Args:
        user: The user with its data.
        unit: Unit in which data is counted, "tokens" or "samples".
    """
    return {f"train_{unit}": len(user.train), f"test_{unit}": len(user.test)}


def measure_of(scores: Sequence[AnyScore]) -> str:
    """Return the name of the measure that models are compared by, the first one of a score."""
    measures = scores[0].measures
    return next(iter(measures))


def measure_among(users: Mapping[str, JsonMapping]) -> str:
    """Return the name of the measure that models are compared by, from the scores in an event.

    It is the first key of a user with "test_" removed, such as "loss" for ``{"ann": {"test_loss": 2.1}}``, and "loss"
    without users.
    """
    for scores in users.values():
        for key in scores:
            return key.removeprefix("test_")
    return "loss"


def mean_of(users: Mapping[str, JsonMapping], measure: str) -> float:
    """Return the unweighted mean over users of a test measure; NaN without users."""
    if not users:
        return math.nan
    return sum(scores[f"test_{measure}"] for scores in users.values()) / len(users)


def users_metrics(clients: Clients, scores: Sequence[AnyScore]) -> dict[str, JsonObject]:
    """Return the entry of each evaluated user in the run's metrics, by name: scores, amounts of data and costs."""
    unit = clients.batch_source.unit  # "tokens" or "samples"
    metrics_by_user: dict[str, JsonObject] = {}
    for user, score, num_parameters, upload_bytes in zip(
        clients.scored_users, scores, clients.trainable_parameters(), clients.upload_bytes(), strict=True
    ):
        metrics_by_user[user.name] = {
            **measured(score),
            f"test_{unit}": getattr(score, unit),
            f"train_{unit}": len(user.train),
            f"valid_{unit}": len(user.valid),
            "trainable_parameters": num_parameters,
            "upload_bytes_per_round": upload_bytes,
        }
    return metrics_by_user


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
    # If this process has no evaluated users, the measure is read from the metrics of users of other processes.
    measure = measure_of(scores) if scores else measure_among(users or {})
    if users is None:
        users = users_metrics(clients, scores)
    return metrics_of(
        users,
        clients.model,
        clients.plan,
        clock,
        rounds=clients.rounds_done,
        selected=clients.chosen_round,
        measure=measure,
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
        plan: Settings of the run, in the form that training uses.
        clock: Time, tokens and bytes of the run.
        rounds: Number of rounds that are done.
        selected: Round that the final models come from.
        measure: Name of the measure that models are compared by, such as "loss".
        unit: Unit in which data is counted, "tokens" or "samples".
    """
    planned_rounds = plan.training.rounds if plan.method.trains else 0
    ended_early = rounds < planned_rounds
    user_rounds = max(1, clock.user_rounds)  # participants, summed over rounds
    parameter_counts = [of_user["trainable_parameters"] for of_user in users.values()]
    return Metrics(
        method=plan.method.name,
        seed=plan.seed,
        base=model.name,
        rounds=rounds,
        planned_rounds=planned_rounds if ended_early else None,
        selected_round=selected,
        measure=measure,
        unit=unit,
        users=users,
        mean=mean_of(users, measure),
        upload_bytes_per_user_round=clock.upload_bytes / user_rounds,
        download_bytes_per_user_round=clock.download_bytes / user_rounds,
        trainable_parameters=max(parameter_counts, default=0),
        per_second=clock.tokens / clock.train_seconds if clock.train_seconds else 0.0,
        wall_seconds=clock.wall_seconds,
        peak_memory_bytes=peak_memory_bytes(),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
    )
