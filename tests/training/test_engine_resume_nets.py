"""kill -9 in the middle of a round of nets or mixtures, then resume: the same numbers, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from comingle.config import load_recipe, parse_recipe
from comingle.runs import api
from comingle.utils.files import list_checkpoints
from resuming import final, kill, state, told

MOMENT = "in round 3"
SGD = {"name": "sgd", "learning_rate": 0.05, "schedule": "constant", "weight_decay": 0}
ADAMW = {"name": "adamw", "learning_rate": 0.01, "schedule": "cosine", "clip_norm": 1.0}

# Some of the users take part in a round. Batch norm keeps running statistics; router noise, dropout, flips and crops
# and the order of each user's samples draw from streams of their own; servers, optimisers and stateless users remember.
NETS: dict[str, dict[str, Any]] = {
    "noise and statistics": {"method": {"name": "floral", "clusters": 3, "noise": 0.5, "temperature": 0.7}},
    "local statistics": {"method": {"name": "floral", "clusters": 2, "centre": True}, "floral.batch_nora": True},
    "stateless": {"method": {"name": "floral", "clusters": 2, "stateless": True, "warmup_steps": 2, "noise": 0.1}},
    "server rates": {"method": {"name": "floral", "base_server_rate": 0.5, "adaptor_server_rate": 0.3}},
    "server Adam": {"method": {"name": "floral", "server_adam_rate": 0.01}},
    "losses": {"method": {"name": "floral-mfl", "clusters": 2}, "training.local_epochs": 2},
    "whole models": {"method": {"name": "mfl", "clusters": 2}},
    "ensemble": {"method": {"name": "ensemble", "clusters": 3}},
    "never asked": {
        "method": {"name": "ifca", "models": 2},
        "training.participation": 0.2,
        "evaluation.first": False,
        "evaluation.users": 1,
    },
    "moments": {"method": "local-adaptor", "training.experts": ADAMW, "training.router": ADAMW},
    "momentum": {"method": "fedavg", "training.experts": {**SGD, "momentum": 0.9}, "training.batch_size": 30},
}
MIXED: dict[str, dict[str, Any]] = {
    "language model": {"method": {"name": "floral", "clusters": 3, "noise": 0.5}},
    "language model, losses": {"method": {"name": "floral-mfl", "clusters": 2}},
}
DROPOUT = "dropout and augmentation"


def net_recipe(changes: dict[str, Any]) -> str:
    content = {
        "data": {"task": {"name": "mlp-norm", "users": 5, "clusters": 2, "test_samples": 9}},
        "training": {"rounds": 4, "batch_size": 40, "weighting": "samples", "experts": SGD, "router": SGD},
        "checkpoints": {"every": 1},
        "runtime": {"dtype": "float32", "device": "cpu", "threads": 1},
    }
    shared = {"training.participation": 0.5, "evaluation.every": 2}
    return parse_recipe(content).with_changes({**shared, **changes}).as_yaml()


def image_recipe(folder: Path) -> str:
    """VGG with dropout on images of noise, which are flipped and cropped."""
    import numpy as np

    draw = np.random.default_rng(0)
    pixels, labels = draw.integers(0, 255, (40, 32, 32, 3), dtype=np.uint8), np.arange(40) % 10
    np.savez(folder / "cifar10.npz", x_train=pixels, y_train=labels, x_test=pixels[:20], y_test=labels[:20])
    task = {"name": "cifar10", "users": 4, "clusters": 2, "path": str(folder)}
    changes = {"base": "net:vgg8-norm", "data.task": task, "training.batch_size": 4, "method.clusters": 2}
    return net_recipe({"method.name": "floral", "floral.rank": 1, "evaluation.every": 4, **changes})


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory, write_recipe: Callable[[Path], Path]) -> dict[str, Path]:
    """One recipe file for each way to train."""
    stage = tmp_path_factory.mktemp("resume nets")
    texts = {name: net_recipe(changes) for name, changes in NETS.items()} | {DROPOUT: image_recipe(stage)}
    plain = load_recipe(write_recipe(stage / "mixed"))
    for name, changes in MIXED.items():
        shared = {"training.participation": 0.6, "training.experts": ADAMW, "training.router": SGD}
        texts[name] = plain.with_changes({**shared, **changes}).as_yaml()
    found = {name: stage / "recipes" / f"{name}.yaml" for name in texts}
    (stage / "recipes").mkdir()
    for name, path in found.items():
        path.write_text(texts[name], encoding="utf-8")
    return found


@pytest.fixture(scope="module")
def killed(recipes: dict[str, Path]) -> Path:
    """A run folder for each recipe, whose process was killed."""
    folder = next(iter(recipes.values())).parent
    return kill(folder, folder.with_name("killed"), MOMENT)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are killed after a fork")
@pytest.mark.parametrize("name", [*NETS, DROPOUT, *MIXED])
def test_a_killed_run_of_nets_resumes_as_if_nothing_had_happened(
    recipes: dict[str, Path], killed: Path, tmp_path: Path, name: str
) -> None:
    whole = api.run(recipes[name], out=tmp_path / "whole")
    expected, users = state(tmp_path / "whole"), len(whole.users)
    rounds = [event for event in told(tmp_path / "whole") if event["event"] == "round"]
    assert any(len(event["train_loss_nats"]) < users for event in rounds)
    folder = killed / name / MOMENT
    assert [path.name for path in list_checkpoints(folder)] == ["round-0001", "round-0002"]
    api.run(recipes[name], out=folder, resume=True)
    assert final(folder) == final(tmp_path / "whole")
    assert told(folder) == told(tmp_path / "whole")
    found = state(folder)
    assert found.keys() == expected.keys()
    assert not [key for key in expected if not torch.equal(found[key], expected[key])]
