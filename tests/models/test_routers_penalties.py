"""Load balancing against loops over tokens (CoMiGS eq. 10 and 11, Fedus et al. 2022 eq. 4 to 6)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from comingle.config.settings import Balance
from comingle.models.routers import balance_penalty, balance_weights, gate

UNEVEN = torch.tensor(
    [[True, False, False, False], [True, True, False, False], [True, True, True, False], [True, True, True, True]]
)


def random_logits(users: int, experts: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(users, 17, experts, generator=generator, dtype=torch.float64).requires_grad_()


def penalty_of(logits: Tensor, present: Tensor, top_k: int, balance: Balance) -> Tensor:
    return balance_penalty(logits, gate(logits, present, top_k)[1], present, balance)


def shares_and_probabilities(logits: Tensor, top_k: int) -> tuple[list[float], list[float]]:
    """Eq. 11, token by token, of one user's logits ``(tokens, experts)``."""
    tokens, experts = logits.shape
    share, probability = [0.0] * experts, [0.0] * experts
    for token in logits.tolist():
        total = sum(math.exp(value) for value in token)
        for j in sorted(range(experts), key=lambda j: -token[j])[:top_k]:
            share[j] += 1 / tokens
        for j in range(experts):
            probability[j] += math.exp(token[j]) / total / tokens
    return share, probability


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_generalist_form_is_equation_10_up_to_its_factor(top_k: int) -> None:
    logits = random_logits(4, 4)
    found = penalty_of(logits, UNEVEN, top_k, "generalist")
    for user in range(4):
        n = user + 1
        share, probability = shares_and_probabilities(logits[user, :, :n], top_k)
        norm = (n - 1) ** 2 + 1
        equation = share[0] * probability[0] / norm
        equation += sum((n - 1) / norm * share[j] * probability[j] for j in range(1, n))
        assert found[user].item() == pytest.approx(2 * n * equation, rel=1e-12)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_uniform_form_is_that_of_fedus(top_k: int) -> None:
    logits = random_logits(4, 4)
    found = penalty_of(logits, UNEVEN, top_k, "uniform")
    for user in range(4):
        n = user + 1
        share, probability = shares_and_probabilities(logits[user, :, :n], top_k)
        assert found[user].item() == pytest.approx(
            n * sum(f * p for f, p in zip(share, probability, strict=True)), 1e-12
        )


def test_uniform_top_1_is_1_where_tokens_are_spread_evenly() -> None:
    logits = 1e-9 * torch.eye(4, dtype=torch.float64).repeat(1, 5, 1)
    present = torch.ones(1, 4, dtype=torch.bool)
    torch.testing.assert_close(penalty_of(logits, present, 1, "uniform"), torch.ones(1, dtype=torch.float64))


@pytest.mark.parametrize("top_k", [1, 2])
def test_both_forms_coincide_with_two_experts(top_k: int) -> None:
    logits, present = random_logits(2, 2), torch.ones(2, 2, dtype=torch.bool)
    forms = [penalty_of(logits, present, top_k, balance) for balance in ("uniform", "generalist")]
    torch.testing.assert_close(*forms, rtol=1e-14, atol=0)


@pytest.mark.parametrize("balance", ["uniform", "generalist"])
def test_with_two_experts_that_are_always_picked_it_is_constant(balance: Balance) -> None:
    present = torch.ones(2, 2, dtype=torch.bool)
    for seed in range(3):
        logits = random_logits(2, 2, seed)
        penalty = penalty_of(logits, present, 2, balance)
        torch.testing.assert_close(penalty, torch.full((2,), 2.0, dtype=torch.float64))
        (gradient,) = torch.autograd.grad(penalty.sum(), logits)
        assert gradient.abs().max() < 1e-16


@pytest.mark.parametrize("experts", [2, 3, 5, 9])
def test_generalist_form_is_least_where_the_generalist_takes_half(experts: int) -> None:
    """Where picks follow probabilities, ``sum_j c_j p_j^2`` is least at equal ``c_j p_j``: half for expert 0 (C.4)."""
    weights = balance_weights(torch.ones(1, experts, dtype=torch.bool), "generalist")[0]
    ideal = torch.full((experts,), 0.5 / (experts - 1), dtype=torch.float64)
    ideal[0] = 0.5
    torch.testing.assert_close(weights * ideal, (weights * ideal)[:1].expand(experts))
    least = (weights * ideal**2).sum()
    for seed in range(20):
        other = torch.rand(experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        assert (weights * (other / other.sum()) ** 2).sum() > least


def test_absent_experts_have_no_weight_and_no_part() -> None:
    for balance in ("uniform", "generalist"):
        weights = balance_weights(UNEVEN, balance)
        assert (weights[~UNEVEN] == 0).all()
        logits = random_logits(4, 4)
        wild = torch.where(UNEVEN.unsqueeze(1), logits, 1e3)
        torch.testing.assert_close(penalty_of(wild, UNEVEN, 2, balance), penalty_of(logits, UNEVEN, 2, balance))
    assert balance_weights(UNEVEN, "uniform").tolist() == UNEVEN.double().tolist()


def test_a_gradient_reaches_the_probabilities_only() -> None:
    """f is a count: the gradient is that of ``n sum_j c_j f_j P_j`` with the shares held fixed."""
    logits, present = random_logits(1, 3), torch.ones(1, 3, dtype=torch.bool)
    share = torch.tensor(shares_and_probabilities(logits[0].detach(), 2)[0], dtype=torch.float64)
    weights = torch.tensor([2 / 5, 4 / 5, 4 / 5], dtype=torch.float64)
    expected = 3 * (weights * share * logits[0].softmax(-1).mean(0)).sum()
    gradients = [
        torch.autograd.grad(p, logits)[0] for p in (penalty_of(logits, present, 2, "generalist").sum(), expected)
    ]
    torch.testing.assert_close(*gradients)
