"""Two runs on the same processors: threads that wait for each other must not keep those from work who they wait for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = """
import os, sys
from comingle.cli import main
early = "torch" in sys.modules
sys.argv = ["comingle", "methods", "local"]
try:
    main()
finally:
    print(early, os.environ.get("GOMP_SPINCOUNT"), file=sys.stderr)
"""
PROGRAM = """
import os, sys
import comingle
early = "torch" in sys.modules
comingle.run
print(early, os.environ.get("GOMP_SPINCOUNT"), file=sys.stderr)
"""


def stderr_of(program: str, given: dict[str, str]) -> str:
    apart = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")
    clean = {key: value for key, value in os.environ.items() if key not in apart}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=clean | given, capture_output=True, text=True, check=True).stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
@pytest.mark.parametrize("program", [COMMAND, PROGRAM])
def test_waiting_threads_soon_sleep_unless_the_user_says_otherwise(
    program: str, given: dict[str, str], spins: str
) -> None:
    """torch reads it when it is imported, which therefore comes later."""
    assert stderr_of(program, given).split() == ["False", spins]


@pytest.mark.slow
def test_a_program_that_imports_torch_first_is_warned_once() -> None:
    program = "import torch, comingle, comingle.utils.errors; comingle.run; comingle.Recipe"
    lines = stderr_of(program, {}).splitlines()
    assert len(lines) == (1 if sys.platform == "linux" else 0)
    assert all("imported after torch" in line and "GOMP_SPINCOUNT=2000" in line for line in lines)
    for given in ({"GOMP_SPINCOUNT": "2000"}, {"OMP_NUM_THREADS": "1"}, {"OMP_WAIT_POLICY": "passive"}):
        assert stderr_of(program, given) == ""


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py")), ids=lambda p: p.stem)
def test_benchmarks_import_comingle_before_torch(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    firsts = [line.split()[1].partition(".")[0] for line in lines if line.startswith(("import ", "from "))]
    if "torch" in firsts and path.stem != "peers_theirs":  # which runs where comingle is not installed
        assert "comingle" in firsts[: firsts.index("torch")]
