"""Users elsewhere end with what they end with in one process, bit for bit: every method, on text, chats and samples.

Each user is a node with a folder of its own, which sees nothing but tasks; tensors are compared as its disk has them.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.quick import quick

sys.path.insert(0, str(Path(__file__).parents[1] / "golden"))
from cases import METHODS, ON_NETS, SMALL, VARIANTS, method, text_recipe
from cases import ON_TEXT as ALL_ON_TEXT
from tests.federation.direct import federated

from comingle.config import parse_recipe
from comingle.federation.conditions import DeviceConditions
from comingle.runs import api, given
from comingle.training.client import Clients
from comingle.utils.files import list_checkpoints

ON_TEXT = [name for name in ALL_ON_TEXT if not METHODS[name].placement.pooled]


def has_plain_net(name: str) -> bool:
    """Whether the method needs neither true clusters nor norms, and does not mix losses."""
    made, mixture = METHODS[name], METHODS[name].placement.mixture
    needs = made.placement.pooled or made.needs_clusters or bool(made.placement.needs)
    return not needs and (mixture is None or mixture.of == "adaptors" or mixture.at in ("outputs", "samples"))


ON_SAMPLES = [name for name in ON_NETS if has_plain_net(name)]

SHORT = {"training.rounds": 2, "training.local_steps": 2}
PART = {**SHORT, "training.participation": 0.5, "training.weighting": "tokens", "evaluation.model": "exchanged"}
BEST = {"evaluation.select": "best", "evaluation.every": 1}


CHATTED = ("fedavg", "ifca", "fedmerge", "floral")

QUICK = ("comigs-1g1s", "fedavg", "fedmerge", "floral", "pcl", "comigs, specialists 0 1 2 1")
"""One of each way of sharing; the rest is marked slow."""


def each(names: Sequence[str]) -> list[Any]:
    return quick(names, *QUICK)


@pytest.fixture(autouse=True, scope="module")
def one_base() -> Iterator[None]:
    """The base is frozen, so all of a test's users and servers may have the same."""
    load = cache(given.load_base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(given, "load_base", load)
        yield


def assert_equal(content: dict[str, Any], folder: Path, federated: Callable[..., Any] = federated) -> Any:
    """In one process, a user at a time, and with users elsewhere: the same tensors, scores and bytes."""
    content.setdefault("runtime", {})["users_per_step"] = 1
    together = api.run(parse_recipe(content), out=folder / "together")
    metrics, channel = federated(content, folder / "apart")
    names = list(together.metrics["users"])
    kept = list_checkpoints(folder / "together")  # none where nothing is trained
    rows = load_file(kept[-1] / "state.safetensors") if kept else {}
    for number, name in enumerate(names):
        mine = load_file(list_checkpoints(next((folder / "apart" / name).glob("run-*")))[-1] / "state.safetensors")
        for key, t in rows.items():
            if not key.startswith("server/") and key != "best/round":
                assert torch.equal(mine[key], t[number :: len(names)]), (name, key)
    for key, value in together.metrics["users"].items():
        assert metrics["users"][key] == value
    same = ("selected_round", "upload_bytes_per_user_round", "download_bytes_per_user_round", "trainable_parameters")
    assert {key: metrics[key] for key in same} == {key: together.metrics[key] for key in same}
    return channel


@pytest.mark.parametrize("name", quick(ON_TEXT, "comigs-1g1s", "floral"))
@pytest.mark.slow
def test_text_on_flowers_grid(name: str, tmp_path: Path) -> None:
    """The real apps, in this process."""
    pytest.importorskip("flwr")
    from tests.federation.on_grid import federated_on_grid

    best = BEST if METHODS[name].trains else {}
    grid = assert_equal(text_recipe(tmp_path, method(name), **PART, **best), tmp_path, federated_on_grid)
    assert len(grid.sent) > len(grid.nodes)


@pytest.mark.parametrize("name", ["hetlora", *each(["comigs-1g1s", "flexlora", "fedavg+", "ffa-lora"])])
def test_text_with_ranks_and_local_models(name: str, tmp_path: Path) -> None:
    ranks = {**SHORT, "adapters.rank": [4, 1, 2, 3], "training.participation": 0.75}
    assert_equal(text_recipe(tmp_path, method(name), **ranks), tmp_path)


@pytest.mark.parametrize("name", ["fedavg", pytest.param("comigs-1g1s", marks=pytest.mark.slow)])
def test_text_with_own_steps_and_batch_sizes_by_name(name: str, tmp_path: Path) -> None:
    """The schedule follows the largest number of steps, which is another user's."""
    steps = {"dan": 1, "ann": 2, "cem": 3, "bob": 1}
    sizes = {"bob": 3, "ann": 1, "dan": 2, "cem": 2}
    own = {**PART, "training.local_steps": steps, "training.batch_size": sizes, "adapters.rank": {**steps, "bob": 2}}
    assert_equal(text_recipe(tmp_path, method(name), **own), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "comigs-1g1s"])
def test_text_with_time_limits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes between two local steps; the server normalises by the numbers of steps that users report."""
    seconds = count()
    monkeypatch.setattr(Clients, "clock", lambda clients: float(next(seconds)))
    monkeypatch.setattr(DeviceConditions, "training_clock", lambda conditions: float(next(seconds)))
    limits = {"dan": None, "ann": 2, "cem": 1, "bob": 3}
    own = {"training.rounds": 2, "training.max_seconds_per_round": limits, "training.normalise_steps": True}
    channel = assert_equal(text_recipe(tmp_path, method(name), **own), tmp_path)
    assert {one["local_steps"] for one in channel.told if "local_steps" in one} == {1, 2, 3}
    fewer = {"training.rounds": 2, "training.local_steps": {"dan": 3, "ann": 2, "cem": 1, "bob": 3}}
    again = api.run(parse_recipe(text_recipe(tmp_path, method(name), **fewer, **{"training.normalise_steps": True})))
    for key, user in api.load(tmp_path / "together").metrics["users"].items():
        assert again.metrics["users"][key]["test_perplexity"] == user["test_perplexity"]


@pytest.mark.parametrize(
    ("form", "name"),
    [pytest.param("int8", "comigs-1g1s", marks=pytest.mark.slow), ("int8", "hetlora"), ("bfloat16", "fedmerge")],
)
@pytest.mark.slow
def test_compressed_uploads(form: str, name: str, tmp_path: Path) -> None:
    ranks = {"adapters.rank": [4, 1, 2, 3]} if name == "hetlora" else {}
    assert_equal(text_recipe(tmp_path, method(name), **PART, **ranks, **{"training.uploads": form}), tmp_path)


@pytest.mark.parametrize("title", each([title for title, (name, own) in VARIANTS.items() if "centre" not in own]))
@pytest.mark.slow
def test_settings_that_pull_apart(title: str, tmp_path: Path) -> None:
    name, own = VARIANTS[title]
    assert_equal(text_recipe(tmp_path, method(name, **own), **{"training.participation": 0.75}), tmp_path)


@pytest.mark.slow
def test_gradients_that_wait_and_validation_text_to_train_on(tmp_path: Path) -> None:
    """Ann has no router; what waits is kept by its user."""
    own = method("comigs", specialists=[0, 1, 2, 1], accumulate_gradients=True)
    content = text_recipe(tmp_path, own, **{**PART, "training.rounds": 3})
    content["data"]["train_on_valid"] = True
    assert_equal(content, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["comigs-1g1s", *quick(CHATTED)])
def test_conversations(name: str, tmp_path: Path) -> None:
    """Users have different numbers of them, by which learning rates decay."""
    content = text_recipe(tmp_path, method(name))
    content["data"] = {"kind": "conversations", "users": chats(tmp_path), "split": {"valid": 0.2, "test": 0.2}}
    content["training"] = {"rounds": 2, "batch_size": 2, "context": 96, "weighting": "samples"}
    assert_equal(content, tmp_path)


@pytest.mark.slow
def test_conversations_with_own_batch_sizes(tmp_path: Path) -> None:
    content = text_recipe(tmp_path, method("fedavg"))
    content["data"] = {"kind": "conversations", "users": chats(tmp_path), "split": {"valid": 0.2, "test": 0.2}}
    sizes = {"cem": 3, "ann": 1, "bob": 2}
    content["training"] = {"rounds": 2, "batch_size": sizes, "context": 96, "normalise_steps": True}
    assert_equal(content, tmp_path)


def chats(folder: Path) -> dict[str, str]:
    found = {}
    for number, name in enumerate(("ann", "bob", "cem")):
        rows = [{"prompt": f"{name} {i}?", "response": f"{name} says {i * i}"} for i in range(10 + 5 * number)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        found[name] = str(folder / f"{name}.jsonl")
    return found


@pytest.mark.parametrize("name", each(ON_SAMPLES))
def test_samples(name: str, tmp_path: Path) -> None:
    """One user has not seen every class; what a net is made of is of all users together."""
    sgd = {"name": "sgd", "learning_rate": 0.05, "schedule": "cosine", "weight_decay": 0}
    content = {
        "method": {"name": name, **SMALL.get(name, {})},
        "data": {"kind": "samples", "users": arrays(tmp_path), "split": {"valid": 0.2, "test": 0.2}},
        "floral": {"rank": 2},
        "training": {"rounds": 3, "batch_size": 8, "weighting": "samples", "experts": sgd, "router": sgd},
        "evaluation": {"model": "exchanged", "select": "best", "every": 1},
        "checkpoints": {"every": 1},
        "runtime": {"dtype": "float32", "device": "cpu", "threads": 1},
    }
    assert_equal(content, tmp_path)


def arrays(folder: Path) -> Mapping[str, str]:
    found = {}
    for number, name in enumerate(("ann", "bob", "cem")):
        draw = np.random.default_rng(number)
        labels = draw.integers(3 if number else 2, size=30 + 10 * number)
        inputs = draw.normal(size=(len(labels), 6)).astype(np.float32) + labels[:, None]
        np.savez(folder / f"{name}.npz", inputs=inputs, targets=labels)
        found[name] = str(folder / f"{name}.npz")
    return found


@pytest.mark.slow
def test_rows_of_a_data_set_are_read_by_each_user_for_itself(tmp_path: Path) -> None:
    draw = random.Random(0)
    rows = [
        {
            "who": f"user {i % 3}",
            "text": " ".join(draw.choices(["one", "two", "three", "four", "five", "six", "seven"], k=40)),
        }
        for i in range(30)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    content = text_recipe(tmp_path, method("fedavg"))
    content["data"] = {
        "dataset": {"path": str(tmp_path / "rows.jsonl"), "user": "who"},
        "split": {"valid": 0.2, "test": 0.2},
    }
    channel = assert_equal(content, tmp_path)
    assert sorted(channel.nodes) == ["user 0", "user 1", "user 2"]
