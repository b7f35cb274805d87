"""A run opens out of its folder and its base: nobody's data is read before something asks for it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from comingle.config import Recipe, load_recipe, parse_recipe
from comingle.models.personal import PersonalModel
from comingle.runs import api
from comingle.training.kinds.samples import PersonalNet
from comingle.utils.errors import ComingleError, DataError, RunError

QUICK = {"training.rounds": 2, "training.local_steps": 1, "base": "random:llama?layers=1"}
TEXT = "ada loved the sea"
METHODS = {
    "comigs-1g1s": {"name": "comigs-1g1s", "router_every": 1},
    "ifca": {"name": "ifca", "models": 2},
    "fedmerge": {"name": "fedmerge", "models": 2},
    "fdlora": {"name": "fdlora", "fusion_steps": 3},
    "floral": {"name": "floral", "clusters": 2},
    "stacking": {"name": "stacking", "temperatures": True},
    "centralized": {"name": "centralized"},
    "pretrained": {"name": "pretrained"},
}


@pytest.fixture
def recipe(recipe_file: Path) -> Recipe:
    return load_recipe(recipe_file).with_changes(QUICK)


def missing(action: Any) -> str:
    with pytest.raises(DataError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "method",
    [
        *(pytest.param(method, id=name) for name, method in METHODS.items()),
        pytest.param({"name": "feddpa"}, id="feddpa", marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(1)
def test_a_run_opens_without_its_users_text(
    recipe: Recipe, recipe_file: Path, tmp_path: Path, method: dict[str, Any]
) -> None:
    done = api.run(recipe.with_changes({"method": method, "evaluation.select": "best"}), out=tmp_path / "run")
    shutil.move(recipe_file.parent / "texts", tmp_path / "elsewhere")
    opened = api.load(tmp_path / "run")
    assert opened.users == ["ann", "bob", "cem"]
    assert opened.metrics == json.loads((tmp_path / "run" / "metrics.json").read_text())
    for name in opened.users:
        before, after = done.user(name), opened.user(name)
        assert isinstance(before, PersonalModel)
        assert isinstance(after, PersonalModel)
        assert after.perplexity(TEXT) == before.perplexity(TEXT)
        assert after.generate(TEXT, max_new_tokens=3) == before.generate(TEXT, max_new_tokens=3)
    message = missing(opened.federation.clients.evaluate)
    assert f"{tmp_path / 'run'}: this needs the users' data, which is not in a run folder: " in message
    assert "texts/ann.txt: no such file or folder" in message
    shutil.move(tmp_path / "elsewhere", recipe_file.parent / "texts")
    scores = opened.federation.clients.evaluate()  # it has been refused before, and is there now
    found = {name: score.perplexity for name, score in zip(opened.users, scores, strict=True)}
    assert found == {name: user["test_perplexity"] for name, user in opened.metrics["users"].items()}


def test_a_method_that_tunes_needs_the_text_and_says_so(recipe: Recipe, recipe_file: Path, tmp_path: Path) -> None:
    api.run(recipe.with_changes({"method": "fedavg+"}), out=tmp_path / "run")
    (recipe_file.parent / "texts" / "bob.txt").unlink()
    opened = api.load(tmp_path / "run")
    message = missing(lambda: opened.user("bob"))
    assert "this needs the users' data" in message
    assert "texts/bob.txt: no such file or folder" in message


def test_changed_text_is_refused_where_it_is_asked_for(recipe: Recipe, recipe_file: Path, tmp_path: Path) -> None:
    api.run(recipe, out=tmp_path / "run")
    path = recipe_file.parent / "texts" / "bob.txt"
    path.write_text(path.read_text().upper())
    opened = api.load(tmp_path / "run")
    opened.user("bob")
    with pytest.raises(RunError, match="user 'bob': the train data changed since the run began"):
        opened.federation.clients.evaluate()


NETS: dict[str, dict[str, Any]] = {
    "local": {"name": "local"},
    "ifca": {"name": "ifca", "models": 2},
    "floral-optimal": {"name": "floral-optimal", "clusters": 2},
    "fedem": {"name": "fedem", "models": 2},
    "centralized": {"name": "centralized"},
}


@pytest.mark.parametrize("method", NETS.values(), ids=NETS)
def test_nets_predict_without_the_images(tmp_path: Path, method: dict[str, Any]) -> None:
    draw = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    for split, count in (("train", 120), ("test", 60)):
        images, labels = draw.integers(0, 256, (count, 28, 28), dtype=np.uint8), draw.integers(0, 10, count)
        np.savez(tmp_path / "images" / f"mnist-{split}.npz", images=images, labels=labels)
    task = {"name": "mnist", "users": 4, "clusters": 2, "path": str(tmp_path / "images"), "valid": 0.2}
    content = {
        "method": method,
        "data": {"task": task},
        "training": {"rounds": 1, "batch_size": 10},
        "runtime": {"device": "cpu", "dtype": "float32"},
    }
    done = api.run(parse_recipe(content), out=tmp_path / "run")
    shutil.rmtree(tmp_path / "images")
    opened = api.load(tmp_path / "run")
    inputs = torch.rand(3, 1, 28, 28)
    for name in opened.users:
        before, after = done.user(name), opened.user(name)
        assert isinstance(before, PersonalNet)
        assert isinstance(after, PersonalNet)
        assert torch.equal(after.predict(inputs), before.predict(inputs))
    with pytest.raises(ComingleError, match="this needs the users' data"):
        opened.federation.clients.evaluate()
