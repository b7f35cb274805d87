"""What a run writes down: plain records that reports can read without torch.

A run folder holds ``recipe.yaml``, ``events.jsonl`` (one event a line, in order), ``metrics.json`` (written at the end)
and ``checkpoints/round-NNNN/``.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from comingle.errors import RunError


@dataclass(frozen=True, kw_only=True)
class UserMetrics:
    """What one user ends up with."""

    test_perplexity: float
    test_loss_nats: float
    test_tokens: int
    train_tokens: int
    valid_tokens: int
    trainable_parameters: int
    upload_bytes_per_round: int


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """The result of a run. ``tokens_per_second`` counts training tokens over the time of local work."""

    method: str
    seed: int
    base: str
    rounds: int
    users: dict[str, UserMetrics]
    mean_test_perplexity: float
    upload_bytes_per_user_round: float
    download_bytes_per_user_round: float
    trainable_parameters: int
    tokens_per_second: float
    wall_seconds: float
    peak_memory_bytes: int
    dtype: str
    device: str

    def as_dict(self) -> dict[str, Any]:
        """As nested dictionaries."""
        return asdict(self)


def write_text(path: Path, text: str) -> None:
    """Write a file under a temporary name, then rename: a reader or a crash sees the old file or the new one."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.chmod(name, 0o644)
    os.replace(name, path)


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically; NaN and infinity become null, which every JSON reader understands."""
    write_text(path, json.dumps(finite(content), indent=2) + "\n")


def finite(value: Any) -> Any:
    """``value`` with every non-finite number replaced by None."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(run: Path) -> dict[str, Any]:
    """The metrics of a finished run.

    Raises:
        RunError: no such run, or one that has not finished.
    """
    path = run / "metrics.json"
    if not run.is_dir():
        raise RunError(f"{run}: no such run folder")
    if not path.exists():
        unfinished = (run / "events.jsonl").exists()
        hint = f"continue it with `comingle run --resume {run}`" if unfinished else "it is not a run folder"
        raise RunError(f"{run}: no metrics.json; {hint}")
    return json.loads(path.read_text(encoding="utf-8"))


def read_events(run: Path) -> Iterator[dict[str, Any]]:
    """The events of a run, in order; a last line torn by a crash is skipped."""
    path = run / "events.jsonl"
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return
