"""What a run is made of before any training: the base model and everybody's text, read, split and tokenised."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from comingle.data.answers import UserAnswers, check_answers, pool_answers
from comingle.data.digests import digest_split
from comingle.data.later import later
from comingle.data.pack import UserData, check, pool
from comingle.data.partition import Overlap, UserText, find_overlap, mix_held_out
from comingle.data.questions import choose_languages, make_questions
from comingle.data.samples import SPLITS, UserSamples
from comingle.data.splits import warn_unseen
from comingle.data.tasks import Task
from comingle.engines.answers import AnswerFeed
from comingle.engines.runtime import keep_buffers
from comingle.engines.training import Training
from comingle.errors import RecipeError
from comingle.inputs import Inputs, UserInputs
from comingle.methods import make
from comingle.methods.base import Method
from comingle.models.digests import digest_tokenizer
from comingle.models.language import Base, load_base
from comingle.nets import PREFIX, check_method, prepare_task
from comingle.recipes import Recipe
from comingle.recipes.unused import check_used
from comingle.texts import leave_out, read_users, tokenise_users, tokenizer_of


@dataclass(frozen=True, kw_only=True)
class Materials:
    """What several runs of a comparison have in common: the base and everybody's text or questions, or a made task.

    ``unread`` says that the users' data is read when something asks for it, as by :mod:`comingle.opening`.
    """

    base: Base | None
    texts: tuple[UserText, ...]
    users: tuple[UserData, ...]
    task: Task | None = None
    answers: tuple[UserAnswers, ...] = ()
    unread: bool = False
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Users who were left out, as ``data.on_small_user`` asks for, and what they have too little of."""

    def __post_init__(self) -> None:
        if not self.unread and self.task is not None and self.task.loss == "cross_entropy":
            warn_unseen(self.task.users)

    @property
    def people(self) -> Sequence[UserData | UserAnswers | UserSamples]:
        """The users, whatever they have."""
        return self.task.users if self.task is not None else self.users or self.answers

    @cached_property
    def digests(self) -> dict[str, dict[str, str]]:
        """By which everybody's splits are known again."""
        return {user.name: {split: digest_split(getattr(user, split)) for split in SPLITS} for user in self.people}

    def overlaps(self) -> list[Overlap]:
        """Users whose held-out documents also occur in their training text."""
        return [overlap for text in self.texts if (overlap := find_overlap(text)).total]


def prepare(recipe: Recipe, *, base: Base | None = None, validates: bool | None = None) -> Materials:
    """Load the base (unless it is given), read, split and tokenise everybody's text.

    ``validates`` says whether users need validation text to be large enough; without it the method says so.

    Raises:
        RecipeError: the method is none, or not for such users, or a setting would not be read; said before loading.
        BaseModelError: the base cannot be used.
        DataError: some user's text cannot.
    """
    get_ready(recipe)
    if recipe.data.task is not None:
        return Materials(base=None, texts=(), users=(), task=prepare_task(recipe.data.task, recipe.seed))
    if recipe.base.startswith(PREFIX):
        raise RecipeError(f"base: got {recipe.base!r} for text; allowed: a language model, or data.task for a net")
    asked = recipe.data.questions
    if asked is not None:
        choose_languages(asked.name, asked.languages)  # before the base is loaded
    texts = [] if asked else read_users(recipe.data, recipe.seed)
    base = base or load_base_of(recipe)
    if asked:
        return Materials(base=base, texts=(), users=(), answers=read_questions(recipe, base))
    skipped: dict[str, str] = {}
    if recipe.data.on_small_user == "skip":
        method = make(recipe.method.name, **recipe.method.settings)
        texts, skipped = leave_out(
            recipe, texts, base, method.client.needs_validation if validates is None else validates
        )
    if recipe.data.held_out == "mixture":
        texts = mix_held_out(texts, seed=recipe.seed)
    users = tokenise_users(recipe.data, texts, base, known=[text.name for text in texts] + list(skipped))
    return Materials(base=base, texts=tuple(texts), users=tuple(users), skipped=skipped)


def get_ready(recipe: Recipe) -> None:
    """Check the recipe, and set up the process as it asks for.

    Raises:
        RecipeError: the method is none, or not for such users, or a setting would not be read.
    """
    check_method(recipe)
    check_used(recipe)
    keep_buffers()
    if recipe.runtime.threads:
        torch.set_num_threads(recipe.runtime.threads)


def load_base_of(recipe: Recipe) -> Base:
    """The base that a recipe names, as its runtime has it.

    Raises:
        BaseModelError: the base cannot be used.
    """
    runtime = recipe.runtime
    return load_base(recipe.base, dtype=runtime.dtype, device=runtime.device, attention=runtime.attention)


def describe(materials: Materials, recipe: Recipe) -> Inputs:
    """What a run of the recipe has read, base and data, as digests that are taken once."""
    lists = {"adapters.rank": recipe.adapters.rank, "specialists": recipe.method.settings.get("specialists")}
    users = {
        user.name: UserInputs(
            counts={split: len(getattr(user, split)) for split in SPLITS},
            digests=materials.digests[user.name],
            cluster=getattr(user, "cluster", None),
            given={key: values[i] for key, values in lists.items() if isinstance(values, list) and i < len(values)},
        )
        for i, user in enumerate(materials.people)
    }
    base, task = materials.base, materials.task
    return Inputs(
        kind="task" if task is not None else "questions" if materials.answers else "text",
        base=base.digest if base is not None else "",
        tokenizer=digest_tokenizer(base.tokenizer) if base is not None else "",
        users=users,
        task={key: getattr(task, key) for key in TASK_SETTINGS} if task is not None else {},
    )


TASK_SETTINGS = ("loss", "classes", "clusters", "augment", "input_shape", "net", "shift")
"""What a task says besides its users."""


def gather(materials: Materials, method: Method, training: Training) -> tuple[list[Any], list[Any], AnswerFeed | None]:
    """Users with text or questions, those who train, and what feeds these where it is not text.

    Raises:
        DataError: a user has too little of something that the method needs.
    """
    users: list[Any] = list(materials.users or materials.answers)
    people = users if not materials.unread else []
    if materials.answers:
        for user in people:
            check_answers(user, needs_validation=method.client.needs_validation)
    else:
        check(people, context=training.context, needs_validation=method.client.needs_validation)
    trainers = [pooled(users, materials.unread)] if method.placement.pooled else users
    if not materials.answers:
        return users, trainers, None
    assert materials.base is not None
    size = training.batch_size * (len(users) if method.placement.pooled else 1)
    even = method.placement.routed and training.balance_weight > 0
    return users, trainers, AnswerFeed(trainers, training, size, tokenizer=tokenizer_of(materials.base), even=even)


def pooled(users: list[Any], unread: bool) -> Any:
    """The one trainer that has what all users have."""
    kind, pool_them = next((k, p) for k, p in _POOLS.items() if isinstance(users[0], k))
    return later(kind, "everyone", lambda: pool_them(users)) if unread else pool_them(users)


_POOLS: dict[type, Callable[[Any], Any]] = {UserData: pool, UserAnswers: pool_answers}


def read_questions(recipe: Recipe, base: Base) -> tuple[UserAnswers, ...]:
    """Everybody's questions as tokens of the base.

    Raises:
        RecipeError: no such questions or languages.
        DataError: questions that cannot be read, too few of them, or a base without a tokenizer.
    """
    section = recipe.data.questions
    assert section is not None
    settings = section.model_dump(exclude={"name"})
    return make_questions(
        section.name, tokenizer_of(base), context=recipe.training.context, seed=recipe.seed, **settings
    )
