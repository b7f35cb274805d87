"""Users' text from a recipe or a program: read, split, limited and tokenised."""

from __future__ import annotations

import logging
import os
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from comingle.config import Recipe, SplitSection
from comingle.data.duplicates import Repeated, warn_same_files
from comingle.data.files import most_bytes
from comingle.data.row_files import BadRows, BadRowsError
from comingle.data.sources import read_dataset, read_documents
from comingle.data.splits import UserText, mix_held_out, split_by_fractions, split_given
from comingle.data.tables import iterate_texts, table_of
from comingle.data.text.section import DatasetSource, TextSection, UserSource
from comingle.data.text.streams import UserData, check, find_shortage, list_small, pack, with_validation
from comingle.models.base import Base, tokenizer_of
from comingle.models.chat_templates import begin_of
from comingle.models.folders import load_tokenizer
from comingle.models.pretrained import PreTrainedTokenizerBase
from comingle.models.random_bases import PREFIX, byte_tokenizer
from comingle.utils.errors import DataError, NoTextError, RecipeError, did_you_mean, list_names
from comingle.utils.names import is_named
from comingle.utils.records import expand_home

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


HANDED = "a list of texts, a file or folder, a datasets.Dataset with a column text, or {train, valid, test} of these"

_SPLITS = {"train": "train", "valid": "valid", "validation": "valid", "test": "test"}
"""What splits may be called; ``validation`` is what data sets of the hub have."""


def takes(data: Any) -> bool:
    """Whether it is one user's text, as far as the first document tells."""
    if isinstance(data, Mapping):
        return bool(data) and set(data) <= set(_SPLITS) and all(map(_is_source, data.values()))
    return _is_source(data)


def _is_source(data: Any) -> bool:
    if isinstance(data, str | os.PathLike) or _column(data) is not None:
        return True
    return isinstance(data, Sequence) and not isinstance(data, bytes) and (not data or isinstance(data[0], str))


def _column(data: Any) -> str | None:
    """The column of a table that holds its documents: ``text``, or the only one that there is."""
    columns = getattr(data, "column_names", None)
    if not isinstance(columns, list):
        return None
    if "text" in columns:
        return "text"
    holds = getattr((getattr(data, "features", None) or {}).get(columns[0]), "dtype", "") if len(columns) == 1 else ""
    return columns[0] if holds in ("string", "large_string") else None


def given_texts(data: TextSection, given: Mapping[str, Any], seed: int, bad: BadRows | None = None) -> list[UserText]:
    """Split the documents of all users, as :func:`comingle.data.text.reading.read_users` does with files.

    Args:
        data: The recipe's section.
        given: Documents, a table or a path by user, or a mapping of these by split.
        seed: Seed of the splits.
        bad: Collects rows that cannot be used; None for a collection of its own.

    Raises:
        DataError: A user's data is not text, or users without text are refused.
    """
    limits = token_limits(data, list(given))
    bad, repeated = bad or BadRows(data.on_bad_row), Repeated(data.deduplicate)
    readers: dict[str, Callable[[], UserText]] = {}
    for name, source in given.items():
        if isinstance(source, Mapping):
            sources = {_SPLITS[str(split)]: partial(_documents, bad, name, part) for split, part in source.items()}
            readers[name] = partial(split_parts, name, sources, data.split, seed, limits[name], repeated)
        else:
            read = partial(_documents, bad, name, source)
            readers[name] = partial(split_whole, name, read, data.split, seed, limits[name], repeated)
    return collect(data, readers, bad, repeated)


def _documents(bad: BadRows, name: str, source: Any, most: int | None) -> list[str]:
    """Documents that are not blank, up to about ``most`` bytes of text."""
    if isinstance(source, str | os.PathLike):
        return _from_path(bad, name, os.fspath(source), most)
    where, documents, left = f"user {name!r}", [], most
    for document in _each(bad, source, where):
        if left is not None and left <= 0:
            break
        left = None if left is None else left - len(document.encode())
        documents.append(document)
    if not documents:
        raise NoTextError(f"{where}: no text in it, a user needs at least one document")
    return documents


def _from_path(bad: BadRows, name: str, path: str, most: int | None) -> list[str]:
    try:
        return read_documents(path, most=most, bad=bad)
    except (NoTextError, BadRowsError):
        raise
    except DataError as error:
        raise DataError(f"user {name!r}: {error!s:.300}; text itself is given as a list of documents") from None


def _each(bad: BadRows, source: Any, where: str) -> Iterator[str]:
    if (column := _column(source)) is not None:
        yield from (document for (document,) in iterate_texts(table_of(source, where, "train"), (column,), bad))
        return
    for number, document in enumerate(source, start=1):
        if not isinstance(document, str):
            bad.add(f"{where}: document {number}", f"is {reprlib.repr(document)}; allowed: text")
        elif document.strip():
            yield document


ABSENT_NOTE = "Some of the users' text is not here, so nobody's text is checked: a run may refuse it."


def check_texts(recipe: Recipe, data: TextSection, validates: bool) -> tuple[set[str], str]:
    """Whether users named in the recipe have the text that a run needs, where it is here: who would be left out, and
    a note where nothing could be checked. Text of demo users, of the hub and of data sets is not looked at.

    Raises:
        DataError: text that a run would refuse.
        RecipeError: a limit for somebody who is no user.
    """
    here, note = found_here(data)
    if not here:
        return set(), note
    texts, tokenizer = read_users(data, recipe.data_seed), tokenizer_here(recipe.base)
    return set() if tokenizer is None else _check_lengths(recipe, data, texts, tokenizer, validates), ""


def found_here(data: TextSection) -> tuple[bool, str]:
    """Whether text is looked at, which is here and of users named one by one; else maybe a note."""
    sources = _sources(data)
    if not sources or any(is_named(source) for source in sources):
        return False, ""
    here = all(os.path.exists(os.path.expanduser(source)) for source in sources)
    return here, "" if here else ABSENT_NOTE


def _check_lengths(
    recipe: Recipe, data: TextSection, texts: list[UserText], tokenizer: PreTrainedTokenizerBase, validates: bool
) -> set[str]:
    """A window's length of every stream is enough to know whether it is too short."""
    context = recipe.training.context
    skip = data.on_small_user == "skip"
    if data.held_out == "mixture" and not skip:
        texts = mix_held_out(texts, seed=recipe.data_seed)
    limits = token_limits(data, [text.name for text in texts])
    heads = {
        name: {key: min(limit or context + 1, context + 1) for key, limit in limits_of_user.items()}
        for name, limits_of_user in limits.items()
    }
    users = [pack(text, tokenizer, **heads[text.name]) for text in texts]
    users = [with_validation(user) for user in users] if data.train_on_valid else users
    begins = data.add_bos_token and bool(begin_of(tokenizer))
    needed = {"context": context, "needs_validation": validates, "begins": begins}
    small = {user.name for user in users if find_shortage(user, **needed)}
    if not skip or len(small) == len(users):
        check(users, **needed)
    return small


def _sources(data: TextSection) -> list[str]:
    users = (data.users or {}).values()
    return [source for user in users for source in (user.path, user.train, user.valid, user.test) if source]


def tokenizer_here(base: str) -> PreTrainedTokenizerBase | None:
    """The base's tokenizer where that takes neither weights nor the hub."""
    if base.startswith(PREFIX):
        return byte_tokenizer()
    folder = expand_home(base)
    return load_tokenizer(folder) if os.path.isdir(folder) else None
