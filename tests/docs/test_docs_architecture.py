"""The page about the architecture and its pictures agree with the code."""

from __future__ import annotations

import ast
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
    paths = [path for path in re.findall(r"`([\w/]+(?:/|\.py))`", PAGE) if not path.startswith(("docs/", "tests/"))]
    assert len(paths) > 30
    assert [path for path in paths if not (SOURCE / path).exists()] == []


def test_every_function_that_the_page_names_exists() -> None:
    places = re.findall(r"`([\w/]+\.py): (\w+)`", PAGE)
    assert len(places) > 20
    missing = []
    for path, name in places:
        tree = ast.parse((SOURCE / path).read_text(encoding="utf-8"))
        defined = {getattr(node, "name", None) for node in ast.walk(tree)}
        if name not in defined:
            missing.append(f"{path}: {name}")
    assert missing == []


def test_every_package_is_in_the_table_and_in_the_picture(drawing: Any) -> None:
    there = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()}
    section = PAGE[PAGE.index("## Packages") :].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)/` \|", section, re.MULTILINE)) == there
    drawn = [name for tier in drawing.tiers() for name in tier]
    assert sorted(drawn) == sorted({*there, "comingle-papers"})
    assert len(drawn) <= 16


@pytest.mark.parametrize("name", ["architecture.svg", "message.svg"])
def test_the_pictures_are_what_the_script_draws(drawing: Any, name: str) -> None:
    stored = (DOCS / name).read_text(encoding="utf-8")
    assert stored == drawing.DRAWINGS[name](), "draw again: python docs/draw_architecture.py"
    assert name in PAGE
    assert ElementTree.fromstring(stored).find("{http://www.w3.org/2000/svg}title") is not None


def test_the_functions_in_the_picture_of_a_round_exist(drawing: Any) -> None:
    from comingle.training import client
    from comingle.training.client import Clients
    from comingle.training.server import ServerHalf

    homes = {"Clients": Clients, "ServerHalf": ServerHalf, "local": client}
    named = re.findall(r">(?:\d  )?(\w+)\.(download|receive|train|upload|aggregate)<", drawing.message())
    assert len(named) == 5
    assert all(hasattr(homes[home], function) for home, function in named)
