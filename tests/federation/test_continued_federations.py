"""``continue_from`` in a federation: as the same users in one process, with new text and other users."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.commands import comingle as comingle
from tests.federation.direct import Direct, federated, nodes_of
from tests.federation.tiny import kept_in, tasks_of, tiny

from comingle.config import parse_recipe
from comingle.federation.client import Client
from comingle.federation.public import public_part
from comingle.federation.run_folder import run_federation
from comingle.runs import api
from comingle.utils.errors import MessageError, RecipeError
from comingle.utils.records import read_events, read_metrics
from comingle.utils.trees import Tree


def recipe_of(folder: Path, name: str = "comigs-1g1s", **changes: Any) -> dict[str, Any]:
    exchanged = {"evaluation__model": "exchanged", "evaluation__every": 1, "runtime__users_per_step": 1}
    return tiny(folder, name, users=3, **exchanged, **changes)


def of_users(content: Mapping[str, Any], *names: str, **sections: Any) -> dict[str, Any]:
    """A recipe with some of the users."""
    users = {name: content["data"]["users"][name] for name in names}
    return {**content, "data": {**content["data"], "users": users}, **sections}


def continued(content: Mapping[str, Any], earlier: Path, out: Path, **options: Any) -> tuple[dict[str, Any], Direct]:
    """Metrics of a federation that continues one in the folder ``earlier``, whose users keep their state folders."""
    changed = {**content, "continue_from": {"run": str(earlier / "server"), **content.get("continue_from", {})}}
    plan, nodes = nodes_of(parse_recipe(changed), earlier)
    channel = Direct(nodes)
    return run_federation(plan, channel, out, **options), channel


def states_of(channel: Direct) -> dict[str, Tree]:
    stores = {name: node._store for name, node in channel.nodes.items()}
    return {name: store.clients.state.tensors() for name, store in stores.items() if store is not None}


def assert_same(channel: Direct, run: api.Run) -> None:
    """Every tensor of every user."""
    together, names = run.federation.clients.state.tensors(), run.federation.clients.names
    states = states_of(channel)
    assert set(states) == set(names)
    for name, mine in states.items():
        for key, t in together.items():
            assert torch.equal(mine[key], t[names.index(name) :: len(names)]), (name, key)


@pytest.mark.parametrize("method", ["comigs-1g1s", "pcl", "fedmerge", "fed-sb", "fedlease", "fedtreelora"])
def test_it_is_the_run_of_one_process_that_continues(method: str, tmp_path: Path) -> None:
    """One user leaves, one is new, one has other text."""
    content = recipe_of(tmp_path / "texts", method)
    ann, bob, cem = content["data"]["users"]
    before, after = of_users(content, ann, bob), of_users(content, cem, ann)
    after["data"]["users"][ann] = content["data"]["users"][bob]  # new text
    api.run(before, out=tmp_path / "together")
    federated(before, tmp_path / "apart")
    run = api.run(after, out=tmp_path / "together later", continue_from=str(tmp_path / "together"))
    _, channel = continued(after, tmp_path / "apart", tmp_path / "apart later")
    assert_same(channel, run)
    start = next(event for event in read_events(tmp_path / "apart later") if event["event"] == "start")
    continues = start["continues"]
    assert {key: continues[key] for key in ("kept", "new", "dropped", "rounds")} == {
        "kept": [ann],
        "new": [cem],
        "dropped": [bob],
        "rounds": 2,
    }
    assert continues["run"] == str(tmp_path / "apart" / "server")


def test_one_participant_of_a_peer_to_peer_method_trains_alone(tmp_path: Path) -> None:
    content = recipe_of(tmp_path / "texts", "pcl")
    ann, bob, _ = content["data"]["users"]
    training = {**content["training"], "participation": [[ann]]}
    recipe = of_users(content, ann, bob, training=training)
    together = api.run(recipe, out=tmp_path / "together")
    _, channel = federated(recipe, tmp_path / "apart")
    assert_same(channel, together)


def test_a_user_without_its_earlier_state_starts_as_a_new_one(tmp_path: Path) -> None:
    content = recipe_of(tmp_path / "texts")
    ann, bob, _ = content["data"]["users"]
    before = of_users(content, ann, bob)
    federated(before, tmp_path / "apart")
    shutil.rmtree(tmp_path / "apart" / bob)
    said: list[str] = []
    changed = {**before, "continue_from": str(tmp_path / "apart" / "server")}
    plan, nodes = nodes_of(parse_recipe(changed), tmp_path / "apart")
    nodes[bob].say = said.append
    channel = Direct(nodes)
    run_federation(plan, channel, tmp_path / "later")
    (line,) = (line for line in said if "starts as a new user" in line)
    assert str(tmp_path / "apart" / bob) in line
    assert "--state" in line
    first = {name: next(task for task in tasks_of(channel, name) if "train" in task.todo) for name in (ann, bob)}
    assert "receive" in first[bob].todo  # also the shared tensors are gone
    assert "receive" not in first[ann].todo


def test_moments_go_on(tmp_path: Path) -> None:
    content = recipe_of(tmp_path / "texts", **{"training.experts.schedule": "constant"})
    ann, bob, _ = content["data"]["users"]
    both = of_users(content, ann, bob)
    api.run(both, out=tmp_path / "together")
    federated(both, tmp_path / "apart")
    moments = {"continue_from": {"run": str(tmp_path / "together"), "moments": True}}
    run = api.run({**both, **moments}, out=tmp_path / "together later")
    _, channel = continued({**both, "continue_from": {"moments": True}}, tmp_path / "apart", tmp_path / "apart later")
    assert_same(channel, run)


def test_a_client_is_killed_and_its_earlier_run_deleted(tmp_path: Path) -> None:
    """It has stored the state with which it began, also for tasks that are undone."""
    content = recipe_of(tmp_path / "texts", training__rounds=3)
    ann, bob, _ = content["data"]["users"]
    both = of_users(content, ann, bob)
    federated(both, tmp_path / "apart")
    shutil.copytree(tmp_path / "apart", tmp_path / "copy")
    _, undisturbed = continued(both, tmp_path / "apart", tmp_path / "whole")

    class Forgetful(Direct):
        """Before each task the client is a new process; the earlier run's folder is deleted after the first."""

        def exchange(self, requests: Mapping[str, bytes], *, timeout: float) -> Any:
            for name, node in self.nodes.items():
                self.nodes[name] = Client(node.folder, node.own)
            yield from super().exchange(requests, timeout=timeout)
            for folder in earlier_runs:
                shutil.rmtree(folder, ignore_errors=True)

    earlier_runs = [path for name in (ann, bob) for path in (tmp_path / "copy" / name).glob("run-*")]
    changed = {**both, "continue_from": str(tmp_path / "copy" / "server")}
    plan, nodes = nodes_of(parse_recipe(changed), tmp_path / "copy")
    channel = Forgetful(nodes)
    run_federation(plan, channel, tmp_path / "later")
    assert not any(folder.exists() for folder in earlier_runs)
    mine, theirs = states_of(channel), states_of(undisturbed)
    for name in (ann, bob):
        assert all(torch.equal(t, theirs[name][key]) for key, t in mine[name].items()), name


def test_a_server_resumes_without_the_earlier_one(tmp_path: Path) -> None:
    content = recipe_of(tmp_path / "texts")
    ann, bob, _ = content["data"]["users"]
    both = of_users(content, ann, bob)
    federated(both, tmp_path / "apart")
    _, whole = continued(both, tmp_path / "apart", tmp_path / "whole")
    shutil.copytree(tmp_path / "apart", tmp_path / "copy")
    for name in (ann, bob):
        for folder in (tmp_path / "copy" / name).glob("run-*"):
            if json.loads((folder / "public.json").read_text())["recipe"].get("continue_from"):
                shutil.rmtree(folder)

    def interrupt(event: Mapping[str, Any]) -> None:
        if event["event"] == "round" and event["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        continued(both, tmp_path / "copy", tmp_path / "halted", observers=[interrupt])
    shutil.rmtree(tmp_path / "copy" / "server")
    _, channel = continued(both, tmp_path / "copy", tmp_path / "halted", resume=True)
    mine, theirs = states_of(channel), states_of(whole)
    for name in (ann, bob):
        assert all(torch.equal(t, theirs[name][key]) for key, t in mine[name].items()), name


def test_clients_replay_and_measure_what_they_forget(tmp_path: Path) -> None:
    content = recipe_of(tmp_path / "texts")
    ann, bob, _ = content["data"]["users"]
    both = of_users(content, ann, bob)
    api.run(both, out=tmp_path / "together")
    federated(both, tmp_path / "apart")
    later = of_users(content, ann, bob)
    later["data"]["users"][ann] = content["data"]["users"][bob]
    later["data"]["replay"] = 0.3
    run = api.run(later, out=tmp_path / "together later", continue_from=str(tmp_path / "together"))
    _, channel = continued(later, tmp_path / "apart", tmp_path / "apart later")
    assert_same(channel, run)
    stores = {name: node._store for name, node in channel.nodes.items()}
    (entry,) = read_metrics(stores[ann].folder / "model")["earlier"]
    (expected,) = run.metrics["earlier"]
    assert entry["users"][ann]["after"] == pytest.approx(expected["users"][ann]["after"])
    assert "earlier" not in read_metrics(stores[bob].folder / "model")


def test_clients_continue_from_the_best_round_and_end_with_it_if_all_others_are_worse(tmp_path: Path) -> None:
    """As in one process; the start of the second federation is its round 0."""
    selected = {"evaluation__select": "best", "training__rounds": 3}
    rate = {"training__experts": {"learning_rate": 1000.0, "schedule": "constant"}}
    content = recipe_of(tmp_path / "texts", "fedavg", **selected, **rate)
    ann, bob, _ = content["data"]["users"]
    both = of_users(content, ann, bob)
    together = api.run(both, out=tmp_path / "together")
    federated(both, tmp_path / "apart")
    assert together.metrics["selected_round"] == 1
    training = {**content["training"], "experts": {"learning_rate": 0.01}}
    better = of_users(content, ann, bob, training=training)
    for recipe, earlier, later, round_number in ((better, "", "2", 3), (both, "2", "3", 0)):
        before = tmp_path / f"together{earlier}"
        run = api.run(recipe, out=tmp_path / f"together{later}", continue_from=str(before))
        apart = {**recipe, "continue_from": {"run": str(tmp_path / "apart" / f"server{earlier}")}}
        plan, nodes = nodes_of(parse_recipe(apart), tmp_path / "apart")
        channel = Direct(nodes)
        metrics = run_federation(plan, channel, tmp_path / "apart" / f"server{later}")
        assert metrics["selected_round"] == run.metrics["selected_round"] == round_number
        for name, state in states_of(channel).items():
            row = list(run.federation.clients.names).index(name)
            assert torch.equal(state["rows"][0], run.federation.clients.state.rows[row])


@pytest.mark.parametrize(
    ("changes", "place"),
    [({"method": "fedavg"}, "method: got"), ({"privacy": {"noise_multiplier": 1.0}}, "privacy.mechanism")],
)
def test_another_federation_is_refused(changes: dict[str, Any], place: str, tmp_path: Path) -> None:
    content = recipe_of(tmp_path / "texts")
    ann, bob, _ = content["data"]["users"]
    both = of_users(content, ann, bob)
    federated(both, tmp_path / "apart")
    with pytest.raises(RecipeError) as refused:
        continued({**both, **changes}, tmp_path / "apart", tmp_path / "later")
    assert place in str(refused.value)


def test_runs_of_one_process_are_no_federation_and_the_reverse(tmp_path: Path) -> None:
    content = recipe_of(tmp_path / "texts")
    ann, bob, _ = content["data"]["users"]
    both = of_users(content, ann, bob)
    api.run(both, out=tmp_path / "together" / "server")
    federated(both, tmp_path / "apart")
    with pytest.raises(RecipeError, match="no federation's server"):
        continued(both, tmp_path / "together", tmp_path / "later")
    with pytest.raises(RecipeError, match="a federation's server"):
        api.run(both, out=tmp_path / "later", continue_from=str(tmp_path / "apart" / "server"))


@pytest.mark.parametrize("run", ["../ben/run-0123456789abcdef", "/etc", "0123456789ABCDEF", ""])
def test_a_server_cannot_name_a_path_as_earlier_run(run: str, tmp_path: Path) -> None:
    recipe = parse_recipe(recipe_of(tmp_path))
    public = public_part(recipe, ("ann",), {}, None)
    public.recipe["continue_from"] = {"run": run}
    with pytest.raises(MessageError):
        public.check()


def test_the_servers_path_stays_with_the_server(tmp_path: Path) -> None:
    content = recipe_of(tmp_path / "texts")
    ann, bob, _ = content["data"]["users"]
    both = of_users(content, ann, bob)
    federated(both, tmp_path / "apart")
    _, channel = continued(both, tmp_path / "apart", tmp_path / "later")
    assert str(tmp_path / "apart" / "server").encode() not in b"".join(task for _, task, _ in channel.recorded)


@pytest.mark.slow
def test_commands_continue_a_federation(comingle: Any, tmp_path: Path) -> None:
    """``comingle federate --continue-from``, with real processes; the earlier folder is only read."""
    pytest.importorskip("flwr")
    content = recipe_of(tmp_path / "texts")
    ann, bob, cem = content["data"]["users"]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(of_users(content, ann, bob)))
    assert comingle("federate", recipe, "--out", tmp_path / "may").code == 0
    api.run(of_users(content, ann, bob), out=tmp_path / "together")
    files = kept_in(tmp_path / "may")
    recipe.write_text(yaml.safe_dump(of_users(content, ann, cem)))
    done = comingle("federate", recipe, "--out", tmp_path / "june", "--continue-from", tmp_path / "may")
    assert done.code == 0, done.err
    assert kept_in(tmp_path / "may") == files
    together = api.run(of_users(content, ann, cem), out=tmp_path / "later", continue_from=str(tmp_path / "together"))
    for name in (ann, cem):
        newest = max(
            (tmp_path / "june" / "users" / name).glob("run-*/model"), key=lambda folder: folder.stat().st_mtime
        )
        scores = read_metrics(newest)["users"][name]
        assert scores["test_loss_nats"] == together.metrics["users"][name]["test_loss_nats"]
    assert "1 user goes on, 1 new" in " ".join(comingle("show", tmp_path / "june").out.split())
