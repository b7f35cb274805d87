"""Scores of conversations: response loss and ROUGE-1.

The package rouge-score keeps ASCII letters and digits alone, so that an answer in Greek or Hindi would be empty. Here
words are runs of letters, marks and digits of any script; where a script puts no spaces between words, each character
is one. On ASCII text both agree.

perplexity        exp of the mean loss of a token of the responses
loss, loss_nats   that mean, in nats
rouge1            of a response that the model gives by itself, by the words above
exact_match       whether it says the words of the reference
accuracy          the same, of references that are one of a few labels
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from comingle.models.scoring import Score, perplexity_of

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


JUDGES: Mapping[str, Callable[[str, str], float]] = {
    "accuracy": same_words,
    "exact_match": same_words,
    "rouge1": rouge1,
}
"""How good a response is beside its reference, in [0, 1], by the name of the measure."""


@dataclass(frozen=True, kw_only=True)
class AnswerScore:
    """Sum of losses in nats over the ``tokens`` of the responses of ``samples`` conversations.

    ``judged`` are means over the responses that the model gave by itself, by the names of :data:`JUDGES`; empty where
    it was not asked. ``names`` is what is reported, as far as it is known. ``expert_scores`` as in
    :class:`comingle.models.scoring.Score`.
    """

    loss_nats: float
    tokens: int
    samples: int
    names: tuple[str, ...]
    judged: Mapping[str, float] = field(default_factory=dict)
    expert_scores: tuple[tuple[float, ...], ...] = ()

    @property
    def mean_loss(self) -> float:
        """Mean loss of a token of the responses, in nats; NaN without conversations."""
        return self.loss_nats / self.tokens if self.tokens else math.nan

    @property
    def measures(self) -> dict[str, float]:
        """What is reported; the first is what models are compared by."""
        loss = self.mean_loss
        by_name = {**self.judged, "perplexity": perplexity_of(loss), "loss": loss, "loss_nats": loss}
        return {name: by_name[name] for name in self.names if name in by_name}


def score_answers(score: Score, samples: int, names: Sequence[str]) -> AnswerScore:
    """The score of ``samples`` conversations from the losses of their responses alone."""
    return AnswerScore(
        loss_nats=score.loss_nats,
        tokens=score.tokens,
        samples=samples,
        names=tuple(names),
        expert_scores=score.expert_scores,
    )


def judge(score: AnswerScore, given: Sequence[str], wanted: Sequence[str]) -> AnswerScore:
    """The score with how good the responses are that were ``given`` instead of those ``wanted``."""
    if not given:
        return score
    pairs = list(zip(given, wanted, strict=True))
    names = [name for name in score.names if name in JUDGES]
    return replace(score, judged={name: sum(JUDGES[name](*pair) for pair in pairs) / len(pairs) for name in names})
