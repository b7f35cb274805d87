"""Before training an adapted model is its base; while training, the base stays as it is."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from comingle.config.settings import AdaptersSection
from comingle.models.adapted import AdaptedModel, adapt
from comingle.models.base import Base
from comingle.models.injection import ExpertCounts
from comingle.models.loading import load_base
from comingle.models.lora import init_a, init_zero, lora_scale
from comingle.training.state import initial_state
from comingle.utils.trees import Tree
from naive import FAMILIES, honest_double

NAMES = ["ann", "bea", "cem"]
COUNTS = ExpertCounts(generalists=1, specialists=(0, 1, 2))


def adapted(family: str, mix: str = "output", *, routed: bool = True, dtype: str = "float64") -> AdaptedModel:
    base = load_base(f"random:{family}", dtype=dtype, device="cpu")
    return adapt(base, AdaptersSection(rank=4, mix=mix), COUNTS, routed=routed, compiled=False)


def initial_tensors(model: AdaptedModel) -> Tree:
    local = model.layout.mask({"specialist", "router"})
    ranks = model.adapters.ranks
    state = initial_state(
        model.layout, model.mask(), names=NAMES, local=local, ranks=ranks, seed=0, dtype=model.base.dtype
    )
    return {name: t.clone().requires_grad_() for name, t in model.layout.views(state.rows).items()}


def base_losses(base: Base, windows: torch.Tensor) -> torch.Tensor:
    logits = base.model(input_ids=windows[..., :-1].flatten(0, 1)).logits
    targets = windows[..., 1:]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


@pytest.mark.parametrize(("mix", "routed"), [("output", True), ("output", False), ("linear", True)])
@pytest.mark.parametrize("family", FAMILIES)
def test_starts_as_its_base(family: str, mix: str, routed: bool) -> None:
    model = adapted(family, mix, routed=routed)
    windows = torch.randint(0, 256, (3, 2, 7))
    with honest_double(), torch.no_grad():
        losses, _ = model.losses(initial_tensors(model), range(3), windows)
        torch.testing.assert_close(losses, base_losses(model.base, windows), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_starts_as_its_base_in_the_dtypes_that_are_used(dtype: str) -> None:
    model = adapted("llama", dtype=dtype)
    windows = torch.randint(0, 256, (3, 2, 7))
    with torch.no_grad():
        losses, _ = model.losses(initial_tensors(model), range(3), windows)
        tolerance = 1e-4 if dtype == "float32" else 0.05
        torch.testing.assert_close(losses, base_losses(model.base, windows).float(), rtol=0, atol=tolerance)
    assert losses.dtype == torch.float32


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_leaves_the_base_bit_identical(family: str) -> None:
    model = adapted(family, dtype="float32")
    before = {name: t.clone() for name, t in model.base.model.state_dict().items()}
    tensors = initial_tensors(model)
    losses, penalties = model.losses(tensors, range(3), torch.randint(0, 256, (3, 2, 7)))
    (losses.mean() + torch.as_tensor(penalties).sum()).backward()
    after = model.base.model.state_dict()
    assert after.keys() == before.keys()  # the base keeps its own modules, too
    for name, t in before.items():
        assert torch.equal(after[name], t), name
    for network in (model.base.model, model.network):
        for name, parameter in network.named_parameters():
            assert not parameter.requires_grad, name
            assert parameter.grad is None, name
    own = {id(p) for p in model.base.model.parameters()}
    assert {id(p) for p in model.network.parameters()} == own  # shared, not copied


def test_only_b_and_what_depends_on_b_learns_first() -> None:
    """B = 0: no gradient reaches A or the router, all of it reaches B."""
    model = adapted("llama")
    tensors = initial_tensors(model)
    losses, _ = model.losses(tensors, range(3), torch.randint(0, 256, (3, 2, 7)))
    found = dict(zip(tensors, torch.autograd.grad(losses.sum(), list(tensors.values())), strict=True))
    for name, gradient in found.items():
        if name.endswith(".b"):
            assert gradient[2].flatten(1).abs().amax(1).min() > 0, name
        else:
            assert gradient.abs().max() < 1e-12, name


def test_factors_are_drawn_as_kaiming_uniform_with_a_root_5() -> None:
    drawn = init_a((3, 8, 64), torch.Generator().manual_seed(0))
    expected = torch.empty(3 * 8, 64)
    torch.nn.init.kaiming_uniform_(expected, a=math.sqrt(5))  # bound 1 / sqrt(fan_in)
    assert drawn.abs().max() <= 1 / math.sqrt(64)
    assert drawn.abs().max() == pytest.approx(expected.abs().max().item(), rel=0.01)
    assert drawn.std().item() == pytest.approx(expected.std().item(), rel=0.05)
    assert abs(drawn.mean().item()) < 0.01
    assert not init_zero((2, 3), torch.Generator()).any()


@pytest.mark.parametrize(("alpha", "rank", "expected"), [(16.0, 8, 5.656854249492381), (16.0, 4, 8.0), (5.0, 1, 5.0)])
def test_the_scale_is_rank_stabilised(alpha: float, rank: int, expected: float) -> None:
    assert lora_scale(alpha, rank) == pytest.approx(expected, rel=1e-15)
