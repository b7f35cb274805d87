"""Layers of all users at once against a loop over the users, with gradients and running statistics."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from comingle.models.side_by_side import FEW_CHANNELS, LARGE_WEIGHT, Folded, FusedNorms, can_fold, channels_last
from comingle.utils.seeds import generator

USERS, SETS, BATCH, CHANNELS = 3, 2, 5, 8


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator("norms", seed, *shape), dtype=torch.float64)


def gradients(loss: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad((loss * draw(*loss.shape, seed=9)).sum(), leaves)


def agree(found: Tensor, expected: Tensor, *leaves: Tensor) -> None:
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found, *leaves), gradients(expected, *leaves))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(BATCH, CHANNELS), (BATCH, CHANNELS, 4, 3)])
def test_batch_norm_of_all_users_is_that_of_each(shape: tuple[int, ...], training: bool) -> None:
    x = draw(USERS, *shape).requires_grad_()
    weight, bias = (draw(USERS, CHANNELS, seed=seed).requires_grad_() for seed in (1, 2))
    mean, var = draw(USERS, CHANNELS, seed=3), draw(USERS, CHANNELS, seed=4).exp()
    own_mean, own_var = mean.clone(), var.clone()

    def norm(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.batch_norm(x, mean, var, weight, bias, training, momentum=0.3)

    with FusedNorms():
        found = vmap(norm)(x, mean, var, weight, bias)
    expected = torch.stack([norm(*each) for each in zip(x, own_mean, own_var, weight, bias, strict=True)])
    agree(found, expected, x, weight, bias)
    torch.testing.assert_close([mean, var], [own_mean, own_var])


@pytest.mark.parametrize("shared", [False, True])
def test_batch_norm_in_two_axes_of_vmap_is_that_of_a_loop(shared: bool) -> None:
    """Users, each with several sets of gamma and beta, on the same input or on one for each set."""
    x = draw(USERS, *(() if shared else (SETS,)), BATCH, CHANNELS, 2, 2).requires_grad_()
    weight, bias = (draw(USERS, SETS, CHANNELS, seed=seed).requires_grad_() for seed in (1, 2))
    mean, var = torch.zeros(USERS, CHANNELS).double(), torch.ones(USERS, CHANNELS).double()

    def norm(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.batch_norm(x, mean, var, weight, bias)

    inner = vmap(norm, in_dims=(None if shared else 0, None, None, 0, 0))
    with FusedNorms():
        found = vmap(inner)(x, mean, var, weight, bias)
    pairs = [(user, part) for user in range(USERS) for part in range(SETS)]
    alone = [norm(x[u] if shared else x[u, c], mean[u], var[u], weight[u, c], bias[u, c]) for u, c in pairs]
    agree(found, torch.stack(alone).view(USERS, SETS, BATCH, CHANNELS, 2, 2), x, weight, bias)


def test_norms_without_gamma_and_with_shared_gamma_are_those_of_each() -> None:
    x, weight = draw(USERS, BATCH, CHANNELS, 3, 3).requires_grad_(), draw(CHANNELS, seed=1).requires_grad_()
    kinds: list[Callable[[Tensor], Tensor]] = [
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: F.batch_norm(x, None, None, weight, training=True),
        lambda x: F.group_norm(x, num_groups=2),
        lambda x: F.group_norm(x, 4, weight),
    ]
    for norm in kinds:
        with FusedNorms():
            found = vmap(norm)(x)
        agree(found, torch.stack([norm(each) for each in x]), x)


def test_group_norm_of_all_users_is_that_of_each() -> None:
    x = draw(USERS, BATCH, CHANNELS, 4, 3).requires_grad_()
    weight, bias = (draw(USERS, CHANNELS, seed=seed).requires_grad_() for seed in (1, 2))

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.group_norm(x, 2, weight, bias)

    with FusedNorms():
        found = vmap(norm)(x, weight, bias)
    expected = torch.stack([norm(*each) for each in zip(x, weight, bias, strict=True)])
    agree(found, expected, x, weight, bias)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_group_norm_in_two_axes_of_vmap_is_that_of_a_loop(layout: torch.memory_format) -> None:
    """PyTorch's own asks in ``vmap`` whether channels are last, which is not implemented there.

    With one weight for all sets the inner ``vmap`` sees no axis of its own.
    """
    x = draw(BATCH, USERS * SETS * CHANNELS, 4, 3).contiguous(memory_format=layout).requires_grad_()
    weight, bias = (draw(USERS, SETS, CHANNELS, seed=seed).requires_grad_() for seed in (1, 2))

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.group_norm(x, 2, weight, bias)

    parts = x.view(BATCH, USERS, SETS, CHANNELS, 4, 3).permute(1, 2, 0, 3, 4, 5)
    with FusedNorms():
        found = vmap(vmap(norm))(parts, weight, bias)
        inner = vmap(lambda one, *of: one * norm(*of), in_dims=(0, None, None, None))
        same = vmap(inner, in_dims=(None, 0, 0, 0))(torch.ones(SETS), parts[:, 0], weight[:, 0], bias[:, 0])

    def loop(sets: list[int]) -> Tensor:
        alone = [norm(parts[u, c], weight[u, c], bias[u, c]) for u in range(USERS) for c in sets]
        return torch.stack(alone).view(USERS, SETS, BATCH, CHANNELS, 4, 3)

    agree(found, loop(list(range(SETS))), x, weight, bias)
    agree(same, loop([0] * SETS), x, weight, bias)


def test_one_call_takes_all_users(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = draw(USERS, BATCH, CHANNELS, 3, 3), draw(USERS, CHANNELS, seed=1)
    seen: list[tuple[int, ...]] = []
    plain = torch.batch_norm
    monkeypatch.setattr(torch, "batch_norm", lambda x, *rest: (seen.append(tuple(x.shape)), plain(x, *rest))[1])
    with FusedNorms():
        vmap(lambda x, weight: F.batch_norm(x, None, None, weight, training=True))(x, weight)
    assert seen == [(BATCH, USERS * CHANNELS, 3, 3)]


@pytest.mark.parametrize("axes", [(USERS,), (USERS, SETS)])
def test_channels_last_changes_the_layout_of_small_convolutions_alone(axes: tuple[int, ...]) -> None:
    tensors = {"conv": draw(*axes, 4, 6, 3, 3).requires_grad_(), "linear": draw(USERS, 4, 6), "norm": draw(USERS, 4)}
    tensors["wide"] = draw(*axes, FEW_CHANNELS, 6, 3, 3)
    found = channels_last(tensors)
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert found["conv"].flatten(0, -4).is_contiguous(memory_format=torch.channels_last)
    assert all(found[name] is tensors[name] for name in ("linear", "norm", "wide"))
    torch.testing.assert_close(gradients(found["conv"], tensors["conv"]), (draw(*axes, 4, 6, 3, 3, seed=9),))


WIDE = LARGE_WEIGHT // 4
"""Inputs of a linear that is large with :data:`CHANNELS` outputs."""


def copies(net: nn.Module) -> dict[str, Tensor]:
    """Parameters of users whose nets are unlike."""
    named = enumerate(net.named_parameters())
    return {name: draw(USERS, *t.shape, seed=seed).requires_grad_() for seed, (name, t) in named}


@pytest.mark.parametrize("inputs", [CHANNELS, WIDE])
@pytest.mark.parametrize("bias", [False, True])
def test_samples_of_all_users_as_one_batch_are_those_of_each(inputs: int, bias: bool) -> None:
    layers = [nn.Flatten(), nn.Linear(inputs, CHANNELS, bias=bias), nn.Tanh(), nn.Linear(CHANNELS, 2, bias=bias)]
    net = nn.Sequential(*layers).double()
    x, tensors = draw(USERS, BATCH, inputs // 2, 2).requires_grad_(), copies(net)
    assert can_fold(net)
    with Folded():
        found = functional_call(net, tensors, x.flatten(0, 1)).unflatten(0, (USERS, BATCH))
    expected = torch.stack([functional_call(net, {n: t[u] for n, t in tensors.items()}, x[u]) for u in range(USERS)])
    agree(found, expected, x, *tensors.values())


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_of_rows_of_a_sample_is_that_of_each(bias: bool) -> None:
    net = nn.Sequential(
        nn.Linear(4, CHANNELS, bias=bias), nn.Tanh(), nn.Linear(CHANNELS, 2), nn.Flatten(), nn.Linear(12, 2)
    ).double()
    x, tensors = draw(USERS, BATCH, 2, 3, 4).requires_grad_(), copies(net)
    assert can_fold(net)
    with Folded():
        found = functional_call(net, tensors, x.flatten(0, 1)).unflatten(0, (USERS, BATCH))
    expected = torch.stack([functional_call(net, {n: t[u] for n, t in tensors.items()}, x[u]) for u in range(USERS)])
    agree(found, expected, x, *tensors.values())


def test_the_gradient_of_a_large_weight_lies_as_the_weight_does() -> None:
    """A step with one that lies otherwise takes longer than the product that makes it."""
    weight = draw(USERS, CHANNELS, WIDE).requires_grad_()
    with Folded():
        y = F.linear(draw(USERS * BATCH, WIDE), weight)
    (found,) = gradients(y, weight)
    assert found.is_contiguous()


class Mixing(nn.Module):
    """Of a batch, not of a sample."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


@pytest.mark.parametrize(
    "layer", [Mixing(), nn.Dropout(), nn.Flatten(0), nn.Conv1d(1, 1, 1), nn.Softmax(0), nn.BatchNorm1d(2)]
)
def test_a_net_that_may_mix_samples_keeps_its_users_apart(layer: nn.Module) -> None:
    assert not can_fold(nn.Sequential(nn.Linear(2, 2), layer))
