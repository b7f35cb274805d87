"""Conversations as tokens: the loss is on the responses, and a model may be asked to give them by itself.

A question with its answer is a conversation of one turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, compress
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int64
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from comingle.models.chat_templates import Encoded, begin_of
from comingle.models.windows import PAD, hide
from comingle.utils.errors import DataError

Split = Literal["train", "valid", "test"]


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked, as the model reads it, and the answer that is wanted."""

    prompt: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Conversations of one user, one a row of ``windows``, filled with ``PAD``.

    Tokens that carry no loss, which is on responses, are hidden (:func:`comingle.models.windows.hide`). Response i,
    ``references[i]`` as text, is in row ``owners[i]``, after ``prompt_tokens[i]`` tokens. ``limit`` is how many tokens
    the longest response of the user has, its end included; ``ends`` are the tokens that end one. ``measures`` is what
    is reported of it, first that by which models are compared: see :mod:`comingle.evaluation.answers`.
    """

    windows: Int64[Tensor, "n window"]
    owners: Int64[Tensor, " m"]
    prompt_tokens: Int64[Tensor, " m"]
    references: tuple[str, ...]
    limit: int
    measures: tuple[str, ...]
    ends: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def contents(self) -> tuple[Any, ...]:
        """What a digest is taken of."""
        return self.windows, self.owners, self.prompt_tokens, [self.references, self.limit, self.measures, self.ends]

    def prompt(self, number: int) -> Int64[Tensor, " tokens"]:
        """The tokens before response ``number``: the earlier turns, as they are."""
        return self.tokens(int(self.owners[number]))[: int(self.prompt_tokens[number])]

    def tokens(self, number: int) -> Int64[Tensor, " tokens"]:
        """All tokens of conversation ``number``."""
        row = self.windows[number]
        row = row[row != PAD]
        return torch.where(row < 0, hide(row), row)

    def only(self, kept: Bool[Tensor, " n"]) -> Answers:
        """Return the conversations that are kept, with their responses."""
        responses = kept[self.owners]
        return replace(
            self,
            windows=self.windows[kept],
            owners=(kept.cumsum(0) - 1)[self.owners[responses]],
            prompt_tokens=self.prompt_tokens[responses],
            references=tuple(compress(self.references, responses.tolist())),
        )


@dataclass(frozen=True, kw_only=True)
class UserAnswers:
    """The conversations of one user; valid may be empty. ``cluster`` is the true one, where the recipe names it."""

    name: str
    train: Answers
    valid: Answers
    test: Answers
    cluster: int | None = None

    def split(self, split: Split) -> Answers:
        """One of the three."""
        return {"train": self.train, "valid": self.valid, "test": self.test}[split]


def encode(questions: Sequence[Question], tokenizer: PreTrainedTokenizerBase) -> list[Encoded]:
    """The questions as tokens: a begin-of-text token where texts of the base have one, prompt, answer, end of text.

    Prompt and answer are tokenised apart, so that the border between them is where generation starts. A special token
    that is spelt out in them is tokenised as the text it is.

    Raises:
        DataError: the tokenizer has no end-of-text token, so that an answer would not end.
    """
    end: Any = tokenizer.eos_token_id
    if end is None:
        raise DataError(
            "the base's tokenizer has no end-of-text token, so answers would have no end; give another base"
        )
    begin = begin_of(tokenizer)
    prompts = _tokens([question.prompt for question in questions], tokenizer)
    answers = _tokens([question.answer for question in questions], tokenizer)
    return [
        _one_turn((*begin, *prompt), (*answer, end), question.answer)
        for prompt, answer, question in zip(prompts, answers, questions, strict=True)
    ]


def _one_turn(prompt: tuple[int, ...], answer: tuple[int, ...], reference: str) -> Encoded:
    tokens = (*prompt, *answer)
    return Encoded(tokens=tokens, responses=((len(prompt), len(tokens)),), references=(reference,))


def _tokens(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    if not texts:
        return []
    encoded: Any = tokenizer(
        list(texts),
        add_special_tokens=False,
        split_special_tokens=True,
        return_attention_mask=False,
        verbose=False,  # what is too long is left out by those who know the limit
    )
    return encoded["input_ids"]


def as_answers(
    encoded: Sequence[Encoded], *, limit: int, measures: Sequence[str], ends: Sequence[int], prompts: bool = False
) -> Answers:
    """Return the conversations as windows; with ``prompts`` the loss is on all of their tokens but masked responses."""
    width = max((len(one) for one in encoded), default=2)
    windows = torch.full((len(encoded), width), PAD, dtype=torch.int64)
    for row, one in zip(windows, encoded, strict=True):
        tokens = torch.tensor(one.tokens)
        row[: len(one)] = tokens if prompts else hide(tokens)
        for start, stop in one.masked or ():
            row[start:stop] = hide(tokens[start:stop])
        for start, stop in one.responses:
            row[start:stop] = tokens[start:stop]
    starts = [(number, start) for number, one in enumerate(encoded) for start, _ in one.responses]
    return Answers(
        windows=windows,
        owners=torch.tensor([number for number, _ in starts], dtype=torch.int64),
        prompt_tokens=torch.tensor([start for _, start in starts], dtype=torch.int64),
        references=tuple(reference for one in encoded for reference in one.references),
        limit=limit,
        measures=tuple(measures),
        ends=tuple(ends),
    )


def check_answers(user: UserAnswers, *, needs_validation: bool) -> None:
    """Whether there are questions of every kind that will be asked.

    Raises:
        DataError: there are none to validate with, which the method needs.
    """
    if needs_validation and not len(user.valid):
        raise DataError(
            f"user {user.name!r}: valid holds 0 questions, needs at least 1; give data.questions.valid, or choose a "
            "method without validation data"
        )


def pool_answers(users: Sequence[UserAnswers]) -> UserAnswers:
    """One user named "everyone" that has the conversations of all: the centralized baseline."""
    train, valid, test = (_join([user.split(split) for user in users]) for split in ("train", "valid", "test"))
    return UserAnswers(name="everyone", train=train, valid=valid, test=test)


def _join(parts: Sequence[Answers]) -> Answers:
    before = accumulate((len(part) for part in parts), initial=0)
    return Answers(
        windows=torch.cat(widen([part.windows for part in parts])),
        owners=torch.cat([part.owners + first for part, first in zip(parts, before, strict=False)]),
        prompt_tokens=torch.cat([part.prompt_tokens for part in parts]),
        references=tuple(reference for part in parts for reference in part.references),
        limit=max(part.limit for part in parts),
        measures=parts[0].measures,
        ends=tuple(dict.fromkeys(end for part in parts for end in part.ends)),
    )


def widen(parts: Sequence[Int64[Tensor, "_ _"]]) -> list[Int64[Tensor, "_ window"]]:
    """Windows of several users, filled with ``PAD`` to the width of the widest."""
    width = max(part.shape[1] for part in parts)
    return [torch.nn.functional.pad(part, (0, width - part.shape[1]), value=PAD) for part in parts]
