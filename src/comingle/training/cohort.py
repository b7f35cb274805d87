"""Cohorts: users that are trained in one batch, and the scoring of their models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor
from torch.nn import functional as F

from comingle.methods.base import Phase
from comingle.models.routers import Powers
from comingle.models.scoring import PAD, Gates
from comingle.training.batch_sources import AnyScore, AnySplit, AnyUser, BatchSource
from comingle.training.cohort_state import CohortTensors, learning_rate, missing_flag
from comingle.training.settings import PassSize, cohorts
from comingle.training.steps import Steps, within_memory
from comingle.utils.trees import CLIENT_ROUTER, ROUTER, Tree, assign

Rows = Callable[[Sequence[int]], Float[Tensor, "slots columns"]]
"""Maps numbers of models to their tensors."""


@dataclass(frozen=True, kw_only=True)
class Models:
    """Models to score: their tensors, by number, and the trainer whose experts and rank each model has."""

    rows: Rows
    owners: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Scores models with the batch source and the model of the local steps."""

    steps: Steps

    @property
    def routed(self) -> bool:
        """Whether tokens are routed to experts."""
        return self.steps.model.routed

    def examine(self, models: Models, sets: Sequence[AnySplit], numbers: Sequence[int]) -> Sequence[AnyScore]:
        """Return the final score of test set i with model ``numbers[i]``, and its mean gates.

        Args:
            models: Models to choose from.
            sets: Test sets.
            numbers: Number of the model for each set.
        """
        batch_source = self.steps.batch_source
        score = partial(
            batch_source.examine, partial(self.predict, models), partial(self.generate, models), sets, numbers
        )
        if not self.routed:
            return score(self.steps.pass_size, None)
        with self.steps.model.record_gates() as gates:
            return score(self.steps.pass_size, gates)

    def score(
        self, models: Models, sets: Sequence[AnySplit], numbers: Sequence[int], gates: Gates | None = None
    ) -> Sequence[AnyScore]:
        """Score set i with model ``numbers[i]``.

        Args:
            models: Models to choose from.
            sets: Token streams, conversations or samples.
            numbers: Number of the model for each set.
            gates: Collects the gates of routers.
        """
        return self.steps.batch_source.score(partial(self.predict, models), sets, numbers, self.steps.pass_size, gates)

    def mean_loss(self, models: Models, sets: Sequence[AnySplit], numbers: Sequence[int]) -> float:
        """Return the mean over sets of the mean loss in nats.

        Args:
            models: Models to choose from.
            sets: Sets to score.
            numbers: Number of the model for each set.
        """
        return fmean(score.mean_loss for score in self.score(models, sets, numbers))

    def predict(self, models: Models, numbers: Sequence[int], batch: Tensor) -> Float[Tensor, "slots batch ..."]:
        """Return the predictions of model ``numbers[slot]`` for the batch of each slot.

        Args:
            models: Models to choose from.
            numbers: Number of the model in each slot.
            batch: Inputs ``(slots, batch, ...)``.

        Raises:
            RecipeError: The pass does not fit into memory.
        """
        device, owners = self.steps.model.device, [models.owners[number] for number in numbers]
        with within_memory(self.steps.pass_size, len(numbers), device):
            return self.steps.model.predict(self.steps.tensors(models.rows(numbers)), owners, batch.to(device))

    def generate(
        self, models: Models, numbers: Sequence[int], prompts: Tensor, limit: int
    ) -> Int64[Tensor, "slots batch new"]:
        """Return the tokens that model ``numbers[slot]`` generates after the prompts of each slot.

        Args:
            models: Models to choose from.
            numbers: Number of the model in each slot.
            prompts: Prompts ``(slots, batch, tokens)``.
            limit: Largest number of new tokens.
        """
        tensors = self.steps.tensors(models.rows(numbers))
        return self.steps.model.generate(tensors, [models.owners[n] for n in numbers], prompts, limit)


Losses = Callable[[Any], Float[Tensor, "users models batch ..."]]
"""Maps a batch of each user to its losses under several models."""


@dataclass(frozen=True)
class TrainSweep:
    """Cached batches that represent the training data of a cohort, for several evaluations of models."""

    batch_source: BatchSource
    users: Sequence[int]
    round_number: int
    pass_size: PassSize
    device: torch.device

    @cached_property
    def _batches(self) -> list[Int[Tensor, "users batch ..."]]:
        """Batches of all training data, split to the size of one pass; drawn on first use."""
        drawn = self.batch_source.sweep(self.users, self.round_number)
        return [part for batch in drawn for part in batch.split(self.pass_size.sequences, dim=1)]

    def losses_by_batch(self, losses: Losses) -> list[Float[Tensor, "users models batch ..."]]:
        """Return the losses of each batch; 0 at padding."""
        return [losses(self.batch_source.read("train", self.users, drawn.to(self.device))) for drawn in self._batches]

    def responsibilities(
        self, prior: Float[Tensor, "users models"], losses: Losses
    ) -> list[Float[Tensor, "models samples"]]:
        """Return ``q_m(s) ~ prior_m exp(-loss_m(s))``, normalised over models, for each training sample s in order."""
        shares = (prior.log().unsqueeze(2) - torch.cat(self.losses_by_batch(losses), 2)).softmax(1)
        counts = torch.cat([drawn != PAD for drawn in self._batches], 1).sum(1).tolist()
        return [user_shares[:, :count] for user_shares, count in zip(shares, counts, strict=True)]  # without padding

    def means(self, losses: Losses) -> Float[Tensor, "users models"]:
        """Return the mean loss of each user under each model."""
        total = torch.stack([batch_losses.flatten(2).sum(2) for batch_losses in self.losses_by_batch(losses)]).sum(0)
        counts = torch.stack([self.batch_source.counted(drawn).cpu() for drawn in self._batches]).sum(0)
        return total / counts.to(total).unsqueeze(1)


@dataclass(kw_only=True)
class Cohort(CohortTensors):
    """Users of a cohort, with everything they need to take steps and to be scored.

    Attributes:
        steps: Local steps.
        scorer: Scorer of models.
        trainers: All trainers of the run.
        initial: Returns the tensors of rows before any training, for methods that reset to them.
    """

    steps: Steps
    scorer: Scorer
    trainers: Sequence[AnyUser]
    initial: Callable[[Sequence[int]], Float[Tensor, "users columns"]]

    @property
    def copy(self) -> Int[Tensor, " users"]:
        """Copy of its user that each row holds, counted from 0."""
        return torch.tensor(self.rows, device=self.part.rows.device) // len(self.trainers)

    @property
    def router_rate(self) -> float:
        """Learning rate of the router in this round."""
        plan = self.steps.plan
        return learning_rate(plan.training.router, self.round_number, plan.training.rounds)

    def reset(self, roles: frozenset[str]) -> None:
        """Reset the tensors of some roles to their values before any training.

        Raises:
            RuntimeError: No hook has the flag ``resets``.
        """
        if not self.steps.plan.method.client.resets:
            raise missing_flag("reset", "resets", training=False)
        columns = self.layout.mask(roles).to(self.part.rows.device)
        self.part.rows[:, columns] = self.initial(self.rows)[:, columns]

    def reset_moments(self, roles: frozenset[str]) -> None:
        """Reset the moments of some roles to zero.

        The step count of an optimizer is reset too if these are all the roles that it trains: bias correction counts
        steps from zero moments.
        """
        columns = self.layout.mask(roles).to(self.part.rows.device)
        for moments in (self.part.first, self.part.second):
            moments[:, columns[: moments.shape[1]]] = 0
        for name, count in (("experts", self.part.iterations), ("router", self.part.router_steps)):
            optimizers = self.steps.plan.method.client.optimizers
            trained_roles = {role for optimizer, trained in optimizers if optimizer == name for role in trained}
            resets_all = bool(columns[self.layout.mask(trained_roles)].all())
            count.mul_(0 if resets_all else 1)

    def take_steps(self, phase: Phase) -> None:
        """Take the optimizer steps of a phase before the local steps of the round."""
        self.steps.take(self, phase, -1)

    @torch.no_grad()
    def component_losses(self) -> Float[Tensor, "users clusters"]:
        """Return the mean training loss in nats under each component; 0 for users without data.

        Raises:
            RuntimeError: The method has no mixture.
        """
        model, mixture = self.steps.model, self.steps.plan.method.placement.mixture
        if mixture is None:
            raise RuntimeError(
                "Cohort.component_losses: got a method without components; allowed: methods with Placement.mixture; "
                "use training_losses for the losses of downloaded models"
            )
        losses = self.part.rows.new_zeros(len(self.rows), mixture.clusters)
        for some, owners in self._with_data():
            tensors = self.steps.tensors(self.part.rows[some])
            sweep = self._train_sweep(owners)
            means = sweep.means(lambda batch, o=owners, t=tensors: model.component_losses(t, o, batch))
            losses[some] = means.to(losses)
        return losses

    @torch.no_grad()
    def divide_samples(self) -> None:
        """Set mixture weights for each training sample in this round, and the mixture of a user to their mean.

        Source: FedEM, eq. 7 and 8.
        """
        tensors, owners, model = self.steps.tensors(self.part.rows), self.owners, self.steps.model
        sweep = self._train_sweep(owners)
        prior = model.shares(tensors)
        shares = sweep.responsibilities(prior, lambda batch: model.component_losses(tensors, owners, batch))
        self.sample_shares = shares
        means = torch.stack([of_user.mean(1) for of_user in shares])
        smallest = torch.finfo(means.dtype).tiny  # a weight of exactly 0 could never grow again
        self.tensors[CLIENT_ROUTER].copy_(means.clamp(min=smallest).log())

    @torch.no_grad()
    def training_losses(self, models: Tree) -> Float[Tensor, "users models"]:
        """Return the mean loss in nats of each model on the training batches that each user draws for the round.

        Args:
            models: Shared tensors ``(users, models, *shape)``.

        Returns:
            Mean losses; 0 for users without data.
        """
        layout, shared = self.layout, self.steps.plan.method.shared
        count = next(iter(models.values())).shape[1]
        losses = torch.zeros(len(self.rows), count, dtype=self.part.rows.dtype)
        for some, owners in self._with_data():
            sweep = self._train_sweep(owners)
            for number in range(count):
                with_model = self.part.rows[some]
                assign(layout.views(with_model), layout, shared, {n: t[some, number] for n, t in models.items()})
                losses[some, number] = sweep.means(self._loss_function(with_model, owners))[:, 0].to(losses)
        return losses

    def validation_losses(self, models: Tree) -> Float[Tensor, "users models"]:
        """Return the mean validation loss in nats of each model on the data of each user.

        Args:
            models: Shared tensors ``(users, models, *shape)``.
        """
        layout, shared = self.layout, self.steps.plan.method.shared
        count = next(iter(models.values())).shape[1]
        pairs = [(user, model) for user in range(len(self.rows)) for model in range(count)]

        def rows(numbers: Sequence[int]) -> Float[Tensor, "slots columns"]:
            users, chosen = [pairs[n][0] for n in numbers], [pairs[n][1] for n in numbers]
            with_model = self.part.rows[users]
            assign(layout.views(with_model), layout, shared, {n: t[users, chosen] for n, t in models.items()})
            return with_model if self.mask is None else with_model.mul_(self.mask[users])

        owners = [self.owners[user] for user, _ in pairs]
        sets = [self.trainers[owner].valid for owner in owners]
        scores = self.scorer.score(Models(rows=rows, owners=owners), sets, range(len(pairs)))
        return torch.tensor([score.mean_loss for score in scores], dtype=torch.float64).view(-1, count)

    def held_out_losses(self, powers: Powers = None) -> Float[Tensor, "users clusters losses"]:
        """Return every loss in nats on the validation data of each user under each component, padded with zeros.

        Args:
            powers: Exponents of the probabilities of each component, in which the losses are differentiable.
        """
        model, batch_source, tensors = self.steps.model, self.steps.batch_source, self.steps.tensors(self.part.rows)
        device, losses = self.part.rows.device, []
        options = {} if powers is None else dict[str, Any](powers=powers)
        for drawn in batch_source.held_out(self.owners):
            for part in drawn.to(device).split(self.steps.pass_size.sequences, dim=1):
                batch: Any = batch_source.read("valid", self.owners, part)
                losses.append(model.component_losses(tensors, self.owners, batch, **options).flatten(2).double())
        return torch.cat(losses, 2)

    @torch.no_grad()
    def router_directions(self, instances: int, *, whole: bool = False) -> Tree:
        """Return the mean direction of the inputs of each router; zeros for users without training data.

        Args:
            instances: Number of training instances of each user.
            whole: Use the mean input over each window instead of the input at the end of its prompt.

        Returns:
            Means of unit vectors ``(users, width)``, by the name of the router's tensor.
        """
        directions = {n: torch.zeros_like(t[:, 0]) for n, t in self.tensors.items() if n.endswith(f".{ROUTER}")}
        for some, owners in self._with_data():
            tensors, seen = self.steps.tensors(self.part.rows[some]), self.part.rows.new_zeros(len(some), 1)
            for drawn in self._instances(owners, instances):
                for part in drawn.split(self.steps.pass_size.sequences, dim=1):
                    for name, x in self.steps.model.router_inputs(tensors, owners, part, whole=whole).items():
                        directions[name][some] += F.normalize(x.to(directions[name]), dim=-1).sum(1)
                seen += (drawn != PAD).any(-1).sum(1, keepdim=True)
            for t in directions.values():
                t[some] /= seen.clamp(min=1)
        return directions

    def _instances(self, owners: Sequence[int], count: int) -> Iterator[Int[Tensor, "users batch window"]]:
        """Yield batches with ``count`` random training instances of each user, padded with ``PAD``."""
        # The label gives these batches a random stream that no phase of training uses.
        batch_source, phase, seen = self.steps.batch_source, Phase(roles=frozenset(), label="instances"), 0
        for repeat in range(-(-count // batch_source.batch_size)):  # rounded up
            drawn = batch_source.draw(owners, phase, self.round_number, 0, repeat).to(self.part.rows.device)
            instance_number = seen + (drawn != PAD).any(-1).cumsum(1)
            seen = instance_number[:, -1:]
            yield drawn.masked_fill((instance_number > count).unsqueeze(-1), PAD)

    def copies(self) -> Float[Tensor, "copies users columns"]:
        """Return the tensors of all copies; the cohort holds the copies one after another."""
        return self.part.rows.clone().view(self.steps.plan.method.placement.copies, -1, self.part.rows.shape[1])

    def validate(self, candidate: Float[Tensor, " columns"], user: int) -> float:
        """Return the mean validation loss in nats of the user at place ``user`` with ``candidate`` as its model."""
        owner = self.owners[user]
        models = Models(rows=lambda numbers: candidate.expand(len(numbers), -1), owners=[owner])
        return self.scorer.mean_loss(models, [self.trainers[owner].valid], [0])

    # ---------------------------------------------------------------- helpers

    def _with_data(self) -> Iterator[tuple[list[int], list[int]]]:
        """Yield the places and the trainers of users with training data, as many as fit one pass at a time."""
        trainers, owners = self.trainers, self.owners
        places = [i for i, owner in enumerate(owners) if len(trainers[owner].train)]
        for group in cohorts(places, self.steps.pass_size.users):
            yield group, [owners[i] for i in group]

    def _train_sweep(self, owners: Sequence[int]) -> TrainSweep:
        """Return batches that represent the training data of some trainers in this round."""
        return TrainSweep(
            self.steps.batch_source, owners, self.round_number, self.steps.pass_size, self.part.rows.device
        )

    def _loss_function(self, rows: Float[Tensor, "users columns"], owners: Sequence[int]) -> Losses:
        """Return a function from batches to the losses of the models of these rows."""
        tensors, model = self.steps.tensors(rows), self.steps.model
        return lambda batch: model.losses(tensors, owners, batch)[0].unsqueeze(1)
