"""Events of a run: an append-only ``events.jsonl``, and TensorBoard where it is installed."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comingle.utils.records import GEOMETRIC, finite, logger, measure_of

Observer = Callable[[dict[str, Any]], None]
"""Receives every event: ``{"event": NAME, ...}``. "step" events only tell of progress and are not kept."""


class EventLog:
    """Appends events to a file, one JSON object a line, each with the system at once.

    ``size_bytes`` goes into each checkpoint, after :meth:`to_disk`: on resume the file is cut there, so that rounds
    which are run again do not appear twice, and a line torn by a crash disappears. A file that has lost something since
    is cut at its last whole line, which is told; never is it filled up or written through a link.
    """

    def __init__(self, path: Path, *, keep_bytes: int = 0):
        self._file = open(path, "a+b", buffering=0, opener=_open_unlinked)  # noqa: SIM115
        self._file.seek(0)
        self.size_bytes = _whole(path, self._file.read(keep_bytes), keep_bytes)
        self._file.truncate(self.size_bytes)

    def __call__(self, event: dict[str, Any]) -> None:
        """Take one event.

        Raises:
            OSError: the disk does not take it; what it took is removed again.
        """
        if event["event"] == "step":
            return
        line = (json.dumps(finite(event)) + "\n").encode()
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError:
            self._file.truncate(self.size_bytes)
            raise
        self.size_bytes += len(line)

    def to_disk(self) -> None:
        """Return when everything so far would outlive a power cut."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _open_unlinked(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def _whole(path: Path, kept: bytes, expected: int) -> int:
    """How many bytes of a log are whole lines, of as many as a checkpoint expects; told if it is fewer."""
    size = kept.rfind(b"\n") + 1
    if size < expected:
        state = f"cut after {size} bytes, its last whole line" if size else "missing or empty, so begun anew"
        logger.warning("%s: %s; %d bytes were written, and reports lack what is lost", path, state, expected)
    return size


def scalars(event: dict[str, Any]) -> dict[str, float]:
    """The numbers of an event by name: losses, test results and expert scores of each user, and means."""
    if event["event"] == "round":
        found = {f"train_loss_nats/{user}": loss for user, loss in event["train_loss_nats"].items()}
        # Somebody took part:
        return found | ({"tokens_per_second": event["tokens"] / event["seconds"]} if event["seconds"] else {})
    if event["event"] == "privacy":
        return {"epsilon": event["epsilon"]}
    if event["event"] != "evaluation":
        return {}
    name = f"test_{measure_of(event)}"
    users = {f"{name}/{user}": score[name] for user, score in event["users"].items()}
    means = {mean: event[mean] for mean in (f"mean_{name}", GEOMETRIC) if event.get(mean) is not None}
    return users | means | _expert_scalars(event)


def _expert_scalars(event: dict[str, Any]) -> dict[str, float]:
    """Each expert's score, mean over layers."""
    return {
        f"expert_score/{user}/{expert.replace(' ', '_')}": sum(scores) / len(scores)
        for user, layers in event.get("expert_scores", {}).items()
        for expert, *scores in zip(event["experts"][user], *layers, strict=True)
    }


class TensorBoard:
    """Writes losses, test perplexities and expert scores to TensorBoard event files; needs the extra ``reports``."""

    def __init__(self, folder: Path):
        # torch's own writer needs nothing but the tensorboard package.
        self._writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder))

    def __call__(self, event: dict[str, Any]) -> None:
        """Take one event."""
        for name, value in scalars(event).items():
            self._writer.add_scalar(name, value, event["round"])

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


def tensorboard(folder: Path) -> TensorBoard | None:
    """A TensorBoard writer, or None (said once in the log) where the package is missing."""
    try:
        return TensorBoard(folder)
    except ImportError:
        logger.info("no TensorBoard files: pip install 'comingle[reports]'")
        return None
