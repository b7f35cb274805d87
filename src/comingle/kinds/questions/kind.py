"""Users who are asked the same questions, each in a language of its own."""

from __future__ import annotations

from math import ceil
from typing import cast

from comingle.kinds.base import LoadBase, Materials
from comingle.kinds.conversations.kind import AnswersKind, as_steps
from comingle.kinds.language import tokenizer_of
from comingle.kinds.questions.section import QuestionsDataSection, QuestionsSection
from comingle.kinds.questions.sets import QUESTIONS, choose_languages, make_questions
from comingle.methods import make
from comingle.recipes import Recipe

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
        users = make_questions(asked.name, tokenizer, context=context, seed=recipe.seed, **settings)
        return Materials(kind=self, base=base, users=users)

    def names_of(self, recipe: Recipe) -> tuple[str, ...]:
        """One user a language."""
        asked = section(recipe)
        return choose_languages(asked.name, asked.languages)

    def as_text(self, recipe: Recipe) -> tuple[Recipe, str]:
        """Users with text as long as the context, and as many steps of it as they have batches of questions.

        That is the most that questions can cost: a batch is as wide as its longest question, which only the questions'
        tokens say, and none is wider than the context.
        """
        asked, names = section(recipe), self.names_of(recipe)
        pooled = make(recipe.method.name, **recipe.method.settings).placement.pooled
        questions = (asked.train or QUESTIONS[asked.name].train) * (len(names) if pooled else 1)
        text = {"users": dict.fromkeys(names, "not read")}
        return as_steps(recipe, text, ceil(questions / recipe.training.batch_size)), NOTE


def section(recipe: Recipe) -> QuestionsSection:
    """The recipe's questions."""
    return cast(QuestionsDataSection, recipe.data).questions


KIND = QuestionsKind()
