"""A backend with all users and their server in one process.

The messages of a cohort stay stacked. Their sizes are counted as if each were sent separately.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from comingle.config.settings import AUTO, MEMORY, Terms
from comingle.data.populations import digest_names
from comingle.models.hardware import return_freed_memory
from comingle.privacy.base import PrivacyMechanism
from comingle.privacy.secure_sum import VECTOR, Sums, as_words, keys_bytes, received_bytes, sent_bytes
from comingle.protocol.messages import (
    LOSS,
    Download,
    Upload,
    join_downloads,
    join_uploads,
    no_uploads,
    validation_report,
)
from comingle.protocol.wire import pack, packed_bytes, unpack
from comingle.training.backends.base import Backend, RoundPlan, RoundResult, log_rejection
from comingle.training.batch_sources import AnyScore
from comingle.training.checkpoints import (
    Clock,
    Progress,
    load_checkpoint,
    load_server,
    load_users,
    newest_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from comingle.training.client import EMPTY_ROUND, Clients, LocalRound, finetuned, finish, first_downloads, settle, train
from comingle.training.evaluation import (
    check_finite,
    data_amounts,
    evaluation_event,
    evaluation_interval,
    measure_among,
    merged_mixtures_event,
    sample_entry,
    users_report,
    warn_of_share,
)
from comingle.training.events import Event, Observer
from comingle.training.plan import keep_key, key_of, set_key, terms_of
from comingle.training.server import ServerHalf, start_server
from comingle.training.settings import RunPlan, cohorts, warn_of_untrained
from comingle.training.state import State, check_names, reorder, reorder_kept
from comingle.training.steps import diverged
from comingle.utils.errors import NoSumError, RunError
from comingle.utils.files import list_checkpoints
from comingle.utils.records import JsonMapping, JsonObject, write_json
from comingle.utils.trees import Tree

logger = logging.getLogger("comingle")

SumMasked = Callable[[Terms, Mapping[str, np.ndarray], int], np.ndarray]
"""Sums the uploads of users, by name, through masks that cancel out; entries are at most the last argument."""


@dataclass(frozen=True, kw_only=True)
class RoundReport:
    """Result of the local steps of a round.

    Attributes:
        losses: Mean training loss of each accepted user, by name.
        rejected: Reason why a user's update was rejected, by name.
        steps: Number of local steps that each user took, by name, if users report it.
        suspect_optimizers: Optimizers that may have made the first rejected user's loss infinite or NaN.
        tokens: Number of tokens trained on.
        seconds: Time of the local steps.
    """

    losses: dict[str, float]
    rejected: dict[str, str]
    steps: dict[str, int]
    suspect_optimizers: list[str]
    tokens: int
    seconds: float


@dataclass(kw_only=True)
class InProcess(Backend[Sequence[AnyScore]]):
    """All users and their server in one process: messages are tensors with a row per user, and their bytes are counted.

    Attributes:
        clients: The users.
        server: Their server.
        serialise: Whether every message is packed and unpacked, as over a network.
        sum_masked: Simulates secure sums (:func:`comingle.privacy.secure_server.simulate_sum`); without it
            the numbers are added directly.
        clock: Counts time and bytes.
        observe: Called with every event.
        is_first_process: Whether this process has the server and logs the run.
    """

    clients: Clients
    server: ServerHalf
    serialise: bool = False
    sum_masked: SumMasked | None = None
    clock: Clock = field(default_factory=Clock)
    observe: Observer = lambda event: None
    is_first_process: bool = field(default=True, init=False)
    _upload_of_round: Upload | None = None
    _amounts: Sequence[int] | None = None
    """Amounts of data from which the evaluation interval was computed, until the first evaluation has been timed."""

    def merge_users(self, work: Callable[[], JsonMapping]) -> JsonObject:
        """Return the mapping that ``work`` returns; with several processes, merge their mappings in the first one."""
        return dict(work())

    # ---------------------------------------------------------------- rounds

    def start(self, observe: Observer, clock: Clock) -> tuple[RunPlan, int]:
        """Prepare the rounds of a run; replace ``evaluation.every: auto`` by a number of rounds between evaluations.

        Args:
            observe: Called with each event.
            clock: Counts the time and the bytes of the run.

        Returns:
            The plan with the interval, and the number of rounds after which the run ends.
        """
        self.observe, self.clock = observe, clock
        clients = self.clients
        if clients.method.trains:
            if clients.plan.evaluation.every == AUTO:
                clients.plan = clients.plan.updated("evaluation", every=self._resolve_eval_interval())
            if self.is_first_process:
                warn_of_untrained(clients.plan, clients.steps.local_steps)  # roles whose phase needs more local steps
        return clients.plan, clients.rounds_done  # as planned, or fewer if a resumed run has spent its privacy budget

    def _resolve_eval_interval(self) -> int:
        """Return the number of rounds between evaluations with which they take at most 10% of the training time."""
        self._amounts = data_amounts(self.clients)  # tokens to train on and to score; also for a later warning
        return evaluation_interval(self.clients.plan, self._amounts, len(self.clients.population_names))

    def select_participants(self, plan: RoundPlan) -> Sequence[int] | None:
        """Return the numbers of a round's participants; None ends the run because the privacy budget is spent.

        Args:
            plan: Plan of the round. If it has no upload (``exchanges`` is False), it costs no privacy budget.
        """
        participants = self.server.invite(self.clients.plan, plan.number, releases=plan.exchanges)
        if participants is None:
            self.clients.stopped_after = plan.number  # counted from 0, so this many rounds are done
        return participants

    def train(self, plan: RoundPlan, participants: Sequence[int]) -> RoundResult:
        """Have participants download shared tensors, take their local steps, and upload if the round has an exchange.

        Participants whose loss or tensors are not finite are rejected if the method drops such users; they upload
        nothing.

        Args:
            plan: Plan of the round.
            participants: Numbers of the users that were selected for the round.

        Raises:
            DivergenceError: The loss or tensors of a user are not finite, and the method does not drop such users.
        """
        self.download(participants)
        local_round = self._take_local_steps(plan, participants)
        report = self._report_round(local_round)
        for name, reason in report.rejected.items():
            log_rejection(self.observe, plan.done, name, reason)
        self._require_losses(report)
        if plan.exchanges:
            accepted = list(local_round.losses)  # numbers of the users that were not rejected
            self.upload(accepted, plan.done, local_round.losses)
        return RoundResult(
            losses=report.losses,
            users=len(report.losses),
            tokens=report.tokens,
            seconds=report.seconds,
            steps=report.steps,
        )

    def _take_local_steps(self, plan: RoundPlan, participants: Sequence[int]) -> LocalRound:
        """Have participants take their local steps, and log the progress."""
        if not participants:
            return EMPTY_ROUND

        def log_progress(advance: int) -> None:
            self.observe({"event": "step", "advance": advance, "round": plan.done})

        log_progress(advance=0)  # shows that the round has begun
        # ``plan.number`` counts rounds from 0; ``plan.done``, which events contain, counts from 1.
        return train(self.clients, participants, plan.number, lambda: log_progress(advance=1))

    def _report_round(self, local_round: LocalRound) -> RoundReport:
        """Return the result of a round by user name, in a form that processes can exchange."""
        clients = self.clients
        names = clients.names
        suspect_optimizers: list[str] = []
        if local_round.rejected:  # the error message names suspects if all participants were rejected
            first_rejected = next(iter(local_round.rejected))
            row = clients.state.rows_of([first_rejected])[0]
            suspect_optimizers = list(clients.steps.suspect_optimizers(first_rejected, row))
        steps: dict[str, int] = {}
        if clients.plan.reports_steps:  # if the numbers may differ, as with a time limit; never with privacy
            steps = {names[user]: num_steps for user, num_steps in local_round.steps.items()}
        return RoundReport(
            losses={names[user]: loss for user, loss in local_round.losses.items()},
            rejected={names[user]: reason for user, reason in local_round.rejected.items()},
            steps=steps,
            suspect_optimizers=suspect_optimizers,
            tokens=local_round.tokens,
            seconds=local_round.seconds,
        )

    def _require_losses(self, report: RoundReport) -> None:
        """Raise an error if all participants of a round were rejected, so that there is nothing to aggregate.

        Args:
            report: Result of the local steps. Rejected users, such as those with tensors that are not finite, have no
                loss in it.

        Raises:
            DivergenceError: All were rejected; names the first one.
        """
        if report.rejected and not report.losses:
            name, reason = next(iter(report.rejected.items()))
            raise diverged(name, reason, report.suspect_optimizers)

    def evaluate(self, done: int, *, receives: bool, finishes: bool, silent: bool) -> tuple[Sequence[AnyScore], Event]:
        """Score the models of the evaluated users; store all models if the validation loss is the lowest so far.

        Args:
            done: Number of rounds that are done.
            receives: Whether users first download the newest shared tensors, if they have older ones.
            finishes: Whether users first make their final models, as some methods do once, after the last exchange.
            silent: Do not log this evaluation, as it was logged before the run was interrupted.

        Returns:
            The scores and the evaluation event, which is empty if another process logs it.

        Raises:
            DivergenceError: The loss of a user is not finite.
        """
        clients, server = self.clients, self.server
        if receives:
            self.download(clients.scored_trainers)
        if finishes:
            self._make_final_models()
        if not silent:
            self.observe({"event": "step", "advance": 0, "round": done, "evaluating": True})  # for progress bars
        started = time.perf_counter()
        scores, valid_losses = self._score(done)
        self._warn_if_slow(time.perf_counter() - started)

        event_of_losses: JsonObject = {}
        selects_best_round = bool(clients.state.best)  # evaluation.select: best
        if selects_best_round:
            event_of_losses["mean_valid_loss"] = self.report_losses(done, valid_losses)
            event_of_losses["valid_loss"] = self.merge_users(lambda: valid_losses)  # by user
        report = self.merge_users(lambda: users_report(clients, scores))
        if not self.is_first_process:  # the first process logs the event
            return scores, {}
        measure = measure_among(report["users"])
        event = evaluation_event(report["users"], measure, done=done, iterations=done * clients.steps.local_steps)
        event.update(sample_entry(clients, report["users"], measure))
        event.update(event_of_losses)
        event.update(report["routing"])
        event.update(merged_mixtures_event(clients, server, report["mixtures"]))
        return scores, event

    def _warn_if_slow(self, seconds: float) -> None:
        """Warn if evaluations take a large share of the run, judging from the time of the first one.

        Args:
            seconds: Time that this evaluation has taken.
        """
        # `_amounts` are tokens to train on and to score, from which the interval between evaluations was computed.
        if self._amounts is None:  # warned before, or the recipe sets the interval
            return
        warn_of_share(self.clients.plan, self._amounts, len(self.clients.population_names), seconds=seconds)
        self._amounts = None

    def _score(self, done: int) -> tuple[Sequence[AnyScore], dict[str, float]]:
        """Return the test scores of evaluated users and, if the best round is selected, validation losses by name."""
        clients = self.clients
        is_last_round = done >= clients.plan.training.rounds
        scores_all_users = len(clients.scored) == len(clients.users)
        # Compute tensors that depend on trained ones, such as ensemble weights: for all users after the last round, as
        # all final models are kept, else only for the scored ones.
        settle(clients, all_users=is_last_round or scores_all_users)
        selects_best_round = bool(clients.state.best)
        with finetuned(clients, done):  # once for test and validation
            scores = clients.evaluate()
            valid_losses = clients.validate() if selects_best_round else {}
        check_finite(clients, scores, done)
        return scores, valid_losses

    def _make_final_models(self) -> None:
        """Run the ``finish`` hooks of the method, after the last exchange."""
        finish(self.clients)

    def choose(self, rounds: int, scores: Sequence[AnyScore] | None) -> Sequence[AnyScore] | None:
        """Choose the final models of a run after its last round, and return their test scores.

        With ``evaluation.select: best`` they are the models of the round with the lowest validation loss, which are
        restored; otherwise those of the last round.

        Args:
            rounds: Number of rounds that are done.
            scores: Test scores of the models after these rounds; None if they were not scored.
        """
        self.clients.restore_best_round()  # does nothing unless the recipe selects the best round
        if self.clients.chosen_round == rounds:  # the models were scored after the last round
            return scores
        return self._score_final_models()

    def _score_final_models(self) -> Sequence[AnyScore]:
        """Return the test scores of the models with which the run ends, fine-tuned if the method does so."""
        with finetuned(self.clients):
            return self.clients.evaluate()

    # ---------------------------------------------------------------- the run folder

    def open_folder(self, folder: Path, *, resume: bool) -> bool:
        """Prepare a run folder, and return whether it has a checkpoint to restore.

        With ``runtime.store: disk`` the users' tensors are written to files in this folder from now on.

        Args:
            folder: The run folder.
            resume: Whether to resume the run; if not, old files of its store are deleted.
        """
        found = resume and bool(list_checkpoints(folder))
        self.clients.state.open(folder, new_run=not found)
        return found

    def keep_key(self, folder: Path | None, *, resume: bool) -> None:
        """Set the key of the privacy noise to the one in the run folder; without a folder, to one common key."""
        set_key(self._load_or_create_key(folder, resume=resume), *self._all_mechanisms)

    @property
    def _all_mechanisms(self) -> tuple[PrivacyMechanism, ...]:
        """Privacy mechanisms of clients and server."""
        return *self.clients.mechanisms, *self.server.mechanisms

    def _load_or_create_key(self, folder: Path | None, *, resume: bool) -> str:
        """Return the key from which the privacy noise is drawn.

        If the noise is secret, a new run stores a new key in its folder, and a resumed run reads it from there.

        Args:
            folder: Run folder; None for a run without a folder.
            resume: Whether the run is resumed.
        """
        if folder is not None:
            # A run that has logged events may have drawn noise, so its key must not be replaced.
            has_begun = resume and (folder / "events.jsonl").exists()
            keep_key(folder, *self._all_mechanisms, overwrite=not resume, begun=has_begun)
        return key_of(*self._all_mechanisms)

    def write_record(self, path: Path, content: Mapping[str, object]) -> None:
        """Write a JSON file."""
        write_json(path, content)

    def save(self, folder: Path, progress: Progress, *, keep: int) -> None:
        """Write the checkpoint of a round, and delete all but the newest ``keep``.

        Args:
            folder: Run folder.
            progress: Progress of the run.
            keep: Number of checkpoints to keep.

        Raises:
            RunError: The disk cannot be written to; older checkpoints stay.
        """
        save_checkpoint(folder, self.clients.model.layout, self.clients.state, self.server.state, progress)
        prune_checkpoints(folder, keep)

    def restore(self, folder: Path, fingerprint: str) -> Progress:
        """Restore users and server from the newest checkpoint in a run folder.

        Args:
            folder: The run folder.
            fingerprint: Expected fingerprint of the recipe.

        Returns:
            The progress that the checkpoint records: rounds, times and bytes so far.

        Raises:
            RunError: There is no checkpoint, or it is damaged, has another fingerprint or has other users.
        """
        newest, progress = self._find_checkpoint(folder, fingerprint)
        clients = self.clients
        clients.stopped_after = progress.round if progress.stopped else None
        server_state = self._load_state(newest, progress)
        clients.update_masks()  # users with a smaller LoRA rank have padded tensors, so masks depend on restored ranks
        # With a store on disk the users are in the order of this run, which ``_find_checkpoint`` has checked.
        names = clients.population_names if self._has_store_on_disk(progress) else progress.trainers
        self._restore_server(server_state, names)
        return progress

    def _has_store_on_disk(self, progress: Progress) -> bool:
        """Return whether the users' tensors are on disk (``runtime.store: disk``), in this run or in the checkpoint's.

        Such a checkpoint records a digest of the users' names, ``population``, instead of the names themselves.

        Args:
            progress: Progress that the checkpoint records.
        """
        return bool(progress.population) or not self.clients.state.in_memory

    def _find_checkpoint(self, folder: Path, fingerprint: str) -> tuple[Path, Progress]:
        """Return the newest checkpoint of a run folder and its progress; check that it has the users of this run.

        Args:
            folder: Run folder.
            fingerprint: Expected fingerprint of the recipe.

        Raises:
            RunError: There is no checkpoint, or it is from another recipe or has other users.
        """
        newest, progress = newest_checkpoint(folder, fingerprint)
        names = self.clients.population_names
        if self._has_store_on_disk(progress):
            _check_population(newest, progress, names, in_memory=self.clients.state.in_memory)
        else:
            check_names(newest, progress.trainers, names)
        return newest, progress

    def _load_state(self, checkpoint: Path, progress: Progress) -> Tree:
        """Restore the users' tensors from a checkpoint, and return the server's state in it.

        Args:
            checkpoint: Folder of the checkpoint.
            progress: Progress that it records, with the names of its users or how they are stored.

        Returns:
            The server's state, in which users have the order of the checkpoint.
        """
        clients = self.clients
        was_written_by_several = bool(progress.shards)
        was_stored_on_disk = bool(progress.population)
        if was_written_by_several or was_stored_on_disk:  # users and server are in different files
            self._load_users(checkpoint, progress)
            return self._load_server(checkpoint, progress)
        state, server_state = load_checkpoint(checkpoint, clients.model.layout, clients.state, self.server.state)
        clients.state = reorder(state, progress.trainers, clients.population_names)
        return server_state

    def _load_users(self, checkpoint: Path, progress: Progress) -> None:
        """Restore the tensors of this process's users, from the checkpoint's files or from the store on disk.

        Args:
            checkpoint: Folder of the checkpoint.
            progress: Progress that it records, with the users in each of its files.
        """
        clients = self.clients

        def load_into_memory() -> State:  # not called by a store on disk
            return load_users(checkpoint, progress, clients.model.layout, clients.state, clients.names)

        clients.state = clients.state.load(checkpoint, load_into_memory)

    def _load_server(self, checkpoint: Path, progress: Progress) -> Tree:
        """Return the server's state from a checkpoint."""
        return load_server(checkpoint, progress, self.server.state, self.clients.state.rows.device)

    def _restore_server(self, server_state: Tree, names: Sequence[str]) -> None:
        """Set the server to the state in a checkpoint, with users in the order of this run.

        Args:
            server_state: The server's state by tensor name; some tensors have a row per user.
            names: Names of the users in the order of these rows.
        """
        in_order_of_run = reorder_kept(server_state, names, self.clients.population_names, self.server.by_user)
        self.server.restore(in_order_of_run)

    # ---------------------------------------------------------------- messages

    def download(self, users: Sequence[int]) -> None:
        """Send the server's newest shared tensors to those users that still have older ones, in several messages.

        Args:
            users: Numbers of the users.
        """
        if not self.clients.shares:
            return
        stale = self.clients.stale(self.server.version, users)
        stale_names = [self.clients.names[user] for user in stale]
        # With peer-to-peer methods the server has a download only for users that have uploaded in this round.
        names = self.server.with_download(stale_names)
        first, later = first_downloads(self.clients, names)
        for names_of_message in cohorts(first, self.clients.users_per_message):  # several messages, to limit memory
            self._send_downloads(names_of_message)
        for names_of_message in cohorts(later, self.clients.users_per_message):
            self._send_downloads(names_of_message, once=False)

    def _send_downloads(self, names: Sequence[str], *, once: bool = True) -> None:
        """Send users the server's shared tensors in one message, and count the bytes as if each got its own.

        Args:
            names: Names of the users.
            once: Include the tensors that a user downloads once.
        """
        message = self.server.download(names, once=once)
        self.clock.download_bytes += sum(packed_bytes(message))
        if self.serialise:  # pack and unpack each user's message, as over a network
            message = _repack_downloads(message.split())
        self.clients.receive(message)

    @property
    def _copies_uploads(self) -> bool:
        """False if the tensors of an upload stay those of the users until the server has added them up."""
        may_change = bool(self.clients.method.client.settling)  # by an evaluation before the server aggregates
        return may_change or not self.server.needs_only_sums

    def upload(self, users: Sequence[int], round_number: int, losses: dict[int, float]) -> None:
        """Make the upload of users for :meth:`aggregate`: their shared tensors and training losses.

        Args:
            users: Numbers of the users.
            round_number: The round, counted from 1.
            losses: Mean training loss of each user.
        """
        if not users:
            self._upload_of_round = no_uploads(round_number)
            return
        reports = {LOSS: torch.tensor([losses[user] for user in users])}
        message = self.clients.upload(users, round_number, reports, copies=self._copies_uploads)
        has_secure_sum = self.server.sums is not None
        if has_secure_sum:  # its messages have other sizes than the upload
            self._count_sum_bytes(message.users, round_number)
        else:
            self.clock.upload_bytes += sum(packed_bytes(message))
            if self.serialise:
                message = _repack_uploads(message.split())
        self._upload_of_round = message

    def aggregate(self) -> str:
        """Aggregate the uploads of the round.

        With peer-to-peer methods, participants download the models of their peers in the same round.

        Returns:
            Reason why a secure sum failed, for example too few users; empty if it succeeded or the run has none.
        """
        assert self._upload_of_round is not None
        upload = self._upload_of_round
        self._upload_of_round = None
        if self.server.sums is not None:
            return self._aggregate_secure_sum(self.server.sums, upload)
        self.server.aggregate(upload)
        if self.clients.method.server.peer_to_peer:
            self.download(self.clients.numbers(upload.users))
            self.server.clear_uploads()  # the server relays models of peers, but does not keep them
        return ""

    def _aggregate_secure_sum(self, sums: Sums, upload: Upload) -> str:
        """Aggregate the uploads of a round by a secure sum, in which the server sees no single upload.

        Args:
            sums: Settings of secure sums.
            upload: The joined uploads; each is one vector of integers, in which all shared tensors are encoded.

        Returns:
            Reason why the sum failed, for example too few users; empty if it succeeded.
        """
        try:
            if self.sum_masked is not None:
                total = self._simulate_secure_sum(self.sum_masked, sums, upload)
            else:  # the same total, without masks
                sums.require(len(upload.users), upload.round)  # raises NoSumError if there are too few users
                total = upload.tensors[VECTOR].long().sum(0)
        except NoSumError as error:
            logger.warning("%s", error)
            self.server.skip_round(upload.round)
            return str(error)
        self.server.aggregate_sum(total, upload.users, upload.round)
        return ""

    def _simulate_secure_sum(self, sum_masked: SumMasked, sums: Sums, upload: Upload) -> np.ndarray:
        """Return the sum of the users' vectors, computed by the protocol with masks that cancel out.

        Args:
            sum_masked: Simulates the protocol.
            sums: Settings of secure sums.
            upload: The joined uploads; each is one vector of integers, in which all shared tensors are encoded.

        Raises:
            NoSumError: There are too few users.
        """
        vectors = upload.tensors.get(VECTOR, torch.zeros(0, 0))  # without uploads there are no vectors
        # The protocol adds unsigned integers ("words") modulo a power of two.
        words_by_name = {name: as_words(vector) for name, vector in zip(upload.users, vectors, strict=True)}
        run_id = ""  # distinguishes runs on a network; not needed within a process
        terms = terms_of(self.clients.plan, run_id, upload.round, self.server.size)
        largest_entry = sums.grid(upload.round).largest  # parameters are rounded to a grid, whose points are numbered
        return sum_masked(terms, words_by_name, largest_entry)

    def _count_sum_bytes(self, users: Sequence[str], round_number: int) -> None:
        """Count the bytes that clients would exchange with the server for a secure sum over a network.

        Each sends public keys, encrypted shares of secrets and a masked vector. With fewer users than the terms need,
        the sum fails after the public keys are sent.

        Args:
            users: Names of the users in the sum.
            round_number: The round, counted from 1.
        """
        names = list(users)
        run_id = ""  # distinguishes runs on a network; not needed within a process
        # Clients agree on the terms before a sum: the number of users needed, the length of the vector and so on.
        terms = terms_of(self.clients.plan, run_id, round_number, self.server.size)
        has_enough_users = len(names) >= terms.threshold
        for name in names:
            if has_enough_users:
                self.clock.upload_bytes += sent_bytes(terms, name, len(names))
                self.clock.download_bytes += received_bytes(terms, name, names)
            else:
                self.clock.upload_bytes += keys_bytes(terms, name)

    def report_losses(self, done: int, losses: dict[str, float]) -> float:
        """Report validation losses after a round; if their mean is the lowest so far, users store their models as best.

        Called with ``evaluation.select: best``.

        Args:
            done: Number of rounds that are done.
            losses: Validation loss in nats of each user, by name.

        Returns:
            The mean loss.
        """
        report = validation_report(losses, done)
        self.clock.upload_bytes += sum(packed_bytes(report))
        if self.serialise:
            report = _repack_uploads(report.split())
        reply = self.server.judge(report)  # a message that says whether the mean is the lowest
        self.clock.download_bytes += sum(packed_bytes(reply))
        if self.serialise:
            reply = _repack_downloads(reply.split())
        self.clients.receive_verdict(reply)
        return fmean(losses.values())


def federate(clients: Clients) -> InProcess:
    """Return a backend with these users and a new server for them, in one process.

    Raises:
        RecipeError: The server of the method does not support these users, for example their different LoRA ranks.
    """
    server = start_server(clients.model, clients.names, clients.plan)
    example_privacy = clients.steps.private
    if example_privacy is not None:
        # With example-level privacy, epsilon follows from each user's numbers of examples, steps and rounds ("works").
        server.mechanisms.set_works(lambda: example_privacy.works(clients.batch_source))
    return_freed_memory()  # of data as it was read, and of initial values
    return InProcess(clients=clients, server=server)


def _check_population(newest: Path, progress: Progress, names: Sequence[str], *, in_memory: bool) -> None:
    """Check that checkpoint and run both have ``runtime.store: disk``, and the same users in the same order.

    Args:
        newest: Folder of the checkpoint.
        progress: Its progress; ``population`` is a digest of the users' names, empty if the tensors were in memory.
        names: Names of the users of this run.
        in_memory: Whether this run keeps tensors in memory.

    Raises:
        RunError: The users differ, or the run was begun with another ``runtime.store``.
    """
    store_of_checkpoint = "disk" if progress.population else MEMORY
    store_of_run = MEMORY if in_memory else "disk"
    if store_of_checkpoint != store_of_run:
        raise RunError(
            f"{newest}: written with runtime.store: {store_of_checkpoint}; got {store_of_run}; resume with the value "
            "that the run started with"
        )
    if progress.population != digest_names(names):
        raise RunError(f"{newest}: has other users or another order; with runtime.store: disk neither may change")


def _repack_downloads(parts: Sequence[Download]) -> Download:
    """Pack and unpack the message of each user, as if it were sent over a network, and join the messages.

    With ``serialise``, a run in one process thus computes the same as a federation over a network.

    Args:
        parts: The message of each user.
    """
    messages = [unpack(pack(part)) for part in parts]
    return join_downloads([part for part in messages if isinstance(part, Download)])  # all; tells the type checker


def _repack_uploads(parts: Sequence[Upload]) -> Upload:
    """Pack and unpack the message of each user, as if it were sent over a network, and join the messages.

    With ``serialise``, a run in one process thus computes the same as a federation over a network.

    Args:
        parts: The message of each user.
    """
    messages = [unpack(pack(part)) for part in parts]
    return join_uploads([part for part in messages if isinstance(part, Upload)])
