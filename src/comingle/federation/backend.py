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

from comingle.config.settings import LEAST
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

_DECLINES = 3
"""Limit on users in an error whose reasons for declining a task are listed."""


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
    checked = {name: _checked_upload(session, name, answer, number) for name, answer in answers.items()}
    # In the order of the users, not of their answers, so that a sum does not depend on who was faster.
    uploads = {name: upload for name in session.public.users if (upload := checked.get(name)) is not None}
    if answers and not uploads:
        raise RunError(f"round {number}: none of {len(answers)} uploads is valid")
    if why := keep_model_if_few(session, list(uploads), answers, number):
        return [], why
    _aggregate(session, join_uploads(list(uploads.values())) if uploads else no_uploads(number))
    return list(uploads), ""


def keep_model_if_few(session: ServerSession, users: Sequence[str], answers: Mapping[str, Answer], number: int) -> str:
    """Skip the aggregation of a round if valid uploads are fewer than ``network.min_participants``.

    The model of the previous round then stays, and a warning is logged. Uploads with the users' own noise have reached
    the server although they are not used, so skipping the round charges these users' privacy budgets.

    Args:
        session: The session.
        users: Users whose uploads are valid.
        answers: All answers of the round.
        number: The round, from 1.

    Returns:
        Why the model is unchanged; an empty string if there are enough uploads.
    """
    # A round may select fewer participants than the setting; then all of their uploads must be valid.
    needed = min(session.network.min_participants, len(answers))
    if len(users) >= needed:
        return ""
    why = f"round {number}: valid uploads: {len(users)}; needed: {needed} (network.min_participants)"
    why = f"{why}; the model is unchanged"
    logger.warning("%s", why, extra=AN_EVENT)  # marked as one that is also in the event log, so not shown twice
    user_numbers = session.server.numbers(users)
    session.server.skip_round(number, user_numbers)
    return why


def _aggregate(session: ServerSession, upload: Upload) -> None:
    """Aggregate a round's uploads, and check that the result is finite before it is stored or sent.

    Args:
        session: The session.
        upload: Valid uploads of all participants, joined in tensors ``(users, *shape)``.

    Raises:
        RunError: The result is not finite; names the user with the largest value as a likely cause. The previous
            round's checkpoint remains the newest.
    """
    server = session.server
    try:
        server.aggregate(upload)
        not_finite = [name for name, t in server.kept.items() if not bool(t.isfinite().all())]  # the method's state
        why = f"{not_finite[0]!r} is not finite" if not_finite else ""
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]  (of methods with an SVD)
        why = " ".join(str(error).split())
    if why:
        largest_values = []  # by user
        for i in range(len(upload.users)):
            largest_values.append(max((float(t[i].abs().max()) for t in upload.tensors.values()), default=0.0))
        value, user = max(zip(largest_values, upload.users, strict=True))
        problem = f"aggregation failed: {why}; the largest value, {value:.3g}, is from user {user!r}"
        raise RunError(f"round {upload.round}: {problem}; run the same command again to resume from the round before")


def _checked_upload(session: ServerSession, name: str, answer: Answer, number: int) -> Upload | None:
    """Return the upload in a client's answer; None, with a logged reason, if there is none or it fails a check.

    Its tensors stay compressed (``training.uploads``), as aggregation decompresses the uploads of all users together.
    The mean training loss is removed from its reports.

    Args:
        session: The session.
        name: The user.
        answer: The client's answer.
        number: The round, from 1.
    """
    server = session.server
    try:
        # "left_out" is why the client did not train, for example because its loss is not finite.
        if "left_out" in answer.reported or not answer.messages:
            raise MessageError(str(answer.reported.get("left_out", "no upload in the answer")))
        message = unpack(answer.messages[0])
        if not isinstance(message, Upload):
            raise MessageError("upload: got a download")
        # Aggregation weights follow from the amounts of data that clients report, so the server limits these amounts.
        limit = {"most": session.network.max_samples} if counts_samples(session.context.recipe) else {}
        check_upload(
            replace(message, tensors=expand(message.tensors, server.uploads)),  # decompressed for the checks only
            session.model.layout,
            session.context.method,
            user=name,
            number=number,
            rank=session.largest_rank(name),
            weighted=server.weighted,
            adaptive=server.mechanisms.adaptive,
            most_steps=session.most_steps(name),
            **limit,
        )
    except MessageError as error:
        log_rejection(session.observe, number, name, str(error))
        return None
    message.reports.pop(LOSS, None)  # Optional, and uploads can only be joined if all have the same reports.
    return message


def validation_losses(session: ServerSession, answers: Mapping[str, Answer], done: int) -> dict[str, float]:
    """Return the validation losses that users report, if the recipe selects the best round by them.

    Losses of another round, or that are not finite, are skipped with a warning.

    Args:
        session: The session.
        answers: Answers to a task with the step "evaluate", by name.
        done: Number of rounds that were done before this evaluation.

    Returns:
        Losses in nats by name; empty if the recipe does not select the best round.
    """
    losses: dict[str, float] = {}
    if session.context.plan.evaluation.select != "best":
        return losses
    for name in session.public.users:
        if name not in answers or not answers[name].messages:
            continue
        last_message = answers[name].messages[-1]  # a task may train, too; then the upload is before it
        try:
            loss = validation_loss(unpack(last_message), user=name, done=done)
        except MessageError as error:
            logger.warning("user %r: %s", name, error)
            continue
        if loss is not None:
            losses[name] = loss
    return losses


def aggregate_secure_sum(session: ServerSession, answers: Mapping[str, Answer], round_number: int) -> list[str]:
    """Compute the sum of a round's uploads by secure aggregation, and aggregate it.

    The server sees masked uploads and, once it gets the shares that remove the masks, their sum. If too few users
    answer, no sum is computed, the model stays unchanged, and an event ("no_sum") gives the reason.

    Args:
        session: The session.
        answers: Answers to the step "advertise", with which a secure sum begins, by name.
        round_number: The round, from 1.

    Returns:
        The users whose uploads are in the sum; empty if the model stays unchanged.
    """
    server = session.server
    assert server.sums is not None
    num_entries = server.size  # of all shared tensors of a user
    terms = terms_of(session.context.plan, session.run, round_number, num_entries)
    collector = SumCollector(terms=terms)
    secure_sum = _SecureSum(session=session, collector=collector)
    # Users round each entry to a grid of integers, of which this is the largest.
    largest_integer = server.sums.grid(round_number).largest
    try:
        total = secure_sum.total(answers, largest_integer)
    except NoSumError as error:
        logger.warning("%s", error, extra=AN_EVENT)
        session.observe({"event": "no_sum", "round": round_number, "reason": str(error)})
        if secure_sum.unmask_requested:  # Users may have unmasked the sum although their answers cannot be used.
            server.mechanisms.charge([server.users.index(user) for user in collector.survivors])
        server.skip_round(round_number)
        return []
    survivors = collector.survivors  # the users in the sum
    if why := keep_model_if_few(session, survivors, answers, round_number):
        session.observe({"event": "no_sum", "round": round_number, "reason": why})
        return []
    server.aggregate_sum(total, survivors, round_number)
    return survivors


@dataclass(kw_only=True)
class _SecureSum:
    """The server's requests to clients for one round of secure aggregation (a secure sum).

    Args:
        session: The session.
        collector: Collects the users' messages of each step.
        unmask_requested: Whether users have been asked to unmask the sum.
    """

    session: ServerSession
    collector: SumCollector
    unmask_requested: bool = False

    def total(self, answers: Mapping[str, Answer], largest: int) -> np.ndarray:
        """Carry out all steps of the protocol and return the sum of the uploads, int64 ``(entries,)``.

        In the step "advertise" users send public keys, in "share" encrypted shares of their secrets for each other, in
        "mask" their masked uploads, and in "unmask" the shares that remove the masks from the sum. A user that does not
        answer a step is left out of the later steps. The sum is over the users that have answered "mask".

        For each later step there is a function that makes a user's message, and one that checks and stores its answer.

        Args:
            answers: Answers to the step "advertise" by name. Users carry out this step within their training task.
            largest: Largest magnitude that an entry of an upload may have. A sum of n uploads with an entry beyond n
                times ``largest`` is refused.

        Raises:
            NoSumError: Too few users have answered a step, or the sum is out of range.
        """
        collector, terms, round_number = self.collector, self.collector.terms, self.collector.terms.round

        def read_keys(name: str, message: Upload | Download) -> None:
            collector.store_keys(name, secure_client.read_keys(message, name, round_number))

        self._process_answers(answers, read_keys)
        collector.require(collector.public_keys, "advertise")

        def roster_message(name: str) -> Download:
            return secure_client.roster_message(name, round_number, collector.public_keys)

        def read_shares(name: str, message: Upload | Download) -> None:
            others = [other for other in collector.public_keys if other != name]
            shares = secure_client.read_shares(message, name, round_number, others, sealed=True)
            collector.store_sealed_shares(name, shares)

        self._request_step("share", collector.public_keys, roster_message, read_shares)
        collector.require(collector.sharers, "share")

        def sealed_message(name: str) -> Download:
            return secure_client.sealed_message(name, round_number, collector.sealed_for(name))

        def read_masked_upload(name: str, message: Upload | Download) -> None:
            masked = secure_client.read_masked(message, name, round_number, terms.entries, terms.word)
            collector.add_upload(name, masked)

        self._request_step("mask", collector.sharers, sealed_message, read_masked_upload)
        collector.require(collector.survivors, "mask")
        survivors = list(collector.survivors)
        # From here on the sum may be revealed, so it costs privacy budget even if it cannot be used.
        self.unmask_requested = True

        def survivors_message(name: str) -> Download:
            return secure_client.survivors_message(name, round_number, survivors)

        def read_revealed_shares(name: str, message: Upload | Download) -> None:
            shares = secure_client.read_shares(message, name, round_number, collector.sharers, sealed=False)
            collector.store_revealed_shares(name, shares)

        self._request_step("unmask", survivors, survivors_message, read_revealed_shares)
        return collector.total(largest)

    def _request_step(
        self,
        step: str,
        names: Iterable[str],
        message_for: Callable[[str], Download],
        read_answer: Callable[[str, Upload | Download], None],
    ) -> None:
        """Send users a task with one step of the secure sum, and process their answers.

        Args:
            step: Name of the step.
            names: The users.
            message_for: Returns the message that a user needs for the step.
            read_answer: Called with a user and the message in its answer; raises a MessageError if it is wrong.
        """
        messages = {name: pack(message_for(name)) for name in names}
        steps = dict.fromkeys(messages, (step,))
        round_index = self.collector.terms.round - 1  # tasks count rounds from 0, secure sums from 1
        answers = self.session.ask(steps, round_index, messages=messages)
        self._process_answers(answers, read_answer)

    def _process_answers(
        self, answers: Mapping[str, Answer], read_answer: Callable[[str, Upload | Download], None]
    ) -> None:
        """Process answers in the order of the users; log and skip those that fail a check.

        Args:
            answers: Answers by name.
            read_answer: Called with a user and the message in its answer; raises a MessageError if it is wrong.
        """
        for name in self.session.public.users:
            if name not in answers:
                continue
            answer = answers[name]
            try:
                if "left_out" in answer.reported or not answer.messages:
                    reason = answer.reported.get("left_out", "no message for the secure sum in the answer")
                    raise MessageError(str(reason))
                read_answer(name, unpack(answer.messages[0]))
            except MessageError as error:
                log_rejection(self.session.observe, self.collector.terms.round, name, str(error))


RoutingMetrics = Mapping[str, Mapping[str, Any]]
"""Metrics that clients have reported, by user name."""


def routing_event(session: ServerSession, reported: RoutingMetrics) -> dict[str, Any]:
    """Return the routing part of an evaluation event: mean gates and mixtures that users report.

    Values whose sizes do not fit the user's model are left out.

    Args:
        session: The session.
        reported: Metrics that clients have reported, by user.
    """
    return _mean_gates(session, reported) | _mixtures(session, reported)


def _mean_gates(session: ServerSession, reported: RoutingMetrics) -> dict[str, Any]:
    """Return the routing weights of the users that report them, each a mean over the user's tokens.

    A user is left out if its list of weights has a wrong number of layers or experts. The server does not know the
    number of layers, so it takes the most common one as the right one.

    Args:
        session: The session.
        reported: Metrics by user; ``gates`` is a list of layers, each a list with a weight for each expert.

    Returns:
        Fields of an evaluation event: ``experts`` has the names of each user's experts, and ``expert_scores`` the
        weights, for each user a list of layers. Empty if the model has no token routers or no user reports weights.
    """
    users, model = session.public.users, session.model
    if not model.routed:
        return {}
    experts, gates = {}, {}
    for name, metrics in reported.items():
        if "gates" not in metrics:  # The user keeps its weights private.
            continue
        experts[name] = model.expert_names(users.index(name))
        if all(len(layer) == len(experts[name]) for layer in metrics["gates"]):
            gates[name] = metrics["gates"]
    num_layers = _most_common([len(layers) for layers in gates.values()], 0)
    if num_layers == 0:  # no user has reported weights
        return {}
    scores = {name: layers for name, layers in gates.items() if len(layers) == num_layers}
    return {"experts": {name: experts[name] for name in scores}, "expert_scores": scores}


def _mixtures(session: ServerSession, reported: RoutingMetrics) -> dict[str, Any]:
    """Return the weights with which each user mixes several models, as fields of an evaluation event.

    If the server merges models for each user, it knows the weights. Otherwise users may report their weights
    ("mixture"); reports with a wrong number of weights are left out. Empty if there are no weights.

    Args:
        session: The session.
        reported: Metrics that clients have reported, by user.
    """
    method, server = session.context.method, session.server
    merging_weights = method.server.merging_weights(server.kept)  # (users, models), from the method's state
    if merging_weights is not None:
        return mixtures_event(session.public.users, merging_weights.double().cpu(), method)
    # A user mixes the components of a mixture that it trains, or else the models that the server sends.
    mixture = method.placement.mixture
    num_models = method.server.server_models if mixture is None else mixture.clusters
    weights = {
        name: metrics["mixture"] for name, metrics in reported.items() if len(metrics.get("mixture", ())) == num_models
    }
    if not weights:
        return {}
    return mixtures_event(list(weights), torch.tensor(list(weights.values()), dtype=torch.float64), method)


ClientReports = dict[str, Mapping[str, Any]]
"""Metrics that clients have reported, by user name."""


class NetworkBackend(Backend[ClientReports]):
    """Backend of a federation: clients on other machines, the server in this process."""

    remote = True

    def __init__(self, session: ServerSession, *, stopped_after: int | None = None):
        """Create the backend of a run before its first round, or of a resumed run.

        Args:
            session: Sends tasks to clients and receives their answers.
            stopped_after: Number of rounds after which the privacy budget was spent, in a resumed run; None if it was
                not.
        """
        self.session, self.server, self.stopped_after = session, session.server, stopped_after
        # Of the current round: its plan, participants' answers to the training task by user, users whose uploads were
        # aggregated, and answers with scores, if the training task includes an evaluation.
        self._plan: RoundPlan | None = None
        self._training_answers: Mapping[str, Answer] = {}
        self._senders: list[str] = []
        self._evaluation_answers: Mapping[str, Answer] | None = None

    @property
    def _names(self) -> Sequence[str]:
        return self.session.public.users

    @property
    def rounds(self) -> int:
        """Number of rounds of the run: as planned, or until the privacy budget is spent."""
        context = self.session.context
        return context.planned_rounds if self.stopped_after is None else self.stopped_after

    def start(self, observe: Observer, clock: Clock) -> tuple[RunPlan, int]:
        """Send events to ``observe`` and count time and bytes on ``clock`` from now on; warn of doubtful settings.

        The warnings are about phases that no user reaches in the run, and about secure sums of two users.

        Returns:
            The settings of the run, and its number of rounds. The settings request a checkpoint after every round: a
            server that resumes repeats the rounds after its checkpoint, and a client can revert only a few tasks.
        """
        self.session.observe, self.session.clock = observe, clock
        run_settings = self.session.context.plan
        warn_of_untrained(run_settings, self.session.local_steps)
        warn_of_small_sums(run_settings, self.session.network.min_participants, self.rounds)
        return run_settings.updated("checkpoints", every=1), self.rounds

    def select_participants(self, plan: RoundPlan) -> Sequence[int] | None:
        """Return the participants of a round as indices into the users; None if the privacy budget ends the run.

        Only a round in which users upload (``plan.exchanges``) costs budget.
        """
        run_settings = self.session.context.plan
        participants = self.server.invite(run_settings, plan.number, releases=plan.exchanges)
        if participants is None:
            self.stopped_after = plan.number  # counted from 0, so this many rounds are done
        return participants

    def train(self, plan: RoundPlan, participants: Sequence[int]) -> RoundResult:
        """Send participants the task of a round: download, train, and upload if the server aggregates in this round.

        If the plan evaluates local models, participants evaluate after training, and all other users get a task to
        evaluate. A secure sum is completed and aggregated here, so that its bytes count for this round; plain uploads
        are aggregated by :meth:`aggregate`.

        Args:
            plan: Plan of the round.
            participants: Numbers of the users.

        Raises:
            RunError: Too few participants answered in time.
        """
        # ``plan.number`` counts rounds from 0; ``plan.done`` is the number of rounds that are done after this one.
        session, names = self.session, [self._names[number] for number in participants]
        evaluates_locally = plan.evaluates == "local"
        has_secure_sum = plan.exchanges and self.server.sums is not None
        participant_steps = ["receive", "train"]
        if plan.exchanges:
            participant_steps.append("advertise" if has_secure_sum else "upload")  # a secure sum begins with keys
        if evaluates_locally:
            participant_steps.append("evaluate")
        steps: dict[str, Sequence[str]] = dict.fromkeys(names, tuple(participant_steps))
        if evaluates_locally:
            steps |= {name: ("receive", "evaluate") for name in self._names if name not in steps}
        answers = session.ask(steps, plan.number, arguments={"done": plan.done})
        trained = {name: answers[name] for name in names if name in answers}
        _require_answers(session, len(trained), len(names), plan.done)
        self._plan, self._training_answers = plan, trained
        self._evaluation_answers = answers if evaluates_locally else None
        self._senders = aggregate_secure_sum(session, trained, plan.done) if has_secure_sum else []
        reports = {name: answer.reported for name, answer in trained.items()}
        return RoundResult(
            losses={name: report["train_loss"] for name, report in reports.items() if "train_loss" in report},
            users=len([report for report in reports.values() if "left_out" not in report]),
            tokens=sum(int(report.get("tokens", 0)) for report in reports.values()),
            steps={name: int(report["local_steps"]) for name, report in reports.items() if "local_steps" in report},
            # Clients train in parallel, so the slowest one counts.
            seconds=max((float(report.get("train_seconds", 0.0)) for report in reports.values()), default=0.0),
        )

    def aggregate(self) -> str:
        """Aggregate the valid uploads of the round; secure sums were aggregated in :meth:`train` already.

        In a peer-to-peer method the server only passes uploads on. The senders download them at once, and the server
        deletes them.

        Returns:
            Why no uploads were aggregated; an empty string if they were.

        Raises:
            RunError: No upload is valid, or the result is not finite.
        """
        assert self._plan is not None
        why = ""
        if self.server.sums is None:
            # Messages to clients have the round counted from 0 (`number`), uploads have it from 1 (`done`).
            self._senders, why = aggregate_uploads(self.session, self._training_answers, self._plan.done)
        if self.server.method.server.peer_to_peer:
            self.session.ask(dict.fromkeys(self._senders, ("receive",)), self._plan.number)
            self.server.clear_uploads()
        return why

    def evaluate(
        self, done: int, *, receives: bool, finishes: bool, silent: bool
    ) -> tuple[ClientReports | None, dict[str, Any]]:
        """Make all users evaluate, and find out from their validation losses whether this round is the best so far.

        If the users have already evaluated in the task of :meth:`train`, the answers to that task are used, and the
        users get no other task.

        Args:
            done: Number of rounds that are done; 0 before the first one.
            receives: Whether users download the newest model first.
            finishes: Whether users carry out the method's final step first, after the last exchange.
            silent: Whether this evaluation was logged before the run was resumed. Then its validation losses have been
                compared before, and are not compared again.

        Returns:
            The metrics that clients report (None if there are none), and the evaluation event.
        """
        answers, self._evaluation_answers = self._evaluation_answers, None
        if answers is None:
            steps = []
            if receives:
                steps.append("receive")
            if finishes:
                steps.append("finish")
            steps.append("evaluate")
            round_index = max(0, done - 1)  # of the last round, from 0
            answers = self.session.ask(dict.fromkeys(self._names, tuple(steps)), round_index, arguments={"done": done})
        names = [name for name in self._names if name in answers]
        reported = {name: answers[name].reported for name in names if answers[name].reported.get("evaluated")}
        measure = _measure(reported)
        scores = {
            name: dict(report["score"])
            for name, report in reported.items()
            if f"test_{measure}" in report.get("score", {})  # missing if the user keeps its scores private
        }
        event = evaluation_event(scores, measure, done=done, iterations=done * self.session.local_steps)
        if not silent and (losses := validation_losses(self.session, answers, done)):
            event["mean_valid_loss"] = self._compare_validation_losses(losses, done)
            # Only of users that report their scores; the others keep their metrics private.
            event["valid_loss"] = {name: loss for name, loss in losses.items() if name in reported}
        return reported or None, event | routing_event(self.session, reported)

    def _compare_validation_losses(self, losses: dict[str, float], done: int) -> float:
        """Compare the mean of users' validation losses with the lowest mean so far.

        The verdict, whether the new mean is the lowest, is sent to each user with its next task. If it is, the user
        keeps its model as the best one.

        Args:
            losses: Validation losses in nats, by name.
            done: Number of rounds that are done.

        Returns:
            The mean in nats.
        """
        lowest_before = self.server.lowest_loss
        verdict = self.server.judge(validation_report(losses, done), self._names)
        for name, verdict_of_user in zip(self._names, verdict.split(), strict=True):
            self.session.clients[name].verdict = verdict_of_user
        if self.server.lowest_loss < lowest_before:
            self.session.best_round = done
        return fmean(losses.values())

    def choose(self, rounds: int, scores: ClientReports | None) -> ClientReports | None:
        """Make clients restore the models of the best round, if the recipe selects it, and return their metrics.

        Args:
            rounds: Number of rounds of the run.
            scores: Metrics of the evaluation after the last round. They are returned unless an earlier round is
                selected, whose models clients then evaluate again.

        Returns:
            Metrics of the final models, by user; None if no user reports any.
        """
        if self.session.context.plan.evaluation.select != "best":
            return scores
        evaluates_again = self.session.best_round != rounds
        steps = ("choose", "evaluate") if evaluates_again else ("choose",)
        answers = self.session.ask(dict.fromkeys(self._names, steps), rounds)
        if not evaluates_again:
            return scores
        return {name: answer.reported for name, answer in answers.items()} or None

    def summarise(self, reported: ClientReports | None) -> Metrics:
        """Return the metrics of the finished run: those that users report, their mean, and times and bytes.

        A user's metrics count only if they have a test score and the number of trainable parameters, from which the
        mean score and the size of the model are computed.

        Args:
            reported: What clients have reported in the last evaluation, by user; None if there was none.
        """
        session, reported = self.session, reported or {}
        context, measure = session.context, _measure(reported)  # measure: of test scores, such as "loss"
        required = {f"test_{measure}", "trainable_parameters"}
        users = {
            name: dict(report["metrics"])
            for name, report in reported.items()
            if _has_all(report.get("metrics", {}), required)
        }
        units = [str(joined["unit"]) for joined in session.joined.values() if "unit" in joined]  # tokens or samples
        selects_best = context.plan.evaluation.select == "best"
        final_round = session.best_round if selects_best else self.rounds  # after which users had their final models
        return metrics_of(
            users,
            session.model,
            context.plan,
            session.clock,
            rounds=self.rounds,
            selected=final_round,
            measure=measure,
            unit=_most_common(units, "tokens"),
        )


def warn_of_small_sums(plan: RunPlan, min_participants: int, rounds: int) -> None:
    """Warn if a secure sum without noise may have two uploads: each of the two users can compute the other's.

    Args:
        plan: Plan of the run.
        min_participants: The setting ``network.min_participants``, below which no sum is published.
        rounds: Number of rounds.
    """
    sums = plan.sums
    if sums is None or plan.privacy is None or plan.privacy.noisy or not rounds:
        return
    numbers = range(1, rounds + 1)

    def fewest_uploads(number: int) -> int:
        """Return the smallest number of uploads that both the secure sum and the server accept in a round."""
        return max(sums.least(number), min(min_participants, sums.expected(number)))

    least = min(map(fewest_uploads, numbers))
    if least == LEAST:  # the smallest sum that the protocol allows, of two uploads
        logger.warning(
            "privacy.secure_aggregation: got sums of at least %d of %d users; each of two users in a sum can compute "
            "the other's upload; with 3 users or more set network.min_participants to 3 and raise "
            "privacy.secure_aggregation.threshold so that a sum needs 3, or add noise (mechanism: central)",
            least, min(map(sums.expected, numbers)),
        )  # fmt: skip


def _require_answers(session: ServerSession, num_answers: int, num_participants: int, number: int) -> None:
    """Check that enough participants of a round have answered: ``network.min_participants``, or all if they are fewer.

    A round without participants passes.

    Args:
        session: The session.
        num_answers: Number of participants that have answered the training task.
        num_participants: Number of participants of the round.
        number: The round, from 1.

    Raises:
        RunError: Too few have answered.
    """
    needed = min(session.network.min_participants, num_participants)  # at least 1 if there are participants
    if num_answers < needed:
        declined = [f"{name}: {client.declined}" for name, client in session.clients.items() if client.declined]
        raise RunError(
            f"round {number}: {num_answers} of {num_participants} participants answered in "
            f"{session.network.round_timeout:g} s; needed: {needed}; start the same command again to continue, or "
            f"raise network.round_timeout{''.join(f'; {line}' for line in declined[:_DECLINES])}"
        )


def _measure(reported: ClientReports) -> str:
    """Return the measure that most users report; they do so even if they do not report their scores."""
    return _most_common([str(one["measure"]) for one in reported.values() if "measure" in one], "loss")


def _most_common(values: Sequence[Value], default: Value) -> Value:
    """Return the most common value, the first among equals, so that a single client cannot change it."""
    return Counter(values).most_common(1)[0][0] if values else default


def _has_all(metrics: Mapping[str, Any], names: Collection[str]) -> bool:
    return all(metrics.get(name) is not None for name in names)
