"""Status of a ServerApp in its run folder. Flower discards the app's output and reports late that it has died.

``app.json`` has the app's process and its state; ``app.log`` has the lines for the operator.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from comingle.federation.flower.processes import ProcessId
from comingle.utils.records import write_text
from comingle.utils.terminal import printable

FOLDER, STATE, LOG = "flower", "app.json", "app.log"

RUNNING, FINISHED, FAILED, BROKEN = "running", "finished", "failed", "broken"
"""``failed`` is a mistake of the operator, which a restart does not fix; ``broken`` is any other failure."""


@dataclass(frozen=True, kw_only=True)
class AppStatus:
    """Content of ``app.json``.

    Args:
        process: The process in which the app runs or has run.
        state: "running", "finished", "failed" or "broken".
        line: Why the app has failed, for the operator; empty if it has not.
    """

    process: ProcessId
    state: str = RUNNING
    line: str = ""

    @property
    def alive(self) -> bool:
        """True if the app is running."""
        return self.state == RUNNING and self.process.is_alive()


def read_status(folder: Path) -> AppStatus | None:
    """Return the status of a run folder's app; None before its first start, or if the file is damaged."""
    try:
        content = json.loads((folder / FOLDER / STATE).read_text(encoding="utf-8"))
        content["process"] = ProcessId(**content["process"])
        return AppStatus(**content)
    except (OSError, ValueError, TypeError, KeyError):
        return None


class StatusWriter:
    """Writes the status of the app in this process, such as running or failed, into the run folder."""

    def __init__(self, folder: Path) -> None:
        """Create the writer of this process's status for a run folder, without writing yet."""
        self._folder = folder / FOLDER
        self._process = ProcessId.of(os.getpid())

    @classmethod
    def begin(cls, folder: Path) -> StatusWriter:
        """Record that the app has started; return the writer that records how it ends."""
        writer = cls(folder)
        writer._folder.mkdir(parents=True, exist_ok=True)
        writer._write(RUNNING)
        return writer

    def say(self, line: str) -> None:
        """Write one line for the operator, with the time before it."""
        words = line.split()
        with (self._folder / LOG).open("a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%F %T')} {printable(' '.join(words))}\n")

    def finish(self) -> None:
        """Record that all rounds are done."""
        self._write(FINISHED)

    def fail(self, line: str) -> None:
        """Record that the app has failed because of a mistake of the operator, so that a restart would not help.

        Args:
            line: What is wrong, in one line.
        """
        self.say(line)
        self._write(FAILED, line)

    def fail_unexpectedly(self, line: str) -> None:
        """Record that the app has failed without a mistake of the operator, so that a restart may succeed.

        Args:
            line: What has happened, in one line.
        """
        self.say(line)
        self._write(BROKEN, line)

    def _write(self, state: str, line: str = "") -> None:
        status = AppStatus(process=self._process, state=state, line=line)
        write_text(self._folder / STATE, json.dumps(asdict(status)))
