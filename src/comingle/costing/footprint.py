"""What a process holds that only just runs: Python, torch, transformers and their buffers, measured on this machine."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from comingle.models.base import logger

Kind = Literal["text", "samples"]

FALLBACK_BYTES = 430_000_000
"""Where it cannot be measured: what was on Linux with torch 2.13."""

_SECONDS = 120


def process_bytes(kind: Kind, device: torch.device) -> int:
    """Peak resident memory of a run of the smallest model there is, in a process of its own; nothing on a GPU.

    Measured once in each process, which takes some seconds.
    """
    return _measured(kind) if device.type == "cpu" else 0


@cache
def _measured(kind: Kind) -> int:
    try:
        command = [sys.executable, "-m", "comingle.costing.footprint", kind]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
        return int(done.stdout.split()[-1])
    except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
        logger.info("a process's own memory could not be measured (%s); counted as %d", error, FALLBACK_BYTES)
        return FALLBACK_BYTES


def _smallest(kind: Kind, folder: Path) -> dict[str, Any]:
    """A recipe of one step, by the plainest method that exchanges."""
    if kind == "samples":
        np.savez(folder / "samples.npz", x=np.zeros((20, 10), np.float32), y=np.zeros((20, 1), np.float32))
        data = {"kind": "samples", "users": {"one": str(folder / "samples.npz")}}
        return {"method": "fedavg", "data": data, "training": {"rounds": 1}, "runtime": {"device": "cpu"}}
    (folder / "text.txt").write_text("some words\n\n" * 300, encoding="utf-8")
    return {
        "base": "random:llama?layers=1",
        "method": "fedavg",
        "data": {"users": {"one": str(folder / "text.txt")}},
        "training": {"rounds": 1, "local_steps": 1, "batch_size": 1, "context": 8},
        "runtime": {"device": "cpu", "dtype": "float32", "compile": False},
    }


def main() -> None:
    """Run the smallest recipe of a kind and print the process's peak."""
    from comingle.config import parse_recipe
    from comingle.runs.api import run
    from comingle.training.runtime import peak_memory_bytes

    kind: Any = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        run(parse_recipe(_smallest(kind, Path(folder))))
    print(peak_memory_bytes())


if __name__ == "__main__":
    main()
