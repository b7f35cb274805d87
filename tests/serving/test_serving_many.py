"""Users' models that stay on disk: read when needed, ahead of the queue, and evicted by bytes."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import torch
import yaml

import comingle as library
from comingle.config import parse_recipe
from comingle.models.generation import encode_prompt, read_sampling
from comingle.models.personal import PersonalModel
from comingle.runs.api import load_on_demand
from comingle.runs.results import Run
from comingle.serving import rows
from comingle.serving.access import Limits, WatchedKeys
from comingle.serving.api import make_app
from comingle.serving.engine import Engine, Piece, Request
from comingle.serving.models import StoredModels, open_models
from comingle.serving.rows import AdapterCache
from comingle.utils.errors import RunError

NAMES = ("ann", "bob", "cem")


def run_of(write_recipe: Any, folder: Path, **changes: Any) -> Path:
    run = folder / "run"
    library.run(write_recipe(folder / "project"), out=run, **{"training.rounds": 2, **changes})
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, write_recipe: Any) -> Path:
    return run_of(write_recipe, tmp_path_factory.mktemp("many"))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tree(size: int) -> dict[str, torch.Tensor]:
    return {"a": torch.zeros(1, size, dtype=torch.uint8)}


# ---------------------------------------------------------------- the cache


def test_the_least_recently_used_adapters_are_evicted_by_bytes() -> None:
    cache = AdapterCache(NAMES, lambda name: tree(10), max_bytes=20)
    for name in ("ann", "bob", "ann", "cem", "ann"):
        assert name in cache[name] or len(cache[name]["a"][0]) == 10
        assert cache.num_bytes <= 20
    assert cache.num_reads == 3  # ann was used more recently than bob when cem was read
    assert cache["bob"]
    assert cache.num_reads == 4


def test_prefetched_adapters_that_nobody_needs_do_not_stop_others() -> None:
    """As those of a request that was cancelled before it got a row."""

    def read(name: str) -> dict[str, torch.Tensor]:
        if name == "bob":
            raise RunError("damaged")
        return tree(10)

    cache = AdapterCache([*NAMES, "dan"], read, max_bytes=15)
    assert cache["ann"]
    for name in ("bob", "cem", "dan"):  # one at a time, by the limit
        cache.prefetch([name])
        cache._thread.submit(int).result()  # after what was submitted before
        assert cache.is_available(name)
    assert list(cache._recent) == ["cem"]


def test_memory_of_evicted_adapters_is_returned_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "TRIM_BYTES", 25)
    num_evicted: list[int] = []
    cache = AdapterCache(list("abcdefgh"), lambda name: tree(10), max_bytes=20)
    monkeypatch.setattr(rows, "return_freed_memory", lambda: num_evicted.append(cache.num_reads - 2))
    for name in "abcdefgh":
        cache[name]
    assert num_evicted == [3, 6]


def test_adapters_larger_than_the_limit_are_used_one_at_a_time() -> None:
    cache = AdapterCache(NAMES, lambda name: tree(10), max_bytes=1)
    assert [cache[name]["a"].numel() for name in NAMES] == [10, 10, 10]
    assert cache.num_bytes == 10


def test_prefetched_adapters_are_read_once_and_count() -> None:
    read = list[str]()

    def note(name: str) -> dict[str, torch.Tensor]:
        read.append(name)
        return tree(10)

    cache = AdapterCache([*NAMES, "dan"], note, max_bytes=40)
    assert cache["ann"]
    cache.prefetch(["bob", "cem", "dan"])  # two at a time: half of the limit
    assert cache["bob"]
    assert cache["cem"]
    assert cache.is_available("cem")
    assert not cache.is_available("dan")
    assert read == ["ann", "bob", "cem"]
    cache["ann"] = tree(1)  # replaced: never read again
    assert cache["ann"]["a"].numel() == 1
    del cache["ann"]
    assert cache["ann"]["a"].numel() == 10


# ---------------------------------------------------------------- runs


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"evaluation.select": "best"},
        {"method": "floral"},
        {"runtime.store": "disk"},
        {"adapters.rank": [1, 2, 2]},
    ],
    ids=lambda changes: "-".join(map(str, changes)) or "plain",
)
@pytest.mark.sampled(3)
def test_models_on_disk_are_those_of_load(changes: dict[str, Any], tmp_path: Path, write_recipe: Any) -> None:
    run = run_of(write_recipe, tmp_path, **changes)
    opened, loaded = open_models(run), library.load(run)
    assert isinstance(opened.models, StoredModels)
    for name in NAMES:
        mine, theirs = opened.models[name], loaded.user(name)
        assert isinstance(theirs, PersonalModel)
        assert mine.generate("one", max_new_tokens=4) == theirs.generate("one", max_new_tokens=4)
        assert all(torch.equal(tensor, theirs.tensors[key]) for key, tensor in mine.tensors.items())
        assert mine.tensors.keys() == theirs.tensors.keys()


def test_users_in_another_order_get_their_own_model(run: Path) -> None:
    (checkpoint,) = sorted((run / "checkpoints").iterdir())[-1:]
    path = checkpoint / "checkpoint.json"
    names = json.loads(path.read_text())["trainers"]
    opened, _stored = load_on_demand(run)
    state: Any = opened.federation.clients.state
    assert state._row_in_file == [names.index(name) for name in opened.users]


@pytest.mark.parametrize("changes", [{"evaluation.guard": "local"}, {"method": "local"}], ids=["guard", "local"])
def test_chosen_models_are_loaded_as_before(changes: dict[str, Any], tmp_path: Path, write_recipe: Any) -> None:
    run = run_of(write_recipe, tmp_path, **changes)
    opened, loaded = open_models(run), library.load(run)
    assert isinstance(opened.models, StoredModels) == ("method" in changes)
    for name in NAMES:
        theirs: Any = loaded.user(name)
        assert all(torch.equal(tensor, theirs.tensors[key]) for key, tensor in opened.models[name].tensors.items())


def test_a_damaged_checkpoint_is_refused(tmp_path: Path, write_recipe: Any) -> None:
    run = run_of(write_recipe, tmp_path)
    state = max((run / "checkpoints").iterdir()) / "state.safetensors"
    content = bytearray(state.read_bytes())
    content[-1] ^= 1
    state.write_bytes(content)
    with pytest.raises(RunError, match="damaged"):
        open_models(run)


# ---------------------------------------------------------------- the engine


class Reads:
    """What an engine reads, and answers to requests of many users."""

    def __init__(self, models: Any, *, rows: int, cache_bytes: int) -> None:
        self.engine = Engine(models, rows=rows, cache_bytes=cache_bytes)
        self.cache = self.engine.row_adapters.user_tensors
        self.texts: dict[int, str] = {}
        self.errors: dict[int, Exception] = {}

    def ask(self, name: str, text: str, tokens: int) -> None:
        number = len(self.texts)
        self.texts[number] = ""

        def on_piece(piece: Piece) -> None:
            self.texts[number] += piece.text
            if piece.error is not None:
                self.errors[number] = piece.error

        prompt = encode_prompt(self.engine.tokenizer, text)
        sampling = read_sampling(max_new_tokens=tokens)
        self.engine.submit(Request(name=name, prompt=prompt, sampling=sampling, on_piece=on_piece, continues=True))

    def finish(self) -> list[str]:
        while self.engine.busy:
            self.engine.step()
        return [self.texts[number] for number in sorted(self.texts)]


def test_answers_are_the_users_own_however_little_stays_in_memory(run: Path) -> None:
    opened, loaded = open_models(run), library.load(run)
    size = sum(t.nbytes for t in opened.models["ann"].tensors.values())
    asked = [(NAMES[i % 3], "one two " * (i % 4 + 1), 3 + i % 5) for i in range(15)]
    expected = [loaded.user(name).generate(text, max_new_tokens=tokens) for name, text, tokens in asked]  # type: ignore[union-attr]
    assert len(set(expected)) > 8
    for cache_bytes in (1, size, 2 * size, 100 * size):
        reads = Reads(opened.models, rows=2, cache_bytes=cache_bytes)
        for name, text, tokens in asked:
            reads.ask(name, text, tokens)
            reads.engine.step()
        assert reads.finish() == expected
        assert reads.cache.num_bytes <= max(size, cache_bytes)
    assert reads.cache.num_reads == 3  # with enough memory each is read once


def test_a_model_that_cannot_be_read_ends_its_own_request_only(run: Path) -> None:
    opened = open_models(run)

    def read(name: str) -> PersonalModel:
        if name == "bob":
            raise RunError("the disk has failed")
        return opened.models[name]

    reads = Reads(StoredModels(list(NAMES), read), rows=2, cache_bytes=1)
    for name in ("ann", "bob", "cem", "bob", "ann"):
        reads.ask(name, "one", 3)
    texts = reads.finish()
    assert sorted(reads.errors) == [1, 3]
    assert texts[0] == texts[4]
    assert all(texts[i] for i in (0, 2, 4))


def test_a_request_waits_for_its_adapters_while_others_go_on(run: Path) -> None:
    opened, go_on = open_models(run), threading.Event()

    def read(name: str) -> PersonalModel:
        if name == "bob":
            assert go_on.wait(30)
        return opened.models[name]

    reads = Reads(StoredModels(list(NAMES), read), rows=2, cache_bytes=10**9)
    reads.ask("ann", "one", 20)
    reads.engine.step()
    reads.ask("bob", "one", 2)
    for _ in range(5):
        reads.engine.step()
    assert [row.request.name for row in reads.engine.active] == ["ann"]
    assert len(reads.engine.waiting) == 1
    go_on.set()
    assert all(reads.finish())


# ---------------------------------------------------------------- who opens what


@pytest.mark.parametrize("hundreds", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_random_requests_open_nobody_elses_model(federate: Any, tmp_path: Path, hundreds: int) -> None:
    """Random keys, users and requests, while keys are replaced."""
    names = [f"user{i}" for i in range(12)]
    federation = federate("fedit", users=names, base="random:llama?layers=1&dim=32", dtype="float32")
    federation.clients.state.rows.add_(torch.randn(federation.clients.state.rows.shape, generator=seeded(1)))
    recipe = parse_recipe({"method": "fedit", "data": {"users": {"somebody": "unused"}}})
    finished = Run(folder=None, recipe=recipe, metrics={}, federation=federation)
    users: dict[str, Any] = {name: finished.user(name) for name in names}
    own = {name: users[name].generate("ab", max_new_tokens=2) for name in names}
    assert len(set(own.values())) > 6
    draw, path, retired = random.Random(5), tmp_path / "keys.yaml", list[str]()
    keys: dict[str, str] = {}

    def rotate() -> None:
        retired.extend(keys.values())
        chosen = draw.sample(names, 9)  # three users have no key
        keys.clear()
        keys.update({name: f"sk-{draw.getrandbits(128):032x}" for name in chosen})
        draft = tmp_path / "draft"
        draft.write_text(yaml.safe_dump(keys))
        draft.chmod(0o600)
        draft.rename(path)

    rotate()
    limits = Limits(rate=10**9, queue=10**6, rows=16)
    app = make_app(Engine(users, rows=16), WatchedKeys(path, users), limits)
    opened: dict[int, int] = {}

    async def ask(client: httpx.AsyncClient) -> None:
        name = draw.choice([*names, "nobody", "user1 ", "USER1", "../user1"])
        kind = draw.choice(("own", "any", "any", "retired", "changed", "none"))
        key = {
            "own": keys.get(name, "none"),
            "any": draw.choice(list(keys.values())),
            "retired": draw.choice(retired or ["x"]),
            "changed": draw.choice(list(keys.values()))[:-1] + draw.choice("ghij"),
            "none": draw.choice(("", "x", "0" * 35, next(iter(keys)))),
        }[kind]
        owner = next((user for user, valid in keys.items() if valid == key), None)
        headers = {"Authorization": f"Bearer {key}"}
        where = draw.choice(("models", f"models/{quote(name, safe='')}", "completions", "chat/completions", "route"))
        if where.startswith("models"):
            answer = await client.get(f"/v1/{where}", headers=headers)
        else:
            body: dict[str, Any] = {"model": name, "max_tokens": 2, "temperature": 0, "prompt": "ab"}
            if where == "chat/completions":
                body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
            if where == "route":
                body = {"model": name, "text": "a"}
            answer = await client.post(f"/v1/{where}", headers=headers, json=body)
        opened[answer.status_code] = opened.get(answer.status_code, 0) + 1
        if owner is None:
            assert answer.status_code == 401
        elif where == "models":
            assert [model["id"] for model in answer.json()["data"]] == [owner]
        elif owner != name:
            assert answer.status_code == 404
            assert answer.json()["error"]["message"] == f"no model {name!r} for this key"
        elif where == "route":
            assert answer.json()["error"]["code"] == "no_routers"
        else:
            assert answer.status_code == 200
            assert answer.json().get("model", answer.json().get("id")) == name
            if where == "completions":
                assert answer.json()["choices"][0]["text"] == own[name]

    async def ask_all() -> None:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            for number in range(hundreds):
                if number % 5 == 4:
                    rotate()
                await asyncio.gather(*(ask(client) for _ in range(100)))

    try:
        asyncio.run(ask_all())
    finally:
        app.state.service.worker.close()
    assert sum(opened.values()) == 100 * hundreds
    assert min(opened[status] for status in (200, 401, 404)) > 5 * hundreds
