"""The chunked cross-entropy against ``F.cross_entropy`` on all logits at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from comingle.models import loss
from comingle.models.loading import Head
from comingle.models.loss import cross_entropy

WIDTH, VOCAB, SHAPE = 6, 29, (3, 5)


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def make_head(
    *, bias: bool = False, scale: float = 1.0, softcap: float | None = None, dtype: torch.dtype = torch.float64
) -> Head:
    return Head(
        weight=draw(VOCAB, WIDTH, seed=0, dtype=dtype),
        bias=draw(VOCAB, seed=1, dtype=dtype) if bias else None,
        scale=scale,
        softcap=softcap,
    )


def make_targets(ignored: bool = False) -> Tensor:
    targets = torch.randint(0, VOCAB, SHAPE, generator=torch.Generator().manual_seed(2))
    if ignored:
        targets[0, 1], targets[2] = -1, -100
    return targets


def by_logits(hidden: Tensor, head: Head, targets: Tensor) -> Tensor:
    logits = hidden @ head.weight.T
    if head.bias is not None:
        logits = logits + head.bias
    logits = logits * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    flat = F.cross_entropy(logits.flatten(0, -2), targets.clamp(min=0).flatten(), reduction="none").view(targets.shape)
    return torch.where(targets < 0, 0.0, flat)


def compare(head: Head, targets: Tensor, hidden: Tensor, **tolerance: float) -> None:
    """Losses, and gradients under unequal upstream gradients."""
    upstream = draw(*targets.shape, seed=4)
    found, expected = cross_entropy(hidden, head, targets), by_logits(hidden, head, targets)
    torch.testing.assert_close(found, expected, **tolerance)
    gradients = [torch.autograd.grad((losses * upstream).sum(), hidden)[0] for losses in (found, expected)]
    torch.testing.assert_close(*gradients, **tolerance)
    assert (gradients[0][targets < 0] == 0).all()
    with torch.no_grad():
        torch.testing.assert_close(cross_entropy(hidden, head, targets), expected, **tolerance)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.25, 3.0])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("ignored", [False, True])
def test_equals_the_cross_entropy_of_all_logits(bias: bool, scale: float, softcap: float | None, ignored: bool) -> None:
    head = make_head(bias=bias, scale=scale, softcap=softcap)
    hidden = draw(*SHAPE, WIDTH, seed=3).requires_grad_()
    compare(head, make_targets(ignored), hidden, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("positions_per_chunk", [0.01, 1, 2, 7, 14, 15, 1000])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_chunks_do_not_matter(
    positions_per_chunk: float, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "CHUNK_BYTES", positions_per_chunk * VOCAB * 8)
    hidden = draw(*SHAPE, WIDTH, seed=3).requires_grad_()
    compare(make_head(bias=True, softcap=softcap), make_targets(ignored=True), hidden, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_everything_ignored_is_zero(softcap: float | None) -> None:
    hidden = draw(*SHAPE, WIDTH, seed=3).requires_grad_()
    losses = cross_entropy(hidden, make_head(softcap=softcap), torch.full(SHAPE, -1))
    assert (losses == 0).all()
    assert (torch.autograd.grad(losses.sum(), hidden)[0] == 0).all()


@pytest.mark.parametrize("factor", [1e3, 1e6])
def test_large_logits_neither_overflow_nor_lose_the_gradient(factor: float) -> None:
    hidden = (draw(*SHAPE, WIDTH, seed=3) * factor).requires_grad_()
    compare(make_head(), make_targets(), hidden, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_bf16_is_close_to_float64_of_the_same_numbers(scale: float, softcap: float | None) -> None:
    rough = make_head(bias=True, scale=scale, softcap=softcap, dtype=torch.bfloat16)
    assert rough.bias is not None
    exact = Head(weight=rough.weight.double(), bias=rough.bias.double(), scale=scale, softcap=softcap)
    hidden, targets = draw(*SHAPE, WIDTH, seed=3, dtype=torch.bfloat16).requires_grad_(), make_targets(ignored=True)
    losses, expected = cross_entropy(hidden, rough, targets), by_logits(hidden.double(), exact, targets)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), expected, rtol=0, atol=0.05)
    gradients = [torch.autograd.grad(t.sum(), hidden)[0] for t in (losses, expected)]
    assert gradients[0].dtype == torch.bfloat16
    error = (gradients[0].double() - gradients[1].double()).norm() / gradients[1].double().norm()
    assert error < 0.02


class Largest(TorchDispatchMode):
    """The number of entries of the largest tensor that any operation yields, views of the head aside."""

    def __init__(self, head: Head):
        super().__init__()
        self.head, self.entries = head.weight.data_ptr(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, tuple | list) else [result]:
            if isinstance(t, Tensor) and t.data_ptr() != self.head:
                self.entries = max(self.entries, t.numel())
        return result


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_logits_of_one_chunk_are_the_largest_tensor(softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "CHUNK_BYTES", 3 * VOCAB * 8)  # 15 positions in 5 chunks
    hidden = draw(*SHAPE, WIDTH, seed=3).requires_grad_()
    head = make_head(softcap=softcap)
    with Largest(head) as largest:
        cross_entropy(hidden, head, make_targets()).sum().backward()
    assert 3 * VOCAB <= largest.entries <= max(3 * VOCAB, 15 * WIDTH)


def test_positions_without_a_target_never_meet_the_head() -> None:
    targets, head = torch.full(SHAPE, -1), make_head()
    targets[0, 0], targets[2, 1:4] = 3, 5
    with Largest(head) as largest:
        cross_entropy(draw(*SHAPE, WIDTH, seed=3).requires_grad_(), head, targets).sum().backward()
    assert largest.entries == 4 * VOCAB


@pytest.mark.parametrize("grad", [True, False])
def test_only_a_gradient_of_the_size_of_the_hidden_states_is_kept(grad: bool) -> None:
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    hidden = draw(*SHAPE, WIDTH, seed=3).requires_grad_(grad)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        losses = cross_entropy(hidden, make_head(), make_targets())
    assert losses.requires_grad == grad
    assert [tuple(t.shape) for t in saved] == ([(15, WIDTH)] if grad else [])


def test_the_head_gets_no_gradient() -> None:
    head = make_head()
    head.weight.requires_grad_()
    cross_entropy(draw(*SHAPE, WIDTH, seed=3).requires_grad_(), head, make_targets()).sum().backward()
    assert head.weight.grad is None
