"""What a run has left behind, whoever wrote it: one process or several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from comingle.training.checkpoints import shard_file
from comingle.utils.files import list_checkpoints
from comingle.utils.records import read_events

VOLATILE = {"wall_seconds", "samples_per_second", "tokens_per_second", "peak_memory_bytes"}


def told(folder: Path) -> list[dict[str, Any]]:
    """Its events, but for time."""
    return [{k: v for k, v in event.items() if k != "seconds"} for event in read_events(folder)]


def found(folder: Path) -> dict[str, Any]:
    """Its metrics, but for time and memory."""
    metrics = json.loads((folder / "metrics.json").read_text())
    return {key: value for key, value in metrics.items() if key not in VOLATILE}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The last checkpoint's tensors, with all users' rows in the order in which one process has them."""
    newest = list_checkpoints(folder)[-1]
    progress = json.loads((newest / "checkpoint.json").read_text())
    shards = progress.get("shards", [])
    count = len(shards)
    files = [shard_file(number, count) for number in range(count)] or ["state.safetensors"]
    parts = [load_file(newest / file) for file in files]
    whole: dict[str, torch.Tensor] = {}
    for name, first in parts[0].items():
        alike = name.startswith("server/") or name == "best/round"
        whole[name] = first if alike else _joined([part[name] for part in parts], shards)
    return whole | (load_file(newest / "server.safetensors") if count else {})


def _joined(parts: list[torch.Tensor], users: list[int]) -> torch.Tensor:
    """Copies of everybody's tensors stand below one another."""
    counted = zip(parts, users or [len(parts[0])], strict=True)
    return torch.cat([part.view(-1, count, *part.shape[1:]) for part, count in counted], 1).flatten(0, 1)


def unequal(one: Path, other: Path) -> list[str]:
    """What differs in any bit between two runs; by how much, where they are numbers."""
    mine, theirs = tensors(one), tensors(other)
    assert mine.keys() == theirs.keys()
    differ = [
        f"{name}: {float((mine[name].double() - theirs[name].double()).abs().max())}"
        for name in mine
        if not torch.equal(mine[name], theirs[name])
    ]
    differ += [f"event {a} {b}" for a, b in zip(told(one), told(other), strict=True) if json.dumps(a) != json.dumps(b)]
    return differ + ([] if json.dumps(found(one)) == json.dumps(found(other)) else ["metrics"])
