"""Questions in many languages: XNLI and XQuAD as FedMerge has them, one language a user (section 4.7).

    name    published samples a user         answer
    xnli    300 to train on, 200 to test     entailment, neutral or contradiction
    xquad   600 to train on, the rest        words of the text

All users have the same questions, each in its own language. A question that is longer than the context in any of the
languages is left out for all. The prompt has Alpaca's headings without its preamble (the paper adapts Alpaca-LoRA);
instruction and labels are English in all languages.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from comingle.data.answers import Encoded, Question, UserAnswers, as_answers, encode
from comingle.data.hub import FOLDER_VARIABLE, HUB_PREFIX
from comingle.data.json_lines import Row, read_json_lines
from comingle.data.seeds import generator
from comingle.data.sources import iterate_values
from comingle.errors import DataError, RecipeError, did_you_mean
from comingle.papers.questions.rows import COLUMNS, QUESTIONS_OF

logger = logging.getLogger("comingle")

MEASURES = ("accuracy", "rouge1", "loss")
"""What is reported of answers; accuracy where they are labels."""

Found = dict[str, dict[str, Question]]
"""Every language's questions by their names, which are the same in all languages."""


@dataclass(frozen=True, kw_only=True)
class QuestionSet:
    """A set of questions; without ``test`` all others are tested on. ``config`` names a language on the hub."""

    languages: tuple[str, ...]
    instruction: str
    train: int
    test: int | None
    labels: bool
    hub: str
    config: str


QUESTIONS = {
    "xnli": QuestionSet(
        languages=("ar", "bg", "de", "el", "en", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh"),
        instruction="Does the premise entail the hypothesis? Answer entailment, neutral or contradiction.",
        train=300,
        test=200,
        labels=True,
        hub="hub:facebook/xnli",
        config="{}",
    ),
    "xquad": QuestionSet(
        languages=("ar", "de", "el", "en", "es", "hi", "ro", "ru", "th", "tr", "vi", "zh"),
        instruction="Answer the question with words of the text.",
        train=600,
        test=None,
        labels=False,
        hub="hub:google/xquad",
        config="xquad.{}",
    ),
}


def make_questions(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    context: int,
    seed: int,
    path: str | Path | None = None,
    languages: Sequence[str] | None = None,
    train: int | None = None,
    valid: int = 0,
    test: int | None = None,
    train_on_prompts: bool = False,
) -> tuple[UserAnswers, ...]:
    """A user for each language, named after it; which questions are in which split follows from ``seed``.

    Args:
        name: a key of :data:`QUESTIONS`.
        tokenizer: the base's.
        context: tokens of a question with its answer, at most.
        seed: draws the questions of the splits.
        path: a file of JSON lines, the folder of ``NAME*.jsonl`` (also .xz or .gz), or ``hub:OWNER/NAME``; without it
            ``$COMINGLE_DATA/NAME`` where there is one, else the hub.
        languages: the users, in this order; without it all.
        train: questions of a user to train on; without it as published, as for ``test``.
        valid: questions to validate on; the paper does not say how many.
        test: questions to test on.
        train_on_prompts: whether the loss of training is on the prompts too.

    Raises:
        RecipeError: no such set or language.
        DataError: unreadable rows, a question without text or answer, or too few that are short enough.
    """
    wanted = choose_languages(name, languages)
    setting = QUESTIONS[name]
    by_language = _read(name, setting, path, wanted)
    keys = _shared_keys(name, by_language)
    encoded = {who: encode([questions[key] for key in keys], tokenizer) for who, questions in by_language.items()}
    short = [i for i in range(len(keys)) if all(len(questions[i]) <= context for questions in encoded.values())]
    if len(short) < len(keys):
        logger.info(
            "%s: %d of %d questions are longer than %d tokens", name, len(keys) - len(short), len(keys), context
        )
    train, test = train or setting.train, test or setting.test
    _check_counts(name, wanted, len(short), len(keys), context, train, valid, test)
    order = torch.randperm(len(short), generator=generator(seed, "questions", name))
    numbers = [short[place] for place in order.tolist()]
    ends = (train, train + valid, len(numbers) if test is None else train + valid + test)
    parts = numbers[: ends[0]], numbers[ends[0] : ends[1]], numbers[ends[1] : ends[2]]
    end: Any = tokenizer.eos_token_id
    settings = {"measures": MEASURES if setting.labels else MEASURES[1:], "ends": (end,)}
    return tuple(_user(who, questions, parts, settings, train_on_prompts) for who, questions in encoded.items())


def choose_languages(name: str, languages: Sequence[str] | None) -> tuple[str, ...]:
    """The languages that are wanted of a set, or all that it has.

    Raises:
        RecipeError: no such set, a language that it has not, or one twice.
    """
    if name not in QUESTIONS:
        raise RecipeError(f"no questions {name!r}.{did_you_mean(name, QUESTIONS)} Allowed: {', '.join(QUESTIONS)}")
    known = QUESTIONS[name].languages
    for i, language in enumerate(languages or ()):
        if language not in known:
            raise RecipeError(f"{name}: no language {language!r}; allowed: {', '.join(known)}")
        if language in (languages or ())[:i]:
            raise RecipeError(f"{name}: language {language!r} twice; allowed: each once, as it names a user")
    return tuple(languages or known)


def _shared_keys(name: str, by_language: Found) -> list[str]:
    """Of which questions there is one in every language, in the order of the first."""
    shared = set.intersection(*(set(questions) for questions in by_language.values()))
    keys = [key for key in next(iter(by_language.values())) if key in shared]
    if not keys:
        raise DataError(
            f"{name}: no question is there in each of {', '.join(by_language)}; allowed: one id in all languages"
        )
    return keys


def _check_counts(
    name: str, wanted: Sequence[str], short: int, every: int, context: int, train: int, valid: int, test: int | None
) -> None:
    if short < train + valid + (test or 1):
        tests = "the rest" if test is None else test
        raise DataError(
            f"{name}: {short} of {every} questions have at most {context} tokens (training.context) in each of "
            f"{', '.join(wanted)}; train {train}, valid {valid} and test {tests} need {train + valid + (test or 1)}"
        )


def _user(
    name: str,
    encoded: Sequence[Encoded],
    parts: Sequence[Sequence[int]],
    settings: Mapping[str, Any],
    prompts: bool,
) -> UserAnswers:
    limit = max(encoded[number].longest for part in parts for number in part)
    chosen = [[encoded[number] for number in part] for part in parts]
    train, valid, test = (
        as_answers(part, limit=limit, prompts=prompts and i == 0, **settings) for i, part in enumerate(chosen)
    )
    return UserAnswers(name=name, train=train, valid=valid, test=test)


# -------------------------------------------------------------------- reading


def _read(name: str, setting: QuestionSet, path: str | Path | None, languages: Sequence[str]) -> Found:
    """The questions of each language, in the order of the languages.

    Raises:
        DataError: no such source, rows that are not of this set, a question twice, or a language without any.
    """
    folder = Path(os.environ.get(FOLDER_VARIABLE) or "-").expanduser() / name
    source = path if path is not None else folder if folder.is_dir() else setting.hub
    by_language: Found = {language: {} for language in languages}
    if str(source).startswith(HUB_PREFIX):
        rows = _hub_rows(name, str(source), setting, languages, asked_for=path is not None)
    else:
        source = _find_file(name, Path(source).expanduser())
        rows = read_json_lines(source)
    for place, row in rows:
        if (questions := by_language.get(str(row.get("lang")))) is None:
            continue
        try:
            _note(questions, QUESTIONS_OF[name](row, setting.instruction))
        except ValueError as error:
            raise DataError(f"{source}: {place} is no row of {name}: {error}") from None
    for language, questions in by_language.items():
        if not questions:
            raise DataError(f"{source}: no row in language {language!r}; every user needs some")
    return by_language


def _note(questions: dict[str, Question], more: Iterator[tuple[str, Question]]) -> None:
    for key, question in more:
        if key in questions:
            raise ValueError(f"id {key!r} has been there before; allowed: once in a language")
        questions[key] = question


def _find_file(name: str, path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise DataError(f"{path}: no such file or folder; without data.questions.path {name} comes from the hub")
    files = sorted(p for p in path.glob(f"{name}*.jsonl*") if p.suffix in (".jsonl", ".xz", ".gz"))
    if not files:
        raise DataError(f"{path}: no file {name}*.jsonl in it (.xz and .gz allowed)")
    return files[0]


def _hub_rows(
    name: str, source: str, setting: QuestionSet, languages: Sequence[str], *, asked_for: bool
) -> Iterator[tuple[str, Row]]:
    """The hub's rows of each language, with the columns that local files have."""
    columns = COLUMNS[name]
    for language in languages:
        address = f"{source}?config={setting.config.format(language)}&split=validation"
        try:
            for number, values in enumerate(iterate_values(address, [[c] for c in columns], split="validation")):
                row = {"id": number, "lang": language, **dict(zip(columns, values, strict=True))}
                yield f"row {number} in language {language!r}", row
        except DataError as error:
            if asked_for:
                raise
            instead = f"give data.questions.path or the folder ${FOLDER_VARIABLE}/{name}"
            raise DataError(f"{error}; without the hub, {instead}") from error
