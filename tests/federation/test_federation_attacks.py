"""What a server that means harm can make a user's machine do: nothing but take part, or refuse in one line.

And a user the server.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from tests.federation.direct import Direct, nodes_of
from tests.federation.tiny import answer_of, one_base, own_of, refusal, tiny

from comingle.config import parse_recipe
from comingle.federation import backend
from comingle.federation.client import Client
from comingle.federation.files import split_recipe
from comingle.federation.messages import Task, unpack_answer
from comingle.federation.participant import Own
from comingle.federation.public import public_part
from comingle.federation.run_folder import run_federation
from comingle.models.loading import load_base
from comingle.protocol.wire import pack, unpack
from comingle.training.kinds.base import kind_of
from comingle.utils.errors import RunError
from comingle.utils.files import list_checkpoints
from comingle.utils.records import read_events


@pytest.fixture(autouse=True, scope="module")
def base() -> Iterator[None]:
    with one_base():
        yield


def joining(content: dict[str, Any], **changes: Any) -> Task:
    """The task to join a recipe's federation, of whose public recipe dotted keys (with ``__``) are others."""
    recipe = parse_recipe(content)
    plan, _ = split_recipe(recipe)
    read = load_base(recipe.base, dtype="float32", device="cpu") if kind_of(recipe).needs_base else None
    public = public_part(plan.recipe, plan.users, plan.settings, read).as_dict()
    for key, value in changes.items():
        *path, last = ("recipe." * (not key.startswith("settings")) + key.replace("__", ".")).split(".")
        place = public
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return Task(run="run1", serial=0, user="ann", todo=("join",), arguments={"public": json.loads(json.dumps(public))})


class Liar:
    """A user's node, all of whose numbers are another one."""

    def __init__(self, node: Client, size: float) -> None:
        self.node, self.size = node, size

    def handle(self, task: bytes, deadline: float = math.inf) -> bytes:
        answer = unpack_answer(self.node.handle(task, deadline))
        return replace(answer, messages=tuple(map(self._lie, answer.messages))).pack()

    def _lie(self, data: bytes) -> bytes:
        message = unpack(data)
        return pack(
            replace(message, tensors={name: torch.full_like(t, self.size) for name, t in message.tensors.items()})
        )


class TestUsers:
    """What one user sends costs nobody else the federation."""

    @pytest.mark.parametrize("method", ["fedavg", "flexlora", "scaffold"])
    @pytest.mark.parametrize("size", [1e7, 3e38])
    @pytest.mark.sampled(2)
    def test_a_number_that_no_honest_user_has_is_left_out(self, method: str, size: float, tmp_path: Path) -> None:
        plan, nodes = nodes_of(parse_recipe(tiny(tmp_path, method, training__rounds=2)), tmp_path)
        nodes["bob"] = Liar(nodes["bob"], size)  # type: ignore[assignment]
        metrics = run_federation(plan, Direct(nodes), tmp_path / "server")
        assert metrics["mean_test_perplexity"] < 500
        rejected = [event for event in read_events(tmp_path / "server") if event["event"] == "rejected"]
        assert [(event["round"], event["user"]) for event in rejected] == [(1, "bob")]  # no exchange is behind the last
        assert f"{size:.3g}; allowed: up to 1e+06" in rejected[0]["reason"]

    def test_what_the_server_makes_of_allowed_numbers_is_downloaded(self, tmp_path: Path) -> None:
        """FlexLoRA has the singular values of products, here of 5e4 by 5e4, in one factor."""
        plan, nodes = nodes_of(parse_recipe(tiny(tmp_path, "flexlora", training__rounds=2)), tmp_path)
        nodes["bob"] = Liar(nodes["bob"], 5e4)  # type: ignore[assignment]
        assert run_federation(plan, Direct(nodes), tmp_path / "server")["rounds"] == 2

    @pytest.mark.parametrize("method", ["flexlora", "hetlora"])
    def test_what_the_server_cannot_go_on_with_is_not_kept(
        self, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plan, nodes = nodes_of(parse_recipe(tiny(tmp_path, method, training__rounds=2)), tmp_path)
        with monkeypatch.context() as patched:
            patched.setattr(backend, "check_upload", lambda *_, **__: None)
            liar: Any = Liar(nodes["bob"], 3e38)
            with pytest.raises(RunError, match=r"^round 1: .* 3e\+38, .*'bob'"):
                run_federation(plan, Direct(nodes | {"bob": liar}), tmp_path / "server")
        assert not list_checkpoints(tmp_path / "server")
        metrics = run_federation(plan, Direct(nodes), tmp_path / "server", resume=True)
        assert metrics["mean_test_perplexity"] < 500


def refused_path(folder: Path) -> str:
    """The refusal of a path that does not exist, without the path."""
    folder.mkdir()
    content = tiny(folder)
    told = refusal(Client(folder / "ann", own_of(content, "ann")), joining(content, base="/no/such/folder"))
    return told.replace(repr("/no/such/folder"), "")


class TestFiles:
    """Nothing is read but what the user's own file names."""

    @pytest.mark.parametrize("there", [True, False])
    @pytest.mark.parametrize("name", ["{}/secret", "~/secret", "./secret", "../secret", "secret.gguf", "a/b/secret"])
    def test_a_base_that_is_a_path_says_nothing_of_what_is_here(
        self, name: str, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if there:
            (tmp_path / "secret").mkdir()
            (tmp_path / "secret.gguf").touch()
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path))
        content, named = tiny(tmp_path), name.format(tmp_path)
        told = refusal(Client(tmp_path / "ann", own_of(content, "ann")), joining(content, base=named))
        assert told.startswith("base: ")
        assert repr(named) in told
        assert told.replace(repr(named), "") == refused_path(tmp_path / "other")

    @pytest.mark.parametrize("there", [True, False])
    def test_nor_one_that_may_be_of_the_hub(self, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        if there:
            (tmp_path / "owner" / "secret").mkdir(parents=True)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        content = tiny(tmp_path)
        told = refusal(Client(tmp_path / "ann", own_of(content, "ann")), joining(content, base="owner/secret"))
        assert told.startswith("user 'ann': ")
        assert "secret" not in told

    def test_the_users_own_base_comes_before(self, tmp_path: Path) -> None:
        content = tiny(tmp_path)
        task = joining(content, base="/etc")
        assert not answer_of(Client(tmp_path / "ann", own_of(content, "ann", base="random:llama")), task).refused

    @pytest.mark.parametrize(
        "data",
        [
            {"kind": "text", "users": {"ann": "/etc/passwd"}},
            {"kind": "text", "users": {"ann": "/etc/passwd"}, "given": True},
            {"kind": "text", "dataset": {"path": "/etc", "user": "x"}},
            {"kind": "conversations", "users": {"ann": "/etc/passwd"}},
            {"kind": "questions", "questions": {"name": "xnli", "path": "/etc", "languages": ["en", "de"]}},
            {"kind": "task", "task": {"name": "mlp-norm"}},
            {"task": {"name": "mlp-norm"}},
            {"kind": "text", "given": True, "held_out": "mixture"},
            {"kind": "text", "given": True, "on_small_user": "skip"},
        ],
    )
    def test_data_that_the_server_names(self, data: dict[str, Any], tmp_path: Path) -> None:
        content = tiny(tmp_path)
        told = refusal(Client(tmp_path / "ann", own_of(content, "ann")), joining(content, data=data))
        assert "passwd" not in told

    def test_a_method_that_pools_everybodys_data(self, tmp_path: Path) -> None:
        content = tiny(tmp_path)
        node = Client(tmp_path / "ann", own_of(content, "ann"))
        assert refusal(node, joining(content, method="centralized")).startswith("method centralized: ")


class TestRefusals:
    """What is wrong with the user's own things is said to the user alone: it names files and may quote them."""

    @pytest.mark.parametrize("data", ["missing.txt", "empty.txt", "rows.jsonl"])
    def test_the_server_hears_no_path_and_no_text(self, data: str, tmp_path: Path) -> None:
        (tmp_path / "empty.txt").write_text("")
        (tmp_path / "rows.jsonl").write_text('{"secret diary": "dear diary"}\nnot json, dear diary\n')
        heard: list[str] = []
        own = Own(name="ann", data={"path": str(tmp_path / data)})
        told = refusal(Client(tmp_path / "ann", own, say=heard.append), joining(tiny(tmp_path)))
        assert told.startswith("user 'ann': ")
        assert not [secret for secret in (str(tmp_path), data, "diary") if secret in told]
        assert data in heard[-1]

    def test_nor_from_settings_that_do_not_fit_the_data(self, tmp_path: Path) -> None:
        content = tiny(tmp_path)
        own = Own(name="ann", data={"path": f"{tmp_path}/texts/ann.txt", "diary": "secret"})
        told = refusal(Client(tmp_path / "ann", own), joining(content))
        assert "diary" not in told

    def test_nor_from_a_fault(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(*args: object) -> None:
            raise KeyError(f"{tmp_path} dear diary")

        monkeypatch.setattr("comingle.federation.client.open_store", fails)
        content = tiny(tmp_path)
        told = refusal(Client(tmp_path / "ann", own_of(content, "ann")), joining(content))
        assert told.startswith("user 'ann': ")
        assert not [secret for secret in (str(tmp_path), "diary", "KeyError") if secret in told]


HUGE = {
    "adapters__rank": 10**12,
    "training__batch_size": 10**12,
    "training__context": 10**12,
    "training__rounds": 10**12,
    "training__local_steps": 10**12,
    "base": "random:llama?dim=65536&layers=1000",
    "method": {"name": "comigs", "settings": {"specialists": 10**9, "generalists": 1}},
}


class TestSizes:
    """Numbers that no machine has room for are refused before anything of that size is made."""

    @pytest.mark.parametrize("key", HUGE)
    def test_of_adapters(self, key: str, tmp_path: Path) -> None:
        content = tiny(tmp_path)
        node, before = Client(tmp_path / "ann", own_of(content, "ann")), psutil.Process().memory_info().rss
        answer_of(node, joining(content, **{key: HUGE[key]}))
        assert psutil.Process().memory_info().rss - before < 2 << 30
        assert not answer_of(node, joining(content)).refused

    @pytest.mark.parametrize(
        "settings",
        [
            {"settings__classes": 10**13},
            {"settings__classes": -1},
            {"settings__classes": "x"},
            {"settings__input_shape": [10**7, 10**7]},
            {"settings__input_shape": 5},
            {"settings__labels": 7},
            {"settings__net": "no such net"},
            {"settings__net": 3},
            {"settings__loss": "evil"},
            {"settings": {}},
        ],
    )
    def test_of_nets(self, settings: dict[str, Any], tmp_path: Path) -> None:
        for name in ("ann", "bob"):
            draw = np.random.default_rng(0)
            inputs, targets = draw.normal(size=(30, 6)).astype(np.float32), draw.integers(3, size=30)
            np.savez(tmp_path / f"{name}.npz", inputs=inputs, targets=targets)
        users = {name: f"{tmp_path}/{name}.npz" for name in ("ann", "bob")}
        content = {
            "method": "fedavg",
            "data": {"kind": "samples", "users": users},
            "training": {"rounds": 2, "batch_size": 8},
            "runtime": {"dtype": "float32", "device": "cpu", "threads": 1},
        }
        own = Own(name="ann", data={"path": users["ann"]})
        told = refusal(Client(tmp_path / "ann", own), joining(content, **settings))
        assert told
        assert not (tmp_path / "ann").exists()
