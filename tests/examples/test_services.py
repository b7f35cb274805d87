"""Units and the compose file of ``examples/services``: each command line is one that the command line accepts."""

from __future__ import annotations

import configparser
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import comingle.cli as cli

FOLDER = Path(__file__).parents[2] / "examples" / "services"
UNITS = sorted(FOLDER.glob("*.service"))
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())


def parse(arguments: list[str]) -> str:
    """Parse a command line without running it; return the name of its command."""
    group = typer.main.get_command(cli.app)
    with group.make_context("comingle", list(arguments)) as context:
        name, command, rest = group.resolve_command(context, list(arguments))  # type: ignore[attr-defined]
        command.make_context(name, rest, parent=context)
    return name


def unit_of(path: Path) -> configparser.ConfigParser:
    unit = configparser.ConfigParser(interpolation=None, strict=True)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(path.read_text())
    return unit


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_units_start_commands(path: Path) -> None:
    unit = unit_of(path)
    program, *arguments = shlex.split(unit["Service"]["ExecStart"])
    assert program == "/opt/comingle/bin/comingle"
    assert path.stem == f"comingle-{parse(arguments)}"
    assert unit["Service"]["KillMode"] == "mixed"  # SIGTERM to the main process, which ends the others
    assert unit["Service"]["Restart"] == "on-failure"  # not after SIGTERM, whose exit code is 0
    assert unit["Service"]["Environment"] == "COMINGLE_LOG=json"
    assert unit["Install"]["WantedBy"]


def test_there_is_a_unit_for_each_service() -> None:
    assert [path.stem for path in UNITS] == ["comingle-client", "comingle-serve", "comingle-server"]


@pytest.mark.parametrize("service", COMPOSE["services"])
def test_compose_services_start_commands(service: str) -> None:
    content = COMPOSE["services"][service]
    assert all(isinstance(word, str) for word in content["command"])
    assert parse(content["command"]) == service
    for published in content.get("ports", []):
        assert content["command"][content["command"].index("--port") + 1] == published.rpartition(":")[2]
    assert content["environment"]["COMINGLE_LOG"] == "json"
    assert content["volumes"] == [f"./data:{content['working_dir']}"]


def test_an_option_that_does_not_exist_is_found() -> None:
    with pytest.raises(Exception, match="--no-such-option"):
        parse(["serve", "run", "--no-such-option"])
