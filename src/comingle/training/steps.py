"""Local steps of a cohort: one forward and backward pass for all of its users.

The objective is the sum over users of each user's mean loss, so that the gradient of a user is the one it would compute
alone.

In float16 each user's loss is multiplied by a power of two before the backward pass, and its float32 gradients are
divided by it. A loss is a mean over targets, so gradients at the head are scaled to about 2^4 for every batch size. If
the gradients of a user overflow, the pass is repeated with a smaller scale. Micikevicius et al. 2018, "Mixed Precision
Training", section 3.2, skip the step instead and carry the scale over. Here no step is skipped and no scale is carried
over, so the step of a user does not depend on the rest of its cohort.
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

from comingle.methods.base import Phase
from comingle.methods.validation import require_per_user
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
from comingle.training.settings import PassSize, RunPlan, check_needs, work_of
from comingle.utils.errors import DivergenceError, RecipeError, lacks_memory
from comingle.utils.seeds import generator
from comingle.utils.trees import CLIENT_ROUTER, STATISTICS, Layout, Tree, restrict


@contextmanager
def within_memory(pass_size: PassSize, users: int, device: torch.device) -> Iterator[None]:
    """Convert out-of-memory errors in the block to a recipe error.

    Args:
        pass_size: Number of users and sequences in one pass.
        users: Number of users that are trained or scored in the block; a pass has at most this many.
        device: Device of the model.

    Raises:
        RecipeError: A pass does not fit into the memory of the device; names the setting to lower and its next value.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        at_once, sequences = min(pass_size.users, users), pass_size.sequences
        if at_once > 1:
            advice = f"runtime.users_per_step={at_once // 2}, or auto"
        elif sequences > 1:
            advice = f"runtime.micro_batch={sequences // 2}"
        else:
            advice = "a smaller base, training.context or adapters.rank"
        what = f"{at_once} {'user' if at_once == 1 else 'users'} with {sequences} sequences or samples each"
        raise RecipeError(f"runtime: not enough memory on {device} for a pass of {what}; try {advice}") from None


def diverged(user: str, what: str, suspect_optimizers: Sequence[str] = ("experts",)) -> DivergenceError:
    """Return the error for a user whose loss or tensors are not finite.

    Args:
        user: Name of the user.
        what: Description of the value that is not finite.
        suspect_optimizers: Optimizers that may have caused it; empty before any training.
    """
    advice = "nothing has been trained, so the base model is the cause"
    if suspect_optimizers:
        rates = " and ".join(f"training.{name}.learning_rate" for name in suspect_optimizers)
        norms = " and ".join(f"training.{name}.clip_norm" for name in suspect_optimizers)
        advice = f"try a smaller {rates}, or {norms}: 1.0"
    return DivergenceError(f"user {user!r}: {what}; {advice}")


def find_suspects(
    layout: Layout, row: Float[Tensor, " columns"], trained: Mapping[str, frozenset[str]]
) -> tuple[str, ...]:
    """Return the optimizers that may have made the loss of a user infinite or NaN.

    Tensors that break a loss are larger than others by orders of magnitude. If the largest magnitudes of two optimizers
    are within a factor of 10, or both are NaN, both are returned.

    Args:
        layout: Layout of the columns.
        row: Tensors of the user.
        trained: Roles that each optimizer trains.
    """
    largest: dict[str, float] = {}
    for name, roles in trained.items():
        magnitudes = row[layout.mask(roles).to(row.device)].abs()
        if len(magnitudes):
            largest[name] = magnitudes.nan_to_num(nan=torch.inf).max().item()
    return tuple(name for name, magnitude in largest.items() if magnitude >= max(largest.values()) / 10)


def find_broken(
    losses: Float[Tensor, "steps users"], rows: Float[Tensor, "users columns"], round_number: int
) -> dict[int, str]:
    """Return the users of a cohort whose losses or tensors are not finite.

    Args:
        losses: Training losses in nats.
        rows: Tensors of the users after their local steps.
        round_number: The round, counted from 0.

    Returns:
        A sentence with the reason, by the user's place in the cohort.
    """
    broken: dict[int, str] = {}
    for step, user in (~losses.isfinite()).nonzero().tolist():
        what = f"training loss is {losses[step, user].item()} in round {round_number + 1}, local step {step + 1}"
        broken.setdefault(user, what)
    # Rows are checked too: a failure in the last step shows in no loss of this round, and would be uploaded.
    # The sum of a row is finite only if all entries are; computing it needs no copy of the rows.
    for user in (~rows.sum(1).isfinite()).nonzero().flatten().tolist():
        broken.setdefault(user, f"not all tensors are finite after round {round_number + 1}")
    return broken


Pass = Callable[[Float[Tensor, " users"]], tuple[Float[Tensor, " users"], Tree]]
"""A pass: maps loss scales to unscaled losses and scaled gradients."""

_TARGET_SCALE = 2.0**4
"""Magnitude to which gradients at the head are scaled, for every batch size."""

_SCALE_DECAY = 2.0**-4
"""Factor of a loss scale after its gradients overflow."""

_SMALLEST_SCALE = 2.0**-24
"""Loss scale below which gradients are returned even if they overflow; the smallest positive float16 number."""


def starting_scales(targets: Int[Tensor, " users"]) -> Float[Tensor, " users"]:
    """Return the first loss scale to try for each user, for loss scaling in float16.

    The loss is a mean over n targets, so gradients at the head are of order 1/n. The scale is ``2^4`` times n rounded
    down to a power of two: scaled gradients then have about the same magnitude for every batch size, and scaling by a
    power of two rounds nothing.

    Args:
        targets: Number of targets in the batch of each user.
    """
    powers_of_two = torch.exp2(torch.log2(targets.clamp(min=1).float()).floor())
    return _TARGET_SCALE * powers_of_two


def scaled(run: Pass, targets: Int[Tensor, " users"]) -> tuple[Float[Tensor, " users"], Tree]:
    """Run a pass with loss scaling; lower the scale of a user until its gradients are finite.

    Args:
        run: Runs a forward and backward pass with the given loss scales; returns losses, and gradients times scales.
        targets: Number of targets in the batch of each user.

    Returns:
        Losses, and float32 gradients ``(users, ...)``, which stay infinite or NaN if no scale helps.
    """
    scales = starting_scales(targets)
    while True:
        losses, gradients = run(scales)
        unscaled = Tree({n: g / scales.to(g.device).view(-1, *[1] * (g.dim() - 1)) for n, g in gradients.items()})
        if any(isinstance(g, FakeTensor) for g in unscaled.values()):  # shapes only, to count costs
            return losses, unscaled
        keeps_scale = ~losses.isfinite()  # no scale would help, as the loss itself is not scaled
        keeps_scale |= torch.stack([g.flatten(1).isfinite().all(1).cpu() for g in unscaled.values()]).all(0)
        if bool((keeps_scale | (scales <= _SMALLEST_SCALE)).all()):
            return losses, unscaled
        scales = torch.where(keeps_scale, scales, scales * _SCALE_DECAY)


TUNING = "tuning"
"""Label of the phases that fine-tune. Their batches have a random stream of their own; their results stay local."""


@dataclass(frozen=True, kw_only=True)
class PrivateSteps:
    """Local steps whose gradients of shared tensors come from a privacy mechanism (example-level privacy).

    Each example is a row of the pass: the shared tensors are repeated per example, so that one backward pass yields the
    gradient of every example. The model of this pass leaves out all roles that are trained without noise. With them,
    the released gradient would depend on what the same data did to specialists and routers, which no privacy accounting
    covers.

    Args:
        mechanism: Mechanism with the hook ``client_gradients``.
        plan: Plan of the run; its method decides which tensors are shared.
    """

    mechanism: PrivacyMechanism
    plan: RunPlan

    def applies(self, phase: Phase, layout: Layout) -> bool:
        """Return whether gradients of a phase need noise: it trains shared tensors, and its results are uploaded."""
        return phase.label != TUNING and bool(self.shared_leaves(phase, layout))

    def shared_leaves(self, phase: Phase, layout: Layout) -> list[str]:
        """Return the names of the tensors with entries that a phase trains and users share.

        Each entry of a tensor's leading dimension, such as an expert, has a role; only some roles may be shared.
        """
        names = []
        for slot in layout.slots:
            entries = zip(slot.chosen(self.plan.method.shared), slot.chosen(phase.roles), strict=True)
            if any(is_shared and is_trained for is_shared, is_trained in entries):
                names.append(slot.name)
        return names

    def local_leaves(self, phase: Phase, layout: Layout, *, everything: bool) -> list[str]:
        """Return the names of the tensors whose gradients a phase needs without noise.

        A tensor needs such gradients if it has local entries, which users do not share. An entry is one index of the
        leading dimension, such as an expert.

        Args:
            phase: The phase. It computes gradients for all roles in ``phase.reached``: those that it trains, and some
                that a later phase trains.
            layout: Layout of the columns.
            everything: Whether to return all tensors for which the phase computes gradients. This is needed for further
                copies of a user's model, which are never shared.
        """
        names = []
        for slot in layout.touching(phase.reached).slots:
            entries = zip(slot.chosen(self.plan.method.shared), slot.chosen(phase.reached), strict=True)
            if everything or any(is_used and not is_shared for is_shared, is_used in entries):
                names.append(slot.name)
        return names

    def local_roles(self, layout: Layout) -> frozenset[str]:
        """Return the roles that are trained without noise."""
        return (layout.roles & self.plan.method.client.trained) - self.plan.method.shared

    def works(self, batch_source: BatchSource) -> dict[str, Work]:
        """Return the work of each trainer of a batch source, by name."""
        return {trainer.name: self.work(batch_source, number) for number, trainer in enumerate(batch_source.trainers)}

    def work(self, batch_source: BatchSource, trainer: int) -> Work:
        """Return the number of examples, batch size, steps and rounds of one trainer, for its privacy accounting.

        Args:
            batch_source: Source that knows the trainer's data.
            trainer: Number of the trainer.

        Raises:
            RecipeError: The ``delta`` of (epsilon, delta) privacy is too large for the trainer's number of examples: it
                would allow publishing one of them.
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
        pass_size: PassSize,
        cohort: CohortTensors,
        phase: Phase,
        place: Sequence[int],
        noised_users: Sequence[int],
        plain: tuple[Float[Tensor, " users"], Tree] | None,
    ) -> tuple[Float[Tensor, " users"], Tree]:
        """Return losses and gradients of a step in which some users' shared tensors get noised gradients.

        Args:
            model: The model.
            batch_source: Source of examples.
            pass_size: Number of sequences in one pass.
            cohort: The cohort.
            phase: Phase of the step.
            place: Number of the local step in the round, and of the repeat of the phase within the step.
            noised_users: Places in the cohort of the users whose shared gradients are noised; those of other users are
                taken from ``plain``.
            plain: Losses and gradients without noise, for everything that is not noised; None if the phase trains only
                shared tensors.

        Returns:
            Mean losses, and gradients ``(users, *shape)`` of all tensors that the phase trains.
        """
        losses, plain_gradients = plain or (torch.zeros(len(cohort.rows)), Tree())
        if not noised_users:
            return losses, plain_gradients
        # Taking a part of the cohort copies its tensors, which is avoided for the whole one.
        subset = cohort if len(noised_users) == len(cohort.rows) else cohort.only(noised_users)
        noised_losses, noised = self.gradients(model, batch_source, pass_size, subset, phase, place)
        if plain is None:  # otherwise the losses without noise are returned
            losses[list(noised_users)] = noised_losses
        return losses, self.merge(model.layout, phase, plain_gradients, noised, noised_users, len(cohort.rows))

    def gradients(
        self,
        model: Model,
        batch_source: BatchSource,
        pass_size: PassSize,
        cohort: CohortTensors,
        phase: Phase,
        place: Sequence[int],
    ) -> tuple[Float[Tensor, " users"], Tree]:
        """Return mean losses of the drawn examples, and noised gradients of the shared entries.

        The privacy mechanism draws the examples of each user, has their clipped gradients summed by
        :meth:`clipped_sums`, and adds noise. Dropout has one random stream for the whole pass.

        Args:
            model: The model.
            batch_source: Source of examples.
            pass_size: Number of sequences in one pass.
            cohort: Users of the step.
            phase: Phase of the step.
            place: Number of the local step in the round, and of the repeat of the phase within the step.

        Returns:
            Losses, and gradients ``(users, ...)`` cut to the shared entries of each tensor.
        """
        layout, rows, round_number = model.layout, cohort.part.rows, cohort.round_number
        used_roles = layout.roles - self.local_roles(layout)
        # For each user the number of examples, batch size, steps and rounds, from which sampling and noise follow.
        works = [self.work(batch_source, owner) for owner in cohort.owners]
        shared = self._shared_tensors(layout, rows)
        # The key of a user's noise has a digest of its shared tensors: if a round is repeated from other tensors after
        # an interruption, the same noise would reveal the difference of their gradients.
        streams = []
        for i, name in enumerate(cohort.names):
            tensors_digest = digest({n: t[i] for n, t in shared.items()})
            streams.append((name, round_number, phase.purpose, *place, tensors_digest))
        tensors, leaves = restrict(model.tensors(rows), layout, used_roles), self.shared_leaves(phase, layout)

        def sums(examples: Int[Tensor, "u n"], bound: float) -> tuple[Tree, Float[Tensor, " u"]]:
            """Return sums of gradients clipped to the norm ``bound``, and of losses, over examples of each user."""
            return self.clipped_sums(model, batch_source, tensors, leaves, cohort, examples, bound)

        step = PrivateStep(works=works, streams=streams, batch=pass_size.sequences, clipped_sums=sums)
        # Dropout is seeded by the secret key, not by the public seed.
        with model.randomness(self.mechanism.key, cohort.names[0], round_number, *place):
            mean_losses, gradients = self.mechanism.client_gradients(step)
        return mean_losses.float(), {name: t.to(rows.dtype) for name, t in gradients.items()}

    def clipped_sums(
        self,
        model: Model,
        batch_source: BatchSource,
        tensors: Tree,
        leaves: Sequence[str],
        cohort: CohortTensors,
        indices: Int[Tensor, "u n"],
        bound: float,
    ) -> tuple[Tree, Float[Tensor, " u"]]:
        """Clip each example's gradient; return for each user the sum of the clipped gradients and that of the losses.

        The sums have shapes ``(users, ...)`` and ``(users,)``, both in float64.

        Args:
            model: The model.
            batch_source: Source of examples.
            tensors: Tensors of the users.
            leaves: Names of the tensors to differentiate.
            cohort: Users of the step.
            indices: Indices of the examples of each user, padded with ``PAD``.
            bound: Clip norm of the gradient of one example.
        """
        drawn = batch_source.examples_at(cohort.owners, indices, cohort.round_number).to(cohort.part.rows.device)
        return self.clipped_sums_of_batch(model, batch_source, tensors, leaves, cohort.owners, drawn, bound)

    def clipped_sums_of_batch(
        self,
        model: Model,
        batch_source: BatchSource,
        tensors: Tree,
        leaves: Sequence[str],
        trainer_numbers: Sequence[int],
        examples: Int[Tensor, "u n ..."],
        bound: float,
    ) -> tuple[Tree, Float[Tensor, " u"]]:
        """Clip each example's gradient; return for each user the sum of the clipped gradients and that of the losses.

        It is done in a single pass, in which every example is a row with its own copy of the user's tensors. So one
        backward pass yields the gradient of each example. Rows are in the order of the users.

        Args:
            model: The model.
            batch_source: Batch source that reads the examples.
            tensors: Tensors of the users by name, ``(users, *shape)``.
            leaves: Names of the tensors to differentiate, which are trained with noise.
            trainer_numbers: For each user, the number of the trainer whose data it trains on.
            examples: The ``n`` examples of each user, as the batch source encodes them.
            bound: Clip norm of the gradient of one example.

        Returns:
            The sums of the gradients by name, ``(users, *shape)``, and those of the losses, ``(users,)``, both float64.
        """
        users, count = examples.shape[:2]
        trainer_of_example = [trainer for trainer in trainer_numbers for _ in range(count)]
        repeated = {n: t.detach().repeat_interleave(count, 0) for n, t in tensors.items()}
        for name in leaves:
            repeated[name].requires_grad_()
        example_rows = examples.flatten(0, 1).unsqueeze(1)  # one example per row of the pass
        batch: Any = batch_source.read("train", trainer_of_example, example_rows)
        # Roles that are trained without noise take no part: their tensors are not in ``tensors``. Without specialists
        # and routers, the other experts are averaged.
        shared_model = model.without(self.local_roles(model.layout))
        losses = shared_model.losses_in_fixed_order(repeated, trainer_of_example, batch)
        mean_losses = losses.flatten(1).sum(1) / batch_source.loss_counts(example_rows).clamp(min=1)  # of each example
        # Rows do not mix, so the gradient of the sum has the gradient of each example in its row.
        gradients = torch.autograd.grad(mean_losses.sum(), [repeated[n] for n in leaves], materialize_grads=True)
        bounded = clipped(dict(zip(leaves, gradients, strict=True)), bound)
        sums = {n: t.view(users, count, *t.shape[1:]).sum(1) for n, t in bounded.items()}
        return sums, mean_losses.detach().double().view(users, count).sum(1).cpu()

    def _shared_tensors(self, layout: Layout, rows: Float[Tensor, "users columns"]) -> Tree:
        """Return views of the shared entries of the tensors, by name."""
        return restrict(layout.views(rows), layout, self.plan.method.shared)

    def merge(
        self, layout: Layout, phase: Phase, plain: Tree, noised: Tree, noised_users: Sequence[int], users: int
    ) -> Tree:
        """Return plain gradients in which noised ones replace the shared entries of some users.

        A tensor may have shared and local entries on its leading dimension after users, such as experts.

        Args:
            layout: Layout of the columns.
            phase: Phase of the step.
            plain: Gradients ``(users, *shape)`` without noise; without tensors of which all entries are shared.
            noised: Gradients of the users ``noised_users``, which have only the shared entries of each tensor.
            noised_users: Places in the cohort of the users with noised gradients.
            users: Number of users in the cohort.
        """
        merged = Tree()
        for slot in layout.touching(phase.reached).slots:
            if slot.name not in noised:
                merged[slot.name] = plain[slot.name]
                continue
            noised_entries = noised[slot.name]
            gradient = plain.get(slot.name)
            gradient = noised_entries.new_zeros(users, *slot.shape) if gradient is None else gradient.clone()
            shared_entries = [i for i, shared in enumerate(slot.chosen(self.plan.method.shared)) if shared]
            if len(shared_entries) == len(slot.roles):  # the whole tensor is shared
                gradient[list(noised_users)] = noised_entries
            else:  # only some entries of the leading dimension, such as the generalists among all experts
                gradient[torch.tensor(noised_users).unsqueeze(1), torch.tensor(shared_entries)] = noised_entries
            merged[slot.name] = gradient
        return merged


def private_steps(mechanisms: Sequence[PrivacyMechanism], model: Model, plan: RunPlan) -> PrivateSteps | None:
    """Return the local steps of the mechanism that protects single examples; None if a run has no such mechanism.

    These steps compute the gradient of each example, in forward passes that leave out all tensors that are trained
    without noise. The function checks that the model supports such passes.

    Args:
        mechanisms: Privacy mechanisms of a client.
        model: The model.
        plan: Plan of the run.

    Raises:
        RecipeError: The model needs a tensor that is trained without noise in its forward pass, or batch norm mixes
            the examples of a batch.
    """
    mechanism = next((one for one in mechanisms if overrides(one, "client_gradients")), None)
    if mechanism is None:
        return None
    where = f"privacy: method {plan.method.name}"
    if model.batchwise:
        raise RecipeError(
            f"{where}: batch norm mixes the examples of a batch; allowed: a net with group norm, such as "
            "net:resnet9-group"
        )
    steps = PrivateSteps(mechanism=mechanism, plan=plan)
    try:  # fails if the model cannot leave these roles out
        model.without(steps.local_roles(model.layout))
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None
    return steps


@dataclass(kw_only=True)
class Steps:
    """Local steps: the model, the phases of the method, the source of batches, and how many users a pass has."""

    model: Model
    plan: RunPlan
    trainers: int
    source: BatchSource | Callable[[], BatchSource]
    """Batch source of the trainers, or a function that makes it on first use."""
    most_steps: int | None = None
    """Largest number of local steps per round over all users, if some of them are in other processes."""
    private: PrivateSteps | None = None
    """Steps with gradients from a privacy mechanism."""
    frozen_columns: FrozenColumns | None = None
    """Columns that stay frozen for a user who joins a finished federation."""
    known_suspects: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Optimizers that may have made a row non-finite in this round, by row."""

    def __post_init__(self) -> None:
        check_needs(self.plan.method, self.model.name, self.model.layout)

    @cached_property
    def batch_source(self) -> BatchSource:
        """Batch source of the trainers."""
        return self.source if isinstance(self.source, BatchSource) else self.source()

    @cached_property
    def batches(self) -> Batches:
        """The batch source; on GPUs, a prefetcher of it."""
        source, device = self.batch_source, self.model.device
        return source if device.type != "cuda" else Prefetcher(source, device)

    @cached_property
    def pass_size(self) -> PassSize:
        """Number of users and sequences in one pass."""
        return self.batch_source.pass_size(self.model.device, self.model.layout.columns)

    @property
    def local_steps(self) -> int:
        """Largest number of local steps per round over all trainers."""
        return self._local_steps_here if self.most_steps is None else self.most_steps

    @cached_property
    def _local_steps_here(self) -> int:
        """Largest number of local steps per round over the trainers of this process."""
        return self.batch_source.most_steps

    @property
    def iterations(self) -> int:
        """Number of local steps in the whole run, over which learning rates decay."""
        return self.plan.training.rounds * self.local_steps

    def tensors(self, rows: Float[Tensor, "users columns"]) -> Tree:
        """Return the named tensors ``(users, *shape)`` in the dtype of the model."""
        return self.model.tensors(rows)

    # ---------------------------------------------------------------- iterations

    def iteration(
        self, cohort: CohortTensors, phases: Sequence[Phase], step: int, active: Bool[Tensor, " users"]
    ) -> Float[Tensor, " users"]:
        """Take one local step of a cohort: each phase that is due, for the users that are active.

        A phase may take only every n-th round (``turns``) and every n-th local step of a user (``every``).

        Args:
            cohort: The cohort, updated in place.
            phases: Phases of the method.
            step: Local step within the round, counted from 0.
            active: Whether each user takes this step.

        Returns:
            Training losses in nats; 0 for users that are not active.
        """
        losses = torch.zeros(len(cohort.rows))
        steps_of_users = (cohort.part.iterations + 1).tolist()  # in the whole run, with this one
        is_active = active.tolist()
        for phase in phases:
            if cohort.round_number % phase.turns != phase.turn:  # another phase has this round
                continue
            due = [i for i, steps in enumerate(steps_of_users) if is_active[i] and steps % phase.every == 0]
            if not due:
                continue
            step_losses = torch.zeros(len(due))  # always replaced; for type checkers, as a block may be left early
            with cohort.some(due) as due_users:
                step_losses = self.take(due_users, phase, step)
            if phase.optimizer != "router":  # a router may train on validation data; report training losses only
                losses[due] = step_losses
        cohort.part.iterations += active.to(cohort.part.iterations)
        return losses

    def take(self, cohort: CohortTensors, phase: Phase, step: int) -> Float[Tensor, " users"]:
        """Take the optimizer steps of one phase, in place, each on a batch of its own.

        Args:
            cohort: The cohort.
            phase: The phase.
            step: Local step within the round; -1 for phases before the first one.

        Returns:
            Mean loss of each user over these steps.
        """
        summed_losses = torch.zeros(len(cohort.rows))
        iteration = cohort.round_number * self.local_steps + max(step, 0)  # in the whole run, for learning rates
        other_roles = self.model.layout.other_roles_mask(phase.roles)  # columns of other roles in the same tensors
        for repeat in range(phase.steps):
            with freeze_columns(self.frozen_columns, cohort, self.trainers, other_roles) as frozen_columns:
                if self.private is not None and self.private.applies(phase, self.model.layout):
                    losses, gradients = self._private_gradients(self.private, cohort, phase, step, repeat)
                else:
                    losses, gradients = self._batch_gradients(cohort, phase, step, repeat)
                for place in (~losses.isfinite()).nonzero().flatten().tolist():
                    # Called only to cache the result, before the step makes all parameters NaN.
                    self.suspect_optimizers(cohort.rows[place], cohort.part.rows[place])
                for hook in self.plan.method.client.parts:
                    hook.correct(cohort, gradients)
                accumulate(cohort, phase, gradients)
                self.descend(phase, cohort, gradients, iteration, frozen_columns)
            summed_losses += losses
        return summed_losses / phase.steps

    def _batch_gradients(
        self, cohort: CohortTensors, phase: Phase, step: int, repeat: int, names: Collection[str] | None = None
    ) -> tuple[Float[Tensor, " users"], Tree]:
        """Draw a batch for each user, and return mean losses and gradients on it.

        Batches and router noise have a random stream per user. Dropout has a single stream for the whole pass, seeded
        with the name of the first user among others.

        Args:
            cohort: The cohort.
            phase: The phase.
            step: Local step within the round; -1 for a phase that runs before the first one.
            repeat: Repeat of the phase within the step.
            names: Names of the tensors to differentiate; all that the phase trains if None.
        """
        round_number = cohort.round_number
        drawn = self.batches.draw(cohort.owners, phase, round_number, step, repeat)
        noise = self._router_noise(cohort.names, round_number, phase.purpose, step, repeat)
        with self.model.randomness(self.plan.seed, cohort.names[0], round_number, step, repeat):
            return self.gradient(cohort, drawn, phase, noise, names)

    def _private_gradients(
        self, private: PrivateSteps, cohort: CohortTensors, phase: Phase, step: int, repeat: int
    ) -> tuple[Float[Tensor, " users"], Tree]:
        """Return losses and gradients: with noise for the entries of tensors that are uploaded, plain ones for others.

        A method may keep several copies of the model per user, of which only the first one is uploaded.

        Args:
            private: The private steps.
            cohort: The cohort.
            phase: The phase.
            step: Local step within the round.
            repeat: Repeat of the phase within the step.
        """
        # Rows of the first copies of all trainers come before those of further copies, which are never uploaded.
        first_copies = [i for i, row in enumerate(cohort.rows) if row < self.trainers]
        has_further_copies = len(first_copies) < len(cohort.rows)  # they need gradients without noise of all tensors
        plain_names = private.local_leaves(phase, self.model.layout, everything=has_further_copies)
        plain = self._batch_gradients(cohort, phase, step, repeat, plain_names) if plain_names else None
        place = step, repeat
        return private.step(self.model, self.batch_source, self.pass_size, cohort, phase, place, first_copies, plain)

    def suspect_optimizers(self, row: int, values: Float[Tensor, " columns"]) -> tuple[str, ...]:
        """Return the optimizers ("experts", "router") that may have made a user's loss infinite or NaN.

        The first result of a round is cached: later all parameters of the user may be NaN.

        Args:
            row: Row of the user.
            values: Its parameters.
        """
        if row in self.known_suspects:
            return self.known_suspects[row]
        # Which tensors an optimizer trains is given by their roles; the layout says where they are in ``values``.
        roles_by_optimizer: dict[str, frozenset[str]] = {}
        for optimizer, roles in self.plan.method.client.optimizers:
            earlier_roles = roles_by_optimizer.get(optimizer, frozenset())
            roles_by_optimizer[optimizer] = earlier_roles | roles
        suspects = find_suspects(self.model.layout, values, roles_by_optimizer)
        self.known_suspects[row] = suspects
        return suspects

    def _router_noise(self, names: Sequence[str], *place: str | int) -> Float[Tensor, "users *layers clusters"] | None:
        """Return noise for the router logits, from one random stream per user; None if the mixture has no noise.

        Args:
            names: Names of the users.
            place: Round, purpose of the phase, step and repeat, which complete the key of a stream.
        """
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
        """Take one step of each optimizer of a phase, in place on the columns that it trains.

        Args:
            phase: The phase.
            cohort: The cohort.
            gradients: Gradients by tensor name; emptied.
            iteration: Local step within the run, for learning rates.
            frozen_columns: True on entries that do not move. Their gradients are set to zero, so that they count
                neither in a norm nor in moments.
        """
        part = cohort.part
        for name, roles in phase.optimizers:
            if name == "router":
                part.router_steps += 1
                settings, step_count = self.plan.training.router, part.router_steps
            else:
                # The count is raised at the end of the local step, as several phases may train experts in it.
                settings, step_count = self.plan.training.experts, part.iterations + 1
            trained, rate = self.model.layout.touching(roles), learning_rate(settings, iteration, self.iterations)
            take_step(trained, cohort, gradients, settings, rate, step_count, frozen_columns)
            for hook in self.plan.method.client.parts:
                hook.stepped(cohort, {slot.name: cohort.tensors[slot.name] for slot in trained.slots}, rate)

    # ---------------------------------------------------------------- gradients

    def gradient(
        self,
        cohort: CohortTensors,
        drawn: Int[Tensor, "users batch ..."],
        phase: Phase,
        noise: Float[Tensor, "users *layers clusters"] | None = None,
        names: Collection[str] | None = None,
    ) -> tuple[Float[Tensor, " users"], Tree]:
        """Return mean losses ``(users,)``, and the gradients that a phase computes, by tensor name.

        A phase computes gradients of the tensors that it trains, and of tensors that a later phase trains with them
        (``Phase.leaves``).

        In float16 losses are scaled during the pass, to keep small gradients from becoming zero. Gradients have the
        dtype of the parameters (at least float32), or that of the model if nothing changes them before the step.

        Args:
            cohort: The cohort; running statistics of its nets are updated.
            drawn: A batch of each user, as drawn.
            phase: The phase.
            noise: Noise that is added to router logits.
            names: Names of the tensors to differentiate; all if None.
        """
        if self.model.dtype == torch.float16:
            run = partial(self._forward_backward, cohort, drawn, phase, noise, names)
            return scaled(lambda scales: run(scales=scales), self.batch_source.loss_counts(drawn))
        return self._forward_backward(cohort, drawn, phase, noise, names)

    def _forward_backward(
        self,
        cohort: CohortTensors,
        drawn: Int[Tensor, "users batch ..."],
        phase: Phase,
        noise: Float[Tensor, "users *layers clusters"] | None,
        names: Collection[str] | None,
        scales: Float[Tensor, " users"] | None = None,
    ) -> tuple[Float[Tensor, " users"], Tree]:
        """Run forward and backward passes, in micro-batches, with given loss scales; see :meth:`gradient`.

        Only the tensors to differentiate require a gradient, so that nothing is computed or kept for the rest.

        Args:
            cohort: The cohort; running statistics of its nets are updated.
            drawn: A batch of each user, as drawn.
            phase: The phase.
            noise: Noise that is added to router logits.
            names: Names of the tensors to differentiate; all if None.
            scales: Factor of the loss of each user in the backward pass; none if None.

        Returns:
            Mean losses, and gradients that are multiplied by the scales.
        """
        rows, owners, layout = cohort.part.rows, cohort.owners, self.model.layout
        num_targets = self.batch_source.loss_counts(drawn)  # of each user, without padding
        statistics = layout.only({STATISTICS}).slots  # running means and variances of batch norm
        if self.model.batchwise and len(num_targets.unique()) > 1:  # batch norm would see padding
            # No nets with batch norm have noised gradients (``names``) or train in float16 (``scales``).
            return self._gradient_by_size(cohort, drawn, phase, noise)
        tensors = self.tensors(rows)
        if noise is not None:  # a constant: the gradient of the noisy logits, computed below, is that of the logits
            tensors[CLIENT_ROUTER] = tensors[CLIENT_ROUTER] + noise
        for slot in statistics:  # updated in place; without the copy, a view of the rows
            tensors[slot.name] = tensors[slot.name].clone()
        trained = [slot.name for slot in layout.touching(phase.reached).slots]
        trained = trained if names is None else [name for name in trained if name in names]
        for name in trained:
            tensors[name] = tensors[name].detach().requires_grad_()
        model = self.model.without(phase.without) if phase.without else self.model
        total, gradients = torch.zeros(len(owners), device=rows.device), Tree()
        # Gradients get the dtype of the parameters, at least float32, if they are added up over micro-batches, changed
        # by a hook or merged with noised gradients. Otherwise they go straight into a step, in the dtype of the pass.
        is_micro_batched = drawn.shape[1] > self.pass_size.sequences
        in_dtype_of_rows = is_micro_batched or bool(self.plan.method.client.parts) or names is not None
        for micro_batch in self.batches.move(drawn, rows.device).split(self.pass_size.sequences, dim=1):
            num_losses = self.batch_source.loss_counts(micro_batch)  # of each user, without padding
            share = num_losses.to(rows.dtype) / num_targets.to(rows)  # weight of the micro-batch in the mean
            batch: Any = self.batch_source.read(phase.stream, owners, micro_batch)
            sample_shares = {} if cohort.sample_shares is None else {"shares": cohort.shares_of(micro_batch)}
            # Restricted again for each pass: its backward pass frees the buffers of the previous one.
            used = restrict(tensors, layout, layout.roles - phase.without) if phase.without else tensors
            losses, penalty = model.losses(used, owners, batch, train=True, **sample_shares)
            means = losses.flatten(1).sum(1) / num_losses.clamp(min=1)
            objective = means + self.plan.training.balance_weight * penalty
            for hook in self.plan.method.client.parts:
                penalty_of_hook = hook.penalty(tensors, cohort.ranks)
                objective = objective + require_per_user(self.plan.method.name, hook, penalty_of_hook, len(owners))
            leaves = [tensors[name] for name in trained]
            weight = share if scales is None else share * scales.to(share)
            new_gradients = torch.autograd.grad((objective * weight).sum(), leaves, materialize_grads=True)
            preconditioned = self._preconditioned(tensors, dict(zip(trained, new_gradients, strict=True)))
            for name, gradient in preconditioned.items():
                added = gradient.to(rows.dtype) if in_dtype_of_rows else gradient
                gradients[name] = gradients[name] + added if name in gradients else added
            total += (share * means.detach()).float()
        keep_statistics(layout, rows, tensors)
        self.batches.prefetch()
        return total.cpu(), gradients

    def _preconditioned(self, tensors: Tree, gradients: Tree) -> Tree:
        """Return the gradients of a mixture multiplied by its preconditioner; unchanged for methods without one.

        Args:
            tensors: Tensors of the users, from which the preconditioner is computed.
            gradients: Their gradients, by tensor name.
        """
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
        """Return losses and gradients of one batch per user, from one pass for each group of equal batch sizes.

        In one pass for all users the smaller batches would be padded, and batch norm would count the padding.

        Args:
            cohort: The cohort; running statistics of batch norm are updated in place.
            drawn: A batch of each user, padded to the largest size.
            phase: The phase, which decides of which tensors gradients are computed.
            noise: Noise that is added to router logits.

        Returns:
            Mean loss of each user, and gradients ``(users, *shape)`` by tensor name, as :meth:`gradient` returns them.
        """
        sizes, rows = self.batch_source.loss_counts(drawn), cohort.part.rows
        losses, trained = torch.zeros(len(rows)), self.model.layout.touching(phase.reached).slots
        gradients = {slot.name: rows.new_empty(len(rows), *slot.shape) for slot in trained}
        for size in sizes.unique().tolist():
            places = (sizes == size).nonzero().flatten()
            noise_of_group = None if noise is None else noise[places]
            group = cohort.only(places.tolist())
            losses[places], group_gradients = self.gradient(group, drawn[places, :size], phase, noise_of_group)
            rows[places] = group.part.rows  # with updated running statistics
            for name, gradient in group_gradients.items():
                gradients[name][places] = gradient
        return losses, gradients
