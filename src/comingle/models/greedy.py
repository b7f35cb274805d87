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

    Prompts are filled with ``PAD`` on the left, and so is on the right what is said after one that leaves the base no
    places for ``limit`` tokens: no base knows places beyond its last. Others' prompts change nothing for one.
    """
    lengths, most = (prompts != PAD).sum(1), getattr(network.config, "max_position_embeddings", None)
    room = (most - lengths).clamp(min=1, max=limit) if most else torch.full_like(lengths, limit)
    if len(sizes := room.unique().tolist()) == 1:
        return _continue(network, prompts, sizes[0])
    said = torch.full((len(prompts), max(sizes)), PAD, dtype=torch.int64)
    last = torch.arange(prompts.shape[1], device=prompts.device) == prompts.shape[1] - 1
    for size in sizes:  # everybody is in every batch, as whose adapters these are follows from the place in it
        these = room == size
        some = prompts.masked_fill(~(these.unsqueeze(1) | last), PAD)
        found = _continue(network, some[:, -int(lengths[these].max()) :], size)
        said[these.cpu(), : found.shape[1]] = found[these.cpu()]
    return said


def _continue(network: PreTrainedModel, prompts: Int[Tensor, "n prompt"], limit: int) -> Int64[Tensor, "n new"]:
    """So many tokens, for which there are places."""
    width, config = prompts.shape[1], network.generation_config
    generate = cast(Callable[..., Tensor], network.generate)  # torch types every attribute as a Tensor
    with padded_attention(network):
        said = generate(
            prompts.clamp(min=0),
            attention_mask=(prompts != PAD).long(),
            max_new_tokens=limit,
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
