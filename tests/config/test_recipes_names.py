"""Keys under the names of other libraries, or in another section, are refused with the right key and its path."""

from __future__ import annotations

from typing import Any

import pytest

import comingle
from comingle.config import parse_recipe
from comingle.config.hints import _KEYS, _dotted_keys
from comingle.config.sections import Recipe
from comingle.config.settings import KINDS
from comingle.methods import make
from comingle.utils.errors import RecipeError

TEXT = {"users": {"ann": {"path": "a.txt"}}}
SAMPLES = {"kind": "samples", "users": {"ann": {"path": "a.npz"}}}


def said(recipe: Any) -> str:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(recipe)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def run_with(changes: dict[str, Any]) -> Any:
    return comingle.run({"data": TEXT}, **changes)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("lr", "'training.experts.learning_rate'"),
        ("learning_rate", "'training.experts.learning_rate'"),
        ("learningRate", "'training.experts.learning_rate'"),
        ("learning-rate", "'training.experts.learning_rate'"),
        ("epochs", "'training.rounds' or 'training.local_steps'"),
        ("num_train_epochs", "'training.rounds' or 'training.local_steps'"),
        ("r", "'adapters.rank'"),
        ("lora", "'adapters'"),
        ("lora_r", "'adapters.rank'"),
        ("alpha", "'adapters.alpha'"),
        ("lora_alpha", "'adapters.alpha'"),
        ("mu", "'method.proximal'"),
        ("max_length", "'training.context'"),
        ("per_device_train_batch_size", "'training.batch_size'"),
        ("model", "'base'"),
        ("model_name_or_path", "'base'"),
        ("dataset_name", "'data.dataset' or 'data'"),
        ("strategy", "'method'"),
        ("num_server_rounds", "'training.rounds'"),
        ("target_epsilon", "'privacy.epsilon'"),
        # keys of this library in the wrong place
        ("rounds", "'training.rounds'"),
        ("epsilon", "'privacy.epsilon'"),
        ("router_every", "'method.router_every'"),
        ("training.lr", "'training.experts.learning_rate'"),
        ("training.learning_rate", "'training.experts.learning_rate'"),
        ("training.router.lr", "'training.router.learning_rate'"),
        ("training.seed", "'seed' (at the top level) or 'data.seed'"),
        ("training.rank", "'adapters.rank'"),
        ("adapters.r", "'adapters.rank'"),
        ("adapters.lora_alpha", "'adapters.alpha'"),
    ],
)
def test_a_name_of_another_library_gets_the_key_with_its_path(key: str, meant: str) -> None:
    recipe: dict[str, Any] = {"data": TEXT}
    place = recipe
    *sections, last = key.split(".")
    for section in sections:
        place[section] = place = {}
    place[last] = 1
    hint = f"unknown key {key!r}. Did you mean {meant}? Allowed: "
    assert said(recipe).startswith(f"recipe: {hint}")
    with pytest.raises(RecipeError) as caught:
        parse_recipe({"data": TEXT}).with_changes({key: 1}, where="--set")
    assert str(caught.value).startswith(f"--set: {hint}")
    with pytest.raises(RecipeError) as caught:
        run_with({key: 1})
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("lora_alpha", "'floral.alpha'"),
        ("r", "'floral.rank'"),
        ("epochs", "'training.rounds' or 'training.local_epochs'"),
    ],
)
def test_the_key_is_one_that_such_users_read(key: str, meant: str) -> None:
    assert f"unknown key {key!r}. Did you mean {meant}? " in said({"data": SAMPLES, key: 1})
    assert "Did you mean" not in said({"data": SAMPLES, "max_length": 1})  # samples have no windows


def test_every_key_of_the_table_exists() -> None:
    kinds = [KINDS[kind] for kind in ("text", "samples", "conversations")]
    known = {path for kind in kinds for path in _dotted_keys(Recipe, kind)} | {"path"}
    meant = {path for paths in _KEYS.values() for path in paths.split() if not path.startswith("method.")}
    assert sorted(meant - known) == []


@pytest.mark.parametrize(
    ("method", "setting", "meant"),
    [
        ("fedprox", "mu", "proximal"),
        ("ditto", "lambda", "nearness"),
        ("floral", "k", "clusters"),
        ("ifca", "k", "models"),
    ],
)
def test_a_setting_under_its_name_in_a_paper_gets_the_one_here(method: str, setting: str, meant: str) -> None:
    with pytest.raises(RecipeError, match=f"no setting '{setting}'. Did you mean '{meant}'?"):
        make(method, **{setting: 1})


def test_nets_have_a_learning_rate_without_experts() -> None:
    recipe = parse_recipe({"data": SAMPLES, "training": {"learning_rate": 0.1}})
    plain = parse_recipe({"data": SAMPLES, "training": {"experts": {"learning_rate": 0.1}}})
    assert recipe == plain
    assert recipe.with_changes({"training.learning_rate": 0.2}).training.experts.learning_rate == 0.2
    assert recipe.with_changes({"training.experts.learning_rate": 0.3}).training.experts.learning_rate == 0.3
    both = {"learning_rate": 0.1, "experts": {"learning_rate": 0.2}}
    assert said({"data": SAMPLES, "training": both}).startswith("recipe: training.learning_rate and training.experts.")
    assert "training.experts.learning_rate: " in said({"data": SAMPLES, "training": {"learning_rate": -1}})
