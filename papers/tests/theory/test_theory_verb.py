"""``comingle theory`` from recipe to figure, its folder, its mistakes, and its documentation."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from pydantic import BaseModel

from comingle.cli import main
from comingle.utils.errors import RecipeError
from comingle_papers.cli import number, render
from comingle_papers.recipes import TheoryRecipe, load_theory_recipe, published_recipes
from comingle_papers.theory.checks import FILES, LinearSettings, QuadraticSettings, check_all
from comingle_papers.theory.claims import Claim, Curve, largest_step_ratio, summarise
from comingle_papers.theory.clusters import ClusterSettings
from comingle_papers.theory.quadratics import CoupledSettings

REPOSITORY = Path(__file__).parents[3]
SHIPPED = published_recipes() / "comigs" / "theory.yaml"
SMALL = {
    "seed": 4,
    "quadratic": {"instances": 3, "steps": 10, "mismatches": [0, 1]},
    "linear": {"instances": 2, "samples": 8, "features": 2, "specialists": 1, "decays": [0.01, 1], "steps": 6},
    "coupled": {"instances": 1, "size": 2, "meeting": 2, "lipschitz": [0.5], "pairs": 4, "steps": 5},
    "clusters": {"instances": 2, "clients": 3, "size": 2, "mismatches": [0, 0.5], "steps": 30, "replicas": 8},
}


Comingle = Callable[..., tuple[int, str, str]]


@pytest.fixture
def comingle(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Comingle:
    """Exit code, stdout and stderr of ``comingle ARGUMENTS``, within this process."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["comingle", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0), *capsys.readouterr()

    return run


def save(path: Path, content: Any) -> Path:
    path.write_text(yaml.safe_dump(content) if not isinstance(content, str) else content)
    return path


# ---------------------------------------------------------------- from end to end


@pytest.mark.slow
def test_the_verb_prints_a_table_and_writes_numbers_and_figures(comingle: Comingle, tmp_path: Path) -> None:
    recipe, folder = save(tmp_path / "small.yaml", SMALL), tmp_path / "out"
    code, printed, errors = comingle("theory", recipe, "--out", folder, "--seed", 3)
    assert (code, errors) == (0, "")
    assert {path.name for path in folder.iterdir()} == set(FILES)
    found = json.loads((folder / "theory.json").read_text())
    assert found["seed"] == 3
    assert len(found["curves"]) == 2 * 3 + 2 * 2 * 2 + 1 + 2 * 2 + 1
    for row in found["rows"]:
        assert row["statement"] in printed
        assert row["scheme"] in printed
        if "as printed" not in row["statement"]:
            assert row["held"] == row["covered"] <= row["instances"], row
    for curve in found["curves"][: 2 * 3 + 2 * 2 * 2]:
        worst = max(claim["measured"] for claim in curve["claims"] if claim["statement"].startswith("Theorem"))
        steps = [b / a for a, b in zip(curve["residuals"], curve["residuals"][1:], strict=False) if a > 1e-6]
        assert not steps or max(steps) <= worst * (1 + 1e-9)
    with Image.open(folder / "residuals.png") as picture:
        colours = picture.convert("RGB").getcolors(2**24)
        assert picture.width > 1200
    assert colours is not None
    drawn = {colour for count, colour in colours if count > 200}
    assert {(0, 114, 178), (213, 94, 0), (230, 159, 0)} <= drawn  # measured, Theorem F.1, Theorem F.2
    svg = (folder / "residuals.svg").read_text()
    for text in ("measured", "Theorem F.2, by blocks", "f_valid = f_train", "squared, α = 1 × eq. 27"):
        assert text in svg
    assert load_theory_recipe(folder / "recipe.yaml").model_dump() == load_theory_recipe(recipe).model_dump() | {
        "seed": 3
    }

    # Not overwritten without being asked to; then the same again from the folder's own recipe, to the last byte.
    before = {name: (folder / name).read_bytes() for name in FILES}
    refused = comingle("theory", recipe, "--out", folder)
    assert refused == (2, "", f"comingle: {folder}: exists; --force replaces it, --out names another\n")
    assert {name: (folder / name).read_bytes() for name in FILES} == before
    assert comingle("theory", folder / "recipe.yaml", "--out", folder, "--force")[0] == 0
    assert {name: (folder / name).read_bytes() for name in FILES} == before


def test_an_instance_depends_on_its_seed_and_number_alone() -> None:
    linear = LinearSettings(**TheoryRecipe.model_validate({"linear": SMALL["linear"]}).linear.model_dump())

    clusters = {"instances": 0, "clients": 2, "size": 2, "condition": 2.0, "mismatches": (), "decay": 0.5}
    uncoupled = CoupledSettings(instances=0, size=1, meeting=1, lipschitz=(), pairs=1, steps=2)
    none = ClusterSettings(**clusters, local_steps=1, steps=2, replicas=2)

    def residuals(seed: int, instances: int) -> list[tuple[float, ...]]:
        some = QuadraticSettings(
            instances=instances, experts_size=3, router_size=2, condition=9.0, mismatches=(0.0,), steps=4
        )
        few = dataclasses.replace(linear, instances=instances, losses=("squared",), decays=(1.0,))
        return [curve.residuals for curve in check_all(seed, some, few, uncoupled, none)][:-1]

    two = residuals(3, 2)
    assert len(set(two)) == 4
    assert residuals(3, 1) == [two[0], two[2]]
    assert not set(residuals(4, 2)) & set(two)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            {"linear": {"decay": [1]}},
            "unknown key 'linear.decay'. Did you mean 'clusters.decay'? Allowed: instances, samples,",
        ),
        (
            {"quadratics": {}},
            "unknown key 'quadratics'. Did you mean 'quadratic'? Allowed: seed, quadratic,",
        ),
        ({"linear": {"losses": ["hinge"]}}, "linear.losses.0: Input should be 'logistic' or 'squared'; got 'hinge'"),
        ({"quadratic": {"condition": 1}}, "quadratic.condition: Input should be greater than 1; got 1"),
        ({"quadratic": {"mismatches": []}}, "quadratic.mismatches: Tuple should have at least 1 item"),
        ({"seed": -1}, "seed: Input should be greater than or equal to 0; got -1"),
        ("- seed", "a recipe is a mapping of keys to values; got list"),
        ("seed: [", "not YAML:"),
    ],
)
def test_a_wrong_recipe_is_one_line_and_exit_code_2(tmp_path: Path, content: Any, said: str) -> None:
    path = save(tmp_path / "wrong.yaml", content)
    with pytest.raises(RecipeError) as error:
        load_theory_recipe(path)
    assert str(error.value).startswith(f"{path}: {said}")
    assert "\n" not in str(error.value)


def test_mistakes_end_the_verb_with_exit_code_2_and_write_nothing(comingle: Comingle, tmp_path: Path) -> None:
    wrong = save(tmp_path / "wrong.yaml", {"linear": {"decay": [1]}})
    mine = tmp_path / "mine"
    mine.mkdir()
    save(mine / "letter.txt", "dear")
    missing = tmp_path / "missing.yaml"
    for words, said in (
        ([wrong], f"{wrong}: unknown key 'linear.decay'."),
        ([missing], f"{missing}: no such theory recipe; omit the name to run the shipped one"),
        (["--seed", "-1"], "--seed: seed: Input should be greater than or equal to 0; got -1"),
        (["--out", mine, "--force"], f"{mine}: contains 'letter.txt', which is not one of recipe.yaml,"),
        (["--out", wrong], f"{wrong}: is a file; --out names a folder"),
    ):
        code, printed, errors = comingle("theory", *words)
        assert (code, printed) == (2, ""), words
        assert errors.startswith(f"comingle: {said}"), errors
        assert errors.count("\n") == 1
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["letter.txt", "mine", "wrong.yaml"]


# ---------------------------------------------------------------- what the table says


def test_a_bound_that_fails_is_counted_and_shown() -> None:
    def curve(measured: float, bound: float | None, *, at_least: bool = False) -> Curve:
        claim = Claim(statement="claim", measured=measured, bound=bound, at_least=at_least)
        return Curve(scheme="scheme", instance=0, residuals=(1.0,), claims=(claim,), rates={}, notes={})

    (row,) = summarise([curve(0.5, 0.6), curve(0.7, 0.6), curve(0.9, None)])
    assert (row.instances, row.covered, row.held, row.measured, row.bound) == (3, 2, 1, 0.7, 0.6)
    (low,) = summarise([curve(0.5, 0.6, at_least=True), curve(0.7, 0.6, at_least=True)])
    assert (low.held, low.measured) == (1, 0.5)
    (none,) = summarise([curve(0.9, None)])
    assert (none.covered, none.held, none.bound) == (0, 0, None)
    table = render([row, none])
    cells = [list(column.cells) for column in table.columns]
    assert cells[4] == ["", "1 of 2, 1 without bound", "1 without bound"]
    assert cells[3] == ["", "0.6", "none"]
    assert [r.style for r in table.rows] == [None, "red", ""]


def test_the_largest_step_ratio_leaves_rounding_out() -> None:
    import numpy as np

    assert largest_step_ratio(np.array([1.0, 0.5, 0.4, 1e-12, 1e-12])) == pytest.approx(0.8)
    assert largest_step_ratio(np.array([1.0, 0.1, 0.02, 0.02]), floor=0.05) == pytest.approx(0.2)


def test_numbers_near_one_are_told_from_one() -> None:
    assert [number(v) for v in (0.98, 1 - 3e-13, 1.0, 1.215, 2.5e-7)] == ["0.98", "1 - 3e-13", "1", "1.215", "2.5e-07"]


# ---------------------------------------------------------------- documentation


def test_the_shipped_recipe_opens_with_its_command_and_states_the_defaults() -> None:
    assert SHIPPED.read_text().startswith("# comingle theory papers/recipes/comigs/theory.yaml")
    assert load_theory_recipe(SHIPPED) == TheoryRecipe()


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        default = field.get_default()
        if isinstance(default, BaseModel):
            yield prefix + name, "section"
            yield from keys(type(default), f"{prefix}{name}.")
        else:
            listed = list(default) if isinstance(default, tuple) else default
            shown = f"[{', '.join(map(str, listed))}]" if isinstance(listed, list) else str(listed)
            yield prefix + name, f"`{shown}`"


def test_every_key_of_a_theory_recipe_is_documented_with_its_default() -> None:
    page = (REPOSITORY / "papers" / "docs" / "theory.md").read_text(encoding="utf-8")
    table = page[page.index("| theory key |") :].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]
    documented = {re.findall(r"`([^`]+)`", row[0])[0]: row[2] for row in rows}
    assert documented == dict(keys(TheoryRecipe))
