"""Sums behind masks with users elsewhere: as in one process, whoever is lost, stopped or asked twice."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from tests.federation.direct import Direct, NetworkSection, federated, nodes_of
from tests.federation.tiny import (
    answer_of,
    assert_same_end,
    own_of,
    refusal,
    tasks_of,
    tensors_of,
    tiny,
)
from tests.quick import quick

from comingle.config import parse_recipe
from comingle.federation.backend import warn_of_small_sums
from comingle.federation.client import Client
from comingle.federation.client_store import SECURE
from comingle.federation.messages import Answer, Task, unpack_answer, unpack_task
from comingle.federation.run_folder import run_federation
from comingle.methods import make
from comingle.privacy.secure_client import survivors_message
from comingle.privacy.secure_sum import VECTOR
from comingle.protocol.messages import Download, Upload
from comingle.protocol.wire import pack, unpack
from comingle.runs.session import prepare, run_in
from comingle.training.plan import make_plan
from comingle.utils.records import read_events

QUIET: dict[str, Any] = {"mechanism": "none", "secure_aggregation": {}}
NOISY = {"noise_multiplier": 1.0, "noise": "reproducible", "accountant": "rdp", "secure_aggregation": {}}


pytestmark = pytest.mark.usefixtures("shared_base", "asked_again_soon")


def recipe(folder: Path, method: str = "fedavg", privacy: Mapping[str, Any] = QUIET, **changes: Any) -> dict[str, Any]:
    return {**tiny(folder, method, **{"users": 3, "evaluation__model": "exchanged", **changes}), "privacy": privacy}


def tensors(clients: Any, name: str) -> dict[str, torch.Tensor]:
    """What of all users' tensors is one's own."""
    at = [trainer.name for trainer in clients.trainers].index(name)
    return {"rows": clients.state.rows[at], "second": clients.state.second[at]}


# -------------------------------------------------------------------- the same


STEPS = quick(("advertise", "share", "mask", "unmask"), "mask", "unmask")


@pytest.mark.parametrize(
    ("privacy", "min_participants", "warns"),
    [
        (QUIET, 1, True),
        (QUIET, 3, False),
        ({**QUIET, "secure_aggregation": {"threshold": 1.0}}, 1, False),
        (NOISY, 1, False),
        ({}, 1, False),
    ],
)
def test_a_sum_of_two_warns_that_each_can_compute_the_others_upload(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, privacy: dict[str, Any], min_participants: int, warns: bool
) -> None:
    read = parse_recipe(recipe(tmp_path, privacy=privacy) if privacy else tiny(tmp_path, "fedavg", users=3))
    plan = make_plan(read, make("fedavg"), ["ann", "bob", "cem"])
    warn_of_small_sums(plan, min_participants, 2)
    assert ["privacy.secure_aggregation" in line for line in caplog.messages] == [True] * warns


@pytest.mark.parametrize(
    ("method", "privacy", "changes"),
    [
        ("comigs-1g1s", QUIET, {}),
        pytest.param(
            "fedavg", {**QUIET, "weight_cap": 1000}, {"training__weighting": "tokens"}, marks=pytest.mark.slow
        ),
        ("fdlora", NOISY, {}),
        pytest.param(
            "fedavg", NOISY, {"training__participation": [["ann", "bob"], ["cem", "ann"]]}, marks=pytest.mark.slow
        ),
        ("fedavg", {**NOISY, "noise": "reproducible"}, {"training__participation": 0.6, "training__rounds": 3}),
        pytest.param(
            "fedavg",
            QUIET,
            {"training__participation": 0.6, "evaluation__model": "local", "training__rounds": 3},
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.sampled(1)
def test_users_elsewhere_end_with_the_same_bit_for_bit(
    tmp_path: Path, method: str, privacy: dict[str, Any], changes: dict[str, Any]
) -> None:
    content = recipe(tmp_path, method, privacy, **changes)
    read = parse_recipe(content)
    here = run_in(tmp_path / "here", read, prepare(read), resume=False, force=False)
    there, channel = federated(content, tmp_path / "there")
    clients = here.federation.clients
    for name, node in channel.nodes.items():
        mine = node._store
        assert mine is not None
        for key, t in tensors(clients, name).items():
            assert torch.equal(t, tensors(mine.clients, name)[key])
    assert there.get("privacy") == here.metrics.get("privacy")
    # Of local models the absent download in order to be evaluated, which counts to one round here, to another there.
    counted = ("upload_bytes",) if changes.get("evaluation__model") == "local" else ("upload_bytes", "download_bytes")
    told = [
        [(e["round"], *(e[key] for key in counted)) for e in read_events(folder) if e["event"] == "round"]
        for folder in (tmp_path / "here", tmp_path / "there" / "server")
    ]
    assert told[0] == told[1]  # as many bytes, in every round


def test_nothing_of_an_upload_reaches_the_server_without_masks(tmp_path: Path) -> None:
    """All that users have sent: keys, sealed shares, words that are uniform; neither losses nor scores."""
    content = recipe(tmp_path, training__rounds=6)
    _, channel = federated(content, tmp_path / "there")
    sent = [unpack(data) for _, _, answer in channel.recorded for data in unpack_answer(answer).messages]
    assert {name for message in sent for name in message.tensors} == {"keys", "shares", VECTOR}
    assert not any(message.reports for message in sent if isinstance(message, Upload))
    words = np.concatenate([m.tensors[VECTOR].numpy().view(np.uint8).ravel() for m in sent if VECTOR in m.tensors])
    assert len(words) > 100_000
    assert chisquare(np.bincount(words, minlength=256)).pvalue > 1e-7
    nodes = {name: Client(tmp_path / "again" / name, own_of(content, name)) for name in channel.nodes}
    told = [answer_of(nodes[name], unpack_task(task)).reported for name, task, _ in channel.recorded[:3]]
    assert not any({"train_loss", "score", "amounts"} & one.keys() for one in told)


# -------------------------------------------------------------------- lost


class Losing(Direct):
    """Some users do not answer in some steps of some rounds."""

    def __init__(self, nodes: Mapping[str, Client], lost: Collection[tuple[str, int, str]]):
        super().__init__(nodes)
        self.lost = lost

    def exchange(self, requests: Mapping[str, bytes], *, timeout: float) -> Iterator[tuple[str, bytes | str]]:
        for name, data in requests.items():
            task = unpack_task(data)
            if any((step, task.round, name) in self.lost for step in task.todo):
                yield name, "lost"
            else:
                yield from super().exchange({name: data}, timeout=timeout)


def losing(
    content: dict[str, Any], folder: Path, lost: Collection[tuple[str, int, str]], least: int = 1
) -> tuple[Direct, list[Any]]:
    plan, nodes = nodes_of(parse_recipe(content), folder)
    channel = Losing(nodes, lost)
    patience = NetworkSection(round_timeout=0.3, min_participants=least)
    run_federation(replace(plan, network=patience), channel, folder / "server")
    return channel, list(read_events(folder / "server"))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.slow
def test_who_is_lost_in_a_step_is_left_out_of_the_sum(tmp_path: Path, step: str) -> None:
    """The others end as a run in which it took no part in that round; lost in the last step it is in the sum."""
    content = recipe(tmp_path, evaluation__model="local")
    channel, events = losing(content, tmp_path / "lost", {(step, 0, "bob")})
    members = ["ann", "cem"] if step != "unmask" else ["ann", "bob", "cem"]
    listed = recipe(tmp_path, evaluation__model="local", training__participation=[members, ["ann", "bob", "cem"]])
    listed["privacy"] = {"mechanism": "none", "secure_aggregation": {"threshold": 0.6}}
    _, expected = federated(listed, tmp_path / "listed")
    assert not [event for event in events if event["event"] == "no_sum"]
    for name in ("ann", "cem"):
        one, other = (tensors_of(of.nodes[name]) for of in (channel, expected))
        assert [n for n, t in one.items() if not torch.equal(t, other[n])] == []


@pytest.mark.parametrize("step", STEPS)
def test_too_few_in_any_step_end_the_round_without_a_sum_and_the_next_one_has_one(tmp_path: Path, step: str) -> None:
    content = recipe(tmp_path)
    channel, events = losing(content, tmp_path / "lost", {(step, 0, "bob"), (step, 0, "cem")})
    (found,) = [event for event in events if event["event"] == "no_sum"]
    assert found["round"] == 1
    assert re.match(f"round 1: 1 of 3 users .*'{step}'; needed: 2;", found["reason"])
    assert [event["round"] for event in events if event["event"] == "round"] == [1, 2]
    models = [t["rows"] for t in (tensors(node._store.clients, n) for n, node in channel.nodes.items())]  # type: ignore[union-attr]
    clients = channel.nodes["ann"]._store.clients  # type: ignore[union-attr]
    shared = clients.model.layout.mask(clients.method.shared)
    assert torch.equal(models[0][shared], models[1][shared])


def test_a_sum_of_fewer_than_the_least_is_not_used(tmp_path: Path) -> None:
    _, events = losing(recipe(tmp_path), tmp_path / "lost", {("mask", 0, "bob")}, least=3)
    (why,) = [event["reason"] for event in events if event["event"] == "no_sum"]
    assert re.match(r"round 1: .* 2; needed: 3 \(network.min_participants\)", why)


@pytest.mark.slow
def test_who_was_asked_to_unmask_is_counted_and_who_was_lost_before_is_not(tmp_path: Path) -> None:
    content = recipe(tmp_path, privacy=NOISY)
    _, events = losing(content, tmp_path / "one", {("mask", 0, "bob")})
    releases = [event for event in events if event["event"] == "privacy"]
    assert releases[0]["users"]["bob"] == 0
    assert releases[0]["users"]["ann"] == releases[0]["users"]["cem"] == releases[0]["epsilon"] > 0
    assert releases[1]["users"]["ann"] > releases[1]["users"]["bob"] == releases[0]["epsilon"]
    _, events = losing(content, tmp_path / "two", {("unmask", 0, "bob"), ("unmask", 0, "cem")})
    assert [event["round"] for event in events if event["event"] == "no_sum"] == [1]
    spent = [event["epsilon"] for event in events if event["event"] == "privacy"]
    assert spent == [event["epsilon"] for event in releases]  # some may have opened what the server has not got
    _, events = losing(content, tmp_path / "three", {("mask", 0, "bob"), ("mask", 0, "cem")})
    assert [event["epsilon"] for event in events if event["event"] == "privacy"] == [0.0, releases[0]["epsilon"]]


# -------------------------------------------------------------------- stopped


class Stopped(Exception):
    """What a killed process leaves."""


class Stopping(Direct):
    """The server dies at every task once, on the way there and on the way back; every user is anew each time."""

    def __init__(self, make: Callable[[], dict[str, Client]]):
        super().__init__(make())
        self.make, self.stops = make, set[tuple[str, int, bool]]()

    def exchange(self, requests: Mapping[str, bytes], *, timeout: float) -> Iterator[tuple[str, bytes | str]]:
        for name, task in requests.items():
            for there in (False, True):
                stop = name, unpack_task(task).serial, there
                if stop not in self.stops:
                    self.stops.add(stop)
                    if there:
                        self.nodes[name].handle(task)
                    self.nodes = self.make()
                    raise Stopped
            yield from super().exchange({name: task}, timeout=timeout)


@pytest.mark.slow
def test_a_server_and_users_that_stop_at_every_exchange_end_with_the_same(tmp_path: Path) -> None:
    content = recipe(tmp_path, users=2)
    _, whole = federated(content, tmp_path / "whole")
    plan, nodes = nodes_of(parse_recipe(content), tmp_path / "stopped")
    channel = Stopping(lambda: {name: Client(node.folder, node.own) for name, node in nodes.items()})
    server, ended = tmp_path / "stopped" / "server", None
    while ended is None:
        try:
            ended = run_federation(plan, channel, server, resume=(server / "recipe.yaml").exists())
        except Stopped:
            continue
    assert len(channel.stops) > 20
    assert_same_end(channel, whole)
    assert [event["event"] for event in read_events(server)].count("no_sum") == 0


# -------------------------------------------------------------------- asked twice


@pytest.fixture
def asked(tmp_path: Path) -> tuple[dict[str, Any], Direct, Callable[[str], list[Task]]]:
    """A whole run, and a user's tasks of it by step."""
    content = recipe(tmp_path)
    _, channel = federated(content, tmp_path / "all")
    return content, channel, lambda step: [task for task in tasks_of(channel, "ann") if step in task.todo]


class Until(Direct):
    """Goes on until Ann is asked for a step of a round."""

    def __init__(self, nodes: Mapping[str, Client], task: Task):
        super().__init__(nodes)
        self.until = task
        self.last: Task | None = None

    def exchange(self, requests: Mapping[str, bytes], *, timeout: float) -> Iterator[tuple[str, bytes | str]]:
        for name, data in requests.items():
            task = unpack_task(data)
            if name == "ann":
                self.last = task
                if (task.todo, task.round) == (self.until.todo, self.until.round):
                    raise Stopped
            yield from super().exchange({name: data}, timeout=timeout)


def stopped_at(content: dict[str, Any], folder: Path, task: Task) -> tuple[Until, Task]:
    """A run that ends when Ann is about to be asked for such a task; that task."""
    plan, nodes = nodes_of(parse_recipe(content), folder)
    channel = Until(nodes, task)
    with pytest.raises(Stopped):
        run_federation(plan, channel, folder / "server")
    assert channel.last is not None
    return channel, channel.last


def test_a_user_answers_one_unmasking_of_a_round(tmp_path: Path, asked: Any) -> None:
    """The same again with the same bytes, also after it was killed; another never, and none below the threshold."""
    content, _, of_step = asked
    channel, task = stopped_at(content, tmp_path / "stopped", of_step("unmask")[0])
    few = survivors_message("ann", 1, ["ann"])
    assert re.search("1 users .*allowed: at least 2", refusal(channel.nodes["ann"], with_survivors(task, few)))
    answer = answer_of(channel.nodes["ann"], task)
    assert answer.messages
    anew = Client(channel.nodes["ann"].folder, channel.nodes["ann"].own)
    assert answer_of(anew, task).messages == answer.messages
    for survivors in (["ann", "bob"], ["ann", "cem"]):
        why = refusal(anew, with_survivors(task, survivors_message("ann", 1, survivors)))
        assert re.search("unmask of round 1 .*once", why)
    assert answer_of(anew, task).messages == answer.messages


def begun(channel: Direct) -> tuple[Task, Answer]:
    """The task with which Ann's sum has begun, and what she answered."""
    return next(
        (task, unpack_answer(answer))
        for name, data, answer in channel.recorded
        if name == "ann" and "advertise" in (task := unpack_task(data)).todo
    )


def with_survivors(task: Task, message: Download) -> Task:
    return replace(task, messages=(pack(message),))


def test_a_round_that_was_unmasked_is_not_begun_again(tmp_path: Path, asked: Any) -> None:
    """A server that undoes it, to have the sum of other users too, gets no keys for it; of the next round it does."""
    content, _, of_step = asked
    channel, task = stopped_at(content, tmp_path / "stopped", of_step("unmask")[0])
    ann = channel.nodes["ann"]
    first, _ = begun(channel)
    assert answer_of(ann, task).messages
    undone = replace(first, arguments={**first.arguments, "done": 0})  # another task of the same number
    assert re.search(r"secure aggregation: .*'ann'.*round 1$", refusal(ann, undone))
    later = replace(undone, round=1)
    assert answer_of(ann, later).messages


def test_a_round_that_was_masked_is_begun_again_with_other_keys(tmp_path: Path, asked: Any) -> None:
    content, _, of_step = asked
    channel, task = stopped_at(content, tmp_path / "stopped", of_step("mask")[0])
    ann = channel.nodes["ann"]
    first, was = begun(channel)
    masked = answer_of(ann, task)
    assert masked.messages
    again = answer_of(ann, replace(first, arguments={**first.arguments, "done": 0}))
    assert again.messages[0] != was.messages[0]
    after = replace(task, serial=first.serial + 1)  # what was sealed for the old keys is for nobody now
    assert "mask before share" in refusal(ann, after) or "has not advertised" in refusal(ann, after)


def test_a_user_uploads_nothing_without_masks(tmp_path: Path, asked: Any) -> None:
    content, _, of_step = asked
    channel, task = stopped_at(content, tmp_path / "stopped", of_step("share")[0])
    plain = replace(task, todo=("upload",), messages=())
    assert "task: got step 'upload'" in refusal(channel.nodes["ann"], plain)
    other = tiny(tmp_path, "fedavg", users=2)
    _, ordinary = federated(other, tmp_path / "ordinary")
    node = Client(tmp_path / "ordinary again", own_of(other, "ann"))
    first, second, *_ = tasks_of(ordinary, "ann")
    assert not answer_of(node, first).refused
    why = refusal(node, replace(second, todo=("advertise",), messages=()))
    assert why.startswith("task: ")
    assert "secure aggregation" in why


def test_secrets_are_the_owners_alone_and_gone_in_the_end(tmp_path: Path, asked: Any) -> None:
    content, whole, of_step = asked
    channel, _ = stopped_at(content, tmp_path / "stopped", of_step("mask")[0])
    (path,) = channel.nodes["ann"].folder.rglob(SECURE)
    assert path.stat().st_mode & 0o077 == 0
    seed = json.loads(path.read_text())["session"]["seed"]
    assert len(seed) == 64
    others = [p for p in (tmp_path / "stopped").rglob("*") if p.is_file() and p != path]
    assert not any(seed.encode() in p.read_bytes() or bytes.fromhex(seed) in p.read_bytes() for p in others)
    (path,) = whole.nodes["ann"].folder.rglob(SECURE)
    assert json.loads(path.read_text()) == {"session": None, "unmasked": 2}
