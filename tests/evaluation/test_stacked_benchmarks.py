"""``benchmarks/pooling.py`` and ``benchmarks/residual.py``: what they begin with is what a run of stacking reports."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from comingle.recipes import load_recipe
from comingle.runs import api

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import pooling
import residual


def test_pooled_and_residual_models_start_from_the_runs_own_figures(recipe_file: Path, tmp_path: Path) -> None:
    changes = {"method": "stacking", "training.rounds": 2, "training.experts.learning_rate": 0.03}
    run = api.run(load_recipe(recipe_file).with_changes(changes), out=tmp_path / "run")
    pooled, trained = pooling.measure(api.load(tmp_path / "run")), residual.measure(api.load(tmp_path / "run"))
    for name, of_user in run.metrics["users"].items():
        wanted = pytest.approx(of_user["test_perplexity"], rel=1e-5)
        assert pooled["users"][name]["linear"] == wanted
        assert trained["apart"][name] == wanted
    assert trained["together"] != trained["apart"]  # of whoever weighs its own model
