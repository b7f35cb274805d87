"""The backend of a federation over the network: it sends a round's tasks and aggregates uploads and secure sums.

Clients carry out the steps of a round in tasks (:mod:`comingle.federation.client` lists the steps). Clients report
their own metrics; the server checks names and sizes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, TypeVar

import numpy as np
import torch

from comingle.federation.messages import Answer, check_upload, validation_loss
from comingle.federation.public import counts_samples
from comingle.federation.server_session import ServerSession
from comingle.privacy import secure_client
from comingle.privacy.secure_server import SumCollector
from comingle.protocol.messages import LOSS, Download, Upload, expand, join_uploads, no_uploads, validation_report
from comingle.protocol.wire import pack, unpack
from comingle.training.backends.base import Backend, RoundPlan, RoundResult, log_rejection
from comingle.training.checkpoints import Clock
from comingle.training.evaluation import evaluation_event, metrics_of, mixtures_event
from comingle.training.events import AN_EVENT, Observer
from comingle.training.plan import terms_of
from comingle.training.settings import RunPlan, warn_of_untrained
from comingle.utils.errors import MessageError, NoSumError, RunError
from comingle.utils.records import Metrics

logger = logging.getLogger("comingle")

Value = TypeVar("Value", int, str)


def aggregate_uploads(session: ServerSession, answers: Mapping[str, Answer], number: int) -> tuple[list[str], str]:
    """Check and aggregate the uploads of a round.

    Args:
        session: The session.
        answers: Answers of the participants by name.
        number: The round, from 1.

    Returns:
        The users whose uploads were aggregated, and an empty string; or no users, and the reason, if valid uploads are
        fewer than ``network.min_participants``.

    Raises:
        RunError: No upload is valid, or the result is not finite.
    """
    found = {name: _checked_upload(session, name, answer, number) for name, answer in answers.items()}
    uploads = {name: upload for name in session.public.users if (upload := found.get(name)) is not None}
    if answers and not uploads:
        raise RunError(f"round {number}: none of {len(answers)} uploads is valid")
    if why := keep_model_if_few(session, list(uploads), answers, number):
        return [], why
    _aggregate(session, join_uploads(list(uploads.values())) if uploads else no_uploads(number))
    return list(uploads), ""


def keep_model_if_few(session: ServerSession, users: Sequence[str], answers: Mapping[str, Answer], number: int) -> str:
    """Keep the previous round's model if valid uploads are fewer than ``network.min_participants``.

    Uploads with the users' own noise have been sent, so they are charged to the users' privacy budgets.

    Args:
        session: The session.
        users: Users whose uploads are valid.
        answers: All answers of the round.
        number: The round, from 1.

    Returns:
        Why the model is unchanged; an empty string if there are enough uploads.
    """
    needed, server = min(session.network.min_participants, len(answers)), session.server
    if len(users) >= needed:
        return ""
    why = f"round {number}: valid uploads: {len(users)}; needed: {needed} (network.min_participants)"
    why = f"{why}; the model is unchanged"
    logger.warning("%s", why, extra=AN_EVENT)
    server.skip_round(number, server.numbers(users))
    return why


def _aggregate(session: ServerSession, upload: Upload) -> None:
    """Aggregate a round's uploads, and check that the result is finite before it is stored or sent.

    Raises:
        RunError: It is not finite. The previous round's checkpoint remains the newest.
    """
    server = session.server
    try:
        server.aggregate(upload)
        broken = [name for name, t in server.kept.items() if not bool(t.isfinite().all())]
        why = f"{broken[0]!r} is not finite" if broken else ""
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        why = " ".join(str(error).split())
    if why:
        sizes = [
            max((float(t[i].abs().max()) for t in upload.tensors.values()), default=0.0)
            for i in range(len(upload.users))
        ]
        size, user = max(zip(sizes, upload.users, strict=True))
        problem = f"aggregation failed: {why}; the largest value, {size:.3g}, is from user {user!r}"
        raise RunError(f"round {upload.round}: {problem}; run the same command again to resume from the round before")


def _checked_upload(session: ServerSession, name: str, answer: Answer, number: int) -> Upload | None:
    """Return the upload in a client's answer; None, with a logged reason, if there is none or it fails a check.

    Args:
        session: The session.
        name: The user.
        answer: The client's answer.
        number: The round, from 1.
    """
    try:
        if "left_out" in answer.reported or not answer.messages:
            raise MessageError(str(answer.reported.get("left_out", "no upload in the answer")))
        message = unpack(answer.messages[0])
        if not isinstance(message, Upload):
            raise MessageError("upload: got a download")
        check_upload(
            replace(message, tensors=expand(message.tensors, session.server.uploads)),
            session.model.layout,
            session.context.method,
            user=name,
            number=number,
            rank=session.largest_rank(name),
            weighted=session.server.weighted,
            adaptive=session.server.mechanisms.adaptive,
            **({"most": session.network.max_samples} if counts_samples(session.context.recipe) else {}),
        )
    except MessageError as error:
        log_rejection(session.observe, number, name, str(error))
        return None
    message.reports.pop(LOSS, None)  # Optional, so that not every upload has it.
    return message


def validation_losses(session: ServerSession, answers: Mapping[str, Answer], done: int) -> dict[str, float]:
    """Return users' validation losses if they are used to select the best round, otherwise nothing.

    Args:
        session: The session.
        answers: Answers by name.
        done: The number of rounds that the validated models have had.

    Returns:
        Losses in nats by name.
    """
    losses: dict[str, float] = {}
    if session.context.plan.evaluation.select != "best":
        return losses
    for name in session.public.users:
        for data in answers[name].messages[-1:] if name in answers else ():  # after the upload, if there is one
            try:
                loss = validation_loss(unpack(data), user=name, done=done)
            except MessageError as error:
                logger.warning("user %r: %s", name, error)
                continue
            if loss is not None:
                losses[name] = loss
    return losses


def aggregate_secure_sum(session: ServerSession, answers: Mapping[str, Answer], done: int) -> list[str]:
    """Sum the uploads of a round behind masks and aggregate the sum.

    If too few users remain, nothing is unmasked, the model stays unchanged, and an event gives the reason.

    Args:
        session: The session.
        answers: Answers to the step "advertise" by name.
        done: The round, from 1.

    Returns:
        The users whose uploads are in the sum.
    """
    server = session.server
    assert server.sums is not None
    terms = terms_of(session.context.plan, session.run, done, server.size)
    work = _SecureSum(session=session, collection=SumCollector(terms=terms))
    try:
        total = work.total(answers, server.sums.grid(done).levels)
    except NoSumError as error:
        logger.warning("%s", error, extra=AN_EVENT)
        session.observe({"event": "no_sum", "round": done, "reason": str(error)})
        if work.revealing:  # Users may have unmasked the sum although their answers cannot be used.
            server.mechanisms.charge([server.users.index(user) for user in work.collection.survivors])
        server.skip_round(done)
        return []
    survivors = work.collection.survivors
    if why := keep_model_if_few(session, survivors, answers, done):
        session.observe({"event": "no_sum", "round": done, "reason": why})
        return []
    server.aggregate_sum(total, survivors, done)
    return survivors


@dataclass(kw_only=True)
class _SecureSum:
    """A secure sum of one round.

    Args:
        session: The session.
        collection: Collects the users' messages of each step.
        revealing: Whether users have been asked to unmask the sum.
    """

    session: ServerSession
    collection: SumCollector
    revealing: bool = False

    def total(self, answers: Mapping[str, Answer], largest: int) -> np.ndarray:
        """Carry out all steps and return the sum.

        Raises:
            NoSumError: Too few users have answered in a step.
        """
        server, terms, done = self.collection, self.collection.terms, self.collection.terms.round
        self._take(answers, lambda name, got: server.store_keys(name, secure_client.read_keys(got, name, done)))
        server.require(server.roster, "advertise")

        def share(name: str, got: Upload | Download) -> None:
            others = [other for other in server.roster if other != name]
            server.store_sealed_shares(name, secure_client.read_shares(got, name, done, others, sealed=True))

        self._ask("share", server.roster, lambda name: secure_client.roster_message(name, done, server.roster), share)
        server.require(server.sealed, "share")

        def add(name: str, got: Upload | Download) -> None:
            server.add_upload(name, secure_client.read_masked(got, name, done, terms.entries, terms.word))

        self._ask("mask", server.sharers, lambda n: secure_client.sealed_message(n, done, server.sealed_for(n)), add)
        server.require(server.survivors, "mask")
        survivors, self.revealing = list(server.survivors), True

        def reveal(name: str, got: Upload | Download) -> None:
            server.store_revealed_shares(name, secure_client.read_shares(got, name, done, server.sharers, sealed=False))

        self._ask("unmask", survivors, lambda name: secure_client.survivors_message(name, done, survivors), reveal)
        return server.total(largest)

    def _ask(
        self,
        step: str,
        names: Iterable[str],
        say: Callable[[str], Download],
        take: Callable[[str, Upload | Download], None],
    ) -> None:
        """Send users a step, and process their answers."""
        packed = {name: pack(say(name)) for name in names}
        asked = dict.fromkeys(packed, (step,))
        self._take(self.session.ask(asked, self.collection.terms.round - 1, messages=packed), take)

    def _take(self, answers: Mapping[str, Answer], take: Callable[[str, Upload | Download], None]) -> None:
        """Process answers in the order of the users, and skip those that fail a check."""
        for name in (one for one in self.session.public.users if one in answers):
            answer = answers[name]
            try:
                if "left_out" in answer.reported or not answer.messages:
                    raise MessageError(
                        str(answer.reported.get("left_out", "no message for the secure sum in the answer"))
                    )
                take(name, unpack(answer.messages[0]))
            except MessageError as error:
                log_rejection(self.session.observe, self.collection.terms.round, name, str(error))


RoutingMetrics = Mapping[str, Mapping[str, Any]]
"""Metrics that clients have reported, by user name."""


def routing_event(session: ServerSession, reported: RoutingMetrics) -> dict[str, Any]:
    """Return the routing part of an evaluation event, without values whose sizes do not fit the user's model."""
    return _gates(session, reported) | _mixtures(session, reported)


def _gates(session: ServerSession, reported: RoutingMetrics) -> dict[str, Any]:
    """Return mean gates of users whose numbers of layers and experts fit.

    The most common number of layers is taken as the right one.
    """
    users, model = session.public.users, session.model
    if not model.routed:
        return {}
    names = {name: model.expert_names(users.index(name)) for name, one in reported.items() if "gates" in one}
    fitting = {
        name: reported[name]["gates"]
        for name, experts in names.items()
        if all(len(layer) == len(experts) for layer in reported[name]["gates"])
    }
    layers = _most_common([len(gates) for gates in fitting.values()], 0)
    scores = {name: gates for name, gates in fitting.items() if len(gates) == layers > 0}
    return {"experts": {name: names[name] for name in scores}, "expert_scores": scores} if scores else {}


def _mixtures(session: ServerSession, reported: RoutingMetrics) -> dict[str, Any]:
    """Return the mixtures that users report, or the server's merging weights."""
    method, server = session.context.method, session.server
    merging = method.server.merging_weights(server.kept)
    if merging is not None:
        return mixtures_event(session.public.users, merging.double().cpu(), method)
    mixture = method.placement.mixture
    size = method.server.server_models if mixture is None else mixture.clusters
    rows = {name: one["mixture"] for name, one in reported.items() if len(one.get("mixture", ())) == size}
    return mixtures_event(list(rows), torch.tensor(list(rows.values()), dtype=torch.float64), method) if rows else {}


ClientReports = dict[str, Mapping[str, Any]]
"""Metrics that clients have reported, by user name."""


class NetworkBackend(Backend[ClientReports]):
    """Backend of a federation: clients on other machines, the server in this process.

    Args:
        session: Sends tasks to clients and receives their answers.
        stopped_after: Number of rounds after which the privacy budget was spent, in a resumed run.
    """

    remote = True

    def __init__(self, session: ServerSession, *, stopped_after: int | None = None):
        self.session, self.server, self.stopped_after = session, session.server, stopped_after
        self._plan: RoundPlan | None = None
        self._training_answers: Mapping[str, Answer] = {}
        self._senders: list[str] = []
        self._evaluation_answers: Mapping[str, Answer] | None = None  # if evaluated after training

    @property
    def _names(self) -> Sequence[str]:
        return self.session.public.users

    @property
    def rounds(self) -> int:
        """Number of rounds of the run: as planned, or until the privacy budget is spent."""
        context = self.session.context
        return context.planned_rounds if self.stopped_after is None else self.stopped_after

    def start(self, observe: Observer, clock: Clock) -> tuple[RunPlan, int]:
        """Set the observer and the clock, and request a checkpoint after every round.

        The interval is 1 because a client can revert only a few tasks.
        """
        self.session.observe, self.session.clock = observe, clock
        warn_of_untrained(self.session.context.plan, self.session.local_steps)
        return self.session.context.plan.updated("checkpoints", every=1), self.rounds

    def select_participants(self, plan: RoundPlan) -> Sequence[int] | None:
        """Return the participants of a round; None, which ends the run, if the privacy budget is spent."""
        run = self.session.context.plan
        participants = self.server.invite(run, plan.number, releases=plan.exchanges)
        if participants is None:
            self.stopped_after = plan.number  # counted from 0, so this many rounds are done
        return participants

    def train(self, plan: RoundPlan, participants: Sequence[int]) -> RoundResult:
        """Send participants a task to download, train and upload; if local models are evaluated, send all users one.

        A secure sum is aggregated at once, so that its bytes count for this round.

        Raises:
            RunError: Too few participants answered in time.
        """
        session, names = self.session, [self._names[number] for number in participants]
        local = ("evaluate",) if plan.evaluates == "local" else ()
        summed = plan.exchanges and self.server.sums is not None
        work = ("receive", "train", *(("advertise" if summed else "upload",) if plan.exchanges else ()), *local)
        steps: dict[str, Sequence[str]] = dict.fromkeys(names, work)
        if local:
            steps |= {name: ("receive", "evaluate") for name in self._names if name not in steps}
        answers = session.ask(steps, plan.number, about={"done": plan.done})
        trained = {name: answers[name] for name in names if name in answers}
        _require_enough(session, trained, names, plan.done)
        self._plan, self._training_answers, self._evaluation_answers = plan, trained, answers if local else None
        self._senders = aggregate_secure_sum(session, trained, plan.done) if summed else []
        reports = {name: answer.reported for name, answer in trained.items()}
        return RoundResult(
            losses={
                name: answer.reported["train_loss"]
                for name, answer in trained.items()
                if "train_loss" in answer.reported
            },
            users=len([report for report in reports.values() if "left_out" not in report]),
            tokens=sum(int(report.get("tokens", 0)) for report in reports.values()),
            seconds=max((float(report.get("train_seconds", 0.0)) for report in reports.values()), default=0.0),
        )

    def aggregate(self) -> str:
        """Aggregate the valid uploads of the round; return why none were aggregated, or an empty string.

        Raises:
            RunError: No upload is valid, or the result is not finite.
        """
        assert self._plan is not None
        why = ""
        if self.server.sums is None:
            self._senders, why = aggregate_uploads(self.session, self._training_answers, self._plan.done)
        if self.server.method.server.peer_to_peer:
            self.session.ask(dict.fromkeys(self._senders, ("receive",)), self._plan.number)
            self.server.clear_uploads()
        return why

    def evaluate(
        self, done: int, *, receives: bool, finishes: bool, silent: bool
    ) -> tuple[ClientReports | None, dict[str, Any]]:
        """Make all users evaluate, unless they have evaluated after training, and judge their validation losses.

        Returns:
            The metrics that clients report (None if there are none), and the evaluation event.
        """
        answers, self._evaluation_answers = self._evaluation_answers, None
        if answers is None:
            steps = (*(("receive",) if receives else ()), *(("finish",) if finishes else ()), "evaluate")
            answers = self.session.ask(dict.fromkeys(self._names, steps), max(0, done - 1), about={"done": done})
        names = [name for name in self._names if name in answers]
        reported = {name: answers[name].reported for name in names if answers[name].reported.get("evaluated")}
        measure = _measure(reported)
        scores = {
            name: dict(one["score"]) for name, one in reported.items() if f"test_{measure}" in one.get("score", {})
        }
        event = evaluation_event(scores, measure, done=done, iterations=done * self.session.local_steps)
        if not silent and (losses := validation_losses(self.session, answers, done)):
            event["mean_valid_loss"] = self._judge(losses, done)
        return reported or None, event | routing_event(self.session, reported)

    def _judge(self, losses: dict[str, float], done: int) -> float:
        """Pass validation losses to the server and return their mean; users get the verdict with their next task."""
        before = self.server.lowest_loss
        verdict = self.server.judge(validation_report(losses, done), self._names)
        for name, one in zip(self._names, verdict.split(), strict=True):
            self.session.clients[name].verdict = one
        if self.server.lowest_loss < before:
            self.session.best_round = done
        return fmean(losses.values())

    def choose(self, rounds: int, scores: ClientReports | None) -> ClientReports | None:
        """Make clients restore the models of the best round, if that is selected, and return their scores."""
        if self.session.context.plan.evaluation.select != "best":
            return scores
        again = ("evaluate",) if self.session.best_round != rounds else ()
        answers = self.session.ask(dict.fromkeys(self._names, ("choose", *again)), rounds)
        return {name: answer.reported for name, answer in answers.items()} or None if again else scores

    def summarise(self, reported: ClientReports | None) -> Metrics:
        """Return the metrics of the finished run, for the users who report theirs."""
        session, reported = self.session, reported or {}
        context, measure = session.context, _measure(reported)
        needed = {f"test_{measure}", "trainable_parameters"}
        users = {name: dict(one["metrics"]) for name, one in reported.items() if _has(one.get("metrics", {}), needed)}
        return metrics_of(
            users,
            session.model,
            context.plan,
            session.clock,
            rounds=self.rounds,
            selected=session.best_round if context.plan.evaluation.select == "best" else self.rounds,
            measure=measure,
            unit=_most_common([str(one["unit"]) for one in session.joined.values() if "unit" in one], "tokens"),
        )


def _require_enough(session: ServerSession, trained: Mapping[str, Answer], members: Sequence[str], done: int) -> None:
    """Check that enough participants of a round have answered.

    Args:
        session: The session.
        trained: Answers to the training task.
        members: Participants of the round.
        done: Number of rounds that are done, with this one.

    Raises:
        RunError: Too few have answered.
    """
    needed = min(session.network.min_participants, len(members))
    if members and len(trained) < max(1, needed):
        raise RunError(
            f"round {done}: {len(trained)} of {len(members)} participants answered in "
            f"{session.network.round_timeout:g} s; needed: {max(1, needed)}"
        )


def _measure(reported: ClientReports) -> str:
    """Return the measure that most users report; they do so even if they do not report their scores."""
    return _most_common([str(one["measure"]) for one in reported.values() if "measure" in one], "loss")


def _most_common(values: Sequence[Value], default: Value) -> Value:
    """Return the most common value, the first among equals, so that a single client cannot change it."""
    return Counter(values).most_common(1)[0][0] if values else default


def _has(metrics: Mapping[str, Any], names: Collection[str]) -> bool:
    return all(metrics.get(name) is not None for name in names)
