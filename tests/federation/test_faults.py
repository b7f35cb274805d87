"""Users who come and go as they like or send what they should not, each in a process of its own: the others go on.

Of whoever was in its rounds the tensors in the end are equal in every bit to those of one process with the same users
in each round. Only clients' answers are changed, in ``faulty/faults.py``; all else is as people run it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr")

from tests.federation.test_federate import nothing_is_left
from tests.federation.tiny import method, text_recipe

from comingle.config import Recipe, parse_recipe
from comingle.federation.client import REVERTED_NOTICE
from comingle.federation.files import save_plan, split_recipe
from comingle.federation.flower.client import LOG as CLIENT_LOG
from comingle.federation.flower.client import ClientProcess
from comingle.federation.flower.processes import FOLDER, read_status
from comingle.federation.flower.server import SuperLink, supervise
from comingle.federation.flower.server_app import encode_names
from comingle.federation.participant import Participant, save_participant
from comingle.federation.server_session import NetworkSection
from comingle.runs import api
from comingle.utils.files import list_checkpoints
from comingle.utils.records import read_events

pytestmark = pytest.mark.slow
__all__ = ["nothing_is_left"]  # around each of these tests too

FAULTY_COMMAND = [sys.executable, str(Path(__file__).with_name("faulty") / "faulty_client.py"), "client"]
LIMIT_SECONDS = 500


class Federation:
    """A recipe's federation; ``faults`` are those of users by name, and then by round (from 1)."""

    def __init__(
        self, folder: Path, recipe: Recipe, patience: NetworkSection, faults: dict[str, dict[int, str]]
    ) -> None:
        self.folder, self.run_folder, self.said = folder, folder / "run", list[str]()
        self.plan, owns = split_recipe(recipe, patience)
        folder.mkdir()
        save_plan(folder / "federation.yaml", self.plan)
        self.link = SuperLink(
            folder=self.run_folder,
            say=self.said.append,
            run_config={"federation": str(folder / "federation.yaml"), "users": encode_names(self.plan.users)},
        )
        self.clients = {own.name: self.client(own.name, folder / "users" / own.name) for own in owns}
        for own in owns:
            state = folder / "users" / own.name
            content: dict[str, Any] = own.model_dump(exclude_defaults=True) | {"runtime": {"threads": 1}}
            save_participant(state / "participant.yaml", Participant(**content, state="."))
            (state / "faults.json").write_text(json.dumps(faults.get(own.name, {})))
        self.peak_bytes = 0

    def client(self, name: str, state: Path) -> ClientProcess:
        file = self.folder / "users" / name / "participant.yaml"
        command = [*FAULTY_COMMAND, str(file), "--server", self.link.address, "--state", str(state)]
        return ClientProcess(name=name, state=state, command=command, say=self.said.append)

    def run(self, here: set[str], beside: Callable[[], None] = lambda: None) -> None:
        """Run it with those who are ``here``, which ``beside`` may change."""
        began = time.monotonic()

        def keep_running() -> None:
            assert time.monotonic() - began < LIMIT_SECONDS, self.said
            for name in here:
                self.clients[name].keep_running()
            self.peak_bytes = max(self.peak_bytes, self.memory_of_the_server())
            beside()

        try:
            supervise(self.link, keep_running)
        finally:
            for client in self.clients.values():
                client.stop()

    def memory_of_the_server(self) -> int:
        """The most that the server's process has ever had, in bytes."""
        state = read_status(self.run_folder)
        try:
            lines = Path(f"/proc/{state.process.pid}/status").read_text() if state else ""
        except OSError:
            return 0
        return next((int(line.split()[1]) << 10 for line in lines.splitlines() if line.startswith("VmHWM")), 0)

    @property
    def rounds(self) -> list[set[str]]:
        """Whose uploads each round has taken in so far."""
        events = list(read_events(self.run_folder)) if (self.run_folder / "events.jsonl").exists() else []
        rejected = {(event["round"], event["user"]) for event in events if event["event"] == "rejected"}
        return [
            {name for name in event["train_loss_nats"] if (event["round"], name) not in rejected}
            for event in events
            if event["event"] == "round"
        ]

    def reasons(self, name: str) -> list[str]:
        """What the server has said of a user that went wrong."""
        lines = [line.partition(": ") for line in self.said]
        return [why for who, _, why in lines if who == name]

    def told(self, name: str) -> list[str]:
        """What a user's client has said on its own machine."""
        return (self.folder / "users" / name / FOLDER / CLIENT_LOG).read_text().splitlines()


def recipe_of(folder: Path, rounds: int, users: Sequence[str]) -> Recipe:
    content = text_recipe(folder, method("comigs-1g1s"))
    content["data"]["users"] = {user: content["data"]["users"][user] for user in users}
    content["training"] |= {"rounds": rounds, "local_steps": 2}
    content["evaluation"] = {"every": rounds, "first": False}
    content["runtime"]["users_per_step"] = 1
    return parse_recipe(content)


def assert_as_in_one_process(federation: Federation, folder: Path, recipe: Recipe, names: Sequence[str]) -> None:
    """These users have what they have in one process in whose rounds the same users take part."""
    users = federation.plan.users
    members = [sorted(each) for each in federation.rounds]
    api.run(recipe.with_changes({"training.participation": members}), out=folder / "together")
    rows = load_file(list_checkpoints(folder / "together")[-1] / "state.safetensors")
    for name in names:
        (state,) = (federation.folder / "users" / name).glob("run-*")
        mine = load_file(list_checkpoints(state)[-1] / "state.safetensors")
        for key, t in rows.items():
            if not key.startswith("server/"):
                assert torch.equal(mine[key], t[users.index(name) :: len(users)]), (name, key)


WRONG: dict[int, tuple[str, str]] = {
    2: ("truncated", r"message: got \d+ bytes, header says \d{1,9};"),
    3: ("another version", "format 2; allowed: 1"),
    4: ("wrong shapes", "has shape"),
    5: ("NaN", "is not finite"),
    6: ("message of 10 GB", "header says 100000"),
    7: ("tensor of 10 GB", "message: not a valid"),
    8: ("answer of 10 GB", "declares 100000"),
    9: ("answer cut off", r"answer: got \d+ bytes; its header declares \d{1,9}$"),
}
"""Fault of each round, and a pattern of its reason; sizes of fewer than ten digits are those of ordinary messages."""


def test_what_one_user_sends_wrong_harms_nobody_else(tmp_path: Path) -> None:
    """Another fault in each round; before and behind them Cem takes part like everybody."""
    rounds, users = len(WRONG) + 2, ("ann", "bob", "cem")
    recipe = recipe_of(tmp_path, rounds, users)
    faults = {"cem": {number: fault for number, (fault, _) in WRONG.items()}}
    federation = Federation(tmp_path / "apart", recipe, NetworkSection(round_timeout=10.0, join_timeout=120.0), faults)
    federation.run(set(users))
    assert federation.rounds == [set(users), *([{"ann", "bob"}] * len(WRONG)), set(users)]
    assert_as_in_one_process(federation, tmp_path, recipe, ["ann", "bob"])
    reasons = federation.reasons("cem")
    assert all(line.isprintable() and len(line) < 500 for line in reasons)
    for fault, why in WRONG.values():
        assert [line for line in reasons if re.search(why, line)], (fault, reasons)
    assert not federation.reasons("ann")
    assert 0 < federation.peak_bytes < 2 << 30


def test_users_who_come_late_are_late_or_never_come_back(tmp_path: Path) -> None:
    """Bob's second answer comes too late, Cem comes in the middle, Dan is killed and does not come back.

    Somebody else who calls herself Ann is sent away.
    """
    users = ("ann", "bob", "cem", "dan")
    recipe = recipe_of(tmp_path, 8, users)
    faults = {"bob": {2: "waits"}, "ann": {3: "waits"}}
    patience = NetworkSection(min_participants=2, round_timeout=40.0, join_timeout=240.0)
    federation = Federation(tmp_path / "apart", recipe, patience, faults)
    other, here = federation.client("ann", tmp_path / "another ann"), {"ann", "bob", "dan"}

    def meanwhile() -> None:
        done = federation.rounds
        if done:
            other.keep_running()
        if len(done) >= 2:  # of which Bob has missed one; who comes during a round takes part in it
            let_go(federation, "bob")
            here.add("cem")
        if any(line == "cem connected" for line in federation.said):
            let_go(federation, "ann")
        if done and "cem" in done[-1] and "dan" in here:
            here.remove("dan")
            kill(federation, "dan")

    try:
        federation.run(here, meanwhile)
    finally:
        other.stop()
    rounds = federation.rounds
    assert rounds[0] == {"ann", "bob", "dan"}
    assert rounds[1] == {"ann", "dan"}
    assert rounds[-1] == {"ann", "bob", "cem"}
    assert_as_in_one_process(federation, tmp_path, recipe, ["ann", "bob", "cem"])
    assert federation.reasons("bob")[0].endswith(" 40 s")
    # Flower gives up a client without heartbeats, by its clock before or after the end of the round.
    assert federation.reasons("dan")[0].endswith((" 40 s", "connection lost"))
    assert not federation.reasons("ann")
    assert any(line.endswith(REVERTED_NOTICE) for line in federation.told("bob"))
    reason = other.refusal.removeprefix("ann's client: ")
    assert re.match("refused: ann: .*connected client", reason)
    assert federation.said.count(reason) == 1


def let_go(federation: Federation, name: str) -> None:
    (federation.folder / "users" / name / "go").touch()


def kill(federation: Federation, name: str) -> None:
    os.kill(federation.clients[name].service.pid, signal.SIGKILL)


def tensors_of(run: Path) -> dict[str, torch.Tensor]:
    found = load_file(list_checkpoints(run)[-1] / "state.safetensors")
    return {name: t for name, t in found.items() if not name.startswith("server/")}


def summed(folder: Path) -> Recipe:
    """Two rounds of three users, whose server sees sums alone."""
    changes: dict[str, Any] = {"privacy": {"mechanism": "none", "secure_aggregation": {}}}
    changes |= {"evaluation.model": "exchanged", "training.experts.schedule": "constant"}
    return recipe_of(folder, 2, ("ann", "bob", "cem")).with_changes(changes)


def killed_in(step: str, lost: set[str], federation: Federation) -> list[dict[str, Any]]:
    """The events of a run in whose second round these users are killed when they have been asked for a step."""
    here = {"ann", "bob", "cem"}

    def meanwhile() -> None:
        for name in sorted(here & lost):
            if (federation.folder / "users" / name / "waiting").exists():
                here.remove(name)
                kill(federation, name)

    federation.run(here, meanwhile)
    assert here == {"ann", "bob", "cem"} - lost
    return list(read_events(federation.run_folder))


@pytest.mark.parametrize("step", ["share", "mask"])
def test_who_is_killed_before_its_mask_is_off_is_not_in_the_sum(step: str, tmp_path: Path) -> None:
    """The others end in every bit as in one process without it in that round."""
    recipe, patience = summed(tmp_path), NetworkSection(round_timeout=15.0, join_timeout=120.0)
    federation = Federation(tmp_path / "apart", recipe, patience, {"bob": {2: f"waits in {step}"}})
    events = killed_in(step, {"bob"}, federation)
    assert not [event for event in events if event["event"] == "no_sum"]
    listed = recipe.with_changes({"training.participation": [["ann", "bob", "cem"], ["ann", "cem"]]})
    api.run(listed, out=tmp_path / "together")
    together = tensors_of(tmp_path / "together")
    for at, name in ((0, "ann"), (2, "cem")):
        (state,) = (federation.folder / "users" / name).glob("run-*")
        mine = tensors_of(state)
        assert [key for key, t in together.items() if not torch.equal(mine[key], t[at : at + 1])] == [], name


def test_when_too_many_are_killed_nothing_is_summed_and_the_model_stays(tmp_path: Path) -> None:
    recipe, patience = summed(tmp_path), NetworkSection(round_timeout=15.0, join_timeout=120.0)
    faults = {name: {2: "waits in mask"} for name in ("bob", "cem")}
    federation = Federation(tmp_path / "apart", recipe, patience, faults)
    (found,) = [e for e in killed_in("mask", {"bob", "cem"}, federation) if e["event"] == "no_sum"]
    assert found["round"] == 2
    assert re.match(r"round 2: 1 of 3 users .*'mask'; needed: 2;", found["reason"])
    api.run(recipe.with_changes({"training.rounds": 1}), out=tmp_path / "together")
    (state,) = (federation.folder / "users" / "ann").glob("run-*")
    mine, together = tensors_of(state), tensors_of(tmp_path / "together")
    shared = [name for name in together if name.startswith("user/") and "self_attn" in name]
    assert shared
    assert [name for name in shared if not torch.equal(mine[name][0], together[name][0])] == []
    specialist = "user/layers.0.mlp.up.a"  # has gone on by a round
    assert torch.equal(mine[specialist][0, 0], together[specialist][0, 0])
    assert not torch.equal(mine[specialist][0, 1], together[specialist][0, 1])
