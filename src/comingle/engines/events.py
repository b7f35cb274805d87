"""Events of a run: an append-only ``events.jsonl``, and TensorBoard where it is installed."""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comingle.records import GEOMETRIC, finite, measure_of

Observer = Callable[[dict[str, Any]], None]
"""Receives every event: ``{"event": NAME, ...}``. "step" events only tell of progress and are not kept."""


class EventLog:
    """Appends events to a file, one JSON object a line, flushed at once.

    ``size_bytes`` goes into each checkpoint: on resume the file is cut there, so that rounds which are run again do
    not appear twice, and a line torn by a crash disappears.
    """

    def __init__(self, path: Path, *, keep_bytes: int = 0):
        path.touch()
        with path.open("r+b") as file:
            file.truncate(min(keep_bytes, file.seek(0, os.SEEK_END)))  # never longer: that would fill it with zeros
        self._file = path.open("a", encoding="utf-8")

    def __call__(self, event: dict[str, Any]) -> None:
        """Take one event."""
        if event["event"] != "step":
            self._file.write(json.dumps(finite(event)) + "\n")
            self._file.flush()

    @property
    def size_bytes(self) -> int:
        """Length of the file so far."""
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Writes losses, test perplexities and expert scores to TensorBoard event files; needs the extra ``reports``."""

    def __init__(self, folder: Path):
        # torch's own writer needs nothing but the tensorboard package.
        self._writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder))

    def __call__(self, event: dict[str, Any]) -> None:
        """Take one event."""
        if event["event"] == "round":
            for user, loss in event["train_loss_nats"].items():
                self._writer.add_scalar(f"train_loss_nats/{user}", loss, event["round"])
            self._writer.add_scalar("tokens_per_second", event["tokens"] / event["seconds"], event["round"])
        elif event["event"] == "evaluation":
            name = f"test_{measure_of(event)}"
            for user, score in event["users"].items():
                self._writer.add_scalar(f"{name}/{user}", score[name], event["round"])
            for mean in (f"mean_{name}", GEOMETRIC):
                if event.get(mean) is not None:
                    self._writer.add_scalar(mean, event[mean], event["round"])
            self._experts(event)

    def _experts(self, event: dict[str, Any]) -> None:
        """Each expert's score, mean over layers."""
        for user, layers in event.get("expert_scores", {}).items():
            for expert, *scores in zip(event["experts"][user], *layers, strict=True):
                name = expert.replace(" ", "_")
                self._writer.add_scalar(f"expert_score/{user}/{name}", sum(scores) / len(scores), event["round"])

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


def tensorboard(folder: Path) -> TensorBoard | None:
    """A TensorBoard writer, or None (said once in the log) where the package is missing."""
    try:
        return TensorBoard(folder)
    except ImportError:
        logging.getLogger("comingle").info("no TensorBoard files: pip install 'comingle[reports]'")
        return None
