"""What a quick run takes of many like cases (the rest is marked slow), and small recipes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from comingle.config import Recipe

TINY_TRAINING = {"rounds": 2, "local_steps": 2, "batch_size": 2, "context": 16}


def quick(cases: Iterable[Any], *chosen: Any) -> list[Any]:
    """All cases for ``parametrize``; those that are not chosen are slow."""
    return [case if case in chosen else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def recipe_with(**sections: Any) -> Recipe:
    """A recipe with these sections."""
    return Recipe(data={"users": {"ada": "ada.txt"}}, **sections)
