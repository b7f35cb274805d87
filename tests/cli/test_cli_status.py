"""``comingle status``: the table of a run from another terminal."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from comingle.utils.files import is_locked, locked

ROUND = {"event": "round", "upload_bytes": 1, "download_bytes": 1, "tokens": 1}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of 40 rounds after 12, of which the last ten took 3 s each; ben has missed the last one."""
    events: list[dict[str, Any]] = [{"event": "start", "rounds": 40, "users": {"ann": {}, "ben": {}}}]
    for number in range(1, 13):
        losses = {"ann": 5.0 - number / 10, "ben": 4.0}
        if number == 12:
            del losses["ben"]
        seconds = 60.0 if number <= 2 else 3.0
        events.append({**ROUND, "round": number, "seconds": seconds, "train_loss_nats": losses})
    users = {"ann": {"test_perplexity": 20.5, "test_loss_nats": 3.0}}
    events.append({"event": "evaluation", "round": 10, "users": users, "mean_test_perplexity": 20.5})
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def test_a_stopped_run(folder: Path, comingle: Any) -> None:
    answer = comingle("status", folder)
    assert answer.code == 0
    title, header, *rows = answer.out.splitlines()
    assert title.rstrip() == f"{folder}: stopped · round 12 of 40 · 3 s per round"
    assert header.split() == ["user", "round", "loss", "perplexity"]
    assert [row.split() for row in rows] == [["ann", "12", "3.800", "20.50"], ["ben", "11", "4.000", "–"]]


def test_the_folder_of_live_has_a_row_per_run(folder: Path, comingle: Any) -> None:
    live = folder.parent / "live"
    (live / "incoming").mkdir(parents=True)
    for number in (1, 2, 10):
        run = live / "runs" / f"{number:04d}"
        shutil.copytree(folder, run)
        (run / "recipe.yaml").touch()
    answer = comingle("status", live)
    text = answer.out.replace("\n", "")
    assert f"{live}: stopped · newest run 0010" in text
    rows = [line for line in answer.out.splitlines() if line.startswith(" 00")]
    assert [row.split()[0] for row in rows[:3]] == ["0001", "0002", "0010"]
    assert rows[0].split()[3:] == ["ann,", "ben", "12", "20.50", "perplexity", "12", "B", "12", "B"]
    assert f"{live}/runs/0010: stopped · round 12 of 40" in text
    with locked(live):
        assert f"{live}: running" in comingle("status", live).out.replace("\n", "")


def test_a_running_one_has_an_estimate(folder: Path, comingle: Any) -> None:
    with locked(folder):
        answer = comingle("status", folder)
    assert f"{folder}: running · round 12 of 40 · 3 s per round · about 84 s left" in answer.out


def test_a_finished_one(folder: Path, comingle: Any) -> None:
    (folder / "metrics.json").write_text("{}")
    assert f"{folder}: finished · round 12 of 40" in comingle("status", folder).out


def test_a_federation_shows_its_participants(folder: Path, comingle: Any) -> None:
    user = {"state": "here", "round": 12, "seen": None, "upload_bytes": 5, "download_bytes": 6}
    user |= {"train_loss_nats": None, "test": None, "epsilon": None, "counted": None, "why": ""}
    content = {"round": 12, "rounds": 40, "measure": "", "users": {"ann": user}}
    (folder / "participants.json").write_text(json.dumps(content))
    (folder / "flower").mkdir()
    with locked(folder / "flower"):  # the server restarts, so only its parent holds a lock
        title, *counts, header, row = comingle("status", folder).out.splitlines()
    assert title.startswith(f"{folder}: running · round 12 of 40")
    assert "1 here" in "".join(counts)
    assert "last seen" in header
    assert row.split()[:3] == ["ann", "here", "12"]


def test_watching_ends_with_the_run(folder: Path, comingle: Any) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with locked(folder):
            has_begun.set()
            may_end.wait(30)
            (folder / "metrics.json").write_text("{}")

    holder = threading.Thread(target=hold)
    holder.start()
    assert has_begun.wait(30)
    threading.Timer(1.0, may_end.set).start()
    answer = comingle("status", folder, "--watch")
    holder.join()
    assert not is_locked(folder)
    assert f"{folder}: finished" in answer.out


def test_watching_in_a_terminal_refreshes(folder: Path, comingle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import comingle.cli.federation as commands
    from comingle.utils import files

    states = iter([True, False, True, False, False, False])  # of the run, and if it is free of the folder inside
    monkeypatch.setattr(files, "is_locked", lambda _: next(states))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(commands, "_REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(commands.console, "_force_terminal", True)
    monkeypatch.setattr(commands.console, "is_interactive", True)
    out = comingle("status", folder, "--watch").out
    assert "running" in out
    assert "stopped" in out


def test_many_users_are_not_all_shown(folder: Path, comingle: Any) -> None:
    start = {"event": "start", "rounds": 1, "users": {f"user{number}": {} for number in range(50)}}
    (folder / "events.jsonl").write_text(json.dumps(start) + "\n")
    short, long = comingle("status", folder).out, comingle("status", folder, "--all").out
    assert "user49" not in short
    assert "and 26 more" in short
    assert "user49" in long


def test_what_is_no_run_is_one_line(tmp_path: Path, comingle: Any) -> None:
    answer = comingle("status", tmp_path)
    assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1)
    assert str(tmp_path) in answer.err
