"""Methods that keep more than tensors, ranks or what the server remembers, resume as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from comingle.config import Recipe, load_recipe
from comingle.runs import api
from resuming import StoppedError, outcome, stop_in_round_3

METHODS = {
    "hetlora": {"name": "hetlora", "regularisation": 100.0, "gamma": 0.6},
    "fdlora": {"name": "fdlora", "fusion_steps": 5},
    "pcl": {"name": "pcl", "exchange_from": 1},
    "fedmerge": {"name": "fedmerge", "models": 3, "proximal": 0.01},
    "ifca": {"name": "ifca", "models": 2},
    "fedavg+": {"name": "fedavg+"},
    "stacking": {"name": "stacking", "temperatures": True},
    "comigs": {"name": "comigs", "accumulate_gradients": True, "router_every": 3, "router_steps": 1},
}


SLOW = {
    "fedamole": {"name": "fedamole", "most": 7},
    "fedlease": {"name": "fedlease", "max_experts": 2, "warmup_rounds": 2},
    "fedtreelora": {"name": "fedtreelora", "threshold": -1.0, "warmup_rounds": 2},
    "feddpa": {"name": "feddpa"},
    "feddpa, afterwards": {"name": "feddpa", "afterwards": True},
}


@pytest.fixture(
    params=[*METHODS.values(), *(pytest.param(method, marks=pytest.mark.slow) for method in SLOW.values())],
    ids=[*METHODS, *SLOW],
)
def recipe(request: pytest.FixtureRequest, recipe_file: Path) -> Recipe:
    changes = {
        "method": request.param,
        "adapters.rank": 4 if {"models", "most", "warmup_rounds"} & request.param.keys() else [4, 4, 2],
        "training.participation": 0.6,
        "training.experts.learning_rate": 0.05,
    }
    return load_recipe(recipe_file).with_changes(changes)


@pytest.mark.sampled(1)
def test_resuming_is_exact(recipe: Recipe, tmp_path: Path) -> None:
    api.run(recipe, out=tmp_path / "whole")
    with pytest.raises(StoppedError):
        api.run(recipe, out=tmp_path / "parts", observers=[stop_in_round_3])
    api.run(recipe, out=tmp_path / "parts", resume=True)
    (expected, tensors), (found, state) = outcome(tmp_path / "whole"), outcome(tmp_path / "parts")
    assert found == expected
    assert state.keys() == tensors.keys()
    assert all(torch.equal(state[name], tensors[name]) for name in tensors)
    if recipe.method.name == "hetlora":
        assert state["ranks"].tolist() != [4, 4, 2]
    if recipe.method.name in ("fdlora", "fedamole", "fedlease", "fedmerge", "fedtreelora", "ifca"):
        assert any(name.startswith("server/") for name in state)


@pytest.mark.sampled(2)
def test_a_finished_run_opens_with_its_users_models(recipe: Recipe, tmp_path: Path) -> None:
    done = api.run(recipe, out=tmp_path / "run")
    opened = api.load(tmp_path / "run")
    for before, after in zip(done.federation.clients.evaluate(), opened.federation.clients.evaluate(), strict=True):
        assert before.loss_nats == after.loss_nats
    text = "ada loved the sea and the sea loved her"
    assert opened.user("bob").perplexity(text) == done.user("bob").perplexity(text)
