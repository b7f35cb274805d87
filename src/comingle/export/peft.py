"""A user's model as one LoRA in the layout of the package PEFT, which is not needed to write it.

``W + sum_j s_j B_j A_j`` over E experts (or clusters) of rank r is one LoRA of rank E r: the factors side by side, with
the shares s in B.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from comingle.models.layouts import linear_names
from comingle.models.merging import Change
from comingle.models.pretrained import PreTrainedModel
from comingle.utils.records import write_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def write_peft(
    folder: Path, base: PreTrainedModel, base_name: str, changes: Sequence[Change], dtype: torch.dtype
) -> int:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors``. Returns the LoRA's rank."""
    factors = {change.name: _factors(change) for change in changes}
    rank = max(a.shape[0] for a, _ in factors.values())
    tensors = {}
    for name, (a, b) in factors.items():
        missing = rank - a.shape[0]  # a narrow weight may have a smaller rank than the others
        tensors[f"base_model.model.{name}.lora_A.weight"] = F.pad(a, (0, 0, 0, missing)).to(dtype).contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = F.pad(b, (0, missing)).to(dtype).contiguous()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    write_json(folder / CONFIG, _config(base, base_name, list(factors), rank, changes[0].transposed))
    return rank


def _factors(change: Change) -> tuple[Float[Tensor, "rank d_in"], Float[Tensor, "d_out rank"]]:
    b = change.b * change.shares.view(-1, 1, 1)
    return change.a.flatten(0, 1), b.flatten(0, 1).mT


def _config(base: PreTrainedModel, base_name: str, names: Sequence[str], rank: int, transposed: bool) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,  # so that the scale is one: ours stands in B
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": transposed,
        "init_lora_weights": True,
        "target_modules": _targets(base, names),
    }


def _targets(base: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """Last parts of the names, where they mean these linears and no others; else the names."""
    last = sorted({name.rpartition(".")[2] for name in names})
    meant = {name for name in linear_names(base) if name.rpartition(".")[2] in last}
    return last if meant == set(names) else sorted(names)
