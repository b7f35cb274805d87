"""Users who are asked the same questions, each in a language of its own."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any, cast

from comingle.data.answers import UserAnswers, check_answers, pool_answers
from comingle.data.batches import PAD
from comingle.engines.client import Clients, batch_size
from comingle.engines.training import Training
from comingle.kinds.base import LoadBase, Materials, always_there
from comingle.kinds.language import language_model, tokenizer_of
from comingle.kinds.conversations.feed import AnswerFeed
from comingle.kinds.questions.section import QuestionsDataSection, QuestionsSection
from comingle.kinds.questions.sets import QUESTIONS, choose_languages, make_questions
from comingle.kinds.text.kind import LanguageKind
from comingle.methods import make
from comingle.methods.base import Method
from comingle.recipes import Recipe
from comingle.terminal import words

if TYPE_CHECKING:
    from rich.console import RenderableType

NOTE = "Questions are not read: they count as long as the context, the most that training on them can cost."


class QuestionsKind(LanguageKind):
    """Prompts with answers."""

    name, user = "questions", UserAnswers

    def read(self, recipe: Recipe, load_base: LoadBase, *, validates: bool) -> Materials:
        """Everybody's questions as tokens of the base."""
        asked = section(recipe)
        choose_languages(asked.name, asked.languages)  # before the base is loaded
        base, settings = load_base(), asked.model_dump(exclude={"name"})
        context, tokenizer = recipe.training.context, tokenizer_of(base)
        users = make_questions(asked.name, tokenizer, context=context, seed=recipe.seed, **settings)
        return Materials(kind=self, base=base, users=users)

    def clients(self, recipe: Recipe, materials: Materials, method: Method, training: Training) -> Clients:
        """Batches are as wide as their longest question, or all equally wide where tokens' routes are balanced."""
        training = always_there(method, training)
        for user in materials.users if not materials.unread else ():
            check_answers(user, needs_validation=method.client.needs_validation)
        users, trainers = self.trainers(materials, method)
        base = materials.base
        assert base is not None
        tokens = 0 if materials.unread else _training_tokens(trainers, training)
        size = batch_size(method, training, len(users))
        even = method.placement.routed and training.balance_weight > 0
        return Clients(
            language_model(recipe, base, method, len(trainers), tokens),
            method,
            training,
            trainers=trainers,
            users=users,
            feed=AnswerFeed(trainers, training, size, tokenizer=tokenizer_of(base), even=even),
            reads=not materials.unread,
        )

    def pooled(self, users: Sequence[Any]) -> UserAnswers:
        """The questions of all."""
        return pool_answers(users)

    def preview(self, recipe: Recipe, materials: Materials, *, everybody: bool) -> list[RenderableType]:
        """How many questions each user has, and how long they are: with their prompts, and the answers alone."""
        from rich.table import Table

        table = Table("user", title=words(f"{recipe.base}: questions", "table.title"), title_justify="left", box=None)
        for name in ("train", "valid", "test", "tokens, mean", "at most", "answer at most"):
            table.add_column(name, justify="right")
        for user in materials.users:
            parts = (user.train, user.valid, user.test)
            sizes = [len(part.tokens(number)) for part in parts for number in range(len(part))]
            counts = [len(part) for part in parts]
            told = [*counts, round(sum(sizes) / len(sizes)), max(sizes), user.test.limit]
            table.add_row(words(user.name), *(f"{number:,}" for number in told))
        return [table]

    def sample(self, user: Any) -> Any:
        """The first test question."""
        return user.test.tokens(0)

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
        steps = ceil(questions / recipe.training.batch_size) * recipe.training.local_epochs
        text = {"users": dict.fromkeys(names, "not read")}
        return recipe.with_changes({"data": text, "training.local_steps": steps}), NOTE


def section(recipe: Recipe) -> QuestionsSection:
    """The recipe's questions."""
    return cast(QuestionsDataSection, recipe.data).questions


def _training_tokens(trainers: Sequence[UserAnswers], training: Training) -> int:
    """How many tokens trainers who are there in every round train on."""
    every = sum(int((trainer.train.windows != PAD).sum()) for trainer in trainers)
    return training.rounds * training.local_epochs * every


KIND = QuestionsKind()
