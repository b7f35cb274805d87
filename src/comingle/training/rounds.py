"""The round loop: select participants, download, train, upload, aggregate, evaluate.

The messages of one round:

1. The server selects the participants and sends a download to each stale one.
2. Participants apply it: they assign the tensors, or combine several models into one with their own data.
3. Participants train, and upload copies of the shared tensors.
4. The server aggregates the uploads.
5. Other users download when they next take part or are evaluated.

The loop is the same wherever users train; a :class:`comingle.training.backends.base.Backend` does the rest.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from comingle.config.settings import protects_examples
from comingle.methods.base import ROUTERS, Method
from comingle.training.backends.base import Backend, RoundPlan, RoundResult, S
from comingle.training.checkpoints import Clock
from comingle.training.events import Event, Observer
from comingle.training.settings import RunPlan, evaluates_aggregated, exchanged_after
from comingle.utils.records import MEASURES, JsonMapping, number

logger = logging.getLogger("comingle")


_UNIFORM = 0.98
"""Mean entropy of mixtures, relative to ln C, from which they count as uniform; weights 0.58, 0.42 for C = 2."""

_ROUNDING = 1e-3
"""Distance from 1 up to which weights count as shares of a mixture; events have them rounded."""

_NEAR_CHANCE = 0.01
"""Relative distance to ln C, with C classes, up to which a loss counts as that of chance."""

_CHANCE_ACCURACY = 1.25
"""Mean accuracy over users, relative to 1 / C, up to which it counts as that of chance."""

_ALL_WEIGHT = 0.95
"""Weight of one component from which a user counts as using it alone."""


class Evaluations:
    """Observer that keeps the first and the last evaluation event of a run, and the validation losses of all."""

    def __init__(self, earlier: Iterable[Event] = ()) -> None:
        """Start without evaluations, or with those that a resumed run has logged before.

        Args:
            earlier: Events of the run from before it was interrupted.
        """
        self.first: JsonMapping | None = None
        self.last: Event | None = None
        self.valid_losses: dict[int, dict[str, float]] = {}
        """Validation losses in nats by round and user, with ``evaluation.select: best``."""
        for event in earlier:
            self(event)

    def __call__(self, event: Event) -> None:
        """Record an event if it is an evaluation; ignore others."""
        if event["event"] != "evaluation":
            return
        if self.first is None:
            self.first = event
        self.last = event
        self.valid_losses[event["round"]] = event.get("valid_loss", {})

    def add_valid_losses(self, metrics: JsonMapping) -> None:
        """Add the validation losses of the selected round to the users of a run's metrics, if they are known."""
        loss_by_user = self.valid_losses.get(metrics["selected_round"], {})
        for name, loss in loss_by_user.items():
            if name in metrics["users"]:
                metrics["users"][name]["valid_loss"] = loss


def outcome_warnings(
    method: Method, evaluations: Evaluations, metrics: JsonMapping, *, num_classes: int | None = None
) -> dict[str, list[str]]:
    """Return warnings about the outcome of a finished run, to merge into its metrics.

    Warns if test results got worse, if all trained nets are at chance, or if learned mixtures stayed uniform or are all
    of the same single component.

    Args:
        method: Method of the run.
        evaluations: First and last evaluation events of the run.
        metrics: Metrics of the finished run, with the roles that stayed untrained.
        num_classes: Number of classes that nets tell apart by cross-entropy; None for other models.

    Returns:
        ``{"warnings": [...]}``, or an empty dict.
    """
    warnings: list[str] = []
    warnings += _warn_if_worse(evaluations.first, metrics)
    if not metrics.get("untrained"):  # routers that no phase reached are uniform, as another warning says
        warnings += _warn_of_mixtures(method, evaluations)
    if method.trains and num_classes is not None:
        warnings += _warn_of_chance(metrics, num_classes)
    return {"warnings": warnings} if warnings else {}


def _warn_of_chance(metrics: JsonMapping, num_classes: int) -> Sequence[str]:
    """Return a warning if every user's model predicts all classes with about the same probability; otherwise nothing.

    The test loss of each user is then close to ln C with C classes, and the mean accuracy close to ``1 / C``.

    Args:
        metrics: Metrics of the finished run.
        num_classes: Number of classes C.
    """
    if num_classes < 2 or metrics["selected_round"] == 0:  # untrained models are at chance
        return ()
    losses = [user.get("test_loss") for user in metrics["users"].values()]
    accuracies = [user.get("test_accuracy") for user in metrics["users"].values()]
    if not losses or None in losses or None in accuracies:  # nothing to judge, or a user without a result
        return ()
    chance_loss = math.log(num_classes)
    if not all(abs(loss - chance_loss) <= _NEAR_CHANCE * chance_loss for loss in losses):
        return ()
    mean_accuracy = sum(accuracies) / len(accuracies)
    if mean_accuracy > _CHANCE_ACCURACY / num_classes:
        return ()
    return (
        f"all users' models are at chance: test losses are within 1% of ln {num_classes}, mean test accuracy is "
        f"{number(mean_accuracy, 'accuracy')}. A lower training.experts.learning_rate or more rounds may help",
    )


def _warn_if_worse(first: JsonMapping | None, metrics: JsonMapping) -> Sequence[str]:
    """Return a warning if the final mean over users is worse than that of the first evaluation; otherwise nothing.

    Args:
        first: First evaluation event of the run; None without one.
        metrics: Metrics of the finished run.
    """
    measure, rounds_done = metrics["measure"], metrics["rounds"]
    if first is None or first["round"] >= rounds_done or not metrics["users"]:  # nothing to compare
        return ()
    before, after = first[f"mean_test_{measure}"], metrics[f"mean_test_{measure}"]
    if before is None or not math.isfinite(before):
        return ()
    first_time = "before training" if first["round"] == 0 else f"after round {first['round']}"
    selects_untrained = first["round"] == 0 and metrics["selected_round"] == 0  # with evaluation.select: best
    if selects_untrained:
        return (f"no round is better than the start, so the run ends with the models {first_time}. {_remedy(metrics)}",)
    if not _is_worse(before, after, measure):
        return ()
    compared_users = [name for name in metrics["users"] if name in first["users"]]  # evaluated both times
    worse_users = []
    for name in compared_users:
        if _is_worse(_result(first, name, measure), _result(metrics, name, measure), measure):
            worse_users.append(name)
    return (
        f"the run ends worse than it began: mean test {measure} {number(_finite(after), measure)} "
        f"after round {rounds_done}, {number(before, measure)} {first_time}; "
        f"worse for {len(worse_users)} of {len(compared_users)} users. {_remedy(metrics)}",
    )


def _remedy(metrics: JsonMapping) -> str:
    """Return advice for a run whose models are worse than the base."""
    general_advice = "A lower training.experts.learning_rate, fewer rounds or more data may"
    privacy = metrics.get("privacy")
    if privacy is None:
        return f"{general_advice} help"
    settings = f"epsilon {privacy['epsilon']:.3g}, noise multiplier {privacy['noise_multiplier']:.3g}"
    privacy_advice = "fewer trained parameters (adapters.rank), a larger privacy.epsilon, more users"
    if not protects_examples(privacy["mechanism"]):  # protecting examples instead of whole users needs less noise
        privacy_advice += ", or privacy.mechanism: example"
    return f"The privacy noise ({settings}) may be the cause; try {privacy_advice}. {general_advice} help, too"


def _result(record: JsonMapping, name: str, measure: str) -> float | None:
    """Return a user's test result; None if it was not finite, which JSON cannot store.

    Args:
        record: Evaluation event, or metrics of a run.
        name: Name of the user.
        measure: Name of the measure, such as "loss".
    """
    return record["users"][name][f"test_{measure}"]


def _is_worse(before: float | None, after: float | None, measure: str) -> bool:
    """Return whether a result is worse than an earlier one; a result that is not finite or missing is the worst."""
    if before is None:
        return False
    if after is None or not math.isfinite(after):
        return True
    lower_is_better = MEASURES[measure] == "lower"
    return after > before if lower_is_better else after < before


def _finite(value: float | None) -> float | None:
    """Return the value; None if it is infinite, NaN or None."""
    return value if value is not None and math.isfinite(value) else None


def _warn_of_mixtures(method: Method, evaluations: Evaluations) -> Sequence[str]:
    """Return a warning if all learned mixtures are uniform at the end, or all have the same component; else nothing.

    Args:
        method: Method of the run.
        evaluations: First and last evaluation events of the run; the last one has the mixture weights of each user.
    """
    last = evaluations.last
    if last is None or last is evaluations.first:  # nothing has been trained between two evaluations
        return ()
    routers_are_trained = bool(ROUTERS & method.client.trained)
    if routers_are_trained and last.get("expert_scores"):
        return _warn_of_gates(last["expert_scores"])
    # Weights are trained by gradients, or computed from a sweep over the training data.
    setting = "training.router.learning_rate" if routers_are_trained or method.client.sweeps else ""
    setting = method.server.merging_setting or setting
    mixtures: list[list[float]] = list(last.get("mixtures", {}).values())  # one per user
    are_shares = all(min(weights) >= 0 and abs(sum(weights) - 1) < _ROUNDING for weights in mixtures)
    if not setting or not mixtures or not are_shares:  # merging weights without softmax are no shares
        return ()
    num_components = len(mixtures[0])
    if num_components == 1:
        return ()
    common_component = _common_component(mixtures)
    # Methods that mix predictions have shared models and a model of the user's own as components.
    mixture = method.placement.mixture
    if mixture is not None and mixture.at == "predictions":
        if common_component is None:
            return ()
        return _warn_of_one_model(common_component, method.placement.generalists)
    if common_component is not None:
        return (
            f"every user gives all its weight to the same of {num_components} components, number {common_component}, "
            f"so the users share one model. Fewer components or a lower {setting} may help; if the users are alike, "
            "use fedavg",
        )
    if _mean_uniformity(mixtures) < _UNIFORM:
        return ()
    return (
        f"mixtures have stayed uniform: users weight each of the {num_components} components by about "
        f"{1 / num_components:.3g}, nearly as at the start, so no user has a mixture of its own. A higher {setting} or "
        "more rounds may help",
    )


def _warn_of_gates(scores_by_user: Mapping[str, Sequence[Sequence[float]]]) -> Sequence[str]:
    """Return a warning if the mean gates of all users are uniform in all layers; else nothing.

    Args:
        scores_by_user: Mean gate of each expert over the test tokens, ``(layers, experts)`` of each user.
    """
    layers = [gates for scores in scores_by_user.values() for gates in scores if len(gates) > 1]
    if not layers or min(_mean_uniformity([gates]) for gates in layers) < _UNIFORM:
        return ()
    return (
        "routers have stayed uniform: in every layer each user's experts have nearly equal gates on average over the "
        "test tokens. A higher training.router.learning_rate, more rounds or, where routers train in phases of their "
        "own, more method.router_steps may help",
    )


def _mean_uniformity(mixtures: Sequence[Sequence[float]]) -> float:
    """Return the mean entropy of mixtures relative to ln C, which is 1 for equal weights.

    Args:
        mixtures: Weights of each mixture, at least two and none negative.
    """
    uniformities = [-sum(w * math.log(w) for w in weights if w > 0) / math.log(len(weights)) for weights in mixtures]
    return sum(uniformities) / len(uniformities)


def _common_component(mixtures: Sequence[Sequence[float]]) -> int | None:
    """Return the component to which all users give nearly all their weight; None without one, or for a single user."""
    components = {_main_component(weights) for weights in mixtures}
    if len(mixtures) < 2 or len(components) > 1:
        return None
    return components.pop()


def _main_component(weights: Sequence[float]) -> int | None:
    """Return the first component to which a user gives nearly all its weight; None without one."""
    for component, weight in enumerate(weights):
        if weight >= _ALL_WEIGHT:
            return component
    return None


def _warn_of_one_model(component: int, num_shared: int) -> Sequence[str]:
    """Return a warning that all users give all their weight to one component, in a mixture of shared and local models.

    Args:
        component: Index of this component in the mixture; the shared models come first, then the local one.
        num_shared: Number of shared models.
    """
    if component < num_shared:
        return ("every user gives all its weight to the global model; fedavg trains this model at less cost",)
    return ("every user gives all its weight to its local model; local trains these models without uploads",)


Checkpoint = Callable[[int, Clock], None]
"""Saves the state after a number of rounds."""


def run_rounds(
    backend: Backend[S],
    *,
    observe: Observer,
    checkpoint: Checkpoint = lambda done, clock: None,
    first_round: int = 0,
    clock: Clock | None = None,
    scores_start: bool = False,
) -> S | None:
    """Train from ``first_round`` to the end and return the scores of the final models.

    If local models are evaluated (``evaluation.model``), the last round has no upload and no aggregation, so that the
    run ends with the models that were evaluated. With ``evaluation.select: best`` the run ends with the models of the
    evaluated round with the lowest validation loss.

    Args:
        backend: The users and their server.
        observe: Called with every event of the rounds.
        checkpoint: Called with the number of rounds done and the clock after each round whose state is saved.
        first_round: Number of rounds that were done before the run was resumed.
        clock: Time, tokens and bytes of these rounds.
        scores_start: Whether the models before the first round are scored in any case, so that they may be the best.

    Returns:
        The scores; None if no model was scored.

    Raises:
        DivergenceError: The loss or the tensors of a user are not finite.
        RunError: Too few users answered.
    """
    was_resumed = first_round > 0
    clock = clock or Clock()
    clock.started = time.perf_counter()
    run, num_rounds = backend.start(observe, clock)  # the plan of the run, and the number of rounds after which it ends
    planned_rounds = run.training.rounds if run.method.trains else 0
    was_stopped = num_rounds < planned_rounds  # the privacy budget was spent before the run was resumed
    shares = backend.server.shares
    scores: S | None = None
    if num_rounds and not was_resumed and (run.evaluation.first or scores_start):
        scores = _evaluate(backend, 0, observe, scores)  # the pretrained model, the first point of curves
    for round_number in range(first_round, num_rounds):
        plan = plan_round(run, shares, round_number)
        participants = backend.select_participants(plan)
        if participants is None:  # the privacy budget is spent
            scores = _end_early(backend, run, round_number, observe, scores)
            num_rounds = round_number
            checkpoint(round_number, clock)
            break
        scores = _run_round(backend, plan, participants, observe, clock, scores)
        if plan.saves:
            checkpoint(plan.done, clock)

    scores = backend.choose(num_rounds, scores)
    if scores is not None:
        return scores
    # A run without rounds is evaluated once here. A run that was resumed after its last round has logged its event.
    bytes_before = clock.upload_bytes, clock.download_bytes
    # Users download the newest shared tensors first. Only local models of a run that ended early stay as they are.
    receives = evaluates_aggregated(run) or not was_stopped
    scores = _evaluate(backend, num_rounds, observe, scores, receives=receives, silent=was_resumed)
    if was_resumed or not backend.remote:  # the messages were counted before, or were not sent over a network
        clock.upload_bytes, clock.download_bytes = bytes_before
    return scores


def _run_round(
    backend: Backend[S],
    plan: RoundPlan,
    participants: Sequence[int],
    observe: Observer,
    clock: Clock,
    scores: S | None,
) -> S | None:
    """Run one round: train, aggregate, evaluate and log; return the newest scores.

    Args:
        backend: The users and their server, in this process or elsewhere.
        plan: Plan of the round: whether users upload, and whether models are evaluated before ("local") or after
            ("exchanged") the server aggregates. ``plan.done`` is the number of rounds that are done after this one.
        participants: Numbers of the participants.
        observe: Called with every event of the round, which logs it.
        clock: Clock of the run.
        scores: Scores of the previous evaluation, which are returned if this round has none.
    """
    result = backend.train(plan, participants)  # downloads, local steps and uploads of participants
    log_round(result, plan.done, observe, clock)
    if plan.evaluates == "local":
        scores = _evaluate(backend, plan.done, observe, scores)
    if plan.exchanges:
        _aggregate(backend, plan.done, observe)
    # Log the spent privacy budget. A round without an exchange spends none, and remote backends do not log it.
    account = backend.server.mechanisms.account
    if account is not None and (plan.exchanges or not backend.remote):
        observe({"event": "privacy", "round": plan.done, **account.spent})
    if plan.evaluates == "exchanged":
        # Users without the newest tensors download them first. After the last round they make their final models.
        scores = _evaluate(backend, plan.done, observe, scores, finishes=plan.is_last)
    return scores


def _end_early(backend: Backend[S], run: RunPlan, done: int, observe: Observer, scores: S | None) -> S | None:
    """Warn that the privacy budget is spent, and return the scores of the models with which the run ends.

    They are the models of the previous round. They are evaluated now, unless the previous round has scored them.

    Args:
        backend: The users and their server.
        run: Plan of the run.
        done: Number of rounds that are done.
        observe: Called with the evaluation event.
        scores: Scores of the previous evaluation.
    """
    method = run.method
    logger.warning("%s: the privacy budget is spent after round %d of %d", method.name, done, run.training.rounds)
    were_scored = done % run.evaluation_interval == 0
    evaluates_exchanged = evaluates_aggregated(run)  # and not the users' own models before aggregation
    makes_final_models = evaluates_exchanged and bool(method.client.finishing)
    if were_scored and not makes_final_models and not backend.remote:  # a remote backend evaluates in any case
        return scores
    return _evaluate(backend, done, observe, None, receives=evaluates_exchanged, finishes=evaluates_exchanged)


def _evaluate(
    backend: Backend[S],
    done: int,
    observe: Observer,
    previous_scores: S | None,
    *,
    receives: bool = True,
    finishes: bool = False,
    silent: bool = False,
) -> S | None:
    """Evaluate, log the event, and return the new scores, or the previous ones if no user was scored.

    Args:
        backend: The users and their server.
        done: Number of rounds that are done.
        observe: Called with the event.
        previous_scores: Scores of the previous evaluation; None if they are of other models.
        receives: Whether users first download the newest shared tensors.
        finishes: Whether users first make their final models, as some methods do once, after the last exchange.
        silent: Do not log the event, as it was logged before the run was interrupted.
    """
    new_scores, event = backend.evaluate(done, receives=receives, finishes=finishes, silent=silent)
    if event and not silent:
        observe(event)
    return previous_scores if new_scores is None else new_scores


def _aggregate(backend: Backend[S], done: int, observe: Observer) -> None:
    """Aggregate the uploads of a round; log a failed secure sum, and the judgement of a robust aggregation rule.

    Args:
        backend: The users and their server.
        done: The round, counted from 1.
        observe: Called with the events.
    """
    failure = backend.aggregate()  # the reason if a secure sum fails, such as too few users
    if failure:
        observe({"event": "no_sum", "round": done, "reason": failure})
    rule_result = backend.server.mechanisms.rule_result  # None without such a rule
    if rule_result is not None:
        observe(rule_result.as_event(done))


def plan_round(run: RunPlan, shares: bool, round_number: int) -> RoundPlan:
    """Return what is done in a round: whether users upload, which models are evaluated, and if a checkpoint is saved.

    Args:
        run: Plan of the run, with the intervals between evaluations and between checkpoints.
        shares: Whether users share any tensors; without any there is no exchange.
        round_number: The round, counted from 0.
    """
    done = round_number + 1
    is_last = done == run.training.rounds
    evaluates = None
    if is_last or done % run.evaluation_interval == 0:
        # Models after the server's aggregation, or the users' own before it.
        evaluates = "exchanged" if evaluates_aggregated(run) else "local"
    return RoundPlan(
        number=round_number,
        is_last=is_last,
        exchanges=exchanged_after(run, shares, done),
        evaluates=evaluates,
        saves=is_last or done % run.checkpoints.every == 0,
    )


def log_round(result: RoundResult, done: int, observe: Observer, clock: Clock) -> None:
    """Add a round to the clock, and log its event with the bytes since the previous round event.

    Args:
        result: Result of the round.
        done: Number of rounds that are done.
        observe: Called with the event.
        clock: Clock of the run; ``told_upload_bytes`` are the uploaded bytes up to the previous round event.
    """
    new_upload_bytes = clock.upload_bytes - clock.told_upload_bytes
    new_download_bytes = clock.download_bytes - clock.told_download_bytes
    clock.told_upload_bytes, clock.told_download_bytes = clock.upload_bytes, clock.download_bytes
    clock.train_seconds += result.seconds
    clock.tokens += result.tokens
    clock.user_rounds += result.users
    event: Event = {
        "event": "round",
        "round": done,
        "train_loss_nats": result.losses,
        "upload_bytes": new_upload_bytes,
        "download_bytes": new_download_bytes,
        "tokens": result.tokens,
        "seconds": result.seconds,
    }
    if result.steps:
        event["local_steps"] = dict(result.steps)
    observe(event)
