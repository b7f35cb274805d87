"""Runs of other users with each seed are not held against each other: nobody is taken for somebody else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import comingle
from comingle.comparing.results import Comparison
from comingle.errors import RecipeError, RunError
from comingle.recipes import load_recipe
from comingle.serving.people import names_in


def metrics(seed: int, users: str) -> dict[str, Any]:
    return {
        "method": "local",
        "seed": seed,
        "measure": "perplexity",
        "users": {u: {"test_perplexity": 9.0} for u in users},
    }


def test_a_sample_of_users_is_refused_with_several_seeds_before_training(recipe_file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file).with_changes({"evaluation.users": 2, "training.rounds": 1})
    with pytest.raises(
        RecipeError, match=r"^evaluation\.users: 2 with 2 seeds, .* allowed: all users \(null\), or one seed"
    ):
        comingle.compare(recipe, ["local", "fedavg"], seeds=[0, 1], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    comingle.compare(recipe, ["local", "fedavg"], seeds=[1], out=tmp_path / "out")
    assert names_in(tmp_path / "out" / "local-seed1") == ["ann", "bob", "cem"]  # whoever was scored


@pytest.mark.parametrize(("one", "other"), [("ab", "abc"), ("ab", "cb")])
def test_seeds_that_skip_other_users_are_said(one: str, other: str) -> None:
    runs = {("local", 3): metrics(3, one), ("local", 0): metrics(0, other)}
    with pytest.raises(RunError) as caught:
        Comparison(folder=None, metrics=runs).against()
    theirs = f"those of local, seed 3 are {', '.join(one)}; give runs of the same users (data.on_small_user: skip may "
    assert str(caught.value).startswith(f"local, seed 0: its users are {', '.join(other)}, {theirs}")
