"""The coordinator stopped at every exchange; users who are away, late, or send what they should not."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from tests.commands import Answer as CliAnswer
from tests.federation.direct import Direct, NetworkSection, federated, nodes_of
from tests.federation.tiny import assert_same_end, tasks_of, tiny
from tests.quick import quick

from comingle.config import parse_recipe
from comingle.federation import client
from comingle.federation.client import Client
from comingle.federation.messages import Answer, Task, unpack_answer, unpack_task
from comingle.federation.public import tokens_of
from comingle.federation.run_folder import Plan, has_ended, run_federation
from comingle.models import base, folders
from comingle.protocol.messages import Download, Upload
from comingle.protocol.wire import pack, unpack
from comingle.training.state import State
from comingle.utils.errors import DivergenceError, RunError
from comingle.utils.files import list_checkpoints

HALF = {"training__participation": 0.5, "evaluation__select": "best", "evaluation__every": 1, "evaluation__first": True}
CASES: dict[str, dict[str, Any]] = {"comigs-1g1s": {}, "fedavg": HALF, "pcl": {"users": 3}, "fedmerge": {}}

pytestmark = pytest.mark.usefixtures("shared_base", "asked_again_soon")


def started(content: dict[str, Any], folder: Path, patience: NetworkSection) -> tuple[Plan, dict[str, Client]]:
    plan, nodes = nodes_of(parse_recipe(content), folder)
    return replace(plan, network=patience), nodes


# -------------------------------------------------------------------- stopped


class Stopped(Exception):
    """What a killed process leaves: nothing is done after it."""


class Stopping(Direct):
    """The server dies at every task that it has not died at before: once on the way there, once on the way back."""

    def __init__(self, nodes: Mapping[str, Client]):
        super().__init__(nodes)
        self.stops: set[tuple[str, int, bool]] = set()

    def exchange(self, requests: Mapping[str, bytes], *, timeout: float) -> Iterator[tuple[str, bytes | str]]:
        for name, task in requests.items():
            for there in (False, True):
                stop = name, unpack_task(task).serial, there
                if stop not in self.stops:
                    self.stops.add(stop)
                    if there:
                        self.nodes[name].handle(task)
                    raise Stopped
            yield from super().exchange({name: task}, timeout=timeout)


@pytest.mark.parametrize("name", quick(CASES, "comigs-1g1s", "fedmerge"))
@pytest.mark.slow
def test_a_server_that_stops_at_every_exchange_ends_with_the_same(name: str, tmp_path: Path) -> None:
    content = tiny(tmp_path, name, **CASES[name])
    metrics, whole = federated(content, tmp_path / "whole")
    plan, nodes = nodes_of(parse_recipe(content), tmp_path / "stopped")
    channel, server, ended = Stopping(nodes), tmp_path / "stopped" / "server", None
    while ended is None:
        try:
            ended = run_federation(plan, channel, server, resume=(server / "recipe.yaml").exists())
        except Stopped:
            continue
    asked = {(who, unpack_task(task).serial) for who, task, _ in whole.recorded}
    assert {(who, serial) for who, serial, _ in channel.stops} >= asked
    assert_same_end(channel, whole)
    assert without_times(ended) == without_times(metrics)
    assert told_in(server) == told_in(tmp_path / "whole" / "server")


class Leaving(Direct):
    """Bob goes after the second round's training; the server stops in the fourth round."""

    gone = False

    def present(self) -> Sequence[str]:
        return [name for name in self.nodes if not (self.gone and name == "bob")]

    def exchange(self, requests: Mapping[str, bytes], *, timeout: float) -> Iterator[tuple[str, bytes | str]]:
        tasks = [unpack_task(task) for task in requests.values()]
        self.gone |= any("evaluate" in task.todo for task in tasks)
        if any("train" in task.todo and task.round == 3 for task in tasks):
            raise Stopped
        return super().exchange({n: task for n, task in requests.items() if n in self.present()}, timeout=timeout)


def test_who_was_away_hears_of_the_round_that_was_judged(tmp_path: Path) -> None:
    content = tiny(tmp_path, "fedavg", users=3, evaluation__select="best", evaluation__every=2, training__rounds=4)
    plan, nodes = started(content, tmp_path / "away", NetworkSection(round_timeout=0.1))
    with pytest.raises(Stopped):
        run_federation(plan, Leaving(nodes), tmp_path / "away" / "server")
    back = Direct(nodes)
    run_federation(plan, back, tmp_path / "away" / "server", resume=True)
    verdict = next(unpack(task.messages[0]) for task in tasks_of(back, "bob") if "hear" in task.todo)
    assert isinstance(verdict, Download)
    assert verdict.version == 2


RESTARTS = ("wall_seconds", "tokens_per_second", "peak_memory_bytes", "seconds")


def without_times(content: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key not in RESTARTS}


def told_in(folder: Path) -> list[dict[str, Any]]:
    """The events of a run, but for how often users had to be told what it is about."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [without_times(event) for event in events if event["event"] not in ("joined", "step")]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_stopped_once_and_all_users_with_it(name: str, tmp_path: Path) -> None:
    """The same for each exchange by itself, of a run that was undisturbed until then; nobody's memory helps."""
    content = tiny(tmp_path, name, **CASES[name])
    _, whole = federated(content, tmp_path / "whole")
    for at in range(len(whole.recorded)):
        for there in (False, True):
            folder = tmp_path / f"{at}-{there}"
            plan, nodes = nodes_of(parse_recipe(content), folder)
            channel = Stopping(nodes)
            known = [(who, unpack_task(task).serial) for who, task, _ in whole.recorded]
            channel.stops = {(*one, way) for one in known for way in (False, True)} - {(*known[at], there)}
            with pytest.raises(Stopped):
                run_federation(plan, channel, folder / "server")
            _, nodes = nodes_of(parse_recipe(content), folder)
            again = Direct(nodes)
            run_federation(plan, again, folder / "server", resume=(folder / "server" / "recipe.yaml").exists())
            assert_same_end(again, whole)


# -------------------------------------------------------------------- a server's disk


def test_a_full_disk_of_the_servers_is_one_line_and_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = tiny(tmp_path, "fedavg")
    _, whole = federated(content, tmp_path / "whole")
    plan, nodes = nodes_of(parse_recipe(content), tmp_path / "full")
    channel, server, real, fails, calls = Direct(nodes), tmp_path / "full" / "server", os.fsync, 0, 0

    def fsync(handle: int) -> None:
        nonlocal calls
        if str(server) in os.readlink(f"/proc/self/fd/{handle}"):
            calls += 1
            if calls == fails:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    reasons: list[str] = []
    while True:
        calls, fails = 0, fails + 1
        try:
            run_federation(plan, channel, server, resume=(server / "recipe.yaml").exists())
        except RunError as error:
            reasons.append(str(error))
            continue
        break
    assert len(reasons) > 5
    assert all("No space left on device" in reason and reason.isprintable() for reason in reasons)
    assert_same_end(channel, whole)


@pytest.mark.parametrize("name", ["fedavg", pytest.param("pcl", marks=pytest.mark.slow)])
def test_a_damaged_checkpoint_of_the_servers_is_one_line_that_says_what_to_do(name: str, tmp_path: Path) -> None:
    content = tiny(tmp_path, name, users=3, training__rounds=4, evaluation__model="exchanged", evaluation__every=1)
    metrics, channel = federated(content, tmp_path / "run")
    server = tmp_path / "run" / "server"
    newest = sorted((server / "checkpoints").iterdir())[-1]
    (newest / "state.safetensors").write_bytes(b"\x00" * 100)
    plan, _ = nodes_of(parse_recipe(content), tmp_path / "run")
    with pytest.raises(RunError, match=rf"{newest.name}.*`rm -r .*`"):
        run_federation(plan, channel, server, resume=True)
    shutil.rmtree(newest)  # as it says
    again = run_federation(plan, channel, server, resume=True)
    assert sorted(again["users"]) == sorted(metrics["users"])


# -------------------------------------------------------------------- away


class Unsteady(Direct):
    """Users who are away in some rounds (from 1), or whose answers come too late in them."""

    def __init__(
        self,
        nodes: Mapping[str, Client],
        *,
        away: Mapping[str, Sequence[int]] | None = None,
        late: Mapping[str, Sequence[int]] | None = None,
    ):
        super().__init__(nodes)
        self.away, self.late, self.round = away or {}, late or {}, 1

    def see(self, event: Mapping[str, Any]) -> None:
        self.round += event["event"] == "round"

    def present(self) -> Sequence[str]:
        return [name for name in self.nodes if self.round not in self.away.get(name, ())]

    def exchange(self, requests: Mapping[str, bytes], *, timeout: float) -> Iterator[tuple[str, bytes | str]]:
        for name, answer in super().exchange(requests, timeout=timeout):
            late = self.round in self.late.get(name, ()) and unpack_task(requests[name]).serial
            yield name, f"has not answered within {timeout:g} s" if late else answer


ALL_USERS = ("ann", "bob", "cem")
QUICK = NetworkSection(min_participants=2, round_timeout=0.4, join_timeout=0.4)
ALL_ROUNDS = range(1, 9)


def unsteady(folder: Path, name: str = "fedavg", patience: NetworkSection = QUICK, **options: Any) -> Unsteady:
    plan, nodes = started(tiny(folder, name, users=3, training__rounds=3), folder / "unsteady", patience)
    channel = Unsteady(nodes, **options)
    run_federation(plan, channel, folder / "unsteady" / "server", observers=[channel.see])
    return channel


def with_members(folder: Path, *members: Sequence[str], name: str = "fedavg") -> Direct:
    """A run in whose rounds these users take part, and everybody is there."""
    listed = [list(each) for each in members]
    content = tiny(folder, name, users=3, training__rounds=len(listed), training__participation=listed)
    return federated(content, folder / "reference")[1]


OTHERS = ("ann", "cem")


@pytest.mark.parametrize(("name", "how"), [("fedavg", "away"), ("comigs-1g1s", "late")])
@pytest.mark.slow
def test_a_user_who_misses_a_round_was_not_in_it(
    name: str, how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    channel = unsteady(tmp_path, name, QUICK, **{how: {"bob": [2]}})
    assert_same_end(channel, with_members(tmp_path, ALL_USERS, OTHERS, ALL_USERS, name=name))
    assert len([r for r in caplog.records if "the round continues" in r.getMessage()]) == 1


def test_a_user_who_comes_in_the_middle_takes_part_from_then_on(tmp_path: Path) -> None:
    channel = unsteady(tmp_path, away={"bob": [1]})
    assert_same_end(channel, with_members(tmp_path, OTHERS, ALL_USERS, ALL_USERS))


def test_a_user_who_never_comes_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    reference = with_members(tmp_path, OTHERS, OTHERS, OTHERS)
    began = time.monotonic()
    channel = unsteady(tmp_path, away={"bob": ALL_ROUNDS})
    assert time.monotonic() - began < 60  # a busy machine trains slowly; nobody waits for the hour that is the default
    assert_same_end_without(channel, reference, "bob")


def assert_same_end_without(one: Direct, other: Direct, name: str) -> None:
    for channel in (one, other):
        channel.nodes.pop(name)
    assert_same_end(one, other)


def test_too_few_end_the_run_in_one_line_and_it_goes_on(tmp_path: Path) -> None:
    patience = NetworkSection(min_participants=2, round_timeout=0.1, join_timeout=0.1)
    plan, nodes = started(tiny(tmp_path, "fedavg", users=3, training__rounds=3), tmp_path / "few", patience)
    server = tmp_path / "few" / "server"
    nobody = Unsteady(nodes, away=dict.fromkeys(ALL_USERS, ALL_ROUNDS))
    with pytest.raises(RunError, match=r"^0 of 3 users .*needed: 2; network.join_timeout is 0.1 s$"):
        run_federation(plan, nobody, server)
    few = Unsteady(nodes, away={"ann": [2], "bob": [2]})
    with pytest.raises(RunError, match=r"^round 2: 1 of 3 .*0.1 s; needed: 2; .*again.* network.round_timeout$"):
        run_federation(plan, few, server, resume=True, observers=[few.see])
    steady = Direct(nodes)
    run_federation(plan, steady, server, resume=True)
    assert_same_end(steady, with_members(tmp_path, ALL_USERS, ALL_USERS, ALL_USERS))


def test_nobody_left_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"^round 2: 0 of 3 .*0.1 s; needed: 1; "):
        unsteady(
            tmp_path,
            patience=NetworkSection(round_timeout=0.1, join_timeout=0.1),
            away={name: [2] for name in ALL_USERS},
        )


def test_a_user_who_cannot_join_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reference = with_members(tmp_path, OTHERS, OTHERS, OTHERS)
    plan, nodes = nodes_of(parse_recipe(tiny(tmp_path, "fedavg", users=3, training__rounds=3)), tmp_path / "refusing")
    nodes["bob"] = Client(tmp_path / "bob", nodes["bob"].own.model_copy(update={"expects": {"base": "another"}}))
    channel = Direct(nodes)
    began = time.monotonic()
    run_federation(plan, channel, tmp_path / "refusing" / "server")
    assert time.monotonic() - began < 30
    assert len([r for r in caplog.records if "expects base another" in r.getMessage()]) <= 2
    assert_same_end_without(channel, reference, "bob")


class Hanging(Direct):
    """A worker that hangs: from some moment Bob stays connected and answers nothing; the others answer at once.

    As a channel that waits does, it follows the requests while it waits.
    """

    def __init__(self, nodes: Mapping[str, Client], hangs: Callable[[Task], bool]):
        super().__init__(nodes)
        self.hangs = hangs

    def exchange(self, requests: Mapping[str, bytes], *, timeout: float) -> Iterator[tuple[str, bytes | str]]:
        until, sent = time.monotonic() + timeout, dict[str, bytes]()
        while time.monotonic() < until:
            due = dict(requests)
            for name, task in due.items():
                if sent.get(name) is not task and not (name == "bob" and self.hangs(unpack_task(task))):
                    sent[name] = task
                    yield from super().exchange({name: task}, timeout=timeout)
            if not set(requests) - sent.keys():
                return
            time.sleep(0.02)
        for name in set(requests) - sent.keys():
            yield name, f"no reply within {timeout:g} s"


@pytest.mark.parametrize("step", ["join", "train"])
@pytest.mark.slow
def test_a_worker_that_hangs_holds_up_nobody_else(step: str, tmp_path: Path) -> None:
    """Hanging in its join or in a task, Bob is missing; whoever has answered counts."""
    content, patience = tiny(tmp_path, "fedavg", users=3, training__rounds=3), NetworkSection(min_participants=2)
    patience = patience.model_copy(update={"round_timeout": 2.0, "join_timeout": 5.0})
    plan, nodes = started(content, tmp_path / "hanging", patience)
    channel = Hanging(nodes, lambda task: step in task.todo)
    run_federation(plan, channel, tmp_path / "hanging" / "server")
    assert_same_end_without(channel, with_members(tmp_path, OTHERS, OTHERS, OTHERS), "bob")


def test_a_user_who_refuses_may_be_repaired_while_too_few_have_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comingle.federation.server_session._REFUSED_SECONDS", 0.1)
    content, patience = tiny(tmp_path, "fedavg", users=2), NetworkSection(min_participants=2, join_timeout=60)
    plan, nodes = started(content, tmp_path / "repaired", patience)
    honest = nodes["bob"]
    wrong = Client(tmp_path / "bob", honest.own.model_copy(update={"expects": {"base": "another"}}))
    refusals = 0

    class Repaired(Direct):
        def exchange(self, requests: Mapping[str, bytes], *, timeout: float) -> Iterator[tuple[str, bytes | str]]:
            nonlocal refusals
            for name, answer in super().exchange(requests, timeout=timeout):
                if name == "bob" and self.nodes["bob"] is wrong:
                    refusals += 1
                    self.nodes["bob"] = wrong if refusals < 2 else honest
                yield name, answer

    channel = Repaired(nodes | {"bob": wrong})
    metrics = run_federation(plan, channel, tmp_path / "repaired" / "server")
    assert refusals == 2
    assert sorted(metrics["users"]) == ["ann", "bob"]


def test_too_few_because_of_a_refusal_says_who_refused_and_why(tmp_path: Path) -> None:
    content, patience = tiny(tmp_path, "fedavg", users=2), NetworkSection(min_participants=2, join_timeout=0.3)
    plan, nodes = started(content, tmp_path / "refused", patience)
    nodes["bob"] = Client(tmp_path / "bob", nodes["bob"].own.model_copy(update={"expects": {"base": "another"}}))
    began = time.monotonic()
    with pytest.raises(RunError, match=r"^1 of 2 users .*needed: 2; .*0.3 s; user 'bob': .*base another"):
        run_federation(plan, Direct(nodes), tmp_path / "refused" / "server")
    assert time.monotonic() - began < 30


@pytest.mark.slow
def test_users_who_have_come_and_are_loading_are_waited_for_beyond_the_time(tmp_path: Path) -> None:
    """Each loads for longer than join_timeout."""
    content, patience = tiny(tmp_path, "fedavg", users=3), NetworkSection(min_participants=3, join_timeout=0.5)
    plan, nodes = started(content, tmp_path / "loading", patience)
    ready: dict[str, float] = {}

    class Loading(Direct):
        def exchange(self, requests: Mapping[str, bytes], *, timeout: float) -> Iterator[tuple[str, bytes | str]]:
            until = time.monotonic() + timeout
            due = dict(requests)
            for name in due:
                ready.setdefault(name, time.monotonic() + 1.5)
            while waiting := due.keys() - {name for name in due if time.monotonic() > ready[name]}:
                if time.monotonic() > until:
                    yield from ((name, f"no reply within {timeout:g} s") for name in sorted(waiting))
                    return
                time.sleep(0.02)
            yield from super().exchange(due, timeout=timeout)

    metrics = run_federation(plan, Loading(nodes), tmp_path / "loading" / "server")
    assert sorted(metrics["users"]) == ["ann", "bob", "cem"]


def test_a_user_who_has_lost_its_last_task_takes_part_again(tmp_path: Path) -> None:
    """As the line about a damaged checkpoint says: what is damaged is removed, and it goes on from what is whole."""
    plan, nodes = started(tiny(tmp_path, "fedavg", users=3, training__rounds=4), tmp_path / "lost", QUICK)
    channel = Losing(nodes)
    run_federation(plan, channel, tmp_path / "lost" / "server", observers=[channel.see])
    rounds = [unpack_task(task).round for who, task, _ in channel.recorded if who == "bob" and b'"train"' in task]
    assert rounds[-1] == 3
    noted = [event for event in told_in(tmp_path / "lost" / "server") if event["event"] == "noted"]
    assert [event["user"] for event in noted] == ["bob"]
    assert re.search(r"after task \d", noted[0]["what"])
    assert not unpack_answer([answer for who, _, answer in channel.recorded if who == "bob"][-1]).refused


class Losing(Unsteady):
    """Bob loses his newest checkpoint after the second round."""

    def see(self, event: Mapping[str, Any]) -> None:
        super().see(event)
        if event["event"] == "round" and event["round"] == 2:
            bob = self.nodes["bob"]
            newest = sorted(next(bob.folder.glob("run-*")).glob("checkpoints/round-*"))[-1]
            for path in newest.iterdir():
                path.unlink()
            newest.rmdir()
            self.nodes["bob"] = Client(bob.folder, bob.own)


# -------------------------------------------------------------------- wrong


class Lying(Direct):
    """Bob's answers are changed on the way, where he has trained."""

    def __init__(self, nodes: Mapping[str, Client], lie: Callable[[Answer], Answer | bytes], step: str = "train"):
        super().__init__(nodes)
        self.lie, self.step = lie, step

    def exchange(self, requests: Mapping[str, bytes], *, timeout: float) -> Iterator[tuple[str, bytes | str]]:
        for name, answer in super().exchange(requests, timeout=timeout):
            if name == "bob" and isinstance(answer, bytes) and self.step in unpack_task(requests[name]).todo:
                lie = self.lie(unpack_answer(answer))
                answer = lie.pack() if isinstance(lie, Answer) else lie
            yield name, answer


def of_upload(change: Callable[[Upload], Upload | bytes]) -> Callable[[Answer], Answer]:
    """An answer with another upload."""

    def lie(answer: Answer) -> Answer:
        upload = unpack(answer.messages[0])
        assert isinstance(upload, Upload)
        changed = change(upload)
        return replace(
            answer, messages=(changed if isinstance(changed, bytes) else pack(changed), *answer.messages[1:])
        )

    return lie


def of_tensors(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Answer], Answer]:
    """An upload whose first tensor is another."""

    def lie(upload: Upload) -> Upload:
        name, t = next(iter(upload.tensors.items()))
        return replace(upload, tensors={**upload.tensors, name: change(t)})

    return of_upload(lie)


def of_reports(**reports: Any) -> Callable[[Answer], Answer]:
    """An upload that reports something else; what is None is left out."""

    def lie(upload: Upload) -> Upload:
        merged = {**upload.reports, **reports}
        return replace(upload, reports={name: t for name, t in merged.items() if t is not None})

    return of_upload(lie)


UPLOADS: dict[str, Callable[[Answer], Answer]] = {
    "NaN": of_tensors(lambda t: torch.full_like(t, float("nan"))),
    "infinite": of_tensors(lambda t: torch.full_like(t, float("inf"))),
    "shape": of_tensors(lambda t: t[..., :-1]),
    "one dimension more": of_tensors(lambda t: t.unsqueeze(1)),
    "whole numbers": of_tensors(lambda t: t.long()),
    "complex": of_tensors(lambda t: t.half()),
    "missing": of_upload(lambda u: replace(u, tensors=dict(list(u.tensors.items())[1:]))),
    "strange": of_upload(lambda u: replace(u, tensors={**u.tensors, "more": torch.zeros(1, 2)})),
    "round": of_upload(lambda u: replace(u, round=u.round + 1)),
    "huge round": of_upload(lambda u: replace(u, round=10**40)),
    "name": of_upload(lambda u: replace(u, users=("ann",))),
    "rank": of_upload(lambda u: replace(u, ranks=torch.tensor([-1]))),
    "rank 0": of_upload(lambda u: replace(u, ranks=torch.tensor([0]))),
    "larger rank": of_upload(lambda u: replace(u, ranks=torch.tensor([1000]))),
    "no report": of_reports(count=None),
    "report of nothing": of_reports(evil=torch.ones(1)),
    "count 0": of_reports(count=torch.tensor([0])),
    "count below": of_reports(count=torch.tensor([-700])),
    "count that is NaN": of_reports(count=torch.tensor([float("nan")])),
    "counts": of_reports(count=torch.tensor([[1, 2, 3]])),
    "loss": of_reports(loss=torch.tensor([float("nan")])),
    "losses": of_reports(loss=torch.ones(1, 3)),
    "not a message": of_upload(lambda u: b"nothing"),
    "truncated": of_upload(lambda u: pack(u)[:-5]),
    "no message": lambda answer: replace(answer, messages=()),
}


def lying(
    folder: Path, lie: Callable[[Answer], Answer | bytes], *, step: str = "train", wait: float = 0.4, **options: Any
) -> Direct:
    content = tiny(folder, "fedavg", training__weighting="tokens", **options)
    plan, nodes = started(content, folder / "lying", NetworkSection(round_timeout=wait, join_timeout=0.4))
    channel = Lying(nodes, lie, step)
    run_federation(plan, channel, folder / "lying" / "server")
    return channel


@pytest.mark.slow
def test_an_upload_that_is_wrong_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another one in each round; the others have what they have without that user."""
    lies = list(UPLOADS.values())
    channel = lying(tmp_path, lambda answer: lies.pop(0)(answer), step="upload", training__rounds=len(lies) + 1)
    assert not lies
    rounds = {"training__participation": [["ann"]] * (len(UPLOADS) + 1), "training__weighting": "tokens"}
    content = tiny(tmp_path, "fedavg", training__rounds=len(UPLOADS) + 1, **rounds)
    assert_same_end(channel, federated(content, tmp_path / "without")[1], but="bob")
    lines = [r.getMessage() for r in caplog.records if "is left out of round" in r.getMessage()]
    assert [line.partition(":")[0] for line in lines] == [
        f"user 'bob' is left out of round {number}" for number in range(1, len(UPLOADS) + 1)
    ]
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize("name", ["fedavg", "pcl"])
def test_fewer_usable_uploads_than_the_least_change_nothing(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What would be made of one user's upload alone is that user's, and nobody else is to see it."""
    lie, events = UPLOADS["NaN"], list[dict[str, Any]]()
    plan, nodes = started(tiny(tmp_path, name, users=2, training__rounds=2), tmp_path / "least", QUICK)
    channel = Lying(nodes, lie, "upload")
    run_federation(plan, channel, tmp_path / "least" / "server", observers=[events.append])
    why = next(event["reason"] for event in events if event["event"] == "no_sum")
    assert re.match(r"round 1: .* 1; needed: 2 \(network.min_participants\)", why)
    assert why in caplog.messages
    sent = [unpack(data) for who, _, got in channel.recorded if who == "ann" for data in unpack_answer(got).messages]
    uploads = [message for message in sent if isinstance(message, Upload)]
    downloads = [
        unpack(data) for who, task, _ in channel.recorded if who == "bob" for data in unpack_task(task).messages
    ]
    assert uploads
    assert downloads or name == "pcl"  # of which nobody hears anything then
    for download in (one for one in downloads if isinstance(one, Download)):
        for key, t in download.tensors.items():
            assert not any(torch.equal(t.reshape(-1), u.tensors[key].reshape(-1)) for u in uploads if key in u.tensors)


def test_a_round_that_changed_nothing_says_nothing_of_the_rule(tmp_path: Path) -> None:
    """What the rule made of the round before is not told again."""
    events = list[dict[str, Any]]()
    content = tiny(tmp_path, "fedavg", users=3, training__rounds=3, aggregation={"rule": "median"})
    plan, nodes = started(
        content, tmp_path / "rule", NetworkSection(min_participants=3, round_timeout=5, join_timeout=5)
    )
    lies = iter([lambda answer: answer, UPLOADS["NaN"]])
    run_federation(
        plan, Lying(nodes, lambda a: next(lies)(a), "upload"), tmp_path / "rule" / "server", observers=[events.append]
    )
    assert [event["round"] for event in events if event["event"] == "aggregation"] == [1]
    assert [event["round"] for event in events if event["event"] == "no_sum"] == [2]


@pytest.mark.slow
def test_a_federation_from_before_templates_were_told_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = tiny(tmp_path, "fedavg", training__rounds=3)
    whole = federated(content, tmp_path / "whole")[1]
    plan, nodes = started(content, tmp_path / "older", QUICK)
    stops = Stopping(nodes)
    older = folders.digest_tokenizer
    with monkeypatch.context() as patch:
        for module in (folders, base):
            patch.setattr(module, "digest_tokenizer", lambda tokenizer: tokens_of(older(tokenizer)))
        for _ in range(12):
            with pytest.raises(Stopped):
                run_federation(plan, stops, tmp_path / "older" / "server", resume=bool(stops.recorded or stops.stops))
    assert ":" not in json.loads((tmp_path / "older" / "server" / "federation.json").read_text())["public"]["tokenizer"]
    assert list_checkpoints(tmp_path / "older" / "server")
    _, nodes = started(content, tmp_path / "older", QUICK)
    channel = Direct(nodes)
    run_federation(plan, channel, tmp_path / "older" / "server", resume=True)
    assert_same_end(channel, whole)


def test_metrics_are_there_before_anybody_hears_that_all_is_over(tmp_path: Path) -> None:
    class Stopping(Direct):
        def exchange(self, requests: Mapping[str, bytes], *, timeout: float) -> Iterator[tuple[str, bytes | str]]:
            if any("end" in unpack_task(task).todo for task in requests.values()):
                raise Stopped
            yield from super().exchange(requests, timeout=timeout)

    plan, nodes = started(tiny(tmp_path, "fedavg"), tmp_path / "end", QUICK)
    server = tmp_path / "end" / "server"
    with pytest.raises(Stopped):
        run_federation(plan, Stopping(nodes), server)
    before = (server / "metrics.json").read_bytes()
    assert list(json.loads(before)["users"]) == ["ann", "bob"]
    assert not has_ended(server)
    few = {"bob": nodes["bob"]}  # the other one has heard it, and has gone
    run_federation(
        replace(plan, network=QUICK.model_copy(update={"min_participants": 1})), Direct(few), server, resume=True
    )
    assert (server / "metrics.json").read_bytes() == before
    assert has_ended(server)
    assert list((tmp_path / "end" / "bob").glob("run-*/model/metrics.json"))


def of_words(**told: Any) -> Callable[[Answer], Answer]:
    """An answer that tells something else."""
    return lambda answer: replace(answer, reported={**answer.reported, **told})


NESTED: Any = []
for _ in range(50):
    NESTED = [NESTED]

WORDS: dict[str, Callable[[Answer], Answer | bytes]] = {
    "tokens as text": of_words(tokens="many"),
    "tokens below": of_words(tokens=-1),
    "huge tokens": of_words(tokens=10**40),
    "seconds as text": of_words(train_seconds="long"),
    "seconds below": of_words(train_seconds=-5),
    "loss as text": of_words(train_loss="low"),
    "loss that is true": of_words(train_loss=True),
    "nested": of_words(train_loss=NESTED),
    "score as text": of_words(score="good"),
    "score of text": of_words(score={"test_perplexity": "good"}),
    "score of nothing": of_words(score={"test_perplexity": None}),
    "metrics as text": of_words(metrics="good"),
    "metrics of lists": of_words(metrics={"test_perplexity": [1]}),
    "metrics by odd names": of_words(metrics={"\x1b[2J": 1}),
    "unknown measure": of_words(measure="beauty"),
    "measure as list": of_words(measure=["perplexity"]),
    "unknown word": of_words(evil=1),
    "refused as list": of_words(refused=["no"]),
    "evaluated as text": of_words(evaluated="yes"),
    "another's": lambda answer: replace(answer, user="ann"),
    "another task's": lambda answer: replace(answer, serial=7),
    "another run's": lambda answer: replace(answer, run="x" * 9000),
    "no answer": lambda answer: b"",
    "half an answer": lambda answer: answer.pack()[:-9],
    "NaN": lambda answer: words_of(answer, b"NaN"),
    "infinite": lambda answer: words_of(answer, b"1e999"),
    "deep": lambda answer: words_of(answer, b"[" * 200_000 + b"]" * 200_000),
    "huge": lambda answer: words_of(answer, b"1" * 10_000),
}


def words_of(answer: Answer, number: bytes) -> bytes:
    """An answer that says something as its time, by hand."""
    import struct
    import zlib

    data = replace(answer, reported={**answer.reported, "seconds": 12345.5}).pack()
    length = int.from_bytes(data[6:10], "little")
    header = data[14 : 14 + length].replace(b"12345.5", number)
    return struct.pack("<4sHII", data[:4], 1, len(header), zlib.crc32(header)) + header + data[14 + length :]


def test_words_that_are_wrong_end_nothing_but_an_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Bob says all of these one after the other when he is asked again, and then what he should."""
    lies = list(WORDS.values())
    channel = lying(tmp_path, lambda answer: lies.pop(0)(answer) if lies else answer, wait=60)
    assert not lies
    assert_same_end(channel, federated(tiny(tmp_path, "fedavg", training__weighting="tokens"), tmp_path / "true")[1])
    lines = [r.getMessage() for r in caplog.records if "user 'bob': " in r.getMessage()]
    assert len(lines) >= len(WORDS) - 2  # which are said alike
    assert all(line.isprintable() and len(line) < 600 for line in lines)


def test_what_a_user_says_is_one_line_in_logs_and_events(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lying(tmp_path, of_words(refused="no\nERROR: \x1b[31mall is lost\x1b[0m\r" + "x" * 10_000))
    lines = [r.getMessage() for r in caplog.records if "all is lost" in r.getMessage()]
    assert lines
    assert all(line.isprintable() and len(line) < 600 for line in lines)
    reasons = [event["reason"] for event in told_in(tmp_path / "lying" / "server") if event["event"] == "failed"]
    assert all(reason.isprintable() for reason in reasons)


@pytest.mark.parametrize(
    "lie",
    [
        of_words(measure="accuracy", score={"test_accuracy": 1.0}, metrics={"test_accuracy": 1.0}),
        pytest.param(of_words(score={"test_accuracy": 1.0}, metrics={}), marks=pytest.mark.slow),
        pytest.param(of_words(score={}, metrics={"test_perplexity": 1.0}), marks=pytest.mark.slow),
        of_words(score={}, metrics={"test_perplexity": None, "trainable_parameters": None}),
    ],
    ids=["another measure", "another score", "too few metrics", "empty metrics"],
)
def test_scores_of_another_measure_are_as_if_not_told(lie: Callable[[Answer], Answer], tmp_path: Path) -> None:
    plan, nodes = started(tiny(tmp_path, "fedavg", users=3), tmp_path / "lying", QUICK)
    channel = Lying(nodes, lie, step="evaluate")
    metrics = run_federation(plan, channel, tmp_path / "lying" / "server")
    assert metrics["measure"] == "perplexity"
    assert sorted(metrics["users"]) == ["ann", "cem"]
    for event in told_in(tmp_path / "lying" / "server"):
        assert "bob" not in event.get("users", {}) or event["event"] == "start"


@pytest.mark.parametrize(
    "value",
    [[float("nan")], *(pytest.param(v, marks=pytest.mark.slow) for v in ([1.0, 2.0], [float("inf")]))],
    ids=["NaN", "two", "infinite"],
)
def test_a_validation_loss_that_is_none_decides_nothing(value: list[float], tmp_path: Path) -> None:
    def lie(answer: Answer) -> Answer:
        report = unpack(answer.messages[-1])
        assert isinstance(report, Upload)
        wrong = torch.tensor(value, dtype=torch.float64)
        changed = replace(report, reports={"validation_loss": wrong if len(value) == 1 else wrong.unsqueeze(0)})
        return replace(answer, messages=(*answer.messages[:-1], pack(changed)))

    options = {"evaluation__select": "best", "evaluation__every": 1}
    plan, nodes = started(tiny(tmp_path, "fedavg", users=3, **options), tmp_path / "lying", QUICK)
    run_federation(plan, Lying(nodes, lie, step="evaluate"), tmp_path / "lying" / "server")
    losses = [
        event["mean_valid_loss"] for event in told_in(tmp_path / "lying" / "server") if "mean_valid_loss" in event
    ]
    assert losses
    assert all(0 < loss < 20 for loss in losses)


def test_words_of_one_who_joins_are_checked_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wrong = [{"steps": "many"}, {"steps": 10**30}, {"unit": "\n"}, {"amounts": {"train_tokens": "x"}}, {"done": -1}]
    lies = [of_words(**told) for told in wrong]
    plan, nodes = started(tiny(tmp_path, "fedavg"), tmp_path / "lying", NetworkSection(join_timeout=60))
    channel = Lying(nodes, lambda answer: lies.pop(0)(answer) if lies else answer, step="join")
    metrics = run_federation(plan, channel, tmp_path / "lying" / "server")
    assert not lies
    assert sorted(metrics["users"]) == ["ann", "bob"]
    assert len([r for r in caplog.records if r.getMessage().startswith("user 'bob': answer: ")]) == len(wrong)


# -------------------------------------------------------------------- what users do not tell


Tells = Literal["all", "losses", "nothing"]


@pytest.mark.parametrize(
    ("ann", "bob"), [("losses", "nothing"), pytest.param("all", "nothing", marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_what_is_not_told_is_absent_and_the_run_folder_is_readable(
    ann: Tells, bob: Tells, tmp_path: Path, comingle: Callable[..., CliAnswer]
) -> None:
    plan, nodes = nodes_of(parse_recipe(tiny(tmp_path, users=2)), tmp_path / "run")
    for name, tells in (("ann", ann), ("bob", bob)):
        nodes[name] = Client(nodes[name].folder, nodes[name].own.model_copy(update={"tells": tells}))
    metrics = run_federation(plan, Direct(nodes), tmp_path / "run" / "server")
    assert list(metrics["users"]) == (["ann"] if ann == "all" else [])
    events = told_in(tmp_path / "run" / "server")
    assert [list(each["train_loss_nats"]) for each in events if each["event"] == "round"] == [["ann"]] * 2
    for verb in ("show", "report", "plot") if ann == "losses" else ("show", "report"):
        answer = comingle(verb, tmp_path / "run" / "server")
        assert answer.code == 0, (verb, answer)
        assert "Traceback" not in answer.err
        if verb == "show":
            assert "not finite" not in answer.out
            assert "no training" not in answer.out
            assert "not reported to the server: results of" in answer.out
            assert metrics["untold"] == (["bob"] if ann == "all" else ["ann", "bob"])


def test_who_never_joined_is_told_apart_from_who_reports_nothing(tmp_path: Path) -> None:
    plan, nodes = nodes_of(parse_recipe(tiny(tmp_path, "fedavg", users=3)), tmp_path / "run")
    plan = replace(plan, network=NetworkSection(join_timeout=0.1))
    bob = Client(nodes["bob"].folder, nodes["bob"].own.model_copy(update={"tells": "nothing"}))
    metrics = run_federation(plan, Direct({"ann": nodes["ann"], "bob": bob}), tmp_path / "run" / "server")
    assert list(metrics["users"]) == ["ann"]
    assert metrics["untold"] == ["bob", "cem"]
    assert metrics["absent"] == ["cem"]


# -------------------------------------------------------------------- what users claim


def test_steps_that_no_user_of_the_recipe_can_have_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Everybody's learning rate would hardly decay; on text all take the steps of the recipe."""
    content, wrong = tiny(tmp_path, "fedavg"), [10_000_000, 2, 0]
    lies = [of_words(steps=number) for number in wrong]
    plan, nodes = started(content, tmp_path / "claims", NetworkSection(join_timeout=60))
    channel = Lying(nodes, lambda answer: lies.pop(0)(answer) if lies else answer, step="join")
    run_federation(plan, channel, tmp_path / "claims" / "server")
    assert not lies
    assert_same_end(channel, federated(content, tmp_path / "true")[1])
    lines = [r.getMessage() for r in caplog.records if "local steps" in r.getMessage()]
    assert re.match(r"user 'bob': answer: .*10,000,000 local steps; allowed: 1\b", lines[0])
    assert len(lines) == 2  # none at all is no number of steps


CHATS = {"prompt": "how much is 2 and 2?", "response": "it is 4, as far as I know"}


def chats(folder: Path, **changes: Any) -> dict[str, Any]:
    """Users with four conversations each, whose local steps are as many as their batches."""
    content = tiny(folder, "fedavg", **changes)
    for name in ("ann", "bob"):
        rows = [CHATS | {"prompt": f"{name} asks: how much is {number} and 2?"} for number in range(12)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    users = {name: f"{folder}/{name}.jsonl" for name in ("ann", "bob")}
    content["data"] = {"kind": "conversations", "users": users, "split": {"valid": 0.2, "test": 0.2}}
    del content["training"]["local_steps"]
    content["training"] |= {"context": 190, "batch_size": 4}
    return content


@pytest.mark.parametrize("weighting", [pytest.param("uniform", marks=pytest.mark.slow), "samples"])
def test_of_conversations_a_user_may_have_as_many_as_the_server_allows(
    weighting: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ann and Bob have 8 to train on, which is 2 batches."""
    content = chats(tmp_path, training__weighting=weighting)
    plan, nodes = started(content, tmp_path / "run", NetworkSection(max_samples=8, join_timeout=60))
    lies = [of_words(steps=3)]
    channel = Lying(nodes, lambda answer: lies.pop(0)(answer) if lies else answer, step="join")
    run_federation(plan, channel, tmp_path / "run" / "server")
    assert_same_end(channel, federated(content, tmp_path / "true")[1])
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("user ")]
    allowed = "allowed: up to 2 (network.max_samples is 8)"
    (line,) = lines
    assert line.startswith("user 'bob': answer: ")
    assert line.endswith(f" 3 local steps; {allowed}")


def test_weights_are_bounded_by_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = chats(tmp_path, training__weighting="samples")
    plan, nodes = started(content, tmp_path / "run", NetworkSection(max_samples=8))
    run_federation(plan, Lying(nodes, of_reports(count=torch.tensor([9])), step="upload"), tmp_path / "run" / "server")
    lines = [r.getMessage() for r in caplog.records if "is left out of round" in r.getMessage()]
    assert lines
    assert all("'count'" in line and line.endswith("1 to 8") for line in lines)


def test_a_recipe_names_the_net(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for user in ("ann", "bob"):
        inputs, targets = draw.normal(size=(30, 6)).astype(np.float32), draw.integers(3, size=30)
        np.savez(tmp_path / f"{user}.npz", inputs=inputs, targets=targets)
    content = {
        "base": "net:mlp",
        "method": "fedavg",
        "data": {"kind": "samples", "users": {user: f"{tmp_path}/{user}.npz" for user in ("ann", "bob")}},
        "training": {"rounds": 1, "batch_size": 8},
        "runtime": {"dtype": "float32", "device": "cpu", "threads": 1},
    }
    metrics, _ = federated(content, tmp_path / "run")
    assert set(metrics["users"]) == {"ann", "bob"}


def test_a_user_whose_steps_diverge_continues_from_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Local steps that diverge change neither the parameters nor the moments that the user had with the download."""
    real_train, real_step = client.train, client.TaskRunner._train
    before: list[State] = []
    restored: list[bool] = []

    def diverge_in_round_2(clients: Any, members: Any, number: int, tick: Any) -> Any:
        before.append(clients.state.copy())
        done = real_train(clients, members, number, tick)
        if number == 1 and clients.trainers[0].name == "ann":
            raise DivergenceError("user 'ann': not all tensors are finite")
        return done

    def train_and_compare(self: client.TaskRunner) -> None:
        real_step(self)
        if "left_out" in self.reported:
            now, then = self.clients.state.tensors(), before[-1].tensors()
            restored.append(all(torch.equal(now[name], then[name]) for name in then))

    monkeypatch.setattr(client, "train", diverge_in_round_2)
    monkeypatch.setattr(client.TaskRunner, "_train", train_and_compare)
    monkeypatch.setitem(client.TaskRunner.STEPS, "train", train_and_compare)
    content = tiny(tmp_path, training__rounds=3)
    _, channel = federated(content, tmp_path / "federation")
    assert restored == [True]
    assert any("not all tensors are finite" in str(said.get("left_out")) for said in channel.told)
