"""A user leaves a federation: the server is without it, and the clients of the others go on."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.commands import comingle as comingle
from tests.federation.direct import Direct, federated, nodes_of
from tests.federation.test_continued_federations import continued, of_users, recipe_of, states_of
from tests.federation.test_continuous_federations import ANN, BOB, CEM, Federation

from comingle.config import parse_recipe
from comingle.federation import server_app
from comingle.federation.files import change_participants, load_plan, save_plan
from comingle.federation.messages import unpack_task
from comingle.federation.run_folder import run_federation
from comingle.federation.server_app import (
    complete_certificates,
    finish_removals,
    plan_server_removal,
    remove_from_server,
    run_federation_app,
)
from comingle.runs.folders import certificates_of
from comingle.runs.leaving import STATEMENTS
from comingle.training.checkpoints import digest_of_checkpoint, digest_of_tensors
from comingle.utils.errors import RecipeError, RunError
from comingle.utils.files import list_checkpoints, locked
from comingle.utils.records import read_events, read_metrics

STRANGE = "O'Neil % 1/2"
"""A name that is escaped in names of folders, and quoted in a shell."""


def leave(federation: Federation, user: str, mode: str) -> dict[str, Any]:
    certificate = remove_from_server(plan_server_removal(federation.out, user, mode))  # type: ignore[arg-type]
    federation.server = federation.open()
    return certificate


def assert_same_server(one: Path, other: Path) -> None:
    """The same tensors on both servers, bit for bit, and the same scores."""
    from safetensors.torch import load_file

    (mine,), (theirs,) = ([*list_checkpoints(run)[-1].glob("*.safetensors")] for run in (one, other))
    tensors, expected = load_file(mine), load_file(theirs)
    assert tensors.keys() == expected.keys()
    assert [name for name, t in tensors.items() if not torch.equal(t, expected[name])] == []
    assert read_metrics(one)["users"] == read_metrics(other)["users"]


def assert_no_traces(folder: Path, user: str) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "left.json":
            assert user.encode() not in path.read_bytes(), path


def with_cem_in_the_second_run(folder: Path, *, name: str, with_cem: bool) -> Federation:
    federation = Federation(folder, ANN, BOB, name=name)
    federation.write(CEM)
    assert federation.run_due()
    federation.write(ANN)
    federation.write(BOB)
    if with_cem:
        change_participants(federation.file, add=[CEM])
        federation.channel.nodes[CEM] = federation.client(CEM)
        assert federation.run_due()
        assert CEM in federation.trained(2)
        federation.write(ANN)
        assert federation.run_due()
    else:
        federation.write(ANN)
    return federation


@pytest.mark.parametrize("name", ["comigs-1g1s", pytest.param("pcl", marks=pytest.mark.slow)])
def test_exact_is_bit_for_bit_a_federation_without_the_user(name: str, tmp_path: Path) -> None:
    """cem came with the second run of three: the first one is kept, and its state on the clients."""
    federation = with_cem_in_the_second_run(tmp_path / "with", name=name, with_cem=True)
    never = with_cem_in_the_second_run(tmp_path / "never", name=name, with_cem=False)
    first = (federation.out / "0001" / "metrics.json").read_bytes()
    removal = plan_server_removal(federation.out, CEM, "exact")
    assert [run.name for run in removal.runs] == ["0002", "0003"]
    assert removal.rounds == federation.recipe["training"]["rounds"]
    assert "connected" in removal.notes[0]
    certificate = leave(federation, CEM, "exact")
    assert (federation.out / "0001" / "metrics.json").read_bytes() == first
    assert sorted(path.name for path in federation.out.glob("[0-9]*")) == ["0001", "0001.yaml"]
    assert certificate["statement"] == STATEMENTS["exact"]
    assert certificate["checkpoint_after"] != certificate["checkpoint_before"]
    assert certificate["rounds_trained_again"] is None
    assert_no_traces(federation.out, CEM)
    complete_certificates(federation.out)
    assert certificates_of(federation.out) == [certificate]  # nothing is trained again yet

    assert CEM in yaml.safe_load(federation.file.read_text())["participants"]  # nevertheless refused
    for each in (federation, never):
        assert each.run_due()
        assert each.trained(2) == {ANN, BOB}
    assert_same_server(federation.out / "0002", never.out / "0002")
    (completed,) = certificates_of(federation.out)
    assert completed["rounds_trained_again"] == certificate["rounds_to_train_again"]
    assert completed["tensors_after"] == digest_of_tensors(list_checkpoints(never.out / "0002")[-1])
    assert completed["checkpoint_after"] == digest_of_checkpoint(list_checkpoints(federation.out / "0002")[-1])
    assert completed["date_trained_again"] >= completed["date"]
    mine, theirs = states_of(federation.channel), states_of(never.channel)
    for user in (ANN, BOB):
        assert all(torch.equal(t, theirs[user][key]) for key, t in mine[user].items())
        assert len(list((tmp_path / "with" / user).glob("run-*"))) == 2  # those with cem are deleted
    assert sum("a user has left" in line for line in federation.said) == 2
    federation.write(BOB)
    assert federation.run_due()
    assert federation.trained(3) == {BOB}
    assert certificates_of(federation.out) == [completed]
    with pytest.raises(RunError, match="has left"):
        plan_server_removal(federation.out, CEM, "exact")


def test_exact_from_the_beginning_trains_all_text_again(tmp_path: Path) -> None:
    federation, never = Federation(tmp_path / "with", ANN, BOB, CEM), Federation(tmp_path / "never", ANN, CEM)
    assert federation.run_due()
    for each in (federation, never):
        each.write(ANN)
    assert federation.run_due()
    certificate = leave(federation, BOB, "exact")
    assert certificate["checkpoint_after"] is None
    for each in (federation, never):
        assert each.run_due()
    assert_same_server(federation.out / "0001", never.out / "0001")
    assert_no_traces(federation.out, BOB)


@pytest.mark.slow
def test_clients_that_have_lost_the_run_before_start_as_new_users(tmp_path: Path) -> None:
    federation = with_cem_in_the_second_run(tmp_path, name="comigs-1g1s", with_cem=True)
    for _ in range(2):
        federation.write(ANN)
        assert federation.run_due()
    removal = plan_server_removal(federation.out, CEM, "exact")
    assert any("start as new users" in note for note in removal.notes)
    leave(federation, CEM, "exact")
    federation.said.clear()
    assert federation.run_due()
    assert federation.trained(2) == {ANN, BOB}
    assert sum("starts as a new user" in line for line in federation.said) >= 2


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("comigs-1g1s", "fedmerge", "floral", "ifca")]


@pytest.mark.parametrize("name", ["pcl", *SLOW])
def test_forward_keeps_the_others_and_nothing_of_the_user(name: str, tmp_path: Path) -> None:
    federation = with_cem_in_the_second_run(tmp_path, name=name, with_cem=True)
    traces = [path for path in federation.out.rglob("*.json") if CEM in path.read_text()]
    assert traces
    metrics, before = read_metrics(federation.out / "0003"), states_of(federation.channel)
    removal = plan_server_removal(federation.out, CEM, "forward")
    assert [run.name for run in removal.runs] == ["0002", "0003"]
    certificate = leave(federation, CEM, "forward")
    assert certificate["statement"] == STATEMENTS["forward"]
    assert_no_traces(federation.out, CEM)
    assert not list(federation.out.glob(".*.leaving"))
    assert read_metrics(federation.out / "0003")["users"] == {user: metrics["users"][user] for user in (ANN, BOB)}
    assert load_plan(federation.out / "0003.yaml").users == (ANN, BOB)

    federation.write(BOB)
    assert federation.run_due()
    start = next(event for event in read_events(federation.out / "0004") if event["event"] == "start")
    assert start["continues"]["kept"] == [ANN, BOB]
    assert federation.trained(4) == {BOB}
    after = states_of(federation.channel)[ANN]
    ann = federation.channel.nodes[ANN]._store
    assert ann is not None
    local = ~ann.clients.model.layout.mask(ann.clients.method.shared)
    assert torch.equal(after["rows"][:, local], before[ANN]["rows"][:, local])


STEPS = ("_record", "_delete", "_delete_run", "copy_server_without", "finish_replacement", "save_plan", "_delete_logs")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "forward"])
def test_an_interrupted_removal_is_repeated(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before every single step; the server and the same command both continue."""
    whole = with_cem_in_the_second_run(tmp_path / "whole", name="pcl", with_cem=True)

    class Killed(BaseException):
        """As kill -9."""

    def killed_before(step: int, folder: Path) -> bool:
        calls = 0

        def counting(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == step:
                    raise Killed
                return original(*arguments, **options)

            return call

        removal = plan_server_removal(folder, CEM, mode)  # type: ignore[arg-type]
        with monkeypatch.context() as patch:
            for name in STEPS:
                patch.setattr(server_app, name, counting(getattr(server_app, name)))
            patch.setattr(Path, "rename", counting(Path.rename))
            patch.setattr(Path, "unlink", counting(Path.unlink))
            patch.setattr(shutil, "rmtree", counting(shutil.rmtree))
            try:
                remove_from_server(removal)
            except Killed:
                return True
        return False

    step = 0
    while True:
        step += 1
        folder = tmp_path / f"killed {step}" / "out"
        shutil.copytree(whole.out, folder)
        if not killed_before(step, folder):
            break
        with suppress(RunError):  # if the plan has completed the removal
            remove_from_server(plan_server_removal(folder, CEM, mode))  # type: ignore[arg-type]
        with pytest.raises(RunError, match="has left"):
            plan_server_removal(folder, CEM, mode)  # type: ignore[arg-type]
        assert_no_traces(folder, CEM)
        assert not [path for path in folder.iterdir() if path.name.startswith((".0", "flower"))]
        numbers = ["0001"] if mode == "exact" else ["0001", "0002", "0003"]
        assert sorted(path.name for path in folder.glob("[0-9]*") if path.is_dir()) == numbers
        assert sorted(path.stem for path in folder.glob("[0-9]*.yaml")) == numbers
        (certificate,) = json.loads((folder / "left.json").read_text())["left"]
        assert certificate["mode"] == mode
        if mode == "exact":
            assert len(certificate["deleted_runs"]) >= 2
    assert step > 6


@pytest.mark.slow
def test_a_server_that_starts_after_a_kill_finishes_the_removal(tmp_path: Path, monkeypatch: Any) -> None:
    federation = with_cem_in_the_second_run(tmp_path, name="pcl", with_cem=True)
    removal = plan_server_removal(federation.out, CEM, "exact")
    with monkeypatch.context() as patch:
        patch.setattr(server_app, "finish_removals", lambda folder: None)  # killed before it
        remove_from_server(removal)
    assert federation.server.last_planned == 3
    finish_removals(federation.out)
    assert federation.server.last_planned == 1
    assert federation.run_due()
    assert federation.trained(2) == {ANN, BOB}


# ---------------------------------------------------------------- one run


def test_a_single_run_is_trained_again_from_the_same_file(tmp_path: Path) -> None:
    """The server is started again with its file, which still names ben; the text of the others is as it was."""
    content = recipe_of(tmp_path / "texts")
    users = list(content["data"]["users"])
    _metrics, channel = federated(content, tmp_path / "with")
    without = of_users(content, users[0], users[2])
    _metrics, never = federated(without, tmp_path / "never")
    server = tmp_path / "with" / "server"
    removal = plan_server_removal(server, users[1], "exact")
    assert removal.runs == (server,)
    remove_from_server(removal)
    assert [path.name for path in server.iterdir() if not path.name.startswith(".")] == ["left.json"]
    plan, _nodes = nodes_of(parse_recipe(content), tmp_path / "with")
    save_plan(tmp_path / "federation.yaml", plan)
    run_federation_app(channel, {"federation": str(tmp_path / "federation.yaml")}, server, lambda line: None)
    assert_same_server(server, tmp_path / "never" / "server")
    for user in (users[0], users[2]):
        mine, theirs = states_of(channel)[user], states_of(never)[user]
        assert all(torch.equal(t, theirs[key]) for key, t in mine.items())
        assert len(list((tmp_path / "with" / user).glob("run-*"))) == 1  # the old one is deleted
    (certificate,) = certificates_of(server)
    assert certificate["user"] == users[1]
    assert certificate["rounds_trained_again"] == content["training"]["rounds"]
    assert certificate["tensors_after"] == digest_of_tensors(list_checkpoints(tmp_path / "never" / "server")[-1])


def test_a_single_run_is_continued_after_forward(tmp_path: Path) -> None:
    content = recipe_of(tmp_path / "texts")
    users = list(content["data"]["users"])
    federated(content, tmp_path / "with")
    server = tmp_path / "with" / "server"
    remove_from_server(plan_server_removal(server, users[0], "forward"))
    assert_no_traces(server, users[0])
    rest = of_users(content, users[1], users[2])
    metrics, channel = continued(rest, tmp_path / "with", tmp_path / "later")
    assert set(metrics["users"]) == set(users[1:])
    assert all("deleted" not in unpack_task(task).arguments for _, task, _ in channel.recorded)


def test_a_chain_of_federations_is_emptied_from_the_first_with_the_user(tmp_path: Path) -> None:
    content = recipe_of(tmp_path / "texts")
    ann, bob, cem = content["data"]["users"]
    federated(of_users(content, ann, bob), tmp_path / "with")
    continued(content, tmp_path / "with", tmp_path / "later")
    removal = plan_server_removal(tmp_path / "later", cem, "exact")
    assert removal.runs == (tmp_path / "later",)
    removal = plan_server_removal(tmp_path / "later", ann, "exact")
    assert [run.name for run in removal.runs] == ["server", "later"]
    assert removal.rounds == 2 * content["training"]["rounds"]
    remove_from_server(removal)
    for folder in removal.runs:
        assert [path.name for path in folder.iterdir() if not path.name.startswith(".")] == ["left.json"]


def test_removals_that_are_refused(tmp_path: Path) -> None:
    federation = Federation(tmp_path, ANN, BOB)
    assert federation.run_due()
    with pytest.raises(RunError, match="no user"):
        plan_server_removal(federation.out, CEM, "exact")
    with pytest.raises(RunError, match="name that folder"):
        plan_server_removal(federation.out / "0001", BOB, "exact")
    (federation.out / "flower").mkdir()
    removal = plan_server_removal(federation.out, BOB, "exact")
    with locked(federation.out / "flower"), pytest.raises(RunError):  # the server is running
        remove_from_server(removal)
    assert not (federation.out / "left.json").exists()
    (federation.out / "0001" / "users").mkdir()
    with pytest.raises(RecipeError, match="federate"):
        plan_server_removal(federation.out, BOB, "exact")


# ---------------------------------------------------------------- the command


def test_the_key_of_a_user_who_leaves_is_deleted(comingle: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    federation, keys = Federation(tmp_path, ANN, BOB), tmp_path / "keys"
    assert federation.run_due()
    assert comingle("server", federation.file, "--make-certificates", keys).code == 0
    with_bob = sorted(path.name for path in (keys / "users").iterdir())
    assert with_bob == ["ann.key", "ann.pub", "bob.key", "bob.pub"]
    wrong = comingle("leave", federation.out, "--user", BOB, "--certificates", tmp_path / "texts")
    assert (wrong.code, "--make-certificates" in wrong.err) == (2, True)
    wrong = comingle("leave", tmp_path / BOB, "--user", BOB, "--certificates", keys)
    assert (wrong.code, "folder of a server" in wrong.err) == (2, True)
    shown = comingle("leave", federation.out, "--user", BOB, "--certificates", keys)
    assert "bob.pub" in shown.out
    assert sorted(path.name for path in (keys / "users").iterdir()) == with_bob
    command = shown.out.rpartition("to do it: comingle ")[2].strip()
    done = comingle(*shlex.split(command))
    assert done.code == 0, done.err
    assert sorted(path.name for path in (keys / "users").iterdir()) == ["ann.key", "ann.pub"]
    (certificate,) = certificates_of(federation.out)
    assert certificate["deleted"][-2:] == [str(keys / "users" / name) for name in ("bob.pub", "bob.key")]


def test_files_that_have_replaced_copies_of_text_are_named_and_kept(
    comingle: Callable[..., Any], tmp_path: Path
) -> None:
    federation, state = Federation(tmp_path, ANN, BOB), tmp_path / BOB
    assert federation.run_due()
    copy = next(path for path in state.glob("run-*/data/*/*") if path.is_file())
    digest = hashlib.sha256(copy.read_bytes()).hexdigest()
    copy.write_text("something else")
    beside = copy.with_name("new.txt")
    beside.write_text("also something else")
    for code in (0, 2):  # the second time from the certificate alone, and there is nothing to delete
        done = comingle("leave", state, "--user", BOB, "--yes")
        assert done.code == code, done.err
        left = [path for path in state.glob("run-*/**/*") if path.is_file()]
        assert sorted(left) == sorted([copy, beside])

    (certificate,) = certificates_of(state)
    assert certificate["copies"] == {str(copy.relative_to(state)): digest}
    names = [str(path.relative_to(state)) for path in sorted([copy, beside])]
    assert certificate["not_deleted"] == names
    assert not set(names) & set(certificate["deleted"])


def test_the_command_on_both_machines(comingle: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    federation = Federation(tmp_path, ANN, BOB)
    assert federation.run_due()
    shown = comingle("leave", federation.out, "--user", BOB)
    assert shown.code == 0, shown.err
    assert "nothing is changed" in shown.out
    assert "2 rounds" in shown.out
    assert (federation.out / "0001" / "metrics.json").exists()
    done = comingle("leave", federation.out, "--user", BOB, "--yes", "--mode", "forward")
    assert done.code == 0, done.err
    assert STATEMENTS["forward"] in done.out
    again = comingle("leave", federation.out, "--user", BOB, "--yes", "--mode", "forward")
    assert (again.code, "has left" in again.err) == (2, True)

    state = tmp_path / BOB
    runs = list(state.glob("run-*"))
    assert runs
    wrong = comingle("leave", state, "--user", ANN)
    assert (wrong.code, "bob" in wrong.err) == (2, True)
    assert comingle("leave", state, "--user", BOB).code == 0
    assert all(run.exists() for run in runs)
    done = comingle("leave", state, "--user", BOB, "--yes")
    assert done.code == 0, done.err
    assert list(state.glob("run-*")) == []
    (certificate,) = json.loads((state / "left.json").read_text())["left"]
    assert certificate["checkpoints_before"]
    assert certificate["deleted"]


def test_a_name_that_needs_escaping(comingle: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    content = recipe_of(tmp_path / "texts")
    sources = list(content["data"]["users"].values())
    content["data"]["users"] = dict(zip(("ann", STRANGE, "cem"), sources, strict=True))
    plan, nodes = nodes_of(parse_recipe(content), tmp_path / "states")
    server = tmp_path / "server"
    run_federation(plan, Direct(nodes), server)
    shown = comingle("leave", server, "--user", STRANGE, "--mode", "forward")
    assert shown.code == 0, shown.err
    command = shown.out.rpartition("to do it: comingle ")[2].strip()
    done = comingle(*shlex.split(command))
    assert done.code == 0, done.err
    assert_no_traces(server, "Neil")
