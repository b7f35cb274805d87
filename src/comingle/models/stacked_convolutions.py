"""A net of every user's own without ``vmap``: samples of all users are one batch, user after user.

Layers without parameters do the same to each sample, whoever's it is. Linears are batched products over users
(:class:`~comingle.models.side_by_side.Folded`), convolutions and what stands behind them steps of
:mod:`comingle.models.kernels.convolutions`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from torch import Tensor, nn

from comingle.models.kernels import convolutions
from comingle.models.kernels.convolutions import Crowd, Step
from comingle.models.model import call_with
from comingle.models.side_by_side import FOLDING, Folded
from comingle.utils.files import cache_folder
from comingle.utils.trees import Tree

_BY_SAMPLE = (*FOLDING, nn.Dropout, nn.AdaptiveAvgPool2d, nn.AvgPool2d, nn.MaxPool2d)
"""Modules that do the same to each sample, whatever others are in its batch."""


_POINTWISE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.Identity)


class UnknownLayerError(Exception):
    """A net that has to stay under ``vmap``."""


class Chain(nn.Sequential):
    """A ``Sequential`` in which a convolution, its norm, ReLU and pooling are one step."""

    steps: list[Callable[[Tensor], Tensor]]

    def forward(self, input: Tensor) -> Tensor:
        """All steps."""
        for step in self.steps:
            input = step(input)
        return input


class Sum(nn.Module):
    """ReLU of the sum of what a chain that ends in a convolution's step and another module make of the same."""

    def __init__(self, chain: Chain, other: nn.Module, crowd: Crowd, names: Sequence[str]) -> None:
        super().__init__()
        for name, module in zip(names, (chain, other), strict=True):
            self.add_module(name, module)
        *self.first, last = chain.steps
        assert isinstance(last, Step)
        self.last, self.crowd = replace(last, relu=True), crowd
        self.other = [other]  # in a list, so that it has one name

    def forward(self, x: Tensor) -> Tensor:
        """``relu(chain(x) + other(x))``."""
        (other,), left, x = self.other, self.first, self.crowd.lanes(x)
        made = x
        if left and isinstance(left[0], Step):
            made, x = left[0].passing(x)
            left = left[1:]
        added = self.crowd.lanes(other(x))
        for step in left:
            made = step(made)
        return self.last(made, added)


FEWEST = 10
"""Images of a user from which on native code is faster; below, vectors of images are mostly empty. Measured on CPUs."""


def form_of(net: nn.Module) -> Chained | None:
    """The form of a net that has convolutions, where native code can be compiled and is made for it."""
    if not all(convolutions.fits(p) for p in net.parameters()):
        return None
    try:
        chained = Chained(net)
    except UnknownLayerError:
        return None
    return chained if convolutions.enable(cache_folder() / "native") else None


class Chained:
    """A net with the same parameters, under the same names, for samples of all users.

    Raises:
        UnknownLayerError: the net has a module that may mix samples, or no convolution.
    """

    def __init__(self, net: nn.Module) -> None:
        self.crowd = Crowd()
        self.net = self._chained(net)
        if not any(isinstance(step, Step) for m in self.net.modules() if isinstance(m, Chain) for step in m.steps):
            raise UnknownLayerError

    def __call__(self, tensors: Tree, inputs: Tensor, *, train: bool) -> Tensor:
        """Outputs ``(users, batch, outputs)`` of inputs ``(users, batch, ...)``."""
        self.crowd.users, self.crowd.images = inputs.shape[:2]
        self.net.train(train)
        with Folded():
            outputs = call_with(self.net, tensors, inputs.flatten(0, 1))
        return self.crowd.flat(outputs).unflatten(0, inputs.shape[:2])

    def takes(self, inputs: Tensor) -> bool:
        """Whether native code is made for such inputs ``(users, batch, ...)``, and faster."""
        return convolutions.supports(inputs) and inputs.shape[1] >= FEWEST

    def telling(self) -> AbstractContextManager[None]:
        """Within, it takes tensors without data and makes what takes as much room: costs are counted so."""
        return convolutions.telling()

    def _chained(self, net: nn.Module) -> nn.Module:
        if type(net) is nn.Sequential:
            return self._chain(net)
        if type(net) in _BY_SAMPLE and getattr(net, "start_dim", 1) == 1:
            return net
        if not getattr(net, "by_sample", False):
            raise UnknownLayerError
        if getattr(net, "is_relu_of_sum", False):
            return self._sum(net)
        made = copy.copy(net)
        made._modules = {name: self._chained(child) for name, child in _children(net)}
        return made

    def _sum(self, net: nn.Module) -> Sum:
        names = [name for name, _ in _children(net)]
        chain, other = (self._chained(child) for _, child in _children(net))
        if not isinstance(chain, Chain) or not isinstance(chain.steps[-1], Step) or chain.steps[-1].pool > 1:
            raise UnknownLayerError
        return Sum(chain, other, self.crowd, names)

    def _chain(self, net: nn.Sequential) -> Chain:
        made, left = Chain(), _children(net)
        made.steps = []
        while left:
            found = _step([module for _, module in left], self.crowd)
            step, count = found or (None, 1)
            for name, module in left[:count]:
                made.add_module(name, module if step is not None else self._chained(module))
            made.steps.append(step or self._on(made[-1]))
            left = left[count:]
        return made

    def _on(self, module: nn.Module) -> Callable[[Tensor], Tensor]:
        """A module on samples in the order that it can have."""
        return module if isinstance(module, (Chain, Sum, *_POINTWISE)) else lambda x: module(self.crowd.flat(x))


def _children(net: nn.Module) -> list[tuple[str, nn.Module]]:
    """By name, and as often as a child is there: ``named_children`` has each once."""
    return [(name, child) for name, child in net._modules.items() if child is not None]


def _step(following: Sequence[nn.Module], crowd: Crowd) -> tuple[Step, int] | None:
    """The step that some modules begin with, and of how many."""
    convolution, *rest = following
    if type(convolution) is not nn.Conv2d or not _plain(convolution):
        return None
    norm = rest.pop(0) if rest and _has_statistics(rest[0]) else None
    relu = rest.pop(0) if rest and type(rest[0]) is nn.ReLU else None
    pool = rest.pop(0) if rest and _apart(rest[0]) else None
    size = 1 if pool is None else _square(pool.kernel_size)  # type: ignore[arg-type]
    count = 1 + sum(part is not None for part in (norm, relu, pool))
    return Step(convolution=convolution, norm=norm, relu=relu is not None, pool=size, crowd=crowd), count  # type: ignore[arg-type]


def _plain(convolution: nn.Conv2d) -> bool:
    known = convolution.padding_mode == "zeros" and not isinstance(convolution.padding, str)
    return known and convolution.groups == 1


def _has_statistics(norm: nn.Module) -> bool:
    if type(norm) is nn.GroupNorm:
        return True
    return type(norm) is nn.BatchNorm2d and norm.momentum is not None and norm.track_running_stats


def _square(size: int | tuple[int, ...]) -> int:
    """The side of a square window, else 0."""
    sides = {size} if isinstance(size, int) else set(size)
    return sides.pop() if len(sides) == 1 else 0


def _apart(pool: nn.Module) -> bool:
    """Whether it is max-pooling of square windows that do not overlap."""
    if type(pool) is not nn.MaxPool2d or pool.ceil_mode or pool.return_indices:
        return False
    size = _square(pool.kernel_size)
    others = (_square(pool.stride), _square(pool.padding), _square(pool.dilation))
    return 1 < size <= convolutions.LARGEST_POOL and others == (size, 0, 1)
