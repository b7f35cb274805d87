"""``method.specialists: auto``: as many specialists as a device's memory and a time limit per round afford."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.commands import comingle as comingle
from tests.federation.direct import Direct, federated, nodes_of
from tests.federation.tiny import tiny

from comingle.config import Recipe, load_recipe, parse_recipe
from comingle.cost import planning
from comingle.cost.planning import MOST_SPECIALISTS, _MemoryByPassSize, choose_specialists, step_seconds
from comingle.federation import client
from comingle.federation.launch import federate
from comingle.federation.participant import Tells
from comingle.federation.public import public_part
from comingle.federation.run_folder import run_federation
from comingle.models.loading import load_base
from comingle.runs import api
from comingle.training.client import Clients
from comingle.training.kinds.base import check_recipe
from comingle.utils.errors import RecipeError
from comingle.utils.records import read_events
from comingle.utils.trees import Tree

USERS = ("ann", "bob", "cem")
DEEP = "random:llama?layers=3&dim=128&heads=4&vocab=512"


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assume a process's own memory."""
    monkeypatch.setattr(planning, "measured_process_bytes", lambda *_: 1)


def auto_recipe(recipe_file: Path, **changes: Any) -> Recipe:
    recipe = load_recipe(recipe_file).with_changes({"base": DEEP, "training.local_steps": 10})
    return recipe.with_changes({"method": {"name": "comigs-1gxs", "specialists": "auto"}, **changes})


def one_second_per_expert(recipe: Recipe, *_: object) -> float:
    return 1.0 + recipe.method.settings["specialists"]


def test_users_with_equal_steps_are_measured_once(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[int, int]] = []

    def measure(recipe: Recipe, _: object, user: int) -> float:
        measured.append((recipe.method.settings["specialists"], user))
        return 1.0

    monkeypatch.setattr(planning, "step_seconds", measure)
    changes = {"training.max_seconds_per_round": 1, "training.batch_size": {"ann": 2, "bob": 4, "cem": 2}}
    recipe = auto_recipe(recipe_file, **changes, **{"training.local_steps": 2})
    assert choose_specialists(recipe, 10**12, USERS, process_bytes=1) == dict.fromkeys(USERS, 0)
    assert measured == [(3, 0), (2, 0), (1, 0), (3, 1), (2, 1), (1, 1)]


@pytest.mark.slow
def test_memory_limits_the_number_of_all(recipe_file: Path) -> None:
    """Each limit lies between the needs of two numbers."""
    recipe = auto_recipe(recipe_file)
    needed = []
    for number in range(MOST_SPECIALISTS + 1):
        with_number = recipe.with_changes({"method.specialists": number})
        needs = _MemoryByPassSize(with_number, USERS, own_indices=None, process_bytes=1)
        needed.append(needs.cost_at(needs.pass_size).total_bytes)
    assert sorted(set(needed)) == needed
    for number, limit in enumerate(needed):
        assert set(choose_specialists(recipe, limit, USERS, process_bytes=1).values()) == {number}
        fewer = max(0, number - 1)
        assert set(choose_specialists(recipe, limit - 1, USERS, process_bytes=1).values()) == {fewer}


def test_a_time_limit_counts_for_each_user(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes 1 s, and 1 s more for each specialist; users take 10, 10 and 2 steps."""
    monkeypatch.setattr(planning, "step_seconds", one_second_per_expert)
    limits = {"ann": None, "bob": 30, "cem": 1}
    steps = {"ann": 10, "bob": 10, "cem": 2}
    recipe = auto_recipe(recipe_file, **{"training.max_seconds_per_round": limits, "training.local_steps": steps})
    assert choose_specialists(recipe, 10**12, USERS, process_bytes=1) == {"ann": 3, "bob": 2, "cem": 0}
    assert choose_specialists(recipe, 10**12, USERS, own_indices=[1], process_bytes=1) == {"bob": 2}
    # Without generalists each user needs one expert of its own.
    alone = recipe.with_changes({"method": {"name": "comigs", "generalists": 0, "specialists": "auto"}})
    assert choose_specialists(alone, 10**12, USERS, process_bytes=1) == {"ann": 3, "bob": 2, "cem": 1}


def test_a_step_is_measured_with_all_specialists(recipe_file: Path) -> None:
    recipe = auto_recipe(recipe_file).with_changes({"method.specialists": 2})
    seconds = step_seconds(recipe, USERS, 1)
    assert 0 < seconds < 60
    assert math.isfinite(seconds)


def test_a_run_is_that_with_these_numbers(
    comingle: Any, recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers are in the recipe, in the first event and in the report; a resumed run keeps them."""
    numbers = {"ann": 2, "bob": 0, "cem": 1}
    monkeypatch.setattr(planning, "choose_specialists", lambda *_: numbers)
    recipe = auto_recipe(recipe_file, **{"training.rounds": 1, "training.local_steps": 2})
    run = api.run(recipe, out=tmp_path / "auto")
    by_hand = api.run(recipe.with_changes({"method.specialists": numbers}))
    assert run.metrics["users"] == by_hand.metrics["users"]
    assert load_recipe(tmp_path / "auto").method.settings["specialists"] == numbers
    assert next(iter(read_events(tmp_path / "auto")))["specialists"] == numbers
    monkeypatch.setattr(planning, "choose_specialists", lambda *_: dict.fromkeys(USERS, 3))
    answer = comingle("report", tmp_path / "auto", "--out", tmp_path / "report.html")
    assert answer.code == 0, answer.err
    assert ": ann 2, bob 0, cem 1." in (tmp_path / "report.html").read_text()
    resumed = api.run(recipe, out=tmp_path / "auto", resume=True)
    assert resumed.recipe.method.settings["specialists"] == numbers


@pytest.mark.parametrize(("tells", "is_named"), [("scores", True), ("losses", False)])
def test_a_client_says_that_the_server_sees_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tells: Tells, is_named: bool
) -> None:
    """It leaves the device with the scores."""
    monkeypatch.setattr(client, "_choose_in_new_process", lambda *_: {"specialists": 1})
    content = tiny(tmp_path, "comigs-1gxs", training__rounds=1)
    content["method"] = {**content["method"], "name": "comigs-1gxs", "specialists": "auto"}
    lines: list[str] = []
    plan, nodes = nodes_of(parse_recipe(content), tmp_path)
    for node in nodes.values():
        node.own, node.say = node.own.model_copy(update={"tells": tells}), lines.append
    run_federation(plan, Direct(nodes), tmp_path / "server")
    notices = [line for line in lines if "server also sees" in line]
    assert len(notices) == len(nodes)
    assert {"number of specialists" in line for line in notices} == {is_named}


def test_clients_choose_for_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has the tensors of a simulation with these numbers to rounding; the server records the numbers."""
    numbers = {"ann": 2, "bob": 0}
    monkeypatch.setattr(client, "_choose_in_new_process", lambda _, __, own: {"specialists": numbers[own.name]})
    content = tiny(tmp_path, "comigs-1gxs", training__local_steps=2)
    content["method"] = {**content["method"], "name": "comigs-1gxs", "specialists": "auto", "router_every": 1}
    metrics, channel = federated(content, tmp_path)
    together = api.run(parse_recipe(content).with_changes({"method.specialists": numbers}), out=tmp_path / "together")
    for at, name in enumerate(numbers):
        store = channel.nodes[name]._store
        assert store is not None
        mine = tensors_by_name(store.clients)
        for key, theirs in tensors_by_name(together.federation.clients).items():
            if key not in mine:  # the router, which a user with one expert does not have
                assert (name, key.split(".")[-1]) == ("bob", "router")
                continue
            own_experts = tuple(slice(0, size) for size in mine[key][0].shape)  # others are padding there
            # Padded experts change the order of sums on some processors.
            torch.testing.assert_close(mine[key][0], theirs[at][own_experts], rtol=1e-6, atol=1e-7)
        loss = together.metrics["users"][name]["test_loss_nats"]
        assert metrics["users"][name]["test_loss_nats"] == pytest.approx(loss, rel=1e-6)
    started = next(event for event in read_events(tmp_path / "server") if event["event"] == "start")
    assert started["specialists"] == numbers


def tensors_by_name(clients: Clients) -> Tree:
    return clients.model.tensors(clients.state.rows)


def test_a_client_keeps_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other settings lead to another number until the client has answered a task; then its tensors have this one."""
    content = tiny(tmp_path, "comigs-1gxs")
    content["method"] = {"name": "comigs-1gxs", "specialists": "auto"}
    recipe = parse_recipe(content)
    _, nodes = nodes_of(recipe, tmp_path)
    public = public_part(recipe, tuple(nodes), {}, load_base(recipe.base, dtype="float32", device="cpu"))
    asked: list[Recipe] = []

    def choose(recipe: Recipe, *_: object) -> dict[str, Any]:
        asked.append(recipe)
        is_left_to_device = recipe.method.settings["specialists"] == "auto"
        return {"specialists": len(asked)} if is_left_to_device else {}

    monkeypatch.setattr(client, "_choose_in_new_process", choose)

    def chosen(threads: int) -> int:
        own = nodes["ann"].own.model_copy(update={"runtime": {"threads": threads}})
        with_own = client._own_recipe(own, public)
        return client._with_choices(tmp_path, with_own, public, own, print).method.settings["specialists"]

    assert [chosen(1), chosen(1), chosen(2)] == [1, 1, 2]
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / "0.bin").touch()
    assert [chosen(1), chosen(2), chosen(2)] == [2, 2, 2]
    assert [each.method.settings["specialists"] for each in asked] == ["auto", "auto", 2, 2]


@pytest.mark.slow
def test_a_device_measures_itself(comingle: Any, recipe_file: Path, tmp_path: Path) -> None:
    """With a limit that no step meets a user has no specialist."""
    limits = {"ann": 1e-6, "bob": None, "cem": None}
    changes = {"training.max_seconds_per_round": limits, "training.rounds": 1, "training.local_steps": 2}
    content = auto_recipe(recipe_file, **changes).model_dump(mode="json", exclude_unset=True)
    path = tmp_path / "auto.yaml"
    path.write_text(json.dumps(content))
    answer = comingle("run", path, "--out", tmp_path / "run")
    assert answer.code == 0, answer.err
    assert "method.specialists auto: ann 0, bob 3, cem 3" in "\n".join(answer.progress)
    cost = comingle("cost", path)
    assert cost.code == 0, cost.err
    assert "method.specialists auto, on this machine: ann 0, bob 3, cem 3" in " ".join(cost.out.split())


@pytest.mark.parametrize(
    "values",
    [
        {"adapters.rank": {"ann": 2, "bob": 4, "cem": 2}},
        {"training.max_seconds_per_round": {"ann": 1, "bob": 2, "cem": None}},
    ],
)
def test_costs_of_values_by_name(comingle: Any, recipe_file: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    content = load_recipe(recipe_file).with_changes(values).model_dump(mode="json", exclude_unset=True)
    path = tmp_path / "named.yaml"
    path.write_text(json.dumps(content))
    answer = comingle("cost", path, "--method", "fedavg")
    assert answer.code == 0, answer.err


def test_what_cannot_choose_says_so(comingle: Any, recipe_file: Path, tmp_path: Path) -> None:
    recipe = auto_recipe(recipe_file)
    with pytest.raises(RecipeError, match=r"method\.specialists: got 'auto'; allowed: with a base and users"):
        api.run(recipe, users={"ann": ["some text " * 100]})
    with pytest.raises(RecipeError, match=r"method\.specialists: got 'auto' for clients that share this machine"):
        federate(recipe, tmp_path / "run")
    with pytest.raises(RecipeError, match=r"specialists.*'many'.*whole numbers from 0 to 1,000, or auto"):
        check_recipe(recipe.with_changes({"method.specialists": "many"}))
    path = tmp_path / "auto.yaml"
    path.write_text(json.dumps(recipe.model_dump(mode="json", exclude_unset=True)))
    answer = comingle("compare", path, "--methods", "local,comigs-1gxs", "--out", tmp_path / "new")
    assert (answer.code, answer.err.count("\n")) == (2, 1), answer.err
    assert "method.specialists: got 'auto'; allowed: numbers for this command" in answer.err
    assert not (tmp_path / "new").exists()  # no other method has been trained
