"""Mixtures of experts on GPUs: Triton kernels and CUDA graphs.

Used where ``runtime.gpu`` names ``triton``; ranks up to 32, bf16 and float32. No tensor with both an expert and a
hidden axis exists, and the backward pass recomputes activations instead of keeping them.

A pass of many small kernels waits for Python, which launches them one by one. A :class:`Recording` launches them once,
with inputs that stay where they are in memory, and from then on copies its inputs there and replays. It has two graphs,
one up to what the head reads and one for its gradients; the loss, the head and the optimiser are no part of it, and
are launched as ever. All recordings of a model use the same memory, so one is replayed as a whole before the next is.
On a CPU, which has no graphs, a replay is a plain call on the same memory: for tests alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from comingle.models.adapted import AdaptedModel
from comingle.models.kernels import expert_mlp
from comingle.models.kernels.expert_mlp import ACTIVATION_CODES, DTYPES, Factor, First, Gates, Last, SharedHidden
from comingle.utils.errors import RecipeError, lacks_memory
from comingle.utils.records import logger
from comingle.utils.trees import Context, Tree

MOST_RANKS = 32
TOKENS, COLUMNS, SPAN = 32, 64, 2048
"""A tile, and the tokens whose gradients of factors are summed by one program."""
LEAST = 16
"""The smallest inner dimension of a product of tiles."""


def with_triton(model: AdaptedModel) -> AdaptedModel:
    """``runtime.gpu: [triton]``: the model, with Triton kernels for the hidden part of mixtures from now on.

    Raises:
        RecipeError: it is on no NVIDIA GPU, or there is no Triton.
    """
    expert_mlp.use(part_on(model.device))
    return model


def part_on(device: torch.device) -> Part:
    """What computes the hidden part of mixtures on a device.

    Raises:
        RecipeError: as :func:`with_triton`.
    """
    if find_spec("triton") is None:
        raise RecipeError("runtime.gpu: got 'triton', which is not installed here; pip install triton, or leave it out")
    from comingle.models.kernels import triton_kernels as programs

    if device.type != "cuda" and not programs.INTERPRETED:
        raise RecipeError(f"runtime.gpu: got 'triton' on device {device.type!r}; allowed: a CUDA GPU")
    return Part(programs)


class Part:
    """The passes of :mod:`comingle.models.kernels.expert_mlp` on a GPU, and which tensors they accept."""

    def __init__(self, programs: ModuleType):
        self.programs = programs

    def supports(self, x: Tensor, act: expert_mlp.Activation, rank: int) -> bool:
        """Whether the kernels are made for such tensors; they are asked for bases on CPUs too, as they are in use."""
        real = x.numel() > 0 and not isinstance(x, FakeTensor) and (x.is_cuda or self.programs.INTERPRETED)
        return real and x.dtype in DTYPES and act in ACTIVATION_CODES and rank <= MOST_RANKS

    def forward(
        self,
        act: expert_mlp.Activation,
        scale: float,
        bases: Sequence[SharedHidden],
        biases: Sequence[Tensor | None],
        z: First,
        gates: Gates,
        b: Sequence[Factor],
        a: Factor,
    ) -> tuple[SharedHidden, Last, Last]:
        """As :func:`comingle.models.kernels.expert_mlp.forward`."""
        users, n, hidden = bases[0].shape
        experts, rank = a.shape[1:3]
        chunks = -(-hidden // COLUMNS)
        mixed = torch.empty_like(bases[0])
        parts = a.new_empty(chunks, users, n, experts * rank, dtype=torch.float32)
        given = _given(bases, biases, z, gates, b, a)
        sizes = _sizes(act, biases, a)
        with torch.cuda.device_of(mixed):  # Triton launches on the current device
            self.programs.forward[chunks, -(-n // TOKENS), users](
                *given, mixed, parts, n, hidden, scale, *z.stride()[:2], **sizes
            )
        last = parts.sum(0).mul_(scale)
        gated = last.view(users, n, experts, rank) * gates.unsqueeze(-1)
        return mixed, last.to(z.dtype), gated.flatten(2).to(z.dtype)

    def backward(
        self,
        act: expert_mlp.Activation,
        scale: float,
        bases: Sequence[SharedHidden],
        biases: Sequence[Tensor | None],
        z: First,
        gates: Gates,
        b: Sequence[Factor],
        a: Factor,
        last: Last,
        d_mixed: SharedHidden,
        d_gated: Last,
        factors: bool,
    ) -> tuple[list[SharedHidden], First, Gates, list[Factor], Factor | None]:
        """As :func:`comingle.models.kernels.expert_mlp.backward`."""
        users, n, hidden = bases[0].shape
        experts, rank = a.shape[1:3]
        chunks = -(-hidden // COLUMNS)
        d_mixed, d_gated = d_mixed.contiguous(), d_gated.contiguous()
        d_bases = [torch.empty_like(base) for base in bases]
        d_z = a.new_empty(chunks, users, n, len(b) * experts * rank, dtype=torch.float32)
        d_gates = a.new_empty(chunks, *gates.shape, dtype=torch.float32)
        given = (*_given(bases, biases, z, gates, b, a), d_mixed, d_gated)
        numbers, sizes = (n, hidden, scale, *z.stride()[:2]), _sizes(act, biases, a)
        with torch.cuda.device_of(d_mixed):
            self.programs.backward[chunks, -(-n // TOKENS), users](
                *given, d_bases[0], d_bases[-1], d_z, d_gates, *numbers, **sizes
            )
        found: list[Factor] = []
        if factors:
            ranges = -(-n // SPAN)
            parts = [a.new_empty(ranges, *a.shape, dtype=torch.float32) for _ in (*b, a)]
            with torch.cuda.device_of(d_mixed):
                self.programs.backward_factors[chunks, ranges, users * experts](
                    *given, parts[0], parts[-2], parts[-1], *numbers, SPAN, **sizes
                )
            found = [part.sum(0).to(a.dtype) for part in parts]
        thin = (d_gated.float() * last.float()).view(users, n, experts, rank).sum(-1)
        *d_b, d_a = found or [None]
        return d_bases, d_z.sum(0).mul_(scale).to(z.dtype), d_gates.sum(0) + thin, d_b, d_a  # type: ignore[return-value]


def _given(
    bases: Sequence[Tensor], biases: Sequence[Tensor | None], z: Tensor, gates: Tensor, b: Sequence[Tensor], a: Tensor
) -> tuple[object, ...]:
    """The kernels' first arguments; of what a plain MLP has once, the same twice, and any address for no bias."""
    assert all(t.is_contiguous() for t in (*bases, gates, *b, a))
    assert z.stride(2) == 1
    addresses = [bases[0] if bias is None else bias for bias in biases]
    return bases[0], bases[-1], addresses[0], addresses[-1], z, gates, b[0], b[-1], a


def _sizes(act: expert_mlp.Activation, biases: Sequence[Tensor | None], a: Tensor) -> dict[str, object]:
    rank = a.shape[2]
    return {
        "ACT": ACTIVATION_CODES[act],
        "FIRST": len(biases),
        "BIASED_0": biases[0] is not None,
        "BIASED_1": biases[-1] is not None,
        "EXPERTS": a.shape[1],
        "RANK": rank,
        "WIDE": max(LEAST, 1 << (rank - 1).bit_length()),
        "TOKENS": TOKENS,
        "COLUMNS": COLUMNS,
        "PRECISION": "ieee" if a.dtype == torch.float32 else "tf32",
    }


MOST = 16
"""So many recordings a model has, one for each set of shapes; what comes later is not recorded."""
WARM = 3
"""Passes before a recording, in which code is compiled and libraries choose."""

Key = tuple[Any, ...]
Work = Callable[[], None]


def recorded(model: AdaptedModel) -> AdaptedModel:
    """``runtime.gpu: [graphs]``: the model, whose passes in training are recorded and replayed."""
    return RecordedModel(**vars(model))


@dataclass(frozen=True, kw_only=True)
class RecordedModel(AdaptedModel):
    """A model with its recordings; those with fewer experts or users of it have the same."""

    recordings: dict[Key, Recording | None] = field(default_factory=dict)

    def states(self, tensors: Tree, present: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor | float]:
        """As any model's; replayed in training, unless somebody looks at gates on the way."""
        trained = torch.is_grad_enabled() and any(t.requires_grad for t in tensors.values())
        watched = any(mlp.router.watched for mlp in self.adapters.experts.values())
        if not trained or watched or isinstance(inputs, FakeTensor):
            return super().states(tensors, present, inputs)
        if any(recording is not None and recording.busy for recording in self.recordings.values()):
            return super().states(tensors, present, inputs)
        given = (*tensors.values(), present, inputs)
        key = (*tensors, *((t.shape, t.dtype, t.requires_grad) for t in given))
        if key not in self.recordings and len(self.recordings) < MOST:
            self.recordings[key] = self._record(tuple(tensors), given)
        recording = self.recordings.get(key)
        if recording is None:
            return super().states(tensors, present, inputs)
        found: Any = _Replayed.apply(recording, *given)
        return found if len(found) == 2 else (*found, recording.penalty)

    def _record(self, names: tuple[str, ...], given: Sequence[Tensor]) -> Recording | None:
        """None where it cannot be recorded, which is told."""
        # Not this model, which has the recording: the two would wait for the garbage collector, with a pass's memory.
        plain = AdaptedModel(**{f.name: getattr(self, f.name) for f in fields(AdaptedModel)})
        pools = [recording.pool for recording in self.recordings.values() if recording is not None]

        def run(*static: Tensor) -> tuple[Tensor, Tensor | float]:
            with unpacked():
                return plain.states(dict(zip(names, static, strict=False)), static[-2], static[-1])

        try:
            return Recording(run, given, pools[0] if pools else None)
        except RuntimeError as error:
            if lacks_memory(error):
                raise
            why = " ".join(str(error).split())[:200]
            logger.warning("runtime.gpu: a pass could not be recorded and runs as without graphs (%s)", why)
            return None


class Recording:
    """A function of tensors, and its gradients at those that require one, in memory that stays."""

    def __init__(self, run: Callable[..., tuple[Tensor, Tensor | float]], given: Sequence[Tensor], pool: object):
        self.inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in given]
        self.leaves = [t for t in self.inputs if t.requires_grad]
        self.run = run
        self.penalty = 0.0
        self.taken: weakref.ref[Taken] | None = None
        device = given[0].device
        warm(self._warm, device)
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" and pool is None else pool
        self.forward = capture(self._forward, device, self.pool)
        self.reached = [torch.empty_like(t) if t.requires_grad else None for t in self.outputs]
        self.backward = capture(self._backward, device, self.pool)

    @property
    def busy(self) -> bool:
        """Whether somebody has replayed the forward pass and may still want gradients of that."""
        taken = None if self.taken is None else self.taken()
        return taken is not None and not taken.done

    def _forward(self) -> None:
        with torch.enable_grad():
            hidden, penalty = self.run(*self.inputs)
        self.outputs = [hidden, penalty] if isinstance(penalty, Tensor) else [hidden]
        self.penalty = penalty if isinstance(penalty, float) else 0.0

    def _backward(self) -> None:
        pairs = [(t, d) for t, d in zip(self.outputs, self.reached, strict=True) if d is not None]
        outputs, reached = zip(*pairs, strict=True)
        self.gradients = torch.autograd.grad(outputs, self.leaves, reached, materialize_grads=True)

    def _warm(self) -> None:
        self._forward()
        self.reached = [torch.zeros_like(t) if t.requires_grad else None for t in self.outputs]
        self._backward()
        del self.outputs, self.reached, self.gradients


class Taken:
    """One replay of a forward pass; ``done`` once it has had its gradients."""

    done = False


class _Replayed(torch.autograd.Function):
    """Results are copies: the next replay writes over what a recording holds."""

    @staticmethod
    def forward(ctx: Context, recording: Recording, *given: Tensor) -> tuple[Tensor, ...]:
        for static, t in zip(recording.inputs, given, strict=True):
            static.detach().copy_(t)
        recording.forward()
        ctx.recording, ctx.taken = recording, Taken()
        recording.taken = weakref.ref(ctx.taken)
        return tuple(t.detach().clone() for t in recording.outputs)

    @staticmethod
    def backward(ctx: Context, *reached: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        assert not ctx.taken.done  # its memory was given to the gradients of the first time
        recording, ctx.taken.done = ctx.recording, True
        for static, d in zip(recording.reached, reached, strict=True):
            if static is not None:
                static.copy_(d)
        recording.backward()
        found = iter(recording.gradients)
        return None, *(next(found).clone() if t.requires_grad else None for t in recording.inputs)


@contextmanager
def unpacked() -> Iterator[None]:
    """Within, transformers takes each row for one text, as ours are, and does not look whether it is several.

    It would look at positions, which waits for the device; while a graph is captured it cannot, and takes them for
    several: then attention gets a mask, which FlashAttention has not, and compiled layers are compiled anew.
    """
    from transformers import masking_utils

    if (found := getattr(masking_utils, _LOOKS, None)) is None:  # not every version does
        yield
        return
    setattr(masking_utils, _LOOKS, lambda *_, **__: None)
    try:
        yield
    finally:
        setattr(masking_utils, _LOOKS, found)


_LOOKS = "find_packed_sequence_indices"


@cache
def beside(device: torch.device) -> torch.cuda.Stream:
    """The stream of whatever is captured on a device: one alone, as cuBLAS keeps memory for each that it has seen."""
    return torch.cuda.Stream(device)


def warm(work: Work, device: torch.device) -> None:
    """Do something as often as it takes before it can be captured, beside what is going on."""
    if device.type != "cuda":
        return
    stream, computing = beside(device), torch.cuda.current_stream(device)
    stream.wait_stream(computing)
    with torch.cuda.stream(stream):  # and on its device, which need not be the current one
        for _ in range(WARM):
            work()
    computing.wait_stream(stream)
    torch.cuda.synchronize(device)


def capture(work: Work, device: torch.device, pool: Any) -> Work:
    """What does the same as ``work``, which is called once: replays its graph, or calls it where there are none."""
    if device.type != "cuda":
        work()
        return work
    graph, stream = torch.cuda.CUDAGraph(), beside(device)
    with torch.cuda.stream(stream):  # which a capture that fails does not put back
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                work()
        except RuntimeError:
            _end(device, pool)
            raise
    return graph.replay


def _end(device: torch.device, pool: Any) -> None:
    """End an invalid capture for the allocator too, which torch does only where CUDA has ended it without complaint.

    Else it would keep the pool, and as long as a capture is under way it gives nothing back that a stream has used.
    Where torch has done it, the first call is refused.
    """
    with suppress(AttributeError, RuntimeError):
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)
