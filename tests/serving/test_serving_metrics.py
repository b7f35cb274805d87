"""``GET /health`` and ``GET /metrics``."""

from __future__ import annotations

import builtins
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.serving.test_serving_api import KEYS, serving

from comingle.serving.access import Keys, Limits, Metrics, TextTimer
from comingle.serving.api import make_app
from comingle.serving.engine import Engine
from comingle.serving.rows import BLOCK_TOKENS

PROMPT, NUM_PROMPT_TOKENS = "one two", 7


def read_metrics(address: str) -> dict[str, float]:
    """Values by name and labels without ``model_name``, such as ``vllm:request_success_total stop``."""
    response = httpx.get(f"{address}/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    values = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = [value for key, value in sample.labels.items() if key != "model_name"]
            values[" ".join([sample.name, *labels])] = sample.value
    return values


@pytest.fixture
def address(people: Any) -> Iterator[str]:
    with serving(make_app(Engine(people(), rows=2), Keys(people(), KEYS), Limits(rate=10_000, queue=9))) as address:
        yield address


def client_of(address: str, name: str = "ann") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=KEYS[name], max_retries=0)


def test_tokens_and_texts_are_counted_as_in_the_answers(address: str) -> None:
    sent = [{"stop": None, "max_tokens": 5, "n": 2}, {"stop": None, "max_tokens": 3, "n": 1}]
    answers = [
        client_of(address).completions.create(model="ann", prompt=PROMPT, temperature=0, **options)  # type: ignore[call-overload]
        for options in sent
    ]
    num_tokens = sum(answer.usage.completion_tokens for answer in answers)
    reasons = [choice.finish_reason for answer in answers for choice in answer.choices]
    metrics = read_metrics(address)
    assert metrics["vllm:prompt_tokens_total"] == 3 * NUM_PROMPT_TOKENS
    assert metrics["vllm:generation_tokens_total"] == num_tokens
    for reason in ("stop", "length"):
        assert metrics[f"vllm:request_success_total {reason}"] == reasons.count(reason)
    assert metrics["vllm:time_to_first_token_seconds_count"] == 3
    assert metrics["vllm:inter_token_latency_seconds_count"] == num_tokens - 3
    assert metrics["vllm:e2e_request_latency_seconds_count"] == 3
    parts = ("vllm:time_to_first_token_seconds_sum", "vllm:inter_token_latency_seconds_sum")
    assert sum(metrics[part] for part in parts) == pytest.approx(
        metrics["vllm:e2e_request_latency_seconds_sum"], rel=0.2
    )
    assert (metrics["vllm:num_requests_running"], metrics["vllm:num_requests_waiting"]) == (0, 0)


def test_cached_prefixes_are_counted_in_tokens(address: str) -> None:
    prompt = "a prompt that is longer than one block of tokens, and is sent twice"
    for _ in range(2):
        answer = client_of(address).completions.create(model="ann", prompt=prompt, temperature=0, max_tokens=2)
    assert answer.usage is not None
    num_tokens = answer.usage.prompt_tokens
    metrics = read_metrics(address)
    assert metrics["vllm:prefix_cache_queries_total"] == metrics["vllm:prompt_tokens_total"] == 2 * num_tokens
    assert metrics["vllm:prefix_cache_hits_total"] == (num_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS > 0
    assert metrics["comingle:prefix_cache_bytes"] > 0


def test_gauges_show_what_runs_and_waits_and_an_abort_is_counted(address: str) -> None:
    stream = client_of(address).completions.create(
        model="ann", prompt="a", max_tokens=900, n=5, temperature=1.0, seed=3, stream=True
    )
    next(iter(stream))
    metrics = read_metrics(address)
    assert (metrics["vllm:num_requests_running"], metrics["vllm:num_requests_waiting"]) == (2, 3)
    stream.close()
    deadline = time.monotonic() + 20
    while metrics["vllm:num_requests_running"] and time.monotonic() < deadline:
        metrics = read_metrics(address)
    assert metrics["vllm:request_success_total abort"] >= 3
    ended = [metrics[f"vllm:request_success_total {reason}"] for reason in ("stop", "length", "abort", "error")]
    assert sum(ended) == 5
    assert metrics["vllm:e2e_request_latency_seconds_count"] == ended[0] + ended[1]


def test_refusals_are_counted_by_status(address: str) -> None:
    for _ in range(2):
        with pytest.raises(openai.NotFoundError):
            client_of(address).completions.create(model="bob", prompt="a")
    assert httpx.get(f"{address}/v1/models").status_code == 401
    metrics = read_metrics(address)
    assert metrics["comingle:requests_refused_total 404"] == 2
    assert metrics["comingle:requests_refused_total 401"] == 1


def test_a_failed_pass_is_an_error(people: Any, caplog: pytest.LogCaptureFixture) -> None:
    app = make_app(Engine(people(), rows=1), Keys(people(), None), Limits())

    def fail() -> None:
        raise RuntimeError("broken")

    app.state.service.engine.step = fail
    with serving(app) as address:
        assert httpx.post(f"{address}/v1/completions", json={"model": "ann", "prompt": "a"}).status_code == 500
        metrics = read_metrics(address)
    assert metrics["vllm:request_success_total error"] == 1
    assert metrics["vllm:time_to_first_token_seconds_count"] == 0


def test_neither_users_nor_their_texts_are_in_the_metrics(address: str, people: Any) -> None:
    for name in KEYS:
        client_of(address, name).completions.create(model=name, prompt="zebra", max_tokens=2)
    text = httpx.get(f"{address}/metrics").text
    assert 'model_name="random:llama"' in text
    assert not any(word in text for word in [*people(), "zebra"])


def test_a_base_in_a_folder_of_a_user_is_not_named(
    people: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "ada-lovelace"
    folder.mkdir()
    engine = Engine(people(), rows=1)
    monkeypatch.setitem(vars(next(iter(engine.models.values())).model.base), "name", str(folder))  # it is frozen
    with serving(make_app(engine, Keys(people(), None), Limits())) as address:
        text = httpx.get(f"{address}/metrics").text
    assert 'model_name="local"' in text
    assert "lovelace" not in text


def test_health_needs_no_key_and_ends_with_the_engine(people: Any) -> None:
    app = make_app(Engine(people(), rows=1), Keys(people(), KEYS), Limits())
    with serving(app) as address:
        response = httpx.get(f"{address}/health")
        assert (response.status_code, response.content) == (200, b"")
        app.state.service.worker.close()
        assert httpx.get(f"{address}/health").status_code == 503


def test_a_page_of_another_site_reads_neither(people: Any) -> None:
    with serving(make_app(Engine(people(), rows=1), Keys(people(), None), Limits())) as address:
        for path in ("health", "metrics"):
            assert httpx.get(f"{address}/{path}", headers={"Host": "evil.example"}).status_code == 400


def test_without_the_package_metrics_are_501_and_answers_as_before(
    people: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = builtins.__import__

    def without_package(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("prometheus_client"):
            raise ImportError(name)
        return load(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without_package)
    app = make_app(Engine(people(), rows=1), Keys(people(), None), Limits())
    monkeypatch.undo()
    with serving(app) as address:
        response = httpx.get(f"{address}/metrics")
        assert response.status_code == 501
        assert response.text.count("\n") == 1
        assert "comingle[app]" in response.text
        answer = httpx.post(f"{address}/v1/completions", json={"model": "ann", "prompt": "a", "max_tokens": 2})
        assert answer.status_code == 200
        assert httpx.get(f"{address}/v1/models/eve").status_code == 404


def test_times_of_one_text() -> None:
    times = [10.0, 10.5, 10.52, 10.6, 10.61]  # the request, three tokens, the end
    clock = iter(times)
    metrics = Metrics("base", num_running=lambda: 0, num_waiting=lambda: 0, clock=lambda: next(clock))
    timer = TextTimer(metrics, num_prompt_tokens=4)
    for _ in range(3):
        timer.add_token()
    timer.end("stop")
    timer.end("abort")
    value = metrics.registry.get_sample_value
    base = {"model_name": "base"}
    assert value("vllm:time_to_first_token_seconds_sum", base) == pytest.approx(0.5)
    gaps = [after - before for before, after in pairwise(times[1:4])]
    assert value("vllm:inter_token_latency_seconds_sum", base) == pytest.approx(sum(gaps))
    assert value("vllm:inter_token_latency_seconds_bucket", {**base, "le": "0.025"}) == 1
    assert value("vllm:e2e_request_latency_seconds_sum", base) == pytest.approx(0.61)
    assert value("vllm:request_success_total", {**base, "finished_reason": "abort"}) == 0
