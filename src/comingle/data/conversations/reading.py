"""Readers of users' conversations from a recipe or a program: read, checked and split."""

from __future__ import annotations

import json
import random
import reprlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from comingle.config import SplitSection
from comingle.config.settings import UserFiles
from comingle.data.conversations.messages import Columns, Messages, messages_of
from comingle.data.conversations.scoring import same_words
from comingle.data.conversations.section import ConversationRows, ConversationsSection
from comingle.data.duplicates import DuplicateFilter, warn_same_files
from comingle.data.files import long_word_problem
from comingle.data.row_files import BadRows, Row, read_name
from comingle.data.splits import column_advice, missing_split
from comingle.data.streaming import ListedRows, Rows, read_each
from comingle.data.tables import choose_users, field_of, has_column, read_tables, table_of
from comingle.utils.errors import DataError, NoTextError, did_you_mean, list_names
from comingle.utils.names import name_problem
from comingle.utils.seeds import derive

Record = tuple[str, str, Row]
"""Split of a row, its place such as ``chats.jsonl: line 3``, and the row."""


T = TypeVar("T")


def read_records(
    source: str | Sequence[str], *, config: str | None = None, bad: BadRows | None = None
) -> Iterator[Record]:
    """Yield the rows of files, folders, or a data set of the hub.

    Args:
        source: Files, folders or hub names.
        config: Configuration of a data set of the hub.
        bad: Collects rows that cannot be read; None to raise an error for them when reading ends.

    Raises:
        DataError: A source is missing, unknown or unreadable.
    """
    collected = bad or BadRows()
    for table in read_tables(source, name=config):
        for place, row in table.read(collected, None):  # None: all columns
            yield table.split, f"{table.where}: {place}", row
    if bad is None:
        collected.report()


PlacedConversation = tuple[str, Messages]
"""Place of a conversation in its source, and the conversation."""


@dataclass(frozen=True, kw_only=True)
class UserConversations:
    """Conversations of one user by split."""

    name: str
    train: tuple[PlacedConversation, ...] = ()
    valid: tuple[PlacedConversation, ...] = ()
    test: tuple[PlacedConversation, ...] = ()


def read_users(data: ConversationsSection, seed: int, bad: BadRows | None = None) -> list[UserConversations]:
    """Read and split the conversations of all users.

    Users without conversations are refused. With ``data.on_small_user: skip`` they are returned with empty splits.

    Args:
        data: The recipe's section.
        seed: Seed of the splits.
        bad: Collects bad rows; None for a new collection.

    Raises:
        DataError: A source is missing or unreadable, or bad rows or users without conversations are refused.
    """
    return list(
        iterate_users(data, seed, ListedRows(), bad or BadRows(data.on_bad_row), DuplicateFilter(data.deduplicate))
    )


def iterate_users(
    data: ConversationsSection,
    seed: int,
    group_rows: Rows,
    bad: BadRows,
    duplicates: DuplicateFilter,
    given: Mapping[str, object] | None = None,
) -> Generator[UserConversations, None, None]:
    """Read and split the conversations of one user after another.

    Args:
        data: The recipe's section.
        seed: Seed of the splits.
        group_rows: Groups the rows of a data set by user, in memory or on disk.
        bad: Collects bad rows.
        duplicates: Drops duplicate conversations of a user if the section enables this.
        given: Each user's rows by the user's name, if a program passes them: a list of rows, a ``Dataset``, a path, or
            a mapping from splits to lists or ``Dataset`` objects. None to read what the section names.

    Raises:
        DataError: A source is missing or unreadable, or bad rows or users without conversations are refused.
    """
    if given is not None:
        readers: Iterable[tuple[str, Reader]] = given_readers(data, given, bad, duplicates).items()
    elif data.given:
        raise DataError("data.given: a program must pass the users; call comingle.run(recipe, users=...)")
    elif data.dataset is not None:
        readers = _dataset_readers(data, group_rows, bad, duplicates)
    else:
        readers = file_readers(data, bad, duplicates).items()

    def report() -> None:
        bad.report()
        duplicates.report()

    return read_each(
        ((name, partial(read, name, seed)) for name, read in readers),
        without_data=lambda name: UserConversations(name=name),
        skips=data.on_small_user == "skip",
        noun="conversations",
        report=report,
    )


def given_readers(
    data: ConversationsSection, given: Mapping[str, object], bad: BadRows, duplicates: DuplicateFilter
) -> dict[str, Reader]:
    """Return a reader for the conversations of each user that a program passes.

    Args:
        data: The recipe's section.
        given: Each user's data by name: a list of rows, a ``Dataset``, a path, or a mapping from splits to lists or
            ``Dataset`` objects.
        bad: Collects bad rows.
        duplicates: Drops duplicate conversations.

    Raises:
        DataError: A name is not a valid user name.
    """
    if problem := name_problem(given):
        raise DataError(f"users: {problem}")
    readers: dict[str, Reader] = {}
    for name, rows in given.items():
        if isinstance(rows, str | Path):
            readers[name] = partial(read_files, data, bad, duplicates, UserFiles(path=str(rows)))
        elif isinstance(rows, Mapping):
            # The program passes splits: use them instead of the recipe's fractions.
            valid_name = next((split for split in ("valid", "validation") if split in rows), None)
            section = data.split.model_copy(update={"given": True, "valid_name": valid_name})
            by_split = {str(split): list(rows_of(part, str(split), bad)) for split, part in rows.items()}
            readers[name] = partial(split_records, data, bad, duplicates, by_split, split=section)
        else:
            by_split = {"train": list(rows_of(rows, "train", bad))}
            readers[name] = partial(split_records, data, bad, duplicates, by_split)
    return readers


def rows_of(rows: Any, split: str, bad: BadRows) -> Iterator[Record]:
    """Yield the rows of a list of mappings or a ``Dataset``, each with its split and its place for messages.

    Args:
        rows: The list or ``Dataset``.
        split: Split of the rows.
        bad: Collects rows that are not mappings.
    """
    if hasattr(rows, "column_names"):
        table = table_of(rows, "", split)  # without a name, since the caller names the user in messages
        all_columns = None
        yield from ((split, place, row) for place, row in table.read(bad, all_columns))
        return
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            bad.add(f"row {number}", f"got {reprlib.repr(row)}; allowed: a mapping with messages")
        else:
            yield split, f"row {number}", row


Reader = Callable[[str, int], UserConversations]
"""Function that reads and splits the conversations of one user, given the name and the seed."""


# -------------------------------------------------------------------- one user


def file_readers(data: ConversationsSection, bad: BadRows, duplicates: DuplicateFilter) -> dict[str, Reader]:
    """Return a reader for each user in the recipe; warn of users that train on the same file.

    Args:
        data: The recipe's section.
        bad: Collects bad rows.
        duplicates: Drops duplicate conversations.
    """
    users = data.users or {}
    # A user trains on `train`, or on part of `path`. The same test file for several users is not a mistake.
    warn_same_files({name: (source.path, source.train) for name, source in users.items()})
    return {name: partial(read_files, data, bad, duplicates, source) for name, source in users.items()}


def read_files(
    data: ConversationsSection, bad: BadRows, duplicates: DuplicateFilter, source: UserFiles, name: str, seed: int
) -> UserConversations:
    """Read and split the conversations of a user in the recipe.

    A user has one file that is split here, or a file for each split.

    Args:
        data: The recipe's section.
        bad: Collects bad rows.
        duplicates: Drops duplicate conversations.
        source: Files of the user.
        name: Name of the user.
        seed: Seed of the splits.
    """
    has_own_splits = source.path is None
    paths = {"train": source.train or source.path, "valid": source.valid, "test": source.test}
    max_conversations = data.max_conversations_of(name)
    records_by_split: dict[str, list[Record]] = {}
    for split, path in paths.items():
        if path is not None:  # the key counts, not the split that the name of the file denotes
            records = islice(read_records(path, bad=bad), max_conversations)
            records_by_split[split] = [(split, where, row) for _named_split, where, row in records]
    valid_name = "valid" if source.valid is not None else None
    names = {"train_name": "train", "valid_name": valid_name, "test_name": "test"}
    section = data.split.model_copy(update={"given": has_own_splits, **names})
    return split_records(data, bad, duplicates, records_by_split, name, seed, split=section)


def split_records(
    data: ConversationsSection,
    bad: BadRows,
    duplicates: DuplicateFilter,
    records_by_split: Mapping[str, Sequence[Record]],
    name: str,
    seed: int,
    *,
    split: SplitSection | None = None,
) -> UserConversations:
    """Read the conversations in a user's rows, and return them as train, valid and test.

    If ``split.given`` is set, the rows keep their splits; a missing valid may be cut from train. Otherwise all
    conversations are shuffled by (seed, name) and split by the fractions.

    Args:
        data: The recipe's section.
        bad: Collects rows that are not conversations.
        duplicates: Drops duplicate conversations if the section enables this.
        records_by_split: Rows by the splits that they are in.
        name: Name of the user.
        seed: Seed of the shuffle.
        split: Fractions and names of splits; by default those of the section ``data``.

    Raises:
        NoTextError: There are no conversations, or a requested split is missing.
    """
    split = split or data.split
    max_conversations = data.max_conversations_of(name)
    # A duplicate is kept in test, else in valid, so that no held-out conversation is also trained on.
    held_out = (split.test_name, split.valid_name or "")  # "" if the recipe names no validation split
    all_conversations = {
        key: _conversations(data, bad, name, records[:max_conversations]) for key, records in records_by_split.items()
    }
    by_split = duplicates.drop(name, all_conversations, _comparable_text, held_out=held_out)
    if not any(by_split.values()):
        raise NoTextError(f"user {name!r}: no conversations; at least one is needed")
    if not split.given:
        conversations = [conversation for of_split in by_split.values() for conversation in of_split]
        train, valid, test = split_by_count(conversations, split.valid, split.test, seed, name)
        return UserConversations(name=name, train=train, valid=valid, test=test)
    for wanted in filter(None, (split.train_name, split.valid_name, split.test_name)):
        is_replaceable = wanted == split.valid_name and split.valid  # by a fraction of train
        if wanted not in by_split and not is_replaceable:
            advice = "" if data.dataset is None else column_advice(data.dataset.split)
            raise missing_split(name, wanted, by_split, advice)
    train, test = tuple(by_split[split.train_name]), by_split[split.test_name]
    valid = by_split.get(split.valid_name or "")
    if valid is None:
        train, valid, _no_test = split_by_count(train, split.valid, 0.0, seed, name)  # test is given
    return UserConversations(name=name, train=train, valid=tuple(valid), test=tuple(test))


def _conversations(
    data: ConversationsSection, bad: BadRows, name: str, records: Iterable[Record]
) -> list[PlacedConversation]:
    """Return the conversations of a user's rows, without those of rows that cannot be used.

    Args:
        data: The recipe's section.
        bad: Collects the rows that cannot be used, and remarks.
        name: Name of the user.
        records: The rows.
    """
    conversations: list[PlacedConversation] = []
    dataset = data.dataset
    other_columns = [] if dataset is None else [column for column in (dataset.user, dataset.split) if column]
    for _split, where, row in records:
        place = f"user {name!r}: {where}"
        with bad.row(place):
            messages = messages_of(row, data.columns, read=other_columns, remark=partial(bad.remark, place))
            for message in messages:
                if problem := long_word_problem(str(message["content"])):
                    raise ValueError(f"a message holds {problem}")
            _check_labels(messages, data.labels)  # of a classification: each response must be one of the labels
            conversations.append((where, messages))
    return conversations


def _comparable_text(conversation: PlacedConversation) -> str:
    """Return a conversation as text that is equal for duplicates: its messages as JSON with normalised white space.

    Args:
        conversation: Place in its source, which does not count, and messages.
    """
    _place, messages = conversation
    normalised = [
        {key: " ".join(value.split()) if isinstance(value, str) else value for key, value in message.items()}
        for message in messages
    ]
    return json.dumps(normalised, sort_keys=True, default=str)  # str: values that JSON does not know, such as dates


def _check_labels(messages: Messages, labels: Sequence[str]) -> None:
    """Check that each response is one of the labels; do nothing without labels.

    Raises:
        ValueError: A response is not a label.
    """
    if not labels:
        return
    for message in messages:
        response = message["content"]
        if message["role"] == "assistant" and not any(same_words(response, label) for label in labels):
            raise ValueError(f"the response {response!r:.60} is not a label; allowed: {list_names(labels)}")


def split_by_count(
    conversations: Sequence[PlacedConversation], valid: float, test: float, seed: int, name: str
) -> tuple[tuple[PlacedConversation, ...], tuple[PlacedConversation, ...], tuple[PlacedConversation, ...]]:
    """Split conversations by fractions of their number, shuffled by (seed, name).

    Of three or more conversations, a split with a fraction above 0 gets at least one.

    Args:
        conversations: Conversations of the user.
        valid: Fraction of the validation split.
        test: Fraction of the test split.
        seed: Seed of the shuffle.
        name: Name of the user.

    Returns:
        The train, valid and test splits.

    Raises:
        DataError: The fractions leave nothing to train on.
    """
    if valid + test >= 1:
        raise DataError(f"user {name!r}: split fractions valid={valid}, test={test}: their sum must be below 1")
    shuffled = list(conversations)
    random.Random(derive("split", seed, name)).shuffle(shuffled)
    num_test, num_valid = (_split_size(len(shuffled), fraction) for fraction in (test, valid))
    held_out, train = shuffled[: num_test + num_valid], shuffled[num_test + num_valid :]
    return tuple(train), tuple(held_out[num_test:]), tuple(held_out[:num_test])


def _split_size(count: int, fraction: float) -> int:
    """Return the size of a split of ``count`` conversations: at least 1 of three or more if the fraction is not 0."""
    minimum = 1 if fraction and count > 2 else 0  # two conversations are too few for three splits
    return max(minimum, round(count * fraction))


# -------------------------------------------------------------------- data sets


def _dataset_readers(
    data: ConversationsSection, rows: Rows, bad: BadRows, duplicates: DuplicateFilter
) -> Iterator[tuple[str, Reader]]:
    """Yield a reader for each user of a data set, after grouping all of its rows.

    Args:
        data: The recipe's section.
        rows: Groups the rows by user; stores them as JSON if it keeps them on disk.
        bad: Collects bad rows.
        duplicates: Drops duplicate conversations.

    Raises:
        DataError: No row names a user, or a selected user has no rows.
    """
    assert data.dataset is not None
    rows.fill(
        # A record is a row with its split and place; the split comes first.
        ((owner, record[0], record) for owner, record in records_with_users(data, bad)),
        pack=lambda record: json.dumps(record, default=_placeholder).encode(),
        unpack=lambda content: tuple(json.loads(content)),
    )
    for name, records_by_split in rows.groups(choose_dataset_users(data.dataset, rows.owners)):
        yield name, partial(split_records, data, bad, duplicates, records_by_split)


def _placeholder(value: object) -> dict[str, str]:
    """Return a JSON placeholder for a value such as a date or bytes, which is neither a message nor text."""
    return {"": type(value).__name__}


def records_with_users(data: ConversationsSection, bad: BadRows) -> Iterator[tuple[str, Record]]:
    """Yield the rows of a data set that have a user, with the user, up to the limit per user and split.

    Raises:
        DataError: No row of a file names a user.
    """
    source, counts = data.dataset, Counter[tuple[str, str]]()
    assert source is not None
    for table in read_tables(source.path, name=source.config):
        columns, has_user_column = list(table.columns or ()), False
        all_columns = None
        for place, row in table.read(bad, all_columns):
            columns, where = columns or list(row), f"{table.where}: {place}"
            has_user_column = has_user_column or has_column(row, source.user)
            with bad.row(where):
                if (user_and_split := _user_and_split(row, source, table.split)) is None:
                    continue
                counts[user_and_split] += 1
                user, split = user_and_split
                limit = data.max_conversations_of(user)
                if limit is None or counts[user_and_split] <= limit:
                    yield user, (split, where, row)
        if columns and not has_user_column:
            hint, found = did_you_mean(source.user, columns), list_names(columns)
            raise DataError(f"{table.where}: no row has a user in column {source.user!r}; found: {found}.{hint}")
    if not counts:
        bad.report()  # raises an error if rows are bad, which may be why no row has a user
        raise DataError(f"{_source_label(source)}: no row has a user in column {source.user!r}")


def _user_and_split(row: Row, source: ConversationRows, own_split: str) -> tuple[str, str] | None:
    """Return the user and the split of a row; None if either has no value.

    Args:
        row: The row.
        source: The recipe's section, which names the columns.
        own_split: Split of the row's table, which counts if the recipe names no column with the split.

    Raises:
        ValueError: A value is not a name.
    """
    owner = field_of(row, source.user)
    split = own_split if source.split is None else field_of(row, source.split)
    if owner is None or split is None:
        return None
    split_column = source.split or ""  # only for messages; the split of a table needs none
    return read_name(owner, source.user), read_name(split, split_column)


def choose_dataset_users(source: ConversationRows, groups: Mapping[str, T]) -> Mapping[str, T]:
    """Return the selected users of a data set.

    Args:
        source: The recipe's section, which selects users by name or number.
        groups: Rows of each user of the data set, by name.

    Raises:
        DataError: A name is invalid, or a selected user has no rows.
    """
    if problem := name_problem(groups):
        raise DataError(f"{_source_label(source)}: column {source.user!r}: {problem}")
    return choose_users(groups, source.users, _source_label(source))


def _source_label(source: ConversationRows) -> str:
    """Return the name of a data set in messages."""
    return source.path if isinstance(source.path, str) else ", ".join(source.path)


def has_messages(data: object, columns: Columns) -> bool:
    """Return whether an object may be one user's conversations, judged by its type and first row.

    Conversations are a list of rows, a ``datasets.Dataset``, or a mapping from splits to lists or ``Dataset`` objects.

    Args:
        data: The object.
        columns: The columns that rows of conversations have.
    """
    if isinstance(data, Mapping):
        return bool(data) and all(has_messages(rows_of_split, columns) for rows_of_split in data.values())
    if hasattr(data, "column_names"):  # a Dataset
        return columns.has(list(getattr(data, "column_names", None) or ()))
    return isinstance(data, list | tuple) and bool(data) and isinstance(data[0], Mapping) and columns.has(list(data[0]))
