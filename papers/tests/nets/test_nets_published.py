from __future__ import annotations

import copy
import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from comingle.models.nets import NETS, make_net
from comingle.utils.errors import RecipeError
from comingle.utils.seeds import generator

USERS = 3
SHAPES = {"linear": ((10,), 3), "mlp": ((10,), 1), "mlp-norm": ((10,), 1), "mnist": ((1, 28, 28), 10)}
IMAGE = ((3, 32, 32), 10)
# The deep nets that differ from another in the number of blocks alone.
SHORT = [name for name in NETS if name.removesuffix("-group") not in ("resnet34", "resnet101", "resnet152")]


def make(name: str, seed: int) -> nn.Module:
    shape, outputs = SHAPES.get(name, IMAGE)
    return make_net(name, shape, outputs, seed=seed).double()


def batch_of(name: str, count: int = 2) -> Tensor:
    shape, _ = SHAPES.get(name, IMAGE)
    return torch.randn(USERS, count, *shape, generator=generator("nets", name), dtype=torch.float64)


def test_every_net_has_the_papers_size() -> None:
    sizes = {
        "linear": 10 * 3 + 3,
        "mlp": (10 * 20 + 20) + (20 + 1),
        "mlp-norm": (10 * 20 + 20) + 2 * 20 + (20 + 1),
        "cnn": (3 * 32 * 9 + 32) + (32 * 64 * 9 + 64) + (64 * 16 * 10 + 10),
        "mnist": (784 * 200 + 200) + (200 * 10 + 10),
        "cifar10": (3 * 32 * 25 + 32) + (32 * 64 * 9 + 64) + (1024 * 64 + 64) + (64 * 10 + 10),
    }
    channels = (3, 16, 32, 64, 128, 512)
    convolutions = sum(a * b * 9 + b for a, b in pairwise(channels))
    sizes["vgg8"] = convolutions + 2 * (512 * 512 + 512) + (512 * 10 + 10)
    sizes["vgg8-norm"] = sizes["vgg8"] + 2 * sum(channels[1:])
    sizes |= {  # with 10 outputs; counted by a formula in test_nets_resnets.py
        "resnet9": 78_002,
        "resnet18": 176_402,
        "resnet34": 335_154,
        "resnet50": 375_762,
        "resnet101": 678_226,
        "resnet152": 927_698,
    }
    sizes |= {f"{name}-group": size for name, size in sizes.items() if name.startswith("resnet")}
    assert {name: sum(p.numel() for p in make(name, 0).parameters()) for name in NETS} == sizes


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.sampled(3)
def test_stacked_users_equal_a_loop_over_them(name: str, training: bool) -> None:
    """Outputs, gradients and what batch norm remembers; dropout, which is random, is off."""
    nets = [make(name, seed).train(training) for seed in range(USERS)]
    for module in (module for net in nets for module in net.modules() if isinstance(module, nn.Dropout)):
        module.p = 0.0
    x = batch_of(name, 4)
    parameters, buffers = stack_module_state(nets)
    buffers = {key: value.clone() for key, value in buffers.items()}
    skeleton = copy.deepcopy(nets[0]).to("meta")

    def loss(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        y = functional_call(skeleton, (parameters, buffers), (x,))
        return y.square().sum(), y

    gradients, outputs = vmap(grad(loss, has_aux=True), randomness="different")(parameters, buffers, x)
    for user, net in enumerate(nets):
        y = net(x[user])
        torch.testing.assert_close(outputs[user], y, rtol=1e-9, atol=1e-9)
        y.square().sum().backward()
        for key, parameter in net.named_parameters():
            torch.testing.assert_close(gradients[key][user], parameter.grad, rtol=1e-8, atol=1e-8)
        for key, buffer in net.named_buffers():
            torch.testing.assert_close(buffers[key][user], buffer)


def test_dropout_differs_between_users_and_is_half() -> None:
    nets = [make("vgg8", 0).train()] * USERS  # the same weights and the same images for everybody
    parameters, buffers = stack_module_state(nets)
    x = batch_of("vgg8")[:1].expand(USERS, -1, -1, -1, -1)

    def run(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(nets[0], (parameters, buffers), (x,))

    outputs = vmap(run, randomness="different")(parameters, buffers, x)
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[1], outputs[2])
    assert {module.p for module in nets[0].modules() if isinstance(module, nn.Dropout)} == {0.5}


def test_the_cifar_net_has_1024_features() -> None:
    net = make("cifar10", 0)
    assert isinstance(net, nn.Sequential)
    assert net[:7](batch_of("cifar10")[0]).shape == (2, 1024)


@pytest.mark.parametrize("name", ["cifar10", "vgg8"])
def test_images_of_other_sizes_are_taken(name: str) -> None:
    assert make_net(name, (1, 40, 67), 5, seed=0)(torch.zeros(2, 1, 40, 67)).shape == (2, 5)


def test_convolutions_of_vgg_start_as_in_the_public_code() -> None:
    first = [m for m in make("vgg8", 0).modules() if isinstance(m, nn.Conv2d)][-1]
    assert first.weight.std().item() == pytest.approx(math.sqrt(2 / (9 * 512)), rel=0.01)
    assert first.bias is not None
    assert not first.bias.any()


def test_weights_follow_the_seed_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, same, other = (make_net("mlp", (10,), 1, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_without_a_seed_two_nets_differ() -> None:
    one, other = (make_net("linear", (10,), 3) for _ in range(2))
    assert isinstance(one, nn.Linear)
    assert isinstance(other, nn.Linear)
    assert not torch.equal(one.weight, other.weight)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("resnet10", (3, 32, 32), "base: no net 'resnet10'. Did you mean 'resnet101'?"),
        ("resnet9", (3, 32, 7), "net 'resnet9': inputs of shape (3, 32, 7); allowed: (channels, height, width) with"),
        ("resnet9-group", (3, 7, 32), "net 'resnet9-group': inputs of shape (3, 7, 32); allowed: (channels, height,"),
        ("mnst", (1, 28, 28), "base: no net 'mnst'. Did you mean 'mnist'? Allowed: linear, mlp, cnn, cifar10"),
        ("mlp-norm", (1, 28, 28), "net 'mlp-norm': inputs of shape (1, 28, 28); allowed: (d,)"),
        ("cnn", (784,), "net 'cnn': inputs of shape (784,); allowed: (channels, height, width) with sides of at"),
        ("mnist", (784,), "net 'mnist': inputs of shape (784,); allowed: (channels, height, width) with sides of at"),
        ("cifar10", (3, 11, 32), "net 'cifar10': inputs of shape (3, 11, 32); allowed: (channels, height, width)"),
        ("vgg8", (3, 31, 32), "with sides of at least 32"),
    ],
)
def test_a_net_that_does_not_fit_is_said(name: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        make_net(name, shape, 10)
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["linear", "mlp"])
def test_nets_of_vectors_flatten_what_is_none(name: str) -> None:
    assert make_net(name, (1, 8, 8), 5, seed=0)(torch.zeros(2, 1, 8, 8)).shape == (2, 5)


def test_the_widest_hidden_layer_is_limited() -> None:
    assert max(p.shape[0] for p in make_net("mlp", (3, 64, 64), 5, seed=0).parameters()) == 512


def test_the_smallest_images_that_are_allowed_go_through() -> None:
    assert make_net("cifar10", (3, 14, 14), 4)(torch.zeros(1, 3, 14, 14)).shape == (1, 4)
    assert make_net("vgg8", (3, 32, 32), 4).eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 4)
