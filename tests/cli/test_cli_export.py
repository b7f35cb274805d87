"""``comingle export``: from runs and comparisons, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM

from comingle.runs import api
from comingle.runs.comparison import compare
from exporting import check_same


@pytest.fixture(scope="module")
def run(write_recipe: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    recipe = write_recipe(folder / "project")
    api.run(recipe, out=folder / "run")
    return folder / "run"


def test_a_users_model_is_written_and_said(comingle: Any, run: Path, tmp_path: Path) -> None:
    said = comingle("export", run, "--user", "bob", "--to", tmp_path / "bob")
    assert said.code == 0
    assert "MixtralForCausalLM with 2 experts, of which 2 are chosen" in said.out.replace("\n", " ")
    check_same(api.load(run).user("bob"), AutoModelForCausalLM.from_pretrained(tmp_path / "bob"))
    text = (tmp_path / "bob" / "README.md").read_text()
    assert f"| test perplexity | {api.load(run).metrics['users']['bob']['test_perplexity']:.4g} |" in text
    assert str(run.parent) not in text


def test_everybodys_is_written_below_the_folder(comingle: Any, run: Path, tmp_path: Path) -> None:
    said = comingle("export", run, "--user", "all", "--to", tmp_path / "all", "--format", "merged-approximately")
    assert said.code == 0
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == ["ann", "bob", "cem"]
    assert said.out.count("validation perplexity of this model: ") == 3


def test_names_are_folders_below_that_of_to_and_nowhere_else(comingle: Any, recipe_file: Path, tmp_path: Path) -> None:
    """Names may come from a column of somebody else's data."""
    content = yaml.safe_load(recipe_file.read_text())
    names = ["../../ann", str(tmp_path / "bob"), ".."]
    content["data"]["users"] = dict(zip(names, content["data"]["users"].values(), strict=True))
    recipe_file.write_text(yaml.safe_dump({**content, "method": "fedit"}))
    api.run(recipe_file, out=tmp_path / "run")
    before = {path for path in tmp_path.iterdir() if path.name != "all"}
    said = comingle("export", tmp_path / "run", "--user", "all", "--to", tmp_path / "all", "--format", "peft")
    assert (said.code, said.err) == (0, "")
    assert {path for path in tmp_path.iterdir() if path.name != "all"} == before
    folders = {path.name for path in (tmp_path / "all").iterdir()}
    assert folders == {"..%2F..%2Fann", str(tmp_path / "bob").replace("/", "%2F"), "%2E%2E"}
    assert {child.name for child in (tmp_path / "all" / "%2E%2E").iterdir()} >= {"adapter_config.json"}


@pytest.mark.slow
def test_a_run_of_a_comparison_is_named(comingle: Any, run: Path, tmp_path: Path) -> None:
    recipe = run.parent / "project" / "tiny.yaml"
    compare(recipe, ["fedit", "local"], seeds=[0, 1], out=tmp_path / "runs")
    said = comingle("export", tmp_path / "runs", "--user", "bob", "--to", tmp_path / "x")
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert "is a comparison; say which run with --method: " in said.err
    options = ("--user", "bob", "--method", "fedit", "--to", tmp_path / "x", "--format", "peft")
    assert comingle("export", tmp_path / "runs", *options, "--seed", 7).err.startswith("comingle: --seed: got 7; ")
    assert comingle("export", tmp_path / "runs", *options, "--seed", 1).code == 0
    own = api.load(tmp_path / "runs" / "fedit-seed1").user("bob").export(tmp_path / "y", format="peft").folder
    weights = [(folder / "adapter_model.safetensors").read_bytes() for folder in (own, tmp_path / "x")]
    assert weights[0] == weights[1]


def test_the_only_user_need_not_be_named(comingle: Any, recipe_file: Path, tmp_path: Path) -> None:
    content = yaml.safe_load(recipe_file.read_text())
    content["data"]["users"] = {"ann": content["data"]["users"]["ann"]}
    recipe_file.write_text(yaml.safe_dump({**content, "method": "fedit"}))
    api.run(recipe_file, out=tmp_path / "run")
    answer = comingle("export", tmp_path / "run", "--to", tmp_path / "ann", "--format", "peft")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith("ann: ")
    assert (tmp_path / "ann" / "adapter_config.json").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--user", "bib"), "--user: no user 'bib'"),
        ((), "--user: got none for 3 users; allowed: ann, bob, cem, or all"),
        (("--user", "bob", "--format", "peft"), "2 experts are chosen token by token; --format transformers is exact"),
        (("--user", "bob", "--method", "fedit"), "with --method comigs-1g1s; omit --method"),
    ],
)
def test_mistakes_are_one_line(comingle: Any, run: Path, tmp_path: Path, options: Any, said: str) -> None:
    answer = comingle("export", run, *options, "--to", tmp_path / "x")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert said in answer.err
    assert not (tmp_path / "x").exists()


def test_a_folder_that_exists_stops_all_before_the_first(comingle: Any, run: Path, tmp_path: Path) -> None:
    (tmp_path / "all" / "cem").mkdir(parents=True)
    (tmp_path / "all" / "cem" / "notes").write_text("mine")
    answer = comingle("export", run, "--user", "all", "--to", tmp_path / "all")
    assert answer.code == 2
    assert "cem: exists" in answer.err
    assert [path.name for path in (tmp_path / "all").iterdir()] == ["cem"]


def test_a_run_of_nets_or_none_is_refused(comingle: Any, tmp_path: Path) -> None:
    answer = comingle("export", tmp_path / "no", "--user", "bob", "--to", tmp_path / "x")
    assert answer.code == 2
    assert answer.err == f"comingle: {tmp_path / 'no'}: no such run folder\n"
    task = {"name": "mlp-norm", "users": 2, "clusters": 2, "test_samples": 9}
    content = {"method": "local", "data": {"task": task}, "training": {"rounds": 1, "batch_size": 40}}
    api.run(content, out=tmp_path / "nets")
    answer = comingle("export", tmp_path / "nets", "--user", "user-0", "--to", tmp_path / "x")
    assert answer.code == 2
    assert "user 'user-0': got the net net:mlp-norm" in answer.err
