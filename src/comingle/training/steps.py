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
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from comingle.methods.base import Phase
from comingle.methods.validation import require_one_penalty_per_user
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
        pass_size: Largest number of users and of sequences in one pass.
        users: Number of users that are trained or scored in the block.
        device: Device of the model.

    Raises:
        RecipeError: A pass does not fit into the memory of the device; names the setting to lower and its next value.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        num_users, num_sequences = min(pass_size.users, users), pass_size.sequences
        if num_users > 1:
            advice = f"runtime.users_per_step={num_users // 2}, or auto"
        elif num_sequences > 1:
            advice = f"runtime.micro_batch={num_sequences // 2}"
        else:
            advice = "a smaller base, training.context or adapters.rank"
        users_phrase = "1 user" if num_users == 1 else f"{num_users} users"
        raise RecipeError(
            f"runtime: not enough memory on {device} for a pass of {users_phrase} with {num_sequences} sequences or "
            f"samples each; try {advice}"
        ) from None


def diverged(user: str, what: str, suspect_optimizers: Sequence[str] = ("experts",)) -> DivergenceError:
    """Return the error for a user whose loss or tensors are not finite.

    Args:
        user: Name of the user.
        what: Description of the value, such as "training loss is nan in round 1, local step 3".
        suspect_optimizers: Optimizers that may have caused it, "experts" or "router"; empty before any training.
    """
    if suspect_optimizers:
        rates = " and ".join(f"training.{name}.learning_rate" for name in suspect_optimizers)
        norms = " and ".join(f"training.{name}.clip_norm" for name in suspect_optimizers)
        advice = f"try a smaller {rates}, or {norms}: 1.0"
    else:
        advice = "nothing has been trained, so the base model is the cause"
    return DivergenceError(f"user {user!r}: {what}; {advice}")


def find_suspects(
    layout: Layout, row: Float[Tensor, " columns"], roles_by_optimizer: Mapping[str, frozenset[str]]
) -> tuple[str, ...]:
    """Return the optimizers that may have made the loss of a user infinite or NaN, such as ``("router",)``.

    Suspects are the optimizer that trains the parameter of largest magnitude, and any other that trains one of at least
    a tenth of it. NaN counts as infinite.

    Args:
        layout: Names and shapes of a user's tensors, in the order in which a row holds them.
        row: Tensors of the user.
        roles_by_optimizer: Roles that each optimizer trains, by its name.
    """
    largest_magnitudes: dict[str, float] = {}
    for optimizer, roles in roles_by_optimizer.items():
        magnitudes = row[layout.mask(roles).to(row.device)].abs()
        if len(magnitudes):
            largest_magnitudes[optimizer] = magnitudes.nan_to_num(nan=torch.inf).max().item()
    suspects = []
    for optimizer, magnitude in largest_magnitudes.items():
        if magnitude >= max(largest_magnitudes.values()) / 10:
            suspects.append(optimizer)
    return tuple(suspects)


def find_nonfinite_users(
    losses: Float[Tensor, "steps users"], rows: Float[Tensor, "users columns"], round_number: int
) -> dict[int, str]:
    """Return the users of a cohort whose losses or tensors are not finite.

    Args:
        losses: Training losses in nats.
        rows: Tensors of the users after their local steps.
        round_number: The round, counted from 0.

    Returns:
        A phrase with the reason, by the user's position in the cohort, such as
        ``{2: "training loss is nan in round 1, local step 3"}``.
    """
    reason_by_position: dict[int, str] = {}
    for step, position in (~losses.isfinite()).nonzero().tolist():
        if position not in reason_by_position:  # report the first step only
            loss = losses[step, position].item()
            reason_by_position[position] = f"training loss is {loss} in round {round_number + 1}, local step {step + 1}"
    # The last step may break tensors without a loss that shows it. A sum is finite only if all entries are.
    for position in (~rows.sum(1).isfinite()).nonzero().flatten().tolist():
        if position not in reason_by_position:
            reason_by_position[position] = f"not all tensors are finite after round {round_number + 1}"
    return reason_by_position


Pass = Callable[[Float[Tensor, " users"]], tuple[Float[Tensor, " users"], Tree]]
"""A forward and backward pass: maps each user's loss scale to its unscaled loss and its scaled gradients."""

_TARGET_SCALE = 2.0**4
"""Magnitude to which gradients at the head are scaled, for every batch size."""

_SCALE_DECAY = 2.0**-4
"""Factor of a loss scale after its gradients overflow."""

_SMALLEST_SCALE = 2.0**-24
"""Loss scale below which gradients are returned even if they overflow; the smallest positive float16 number."""


def starting_scales(targets: Int[Tensor, " users"]) -> Float[Tensor, " users"]:
    """Return the first loss scale to try for each user, for loss scaling in float16.

    It is 2^4 times the number n of targets, rounded down to a power of two, as gradients shrink like 1/n. For example,
    100 targets have the scale ``16 * 64``.

    Args:
        targets: Number of targets in the batch of each user.
    """
    powers_of_two = torch.exp2(torch.log2(targets.clamp(min=1).float()).floor())
    return _TARGET_SCALE * powers_of_two


def run_with_loss_scaling(run: Pass, targets: Int[Tensor, " users"]) -> tuple[Float[Tensor, " users"], Tree]:
    """Run a pass with loss scaling; repeat it with a lower scale for users whose gradients are not finite.

    Args:
        run: Runs a forward and backward pass with the given loss scales; returns losses, and gradients times scales.
        targets: Number of targets in the batch of each user.

    Returns:
        Losses, and float32 gradients ``(users, ...)``, which stay infinite or NaN if no scale helps.
    """
    scales = starting_scales(targets)
    while True:
        losses, scaled_gradients = run(scales)
        gradients = Tree()
        for name, t in scaled_gradients.items():
            scale_of_user = scales.to(t.device).view(-1, *[1] * (t.dim() - 1))  # (users, 1, ..., 1)
            gradients[name] = t / scale_of_user
        if any(isinstance(t, FakeTensor) for t in gradients.values()):  # shapes only, to count costs
            return losses, gradients
        has_finite_gradients = torch.stack([t.flatten(1).isfinite().all(1).cpu() for t in gradients.values()]).all(0)
        # The loss itself is not scaled, so no scale helps if it is not finite.
        keeps_scale = has_finite_gradients | ~losses.isfinite()
        has_smallest_scale = scales <= _SMALLEST_SCALE
        if bool((keeps_scale | has_smallest_scale).all()):
            return losses, gradients
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
        """Return whether noise must be added to the gradients of some local steps, because users upload the results.

        Args:
            phase: The kind of local step: which tensors it trains, and on which split of the data. The result is False
                if it trains no shared tensor, or fine-tunes a model that is not uploaded.
            layout: Layout of the model's trainable tensors.
        """
        is_uploaded = phase.label != TUNING  # fine-tuned models stay local
        return is_uploaded and bool(self.noised_names(phase, layout))

    def noised_names(self, phase: Phase, layout: Layout) -> list[str]:
        """Return the names of the tensors that get noised gradients: users share them, and the phase trains them.

        A tensor may have entries of several roles, such as experts; one entry that is shared and trained is enough.

        Args:
            phase: The kind of local step: which tensors it trains, and on which split of the data.
            layout: Layout of the model's trainable tensors.
        """
        names = []
        for slot in layout.slots:
            is_shared = slot.role_mask(self.plan.method.shared)  # for each entry, such as an expert
            is_trained = slot.role_mask(phase.roles)
            if any(shared and trained for shared, trained in zip(is_shared, is_trained, strict=True)):
                names.append(slot.name)
        return names

    def plain_names(self, phase: Phase, layout: Layout, *, everything: bool) -> list[str]:
        """Return the names of the tensors for which a phase needs gradients without noise, as they are not uploaded.

        A tensor may have entries of several roles, such as experts; one entry that is not shared is enough.

        Args:
            phase: The phase. It computes gradients for the roles ``phase.reached``: those that it trains, and some that
                a later phase trains.
            layout: Names and shapes of a user's tensors, in the order in which a row holds them.
            everything: Whether to return all tensors for which the phase computes gradients. This is needed if a user
                has a second copy of its model in the cohort, none of whose tensors are uploaded.
        """
        names = []
        for slot in layout.touching(phase.reached).slots:
            is_shared = slot.role_mask(self.plan.method.shared)  # for each entry, such as an expert
            is_reached = slot.role_mask(phase.reached)
            has_local_entry = any(reached and not shared for shared, reached in zip(is_shared, is_reached, strict=True))
            if everything or has_local_entry:
                names.append(slot.name)
        return names

    def local_roles(self, layout: Layout) -> frozenset[str]:
        """Return the roles that users train but do not share, which are therefore trained without privacy noise."""
        return (layout.roles & self.plan.method.client.trained) - self.plan.method.shared

    def works(self, batch_source: BatchSource) -> dict[str, Work]:
        """Return each trainer's numbers of examples and noisy steps, for privacy accounting, by name."""
        works: dict[str, Work] = {}
        for number, trainer in enumerate(batch_source.trainers):
            works[trainer.name] = self.work(batch_source, number)
        return works

    def work(self, batch_source: BatchSource, trainer: int) -> Work:
        """Return the number of examples, batch size, steps and rounds of one trainer, for its privacy accounting.

        Args:
            batch_source: Batch source of the trainers.
            trainer: Number of the user who trains (0 if one model is trained on all users' data).

        Raises:
            RecipeError: The ``delta`` of (epsilon, delta) privacy is too large for the trainer's number of examples: it
                would allow publishing one of them.
        """
        name = batch_source.trainers[trainer].name
        num_examples = batch_source.examples(trainer)
        if self.plan.privacy is not None:
            check_delta(self.plan.privacy, name, num_examples)
        return work_of(self.plan, name, examples=num_examples, local_steps=batch_source.steps(trainer))

    # ---------------------------------------------------------------- a step

    def step(
        self,
        model: Model,
        batch_source: BatchSource,
        pass_size: PassSize,
        cohort: CohortTensors,
        phase: Phase,
        step_and_repeat: Sequence[int],
        noised_users: Sequence[int],
        plain: tuple[Float[Tensor, " users"], Tree] | None,
    ) -> tuple[Float[Tensor, " users"], Tree]:
        """Return losses and gradients of a step in which tensors that are uploaded get noised gradients.

        A user may have several copies of its model in the cohort. Only the first copy is uploaded, so further copies
        get gradients without noise.

        Args:
            model: The model.
            batch_source: Source of examples.
            pass_size: Number of sequences in one pass.
            cohort: The users who are trained in one batch, with their tensors.
            phase: Phase of the step.
            step_and_repeat: Local step in the round and repeat of the phase within the step, such as ``(3, 0)``.
            noised_users: Positions in the cohort of the first copies of users, whose shared tensors are uploaded.
            plain: Losses and gradients without noise, for everything that is not noised; None if the phase trains only
                shared tensors.

        Returns:
            Mean losses, those of ``plain`` if given; and gradients ``(users, *shape)`` of all tensors of the phase.
        """
        num_users = len(cohort.rows)
        losses, plain_gradients = torch.zeros(num_users), Tree()
        if plain is not None:
            losses, plain_gradients = plain
        if not noised_users:
            return losses, plain_gradients
        all_noised = len(noised_users) == num_users
        noised_cohort = cohort if all_noised else cohort.copy_of(noised_users)
        noised_losses, noised_gradients = self.gradients(
            model, batch_source, pass_size, noised_cohort, phase, step_and_repeat
        )
        if plain is None:
            losses[list(noised_users)] = noised_losses
        merged = self.merge(model.layout, phase, plain_gradients, noised_gradients, noised_users, num_users)
        return losses, merged

    def gradients(
        self,
        model: Model,
        batch_source: BatchSource,
        pass_size: PassSize,
        cohort: CohortTensors,
        phase: Phase,
        step_and_repeat: Sequence[int],
    ) -> tuple[Float[Tensor, " users"], Tree]:
        """Return the losses and noised gradients of one step of DP-SGD, for each user of a cohort.

        The privacy mechanism draws examples of each user, has :meth:`clipped_sums` clip the gradient of each example
        and add them up, and adds noise. Only parameters that users share (upload) get such gradients.

        Args:
            model: The model.
            batch_source: Source of the users' examples, by index.
            pass_size: Number of sequences in one forward and backward pass.
            cohort: Users of the step.
            phase: Phase of the step, which says which parameters it trains.
            step_and_repeat: Local step in the round and repeat of the phase within the step, such as ``(3, 0)``.

        Returns:
            Mean loss of each user over its drawn examples, and gradients ``(users, *shape)`` by tensor name. Of a
            tensor that is only partly shared, they have the shared entries.
        """
        layout, rows, round_number = model.layout, cohort.state.rows, cohort.round_number
        shared = self._shared_tensors(layout, rows)
        streams = []  # for each user, the key of the random stream of its noise
        for i, name in enumerate(cohort.names):
            # A round that is repeated after an interruption may have other tensors. With the same noise, the difference
            # of their gradients would be revealed; so the key contains a digest of the tensors.
            tensors_digest = digest({n: t[i] for n, t in shared.items()})
            streams.append((name, round_number, phase.purpose, *step_and_repeat, tensors_digest))

        # Local roles take no part in this pass. They are trained without noise on the same private data, which they
        # would reveal through the gradients of the shared roles.
        roles_of_pass = layout.roles - self.local_roles(layout)
        tensors = restrict(model.tensors(rows), layout, roles_of_pass)
        noised_names = self.noised_names(phase, layout)

        def sum_clipped(examples: Int[Tensor, "u n"], bound: float) -> tuple[Tree, Float[Tensor, " u"]]:
            """Return sums of gradients clipped to the norm ``bound``, and of losses, over examples of each user."""
            return self.clipped_sums(model, batch_source, tensors, noised_names, cohort, examples, bound)

        step = PrivateStep(
            works=[self.work(batch_source, trainer) for trainer in cohort.owners],  # numbers of examples and of steps
            streams=streams,
            batch=pass_size.sequences,
            clipped_sums=sum_clipped,
        )
        # Dropout has one random stream for the whole pass, seeded by the secret key.
        with model.randomness(self.mechanism.key, cohort.names[0], round_number, *step_and_repeat):
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
            leaves: Names of the tensors to differentiate, which are trained with noise.
            cohort: Users of the step.
            indices: Indices of the examples of each user, padded with ``PAD``.
            bound: Clip norm of the gradient of one example.
        """
        examples = batch_source.examples_at(cohort.owners, indices, cohort.round_number)
        examples = examples.to(cohort.state.rows.device)
        return self.clipped_sums_of_batch(model, batch_source, tensors, leaves, cohort.owners, examples, bound)

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

        In the pass, every example is a row with its own copy of the user's tensors. So one backward pass yields the
        gradient of each example.

        Args:
            model: The model.
            batch_source: Batch source that reads the examples.
            tensors: Tensors of the users by name, ``(users, *shape)``, without those that are trained without noise.
            leaves: Names of the tensors to differentiate, which are trained with noise.
            trainer_numbers: For each user, the number of the trainer whose data it trains on.
            examples: The ``n`` examples of each user, as the batch source encodes them.
            bound: Clip norm of the gradient of one example.

        Returns:
            The sums of the gradients by name, ``(users, *shape)``, and those of the losses, ``(users,)``, both float64.
        """
        num_users, num_examples = examples.shape[:2]
        # Such as [4, 4, 7, 7] for 2 examples of trainer 4 and 2 of trainer 7.
        trainer_of_row = [trainer for trainer in trainer_numbers for _ in range(num_examples)]
        tensors_of_rows = {name: t.detach().repeat_interleave(num_examples, 0) for name, t in tensors.items()}
        for name in leaves:
            tensors_of_rows[name].requires_grad_()
        example_rows = examples.flatten(0, 1).unsqueeze(1)  # one example per row of the pass
        batch: Any = batch_source.read("train", trainer_of_row, example_rows)
        shared_model = model.without(self.local_roles(model.layout))  # only roles that are trained with noise
        losses = shared_model.losses_in_fixed_order(tensors_of_rows, trainer_of_row, batch)
        num_targets = batch_source.loss_counts(example_rows).clamp(min=1)
        mean_losses = losses.flatten(1).sum(1) / num_targets  # of each example
        # Rows do not mix, so row i of the gradient of the sum is the gradient of example i.
        leaf_tensors = [tensors_of_rows[name] for name in leaves]
        gradients = torch.autograd.grad(mean_losses.sum(), leaf_tensors, materialize_grads=True)
        clipped_gradients = clipped(dict(zip(leaves, gradients, strict=True)), bound)
        sums: Tree = {}
        for name, t in clipped_gradients.items():
            sums[name] = t.view(num_users, num_examples, *t.shape[1:]).sum(1)
        return sums, mean_losses.detach().double().view(num_users, num_examples).sum(1).cpu()

    def _shared_tensors(self, layout: Layout, rows: Float[Tensor, "users columns"]) -> Tree:
        """Return the shared tensors of users by name, as views.

        Of a tensor of which users share only a part, such as some experts, the view has that part.

        Args:
            layout: Names and shapes of a user's tensors, in the order in which a row holds them.
            rows: Parameters of the users.
        """
        return restrict(layout.views(rows), layout, self.plan.method.shared)

    def merge(
        self, layout: Layout, phase: Phase, plain: Tree, noised: Tree, noised_users: Sequence[int], users: int
    ) -> Tree:
        """Return plain gradients in which noised ones replace the shared entries of some users.

        Args:
            layout: Names and shapes of a user's tensors, in the order in which a row holds them.
            phase: Phase of the step.
            plain: Gradients ``(users, *shape)`` without noise, of tensors with local entries.
            noised: Gradients of the shared entries of each tensor, such as those of the generalists
                ``(noised users, generalists, ...)``.
            noised_users: Positions in the cohort of the users with noised gradients, such as ``[0, 2]``.
            users: Number of users in the cohort.
        """
        merged = Tree()
        for slot in layout.touching(phase.reached).slots:
            name = slot.name
            if name not in noised:
                merged[name] = plain[name]
                continue
            if name in plain:
                merged[name] = plain[name].clone()
            else:
                merged[name] = noised[name].new_zeros(users, *slot.shape)
            shared_experts = slot.experts_with(self.plan.method.shared)
            if len(shared_experts) == len(slot.roles):  # the whole tensor is shared
                merged[name][list(noised_users)] = noised[name]
            else:  # every pair of a noised user and a shared expert
                user_index = torch.tensor(noised_users).unsqueeze(1)  # (noised users, 1)
                expert_index = torch.tensor(shared_experts)
                merged[name][user_index, expert_index] = noised[name]
        return merged


def private_steps(mechanisms: Sequence[PrivacyMechanism], model: Model, plan: RunPlan) -> PrivateSteps | None:
    """Return the local steps of the mechanism that protects single examples; None if a run has no such mechanism.

    Args:
        mechanisms: Privacy mechanisms of a client.
        model: The model.
        plan: Settings of the run, in the form that training uses.

    Raises:
        RecipeError: The model has batch norm, which mixes the examples of a batch, or its forward pass needs a tensor
            that is trained without noise.
    """
    example_mechanisms = [mechanism for mechanism in mechanisms if overrides(mechanism, "client_gradients")]
    if not example_mechanisms:
        return None
    where = f"privacy: method {plan.method.name}"
    if model.batchwise:
        raise RecipeError(
            f"{where}: batch norm mixes the examples of a batch; allowed: a net with group norm, such as "
            "net:resnet9-group"
        )
    steps = PrivateSteps(mechanism=example_mechanisms[0], plan=plan)
    roles_without_noise = steps.local_roles(model.layout)
    try:
        model.without(roles_without_noise)  # fails if the forward pass needs them
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None
    return steps


@dataclass(kw_only=True)
class Steps:
    """Takes the local steps of users, one cohort at a time: draws batches, computes gradients, updates tensors."""

    model: Model
    plan: RunPlan
    trainers: int
    source: BatchSource | Callable[[], BatchSource]
    """Batch source of the trainers, or a function that makes it on first use."""
    most_steps: int | None = None
    """Largest number of local steps per round over the users of all processes; None if all are in this one."""
    private: PrivateSteps | None = None
    """Steps with gradients from a privacy mechanism."""
    frozen_columns: FrozenColumns | None = None
    """Columns that stay frozen for a user who joins a finished federation."""
    suspects_by_row: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Optimizers that may have made a row non-finite in this round, by row."""

    def __post_init__(self) -> None:
        """Check that the model has all roles that the method needs."""
        check_needs(self.plan.method, self.model.name, self.model.layout)

    @cached_property
    def batch_source(self) -> BatchSource:
        """Batch source of the trainers, made on first use if ``source`` is a function."""
        if isinstance(self.source, BatchSource):
            return self.source
        return self.source()

    @cached_property
    def batches(self) -> Batches:
        """The batch source; on GPUs, a prefetcher of it."""
        device = self.model.device
        if device.type == "cuda":
            return Prefetcher(self.batch_source, device)
        return self.batch_source

    @cached_property
    def pass_size(self) -> PassSize:
        """Largest number of users, and of sequences or samples of each, in one forward and backward pass."""
        return self.batch_source.pass_size(self.model.device, self.model.layout.columns)

    @property
    def local_steps(self) -> int:
        """Number of local steps per round of the trainer that takes most, among those of all processes of the run."""
        if self.most_steps is not None:  # set if other processes have trainers, too
            return self.most_steps
        return self._local_steps_here

    @cached_property
    def _local_steps_here(self) -> int:
        """Largest number of local steps per round over the trainers of this process."""
        return self.batch_source.most_steps

    @property
    def iterations(self) -> int:
        """Number of local steps in the whole run, over which learning rates decay."""
        return self.plan.training.rounds * self.local_steps

    def tensors(self, rows: Float[Tensor, "users columns"]) -> Tree:
        """Return the trained tensors of users by name, ``(users, *shape)``, in the dtype of the model.

        Args:
            rows: Parameters of the users.
        """
        return self.model.tensors(rows)

    # ---------------------------------------------------------------- iterations

    def take_local_step(
        self, cohort: CohortTensors, phases: Sequence[Phase], step: int, active: Bool[Tensor, " users"]
    ) -> Float[Tensor, " users"]:
        """Take one local step of a cohort: each phase that is due, for the users that are active.

        A phase with ``turns=2`` and ``turn=0`` is due in rounds 0, 2, 4, so that two phases can alternate. Within a
        round, a phase with ``every=3`` is due after every third local step of a user.

        Args:
            cohort: The cohort, updated in place.
            phases: Phases of the method.
            step: Local step within the round, counted from 0.
            active: Whether each user takes this step.

        Returns:
            Training losses in nats; 0 for users that are not active.
        """
        losses = torch.zeros(len(cohort.rows))
        is_active = active.tolist()
        steps_in_run = (cohort.state.iterations + 1).tolist()  # of each user, with this one
        for phase in phases:
            if cohort.round_number % phase.turns != phase.turn:  # not due in this round
                continue
            due_users = [i for i, steps in enumerate(steps_in_run) if is_active[i] and steps % phase.every == 0]
            if not due_users:
                continue
            step_losses = torch.zeros(len(due_users))  # replaced below; type checkers do not know that the block runs
            with cohort.subset(due_users) as due_cohort:
                step_losses = self.take_phase(due_cohort, phase, step)
            if phase.optimizer != "router":  # a router may train on validation data; report training losses only
                losses[due_users] = step_losses
        cohort.state.iterations += active.to(cohort.state.iterations)
        return losses

    def take_phase(self, cohort: CohortTensors, phase: Phase, step: int) -> Float[Tensor, " users"]:
        """Take the ``phase.steps`` optimizer steps of one phase, in place, each on a batch of its own.

        Args:
            cohort: The users who are trained in one batch, with their tensors.
            phase: The kind of local step: which tensors it trains, and on which split of the data.
            step: Local step within the round; -1 for phases before the first one.

        Returns:
            Mean loss of each user over these steps.
        """
        summed_losses = torch.zeros(len(cohort.rows))
        step_in_run = cohort.round_number * self.local_steps + max(step, 0)  # for learning rates
        other_roles = self.model.layout.other_roles_mask(phase.roles)  # columns of other roles in the same tensors
        is_private = self.private is not None and self.private.applies(phase, self.model.layout)
        for repeat in range(phase.steps):
            with freeze_columns(self.frozen_columns, cohort, self.trainers, other_roles) as frozen_columns:
                if is_private:
                    losses, gradients = self._private_gradients(cohort, phase, step, repeat)
                else:
                    losses, gradients = self._batch_gradients(cohort, phase, step, repeat)
                for position in (~losses.isfinite()).nonzero().flatten().tolist():
                    # Caches the result, before the step below makes all parameters NaN.
                    self.suspect_optimizers(cohort.rows[position], cohort.state.rows[position])
                for hook in self.plan.method.client.parts:
                    hook.correct(cohort, gradients)
                accumulate(cohort, phase, gradients)  # only for methods whose phases share gradients
                self.descend(phase, cohort, gradients, step_in_run, frozen_columns)
            summed_losses += losses
        return summed_losses / phase.steps

    def _batch_gradients(
        self, cohort: CohortTensors, phase: Phase, step: int, repeat: int, names: Collection[str] | None = None
    ) -> tuple[Float[Tensor, " users"], Tree]:
        """Draw a batch for each user, and return mean losses and gradients on it.

        Args:
            cohort: The users who are trained in one batch, with their tensors.
            phase: The kind of local step: which tensors it trains, and on which split of the data.
            step: Local step within the round; -1 for a phase that runs before the first one.
            repeat: Repeat of the phase within the step.
            names: Names of the tensors to differentiate; all that the phase trains if None.
        """
        round_number = cohort.round_number
        # Batches and router noise have a random stream per user; dropout has one for the whole pass.
        drawn = self.batches.draw(cohort.owners, phase, round_number, step, repeat)
        noise = self._router_noise(cohort.names, round_number, phase.purpose, step, repeat)
        with self.model.randomness(self.plan.seed, cohort.names[0], round_number, step, repeat):
            return self.gradient(cohort, drawn, phase, noise, names)

    def _private_gradients(
        self, cohort: CohortTensors, phase: Phase, step: int, repeat: int
    ) -> tuple[Float[Tensor, " users"], Tree]:
        """Return losses and gradients of a step: with noise for what users upload, without noise for what stays local.

        A method may train several copies of a user's model, of which only the first one is uploaded.

        Args:
            cohort: The models of the step; further copies come as rows of their own.
            phase: The kind of local step: which tensors it trains, and on which split of the data.
            step: Local step within the round.
            repeat: Repeat of the phase within the step.
        """
        private = self.private  # adds noise to gradients (DP-SGD)
        assert private is not None
        # In the state of all users the first copies of all models come first, so their rows have the smallest numbers.
        positions_of_first_copies = [position for position, row in enumerate(cohort.rows) if row < self.trainers]
        has_further_copies = len(positions_of_first_copies) < len(cohort.rows)  # all their gradients are plain
        # Names of the tensors that get gradients without noise.
        plain_names = private.plain_names(phase, self.model.layout, everything=has_further_copies)
        plain = None
        if plain_names:
            plain = self._batch_gradients(cohort, phase, step, repeat, plain_names)
        return private.step(
            self.model,
            self.batch_source,
            self.pass_size,
            cohort,
            phase,
            step_and_repeat=(step, repeat),
            noised_users=positions_of_first_copies,
            plain=plain,
        )

    def suspect_optimizers(self, row: int, values: Float[Tensor, " columns"]) -> tuple[str, ...]:
        """Return the optimizers ("experts", "router") that may have made a user's loss infinite or NaN.

        The first result of a round is cached: later all parameters of the user may be NaN.

        Args:
            row: Row of the user.
            values: Its parameters.
        """
        if row not in self.suspects_by_row:
            roles_by_optimizer: dict[str, frozenset[str]] = {}
            for optimizer, roles in self.plan.method.client.optimizers:  # an optimizer may occur several times
                earlier_roles = roles_by_optimizer.get(optimizer, frozenset())
                roles_by_optimizer[optimizer] = earlier_roles | roles
            self.suspects_by_row[row] = find_suspects(self.model.layout, values, roles_by_optimizer)
        return self.suspects_by_row[row]

    def _router_noise(
        self, names: Sequence[str], *stream_key: str | int
    ) -> Float[Tensor, "users *layers clusters"] | None:
        """Return noise for the router logits, from one random stream per user; None if the mixture has no noise.

        Args:
            names: Names of the users.
            *stream_key: Round, purpose of the phase, step and repeat, which identify a random stream of a user.
        """
        mixture = self.plan.method.placement.mixture
        if mixture is None or not mixture.noise:
            return None
        (router_slot,) = [slot for slot in self.model.layout.slots if slot.name == CLIENT_ROUTER]
        noise_of_users = []
        for name in names:
            stream = generator(self.plan.seed, name, "router noise", *stream_key)
            noise_of_users.append(torch.randn(router_slot.shape, generator=stream))
        return mixture.noise * torch.stack(noise_of_users).to(self.model.device, self.model.dtype)

    def descend(
        self,
        phase: Phase,
        cohort: CohortTensors,
        gradients: Tree,
        iteration: int,
        frozen_columns: Bool[Tensor, "users columns"] | None = None,
    ) -> None:
        """Take one step of each optimizer of a phase, in place.

        Args:
            phase: The kind of local step: which tensors it trains, and on which split of the data.
            cohort: The users who are trained in one batch, with their tensors.
            gradients: Gradients by tensor name; emptied.
            iteration: Number of the local step within the run, counted from 0, for learning rates.
            frozen_columns: True on entries that do not change; None if all may.
        """
        for optimizer, roles in phase.optimizers:
            if optimizer == "router":
                cohort.state.router_steps += 1
                settings, step_count = self.plan.router, cohort.state.router_steps
            else:
                # :meth:`take_local_step` raises this count after all phases of the step.
                settings, step_count = self.plan.training.experts, cohort.state.iterations + 1
            trained_layout = self.model.layout.touching(roles)
            rate = learning_rate(settings, iteration, self.iterations)
            take_step(trained_layout, cohort, gradients, settings, rate, step_count, frozen_columns)
            for hook in self.plan.method.client.parts:
                trained_tensors = {slot.name: cohort.tensors[slot.name] for slot in trained_layout.slots}
                hook.stepped(cohort, trained_tensors, rate)

    # ---------------------------------------------------------------- gradients

    def gradient(
        self,
        cohort: CohortTensors,
        drawn: Int[Tensor, "users batch ..."],
        phase: Phase,
        noise: Float[Tensor, "users *layers clusters"] | None = None,
        names: Collection[str] | None = None,
    ) -> tuple[Float[Tensor, " users"], Tree]:
        """Return mean losses ``(users,)``, and gradients by tensor name.

        Gradients have the dtype of the parameters, at least float32. Exception: gradients of a single backward pass
        that no client hook changes may have the dtype of the model, such as bfloat16.

        Args:
            cohort: The users' parameters; running statistics of their nets are updated.
            drawn: A batch of each user, as the batch source has returned it.
            phase: Kind of the local step: which tensors it trains, and on which data. Gradients are those of these
                tensors and of those in ``phase.leaves``.
            noise: Noise that is added to router logits.
            names: Names of the only tensors to differentiate; None for all of the phase.
        """
        if self.model.dtype != torch.float16:
            return self._forward_backward(cohort, drawn, phase, noise, names)

        def run(scales: Float[Tensor, " users"]) -> tuple[Float[Tensor, " users"], Tree]:
            """Return losses, and gradients of the scaled losses: without a scale, small ones would be 0 in float16."""
            return self._forward_backward(cohort, drawn, phase, noise, names, scales=scales)

        return run_with_loss_scaling(run, self.batch_source.loss_counts(drawn))

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

        Args:
            cohort: The cohort; running statistics of its nets are updated.
            drawn: A batch of each user, as drawn.
            phase: The kind of local step: which tensors it trains, and on which split of the data.
            noise: Noise that is added to router logits.
            names: Names of the tensors to differentiate; all that the phase reaches if None. Only needed if other
                tensors get noised gradients.
            scales: Factor of the loss of each user in the backward pass, against underflow in float16; None for 1.

        Returns:
            Mean losses, and gradients that are multiplied by the scales.
        """
        rows, owners, layout = cohort.state.rows, cohort.owners, self.model.layout
        num_targets = self.batch_source.loss_counts(drawn)  # of each user, without padding
        if self.model.batchwise and len(num_targets.unique()) > 1:  # batch norm would see padding
            # Nets with batch norm never have noised gradients (``names``) or float16 (``scales``).
            return self._gradient_by_size(cohort, drawn, phase, noise)
        reached_names = [slot.name for slot in layout.touching(phase.reached).slots]
        leaf_names = reached_names if names is None else [name for name in reached_names if name in names]
        tensors = self._tensors_of_pass(rows, noise, leaf_names)
        leaves = [tensors[name] for name in leaf_names]
        model = self.model.without(phase.without) if phase.without else self.model  # such as a router
        # Gradients get the dtype of the parameters, at least float32, if they are added up over micro-batches, changed
        # by a hook or merged with noised gradients. Otherwise they go straight into a step, in the dtype of the pass.
        is_micro_batched = drawn.shape[1] > self.pass_size.sequences
        in_dtype_of_rows = is_micro_batched or bool(self.plan.method.client.parts) or names is not None
        mean_losses, gradients = torch.zeros(len(owners), device=rows.device), Tree()
        for micro_batch in self.batches.move(drawn, rows.device).split(self.pass_size.sequences, dim=1):
            num_losses = self.batch_source.loss_counts(micro_batch)  # of each user, without padding
            share = num_losses.to(rows.dtype) / num_targets.to(rows)  # of the micro-batch in the batch of each user
            means, objective = self._losses_and_objective(model, cohort, phase, tensors, micro_batch)
            factors = share if scales is None else share * scales.to(share)
            new_gradients = torch.autograd.grad((objective * factors).sum(), leaves, materialize_grads=True)
            preconditioned = self._preconditioned(tensors, dict(zip(leaf_names, new_gradients, strict=True)))
            for name, new_gradient in preconditioned.items():
                added = new_gradient.to(rows.dtype) if in_dtype_of_rows else new_gradient
                gradients[name] = gradients[name] + added if name in gradients else added
            mean_losses += (share * means.detach()).float()
        keep_statistics(layout, rows, tensors)
        self.batches.prefetch()
        return mean_losses.cpu(), gradients

    def _losses_and_objective(
        self,
        model: Model,
        cohort: CohortTensors,
        phase: Phase,
        tensors: Tree,
        micro_batch: Int[Tensor, "users batch ..."],
    ) -> tuple[Float[Tensor, " users"], Float[Tensor, " users"]]:
        """Run the forward pass of a micro-batch; return each user's mean loss, and its objective for the backward pass.

        The objective is the mean loss plus the load-balancing penalty of routers and the penalties of client hooks.

        Args:
            model: The model, without the roles that the phase leaves out.
            cohort: The users who are trained in one batch, with their tensors.
            phase: The kind of local step: which tensors it trains, and on which split of the data.
            tensors: Tensors of the users by name, with those that the phase leaves out.
            micro_batch: Some windows or samples of each user.
        """
        layout, num_losses = cohort.layout, self.batch_source.loss_counts(micro_batch)
        batch: Any = self.batch_source.read(phase.stream, cohort.owners, micro_batch)
        mixture_weights = {} if cohort.sample_weights is None else {"shares": cohort.weights_of(micro_batch)}
        used_tensors = tensors
        if phase.without:  # in each micro-batch, as a backward pass frees the graph of the result
            used_tensors = restrict(tensors, layout, layout.roles - phase.without)
        losses, balance_penalty = model.losses(used_tensors, cohort.owners, batch, train=True, **mixture_weights)
        means = losses.flatten(1).sum(1) / num_losses.clamp(min=1)  # of each user, over the micro-batch
        objective = means + self.plan.training.balance_weight * balance_penalty
        for hook in self.plan.method.client.parts:
            penalty_of_hook = hook.penalty(tensors, cohort.ranks)
            objective = objective + require_one_penalty_per_user(
                self.plan.method.name, hook, penalty_of_hook, len(cohort.owners)
            )
        return means, objective

    def _tensors_of_pass(
        self,
        rows: Float[Tensor, "users columns"],
        noise: Float[Tensor, "users *layers clusters"] | None,
        leaf_names: Collection[str],
    ) -> Tree:
        """Return the tensors of users for a forward and backward pass, by name, as autograd leaves where trained.

        Args:
            rows: Parameters of the users, which the pass does not change.
            noise: Noise to add to each user's router logits, for methods that explore mixtures; None for none.
            leaf_names: Names of the tensors to differentiate; only these require a gradient.
        """
        tensors = self.tensors(rows)
        if noise is not None:  # a constant, so the gradient of the noisy logits is that of the logits
            tensors[CLIENT_ROUTER] = tensors[CLIENT_ROUTER] + noise
        for slot in self.model.layout.only({STATISTICS}).slots:  # running means and variances of batch norm
            tensors[slot.name] = tensors[slot.name].clone()  # the pass updates them in place; ``rows`` stays as it is
        for name in leaf_names:
            tensors[name] = tensors[name].detach().requires_grad_()
        return tensors

    def _preconditioned(self, tensors: Tree, gradients: Tree) -> Tree:
        """Return the gradients of low-rank adaptors multiplied by their preconditioner, if the method has one (FLoRAL).

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
        samples: Int[Tensor, "users batch"],
        phase: Phase,
        noise: Float[Tensor, "users *layers clusters"] | None = None,
    ) -> tuple[Float[Tensor, " users"], Tree]:
        """Return each user's loss and gradients on a batch of its own, for nets with batch norm.

        Users whose batches have the same size share a pass, so there are as many passes as sizes. In a single pass for
        all users the smaller batches would be padded, and batch norm would count the padding.

        Args:
            cohort: The users with their tensors; running statistics of batch norm are updated in place.
            samples: Numbers of the samples in each user's batch, padded to the largest batch.
            phase: The phase of training, which decides which tensors get gradients (``phase.reached``).
            noise: Noise that is added to router logits.

        Returns:
            Mean loss of each user, and gradients ``(users, *shape)`` by tensor name, as :meth:`gradient` returns them.
        """
        parameters = cohort.state.rows  # (users, parameters of all tensors of a user)
        num_users = len(parameters)
        losses = torch.zeros(num_users)
        gradients: Tree = {}
        for tensor in self.model.layout.touching(phase.reached).slots:  # names and shapes of the tensors with gradients
            gradients[tensor.name] = parameters.new_empty(num_users, *tensor.shape)
        batch_sizes = self.batch_source.loss_counts(samples)  # of each user, without padding
        for size in batch_sizes.unique().tolist():
            users_of_size = (batch_sizes == size).nonzero().flatten()  # positions in the cohort
            group = cohort.copy_of(users_of_size.tolist())
            group_samples = samples[users_of_size, :size]  # without padding
            group_noise = None if noise is None else noise[users_of_size]
            losses[users_of_size], group_gradients = self.gradient(group, group_samples, phase, group_noise)
            parameters[users_of_size] = group.state.rows  # the pass has updated the running statistics of the copy
            for name, gradient in group_gradients.items():
                gradients[name][users_of_size] = gradient
        return losses, gradients
