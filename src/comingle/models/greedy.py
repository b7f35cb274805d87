"""What many users' models say next, each the likeliest token after the other, all users in one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from jaxtyping import Int, Int64
from torch import Tensor
from torch.nn import functional as F

from comingle.data.batches import PAD
from comingle.models.adapted import AdaptedModel
from comingle.models.mixed import MixedLanguageModel
from comingle.models.owning import own_language_model
from comingle.models.pretrained import PreTrainedModel
from comingle.trees import Tree


@torch.no_grad()
def continue_prompts(
    model: AdaptedModel | MixedLanguageModel,
    tensors: Tree,
    users: Sequence[int],
    prompts: Int[Tensor, "users batch prompt"],
    *,
    limit: int,
) -> Int64[Tensor, "users batch new"]:
    """Up to ``limit`` tokens after each prompt, on the CPU; what follows a prompt's end of text means nothing.

    Prompts are filled with ``PAD`` on the left. Row i of ``tensors`` and ``prompts`` belongs to user ``users[i]``.
    Users of one adapted base share every pass; with client-level mixtures each speaks by itself.
    """
    prompts = prompts.to(model.device)
    # Lengths change with every token: compiling for each of them would not pay.
    with torch.compiler.set_stance("force_eager"):
        if isinstance(model, AdaptedModel):
            model.adapters.bind(tensors, users)
            return _greedy(model.network, prompts.flatten(0, 1), limit).view(*prompts.shape[:2], -1)
        parts = []
        for row, of_user in enumerate(prompts):
            mine = {name: t[row : row + 1] for name, t in tensors.items()}
            personal = own_language_model(model, mine)
            with personal.mixing(model.shares(mine)[0]):
                parts.append(_greedy(cast(PreTrainedModel, personal.model), of_user, limit))
    width = max(part.shape[1] for part in parts)
    return torch.stack([F.pad(part, (0, width - part.shape[1])) for part in parts])


def _greedy(network: PreTrainedModel, prompts: Int[Tensor, "n prompt"], limit: int) -> Int64[Tensor, "n new"]:
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
