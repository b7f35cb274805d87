"""The check of docstrings and documentation that `make check` runs."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "prose.py"


@pytest.fixture(scope="module")
def prose() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prose_of_ci", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses looks for the module of a class
    spec.loader.exec_module(module)
    return module


def problems(prose: ModuleType, source: str) -> list[str]:
    classes = prose.Classes()
    classes.add(ast.parse(source))
    return [problem for _, problem in prose.check_source(source, classes)]


def test_plain_docstrings_pass(prose: ModuleType) -> None:
    assert problems(prose, 'def mean(values: list) -> float:\n    """Return the mean."""\n') == []


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ('def f() -> int:\n    """The number of users."""\n', "imperative verb: The number"),
        ('def f(a: int, b: int, c: int) -> int:\n    """Add."""\n', "f has three or more parameters"),
        ('class A:\n    def f(self, a, b, c):\n        """Add."""\n', "f has three or more parameters"),
        ("x = 1  # everybody's number\n", "banned: everybody"),
        ('"""Numbers. What is not here is elsewhere."""\n', "banned: What"),
    ],
)
def test_each_kind_of_problem_is_found(prose: ModuleType, source: str, problem: str) -> None:
    assert any(problem in found for found in problems(prose, source))


@pytest.mark.parametrize(
    "source",
    [
        'def _f(a: int, b: int, c: int) -> int:\n    """Add."""\n',
        "class A:\n    def f(self, a, b, c):\n        ...\n\n\n"
        'class B(A):\n    pass\n\n\nclass C(B):\n    def f(self, a, b, c):\n        """Add."""\n',
        'class A:\n    @property\n    def size(self):\n        """The number of users."""\n',
    ],
    ids=["private", "override", "property"],
)
def test_what_needs_no_arguments_passes(prose: ModuleType, source: str) -> None:
    assert problems(prose, source) == []


def test_code_and_headings_of_documents_are_skipped(prose: ModuleType) -> None:
    text = "# What a page has\n\n```python\nnobody = 1\n```\n\nUse `everybody`.\n\nNobody else.\n"
    assert list(prose.check_document(text)) == [(9, "banned: Nobody")]
