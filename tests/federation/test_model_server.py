"""Clients that serve their users' models while they take part."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.federation.direct import Direct, nodes_of
from tests.federation.test_continuous_federations import ANN, BOB, CEM, Federation
from tests.federation.tiny import assert_equal, tensors_of, tiny
from tests.serving.test_serving_metrics import read_metrics

import comingle
from comingle.config import parse_recipe
from comingle.federation.client import Client
from comingle.federation.client_store import ClientStore
from comingle.federation.files import change_participants
from comingle.federation.model_server import ModelServer, model_of_all_users, personal_model
from comingle.federation.run_folder import run_federation
from comingle.models.generation import read_sampling
from comingle.serving.access import NICENESS, listen, prefer_answers
from comingle.serving.engine import Engine, Piece, Request
from comingle.utils.errors import RunError

PROMPT, NUM_TOKENS = "once upon", 12
UPDATES = "comingle:model_updates_total"


@contextmanager
def model_server(lines: list[str]) -> Iterator[ModelServer]:
    server = ModelServer(0, lines.append)
    try:
        yield server
    finally:
        server.close()


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.loads(response.read())
    return answer


def completion(server: ModelServer, name: str, tokens: int = NUM_TOKENS) -> str:
    body = {"model": name, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0}
    text: str = post(f"{server.url}/v1/completions", body)["choices"][0]["text"]
    return text


def served_federation(content: dict[str, Any], folder: Path, server: ModelServer | None) -> Direct:
    plan, nodes = nodes_of(parse_recipe(content), folder)
    if server is not None:
        nodes = {name: Client(node.folder, node.own, publish=publisher(server, name)) for name, node in nodes.items()}
    channel = Direct(nodes)
    run_federation(plan, channel, folder / "server")
    return channel


def publisher(server: ModelServer, name: str) -> Any:
    return lambda store: server.publish(store, name)


def store_of(client: Client) -> ClientStore:
    assert client._store is not None
    return client._store


@pytest.mark.parametrize("method", ["comigs-1g1s", "fedavg", "fedavg+", "floral", "ifca"])
def test_the_served_models_are_those_that_the_clients_save(method: str, tmp_path: Path, shared_base: None) -> None:
    content = tiny(tmp_path, method, training__rounds=1)
    lines: list[str] = []
    with model_server(lines) as server:
        channel = served_federation(content, tmp_path / "served", server)
        for name, client in channel.nodes.items():
            saved = comingle.load(store_of(client).folder / "model").user(name)
            expected = saved.generate(PROMPT, max_new_tokens=NUM_TOKENS, do_sample=False)
            assert completion(server, name) == expected
    assert [line for line in lines if server.url in line]


def test_a_client_that_is_restarted_serves_the_model_of_its_last_task(tmp_path: Path, shared_base: None) -> None:
    before = next(iter(served_federation(tiny(tmp_path), tmp_path, None).nodes.values()))
    with model_server([]) as server:
        name = before.own.name
        Client(before.folder, before.own, publish=publisher(server, name)).publish_newest_run()
        saved = comingle.load(store_of(before).folder / "model").user(name)
        assert completion(server, name) == saved.generate(PROMPT, max_new_tokens=NUM_TOKENS, do_sample=False)


def test_serving_changes_nothing_in_training(tmp_path: Path, shared_base: None) -> None:
    content = tiny(tmp_path)
    with model_server([]) as server:
        served = served_federation(content, tmp_path / "served", server)
    plain = served_federation(content, tmp_path / "plain", None)
    for name in plain.nodes:
        assert_equal(tensors_of(served.nodes[name]), tensors_of(plain.nodes[name]))


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux only")
def test_answers_have_priority_over_training(tmp_path: Path, shared_base: None) -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def train() -> int:
        prefer_answers()
        served_federation(tiny(tmp_path, "fedavg", training__rounds=1), tmp_path / "served", server)
        return niceness()

    with model_server([]) as server, ThreadPoolExecutor(1) as executor:
        of_training = executor.submit(train).result()
        assert server._app is not None
        assert server._app.state.service.worker.call(niceness).result() == niceness()
        assert of_training == niceness() + NICENESS


def test_requests_before_the_first_model_are_refused_with_status_503(tmp_path: Path) -> None:
    with model_server([]) as server:
        with pytest.raises(urllib.error.HTTPError) as error:
            completion(server, "ada")
        assert error.value.code == 503
        assert error.value.headers["Retry-After"]
        error.value.close()


def test_newer_models_are_counted_and_the_server_is_healthy(tmp_path: Path, shared_base: None) -> None:
    with model_server([]) as server:
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(f"{server.url}/health", timeout=60)
        assert error.value.code == 503
        error.value.close()
        client = next(iter(served_federation(tiny(tmp_path), tmp_path, server).nodes.values()))
        metrics = read_metrics(server.url)
        server.publish(store_of(client), client.own.name)
        assert read_metrics(server.url)[UPDATES] == metrics[UPDATES] + 1 > 1
        with urllib.request.urlopen(f"{server.url}/health", timeout=60) as response:
            assert response.status == 200


def test_a_request_during_local_steps_is_answered(tmp_path: Path, shared_base: None) -> None:
    """A task holds the training thread until the answer to a request has arrived."""
    content = tiny(tmp_path, training__rounds=1)
    plan, nodes = nodes_of(parse_recipe(content), tmp_path)
    answers: list[str] = []
    with model_server([]) as server:
        name = next(iter(nodes))
        node = nodes[name]
        client = Client(node.folder, node.own, publish=publisher(server, name))
        end_step = client._conditions.end_step

        def request_and_go_on(*args: Any) -> Any:
            if not answers:
                thread = threading.Thread(target=lambda: answers.append(completion(server, name)))
                thread.start()
                thread.join(timeout=60)
            return end_step(*args)

        client._conditions.end_step = request_and_go_on  # type: ignore[method-assign]
        run_federation(plan, Direct({**nodes, name: client}), tmp_path / "server")
    assert len(answers) == 1


def test_an_answer_in_progress_is_completed_by_the_model_that_began_it(tmp_path: Path, shared_base: None) -> None:
    client = next(iter(served_federation(tiny(tmp_path), tmp_path / "plain", None).nodes.values()))
    store, name = store_of(client), client.own.name
    model = model_of_all_users(store)
    old = personal_model(store, model, name)
    store.clients.state.rows.mul_(-3.0)
    new = personal_model(store, model, name)
    prompt = old.model.base.tokenizer(PROMPT)["input_ids"]  # type: ignore[misc]

    def generate(engine: Engine, *, replaced_after: int | None = None) -> str:
        sampling = read_sampling(max_new_tokens=NUM_TOKENS, do_sample=False)
        pieces: list[Piece] = []
        engine.submit(Request(name=name, prompt=prompt, sampling=sampling, on_piece=pieces.append, continues=True))
        for step in range(NUM_TOKENS):
            engine.step()
            if step == replaced_after:
                engine.replace(new)
        return "".join(piece.text for piece in pieces)

    text_of_old, text_of_new = generate(Engine({name: old}, rows=2)), generate(Engine({name: new}, rows=2))
    assert text_of_old != text_of_new
    engine = Engine({name: old}, rows=2)
    assert generate(engine, replaced_after=3) == text_of_old
    assert generate(engine) == text_of_new


def test_a_row_that_moves_keeps_the_model_that_began_it(tmp_path: Path, shared_base: None) -> None:
    client = next(iter(served_federation(tiny(tmp_path), tmp_path / "plain", None).nodes.values()))
    store, name = store_of(client), client.own.name
    model = model_of_all_users(store)
    old = personal_model(store, model, name)
    engine = Engine({name: old}, rows=2)
    engine.row_adapters.set(0, name)
    engine.row_adapters.set(1, name)
    store.clients.state.rows.mul_(2.0)
    engine.replace(personal_model(store, model, name))
    engine.row_adapters.set(0, name)
    engine.row_adapters.move(1, 0)
    assert all(torch.equal(tensor[0], old.tensors[slot][0]) for slot, tensor in engine.row_adapters.stacked.items())


def test_a_port_in_use_is_an_error_in_one_line(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RunError) as error:
            ModelServer(port, print)
    assert str(port) in str(error.value)


def test_a_failure_to_serve_does_not_undo_a_task(tmp_path: Path, shared_base: None) -> None:
    def fail(store: ClientStore) -> None:
        raise RunError("no room")

    content = tiny(tmp_path)
    plan, nodes = nodes_of(parse_recipe(content), tmp_path / "failing")
    lines: list[str] = []
    failing = {name: Client(node.folder, node.own, publish=fail, say=lines.append) for name, node in nodes.items()}
    run_federation(plan, Direct(failing), tmp_path / "failing/server")
    plain = served_federation(content, tmp_path / "plain", None)
    for name in plain.nodes:
        assert_equal(tensors_of(failing[name]), tensors_of(plain.nodes[name]))
    assert any("no room" in line for line in lines)


def test_a_client_that_stays_serves_the_model_of_its_next_federation(tmp_path: Path, shared_base: None) -> None:
    with model_server([]) as server:
        for number in (1, 2):
            content = tiny(tmp_path, training__rounds=number)
            plan, nodes = nodes_of(parse_recipe(content), tmp_path / str(number))
            name = next(iter(nodes))
            nodes[name] = Client(nodes[name].folder, nodes[name].own, publish=publisher(server, name))
            run_federation(plan, Direct(nodes), tmp_path / f"{number}/server")
            saved = comingle.load(store_of(nodes[name]).folder / "model").user(name)
            assert completion(server, name) == saved.generate(PROMPT, max_new_tokens=NUM_TOKENS, do_sample=False)


class AskedServer:
    """Clients that publish at one server; while a run begins, an answer of each served user is in progress."""

    def __init__(self, server: ModelServer, federation: Federation, *users: str) -> None:
        self.server, self.federation, self.users = server, federation, users
        self.answers, self.threads = dict[tuple[str, str, str], str](), list[threading.Thread]()
        self.runs: list[str] = []
        bases: dict[Any, Any] = {}
        for name in users:
            client = federation.channel.nodes[name]
            publish = partial(self.publish, name=name)
            federation.channel.nodes[name] = Client(client.folder, client.own, bases=bases, publish=publish)

    def publish(self, store: ClientStore, name: str) -> None:
        run = store.folder.name
        if run not in self.runs:
            self.runs.append(run)
        if run != self.runs[0] and (run, name, name) not in self.answers:
            for user in self.users:
                self.answers[run, name, user] = ""
                self.threads.append(threading.Thread(target=self.request, args=(run, name, user)))
                self.threads[-1].start()
                while self.server._app is None or not self.server._app.state.service.worker.engine.busy:
                    time.sleep(0.001)
        self.server.publish(store, name)

    def request(self, run: str, name: str, user: str) -> None:
        self.answers[run, name, user] = completion(self.server, user, 60)

    def assert_newest_models_answer(self) -> None:
        for name in self.users:
            saved = comingle.load(store_of(self.federation.channel.nodes[name]).folder / "model").user(name)
            assert completion(self.server, name) == saved.generate(PROMPT, max_new_tokens=NUM_TOKENS, do_sample=False)

    def assert_all_were_answered(self, num_runs: int) -> None:
        for thread in self.threads:
            thread.join(60)
        assert len(self.runs) == num_runs
        assert len(self.answers) == (num_runs - 1) * len(self.users) ** 2
        assert all(self.answers.values())


@pytest.mark.parametrize("users", [(ANN,), pytest.param((ANN, BOB), marks=pytest.mark.slow)])
def test_answers_go_on_when_the_next_run_of_a_continuous_federation_begins(
    users: tuple[str, ...], tmp_path: Path
) -> None:
    """While each run begins, an answer of an earlier model is in progress, and other users have yet to join."""
    with model_server([]) as server:
        asked = AskedServer(server, Federation(tmp_path, *users, **{"training.rounds": 1}), *users)
        for _number in range(3):
            assert asked.federation.run_due()
            asked.assert_newest_models_answer()
            for name in users:
                asked.federation.write(name)
        asked.assert_all_were_answered(3)
        assert read_metrics(server.url)[UPDATES] > 2 * len(users)


@pytest.mark.parametrize("users", [(ANN,), (ANN, BOB)])
def test_answers_go_on_when_runs_begin_again_without_a_user(users: tuple[str, ...], tmp_path: Path) -> None:
    """The server's runs are deleted, and the next one continues none."""
    with model_server([]) as server:
        asked = AskedServer(server, Federation(tmp_path, *users, CEM, **{"training.rounds": 1}), *users)
        assert asked.federation.run_due()
        shutil.rmtree(asked.federation.out)
        change_participants(asked.federation.file, remove=[CEM])
        asked.federation.channel.nodes.pop(CEM)
        asked.federation.server = asked.federation.open()
        assert asked.federation.run_due()
        asked.assert_newest_models_answer()
        asked.assert_all_were_answered(2)


def test_a_user_who_was_removed_is_not_awaited(tmp_path: Path) -> None:
    with model_server([]) as server:
        federation = Federation(tmp_path, ANN, BOB, **{"training.rounds": 1})
        for name in (ANN, BOB):
            own = federation.channel.nodes[name].own
            federation.channel.nodes[name] = Client(tmp_path / name, own, publish=publisher(server, name))
        assert federation.run_due()
        change_participants(federation.file, remove=[BOB])
        federation.channel.nodes.pop(BOB)
        federation.write(ANN)
        assert federation.run_due()
        saved = comingle.load(store_of(federation.channel.nodes[ANN]).folder / "model").user(ANN)
        assert completion(server, ANN) == saved.generate(PROMPT, max_new_tokens=NUM_TOKENS, do_sample=False)
        with pytest.raises(urllib.error.HTTPError) as error:
            completion(server, BOB)
        assert error.value.code == 404
        error.value.close()


@pytest.mark.parametrize("method", ["comigs-1g1s", "feddpa", "stacking"])
def test_a_published_model_leaves_the_state_as_it_is_on_disk(method: str, tmp_path: Path, shared_base: None) -> None:
    client = next(iter(served_federation(tiny(tmp_path, method), tmp_path / "plain", None).nodes.values()))
    store = store_of(client)
    store.clients.state.rows.add_(0.5 * torch.rand_like(store.clients.state.rows))  # as after local steps
    before = {name: tensor.clone() for name, tensor in tensors_of(client).items()}
    personal_model(store, model_of_all_users(store), client.own.name)
    assert_equal(tensors_of(client), before)


def test_a_server_can_be_closed_at_once() -> None:
    ModelServer(0, print).close()
