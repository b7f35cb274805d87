"""What a GPU is measured by runs as it stands, at toy size on the CPU."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from comingle.cost.counts import count_users
from comingle.models.loading import load_base
from comingle.training.backends.local import federate
from comingle.utils.errors import RecipeError

REPOSITORY = Path(__file__).parents[2]


def played(out: Path, seconds: int, *arguments: str, **others: str) -> subprocess.CompletedProcess[str]:
    given = {
        "PYTHON": sys.executable,
        "OUT": str(out),
        "SECONDS_IN_ALL": str(seconds),
        "OMP_NUM_THREADS": "1",
        **others,
    }
    command = ["bash", str(REPOSITORY / "benchmarks" / "gpu.sh"), *arguments]
    return subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True, timeout=seconds + 120)


@pytest.mark.slow
def test_it_prints_all_that_is_asked(tmp_path: Path) -> None:
    done = played(tmp_path, 500, "--toy")
    assert done.returncode == 0, done.stderr
    assert " passed" in done.stdout
    assert "failed" not in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "speed.json").read_text().splitlines()]
    measured = [line for line in lines if "tokens_per_s" in line]
    assert {(line["shape"], line["users"]) for line in measured} == {
        (shape, users) for shape in ("gpt2-124m", "smollm2-135m", "llama-1b") for users in (2, 4)
    }
    assert all(0 < line["of_peak"] < 1 and line["of_base"] > 0 and line["mb_per_user"] > 0 for line in measured)
    assert all(line["graphs"] > 0 for line in measured)
    triton = (float,) if find_spec("triton") else (str,)
    assert all(isinstance(line[way], triton) for line in measured for way in ("triton", "both"))
    assert any(line.get("usual", {}).get("float32", 0) > 0 for line in measured)
    assert '"seconds_a_round"' in done.stdout


@pytest.mark.slow
def test_what_has_no_time_is_named(tmp_path: Path) -> None:
    done = played(tmp_path, 12, "--toy")
    assert done.returncode == 0
    assert "left out: no time" in done.stdout or "stopped after its" in done.stdout
    assert "in all; logs in" in done.stdout


@pytest.mark.slow
def test_a_part_that_fails_is_named(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *pytest*) echo "FAILED one of them"; exit 3;; esac\n{sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    done = played(tmp_path, 60, "--toy", PYTHON=str(python), PARTS="tests")
    assert done.returncode == 1
    assert "failed with 3\nFAILED one of them" in done.stdout
    assert "failed, see there: tests.log" in done.stdout
    assert "== speed" not in done.stdout


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    return importlib.import_module("gpu")


def test_a_full_gpu_gets_fewer_users_at_once(speed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int | None] = []

    def measure(_: Any, __: Any, ___: Any, users: int, at_once: int | None, *____: float) -> int | None:
        tried.append(at_once)
        if at_once is None or at_once > 2:
            raise RecipeError("runtime: cuda has not the memory for a pass")
        return at_once

    monkeypatch.setattr(speed, "measure", measure)
    args = Namespace(batch=64, ctx=128)
    assert speed.measure_what_fits(args, {}, None, 256, 1.0, 1.0) == 2
    assert tried == [None, 4, 2]


def test_a_way_that_fails_is_no_end(speed: Any) -> None:
    """Triton's errors and CUDA's are of many types."""
    assert speed.try_measurement(lambda: 1 / 0) == "ZeroDivisionError: division by zero"


def test_products_that_are_counted_are_those_that_are_timed(speed: Any) -> None:
    """No step that is timed comes to the router's turn, so nothing of it counts."""
    args, shape = Namespace(toy=True, batch=4, ctx=16, compile=False), speed.SHAPES["llama-1b"]
    base = load_base(speed.base_name(shape, True), dtype="float32", device="cpu")
    clients = speed.make_clients(speed.throughput_arguments(args, shape, 2, None), base)
    joint, router = clients.phases
    assert (joint.every, router.every) == (1, 30)
    (spent,) = count_users(federate(clients), ("anybody",))
    assert 0 < speed.flops_per_token(clients) < spent.training.total


def test_chips_are_known_by_their_names(speed: Any) -> None:
    assert speed.chip_flops("NVIDIA H100 80GB HBM3") == speed.chip_flops("NVIDIA H200") == 989.4e12
    assert speed.chip_flops("NVIDIA H100 PCIe") == 756.5e12
    assert speed.chip_flops("another") is None
