"""``generate`` and ``perplexity`` of a user's model: lists of prompts, transformers' settings, what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from comingle.config import parse_recipe
from comingle.models.generation import read_sampling
from comingle.models.loading import load_base
from comingle.models.personal import PersonalModel
from comingle.models.random_bases import byte_tokenizer
from comingle.runs.results import Run
from comingle.training.backends.local import InProcess
from comingle.utils.errors import DataError, RecipeError

PROMPTS = ["one two three", "a", "", "the longest of them all, by far", "a"]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"do_sample": True, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "temperature": 0.8},
    {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "min_new_tokens": 6},
    {"stop": "e", "temperature": 2.0},
    {"eos_token_id": [101, 32], "temperature": 2.0, "seed": 1},
]

Person = Callable[..., PersonalModel]


@pytest.fixture(scope="module")
def person(federate: Any) -> Person:
    """Ann of a federation whose users' tensors were moved at random."""

    @cache
    def make(method: str = "comigs-1g1s", base: str = "random:llama", dtype: str = "float64") -> PersonalModel:
        sim: InProcess = federate(method, base=base, dtype=dtype)
        noise = torch.randn(
            sim.clients.state.rows.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
        sim.clients.state.rows.add_(0.3 * noise.to(sim.clients.state.rows))
        recipe = parse_recipe({"method": sim.clients.method.name, "data": {"users": {"somebody": "unused"}}})
        found = Run(folder=None, recipe=recipe, metrics={}, federation=sim).user("ann")
        assert isinstance(found, PersonalModel)
        return found

    return make


# ---------------------------------------------------------------- lists of prompts


CASES = [
    *(("random:llama?layers=1&dim=32", settings) for settings in SETTINGS),
    *((f"random:{family}?layers=1&dim=32", SETTINGS[1]) for family in ("gpt2", "gemma2", "opt")),
]


@pytest.mark.parametrize(("base", "settings"), CASES)
@pytest.mark.sampled(1)
def test_each_prompt_of_a_list_is_continued_as_alone(person: Person, base: str, settings: dict[str, Any]) -> None:
    """All lengths differ, one is empty, and two are alike."""
    ann = person(base=base)
    alone = [ann.generate(prompt, max_new_tokens=10, **settings) for prompt in PROMPTS]
    assert ann.generate(PROMPTS, max_new_tokens=10, **settings) == alone
    assert ann.generate(tuple(PROMPTS[:2]), max_new_tokens=10, **settings) == alone[:2]
    assert len(set(alone)) > 2


@pytest.mark.parametrize("method", ["floral", "local", "pretrained"])
@pytest.mark.sampled(1)
def test_every_kind_of_model_takes_lists(person: Person, method: str) -> None:
    ann = person(method)
    alone = [ann.generate(prompt, max_new_tokens=8) for prompt in PROMPTS]
    assert ann.generate(PROMPTS, max_new_tokens=8) == alone
    assert ann.generate([]) == []
    assert ann.generate(["a"], max_new_tokens=8) == [alone[1]]


def test_a_text_is_still_sampled_as_by_transformers(person: Person) -> None:
    """Same processors, same order, same random stream."""
    ann = person(dtype="float32")
    tokenizer = ann.model.base.tokenizer
    assert tokenizer is not None
    ids = tokenizer("some words", return_tensors="pt")["input_ids"]
    penalised = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
    longer = {"min_new_tokens": 12, "do_sample": True, "min_p": 0.003}
    for own, theirs in [
        ({"temperature": 0.7}, {"do_sample": True, "temperature": 0.7, "top_p": 0.95}),
        ({"do_sample": True, "top_k": 3, "top_p": 1.0}, {"do_sample": True, "top_k": 3}),
        (penalised, penalised),
        (longer, {**longer, "top_p": 0.95}),
    ]:
        with ann.generating() as network, torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            generate: Any = network.generate
            out = generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, **theirs)
        expected = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        assert ann.generate("some words", max_new_tokens=12, seed=4, **own) == expected


def test_sampling_leaves_the_callers_random_stream_alone(person: Person) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    person().generate(["a", "bc"], temperature=1.0, max_new_tokens=2)
    assert torch.equal(torch.rand(3), expected)


# ---------------------------------------------------------------- transformers' settings


def test_a_generation_config_means_what_its_names_mean(person: Person) -> None:
    ann = person()
    named = ann.generate("one", max_new_tokens=9, do_sample=True, temperature=0.7, top_k=9, top_p=1.0, seed=2)
    config = GenerationConfig(max_new_tokens=9, do_sample=True, temperature=0.7, top_k=9, num_beams=1)
    assert ann.generate("one", config, seed=2) == named
    assert ann.generate("one", generation_config=config, seed=2) == named
    greedy = ann.generate("one", max_new_tokens=9)
    assert greedy != named
    assert ann.generate("one", config, do_sample=False) == greedy
    assert ann.generate("one", config, max_new_tokens=3, do_sample=False) == ann.generate("one", max_new_tokens=3)
    assert ann.generate("one", GenerationConfig(max_new_tokens=9, temperature=0.7)) == greedy


def test_settings_are_those_that_were_asked_for() -> None:
    assert read_sampling(max_new_tokens=5).temperature == 0
    assert (read_sampling(temperature=0.5).top_p, read_sampling(temperature=0.5).top_k) == (0.95, 50)
    assert read_sampling(do_sample=True).temperature == 1
    assert read_sampling(GenerationConfig(do_sample=True)).top_p == 1
    assert read_sampling(GenerationConfig(stop_strings=["x"], eos_token_id=5)).stop_strings == ("x",)
    assert read_sampling(eos_token_id=[3, 4]).eos_token_id == (3, 4)
    assert read_sampling(num_beams=1, use_cache=False) == read_sampling()


def test_a_stop_ends_a_text(person: Person) -> None:
    ann = person()
    whole = ann.generate("a", max_new_tokens=30, temperature=3.0, top_k=0)
    stop = whole[7:9]
    at = whole.index(stop)
    assert at > 0
    options = {"max_new_tokens": 30, "temperature": 3.0, "top_k": 0}
    assert ann.generate("a", stop=stop, **options) == whole[:at]
    assert ann.generate("a", stop=["never said", stop], **options) == whole[:at]
    assert ann.generate("a", stop_strings=[stop], **options) == whole[: at + len(stop)]
    config = GenerationConfig(stop_strings=stop, do_sample=True, temperature=3.0, top_k=0, max_new_tokens=30)
    assert ann.generate("a", config, top_p=0.95) == whole[: at + len(stop)]


def test_real_tokenizers_stop_within_a_token(stories: Any) -> None:
    base = load_base(str(stories), dtype="float32", device="cpu")
    from comingle.models.generation import continue_texts

    assert base.tokenizer is not None
    said = continue_texts(base.model, base, ["Once upon a", "Lily"], read_sampling(max_new_tokens=40))
    assert all(len(text) > 40 for text in said)
    stop = said[0][20:23]
    cut = continue_texts(base.model, base, ["Once upon a"], read_sampling(max_new_tokens=40, stop=stop))
    assert cut == [said[0][: said[0].index(stop)]]


def test_a_continuation_is_what_the_whole_text_has_behind_the_prompt(stories: Any) -> None:
    base = load_base(str(stories), dtype="float32", device="cpu")
    from comingle.models.generation import continue_texts

    assert base.tokenizer is not None
    prompts = ["Once upon a time, there was a little", "Lily and B", "Once upon a time\n", "a"]
    said = continue_texts(base.model, base, prompts, read_sampling(max_new_tokens=12))
    for prompt, text in zip(prompts, said, strict=True):
        ids = torch.tensor([base.tokenizer(prompt)["input_ids"]])  # with the begin-of-text token, as in training
        out = base.model.generate(ids, max_new_tokens=12, do_sample=False)  # type: ignore[operator]
        whole, start = (str(base.tokenizer.decode(i, skip_special_tokens=True)) for i in (out[0], ids[0]))
        assert start + text == whole
    assert said[0].startswith(" girl")
    cut = continue_texts(base.model, base, prompts[:1], read_sampling(max_new_tokens=12, stop=" girl"))
    assert cut == [""]


@pytest.mark.parametrize("prompt", ["a \udcff", [{"role": "user", "content": "\udcff"}]])
def test_half_of_a_character_is_refused(person: Person, prompt: Any) -> None:
    with pytest.raises(DataError, match=r"'\\udcff' at \d"):
        person().generate(prompt, max_new_tokens=3)
    with pytest.raises(DataError, match=r"'\\udcff' at \d"):
        person().perplexity("a \udcff")


@pytest.mark.parametrize(
    ("prompt", "text"),
    [("hi 🙂", "🙂🎉 yes"), ("你", "好吗"), ("caf☕", "☕"), ("a little", " girl")],
)
def test_what_tokens_add_is_their_text_whatever_is_before(stories: Any, prompt: str, text: str) -> None:
    from comingle.models.generation import added_text, decodable_suffix, encode_prompt
    from comingle.serving.engine import Detokenizer

    tokenizer = load_base(str(stories), dtype="float32", device="cpu").tokenizer
    assert tokenizer is not None
    before, whole = (encode_prompt(tokenizer, one) for one in (prompt, prompt + text))
    tokens = whole[len(before) :] if whole[: len(before)] == before else encode_prompt(tokenizer, text.strip())
    after = decodable_suffix(tokenizer, before)
    assert added_text(tokenizer, after, tokens) == text
    writer = Detokenizer(tokenizer, [], ends=[], after=after)
    assert "".join(writer.add(token) for token in tokens) + writer.finish() == text
    ended = encode_prompt(tokenizer, f"{prompt}</s>")
    assert decodable_suffix(tokenizer, ended) == [*after, tokenizer.eos_token_id]


def test_special_tokens_that_are_spelt_out_are_scored_as_the_text_they_are(person: Person) -> None:
    from comingle.data.text.streams import tokenise

    ann = person()
    tokenizer = ann.model.base.tokenizer
    assert tokenizer is not None
    text = f"one {tokenizer.eos_token} two"
    stream = tokenise([text], tokenizer)[:-1]
    assert len(stream) > len(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert ann.perplexity(text) == ann.score(stream, context=128).perplexity
    assert ann.route(text).tokens == ann.route(stream).tokens


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1}, "temperature: got -1; .* 0"),
        ({"temperature": math.nan}, "temperature: got nan"),
        ({"max_new_tokens": 0}, "max_new_tokens: got 0; .* 1"),
        ({"top_p": 0.0, "temperature": 1}, "top_p: got 0.0; .* 1"),
        ({"top_k": -2, "do_sample": True}, "top_k: got -2"),
        ({"top_k": 5}, "top_k: .*do_sample=True"),
        ({"do_sample": True, "temperature": 0}, "temperature: got 0 with do_sample=True"),
        ({"do_sample": False, "temperature": 0.7}, "temperature: got 0.7 with do_sample=False"),
        ({"seed": -1}, "seed: got -1"),
        ({"stop": ""}, "stop: got ''"),
        ({"stop_strings": ["a", 3]}, r"stop_strings: got \('a', 3\)"),
        ({"eos_token_id": 259}, "eos_token_id: got 259; .* 259"),
        ({"eos_token_id": -1}, "eos_token_id: got -1"),
        ({"num_beams": 4}, r"num_beams: .*\(got 4\).*do_sample, eos_token_id"),
        ({"num_return_sequences": 2}, r"num_return_sequences: .*\(got 2\)"),
        ({"max_length": 20}, "max_length: .*20.* max_new_tokens\\.$"),
        ({"temprature": 1}, "temprature: .*'temperature'"),
        ({"min_new_tokens": 9, "max_new_tokens": 4}, r"min_new_tokens: got 9; .*max_new_tokens \(4\)"),
        ({"repetition_penalty": 0}, "repetition_penalty: got 0"),
        ({"generation_config": GenerationConfig(num_beams=3)}, r"num_beams: .*\(got 3\)"),
        (
            {"generation_config": GenerationConfig(do_sample=True, temperature=1.0, typical_p=0.4)},
            r"typical_p: .*\(got 0.4\)",
        ),
    ],
)
def test_a_wrong_setting_is_one_line(person: Person, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        person().generate("a", **settings)
    assert "\n" not in str(caught.value)


def test_what_the_base_cannot_read_is_refused(person: Person) -> None:
    ann = person(base="random:gpt2?ctx=32")
    assert isinstance(ann.generate("x" * 30, max_new_tokens=2), str)
    with pytest.raises(DataError, match=r"the prompt: 30 .*max_new_tokens=3.* 32 "):
        ann.generate("x" * 30, max_new_tokens=3)
    with pytest.raises(DataError, match="prompt 2: 40 "):
        ann.generate(["x", "x" * 40], max_new_tokens=3)
    with pytest.raises(RecipeError, match=r"context: got 64; .* 32"):
        ann.perplexity("x" * 100, context=64)


@pytest.fixture(scope="module")
def unmarked(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A base whose tokenizer has neither a begin nor an end of text."""
    folder = tmp_path_factory.mktemp("unmarked")
    base, tokenizer = load_base("random:llama?layers=1&dim=32", dtype="float32", device="cpu"), byte_tokenizer()
    for key in ("bos", "eos", "pad"):
        setattr(tokenizer, f"{key}_token", None)
    base.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("prompt", ["", ["a", ""]])
def test_an_empty_prompt_without_a_token_to_begin_with_is_refused(person: Person, unmarked: str, prompt: Any) -> None:
    ann = person(base=unmarked, dtype="float32")
    assert len(ann.generate("a", max_new_tokens=4)) > 0
    with pytest.raises(DataError, match=r"prompt.*tokenizer"):
        ann.generate(prompt, max_new_tokens=4)


def test_an_empty_text_without_a_token_to_begin_with_has_no_perplexity(person: Person, unmarked: str) -> None:
    ann = person(base=unmarked, dtype="float32")
    assert ann.perplexity("some text") > 1
    with pytest.raises(DataError, match=r"user 'ann': perplexity: got 0 .* 2"):
        ann.perplexity("")


def test_a_template_that_renders_nothing_is_an_empty_prompt(person: Person, unmarked: str) -> None:
    ann, messages = person(base=unmarked, dtype="float32"), [{"role": "user", "content": ""}]
    assert ann.model.base.tokenizer is not None
    ann.model.base.tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with pytest.raises(DataError, match=r"empty prompt|prompt is empty"):
        ann.generate(messages, max_new_tokens=4)


# ---------------------------------------------------------------- perplexity


def test_windows_are_never_longer_than_the_text(person: Person, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for 100,000 places, 200 tokens are still one window of 199; they took 19 GB."""
    ann, seen = person(), []
    predict = type(ann.model).predict

    def watched(model: Any, tensors: Any, rows: Any, windows: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(windows.shape))
        return predict(model, tensors, rows, windows)

    monkeypatch.setattr(type(ann.model), "predict", watched)
    text = "ten chars." * 20
    exact = ann.perplexity(text, context=199)
    assert ann.perplexity(text, context=100_000) == exact
    assert seen == [(1, 1, 200)] * 2


@pytest.mark.parametrize("text", ["", "x"])
def test_a_text_of_which_nothing_is_predicted_has_no_perplexity(person: Person, text: str) -> None:
    with pytest.raises(DataError, match=f"user 'ann': perplexity: got {len(text)} .* 2"):
        person().perplexity(text)


def test_a_users_model_is_shown_in_one_line(person: Person) -> None:
    assert repr(person()) == "PersonalModel('ann' on random:llama)"


@pytest.mark.parametrize("context", [0, -3, True])
def test_a_wrong_context_is_refused(person: Person, context: int) -> None:
    for text in ("some text", ""):
        with pytest.raises(RecipeError, match=f"context: got {context!r}; .* 1"):
            person().perplexity(text, context=context)
