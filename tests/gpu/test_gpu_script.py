"""What a GPU is measured by runs as it stands, at toy size on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def played(out: Path, seconds: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    given = {"PYTHON": sys.executable, "OUT": str(out), "SECONDS_IN_ALL": str(seconds), "OMP_NUM_THREADS": "1"}
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
    assert "left out: no time" in done.stdout or "stopped after its" in done.stdout
    assert "in all; logs in" in done.stdout
