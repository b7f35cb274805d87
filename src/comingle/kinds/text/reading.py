"""Users' text out of a recipe: read, split, cut to its limits and tokenised; who has too little is found."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from comingle.config import SplitSection
from comingle.data.bad_rows import BadRows
from comingle.data.limits import most_bytes
from comingle.data.pack import UserData, find_shortage, list_small, pack, with_validation
from comingle.data.partition import UserText, split_by_fractions, split_given
from comingle.data.repeated import Repeated, warn_same_files
from comingle.data.sources import read_dataset, read_documents
from comingle.kinds.text.section import DatasetSource, TextSection, UserSource
from comingle.models.base import Base, tokenizer_of
from comingle.utils.errors import DataError, NoTextError, RecipeError, did_you_mean, list_names

logger = logging.getLogger("comingle")


def leave_out(
    data: TextSection, texts: Sequence[UserText], base: Base, *, context: int, validates: bool
) -> tuple[list[UserText], dict[str, str]]:
    """Users with enough text of their own, and what each of the others has too little of, which a warning says.

    Raises:
        DataError: nobody has enough.
    """
    users = tokenise_users(data, texts, base)
    needed = {"context": context, "needs_validation": validates, "begins": base.begin is not None}
    skipped = {user.name: shortage.what for user in users if (shortage := find_shortage(user, **needed))}
    if len(skipped) == len(users):
        raise DataError(f"all {len(users)} users have too little text: {list_small(skipped)}")
    if skipped:
        told = f"{len(skipped)} of {len(users)} users are left out, as they have too little text: {list_small(skipped)}"
        logger.warning("%s", told)
    return [text for text in texts if text.name not in skipped], skipped


def tokenise_users(
    data: TextSection, texts: Sequence[UserText], base: Base, *, known: Sequence[str] | None = None
) -> list[UserData]:
    """Everybody's text as token streams, cut to the recipe's limits, which may be for all who are ``known``.

    With ``train_on_valid`` the validation text is part of the training text too.

    Raises:
        DataError: the base has no tokenizer.
        RecipeError: a limit is for somebody who is not a user.
    """
    tokenizer = tokenizer_of(base)
    limits = token_limits(data, known or [text.name for text in texts])
    users = [pack(text, tokenizer, **limits[text.name]) for text in texts]
    return [with_validation(user) for user in users] if data.train_on_valid else users


def token_limits(data: TextSection, names: Sequence[str]) -> dict[str, dict[str, int | None]]:
    """For each user how many tokens of each split are kept, by the keys of the recipe; None keeps all.

    Raises:
        RecipeError: a limit is for somebody who is not a user.
    """
    check_limits(data, names)
    return {name: limits_of(data, name) for name in names}


def check_limits(data: TextSection, names: Collection[str]) -> None:
    """Whether all limits are for users.

    Raises:
        RecipeError: one is not.
    """
    for key in LIMITS:
        given = getattr(data, key)
        for stranger in given if isinstance(given, Mapping) else ():
            if stranger not in names:
                hint = did_you_mean(stranger, names)
                raise RecipeError(f"data.{key}: no user {stranger!r}; there are: {list_names(names)}.{hint}")


LIMITS = ("max_train_tokens", "max_valid_tokens", "max_test_tokens")


def limits_of(data: TextSection, name: str) -> dict[str, int | None]:
    """How many tokens of each split are kept of a user; the user's own limit comes before that of all."""
    given = {key: getattr(data, key) for key in LIMITS}
    limits = {key: limit.get(name) if isinstance(limit, Mapping) else limit for key, limit in given.items()}
    own = data.users[name].max_train_tokens if data.users is not None and name in data.users else None
    return limits if own is None else {**limits, "max_train_tokens": own}


def read_users(data: TextSection, seed: int, bad: BadRows | None = None) -> list[UserText]:
    """Read and split the documents of all users; one without documents is refused, or returned without any.

    Args:
        data: The recipe's section.
        seed: Seed of the splits.
        bad: Collects rows that cannot be used; None for a collection of its own.

    Raises:
        DataError: A source is missing or unreadable, or users without text are refused.
    """
    bad, repeated = bad or BadRows(data.on_bad_row), Repeated(data.deduplicate)
    read = _dataset_readers if data.dataset is not None else user_readers
    return collect(data, read(data, seed, bad, repeated), bad, repeated)


def collect(data: TextSection, readers: Mapping[str, Reader], bad: BadRows, repeated: Repeated) -> list[UserText]:
    """Read all users; one without text is refused, or returned without any.

    Args:
        data: the recipe's section.
        readers: by user.
        bad: the rows that the readers cannot use.
        repeated: the documents that the readers leave out.

    Raises:
        DataError: a reader raised it, or users without text or bad rows are refused.
    """
    texts, empty = [], dict[str, str]()
    for name, read in readers.items():
        try:
            texts.append(read())
        except NoTextError as error:
            empty[name] = str(error)
            texts.append(UserText(name=name, train=()))
    bad.settle()
    repeated.settle()
    if not empty or (data.on_small_user == "skip" and len(empty) < len(texts)):
        return texts
    if len(empty) == 1:
        raise DataError(next(iter(empty.values())))
    raise DataError(f"{len(empty)} of {len(texts)} users have no text: {list_small(empty)}")


Reader = Callable[[], UserText]
"""Reads and splits the text of one user."""

ReadUpTo = Callable[[int | None], list[str]]
"""Reads documents, up to about so many bytes."""


def _dataset_readers(data: TextSection, seed: int, bad: BadRows, repeated: Repeated) -> dict[str, Reader]:
    assert data.dataset is not None
    groups = read_dataset(data.dataset.path, **options_of(data.dataset), bad=bad)
    return {name: partial(split_group, name, splits, data.split, seed, repeated) for name, splits in groups.items()}


def options_of(source: DatasetSource) -> dict[str, Any]:
    """How its rows are read, besides from where."""
    return {
        "user": source.user,
        "text": source.text,
        "split": source.split,
        "users": source.users,
        "name": source.config,
        "max_documents": source.max_documents,
    }


def user_readers(data: TextSection, seed: int, bad: BadRows, repeated: Repeated) -> dict[str, Reader]:
    """For each user named in the recipe what reads its text."""
    users = data.users or {}
    limits = token_limits(data, list(users))
    warn_same_files({name: (source.path, source.train) for name, source in users.items()})
    return {
        name: partial(_read_user, name, source, data.split, seed, limits[name], bad, repeated)
        for name, source in users.items()
    }


def _read_user(
    name: str,
    source: UserSource,
    split: SplitSection,
    seed: int,
    kept: Mapping[str, int | None],
    bad: BadRows,
    repeated: Repeated,
) -> UserText:
    """A user's documents in splits; ``kept`` are the user's limits, beyond which nothing need be read."""

    def reading(path: str) -> ReadUpTo:
        return lambda most: read_documents(path, column=source.column, most=most, bad=bad)

    if source.path is not None:
        return split_whole(name, reading(source.path), split, seed, kept, repeated)
    paths = {key: path for key in ("train", "valid", "test") if (path := getattr(source, key)) is not None}
    return split_parts(name, {key: reading(path) for key, path in paths.items()}, split, seed, kept, repeated)


def split_whole(
    name: str, read: ReadUpTo, split: SplitSection, seed: int, kept: Mapping[str, int | None], repeated: Repeated
) -> UserText:
    """One source as train, valid and test by fractions."""
    train, valid, test = (kept[f"max_{one}_tokens"] for one in ("train", "valid", "test"))
    rest = 1 - split.valid - split.test
    most = most_bytes(train=(train, rest), valid=(valid, split.valid), test=(test, split.test))
    documents = repeated.drop(name, {"": read(most)}, str)[""]
    return split_by_fractions(documents, valid=split.valid, test=split.test, seed=seed, name=name)


def split_parts(
    name: str,
    reads: Mapping[str, ReadUpTo],
    split: SplitSection,
    seed: int,
    kept: Mapping[str, int | None],
    repeated: Repeated,
) -> UserText:
    """A source for each split; where valid has none it is cut from train."""
    train, valid, test = (kept[f"max_{one}_tokens"] for one in ("train", "valid", "test"))
    carved = split.valid if "valid" not in reads else 0.0
    most = {
        "train": most_bytes(train=(train, 1 - carved), valid=(valid, carved)),
        "valid": most_bytes(train=(valid, 1.0)),
        "test": most_bytes(train=(test, 1.0)),
    }
    read = {key: read(most[key]) for key, read in reads.items()}
    parts = repeated.drop(name, read, str, held_out=("test", "valid"))
    given = "valid" if "valid" in parts else None
    return split_given(parts, name=name, valid=given, valid_fraction=carved, seed=seed)


def split_group(
    name: str, splits: Mapping[str, list[str]], split: SplitSection, seed: int, repeated: Repeated
) -> UserText:
    """Part a user's rows of a data set into train, valid and test."""
    splits = repeated.drop(name, splits, str, held_out=(split.test_name, split.valid_name or ""))
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
