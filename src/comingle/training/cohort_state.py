"""Tensors of a cohort and the optimizers that update them.

AdamW and SGD are elementwise, so one update of a ``(users, columns)`` matrix equals an update by a separate optimizer
per user. The optimizers of torch keep one step count per tensor. Here users may have taken different numbers of steps
(partial participation), so the update is written out. Moments are at least float32.
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


def missing_flag_error(attribute: str, flag: str, *, training: bool) -> RuntimeError:
    """Return the error for a client hook that uses a cohort attribute without setting the flag that it requires.

    :func:`comingle.methods.own_errors` adds the hook's file and line.

    Args:
        attribute: Attribute or method of the cohort that the hook used, such as "began".
        flag: Flag of :class:`comingle.methods.base.ClientHook`, such as "looks_back".
        training: Whether hooks may use the attribute only while users train.
    """
    if training:
        why = f"no hook has {flag} or no user is training"
        allowed = f"begin, correct, stepped and end of a ClientHook with {flag} = True"
    else:
        why = f"no hook has {flag}"
        allowed = f"a ClientHook with {flag} = True"
    return RuntimeError(
        f"Cohort.{attribute}: got no tensors, as {why}; allowed: {allowed}; set {flag} = True in the hook's class"
    )


@dataclass(kw_only=True)
class CohortTensors(base.Cohort):
    """Users of a cohort and their tensors.

    Attributes:
        layout: Names and shapes of a user's tensors, in the order in which a row holds them.
        rows: Numbers of the rows in the state of all users.
        owners: Numbers of the trainers that own the rows.
        names: Names of the owners.
        state: State of these rows.
        round_number: The round, counted from 0.
        round_start: Parameters at the start of the round, if the method needs them.
        first_copies: Parameters of the first copy of each user at the start of the round, if the method needs them.
        mask: True where a user has a parameter; None without padding.
        sample_weights: Mixture weights of each training sample ``(clusters, samples)``, one tensor per user.
    """

    layout: Layout
    rows: list[int]
    owners: list[int]
    names: list[str]
    state: State
    round_number: int
    round_start: Float[Tensor, "users columns"] | None = None
    first_copies: Float[Tensor, "users columns"] | None = None
    mask: Bool[Tensor, "users columns"] | None = None
    sample_weights: list[Float[Tensor, "clusters samples"]] | None = None

    @property
    def tensors(self) -> Tree:
        """Views of the tensors of the users, by name."""
        return self.layout.views(self.state.rows)

    @property
    def began(self) -> Tree:
        """Tensors at the start of the round, by name; kept only if a client hook sets ``looks_back = True``.

        Raises:
            RuntimeError: No hook sets ``looks_back``, or no user is training.
        """
        if self.round_start is None:
            raise missing_flag_error("began", "looks_back", training=True)
        return self.layout.views(self.round_start)

    @property
    def exchanged(self) -> Tree:
        """Tensors of the first copy of each user's model, the one that it shares, at the start of the round, by name.

        They are kept only if a client hook sets ``looks_across = True``.

        Raises:
            RuntimeError: No hook sets ``looks_across``, or no user is training.
        """
        if self.first_copies is None:
            raise missing_flag_error("exchanged", "looks_across", training=True)
        return self.layout.views(self.first_copies)

    @property
    def kept(self) -> Tree:
        """Tensors that the client hooks keep for each user."""
        return self.state.kept

    @property
    def ranks(self) -> Int[Tensor, " users"]:
        """LoRA rank of each user."""
        return self.state.ranks

    @contextmanager
    def subset(self, positions: Sequence[int]) -> Iterator[CohortTensors]:
        """Yield a cohort of some users of this cohort, for a step that others skip; on exit, write their changes back.

        Args:
            positions: Positions of the users in this cohort, such as ``[0, 2]``.
        """
        all_positions = list(range(len(self.rows)))
        if list(positions) == all_positions:  # no copy to write back
            yield self
            return
        subset = self._subset(positions, self.state.take(positions))
        yield subset
        self.state.put(positions, subset.state)

    def copy_of(self, positions: Sequence[int]) -> CohortTensors:
        """Return a cohort with copies of the tensors of some users, for passes without an optimizer step.

        It has no optimizer moments.

        Args:
            positions: Positions of the users in this cohort, such as ``[0, 2]``.
        """
        index, state = list(positions), self.state
        no_moments = state.rows.new_empty(len(index), 0)
        state_without_moments = replace(
            state,
            rows=state.rows[index],
            first=no_moments,
            second=no_moments,
            iterations=state.iterations[index],
            router_steps=state.router_steps[index],
            ranks=state.ranks[index],
            versions=state.versions[index],
            kept={name: t[index] for name, t in state.kept.items()},
        )
        return self._subset(index, state_without_moments)

    def _subset(self, positions: Sequence[int], state: State) -> CohortTensors:
        """Return a cohort of some users of this cohort.

        Args:
            positions: Positions of the users in this cohort, such as ``[0, 2]``.
            state: State of these users.
        """
        index = list(positions)
        return replace(
            self,
            rows=[self.rows[i] for i in index],
            owners=[self.owners[i] for i in index],
            names=[self.names[i] for i in index],
            state=state,
            round_start=None if self.round_start is None else self.round_start[index],
            first_copies=None if self.first_copies is None else self.first_copies[index],
            mask=None if self.mask is None else self.mask[index],
            sample_weights=None if self.sample_weights is None else [self.sample_weights[i] for i in index],
        )

    def weights_of(self, drawn: Int[Tensor, "users batch"]) -> Float[Tensor, "users clusters batch"]:
        """Return the mixture weights of the drawn samples; values at ``PAD`` are arbitrary.

        Args:
            drawn: Numbers of the samples of each user.
        """
        assert self.sample_weights is not None
        sample_numbers = drawn.to(self.state.rows.device).clamp(min=0)  # PAD, which is negative, becomes sample 0
        weights_of_users = []
        for weights, numbers in zip(self.sample_weights, sample_numbers, strict=True):
            weights_of_users.append(weights[:, numbers])
        return torch.stack(weights_of_users)


@dataclass(frozen=True, kw_only=True)
class FrozenColumns:
    """Columns of the first copy of a user that no step changes during the first ``rounds`` rounds."""

    columns: Bool[Tensor, " columns"]
    rounds: int


@contextmanager
def freeze_columns(
    newcomer: FrozenColumns | None, cohort: CohortTensors, trainers: int, other_roles: Bool[Tensor, " columns"] | None
) -> Iterator[Bool[Tensor, "users columns"] | None]:
    """Freeze columns for one optimizer step; restore their values on exit.

    Weight decay and running statistics would change them even with zero gradients.

    Args:
        newcomer: Columns that stay frozen in the first rounds of a user who joins a finished federation, only in the
            first copy of its parameters; None otherwise.
        cohort: The users who are trained in one batch, with their tensors.
        trainers: Number of users that train. Row ``copy * trainers + i`` is a copy of user i, so that rows below
            ``trainers`` are first copies.
        other_roles: True on columns to freeze for all users: those of roles that this step does not train, but which
            lie in the same tensors, such as generalists beside specialists. None for none.

    Yields:
        True on frozen entries; None if nothing is frozen.
    """
    freezes_newcomer = newcomer is not None and cohort.round_number < newcomer.rounds
    if not freezes_newcomer and other_roles is None:
        yield None
        return
    is_frozen = torch.zeros_like(cohort.state.rows, dtype=torch.bool)
    if other_roles is not None:
        is_frozen |= other_roles.to(is_frozen.device)
    if newcomer is not None and freezes_newcomer:
        is_first_copy = torch.tensor([row < trainers for row in cohort.rows], device=is_frozen.device)
        is_frozen |= is_first_copy.unsqueeze(1) & newcomer.columns.to(is_frozen.device)
    frozen_values = cohort.state.rows[is_frozen]
    yield is_frozen
    cohort.state.rows[is_frozen] = frozen_values


Rows = Float[Tensor, "users columns"]


def learning_rate(settings: OptimizerSection, step: int, total: int) -> float:
    """Return the learning rate of a step: constant, or a cosine from the rate down to ``final_fraction`` of it.

    Args:
        settings: Settings of the optimizer.
        step: The step, counted from 0.
        total: Number of steps of the schedule.
    """
    highest = settings.learning_rate
    if settings.schedule == "constant":
        return highest
    lowest = settings.final_fraction * highest
    progress = min(1.0, step / max(1, total))  # from 0 to 1
    return lowest + (highest - lowest) * 0.5 * (1 + math.cos(math.pi * progress))


def clip(gradient: Rows, norm: float) -> Rows:
    """Scale the gradient of each user down to a norm of at most ``norm``, over all its tensors together."""
    norms = gradient.norm(dim=1, keepdim=True)
    factors = norm / norms.clamp(min=norm)  # 1 for gradients within the norm
    return gradient * factors


ENTRIES_CONVERTED_AT_ONCE = 1 << 20
"""Number of entries of a low-precision gradient that are converted at a time, to fit CPU caches; measured."""


@torch.no_grad()
def descend(settings: OptimizerSection, rate: float, values: Tensor, gradient: Tensor) -> None:
    """Take one step of SGD without momentum, in place.

    Args:
        settings: Settings of the optimizer.
        rate: Learning rate.
        values: Parameters ``(users, ...)``.
        gradient: Gradients, which may have a lower precision than ``values``.
    """
    if settings.weight_decay:
        values.mul_(1 - rate * settings.weight_decay)
    if gradient.dtype == values.dtype:
        users_at_once = len(values)
    else:  # convert the gradient in pieces, instead of a copy of all of it
        entries_per_user = values[:1].numel()
        users_at_once = max(1, ENTRIES_CONVERTED_AT_ONCE // max(1, entries_per_user))
    for value_piece, gradient_piece in zip(values.split(users_at_once), gradient.split(users_at_once), strict=True):
        value_piece.sub_(gradient_piece.to(values.dtype), alpha=rate)


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
    """Take one step of SGD or AdamW for every user, in place, after clipping the gradient of each user.

    The steps are those of ``torch.optim``, except that each user has a step count of its own.

    Args:
        settings: Settings of the optimizer.
        rate: Learning rate.
        rows: Parameters.
        gradient: Gradients.
        first: First moments; may be empty if the optimizer has none.
        second: Second moments; may be empty if the optimizer has none.
        steps: Step count of each user, including this step.
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
    t = steps.to(rows.dtype).unsqueeze(1)  # (users, 1)
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = (second / (1 - beta2**t)).sqrt_().add_(settings.eps)
    rows.sub_(first / denominator * (rate / (1 - beta1**t)))


def accumulate(cohort: CohortTensors, phase: Phase, gradients: Tree) -> None:
    """Add all gradients to the stored ones, then move those that this phase trains back to ``gradients``.

    For example, a backward pass of the experts' phase may also compute gradients of the router. All gradients of a
    tensor since its last step are added up and used in its next step.

    Args:
        cohort: The cohort, whose stored gradients are updated; nothing is done for methods that store none.
        phase: The phase that is about to take a step.
        gradients: Gradients by tensor name, updated in place; those of tensors that other phases train are removed.
    """
    if GRADIENTS not in cohort.kept:
        return
    layout, stored = cohort.layout, cohort.kept[GRADIENTS]
    trained = layout.touching(phase.roles)
    trained_columns = layout.span(trained)
    new_gradients = torch.zeros_like(stored)  # (users, columns)
    for name, view in layout.views(new_gradients).items():
        if name in gradients:
            view.copy_(gradients.pop(name))
    if cohort.mask is not None:
        # A user without anything to train in this phase (one expert and no router) stores no gradients.
        has_trained_entries = cohort.mask[:, trained_columns].any(1, keepdim=True)
        new_gradients *= cohort.mask & has_trained_entries
    stored += new_gradients
    # Move the gradients of this phase, which are used in this step.
    gradients |= trained.views(stored[:, trained_columns].clone())
    stored[:, trained_columns] = 0


def take_step(
    trained: Layout,
    cohort: CohortTensors,
    gradients: Tree,
    settings: OptimizerSection,
    rate: float,
    step_count: Int[Tensor, " users"],
    frozen_columns: Bool[Tensor, "users columns"] | None,
) -> None:
    """Take one step of one optimizer, in place.

    Args:
        trained: Layout of the tensors that the optimizer trains.
        cohort: The users who are trained in one batch, with their tensors.
        gradients: Gradients by tensor name; those of the tensors in ``trained`` are removed.
        settings: Settings of the optimizer.
        rate: Learning rate.
        step_count: Step count of each user, including this step.
        frozen_columns: True on entries that do not change.
    """
    layout, state = cohort.layout, cohort.state
    # SGD without clipping and momentum ("memoryless") can update each tensor on its own. Joining them into one gradient
    # would take a large copy for whole nets.
    if settings.memoryless and cohort.mask is None and frozen_columns is None:
        views = layout.views(state.rows)
        for slot in trained.slots:
            descend(settings, rate, views[slot.name], gradients.pop(slot.name))
        return
    columns = layout.span(trained)
    gradient = flatten([gradients.pop(slot.name) for slot in trained.slots], state.rows.dtype)
    if cohort.mask is not None:  # False on padding, the entries that a user with a smaller rank or fewer experts lacks
        gradient *= cohort.mask[:, columns]
    if frozen_columns is not None:
        gradient.masked_fill_(frozen_columns[:, columns], 0.0)

    # Moments that no optimizer uses have 0 columns.
    has_first, has_second = state.first.shape[1] > 0, state.second.shape[1] > 0
    values = state.rows[:, columns]
    first = state.first[:, columns] if has_first else state.first
    second = state.second[:, columns] if has_second else state.second
    update(settings, rate, values, gradient, first, second, step_count)
    if isinstance(columns, slice):  # a slice makes views, so the update was in place
        return
    state.rows[:, columns] = values
    if has_first:
        state.first[:, columns] = first
    if has_second:
        state.second[:, columns] = second


def keep_statistics(layout: Layout, rows: Float[Tensor, "users columns"], tensors: Tree) -> None:
    """Copy the running statistics of batch norm, which a forward pass has updated, back to the rows.

    Args:
        layout: Names and shapes of a user's tensors, in the order in which a row holds them.
        rows: Tensors of the users.
        tensors: Tensors of the forward pass.
    """
    statistics = layout.only({STATISTICS}).slots
    if not statistics:
        return
    views_of_rows = layout.views(rows)
    for slot in statistics:
        views_of_rows[slot.name].copy_(tensors[slot.name])
