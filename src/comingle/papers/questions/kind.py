"""Users who are asked the same questions, each in a language of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from comingle.config import Recipe
from comingle.models.base import Base, tokenizer_of
from comingle.papers.questions.section import QuestionsDataSection, QuestionsSection
from comingle.papers.questions.sets import QUESTIONS, choose_languages, make_questions
from comingle.papers.questions.turns import QuestionTurns
from comingle.training.kinds.base import LoadBase, Materials
from comingle.training.kinds.conversations import AnswersKind, as_steps
from comingle.training.storage.readers import Turns, in_turn

NOTE = "Questions are not read: they count as long as the context, the most that training on them can cost."


class QuestionsKind(AnswersKind):
    """Prompts with answers: conversations of one turn."""

    name = "questions"

    def read(self, recipe: Recipe, load_base: LoadBase, *, validates: bool) -> Materials:
        """Everybody's questions as tokens of the base."""
        asked = section(recipe)
        choose_languages(asked.name, asked.languages)  # before the base is loaded
        base, settings = load_base(), asked.model_dump(exclude={"name"})
        context, tokenizer = recipe.training.context, tokenizer_of(base)
        users = make_questions(asked.name, tokenizer, context=context, seed=recipe.data_seed, **settings)
        return Materials(kind=self, base=base, users=users)

    def names_of(self, recipe: Recipe) -> tuple[str, ...]:
        """One user a language."""
        asked = section(recipe)
        return choose_languages(asked.name, asked.languages)

    def as_text(self, recipes: Sequence[Recipe], users: int | None) -> tuple[list[Recipe], set[str], str]:
        """Users with text as long as the context, and as many steps of it as they have batches of questions.

        That is the most that questions can cost: a batch is as wide as its longest question, which only the questions'
        tokens say, and none is wider than the context.
        """
        asked = section(recipes[0])
        counts = dict.fromkeys(self.names_of(recipes[0]), asked.train or QUESTIONS[asked.name].train)
        return [as_steps(recipe, counts) for recipe in recipes], set(), NOTE


def section(recipe: Recipe) -> QuestionsSection:
    """The recipe's questions."""
    return cast(QuestionsDataSection, recipe.data).questions


@in_turn.register
def _in_turn(kind: QuestionsKind, recipe: Recipe, base: Base | None, validates: bool) -> Turns[Any] | None:
    return None if base is None else QuestionTurns(kind, recipe, section(recipe), base, validates)


KIND = QuestionsKind()
