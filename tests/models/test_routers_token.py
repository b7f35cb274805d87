from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from comingle.config.settings import Balance
from comingle.methods.dual_lora import SimilarityGating
from comingle.models.routers import Router, balance_penalty, gate, init_router, uniform_gates

UNEVEN = torch.tensor([[True, False, False], [True, True, False], [True, True, True]])


def random_logits(users: int, tokens: int, experts: int, seed: int = 0) -> Tensor:
    return torch.randn(users, tokens, experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("top_k", [1, 2, 3, 5])
def test_gates_are_a_softmax_over_the_largest_present_logits(top_k: int) -> None:
    logits = random_logits(3, 20, 3)
    gates, picks = gate(logits, UNEVEN, top_k)
    for user in range(3):
        experts = int(UNEVEN[user].sum())
        for token in range(20):
            values = logits[user, token, :experts].tolist()
            kept = sorted(range(experts), key=lambda j: -values[j])[:top_k]
            total = sum(math.exp(values[j]) for j in kept)
            expected = [math.exp(values[j]) / total if j in kept else 0.0 for j in range(experts)] + [0.0] * (
                3 - experts
            )
            torch.testing.assert_close(gates[user, token], torch.tensor(expected, dtype=torch.float64))
            assert picks[user, token].nonzero().flatten().tolist() == sorted(kept)


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("value", [0.0, 1e4, -1e4])
def test_ties_still_pick_exactly_top_k_of_the_present_experts(top_k: int, value: float) -> None:
    logits = torch.full((3, 4, 3), value)
    logits[:, 0, 1:] -= 1  # one token with a partial tie
    gates, picks = gate(logits, UNEVEN, top_k)
    expected = UNEVEN.sum(1).clamp(max=top_k)
    assert torch.equal(picks.sum(-1), expected.unsqueeze(1).expand(3, 4))
    assert torch.equal(gates > 0, picks)
    assert not (picks & ~UNEVEN.unsqueeze(1)).any()
    torch.testing.assert_close(gates.sum(-1), torch.ones(3, 4))


def test_absent_experts_get_exactly_nothing_and_no_gradient() -> None:
    logits = (random_logits(3, 9, 3) + torch.tensor([0.0, 0.0, 50.0])).requires_grad_()
    gates, _ = gate(logits, UNEVEN, 2)
    absent = ~UNEVEN.unsqueeze(1).expand_as(gates)
    assert (gates[absent] == 0).all()
    upstream = random_logits(3, 9, 3, seed=1)
    (gradient,) = torch.autograd.grad((gates * upstream).sum(), logits)
    assert (gradient[absent] == 0).all()
    assert (gradient[0] == 0).all()  # a single expert: nothing to decide
    assert (gradient[1, :, :2] != 0).all()


def test_an_average_without_a_router_is_exact_to_the_last_bit_of_float64() -> None:
    gates = uniform_gates(UNEVEN)
    expected = torch.tensor([[1, 0, 0], [1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3]], dtype=torch.float64)
    assert torch.equal(gates.double(), expected)


def test_without_a_weight_the_router_averages() -> None:
    router = Router()
    router.present = UNEVEN
    gates = router(random_logits(3, 5, 8))
    assert gates.dtype == torch.float64
    assert torch.equal(gates, uniform_gates(UNEVEN).double().unsqueeze(1).expand(3, 5, 3))
    assert router.penalty is None


def test_gates_of_bf16_tokens_are_float32() -> None:
    router = bound_router(top_k=2, balance="generalist", dtype=torch.bfloat16)
    gates = router(random_logits(3, 5, 8).bfloat16())
    assert gates.dtype == torch.float32
    assert router.penalty is not None
    assert router.penalty.dtype == torch.float32
    torch.testing.assert_close(gates.sum(-1), torch.ones(3, 5))  # to float32's precision, not bf16's


def test_each_user_is_routed_by_its_own_weight() -> None:
    router = bound_router(top_k=3, balance="none")
    assert router.weight is not None
    x = random_logits(3, 5, 8)
    gates = router(x)
    for user in range(3):
        experts = int(UNEVEN[user].sum())
        expected = (x[user] @ router.weight[user, :experts].T).softmax(-1)
        torch.testing.assert_close(gates[user, :, :experts], expected)


def bound_router(*, top_k: int, balance: Balance, dtype: torch.dtype = torch.float64, experts: int = 3) -> Router:
    router = Router()
    router.top_k, router.balance = top_k, balance
    router.present = UNEVEN[:, :experts] if experts == 3 else torch.ones(3, experts, dtype=torch.bool)
    drawn = torch.randn(3, experts, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    router.weight = drawn.to(dtype).requires_grad_()
    return router


@pytest.mark.parametrize("balance", ["none", "uniform", "generalist"])
@pytest.mark.parametrize("experts", [2, 3, 4])
@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
def test_a_penalty_is_left_out_exactly_where_it_has_no_gradient(balance: Balance, experts: int, top_k: int) -> None:
    router = bound_router(top_k=top_k, balance=balance, experts=experts)
    x = random_logits(3, 12, 8, seed=3)
    router(x)
    assert (router.penalty is not None) == router.has_penalty
    logits = torch.bmm(x, router.weight.mT)  # type: ignore[union-attr]
    picks = gate(logits, router.present, top_k)[1]
    if balance == "none":
        assert not router.has_penalty
        return
    penalty = balance_penalty(logits, picks, router.present, balance)
    (gradient,) = torch.autograd.grad(penalty.sum(), [router.weight])
    assert (gradient.abs().max() > 1e-6) == router.has_penalty
    if router.penalty is not None:
        torch.testing.assert_close(router.penalty, penalty)


def test_initial_weights_are_small_normals() -> None:
    drawn = init_router((2, 50_000), torch.Generator().manual_seed(0))
    assert abs(drawn.std().item() / 0.02 - 1) < 0.01
    assert abs(drawn.mean().item()) < 3e-4
    assert torch.equal(drawn, init_router((2, 50_000), torch.Generator().manual_seed(0)))


def test_gates_by_similarity_are_mean_cosines_and_the_first_expert_has_the_rest() -> None:
    """Against each cosine by itself; of what users do not have nothing, of what points away nothing, never above 1."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(3, 9, 5, generator=draw, dtype=torch.float64)
    others = torch.randn(3, 2, 4, 5, generator=draw, dtype=torch.float64) + 0.8  # four vectors for each expert
    unit = others / others.norm(dim=-1, keepdim=True)
    router = Router()
    router.gating, router.present, router.weight = SimilarityGating(), UNEVEN, 1.5 * unit.mean(2)
    gates, seen = router(x), set()
    for user in range(3):
        for token in range(9):
            cosines = torch.cosine_similarity(x[user, token].expand(2, 4, 5), others[user], dim=-1)
            shares = [min(max(1.5 * float(c.mean()), 0.0), 1.0) for c in cosines]
            shares = [s if UNEVEN[user, j + 1] else 0.0 for j, s in enumerate(shares)]
            whole = max(1.0, sum(shares))
            seen |= {whole > 1, min(shares) == 0}
            expected = torch.tensor([1 - sum(shares) / whole, *(s / whole for s in shares)], dtype=torch.float64)
            torch.testing.assert_close(gates[user, token], expected)
    assert router.penalty is None
    assert seen == {True, False}


def test_nothing_is_similar_to_a_zero() -> None:
    router = Router()
    router.present = torch.ones(1, 2, dtype=torch.bool)
    gates = SimilarityGating()(router, torch.zeros(1, 2, 1), torch.zeros(1, 2, 4))
    assert gates.tolist() == [[[1.0, 0.0], [1.0, 0.0]]]
