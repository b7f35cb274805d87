"""``comingle server --continuous``: runs that follow one another as text arrives, each continuing the one before."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from tests.commands import comingle as comingle
from tests.federation.direct import Direct
from tests.federation.test_continued_federations import assert_same, recipe_of, states_of

from comingle.federation import server_app
from comingle.federation.client import Client
from comingle.federation.client_store import DATA, FIXED, fix_data, read_fixed_run, sources_digest
from comingle.federation.files import change_participants, load_plan
from comingle.federation.messages import unpack_answer, unpack_task
from comingle.federation.participant import Own
from comingle.federation.run_folder import WhenSection, has_ended, run_federation
from comingle.federation.server_app import ContinuousServer
from comingle.privacy.accounting import read_account
from comingle.runs import api
from comingle.utils.errors import DataError, RecipeError
from comingle.utils.records import read_events, read_metrics

ANN, BOB, CEM = "ann", "bob", "cem"
LIMITS = ("max_train_tokens", "max_valid_tokens", "max_test_tokens")


class Federation:
    """A continuous federation with text in files of this test."""

    def __init__(self, folder: Path, *users: str, when: Mapping[str, Any] | None = None, **changes: Any) -> None:
        self.folder, self.out, self.said = folder, folder / "out", list[str]()
        content = recipe_of(folder / "texts", **changes)
        self.texts = {name: Path(path) for name, path in content["data"]["users"].items()}
        assert set(self.texts) == {ANN, BOB, CEM}
        options = {key: value for key, value in content["data"].items() if key not in ("users", *LIMITS)}
        self.recipe = {**content, "data": options}
        self.file = folder / "federation.yaml"
        rounds = {"when": {"new_tokens": 100, **(when or {})}}
        plan = {**self.recipe, "participants": list(users), "rounds": rounds}
        self.file.write_text(yaml.safe_dump(plan))
        self.nodes = {name: self.client(name) for name in users}
        self.channel = Direct(self.nodes)
        self.server = self.open()

    def client(self, name: str, **own: Any) -> Client:
        settings = Own(**{"name": name, "data": str(self.texts[name]), "tells": "all", **own})
        return Client(self.folder / name, settings, say=self.said.append)

    def open(self, **options: Any) -> ContinuousServer:
        """The server of a new process."""
        return ContinuousServer(self.load, self.channel, self.out, say=self.said.append, **options)

    def load(self) -> Any:
        return load_plan(self.file, continuous=True)

    def write(self, name: str, words: int = 150) -> None:
        """Append text."""
        with self.texts[name].open("a") as file:
            file.write("\n\n" + " ".join(f"{name} adds {number} more." for number in range(words)))

    def snapshot(self) -> dict[str, str]:
        """Copies of all users' text as it is now."""
        copies: dict[str, str] = {}
        for name, path in self.texts.items():
            copy = self.folder / f"snapshot {self.server.last_planned + 1} {name}.txt"
            shutil.copy(path, copy)
            copies[name] = str(copy)
        return copies

    def run_due(self) -> bool:
        due = self.server.plan_next()
        if due:
            self.server.run()
        return due

    def together(self, number: int, texts: Mapping[str, str], *users: str, ready: tuple[str, ...] = ()) -> api.Run:
        """The same run in one process, by hand."""
        data = {**self.recipe["data"], "users": {name: texts[name] for name in users}, "seed": 0}
        content = {**self.recipe, "data": data, "seed": number - 1}
        if ready:
            training = {**content["training"], "participation": [list(ready)]}
            content["training"] = training
        if number > 1:
            content["continue_from"] = str(self.folder / f"together {number - 1}")
        return api.run(content, out=self.folder / f"together {number}")

    def trained(self, number: int) -> set[str]:
        """Users who have trained in a run."""
        events = read_events(self.out / f"{number:04d}")
        return {name for event in events if event["event"] == "round" for name in event["train_loss_nats"]}


@pytest.mark.parametrize("method", ["comigs-1g1s", pytest.param("pcl", marks=pytest.mark.slow)])
def test_runs_with_arriving_text_are_those_of_one_process(method: str, tmp_path: Path) -> None:
    federation = Federation(tmp_path, ANN, BOB, name=method)
    assert federation.recipe.get("seed", 0) == 0
    texts = federation.snapshot()
    assert federation.run_due()
    together = federation.together(1, texts, ANN, BOB)
    assert_same(federation.channel, together)
    assert not federation.server.plan_next()

    federation.write(ANN)
    texts = federation.snapshot()
    assert federation.run_due()
    assert federation.trained(2) == {ANN}
    together = federation.together(2, texts, ANN, BOB, ready=(ANN,))
    assert_same(federation.channel, together)
    assert not federation.server.plan_next()

    federation.write(ANN)
    federation.write(BOB)
    texts = federation.snapshot()
    assert federation.run_due()
    assert federation.trained(3) == {ANN, BOB}
    together = federation.together(3, texts, ANN, BOB)
    assert_same(federation.channel, together)
    metrics = read_metrics(federation.out / "0003")
    assert metrics["users"][ANN]["test_loss_nats"] == together.metrics["users"][ANN]["test_loss_nats"]
    assert not federation.server.plan_next()


def test_status_and_show_list_the_runs(comingle: Callable[..., Any], tmp_path: Path) -> None:
    federation = Federation(tmp_path, ANN, BOB)
    assert federation.run_due()
    federation.write(ANN)
    assert federation.run_due()
    mean = read_metrics(federation.out / "0002")["mean_test_perplexity"]
    status = comingle("status", federation.out)
    assert status.code == 0
    first, second = (line.split() for line in status.out.splitlines() if line.startswith(" 000"))
    assert (first[0], first[3:5]) == ("0001", ["ann,", "bob"])
    assert (second[0], second[3:7]) == ("0002", ["ann", "2", f"{mean:.2f}", "perplexity"])
    assert "0002: finished · round 2 of 2" in status.out.replace("\n", "")
    shown = comingle("show", federation.out)
    assert shown.code == 0
    assert "2 runs" in shown.out
    assert "test perplexity by round" in shown.out


def test_a_run_waits_for_enough_text_of_enough_users_and_some_time(tmp_path: Path) -> None:
    federation = Federation(tmp_path, ANN, BOB, CEM, when={"users": 2, "new_tokens": 300, "at_most_every": "1h"})
    assert federation.run_due()
    federation.write(ANN)
    federation.write(BOB, 5)
    old = federation.out / "0001.yaml"
    stat = old.stat()

    def started_ago(seconds: float) -> None:
        os.utime(old, (stat.st_atime, stat.st_mtime - seconds))

    started_ago(3700)
    assert not federation.server.plan_next()  # one user has enough
    federation.write(BOB)
    started_ago(3000)
    assert not federation.server.plan_next()  # too early
    started_ago(3700)
    assert federation.run_due()
    assert federation.trained(2) == {ANN, BOB}


def test_a_file_that_is_changed_while_clients_are_asked_is_that_of_the_next_run(tmp_path: Path) -> None:
    federation = Federation(tmp_path, ANN, BOB)
    assert federation.run_due()

    class Changing(Direct):
        def exchange(self, requests: Mapping[str, bytes], *, timeout: float) -> Iterator[tuple[str, bytes | str]]:
            content = yaml.safe_load(federation.file.read_text())
            content["training"]["rounds"] = 3
            federation.file.write_text(yaml.safe_dump(content))
            yield from super().exchange(requests, timeout=timeout)

    federation.write(ANN)
    federation.channel = Changing(federation.nodes)
    server = federation.open()
    assert not server.plan_next()
    assert server.plan_next()
    assert load_plan(federation.out / "0002.yaml").recipe.training.rounds == 3


def test_text_that_was_too_little_adds_up(tmp_path: Path) -> None:
    """The user was present in a run in which it did not train; its text of that time is still new."""
    federation = Federation(tmp_path, ANN, BOB, when={"new_tokens": 3000})
    assert federation.run_due()
    federation.write(ANN)
    federation.write(BOB, 100)
    assert not federation.server.plan_next()
    federation.write(ANN)
    assert federation.run_due()
    assert federation.trained(2) == {ANN}
    federation.write(BOB, 100)
    assert federation.run_due()
    assert federation.trained(3) == {BOB}


def test_a_client_that_was_absent_keeps_its_state(tmp_path: Path) -> None:
    """It goes on from its own last run, which is not the server's last one."""
    federation = Federation(tmp_path, ANN, BOB)
    assert federation.run_due()
    bob = states_of(federation.channel)[BOB]
    absent = federation.channel.nodes.pop(BOB)
    federation.write(ANN)
    assert federation.run_due()
    federation.channel.nodes[BOB] = absent
    federation.write(ANN)
    assert federation.run_due()
    assert federation.trained(3) == {ANN}
    layout = absent._store.clients.model.layout  # type: ignore[union-attr]
    local = ~layout.mask(absent._store.clients.method.shared)  # type: ignore[union-attr]
    assert torch.equal(states_of(federation.channel)[BOB]["rows"][:, local], bob["rows"][:, local])
    assert not any("new user" in line for line in federation.said)
    federation.write(BOB)
    assert federation.run_due()
    assert federation.trained(4) == {BOB}


def test_an_absent_user_without_new_text_is_not_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = Federation(tmp_path, ANN, BOB)
    assert federation.run_due()
    federation.channel.nodes.pop(BOB)
    federation.write(ANN)

    def refuse_to_wait(seconds: float) -> None:
        raise AssertionError

    monkeypatch.setattr("time.sleep", refuse_to_wait)
    assert federation.run_due()


def test_counts_have_no_text_and_read_only_what_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = Federation(tmp_path, ANN, BOB)
    assert federation.run_due()
    reads: list[str] = []
    amount = Client._amount

    def read(client: Client, public: Any) -> int:
        reads.append(client.own.name)
        return amount(client, public)

    monkeypatch.setattr(Client, "_amount", read)
    assert not federation.server.plan_next()
    assert reads == [ANN, BOB]  # once, since the data of a run is a copy
    assert "user 'ann': 0 tokens are new; the server sees this number" in federation.said
    federation.write(ANN, 1)
    federation.channel.recorded.clear()
    assert not federation.server.plan_next()
    assert not federation.server.plan_next()
    assert reads == [ANN, BOB, ANN]
    for name, data, answer in federation.channel.recorded:
        task = unpack_task(data)
        assert (task.todo, task.user) == (("count",), name)
        assert set(task.arguments) == {"public", "since"}
        reported = unpack_answer(answer).reported
        assert set(reported) == {"new"}
        assert (reported["new"] > 0) == (name == ANN)
        assert unpack_answer(answer).messages == ()
    federation.channel.nodes[ANN] = federation.client(ANN)  # a new process has the count on disk
    assert not federation.server.plan_next()
    assert reads == [ANN, BOB, ANN]


def test_the_data_of_a_run_is_a_private_copy_until_the_run_after_the_next(tmp_path: Path) -> None:
    federation = Federation(tmp_path, ANN)
    for number in range(1, 6):
        before = federation.texts[ANN].read_text()
        assert federation.run_due()
        folder = federation.channel.nodes[ANN]._store.folder  # type: ignore[union-attr]
        (copy,) = (folder / DATA).rglob("*.txt")
        assert copy.read_text() == before
        assert (folder / DATA).stat().st_mode & 0o777 == 0o700
        assert (folder / FIXED).stat().st_mode & 0o777 == 0o600
        copies = [path for path in (tmp_path / ANN).glob(f"run-*/{DATA}") if path.exists()]
        assert len(copies) == min(number, 2)  # replay needs that of the run before
        assert len(list((tmp_path / ANN).glob("run-*"))) == min(number, 3)
        federation.write(ANN)


def test_clients_replay_the_copies_of_the_run_before(tmp_path: Path) -> None:
    federation = Federation(tmp_path, ANN, BOB, **{"data.replay": 0.3})
    texts = federation.snapshot()
    assert federation.run_due()
    assert load_plan(federation.out / "0001.yaml").recipe.data.replay == 0  # there is nothing to replay yet
    first = dict(federation.recipe["data"])
    federation.recipe["data"]["replay"] = 0.0
    federation.together(1, texts, ANN, BOB)
    federation.recipe["data"] = first | {"replay": 0.3}
    federation.write(ANN)
    texts = federation.snapshot()
    assert federation.run_due()
    together = federation.together(2, texts, ANN, BOB, ready=(ANN,))
    assert_same(federation.channel, together)
    start = next(event for event in read_events(tmp_path / "together 2") if event["event"] == "start")
    assert start["continues"]["replayed"][ANN] > 0
    run = federation.channel.nodes[ANN]._run
    federation.client(ANN)._open(run)  # a new process finds the same earlier data


def test_a_folder_of_files_is_copied_without_the_state_in_it(tmp_path: Path) -> None:
    data = tmp_path / "data"
    state = data / "state"
    (data / "deep").mkdir(parents=True)
    state.mkdir()
    (data / "one.txt").write_text("one")
    (data / "deep" / "two.txt").write_text("two")
    own = Own(name=ANN, data={"train": str(data), "test": str(data / "one.txt"), "valid": "demo:ada"})
    before = sources_digest(own.data, state)
    fix_data(state, "a1", own, [])
    assert sources_digest(own.data, state) == before  # the client's own files are no new data
    fixed = read_fixed_run(state / "run-a1")
    assert fixed is not None
    assert fixed.data["valid"] == "demo:ada"
    copy = Path(fixed.data["train"])
    assert sorted(str(path.relative_to(copy)) for path in copy.rglob("*.txt")) == ["deep/two.txt", "one.txt"]
    assert Path(fixed.data["test"]).read_text() == "one"
    (data / "deep" / "three.txt").write_text("three")
    assert sources_digest(own.data, state) != before
    with pytest.raises(DataError, match="pattern"):
        fix_data(state, "a2", Own(name=ANN, data=f"{data}/*.txt"), [])


def test_conversations_arrive_too(tmp_path: Path) -> None:
    def lines(count: int) -> str:
        chats = [
            [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"{n} is {n}."}]
            for n in range(count)
        ]
        return "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)

    federation = Federation(tmp_path, ANN, when={"new_tokens": 5})
    content = yaml.safe_load(federation.file.read_text())
    content["data"] = {"kind": "conversations"}
    content["training"] = {"rounds": 1, "batch_size": 4, "context": 64}
    federation.file.write_text(yaml.safe_dump(content))
    federation.texts[ANN] = tmp_path / "chats.jsonl"
    federation.texts[ANN].write_text(lines(20))
    federation.channel.nodes[ANN] = federation.client(ANN)
    assert federation.run_due()
    federation.texts[ANN].write_text(lines(24))
    assert not federation.server.plan_next()
    federation.texts[ANN].write_text(lines(26))
    assert federation.run_due()
    assert "user 'ann': 6 conversations are new; the server sees this number" in federation.said


class Restarting(Direct):
    """Before each task but the one to join, every client is a new process, and text was appended."""

    federation: Federation
    has_joined = False

    def exchange(self, requests: Mapping[str, bytes], *, timeout: float) -> Iterator[tuple[str, bytes | str]]:
        for name in self.nodes if self.has_joined else ():
            self.federation.write(name, 2)
            self.nodes[name] = self.federation.client(name)
        self.has_joined = True
        yield from super().exchange(requests, timeout=timeout)


def test_clients_restart_in_the_middle_of_a_run_while_text_arrives(tmp_path: Path) -> None:
    whole, other = Federation(tmp_path / "whole", ANN, BOB), Federation(tmp_path / "other", ANN, BOB)
    for federation in (whole, other):
        assert federation.run_due()
        federation.write(ANN)
        assert federation.server.plan_next()
    whole.server.run()
    channel = Restarting(other.nodes)
    channel.federation = other
    other.channel = channel
    other.open().run()
    mine, theirs = states_of(channel), states_of(whole.channel)
    for name in (ANN, BOB):
        assert all(torch.equal(t, theirs[name][key]) for key, t in mine[name].items()), name


def test_a_server_that_was_killed_resumes_its_run(tmp_path: Path) -> None:
    federation = Federation(tmp_path, ANN, BOB)
    assert federation.run_due()
    federation.write(ANN)
    assert federation.server.plan_next()

    def interrupt(event: Mapping[str, Any]) -> None:
        if event["event"] == "round" and event["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        federation.open(observers=[interrupt]).run()
    federation.write(BOB)  # and the operator changes the file meanwhile
    change_participants(federation.file, add=[CEM])
    assert not has_ended(federation.out / "0002")
    federation.open().run()
    assert federation.trained(2) == {ANN}
    events = [event["round"] for event in read_events(federation.out / "0002") if event["event"] == "round"]
    assert events == [1, 2]
    assert federation.run_due()
    assert federation.trained(3) == {BOB}


def test_users_come_and_go_without_a_restart(tmp_path: Path) -> None:
    federation = Federation(tmp_path, ANN, BOB)
    assert federation.run_due()
    assert change_participants(federation.file, add=[CEM], remove=[BOB]) == (ANN, CEM)
    assert not federation.server.plan_next()  # the new client is not connected yet
    federation.channel.nodes[CEM] = federation.client(CEM)
    assert federation.run_due()
    start = next(event for event in read_events(federation.out / "0002") if event["event"] == "start")
    assert start["continues"]["new"] == [CEM]
    assert start["continues"]["dropped"] == [BOB]
    assert federation.trained(2) == {CEM}
    asked = {unpack_task(data).user for _, data, _ in federation.channel.recorded if b"count" in data}
    assert asked == {ANN, CEM}  # nobody else is asked after the change


def test_a_new_user_with_too_little_text_waits_for_more(tmp_path: Path) -> None:
    federation = Federation(tmp_path, ANN, when={"new_tokens": 1})
    assert federation.run_due()
    change_participants(federation.file, add=[CEM])
    federation.texts[CEM].write_text("x")
    refused: list[str] = []
    client = federation.client(CEM)
    client.refuse = refused.append
    federation.channel.nodes[CEM] = client
    assert not federation.server.plan_next()
    assert not federation.server.plan_next()
    assert sum("takes part in no run so far" in line for line in federation.said) == 1
    federation.write(ANN)
    assert federation.run_due()
    assert not refused
    federation.write(CEM)
    assert federation.run_due()
    assert federation.trained(3) == {CEM}


def test_only_the_last_run_of_a_federation_ends_the_client(tmp_path: Path) -> None:
    federation = Federation(tmp_path, ANN)
    ended: list[bool] = []
    federation.channel.nodes[ANN].end = lambda: ended.append(True)
    assert federation.run_due()
    assert not ended
    run_federation(load_plan(federation.file), federation.channel, tmp_path / "ordinary")
    assert ended


@pytest.mark.slow
def test_old_runs_are_deleted_and_who_returns_is_still_known(comingle: Callable[..., Any], tmp_path: Path) -> None:
    """Bob was in the first run only, which is deleted when he returns: his text of then is not new."""
    federation = Federation(tmp_path, ANN, BOB)
    content = yaml.safe_load(federation.file.read_text())
    federation.file.write_text(yaml.safe_dump({**content, "rounds": {**content["rounds"], "keep": 1}}))
    assert federation.run_due()
    absent = federation.channel.nodes.pop(BOB)
    federation.write(ANN)
    assert federation.run_due()
    assert (federation.out / "0001").exists()
    federation.write(ANN)
    assert federation.server.plan_next()
    names = sorted(path.name for path in federation.out.iterdir())
    assert names == ["0002", "0002.yaml", "0003.yaml", "old_runs.json"]

    federation.channel.nodes[BOB] = absent
    assert federation.open()._count_new(federation.load(), 3)[BOB] == 0
    gone = comingle("show", federation.out / "0001")
    assert (gone.code, len(gone.err.strip().splitlines())) == (2, 1)
    options = ("--continuous", "--continue-from", federation.out / "0001", "--out", tmp_path / "new")
    refused = comingle("server", federation.file, *options)
    assert (refused.code, "0001" in refused.err) == (2, True), refused.err
    refused = comingle("leave", federation.out, "--user", BOB, "--mode", "exact")
    assert (refused.code, "is gone; allowed: --mode forward" in refused.err) == (2, True), refused.err


def test_a_run_that_cannot_be_deleted_does_not_end_the_server(tmp_path: Path) -> None:
    federation = Federation(tmp_path, ANN)
    content = yaml.safe_load(federation.file.read_text())
    federation.file.write_text(yaml.safe_dump({**content, "rounds": {**content["rounds"], "keep": 1}}))
    assert federation.run_due()
    elsewhere = tmp_path / "elsewhere"
    (federation.out / "0001").rename(elsewhere)
    (federation.out / "0001").symlink_to(elsewhere)  # is not followed
    for _ in range(2):
        federation.write(ANN)
        assert federation.run_due()
    assert any("0001: cannot be deleted" in line for line in federation.said)
    assert (elsewhere / "metrics.json").exists()


def test_questions_become_rarer_while_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After new text that is too little for a run they are frequent again, and the longest time is below a minute."""
    federation = Federation(tmp_path, ANN, when={"new_tokens": 10**6})
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 5:
            federation.write(ANN)
        if len(slept) == 8:
            raise Stop

    monkeypatch.setattr(server_app.time, "sleep", sleep)
    with pytest.raises(Stop):
        federation.server.run_forever()
    assert slept == [20, 30, 40, 40, 40, 20, 30, 40]


def test_a_mistake_in_the_file_is_shown_once_and_corrected(tmp_path: Path) -> None:
    federation = Federation(tmp_path, ANN)
    assert federation.run_due()
    federation.write(ANN)
    content = federation.file.read_text()
    federation.file.write_text(content + "colour: red\n")
    assert not federation.server.plan_next()
    assert not federation.server.plan_next()
    assert sum("colour" in line for line in federation.said) == 1
    federation.file.write_text(content)
    assert federation.run_due()


class Stop(Exception):
    """Ends a loop that has no end."""


def test_a_run_that_cannot_start_is_planned_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator has changed the method, which a run cannot continue, and changes it back."""
    federation = Federation(tmp_path, ANN)
    assert federation.run_due()
    federation.write(ANN)
    content = federation.file.read_text()
    federation.file.write_text(yaml.safe_dump({**yaml.safe_load(content), "method": "fedavg"}))
    slept: list[float] = []

    original_sleep = time.sleep

    def sleep(seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():  # of connections of other tests
            original_sleep(seconds)
            return
        slept.append(seconds)
        assert len(slept) < 10
        if federation.server.last_planned == 2 and seconds == server_app.COUNT_SECONDS:
            raise Stop
        federation.file.write_text(content)

    monkeypatch.setattr(server_app.time, "sleep", sleep)
    with pytest.raises(Stop):
        federation.server.run_forever()
    assert any(line.startswith("run 0002: method: got") for line in federation.said)
    assert server_app.RETRY_SECONDS in slept
    assert federation.trained(2) == {ANN}


def test_the_first_run_does_not_start_with_a_wrong_file(tmp_path: Path) -> None:
    federation = Federation(tmp_path, ANN)
    federation.file.write_text(federation.file.read_text() + "colour: red\n")
    with pytest.raises(RecipeError, match="colour"):
        federation.server.run_forever()


@pytest.mark.parametrize("run", ["../ben", "/etc", "", 3])
def test_a_server_cannot_name_a_path_as_earlier_run(run: object, tmp_path: Path) -> None:
    federation = Federation(tmp_path, ANN)
    assert federation.run_due()
    federation.server.plan_next()
    task = next(unpack_task(data) for _, data, _ in reversed(federation.channel.recorded))
    task.arguments["since"].append(run)  # type: ignore[index]
    answer = unpack_answer(federation.channel.nodes[ANN].handle(task.pack()))
    assert "since" in answer.refused


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("10m", 600), ("1.5h", 5400), ("1d", 86400), (7, 7), ("7", 7)]
)
def test_durations(text: object, seconds: float) -> None:
    assert WhenSection(at_most_every=text).at_most_every == seconds  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"rounds": {"when": {"at_most_every": "soon"}}}, "at_most_every"),
        ({"rounds": {"when": {"users": 0}}}, "users"),
        ({"rounds": {"whenever": {}}}, "whenever"),
        ({"rounds": {"keep": 0}}, "keep"),
        ({"privacy": {"epsilon": 1.0}}, "privacy.noise_multiplier"),
        ({"privacy": {"mechanism": "example", "noise_multiplier": 1.0}, "data": {"replay": 0.1}}, "data.replay"),
        (
            {"rounds": {"keep": 2}, "privacy": {"noise": "reproducible", "noise_multiplier": 1.0}},
            "rounds.keep: got it with privacy.noise: reproducible",
        ),
        (
            {"privacy": {"sampling": "fixed", "noise_multiplier": 1.0}, "training": {"participation": 0.5}},
            "privacy.sampling",
        ),
        (
            {"data": {"kind": "samples"}, "base": "net:mlp", "method": "fedavg", "training": {}, "adapters": {}},
            "data.kind",
        ),
        ({"training": {"participation": [["ann"]]}}, "training.participation"),
    ],
)
def test_files_that_cannot_be_continuous(changes: dict[str, Any], place: str, tmp_path: Path) -> None:
    federation = Federation(tmp_path, ANN)
    federation.file.write_text(yaml.safe_dump({**yaml.safe_load(federation.file.read_text()), **changes}))
    with pytest.raises(RecipeError) as refused:
        federation.load()
    assert place in str(refused.value)
    assert "\n" not in str(refused.value)


def test_rounds_are_for_continuous_federations(tmp_path: Path) -> None:
    federation = Federation(tmp_path, ANN)
    with pytest.raises(RecipeError, match="rounds"):
        load_plan(federation.file, continuous=False)
    content = yaml.safe_load(federation.file.read_text())
    content.pop("rounds")
    federation.file.write_text(yaml.safe_dump(content))
    when = federation.load().rounds.when
    assert (when.users, when.new_tokens, when.at_most_every) == (1, 500, 0)
    assert load_plan(federation.file, continuous=False).rounds is None


def test_participants_are_changed_and_all_keys_kept(comingle: Callable[..., Any], tmp_path: Path) -> None:
    federation = Federation(tmp_path, ANN, BOB)
    before = yaml.safe_load(federation.file.read_text())
    added = comingle("server", federation.file, "--add-user", "dee", "--add-user", "eve", "--remove-user", ANN)
    assert added.code == 0, added.err
    assert "bob, dee, eve" in added.out
    assert yaml.safe_load(federation.file.read_text()) == {**before, "participants": [BOB, "dee", "eve"]}
    for option, name in (("--add-user", BOB), ("--remove-user", "zoe"), ("--add-user", "")):
        assert comingle("server", federation.file, option, name).code == 2
    assert (
        comingle(
            "server", federation.file, *(["--remove-user", BOB, "--remove-user", "dee", "--remove-user", "eve"])
        ).code
        == 2
    )
    assert yaml.safe_load(federation.file.read_text())["participants"] == [BOB, "dee", "eve"]


def test_a_folder_is_of_one_kind(comingle: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    federation = Federation(tmp_path, ANN)
    assert federation.run_due()
    refused = comingle("server", federation.file, "--out", federation.out / "0001", "--continuous")
    assert (refused.code, "this federation has ended" in refused.err) == (2, True)
    content = yaml.safe_load(federation.file.read_text())
    content.pop("rounds")
    federation.file.write_text(yaml.safe_dump(content))
    refused = comingle("server", federation.file, "--out", federation.out)
    assert (refused.code, "--continuous" in refused.err) == (2, True)


# ---------------------------------------------------------------- keys and names


def test_keys_that_are_added_later_are_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr")
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    from comingle.federation.flower import fleet_server
    from comingle.federation.flower.certificates import make_key

    state = fleet_server.make_states().state()
    folder = fleet_server.KeyFolder(state, tmp_path)
    now = [100.0]
    monkeypatch.setattr(fleet_server.time, "monotonic", lambda: now[0])

    def is_registered(name: str) -> bool:
        _private, public = make_key(tmp_path, name)
        key = public_key_to_bytes(fleet_server.load_public_key(public))
        folder.register_new_keys()
        node = state.get_node_id_by_public_key(key)
        return node is not None and next(iter(state.get_node_info(node_ids=[node]))).name == name

    assert is_registered(ANN)
    assert not is_registered("Bob Lee/2")  # the folder was read within the last second
    now[0] += 1.1
    (tmp_path / "aaa.pub").write_text("not a key")
    assert is_registered("Bob Lee/2")
    now[0] += 1.1
    folder.register_new_keys()
    assert is_registered(ANN)


def test_a_gate_asks_for_new_keys_before_it_refuses_one(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from comingle.federation.flower import fleet_server
    from comingle.federation.flower.client_app import UNKNOWN_KEY

    asked: list[bool] = []
    states = fleet_server.make_states()
    gate = fleet_server.make_fleet_api(states, keys_only=True, register_new_keys=lambda: asked.append(True))
    headers = {
        fleet_server.FLEET_HTTP_PUBLIC_KEY_HEADER: b"AAAA",
        fleet_server.FLEET_HTTP_SIGNATURE_HEADER: b"AAAA",
        fleet_server.TIMESTAMP_HEADER: b"2026-01-01T00:00:00+00:00",
    }
    assert gate._signature_problem(states.state(), headers) == UNKNOWN_KEY
    assert asked


def test_a_channel_lets_users_in_who_are_added_and_refuses_who_is_removed(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from tests.federation.grid import LocalGrid

    from comingle.federation.flower import channel as channels
    from comingle.federation.flower.client_app import make_client_app
    from comingle.federation.flower.server_app import _read_names

    file, reasons, grid = tmp_path / "federation.yaml", list[str](), LocalGrid()
    file.write_text("participants: [ann, bob]")
    config = {"federation": str(file)}
    channel = channels.GridChannel(grid, print, allowed=[ANN, BOB], read_allowed=lambda: _read_names(config, tmp_path))
    for name in (ANN, BOB, CEM):
        if name == CEM:
            assert channel.present() == [ANN, BOB]
            file.write_text("participants: [ann, cem]")
            time.sleep(0.6)
        grid.join(make_client_app(lambda *_: b"", reasons.append), name=name, state=str(tmp_path / name))
    assert channel.present() == [ANN, BOB, CEM]  # a removed user stays for the run in progress
    channel.allow([ANN, CEM])
    wait_for(lambda: channel.present() == [ANN, CEM], 10)
    wait_for(lambda: bool(reasons), 10)
    assert "bob: not a user" in reasons[0]
    file.write_text("participants: [")
    assert _read_names(config, tmp_path) == ()


# ---------------------------------------------------------------- processes


def wait_for(happened: Callable[[], bool], seconds: float = 240) -> None:
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.2)


@pytest.mark.slow
def test_processes_train_as_text_arrives(comingle: Callable[..., Any], tmp_path: Path) -> None:
    """Text arrives twice, the server is killed in the middle of a run, and a user is added while it runs."""
    pytest.importorskip("flwr")
    from comingle.federation.flower.processes import free_port

    federation = Federation(tmp_path, ANN, BOB)
    keys, port, out = tmp_path / "keys", free_port(), federation.out
    assert comingle("server", federation.file, "--make-certificates", keys, "--host", "127.0.0.1").code == 0
    program = [sys.executable, "-m", "comingle"]
    serve = [*program, "server", str(federation.file), "--out", str(out), "--continuous"]
    serve += ["--port", str(port), "--certificates", str(keys)]
    started: list[subprocess.Popen[bytes]] = []

    def start(command: list[str], log: str) -> subprocess.Popen[bytes]:
        with (tmp_path / log).open("ab") as file:
            started.append(
                subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"})
            )
        return started[-1]

    def start_client(name: str) -> subprocess.Popen[bytes]:
        connection = ["--server", f"127.0.0.1:{port}", "--certificates", str(keys / "ca.pem")]
        connection += ["--key", str(keys / "users" / f"{name}.key")]
        own = ["--name", name, "--data", str(federation.texts[name]), "--state", str(tmp_path / name)]
        return start([*program, "client", *own, *connection], f"{name}.log")

    def has_run(number: int) -> bool:
        return has_ended(out / f"{number:04d}")

    try:
        server = start(serve, "server.log")
        clients = [start_client(name) for name in (ANN, BOB)]
        wait_for(lambda: has_run(1))

        federation.write(ANN)
        wait_for(lambda: any(event["event"] == "round" for event in read_events(out / "0002")))
        server.send_signal(signal.SIGKILL)
        server.wait()
        server = start(serve, "server.log")
        wait_for(lambda: has_run(2))
        assert federation.trained(2) == {ANN}

        added = comingle("server", federation.file, "--add-user", CEM, "--certificates", keys)
        assert added.code == 0, added.err
        clients.append(start_client(CEM))
        wait_for(lambda: has_run(3))
        assert federation.trained(3) == {CEM}

        federation.write(BOB)
        wait_for(lambda: has_run(4))
        assert federation.trained(4) == {BOB}

        time.sleep(2)
        process = psutil.Process(clients[0].pid)
        before, began = process.cpu_times(), time.monotonic()
        time.sleep(30)
        used = process.cpu_times()
        share = (used.user + used.system - before.user - before.system) / (time.monotonic() - began)
        (tmp_path / "share.txt").write_text(f"an idle client uses {share:.2%} of a core")
        assert share < 0.02

        assert comingle("server", federation.file, "--remove-user", BOB).code == 0
        federation.write(ANN)
        wait_for(lambda: has_run(5))
        wait_for(lambda: clients[1].poll() is not None)
        assert "not a user of this federation" in (tmp_path / "bob.log").read_text()
        assert all(client.poll() is None for client in (clients[0], clients[2]))
        server.send_signal(signal.SIGTERM)
        server.wait(60)
        assert "Traceback" not in "".join(path.read_text() for path in tmp_path.glob("*.log"))
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(60)


@pytest.mark.parametrize("mechanism", ["central", pytest.param("local", marks=pytest.mark.slow)])
def test_privacy_accounts_go_on_until_budgets_are_spent(mechanism: str, tmp_path: Path) -> None:
    """Ann trains in two runs and bob in one; then ann's budget is spent, and bob goes on alone."""
    options = {"name": "fedavg", "training__local_steps": 1}
    privacy = {"mechanism": mechanism, "noise_multiplier": 1.0, "accountant": "rdp"}
    federation = Federation(tmp_path, ANN, BOB, **options)
    content = {**yaml.safe_load(federation.file.read_text()), "privacy": privacy}
    federation.file.write_text(yaml.safe_dump(content))
    assert federation.run_due()
    federation.write(ANN)
    assert federation.run_due()
    spent = read_metrics(federation.out / "0002")["privacy"]
    first = read_metrics(federation.out / "0001")["privacy"]
    assert spent["users"][BOB] == first.get("users", {}).get(BOB, first["epsilon"])
    assert spent["users"][ANN] > spent["users"][BOB]
    budget = spent["users"][ANN] * (1 + 1e-9)
    federation.file.write_text(yaml.safe_dump({**content, "privacy": {**privacy, "epsilon": budget}}))
    federation.write(ANN)
    federation.write(BOB)
    assert federation.run_due()
    assert released(federation, 3) == {BOB}
    federation.write(ANN)
    assert not federation.run_due()
    federation.write(ANN)
    assert not federation.run_due()
    assert [line for line in federation.said if "no further run" in line] == [
        "ann: the privacy budget is spent; no further run trains on new data"
    ]
    federation.file.write_text(yaml.safe_dump({**content, "privacy": {**privacy, "epsilon": 3 * budget}}))
    assert federation.run_due()
    assert released(federation, 4) == {ANN}


def released(federation: Federation, number: int) -> set[str]:
    """Users who have released something in a private run, in which they report no losses."""
    account = read_account(federation.out / f"{number:04d}")
    assert account is not None
    return {name for name, releases in account.now.items() if releases}


def test_constant_learning_rates_are_kept_by_all_runs(tmp_path: Path) -> None:
    """A clipped step of SGD is as long as the rate times the clip norm, from one upload to the next."""
    rate, clip_norm = 1.0, 0.01
    experts = {
        "name": "sgd",
        "momentum": 0.0,
        "weight_decay": 0.0,
        "learning_rate": rate,
        "clip_norm": clip_norm,
        "schedule": "constant",
    }
    federation = Federation(tmp_path, ANN, name="fedavg", training__experts=experts, training__rounds=3)
    assert federation.run_due()
    federation.write(ANN)
    assert federation.run_due()
    uploads = [upload.tensors for upload in federation.channel.uploads]
    rows = [torch.cat([tensors[name].flatten() for name in sorted(tensors)]) for tensors in uploads]
    assert len(rows) == 6
    steps = [float((after - before).norm()) for before, after in itertools.pairwise(rows)]
    assert steps == pytest.approx([rate * clip_norm] * 5, rel=1e-3)
