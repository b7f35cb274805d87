"""Users with samples that a program hands over, and runs of theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from comingle.config import Recipe, parse_recipe
from comingle.runs.results import Run
from comingle.runs.session import build, check_and_set_up, execute
from comingle.training.kinds.base import DataRequest, RunData, kind_of


def recipe_of(method: Any = "fedavg", **changes: Any) -> Recipe:
    """A short run with plain SGD in float64."""
    sgd = {"name": "sgd", "learning_rate": 0.1, "schedule": "constant", "weight_decay": 0}
    content = {
        "method": method,
        "data": {"kind": "samples", "given": True},
        "training": {"rounds": 2, "batch_size": 64, "weighting": "samples", "experts": sgd, "router": sgd},
        "evaluation": {"model": "exchanged"},
        "runtime": {"device": "cpu", "dtype": "float64"},
    }
    return parse_recipe(content).with_changes(changes)


def adopted(
    recipe: Recipe, users: Mapping[str, Any], net: Callable[..., nn.Module] | None = None, loss: Any = None
) -> RunData:
    """What the users have, as it is handed over."""
    check_and_set_up(recipe)

    def no_base() -> Any:
        raise AssertionError("samples need no language model")

    kind: Any = kind_of(recipe)
    return kind.read(DataRequest(recipe=recipe, load_base=no_base, validates=False, given=users, net=net, loss=loss))


def run_of(
    recipe: Recipe, users: Mapping[str, Any], net: Callable[..., nn.Module] | None = None, loss: Any = None
) -> Run:
    """A run of users who are handed over."""
    return execute(build(recipe, adopted(recipe, users, net, loss)), recipe, None)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Real numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def classes(count: int, of: int, seed: int = 0) -> torch.Tensor:
    """Class numbers, each class at least once."""
    drawn = torch.randint(of, (count,), generator=torch.Generator().manual_seed(seed))
    drawn[:of] = torch.arange(of)
    return drawn
