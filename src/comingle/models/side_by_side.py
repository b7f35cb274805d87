"""Faster forms of nets that are stacked over users, in place of ``vmap``.

Under ``vmap``, a norm whose gamma and beta differ between users takes three passes over the activations. One norm over
all users' channels has the same values in one pass, because channels (or groups of channels) are independent
(:class:`FusedNorms`).

A net of linears and pointwise functions needs no ``vmap``: the samples of all users form one batch, and each linear is
a batched product over users (:class:`Folded`). In nets with convolutions, a convolution and the norm, ReLU and pooling
after it are one native step (:class:`Chained`, :mod:`comingle.models.kernels.convolutions`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from inspect import Signature, signature
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor  # no public function says whether a vmap level remains
from torch.overrides import TorchFunctionMode

from comingle.models.kernels import convolutions
from comingle.models.kernels.convolutions import PassShape, Step
from comingle.models.model import call_with
from comingle.utils.files import cache_folder
from comingle.utils.trees import (
    Context,
    Tree,
)

_NORM_SIGNATURES: Mapping[Any, Signature] = {norm: signature(norm) for norm in (F.batch_norm, F.group_norm)}


class FusedNorms(TorchFunctionMode):
    """Run ``F.batch_norm`` and ``F.group_norm`` inside a ``vmap`` over users as one call for all users.

    Running statistics change in place, so each user's must be contiguous.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        """Call a function of torch inside the mode; batch norm and group norm become one call for all users.

        Args:
            func: The function.
            types: Ignored; torch passes the classes of the arguments.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
        """
        if func not in _NORM_SIGNATURES:
            return func(*args, **(kwargs or {}))
        bound = _NORM_SIGNATURES[func].bind(*args, **(kwargs or {}))  # autograd functions take no keyword arguments
        bound.apply_defaults()
        return _FusedNorm.apply(func, *bound.args)


class _FusedNorm(torch.autograd.Function):
    """A norm with a rule for ``vmap``, composed of differentiable operations; it has no derivative of its own."""

    @staticmethod
    def forward(norm: Any, *args: Any) -> Tensor:
        """Call the plain norm, outside of ``vmap``."""
        return norm(*args)

    @staticmethod
    def setup_context(ctx: Context, inputs: object, output: object) -> None:
        """Save nothing."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        """Compute one norm over all users' channels; nested ``vmap`` levels are applied recursively.

        Args:
            info: Information of torch about the ``vmap`` level, such as the number of users.
            in_dims: Axis of users in each argument; None for an argument without that axis.
            *args: The norm function, its input, and its further arguments.

        Returns:
            The output, and its axis of users.
        """
        (norm, x, *rest), users = args, info.batch_size
        _, x_axis, *rest_axes = in_dims
        # To (batch, users, channels, ...), which is then an input with users * channels channels.
        x = x.unsqueeze(1).expand(-1, users, *x.shape[1:]) if x_axis is None else x.movedim(x_axis, 1)
        rest = [
            _join(value, user_axis, users) if isinstance(value, Tensor) else value
            for value, user_axis in zip(rest, rest_axes, strict=True)
        ]
        if norm is F.group_norm:
            rest[0] *= users  # the number of groups
        side_by_side = [x.flatten(1, 2), *rest]
        has_outer_vmap = any(isinstance(value, Tensor) and is_batchedtensor(value) for value in side_by_side)
        call = partial(_FusedNorm.apply, norm) if has_outer_vmap else norm
        user_axis_of_output = 1
        return call(*side_by_side).unflatten(1, (users, -1)), user_axis_of_output


def _join(values: Tensor, users_at: int | None, users: int) -> Tensor:
    """Return the values of all users as ``(users * channels,)``; ``users_at`` is their axis, None for equal values."""
    by_user = values.expand(users, -1) if users_at is None else values.movedim(users_at, 0)
    return by_user.flatten()


def _linear_over_users(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x W_u^T + b_u`` for each user u, with the interface of ``F.linear``.

    Args:
        x: Samples ``(users * batch, ..., d_in)``, ordered by user.
        weight: Weights ``(users, d_out, d_in)``.
        bias: Biases ``(users, d_out)``.
    """
    y = _Products.apply(x.reshape(len(weight), -1, x.shape[-1]), weight)
    return (y if bias is None else y + bias.unsqueeze(1)).view(*x.shape[:-1], -1)


_FOLDED: Mapping[Any, Callable[..., Tensor]] = {F.linear: _linear_over_users}
"""Functions of torch, and their forms for parameters with a user axis."""


FOLDING = (nn.Sequential, nn.Flatten, nn.Identity, nn.Linear, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU)
"""Modules that process samples independently of each other; :data:`_FOLDED` replaces those with parameters."""


def folds(net: nn.Module) -> bool:
    """Return whether the samples of all users can go through a net as one batch, within :class:`Folded`."""
    # A `Flatten` from axis 0 would join samples.
    return all(type(m) in FOLDING and getattr(m, "start_dim", 1) == 1 for m in net.modules())


class Folded(TorchFunctionMode):
    """Run layers on samples ``(users * batch, ...)``, user-major, with parameters ``(users, ...)``."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        """Call ``func``, or its batched form."""
        return _FOLDED.get(func, func)(*args, **(kwargs or {}))


@runtime_checkable
class SideBySideNet(Protocol):
    """A net rewritten to compute the outputs of all users in one call, without ``vmap``."""

    def takes(self, inputs: Tensor) -> bool:
        """Return whether this net supports the inputs ``(users, batch, ...)`` and is faster than ``vmap``."""
        ...

    def __call__(self, tensors: Tree, inputs: Tensor, *, train: bool) -> Tensor:
        """Return all users' outputs ``(users, batch, ...)``; running statistics in ``tensors`` change in place.

        Args:
            tensors: Parameters and statistics ``(users, ...)``.
            inputs: Samples ``(users, batch, ...)``.
            train: Run in training mode.
        """
        ...


LARGE_WEIGHT = 1024
"""Smallest number of entries of a weight whose gradient is computed in the weight's own layout; measured on CPUs."""


class _Products(torch.autograd.Function):
    """``x_u W_u^T`` for each user u.

    Autograd's own gradient of a weight is transposed, and an optimiser step with it takes longer than the product.
    """

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor) -> Tensor:
        """Return ``(users, n, d_out)`` for ``x`` of ``(users, n, d_in)`` and weights of ``(users, d_out, d_in)``."""
        ctx.save_for_backward(x, weight)
        return torch.bmm(x, weight.mT)

    @staticmethod
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        """Return the gradients of ``x`` and of the weights, as far as they are needed.

        Args:
            ctx: Autograd context.
            dy: Gradient of the output.
        """
        x, weight = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad
        d_x = torch.bmm(dy, weight) if wants_x else None
        if not wants_weight:
            return d_x, None
        # Both products are equal. The first is contiguous like the weight, which speeds up the optimiser step of a
        # large weight; for a small one the second product, whose transpose is returned, is faster.
        is_large = weight.shape[1] * weight.shape[2] >= LARGE_WEIGHT
        return d_x, torch.bmm(dy.mT, x) if is_large else torch.bmm(x.mT, dy).mT


FEW_CHANNELS = 16
"""Channels that fill a vector register of float32; with fewer, oneDNN's convolutions are slow in the usual layout."""


def channels_last(tensors: Tree) -> Tree:
    """Convert convolution weights with few channels to the channels-last layout.

    The weights are ``(users, ..., out, in, height, width)``. The outputs of such a convolution and of all later layers
    have the same layout. Measured on CPUs: a ResNet with 8 channels is faster, VGG with 16 and more is slower.
    """
    # Only weights of 2d convolutions have more than four axes, as all tensors have a user axis.
    narrow = {
        name for name, t in tensors.items() if t.dim() > 4 and t.shape[-4] < FEW_CHANNELS and t.device.type == "cpu"
    }
    return {name: _channels_last(t) if name in narrow else t for name, t in tensors.items()}


def _channels_last(weight: Tensor) -> Tensor:
    """Return a copy of a weight ``(..., out, in, height, width)`` whose memory has input channels last."""
    return weight.flatten(0, -4).contiguous(memory_format=torch.channels_last).view(weight.shape)


_BY_SAMPLE = (*FOLDING, nn.Dropout, nn.AdaptiveAvgPool2d, nn.AvgPool2d, nn.MaxPool2d)
"""Modules that process samples independently of each other."""


_POINTWISE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.Identity)
"""Modules that work on plain samples and on maps alike."""


class UnknownLayerError(Exception):
    """The net has a layer that requires ``vmap``."""


class Chain(nn.Sequential):
    """A ``Sequential`` that runs a convolution and the norm, ReLU and pooling after it as one step."""

    steps: list[Callable[[Tensor], Tensor]]

    def forward(self, input: Tensor) -> Tensor:
        """Run all steps."""
        for step in self.steps:
            input = step(input)
        return input


class Sum(nn.Module):
    """ReLU of the sum of two branches: a chain that ends in a convolution, and another module.

    Args:
        chain: The chain; its last step adds the other branch and applies the ReLU.
        other: The other module.
        pass_shape: Numbers of users and images of the current pass.
        names: Names of both as submodules.
    """

    def __init__(self, chain: Chain, other: nn.Module, pass_shape: PassShape, names: Sequence[str]) -> None:
        """Register both branches, and let the chain's last step compute the sum and the ReLU.

        Args:
            chain: Layers that run one after another; the last is a convolution in native code.
            other: The other branch.
            pass_shape: Numbers of users and images of the current pass.
            names: Names of both branches as submodules, so that parameters keep their names.
        """
        super().__init__()
        for name, module in zip(names, (chain, other), strict=True):
            self.add_module(name, module)
        *self.steps_before_last, last = chain.steps
        assert isinstance(last, Step)
        self.last_step, self.pass_shape = replace(last, relu=True), pass_shape
        self.other = [other]  # in a list, as a module attribute would be registered as a submodule a second time

    def forward(self, x: Tensor) -> Tensor:
        """Return ``relu(chain(x) + other(x))``; the last step of the chain computes the sum and the ReLU.

        If the chain begins with a convolution in native code, the convolution also returns x, and the other branch
        reads the returned x. So the convolution's backward pass can add up both branches' gradients of x.
        """
        (other,) = self.other  # a list of one module, so that torch does not register the module twice
        x = self.pass_shape.lanes(x)  # to the memory layout of native code
        remaining, y = self.steps_before_last, x  # y is the output of the chain so far
        if remaining and isinstance(remaining[0], Step):
            y, x = remaining[0].run_shared(x)
            remaining = remaining[1:]
        other_output = self.pass_shape.lanes(other(x))
        for step in remaining:
            y = step(y)
        return self.last_step(y, other_output)  # adds the other output and applies the ReLU


MIN_IMAGES = 10
"""Smallest number of images per user for which native code is faster; with fewer, vectors of images are mostly empty.

Measured on CPUs.
"""


def native_net(net: nn.Module) -> Chained | None:
    """Rewrite a convolutional net to run all users' nets at once with C++ kernels, in place of ``vmap``.

    None if the net has unsupported layers or no convolutions, is not on a CPU, or the kernels cannot be compiled.
    """
    if not all(convolutions.fits(p) for p in net.parameters()):
        return None
    try:
        chained = Chained(net)
    except UnknownLayerError:
        return None
    return chained if convolutions.enable(cache_folder() / "native") else None


class Chained:
    """A convolutional net rebuilt to process all users' samples at once; parameters are shared and keep their names.

    Convolutions with the norms and activations behind them become chains of native steps, which compute all users at
    once. A net without any such step gains nothing, so it is refused.

    Raises:
        UnknownLayerError: The net has a module that may mix samples, or no convolution.
    """

    def __init__(self, net: nn.Module) -> None:
        """Convert a net: each convolution, with the norm, ReLU and pooling after it, becomes one step in C++.

        Args:
            net: The net, whose parameters are shared.

        Raises:
            UnknownLayerError: A layer is not supported, or the net has no convolution to convert.
        """
        self.pass_shape = PassShape()  # numbers of users and images of a pass, which all steps read
        self.net = self._convert(net)
        if not any(isinstance(step, Step) for m in self.net.modules() if isinstance(m, Chain) for step in m.steps):
            raise UnknownLayerError

    def __call__(self, tensors: Tree, inputs: Tensor, *, train: bool) -> Tensor:
        """Return outputs ``(users, batch, outputs)``; running statistics in ``tensors`` change in place.

        Args:
            tensors: Parameters and statistics ``(users, ...)``.
            inputs: Samples ``(users, batch, ...)``.
            train: Run in training mode.
        """
        # Layers see all users' samples as one batch. Convolutions in C++ split it by the sizes in `pass_shape`, and
        # inside Folded, F.linear multiplies each user's samples by its weights.
        self.pass_shape.users, self.pass_shape.images = inputs.shape[:2]
        self.net.train(train)
        with Folded():
            outputs = call_with(self.net, tensors, inputs.flatten(0, 1))
        return self.pass_shape.flat(outputs).unflatten(0, inputs.shape[:2])

    def takes(self, inputs: Tensor) -> bool:
        """Return whether native code supports inputs ``(users, batch, ...)`` and is faster."""
        return convolutions.supports(inputs) and inputs.shape[1] >= MIN_IMAGES

    def accepting_fakes(self) -> AbstractContextManager[None]:
        """Accept tensors without data and only allocate what a pass would, to count costs."""
        return convolutions.accepting_fakes()

    def _convert(self, net: nn.Module) -> nn.Module:
        """Return a net that computes the same, with convolutions fused into steps; parameters are shared.

        A module with children must not mix samples, and declare so by a true attribute ``by_sample``. A true attribute
        ``is_relu_of_sum`` declares that a module is the ReLU of the sum of its two children.

        Raises:
            UnknownLayerError: A module may mix samples.
        """
        if type(net) is nn.Sequential:
            return self._convert_sequential(net)
        # A Flatten from axis 0 would mix samples; other modules have no `start_dim`.
        if type(net) in _BY_SAMPLE and getattr(net, "start_dim", 1) == 1:
            return net
        if not getattr(net, "by_sample", False):
            raise UnknownLayerError
        if getattr(net, "is_relu_of_sum", False):
            return self._convert_sum(net)
        converted = copy.copy(net)
        converted._modules = {name: self._convert(child) for name, child in _children(net)}
        return converted

    def _convert_sum(self, net: nn.Module) -> Sum:
        """Convert a module that is the ReLU of the sum of its two children, such as a residual block.

        The first child must end in a convolution. Native code then adds the second child's output to the convolution's
        and applies the ReLU.

        Raises:
            UnknownLayerError: The first child does not end in a convolution, or pools after it: pooling would have to
                come after the sum.
        """
        names = [name for name, _ in _children(net)]
        chain, other = (self._convert(child) for _, child in _children(net))
        if not isinstance(chain, Chain) or not isinstance(chain.steps[-1], Step) or chain.steps[-1].pool > 1:
            raise UnknownLayerError
        return Sum(chain, other, self.pass_shape, names)

    def _convert_sequential(self, net: nn.Sequential) -> Chain:
        """Convert a sequence; a convolution and the norm, ReLU and pooling after it become one step.

        The steps run the forward pass. Modules that form a step stay unconverted children, which only hold its
        parameters under their names.
        """
        converted, remaining = Chain(), _children(net)
        converted.steps = []
        while remaining:
            # The step that the next modules form; without one, the next module is converted by itself.
            step_and_count = _leading_step([module for _, module in remaining], self.pass_shape)
            step, count = step_and_count or (None, 1)
            for name, module in remaining[:count]:
                converted.add_module(name, module if step is not None else self._convert(module))
            converted.steps.append(step or self._step_of_module(converted[-1]))
            remaining = remaining[count:]
        return converted

    def _step_of_module(self, module: nn.Module) -> Callable[[Tensor], Tensor]:
        """Return a module as a step; its inputs are converted to plain samples unless it works on either layout."""
        return module if isinstance(module, (Chain, Sum, *_POINTWISE)) else lambda x: module(self.pass_shape.flat(x))


def _children(net: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return all children by name, repeated ones included; ``named_children`` lists each once."""
    return [(name, child) for name, child in net._modules.items() if child is not None]


def _leading_step(following: Sequence[nn.Module], pass_shape: PassShape) -> tuple[Step, int] | None:
    """Fuse the first of some modules into a native step: a convolution, and the norm, ReLU and pooling after it.

    Args:
        following: Modules that run one after another.
        pass_shape: Numbers of users and images of the current pass, which the step reads.

    Returns:
        The step and the number of fused modules; None unless the first module is a convolution that native code
        supports.
    """
    convolution, *rest = following
    if type(convolution) is not nn.Conv2d or not _is_plain(convolution):
        return None
    norm = rest.pop(0) if rest and _is_supported_norm(rest[0]) else None
    relu = rest.pop(0) if rest and type(rest[0]) is nn.ReLU else None
    pool = rest.pop(0) if rest and _is_disjoint_max_pool(rest[0]) else None
    size = 1 if pool is None else _square_side(pool.kernel_size)  # type: ignore[arg-type]
    count = 1 + sum(part is not None for part in (norm, relu, pool))
    return Step(convolution=convolution, norm=norm, relu=relu is not None, pool=size, pass_shape=pass_shape), count  # type: ignore[arg-type]


def _is_plain(convolution: nn.Conv2d) -> bool:
    """Return whether native code supports a convolution: zero padding, given in numbers, and a single group."""
    pads_zeros = convolution.padding_mode == "zeros" and not isinstance(convolution.padding, str)
    return pads_zeros and convolution.groups == 1


def _is_supported_norm(norm: nn.Module) -> bool:
    """Return whether native code supports a norm: a group norm, or a batch norm with moving averages."""
    if type(norm) is nn.GroupNorm:
        return True
    return type(norm) is nn.BatchNorm2d and norm.momentum is not None and norm.track_running_stats


def _square_side(size: int | tuple[int, ...]) -> int:
    """Return the side of a square window, or 0 for other windows."""
    sides = {size} if isinstance(size, int) else set(size)
    return sides.pop() if len(sides) == 1 else 0


def _is_disjoint_max_pool(pool: nn.Module) -> bool:
    """Return whether a module is max-pooling of square windows that do not overlap."""
    if type(pool) is not nn.MaxPool2d or pool.ceil_mode or pool.return_indices:
        return False
    size = _square_side(pool.kernel_size)
    stride, padding, dilation = (_square_side(n) for n in (pool.stride, pool.padding, pool.dilation))
    return 1 < size <= convolutions.LARGEST_POOL and (stride, padding, dilation) == (size, 0, 1)
