"""How a run is stopped in the middle, and what it leaves behind that a resumed one must leave too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from comingle.utils.files import list_checkpoints
from comingle.utils.records import read_events

DRIVER = Path(__file__).parent / "training" / "kill_driver.py"
VOLATILE = {"wall_seconds", "samples_per_second", "tokens_per_second", "peak_memory_bytes"}


class StoppedError(Exception):
    """Stands for whatever ends a run in the middle."""


def stop_in_round_3(event: dict[str, Any]) -> None:
    """An observer that stops after the round's first local iteration."""
    if event["event"] == "step" and event["round"] == 3 and event["advance"]:
        raise StoppedError


def moments_of(request: pytest.FixtureRequest) -> list[str]:
    """The moments of the tests that are run of a module, in order: those of a sample, or all."""
    alike = (item for item in request.session.items if getattr(item, "module", None) is request.module)
    given = (one.callspec.params for one in alike if hasattr(one, "callspec"))
    return list(dict.fromkeys(params["moment"] for params in given if "moment" in params))


def kill(recipe: Path, folder: Path, *moments: str) -> Path:
    """``folder``, with a run below it for each moment (all by default) at which its process was killed."""
    command = [sys.executable, str(DRIVER), str(recipe), str(folder), *moments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def final(folder: Path) -> dict[str, Any]:
    """What a finished run has found: its metrics, but for time and memory."""
    metrics = json.loads((folder / "metrics.json").read_text())
    return {key: value for key, value in metrics.items() if key not in VOLATILE}


def told(folder: Path) -> list[dict[str, Any]]:
    """Its events, but for time."""
    return [{k: v for k, v in event.items() if k != "seconds"} for event in read_events(folder)]


def state(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of its last checkpoint, after four rounds."""
    newest = list_checkpoints(folder)[-1]
    assert newest.name == "round-0004"
    return load_file(newest / "state.safetensors")


def outcome(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Users' scores and bytes of a finished run, and its tensors."""
    metrics = final(folder)
    kept = {key: metrics[key] for key in ("users", "upload_bytes_per_user_round", "download_bytes_per_user_round")}
    return kept, state(folder)
