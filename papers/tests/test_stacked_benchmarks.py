"""``papers/benchmarks/pooling.py``, ``residual.py`` and ``candidates.py`` begin with what a run of stacking reports."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from comingle.config import load_recipe
from comingle.runs import api

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import candidates
import pooling
import residual

STACKED = {"method": "stacking", "training.rounds": 2, "training.experts.learning_rate": 0.03}


@pytest.mark.slow
def test_pooled_and_residual_models_start_from_the_runs_own_figures(recipe_file: Path, tmp_path: Path) -> None:
    run = api.run(load_recipe(recipe_file).with_changes(STACKED), out=tmp_path / "run")
    pooled, trained = pooling.measure(api.load(tmp_path / "run")), residual.measure(api.load(tmp_path / "run"))
    for name, of_user in run.metrics["users"].items():
        wanted = pytest.approx(of_user["test_perplexity"], rel=1e-5)
        assert pooled["users"][name]["linear"] == wanted
        assert trained["apart"][name] == wanted
    assert trained["together"] != trained["apart"]  # of whoever weighs its own model


@pytest.mark.slow
def test_candidates_are_the_runs_models_and_their_own(recipe_file: Path, tmp_path: Path) -> None:
    run = api.run(load_recipe(recipe_file).with_changes(STACKED), out=tmp_path / "run")
    tempered = {**STACKED, "method": {"name": "stacking", "temperatures": True}}
    whole = api.run(load_recipe(recipe_file).with_changes(tempered), out=tmp_path / "tempered")
    lines = candidates.measure(api.load(tmp_path / "run"), list(candidates.CANDIDATES))
    found = {line["candidate"]: line["users"] for line in lines}
    for name, of_user in run.metrics["users"].items():
        assert found["stacking"][name] == pytest.approx(of_user["test_perplexity"], rel=1e-5)
        assert found["temperatures"][name] == pytest.approx(whole.metrics["users"][name]["test_perplexity"], rel=1e-5)
        final = [lines[0]["shared"][name], lines[0]["own"][name]]
        for rule in ("lowest", "own if clear", "shared if clear"):
            assert found[rule][name] in final
    assert found["gate"] == pytest.approx(found["plain"], rel=1e-6)  # so few steps that no router has moved
    assert found["folds"] != found["plain"]
    assert found["leftover"] != found["plain"]
