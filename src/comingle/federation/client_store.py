"""A client's private state on disk.

What is written here is never undone with the tasks that wrote it. A server that begins a round again, with other users
or other models, gets either the bytes that it had, or keys that nothing was ever masked with; and nothing any more of a
round whose sum this user has helped to unmask.

Everything lies in ``STATE/run-RUN/``: ``public.json`` (what the server said of the federation), ``checkpoints/`` (the
user's tensors after each of its last tasks) and ``answers/`` (what it answered). A task that was done once is answered
again without being done again; one that the server did not count is undone by the next of the same number.
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
from comingle.federation.public import Own, Public, Tells
from comingle.privacy.noise import digest
from comingle.privacy.secure_client import Record, Session
from comingle.privacy.secure_sum import KEY
from comingle.protocol.wire import unpack
from comingle.runs.api import of_one_user
from comingle.runs.session import build, describe
from comingle.training.checkpoints import load_checkpoint, progress_of, prune_checkpoints, save_checkpoint
from comingle.training.client import Clients, finetuned
from comingle.training.evaluation import Clock, summarise
from comingle.training.kinds.base import RunData
from comingle.training.state import GRADIENTS, State
from comingle.utils.errors import MessageError, RunError
from comingle.utils.files import list_checkpoints
from comingle.utils.inputs import write_inputs
from comingle.utils.records import DRAFT, told_in_one_line, write_bytes, write_json, write_text

SECURE = "secure.json"
"""The file, in the folder of a run."""


@dataclass(frozen=True, kw_only=True)
class Sessions:
    """The sums of a run; ``folder`` is the user's alone."""

    folder: Path

    def begin(self, terms: Terms, name: str) -> Session:
        """A sum with new keys; the one before is forgotten.

        Raises:
            MessageError: the round's sum is known already, or that of a later one.
        """
        if terms.round <= (known := self._read()["unmasked"]):
            raise MessageError(
                f"secure aggregation: round {terms.round} again; user {name!r} has helped to unmask round {known}"
            )
        return Session(terms=terms, name=name, seed=secrets.token_bytes(KEY), save=self._save)

    def current(self, terms: Terms) -> Session:
        """The sum that has begun.

        Raises:
            MessageError: it is another, or there is none.
        """
        record = self._read()["session"]
        if record is None or (session := Session.of(record, self._save)).terms != terms:
            raise MessageError(f"secure aggregation: no sum of round {terms.round} has begun here")
        return session

    def end(self) -> None:
        """Forget all secrets, for good."""
        if self._path.exists():
            write_text(self._path, json.dumps({**self._read(), "session": None}), private=True)

    @property
    def _path(self) -> Path:
        return self.folder / SECURE

    def _read(self) -> dict[str, Any]:
        if not self._path.exists():
            return {"unmasked": 0, "session": None}
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            return {"unmasked": int(content["unmasked"]), "session": content["session"]}
        except (ValueError, KeyError, TypeError):
            raise RunError(f"{self._path}: damaged; nobody can say what was masked, so the run cannot go on") from None

    def _save(self, record: Record) -> None:
        """On disk before anything of it leaves."""
        was = self._read()["unmasked"]
        unmasked = record["terms"]["round"] if "unmask" in record["done"] else 0
        with told_in_one_line(self.folder):
            text = json.dumps({"unmasked": max(was, unmasked), "session": record})
            write_text(self._path, text, private=True)


logger = logging.getLogger("comingle")

LEDGER = "privacy.json"
"""Every upload, or round of steps, with noise of the user's own that was ever made in a run, and the epsilon of all."""
KEPT, KEPT_OF_SUMS = 4, 7
"""So many tasks can be undone, or answered again: more than the server asks for between two of its checkpoints. A sum
behind masks takes three more."""


@dataclass(kw_only=True)
class ClientStore:
    """``serial`` is the number of the last task that was done."""

    folder: Path
    public: Public
    recipe: Recipe
    read: RunData
    """The user's own data, and the base."""
    clients: Clients
    first: State
    """What the user had before its first task."""
    serial: int = 0

    @property
    def sessions(self) -> Sessions:
        """The user's sums with others."""
        return Sessions(folder=self.folder)

    # ---------------------------------------------------------------- answers

    @property
    def keeps(self) -> int:
        """How many tasks can be undone."""
        return KEPT if self.clients.plan.sums is None else KEPT_OF_SUMS

    def answered(self, serial: int, task: bytes) -> bytes | None:
        """What was answered to this very task, if it was done."""
        if serial > self.serial:
            return None
        path = self._answer(serial, task)
        answer = path.read_bytes() if path.exists() else None
        return answer if answer is not None and _is_whole(answer) else None

    def can_go_back_to(self) -> list[int]:
        """After which tasks the state is still known; that of the beginning is no more once much has been done."""
        known = [_number(folder) for folder in list_checkpoints(self.folder)]
        return [number for number in (0, *known) if 0 <= self.serial - number <= self.keeps] or [self.serial]

    def go_back_to(self, serial: int) -> None:
        """Undo what was done after a task.

        Raises:
            MessageError: that is not kept any more.
        """
        if serial not in (back := self.can_go_back_to()):
            raise MessageError(
                f"task {serial + 1}: another than was done; user {self.clients.users[0].name!r} can go back to what it "
                f"had after task {', '.join(map(str, back))}"
            )
        known = {_number(folder): folder for folder in list_checkpoints(self.folder)}
        for path in (self.folder / "answers").glob("*.bin"):
            if int(path.name.partition("-")[0]) > serial:  # before the states, which they would belie
                path.unlink()
        for number, folder in known.items():
            if number > serial:
                folder.rename(folder.with_name(f".{folder.name}.undone"))
        prune_checkpoints(self.folder, self.keeps)
        self._restore(known.get(serial))
        self.serial = serial

    def keep(self, serial: int, task: bytes, answer: bytes) -> None:
        """The state after a task, and what it is answered with; both or neither, whatever happens.

        Raises:
            RunError: the disk does not take it; the state of before stays.
        """
        with told_in_one_line(self.folder):
            write_bytes(self._answer(serial, task), answer)
        progress = progress_of(serial, self.public.digest, [trainer.name for trainer in self.clients.trainers])
        save_checkpoint(self.folder, self.clients.model.layout, self.clients.state, {}, progress)
        self.serial = serial
        prune_checkpoints(self.folder, self.keeps)
        for path in (self.folder / "answers").glob("*.bin"):
            number = int(path.name.partition("-")[0])
            # Another of this number is of who was killed before the state was kept.
            left = number == serial and path != self._answer(serial, task)
            if left or not serial - self.keeps < number <= serial:
                path.unlink()

    def tidy(self) -> None:
        """Remove what a process has left that was killed while it wrote."""
        for draft in (self.folder / "answers").glob(".*"):
            draft.unlink()
        for draft in self.folder.glob(f".*{DRAFT}"):
            draft.unlink()
        prune_checkpoints(self.folder, self.keeps)

    def forget(self) -> None:
        """Make the state what it was before a task that failed half way."""
        self.go_back_to(self.serial)

    def newest(self) -> None:
        """Go on from the last task that was done."""
        folders = list_checkpoints(self.folder)
        self._restore(folders[-1] if folders else None)
        self.serial = _number(folders[-1]) if folders else 0

    # ---------------------------------------------------------------- privacy

    @property
    def counted(self) -> dict[str, int]:
        """How many examples the user has, where its epsilon follows from that: the account takes it for public."""
        private = self.clients.steps.private
        return {} if private is None else {"examples": private.work(self.clients.feed, 0).examples}

    def tells(self, own: Own) -> Tells:
        """What the user tells of itself: with privacy nothing, unless its own file says so."""
        return own.tells or ("scores" if self.clients.plan.privacy is None else "nothing")

    def note_release(self, data: bytes) -> str:
        """Write down, before it leaves, that an upload with the user's own noise does; why it may not, if it may not.

        The same upload again reveals nothing new; another one for the same task does, and what it cost is not undone.
        """
        privacy = self.clients.plan.privacy
        if privacy is None or privacy.noise_at != "upload":
            return ""
        release = hashlib.sha256(data).hexdigest()
        accounts = (one.account for one in self.clients.mechanisms)
        notes = (self._note(release, account.own_epsilon) for account in accounts if account is not None)
        return next(filter(None, notes), "")

    def note_steps(self, number: int) -> str:
        """The same, before the steps of round ``number`` are taken, where these hide the user's single examples."""
        clients = self.clients
        if (private := clients.steps.private) is None:
            return ""
        work, account = private.work(clients.feed, 0), private.mechanism.account
        assert account is not None
        begins = f"{number} {clients.steps.local_steps} {digest(clients.state.tensors())}"
        named = hashlib.sha256(begins.encode()).hexdigest()
        return self._note(named, lambda rounds: account.own_epsilon(rounds, work))

    def _note(self, release: str, epsilon: Callable[[int], float]) -> str:
        path = self.folder / LEDGER
        known = json.loads(path.read_text(encoding="utf-8"))["releases"] if path.exists() else []
        releases = sorted({*known, release})
        privacy = self.clients.plan.privacy
        assert privacy is not None
        spent, budget = epsilon(len(releases)), privacy.epsilon
        if budget is not None and spent > budget:
            return f"its privacy budget of epsilon {budget:g} is spent"
        write_json(path, {"epsilon": spent, "delta": privacy.delta, "releases": releases})
        return ""

    def _restore(self, folder: Path | None) -> None:
        if folder is None:
            self.clients.state = self.first.copy()
        else:
            self.clients.state, _ = load_checkpoint(folder, self.clients.model.layout, self.first, {})
        self.clients.resized()

    def _answer(self, serial: int, task: bytes) -> Path:
        return self.folder / "answers" / f"{serial:06d}-{hashlib.sha256(task).hexdigest()[:16]}.bin"


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("round-"))


def _is_whole(answer: bytes) -> bool:
    try:
        for message in unpack_answer(answer).messages:
            unpack(message)
    except MessageError:
        return False
    return True


MODEL = "model"


def keep_model(store: ClientStore, own: Own, *, rounds: int) -> Path:
    """Write the user's model after so many rounds; padding to the ranks and experts of others is left out.

    It is scored once more, so what is written is known to say the same.

    Raises:
        ComingleError: the data or the base cannot be read any more, or the disk does not take it.
    """
    recipe = _of_one_user(store, own)
    federation = build(recipe, store.read, store="memory")
    clients = federation.clients
    _fill(clients, store.clients)
    clients.stopped_after = rounds if 0 <= rounds < clients.rounds_done else None
    with finetuned(clients):
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
    """The user's own recipe, with its own rank and specialists in the place of everybody's."""
    number = store.public.users.index(own.name)
    return of_one_user(store.recipe, lambda values: values[number])


def _fill(clients: Clients, of_all: Clients) -> None:
    """A single user's state out of one that is as wide as everybody's."""
    wide, own = of_all.model.layout, clients.model.layout
    for mine, whole in zip(_matrices(clients.state), _matrices(of_all.state), strict=True):
        if mine.shape[1]:  # an optimiser may remember nothing
            views = wide.views(whole)
            mine.copy_(torch.cat([_cut(views[slot.name], slot.shape).flatten(1) for slot in own.slots], 1))
    for name in ("iterations", "router_steps", "ranks", "versions"):
        getattr(clients.state, name).copy_(getattr(of_all.state, name))
    copied = [name for name in clients.state.kept if name != GRADIENTS]
    clients.state.kept |= {name: of_all.state.kept[name].clone() for name in copied}
    clients.resized()


def _matrices(state: State) -> tuple[Tensor, ...]:
    left = (state.kept[GRADIENTS],) if GRADIENTS in state.kept else ()
    return state.rows, state.first, state.second, *left


def _cut(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Without what stands behind the user's own experts and ranks."""
    return tensor[(slice(None), *(slice(size) for size in shape))]


def run_folder(state: Path, run: str) -> Path:
    """Where all that is private lies of a run."""
    return state / f"run-{run}"


def check_room(state: Path, run: str, most: int) -> None:
    """Whether a run is known, or there is room for one more.

    Raises:
        RunError: there is none; names what may be removed, of those that have ended the oldest first.
    """
    known = sorted(state.glob("run-*"), key=lambda folder: folder.stat().st_mtime)
    if run_folder(state, run) in known or len(known) < most:
        return
    ended = [folder for folder in known if (folder / MODEL).exists()]
    oldest, why = (ended[0], "which has ended") if ended else (known[0], "the oldest, which has not ended")
    raise RunError(
        f"{state}: has {len(known)} runs, and max_runs in the participant's file allows no more than {most}; make "
        f"room, as by `rm -r {oldest}`, {why}"
    )
