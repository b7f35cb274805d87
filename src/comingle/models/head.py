"""The frozen output layer, apart from the backbone, so that a loss can be computed without storing logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from comingle.models.base import Base
from comingle.models.pretrained import PreTrainedModel
from comingle.utils.errors import BaseModelError

# Largest difference between our logits and the model's, as a fraction of the largest logit.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@dataclass(frozen=True, kw_only=True)
class Head:
    """Hidden states to logits: ``softcap * tanh((h W^T + b) * scale / softcap)``; no cap where `softcap` is None."""

    weight: Float[Tensor, "vocab d"]
    bias: Float[Tensor, " vocab"] | None
    scale: float
    softcap: float | None

    def logits(self, hidden: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch vocab"]:
        """The formula above, in the dtype of `hidden`."""
        raw = torch.nn.functional.linear(hidden, self.weight, self.bias) * self.scale
        return raw if self.softcap is None else self.softcap * torch.tanh(raw / self.softcap)


def backbone(model: PreTrainedModel) -> torch.nn.Module:
    """The module that maps token ids to the hidden states the head reads (embeddings, blocks, last norm).

    Raises:
        BaseModelError: the model does not tell its backbone from its head.
    """
    inner = model.base_model
    if inner is model:
        raise BaseModelError(f"model type {_model_type(model)!r}: its backbone cannot be told from its head.")
    return inner


def lm_head(base: Base) -> Head:
    """The head of `base`, verified against the model's own logits on two 4-token texts (without weights: as it is).

    Raises:
        BaseModelError: the model has no linear head, does something else to its logits, or is not causal.
    """
    head = _read_head(base.model)
    if head.weight.is_meta:  # shapes only, nothing to compare
        return head
    first = torch.arange(4, device=base.device) + 5
    tokens = torch.stack([first, first])
    tokens[1, -1] += 1  # the two texts differ in their last token only
    with torch.no_grad():
        ours = head.logits(backbone(base.model)(input_ids=tokens).last_hidden_state)
        theirs = base.model(input_ids=tokens).logits
    _require_equal(base, ours, theirs)
    _require_causal(base, tokens, theirs)
    return head


def _read_head(model: PreTrainedModel) -> Head:
    layer = model.get_output_embeddings()
    if not isinstance(layer, torch.nn.Linear):
        raise BaseModelError(f"model type {_model_type(model)!r}: expected a linear head, got {type(layer).__name__}.")
    config = model.config
    softcap = getattr(config, "final_logit_softcapping", None)  # Gemma
    scale = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere multiplies
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)  # Granite divides
    return Head(weight=layer.weight, bias=layer.bias, scale=scale, softcap=softcap)


def _require_equal(base: Base, ours: Tensor, theirs: Tensor) -> None:
    if not theirs.isfinite().all():
        raise BaseModelError(
            f"base model {base.name!r} (model type {_model_type(base.model)!r}): its logits are not finite on a text "
            f"of {theirs.shape[1]} tokens; its weights are damaged, or too large for {base.dtype}."
        )
    limit = _TOLERANCE[base.dtype] * theirs.abs().max().item()
    error = (ours - theirs).abs().max().item()
    if not error <= limit:  # written so that NaN fails too
        raise BaseModelError(
            f"base model {base.name!r} (model type {_model_type(base.model)!r}): its logits are not a scaled or capped "
            f"linear map of its hidden states; they differ by {error:.3g}, allowed is {limit:.3g}."
        )


def _require_causal(base: Base, tokens: Int[Tensor, "2 4"], logits: Float[Tensor, "2 4 vocab"]) -> None:
    limit = _TOLERANCE[base.dtype] * logits.abs().max().item()
    leak = (logits[0, :-1] - logits[1, :-1]).abs().max().item()
    if leak > limit:
        raise BaseModelError(
            f"base model {base.name!r} (model type {_model_type(base.model)!r}): not causal; changing token "
            f"{tokens.shape[1]} changes the predictions before it by {leak:.3g}."
        )


def _model_type(model: PreTrainedModel) -> str:
    return str(model.config.model_type)
