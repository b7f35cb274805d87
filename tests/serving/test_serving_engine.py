"""What a row of a batch says is what its user's model says alone, whoever else is there, comes and goes."""

from __future__ import annotations

import os
import random
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.quick import quick
from transformers.cache_utils import DynamicCache

from comingle.methods import REGISTRY
from comingle.models import decoding
from comingle.models.generation import added_text, encode_prompt, padded_attention, read_sampling
from comingle.models.kernels import cpu, expert_mlp
from comingle.models.kernels.expert_mlp import MOST_ROWS
from comingle.models.loading import load_base
from comingle.serving import rows
from comingle.serving.engine import NATIVE_PART_TOKENS, Detokenizer, Engine, Piece, Request
from comingle.serving.rows import without_adapters
from comingle.serving.schemas import Overloaded, Worker
from comingle.utils.errors import DataError, RecipeError

METHODS = ["comigs-1g1s", "fedavg", "fedmerge", "floral", "local", "pfedmoe", "pretrained", "stacking"]
QUICK = ("comigs-1g1s", "fedmerge", "floral", "stacking")
TEXTS = ["one two three", "a", "", "the longest of them all, by far, is the one that you are reading now", "b c", "x"]


class Asked:
    """Requests to an engine, and what they were told."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.requests = engine, list[Request]()
        self.pieces: dict[int, list[Piece]] = defaultdict(list)

    def ask(self, name: str, text: str, *, logprobs: int | None = None, **options: Any) -> int:
        number = len(self.requests)
        prompt = encode_prompt(self.engine.tokenizer, text, self.engine.begin)
        sampling, tell = read_sampling(**options), self.pieces[number].append
        request = Request(name=name, prompt=prompt, sampling=sampling, on_piece=tell, logprobs=logprobs, continues=True)
        self.engine.submit(request)
        self.requests.append(request)
        return number

    def finish(self) -> None:
        while self.engine.busy:
            self.engine.step()

    def text(self, number: int) -> str:
        return "".join(piece.text for piece in self.pieces[number])


def come_and_go(
    people: Any,
    engine: Engine,
    options: Callable[[int], dict[str, Any]],
    names: list[str] | None = None,
    *,
    alone: Engine | None = None,
) -> None:
    """Twelve requests at times of their own, each held against its user's model alone, or ``alone`` in turn."""
    draw, asked, expected = random.Random(3), Asked(engine), []
    for i in range(12):
        name, text = (names or list(people))[i % 3], TEXTS[draw.randrange(len(TEXTS))]
        settings = {"max_new_tokens": draw.randint(1, 24), **options(i)}
        asked.ask(name, text, **settings)
        expected.append((name, text, settings))
        for _ in range(draw.randint(0, 4)):
            engine.step()
    asked.finish()
    said = [asked.text(i) for i in range(12)]
    if alone is None:
        assert said == [people[name].generate(text, **settings) for name, text, settings in expected]
    else:
        in_turn = Asked(alone)
        for name, text, settings in expected:
            in_turn.ask(name, text, **settings)
            in_turn.finish()
        assert said == [in_turn.text(i) for i in range(12)]
    assert len(set(said)) > 6
    assert not engine.active
    assert not engine.cache.starts


@pytest.fixture
def native(tmp_path: Path) -> Iterator[None]:
    if not expert_mlp.enable(tmp_path / "native"):
        pytest.skip("no C++ compiler that makes the native code")
    yield
    expert_mlp.disable()


COMPILED = [
    ("comigs-1g1s", "random:llama", "float32"),
    ("comigs-1g1s", "random:llama", "bfloat16"),
    ("comigs-1g1s", "random:gpt2", "float32"),  # whose layers are compiled one by one
    ("feddpa", "random:mistral", "float32"),
    ("fedavg", "random:qwen2", "float32"),
    ("fedavg", "random:qwen2", "bfloat16"),
    ("floral", "random:llama", "float32"),
    ("stacking", "random:llama", "float32"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "base", "dtype"), COMPILED)
def test_compiled_code_says_the_same(
    people: Any, method: str, base: str, dtype: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row in any company; in float32 also as PyTorch has it.

    In bfloat16 PyTorch and native code round prompts differently, so native code reads all of them here.
    """
    if dtype == "bfloat16":
        monkeypatch.setattr("comingle.serving.engine.NATIVE_PROMPT_TOKENS", 10_000)
    mine, text = people(method, base=base, dtype=dtype), "one two three"
    plain = {name: person.generate(text, max_new_tokens=24) for name, person in mine.items()}
    request.getfixturevalue("native")
    alone = Engine(mine, rows=1) if dtype == "bfloat16" else None
    come_and_go(mine, Engine(mine, rows=5), lambda i: {"temperature": 2.0 * (i % 2), "seed": i}, alone=alone)
    if dtype == "float32":
        assert {name: person.generate(text, max_new_tokens=24) for name, person in mine.items()} == plain


NATIVE = [
    ("comigs-1g1s", "random:llama"),
    ("pfedmoe", "random:llama"),
    ("comigs-1g1s", "random:mistral"),
    ("fedavg", "random:qwen2"),
    ("floral", "random:llama"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_native_step_has_the_same_logits_with_any_number_of_threads(
    people: Any, dtype: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = people("comigs-1g1s", base="random:llama", dtype=dtype, rank=6)
    request.getfixturevalue("native")
    asked, compared = Asked(Engine(mine, rows=5)), list[bool]()
    native_decode = decoding.NativeNetwork.decode

    def compare(step: Any, *args: Any) -> torch.Tensor:
        logits = native_decode(step, *args)
        before = torch.get_num_threads()
        for threads in (2, 3, 7):
            torch.set_num_threads(threads)
            compared.append(torch.equal(native_decode(step, *args), logits))
        torch.set_num_threads(before)
        return logits

    monkeypatch.setattr(decoding.NativeNetwork, "decode", compare)
    for name in mine:
        asked.ask(name, TEXTS[0], max_new_tokens=3)
    asked.finish()
    assert len(compared) > 3
    assert all(compared)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="CPUs are chosen on Linux only")
def test_threads_of_native_passes_may_use_all_cpus_again_afterwards(
    people: Any, request: pytest.FixtureRequest
) -> None:
    cpus, before = os.sched_getaffinity(0), torch.get_num_threads()
    asked = Asked(Engine(people("comigs-1g1s", base="random:llama"), rows=2))
    request.getfixturevalue("native")
    asked.ask("ann", TEXTS[0], max_new_tokens=3)
    torch.set_num_threads(len(cpus))
    try:
        asked.finish()
        of_threads = [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]
    finally:
        torch.set_num_threads(before)
    assert all(allowed == cpus for allowed in of_threads)


@pytest.mark.parametrize("method", ["comigs-1g1s", "fedavg"])
def test_rebound_native_passes_are_as_new_and_leave_the_old_ones_alone(
    people: Any, method: str, request: pytest.FixtureRequest
) -> None:
    engine = Engine(people(method, base="random:llama"), rows=5)
    request.getfixturevalue("native")
    for row, name in enumerate(["ann", "bob", "ann"]):
        engine.row_adapters.set(row, name)
    ids, bound = torch.full((3, 1), 5), dict[int, Any]()
    for texts in (slice(0, 3), slice(1, 2)):
        engine.row_adapters.bind(texts)
        num_texts = texts.stop - texts.start
        bound[num_texts] = engine._make_native(num_texts), decoding.NativeNetwork(engine.network, num_texts)

    @torch.inference_mode()
    def logits(native: Any, num_texts: int) -> torch.Tensor:
        positions = torch.zeros(num_texts, 1, dtype=torch.long)
        return native.read(ids[:num_texts], positions, [0] * num_texts, DynamicCache())

    for num_texts, (kept, new) in bound.items():
        assert torch.equal(logits(kept, num_texts), logits(new, num_texts))
    assert not torch.equal(logits(bound[1][0], 1)[0], logits(bound[3][0], 3)[0])  # of bob and of ann


def test_native_passes_read_small_parts_of_prompts_and_generate_tokens(
    people: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = people("comigs-1g1s", base="random:llama", rank=6)  # a whole block of ranks, and a part of one
    names, texts = ("ann", "bob", "cem"), (TEXTS[0], LONG * 3, LONG * 2)
    expected = [mine[name].generate(text, max_new_tokens=30) for name, text in zip(names, texts, strict=True)]
    request.getfixturevalue("native")
    asked, sizes = Asked(engine := Engine(mine, rows=3)), list[int]()
    make_prompt_batch, read = decoding.NativeNetwork.make_prompt_batch, engine._read
    monkeypatch.setattr(
        decoding.NativeNetwork,
        "make_prompt_batch",
        lambda network, ids, *rest, **more: sizes.append(ids.numel()) or make_prompt_batch(network, ids, *rest, **more),
    )
    numbers = [asked.ask(names[0], texts[0], max_new_tokens=30)]
    engine.step()  # no other text waits for its prompt
    monkeypatch.setattr(engine, "_read", lambda *args: pytest.fail("a prompt was read alone"))
    numbers += [asked.ask(name, text, max_new_tokens=30) for name, text in zip(names[1:], texts[1:], strict=True)]
    while not asked.pieces.get(numbers[2]):
        before = [len(asked.pieces.get(number, ())) for number in numbers]
        engine.step()
        assert len(asked.pieces[numbers[0]]) == before[0] + 1  # parts do not delay tokens
    monkeypatch.setattr(engine, "_read", read)
    asked.finish()
    lengths = [len(asked.requests[number].prompt) for number in numbers[1:]]
    assert sum(sizes) == sum(lengths)
    assert max(sizes) == NATIVE_PART_TOKENS
    assert [asked.text(number) for number in numbers] == expected


def test_parts_with_more_rows_than_a_native_pass_are_read_alone(
    people: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = people("comigs-1g1s", base="random:llama", rank=6)
    request.getfixturevalue("native")
    asked, sizes = Asked(engine := Engine(mine, rows=3, prompt_tokens=MOST_ROWS)), list[int]()
    read = engine._read
    asked.ask("ann", TEXTS[0], max_new_tokens=20)
    engine.step()
    monkeypatch.setattr(engine, "_read", lambda ids, *rest: sizes.append(ids.numel()) or read(ids, *rest))
    number = asked.ask("bob", LONG * 3, max_new_tokens=2)
    asked.finish()
    assert sizes == [MOST_ROWS] * (len(asked.requests[number].prompt) // MOST_ROWS)  # the rest fits


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("method", "base", "top_k"), [*((method, base, 2) for method, base in NATIVE), ("comigs-1g1s", "random:llama", 1)]
)
def test_a_native_step_has_the_logits_of_pytorch(
    people: Any,
    method: str,
    base: str,
    top_k: int,
    dtype: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = people(method, base=base, dtype=dtype, top_k=top_k)
    request.getfixturevalue("native")  # training decides for itself whether native code is in use
    asked, errors = Asked(engine := Engine(mine, rows=5)), list[float]()
    native_decode = decoding.NativeNetwork.decode

    def compare(step: Any, ids: Any, positions: Any, cache: Any, part: Any) -> torch.Tensor:
        logits = native_decode(step, ids, positions, cache, part)
        with monkeypatch.context() as plain:
            plain.setattr(expert_mlp, "_library", None)
            expected = engine._forward(ids, cache.mask(), positions, cache)  # overwrites what was cached with its own
        errors.append(float((logits - expected).double().norm() / expected.double().norm()))
        return logits

    monkeypatch.setattr(decoding.NativeNetwork, "decode", compare)
    for i, name in enumerate([*mine, *mine]):
        asked.ask(name, TEXTS[i % len(TEXTS)], max_new_tokens=12)
    asked.finish()
    assert len(errors) >= 12
    if dtype == "float32":
        assert max(errors) < (1e-4 if top_k == 1 else 1e-5)
    else:  # PyTorch rounds each activation, native code only weights and what is cached
        assert statistics.median(errors) < 5e-2


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "stacking"])
def test_native_attention_reads_whole_prompts_and_native_rows_outlast_parts_of_others(
    people: Any, method: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = people(method)
    expected = [mine[name].generate(LONG * 3, max_new_tokens=20) for name in ("ann", "bob")]
    request.getfixturevalue("native")
    engine, num_calls, num_made = Engine(mine, rows=3, prompt_tokens=80), 0, 0
    attention, make_native = cpu.causal_attention, engine._make_native

    def count_call(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return attention(*args)

    def count_made(texts: int) -> Any:
        nonlocal num_made
        num_made += 1
        return make_native(texts)

    monkeypatch.setattr(cpu, "causal_attention", count_call)
    monkeypatch.setattr(engine, "_make_native", count_made)
    asked = Asked(engine)
    first = asked.ask("ann", LONG * 3, max_new_tokens=20)
    engine.step()
    assert num_calls == engine.network.config.num_hidden_layers
    second = asked.ask("bob", LONG * 3, max_new_tokens=20)
    num_before = num_made
    while engine.reading is not None or not num_before < num_made:
        engine.step()
    assert len(asked.pieces[first]) > 4
    assert num_made == num_before + 1  # when the other text joined
    asked.finish()
    assert [asked.text(number) for number in (first, second)] == expected


@pytest.mark.slow
@pytest.mark.parametrize(("method", "base"), NATIVE)
def test_a_native_pass_reads_prompts_as_pytorch_does(
    people: Any, method: str, base: str, request: pytest.FixtureRequest
) -> None:
    """Padded prompts that need several native calls, and then what follows them."""
    mine = people(method, base=base)
    request.getfixturevalue("native")
    engine = Engine(mine, rows=3)
    for row, name in enumerate(mine):
        engine.row_adapters.set(row, name)
    engine.row_adapters.bind(slice(0, 3))
    num_padding, total = torch.tensor([0, 7, 31]), 46
    ids = torch.randint(3, 60, (3, total), generator=torch.Generator().manual_seed(4))
    mask = torch.arange(total) >= num_padding.unsqueeze(1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    caches = DynamicCache(), DynamicCache()
    with torch.inference_mode(), padded_attention(engine.network):
        native = engine._make_native(3)
        assert native is not None
        for start, stop in ((0, 40), (40, total)):
            part = slice(start, stop)
            expected = engine._forward(ids[:, part], mask[:, :stop], positions[:, part], caches[0])
            got = native.read(ids[:, part], positions[:, part], num_padding.tolist(), caches[1])
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    assert caches[1].get_seq_length() == total
    for old, new in zip(caches[0].layers, caches[1].layers, strict=True):
        for text, padding in enumerate(num_padding.tolist()):
            for first, second in ((old.keys, new.keys), (old.values, new.values)):
                torch.testing.assert_close(second[text, :, padding:], first[text, :, padding:], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("method", quick((*METHODS, "feddpa"), *QUICK))
@pytest.mark.sampled(1)
def test_every_method_speaks_as_alone(people: Any, method: str) -> None:
    mine = people(method)
    come_and_go(mine, Engine(mine, rows=5), lambda i: {})


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "gemma2", "qwen3", "mistral", "gemma3", "opt"])
def test_every_family_speaks_as_alone(people: Any, family: str) -> None:
    mine = people(base=f"random:{family}")
    come_and_go(mine, Engine(mine, rows=4), lambda i: {})


LONG = "a system prompt that many requests of a user begin with, and that is longer than a block or two of tokens"


def requests_in_parts_and_with_prefixes(mine: Any, engine: Engine) -> tuple[Asked, list[tuple[str, str, int]]]:
    """Requests that begin alike and differently, at times of their own, with parts of eight tokens."""
    asked, settings = Asked(engine), []
    for i in range(16):
        name = list(mine)[i % 3 if i < 12 else 0]
        text = LONG + " " + TEXTS[i % len(TEXTS)] if i % 4 else TEXTS[i % len(TEXTS)]
        settings.append((name, text, 3 + i))
        asked.ask(name, text, max_new_tokens=3 + i, logprobs=0, eos_token_id=())
        for _ in range(i % 5):
            engine.step()
    asked.finish()
    num_hits = sum(piece.cached_tokens for pieces in asked.pieces.values() for piece in pieces)
    assert num_hits > 4 * rows.BLOCK_TOKENS
    return asked, settings


@pytest.mark.parametrize("method", quick(METHODS, "comigs-1g1s", "stacking"))
def test_prompts_in_parts_and_with_cached_prefixes_speak_as_alone(people: Any, method: str) -> None:
    """Their logits are next to uniform, so rounding may choose another of two tokens that are about as likely."""
    mine = people(method)
    asked, settings = requests_in_parts_and_with_prefixes(mine, Engine(mine, rows=4, prompt_tokens=8))
    for number, (name, _text, new) in enumerate(settings):
        prompt = asked.requests[number].prompt
        sampled = [piece.sampled for piece in asked.pieces[number] if piece.sampled]
        tokens = [one.token for one in sampled]
        assert len(tokens) == new
        scores = mine[name].logits(torch.tensor([[*prompt, *tokens]]))[0, len(prompt) - 1 : -1].log_softmax(-1)
        chosen = scores.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        assert (scores.max(-1).values - chosen).max() < 1e-3
        assert [one.logprob for one in sampled] == pytest.approx(chosen.tolist(), abs=1e-3)


def test_prompts_in_parts_and_with_cached_prefixes_of_a_trained_base_give_the_same_text(
    people: Any, shared_data: Path
) -> None:
    mine = people("fedavg", base=str(shared_data / "models" / "stories260K"))
    asked, settings = requests_in_parts_and_with_prefixes(mine, Engine(mine, rows=4, prompt_tokens=8))
    texts = [mine[name].generate(text, max_new_tokens=new, eos_token_id=()) for name, text, new in settings]
    assert [asked.text(number) for number in range(len(settings))] == texts
    assert len(set(texts)) > 6


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "gemma2", "qwen3", "mistral", "gemma3", "opt"])
def test_every_family_reads_in_parts_and_caches_prefixes(people: Any, family: str) -> None:
    test_prompts_in_parts_and_with_cached_prefixes_speak_as_alone(
        lambda method: people(method, base=f"random:{family}"), "fedavg"
    )


@pytest.mark.parametrize("cached", [False, True])
def test_logits_after_parts_and_a_cached_prefix_are_those_of_one_pass(
    people: Any, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = people()
    engine = Engine(mine, rows=2, prompt_tokens=5)
    asked = Asked(engine)
    other = asked.ask("bob", "x", max_new_tokens=90, temperature=1.0, eos_token_id=())
    if cached:
        asked.ask("ann", LONG, max_new_tokens=1)
        while len(engine.active) + len(engine.waiting) > 1 or engine.reading is not None:
            engine.step()
    read, sizes = engine._read, list[int]()
    monkeypatch.setattr(engine, "_read", lambda ids, *rest: sizes.append(ids.numel()) or read(ids, *rest))
    number = asked.ask("ann", LONG, max_new_tokens=1, logprobs=5)
    while not asked.pieces[number]:
        engine.step()
    assert not any(piece.finish for piece in asked.pieces[other])  # so the prompt was read in parts
    (piece,) = asked.pieces[number]
    assert (piece.cached_tokens > 0) == cached
    if cached:  # nothing else was read meanwhile
        assert sum(sizes) == len(asked.requests[number].prompt) - piece.cached_tokens
    ids = torch.tensor([asked.requests[number].prompt])
    expected = mine["ann"].logits(ids)[0, -1].log_softmax(-1).topk(5)
    assert piece.sampled is not None
    assert [token for token, _ in piece.sampled.top] == expected.indices.tolist()
    assert [value for _, value in piece.sampled.top] == pytest.approx(expected.values.tolist(), abs=1e-5)


def test_a_long_prompt_stalls_neither_texts_nor_short_prompts(people: Any) -> None:
    engine = Engine(people(), rows=3, prompt_tokens=16)
    asked = Asked(engine)
    first = asked.ask("ann", "x", max_new_tokens=90, temperature=1.0, eos_token_id=())
    engine.step()
    long = asked.ask("bob", LONG * 3, max_new_tokens=3)
    engine.step()
    short = asked.ask("cem", "b c", max_new_tokens=3)
    assert engine.num_running == 2
    num_steps = 0
    while not asked.pieces[long]:
        before = len(asked.pieces[first])
        engine.step()
        num_steps += 1
        assert len(asked.pieces[first]) == before + 1
    num_tokens = len(asked.requests[long].prompt)
    assert num_steps == -(-num_tokens // 16)  # one part was read before, and one step read the short prompt
    assert any(piece.finish for piece in asked.pieces[short])
    assert asked.text(short) == people()["cem"].generate("b c", max_new_tokens=3)


def test_a_long_prompt_whose_reader_goes_away_frees_its_row(people: Any) -> None:
    engine = Engine(people(), rows=2, prompt_tokens=4)
    asked = Asked(engine)
    asked.ask("ann", "x", max_new_tokens=60, temperature=1.0, eos_token_id=())
    engine.step()
    gone = asked.ask("bob", LONG, max_new_tokens=3)
    engine.step()
    assert engine.num_free_rows == 0
    asked.requests[gone].cancelled = True
    engine.step()
    assert engine.num_free_rows == 1
    failed = asked.ask("bob", LONG, max_new_tokens=3)
    engine.step()
    engine.fail_all(InterruptedError())
    assert not engine.busy
    assert isinstance(asked.pieces[failed][-1].error, InterruptedError)


def test_a_prefix_is_of_one_user_and_of_one_version_of_the_model(people: Any) -> None:
    mine = people()
    engine = Engine(mine, rows=2)

    def hits(name: str) -> int:
        asked = Asked(engine)
        asked.ask(name, LONG, max_new_tokens=5)
        asked.finish()
        assert asked.text(0) == engine.models[name].generate(LONG, max_new_tokens=5)
        return sum(piece.cached_tokens for piece in asked.pieces[0])

    num_tokens = len(encode_prompt(engine.tokenizer, LONG))
    whole_blocks = (num_tokens - 1) // rows.BLOCK_TOKENS * rows.BLOCK_TOKENS
    assert [hits("ann"), hits("ann"), hits("bob"), hits("bob")] == [0, whole_blocks, 0, whole_blocks]
    before = engine.prefixes.num_bytes
    engine.replace(replace(mine["ann"], tensors=mine["cem"].tensors))
    assert 0 < engine.prefixes.num_bytes < before
    assert [hits("ann"), hits("bob")] == [0, whole_blocks]


def test_a_prefix_of_a_model_that_is_replaced_while_its_prompt_is_read_is_not_kept(people: Any) -> None:
    mine = people()
    engine = Engine(mine, rows=2, prompt_tokens=16)
    asked = Asked(engine)
    asked.ask("bob", "x", max_new_tokens=30, temperature=1.0, eos_token_id=())
    engine.step()
    number = asked.ask("ann", LONG, max_new_tokens=5)
    engine.step()
    assert engine.reading is not None
    engine.replace(replace(mine["ann"], tensors=mine["cem"].tensors))
    asked.finish()
    assert asked.text(number) == mine["ann"].generate(LONG, max_new_tokens=5)
    assert not engine.prefixes.num_bytes


def test_prefixes_are_evicted_by_bytes_least_recently_used_first(people: Any) -> None:
    cache, size = rows.PrefixCache(0), rows.BLOCK_TOKENS
    tokens = {letter: [ord(letter)] * 2 * size for letter in "abc"}

    def add(letter: str, cache: Any) -> None:
        states = torch.zeros(1, 2, 2 * size, 4)
        cache.add("ann", 0, tokens[letter], [(states, states)])

    add("a", cache)
    assert not cache.num_bytes
    block_bytes = 2 * 2 * size * 4 * 4
    cache = rows.PrefixCache(5 * block_bytes)
    for letter in "ab":
        add(letter, cache)
    assert cache.num_bytes == 4 * block_bytes
    assert len(cache.find("ann", [*tokens["a"], 1])) == 2
    assert len(cache.find("ann", tokens["a"])) == 1  # the last token is always read
    add("c", cache)
    assert cache.num_bytes == 5 * block_bytes
    assert [len(cache.find("ann", [*tokens[letter], 1])) for letter in "abc"] == [2, 1, 2]
    assert not cache.find("bob", tokens["a"])


def test_equal_prompts_at_once_are_read_once(people: Any) -> None:
    engine = Engine(people(), rows=4)
    asked = Asked(engine)
    for _ in range(4):
        asked.ask("ann", LONG, max_new_tokens=6)
    asked.finish()
    num_cached = [sum(piece.cached_tokens for piece in asked.pieces[i]) for i in range(4)]
    assert num_cached[0] == 0
    assert min(num_cached[1:]) >= 2 * rows.BLOCK_TOKENS
    assert len({asked.text(i) for i in range(4)}) == 1


def test_an_idle_engine_keeps_the_memory_of_its_rows(people: Any) -> None:
    engine = Engine(people(), rows=16)
    asked = Asked(engine)
    addresses = []
    for _ in range(2):
        asked.ask("ann", "one two three", max_new_tokens=4)
        engine.step()
        assert engine.cache.row_capacity == 1
        addresses.append(engine.cache.layers[0].stores[0].data_ptr())
        asked.finish()
    assert addresses[0] == addresses[1]
    for _ in range(3):
        asked.ask("ann", "one two three", max_new_tokens=4)
    engine.step()
    assert engine.cache.row_capacity == 4


@pytest.mark.parametrize("method", quick(tuple(sorted(REGISTRY)), "fedavg", "fedex-lora", "flora-stacking", "stacking"))
def test_pretrained_is_the_base_whatever_the_method(people: Any, method: str) -> None:
    try:
        ann = people(method)["ann"]
    except (DataError, RecipeError) as refused:
        pytest.skip(str(refused))
    ids, base = torch.arange(3, 40)[None], ann.model.base.model
    with torch.no_grad():
        expected = base(input_ids=ids).logits.log_softmax(-1)
    torch.testing.assert_close(without_adapters(ann).logits(ids).log_softmax(-1), expected, rtol=1e-3, atol=1e-3)
    if method != "pretrained":
        assert (ann.logits(ids).log_softmax(-1) - expected).abs().max() > 1e-2


@pytest.mark.slow
def test_native_passes_outlast_other_native_code(people: Any, tmp_path: Path) -> None:
    """As in a process that serves while a training run begins, which disables and enables the kernels for training."""
    mine = people()
    expert_mlp.disable()
    if not decoding.enable(tmp_path / "native"):
        pytest.skip("no C++ compiler that makes the native code")
    try:
        asked = Asked(engine := Engine(mine, rows=3))
        asked.ask("ann", "one two three", max_new_tokens=5)
        engine.step()
        assert engine._make_native(1) is not None
        decoding.disable()  # the step that is in use goes on
        asked.finish()
        assert engine._make_native(1) is None
    finally:
        decoding.disable()
    assert asked.text(0) == mine["ann"].generate("one two three", max_new_tokens=5)


def test_a_row_that_cannot_go_on_ends_alone(people: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = people()
    asked = Asked(engine := Engine(mine, rows=3))
    numbers = [asked.ask(name, "one two three", max_new_tokens=9) for name in mine]
    engine.step()

    def fails(*_: Any) -> Any:
        raise RuntimeError("probability tensor contains inf")

    monkeypatch.setattr(engine.active[1], "sampler", fails)
    lost = next(i for i, request in enumerate(asked.requests) if request is engine.active[1].request)
    asked.finish()
    *before, last = asked.pieces[lost]
    assert last.error is not None
    assert before
    assert not any(piece.error for piece in before)
    for i, name in zip(numbers, mine, strict=True):
        assert i == lost or asked.text(i) == mine[name].generate("one two three", max_new_tokens=9)


@pytest.mark.parametrize("options", [{"temperature": 1e-38}, {"temperature": 1e-300}])
def test_next_to_no_temperature_is_the_likeliest_token(people: Any, options: dict[str, float]) -> None:
    ann = people()["ann"]
    assert ann.generate("one two", max_new_tokens=8, **options) == ann.generate("one two", max_new_tokens=8)


def test_a_long_stop_costs_no_more_than_the_text_is_long(people: Any) -> None:
    class Counted(str):
        compared = 0

        def __getitem__(self, key: Any) -> str:
            Counted.compared += 1
            return str.__getitem__(self, key)

    tokenizer = people()["ann"].model.base.tokenizer
    writer = Detokenizer(tokenizer, [Counted("x" * 100_000)], ends=[])
    for token in encode_prompt(tokenizer, " two three")[:5]:
        writer.add(token)
    assert 0 < Counted.compared < 200


def test_a_seed_gives_the_same_text_in_any_company(people: Any) -> None:
    def options(i: int) -> dict[str, Any]:
        return [{"temperature": 1.0, "seed": i}, {"do_sample": True, "top_k": 5, "top_p": 0.9, "seed": 2 * i}, {}][
            i % 3
        ]

    come_and_go(people(), Engine(people(), rows=5), options)


def test_stops_end_a_text_and_are_cut_off(people: Any) -> None:
    stops = ["e", "th", ("zz", "a"), "4"]
    come_and_go(people(), Engine(people(), rows=5), lambda i: {"stop": stops[i % 4], "temperature": 2.0, "seed": i})


def test_users_with_ranks_of_their_own(federate: Any, people: Any) -> None:
    mine = people("hetlora")
    come_and_go(mine, Engine(mine, rows=3), lambda i: {})


@pytest.mark.slow
def test_the_cache_moves_as_texts_grow(people: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "CAPACITY_STEP", 8)
    come_and_go(people(), Engine(people(), rows=3), lambda i: {"max_new_tokens": 5 + 4 * (i % 7)})


def test_who_goes_away_frees_a_row(people: Any) -> None:
    engine = Engine(people(), rows=2)
    asked = Asked(engine)
    first, second, third = (asked.ask(name, "a b", max_new_tokens=20) for name in people())
    engine.step()
    assert [row.request for row in engine.active] == asked.requests[:2]
    assert not asked.pieces[third]
    asked.requests[first].cancelled = True
    engine.step()
    assert asked.requests[third] in [row.request for row in engine.active]
    told = len(asked.pieces[first])
    asked.finish()
    assert len(asked.pieces[first]) == told
    assert asked.text(second) == people()["bob"].generate("a b", max_new_tokens=20)
    assert asked.text(third) == people()["cem"].generate("a b", max_new_tokens=20)


def test_who_waits_and_goes_away_is_never_read(people: Any) -> None:
    engine = Engine(people(), rows=1)
    asked = Asked(engine)
    asked.ask("ann", "a", max_new_tokens=4)
    gone = asked.ask("bob", "b", max_new_tokens=4)
    asked.requests[gone].cancelled = True
    asked.finish()
    assert not asked.pieces[gone]


def test_probabilities_are_the_models_own(people: Any) -> None:
    engine, ann = Engine(people(), rows=3), people()["ann"]
    asked = Asked(engine)
    number = asked.ask("ann", "one two", max_new_tokens=6, temperature=0.5, seed=4, logprobs=3)
    asked.ask("bob", "three", max_new_tokens=9)
    asked.finish()
    chosen = [piece.sampled for piece in asked.pieces[number] if piece.sampled]
    prompt = encode_prompt(engine.tokenizer, "one two")
    ids = torch.tensor([[*prompt, *(one.token for one in chosen)]])
    with ann.generating() as network, torch.no_grad():
        expected = network(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    for one, row in zip(chosen, expected, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token]), abs=1e-4)
        assert [token for token, _ in one.top] == row.topk(3).indices.tolist()


def test_a_diverged_model_harms_nobody_else(people: Any) -> None:
    """Its keys are NaN, and lie where others' masked places do."""
    mine = dict(people())
    engine = Engine(mine, rows=2)
    engine.row_adapters.user_tensors["bob"] = {
        k: torch.full_like(t, torch.nan) for k, t in engine.row_adapters.user_tensors["bob"].items()
    }
    asked = Asked(engine)
    asked.ask("bob", "a rather long text of a model that diverged", max_new_tokens=30)
    engine.step()
    numbers = [asked.ask("ann", "x", max_new_tokens=n) for n in (10, 30)]
    asked.finish()
    assert [asked.text(n) for n in numbers] == [mine["ann"].generate("x", max_new_tokens=n) for n in (10, 30)]


def test_what_cannot_be_answered_is_refused(people: Any) -> None:
    asked = Asked(Engine(people(), rows=1))
    with pytest.raises(DataError, match=r"'eve'.*ann, bob, cem"):
        asked.ask("eve", "a")
    with pytest.raises(DataError, match="the prompt has no tokens"):
        asked.engine.submit(Request(name="ann", prompt=[], sampling=read_sampling(), on_piece=print))
    with pytest.raises(DataError, match=r"the prompt has 1 tokens.*9,999.*allowed.*: [\d,]+$"):
        asked.ask("ann", "a", max_new_tokens=9999)


@pytest.mark.parametrize("special", [False, True])
def test_text_comes_with_its_spaces_behind_a_prompt_and_behind_special_tokens(shared_data: Path, special: bool) -> None:
    tokenizer = load_base(str(shared_data / "models" / "stories260K"), dtype="float32", device="cpu").tokenizer
    assert tokenizer is not None
    before, first, second = (
        encode_prompt(tokenizer, text) for text in ("there was a little", "girl named Lily.", "Once upon")
    )
    bos: Any = tokenizer.bos_token_id
    tokens = [*first, *([bos] if special else []), *second]
    writer = Detokenizer(tokenizer, [], ends=[], after=before[-1:])
    told = "".join(writer.add(token) for token in tokens) + writer.finish()
    assert told == added_text(tokenizer, before[-1:], tokens) == " girl named Lily. Once upon"
    alone = Detokenizer(tokenizer, [], ends=[])
    assert "".join(alone.add(token) for token in tokens) + alone.finish() == told[1:]
    stopped = Detokenizer(tokenizer, [" girl"], ends=[], after=before[-1:])
    told = [stopped.add(token) for token in first if not stopped.stopped]
    assert (set(told), stopped.stopped) == ({""}, True)
    assert len(told) < len(first)


def test_each_token_says_where_its_text_begins(shared_data: Path, people: Any) -> None:
    asked = Asked(Engine(people("fedavg", base=str(shared_data / "models" / "stories260K")), rows=1))
    number = asked.ask("ann", "there was a little", logprobs=1, max_new_tokens=8)
    asked.finish()
    pieces = asked.pieces[number]
    text, chosen = "".join(piece.text for piece in pieces), [piece.sampled for piece in pieces if piece.sampled]
    tokens = [one.token for one in chosen]
    spans = pairwise([*(one.text_offset for one in chosen), len(text)])
    before = encode_prompt(asked.engine.tokenizer, "there was a little")[-1:]
    pairs = zip([*before, *tokens], tokens, strict=False)
    assert len(chosen) == 8
    assert [text[a:b] for a, b in spans] == [added_text(asked.engine.tokenizer, [a], [b]) for a, b in pairs]


def test_a_further_users_memory_is_its_adapters(people: Any) -> None:
    """Rows are as many as there are, and the base is one."""
    few, many = (Engine({n: people()[n] for n in names}, rows=2) for names in (["ann"], ["ann", "bob", "cem"]))
    size = sum(t.numel() for t in people()["ann"].tensors.values())
    held = [sum(t.numel() for own in e.row_adapters.user_tensors.values() for t in own.values()) for e in (few, many)]
    assert held == [size, 3 * size]
    pairs = zip(few.network.parameters(), many.network.parameters(), strict=True)
    assert all(a.data_ptr() == b.data_ptr() for a, b in pairs)
    stacked = [sum(t.numel() for t in e.row_adapters.stacked.values()) for e in (few, many)]
    assert stacked == [2 * size, 2 * size]


def test_a_replacement_that_waits_when_the_worker_is_closed_ends(people: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that trains waits for it, and the process would never end."""
    engine, in_step, go_on = Engine(people(), rows=1), threading.Event(), threading.Event()

    def step() -> None:
        in_step.set()
        assert go_on.wait(30)

    monkeypatch.setattr(engine, "step", step)
    worker = Worker(engine, max_waiting=5)
    sampling = read_sampling(max_new_tokens=5)
    worker.submit([Request(name="ann", prompt=[1], sampling=sampling, on_piece=lambda piece: None)])
    assert in_step.wait(30)
    replacing = threading.Thread(target=worker.replace_engine, args=(engine,), daemon=True)
    replacing.start()
    while not worker._jobs:
        time.sleep(0.01)
    closing = threading.Thread(target=worker.close, daemon=True)
    closing.start()
    while not worker._closed:
        time.sleep(0.01)
    go_on.set()
    for thread in (closing, replacing):
        thread.join(30)
        assert not thread.is_alive()
    worker.replace_engine(engine)  # returns at once
    with pytest.raises(Overloaded):
        worker.call(lambda: None)
