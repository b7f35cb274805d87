"""Questions with answers as tokens: the loss is on the answer, and the model is to give it by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from comingle.data.batches import PAD, hide
from comingle.errors import DataError

Split = Literal["train", "valid", "test"]


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked, as the model reads it, and the answer that is wanted."""

    prompt: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A question's tokens; the answer ends with the end-of-text token."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    reference: str

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Questions of one user, one a row: ``windows`` hold prompt, answer and end, filled with ``PAD``.

    The first ``prompt_tokens`` of a row are the prompt; where it carries no loss it is hidden
    (:func:`comingle.data.batches.hide`). ``limit`` is how many tokens the longest answer of the user has, its end
    included. ``labels`` says that answers are one of a few words, so that they are right or wrong.
    """

    windows: Int64[Tensor, "n window"]
    prompt_tokens: Int64[Tensor, " n"]
    references: tuple[str, ...]
    limit: int
    labels: bool

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def contents(self) -> tuple[Any, ...]:
        """What a digest is taken of."""
        return self.windows, self.prompt_tokens, [self.references, self.limit, self.labels]

    def prompt(self, number: int) -> Int64[Tensor, " tokens"]:
        """The tokens that question ``number`` asks with."""
        return self.tokens(number)[: int(self.prompt_tokens[number])]

    def tokens(self, number: int) -> Int64[Tensor, " tokens"]:
        """All tokens of question ``number``: prompt, answer and end."""
        row = self.windows[number]
        row = row[row != PAD]
        return torch.where(row < 0, hide(row), row)


@dataclass(frozen=True, kw_only=True)
class UserAnswers:
    """The questions of one user; valid may be empty."""

    name: str
    train: Answers
    valid: Answers
    test: Answers

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
    begin = _begin(tokenizer)
    prompts = _tokens([question.prompt for question in questions], tokenizer)
    answers = _tokens([question.answer for question in questions], tokenizer)
    return [
        Encoded(prompt=(*begin, *prompt), answer=(*answer, end), reference=question.answer)
        for prompt, answer, question in zip(prompts, answers, questions, strict=True)
    ]


def _begin(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The begin-of-text token where the tokenizer begins every text with it, which others keep for roles of a chat."""
    ids: Any = tokenizer("")["input_ids"]
    return tuple(ids[:1]) if ids and ids[0] == tokenizer.bos_token_id else ()


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


def as_answers(encoded: Sequence[Encoded], *, limit: int, labels: bool, prompts: bool = False) -> Answers:
    """The questions as windows; with ``prompts`` the loss is on the prompts too."""
    width = max((len(one) for one in encoded), default=2)
    windows = torch.full((len(encoded), width), PAD, dtype=torch.int64)
    for row, one in zip(windows, encoded, strict=True):
        prompt, answer = torch.tensor(one.prompt, dtype=torch.int64), torch.tensor(one.answer)
        row[: len(prompt)] = prompt if prompts else hide(prompt)
        row[len(prompt) : len(one)] = answer
    return Answers(
        windows=windows,
        prompt_tokens=torch.tensor([len(one.prompt) for one in encoded], dtype=torch.int64),
        references=tuple(one.reference for one in encoded),
        limit=limit,
        labels=labels,
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
    """One user named "everyone" that has the questions of all: the centralized baseline."""
    train, valid, test = (_join([user.split(split) for user in users]) for split in ("train", "valid", "test"))
    return UserAnswers(name="everyone", train=train, valid=valid, test=test)


def _join(parts: Sequence[Answers]) -> Answers:
    return Answers(
        windows=torch.cat(widen([part.windows for part in parts])),
        prompt_tokens=torch.cat([part.prompt_tokens for part in parts]),
        references=tuple(reference for part in parts for reference in part.references),
        limit=max(part.limit for part in parts),
        labels=parts[0].labels,
    )


def widen(parts: Sequence[Int64[Tensor, "_ _"]]) -> list[Int64[Tensor, "_ window"]]:
    """Windows of several users, filled with ``PAD`` to the width of the widest."""
    width = max(part.shape[1] for part in parts)
    return [torch.nn.functional.pad(part, (0, width - part.shape[1]), value=PAD) for part in parts]
