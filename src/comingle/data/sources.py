"""Sources of a user's documents, and documents that occur twice.

Rows are loaded by :mod:`comingle.data.tables`.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Int64, UInt64

from comingle.data.files import check_regular, has_rows, is_saved, read_text_file, read_text_folder, warn_longer
from comingle.data.row_files import BadRows
from comingle.data.tables import choose_users, iterate_texts, read_tables
from comingle.utils.errors import DataError, NoTextError
from comingle.utils.names import HUB_PREFIX, is_named, name_problem, parse_hub_name
from comingle.utils.records import expand_home

SHINGLE_WORDS = 13
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no word of a shingle is lost modulo 2**64


def split_words(document: str) -> list[str]:
    """The words of a document; case and white space do not count."""
    return document.casefold().split()


def hash_shingles(
    documents: Sequence[list[str]],
) -> tuple[UInt64[np.ndarray, " shingles"], Int64[np.ndarray, " shingles"]]:
    """Hash of every run of 13 words inside a document, ``sum_k m^(12-k) hash(word_k) mod 2**64``, and its document.

    All documents at once, in 13 passes over one array. Python's hash of a string is salted per process, so the values
    are for comparison within one process only.
    """
    lengths = [len(words) for words in documents]
    flat = np.fromiter((hash(word) for words in documents for word in words), np.int64, sum(lengths)).view(np.uint64)
    owner = np.repeat(np.arange(len(documents), dtype=np.int64), lengths)
    count = max(0, len(flat) - SHINGLE_WORDS + 1)
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(SHINGLE_WORDS):
        hashes = hashes * _MULTIPLIER + flat[offset : offset + count]
    first, last = owner[:count], owner[len(owner) - count :]
    return hashes[first == last], first[first == last]


T = TypeVar("T")

_LISTED = 10
_PIECE = 1 << 20

logger = logging.getLogger("comingle")


class Repeated:
    """Documents that a user has more than once, of which one is kept where ``data.deduplicate`` asks for it."""

    def __init__(self, drops: bool = False):
        self.drops, self.counts = drops, Counter[str]()

    def drop(
        self, name: str, parts: Mapping[str, Sequence[T]], words: Callable[[T], str], *, held_out: Sequence[str] = ()
    ) -> dict[str, list[T]]:
        """Remove a user's duplicate documents, ignoring case and white space; does nothing unless ``drops``.

        Args:
            name: the user.
            parts: documents by split.
            words: returns the text of a document.
            held_out: splits in decreasing priority; a document in several splits is kept in the first of these.
        """
        if not self.drops:
            return {split: list(documents) for split, documents in parts.items()}
        seen: set[bytes] = set()
        kept: dict[str, list[T]] = {split: [] for split in parts}
        for split in sorted(parts, key=lambda split: [*held_out, split].index(split)):
            for document in parts[split]:
                text = " ".join(words(document).casefold().split())
                digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
                if digest not in seen:
                    kept[split].append(document)
                    seen.add(digest)
                else:
                    self.counts[name] += 1
        return kept

    def settle(self) -> None:
        """Say how many documents were left out, and of which users."""
        if self.counts:
            listed = ", ".join(f"{name!r} ({count})" for name, count in list(self.counts.items())[:_LISTED])
            more = f" and {len(self.counts) - _LISTED} more users" if len(self.counts) > _LISTED else ""
            told = "data.deduplicate: %d repeated documents or conversations are left out: %s%s"
            logger.warning(told, self.counts.total(), listed, more)
            self.counts.clear()


def warn_same_files(sources: Mapping[str, Iterable[str | None]]) -> None:
    """Say which users train on the same file, or on copies of one; ``sources`` are those of each user."""
    owners: dict[str, list[str]] = {}
    for name, source in ((name, source) for name, some in sources.items() for source in some if source):
        place = source if is_named(source) else os.path.realpath(os.path.expanduser(source))
        owners.setdefault(place, []).append(name)
    sizes = Counter(os.path.getsize(place) for place in owners if os.path.isfile(place))
    by_content: dict[str, list[str]] = {}
    for place, names in owners.items():
        alone = not os.path.isfile(place) or sizes[os.path.getsize(place)] < 2 or not os.path.getsize(place)
        by_content.setdefault(place if alone else _digest(Path(place)), []).extend(names)
    same = [names for names in by_content.values() if len(set(names)) > 1]
    if same:
        listed = "; ".join(" and ".join(map(repr, dict.fromkeys(names[:_LISTED]))) for names in same[:_LISTED])
        more = f"; and {len(same) - _LISTED} more files" if len(same) > _LISTED else ""
        logger.warning("data.users: users have the same file, or copies of one: %s%s", listed, more)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


Groups = dict[str, dict[str, list[str]]]
"""Documents by user and split."""


def read_documents(
    path: str | Path, *, column: str = "text", most: int | None = None, bad: BadRows | None = None
) -> list[str]:
    """Read the documents of one user.

    - A folder: each text file below it is a document (:func:`comingle.data.files.read_text_folder`); a folder written
      by ``save_to_disk``: its rows.
    - A ``.jsonl``, ``.json``, ``.csv``, ``.tsv`` or ``.parquet`` file: ``column`` of its rows.
    - Any other file: blocks of paragraphs (:func:`comingle.data.files.read_text_file`).
    - ``demo:NAME``: a demo user.
    - ``hub:NAME?config=C&split=S&documents=N``: ``column`` of the rows of a data set of the hub; all splits unless one
      is named; with ``documents`` the rows are streamed, and no more of them are fetched than that.

    Files may be compressed by ``.xz`` or ``.gz``. Blank documents are dropped. With ``most`` reading ends after about
    so many bytes of text, which is said in a warning. ``bad`` collects rows that cannot be used; without it they are
    refused.

    Raises:
        NoTextError: no text at all.
        DataError: no such path or column, what is neither file nor folder, or an unreadable file.
    """
    collected = bad or BadRows()
    if str(path).startswith(HUB_PREFIX):
        documents = _read_rows(str(path), column, parse_hub_name(str(path)).documents, most, collected)
    elif is_named(str(path)):
        from comingle.data.demo import read_demo

        documents = read_demo(str(path))
    else:
        path = expand_home(path)
        check_regular(path)
        documents = [document for document in _read_path(path, column, most, collected) if document.strip()]
    if bad is None:
        collected.settle()
    if not documents:
        raise NoTextError(f"{path}: no text in it, a user needs at least one document")
    return documents


def read_dataset(
    source: str | Path | Sequence[str | Path],
    *,
    user: str,
    text: str = "text",
    users: Sequence[str] | int | None = None,
    **options: Any,
) -> Groups:
    """Rows of a data set grouped by a column, as :func:`iterate_documents` reads them: documents by user and split.

    Users are in the order in which they are wanted, or in that of their first rows.

    Raises:
        DataError: an unknown source, column or user, a name that cannot be one, unreadable rows, or no rows at all.
    """
    where, groups = where_of(source), Groups()
    for owner, split, document in iterate_documents(source, user=user, text=text, users=users, **options):
        groups.setdefault(owner, {}).setdefault(split, []).append(document)
    if not groups:
        if (bad := options.get("bad")) is not None:
            bad.settle()
        raise no_texts(source, text, user, name=options.get("name"), data_files=options.get("data_files"))
    groups = choose_users(groups, users, where)
    if problem := name_problem(groups):
        raise DataError(f"{where}: column {user!r}: {problem}")
    return groups


def no_texts(source: str | Path | Sequence[str | Path], text: str, user: str, **options: Any) -> DataError:
    """Return the error for a source in which no row has both a text and a user."""
    if any(True for table in read_tables(source, **options) for _ in table.read(BadRows("skip"), None)):
        return DataError(f"{where_of(source)}: no row has both text in column {text!r} and a user in column {user!r}")
    return DataError(f"{where_of(source)}: no rows in it")


def where_of(source: str | Path | Sequence[str | Path]) -> str:
    """Return how messages name a source."""
    return str(source) if isinstance(source, str | Path) else ", ".join(map(str, source))


def iterate_documents(
    source: str | Path | Sequence[str | Path],
    *,
    user: str,
    text: str = "text",
    split: str | None = None,
    users: Sequence[str] | int | None = None,
    name: str | None = None,
    data_files: str | Sequence[str] | Mapping[str, Any] | None = None,
    max_documents: int | None = None,
    bad: BadRows | None = None,
) -> Iterator[tuple[str, str, str]]:
    """Owner, split and document of the rows of a data set, one after another.

    Args:
        source: a local file, several files, a folder of them, a folder written by ``save_to_disk``, or a hub name,
            plain or as ``hub:NAME?config=C&split=S``.
        user: the column that names a row's user; class labels give their names, numbers their digits; ``meta.set`` is
            the field ``set`` of a column ``meta``.
        text: the column with the document.
        split: the column that names a row's split; without it, the data set's own splits (a plain file is "train").
        users: the users wanted, in this order, or how many of the first; without it all, by their first rows.
        name: configuration of a hub data set.
        data_files: passed on to ``datasets.load_dataset``.
        max_documents: keep that many first documents of each user and split. Rows of ``hub:NAME`` are then streamed,
            and with ``users`` no further than until all of them have that many.
        bad: collects rows that cannot be used; without it they are refused when reading ends.

    Rows without text, user or split are dropped.

    Raises:
        DataError: an unknown source or column, or unreadable rows.
    """
    where = where_of(source)
    if where.startswith(HUB_PREFIX) and parse_hub_name(where).documents:
        raise DataError(f"{where}: documents is for a single user's source; here, max_documents says how many")
    columns = [text, user] if split is None else [text, user, split]
    counts: dict[str, Counter[str]] = {}
    collected = bad or BadRows()
    for table in read_tables(source, name=name, data_files=data_files, stream=max_documents is not None):
        yield from _kept(counts, iterate_texts(table, columns, collected), table.split, users, max_documents)
    if bad is None:
        collected.settle()


def _kept(
    counts: dict[str, Counter[str]],
    rows: Iterable[Sequence[str]],
    own_split: str,
    users: Sequence[str] | int | None,
    most: int | None,
) -> Iterator[tuple[str, str, str]]:
    """The rows of one split, maybe each with a split of its own; where they are limited ``counts`` says how many."""
    named = set(users) if isinstance(users, Sequence) else None
    number = users if named is None else len(named)
    limited = most is not None or isinstance(users, int)
    complete: set[str] = set()  # those who are wanted and have all they may have of this split
    for document, owner, *row_split in rows:
        split = row_split[0] if row_split else own_split
        if not limited:
            yield owner, split, document
            continue
        if isinstance(users, int) and owner not in counts and len(counts) == users:
            continue
        of_user = counts.setdefault(owner, Counter())
        if most is None or of_user[split] < most:
            of_user[split] += 1
            yield owner, split, document
        if not row_split and of_user[split] == most and (named is None or owner in named):
            complete.add(owner)
            if len(complete) == number:
                return


def _read_rows(source: str, column: str, count: int | None, most: int | None, bad: BadRows) -> list[str]:
    """Read the documents of the first ``count`` rows (None: of all rows), of about ``most`` bytes at most."""
    documents: list[str] = []
    left = math.inf if most is None else most
    tables = read_tables(source, stream=count is not None)
    rows = (document for table in tables for (document,) in iterate_texts(table, [column], bad))
    for document in islice(rows, count):
        if left <= 0:
            warn_longer(source, most or 0)
            break
        documents.append(document)
        left -= len(document.encode(errors="replace"))
    return documents


def _read_path(path: Path, column: str, most: int | None, bad: BadRows) -> Iterator[str]:
    if path.is_dir() and not is_saved(path):
        yield from read_text_folder(path, most=most)
    elif path.is_dir() or has_rows(path):
        yield from _read_rows(str(path), column, None, most, bad)
    else:
        yield from read_text_file(path, most=most)
