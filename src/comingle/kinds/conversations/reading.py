"""Users' conversations out of a recipe, or handed over by a program: read, checked and split."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from comingle.data.names import name_problem
from comingle.data.pack import list_small
from comingle.data.rows import choose_users, list_names
from comingle.data.seeds import derive
from comingle.errors import DataError, NoTextError, did_you_mean
from comingle.evaluation.rouge import same_words
from comingle.kinds.conversations.records import Record, field_of, iterate_records, read_records
from comingle.kinds.conversations.rows import Columns, Messages, messages_of
from comingle.kinds.conversations.section import ConversationRows, ConversationsSection
from comingle.kinds.text.section import UserFiles
from comingle.recipes import SplitSection

Placed = tuple[str, Messages]
"""A conversation, and where it stands."""


@dataclass(frozen=True, kw_only=True)
class UserConversations:
    """The conversations of one user, split by split."""

    name: str
    train: tuple[Placed, ...] = ()
    valid: tuple[Placed, ...] = ()
    test: tuple[Placed, ...] = ()


def read_users(data: ConversationsSection, seed: int) -> list[UserConversations]:
    """Everybody's conversations; who has none is refused, or has none in what is returned.

    Raises:
        DataError: a source is missing or unreadable, a row is no conversation, or users without any are refused.
    """
    if data.given:
        raise DataError("data.given: users come from a program, as comingle.run(recipe, users=...)")
    if data.dataset is not None:
        readers = {name: partial(parted, data, parts) for name, parts in _grouped(data).items()}
    else:
        readers = {name: partial(read_files, data, source) for name, source in (data.users or {}).items()}
    return collect(data, readers, seed)


def adopt_users(data: ConversationsSection, given: Mapping[str, Any], seed: int) -> list[UserConversations]:
    """The same, of rows that a program hands over: a list, a ``Dataset``, splits of them by their names, or a path.

    Raises:
        DataError: as :func:`read_users`.
    """
    if problem := name_problem(given):
        raise DataError(f"users: {problem}")
    readers: dict[str, Reader] = {}
    for name, rows in given.items():
        if isinstance(rows, str | Path):
            readers[name] = partial(read_files, data, UserFiles(path=str(rows)))
        elif isinstance(rows, Mapping):
            wanted = data.split.model_copy(update={"given": True, "valid_name": "valid" if "valid" in rows else None})
            if "valid" not in rows and "validation" in rows:
                wanted = wanted.model_copy(update={"valid_name": "validation"})
            parts = {str(split): list(rows_of(part, str(split))) for split, part in rows.items()}
            readers[name] = partial(parted, data, parts, split=wanted)
        else:
            readers[name] = partial(parted, data, {"train": list(rows_of(rows, "train"))})
    return collect(data, readers, seed)


def rows_of(rows: Any, split: str) -> Iterator[Record]:
    """Rows that a program holds: a list of mappings, or a ``Dataset``."""
    if hasattr(rows, "column_names"):
        yield from iterate_records(rows, "", split)
        return
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise DataError(f"row {number} is {type(row).__name__}; allowed: a mapping with messages")
        yield split, f"row {number}", row


Reader = Callable[[str, int], UserConversations]
"""Reads and splits the conversations of one user, given the name and the seed."""


def collect(data: ConversationsSection, readers: Mapping[str, Reader], seed: int) -> list[UserConversations]:
    """What all readers read."""
    users, empty = [], dict[str, str]()
    for name, read in readers.items():
        try:
            users.append(read(name, seed))
        except NoTextError as error:
            empty[name] = str(error)
            users.append(UserConversations(name=name))
    if empty and (data.on_small_user == "refuse" or len(empty) == len(users)):
        named = next(iter(empty.values())) if len(empty) == 1 else list_small(empty)
        count = "" if len(empty) == 1 else f"{len(empty)} of {len(users)} users have no conversations: "
        raise DataError(f"{count}{named}")
    return users


# -------------------------------------------------------------------- one user


def read_files(data: ConversationsSection, source: UserFiles, name: str, seed: int) -> UserConversations:
    """The conversations of a user who is named in the recipe."""
    given = source.path is None
    paths = {"train": source.train or source.path, "valid": source.valid, "test": source.test}
    parts = {split: _renamed(read_records(path), split) for split, path in paths.items() if path is not None}
    valid_name = "valid" if source.valid is not None else None
    split = data.split.model_copy(update={"given": given, "train_name": "train", "valid_name": valid_name})
    return parted(data, parts, name, seed, split=split.model_copy(update={"test_name": "test"}))


def _renamed(records: Iterable[Record], split: str) -> list[Record]:
    return [(split, where, row) for _, where, row in records]


def parted(
    data: ConversationsSection,
    parts: Mapping[str, Sequence[Record]],
    name: str,
    seed: int,
    *,
    split: SplitSection | None = None,
) -> UserConversations:
    """A user's rows in splits: those given, or by fractions of the conversations, shuffled by (seed, name)."""
    split = split or data.split
    read = {key: [_placed(data, name, record) for record in records] for key, records in parts.items()}
    if not any(read.values()):
        raise NoTextError(f"user {name!r}: no conversations; a user needs at least one")
    if not split.given:
        every = [placed for placed_of_split in read.values() for placed in placed_of_split]
        train, valid, test = cut(every, split.valid, split.test, seed, name)
        return UserConversations(name=name, train=train, valid=valid, test=test)
    for wanted in filter(None, (split.train_name, split.valid_name, split.test_name)):
        if wanted not in read and not (wanted == split.valid_name and split.valid):
            hint = did_you_mean(wanted, read)
            raise NoTextError(f"user {name!r}: no split {wanted!r}; found: {', '.join(read)}.{hint}")
    train, valid, test = tuple(read[split.train_name]), read.get(split.valid_name or ""), read[split.test_name]
    if valid is None:
        train, valid, _ = cut(train, split.valid, 0.0, seed, name)
    return UserConversations(name=name, train=train, valid=tuple(valid), test=tuple(test))


def _placed(data: ConversationsSection, name: str, record: Record) -> Placed:
    _, where, row = record
    try:
        messages = messages_of(row, data.columns)
        _check_labels(messages, data.labels)
    except ValueError as error:
        raise DataError(f"user {name!r}: {where}: {error}") from None
    return where, messages


def _check_labels(messages: Messages, labels: Sequence[str]) -> None:
    for message in messages if labels else ():
        said = message["content"]
        if message["role"] == "assistant" and not any(same_words(said, label) for label in labels):
            raise ValueError(f"the response {said!r:.60} is no label; allowed: {list_names(labels)}")


def cut(
    conversations: Sequence[Placed], valid: float, test: float, seed: int, name: str
) -> tuple[tuple[Placed, ...], tuple[Placed, ...], tuple[Placed, ...]]:
    """Train, valid and test by fractions of the conversations; a fraction above 0 is at least one of three or more."""
    if valid + test >= 1:
        raise DataError(f"user {name!r}: split fractions valid={valid}, test={test}: their sum must be below 1")
    shuffled = list(conversations)
    random.Random(derive("split", seed, name)).shuffle(shuffled)
    counts = [_share(len(shuffled), part) for part in (test, valid)]
    first, second = counts[0], sum(counts)
    return tuple(shuffled[second:]), tuple(shuffled[first:second]), tuple(shuffled[:first])


def _share(count: int, fraction: float) -> int:
    least = 1 if fraction and count > 2 else 0
    return max(least, round(count * fraction))


# -------------------------------------------------------------------- rows of all


def _grouped(data: ConversationsSection) -> dict[str, dict[str, list[Record]]]:
    """The rows of a data set by user and split.

    Raises:
        DataError: no row names a user, or somebody who is wanted has none.
    """
    source = data.dataset
    assert source is not None
    groups: dict[str, dict[str, list[Record]]] = {}
    for owner, record in owned_records(source):
        groups.setdefault(owner, {}).setdefault(record[0], []).append(record)
    return wanted_users(source, groups)


def owned_records(source: ConversationRows) -> Iterator[tuple[str, Record]]:
    """The rows of a data set that have a user, as many of each as are kept, with the user.

    Raises:
        DataError: no row has one.
    """
    counts, found, somebody = Counter[tuple[str, str]](), list[str](), False
    for own_split, place, row in read_records(source.path, config=source.config):
        owner, split = field_of(row, source.user), own_split if source.split is None else field_of(row, source.split)
        found = found or list(row)
        if owner is None or split is None:
            continue
        somebody, key = True, (str(owner), str(split))
        if source.max_conversations is not None:
            counts[key] += 1
        if source.max_conversations is None or counts[key] <= source.max_conversations:
            yield str(owner), (str(split), place, row)
    if not somebody:
        hint, there = did_you_mean(source.user, found), list_names(found)
        raise DataError(f"{_where(source)}: no row has a user in column {source.user!r}; found: {there}.{hint}")


def wanted_users(source: ConversationRows, groups: dict[str, Any]) -> dict[str, Any]:
    """Of all users of a data set those who are wanted.

    Raises:
        DataError: a name is none, or somebody who is wanted has no rows.
    """
    if problem := name_problem(groups):
        raise DataError(f"{_where(source)}: column {source.user!r}: {problem}")
    return choose_users(groups, source.users, _where(source))


def _where(source: ConversationRows) -> str:
    return source.path if isinstance(source.path, str) else ", ".join(source.path)


def has_messages(data: Any, columns: Columns) -> bool:
    """Whether this is what a program may hand over as one user's conversations."""
    if isinstance(data, Mapping):
        return bool(data) and all(has_messages(part, columns) for part in data.values())
    if hasattr(data, "column_names"):
        return columns.has(list(data.column_names or ()))
    return isinstance(data, list | tuple) and bool(data) and isinstance(data[0], Mapping) and columns.has(list(data[0]))
