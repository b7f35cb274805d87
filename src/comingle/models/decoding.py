"""A whole decoding step of language models of the Llama family, in C++ for CPUs.

A step computes one token for each of a few rows. The layers of PyTorch need a thousand small operations for it, and
each wakes the threads of a pool. The native step, ``mixture_decode.h``, needs a single call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from comingle.models.injection import RoutedMLP
from comingle.models.kernels import expert_mlp
from comingle.models.kernels.expert_mlp import Factors, LinearStruct, Weights
from comingle.models.lora import LoraLinear, base_weight
from comingle.models.pretrained import PreTrainedModel

MODEL_TYPES = ("llama", "mistral", "qwen2")
"""Model types of transformers whose layers the native step computes."""

Linear = tuple[Weights, Factors | None]
"""Weight and bias of a linear, and its LoRA of each row, of shapes ``(rows, [experts,] rank, width)``."""


class KeyValueStores(Protocol):
    """Cache of the keys and values of rows that all end at the same position."""

    starts: list[int]
    """Position of each row's first token."""
    stop: int
    """Position of the next token."""
    capacity: int
    """Number of positions that are allocated."""
    layers: list[Any]
    """Layers, whose ``stores`` are the keys and the values ``(max_rows, heads, capacity, width)``."""


class _Layer(ctypes.Structure):
    """``struct DecodeLayer`` of mixture_decode.h."""

    _fields_ = (
        *[(n, ctypes.c_void_p) for n in ("attention_norm", "mlp_norm")],
        *[(n, LinearStruct) for n in ("q", "k", "v", "o", "gate", "up", "down")],
        *[(n, ctypes.c_void_p) for n in ("router", "keys", "values")],
    )


class _Decode(ctypes.Structure):
    """``struct Decode`` of mixture_decode.h."""

    _fields_ = (
        *[(n, ctypes.c_int64) for n in ("rows", "layers", "width", "heads", "groups", "head", "hidden", "experts")],
        *[(n, ctypes.c_int64) for n in ("top_k", "act", "capacity", "stop", "bf16", "threads")],
        *[(n, ctypes.c_float) for n in ("epsilon", "attention_scale", "scale")],
        ("layer", ctypes.POINTER(_Layer)),
        ("norm", ctypes.c_void_p),
        ("head_layer", LinearStruct),
        *[(n, ctypes.c_void_p) for n in ("present", "x", "cos", "sin", "starts", "logits")],
    )


class DecodingStep:
    """The native decoding step of a network with the adapters that are bound to its modules at present.

    Make a new one whenever other adapters are bound.
    """

    def __init__(self, network: PreTrainedModel, rows: int) -> None:
        """Collect the addresses of all weights and adapters.

        Args:
            network: A network that :func:`supports` accepts.
            rows: Number of rows, each with adapters of its own.
        """
        model: Any = network.model
        config: Any = network.config
        self._embed, self._rotary = model.embed_tokens, model.rotary_emb
        self._head: Tensor = base_weight(network.lm_head)[0]
        self._kept_alive: list[Tensor] = []
        """Tensors that the native code reads by address."""
        first_mlp = _mlp(model.layers[0])
        attention = model.layers[0].self_attn
        dtype = self._head.dtype
        self._layers = (_Layer * len(model.layers))()
        self._call = _Decode(
            rows=rows,
            layers=len(model.layers),
            width=config.hidden_size,
            heads=config.num_attention_heads,
            groups=config.num_key_value_heads,
            head=attention.head_dim,
            hidden=config.intermediate_size,
            experts=first_mlp.num_experts,
            top_k=first_mlp.top_k,
            act=expert_mlp.ACTIVATION_CODES[expert_mlp.ACTIVATIONS[config.hidden_act]],
            bf16=dtype == torch.bfloat16,
            epsilon=config.rms_norm_eps,
            attention_scale=attention.scaling,
            scale=_scales(network).pop(),
            layer=self._layers,
            norm=model.norm.weight.data_ptr(),
        )
        self._fill(self._call.head_layer, (base_weight(network.lm_head), None))
        self._call.present = self._address(_present(first_mlp, rows).to(torch.uint8))
        for struct, layer in zip(self._layers, model.layers, strict=True):
            mlp = _mlp(layer)
            struct.attention_norm = layer.input_layernorm.weight.data_ptr()
            struct.mlp_norm = layer.post_attention_layernorm.weight.data_ptr()
            for name in ("q", "k", "v", "o"):
                self._fill(getattr(struct, name), _linear(getattr(layer.self_attn, f"{name}_proj")))
            for name, linear in mlp.linears.items():
                self._fill(getattr(struct, name), linear)
            if mlp.router is not None:
                struct.router = self._address(mlp.router.float())

    def _fill(self, struct: LinearStruct, linear: Linear) -> None:
        """Write the addresses of a linear and its LoRA, in the number format of the weight, into a C struct."""
        weights, factors = linear
        if factors is not None:
            a, b = factors
            dtype = weights[0].dtype
            factors = a.to(dtype), b.to(dtype)
        self._kept_alive += expert_mlp.fill_linear_struct(struct, weights, factors)

    def _address(self, t: Tensor) -> int:
        """Return the address of a contiguous copy of a tensor, which is kept."""
        t = t.contiguous()
        self._kept_alive.append(t)
        return t.data_ptr()

    def __call__(
        self, ids: Int[Tensor, "rows 1"], positions: Int[Tensor, "rows 1"], cache: KeyValueStores
    ) -> Float[Tensor, "rows vocab"]:
        """Return the logits after each row's new token, whose keys and values are written to the cache.

        Args:
            ids: The new tokens.
            positions: Position of each in its row.
            cache: Keys and values of the earlier tokens.
        """
        call = self._call
        x = self._embed(ids).float().contiguous()
        cos, sin = (t.contiguous() for t in self._rotary(x, positions))  # (rows, 1, head width)
        starts = torch.tensor(cache.starts)
        logits = x.new_empty(len(ids), len(self._head))
        for struct, layer in zip(self._layers, cache.layers, strict=True):
            keys, values = layer.stores
            struct.keys, struct.values = keys.data_ptr(), values.data_ptr()
        call.x, call.cos, call.sin = x.data_ptr(), cos.data_ptr(), sin.data_ptr()
        call.starts, call.stop, call.capacity = starts.data_ptr(), cache.stop, cache.capacity
        call.logits, call.threads = logits.data_ptr(), torch.get_num_threads()
        native = expert_mlp.library()
        assert native is not None
        native.decode_step(ctypes.byref(call))
        return logits


class _Mlp:
    """The MLP of a layer as the native step computes it: a mixture of experts, or one with a single expert.

    Attributes:
        linears: The linears "gate", "up" and "down".
        num_experts: Number of experts.
        top_k: Largest number of experts that a token uses.
        present: Which experts each row has; None for all.
        router: Weights of the router, ``(rows, experts, width)``; None without a router.
    """

    def __init__(self, module: nn.Module) -> None:
        """Read the parts of an MLP.

        Args:
            module: A mixture of experts, or an MLP of transformers whose linears may have a LoRA.
        """
        self.num_experts, self.top_k = 1, 1
        self.present: Tensor | None = None
        self.router: Tensor | None = None
        if not isinstance(module, RoutedMLP):
            self.linears = {name: _linear(module.get_submodule(f"{name}_proj")) for name in ("gate", "up", "down")}
            return
        modules = {**dict(module.first.items()), "down": module.last}
        self.linears = {name: (base_weight(linear), module.factors[name]) for name, linear in modules.items()}
        self.num_experts, self.top_k = module.router.present.shape[1], module.router.top_k
        self.present, self.router = module.router.present, module.router.weight


def _mlp(layer: nn.Module) -> _Mlp:
    return _Mlp(layer.get_submodule("mlp"))


def _present(mlp: _Mlp, rows: int) -> Tensor:
    """Return which experts each row has, ``(rows, experts)``."""
    return torch.ones(rows, 1) if mlp.present is None else mlp.present


def _linear(module: nn.Module) -> Linear:
    """Return weight and bias of a linear, and the LoRAs of the rows if it has any."""
    if isinstance(module, LoraLinear):
        return base_weight(module.linear), module.factors
    return base_weight(module), None


def _scales(network: nn.Module) -> set[float]:
    """Return the different LoRA scales of a network's modules; 1.0 without any."""
    scales = {module.scale for module in network.modules() if isinstance(module, LoraLinear | RoutedMLP)}
    return scales or {1.0}


def supports(network: PreTrainedModel) -> bool:
    """Return whether the native step is in use and supports a network and the adapters that are bound to it.

    It supports float32 and bfloat16 on a CPU, full attention, and mixtures of experts with softmax gates. PyTorch
    computes other networks.
    """
    config: Any = network.config
    if not expert_mlp.is_enabled() or config.model_type not in MODEL_TYPES or config.hidden_act not in _ACTIVATIONS:
        return False
    layers: Sequence[Any] = network.model.layers
    if any(getattr(layer.self_attn, "sliding_window", None) is not None for layer in layers):
        return False
    if len(_scales(network)) > 1 or not all(_supports_mlp(layer.mlp) for layer in layers):
        return False
    linears = [network.lm_head, *(m for layer in layers for m in layer.modules() if isinstance(m, nn.Linear))]
    weights = [base_weight(linear)[0] for linear in linears]
    head = weights[0]
    if network.model.embed_tokens.weight.dtype != head.dtype or network.model.norm.weight.dtype != head.dtype:
        return False
    return all(
        type(linear) in (nn.Linear, expert_mlp.RowsLinear)
        and expert_mlp.fits(weight.device, weight.dtype)
        and expert_mlp.fits_weight(weight, head)
        for linear, weight in zip(linears, weights, strict=True)
    )


_ACTIVATIONS = {name for name, act in expert_mlp.ACTIVATIONS.items() if act in expert_mlp.ACTIVATION_CODES}


def _supports_mlp(module: nn.Module) -> bool:
    """Return whether the native step supports an MLP: its gates are a softmax over all or the largest logits."""
    if not isinstance(module, RoutedMLP):
        return True
    router = module.router
    has_softmax_gates = router.gating is None and not router.record_gates
    has_row_per_expert = router.weight is None or router.weight.shape[1] == router.present.shape[1]
    return module.mix == "output" and "gate" in module.first and has_softmax_gates and has_row_per_expert
