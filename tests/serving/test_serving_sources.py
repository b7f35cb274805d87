"""Several runs, users who joined later, and adapters of other tools, served together over one base."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.serving.test_serving_api import serving

import comingle as library
from comingle.models.generation import encode_prompt, read_sampling
from comingle.models.personal import PersonalModel
from comingle.serving.access import Keys, Limits
from comingle.serving.api import ModelLoader, make_app
from comingle.serving.engine import Piece, Request
from comingle.serving.models import EnginePool, Source, StoredModels, UserModels, names_of, open_pool
from comingle.utils.errors import ComingleError, DataError, RunError

OPERATOR = "operator-0123456789"
HEADERS = {"Authorization": f"Bearer {OPERATOR}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, write_recipe: Any) -> Path:
    """Runs of CoMiGS and FedIT, a user who joined each, and the FedIT users as PEFT adapters."""
    folder = tmp_path_factory.mktemp("sources")
    recipe = write_recipe(folder / "project")
    text = folder / "dan.txt"
    text.write_text("Dan wrote this, all of it, and nothing else. " * 40)
    for name, method in (("comigs", "comigs-1g1s"), ("fedit", "fedit")):
        library.run(recipe, out=folder / name, **{"training.rounds": 2, "method": method})
    library.join(folder / "comigs", name="dan", data=str(text), out=folder / "joined", rounds=1)
    run = library.load(folder / "fedit")
    for name in ("ann", "bob"):
        run.user(name).export(folder / "adapters" / name, format="peft")  # type: ignore[union-attr]
    return folder


def answer(pool: EnginePool, *asked: tuple[str, str]) -> list[str]:
    """Greedy continuations of texts by models, all at once."""
    texts = [""] * len(asked)
    for i, (name, text) in enumerate(asked):

        def on_piece(piece: Piece, i: int = i) -> None:
            assert piece.error is None
            texts[i] += piece.text

        prompt = encode_prompt(pool.engine_of(name).tokenizer, text)
        request = Request(
            name=name, prompt=prompt, sampling=read_sampling(max_new_tokens=6), on_piece=on_piece, continues=True
        )
        pool.engine_of(request.name).raise_unless_valid(request)
        pool.waiting.append(request)
    while pool.busy:
        pool.step()
    return texts


def alone(run: Path, name: str, text: str) -> str:
    personal: Any = library.load(run).user(name)
    return personal.generate(text, max_new_tokens=6)


def test_runs_adapters_and_newcomers_answer_as_alone(folder: Path) -> None:
    arguments = [
        str(folder / "comigs"),
        str(folder / "joined"),
        f"it={folder / 'fedit'}",
        f"anna={folder / 'adapters' / 'ann'}",
        f"bobby={folder / 'adapters' / 'bob'}",
    ]
    sources = [Source.of(argument) for argument in arguments]
    names = ["ann", "bob", "cem", "dan", "it/ann", "it/bob", "it/cem", "anna", "bobby"]
    assert names_of(sources) == names
    pool = open_pool(sources, Limits(rows=4))
    assert list(pool.models) == names
    asked = [(name, text) for text in ("one", "and two") for name in names]
    own = {"dan": (folder / "joined", "dan"), "anna": (folder / "fedit", "ann"), "bobby": (folder / "fedit", "bob")}
    expected = []
    for name, text in asked:
        run, user = own.get(name, (folder / ("fedit" if "/" in name else "comigs"), name.removeprefix("it/")))
        expected.append(alone(run, user, text))
    assert answer(pool, *asked) == expected
    assert len(set(expected)) > 8
    assert pool.engine_of("dan") is pool.engine_of("ann")  # in the same batches
    assert pool.engine_of("anna") is pool.engine_of("bobby")
    assert len({id(pool.engine_of(name)) for name in names}) == 3
    models = [pool.engine_of(name).base.model for name in names]
    assert all(model is models[0] for model in models)
    with pytest.raises(DataError, match="'eve'"):
        pool.engine_of("eve")


def test_a_name_that_two_sources_have_is_one_line(folder: Path, comingle: Any) -> None:
    reply = comingle("serve", folder / "comigs", folder / "fedit", "--port", 0)
    assert reply.code == 2
    assert "'ann'" in reply.err
    assert f"NAME={folder / 'fedit'}" in reply.err
    pool = open_pool([Source.of(str(folder / "comigs"))], Limits(rows=2))
    source = Source.of(str(folder / "fedit"))
    with pytest.raises(RunError, match=f"NAME={folder / 'fedit'}"):
        pool.add(source, source.open(pool.base))


@pytest.mark.parametrize("change", ["base", "layer", "shape", "kind", "damaged"])
def test_adapters_of_another_base_or_kind_are_one_line(folder: Path, tmp_path: Path, change: str) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(folder / "adapters" / "ann", adapter)
    config_path, weights = adapter / "adapter_config.json", adapter / "adapter_model.safetensors"
    config, tensors = json.loads(config_path.read_text()), load_file(weights)
    key = min(tensors)
    if change == "base":
        config["base_model_name_or_path"] = "somebody/else"
    if change == "layer":
        tensors = {name.replace("layers.1", "layers.7"): t for name, t in tensors.items()}
    if change == "shape":
        tensors[key] = torch.zeros(len(tensors[key]), 5)
    if change == "kind":
        config["peft_type"] = "IA3"
    config_path.write_text(json.dumps(config))
    save_file(tensors, weights)
    if change == "damaged":
        weights.write_bytes(b"nothing")
    pool = open_pool([Source.of(str(folder / "comigs"))], Limits(rows=2))
    with pytest.raises(ComingleError, match="adapter") as error:
        Source.of(str(adapter)).open(pool.base)
    assert "\n" not in str(error.value)


def test_a_run_on_another_base_is_one_line(folder: Path, tmp_path: Path, write_recipe: Any) -> None:
    recipe = write_recipe(tmp_path / "project")
    library.run(recipe, out=tmp_path / "run", base="random:qwen2", **{"training.rounds": 1})
    pool = open_pool([Source.of(str(folder / "comigs"))], Limits(rows=2))
    with pytest.raises(RunError, match=r"random:qwen2.*random:llama"):
        Source.of(f"other={tmp_path / 'run'}").open(pool.base)


def test_a_state_folder_of_a_client_and_a_path_with_an_equals_sign(folder: Path, tmp_path: Path) -> None:
    state = tmp_path / "mu=0.1"
    shutil.copytree(folder / "joined", state / "run-7" / "model")
    source = Source.of(str(state))
    assert source.name is None
    assert source.names() == ["dan"]
    assert answer(open_pool([source], Limits(rows=1)), ("dan", "one")) == [alone(folder / "joined", "dan", "one")]
    assert Source.of(f"daniel={state}").names() == ["daniel"]


def test_an_adapter_alone_loads_its_base(folder: Path) -> None:
    pool = open_pool([Source.of(str(folder / "adapters" / "ann"))], Limits(rows=1))
    assert answer(pool, ("ann", "one")) == [alone(folder / "fedit", "ann", "one")]


# ---------------------------------------------------------------- while the server runs


@pytest.fixture
def server(folder: Path) -> Iterator[tuple[str, ModelLoader]]:
    pool = open_pool([Source.of(str(folder / "comigs"))], Limits(rows=3))
    app = make_app(pool, Keys(pool.models, None), Limits(), answers=pool.answers)
    loader = ModelLoader(pool, app.state.service, OPERATOR)
    loader.add_to(app)
    with serving(app) as address:
        yield address, loader


def models_of(address: str) -> list[str]:
    return [model["id"] for model in httpx.get(f"{address}/v1/models").json()["data"]]


def completion(address: str, name: str, text: str) -> str:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
    return client.completions.create(model=name, prompt=text, max_tokens=6, temperature=0).choices[0].text


def test_the_operator_loads_and_unloads(folder: Path, server: tuple[str, ModelLoader]) -> None:
    address, _loader = server

    def post(what: str, headers: dict[str, str] = HEADERS, **body: Any) -> httpx.Response:
        return httpx.post(f"{address}/v1/{what}_lora_adapter", json=body, headers=headers, timeout=60)

    adapter = str(folder / "adapters" / "ann")
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        assert post("load", headers, lora_name="anna", lora_path=adapter).status_code == 401
        assert post("unload", headers, lora_name="ann").status_code == 401
    loaded = post("load", lora_name="anna", lora_path=adapter)
    assert loaded.status_code == 200
    assert loaded.text.startswith("Success")
    assert models_of(address) == ["ann", "bob", "cem", "anna"]
    assert completion(address, "anna", "one") == alone(folder / "fedit", "ann", "one")
    assert post("load", lora_name="anna", lora_path=adapter).status_code == 400
    assert post("load", lora_name="anna", lora_path=adapter, load_inplace=True).status_code == 200
    assert post("load", lora_name="ann", lora_path=str(folder / "adapters" / "bob")).status_code == 400
    assert post("load", lora_name="x", lora_path=str(folder / "nowhere")).status_code == 400
    assert post("load", lora_name="x").status_code == 400
    assert post("unload", lora_name="anna").status_code == 200
    assert post("unload", lora_name="anna").status_code == 404
    assert models_of(address) == ["ann", "bob", "cem"]
    with pytest.raises(openai.NotFoundError):
        completion(address, "anna", "one")
    assert post("load", lora_path=str(folder / "joined")).status_code == 200
    assert completion(address, "dan", "one") == alone(folder / "joined", "dan", "one")
    assert post("unload", lora_name="bob").status_code == 200  # with the other users of the run
    assert models_of(address) == ["dan"]


def test_without_an_operators_key_nothing_is_loaded(folder: Path) -> None:
    pool = open_pool([Source.of(str(folder / "comigs"))], Limits(rows=1))
    app = make_app(pool, Keys(pool.models, None), Limits())
    ModelLoader(pool, app.state.service, None).add_to(app)
    with serving(app) as address:
        for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": "Bearer None"}):
            body = {"lora_path": str(folder / "joined")}
            assert httpx.post(f"{address}/v1/load_lora_adapter", json=body, headers=headers).status_code == 403


def test_newer_checkpoints_are_taken_up_and_answers_go_on(folder: Path, tmp_path: Path, write_recipe: Any) -> None:
    recipe, run = write_recipe(tmp_path / "project"), tmp_path / "run"
    library.run(recipe, out=run, **{"training.rounds": 1})
    adapter = tmp_path / "adapter"
    shutil.copytree(folder / "adapters" / "ann", adapter)
    pool = open_pool([Source.of(str(run)), Source.of(str(adapter))], Limits(rows=3))
    app = make_app(pool, Keys(pool.models, None), Limits())
    loader = ModelLoader(pool, app.state.service, None)
    with serving(app) as address:
        assert completion(address, "bob", "one") == alone(run, "bob", "one")
        assert loader.reload_changed() == 0
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
        chunks = client.completions.create(model="bob", prompt="one", max_tokens=300, temperature=0, stream=True)
        text = next(iter(chunks)).choices[0].text
        old: Any = library.load(run).user("bob")
        expected = old.generate("one", max_new_tokens=300)
        library.run(recipe, out=run, force=True, **{"training.rounds": 3, "training.local_steps": 20})
        shutil.copy(folder / "adapters" / "bob" / "adapter_model.safetensors", adapter)
        loader.watch(0.1)
        deadline = time.monotonic() + 60
        while completion(address, "adapter", "one") != alone(folder / "fedit", "bob", "one"):
            assert time.monotonic() < deadline
        loader.stop()
        while loader.reload_changed():
            pass
        assert completion(address, "bob", "one") == alone(run, "bob", "one")
        served, new = pool.engine_of("bob").models["bob"].tensors, library.load(run).user("bob")
        assert all(torch.equal(tensor, new.tensors[key]) for key, tensor in served.items())  # type: ignore[union-attr]
        assert not all(torch.equal(tensor, old.tensors[key]) for key, tensor in served.items())
        assert text + "".join(chunk.choices[0].text for chunk in chunks) == expected  # by the model that it began with


def test_a_run_that_cannot_be_opened_keeps_its_models(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder / "comigs", run)
    pool = open_pool([Source.of(str(run))], Limits(rows=1))
    app = make_app(pool, Keys(pool.models, None), Limits())
    loader = ModelLoader(pool, app.state.service, None)
    expected = alone(run, "ann", "one")
    shutil.rmtree(run / "checkpoints")  # the models are read from the open file
    (run / "metrics.json").touch()
    with serving(app) as address:
        assert loader.reload_changed() == 0
        assert completion(address, "ann", "one") == expected


def test_a_model_that_is_unloaded_while_a_request_waits_ends_it(folder: Path) -> None:
    source = Source.of(str(folder / "comigs"))
    pool, errors = open_pool([source], Limits(rows=1)), list[Exception | None]()
    request = Request(
        name="ann",
        prompt=[1, 2],
        sampling=read_sampling(max_new_tokens=3),
        on_piece=lambda piece: errors.append(piece.error),
    )
    pool.waiting.append(request)
    pool.remove(source)
    pool.step()
    assert len(errors) == 1
    assert "unloaded" in str(errors[0])
    assert not pool.busy


def test_engines_share_the_memory_for_adapters(folder: Path) -> None:
    pool = open_pool([Source.of(str(folder / "comigs"))], Limits(rows=1), megabytes=6)
    assert pool.engine_of("ann").row_adapters.user_tensors.max_bytes == 6_000_000
    source = Source.of(f"it={folder / 'fedit'}")
    opened: UserModels = source.open(pool.base)
    pool.add(source, opened)
    limits = [pool.engine_of(name).row_adapters.user_tensors.max_bytes for name in ("ann", "it/ann")]
    assert limits == [3_000_000, 3_000_000]
    pool.remove(source)
    assert pool.engine_of("ann").row_adapters.user_tensors.max_bytes == 6_000_000


def test_a_request_that_waits_for_its_adapters_ends_when_they_are_unloaded(folder: Path) -> None:
    source, release = Source.of(str(folder / "comigs")), threading.Event()
    pool = open_pool([source], Limits(rows=2))
    opened = source.open(pool.base)

    def read(name: str) -> PersonalModel:
        assert name == "ann" or release.wait(30)
        return opened.models[name]

    pool.add(source, replace(opened, models=StoredModels(["ann", "bob", "cem"], read)))
    pieces: dict[str, list[Piece]] = {"ann": [], "bob": []}
    for name, told in pieces.items():
        sampling = read_sampling(max_new_tokens=8)
        pool.waiting.append(Request(name=name, prompt=[1, 2], sampling=sampling, on_piece=told.append))
        pool.step()
    assert [request.name for request in pool.engine_of("bob").waiting] == ["bob"]
    pool.remove(source)
    while pool.busy:
        pool.step()
    release.set()
    assert pieces["ann"][-1].finish == "length"  # completed by the model that is gone
    assert "unloaded" in str(pieces["bob"][-1].error)
    assert not pool.num_adapter_bytes


def test_metrics_say_how_much_of_the_adapters_is_in_memory(folder: Path, server: tuple[str, ModelLoader]) -> None:
    address, loader = server
    completion(address, "bob", "one")
    size = sum(t.nbytes for t in loader.pool.engine_of("bob").models["bob"].tensors.values())
    (line,) = [
        line
        for line in httpx.get(f"{address}/metrics").text.splitlines()
        if line.startswith("comingle:adapter_cache_bytes{")
    ]
    assert float(line.split()[-1]) == 2 * size  # the first user's, whose shapes are those of all, and bob's


def test_a_state_folder_with_two_federations_keeps_its_model_and_says_so_once(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = tmp_path / "state"
    shutil.copytree(folder / "joined", state / "run-1" / "model")
    pool = open_pool([Source.of(str(state))], Limits(rows=1))
    app = make_app(pool, Keys(pool.models, None), Limits())
    loader = ModelLoader(pool, app.state.service, None)
    shutil.copytree(folder / "joined", state / "run-2" / "model")
    try:
        assert [loader.reload_changed() for _ in range(3)] == [0, 0, 0]
        assert caplog.text.count("has models of 2 federations") == 1
        shutil.rmtree(state / "run-1")
        assert loader.reload_changed() == 1
    finally:
        app.state.service.worker.close()
