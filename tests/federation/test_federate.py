"""A federation of real processes ends with the numbers of one process, bit for bit, whatever is killed meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr")

from comingle.config import Recipe, parse_recipe
from comingle.federation.launch import federate
from comingle.runs import api
from comingle.utils.errors import RunError
from comingle.utils.files import list_checkpoints
from comingle.utils.records import read_events, read_metrics
from federation.tiny import method, text_recipe

pytestmark = pytest.mark.slow

ROUNDS = 3


def recipe_of(folder: Path, name: str, users: Sequence[str] = ("ann", "bob")) -> Recipe:
    content = text_recipe(folder, method(name))
    content["data"]["users"] = {user: content["data"]["users"][user] for user in users}
    content["training"] |= {"rounds": ROUNDS, "local_steps": 20}
    content["evaluation"] = {"every": 1, "model": "exchanged"}
    content["runtime"]["users_per_step"] = 1
    return parse_recipe(content)


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    until = time.monotonic() + 30
    while (left := of_folder(tmp_path)) and time.monotonic() < until:
        time.sleep(0.5)
    assert not left


def of_folder(folder: Path, *words: str) -> list[psutil.Process]:
    """Processes that have to do with a folder, and with all of these words."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or ())
        if str(folder) in line and all(word in line for word in words):
            found.append(process)
    return [process for process in found if process.info["status"] != psutil.STATUS_ZOMBIE]


def assert_equal(together: Path, apart: Path, users: Sequence[str] = ("ann", "bob")) -> None:
    rows = load_file(list_checkpoints(together)[-1] / "state.safetensors")
    for number, name in enumerate(users):
        (state,) = (apart / "users" / name).glob("run-*")
        mine = load_file(list_checkpoints(state)[-1] / "state.safetensors")
        for key, t in rows.items():
            if not key.startswith("server/"):
                assert torch.equal(mine[key], t[number :: len(users)]), (name, key)


@pytest.mark.parametrize("name", ["comigs-1g1s", "fedavg", "pcl", "fedmerge", "floral"])
def test_processes_end_with_the_tensors_of_one(name: str, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, name)
    api.run(recipe, out=tmp_path / "together")
    federate(recipe, tmp_path / "apart", say=print)
    assert_equal(tmp_path / "together", tmp_path / "apart")


def test_a_federation_on_one_machine_that_nobody_could_join_says_what_users_lack(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "fedavg")
    for path in tmp_path.rglob("*.txt"):
        path.unlink()
    with pytest.raises(RunError, match=r"^0 of 2 users .*; ann's client: .*ann.txt: .*; bob's client: "):
        federate(recipe, tmp_path / "apart", say=print)


def test_processes_sum_behind_masks_as_one_does_without(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "comigs-1g1s")
    recipe = recipe.with_changes({"privacy.mechanism": "none", "privacy.secure_aggregation.bits": 24})
    api.run(recipe, out=tmp_path / "together")
    federate(recipe, tmp_path / "apart", say=print)
    assert_equal(tmp_path / "together", tmp_path / "apart")
    assert "no_sum" not in (tmp_path / "apart" / "events.jsonl").read_text()


def test_processes_hide_examples_as_one_does(tmp_path: Path) -> None:
    """Batches and noise are drawn in each user's own process; its epsilon is in its own folder and in the metrics."""
    recipe = recipe_of(tmp_path, "comigs-1g1s")
    privacy = {"mechanism": "example", "noise_multiplier": 1.0, "noise": "reproducible", "accountant": "rdp"}
    recipe = recipe.with_changes({f"privacy.{key}": value for key, value in privacy.items()})
    together = api.run(recipe, out=tmp_path / "together").metrics
    federate(recipe, tmp_path / "apart", say=print)
    assert_equal(tmp_path / "together", tmp_path / "apart")
    apart = json.loads((tmp_path / "apart" / "metrics.json").read_text())
    assert apart["privacy"] == together["privacy"]
    for name in ("ann", "bob"):
        (ledger,) = (tmp_path / "apart" / "users" / name).glob("run-*/privacy.json")
        spent = together["privacy"].get("users", {}).get(name, together["privacy"]["epsilon"])
        assert json.loads(ledger.read_text())["epsilon"] == spent


def after_first_round(folder: Path, kill: Callable[[], None]) -> threading.Thread:
    """Kills once the first round is told of."""

    def wait() -> None:
        until = time.monotonic() + 200
        while time.monotonic() < until:
            if any(event["event"] == "round" for event in read_events(folder)):
                kill()
                return
            time.sleep(0.05)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


KILLED: dict[str, tuple[str, ...]] = {
    "a client": ("comingle client", "users/ann"),
    "the server": ("flower.fleet_server",),
}


def federate_and_kill(recipe: Any, tmp_path: Path, what: str) -> None:
    """A federation in ``apart``, one of whose processes is killed after the first round."""
    killed: list[int] = []

    def kill() -> None:
        for process in of_folder(tmp_path, *KILLED[what])[:1] or of_names(KILLED[what]):
            os.kill(process.pid, signal.SIGKILL)
            killed.append(process.pid)

    thread = after_first_round(tmp_path / "apart", kill)
    federate(recipe, tmp_path / "apart", say=print)
    thread.join()
    assert killed


@pytest.mark.parametrize("what", KILLED)
def test_what_is_killed_comes_back_and_nothing_is_lost(what: str, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "comigs-1g1s")
    api.run(recipe, out=tmp_path / "together")
    federate_and_kill(recipe, tmp_path, what)
    assert_equal(tmp_path / "together", tmp_path / "apart")


def test_a_client_that_is_killed_serves_what_one_process_does(tmp_path: Path) -> None:
    """With ``evaluation.guard``, whose models and choices are in the client's folder."""
    recipe = recipe_of(tmp_path, "fedavg").with_changes({"evaluation.guard": "local"})
    together = api.run(recipe, out=tmp_path / "together")
    assert together.local is not None
    federate_and_kill(recipe, tmp_path, "a client")
    assert_equal(tmp_path / "together", tmp_path / "apart")
    assert not any("served" in path.read_text() for path in (tmp_path / "apart").glob("*.json*"))
    for number, name in enumerate(together.users):
        (model,) = (tmp_path / "apart" / "users" / name).glob("run-*/model")
        served = read_metrics(model)["served"][name]
        expected = together.metrics["served"][name]
        assert {**served, "since": expected["since"], "since_round": None} == {**expected, "since_round": None}
        local = api.load(model).local
        assert local is not None
        assert torch.equal(local.clients.state.rows, together.local.clients.state.rows[number :: len(together.users)])


def of_names(words: tuple[str, ...]) -> list[psutil.Process]:
    """Children of ours with these words, which may not name the folder."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if all(word in " ".join(process.cmdline()) for word in words):
                found.append(process)
    return found


def test_a_server_that_is_stopped_goes_on(tmp_path: Path) -> None:
    """As by Ctrl-C behind the first round."""
    recipe = recipe_of(tmp_path, "fedmerge")
    api.run(recipe, out=tmp_path / "together")

    class Stopped(Exception):
        pass

    def say(line: str) -> None:
        print(line)
        if line.startswith("round 1:"):
            raise Stopped

    with pytest.raises(Stopped):
        federate(recipe, tmp_path / "apart", say=say)
    federate(recipe, tmp_path / "apart", resume=True, say=print)
    assert_equal(tmp_path / "together", tmp_path / "apart")
