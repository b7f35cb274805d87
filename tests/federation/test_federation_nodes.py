"""A user's node: each task once, whatever happens on the way, and nothing else than what it is for."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.federation.direct import federated
from tests.federation.tiny import (
    answer_of,
    assert_equal,
    changed,
    download_in,
    kept_in,
    one_base,
    own_of,
    refusal,
    said,
    tasks_of,
    tensors_of,
    tiny,
    with_message,
)

from comingle.federation.client import REVERTED_NOTICE, Client
from comingle.federation.client_command import EndCondition
from comingle.federation.messages import Task, unpack_answer
from comingle.federation.participant import Own
from comingle.federation.public import ENDED, read_public
from comingle.utils.errors import MessageError
from comingle.utils.trees import Tree


class Case:
    """A federation that was run once: Ann's own part, what she was asked, and what she had in the end."""

    def __init__(self, folder: Path):
        self.content = tiny(folder, training__rounds=3)
        _, self.channel = federated(self.content, folder / "whole")
        self.own: Own = own_of(self.content, "ann", tells="all")
        self.tasks: list[Task] = tasks_of(self.channel, "ann")
        self.answers = [unpack_answer(answer) for who, _, answer in self.channel.recorded if who == "ann"]
        self.ended: Tree = tensors_of(self.channel.nodes["ann"])

    def node(self, folder: Path, tasks: int = 0) -> Client:
        """Ann's node, once it has joined and done so many tasks."""
        node = Client(folder, self.own)
        for task in self.tasks[: tasks + 1]:
            assert not answer_of(node, task).refused
        return node

    def go_on(self, node: Client) -> None:
        """Have a node do all; it ends as the whole run did."""
        for task, answer in zip(self.tasks, self.answers, strict=True):
            assert said(answer_of(node, task)) == said(answer)
        assert_equal(tensors_of(node), self.ended)


@pytest.fixture(autouse=True, scope="module")
def base() -> Iterator[None]:
    with one_base():
        yield


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def begun(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Ann's after two tasks."""
    folder = tmp_path_factory.mktemp("begun") / "ann"
    case.node(folder, 2)
    return folder


@pytest.fixture
def folder(begun: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    return Path(shutil.copytree(begun, tmp_path / "ann"))


def run_folder(folder: Path) -> Path:
    return next(folder.glob("run-*"))


# -------------------------------------------------------------------- once


def test_a_task_twice_is_the_same_answer_and_no_work(case: Case, folder: Path) -> None:
    node, before = Client(folder, case.own), kept_in(folder)
    first = [node.handle(task.pack()) for task in case.tasks[1:3]]
    assert [node.handle(task.pack()) for task in case.tasks[1:3]] == first
    assert kept_in(folder) == before
    case.go_on(node)


def test_the_folder_of_another_user_is_refused(case: Case, folder: Path) -> None:
    """What is private in it would be this user's from then on, without a word."""
    bob = Client(folder, own_of(case.content, "bob"))
    join = replace(case.tasks[0], user="bob")
    before = kept_in(folder)
    assert refusal(bob, join).startswith("user 'bob': ")
    assert kept_in(folder) == before


def test_other_data_than_the_run_was_begun_with_is_refused(case: Case, folder: Path, tmp_path: Path) -> None:
    before = kept_in(folder)
    other = tmp_path / "other.txt"
    other.write_text("Something else altogether, with a zebra. " * 200)
    node, lines = Client(folder, case.own.model_copy(update={"data": str(other)})), []
    node.say = lines.append
    assert refusal(node, case.tasks[0]).startswith("user 'ann': ")
    assert any("'ann': the train and valid and test data " in line for line in lines)
    assert kept_in(folder) == before
    case.go_on(Client(folder, case.own))


def test_who_joined_with_the_wrong_data_may_bring_the_right_before_anything_is_done(case: Case, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("Something else altogether, with a zebra. " * 200)
    wrong = Client(tmp_path / "ann", case.own.model_copy(update={"data": str(other)}))
    assert not answer_of(wrong, case.tasks[0]).refused
    right = Client(tmp_path / "ann", case.own)
    assert not answer_of(right, case.tasks[0]).refused
    for task in case.tasks[1:]:
        assert not answer_of(right, task).refused
    assert_equal(tensors_of(right), case.ended)


def test_an_answer_without_its_state_is_gone_once_another_task_is_done(
    case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who was killed between the two would else be told later that the first task was done."""
    task = next(task for task in case.tasks[3:] if "receive" in task.todo)
    download = download_in(task)
    other = with_message(task, replace(download, tensors={name: 2 * t for name, t in download.tensors.items()}))
    left = run_folder(folder) / "answers" / f"{task.serial:06d}-0123456789abcdef.bin"
    left.write_bytes(b"of a process that was killed")
    node = Client(folder, case.own)
    for earlier in case.tasks[2 : case.tasks.index(task)]:
        node.handle(earlier.pack())
    left.write_bytes(b"of a process that was killed")
    assert not answer_of(node, other).refused
    assert not left.exists()


def test_another_task_of_the_same_number_undoes_the_first(case: Case, folder: Path, tmp_path: Path) -> None:
    task = next(task for task in case.tasks[3:] if "receive" in task.todo)
    download = download_in(task)
    other = with_message(task, replace(download, tensors={name: 2 * t for name, t in download.tensors.items()}))
    node, never = Client(folder, case.own), Client(Path(shutil.copytree(folder, tmp_path / "never")), case.own)
    assert said(answer_of(node, task)) != said(answer_of(never, other))
    assert said(answer_of(node, other)) == said(answer_of(never, other))
    assert_equal(tensors_of(node), tensors_of(never))
    case.go_on(Client(folder, case.own))


def test_what_is_older_than_what_is_kept_is_refused_and_nothing_is_lost(case: Case, tmp_path: Path) -> None:
    content = tiny(tmp_path, "pcl", users=2, training__rounds=4)
    _, channel = federated(content, tmp_path / "whole")
    node, tasks = channel.nodes["ann"], tasks_of(channel, "ann")
    assert len(tasks) > 6
    before = kept_in(tmp_path / "whole" / "ann")
    for task in tasks[1:3]:
        assert "'ann' can revert" in refusal(node, replace(task, arguments={**task.arguments, "other": 1}))
    assert kept_in(tmp_path / "whole" / "ann") == before


def test_a_task_too_many_is_refused(case: Case, folder: Path) -> None:
    assert "task 4 for user 'ann'; allowed: 3" in refusal(Client(folder, case.own), replace(case.tasks[3], serial=4))


# -------------------------------------------------------------------- what is not for it


@pytest.mark.parametrize("run", ["../x", "", "a/b", "..", "a" * 300, "é", "run-1"])
def test_a_run_is_a_short_word(case: Case, tmp_path: Path, run: str) -> None:
    node = Client(tmp_path / "ann", case.own)
    with pytest.raises(MessageError, match=r"^task: .*64"):
        node.handle(replace(case.tasks[0], run=run).pack())
    assert not list(tmp_path.iterdir())


def test_somebody_elses_task_is_refused(case: Case, tmp_path: Path) -> None:
    with pytest.raises(MessageError, match=r"^task: .*'bob'.*'ann'$"):
        Client(tmp_path, case.own).handle(replace(case.tasks[0], user="bob").pack())


def test_a_refusal_to_join_is_told_to_the_client_and_a_full_disk_is_not(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client ends with what has to be changed first, and goes on with what may pass."""
    told: list[str] = []
    own = case.own.model_copy(update={"expects": {"base": "another"}})
    refusal(Client(tmp_path / "unfit", own, refuse=told.append), case.tasks[0])
    assert len(told) == 1
    assert "expects base another" in told[0]

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("comingle.federation.client.open_store", full)
    refusal(Client(tmp_path / "full", case.own, refuse=told.append), case.tasks[0])
    assert len(told) == 1


def test_a_client_that_cannot_take_part_ends_unless_it_is_to_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comingle.federation.client_command.LINGER_SECONDS", 0.1)
    ends, stays = EndCondition(stays=False), EndCondition(stays=True)
    assert not ends.has_ended("")
    for condition in (ends, stays):
        condition.refuse("base: not here")
    assert not ends.has_ended("")  # the server is to hear of it first
    time.sleep(0.2)
    assert ends.has_ended("")
    assert ends.reason == "cannot take part: base: not here"
    assert not stays.has_ended("")
    assert stays.has_ended("the key is not registered")
    assert stays.reason == "the key is not registered"


def test_a_run_that_was_not_joined_is_refused(case: Case, tmp_path: Path) -> None:
    said = refusal(Client(tmp_path, case.own), case.tasks[1])
    assert f"run {case.tasks[1].run}: user 'ann'" in said
    assert "it joins again before its next task" in said


def wrong_tasks(task: Task) -> dict[str, tuple[Task, str]]:
    """Tasks that no server of ours sends, and what is said of them."""
    download = download_in(task)
    name, t = next(iter(download.tensors.items()))

    def tensors(**changes: torch.Tensor | None) -> Task:
        merged = {**download.tensors, **{key.replace("__", "."): value for key, value in changes.items()}}
        return with_message(task, replace(download, tensors={k: v for k, v in merged.items() if v is not None}))

    def about(**changes: Any) -> Task:
        return replace(task, arguments={**task.arguments, **changes})

    nan = t.clone()
    nan.view(-1)[0] = float("nan")
    key = name.replace(".", "__")
    upload = unpack_answer_upload(task)
    return {
        "unknown step": (replace(task, todo=("receive", "delete")), "no step 'delete'"),
        "no steps": (replace(task, todo=()), "task: no step; allowed: join"),
        "a step twice": (replace(task, todo=("receive", "train", "train")), "task: got step 'train'"),
        "missing message": (replace(task, messages=()), "0 messages"),
        "message too many": (replace(task, messages=task.messages * 2), "2 messages"),
        "upload": (with_message(task, upload), "allowed: a download"),
        "verdict": (replace(task, todo=("hear", *task.todo[1:])), "'lowest_loss' for user 'ann'"),
        "not a message": (with_message(task, b"hello"), "message: got 5 bytes"),
        "truncated": (with_message(task, task.messages[0][:-1]), f"{len(task.messages[0]) - 1} bytes"),
        "changed": (with_message(task, task.messages[0][:-1] + b"\x01"), "checksum"),
        "shape": (tensors(**{key: t[..., :-1]}), f"tensor {name!r} has shape {(*t.shape[2:-1], t.shape[-1] - 1)}"),
        "two models": (tensors(**{key: torch.cat([t, t], 1)}), "got [1, 2] models"),
        "no model": (
            with_message(task, replace(download, tensors={n: v[:, :0] for n, v in download.tensors.items()})),
            "got [0] models",
        ),
        "missing tensor": (tensors(**{key: None}), "has shape None"),
        "strange tensor": (tensors(other=t.clone()), "tensor 'other'"),
        "NaN": (tensors(**{key: nan}), f"tensor {name!r} is not finite"),
        "whole numbers": (tensors(**{key: t.long()}), f"tensor {name!r} is int64"),
        "another's": (with_message(task, replace(download, users=("bob",))), "download: got one for user 'bob'"),
        "rank": (with_message(task, replace(download, ranks=torch.tensor([-1]))), "rank -1"),
        "version": (with_message(task, replace(download, version=10**30)), f"version {10**30}; allowed: 0 to 3"),
        "senders": (with_message(task, replace(download, senders=("eve",))), "senders ['eve']"),
        "round": (replace(task, round=10**30), f"round is '{10**30}'"),
        "round below": (replace(task, round=-1), "round is '-1'"),
        "steps": (about(local_steps=10**30), f"local_steps is '{10**30}'"),
        "other steps": (about(local_steps=2), "task: local_steps is 2; allowed: 1"),
        "steps as text": (about(local_steps="many"), "local_steps is 'many'"),
        "done": (about(done="all"), "done is 'all'"),
        "done below": (about(done=-1), "done is '-1'"),
    }


def unpack_answer_upload(task: Task) -> bytes:
    """A download's tensors as an upload."""
    from comingle.protocol.messages import Upload
    from comingle.protocol.wire import pack

    download = download_in(task)
    tensors = {name: t[:, 0] for name, t in download.tensors.items()}
    return pack(Upload(round=1, users=("ann",), tensors=tensors, ranks=download.ranks))


WRONG = (
    "unknown step",
    "no steps",
    "a step twice",
    "missing message",
    "message too many",
    "upload",
    "verdict",
    "not a message",
    "truncated",
    "changed",
    "shape",
    "two models",
    "no model",
    "missing tensor",
    "strange tensor",
    "NaN",
    "whole numbers",
    "another's",
    "rank",
    "version",
    "senders",
    "round",
    "round below",
    "steps",
    "other steps",
    "steps as text",
    "done",
    "done below",
)


@pytest.fixture(scope="module")
def used(case: Case, begun: Path, tmp_path_factory: pytest.TempPathFactory) -> Client:
    """A node of Ann's after two tasks, of which many ask in vain."""
    return Client(Path(shutil.copytree(begun, tmp_path_factory.mktemp("used") / "ann")), case.own)


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_task_is_refused_in_one_line_and_leaves_the_state(case: Case, used: Client, what: str) -> None:
    task = next(task for task in case.tasks[3:] if "receive" in task.todo)
    wrong = wrong_tasks(task)
    assert wrong.keys() == set(WRONG)
    assert answer_of(used, case.tasks[2]).messages == case.answers[2].messages
    before, kept = {name: t.clone() for name, t in tensors_of(used).items()}, kept_in(used.folder)
    bad, line = wrong[what]
    assert line in refusal(used, bad)
    assert_equal(tensors_of(used), before)
    assert kept_in(used.folder) == kept


def test_after_all_of_these_it_goes_on_as_if_nothing_had_been(case: Case, used: Client) -> None:
    for wrong, _ in wrong_tasks(next(task for task in case.tasks[3:] if "receive" in task.todo)).values():
        refusal(used, wrong)
    case.go_on(used)


@pytest.mark.parametrize(
    "data",
    [b"", b"CMGT", b"\x00" * 100, b"CMGT" + b"\xff" * 40],
    ids=["empty", "magic", "zeros", "ones"],
)
def test_bytes_that_are_no_task_are_refused(case: Case, tmp_path: Path, data: bytes) -> None:
    with pytest.raises(MessageError, match=r"^task: "):
        Client(tmp_path, case.own).handle(data)


def test_a_task_of_another_format_or_cut_off_is_refused(case: Case, tmp_path: Path) -> None:
    data, node = case.tasks[3].pack(), Client(tmp_path, case.own)
    with pytest.raises(MessageError, match=r"^task: .*format 9; allowed: 1$"):
        node.handle(data[:4] + b"\x09\x00" + data[6:])
    for size in (5, 30, len(data) // 2, len(data) - 1):
        with pytest.raises(MessageError, match=r"^task: "):
            node.handle(data[:size])


# -------------------------------------------------------------------- another federation


def test_who_is_known_is_told_of_another_recipe_with_both_digests(case: Case, folder: Path) -> None:
    public = case.tasks[0].arguments["public"]
    other = changed(case.tasks[0], recipe={**public["recipe"], "seed": 7})
    told = refusal(Client(folder, case.own), other)
    digests = (read_public(task.arguments["public"]).digest for task in (case.tasks[0], other))
    assert all(digest in told for digest in digests)


@pytest.mark.parametrize(
    ("what", "value", "line"),
    [
        ("base", "0" * 64, "base: the server has 0000"),
        ("tokenizer", "0" * 64, "tokenizer: the server has 0000"),
        ("users", ["bob", "cem"], "allowed: bob, cem"),
        ("users", "ann", "users"),
        ("users", [1, 2], "users"),
        ("format", 9, "format 9"),
        ("version", "0.0.1", "version 0.0.1"),
        ("version", 3, "version"),
        ("recipe", [], "recipe"),
        ("recipe", {}, "recipe"),
        ("recipe", {"data": 5}, "recipe"),
        ("settings", [], "settings"),
        ("secret", 1, "secret"),
    ],
)
def test_another_federation_is_refused_with_both_values(
    case: Case, tmp_path: Path, what: str, value: Any, line: str
) -> None:
    node = Client(tmp_path / "ann", case.own)
    assert line in refusal(node, changed(case.tasks[0], **{what: value}))
    assert not list(tmp_path.rglob("*"))


def test_another_base_is_named_on_both_sides_but_the_own_one_to_the_user_only(case: Case, tmp_path: Path) -> None:
    lines: list[str] = []
    node = Client(tmp_path / "ann", case.own, say=lines.append)
    public = case.tasks[0].arguments["public"]
    told = refusal(node, changed(case.tasks[0], base="0" * 64))
    assert told.startswith("base: ")
    assert "0" * 8 in told
    assert "0" * 9 not in told
    assert public["base"][:8] in told
    assert repr(public["recipe"]["base"]) in told
    assert lines[-1].startswith(told)
    assert "this client's base is" in lines[-1].removeprefix(told)


@pytest.mark.parametrize(
    ("tells", "seen", "unseen"),
    [
        (None, "tells: scores", "mean weights"),
        ("all", "mean weights", "no losses"),
        ("losses", "training losses", "test scores"),
        ("nothing", "tells: nothing", "training losses"),
    ],
)
def test_who_joins_is_shown_which_numbers_the_server_sees(
    case: Case, tmp_path: Path, tells: str | None, seen: str, unseen: str
) -> None:
    lines: list[str] = []
    node = Client(tmp_path / "ann", case.own.model_copy(update={"tells": tells}), say=lines.append)
    assert not answer_of(node, case.tasks[0]).refused
    (line,) = (line for line in lines if "(tells: " in line)
    assert line.startswith("user 'ann': ")
    assert seen in line
    assert unseen not in line
    assert "--tells" in line


@pytest.mark.parametrize("about", [{}, {"public": None}, {"public": []}, {"public": "x"}])
def test_a_join_that_says_nothing_is_refused(case: Case, tmp_path: Path, about: dict[str, Any]) -> None:
    assert "the federation" in refusal(Client(tmp_path, case.own), replace(case.tasks[0], arguments=about))


def test_what_is_expected_must_be(case: Case, tmp_path: Path) -> None:
    for what in ("recipe", "base"):
        node = Client(tmp_path, own_of(case.content, "ann", expects={what: "abc"}))
        assert f"'ann': expects {what} abc" in refusal(node, case.tasks[0])


# -------------------------------------------------------------------- what its user hears


def test_a_user_hears_what_leaves_and_after_each_task_how_much_has_left(case: Case, tmp_path: Path) -> None:
    heard: list[str] = []
    node = Client(tmp_path / "ann", case.own, say=heard.append)
    sizes = [len(node.handle(task.pack())) for task in case.tasks]
    home = node._store
    assert home is not None
    (upload,) = home.clients.upload_bytes()
    leaves, _, stays = heard[0].partition(";")
    assert leaves.startswith(f"user 'ann': attention, generalist ({upload:,} bytes) ")
    assert stays.startswith(" router, specialist, ")
    rounds = [f"round {number + 1}: {size:,} bytes " for number, size in enumerate(sizes[1:4])]
    assert [line.startswith(start) for line, start in zip(heard[2:5], rounds, strict=True)] == [True] * 3
    assert heard[-1].startswith(f"{ENDED}; {home.folder / 'model'} ")
    assert len(heard) == len(case.tasks) + 1  # two lines when it joins: tensors, and numbers


def test_it_hears_that_what_was_sent_last_does_not_count(case: Case, folder: Path) -> None:
    heard: list[str] = []
    node, task = Client(folder, case.own, say=heard.append), case.tasks[3]
    node.handle(task.pack())
    node.handle(replace(task, arguments={**task.arguments, "other": 1}).pack())
    assert heard.count(REVERTED_NOTICE) == 1


# -------------------------------------------------------------------- many runs


def test_a_server_that_begins_run_after_run_does_not_fill_the_disk(case: Case, tmp_path: Path) -> None:
    heard: list[str] = []
    node = Client(tmp_path, case.own.model_copy(update={"max_runs": 3}), say=heard.append)
    for number in range(3):
        assert not answer_of(node, replace(case.tasks[0], run=f"run{number}")).refused
    (tmp_path / "run-run1" / "model").mkdir()  # as of one that has ended
    kept = kept_in(tmp_path)
    told = refusal(node, replace(case.tasks[0], run="another"))
    assert told.startswith("user 'ann': ")
    assert str(tmp_path) not in told
    assert heard[-1].startswith(f"{tmp_path}: has 3 runs")
    assert "max_runs" in heard[-1]
    assert f"`rm -r {tmp_path / 'run-run1'}`" in heard[-1]
    assert kept_in(tmp_path) == kept
    assert not answer_of(node, replace(case.tasks[0], run="run2")).refused  # which is known
    shutil.rmtree(tmp_path / "run-run1")  # as it says
    assert not answer_of(node, replace(case.tasks[0], run="another")).refused
    assert "the oldest" in line_of_one_more(node, case, heard)


def line_of_one_more(node: Client, case: Case, heard: list[str]) -> str:
    refusal(node, replace(case.tasks[0], run="more"))
    return heard[-1]


# -------------------------------------------------------------------- killed


class Snapshots:
    """Copies of a folder just before everything that changes what is on disk."""

    def __init__(self, folder: Path, into: Path, patch: pytest.MonkeyPatch):
        self.folder, self.into, self.made = folder, into, 0
        for place, name in (
            (os, "replace"),
            (os, "rename"),
            (os, "fsync"),
            (os, "unlink"),
            (shutil, "rmtree"),
            (os, "mkdir"),
        ):
            patch.setattr(place, name, self._before(getattr(place, name)))

    def _before(self, real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.made += 1
            subprocess.run(["cp", "-r", self.folder, self.into / f"{self.made:03d}"], check=True)
            return real(*args, **options)

        return call


def test_killed_before_any_change_of_the_disk_it_goes_on_bit_for_bit(
    case: Case, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = next(task for task in case.tasks[3:] if "receive" in task.todo)
    other = replace(task, arguments={**task.arguments, "other": 1})  # which is undone: that changes files too
    node, into = Client(folder, case.own), tmp_path / "snapshots"
    node.handle(case.tasks[0].pack())
    into.mkdir()
    with monkeypatch.context() as patch:
        snapshots = Snapshots(folder, into, patch)
        node.handle(other.pack())
        node.handle(task.pack())
    assert snapshots.made > 10
    for each in sorted(into.iterdir()):
        again = Client(each, case.own)
        answer = answer_of(again, task)
        assert said(answer) == said(case.answers[task.serial]), each.name
        assert_equal(tensors_of(again), tensors_of(node))
        leftovers = [p for p in each.rglob(".*") if p.name not in (".lock",)]
        assert not leftovers, each.name


KILLED = """
import sys, json
from pathlib import Path
import torch
from comingle.training import client as local
from comingle.federation.client import Client
from comingle.federation.participant import Own
torch.set_num_threads(1)
folder, tasks = Path(sys.argv[1]), Path(sys.argv[2])
node = Client(folder, Own(**json.loads(sys.argv[3])))
work = local._take_local_steps
def slow(*args):
    print("training", flush=True)
    return work(*args[:-1], lambda: (print("a step", flush=True), sys.stdin.readline()))
for path in sorted(tasks.iterdir()):
    local._take_local_steps = slow if path.name == sys.argv[4] else work
    node.handle(path.read_bytes())
"""


@pytest.mark.slow
def test_a_process_that_is_killed_in_training_goes_on_bit_for_bit(case: Case, tmp_path: Path) -> None:
    tasks, folder = tmp_path / "tasks", tmp_path / "ann"
    tasks.mkdir()
    for task in case.tasks:
        (tasks / f"{task.serial:03d}").write_bytes(task.pack())
    killed = next(task for task in case.tasks[2:] if "train" in task.todo)
    command = [
        sys.executable,
        "-c",
        KILLED,
        str(folder),
        str(tasks),
        case.own.model_dump_json(),
        f"{killed.serial:03d}",
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["training\n", "a step\n"]
        process.send_signal(signal.SIGKILL)
    case.go_on(Client(folder, case.own))


# -------------------------------------------------------------------- damage


def test_a_damaged_checkpoint_is_one_line_that_says_what_to_do(case: Case, folder: Path) -> None:
    newest = sorted((run_folder(folder) / "checkpoints").iterdir())[-1]
    (newest / "state.safetensors").write_bytes(b"\x00" * 100)
    heard: list[str] = []
    node = Client(folder, case.own, say=heard.append)
    told = refusal(node, case.tasks[3])
    assert str(folder) not in told  # which is nobody else's business
    assert "damaged" in heard[-1]
    assert f"`rm -r {newest}`" in heard[-1]
    assert "comingle run --resume" not in heard[-1]
    shutil.rmtree(newest)  # as it says
    case.go_on(Client(folder, case.own))


def test_a_damaged_answer_is_made_anew(case: Case, folder: Path) -> None:
    for path in (run_folder(folder) / "answers").iterdir():
        path.write_bytes(path.read_bytes()[:-3])
    case.go_on(Client(folder, case.own))


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"users": 3}', "\x00"])
def test_what_is_known_of_a_run_may_be_damaged(case: Case, folder: Path, content: str) -> None:
    (run_folder(folder) / "public.json").write_text(content)
    heard: list[str] = []
    refusal(Client(folder, case.own, say=heard.append), case.tasks[3])
    assert "public.json: damaged" in heard[-1]
    assert f"delete {run_folder(folder)}" in heard[-1]


# -------------------------------------------------------------------- a full disk


def test_a_full_disk_is_one_line_and_the_state_of_before(
    case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    node = Client(folder, case.own, say=heard.append)
    answer_of(node, case.tasks[2])
    before, kept, real = {name: t.clone() for name, t in tensors_of(node).items()}, kept_in(folder), os.fsync
    calls, fails = 0, 1

    def fsync(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls == fails:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    while True:
        calls = 0
        answer = answer_of(node, case.tasks[3])
        if calls < fails:
            break
        assert answer.refused.startswith("user 'ann': ")
        assert "No space left on device" in heard[-1]
        assert "\n" not in heard[-1]
        assert_equal(tensors_of(node), before)
        assert kept_in(folder) == kept
        fails += 1
    assert fails > 4
    assert said(answer) == said(case.answers[3])
