"""Readers of users' conversations from a recipe or a program: read, checked and split."""

from __future__ import annotations

import json
import random
import reprlib
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
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
from comingle.data.splits import StableSplits, column_advice, missing_split_error
from comingle.data.streaming import ListedRows, Rows, read_each
from comingle.data.tables import choose_users, field_of, has_column, read_tables, table_of
from comingle.utils.errors import DataError, NoTextError, did_you_mean, list_names
from comingle.utils.names import name_problem
from comingle.utils.seeds import derive

Record = tuple[str, str, Row]
"""Split of a row, its place such as ``chats.jsonl: line 3``, and the row."""


T = TypeVar("T")


def read_records(
    source: str | Sequence[str], *, config: str | None = None, bad_rows: BadRows | None = None
) -> Iterator[Record]:
    """Yield the rows of files, folders, or a data set of the hub.

    Args:
        source: Files, folders or hub names.
        config: Configuration of a data set of the hub.
        bad_rows: Collects rows that cannot be read; None to raise an error for them when reading ends.

    Raises:
        DataError: A source is missing, unknown or unreadable.
    """
    collected = bad_rows or BadRows()
    for table in read_tables(source, name=config):
        for place, row in table.read(collected, None):  # None: all columns
            yield table.split, f"{table.where}: {place}", row
    if bad_rows is None:
        collected.report()


PlacedConversation = tuple[str, Messages]
"""A conversation after its place in the data, such as "chats.jsonl: line 3", for error messages."""


@dataclass(frozen=True, kw_only=True)
class UserConversations:
    """Conversations of one user by split."""

    name: str
    train: tuple[PlacedConversation, ...] = ()
    valid: tuple[PlacedConversation, ...] = ()
    test: tuple[PlacedConversation, ...] = ()


def read_users(data: ConversationsSection, seed: int, bad_rows: BadRows | None = None) -> list[UserConversations]:
    """Read and split the conversations of all users.

    Users without conversations are refused. With ``data.on_small_user: skip`` they are returned with empty splits.

    Args:
        data: The section ``data`` of the recipe.
        seed: Seed of the splits.
        bad_rows: Collects bad rows; None for a new collection.

    Raises:
        DataError: A source is missing or unreadable, or bad rows or users without conversations are refused.
    """
    bad_rows = bad_rows or BadRows(data.on_bad_row)
    duplicates = DuplicateFilter(data.deduplicate)
    return list(iterate_users(data, seed, ListedRows(), bad_rows, duplicates))


def iterate_users(
    data: ConversationsSection,
    seed: int,
    rows: Rows,
    bad_rows: BadRows,
    duplicates: DuplicateFilter,
    given: Mapping[str, object] | None = None,
) -> Generator[UserConversations, None, None]:
    """Read and split the conversations of one user after another.

    Args:
        data: The section ``data`` of the recipe.
        seed: Seed of the splits.
        rows: Empty store, in memory or on disk, that groups the rows of a data set by user.
        bad_rows: Collects rows that cannot be used, to report them.
        duplicates: Drops duplicate conversations of a user if the section enables this.
        given: Each user's rows by the user's name, if a program passes them: a list of rows, a ``Dataset``, a path, or
            a mapping from splits to lists or ``Dataset`` objects. None to read what the section names.

    Raises:
        DataError: A source is missing or unreadable, or bad rows or users without conversations are refused.
    """
    readers: Iterable[tuple[str, Reader]]
    if given is not None:
        readers = given_readers(data, given, bad_rows, duplicates).items()
    elif data.given:
        raise DataError("data.given: a program must pass the users; call comingle.run(recipe, users=...)")
    elif data.dataset is not None:
        readers = _dataset_readers(data, rows, bad_rows, duplicates)
    else:
        readers = file_readers(data, bad_rows, duplicates).items()
    readers_without_arguments = ((name, partial(read, name, seed)) for name, read in readers)

    def empty_user(name: str) -> UserConversations:
        return UserConversations(name=name)

    def report() -> None:
        bad_rows.report()
        duplicates.report()

    skips = data.on_small_user == "skip"
    return read_each(readers_without_arguments, make_empty=empty_user, skips=skips, noun="conversations", report=report)


def given_readers(
    data: ConversationsSection, given: Mapping[str, object], bad_rows: BadRows, duplicates: DuplicateFilter
) -> dict[str, Reader]:
    """Return a function that reads and splits each user's conversations, where a program passes them.

    Args:
        data: The section ``data`` of the recipe.
        given: Each user's data by name: a list of rows, a ``Dataset``, a path, or a mapping from splits to lists or
            ``Dataset`` objects.
        bad_rows: Collects rows that cannot be used, for a report.
        duplicates: Drops duplicate conversations.

    Returns:
        The functions by name of the user; each takes the name and the seed of the splits.

    Raises:
        DataError: A name is not a valid user name.
    """
    if problem := name_problem(given):
        raise DataError(f"users: {problem}")
    readers: dict[str, Reader] = {}
    for name, rows in given.items():
        if isinstance(rows, str | Path):
            readers[name] = partial(read_files, data, bad_rows, duplicates, UserFiles(path=str(rows)))
        elif isinstance(rows, Mapping):
            # The program passes splits: use them instead of the recipe's fractions.
            valid_names = [key for key in ("valid", "validation") if key in rows]
            valid_name = valid_names[0] if valid_names else None
            split_section = data.split.model_copy(update={"given": True, "valid_name": valid_name})
            records_by_split: dict[str, list[Record]] = {}
            for split, rows_of_split in rows.items():
                records_by_split[str(split)] = list(rows_of(rows_of_split, str(split), bad_rows))
            readers[name] = partial(split_records, data, bad_rows, duplicates, records_by_split, split=split_section)
        else:
            records_by_split = {"train": list(rows_of(rows, "train", bad_rows))}  # split by fractions later
            readers[name] = partial(split_records, data, bad_rows, duplicates, records_by_split)
    return readers


def rows_of(rows: Any, split: str, bad_rows: BadRows) -> Iterator[Record]:
    """Yield the rows of a list of mappings or a ``Dataset`` that a program passes as a user's data.

    A row is yielded with its split and a name for error messages, such as ``row 3``.

    Args:
        rows: The list or ``Dataset``.
        split: Split of the rows.
        bad_rows: Collects rows that are not mappings.
    """
    if hasattr(rows, "column_names"):  # a Dataset
        table = table_of(rows, where="", split=split)  # without a name, since the caller names the user in messages
        all_columns = None
        for place, row in table.read(bad_rows, all_columns):
            yield split, place, row
        return
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            bad_rows.add(f"row {number}", f"got {reprlib.repr(row)}; allowed: a mapping with messages")
        else:
            yield split, f"row {number}", row


Reader = Callable[[str, int], UserConversations]
"""Function that reads and splits the conversations of one user, given the name and the seed."""


# -------------------------------------------------------------------- one user


def file_readers(data: ConversationsSection, bad_rows: BadRows, duplicates: DuplicateFilter) -> dict[str, Reader]:
    """Return a function for each user in the recipe that reads its files; warn of users that train on the same file.

    Args:
        data: The section ``data`` of the recipe.
        bad_rows: Collects rows that cannot be used, for a report.
        duplicates: Drops duplicate conversations.

    Returns:
        By name of the user, a function that reads and splits its conversations, given the name and the seed of splits.
    """
    users = data.users or {}
    # Not valid and test: users may well be tested on the same file.
    train_sources = {name: (source.path, source.train) for name, source in users.items()}
    warn_same_files(train_sources)
    return {name: partial(read_files, data, bad_rows, duplicates, source) for name, source in users.items()}


def read_files(
    data: ConversationsSection, bad_rows: BadRows, duplicates: DuplicateFilter, source: UserFiles, name: str, seed: int
) -> UserConversations:
    """Read and split the conversations of a user in the recipe.

    A user has one file (``path``) that is split here, or a file for each split.

    Args:
        data: The section ``data`` of the recipe.
        bad_rows: Collects rows that cannot be used, to report them.
        duplicates: Drops duplicate conversations.
        source: Files of the user.
        name: Name of the user.
        seed: Seed of the splits.
    """
    has_file_per_split = source.path is None
    if has_file_per_split:
        paths = {"train": source.train, "valid": source.valid, "test": source.test}
    else:
        paths = {"train": source.path}  # split below, by fractions
    max_conversations = data.max_conversations_of(name)
    records_by_split: dict[str, list[Record]] = {}
    for split, path in paths.items():
        if path is not None:
            records = islice(read_records(path, bad_rows=bad_rows), max_conversations)
            # The recipe's key is the split, even if the name of the file denotes another one.
            records_by_split[split] = [(split, where, row) for _split_of_file_name, where, row in records]
    valid_name = "valid" if source.valid is not None else None
    split_names = {"train_name": "train", "valid_name": valid_name, "test_name": "test"}
    # `given` keeps the splits of `records_by_split`; otherwise all conversations are split by fractions.
    split_section = data.split.model_copy(update={"given": has_file_per_split, **split_names})
    return split_records(data, bad_rows, duplicates, records_by_split, name, seed, split=split_section)


def split_records(
    data: ConversationsSection,
    bad_rows: BadRows,
    duplicates: DuplicateFilter,
    records_by_split: Mapping[str, Sequence[Record]],
    name: str,
    seed: int,
    *,
    split: SplitSection | None = None,
) -> UserConversations:
    """Read the conversations in a user's rows, and return them as train, valid and test.

    With ``split.given``, the rows keep their splits; a missing valid is cut from train if ``split.valid`` is above 0.
    Otherwise all conversations are shuffled by (seed, name) and split by the fractions.

    Args:
        data: The section ``data`` of the recipe.
        bad_rows: Collects rows that are not conversations.
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
    all_conversations: dict[str, list[PlacedConversation]] = {}
    for key, records in records_by_split.items():
        all_conversations[key] = _conversations(data, bad_rows, name, records[:max_conversations])
    # A duplicate is kept in test, else in valid, so that no held-out conversation is also trained on.
    held_out = [split.test_name]
    if split.valid_name:
        held_out.append(split.valid_name)
    by_split = duplicates.drop(name, all_conversations, _comparable_text, held_out=held_out)
    if not any(by_split.values()):
        raise NoTextError(f"user {name!r}: no conversations; at least one is needed")

    if not split.given:
        conversations = list(chain.from_iterable(by_split.values()))
        train, valid, test = split_by_count(conversations, split.valid, split.test, seed, name, stable=split.stable)
        return UserConversations(name=name, train=train, valid=valid, test=test)

    _check_given_splits(data, by_split, name, split)
    train = tuple(by_split[split.train_name])
    test = tuple(by_split[split.test_name])
    if split.valid_name in by_split:
        valid = tuple(by_split[split.valid_name])
    else:  # cut it from train
        train, valid, _no_test = split_by_count(train, split.valid, test=0.0, seed=seed, name=name, stable=split.stable)
    return UserConversations(name=name, train=train, valid=valid, test=test)


def _check_given_splits(
    data: ConversationsSection, given_splits: Collection[str], name: str, split: SplitSection
) -> None:
    """Check that a user's data has the splits that the recipe names: train, test and, unless train replaces it, valid.

    Args:
        data: The section ``data`` of the recipe.
        given_splits: Names of the splits in the user's data.
        name: Name of the user.
        split: Names of the needed splits; a missing valid is cut from train if the fraction ``valid`` is above 0.

    Raises:
        NoTextError: A split is missing.
    """
    needed = [split.train_name, split.test_name]
    can_cut_valid_from_train = split.valid > 0
    if split.valid_name and not can_cut_valid_from_train:
        needed.insert(1, split.valid_name)
    for split_name in needed:
        if split_name not in given_splits:
            advice = "" if data.dataset is None else column_advice(data.dataset.split)
            raise missing_split_error(name, split_name, given_splits, advice)


def _conversations(
    data: ConversationsSection, bad_rows: BadRows, name: str, records: Iterable[Record]
) -> list[PlacedConversation]:
    """Return the conversations of a user's rows, without those of rows that cannot be used.

    Args:
        data: The section ``data`` of the recipe.
        bad_rows: Collects the rows that cannot be used, and remarks.
        name: Name of the user.
        records: Split, place and values of each row.
    """
    conversations: list[PlacedConversation] = []
    user_and_split: list[str] = []  # columns of a data set that name a row's user and split, and hold no message
    if data.dataset is not None:
        user_and_split = [column for column in (data.dataset.user, data.dataset.split) if column]
    for _split, where, row in records:
        place = f"user {name!r}: {where}"
        with bad_rows.catch(place):  # a ValueError makes the row a bad row
            remark = partial(bad_rows.remark, place)
            messages = messages_of(row, data.columns, used_elsewhere=user_and_split, remark=remark)
            for message in messages:
                if problem := long_word_problem(str(message["content"])):
                    raise ValueError(f"a message holds {problem}")
            _check_labels(messages, data.labels)  # if the recipe has labels, each response must be one
            conversations.append((where, messages))
    return conversations


def _comparable_text(conversation: PlacedConversation) -> str:
    """Return the messages of a conversation as JSON with normalised white space, which is equal for duplicates.

    Args:
        conversation: Place in its source, which is ignored, and messages.
    """
    _place, messages = conversation
    normalised: list[dict[str, object]] = []
    for message in messages:
        fields = dict(message)
        for key, value in message.items():
            if isinstance(value, str):
                fields[key] = " ".join(value.split())
        normalised.append(fields)
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
    conversations: Sequence[PlacedConversation],
    valid: float,
    test: float,
    seed: int,
    name: str,
    *,
    stable: bool = False,
) -> tuple[tuple[PlacedConversation, ...], tuple[PlacedConversation, ...], tuple[PlacedConversation, ...]]:
    """Split conversations by fractions of their number, shuffled by (seed, name).

    Of three or more conversations, a split with a fraction above 0 gets at least one.

    Args:
        conversations: Conversations of the user.
        valid: Fraction of the validation split.
        test: Fraction of the test split.
        seed: Seed of the shuffle.
        name: Name of the user.
        stable: Whether to split in the order of the conversations instead, so that appended ones never move earlier
            ones between splits.

    Returns:
        The train, valid and test splits.

    Raises:
        DataError: The fractions leave nothing to train on.
    """
    if valid + test >= 1:
        raise DataError(f"user {name!r}: split fractions valid={valid}, test={test}: their sum must be below 1")
    if stable:
        splits, by_split = StableSplits(valid, test), dict[str, list[PlacedConversation]](train=[], valid=[], test=[])
        for conversation in conversations:
            split = splits.choose()
            by_split[split].append(conversation)
            splits.add(split, 1)
        return tuple(by_split["train"]), tuple(by_split["valid"]), tuple(by_split["test"])
    shuffled = list(conversations)
    random.Random(derive("split", seed, name)).shuffle(shuffled)
    num_test = _split_size(len(shuffled), test)
    num_valid = _split_size(len(shuffled), valid)
    test_end, valid_end = num_test, num_test + num_valid
    return tuple(shuffled[valid_end:]), tuple(shuffled[test_end:valid_end]), tuple(shuffled[:test_end])


def _split_size(count: int, fraction: float) -> int:
    """Return how many of ``count`` conversations a split with a fraction of them gets.

    It gets at least 1 if the fraction is above 0 and there are three or more conversations.
    """
    minimum = 1 if fraction and count > 2 else 0  # two conversations are too few for three splits
    return max(minimum, round(count * fraction))


# -------------------------------------------------------------------- data sets


def _dataset_readers(
    data: ConversationsSection, rows: Rows, bad_rows: BadRows, duplicates: DuplicateFilter
) -> Iterator[tuple[str, Reader]]:
    """Group the rows of a data set by user, then yield the name of each selected user and a function that reads it.

    Args:
        data: The section ``data`` of the recipe.
        rows: Empty store that groups the rows by user, in memory or as JSON on disk; filled here.
        bad_rows: Collects rows that cannot be read, for a report.
        duplicates: Drops duplicate conversations.

    Yields:
        The user's name, and a function that takes this name and the recipe's seed, and returns the conversations split
        into train, valid and test.

    Raises:
        DataError: No row names a user, or a selected user has no rows.
    """

    def records() -> Iterator[tuple[str, str, Record]]:
        """Yield user, split and content of each row: ``(split, "FILE: line N", values by column)``."""
        for user, record in records_with_users(data, bad_rows):
            split, _file_and_line, _row = record
            yield user, split, record

    def to_json(record: Record) -> bytes:
        return json.dumps(record, default=_placeholder).encode()  # a placeholder for each date and the like

    def from_json(content: bytes) -> tuple[Any, ...]:
        return tuple(json.loads(content))

    assert data.dataset is not None
    rows.fill(records(), pack=to_json, unpack=from_json)
    names = choose_dataset_users(data.dataset, rows.users)
    for name, records_by_split in rows.groups(names):
        yield name, partial(split_records, data, bad_rows, duplicates, records_by_split)


def _placeholder(value: object) -> dict[str, str]:
    """Return a substitute for a value that JSON cannot store, with its type: ``{"": "date"}`` for a date.

    The value itself is not needed, since messages consist of types that JSON has.
    """
    return {"": type(value).__name__}


def records_with_users(data: ConversationsSection, bad_rows: BadRows) -> Iterator[tuple[str, Record]]:
    """Read the rows of a data set of many users, up to the limit of conversations per user and split.

    Rows without a user are skipped.

    Args:
        data: The section ``data`` of the recipe, with a data set.
        bad_rows: Collects rows that cannot be read, for a report.

    Yields:
        The user's name, and the row's split, its place for messages such as "chats.jsonl: line 3", and its values by
        column.

    Raises:
        DataError: No row of a file names a user.
    """
    source = data.dataset
    assert source is not None
    num_rows = Counter[tuple[str, str]]()  # by user and split
    for table in read_tables(source.path, name=source.config):
        columns = list(table.columns or ())  # of a JSON file, those of its first row
        has_user_column = False
        all_columns = None
        for place, row in table.read(bad_rows, all_columns):
            columns = columns or list(row)
            has_user_column = has_user_column or has_column(row, source.user)
            where = f"{table.where}: {place}"
            with bad_rows.catch(where):
                user_and_split = _user_and_split(row, source, table.split)
                if user_and_split is None:
                    continue
                user, split = user_and_split
                num_rows[user, split] += 1
                limit = data.max_conversations_of(user)
                if limit is None or num_rows[user, split] <= limit:
                    yield user, (split, where, row)
        is_empty = not columns
        if not is_empty and not has_user_column:
            hint, found = did_you_mean(source.user, columns), list_names(columns)
            raise DataError(f"{table.where}: no row has a user in column {source.user!r}; found: {found}.{hint}")
    if not num_rows:
        bad_rows.report()  # raises an error if rows are bad, which may be why no row has a user
        raise DataError(f"{_source_label(source)}: no row has a user in column {source.user!r}")


def _user_and_split(row: Row, source: ConversationRows, split_of_table: str) -> tuple[str, str] | None:
    """Return the user and the split of a row; None if either has no value.

    Args:
        row: The row.
        source: The recipe's section, which names the columns.
        split_of_table: Split of the row if the recipe names no column with the split.

    Raises:
        ValueError: A value is not a name.
    """
    user = field_of(row, source.user)
    if user is None:
        return None
    if source.split is None:
        return read_name(user, source.user), split_of_table
    split = field_of(row, source.split)
    if split is None:
        return None
    return read_name(user, source.user), read_name(split, source.split)


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


def may_be_conversations(data: object, columns: Columns) -> bool:
    """Return whether an object may be one user's conversations, judged by its type and first row.

    Conversations are a list of rows, a ``datasets.Dataset``, or a mapping from splits to lists or ``Dataset`` objects.

    Args:
        data: The object.
        columns: The columns that rows of conversations have.
    """
    if isinstance(data, Mapping):
        return bool(data) and all(may_be_conversations(rows_of_split, columns) for rows_of_split in data.values())
    if hasattr(data, "column_names"):  # a Dataset
        names: Any = getattr(data, "column_names", None)
        return columns.has(list(names or ()))
    if not isinstance(data, list | tuple) or not data:
        return False
    first_row = data[0]
    return isinstance(first_row, Mapping) and columns.has(list(first_row))
