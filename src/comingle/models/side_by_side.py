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
from inspect import Signature, signature
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor  # no public function says whether a vmap level remains
from torch.overrides import TorchFunctionMode

from comingle.models.kernels import convolutions
from comingle.models.kernels.convolutions import ConvolutionStep, PassShape
from comingle.models.model import call_with
from comingle.utils.files import cache_folder
from comingle.utils.trees import (
    Context,
    Tree,
)

_NORM_SIGNATURES: Mapping[Any, Signature] = {norm: signature(norm) for norm in (F.batch_norm, F.group_norm)}


class FusedNorms(TorchFunctionMode):
    """Run ``F.batch_norm`` and ``F.group_norm`` inside a ``vmap`` over users as one call for all users.

    Running statistics change in place, so the statistics of each user must be contiguous.
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
        kwargs = kwargs or {}
        if func not in _NORM_SIGNATURES:
            return func(*args, **kwargs)
        bound = _NORM_SIGNATURES[func].bind(*args, **kwargs)
        bound.apply_defaults()
        all_as_positional = bound.args  # autograd functions take no keyword arguments
        return _FusedNorm.apply(func, *all_as_positional)


class _FusedNorm(torch.autograd.Function):
    """A norm that ``vmap`` over users computes as one norm over all users' channels."""

    @staticmethod
    def forward(norm: Any, *args: Any) -> Tensor:
        """Compute the norm outside of ``vmap``, where nothing is fused.

        Args:
            norm: A norm function of torch, such as ``F.group_norm``.
            *args: Its input and further arguments.
        """
        return norm(*args)

    @staticmethod
    def setup_context(ctx: Context, inputs: object, output: object) -> None:
        """Save nothing, as :meth:`vmap` calls differentiable functions."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        """Compute the norm of all users at once, with the channels of all users side by side as one channel axis.

        ``torch.vmap`` calls this instead of its own, slower rule for norms.

        Args:
            info: Information of torch about the ``vmap`` level, such as the number of users.
            in_dims: Axis of users in each argument; None for an argument without that axis.
            *args: The norm function, its input, and its further arguments.

        Returns:
            The output, and its axis of users.
        """
        norm, x, *settings = args
        _, x_axis, *setting_axes = in_dims
        users = info.batch_size
        has_user_axis = x_axis is not None
        # (batch, users, channels, ...)
        x = x.movedim(x_axis, 1) if has_user_axis else x.unsqueeze(1).expand(-1, users, *x.shape[1:])
        joined = [x.flatten(1, 2)]  # arguments of the norm over all users' channels, (batch, users * channels, ...)
        if norm is F.group_norm:
            num_groups, *settings = settings
            _, *setting_axes = setting_axes
            joined.append(num_groups * users)
        for value, user_axis in zip(settings, setting_axes, strict=True):
            joined.append(_join_channels(value, user_axis, users) if isinstance(value, Tensor) else value)
        # Inside another vmap, such as one over components, torch must call this function again for that level.
        is_in_outer_vmap = any(isinstance(value, Tensor) and is_batchedtensor(value) for value in joined)
        output = _FusedNorm.apply(norm, *joined) if is_in_outer_vmap else norm(*joined)
        return output.unflatten(1, (users, -1)), 1


def _join_channels(values: Tensor, user_axis: int | None, users: int) -> Tensor:
    """Return one value per channel of each user as ``(users * channels,)``.

    Args:
        values: The values, such as gamma.
        user_axis: Axis of the users; None if all users have the same values.
        users: Number of users.
    """
    by_user = values.expand(users, -1) if user_axis is None else values.movedim(user_axis, 0)
    return by_user.flatten()


def _linear_over_users(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x W_u^T + b_u`` for each user u, with the interface of ``F.linear``.

    Args:
        x: Samples ``(users * batch, ..., d_in)``, ordered by user.
        weight: Weights ``(users, d_out, d_in)``.
        bias: Biases ``(users, d_out)``.
    """
    users, width = len(weight), x.shape[-1]
    y = _Products.apply(x.reshape(users, -1, width), weight)  # (users, n, d_out)
    if bias is not None:
        y = y + bias.unsqueeze(1)
    return y.view(*x.shape[:-1], -1)


_FOLDED_FUNCTIONS: Mapping[Any, Callable[..., Tensor]] = {F.linear: _linear_over_users}
"""Functions of torch, and their forms for parameters with a user axis."""


SAMPLEWISE_MODULES = (nn.Sequential, nn.Flatten, nn.Identity, nn.Linear, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU)
"""Modules of torch that process samples independently of each other and work in :class:`Folded`.

Linears are the only ones with parameters; :data:`_FOLDED_FUNCTIONS` replaces their function.
"""


def can_fold(net: nn.Module) -> bool:
    """Return whether a net supports :class:`Folded`, which runs the samples of all users as one batch."""
    for module in net.modules():
        joins_samples = getattr(module, "start_dim", 1) != 1  # a ``Flatten`` from axis 0
        if type(module) not in SAMPLEWISE_MODULES or joins_samples:
            return False
    return True


class Folded(TorchFunctionMode):
    """Run layers on samples ``(users * batch, ...)``, user-major, with parameters ``(users, ...)``."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        """Call a function of torch, or its form in :data:`_FOLDED_FUNCTIONS` for parameters with a user axis.

        Args:
            func: The function.
            types: Ignored; torch passes the classes of the arguments.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
        """
        folded = _FOLDED_FUNCTIONS.get(func, func)
        return folded(*args, **(kwargs or {}))


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
        d_x, d_weight = None, None
        if wants_x:
            d_x = torch.bmm(dy, weight)
        if wants_weight:
            # For a large weight a contiguous gradient, which speeds up the optimiser step; else the faster product.
            _users, d_out, d_in = weight.shape
            is_large = d_out * d_in >= LARGE_WEIGHT
            d_weight = torch.bmm(dy.mT, x) if is_large else torch.bmm(x.mT, dy).mT
        return d_x, d_weight


FEW_CHANNELS = 16
"""Channels that fill a vector register of float32; with fewer, oneDNN's convolutions are slow in the usual layout."""


def channels_last(tensors: Tree) -> Tree:
    """Convert convolution weights with few output channels to the channels-last layout, in which CPUs are faster.

    Args:
        tensors: Tensors by name; weights of 2d convolutions are ``(users, ..., out, in, height, width)``.
    """
    converted = {}
    for name, tensor in tensors.items():
        is_convolution = tensor.dim() > 4
        if is_convolution and tensor.shape[-4] < FEW_CHANNELS and tensor.device.type == "cpu":
            converted[name] = _channels_last(tensor)
        else:
            converted[name] = tensor
    return converted


def _channels_last(weight: Tensor) -> Tensor:
    """Return a copy of a weight ``(..., out, in, height, width)`` whose memory has input channels last."""
    return weight.flatten(0, -4).contiguous(memory_format=torch.channels_last).view(weight.shape)


_CONVERTIBLE_MODULES = (*SAMPLEWISE_MODULES, nn.Dropout, nn.AdaptiveAvgPool2d, nn.AvgPool2d, nn.MaxPool2d)
"""Modules of torch that :class:`Chained` leaves as they are, as they process samples independently of each other."""


_POINTWISE_MODULES = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.Identity)
"""Modules that work elementwise, so that they accept the plain layout of samples and the layout of native code."""


class UnknownLayerError(Exception):
    """The net has a layer that requires ``vmap``."""


class Chain(nn.Sequential):
    """A ``Sequential`` that runs a convolution and the norm, ReLU and pooling after it as one step."""

    steps: list[Callable[[Tensor], Tensor]]

    def forward(self, input: Tensor) -> Tensor:
        """Run the steps one after another; a step is a layer, or a convolution fused with the layers after it."""
        for step in self.steps:
            input = step(input)
        return input


class Sum(nn.Module):
    """``relu(chain(x) + other(x))``, where the chain ends in a convolution.

    Args:
        chain: The chain; its last step adds the other branch and applies the ReLU.
        other: The other module.
        pass_shape: Numbers of users and images of the current pass.
        names: Names of both as submodules.
    """

    def __init__(self, chain: Chain, other: nn.Module, pass_shape: PassShape, names: Sequence[str]) -> None:
        """Create a residual block of two branches; the last step of ``chain`` also computes the sum and the ReLU.

        Args:
            chain: First branch: layers that run one after another; the last is a convolution in native code.
            other: Second branch, such as the shortcut.
            pass_shape: Numbers of users and images of the current forward pass.
            names: Names of both branches as submodules, so that parameters keep their names.
        """
        super().__init__()
        for name, module in zip(names, (chain, other), strict=True):
            self.add_module(name, module)
        *self.steps_before_last, last = chain.steps
        assert isinstance(last, ConvolutionStep)
        self.last_step, self.pass_shape = replace(last, relu=True), pass_shape
        self.other = [other]  # in a list, as a module attribute would be registered as a submodule a second time

    def forward(self, x: Tensor) -> Tensor:
        """Return ``relu(chain(x) + other(x))``; the last step of the chain computes the sum and the ReLU."""
        (other,) = self.other
        x = self.pass_shape.to_maps(x)  # to the memory layout of native code
        y, steps = x, self.steps_before_last
        first_step = steps[0] if steps else None
        if isinstance(first_step, ConvolutionStep):
            # The returned x is the input of `other`. In the backward pass the step adds its gradient to that of `other`
            # in place, which saves a pass over memory.
            y, x = first_step.run_shared(x)
            steps = steps[1:]
        other_output = self.pass_shape.to_maps(other(x))
        for step in steps:
            y = step(y)
        return self.last_step(y, other_output)


MIN_IMAGES = 10
"""Smallest number of images per user for which native code is faster; with fewer, vectors of images are mostly empty.

Measured on CPUs.
"""


def native_net(net: nn.Module) -> Chained | None:
    """Rewrite a convolutional net to run all users' nets at once with C++ kernels, in place of ``vmap``.

    Returns:
        The net; None if it has unsupported layers or no convolutions, is not on a CPU, or the kernels do not compile.
    """
    if not all(convolutions.fits(p) for p in net.parameters()):
        return None
    try:
        chained = Chained(net)
    except UnknownLayerError:
        return None
    has_kernels = convolutions.enable(cache_folder() / "native")
    return chained if has_kernels else None


class Chained:
    """A convolutional net rebuilt to process all users' samples at once; parameters are shared and keep their names.

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
        all_steps = []
        for module in self.net.modules():
            if isinstance(module, Chain):
                all_steps += module.steps
        has_convolution = any(isinstance(step, ConvolutionStep) for step in all_steps)
        if not has_convolution:
            raise UnknownLayerError

    def __call__(self, tensors: Tree, inputs: Tensor, *, train: bool) -> Tensor:
        """Return outputs ``(users, batch, outputs)``; running statistics in ``tensors`` change in place.

        Args:
            tensors: Parameters and statistics ``(users, ...)``.
            inputs: Samples ``(users, batch, ...)``.
            train: Run in training mode.
        """
        users, images = inputs.shape[:2]
        self.pass_shape.users, self.pass_shape.images = users, images
        self.net.train(train)
        samples_of_all_users = inputs.flatten(0, 1)
        with Folded():  # F.linear multiplies each user's samples by the user's weights
            outputs = call_with(self.net, tensors, samples_of_all_users)
        # To (users * batch, ...), if the last layer returned the memory layout of native code.
        flat_outputs = self.pass_shape.flat(outputs)
        return flat_outputs.unflatten(0, (users, images))

    def takes(self, inputs: Tensor) -> bool:
        """Return whether native code supports inputs ``(users, batch, ...)`` and is faster."""
        return convolutions.supports(inputs) and inputs.shape[1] >= MIN_IMAGES

    def accepting_fakes(self) -> AbstractContextManager[None]:
        """Accept fake tensors in the context, to estimate the memory of a pass."""
        return convolutions.accepting_fakes()

    def _convert(self, net: nn.Module) -> nn.Module:
        """Return a net that computes the same, with convolutions fused into steps; parameters are shared.

        A module of this library has the attribute ``by_sample = True`` if it does not mix samples, and
        ``is_relu_of_sum = True`` if it computes the ReLU of the sum of its two children.

        Raises:
            UnknownLayerError: A module may mix samples.
        """
        if type(net) is nn.Sequential:
            return self._convert_sequential(net)
        joins_samples = getattr(net, "start_dim", 1) != 1  # a ``Flatten`` from axis 0
        if type(net) in _CONVERTIBLE_MODULES and not joins_samples:
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

        Raises:
            UnknownLayerError: The first child does not end in a convolution, which could add the second child's output
                before its ReLU, or that convolution is followed by pooling.
        """
        (chain_name, chain), (other_name, other) = _children(net)
        chain, other = self._convert(chain), self._convert(other)
        if not isinstance(chain, Chain):
            raise UnknownLayerError
        last_step = chain.steps[-1]
        if not isinstance(last_step, ConvolutionStep) or last_step.pool > 1:
            raise UnknownLayerError
        return Sum(chain, other, self.pass_shape, names=(chain_name, other_name))

    def _convert_sequential(self, net: nn.Sequential) -> Chain:
        """Convert a sequence; a convolution and the norm, ReLU and pooling after it become one step."""
        chain, remaining = Chain(), _children(net)
        chain.steps = []
        while remaining:
            fused = _fuse_first_modules([module for _, module in remaining], self.pass_shape)
            if fused is not None:
                step, num_fused = fused
                for name, module in remaining[:num_fused]:
                    chain.add_module(name, module)  # holds the step's parameters under their names
                chain.steps.append(step)
                remaining = remaining[num_fused:]
            else:
                (name, module), *remaining = remaining
                converted = self._convert(module)
                chain.add_module(name, converted)
                chain.steps.append(self._step_of_module(converted))
        return chain

    def _step_of_module(self, module: nn.Module) -> Callable[[Tensor], Tensor]:
        """Return a module as a step of a chain, whose input may be in PyTorch's memory layout or in native code's.

        Args:
            module: The module. Unless it accepts both layouts, its input is converted to PyTorch's first.
        """
        if isinstance(module, (Chain, Sum, *_POINTWISE_MODULES)):  # accepts both layouts
            return module

        def run_on_plain_samples(x: Tensor) -> Tensor:
            return module(self.pass_shape.flat(x))

        return run_on_plain_samples


def _children(net: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return all children by name, repeated ones included; ``named_children`` lists each once."""
    return [(name, child) for name, child in net._modules.items() if child is not None]


def _fuse_first_modules(modules: Sequence[nn.Module], pass_shape: PassShape) -> tuple[ConvolutionStep, int] | None:
    """Fuse the first of some modules into a native step: a convolution, and the norm, ReLU and pooling after it.

    Args:
        modules: Modules that run one after another.
        pass_shape: Numbers of users and images of the current pass, which the step reads.

    Returns:
        The step and the number of fused modules; None unless the first module is a convolution that native code
        supports.
    """
    convolution, *rest = modules
    if type(convolution) is not nn.Conv2d or not _is_plain(convolution):
        return None
    norm, has_relu, pool_size = None, False, 1
    if rest and _is_supported_norm(rest[0]):
        norm = rest.pop(0)
    if rest and type(rest[0]) is nn.ReLU:
        has_relu = True
        rest.pop(0)
    if rest and _is_disjoint_max_pool(rest[0]):
        pool_size = _square_side(rest.pop(0).kernel_size)  # type: ignore[arg-type]
    num_fused = len(modules) - len(rest)
    step = ConvolutionStep(convolution=convolution, norm=norm, relu=has_relu, pool=pool_size, pass_shape=pass_shape)  # type: ignore[arg-type]
    return step, num_fused


def _is_plain(convolution: nn.Conv2d) -> bool:
    """Return whether native code supports a convolution: zero padding, given in numbers, and a single group."""
    if convolution.padding_mode != "zeros" or isinstance(convolution.padding, str):
        return False
    return convolution.groups == 1


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
    """Return whether a module is max-pooling of square windows that do not overlap, which native code can fuse."""
    if type(pool) is not nn.MaxPool2d or pool.ceil_mode or pool.return_indices:
        return False
    size, stride = _square_side(pool.kernel_size), _square_side(pool.stride)
    padding, dilation = _square_side(pool.padding), _square_side(pool.dilation)
    is_supported_size = 1 < size <= convolutions.LARGEST_POOL
    return is_supported_size and stride == size and padding == 0 and dilation == 1
