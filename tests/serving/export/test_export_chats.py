"""Exported chat models are asked in the template that they were trained in, and end where the user's model ends."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from gguf import GGUFReader
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

import comingle as library
from comingle.models.chat_templates import ChatTemplate
from comingle.models.loading import given_base, load_base
from comingle.models.random_bases import byte_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

TURN = (
    "{% for m in messages %}{{ START + m['role'] + '\n' + m['content'] + END + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ START + 'assistant\n' }}{% endif %}"
)
HELLO = [{"role": "user", "content": "Say yes."}]
ROWS = [{"messages": [*HELLO, {"role": "assistant", "content": f"Yes {n}."}]} for n in range(12)]
SETTINGS = {
    "data": {"split": {"valid": 0.2, "test": 0.2}},
    "adapters": {"rank": 2},
    "training": {"rounds": 1, "batch_size": 4, "context": 96},
    "evaluation": {"first": False},
    "runtime": {"dtype": "float32", "device": "cpu", "compile": False},
}


def make_base(
    folder: Path,
    ends: Sequence[int] | None = None,
    *,
    end: str | None = "<|im_end|>",
    begins: bool = False,
    template: Any = None,
) -> str:
    """A base whose template ends a turn with a token of its own; ``ends`` are those of its generation settings."""
    tokenizer = byte_tokenizer()
    if end is not None:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>", end]})
        tokenizer.chat_template = template or TURN.replace("START", "'<|start|>'").replace("END", f"'{end}'")
    if begins:
        pieces: Any = tokenizer
        pieces.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", 257)]
        )
    base = load_base(f"random:llama?layers=1&dim=32&vocab={len(tokenizer)}", dtype="float32", device="cpu")
    base.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if ends is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(ends)}))
    return str(folder)


def train(base: Any, users: Any = None, **settings: Any) -> Any:
    users = users or {"ada": ROWS, "ben": ROWS}
    return library.run({**SETTINGS, **settings}, users=users, base=base, method="fedit").user("ada")


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Ada's model over a base of given ends, trained once."""

    @cache
    def make(**options: Any) -> Any:
        return train(make_base(tmp_path_factory.mktemp("base"), **options))

    return make


def fields(path: Path) -> dict[str, Any]:
    file = GGUFReader(path / "model.gguf")
    return {key.removeprefix("tokenizer."): field.contents() for key, field in file.fields.items()}


# -------------------------------------------------------------------- end tokens


@pytest.mark.parametrize("end", ["<|im_end|>", "<end_of_turn>", "<|end|>", "<|eot_id|>"])
@pytest.mark.parametrize("ends", [None, (256, 65)])
@pytest.mark.sampled(1)
def test_every_end_token_is_exported(chat: Any, tmp_path: Path, end: str, ends: tuple[int, ...] | None) -> None:
    """The tokenizer's (256), the template's (260) and those of the base's own settings."""
    ada, wanted = chat(ends=ends, end=end), [256, *([65] if ends else []), 260]
    for format in ("transformers", "peft", "merged-approximately"):
        ada.export(tmp_path / format, format=format)
        assert json.loads((tmp_path / format / "generation_config.json").read_text())["eos_token_id"] == wanted
    assert ada.merge().generation_config.eos_token_id == wanted
    ada.export(tmp_path / "gguf", format="gguf")
    found = fields(tmp_path / "gguf")
    assert (found["ggml.eos_token_id"], found["ggml.eot_token_id"]) == (256, 260)
    assert found.get("ggml.eom_token_id") == (65 if ends else None)
    assert ada.model.base.model.generation_config.eos_token_id == 256  # as runs have it


def test_an_export_ends_a_response_where_the_users_model_does(chat: Any, tmp_path: Path) -> None:
    template = ChatTemplate(chat().model.base.tokenizer)
    ids = torch.tensor([template.prompt(HELLO)])
    with chat().generating() as network:
        said = network.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None)[0, ids.shape[1] :].tolist()
    end = said[7]
    ada = chat(ends=(end,))
    said = said[: said.index(end) + 1]
    assert ada.generate(HELLO, max_new_tokens=20) == ada.model.base.tokenizer.decode(said, skip_special_tokens=True)
    ada.export(tmp_path / "t")
    networks: list[Any] = [AutoModelForCausalLM.from_pretrained(tmp_path / "t"), ada.merge()]
    for network in networks:
        answer = network.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :].tolist()
        assert answer == said


def test_a_mixture_of_experts_has_the_end_tokens_too(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", (65,))
    run = library.run(SETTINGS, users={"ada": ROWS, "ben": ROWS}, base=base, method="comigs-1g1s")
    run.user("ada").export(tmp_path / "t")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "t").generation_config.eos_token_id == [256, 65, 260]


def test_a_client_level_mixture_has_the_end_tokens_too(tmp_path: Path) -> None:
    method = {"name": "floral", "clusters": 2}
    run = library.run(SETTINGS, users={"ada": ROWS, "ben": ROWS}, base=make_base(tmp_path / "base"), method=method)
    assert run.user("ada").merge().generation_config.eos_token_id == [256, 260]


def test_a_base_that_a_program_hands_over_keeps_its_end_tokens(tmp_path: Path) -> None:
    folder = make_base(tmp_path / "base", (256, 65))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert given_base(model, tokenizer).ends == (256, 65)
    ada = train((model, tokenizer))
    assert ada.merge().generation_config.eos_token_id == [256, 65, 260]
    assert model.generation_config.eos_token_id == [256, 65]


def test_a_model_of_texts_ends_as_its_base(tmp_path: Path) -> None:
    texts = {name: [f"{name} counts {n} cats." for n in range(60)] for name in ("ada", "ben")}
    plain = train(make_base(tmp_path / "plain", end=None), texts)
    plain.export(tmp_path / "p")
    assert json.loads((tmp_path / "p" / "generation_config.json").read_text())["eos_token_id"] == 256
    assert AutoTokenizer.from_pretrained(tmp_path / "p").chat_template is None
    plain.export(tmp_path / "g", format="gguf")
    assert not {"chat_template", "ggml.eot_token_id", "ggml.eom_token_id"} & set(fields(tmp_path / "g"))
    refusing = "{{ raise_exception('no turns here') }}"
    for name, template in (("own", None), ("refusing", refusing)):
        train(make_base(tmp_path / name, template=template), texts).export(tmp_path / f"{name}-t")
        found = json.loads((tmp_path / f"{name}-t" / "generation_config.json").read_text())["eos_token_id"]
        assert found == ([256, 260] if name == "own" else 256)


# -------------------------------------------------------------------- templates


@pytest.mark.parametrize("begins", [False, True])
def test_the_plain_template_is_exported(chat: Any, tmp_path: Path, begins: bool) -> None:
    ada = chat(end=None, begins=begins)
    talk = [*HELLO, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Again, 12!"}]
    ours = ChatTemplate(ada.model.base.tokenizer)
    for format in ("transformers", "peft"):
        ada.export(tmp_path / format, format=format)
        theirs = AutoTokenizer.from_pretrained(tmp_path / format)
        for messages in (HELLO, talk):
            asked = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
            assert tuple(asked) == ours.prompt(messages)
            assert theirs.apply_chat_template(messages, tokenize=False) == ours.render(messages)
        assert (asked[0] == 257) is begins
    ada.export(tmp_path / "g", format="gguf")
    found = fields(tmp_path / "g")
    assert found["chat_template"] == theirs.chat_template
    assert found["ggml.eot_token_id"] == 256
    assert ada.model.base.tokenizer.chat_template is None


def test_a_template_that_ignores_the_question_is_exported_with_it(chat: Any, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
    ada = chat(template=template)
    ada.export(tmp_path / "t")
    asked = AutoTokenizer.from_pretrained(tmp_path / "t").apply_chat_template(
        HELLO, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert tuple(asked) == ChatTemplate(ada.model.base.tokenizer).prompt(HELLO)


def test_several_templates_are_exported(tmp_path: Path) -> None:
    usual = TURN.replace("START", "'<|start|>'").replace("END", "'<|im_end|>'")
    ada = train(make_base(tmp_path / "base", template={"default": usual, "tool_use": f"{usual} "}))
    ada.export(tmp_path / "t")
    ada.export(tmp_path / "g", format="gguf")
    assert AutoTokenizer.from_pretrained(tmp_path / "t").chat_template == {"default": usual, "tool_use": f"{usual} "}
    found = fields(tmp_path / "g")
    assert (found["chat_template"], found["chat_template.tool_use"]) == (usual, f"{usual} ")


# -------------------------------------------------------------------- the card


def code_of(card: str) -> str:
    return re.findall(r"```python\n(.*?)\n```", card, re.DOTALL)[0]


def printed(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, {})
    return out.getvalue().removesuffix("\n")


@pytest.mark.parametrize("format", ["transformers", "peft"])
@pytest.mark.parametrize("end", ["<|im_end|>", None])
@pytest.mark.sampled(1)
def test_the_card_shows_how_to_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, end: str | None
) -> None:
    """Its code runs as it stands, and prints what the user's model answers."""
    if format == "peft":
        pytest.importorskip("peft")
    ada = train(make_base(tmp_path / "a-base", end=end))
    ada.export(tmp_path / "ada", format=format)
    card = (tmp_path / "ada" / "README.md").read_text()
    asked = [{"role": "user", "content": "Hello!"}]
    assert f"```text\n{ChatTemplate(ada.model.base.tokenizer).render(asked, add_prompt=True)}".rstrip() in card
    assert "An answer ends with `<|eos|>`" in card
    assert (f"`{end}`" in card) is (end is not None)
    assert "a-base fine-tuned with the method fedit" in card
    assert str(tmp_path) not in card
    assert printed(code_of(card), tmp_path, monkeypatch) == ada.generate(asked, max_new_tokens=100)


def test_the_card_of_a_model_of_texts_continues_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {name: [f"{name} counts {n} cats." for n in range(60)] for name in ("ada", "ben")}
    ada = train(make_base(tmp_path / "a-base", end=None), texts)
    ada.export(tmp_path / "ada")
    card = (tmp_path / "ada" / "README.md").read_text()
    assert "messages" not in card
    said = ada.generate("Once upon a time", max_new_tokens=100)
    assert printed(code_of(card), tmp_path, monkeypatch) == said
    ada.export(tmp_path / "gguf", format="gguf")
    assert 'model("Once upon a time", max_tokens=100)' in (tmp_path / "gguf" / "README.md").read_text()


@pytest.mark.parametrize(("size", "eager"), [(96, False), (92, True)])
@pytest.mark.slow
def test_the_card_of_a_mixture_of_any_width_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, eager: bool
) -> None:
    base = load_base("random:llama", dtype="float32", device="cpu")
    base.model.config.intermediate_size = size
    AutoModelForCausalLM.from_config(base.model.config, dtype=torch.bfloat16).save_pretrained(tmp_path / "a-base")
    assert base.tokenizer is not None
    base.tokenizer.save_pretrained(tmp_path / "a-base")
    texts = {name: [f"{name} counts {n} cats." for n in range(60)] for name in ("ada", "ben")}
    recipe = {**SETTINGS, "runtime": {**SETTINGS["runtime"], "dtype": "bfloat16"}}
    run = library.run(recipe, users=texts, base=str(tmp_path / "a-base"), method="comigs-1g1s")
    run.user("ada").export(tmp_path / "ada")
    card = (tmp_path / "ada" / "README.md").read_text()
    assert "MixtralForCausalLM" in card
    assert printed(code_of(card), tmp_path, monkeypatch)
    config = json.loads((tmp_path / "ada" / "config.json").read_text())
    assert config.get("experts_implementation") == ("eager" if eager else None)


def test_the_code_of_every_card_is_python(chat: Any, tmp_path: Path) -> None:
    for number, (ada, format) in enumerate(
        (ada, format)
        for ada in (chat(), chat(end=None))
        for format in ("transformers", "peft", "gguf", "merged-approximately")
    ):
        ada.export(tmp_path / str(number), format=format)
        card = (tmp_path / str(number) / "README.md").read_text()
        compile(code_of(card), "card", "exec")
        assert "messages = [" in card
        assert yaml.safe_load(card.split("---")[1])["tags"][0] == "comingle"
