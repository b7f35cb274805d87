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
from comingle.models.lora import weight_shape
from comingle.models.personal import (
    WIDE,
    Change,
    ModelInfo,
    averaged,
    changes_of_adapted,
    changes_of_mixed,
    why_not_merged,
)
from comingle.models.pretrained import PreTrainedConfig, PreTrainedModel
from comingle.models.stacked import MixedLanguageModel
from comingle.utils.errors import BaseModelError, DataError
from comingle.utils.records import write_json
from comingle.utils.trees import Tree

_KEYS_OF_THE_BASE = ("model_type", "architectures", "transformers_version", "_name_or_path", "dtype", "layer_types")
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
class _Family:
    """A sparse architecture.

    Args:
        model_type: Its model type.
        num_experts_key: The key of the number of experts in its configuration.
        expert_width_key: The key of the experts' width in its configuration.
        fixed: Values of its configuration that do not depend on the base.
    """

    model_type: str
    num_experts_key: str
    expert_width_key: str
    fixed: Mapping[str, Any]


_MIXTRAL = _Family(
    model_type="mixtral", num_experts_key="num_local_experts", expert_width_key="intermediate_size", fixed={}
)
_QWEN3 = _Family(
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
    if len(set(getattr(config, "layer_types", None) or ())) > 1:
        return "only some of its layers have a sliding window; a sparse mixture needs the same in all layers"
    return ""


@torch.no_grad()
def plain_network(base: PreTrainedModel, changes: Sequence[Change]) -> PreTrainedModel:
    """Return a copy of the base in at least float32, with every change of a weight added to it."""
    network = _float32_copy(base)
    for change in changes:
        change.add_to(network.get_parameter(f"{change.name}.weight"))
    return network


@torch.no_grad()
def sparse_network(base: PreTrainedModel, changes: Sequence[Change], routing: Routing) -> PreTrainedModel:
    """Return a sparse mixture-of-experts network that computes the same as the base with experts and routers.

    Each expert is the base's MLP with that expert's change merged in, in at least float32. As in training, these
    architectures renormalise the gates of the top k. :func:`why_not_sparse` must have returned an empty string.

    Args:
        base: The base model.
        changes: Changes of the base's weights; those with a ``key`` belong to experts.
        routing: The routers.
    """
    from transformers import AutoModelForCausalLM

    merged = plain_network(base, [change for change in changes if not change.key])
    config = _sparse_config(base, num_experts=len(routing.gates[0]), top_k=routing.top_k)
    state = {name: t for name, t in merged.state_dict().items() if ".mlp." not in name}  # the same in both networks
    by_layer: dict[int, dict[str, Change]] = {}  # changes of experts by layer and linear: gate, up or down
    for change in changes:
        if change.key:
            by_layer.setdefault(change.layer, {})[change.key] = change
    for layer, experts in by_layer.items():
        prefix = experts["up"].name.rpartition("mlp.")[0]  # of the names in this layer
        gate, up, down = (_expert_weights(merged, experts[key]) for key in ("gate", "up", "down"))
        state |= {
            # Weights of all experts are stacked, and the linears gate and up are one.
            f"{prefix}{_EXPERTS}.gate_up_proj": torch.cat([gate, up], 1),
            f"{prefix}{_EXPERTS}.down_proj": down,
            f"{prefix}{_GATE}": routing.gates[layer].to(down),
        }
    with torch.random.fork_rng(devices=[]):  # The random initial values are replaced below.
        network = AutoModelForCausalLM.from_config(config, dtype=WIDE, experts_implementation="eager")
    network.load_state_dict(state, assign=True)
    network.tie_weights()
    return network.eval().requires_grad_(False)


def check_same_logits(
    name: str, ours: Float[Tensor, "*batch vocab"], theirs: Float[Tensor, "*batch vocab"], dtype: torch.dtype
) -> None:
    """Check that the exported network computes the same logits as the user's model.

    The relative error allowed is 5% for a base in 16 bits and 1e-4 otherwise.

    Args:
        name: The user.
        ours: Logits of the user's model.
        theirs: Logits of the exported network.
        dtype: The base's dtype.

    Raises:
        BaseModelError: The logits differ, because the base has a feature that export does not support.
    """
    theirs = theirs.to(ours)
    error = float((theirs - ours).double().norm() / ours.double().norm())
    if not error <= (0.05 if dtype in SHORT else 1e-4):  # Rounding errors are far smaller. Catches NaN too.
        raise BaseModelError(
            f"user {name!r}: the exported model's logits differ from the trained model's by {error:.1%}, so "
            "nothing is written; the base has a feature that export does not support"
        )


def needs_eager_experts(config: PreTrainedConfig) -> bool:
    """Return whether transformers' default implementation of experts fails for a sparse mixture of these sizes.

    ``torch.nn.functional.grouped_mm``, with which transformers runs experts by default, needs rows whose length is a
    multiple of 16 bytes: 8 numbers in bfloat16.
    """
    family = next((family for family in SPARSE.values() if family.model_type == config.model_type), None)
    if family is None:
        return False
    return any(getattr(config, key) % 8 for key in ("hidden_size", family.expert_width_key))


def cast_parameters(network: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Cast the parameters to ``dtype`` in place and return the network; buffers such as rotary frequencies stay."""
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)
    network.config.dtype = dtype
    return network


def check_sparse(name: str, config: PreTrainedConfig) -> None:
    """Check that transformers has a sparse architecture for this base.

    Raises:
        DataError: There is no such architecture; the message names the reason and a format that works.
    """
    if why := why_not_sparse(config):
        raise DataError(
            f"user {name!r}: a mixture of experts on this base cannot be exported exactly: {why}; "
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
    """Return the base's weight plus each expert's change of it."""
    weight = merged.get_parameter(f"{change.name}.weight")
    num_experts = len(change.a)
    return torch.stack([weight + change.only_expert(i).summed().to(weight) for i in range(num_experts)])


def _sparse_config(base: PreTrainedModel, *, num_experts: int, top_k: int) -> object:
    """Return the configuration of a sparse mixture-of-experts network whose experts have the shape of a base's MLP.

    The sparse architecture is Mixtral for the bases Llama and Mistral, and Qwen3-MoE for Qwen3. All other sizes, such
    as those of attention, are the base's.

    Args:
        base: The base, a dense model.
        num_experts: Number of experts.
        top_k: Number of experts per token.
    """
    from transformers import AutoConfig

    family, base_values = SPARSE[base.config.model_type], base.config.to_dict()
    # The sparse architecture has the same keys as the dense base. All values are copied, except for those that describe
    # the base alone, such as its model type.
    values = {key: value for key, value in base_values.items() if key not in _KEYS_OF_THE_BASE} | dict(family.fixed)
    has_sliding_layers = "sliding_attention" in (getattr(base.config, "layer_types", None) or ())
    window = getattr(base.config, "sliding_window", None)
    # Qwen3 may have a window in its configuration that no layer uses.
    values["sliding_window"] = window if family is _MIXTRAL or has_sliding_layers else None
    values |= {
        "use_cache": True,
        family.num_experts_key: num_experts,
        family.expert_width_key: base_values["intermediate_size"],
        "num_experts_per_tok": top_k,
    }
    return AutoConfig.for_model(family.model_type, **values)


@dataclass(frozen=True, kw_only=True)
class Source:
    """The user's model to export.

    Args:
        name: The user.
        model: The model.
        tensors: The user's tensors, shapes ``(1, ...)``.
        row: The user's index among all users of the run.
        model_info: Facts about the user's data and scores, for the card; None if unknown.
        logits: Computes the model's logits.
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
    """Return the end of an error message: the ``--format`` with which a model that mixes experts can be exported."""
    is_exact = not why_not_sparse(source.model.base.model.config) and not unsupported_mixing(source)
    if is_exact:
        return "--format transformers is exact"
    return "--format merged-approximately exports a plain model and measures how much worse it is"


def unsupported_mixing(source: Source) -> str:
    """Return how a model mixes its experts, if no architecture of transformers can mix them so; else an empty string.

    The architectures of transformers mix whole MLPs, with a softmax over router logits. The returned phrase completes
    the message "its experts are ...".
    """
    mlps = source.model.adapters.experts.values() if isinstance(source.model, AdaptedModel) else ()
    if any(mlp.mix == "linear" for mlp in mlps):
        return "mixed inside each linear layer"
    own_gatings = (str(mlp.router.gating) for mlp in mlps if mlp.router.gating is not None)  # not the usual softmax
    return next(own_gatings, "")


def changes_of(source: Source) -> list[Change]:
    """Return one change per adapted linear, with every expert at full weight."""
    if isinstance(source.model, AdaptedModel):
        return changes_of_adapted(source.model, source.tensors, source.row)
    return changes_of_mixed(source.model, source.tensors)


def plain_changes(source: Source) -> list[Change]:
    """Return the changes of a model that the base's weights can hold, with the experts' shares."""
    return averaged(changes_of(source))


def routing_of(source: Source) -> Routing:
    """Return the weights of the routers for the experts that the user has, and the number of experts per token.

    Models without routers average their experts. In a sparse mixture, a router of zeros does the same if every token
    uses all experts, as then all gates are equal.
    """
    model = source.model
    assert isinstance(model, AdaptedModel)
    present = model.adapters.present[source.row]  # (experts,): whether the user has the expert
    gates: list[Tensor] = []  # by layer: a router's weight, (experts of the user, width)
    for name, mlp in model.adapters.experts.items():
        router = source.tensors.get(f"{name}.router")  # (1, experts, width): the tensors are those of a single user
        width = weight_shape(mlp.first["up"])[1]  # of the MLP's input
        gates.append(torch.zeros(int(present.sum()), width) if router is None else router[0].cpu()[present])
    num_experts = len(gates[0])
    if not routing.routed(model.adapters):
        return Routing(top_k=num_experts, gates=gates)
    top_k = next(iter(model.adapters.experts.values())).router.top_k  # the same in all layers
    return Routing(top_k=min(top_k, num_experts), gates=gates)


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def write_peft(
    folder: Path, base: PreTrainedModel, base_name: str, changes: Sequence[Change], dtype: torch.dtype
) -> int:
    """Write a LoRA as an adapter for PEFT: ``adapter_config.json`` and ``adapter_model.safetensors``.

    Args:
        folder: Where to write.
        base: The base model.
        base_name: Its name in the adapter's configuration.
        changes: One LoRA per adapted linear.
        dtype: Dtype of the written factors.

    Returns:
        The LoRA's rank.
    """
    factors = {change.name: _factors(change) for change in changes}
    rank = max(a.shape[0] for a, _ in factors.values())
    tensors = {}
    for name, (a, b) in factors.items():
        missing = rank - a.shape[0]  # Narrow weights may have a smaller rank; zeros change nothing.
        tensors[f"base_model.model.{name}.lora_A.weight"] = F.pad(a, (0, 0, 0, missing)).to(dtype).contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = F.pad(b, (0, missing)).to(dtype).contiguous()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    transposed = changes[0].transposed  # a property of the base, so the same for all changes
    write_json(folder / CONFIG, _peft_config(base, base_name, list(factors), rank, transposed))
    return rank


def _factors(change: Change) -> tuple[Float[Tensor, "rank d_in"], Float[Tensor, "d_out rank"]]:
    """Return the factors A and B of one LoRA that equals the sum of all experts' LoRAs, with their shares in B."""
    b = change.b * change.shares.view(-1, 1, 1)
    return change.a.flatten(0, 1), b.flatten(0, 1).mT


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
    """Return PEFT's ``target_modules``: the last parts of the adapted layers' names, or the full names.

    PEFT adapts every layer whose name ends with a target module. So last parts are only used if they match no layer
    without an adapter.
    """
    last_parts = sorted({name.rpartition(".")[2] for name in names})
    matched = {name for name in linear_names(base) if name.rpartition(".")[2] in last_parts}
    return last_parts if matched == set(names) else sorted(names)
