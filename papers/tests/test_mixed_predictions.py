"""``papers/benchmarks/mixed_predictions.py``: the mixture's arithmetic, and its figures beside those of the runs."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

from comingle.config import load_recipe
from comingle.runs import api

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from mixed_predictions import likeliest_weight, measure, mixed_losses


@pytest.mark.parametrize("seed", range(3))
def test_the_weight_is_the_likeliest_of_all(seed: int) -> None:
    losses = 3 * torch.rand(2, 200, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weight = likeliest_weight(losses)
    grid = [float(mixed_losses(losses, at / 1000).mean()) for at in range(1, 1000)]
    found = float(mixed_losses(losses, weight).mean())
    assert found <= min(grid) + 1e-6
    assert found < float(losses.mean(1).min())


def test_a_model_that_is_always_better_gets_all() -> None:
    losses = torch.tensor([[1.0, 2.0, 0.5], [2.0, 2.5, 3.0]], dtype=torch.float64)
    assert likeliest_weight(losses) == pytest.approx(1, abs=1e-6)
    torch.testing.assert_close(mixed_losses(losses, 1.0), losses[0])


def test_a_mixture_of_probabilities_is_one() -> None:
    mixed = mixed_losses(torch.tensor([[math.log(2)], [math.log(8)]], dtype=torch.float64), 0.25)
    assert float((-mixed).exp()) == pytest.approx(0.25 / 2 + 0.75 / 8)


@pytest.mark.slow
def test_each_model_alone_has_the_perplexity_that_its_run_reports(recipe_file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file)
    runs = [api.run(recipe.with_changes({"method": name}), out=tmp_path / name) for name in ("local", "fedavg")]
    found = measure(*(api.load(tmp_path / name) for name in ("local", "fedavg")))
    for key, run in zip(("first", "second"), runs, strict=True):
        assert found["means"][key] == pytest.approx(run.metrics["mean_test_perplexity"], rel=1e-5)
        for name, user in found["users"].items():
            assert user[key] == pytest.approx(run.metrics["users"][name]["test_perplexity"], rel=1e-5)
    for user in found["users"].values():
        assert 0 <= user["weight"] <= 1
        assert user["chosen"] in (user["first"], user["second"])


def test_runs_on_other_text_are_refused(recipe_file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file).with_changes({"method": "local", "training.rounds": 1})
    runs = [api.run(recipe.with_changes({"seed": seed}), out=tmp_path / str(seed)) for seed in (0, 1)]
    with pytest.raises(SystemExit, match="other text: the two recipes differ in data or seed"):
        measure(*runs)
