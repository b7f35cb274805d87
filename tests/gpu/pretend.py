"""A device that computes on the CPU and refuses what a GPU refuses: tensors of two devices in one operation.

Where there is no GPU, most of what goes wrong on one still shows: a tensor that was left on the CPU. Within
:func:`pretending` the device "cuda" exists. Its tensors are :class:`Pretended`, each around one on the CPU; operations
on them run on the CPU and give such tensors again. A copy out of pinned memory on a stream of its own happens when
somebody waits for that stream, and not before. Graphs are replayed by plain calls. What it cannot show: other kernels'
rounding, formats that a GPU lacks, what cannot be captured, memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only

from comingle.models import gpu

GPU = torch.device("cuda", 0)
_aten = torch.ops.aten
_MOVES = {_aten.copy_.default, _aten._to_copy.default}
_INDEXED = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}


class Pretended(Tensor):
    """A tensor that says it is on a GPU; ``held`` has its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, real: Tensor) -> Pretended:
        made = Tensor._make_wrapper_subclass(
            cls,
            real.shape,
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            device=torch.device("cpu"),
        )
        made.held = real
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def record_stream(self, stream: Any) -> None:  # type: ignore[override]
        """Nothing is given away here."""

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Pretended({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it on the CPU, once it is seen that all of it is here."""
        kwargs = kwargs or {}
        if not _Devices.backward:  # where torch's own formulas make zeros on a wrapper's device, the CPU
            _refuse_mixed(func, args, kwargs)
        device = kwargs.get("device")
        inner = {k: torch.device("cpu") if k == "device" and v is not None else v for k, v in kwargs.items()}
        done = func(*_real(args), **_real(inner))
        if func in _MOVES and device is not None and torch.device(device).type == "cpu":
            return done
        return return_and_correct_aliasing(func, args, kwargs, _pretended(done))


def _refuse_mixed(func: Any, args: Any, kwargs: Any) -> None:
    if func in _MOVES:
        return
    given = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
    if func in _INDEXED:  # places may be named on the CPU, but of a tensor on the CPU nowhere else
        given = [t for t in (args[0], *args[2:3]) if isinstance(t, Tensor)] if isinstance(args[0], Pretended) else given
    strangers = [t for t in given if not isinstance(t, Pretended) and t.numel() > 1]
    alone = [t for t in given if not isinstance(t, Pretended) and t.numel() <= 1]
    written = [arg.alias_info is not None and arg.alias_info.is_write for arg in func._schema.arguments]
    spoilt = [t for t, writes in zip(args, written, strict=False) if writes and any(t is other for other in alone)]
    if strangers or spoilt:
        shape = tuple((strangers or spoilt)[0].shape)
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {func} got cuda:0 and cpu (of shape {shape})"
        )


def _real(tree: Any) -> Any:
    return tree_map_only(Pretended, lambda t: t.held, tree)


def _pretended(tree: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t if isinstance(t, Pretended) else Pretended(t), tree)


class Stream:
    """Copies that have been asked for and have not happened."""

    def __init__(self, *_: Any):
        self.pending: list[Callable[[], object]] = []

    def wait_stream(self, other: Stream) -> None:
        """What was asked of the other stream has happened from now on."""
        while other.pending:
            other.pending.pop(0)()


_main = _current = Stream()


@contextmanager
def _streaming(stream: Stream) -> Iterator[None]:
    global _current
    before, _current = _current, stream
    try:
        yield
    finally:
        _current = before


def _later(source: Tensor) -> Pretended:
    """A copy of what the source will be."""
    made = torch.full_like(source, -(2**20))
    _current.pending.append(lambda: made.copy_(source))
    return Pretended(made)


class _Move(torch.autograd.Function):
    """There or back, in a dtype; its gradient travels the other way."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, dtype: torch.dtype | None, there: bool) -> Tensor:
        ctx.dtype, ctx.back = t.dtype, isinstance(t, Pretended)
        real = t.held if isinstance(t, Pretended) else t
        moved = real.detach().to(dtype or real.dtype, copy=True)
        return Pretended(moved) if there else moved

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _Move.apply(grad, ctx.dtype, ctx.back), None, None


class _Devices(TorchFunctionMode):
    """The device "cuda" in all that is asked of torch by name."""

    backward = False
    """Whether gradients are being computed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        gradients = func in (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
        if gradients and any(isinstance(t, Pretended) for t in tree_flatten((args, kwargs))[0]):
            _Devices.backward = True
            try:
                return tree_map_only(Tensor, _there, func(*args, **kwargs))
            finally:
                _Devices.backward = False
        if func == Tensor.device.__get__ and isinstance(_innermost(args[0]), Pretended):
            return GPU
        if func == Tensor.is_cuda.__get__ and isinstance(_innermost(args[0]), Pretended):
            return True
        if getattr(func, "__module__", "").startswith("torch.distributed"):  # gloo, into the same memory
            return func(*_real(args), **_real(kwargs))
        making = (torch.quantile, torch.nn.functional.one_hot)  # their steps make tensors on the wrapper's device
        if func in making and isinstance(args[0], Pretended):
            return Pretended(func(*_real(args), **_real(kwargs)))
        if func is Tensor.pin_memory:
            pinned = args[0].clone()
            pinned.pinned_here = True
            return pinned
        if func in (Tensor.to, Tensor.cpu, Tensor.cuda):
            later = kwargs.pop("non_blocking", False) and _current is not _main and hasattr(args[0], "pinned_here")
            return _later(args[0]) if later else _to(func, args, kwargs)
        if func in (Tensor.tolist, Tensor.numpy) and isinstance(args[0], Pretended):
            if name == "numpy":
                raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
            return args[0].held.tolist()
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            made = func(*_real(args), **{**_real(kwargs), "device": "cpu"})
            if not isinstance(made, Tensor):  # what was asked for, taken apart
                return func(*args, **kwargs)
            wrapped = Pretended(made.detach())
            return wrapped.requires_grad_() if made.requires_grad else wrapped
        if kwargs.get("device") is not None and any(isinstance(a, Pretended) for a in args):
            return func(*_real(args), **_real(kwargs))
        return func(*args, **kwargs)


def _innermost(t: Tensor) -> Tensor:
    """What torch.vmap has wrapped."""
    while torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    return t


def _place(t: Tensor) -> torch.device:
    return GPU if isinstance(_innermost(t), Pretended) else t.device


def _there(t: Tensor) -> Tensor:
    return t if isinstance(t, Pretended) or not t.numel() else Pretended(t)


def _to(func: Any, args: Any, kwargs: Any) -> Tensor:
    t, *rest = args
    if func is Tensor.cpu:
        place, dtype = torch.device("cpu"), None
    elif func is Tensor.cuda:
        place, dtype = GPU, None
    elif rest and isinstance(rest[0], Tensor):
        place, dtype = _place(rest[0]), rest[0].dtype
    else:
        kinds = [*rest, kwargs.get("dtype"), kwargs.get("device")]
        dtype = next((k for k in kinds if isinstance(k, torch.dtype)), None)
        named = next((k for k in kinds if isinstance(k, str | torch.device)), None)
        place = _place(t) if named is None else torch.device(named)
    there, is_there = place.type == "cuda", _place(t) == GPU
    if place.type not in ("cpu", "cuda"):  # meta
        return func(t.held if is_there else t, *rest, **kwargs)
    if there == is_there:  # a cast, if anything
        return t if dtype in (None, t.dtype) and not kwargs.get("copy") else Tensor.type(t, dtype)
    if not t.requires_grad:  # as within torch.vmap, which has no rule for the move
        moved = (t.held if isinstance(t, Pretended) else t).detach().to(dtype or t.dtype, copy=True)
        return Pretended(moved) if there else moved
    return _Move.apply(t, dtype, there)


@contextmanager
def pretending(gpus: int = 1) -> Iterator[None]:
    """Within, torch says that there is a GPU, or several; they are all the same one."""
    with ExitStack() as stack:
        for name, said in {
            "is_available": True,
            "device_count": gpus,
            "set_device": None,
            "is_bf16_supported": True,
            "mem_get_info": (2**33, 2**34),
            "max_memory_allocated": 0,
            "synchronize": None,
            "graph_pool_handle": None,
            "get_rng_state": None,  # numbers are drawn on the CPU
            "set_rng_state": None,
        }.items():
            stack.enter_context(patch.object(torch.cuda, name, lambda *_, said=said, **__: said))
        for name, made in {"Stream": Stream, "stream": _streaming, "current_stream": lambda *_: _current}.items():
            stack.enter_context(patch.object(torch.cuda, name, made))
        on_cpu, capture = torch.device("cpu"), gpu.capture
        stack.enter_context(patch.object(gpu, "warm_up", lambda *_: None))
        stack.enter_context(patch.object(gpu, "capture", lambda work, _, pool: capture(work, on_cpu, pool)))
        stack.enter_context(_Devices())
        before = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, before)
        yield
