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

MEASURES = {"perplexity": "lower", "accuracy": "higher", "rouge1": "higher", "loss": "lower"}
"""What models are compared by, and which way is better."""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """The result of a run.

    ``measure`` is what models are compared by: each user has ``test_<measure>``, and the run their mean,
    ``mean_test_<measure>``. ``unit`` is what data is counted in, tokens or samples: each user has ``train_<unit>`` and
    so on, and the run ``<unit>_per_second``, over the time of local work. ``selected_round`` is the round with whose
    models the run ended.
    """

    method: str
    seed: int
    base: str
    rounds: int
    selected_round: int
    measure: str
    unit: str
    users: dict[str, dict[str, float | int | None]]
    mean: float
    upload_bytes_per_user_round: float
    download_bytes_per_user_round: float
    trainable_parameters: int
    per_second: float
    wall_seconds: float
    peak_memory_bytes: int
    dtype: str
    device: str

    def as_dict(self) -> dict[str, Any]:
        """As nested dictionaries."""
        found = asdict(self)
        found[f"mean_test_{self.measure}"] = found.pop("mean")
        found[f"{self.unit}_per_second"] = found.pop("per_second")
        return found


def measure_of(record: dict[str, Any]) -> str:
    """What a run's metrics, an evaluation or a row of a comparison is measured by: a key of :data:`MEASURES`."""
    return next(name for name in MEASURES if f"mean_test_{name}" in record)


def describe_metrics(metrics: dict[str, Any]) -> str:
    """A run's metrics in half a line."""
    measure = measure_of(metrics)
    mean = metrics[f"mean_test_{measure}"]
    found = "not finite" if mean is None else f"{mean:.4g}"
    size = f"{len(metrics['users'])} users, {metrics['rounds']} rounds"
    return f"{metrics['method']} on {metrics['base']}, {size}, mean test {measure} {found}"


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
        RunError: no such run, one that has not finished, or a damaged file.
    """
    path = run / "metrics.json"
    if not run.is_dir():
        raise RunError(f"{run}: no such run folder")
    if not path.exists():
        unfinished = (run / "events.jsonl").exists()
        hint = f"continue it with `comingle run --resume {run}`" if unfinished else "it is not a run folder"
        raise RunError(f"{run}: no metrics.json; {hint}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{path}: not JSON ({error}); delete it and `comingle run --resume {run}`") from None


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
