"""The page about the architecture and its pictures agree with the code."""

from __future__ import annotations

import ast
import functools
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


def test_the_longest_chain_of_imports_is_as_long_as_the_page_says() -> None:
    graph = {_module_of(path): path for path in SOURCE.rglob("*.py")}
    imports = {name: _imports_at_load(path) & graph.keys() - {name} for name, path in graph.items()}

    @functools.cache
    def chain_length(module: str) -> int:
        return 1 + max((chain_length(imported) for imported in imports[module]), default=0)

    stated = re.search(r"longest chain of imports at load time is (\d+) modules", PAGE)
    assert stated is not None
    assert max(chain_length(module) for module in graph) == int(stated[1]) <= 20


def _module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def _imports_at_load(path: Path) -> set[str]:
    """Return the modules that a module imports when it is loaded, so neither in functions nor for type checkers."""
    imported: set[str] = set()
    statements = list(ast.parse(path.read_text(encoding="utf-8")).body)
    while statements:
        statement = statements.pop()
        if isinstance(statement, ast.ImportFrom):
            imported.add(str(statement.module))
            imported |= {f"{statement.module}.{alias.name}" for alias in statement.names}
        elif isinstance(statement, ast.Import):
            imported |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.Try) or (isinstance(statement, ast.If) and not _is_for_types(statement)):
            statements += [*statement.body, *statement.orelse]
    return imported


def _is_for_types(statement: ast.If) -> bool:
    return "TYPE_CHECKING" in ast.unparse(statement.test)


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


def test_no_class_has_more_than_fifteen_fields_or_public_methods() -> None:
    too_large = []
    for root in (SOURCE, DOCS.parent / "papers" / "src"):
        for path in root.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
                    functions = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
                    public = [function for function in functions if not function.name.startswith("_")]
                    if len(fields) > 15 or len(public) > 15:
                        too_large.append(f"{path.name}: {node.name}")
    assert too_large == []
