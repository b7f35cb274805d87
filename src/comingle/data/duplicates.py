"""Duplicate documents of a user, files that several users share, and hashes of shingles."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from jaxtyping import Int64, UInt64

from comingle.utils.names import is_named

SHINGLE_WORDS = 13
"""Number of consecutive words in a shingle."""


_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, hence invertible modulo 2**64: all words affect the hash


def split_words(document: str) -> list[str]:
    """Return the words of a document in folded case, split at white space."""
    return document.casefold().split()


def hash_shingles(
    documents: Sequence[list[str]],
) -> tuple[UInt64[np.ndarray, " shingles"], Int64[np.ndarray, " shingles"]]:
    """Return the hash of every run of 13 words inside a document (a shingle), and the index of its document.

    Documents with many shingles in common are near-duplicates. The hash of the words 0 to 12 of a shingle is
    ``sum_k m^(12-k) hash(word_k) mod 2**64`` with an odd multiplier m. Python salts hashes of strings per process, so
    the values are comparable within one process only.

    Args:
        documents: Words of each document.

    Returns:
        Hashes and document indices, both of shape ``(shingles,)``.
    """
    lengths = [len(words) for words in documents]
    all_words = (hash(word) for words in documents for word in words)
    word_hashes = np.fromiter(all_words, np.int64, sum(lengths)).view(np.uint64)
    document_of_word = np.repeat(np.arange(len(documents), dtype=np.int64), lengths)
    num_runs = max(0, len(word_hashes) - SHINGLE_WORDS + 1)  # runs of 13 words, also across documents
    hashes = np.zeros(num_runs, dtype=np.uint64)
    for k in range(SHINGLE_WORDS):  # Horner's rule, for all runs at once
        hashes = hashes * _MULTIPLIER + word_hashes[k : k + num_runs]
    # Run i has the words i to i + 12.
    document_of_first_word = document_of_word[:num_runs]
    document_of_last_word = document_of_word[len(document_of_word) - num_runs :]
    is_inside = document_of_first_word == document_of_last_word  # not across the border of two documents
    return hashes[is_inside], document_of_first_word[is_inside]


T = TypeVar("T")

_LISTED = 10
"""Number of users or files that a message lists."""
_CHUNK_BYTES = 1 << 20

logger = logging.getLogger("comingle")


class DuplicateFilter:
    """Filter that drops duplicate documents of each user if ``data.deduplicate`` is set.

    Args:
        drops: Drop duplicates; otherwise documents are returned unchanged.
    """

    def __init__(self, drops: bool = False):
        """Create a filter that has dropped no documents yet.

        Args:
            drops: Drop duplicates; if false, :meth:`drop` returns all documents.
        """
        self.drops = drops
        self.counts = Counter[str]()
        """Number of dropped documents, by user."""

    def drop(
        self,
        name: str,
        documents_by_split: Mapping[str, Sequence[T]],
        text_of: Callable[[T], str],
        *,
        held_out: Sequence[str] = (),
    ) -> dict[str, list[T]]:
        """Return a user's documents by split without duplicates; return all of them unless ``drops`` is set.

        Documents that differ only in case and white space are duplicates, within a split or across splits. The dropped
        documents are counted for :meth:`report`.

        Args:
            name: Name of the user.
            documents_by_split: Documents by split.
            text_of: Returns the text of a document.
            held_out: Splits that have priority over others, in descending order. With ``("test", "valid")``, a document
                that is in all three splits stays in test only. Splits that are not listed have the lowest priority, in
                the order of ``documents_by_split``.
        """
        if not self.drops:
            return {split: list(documents) for split, documents in documents_by_split.items()}
        # Held-out splits come first, so that train loses the duplicates.
        first_splits = [split for split in dict.fromkeys(held_out) if split in documents_by_split]
        other_splits = [split for split in documents_by_split if split not in first_splits]
        kept: dict[str, list[T]] = {split: [] for split in documents_by_split}
        seen: set[bytes] = set()  # digests of the documents so far
        for split in [*first_splits, *other_splits]:
            for document in documents_by_split[split]:
                normalised = " ".join(text_of(document).casefold().split())
                digest = hashlib.blake2b(normalised.encode("utf-8", "surrogatepass"), digest_size=16).digest()
                if digest in seen:
                    self.counts[name] += 1
                else:
                    kept[split].append(document)
                    seen.add(digest)
        return kept

    def report(self) -> None:
        """Warn of the number of dropped documents of each user, and reset the counts."""
        if not self.counts:
            return
        first_counts = list(self.counts.items())[:_LISTED]
        listed = ", ".join(f"{name!r} ({count})" for name, count in first_counts)
        if len(self.counts) > _LISTED:
            listed += f" and {len(self.counts) - _LISTED} more users"
        message = "data.deduplicate: dropped %d duplicate documents or conversations: %s"
        logger.warning(message, self.counts.total(), listed)
        self.counts.clear()


def warn_same_files(sources_by_user: Mapping[str, Iterable[str | None]]) -> None:
    """Warn of users who train on the same file or on copies of one, which is usually a mistake in the recipe.

    Args:
        sources_by_user: Train sources of each user, as paths or as names such as ``hub:NAME``; empty ones and None are
            ignored.
    """
    users_by_source: dict[str, list[str]] = {}
    for user, sources in sources_by_user.items():
        for source in filter(None, sources):
            name_or_path = source if is_named(source) else os.path.realpath(os.path.expanduser(source))
            users_by_source.setdefault(name_or_path, []).append(user)

    sizes = {source: os.path.getsize(source) for source in users_by_source if os.path.isfile(source)}
    num_files_of_size = Counter(sizes.values())
    users_by_content: dict[str, list[str]] = {}  # by the digest of a file that may have a copy, else by the source
    for source, users in users_by_source.items():
        size = sizes.get(source, 0)
        # Only files of equal size can be copies, so that most files need not be read.
        may_have_copy = size > 0 and num_files_of_size[size] > 1
        digest_or_source = _digest(Path(source)) if may_have_copy else source
        users_by_content.setdefault(digest_or_source, []).extend(users)

    groups = [users for users in users_by_content.values() if len(set(users)) > 1]  # users with equal content
    if not groups:
        return
    listed_groups: list[str] = []
    for users in groups[:_LISTED]:
        names = dict.fromkeys(users[:_LISTED])  # each once
        listed_groups.append(" and ".join(map(repr, names)))
    listed = "; ".join(listed_groups)
    if len(groups) > _LISTED:
        listed += f"; and {len(groups) - _LISTED} more files"
    logger.warning("data.users: some users have the same file or copies of it: %s", listed)


def _digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()
