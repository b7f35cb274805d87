"""FLoRAL's synthetic regressions: users of one cluster share a linear map that is low-rank away from the others'.

Source: FLoRAL, eq. 9, 43 and 44, appendices F.2 and G; the constants are those of its public code. The true model of
cluster c, for x ~ N(0, I) of dimension d = 10:

    H_c(x) = x (W + 2 u_c v_c) + b        u_c (d, r), v_c (r, d), r = 1
    linear      y = the first 3 coordinates of H_c(x)
    mlp         y = relu(H_c(x)) W_out
    mlp-norm    y = relu((H_c(x) - mean_k) / std_k) W_out

without noise. W, u, b and W_out are N(0, 1) / sqrt(d), v is N(0, 1) / sqrt(r). User k is in cluster k mod C. ``mean_k``
and ``std_k`` are of the hidden vectors of user k's own fixed sample, coordinate by coordinate (appendix F.2; the public
code normalises behind the relu, the paper before it, and so do we).

Every tensor has a stream of its own: user k's train samples change neither with the number of users nor of clusters
before it nor with the number of test samples, and nothing depends on the method.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.data.samples.samples import Samples, UserSamples
from comingle.utils.seeds import generator

Kind = Literal["linear", "mlp", "mlp-norm"]
DIMENSION = 10
"""d, the size of inputs and hidden vectors."""
RANK = 1
"""r, the rank of a cluster's change of the shared map."""
STRENGTH = 2.0
"""Factor of the change ``u v``."""
OUTPUTS: dict[Kind, int] = {"linear": 3, "mlp": 1, "mlp-norm": 1}


@dataclass(frozen=True, kw_only=True)
class Truth:
    """True models of all clusters: ``H_c(x) = x weights[c] + bias``; without ``readout`` the task is linear."""

    weights: Float[Tensor, "clusters d d"]
    bias: Float[Tensor, " d"]
    readout: Float[Tensor, "d outputs"] | None

    def hidden(self, x: Float[Tensor, "n d"], cluster: int) -> Float[Tensor, "n d"]:
        """Return the hidden vectors ``H_c(x) = x W_c + b`` of inputs of cluster c."""
        return x @ self.weights[cluster] + self.bias

    def respond(self, hidden: Float[Tensor, "n d"]) -> Float[Tensor, "n outputs"]:
        """Return the targets of samples from their hidden vectors (:meth:`hidden`).

        In the task "linear" they are the first entries of the vectors, in the others a linear readout of their relu.
        """
        if self.readout is None:
            return hidden[:, : OUTPUTS["linear"]]
        return hidden.relu() @ self.readout


def draw_truth(kind: Kind, *, clusters: int, seed: int) -> Truth:
    """Draw the models that generate the targets of all clusters, in float64.

    Cluster c has ``H_c(x) = x (W + 2 u_c v_c) + b`` with a change ``u_c v_c`` of rank 1. Targets are the first entries
    of ``H_c(x)`` (linear) or ``relu(H_c(x)) W_out`` (mlp, mlp-norm). Each change has its own random stream, so it does
    not depend on the number of clusters.

    Args:
        kind: The regression: linear, mlp or mlp-norm.
        clusters: Number of clusters.
        seed: Seed of all draws.
    """
    source = generator("synthetic", kind, seed, "shared")
    shared_weights = _draw_normal((DIMENSION, DIMENSION), DIMENSION, source)  # W
    bias = _draw_normal((DIMENSION,), DIMENSION, source)  # b
    readout = None
    if kind != "linear":
        readout = _draw_normal((DIMENSION, OUTPUTS[kind]), DIMENSION, source)  # W_out
    changes = [_draw_change(generator("synthetic", kind, seed, "cluster", c)) for c in range(clusters)]  # u_c v_c
    return Truth(weights=shared_weights + STRENGTH * torch.stack(changes), bias=bias, readout=readout)


def _draw_change(source: torch.Generator) -> Float[Tensor, "d d"]:
    """Draw ``u v``, the low-rank difference between the linear map of a cluster and the map that all clusters share."""
    u = _draw_normal((DIMENSION, RANK), DIMENSION, source)
    v = _draw_normal((RANK, DIMENSION), RANK, source)
    return u @ v


def _draw_normal(shape: tuple[int, ...], inverse_variance: int, source: torch.Generator) -> Tensor:
    """Draw a float64 tensor with entries of N(0, 1 / inverse_variance).

    Args:
        shape: Shape of the tensor.
        inverse_variance: Inverse of the variance, such as the number of inputs.
        source: Generator of the draws.
    """
    return torch.randn(shape, generator=source, dtype=torch.float64) / math.sqrt(inverse_variance)


def make_synthetic(
    kind: Kind,
    *,
    users: int,
    clusters: int,
    train: int,
    test: int,
    seed: int,
    fresh_test: int | None = None,
) -> tuple[UserSamples, ...]:
    """Return the users of a synthetic task, with inputs and targets in float32; user k is in cluster k mod C.

    Args:
        kind: The regression: linear, mlp or mlp-norm.
        users: Number of users.
        clusters: Number of clusters C.
        train: Number of train samples per user.
        test: Number of test samples per user.
        seed: Seed of all draws.
        fresh_test: Number of newly drawn test samples, which replace the ``test`` samples; None keeps these.
    """
    truth = draw_truth(kind, clusters=clusters, seed=seed)
    return tuple(_make_user(kind, truth, k, k % clusters, train, test, seed, fresh_test) for k in range(users))


def _make_user(
    kind: Kind, truth: Truth, user: int, cluster: int, train: int, test: int, seed: int, fresh_test: int | None
) -> UserSamples:
    """Return the samples of one user, in float32.

    Args:
        kind: The task: linear, mlp or mlp-norm.
        truth: The true models.
        user: Index of the user, which determines its random streams.
        cluster: The user's cluster.
        train: Number of train samples.
        test: Number of test samples.
        seed: Seed of all draws.
        fresh_test: Number of newly drawn test samples, which replace the ``test`` samples; None keeps these.
    """
    fixed_inputs = _draw_inputs(kind, seed, user, "fixed", train + test)
    train_inputs, test_inputs = fixed_inputs[:train], fixed_inputs[train:]
    if fresh_test is not None:
        test_inputs = _draw_inputs(kind, seed, user, "fresh", fresh_test)
    mean, std = 0.0, 1.0  # of the hidden vectors, which only mlp-norm normalises
    if kind == "mlp-norm":  # from the fixed samples alone, so that fresh test samples do not change train targets
        mean, std = _mean_and_std(truth.hidden(fixed_inputs, cluster))

    def add_targets(x: Tensor) -> Samples:
        y = truth.respond((truth.hidden(x, cluster) - mean) / std)
        return Samples(inputs=x.float(), targets=y.float())

    no_inputs = fixed_inputs[:0]  # validation samples are held out later
    return UserSamples(
        name=f"user-{user}",
        train=add_targets(train_inputs),
        valid=add_targets(no_inputs),
        test=add_targets(test_inputs),
        cluster=cluster,
    )


def _draw_inputs(kind: Kind, seed: int, user: int, stream: str, count: int) -> Float[Tensor, "n d"]:
    """Draw inputs from N(0, I) in float32, the precision of stored samples; return them as float64, to compute targets.

    Args:
        kind: The task: linear, mlp or mlp-norm.
        seed: Seed of all draws.
        user: Index of the user.
        stream: Name of the random stream: "fixed" for the user's train and test samples, "fresh" for new test samples
            that replace its test samples.
        count: Number of inputs.
    """
    source = generator("synthetic", kind, seed, "user", user, stream)
    return torch.randn((count, DIMENSION), generator=source).double()


def _mean_and_std(hidden: Float[Tensor, "n d"]) -> tuple[Float[Tensor, " d"], Float[Tensor, " d"]]:
    """Return mean and population standard deviation (without Bessel's correction) of each coordinate."""
    return hidden.mean(0), hidden.std(0, correction=0)
