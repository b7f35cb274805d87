"""Numbers beyond reason are refused in one line, before anything is drawn or loaded."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from comingle.config import load_recipe, parse_recipe
from comingle.models.loading import load_base
from comingle.runs.session import build, prepare
from comingle.utils.errors import BaseModelError, RecipeError

RANK = "adapters.rank: got {}; "
SETTINGS = {
    "adapters.rank=100000000": RANK.format("100000000"),
    "adapters.rank=121": RANK.format("121"),
    "adapters.rank=[2, 400, 3]": RANK.format("400 for user 2 of 3"),
    "training.batch_size=1000000000": "training.batch_size: ",
    "training.rounds=1000000000": "--set: training.rounds: Input should be less than or equal to 10000000; got 10000",
    "runtime.threads=100000": "--set: runtime.threads: Input should be less than or equal to 1024; got 100000",
    "training.local_steps=99999999999999": "--set: training.local_steps: Input should be less than or equal to ",
    "training.context=9999999999999999999999": "--set: training.context: Input should be less than or equal to ",
    "data.max_train_tokens=10000000000000000000000": "--set: data.max_train_tokens: ",
    "method={name: comigs, generalists: 100000000}": "method comigs: generalists is 100000000; allowed: whole numbers "
    "from 0 to 1,000",
    "method={name: comigs, specialists: 100000000}": "method comigs: specialists is 100000000; allowed: whole ",
    "method={name: comigs, router_every: 100000000}": "method comigs: router_every is 100000000; allowed: whole ",
    "method={name: floral, clusters: 1000000000}": "method floral: clusters is 1000000000; allowed: whole numbers "
    "from 1 to 10,000",
    "method={name: ifca, models: 1000000000}": "method ifca: models is 1000000000; allowed: whole numbers from 1 to ",
    "training.experts={name: sgd, learning_rate: 1e300}": "--set: training.experts.learning_rate: Input should ",
    "training.experts.clip_norm=1e300": "--set: training.experts.clip_norm: Input should be less than or equal to ",
    "training.balance_weight=1e300": "--set: training.balance_weight: Input should be less than or equal to ",
    "method={name: fdlora, outer_rate: 1e300}": "method fdlora: outer_rate is 1e+300; allowed: numbers from 0 to 1e+38",
    "method={name: fedmerge, global_rate: 1e300}": "method fedmerge: global_rate is 1e+300; allowed: numbers ",
    "method={name: floral, adaptor_server_rate: 1e39}": "method floral: adaptor_server_rate is 1e+39; allowed: ",
    "method={name: floral, temperature: 1e300}": "method floral: temperature is 1e+300; allowed: numbers above 0, up ",
    "base=random:llama?layers=100000": "base model 'random:llama?layers=100000': layers",
    "base=random:llama?layers=999&dim=8000000": "base model 'random:llama?layers=999&dim=8000000': about ",
    "base=random:gpt2?ctx=100000000000": "base model 'random:gpt2?ctx=100000000000': about ",
    "base=random:opt?vocab=100000000000": "base model 'random:opt?vocab=100000000000': about ",
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_number_beyond_reason_is_refused(comingle: Any, recipe_file: Path, tmp_path: Path, setting: str) -> None:
    answer = comingle("run", recipe_file, "--out", tmp_path / "run", "--set", setting)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith(f"comingle: {SETTINGS[setting]}")
    assert answer.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("setting", [s for s in SETTINGS if "layers=999" not in s and "=1000000000000"[:-1] not in s])
def test_cost_refuses_what_a_run_refuses(comingle: Any, recipe_file: Path, setting: str) -> None:
    answer = comingle("cost", recipe_file, "--set", setting)
    assert answer.code == 2
    assert answer.err.startswith(f"comingle: {SETTINGS[setting]}")


def test_no_more_memory_is_asked_for_than_there_is(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of this machine is made small, so that nothing large is drawn where the check is missing."""
    recipe = load_recipe(recipe_file)
    run_data = prepare(recipe)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=4 << 20, available=1 << 33))
    assert build(recipe, run_data)
    floral = recipe.with_changes({"method": {"name": "floral", "clusters": 1000}})
    with pytest.raises(RecipeError, match=r"^method floral: 1,000 adaptor sets of \d+,\d+ parameters "):
        build(floral, run_data)
    comigs = recipe.with_changes({"method": {"name": "comigs", "generalists": 1000}})
    with pytest.raises(RecipeError, match=r"^method comigs: the trained tensors of 3 users "):
        build(comigs, run_data)


@pytest.mark.parametrize("method", ["floral", "ensemble", "mfl", "fedem"])
def test_no_more_components_of_nets_are_made_than_fit(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = parse_recipe({"data": {"task": "mlp"}, "method": {"name": method, TASK_SETTINGS[method]: 10_000}})
    run_data = prepare(recipe)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=1 << 20, available=1 << 33))
    with pytest.raises(RecipeError, match=rf"^method {method}: 10,000 (models|adaptor sets) of "):
        build(recipe, run_data)


TASK_SETTINGS = {"floral": "clusters", "ensemble": "clusters", "mfl": "clusters", "fedem": "models"}


@pytest.mark.parametrize("key", ["data.max_train_tokens", "data.max_valid_tokens", "data.max_test_tokens"])
def test_a_limit_far_above_what_there_is_changes_nothing(recipe_file: Path, key: str) -> None:
    recipe = load_recipe(recipe_file)
    [plain, limited] = [prepare(one).users for one in (recipe, recipe.with_changes({key: 10**15}))]
    assert [len(user.train) for user in limited] == [len(user.train) for user in plain]


def test_a_folder_below_a_file(comingle: Any, recipe_file: Path) -> None:
    answer = comingle("run", recipe_file, "--out", recipe_file / "x" / "y")
    assert (answer.code, answer.out) == (2, "")
    (line,) = answer.err.splitlines()
    assert f"{recipe_file}/x/y: cannot be a folder: {recipe_file} is a file" in line


def test_no_reason_for_an_empty_error(
    comingle: Any, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("comingle.cli.training.run_in", full)
    answer = comingle("run", recipe_file, "--out", tmp_path / "run")
    assert "`comingle cost`" in answer.err


def test_a_rank_above_some_weights_is_warned_of(recipe_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = load_recipe(recipe_file).with_changes({"adapters.rank": [16, 1, 16]})
    run_data = prepare(recipe)
    assert build(recipe, run_data).clients.model.adapters.ranks.tolist() == [16, 1, 16]
    assert caplog.messages == []
    build(recipe.with_changes({"adapters.rank": [3, 32, 17]}), run_data)
    (message,) = caplog.messages
    assert message.startswith("adapters.rank: ")
    assert all(part in message for part in ("32", "user 2 of 3", "4 of 14", "layers.0.self_attn.k_proj"))
    with pytest.raises(RecipeError, match=r"^adapters\.rank: got 121"):
        build(recipe.with_changes({"adapters.rank": 121, "method": "centralized"}), run_data)


def test_bounds_do_not_hinder_what_a_large_machine_may_have(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file).with_changes({"runtime.threads": 1024, "training.batch_size": 4096})
    assert recipe.runtime.threads == 1024
    assert load_base("random:llama?layers=40", dtype="float32", device="cpu").model.config.num_hidden_layers == 40
    with pytest.raises(BaseModelError, match="layers"):
        load_base("random:llama?layers=1001", dtype="float32", device="cpu")


@pytest.mark.parametrize("verb", ["run", "theory", "compare", "demo", "reproduce"])
@pytest.mark.parametrize("name", ["x" * 300, "a/" + "y" * 5000])
def test_a_folder_with_an_impossible_name(
    comingle: Any, recipe_file: Path, tmp_path: Path, verb: str, name: str
) -> None:
    given = {"run": (recipe_file,), "compare": (recipe_file, "--methods", "local"), "reproduce": ("comigs/table1",)}
    answer = comingle(verb, *given.get(verb, ()), "--out", tmp_path / name)
    assert answer.code == 2
    (line,) = answer.err.splitlines()
    assert line.startswith("comingle: --out ")
    assert "cannot be a folder: File name too long" in line
    assert len(line) < 400
    assert os.listdir(tmp_path) == ["project"]
