"""What a server keeps of several models, and mixtures of samples, resume as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from comingle.config import parse_recipe
from comingle.runs import api
from federations import exchange, local_round
from resuming import StoppedError, outcome, stop_in_round_3

SGD = {"name": "sgd", "learning_rate": 0.05, "schedule": "constant", "weight_decay": 0}
METHODS: dict[str, dict[str, Any]] = {
    "fedmerge": {"name": "fedmerge", "models": 3, "proximal": 0.01},
    "fedmerge-fixed": {"name": "fedmerge-fixed", "models": 4, "chosen": 2},
    "ifca": {"name": "ifca", "models": 3},
    "fedem": {"name": "fedem", "models": 2},
    "fedavg+": {"name": "fedavg+"},
    "pfedmoe": {"name": "pfedmoe"},
}
KEPT = {"fedmerge": {"server/merging"}, "fedmerge-fixed": {"server/merging"}}


def images(folder: Path) -> dict[str, Any]:
    """Noise, which is flipped and cropped."""
    draw = np.random.default_rng(0)
    pixels, labels = draw.integers(0, 255, (40, 32, 32, 3), dtype=np.uint8), np.arange(40) % 10
    np.savez(folder / "cifar10.npz", x_train=pixels, y_train=labels, x_test=pixels[:20], y_test=labels[:20])
    return {"data.task": {"name": "cifar10", "users": 4, "clusters": 2, "path": str(folder)}, "training.batch_size": 4}


@pytest.mark.slow
@pytest.mark.parametrize("task", ["batch norm", "augmentation"])
@pytest.mark.parametrize("name", METHODS)
def test_resuming_is_exact(name: str, task: str, tmp_path: Path) -> None:
    """With half of the users in each round."""
    recipe = parse_recipe(
        {
            "method": METHODS[name],
            "data": {"task": {"name": "mlp-norm", "users": 5, "clusters": 2, "test_samples": 9}},
            "training": {"rounds": 4, "batch_size": 40, "weighting": "samples", "participation": 0.5, "experts": SGD},
            "evaluation": {"every": 2, "model": "exchanged"},
            "checkpoints": {"every": 1},
            "runtime": {"dtype": "float32", "device": "cpu", "threads": 1},
        }
    ).with_changes(images(tmp_path) if task == "augmentation" else {})

    whole = api.run(recipe, out=tmp_path / "whole")
    with pytest.raises(StoppedError):
        api.run(recipe, out=tmp_path / "parts", observers=[stop_in_round_3])
    api.run(recipe, out=tmp_path / "parts", resume=True)
    (expected, tensors), (found, state) = outcome(tmp_path / "whole"), outcome(tmp_path / "parts")
    assert found == expected
    assert state.keys() == tensors.keys()
    assert all(torch.equal(state[key], tensors[key]) for key in tensors)
    assert {key for key in state if key.startswith("server/") and "soup" not in key and "model" not in key} == {
        "server/version",
        "server/ranks",
        "server/lowest_loss",
    } | KEPT.get(name, set())
    assert ("kept/choice" in state) == (name == "ifca")
    opened = api.load(tmp_path / "whole")
    first, second = whole.federation.clients.evaluate(), opened.federation.clients.evaluate()
    assert [score.measures for score in first] == [score.measures for score in second]


@pytest.mark.parametrize("name", ["ifca", "fedem"])
@pytest.mark.slow
def test_augmented_samples_are_the_same_whoever_shares_a_pass(federate_nets: Any, tmp_path: Path, name: str) -> None:
    changes = {**images(tmp_path), "training.weighting": "uniform"}
    one, two = (
        federate_nets({"name": name, "models": 2}, changes={**changes, "runtime.users_per_step": n}) for n in (1, 4)
    )
    for federation in (one, two):
        assert federation.clients.batch_source.augment is not None
        for number in range(2):
            local_round(federation, range(4), number)
            exchange(federation, range(4))
    torch.testing.assert_close(one.clients.state.rows, two.clients.state.rows, rtol=1e-7, atol=1e-10)
