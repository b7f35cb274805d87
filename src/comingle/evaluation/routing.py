"""Token by token: which expert a user's routers listen to, in every layer (CoMiGS, Figures 3 and 14 to 19)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

Forward = Callable[[Int[Tensor, " n"]], Float[Tensor, "layers n experts"]]
"""The gates of one forward pass over ``n`` tokens."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The gates on a text under one user's model: ``gates[layer, token]`` sums to one over ``experts``.

    Rounded to three digits, which float16 holds.
    """

    tokens: tuple[str, ...]
    experts: tuple[str, ...]
    gates: Float[Tensor, "layers n experts"]


@torch.no_grad()
def route(
    forward: Forward, tokens: Int[Tensor, " n"], *, context: int, begin: int | None = None
) -> Float[Tensor, "layers n experts"]:
    """Return the gates on every token, in passes of ``context`` tokens each; with ``begin`` it is the first of them."""
    first = tokens.new_tensor([] if begin is None else [begin]).long()
    passes = tokens.long().split(max(1, context - len(first)))
    parts = [forward(torch.cat([first, part])).float().cpu()[:, len(first) :] for part in passes]
    return torch.cat(parts, dim=1).mul(1000).round().div(1000).to(torch.float16)


def pieces(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[str]:
    """Each token as the characters that it adds to the text; together they are the text.

    A token that ends within a character adds nothing; the one that completes it adds it. Each token is decoded after
    the one before it, because some tokenizers drop a space at the start of what they decode.
    """

    def decode(start: int, end: int) -> str:
        part = list(tokens[start:end])
        return str(tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    decoded, before, read = [], 0, 0  # tokens[before:read] are decoded already, and give the next one its place
    for end in range(1, len(tokens) + 1):
        old, new = decode(before, read), decode(before, end)
        whole = not new.endswith("\N{REPLACEMENT CHARACTER}") or end == len(tokens) or end - read >= 4
        decoded.append(new[len(old) :] if whole else "")
        if whole:
            before, read = read, end
    return decoded
