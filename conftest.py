"""What all tests share: run-time checks of every annotation, one thread, tiny federations, the folder of real data."""

from __future__ import annotations

import gc
import os
import random
import re
import sys
import zlib

import jaxtyping

# Before anything of comingle is imported: every annotated signature becomes a check, shapes included. An int is a
# float, as PEP 484 and pyright have it. COMINGLE_NO_TYPECHECK=1 turns it off (torch.compile cannot trace the checks).
if os.environ.get("COMINGLE_NO_TYPECHECK") != "1":
    # Where pytest-xdist has processes that run the tests, this one only hands them out.
    _HANDS_OUT = "PYTEST_XDIST_WORKER" not in os.environ and re.search(r" -n ?([1-9]|auto|log)", " ".join(sys.argv))
    if not _HANDS_OUT:
        _CHECKER = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
        jaxtyping.install_import_hook(["comingle", "comingle_papers"], _CHECKER)

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.quick import TINY_TRAINING

from comingle.config import parse_recipe
from comingle.config.settings import KINDS, MECHANISMS
from comingle.cost import memory
from comingle.data.populations import as_users
from comingle.data.text.streams import UserData
from comingle.methods import REGISTRY as METHODS
from comingle.models.base import Base
from comingle.models.loading import load_base
from comingle.models.nets import NETS
from comingle.models.scoring import LOSSES
from comingle.runs.session import build, prepare
from comingle.training.backends.local import InProcess
from comingle.training.client import STORES
from comingle.training.events import TRACKERS
from comingle.training.kinds.base import RunData
from comingle.training.kinds.text import KIND as TEXT
from comingle.utils.seeds import generator
from comingle_papers.tasks.kind import KIND as TASKS

REPOSITORY = Path(__file__).parent

Federate = Callable[..., InProcess]
MakeUser = Callable[..., UserData]


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes never name a test: compressed ones may hold the time, and each worker of pytest-xdist makes them anew."""
    return argname if isinstance(val, bytes) else None


def pytest_sessionstart() -> None:
    """What is imported stays: the garbage collector need not look through it again and again."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_collection_finish() -> None:
    """Keep the collected tests out of later garbage collections."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what reads real data, and the parameters of a test that are not in its sample."""
    for item in items:
        if "shared_data" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
    for name, alike in groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        cases = list(alike)
        if (sampled := cases[0].get_closest_marker("sampled")) is not None:
            for case in set(cases) - set(sample(cases, sampled.args[0], name)):
                case.add_marker(pytest.mark.slow)


def sample(cases: Sequence[pytest.Item], count: int, name: str) -> list[pytest.Item]:
    """Return ``count`` of a test's cases, evenly spaced; the first one depends on the test's name.

    So the laws, which hold for all methods, have different methods in their samples.
    """
    if count >= len(cases):
        return list(cases)
    first = zlib.crc32(name.encode())
    return [cases[(first + number * len(cases) // count) % len(cases)] for number in range(count)]


@pytest.fixture(autouse=True)
def assumed_process_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the measurement of a process's own memory, which takes seconds, in tests that do not compare it."""
    measured = request.module.__name__.endswith("test_costing_memory") or request.node.get_closest_marker("slow")
    if not measured:
        monkeypatch.setattr(memory, "_measure_process", lambda kind: memory.FALLBACK_BYTES)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads, and on a busy machine they lose a lot."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    """Restore every registry: what a test registers is unknown to the tests that follow it in the same process."""
    registries = (KINDS, LOSSES, METHODS, NETS, STORES, TRACKERS, MECHANISMS)
    before = [dict(registry._registered) for registry in registries]
    yield
    for registry, registered in zip(registries, before, strict=True):
        registry._registered = registered


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data; a test that asks for it is skipped where there is none."""
    folder = Path(os.environ.get("COMINGLE_TEST_DATA", REPOSITORY.parent / "shared" / "data"))
    if not (folder / "README.md").is_file():
        pytest.skip(f"REAL DATA ABSENT: {folder} does not exist; set COMINGLE_TEST_DATA to the folder that holds it")
    return folder


@pytest.fixture(scope="session")
def make_user() -> MakeUser:
    """A user whose random bytes depend on the name (and ``text``) alone."""

    def make(name: str, *, train: int = 120, valid: int = 60, test: int = 50, text: str = "") -> UserData:
        def stream(split: str, size: int) -> torch.Tensor:
            return torch.randint(256, (size,), generator=generator("text", name, text, split), dtype=torch.int32)

        return UserData(
            name=name, train=stream("train", train), valid=stream("valid", valid), test=stream("test", test)
        )

    return make


@pytest.fixture(scope="session")
def federate(make_user: MakeUser) -> Federate:
    """A federation as a recipe would build it, over a random base of two layers in float64.

    ``users`` are names or users; ``changes`` are dotted keys of the recipe.
    """

    def make(
        method: str | Mapping[str, Any],
        *,
        users: Sequence[str | UserData] = ("ann", "bob", "cem"),
        base: str = "random:llama",
        dtype: str = "float64",
        changes: Mapping[str, Any] | None = None,
    ) -> InProcess:
        content = {
            "base": base,
            "method": method,
            "data": {"users": {"somebody": "unused"}},
            "adapters": {"rank": 2},
            "training": TINY_TRAINING,
            "runtime": {"dtype": dtype, "device": "cpu", "compile": False},
        }
        recipe = parse_recipe(content).with_changes(changes or {})
        people = tuple(user if isinstance(user, UserData) else make_user(user) for user in users)
        return build(recipe, RunData(kind=TEXT, base=_base(base, dtype), users=as_users(people)))

    return make


@pytest.fixture(scope="session")
def federate_nets() -> Federate:
    """A federation of small nets as a recipe would build it, on a synthetic task in float64.

    ``order`` has the task's users, by number, in another order.
    """

    def make(
        method: str | Mapping[str, Any], *, changes: Mapping[str, Any] | None = None, order: Sequence[int] | None = None
    ) -> InProcess:
        sgd = {"name": "sgd", "learning_rate": 0.05, "schedule": "constant", "weight_decay": 0}
        content = {
            "method": method,
            "data": {"task": {"name": "mlp-norm", "users": 4, "clusters": 2, "test_samples": 9}},
            "floral": {"rank": 2},
            "training": {"rounds": 2, "batch_size": 40, "weighting": "samples", "experts": sgd, "router": sgd},
            "runtime": {"dtype": "float64", "device": "cpu"},
        }
        recipe = parse_recipe(content).with_changes(changes or {})
        task = prepare(recipe).common
        users = tuple(task.users[i] for i in order) if order else task.users
        return build(recipe, TASKS.run_data(replace(task, users=as_users(users))))

    return make


@cache
def _base(name: str, dtype: str) -> Base:
    return load_base(name, dtype=dtype, device="cpu")


@pytest.fixture(scope="session")
def write_recipe() -> Callable[[Path], Path]:
    """Writes ``tiny.yaml`` to a folder: three users with a text file each, CoMiGS over four rounds of three steps."""

    def write(folder: Path) -> Path:
        (folder / "texts").mkdir(parents=True)
        for name in ("ann", "bob", "cem"):
            (folder / "texts" / f"{name}.txt").write_text(_prose(name), encoding="utf-8")
        content = {
            "base": "random:llama",
            "method": {"name": "comigs-1g1s", "router_every": 2, "router_steps": 1},
            "data": {"users": {name: f"texts/{name}.txt" for name in ("ann", "bob", "cem")}, "max_test_tokens": 60},
            "adapters": {"rank": 2},
            "training": {**TINY_TRAINING, "rounds": 4, "local_steps": 3},
            "evaluation": {"every": 2},
            "checkpoints": {"every": 1},
            "runtime": {"dtype": "float32", "device": "cpu", "threads": 1, "compile": False},
        }
        path = folder / "tiny.yaml"
        path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        return path

    return write


@pytest.fixture
def recipe_file(tmp_path: Path, write_recipe: Callable[[Path], Path]) -> Path:
    """``project/tiny.yaml`` below the test's own folder."""
    return write_recipe(tmp_path / "project")


def _prose(name: str) -> str:
    """Paragraphs of made-up words, about 1,500 characters, that no other user has."""
    draw = random.Random(name)
    words = ["".join(draw.choices("aeioulnrst", k=draw.randint(2, 7))) for _ in range(250)]
    return "\n\n".join(" ".join(words[i : i + 25]) + "." for i in range(0, len(words), 25))
