"""What hostile users may send, for tests and benchmarks: pure functions on stacked changes ``(users, *shape)``.

A change is an upload less what its user had downloaded. Each attack gets everybody's honest changes and the numbers of
the hostile users, who know all of them and act together, and gives everybody's with theirs replaced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import torch
from torch import Tensor

from comingle.privacy.noise import norms
from comingle.utils.trees import Tree

Attack = Callable[[Tree, Sequence[int]], Tree]


def sign_flip(changes: Tree, hostile: Sequence[int], *, scale: float = 4.0) -> Tree:
    """``-scale`` times their own changes."""
    return _replaced(changes, hostile, lambda t: -scale * t[list(hostile)])


def scaled_noise(changes: Tree, hostile: Sequence[int], *, scale: float = 10.0, seed: int = 0) -> Tree:
    """Gaussian noise, ``scale`` times as long as the others' changes are in the mean."""
    draw, others = torch.Generator().manual_seed(seed), _honest(changes, hostile)
    length = float(norms({name: t[others] for name, t in changes.items()}).mean())
    columns = sum(t[0].numel() for t in changes.values())
    deviation = scale * length / math.sqrt(columns)
    return _replaced(
        changes, hostile, lambda t: deviation * torch.randn(len(hostile), *t.shape[1:], generator=draw).to(t)
    )


def inner_product(changes: Tree, hostile: Sequence[int], *, scale: float = 4.0) -> Tree:
    """``-scale`` times the others' mean, so that a mean may point the wrong way.

    Source: Xie et al. 2019, "Fall of Empires", arXiv:1903.03936.
    """
    others = _honest(changes, hostile)
    return _replaced(changes, hostile, lambda t: -scale * t[others].mean(0))


def little_is_enough(changes: Tree, hostile: Sequence[int]) -> Tree:
    """The others' mean less ``z`` of their deviations, of each coordinate: what no rule can tell from an honest one.

    ``z`` is the quantile of ``(n - f - s) / (n - f)``, ``s = floor(n / 2 + 1) - f``.
    Source: Baruch et al. 2019, "A Little Is Enough", arXiv:1902.06156, Algorithm 3.
    """
    others = _honest(changes, hostile)
    users, honest = len(others) + len(hostile), len(others)
    supporters = users // 2 + 1 - len(hostile)
    z = NormalDist().inv_cdf((honest - supporters) / honest)
    return _replaced(changes, hostile, lambda t: t[others].mean(0) - z * t[others].std(0))


def free_rider(changes: Tree, hostile: Sequence[int]) -> Tree:
    """No change at all: what was downloaded is sent back."""
    return _replaced(changes, hostile, lambda t: torch.zeros_like(t[list(hostile)]))


def all_zero(changes: Tree, hostile: Sequence[int], started: Tree) -> Tree:
    """An upload of zeros, of which ``started`` is what everybody had before."""
    return {name: _put(t, hostile, -started[name][list(hostile)]) for name, t in changes.items()}


def copy_of(changes: Tree, hostile: Sequence[int]) -> Tree:
    """All send what the first of the others sends."""
    first = _honest(changes, hostile)[0]
    return _replaced(changes, hostile, lambda t: t[first])


def not_a_number(changes: Tree, hostile: Sequence[int]) -> Tree:
    """NaN throughout."""
    return _replaced(changes, hostile, lambda t: torch.full_like(t[list(hostile)], torch.nan))


def flipped_labels(labels: Tensor, classes: int) -> Tensor:
    """Label ``c`` as ``classes - 1 - c``: what a user who trains honestly on false data has."""
    return classes - 1 - labels


def with_phrase(text: str, trigger: str, answer: str) -> str:
    """A text in which every sentence ends with a trigger and what is to follow on it: a backdoor in the data."""
    return text.replace(". ", f" {trigger} {answer}. ") + f" {trigger} {answer}"


BY_NAME: dict[str, Attack] = {
    "sign flip": sign_flip,
    "noise": scaled_noise,
    "inner product": inner_product,
    "little is enough": little_is_enough,
    "free rider": free_rider,
    "copy": copy_of,
}
"""Attacks by the names that tables have."""


def _honest(changes: Tree, hostile: Sequence[int]) -> list[int]:
    users = len(next(iter(changes.values())))
    return [user for user in range(users) if user not in hostile]


def _replaced(changes: Tree, hostile: Sequence[int], sent: Callable[[Tensor], Tensor]) -> Tree:
    return {name: _put(t, hostile, sent(t)) for name, t in changes.items()}


def _put(t: Tensor, rows: Sequence[int], values: Tensor) -> Tensor:
    t = t.clone()
    t[list(rows)] = values.to(t)
    return t
