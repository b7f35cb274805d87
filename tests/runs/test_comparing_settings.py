"""One method with several settings in one comparison: labels and folders are unique, and every reader takes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import comingle
from comingle.cli.compare import split_names
from comingle.reports.runs import find_runs, read_entries
from comingle.runs.compare import parse_method
from comingle.serving.models import find_run
from comingle.utils.errors import RecipeError, RunError

USERS = {
    name: torch.utils.data.TensorDataset(x := torch.randn(20, 3), x.sum(1, keepdim=True)) for name in ("ada", "ben")
}
RECIPE: dict[str, Any] = {"training": {"rounds": 1, "batch_size": 8}, "data": {"loss": "mse"}}


def compare(methods: Any, **how: Any) -> Any:
    return comingle.compare(RECIPE, methods, users=USERS, base=lambda: torch.nn.Linear(3, 1), **how)


def test_one_method_with_two_settings(tmp_path: Path) -> None:
    methods = ["local", "fedprox", "fedprox:proximal=0.5", {"name": "fedprox", "proximal": 2.0}]
    labels = ["local", "fedprox", "fedprox:proximal=0.5", "fedprox:proximal=2.0"]
    found = compare(methods, seeds=[0, 1], out=tmp_path / "out", against="fedprox")
    assert list(dict.fromkeys(method for method, _ in found.metrics)) == labels
    folders = {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()}
    named = ["local", "fedprox", "fedprox-proximal=0.5", "fedprox-proximal=2.0"]
    assert folders == {f"{name}-seed{seed}" for name in named for seed in (0, 1)}
    table = json.loads((tmp_path / "out/table.json").read_text())
    assert [row["method"] for row in table["methods"]] == labels
    assert [row["seeds"] for row in table["methods"]] == [[0, 1]] * 4
    assert [record["method"] for record in found.against("fedprox:proximal=0.5")] == ["local", "fedprox", labels[3]]
    assert [path.name.rpartition("-seed")[0] for path in find_runs([tmp_path / "out"])][::2] == named
    assert len(read_entries([tmp_path / "out"])) == 4
    assert find_run(tmp_path / "out", method="fedprox:proximal=0.5").name == "fedprox-proximal=0.5-seed0"
    assert find_run(tmp_path / "out", method="fedprox", seed=1).name == "fedprox-seed1"
    rates = {
        name: comingle.Recipe.model_validate(comingle.config.load_recipe(tmp_path / "out" / f"{name}-seed0")).method
        for name in named[2:]
    }
    assert [method.settings for method in rates.values()] == [{"proximal": 0.5}, {"proximal": 2.0}]


def test_a_call_adds_methods_to_a_comparison(tmp_path: Path) -> None:
    options: Any = {"seeds": [0], "out": tmp_path / "out"}
    first = compare(["fedprox", "fedprox:proximal=1"], **options)
    both = compare(["local"], resume=True, against="fedprox", **options)
    assert [*both.metrics] == [("local", 0), ("fedprox", 0), ("fedprox:proximal=1", 0)]
    assert {key: both.metrics[key]["users"] for key in first.metrics} == {
        key: metrics["users"] for key, metrics in first.metrics.items()
    }
    assert "fedprox:proximal=1" in both.to_latex()
    with pytest.raises(RecipeError, match="--against 'ditto'"):
        compare(["local"], resume=True, against="ditto", **options)


def test_a_method_that_is_there_once_keeps_its_name() -> None:
    found = compare(["local", {"name": "fedprox", "proximal": 2.0}], seeds=[0])
    assert list(found.metrics) == [("local", 0), ("fedprox", 0)]


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        (["fedprox:proximal=1", "fedprox:proximal=1"], "methods: got 'fedprox:proximal=1' twice"),
        (["fedprox", "fedprox:proximal=0.01"], "'fedprox' and 'fedprox:proximal=0.01' have the same settings"),
        (["fedprox:proximal"], "give NAME:KEY=VALUE, each key once"),
        (["fedprox:proximal=1:proximal=2"], "give NAME:KEY=VALUE, each key once"),
        (["fedprox:mu=1"], "method fedprox: no setting 'mu'. Did you mean 'proximal'?"),
        (["fedprox:proximal=[1"], "not YAML"),
        (["fedproxx:proximal=1"], "no method 'fedproxx'. Did you mean 'fedprox'?"),
    ],
)
def test_mistakes_are_one_line(methods: list[str], said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        compare(methods, seeds=[0])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_list_may_be_a_setting_on_the_command_line() -> None:
    assert split_names("local, comigs:specialists=[1,2]:router_every=5") == [
        "local",
        "comigs:specialists=[1,2]:router_every=5",
    ]
    assert parse_method("comigs:specialists=[1,2]:router_every=5") == {
        "name": "comigs",
        "specialists": [1, 2],
        "router_every": 5,
    }


def test_the_run_of_a_users_state_folder_is_found(tmp_path: Path) -> None:
    """After two federations the folders to choose from are named, the latest first."""
    state = tmp_path / "ada"
    for number, name in enumerate(("b", "a")):
        comingle.run(
            RECIPE, method="local", users=USERS, base=lambda: torch.nn.Linear(3, 1), out=state / f"run-{name}" / "model"
        )
        if not number:
            assert find_run(state) == state / "run-b" / "model"
    with pytest.raises(RunError, match=f"{state}: has models of 2 federations") as error:
        find_run(state)
    assert f"{state}/run-a/model, {state}/run-b/model" in str(error.value).replace(" and ", ", ")
