"""A server and clients by their commands, each a process: no network for a minute, and a user's disk that is full."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("flwr")

from tests.federation.proxy import Proxy
from tests.federation.test_federate import assert_equal, nothing_is_left, recipe_of

from comingle.config import Recipe
from comingle.federation.conditions import UPLOADS
from comingle.federation.files import save_plan, split_recipe
from comingle.federation.flower.processes import free_port
from comingle.federation.participant import Participant, save_participant
from comingle.federation.server_session import NetworkSection
from comingle.models.loading import load_base
from comingle.runs import api
from comingle.utils.records import read_events, read_metrics

pytestmark = pytest.mark.slow
__all__ = ["nothing_is_left"]  # around each of these tests too

SECONDS = 400


MAIN = "from comingle.cli import main; main()"


@contextmanager
def command(
    folder: Path, name: str, *arguments: object, start: Sequence[object] = (sys.executable, "-c", MAIN)
) -> Iterator[subprocess.Popen[bytes]]:
    """``comingle`` with some arguments; what it prints goes to ``NAME.txt``."""
    line = [str(word) for word in (*start, *arguments)]
    with (folder / f"{name}.txt").open("wb") as out:
        process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def wait_for(what: Callable[[], Any], *processes: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + SECONDS
    while not what():
        assert time.monotonic() < until
        assert all(process.poll() is None for process in processes)
        time.sleep(0.2)


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    with suppress(OSError):
        return [event for event in read_events(folder) if event["event"] == "round"]
    return []


@dataclass
class Place:
    """A federation's file, and how its commands are typed; users' own folders lie where ``federate`` puts them."""

    folder: Path
    users: dict[str, str]
    port: int = field(default_factory=free_port)

    @classmethod
    def of(cls, folder: Path, recipe: Recipe, patience: NetworkSection | None = None) -> Place:
        plan, _ = split_recipe(recipe, patience)
        save_plan(folder / "federation.yaml", plan)
        (folder / "apart" / "users").mkdir(parents=True, exist_ok=True)
        return cls(folder, {name: str(user.path) for name, user in recipe.data.users.items()})  # type: ignore[union-attr]

    def server(self) -> Sequence[object]:
        return "server", self.folder / "federation.yaml", "--out", self.folder / "apart", "--port", self.port

    def client(self, name: str, port: int) -> Sequence[object]:
        address, state = f"127.0.0.1:{port}", self.folder / "apart" / "users" / name
        return "client", "--name", name, "--data", self.users[name], "--server", address, "--state", state


def test_no_network_for_a_minute_loses_nothing(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "comigs-1g1s")
    api.run(recipe, out=tmp_path / "together")
    here = Place.of(tmp_path, recipe)
    with (
        Proxy(here.port) as proxy,
        command(tmp_path, "server", *here.server()) as server,
        command(tmp_path, "ann", *here.client("ann", proxy.own)) as ann,
        command(tmp_path, "bob", *here.client("bob", here.port)) as bob,
    ):
        wait_for(lambda: rounds_of(tmp_path / "apart"), server, ann, bob)
        proxy.cut()
        time.sleep(60)
        assert [process.poll() for process in (server, ann, bob)] == [None] * 3
        before = len(rounds_of(tmp_path / "apart"))
        assert before < 3  # they wait for her
        proxy.up = True
        assert server.wait(SECONDS) == 0
        assert [process.wait(60) for process in (ann, bob)] == [0, 0]
    assert_equal(tmp_path / "together", tmp_path / "apart")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MB, which needs root."""
    disk = tmp_path / "apart" / "users" / "bob"
    disk.mkdir(parents=True)
    if not shutil.which("mount") or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk]).returncode:
        pytest.skip("no right to mount a disk")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return filler


def test_a_user_whose_disk_is_full_is_named_and_takes_part_once_there_is_room(tmp_path: Path, small_disk: Path) -> None:
    recipe = recipe_of(tmp_path, "fedavg").with_changes({"training.rounds": 8})
    here = Place.of(tmp_path, recipe)
    with (
        command(tmp_path, "server", *here.server()) as server,
        command(tmp_path, "ann", *here.client("ann", here.port)) as ann,
        command(tmp_path, "bob", *here.client("bob", here.port)) as bob,
    ):
        wait_for(lambda: "bob has joined" in (tmp_path / "server.txt").read_text(), server, ann, bob)
        filler = fill(small_disk)
        wait_for(lambda: ["ann"] in present_in(tmp_path / "apart"), server, ann, bob)
        filler.unlink()
        assert server.wait(SECONDS) == 0
        assert [process.wait(60) for process in (ann, bob)] == [0, 0]
    assert "No space left on device" in (tmp_path / "bob.txt").read_text()
    assert "bob: " in (tmp_path / "server.txt").read_text()
    assert present_in(tmp_path / "apart")[-1] == ["ann", "bob"]
    assert read_metrics(tmp_path / "apart")["users"].keys() == {"ann", "bob"}


def line_of(folder: Path, name: str) -> str:
    """The last line that a command has printed."""
    return (folder / f"{name}.txt").read_text().rstrip("\n").rpartition("\n")[2]


def test_a_server_waits_no_longer_than_it_says_for_users_who_never_come(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "fedavg")
    here = Place.of(tmp_path, recipe, NetworkSection(min_participants=2, join_timeout=5.0))
    began = time.monotonic()
    with (
        command(tmp_path, "server", *here.server()) as server,
        command(tmp_path, "ann", *here.client("ann", here.port)) as ann,
    ):
        assert server.wait(SECONDS) == 2
        assert ann.poll() is None  # who waits for the server, as long as it likes
    assert time.monotonic() - began < 100
    assert "needed: 2; network.join_timeout is 5 s" in line_of(tmp_path, "server")
    assert "Traceback" not in (tmp_path / "server.txt").read_text()


def test_a_server_that_is_killed_goes_on_by_the_same_command(tmp_path: Path) -> None:
    """Clients stay where they are, and wait."""
    recipe = recipe_of(tmp_path, "comigs-1g1s")
    api.run(recipe, out=tmp_path / "together")
    here = Place.of(tmp_path, recipe)
    with (
        command(tmp_path, "ann", *here.client("ann", here.port)) as ann,
        command(tmp_path, "bob", *here.client("bob", here.port)) as bob,
    ):
        with command(tmp_path, "server", *here.server()) as server:
            wait_for(lambda: rounds_of(tmp_path / "apart"), server, ann, bob)
            server.kill()
        time.sleep(10)  # its processes end with it
        assert [process.poll() for process in (ann, bob)] == [None] * 2
        assert len(rounds_of(tmp_path / "apart")) < 3
        with command(tmp_path, "server again", *here.server()) as server:
            assert server.wait(SECONDS) == 0
        assert [process.wait(60) for process in (ann, bob)] == [0, 0]
    assert_equal(tmp_path / "together", tmp_path / "apart")


def test_too_few_in_a_round_end_the_run_in_one_line_and_the_same_commands_go_on(tmp_path: Path) -> None:
    """Bob and all his processes are killed behind the first round; he comes back when the server has given up."""
    recipe = recipe_of(tmp_path, "comigs-1g1s")
    api.run(recipe, out=tmp_path / "together")
    here = Place.of(tmp_path, recipe, NetworkSection(min_participants=2, round_timeout=20.0, join_timeout=120.0))
    with (
        command(tmp_path, "ann", *here.client("ann", here.port)) as ann,
        command(tmp_path, "bob", *here.client("bob", here.port)) as bob,
    ):
        with command(tmp_path, "server", *here.server()) as server:
            wait_for(lambda: rounds_of(tmp_path / "apart"), server, ann, bob)
            bob.kill()
            assert server.wait(SECONDS) == 2
        assert ann.poll() is None
        assert re.search(r"round \d+: 1 of 2 .*20 s; needed: 2; start .* again", line_of(tmp_path, "server"))
        assert "  bob: " in (tmp_path / "server.txt").read_text()  # when, who, and why
        with (
            command(tmp_path, "bob again", *here.client("bob", here.port)) as again,
            command(tmp_path, "server again", *here.server()) as server,
        ):
            assert server.wait(SECONDS) == 0
            assert [process.wait(60) for process in (ann, again)] == [0, 0]
    assert_equal(tmp_path / "together", tmp_path / "apart")


def present_in(folder: Path) -> list[list[str]]:
    return [sorted(event["train_loss_nats"]) for event in rounds_of(folder)]


def test_a_client_whose_base_is_missing_ends_with_the_reason_and_a_repaired_one_joins_at_once(tmp_path: Path) -> None:
    """The server names a folder, which a client never opens; the server waits for the repaired one."""
    recipe = recipe_of(tmp_path, "fedavg")
    base = load_base(recipe.base, dtype="float32", device="cpu")
    assert base.tokenizer is not None
    for folder in ("base", "base of bob"):
        base.model.save_pretrained(tmp_path / folder)
        base.tokenizer.save_pretrained(tmp_path / folder)
    recipe = recipe.with_changes({"base": str(tmp_path / "base")})
    here = Place.of(tmp_path, recipe, NetworkSection(min_participants=2, join_timeout=300))
    own = "--base", tmp_path / "base of bob"
    with (
        command(tmp_path, "server", *here.server()) as server,
        command(tmp_path, "ann", *here.client("ann", here.port), *own) as ann,
    ):
        with command(tmp_path, "bob", *here.client("bob", here.port)) as bob:
            assert bob.wait(SECONDS) == 2
        assert "`base`" in (tmp_path / "bob.txt").read_text()
        assert server.poll() is None
        with command(tmp_path, "bob again", *here.client("bob", here.port), *own) as again:
            assert server.wait(SECONDS) == 0
            assert [process.wait(60) for process in (ann, again)] == [0, 0]
    assert read_metrics(tmp_path / "apart")["users"].keys() == {"ann", "bob"}


def test_two_users_of_one_process_and_one_of_flowers_supernode(tmp_path: Path) -> None:
    """Users of one process share its base; the SuperNode starts a process for each message."""
    recipe = recipe_of(tmp_path, "comigs-1g1s", users=("ann", "bob", "cem")).with_changes({"training.rounds": 1})
    api.run(recipe, out=tmp_path / "together")
    here = Place.of(tmp_path, recipe)
    for name in ("ann", "bob"):
        state = tmp_path / "apart" / "users" / name
        save_participant(tmp_path / f"{name}.yaml", Participant(name=name, data=here.users[name], state=str(state)))
    both = "client", tmp_path / "ann.yaml", tmp_path / "bob.yaml", "--server", f"127.0.0.1:{here.port}"
    with (
        command(tmp_path, "server", *here.server()) as server,
        command(tmp_path, "both", *both) as household,
        command(tmp_path, "cem", *here.client("cem", here.port), "--supernode") as cem,
    ):
        assert server.wait(SECONDS) == 0, (tmp_path / "cem.txt").read_text()
        assert household.wait(60) == 0
        assert cem.poll() is None
    assert_equal(tmp_path / "together", tmp_path / "apart", ("ann", "bob", "cem"))
    said = (tmp_path / "both.txt").read_text()
    assert "ann: round 1: " in said
    assert "bob: round 1: " in said


def test_a_client_that_is_suspended_goes_on_when_it_is_resumed(tmp_path: Path) -> None:
    """As by the lid of a laptop; meanwhile its heartbeats time out."""
    recipe = recipe_of(tmp_path, "comigs-1g1s")
    api.run(recipe, out=tmp_path / "together")
    here = Place.of(tmp_path, recipe)
    with (
        command(tmp_path, "server", *here.server()) as server,
        command(tmp_path, "ann", *here.client("ann", here.port)) as ann,
        command(tmp_path, "bob", *here.client("bob", here.port)) as bob,
    ):
        wait_for(lambda: rounds_of(tmp_path / "apart"), server, ann, bob)
        os.kill(bob.pid, signal.SIGSTOP)
        wait_for(lambda: "bob disconnected" in (tmp_path / "server.txt").read_text(), server, ann)
        os.kill(bob.pid, signal.SIGCONT)
        assert server.wait(SECONDS) == 0
        assert [process.wait(60) for process in (ann, bob)] == [0, 0]
    assert_equal(tmp_path / "together", tmp_path / "apart")


def test_users_who_train_at_other_times_decline_or_wait_until_theirs(tmp_path: Path) -> None:
    """Bob waits until a minute that is near; the hours of the others are too late, also under Flower's SuperNode."""
    patience = NetworkSection(round_timeout=600.0)
    recipe = recipe_of(tmp_path, "comigs-1g1s", users=("ann", "bob", "cem"))
    here = Place.of(tmp_path, recipe, patience)
    soon, late = (datetime.now(UTC).astimezone() + timedelta(minutes=minutes) for minutes in (2, 180))
    near, far = (f"between {start:%H:%M}-{start + timedelta(hours=3):%H:%M}" for start in (soon, late))
    with (
        command(tmp_path, "server", *here.server()) as server,
        command(tmp_path, "ann", *here.client("ann", here.port), "--only-when", "plugged-in", "--only-when", far),
        command(tmp_path, "bob", *here.client("bob", here.port), "--only-when", near, "--nice", 3) as bob,
        command(tmp_path, "cem", *here.client("cem", here.port), "--only-when", far, "--supernode"),
    ):
        wait_for(lambda: "paused" in (tmp_path / "bob.txt").read_text(), server, bob)
        assert psutil.Process(bob.pid).nice() == min(19, os.nice(0) + 3)
        assert server.wait(SECONDS) == 0, (tmp_path / "server.txt").read_text()
        assert bob.wait(60) == 0
    events = read_events(tmp_path / "apart")
    declined = {(event["user"], event["reason"]) for event in events if event["event"] == "declined"}
    line = f"declined: outside {far.removeprefix('between ')}"
    assert declined == {("ann", line), ("cem", line)}
    assert {tuple(event["train_loss_nats"]) for event in rounds_of(tmp_path / "apart")} == {("bob",)}
    assert f"ann: {line}" in (tmp_path / "server.txt").read_text()
    assert line in (tmp_path / "ann.txt").read_text()
    said = (tmp_path / "bob.txt").read_text()
    assert said.index(f"paused: outside {near.removeprefix('between ')}") < said.index("training continues after")
    assert not list((tmp_path / "apart" / "users" / "bob").glob(UPLOADS))  # nothing is counted without a limit
