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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from transformers import PreTrainedTokenizerBase

from comingle.data.conversations.encoding import Question, UserAnswers, as_answers, encode
from comingle.data.row_files import BadRows, Row, read_json
from comingle.models.chat_templates import Encoded
from comingle.papers.decoded import iterate_values
from comingle.papers.questions.rows import COLUMNS, QUESTIONS_OF
from comingle.utils.errors import DataError, RecipeError, did_you_mean
from comingle.utils.names import FOLDER_VARIABLE, HUB_PREFIX
from comingle.utils.records import expand_home
from comingle.utils.seeds import generator

logger = logging.getLogger("comingle")

MEASURES = ("accuracy", "rouge1", "loss")
"""What is reported of answers; accuracy where they are labels."""

Found = dict[str, dict[str, Question]]
"""Every language's questions by their names, which are the same in all languages."""

Parts = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""The numbers of questions to train on, to validate on and to test on."""


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
    by_language: Found = {language: {} for language in wanted}
    for language, key, question in iterate_questions(name, path, wanted):
        by_language[language][key] = question
    keys = shared_keys(by_language)
    encoded = {who: encode([questions[key] for key in keys], tokenizer) for who, questions in by_language.items()}
    short = [all(len(questions[i]) <= context for questions in encoded.values()) for i in range(len(keys))]
    parts = draw_parts(name, wanted, short, context=context, seed=seed, train=train, valid=valid, test=test)
    return tuple(
        user_of(name, who, questions, parts, tokenizer, train_on_prompts=train_on_prompts)
        for who, questions in encoded.items()
    )


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


def shared_keys(by_language: Mapping[str, Collection[str]]) -> list[str]:
    """Which questions there are in every language, in the order of the first."""
    shared = set.intersection(*(set(keys) for keys in by_language.values()))
    return [key for key in next(iter(by_language.values())) if key in shared]


def draw_parts(
    name: str,
    wanted: Sequence[str],
    short: Sequence[bool],
    *,
    context: int,
    seed: int,
    train: int | None,
    valid: int,
    test: int | None,
) -> Parts:
    """Which questions are trained on, validated on and tested on, of those that are ``short`` enough in all languages.

    Raises:
        DataError: they are too few.
    """
    if not short:
        raise DataError(
            f"{name}: no question is there in each of {', '.join(wanted)}; allowed: one id in all languages"
        )
    few, many = sum(short), len(short)
    if few < many:
        logger.info("%s: %d of %d questions are longer than %d tokens", name, many - few, many, context)
    setting = QUESTIONS[name]
    train, test = train or setting.train, test or setting.test
    _check_counts(name, wanted, few, many, context, train, valid, test)
    order = torch.randperm(few, generator=generator(seed, "questions", name))
    fitting = [number for number, fits in enumerate(short) if fits]
    numbers = [fitting[place] for place in order.tolist()]
    ends = (train, train + valid, len(numbers) if test is None else train + valid + test)
    return numbers[: ends[0]], numbers[ends[0] : ends[1]], numbers[ends[1] : ends[2]]


def _check_counts(
    name: str, wanted: Sequence[str], short: int, every: int, context: int, train: int, valid: int, test: int | None
) -> None:
    if short < train + valid + (test or 1):
        tests = "the rest" if test is None else test
        raise DataError(
            f"{name}: {short} of {every} questions have at most {context} tokens (training.context) in each of "
            f"{', '.join(wanted)}; train {train}, valid {valid} and test {tests} need {train + valid + (test or 1)}"
        )


def user_of(
    name: str,
    who: str,
    encoded: Mapping[int, Encoded] | Sequence[Encoded],
    parts: Parts,
    tokenizer: PreTrainedTokenizerBase,
    *,
    train_on_prompts: bool,
) -> UserAnswers:
    """The user of a language, of whose questions those of ``parts`` are ``encoded``."""
    measures, end = MEASURES if QUESTIONS[name].labels else MEASURES[1:], tokenizer.eos_token_id
    chosen = [[encoded[number] for number in part] for part in parts]
    limit = max(one.longest for part in chosen for one in part)
    train, valid, test = (
        as_answers(part, limit=limit, prompts=train_on_prompts and i == 0, measures=measures, ends=(cast(int, end),))
        for i, part in enumerate(chosen)
    )
    return UserAnswers(name=who, train=train, valid=valid, test=test)


# -------------------------------------------------------------------- reading


def source_of(name: str, path: str | Path | None) -> Path | str:
    """The file of a set, or its name on the hub.

    Raises:
        DataError: no such file or folder.
    """
    folder = expand_home(os.environ.get(FOLDER_VARIABLE) or "-") / name
    source = path if path is not None else folder if folder.is_dir() else QUESTIONS[name].hub
    if str(source).startswith(HUB_PREFIX):
        return str(source)
    return _find_file(name, expand_home(source))


def iterate_questions(
    name: str, path: str | Path | None, languages: Sequence[str]
) -> Iterator[tuple[str, str, Question]]:
    """Language, id and question of all that there are in these languages, in the order in which they are read.

    Raises:
        DataError: no such source, rows that are not of this set, a question twice, or a language without any.
    """
    setting, source, bad = QUESTIONS[name], source_of(name, path), BadRows()
    if isinstance(source, Path):
        rows = read_json(source, bad)
    else:
        rows = _hub_rows(name, source, setting, languages, asked_for=path is not None)
    seen = {language: set[str]() for language in languages}
    for place, row in rows:
        if (keys := seen.get(str(language := row.get("lang")))) is None:
            continue
        try:
            for key, question in QUESTIONS_OF[name](row, setting.instruction):
                if key in keys:
                    raise ValueError(f"id {key!r} has been there before; allowed: once in a language")
                keys.add(key)
                yield str(language), key, question
        except ValueError as error:
            raise DataError(f"{source}: {place} is no row of {name}: {error}") from None
    bad.settle()
    for language, keys in seen.items():
        if not keys:
            raise DataError(f"{source}: no row in language {language!r}; every user needs some")


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
