"""``comingle chat`` and ``comingle serve`` as commands: what they say, refuse, and survive."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

import comingle as library
from comingle.serving.access import read_keys
from comingle.utils.errors import DataError


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, write_recipe: Any) -> Path:
    """A comparison of CoMiGS and local training."""
    recipe = write_recipe(tmp_path_factory.mktemp("serving") / "project")
    folder = recipe.parent / "runs"
    library.compare(recipe, ["comigs-1g1s", "local"], seeds=[0], out=folder, **{"training.rounds": 1})
    return folder


@pytest.fixture
def typed(comingle: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``comingle chat`` with what somebody types."""

    def chat(text: str, *arguments: Any) -> Any:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        return comingle("chat", *arguments)

    return chat


def printable(text: str) -> str:
    from comingle.utils.terminal import printable

    return printable(text, keep="\n\t")


# ---------------------------------------------------------------- chat


@pytest.mark.slow
def test_a_chat_says_what_the_users_model_says(runs: Path, typed: Any) -> None:
    options = ["--method", "comigs-1g1s", "--user", "bob", "--temperature", 0, "--max-tokens", 9]
    answer = typed('one two\n/user cem\n"""\na\nb\n"""\nthree\\\nfour\n', runs, *options)
    run = library.load(runs / "comigs-1g1s-seed0")
    said = [("bob", "one two"), ("cem", "a\nb"), ("cem", "three\nfour")]
    texts = [printable(run.user(name).generate(text, max_new_tokens=9)) for name, text in said]
    assert answer.code == 0
    first, answers = answer.out.split("\n", 1)
    assert "bob" in first
    assert re.fullmatch(rf"{re.escape(texts[0])}\n.*cem.*\n{re.escape(texts[1])}\n{re.escape(texts[2])}\n", answers)


@pytest.mark.slow
def test_routes_and_comparisons_are_shown(runs: Path, typed: Any) -> None:
    options = ["--method", "comigs-1g1s", "--temperature", 0, "--max-tokens", 5]
    ann = library.load(runs / "comigs-1g1s-seed0").user("ann")
    text = next(text for text in "abcdefgh" if ann.generate(text, max_new_tokens=5))
    answer = typed(f"/route\n{text}\n/route\n/route 2\n/route 3\n/compare\n", runs, *options)
    assert "/route: no answer yet" in answer.out
    assert "mean of all layers: generalist " in answer.out
    assert "layer 2: generalist " in answer.out
    assert "/route: got '3'" in answer.out
    assert all(name in answer.out for name in ("pretrained", "local", "ann"))
    answer = typed("/compare abc\n/route\n", runs / "local-seed0", *options[2:])
    assert "--against RUN" in answer.out
    local = library.load(runs / "local-seed0").user("ann")
    text = next(text for text in "abcdefgh" if local.generate(text, max_new_tokens=5))
    answer = typed(
        f"{text}\n/route\n/compare abc\n", runs / "local-seed0", *options[2:], "--against", runs / "local-seed0"
    )
    assert "has no routers" in answer.out
    assert "│ local" in answer.out or "┃ local" in answer.out


def test_mistakes_in_a_chat_do_not_end_it(runs: Path, typed: Any) -> None:
    text = f"/user eve\n/usre ann\n{'x' * 5000}\n/compare\n/clear\n/help\n"
    answer = typed(text, runs / "local-seed0")
    assert answer.code == 0
    for told in (
        "no user 'eve'",
        "no command '/usre'; /help lists them. Did you mean '/user'?",
    ):
        assert told in answer.out
    assert "1,024" in answer.out
    assert "/compare: give a text" in answer.out
    assert "new conversation" in answer.out


def test_a_byte_that_is_no_text_does_not_end_a_chat(runs: Path, comingle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--method", "comigs-1g1s", "--temperature", 0, "--max-tokens", 5]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hi \xff\none two\n"), encoding="utf-8"))
    answer = comingle("chat", runs, *options)
    assert (answer.code, answer.err) == (0, "")
    assert "a text is not valid Unicode: '\\udcff' at 3" in answer.out
    said = library.load(runs / "comigs-1g1s-seed0").user("ann").generate("one two", max_new_tokens=5)
    assert answer.out.endswith(f"{printable(said)}\n")


def test_conversations_are_answered_with_what_was_said_before(runs: Path, people: Any) -> None:
    from comingle.serving.answers import Chat
    from comingle.serving.engine import Engine

    mine, told = people(), list[str]()
    chat = Chat(engine=Engine(mine, rows=1), user="ann", plain=False, max_tokens=7, temperature=0)
    first = chat.say("hello", told.append)
    messages: list[dict[str, str]] = [{"role": "user", "content": "hello"}]
    assert first == "".join(told) == mine["ann"].generate(messages, max_new_tokens=7)
    chat.switch("bob")
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "and?"}]
    assert chat.say("and?", told.append) == mine["bob"].generate(messages, max_new_tokens=7)
    chat.clear()
    assert chat.say("hello", told.append) == mine["bob"].generate(messages[:1], max_new_tokens=7)


def test_a_conversation_that_fills_the_context_names_what_empties_it(runs: Path, people: Any) -> None:
    from comingle.serving.answers import Chat
    from comingle.serving.engine import Engine

    engine = Engine(people(), rows=1)
    chat = Chat(engine=engine, user="ann", plain=False, max_tokens=3, temperature=0)
    chat.say("hello", str)
    engine.context_length = len(chat.prompts.of_messages(chat.messages))
    for ask in (lambda: chat.say("and?", str), lambda: chat.compare({"ann": (engine, "ann")}, "and?")):
        with pytest.raises(DataError, match=r"allowed together: \d+; start a new conversation with /clear$"):
            ask()
    chat.clear()
    engine.context_length = 2
    with pytest.raises(DataError, match=r"; give a shorter text$"):
        chat.say("hello", str)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--user", "eve"], "no user 'eve'"),
        (["--method", "fedavg"], "no run of 'fedavg'; allowed: comigs-1g1s, local."),
        ([], "is a comparison; say which run with --method: comigs-1g1s, local"),
    ],
)
def test_a_run_or_a_user_that_is_not_there(runs: Path, typed: Any, arguments: list[str], told: str) -> None:
    more = ["--method", "local"] if "--user" in arguments else []
    answer = typed("", runs, *arguments, *more)
    assert (answer.code, answer.out) == (2, "")
    assert told in answer.err


@pytest.mark.parametrize("compiled", [pytest.param("auto", marks=pytest.mark.slow), False])
def test_a_base_that_is_large_enough_is_served_by_compiled_code(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Any
) -> None:
    from comingle.models.kernels import expert_mlp
    from comingle.serving import models as people

    monkeypatch.setenv("COMINGLE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "run"
    shutil.copytree(runs / "comigs-1g1s-seed0", folder)
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    recipe["runtime"]["compile"] = compiled
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    try:
        people.open_models(folder)
        assert not expert_mlp.is_enabled()
        monkeypatch.setattr(people, "MIN_COMPILED_PARAMETERS", 100)
        opened = people.open_models(folder)
        assert expert_mlp.is_enabled() == (compiled == "auto" and expert_mlp._compiler() is not None)
        said = opened.models["bob"].generate("one", max_new_tokens=8)
    finally:
        expert_mlp.disable()
    assert said == library.load(folder).user("bob").generate("one", max_new_tokens=8)  # type: ignore[union-attr]


# ---------------------------------------------------------------- keys


def test_keys_are_made_private_and_read_again(runs: Path, comingle: Any, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    answer = comingle("serve", runs / "local-seed0", "--make-keys", path)
    assert answer.code == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    keys = read_keys(path, ["ann", "bob", "cem"])
    assert list(keys) == ["ann", "bob", "cem"]
    assert len(set(keys.values())) == 3
    assert comingle("serve", runs / "local-seed0", "--make-keys", path).code == 2


# ---------------------------------------------------------------- serve, as a process


@contextmanager
def served(*arguments: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    program = "from comingle.cli import main; main()"
    command = [sys.executable, "-c", program, "serve", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("http://127.0.0.1:"), line + process.stdout.read()
        yield process, line.split()[0]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_server_that_is_killed_answers_the_same_again(runs: Path) -> None:
    """Nothing but what was being generated is lost: it keeps nothing."""
    before = sorted((path, path.stat().st_mtime_ns) for path in runs.rglob("*"))
    said = []
    for attempt in range(2):
        with served(runs, "--method", "comigs-1g1s", "--port", 0) as (process, url):
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
            answer = client.completions.create(model="bob", prompt="one", max_tokens=8, temperature=0)
            said.append(answer.choices[0].text)
            assert "<title>comingle: chat</title>" in httpx.get(url).text
            if attempt == 0:
                chunks = client.completions.create(model="ann", prompt="a", max_tokens=900, temperature=0, stream=True)
                next(iter(chunks))
                process.kill()
            else:
                process.send_signal(signal.SIGINT)
                started = time.monotonic()
                process.wait(20)
                assert time.monotonic() - started < 15
    assert said == [library.load(runs / "comigs-1g1s-seed0").user("bob").generate("one", max_new_tokens=8)] * 2
    assert sorted((path, path.stat().st_mtime_ns) for path in runs.rglob("*")) == before


@pytest.mark.slow
def test_a_chat_in_a_browser(runs: Path, tmp_path: Path) -> None:
    """A real server on a port of its own, and a browser that is told its address."""
    browser, visited = tmp_path / "browser", tmp_path / "visited"
    browser.write_text(f'#!/bin/sh\necho "$1" > {visited}\n')
    browser.chmod(0o700)
    program = "from comingle.cli import main; main()"
    command = [sys.executable, "-c", program, "chat", str(runs), "--method", "comigs-1g1s", "--web"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "BROWSER": str(browser)})
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[0]
        page = httpx.get(url)
        assert page.status_code == 200
        assert "<title>comingle: chat</title>" in page.text
        assert "data-keys" not in page.text.split(">")[1]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
        assert [model.id for model in client.models.list()] == ["ann", "bob", "cem"]
        answer = client.completions.create(model="cem", prompt="one", max_tokens=8, temperature=0)
        expected = library.load(runs / "comigs-1g1s-seed0").user("cem").generate("one", max_new_tokens=8)
        assert answer.choices[0].text == expected
        deadline = time.monotonic() + 20
        while not visited.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert visited.read_text() == f"{url}\n"
        process.send_signal(signal.SIGINT)
        process.wait(20)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_the_pages_example_runs_as_it_is_printed(runs: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    with served(runs, "--method", "comigs-1g1s", "--port", 0) as (_, url):
        code = code.replace("http://127.0.0.1:8000", url).replace('"ada"', '"ann"')
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.rstrip().rpartition(" ")[2].isdecimal()


def test_a_port_in_use_is_one_line(runs: Path, comingle: Any) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        answer = comingle("serve", runs / "local-seed0", "--port", port)
    assert answer.code == 2
    assert f"--host 127.0.0.1 --port {port}: cannot listen there: " in answer.err


def test_what_is_no_run_is_one_line(comingle: Any, tmp_path: Path) -> None:
    answer = comingle("serve", tmp_path / "nothing")
    assert answer.code == 2
    assert answer.err.startswith(f"comingle: {tmp_path}/nothing: ")
    assert comingle("serve", tmp_path).code == 2
