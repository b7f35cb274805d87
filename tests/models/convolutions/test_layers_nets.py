"""Nets of all users in one pass of native code against a loop over the users, and against ``vmap``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from comingle.models.kernels.convolutions import ConvolutionStep
from comingle.models.nets import make_net
from comingle.models.side_by_side import Chained, FusedNorms, UnknownLayerError
from comingle.utils.seeds import generator

USERS = 3
EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}
Tensors = dict[str, Tensor]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator("layers", seed, *shape), dtype=torch.float64)


def copies(net: nn.Module) -> Tensors:
    """Parameters and running statistics of users whose nets are unlike."""
    named = {**dict(net.named_parameters()), **{n: b for n, b in net.named_buffers() if b.is_floating_point()}}
    found = {n: 0.1 * draw(USERS, *t.shape, seed=seed) + t.double() for seed, (n, t) in enumerate(named.items())}
    return {n: t.abs() + 0.1 if n.endswith("running_var") else t for n, t in found.items()}


def trained(tensors: Tensors) -> list[str]:
    return [name for name in tensors if "running" not in name]


def solve(run: Callable[[Tensors, Tensor], Tensor], tensors: Tensors, x: Tensor) -> list[Tensor]:
    """Outputs, gradients at inputs and parameters, and running statistics afterwards."""
    own = {n: t.clone().requires_grad_() if n in trained(tensors) else t.clone() for n, t in tensors.items()}
    inputs = x.clone().requires_grad_()
    found = run(own, inputs)
    leaves = [inputs, *(own[n] for n in trained(tensors))]
    gradients = torch.autograd.grad((found * draw(*found.shape, seed=99)).sum(), leaves)
    return [found.detach(), *gradients, *(t for n, t in own.items() if n not in trained(tensors))]


def loop(net: nn.Module) -> Callable[[Tensors, Tensor], Tensor]:
    def run(tensors: Tensors, x: Tensor) -> Tensor:
        return torch.stack([functional_call(net, {n: t[u] for n, t in tensors.items()}, x[u]) for u in range(USERS)])

    return run


def agree(net: nn.Module, x: Tensor, *, train: bool = True, exact: dict[str, Any] = EXACT) -> None:
    net = net.double().requires_grad_(False).train(train)
    tensors, chained = copies(net), Chained(net)
    found = solve(lambda tensors, x: chained(tensors, x, train=train), tensors, x)
    net.train(train)
    for one, other in zip(found, solve(loop(net), tensors, x), strict=True):
        torch.testing.assert_close(one, other, **exact)


def named(name: str) -> nn.Module:
    return make_net(name, (3, 32, 32), 10, seed=0)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", ["resnet9", "resnet9-group", "cifar10", "cnn"])
@pytest.mark.sampled(1)
def test_a_net_of_all_users_is_that_of_each(name: str, train: bool) -> None:
    """Forwards, backwards and in its running statistics; a batch that fills no vector."""
    agree(named(name), draw(USERS, 5, 3, 32, 32), train=train, exact={"rtol": 1e-9, "atol": 1e-9})


LAYERS: dict[str, Callable[[], Sequence[nn.Module]]] = {
    "alone": lambda: [nn.Conv2d(3, 5, 3)],
    "few": lambda: [nn.Conv2d(3, 1, 1, bias=False)],
    "relu": lambda: [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()],
    "pool": lambda: [nn.Conv2d(3, 9, 3, padding=1), nn.MaxPool2d(2)],
    "relu, pool with a rest": lambda: [nn.Conv2d(3, 9, (2, 3), padding=(1, 0)), nn.ReLU(), nn.MaxPool2d(3)],
    "batch norm": lambda: [nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6)],
    "batch norm without gamma": lambda: [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, affine=False, momentum=0.3), nn.ReLU()],
    "batch norm, pool": lambda: [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)],
    "group norm": lambda: [nn.Conv2d(3, 6, 3, dilation=2), nn.GroupNorm(2, 6), nn.ReLU()],
    "group norm without gamma": lambda: [nn.Conv2d(3, 6, 3), nn.GroupNorm(3, 6, affine=False)],
    "two": lambda: [nn.Conv2d(3, 17, 5, stride=(2, 1), padding=2), nn.ReLU(), nn.Conv2d(17, 4, 1), nn.Tanh()],
    "average": lambda: [nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(2), nn.Conv2d(4, 2, 2)],
    "overlapping windows": lambda: [nn.Conv2d(3, 4, 3), nn.MaxPool2d(3, stride=2), nn.ReLU()],
    "taps apart, outputs in three parts": lambda: [nn.Conv2d(3, 15, 2, dilation=(1, 2), padding=(0, 1)), nn.ReLU()],
    "many channels": lambda: [nn.Conv2d(3, 37, 1), nn.ReLU(), nn.Conv2d(37, 4, 3, padding=(2, 1), stride=(1, 2))],
    "head": lambda: [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 5 * 6, 7)],
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("batch", [1, 11])
@pytest.mark.usefixtures("layers")
def test_layers_of_all_users_are_those_of_each(name: str, batch: int) -> None:
    torch.manual_seed(0)
    agree(nn.Sequential(*LAYERS[name]()), draw(USERS, batch, 3, 7, 8))


@pytest.mark.parametrize(("channels", "side"), [(3, 20), (8, 9), (48, 2), (16, 1)])
@pytest.mark.usefixtures("layers")
def test_gradients_at_weights_are_sums_over_places_and_images(channels: int, side: int) -> None:
    """Images wider than a sweep and of one place, more channels than there are sums at once; by a loop over taps."""
    x, dy = draw(USERS, 18, channels, side, side), draw(USERS, 18, 10, side, side, seed=1)
    weight = draw(USERS, 10, channels, 3, 3, seed=2).requires_grad_()
    chained = Chained(nn.Sequential(nn.Conv2d(channels, 10, 3, padding=1, bias=False).double()))
    chained({"0.weight": weight}, x, train=True).backward(dy)
    padded = nn.functional.pad(x, (1, 1, 1, 1))
    for k in range(3):
        for place in range(3):
            seen = padded[..., k : k + side, place : place + side]
            expected = torch.einsum("unohw,unihw->uoi", dy, seen)
            torch.testing.assert_close(weight.grad[..., k, place], expected, **EXACT)  # type: ignore[index]


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", ["resnet9", "cifar10"])
def test_a_net_of_all_users_is_that_under_vmap(name: str, train: bool) -> None:
    net = named(name).double().requires_grad_(False).train(train)
    tensors, chained, x = copies(net), Chained(net), draw(USERS, 4, 3, 32, 32)
    found = solve(lambda tensors, x: chained(tensors, x, train=train), tensors, x)

    def together(tensors: Tensors, x: Tensor) -> Tensor:
        with FusedNorms():
            return vmap(lambda own, x: functional_call(net, own, (x,)))(tensors, x)

    net.train(train)
    for one, other in zip(found, solve(together, tensors, x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_a_user_is_the_same_to_the_bit_whoever_is_beside_it_and_for_any_number_of_threads() -> None:
    """All that is native code; products of the head are PyTorch's, which rounds them by the shape of the whole."""
    net = nn.Sequential(*list(named("resnet9").children())[:-2]).requires_grad_(False).train()
    tensors, x = {n: t.float() for n, t in copies(net).items()}, draw(USERS, 20, 3, 32, 32).float()
    outputs_gradient = draw(USERS, 20, 64, 4, 4).float()

    def solved(users: list[int], threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        own = {n: t[users].requires_grad_(n in trained(tensors)) for n, t in tensors.items()}
        outputs = Chained(net)(own, x[users], train=True)
        gradients = torch.autograd.grad(outputs, [own[n] for n in trained(own)], outputs_gradient[users])
        return [outputs, *gradients, *(t for n, t in own.items() if n not in trained(own))]

    threads = torch.get_num_threads()
    try:
        everybody = solved([0, 1, 2], 1)
        for users, number in (([0, 1, 2], 2), ([1], 1), ([1], 3)):
            for one, other in zip(solved(users, number), everybody, strict=True):
                assert torch.equal(one, other[users])
    finally:
        torch.set_num_threads(threads)


def test_what_is_no_number_stays_so() -> None:
    """Or nobody would find out that a user has diverged."""
    net = nn.Sequential(
        nn.Conv2d(1, 2, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(2, 2, 1), nn.GroupNorm(1, 2), nn.ReLU()
    )
    x = draw(USERS, 2, 1, 4, 4)
    x[1, 1, 0, 2, 2] = torch.nan
    found = Chained(net.double())({n: t.expand(USERS, *t.shape) for n, t in net.named_parameters()}, x, train=True)
    assert found[1, 1].isnan().any()
    assert found[[0, 2]].isfinite().all()
    assert found[1, 0].isfinite().all()


class Mixing(nn.Module):
    """Of a batch, not of a sample."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


@pytest.mark.parametrize(
    "layer",
    [Mixing(), nn.Flatten(0), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1, groups=2), nn.Conv2d(4, 4, 3, padding="same")],
)
def test_a_net_that_is_not_known_to_keep_samples_apart_stays_under_vmap(layer: nn.Module) -> None:
    with pytest.raises(UnknownLayerError):
        Chained(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), layer))


def test_a_net_without_convolutions_is_left_to_others() -> None:
    with pytest.raises(UnknownLayerError):
        Chained(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))


def test_what_stands_behind_a_convolution_is_one_step_with_it() -> None:
    chained: Any = Chained(named("vgg8-norm"))
    steps = [step for step in chained.net.steps if isinstance(step, ConvolutionStep)]
    assert [(type(s.norm), s.relu, s.pool) for s in steps] == [(nn.BatchNorm2d, True, 2)] * 5
