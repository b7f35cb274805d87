"""Stacked users' layers in the form that is fastest, where ``vmap`` has another.

Under ``vmap`` a norm whose gamma and beta differ between users is three passes over the activations. A norm of all
users' channels side by side has the same values in one, because no channel (or group of channels) meets another.
A net of linears alone needs no ``vmap``: samples of all users are one batch, in which only parameters
know whose they are. Then nothing stands between the products but themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import Signature, signature
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor  # no public name tells whether a vmap is left
from torch.overrides import TorchFunctionMode

from comingle.utils.trees import (
    Tree,
)

_NORM_SIGNATURES: Mapping[Any, Signature] = {norm: signature(norm) for norm in (F.batch_norm, F.group_norm)}


class FusedNorms(TorchFunctionMode):
    """While this is entered, ``F.batch_norm`` and ``F.group_norm`` in a ``vmap`` over users are one call for all.

    Running statistics change in place, so each user's must be contiguous.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """``func``, or what stands for it."""
        if func not in _NORM_SIGNATURES:
            return func(*args, **(kwargs or {}))
        given = _NORM_SIGNATURES[func].bind(*args, **(kwargs or {}))
        given.apply_defaults()
        return _SideBySide.apply(func, *given.args)


class _SideBySide(torch.autograd.Function):
    """Has a rule for ``vmap``, made of what autograd knows, and no derivative of its own."""

    @staticmethod
    def forward(norm: Any, *args: Any) -> Tensor:
        """What has no users is the plain norm."""
        return norm(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        """One norm of all users' channels, by way of the next ``vmap`` where there is one; settings are one user's."""
        (norm, x, *rest), users = args, info.batch_size
        x = x.movedim(in_dims[1], 1) if in_dims[1] is not None else x.unsqueeze(1).expand(-1, users, *x.shape[1:])
        rest = [_join(v, at, users) if isinstance(v, Tensor) else v for v, at in zip(rest, in_dims[2:], strict=True)]
        if norm is F.group_norm:
            rest[0] *= users
        side_by_side = [x.flatten(1, 2), *rest]
        deeper = any(isinstance(value, Tensor) and is_batchedtensor(value) for value in side_by_side)
        run = partial(_SideBySide.apply, norm) if deeper else norm
        return run(*side_by_side).unflatten(1, (users, -1)), 1


def _join(values: Tensor, users_at: int | None, users: int) -> Tensor:
    """``(users * channels,)``."""
    return (values.expand(users, -1) if users_at is None else values.movedim(users_at, 0)).flatten()


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = _Products.apply(x.reshape(len(weight), -1, x.shape[-1]), weight)
    return (y if bias is None else y + bias.unsqueeze(1)).view(*x.shape[:-1], -1)


_FOLDED: Mapping[Any, Callable[..., Tensor]] = {F.linear: _linear}


FOLDING = (nn.Sequential, nn.Flatten, nn.Identity, nn.Linear, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU)
"""Modules that do the same to each sample whatever others are in its batch, but for what :data:`_FOLDED` stands for."""


def folds(net: nn.Module) -> bool:
    """Whether all users' samples can go through a net as one batch, within :class:`Folded`."""
    return all(type(m) in FOLDING and getattr(m, "start_dim", 1) == 1 for m in net.modules())


class Folded(TorchFunctionMode):
    """While this is entered, layers take ``(users * batch, ...)``, user after user, and parameters ``(users, ...)``."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """``func``, or what stands for it."""
        return _FOLDED.get(func, func)(*args, **(kwargs or {}))


@runtime_checkable
class Form(Protocol):
    """A net for all users at once, in another form than ``vmap``'s."""

    def takes(self, inputs: Tensor) -> bool:
        """Whether it is made for such inputs, and faster."""
        ...

    def __call__(self, tensors: Tree, inputs: Tensor, *, train: bool) -> Tensor:
        """Outputs ``(users, batch, ...)`` by tensors ``(users, ...)``; running statistics change in place."""
        ...


LARGE = 1024
"""Entries of a weight from which on its gradient is best made in the weight's own order; measured on CPUs."""


class _Products(torch.autograd.Function):
    """``x_u W_u^T`` for each user u.

    Autograd's own gradient of a weight is transposed, and a step with it takes longer than the product.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.bmm(x, weight.mT)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        want_x, want_weight = ctx.needs_input_grad
        d_x = torch.bmm(dy, weight) if want_x else None
        if not want_weight:
            return d_x, None
        large = weight.shape[1] * weight.shape[2] >= LARGE
        return d_x, torch.bmm(dy.mT, x) if large else torch.bmm(x.mT, dy).mT


FEW = 16
"""Channels that fill a vector register of float32: oneDNN's convolutions are slow below, in the usual layout."""


def channels_last(tensors: Tree) -> Tree:
    """The same, with channels innermost in the weights ``(users, ..., out, in, height, width)`` of few channels.

    What such a convolution yields is laid out so too, and so is all that follows it. Measured on CPUs: a ResNet with 8
    channels gains, VGG with 16 and more loses.
    """
    few = {name for name, t in tensors.items() if t.dim() > 4 and t.shape[-4] < FEW and t.device.type == "cpu"}
    return {name: _channels_last(t) if name in few else t for name, t in tensors.items()}


def _channels_last(weight: Tensor) -> Tensor:
    return weight.flatten(0, -4).contiguous(memory_format=torch.channels_last).view(weight.shape)
