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
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comingle.config import Recipe
from comingle.config.settings import Terms
from comingle.federation.messages import unpack_answer
from comingle.federation.participant import Own, Tells
from comingle.federation.public import Public
from comingle.privacy.noise import digest
from comingle.privacy.secure_client import Record, Session
from comingle.privacy.secure_sum import KEY_BYTES
from comingle.protocol.wire import unpack
from comingle.runs.api import of_one_user
from comingle.runs.session import build, describe
from comingle.training.checkpoints import Clock, load_checkpoint, progress_of, prune_checkpoints, save_checkpoint
from comingle.training.client import Clients, finetuned
from comingle.training.evaluation import summarise
from comingle.training.kinds.base import RunData
from comingle.training.state import GRADIENTS, State
from comingle.utils.errors import MessageError, RunError
from comingle.utils.files import list_checkpoints
from comingle.utils.inputs import write_inputs
from comingle.utils.records import DRAFT, convert_disk_errors, write_bytes, write_json, write_text

SECURE = "secure.json"
"""File with the secrets of secure sums in a run's folder."""


@dataclass(frozen=True, kw_only=True)
class Sessions:
    """One user's side of the secure sums of a run, one per round, stored in a folder that only the user can read."""

    folder: Path

    def begin(self, terms: Terms, name: str) -> Session:
        """Return this user's side of a new secure sum, with new secrets.

        It replaces the stored sum once its first step is saved. A round whose sum was unmasked cannot have another sum:
        the difference of both could reveal a single user's upload.

        Args:
            terms: Round, users and threshold of the sum.
            name: Name of the user.

        Raises:
            MessageError: The sum of this round, or of a later one, has been unmasked.
        """
        if terms.round <= (known := self._read()["unmasked"]):
            raise MessageError(
                f"secure aggregation: got round {terms.round}; user {name!r} has already helped to unmask round {known}"
            )
        return Session(terms=terms, name=name, seed=secrets.token_bytes(KEY_BYTES), save=self._save)

    def current(self, terms: Terms) -> Session:
        """Return this user's side of the secure sum in progress, which an earlier step has begun and stored.

        Args:
            terms: Expected round, users and threshold of the sum.

        Raises:
            MessageError: No sum is stored, or the stored sum has other terms, for example of another round.
        """
        record = self._read()["session"]
        if record is None or (session := Session.of(record, self._save)).terms != terms:
            raise MessageError(f"secure aggregation: no sum of round {terms.round} has been started on this client")
        return session

    def end(self) -> None:
        """Delete the secrets of the current sum; the number of the last unmasked round is kept."""
        if self._path.exists():
            write_text(self._path, json.dumps({**self._read(), "session": None}), private=True)

    @property
    def _path(self) -> Path:
        return self.folder / SECURE

    def _read(self) -> dict[str, Any]:
        """Return what is stored: ``unmasked``, the last round whose sum was unmasked, and ``session``.

        ``session`` is the record of the current secure sum with its secrets, as :meth:`_save` takes it; None without a
        current sum. In a new run ``unmasked`` is 0, as rounds count from 1.

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
        """Write the record of the current sum, before a message that depends on it is sent.

        Also stores the last round that this user has helped to unmask. :meth:`begin` then refuses another sum of that
        round: the difference of two sums over different users may be a single user's upload.

        Args:
            record: Terms, secrets and completed steps ("done") of the sum.
        """
        last_unmasked = self._read()["unmasked"]
        unmasked_now = record["terms"]["round"] if "unmask" in record["done"] else 0  # rounds count from 1
        with convert_disk_errors(self.folder):
            text = json.dumps({"unmasked": max(last_unmasked, unmasked_now), "session": record})
            write_text(self._path, text, private=True)


logger = logging.getLogger("comingle")

LEDGER = "privacy.json"
"""File with all releases (uploads, or rounds of local steps) that have the user's own noise, and the epsilon spent."""
KEPT, KEPT_OF_SUMS = 4, 7
"""Numbers of tasks that can be reverted or answered again, without and with secure sums. Secure sums take three more
tasks per round. Both exceed the number of tasks between two checkpoints of the server.
"""


@dataclass(kw_only=True)
class ClientStore:
    """One user's part of a run, in memory and on disk: its model, and the state and answer of its last tasks.

    Args:
        folder: Folder of the run.
        public: Public part of the federation.
        recipe: The user's own recipe.
        read: The user's own data, and the base.
        clients: The client group that trains the user.
        first: State before the first task.
        serial: Number of the last task that was carried out.
    """

    folder: Path
    public: Public
    recipe: Recipe
    read: RunData
    clients: Clients
    first: State
    serial: int = 0

    @property
    def sessions(self) -> Sessions:
        """Secure sums with other users."""
        return Sessions(folder=self.folder)

    # ---------------------------------------------------------------- answers

    @property
    def num_revertible(self) -> int:
        """Number of tasks that can be reverted."""
        return KEPT if self.clients.plan.sums is None else KEPT_OF_SUMS

    def stored_answer(self, serial: int, task: bytes) -> bytes | None:
        """Return the stored answer to a task; None if this task was not carried out, or its answer is damaged.

        Args:
            serial: Number of the task.
            task: The task's bytes. Another task with the same number has another answer.
        """
        if serial > self.serial:
            return None
        path = self._answer_file(serial, task)
        answer = path.read_bytes() if path.exists() else None
        return answer if answer is not None and _is_whole(answer) else None

    def revertible_tasks(self) -> list[int]:
        """Return the tasks after which the state is still stored; 0 is the state before the first one."""
        stored = [0, *(_number(folder) for folder in list_checkpoints(self.folder))]
        return [number for number in stored if 0 <= self.serial - number <= self.num_revertible] or [self.serial]

    def revert_to(self, serial: int) -> None:
        """Restore the state after a task; delete states and answers of later tasks.

        Args:
            serial: Number of the task; 0 for the state before the first one.

        Raises:
            MessageError: That state is not stored any more.
        """
        if serial not in (stored := self.revertible_tasks()):
            raise MessageError(
                f"task {serial + 1}: got another task with this number; user {self.clients.users[0].name!r} can revert "
                f"only to the state after task {', '.join(map(str, stored))}"
            )
        checkpoints = {_number(folder): folder for folder in list_checkpoints(self.folder)}
        for path in (self.folder / "answers").glob("*.bin"):
            if int(path.name.partition("-")[0]) > serial:  # Delete answers first: each must have its state.
                path.unlink()
        for number, folder in checkpoints.items():
            if number > serial:  # A renamed folder is no checkpoint any more, even if its deletion is interrupted.
                folder.rename(folder.with_name(f".{folder.name}.undone"))
        prune_checkpoints(self.folder, self.num_revertible)  # deletes the renamed folders, too
        self._restore(checkpoints.get(serial))
        self.serial = serial

    def commit(self, serial: int, task: bytes, answer: bytes) -> None:
        """Store the answer to a task and the state after it; delete old answers and states that are not needed.

        The state is stored last. If the process is killed before that, the task counts as not carried out, and the
        answer is deleted at a later commit.

        Args:
            serial: Number of the task.
            task: The task's bytes.
            answer: The answer's bytes.

        Raises:
            RunError: The disk is full; the previous state remains.
        """
        with convert_disk_errors(self.folder):
            write_bytes(self._answer_file(serial, task), answer)
        progress = progress_of(serial, self.public.digest, [trainer.name for trainer in self.clients.trainers])
        # {}: a client stores no state of the server.
        save_checkpoint(self.folder, self.clients.model.layout, self.clients.state, {}, progress)
        self.serial = serial
        prune_checkpoints(self.folder, self.num_revertible)
        for path in (self.folder / "answers").glob("*.bin"):
            number = int(path.name.partition("-")[0])
            # Another answer with this number is from a process that was killed before it stored the state.
            is_leftover = number == serial and path != self._answer_file(serial, task)
            is_kept = serial - self.num_revertible < number <= serial
            if is_leftover or not is_kept:
                path.unlink()

    def remove_drafts(self) -> None:
        """Delete unfinished answers, files and checkpoints of a process that was killed."""
        for draft in (self.folder / "answers").glob(".*"):
            draft.unlink()
        for draft in self.folder.glob(f".*{DRAFT}"):
            draft.unlink()
        prune_checkpoints(self.folder, self.num_revertible)  # also deletes unfinished and reverted ones

    def revert(self) -> None:
        """Restore the state before a task that failed."""
        self.revert_to(self.serial)

    def load_newest(self) -> None:
        """Load the state after the last task."""
        folders = list_checkpoints(self.folder)
        self._restore(folders[-1] if folders else None)
        self.serial = _number(folders[-1]) if folders else 0

    # ---------------------------------------------------------------- privacy

    @property
    def public_counts(self) -> dict[str, int]:
        """Number of the user's examples under the key "examples"; empty unless privacy protects single examples.

        The server computes epsilon from this number, so it is reported even if the user reports nothing else.
        """
        private = self.clients.steps.private  # None unless privacy protects single examples (DP-SGD)
        if private is None:
            return {}
        work = private.work(self.clients.batch_source, trainer=0)  # of the only user of this client group
        return {"examples": work.examples}

    def tells(self, own: Own) -> Tells:
        """Return how much the user reports: as its own file says; by default scores, or nothing with privacy."""
        return own.tells or ("scores" if self.clients.plan.privacy is None else "nothing")

    def charge_upload(self, data: bytes) -> str:
        """Charge an upload to the user's privacy budget before it is sent, if the user has added noise to it.

        Sending the same bytes again reveals nothing new and costs nothing. Another upload for the same task is charged
        as well, even if the task is reverted, as the server may have received both.

        Args:
            data: The packed upload.

        Returns:
            Why the upload may not be sent; an empty string if it may.
        """
        privacy = self.clients.plan.privacy
        if privacy is None or privacy.noise_at != "upload":  # the noise is added to local steps, or by the server
            return ""
        release = hashlib.sha256(data).hexdigest()
        for mechanism in self.clients.mechanisms:
            # `own_epsilon` returns the epsilon of a number of uploads with the noise of this user alone.
            if mechanism.account is not None and (why := self._charge(release, mechanism.account.own_epsilon)):
                return why
        return ""

    def charge_steps(self, number: int) -> str:
        """Charge a round's local steps to the privacy budget before they are taken, if privacy protects examples.

        With DP-SGD each local step reveals something, as it adds noise only once. If a round is repeated with the same
        number of steps from the same state, its noise is the same too. It reveals nothing new and is not charged again.

        Args:
            number: The round, from 0.

        Returns:
            Why the local steps may not be taken; an empty string if they may.
        """
        clients = self.clients
        if (private := clients.steps.private) is None:
            return ""
        work = private.work(clients.batch_source, trainer=0)  # of the only user of this client group
        account = private.mechanism.account
        assert account is not None
        identity = f"{number} {clients.steps.local_steps} {digest(clients.state.tensors())}"
        release = hashlib.sha256(identity.encode()).hexdigest()  # the round's entry in the ledger of charged rounds
        return self._charge(release, lambda num_rounds: account.own_epsilon(num_rounds, work))

    def _charge(self, release: str, epsilon: Callable[[int], float]) -> str:
        """Charge something that the user reveals with noise (a release) to its privacy budget.

        The ledger is a file with all releases so far. A release that it has already costs nothing: repeating it reveals
        nothing new.

        Args:
            release: Digest that identifies the release: an upload, or a round of local steps.
            epsilon: Returns the epsilon that a number of releases spends.

        Returns:
            Why the budget does not allow the release; an empty string if the release was charged.
        """
        path = self.folder / LEDGER
        earlier = json.loads(path.read_text(encoding="utf-8"))["releases"] if path.exists() else []
        releases = sorted({*earlier, release})
        privacy = self.clients.plan.privacy
        assert privacy is not None
        spent, budget = epsilon(len(releases)), privacy.epsilon
        if budget is not None and spent > budget:
            return f"its privacy budget of epsilon {budget:g} is spent"
        write_json(path, {"epsilon": spent, "delta": privacy.delta, "releases": releases})
        return ""

    def _restore(self, folder: Path | None) -> None:
        """Load the state of a checkpoint; None restores the state before the first task."""
        if folder is None:
            self.clients.state = self.first.copy()
        else:
            # `first` has the expected names, shapes and dtypes. A client stores no state of a server ({}).
            self.clients.state, _ = load_checkpoint(folder, self.clients.model.layout, self.first, {})
        self.clients.update_masks()  # The restored LoRA rank decides which entries of the tensors are padding.

    def _answer_file(self, serial: int, task: bytes) -> Path:
        return self.folder / "answers" / f"{serial:06d}-{hashlib.sha256(task).hexdigest()[:16]}.bin"


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("round-"))


def _is_whole(answer: bytes) -> bool:
    """Return whether a stored answer and its messages can be read; a crash may have left part of a file."""
    try:
        for message in unpack_answer(answer).messages:
            unpack(message)
    except MessageError:
        return False
    return True


MODEL = "model"


def save_model(store: ClientStore, own: Own, *, rounds: int) -> Path:
    """Write the user's model, at the end of a federation, as the run folder of a run with this user alone.

    In the federation the user's tensors are padded to the largest LoRA rank and number of experts of all users; here
    they are not. The model is evaluated again, from the tensors that are written.

    Args:
        store: The user's part of the run.
        own: The user's settings.
        rounds: Number of rounds after which the federation ended; fewer than planned if the privacy budget was spent.

    Returns:
        The folder.

    Raises:
        ComingleError: The data or the base cannot be read any more, or the disk is full.
    """
    recipe = _of_one_user(store, own)
    federation = build(recipe, store.read, store="memory")
    clients = federation.clients
    _copy_without_padding(clients, store.clients)
    clients.stopped_after = rounds if 0 <= rounds < clients.rounds_done else None  # None: all planned rounds
    with finetuned(clients):  # if the method fine-tunes models for evaluation only
        # The new clock has no times and bytes: only the server has counted those of the whole run. `left_out` has
        # the number of skipped rows of data.
        metrics = summarise(clients, clients.evaluate(), Clock()).as_dict() | clients.left_out
    folder = store.folder / MODEL
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    write_inputs(folder, describe(store.read, recipe))
    write_text(folder / "recipe.yaml", recipe.as_yaml())
    progress = progress_of(metrics["rounds"], recipe.fingerprint, [own.name])
    save_checkpoint(folder, clients.model.layout, clients.state, federation.server.state, progress)
    write_json(folder / "metrics.json", metrics)
    return folder


def _of_one_user(store: ClientStore, own: Own) -> Recipe:
    """Return the user's own recipe, with its own rank and specialists instead of all users'."""
    number = store.public.users.index(own.name)
    return of_one_user(store.recipe, lambda values: values[number])


def _copy_without_padding(target: Clients, source: Clients) -> None:
    """Copy the state of a client group of one user to one whose tensors are not padded.

    Both groups have the same user. The tensors of ``source`` have room for the largest rank and number of experts of
    all users of the federation. The tensors of ``target`` have the user's own rank and number of experts.

    Args:
        target: The client group whose state is overwritten.
        source: The client group that trained the user.
    """
    padded_layout, own_layout = source.model.layout, target.model.layout
    # Matrices with a column for each entry of a user's model: parameters, moments of the optimiser, and gradients.
    for own_matrix, padded_matrix in zip(_matrices(target.state), _matrices(source.state), strict=True):
        if own_matrix.shape[1]:  # An optimiser may have no moments.
            padded = padded_layout.views(padded_matrix)  # by name, (users, *shape)
            own = [_cut(padded[slot.name], slot.shape).flatten(1) for slot in own_layout.slots]
            own_matrix.copy_(torch.cat(own, 1))
    for name in ("iterations", "router_steps", "ranks", "versions"):
        getattr(target.state, name).copy_(getattr(source.state, name))
    # Tensors that client hooks of the method keep. Gradients are a matrix, which was copied above.
    hook_tensors = [name for name in target.state.kept if name != GRADIENTS]
    target.state.kept |= {name: source.state.kept[name].clone() for name in hook_tensors}
    target.update_masks()


def _matrices(state: State) -> tuple[Tensor, ...]:
    """Return the tensors of a state that have a column for each entry of a user's model."""
    gradients = (state.kept[GRADIENTS],) if GRADIENTS in state.kept else ()
    return state.rows, state.first, state.second, *gradients


def _cut(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Remove the padding beyond the user's own experts and ranks."""
    return tensor[(slice(None), *(slice(size) for size in shape))]


def run_folder(state: Path, run: str) -> Path:
    """Return the folder of a run."""
    return state / f"run-{run}"


def check_run_limit(state: Path, run: str, most: int) -> None:
    """Check that a run is known, or that the folder may hold another one.

    Args:
        state: The user's state folder.
        run: Name of the run.
        most: Largest number of runs.

    Raises:
        RunError: The limit is reached; names a run to delete: the oldest that has ended, else the oldest.
    """
    known = sorted(state.glob("run-*"), key=lambda folder: folder.stat().st_mtime)
    if run_folder(state, run) in known or len(known) < most:
        return
    ended = [folder for folder in known if (folder / MODEL).exists()]
    oldest, why = (ended[0], "has ended") if ended else (known[0], "the oldest, has not ended")
    raise RunError(
        f"{state}: has {len(known)} runs; allowed: up to {most} (max_runs in the client's file); delete one, for "
        f"example `rm -r {oldest}` ({why})"
    )
