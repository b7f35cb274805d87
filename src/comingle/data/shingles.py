"""Near-duplicate text: hashed runs of 13 words, the usual measure of contamination between training and test text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64, UInt64

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
