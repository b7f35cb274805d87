"""Convolutions of the stacked nets of many users, in C++ for CPUs.

The formulas and reasons are in ``layers.cpp`` and its headers. Feature maps are stored as ``(users, height, width,
channels, lanes)``: each image is a lane, and padding lanes fill up SIMD vectors.

Users are processed one after another, so a convolution's output is still cached when its norm, ReLU and pooling read
it. Images are the innermost axis, so the speed does not depend on the shape of the layer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from comingle.models.kernels.expert_mlp import load_library
from comingle.utils.trees import Context

SOURCES = sorted(Path(__file__).parent.glob("layers*"), key=lambda path: path.suffix)  # the .cpp first
DTYPES = {torch.float32: "float", torch.float64: "double"}
LANES = {torch.float32: 16, torch.float64: 8}
"""Lanes are padded to a multiple of this number."""
LARGEST_POOL = 15
"""The largest pooling window: the index of its maximum is stored in a byte."""
NO_NORM, BATCH_NORM, GROUP_NORM = range(3)

_library: ctypes.CDLL | None = None
_accepts_fakes = False


class StepStruct(ctypes.Structure):
    """``struct Step`` of layers.h."""

    _fields_ = (
        *[(n, ctypes.c_int64) for n in ("users", "images", "lanes", "threads")],
        *[(n, ctypes.c_int64) for n in ("height", "width", "channels", "out_height", "out_width", "outputs")],
        *[(n, ctypes.c_int64 * 2) for n in ("kernel", "stride", "padding", "dilation")],
        *[(n, ctypes.c_int64) for n in ("norm", "groups", "uses_running_statistics", "relu", "pool")],
        *[(f"{n}_stride", ctypes.c_int64) for n in ("weight", "bias", "gamma", "beta")],
        ("eps", ctypes.c_double),
        *[
            (n, ctypes.c_void_p)
            for n in ("x", "weight", "bias", "gamma", "beta", "added", "y", "mean", "rstd", "z", "taken")
        ],
        *[(n, ctypes.c_void_p) for n in ("dz", "passed", "dx", "d_weight", "d_bias", "d_gamma", "d_beta", "d_added")],
    )


def enable(cache: Path) -> bool:
    """Use native code for convolutions from now on; return whether it could be loaded.

    Args:
        cache: Folder of compiled libraries; the code is compiled if it is not there.
    """
    global _library
    _library = _library or load_library(cache, "layers", SOURCES)
    return _library is not None


def fits(tensor: Tensor) -> bool:
    """Return whether native code supports the tensor's device and number format."""
    return tensor.device.type == "cpu" and tensor.dtype in DTYPES


def supports(x: Tensor) -> bool:
    """Return whether the native code for convolutions can be used for the samples ``x``.

    It must be loaded, and ``x`` be a tensor on the CPU in a supported number format.
    """
    # Fake tensors, which have no data, are only accepted while memory is estimated.
    is_accepted_type = _accepts_fakes or type(x) is Tensor
    return _library is not None and is_accepted_type and fits(x)


@contextmanager
def accepting_fakes() -> Iterator[None]:
    """Make :func:`run` accept fake tensors, which have no data, in the context, to estimate the memory of a pass."""
    global _accepts_fakes
    previous = _accepts_fakes
    _accepts_fakes = True
    try:
        yield
    finally:
        _accepts_fakes = previous


def run(name: str, step: StepStruct, dtype: torch.dtype, **tensors: Tensor | None) -> None:
    """Run the forward or backward pass of a step with native code.

    Within :func:`accepting_fakes` only allocate the scratch memory that the pass needs, for an estimate of memory.

    Args:
        name: "forward" or "backward".
        step: Sizes and strides of the tensors.
        dtype: Number format of the tensors.
        **tensors: Tensors by their field in ``step``.
    """
    assert _library is not None
    if _accepts_fakes:
        # Native code needs more scratch memory if it computes the gradient of the weight, that is, if the field has an
        # address other than 0.
        needs_d_weight = tensors.get("d_weight") is not None
        step.d_weight = 1 if needs_d_weight else 0
        first_tensor = next(t for t in tensors.values() if t is not None)
        _allocate_scratch(step, first_tensor)
        return
    for field_name, tensor in tensors.items():
        address = None if tensor is None else tensor.data_ptr()
        setattr(step, field_name, address)
    native_pass = getattr(_library, f"{name}_{DTYPES[dtype]}")  # such as forward_float
    native_pass(ctypes.byref(step))


def _allocate_scratch(step: StepStruct, fake_tensor: Tensor) -> None:
    """Allocate and free a fake tensor of the size of native code's scratch memory, for an estimate of memory.

    Args:
        step: Sizes of the step.
        fake_tensor: A fake tensor with the step's device and dtype.
    """
    assert _library is not None
    count_entries = getattr(_library, f"room_{DTYPES[fake_tensor.dtype]}")
    count_entries.restype = ctypes.c_int64
    entries_per_thread = count_entries(ctypes.byref(step))
    num_threads = min(step.threads, step.users)  # a thread processes whole users
    fake_tensor.new_empty(num_threads, entries_per_thread)


Flat = Float[Tensor, "users_images channels height width"]
"""Samples ordered by user."""
Maps = Float[Tensor, "users lanes channels height width"]
"""The same samples with lanes innermost in memory; padding lanes have no gradient."""
Outputs = Float[Tensor, "users lanes outputs pooled_height pooled_width"]
"""Outputs of a step, after its pooling."""
Norm = nn.BatchNorm2d | nn.GroupNorm


@dataclass
class PassShape:
    """Numbers of users and of images per user in a forward pass."""

    users: int = 0
    images: int = 0

    def to_maps(self, x: Tensor) -> Tensor:
        """Convert samples to maps, the layout of the C++ kernels; return maps unchanged.

        Samples are ``(users * images, channels, height, width)``, maps ``(users, lanes, channels, height, width)``.
        A lane is an image of a user. Lanes are innermost in memory, padded to a multiple of 16 (float32) or 8.
        """
        are_maps = x.dim() == 5
        if are_maps:
            return x
        samples = x.unflatten(0, (self.users, self.images))
        in_memory_order = samples.permute(0, 3, 4, 2, 1)  # (users, height, width, channels, images)
        num_padding_lanes = -self.images % LANES[x.dtype]  # up to the next multiple
        padded = F.pad(in_memory_order, (0, num_padding_lanes))
        return padded.contiguous().permute(0, 4, 3, 1, 2)

    def flat(self, x: Tensor) -> Tensor:
        """Convert maps to samples ``(users * images, channels, height, width)``; return samples unchanged.

        It is the inverse of :meth:`to_maps`, which pads the axis of images.
        """
        are_maps = x.dim() == 5
        if not are_maps:
            return x
        without_padding = x[:, : self.images]
        return without_padding.flatten(0, 1)


def _to_memory_order(maps: Tensor | None) -> Any:
    """Permute maps to their order in memory, ``(users, height, width, channels, lanes)``."""
    return None if maps is None else maps.permute(0, 3, 4, 2, 1).contiguous()


def _from_memory_order(maps: Tensor | None) -> Any:
    """Permute maps from their order in memory; the inverse of :func:`_to_memory_order`."""
    return None if maps is None else maps.permute(0, 4, 3, 1, 2)


@dataclass(frozen=True, kw_only=True, eq=False)
class ConvolutionStep:
    """A fused ``pool(relu(norm(convolution(x)) + added))``, in which all but the convolution is optional.

    Args:
        convolution: The convolution; its parameters have a leading user axis.
        norm: Its norm; None for none.
        relu: Apply a ReLU.
        pool: Size of the max-pooling window; 1 for no pooling.
        pass_shape: Numbers of users and images of the current pass.
    """

    convolution: nn.Conv2d
    norm: Norm | None = None
    relu: bool = False
    pool: int = 1
    pass_shape: PassShape = field(default_factory=PassShape)

    def __call__(self, x: Tensor, added: Outputs | None = None) -> Outputs:
        """Return ``pool(relu(norm(convolution(x)) + added))``; running statistics are updated in place.

        Args:
            x: Samples ``(users * images, channels, height, width)``, or the output of another step.
            added: Tensor to add before the ReLU; None for none.
        """
        outputs: Outputs = self._apply(self.pass_shape.to_maps(x), added, returns_input=False)
        return outputs

    def run_shared(self, x: Maps) -> tuple[Outputs, Maps]:
        """Return the step's outputs, and ``x`` for another layer that reads it, such as a shortcut.

        The other layer must read the returned ``x``. Then the step's backward pass gets that layer's gradient of ``x``
        and adds its own in place, without an extra pass over memory.
        """
        outputs_and_input: tuple[Outputs, Maps] = self._apply(x, added=None, returns_input=True)
        return outputs_and_input

    def _apply(self, x: Maps, added: Outputs | None, *, returns_input: bool) -> Any:
        """Run the step with native code, and update running statistics in training.

        Args:
            x: Input of the convolution.
            added: Tensor to add before the ReLU; None for none.
            returns_input: Return ``x`` too, see :meth:`run_shared`.

        Returns:
            The outputs, or outputs and ``x``.
        """
        conv, norm = self.convolution, self.norm
        users = len(x)
        # Native code does not check sizes.
        assert x.shape[2] == conv.in_channels
        assert x.dtype == conv.weight.dtype
        assert conv.weight.shape == (users, conv.out_channels, conv.in_channels, *conv.kernel_size)
        gamma = None if norm is None else norm.weight
        beta = None if norm is None else norm.bias
        mean, rstd = self._statistics(x)
        results = _Fused.apply(self, x, conv.weight, conv.bias, gamma, beta, mean, rstd, added, returns_input)
        if isinstance(norm, nn.BatchNorm2d) and norm.training:
            self._update_statistics(norm, x, mean, rstd)
        return results

    @property
    def uses_running_statistics(self) -> bool:
        """True if the norm uses running statistics (a batch norm in eval mode)."""
        return isinstance(self.norm, nn.BatchNorm2d) and not self.norm.training

    def _statistics(self, x: Maps) -> tuple[Any, Any]:
        """Return mean and 1 / standard deviation for the norm, ``(users, channels, lanes)``; None without a norm.

        A lane is one image of a user, or padding. A batch norm in eval mode uses its running statistics, equal for all
        lanes. Otherwise the tensors are uninitialised, and native code writes the statistics of the batch (batch norm)
        or of groups of channels (group norm) to them.

        Args:
            x: Input of the convolution, ``(users, lanes, channels, height, width)``.
        """
        norm = self.norm
        if norm is None:
            return None, None
        users, lanes = x.shape[:2]
        shape = (users, self.convolution.out_channels, lanes)
        if not self.uses_running_statistics:
            return x.new_empty(shape), x.new_empty(shape)
        mean: Any = norm.running_mean
        rstd: Any = (norm.running_var + norm.eps).rsqrt()  # type: ignore[operator]
        mean_by_lane = mean.detach().unsqueeze(2).expand(shape).contiguous()
        rstd_by_lane = rstd.detach().unsqueeze(2).expand(shape).contiguous()
        return mean_by_lane, rstd_by_lane

    @torch.no_grad()
    def _update_statistics(self, norm: nn.BatchNorm2d, x: Maps, mean: Tensor, rstd: Tensor) -> None:
        """Update a batch norm's running mean and variance by the statistics of a batch, as PyTorch does.

        Args:
            norm: The batch norm.
            x: Input of the convolution, for the size of its output.
            mean: Mean of the batch ``(users, channels, lanes)``, equal in all lanes.
            rstd: 1 / standard deviation of the batch ``(users, channels, lanes)``, equal in all lanes.
        """
        out_height, out_width = self.output_size(x)
        count = self.pass_shape.images * out_height * out_width  # entries over which each mean is taken
        batch_mean = mean[:, :, 0]
        batch_variance = (rstd[:, :, 0] ** -2 - norm.eps).clamp_(min=0)  # rounding may make it negative
        unbiased_variance = batch_variance * (count / max(1, count - 1))
        norm.running_mean.lerp_(batch_mean, norm.momentum)  # type: ignore[union-attr,arg-type]
        norm.running_var.lerp_(unbiased_variance, norm.momentum)  # type: ignore[union-attr,arg-type]
        norm.num_batches_tracked.add_(1)  # type: ignore[union-attr]

    def output_size(self, x: Maps) -> tuple[int, int]:
        """Return height and width of the convolution's output, before pooling."""
        conv: Any = self.convolution
        height_and_width = x.shape[3:]

        def output_length(axis: int) -> int:
            """Return the size of an axis by the formula in the documentation of ``nn.Conv2d``."""
            size, kernel = height_and_width[axis], conv.kernel_size[axis]
            padding, dilation, stride = conv.padding[axis], conv.dilation[axis], conv.stride[axis]
            return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1

        return output_length(axis=0), output_length(axis=1)

    def to_struct(
        self, x: Maps, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None
    ) -> StepStruct:
        """Return the C struct of this step with sizes, settings and strides; :func:`run` adds the tensors' addresses.

        A parameter's stride is the number of entries from one user to the next.

        Args:
            x: Input of the convolution, ``(users, lanes, channels, height, width)``.
            weight: The convolution's weight, with a leading user axis like all parameters.
            bias: The convolution's bias.
            gamma: Gamma of the norm.
            beta: Beta of the norm.
        """
        conv, norm = self.convolution, self.norm
        users, lanes, channels, height, width = x.shape
        out_height, out_width = self.output_size(x)
        norm_kind = {nn.BatchNorm2d: BATCH_NORM, nn.GroupNorm: GROUP_NORM}.get(type(norm), NO_NORM)
        step = StepStruct(
            users=users, images=self.pass_shape.images, lanes=lanes, threads=torch.get_num_threads(),
            height=height, width=width, channels=channels,
            out_height=out_height, out_width=out_width, outputs=conv.out_channels,
            norm=norm_kind, groups=norm.num_groups if isinstance(norm, nn.GroupNorm) else 1,
            uses_running_statistics=self.uses_running_statistics, relu=self.relu, pool=self.pool,
            eps=0.0 if norm is None else norm.eps, weight_stride=weight.stride(0),
        )  # fmt: skip
        for axis in range(2):
            step.kernel[axis] = conv.kernel_size[axis]
            step.stride[axis] = conv.stride[axis]
            step.padding[axis] = conv.padding[axis]  # type: ignore[call-overload]
            step.dilation[axis] = conv.dilation[axis]
        for name, parameter in (("bias", bias), ("gamma", gamma), ("beta", beta)):
            user_stride = 0 if parameter is None else parameter.stride(0)
            setattr(step, f"{name}_stride", user_stride)
        return step


def _contiguous_rows(tensor: Tensor | None) -> Tensor | None:
    """Return a parameter ``(users, ...)`` with each user's values contiguous, as native code requires; None for None.

    It is copied only if necessary; the users themselves may be any distance apart in memory.
    """
    if tensor is None or tensor[0].is_contiguous():
        return tensor
    return tensor.contiguous()


class _Fused(torch.autograd.Function):
    """Autograd function of a fused convolution, norm, ReLU and max-pooling, computed in C++ for all users."""

    @staticmethod
    def forward(
        ctx: Context, step: ConvolutionStep, x: Maps, weight: Tensor, bias: Tensor | None, gamma: Tensor | None,
        beta: Tensor | None, mean: Tensor | None, rstd: Tensor | None, added: Outputs | None, returns_input: bool,
    ) -> Outputs | tuple[Outputs, Maps]:  # fmt: skip
        """Return the outputs of a fused convolution, norm, ReLU and max-pooling, and ``x`` too if ``returns_input``.

        Args:
            ctx: Autograd context.
            step: The convolution, and the norm, ReLU and pooling after it.
            x: Input of the convolution, ``(users, lanes, channels, height, width)``; a lane is an image of a user.
            weight: Weights of the convolution, with a user axis like all parameters.
            bias: Biases of the convolution.
            gamma: Gamma of the norm.
            beta: Beta of the norm.
            mean: The norm's mean; overwritten unless running statistics are used.
            rstd: 1 / standard deviation of the norm's input; overwritten unless running statistics are used.
            added: Tensor to add before the ReLU.
            returns_input: Return ``x`` too, for other layers that read it.
        """
        weight, bias, gamma, beta = (_contiguous_rows(t) for t in (weight, bias, gamma, beta))  # type: ignore[assignment]
        native_step = step.to_struct(x, weight, bias, gamma, beta)
        x_memory = _to_memory_order(x)
        users, lanes = x.shape[:2]
        out_height, out_width = step.output_size(x)
        outputs, pool = step.convolution.out_channels, step.pool
        # In memory order: z is the step's output, y the convolution's output if a norm reads it, and `taken` the index
        # of the maximum in each pooling window.
        z = x.new_empty(users, out_height // pool, out_width // pool, outputs, lanes)
        y = None if step.norm is None else x.new_empty(users, out_height, out_width, outputs, lanes)
        taken = torch.empty_like(z, dtype=torch.uint8) if pool > 1 else None
        run(
            "forward", native_step, x.dtype, x=x_memory, z=z, y=y, taken=taken, mean=mean, rstd=rstd,
            added=_to_memory_order(added), weight=weight, bias=bias, gamma=gamma, beta=beta,
        )  # fmt: skip
        # The backward pass needs to know where the ReLU's output is 0. With pooling `taken` marks these entries;
        # otherwise they follow from y if nothing was added, or else from z.
        y_suffices = y is not None and added is None
        needs_z = step.relu and taken is None and not y_suffices
        saved_z = z if needs_z else None
        ctx.save_for_backward(x_memory, weight, bias, gamma, beta, mean, rstd, y, taken, saved_z)
        ctx.step, ctx.native_step, ctx.adds = step, native_step, added is not None
        if returns_input:
            return _from_memory_order(z), x
        return _from_memory_order(z)

    @staticmethod
    def backward(ctx: Context, dz: Outputs, passed: Maps | None = None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of the arguments of :meth:`forward`; None for those that autograd does not need.

        Args:
            ctx: Autograd context.
            dz: Gradient of the step's outputs.
            passed: Gradient of ``x`` from its other uses, if :meth:`forward` has returned ``x``; added to the result.
        """
        # `taken`: index of the maximum in each pooling window.
        x, weight, bias, gamma, beta, mean, rstd, y, taken, z = ctx.saved_tensors
        inputs = (x, weight, bias, gamma, beta)
        needs_gradient = ctx.needs_input_grad[1:6]  # of these inputs
        d_x, d_weight, d_bias, d_gamma, d_beta = (
            t.new_empty(t.shape) if is_needed else None for t, is_needed in zip(inputs, needs_gradient, strict=True)
        )
        dz_memory = _to_memory_order(dz)
        # The gradient of `added` is dz if no ReLU follows the addition. Else native code writes it: dz, but 0 where the
        # ReLU's output is 0. Of the field `added` it only checks that it is set, so any tensor will do.
        writes_d_added = ctx.adds and ctx.step.relu
        d_added = torch.empty_like(dz_memory) if writes_d_added else dz_memory
        run(
            "backward", ctx.native_step, x.dtype, x=x, weight=weight, gamma=gamma, beta=beta, mean=mean, rstd=rstd, y=y,
            taken=taken, z=z, dz=dz_memory, added=dz_memory if writes_d_added else None,
            d_added=d_added if writes_d_added else None, passed=_to_memory_order(passed), dx=d_x,
            d_weight=d_weight, d_bias=d_bias, d_gamma=d_gamma, d_beta=d_beta,
        )  # fmt: skip
        gradient_of_added = _from_memory_order(d_added) if ctx.adds else None
        return (
            None,  # step
            _from_memory_order(d_x),
            d_weight,
            d_bias,
            d_gamma,
            d_beta,
            None,  # mean
            None,  # rstd
            gradient_of_added,
            None,  # returns_input
        )
