"""Verbs that need an extra say which, in one line and before any work."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("words", "package"),
    [
        (("report", "."), "jinja2"),
        (("report", "."), "matplotlib"),
        (("plot", "."), "matplotlib"),
        (("theory",), "matplotlib"),
        (("theory",), "threadpoolctl"),
    ],
)
def test_a_verb_whose_package_is_missing_names_the_extra(
    comingle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], package: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    answer = comingle(*words)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == f"comingle: comingle {words[0]} needs {package}: pip install 'comingle[reports]'\n"
