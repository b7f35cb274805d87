"""Scores of conversations: response loss, ROUGE-1 and exact match.

Measures:

- ``loss``, ``loss_nats``: mean loss per response token, in nats.
- ``perplexity``: exp of that mean.
- ``rouge1``: ROUGE-1 of the generated response.
- ``exact_match``: whether the generated response has the same words as the reference.
- ``accuracy``: the same, if all references are one of a few labels.

The package rouge-score keeps only ASCII letters and digits, so a Greek or Hindi response would be empty. Here a word is
a run of letters, marks and digits of any script. In scripts without spaces between words, each character is a word. On
ASCII text both definitions agree.
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
"""First words of the Unicode names of characters whose scripts have no spaces between words."""


def split_words(text: str) -> list[str]:
    """Return the words of a text, to compare a generated response with the expected one.

    The words are normalised by NFKC and in lower case, with marks attached to their letters.
    """
    words: list[str] = []
    last_word_is_open = False  # the next letter or digit continues it
    for character in unicodedata.normalize("NFKC", text).lower():
        category = unicodedata.category(character)[0]
        is_mark, is_letter_or_number = category == "M", category in "LN"  # a mark is, for example, an accent
        if is_mark:
            if words and (last_word_is_open or _is_unspaced(words[-1][0])):  # else there is no letter to attach it to
                words[-1] += character
        elif not is_letter_or_number:
            last_word_is_open = False
        elif _is_unspaced(character):  # a word by itself, such as a Chinese character
            words.append(character)
            last_word_is_open = False
        elif last_word_is_open:
            words[-1] += character
        else:
            words.append(character)
            last_word_is_open = True
    return words


@lru_cache(maxsize=4096)
def _is_unspaced(character: str) -> bool:
    """Return whether a character belongs to a script without spaces between words, such as Chinese.

    Each such character counts as a word when texts are compared.
    """
    return unicodedata.name(character, "").startswith(_UNSPACED)


def rouge1(answer: str, reference: str) -> float:
    """Return the F-measure of ROUGE-1, ``2 P R / (P + R)``, in [0, 1]; 0 if no words are shared.

    P and R are the fractions of the words of the answer and of the reference that occur in both, counted with
    multiplicity.
    """
    answer_words, reference_words = Counter(split_words(answer)), Counter(split_words(reference))
    num_shared = (answer_words & reference_words).total()
    if num_shared == 0:
        return 0.0
    # With P = shared / answer and R = shared / reference, 2 P R / (P + R) = 2 shared / (answer + reference).
    return 2 * num_shared / (answer_words.total() + reference_words.total())


def same_words(answer: str, reference: str) -> bool:
    """Return whether an answer equals the reference, ignoring case, spaces and punctuation."""
    return split_words(answer) == split_words(reference)


JUDGES: Mapping[str, Callable[[str, str], float]] = {
    "accuracy": same_words,
    "exact_match": same_words,
    "rouge1": rouge1,
}
"""Functions that score a response against its reference in [0, 1], by name of the measure."""


@dataclass(frozen=True, kw_only=True)
class AnswerScore:
    """Score of the responses of one user.

    Args:
        loss_nats: Sum of the losses of response tokens, in nats.
        tokens: Number of response tokens.
        samples: Number of conversations.
        names: Measures to report, as far as they are available.
        judged: Means over the generated responses, by the names of :data:`JUDGES`; empty if none were generated.
        expert_scores: For each layer, each expert's mean gate over the response tokens; empty without routers.
    """

    loss_nats: float
    tokens: int
    samples: int
    names: tuple[str, ...]
    judged: Mapping[str, float] = field(default_factory=dict)
    expert_scores: tuple[tuple[float, ...], ...] = ()

    @property
    def mean_loss(self) -> float:
        """Mean loss per response token, in nats; NaN without conversations."""
        return self.loss_nats / self.tokens if self.tokens else math.nan

    @property
    def measures(self) -> dict[str, float]:
        """Values to report, by name; the first one compares models."""
        loss = self.mean_loss
        available = {**self.judged, "perplexity": perplexity_of(loss), "loss": loss, "loss_nats": loss}
        return {name: available[name] for name in self.names if name in available}


def score_answers(score: Score, num_conversations: int, measures: Sequence[str]) -> AnswerScore:
    """Return the score of one user's conversations from their losses alone.

    :func:`judge` then adds measures of generated responses, such as ROUGE-1, if there are any.

    Args:
        score: Summed loss of the response tokens, and their number.
        num_conversations: Number of conversations.
        measures: Names of the measures to report, such as "rouge1" and "perplexity". Those that need generated
            responses are reported only after :func:`judge`.
    """
    return AnswerScore(
        loss_nats=score.loss_nats,
        tokens=score.tokens,
        samples=num_conversations,
        names=tuple(measures),
        expert_scores=score.expert_scores,
    )


def judge(score: AnswerScore, generated: Sequence[str], references: Sequence[str]) -> AnswerScore:
    """Return the score extended by the means over the generated responses of measures such as ROUGE-1 and accuracy.

    Args:
        score: Score from the losses; its ``names`` are the measures to report.
        generated: Generated responses; if empty, the score is returned unchanged.
        references: Expected responses, in the same order.
    """
    if not generated:
        return score
    means: dict[str, float] = {}
    for name in score.names:
        if name in JUDGES:
            measure = JUDGES[name]
            values = [measure(answer, reference) for answer, reference in zip(generated, references, strict=True)]
            means[name] = sum(values) / len(values)
    return replace(score, judged=means)
