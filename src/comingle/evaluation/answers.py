"""What a user's model makes of questions: the loss of the answers, and how good those are that it gives by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from comingle.evaluation.perplexity import Score
from comingle.evaluation.rouge import rouge1, same_words


@dataclass(frozen=True, kw_only=True)
class AnswerScore:
    """Sum of losses in nats over the ``tokens`` of the answers to ``samples`` questions.

    ``rouge1`` is the mean over the questions of what the model said by itself, in [0, 1], and ``accuracy``, where
    answers are labels, how many of them were right; both are None where it was not asked. ``expert_scores`` as in
    :class:`comingle.evaluation.perplexity.Score`.
    """

    loss_nats: float
    tokens: int
    samples: int
    rouge1: float | None = None
    accuracy: float | None = None
    expert_scores: tuple[tuple[float, ...], ...] = ()

    @property
    def mean_loss(self) -> float:
        """Mean loss of a token of the answers, in nats; NaN without questions."""
        return self.loss_nats / self.tokens if self.tokens else math.nan

    @property
    def measures(self) -> dict[str, float]:
        """What is reported; the first is what models are compared by."""
        by_name = {"accuracy": self.accuracy, "rouge1": self.rouge1, "loss": self.mean_loss}
        return {name: value for name, value in by_name.items() if value is not None}


def score_answers(score: Score, samples: int) -> AnswerScore:
    """The score of ``samples`` questions from the losses of their answers alone."""
    return AnswerScore(
        loss_nats=score.loss_nats, tokens=score.tokens, samples=samples, expert_scores=score.expert_scores
    )


def judge(score: AnswerScore, given: Sequence[str], wanted: Sequence[str], *, labels: bool) -> AnswerScore:
    """The score with how good the answers are that were ``given`` instead of those ``wanted``."""
    if not given:
        return score
    pairs = list(zip(given, wanted, strict=True))
    right = sum(same_words(*pair) for pair in pairs) / len(pairs)
    return replace(score, rouge1=sum(rouge1(*pair) for pair in pairs) / len(pairs), accuracy=right if labels else None)
