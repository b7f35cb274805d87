"""Rows of XNLI and XQuAD: the questions in them, as prompts with answers."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from comingle.data.conversations.encoding import Question
from comingle.data.row_files import Row

LABELS = ("entailment", "neutral", "contradiction")
"""By number, as the hub has them."""

COLUMNS = {"xnli": ("premise", "hypothesis", "label"), "xquad": ("id", "context", "question", "answers")}
"""What is read of each set's rows on the hub."""


def ask(instruction: str, text: str) -> str:
    """The prompt for an instruction about a text."""
    return f"### Instruction:\n{instruction}\n\n### Input:\n{text}\n\n### Response:\n"


def _xnli(row: Row, instruction: str) -> Iterator[tuple[str, Question]]:
    """The question of a row; a label is a word, or its number.

    Raises:
        ValueError: what is wrong with the row.
    """
    label = row.get("label")
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(LABELS):
        label = LABELS[label]
    if label not in LABELS:
        raise ValueError(f"label is {reprlib.repr(label)}; allowed: {', '.join(LABELS)}, or their numbers 0 to 2")
    text = f"Premise: {_text(row, 'premise')}\nHypothesis: {_text(row, 'hypothesis')}"
    yield _id(row), Question(prompt=ask(instruction, text), answer=label)


def _xquad(row: Row, instruction: str) -> Iterator[tuple[str, Question]]:
    """The questions of a row: one with SQuAD's columns, or all of a paragraph under ``qas``.

    Raises:
        ValueError: what is wrong with the row.
    """
    asked = row.get("qas", [row])
    if not isinstance(asked, list) or not all(isinstance(one, dict) for one in asked):
        raise ValueError(f"qas is {reprlib.repr(asked)}; allowed: a list of questions")
    for one in asked:
        text = f"Text: {_text(row, 'context')}\nQuestion: {_text(one, 'question')}"
        answer = _text(one if "answer" in one else {"answer": _first_answer(one.get("answers"))}, "answer")
        yield _id(one), Question(prompt=ask(instruction, text), answer=answer)


def _first_answer(answers: Any) -> Any:
    """Of SQuAD's ``{"text": [...]}``."""
    texts = answers.get("text") if isinstance(answers, dict) else None
    return texts[0] if isinstance(texts, list) and texts else None


def _id(row: Row) -> str:
    if row.get("id") is None:
        raise ValueError("no id; allowed: a name or number, the same in all languages")
    return str(row["id"])


def _text(row: Row, key: str) -> str:
    """What stands in a column; an answer has to say something, as the loss and the measures are on it."""
    value = row.get(key)
    if not isinstance(value, str) or (key == "answer" and not value.strip()):
        raise ValueError(f"{key} is {reprlib.repr(value)}; allowed: text")
    value.encode()  # half a pair of surrogates is no text
    return value


QUESTIONS_OF: Mapping[str, Callable[[Row, str], Iterator[tuple[str, Question]]]] = {"xnli": _xnli, "xquad": _xquad}
"""What makes the questions of a row of each set."""
