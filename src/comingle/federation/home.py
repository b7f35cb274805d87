"""A user's own part of a run: the model that it trains, and its private state on disk.

Everything lies in ``STATE/run-RUN/``: ``public.json`` (what the server said of the federation), ``checkpoints/`` (the
user's tensors after each of its last tasks) and ``answers/`` (what it answered). A task that was done once is answered
again without being done again; one that the server did not count is undone by the next of the same number.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from comingle.config import Recipe
from comingle.config.settings import Privacy
from comingle.federation.masking import Sessions
from comingle.federation.own import Own, Tells
from comingle.federation.public import Public
from comingle.federation.tasks import unpack_answer
from comingle.privacy.noise import digest, spent_by
from comingle.protocol.wire import unpack
from comingle.training.checkpoints import load_checkpoint, progress_of, prune_checkpoints, save_checkpoint
from comingle.training.client import Clients
from comingle.training.kinds.base import Materials
from comingle.training.state import State
from comingle.utils.errors import MessageError
from comingle.utils.files import list_checkpoints
from comingle.utils.records import DRAFT, told_in_one_line, write_bytes, write_json

logger = logging.getLogger("comingle")

LEDGER = "privacy.json"
"""Every upload, or round of steps, with noise of the user's own that was ever made in a run, and the epsilon of all."""
KEPT, KEPT_OF_SUMS = 4, 7
"""So many tasks can be undone, or answered again: more than the server asks for between two of its checkpoints. A sum
behind masks takes three more."""


@dataclass(kw_only=True)
class Home:
    """``serial`` is the number of the last task that was done."""

    folder: Path
    public: Public
    recipe: Recipe
    read: Materials
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
        return KEPT if self.clients.training.sums is None else KEPT_OF_SUMS

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
        noised = self.clients.steps.noised
        return {} if noised is None else {"examples": noised.work(self.clients.feed, 0).examples}

    def tells(self, own: Own) -> Tells:
        """What the user tells of itself: with privacy nothing, unless its own file says so."""
        return own.tells or ("scores" if self.clients.training.privacy is None else "nothing")

    def note_release(self, data: bytes) -> str:
        """Write down, before it leaves, that an upload with the user's own noise does; why it may not, if it may not.

        The same upload again reveals nothing new; another one for the same task does, and what it cost is not undone.
        """
        shield = self.clients.shield
        if shield is None or shield.privacy.mechanism != "local":
            return ""
        return self._note(shield.privacy, hashlib.sha256(data).hexdigest(), shield.epsilon)

    def note_steps(self, number: int) -> str:
        """The same, before the steps of round ``number`` are taken, where these hide the user's single examples."""
        clients = self.clients
        if (noised := clients.steps.noised) is None:
            return ""
        work, privacy = noised.work(clients.feed, 0), noised.examples.privacy
        begins = f"{number} {clients.steps.local_steps} {digest(clients.state.tensors())}"
        named = hashlib.sha256(begins.encode()).hexdigest()
        return self._note(privacy, named, lambda rounds: spent_by(privacy, work, rounds * work.steps))

    def _note(self, privacy: Privacy, release: str, epsilon: Callable[[int], float]) -> str:
        path = self.folder / LEDGER
        known = json.loads(path.read_text(encoding="utf-8"))["releases"] if path.exists() else []
        releases = sorted({*known, release})
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
