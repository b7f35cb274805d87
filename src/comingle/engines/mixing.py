"""What client-level routers or a server have learnt: mixtures, their entropy, how far aggregation is from the truth."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.engines.exchange import averaging_weights
from comingle.engines.simulation import Simulation
from comingle.methods.servers import aggregation_weights
from comingle.trees import CLIENT_ROUTER

PRECISION = 6


def mixtures(sim: Simulation) -> dict[str, Any]:
    """For methods with a client-level mixture of several components: what an evaluation's event says of it."""
    found = mixture_of(sim)
    if found is None or found.shape[1] < 2:
        return {}
    names = [user.name for user in sim.users]
    rows = [[round(p, PRECISION) for p in row] for row in found.tolist()]
    event: dict[str, Any] = {"mixtures": dict(zip(names, rows, strict=True)), "component": component_of(sim)}
    of_shares = bool((found >= 0).all())  # merging weights without a softmax may be anything
    if of_shares:
        event["router_entropy_nats"] = round(float(entropy(found).mean()), PRECISION)
    truth = [getattr(user, "cluster", None) for user in sim.users]
    if None not in truth:
        event["clusters"] = dict(zip(names, truth, strict=True))
    if None not in truth and of_shares:
        event["aggregation_mismatch"] = round(float(mismatch(found, torch.tensor(truth), sizes(sim)).mean()), PRECISION)
    return event


def component_of(sim: Simulation) -> str:
    """What is mixed, in words for reports: some methods have whole models."""
    whole = sim.mixture is None or sim.mixture.of == "models"
    return "model" if whole else "adaptor set"


def mixture_of(sim: Simulation) -> Float[Tensor, "users clusters"] | None:
    """Each user's mixture, without noise, or the weights by which the server merges models for it."""
    if sim.method.merging is not None:
        return sim.method.merging(sim.state.server).double().cpu()
    if sim.mixture is None:
        return None
    theta = sim.model.layout.views(sim.state.rows)[CLIENT_ROUTER][sim.row_of]
    return sim.mixture.shares(theta.double()).cpu()


def sizes(sim: Simulation) -> Float[Tensor, " users"]:
    """Each user's share of the training data, p(k), or equal shares where means are uniform."""
    counts = [len(user.train) for user in sim.users]
    return averaging_weights(range(len(counts)), counts, weighted=sim.training.weighting != "uniform")


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
