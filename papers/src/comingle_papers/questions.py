"""Questions in many languages (XNLI and XQuAD) as a kind of data.

    name    published samples a user         answer
    xnli    300 to train on, 200 to test     entailment, neutral or contradiction
    xquad   600 to train on, the rest        words of the text

All users have the same questions, each in its own language. A question that is longer than the context in any of the
languages is left out for all. The prompt has Alpaca's headings without its preamble (the paper adapts Alpaca-LoRA);
instruction and labels are English in all languages.
"""

from __future__ import annotations

import json
import logging
import os
import reprlib
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, cast

import torch
from pydantic import BeforeValidator, Field
from transformers import PreTrainedTokenizerBase

from comingle.config import Recipe
from comingle.config.settings import (
    ON_LANGUAGE,
    Count,
    DataSection,
    PathResolver,
    Section,
    Source,
    expand_plain_name,
    unread_keys_of_text,
    unread_local_steps,
)
from comingle.data.conversations.encoding import (
    Answers,
    Question,
    UserAnswers,
    build_answers,
    check_validation_questions,
    encode,
)
from comingle.data.row_files import BadRows, Row, read_json
from comingle.data.streaming import Rows
from comingle.data.text.reading import LanguageReader
from comingle.models.base import Base
from comingle.models.chat_templates import Encoded
from comingle.training.kinds.base import DataRequest
from comingle.training.kinds.conversations import AnswersKind, as_text_recipe
from comingle.utils.errors import DataError, RecipeError, did_you_mean
from comingle.utils.names import FOLDER_VARIABLE, HUB_PREFIX
from comingle.utils.records import expand_home
from comingle.utils.seeds import generator
from comingle_papers.tasks.images import iterate_values

LABELS = ("entailment", "neutral", "contradiction")
"""Labels in the order of their numbers on the hub."""

COLUMNS = {"xnli": ("premise", "hypothesis", "label"), "xquad": ("id", "context", "question", "answers")}
"""Columns read from each set's rows on the hub."""


def build_prompt(instruction: str, text: str) -> str:
    """Return the prompt for an instruction about a text."""
    return f"### Instruction:\n{instruction}\n\n### Input:\n{text}\n\n### Response:\n"


def _xnli_questions(row: Row, instruction: str) -> Iterator[tuple[str, Question]]:
    """Yield id, prompt and answer of the question in a row of XNLI; the answer is the label as a word.

    Args:
        row: A row with id, premise, hypothesis and label, which is a word or its number.
        instruction: The prompt's instruction.

    Raises:
        ValueError: The row is malformed; the message says how.
    """
    label = row.get("label")
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(LABELS):
        label = LABELS[label]
    if label not in LABELS:
        raise ValueError(f"label is {reprlib.repr(label)}; allowed: {', '.join(LABELS)}, or their numbers 0 to 2")
    text = f"Premise: {_read_text(row, 'premise')}\nHypothesis: {_read_text(row, 'hypothesis')}"
    yield _read_id(row), Question(prompt=build_prompt(instruction, text), answer=label)


def _xquad_questions(row: Row, instruction: str) -> Iterator[tuple[str, Question]]:
    """Yield id, prompt and answer of each question in a row of XQuAD.

    Args:
        row: One question with SQuAD's columns, or a paragraph with all its questions under ``qas``.
        instruction: The prompt's instruction.

    Raises:
        ValueError: The row is malformed; the message says how.
    """
    questions = row.get("qas", [row])
    if not isinstance(questions, list) or not all(isinstance(question, dict) for question in questions):
        raise ValueError(f"qas is {reprlib.repr(questions)}; allowed: a list of questions")
    for question in questions:
        text = f"Text: {_read_text(row, 'context')}\nQuestion: {_read_text(question, 'question')}"
        answer = question["answer"] if "answer" in question else _first_answer(question.get("answers"))
        answer_text = _read_text({"answer": answer}, "answer")  # raises if there is none
        yield _read_id(question), Question(prompt=build_prompt(instruction, text), answer=answer_text)


def _first_answer(answers: object) -> object:
    """Return the first of SQuAD's accepted answers ``{"text": [...]}``; None if there is none."""
    texts = answers.get("text") if isinstance(answers, dict) else None
    if not isinstance(texts, list) or not texts:
        return None
    return texts[0]


def _read_id(row: Row) -> str:
    """Return the id of a question as text.

    Raises:
        ValueError: The row has no id.
    """
    if row.get("id") is None:
        raise ValueError("no id; allowed: a name or number, the same in all languages")
    return str(row["id"])


def _read_text(row: Row, key: str) -> str:
    """Return the text in a column of a row.

    Args:
        row: A row of a file or of the hub.
        key: The column; "answer" must not be blank, as losses are computed on answers.

    Raises:
        ValueError: The column has no text, or the text cannot be encoded.
    """
    value = row.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{key} is {reprlib.repr(value)}; allowed: text")
    is_blank_answer = key == "answer" and not value.strip()
    if is_blank_answer:
        raise ValueError(f"{key} is {reprlib.repr(value)}; allowed: text")
    value.encode()  # raises for an unpaired surrogate
    return value


QUESTIONS_OF: Mapping[str, Callable[[Row, str], Iterator[tuple[str, Question]]]] = {
    "xnli": _xnli_questions,
    "xquad": _xquad_questions,
}
"""Functions that yield the questions of a row, by set."""


logger = logging.getLogger("comingle")

MEASURES = ("accuracy", "rouge1", "loss")
"""Metrics of answers; accuracy only where answers are labels."""

Parts = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""Indices of the train, valid and test questions."""


@dataclass(frozen=True, kw_only=True)
class QuestionSet:
    """A set of questions and its published settings.

    ``train`` and ``test`` are numbers of questions; without ``test`` all questions that are left are for testing.
    ``labels`` says whether answers are labels. ``config`` is the pattern of a language's configuration on the hub.
    """

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


def choose_languages(name: str, languages: Sequence[str] | None) -> tuple[str, ...]:
    """Return the wanted languages, or all languages of the set; each is one user.

    Args:
        name: Name of the set of questions, "xnli" or "xquad".
        languages: The wanted languages; None for all.

    Raises:
        RecipeError: The set is unknown, it lacks a language, or a language is given twice.
    """
    if name not in QUESTIONS:
        raise RecipeError(f"no questions {name!r}.{did_you_mean(name, QUESTIONS)} Allowed: {', '.join(QUESTIONS)}")
    languages_of_set = QUESTIONS[name].languages
    if not languages:
        return tuple(languages_of_set)
    chosen: list[str] = []
    for language in languages:
        if language not in languages_of_set:
            raise RecipeError(f"{name}: no language {language!r}; allowed: {', '.join(languages_of_set)}")
        if language in chosen:
            raise RecipeError(
                f"{name}: language {language!r} twice; allowed: each once, since it is the name of a user"
            )
        chosen.append(language)
    return tuple(chosen)


def shared_ids(ids_by_language: Mapping[str, Collection[str]]) -> list[str]:
    """Return the ids of the questions that exist in every language, in the order of the first language."""
    shared = set.intersection(*(set(ids) for ids in ids_by_language.values()))
    ids_of_first_language = next(iter(ids_by_language.values()))
    return [question_id for question_id in ids_of_first_language if question_id in shared]


def draw_parts(
    name: str,
    languages: Sequence[str],
    fits_context: Sequence[bool],
    *,
    context: int,
    seed: int,
    train: int | None,
    valid: int,
    test: int | None,
) -> Parts:
    """Draw the train, valid and test questions, the same for all languages, among those that fit the context.

    Args:
        name: Name of the set of questions, "xnli" or "xquad".
        languages: The languages, for error messages.
        fits_context: For each question, whether it fits the context in all languages.
        context: Length of the context in tokens.
        seed: Seed of the draw.
        train: Number of questions to train on; None for the published number.
        valid: Number of questions to validate on.
        test: Number of questions to test on; None for the published number, or for all others if none is published.

    Returns:
        The indices of the train, valid and test questions.

    Raises:
        DataError: There are too few questions.
    """
    if not fits_context:
        raise DataError(
            f"{name}: no question occurs in all of {', '.join(languages)}; allowed: one id in all languages"
        )
    num_all = len(fits_context)
    fitting = [index for index, fits in enumerate(fits_context) if fits]
    num_fitting = len(fitting)
    if num_fitting < num_all:
        logger.info("%s: %d of %d questions are longer than %d tokens", name, num_all - num_fitting, num_all, context)
    train = train or QUESTIONS[name].train
    test = test or QUESTIONS[name].test
    _check_counts(name, languages, num_fitting, num_all, context, train, valid, test)
    order = torch.randperm(num_fitting, generator=generator(seed, "questions", name))
    shuffled = [fitting[position] for position in order.tolist()]
    train_end, valid_end = train, train + valid
    test_end = num_fitting if test is None else valid_end + test
    return shuffled[:train_end], shuffled[train_end:valid_end], shuffled[valid_end:test_end]


def _check_counts(
    name: str,
    languages: Sequence[str],
    num_fitting: int,
    num_all: int,
    context: int,
    train: int,
    valid: int,
    test: int | None,
) -> None:
    """Check that enough questions fit the context for the three splits.

    Args:
        name: Name of the set of questions, "xnli" or "xquad".
        languages: The languages, for the message.
        num_fitting: Number of questions that fit the context in all languages.
        num_all: Number of all questions.
        context: Length of the context in tokens.
        train: Number of questions to train on.
        valid: Number of questions to validate on.
        test: Number of questions to test on; None for all that remain, at least one.

    Raises:
        DataError: There are too few questions.
    """
    num_needed = train + valid + (1 if test is None else test)
    if num_fitting < num_needed:
        test_count = "the rest" if test is None else test
        raise DataError(
            f"{name}: {num_fitting} of {num_all} questions have at most {context} tokens (training.context) in each of "
            f"{', '.join(languages)}; train {train}, valid {valid} and test {test_count} need {num_needed}"
        )


def user_of(
    name: str,
    language: str,
    encoded: Mapping[int, Encoded] | Sequence[Encoded],
    parts: Parts,
    tokenizer: PreTrainedTokenizerBase,
    *,
    train_on_prompts: bool,
) -> UserAnswers:
    """Return the user of a language, with the questions of each split as padded windows of tokens.

    Args:
        name: Name of the set of questions, "xnli" or "xquad".
        language: The language.
        encoded: Encoded questions by index, at least those of ``parts``.
        parts: The indices of the questions of each split.
        tokenizer: The tokenizer of the base model.
        train_on_prompts: Whether the training loss includes the prompts; the evaluation loss never does.
    """
    measures = MEASURES
    if not QUESTIONS[name].labels:  # accuracy is measured only where the answers are labels
        measures = tuple(measure for measure in MEASURES if measure != "accuracy")
    end_token = cast(int, tokenizer.eos_token_id)
    train, valid, test = ([encoded[index] for index in indices] for indices in parts)
    longest_answer = max(question.longest for question in (*train, *valid, *test))  # in tokens; limits generation

    def as_windows(questions: Sequence[Encoded], *, loss_on_prompts: bool = False) -> Answers:
        return build_answers(
            questions, limit=longest_answer, loss_on_all=loss_on_prompts, measures=measures, ends=(end_token,)
        )

    return UserAnswers(
        name=language,
        train=as_windows(train, loss_on_prompts=train_on_prompts),
        valid=as_windows(valid),
        test=as_windows(test),
    )


# -------------------------------------------------------------------- reading


def find_source(name: str, path: str | Path | None) -> Path | str:
    """Return where to read a set of questions: a file, or a name on the hub.

    Args:
        name: Name of the set of questions, "xnli" or "xquad".
        path: A file, a folder or a name on the hub; None for ``$COMINGLE_DATA/NAME`` if there is such a folder, else
            for the hub.

    Raises:
        DataError: There is no such file or folder.
    """
    if path is None:
        data_folder = os.environ.get(FOLDER_VARIABLE)
        if not data_folder or not (expand_home(data_folder) / name).is_dir():
            return QUESTIONS[name].hub
        path = expand_home(data_folder) / name
    if str(path).startswith(HUB_PREFIX):
        return str(path)
    return _find_file(name, expand_home(path))


def iterate_questions(
    name: str, path: str | Path | None, languages: Sequence[str]
) -> Iterator[tuple[str, str, Question]]:
    """Yield language, id and question of all questions in these languages, in the order of the file.

    Args:
        name: Name of the set of questions, "xnli" or "xquad".
        path: A file of JSON lines, a folder with one, or ``hub:OWNER/NAME``; None for
            ``$COMINGLE_DATA/NAME`` if it exists, else the hub.
        languages: The languages to read.

    Raises:
        DataError: The source is missing, has rows of another set or a question twice, or lacks a language.
    """
    question_set = QUESTIONS[name]
    questions_of_row = QUESTIONS_OF[name]
    source = find_source(name, path)
    bad_rows = BadRows()
    if isinstance(source, Path):
        rows = read_json(source, bad_rows)
    else:
        rows = _read_hub_rows(name, source, question_set, languages, is_default_source=path is None)
    ids_by_language = {language: set[str]() for language in languages}
    for place, row in rows:  # the place, such as "row 3 in language 'de'", is for messages
        language = str(row.get("lang"))
        if language not in ids_by_language:
            continue
        ids = ids_by_language[language]
        try:
            for question_id, question in questions_of_row(row, question_set.instruction):
                if question_id in ids:
                    raise ValueError(f"id {question_id!r} occurs twice; allowed: once per language")
                ids.add(question_id)
                yield language, question_id, question
        except ValueError as error:
            raise DataError(f"{source}: {place} is not a row of {name}: {error}") from None
    bad_rows.report()
    for language, ids in ids_by_language.items():
        if not ids:
            raise DataError(f"{source}: no row in language {language!r}; every user needs some")


def _find_file(name: str, path: Path) -> Path:
    """Return a file of JSON lines: the path itself, or the first ``NAME*.jsonl`` of a folder.

    Args:
        name: Name of the set of questions, "xnli" or "xquad".
        path: A file or a folder.

    Raises:
        DataError: There is no such file or folder, or the folder has no such file.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        raise DataError(f"{path}: no such file or folder; without data.questions.path {name} comes from the hub")
    files = sorted(file for file in path.glob(f"{name}*.jsonl*") if file.suffix in (".jsonl", ".xz", ".gz"))
    if not files:
        raise DataError(f"{path}: no file {name}*.jsonl in it (.xz and .gz allowed)")
    return files[0]


def _read_hub_rows(
    name: str, source: str, question_set: QuestionSet, languages: Sequence[str], *, is_default_source: bool
) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a set of questions on the hub, each as a pair such as ("row 3 in language 'de'", row).

    The text says where the row is, for messages. Each row gets the columns that local files have besides those of the
    hub: ``lang``, its language, and ``id``, which is the row's number unless the hub has ids.

    Args:
        name: Name of the set of questions, "xnli" or "xquad".
        source: The set on the hub.
        question_set: The set's settings.
        languages: The languages to read.
        is_default_source: Whether the recipe names no source; an error then also names the alternatives to the hub.

    Raises:
        DataError: The hub or a language cannot be read.
    """
    columns = COLUMNS[name]
    possible_names = [[column] for column in columns]  # the reader takes alternatives; each column has one name
    for language in languages:
        address = f"{source}?config={question_set.config.format(language)}&split=validation"
        try:
            for number, values in enumerate(iterate_values(address, possible_names, split="validation")):
                row = {"id": number, "lang": language, **dict(zip(columns, values, strict=True))}
                yield f"row {number} in language {language!r}", row
        except DataError as error:
            if not is_default_source:
                raise
            alternatives = f"give data.questions.path or the folder ${FOLDER_VARIABLE}/{name}"
            raise DataError(f"{error}; without the hub, {alternatives}") from error


class QuestionsSection(Section):
    """Users who get the same questions, each in its own language: see ``comingle_papers.questions``."""

    name: str
    """``xnli`` (answers are labels) or ``xquad`` (answers are words of a text)."""
    path: Source | None = None
    """A file of JSON lines, the folder of ``NAME*.jsonl`` (also ``.xz`` or ``.gz``), or ``hub:NAME``; by default
    ``$COMINGLE_DATA/NAME``, else the hub.
    """
    languages: Annotated[list[str], Field(min_length=1)] | None = None
    """The users, named by their languages, in this order; by default all."""
    train: Count | None = None
    """Training questions of a user; by default as published: 300 of XNLI, 600 of XQuAD."""
    valid: Annotated[int, Field(ge=0, strict=True)] = 0
    """Validation questions."""
    test: Count | None = None
    """Test questions; by default as published: 200 of XNLI, the rest of XQuAD."""
    train_on_prompts: bool = False
    """Train on the prompts too, not only on the answers."""


class QuestionsDataSection(DataSection):
    """A named set of questions, the same for all users."""

    kind: Literal["questions"] = "questions"
    questions: Annotated[QuestionsSection, BeforeValidator(expand_plain_name)]
    """Users with the same questions in different languages."""

    label: ClassVar[str] = "data.questions"
    marks: ClassVar[tuple[str, ...]] = ("questions",)
    implementation: ClassVar[str] = "comingle_papers.questions:KIND"
    accepted: ClassVar[Mapping[str, str]] = {"questions": "a name, or a mapping with name"}
    unread: ClassVar[Mapping[str, str]] = {
        **unread_local_steps("questions"),
        **ON_LANGUAGE,
        **unread_keys_of_text(
            add_bos_token="prompts begin with it if the texts of the base do",
            split="data.questions.train, valid and test set the number of questions",
            held_out="all users have the same questions",
            on_small_user="all users have the same questions",
            limits=(
                "data.questions.train sets the number of questions",
                "data.questions.valid sets the number of questions",
                "data.questions.test sets the number of questions",
            ),
        ),
    }

    def resolve_paths(self, resolve: PathResolver) -> dict[str, object]:
        """Return the key ``questions`` with its path, if it has one, made absolute.

        Args:
            resolve: Makes a path absolute if it exists beside the recipe's file, and returns other text unchanged.
        """
        content = self.model_dump(mode="json", exclude_unset=True, include={"questions"})
        questions = content["questions"]
        if questions.get("path") is not None:
            questions["path"] = resolve(questions["path"])
        return content


_NO_SPLIT = ""
"""Key of all questions on disk: splits are drawn after all were read."""

EncodedLanguage = tuple[str, Mapping[int, Encoded], Parts]
"""A language, its selected questions, and the indices of each split."""


def stream_questions(
    name: str,
    languages: Sequence[str],
    rows: Rows,
    tokenizer_of_base: Callable[[], PreTrainedTokenizerBase],
    *,
    context: int,
    seed: int,
    path: str | Path | None,
    train: int | None,
    valid: int,
    test: int | None,
) -> Generator[EncodedLanguage, None, None]:
    """Draw the questions of each split, and yield them encoded, one language after another.

    All users have the same questions, each in its own language. Languages are read twice: first to find the questions
    that fit the context in all of them, then to encode those that are drawn.

    Args:
        name: Name of the set of questions, "xnli" or "xquad".
        languages: The users' languages, in this order.
        rows: Stores the questions on disk between the two passes.
        tokenizer_of_base: Loads the tokenizer; called once all questions were read.
        context: Largest number of tokens of a question with its answer.
        seed: Seed of the draw of the splits.
        path: A file of JSON lines, the folder of ``NAME*.jsonl`` (also .xz or .gz), or ``hub:OWNER/NAME``; None for
            ``$COMINGLE_DATA/NAME`` if it exists, else the hub.
        train: Number of questions to train on; None for the published number.
        valid: Number of questions to validate on; the paper does not give it.
        test: Number of questions to test on; None for the published number.

    Yields:
        The language, its encoded questions by index, and the indices of each split (train, valid, test), which are the
        same for all languages. Indices number the questions that all languages have, in the order of the first one.

    Raises:
        DataError: unreadable rows, or too few questions that fit the context.
    """
    ids_by_language: dict[str, dict[str, None]] = {language: {} for language in languages}  # ordered sets

    def read_and_note_ids() -> Iterator[tuple[str, str, tuple[str, Question]]]:
        for language, question_id, question in iterate_questions(name, path, languages):
            ids_by_language[language][question_id] = None
            yield language, _NO_SPLIT, (question_id, question)

    rows.fill(read_and_note_ids(), pack=_pack_question, unpack=_unpack_question)
    ids = shared_ids(ids_by_language)
    tokenizer = tokenizer_of_base()

    fits_context = [True] * len(ids)
    for _, groups in rows.groups(languages):
        encoded = encode(_select_questions(groups, ids), tokenizer)
        fits_in_language = [len(question) <= context for question in encoded]
        fits_context = [a and b for a, b in zip(fits_context, fits_in_language, strict=True)]
    parts = draw_parts(name, languages, fits_context, context=context, seed=seed, train=train, valid=valid, test=test)

    drawn_indices = sorted(index for part in parts for index in part)
    drawn_ids = [ids[index] for index in drawn_indices]
    for language, groups in rows.groups(languages):
        encoded = encode(_select_questions(groups, drawn_ids), tokenizer)
        yield language, dict(zip(drawn_indices, encoded, strict=True)), parts


def _pack_question(id_and_question: tuple[str, Question]) -> bytes:
    """Serialise a question and its id for storage on disk."""
    question_id, question = id_and_question
    return json.dumps([question_id, question.prompt, question.answer]).encode()


def _unpack_question(content: bytes) -> tuple[str, Question]:
    """Return the id and the question that :func:`_pack_question` serialised."""
    question_id, prompt, answer = json.loads(content)
    return question_id, Question(prompt=prompt, answer=answer)


def _select_questions(groups: Mapping[str, Sequence[tuple[str, Question]]], ids: Sequence[str]) -> list[Question]:
    """Return the questions of a language that have these ids, in the order of the ids.

    Args:
        groups: Pairs of id and question by split; all are under ``_NO_SPLIT``, as splits are drawn only later.
        ids: Ids of the questions to return.
    """
    question_by_id = dict(groups[_NO_SPLIT])
    return [question_by_id[question_id] for question_id in ids]


class QuestionReader(LanguageReader[EncodedLanguage, UserAnswers]):
    """Reader of questions, one language (user) after another, so that not all are in memory.

    Args:
        data: The recipe's section ``data``.
        seed: Seed of the draw of the splits.
        load_base: Loads the base model, whose tokenizer encodes the questions.
        context: Largest number of tokens of a question with its answer.
        validates: Whether the method needs validation questions.
    """

    def __init__(
        self, data: DataSection, seed: int, load_base: Callable[[], Base], *, context: int, validates: bool
    ) -> None:
        """Choose the languages (users) of the recipe; no question is read before :meth:`read`."""
        super().__init__(data, seed, load_base, context=context, validates=validates)
        self.section = cast(QuestionsDataSection, data).questions
        self.languages = choose_languages(self.section.name, self.section.languages)

    def sources(self) -> list[str]:
        """Return where the questions are read: a list of one file, or of one name on the hub."""
        return [str(find_source(self.section.name, self.section.path))]

    def read(self, rows: Rows) -> Generator[EncodedLanguage, None, None]:
        """Yield each language (a user) with its encoded questions and the indices of the questions in each split.

        All questions are read twice: first to find those that are too long in any language, then to encode the others.

        Args:
            rows: Empty store, which keeps the questions on disk between the two readings.
        """

        def tokenizer_of_base() -> PreTrainedTokenizerBase:
            return self.tokenizer  # loads the base model's tokenizer, after the questions were read without an error

        return stream_questions(
            self.section.name,
            self.languages,
            rows,
            tokenizer_of_base,
            context=self.context,
            seed=self.seed,
            path=self.section.path,
            train=self.section.train,
            valid=self.section.valid,
            test=self.section.test,
        )

    def encode(self, unencoded: EncodedLanguage) -> UserAnswers:
        """Return the user of a language, with its questions as padded windows of tokens.

        Args:
            unencoded: The language as read: its name, its questions, which are tokens already, and the indices of the
                questions in each split.
        """
        language, encoded_questions, indices_of_splits = unencoded
        return user_of(
            self.section.name,
            language,
            encoded_questions,
            indices_of_splits,
            self.tokenizer,
            train_on_prompts=self.section.train_on_prompts,
        )

    def inspect(self, unencoded: EncodedLanguage, user: UserAnswers) -> None:
        """Check that a user has validation questions if the method needs them, and tokens of the base's vocabulary.

        Args:
            unencoded: The questions of the user's language, which are not checked here.
            user: The user, with the token ids of these questions and answers.
        """
        check_validation_questions(user, needs_validation=self.validates)
        super().inspect(unencoded, user)


NOTE = "Questions are not read: each counts as long as the context, an upper bound of its cost."
"""Note of cost estimates for questions."""


class QuestionsKind(AnswersKind):
    """Prompts with answers: conversations of one turn."""

    name = "questions"

    def reader(self, request: DataRequest) -> QuestionReader | None:
        """Return a reader that yields one user (language) after another, so that not all are in memory.

        None if a caller of the Python interface passes data of its own, which is an error that is raised later.
        """
        if request.given is not None:
            return None
        recipe = request.recipe
        return QuestionReader(
            recipe.data,
            recipe.data_seed,
            request.load_base,
            context=recipe.training.context,
            validates=request.validates,
        )

    def names_of(self, recipe: Recipe) -> tuple[str, ...]:
        """Return the names of the users, which are the languages of the questions; reads no data."""
        questions = section(recipe)
        return choose_languages(questions.name, questions.languages)

    def as_text(self, recipes: Sequence[Recipe], users: int | None) -> tuple[list[Recipe], set[str], str]:
        """Return recipes that train on text instead of questions, for counting costs without reading the questions.

        The new recipes take as many steps as there are batches of questions, and each sequence of text fills the
        context. So their costs are upper bounds.

        Args:
            recipes: Recipes of several methods with the same questions.
            users: Not used, as the questions' languages are the users.

        Returns:
            The recipes, the names of users that would be left out (none), and a note for the reader.
        """
        any_recipe = recipes[0]
        questions = section(any_recipe)
        num_train = questions.train or QUESTIONS[questions.name].train
        num_train_by_user = dict.fromkeys(self.names_of(any_recipe), num_train)
        text_recipes = [as_text_recipe(recipe, num_train_by_user) for recipe in recipes]
        users_left_out: set[str] = set()
        return text_recipes, users_left_out, NOTE


def section(recipe: Recipe) -> QuestionsSection:
    """Return the recipe's section of questions."""
    return cast(QuestionsDataSection, recipe.data).questions


KIND = QuestionsKind()
