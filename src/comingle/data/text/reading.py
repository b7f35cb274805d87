"""Readers of users' text from a recipe or a program: read, split, cut to limits and tokenise."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
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
    REPEATED,
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
    pack,
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
        data: The recipe's section.
        text: Documents of the user.
        tokenizer: Tokenizer of the base model.
    """
    user = pack(text, tokenizer, **limits_for_user(data, text.name))
    return add_validation_to_train(user) if data.train_on_valid else user


def token_limits(data: TextSection, names: Sequence[str]) -> dict[str, dict[str, int | None]]:
    """Return the token limits of each user by recipe key; None is no limit.

    Raises:
        RecipeError: A limit names an unknown user.
    """
    check_limits(data, names)
    return {name: limits_for_user(data, name) for name in names}


def check_limits(data: TextSection, names: Collection[str]) -> None:
    """Check that all limits are for existing users.

    Raises:
        RecipeError: A limit names an unknown user.
    """
    for key in LIMITS:
        given = getattr(data, key)
        for user in given if isinstance(given, Mapping) else ():
            if user not in names:
                hint = did_you_mean(user, names)
                raise RecipeError(f"data.{key}: no user {user!r}; allowed: {list_names(names)}.{hint}")


LIMITS = ("max_train_tokens", "max_valid_tokens", "max_test_tokens")
"""Recipe keys of the token limits of train, valid and test."""


def limits_for_user(data: TextSection, name: str) -> dict[str, int | None]:
    """Return the token limits of a user by recipe key; the limit of the user's own entry overrides the general one.

    A user's entry in the recipe can only limit train.
    """
    given = {key: getattr(data, key) for key in LIMITS}
    limits = {key: limit.get(name) if isinstance(limit, Mapping) else limit for key, limit in given.items()}
    own = data.users[name].max_train_tokens if data.users is not None and name in data.users else None
    return limits if own is None else {**limits, "max_train_tokens": own}


def read_users(data: TextSection, seed: int, bad: BadRows | None = None) -> list[UserText]:
    """Read and split the documents of all users.

    Users without documents are refused, or returned without any if ``data.on_small_user`` is ``skip``.

    Args:
        data: The recipe's section.
        seed: Seed of the splits.
        bad: Collects bad rows; None for a new collection.

    Raises:
        DataError: A source is missing or unreadable, or users without text are refused.
    """
    return list(
        iterate_users(data, seed, ListedRows(), bad or BadRows(data.on_bad_row), DuplicateFilter(data.deduplicate))
    )


def iterate_users(
    data: TextSection,
    seed: int,
    rows: Rows,
    bad: BadRows,
    duplicates: DuplicateFilter,
    given: Mapping[str, object] | None = None,
) -> Generator[UserText, None, None]:
    """Read and split the documents of one user after another.

    Args:
        data: The recipe's section.
        seed: Seed of the splits.
        rows: Groups the rows of a data set by user.
        bad: Collects bad rows.
        duplicates: Drops duplicate documents of a user if the section enables this.
        given: Data of the users if a program passes it: documents, a table, a path, or a mapping from splits to these.

    Raises:
        DataError: A source is missing or unreadable, data is not text, or users without text or bad rows are refused.
    """
    if given is not None:
        readers: Iterable[tuple[str, Reader]] = given_readers(data, given, seed, bad, duplicates).items()
    elif data.dataset is not None:
        readers = _dataset_readers(data, seed, rows, bad, duplicates)
    else:
        readers = user_readers(data, seed, bad, duplicates).items()

    def report() -> None:
        bad.report()
        duplicates.report()

    skips = data.on_small_user == "skip"
    return read_each(readers, lambda name: UserText(name=name, train=()), skips=skips, noun="text", report=report)


Reader = Callable[[], UserText]
"""Function that reads and splits the text of one user."""

ReadUpTo = Callable[[int | None], list[str]]
"""Function that reads documents, up to about this many bytes."""


def _dataset_readers(
    data: TextSection, seed: int, rows: Rows, bad: BadRows, duplicates: DuplicateFilter
) -> Iterator[tuple[str, Reader]]:
    """Yield name and reader of each selected user of a data set, after grouping all rows of the data set by user.

    Args:
        data: The recipe's section, with a data set.
        seed: Seed of the splits.
        rows: Groups the rows by user.
        bad: Collects bad rows.
        duplicates: Drops duplicate documents.

    Raises:
        RecipeError: A token limit names an unknown user.
    """
    assert data.dataset is not None
    selected = group_documents(data.dataset.path, rows, **dataset_options(data.dataset), bad=bad)
    check_limits(data, list(selected))
    for name, splits in rows.groups(selected):
        yield name, partial(split_rows, name, splits, data.split, seed, duplicates, column_advice(data.dataset.split))


def dataset_options(source: DatasetSource) -> dict[str, Any]:
    """Return the section's arguments for :func:`comingle.data.sources.iterate_documents` besides the source."""
    return {
        "user": source.user,
        "text": source.text,
        "split": source.split,
        "users": source.users,
        "name": source.config,
        "max_documents": source.max_documents,
    }


def user_readers(data: TextSection, seed: int, bad: BadRows, duplicates: DuplicateFilter) -> dict[str, Reader]:
    """Return a reader for each user in the recipe; warn of users that train on the same file.

    Args:
        data: The recipe's section.
        seed: Seed of the splits.
        bad: Collects bad rows.
        duplicates: Drops duplicate documents.
    """
    users = data.users or {}
    limits = token_limits(data, list(users))
    # A user trains on `train`, or on part of `path`. The same test file for several users is not a mistake.
    warn_same_files({name: (source.path, source.train) for name, source in users.items()})
    return {
        name: partial(_read_user, name, source, data.split, seed, limits[name], bad, duplicates)
        for name, source in users.items()
    }


def _read_user(
    name: str,
    source: UserSource,
    split: SplitSection,
    seed: int,
    limits: Mapping[str, int | None],
    bad: BadRows,
    duplicates: DuplicateFilter,
) -> UserText:
    """Read and split the documents of a user in the recipe, from one source or from one for each split.

    Args:
        name: Name of the user.
        source: The user's entry in the recipe.
        split: The recipe's section with the fractions.
        seed: Seed of the shuffle.
        limits: Token limits of the user by recipe key, which bound how much is read.
        bad: Collects bad rows.
        duplicates: Drops duplicate documents.
    """

    def reader_of(path: str) -> ReadUpTo:
        return lambda max_bytes: read_documents(path, column=source.column, max_bytes=max_bytes, bad=bad)

    if source.path is not None:
        return split_source(name, reader_of(source.path), split, seed, limits, duplicates)
    paths = {key: path for key in ("train", "valid", "test") if (path := getattr(source, key)) is not None}
    readers = {key: reader_of(path) for key, path in paths.items()}
    return split_sources(name, readers, split, seed, limits, duplicates)


def split_source(
    name: str,
    read: ReadUpTo,
    split: SplitSection,
    seed: int,
    limits: Mapping[str, int | None],
    duplicates: DuplicateFilter,
) -> UserText:
    """Split one source into train, valid and test by fractions.

    Args:
        name: Name of the user.
        read: Reads documents, up to about a given number of bytes.
        split: The recipe's section ``split`` with the fractions ``valid`` and ``test``; the rest is train.
        seed: Seed of the shuffle.
        limits: Token limits of the user by recipe key, such as ``max_train_tokens``; None is no limit. They are used
            only to stop reading once all splits can be full. The caller cuts the splits to them when it tokenises.
        duplicates: Drops duplicate documents.
    """
    max_train, max_valid, max_test = (limits[f"max_{key}_tokens"] for key in ("train", "valid", "test"))
    train_fraction = 1 - split.valid - split.test
    max_bytes = max_read_bytes(
        train=(max_train, train_fraction), valid=(max_valid, split.valid), test=(max_test, split.test)
    )
    whole = {"": read(max_bytes)}  # `drop` takes documents by split; these are not split yet
    documents = duplicates.drop(name, whole, text_of=str)[""]
    return split_by_fractions(documents, valid=split.valid, test=split.test, seed=seed, name=name)


def split_sources(
    name: str,
    readers: Mapping[str, ReadUpTo],
    split: SplitSection,
    seed: int,
    limits: Mapping[str, int | None],
    duplicates: DuplicateFilter,
) -> UserText:
    """Read a user's documents from a separate source for each split.

    Without a source for valid, a fraction of train becomes valid.

    Args:
        name: Name of the user.
        readers: Functions that read the documents, by split.
        split: The recipe's section with the fractions.
        seed: Seed of the shuffle.
        limits: Token limits of the user by recipe key, such as ``max_train_tokens``; None is no limit. Not more bytes
            of a source are read than are needed to reach them.
        duplicates: Drops duplicate documents.
    """
    max_train, max_valid, max_test = (limits[f"max_{key}_tokens"] for key in ("train", "valid", "test"))
    valid_fraction = split.valid if "valid" not in readers else 0.0
    max_bytes = {
        "train": max_read_bytes(train=(max_train, 1 - valid_fraction), valid=(max_valid, valid_fraction)),
        # These sources are used entirely for one split. `max_read_bytes` calls the first split of a source train.
        "valid": max_read_bytes(train=(max_valid, 1.0)),
        "test": max_read_bytes(train=(max_test, 1.0)),
    }
    all_documents = {key: read(max_bytes[key]) for key, read in readers.items()}
    # A duplicate is kept in test, else in valid, so that no held-out document is also trained on.
    documents = duplicates.drop(name, all_documents, text_of=str, held_out=("test", "valid"))
    valid_name = "valid" if "valid" in documents else None
    return split_given(documents, name=name, valid=valid_name, valid_fraction=valid_fraction, seed=seed)


def split_rows(
    name: str,
    splits: Mapping[str, list[str]],
    split: SplitSection,
    seed: int,
    duplicates: DuplicateFilter,
    advice: str = "",
) -> UserText:
    """Split a user's documents of a data set into train, valid and test, by the data set's splits or by fractions.

    Args:
        name: Name of the user.
        splits: The documents by the data set's splits.
        split: The recipe's section ``split``. ``given`` says whether to use the data set's splits, whose names are
            ``train_name``, ``valid_name`` and ``test_name``. Otherwise all documents are split by the fractions
            ``valid`` and ``test``.
        seed: Seed of the shuffle.
        duplicates: Drops duplicate documents.
        advice: Advice in the error message about a missing split.
    """
    # A duplicate is kept in test, else in valid, so that no held-out document is also trained on.
    held_out = (split.test_name, split.valid_name or "")  # "" if the recipe names no validation split
    splits = duplicates.drop(name, splits, text_of=str, held_out=held_out)
    if not split.given:
        documents = [document for documents_of_split in splits.values() for document in documents_of_split]
        return split_by_fractions(documents, valid=split.valid, test=split.test, seed=seed, name=name)
    return split_given(
        splits,
        name=name,
        train=split.train_name,
        valid=split.valid_name,
        test=split.test_name,
        # Validation documents are cut from train only if the recipe names no validation split.
        valid_fraction=0.0 if split.valid_name else split.valid,
        seed=seed,
        advice=advice,
    )


ALLOWED_TEXT = (
    "a list of texts, a file or folder, a datasets.Dataset with a column text, or {train, valid, test} of these"
)
"""Allowed data of a user, for error messages."""

_SPLITS = {"train": "train", "valid": "valid", "validation": "valid", "test": "test"}
"""Splits by allowed key; data sets of the hub use ``validation``."""


def is_user_text(data: object) -> bool:
    """Return whether an object may be one user's text (:data:`ALLOWED_TEXT`), judged by its type and first document."""
    if isinstance(data, Mapping):
        return bool(data) and set(data) <= set(_SPLITS) and all(map(_is_source, data.values()))
    return _is_source(data)


def _is_source(data: object) -> bool:
    """Return whether an object may be documents without splits: a path, a table, or a sequence of texts."""
    if isinstance(data, str | os.PathLike) or _text_column(data) is not None:
        return True
    return isinstance(data, Sequence) and not isinstance(data, bytes) and (not data or isinstance(data[0], str))


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
    data: TextSection, given: Mapping[str, object], seed: int, bad: BadRows, duplicates: DuplicateFilter
) -> dict[str, Reader]:
    """Return a reader for the text of each user that a program passes.

    Args:
        data: The recipe's section.
        given: Data by user, of the types in :data:`ALLOWED_TEXT`.
        seed: Seed of the splits.
        bad: Collects bad rows.
        duplicates: Drops duplicate documents.
    """
    limits = token_limits(data, list(given))
    readers: dict[str, Reader] = {}
    for name, source in given.items():
        if isinstance(source, Mapping):
            sources = {  # `_SPLITS` also maps the key "validation" to "valid"
                _SPLITS[str(split)]: partial(_read_documents_of, bad, name, part) for split, part in source.items()
            }
            readers[name] = partial(split_sources, name, sources, data.split, seed, limits[name], duplicates)
        else:
            read = partial(_read_documents_of, bad, name, source)
            readers[name] = partial(split_source, name, read, data.split, seed, limits[name], duplicates)
    return readers


def _read_documents_of(bad: BadRows, name: str, source: object, max_bytes: int | None) -> list[str]:
    """Return the documents of a user that a program passes, without blank ones.

    Args:
        bad: Collects documents that are not text.
        name: Name of the user.
        source: A path, a ``datasets.Dataset``, or a sequence of texts.
        max_bytes: Stop after about this many bytes of text; None for all.

    Raises:
        NoTextError: There is no text.
        DataError: A path cannot be read.
    """
    if isinstance(source, str | os.PathLike):
        return _read_documents_at(bad, name, os.fspath(source), max_bytes)
    where, documents, left = f"user {name!r}", [], max_bytes
    for document in _iterate_documents(bad, source, where):
        if left is not None and left <= 0:
            break
        left = None if left is None else left - len(document.encode())
        documents.append(document)
    if not documents:
        raise NoTextError(f"{where}: no text; at least one document is needed")
    return documents


def _read_documents_at(bad: BadRows, name: str, path: str, max_bytes: int | None) -> list[str]:
    """Return the documents of a file or folder.

    Args:
        bad: Collects documents that are not text.
        name: Name of the user.
        path: The file or folder.
        max_bytes: Stop after about this many bytes of text; None for all.

    Raises:
        DataError: The path cannot be read.
    """
    try:
        return read_documents(path, max_bytes=max_bytes, bad=bad)
    except (NoTextError, BadRowsError):
        raise
    except DataError as error:
        # A program may have passed a long text as the path; the message contains the path, so it is cut.
        reason = str(error)[:300]
        raise DataError(f"user {name!r}: {reason}; to pass the text itself, give a list of documents") from None


def _iterate_documents(bad: BadRows, source: Any, where: str) -> Iterator[str]:
    """Yield the documents of a table or sequence that are not blank.

    Args:
        bad: Collects documents that are not text.
        source: A ``datasets.Dataset`` with a column of texts, or a sequence of texts.
        where: Name of the user in messages.
    """
    if (column := _text_column(source)) is not None:
        table = table_of(source, where, "train")  # the name of the split is not used
        yield from (document for (document,) in iterate_texts(table, (column,), bad))
        return
    for number, document in enumerate(source, start=1):
        if not isinstance(document, str):
            bad.add(f"{where}: document {number}", f"got {reprlib.repr(document)}; allowed: text")
        elif document.strip():
            yield document


# -------------------------------------------------------------------- encoded users


class LanguageReader(StreamingReader[Read, User]):
    """Reader of users whose data is encoded with the tokenizer of a base model, which is loaded on first use.

    Args:
        data: The recipe's section.
        seed: Seed of the splits.
        load_base: Loads the base model.
        context: Tokens per window, excluding the last target.
        validates: The method needs validation data.
        skips: Skip users with too little data; otherwise such users are an error.
    """

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

        ``context`` is the number of tokens per window, and ``validates`` says whether the method needs validation data.
        With ``skips``, users with too little data are left out; without, they are an error.
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
        """Return what determines how users are encoded and checked; part of the key of cached users.

        This is the tokenizer's digest, the context, and whether users need validation data. If the base model has fewer
        embedding rows than the tokenizer has tokens, the number of rows is added. Users with tokens that have no
        embedding row are refused.
        """
        has_few_rows = self.base.rows < len(tokenizer_of(self.base))  # type: ignore[arg-type]
        embedding_rows = [self.base.rows] if has_few_rows else []
        return [digest_tokenizer(self.base.tokenizer), self.context, self.validates, *embedding_rows]

    def inspect(self, unencoded: Read, user: User) -> None:
        """Check that the base model has an embedding row for each token of the user."""
        require_rows(self.base, user)


def require_rows(base: Base, user: Named) -> None:
    """Check that the base model has an embedding row for each token of a user.

    Args:
        base: The base model; its attribute ``begin`` is the begin-of-text token, or None.
        user: The user, whose attribute for each split is a token stream or an object with padded ``windows``.

    Raises:
        DataError: A token has no embedding row.
    """
    splits = [getattr(user, split) for split in SPLITS]
    tokens_by_split = [split if isinstance(split, torch.Tensor) else split.windows for split in splits]
    begin = [] if base.begin is None else [base.begin]
    for tokens in (begin, *tokens_by_split):
        base.require_rows(tokens, f"user {user.name!r}")


class DocumentsReader(LanguageReader[Read, User]):
    """Reader of users with documents: in files, in rows of a data set, or passed by a program.

    Args:
        data: The recipe's section.
        seed: Seed of the splits.
        load_base: Loads the base model.
        context: Tokens per window, excluding the last target.
        validates: The method needs validation data.
        given: Data by user, if a program passes it.
    """

    documents = "documents"
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

        ``context`` is the number of tokens per window, and ``validates`` says whether the method needs validation data.
        ``given`` has the data of each user if a program passes the data and the recipe names no files.
        """
        skips = data.on_small_user == "skip"
        super().__init__(data, seed, load_base, context=context, validates=validates, skips=skips)
        self.given = given
        self.overlaps = FirstUsers()  # users whose held-out documents are also in their training data
        self.bad, self.duplicates = BadRows(data.on_bad_row), DuplicateFilter(data.deduplicate)

    def sources(self) -> list[str]:
        """Return the paths of users' files, or of the data set."""
        if self.data.dataset is not None:
            path = self.data.dataset.path
            return [path] if isinstance(path, str) else list(path)
        return _paths_of_users(self.data)

    def inspect(self, unencoded: Read, user: User) -> None:
        """Check a user's tokens, and record the user if its held-out documents are also in its training data.

        :meth:`summary` warns of the recorded users.
        """
        super().inspect(unencoded, user)
        text = self.text(unencoded)
        assert text is not None
        overlap = find_overlap(text)
        if overlap.total:
            valid = f"{overlap.valid} of {overlap.valid_documents} validation"
            test = f"{overlap.test} of {overlap.test_documents} test"
            self.overlaps.add(text.name, f"{valid} and {test} {self.documents}")

    def summary(self) -> tuple[dict[str, Any], list[str]]:
        """Return the number of skipped rows, and warnings about skipped users and overlaps."""
        about = {"skipped_rows": self.bad.skipped} if self.bad.skipped else {}
        warnings = list(self.left_out_lines)
        if count := self.overlaps.count:
            warnings.append(f"{count} users have held-out {self.documents} {REPEATED}: {self.overlaps.listed}")
        return about, warnings


class TextReader(DocumentsReader[UserText, UserData]):
    """Reader of users with text, encoded as token streams."""

    too_little = "too little text"
    data: TextSection

    def key(self) -> list[object]:
        """Return what the key of cached users depends on besides their data: the base class's key and one more entry.

        The entry says whether the base model needs a begin-of-text token in front of each window. This token is not
        part of a user's token stream, so a stream that is one token shorter than a window is still long enough. The
        entry therefore affects which users are skipped for having too little text.
        """
        return [*super().key(), *(["begins"] if self.base.begin is not None else [])]

    def read(self, rows: Rows) -> Generator[UserText, None, None]:
        """Yield the documents of each user.

        With ``data.held_out: mixture``, users with too little text are skipped before the others are mixed.
        """
        users = iterate_users(self.data, self.seed, rows, self.bad, self.duplicates, self.given)
        if self.data.held_out != "mixture":
            yield from users
            return
        mixture = Mixture(rows.documents, self.seed)
        try:
            for text in users:
                if not self.skips or self.has_enough(self.encode(text)):
                    mixture.add(text)
            self.require_some()
            self.skips = False  # small users are gone; none may be skipped once its text is in the mixtures
            yield from mixture.texts()
        finally:
            mixture.remove()

    def encode(self, unencoded: UserText) -> UserData:
        """Return the three token streams, cut to the recipe's limits."""
        return tokenise_user(self.data, unencoded, self.tokenizer)

    def shortage(self, user: UserData) -> Shortage | None:
        """Return the first stream that is too short."""
        begins = self.base.begin is not None
        return find_shortage(user, context=self.context, needs_validation=self.validates, begins=begins)

    def refuse(self, small: FirstUsers) -> DataError:
        """Return the error that lists the first small users."""
        return too_short_error(small.first, small.count, self.num_users)

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
    """Check that users in the recipe have enough text for a run, as far as their files are on this machine.

    Skips the check if a source is a demo user, a hub name or a data set, or if a file is missing.

    Args:
        recipe: The recipe.
        data: Its section ``data``.
        validates: The method needs validation data.

    Returns:
        The users that a run would skip, and a note if the check was skipped because files are missing.

    Raises:
        DataError: A run would refuse the text.
        RecipeError: A limit names an unknown user.
    """
    is_local, note = check_local_text(data)
    if not is_local:
        return set(), note
    texts, tokenizer = read_users(data, recipe.data_seed), local_tokenizer(recipe.base)
    if tokenizer is None:  # texts can be read, but their tokens cannot be counted
        return set(), ""
    return _users_with_short_text(recipe, data, texts, tokenizer, validates), ""


def check_local_text(data: TextSection) -> tuple[bool, str]:
    """Return whether all users' files are on this machine, and a note if some are missing.

    False without a note if a source is a demo user or a hub name, or if the recipe does not list users.
    """
    sources = _paths_of_users(data)
    if not sources or any(is_named(source) for source in sources):
        return False, ""
    is_local = all(os.path.exists(os.path.expanduser(source)) for source in sources)
    return is_local, "" if is_local else ABSENT_NOTE


def _users_with_short_text(
    recipe: Recipe, data: TextSection, texts: list[UserText], tokenizer: PreTrainedTokenizerBase, validates: bool
) -> set[str]:
    """Return the names of the users with too little text, which a run would skip.

    Args:
        recipe: The recipe.
        data: The recipe's section ``data``.
        texts: Documents of all users, split but not mixed across users (``data.held_out: mixture``).
        tokenizer: Tokenizer of the base model.
        validates: Whether the method needs validation data.

    Raises:
        DataError: All users have too little text, or some have and ``data.on_small_user`` is not ``skip``.
    """
    context = recipe.training.context
    skips = data.on_small_user == "skip"
    if data.held_out == "mixture" and not skips:  # with skipping, a run tests users before it mixes their text
        texts = mix_held_out(texts, seed=recipe.data_seed)
    # One window per stream shows whether there is enough text, and is quickly tokenised.
    window_tokens = context + 1  # the last token is only a target
    window_limits: dict[str, dict[str, int | None]] = {}
    for name, limits in token_limits(data, [text.name for text in texts]).items():
        window_limits[name] = {key: min(limit or window_tokens, window_tokens) for key, limit in limits.items()}
    users = [pack(text, tokenizer, **window_limits[text.name]) for text in texts]
    users = [add_validation_to_train(user) for user in users] if data.train_on_valid else users
    # If true, windows get a begin-of-text token that the users' streams lack, so a stream may be one token shorter.
    begins = data.add_bos_token and bool(begin_of(tokenizer))
    needed = {"context": context, "needs_validation": validates, "begins": begins}
    small = {user.name for user in users if find_shortage(user, **needed)}
    if not skips or len(small) == len(users):
        check(users, **needed)  # raises an error if there are users with too little text
    return small


def _paths_of_users(data: DocumentsSection) -> list[str]:
    """Return the paths of all users in the recipe, in the order of the users."""
    users = (data.users or {}).values()
    return [path for user in users for path in (user.path, user.train, user.valid, user.test) if path is not None]


def local_tokenizer(base: str) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a base model, without downloading anything.

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
