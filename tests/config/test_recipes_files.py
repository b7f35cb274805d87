"""Recipes on disk: paths, changes, round trips, fingerprints, and the recipes that come with comingle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from comingle.config import Recipe, load_recipe, parse_recipe, shipped_recipes
from comingle.runs import api
from comingle.utils.errors import RecipeError

# theory.yaml is no run; tests/papers has its tests.
# Recipes of runs lie at the top; below are papers' tables and figures (tests/papers) and other kinds of recipes.
SHIPPED = sorted(shipped_recipes().glob("*.yaml"))
# Whatever a shipped recipe asks for: one round of a random base on a little of its text.
TINY = {
    "base": "random:llama",
    "data.max_train_tokens": 200,
    "data.max_valid_tokens": 60,
    "data.max_test_tokens": 60,
    "adapters.rank": 2,
    "training.rounds": 1,
    "training.local_steps": 1,
    "training.batch_size": 1,
    "training.context": 16,
    "runtime.threads": 1,
    "runtime.dtype": "float32",
    "runtime.compile": False,
}


def save(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content))
    return path


# ---------------------------------------------------------------- paths


def test_relative_paths_are_relative_to_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("project/texts/ann.txt", "project/train.txt", "project/test.txt", "elsewhere/texts/ann.txt"):
        save(tmp_path / name, "text")
    users = {
        "ann": "texts/ann.txt",
        "bob": {"train": "train.txt", "test": "./test.txt"},
        "cem": str(tmp_path / "elsewhere" / "texts" / "ann.txt"),
        "dan": "demo:library",
    }
    path = save(tmp_path / "project" / "mine.yaml", {"data": {"users": users}})
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = load_recipe(path).data.users
    assert found is not None
    assert found["ann"].path == str(tmp_path / "project" / "texts" / "ann.txt")
    assert (found["bob"].train, found["bob"].test) == (
        str(tmp_path / "project" / "train.txt"),
        str(tmp_path / "project" / "test.txt"),
    )
    assert found["cem"].path == users["cem"]
    assert found["dan"].path == "demo:library"


def test_a_recipe_named_by_a_relative_path_still_names_absolute_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "project" / "ann.txt", "text")
    save(tmp_path / "project" / "mine.yaml", {"data": {"users": {"ann": "ann.txt"}}})
    monkeypatch.chdir(tmp_path)
    users = load_recipe("project/mine.yaml").data.users
    assert users is not None
    assert users["ann"].path == str(tmp_path / "project" / "ann.txt")


def test_a_run_folder_has_the_paths_that_its_run_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are part of the fingerprint by which its checkpoints are found."""
    monkeypatch.setenv("HOME", str(tmp_path / "real"))
    save(tmp_path / "real" / "ann.txt", "text")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    users = {"ann": str(tmp_path / "link" / "ann.txt"), "bob": "~/ann.txt"}
    given = {"base": str(tmp_path / "link"), "data": {"users": users, "add_bos_token": True}}
    save(tmp_path / "run" / "recipe.yaml", given)
    found, passed = load_recipe(tmp_path / "run"), parse_recipe(given)
    assert (found.base, found.data) == (passed.base, passed.data)


def test_data_sets_and_bases_are_anchored_where_they_exist_and_hub_names_left_alone(tmp_path: Path) -> None:
    save(tmp_path / "rows.jsonl", "")
    (tmp_path / "model").mkdir()
    dataset = {"path": ["rows.jsonl", "owner/rows"], "user": "who"}
    found = load_recipe(save(tmp_path / "mine.yaml", {"base": "model", "data": {"dataset": dataset}}))
    assert found.data.dataset is not None
    assert found.data.dataset.path == [str(tmp_path / "rows.jsonl"), "owner/rows"]
    assert found.base == str(tmp_path / "model")
    hub = load_recipe(save(tmp_path / "hub.yaml", {"base": "owner/model", "data": {"dataset": dataset}}))
    assert hub.base == "owner/model"


def test_home_and_environment_are_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CORPUS", str(tmp_path / "corpus"))
    path = save(tmp_path / "mine.yaml", {"data": {"users": {"ann": "~/ann.txt", "bob": "$CORPUS/bob.txt"}}})
    users = load_recipe(path).data.users
    assert users is not None
    assert users["ann"].path == str(tmp_path / "home" / "ann.txt")
    assert users["bob"].path == str(tmp_path / "corpus" / "bob.txt")


# ---------------------------------------------------------------- changes


def test_dotted_keys_replace_and_reach_what_was_not_given(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    changed = recipe.with_changes(
        {"training.rounds": 7, "training.experts.clip_norm": 0.5, "adapters.mix": "linear", "data.users.dan": "d.txt"}
    )
    assert (changed.training.rounds, changed.training.local_steps) == (7, recipe.training.local_steps)
    assert changed.training.experts.clip_norm == 0.5
    assert changed.adapters.mix == "linear"
    assert list(changed.data.users or {}) == ["ann", "bob", "cem", "dan"]
    assert recipe.training.rounds == 4


def test_a_setting_of_the_method_can_be_changed_alone_or_with_the_method(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    changed = recipe.with_changes({"method.router_every": 9})
    assert changed.method.settings == {"router_every": 9, "router_steps": 1}
    assert changed.with_changes({"method.router_steps": 4}).method.settings == {"router_every": 9, "router_steps": 4}
    assert recipe.with_changes({"method": "local"}).method.settings == {}
    bare = parse_recipe({"data": {"users": {"ann": "a"}}}).with_changes({"method.router_every": 9})
    assert (bare.method.name, bare.method.settings) == ("comigs-1g1s", {"router_every": 9})


@pytest.mark.parametrize("backwards", [False, True])
def test_a_section_by_its_name_alone_and_what_is_in_it_are_both_taken(recipe_file: Path, backwards: bool) -> None:
    changes = {
        "method": "comigs-2s", "method.router_every": 2, "aggregation": "median", "aggregation.hostile": 0.3
    }  # fmt: skip
    given = dict(reversed(changes.items())) if backwards else dict(changes)
    changed = load_recipe(recipe_file).with_changes(given)
    assert (changed.method.name, changed.method.settings) == ("comigs-2s", {"router_every": 2})
    assert (changed.aggregation.rule, changed.aggregation.hostile) == ("median", 0.3)
    task = {"data": {"task": {"name": "mlp"}}, "method": "fedavg"}
    named = parse_recipe(task).with_changes({"data.task": "linear", "data.task.users": 7}).data
    assert (named.task.name, named.task.users) == ("linear", 7)  # type: ignore[attr-defined]


def test_what_is_handed_over_stays_as_it_is(recipe_file: Path) -> None:
    method = {"name": "comigs-2s"}
    load_recipe(recipe_file).with_changes({"method": method, "method.router_every": 2})
    assert method == {"name": "comigs-2s"}


def test_a_text_that_is_no_section_is_not_lost_in_silence(recipe_file: Path) -> None:
    with pytest.raises(RecipeError, match=r"training\.uploads"):
        load_recipe(recipe_file).with_changes({"training.uploads": "int8", "training.uploads.form": "int8"})


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("training.round", 3, "recipe: unknown key 'training.round'. Did you mean 'rounds'?"),
        ("trainin.rounds", 3, "recipe: unknown key 'trainin'. Did you mean 'training'?"),
        ("training.rounds", "x", "recipe: training.rounds: Input should be a valid integer; got 'x'"),
        ("training.rounds.x", 3, "recipe: training.rounds: Input should be a valid integer"),
        ("", 3, "recipe: unknown key ''"),
    ],
)
def test_a_wrong_change_is_one_line(recipe_file: Path, key: str, value: Any, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe_file).with_changes({key: value})
    assert str(caught.value).startswith(said)


# ---------------------------------------------------------------- round trips


def test_a_recipe_survives_its_own_yaml(recipe_file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file).with_changes(
        {"training.participation": [["ann"], ["bob", "cem"]], "method": {"name": "comigs", "specialists": [0, 1, 2]}}
    )
    (tmp_path / "recipe.yaml").write_text(recipe.as_yaml())
    again = load_recipe(tmp_path)
    assert again == recipe
    assert again.fingerprint == recipe.fingerprint
    assert again.as_yaml() == recipe.as_yaml()
    assert set(yaml.safe_load(recipe.as_yaml())) == set(Recipe.model_fields)


@pytest.mark.parametrize(
    "key", ["runtime.dtype", "runtime.users_per_step", "checkpoints.every", "evaluation.every", "evaluation.first"]
)
def test_a_fingerprint_ignores_the_machine_and_what_is_written_when(recipe_file: Path, key: str) -> None:
    recipe = load_recipe(recipe_file)
    changed = recipe.with_changes({key: {"runtime.dtype": "bfloat16", "evaluation.first": False}.get(key, 3)})
    assert changed != recipe
    assert changed.fingerprint == recipe.fingerprint


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", 1),
        ("base", "random:gpt2"),
        ("method", "local"),
        ("method.router_every", 3),
        ("training.rounds", 5),
        ("training.experts.learning_rate", 1e-3),
        ("adapters.rank", 3),
        ("data.max_test_tokens", 61),
        ("evaluation.model", "exchanged"),
    ],
)
def test_a_fingerprint_follows_everything_else(recipe_file: Path, key: str, value: Any) -> None:
    recipe = load_recipe(recipe_file)
    assert recipe.with_changes({key: value}).fingerprint != recipe.fingerprint


# ---------------------------------------------------------------- what comes with comingle


def test_there_is_a_demo() -> None:
    assert "demo.yaml" in [path.name for path in SHIPPED]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_recipe_opens_with_its_command_and_is_valid(path: Path) -> None:
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    assert first.startswith(("# comingle run ", "# comingle compare "))
    assert path.name in first
    load_recipe(path)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_recipe_runs_a_round_on_a_tiny_base(path: Path) -> None:
    recipe = load_recipe(path).with_changes(TINY)
    period = {key: 1 for key in recipe.method.settings if key in ("router_every", "router_steps")}
    if period:
        recipe = recipe.with_changes({f"method.{key}": value for key, value in period.items()})
    done = api.run(recipe)
    assert done.metrics["rounds"] == 1
    assert all(user["test_tokens"] == 59 for user in done.metrics["users"].values())


def test_the_routers_automatic_rate_keeps_the_fingerprint_of_older_runs(recipe_file: Path) -> None:
    """Older versions wrote 0.002, which is still what most methods take."""
    recipe = load_recipe(recipe_file)
    assert recipe.training.router.learning_rate == "auto"
    assert recipe.with_changes({"training.router.learning_rate": 0.002}).fingerprint == recipe.fingerprint
    assert recipe.with_changes({"training.router.learning_rate": 0.003}).fingerprint != recipe.fingerprint
