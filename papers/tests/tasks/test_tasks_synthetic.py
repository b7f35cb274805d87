from __future__ import annotations

import numpy as np
import pytest
import torch

from comingle.data.samples.samples import UserSamples, check
from comingle_papers.tasks.synthetic import DIMENSION, Kind, Truth, draw_truth, make_synthetic

KINDS: tuple[Kind, ...] = ("linear", "mlp", "mlp-norm")


def make(kind: Kind, **changes: int | None) -> tuple[UserSamples, ...]:
    settings = {"users": 6, "clusters": 3, "train": 97, "test": 23, "seed": 0} | changes
    return make_synthetic(kind, **settings)  # type: ignore[arg-type]


def answers(kind: Kind, truth: Truth, cluster: int, x: np.ndarray, fixed: np.ndarray) -> np.ndarray:
    """The formula, coordinate by coordinate in NumPy."""
    weight, bias = truth.weights[cluster].numpy(), truth.bias.numpy()

    def hidden(rows: np.ndarray) -> np.ndarray:
        return np.array([[sum(row[i] * weight[i, j] for i in range(10)) + bias[j] for j in range(10)] for row in rows])

    h = hidden(x)
    if kind == "linear":
        return h[:, [0, 1, 2]]
    if kind == "mlp-norm":
        of_fixed = hidden(fixed)
        mean = of_fixed.sum(0) / len(fixed)
        h = (h - mean) / np.sqrt(((of_fixed - mean) ** 2).sum(0) / len(fixed))
    assert truth.readout is not None
    return np.maximum(h, 0) @ truth.readout.numpy()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fresh", [None, 40])
def test_targets_are_the_formula_of_the_inputs(kind: Kind, fresh: int | None) -> None:
    users, fixed_users = make(kind, fresh_test=fresh), make(kind)
    truth = draw_truth(kind, clusters=3, seed=0)
    for k in (0, 1, 5):
        whole = fixed_users[k]
        fixed = torch.cat([whole.train.inputs, whole.test.inputs]).double().numpy()
        for part in (users[k].train, users[k].test):
            expected = answers(kind, truth, k % 3, part.inputs.double().numpy(), fixed)
            np.testing.assert_allclose(part.targets.numpy(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_and_clusters(kind: Kind) -> None:
    users = make(kind, fresh_test=1000)
    assert [user.cluster for user in users] == [0, 1, 2, 0, 1, 2]
    assert [(len(u.train), len(u.valid), len(u.test)) for u in users] == [(97, 0, 1000)] * 6
    assert users[0].train.inputs.shape == (97, DIMENSION)
    assert users[0].test.targets.shape == (1000, 3 if kind == "linear" else 1)
    assert users[0].train.inputs.dtype == users[0].train.targets.dtype == torch.float32
    check(users)


def test_clusters_differ_by_a_matrix_of_rank_two() -> None:
    weights = draw_truth("linear", clusters=4, seed=3).weights
    for one in range(4):
        for other in range(one):
            values = torch.linalg.svdvals(weights[one] - weights[other])
            assert (values > 1e-6).sum() == 2
    # All clusters together: what remains beside the shared matrix is C - 1 independent pieces of rank 1 around it.
    assert torch.linalg.matrix_rank((weights[1:] - weights[0]).flatten(0, 1)) == 4


def test_variances_are_those_of_the_paper() -> None:
    truths = [draw_truth("mlp", clusters=2, seed=seed) for seed in range(400)]
    bias = torch.stack([truth.bias for truth in truths])
    readout = torch.stack([truth.readout for truth in truths if truth.readout is not None])
    weights = torch.stack([truth.weights for truth in truths])
    assert bias.var().item() == pytest.approx(0.1, rel=0.1)
    assert readout.var().item() == pytest.approx(0.1, rel=0.1)
    # W + 2 u v: 1/10 + 4 * (1/10) * 1, and W is what two clusters have in common.
    assert weights.var().item() == pytest.approx(0.5, rel=0.1)
    shared = (weights[:, 0] * weights[:, 1]).mean().item()
    assert shared == pytest.approx(0.1, rel=0.15)


def test_inputs_are_standard_normal() -> None:
    x = torch.cat([user.test.inputs for user in make("linear", fresh_test=4000)])
    assert x.mean(0).abs().max() < 0.03
    assert (torch.cov(x.T) - torch.eye(10)).abs().max() < 0.04


def test_normalised_hidden_vectors_have_mean_zero_and_deviation_one() -> None:
    """With the relu undone: users' own samples, normalised, have the same mean response whatever their cluster."""
    users = make("mlp-norm", users=3, train=4000, test=0, fresh_test=1)
    plain = make("mlp", users=3, train=4000, test=0, fresh_test=1)
    readout = draw_truth("mlp-norm", clusters=3, seed=0).readout
    assert readout is not None
    # E relu(z) = 1 / sqrt(2 pi) for a standard normal z.
    expected = readout.sum().item() / np.sqrt(2 * np.pi)
    found = [user.train.targets.mean().item() for user in users]
    assert found == pytest.approx([expected] * 3, abs=0.03)
    assert max(abs(user.train.targets.mean().item() - expected) for user in plain) > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_train_samples_depend_on_nothing_but_task_seed_and_user(kind: Kind) -> None:
    users = make(kind)
    for other in (make(kind, users=3), make(kind, fresh_test=7), make(kind)):
        for one, same in zip(users, other, strict=False):
            assert torch.equal(one.train.inputs, same.train.inputs)
            assert torch.equal(one.train.targets, same.train.targets)
    assert torch.equal(users[1].train.targets, make(kind, clusters=2)[1].train.targets)  # cluster 1 of 2 or of 3
    different = make(kind, seed=1)
    assert not torch.equal(users[0].train.inputs, different[0].train.inputs)
    assert not torch.equal(users[0].train.inputs, users[1].train.inputs)
    assert not torch.equal(users[0].train.inputs[:23], users[0].test.inputs)


def least_squares(users: tuple[UserSamples, ...], judged: tuple[UserSamples, ...]) -> float:
    """Test MSE on ``judged`` of the affine map that fits the train samples of ``users`` best (the shortest such)."""

    def affine(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, torch.ones(len(x), 1)], dim=1).double()

    x = torch.cat([affine(user.train.inputs) for user in users])
    y = torch.cat([user.train.targets for user in users]).double()
    solution = torch.linalg.pinv(x) @ y
    errors = [(affine(user.test.inputs) @ solution - user.test.targets).square().mean() for user in judged]
    return torch.stack(errors).mean().item()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_linear_task_needs_the_right_partners(seed: int) -> None:
    """7 samples of 11 unknowns: a user alone fails, all together fail, the users of a cluster find their model."""
    users = make("linear", users=10, clusters=2, train=7, test=1, fresh_test=500, seed=seed)
    for cluster in range(2):
        members = tuple(user for user in users if user.cluster == cluster)
        assert least_squares(members, members) < 1e-10
        assert least_squares(users, members) > 1e-2
        assert least_squares(members[:1], members[:1]) > 1e-2
