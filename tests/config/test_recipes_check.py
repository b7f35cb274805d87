"""Every mistake in a recipe is one line: where, what, what was got, what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from comingle.config import load_recipe, parse_recipe
from comingle.config.files import read_yaml
from comingle.methods import make
from comingle.utils.errors import RecipeError

USERS = {"users": {"ann": {"path": "a.txt"}}}


def content(path: str, value: Any) -> dict[str, Any]:
    """A recipe with one dotted key on top of the smallest one."""
    found: dict[str, Any] = {"data": dict(USERS)}
    place = found
    *parts, last = path.split(".")
    for part in parts:
        place[part] = place = dict(place.get(part, {}))
    place[last] = value
    return found


def problem(recipe: Any) -> str:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(recipe, where="tiny.yaml")
    message = str(caught.value)
    assert message.startswith("tiny.yaml: ")
    assert "\n" not in message
    return message.removeprefix("tiny.yaml: ")


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("trainig", "training"),
        ("training.round", "rounds"),
        ("training.experts.learning_rat", "learning_rate"),
        ("training.router.scedule", "schedule"),
        ("adapters.rnk", "rank"),
        ("adapters.targets.atention", "attention"),
        ("data.hold_out", "held_out"),
        ("data.split.tst", "test"),
        ("data.users.ann.colum", "column"),
        ("data.dataset.usr", "user"),
        ("evaluation.evry", "every"),
        ("checkpoints.kep", "keep"),
        ("runtime.dtyp", "dtype"),
    ],
)
def test_an_unknown_key_at_every_level_gets_the_nearest_known_one(key: str, nearest: str) -> None:
    message = problem(content(key, 1))
    assert message.startswith(f"unknown key {key!r}. Did you mean {nearest!r}? Allowed: ")
    assert nearest in message.partition("Allowed: ")[2].split(", ")


@pytest.mark.parametrize("name", ["fednova", "fedadam", "fedopt", "apfl"])
def test_a_method_that_is_not_here_is_not_taken_for_another(name: str) -> None:
    with pytest.raises(RecipeError) as caught:
        make(name)
    assert str(caught.value).startswith(f"method: no method {name!r}. Allowed: pretrained, ")


def test_an_unknown_key_that_is_near_nothing_gets_the_list() -> None:
    message = problem(content("xyz", 1))
    assert message.startswith(
        "unknown key 'xyz'. Allowed: base, quantise, method, seed, data, adapters, floral, training, "
    )


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("training.rounds", "ten", "training.rounds: Input should be a valid integer; got 'ten'"),
        ("training.rounds", 2.5, "training.rounds: Input should be a valid integer; got 2.5"),
        ("training.rounds", 0, "training.rounds: Input should be greater than or equal to 1; got 0"),
        ("training.local_steps", True, "training.local_steps: give a whole number from 1, or a list"),
        ("training.context", 1, "training.context: Input should be greater than or equal to 2; got 1"),
        ("training.experts.learning_rate", "fast", "training.experts.learning_rate: Input should be a valid number"),
        ("training.experts.learning_rate", 0, "training.experts.learning_rate: Input should be greater than 0; got 0"),
        ("training.experts.learning_rate", float("inf"), "training.experts.learning_rate: Input should be a finite"),
        ("training.experts.name", "adam", "training.experts.name: Input should be 'adamw' or 'sgd'; got 'adam'"),
        ("training.experts.betas", [0.9], "key 'training.experts.betas.1' is missing"),
        ("training.participation", 0, "training.participation: Input should be greater than 0; got 0"),
        ("training.participation", ["ann"], "training.participation.0: Input should be a valid list; got 'ann'"),
        ("training.participation", [["ann"], []], "training.participation: a round without users"),
        ("training", 3, "training: Input should be a mapping; got 3"),
        ("adapters.rank", -8, "adapters.rank: Input should be greater than or equal to 1; got -8"),
        ("adapters.mix", "both", "adapters.mix: Input should be 'output' or 'linear'; got 'both'"),
        ("method", 3, "method: give a name, or a mapping with name; got 3"),
        (
            "adapters.rank",
            "x",
            "adapters.rank: give a whole number from 1, or a list or a mapping with one for each user; got 'x'",
        ),
        ("data.max_train_tokens", "many", "data.max_train_tokens: "),
        ("method.settings", 3, "method.settings: Input should be a mapping; got 3"),
        ("seed", -1, "seed: Input should be greater than or equal to 0; got -1"),
        ("base", None, "base: Input should be a valid string; got None"),
        ("data.split.valid", 1, "data.split.valid: Input should be less than 1; got 1"),
        ("data.max_train_tokens", 0, "data.max_train_tokens: Input should be greater than or equal to 1; got 0"),
        ("data.held_out", "mix", "data.held_out: Input should be 'own' or 'mixture'; got 'mix'"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_got(key: str, value: Any, said: str) -> None:
    assert problem(content(key, value)).startswith(said)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, "data: give one of users, dataset, questions and task"),
        (
            {"users": {"ann": "a"}, "dataset": {"path": "x", "user": "who"}},
            "data: give one of users, dataset, questions",
        ),
        ({"task": "linear", "questions": "xnli"}, "data: give one of users, dataset, questions and task"),
        ({"users": {}}, "data: no users; "),
        ({"users": ["ann"]}, "data.users: "),
        ({"users": {"ann": None}}, "data.users.ann: give a path, "),
        ({"users": {"a.b": [1]}}, "data.users.a.b: give a path, "),
        ({"task": 3}, "data.task: give a name, or a mapping with name; got 3"),
        ({"questions": ["x"]}, "data.questions: give a name, or a mapping with name; got a list"),
        ({"dataset": {"path": 3, "user": "x"}}, "data.dataset.path: give a path or a hub name, or a list of them; "),
        (
            {"dataset": {"path": "a", "user": "x", "users": "y"}},
            "data.dataset.users: give a list of names",
        ),
        ({"dataset": {"path": "a", "user": "x", "users": 0}}, "data.dataset.users: give a list of names"),
        ({"users": {"ann": ""}}, "data.users.ann.path: String should have at least 1 character; got ''"),
        ({"users": {"ann": {}}}, "data.users.ann: give either path alone, or train and test"),
        ({"users": {"ann": {"path": "a", "train": "b", "test": "c"}}}, "data.users.ann: give either path alone, or "),
        ({"users": {"ann": {"path": "a", "test": "c"}}}, "data.users.ann: give either path alone, or train and test"),
        ({"users": {"ann": {"train": "b"}}}, "data.users.ann: train without test; give test too"),
        ({"dataset": {"path": "x"}}, "key 'data.dataset.user' is missing"),
    ],
)
def test_users_must_be_somebody_with_text(data: dict[str, Any], said: str) -> None:
    assert problem({"data": data}).startswith(said)


def test_data_must_be_given() -> None:
    assert problem({}) == "key 'data' is missing"
    for nothing in (None, [], "text", 3):
        assert problem(nothing).startswith("a recipe is a mapping of keys to values; got ")


def test_a_recipe_is_never_executed(tmp_path: Path) -> None:
    path = tmp_path / "evil.yaml"
    path.write_text(f"base: !!python/object/apply:os.mkdir ['{tmp_path / 'executed'}']\n")
    with pytest.raises(RecipeError, match="not YAML: could not determine a constructor"):
        load_recipe(path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("text", ["a: [", "\t", "a: b: c"])
def test_a_file_that_is_not_yaml(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert str(caught.value).startswith(f"{path}: not YAML: ")
    assert "\n" not in str(caught.value)


def test_a_binary_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\xff\x00\x80")
    with pytest.raises(RecipeError, match="not YAML"):
        load_recipe(path)


def test_a_recipe_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        read_yaml(tmp_path)  # a folder
    assert str(caught.value).startswith(f"{tmp_path}: cannot be read: ")
    missing = tmp_path / "missing.yaml"
    with pytest.raises(RecipeError) as caught:
        read_yaml(missing)
    assert str(caught.value).startswith(f"{missing}: cannot be read: ")


def test_a_missing_file_may_be_a_recipe_that_comes_with_comingle(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no such recipe\. Did you mean '.*demo\.yaml'\?"):
        load_recipe(tmp_path / "demo.yaml")
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / "mine.yaml")
    assert str(caught.value) == f"{tmp_path / 'mine.yaml'}: no such recipe."
    with pytest.raises(RecipeError, match=r"recipe\.yaml: no such recipe"):
        load_recipe(tmp_path)


def test_yaml_numbers_with_an_exponent_are_numbers() -> None:
    """YAML 1.1 reads 2e-3 as text."""
    recipe = yaml.safe_load("{data: {users: {ann: a}}, training: {experts: {learning_rate: 2e-3}}}")
    assert parse_recipe(recipe).training.experts.learning_rate == 0.002


def test_a_method_is_a_name_or_a_name_with_settings() -> None:
    spellings: list[Any] = [
        {"name": "comigs", "generalists": 2},
        {"name": "comigs", "settings": {"generalists": 2}},
    ]
    for spelling in spellings:
        method = parse_recipe(content("method", spelling)).method
        assert (method.name, method.settings) == ("comigs", {"generalists": 2})
    assert parse_recipe(content("method", "local")).method.settings == {}
    default = parse_recipe(content("seed", 0)).method
    assert parse_recipe(content("method", {"router_every": 5})).method.name == default.name == "comigs-1g1s"


def test_the_routers_schedule_is_constant_unless_said_otherwise() -> None:
    assert parse_recipe(content("training.router.learning_rate", 0.1)).training.router.schedule == "constant"
    assert parse_recipe(content("training.router.schedule", "cosine")).training.router.schedule == "cosine"
    assert parse_recipe(content("seed", 0)).training.router.schedule == "constant"
    assert parse_recipe(content("seed", 0)).training.experts.schedule == "cosine"
