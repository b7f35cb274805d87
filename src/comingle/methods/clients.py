"""Clients: what a user updates between two exchanges."""

from __future__ import annotations

from comingle.adapters.inject import ATTENTION, EXPERT_ROLES, GENERALIST, ROUTER
from comingle.methods.base import Phase, Stream
from comingle.trees import BASE, STATISTICS

MODEL = frozenset({ATTENTION, GENERALIST, BASE, STATISTICS})
"""All of a model that travels: LoRA beside a frozen base, or a net with its running statistics."""


def joint(*, routed: bool) -> tuple[Phase, ...]:
    """Experts (or the base, where it is trained), and the router if there is one, together.

    Routers have settings of their own, whose rate is constant where the experts' follows a cosine (CoMiGS App. B.1).
    """
    if routed:
        return (Phase(roles=frozenset((*EXPERT_ROLES, ROUTER)), optimizer="both"),)
    return (Phase(roles=frozenset((*EXPERT_ROLES, BASE))),)


def alternating(*, router_stream: Stream, router_every: int, router_steps: int) -> tuple[Phase, ...]:
    """Experts on training text; after every ``router_every`` iterations the routers on ``router_stream``.

    The router's batches are drawn afresh also where they come from the training text (CoMiGS Table 5, part iii).
    """
    router = Phase(
        roles=frozenset({ROUTER}),
        stream=router_stream,
        every=router_every,
        steps=router_steps,
        optimizer="router",
    )
    return (Phase(roles=frozenset(EXPERT_ROLES)), router)
