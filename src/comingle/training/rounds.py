"""The round loop: select participants, download, train, upload, aggregate, evaluate.

Models are evaluated every 5 rounds, or less often so that evaluation takes at most a tenth of the time of local steps.
Times are estimated from counts and never measured, so that all methods of a comparison, a resumed run, and clients in
other processes or on other machines get the same interval.

One round, as messages:

1. The server names the participants and sends each a download, unless it has what the server has.
2. They receive it: assign, or make one model of several with data of their own.
3. They train, and upload copies of what is shared.
4. The server aggregates what arrived.
5. Who was absent downloads when it next takes part, or when it is evaluated.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any, Literal

from comingle.config.settings import AUTO, SHORTEST, Training, protects_examples
from comingle.methods.base import ROUTERS, Method
from comingle.privacy.accounting import sample_size
from comingle.training.client import NOBODY, Clients, LocalRound, finetuned, finish, train
from comingle.training.cohort import AnyScore
from comingle.training.evaluation import Clock, Federation, evaluate
from comingle.training.events import Observer
from comingle.training.settings import counts_exchanged, exchanged_after
from comingle.training.steps import diverged
from comingle.utils.records import MEASURES, number

logger = logging.getLogger("comingle")

SHARE, TRAINED = Fraction(1, 10), Fraction(23, 10)
"""Of the time of the local steps; and so many times as long as to be scored a token takes to be trained on."""


def amounts_of(clients: Clients) -> list[int]:
    """Of those who are evaluated here: how many train, on how much in a round, and how much is scored at once."""
    trainers, splits = clients.scored_trainers, ("test", "valid") if clients.training.select == "best" else ("test",)
    scored = [clients.feed.scoring(getattr(user, split)) for user in clients.scored_users for split in splits]
    return [len(trainers), sum(map(clients.feed.seen, trainers)), sum(scored)]


def settle(federation: Federation) -> None:
    """Find out how often this federation evaluates."""
    clients, training = federation.clients, federation.clients.training
    if training.evaluate_every == AUTO and clients.method.trains:
        parts = federation.gather(lambda: amounts_of(clients))
        every = federation.share(
            lambda: period(training, [*map(sum, zip(*parts, strict=True))], len(clients.everybody))
        )
        clients.training = replace(training, evaluate_every=every)


def period(training: Training, amounts: Sequence[int], users: int) -> int:
    """Rounds from one evaluation to the next; says so where those that there are always take more than a tenth.

    Trainers of whom the ``amounts`` are stand for all of the ``users``.
    """
    (trainers, trained, scored), part = amounts, training.participation
    if not trained or not scored:
        return SHORTEST
    present = sample_size(part, users) if isinstance(part, float | int) else Fraction(sum(map(len, part)), len(part))
    room = SHARE * TRAINED * training.rounds * present * Fraction(trained, trainers) / scored
    others = training.evaluate_first + (training.select == "best")  # whose models are scored once more
    every = max(SHORTEST, math.ceil(training.rounds / max(1, math.floor(room) - others)))
    if (count := others + math.ceil(training.rounds / every)) > room:
        less = f"lower {training.test_limit}" if training.test_limit else "give less test data"
        first = " or set evaluation.first: false" if training.evaluate_first else ""
        _say(float(100 * count * SHARE / room), less + first)
    return every


@cache
def _say(percent: float, advice: str) -> None:
    """Log the share of evaluation once, however many methods of a comparison have it."""
    logger.warning("evaluation takes %.0f%% of the time of training; %s", percent, advice)


Event = Mapping[str, Any]

_UNIFORM = 0.02
"""Largest distance of a share from 1/C, relative to it, at which a mixture counts as uniform."""


class Evaluations:
    """An observer that keeps the first evaluation of a run and the last; the others are forgotten."""

    def __init__(self, earlier: Iterable[Event] = ()) -> None:
        self.first: Event | None = None
        self.last: Event | None = None
        for event in earlier:
            self(event)

    def __call__(self, event: Event) -> None:
        """Take one event."""
        if event["event"] == "evaluation":
            self.first, self.last = self.first or event, event


def outcome_warnings(method: Method, evaluations: Evaluations, metrics: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return ``{"warnings": [...]}`` to merge into a finished run's metrics, or an empty dict.

    Warns if the test results got worse, or if learned mixtures stayed uniform.

    Args:
        method: the method of the run.
        evaluations: the first and last evaluation events of the run.
        metrics: the metrics of the finished run.
    """
    found = [*_worse(evaluations.first, metrics), *_uniform(method, evaluations)]
    return {"warnings": found} if found else {}


def _worse(first: Event | None, metrics: Mapping[str, Any]) -> Sequence[str]:
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


def _remedy(metrics: Mapping[str, Any]) -> str:
    rate = "a lower training.experts.learning_rate, fewer rounds or more data may help"
    if (privacy := metrics.get("privacy")) is None:
        return rate[0].upper() + rate[1:]
    told = f"epsilon {privacy['epsilon']:.3g}, noise multiplier {privacy['noise_multiplier']:.3g}"
    example = "" if protects_examples(privacy["mechanism"]) else ", or privacy.mechanism: example"
    fewer = "fewer trained parameters (adapters.rank), a larger privacy.epsilon, more users"
    return f"The noise of privacy ({told}) may be the cause: {fewer}{example}; or {rate}"


def _of(record: Mapping[str, Any], name: str, measure: str) -> float | None:
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
    training, account = clients.training, federation.server.account
    everyone, rounds = clients.scored_trainers, clients.rounds_done
    if rounds and first_round == 0 and training.evaluate_first:
        federation.download(everyone)
        scores = evaluate(federation, 0, observe)  # where every curve starts: the pretrained model
    for round_number in range(first_round, rounds):
        due = due_in(clients.method, training, clients.shares, round_number)
        members = federation.invite(round_number, releases=due.exchanges)
        if members is None:  # one more would exceed the privacy budget
            scores, rounds = _stop(federation, scores, round_number, observe), round_number
            clock.count(federation)
            checkpoint(round_number, clock)
            break
        federation.download(members)  # 1 and 2
        work, everybodys = _train(federation, members, round_number, observe)  # 3
        if due.exchanges:
            federation.upload(list(work.losses), round_number + 1, work.losses)
        _tell(federation, everybodys, round_number + 1, observe, clock)
        if due.evaluates == "local":
            federation.download([user for user in everyone if user not in work.losses])
            scores = evaluate(federation, round_number + 1, observe)
        if due.exchanges and (why := federation.aggregate()):  # 4
            observe({"event": "no_sum", "round": round_number + 1, "reason": why})
        if due.exchanges and (judged := federation.server.judged) is not None:
            observe(judged.as_event(round_number + 1))
        if account is not None:
            observe({"event": "privacy", "round": round_number + 1, **account.spent})
        if due.evaluates == "exchanged":
            federation.download(everyone)  # 5
            if due.ends:
                federation.each(lambda: finish(clients))
            scores = evaluate(federation, round_number + 1, observe)
        if due.saves:
            clock.count(federation)
            checkpoint(round_number + 1, clock)
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
