"""At the edge of the machine: what cannot be written, no memory left, nobody who reads on."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from comingle.cli import _message_to_user

COMINGLE = [sys.executable, "-c", "from comingle.cli import main; main()"]
LONG = "x" * 300


def one_line(answer: Any) -> str:
    assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1), answer
    assert answer.err.startswith("comingle: ")
    return answer.err.removeprefix("comingle: ").rstrip()


@pytest.fixture
def finished(comingle: Any, recipe_file: Path, tmp_path: Path) -> Path:
    """A finished run."""
    answer = comingle("run", recipe_file, "--set", "method=pretrained", "--out", tmp_path / "run")
    assert answer.code == 0
    return tmp_path / "run"


def test_a_name_that_is_too_long_is_one_line(comingle: Any, recipe_file: Path, finished: Path, tmp_path: Path) -> None:
    long = tmp_path / LONG
    for command in (
        ("run", recipe_file, "--out", long),
        ("compare", recipe_file, "--methods", "local", "--out", long),
        ("report", finished, "--no-tokens", "--out", long),
        ("plot", finished, "--out", long),
        ("theory", "--out", long),
        ("show", long),
        ("data", long),
        ("report", long),
    ):
        assert one_line(comingle(*command)).endswith(": File name too long"), command


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_drawn(
    comingle: Any, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can make a file in /proc, not even root, whom a test may run as."""
    monkeypatch.setattr("comingle.reports.page.render_page", lambda *_: pytest.fail("it was drawn"))
    answer = comingle("report", finished, "--out", "/proc/page.html")
    assert one_line(answer) == "/proc/page.html: cannot be written: No such file or directory"


def test_theory_says_so_before_anything_is_computed(comingle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comingle_papers.theory.checks.check_all", lambda *_: pytest.fail("it was computed"))
    answer = comingle("theory", "--out", "/proc/figures")
    assert one_line(answer) == "/proc/figures: cannot be written to: No such file or directory"


@pytest.mark.parametrize("verb", ["plot", "run", "compare"])
def test_no_verb_has_a_traceback_for_such_a_folder(comingle: Any, recipe_file: Path, finished: Path, verb: str) -> None:
    command = {
        "plot": ("plot", finished, "--figure", "curves"),
        "run": ("run", recipe_file),
        "compare": ("compare", recipe_file, "--methods", "pretrained"),
    }[verb]
    assert one_line(comingle(*command, "--out", "/proc/figures")).startswith("/proc/figures")


@pytest.mark.slow
def test_a_file_that_grows_too_large_is_one_line(finished: Path) -> None:
    """As on a full disk: the system's error comes with a write, and names no file."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    command = [*COMINGLE, "report", str(finished), "--no-tokens"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, env=environment)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1] == f"comingle: {finished}/report.html: cannot be written: File too large"
    assert "Traceback" not in done.stderr


def raised(work: Callable[[], object]) -> Exception:
    with pytest.raises((OSError, MemoryError, RuntimeError)) as caught:
        work()
    return caught.value


def test_what_the_system_refuses_is_told_from_our_bugs(tmp_path: Path) -> None:
    missing = tmp_path / "none" / "file"
    assert _message_to_user(raised(lambda: missing.write_text(""))) == f"{missing}: No such file or directory"
    moved = _message_to_user(raised(lambda: missing.rename(tmp_path / "b")))
    assert moved == f"{missing} to {tmp_path / 'b'}: No such file or directory"
    assert str(_message_to_user(raised(lambda: bytearray(1 << 60)))).startswith("out of memory")
    assert "you tried to allocate" in str(_message_to_user(raised(lambda: torch.empty(1 << 58))))
    for ours in (RuntimeError("shape"), OSError("of a library"), KeyError("x"), AssertionError()):
        assert _message_to_user(ours) is None


@pytest.mark.parametrize(
    "words",
    [["methods"], pytest.param(["methods", "comigs"], marks=pytest.mark.slow), ["--help"]],
    ids=lambda words: " ".join(words),
)
def test_who_reads_only_the_beginning_hears_no_complaint(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # nobody reads at all: the first write fails
    done = subprocess.run([*COMINGLE, *words], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.stderr == ""
