"""A user's model as an architecture of transformers or as a PEFT adapter.

``W + sum_j s_j B_j A_j`` over E experts (or clusters) of rank r is one LoRA of rank E r: the concatenated factors, with
the shares s multiplied into B.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from comingle.models import routing
from comingle.models.adapted import AdaptedModel
from comingle.models.kernels.expert_mlp import SHORT
from comingle.models.layouts import linear_names
from comingle.models.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, weight_shape
from comingle.models.personal import (
    WIDE,
    Change,
    ModelInfo,
    average_experts,
    changes_of_adapted,
    changes_of_mixed,
    why_not_merged,
)
from comingle.models.pretrained import PreTrainedConfig, PreTrainedModel
from comingle.models.stacked import MixedLanguageModel
from comingle.utils.errors import BaseModelError, DataError
from comingle.utils.records import write_json
from comingle.utils.trees import Tree

_KEYS_NOT_COPIED = ("model_type", "architectures", "transformers_version", "_name_or_path", "dtype", "layer_types")
"""Keys of the base's configuration that that of a sparse mixture does not take over."""
_EXPERTS, _GATE = "mlp.experts", "mlp.gate.weight"


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Routers of a sparse mixture.

    Args:
        top_k: Number of experts that each token uses.
        gates: Router weights, one matrix per block; logits are ``gates @ token``.
    """

    top_k: int
    gates: Sequence[Float[Tensor, "experts width"]]


@dataclass(frozen=True, kw_only=True)
class _SparseArchitecture:
    """A mixture-of-experts architecture of transformers.

    Args:
        model_type: Its model type, such as "mixtral".
        num_experts_key: The key of the number of experts in its configuration.
        expert_width_key: The key of the experts' width in its configuration.
        fixed: Values of its configuration that do not depend on the base.
    """

    model_type: str
    num_experts_key: str
    expert_width_key: str
    fixed: Mapping[str, Any]


_MIXTRAL = _SparseArchitecture(
    model_type="mixtral", num_experts_key="num_local_experts", expert_width_key="intermediate_size", fixed={}
)
_QWEN3 = _SparseArchitecture(
    model_type="qwen3_moe",
    num_experts_key="num_experts",
    expert_width_key="moe_intermediate_size",
    fixed={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
)
SPARSE = {"llama": _MIXTRAL, "mistral": _MIXTRAL, "qwen3": _QWEN3}
"""Sparse architectures by the base's model type. Each of their experts is the base's MLP, gated by one linear map."""


def why_not_sparse(config: PreTrainedConfig) -> str:
    """Return the reason why transformers has no sparse mixture of experts for a base; empty if it has one."""
    kind = config.model_type
    if kind not in SPARSE:
        return f"transformers has no sparse mixture of experts for {kind}; allowed: {', '.join(SPARSE)}"
    if getattr(config, "mlp_bias", False):
        return "its MLPs have biases, which the experts of a sparse mixture do not support"
    if kind != "qwen3" and getattr(config, "attention_bias", False):
        return "its attention has biases, which Mixtral does not support"
    layer_types = set(getattr(config, "layer_types", None) or ())
    if len(layer_types) > 1:
        return "only some of its layers have a sliding window; a sparse mixture needs the same in all layers"
    return ""


@torch.no_grad()
def plain_network(base: PreTrainedModel, changes: Sequence[Change]) -> PreTrainedModel:
    """Return a copy of the base in float32 or a more precise dtype, with every change added to its weight."""
    network = _float32_copy(base)
    for change in changes:
        change.add_to(network.get_parameter(f"{change.name}.weight"))
    return network


@torch.no_grad()
def sparse_network(base: PreTrainedModel, changes: Sequence[Change], routing: Routing) -> PreTrainedModel:
    """Return a mixture-of-experts network of transformers that computes the same as the base with experts and routers.

    Each expert is the base's MLP with that expert's change merged in.

    Args:
        base: The base model, for which :func:`why_not_sparse` returns an empty string.
        changes: Changes of the base's weights; those with a ``key`` belong to experts.
        routing: The routers.
    """
    from transformers import AutoModelForCausalLM

    other_changes: list[Change] = []  # such as those of attention
    expert_changes: dict[int, dict[str, Change]] = {}  # by layer, and by "gate", "up" or "down"
    for change in changes:
        if change.key:
            expert_changes.setdefault(change.layer, {})[change.key] = change
        else:
            other_changes.append(change)
    merged = plain_network(base, other_changes)
    config = _sparse_config(base, num_experts=len(routing.gates[0]), top_k=routing.top_k)
    # Outside MLPs, both networks have the same tensors. Those of MLPs are replaced with experts and routers.
    state = {name: tensor for name, tensor in merged.state_dict().items() if ".mlp." not in name}
    for layer, changes_of_layer in expert_changes.items():
        layer_prefix, _mlp, _linear = changes_of_layer["up"].name.rpartition("mlp.")  # such as "model.layers.0."
        gate = _expert_weights(merged, changes_of_layer["gate"])
        up = _expert_weights(merged, changes_of_layer["up"])
        down = _expert_weights(merged, changes_of_layer["down"])
        state[f"{layer_prefix}{_EXPERTS}.gate_up_proj"] = torch.cat([gate, up], 1)
        state[f"{layer_prefix}{_EXPERTS}.down_proj"] = down
        state[f"{layer_prefix}{_GATE}"] = routing.gates[layer].to(down)
    with torch.random.fork_rng(devices=[]):  # the random initial values are replaced below
        network = AutoModelForCausalLM.from_config(config, dtype=WIDE, experts_implementation="eager")
    network.load_state_dict(state, assign=True)
    network.tie_weights()
    return network.eval().requires_grad_(False)


def check_same_logits(
    name: str,
    user_logits: Float[Tensor, "*batch vocab"],
    exported_logits: Float[Tensor, "*batch vocab"],
    dtype: torch.dtype,
) -> None:
    """Raise an error if the exported network does not compute the same logits as the user's model.

    Args:
        name: The user.
        user_logits: Logits of the user's model.
        exported_logits: Logits of the exported network.
        dtype: The base's dtype.

    Raises:
        BaseModelError: The logits differ by more than rounding errors.
    """
    difference = exported_logits.to(user_logits) - user_logits
    relative_error = float(difference.double().norm() / user_logits.double().norm())
    tolerance = 0.05 if dtype in SHORT else 1e-4  # SHORT: dtypes of 16 bits
    is_same = relative_error <= tolerance  # False for NaN
    if not is_same:
        raise BaseModelError(
            f"user {name!r}: the exported model's logits differ from the trained model's by {relative_error:.1%}, so "
            "nothing is written; the base has a feature that export does not support"
        )


def needs_eager_experts(config: PreTrainedConfig) -> bool:
    """Return whether transformers' default implementation of experts fails for a network of these sizes.

    It calls ``torch.nn.functional.grouped_mm``, which needs rows whose length is a multiple of 16 bytes, such as 8
    numbers in bfloat16.
    """
    for architecture in SPARSE.values():
        if architecture.model_type == config.model_type:
            row_lengths = [config.hidden_size, getattr(config, architecture.expert_width_key)]
            return any(length % 8 != 0 for length in row_lengths)
    return False  # a network without experts


def cast_parameters(network: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Cast the parameters to ``dtype`` in place and return the network; buffers such as rotary frequencies stay."""
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)
    network.config.dtype = dtype
    return network


def check_sparse(name: str, config: PreTrainedConfig) -> None:
    """Raise an error if transformers has no mixture-of-experts architecture for a base.

    Args:
        name: The user, for the error.
        config: The base's configuration.

    Raises:
        DataError: There is no such architecture; the message names the reason and a format that works.
    """
    reason = why_not_sparse(config)
    if reason:
        raise DataError(
            f"user {name!r}: a mixture of experts on this base cannot be exported exactly: {reason}; "
            "--format merged-approximately writes a plain model and measures the loss"
        )


def _float32_copy(base: PreTrainedModel) -> PreTrainedModel:
    """Return a deep copy of the base on the CPU, in float32 or a more precise dtype."""
    network = copy.deepcopy(base).cpu()
    for parameter in network.parameters():
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, WIDE))
    network.config.use_cache = True  # Training disables it.
    return network


def _expert_weights(merged: PreTrainedModel, change: Change) -> Float[Tensor, "experts d_out d_in"]:
    """Return one linear layer's weight in the base plus its change, for each expert.

    Args:
        merged: Network with the base's weights.
        change: The changes of the layer by all experts.
    """
    weight = merged.get_parameter(f"{change.name}.weight")
    expert_weights = []
    for expert in range(len(change.a)):
        product = change.only_expert(expert).summed()  # scale * B A of this expert
        expert_weights.append(weight + product.to(weight))
    return torch.stack(expert_weights)


def _sparse_config(base: PreTrainedModel, *, num_experts: int, top_k: int) -> object:
    """Return the configuration of a mixture-of-experts network whose experts have the shape of a base's MLP.

    It is a Mixtral for the bases Llama and Mistral, and a Qwen3-MoE for Qwen3. All other values, such as the sizes of
    attention, are the base's.

    Args:
        base: The base, a dense model.
        num_experts: Number of experts.
        top_k: Number of experts per token.
    """
    from transformers import AutoConfig

    architecture, base_values = SPARSE[base.config.model_type], base.config.to_dict()
    values = {key: value for key, value in base_values.items() if key not in _KEYS_NOT_COPIED}
    values.update(architecture.fixed)
    if architecture is _QWEN3:
        has_sliding_layers = "sliding_attention" in (getattr(base.config, "layer_types", None) or ())
        if not has_sliding_layers:  # Qwen3's configuration may have a window that no layer uses; drop it
            values["sliding_window"] = None
    values.setdefault("sliding_window", None)  # else the architecture's default, which may be a window, would apply
    values["use_cache"] = True
    values[architecture.num_experts_key] = num_experts
    values[architecture.expert_width_key] = base_values["intermediate_size"]
    values["num_experts_per_tok"] = top_k
    return AutoConfig.for_model(architecture.model_type, **values)


@dataclass(frozen=True, kw_only=True)
class Source:
    """The user's model to export.

    Args:
        name: The user.
        model: The model of all users.
        tensors: The user's tensors, shapes ``(1, ...)``.
        row: The user's index among all users of the run.
        model_info: What the run knows about the user's data and scores; None without a run.
        logits: Computes the logits of the user's model.
    """

    name: str
    model: AdaptedModel | MixedLanguageModel
    tensors: Tree
    row: int
    model_info: ModelInfo | None
    logits: Callable[[Int[Tensor, "batch n"]], Float[Tensor, "batch n vocab"]]


def why_not_plain(source: Source) -> str:
    """Return the reason why the model cannot be merged into the base's weights; empty if it can."""
    model = source.model
    return why_not_merged(model, source.row) if isinstance(model, AdaptedModel) else ""


def is_mixture(source: Source) -> bool:
    """Return whether the model mixes the outputs of nonlinear experts."""
    return bool(why_not_plain(source))


def format_hint(source: Source) -> str:
    """Return advice on the ``--format`` that can export a model that mixes experts, to end an error message with."""
    has_exact_format = not why_not_sparse(source.model.base.model.config) and not unsupported_mixing(source)
    if has_exact_format:
        return "--format transformers is exact"
    return "--format merged-approximately exports a plain model and measures how much worse it is"


def unsupported_mixing(source: Source) -> str:
    """Return how a model mixes its experts if no architecture of transformers mixes them in this way; else "".

    The architectures mix the outputs of whole MLPs, with a softmax over the router's logits. The result completes the
    sentence "its experts are ...", for example "mixed inside each linear layer".
    """
    if not isinstance(source.model, AdaptedModel):
        return ""
    mlps = source.model.adapters.experts.values()
    if any(mlp.mix == "linear" for mlp in mlps):
        return "mixed inside each linear layer"
    for mlp in mlps:
        if mlp.router.gating is not None:  # another function than a softmax
            return str(mlp.router.gating)
    return ""


def changes_of(source: Source) -> list[Change]:
    """Return the changes of the base's weights by the user's adapters, one per adapted linear layer.

    A change has the LoRAs of all the user's experts, each as if its gate were 1; for a mixture of clusters' LoRAs it
    has those of all clusters, with the user's mixture weights.
    """
    if isinstance(source.model, AdaptedModel):
        return changes_of_adapted(source.model, source.tensors, source.row)
    return changes_of_mixed(source.model, source.tensors)


def plain_changes(source: Source) -> list[Change]:
    """Return one change per adapted linear layer: the average of the experts' changes."""
    return average_experts(changes_of(source))


def routing_of(source: Source) -> Routing:
    """Return the routers of a user's model, for the experts that the user has.

    A model without routers averages its experts. It gets routers of zeros that choose all experts with equal gates.
    """
    model = source.model
    assert isinstance(model, AdaptedModel)
    present = model.adapters.present[source.row]  # (experts,): whether the user has the expert
    num_experts = int(present.sum())
    router_weights: list[Tensor] = []  # one (num_experts, width) per layer
    for name, mlp in model.adapters.experts.items():
        router = source.tensors.get(f"{name}.router")  # (1, experts, width)
        if router is None:
            _d_out, width = weight_shape(mlp.first["up"])
            router_weights.append(torch.zeros(num_experts, width))
        else:
            router_weights.append(router.squeeze(0).cpu()[present])
    if not routing.routed(model.adapters):
        return Routing(top_k=num_experts, gates=router_weights)
    any_mlp = next(iter(model.adapters.experts.values()))  # top_k is the same in all layers
    return Routing(top_k=min(any_mlp.router.top_k, num_experts), gates=router_weights)


def write_peft(
    folder: Path, base: PreTrainedModel, base_name: str, changes: Sequence[Change], dtype: torch.dtype
) -> int:
    """Write a LoRA as an adapter for PEFT: ``adapter_config.json`` and ``adapter_model.safetensors``.

    Args:
        folder: Where to write.
        base: The base model.
        base_name: Its name in the adapter's configuration.
        changes: One change per adapted linear layer; its experts' LoRAs are written as one LoRA.
        dtype: Dtype of the written factors.

    Returns:
        The LoRA's rank.
    """
    rank, factors_by_name = lora_factors(changes)
    tensors = {}
    for name, (a, b) in factors_by_name.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.to(dtype).contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.to(dtype).contiguous()
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    transposed = changes[0].transposed  # the same for all changes
    config = _peft_config(base, base_name, list(factors_by_name), rank, transposed)
    write_json(folder / ADAPTER_CONFIG, config)
    return rank


def lora_factors(changes: Sequence[Change]) -> tuple[int, dict[str, tuple[Tensor, Tensor]]]:
    """Return one LoRA that equals the changes, with the same rank in all layers, as other programs need it.

    Args:
        changes: One change per adapted linear layer.

    Returns:
        The rank, and by name of the layer the factors A ``(rank, d_in)`` and B ``(d_out, rank)``. Factors of a lower
        rank, as narrow layers may have, are padded with zeros.
    """
    factors_by_name = {change.name: _factors(change) for change in changes}
    rank = max(a.shape[0] for a, _b in factors_by_name.values())
    padded = {}
    for name, (a, b) in factors_by_name.items():
        num_zeros = rank - a.shape[0]
        padded[name] = F.pad(a, (0, 0, 0, num_zeros)), F.pad(b, (0, num_zeros))
    return rank, padded


def _factors(change: Change) -> tuple[Float[Tensor, "rank d_in"], Float[Tensor, "d_out rank"]]:
    """Return the factors A and B of one LoRA that equals the change: the experts' factors, concatenated."""
    scaled_b = change.b * change.shares.view(-1, 1, 1)
    return change.a.flatten(0, 1), scaled_b.flatten(0, 1).mT


def _peft_config(
    base: PreTrainedModel, base_name: str, names: Sequence[str], rank: int, transposed: bool
) -> dict[str, object]:
    """Return the content of PEFT's ``adapter_config.json``.

    Args:
        base: The base.
        base_name: Name from which PEFT loads it.
        names: Names of the adapted linear layers.
        rank: LoRA rank.
        transposed: Whether weights are ``(d_in, d_out)``, as GPT-2's.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,  # Scale 1: B includes our scale.
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": transposed,
        "init_lora_weights": True,
        "target_modules": _targets(base, names),
    }


def _targets(base: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """Return PEFT's ``target_modules``: short names such as "q_proj", or full names if short ones would match others.

    PEFT adapts every layer whose name ends with a target module.

    Args:
        base: The base model.
        names: Full names of the adapted linear layers.
    """

    def short_name(name: str) -> str:
        return name.rpartition(".")[2]

    short_names = {short_name(name) for name in names}
    matched = {name for name in linear_names(base) if short_name(name) in short_names}
    if matched == set(names):
        return sorted(short_names)
    return sorted(names)
