"""The next token of each row, and how likely it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.models.generation import Sampling, chooser_of


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A token, the log probability that the model gave it, and the likeliest tokens with theirs, likeliest first.

    The probabilities are the model's own, before temperature and the like. ``at``: how long the text is before it.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    at: int = 0


class Chooser:
    """Chooses a row's tokens as ``generate`` does, with a random stream of the row's own."""

    def __init__(
        self, sampling: Sampling, prompt: int, ends: tuple[int, ...], device: torch.device, logprobs: int | None
    ) -> None:
        self.pick: Callable[..., Tensor] = chooser_of(sampling, prompt, ends, device)
        self.plain = not self.pick  # an empty list of processors: the likeliest token
        self.device, self.logprobs = device, logprobs

    def __call__(self, logits: Float[Tensor, " vocab"], tokens: list[int]) -> Chosen:
        """The token after ``tokens``."""
        scores = logits.float().unsqueeze(0)
        if not self.plain:
            scores = self.pick(torch.tensor([tokens], device=self.device), scores.clone())
        token = int(scores.argmax())
        if self.logprobs is None:
            return Chosen(token=token)
        said = logits.float().log_softmax(-1)
        top = said.topk(self.logprobs) if self.logprobs else None
        pairs = () if top is None else tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        return Chosen(token=token, logprob=float(said[token]), top=pairs)
