"""What a run is made of before any training: the base model and everybody's text, read, split and tokenised."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from comingle.data.answers import UserAnswers, check_answers, pool_answers
from comingle.data.digests import digest_split
from comingle.data.later import later
from comingle.data.limits import most_bytes
from comingle.data.pack import UserData, check, find_shortage, list_small, pack, pool
from comingle.data.partition import (
    NoTextError,
    Overlap,
    UserText,
    find_overlap,
    mix_held_out,
    split_by_fractions,
    split_given,
)
from comingle.data.questions import choose_languages, make_questions
from comingle.data.samples import SPLITS, UserSamples
from comingle.data.sources import read_dataset, read_documents
from comingle.data.splits import warn_unseen
from comingle.data.tasks import Task
from comingle.engines.answers import AnswerFeed
from comingle.engines.runtime import keep_buffers
from comingle.engines.training import Training
from comingle.errors import DataError, RecipeError, did_you_mean
from comingle.inputs import Inputs, UserInputs
from comingle.methods import make
from comingle.methods.base import Method
from comingle.models.base import PreTrainedTokenizerBase
from comingle.models.digests import digest_tokenizer
from comingle.models.language import Base, load_base
from comingle.nets import PREFIX, check_method, prepare_task
from comingle.recipes import DataSection, Recipe, SplitSection, UserSource
from comingle.recipes.unused import check_used

logger = logging.getLogger("comingle")


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
        return [found for text in self.texts if (found := find_overlap(text)).total]


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


def leave_out(
    recipe: Recipe, texts: Sequence[UserText], base: Base, validates: bool
) -> tuple[list[UserText], dict[str, str]]:
    """Users with enough text of their own, and what each of the others has too little of, which a warning says.

    Raises:
        DataError: nobody has enough.
    """
    users, context = tokenise_users(recipe.data, texts, base), recipe.training.context
    found = {u.name: s.what for u in users if (s := find_shortage(u, context=context, needs_validation=validates))}
    if len(found) == len(users):
        raise DataError(f"all {len(users)} users have too little text: {list_small(found)}")
    if found:
        told = f"{len(found)} of {len(users)} users are left out, as they have too little text: {list_small(found)}"
        logger.warning("%s", told)
    return [text for text in texts if text.name not in found], found


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
    return users, trainers, AnswerFeed(trainers, training, size, tokenizer=_tokenizer(materials.base), even=even)


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
    return make_questions(section.name, _tokenizer(base), context=recipe.training.context, seed=recipe.seed, **settings)


def _tokenizer(base: Base) -> PreTrainedTokenizerBase:
    if base.tokenizer is None:
        raise DataError(f"base {base.name}: no tokenizer in it, so text cannot become tokens")
    return base.tokenizer


def tokenise_users(
    data: DataSection, texts: Sequence[UserText], base: Base, *, known: Sequence[str] | None = None
) -> list[UserData]:
    """Everybody's text as token streams, cut to the recipe's limits, which may be for all who are ``known``.

    Raises:
        DataError: the base has no tokenizer.
        RecipeError: a limit is for somebody who is not a user.
    """
    tokenizer = _tokenizer(base)
    limits = token_limits(data, known or [text.name for text in texts])
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
    """Everybody's documents, in splits of their own; who has none is refused, or has none in what is returned.

    Raises:
        DataError: a source is missing or unreadable, or users without text are refused.
    """
    readers = _dataset_readers(data, seed) if data.dataset is not None else _user_readers(data, seed)
    texts, empty = [], dict[str, str]()
    for name, read in readers.items():
        try:
            texts.append(read())
        except NoTextError as error:
            empty[name] = str(error)
            texts.append(UserText(name=name, train=()))
    if not empty or (data.on_small_user == "skip" and len(empty) < len(texts)):
        return texts
    if len(empty) == 1:
        raise DataError(next(iter(empty.values())))
    raise DataError(f"{len(empty)} of {len(texts)} users have no text: {list_small(empty)}")


Reader = Callable[[], UserText]
"""Reads and splits the text of one user."""


def _dataset_readers(data: DataSection, seed: int) -> dict[str, Reader]:
    source = data.dataset
    assert source is not None
    groups = read_dataset(
        source.path,
        user=source.user,
        text=source.text,
        split=source.split,
        users=source.users,
        name=source.config,
        max_documents=source.max_documents,
    )
    return {name: partial(_split_group, name, splits, data.split, seed) for name, splits in groups.items()}


def _user_readers(data: DataSection, seed: int) -> dict[str, Reader]:
    users = data.users or {}
    limits = token_limits(data, list(users))
    return {name: partial(_read_user, name, source, data.split, seed, limits[name]) for name, source in users.items()}


def _read_user(
    name: str, source: UserSource, split: SplitSection, seed: int, kept: Mapping[str, int | None]
) -> UserText:
    """A user's documents in splits; ``kept`` are the user's limits, beyond which nothing need be read."""
    train, valid, test = (kept[f"max_{one}_tokens"] for one in ("train", "valid", "test"))
    rest = 1 - split.valid - split.test
    if source.path is not None:
        most = most_bytes(train=(train, rest), valid=(valid, split.valid), test=(test, split.test))
        documents = read_documents(source.path, column=source.column, most=most)
        return split_by_fractions(documents, valid=split.valid, test=split.test, seed=seed, name=name)
    carved = split.valid if source.valid is None else 0.0
    most = {
        "train": most_bytes(train=(train, 1 - carved), valid=(valid, carved)),
        "valid": most_bytes(train=(valid, 1.0)),
        "test": most_bytes(train=(test, 1.0)),
    }
    parts = {
        key: read_documents(path, column=source.column, most=most[key])
        for key in ("train", "valid", "test")
        if (path := getattr(source, key)) is not None
    }
    given = "valid" if "valid" in parts else None
    return split_given(parts, name=name, valid=given, valid_fraction=carved, seed=seed)


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
