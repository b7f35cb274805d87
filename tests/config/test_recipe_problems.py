"""A recipe with several mistakes is refused once, with a line for each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from comingle.config import parse_recipe
from comingle.runs.session import check_recipe
from comingle.utils.errors import RecipeError

RECIPE = {"method": "fedavg", "data": {"users": {"ada": "a.txt"}}}


def test_every_part_is_asked() -> None:
    recipe = parse_recipe(
        {
            **RECIPE,
            "method": "floral",
            "floral": {"rank": 3},
            "privacy": {"epsilon": 3.0, "mechanism": "local"},
            "aggregation": "krum",
            "training": {"uploads": "int8"},
        }
    )
    with pytest.raises(RecipeError) as error:
        check_recipe(recipe)
    lines = error.value.problems
    assert len(lines) == len(set(lines)) >= 3
    assert str(error.value) == "; ".join(lines)
    for place in ("floral.rank: got 3", "privacy: ", "aggregation"):
        assert any(place in line for line in lines), (place, lines)


def test_every_key_and_value_is_asked() -> None:
    content = {
        **RECIPE,
        "seed": -1,
        "training": {"rounds": 0, "contxt": 16, "participation": 2},
        "runtime": {"micro_batch": "many"},
    }
    with pytest.raises(RecipeError) as error:
        parse_recipe(content, where="recipe.yaml")
    lines = error.value.problems
    assert len(lines) == len(set(lines)) == 5
    assert "unknown key 'training.contxt'" in lines[0]
    for place in ("seed", "training.rounds", "training.participation", "runtime.micro_batch"):
        assert sum(line.startswith(f"recipe.yaml: {place}: ") for line in lines) == 1, (place, lines)


def test_a_misspelt_key_explains_the_missing_one() -> None:
    with pytest.raises(RecipeError) as error:
        parse_recipe({"method": "fedavg", "dta": RECIPE["data"]})
    assert len(error.value.problems) == 1


def test_one_problem_is_one_line() -> None:
    with pytest.raises(RecipeError) as error:
        check_recipe(parse_recipe({**RECIPE, "floral": {"rank": 3}}))
    assert len(error.value.problems) == 1


def test_a_recipe_without_problems_has_its_method() -> None:
    assert check_recipe(parse_recipe(RECIPE)).name == "fedavg"


@pytest.mark.slow
def test_the_command_line_prints_a_line_for_each(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "method: floral\ndata: {users: {ada: a.txt}}\nfloral: {rank: 3}\n"
        "privacy: {epsilon: 3.0, mechanism: local}\naggregation: krum\n"
    )
    done = subprocess.run([sys.executable, "-m", "comingle", "cost", path], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("comingle: ") for line in lines)
