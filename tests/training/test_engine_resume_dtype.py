"""``runtime.dtype`` may change at a resume, as all of ``runtime``: what a checkpoint holds takes on the new format."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from comingle.config import load_recipe
from comingle.runs import api

METHODS = {
    "comigs-1g1s": {"name": "comigs-1g1s", "router_every": 2, "router_steps": 1},
    "fedmerge": {"name": "fedmerge", "models": 3},
    "ifca": {"name": "ifca", "models": 2},
}


@pytest.mark.parametrize(("before", "after"), [("float32", "float64"), ("float64", "float32"), ("float32", "bfloat16")])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.sampled(1)
def test_a_run_goes_on_in_another_format(
    recipe_file: Path, tmp_path: Path, method: dict[str, Any], before: str, after: str
) -> None:
    changes = {"method": method, "runtime.dtype": before, "evaluation.select": "best", "evaluation.every": 1}
    recipe = load_recipe(recipe_file).with_changes(changes)
    whole = api.run(recipe, out=tmp_path / "run").metrics["mean_test_perplexity"]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "round-0004")
    done = api.run(recipe.with_changes({"runtime.dtype": after}), out=tmp_path / "run", resume=True)
    assert done.metrics["dtype"] == after
    assert done.metrics["mean_test_perplexity"] == pytest.approx(whole, rel=0.01 if after == "bfloat16" else 1e-4)
