"""Conversations as tokens: by the base's own chat template, or by a plain one where it has none.

The plain one, with the tokenizer's end-of-text token behind every response::

    ### User:
    What is a comet?

    ### Assistant:
    A ball of ice.<|endoftext|>

    ### User:
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from comingle.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A conversation's tokens; each response is a span of them, from its first to behind the token that ends it."""

    tokens: tuple[int, ...]
    responses: tuple[tuple[int, int], ...]
    references: tuple[str, ...]
    """What the responses are, as text."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def longest(self) -> int:
        """Tokens of the longest response, its end included."""
        return max(stop - start for start, stop in self.responses)


def begin_of(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The begin-of-text token where the tokenizer begins every text with it, which others keep for roles of a chat."""
    ids: Any = tokenizer("")["input_ids"]
    return tuple(ids[:1]) if ids and ids[0] == tokenizer.bos_token_id else ()


Message = Mapping[str, str]
"""``role`` and ``content``."""

ASSISTANT = "assistant"
ROLES = ("system", "user", ASSISTANT, "tool")

PLAIN = (
    "{% for message in messages %}{{ '### ' + message['role'] | capitalize + ':\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Assistant:\n' }}{% endif %}"
)

# A special token that is spelt out in a message stands as this while the template is filled in, so that it can be
# tokenised as the text it is.
_OPEN, _CLOSE = "\ue000", "\ue001"


def require_characters(text: str) -> None:
    """Whether a tokenizer can take a text.

    Raises:
        DataError: half of a character in it, as undecodable bytes of a terminal are read.
    """
    if half := re.search("[\ud800-\udfff]", text):
        raise DataError(f"a text is not valid Unicode: {half[0]!r} at {half.start()}")


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template, or the plain one where it has none."""

    tokenizer: PreTrainedTokenizerBase

    @property
    def own(self) -> bool:
        """Whether it is the tokenizer's own."""
        return bool(self.tokenizer.chat_template)

    def render(self, messages: Sequence[Message], *, asks: bool = False) -> str:
        """The conversation as text; with ``asks`` up to where the next response begins.

        Raises:
            DataError: the template refuses the messages, as their order; or a text of the base has no end.
        """
        if self.own:
            return self._apply(messages, asks, None)
        if self.tokenizer.eos_token_id is None:
            raise DataError(
                "the base's tokenizer has no end-of-text token, so responses would have no end; give another base"
            )
        begin = self.tokenizer.bos_token if begin_of(self.tokenizer) else ""
        return f"{begin}{self._apply(messages, asks, PLAIN)}"

    def _apply(self, messages: Sequence[Message], asks: bool, template: str | None) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    chat_template=template,
                    tokenize=False,
                    add_generation_prompt=asks,
                )
            )
        except Exception as error:  # a template is a program of its own, and may raise anything
            said = " ".join(str(error).split()) or type(error).__name__
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(f"the base's chat template refuses the roles {roles}: {said}") from None

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens after which a model gives the next response.

        Raises:
            DataError: the template refuses the messages, or they are not all characters.
        """
        require_characters("".join(message["content"] for message in messages))
        safe, spelt = self._hide(messages)
        return tuple(token for token, _, _ in self._tokens(self.render(safe, asks=True), spelt))

    def encode(self, messages: Sequence[Message]) -> Encoded:
        """The conversation up to its last response; each response is what the model says, with the token that ends it.

        A response begins where the template, asked for the next one, stops; it ends with the last special token that
        the template puts behind it.

        Raises:
            DataError: the template refuses the messages, or writes earlier turns anew as a conversation goes on.
        """
        safe, spelt = self._hide(messages)
        whole = self.render(safe)
        tokens = self._tokens(whole, spelt)
        starts, stops = [start for _, start, _ in tokens], [stop for _, _, stop in tokens]
        responses, references = [], []
        for number, message in enumerate(messages):
            if message["role"] == ASSISTANT:
                first, last = self._place(safe, number, whole)
                span = range(bisect_right(stops, first), bisect_left(starts, last))
                responses.append(self._ended([token for token, _, _ in tokens], span))
                references.append(message["content"].strip())
        end = responses[-1][1]
        return Encoded(
            tokens=tuple(token for token, _, _ in tokens[:end]),
            responses=tuple(responses),
            references=tuple(references),
        )

    def _place(self, messages: Sequence[Message], number: int, whole: str) -> tuple[int, int]:
        """Where response ``number`` begins and ends in the text of the whole conversation."""
        before, asked = self.render(messages[:number]), self.render(messages[:number], asks=True)
        first, last = _common(asked, whole), _common(self.render(messages[: number + 1]), whole)
        if not _common(before, whole) == len(before) <= first < last:
            raise DataError(
                "the base's chat template writes earlier turns anew as a conversation goes on, so responses have no "
                "one place; give conversations of one turn"
            )
        return first, last

    def _ended(self, tokens: Sequence[int], span: range) -> tuple[int, int]:
        """The span up to the last special token in it: what stands behind that is the template's."""
        ends = [place for place in span if tokens[place] in self._special]
        return span.start, (ends[-1] + 1 if ends else span.stop)

    def ends(self) -> tuple[int, ...]:
        """The tokens that end a response: the end of text, and what the template puts behind one."""
        example = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}]
        last = self.encode(example).tokens[-1]
        known: Any = self.tokenizer.eos_token_id
        return tuple(dict.fromkeys([*([] if known is None else [known]), *([last] if last in self._special else [])]))

    # ------------------------------------------------------------ special tokens that are spelt out

    @cached_property
    def _special(self) -> dict[int, str]:
        return {number: t.content for number, t in self.tokenizer.added_tokens_decoder.items() if t.special}

    @cached_property
    def _borders(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, [*self._special.values(), _OPEN])))

    def _hide(self, messages: Sequence[Message]) -> tuple[list[dict[str, str]], list[str]]:
        """Messages without special tokens, and the texts that stand for those in the order of their numbers."""
        spelt: list[str] = []

        def hide(found: re.Match[str]) -> str:
            spelt.append(found[0])
            return f"{_OPEN}{len(spelt) - 1}{_CLOSE}"

        return [{**message, "content": self._borders.sub(hide, message["content"])} for message in messages], spelt

    def _tokens(self, text: str, spelt: Sequence[str]) -> list[tuple[int, int, int]]:
        """Every token of a text, and where in it it begins and ends."""
        tokens, at = [], 0
        for number, piece in enumerate(re.split(f"{_OPEN}(\\d+){_CLOSE}", text)):
            plain, width = number % 2 == 1, len(piece) + 2 * (number % 2)
            ids, places = self._piece(spelt[int(piece)] if plain else piece, plain=plain)
            tokens += [
                (token, at, at + width) if plain else (token, at + start, at + stop)
                for token, (start, stop) in zip(ids, places, strict=True)
            ]
            at += width
        return tokens

    def _piece(self, text: str, *, plain: bool) -> tuple[list[int], list[tuple[int, int]]]:
        if not self.tokenizer.is_fast:
            raise DataError("the base's tokenizer does not say where its tokens are in a text; give another base")
        encoded: Any = self.tokenizer(
            text,
            add_special_tokens=False,
            split_special_tokens=plain,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        return encoded["input_ids"], encoded["offset_mapping"]


def _common(first: str, second: str) -> int:
    """How many characters two texts begin with alike."""
    pairs = zip(first, second, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
