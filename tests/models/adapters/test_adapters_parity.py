"""The stacked adapters against one user, one expert, one token at a time: values and gradients, in float64."""

from __future__ import annotations

import copy
import math
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from comingle.config.settings import AdaptersSection
from comingle.models.adapted import AdaptedModel, adapt
from comingle.models.injection import ExpertCounts
from comingle.models.loading import load_base
from naive import FAMILIES, Reference, Rules, honest_double

UNEVEN = ExpertCounts(generalists=1, specialists=(0, 1, 2))
TWO_GENERALISTS = ExpertCounts(generalists=2, specialists=(0, 0))
TOLERANCE = {"rtol": 1e-8, "atol": 1e-11}
BALANCE_WEIGHT = 0.3


def random_tensors(model: AdaptedModel, seed: int = 0) -> dict[str, Tensor]:
    """Non-zero factors and routers; padding is zero."""
    mask = model.mask()
    rows = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.1 * mask
    return {name: t.clone().requires_grad_() for name, t in model.layout.views(rows).items()}


def random_windows(users: int, seed: int = 1) -> Tensor:
    return torch.randint(0, 256, (users, 2, 7), generator=torch.Generator().manual_seed(seed))


def own_tensors(model: AdaptedModel, tensors: dict[str, Tensor], user: int) -> dict[str, Tensor]:
    """One user's tensors, of the experts that it has; a router only where there is a choice."""
    experts = int(model.adapters.present[user].sum())
    own = {}
    for name, t in tensors.items():
        if name.endswith(".router") and experts == 1:
            continue
        own[name] = (t[user, :experts] if ".mlp." in name else t[user]).detach().clone().requires_grad_()
    return own


def check(family: str, counts: ExpertCounts, settings: AdaptersSection, *, routed: bool, balance: str) -> None:
    """Losses, penalties and all gradients of every user against its naive model."""
    base = load_base(f"random:{family}", dtype="float64", device="cpu")
    plain = copy.deepcopy(base.model)
    rules = Rules(
        scale=settings.alpha / math.sqrt(settings.rank), top_k=settings.top_k, mix=settings.mix, balance=balance
    )
    model = adapt(base, settings, counts, routed=routed, compiled=False)
    users = range(len(counts.specialists))
    tensors, windows = random_tensors(model), random_windows(len(users))
    with honest_double():
        losses, penalties = model.losses(tensors, users, windows)
        objective = (losses.mean((1, 2)) + BALANCE_WEIGHT * penalties).sum()
        found = dict(zip(tensors, torch.autograd.grad(objective, list(tensors.values())), strict=True))
        for user in users:
            own = own_tensors(model, tensors, user)
            expected, term = Reference(plain, family, own, rules).losses(windows[user])
            torch.testing.assert_close(losses[user], expected, **TOLERANCE)
            if isinstance(penalties, Tensor) and any(name.endswith(".router") for name in own):
                torch.testing.assert_close(penalties[user], term, **TOLERANCE)
            objective = expected.mean() + BALANCE_WEIGHT * term
            gradients = torch.autograd.grad(objective, list(own.values()))
            for (name, t), gradient in zip(own.items(), gradients, strict=True):
                assert settings.top_k == 1 or gradient.abs().max() > 0, name
                got = found[name][user, : len(t)] if ".mlp." in name else found[name][user]
                torch.testing.assert_close(
                    got, gradient, **TOLERANCE, msg=lambda m, n=name, u=user: f"{n}, user {u}: {m}"
                )


@pytest.mark.parametrize("family", FAMILIES)
def test_routed_experts_equal_the_naive_loop(family: str) -> None:
    check(family, UNEVEN, AdaptersSection(rank=4), routed=True, balance="generalist")


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt"])
@pytest.mark.parametrize(
    ("counts", "settings", "routed", "balance"),
    [
        pytest.param(UNEVEN, {}, False, "none", id="no-router"),
        pytest.param(TWO_GENERALISTS, {}, True, "uniform", id="two-generalists"),
        pytest.param(TWO_GENERALISTS, {}, False, "none", id="two-generalists-averaged"),
        pytest.param(ExpertCounts(generalists=1, specialists=(0, 0)), {}, True, "none", id="single-expert"),
        pytest.param(ExpertCounts(generalists=0, specialists=(3, 1)), {}, True, "uniform", id="specialists-only"),
        pytest.param(UNEVEN, {"top_k": 1}, True, "generalist", id="top-1"),
        pytest.param(UNEVEN, {"top_k": 3}, True, "generalist", id="top-3"),
        pytest.param(UNEVEN, {"balance": "uniform"}, True, "uniform", id="uniform-balance"),
        pytest.param(UNEVEN, {"rank": 3, "alpha": 5.0}, True, "generalist", id="rank-3-alpha-5"),
    ],
)
@pytest.mark.sampled(4)
def test_every_setting_equals_the_naive_loop(
    family: str, counts: ExpertCounts, settings: dict[str, Any], routed: bool, balance: str
) -> None:
    check(family, counts, AdaptersSection(**({"rank": 4} | settings)), routed=routed, balance=balance)


@pytest.mark.parametrize("family", FAMILIES)
def test_mixing_at_each_linear_equals_its_own_naive_loop(family: str) -> None:
    check(family, UNEVEN, AdaptersSection(rank=4, mix="linear"), routed=True, balance="generalist")


@pytest.mark.parametrize("counts", [UNEVEN, ExpertCounts(generalists=1, specialists=(0, 0))])
def test_mixing_at_each_linear_without_a_router(counts: ExpertCounts) -> None:
    check("llama", counts, AdaptersSection(rank=4, mix="linear"), routed=False, balance="none")


def test_a_single_expert_is_plain_lora_in_both_mixes() -> None:
    losses = []
    for mix in ("output", "linear"):
        base = load_base("random:llama", dtype="float64", device="cpu")
        counts = ExpertCounts(generalists=1, specialists=(0, 0))
        model = adapt(base, AdaptersSection(rank=4, mix=mix), counts, routed=True, compiled=False)
        assert not any(name.endswith(".router") for name in model.layout.starts)
        with honest_double():
            losses.append(model.losses(random_tensors(model), [0, 1], random_windows(2))[0])
    torch.testing.assert_close(*losses, **TOLERANCE)


@pytest.mark.parametrize(
    ("mix", "family"),
    [
        ("output", "gpt2"),
        ("linear", "llama"),
        *(pytest.param(*both, marks=pytest.mark.slow) for both in (("output", "llama"), ("linear", "gpt2"))),
    ],
)
def test_bf16_errs_no_more_than_a_naive_loop_in_bf16(family: str, mix: str) -> None:
    """Relative error of each user's gradient against float64, medians over users and draws; no near ties of a top-k."""
    ours, naive = [], []
    for seed in range(3):
        rough, weights = bf16_gradients(family, mix, seed, "bfloat16", None)
        exact, _ = bf16_gradients(family, mix, seed, "float64", weights)
        for (mine, loop), (true, _) in zip(rough, exact, strict=True):
            ours.append(((mine - true).norm() / true.norm()).item())
            naive.append(((loop - true).norm() / true.norm()).item())
    assert statistics.median(ours) < 1.5 * statistics.median(naive)


def bf16_gradients(
    family: str, mix: str, seed: int, dtype: str, weights: dict[str, Tensor] | None
) -> tuple[list[tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """Each user's gradient, stacked and by the naive loop, in ``dtype`` at bf16 weights and factors; the weights."""
    base = load_base(f"random:{family}", dtype=dtype, device="cpu")
    plain = copy.deepcopy(base.model)
    if weights:
        base.model.load_state_dict(weights)
        plain.load_state_dict(weights)
    settings = AdaptersSection(rank=4, mix=mix, top_k=3, balance="none")
    model = adapt(base, settings, UNEVEN, routed=True, compiled=False)
    drawn = random_tensors(model, seed)
    tensors = {name: t.detach().bfloat16().to(base.dtype).requires_grad_() for name, t in drawn.items()}
    windows = random_windows(3, seed)
    losses, _ = model.losses(tensors, range(3), windows)
    found = dict(zip(tensors, torch.autograd.grad(losses.mean((1, 2)).sum(), list(tensors.values())), strict=True))
    assert {g.dtype for g in found.values()} == {base.dtype}
    pairs = []
    for user in range(3):
        own = own_tensors(model, tensors, user)
        rules = Rules(scale=8.0, top_k=3, mix=mix)
        loss = Reference(plain, family, own, rules).losses(windows[user])[0].mean()
        gradients = torch.autograd.grad(loss, list(own.values()))
        mine = [found[n][user, : len(t)] if ".mlp." in n else found[n][user] for n, t in own.items()]
        pairs.append(
            (torch.cat([g.flatten() for g in mine]).double(), torch.cat([g.flatten() for g in gradients]).double())
        )
    return pairs, plain.state_dict()
