"""The columns of a cohort's rows that gradients by name belong to: waiting gradients, optimiser steps, statistics."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from comingle.config.settings import OptimizerSettings
from comingle.engines.members import Members
from comingle.engines.optimizers import descend, update
from comingle.engines.state import GRADIENTS
from comingle.methods.base import Phase
from comingle.utils.trees import STATISTICS, Layout, Tree, flatten


def accumulate(cohort: Members, phase: Phase, gradients: Tree) -> None:
    """Add what other phases have left of the tensors that this one trains, and leave them what it has of theirs.

    A user who has nothing that a phase trains (one expert and no router) would not have taken it alone.
    """
    if GRADIENTS not in cohort.kept:
        return
    layout, left = cohort.layout, cohort.kept[GRADIENTS]
    trained = layout.touching(phase.roles)
    span, found = layout.span(trained), torch.zeros_like(left)
    for name, view in layout.views(found).items():
        if name in gradients:
            view.copy_(gradients.pop(name))
    if cohort.mask is not None:
        found *= cohort.mask & cohort.mask[:, span].any(1, keepdim=True)
    left += found
    gradients |= trained.views(left[:, span].clone())
    left[:, span] = 0


def take_step(
    trained: Layout,
    cohort: Members,
    gradients: Tree,
    settings: OptimizerSettings,
    rate: float,
    count: Int[Tensor, " users"],
    held: Bool[Tensor, "users columns"] | None,
) -> None:
    """One step of one optimiser on the columns of ``trained``, in place; their ``gradients`` are used up."""
    layout, part = cohort.layout, cohort.part
    # A gradient as large as everybody's nets is not copied.
    if settings.memoryless and cohort.mask is None and held is None:
        views = layout.views(part.rows)
        for slot in trained.slots:
            descend(settings, rate, views[slot.name], gradients.pop(slot.name))
        return
    span = layout.span(trained)
    gradient = flatten([gradients.pop(slot.name) for slot in trained.slots], part.rows.dtype)
    if cohort.mask is not None:
        gradient *= cohort.mask[:, span]
    if held is not None:
        gradient.masked_fill_(held[:, span], 0.0)
    whole = (part.rows, part.first, part.second)
    found = [t[:, span] if t.shape[1] else t for t in whole]
    update(settings, rate, found[0], gradient, found[1], found[2], count)
    for t, new in zip(whole, found, strict=True) if not isinstance(span, slice) else ():
        if t.shape[1]:  # what lies in several pieces was a copy
            t[:, span] = new


def keep_statistics(layout: Layout, rows: Float[Tensor, "users columns"], tensors: Tree) -> None:
    """Running statistics, which a forward pass changes in its own copy."""
    statistics = layout.only({STATISTICS}).slots
    views = layout.views(rows) if statistics else {}
    for slot in statistics:
        views[slot.name].copy_(tensors[slot.name])
