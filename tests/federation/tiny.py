"""The smallest federations of users elsewhere, what was said in one, and what of it two may have in common."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.federation.direct import Direct
from tests.golden.cases import method, text_recipe

from comingle.federation.client import Client
from comingle.federation.messages import Answer, Task, unpack_answer, unpack_task
from comingle.federation.participant import Own
from comingle.protocol.messages import Download, Upload
from comingle.protocol.wire import pack, unpack
from comingle.runs import given
from comingle.utils.trees import Tree

PASSING = ("seconds", "train_seconds", "done", "back")
"""What users tell that depends on when they are asked."""


def tiny(folder: Path, name: str = "comigs-1g1s", *, users: int = 2, **changes: Any) -> dict[str, Any]:
    """A recipe of two rounds with a step or two each; ``changes`` has dotted keys of it with ``__``."""
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    small = {"training.rounds": 2, "training.local_steps": 1, "evaluation.first": False}
    content = text_recipe(folder, method(name), **{**small, **dotted})
    content["data"]["users"] = dict(list(content["data"]["users"].items())[:users])
    return content


def own_of(content: Mapping[str, Any], name: str, **changes: Any) -> Own:
    """A user's own part of a recipe."""
    return Own(name=name, data={"path": content["data"]["users"][name]}, **changes)


def tasks_of(channel: Direct, name: str) -> list[Task]:
    """What a user was asked to do, in order."""
    return [unpack_task(task) for who, task, _ in channel.recorded if who == name]


def answer_of(node: Client, task: Task) -> Answer:
    """What a node answers."""
    return unpack_answer(node.handle(task.pack()))


def said(answer: Answer) -> tuple[dict[str, Any], tuple[bytes, ...]]:
    """An answer but for what depends on when it was given."""
    return {key: value for key, value in answer.reported.items() if key not in PASSING}, answer.messages


def refusal(node: Client, task: Task | bytes) -> str:
    """Why a node does not do what it is asked to do: one line."""
    answer = unpack_answer(node.handle(task if isinstance(task, bytes) else task.pack()))
    assert answer.refused
    assert "\n" not in answer.refused
    return answer.refused


def tensors_of(node: Client) -> Tree:
    """All that a user has of a run."""
    home = node._store
    assert home is not None
    return home.clients.state.tensors() | {f"best/{name}": t for name, t in home.clients.state.best.items()}


def kept_in(folder: Path) -> dict[str, tuple[str, int]]:
    """Every file below a folder: its content and when it was written."""
    return {
        str(path.relative_to(folder)): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def with_message(task: Task, message: Download | Upload | bytes, at: int = 0) -> Task:
    """A task, one of whose messages is another."""
    messages = list(task.messages)
    messages[at] = message if isinstance(message, bytes) else pack(message)
    return replace(task, messages=tuple(messages))


def download_in(task: Task, at: int = 0) -> Download:
    """A message of a task."""
    message = unpack(task.messages[at])
    assert isinstance(message, Download)
    return message


def changed(task: Task, **public: Any) -> Task:
    """A task to join a federation of which other things are said."""
    changed = {**json.loads(json.dumps(task.arguments["public"])), **public}
    return replace(task, arguments={**task.arguments, "public": changed})


@contextmanager
def one_base() -> Iterator[None]:
    """The base is frozen, so all of a test's users and servers may have the same."""
    load = cache(given.load_base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(given, "load_base", load)
        yield


def assert_equal(one: Tree, other: Tree) -> None:
    """The same tensors, bit for bit."""
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def assert_same_end(one: Direct, other: Direct, *, but: str = "") -> None:
    """Everybody has the same tensors in the end, but for one user."""
    for name in one.nodes.keys() - {but}:
        assert_equal(tensors_of(one.nodes[name]), tensors_of(other.nodes[name]))
