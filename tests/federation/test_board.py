"""What the server's table says of everybody, out of the run folder of a federation."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.federation.direct import Direct, NetworkSection, nodes_of
from tests.federation.tiny import one_base, tiny

from comingle.config import parse_recipe
from comingle.federation import server_session
from comingle.federation.client import Client
from comingle.federation.messages import unpack_answer, unpack_task
from comingle.federation.run_folder import StatusFile, run_federation
from comingle.reports.tables import render_participants
from comingle.utils.records import read_metrics
from comingle.utils.terminal import Terminal


@pytest.fixture(autouse=True, scope="module")
def base() -> Iterator[None]:
    with one_base():
        yield


def board(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "participants.json").read_text())


def shown(folder: Path, **options: bool) -> list[str]:
    console = Terminal(width=160)
    with console.capture() as captured:
        console.print(render_participants(folder, **options))
    return captured.get().splitlines()


def test_everybody_in_a_federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One who tells all, one who tells nothing, and one who never comes."""
    monkeypatch.setattr(server_session, "RETRY_SECONDS", 0.02)
    plan, nodes = nodes_of(parse_recipe(tiny(tmp_path, users=3)), tmp_path / "run")
    nodes["bob"] = Client(nodes["bob"].folder, nodes["bob"].own.model_copy(update={"tells": "nothing"}))
    del nodes["cem"]
    plan = replace(plan, network=NetworkSection(round_timeout=0.5, join_timeout=0.1))
    channel, server = Direct(nodes), tmp_path / "run" / "server"
    run_federation(plan, channel, server)
    told, users = board(server), board(server)["users"]
    assert (told["round"], told["rounds"], told["measure"]) == (2, 2, "perplexity")
    assert {name: user["state"] for name, user in users.items()} == {"ann": "here", "bob": "here", "cem": "away"}
    for name in ("ann", "bob"):
        assert users[name]["round"] == 2
        assert 0 <= time.time() - users[name]["seen"] < 60
        answers = [unpack_answer(answer) for who, _, answer in channel.recorded if who == name]
        tasks = [unpack_task(task) for who, task, _ in channel.recorded if who == name]
        assert users[name]["upload_bytes"] == sum(len(m) for answer in answers for m in answer.messages) > 0
        assert users[name]["download_bytes"] == sum(len(m) for task in tasks for m in task.messages) > 0
    assert users["ann"]["test"] == read_metrics(server)["users"]["ann"]["test_perplexity"]
    assert users["ann"]["train_loss_nats"] > 0
    assert users["bob"]["test"] is users["bob"]["train_loss_nats"] is None
    assert "no answer" in users["cem"]["why"]
    assert users["cem"]["seen"] is None
    lines = shown(server)
    assert lines[0].strip() == "2 of 2 rounds are done · 2 here, 1 away"
    assert [line.split()[:2] for line in lines[2:]] == [["ann", "here"], ["bob", "here"], ["cem", "away"]]


def test_a_server_that_goes_on_goes_on_counting(tmp_path: Path) -> None:
    step = {"event": "step", "round": 1, "user": "ann", "upload_bytes": 5, "download_bytes": 7}
    first = StatusFile(tmp_path, ["ann", "bob"], 3)
    first(step)
    first({"event": "round", "round": 1, "train_loss_nats": {"ann": 2.5}})
    again = StatusFile(tmp_path, ["ann", "bob"], 3)
    assert board(tmp_path)["users"]["ann"]["state"] == "expected"  # until it answers
    again({"event": "rejected", "round": 2, "user": "bob", "reason": "has NaN"})
    again(step)
    again({"event": "round", "round": 2, "train_loss_nats": {}})
    ann, bob = board(tmp_path)["users"].values()
    assert (ann["upload_bytes"], ann["download_bytes"], ann["train_loss_nats"]) == (10, 14, 2.5)
    assert (bob["state"], bob["why"]) == ("here", "has NaN")


def test_how_much_of_an_upload_counted_is_shown_where_there_is_a_rule(tmp_path: Path) -> None:
    seats = StatusFile(tmp_path, ["ann", "bob"], 3)
    assert "counted" not in shown(tmp_path)[1]
    event = {"event": "aggregation", "round": 1, "rule": "krum", "left_out": ["ann"]}
    seats(event | {"counted": {"ann": 0.0, "bob": 0.25}})
    seats({"event": "aggregation", "round": 2, "rule": "krum", "reason": "1 uploads are too few for krum"})
    seats({"event": "round", "round": 2, "train_loss_nats": {}})
    head, *lines = shown(tmp_path)[1:]
    assert head.split()[-1] == "counted"
    assert [line.split()[-1] for line in lines] == ["0", "0.25"]


@pytest.mark.parametrize("content", [None, "", "{", '{"users": {"ann": {"unknown": 1}}}', "[]"])
def test_a_damaged_board_is_made_anew(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "participants.json").write_text(content)
    if content is None or "users" not in content:
        assert shown(tmp_path)[0].strip() == "waiting for the coordinator"
    StatusFile(tmp_path, ["ann"], 3)
    assert board(tmp_path)["users"]["ann"]["state"] == "expected"


def test_of_many_those_who_fail_come_first(tmp_path: Path) -> None:
    names = [f"user{number:03}" for number in range(100)]
    crowd = StatusFile(tmp_path, names, 3)
    for name in names[:90]:
        crowd({"event": "joined", "user": name})
    crowd({"event": "failed", "user": "user042", "reason": "[red]\x1b[31mgone"})
    lines = shown(tmp_path)
    assert len(lines) == 2 + 24 + 1
    assert lines[0].strip() == "0 of 3 rounds are done · 89 here, 1 away, 10 expected"
    assert lines[2].split()[:2] == ["user042", "away"]
    assert "\\x1b" in lines[2]
    assert lines[-1].strip() == "and 76 more"
    assert len(shown(tmp_path, all_users=True)) == 2 + 100
