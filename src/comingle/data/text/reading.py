"""Readers of users' text from a recipe or a program: read, split, cut to limits and tokenise."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch

from comingle.config import Recipe, SplitSection
from comingle.config.settings import DataSection
from comingle.data.duplicates import DuplicateFilter, warn_same_files
from comingle.data.files import max_read_bytes
from comingle.data.populations import Named, User
from comingle.data.row_files import BadRows, BadRowsError
from comingle.data.samples.samples import SPLITS
from comingle.data.sources import group_documents, read_documents
from comingle.data.splits import (
    OVERLAP_PHRASE,
    Mixture,
    UserText,
    column_advice,
    find_overlap,
    mix_held_out,
    split_by_fractions,
    split_given,
)
from comingle.data.streaming import FirstUsers, ListedRows, Read, Rows, StreamingReader, read_each
from comingle.data.tables import iterate_texts, table_of
from comingle.data.text.section import DatasetSource, DocumentsSection, TextSection, UserSource
from comingle.data.text.streams import (
    Shortage,
    UserData,
    add_validation_to_train,
    check,
    find_shortage,
    tokenise_splits,
    too_short_error,
)
from comingle.models.base import Base, tokenizer_of
from comingle.models.chat_templates import begin_of
from comingle.models.folders import digest_tokenizer, load_tokenizer
from comingle.models.pretrained import PreTrainedTokenizerBase
from comingle.models.random_bases import RANDOM_BASE_PREFIX, byte_tokenizer
from comingle.utils.errors import DataError, NoTextError, RecipeError, did_you_mean, list_names
from comingle.utils.names import is_named
from comingle.utils.records import expand_home


def tokenise_user(data: TextSection, text: UserText, tokenizer: PreTrainedTokenizerBase) -> UserData:
    """Return a user's text as token streams, cut to the recipe's limits.

    With ``train_on_valid``, the validation stream is appended to the train stream.

    Args:
        data: The section ``data`` of the recipe.
        text: Documents of the user.
        tokenizer: Tokenizer of the base model.
    """
    user = tokenise_splits(text, tokenizer, **limits_for_user(data, text.name))
    if data.train_on_valid:
        return add_validation_to_train(user)
    return user


def token_limits(data: TextSection, names: Sequence[str]) -> dict[str, dict[str, int | None]]:
    """Return how many tokens of each split a user may have at most, by user and recipe key; None is no limit.

    For example ``{"ada": {"max_train_tokens": 50000, "max_valid_tokens": None, "max_test_tokens": None}}``.

    Args:
        data: The section ``data`` of the recipe.
        names: Names of all users.

    Raises:
        RecipeError: A limit names an unknown user.
    """
    check_limits(data, names)
    return {name: limits_for_user(data, name) for name in names}


def check_limits(data: TextSection, names: Collection[str]) -> None:
    """Check that the recipe's token limits by user, such as ``max_train_tokens: {ada: 1000}``, name existing users.

    Args:
        data: The section ``data`` of the recipe.
        names: Names of all users.

    Raises:
        RecipeError: A limit names an unknown user.
    """
    for key in LIMITS:
        limit = getattr(data, key)
        if not isinstance(limit, Mapping):  # one number for all users, or None
            continue
        for user in limit:
            if user not in names:
                hint = did_you_mean(user, names)
                raise RecipeError(f"data.{key}: no user {user!r}; allowed: {list_names(names)}.{hint}")


LIMITS = ("max_train_tokens", "max_valid_tokens", "max_test_tokens")
"""Recipe keys of the token limits of train, valid and test."""


def limits_for_user(data: TextSection, name: str) -> dict[str, int | None]:
    """Return the token limits of a user by recipe key, such as ``{"max_train_tokens": 50000, ...}``; None is no limit.

    ``max_train_tokens`` in the user's own entry overrides the limit for all users.

    Args:
        data: The section ``data`` of the recipe.
        name: Name of the user.
    """
    limits: dict[str, int | None] = {}
    for key in LIMITS:
        limit = getattr(data, key)
        if isinstance(limit, Mapping):  # limits by user
            limit = limit.get(name)
        limits[key] = limit
    if data.users is not None and name in data.users:
        own_limit = data.users[name].max_train_tokens
        if own_limit is not None:
            limits["max_train_tokens"] = own_limit
    return limits


def read_users(data: TextSection, seed: int, bad_rows: BadRows | None = None) -> list[UserText]:
    """Read and split the documents of all users.

    Users without documents are refused; with ``data.on_small_user: skip`` their splits are empty.

    Args:
        data: The section ``data`` of the recipe.
        seed: Seed of the splits.
        bad_rows: Collects bad rows; None for a new collection.

    Raises:
        DataError: A source is missing or unreadable, or users without text are refused.
    """
    bad_rows = bad_rows or BadRows(data.on_bad_row)
    duplicates = DuplicateFilter(data.deduplicate)
    return list(iterate_users(data, seed, ListedRows(), bad_rows, duplicates))


def iterate_users(
    data: TextSection,
    seed: int,
    rows: Rows,
    bad_rows: BadRows,
    duplicates: DuplicateFilter,
    given: Mapping[str, object] | None = None,
) -> Generator[UserText, None, None]:
    """Read and split the documents of one user after another.

    Args:
        data: The section ``data`` of the recipe.
        seed: Seed of the splits.
        rows: Empty store, for ``data.dataset``: a single table with rows of all users, which it groups by user.
        bad_rows: Collects rows that cannot be used, to report them.
        duplicates: Drops duplicate documents of a user if the section enables this.
        given: Data of the users if a program passes it: documents, a table, a path, or a mapping from splits to these.

    Yields:
        Each user's train, valid and test documents; all are empty for a user without text.

    Raises:
        DataError: A source is missing or unreadable, or data is not text. Or, after the last user: users have no text
            and ``data.on_small_user`` is not ``skip``, or there are bad rows and ``data.on_bad_row`` is ``refuse``.
    """
    readers: Iterable[tuple[str, Reader]]
    if given is not None:
        readers = given_readers(data, given, seed, bad_rows, duplicates).items()
    elif data.dataset is not None:
        readers = _dataset_readers(data, seed, rows, bad_rows, duplicates)
    else:
        readers = user_readers(data, seed, bad_rows, duplicates).items()

    def empty_user(name: str) -> UserText:
        return UserText(name=name, train=())

    def report() -> None:
        bad_rows.report()
        duplicates.report()

    skips = data.on_small_user == "skip"
    return read_each(readers, make_empty=empty_user, skips=skips, noun="text", report=report)


Reader = Callable[[], UserText]
"""Function that reads and splits the text of one user."""

ReadUpTo = Callable[[int | None], list[str]]
"""Function that reads documents, up to about this many bytes."""


def _dataset_readers(
    data: TextSection, seed: int, rows: Rows, bad_rows: BadRows, duplicates: DuplicateFilter
) -> Iterator[tuple[str, Reader]]:
    """Group the rows of a data set by user, then yield the name and the reader of each selected user.

    Args:
        data: The recipe's section, with a data set.
        seed: Seed of the splits.
        rows: Store that groups the rows by user.
        bad_rows: Collects rows that cannot be used, to report them.
        duplicates: Drops duplicate documents.

    Raises:
        RecipeError: A token limit names an unknown user.
    """
    assert data.dataset is not None
    names = group_documents(data.dataset.path, rows, **dataset_options(data.dataset), bad_rows=bad_rows)
    check_limits(data, list(names))
    advice = column_advice(data.dataset.split)  # for the error about a user without one of the splits
    for name, documents_by_split in rows.groups(names):
        yield name, partial(split_rows, name, documents_by_split, data.split, seed, duplicates, advice)


def dataset_options(source: DatasetSource) -> dict[str, Any]:
    """Return the keyword arguments of :func:`comingle.data.sources.group_documents` for a recipe's data set."""
    return {
        "user": source.user,
        "text": source.text,
        "split": source.split,
        "users": source.users,
        "name": source.config,
        "max_documents": source.max_documents,
    }


def user_readers(data: TextSection, seed: int, bad_rows: BadRows, duplicates: DuplicateFilter) -> dict[str, Reader]:
    """Return for each user in the recipe a function without arguments that reads and splits the user's text.

    Also warn of users that train on the same file.

    Args:
        data: The section ``data`` of the recipe.
        seed: Seed of the splits.
        bad_rows: Collects rows that cannot be used, to report them.
        duplicates: Drops duplicate documents.
    """
    users = data.users or {}
    limits = token_limits(data, list(users))
    # Not valid and test: users may well be tested on the same file.
    train_sources = {name: (source.path, source.train) for name, source in users.items()}
    warn_same_files(train_sources)
    return {
        name: partial(_read_user, name, source, data.split, seed, limits[name], bad_rows, duplicates)
        for name, source in users.items()
    }


def _read_user(
    name: str,
    source: UserSource,
    split: SplitSection,
    seed: int,
    limits: Mapping[str, int | None],
    bad_rows: BadRows,
    duplicates: DuplicateFilter,
) -> UserText:
    """Read and split the documents of a user in the recipe, from one source or from one for each split.

    Args:
        name: Name of the user.
        source: The user's entry in the recipe: ``path``, or ``train``, ``valid`` and ``test``.
        split: The recipe's section with the fractions.
        seed: Seed of the shuffle.
        limits: Token limits of the user by recipe key, which bound how much is read.
        bad_rows: Collects rows that cannot be used, to report them.
        duplicates: Drops duplicate documents.
    """

    def read(path: str, max_bytes: int | None) -> list[str]:
        return read_documents(path, column=source.column, max_bytes=max_bytes, bad_rows=bad_rows)

    if source.path is not None:
        return split_source(name, partial(read, source.path), split, seed, limits, duplicates)
    readers: dict[str, ReadUpTo] = {}
    for key in ("train", "valid", "test"):
        path = getattr(source, key)
        if path is not None:
            readers[key] = partial(read, path)
    return split_sources(name, readers, split, seed, limits, duplicates)


def split_source(
    name: str,
    read: ReadUpTo,
    split: SplitSection,
    seed: int,
    limits: Mapping[str, int | None],
    duplicates: DuplicateFilter,
) -> UserText:
    """Read one source and split its documents into train, valid and test by fractions.

    Reads only as much as the token limits need; the caller cuts the splits to these limits when it tokenises them.

    Args:
        name: Name of the user.
        read: Reads documents, up to about a given number of bytes.
        split: The recipe's section ``split`` with the fractions ``valid`` and ``test``; the rest is train.
        seed: Seed of the shuffle.
        limits: Token limits of the user by recipe key, such as ``max_train_tokens``; None is no limit.
        duplicates: Drops duplicate documents.
    """
    train_fraction = 1 - split.valid - split.test
    max_bytes = max_read_bytes(
        train=(limits["max_train_tokens"], train_fraction),
        valid=(limits["max_valid_tokens"], split.valid),
        test=(limits["max_test_tokens"], split.test),
    )
    documents = read(max_bytes)
    # `drop` takes and returns documents by split. These are not split yet, so they go in under one key.
    kept = duplicates.drop(name, {"all": documents}, text_of=str)
    return split_by_fractions(
        kept["all"], valid=split.valid, test=split.test, seed=seed, name=name, stable=split.stable
    )


def split_sources(
    name: str,
    readers: Mapping[str, ReadUpTo],
    split: SplitSection,
    seed: int,
    limits: Mapping[str, int | None],
    duplicates: DuplicateFilter,
) -> UserText:
    """Read a user's documents from a separate source for each split.

    Without a source for valid, the fraction ``split.valid`` of train becomes valid.

    Args:
        name: Name of the user.
        readers: For each split with a source, a function that reads its documents up to about a number of bytes.
        split: The recipe's section with the fractions.
        seed: Seed of the shuffle.
        limits: Token limits of the user by recipe key, such as ``max_train_tokens``; None is no limit. Only as many
            bytes are read as are needed to reach them.
        duplicates: Drops duplicate documents.
    """
    max_train, max_valid, max_test = (limits[key] for key in LIMITS)
    valid_fraction = split.valid if "valid" not in readers else 0.0
    # The source of train may be divided into train and valid. Each other source is a single split, which
    # `max_read_bytes` treats as a train split that gets the whole source.
    max_bytes = {
        "train": max_read_bytes(train=(max_train, 1 - valid_fraction), valid=(max_valid, valid_fraction)),
        "valid": max_read_bytes(train=(max_valid, 1.0)),
        "test": max_read_bytes(train=(max_test, 1.0)),
    }
    all_documents = {key: read(max_bytes[key]) for key, read in readers.items()}
    # A duplicate is kept in test, else in valid, so that no held-out document is also trained on.
    documents = duplicates.drop(name, all_documents, text_of=str, held_out=("test", "valid"))
    valid_name = "valid" if "valid" in documents else None
    return split_given(
        documents, name=name, valid=valid_name, valid_fraction=valid_fraction, seed=seed, stable=split.stable
    )


def split_rows(
    name: str,
    documents_by_split: Mapping[str, list[str]],
    split: SplitSection,
    seed: int,
    duplicates: DuplicateFilter,
    advice: str = "",
) -> UserText:
    """Split a user's documents from a data set, by the data set's own splits or by fractions.

    Args:
        name: Name of the user.
        documents_by_split: The documents by the data set's splits.
        split: The recipe's section ``split``. With ``given``, the data set's splits ``train_name``, ``valid_name`` and
            ``test_name`` are used; otherwise all documents are split by the fractions ``valid`` and ``test``.
        seed: Seed of the shuffle.
        duplicates: Drops duplicate documents.
        advice: Advice in the error message about a missing split.
    """
    # A duplicate is kept in test, else in valid, so that no held-out document is also trained on.
    held_out = [split.test_name]
    if split.valid_name:
        held_out.append(split.valid_name)
    kept = duplicates.drop(name, documents_by_split, text_of=str, held_out=held_out)
    if not split.given:
        documents = list(chain.from_iterable(kept.values()))
        return split_by_fractions(
            documents, valid=split.valid, test=split.test, seed=seed, name=name, stable=split.stable
        )
    # Validation documents are cut from train only if the recipe names no validation split.
    valid_fraction = 0.0 if split.valid_name else split.valid
    return split_given(
        kept,
        name=name,
        train=split.train_name,
        valid=split.valid_name,
        test=split.test_name,
        valid_fraction=valid_fraction,
        seed=seed,
        stable=split.stable,
        advice=advice,
    )


ALLOWED_TEXT = (
    "a list of texts, a file or folder, a datasets.Dataset with a column text, or {train, valid, test} of these"
)
"""Allowed data of a user, for error messages."""

_SPLIT_OF_KEY = {"train": "train", "valid": "valid", "validation": "valid", "test": "test"}
"""Splits by allowed key; data sets of the hub use ``validation``."""


def may_be_user_text(data: object) -> bool:
    """Return whether an object may be one user's text (:data:`ALLOWED_TEXT`), judged by its type and first document."""
    if isinstance(data, Mapping):
        return bool(data) and set(data) <= set(_SPLIT_OF_KEY) and all(map(_is_source, data.values()))
    return _is_source(data)


def _is_source(data: object) -> bool:
    """Return whether an object may be documents without splits: a path, a table, or a sequence of texts."""
    is_path = isinstance(data, str | os.PathLike)
    is_table = _text_column(data) is not None
    if is_path or is_table:
        return True
    if isinstance(data, bytes) or not isinstance(data, Sequence):
        return False
    is_empty = not data
    return is_empty or isinstance(data[0], str)


def _text_column(data: object) -> str | None:
    """Return the column of a ``datasets.Dataset`` that holds documents: ``text``, or the only column if it has strings.

    Returns:
        The name of the column; None if there is none, or if the object is not a ``Dataset``.
    """
    columns = getattr(data, "column_names", None)
    if not isinstance(columns, list):
        return None
    if "text" in columns:
        return "text"
    if len(columns) != 1:
        return None
    features = getattr(data, "features", None) or {}
    dtype = getattr(features.get(columns[0]), "dtype", "")
    return columns[0] if dtype in ("string", "large_string") else None


def given_readers(
    data: TextSection, given: Mapping[str, object], seed: int, bad_rows: BadRows, duplicates: DuplicateFilter
) -> dict[str, Reader]:
    """Return for each user that a program passes a function without arguments that reads and splits the user's text.

    Args:
        data: The section ``data`` of the recipe.
        given: Data by user, of the types in :data:`ALLOWED_TEXT`; a mapping has a source for each split.
        seed: Seed of the splits.
        bad_rows: Collects rows that cannot be used, to report them.
        duplicates: Drops duplicate documents.
    """
    limits = token_limits(data, list(given))
    readers: dict[str, Reader] = {}
    for name, source in given.items():
        if isinstance(source, Mapping):
            reader_by_split: dict[str, ReadUpTo] = {}
            for key, source_of_split in source.items():
                split = _SPLIT_OF_KEY[str(key)]  # "valid" for "validation"
                reader_by_split[split] = partial(_read_documents_of, bad_rows, name, source_of_split)
            read_user = partial(split_sources, name, reader_by_split)
        else:
            read_user = partial(split_source, name, partial(_read_documents_of, bad_rows, name, source))
        readers[name] = partial(read_user, split=data.split, seed=seed, limits=limits[name], duplicates=duplicates)
    return readers


def _read_documents_of(bad_rows: BadRows, name: str, source: object, max_bytes: int | None) -> list[str]:
    """Return the documents of a user that a program passes, without blank ones.

    Args:
        bad_rows: Collects documents that are not text.
        name: Name of the user.
        source: A path, a ``datasets.Dataset``, or a sequence of texts.
        max_bytes: Stop after about this many bytes of text; None for all.

    Raises:
        NoTextError: There is no text.
        DataError: A path cannot be read.
    """
    if isinstance(source, str | os.PathLike):
        return _read_documents_at(bad_rows, name, os.fspath(source), max_bytes)
    where = f"user {name!r}"
    documents: list[str] = []
    num_bytes = 0
    for document in _iterate_documents(bad_rows, source, where):
        if max_bytes is not None and num_bytes >= max_bytes:
            break
        documents.append(document)
        if max_bytes is not None:
            num_bytes += len(document.encode())
    if not documents:
        raise NoTextError(f"{where}: no text; at least one document is needed")
    return documents


def _read_documents_at(bad_rows: BadRows, name: str, path: str, max_bytes: int | None) -> list[str]:
    """Return the documents of a file or folder that a program passes as a user's data.

    Args:
        bad_rows: Collects documents that are not text.
        name: Name of the user, for error messages.
        path: The file or folder.
        max_bytes: Stop after about this many bytes of text; None for all.

    Raises:
        DataError: The path cannot be read.
    """
    try:
        return read_documents(path, max_bytes=max_bytes, bad_rows=bad_rows)
    except (NoTextError, BadRowsError):
        raise
    except DataError as error:
        # A program may have passed a text of many pages in place of a path, and the message repeats it: cut it.
        reason = str(error)[:300]
        raise DataError(f"user {name!r}: {reason}; to pass the text itself, give a list of documents") from None


def _iterate_documents(bad_rows: BadRows, source: Any, where: str) -> Iterator[str]:
    """Yield the documents of a table or sequence that are not blank.

    Args:
        bad_rows: Collects documents that are not text.
        source: A ``datasets.Dataset`` with a column of texts, or a sequence of texts.
        where: Name of the user in messages.
    """
    column = _text_column(source)
    if column is not None:
        table = table_of(source, where, split="train")  # any name of the split will do: it is not used
        for (document,) in iterate_texts(table, (column,), bad_rows):
            yield document
        return
    for number, document in enumerate(source, start=1):
        if not isinstance(document, str):
            bad_rows.add(f"{where}: document {number}", f"got {reprlib.repr(document)}; allowed: text")
        elif document.strip():
            yield document


# -------------------------------------------------------------------- encoded users


class LanguageReader(StreamingReader[Read, User]):
    """Reader of users whose data is encoded with the tokenizer of a base model, which is loaded on first use."""

    def __init__(
        self,
        data: DataSection,
        seed: int,
        load_base: Callable[[], Base],
        *,
        context: int,
        validates: bool,
        skips: bool = False,
    ):
        """Initialise the reader, without loading the base model yet.

        Args:
            data: The section ``data`` of the recipe.
            seed: Seed of the splits.
            load_base: Loads the base model.
            context: Number of tokens that the model reads at once.
            validates: The method needs validation data, so a user without it has too little data.
            skips: Skip users with too little data; otherwise such users are an error.
        """
        super().__init__(data, seed, skips=skips)
        self.load_base, self.context, self.validates = load_base, context, validates

    @cached_property
    def base(self) -> Base:  # type: ignore[override] (loaded once)
        """Base model, loaded on first access."""
        return self.load_base()

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer of the base model.

        Raises:
            DataError: The base model has none.
        """
        return tokenizer_of(self.base)

    def key(self) -> list[object]:
        """Return settings that affect how users are encoded and checked, as part of the key of the cache of users.

        They are the tokenizer's digest, the context, and whether users need validation data. If the base model has
        fewer embedding rows than the tokenizer has tokens, their number is added, as users with other tokens are
        refused.
        """
        settings: list[object] = [digest_tokenizer(self.base.tokenizer), self.context, self.validates]
        num_tokens = len(tokenizer_of(self.base))  # type: ignore[arg-type]
        if self.base.rows < num_tokens:
            settings.append(self.base.rows)
        return settings

    def inspect(self, unencoded: Read, user: User) -> None:
        """Check that the base model has an embedding row for each token of the user."""
        require_rows(self.base, user)


def require_rows(base: Base, user: Named) -> None:
    """Check that the base model's embedding has a row for each token of a user.

    Args:
        base: The pretrained model, with its tokenizer if it has one.
        user: User with an attribute for each split: a token stream, or an object with padded ``windows``.

    Raises:
        DataError: A token has no embedding row.
    """
    where = f"user {user.name!r}"
    if base.begin is not None:  # the begin-of-text token, which is put in front of each window
        base.require_rows([base.begin], where)
    for split in SPLITS:
        data_of_split = getattr(user, split)
        is_stream = isinstance(data_of_split, torch.Tensor)
        tokens = data_of_split if is_stream else data_of_split.windows
        base.require_rows(tokens, where)


class DocumentsReader(LanguageReader[Read, User]):
    """Reader of users with documents: in files, in rows of a data set, or passed by a program."""

    documents_noun = "documents"
    """Plural noun for what users have."""
    data: Any

    def __init__(
        self,
        data: DocumentsSection,
        seed: int,
        load_base: Callable[[], Base],
        *,
        context: int,
        validates: bool,
        given: Mapping[str, object] | None = None,
    ):
        """Initialise the reader, without loading the base model yet.

        Args:
            data: The section ``data`` of the recipe.
            seed: Seed of the splits.
            load_base: Loads the base model.
            context: Number of tokens that the model reads at once.
            validates: The method needs validation data, so a user without it has too little data.
            given: Data by user, if a program passes it instead of naming files in the recipe.
        """
        skips = data.on_small_user == "skip"
        super().__init__(data, seed, load_base, context=context, validates=validates, skips=skips)
        self.given = given
        self.overlaps = FirstUsers()  # users whose held-out documents are also in their training data
        self.bad_rows, self.duplicates = BadRows(data.on_bad_row), DuplicateFilter(data.deduplicate)

    def sources(self) -> list[str]:
        """Return the paths of users' files, or of the data set."""
        if self.data.dataset is None:
            return _paths_of_users(self.data)
        path_or_paths = self.data.dataset.path
        if isinstance(path_or_paths, str):
            return [path_or_paths]
        return list(path_or_paths)

    def inspect(self, unencoded: Read, user: User) -> None:
        """Check a user's tokens, and record the user for a warning if held-out documents are also in its training data.

        Args:
            unencoded: The user before encoding.
            user: The user as tokens.
        """
        super().inspect(unencoded, user)
        text = self.text(unencoded)
        assert text is not None
        overlap = find_overlap(text)
        if overlap.total > 0:
            valid = f"{overlap.valid} of {overlap.valid_documents} validation"
            test = f"{overlap.test} of {overlap.test_documents} test"
            self.overlaps.add(text.name, f"{valid} and {test} {self.documents_noun}")

    def summary(self) -> tuple[dict[str, Any], list[str]]:
        """Return facts about all users, and warnings.

        Returns:
            ``{"skipped_rows": 3}``, empty if no row was skipped; and warnings about skipped users, and about users
            whose held-out documents are also in their training data.
        """
        facts: dict[str, Any] = {}
        if self.bad_rows.skipped:
            facts["skipped_rows"] = self.bad_rows.skipped
        warnings = list(self.skip_warnings)
        users = self.overlaps
        if users.count > 0:
            warnings.append(f"{users.count} users have held-out {self.documents_noun} {OVERLAP_PHRASE}: {users.listed}")
        return facts, warnings


class TextReader(DocumentsReader[UserText, UserData]):
    """Reader of users with text, encoded as token streams."""

    too_little = "too little text"
    data: TextSection

    def key(self) -> list[object]:
        """Return the parts of the cache key of the encoded users that follow from settings of this reader.

        "begins" is one of them if a begin-of-text token is put in front of each window of tokens. A user then needs one
        token less, so users can have enough text that are too small without it.
        """
        settings = super().key()
        if self.base.begin is not None:
            settings.append("begins")
        return settings

    def read(self, rows: Rows) -> Generator[UserText, None, None]:
        """Yield the documents of each user.

        With ``data.held_out: mixture``, valid and test are mixtures of all users' documents, without those of users
        that are skipped for too little text.

        Args:
            rows: Empty store for the rows of a data set and for the documents to mix.
        """
        users = iterate_users(self.data, self.seed, rows, self.bad_rows, self.duplicates, self.given)
        if self.data.held_out != "mixture":
            yield from users
            return
        mixture = Mixture(rows.new_document_lists, self.seed)
        try:
            for text in users:
                if not self.skips or self.admit(self.encode(text)):
                    mixture.add(text)
            self.raise_if_all_skipped()
            self.skips = False  # small users are skipped already, and the text of the others is in the mixtures
            yield from mixture.texts()
        finally:
            mixture.remove()

    def encode(self, unencoded: UserText) -> UserData:
        """Return the three token streams, cut to the recipe's limits."""
        return tokenise_user(self.data, unencoded, self.tokenizer)

    def shortage(self, user: UserData) -> Shortage | None:
        """Return the first token stream (train, valid or test) that is too short; None if all are long enough."""
        begins = self.base.begin is not None  # whether a begin-of-text token is put in front of each window of tokens
        return find_shortage(user, context=self.context, needs_validation=self.validates, begins=begins)

    def refuse(self, small_users: FirstUsers) -> DataError:
        """Return the error that lists the first small users."""
        return too_short_error(small_users.first, small_users.count, self.num_users)

    def check(self, user: UserData) -> None:
        """Check that a user has validation text if the recipe trains on it too (``data.train_on_valid``)."""
        if self.data.train_on_valid and not len(user.valid):
            raise DataError(
                f"data.train_on_valid: user {user.name!r} has no validation text; give a valid split or fraction"
            )

    def text(self, unencoded: UserText) -> UserText:
        """Return the documents unchanged."""
        return unencoded


# -------------------------------------------------------------------- checks without a run

ABSENT_NOTE = "Some of the users' text is not on this machine, so no text is checked; a run may refuse it."
"""Note of a check that could not read any text."""


def check_texts(recipe: Recipe, data: TextSection, validates: bool) -> tuple[set[str], str]:
    """Check that users in the recipe have enough text for a run, without downloading anything.

    Checks nothing if a source is a demo user, a hub name or a data set, or if a file or the tokenizer is not on this
    machine.

    Args:
        recipe: Settings of the run.
        data: Its section ``data``.
        validates: The method needs validation data.

    Returns:
        The users that a run would skip; and a note if files are missing, else an empty string.

    Raises:
        DataError: A run would refuse the text.
        RecipeError: A limit names an unknown user.
    """
    is_local, note = check_local_text(data)
    if not is_local:
        return set(), note
    texts = read_users(data, recipe.data_seed)
    tokenizer = local_tokenizer(recipe.base)
    if tokenizer is None:  # tokens cannot be counted
        return set(), ""
    return _users_with_short_text(recipe, data, texts, tokenizer, validates), ""


def check_local_text(data: TextSection) -> tuple[bool, str]:
    """Return whether all users' text is in files on this machine, and a note if some files are missing.

    Demo users, hub names and data sets are not such files: for these the result is False without a note.
    """
    sources = _paths_of_users(data)
    if not sources or any(is_named(source) for source in sources):
        return False, ""
    if all(os.path.exists(os.path.expanduser(source)) for source in sources):
        return True, ""
    return False, ABSENT_NOTE


def _users_with_short_text(
    recipe: Recipe, data: TextSection, texts: list[UserText], tokenizer: PreTrainedTokenizerBase, validates: bool
) -> set[str]:
    """Return the names of the users with too little text, which a run would skip.

    Args:
        recipe: Settings of the run.
        data: The recipe's section ``data``.
        texts: Documents of all users, split but not mixed across users (``data.held_out: mixture``).
        tokenizer: Tokenizer of the base model.
        validates: Whether the method needs validation data.

    Raises:
        DataError: All users have too little text, or some have and ``data.on_small_user`` is not ``skip``.
    """
    context = recipe.training.context
    skips = data.on_small_user == "skip"
    is_mixed = data.held_out == "mixture"
    if is_mixed and not skips:  # a run that skips small users finds them before it mixes the others' text
        texts = mix_held_out(texts, seed=recipe.data_seed)

    # One window per stream is enough to see that no stream is too short.
    window_tokens = context + 1  # the last token is only a target
    limits_by_user = token_limits(data, [text.name for text in texts])
    users: list[UserData] = []
    for text in texts:
        limits = limits_by_user[text.name]
        window_limits = {key: min(limit or window_tokens, window_tokens) for key, limit in limits.items()}
        user = tokenise_splits(text, tokenizer, **window_limits)
        if data.train_on_valid:
            user = add_validation_to_train(user)
        users.append(user)

    begins = data.add_bos_token and bool(begin_of(tokenizer))  # windows get a begin-of-text token in front
    needs = {"context": context, "needs_validation": validates, "begins": begins}
    small_users = {user.name for user in users if find_shortage(user, **needs)}
    if not skips or len(small_users) == len(users):
        check(users, **needs)  # raises an error if there are users with too little text
    return small_users


def _paths_of_users(data: DocumentsSection) -> list[str]:
    """Return the paths of all users in the recipe, in the order of the users."""
    users = (data.users or {}).values()
    return [path for user in users for path in (user.path, user.train, user.valid, user.test) if path is not None]


def local_tokenizer(base: str) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a base model if the model is on this machine, without downloading anything.

    Args:
        base: Name of the base: "random:..." for random weights, a folder, or a name on the Hub.

    Returns:
        The tokenizer; None if the base is not in a folder on this machine.
    """
    if base.startswith(RANDOM_BASE_PREFIX):
        return byte_tokenizer()
    folder = expand_home(base)
    if not os.path.isdir(folder):
        return None
    return load_tokenizer(folder)
