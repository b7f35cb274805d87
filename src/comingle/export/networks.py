"""A user's model as an architecture of transformers: the base's own, or the sparse mixture that its family has."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.models.kernels.expert_mlp import SHORT
from comingle.models.merging import WIDE, Change
from comingle.models.pretrained import PreTrainedModel
from comingle.utils.errors import BaseModelError, DataError

_OF_THE_BASE = ("model_type", "architectures", "transformers_version", "_name_or_path", "dtype", "layer_types")
_EXPERTS, _GATE = "mlp.experts", "mlp.gate.weight"


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How experts are chosen: ``top_k`` of those in ``gates``, one matrix a block, the tokens being its columns."""

    top_k: int
    gates: Sequence[Float[Tensor, "experts width"]]


@dataclass(frozen=True, kw_only=True)
class _Family:
    """A sparse architecture, and its names for the number of experts, for their width, and what it needs besides."""

    model_type: str
    experts: str
    width: str
    more: Mapping[str, Any]


_MIXTRAL = _Family(model_type="mixtral", experts="num_local_experts", width="intermediate_size", more={})
_QWEN3 = _Family(
    model_type="qwen3_moe",
    experts="num_experts",
    width="moe_intermediate_size",
    more={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
)
SPARSE = {"llama": _MIXTRAL, "mistral": _MIXTRAL, "qwen3": _QWEN3}
"""By the base's model type: architectures whose every expert is the base's MLP, gated by one linear map."""


def why_not_sparse(config: Any) -> str:
    """Why no architecture of transformers is a sparse mixture over such a base; empty where one is."""
    kind = config.model_type
    if kind not in SPARSE:
        return f"transformers has no sparse mixture of {kind} blocks (it has of {', '.join(SPARSE)})"
    if getattr(config, "mlp_bias", False):
        return "its MLPs have biases, which the experts of a sparse mixture have not"
    if kind != "qwen3" and getattr(config, "attention_bias", False):
        return "its attention has biases, which that of a Mixtral has not"
    if len(set(getattr(config, "layer_types", None) or ())) > 1:
        return "some of its layers look at a sliding window and some do not, which all do alike in a sparse mixture"
    return ""


@torch.no_grad()
def plain_network(base: PreTrainedModel, changes: Sequence[Change]) -> PreTrainedModel:
    """The base's architecture in float32 at least, with every change added to its weight."""
    network = _wide_copy(base)
    for change in changes:
        change.add_to(network.get_parameter(f"{change.name}.weight"))
    return network


@torch.no_grad()
def sparse_network(base: PreTrainedModel, changes: Sequence[Change], routing: Routing) -> PreTrainedModel:
    """The family's sparse mixture in float32 at least: each expert is the base's MLP with the change of that expert.

    Only where :func:`why_not_sparse` knows no reason. Both normalise the gates of the top k again, as ours do.
    """
    from transformers import AutoModelForCausalLM

    merged = plain_network(base, [change for change in changes if not change.key])
    config = _sparse_config(base, experts=len(routing.gates[0]), top_k=routing.top_k)
    state = {name: t for name, t in merged.state_dict().items() if ".mlp." not in name}
    by_layer: dict[int, dict[str, Change]] = {}
    for change in changes:
        if change.key:
            by_layer.setdefault(change.layer, {})[change.key] = change
    for layer, experts in by_layer.items():
        prefix = experts["up"].name.rpartition("mlp.")[0]
        gate, up, down = (_every_expert(merged, experts[key]) for key in ("gate", "up", "down"))
        state |= {
            f"{prefix}{_EXPERTS}.gate_up_proj": torch.cat([gate, up], 1),
            f"{prefix}{_EXPERTS}.down_proj": down,
            f"{prefix}{_GATE}": routing.gates[layer].to(down),
        }
    with torch.random.fork_rng(devices=[]):  # the values drawn are thrown away
        network = AutoModelForCausalLM.from_config(config, dtype=WIDE, experts_implementation="eager")
    network.load_state_dict(state, assign=True)
    network.tie_weights()
    return network.eval().requires_grad_(False)


def require_same(
    name: str, ours: Float[Tensor, "*batch vocab"], theirs: Float[Tensor, "*batch vocab"], dtype: torch.dtype
) -> None:
    """See that what is about to be written says what the user's model does.

    Raises:
        BaseModelError: it does not, so there is something about the base that is not known here.
    """
    theirs = theirs.to(ours)
    error = float((theirs - ours).double().norm() / ours.double().norm())
    if not error <= (0.05 if dtype in SHORT else 1e-4):  # rounding is far below
        raise BaseModelError(
            f"user {name!r}: the exported model's logits differ from ours by {error:.1%}, so nothing is written; "
            "this base has something in it that export does not know"
        )


def needs_eager_experts(config: Any) -> bool:
    """Return whether a sparse mixture has rows that grouped matrix products refuse.

    ``torch.nn.functional.grouped_mm``, which transformers runs experts with by default, needs rows whose length is a
    multiple of 16 bytes: of 8 numbers in bfloat16.
    """
    family = next((family for family in SPARSE.values() if family.model_type == config.model_type), None)
    return family is not None and any(getattr(config, key) % 8 for key in ("hidden_size", family.width))


def rounded(network: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """With parameters in ``dtype``; buffers such as rotary frequencies stay as they are."""
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)
    network.config.dtype = dtype
    return network


def require_sparse(name: str, config: Any) -> None:
    """Refuse a base over which there is no sparse architecture.

    Raises:
        DataError: with the reason, and the format that there is.
    """
    if why := why_not_sparse(config):
        raise DataError(
            f"user {name!r}: a mixture of experts on this base cannot be exported exactly: {why}; "
            "--format merged-approximately makes a plain model of it and measures what is lost"
        )


def _wide_copy(base: PreTrainedModel) -> PreTrainedModel:
    network = copy.deepcopy(base).cpu()
    for parameter in network.parameters():
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, WIDE))
    network.config.use_cache = True  # which training has switched off
    return network


def _every_expert(merged: PreTrainedModel, change: Change) -> Float[Tensor, "experts d_out d_in"]:
    weight = merged.get_parameter(f"{change.name}.weight")
    return torch.stack([weight + change.alone(e).summed().to(weight) for e in range(len(change.a))])


def _sparse_config(base: PreTrainedModel, *, experts: int, top_k: int) -> Any:
    from transformers import AutoConfig

    family, old = SPARSE[base.config.model_type], base.config.to_dict()
    values = {key: value for key, value in old.items() if key not in _OF_THE_BASE} | dict(family.more)
    slides = "sliding_attention" in (getattr(base.config, "layer_types", None) or ())
    window = getattr(base.config, "sliding_window", None)
    values["sliding_window"] = window if family is _MIXTRAL or slides else None
    values |= {
        "use_cache": True,
        family.experts: experts,
        family.width: old["intermediate_size"],
        "num_experts_per_tok": top_k,
    }
    return AutoConfig.for_model(family.model_type, **values)
