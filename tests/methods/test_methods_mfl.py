"""(MFL) and (FML) against loops written from FLoRAL's section 4 and (FML), user by user, component by component.

Eq. 4: every component descends on its own loss, w_c <- w_c - eta grad f(w_c), and pi has no part in it; at a
synchronisation it is averaged with p(k|c) out of the pi that held during the round. Eq. 5: then pi_c ~ exp(-eta f_c),
f_c of the synchronised components. With weight sharing u is one for all components: E_{c|k} of its gradients (eq. 25).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from linear_task import unequal
from torch import Tensor

from comingle.training.backends.local import InProcess
from federations import exchange, local_round

EVERYONE, RATE, ROUTER_RATE, EPS, CLUSTERS = [0, 1, 2, 3], 0.05, 0.2, 1e-5, 2
LINEAR = {"data.task.name": "linear", "training.batch_size": 3, "training.router.learning_rate": ROUTER_RATE}
Own = dict[str, Tensor]
ADAPTED = {"W": "model.base.weight", "w": "model.base.bias", "A": "model.a", "B": "model.b", "b": "model.bias"}
WHOLE = {"W": "weight", "w": "bias"}


def tensors(federation: InProcess, names: dict[str, str]) -> list[Own]:
    views = federation.clients.model.layout.views(federation.clients.state.rows)
    return [{key: views[name][user].clone() for key, name in names.items()} for user in EVERYONE]


def mixtures(federation: InProcess) -> Tensor:
    return federation.clients.model.layout.views(federation.clients.state.rows)["router.theta"].softmax(1)


def grad(loss: Callable[..., Tensor], *at: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.detach().clone().requires_grad_() for t in at]
    return torch.autograd.grad(loss(*leaves), leaves)


def adapted_loss(x: Tensor, y: Tensor) -> Callable[..., Tensor]:
    """f(u, a_c): one adaptor alone beside the base."""
    return lambda W, w, A, B, b: (x @ (W + B @ A).T + w + b - y).square().mean()


def linear_loss(x: Tensor, y: Tensor) -> Callable[..., Tensor]:
    return lambda W, w: (x @ W.T + w - y).square().mean()


def batches(federation: InProcess, k: int, number: int) -> list[tuple[Tensor, Tensor]]:
    data = federation.clients.trainers[k].train
    drawn = [
        federation.clients.batch_source.draw([k], federation.clients.phases[0], number, step, 0)[0]
        for step in range(federation.clients.batch_source.steps(k))
    ]
    return [(data.inputs.double()[at[at >= 0]], data.targets.double()[at[at >= 0]]) for at in drawn]


def whole(federation: InProcess, k: int) -> tuple[Tensor, Tensor]:
    return federation.clients.trainers[k].train.inputs.double(), federation.clients.trainers[k].train.targets.double()


def shared_weights(federation: InProcess, rounds: int) -> tuple[list[Own], Tensor]:
    """(MFL-WS) with LoRA preconditioning (eq. 36)."""
    users, pi = tensors(federation, ADAPTED), torch.full((4, CLUSTERS), 1 / CLUSTERS, dtype=torch.float64)
    n = torch.tensor([len(t.train) for t in federation.clients.trainers], dtype=torch.float64)
    for number in range(rounds):
        for k, own in enumerate(users):
            for x, y in batches(federation, k, number):
                f, before = adapted_loss(x, y), {key: t.clone() for key, t in own.items()}
                for c in range(CLUSTERS):
                    A, B, b = (before[key][c] for key in ("A", "B", "b"))
                    dW, dw, dA, dB, db = grad(f, before["W"], before["w"], A, B, b)
                    eye = EPS * torch.eye(len(A), dtype=torch.float64)
                    own["A"][c] -= RATE * torch.linalg.inv(B.T @ B + eye) @ dA
                    own["B"][c] -= RATE * dB @ torch.linalg.inv(A @ A.T + eye)
                    own["b"][c] -= RATE * db
                    own["W"] -= RATE * pi[k, c] * dW
                    own["w"] -= RATE * pi[k, c] * dw
        synchronised: Own = {key: sum(n[k] * users[k][key] for k in EVERYONE) / n.sum() for key in ("W", "w")}
        for key in ("A", "B", "b"):
            parts = [sum(pi[k, c] * n[k] * users[k][key][c] for k in EVERYONE) for c in range(CLUSTERS)]
            synchronised[key] = torch.stack([parts[c] / (pi[:, c] * n).sum() for c in range(CLUSTERS)])
        users = [{key: t.clone() for key, t in synchronised.items()} for _ in EVERYONE]
        for k, own in enumerate(users):
            f = adapted_loss(*whole(federation, k))
            losses = [f(own["W"], own["w"], own["A"][c], own["B"][c], own["b"][c]) for c in range(CLUSTERS)]
            pi[k] = (-ROUTER_RATE * torch.stack(losses)).softmax(0)
    return users, pi


def whole_models(federation: InProcess, rounds: int) -> tuple[list[Own], Tensor]:
    """(MFL) as Theorem 4.5 has it."""
    users, pi = tensors(federation, WHOLE), torch.full((4, CLUSTERS), 1 / CLUSTERS, dtype=torch.float64)
    n = torch.tensor([len(t.train) for t in federation.clients.trainers], dtype=torch.float64)
    for number in range(rounds):
        for k, own in enumerate(users):
            for x, y in batches(federation, k, number):
                for c in range(CLUSTERS):
                    dW, dw = grad(linear_loss(x, y), own["W"][c], own["w"][c])
                    own["W"][c] -= RATE * dW
                    own["w"][c] -= RATE * dw
        share = pi * n.unsqueeze(1)
        share = share / share.sum(0)
        synchronised = {key: sum(share[k].view(-1, *[1] * d) * users[k][key] for k in EVERYONE) for key, d in
                        (("W", 2), ("w", 1))}  # fmt: skip
        users = [{key: t.clone() for key, t in synchronised.items()} for _ in EVERYONE]
        for k, own in enumerate(users):
            f = linear_loss(*whole(federation, k))
            pi[k] = (-ROUTER_RATE * torch.stack([f(own["W"][c], own["w"][c]) for c in range(CLUSTERS)])).softmax(0)
    return users, pi


def mixed_models(federation: InProcess, rounds: int) -> tuple[list[Own], Tensor]:
    """(FML) by Algorithm 1 where everything is a component."""
    users, n = (
        tensors(federation, WHOLE),
        torch.tensor([len(t.train) for t in federation.clients.trainers], dtype=torch.float64),
    )
    theta = torch.zeros(4, CLUSTERS, dtype=torch.float64)
    for number in range(rounds):
        for k, own in enumerate(users):
            for x, y in batches(federation, k, number):
                f = linear_loss(x, y)

                def mixed(t: Tensor, W: Tensor, w: Tensor, f: Callable[..., Tensor] = f) -> Tensor:
                    pi = t.softmax(0)
                    return f(sum(pi[c] * W[c] for c in range(CLUSTERS)), sum(pi[c] * w[c] for c in range(CLUSTERS)))

                dt, dW, dw = grad(mixed, theta[k], own["W"], own["w"])
                theta[k] -= ROUTER_RATE * dt
                own["W"] -= RATE * dW
                own["w"] -= RATE * dw
        share = theta.softmax(1) * n.unsqueeze(1)
        share = share / share.sum(0)
        synchronised = {"W": torch.einsum("kc,kcij->cij", share, torch.stack([own["W"] for own in users])),
                        "w": torch.einsum("kc,kci->ci", share, torch.stack([own["w"] for own in users]))}  # fmt: skip
        users = [{key: t.clone() for key, t in synchronised.items()} for _ in EVERYONE]
    return users, theta.softmax(1)


CASES = {"floral-mfl": (shared_weights, ADAPTED), "mfl": (whole_models, WHOLE), "fml": (mixed_models, WHOLE)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rounds", [1, 3])
def test_rounds_equal_the_paper_written_out(federate_nets: Any, name: str, rounds: int) -> None:
    written, names = CASES[name]
    federation, other = (unequal(federate_nets({"name": name, "clusters": CLUSTERS}, changes=LINEAR)) for _ in range(2))
    users, pi = written(other, rounds)
    for number in range(rounds):
        local_round(federation, EVERYONE, number)
        exchange(federation, EVERYONE)
    torch.testing.assert_close(mixtures(federation), pi, rtol=1e-6, atol=1e-9)
    assert (pi - 1 / CLUSTERS).abs().max() > 1e-3
    for found, wanted in zip(tensors(federation, names), users, strict=True):
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-9, msg=key)


def test_statistics_are_those_of_the_components_mixed_by_pi(federate_nets: Any) -> None:
    """A pass of each adaptor set alone moves the running statistics of its own; what a user keeps is their mixture."""
    clients = federate_nets({"name": "floral-mfl", "clusters": CLUSTERS}).clients
    cohort = clients.cohort(list(EVERYONE), 0)
    views = clients.model.layout.views(cohort.state.rows)
    views["model.0.b"].normal_(generator=torch.Generator().manual_seed(1))
    views["router.theta"].copy_(torch.tensor([0.9, 0.1]).log().expand(4, -1))
    before = {name: views[name].clone() for name in ("model.0.a", "model.0.b", "model.0.bias")}
    drawn = clients.batch_source.draw(EVERYONE, clients.phases[0], 0, 0, 0)
    x = clients.trainers[0].train.inputs.double()[drawn[0][drawn[0] >= 0]]
    weight, bias = views["model.0.base.weight"][0].clone(), views["model.0.base.bias"][0].clone()
    old = views["model.1.base.running_mean"][0].clone()
    clients.steps.gradient(cohort, drawn, clients.phases[0])
    means = []
    for c in range(CLUSTERS):
        change = before["model.0.b"][0, c] @ before["model.0.a"][0, c]
        means.append((x @ (weight + change).T + bias + before["model.0.bias"][0, c]).mean(0))
    wanted = 0.9 * old + 0.1 * (0.9 * means[0] + 0.1 * means[1])
    torch.testing.assert_close(views["model.1.base.running_mean"][0], wanted)
