"""Conversations as tokens: which of them carry a loss, beside ids that are written down by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from comingle.data.templates import ChatTemplate, Encoded
from comingle.errors import DataError
from comingle.models.byte_tokenizer import BOS, EOS, PAD, byte_tokenizer

# ChatML, with the byte tokenizer's other special tokens for <|im_start|> and <|im_end|>: a response's end is not EOS.
CHATML = (
    "{% for message in messages %}{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ '<|bos|>' + message['role'] + '\n' + message['content'] + '<|pad|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|bos|>assistant\n' }}{% endif %}"
)
TURNS = [("system", "Be brief."), ("user", "hé?"), ("assistant", " ünd\n"), ("user", "b"), ("assistant", "c d")]


def messages(turns: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def chatml() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    return tokenizer


def by_hand(turns: Sequence[tuple[str, str]], *, template: bool) -> tuple[list[int], list[bool]]:
    """Tokens up to the last response, and whether each is of a response."""
    ids: list[int] = []
    learnt: list[bool] = []
    last = 0
    for role, content in turns:
        head = [BOS, *f"{role}\n".encode()] if template else [*f"### {role.capitalize()}:\n".encode()]
        said = [*content.encode(), *([PAD] if template else [EOS] if role == "assistant" else [])]
        tail = [*(b"\n" if template else b"\n\n")]
        ids += head + said + tail
        learnt += [False] * len(head) + [role == "assistant"] * len(said) + [False] * len(tail)
        last = len(ids) - len(tail) if role == "assistant" else last
    return ids[:last], learnt[:last]


def learnt_of(encoded: Encoded) -> list[bool]:
    return [any(start <= place < stop for start, stop in encoded.responses) for place in range(len(encoded))]


@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize("count", [3, 5])
def test_responses_with_their_ends_alone_have_a_loss(template: bool, count: int) -> None:
    tokenizer = chatml() if template else byte_tokenizer()
    found = ChatTemplate(tokenizer).encode(messages([*TURNS[:count], ("user", "never answered")]))
    ids, learnt = by_hand(TURNS[:count], template=template)
    assert list(found.tokens) == ids
    assert learnt_of(found) == learnt
    assert found.references == ("ünd", "c d")[: count // 2]


@pytest.mark.parametrize("template", [True, False])
def test_a_prompt_is_what_stands_before_the_response(template: bool) -> None:
    chat = ChatTemplate(chatml() if template else byte_tokenizer())
    found = chat.encode(messages(TURNS))
    for number, (start, _) in zip((2, 4), found.responses, strict=True):
        assert chat.prompt(messages(TURNS[:number])) == found.tokens[:start]


def test_special_tokens_that_are_spelt_out_are_text() -> None:
    turns = [("user", "<|pad|>\n<|bos|>assistant\nyes \ue0000\ue001"), ("assistant", "a<|eos|><|pad|>b")]
    for template in (True, False):
        tokenizer = chatml() if template else byte_tokenizer()
        found = ChatTemplate(tokenizer).encode(messages(turns))
        ids, learnt = by_hand(turns, template=template)
        assert list(found.tokens) == ids
        assert learnt_of(found) == learnt


def test_what_ends_a_response_is_known() -> None:
    assert ChatTemplate(chatml()).ends() == (EOS, PAD)
    assert ChatTemplate(byte_tokenizer()).ends() == (EOS,)


def test_what_a_template_refuses_is_said() -> None:
    turns = [("user", "a"), ("tool", "b"), ("assistant", "c")]
    with pytest.raises(DataError) as found:
        ChatTemplate(chatml()).encode(messages(turns))
    assert str(found.value) == "the base's chat template refuses the roles user, tool, assistant: no tools here"


def test_a_template_that_writes_earlier_turns_anew_is_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}" + CHATML
    with pytest.raises(DataError, match="writes earlier turns anew as a conversation goes on"):
        ChatTemplate(tokenizer).encode(messages(TURNS))


def test_a_header_that_training_leaves_out_is_no_part_of_a_response() -> None:
    """Templates of models that think end the prompt with an empty thought, which finished turns do not have."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML.replace(
        "<|bos|>assistant\n' }}{% endif %}", "<|bos|>assistant\n<t></t>' }}{% endif %}"
    )
    found = ChatTemplate(tokenizer).encode(messages(TURNS[1:3]))
    ids, learnt = by_hand(TURNS[1:3], template=True)
    assert (list(found.tokens), learnt_of(found)) == (ids, learnt)
