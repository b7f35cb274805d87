"""Questions of one language after another: which are short enough in all is known before anybody's are kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from comingle.config import Recipe
from comingle.data.conversations.encoding import Question, UserAnswers, check_answers, encode
from comingle.data.populations import Crowd
from comingle.models.base import Base, tokenizer_of
from comingle.models.chat_templates import Encoded
from comingle.models.folders import digest_tokenizer
from comingle.papers.questions.section import QuestionsSection
from comingle.papers.questions.sets import (
    Parts,
    choose_languages,
    draw_parts,
    iterate_questions,
    shared_keys,
    source_of,
    user_of,
)
from comingle.training.kinds.base import Kind, Materials, require_rows, rows_key
from comingle.training.storage.population import PopulationWriter, Spool
from comingle.training.storage.readers import Some, Turns
from comingle.utils.errors import DataError

Asked = tuple[str, Mapping[int, Encoded], Parts]
"""A language, those of its questions that are used, and for what."""


class QuestionTurns(Turns[Asked]):
    """Questions, sorted by their languages in a file."""

    nothing, too_little, skips = "questions", "too few questions", False

    def __init__(self, kind: Kind, recipe: Recipe, asked: QuestionsSection, base: Base, validates: bool):
        self.kind, self.recipe, self.asked, self.base, self.validates = kind, recipe, asked, base, validates
        self.languages, self.tokenizer = choose_languages(asked.name, asked.languages), tokenizer_of(base)

    def sources(self) -> list[str]:
        """A file, or a name of the hub."""
        return [str(source_of(self.asked.name, self.asked.path))]

    def key(self) -> list[Any]:
        """The tokenizer, the context, and whether there must be questions to validate on."""
        asked = [digest_tokenizer(self.tokenizer), self.recipe.training.context, self.validates]
        return [*asked, *rows_key(self.base)]

    def keep(self, writer: PopulationWriter, read: Asked, user: UserAnswers) -> None:
        """Write down a user whose tokens the base has rows for."""
        require_rows(self.base, user)
        writer.add(user)

    def readers(self, spool: Spool) -> Iterator[tuple[str, Callable[[], Asked]]]:
        """One language after another, twice: which questions are short enough in all, and then those that are used."""
        by_language: dict[str, dict[str, None]] = {language: {} for language in self.languages}
        spool.fill(self._rows(by_language))
        keys, context = shared_keys(by_language), self.recipe.training.context
        short = [True] * len(keys)
        for _, groups in spool.groups(self.languages):
            encoded = encode(_questions(groups, keys), self.tokenizer)
            short = [fits and len(one) <= context for fits, one in zip(short, encoded, strict=True)]
        asked, seed = self.asked, self.recipe.data_seed
        counts: Any = {"train": asked.train, "valid": asked.valid, "test": asked.test}
        parts = draw_parts(asked.name, self.languages, short, context=context, seed=seed, **counts)
        numbers = sorted(number for part in parts for number in part)
        used = [keys[number] for number in numbers]
        for who, groups in spool.groups(self.languages):
            yield who, partial(self._read, who, _questions(groups, used), numbers, parts)

    def _rows(self, by_language: Mapping[str, dict[str, None]]) -> Iterator[tuple[str, str, bytes]]:
        for language, key, question in iterate_questions(self.asked.name, self.asked.path, self.languages):
            by_language[language][key] = None
            yield language, "", json.dumps([key, question.prompt, question.answer]).encode()

    def _read(self, who: str, questions: Sequence[Question], numbers: Sequence[int], parts: Parts) -> Asked:
        return who, dict(zip(numbers, encode(questions, self.tokenizer), strict=True)), parts

    def nobody(self, name: str) -> Asked:
        """All have the same questions."""
        raise AssertionError(name)

    def encode(self, read: Asked) -> UserAnswers:
        """As windows."""
        who, encoded, parts = read
        prompts = self.asked.train_on_prompts
        return user_of(self.asked.name, who, encoded, parts, self.tokenizer, train_on_prompts=prompts)

    def lack(self, user: UserAnswers) -> None:
        """Nobody has less than others.

        Raises:
            DataError: there are none to validate on, where they are needed.
        """
        check_answers(user, needs_validation=self.validates)

    def refused(self, small: Some, users: int) -> DataError:
        """Nobody has less than others."""
        raise AssertionError(small.told)

    def materials(self, users: Crowd, about: dict[str, Any]) -> Materials:
        """The base, and users who are read when they are asked for."""
        return Materials(kind=self.kind, base=self.base, users=users, unread=True)


def _questions(groups: Mapping[str, Sequence[bytes]], keys: Sequence[str]) -> list[Question]:
    """Those of a language that are called so, in this order."""
    rows = (json.loads(row) for row in groups[""])
    found = {key: Question(prompt=prompt, answer=answer) for key, prompt, answer in rows}
    return [found[key] for key in keys]
