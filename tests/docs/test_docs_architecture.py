"""The page about the house and its pictures are true of the code."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SOURCE = DOCS.parent / "src" / "comingle"
PAGE = (DOCS / "architecture.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    """The script that draws."""
    spec = importlib.util.spec_from_file_location("draw_architecture", DOCS / "draw_architecture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_module_that_the_page_names_exists() -> None:
    paths = [path for path in re.findall(r"`([\w/]+(?:/|\.py))`", PAGE) if not path.startswith("docs/")]
    assert len(paths) > 30
    assert [path for path in paths if not (SOURCE / path).exists()] == []


def test_every_room_stands_in_the_table() -> None:
    there = {path.name for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    rooms = PAGE[PAGE.index("## Rooms") :].partition("\n## ")[0]
    first = "".join(re.findall(r"^\| (.+?) \|", rooms, re.MULTILINE))
    assert {path.partition("/")[0] for path in re.findall(r"`([\w/]+(?:/|\.py))`", first)} == there - {"__init__.py"}


@pytest.mark.parametrize("name", ["architecture.svg", "message.svg"])
def test_the_pictures_are_what_the_script_draws(drawing: Any, name: str) -> None:
    stored = (DOCS / name).read_text(encoding="utf-8")
    assert stored == drawing.DRAWINGS[name](), "draw again: python docs/draw_architecture.py"
    assert name in PAGE
    assert ElementTree.fromstring(stored).find("{http://www.w3.org/2000/svg}title") is not None


def test_rooms_import_downwards_alone(drawing: Any) -> None:
    rows = drawing.rows(drawing.rooms())
    row = {room: i for i, names in enumerate(rows) for room in names}
    assert rows[0] == [
        "papers",
        "demo",
        "layers",
        "gguf",
        "gpu",
        "cpu",
        "tracking",
    ]  # through entry points alone
    assert rows[-1] == ["errors"]
    assert all(row[room] < row[other] for room, others in drawing.rooms().items() for other in others)


def test_the_functions_in_the_picture_of_a_round_exist(drawing: Any) -> None:
    from comingle.training import client
    from comingle.training.client import Clients
    from comingle.training.server import ServerHalf

    homes = {"Clients": Clients, "ServerHalf": ServerHalf, "local": client}
    named = re.findall(r">(?:\d  )?(\w+)\.(download|receive|train|upload|aggregate)<", drawing.message())
    assert len(named) == 5
    assert all(hasattr(homes[home], function) for home, function in named)
