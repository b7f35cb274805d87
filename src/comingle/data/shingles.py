"""Near-duplicate text: hashed runs of 13 words, the usual measure of contamination between training and test text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, chain

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


def drop_near_duplicates(documents: Sequence[str]) -> list[str]:
    """The documents that stay when none may repeat the others, cut in two or whole.

    One that equals another repeats it, and one of which a head or a tail of any length, so the whole too, has more than
    half of its shingles in other documents or elsewhere in itself. The shortest goes first, so the longest of several
    versions stays. A document that was kept stays fine, as the rest only shrinks: however the result is split, and
    whichever documents are cut in two for that, none has more than half of its shingles in the other part.
    """
    words = [split_words(document) for document in documents]
    texts = Counter(map(" ".join, words))
    shingles = [hash_shingles([some])[0].tolist() for some in words]
    found = Counter(chain.from_iterable(shingles))
    kept: list[int] = []
    for index in sorted(range(len(documents)), key=lambda index: len(words[index])):
        text, its_shingles = " ".join(words[index]), shingles[index]
        if text and texts[text] == 1 and not _repeats([found[shingle] > 1 for shingle in its_shingles]):
            kept.append(index)
        else:
            texts[text] -= 1
            found.subtract(its_shingles)
    return [documents[index] for index in sorted(kept)]


def _repeats(known: Sequence[bool]) -> bool:
    """Whether more than half of the shingles of some head or tail are known."""
    lengths = range(1, len(known) + 1)
    return any(
        2 * count > length
        for end in (known, known[::-1])
        for count, length in zip(accumulate(end), lengths, strict=True)
    )
