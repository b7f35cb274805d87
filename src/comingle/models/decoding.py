"""Forward passes of whole language models of the Llama family without gradients, in C++ for CPUs.

A pass computes a few tokens: each text's next token, a part of a prompt, or both. The layers of PyTorch need a
thousand small operations for it, and each wakes the threads of a pool. The native pass, ``mixture_decode.h``, is a
single call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from comingle.models.injection import RoutedMLP
from comingle.models.kernels import expert_mlp
from comingle.models.kernels.expert_mlp import MOST_ROWS, Factors, LinearStruct
from comingle.models.lora import LoraLinear, base_weight
from comingle.models.pretrained import PreTrainedModel
from comingle.models.quantised import QuantisedLinear

MODEL_TYPES = ("llama", "mistral", "qwen2")
"""Model types of transformers whose layers native passes compute."""

Linear = tuple[nn.Module, Factors | None]
"""A linear of the base, and its LoRA of each text, of shapes ``(texts, [experts,] rank, width)``."""


_library: ctypes.CDLL | None = None  # None unless `enable` was called


def enable(cache: Path) -> bool:
    """Use native passes from now on, also while training disables other native code; return whether this succeeded.

    Args:
        cache: Folder of compiled libraries; the code is compiled if it is not there.
    """
    global _library
    _library = expert_mlp.load(cache)
    return _library is not None


def disable() -> None:
    """Use native passes only while the kernels of :mod:`comingle.models.kernels.expert_mlp` are enabled."""
    global _library
    _library = None


def _library_in_use() -> ctypes.CDLL | None:
    """Return the native library; None if it is not in use."""
    return _library or expert_mlp.library()


def is_enabled() -> bool:
    """Return whether native passes are in use."""
    return _library_in_use() is not None


class KeyValueStores(Protocol):
    """Cache of the keys and values of texts that all end at the same position."""

    starts: list[int]
    """Position of each text's first token."""
    stop: int
    """Position of the next token."""
    layers: list[Any]
    """Layers, whose ``stores`` are the keys and the values ``(texts or more, groups, capacity, head)``."""


class _LayerStruct(ctypes.Structure):
    """``struct DecodeLayer`` of mixture_decode.h."""

    _fields_ = (
        *[(n, ctypes.c_void_p) for n in ("attention_norm", "mlp_norm")],
        *[(n, LinearStruct) for n in ("q", "k", "v", "o", "gate", "up", "down")],
        *[(n, ctypes.c_void_p) for n in ("router", "keys", "values")],
    )


class _BatchStruct(ctypes.Structure):
    """``struct DecodeBatch`` of mixture_decode.h."""

    _fields_ = (
        *[(n, ctypes.c_int64) for n in ("rows", "share", "capacity", "stop")],
        ("layer", ctypes.POINTER(_LayerStruct)),
        *[(n, ctypes.c_void_p) for n in ("present", "x", "cos", "sin", "starts", "logits")],
    )


class _DecodeStruct(ctypes.Structure):
    """``struct Decode`` of mixture_decode.h."""

    _fields_ = (
        *[(n, ctypes.c_int64) for n in ("batches", "layers", "width", "heads", "groups", "head")],
        *[(n, ctypes.c_int64) for n in ("hidden", "experts", "top_k", "act", "bf16", "threads")],
        *[(n, ctypes.c_float) for n in ("epsilon", "attention_scale", "scale")],
        ("batch", ctypes.POINTER(_BatchStruct)),
        ("norm", ctypes.c_void_p),
        ("head_layer", LinearStruct),
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch:
    """Tokens of some texts for a native pass.

    Args:
        struct: Addresses and sizes for the native code. The caller keeps the tensors of the cache alive.
        inputs: What the native code reads by address: tensors, and the structs of the layers.
        logits: The logits after each text's last token, ``(texts, vocab)``, which the pass writes; None if not wanted.
    """

    struct: _BatchStruct
    inputs: Sequence[object]
    logits: Tensor | None


class NativeNetwork:
    """Native passes of a network with the adapters that were bound to its modules when it was made.

    :meth:`rebind` returns one for other adapters, which takes less time than making a new one.
    """

    def __init__(self, network: PreTrainedModel, texts: int) -> None:
        """Collect the addresses of all weights and adapters.

        Args:
            network: A network that :func:`supports` accepts.
            texts: Number of texts, each with adapters of its own.
        """
        library = _library_in_use()
        assert library is not None
        self._library = library  # the kernels of `expert_mlp` may be disabled meanwhile, as when a training run begins
        model: Any = network.model
        config: Any = network.config
        self._network: Any = network
        self._embed, self._rotary = model.embed_tokens, model.rotary_emb
        first_mlp = _Mlp(model.layers[0].mlp)
        attention = model.layers[0].self_attn
        self._dtype: torch.dtype = self._embed.weight.dtype
        self._layers = (_LayerStruct * len(model.layers))()
        self._call = _DecodeStruct(
            layers=len(model.layers),
            width=config.hidden_size,
            heads=config.num_attention_heads,
            groups=config.num_key_value_heads,
            head=attention.head_dim,
            hidden=config.intermediate_size,
            experts=first_mlp.num_experts,
            top_k=first_mlp.top_k,
            act=expert_mlp.ACTIVATION_CODES[expert_mlp.ACTIVATIONS[config.hidden_act]],
            bf16=self._dtype == torch.bfloat16,
            epsilon=config.rms_norm_eps,
            attention_scale=attention.scaling,
            scale=_scales(network).pop(),
            norm=model.norm.weight.data_ptr(),
        )
        _fill_weights(self._call.head_layer, network.lm_head)
        for struct, layer in zip(self._layers, model.layers, strict=True):
            struct.attention_norm = layer.input_layernorm.weight.data_ptr()
            struct.mlp_norm = layer.post_attention_layernorm.weight.data_ptr()
            for name, (module, _) in _linears(layer).items():
                _fill_weights(getattr(struct, name), module)
        self._bind(texts)

    def rebind(self, texts: int) -> NativeNetwork:
        """Return native passes with the adapters that are bound now; those of this object stay as they are.

        Args:
            texts: Number of texts, each with adapters of its own.
        """
        other = copy(self)
        other._layers = type(self._layers).from_buffer_copy(self._layers)
        other._bind(texts)
        return other

    def _bind(self, texts: int) -> None:
        """Write the addresses of the bound adapters, in the base's number format, into the C structs."""
        self._kept_alive: list[Tensor] = []
        """Tensors that the native code reads by address."""
        layers: Sequence[Any] = self._network.model.layers
        present = _Mlp(layers[0].mlp).present
        self._present = self._address((torch.ones(texts, 1) if present is None else present).to(torch.uint8))
        for struct, layer in zip(self._layers, layers, strict=True):
            for name, (_, factors) in _linears(layer).items():
                if factors is not None:
                    a, b = (factor.to(self._dtype) for factor in factors)
                    self._kept_alive += expert_mlp.fill_factors(getattr(struct, name), (a, b))
            if isinstance(layer.mlp, RoutedMLP) and layer.mlp.router.weight is not None:
                struct.router = self._address(layer.mlp.router.weight.float())

    def _address(self, t: Tensor) -> int:
        """Return the address of a contiguous copy of a tensor, which is kept."""
        t = t.contiguous()
        self._kept_alive.append(t)
        return t.data_ptr()

    def decode(
        self,
        ids: Int[Tensor, "texts 1"],
        positions: Int[Tensor, "texts 1"],
        cache: KeyValueStores,
        prompt_batch: Batch | None = None,
    ) -> Float[Tensor, "texts vocab"]:
        """Compute the logits after each text's new token.

        Keys and values of the new tokens are written at position ``cache.stop``; the caller advances the cache.

        Args:
            ids: The new tokens.
            positions: Position of each in its text.
            cache: Keys and values of the earlier tokens.
            prompt_batch: Part of a prompt of another text, which the same pass reads; from :meth:`make_prompt_batch`
                of native passes with that text's adapters.
        """
        stores = [layer.stores for layer in cache.layers]
        batch = self._make_batch(ids, positions, stores, cache.starts, cache.stop)
        self._run([batch] if prompt_batch is None else [batch, prompt_batch])
        assert batch.logits is not None
        return batch.logits

    def read(
        self,
        ids: Int[Tensor, "texts n"],
        positions: Int[Tensor, "texts n"],
        starts: Sequence[int],
        cache: DynamicCache,
    ) -> Float[Tensor, "texts vocab"]:
        """Return the logits after each text's last token, and append keys and values of all tokens to the cache.

        Args:
            ids: Tokens of the texts, padded on the left.
            positions: Position of each token in its text; any for padding.
            starts: Index of each text's first token in the cache, after the padding.
            cache: Keys and values of the tokens before ``ids``.
        """
        texts, n = ids.shape
        cached = cache.get_seq_length()
        stores = self._append_positions(cache, texts, n)
        most = max(1, MOST_ROWS // texts)
        logits: Tensor | None = None
        for start in range(0, n, most):
            tokens = slice(start, min(start + most, n))
            is_last = tokens.stop == n
            batch = self._make_batch(
                ids[:, tokens], positions[:, tokens], stores, starts, cached + start, predicts=is_last
            )
            self._run([batch])
            logits = batch.logits
        assert logits is not None
        return logits

    def make_prompt_batch(
        self, ids: Int[Tensor, "1 n"], positions: Int[Tensor, "1 n"], cache: DynamicCache, *, num_left: int
    ) -> Batch:
        """Return a part of a text's prompt for :meth:`decode`, whose pass writes its keys and values to the cache.

        Args:
            ids: The tokens.
            positions: Position of each in the text.
            cache: Keys and values of the prompt's earlier tokens; those of ``ids`` are appended.
            num_left: Number of tokens to the prompt's end, those of ``ids`` included. If ``ids`` are all of them, the
                pass computes the logits after the last one.
        """
        cached = cache.get_seq_length()
        stores = self._append_positions(cache, 1, ids.shape[1], reserve=num_left)
        return self._make_batch(ids, positions, stores, [0], cached, predicts=ids.shape[1] == num_left)

    def _append_positions(
        self, cache: DynamicCache, texts: int, n: int, reserve: int = 0
    ) -> list[tuple[Tensor, Tensor]]:
        """Append ``n`` positions to a cache, whose content a pass writes; return each layer's keys and values.

        Args:
            cache: The cache; its tensors are not in use elsewhere.
            texts: Number of texts.
            n: Number of positions.
            reserve: Positions to allocate where new memory is needed; at least ``n`` are allocated.
        """
        groups, head, is_empty = self._call.groups, self._call.head, not cache.get_seq_length()
        layers: list[Any] = cache.layers
        stores: list[tuple[Tensor, Tensor]] = []
        for i in range(len(self._layers)):
            if is_empty:
                nothing = torch.empty(texts, groups, 0, head, dtype=self._dtype)
                cache.update(nothing, nothing, i)  # creates the layer
            layer = layers[i]
            layer.keys, layer.values = (
                _with_more_positions(states, n, reserve) for states in (layer.keys, layer.values)
            )
            stores.append((layer.keys, layer.values))
        return stores

    def _make_batch(
        self,
        ids: Int[Tensor, "texts n"],
        positions: Int[Tensor, "texts n"],
        stores: Sequence[Sequence[Tensor]],
        starts: Sequence[int],
        stop: int,
        *,
        predicts: bool = True,
    ) -> Batch:
        """Return ``n`` consecutive tokens of each text for a native pass.

        Args:
            ids: The tokens.
            positions: Position of each token in its text.
            stores: Keys and values of each layer, ``(texts or more, groups, positions, head)``, where positions after
                those in the tensor may follow in memory; those of the tokens are written from ``stop``.
            starts: Position in the stores of each text's first token.
            stop: Position in the stores of the first of the tokens.
            predicts: Compute logits.
        """
        texts, n = ids.shape
        x = self._embed(ids).float().contiguous()
        cos, sin = (t.contiguous() for t in self._rotary(x, positions))  # (texts, n, head)
        first_positions = torch.tensor(starts)
        logits = x.new_empty(texts, self._call.head_layer.d_out) if predicts else None
        layers = type(self._layers).from_buffer_copy(self._layers)
        for struct, (keys, values) in zip(layers, stores, strict=True):
            struct.keys, struct.values = keys.data_ptr(), values.data_ptr()
        batch = _BatchStruct(
            rows=texts * n,
            share=n,
            capacity=_capacity(stores[0][0]),
            stop=stop,
            layer=layers,
            present=self._present,
            x=x.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            starts=first_positions.data_ptr(),
            logits=None if logits is None else logits.data_ptr(),
        )
        return Batch(struct=batch, inputs=(x, cos, sin, first_positions, layers), logits=logits)

    def _run(self, batches: Sequence[Batch]) -> None:
        """Run a native pass over all tokens of batches, which writes their logits, keys and values."""
        structs = (_BatchStruct * len(batches))(*(batch.struct for batch in batches))
        self._call.batches, self._call.batch = len(batches), structs
        self._call.threads = torch.get_num_threads()
        self._library.decode_step(ctypes.byref(self._call))


def _capacity(states: Float[Tensor, "texts groups positions head"]) -> int:
    """Return how many positions the memory of keys or values has; not of empty ones, whose strides say 1."""
    return states.stride(1) // states.shape[3]


def _with_more_positions(
    states: Float[Tensor, "texts groups positions head"], n: int, reserve: int
) -> Float[Tensor, "texts groups extended head"]:
    """Return keys or values with ``n`` more positions, whose content is undefined; in the same memory if they fit.

    Args:
        states: Keys or values.
        n: Number of positions to append.
        reserve: Positions to allocate after the present ones if the new ones do not fit; at least ``n``.
    """
    texts, groups, cached, head = states.shape
    if cached and cached + n <= _capacity(states):
        return states.as_strided((texts, groups, cached + n, head), states.stride())
    store = states.new_empty(texts, groups, cached + max(n, reserve), head)
    store[:, :, :cached] = states
    return store[:, :, : cached + n]


class _Mlp:
    """The MLP of a layer as native passes compute it: a mixture of experts, or one with a single expert.

    Attributes:
        linears: The linears "gate", "up" and "down".
        num_experts: Number of experts.
        top_k: Largest number of experts that a token uses.
        present: Which experts each text has; None for all.
    """

    def __init__(self, module: nn.Module) -> None:
        """Read the parts of an MLP.

        Args:
            module: A mixture of experts, or an MLP of transformers whose linears may have a LoRA.
        """
        self.num_experts, self.top_k = 1, 1
        self.present: Tensor | None = None
        if not isinstance(module, RoutedMLP):
            self.linears = {name: _linear(module.get_submodule(f"{name}_proj")) for name in ("gate", "up", "down")}
            return
        modules = {**dict(module.first.items()), "down": module.last}
        self.linears = {name: (linear, module.factors[name]) for name, linear in modules.items()}
        self.num_experts, self.top_k = module.router.present.shape[1], module.router.top_k
        self.present = module.router.present


def _fill_weights(struct: LinearStruct, module: nn.Module) -> None:
    """Write the addresses of a linear's weights into a C struct."""
    if not isinstance(module, QuantisedLinear):
        expert_mlp.fill_linear_struct(struct, base_weight(module), None)
        return
    struct.weight, struct.scales = module.packed.data_ptr(), module.scales.data_ptr()
    struct.bias = None if module.bias is None else module.bias.data_ptr()
    struct.d_out, struct.d_in = module.out_features, module.in_features


def _linears(layer: Any) -> dict[str, Linear]:
    """Return the linears of a decoder layer by their names in the C struct."""
    attention = {name: _linear(getattr(layer.self_attn, f"{name}_proj")) for name in ("q", "k", "v", "o")}
    return {**attention, **_Mlp(layer.mlp).linears}


def _linear(module: nn.Module) -> Linear:
    """Return a linear of the base, and the LoRAs of the texts if it has any."""
    if isinstance(module, LoraLinear):
        return module.linear, module.factors
    return module, None


def _scales(network: nn.Module) -> set[float]:
    """Return the different LoRA scales of a network's modules; 1.0 without any."""
    scales = {module.scale for module in network.modules() if isinstance(module, LoraLinear | RoutedMLP)}
    return scales or {1.0}


def supports(network: PreTrainedModel) -> bool:
    """Return whether native passes are in use and support a network and the adapters that are bound to it.

    They support float32 and bfloat16 on a CPU, full attention, and mixtures of experts with softmax gates. PyTorch
    computes other networks.
    """
    config: Any = network.config
    if _library_in_use() is None or config.model_type not in MODEL_TYPES or config.hidden_act not in _ACTIVATIONS:
        return False
    layers: Sequence[Any] = network.model.layers
    if any(getattr(layer.self_attn, "sliding_window", None) is not None for layer in layers):
        return False
    if len(_scales(network)) > 1 or not all(_supports_mlp(layer.mlp) for layer in layers):
        return False
    linears = [network.lm_head, *(m for layer in layers for m in layer.modules() if isinstance(m, nn.Linear))]
    embedding, norm = network.model.embed_tokens.weight, network.model.norm.weight
    return embedding.dtype == norm.dtype and all(_supports_linear(linear, embedding) for linear in linears)


def _supports_linear(linear: nn.Linear, embedding: Tensor) -> bool:
    """Return whether native code can compute a linear: a packed one, or a plain one in the base's number format.

    Args:
        linear: A linear of the base.
        embedding: Weight of the base's embedding, which has that number format.
    """
    if isinstance(linear, QuantisedLinear):
        return linear.is_packed and expert_mlp.fits(linear.packed.device, embedding.dtype)
    weight = linear.weight
    is_plain = type(linear) in (nn.Linear, expert_mlp.RowsLinear)
    return is_plain and expert_mlp.fits(weight.device, weight.dtype) and expert_mlp.fits_weight(weight, embedding)


_ACTIVATIONS = {name for name, act in expert_mlp.ACTIVATIONS.items() if act in expert_mlp.ACTIVATION_CODES}


def _supports_mlp(module: nn.Module) -> bool:
    """Return whether native passes support an MLP: its gates are a softmax over all or the largest logits."""
    if not isinstance(module, RoutedMLP):
        return True
    router = module.router
    has_softmax_gates = router.gating is None and not router.record_gates
    has_row_per_expert = router.weight is None or router.weight.shape[1] == router.present.shape[1]
    return module.mix == "output" and "gate" in module.first and has_softmax_gates and has_row_per_expert
