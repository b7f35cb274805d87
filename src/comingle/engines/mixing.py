"""What client-level routers or a server have learnt: mixtures, their entropy, how far aggregation is from the truth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.config.settings import Training
from comingle.engines.client import Clients
from comingle.engines.server import ServerHalf, averaging_weights
from comingle.methods.base import Method
from comingle.methods.server import aggregation_weights
from comingle.utils.trees import CLIENT_ROUTER

PRECISION = 6


def own_mixtures(clients: Clients) -> dict[str, dict[str, Any]]:
    """What that needs of each user who is here: its mixture, its true cluster, how much data it has."""
    known = mixture_at_users(clients)
    rows = [None] * len(clients.scored) if known is None else known.tolist()
    return {
        user.name: {"mixture": row, "cluster": getattr(user, "cluster", None), "count": len(user.train)}
        for user, row in zip(clients.scored_users, rows, strict=True)
    }


def mixtures_told(clients: Clients, server: ServerHalf, users: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The same of all users of a federation, some of whom may not be here."""
    shares, names = _known(server, users), list(users)
    if shares is None or not (event := mixtures_event(names, shares, clients.method)):
        return {}
    truth = [of_user["cluster"] for of_user in users.values()]
    if None not in truth:
        event["clusters"] = dict(zip(names, truth, strict=True))
    if None not in truth and _are_shares(shares):
        weights = _sizes([of_user["count"] for of_user in users.values()], clients.training)
        event["aggregation_mismatch"] = round(float(mismatch(shares, torch.tensor(truth), weights).mean()), PRECISION)
    return event


def _known(server: ServerHalf, users: Mapping[str, Mapping[str, Any]]) -> Float[Tensor, "users clusters"] | None:
    """Everybody's mixture as the server knows it, else as users do."""
    if (merging := server.method.server.merging_weights(server.kept)) is not None:
        return merging[server.numbers(list(users))].double().cpu()
    rows = [of_user["mixture"] for of_user in users.values()]
    return None if None in rows else torch.tensor(rows, dtype=torch.float64)


def mixtures_event(names: Sequence[str], shares: Float[Tensor, "users clusters"], method: Method) -> dict[str, Any]:
    """What an evaluation's event says of these users' mixtures; nothing of a single component."""
    if shares.shape[1] < 2:
        return {}
    rows = [[round(p, PRECISION) for p in row] for row in shares.tolist()]
    event: dict[str, Any] = {"mixtures": dict(zip(names, rows, strict=True)), "component": method.components}
    if _are_shares(shares):
        event["router_entropy_nats"] = round(float(entropy(shares).mean()), PRECISION)
    return event


def _are_shares(shares: Float[Tensor, "users clusters"]) -> bool:
    """Merging weights without a softmax may be anything."""
    return bool((shares >= 0).all())


def mixture_at_users(clients: Clients) -> Float[Tensor, "users clusters"] | None:
    """Each user's mixture, without noise, or its choice, as users know it; the mean over layers that have their own."""
    mixture = clients.method.placement.mixture
    if not clients.scored:
        return None
    if mixture is not None:
        theta = clients.model.layout.views(clients.state.rows_of(clients.scored_rows))[CLIENT_ROUTER]
        shares = mixture.shares(theta.double()).cpu()
        return shares.mean(1) if mixture.per_layer else shares
    chosen = [part.shares(clients.cohort(clients.scored_rows, 0)) for part in clients.method.client.parts]
    return next((shares.double().cpu() for shares in chosen if shares is not None), None)


def _sizes(counts: Sequence[int], training: Training) -> Float[Tensor, " users"]:
    """Each user's share of the training data, p(k), or equal shares where means are uniform."""
    return averaging_weights(torch.tensor(counts) if training.weighting != "uniform" else torch.ones(len(counts)))


def entropy(mixture: Float[Tensor, "users clusters"]) -> Float[Tensor, " users"]:
    """``-sum_c pi_c log pi_c`` in nats; 0 for a one-hot vector."""
    return -torch.xlogy(mixture, mixture).sum(-1)


def mismatch(
    mixture: Float[Tensor, "users clusters"], truth: Tensor, weights: Float[Tensor, " users"]
) -> Float[Tensor, " clusters"]:
    """``|delta_c|_1 = sum_k |p_hat(k|c) - p(k|c)|`` of each component (FLoRAL section 4).

    Components have no names, so each is held against the true cluster that makes most of it.
    """
    clusters = int(truth.max()) + 1
    true = aggregation_weights(torch.nn.functional.one_hot(truth, clusters).to(mixture), weights)
    learned = aggregation_weights(mixture, weights)
    distances = (learned.unsqueeze(2) - true.unsqueeze(1)).abs().sum(0)
    return distances.min(1).values
