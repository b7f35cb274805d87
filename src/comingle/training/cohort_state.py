"""The part of the state that belongs to a cohort, and its optimizers.

AdamW and SGD are elementwise, so one update of a ``(users, columns)`` matrix is exactly what each user's own optimiser
would have done. torch's optimisers keep one step count per tensor; here users may have taken different numbers of steps
(partial participation), so the update is written out. Moments are float32 at least.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from comingle.config.settings import OptimizerSection
from comingle.methods import base
from comingle.methods.base import Phase
from comingle.training.state import GRADIENTS, State
from comingle.utils.trees import STATISTICS, Layout, Tree, flatten


@dataclass(kw_only=True)
class CohortTensors(base.Cohort):
    """Users whose tensors are ``part``; ``rows`` are their rows in the state of all, ``owners`` the trainers to whom
    these belong, ``names`` their names.

    ``before`` is what they began the round with, ``across`` what their first copies did, where that is asked for.
    ``mask`` is None where nobody's tensors are padded. ``sample_shares`` are each user's training samples' own mixtures
    ``(clusters, samples)``.
    """

    layout: Layout
    rows: list[int]
    owners: list[int]
    names: list[str]
    part: State
    round_number: int
    before: Float[Tensor, "users columns"] | None = None
    across: Float[Tensor, "users columns"] | None = None
    mask: Bool[Tensor, "users columns"] | None = None
    sample_shares: list[Float[Tensor, "clusters samples"]] | None = None

    @property
    def tensors(self) -> Tree:
        """Views of the users' tensors."""
        return self.layout.views(self.part.rows)

    @property
    def began(self) -> Tree:
        """What they were when the round began."""
        assert self.before is not None
        return self.layout.views(self.before)

    @property
    def exchanged(self) -> Tree:
        """What their first copies were when the round began."""
        assert self.across is not None
        return self.layout.views(self.across)

    @property
    def kept(self) -> Tree:
        """What parts of the method keep of each user."""
        return self.part.kept

    @property
    def ranks(self) -> Int[Tensor, " users"]:
        """LoRA ranks."""
        return self.part.ranks

    @contextmanager
    def some(self, at: Sequence[int]) -> Iterator[CohortTensors]:
        """Some of these users; what is changed of them is changed here."""
        if list(at) == list(range(len(self.rows))):
            yield self
            return
        sub = self._of(at, self.part.take(at))
        yield sub
        self.part.put(at, sub.part)

    def only(self, at: Sequence[int]) -> CohortTensors:
        """Some of these users, for a look: their rows are a copy, and there is nothing to take steps with."""
        nothing = self.part.rows.new_empty(len(at), 0)
        small = {
            name: getattr(self.part, name)[list(at)] for name in ("iterations", "router_steps", "versions", "ranks")
        }
        rows = self.part.rows[list(at)]
        kept = {name: t[list(at)] for name, t in self.part.kept.items()}
        return self._of(at, replace(self.part, rows=rows, first=nothing, second=nothing, kept=kept, **small))

    def _of(self, at: Sequence[int], part: State) -> CohortTensors:
        return replace(
            self,
            rows=[self.rows[i] for i in at],
            owners=[self.owners[i] for i in at],
            names=[self.names[i] for i in at],
            part=part,
            before=None if self.before is None else self.before[list(at)],
            across=None if self.across is None else self.across[list(at)],
            mask=None if self.mask is None else self.mask[list(at)],
            sample_shares=None if self.sample_shares is None else [self.sample_shares[i] for i in at],
        )

    def shares_of(self, drawn: Int[Tensor, "users batch"]) -> Float[Tensor, "users clusters batch"]:
        """What of :attr:`sample_shares` belongs to these samples; anything where there is none."""
        assert self.sample_shares is not None
        numbers = drawn.to(self.part.rows.device).clamp(min=0)
        return torch.stack([shares[:, at] for shares, at in zip(self.sample_shares, numbers, strict=True)])


@dataclass(frozen=True, kw_only=True)
class FrozenColumns:
    """Columns of the first copy of a user's tensors that no step moves, for so many rounds."""

    columns: Bool[Tensor, " columns"]
    rounds: int


@contextmanager
def freeze_columns(
    newcomer: FrozenColumns | None, cohort: CohortTensors, trainers: int, beside: Bool[Tensor, " columns"] | None
) -> Iterator[Bool[Tensor, "users columns"] | None]:
    """What of each user does not move in a step, which is as it was before it at the end of the block.

    Of the first ``trainers`` rows those of ``newcomer``, of all rows those ``beside`` the trained roles.
    """
    newcomer = None if newcomer is None or cohort.round_number >= newcomer.rounds else newcomer
    if newcomer is None and beside is None:
        yield None
        return
    frozen_columns = torch.zeros_like(cohort.part.rows, dtype=torch.bool)
    if beside is not None:
        frozen_columns |= beside.to(frozen_columns.device)
    if newcomer is not None:
        firsts = torch.tensor([row < trainers for row in cohort.rows], device=frozen_columns.device)
        frozen_columns |= firsts.unsqueeze(1) & newcomer.columns.to(frozen_columns.device)
    before = cohort.part.rows[frozen_columns]
    yield frozen_columns
    cohort.part.rows[frozen_columns] = before  # which decay and running statistics would change without any gradient


Rows = Float[Tensor, "users columns"]


def learning_rate(settings: OptimizerSection, step: int, total: int) -> float:
    """Rate of step ``step`` of ``total`` (from 0): constant, or a cosine from the rate to ``final_fraction`` of it."""
    if settings.schedule == "constant":
        return settings.learning_rate
    low = settings.final_fraction * settings.learning_rate
    return low + (settings.learning_rate - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / max(1, total))))


def clip(gradient: Rows, norm: float) -> Rows:
    """Scale each user's gradient down to at most ``norm``."""
    norms = gradient.norm(dim=1, keepdim=True)
    return gradient * (norm / norms.clamp(min=norm))


PIECE = 1 << 20
"""Entries of a narrow gradient that are widened at a time, so that caches hold them; measured on CPUs."""


@torch.no_grad()
def descend(settings: OptimizerSection, rate: float, values: Tensor, gradient: Tensor) -> None:
    """One step of plain SGD, in place on ``values`` ``(users, ...)``; a narrower ``gradient`` counts as it is."""
    if settings.weight_decay:
        values.mul_(1 - rate * settings.weight_decay)
    users = len(values) if gradient.dtype == values.dtype else max(1, PIECE // max(1, values[:1].numel()))
    for some, by in zip(values.split(users), gradient.split(users), strict=True):
        some.sub_(by.to(values.dtype), alpha=rate)


@torch.no_grad()
def update(
    settings: OptimizerSection,
    rate: float,
    rows: Rows,
    gradient: Rows,
    first: Float[Tensor, "users _"],
    second: Float[Tensor, "users _"],
    steps: Int[Tensor, " users"],
) -> None:
    """One optimiser step of every user, in place on ``rows`` and on the moments ``first`` and ``second``.

    ``steps`` is each user's step count including this one. Moments that the optimiser does not keep may be empty.
    """
    if settings.clip_norm is not None:
        gradient = clip(gradient, settings.clip_norm)
    if settings.name == "sgd":
        if settings.momentum:
            gradient = first.mul_(settings.momentum).add_(gradient)
        descend(settings, rate, rows, gradient)
        return
    if settings.weight_decay:
        rows.mul_(1 - rate * settings.weight_decay)
    beta1, beta2 = settings.betas
    count = steps.to(rows.dtype).unsqueeze(1)
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = (second / (1 - beta2**count)).sqrt_().add_(settings.eps)
    rows.sub_(first / denominator * (rate / (1 - beta1**count)))


def accumulate(cohort: CohortTensors, phase: Phase, gradients: Tree) -> None:
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
    cohort: CohortTensors,
    gradients: Tree,
    settings: OptimizerSection,
    rate: float,
    count: Int[Tensor, " users"],
    frozen_columns: Bool[Tensor, "users columns"] | None,
) -> None:
    """One step of one optimiser on the columns of ``trained``, in place; their ``gradients`` are used up."""
    layout, part = cohort.layout, cohort.part
    # A gradient as large as everybody's nets is not copied.
    if settings.memoryless and cohort.mask is None and frozen_columns is None:
        views = layout.views(part.rows)
        for slot in trained.slots:
            descend(settings, rate, views[slot.name], gradients.pop(slot.name))
        return
    span = layout.span(trained)
    gradient = flatten([gradients.pop(slot.name) for slot in trained.slots], part.rows.dtype)
    if cohort.mask is not None:
        gradient *= cohort.mask[:, span]
    if frozen_columns is not None:
        gradient.masked_fill_(frozen_columns[:, span], 0.0)
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
