"""What a user's model makes of conversations: the loss of the responses, and how good those are that it gives itself.

perplexity        exp of the mean loss of a token of the responses
loss, loss_nats   that mean, in nats
rouge1            of a response that the model gives by itself, see :mod:`comingle.evaluation.rouge`
exact_match       whether it says the words of the reference
accuracy          the same, of references that are one of a few labels
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from comingle.evaluation.rouge import rouge1, same_words
from comingle.models.scoring import Score, perplexity_of

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
