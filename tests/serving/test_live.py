"""``comingle live``: documents come in, runs train on them, and the answers are those of the newest model."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import openai
import pytest
import torch
import yaml
from tests.serving.test_serving_api import serving

from comingle.config import Recipe, parse_recipe
from comingle.privacy.accounting import Release, epsilon
from comingle.runs import api
from comingle.runs.folders import certificates_of
from comingle.runs.leaving import plan_removal, remove_user
from comingle.serving import live
from comingle.serving.access import Keys, Limits, WatchedKeys
from comingle.serving.api import make_app
from comingle.serving.engine import Engine
from comingle.serving.live import DocumentStore, LiveApi, LiveTrainer, When
from comingle.utils.errors import DataError, RecipeError, RunError
from comingle.utils.files import locked
from comingle.utils.records import read_events, read_metrics

NEW_TEXT = [f"ada now writes about rivers and lakes, number {number}." for number in range(80)]
Open = Callable[..., LiveTrainer]


def text_of(name: str) -> str:
    return "\n\n".join(f"{name} counts {number} of {number}." for number in range(60))


def conversation_of(name: str, number: int) -> dict[str, Any]:
    question = {"role": "user", "content": f"how much is {number}?"}
    return {"messages": [question, {"role": "assistant", "content": f"{name} says {number}."}]}


def conversations_of(folder: Path) -> dict[str, Any]:
    """Return changes to a recipe whose users have conversations."""
    users = {}
    for name in ("ada", "ben"):
        path = folder / f"{name}-chats.jsonl"
        path.write_text("".join(f"{json.dumps(conversation_of(name, number))}\n" for number in range(60)))
        users[name] = str(path)
    training = {"rounds": 2, "local_epochs": 1, "batch_size": 2, "context": 64}
    return {"data": {"kind": "conversations", "users": users, "replay": 0.2}, "training": training}


def recipe_of(folder: Path, **changes: Any) -> Recipe:
    users = {}
    for name in ("ada", "ben"):
        (folder / f"{name}.txt").write_text(text_of(name))
        users[name] = str(folder / f"{name}.txt")
    content = {
        "base": "random:llama?layers=1&dim=32",
        "data": {"users": users, "replay": 0.2},
        "training": {"rounds": 2, "local_steps": 2, "batch_size": 2, "context": 16},
        "evaluation": {"every": 2, "first": False},
        "runtime": {"device": "cpu", "dtype": "float32", "threads": 1, "compile": False},
    }
    return parse_recipe(content | changes)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Open]:
    """Return a function that opens a trainer, whose thread is ended after the test."""
    trainers: list[LiveTrainer] = []

    def open_trainer(changes: dict[str, Any] | None = None, **when: Any) -> LiveTrainer:
        said: list[str] = []
        trainer = LiveTrainer(
            recipe_of(tmp_path, **(changes or {})), tmp_path / "live", When(**{"new_tokens": 300, **when}), said.append
        )
        trainer.said = said  # type: ignore[attr-defined]
        trainers.append(trainer)
        return trainer

    yield open_trainer
    for trainer in trainers:
        trainer.stop()


def wait_for(happened: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_new_text_of_one_user_is_trained_by_this_user_alone(start: Open, tmp_path: Path) -> None:
    """The run is that of the same recipe in a program, continued from the first one."""
    trainer = start()
    untrained = trainer.models["ada"].tensors
    trainer.start()
    wait_for(lambda: trainer.is_served(1))
    first = trainer.models["ada"].tensors
    assert any(not torch.equal(t, untrained[name]) for name, t in first.items())
    trainer.store.add("ada", NEW_TEXT)
    wait_for(lambda: trainer.is_served(2))
    runs = tmp_path / "live" / "runs"
    start_event = next(read_events(runs / "0002"))
    assert start_event["continues"]["changed"] == ["ada"]
    assert set(start_event["continues"]["replayed"]) == {"ada"}
    rounds = [event for event in read_events(runs / "0002") if event["event"] == "round"]
    assert [set(event["train_loss_nats"]) for event in rounds] == [{"ada"}, {"ada"}]
    again = api.run(runs / "0002.yaml", out=tmp_path / "again")
    assert again.metrics["users"] == read_metrics(runs / "0002")["users"]
    for name, t in again.user("ada").tensors.items():
        assert torch.equal(t, trainer.models["ada"].tensors[name])
    assert not trainer.store.pending


def test_a_live_run_serves_the_guarded_models(start: Open, tmp_path: Path) -> None:
    """Those that users train alone continue with new text, and "since" names the run in which a model was chosen."""
    trainer = start({"evaluation": {"first": False, "guard": "local"}})
    trainer.start()
    wait_for(lambda: trainer.is_served(1))
    first = read_metrics(tmp_path / "live" / "runs" / "0001")["served"]
    trainer.store.add("ada", NEW_TEXT)
    wait_for(lambda: trainer.is_served(2))
    runs = tmp_path / "live" / "runs"
    served = read_metrics(runs / "0002")["served"]
    assert served.keys() == {"ada", "ben"}
    for name, entry in served.items():
        assert entry["since"] == ("0001" if first[name]["model"] == entry["model"] else "0002")
    earlier, newer = (api.load(runs / number).local for number in ("0001", "0002"))
    assert earlier is not None
    assert newer is not None
    stays = [torch.equal(*(each.clients.state.rows[row] for each in (earlier, newer))) for row in range(2)]
    assert stays == [False, True]  # only ada has new text
    trainer.stop()
    again = start({"evaluation": {"first": False, "guard": "local"}})
    assert again.is_served(2)
    for name, model in again.models.items():
        for key, tensor in model.tensors.items():
            assert torch.equal(tensor, trainer.models[name].tensors[key])


def test_it_waits_for_enough_text_of_enough_users(start: Open) -> None:
    trainer = start(users=2, new_tokens=400)
    trainer.start()
    wait_for(lambda: trainer.is_served(1))
    trainer.stop()  # so that nothing else plans
    trainer.store.add("ada", NEW_TEXT)
    trainer.store.add("ben", ["short"])
    assert not trainer._plan(2)
    trainer.store.add("ben", NEW_TEXT)
    assert trainer._plan(2)


def test_too_little_text_for_a_split_waits_for_more(start: Open, tmp_path: Path) -> None:
    trainer = start(new_tokens=5)
    trainer.start()
    wait_for(lambda: trainer.is_served(1))
    trainer.store.add("ada", ["a few words only"])
    wait_for(lambda: any("waits for more text" in line for line in trainer.said))  # type: ignore[attr-defined]
    time.sleep(1)
    assert sum("waits" in line for line in trainer.said) == 1  # type: ignore[attr-defined]
    assert trainer.store.pending["ada"] > 0
    trainer.store.add("ada", NEW_TEXT)
    wait_for(lambda: trainer.is_served(2))
    data = (tmp_path / "live" / "texts" / "ada" / "0002.jsonl").read_text()
    assert "a few words only" in data


def test_a_user_with_too_little_text_does_not_hold_up_others(start: Open) -> None:
    trainer = start(new_tokens=1)
    trainer.start()
    wait_for(lambda: trainer.is_served(1))
    trainer.store.add("zed", ["a"])
    trainer.store.add("ada", NEW_TEXT)
    wait_for(lambda: trainer.is_served(2))
    assert "zed" in trainer.store.pending
    assert "zed" not in trainer.models


def test_a_new_user_gets_a_model(start: Open) -> None:
    trainer = start()
    trainer.start()
    wait_for(lambda: trainer.is_served(1))
    trainer.store.add("cem", NEW_TEXT)
    wait_for(lambda: trainer.is_served(2))
    assert set(trainer.models) == {"ada", "ben", "cem"}


def test_a_stopped_trainer_resumes_its_run(start: Open, tmp_path: Path) -> None:
    trainer = start()
    trainer._observe_original = trainer._observe  # type: ignore[attr-defined]
    rounds: list[int] = []

    def observe(event: Any) -> None:
        if event["event"] == "round":
            rounds.append(event["round"])
            trainer._stopping.set()
        trainer._observe_original(event)  # type: ignore[attr-defined]

    trainer._observe = observe  # type: ignore[method-assign]
    trainer.start()
    trainer._thread.join()
    assert rounds == [1]
    again = start()
    again.start()
    wait_for(lambda: again.is_served(1))
    whole = api.run(recipe_of(tmp_path).with_changes({"data.seed": 0}), out=tmp_path / "whole")
    assert read_metrics(tmp_path / "live" / "runs" / "0001")["users"] == whole.metrics["users"]


def test_the_store_keeps_what_it_acknowledged_and_nothing_twice(start: Open, tmp_path: Path) -> None:
    tokenizer = start().base.tokenizer
    assert tokenizer is not None
    store = DocumentStore(tmp_path / "s", "text", tokenizer)
    (first, second), _ = store.add("ada", ["one", "two"])
    incoming = tmp_path / "s" / "incoming" / "ada.jsonl"
    acknowledged = incoming.read_bytes()
    incoming.write_bytes(acknowledged + b'{"id": "torn", "us')  # killed while it wrote a third
    again = DocumentStore(tmp_path / "s", "text", tokenizer)
    assert again.pending == store.pending
    again.collect(["ada"], 1)
    incoming.write_bytes(acknowledged)  # killed before the first file was deleted
    files = DocumentStore(tmp_path / "s", "text", tokenizer).collect(["ada"], 1)
    lines = [json.loads(line) for line in files["ada"].read_text().splitlines()]
    assert [line["id"] for line in lines] == [first, second]
    assert again.find("ada", second) is not None
    assert again.find("ada", "unknown") is None


def test_texts_with_other_line_separators_stay_whole(start: Open, tmp_path: Path) -> None:
    store = DocumentStore(tmp_path / "s", "text", start().base.tokenizer)
    text = "one\u2028two\x85three\x0cfour\nfive"
    (document_id,), tokens = store.add("ada", [text])
    assert (tmp_path / "s" / "incoming" / "ada.jsonl").stat().st_mode & 0o077 == 0
    again = DocumentStore(tmp_path / "s", "text", start().base.tokenizer)
    assert again.pending == {"ada": tokens}
    found = again.find("ada", document_id)
    assert found is not None
    assert found[0]["text"] == text


def test_documents_of_a_run_that_was_never_planned_wait_again(start: Open) -> None:
    trainer = start()
    trainer.store.add("ada", ["killed before the plan was written"])
    trainer.store.collect(["ada"], 2)
    assert not trainer.store.pending
    again = start()
    assert again.store.pending["ada"] > 0
    assert not list((again.folder / "texts").rglob("*.jsonl"))


@pytest.mark.parametrize("content", ["", "  ", 3, None, "half \ud800 a pair"])
def test_documents_without_text_are_refused(content: Any, start: Open) -> None:
    with pytest.raises(DataError):
        start().store.add("ada", [content])


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"base": "net:mlp", "data": {"task": {"name": "synthetic-linear"}}}, "data.kind"),
        ({"adapters": {"rank": {"ada": 2, "ben": 4}}}, "adapters.rank"),
        ({"privacy": {"epsilon": 1.0}}, "privacy.noise_multiplier"),
        ({"continue_from": "runs/may"}, "continue_from"),
        ({"data": {"kind": "conversations", "users": {"ada": "a.jsonl"}, "messages": "chat"}}, "data"),
    ],
)
def test_recipes_that_cannot_be_trained_live(changes: dict[str, Any], place: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=place):
        LiveTrainer(recipe_of(tmp_path, **changes), tmp_path / "live", When(), print)


@pytest.mark.parametrize("error", [RuntimeError("no memory left for ada"), RunError("disk full for ada")])
def test_any_error_of_a_run_is_shown_and_the_run_is_tried_again(
    error: Exception, start: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live, "RETRY_SECONDS", 1.0)
    trainer, errors = start(), [error]

    def publish(models: Any) -> None:
        if errors:
            raise errors.pop()

    trainer.publish = publish
    trainer.start()
    wait_for(lambda: trainer.state["state"] == "failed")
    assert trainer.state == {"state": "failed", "run": "0001", "round": 0, "error": type(error).__name__}
    assert ("no memory left" in caplog.text) == isinstance(error, RuntimeError)
    wait_for(lambda: trainer.is_served(1))
    assert trainer.state["state"] == "waiting"
    assert "error" not in trainer.state


@pytest.mark.parametrize("step", ["_sources", "_check"])
def test_an_unexpected_error_of_a_plan_keeps_its_documents_waiting(step: str, start: Open) -> None:
    trainer = start()
    trainer.store.add("ada", NEW_TEXT)

    def fail(argument: object) -> None:
        raise MemoryError

    setattr(trainer, step, fail)
    with pytest.raises(MemoryError):
        trainer._plan(2)
    assert trainer.store.pending["ada"] >= 300
    assert [document["text"] for document, run in trainer.store.documents("ada") if not run] == NEW_TEXT


def test_the_state_after_a_restart_names_the_run_that_answers(start: Open) -> None:
    trainer = start()
    trainer.start()
    wait_for(lambda: trainer.is_served(1))
    assert start().state == {"state": "waiting", "run": "0001", "round": 2}


# ------------------------------------------------------------ deleted documents


def test_a_user_whose_text_is_deleted_trains_on_no_more_than_earlier_text(start: Open, tmp_path: Path) -> None:
    """Others train as before; a user with text in the recipe keeps its model, a user without any loses it."""
    trainer, runs = start(), tmp_path / "live" / "runs"
    trainer.start()
    wait_for(lambda: trainer.is_served(1))
    trainer.store.add("ada", NEW_TEXT)
    wait_for(lambda: trainer.is_served(2))
    trainer.store.add("cem", NEW_TEXT)
    wait_for(lambda: trainer.is_served(3))
    assert len(trainer.delete("ada", lambda document: True)) == len(NEW_TEXT)
    assert trainer.delete("cem", lambda document: "number 7" in document["text"]) != []
    assert trainer.store.users() == ["cem"]
    trainer.store.add("ben", NEW_TEXT)
    wait_for(lambda: trainer.is_served(4))
    sources = api.load(runs / "0004").recipe.data.users  # type: ignore[attr-defined]
    assert sources["ada"].path == str(tmp_path / "ada.txt")
    assert set(trainer.models) == {"ada", "ben", "cem"}
    assert trainer.delete("cem", lambda document: True) != []
    trainer.store.add("ben", NEW_TEXT)
    wait_for(lambda: trainer.is_served(5))
    assert set(trainer.models) == {"ada", "ben"}
    assert any(line.startswith("cem: is left out") for line in trainer.said)  # type: ignore[attr-defined]
    replayed = next(read_events(runs / "0005"))["continues"]["replayed"]
    assert set(replayed) == {"ben"}


def test_a_run_that_is_interrupted_after_a_deletion_is_planned_again(start: Open, tmp_path: Path) -> None:
    trainer = start()
    trainer.start()
    wait_for(lambda: trainer.is_served(1))
    observe = trainer._observe

    def stop_after_a_round(event: Any) -> None:
        if event["event"] == "round":
            trainer._stopping.set()
        observe(event)

    trainer._observe = stop_after_a_round  # type: ignore[method-assign]
    trainer.store.add("ada", NEW_TEXT)
    trainer._thread.join()
    assert trainer.delete("ada", lambda document: document["text"] == NEW_TEXT[5])[0][1] == 2
    again = start()
    again.start()
    wait_for(lambda: again.is_served(2))
    documents = [document["text"] for document, _run in again.store.documents("ada")]
    assert documents == [text for text in NEW_TEXT if text != NEW_TEXT[5]]
    assert not list((tmp_path / "live" / "runs").glob("*.stale"))


def test_a_user_leaves_a_live_folder_with_all_documents(start: Open, tmp_path: Path) -> None:
    """Afterwards nothing of the user is below the folder but the certificates, and the next run is without it."""
    trainer, live = start(), tmp_path / "live"
    trainer.start()
    wait_for(lambda: trainer.is_served(1))
    trainer.store.add("ada", NEW_TEXT)
    wait_for(lambda: trainer.is_served(2))
    trainer.store.add("ada", ["some words that wait"])
    unrelated = live / "texts" / "ada" / "0003.jsonl"
    unrelated.write_text('{"text": "a poem of somebody else"}\n')
    with pytest.raises(RunError, match="name that folder"):
        plan_removal(live / "runs" / "0002", "ada", "exact")
    trainer.store.add("eve", ["words of somebody without a model"])
    of_eve = plan_removal(live, "eve", "exact")
    assert (of_eve.runs, [path.name for path in of_eve.documents]) == ((), ["eve.jsonl"])
    removal = plan_removal(live, "ada", "exact")
    assert {path.name for path in removal.documents} == {"0002.jsonl", "ada.jsonl"}
    trainer.stop()
    with locked(live), pytest.raises(RunError, match="in use"):
        remove_user(removal)
    assert removal.documents
    waiting = live / "incoming" / "ada.jsonl"
    digests = {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in removal.documents}
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        waiting.write_text('{"user": "ada", "text": "written meanwhile"}\n')

    remove_user(removal, say)
    for path in (unrelated, waiting):
        assert any(str(path) in line and "not deleted" in line for line in said), said
        path.unlink()
    assert not (live / "texts" / "ada" / "0002.jsonl").exists()
    unrelated.parent.rmdir()
    (certificate,) = certificates_of(live / "runs" / "0001")
    assert certificate["copies"] == digests
    remove_user(of_eve)
    assert not (live / "incoming" / "eve.jsonl").exists()
    for path in live.rglob("*"):
        if path.is_file() and path.name != "left.json":
            assert not re.search(rb"\bada\b", path.read_bytes()), path
    again = start()
    again.start()
    again.store.add("ben", NEW_TEXT)
    wait_for(lambda: again.is_served(2))  # the run on her documents is gone, so its number is free
    assert set(again.models) == {"ben"}


# ------------------------------------------------------------ over HTTP


@pytest.fixture
def client(start: Open, tmp_path: Path) -> Iterator[Callable[..., httpx.Client]]:
    """Return a function that starts a live server and returns a client of it, with its ``trainer``."""
    with ExitStack() as stack:

        def open_client(keys: Path | None = None, changes: dict[str, Any] | None = None) -> httpx.Client:
            trainer = start(changes)
            engine = Engine(trainer.models, rows=2)
            access = Keys(engine.models, None) if keys is None else WatchedKeys(keys)
            app = make_app(engine, access, Limits())
            LiveApi(trainer, app.state.service, tmp_path / "live" / "files").add_to(app)
            trainer.publish = lambda models: app.state.service.replace_engine(Engine(models, rows=2))
            trainer.start()
            http = stack.enter_context(httpx.Client(base_url=stack.enter_context(serving(app)), timeout=60))
            http.trainer = trainer  # type: ignore[attr-defined]
            return http

        yield open_client


def answer(client: httpx.Client, name: str, **headers: str) -> Any:
    body = {"model": name, "prompt": "ada", "max_tokens": 8, "temperature": 0}
    return client.post("/v1/completions", json=body, headers=headers)


def test_documents_change_the_answers_and_all_requests_are_answered(client: Any) -> None:
    http = client()
    trainer = http.trainer
    wait_for(lambda: trainer.is_served(1))
    before = answer(http, "ada").json()["choices"][0]["text"]
    added = http.post("/v1/users/ada/documents", json={"documents": [{"text": text} for text in NEW_TEXT]})
    assert added.status_code == 200, added.text
    assert len(added.json()["ids"]) == len(NEW_TEXT)
    statuses = set()
    while not trainer.is_served(2):
        statuses.add(answer(http, "ada").status_code)
    assert statuses <= {200}
    after = answer(http, "ada").json()["choices"][0]["text"]
    assert after == trainer.models["ada"].generate("ada", max_new_tokens=8, temperature=0)
    assert after != before
    assert http.get("/v1/live").json()["run"] == "0002"


def test_a_key_opens_one_user_and_the_operator_adds_another_while_it_runs(client: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(yaml.safe_dump({"ada": "sk-" + "a" * 20, "ben": "sk-" + "b" * 20}))
    keys.chmod(0o600)
    http = client(keys)
    of_ada, of_ben, of_cem = ({"authorization": f"Bearer sk-{letter * 20}"} for letter in "abc")
    assert http.post("/v1/users/ada/documents", json={"text": "one"}, headers=of_ada).status_code == 200
    assert http.post("/v1/users/ben/documents", json={"text": "one"}, headers=of_ben).status_code == 200
    assert http.post("/v1/users/ben/documents", json={"text": "one"}, headers=of_ada).status_code == 404
    assert http.post("/v1/users/ada/documents", json={"text": "one"}).status_code == 401
    assert set(http.get("/v1/live", headers=of_ada).json()["waiting_tokens"]) == {"ada"}
    assert http.post("/v1/users/cem/documents", json={"text": "one"}, headers=of_cem).status_code == 401
    keys.write_text(yaml.safe_dump({"ada": "sk-" + "a" * 20, "cem": "sk-" + "c" * 20}))
    assert http.post("/v1/users/cem/documents", json={"text": "one"}, headers=of_cem).status_code == 200
    assert http.post("/v1/users/ben/documents", json={"text": "one"}, headers=of_ben).status_code == 401
    keys.write_text("ada: [not a key]")
    assert http.post("/v1/users/cem/documents", json={"text": "two"}, headers=of_cem).status_code == 200
    keys.write_text("")
    assert http.post("/v1/users/cem/documents", json={"text": "two"}, headers=of_cem).status_code == 401
    keys.write_text(yaml.safe_dump({"cem": "sk-" + "c" * 20}))
    assert http.post("/v1/users/cem/documents", json={"text": "two"}, headers=of_cem).status_code == 200
    keys.unlink()
    assert http.post("/v1/users/cem/documents", json={"text": "two"}, headers=of_cem).status_code == 401


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/users/ada/documents", {}),
        ("/v1/users/ada/documents", {"documents": []}),
        ("/v1/users/ada/documents", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/users/ada/documents", {"documents": [{"text": "x"}, {"other": "y"}]}),
        ("/v1/users/a%00b/documents", {"text": "x"}),
        (f"/v1/users/{'x' * 260}/documents", {"text": "x"}),
        ("/v1/fine_tuning/jobs", {"model": "ada", "training_file": "file-" + "a" * 300}),
        ("/v1/fine_tuning/jobs", {"model": "ada", "training_file": "file-../../keys"}),
        ("/v1/fine_tuning/jobs", {"model": "ada"}),
    ],
)
def test_wrong_requests_are_refused_in_one_line(path: str, body: Any, client: Any) -> None:
    response = client().post(path, json=body)
    assert response.status_code in (400, 404), response.text
    assert "\n" not in response.json()["error"]["message"]


def test_fine_tuning_of_the_openai_client(client: Any) -> None:
    """The real client library, over the application."""
    http = client()
    with openai.OpenAI(base_url=str(http.base_url.join("/v1")), api_key="none") as library:
        rows = "\n".join(json.dumps({"text": text}) for text in NEW_TEXT)
        wait_for(lambda: http.trainer.is_served(1))
        uploaded = library.files.create(file=("rows.jsonl", io.BytesIO(rows.encode())), purpose="fine-tune")
        job = library.fine_tuning.jobs.create(model="ben", training_file=uploaded.id)
        assert job.status in ("queued", "running")
        wait_for(lambda: library.fine_tuning.jobs.retrieve(job.id).status == "succeeded")
        assert library.fine_tuning.jobs.retrieve(job.id).fine_tuned_model == "ben"
        assert http.trainer.is_served(2)
        with pytest.raises(openai.NotFoundError):
            library.fine_tuning.jobs.retrieve("ftjob-ben-0000")
        with pytest.raises(openai.NotFoundError):  # a file is used once
            library.fine_tuning.jobs.create(model="ben", training_file=uploaded.id)


def test_files_of_the_openai_client_are_listed_and_deleted(client: Any) -> None:
    """A file that a job has used is deleted with the documents that came from it."""
    http = client()
    with openai.OpenAI(base_url=str(http.base_url.join("/v1")), api_key="none") as library:
        wait_for(lambda: http.trainer.is_served(1))

        def upload(text: str) -> Any:
            rows = json.dumps({"text": text}).encode()
            return library.files.create(file=("rows.jsonl", io.BytesIO(rows)), purpose="fine-tune")

        used, unused = upload("one"), upload("two")
        assert {file.id for file in library.files.list()} == {used.id, unused.id}
        wrong = library.files.create(file=("rows.jsonl", io.BytesIO(b'{"other": "x"}')), purpose="fine-tune")
        with pytest.raises(openai.BadRequestError, match="line 1"):
            library.fine_tuning.jobs.create(model="ben", training_file=wrong.id)
        assert library.files.delete(wrong.id).deleted  # it is still there
        library.fine_tuning.jobs.create(model="ben", training_file=used.id)
        (listed,) = library.files.list()
        assert listed == unused
        for file in (used, unused):
            assert library.files.delete(file.id).deleted
            with pytest.raises(openai.NotFoundError):
                library.files.delete(file.id)
        assert library.files.list().data == []
        assert http.trainer.store.documents("ben") == []
        assert not http.trainer.store.pending


def test_an_upload_that_a_killed_process_was_about_to_use_is_there_again(client: Any, tmp_path: Path) -> None:
    http = client()
    uploaded = http.post("/v1/files", files={"file": b'{"text": "one"}'}).json()
    path = tmp_path / "live" / "files" / f"{uploaded['id']}.json"
    path.rename(path.with_suffix(".used"))
    LiveApi(
        http.trainer, make_app(Engine(http.trainer.models, rows=1), Keys([], None), Limits()).state.service, path.parent
    )
    assert [file["id"] for file in http.get("/v1/files").json()["data"]] == [uploaded["id"]]


def test_documents_are_listed_and_deleted(client: Any) -> None:
    http = client()
    trainer, url = http.trainer, "/v1/users/ada/documents"
    wait_for(lambda: trainer.is_served(1))
    ids = http.post(url, json={"documents": [{"text": text} for text in NEW_TEXT]}).json()["ids"]
    wait_for(lambda: trainer.is_served(2))
    (waiting,) = http.post(url, json={"text": "this one waits"}).json()["ids"]
    listed = http.get(url).json()["data"]
    assert [document["id"] for document in listed] == [*ids, waiting]
    assert [document["text"] for document in listed] == [*NEW_TEXT, "this one waits"]
    assert [document["run"] for document in listed] == ["0002"] * len(ids) + [None]
    assert http.get("/v1/users/ben/documents").json()["data"] == []
    assert http.delete(f"/v1/users/ben/documents/{waiting}").status_code == 404
    deleted = http.delete(f"{url}/{waiting}")
    assert (deleted.status_code, deleted.json()["runs"]) == (200, [])
    assert "ada" not in trainer.store.pending
    deleted = http.delete(f"{url}/{ids[3]}")
    assert (deleted.json()["deleted"], deleted.json()["runs"]) == (True, ["0002"])
    assert "comingle leave" in deleted.json()["note"]
    assert http.delete(f"{url}/{ids[3]}").status_code == 404
    assert [document["id"] for document in http.get(url).json()["data"]] == [*ids[:3], *ids[4:]]


def test_documents_and_files_of_others_are_not_seen_or_deleted(client: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(yaml.safe_dump({name: f"sk-{name[0] * 20}" for name in ("ada", "ben")}))
    keys.chmod(0o600)
    http = client(keys)
    of_ada, of_ben = ({"authorization": f"Bearer sk-{letter * 20}"} for letter in "ab")
    url = "/v1/users/ada/documents"
    (document_id,) = http.post(url, json={"text": "one"}, headers=of_ada).json()["ids"]
    file_id = http.post("/v1/files", files={"file": b'{"text": "one"}'}, headers=of_ada).json()["id"]
    for path in (url, f"{url}/{document_id}", f"/v1/files/{file_id}"):
        for headers, status in ((of_ben, 404), ({}, 401)):
            method = "get" if path == url else "delete"
            assert http.request(method, path, headers=headers).status_code == status
    assert http.get("/v1/files", headers=of_ben).json()["data"] == []
    stolen = {"model": "ben", "training_file": file_id}
    assert http.post("/v1/fine_tuning/jobs", json=stolen, headers=of_ben).status_code == 404
    job = {"model": "ada", "training_file": file_id}
    assert http.post("/v1/fine_tuning/jobs", json=job, headers=of_ada).status_code == 200
    assert http.delete(f"/v1/files/{file_id}", headers=of_ben).status_code == 404
    assert len(http.get(url, headers=of_ada).json()["data"]) == 2


@pytest.mark.parametrize("name", ["a/b", "50%", "50%41", "a/documents/b", "documents", "ann lee", "a?b#c"])
def test_names_with_any_character_have_documents(name: str, client: Any) -> None:
    http = client()
    url = f"/v1/users/{quote(name, safe='')}/documents"
    with openai.OpenAI(base_url=str(http.base_url.join("/v1")), api_key="none") as library:
        (document_id,) = http.post(url, json={"text": "one"}).json()["ids"]
        assert http.trainer.store.users() == [name]
        assert [document["id"] for document in http.get(url).json()["data"]] == [document_id]
        rows = io.BytesIO(b'{"text": "two"}')
        uploaded = library.files.create(file=("rows.jsonl", rows), purpose="fine-tune")
        job = library.fine_tuning.jobs.create(model=name, training_file=uploaded.id)
        assert library.fine_tuning.jobs.retrieve(job.id).model == name
        assert http.delete(f"{url}/{document_id}").status_code == 200
        assert [document["text"] for document in http.get(url).json()["data"]] == ["two"]


def test_health_says_what_the_trainer_does(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    http = client()
    trainer = http.trainer
    wait_for(lambda: trainer.is_served(1))
    wait_for(lambda: http.get("/health").json() == {"training": "waiting"})
    trainer.publish = None  # an error that nothing expects
    trainer.store.add("ada", NEW_TEXT)
    wait_for(lambda: http.get("/health").json() == {"training": "failed"})
    assert http.get("/health").status_code == 200
    assert http.get("/v1/live").json()["error"] == "TypeError"
    assert answer(http, "ada").status_code == 200


def test_conversations_come_in_and_change_the_answers(client: Any, tmp_path: Path) -> None:
    """What a run would refuse is refused when it arrives, since the user would wait for ever."""
    http = client(changes=conversations_of(tmp_path))
    trainer, url = http.trainer, "/v1/users/cem/documents"
    wait_for(lambda: trainer.is_served(1))
    user, response = conversation_of("cem", 1)["messages"]
    for messages in (
        [],
        [user],
        [response],
        [{"role": "wizard", "content": "x"}, response],
        [user, {**response, "content": ""}],
        [user, {**response, "weight": 3}],
        [{**user, "content": 3}, response],
    ):
        refused = http.post(url, json={"messages": messages})
        assert refused.status_code == 400, messages
        assert refused.json()["error"]["message"].startswith("messages: "), refused.text
    parts = {"role": "user", "content": [{"type": "text", "text": "how much is 3?"}]}
    assert http.post(url, json={"messages": [parts, response]}).json()["tokens"] > len("how much is 3?")
    documents = [conversation_of("cem", number) for number in range(100, 160)]
    assert http.post(url, json={"documents": documents}).status_code == 200
    wait_for(lambda: trainer.is_served(2))
    assert set(trainer.models) == {"ada", "ben", "cem"}
    body = {"model": "cem", "messages": [user], "max_tokens": 4}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert http.get(url).json()["data"][1]["messages"] == documents[0]["messages"]


@pytest.mark.slow
def test_killed_at_random_moments_it_loses_nothing(tmp_path: Path) -> None:
    """Real processes; every acknowledged document is trained on exactly once, and all runs are complete."""
    (tmp_path / "recipe.yaml").write_text(recipe_of(tmp_path).as_yaml())
    command = [sys.executable, "-m", "comingle", "live", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "live")]
    draw, acknowledged = random.Random(3), set()
    for kill in range(20):
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen([*command, "--port", "0", "--new-tokens", "300"], stdout=log, stderr=log)
        try:
            wait_for(lambda: "http://" in (tmp_path / "log").read_text())
            url = re.findall(r"http://[\d.:]+", (tmp_path / "log").read_text())[0]
            until = time.monotonic() + draw.uniform(0.05, 2.5)
            while time.monotonic() < until:
                number = len(acknowledged)
                texts = [f"document {kill} {number} {line} {text}" for line, text in enumerate(NEW_TEXT[:20])]
                documents = {"documents": [{"text": text} for text in texts]}
                added = httpx.post(f"{url}/v1/users/ada/documents", json=documents, timeout=30)
                assert added.status_code == 200
                acknowledged |= set(added.json()["ids"])
                completion = {"model": "ada", "prompt": "ada", "max_tokens": 2}
                assert httpx.post(f"{url}/v1/completions", json=completion, timeout=30).status_code == 200
            if kill == 19:
                wait_for(lambda: len(list((tmp_path / "live" / "runs").glob("*/metrics.json"))) >= 2)
        finally:
            process.send_signal(signal.SIGKILL if kill < 19 else signal.SIGTERM)
            process.wait(60)
    stored: list[str] = []
    for path in [*(tmp_path / "live" / "incoming").glob("*.jsonl"), *(tmp_path / "live" / "texts").rglob("*.jsonl")]:
        stored += [json.loads(line)["id"] for line in path.read_bytes().decode().splitlines()]
    assert acknowledged <= set(stored)
    assert len(stored) == len(set(stored))
    runs = sorted((tmp_path / "live" / "runs").glob("*/metrics.json"))
    assert len(runs) >= 2
    for path in runs:
        api.load(path.parent)
    assert os.listdir(tmp_path / "live" / "files") == []


def test_privacy_accounts_go_on_until_the_budget_is_spent(start: Open, tmp_path: Path) -> None:
    """One exchange in each run; the budget allows two for each user."""
    privacy = {"noise_multiplier": 1.0, "accountant": "rdp", "epsilon": epsilon(Release(noise=1.0), 2, 1e-5, "rdp")}
    trainer = start({"privacy": privacy})
    trainer.start()
    wait_for(lambda: trainer.is_served(1))
    trainer.store.add("ada", NEW_TEXT)
    wait_for(lambda: trainer.is_served(2))
    spent = read_metrics(tmp_path / "live" / "runs" / "0002")["privacy"]["users"]
    counts = {"ada": 2, "ben": 1}
    assert spent == {name: epsilon(Release(noise=1.0), count, 1e-5, "rdp") for name, count in counts.items()}
    trainer.store.add("ada", NEW_TEXT)
    wait_for(lambda: any("no further run" in line for line in trainer.said))  # type: ignore[attr-defined]
    trainer.store.add("ben", NEW_TEXT)
    wait_for(lambda: trainer.is_served(3))
    rounds = [event for event in read_events(tmp_path / "live" / "runs" / "0003") if event["event"] == "round"]
    assert [set(event["train_loss_nats"]) for event in rounds] == [{"ben"}] * 2
    assert trainer.store.pending["ada"] > 0
