"""A frozen pretrained language model, as the rest of the library sees it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
else:
    # What a runtime type checker sees: importing transformers for a name would cost every start a second.
    PreTrainedModel, PreTrainedTokenizerBase = torch.nn.Module, object

logger = logging.getLogger("comingle")


@dataclass(frozen=True, kw_only=True)
class Base:
    """One pretrained model that is loaded once, never trained and never copied.

    `model` has no parameter that requires a gradient, is in evaluation mode (no dropout) and keeps no cache.
    `tokenizer` is None for a folder that holds none. `name` says which source was used and, for an alias or a hub
    name, holds no path of this machine. `dtype` is that of the weights.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    dtype: torch.dtype
    device: torch.device


def freeze(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Make `model` a constant: no gradients, no dropout, no cache in training; plain greedy generation."""
    from transformers import GenerationConfig

    model.requires_grad_(False)
    model.eval()
    model.config.use_cache = False
    # A checkpoint's own sampling defaults would make generation depend on the source, and a missing padding id would
    # print a warning at every call.
    ids = model.config if tokenizer is None else tokenizer
    eos, bos, pad = (getattr(ids, f"{key}_token_id", None) for key in ("eos", "bos", "pad"))
    pad = eos if pad is None else pad
    model.generation_config = GenerationConfig(eos_token_id=eos, bos_token_id=bos, pad_token_id=pad, use_cache=True)
