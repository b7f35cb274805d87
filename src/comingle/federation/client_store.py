"""A client's private state on disk.

A run has the folder ``STATE/run-RUN/`` with ``public.json`` (the public part of the federation), ``checkpoints/`` (the
user's tensors after each of its last tasks) and ``answers/``. A task that arrives again gets the stored answer and is
not carried out again. A task whose answer the server did not get is reverted when another one with the same number
arrives.

Reverting a task does not revert its records of secure sums and of privacy. If a server repeats a round, with other
users or models, it gets either the same bytes or keys that have masked nothing, and nothing for a round whose sum this
user has helped to unmask.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comingle.config import Recipe
from comingle.config.settings import ACCOUNT, Terms
from comingle.federation.messages import unpack_answer
from comingle.federation.participant import Own, Tells, map_sources
from comingle.federation.public import Public
from comingle.privacy.accounting import (
    Account,
    Releases,
    Work,
    combine,
    composed_epsilon,
    releases_as_json,
    releases_from_json,
)
from comingle.privacy.noise import digest
from comingle.privacy.secure_client import Record, Session
from comingle.privacy.secure_sum import KEY_BYTES
from comingle.protocol.wire import unpack
from comingle.runs.api import recipe_for_one_user
from comingle.runs.continuation import EarlierData, forgetting
from comingle.runs.folders import LEFT, certificates_of
from comingle.runs.guard import LOCAL, SHARED, ClientGuard, build_local, state_of_download
from comingle.runs.session import build, describe
from comingle.training.backends.local import InProcess
from comingle.training.batch_sources import AnyScore
from comingle.training.checkpoints import (
    Clock,
    Progress,
    digest_of_checkpoint,
    load_checkpoint,
    progress_of,
    prune_checkpoints,
    save_checkpoint,
)
from comingle.training.client import Clients, finetuned
from comingle.training.evaluation import amounts, end_event, evaluation_event, start_event, summarise, users_report
from comingle.training.events import EventLog
from comingle.training.kinds.base import RunData
from comingle.training.state import GRADIENTS, State
from comingle.utils.errors import DataError, MessageError, RunError
from comingle.utils.files import file_digest, list_checkpoints, locked
from comingle.utils.inputs import INPUTS, read_inputs, write_inputs
from comingle.utils.names import is_named
from comingle.utils.records import (
    CLIENT_MODEL,
    DRAFT,
    JsonObject,
    convert_disk_errors,
    expand_home,
    write_bytes,
    write_json,
    write_text,
)

SECURE = "secure.json"
"""File with the secrets of secure sums in a run's folder."""


@dataclass(frozen=True, kw_only=True)
class Sessions:
    """One user's side of the secure sums of a run, one sum per round; the current one is stored on disk."""

    folder: Path

    def begin(self, terms: Terms, name: str) -> Session:
        """Return this user's side of a new secure sum, with new secrets; its first step replaces the stored sum.

        A round has no second sum after the first was unmasked: their difference could reveal a single upload.

        Args:
            terms: Round, users and threshold of the sum.
            name: Name of the user.

        Raises:
            MessageError: The sum of this round, or of a later one, has been unmasked.
        """
        last_unmasked_round = self._read()["unmasked"]
        if terms.round <= last_unmasked_round:
            raise MessageError(
                f"secure aggregation: got round {terms.round}; user {name!r} has already helped to unmask round "
                f"{last_unmasked_round}"
            )
        return Session(terms=terms, name=name, seed=secrets.token_bytes(KEY_BYTES), save=self._save)

    def current(self, terms: Terms) -> Session:
        """Return this user's side of the stored secure sum, which an earlier step has begun.

        Args:
            terms: Expected round, users and threshold of the sum.

        Raises:
            MessageError: No sum is stored, or the stored sum has other terms, for example of another round.
        """
        record = self._read()["session"]
        session = None if record is None else Session.of(record, self._save)
        if session is None or session.terms != terms:
            raise MessageError(f"secure aggregation: no sum of round {terms.round} has been started on this client")
        return session

    def end(self) -> None:
        """Delete the user's secrets of the last secure sum, at the end of a federation.

        The number of the last unmasked round stays, so that :meth:`begin` still refuses a second sum of it.
        """
        if self._path.exists():
            content = self._read()
            content["session"] = None
            write_text(self._path, json.dumps(content), private=True)

    @property
    def _path(self) -> Path:
        """File with the state of the last secure sum."""
        return self.folder / SECURE

    def _read(self) -> dict[str, Any]:
        """Return the content of the file with the user's state of the secure sum in progress.

        Returns:
            ``unmasked``: the last round whose sum this user has helped to unmask; 0 for none. ``session``: state of the
            sum in progress, such as its secrets, as :meth:`_save` has stored it; None for none.

        Raises:
            RunError: The file is damaged.
        """
        if not self._path.exists():
            return {"unmasked": 0, "session": None}
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            return {"unmasked": int(content["unmasked"]), "session": content["session"]}
        except (ValueError, KeyError, TypeError):
            raise RunError(
                f"{self._path}: damaged; the record of masked uploads is lost, so the run cannot continue"
            ) from None

    def _save(self, record: Record) -> None:
        """Store the user's state of the secure sum in progress, so that the next step can follow after a restart.

        The file also keeps the last round whose sum this user has helped to unmask: :meth:`begin` refuses a second sum
        of that round.

        Args:
            record: State of the sum as JSON: its terms, the user's secrets, and the completed steps ("done").
        """
        last_unmasked_round = self._read()["unmasked"]
        if "unmask" in record["done"]:
            last_unmasked_round = max(last_unmasked_round, record["terms"]["round"])
        with convert_disk_errors(self.folder):
            text = json.dumps({"unmasked": last_unmasked_round, "session": record})
            write_text(self._path, text, private=True)


logger = logging.getLogger("comingle")

LEDGER = ACCOUNT
"""File with all releases (uploads, or rounds of local steps) that have the user's own noise, and the epsilon spent."""
KEPT_TASKS, KEPT_TASKS_WITH_SUMS = 4, 7
"""Numbers of last tasks that can be reverted or answered again, without and with secure sums. Each is larger than the
number of tasks between two checkpoints of the server.
"""


@dataclass(kw_only=True)
class ClientStore:
    """One user's part of a run, in memory and on disk: its model, and the state and answer of its last tasks.

    Args:
        folder: Folder of the run.
        public: What all users may know of the federation, such as its recipe and their names.
        recipe: The user's own recipe.
        own_data: The user's own data, and the base model.
        clients: The client group that trains the user.
        state_before_first_task: Restored if the first task is reverted.
        serial: Number of the last task that was carried out.
        earlier: Data of the run that this one continues, to measure forgetting.
        guard: The user's local and shared model; None without ``evaluation.guard``.
    """

    folder: Path
    public: Public
    recipe: Recipe
    own_data: RunData
    clients: Clients
    state_before_first_task: State
    serial: int = 0
    earlier: Sequence[EarlierData] = ()
    guard: ClientGuard | None = None

    @property
    def sessions(self) -> Sessions:
        """The user's side of the run's secure sums, whose state is stored in the folder of the run."""
        return Sessions(folder=self.folder)

    # ---------------------------------------------------------------- answers

    @property
    def num_revertible(self) -> int:
        """Number of tasks, the last ones, that the client can undo.

        A server that is restarted repeats the round since its last checkpoint, so clients must return to the state
        before it. A round with a secure sum has more tasks, so the number is larger.
        """
        return KEPT_TASKS if self.clients.plan.sums is None else KEPT_TASKS_WITH_SUMS

    def stored_answer(self, serial: int, task: bytes) -> bytes | None:
        """Return the stored answer to a task; None if this task was not carried out, or its answer is damaged.

        Args:
            serial: Number of the task.
            task: The task's bytes. Another task with the same number has another answer.
        """
        path = self._answer_file(serial, task)
        was_carried_out = serial <= self.serial and path.exists()
        if not was_carried_out:
            return None
        answer = path.read_bytes()
        return answer if _is_complete(answer) else None

    def revertible_tasks(self) -> list[int]:
        """Return the numbers of the tasks to which the client can revert, such as ``[3, 4, 5]``.

        0 is the state before the first task.
        """
        stored = [_task_number(folder) for folder in list_checkpoints(self.folder)]
        if self.recipe.continue_from is None:  # otherwise `save_start` has stored the state before the first task
            stored.insert(0, 0)
        oldest = self.serial - self.num_revertible
        revertible = [number for number in stored if oldest <= number <= self.serial]
        return revertible or [self.serial]  # if the checkpoints were deleted, only the current state

    def revert_to(self, serial: int) -> None:
        """Restore the state after a task; delete states and answers of later tasks.

        Args:
            serial: Number of the task; 0 for the state before the first one.

        Raises:
            MessageError: That state is not stored any more.
        """
        revertible = self.revertible_tasks()
        if serial not in revertible:
            raise MessageError(
                f"task {serial + 1}: got another task with this number; user {self.clients.users[0].name!r} can revert "
                f"only to the state after task {', '.join(map(str, revertible))}"
            )
        # Answers are deleted before states, so that a killed process leaves no answer without its state.
        for answer_file in self._answer_files():
            if _task_number_of_answer(answer_file) > serial:
                answer_file.unlink()
        checkpoints = {_task_number(folder): folder for folder in list_checkpoints(self.folder)}
        for number, folder in checkpoints.items():
            if number > serial:
                # Renaming is atomic, deleting a folder is not. `prune_checkpoints` deletes renamed folders.
                folder.rename(folder.with_name(f".{folder.name}.undone"))
        self._prune()
        self._restore(checkpoints.get(serial), serial)
        self.serial = serial

    def commit(self, serial: int, task: bytes, answer: bytes) -> None:
        """Store the answer to a task, then the state after it; delete old answers and states.

        A task whose state is not stored, since the process was killed, is carried out again.

        Args:
            serial: Number of the task.
            task: The task as the server has sent it.
            answer: The packed answer.

        Raises:
            RunError: The disk is full; the previous state remains.
        """
        new_answer_file = self._answer_file(serial, task)
        with convert_disk_errors(self.folder):
            write_bytes(new_answer_file, answer)
        self._save_state(serial)
        self.serial = serial
        self._prune()
        for answer_file in self._answer_files():
            number = _task_number_of_answer(answer_file)
            # A killed process may have answered another task with the same number.
            is_of_other_task = number == serial and answer_file != new_answer_file
            is_recent = serial - self.num_revertible < number <= serial
            if is_of_other_task or not is_recent:
                answer_file.unlink()

    def save_start(self) -> None:
        """Store the state before the first task, which cannot be computed again if the earlier run is deleted."""
        with convert_disk_errors(self.folder):
            self._save_state(0)

    def _save_state(self, serial: int) -> None:
        """Store the state after a task, which the last checkpoint completes."""
        if self.guard is not None:
            self.guard.save(serial)
        progress = progress_of(serial, self.public.digest, [trainer.name for trainer in self.clients.trainers])
        no_server_state = dict[str, Any]()
        save_checkpoint(self.folder, self.clients.model.layout, self.clients.state, no_server_state, progress)

    def _prune(self) -> None:
        """Delete states to which the client cannot revert any more, unfinished ones and reverted ones."""
        prune_checkpoints(self.folder, self.num_revertible)
        if self.guard is not None:
            self.guard.prune(self.serial, self.num_revertible)

    def remove_drafts(self) -> None:
        """Delete unfinished answers, files and checkpoints of a process that was killed."""
        for draft in (self.folder / "answers").glob(".*"):
            draft.unlink()
        for draft in self.folder.glob(f".*{DRAFT}"):
            draft.unlink()
        self._prune()

    def revert(self) -> None:
        """Restore the state before a task that failed."""
        self.revert_to(self.serial)

    def load_newest(self) -> None:
        """Load the user's state after the last task that it carried out; without one, the state before the first task.

        ``serial``, the number of that task, is 0 before the first.
        """
        folders = list_checkpoints(self.folder)
        self.serial = _task_number(folders[-1]) if folders else 0
        self._restore(folders[-1] if folders else None, self.serial)

    # ---------------------------------------------------------------- privacy

    @property
    def public_counts(self) -> dict[str, int]:
        """Number of the user's examples under the key "examples", if privacy protects single examples; else empty.

        The server computes epsilon from this number, so it is reported even if the user reports nothing else.
        """
        private_steps = self.clients.steps.private  # None unless privacy protects single examples (DP-SGD)
        if private_steps is None:
            return {}
        only_trainer = 0  # this client group has a single user
        work = private_steps.work(self.clients.batch_source, trainer=only_trainer)
        return {"examples": work.examples}

    def reporting_level(self, own: Own) -> Tells:
        """Return how much this user's client reports to the server about its data and test results.

        It is the setting ``tells``. By default "scores", or "nothing" in a run with differential privacy.

        Args:
            own: The user's own settings.
        """
        if own.tells is not None:
            return own.tells
        is_private = self.clients.plan.privacy is not None
        return "nothing" if is_private else "scores"

    def charge_upload(self, data: bytes) -> str:
        """Charge an upload to the user's privacy budget before it is sent, if the user has added noise to it.

        Sending the same bytes again costs nothing.

        Args:
            data: The packed upload.

        Returns:
            Why the upload may not be sent; an empty string if it may.
        """
        privacy = self.clients.plan.privacy
        user_adds_noise = privacy is not None and privacy.noise_at == "upload"
        if not user_adds_noise:
            return ""
        account = own_account(self.clients)
        assert account is not None
        release = hashlib.sha256(data).hexdigest()  # identifies the upload in the ledger
        return self._charge(release, account)

    def charge_steps(self, number: int) -> str:
        """Charge a round's local steps to the user's privacy budget before they are taken, if they add noise (DP-SGD).

        A round that is repeated from the same state has the same noise, releases nothing new and costs nothing.

        Args:
            number: Number of the round, from 0.

        Returns:
            Why the local steps may not be taken; an empty string if they may.
        """
        clients = self.clients
        private_steps = clients.steps.private  # None unless privacy protects single examples (DP-SGD)
        if private_steps is None:
            return ""
        # Numbers of examples and noisy steps, from which the epsilon follows. The client's only user is trainer 0.
        work = private_steps.work(clients.batch_source, trainer=0)
        account = private_steps.mechanism.account
        assert account is not None
        # Equal if the round is repeated with the same number of local steps from the same tensors.
        identity = f"{number} {clients.steps.local_steps} {digest(clients.state.tensors())}"
        release = hashlib.sha256(identity.encode()).hexdigest()
        return self._charge(release, account, work)

    def _charge(self, release: str, account: Account, work: Work | None = None) -> str:
        """Add a release to the user's ledger on disk; one that is in the ledger already costs nothing.

        Args:
            release: Digest that identifies the release: an upload, or a round of local steps.
            account: Account of the mechanism, which computes epsilon.
            work: Amount of the user's work, for noisy local steps.

        Returns:
            Why the budget does not allow the release; an empty string if the release was charged.
        """
        ledger = read_ledger(self.folder) or Ledger()
        digests = tuple(sorted({*ledger.digests, release}))
        spent, budget = account.own_epsilon(len(digests), work, ledger.earlier), account.privacy.epsilon
        if budget is not None and spent > budget:
            return f"its privacy budget of epsilon {budget:g} is spent"
        now = account.own_releases(len(digests), work)
        write_ledger(self.folder, replace(ledger, digests=digests, now=now), account)
        return ""

    def _restore(self, folder: Path | None, serial: int) -> None:
        """Load the state of a checkpoint.

        Args:
            folder: Folder of the checkpoint; None restores the state before the first task.
            serial: Number of the task after which it was stored.
        """
        if self.guard is not None:
            self.guard.restore(serial)
        if folder is None:
            self.clients.state = self.state_before_first_task.copy()
        else:
            no_server_state = dict[str, Any]()
            # The checkpoint must have the names, shapes and dtypes of the state before the first task.
            self.clients.state, _server_state = load_checkpoint(
                folder, self.clients.model.layout, self.state_before_first_task, no_server_state
            )
        self.clients.update_masks()  # the state may have another LoRA rank, which decides which entries are padding

    def _answer_file(self, serial: int, task: bytes) -> Path:
        """Return the path of the stored answer to a task, named by the task's number and a digest of its bytes."""
        return self.folder / "answers" / f"{serial:06d}-{hashlib.sha256(task).hexdigest()[:16]}.bin"

    def _answer_files(self) -> Iterator[Path]:
        """Return the files with answers that were sent to the server, to be sent again if it asks."""
        return (self.folder / "answers").glob("*.bin")


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """A user's own privacy account of a run.

    Args:
        digests: Digests of what the user has released in the run.
        now: Noise and number of these releases; None in a ledger of an earlier version.
        earlier: The same of the runs that the run continues.
        neighbours: Difference of neighbouring data sets.
    """

    digests: tuple[str, ...] = ()
    now: Releases | None = ()
    earlier: Releases = ()
    neighbours: str = ""


def own_account(clients: Clients) -> Account | None:
    """Return the account of the noise that users add themselves; None if they add none."""
    privacy = clients.plan.privacy
    if privacy is None or privacy.noise_at not in ("upload", "steps"):
        return None
    return next((mechanism.account for mechanism in clients.mechanisms if mechanism.account is not None), None)


def read_ledger(folder: Path) -> Ledger | None:
    """Return the user's ledger in the folder of a run; None if there is none.

    Raises:
        RunError: The file is damaged.
    """
    path = folder / LEDGER
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Ledger(
            digests=tuple(content["releases"]),
            now=releases_from_json(content["now"]) if "now" in content else None,
            earlier=releases_from_json(content.get("earlier", ())),
            neighbours=content.get("neighbours", ""),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path}: damaged ({error}); it counts what this user's data has spent; restore it") from None


def write_ledger(folder: Path, ledger: Ledger, account: Account) -> None:
    """Write a user's ledger, with the epsilon of all runs together, to the folder of a run.

    Args:
        folder: Folder of the run.
        ledger: The ledger.
        account: Account of the mechanism, which computes epsilon.
    """
    releases = (*ledger.earlier, *(ledger.now or ()))
    content: JsonObject = {
        "epsilon": composed_epsilon(releases, account.privacy.delta, account.accountant),
        "delta": account.privacy.delta,
        "neighbours": account.neighbours,
        "releases": list(ledger.digests),
        "now": releases_as_json(ledger.now or ()),
    }
    if ledger.earlier:
        content["earlier"] = releases_as_json(ledger.earlier)
    write_json(folder / LEDGER, content)


def start_ledger(folder: Path, account: Account, earlier: Path | None) -> None:
    """Write the ledger with which a user begins a run, unless the run has one: its releases in earlier runs.

    Args:
        folder: Folder of the run.
        account: Account of the noise that the user adds.
        earlier: Folder of the latest run before it in which the user took part; None if there is none.

    Raises:
        RunError: The earlier run has no ledger that can be continued.
    """
    if (folder / LEDGER).exists():
        return
    ledger = Ledger()
    if earlier is not None:
        before = read_ledger(earlier)
        if before is None or before.now is None:
            raise RunError(
                f"{earlier / LEDGER}: missing or of an earlier version, so it is not known what this user's data has "
                f"spent; allowed: without {earlier}, as a new user"
            )
        if before.neighbours != account.neighbours:
            raise RunError(
                f"privacy: got the guarantee for {account.neighbours!r}; allowed: as in {earlier}, "
                f"{before.neighbours!r}, since they have no common epsilon"
            )
        ledger = Ledger(earlier=combine((*before.earlier, *before.now)))
    write_ledger(folder, ledger, account)


def _task_number(checkpoint: Path) -> int:
    """Return the number of the task after which a checkpoint was stored; its folder is named ``round-NUMBER``."""
    return int(checkpoint.name.removeprefix("round-"))


def _task_number_of_answer(answer_file: Path) -> int:
    """Return the number of the task that a stored answer belongs to, from the name of its file."""
    return int(answer_file.name.partition("-")[0])


def _is_complete(answer: bytes) -> bool:
    """Return whether a stored answer and its messages can be read; a crash may have left part of a file."""
    try:
        for message in unpack_answer(answer).messages:
            unpack(message)
    except MessageError:
        return False
    return True


MODEL = CLIENT_MODEL
"""Folder with the user's final model, in the folder of a run."""


def save_model(store: ClientStore, own: Own, *, rounds: int) -> Path:
    """Evaluate the user's model at the end of a federation, and write it as the run folder of a run with one user.

    Args:
        store: What the client has of the run: the user's data, model and progress.
        own: The user's own settings, such as the paths of its data.
        rounds: Number of rounds after which the federation ended; fewer than planned if the privacy budget was spent.

    Returns:
        The folder.

    Raises:
        ComingleError: The data or the base cannot be read any more, or the disk is full.
    """
    recipe = _of_one_user(store, own)
    federation = build(recipe, store.own_data, store="memory")  # a run of this user alone
    clients = federation.clients
    _copy_without_padding(clients, store.clients)
    clients.stopped_after = rounds_if_early(store, rounds)
    with finetuned(clients):  # if the method fine-tunes models for evaluation only
        empty_clock = Clock()  # only the server counts seconds and bytes of a federation
        scores = clients.evaluate()
        metrics = summarise(clients, scores, empty_clock).as_dict()
    metrics.update(clients.left_out)  # number of rows of data that were skipped, if any
    if forgotten := forgetting(federation, store.earlier):
        metrics["earlier"] = forgotten
    folder = store.folder / MODEL
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    write_inputs(folder, describe(store.own_data, recipe))
    write_text(folder / "recipe.yaml", recipe.as_yaml())
    progress = progress_of(metrics["rounds"], recipe.fingerprint, [own.name])
    save_checkpoint(folder, clients.model.layout, clients.state, federation.server.state, progress)
    if store.guard is not None:
        _save_guard(store, store.guard, federation, recipe, folder, metrics, progress)
    _write_events(folder, clients, scores, metrics)
    write_json(folder / "metrics.json", metrics)
    return folder


def _save_guard(
    store: ClientStore,
    guard: ClientGuard,
    federation: InProcess,
    recipe: Recipe,
    folder: Path,
    metrics: JsonObject,
    progress: Progress,
) -> None:
    """Write the user's final local model and, if it is served, the shared one; add the choice to the metrics.

    Args:
        store: What the client has of the run: the user's data, model and progress.
        guard: The user's models.
        federation: The run of this user alone, with the personal model.
        recipe: Its recipe.
        folder: Its folder.
        metrics: Its metrics, changed in place.
        progress: Its progress.
    """
    clients = federation.clients
    metrics["served"] = guard.final_choice(metrics["users"], done=clients.stopped_after)
    local = build_local(federation, recipe, store.own_data)
    assert local is not None
    _copy_without_padding(local.clients, guard.local)
    save_checkpoint(folder / LOCAL, clients.model.layout, local.clients.state, local.server.state, progress)
    if guard.served_rows is not None:
        shared = state_of_download(clients)
        _copy_rows_without_padding(shared.rows, clients, guard.served_rows, store.clients)
        save_checkpoint(folder / SHARED, clients.model.layout, shared, {}, progress)


def _write_events(folder: Path, clients: Clients, scores: Sequence[AnyScore], metrics: JsonObject) -> None:
    """Write the events that a report needs: start, final evaluation, what is served with a guard, and end.

    Args:
        folder: Folder of the user's final model.
        clients: The user with this model.
        scores: Its test scores.
        metrics: Its metrics.
    """
    done = metrics["rounds"]
    users = {user.name: amounts(user, clients.batch_source.unit) for user in clients.users}
    evaluation = evaluation_event(
        users_report(clients, scores)["users"],
        metrics["measure"],
        done=done,
        iterations=done * clients.steps.local_steps,
    )
    log = EventLog(folder / "events.jsonl")
    try:
        log(start_event(clients.plan, clients.model.name, users))
        log(evaluation)
        if "served" in metrics:
            log({"event": "served", "round": done, "users": metrics["served"]})
        log(end_event(metrics))
    finally:
        log.close()


def rounds_if_early(store: ClientStore, rounds: int) -> int | None:
    """Return the number of rounds after which a federation ended; None if it ended as planned.

    Args:
        store: What the client has of the run: the user's data, model and progress.
        rounds: Number of rounds that are done.
    """
    return rounds if 0 <= rounds < store.clients.rounds_done else None


def _of_one_user(store: ClientStore, own: Own) -> Recipe:
    """Return the recipe of a run with this user alone, for example with ``rank: 4`` instead of ``rank: [8, 4]``."""
    user_index = store.public.users.index(own.name)

    def value_of_user(values: Sequence[Any]) -> Any:
        return values[user_index]

    recipe = recipe_for_one_user(store.recipe, value_of_user)
    if store.guard is None:
        return recipe
    return recipe.with_changes({"evaluation.guard": store.recipe.evaluation.guard})


def _copy_without_padding(target: Clients, source: Clients) -> None:
    """Copy the state of a client group whose tensors are padded to one with the same user and without padding.

    In a federation, users may have other ranks and numbers of experts, so tensors are padded to the largest of all. The
    user's final model is saved without this padding.

    Args:
        target: Its tensors have the user's own rank and number of experts; its state is overwritten.
        source: Its tensors have the largest rank and number of experts of all users.
    """
    for own_matrix, padded_matrix in zip(_matrices(target.state), _matrices(source.state), strict=True):
        is_empty = own_matrix.shape[1] == 0  # an optimiser such as SGD has no moments
        if not is_empty:
            _copy_rows_without_padding(own_matrix, target, padded_matrix, source)
    for name in ("iterations", "router_steps", "ranks", "versions"):  # a number for each user
        getattr(target.state, name).copy_(getattr(source.state, name))
    # `kept` has tensors of the method's client hooks, and the matrix of gradients, which was copied above.
    for name in target.state.kept:
        if name != GRADIENTS:
            target.state.kept[name] = source.state.kept[name].clone()
    target.update_masks()


def _copy_rows_without_padding(own_matrix: Tensor, target: Clients, padded_matrix: Tensor, source: Clients) -> None:
    """Copy parameters or moments ``(users, columns)`` to a matrix without padding.

    Args:
        own_matrix: Is overwritten; its columns are those of ``target``.
        target: See :func:`_copy_without_padding`.
        padded_matrix: Its columns are those of ``source``.
        source: See :func:`_copy_without_padding`.
    """
    padded_tensors = source.model.layout.views(padded_matrix)  # by name, (users, *shape)
    own_tensors = [_cut(padded_tensors[slot.name], slot.shape) for slot in target.model.layout.slots]
    own_matrix.copy_(torch.cat([tensor.flatten(1) for tensor in own_tensors], 1))


def _matrices(state: State) -> tuple[Tensor, ...]:
    """Return the matrices ``(users, entries)`` of a client group's state, with a user's whole model as one row.

    These are the parameters (``rows``), first and second moments of the optimiser (without columns if it has none),
    and for some methods the gradients.
    """
    matrices = [state.rows, state.first, state.second]
    if GRADIENTS in state.kept:
        matrices.append(state.kept[GRADIENTS])
    return tuple(matrices)


def _cut(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Remove the padding at the end of all axes but the first, which counts users.

    Args:
        tensor: Tensor whose axes have the size of the user with the largest rank and number of experts.
        shape: Sizes of the axes without padding, without that of users.

    Returns:
        View of shape ``(users, *shape)``.
    """
    all_users = slice(None)
    without_padding = [slice(size) for size in shape]
    return tensor[(all_users, *without_padding)]


FIXED, DATA = "fixed.json", "data"
"""File and folder of a run of a continuous federation, whose data is fixed while the source files grow."""

COUNTED = "counted.json"
"""File in the user's state folder with the size of the user's data, and digests of the files that were counted."""

KEPT_RUNS = 3
"""Number of latest runs of a continuous federation that a client keeps."""


@dataclass(frozen=True, kw_only=True)
class FixedRun:
    """A run of a continuous federation, as the user's client has joined it.

    Args:
        data: The user's source of data, in which paths are those of the copy in the run's folder.
        continues: Name of the earlier run that it continues; empty if this user was in none.
        ledger: Name of the latest earlier run that has a ledger of the user; empty if none has.
        trained: Amount of data with which the user has trained last, in this run or in an earlier one.
    """

    data: Any
    continues: str
    ledger: str
    trained: int


def read_fixed_run(folder: Path) -> FixedRun | None:
    """Return what a client has recorded about a run of a continuous federation, in which runs follow one another.

    The record (``fixed.json``) has the copy of the user's data that the run trains on, the earlier run that it
    continues, and the amount of data that was trained on. The result is None for runs of other federations.

    Args:
        folder: Folder of the run on the client.

    Raises:
        RunError: The file is damaged.
    """
    path = folder / FIXED
    if not path.exists():
        return None

    def with_folder(source: str) -> str:
        return str((folder / source).absolute()) if source.startswith(f"{DATA}/") else source

    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        data = map_sources(content["data"], with_folder)
        return FixedRun(
            data=data,
            continues=str(content["continues"]),
            ledger=str(content.get("ledger", "")),
            trained=int(content["trained"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path}: damaged ({error}); delete {folder} to restart this run") from None


def record_training(folder: Path, user: str) -> None:
    """Record on how much data a user has trained, so that a continuous federation can tell how much came later.

    Such a federation starts a new run when users have enough new data. Other federations do not have the file
    ``fixed.json``; for them this does nothing.

    Args:
        folder: Folder of the run on the client.
        user: Name of the user.
    """
    path = folder / FIXED  # "fixed.json"
    if path.exists():
        content = json.loads(path.read_text(encoding="utf-8"))
        amount = sum(read_inputs(folder).users[user].counts.values())
        if content["trained"] != amount:
            write_text(path, json.dumps({**content, "trained": amount}), private=True)


def fix_data(state: Path, run: str, own: Own, earlier: Sequence[str]) -> None:
    """Copy the user's source files to the folder of a run, which is created, and delete what is not needed any more.

    The copy of the run that this one continues is kept, for replay. Of the earlier runs, the latest are kept.

    Args:
        state: The user's state folder.
        run: Name of the run.
        own: The user's own settings, such as the paths of its data.
        earlier: Names of earlier runs, the newest first.

    Raises:
        DataError: A file cannot be copied.
        RunError: The user's folder has too many runs.
    """
    folder = run_folder(state, run)
    here = [name for name in earlier if (run_folder(state, name) / FIXED).exists() and name != run]
    continues = next((name for name in here if list_checkpoints(run_folder(state, name))), "")
    ledger = next((name for name in here if (run_folder(state, name) / LEDGER).exists()), "")
    for name in here[KEPT_RUNS - 1 :]:
        if name not in (continues, ledger):
            shutil.rmtree(run_folder(state, name), ignore_errors=True)
    for name in here:
        if name != continues:
            shutil.rmtree(run_folder(state, name) / DATA, ignore_errors=True)
    last = read_fixed_run(run_folder(state, here[0])) if here else None
    check_run_limit(state, run, own.max_runs)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = folder / f".{DATA}{DRAFT}"
    for earlier_copy in (draft, folder / DATA):
        shutil.rmtree(earlier_copy, ignore_errors=True)
    draft.mkdir(mode=0o700)
    try:
        data = map_sources(own.data, partial(_copy_source, draft, state))
    except OSError as error:  # also shutil.Error, of files that vanish meanwhile
        raise DataError(f"data: cannot be copied to {folder} ({' '.join(str(error).split())})") from None
    draft.rename(folder / DATA)
    content = {
        "data": data,
        "continues": continues,
        "ledger": ledger,
        "trained": last.trained if last else 0,
        "digests": {str(path.relative_to(folder)): file_digest(path) for path in _files_in(folder / DATA)},
    }
    write_text(folder / FIXED, json.dumps(content), private=True)


def _files_in(folder: Path) -> list[Path]:
    """Return all files below a folder, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _copy_source(target: Path, state: Path, source: str) -> str:
    """Copy a file or folder, and return its path in the run's folder; return other sources, such as names, unchanged.

    Args:
        target: Folder of the copies.
        state: The user's state folder, which is not copied if it is in a folder of data.
        source: The path or name.

    Raises:
        DataError: It is a pattern.
        OSError: It cannot be copied.
    """
    path = expand_home(source)
    if not path.exists():
        if any(character in source for character in "*?[") and not is_named(source):
            raise DataError(f"data: got the pattern {source}; allowed with a continuous server: files and folders")
        return source
    number = str(len(list(target.iterdir())))
    copy = target / number / (path.name or path.resolve().name or DATA)
    copy.parent.mkdir()

    def state_folder(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if (Path(folder) / name).resolve() == state.resolve()]

    if path.is_dir():
        shutil.copytree(path, copy, ignore=state_folder)
    else:
        shutil.copyfile(path, copy)
    return f"{DATA}/{number}/{copy.name}"


def sources_digest(data: object, state: Path) -> str:
    """Return a digest of the paths, sizes and times of a user's source files, which are not read.

    Args:
        data: The user's source of data.
        state: The user's state folder, which is left out.
    """
    entries: list[str] = []

    def add(path: str) -> None:
        with suppress(OSError):  # it was deleted meanwhile
            status = os.stat(path)
            entries.append(f"{path} {status.st_size} {status.st_mtime_ns}")

    def add_source(source: str) -> str:
        path = str(expand_home(source))
        entries.append(path)
        add(path)
        for folder, folders, files in os.walk(path):
            folders[:] = [name for name in folders if Path(folder, name).resolve() != state.resolve()]
            for name in files:
                add(os.path.join(folder, name))
        return source

    map_sources(data, add_source)
    return hashlib.sha256("\n".join(sorted(entries)).encode("utf-8", "surrogatepass")).hexdigest()


def run_folder(state: Path, run: str) -> Path:
    """Return the folder of a run."""
    return state / f"run-{run}"


def check_run_limit(state: Path, run: str, most: int) -> None:
    """Raise an error if a run is new and the user's state folder has the largest number of runs already.

    Args:
        state: The user's state folder.
        run: Name of the run.
        most: Largest number of runs.

    Raises:
        RunError: The limit is reached; names a run to delete: the oldest that has ended, else the oldest.
    """
    runs_by_age = sorted(state.glob("run-*"), key=lambda folder: folder.stat().st_mtime)
    is_new = run_folder(state, run) not in runs_by_age
    if not is_new or len(runs_by_age) < most:
        return
    ended_runs = [folder for folder in runs_by_age if (folder / MODEL).exists()]
    if ended_runs:
        to_delete, why = ended_runs[0], "has ended"
    else:
        to_delete, why = runs_by_age[0], "the oldest, has not ended"
    raise RunError(
        f"{state}: has {len(runs_by_age)} runs; allowed: up to {most} (max_runs in the client's file); delete one, for "
        f"example `rm -r {to_delete}` ({why})"
    )


# ---------------------------------------------------------------- a user who leaves

STATEMENT_OF_CLIENT = (
    "the user's models and copies of text on this machine are deleted; the user's own files, settings and key stay, "
    "and what the server has of the user is deleted there (`comingle leave SERVER_FOLDER`)"
)
"""Statement of the certificate in a user's state folder."""


def files_of_user(state: Path, user: str) -> list[Path]:
    """Return the files that a client has written about its user: those of its runs, and the size of the data.

    Files that have replaced a copy of the user's text are left out (:func:`replaced_copies`).

    Args:
        state: The user's state folder, with a folder ``run-NAME`` for each run. Another folder has no such files.
        user: Name of the user.

    Raises:
        RunError: The folder is another user's.
    """
    run_folders = sorted(state.glob("run-*"))
    for folder in run_folders:
        if not (folder / INPUTS).exists():  # the record of what the run reads
            continue
        owners = list(read_inputs(folder).users)
        if user not in owners:
            raise RunError(f"{state}: got user {user!r}; allowed: {', '.join(owners)}, whose state folder it is")
    kept = replaced_copies(state)
    files: list[Path] = []
    for folder in run_folders:
        files += [path for path in _files_in(folder) if path not in kept]
    size_of_data = state / COUNTED
    if size_of_data.is_file():
        files.append(size_of_data)
    return files


def replaced_copies(state: Path) -> list[Path]:
    """Return files in the place of copies of a user's text that are not these copies, by their recorded digests.

    They are not deleted. A run of an earlier version has no digests of its copies; all its files are deleted.

    Args:
        state: The user's state folder.
    """
    digests = _digests_of_copies(state)
    runs_with_digests = {path.parts[0] for path in map(Path, digests)}
    return [
        path
        for run in sorted(state.glob("run-*"))
        if run.name in runs_with_digests
        for path in _files_in(run / DATA)
        if digests.get(str(path.relative_to(state))) != file_digest(path)
    ]


def _digests_of_copies(state: Path) -> dict[str, str]:
    """Return the recorded SHA-256 of each copy of a user's text, by path relative to the state folder.

    They are recorded in the run, and in the certificate of a removal that was interrupted.

    Args:
        state: The user's state folder.
    """
    digests: dict[str, str] = {}
    for certificate in certificates_of(state):
        digests |= certificate.get("copies", {})
    for path in sorted(state.glob(f"run-*/{FIXED}")):
        recorded = json.loads(path.read_text(encoding="utf-8")).get("digests", {})
        digests |= {f"{path.parent.name}/{name}": digest for name, digest in recorded.items()}
    return digests


def delete_runs_of_user(state: Path, user: str) -> JsonObject:
    """Delete all runs of a user who leaves the federation, and return a certificate: a record of what was deleted.

    The certificate is written to ``left.json`` in the state folder before anything is deleted.

    Copies of text are compared with their recorded digests; a file that has replaced a copy is named and not deleted.

    Args:
        state: The user's state folder, in which the client keeps a folder ``run-NAME`` for each run.
        user: Name of the user.

    Raises:
        RunError: The user's client is running, or the folder is another user's.
    """
    with locked(state), convert_disk_errors(state):
        files = files_of_user(state, user)
        kept = replaced_copies(state)  # files that the client did not write
        copies = _digests_of_copies(state)
        run_folders = sorted(state.glob("run-*"))
        digests_of_last_checkpoints: dict[str, str] = {}
        for folder in run_folders:
            checkpoints = list_checkpoints(folder)
            if checkpoints:
                digests_of_last_checkpoints[folder.name] = digest_of_checkpoint(checkpoints[-1])
        certificate: JsonObject = {
            "user": user,
            "date": datetime.now().isoformat(timespec="seconds"),
            "statement": STATEMENT_OF_CLIENT,
            "checkpoints_before": digests_of_last_checkpoints,
            "deleted": [str(path.relative_to(state)) for path in files],
            "copies": copies,
            "not_deleted": [str(path.relative_to(state)) for path in kept],
        }
        earlier_certificates = certificates_of(state)
        write_json(state / LEFT, {"left": [*earlier_certificates, certificate]})  # LEFT is "left.json"
        for folder in run_folders:
            _delete_all_but(folder, kept)
        (state / COUNTED).unlink(missing_ok=True)  # the file with the size of the user's data
    return certificate


def _delete_all_but(folder: Path, kept: Sequence[Path]) -> None:
    """Delete a folder with all files but some, and its folders without any of these.

    Args:
        folder: The folder.
        kept: Files to keep.
    """
    if not any(path.is_relative_to(folder) for path in kept):
        shutil.rmtree(folder)
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            _delete_all_but(path, kept)
        elif path not in kept:
            path.unlink()
