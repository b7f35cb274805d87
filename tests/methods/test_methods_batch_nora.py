"""Batch norm in a federation (FLoRAL App. F.2): the base's running statistics are averaged, the adaptors' stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from comingle.training.backends.local import InProcess
from comingle.training.client import Clients
from federations import exchange, local_round

EVERYONE = [0, 1, 2, 3]
FLORAL = {"name": "floral", "clusters": 2}
BASE, OWN = "model.1.base.running_", "model.1.running_"


def statistics(federation: InProcess, prefix: str) -> Tensor:
    """Everybody's running mean and variance, side by side."""
    views = federation.clients.model.layout.views(federation.clients.state.rows)
    return torch.cat([views[f"{prefix}mean"], views[f"{prefix}var"]], 1).clone()


@pytest.mark.parametrize("method", [FLORAL, {**FLORAL, "name": "floral-mfl"}, {"name": "local-adaptor"}])
def test_the_exchange_averages_the_base_s_statistics_and_leaves_the_adaptors(federate_nets: Any, method: Any) -> None:
    federation = federate_nets(method)
    local_round(federation, EVERYONE, 0)
    base, own = statistics(federation, BASE), statistics(federation, OWN)
    assert not torch.allclose(base[0], base[1])
    exchange(federation, EVERYONE)
    counts = torch.tensor([len(user.train) for user in federation.clients.trainers], dtype=torch.float64)
    mean = (counts / counts.sum()) @ base
    torch.testing.assert_close(statistics(federation, BASE), mean.expand(4, -1))
    assert torch.equal(statistics(federation, OWN), own)


def test_reparameterised_adaptors_see_how_far_a_user_is_from_the_others(federate_nets: Any) -> None:
    """From the second round on s and m are not 1 and 0, so both forms train and score otherwise."""
    federations = [federate_nets(FLORAL, changes={"floral.batch_nora": nora}) for nora in (False, True)]
    rows, losses = [], []
    for federation in federations:
        for number in range(3):
            local_round(federation, EVERYONE, number)
            exchange(federation, EVERYONE)
        rows.append(federation.clients.state.rows)
        losses.append(torch.tensor([score.mean_loss for score in federation.clients.evaluate()]))
    assert (rows[0] - rows[1]).abs().max() > 1e-6
    assert (losses[0] - losses[1]).abs().max() > 1e-6


# ---------------------------------------------------------------- Algorithm 1 with eq. 42, written out

RATE, ROUTER_RATE, EPS, MOMENTUM, CLUSTERS = 0.05, 0.3, 1e-5, 0.1, 2
NAMES = {
    **{f"{new}{i}": f"model.{i}.{old}" for i in (0, 3) for new, old in (("A", "a"), ("B", "b"), ("bias", "bias"))},
    **{f"base_{kind}{i}": f"model.{i}.base.{kind}" for i in (0, 1, 3) for kind in ("weight", "bias")},
    **{f"main_{kind}": BASE + kind for kind in ("mean", "var")},
    **{f"own_{kind}": OWN + kind for kind in ("mean", "var")},
    "gains": "model.1.weight",
    "shifts": "model.1.bias",
    "theta": "router.theta",
}
COMPONENTS = ("A0", "B0", "bias0", "A3", "B3", "bias3", "gains", "shifts")
STATISTICS = ("main_mean", "main_var", "own_mean", "own_var")
AT_HOME = ("theta", "own_mean", "own_var")


def linear(own: Mapping[str, Tensor], pi: Tensor, x: Tensor, layer: int) -> Tensor:
    y = x @ own[f"base_weight{layer}"].T + own[f"base_bias{layer}"]
    for c in range(CLUSTERS):
        y = y + pi[c] * (x @ own[f"A{layer}"][c].T @ own[f"B{layer}"][c].T + own[f"bias{layer}"][c])
    return y


def net(own: Mapping[str, Tensor], x: Tensor, *, nora: bool, train: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs and, in training, the new running statistics; eq. 42 out of those before the step."""
    pi, moved = own["theta"].softmax(0), {}
    h = linear(own, pi, x, 0)
    deviation, own_deviation = ((own[f"{whose}_var"] + EPS).sqrt() for whose in ("main", "own"))
    s, m = own_deviation / deviation, (own["own_mean"] - own["main_mean"]) / deviation
    main, local = (h - own["main_mean"]) / deviation, (h - own["own_mean"]) / own_deviation
    if train:
        mean, var = h.mean(0), h.var(0, correction=0)
        main = local = (h - mean) / (var + EPS).sqrt()
        for whose in ("main", "own"):
            moved[f"{whose}_mean"] = torch.lerp(own[f"{whose}_mean"], mean.detach(), MOMENTUM)
            moved[f"{whose}_var"] = torch.lerp(own[f"{whose}_var"], h.detach().var(0), MOMENTUM)
    y = main * own["base_weight1"] + own["base_bias1"]
    for c in range(CLUSTERS):
        gain, shift = own["gains"][c], own["shifts"][c]
        if nora:
            gain, shift = s * gain, shift + m * gain.detach()
        y = y + pi[c] * (local * gain + shift)
    return linear(own, pi, y.relu(), 3), moved


def step(own: dict[str, Tensor], x: Tensor, y: Tensor, *, nora: bool) -> dict[str, Tensor]:
    """One simultaneous step on base, adaptors (eq. 36) and router."""
    leaves = {key: t.clone().requires_grad_(key not in STATISTICS) for key, t in own.items()}
    trained = [key for key in own if key not in STATISTICS]
    outputs, moved = net(leaves, x, nora=nora, train=True)
    found = torch.autograd.grad((outputs - y).square().mean(), [leaves[key] for key in trained])
    after = dict(own)
    for key, gradient in zip(trained, found, strict=True):
        after[key] = own[key] - (ROUTER_RATE if key == "theta" else RATE) * preconditioned(own, key, gradient)
    return after | moved


def preconditioned(own: Mapping[str, Tensor], key: str, gradient: Tensor) -> Tensor:
    if key[0] not in "AB":
        return gradient
    a, b = own[f"A{key[1]}"], own[f"B{key[1]}"]
    eye = EPS * torch.eye(a.shape[1], dtype=torch.float64)
    parts = [
        torch.linalg.inv(b[c].T @ b[c] + eye) @ gradient[c] if key[0] == "A"
        else gradient[c] @ torch.linalg.inv(a[c] @ a[c].T + eye)
        for c in range(CLUSTERS)
    ]  # fmt: skip
    return torch.stack(parts)


def play_round(
    clients: Clients, users: list[dict[str, Tensor]], members: Sequence[int], number: int, nora: bool
) -> None:
    """In place on everybody's tensors."""
    for k in members:
        inputs, targets = clients.trainers[k].train.inputs.double(), clients.trainers[k].train.targets.double()
        for at in (
            clients.batch_source.draw([k], clients.phases[0], number, i, 0)[0]
            for i in range(clients.batch_source.steps(k))
        ):
            users[k] = step(users[k], inputs[at[at >= 0]], targets[at[at >= 0]], nora=nora)
    counts = torch.tensor([len(t.train) if k in members else 0 for k, t in enumerate(clients.trainers)]).double()
    joint = torch.stack([own["theta"].softmax(0) for own in users]) * counts.unsqueeze(1)
    for key in NAMES.keys() - set(AT_HOME):
        sent = torch.stack([own[key] for own in users])
        if key in COMPONENTS:
            mean = torch.einsum("kc,kc...->c...", joint / joint.sum(0), sent)
        else:
            mean = torch.tensordot(counts / counts.sum(), sent, dims=1)
        for own in users:
            own[key] = mean


@pytest.mark.parametrize("nora", [False, True], ids=["batch norm beside batch norm", "BatchNorA"])
@pytest.mark.parametrize("members", [EVERYONE, [0, 2]], ids=["everybody", "sampled"])
def test_rounds_equal_the_paper_written_out(federate_nets: Any, nora: bool, members: list[int]) -> None:
    changes = {"floral.batch_nora": nora, "training.router.learning_rate": ROUTER_RATE, "training.batch_size": 20}
    federation = federate_nets(FLORAL, changes=changes)
    clients = federation.clients
    views = clients.model.layout.views(clients.state.rows)
    assert set(NAMES.values()) == set(views)
    source = torch.Generator().manual_seed(3)
    for key in ("gains", "shifts"):  # not zero as at the start, so that s and m matter soon
        start = views[NAMES[key]]
        start.copy_(0.3 * torch.randn(start.shape[1:], generator=source, dtype=torch.float64))
    users = [{key: views[name][k].clone() for key, name in NAMES.items()} for k in EVERYONE]
    for number in range(3):
        play_round(clients, users, members, number, nora)
        local_round(federation, members, number)
        exchange(federation, members)
    for k, (own, score) in enumerate(zip(users, clients.evaluate(), strict=True)):
        for key, name in NAMES.items():
            torch.testing.assert_close(views[name][k], own[key], rtol=1e-7, atol=1e-9, msg=name)
        outputs, _ = net(own, clients.trainers[k].test.inputs.double(), nora=nora, train=False)
        assert score.mean_loss == pytest.approx(
            float((outputs - clients.trainers[k].test.targets).square().mean()), abs=1e-6
        )
