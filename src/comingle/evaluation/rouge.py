"""ROUGE-1: how many words an answer and its reference have in common (Lin 2004), in every script.

The package rouge-score keeps ASCII letters and digits alone, so that an answer in Greek or Hindi would be empty. Here
words are runs of letters, marks and digits of any script; where a script puts no spaces between words, each character
is one. On ASCII text both agree.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from functools import lru_cache

_UNSPACED = ("CJK ", "HIRAGANA ", "KATAKANA ", "THAI ", "LAO ", "KHMER ", "MYANMAR ")
"""How the Unicode names of characters begin whose scripts have no spaces between words."""


def split_words(text: str) -> list[str]:
    """The words of a text: compatibility forms as one (NFKC), letters lower-case, marks with the letter they are on."""
    words: list[str] = []
    within = False  # whether the next letter or digit goes on with the last word
    for character in unicodedata.normalize("NFKC", text).lower():
        kind = unicodedata.category(character)[0]
        if kind == "M":
            if words and (within or _is_unspaced(words[-1][0])):
                words[-1] += character
        elif kind not in "LN":
            within = False
        elif _is_unspaced(character):
            words.append(character)
            within = False
        elif within:
            words[-1] += character
        else:
            words.append(character)
            within = True
    return words


@lru_cache(maxsize=4096)
def _is_unspaced(character: str) -> bool:
    return unicodedata.name(character, "").startswith(_UNSPACED)


def rouge1(answer: str, reference: str) -> float:
    """ROUGE-1's F-measure ``2 P R / (P + R)``, in [0, 1]; 0 where nothing is shared.

    P and R are the shares of the words of the answer and of the reference that the other has too, each word as often
    as it occurs in both.
    """
    answered, wanted = Counter(split_words(answer)), Counter(split_words(reference))
    shared = (answered & wanted).total()
    return 2 * shared / (answered.total() + wanted.total()) if shared else 0.0


def same_words(answer: str, reference: str) -> bool:
    """Whether an answer is the reference, but for case, spaces and punctuation."""
    return split_words(answer) == split_words(reference)
