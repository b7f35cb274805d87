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
    """Load the native code from ``cache`` (compile it if necessary); return whether this succeeded."""
    global _library
    _library = _library or load_library(cache, "layers", SOURCES)
    return _library is not None


def fits(tensor: Tensor) -> bool:
    """Return whether native code supports the tensor's device and number format."""
    return tensor.device.type == "cpu" and tensor.dtype in DTYPES


def supports(x: Tensor) -> bool:
    """Return whether the native code is loaded and supports the samples ``x``."""
    plain = _accepts_fakes or type(x) is Tensor  # a fake tensor has no memory
    return _library is not None and plain and fits(x)


@contextmanager
def accepting_fakes() -> Iterator[None]:
    """Make :func:`run` accept fake tensors in the context, to estimate the memory of a pass.

    Fake tensors have a shape but no data, so :func:`run` allocates as much memory as native code but computes nothing.
    """
    global _accepts_fakes
    before, _accepts_fakes = _accepts_fakes, True
    try:
        yield
    finally:
        _accepts_fakes = before


def run(name: str, step: StepStruct, dtype: torch.dtype, **tensors: Tensor | None) -> None:
    """Run the forward or backward pass of a step with native code.

    Args:
        name: "forward" or "backward".
        step: Sizes and strides of the tensors.
        dtype: Number format of the tensors.
        **tensors: Tensors by their field in ``step``.
    """
    assert _library is not None
    if _accepts_fakes:  # tensors without data, to estimate memory: compute nothing
        # The scratch memory depends on whether the weight's gradient is wanted, that is whether its address is not 0.
        step.d_weight = int(tensors.get("d_weight") is not None)
        _allocate_scratch(step, next(t for t in tensors.values() if t is not None))
        return
    for key, tensor in tensors.items():
        setattr(step, key, None if tensor is None else tensor.data_ptr())
    getattr(_library, f"{name}_{DTYPES[dtype]}")(ctypes.byref(step))


def _allocate_scratch(step: StepStruct, like: Tensor) -> None:
    """Allocate as much scratch memory as native code would, and free it, so that a memory estimate counts it.

    The functions ``room_float`` and ``room_double`` of layers.cpp return the scratch memory of one thread.

    Args:
        step: Sizes of the step.
        like: A fake tensor with the step's device and dtype.
    """
    assert _library is not None
    scratch_size = getattr(_library, f"room_{DTYPES[like.dtype]}")
    scratch_size.restype = ctypes.c_int64
    threads = min(step.threads, step.users)  # a thread processes whole users
    like.new_empty(threads, scratch_size(ctypes.byref(step)))


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

    def lanes(self, x: Tensor) -> Tensor:
        """Convert samples to the layout of the C++ kernels, ``(users, lanes, channels, height, width)``.

        Samples are ``(users * images, channels, height, width)``. Each image of a user becomes a lane. Lanes are
        innermost in memory, padded to fill SIMD vectors. A tensor that has this layout already is returned unchanged.
        """
        if x.dim() == 5:  # converted by an earlier step
            return x
        # (users, height, width, channels, images)
        in_memory_order = x.unflatten(0, (self.users, self.images)).permute(0, 3, 4, 2, 1)
        num_padding_lanes = -self.images % LANES[x.dtype]  # up to the next multiple
        padded = F.pad(in_memory_order, (0, num_padding_lanes))
        return padded.contiguous().permute(0, 4, 3, 1, 2)

    def flat(self, x: Tensor) -> Tensor:
        """Convert :data:`Maps` to samples ordered by user, without padding lanes."""
        return x[:, : self.images].flatten(0, 1) if x.dim() == 5 else x


def _to_memory_order(maps: Tensor | None) -> Any:
    """Permute maps to their order in memory, ``(users, height, width, channels, lanes)``."""
    return None if maps is None else maps.permute(0, 3, 4, 2, 1).contiguous()


def _from_memory_order(maps: Tensor | None) -> Any:
    """Permute maps from their order in memory; the inverse of :func:`_to_memory_order`."""
    return None if maps is None else maps.permute(0, 4, 3, 1, 2)


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
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
        outputs: Outputs = self._apply(self.pass_shape.lanes(x), added, returns_input=False)
        return outputs

    def run_shared(self, x: Maps) -> tuple[Outputs, Maps]:
        """Run the step and return ``x`` too for other layers; the kernel adds their gradient to its own."""
        outputs_and_input: tuple[Outputs, Maps] = self._apply(x, None, returns_input=True)
        return outputs_and_input

    def _apply(self, x: Maps, added: Outputs | None, *, returns_input: bool) -> Any:
        """Run the step with native code, and update running statistics in training.

        Args:
            x: Input of the convolution.
            added: Tensor to add before the ReLU; None for none.
            returns_input: Return ``x`` too, so that the step's backward pass adds the gradient of its other uses.

        Returns:
            The outputs, or outputs and ``x``.
        """
        conv, norm = self.convolution, self.norm
        # Native code does not check sizes.
        assert (x.shape[2], x.dtype) == (conv.in_channels, conv.weight.dtype)
        assert conv.weight.shape == (len(x), conv.out_channels, conv.in_channels, *conv.kernel_size)
        gamma, beta = (None, None) if norm is None else (norm.weight, norm.bias)
        mean, rstd = self._statistics(x)
        results = _Fused.apply(self, x, conv.weight, conv.bias, gamma, beta, mean, rstd, added, returns_input)
        if isinstance(norm, nn.BatchNorm2d) and norm.training:
            self._update_statistics(norm, x, mean, rstd)
        return results

    @property
    def uses_running_statistics(self) -> bool:
        """Whether the norm uses running statistics (a batch norm in eval mode)."""
        return isinstance(self.norm, nn.BatchNorm2d) and not self.norm.training

    def _statistics(self, x: Maps) -> tuple[Any, Any]:
        """Return mean and 1 / standard deviation for the norm, ``(users, channels, lanes)``; None without a norm.

        A batch norm in eval mode has them already: its running statistics, repeated for every lane (image). For other
        norms the tensors are uninitialised, and native code writes the statistics of the batch or group to them.

        Args:
            x: Input of the convolution, ``(users, lanes, channels, height, width)``.
        """
        norm, shape = self.norm, (len(x), self.convolution.out_channels, x.shape[1])
        if norm is None:
            return None, None
        if not self.uses_running_statistics:
            return x.new_empty(shape), x.new_empty(shape)
        mean, rstd = norm.running_mean, (norm.running_var + norm.eps).rsqrt()  # type: ignore[union-attr,operator]
        return tuple(t.detach().unsqueeze(2).expand(shape).contiguous() for t in (mean, rstd))  # type: ignore[union-attr]

    @torch.no_grad()
    def _update_statistics(self, norm: nn.BatchNorm2d, x: Maps, mean: Tensor, rstd: Tensor) -> None:
        """Update a batch norm's running mean and variance by the statistics of a batch, as PyTorch does.

        Args:
            norm: The batch norm.
            x: Input of the convolution, for the size of its output.
            mean: The batch's mean ``(users, channels, lanes)``, equal in all lanes (images).
            rstd: 1 / standard deviation of the batch ``(users, channels, lanes)``, equal in all lanes.
        """
        out_height, out_width = self.output_size(x)
        count = self.pass_shape.images * out_height * out_width  # numbers that each mean is over
        variance = (rstd[:, :, 0] ** -2 - norm.eps).clamp_(min=0)  # rounding may make it negative
        unbiased = variance * (count / max(1, count - 1))
        norm.running_mean.lerp_(mean[:, :, 0], norm.momentum)  # type: ignore[union-attr,arg-type]
        norm.running_var.lerp_(unbiased, norm.momentum)  # type: ignore[union-attr,arg-type]
        norm.num_batches_tracked.add_(1)  # type: ignore[union-attr]

    def output_size(self, x: Maps) -> tuple[int, int]:
        """Return height and width of the convolution's output, before pooling."""
        c = self.convolution
        # (size, padding, dilation, kernel, stride) of both axes, as in the documentation of `nn.Conv2d`
        axes: Any = zip(x.shape[3:], c.padding, c.dilation, c.kernel_size, c.stride, strict=True)
        out_height, out_width = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, p, d, k, s in axes)
        return out_height, out_width

    def describe(self, x: Maps, weight: Tensor, *others: Tensor | None) -> StepStruct:
        """Return the C struct that describes this step to native code: sizes, settings and strides.

        The addresses of the tensors are still missing; :func:`run` sets them. A user's images are the lanes of its
        tensors; ``lanes`` also counts the padding lanes after the ``images``. ``out_height`` and ``out_width`` are the
        size of the convolution's output, before pooling. A parameter's stride is the number of entries from one user to
        the next.

        Args:
            x: Input of the convolution, ``(users, lanes, channels, height, width)``.
            weight: The convolution's weight, with a leading user axis.
            *others: The convolution's bias, and gamma and beta of the norm; None for those that are missing.
        """
        c, norm, (users, lanes, channels, height, width) = self.convolution, self.norm, x.shape
        norm_kind = {nn.BatchNorm2d: BATCH_NORM, nn.GroupNorm: GROUP_NORM}.get(type(norm), NO_NORM)
        out_height, out_width = self.output_size(x)
        step = StepStruct(
            users=users, images=self.pass_shape.images, lanes=lanes, threads=torch.get_num_threads(),
            height=height, width=width, channels=channels,
            out_height=out_height, out_width=out_width, outputs=c.out_channels,
            norm=norm_kind, groups=norm.num_groups if isinstance(norm, nn.GroupNorm) else 1,
            uses_running_statistics=self.uses_running_statistics, relu=self.relu, pool=self.pool,
            eps=0.0 if norm is None else norm.eps, weight_stride=weight.stride(0),
        )  # fmt: skip
        for axis in range(2):
            step.kernel[axis], step.stride[axis] = c.kernel_size[axis], c.stride[axis]
            step.padding[axis], step.dilation[axis] = c.padding[axis], c.dilation[axis]  # type: ignore[call-overload]
        for name, tensor in zip(("bias", "gamma", "beta"), others, strict=True):
            setattr(step, f"{name}_stride", 0 if tensor is None else tensor.stride(0))
        return step


def _contiguous_rows(tensor: Tensor | None) -> Tensor | None:
    """Return a parameter whose rows (users) are contiguous, copied if necessary."""
    return tensor if tensor is None or tensor[0].is_contiguous() else tensor.contiguous()


class _Fused(torch.autograd.Function):
    """Autograd function of a fused convolution, norm, ReLU and max-pooling, computed in C++ for all users."""

    @staticmethod
    def forward(
        ctx: Context, step: Step, x: Maps, weight: Tensor, bias: Tensor | None, gamma: Tensor | None,
        beta: Tensor | None, mean: Tensor | None, rstd: Tensor | None, added: Outputs | None, returns_input: bool,
    ) -> Outputs | tuple[Outputs, Maps]:  # fmt: skip
        """Return the outputs of a fused convolution, norm, ReLU and max-pooling, and ``x`` too if wanted.

        Args:
            ctx: Autograd context.
            step: Settings of the convolution and of what follows it.
            x: Input of the convolution.
            weight: Weights of the convolution, with a user axis like all parameters.
            bias: Biases of the convolution.
            gamma: Gamma of the norm.
            beta: Beta of the norm.
            mean: The norm's mean; overwritten unless running statistics are used.
            rstd: 1 / standard deviation of the norm's input; overwritten unless running statistics are used.
            added: Tensor to add before the ReLU.
            returns_input: Return ``x`` too, for other layers that read it.
        """
        parameters = [_contiguous_rows(t) for t in (weight, bias, gamma, beta)]
        native_step, x_memory = step.describe(x, *parameters), _to_memory_order(x)  # type: ignore[arg-type]
        users, lanes, (out_height, out_width), pool = len(x), x.shape[1], step.output_size(x), step.pool
        outputs = step.convolution.out_channels
        # Outputs in memory order: z of the step, y of the convolution (the norm's input), and for each pooled number
        # its place in the pooling window.
        z = x.new_empty(users, out_height // pool, out_width // pool, outputs, lanes)
        y = None if step.norm is None else x.new_empty(users, out_height, out_width, outputs, lanes)
        taken = torch.empty_like(z, dtype=torch.uint8) if pool > 1 else None
        by_name = dict(zip(("weight", "bias", "gamma", "beta"), parameters, strict=True))
        run(
            "forward", native_step, x.dtype, x=x_memory, z=z, y=y, taken=taken, mean=mean, rstd=rstd,
            added=_to_memory_order(added), **by_name,
        )  # fmt: skip
        # ReLU's backward pass needs the output, unless `taken` marks its zeros or the norm's input `y` shows them.
        saved_z = z if step.relu and taken is None and (y is None or added is not None) else None
        ctx.save_for_backward(x_memory, *parameters, mean, rstd, y, taken, saved_z)
        ctx.step, ctx.native_step, ctx.adds = step, native_step, added is not None
        return (_from_memory_order(z), x) if returns_input else _from_memory_order(z)

    @staticmethod
    def backward(ctx: Context, dz: Outputs, passed: Maps | None = None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients that autograd needs, in the order of the arguments of :meth:`forward`.

        :meth:`forward` has saved its inputs, the convolution's output ``y`` (the norm's input), ``taken``, the place of
        each pooled number in its window, and the step's output ``z`` if its zeros are needed for the ReLU.

        Args:
            ctx: Autograd context.
            dz: Gradient of the step's outputs.
            passed: Gradient of ``x`` from its other uses, if :meth:`forward` has returned ``x``; added to the result.
        """
        x, weight, bias, gamma, beta, mean, rstd, y, taken, z = ctx.saved_tensors
        wanted = zip(ctx.needs_input_grad[1:6], (x, weight, bias, gamma, beta), strict=True)
        gradients = [t.new_empty(t.shape) if wants else None for wants, t in wanted]
        names = ("dx", "d_weight", "d_bias", "d_gamma", "d_beta")
        dz_memory = _to_memory_order(dz)
        # With a ReLU native code computes the gradient of the forward pass's ``added`` by masking ``dz`` where z is 0;
        # for that the field ``added`` only has to be set, here to z. Without a ReLU the gradient is ``dz`` itself.
        masks = ctx.adds and ctx.step.relu
        d_added = torch.empty_like(dz_memory) if masks else dz_memory
        run(
            "backward", ctx.native_step, x.dtype, x=x, weight=weight, gamma=gamma, beta=beta, mean=mean, rstd=rstd, y=y,
            taken=taken, z=z, dz=dz_memory, added=z if masks else None, d_added=d_added if masks else None,
            passed=_to_memory_order(passed), **dict(zip(names, gradients, strict=True)),
        )  # fmt: skip
        d_x, *d_parameters = gradients
        d_sum = _from_memory_order(d_added) if ctx.adds else None
        # None for the step, for the norm's mean and rstd, and for `returns_input`.
        return None, _from_memory_order(d_x), *d_parameters, None, None, d_sum, None
