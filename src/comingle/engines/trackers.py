"""Whom a run's numbers are told besides its own log, where a recipe asks for it with ``runtime.track``."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from comingle.utils.errors import RecipeError
from comingle.utils.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """What a tracker is told of a run before it begins: its name, that of the comparison around it, and its recipe."""

    name: str
    group: str
    recipe: dict[str, Any]
    text: str
    """The recipe as YAML."""


@runtime_checkable
class Tracker(Protocol):
    """An observer that has an end."""

    def __call__(self, event: dict[str, Any]) -> None:
        """Take one event."""
        ...

    def close(self) -> None:
        """Send what is left; a run that has not ended has failed."""
        ...


TRACKERS: Registry[Callable[[Tracked], Tracker]] = Registry(
    "comingle.trackers", {"wandb": "comingle.tracking:WeightsAndBiases", "mlflow": "comingle.tracking:MLflow"}
)
"""What makes a tracker of a run, under the name of the package that it needs."""


def check_trackers(names: Sequence[str]) -> None:
    """Whether the packages are installed.

    Raises:
        RecipeError: one is not.
    """
    extras = {"wandb": "pip install 'comingle[wandb]'", "mlflow": "pip install 'comingle[mlflow]'"}
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise RecipeError(f"runtime.track: {name} is not installed: {extras[name]}")
