"""How a ServerApp fares, said in its run folder: Flower throws away what the app prints, and says late that it died.

``app.json`` is the app's process and whether it has finished; ``app.log`` has a line for each thing worth saying.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from comingle.federation.flower.worker import Keeper
from comingle.utils.records import write_text
from comingle.utils.terminal import printable

FOLDER, STATE, LOG = "flower", "app.json", "app.log"

RUNNING, FINISHED, FAILED, BROKEN = "running", "finished", "failed", "broken"
"""``failed`` is a person's mistake, which another start does not mend; ``broken`` is all else that can go wrong."""


@dataclass(frozen=True, kw_only=True)
class State:
    """What ``app.json`` says."""

    process: Keeper
    state: str = RUNNING
    line: str = ""

    @property
    def alive(self) -> bool:
        """Whether the app is at work."""
        return self.state == RUNNING and self.process.lives()


def read_state(folder: Path) -> State | None:
    """How the app of a run folder fares; None before its first start."""
    try:
        said = json.loads((folder / FOLDER / STATE).read_text(encoding="utf-8"))
        return State(**(said | {"process": Keeper(**said["process"])}))
    except (OSError, ValueError, TypeError, KeyError):
        return None


class Fate:
    """The app's own side."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        self._process = Keeper.of(os.getpid())

    @classmethod
    def begin(cls, folder: Path) -> Fate:
        """The app has been started."""
        fate = cls(folder)
        fate._folder.mkdir(parents=True, exist_ok=True)
        fate._write(RUNNING)
        return fate

    def say(self, line: str) -> None:
        """One line for whoever watches."""
        with (self._folder / LOG).open("a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%F %T')} {printable(' '.join(line.split()))}\n")

    def finish(self) -> None:
        """All rounds are done."""
        self._write(FINISHED)

    def fail(self, line: str) -> None:
        """A person has to mend something."""
        self.say(line)
        self._write(FAILED, line)

    def break_off(self, line: str) -> None:
        """Something else went wrong: another start may go well."""
        self.say(line)
        self._write(BROKEN, line)

    def _write(self, state: str, line: str = "") -> None:
        write_text(self._folder / STATE, json.dumps(asdict(State(process=self._process, state=state, line=line))))
