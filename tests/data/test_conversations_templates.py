"""Conversations as tokens: which of them carry a loss, beside ids that are written down by hand."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import pytest
from families import FAMILIES, SPECIAL

from comingle.data.conversations.encoding import build_answers
from comingle.models.chat_templates import ChatTemplate, Encoded
from comingle.models.random_bases import BOS, EOS, PAD, byte_tokenizer
from comingle.utils.errors import DataError

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
    with pytest.raises(DataError, match=r"chat template .*user, tool, assistant: no tools here$"):
        ChatTemplate(chatml()).encode(messages(turns))


def test_a_template_that_writes_earlier_turns_anew_is_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}" + CHATML
    with pytest.raises(DataError, match=r"chat template .*earlier turns"):
        ChatTemplate(tokenizer).encode(messages(TURNS))


def test_training_follows_the_prompt_where_responses_lack_its_end() -> None:
    """Templates of models that think end the prompt with an empty thought, which finished turns do not have."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML.replace(
        "<|bos|>assistant\n' }}{% endif %}", "<|bos|>assistant\n<t></t>' }}{% endif %}"
    )
    chat = ChatTemplate(tokenizer)
    found = chat.encode(messages(TURNS[1:3]))
    ((start, stop),) = found.responses
    assert found.tokens[:start] == chat.prompt(messages(TURNS[1:2]))
    assert bytes(found.tokens[start : stop - 1]).decode() == TURNS[2][1]
    assert found.tokens[stop - 1 :] == (PAD,)
    turns = chat.encode_turns(messages(TURNS))
    assert [one.tokens[: one.responses[0][0]] for one in turns] == [
        chat.prompt(messages(TURNS[:2])),
        chat.prompt(messages(TURNS[:4])),
    ]


def test_responses_that_are_left_out_stay_in_the_context() -> None:
    turns: list[dict[str, Any]] = messages(TURNS)
    turns[2]["learn"] = False
    whole, found = ChatTemplate(chatml()).encode(messages(TURNS)), ChatTemplate(chatml()).encode(turns)
    assert found.tokens == whole.tokens
    assert (found.masked, found.responses) == (whole.responses[:1], whole.responses[1:])
    turns[4]["learn"] = False
    with pytest.raises(DataError, match="no response"):
        ChatTemplate(chatml()).encode(turns)


def test_a_first_message_of_the_assistant_is_context() -> None:
    found = ChatTemplate(chatml()).encode(messages([("assistant", "Welcome."), *TURNS[1:3]]))
    assert found.references == ("ünd",)
    assert b"Welcome." in bytes(token for token in found.tokens if token < 256)


# -------------------------------------------------------------------- families

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": messages([("user", "Hi?"), ("assistant", "Yo there.")]),
    "two": messages([("user", "Hi?"), ("assistant", "Yo there."), ("user", "More?"), ("assistant", "\n\nDone it.")]),
    "system": messages([("system", "Be brief."), ("user", "Hi?"), ("assistant", "Yo."), *TURNS[3:]]),
    "thought": messages([("user", "Hi?"), ("assistant", "<think>\nwhy so\n</think>\n\nYo.")]),
    "two thoughts": messages([("user", "Hi?"), ("assistant", "<think>why so</think>Yo.")] * 2),
    "opening": messages([("assistant", "Welcome."), ("user", "Hi?"), ("assistant", "Yo.")]),
    "tool": messages([("user", "Hi?"), ("assistant", "I look."), ("tool", "RESULT 22"), ("assistant", "It is.")]),
    "call": [
        {"role": "user", "content": "Hi?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "RESULT 22"},
        {"role": "assistant", "content": "It is."},
    ],
    "tools": [
        {"role": "user", "content": "Hi?", "tools": [{"type": "function", "function": {"name": "weather"}}]},
        {"role": "assistant", "content": "Yo."},
    ],
}
REFUSED = {
    "zephyr": {"tool": "tool message", "call": "tool message", "tools": "tools"},
    "llama-2": {"tool": "alternate", "call": "alternate", "opening": "alternate", "tools": "tools"},
    "llama-3.2": {"tools": "tools"},
    "gemma": {"tool": "alternate", "call": "alternate", "opening": "alternate", "tools": "tools", "system": "System"},
    "mistral-v0.3": {"tool": "alternate", "call": "alternate", "opening": "alternate", "tools": "tools"},
    "vicuna": {"tool": "tool message", "call": "tool message", "tools": "tools"},
    "qwen2.5": {},
}
"""By family and chat, a word of the reason; a family that is not here refuses tools alone."""
WRITES_CALLS = {"llama-3.2", "qwen2.5", "deepseek-r1", "plain"}


def of_family(name: str) -> Any:
    tokenizer = byte_tokenizer()
    if name != "plain":
        template = FAMILIES[name]
        tokenizer.add_special_tokens({"additional_special_tokens": [one for one in SPECIAL if one in template]})
        tokenizer.chat_template = template
    return tokenizer


def shown(template: ChatTemplate, tokens: Sequence[int], **options: Any) -> str:
    return str(template.tokenizer.decode(list(tokens), **options))


@pytest.mark.parametrize("family", ["plain", *FAMILIES])
@pytest.mark.parametrize("chat", CHATS)
def test_a_response_is_trained_on_where_it_is_asked_for(family: str, chat: str) -> None:
    template = ChatTemplate(of_family(family), datetime(2026, 5, 4))
    turns = CHATS[chat]
    if why := REFUSED.get(family, {} if family == "plain" else {"tools": "tools"}).get(chat):
        with pytest.raises(DataError) as refused:
            template.encode_turns(turns)
        assert why in str(refused.value)
        assert "\n" not in str(refused.value)
        return
    found = template.encode_turns(turns)
    calls = [number for number, turn in enumerate(turns) if turn.get("tool_calls")]
    learnt = [number for number, turn in enumerate(turns) if turn["role"] == "assistant" and number]
    if family not in WRITES_CALLS:
        assert sum(one.unwritten_calls for one in found) == len(calls)
        learnt = [number for number in learnt if number not in calls]
    spans = [(one, *span, text) for one in found for span, text in zip(one.responses, one.references, strict=True)]
    assert len(spans) == len(learnt)
    for number, (one, start, stop, reference) in zip(learnt, spans, strict=True):
        prompt = template.prompt(turns[:number])
        if start == one.responses[0][0]:  # what stands before later ones has been cut where they are asked for
            assert one.tokens[:start] == prompt
        said = shown(template, one.tokens[start:stop], skip_special_tokens=True)
        assert said.strip() == reference
        assert (turns[number]["content"] or "Zürich").split()[-1].rpartition(">")[2] in said
        for part in ("why", "so") if "thought" in chat else ():
            assert part in said
        for before in turns[:number]:
            assert before["role"] == "assistant" or before["content"] in shown(template, prompt)


def test_the_date_is_the_templates() -> None:
    first, same, other = (ChatTemplate(of_family("llama-3.2"), datetime(2026, 5, day)) for day in (4, 4, 5))
    asked = CHATS["one"][:1]
    assert first.writes_date
    assert first.prompt(asked) == same.prompt(asked) != other.prompt(asked)
    assert "Today Date: 04 May 2026" in shown(first, first.prompt(asked))
    assert not ChatTemplate(of_family("qwen3")).writes_date


def test_an_end_of_text_behind_the_conversation_is_no_end_of_a_response() -> None:
    for family in ("phi-3", "phi-4-mini"):
        template = ChatTemplate(of_family(family))
        end = template.tokenizer.convert_tokens_to_ids("<|end|>")
        assert template.ends() == (EOS, end)
        found = template.encode(CHATS["two"])
        assert [found.tokens[stop - 1] for _, stop in found.responses] == [end, end]


def test_messages_that_a_template_leaves_out_are_refused_in_prompts_too() -> None:
    template = ChatTemplate(of_family("zephyr"))
    with pytest.raises(DataError, match=r"messages\[2\].*'RESULT 22'"):
        template.prompt(CHATS["tool"][:3])


def test_responses_that_are_left_out_carry_no_loss_where_all_tokens_do() -> None:
    turns: list[dict[str, Any]] = messages(TURNS)
    turns[2]["learn"] = False
    one = ChatTemplate(chatml()).encode(turns)
    assert one.masked is not None
    ((start, stop),) = one.masked
    for prompts in (False, True):
        (row,) = build_answers([one], limit=9, measures=[], ends=[], loss_on_all=prompts).windows.tolist()
        assert all(token < 0 for token in row[start:stop])
        assert all(token >= 0 for token in row[slice(*one.responses[0])])
        assert (row[0] >= 0) == prompts
