"""Users shared out over processes with a GPU each: tensors there go through NCCL, and a run is that of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import method, text_recipe
from on_device import recipe_of
from pretend import Pretended

import comingle
from comingle.training.backends.distributed import sum_over_processes
from comingle.training.backends.launched import Place
from comingle.training.backends.ranks import Ranks, joined

HERE = Path(__file__).parent


def launched(folder: Path, recipe: dict[str, Any], processes: int, *, pretends: bool) -> dict[str, Any]:
    """Metrics of a run in so many processes, started as torchrun starts them."""
    (folder / "recipe.json").write_text(json.dumps(recipe), encoding="utf-8")
    command = [sys.executable, str(HERE / "rank.py"), str(folder / "recipe.json"), str(folder / "run")]
    command.append("yes" if pretends else "no")
    paths = [str(HERE), *sys.path]
    shared = {
        "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "COMINGLE_MEETING": str(folder / "meeting"),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path), "OMP_NUM_THREADS": "1",
        "COMINGLE_NO_TYPECHECK": "1",
    }  # fmt: skip
    places = [{**os.environ, **shared, "RANK": str(i), "LOCAL_RANK": str(i)} for i in range(processes)]
    ranks = [subprocess.Popen(command, env=place, stderr=subprocess.PIPE, text=True) for place in places]
    said = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * processes, said
    return json.loads((folder / "run" / "metrics.json").read_text(encoding="utf-8"))


def recipe_on(folder: Path, name: str, sums: str, device: str) -> dict[str, Any]:
    changes = {"runtime.shard_sums": sums, "runtime.dtype": "float32", "evaluation.first": False}
    return recipe_of(text_recipe(folder, method(name)), device, **changes).model_dump(mode="json")


@pytest.mark.parametrize("sums", ["reduced", "ordered"])
@pytest.mark.parametrize("name", ["fedavg", "comigs-1g1s"])
def test_two_processes_run_what_one_does(tmp_path: Path, device: str, rounding: float, name: str, sums: str) -> None:
    pretends = isinstance(torch.zeros(1, device=device), Pretended)
    if device == "cuda" and not pretends and torch.cuda.device_count() < 2:
        pytest.skip("one GPU here, and NCCL wants one for each process")
    recipe = recipe_on(tmp_path, name, sums, device)
    one = comingle.run(recipe, out=tmp_path / "one").metrics
    two = launched(tmp_path, recipe, 2, pretends=pretends)
    for user, scores in one["users"].items():
        found = {key: value for key, value in two["users"][user].items() if isinstance(value, float)}
        assert found == pytest.approx({key: scores[key] for key in found}, rel=rounding)


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    with joined(Place(rank=0, size=1, local_rank=0, local_size=1, rendezvous_file=str(tmp_path / "meeting"))) as ranks:
        yield ranks


@pytest.mark.gpu
def test_one_gpu_is_reached_through_nccl(alone: Ranks) -> None:
    """All that two processes say to each other but sending to one of them, by a group of one."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU here")
    assert "nccl" in str(dist.get_backend_config())
    tree = {
        "wide": torch.arange(6.0, device="cuda").view(2, 3),
        "short": torch.ones(2, 0, device="cuda"),
        "narrow": torch.ones(2, 5, device="cuda", dtype=torch.bfloat16),
        "which": torch.tensor([[True], [False]], device="cuda"),
    }
    for name, t in alone.broadcast(tree).items():
        assert t.device.type == "cuda"
        assert torch.equal(t, tree[name])
    weights = {name: torch.tensor([0.25, 0.75], device="cuda") for name in ("wide", "narrow")}
    some = {name: tree[name] for name in weights}
    found = sum_over_processes(some, weights, 2, reduce_max=alone.reduce_max, reduce_sum=alone.reduce_sum)
    assert found["wide"].device.type == "cuda"
    assert found["wide"].tolist() == [2.25, 3.25, 4.25]
    assert found["narrow"].tolist() == [1.0] * 5
    torch.cuda.synchronize()
