"""``COMINGLE_LOG=json``: one JSON object a line, and no user's name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import comingle.cli as cli
from comingle.cli import options


@pytest.fixture(autouse=True)
def as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMINGLE_LOG", "json")
    monkeypatch.setattr(options, "_hidden_names", [])


def test_lines_and_records_are_objects_without_names(capsys: pytest.CaptureFixture[str]) -> None:
    options.hide_names(["an", "ann", "b.c"])
    options.line_printer(quiet=False)("ann has joined; an answer\n for an, not bxc")
    (line,) = capsys.readouterr().out.splitlines()
    content = json.loads(line)
    assert content["message"] == "user 2 has joined; user 1 answer\n for user 1, not bxc"
    assert content["level"] == "info"
    assert content["time"].endswith("+00:00")
    record = logging.makeLogRecord({"msg": "%s fails", "args": ("b.c",), "levelname": "WARNING", "round": 3})
    content = json.loads(cli._JsonFormatter().format(record))
    assert (content["message"], content["level"], content["round"]) == ("user 3 fails", "warning", 3)
    assert set(content) == {"time", "level", "message", "round"}


def test_a_traceback_is_a_field() -> None:
    try:
        raise ValueError("broken")
    except ValueError as error:
        record = logging.makeLogRecord({"msg": "m", "exc_info": (ValueError, error, error.__traceback__)})
    line = cli._JsonFormatter().format(record)
    assert "\n" not in line
    assert json.loads(line)["exception"].endswith("ValueError: broken")


def test_errors_of_a_command_are_objects(comingle: Any, tmp_path: Path) -> None:
    answer = comingle("serve", tmp_path / "nothing")
    assert answer.code == 2
    content = json.loads(answer.err)
    assert content["level"] == "error"
    assert str(tmp_path) in content["message"]


def test_another_value_is_refused(comingle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMINGLE_LOG", "yaml")
    answer = comingle("methods")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert "COMINGLE_LOG: got 'yaml'; allowed: json" in answer.err
