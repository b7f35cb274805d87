"""The order in which a recipe names its users is nobody's identity: state is kept and found again by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from comingle.config import Recipe, load_recipe
from comingle.runs import api
from comingle.utils.errors import RunError

ORDER = ("cem", "ann", "bob")
METHODS = {
    "comigs-1g1s": {"name": "comigs-1g1s", "router_every": 2, "router_steps": 1},
    "fedmerge": {"name": "fedmerge", "models": 3, "weight_step": 0.5},
    "ifca": {"name": "ifca", "models": 3},
    "fdlora": {"name": "fdlora", "fusion_steps": 5},
    "stacking": {"name": "stacking"},
    "hetlora": {"name": "hetlora", "regularisation": 100.0, "gamma": 0.6},
}
QUICK = ("comigs-1g1s", "fedmerge", "hetlora")
BEST = QUICK[:2]
"""Methods of quick tests, and those of them that select the best round, too."""

CHANGES = {
    "training.experts.learning_rate": 0.05,
    "runtime.dtype": "float64",
    "evaluation.every": 1,
    "checkpoints.keep": 9,
}


def in_order(recipe: Recipe, order: tuple[str, ...], **changes: Any) -> Recipe:
    """The same recipe with its users in another order."""
    users = recipe.model_dump(mode="json", exclude_unset=True)["data"]["users"]
    return recipe.with_changes({"data.users": {name: users[name] for name in order}, **changes})


def stopped_after(folder: Path, rounds: int) -> Path:
    """The run as if it had been stopped after so many rounds."""
    for checkpoint in (folder / "checkpoints").glob("round-*"):
        if int(checkpoint.name.removeprefix("round-")) > rounds:
            shutil.rmtree(checkpoint)
    (folder / "metrics.json").unlink()
    return folder


def perplexities(folder: Path) -> dict[str, float]:
    users = json.loads((folder / "metrics.json").read_text())["users"]
    return {name: user["test_perplexity"] for name, user in users.items()}


@pytest.mark.parametrize(
    ("method", "select"),
    [
        *(
            pytest.param(method, "last", id=name, marks=() if name in QUICK else pytest.mark.slow)
            for name, method in METHODS.items()
        ),
        *(
            pytest.param(METHODS[n], "best", id=f"{n}, best", marks=() if n in BEST else pytest.mark.slow)
            for n in METHODS
        ),
    ],
)
@pytest.mark.sampled(1)
def test_a_run_goes_on_with_its_users_in_another_order(
    recipe_file: Path, tmp_path: Path, method: dict[str, Any], select: str
) -> None:
    recipe = load_recipe(recipe_file).with_changes({**CHANGES, "method": method, "evaluation.select": select})
    api.run(recipe, out=tmp_path / "whole")
    whole = perplexities(tmp_path / "whole")
    stopped = stopped_after(shutil.copytree(tmp_path / "whole", tmp_path / "parts"), 2)
    api.run(in_order(recipe, ORDER), out=stopped, resume=True)
    found = perplexities(stopped)
    assert list(found) == list(ORDER)
    assert found == pytest.approx(whole, rel=1e-9)
    # Its folder names them in the first order, its newest checkpoint in the second.
    opened = api.load(stopped)
    scores = dict(zip(opened.users, opened.federation.clients.evaluate(), strict=True))
    assert {name: score.perplexity for name, score in scores.items()} == pytest.approx(whole, rel=1e-9)


UNEQUAL = {
    **CHANGES,
    "method": {"name": "comigs", "specialists": [0, 1, 2], "router_every": 2, "router_steps": 1},
    "adapters.rank": [4, 2, 3],
}


def test_lists_with_a_value_for_each_user_follow_the_user(recipe_file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file).with_changes(UNEQUAL)
    api.run(recipe, out=tmp_path / "whole")
    stopped = stopped_after(shutil.copytree(tmp_path / "whole", tmp_path / "parts"), 2)
    turned = in_order(recipe, ORDER, **{"method.specialists": [2, 0, 1], "adapters.rank": [3, 4, 2]})
    assert turned.fingerprint == recipe.fingerprint
    api.run(turned, out=stopped, resume=True)
    assert perplexities(stopped) == pytest.approx(perplexities(tmp_path / "whole"), rel=1e-9)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method.specialists": [2, 0, 1]}, "adapters.rank.ann was 4 and is 2"),
        ({"adapters.rank": [3, 4, 2]}, "method.settings.specialists.ann was 0 and is 1"),
    ],
    ids=["ranks stay", "specialists stay"],
)
def test_a_list_that_would_be_somebody_elses_is_refused_with_who(
    recipe_file: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    recipe = load_recipe(recipe_file).with_changes({**UNEQUAL, "training.rounds": 1})
    api.run(recipe, out=tmp_path / "run")
    with pytest.raises(RunError) as caught:
        api.run(in_order(recipe, ORDER, **changes), out=tmp_path / "run", resume=True)
    assert f"belongs to another recipe, {said}; use another --out" in str(caught.value)
