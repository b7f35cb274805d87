"""From a request to tokens, and from tokens to an answer."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from comingle.models.base import Base
from comingle.models.chat_templates import ChatTemplate, Message
from comingle.models.generation import encode_prompt
from comingle.models.personal import chat_ends
from comingle.models.pretrained import PreTrainedTokenizerBase
from comingle.serving.engine import Chosen, Finish, Piece
from comingle.utils.errors import DataError


class Prompts:
    """Texts, tokens and messages as prompts for one base."""

    def __init__(self, base: Base) -> None:
        assert base.tokenizer is not None
        self.base, self.tokenizer, self.template = base, base.tokenizer, ChatTemplate(base.tokenizer, base.date)
        self.begin = base.begin

    def of_messages(self, messages: Sequence[Message]) -> list[int]:
        """Messages in the base's chat template, or the plain one where it has none, up to where the answer begins.

        Raises:
            DataError: the template refuses them, or a token has no row in the embedding.
        """
        tokens = encode_prompt(self.tokenizer, self.template.prompt(messages))
        self.base.require_rows(tokens, "the messages")
        return tokens

    def chat_ends(self) -> tuple[int, ...]:
        """The tokens that end an answer in a chat.

        Raises:
            DataError: the base knows none.
        """
        return chat_ends(self.base)

    def of_texts(self, prompt: Any) -> list[list[int]]:
        """A text, tokens, or a list of either.

        Raises:
            DataError: no prompt, an empty one that the tokenizer cannot begin, or a token outside the vocabulary.
        """
        many = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else list(prompt)
        if not many:
            raise DataError("prompt: an empty list; give a text, tokens, or a list of either")
        for number in (number for one in many if not isinstance(one, str) for number in one):
            if not 0 <= number < self.base.rows:
                raise DataError(f"prompt: got token {number}; allowed are those from 0 below {self.base.rows:,}")
        tokens = [encode_prompt(self.tokenizer, one, self.begin) for one in many]
        for one in tokens:
            self.base.require_rows(one, "the prompt")
        return tokens


DONE = "data: [DONE]\n\n"


@dataclass(kw_only=True)
class Choice:
    """One text of an answer, as far as it has come."""

    text: str = ""
    said: list[Chosen] = field(default_factory=list)
    count: int = 0
    finish: Finish | None = None

    def add(self, piece: Piece, ends: Sequence[int]) -> list[Chosen]:
        """Take in one piece; returns its token, unless that only ends the text."""
        self.text += piece.text
        self.count += piece.chosen is not None
        self.finish = piece.finish
        shown = [piece.chosen] if piece.chosen and piece.chosen.token not in ends else []
        self.said += shown
        return shown


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What all chunks of one answer have in common."""

    chat: bool
    model: str
    tokenizer: PreTrainedTokenizerBase
    probable: bool
    """Whether tokens' probabilities were asked for."""
    prompt_tokens: int
    made: int = field(default_factory=lambda: int(time.time()))
    key: str = field(default_factory=lambda: secrets.token_hex(12))

    # ------------------------------------------------------------ whole

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        return {
            **self._head("chat.completion" if self.chat else "text_completion"),
            "choices": [self._choice(number, choice) for number, choice in enumerate(choices)],
            "usage": self.usage(choices),
        }

    def _choice(self, number: int, choice: Choice) -> dict[str, Any]:
        said = {"logprobs": self._logprobs(choice.said), "finish_reason": choice.finish}
        if not self.chat:
            return {"index": number, "text": choice.text, **said}
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"index": number, "message": message, **said}

    def usage(self, choices: Sequence[Choice]) -> dict[str, int]:
        """How many tokens were read and written."""
        new = sum(choice.count for choice in choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": new,
            "total_tokens": self.prompt_tokens + new,
        }

    # ------------------------------------------------------------ in chunks

    def chunk(self, choices: Sequence[Mapping[str, Any]], usage: Mapping[str, int] | None = None) -> str:
        """One event."""
        body = {**self._head("chat.completion.chunk" if self.chat else "text_completion"), "choices": choices}
        return event(body if usage is None else {**body, "usage": usage})

    def first(self, number: int) -> dict[str, Any]:
        """Whose turn it is: how a chat's chunks begin."""
        return {"index": number, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def part(self, number: int, text: str, said: Sequence[Chosen], finish: Finish | None) -> dict[str, Any]:
        """What was added."""
        rest = {"logprobs": self._logprobs(said), "finish_reason": finish}
        if not self.chat:
            return {"index": number, "text": text, **rest}
        return {"index": number, "delta": {"content": text} if text else {}, **rest}

    # ------------------------------------------------------------ parts of both

    def _head(self, kind: str) -> dict[str, Any]:
        name = f"{'chatcmpl' if self.chat else 'cmpl'}-{self.key}"
        return {"id": name, "object": kind, "created": self.made, "model": self.model, "system_fingerprint": None}

    def _logprobs(self, said: Sequence[Chosen]) -> dict[str, Any] | None:
        if not self.probable:
            return None
        if self.chat:
            tokens = [{**self._likely(one.token, one.logprob), "top_logprobs": self._top(one)} for one in said]
            return {"content": tokens, "refusal": None}
        return {
            "tokens": [self._text(one.token) for one in said],
            "token_logprobs": [one.logprob for one in said],
            "top_logprobs": [{self._text(token): value for token, value in one.top} for one in said],
            "text_offset": [one.at for one in said],
        }

    def _top(self, one: Chosen) -> list[dict[str, Any]]:
        return [self._likely(token, value) for token, value in one.top]

    def _likely(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    def _text(self, token: int) -> str:
        return str(self.tokenizer.decode([token], skip_special_tokens=False))


def event(body: Mapping[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"
