from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from comingle.models.nets import make_net
from comingle.models.scoring import CROSS_ENTROPY
from comingle.models.stacked import stack
from comingle.utils.seeds import generator
from comingle.utils.trees import BASE, STATISTICS
from comingle_papers.nets import STAGES, make_resnet

TABLE_1 = {9: 1, 18: 2.27, 34: 4.32, 50: 4.82, 101: 8.73, 152: 11.95}


def build(layers: int, outputs: int = 100, size: int = 32, seed: int = 0) -> nn.Module:
    return make_net(f"resnet{layers}", (3, size, size), outputs, seed=seed)


def images(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator("images", *shape), dtype=torch.float64)


def count_by_formula(layers: int) -> int:
    """Parameters without the head: each convolution, two of batch norm for each of its outputs."""

    def layer(c_in: int, c_out: int, kernel: int) -> int:
        return c_in * c_out * kernel**2 + 2 * c_out

    total, wide = layer(3, 8, 3), 8
    for stage, blocks in enumerate(STAGES[layers]):
        c = 8 * 2**stage
        if layers < 50:
            first = layer(wide, c, 3) + layer(c, c, 3) + (layer(wide, c, 1) if stage else 0)
            rest, wide = 2 * layer(c, c, 3), c
        else:
            first = layer(wide, c, 1) + layer(c, c, 3) + layer(c, 4 * c, 1) + layer(wide, 4 * c, 1)
            rest, wide = layer(4 * c, c, 1) + layer(c, c, 3) + layer(c, 4 * c, 1), 4 * c
        total += first + (blocks - 1) * rest
    return total


def size_of(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("layers", STAGES)
def test_parameters_are_those_of_the_formula_and_of_table_1(layers: int) -> None:
    net = build(layers)
    head = net.get_submodule("head")
    assert isinstance(head, nn.Linear)
    assert head.in_features == (64 if layers < 50 else 256)
    body = size_of(net) - size_of(head)
    assert body == count_by_formula(layers)
    assert math.floor(100 * body / count_by_formula(9)) / 100 == TABLE_1[layers]
    # As many layers as its name says, shortcuts aside; ResNet-9 has one more.
    convolutions = [name for name, m in net.named_modules() if isinstance(m, nn.Conv2d) and "shortcut" not in name]
    assert len(convolutions) + 1 == (10 if layers == 9 else layers)


def test_resnet9_has_the_public_codes_size() -> None:
    assert size_of(build(9)) == 83_852


@pytest.mark.parametrize(("layers", "size"), [(9, 32), (9, 28), (18, 64), (50, 32), (152, 8)])
def test_shapes_on_the_way_through(layers: int, size: int) -> None:
    net = build(layers, outputs=7, size=size).eval()
    x = images(2, 3, size, size).float()
    sides = []
    for name, part in net.named_children():
        x = part(x)
        if name.startswith("stage"):
            sides.append(x.shape[-1])
    assert sides == [size, math.ceil(size / 2), math.ceil(size / 4), math.ceil(size / 8)]
    assert x.shape == (2, 7)


@pytest.mark.parametrize("layers", [9, 50])
@pytest.mark.parametrize("kind", ["batch", "group"])
def test_a_block_is_what_he_et_al_say(layers: int, kind: str) -> None:
    """The first block of the second stage, written out in functions of torch."""
    block = make_resnet(layers, channels=3, outputs=2, norm=kind).double().eval().get_submodule("stage2.0")
    values = dict(block.named_parameters())
    count = 2 if layers == 9 else 3
    wide = 8 if layers == 9 else 32
    x = images(2, wide, 8, 8)

    def run(x: Tensor, convolution: str, norm: str, stride: int) -> Tensor:
        weight = values[f"{convolution}.weight"]
        x = torch.conv2d(x, weight, stride=stride, padding=1 if weight.shape[-1] == 3 else 0)
        shape = (1, -1, 1, 1)
        if kind == "group":  # each image's own statistics, over four channels
            own = x.unflatten(1, (-1, 4)).flatten(2)
            own = (own - own.mean(2, keepdim=True)) / (own.var(2, keepdim=True, correction=0) + 1e-5).sqrt()
            x = own.view(x.shape)
        else:  # fresh running statistics are mean 0 and variance 1
            x = x / math.sqrt(1 + 1e-5)
        return x * values[f"{norm}.weight"].view(shape) + values[f"{norm}.bias"].view(shape)

    y = x
    for number in range(count):
        stride = 2 if number == count - 2 else 1
        y = run(y, f"body.{3 * number}", f"body.{3 * number + 1}", stride)
        y = y.relu() if number < count - 1 else y
    expected = (y + run(x, "shortcut.0", "shortcut.1", 2)).relu()
    torch.testing.assert_close(block(x), expected)


@pytest.mark.parametrize("layers", [9, 50])
@pytest.mark.slow
def test_stacked_users_have_the_losses_and_statistics_of_each_alone(layers: int) -> None:
    """Through the model that the engine trains: one step of batch norm in training, then in evaluation."""
    nets = [build(layers, 5, 16, seed).double() for seed in range(3)]
    model = stack([build(layers, 5, 16).double()], name="net", users=3, dtype=torch.float64, loss=CROSS_ENTROPY)
    tensors = {
        slot.name: torch.stack([net.state_dict()[slot.name].clone() for net in nets]) for slot in model.layout.slots
    }
    roles = {slot.name.rpartition(".")[2]: slot.roles[0] for slot in model.layout.slots}
    assert roles == {"weight": BASE, "bias": BASE, "running_mean": STATISTICS, "running_var": STATISTICS}
    x = images(3, 6, 3, 16, 16)
    targets = torch.arange(18).view(3, 6) % 5
    present = torch.ones(3, 6, dtype=torch.bool)
    for train in (True, False):
        losses, _ = model.losses(tensors, range(3), (x, targets, present), train=train)
        for user, net in enumerate(nets):
            expected = nn.functional.cross_entropy(net.train(train)(x[user]), targets[user], reduction="none")
            torch.testing.assert_close(losses[user], expected, rtol=1e-8, atol=1e-8)
            mine = {name: tensor[user] for name, tensor in tensors.items()}
            torch.testing.assert_close(mine, {name: net.state_dict()[name] for name in mine}, rtol=1e-8, atol=1e-8)
