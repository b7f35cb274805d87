"""What a network says next, each the likeliest token after the other, prompts of any length in one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from jaxtyping import Int, Int64
from torch import Tensor

from comingle.data.batches import PAD
from comingle.models.pretrained import PreTrainedModel


def continue_greedily(network: PreTrainedModel, prompts: Int[Tensor, "n prompt"], limit: int) -> Int64[Tensor, "n new"]:
    """Up to ``limit`` tokens after each prompt, on the CPU; what follows a prompt's end of text means nothing.

    Prompts are filled with ``PAD`` on the left.
    """
    width, config = prompts.shape[1], network.generation_config
    most = getattr(network.config, "max_position_embeddings", None)
    generate = cast(Callable[..., Tensor], network.generate)  # torch types every attribute as a Tensor
    with padded_attention(network):
        said = generate(
            prompts.clamp(min=0),
            attention_mask=(prompts != PAD).long(),
            max_new_tokens=max(1, min(limit, most - width)) if most else limit,  # no base knows places beyond its last
            use_cache=True,
            do_sample=False,
            pad_token_id=config.pad_token_id if config is not None else None,
        )
    return said[:, width:].cpu()


def can_pad(network: PreTrainedModel) -> bool:
    """Whether :func:`padded_attention` helps: a capped softmax in float64 (Gemma 2) knows no other attention."""
    return network.dtype != torch.float64 or getattr(network.config, "attn_logit_softcapping", None) is None


@contextmanager
def padded_attention(network: PreTrainedModel, *, padded: bool = True) -> Iterator[None]:
    """Within, attention over padding has numbers in float64 too.

    The softmax of transformers' own attention is in float32, where the mask, float64's lowest number, is infinite.
    """
    config: Any = network.base_model.config
    style = config._attn_implementation
    if padded and network.dtype == torch.float64 and style == "eager":
        config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        config._attn_implementation = style
