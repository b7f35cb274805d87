"""Every low-rank form against the materialised weight."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from clusters import materialise, only_layer, scatter
from torch import Tensor, nn

from comingle.models.floral.layers import AdaptedConv, AdaptedLinear
from comingle.models.floral.wrapper import floral

CONVS: dict[str, dict[str, Any]] = {
    "plain": {"kernel_size": 3},
    "strided": {"kernel_size": (3, 2), "stride": (2, 3), "padding": (1, 2)},
    "dilated": {"kernel_size": (2, 3), "dilation": (3, 2), "padding": (2, 1)},
    "grouped": {"kernel_size": (3, 1), "groups": 2, "padding": (1, 0)},
    "pointwise with stride and padding": {"kernel_size": 1, "stride": 2, "padding": 1},
    "same": {"kernel_size": (4, 3), "padding": "same", "dilation": (1, 2)},
    "valid": {"kernel_size": 3, "padding": "valid"},
    "circular": {"kernel_size": 3, "padding": (1, 2), "padding_mode": "circular", "stride": (1, 2)},
    "reflect": {"kernel_size": (2, 3), "padding": (2, 1), "padding_mode": "reflect", "groups": 2},
    "replicate, same": {"kernel_size": (2, 4), "padding": "same", "padding_mode": "replicate"},
    "without bias": {"kernel_size": 3, "bias": False},
}
FORMS = ["balanced-2d", "channel", "in", "out", "filter", "linear"]


def doubles(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def convolve(base: nn.Conv2d | nn.Conv1d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """PyTorch's own layer with another weight and bias."""
    plain = copy.deepcopy(base)
    plain.weight.data = weight
    if bias is not None:
        assert plain.bias is not None
        plain.bias.data = bias
    return plain(x)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("settings", CONVS.values(), ids=CONVS.keys())
@pytest.mark.parametrize("form", FORMS)
def test_a_convolution_is_one_with_the_materialised_weight(form: Any, settings: dict[str, Any]) -> None:
    base = nn.Conv2d(4, 6, **settings, dtype=torch.float64)
    model = floral(base, num_clusters=2, rank=2, conv=form, alpha=0.7)
    x, layer = doubles(2, 4, 9, 8), only_layer(model)
    assert isinstance(layer, AdaptedConv)
    torch.testing.assert_close(model(x), base(x), rtol=0, atol=0)
    scatter(model)
    assert layer.geometry is not None
    assert layer.a is not None
    assert layer.b is not None
    shares = 0.7 * model.router.theta.softmax(0)
    deltas = [materialise(layer.geometry, a, b) for a, b in zip(layer.a, layer.b, strict=True)]
    weight = layer.base.get_parameter("weight") + sum(s * d for s, d in zip(shares, deltas, strict=True))
    bias = None
    if layer.bias is not None:
        bias = layer.base.get_parameter("bias") + sum(s * b for s, b in zip(shares, layer.bias, strict=True))
    expected = convolve(base, x, weight.detach(), None if bias is None else bias.detach())
    torch.testing.assert_close(model(x).detach(), expected)
    merged = model.merge()
    assert type(merged) is nn.Conv2d
    torch.testing.assert_close(merged.weight.data, weight.detach())
    torch.testing.assert_close(merged(x), expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("settings", [{"groups": 2, "stride": 2, "padding": 1}, {"padding": "same", "dilation": 2}])
def test_a_convolution_in_one_dimension_too(form: Any, settings: dict[str, Any]) -> None:
    base = nn.Conv1d(4, 6, 3, **settings, dtype=torch.float64)
    model = floral(base, num_clusters=2, rank=2, conv=form)
    scatter(model)
    x = doubles(2, 4, 9)
    torch.testing.assert_close(model(x), model.merge()(x))
    layer = only_layer(model)
    assert isinstance(layer, AdaptedConv)
    assert layer.geometry is not None
    assert layer.a is not None
    assert layer.b is not None
    delta = sum(materialise(layer.geometry, a, b) for a, b in zip(layer.a, layer.b, strict=True)) / 2
    merged = model.merge(torch.full((2,), 0.5))
    torch.testing.assert_close(merged.get_parameter("weight").data, (layer.base.get_parameter("weight") + delta).data)


def test_the_forms_have_the_papers_shapes_and_put_the_kernel_where_it_is_cheaper() -> None:
    def shapes(form: Any, kernel: Any = (3, 3), d_in: int = 4, d_out: int = 6) -> tuple[Any, Any]:
        layer = only_layer(floral(nn.Conv2d(d_in, d_out, kernel), num_clusters=1, rank=2, conv=form))
        assert isinstance(layer, AdaptedConv)
        assert layer.a is not None
        assert layer.b is not None
        return tuple(layer.a.shape[1:]), tuple(layer.b.shape[1:])

    assert shapes("balanced-2d") == ((2, 4, 1, 3), (6, 2, 3, 1))
    assert shapes("balanced-2d", (5, 3)) == ((2, 4, 5, 1), (6, 2, 1, 3))  # the long side where there are few channels
    assert shapes("channel") == shapes("in") == ((2, 4, 3, 3), (6, 2, 1, 1))
    assert shapes("channel", d_in=8) == shapes("out", d_in=8) == ((2, 8, 1, 1), (6, 2, 3, 3))
    assert shapes("filter") == ((12, 4, 1, 3), (6, 12, 3, 1))
    assert shapes("linear") == ((2, 36), (6, 2))
    assert shapes("linear", d_in=8) == ((2, 8), (54, 2))


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_is_one_with_the_materialised_weight(bias: bool) -> None:
    base = nn.Linear(5, 4, bias=bias, dtype=torch.float64)
    model = floral(base, num_clusters=3, rank=2, alpha=1.5)
    x = doubles(2, 3, 5)
    torch.testing.assert_close(model(x), base(x), rtol=0, atol=0)
    scatter(model)
    layer = only_layer(model)
    assert isinstance(layer, AdaptedLinear)
    assert layer.a is not None
    assert layer.b is not None
    shares = 1.5 * model.router.theta.softmax(0)
    weight = layer.base.get_parameter("weight") + sum(shares[c] * layer.b[c] @ layer.a[c] for c in range(3))
    offset = None
    if layer.bias is not None:
        offset = layer.base.get_parameter("bias") + sum(shares[c] * layer.bias[c] for c in range(3))
    assert (layer.bias is not None) == bias
    torch.testing.assert_close(model(x), F.linear(x, weight, offset))
    torch.testing.assert_close(model.merge()(x), model(x))


def test_gpt2s_transposed_linear_is_one_with_the_materialised_weight() -> None:
    from transformers.pytorch_utils import Conv1D

    base = Conv1D(4, 5).double()
    model = floral(base, num_clusters=2, rank=2)
    x = doubles(2, 3, 5)
    scatter(model)
    layer = only_layer(model)
    assert isinstance(layer, AdaptedLinear)
    assert layer.a is not None
    assert layer.b is not None
    assert layer.bias is not None
    pi = model.router.theta.softmax(0)
    weight = layer.base.get_parameter("weight") + sum(pi[c] * (layer.b[c] @ layer.a[c]).T for c in range(2))
    torch.testing.assert_close(model(x), x @ weight + layer.base.get_parameter("bias") + pi @ layer.bias)
    torch.testing.assert_close(model.merge()(x), model(x))


def test_the_mixture_weighs_the_clusters_adaptors_and_has_their_gradient() -> None:
    model = floral(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double(), num_clusters=3, rank=2)
    scatter(model)
    x = doubles(6, 5)
    for cluster in range(3):
        alone = torch.eye(3, dtype=torch.float64)[cluster]
        torch.testing.assert_close(model(x, mixture=alone), model.merge(alone)(x))
    assert torch.autograd.gradcheck(lambda pi: model(x, mixture=pi), doubles(3).softmax(0).requires_grad_())
    model(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
