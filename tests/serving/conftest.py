"""Users of a tiny federation whose tensors were moved at random, so that no two speak alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from comingle.config import parse_recipe
from comingle.models.personal import PersonalModel
from comingle.runs.results import Run
from comingle.utils.trees import CLIENT_ROUTER
from commands import comingle as comingle

UserModels = Callable[..., dict[str, PersonalModel]]


SETTINGS = {"stacking": {"name": "stacking", "temperatures": True}}
"""Of methods that speak in more ways than by default."""


@pytest.fixture(scope="session")
def people(federate: Any) -> UserModels:
    """Ann, Bob and Cem of a federation, by name."""

    @cache
    def make(
        name: str = "comigs-1g1s",
        base: str = "random:llama",
        dtype: str = "float32",
        top_k: int = 2,
        **changes: Any,  # of settings of adapters
    ) -> dict[str, Any]:
        method = SETTINGS.get(name, name)
        changes = {f"adapters.{key}": value for key, value in {"top_k": top_k, **changes}.items()}
        sim = federate(method, base=base, dtype=dtype, changes=changes)
        rows, draw = sim.clients.state.rows, torch.Generator().manual_seed(1)
        noise = torch.randn(rows.shape, generator=draw, dtype=torch.float64)
        rows.add_(0.3 * noise.to(rows))
        views = sim.clients.model.layout.views(rows)
        if CLIENT_ROUTER in views:
            views[CLIENT_ROUTER].mul_(4)
        recipe = parse_recipe({"method": method, "data": {"users": {"somebody": "unused"}}})
        run = Run(folder=None, recipe=recipe, metrics={}, federation=sim)
        return {name: run.user(name) for name in run.users}

    return make
