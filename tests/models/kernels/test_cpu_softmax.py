"""Native cross-entropy against PyTorch's in float64; what it does to a model's loss."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from comingle.models import loss
from comingle.models.kernels.cpu import softmax
from comingle.models.loading import Head

DTYPES = {torch.float32: 3e-6, torch.bfloat16: 4e-3}
"""Relative error of one weight."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 64, 259, 1000])
def test_losses_weights_and_sums(vocab: int, dtype: torch.dtype, library: None) -> None:
    logits, ids = (6 * torch.randn(9, vocab)).to(dtype), torch.randint(0, vocab, (9,))
    exact = logits.double()
    weights = (exact - exact.amax(1, keepdim=True)).exp()
    found = softmax(logits.clone(), ids, True)
    assert found is not None
    losses, mine, totals = found
    torch.testing.assert_close(
        losses.double(), torch.nn.functional.cross_entropy(exact, ids, reduction="none"), rtol=1e-5, atol=4e-6
    )
    torch.testing.assert_close(mine.double(), weights, rtol=DTYPES[dtype], atol=1e-9)
    torch.testing.assert_close(totals.double(), weights.sum(1), rtol=3e-6, atol=0)


def test_logits_stay_where_weights_are_not_wanted(library: None) -> None:
    logits, ids = torch.randn(4, 33), torch.randint(0, 33, (4,))
    before = logits.clone()
    found = softmax(logits, ids, False)
    assert found is not None
    assert torch.equal(logits, before)
    torch.testing.assert_close(found[0], torch.nn.functional.cross_entropy(logits, ids, reduction="none"))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_number_that_is_none_arrives(bad: float, library: None) -> None:
    logits = torch.randn(3, 40)
    logits[1, 7] = bad
    found = softmax(logits, torch.zeros(3, dtype=torch.long), True)
    assert found is not None
    assert found[0].isfinite().tolist() == [True, False, True]


def test_what_cannot_be_has_no_weight(library: None) -> None:
    logits = torch.randn(2, 40)
    logits[0, 5:] = -math.inf
    wanted = torch.nn.functional.cross_entropy(logits, torch.tensor([1, 1]), reduction="none")
    found = softmax(logits, torch.tensor([1, 1]), True)
    assert found is not None
    torch.testing.assert_close(found[0], wanted)
    assert found[1][0, 5:].abs().max() < 1e-30


@pytest.mark.parametrize("target", [-1, 40])
def test_a_target_that_is_no_token(target: int, library: None) -> None:
    with pytest.raises(IndexError, match=r"target.* 40 tokens"):
        softmax(torch.randn(2, 40), torch.tensor([0, target]), True)


@pytest.mark.parametrize("kind", [torch.int32, torch.int16, torch.uint8])
def test_targets_of_other_widths(kind: torch.dtype, library: None) -> None:
    logits, ids = torch.randn(4, 40), torch.tensor([5, 0, 7, 0])
    found, wanted = softmax(logits.clone(), ids.to(kind), True), softmax(logits.clone(), ids, True)
    assert found is not None
    assert wanted is not None
    assert torch.equal(found[0], wanted[0])


def test_tensors_without_memory_get_outputs_of_the_same_shapes(library: None) -> None:
    """As when a step's memory is counted in a process that has trained."""
    real = softmax(torch.randn(4, 40), torch.zeros(4, dtype=torch.long), True)
    with FakeTensorMode():
        counted = softmax(torch.randn(4, 40), torch.zeros(4, dtype=torch.long), True)
    assert real is not None
    assert counted is not None
    assert [(tensor.shape, tensor.dtype) for tensor in counted] == [(tensor.shape, tensor.dtype) for tensor in real]


def test_float64_is_left_to_pytorch(library: None) -> None:
    assert softmax(torch.randn(2, 40).double(), torch.tensor([0, 1]), True) is None


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("scale", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_and_its_gradient(
    dtype: torch.dtype, scale: float, cap: float | None, library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(50, 16).to(dtype)
    head = Head(weight=weight, bias=torch.randn(50).to(dtype), scale=scale, softcap=cap)
    hidden, ids = torch.randn(2, 7, 16).to(dtype), torch.randint(0, 50, (2, 7))
    ids[1, 3] = -1
    exact = replace(head, weight=weight.double(), bias=None if head.bias is None else head.bias.double())
    states = hidden.double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(exact.logits(states).mT, ids, reduction="none", ignore_index=-1)
    (d_wanted,) = torch.autograd.grad(wanted.sum(), states)
    calls: list[int] = []
    monkeypatch.setattr(loss, "native_softmax_parts", lambda *args: calls.append(1) or softmax(*args))
    own = hidden.clone().requires_grad_()
    found = loss.cross_entropy(own, head, ids)
    (d_found,) = torch.autograd.grad(found.sum(), own)
    assert calls
    close = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=close, atol=close)
    assert (d_found.double() - d_wanted).norm() < close * d_wanted.norm()
