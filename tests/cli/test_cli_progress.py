"""What is said of a run while it runs: lines where there is no terminal, a bar in one, one line in a notebook."""

from __future__ import annotations

import builtins
import os
import pty
import re
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

import comingle as package
from comingle.cli import main
from comingle.config import load_recipe
from comingle.runs import progress
from comingle.runs.session import build, prepare
from comingle.utils.records import read_events
from comingle.utils.terminal import Terminal

COMINGLE = [sys.executable, "-c", "from comingle.cli import main; main()"]
ROUND = re.compile(r"comigs-1g1s, seed 0 · round (\d)/4 · training loss ([\d.]+)(.*)")
LOADING = "loading the base model and the users' data"


def losses_of(run: Path) -> list[float]:
    """The mean training loss of each round, as the events have it."""
    rounds = [event["train_loss_nats"].values() for event in read_events(run) if event["event"] == "round"]
    return [sum(losses) / len(losses) for losses in rounds]


@pytest.mark.slow
def test_a_process_without_a_terminal_says_a_line_a_round(recipe_file: Path, tmp_path: Path) -> None:
    command = [*COMINGLE, "run", str(recipe_file), "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \S", line) for line in lines)
    first, *rounds, last = [line[20:] for line in lines]
    assert first == LOADING
    found = [ROUND.fullmatch(line) for line in rounds]
    assert [match[1] for match in found if match] == ["1", "2", "3", "4"]
    assert [float(match[2]) for match in found if match] == pytest.approx(losses_of(tmp_path / "run"), rel=1e-3)
    assert [bool(re.search(r" · about \d+ (s|min|h|days) left$", line)) for line in rounds] == [True, True, True, False]
    assert " · test perplexity " in rounds[0]
    assert " after round 0" in rounds[0]
    assert re.fullmatch(r"comigs-1g1s, seed 0 · done after \d+ s · test perplexity [\d.]+", last)
    assert "training loss" not in done.stdout


@pytest.mark.parametrize("option", ["--quiet", "-q"])
def test_quiet_says_nothing(comingle: Any, recipe_file: Path, tmp_path: Path, option: str) -> None:
    told = comingle("run", recipe_file, "--out", tmp_path / "told")
    quiet = comingle("run", recipe_file, "--out", tmp_path / "quiet", option)
    assert (quiet.code, quiet.err, quiet.progress) == (0, "", ())
    assert len(told.progress) == 6
    assert losses_of(tmp_path / "told") == losses_of(tmp_path / "quiet")


def test_a_resumed_run_goes_on_where_it_was(
    comingle: Any, recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "round" and event["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        package.run(recipe_file, out=tmp_path / "run", observers=[stop])
    again = comingle("run", recipe_file, "--out", tmp_path / "run", "--resume")
    assert again.code == 0
    rounds = [match[1] for line in again.progress if (match := ROUND.fullmatch(line))]
    assert rounds == ["3", "4"]


def test_compare_says_which_run_it_is_at(comingle: Any, recipe_file: Path, tmp_path: Path) -> None:
    answer = comingle("compare", recipe_file, "--methods", "pretrained,local", "--seeds", 0, "--out", tmp_path / "out")
    assert answer.code == 0
    rounds = [line.partition(" · training")[0] for line in answer.progress if "training loss" in line]
    assert rounds == [f"run 2 of 2 · local, seed 0 · round {number}/4" for number in (1, 2, 3, 4)]
    assert any(line.startswith("run 1 of 2 · pretrained, seed 0 · done ") for line in answer.progress)
    quiet = comingle(
        "compare", recipe_file, "--methods", "pretrained", "--seeds", 0, "--out", tmp_path / "quiet", "--quiet"
    )
    assert (quiet.code, quiet.err, quiet.progress) == (0, "", ())


SMOKE = ("reproduce", "comigs/table1", "--scale", "smoke", "--columns", "multilingual", "--methods", "pretrained,local")


@pytest.mark.slow
def test_reproduce_says_a_line_a_round(comingle: Any, tmp_path: Path) -> None:
    options = (*SMOKE, "--jobs", 1)
    answer = comingle(*options, "--out", tmp_path / "out")
    assert answer.code == 0, answer.err
    assert any(
        re.match(r"multilingual · local, seed 0 · round 1/\d+ · training loss [\d.]+", x) for x in answer.progress
    )
    assert answer.progress[0] == LOADING
    quiet = comingle(*options, "--out", tmp_path / "quiet", "--quiet")
    assert (quiet.code, quiet.err, quiet.progress) == (0, "", ())


@pytest.mark.slow
def test_thousands_of_short_rounds_do_not_fill_a_log(
    comingle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The published task has 2,000 rounds of milliseconds; the first is printed, and one every few seconds."""
    options = ("--scale", "smoke", "--columns", "linear", "--methods", "fedavg", "--jobs", 1)
    longer = ("--set", "training.rounds=101", "--set", "evaluation.every=50")
    monkeypatch.setattr(progress, "PAUSE_SECONDS", 1000.0)
    answer = comingle("reproduce", "floral/table3", *options, *longer, "--out", tmp_path / "long")
    assert answer.code == 0, answer.err
    assert [line for line in answer.progress if " · round " in line] == [answer.progress[1]]
    assert " · round 1/101 · training loss " in answer.progress[1]
    assert " · done after " in answer.progress[-1]
    monkeypatch.setattr(progress, "PAUSE_SECONDS", 0.0)
    answer = comingle("reproduce", "floral/table3", *options, *longer, "--out", tmp_path / "slow")
    assert sum(" · round " in line for line in answer.progress) == 101


@pytest.mark.slow
def test_runs_side_by_side_say_a_line_a_round_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """From processes of their own, whose stderr is this one's."""
    words = [*SMOKE, "--jobs", "2", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["comingle", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    told = capfd.readouterr().err
    assert not stop.value.code, told
    assert "multilingual · local, seed 0 · round 1/" in told
    assert "2/2 multilingual · " in told


# ---------------------------------------------------------------- Python


def test_python_says_nothing_unless_asked(recipe_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    package.run(recipe_file, method="pretrained")
    assert capfd.readouterr() == ("", "")
    package.run(recipe_file, method="pretrained", progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert [line[20:].partition(" after")[0] for line in err.splitlines()] == [LOADING, "pretrained, seed 0 · done"]


@pytest.mark.slow
def test_a_long_round_says_something_from_time_to_time(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LONG_SECONDS", 0.2)

    def slow(event: dict[str, Any]) -> None:
        evaluating = event.get("evaluating") and event["round"] == 0
        if evaluating or (event["event"] == "step" and event["round"] == 2 and event["advance"]):
            time.sleep(0.7)

    package.run(recipe_file, progress=True, observers=[slow])
    lines = [line[20:] for line in capfd.readouterr().err.splitlines()]
    assert any(line.startswith("comigs-1g1s, seed 0 · round 2/4, local step ") for line in lines)
    assert sum("local step" in line for line in lines) >= 3


def test_long_loading_says_so(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "LONG_SECONDS", 0.1)
    with progress.reporting() as reporter, reporter.waiting("reading"):
        time.sleep(0.5)
    first, *others = [line[20:] for line in capfd.readouterr().err.splitlines()]
    assert first == "reading"
    assert others
    assert all(line.startswith("still reading after ") for line in others)


@pytest.mark.slow
def test_a_terminal_has_a_bar(recipe_file: Path, tmp_path: Path) -> None:
    """The real thing: a process whose stderr is a terminal of its own."""
    ours, theirs = pty.openpty()
    command = [*COMINGLE, "run", str(recipe_file), "--out", str(tmp_path / "run")]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, env=environment)
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end has been closed
            break
        if not part:
            break
        seen += part
    os.close(ours)
    assert process.wait() == 0, seen
    shown = seen.decode()
    assert "12/12" in shown
    assert "test perplexity" in shown or "perplexity" in shown
    assert "training loss" not in shown


def test_a_notebook_has_one_line_that_changes(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """IPython is no dependency: what a notebook's kernel has of it is put in its place."""
    shown: list[str] = []

    class ZMQInteractiveShell:
        pass

    class Handle:
        def update(self, content: dict[str, str], *, raw: bool) -> None:
            assert raw
            shown.append(content["text/plain"])

    module = types.ModuleType("IPython.display")
    module.display = lambda content, *, raw, display_id: Handle()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    monkeypatch.setattr(progress, "errors", Terminal(stderr=True))
    package.run(recipe_file, progress=True)
    assert capfd.readouterr() == ("", "")
    assert shown[0] == LOADING
    assert [match[1] for line in shown if (match := ROUND.fullmatch(line))] == ["1", "2", "3", "4"]


def test_a_run_is_shown_in_one_line(recipe_file: Path, tmp_path: Path) -> None:
    run = package.run(recipe_file, out=tmp_path / "run")
    mean = run.metrics["mean_test_perplexity"]
    told = f"comigs-1g1s on random:llama, 3 users, 4 rounds, mean test perplexity {mean:.4g}"
    assert repr(run) == f"Run({told}, in {tmp_path / 'run'})"
    assert repr(package.run(load_recipe(tmp_path / "run"))) == f"Run({told})"


def test_steps_of_ten_million_rounds_are_counted_at_once(recipe_file: Path) -> None:
    groups = [["ann", "bob"], ["ann"], ["ann", "bob", "cem"]]
    changes = {"training.participation": groups, "training.rounds": 10_000_000, "runtime.users_per_step": 2}
    recipe = load_recipe(recipe_file).with_changes(changes)
    clients = build(recipe, prepare(recipe)).clients
    course = progress.RunProgress(clients, None)
    assert (course.rounds, course.all_steps) == (10_000_000, (3_333_333 * 4 + 1) * clients.steps.local_steps)
    course({"event": "step", "round": 6, "advance": 1})
    assert course.steps_done == (4 + 1 + 1) * clients.steps.local_steps + 1
