"""Which columns a user's copy of a net has: its parameters and statistics as slots of a layout, each with its role."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from comingle.adapters.clustered.model import FloralModel, initialisers, roles
from comingle.adapters.lora import init_zero
from comingle.models.gated import GatedPair, place
from comingle.utils.trees import (
    ADAPTOR,
    BASE,
    CLIENT_ROUTER,
    GENERALIST,
    ROUTER,
    SPECIALIST,
    STATISTICS,
    Init,
    Layout,
    Slot,
)

_ORDER = (BASE, ADAPTOR, GENERALIST, SPECIALIST, ROUTER, STATISTICS)


def layout_of(nets: Sequence[nn.Module], *, side_by_side: bool) -> Layout:
    """Of the first net, or of all ``side_by_side`` with a router over them."""
    if side_by_side:
        slots = [*_models(nets), _router(len(nets))]
    else:
        slots = _adapted(nets[0]) if isinstance(nets[0], FloralModel) else _plain(nets[0])
    return Layout(slots=tuple(sorted(slots, key=lambda slot: _ORDER.index(slot.roles[0]))))


def row_of(net: nn.Module, layout: Layout) -> Float[Tensor, " columns"]:
    """A net's values, as a row of the matrix that such a layout names the columns of."""
    tensors = _tensors(net)
    return torch.cat([tensors[slot.name][0].flatten().cpu() for slot in layout.slots])


def _router(clusters: int) -> Slot:
    return Slot(name=CLIENT_ROUTER, shape=(clusters,), roles=(ROUTER,), init=init_zero)


def _tensors(net: nn.Module) -> dict[str, tuple[Tensor, str]]:
    """Parameters and running statistics with their roles; other buffers stay the net's own."""
    by_name = {name: (p.detach(), BASE) for name, p in net.named_parameters()}
    return by_name | {name: (b, STATISTICS) for name, b in net.named_buffers() if b.is_floating_point()}


def _plain(net: nn.Module) -> list[Slot]:
    by_name, part = _tensors(net).items(), _parts(net)
    slots = [
        Slot(name=name, shape=tuple(t.shape), roles=(role,), init=_given(t), part=part[name.rpartition(".")[0]])
        for name, (t, role) in by_name
    ]
    return [place(slot) for slot in slots] if isinstance(net, GatedPair) else slots


_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


def _parts(net: nn.Module) -> dict[str, str]:
    """Of each module of a net whether it is a "norm", the "head" (the last that has parameters), or "body"."""
    last = [name.rpartition(".")[0] for name, _ in net.named_parameters()][-1:]
    modules = net.named_modules()
    return {n: "norm" if isinstance(m, _NORMS) else "head" if n in last else "body" for n, m in modules}


def _models(nets: Sequence[nn.Module]) -> list[Slot]:
    """Whole models side by side: components in the mixture's sense, so that servers weigh each by its users."""
    parts = [_tensors(net) for net in nets]
    slots = []
    for name, (_, role) in parts[0].items():
        value = torch.stack([part[name][0] for part in parts])
        kind = ADAPTOR if role == BASE else role
        slots.append(Slot(name=name, shape=tuple(value.shape), roles=(kind,) * len(nets), init=_given(value)))
    return slots


def _adapted(model: FloralModel) -> list[Slot]:
    """Base, adaptors, router and statistics of a net with adaptors in it."""
    draws, values = initialisers(model), dict(model.named_parameters()) | dict(model.named_buffers())
    slots, layers = [], model.layers()
    for name, role in roles(model).items():
        value = values[name].detach()
        kinds = (role,) * (model.num_clusters if role == ADAPTOR else 1)
        init = draws.get(name, _given(value))
        # Whose statistics these are: an adapted norm's own, or those of a base, with adaptors or without.
        factor = ("adaptor" if name.rpartition(".")[0] in layers else "base") if role == STATISTICS else ""
        slots.append(Slot(name=name, shape=tuple(value.shape), roles=kinds, init=init, factor=factor))
    return slots


def _given(value: Tensor) -> Init:
    kept = value.detach().clone().cpu()
    return lambda shape, generator: kept
