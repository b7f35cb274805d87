"""The command line where there is no home directory, or a terminal that does not have every character."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import comingle as package

HOMELESS = """
import os, pwd, sys

def unknown(*_):
    raise KeyError("no such user")

os.environ.pop("HOME", None)
pwd.getpwuid = unknown  # as in a container that runs under any number
from comingle.cli import main
main()
"""
COMMAND = "from comingle.cli import main; main()"


def call(program: str, *arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    env = {key: value for key, value in os.environ.items() if key != "COMINGLE_CACHE"} | {"HF_HUB_OFFLINE": "1"} | env
    return subprocess.run(command, env=env, capture_output=True, encoding="utf-8", errors="replace")


def recipe_in(folder: Path, **content: object) -> Path:
    (folder / "note.txt").write_text("".join(f"a line of words number {n}.\n" for n in range(300)), encoding="utf-8")
    content = {
        "base": "random:llama?layers=1&dim=32",
        "method": "fedavg",
        "data": {"users": {"ada": "note.txt", "Ольга": "note.txt"}},
        "training": {"rounds": 1, "local_steps": 1, "batch_size": 2, "context": 32},
        **content,
    }
    (folder / "own.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    return folder / "own.yaml"


def rows(path: str) -> dict[str, object]:
    return {"kind": "conversations", "users": {"ada": path, "bob": path}}


def dataset(path: str) -> dict[str, object]:
    return {"dataset": {"path": path, "text": "text", "user": "user"}}


@pytest.mark.parametrize(
    "content",
    [
        {"data": {"users": {"ada": "~nosuchperson/texts", "ben": "note.txt"}}},
        {"data": {"users": {"ada": {"train": "~nosuchperson/texts", "test": "note.txt"}}}},
        {"data": dataset("~nosuchperson/texts")},
        {"data": rows("~nosuchperson/texts")},
        {"data": {"kind": "samples", "users": {"ada": "~nosuchperson/texts"}}},
        {"data": {"kind": "samples", "users": {"ada": {"train": "~nosuchperson/texts", "test": "x"}}}},
        {"base": "~nosuchperson/texts"},
    ],
)
def test_an_unknown_users_home_is_one_line(
    tmp_path: Path, content: dict[str, object], comingle: Callable[..., Any]
) -> None:
    found = comingle("run", recipe_in(tmp_path, training={"rounds": 1}, **content), "--out", tmp_path / "x")
    assert found.code == 2
    assert "~nosuchperson/texts: no user nosuchperson on this machine" in found.err
    assert "\n" not in found.err.strip()


@pytest.mark.slow
def test_without_a_home_runs_go_and_the_cache_is_asked_for(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path)
    plain = call(HOMELESS, "run", recipe, "--out", tmp_path / "plain", "--quiet")
    assert plain.returncode == 0, plain.stderr
    kept = ("run", recipe, "--out", tmp_path / "kept", "--quiet", "--set", "runtime.store=disk")
    refused = call(HOMELESS, *kept)
    assert refused.returncode == 2
    assert all(name in refused.stderr.splitlines()[-1] for name in ("HOME", "COMINGLE_CACHE"))
    assert call(HOMELESS, *kept, COMINGLE_CACHE=str(tmp_path / "cache")).returncode == 0
    unknown = call(COMMAND, *kept, "--force", COMINGLE_CACHE="~nosuchperson/c")
    assert (unknown.returncode, "~nosuchperson/c: no user nosuchperson" in unknown.stderr) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize("coding", ["ascii", "latin-1", "cp1252"])
def test_characters_that_the_terminal_lacks_are_replaced(tmp_path: Path, coding: str) -> None:
    recipe, out = recipe_in(tmp_path), tmp_path / "out"
    found = call(COMMAND, "run", recipe, "--out", out, PYTHONIOENCODING=coding)
    assert found.returncode == 0, found.stderr
    assert "?" in found.stdout
    wrong = call(COMMAND, "show", tmp_path / "Ольга", PYTHONIOENCODING=coding)
    assert (wrong.returncode, "Traceback" in wrong.stderr) == (2, False)
    assert (
        "Ольга" in json.loads((out / "metrics.json").read_text(encoding="utf-8"))["users"]
    )  # files have every character


def test_the_version_is_shown() -> None:
    found = call(COMMAND, "--version")
    assert (found.returncode, found.stdout.strip()) == (0, f"comingle {package.__version__}")


def test_dir_shows_the_api() -> None:
    assert dir(package) == sorted(package.__all__)
    assert {"run", "load", "compare", "Recipe", "ComingleError"} <= {*dir(package)}
    assert all(getattr(package, name) is not None for name in dir(package))


# ---------------------------------------------------------------- Python's own options


def python(options: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options.split(), "-m", "comingle", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, encoding="utf-8", check=False)


@pytest.mark.parametrize("words", [["run", "--out", "OUT"], ["data"], ["cost"]])
@pytest.mark.sampled(1)
def test_python_without_docstrings_is_refused_in_one_line(tmp_path: Path, words: list[str]) -> None:
    command, *options = [str(tmp_path / "run") if word == "OUT" else word for word in words]
    ended = python("-OO", command, recipe_in(tmp_path), *options)
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("comingle: python: got -OO")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("options", ["-O", "-W error -W ignore::DeprecationWarning:typer"])  # typer 0.20 on click 8.5
def test_python_without_asserts_or_with_warnings_as_errors_trains(tmp_path: Path, options: str) -> None:
    for command in (["run", recipe_in(tmp_path), "--out", tmp_path / "run"], ["show", tmp_path / "run"]):
        ended = python(options, *command)
        assert ended.returncode == 0, ended.stderr
        assert "Warning" not in ended.stderr
