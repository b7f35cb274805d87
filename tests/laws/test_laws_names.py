"""Nothing outside a method's own file asks for its name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import comingle
from comingle.methods import REGISTRY

SOURCE = Path(comingle.__file__).parent
OWN = ("methods", "cli")
"""Packages that may name methods: their own files, and what a command says."""

AMBIGUOUS = {"local", "centralized", "pretrained", "floral"}
"""Names that are words too, as in ``evaluation.model: local``, or of functions that the package exports."""

DATA = {
    "cost/memory.py": "the method of the smallest recipe there is",
    "cost/planning.py": "the two methods of the published table of costs",
    "federation/bundle.py": "the only method whose client uses scipy",
    "reports/canvas.py": "colours and lines that some methods have in every report",
    "reports/runs.py": "the baselines against which results are held",
    "runs/__init__.py": "the methods that advice tries unless others are named",
}
"""Files in which methods' names are data, and what they are there; none asks what a method does by its name."""

WITHIN = (ast.Compare, ast.Set, ast.List, ast.Tuple, ast.Dict, ast.MatchValue)


def asked(tree: ast.AST, names: set[str]) -> list[int]:
    """Lines on which a name stands in a comparison, a container or a pattern."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, WITHIN):
            strings = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
            if strings & names:
                found.append(node.lineno)
    return found


FILES = [
    path
    for path in sorted(SOURCE.rglob("*.py"))
    if path.relative_to(SOURCE).parts[0] not in OWN and path.relative_to(SOURCE).as_posix() not in DATA
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_nobody_asks_for_a_methods_name(path: Path) -> None:
    assert asked(ast.parse(path.read_text(encoding="utf-8")), set(REGISTRY) - AMBIGUOUS) == []


@pytest.mark.parametrize("code", ["a == 'ifca'", "a in {'ifca', 'b'}", "x = {'ifca': 1}", "f(['ifca'])"])
def test_the_search_finds_what_asks(code: str) -> None:
    assert asked(ast.parse(code), {"ifca"})
