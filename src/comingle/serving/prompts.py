"""From what a request says to the tokens that a model continues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from comingle.models.base import Base
from comingle.models.chat_templates import ChatTemplate, Message
from comingle.models.generation import encode_prompt
from comingle.models.personal import chat_ends
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
