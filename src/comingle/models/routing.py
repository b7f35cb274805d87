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
    """Return the gates of the latest forward pass, first layer first; requires routers and :func:`record_gates`."""
    recorded = []
    for mlp in adapters.experts.values():
        if mlp.router.gates is not None:  # None for a router without a weight
            recorded.append(mlp.router.gates)
    return torch.stack(recorded)


@contextmanager
def record_router_inputs(adapters: Adapters) -> Iterator[Tree]:
    """Yield a tree that holds each router's input of the latest forward pass, by the name of the router's tensor.

    Used to initialise each router with the mean of its inputs.
    """
    inputs_by_name = Tree()

    def record_input_of(mlp_name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        """Return a hook that records the input of an MLP, which its router reads."""

        def record(_mlp: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            (hidden,) = inputs
            inputs_by_name[f"{mlp_name}.{ROUTER}"] = hidden.detach()

        return record

    hooks = [mlp.register_forward_pre_hook(record_input_of(name)) for name, mlp in adapters.experts.items()]
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
    # All tensors of experts have the same expert axis, so read its roles from the first of them.
    first_slot = next(slot for slot in adapters.layout.slots if {GENERALIST, SPECIALIST} & set(slot.roles))
    is_present = adapters.present[user].tolist()
    return number_experts([role for role, present in zip(first_slot.roles, is_present, strict=True) if present])


def number_experts(roles: Sequence[str]) -> list[str]:
    """Return the names of experts with these roles: a number follows the role if several have it.

    For example ``["generalist", "specialist", "specialist"]`` become "generalist", "specialist 1" and "specialist 2".
    """
    total_by_role, number_by_role = Counter(roles), Counter[str]()
    names = []
    for role in roles:
        number_by_role[role] += 1
        has_several = total_by_role[role] > 1
        names.append(f"{role} {number_by_role[role]}" if has_several else role)
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
    """Return the gates of every token, rounded to three digits, in float16.

    The text is cut into pieces of ``context`` tokens, one for each forward pass.

    Args:
        forward: Function that returns the gates ``(layers, n, experts)`` of a forward pass over n tokens.
        tokens: Token ids.
        context: Tokens per forward pass.
        begin: Begin-of-text token (BOS) that opens each pass and counts towards ``context``; None for no such token.
    """
    prefix = tokens.new_tensor([] if begin is None else [begin]).long()
    piece_length = max(1, context - len(prefix))
    gates_of_pieces = []
    for piece in tokens.long().split(piece_length):
        gates_of_pass = forward(torch.cat([prefix, piece])).float().cpu()
        gates_of_pieces.append(gates_of_pass[:, len(prefix) :])
    all_gates = torch.cat(gates_of_pieces, dim=1)
    return all_gates.mul(1000).round().div(1000).to(torch.float16)


def pieces(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[str]:
    """Return the characters that each token adds to the text, such as "Hel", "lo", " you".

    A token that ends within a character adds nothing; the token that completes the character adds it.

    Args:
        tokenizer: The tokenizer.
        tokens: Token ids of the text.
    """

    def decode(start: int, end: int) -> str:
        part = list(tokens[start:end])
        return str(tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    # Decode new tokens together with those before them, because some tokenizers drop a leading space:
    # tokens[context_start:new_start] are decoded already, tokens[new_start:end] are new.
    added, context_start, new_start = [], 0, 0
    for end in range(1, len(tokens) + 1):
        old_text, text = decode(context_start, new_start), decode(context_start, end)
        ends_within_character = text.endswith("\N{REPLACEMENT CHARACTER}")
        is_invalid = end - new_start >= 4  # a character has at most four bytes
        is_last = end == len(tokens)
        if ends_within_character and not is_invalid and not is_last:
            added.append("")
        else:
            added.append(text[len(old_text) :])
            context_start, new_start = new_start, end
    return added
