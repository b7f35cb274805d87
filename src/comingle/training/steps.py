"""A cohort's optimizer steps: one forward and backward pass for all of its users.

Each user's loss is multiplied by a power of two before the backward pass, and its gradients, in float32, are divided
by it. A loss is a mean over targets, so what reaches the head is scaled to about 2^4, whatever the batch. A user whose
gradients overflow takes the pass once more with a smaller scale (Micikevicius et al. 2018, "Mixed Precision Training",
section 3.2, leave such a step out instead and remember the scale): so nothing is skipped or remembered, and a user's
step does not depend on who else is in its cohort.

The objective is the sum over users of each user's mean loss, so a user's gradient is what it would have computed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from comingle.data.populations import LazyPopulation
from comingle.methods.base import Phase
from comingle.models.model import Model
from comingle.privacy.accounting import Work, check_delta
from comingle.privacy.base import PrivacyMechanism, PrivateStep, overrides
from comingle.privacy.noise import clipped, digest
from comingle.training.batch_sources import Batches, BatchSource, Prefetcher
from comingle.training.cohort_state import (
    CohortTensors,
    FrozenColumns,
    accumulate,
    freeze_columns,
    keep_statistics,
    learning_rate,
    take_step,
)
from comingle.training.settings import Portions, RunPlan, check_needs, work_of
from comingle.utils.errors import DivergenceError, RecipeError, lacks_memory
from comingle.utils.seeds import generator
from comingle.utils.trees import CLIENT_ROUTER, STATISTICS, Layout, Tree, restrict


@contextmanager
def within_memory(portions: Portions, users: int, device: torch.device) -> Iterator[None]:
    """Passes of so many users, in such portions.

    Raises:
        RecipeError: they need more memory than ``device`` has; says which setting to lower to what.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        at_once, sequences = min(portions.users, users), portions.sequences
        lower = (
            f"runtime.users_per_step={at_once // 2}, or auto" if at_once > 1
            else f"runtime.micro_batch={sequences // 2}" if sequences > 1
            else "a smaller base, training.context or adapters.rank"
        )  # fmt: skip
        what = f"{at_once} {'user' if at_once == 1 else 'users'} with {sequences} sequences or samples each"
        raise RecipeError(f"runtime: {device} has not the memory for a pass of {what}; try {lower}") from None


def diverged(user: str, what: str, suspects: Sequence[str] = ("experts",)) -> DivergenceError:
    """The error for a user who has left the real numbers.

    ``suspects`` are the optimisers that may have done it; none before any training.
    """
    keys = ("learning_rate", "clip_norm")
    rates, norms = (" and ".join(f"training.{name}.{key}" for name in suspects) for key in keys)
    advice = f"try a smaller {rates}, or {norms}: 1.0" if suspects else "nothing was trained, so the base is at fault"
    return DivergenceError(f"user {user!r}: {what}; {advice}")


def find_suspects(
    layout: Layout, row: Float[Tensor, " columns"], trained: Mapping[str, frozenset[str]]
) -> tuple[str, ...]:
    """Which optimisers, each with the roles that it trains, made a user's tensors so large that a loss broke.

    What breaks a loss is larger than the rest by orders of magnitude. Where two are within one, or neither is a number
    any more, that cannot be told, and both are named.
    """
    magnitudes = {name: row[layout.mask(roles).to(row.device)].abs() for name, roles in trained.items()}
    sizes = {
        name: magnitude.nan_to_num(nan=torch.inf).max().item()
        for name, magnitude in magnitudes.items()
        if len(magnitude)
    }
    return tuple(name for name, size in sizes.items() if size >= max(sizes.values()) / 10)


def find_broken(
    losses: Float[Tensor, "steps users"], rows: Float[Tensor, "users columns"], round_number: int
) -> dict[int, str]:
    """Who of a cohort is no longer finite after its local steps, by place in the cohort, with the reason."""
    broken: dict[int, str] = {}
    for step, user in (~losses.isfinite()).nonzero().tolist():
        what = f"training loss is {losses[step, user].item()} in round {round_number + 1}, local step {step + 1}"
        broken.setdefault(user, what)
    # The rows too: what breaks in the last step shows in no loss of this round, and the exchange would spread it.
    for user in (~rows.sum(1).isfinite()).nonzero().flatten().tolist():  # one pass, without a copy
        broken.setdefault(user, f"not all tensors are finite after round {round_number + 1}")
    return broken


Pass = Callable[[Float[Tensor, " users"]], tuple[Float[Tensor, " users"], Tree]]
"""From scales to unscaled losses and scaled gradients."""

_HEADROOM, _LOWER, _LOWEST = 2.0**4, 2.0**-4, 2.0**-24


def starting_scales(targets: Int[Tensor, " users"]) -> Float[Tensor, " users"]:
    """``2^4`` times the largest power of two that is not above the number of targets of a user's batch."""
    return _HEADROOM * torch.exp2(torch.log2(targets.clamp(min=1).float()).floor())


def scaled(run: Pass, targets: Int[Tensor, " users"]) -> tuple[Float[Tensor, " users"], Tree]:
    """Losses and gradients ``(users, ...)`` of a pass that is scaled, in float32; not finite where no scale helps."""
    scales = starting_scales(targets)
    while True:
        losses, gradients = run(scales)
        found = Tree({n: g / scales.to(g.device).view(-1, *[1] * (g.dim() - 1)) for n, g in gradients.items()})
        if any(isinstance(g, FakeTensor) for g in found.values()):  # counted, not computed
            return losses, found
        fits = ~losses.isfinite()  # nothing that happens behind the loss made it so
        fits |= torch.stack([g.flatten(1).isfinite().all(1).cpu() for g in found.values()]).all(0)
        if bool((fits | (scales <= _LOWEST)).all()):
            return losses, found
        scales = torch.where(fits, scales, scales * _LOWER)


TUNING = "tuning"
"""Label of the phases that finetune: their batches have a random stream of their own, and nothing of them is sent."""


@dataclass(frozen=True, kw_only=True)
class PrivateSteps:
    """Local steps on what users share, of which a privacy mechanism makes the gradients.

    Rows of a pass are examples: what a user shares is repeated for each of its examples, so that one backward pass
    yields the gradient of every example. The model of that pass has what is shared and nothing that a user trains
    without noise. Otherwise the released gradient would depend on what the same data has made of specialists and
    routers, which no account covers.

    Args:
        mechanism: Has the hook ``client_gradients``.
        plan: Has the method, which says what is shared.
    """

    mechanism: PrivacyMechanism
    plan: RunPlan

    def applies(self, phase: Phase, layout: Layout) -> bool:
        """Whether a phase trains something that is sent."""
        return phase.label != TUNING and bool(self.leaves(phase, layout))

    def leaves(self, phase: Phase, layout: Layout) -> list[str]:
        """The tensors of which a phase trains entries that are shared."""
        shared, roles = self.plan.method.shared, phase.roles
        both = ((slot.name, zip(slot.chosen(shared), slot.chosen(roles), strict=True)) for slot in layout.slots)
        return [name for name, entries in both if any(sent and moves for sent, moves in entries)]

    def local_leaves(self, phase: Phase, layout: Layout, *, everything: bool) -> list[str]:
        """The tensors of which a phase trains entries that are a user's own, or all that it trains."""
        slots, shared, reached = layout.touching(phase.reached).slots, self.plan.method.shared, phase.reached
        both = ((slot.name, zip(slot.chosen(shared), slot.chosen(reached), strict=True)) for slot in slots)
        return [name for name, entries in both if everything or any(moves and not sent for sent, moves in entries)]

    def local_roles(self, layout: Layout) -> frozenset[str]:
        """The roles that are trained without noise."""
        return (layout.roles & self.plan.method.client.trained) - self.plan.method.shared

    def works(self, batch_source: BatchSource) -> dict[str, Work]:
        """What each of the feed's trainers does."""
        return {trainer.name: self.work(batch_source, number) for number, trainer in enumerate(batch_source.trainers)}

    def work(self, batch_source: BatchSource, trainer: int) -> Work:
        """What one of them does.

        Raises:
            RecipeError: it has so many examples that delta would allow one of them to be published.
        """
        name, count = batch_source.trainers[trainer].name, batch_source.examples(trainer)
        if self.plan.privacy is not None:
            check_delta(self.plan.privacy, name, count)
        return work_of(self.plan, name, examples=count, iterations=batch_source.steps(trainer))

    # ---------------------------------------------------------------- a step

    def step(
        self,
        model: Model,
        batch_source: BatchSource,
        portions: Portions,
        cohort: CohortTensors,
        phase: Phase,
        place: Sequence[int],
        at: Sequence[int],
        plain: tuple[Float[Tensor, " users"], Tree] | None,
    ) -> tuple[Float[Tensor, " users"], Tree]:
        """Losses, and gradients of all that a phase trains: noised ones of what the users ``at`` share.

        All others, and the losses, are the ``plain`` ones, where there are any.
        """
        losses, own = plain or (torch.zeros(len(cohort.rows)), Tree())
        if not at:
            return losses, own
        some = cohort if len(at) == len(cohort.rows) else cohort.only(at)
        found, shared = self.gradients(model, batch_source, portions, some, phase, place)
        if plain is None:
            losses[list(at)] = found
        return losses, self.merge(model.layout, phase, own, shared, at, len(cohort.rows))

    def gradients(
        self,
        model: Model,
        batch_source: BatchSource,
        portions: Portions,
        cohort: CohortTensors,
        phase: Phase,
        place: Sequence[int],
    ) -> tuple[Float[Tensor, " users"], Tree]:
        """Of each user the mean loss, estimated from its batch, and the noised gradient of what it shares.

        Tensors are cut to their shared entries. ``place`` says which step of the round this is.
        """
        layout, rows, number = model.layout, cohort.part.rows, cohort.round_number
        kept = layout.roles - self.local_roles(layout)
        works = [self.work(batch_source, owner) for owner in cohort.owners]
        stamps = [digest({n: t[i] for n, t in self._shared(layout, rows).items()}) for i in range(len(rows))]
        streams = [(name, number, phase.purpose, *place, s) for name, s in zip(cohort.names, stamps, strict=True)]
        tensors, leaves = restrict(model.tensors(rows), layout, kept), self.leaves(phase, layout)

        def sums(part: Int[Tensor, "u n"], bound: float) -> tuple[Tree, Float[Tensor, " u"]]:
            return self.clipped_sums(model, batch_source, tensors, leaves, cohort, part, bound)

        step = PrivateStep(works=works, streams=streams, batch=portions.sequences, clipped_sums=sums)
        with model.randomness(self.mechanism.key, cohort.names[0], number, *place):  # masks of a known seed hide nobody
            means, found = self.mechanism.client_gradients(step)
        return means.float(), {name: t.to(rows.dtype) for name, t in found.items()}

    def clipped_sums(
        self,
        model: Model,
        batch_source: BatchSource,
        tensors: Tree,
        leaves: Sequence[str],
        cohort: CohortTensors,
        part: Int[Tensor, "u n"],
        bound: float,
    ) -> tuple[Tree, Float[Tensor, " u"]]:
        """Return sums of each user's clipped gradients, float64, and of its losses over examples of these numbers."""
        drawn = batch_source.numbered(cohort.owners, part, cohort.round_number).to(cohort.part.rows.device)
        return self.sums_over(model, batch_source, tensors, leaves, cohort.owners, drawn, bound)

    def sums_over(
        self,
        model: Model,
        batch_source: BatchSource,
        tensors: Tree,
        leaves: Sequence[str],
        owners: Sequence[int],
        drawn: Int[Tensor, "u n ..."],
        bound: float,
    ) -> tuple[Tree, Float[Tensor, " u"]]:
        """Return the same over examples that were drawn: one pass, whose rows they are, the first user's first."""
        users, count = drawn.shape[:2]
        who = [owner for owner in owners for _ in range(count)]
        wide = {n: t.detach().repeat_interleave(count, 0) for n, t in tensors.items()}
        for name in leaves:
            wide[name].requires_grad_()
        rows = drawn.flatten(0, 1).unsqueeze(1)
        batch: Any = batch_source.read("train", who, rows)
        losses = model.without(self.local_roles(model.layout)).losses_of_each(wide, who, batch)
        means = losses.flatten(1).sum(1) / batch_source.counted(rows).clamp(min=1)
        found = torch.autograd.grad(means.sum(), [wide[n] for n in leaves], materialize_grads=True)
        changes = clipped(dict(zip(leaves, found, strict=True)), bound)
        sums = {n: t.view(users, count, *t.shape[1:]).sum(1) for n, t in changes.items()}
        return sums, means.detach().double().view(users, count).sum(1).cpu()

    def _shared(self, layout: Layout, rows: Float[Tensor, "users columns"]) -> Tree:
        return restrict(layout.views(rows), layout, self.plan.method.shared)

    def merge(self, layout: Layout, phase: Phase, plain: Tree, noised: Tree, at: Sequence[int], users: int) -> Tree:
        """``plain`` gradients with ``noised`` ones, cut to shared entries, in their place for users ``at``."""
        whole = Tree()
        for slot in layout.touching(phase.reached).slots:
            if slot.name not in noised:
                whole[slot.name] = plain[slot.name]
                continue
            made = noised[slot.name]
            full = plain.get(slot.name)
            full = made.new_zeros(users, *slot.shape) if full is None else full.clone()
            keep = [i for i, shared in enumerate(slot.chosen(self.plan.method.shared)) if shared]
            if len(keep) == len(slot.roles):
                full[list(at)] = made
            else:
                full[torch.tensor(at).unsqueeze(1), torch.tensor(keep)] = made
            whole[slot.name] = full
        return whole


def private_steps(mechanisms: Sequence[PrivacyMechanism], model: Model, plan: RunPlan) -> PrivateSteps | None:
    """Return the local steps of a mechanism that protects single examples, if a run has one.

    Raises:
        RecipeError: What is shared is no model by itself, or examples of a batch have statistics in common.
    """
    mechanism = next((one for one in mechanisms if overrides(one, "client_gradients")), None)
    if mechanism is None:
        return None
    where = f"privacy: method {plan.method.name}"
    if model.batchwise:
        raise RecipeError(
            f"{where}: statistics of batch norm are of all examples of a batch together; allowed: a net with "
            "group norm, as net:resnet9-group"
        )
    steps = PrivateSteps(mechanism=mechanism, plan=plan)
    try:
        model.without(steps.local_roles(model.layout))
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None
    return steps


@dataclass(kw_only=True)
class Steps:
    """How users take local steps: the model, the method's phases, where batches come from, and how many go at once."""

    model: Model
    plan: RunPlan
    trainers: int
    source: BatchSource | Callable[[], BatchSource]
    """The trainers' data, or what makes it a feed when something needs it."""
    most_steps: int | None = None
    """Local iterations of a round, of whoever has most; where some users are elsewhere, as somebody else says."""
    private: PrivateSteps | None = None
    """Steps on what is shared, of a privacy mechanism that makes their gradients."""
    frozen_columns: FrozenColumns | None = None
    """What does not move, of somebody who has joined a federation that is over."""
    known_suspects: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Optimisers that made a row leave the real numbers, in this round."""

    def __post_init__(self) -> None:
        check_needs(self.plan.method, self.model.name, self.model.layout)

    @cached_property
    def batch_source(self) -> BatchSource:
        """The trainers' data."""
        return self.source if isinstance(self.source, BatchSource) else self.source()

    @cached_property
    def batches(self) -> Batches:
        """The source of batches, or on GPUs a prefetcher of it."""
        source, device = self.batch_source, self.model.device
        return source if device.type != "cuda" else Prefetcher(source, device)

    @cached_property
    def portions(self) -> Portions:
        """What goes through the model at once."""
        return self.batch_source.portions(self.model.device, self.model.layout.columns)

    @property
    def local_steps(self) -> int:
        """Local iterations of a round, of the trainer who has most."""
        return self._steps_here if self.most_steps is None else self.most_steps

    @cached_property
    def _steps_here(self) -> int:
        trainers = self.batch_source.trainers
        some = [trainers.largest] if isinstance(trainers, LazyPopulation) else range(self.trainers)
        return max(self.batch_source.steps(i) for i in some)

    @property
    def iterations(self) -> int:
        """Local iterations of a whole run, by which learning rates decay."""
        return self.plan.training.rounds * self.local_steps

    def tensors(self, rows: Float[Tensor, "users columns"]) -> Tree:
        """Named tensors as the model computes with them."""
        return self.model.tensors(rows)

    # ---------------------------------------------------------------- iterations

    def iteration(
        self, cohort: CohortTensors, phases: Sequence[Phase], step: int, active: Bool[Tensor, " users"]
    ) -> Float[Tensor, " users"]:
        """One local iteration of a cohort: each phase for the active users for whom it is due.

        Returns the training losses, 0 for whoever has no iteration left in this round.
        """
        losses = torch.zeros(len(cohort.rows))
        numbered = list(enumerate(zip(cohort.part.iterations.tolist(), active.tolist(), strict=True)))
        for phase in phases:
            if cohort.round_number % phase.turns != phase.turn:
                continue
            due = [i for i, (n, works) in numbered if works and (n + 1) % phase.every == 0]
            if not due:
                continue
            step_losses = torch.zeros(len(due))
            with cohort.some(due) as sub:
                step_losses = self.take(sub, phase, step)
            if phase.optimizer != "router":
                losses[due] = step_losses
        cohort.part.iterations += active.to(cohort.part.iterations)
        return losses

    def take(self, cohort: CohortTensors, phase: Phase, step: int) -> Float[Tensor, " users"]:
        """The optimiser steps of one phase, in place on the cohort. Returns the mean loss of each user."""
        total, number = torch.zeros(len(cohort.rows)), cohort.round_number
        for i in range(phase.steps):
            with freeze_columns(
                self.frozen_columns, cohort, self.trainers, self.model.layout.beside(phase.roles)
            ) as frozen_columns:
                if self.private is not None and self.private.applies(phase, self.model.layout):
                    losses, gradients = self._private(self.private, cohort, phase, step, i)
                else:
                    losses, gradients = self._plain(cohort, phase, step, i)
                for place in (~losses.isfinite()).nonzero().flatten().tolist():  # before the step spoils all it trains
                    self.suspects(cohort.rows[place], cohort.part.rows[place])
                for part in self.plan.method.client.parts:
                    part.correct(cohort, gradients)
                accumulate(cohort, phase, gradients)
                self.descend(phase, cohort, gradients, number * self.local_steps + max(step, 0), frozen_columns)
            total += losses
        return total / phase.steps

    def _plain(
        self, cohort: CohortTensors, phase: Phase, step: int, repeat: int, names: Collection[str] | None = None
    ) -> tuple[Float[Tensor, " users"], Tree]:
        """Losses and gradients of a fresh batch of each user."""
        number = cohort.round_number
        drawn = self.batches.draw(cohort.owners, phase, number, step, repeat)
        noise = self._noise(cohort.names, number, phase.purpose, step, repeat)
        with self.model.randomness(self.plan.seed, cohort.names[0], number, step, repeat):
            return self.gradient(cohort, drawn, phase, noise, names)

    def _private(
        self, private: PrivateSteps, cohort: CohortTensors, phase: Phase, step: int, repeat: int
    ) -> tuple[Float[Tensor, " users"], Tree]:
        """Return the same with a privacy mechanism's gradients of what is shared and sent."""
        at = [i for i, row in enumerate(cohort.rows) if row < self.trainers]
        names = private.local_leaves(phase, self.model.layout, everything=len(at) < len(cohort.rows))
        plain = self._plain(cohort, phase, step, repeat, names) if names else None
        return private.step(self.model, self.batch_source, self.portions, cohort, phase, (step, repeat), at, plain)

    def suspects(self, row: int, values: Float[Tensor, " columns"]) -> tuple[str, ...]:
        """Which optimisers may have made a row leave the real numbers: as its tensors were when that first showed."""
        if row not in self.known_suspects:
            trained: dict[str, frozenset[str]] = {}
            for name, roles in self.plan.method.client.optimizers:
                trained[name] = trained.get(name, frozenset()) | roles
            self.known_suspects[row] = find_suspects(self.model.layout, values, trained)
        return self.known_suspects[row]

    def _noise(self, names: Sequence[str], *place: str | int) -> Float[Tensor, "users *layers clusters"] | None:
        """Noise on the users' router logits, each user's from a stream of its own; None where there is none."""
        mixture = self.plan.method.placement.mixture
        if mixture is None or not mixture.noise:
            return None
        streams = (generator(self.plan.seed, name, "router noise", *place) for name in names)
        shape = next(slot.shape for slot in self.model.layout.slots if slot.name == CLIENT_ROUTER)
        drawn = torch.stack([torch.randn(shape, generator=stream) for stream in streams])
        return mixture.noise * drawn.to(self.model.device, self.model.dtype)

    def descend(
        self,
        phase: Phase,
        cohort: CohortTensors,
        gradients: Tree,
        iteration: int,
        frozen_columns: Bool[Tensor, "users columns"] | None = None,
    ) -> None:
        """One optimiser step on the columns that ``phase`` trains, in place; ``gradients`` is used up.

        Gradients of what is ``frozen_columns`` are zero, so that they neither count in a norm nor become moments.
        """
        part = cohort.part
        for name, roles in phase.optimizers:
            if name == "router":
                part.router_steps += 1
            settings = self.plan.training.router if name == "router" else self.plan.training.experts
            count = part.router_steps if name == "router" else part.iterations + 1
            trained, rate = self.model.layout.touching(roles), learning_rate(settings, iteration, self.iterations)
            take_step(trained, cohort, gradients, settings, rate, count, frozen_columns)
            for client_part in self.plan.method.client.parts:
                client_part.stepped(cohort, {slot.name: cohort.tensors[slot.name] for slot in trained.slots}, rate)

    # ---------------------------------------------------------------- gradients

    def gradient(
        self,
        cohort: CohortTensors,
        drawn: Int[Tensor, "users batch ..."],
        phase: Phase,
        noise: Float[Tensor, "users *layers clusters"] | None = None,
        names: Collection[str] | None = None,
    ) -> tuple[Float[Tensor, " users"], Tree]:
        """Each user's mean loss, and its gradient at the tensors that the phase trains or leaves to others.

        With ``names`` at those of them alone. In float16 losses are scaled on the way. Gradients are in the rows'
        dtype, or in the model's, where nothing is done to them before a step.
        """
        if self.model.dtype == torch.float16:
            run = partial(self._pass, cohort, drawn, phase, noise, names)
            return scaled(lambda scales: run(scales=scales), self.batch_source.counted(drawn))
        return self._pass(cohort, drawn, phase, noise, names)

    def _pass(
        self,
        cohort: CohortTensors,
        drawn: Int[Tensor, "users batch ..."],
        phase: Phase,
        noise: Float[Tensor, "users *layers clusters"] | None,
        names: Collection[str] | None,
        scales: Float[Tensor, " users"] | None = None,
    ) -> tuple[Float[Tensor, " users"], Tree]:
        """:meth:`gradient`, by each user's scale.

        Only the tensors in question require a gradient, so nothing is computed or kept for the rest.
        """
        rows, owners, layout = cohort.part.rows, cohort.owners, self.model.layout
        whole, statistics = self.batch_source.counted(drawn), layout.only({STATISTICS}).slots
        if self.model.batchwise and len(whole.unique()) > 1:
            return self._gradient_by_size(cohort, drawn, phase, noise)
        tensors = self.tensors(rows)
        if noise is not None:  # the gradient at the logits with noise is that of the logits
            tensors[CLIENT_ROUTER] = tensors[CLIENT_ROUTER] + noise
        for slot in statistics:  # changed in place, and views of what must not change
            tensors[slot.name] = tensors[slot.name].clone()
        trained = [slot.name for slot in layout.touching(phase.reached).slots]
        trained = trained if names is None else [name for name in trained if name in names]
        for name in trained:
            tensors[name] = tensors[name].detach().requires_grad_()
        model = self.model.without(phase.without) if phase.without else self.model
        total, gradients = torch.zeros(len(owners), device=rows.device), Tree()
        # What goes straight into steps stays in the dtype that it was computed in.
        wide = drawn.shape[1] > self.portions.sequences or bool(self.plan.method.client.parts) or names is not None
        for part in self.batches.move(drawn, rows.device).split(self.portions.sequences, dim=1):
            counted = self.batch_source.counted(part)
            share = counted.to(rows.dtype) / whole.to(rows)
            batch: Any = self.batch_source.read(phase.stream, owners, part)
            sample_shares = {} if cohort.sample_shares is None else {"shares": cohort.shares_of(part)}
            # Cut anew for each pass, whose gradient frees what was kept of the cut.
            taken = restrict(tensors, layout, layout.roles - phase.without) if phase.without else tensors
            losses, penalty = model.losses(taken, owners, batch, train=True, **sample_shares)
            means = losses.flatten(1).sum(1) / counted.clamp(min=1)
            objective = means + self.plan.training.balance_weight * penalty
            for extra in self.plan.method.client.parts:
                objective = objective + extra.penalty(tensors, cohort.ranks)
            leaves = [tensors[name] for name in trained]
            weight = share if scales is None else share * scales.to(share)
            gradients_found = torch.autograd.grad((objective * weight).sum(), leaves, materialize_grads=True)
            grads = self._preconditioned(tensors, dict(zip(trained, gradients_found, strict=True)))
            for name, gradient in grads.items():
                found = gradient.to(rows.dtype) if wide else gradient
                gradients[name] = gradients[name] + found if name in gradients else found
            total += (share * means.detach()).float()
        keep_statistics(layout, rows, tensors)
        self.batches.prefetch()
        return total.cpu(), gradients

    def _preconditioned(self, tensors: Tree, gradients: Tree) -> Tree:
        mixture = self.plan.method.placement.mixture
        if mixture is None or not mixture.precondition:
            return gradients
        return self.model.precondition(tensors, gradients)

    def _gradient_by_size(
        self,
        cohort: CohortTensors,
        drawn: Int[Tensor, "users batch"],
        phase: Phase,
        noise: Float[Tensor, "users *layers clusters"] | None = None,
    ) -> tuple[Float[Tensor, " users"], Tree]:
        """:meth:`gradient` of users with equal batches at a time: batch norm would see what fills the others."""
        sizes, rows = self.batch_source.counted(drawn), cohort.part.rows
        total, trained = torch.zeros(len(rows)), self.model.layout.touching(phase.reached).slots
        gradients = {slot.name: rows.new_empty(len(rows), *slot.shape) for slot in trained}
        for size in sizes.unique().tolist():
            at = (sizes == size).nonzero().flatten()
            noise_of_some = None if noise is None else noise[at]
            some = cohort.only(at.tolist())
            total[at], gradients_found = self.gradient(some, drawn[at, :size], phase, noise_of_some)
            rows[at] = some.part.rows  # with the running statistics that this pass has changed
            for name, gradient in gradients_found.items():
                gradients[name][at] = gradient
        return total, gradients
