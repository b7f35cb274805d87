"""Routing decisions of users' models for each token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from comingle.models.injection import Adapters
from comingle.utils.trees import GENERALIST, ROUTER, SPECIALIST, Tree


def routed(adapters: Adapters) -> bool:
    """Return whether the model has routers: some user has several experts, and the method does not average them."""
    return ROUTER in adapters.layout.roles


@contextmanager
def record_gates(adapters: Adapters) -> Iterator[None]:
    """Record the gates of every forward pass in the context, for :func:`gates`."""
    routers = [mlp.router for mlp in adapters.experts.values()]
    for router in routers:
        router.record_gates = True
    try:
        yield
    finally:
        for router in routers:
            router.record_gates, router.gates = False, None


def gates(adapters: Adapters) -> Float[Tensor, "layers users n experts"]:
    """Return the gates of the last forward pass, first layer first; requires routers and :func:`record_gates`."""
    by_block = [mlp.router.gates for mlp in adapters.experts.values()]
    return torch.stack([layer for layer in by_block if layer is not None])


@contextmanager
def record_router_inputs(adapters: Adapters) -> Iterator[Tree]:
    """Yield a tree that holds each router's input of the last forward pass, by the name of the router's tensor.

    A router reads the input of its MLP, so hooks record the inputs of MLPs.
    """
    inputs_by_name = Tree()

    def recorder(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        """Return the hook of the MLP ``name``."""

        def record(_mlp: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            (hidden,) = inputs
            inputs_by_name[f"{name}.{ROUTER}"] = hidden.detach()

        return record

    hooks = [mlp.register_forward_pre_hook(recorder(name)) for name, mlp in adapters.experts.items()]
    try:
        yield inputs_by_name
    finally:
        for hook in hooks:
            hook.remove()


def expert_names(adapters: Adapters, user: int) -> list[str]:
    """Return the names of a user's experts in order, such as "generalist", "specialist 1", "specialist 2".

    Args:
        adapters: The injected modules, with the layout and the users' experts.
        user: Index of the user.
    """
    # All tensors of experts have the same roles along the expert axis, so the first one tells them.
    axis_roles = next(slot.roles for slot in adapters.layout.slots if {GENERALIST, SPECIALIST} & set(slot.roles))
    roles = [role for role, present in zip(axis_roles, adapters.present[user].tolist(), strict=True) if present]
    counts: Counter[str] = Counter()
    names = []
    for role in roles:
        counts[role] += 1
        names.append(f"{role} {counts[role]}" if roles.count(role) > 1 else role)
    return names


Forward = Callable[[Int[Tensor, " n"]], Float[Tensor, "layers n experts"]]
"""Function that returns the gates of one forward pass over ``n`` tokens."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Gates on a text under one user's model: ``gates[layer, token]`` sums to one over ``experts``.

    Rounded to three digits, in float16.
    """

    tokens: tuple[str, ...]
    experts: tuple[str, ...]
    gates: Float[Tensor, "layers n experts"]


@torch.no_grad()
def route(
    forward: Forward, tokens: Int[Tensor, " n"], *, context: int, begin: int | None = None
) -> Float[Tensor, "layers n experts"]:
    """Return the gates of every token: the weights that each layer's router gives to the experts.

    The text is cut into pieces of ``context`` tokens that are processed one after another. Gates are rounded to three
    digits, in float16.

    Args:
        forward: Function that returns the gates ``(layers, n, experts)`` of a forward pass over n tokens.
        tokens: Token ids.
        context: Tokens per forward pass.
        begin: Begin-of-text token (BOS) that opens each pass and counts towards ``context``; None for no such token.
    """
    prefix = tokens.new_tensor([] if begin is None else [begin]).long()
    passes = tokens.long().split(max(1, context - len(prefix)))
    # The gates of the begin-of-text token are dropped.
    parts = [forward(torch.cat([prefix, part])).float().cpu()[:, len(prefix) :] for part in passes]
    return torch.cat(parts, dim=1).mul(1000).round().div(1000).to(torch.float16)


def pieces(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[str]:
    """Return the characters that each token adds to the text, so that their concatenation is the text.

    A token that ends within a character adds nothing, and the token that completes the character adds it. Each token is
    decoded after its predecessor, because some tokenizers drop a leading space.

    Args:
        tokenizer: The tokenizer.
        tokens: Token ids of the text.
    """

    def decode(start: int, end: int) -> str:
        part = list(tokens[start:end])
        return str(tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    decoded, before, read = [], 0, 0  # tokens[before:read] are decoded already and are the context of the next token
    for end in range(1, len(tokens) + 1):
        old, new = decode(before, read), decode(before, end)
        is_complete = not new.endswith("\N{REPLACEMENT CHARACTER}")
        # A character has at most four bytes, so after four tokens it is invalid rather than incomplete.
        is_shown = is_complete or end == len(tokens) or end - read >= 4
        decoded.append(new[len(old) :] if is_shown else "")
        if is_shown:
            before, read = read, end
    return decoded
