"""Mixtures of experts on GPUs: Triton kernels and CUDA graphs.

The Triton kernels are used if ``runtime.gpu`` names ``triton``, for ranks up to 32 in bf16 and float32. No tensor has
both an expert and a hidden axis, and the backward pass recomputes activations instead of saving them.

CUDA graphs are used if ``runtime.gpu`` names ``graphs``: launching many small kernels from Python is slow. A
:class:`Recording` captures a pass once with static inputs; later passes copy their inputs there and replay. It has two
graphs, one from the tokens to the last hidden states and one for the gradients. The output head, the loss and the
optimiser are launched as usual. All recordings of a model share a memory pool, so the forward and backward pass of one
must be complete before another is replayed. A CPU has no graphs: there a replay is a plain call on the same memory,
which only tests use.
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

MAX_RANK = 32
TOKENS, COLUMNS, SPAN = 32, 64, 2048
"""Size of a tile, and the number of tokens over which one program sums gradients of factors."""
MIN_INNER = 16
"""The smallest inner dimension of a Triton product."""


def with_triton(model: AdaptedModel) -> AdaptedModel:
    """Use Triton kernels for the expert mixtures of this process from now on (the setting ``runtime.gpu: [triton]``).

    Args:
        model: The model, which must be on a CUDA GPU; it is returned unchanged.

    Raises:
        RecipeError: The model is not on a CUDA GPU, or Triton is not installed.
    """
    expert_mlp.set_backend(triton_backend(model.device))
    return model


def triton_backend(device: torch.device) -> TritonBackend:
    """Return the backend that runs expert mixtures in Triton kernels, for models on a device.

    Raises:
        RecipeError: The device is not a CUDA GPU, or Triton is not installed.
    """
    if find_spec("triton") is None:
        raise RecipeError("runtime.gpu: got 'triton', which is not installed here; pip install triton, or leave it out")
    from comingle.models.kernels import triton_kernels as programs

    if device.type != "cuda" and not programs.INTERPRETED:
        raise RecipeError(f"runtime.gpu: got 'triton' on device {device.type!r}; allowed: a CUDA GPU")
    return TritonBackend(programs)


class TritonBackend:
    """The Triton backend: the functions of :mod:`comingle.models.kernels.expert_mlp` for a GPU."""

    def __init__(self, programs: ModuleType):
        self.programs = programs

    def supports(self, x: Tensor, act: expert_mlp.Activation, rank: int) -> bool:
        """Return whether the kernels support an MLP's input, activation and rank.

        It is called for models on CPUs too, as the backend is global.

        Args:
            x: Input of the MLP.
            act: Activation of the MLP.
            rank: LoRA rank.
        """
        # Triton's interpreter, for tests, also runs on CPUs.
        has_data = x.numel() > 0 and not isinstance(x, FakeTensor) and (x.is_cuda or self.programs.INTERPRETED)
        return has_data and x.dtype in DTYPES and act in ACTIVATION_CODES and rank <= MAX_RANK

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
        """Compute the hidden layer of a mixture of LoRA experts, ``sum_j p_j h_j``, with Triton.

        Each Triton program sums ``A_j h_j`` over one chunk of hidden columns only.

        Args:
            act: The activation.
            scale: LoRA scale s.
            bases: The base's pre-activations without bias of each layer that reads the MLP's input.
            biases: Biases of these layers.
            z: Products of the input with A of these layers.
            gates: The experts' probabilities ``p_j``, in float32.
            b: B of these layers.
            a: A of the last layer.

        Returns:
            The mixture of the experts' hidden activations h_j, the products ``z_last_j = s A_j h_j`` with the last
            layer's factors A, and ``p_j z_last_j``.
        """
        users, n, hidden = bases[0].shape
        experts, rank = a.shape[1:3]
        chunks = -(-hidden // COLUMNS)  # rounded up
        mixed = torch.empty_like(bases[0])
        partial_sums = a.new_empty(chunks, users, n, experts * rank, dtype=torch.float32)
        tensors = _leading_arguments(bases, biases, z, gates, b, a)
        constants = _compile_time_arguments(act, biases, a)
        with torch.cuda.device_of(mixed):  # Triton launches on the current device
            self.programs.forward[chunks, -(-n // TOKENS), users](
                *tensors, mixed, partial_sums, n, hidden, scale, *z.stride()[:2], **constants
            )
        z_last = partial_sums.sum(0).mul_(scale)
        gated = z_last.view(users, n, experts, rank) * gates.unsqueeze(-1)
        return mixed, z_last.to(z.dtype), gated.flatten(2).to(z.dtype)

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
        """Return the gradients of ``bases``, ``z``, ``gates``, ``b`` and ``a`` of :meth:`forward`, with Triton.

        A plain MLP has one pre-activation, a gated one two: the first and last of ``bases`` and ``b`` may be the same.
        Each program writes partial sums over a chunk of hidden columns or a range of tokens, which are added up here.

        Args:
            act: The activation.
            scale: LoRA scale s.
            bases: The base's pre-activations without bias of each layer that reads the MLP's input.
            biases: Biases of these layers.
            z: Products of the input with A of these layers.
            gates: The experts' probabilities ``p_j``.
            b: B of these layers.
            a: A of the last layer.
            last: ``z_last_j = s A_j h_j`` from :meth:`forward`.
            d_mixed: Gradient of the mixture ``sum_j p_j h_j``.
            d_gated: Gradient of ``p_j z_last_j``.
            factors: Compute the gradients of ``b`` and ``a``; otherwise they are an empty list and None.
        """
        users, n, hidden = bases[0].shape
        experts, rank = a.shape[1:3]
        chunks = -(-hidden // COLUMNS)  # rounded up
        d_mixed, d_gated = d_mixed.contiguous(), d_gated.contiguous()
        d_bases = [torch.empty_like(base) for base in bases]
        d_z = a.new_empty(chunks, users, n, len(b) * experts * rank, dtype=torch.float32)
        d_gates = a.new_empty(chunks, *gates.shape, dtype=torch.float32)
        tensors = (*_leading_arguments(bases, biases, z, gates, b, a), d_mixed, d_gated)
        numbers, constants = (n, hidden, scale, *z.stride()[:2]), _compile_time_arguments(act, biases, a)
        with torch.cuda.device_of(d_mixed):
            self.programs.backward[chunks, -(-n // TOKENS), users](
                *tensors, d_bases[0], d_bases[-1], d_z, d_gates, *numbers, **constants
            )
        d_factors: list[Factor] = []
        if factors:
            ranges = -(-n // SPAN)  # of tokens, each with a partial sum
            # Of B of each first layer, then of A of the last; for a plain MLP, entries 0 and -2 are the same.
            partial_sums = [a.new_empty(ranges, *a.shape, dtype=torch.float32) for _ in (*b, a)]
            with torch.cuda.device_of(d_mixed):
                self.programs.backward_factors[chunks, ranges, users * experts](
                    *tensors, partial_sums[0], partial_sums[-2], partial_sums[-1], *numbers, SPAN, **constants
                )
            d_factors = [partial.sum(0).to(a.dtype) for partial in partial_sums]
        # Gates have two gradients: through the mixed activations, and through the last layer's LoRA.
        d_last_gates = (d_gated.float() * last.float()).view(users, n, experts, rank).sum(-1)
        *d_b, d_a = d_factors or [None]  # an empty list and None without gradients of factors
        return d_bases, d_z.sum(0).mul_(scale).to(z.dtype), d_gates.sum(0) + d_last_gates, d_b, d_a  # type: ignore[return-value]


def _leading_arguments(
    bases: Sequence[Tensor], biases: Sequence[Tensor | None], z: Tensor, gates: Tensor, b: Sequence[Tensor], a: Tensor
) -> tuple[object, ...]:
    """Return the arguments with which all Triton kernels begin: tensors of two layers that read the MLP's input.

    A gated MLP has two such layers, gate and up. A plain MLP has only up, which is passed twice; the kernels do not
    read the second one. In place of a missing bias any tensor is passed, which the kernels do not read either.

    Args:
        bases: The base's pre-activations without bias, ``(users, n, hidden)``, of each layer.
        biases: The bias of each layer, or None.
        z: Products of the input with A of these layers.
        gates: The experts' probabilities.
        b: B of each layer.
        a: A of the last layer, down.
    """
    assert all(t.is_contiguous() for t in (*bases, gates, *b, a))
    assert z.stride(2) == 1
    bias_or_any = [bases[0] if bias is None else bias for bias in biases]
    return bases[0], bases[-1], bias_or_any[0], bias_or_any[-1], z, gates, b[0], b[-1], a


def _compile_time_arguments(
    act: expert_mlp.Activation, biases: Sequence[Tensor | None], a: Tensor
) -> dict[str, object]:
    """Return the kernels' ``constexpr`` arguments. Triton compiles a variant for each combination.

    Args:
        act: The activation.
        biases: The bias, or None, of each layer that reads the MLP's input: gate and up, or up alone.
        a: A of the last layer, ``(users, experts, rank, hidden)``.
    """
    rank = a.shape[2]
    return {
        "ACT": ACTIVATION_CODES[act],
        "FIRST": len(biases),
        "BIASED_0": biases[0] is not None,
        "BIASED_1": biases[-1] is not None,  # not read for an MLP without a gate, whose only entry is 0
        "EXPERTS": a.shape[1],
        "RANK": rank,
        "WIDE": max(MIN_INNER, 1 << (rank - 1).bit_length()),  # the rank padded to a power of two
        "TOKENS": TOKENS,
        "COLUMNS": COLUMNS,
        "PRECISION": "ieee" if a.dtype == torch.float32 else "tf32",  # matters for float32 only: full precision
    }


MAX_RECORDINGS = 16
"""The largest number of recordings of a model. There is one per set of shapes; further shapes are not recorded."""
WARMUP_PASSES = 3
"""Warm-up passes before a recording, in which code is compiled and libraries choose algorithms."""

Key = tuple[Any, ...]
"""Names, shapes and dtypes of a pass's inputs, and whether they require gradients."""
Work = Callable[[], None]
"""Function that reads and writes static memory."""


def recorded(model: AdaptedModel) -> AdaptedModel:
    """Return the model with training passes replayed from CUDA graphs (``runtime.gpu: [graphs]``)."""
    return RecordedModel(**vars(model))


@dataclass(frozen=True, kw_only=True)
class RecordedModel(AdaptedModel):
    """A model whose training passes are captured as CUDA graphs and replayed.

    Restrictions of the model to fewer experts or users share the captured graphs.
    """

    recordings: dict[Key, Recording | None] = field(default_factory=dict)

    def states(self, tensors: Tree, present: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the last hidden states and the load-balancing penalty, in training by replaying CUDA graphs.

        The first pass with inputs of new shapes is captured, up to ``MAX_RECORDINGS`` times. Later passes with these
        shapes are replayed. A pass runs without CUDA graphs in four cases: outside of training, if it records gates, if
        it cannot be captured, and while another replay awaits its backward pass, as all recordings share memory.

        Args:
            tensors: The users' tensors.
            present: The experts that each user has.
            inputs: Token ids ``(users, batch, context)``.
        """
        is_training = torch.is_grad_enabled() and any(t.requires_grad for t in tensors.values())
        record_gates = any(mlp.router.record_gates for mlp in self.adapters.experts.values())
        if not is_training or record_gates or isinstance(inputs, FakeTensor):  # fake tensors only estimate memory
            return super().states(tensors, present, inputs)
        if any(recording is not None and recording.busy for recording in self.recordings.values()):
            return super().states(tensors, present, inputs)
        arguments = (*tensors.values(), present, inputs)
        key = (*tensors, *((t.shape, t.dtype, t.requires_grad) for t in arguments))
        if key not in self.recordings and len(self.recordings) < MAX_RECORDINGS:
            self.recordings[key] = self._record(tuple(tensors), arguments)
        recording = self.recordings.get(key)
        if recording is None:
            return super().states(tensors, present, inputs)
        outputs: Any = _Replayed.apply(recording, *arguments)
        return outputs if len(outputs) == 2 else (*outputs, recording.penalty)  # a constant penalty is no output

    def _record(self, names: tuple[str, ...], given: Sequence[Tensor]) -> Recording | None:
        """Record a pass; log a warning and return None if it cannot be captured.

        Args:
            names: Names of the users' tensors.
            given: Arguments of :meth:`states`: the users' tensors in the order of ``names``, the users' experts, and
                the tokens.
        """
        # Not ``self``, which holds the recording: a reference cycle would keep the memory of a pass.
        plain = AdaptedModel(**{f.name: getattr(self, f.name) for f in fields(AdaptedModel)})
        pools = [recording.pool for recording in self.recordings.values() if recording is not None]

        def run(*arguments: Tensor) -> tuple[Tensor, Tensor | float]:
            """Run the pass: return :meth:`AdaptedModel.states` of arguments in the order of ``given``."""
            with without_packing():
                *tensors, present, inputs = arguments
                return plain.states(dict(zip(names, tensors, strict=True)), present, inputs)

        try:
            return Recording(run, given, pools[0] if pools else None)  # all recordings share the memory of the first
        except RuntimeError as error:
            if lacks_memory(error):
                raise
            why = " ".join(str(error).split())[:200]
            logger.warning("runtime.gpu: a pass could not be captured and runs without CUDA graphs (%s)", why)
            return None


class Recording:
    """A function of tensors and its gradients, captured as CUDA graphs that read and write tensors at fixed addresses.

    Args:
        run: The function; returns hidden states and a penalty.
        given: Inputs like those of later passes; gradients are computed for those that require one.
        pool: Memory pool of the graphs; None: a new one.
    """

    def __init__(self, run: Callable[..., tuple[Tensor, Tensor | float]], given: Sequence[Tensor], pool: object):
        """Capture the forward pass and then its backward pass, after warm-up passes.

        Args:
            run: The function; returns hidden states and a penalty.
            given: Inputs like those of later passes; gradients are computed for those that require one.
            pool: Memory pool of the graphs; None: a new one.
        """
        # Tensors at fixed addresses: a replay reads its inputs from them.
        self.inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in given]
        self.leaves = [t for t in self.inputs if t.requires_grad]
        self.run = run
        self.penalty = 0.0
        self.last_replay: weakref.ref[ForwardReplay] | None = None
        device = given[0].device
        warm_up(self._run_once, device)
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" and pool is None else pool
        self.forward = capture(self._forward, device, self.pool)
        self.output_gradients = [torch.empty_like(t) if t.requires_grad else None for t in self.outputs]
        self.backward = capture(self._backward, device, self.pool)

    @property
    def busy(self) -> bool:
        """Whether the last replay of the forward pass still awaits its backward pass, which needs the static memory."""
        last_replay = None if self.last_replay is None else self.last_replay()
        return last_replay is not None and not last_replay.done

    def _forward(self) -> None:
        """Run the function on the recording's own inputs, and store its outputs as attributes.

        The outputs stay at fixed addresses, where replays of the CUDA graph write them. The function returns hidden
        states and the load-balancing penalty. A penalty that is a plain number is constant, so it is no output of the
        graph.
        """
        with torch.enable_grad():
            hidden, penalty = self.run(*self.inputs)
        self.outputs = [hidden, penalty] if isinstance(penalty, Tensor) else [hidden]
        self.penalty = penalty if isinstance(penalty, float) else 0.0

    def _backward(self) -> None:
        """Compute the gradients of the inputs from those of the outputs, which replays overwrite at fixed addresses."""
        pairs = [(t, d) for t, d in zip(self.outputs, self.output_gradients, strict=True) if d is not None]
        outputs, output_gradients = zip(*pairs, strict=True)
        self.gradients = torch.autograd.grad(outputs, self.leaves, output_gradients, materialize_grads=True)

    def _run_once(self) -> None:
        """Run forward and backward pass without capturing, to warm up, and free the memory of their results."""
        self._forward()
        self.output_gradients = [torch.zeros_like(t) if t.requires_grad else None for t in self.outputs]
        self._backward()
        del self.outputs, self.output_gradients, self.gradients


class ForwardReplay:
    """One replay of a forward pass; ``done`` after its backward pass. Alive as long as autograd may need that pass."""

    done = False


class _Replayed(torch.autograd.Function):
    """Autograd function that replays CUDA graphs; results are copies, as the next replay overwrites graph memory."""

    @staticmethod
    def forward(ctx: Context, recording: Recording, *given: Tensor) -> tuple[Tensor, ...]:
        """Copy the inputs into the memory of the graph, replay the forward pass and return copies of its outputs.

        Args:
            ctx: Autograd context.
            recording: CUDA graphs of a forward and a backward pass, with the tensors that they read and write.
            *given: Inputs of this pass, of the shapes that were recorded.
        """
        for static, t in zip(recording.inputs, given, strict=True):
            static.detach().copy_(t)
        recording.forward()
        ctx.recording, ctx.replay = recording, ForwardReplay()
        # Until the backward pass, or until autograd drops ``ctx``, no other replay may overwrite the static memory.
        recording.last_replay = weakref.ref(ctx.replay)
        return tuple(t.detach().clone() for t in recording.outputs)

    @staticmethod
    def backward(ctx: Context, *output_gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Replay the backward pass, and return copies of the gradients of the inputs.

        Args:
            ctx: Autograd context.
            *output_gradients: Gradients of the outputs of :meth:`forward`.
        """
        assert not ctx.replay.done  # the first backward pass has overwritten its memory
        recording, ctx.replay.done = ctx.recording, True
        for static, d in zip(recording.output_gradients, output_gradients, strict=True):
            if static is not None:
                static.copy_(d)
        recording.backward()
        gradients = iter(recording.gradients)
        return None, *(next(gradients).clone() if t.requires_grad else None for t in recording.inputs)


@contextmanager
def without_packing() -> Iterator[None]:
    """Disable transformers' detection of packed sequences: each of our rows is one text.

    The detection reads positions, which synchronises with the device. During a capture it cannot, so it assumes packed
    sequences: attention then gets a mask, which rules out FlashAttention and recompiles compiled layers.
    """
    from transformers import masking_utils

    if (detector := getattr(masking_utils, _PACKING_DETECTOR, None)) is None:  # missing in some versions
        yield
        return
    setattr(masking_utils, _PACKING_DETECTOR, lambda *_, **__: None)
    try:
        yield
    finally:
        setattr(masking_utils, _PACKING_DETECTOR, detector)


_PACKING_DETECTOR = "find_packed_sequence_indices"


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for all captures on a device; only one, as cuBLAS keeps a workspace per stream."""
    return torch.cuda.Stream(device)


def warm_up(work: Work, device: torch.device) -> None:
    """Run a function ``WARMUP_PASSES`` times on the stream for captures, as a CUDA graph requires.

    On a CPU, which has no graphs, nothing is run.

    Args:
        work: The function; it reads and writes tensors at fixed addresses.
        device: Device of the tensors.
    """
    if device.type != "cuda":
        return
    stream, current = capture_stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):  # also selects its device
        for _ in range(WARMUP_PASSES):
            work()
    current.wait_stream(stream)
    torch.cuda.synchronize(device)


def capture(work: Work, device: torch.device, pool: Any) -> Work:
    """Capture the kernels that a function launches as a CUDA graph, and return a function that replays them.

    A CPU has no graphs: there the function is called once and returned itself. Only tests use this.

    Args:
        work: The function; it reads and writes tensors at fixed addresses.
        device: Device of the tensors.
        pool: Memory pool of the graph.

    Raises:
        RuntimeError: The function cannot be captured.
    """
    if device.type != "cuda":
        work()
        return work
    graph, stream = torch.cuda.CUDAGraph(), capture_stream(device)
    with torch.cuda.stream(stream):  # a failed capture does not restore the stream
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                work()
        except RuntimeError:
            _end_failed_capture(device, pool)
            raise
    return graph.replay


def _end_failed_capture(device: torch.device, pool: Any) -> None:
    """Tell PyTorch's allocator that a failed capture has ended.

    PyTorch does so only if CUDA ends the capture without an error. Otherwise the allocator would keep the pool, and
    would not free memory used on other streams. If PyTorch has done it already, the first call raises an error.
    """
    with suppress(AttributeError, RuntimeError):
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)
