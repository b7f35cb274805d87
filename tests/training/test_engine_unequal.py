"""Users with unequal resources: values by name, and different numbers of local steps and batch sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from comingle.config import load_recipe, parse_recipe
from comingle.cost.planning import _largest_user
from comingle.runs import api
from comingle.utils.errors import RecipeError, RunError
from federations import download_all, local_round

USERS = ("ann", "bob", "cem")
COMIGS = {"name": "comigs", "router_every": 2, "router_steps": 1}
CONSTANT = {"training.experts.schedule": "constant", "training.rounds": 2}
LISTS = {
    "method": {**COMIGS, "specialists": [0, 1, 2]},
    "adapters.rank": [4, 2, 3],
    "training.local_steps": [1, 3, 2],
    "training.batch_size": [2, 1, 3],
}
BY_NAME = {
    "method": {**COMIGS, "specialists": {"cem": 2, "ann": 0, "bob": 1}},
    "adapters.rank": {"bob": 2, "cem": 3, "ann": 4},
    "training.local_steps": {"cem": 2, "bob": 3, "ann": 1},
    "training.batch_size": {"ann": 2, "cem": 3, "bob": 1},
}


def test_values_by_name_are_those_of_a_list(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file).with_changes({"training.rounds": 2})
    listed, named = recipe.with_changes(LISTS), recipe.with_changes(BY_NAME)
    assert named.fingerprint == listed.fingerprint != recipe.fingerprint
    runs = [api.run(one) for one in (listed, named)]
    rows = [run.federation.clients.state.rows for run in runs]
    assert torch.equal(rows[0], rows[1])
    assert runs[0].metrics["users"] == runs[1].metrics["users"]


@pytest.mark.parametrize(
    ("key", "section"), [("method.specialists", "method"), ("adapters.rank", ""), ("training.local_steps", "")]
)
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"ann": 1, "bobb": 1, "cem": 1}, "no user 'bobb'; allowed: ann, bob, cem. Did you mean 'bob'?"),
        ({"ann": 1, "cem": 1}, "no value for bob; give one for each user, or one for all"),
    ],
    ids=["unknown", "missing"],
)
def test_names_of_values_are_checked(
    recipe_file: Path, key: str, section: str, values: dict[str, int], said: str
) -> None:
    changes = {"method": "comigs"} if section else {}
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe_file).with_changes({**changes, key: values})
    assert str(caught.value) == f"recipe: {key}: {said}"


def test_names_that_only_the_data_has_are_checked_when_it_is_read(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("who,text\n" + "".join(f"{name},{name} says {n}\n" for n in range(90) for name in USERS))
    content = {
        "base": "random:llama?layers=1&dim=32",
        "method": "local",
        "data": {"dataset": {"path": str(rows), "user": "who", "text": "text"}, "max_test_tokens": 60},
        "training": {"rounds": 1, "local_steps": {"cem": 1, "bob": 2, "ann": 3}, "batch_size": 1, "context": 8},
        "runtime": {"dtype": "float32", "device": "cpu", "compile": False},
    }
    run = api.run(parse_recipe(content))
    source = run.federation.clients.batch_source
    assert {user.name: source.steps(i) for i, user in enumerate(source.trainers)} == {"ann": 3, "bob": 2, "cem": 1}
    content["training"]["local_steps"] = {"ann": 1, "bob": 1, "cen": 1}
    with pytest.raises(RecipeError, match=r"training\.local_steps: no user 'cen'; .* Did you mean 'cem'\?"):
        api.run(parse_recipe(content))


@pytest.mark.parametrize("key", ["training.local_steps", "training.batch_size"])
def test_a_list_has_as_many_values_as_there_are_users(recipe_file: Path, key: str) -> None:
    with pytest.raises(RecipeError, match=rf"^{key}: 2 numbers for 3 users; give one, or one per user$"):
        api.run(load_recipe(recipe_file).with_changes({key: [1, 2]}))


def test_values_by_name_follow_reordered_users_and_lists_are_refused(recipe_file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file).with_changes({"training.rounds": 1})
    users = recipe.model_dump(mode="json", exclude_unset=True)["data"]["users"]
    turned = {"data.users": {name: users[name] for name in ("cem", "ann", "bob")}}
    for folder, changes in (("named", BY_NAME), ("listed", LISTS)):
        api.run(recipe.with_changes(changes), out=tmp_path / folder)
    api.run(recipe.with_changes({**BY_NAME, **turned}), out=tmp_path / "named", resume=True)
    with pytest.raises(RunError, match=r"belongs to another recipe, adapters.rank.ann was 4 and is 2"):
        api.run(recipe.with_changes({**LISTS, **turned}), out=tmp_path / "listed", resume=True)


@pytest.mark.parametrize("key", ["training.local_steps", "training.batch_size"])
@pytest.mark.parametrize("method", ["fedavg", "comigs-1g1s", "ifca", "scaffold"])
def test_users_with_own_values_train_as_they_would_alone(federate: Any, key: str, method: str) -> None:
    values = [2, 3, 1]
    together = download_all(federate(method, changes={**CONSTANT, key: values}))
    local_round(together, range(3), 0)
    rows = together.clients.state.rows
    for number, name in enumerate(USERS):
        alone = download_all(federate(method, users=(name,), changes={**CONSTANT, key: values[number]}))
        local_round(alone, [0], 0)
        torch.testing.assert_close(alone.clients.state.rows[0], rows[number], rtol=1e-9, atol=1e-12)


def test_pooled_data_takes_the_most_steps_and_all_batches(recipe_file: Path) -> None:
    run = api.run(load_recipe(recipe_file).with_changes({**BY_NAME, "method": "centralized", "training.rounds": 1}))
    clients = run.federation.clients
    assert (clients.batch_source.steps(0), clients.batch_size) == (3, 6)
    assert clients.batch_source.draw([0], clients.phases[0], 0, 0, 0).shape[1] == 6


def test_a_batch_size_per_user_is_for_text(tmp_path: Path) -> None:
    content = {"data": {"task": {"name": "mlp", "users": 2, "clusters": 1}}, "method": "fedavg"}
    with pytest.raises(
        RecipeError, match=r"^training.batch_size: got a value for each user, for .*; allowed: one number$"
    ):
        api.run(parse_recipe({**content, "training": {"batch_size": [4, 5]}}))


def test_the_largest_user_is_found_by_name(recipe_file: Path) -> None:
    changes = {"method": {"name": "comigs", "specialists": 1}, "adapters.rank": {"cem": 2, "bob": 7, "ann": 3}}
    assert _largest_user(load_recipe(recipe_file).with_changes(changes), USERS) == 1
