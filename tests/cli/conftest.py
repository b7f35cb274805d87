"""The tests of the command line run it within their process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from comingle.runs import api
from commands import comingle as comingle


@pytest.fixture(scope="module")
def recipe(write_recipe: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe in a folder of its own, beside everybody's text."""
    return write_recipe(tmp_path_factory.mktemp("project") / "project")


@pytest.fixture(scope="module")
def run(recipe: Path) -> Path:
    """Its finished run."""
    folder = recipe.parent.parent / "run"
    api.run(recipe, out=folder)
    return folder
