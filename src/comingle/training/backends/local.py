"""A backend with all users and their server in one process.

The messages of a cohort stay stacked. Their sizes are counted as if each were sent separately.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from comingle.config.settings import AUTO, MEMORY, Terms
from comingle.data.populations import digest_names
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
from comingle.training.client import EMPTY_ROUND, Clients, LocalRound, finetuned, finish, settle, train
from comingle.training.evaluation import (
    amounts_of,
    check_finite,
    evaluation_event,
    measure_among,
    merged_mixtures_event,
    period,
    sampled,
    users_report,
)
from comingle.training.events import Event, JsonMapping, JsonObject, Observer
from comingle.training.plan import keep_key, key_of, set_key, terms_of
from comingle.training.server import ServerHalf, start_server
from comingle.training.settings import RunPlan, cohorts
from comingle.training.state import check_names, reorder, reorder_kept
from comingle.training.steps import diverged
from comingle.utils.errors import NoSumError, RunError
from comingle.utils.files import list_checkpoints
from comingle.utils.records import write_json
from comingle.utils.trees import Tree

logger = logging.getLogger("comingle")

Masked = Callable[[Terms, Mapping[str, np.ndarray], int], np.ndarray]
"""Sums uploads by name, whose entries are at most the last argument, through masks that cancel out."""


@dataclass(frozen=True, kw_only=True)
class RoundReport:
    """Result of the local steps by user name; ``suspects`` are the optimizers that the first rejection points to."""

    losses: dict[str, float]
    rejected: dict[str, str]
    suspects: list[str]
    tokens: int
    seconds: float


@dataclass(kw_only=True)
class InProcess(Backend[Sequence[AnyScore]]):
    """All users and their server in one process: messages are stacked tensors, and their bytes are counted.

    Attributes:
        clients: The users.
        server: Their server.
        serialise: Whether every message is packed and unpacked.
        masked: Sums masked uploads if the server sees only sums (:func:`comingle.privacy.secure_server.simulate_sum`);
            without it the numbers are added directly.
        clock: Counts time and bytes.
        observe: Called with every event.
        leads: Whether this process has the server and logs the run.
    """

    clients: Clients
    server: ServerHalf
    serialise: bool = False
    masked: Masked | None = None
    clock: Clock = field(default_factory=Clock)
    observe: Observer = lambda event: None
    leads: bool = field(default=True, init=False)
    _sent: Upload | None = None

    def merge_users(self, work: Callable[[], JsonMapping]) -> JsonObject:
        """Return the mapping that ``work`` returns; with several processes, merge their mappings in the first one."""
        return dict(work())

    # ---------------------------------------------------------------- rounds

    def start(self, observe: Observer, clock: Clock) -> tuple[RunPlan, int]:
        """Set observer and clock, and resolve the evaluation interval."""
        self.observe, self.clock, clients = observe, clock, self.clients
        if clients.plan.evaluation.every == AUTO and clients.method.trains:
            clients.plan = clients.plan.updated("evaluation", every=self._resolve_eval_interval())
        return clients.plan, clients.rounds_done

    def _resolve_eval_interval(self) -> int:
        return period(self.clients.plan, amounts_of(self.clients), len(self.clients.population_names))

    def select_participants(self, plan: RoundPlan) -> Sequence[int] | None:
        """Return the participants of a round; None ends the run because the privacy budget is spent."""
        participants = self.server.invite(self.clients.plan, plan.number, releases=plan.exchanges)
        if participants is None:
            self.clients.stopped_after = plan.number
        return participants

    def train(self, plan: RoundPlan, participants: Sequence[int]) -> RoundResult:
        """Have participants download, take their local steps, and upload if the round exchanges.

        Raises:
            DivergenceError: The loss or tensors of a user are not finite, and the method does not drop such users.
        """
        self.download(participants)
        work = self._train(plan, participants)
        report = self._report_round(work)
        for name, reason in report.rejected.items():
            log_rejection(self.observe, plan.done, name, reason)
        self._require_losses(report)
        if plan.exchanges:
            self.upload(list(work.losses), plan.done, work.losses)
        count = len(report.losses)
        return RoundResult(losses=report.losses, users=count, tokens=report.tokens, seconds=report.seconds)

    def _train(self, plan: RoundPlan, participants: Sequence[int]) -> LocalRound:
        if not participants:
            return EMPTY_ROUND

        def step(advance: int) -> None:
            self.observe({"event": "step", "advance": advance, "round": plan.done})

        step(0)
        return train(self.clients, participants, plan.number, lambda: step(1))

    def _report_round(self, work: LocalRound) -> RoundReport:
        clients, first = self.clients, next(iter(work.rejected), None)
        suspects = () if first is None else clients.steps.suspects(first, clients.state.rows_of([first])[0])
        return RoundReport(
            losses={clients.names[member]: loss for member, loss in work.losses.items()},
            rejected={clients.names[member]: reason for member, reason in work.rejected.items()},
            suspects=list(suspects),
            tokens=work.tokens,
            seconds=work.seconds,
        )

    def _require_losses(self, report: RoundReport) -> None:
        if report.rejected and not report.losses:
            raise diverged(*next(iter(report.rejected.items())), report.suspects)

    def evaluate(self, done: int, *, receives: bool, finishes: bool, silent: bool) -> tuple[Sequence[AnyScore], Event]:
        """Score the models of the evaluated users; store all models if the validation loss is the lowest so far.

        Raises:
            DivergenceError: The loss of a user is not finite.
        """
        clients, server = self.clients, self.server
        if receives:
            self.download(clients.scored_trainers)
        if finishes:
            self._finish()
        if not silent:
            self.observe({"event": "step", "advance": 0, "round": done, "evaluating": True})
        scores, losses = self._score(done)
        mean_loss = {"mean_valid_loss": self.report_losses(done, losses)} if clients.state.best else {}
        report = self.merge_users(lambda: users_report(clients, scores))
        if not self.leads:
            return scores, {}
        measure = measure_among(report["users"])
        event = evaluation_event(report["users"], measure, done=done, iterations=done * clients.steps.local_steps)
        event |= sampled(clients, report["users"], measure) | mean_loss | report["routing"]
        return scores, event | merged_mixtures_event(clients, server, report["mixtures"])

    def _score(self, done: int) -> tuple[Sequence[AnyScore], dict[str, float]]:
        """Return test scores and, if the best round is selected, validation losses."""
        clients = self.clients
        settle(clients, ends=done >= clients.plan.training.rounds or len(clients.scored) == len(clients.users))
        with finetuned(clients, done):  # once for test and validation
            scores, losses = clients.evaluate(), clients.validate() if clients.state.best else {}
        check_finite(clients, scores, done)
        return scores, losses

    def _finish(self) -> None:
        finish(self.clients)

    def choose(self, rounds: int, scores: Sequence[AnyScore] | None) -> Sequence[AnyScore] | None:
        """Restore the models of the best round if it is selected, and return the scores of the final models."""
        self.clients.choose()
        return scores if self.clients.chosen_round == rounds else self._score_chosen()

    def _score_chosen(self) -> Sequence[AnyScore]:
        with finetuned(self.clients):
            return self.clients.evaluate()

    # ---------------------------------------------------------------- the run folder

    def open_folder(self, folder: Path, *, resume: bool) -> bool:
        """Open the users' store in a run folder; return whether there is a checkpoint to restore."""
        found = resume and bool(list_checkpoints(folder))
        self.clients.state.open(folder, anew=not found)
        return found

    def keep_key(self, folder: Path | None, *, resume: bool) -> None:
        """Set the key of the privacy noise to the one in the run folder; without a folder, to one common key."""
        set_key(self._read_key(folder, resume=resume), *self._noised)

    @property
    def _noised(self) -> tuple[PrivacyMechanism, ...]:
        return *self.clients.mechanisms, *self.server.mechanisms

    def _read_key(self, folder: Path | None, *, resume: bool) -> str:
        if folder is not None:
            keep_key(folder, *self._noised, anew=not resume, begun=resume and (folder / "events.jsonl").exists())
        return key_of(*self._noised)

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

        Raises:
            RunError: There is no checkpoint, or it is damaged or has another fingerprint.
        """
        newest, progress = self._find_checkpoint(folder, fingerprint)
        clients = self.clients
        apart = progress.population or not clients.state.in_memory
        clients.stopped_after = progress.round if progress.stopped else None
        kept = self._load(newest, progress)
        clients.update_masks()
        self._restore_server(kept, clients.population_names if apart else progress.trainers)
        return progress

    def _find_checkpoint(self, folder: Path, fingerprint: str) -> tuple[Path, Progress]:
        newest, progress = newest_checkpoint(folder, fingerprint)
        names = self.clients.population_names
        if progress.population or not self.clients.state.in_memory:
            _check_population(newest, progress, names, in_memory=self.clients.state.in_memory)
        else:
            check_names(newest, progress.trainers, names)
        return newest, progress

    def _load(self, checkpoint: Path, progress: Progress) -> Tree:
        """Restore the users of this process, and return the server's state."""
        clients = self.clients
        if progress.shards or progress.population:
            self._load_users(checkpoint, progress)
            return self._load_server(checkpoint, progress)
        state, kept = load_checkpoint(checkpoint, clients.model.layout, clients.state, self.server.state)
        clients.state = reorder(state, progress.trainers, clients.population_names)
        return kept

    def _load_users(self, checkpoint: Path, progress: Progress) -> None:
        clients, state = self.clients, self.clients.state
        read = partial(load_users, checkpoint, progress, clients.model.layout, state, clients.names)
        clients.state = state.load(checkpoint, read)

    def _load_server(self, checkpoint: Path, progress: Progress) -> Tree:
        return load_server(checkpoint, progress, self.server.state, self.clients.state.rows.device)

    def _restore_server(self, kept: Tree, trainers: Sequence[str]) -> None:
        self.server.restore(reorder_kept(kept, trainers, self.clients.population_names, self.server.by_user))

    # ---------------------------------------------------------------- messages

    def download(self, members: Sequence[int]) -> None:
        """Send the current server version to stale users."""
        stale = self.clients.stale(self.server.version, members) if self.clients.shares else []
        names = self.server.with_download([self.clients.names[member] for member in stale])
        for some in cohorts(names, self.clients.users_per_message):
            self._answer(some)

    def _answer(self, names: Sequence[str]) -> None:
        message = self.server.download(names)
        self.clock.download_bytes += sum(packed_bytes(message))
        self.clients.receive(_downloaded(message.split()) if self.serialise else message)

    def upload(self, members: Sequence[int], done: int, losses: dict[int, float]) -> None:
        """Upload the shared tensors and training losses of users.

        Args:
            members: Numbers of the users.
            done: The round, counted from 1.
            losses: Mean training loss of each user.
        """
        if not members:
            self._sent = no_uploads(done)
            return
        said = {LOSS: torch.tensor([losses[member] for member in members])}
        message = self.clients.upload(members, done, said)
        if self.server.sums is not None:
            self._sent = message
            self._count_sum(message.users, done)
            return
        self.clock.upload_bytes += sum(packed_bytes(message))
        self._sent = _uploaded(message.split()) if self.serialise else message

    def aggregate(self) -> str:
        """Aggregate the uploads of the round; with peer-to-peer methods, participants download at once.

        Returns:
            Reason why there is no sum; empty if there is one.
        """
        assert self._sent is not None
        if self.server.sums is not None:
            sent, self._sent = self._sent, None
            return self._sum(self.server.sums, sent)
        users, self._sent = self._sent.users, self.server.aggregate(self._sent)
        if self.clients.method.server.peer_to_peer:
            self.download(self.clients.numbers(users))
            self.server.clear_uploads()
        return ""

    def _sum(self, sums: Sums, sent: Upload) -> str:
        """Aggregate the sum of uploads, masked if :attr:`masked` is set."""
        try:
            if self.masked is not None:
                whole = sent.tensors.get(VECTOR, torch.zeros(0, 0))
                uploads = {name: as_words(row) for name, row in zip(sent.users, whole, strict=True)}
                terms = terms_of(self.clients.plan, "", sent.round, self.server.size)
                total = self.masked(terms, uploads, sums.grid(sent.round).levels)
            else:
                sums.require(len(sent.users), sent.round)
                total = sent.tensors[VECTOR].long().sum(0)
        except NoSumError as error:
            logger.warning("%s", error)
            self.server.skip_round(sent.round)
            return str(error)
        self.server.aggregate_sum(total, sent.users, sent.round)
        return ""

    def _count_sum(self, users: Sequence[str], done: int) -> None:
        """Count the bytes of the messages of a sum; if there are too few users, only those of their keys."""
        terms, names = terms_of(self.clients.plan, "", done, self.server.size), list(users)
        enough = len(names) >= terms.threshold
        for name in names:
            self.clock.upload_bytes += sent_bytes(terms, name, len(names)) if enough else keys_bytes(terms, name)
            self.clock.download_bytes += received_bytes(terms, name, names) if enough else 0

    def report_losses(self, done: int, losses: dict[str, float]) -> float:
        """Report validation losses after round ``done``; store all models if the mean, which is returned, is lowest."""
        message = validation_report(losses, done)
        self.clock.upload_bytes += sum(packed_bytes(message))
        verdict = self.server.judge(_uploaded(message.split()) if self.serialise else message)
        self.clock.download_bytes += sum(packed_bytes(verdict))
        self.clients.receive_verdict(_downloaded(verdict.split()) if self.serialise else verdict)
        return fmean(losses.values())


def federate(clients: Clients) -> InProcess:
    """Return a backend for these users with a server of their own.

    Raises:
        RecipeError: The server of the method does not support such users.
    """
    names = clients.names
    server = start_server(clients.model, names, clients.plan)
    if (private := clients.steps.private) is not None:
        server.mechanisms.set_works(lambda: private.works(clients.batch_source))
    return InProcess(clients=clients, server=server)


def _check_population(newest: Path, progress: Progress, names: Sequence[str], *, in_memory: bool) -> None:
    """Check that a checkpoint of a store has these users in this order.

    Raises:
        RunError: The users differ, or the run was begun with another ``runtime.store``.
    """
    if not progress.population or in_memory:
        kept, now = ("disk", MEMORY) if progress.population else (MEMORY, "disk")
        raise RunError(
            f"{newest}: written with runtime.store: {kept}; got {now}; resume with the value that the run started with"
        )
    if progress.population != digest_names(names):
        raise RunError(f"{newest}: has other users or another order; with runtime.store: disk neither may change")


def _downloaded(parts: Sequence[Download]) -> Download:
    """Pack and unpack the message of each user."""
    messages = [unpack(pack(part)) for part in parts]
    return join_downloads([part for part in messages if isinstance(part, Download)])


def _uploaded(parts: Sequence[Upload]) -> Upload:
    """Pack and unpack the message of each user."""
    messages = [unpack(pack(part)) for part in parts]
    return join_uploads([part for part in messages if isinstance(part, Upload)])
