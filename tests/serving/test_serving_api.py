"""The server as the official client sees it."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from comingle.models.generation import Sampling, encode_prompt
from comingle.models.loading import load_base
from comingle.models.random_bases import byte_tokenizer
from comingle.serving.access import Keys, Limits, Rates, listen
from comingle.serving.api import make_app
from comingle.serving.engine import Engine

KEYS = {"ann": "sk-of-ann-0123456789", "bob": "sk-of-bob-0123456789"}
HELLO: Any = [{"role": "user", "content": "hello there"}]


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """The address of a real server in a thread."""
    place = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on", ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [place]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{place.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        place.close()


@pytest.fixture(scope="module")
def engine(people: Any) -> Engine:
    return Engine(people(), rows=3)


@pytest.fixture(scope="module")
def address(people: Any) -> Iterator[str]:
    """Everybody's models, open to all."""
    with serving(make_app(Engine(people(), rows=3), Keys(people(), None), Limits(rate=10_000))) as address:
        yield address


@pytest.fixture(scope="module")
def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="anything", max_retries=0)


@pytest.fixture(scope="module")
def locked(people: Any) -> Iterator[str]:
    """The same behind keys, with little of everything."""
    limits = Limits(rate=10_000, queue=2, max_tokens=64, body_bytes=4000, choices=3)
    with serving(make_app(Engine(people(), rows=1), Keys(people(), KEYS), limits)) as address:
        yield address


# ---------------------------------------------------------------- answers


def test_the_models_are_the_users(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["ann", "bob", "cem"]
    assert client.models.retrieve("bob").owned_by == "comingle"


def test_a_completion_is_what_the_users_model_says(client: openai.OpenAI, people: Any) -> None:
    for name in people():
        answer = client.completions.create(model=name, prompt="one two", max_tokens=20, temperature=0)
        assert answer.choices[0].text == people()[name].generate("one two", max_new_tokens=20)
        assert answer.choices[0].finish_reason in ("stop", "length")
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 7
        assert answer.usage.total_tokens == 7 + answer.usage.completion_tokens


def test_prompts_without_tokens_start_from_the_token_between_documents(client: openai.OpenAI, people: Any) -> None:
    wanted = people()["ann"].generate("", max_new_tokens=9)
    for prompt in ("", [""], [[]]):
        answer = client.completions.create(model="ann", prompt=prompt, max_tokens=9, temperature=0)  # type: ignore[arg-type]
        assert answer.choices[0].text == wanted


@pytest.mark.slow
def test_a_chat_is_put_into_the_bases_template(client: openai.OpenAI, people: Any) -> None:
    for name in people():
        answer = client.chat.completions.create(model=name, messages=HELLO, max_completion_tokens=20, temperature=0)
        assert answer.choices[0].message.content == people()[name].generate(HELLO, max_new_tokens=20)
        parts: Any = [
            {"role": "user", "content": [{"type": "text", "text": "hello "}, {"type": "text", "text": "there"}]}
        ]
        again = client.chat.completions.create(model=name, messages=parts, max_tokens=20, temperature=0)
        assert again.choices[0].message.content == answer.choices[0].message.content


def test_sampling_settings_mean_what_they_mean_in_generate(client: openai.OpenAI, people: Any) -> None:
    cases: list[dict[str, Any]] = [{"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.5}, {"stop": ["e", "4"]}]
    for case in cases:
        answer = client.completions.create(model="cem", prompt="a", max_tokens=20, seed=5, **case)
        options = {"temperature": 1.0, "top_p": 1.0, **case}
        assert answer.choices[0].text == people()["cem"].generate("a", max_new_tokens=20, top_k=0, seed=5, **options)


def test_streams_are_the_same_text_in_pieces(client: openai.OpenAI, people: Any) -> None:
    expected = people()["ann"].generate(HELLO, max_new_tokens=30)
    options: dict[str, Any] = {"model": "ann", "max_tokens": 30, "temperature": 0, "stream": True}
    options["stream_options"] = {"include_usage": True}
    chunks = list(client.chat.completions.create(messages=HELLO, **options))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] in ("stop", "length")
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens <= 30
    texts = [c.choices[0].text for c in client.completions.create(prompt="one two", **options) if c.choices]
    assert "".join(texts) == people()["ann"].generate("one two", max_new_tokens=30)
    assert len(texts) > 3


def test_probabilities(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="ann", messages=HELLO, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    content = chat.choices[0].logprobs
    assert content is not None
    assert content.content is not None
    for token in content.content:
        assert token.logprob == token.top_logprobs[0].logprob
        assert [t.logprob for t in token.top_logprobs] == sorted((t.logprob for t in token.top_logprobs), reverse=True)
    text = client.completions.create(model="ann", prompt="one", max_tokens=5, temperature=0, logprobs=2)
    told = text.choices[0].logprobs
    assert told is not None
    assert told.token_logprobs is not None
    assert told.top_logprobs is not None
    assert told.text_offset is not None
    assert told.token_logprobs == [max(one.values()) for one in told.top_logprobs]
    assert told.text_offset[0] == 0
    streamed = client.completions.create(
        model="ann", prompt="one", max_tokens=5, temperature=0, logprobs=2, stream=True
    )
    values = [v for c in streamed if c.choices[0].logprobs for v in c.choices[0].logprobs.token_logprobs or []]
    assert values == pytest.approx(told.token_logprobs)


def test_several_answers_in_one_request(client: openai.OpenAI, people: Any) -> None:
    ann = people()["ann"]
    many = client.completions.create(model="ann", prompt=["a", "one two"], max_tokens=9, temperature=0)
    assert [c.text for c in many.choices] == [ann.generate(t, max_new_tokens=9) for t in ("a", "one two")]
    tokens = encode_prompt(ann.model.base.tokenizer, "one two")
    assert (
        client.completions.create(model="ann", prompt=tokens, max_tokens=9, temperature=0).choices[0].text
        == many.choices[1].text
    )
    some = client.chat.completions.create(model="ann", messages=HELLO, n=3, max_tokens=9, seed=1, stream=True)
    texts = ["", "", ""]
    for chunk in some:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    said = {"max_new_tokens": 9, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    assert texts == [ann.generate(HELLO, seed=1 + i, **said) for i in range(3)]


@pytest.mark.slow
def test_everybody_at_once(client: openai.OpenAI, people: Any) -> None:
    said: dict[tuple[str, int], str | None] = {}

    def ask(name: str, number: int) -> None:
        answer = client.completions.create(model=name, prompt="x" * number, max_tokens=5 + number, temperature=0)
        said[name, number] = answer.choices[0].text

    threads = [threading.Thread(target=ask, args=(name, i)) for name in people() for i in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == {(n, i): people()[n].generate("x" * i, max_new_tokens=5 + i) for n in people() for i in range(1, 9)}


def test_routes_are_those_of_the_users_model(address: str, people: Any) -> None:
    body = {"model": "bob", "prompt": "one ", "text": "two"}
    found = httpx.post(f"{address}/v1/route", json=body).json()
    expected = people()["bob"].route("one two")
    assert found["experts"] == list(expected.experts)
    assert found["tokens"] == list(expected.tokens[-3:])
    assert found["gates"] == expected.gates[:, -3:].tolist()


def test_an_answers_route_begins_behind_its_messages_or_its_prompt(address: str) -> None:
    def route(**place: Any) -> Any:
        return httpx.post(f"{address}/v1/route", json={"model": "bob", "text": "two", **place})

    for place in ({"prompt": "one "}, {"messages": HELLO}, {}):
        both = {"prompt": None, "messages": None, **place}
        assert route(**place).json()["gates"] == route(**both).json()["gates"]
    told = route(prompt="one ", messages=HELLO)
    assert told.status_code == 400
    assert told.json()["error"]["param"] == "prompt"
    assert "messages" in told.json()["error"]["message"]
    told = route(prompt="one ", messages=[])
    assert (told.status_code, told.json()["error"]["param"]) == (400, "messages")
    told = route(messages=[{**HELLO[0], "name": "ben"}])
    assert (told.status_code, told.json()["error"]["param"]) == (400, "messages.0.name")


# ---------------------------------------------------------------- what is refused


def refused(kind: type[openai.APIStatusError], call: Callable[[], Any]) -> dict[str, Any]:
    with pytest.raises(kind) as caught:
        call()
    body: Any = caught.value.body
    assert set(body) == {"message", "type", "param", "code"}
    return body


def test_a_wrong_request_is_told_what_is_wrong(client: openai.OpenAI, address: str) -> None:
    def chat(**changes: Any) -> Callable[[], Any]:
        return lambda: client.chat.completions.create(**{"model": "ann", "messages": HELLO, **changes})

    told = refused(openai.BadRequestError, chat(temperature=3))
    assert told["param"] == "temperature"
    assert told["message"].startswith("temperature: ")
    told = refused(openai.BadRequestError, chat(extra_body={"nothing": None}))
    assert (told["code"], told["param"]) == ("unsupported_parameter", "nothing")
    assert refused(openai.BadRequestError, chat(messages=[]))["param"] == "messages"
    assert (
        refused(openai.BadRequestError, chat(messages=[{"role": "boss", "content": "a"}]))["param"] == "messages.0.role"
    )
    told = refused(openai.BadRequestError, chat(messages=[{**HELLO[0], "name": "ben"}]))
    assert told["param"] == "messages.0.name"
    assert told["code"] == "unsupported_parameter"
    chat(messages=[{**HELLO[0], "name": None}], max_tokens=1)()
    assert refused(openai.BadRequestError, chat(max_tokens=1025))["param"] == "max_tokens"
    assert refused(openai.BadRequestError, chat(n=17))["param"] == "n"
    told = refused(openai.BadRequestError, chat(messages=[{"role": "user", "content": "long " * 2000}]))
    assert told["code"] == "context_length_exceeded"
    told = refused(openai.BadRequestError, lambda: client.completions.create(model="ann", prompt=[9999]))
    assert told["message"].startswith("prompt: got token 9999; allowed: 0 to ")
    for part, odd in (({"type": "image_url", "image_url": "u"}, "image_url"), ({"text": "a", "more": 1}, "more")):
        told = refused(openai.BadRequestError, chat(messages=[{"role": "user", "content": [part]}]))
        assert (told["param"], told["code"]) == ("messages.0.content", "unsupported_parameter")
        assert repr(odd) in told["message"]
    text = {"type": "text", "text": "hello"}
    chat(messages=[{"role": "user", "content": [text, text]}], max_tokens=1)()
    assert "logprobs: true" in refused(openai.BadRequestError, chat(top_logprobs=2))["message"]
    assert "stream: true" in refused(openai.BadRequestError, chat(stream_options={"include_usage": True}))["message"]
    assert refused(openai.BadRequestError, chat(stop="x" * 1001))["param"] == "stop.0"
    assert (
        refused(openai.BadRequestError, chat(extra_body={"repetition_penalty": 1e-39}))["param"] == "repetition_penalty"
    )
    long: dict[str, Any] = {"model": "ann", "prompt": "long " * 2000}
    told = refused(openai.BadRequestError, lambda: client.completions.create(**long, max_tokens=4))
    assert (told["code"], told["param"]) == ("context_length_exceeded", "prompt")
    assert ", and 4 " in told["message"]
    refused(openai.NotFoundError, chat(model="eve"))
    for body in (b"{", b"", b"[]", b"\xff", b'{"model": "ann", "model"'):
        answer = httpx.post(f"{address}/v1/chat/completions", content=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert httpx.get(f"{address}/v1/nothing").json()["error"]["message"] == "GET /v1/nothing: Not Found"
    assert httpx.get(f"{address}/v1/completions").status_code == 405


FUNCTION = {"type": "function", "function": {"name": "f"}}
CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
IN_CHAT: dict[str, tuple[list[Any], list[Any]]] = {
    "audio": ([], [{"voice": "a", "format": "wav"}]),
    "frequency_penalty": ([0, 0.0], [0.5, -2, 3, False]),
    "function_call": (["none", "auto"], [{"name": "f"}]),
    "functions": ([[]], [[{"name": "f"}]]),
    "logit_bias": ([{}], [{"5": 1}]),
    "modalities": ([[], ["text"]], [["text", "audio"]]),
    "moderation": ([], [{"model": "m"}]),
    "parallel_tool_calls": ([True], ["yes"]),
    "prediction": ([], [{"type": "content", "content": "a"}]),
    "presence_penalty": ([0], [0.5]),
    "prompt_cache_options": ([{}, {"mode": "implicit"}], [{"mode": "explicit"}]),
    "prompt_cache_retention": (["in_memory"], ["24h"]),
    "reasoning_effort": (["none"], ["high"]),
    "response_format": ([{"type": "text"}], [{"type": "json_object"}]),
    "service_tier": (["auto", "default"], ["flex"]),
    "store": ([False], [True, 0]),
    "tool_choice": (["none", "auto"], ["required", FUNCTION]),
    "tools": ([[]], [[FUNCTION]]),
    "verbosity": (["medium"], ["high"]),
    "web_search_options": ([], [{}]),
}
"""Keys of the standard that are not supported: their values that ask nothing, besides null, and others."""
SUPPORTED_IN_CHAT: dict[str, Any] = {
    "logprobs": False,
    "max_completion_tokens": 1,
    "max_tokens": 1,
    "metadata": {"a": "b"},
    "n": 1,
    "prompt_cache_key": "a",
    "safety_identifier": "a",
    "seed": 1,
    "stop": [],
    "stream_options": {},
    "temperature": 1,
    "top_logprobs": 0,
    "top_p": 1,
    "user": "a",
}
IN_COMPLETIONS: dict[str, tuple[list[Any], list[Any]]] = {
    **{key: IN_CHAT[key] for key in ("frequency_penalty", "presence_penalty", "logit_bias")},
    "best_of": ([1], [2, True]),
    "echo": ([False], [True]),
    "suffix": ([""], ["b"]),
}
SUPPORTED_IN_COMPLETIONS = {
    **{key: SUPPORTED_IN_CHAT[key] for key in ("max_tokens", "n", "seed", "stop", "stream_options", "temperature")},
    "top_p": 1,
    "user": "a",
    "logprobs": 0,
}


def standard(kind: Any) -> set[str]:
    """The keys of a request in the installed client's types."""
    return set(kind.CompletionCreateParamsBase.__annotations__) - {"model", "messages", "prompt"}


@pytest.mark.slow
def test_every_key_of_the_standard_may_ask_nothing(address: str) -> None:
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_params

    asks = {"model": "ann", "max_tokens": 1}
    cases = [
        ("chat/completions", {**asks, "messages": HELLO}, chat_params, IN_CHAT, SUPPORTED_IN_CHAT),
        ("completions", {**asks, "prompt": "a"}, completion_create_params, IN_COMPLETIONS, SUPPORTED_IN_COMPLETIONS),
    ]
    for path, body, kind, unsupported, supported in cases:
        keys = standard(kind)
        assert keys == unsupported.keys() | supported.keys()
        every = {**body, **dict.fromkeys(keys), "stream": None}
        assert httpx.post(f"{address}/v1/{path}", json=every).status_code == 200
        defaults = [(key, value) for key, (taken, _) in unsupported.items() for value in taken] + [*supported.items()]
        for key, value in defaults:
            answer = httpx.post(f"{address}/v1/{path}", json={**body, key: value})
            assert answer.status_code == 200, (key, value, answer.text)
        for key, value in [(key, value) for key, (_, refused) in unsupported.items() for value in refused]:
            answer = httpx.post(f"{address}/v1/{path}", json={**body, key: value})
            told = answer.json()["error"]
            assert (answer.status_code, told["code"], told["param"]) == (400, "unsupported_parameter", key), value
            assert told["message"].startswith(f"{key}: not supported here")
    assert httpx.post(f"{address}/v1/chat/completions", json={**cases[0][1], "store": True}).json()["error"][
        "message"
    ] == ("store: not supported here; allowed: false")


def test_a_prompt_that_is_null_begins_a_new_document(address: str) -> None:
    body = {"model": "ann", "max_tokens": 9, "temperature": 0}
    texts = [
        httpx.post(f"{address}/v1/completions", json={**body, "prompt": prompt}).json()["choices"][0]["text"]
        for prompt in (None, "")
    ]
    assert texts[0] == texts[1]


def test_an_answer_is_taken_back_as_a_turn(client: openai.OpenAI) -> None:
    """The usual loop of a chat, in which null keys of the answer come back."""
    message: Any = client.chat.completions.create(model="ann", messages=HELLO, max_tokens=4, temperature=0).choices[0]
    message = message.message
    again: Any = {"role": "user", "content": "again"}
    plain: Any = {"role": "assistant", "content": message.content}
    expected = client.chat.completions.create(
        model="ann", messages=[*HELLO, plain, again], max_tokens=9, temperature=0
    ).choices[0]
    empty: Any = {
        **plain,
        "name": "",
        "refusal": "",
        "annotations": [],
        "audio": None,
        "tool_calls": [],
        "function_call": {},
    }
    parts: Any = {
        "role": "assistant",
        "content": [{"type": "text", "text": message.content, "prompt_cache_breakpoint": None}],
    }
    backs: list[Any] = [message, message.model_dump(), message.to_dict(), empty, parts]
    for back in backs:
        answer = client.chat.completions.create(
            model="ann", messages=[*HELLO, back, again], max_tokens=9, temperature=0
        )
        assert answer.choices[0].message.content == expected.message.content


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tool_calls", CALLS),
        ("function_call", {"name": "f", "arguments": "{}"}),
        ("refusal", "no"),
        ("name", "ben"),
        ("audio", {"id": "a"}),
        ("annotations", [{"type": "url_citation"}]),
        ("tool_call_id", "1"),
    ],
)
@pytest.mark.parametrize("content", [None, "text"])
def test_what_a_turn_says_besides_text_is_not_supported(address: str, key: str, value: Any, content: Any) -> None:
    messages = [*HELLO, {"role": "assistant", "content": content, key: value}]
    answer = httpx.post(f"{address}/v1/chat/completions", json={"model": "ann", "messages": messages})
    told = answer.json()["error"]
    assert (answer.status_code, told["param"]) == (400, f"messages.1.{key}")
    assert told["message"].startswith(f"messages.1.{key}: ")


def test_an_empty_prompt_without_a_token_to_begin_with_is_told(people: Any, tmp_path: Path) -> None:
    base, tokenizer = load_base("random:llama?layers=1&dim=32", dtype="float32", device="cpu"), byte_tokenizer()
    for key in ("bos", "eos", "pad"):
        setattr(tokenizer, f"{key}_token", None)
    base.model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    ours = people(base=str(tmp_path))
    with serving(make_app(Engine(ours, rows=1), Keys(ours, None), Limits())) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
        assert client.completions.create(model="ann", prompt="a", max_tokens=3, temperature=0).choices
        prompts: list[Any] = ["", ["a", ""], [[]]]
        for prompt in prompts:
            told = refused(openai.BadRequestError, lambda p=prompt: client.completions.create(model="ann", prompt=p))
            assert told["param"] == "prompt"
            assert told["message"].startswith("an empty prompt: ")
        assert httpx.post(f"{address}/v1/route", json={"model": "ann", "text": "a"}).status_code == 400


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (400, {"Host": "evil.example"}),
        (400, {"Host": "evil.example:80", "Origin": "http://evil.example:80"}),
        (400, {"Host": "127.0.0.1.evil.example"}),
        (400, {"Host": "[::1"}),
        (400, {"Host": ""}),
        (403, {"Origin": "https://evil.example"}),
        (403, {"Origin": "null"}),
        (403, {"Origin": ""}),
        (403, {"Origin": "http://127.0.0.1:1"}),
        (403, {"Origin": "http://[::1"}),
        (403, {"Origin": "https://evil.example", "Sec-Fetch-Site": "same-origin"}),
        (403, {"Sec-Fetch-Site": "cross-site"}),
        (403, {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}),
    ],
)
@pytest.mark.sampled(2)
def test_without_keys_a_page_of_another_site_is_refused(address: str, status: int, headers: dict[str, str]) -> None:
    body = {"model": "ann", "prompt": "a", "max_tokens": 1}
    plain = {**headers, "Content-Type": "text/plain"}  # such a request needs no leave of the server's
    for answer in (
        httpx.get(f"{address}/", headers=headers),
        httpx.get(f"{address}/v1/models", headers=headers),
        httpx.post(f"{address}/v1/completions", json=body, headers=headers),
        httpx.post(f"{address}/v1/completions", content=json.dumps(body), headers=plain),
        httpx.post(f"{address}/v1/route", json={**body, "text": "b"}, headers=headers),
    ):
        assert answer.status_code == status
        assert "without keys" in answer.json()["error"]["message"]
        assert "access-control-allow-origin" not in answer.headers


def test_without_keys_the_servers_own_page_and_programs_are_answered(address: str) -> None:
    port = address.rpartition(":")[2]
    for headers in (
        {},
        {"Host": f"localhost:{port}"},
        {"Host": f"LOCALHOST:{port}", "Origin": f"http://localhost:{port}"},
        {"Host": f"[::1]:{port}", "Origin": f"http://[::1]:{port}", "Sec-Fetch-Site": "same-origin"},
        {"Origin": address, "Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"},
    ):
        assert httpx.get(f"{address}/v1/models", headers=headers).status_code == 200


def test_with_keys_the_key_alone_decides(locked: str) -> None:
    headers = {"Authorization": f"Bearer {KEYS['ann']}", "Host": "models.example", "Origin": "https://pages.example"}
    assert httpx.get(f"{locked}/v1/models", headers=headers).status_code == 200
    del headers["Authorization"]
    assert httpx.get(f"{locked}/v1/models", headers=headers).status_code == 401


def test_a_key_opens_its_users_model_alone(locked: str, people: Any) -> None:
    ann = openai.OpenAI(base_url=f"{locked}/v1", api_key=KEYS["ann"], max_retries=0)
    assert [model.id for model in ann.models.list()] == ["ann"]
    text = ann.completions.create(model="ann", prompt="a", max_tokens=4, temperature=0).choices[0].text
    assert text == people()["ann"].generate("a", max_new_tokens=4)
    for other in ("bob", "cem", "eve"):  # another's, one without a key, nobody
        told = refused(openai.NotFoundError, lambda other=other: ann.completions.create(model=other, prompt="a"))
        assert repr(other) in told["message"]
        refused(openai.NotFoundError, lambda other=other: ann.models.retrieve(other))
    for key in ("sk-of-ann-012345678", "sk-of-ann-01234567890", "nobody"):
        headers = {"Authorization": f"Bearer {key}"}
        for path in ("models", "models/ann"):
            assert httpx.get(f"{locked}/v1/{path}", headers=headers).status_code == 401
        for path in ("chat/completions", "completions", "route"):
            answer = httpx.post(f"{locked}/v1/{path}", headers=headers, content=b"{")
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"


def test_a_body_and_answers_have_a_limit(locked: str) -> None:
    ann = openai.OpenAI(base_url=f"{locked}/v1", api_key=KEYS["ann"], max_retries=0)
    told = refused(openai.BadRequestError, lambda: ann.completions.create(model="ann", prompt="a" * 5000))
    assert "4,000 bytes" in told["message"]
    refused(openai.BadRequestError, lambda: ann.completions.create(model="ann", prompt=["a"] * 4))


def test_a_rate_has_a_limit(people: Any) -> None:
    with serving(make_app(Engine(people(), rows=1), Keys(people(), None), Limits(rate=2))) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
        for _ in range(2):
            client.completions.create(model="ann", prompt="a", max_tokens=1)
        told = refused(openai.RateLimitError, lambda: client.completions.create(model="ann", prompt="a", max_tokens=1))
        assert told["code"] == "rate_limit_exceeded"
        client.completions.create(model="bob", prompt="a", max_tokens=1)


def test_a_bucket_fills_as_time_goes_by() -> None:
    now = [0.0]
    rates = Rates(60, clock=lambda: now[0])
    assert [rates.take_request("ann") for _ in range(60)] == [0] * 60
    assert rates.take_request("ann") == pytest.approx(1)
    now[0] = 1.0
    assert rates.take_request("ann") == 0
    assert rates.take_request("ann") > 0


@pytest.mark.slow
def test_a_thousand_requests_at_once(people: Any) -> None:
    """Few are answered and the rest refused, each in the standard's words, and the server goes on."""
    import resource

    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most[1], most[1]))  # both ends of each are in this process
    body = {"model": "ann", "prompt": "a", "max_tokens": 64, "temperature": 0}

    async def ask_all(address: str) -> list[httpx.Response]:
        free = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=300, limits=free) as client:
            return await asyncio.gather(
                *(client.post(f"{address}/v1/completions", json=body) for _ in range(1000)),
            )

    try:
        with serving(make_app(Engine(people(), rows=2), Keys(people(), None), Limits(rate=10_000, queue=8))) as address:
            answers = asyncio.run(ask_all(address))
            assert httpx.get(f"{address}/v1/models").status_code == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
    refused = [answer for answer in answers if answer.status_code == 503]
    answered = [answer for answer in answers if answer.status_code == 200]
    assert len(refused) + len(answered) == 1000
    assert len(answered) >= 10
    assert {answer.json()["error"]["code"] for answer in refused} == {"overloaded"}
    expected = people()["ann"].generate("a", max_new_tokens=64)
    assert {answer.json()["choices"][0]["text"] for answer in answered} == {expected}


# ---------------------------------------------------------------- clients that go away


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_row(people: Any, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(people(), rows=1)
    step = engine.step

    def slowly() -> None:
        time.sleep(0.01)
        step()

    engine.step = slowly  # type: ignore[method-assign]
    limits = Limits(queue=0)
    with serving(make_app(engine, Keys(people(), None), limits)) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
        options: dict[str, Any] = {"model": "ann", "prompt": "a", "max_tokens": 900, "temperature": 0}
        if stream:
            chunks = client.completions.create(**options, stream=True)
            next(iter(chunks))
            told = refused(openai.InternalServerError, lambda: client.completions.create(**options))
            assert told["code"] == "overloaded"
            chunks.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                client.completions.create(**options, timeout=0.3)
        deadline = time.monotonic() + 10
        while engine.busy and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not engine.busy
        answer = client.completions.create(model="bob", prompt="a", max_tokens=2, temperature=0).choices[0].text
        assert answer == people()["bob"].generate("a", max_new_tokens=2)
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    "head", ["Content-Length: 1000\r\n\r\n", "Transfer-Encoding: chunked\r\n\r\n400\r\n"], ids=["length", "chunks"]
)
@pytest.mark.parametrize("path", ["chat/completions", "completions", "route"])
@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.sampled(2)
def test_a_client_that_goes_away_while_its_body_is_read_leaves_no_traceback(
    address: str, caplog: pytest.LogCaptureFixture, head: str, path: str, reset: bool
) -> None:
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as place:
        place.sendall(f'POST /v1/{path} HTTP/1.1\r\nHost: {host}\r\n{head}{{"model": '.encode())
        time.sleep(0.1)
        if reset:
            place.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    time.sleep(0.2)
    assert httpx.get(f"{address}/v1/models").status_code == 200
    assert caplog.text == ""


def test_a_step_that_fails_is_told_and_the_next_are_answered(people: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(people(), rows=2)
    decode = engine._decode
    engine._decode = lambda prompt_batch: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    with serving(make_app(engine, Keys(people(), None), Limits())) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
        told = refused(
            openai.InternalServerError, lambda: client.completions.create(model="ann", prompt="a", temperature=0)
        )
        assert "ZeroDivisionError" not in told["message"]
        lines = httpx.post(
            f"{address}/v1/completions", json={"model": "ann", "prompt": "a", "stream": True, "temperature": 0}
        ).text
        assert json.loads(lines.strip().splitlines()[-1].removeprefix("data: "))["error"]["type"] == "server_error"
        assert "ZeroDivisionError" in caplog.text
        engine._decode = decode  # type: ignore[method-assign]
        assert client.completions.create(model="ann", prompt="a", max_tokens=5, temperature=0).choices[
            0
        ].text == people()["ann"].generate("a", max_new_tokens=5)


def test_defaults_sample_from_all_tokens() -> None:
    from comingle.serving.schemas import CompletionRequest

    sampling = CompletionRequest(model="a", prompt="b").sampling(4, 7)
    assert sampling == Sampling(max_new_tokens=4, temperature=1.0, top_p=1.0, top_k=0, seed=7)


def test_a_quota_counts_the_tokens_that_were_read_and_generated(people: Any) -> None:
    limits = Limits(tokens_per_day=1000, max_tokens=900)
    app = make_app(Engine(people(), rows=1), Keys(people(), None), limits)
    with serving(app) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
        answer = client.completions.create(model="ann", prompt="abc", max_tokens=90, temperature=0, stop="zzzz")
        assert answer.usage is not None
        used = answer.usage.total_tokens
        left = app.state.service.quotas.left
        assert left("ann") == pytest.approx(1000 - used, abs=0.1)
        told = refused(
            openai.RateLimitError, lambda: client.completions.create(model="ann", prompt="a" * 80, max_tokens=900)
        )
        assert told["code"] == "insufficient_quota"
        assert left("ann") == pytest.approx(1000 - used, abs=0.1)
        assert left("bob") == 1000
        with client.completions.create(model="bob", prompt="a", max_tokens=900, stream=True) as chunks:
            next(iter(chunks))
        deadline = time.monotonic() + 20
        while app.state.service.worker.engine.busy or left("bob") < 120:  # what was not generated is given back
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert left("bob") < 1000
        httpx.post(f"{address}/v1/route", json={"model": "cem", "prompt": "ab", "text": "cde"})
        assert left("cem") == pytest.approx(995, abs=0.1)
