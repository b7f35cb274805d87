"""Robust means of stacked uploads ``(users, *shape)``, one function for each published rule.

Krum, Bulyan and the geometric median take all that a user uploads as one vector: distances are sums over its tensors.
Distances are computed from differences in float64, never from products: one huge upload must not round the others'
distances away. Each rule also says how much of each upload counts in what it makes of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from comingle.privacy.clipping import clipped, norms
from comingle.utils.trees import Tree

SMOOTHING, STEPS, ENOUGH = 1e-6, 1000, 1e-9
"""Of the geometric median: the least distance (nu), the most steps, and when a step is too small to go on."""


@dataclass(frozen=True, kw_only=True)
class Combined:
    """What a rule makes of all uploads, and how much of each counts in it, from 0 to 1.

    ``counted`` is 1 or 0 for rules that choose whole uploads, else the share of the coordinates in which an upload's
    own value is used; for the geometric median its weight over the median weight, at most 1.
    """

    tensors: Tree
    counted: Float[Tensor, " users"]


def coordinate_median(uploads: Tree) -> Combined:
    """Of each coordinate by itself the median; of an even number the mean of the two in the middle.

    Source: Yin et al. 2018, arXiv:1803.01498, option I.
    """
    return _by_coordinate(uploads, _middle_of)


def trimmed_mean(uploads: Tree, hostile: int) -> Combined:
    """Of each coordinate by itself the mean without the ``hostile`` smallest and largest.

    Source: Yin et al. 2018, arXiv:1803.01498, option II.
    """
    return _by_coordinate(uploads, lambda t: t.argsort(dim=0, stable=True)[hostile : len(t) - hostile])


def krum(uploads: Tree, hostile: int) -> Combined:
    """The one upload that is first in :func:`krum_order`.

    Source: Blanchard et al. 2017, arXiv:1703.02757.
    """
    return _mean_of(uploads, krum_order(squared_distances(uploads), hostile)[:1])


def multi_krum(uploads: Tree, hostile: int) -> Combined:
    """The mean of the ``n - hostile - 2`` uploads that are first in :func:`krum_order`.

    Source: Blanchard et al. 2017, arXiv:1703.02757, section 4; so many as Damaskinos et al. 2019 (AggregaThor) allow.
    """
    order = krum_order(squared_distances(uploads), hostile)
    return _mean_of(uploads, order[: len(order) - hostile - 2])


def bulyan(uploads: Tree, hostile: int) -> Combined:
    """Krum chooses ``n - 2 hostile`` uploads one by one; of each coordinate the mean of those nearest to the median.

    These are ``n - 4 hostile``. Where few are left to choose from, Krum looks at one neighbour at least.
    Source: El Mhamdi et al. 2018, arXiv:1802.07927, Algorithm 2.
    """
    distances = squared_distances(uploads)
    left, chosen = list(range(len(distances))), list[int]()
    while len(chosen) < len(distances) - 2 * hostile:
        chosen.append(left.pop(krum_order(distances[left][:, left], hostile)[0]))
    count = len(distances) - 4 * hostile
    found = _by_coordinate({name: t[chosen] for name, t in uploads.items()}, lambda t: _nearest(t, count))
    counted = torch.zeros(len(distances), dtype=torch.float64).index_copy(0, torch.tensor(chosen), found.counted)
    return Combined(tensors=found.tensors, counted=counted)


def geometric_median(uploads: Tree, weights: Float[Tensor, " users"]) -> Combined:
    """The point with the least weighted sum of distances, by the smoothed Weiszfeld algorithm; float64.

    ``v = sum_u b_u x_u / sum_u b_u`` with ``b_u = w_u / max(nu, |v - x_u|)``, from the coordinates' medians on instead
    of the mean, which a single upload may have carried off.
    Source: Pillutla et al. 2022, arXiv:1912.13445, Algorithm 2.
    """
    point, pull = {name: _median(t).double() for name, t in uploads.items()}, weights
    for _ in range(STEPS):
        away = norms({name: t.double() - point[name] for name, t in uploads.items()}).clamp(min=SMOOTHING)
        pull = weights.to(away) / away
        after = {name: torch.tensordot((pull / pull.sum()).to(t.device), t.double(), 1) for name, t in uploads.items()}
        moved = norms({name: (t - point[name]).unsqueeze(0) for name, t in after.items()})
        point = after
        if float(moved) <= ENOUGH * float(away.median()):
            break
    return Combined(tensors=point, counted=(pull / pull.quantile(0.5)).clamp(max=1.0).cpu())


def norm_bound(changes: Tree, bound: float | None = None) -> Tree:
    """Changes shortened to an L2 norm of ``bound``, without one to the median of their norms; float64.

    Source: Sun et al. 2019, "Can You Really Backdoor Federated Learning?", arXiv:1911.07963, norm thresholding.
    """
    return clipped(changes, float(norms(changes).quantile(0.5)) if bound is None else bound)


def squared_distances(uploads: Tree) -> Float[Tensor, "users users"]:
    """Of everybody's whole upload from everybody's, float64."""
    parts = [t.double().reshape(len(t), -1) for t in uploads.values()]
    plain = "donot_use_mm_for_euclid_dist"
    return torch.stack([torch.cdist(p, p, compute_mode=plain).square().cpu() for p in parts]).sum(0)


def krum_order(distances: Float[Tensor, "users users"], hostile: int) -> list[int]:
    """Uploads by the sum of their squared distances from their ``n - hostile - 2`` nearest others, least first.

    Two who are each other's only neighbours have the same: then by their distances from all, not by who is first.
    """
    others = distances.clone().fill_diagonal_(torch.inf)
    scores = others.topk(max(1, len(others) - hostile - 2), largest=False).values.sum(1)
    keys = list(zip(scores.tolist(), distances.sum(1).tolist(), strict=True))
    return sorted(range(len(keys)), key=keys.__getitem__)


Chosen = Callable[[Float[Tensor, "users ..."]], Int[Tensor, "chosen ..."]]
"""Of each coordinate by itself, whose values are used."""


def _by_coordinate(uploads: Tree, chosen: Chosen) -> Combined:
    """The means of the values that are chosen, and how often each upload's are."""
    users, tensors = len(next(iter(uploads.values()))), {}
    used = torch.zeros(users, dtype=torch.float64)
    for name, t in uploads.items():
        numbers = chosen(t)
        tensors[name] = _mean(t.gather(0, numbers))
        used += numbers.flatten().bincount(minlength=users).cpu()
    return Combined(tensors=tensors, counted=used / sum(t[0].numel() for t in uploads.values()))


def _mean_of(uploads: Tree, chosen: Sequence[int]) -> Combined:
    """The mean of whole uploads."""
    numbers = torch.tensor(chosen)
    counted = torch.zeros(len(next(iter(uploads.values()))), dtype=torch.float64).index_fill(0, numbers, 1.0)
    return Combined(tensors={name: _mean(t[chosen]) for name, t in uploads.items()}, counted=counted)


def _middle_of(t: Float[Tensor, "users ..."]) -> Int[Tensor, "chosen ..."]:
    middle = (len(t) - 1) // 2
    return t.argsort(dim=0, stable=True)[middle : len(t) - middle]


def _nearest(t: Float[Tensor, "users ..."], count: int) -> Int[Tensor, "chosen ..."]:
    return (t - _median(t)).abs().topk(count, dim=0, largest=False).indices


def _median(t: Float[Tensor, "users ..."]) -> Tensor:
    return _mean(t.gather(0, _middle_of(t)))


def _mean(t: Float[Tensor, "users ..."]) -> Tensor:
    """In float64, so that many users' sum is not rounded; in the uploads' format again."""
    return t.double().mean(0).to(t.dtype)
