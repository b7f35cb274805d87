"""The backend of a federation over the network: it sends a round's tasks and aggregates uploads and secure sums.

Clients carry out the steps of a round in tasks (:mod:`comingle.federation.client` lists the steps). Clients report
their own metrics; the server checks names and sizes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, TypeVar

import numpy as np
import torch

from comingle.config.settings import LEAST_USERS_IN_SUM
from comingle.federation.messages import Answer, check_upload, validation_loss
from comingle.federation.public import trains_whole_epochs
from comingle.federation.server_session import ServerSession
from comingle.models.routing import number_experts
from comingle.privacy import secure_client
from comingle.privacy.secure_server import SumCollector
from comingle.protocol.messages import LOSS, Download, Upload, decompress, join_uploads, no_uploads, validation_report
from comingle.protocol.wire import pack, unpack
from comingle.training.backends.base import Backend, RoundPlan, RoundResult, log_rejection
from comingle.training.checkpoints import Clock
from comingle.training.evaluation import evaluation_event, metrics_of, mixtures_event
from comingle.training.events import AN_EVENT, Observer
from comingle.training.plan import terms_of
from comingle.training.settings import RunPlan, warn_of_untrained
from comingle.utils.errors import MessageError, NoSumError, RunError
from comingle.utils.records import Metrics
from comingle.utils.trees import GENERALIST, SPECIALIST

logger = logging.getLogger("comingle")

Value = TypeVar("Value", int, str)

_MAX_LISTED_DECLINES = 3
"""Limit on users in an error whose reasons for declining a task are listed."""


def aggregate_uploads(session: ServerSession, answers: Mapping[str, Answer], number: int) -> tuple[list[str], str]:
    """Check and aggregate the uploads of a round.

    Args:
        session: The run's server, which sends tasks to clients and reads their answers.
        answers: Answers of the participants by name.
        number: The round, from 1.

    Returns:
        The users whose uploads were aggregated, and an empty string; or no users, and the reason, if valid uploads are
        fewer than ``network.min_participants``.

    Raises:
        RunError: No upload is valid, or the result is not finite.
    """
    checked = {name: _checked_upload(session, name, answer, number) for name, answer in answers.items()}
    valid: dict[str, Upload] = {}
    for name in session.public.users:  # not in the order of answers, on which the rounding of a sum would depend
        upload = checked.get(name)
        if upload is not None:
            valid[name] = upload
    if answers and not valid:
        raise RunError(f"round {number}: none of {len(answers)} uploads is valid")
    why_skipped = skip_round_if_few(session, list(valid), answers, number)
    if why_skipped:
        return [], why_skipped
    joined = join_uploads(list(valid.values())) if valid else no_uploads(number)
    _aggregate(session, joined)
    return list(valid), ""


def skip_round_if_few(session: ServerSession, users: Sequence[str], answers: Mapping[str, Answer], number: int) -> str:
    """Skip the aggregation of a round if it has fewer valid uploads than ``network.min_participants``.

    Args:
        session: The run's server, which sends tasks to clients and reads their answers.
        users: Users whose uploads are valid. Their privacy budgets are charged even if the round is skipped.
        answers: All answers of the round.
        number: The round, from 1.

    Returns:
        Why the round was skipped; an empty string if it was not.
    """
    num_needed = min(session.network.min_participants, len(answers))  # all, if there are fewer answers
    if len(users) >= num_needed:
        return ""
    counts = f"valid uploads: {len(users)}; needed: {num_needed} (network.min_participants)"
    why = f"round {number}: {counts}; the model is unchanged"
    logger.warning("%s", why, extra=AN_EVENT)
    user_indices = session.server.numbers(users)
    session.server.skip_round(number, user_indices)
    return why


def _aggregate(session: ServerSession, upload: Upload) -> None:
    """Aggregate a round's uploads, and raise an error if the result is not finite.

    Args:
        session: The run's server, which sends tasks to clients and reads their answers.
        upload: Valid uploads of all participants, joined in tensors ``(users, *shape)``.

    Raises:
        RunError: The result is not finite; names the user with the largest value as a likely cause.
    """
    server = session.server
    problems: list[str] = []
    try:
        server.aggregate(upload)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]  (of methods with an SVD)
        problems.append(" ".join(str(error).split()))
    else:
        for name, tensor in server.kept.items():  # the method's state on the server
            if not bool(tensor.isfinite().all()):
                problems.append(f"{name!r} is not finite")
    if not problems:
        return
    largest_by_user: list[tuple[float, str]] = []  # largest magnitude in each user's upload, and the user
    for index, user in enumerate(upload.users):
        values = [float(tensor[index].abs().max()) for tensor in upload.tensors.values()]
        largest_by_user.append((max(values, default=0.0), user))
    largest, likely_user = max(largest_by_user)
    problem = f"aggregation failed: {problems[0]}; the largest value, {largest:.3g}, is from user {likely_user!r}"
    raise RunError(f"round {upload.round}: {problem}; run the same command again to resume from the round before")


def _checked_upload(session: ServerSession, name: str, answer: Answer, number: int) -> Upload | None:
    """Return the upload in a client's answer; None, with a logged reason, if there is none or it fails a check.

    The upload may be compressed (``training.uploads``). The checks use a decompressed copy. The returned upload is
    still compressed, as the aggregation expects it.

    Args:
        session: The run's server, which sends tasks to clients and reads their answers.
        name: Name of the user.
        answer: The client's answer.
        number: The round, from 1.
    """
    server = session.server
    try:
        if "left_out" in answer.reported:  # why the client did not train, for example as its loss is not finite
            raise MessageError(str(answer.reported["left_out"]))
        if not answer.messages:
            raise MessageError("no upload in the answer")
        upload = unpack(answer.messages[0])
        if not isinstance(upload, Upload):
            raise MessageError("upload: got a download")
        decompressed = replace(upload, tensors=decompress(upload.tensors, server.uploads))
        limits: dict[str, int] = {}
        if trains_whole_epochs(session.context.recipe):  # users may be weighted by the number of samples they report
            limits["most_data"] = session.network.max_samples
        check_upload(
            decompressed,
            session.model.layout,
            session.context.method,
            user=name,
            number=number,
            version=server.version,
            rank=session.largest_rank(name),
            weighted=server.weighted,
            adaptive=server.mechanisms.adaptive,
            most_steps=session.most_steps(name),
            **limits,
        )
    except MessageError as error:
        log_rejection(session.observe, number, name, str(error))
        return None
    upload.reports.pop(LOSS, None)  # not all users report it, and joined uploads must have the same reports
    return upload


def validation_losses(session: ServerSession, answers: Mapping[str, Answer], done: int) -> dict[str, float]:
    """Return the validation losses that users report; skip invalid ones with a warning.

    Args:
        session: The run's server, which sends tasks to clients and reads their answers.
        answers: Answers to a task with the step "evaluate", by name.
        done: Number of rounds that were done before this evaluation.

    Returns:
        Losses in nats by name; empty if the recipe does not select the best round.
    """
    if session.context.plan.evaluation.select != "best":
        return {}
    losses: dict[str, float] = {}
    for name in session.public.users:
        if name not in answers or not answers[name].messages:
            continue
        last_message = answers[name].messages[-1]  # an upload may come before it
        try:
            loss = validation_loss(unpack(last_message), user=name, done=done)
        except MessageError as error:
            logger.warning("user %r: %s", name, error)
            continue
        if loss is not None:
            losses[name] = loss
    return losses


def aggregate_secure_sum(session: ServerSession, answers: Mapping[str, Answer], round_number: int) -> list[str]:
    """Compute the sum of a round's uploads by secure aggregation, and update the shared model with it.

    If too few users answer, the model stays unchanged, and an event ("no_sum") gives the reason.

    Args:
        session: The run's server, which sends tasks to clients and reads their answers.
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
    largest_integer = server.sums.grid(round_number).largest  # users round each entry to an integer up to this one
    try:
        total = secure_sum.total(answers, largest_integer)
    except NoSumError as error:
        logger.warning("%s", error, extra=AN_EVENT)
        session.observe({"event": "no_sum", "round": round_number, "reason": str(error)})
        server_may_know_sum = secure_sum.unmask_requested  # some users may have helped to remove its masks
        if server_may_know_sum:  # then the round costs privacy budget even without a result
            server.mechanisms.charge([server.users.index(user) for user in collector.survivors])
        server.skip_round(round_number)
        return []
    users_in_sum = collector.survivors
    why_skipped = skip_round_if_few(session, users_in_sum, answers, round_number)
    if why_skipped:
        session.observe({"event": "no_sum", "round": round_number, "reason": why_skipped})
        return []
    server.aggregate_sum(total, users_in_sum, round_number)
    return users_in_sum


@dataclass(kw_only=True)
class _SecureSum:
    """The server's side of one secure sum: requests its steps from clients, and processes their answers.

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

        A user that does not answer a step is left out of the later ones.

        Args:
            answers: Answers to the step "advertise", in which users send public keys, by name.
            largest: Largest magnitude of an entry of an upload.

        Raises:
            NoSumError: Too few users have answered a step, or the sum is out of range.
        """
        collector = self.collector
        self._process_answers(answers, self._store_keys)
        collector.require(collector.public_keys, "advertise")  # raises a NoSumError if users are too few

        # Users send shares of their secrets, encrypted for each other.
        self._request_step("share", collector.public_keys, self._public_keys_for, self._store_encrypted_shares)
        collector.require(collector.sharers, "share")

        # Users send masked uploads.
        self._request_step("mask", collector.sharers, self._encrypted_shares_for, self._add_masked_upload)
        collector.require(collector.survivors, "mask")

        # Users send the shares that remove the masks from the sum.
        self.unmask_requested = True
        users_in_sum = list(collector.survivors)
        self._request_step("unmask", users_in_sum, self._users_in_sum_for, self._store_revealed_shares)
        return collector.total(largest)

    # ---------------------------------------------------------------- messages to a user

    def _public_keys_for(self, name: str) -> Download:
        """Return the message for a user's step "share": the public keys of all users that have sent theirs."""
        return secure_client.all_keys_message(name, self._round, self.collector.public_keys)

    def _encrypted_shares_for(self, name: str) -> Download:
        """Return the message for a user's step "mask": the shares that the other users have encrypted for it."""
        return secure_client.sealed_shares_message(name, self._round, self.collector.sealed_for(name))

    def _users_in_sum_for(self, name: str) -> Download:
        """Return the message for a user's step "unmask": names of the users whose masked uploads are in the sum."""
        return secure_client.survivors_message(name, self._round, list(self.collector.survivors))

    # ---------------------------------------------------------------- messages of a user

    def _store_keys(self, name: str, message: Upload | Download) -> None:
        """Store the public keys that a user sends in the first step of a secure sum, from which masks are agreed."""
        self.collector.store_keys(name, secure_client.read_keys(message, name, self._round))

    def _store_encrypted_shares(self, name: str, message: Upload | Download) -> None:
        """Store a user's answer to the step "share": shares of its secrets, one for each other user.

        Each share is encrypted for its recipient ("sealed"), so that the server can forward it but not read it.

        Args:
            name: Name of the user.
            message: Message in the user's answer.
        """
        others = [other for other in self.collector.public_keys if other != name]
        shares = secure_client.read_shares(message, name, self._round, others, sealed=True)
        self.collector.store_sealed_shares(name, shares)

    def _add_masked_upload(self, name: str, message: Upload | Download) -> None:
        """Add a user's answer to the step "mask" to the sum: its upload as integers, hidden by masks.

        Args:
            name: Name of the user.
            message: Message in the user's answer.
        """
        terms = self.collector.terms
        bits_per_entry = terms.word  # uploads and masks are integers modulo 2 ** bits_per_entry
        masked = secure_client.read_masked(message, name, self._round, terms.entries, bits_per_entry)
        self.collector.add_upload(name, masked)

    def _store_revealed_shares(self, name: str, message: Upload | Download) -> None:
        """Store what a user sends in the last step of a secure sum: decrypted shares of other users' secrets.

        From enough shares of a secret the server removes masks from the sum of the uploads.
        """
        shares = secure_client.read_shares(message, name, self._round, self.collector.sharers, sealed=False)
        self.collector.store_revealed_shares(name, shares)

    @property
    def _round(self) -> int:
        """Number of the round whose uploads are summed, from 1."""
        return self.collector.terms.round

    def _request_step(
        self,
        step: str,
        names: Iterable[str],
        message_for: Callable[[str], Download],
        process_message: Callable[[str, Upload | Download], None],
    ) -> None:
        """Send users a task with one step of the secure sum, and process their answers.

        Args:
            step: Name of the step.
            names: Names of the users.
            message_for: Returns the message that a user needs for the step.
            process_message: Called with a user and the message in its answer; raises a MessageError if it is wrong.
        """
        messages = {name: pack(message_for(name)) for name in names}
        steps = dict.fromkeys(messages, (step,))
        round_index = self._round - 1  # tasks count rounds from 0, secure sums from 1
        answers = self.session.ask(steps, round_index, messages=messages)
        self._process_answers(answers, process_message)

    def _process_answers(
        self, answers: Mapping[str, Answer], process_message: Callable[[str, Upload | Download], None]
    ) -> None:
        """Process answers in the order of the users; log and skip those that fail a check.

        Args:
            answers: Answers by name.
            process_message: Called with a user and the message in its answer; raises a MessageError if it is wrong.
        """
        for name in self.session.public.users:
            if name not in answers:
                continue
            answer = answers[name]
            try:
                if "left_out" in answer.reported:  # the client did not carry out the step, and says why
                    raise MessageError(str(answer.reported["left_out"]))
                if not answer.messages:
                    raise MessageError("no message for the secure sum in the answer")
                process_message(name, unpack(answer.messages[0]))
            except MessageError as error:
                log_rejection(self.session.observe, self._round, name, str(error))


RoutingMetrics = Mapping[str, Mapping[str, Any]]
"""Gates and mixture weights that clients have reported, by user name."""


def routing_event(session: ServerSession, reported: RoutingMetrics) -> dict[str, Any]:
    """Return the fields of an evaluation event with the users' mean gates and mixture weights.

    Args:
        session: The run's server, which sends tasks to clients and reads their answers.
        reported: Metrics that clients have reported, by user.
    """
    return {**_mean_gates(session, reported), **_mixtures(session, reported)}


def _mean_gates(session: ServerSession, reported: RoutingMetrics) -> dict[str, Any]:
    """Return the fields of an evaluation event with the mean gates that users report; skip gates of a wrong size.

    Args:
        session: The run's server, which sends tasks to clients and reads their answers.
        reported: Metrics by user; ``gates`` has a list for each layer, with the mean gate of each expert.

    Returns:
        ``experts`` has the names of each user's experts, and ``expert_scores`` each user's gates. Empty if the model
        has no token routers or no user reports gates.
    """
    users, model, method = session.public.users, session.model, session.context.method
    if not model.routed:
        return {}
    experts_by_user, gates_by_user = {}, {}
    for name, metrics in reported.items():
        if "gates" not in metrics:  # the user keeps them private
            continue
        expert_names = model.expert_names(users.index(name))
        if "specialists" in session.joined.get(name, {}):  # the client has chosen another number of specialists
            generalists, specialists = method.placement.generalists, session.joined[name]["specialists"]
            expert_names = number_experts([GENERALIST] * generalists + [SPECIALIST] * specialists)
        has_gate_of_each_expert = all(len(layer) == len(expert_names) for layer in metrics["gates"])
        if has_gate_of_each_expert:
            experts_by_user[name] = expert_names
            gates_by_user[name] = metrics["gates"]
    # The server does not know the number of layers, so it takes the most common one.
    num_layers = _most_common([len(layers) for layers in gates_by_user.values()], default=0)
    if num_layers == 0:
        return {}
    names = [name for name, layers in gates_by_user.items() if len(layers) == num_layers]
    return {
        "experts": {name: experts_by_user[name] for name in names},
        "expert_scores": {name: gates_by_user[name] for name in names},
    }


def _mixtures(session: ServerSession, reported: RoutingMetrics) -> dict[str, Any]:
    """Return fields for the evaluation event: the weights with which each user's model mixes several models.

    Some methods mix models, on the server or on each user's client. A server has the weights of all users in its state;
    clients report theirs.

    Args:
        session: The server's side of the federation.
        reported: Metrics that clients report, by user; "mixture" has the user's weight of each model, such as
            ``[0.2, 0.8]``.

    Returns:
        The fields; empty if the method does not mix models.
    """
    method = session.context.method
    state_of_server = session.server.kept
    server_weights = method.server.merging_weights(state_of_server)  # (users, models); None if the server does not mix
    if server_weights is not None:
        return mixtures_event(session.public.users, server_weights.double().cpu(), method)
    # Users mix models that they all train together, one per cluster of users, or else models that the server sends.
    mixture = method.placement.mixture
    num_models = mixture.clusters if mixture is not None else method.server.server_models
    weights_by_user = {}  # without those of a wrong length, which a faulty client may report
    for name, metrics in reported.items():
        weights = metrics.get("mixture", ())
        if len(weights) == num_models:
            weights_by_user[name] = weights
    if not weights_by_user:
        return {}
    weight_matrix = torch.tensor(list(weights_by_user.values()), dtype=torch.float64)  # (users, models)
    return mixtures_event(list(weights_by_user), weight_matrix, method)


ClientReports = dict[str, Mapping[str, Any]]
"""Metrics that clients have reported, by user name."""


class NetworkBackend(Backend[ClientReports]):
    """Backend of a federation: clients on other machines, the server in this process."""

    remote = True

    def __init__(self, session: ServerSession, *, stopped_after: int | None = None):
        """Create the backend of a new or resumed run.

        Args:
            session: Sends tasks to clients and receives their answers.
            stopped_after: Number of rounds after which the privacy budget of a resumed run was spent; None if it is not
                spent.
        """
        self.session, self.server, self.stopped_after = session, session.server, stopped_after
        # Of the current round:
        self._plan: RoundPlan | None = None
        self._training_answers: Mapping[str, Answer] = {}  # of the participants, by user
        self._evaluation_answers: Mapping[str, Answer] | None = None  # None if the training task does not evaluate
        self._senders: list[str] = []  # users whose uploads were aggregated

    @property
    def _names(self) -> Sequence[str]:
        """Names of all users of the run."""
        return self.session.public.users

    @property
    def rounds(self) -> int:
        """Number of rounds of the run: as planned, or until the privacy budget is spent."""
        context = self.session.context
        return context.planned_rounds if self.stopped_after is None else self.stopped_after

    def start(self, observe: Observer, clock: Clock) -> tuple[RunPlan, int]:
        """Prepare the session for the first round; warn of phases that never run, and of secure sums of two uploads.

        In a sum of two uploads, each of the two users can compute the other's.

        Args:
            observe: Receives events.
            clock: Counts time and bytes.

        Returns:
            The settings of the run, and its number of rounds.
        """
        self.session.observe, self.session.clock = observe, clock
        run_settings = self.session.context.plan
        warn_of_untrained(run_settings, self.session.local_steps)
        warn_of_small_sums(run_settings, self.session.network.min_participants, self.rounds)
        # A resumed server repeats the rounds after its checkpoint, and clients can revert only their last tasks.
        with_checkpoint_every_round = run_settings.updated("checkpoints", every=1)
        return with_checkpoint_every_round, self.rounds

    def select_participants(self, plan: RoundPlan) -> Sequence[int] | None:
        """Return the indices of a round's participants; None if the privacy budget is spent, which ends the run."""
        run_settings = self.session.context.plan
        users_upload = plan.exchanges  # a round without uploads costs no budget
        participants = self.server.invite(run_settings, plan.number, releases=users_upload)
        if participants is None:
            num_rounds_done = plan.number  # rounds are counted from 0
            self.stopped_after = num_rounds_done
        return participants

    def train(self, plan: RoundPlan, participants: Sequence[int]) -> RoundResult:
        """Let participants download, train, and upload if the plan says so; with secure aggregation, also aggregate.

        If the plan evaluates local models, all users evaluate, participants after training.

        Args:
            plan: Plan of the round.
            participants: Indices of the participants among all users.

        Raises:
            RunError: Too few participants answered in time.
        """
        session, names = self.session, [self._names[index] for index in participants]
        evaluates_locally = plan.evaluates == "local"
        has_secure_sum = plan.exchanges and self.server.sums is not None
        participant_steps = ["receive", "train"]
        if has_secure_sum:
            participant_steps.append("advertise")  # the first step of a secure sum
        elif plan.exchanges:
            participant_steps.append("upload")
        if evaluates_locally:
            participant_steps.append("evaluate")
        steps_by_user: dict[str, Sequence[str]] = dict.fromkeys(names, tuple(participant_steps))
        if evaluates_locally:
            for name in self._names:
                is_participant = name in steps_by_user
                if not is_participant:
                    steps_by_user[name] = ("receive", "evaluate")
        round_from_0, round_from_1 = plan.number, plan.done
        answers = session.ask(steps_by_user, round_from_0, arguments={"done": plan.done})
        training_answers = {name: answers[name] for name in names if name in answers}
        _raise_if_too_few(session, len(training_answers), len(names), round_from_1)
        self._plan, self._training_answers = plan, training_answers
        self._evaluation_answers = answers if evaluates_locally else None
        self._senders = []
        if has_secure_sum:
            self._senders = aggregate_secure_sum(session, training_answers, round_from_1)
        return _round_result({name: answer.reported for name, answer in training_answers.items()})

    def aggregate(self) -> str:
        """Aggregate the valid uploads of the round; a secure sum was aggregated in :meth:`train` already.

        Returns:
            Why no uploads were aggregated; an empty string if they were.

        Raises:
            RunError: No upload is valid, or the result is not finite.
        """
        assert self._plan is not None
        why_skipped = ""
        round_from_0, round_from_1 = self._plan.number, self._plan.done
        uses_secure_sums = self.server.sums is not None
        if not uses_secure_sums:
            self._senders, why_skipped = aggregate_uploads(self.session, self._training_answers, round_from_1)
        if self.server.method.server.peer_to_peer:
            # The server only passes uploads on: each sender downloads those of the others.
            steps_by_user = dict.fromkeys(self._senders, ("receive",))
            self.session.ask(steps_by_user, round_from_0)
            self.server.clear_uploads()
        return why_skipped

    def evaluate(
        self, done: int, *, receives: bool, finishes: bool, silent: bool
    ) -> tuple[ClientReports | None, dict[str, Any]]:
        """Let all users evaluate, and find out from their validation losses whether this round is the best so far.

        Args:
            done: Number of rounds that are done; 0 before the first one.
            receives: Whether users download the newest model before they evaluate.
            finishes: Whether users carry out the method's final step before they evaluate; after the last round only.
            silent: Whether this evaluation repeats one from before the run was interrupted. Its validation losses have
                been compared then, so they are ignored.

        Returns:
            The metrics that clients report (None if there are none), and the evaluation event.
        """
        answers = self._evaluation_answers  # None unless users have evaluated in the same task in which they trained
        self._evaluation_answers = None
        if answers is None:
            steps = []
            if receives:
                steps.append("receive")
            if finishes:
                steps.append("finish")
            steps.append("evaluate")
            last_round = max(0, done - 1)  # counted from 0
            answers = self.session.ask(dict.fromkeys(self._names, tuple(steps)), last_round, arguments={"done": done})
        reported: ClientReports = {}
        for name in self._names:
            if name in answers and answers[name].reported.get("evaluated"):
                reported[name] = answers[name].reported
        measure = _measure(reported)
        scores = {}
        for name, report in reported.items():
            user_scores = report.get("score", {})  # missing if the user keeps its scores private
            if f"test_{measure}" in user_scores:
                scores[name] = dict(user_scores)
        event = evaluation_event(scores, measure, done=done, iterations=done * self.session.local_steps)
        losses = {} if silent else validation_losses(self.session, answers, done)
        if losses:
            event["mean_valid_loss"] = self._compare_validation_losses(losses, done)
            event["valid_loss"] = {name: loss for name, loss in losses.items() if name in reported}
        return reported or None, {**event, **routing_event(self.session, reported)}

    def _compare_validation_losses(self, losses: dict[str, float], done: int) -> float:
        """Compare the mean of users' validation losses with the lowest mean so far; next tasks tell users the result.

        Args:
            losses: Validation losses in nats, by name.
            done: Number of rounds that are done.

        Returns:
            The mean in nats.
        """
        lowest_before = self.server.best.loss
        verdict_for_all = self.server.judge(validation_report(losses, done), self._names)
        for name, verdict in zip(self._names, verdict_for_all.split(), strict=True):  # one message for each user
            self.session.clients[name].verdict = verdict  # whether the user's model is the best so far
        is_best_so_far = self.server.best.loss < lowest_before
        if is_best_so_far:
            self.session.best_round = done
        return fmean(losses.values())

    def choose(self, rounds: int, scores: ClientReports | None) -> ClientReports | None:
        """Let clients restore the models of the best round, if the recipe selects it, and return their metrics.

        Args:
            rounds: Number of rounds of the run.
            scores: Metrics of the evaluation after the last round.

        Returns:
            Metrics of the final models, by user; None if no user reports any.
        """
        if self.session.context.plan.evaluation.select != "best":
            return scores
        last_round_is_best = self.session.best_round == rounds
        # In the step "choose" a client restores its stored model of the best round.
        if last_round_is_best:  # `scores` are the metrics of this model, so clients need not evaluate again
            self.session.ask(dict.fromkeys(self._names, ("choose",)), rounds)
            return scores
        answers = self.session.ask(dict.fromkeys(self._names, ("choose", "evaluate")), rounds)
        if not answers:
            return None
        return {name: answer.reported for name, answer in answers.items()}

    def summarise(self, reported: ClientReports | None) -> Metrics:
        """Return the metrics of the finished run: those that users report, their mean, and times and bytes.

        Users that do not report a test score and the number of trainable parameters are left out.

        Args:
            reported: Reports of the last evaluation, by user; None if there was none.
        """
        session, context = self.session, self.session.context
        reported = reported or {}
        measure = _measure(reported)  # of test scores, such as "loss"
        metrics_by_user = {}
        for name, report in reported.items():
            metrics = report.get("metrics", {})
            has_score = metrics.get(f"test_{measure}") is not None
            if has_score and metrics.get("trainable_parameters") is not None:
                metrics_by_user[name] = dict(metrics)
        units = [str(joined["unit"]) for joined in session.joined.values() if "unit" in joined]  # such as "tokens"
        selects_best = context.plan.evaluation.select == "best"
        round_of_final_models = session.best_round if selects_best else self.rounds
        return metrics_of(
            metrics_by_user,
            session.model,
            context.plan,
            session.clock,
            rounds=self.rounds,
            selected=round_of_final_models,
            measure=measure,
            unit=_most_common(units, default="tokens"),
        )


def warn_of_small_sums(plan: RunPlan, min_participants: int, rounds: int) -> None:
    """Warn if a secure sum without noise may have two uploads: each of the two users can compute the other's.

    Args:
        plan: Settings of the run, in the form that training uses.
        min_participants: The setting ``network.min_participants``, below which no sum is published.
        rounds: Number of rounds.
    """
    sums = plan.sums
    if sums is None or rounds == 0:
        return
    if plan.privacy is None or plan.privacy.noisy:  # secure sums are part of the section `privacy`: it is not None
        return
    participants_by_round, needed_by_round = [], []
    for number in range(1, rounds + 1):
        num_participants = sums.num_selected(number)
        needed_by_server = min(min_participants, num_participants)
        needed_by_protocol = sums.num_required(number)
        participants_by_round.append(num_participants)
        needed_by_round.append(max(needed_by_protocol, needed_by_server))
    if min(needed_by_round) == LEAST_USERS_IN_SUM:  # a sum of two uploads, the fewest that the protocol allows
        logger.warning(
            "privacy.secure_aggregation: got sums of at least %d of %d users; each of two users in a sum can compute "
            "the other's upload; with 3 users or more set network.min_participants to 3 and raise "
            "privacy.secure_aggregation.threshold so that a sum needs 3, or add noise (mechanism: central)",
            LEAST_USERS_IN_SUM, min(participants_by_round),
        )  # fmt: skip


def _round_result(reports: Mapping[str, Mapping[str, Any]]) -> RoundResult:
    """Return the result of a round's training from the values that participants report, by user."""
    # Clients train in parallel, so the slowest one counts.
    seconds = max((float(report.get("train_seconds", 0.0)) for report in reports.values()), default=0.0)
    num_trained = sum("left_out" not in report for report in reports.values())
    return RoundResult(
        losses={name: report["train_loss"] for name, report in reports.items() if "train_loss" in report},
        users=num_trained,
        tokens=sum(int(report.get("tokens", 0)) for report in reports.values()),
        steps={name: int(report["local_steps"]) for name, report in reports.items() if "local_steps" in report},
        seconds=seconds,
    )


def _raise_if_too_few(session: ServerSession, num_answers: int, num_participants: int, number: int) -> None:
    """Raise an error if fewer participants of a round than ``network.min_participants`` have answered.

    Args:
        session: The run's server, which sends tasks to clients and reads their answers.
        num_answers: Number of participants that have answered the training task.
        num_participants: Number of participants of the round.
        number: The round, from 1.

    Raises:
        RunError: Too few have answered.
    """
    num_needed = min(session.network.min_participants, num_participants)  # all, if the round has fewer
    if num_answers >= num_needed:
        return
    message = (
        f"round {number}: {num_answers} of {num_participants} participants answered in "
        f"{session.network.round_timeout:g} s; needed: {num_needed}; start the same command again to continue, or "
        "raise network.round_timeout"
    )
    declined = [f"{name}: {client.declined}" for name, client in session.clients.items() if client.declined]
    raise RunError("; ".join([message, *declined[:_MAX_LISTED_DECLINES]]))


def _measure(reported: ClientReports) -> str:
    """Return the measure of test scores, such as "loss", that most users report."""
    measures = [str(report["measure"]) for report in reported.values() if "measure" in report]
    return _most_common(measures, default="loss")


def _most_common(values: Sequence[Value], *, default: Value) -> Value:
    """Return the most common value, the first among equals; ``default`` if there are no values."""
    if not values:
        return default
    [(most_common, _count)] = Counter(values).most_common(1)
    return most_common
