"""Rows left out by ``data.on_bad_row: skip`` are counted, wherever a user's data is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.federation.direct import Direct, federated, nodes_of
from tests.federation.tiny import tiny
from tests.golden.cases import USERS

from comingle.config import parse_recipe
from comingle.federation.client import Client
from comingle.federation.run_folder import run_federation
from comingle.runs.api import run
from comingle.runs.join import join
from comingle.utils.records import read_events, read_metrics

BAD = {"text": ["no JSON", '{"text": 3}'], "conversations": ["no JSON", '{"messages": 3}', '{"messages": []}']}


def recipe(folder: Path, kind: str = "text", **changes: Any) -> dict[str, Any]:
    """Two users with rows, of whom the second has some that cannot be used."""
    content = tiny(folder, **changes)
    names = USERS[:2]
    good: Any = {"text": "what a comet is, said in a few more words " * 20}
    if kind == "conversations":
        content["data"] = {"kind": kind}
        content["training"] = {"rounds": 2, "batch_size": 2, "context": 64}
        turns = [{"role": "user", "content": "a comet?"}, {"role": "assistant", "content": "a ball of ice"}]
        good = {"messages": turns}
    for name in names:
        rows = [json.dumps(good)] * 20
        (folder / f"{name}.jsonl").write_text("\n".join(rows + (BAD[kind] if name == names[1] else [])))
    content["data"] |= {"users": {name: f"{folder}/{name}.jsonl" for name in names}, "on_bad_row": "skip"}
    content["base"] = "random:llama"
    return content


def counted(folder: Path) -> tuple[int, int]:
    """The number in a run's start event and in its metrics."""
    (started,) = (event for event in read_events(folder) if event["event"] == "start")
    return started["skipped_rows"], read_metrics(folder)["skipped_rows"]


@pytest.mark.parametrize("store", ["memory", "disk"])
@pytest.mark.parametrize("kind", BAD)
def test_a_run_counts_them(tmp_path: Path, kind: str, store: str) -> None:
    content = recipe(tmp_path, kind, runtime__store=store)
    run(content, out=tmp_path / "run")
    assert counted(tmp_path / "run") == (len(BAD[kind]),) * 2
    run(content, out=tmp_path / "again")  # a population on disk is not read again
    assert counted(tmp_path / "again") == (len(BAD[kind]),) * 2


def test_a_run_without_any_says_nothing(tmp_path: Path) -> None:
    content = recipe(tmp_path)
    content["data"]["users"] = dict.fromkeys(USERS[:2], content["data"]["users"][USERS[0]])
    assert "skipped_rows" not in run(content).metrics


def test_handed_rows_are_counted(tmp_path: Path) -> None:
    content = recipe(tmp_path)
    users = {name: ["what a comet is, said in a few more words " * 20] * 20 for name in USERS[:2]}
    users[USERS[1]].append(3)  # type: ignore[arg-type]
    content["data"] = {"given": True, "on_bad_row": "skip"}
    assert run(content, users=users).metrics["skipped_rows"] == 1


@pytest.mark.usefixtures("shared_base")
class TestFederation:
    """Server and clients, each with its own part of the recipe."""

    @pytest.mark.parametrize("kind", BAD)
    def test_the_server_counts_them(self, tmp_path: Path, kind: str) -> None:
        metrics, _ = federated(recipe(tmp_path, kind), tmp_path / "federation")
        assert metrics["skipped_rows"] == len(BAD[kind])
        assert counted(tmp_path / "federation" / "server") == (len(BAD[kind]),) * 2

    def test_so_does_the_users_own_model(self, tmp_path: Path) -> None:
        federated(recipe(tmp_path), tmp_path / "federation")
        first, second = (
            read_metrics(next((tmp_path / "federation" / name).rglob("model/metrics.json")).parent)
            for name in USERS[:2]
        )
        assert "skipped_rows" not in first
        assert second["skipped_rows"] == len(BAD["text"])

    def test_users_who_tell_no_amounts_do_not_tell_it(self, tmp_path: Path) -> None:
        plan, nodes = nodes_of(parse_recipe(recipe(tmp_path)), tmp_path)
        quiet = {
            name: Client(node.folder, node.own.model_copy(update={"tells": "losses"})) for name, node in nodes.items()
        }
        assert "skipped_rows" not in run_federation(plan, Direct(quiet), tmp_path / "server")

    def test_without_the_setting_they_are_refused(self, tmp_path: Path) -> None:
        content = recipe(tmp_path)
        del content["data"]["on_bad_row"]
        plan, nodes = nodes_of(parse_recipe(content), tmp_path)
        lines: list[str] = []
        for node in nodes.values():
            node.say = lines.append
        channel = Direct(nodes)
        run_federation(plan, channel, tmp_path / "server")
        assert any(told.get("kind") == "BadRowsError" for told in channel.told)
        assert any("not JSON" in line for line in lines)


def test_a_newcomer_counts_them(tmp_path: Path) -> None:
    content = recipe(tmp_path)
    bad = content["data"]["users"].pop(USERS[1])
    content["data"]["users"]["other"] = content["data"]["users"][USERS[0]]
    run(content, out=tmp_path / "run")
    join(tmp_path / "run", name="new", data=bad, out=tmp_path / "new")
    assert counted(tmp_path / "new") == (len(BAD["text"]),) * 2


@pytest.mark.slow
def test_processes_count_them(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from comingle.federation.launch import federate

    federate(parse_recipe(recipe(tmp_path)), tmp_path / "federation")
    assert counted(tmp_path / "federation") == (len(BAD["text"]),) * 2
