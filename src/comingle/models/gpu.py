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

import math
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
TILE_TOKENS, TILE_COLUMNS = 32, 64
"""Tokens and hidden columns of a tile, the part of an MLP's hidden layer that one Triton program computes."""
SPAN_TOKENS = 2048
"""Number of tokens over which one Triton program sums gradients of LoRA factors."""
MIN_INNER_DIMENSION = 16
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

    if device.type != "cuda" and not programs.INTERPRETED:  # tests interpret Triton on CPUs
        raise RecipeError(f"runtime.gpu: got 'triton' on device {device.type!r}; allowed: a CUDA GPU")
    return TritonBackend(programs)


class TritonBackend:
    """The Triton backend: the functions of :mod:`comingle.models.kernels.expert_mlp` for a GPU."""

    def __init__(self, programs: ModuleType):
        self.programs = programs

    def supports(self, x: Tensor, act: expert_mlp.Activation, rank: int) -> bool:
        """Return whether the kernels support an MLP's input, activation and rank.

        Args:
            x: Input of the MLP.
            act: Activation of the MLP.
            rank: LoRA rank.
        """
        has_data = x.numel() > 0 and not isinstance(x, FakeTensor)
        runs_on_device = x.is_cuda or self.programs.INTERPRETED  # tests interpret Triton on CPUs
        return has_data and runs_on_device and x.dtype in DTYPES and act in ACTIVATION_CODES and rank <= MAX_RANK

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
        """Compute the hidden layer of a mixture of LoRA experts with Triton.

        h_j are the hidden activations of expert j.

        Args:
            act: Activation function of the MLP.
            scale: LoRA scale s.
            bases: ``W x`` for each layer that reads the MLP's input x, with the layer's base weight W.
            biases: Biases of these layers.
            z: Products of the input with A of these layers.
            gates: The experts' probabilities ``p_j``, in float32.
            b: B of these layers.
            a: A_j of the last layer.

        Returns:
            ``sum_j p_j h_j``, ``z_last_j = s A_j h_j`` and ``p_j z_last_j``.
        """
        users, n, hidden = bases[0].shape
        experts, rank = a.shape[1:3]
        num_column_tiles = math.ceil(hidden / TILE_COLUMNS)
        num_token_tiles = math.ceil(n / TILE_TOKENS)
        mixed = torch.empty_like(bases[0])
        # Sums of A_j h_j over the columns of each tile; they are added up below.
        partial_sums = a.new_empty(num_column_tiles, users, n, experts * rank, dtype=torch.float32)
        tensors = _leading_arguments(bases, biases, z, gates, b, a)
        constants = _compile_time_arguments(act, biases, a)
        user_stride, token_stride, _ = z.stride()
        with torch.cuda.device_of(mixed):  # Triton launches on the current device
            self.programs.forward[num_column_tiles, num_token_tiles, users](
                *tensors, mixed, partial_sums, n, hidden, scale, user_stride, token_stride, **constants
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
        z_last: Last,
        d_mixed: SharedHidden,
        d_gated: Last,
        wants_factors: bool,
    ) -> tuple[list[SharedHidden], First, Gates, list[Factor], Factor | None]:
        """Return the gradients of ``bases``, ``z``, ``gates``, ``b`` and ``a`` of :meth:`forward`, with Triton.

        h_j are the hidden activations of expert j; the formulas are at :func:`expert_mlp.backward`. ``bases`` and ``b``
        have one entry for a plain MLP and two for a gated one; the kernels take the first and the last.

        Args:
            act: Activation function of the MLP.
            scale: LoRA scale s.
            bases: ``W x`` for each layer that reads the MLP's input x, with the layer's base weight W.
            biases: Biases of these layers.
            z: Products of the input with A of these layers.
            gates: The experts' probabilities ``p_j``.
            b: B of these layers.
            a: A of the last layer.
            z_last: ``z_last_j = s A_j h_j`` from :meth:`forward`.
            d_mixed: Gradient of the mixture ``sum_j p_j h_j``.
            d_gated: Gradient of ``p_j z_last_j``.
            wants_factors: Compute the gradients of ``b`` and ``a``; otherwise they are an empty list and None.
        """
        users, n, hidden = bases[0].shape
        experts, rank = a.shape[1:3]
        num_column_tiles = math.ceil(hidden / TILE_COLUMNS)
        num_token_tiles = math.ceil(n / TILE_TOKENS)
        d_mixed, d_gated = d_mixed.contiguous(), d_gated.contiguous()
        tensors = (*_leading_arguments(bases, biases, z, gates, b, a), d_mixed, d_gated)
        user_stride, token_stride, _ = z.stride()
        sizes = (n, hidden, scale, user_stride, token_stride)
        constants = _compile_time_arguments(act, biases, a)

        d_bases = [torch.empty_like(base) for base in bases]
        # Each Triton program writes the partial sum of its tile of columns, or of SPAN_TOKENS tokens; they are added up
        # below.
        d_z_sums = a.new_empty(num_column_tiles, users, n, len(b) * experts * rank, dtype=torch.float32)
        d_gates_sums = a.new_empty(num_column_tiles, *gates.shape, dtype=torch.float32)
        with torch.cuda.device_of(d_mixed):
            self.programs.backward[num_column_tiles, num_token_tiles, users](
                *tensors, d_bases[0], d_bases[-1], d_z_sums, d_gates_sums, *sizes, **constants
            )
        d_z = d_z_sums.sum(0).mul_(scale).to(z.dtype)
        # Gates have two gradients: through the mixed activations, and through the last layer's LoRA.
        d_gates_of_lora = (d_gated.float() * z_last.float()).view(users, n, experts, rank).sum(-1)
        d_gates = d_gates_sums.sum(0) + d_gates_of_lora
        if not wants_factors:
            return d_bases, d_z, d_gates, [], None

        num_token_spans = math.ceil(n / SPAN_TOKENS)
        d_b_sums = [a.new_empty(num_token_spans, *a.shape, dtype=torch.float32) for _ in b]
        d_a_sums = a.new_empty(num_token_spans, *a.shape, dtype=torch.float32)
        with torch.cuda.device_of(d_mixed):
            self.programs.backward_factors[num_column_tiles, num_token_spans, users * experts](
                *tensors, d_b_sums[0], d_b_sums[-1], d_a_sums, *sizes, SPAN_TOKENS, **constants
            )
        d_b = [sums.sum(0).to(a.dtype) for sums in d_b_sums]
        d_a = d_a_sums.sum(0).to(a.dtype)
        return d_bases, d_z, d_gates, d_b, d_a


def _leading_arguments(
    bases: Sequence[Tensor], biases: Sequence[Tensor | None], z: Tensor, gates: Tensor, b: Sequence[Tensor], a: Tensor
) -> tuple[object, ...]:
    """Return the first arguments of each Triton kernel: tensors of the layers 0 and 1, which read the MLP's input.

    Layers 0 and 1 are gate and up in a gated MLP. A plain MLP has only up, which is passed as both.

    Args:
        bases: ``W x`` for each layer, with the MLP's input x and the layer's base weight W, ``(users, n, hidden)``.
        biases: The bias of each layer, or None.
        z: Products of the input with A of these layers.
        gates: The experts' probabilities.
        b: B of each layer.
        a: A of the last layer, down.
    """
    assert all(t.is_contiguous() for t in (*bases, gates, *b, a))
    assert z.stride(2) == 1
    any_tensor = bases[0]  # in place of a missing bias, which kernels do not read
    bias_arguments = [any_tensor if bias is None else bias for bias in biases]
    return bases[0], bases[-1], bias_arguments[0], bias_arguments[-1], z, gates, b[0], b[-1], a


def _compile_time_arguments(
    act: expert_mlp.Activation, biases: Sequence[Tensor | None], a: Tensor
) -> dict[str, object]:
    """Return the kernels' ``constexpr`` arguments. Triton compiles a variant for each combination.

    Args:
        act: Activation function of the MLP.
        biases: The bias, or None, of each layer that reads the MLP's input: gate and up, or up alone.
        a: A of the last layer, ``(users, experts, rank, hidden)``.
    """
    _users, experts, rank, _hidden = a.shape
    next_power_of_two = 1 << (rank - 1).bit_length()
    return {
        "ACT": ACTIVATION_CODES[act],
        "NUM_FIRST": len(biases),
        "BIASED_0": biases[0] is not None,
        "BIASED_1": biases[-1] is not None,
        "EXPERTS": experts,
        "RANK": rank,
        "PADDED_RANK": max(MIN_INNER_DIMENSION, next_power_of_two),
        "TOKENS": TILE_TOKENS,
        "COLUMNS": TILE_COLUMNS,
        "PRECISION": "ieee" if a.dtype == torch.float32 else "tf32",  # of products in float32
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

        The first pass with inputs of new shapes is captured, up to ``MAX_RECORDINGS`` times. All other passes run as
        in :class:`AdaptedModel`.

        Args:
            tensors: The users' tensors, from :meth:`Adapters.prepare`.
            present: The experts that each user has.
            inputs: Token ids ``(users, batch, context)``.
        """
        is_training = torch.is_grad_enabled() and any(t.requires_grad for t in tensors.values())
        records_gates = any(mlp.router.record_gates for mlp in self.adapters.experts.values())
        estimates_memory = isinstance(inputs, FakeTensor)
        if not is_training or records_gates or estimates_memory:
            return super().states(tensors, present, inputs)
        # All recordings share memory, which the backward pass of the previous replay may still need.
        if any(recording is not None and recording.busy for recording in self.recordings.values()):
            return super().states(tensors, present, inputs)
        arguments = (*tensors.values(), present, inputs)
        specs = [(t.shape, t.dtype, t.requires_grad) for t in arguments]
        key = (*tensors, *specs)  # a recording serves all passes with the same names, shapes and dtypes
        if key not in self.recordings and len(self.recordings) < MAX_RECORDINGS:
            self.recordings[key] = self._record(tuple(tensors), arguments)
        recording = self.recordings.get(key)
        if recording is None:  # this pass could not be captured, or there are too many
            return super().states(tensors, present, inputs)
        outputs: Any = _Replayed.apply(recording, *arguments)
        hidden, *tensor_penalty = outputs
        if not tensor_penalty:  # a constant penalty is no output of the graph
            return hidden, recording.penalty
        (penalty,) = tensor_penalty
        return hidden, penalty

    def _record(self, names: tuple[str, ...], arguments: Sequence[Tensor]) -> Recording | None:
        """Capture a training pass as CUDA graphs; log a warning and return None if it cannot be captured.

        Args:
            names: Names of the users' tensors.
            arguments: The users' tensors in the order of ``names``, the mask of the experts that each user has, and the
                tokens. Later passes have the same shapes and dtypes.
        """
        # A copy, as the recording must not refer to ``self``, which holds it: a cycle would keep the memory of a pass.
        model = AdaptedModel(**{f.name: getattr(self, f.name) for f in fields(AdaptedModel)})
        pools = [recording.pool for recording in self.recordings.values() if recording is not None]
        shared_pool = pools[0] if pools else None  # all graphs share memory, as only one of them runs at a time

        def run_pass(*static_arguments: Tensor) -> tuple[Tensor, Tensor | float]:
            """Return hidden states and penalty for arguments in the order of ``arguments``."""
            *tensors, present, inputs = static_arguments
            with without_packing():  # do not look for several texts in a row, which cannot be captured
                return model.states(dict(zip(names, tensors, strict=True)), present, inputs)

        try:
            return Recording(run_pass, arguments, shared_pool)
        except RuntimeError as error:
            if lacks_memory(error):
                raise
            reason = " ".join(str(error).split())[:200]
            logger.warning("runtime.gpu: a pass could not be captured and runs without CUDA graphs (%s)", reason)
            return None


class Recording:
    """A function of tensors and its gradients as CUDA graphs, which read and write tensors at fixed addresses."""

    def __init__(self, run: Callable[..., tuple[Tensor, Tensor | float]], examples: Sequence[Tensor], pool: object):
        """Capture a function's forward and backward pass as two CUDA graphs, which are replayed later.

        A replay launches all kernels of a pass at once. Warm-up passes come first, as PyTorch requires.

        Args:
            run: The function of tensors, such as a decoder layer; returns hidden states and a load-balancing penalty.
            examples: Inputs of the shapes of later passes; gradients are computed for those that require one.
            pool: Memory pool that the graphs share with others; None: a new one.
        """
        # A replay reads and writes at the addresses of the captured tensors, so callers copy their inputs into these.
        self.inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in examples]
        self.trained_inputs = [t for t in self.inputs if t.requires_grad]
        self.run = run
        self.penalty = 0.0
        self.last_replay: weakref.ref[ForwardReplay] | None = None
        device = examples[0].device
        warm_up(self._run_once, device)
        if device.type == "cuda" and pool is None:
            pool = torch.cuda.graph_pool_handle()
        self.pool = pool
        self.replay_forward = capture(self._run_forward, device, self.pool)
        self.output_gradients = [torch.empty_like(t) if t.requires_grad else None for t in self.outputs]
        self.replay_backward = capture(self._run_backward, device, self.pool)

    @property
    def busy(self) -> bool:
        """True if the latest forward replay awaits its backward pass: another replay would overwrite its values."""
        if self.last_replay is None:
            return False
        last_replay = self.last_replay()  # None if autograd no longer needs it
        return last_replay is not None and not last_replay.done

    def _run_forward(self) -> None:
        """Run the function on ``inputs``, and store its results in ``outputs``, or in ``penalty`` if it is a number.

        It is captured as the CUDA graph of the forward pass.
        """
        with torch.enable_grad():
            hidden, penalty = self.run(*self.inputs)
        if isinstance(penalty, Tensor):
            self.outputs, self.penalty = [hidden, penalty], 0.0
        else:  # constant
            self.outputs, self.penalty = [hidden], penalty

    def _run_backward(self) -> None:
        """Compute the gradients of the inputs from ``output_gradients``, and store them in ``gradients``.

        It is captured as the CUDA graph of the backward pass.
        """
        outputs, output_gradients = [], []
        for output, gradient in zip(self.outputs, self.output_gradients, strict=True):
            if gradient is not None:
                outputs.append(output)
                output_gradients.append(gradient)
        self.gradients = torch.autograd.grad(outputs, self.trained_inputs, output_gradients, materialize_grads=True)

    def _run_once(self) -> None:
        """Run forward and backward pass without capturing, to warm up, and free the memory of their results."""
        self._run_forward()
        self.output_gradients = [torch.zeros_like(t) if t.requires_grad else None for t in self.outputs]
        self._run_backward()
        del self.outputs, self.output_gradients, self.gradients


class ForwardReplay:
    """A replay of a forward pass, which autograd keeps until the backward pass; ``done`` after the backward pass."""

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
        for static_input, given_input in zip(recording.inputs, given, strict=True):
            static_input.detach().copy_(given_input)
        recording.replay_forward()
        ctx.recording, ctx.replay = recording, ForwardReplay()
        # While `ctx` exists, its backward pass may need the graph's memory, so no other forward pass may be replayed.
        recording.last_replay = weakref.ref(ctx.replay)
        return tuple(output.detach().clone() for output in recording.outputs)

    @staticmethod
    def backward(ctx: Context, *output_gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Replay the backward pass, and return copies of the gradients of the inputs.

        Args:
            ctx: Autograd context.
            *output_gradients: Gradients of the outputs of :meth:`forward`.
        """
        assert not ctx.replay.done, "a second backward pass, but the first has overwritten the memory"
        recording = ctx.recording
        ctx.replay.done = True
        for static_gradient, given_gradient in zip(recording.output_gradients, output_gradients, strict=True):
            if static_gradient is not None:
                static_gradient.copy_(given_gradient)
        recording.replay_backward()
        gradients_of_trained_inputs = iter(recording.gradients)
        input_gradients: list[Tensor | None] = []
        for static_input in recording.inputs:
            gradient = next(gradients_of_trained_inputs).clone() if static_input.requires_grad else None
            input_gradients.append(gradient)
        return None, *input_gradients


@contextmanager
def without_packing() -> Iterator[None]:
    """Disable transformers' detection of several texts in one row, which does not work in the capture of a CUDA graph.

    Each of our rows is one text.
    """
    from transformers import masking_utils

    detector = getattr(masking_utils, _PACKING_DETECTOR, None)
    if detector is None:  # missing in some versions
        yield
        return

    def find_nothing(*_: object, **__: object) -> None:
        return None

    setattr(masking_utils, _PACKING_DETECTOR, find_nothing)
    try:
        yield
    finally:
        setattr(masking_utils, _PACKING_DETECTOR, detector)


_PACKING_DETECTOR = "find_packed_sequence_indices"


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for capturing all CUDA graphs of a device; only one, as cuBLAS has a workspace per stream."""
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
    warm_up_stream, current_stream = capture_stream(device), torch.cuda.current_stream(device)
    warm_up_stream.wait_stream(current_stream)
    with torch.cuda.stream(warm_up_stream):  # also selects its device
        for _ in range(WARMUP_PASSES):
            work()
    current_stream.wait_stream(warm_up_stream)
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
    """Tell PyTorch's allocator that a failed capture has ended, so that it frees the pool.

    PyTorch does so itself for some errors.

    Args:
        device: Device of the capture.
        pool: Memory pool of the graph.
    """
    with suppress(AttributeError, RuntimeError):  # raised if the capture has ended already
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)
