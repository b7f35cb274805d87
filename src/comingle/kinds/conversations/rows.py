"""What a row says: messages, in one of three spellings."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from comingle.data.rows import field_of, has_column
from comingle.data.templates import ASSISTANT, ROLES
from comingle.errors import did_you_mean

Messages = tuple[dict[str, str], ...]
"""A conversation: ``role`` and ``content`` of each message."""

SHAREGPT = "conversations"
_SHAREGPT_ROLES = {"human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bing": ASSISTANT, "bard": ASSISTANT}


@dataclass(frozen=True)
class Columns:
    """Where a row has its messages."""

    messages: str = "messages"
    prompt: tuple[str, ...] = ("prompt",)
    response: str = "response"

    @classmethod
    def read(cls, section: Mapping[str, Any]) -> Columns:
        """By the keys of a section that has not been checked yet: what cannot be a name counts as not given."""
        prompt = section.get("prompt")
        listed = [prompt] if isinstance(prompt, str) else prompt
        given = {key: section[key] for key in ("messages", "response") if isinstance(section.get(key), str)}
        if isinstance(listed, list | tuple) and listed and all(isinstance(name, str) for name in listed):
            given["prompt"] = tuple(listed)
        return cls(**given)

    @property
    def named(self) -> bool:
        """Whether prompt or response have names of their own, which are then read and not the messages."""
        return (self.prompt, self.response) != (("prompt",), "response")

    @property
    def told(self) -> str:
        """As messages to people have it."""
        two = f"{', '.join(map(repr, self.prompt))} and {self.response!r}"
        return two if self.named else f"{self.messages!r}, or {two}, or {SHAREGPT!r} as ShareGPT has them"

    def has(self, names: Sequence[str]) -> bool:
        """Whether rows with columns of these names have messages."""
        columns = (*self.prompt, self.response)
        two = all(name in names or name.partition(".")[0] in names for name in columns)
        return two or (not self.named and (self.messages in names or SHAREGPT in names))


def messages_of(row: Mapping[str, Any], columns: Columns) -> Messages:
    """The conversation of a row: messages, or ShareGPT's spelling of them, or a prompt with its response.

    Raises:
        ValueError: what is wrong with the row.
    """
    if not columns.named and row.get(columns.messages) is not None:
        messages = _messages(row[columns.messages], columns.messages)
    elif not columns.named and row.get(SHAREGPT) is not None:
        messages = _messages(row[SHAREGPT], SHAREGPT)
    else:
        messages = _pair(row, columns)
    _check(messages)
    return tuple(messages)


def _pair(row: Mapping[str, Any], columns: Columns) -> list[dict[str, str]]:
    values = {name: field_of(row, name) for name in (*columns.prompt, columns.response)}
    others = columns.prompt[1:]
    if missing := [n for n, value in values.items() if value is None and not (n in others and has_column(row, n))]:
        hint = did_you_mean(missing[0], row) if columns.named else ""
        raise ValueError(f"no column {missing[0]!r}; found: {', '.join(row)}; allowed: {columns.told}.{hint}")
    texts = {name: _text(value, name) for name, value in values.items() if value is not None}
    prompts = [texts[name] for name in columns.prompt if name in texts]
    prompt = "\n\n".join(text for text in prompts if text.strip()) if others else prompts[0]
    return [{"role": "user", "content": prompt}, {"role": ASSISTANT, "content": texts[columns.response]}]


def _messages(value: Any, column: str) -> list[dict[str, str]]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(one, Mapping) for one in value):
        raise ValueError(f"{column} is {reprlib.repr(value)}; allowed: a list of messages with role and content")
    return [_message(one, f"{column}[{number}]") for number, one in enumerate(value)]


def _message(one: Mapping[str, Any], where: str) -> dict[str, str]:
    role, content = one.get("role", one.get("from")), one.get("content", one.get("value"))
    if not isinstance(role, str) or _SHAREGPT_ROLES.get(role, role) not in ROLES:
        allowed = f"{', '.join(ROLES)} (and human, gpt)"
        raise ValueError(f"{where} has the role {reprlib.repr(role)}; allowed: {allowed}")
    return {"role": _SHAREGPT_ROLES.get(role, role), "content": _text(content, f"{where}.content")}


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} is {reprlib.repr(value)}; allowed: text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} holds half a pair of surrogates; allowed: text") from None
    return value


def _check(messages: Sequence[Mapping[str, str]]) -> None:
    """The loss is on responses, so there must be some, each after a message and each with something in it."""
    responses = [message for message in messages if message["role"] == ASSISTANT]
    if not responses:
        raise ValueError("no response in it; allowed: at least one message of the assistant")
    if messages[0]["role"] == ASSISTANT:
        raise ValueError("it begins with a response; allowed: a message of user or system first")
    if not all(message["content"].strip() for message in responses):
        raise ValueError("an empty response; allowed: text in every message of the assistant")
