"""Preconditioning (eq. 36) and centering (eq. 37) against what the equations say of whole matrices."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from clusters import materialise, only_layer, scatter
from torch import Tensor, nn

from comingle.models.floral.layers import LowRankLayer, centre, precondition
from comingle.models.floral.model import FloralModel
from comingle.models.floral.wrapper import floral

EPS = 1e-3
FORMS = ["balanced-2d", "channel", "in", "out", "filter", "linear"]


def wrapped(base: nn.Module, clusters: int = 3, **settings: Any) -> FloralModel:
    model = floral(base.double(), num_clusters=clusters, **{"rank": 2, **settings})
    scatter(model)
    return model


def tensors_of(model: FloralModel) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def random_like(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.randn_like(tensor) for name, tensor in tensors.items()}


def test_a_linears_gradients_are_solved_with_the_other_factors_gram_matrix() -> None:
    model = wrapped(nn.Linear(5, 4))
    tensors = tensors_of(model)
    gradients = random_like(tensors)
    made = precondition(model.pairs(), tensors, gradients, eps=EPS)
    eye = EPS * torch.eye(2, dtype=torch.float64)
    for c in range(3):
        inner, outer = tensors["model.a"][c], tensors["model.b"][c]
        expected = torch.linalg.inv(outer.T @ outer + eye) @ gradients["model.a"][c]
        torch.testing.assert_close(made["model.a"][c], expected)
        expected = gradients["model.b"][c] @ torch.linalg.inv(inner @ inner.T + eye)
        torch.testing.assert_close(made["model.b"][c], expected)
    for name in ("model.bias", "model.base.weight", "router.theta"):
        assert made[name] is gradients[name]


def test_a_preconditioned_step_moves_the_product_by_the_projections_of_the_gradient() -> None:
    """As eps goes to 0: U V^T - lr (P_U G + G P_V) to first order (App. D)."""
    model = wrapped(nn.Linear(6, 5), clusters=1)
    tensors, g = tensors_of(model), torch.randn(5, 6, dtype=torch.float64)
    inner, outer = tensors["model.a"][0], tensors["model.b"][0]
    gradients = {"model.a": (outer.T @ g)[None], "model.b": (g @ inner.T)[None]}
    made = precondition(model.pairs(), tensors, gradients, eps=1e-12)
    moved = outer @ made["model.a"][0] + made["model.b"][0] @ inner
    onto_outer = outer @ torch.linalg.pinv(outer)
    onto_inner = torch.linalg.pinv(inner) @ inner
    torch.testing.assert_close(moved, onto_outer @ g + g @ onto_inner, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", ["balanced-2d", "channel", "in", "out", "filter"])
def test_a_convolutions_gradients_are_divided_by_the_norm_of_the_gram_matrix(form: Any) -> None:
    model = wrapped(nn.Conv2d(4, 6, (3, 2)), conv=form)
    tensors = tensors_of(model)
    gradients = random_like(tensors)
    made = precondition(model.pairs(), tensors, gradients, eps=EPS)
    for c in range(3):
        inner, outer = tensors["model.a"][c].flatten(1), tensors["model.b"][c].transpose(0, 1).flatten(1)
        torch.testing.assert_close(made["model.a"][c], gradients["model.a"][c] / ((outer @ outer.T).norm() + EPS))
        torch.testing.assert_close(made["model.b"][c], gradients["model.b"][c] / ((inner @ inner.T).norm() + EPS))


def test_the_reshaped_linear_of_a_convolution_is_preconditioned_as_a_linear() -> None:
    model = wrapped(nn.Conv2d(8, 6, 3), conv="linear")
    tensors = tensors_of(model)
    gradients = random_like(tensors)
    made = precondition(model.pairs(), tensors, gradients, eps=EPS)
    outer = tensors["model.b"][1]
    expected = torch.linalg.inv(outer.T @ outer + EPS * torch.eye(2)) @ gradients["model.a"][1]
    torch.testing.assert_close(made["model.a"][1], expected)


@pytest.mark.parametrize("base", [nn.Linear(5, 4), nn.Conv2d(4, 6, 3, groups=2)], ids=["linear", "grouped conv"])
@pytest.mark.parametrize("function", ["precondition", "centre"])
def test_users_before_the_clusters_change_nothing(base: nn.Module, function: str) -> None:
    users = [wrapped(copy.deepcopy(base)) for _ in range(3)]
    pairs = users[0].pairs()
    trees = [tensors_of(user) for user in users]
    gradients = [random_like(tree) for tree in trees]
    stack = {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}
    slopes = {name: torch.stack([tree[name] for tree in gradients]) for name in trees[0]}
    if function == "centre":
        together, alone = centre(pairs, stack, SHARES), [centre(pairs, tree, SHARES) for tree in trees]
    else:
        together = precondition(pairs, stack, slopes)
        alone = [precondition(pairs, tree, g) for tree, g in zip(trees, gradients, strict=True)]
    for i, tree in enumerate(alone):
        for name, tensor in tree.items():
            torch.testing.assert_close(together[name][i], tensor)


@pytest.mark.parametrize("base", [nn.Linear(5, 4), nn.Conv2d(4, 6, 3)], ids=["linear", "conv"])
def test_the_input_side_starts_random_and_the_output_side_zero(base: nn.Module) -> None:
    """LoRA's and the public code's choice, against section 3.2; so the output side alone has a gradient at first."""
    layer = only_layer(floral(base, num_clusters=2, rank=2))
    assert isinstance(layer, LowRankLayer)
    assert layer.a is not None
    assert layer.b is not None
    assert layer.b.count_nonzero() == 0
    assert layer.a.count_nonzero() == layer.a.numel()
    assert not torch.allclose(layer.a[0], layer.a[1])


def test_a_gradient_where_nothing_has_been_learnt_yet_stays_zero() -> None:
    model = floral(nn.Linear(5, 4), num_clusters=2, rank=2)  # float32, the outer factor is zero
    tensors = tensors_of(model)
    made = precondition(model.pairs(), tensors, {name: torch.zeros_like(t) for name, t in tensors.items()})
    assert not any(gradient.any() for gradient in made.values())


# ---------------------------------------------------------------- centering


def lower_rank(model: FloralModel, rank: int) -> None:
    """Leave each cluster's product a rank of ``rank`` by clearing the rest of the outer factor."""
    for layer in model.layers().values():
        if isinstance(layer, LowRankLayer) and layer.geometry is not None and layer.b is not None:
            matrix = layer.geometry.outer_matrix(layer.b.data).clone()
            matrix[..., rank:] = 0
            layer.b.data = layer.geometry.outer_from_matrix(matrix)


SHARES = torch.tensor([0.8, 0.1, 0.1], dtype=torch.float64)


def even(clusters: int) -> Tensor:
    return torch.full((clusters,), 1 / clusters, dtype=torch.float64)


def centred(model: FloralModel, shares: Tensor | None = None) -> FloralModel:
    new = copy.deepcopy(model)
    shares = even(model.num_clusters) if shares is None else shares
    new.load_state_dict(centre(model.pairs(), dict(model.state_dict()), shares))
    return new


def network(conv: dict[str, Any]) -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    return nn.Sequential(
        nn.Conv2d(4, 6, **conv), nn.GroupNorm(2, 6), nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(24, 12), nn.LayerNorm(12), nn.Tanh(), Conv1D(12, 12),
    )  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("conv", [{"kernel_size": 3}, {"kernel_size": (2, 3), "groups": 2, "stride": 2, "padding": 1}])
def test_centering_changes_no_users_function_when_the_rank_allows(form: Any, conv: dict[str, Any]) -> None:
    """Three products of rank 1 span a rank of 3 at most, so a rank of 3 holds every difference exactly."""
    model = wrapped(network(conv), rank=3, conv=form, alpha=0.7)
    lower_rank(model, 1)
    new, x = centred(model, SHARES), torch.randn(2, 4, 7, 6, dtype=torch.float64)
    for mixture in (*torch.eye(3, dtype=torch.float64), torch.randn(3, dtype=torch.float64).softmax(0)):
        torch.testing.assert_close(new(x, mixture=mixture), model(x, mixture=mixture), rtol=1e-9, atol=1e-9)
    # The base alone is now the mean of the clusters' models under p(c), layer by layer, and theirs is zero (eq. 30).
    mean, left = model.merge(SHARES), new.merge(SHARES)
    for name, layer in new.layers().items():
        rest = left.get_submodule(name.removeprefix("model."))
        torch.testing.assert_close(rest.get_parameter("weight"), layer.base.get_parameter("weight"), msg=name)
    for (name, layer), merged in zip(new.layers().items(), _same(new, mean), strict=True):
        torch.testing.assert_close(layer.base.get_parameter("weight"), merged.get_parameter("weight"), msg=name)
        torch.testing.assert_close(layer.base.get_parameter("bias"), merged.get_parameter("bias"), msg=name)


def _same(model: FloralModel, plain: nn.Module) -> list[nn.Module]:
    return [plain.get_submodule(name.removeprefix("model.")) for name in model.layers()]


def test_otherwise_each_adaptor_is_the_best_of_its_rank_split_evenly() -> None:
    model = wrapped(nn.Linear(7, 6))
    old, new = tensors_of(model), tensors_of(centred(model))
    products = old["model.b"] @ old["model.a"]
    mean = products.mean(0)
    torch.testing.assert_close(new["model.base.weight"], old["model.base.weight"] + mean)
    for c in range(3):
        u, s, v = torch.linalg.svd(products[c] - mean)
        assert s[2] > 0.1  # truncation has something to cut
        torch.testing.assert_close(new["model.b"][c] @ new["model.a"][c], u[:, :2] * s[:2] @ v[:2])
        torch.testing.assert_close(new["model.b"][c].norm(dim=0), s[:2].sqrt())
        torch.testing.assert_close(new["model.a"][c].norm(dim=1), s[:2].sqrt())


@pytest.mark.parametrize("form", FORMS)
def test_a_convolutions_adaptor_is_the_best_of_its_form(form: Any) -> None:
    model = wrapped(nn.Conv2d(4, 6, 3), conv=form)
    new = centred(model)
    layer, centred_layer = only_layer(model), only_layer(new)
    assert isinstance(layer, LowRankLayer)
    assert isinstance(centred_layer, LowRankLayer)
    geometry = layer.geometry
    assert geometry is not None
    deltas, made = (
        torch.stack([materialise(geometry, a, b) for a, b in zip(one.a, one.b, strict=True)])  # type: ignore[arg-type]
        for one in (layer, centred_layer)
    )
    differences = deltas - deltas.mean(0)
    own = [2 + dim for dim, inside in enumerate(geometry.in_inner) if inside]
    others = [2 + dim for dim, inside in enumerate(geometry.in_inner) if not inside]
    for difference, got in zip(differences, made, strict=True):
        size = 6 * torch.Size([difference.shape[dim] for dim in others]).numel()
        matrix = difference.permute(0, *others, 1, *own).reshape(size, -1)
        u, s, v = torch.linalg.svd(matrix, full_matrices=False)
        best = u[:, : geometry.width] * s[: geometry.width] @ v[: geometry.width]
        torch.testing.assert_close(got.permute(0, *others, 1, *own).reshape(size, -1), best)


def test_clusters_that_agree_leave_adaptors_of_zero_that_can_still_learn() -> None:
    model = wrapped(nn.Linear(5, 4), clusters=2)
    for parameter in only_layer(model).parameters(recurse=False):
        parameter.data[1] = parameter.data[0]
    # The same products out of other factors: what the clusters have to part again is not lost.
    model.get_parameter("model.a").data[1] *= 2
    model.get_parameter("model.b").data[1] /= 2
    new, x = centred(model), torch.randn(3, 5, dtype=torch.float64)
    torch.testing.assert_close(new(x), model(x))
    products = new.get_parameter("model.b") @ new.get_parameter("model.a")
    assert products.abs().max() < 1e-12
    new(x).square().sum().backward()
    grad = new.get_parameter("model.b").grad
    assert grad is not None
    assert grad.abs().amax((1, 2)).min() > 1e-3
    assert not torch.allclose(grad[0], grad[1])


def test_centering_before_anything_is_learnt_changes_nothing() -> None:
    model = floral(nn.Sequential(nn.Conv2d(4, 6, 3), nn.Flatten(), nn.Linear(24, 5)).double(), num_clusters=3, rank=2)
    for name, tensor in centre(model.pairs(), tensors_of(model), even(3)).items():
        assert torch.equal(tensor, model.get_parameter(name)), name


@pytest.mark.parametrize("nora", [False, True])
def test_a_batch_norm_is_centred_exactly_in_the_mode_where_it_is_one_norm(nora: bool) -> None:
    """In training mode the plain form, in eval mode BatchNorA, whatever the local statistics are."""
    model = wrapped(nn.BatchNorm1d(3), batch_nora=nora).train(not nora)
    layer = only_layer(model)
    layer.get_buffer("running_mean").add_(1.0)
    layer.get_buffer("running_var").mul_(2.0)
    new, x = centred(model), torch.randn(6, 3, dtype=torch.float64)
    for mixture in torch.eye(3, dtype=torch.float64):
        torch.testing.assert_close(new(x, mixture=mixture), copy.deepcopy(model)(x, mixture=mixture))
    assert new.get_parameter("model.weight").mean(0).abs().max() < 1e-12
