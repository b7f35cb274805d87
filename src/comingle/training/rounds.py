"""The round loop: select participants, download, train, upload, aggregate, evaluate.

One round, as messages:

1. The server names the participants and sends each a download, unless it has what the server has.
2. They receive it: assign, or make one model of several with data of their own.
3. They train, and upload copies of what is shared.
4. The server aggregates what arrived.
5. Who was absent downloads when it next takes part, or when it is evaluated.

The loop is the same wherever users train; what differs is in :class:`comingle.training.backends.base.Backend`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence

from comingle.config.settings import protects_examples
from comingle.methods.base import ROUTERS, Method
from comingle.training.backends.base import Backend, RoundPlan, RoundResult, S
from comingle.training.checkpoints import Clock
from comingle.training.events import Event, JsonMapping, Observer
from comingle.training.settings import RunPlan, counts_exchanged, exchanged_after
from comingle.utils.records import MEASURES, number

logger = logging.getLogger("comingle")


_UNIFORM = 0.02
"""Largest distance of a share from 1/C, relative to it, at which a mixture counts as uniform."""


class Evaluations:
    """An observer that keeps the first evaluation of a run and the last; the others are forgotten."""

    def __init__(self, earlier: Iterable[Event] = ()) -> None:
        self.first: JsonMapping | None = None
        self.last: Event | None = None
        for event in earlier:
            self(event)

    def __call__(self, event: Event) -> None:
        """Take one event."""
        if event["event"] == "evaluation":
            self.first, self.last = self.first or event, event


def outcome_warnings(method: Method, evaluations: Evaluations, metrics: JsonMapping) -> dict[str, list[str]]:
    """Return ``{"warnings": [...]}`` to merge into a finished run's metrics, or an empty dict.

    Warns if the test results got worse, or if learned mixtures stayed uniform.

    Args:
        method: the method of the run.
        evaluations: the first and last evaluation events of the run.
        metrics: the metrics of the finished run.
    """
    found = [*_worse(evaluations.first, metrics), *_uniform(method, evaluations)]
    return {"warnings": found} if found else {}


def _worse(first: JsonMapping | None, metrics: JsonMapping) -> Sequence[str]:
    """Compare the mean over users with that of the first evaluation."""
    measure = metrics["measure"]
    key, ended = f"mean_test_{measure}", metrics["rounds"]
    if first is None or not ended or first["round"] >= ended or not metrics["users"]:
        return ()
    before, after = first[key], metrics[key]
    began = "before training" if first["round"] == 0 else f"after round {first['round']}"
    if before is None or not math.isfinite(before):
        return ()
    if first["round"] == metrics["selected_round"] == 0:
        return (f"no round is better than the start, so the run ends with the models {began}. {_remedy(metrics)}",)
    if not _is_worse(before, after, measure):
        return ()
    users = [name for name in metrics["users"] if name in first["users"]]
    worse = [name for name in users if _is_worse(_of(first, name, measure), _of(metrics, name, measure), measure)]
    return (
        f"the run ends worse than it began: mean test {measure} {number(_finite(after), measure)} after round {ended}, "
        f"{number(before, measure)} {began}; worse for {len(worse)} of {len(users)} users. {_remedy(metrics)}",
    )


def _remedy(metrics: JsonMapping) -> str:
    rate = "a lower training.experts.learning_rate, fewer rounds or more data may help"
    if (privacy := metrics.get("privacy")) is None:
        return rate[0].upper() + rate[1:]
    told = f"epsilon {privacy['epsilon']:.3g}, noise multiplier {privacy['noise_multiplier']:.3g}"
    example = "" if protects_examples(privacy["mechanism"]) else ", or privacy.mechanism: example"
    fewer = "fewer trained parameters (adapters.rank), a larger privacy.epsilon, more users"
    return f"The noise of privacy ({told}) may be the cause: {fewer}{example}; or {rate}"


def _of(record: JsonMapping, name: str, measure: str) -> float | None:
    return record["users"][name][f"test_{measure}"]


def _is_worse(before: float | None, after: float | None, measure: str) -> bool:
    if before is None or after is None or not math.isfinite(after):
        return before is not None
    return after > before if MEASURES[measure] == "lower" else after < before


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _uniform(method: Method, evaluations: Evaluations) -> Sequence[str]:
    """Look for mixtures that clients learn and that are uniform at the end."""
    learned = bool(ROUTERS & method.client.trained) or method.client.sweeps
    mixtures = (evaluations.last or {}).get("mixtures", {})
    if not learned or not mixtures or evaluations.last is evaluations.first:
        return ()
    if any(abs(share * len(row) - 1) > _UNIFORM for row in mixtures.values() for share in row):
        return ()
    count = len(next(iter(mixtures.values())))
    return (
        f"mixtures have stayed uniform: every user gives each of the {count} components about {1 / count:.3g}, as at "
        "the start, so that all users have the same model. A higher training.router.learning_rate or more rounds may "
        "help",
    )


Checkpoint = Callable[[int, Clock], None]
"""Saves the state after a number of rounds."""


def run_rounds(
    backend: Backend[S],
    *,
    observe: Observer,
    checkpoint: Checkpoint = lambda done, clock: None,
    first_round: int = 0,
    clock: Clock | None = None,
) -> S | None:
    """Train from ``first_round`` (from 0) to the end and return the scores of the models with which the run ends.

    Where the local models count (``training.evaluate``), the last exchange is left out, so that a run ends with the
    models that were evaluated. Whatever the setting, a method that finetunes starts from the exchanged model, and one
    that makes final models makes them after the last exchange. With ``training.select`` "best" the run ends with the
    models of the evaluated round whose validation loss was lowest.

    Args:
        backend: The users and their server.
        observe: Gets every event of the rounds.
        checkpoint: Called with the number of rounds done and the clock, after each round whose state is saved.
        first_round: Number of rounds that an earlier attempt has done.
        clock: Time, tokens and bytes of the earlier attempt.

    Returns:
        The scores, as the backend knows them; None if no user's model was scored.

    Raises:
        DivergenceError: a user's loss or tensors are not finite.
        RunError: too few users answered.
    """
    clock = clock or Clock()
    clock.started = time.perf_counter()
    run, rounds = backend.start(observe, clock)
    method, account, shares = run.method, backend.server.mechanisms.account, backend.server.shares
    exchanged = counts_exchanged(run)
    stopped = rounds < run.training.rounds * method.trains  # by the privacy budget, before the run was resumed
    scores: S | None = None

    def evaluate(done: int, *, receives: bool = True, finishes: bool = False, silent: bool = False) -> S | None:
        found, event = backend.evaluate(done, receives=receives, finishes=finishes, silent=silent)
        if event and not silent:
            observe(event)
        return scores if found is None else found

    if rounds and first_round == 0 and run.evaluation.first:
        scores = evaluate(0)  # where every curve starts: the pretrained model
    for round_number in range(first_round, rounds):
        plan = plan_round(run, shares, round_number)
        participants = backend.select_participants(plan)
        if participants is None:
            told = method.name, round_number, run.training.rounds
            logger.warning("%s: the privacy budget is spent after round %d of %d", *told)
            finishes = exchanged and bool(method.client.finishing)
            if backend.remote or finishes or round_number % run.period:
                scores = None
                scores = evaluate(round_number, receives=exchanged, finishes=exchanged)
            rounds = round_number
            checkpoint(round_number, clock)
            break
        log_round(backend.train(plan, participants), plan.done, observe, clock)  # 1, 2 and 3
        if plan.evaluates == "local":
            scores = evaluate(plan.done)
        if plan.exchanges:
            if reason := backend.aggregate():  # 4
                observe({"event": "no_sum", "round": plan.done, "reason": reason})
            if (judged := backend.server.mechanisms.judged) is not None:
                observe(judged.as_event(plan.done))
        if account is not None and (plan.exchanges or not backend.remote):
            observe({"event": "privacy", "round": plan.done, **account.spent})
        if plan.evaluates == "exchanged":
            scores = evaluate(plan.done, finishes=plan.ends)  # 5
        if plan.saves:
            checkpoint(plan.done, clock)
    scores = backend.choose(rounds, scores)
    if scores is not None:
        return scores
    # Without rounds there is nothing but this; a run resumed after its last round has its event already.
    counted = clock.upload_bytes, clock.download_bytes
    scores = evaluate(rounds, receives=exchanged or not stopped, silent=first_round > 0)
    if first_round or not backend.remote:  # bytes of the first attempt, or of messages that nobody sends
        clock.upload_bytes, clock.download_bytes = counted
    return scores


def plan_round(run: RunPlan, shares: bool, round_number: int) -> RoundPlan:
    """Return the plan of a round.

    Args:
        run: The settings of the run.
        shares: Whether users have anything to upload.
        round_number: The round, counted from 0.
    """
    done = round_number + 1
    ends, counts = done == run.training.rounds, "exchanged" if counts_exchanged(run) else "local"
    return RoundPlan(
        number=round_number,
        ends=ends,
        exchanges=exchanged_after(run, shares, done),
        evaluates=counts if ends or done % run.period == 0 else None,
        saves=ends or done % run.checkpoints.every == 0,
    )


def log_round(result: RoundResult, done: int, observe: Observer, clock: Clock) -> None:
    """Add a round to the clock, and log its event with the bytes since the event before."""
    sent, received = clock.upload_bytes - clock.told_upload_bytes, clock.download_bytes - clock.told_download_bytes
    clock.told_upload_bytes, clock.told_download_bytes = clock.upload_bytes, clock.download_bytes
    clock.train_seconds += result.seconds
    clock.tokens += result.tokens
    clock.user_rounds += result.users
    observe(
        {
            "event": "round",
            "round": done,
            "train_loss_nats": result.losses,
            "upload_bytes": sent,
            "download_bytes": received,
            "tokens": result.tokens,
            "seconds": result.seconds,
        }
    )
