"""Runs of other users with each seed are not held against each other: nobody is taken for somebody else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import comingle
from comingle.config import load_recipe
from comingle.runs.comparison import Comparison
from comingle.serving.models import users_in
from comingle.utils.errors import RecipeError, RunError


def metrics(seed: int, users: str) -> dict[str, Any]:
    return {
        "method": "local",
        "seed": seed,
        "measure": "perplexity",
        "users": {u: {"test_perplexity": 9.0} for u in users},
    }


def test_a_sample_of_users_is_refused_with_several_seeds_before_training(recipe_file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file).with_changes({"evaluation.users": 2, "training.rounds": 1})
    with pytest.raises(RecipeError, match=r"^evaluation\.users: got 2 with 2 seeds.*allowed: "):
        comingle.compare(recipe, ["local", "fedavg"], seeds=[0, 1], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    comingle.compare(recipe, ["local", "fedavg"], seeds=[1], out=tmp_path / "out")
    assert users_in(tmp_path / "out" / "local-seed1") == ["ann", "bob", "cem"]  # whoever was scored


@pytest.mark.parametrize(("one", "other"), [("ab", "abc"), ("ab", "cb")])
def test_seeds_that_skip_other_users_are_said(one: str, other: str) -> None:
    runs = {("local", 3): metrics(3, one), ("local", 0): metrics(0, other)}
    with pytest.raises(RunError) as caught:
        Comparison(folder=None, metrics=runs).against()
    theirs = f"those of local, seed 3 are {', '.join(one)}; give runs of the same users (data.on_small_user: skip may "
    assert str(caught.value).startswith(f"local, seed 0: its users are {', '.join(other)}, {theirs}")


def test_seeds_that_leave_out_others_are_refused_before_these_train(tmp_path: Path) -> None:
    """Which of Dee's conversations she is tested on is the seed's matter, and one of them is too long for the base."""
    rows = [{"prompt": f"{number}", "response": "yes"} for number in range(6)]
    split = {"valid": 0.0, "test": 0.3}
    kept = {"kind": "conversations", "given": True, "on_small_user": "skip", "too_long": "leave_out", "split": split}
    recipe = comingle.Recipe(
        base="random:llama?layers=1&dim=32", method="fedavg",
        training={"rounds": 1, "batch_size": 1, "context": 64}, data=kept,
    )  # fmt: skip
    users = {"ann": rows, "dee": [*rows[:2], {"prompt": "why " * 40, "response": "yes"}]}
    given = r"^seed \d: its users are ann(, dee)?, those of seed 0 are ann(, dee)?; give runs of"
    with pytest.raises(RunError, match=given):
        comingle.compare(recipe, ["local"], seeds=[*range(9)], users=users, out=tmp_path / "out")
    assert (tmp_path / "out" / "local-seed0" / "metrics.json").exists()
    assert not (tmp_path / "out" / "table.json").exists()
