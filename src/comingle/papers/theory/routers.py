"""FLoRAL's client-level routers as formulas: eq. 5, appendix C.2, and what mixing weights does to losses (FML, MFL)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float
from scipy import special

Losses = Float[np.ndarray, "*users clusters"]
Shares = Float[np.ndarray, "*users clusters"]


def router(losses: Losses, temperature: float) -> Shares:
    """Eq. 5: ``pi_c ~ exp(-eta f(w_c))``.

    As printed the loss is the cluster's, f_c: after an exchange, when all users have the same models, it has the same
    value for all of them, and so has every router. Appendix C.1 derives it with the user's own loss, f^k.
    """
    return special.softmax(-temperature * losses, axis=-1)


def aggregators(shares: Float[np.ndarray, "users clusters"], amounts: Float[np.ndarray, " users"]) -> Shares:
    """Eq. 2: ``p(k|c)``, in proportion to ``N^k pi_c^k``, for every user (row) and cluster (column)."""
    weighted = amounts[:, None] * shares
    return weighted / weighted.sum(0)


def mismatch_bound(
    rate: float, final: float, gap: float, lowest: float, users: int, clusters: int, drift: float
) -> float:
    """Lemma A.6 of ``|delta_c|_1^2``: ``4 eta gap + eta_bar f_c* + 4 log(K C) + 10 L eta^3 H^2 G^2`` (``drift``).

    No two distributions are further apart than ``|delta|_1^2 = 4``, which is less for all ``K C >= 3``.
    """
    return 4 * rate * gap + final * lowest + 4 * float(np.log(users * clusters)) + drift


def mixed_loss(
    loss: Callable[[Float[np.ndarray, " size"]], float],
    models: Float[np.ndarray, "clusters size"],
    shares: Float[np.ndarray, " clusters"],
) -> tuple[float, float]:
    """A user's loss under FML, ``f(sum_c pi_c w_c)``, and under MFL, ``sum_c pi_c f(w_c)``: no less if f is convex."""
    return loss(shares @ models), float(sum(share * loss(model) for share, model in zip(shares, models, strict=True)))


def logit_gradient(
    gradient: Float[np.ndarray, " size"],
    models: Float[np.ndarray, "clusters size"],
    shares: Float[np.ndarray, " clusters"],
) -> Float[np.ndarray, " clusters"]:
    """Appendix C.2: how FML changes with the logits, ``pi_c <grad f(w_hat), w_c - w_hat>``; gradient at the mixture."""
    return shares * ((models - shares @ models) @ gradient)


def logit_step(
    loss: Callable[[Float[np.ndarray, " size"]], float],
    gradient: Callable[[Float[np.ndarray, " size"]], Float[np.ndarray, " size"]],
    models: Float[np.ndarray, "clusters size"],
    rate: float,
) -> tuple[Float[np.ndarray, " clusters"], Float[np.ndarray, " clusters"]]:
    """The router after one step on FML from equal logits, and that of eq. 5 with ``eta = rate / C`` (eq. 35).

    They are equal where the loss is affine; otherwise their logits differ, up to a constant, by at most ``rate / C``
    times half the largest curvature times the squared distances of the models from their mean.
    """
    clusters = len(models)
    equal = np.full(clusters, 1 / clusters)
    step = special.softmax(-rate * logit_gradient(gradient(equal @ models), models, equal))
    return step, router(np.array([loss(model) for model in models]), rate / clusters)
