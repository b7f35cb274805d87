"""FLoRAL's weight sharing (appendix B): the error of aggregated gradients where clusters share a base, and its bound.

Cluster c's model is ``(u, a_c)``; client k has ``f^k(w) = <A_k (w - m_k), w - m_k> / 2``. Aggregation takes the mean
over clients *and* clusters (eq. 25, 26), with weights ``p^k pi_c^k`` and what the routers make of them. The proof takes
two kinds of draws for one gradient: the base's from all clients (eq. 28), an adaptor's from its cluster's (eq. 27).
Here each part of each model has a draw of its own; one that served both would be of one kind or the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

Joint = Float[np.ndarray, "clients clusters"]


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Clients' Hessians and minimisers, shares of the data p(k), true routers, and how many numbers are the base."""

    hessians: Float[np.ndarray, "clients size size"]
    centres: Float[np.ndarray, "clients size"]
    amounts: Float[np.ndarray, " clients"]
    routers: Joint
    base: int

    @property
    def joint(self) -> Joint:
        """``p(k, c) = p(k) pi_c^k``."""
        return self.amounts[:, None] * self.routers

    @property
    def of_cluster(self) -> Joint:
        """``p(k|c)``, a column for each cluster."""
        return self.joint / self.joint.sum(0)


@dataclass(frozen=True, kw_only=True)
class Errors:
    """The expected squared error of the aggregated gradient, and what eq. 31 makes its bound of, at given models.

    ``adaptors`` are the sigma_c^2 of eq. 27, ``base`` the sigma^2 of eq. 28, ``heterogeneity`` the Delta^2 of eq. 29,
    ``moment`` G^2; all are the largest, or the mean that the assumption names, over the models of all clients.
    """

    error: float
    adaptors: Float[np.ndarray, " clusters"]
    base: float
    heterogeneity: float
    moment: float


def sharing_bound(
    problem: Shared, guessed: Joint, *, moment: float, adaptors: Float[np.ndarray, " clusters"], base: float,
    heterogeneity: float,
) -> float:  # fmt: skip
    """Eq. 31: ``2 G^2 E_k |delta^k|_1^2 + 2 E_c[|p_c|^2 sigma_c^2] + 4 sigma^2 sum_c |p o pi_c|^2 + 4 Delta^2``."""
    away = np.abs(problem.routers - guessed).sum(1)
    of_clusters = problem.joint.sum(0) * (problem.of_cluster**2).sum(0) * adaptors
    return float(
        2 * moment * (problem.amounts * away**2).sum()
        + 2 * of_clusters.sum()
        + 4 * base * (problem.joint**2).sum()
        + 4 * heterogeneity
    )


def gradient_error(problem: Shared, guessed: Joint, models: Float[np.ndarray, "clients clusters size"]) -> Errors:
    """``E |g_bar - g~|^2`` (eq. 25, 26) in closed form, with a draw for each client, cluster and part of the model."""
    split = slice(None, problem.base), slice(problem.base, None)
    away = models[:, :, None] - problem.centres  # client, cluster, who was drawn
    each = np.einsum("dij,kcdj->kcdi", problem.hessians, away)
    of_cluster = np.einsum("dc,kcdi->kci", problem.of_cluster, each)
    of_all = np.einsum("d,kcdi->kci", problem.amounts, each)
    trusted = problem.amounts[:, None] * guessed
    mean = np.einsum("kc,kci->i", problem.joint, of_cluster)
    drawn = np.concatenate([of_all[..., split[0]], of_cluster[..., split[1]]], -1)
    wrong = mean - np.einsum("kc,kci->i", trusted, drawn)
    in_base = ((each - of_all[:, :, None])[..., split[0]] ** 2).sum(-1) @ problem.amounts
    apart = ((each - of_cluster[:, :, None])[..., split[1]] ** 2).sum(-1)
    in_adaptors = np.einsum("dc,kcd->kc", problem.of_cluster, apart)
    noise = (trusted**2 * (in_base + in_adaptors)).sum()
    unlike = ((of_cluster - of_all)[..., split[0]] ** 2).sum(-1)
    return Errors(
        error=float((wrong**2).sum() + noise),
        adaptors=in_adaptors.max(0),
        base=float(in_base.max()),
        heterogeneity=float((problem.joint * unlike).sum()),
        moment=float(((each[..., split[0]] ** 2).sum(-1) @ problem.amounts).max() + _most(each, problem, split[1])),
    )


def _most(each: Float[np.ndarray, "clients clusters drawn size"], problem: Shared, part: slice) -> float:
    """The largest second moment of an adaptor's gradient."""
    return float(np.einsum("dc,kcd->kc", problem.of_cluster, (each[..., part] ** 2).sum(-1)).max())
