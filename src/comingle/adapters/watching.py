"""Look at what the routers say during ordinary forward passes, and name the experts that they choose between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

from comingle.adapters.inject import Adapters
from comingle.utils.trees import GENERALIST, ROUTER, SPECIALIST, Tree


def routed(adapters: Adapters) -> bool:
    """Whether there are routers: somebody has more than one expert, and the method does not average them."""
    return ROUTER in adapters.layout.roles


@contextmanager
def watched(adapters: Adapters) -> Iterator[None]:
    """Within, every forward pass leaves its gates behind for :func:`gates`."""
    routers = [mlp.router for mlp in adapters.experts.values()]
    for router in routers:
        router.watched = True
    try:
        yield
    finally:
        for router in routers:
            router.watched, router.gates = False, None


def gates(adapters: Adapters) -> Float[Tensor, "layers users n experts"]:
    """The gates of the last forward pass, first layer first; within :func:`watched`, where there are routers."""
    by_block = [mlp.router.gates for mlp in adapters.experts.values()]
    return torch.stack([layer for layer in by_block if layer is not None])


@contextmanager
def overheard(adapters: Adapters) -> Iterator[Tree]:
    """Within, every forward pass leaves here what each router reads, by the name of the router's tensor."""
    read = Tree()

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, inputs: read.update({f"{name}.{ROUTER}": inputs[0].detach()})

    hooks = [mlp.register_forward_pre_hook(keep(name)) for name, mlp in adapters.experts.items()]
    try:
        yield read
    finally:
        for hook in hooks:
            hook.remove()


def expert_names(adapters: Adapters, user: int) -> list[str]:
    """What a user's experts are called, as "generalist", "specialist 1", "specialist 2", in their order."""
    every = next(slot.roles for slot in adapters.layout.slots if {GENERALIST, SPECIALIST} & set(slot.roles))
    roles = [role for role, present in zip(every, adapters.present[user].tolist(), strict=True) if present]
    seen: Counter[str] = Counter()
    names = []
    for role in roles:
        seen[role] += 1
        names.append(f"{role} {seen[role]}" if roles.count(role) > 1 else role)
    return names
