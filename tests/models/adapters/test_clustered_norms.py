"""Norm adaptors, local statistics, and BatchNorA (eq. 42)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from clusters import only_layer, scatter
from torch import Tensor, nn

from comingle.models.floral.model import FloralModel
from comingle.models.floral.norms import AdaptedBatchNorm
from comingle.models.floral.wrapper import floral
from comingle.utils.errors import RecipeError

NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layer": (lambda: nn.LayerNorm((3, 4)), (5, 3, 4)),
    "layer without bias": (lambda: nn.LayerNorm(4, bias=False), (5, 4)),
    "group": (lambda: nn.GroupNorm(2, 6), (5, 6, 3)),
    "instance 1d": (lambda: nn.InstanceNorm1d(3, affine=True), (5, 3, 4)),
    "instance 2d": (lambda: nn.InstanceNorm2d(3, affine=True), (5, 3, 4, 2)),
    "instance without a batch": (lambda: nn.InstanceNorm2d(3, affine=True), (3, 4, 2)),
    "instance with statistics": (lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True), (5, 3, 4)),
    "batch 1d": (lambda: nn.BatchNorm1d(3), (5, 3)),
    "batch 2d": (lambda: nn.BatchNorm2d(3), (5, 3, 4, 2)),
    "batch, cumulative": (lambda: nn.BatchNorm1d(3, momentum=None), (5, 3)),
    "batch without statistics": (lambda: nn.BatchNorm1d(3, track_running_stats=False), (5, 3)),
}


def of_own_norms(model: FloralModel, base: nn.Module) -> Callable[[Tensor], Tensor]:
    """The paper's definition: a norm of the same type beside the base for each cluster, called one after another."""
    layer, pi = only_layer(model), model.router.theta.softmax(0)
    main = copy.deepcopy(base)
    main.load_state_dict(layer.base.state_dict())
    others = []
    for cluster in range(model.num_clusters):
        own = copy.deepcopy(base)  # with the local statistics that all clusters have in common
        own.load_state_dict({**own.state_dict(), **{n: p[cluster] for n, p in layer.named_parameters(recurse=False)}})
        others.append(own)
    return lambda x: main(x) + sum(weight * own(x) for weight, own in zip(pi, others, strict=True))


@pytest.mark.parametrize(("make", "shape"), NORMS.values(), ids=NORMS.keys())
def test_a_norm_adaptor_is_a_norm_of_its_own_beside_the_base(make: Callable[[], nn.Module], shape: Any) -> None:
    base = make().double()
    scatter(base)
    model = floral(base, num_clusters=2, rank=1)
    first, second = 3 * torch.randn(2, *shape, dtype=torch.float64) + 1
    plain = copy.deepcopy(base)
    torch.testing.assert_close(model(first), plain(first), rtol=0, atol=0)
    torch.testing.assert_close(model.eval()(second), plain.eval()(second), rtol=0, atol=0)

    scatter(model)
    expected = of_own_norms(model, plain.train())
    torch.testing.assert_close(model.train()(second), expected(second), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("make", "shape"), NORMS.values(), ids=NORMS.keys())
@pytest.mark.parametrize("nora", [False, True])
def test_a_norm_merges_with_the_meaning_of_eval_mode(make: Callable[[], nn.Module], shape: Any, nora: bool) -> None:
    model = floral(make().double(), num_clusters=2, rank=1, batch_nora=nora)
    scatter(model)
    part_statistics(model)
    x = torch.randn(*shape, dtype=torch.float64)
    merged = model.eval().merge()
    assert type(merged) is type(make())
    torch.testing.assert_close(merged(x), model(x))


def part_statistics(model: FloralModel) -> None:
    """As after an average over users: the local statistics are no longer the base's."""
    layer = only_layer(model)
    if isinstance(layer, AdaptedBatchNorm) and layer.running_mean is not None and layer.running_var is not None:
        layer.running_mean += torch.randn_like(layer.running_mean)
        layer.running_var *= torch.rand_like(layer.running_var) + 0.5


def test_local_statistics_are_those_of_a_batch_norm_beside_the_base() -> None:
    model = floral(nn.BatchNorm1d(3).double(), num_clusters=2, rank=1)
    scatter(model)
    part_statistics(model)
    layer = only_layer(model)
    own = nn.BatchNorm1d(3).double()
    own.running_mean, own.running_var = (
        layer.get_buffer("running_mean").clone(),
        layer.get_buffer("running_var").clone(),
    )
    for _ in range(3):
        x = torch.randn(5, 3, dtype=torch.float64)
        model(x), own(x)
    torch.testing.assert_close(layer.get_buffer("running_mean"), own.running_mean)
    torch.testing.assert_close(layer.get_buffer("running_var"), own.running_var)
    # In eval mode: both norms, each by its own statistics.
    x, pi = torch.randn(5, 3, dtype=torch.float64), model.router.theta.softmax(0)
    weight, bias = layer.get_parameter("weight"), layer.get_parameter("bias")
    own.load_state_dict({**own.state_dict(), "weight": pi @ weight, "bias": pi @ bias})
    torch.testing.assert_close(model.eval()(x), layer.base.eval()(x) + own.eval()(x))


def reparameterised(model: FloralModel, x: Tensor, *, train: bool) -> Tensor:
    """Eq. 42 as written: batch norms with s gamma_i and beta_i + m sg(gamma_i), mixed by pi, beside the base's."""
    layer, pi = only_layer(model), model.router.theta.softmax(0)
    base = layer.base
    assert isinstance(base, nn.BatchNorm1d)
    weight, bias = layer.get_parameter("weight"), layer.get_parameter("bias")
    mean, var = base.get_buffer("running_mean").clone(), base.get_buffer("running_var").clone()
    own_mean, own_var = layer.get_buffer("running_mean").clone(), layer.get_buffer("running_var").clone()
    s = ((own_var + base.eps) / (var + base.eps)).sqrt()
    m = (own_mean - mean) / (var + base.eps).sqrt()
    mixed = torch.batch_norm(x, base.weight, base.bias, mean, var, train, 0.1, base.eps, False)
    for share, gamma, beta in zip(pi, weight, bias, strict=True):
        shift = beta + m * gamma.detach()
        mixed = mixed + share * torch.batch_norm(
            x, s * gamma, shift, own_mean.clone(), own_var.clone(), train, 0.1, base.eps, False
        )
    return mixed


@pytest.mark.parametrize("train", [True, False])
def test_batchnora_is_equation_42_with_the_papers_stop_gradient(train: bool) -> None:
    model = floral(nn.BatchNorm1d(3).double(), num_clusters=2, rank=1, batch_nora=True).train(train)
    scatter(model)
    part_statistics(model)
    x = torch.randn(7, 3, dtype=torch.float64)
    target = torch.randn(7, 3, dtype=torch.float64)
    parameters = list(model.parameters())
    expected = reparameterised(model, x, train=train)
    wanted = torch.autograd.grad((expected * target).sum(), parameters)
    got = model(x)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(torch.autograd.grad((got * target).sum(), parameters), wanted)


def test_batchnora_is_in_eval_mode_the_base_norm_with_the_sums() -> None:
    model = floral(nn.BatchNorm1d(3).double(), num_clusters=2, rank=1, batch_nora=True).eval()
    scatter(model)
    part_statistics(model)
    layer, pi = only_layer(model), model.router.theta.softmax(0)
    summed = copy.deepcopy(layer.base)
    summed.load_state_dict(
        {
            **summed.state_dict(),
            "weight": summed.get_parameter("weight") + pi @ layer.get_parameter("weight"),
            "bias": summed.get_parameter("bias") + pi @ layer.get_parameter("bias"),
        }
    )
    x = torch.randn(7, 3, dtype=torch.float64)
    torch.testing.assert_close(model(x), summed(x))


def test_norms_without_gamma_are_left() -> None:
    model = floral(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4, elementwise_affine=False)), num_clusters=2, rank=1)
    assert list(model.layers()) == ["model.0"]


def test_a_batch_norm_without_a_bias_merges_as_batchnora_only() -> None:
    base = nn.BatchNorm1d(3).double()
    base.register_parameter("bias", None)
    model = floral(base, num_clusters=2, rank=1)
    with pytest.raises(RecipeError, match="without bias"):
        model.merge()
    model = floral(base, num_clusters=2, rank=1, batch_nora=True).eval()
    scatter(model)
    part_statistics(model)
    x = torch.randn(5, 3, dtype=torch.float64)
    torch.testing.assert_close(model.merge()(x), model(x))
