"""Recipes of users without text, and their rehearsals."""

from __future__ import annotations

from typing import Any

from comingle.config import Recipe, parse_recipe
from comingle.cost.memory import rehearse
from comingle.cost.planning import federate_bare, with_method
from comingle.cost.skeleton import load_skeleton


def recipe_of(base: str, method: Any, *, users: int = 2, dtype: str = "float32", **changes: Any) -> Recipe:
    content = {
        "base": base,
        "method": method,
        "data": {"users": {f"user{i}": "nowhere" for i in range(users)}},
        "training": {"rounds": 1, "local_steps": 1, "batch_size": 8, "context": 128},
        "runtime": {"dtype": dtype, "device": "cpu", "compile": False},
    }
    return parse_recipe(content).with_changes(changes)


def planned(recipe: Recipe) -> Any:
    runtime, names = recipe.runtime, tuple(recipe.data.users or {})
    about = {"dtype": runtime.dtype, "device": runtime.device, "attention": runtime.attention}
    base = load_skeleton(recipe.base, **about, quantise=recipe.quantise)
    federation = federate_bare(with_method(recipe, recipe.method.name), base, names)
    return rehearse(federation, num_trainers=len(names))
