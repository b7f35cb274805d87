"""The program behind ``make golden``: equal digests, changed bits, changed numbers, and a commit to compare with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from golden import compare

GOLDEN = Path(__file__).with_name("golden.py")
REPOSITORY = Path(__file__).parents[2]
SOURCES = os.pathsep.join(str(REPOSITORY / place) for place in ("src", "papers/src"))
ONE = ("--only", "^net/fedavg$", "--jobs", "1")


def golden(*arguments: str) -> tuple[int, str]:
    ended = subprocess.run(
        [sys.executable, str(GOLDEN), *ONE, *arguments],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "COMINGLE_NO_TYPECHECK": "1",
            "PYTHONPATH": os.pathsep.join(str(REPOSITORY / place) for place in ("src", "papers/src")),
        },
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.slow
def test_bits_are_compared(tmp_path: Path) -> None:
    digests = tmp_path / "digests.json"
    status, said = golden("--digests", str(digests), "--write")
    assert status == 0, said
    kept = json.loads(digests.read_text())
    kept["cases"]["net/fedavg"]["tensors"] = "0" * 16
    digests.write_text(json.dumps(kept))
    status, said = golden("--digests", str(digests))
    assert status == 1
    assert "net/fedavg: tensors: 0000000000000000 -> " in said


def test_numbers_are_compared_within_a_tolerance_on_another_machine() -> None:
    kept = {"tensors": "a", "mean": 2.0, "upload_bytes": 100}
    assert not compare({"tensors": "b", "mean": 2.000002, "upload_bytes": 100}, kept, "nothing", rounded=True)
    assert len(compare({"tensors": "b", "mean": 2.000002, "upload_bytes": 100}, kept, "nothing")) == 2
    assert len(compare({"tensors": "a", "mean": 2.0002, "upload_bytes": 101}, kept, "nothing", rounded=True)) == 2


@pytest.mark.slow
@pytest.mark.skipif(not (REPOSITORY / ".git").exists(), reason="not a git checkout")
def test_a_commit_is_run_beside_this_checkout() -> None:
    status, said = golden("--base", "HEAD")
    assert "1 cases, " in said
    assert "every bit" in said
    assert status in (0, 1), said  # uncommitted changes of numbers are not this test's matter
    assert "golden" not in subprocess.run(["git", "worktree", "list"], capture_output=True, text=True).stdout


@pytest.mark.slow
def test_an_unknown_commit_is_refused() -> None:
    status, said = golden("--base", "no-such-commit")
    assert status
    assert "got 'no-such-commit'" in said
