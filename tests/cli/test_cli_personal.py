"""Opening finished runs of mixtures and of nets, and the verbs that would have their users' models speak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from comingle.models.personal import PersonalModel
from comingle.runs import api
from comingle.runs.views import generating_model
from comingle.training.kinds.samples import PersonalNet
from comingle.utils.errors import DataError


@pytest.fixture
def net_recipe(tmp_path: Path) -> Path:
    content = {
        "method": {"name": "floral", "clusters": 2},
        "data": {"task": {"name": "mlp-norm", "users": 4, "clusters": 2, "test_samples": 9}},
        "floral": {"rank": 2},
        "training": {"rounds": 2, "batch_size": 40, "experts": {"name": "sgd", "learning_rate": 0.05}},
        "checkpoints": {"every": 1},
        "runtime": {"dtype": "float32", "device": "cpu", "threads": 1},
    }
    path = tmp_path / "net.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def test_a_run_of_nets_opens_with_everybodys_net(comingle: Any, net_recipe: Path, tmp_path: Path) -> None:
    assert comingle("run", net_recipe, "--out", tmp_path / "run").code == 0
    opened = api.load(tmp_path / "run")
    for user in opened.federation.clients.users:
        person = opened.user(user.name)
        assert isinstance(person, PersonalNet)
        assert person.evaluate(user.test).mean_loss == pytest.approx(
            opened.metrics["users"][user.name]["test_loss"], rel=1e-4
        )
    with pytest.raises(DataError, match="user 'user-0': got the net net:mlp-norm"):
        generating_model(opened, "user-0")
    said = comingle("plot", tmp_path / "run", "--figure", "tokens")
    assert said.code == 2
    assert "nothing to draw for tokens: no token routers" in said.err.replace("\n", " ")


def test_a_run_of_a_mixture_opens_and_speaks(comingle: Any, recipe_file: Path, tmp_path: Path) -> None:
    sets = ("--set", "method={name: floral, clusters: 2}", "--set", "training.rounds=2")
    assert comingle("run", recipe_file, *sets, "--out", tmp_path / "run").code == 0
    opened = api.load(tmp_path / "run")
    person = generating_model(opened, "bob")
    assert isinstance(person, PersonalModel)
    tokens = opened.federation.clients.users[1].test
    found = opened.metrics["users"]["bob"]["test_perplexity"]
    assert person.score(tokens, context=16).perplexity == pytest.approx(found, rel=1e-5)
    tokenizer: Any = person.model.base.tokenizer
    plain: Any = person.merge()
    ids = tokenizer("a", return_tensors="pt", add_special_tokens=False)["input_ids"]
    said = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8)[0, ids.shape[1] :]
    expected = tokenizer.decode(said, skip_special_tokens=True)
    assert person.generate("a", max_new_tokens=8) == expected
    answer = comingle("plot", tmp_path / "run", "--figure", "tokens")
    assert answer.code == 2
    assert "no token routers" in answer.err.replace("\n", " ")


def test_a_run_without_checkpoints_cannot_be_opened(comingle: Any, net_recipe: Path, tmp_path: Path) -> None:
    assert comingle("run", net_recipe, "--out", tmp_path / "run").code == 0
    for path in sorted((tmp_path / "run" / "checkpoints").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    with pytest.raises(ValueError, match=r"run: no checkpoint"):
        api.load(tmp_path / "run")
