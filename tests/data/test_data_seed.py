"""``data.seed``: what users have is drawn by a seed of its own, whatever the seed of the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import comingle
from comingle.utils.errors import RecipeError
from comingle.utils.inputs import read_inputs

TEXTS = {n: [f"{n} counts {i}, then {i * 7 % 50} and {i % 5}." for i in range(60)] for n in ("ada", "ben")}
CHATS = {
    n: [{"prompt": f"{n} asks {i}", "response": f"{i * 7 % 50} times {i % 5}"} for i in range(30)]
    for n in ("ada", "ben")
}
SAMPLES = {
    n: torch.utils.data.TensorDataset(torch.arange(40.0).view(40, 1) + k, torch.arange(40.0).view(40, 1))
    for k, n in enumerate(("ada", "ben"))
}
TRAINING = {"rounds": 1, "batch_size": 4, "context": 64}
LANGUAGE: dict[str, Any] = {"base": "random:llama?layers=1&dim=32", "training": TRAINING}
NETS: dict[str, Any] = {"training": {"rounds": 1, "batch_size": 4}}


def run_texts(data: dict[str, Any], **how: Any) -> Any:
    return comingle.run({**LANGUAGE, "data": data}, users=TEXTS, method="fedavg", **how)


def run_mixture(data: dict[str, Any], **how: Any) -> Any:
    return run_texts({"held_out": "mixture", **data}, **how)


def run_chats(data: dict[str, Any], **how: Any) -> Any:
    return comingle.run({**LANGUAGE, "data": data}, users=CHATS, method="fedavg", **how)


def run_samples(data: dict[str, Any], **how: Any) -> Any:
    recipe = {**NETS, "data": {"loss": "mse", **data}}
    return comingle.run(recipe, users=SAMPLES, base=lambda: torch.nn.Linear(1, 1), method="fedavg", **how)


def run_task(data: dict[str, Any], **how: Any) -> Any:
    task = {"name": "linear", "users": 2, "clusters": 2, "fraction": 0.1}
    return comingle.run({**NETS, "data": {"task": task, **data}}, method="fedavg", **how)


@pytest.mark.parametrize("run", [run_texts, run_mixture, run_chats, run_samples, run_task])
def test_the_seed_of_the_data_draws_the_data_alone(run: Any, tmp_path: Path) -> None:
    def go(name: str, data: dict[str, Any], seed: int) -> tuple[Any, Any]:
        done = run(data, seed=seed, out=tmp_path / name)
        return read_inputs(tmp_path / name).users, done.metrics["users"]

    as_ever, scores = go("as-ever", {}, 1)
    assert go("same", {"seed": 1}, 1) == (as_ever, scores)
    users, others = go("training", {"seed": 1}, 2)
    assert users == as_ever
    assert others != scores
    assert go("data", {"seed": 2}, 1)[0] != as_ever


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_users_on_disk_are_drawn_alike(store: str, tmp_path: Path) -> None:
    for name, texts in TEXTS.items():
        (tmp_path / name).mkdir()
        for number, text in enumerate(texts):
            (tmp_path / name / f"{number:02}.txt").write_text(text)
    data = {"users": {name: str(tmp_path / name) for name in TEXTS}}

    def scores(training: int, **own: Any) -> Any:
        recipe = {**LANGUAGE, "data": {**data, **own}, "method": "pretrained", "runtime": {"store": store}}
        return comingle.run(recipe, seed=training).metrics["users"]

    assert scores(1) == scores(2, seed=1) != scores(2)


def test_runs_without_the_key_keep_their_fingerprint() -> None:
    recipe = comingle.Recipe(data={"users": {"ada": "ada.txt"}}, seed=3)
    assert "seed" not in recipe.result_content["data"]
    assert comingle.Recipe(**yaml.safe_load(recipe.as_yaml())).fingerprint == recipe.fingerprint
    assert recipe.with_changes({"data.seed": 3}).fingerprint != recipe.fingerprint
    with pytest.raises(RecipeError, match=r"data\.seed"):
        recipe.with_changes({"data.seed": -1})
