"""What a run is made of before any training: the base model and everybody's text, read, split and tokenised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from comingle.data.answers import UserAnswers, check_answers, pool_answers
from comingle.data.pack import UserData, check, pack, pool
from comingle.data.partition import Overlap, UserText, find_overlap, mix_held_out, split_by_fractions, split_given
from comingle.data.questions import choose_languages, make_questions
from comingle.data.sources import read_dataset, read_documents
from comingle.data.splits import warn_unseen
from comingle.data.tasks import Task
from comingle.engines.answers import AnswerFeed
from comingle.engines.runtime import keep_buffers
from comingle.engines.training import Training
from comingle.errors import DataError, RecipeError, did_you_mean
from comingle.methods.base import Method
from comingle.models.base import PreTrainedTokenizerBase
from comingle.models.language import Base, load_base
from comingle.nets import PREFIX, check_method, prepare_task
from comingle.recipes import DataSection, Recipe, SplitSection, UserSource
from comingle.recipes.unused import check_used


@dataclass(frozen=True, kw_only=True)
class Materials:
    """What several runs of a comparison have in common: the base and everybody's text or questions, or a made task."""

    base: Base | None
    texts: tuple[UserText, ...]
    users: tuple[UserData, ...]
    task: Task | None = None
    answers: tuple[UserAnswers, ...] = ()

    def __post_init__(self) -> None:
        if self.task is not None and self.task.loss == "cross_entropy":
            warn_unseen(self.task.users)

    def overlaps(self) -> list[Overlap]:
        """Users whose held-out documents also occur in their training text."""
        return [found for text in self.texts if (found := find_overlap(text)).total]


def prepare(recipe: Recipe, *, base: Base | None = None) -> Materials:
    """Load the base (unless it is given), read, split and tokenise everybody's text.

    Raises:
        RecipeError: the method is none, or not for such users, or a setting would not be read; said before loading.
        BaseModelError: the base cannot be used.
        DataError: some user's text cannot.
    """
    check_method(recipe)
    check_used(recipe)
    keep_buffers()
    if recipe.runtime.threads:
        torch.set_num_threads(recipe.runtime.threads)
    if recipe.data.task is not None:
        return Materials(base=None, texts=(), users=(), task=prepare_task(recipe.data.task, recipe.seed))
    if recipe.base.startswith(PREFIX):
        raise RecipeError(f"base: got {recipe.base!r} for text; allowed: a language model, or data.task for a net")
    asked, runtime = recipe.data.questions, recipe.runtime
    if asked is not None:
        choose_languages(asked.name, asked.languages)  # before the base is loaded
    texts = [] if asked else read_users(recipe.data, recipe.seed)
    base = base or load_base(recipe.base, dtype=runtime.dtype, device=runtime.device, attention=runtime.attention)
    if asked:
        return Materials(base=base, texts=(), users=(), answers=read_questions(recipe, base))
    return Materials(base=base, texts=tuple(texts), users=tuple(tokenise_users(recipe.data, texts, base)))


def gather(materials: Materials, method: Method, training: Training) -> tuple[list[Any], list[Any], AnswerFeed | None]:
    """Users with text or questions, those who train, and what feeds these where it is not text.

    Raises:
        DataError: a user has too little of something that the method needs.
    """
    users: list[Any] = list(materials.users or materials.answers)
    if not materials.answers:
        for user in users:
            check(user, context=training.context, needs_validation=method.client.needs_validation)
        return users, [pool(users)] if method.placement.pooled else users, None
    assert materials.base is not None
    for user in users:
        check_answers(user, needs_validation=method.client.needs_validation)
    trainers = [pool_answers(users)] if method.placement.pooled else users
    size = training.batch_size * (len(users) if method.placement.pooled else 1)
    even = method.placement.routed and training.balance_weight > 0
    return users, trainers, AnswerFeed(trainers, training, size, tokenizer=_tokenizer(materials.base), even=even)


def read_questions(recipe: Recipe, base: Base) -> tuple[UserAnswers, ...]:
    """Everybody's questions as tokens of the base.

    Raises:
        RecipeError: no such questions or languages.
        DataError: questions that cannot be read, too few of them, or a base without a tokenizer.
    """
    section = recipe.data.questions
    assert section is not None
    settings = section.model_dump(exclude={"name"})
    return make_questions(section.name, _tokenizer(base), context=recipe.training.context, seed=recipe.seed, **settings)


def _tokenizer(base: Base) -> PreTrainedTokenizerBase:
    if base.tokenizer is None:
        raise DataError(f"base {base.name}: no tokenizer in it, so text cannot become tokens")
    return base.tokenizer


def tokenise_users(data: DataSection, texts: Sequence[UserText], base: Base) -> list[UserData]:
    """Everybody's text as token streams, cut to the recipe's limits.

    Raises:
        DataError: the base has no tokenizer.
        RecipeError: a limit is for somebody who is not a user.
    """
    tokenizer = _tokenizer(base)
    limits = token_limits(data, [text.name for text in texts])
    return [pack(text, tokenizer, **limits[text.name]) for text in texts]


def token_limits(data: DataSection, names: Sequence[str]) -> dict[str, dict[str, int | None]]:
    """For each user how many tokens of each split are kept, by the keys of the recipe; None keeps all.

    Raises:
        RecipeError: a limit is for somebody who is not a user.
    """
    limits: dict[str, dict[str, int | None]] = {name: {} for name in names}
    for key in ("max_train_tokens", "max_valid_tokens", "max_test_tokens"):
        given = getattr(data, key)
        for stranger in given if isinstance(given, Mapping) else ():
            if stranger not in limits:
                raise RecipeError(
                    f"data.{key}: no user {stranger!r}; there are: {', '.join(names)}.{did_you_mean(stranger, names)}"
                )
        for name, own in limits.items():
            own[key] = given.get(name) if isinstance(given, Mapping) else given
    for name, source in (data.users or {}).items():
        if source.max_train_tokens is not None:
            limits[name]["max_train_tokens"] = source.max_train_tokens
    return limits


def read_users(data: DataSection, seed: int) -> list[UserText]:
    """Everybody's documents, in splits.

    Raises:
        DataError: a source is missing, empty or unreadable.
    """
    if data.dataset is not None:
        source = data.dataset
        groups = read_dataset(
            source.path,
            user=source.user,
            text=source.text,
            split=source.split,
            users=source.users,
            name=source.config,
            max_documents=source.max_documents,
        )
        texts = [_split_group(name, splits, data.split, seed) for name, splits in groups.items()]
    else:
        texts = [_read_user(name, source, data.split, seed) for name, source in (data.users or {}).items()]
    return mix_held_out(texts, seed=seed) if data.held_out == "mixture" else texts


def _read_user(name: str, source: UserSource, split: SplitSection, seed: int) -> UserText:
    if source.path is not None:
        documents = read_documents(source.path, column=source.column)
        return split_by_fractions(documents, valid=split.valid, test=split.test, seed=seed, name=name)
    parts = {
        key: read_documents(path, column=source.column)
        for key in ("train", "valid", "test")
        if (path := getattr(source, key)) is not None
    }
    given = "valid" if "valid" in parts else None
    return split_given(parts, name=name, valid=given, valid_fraction=0.0 if given else split.valid, seed=seed)


def _split_group(name: str, splits: Mapping[str, list[str]], split: SplitSection, seed: int) -> UserText:
    if not split.given:
        documents = [d for documents in splits.values() for d in documents]
        return split_by_fractions(documents, valid=split.valid, test=split.test, seed=seed, name=name)
    return split_given(
        splits,
        name=name,
        train=split.train_name,
        valid=split.valid_name,
        test=split.test_name,
        valid_fraction=0.0 if split.valid_name else split.valid,
        seed=seed,
    )
