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
from comingle.models.lora import MIDDLE
from comingle.models.routers import Powers
from comingle.models.scoring import PAD, Gates
from comingle.training.batch_sources import AnyScore, AnySplit, AnyUser, BatchSource
from comingle.training.cohort_state import CohortTensors, learning_rate, missing_flag_error
from comingle.training.settings import PassSize, cohorts
from comingle.training.steps import Steps, within_memory
from comingle.utils.trees import CLIENT_ROUTER, ROUTER, Tree, assign, lora_pairs

ParametersOf = Callable[[Sequence[int]], Float[Tensor, "slots columns"]]
"""Maps numbers of models to their parameters, one model per row."""


@dataclass(frozen=True, kw_only=True)
class Models:
    """Models to score: their parameters, by number, and the trainer whose experts and rank each model has."""

    parameters_of: ParametersOf
    owners: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Scores models with the batch source and the model of the local steps."""

    steps: Steps

    @property
    def routed(self) -> bool:
        """True if tokens are routed to experts."""
        return self.steps.model.routed

    def examine(self, models: Models, splits: Sequence[AnySplit], model_numbers: Sequence[int]) -> Sequence[AnyScore]:
        """Return the final scores of several test splits, each under a model of its own, with mean gates of routers.

        Unlike :meth:`score`, it generates text if a measure requires that, and records the gates.

        Args:
            models: Models to choose from, by number.
            splits: Test splits.
            model_numbers: For each split, the number of its model in ``models``.
        """

        def examine_splits(gates: Gates | None) -> Sequence[AnyScore]:
            """Return the scores; ``gates`` collects those of routers."""
            predict, generate = partial(self.predict, models), partial(self.generate, models)
            return self.steps.batch_source.examine(
                predict, generate, splits, model_numbers, self.steps.pass_size, gates
            )

        if not self.routed:
            return examine_splits(None)
        with self.steps.model.record_gates() as gates:
            return examine_splits(gates)

    def score(
        self, models: Models, splits: Sequence[AnySplit], model_numbers: Sequence[int], gates: Gates | None = None
    ) -> Sequence[AnyScore]:
        """Return the scores of several splits, each under a model of its own.

        Args:
            models: Models to choose from, by number.
            splits: Token streams, conversations or samples.
            model_numbers: For each split, the number of its model in ``models``.
            gates: Collects the gates of routers.
        """
        predict = partial(self.predict, models)
        return self.steps.batch_source.score(predict, splits, model_numbers, self.steps.pass_size, gates)

    def mean_loss(self, models: Models, splits: Sequence[AnySplit], model_numbers: Sequence[int]) -> float:
        """Return the mean over several splits of their mean losses in nats, each split under a model of its own.

        Args:
            models: Models to choose from, by number.
            splits: Splits to score.
            model_numbers: For each split, the number of its model in ``models``.
        """
        return fmean(score.mean_loss for score in self.score(models, splits, model_numbers))

    def predict(self, models: Models, numbers: Sequence[int], batch: Tensor) -> Float[Tensor, "slots batch ..."]:
        """Return the predictions of several models in one pass, each for a batch of its own.

        A slot is a place in the pass for one model and its batch; a model may have several slots.

        Args:
            models: Models to choose from, by number.
            numbers: For each slot, the number of its model in ``models``.
            batch: Inputs ``(slots, batch, ...)``.

        Raises:
            RecipeError: The pass does not fit into memory.
        """
        model = self.steps.model
        owners = [models.owners[number] for number in numbers]
        with within_memory(self.steps.pass_size, len(numbers), model.device):
            return model.predict(self.steps.tensors(models.parameters_of(numbers)), owners, batch.to(model.device))

    def generate(
        self, models: Models, numbers: Sequence[int], prompts: Tensor, limit: int
    ) -> Int64[Tensor, "slots batch new"]:
        """Return the tokens that several models generate in one pass, each model after its own prompts.

        A slot is a place in the pass for one model and its prompts; a model may have several slots.

        Args:
            models: Models to choose from, by number.
            numbers: For each slot, the number of its model in ``models``.
            prompts: Prompts ``(slots, batch, tokens)``.
            limit: Largest number of new tokens.
        """
        tensors = self.steps.tensors(models.parameters_of(numbers))
        owners = [models.owners[number] for number in numbers]
        return self.steps.model.generate(tensors, owners, prompts, limit)


Losses = Callable[[Any], Float[Tensor, "users models batch ..."]]
"""Maps a batch of each user to its losses under several models."""


@dataclass(frozen=True)
class TrainSweep:
    """Cached batches that represent the training data of some users, to evaluate several models on them.

    Attributes:
        batch_source: Source of the batches.
        users: Numbers of the trainers.
        round_number: The round, counted from 0.
        pass_size: Number of users and sequences in one pass.
        device: Device of the models.
    """

    batch_source: BatchSource
    users: Sequence[int]
    round_number: int
    pass_size: PassSize
    device: torch.device

    @cached_property
    def _batches(self) -> list[Int[Tensor, "users batch ..."]]:
        """Batches of all training data, split to the size of one pass; drawn on first use."""
        batches = []
        for batch in self.batch_source.sweep(self.users, self.round_number):
            batches += batch.split(self.pass_size.sequences, dim=1)
        return batches

    def losses_by_batch(self, losses: Losses) -> list[Float[Tensor, "users models batch ..."]]:
        """Return the losses of each batch under several models; 0 at padding.

        Args:
            losses: Function that maps a batch of each user to its losses under all models.
        """
        losses_of_batches = []
        for drawn in self._batches:
            batch = self.batch_source.read("train", self.users, drawn.to(self.device))
            losses_of_batches.append(losses(batch))
        return losses_of_batches

    def responsibilities(
        self, prior: Float[Tensor, "users models"], losses: Losses
    ) -> list[Float[Tensor, "models samples"]]:
        """Return for each training sample s the probability ``q_m(s)`` of each model m to have generated it.

        ``q_m(s) = prior_m exp(-loss_m(s)) / sum_n prior_n exp(-loss_n(s))``, as in the E-step of a mixture.

        Args:
            prior: Mixture weights of each user.
            losses: Function that maps a batch of each user to its losses under all models.

        Returns:
            One tensor for each user, with its samples in order.
        """
        loss = torch.cat(self.losses_by_batch(losses), 2)  # (users, models, samples)
        q = (prior.log().unsqueeze(2) - loss).softmax(1)
        is_sample = torch.cat([drawn != PAD for drawn in self._batches], 1)  # (users, samples); False at padding
        num_samples = is_sample.sum(1).tolist()  # of each user, whose samples come before its padding
        return [q_of_user[:, :num] for q_of_user, num in zip(q, num_samples, strict=True)]

    def means(self, losses: Losses) -> Float[Tensor, "users models"]:
        """Return the mean training loss of each user under each model.

        Args:
            losses: Function that maps a batch of each user to its losses under all models.
        """
        # Losses are (users, models, batch, ...): add up all dimensions after the first two.
        sums_of_batches = [batch_losses.flatten(2).sum(2) for batch_losses in self.losses_by_batch(losses)]
        # Number of losses (tokens or samples) of each user, without padding.
        counts_of_batches = [self.batch_source.loss_counts(drawn).cpu() for drawn in self._batches]
        total_loss = torch.stack(sums_of_batches).sum(0)
        total_count = torch.stack(counts_of_batches).sum(0)
        return total_loss / total_count.to(total_loss).unsqueeze(1)  # (users, models) / (users, 1)


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
        """Number of the copy that each row is of its user's model, counted from 0; methods may train several copies."""
        return torch.tensor(self.rows, device=self.state.rows.device) // len(self.trainers)

    @property
    def router_rate(self) -> float:
        """Learning rate of the router in this round."""
        plan = self.steps.plan
        return learning_rate(plan.router, self.round_number, plan.training.rounds)

    def reset(self, roles: frozenset[str]) -> None:
        """Reset the tensors of some roles to their values before any training.

        Args:
            roles: Roles whose tensors are reset, such as the specialists.

        Raises:
            RuntimeError: No client hook of the method sets the class attribute ``resets``, which announces this call.
        """
        if not self.steps.plan.method.client.resets:
            raise missing_flag_error("reset", "resets", training=False)
        parameters = self.state.rows
        initial_parameters = self.initial(self.rows)
        columns = self.layout.mask(roles).to(parameters.device)
        parameters[:, columns] = initial_parameters[:, columns]

    def reset_moments(self, roles: frozenset[str]) -> None:
        """Reset the optimizer moments of some roles to zero, so that they are trained as if from a new optimizer.

        If an optimizer trains no other roles, its step count, which bias correction uses, is reset too.

        Args:
            roles: Roles whose moments are reset, such as the specialists.
        """
        is_reset = self.layout.mask(roles).to(self.state.rows.device)  # for each column
        for moments in (self.state.first, self.state.second):
            num_columns = moments.shape[1]  # 0 if no optimizer uses these moments
            moments[:, is_reset[:num_columns]] = 0
        trained_roles: dict[str, set[str]] = {"experts": set(), "router": set()}  # by optimizer
        for optimizer, roles_of_optimizer in self.steps.plan.method.client.optimizers:
            trained_roles[optimizer] |= roles_of_optimizer
        step_counts = {"experts": self.state.iterations, "router": self.state.router_steps}
        for optimizer, step_count in step_counts.items():
            is_trained = self.layout.mask(trained_roles[optimizer])
            if bool(is_reset[is_trained].all()):
                step_count.zero_()

    def take_steps(self, phase: Phase) -> None:
        """Take the optimizer steps of a phase before the local steps of the round, as some client hooks do."""
        self.steps.take_phase(self, phase, step=-1)  # -1: before local step 0

    @torch.no_grad()
    def component_losses(self) -> Float[Tensor, "users clusters"]:
        """Return each user's mean training loss in nats under each component of the mixture; 0 for users without data.

        All training data is read once, in groups of users that fit into a pass.

        Raises:
            RuntimeError: The method has no mixture.
        """
        mixture = self.steps.plan.method.placement.mixture
        if mixture is None:
            raise RuntimeError(
                "Cohort.component_losses: got a method without components; allowed: methods with Placement.mixture; "
                "use training_losses for the losses of downloaded models"
            )
        losses = self.state.rows.new_zeros(len(self.rows), mixture.clusters)
        for positions, owners in self._with_data():
            tensors = self.steps.tensors(self.state.rows[positions])
            sweep = self._train_sweep(owners)
            mean_losses = sweep.means(self._component_loss_function(tensors, owners))
            losses[positions] = mean_losses.to(losses)
        return losses

    @torch.no_grad()
    def divide_samples(self) -> None:
        """Set the mixture weights of each training sample for this round, and each user's weights to their mean.

        The weight of component c for sample s is the probability that c generated s, ``q_c(s) = pi_c exp(-loss_c(s)) /
        sum_k pi_k exp(-loss_k(s))``, with the user's weights pi; its new weights are ``pi_c = mean_s q_c(s)``.

        Source: FedEM (Marfoq et al. 2021, arXiv:2108.10252), eq. 7 and 8.
        """
        tensors = self.steps.tensors(self.state.rows)
        pi = self.steps.model.shares(tensors)
        sweep = self._train_sweep(self.owners)
        # One tensor (clusters, samples) per user.
        q = sweep.responsibilities(pi, self._component_loss_function(tensors, self.owners))
        self.sample_weights = q
        new_pi = torch.stack([q_of_user.mean(1) for q_of_user in q])
        smallest = torch.finfo(new_pi.dtype).tiny  # a weight of exactly 0 could never grow again
        router_logits = new_pi.clamp(min=smallest).log()  # their softmax is the weights
        self.tensors[CLIENT_ROUTER].copy_(router_logits)

    @torch.no_grad()
    def training_losses(self, models: Tree) -> Float[Tensor, "users models"]:
        """Return the mean loss in nats of each model on the training batches that each user draws for the round.

        Args:
            models: Shared tensors ``(users, models, *shape)``.

        Returns:
            Mean losses; 0 for users without data.
        """
        layout, shared = self.layout, self.steps.plan.method.shared
        any_tensor = next(iter(models.values()))
        num_models = any_tensor.shape[1]
        losses = torch.zeros(len(self.rows), num_models, dtype=self.state.rows.dtype)
        for positions, owners in self._with_data():
            sweep = self._train_sweep(owners)
            for number in range(num_models):
                parameters = self.state.rows[positions]  # a copy, in which the model replaces the shared tensors
                model = {name: t[positions, number] for name, t in models.items()}
                assign(layout.views(parameters), layout, shared, model)
                mean_losses = sweep.means(self._loss_function(parameters, owners))  # (users, 1): of this model alone
                losses[positions, number] = mean_losses[:, 0].to(losses)
        return losses

    def validation_losses(self, models: Tree) -> Float[Tensor, "users models"]:
        """Return the mean validation loss in nats of each model on the data of each user.

        A model is completed by the user's own local tensors. Each pair of user and model is scored as one model.

        Args:
            models: Shared tensors of the models that each user compares, ``(users, models, *shape)``.
        """
        layout, shared = self.layout, self.steps.plan.method.shared
        any_tensor = next(iter(models.values()))
        num_models = any_tensor.shape[1]
        user_of_pair = [pair // num_models for pair in range(len(self.rows) * num_models)]  # [0, 0, 1, 1]
        model_of_pair = [pair % num_models for pair in range(len(self.rows) * num_models)]  # [0, 1, 0, 1]

        def parameters_of(pairs: Sequence[int]) -> Float[Tensor, "slots columns"]:
            """Return the parameters of some pairs: the user's own, with the shared ones replaced by the model's."""
            users = [user_of_pair[pair] for pair in pairs]
            model_numbers = [model_of_pair[pair] for pair in pairs]
            parameters = self.state.rows[users]  # a copy
            shared_tensors = {name: t[users, model_numbers] for name, t in models.items()}
            assign(layout.views(parameters), layout, shared, shared_tensors)
            if self.mask is None:
                return parameters
            return parameters.mul_(self.mask[users])  # zero the padding, ranks that a user does not have

        owners = [self.owners[user] for user in user_of_pair]
        valid_splits = [self.trainers[owner].valid for owner in owners]
        pairs_as_models = Models(parameters_of=parameters_of, owners=owners)
        scores = self.scorer.score(pairs_as_models, valid_splits, model_numbers=range(len(owners)))
        return torch.tensor([score.mean_loss for score in scores], dtype=torch.float64).view(-1, num_models)

    def held_out_losses(self, powers: Powers = None) -> Float[Tensor, "users clusters losses"]:
        """Return the loss in nats of each validation token or sample of each user under the model of each cluster.

        Methods fit mixture weights and temperatures to these losses.

        Args:
            powers: Exponents (inverse temperatures) of the probabilities that the model of each cluster predicts,
                ``(clusters,)`` or ``(users, clusters)``; the losses can be differentiated by them. None for 1.

        Returns:
            Losses in float64; rows of users with less data are padded with zeros.
        """
        model, batch_source = self.steps.model, self.steps.batch_source
        tensors = self.steps.tensors(self.state.rows)
        # Only models that mix predictions have the parameter ``powers``.
        power_option: dict[str, Any] = {} if powers is None else {"powers": powers}
        losses_of_batches = []
        for sample_numbers in batch_source.held_out(self.owners):
            for micro_batch in sample_numbers.to(self.state.rows.device).split(self.steps.pass_size.sequences, dim=1):
                batch: Any = batch_source.read("valid", self.owners, micro_batch)
                losses = model.component_losses(tensors, self.owners, batch, **power_option)  # (users, clusters, ...)
                losses_of_batches.append(losses.flatten(2).double())
        return torch.cat(losses_of_batches, 2)

    @torch.no_grad()
    def router_directions(self, instances: int, *, whole: bool = False) -> Tree:
        """Return the mean direction of the inputs of each token router, over random training windows of each user.

        Args:
            instances: Number of training windows of each user.
            whole: Average a router's input over all tokens of a window. Otherwise it is the input at the last token of
                the window's prompt, or of the window if it has no prompt.

        Returns:
            Means ``(users, width)`` of inputs scaled to unit vectors, by the name of the router's tensor; zeros for
            users without training data.
        """
        directions: Tree = {}
        for name, t in self.tensors.items():
            if name.endswith(f".{ROUTER}"):
                directions[name] = torch.zeros_like(t[:, 0])  # a router is (users, experts, width)
        for positions, owners in self._with_data():
            tensors = self.steps.tensors(self.state.rows[positions])
            num_windows = self.state.rows.new_zeros(len(positions), 1)  # of each user
            for windows in self._instances(owners, instances):
                for micro_batch in windows.split(self.steps.pass_size.sequences, dim=1):
                    inputs = self.steps.model.router_inputs(tensors, owners, micro_batch, whole=whole)
                    for name, x in inputs.items():
                        unit_vectors = F.normalize(x.to(directions[name]), dim=-1)
                        directions[name][positions] += unit_vectors.sum(1)
                is_window = (windows != PAD).any(-1)  # others fill up the batch
                num_windows += is_window.sum(1, keepdim=True)
            for sum_of_unit_vectors in directions.values():
                sum_of_unit_vectors[positions] /= num_windows.clamp(min=1)
        return directions

    def _instances(self, owners: Sequence[int], count: int) -> Iterator[Int[Tensor, "users batch window"]]:
        """Yield batches with ``count`` random training windows of each user in total, padded with ``PAD``.

        They are the windows on which :meth:`router_directions` averages the inputs of routers.

        Args:
            owners: Numbers of the users' trainers.
            count: Number of windows of each user, over all batches.
        """
        batch_source = self.steps.batch_source
        # The label gives these batches a random stream that no phase of training uses.
        phase = Phase(roles=frozenset(), label="instances")
        smallest_batch = min(batch_source.size_of(owner) for owner in owners)
        num_batches = -(-count // smallest_batch)  # rounded up
        num_yielded = self.state.rows.new_zeros(len(owners), 1, dtype=torch.int64)  # windows of each user so far
        for repeat in range(num_batches):
            windows = batch_source.draw(owners, phase, self.round_number, step=0, repeat=repeat)
            windows = windows.to(self.state.rows.device)
            is_window = (windows != PAD).any(-1)  # (users, batch); batches may be padded
            window_number = num_yielded + is_window.cumsum(1)  # counted from 1
            num_yielded = window_number[:, -1:]
            is_excess = window_number > count
            # The last batch may exceed ``count``: replace all tokens of the excess windows, (users, batch, 1).
            yield windows.masked_fill(is_excess.unsqueeze(-1), PAD)

    def copies(self) -> Float[Tensor, "copies users columns"]:
        """Return the parameters of each copy of the users' models, for methods that train several copies per user.

        For example, copy 0 is the user's global model and copy 1 its personal one. The result is a clone.
        """
        num_copies = self.steps.plan.method.placement.copies
        rows = self.state.rows  # first copy 0 of every user, then copy 1 of every user, and so on
        return rows.clone().view(num_copies, -1, rows.shape[1])

    @property
    def scales(self) -> Float[Tensor, " users"]:
        """LoRA scale of each user, ``alpha / sqrt(rank)``."""
        model: Any = self.steps.model  # one with LoRA
        return model.adapters.scales[self.owners]

    def weight_gradients(self, user: int) -> Tree:
        """Return the gradients of the base's adapted weights on one training batch of a user, without its adapters.

        A LoRA whose factor A is the identity and whose factor B is zero does not change the model, and the gradient of
        B is that of the weight, times the LoRA scale.

        Args:
            user: Position of the user in the cohort.

        Returns:
            Gradients ``(*experts, d_in, d_out)`` of the mean loss by name of the LoRA; empty for a user without data.
        """
        owner, steps = self.owners[user], self.steps
        if not len(self.trainers[owner].train):
            return {}
        tensors = steps.tensors(self.state.rows[[user]])
        pairs = list(lora_pairs(tensors))
        rank = max(a.shape[-1] for _name, a, _b in pairs)  # the linears of an MLP have factors of the same rank
        factors_b: Tree = {}
        for name, a, b in pairs:
            tensors.pop(f"{name}.{MIDDLE}", None)
            identity = torch.eye(rank, a.shape[-1], dtype=a.dtype, device=a.device)
            tensors[f"{name}.a"] = identity.expand(*a.shape[:-2], -1, -1)
            zero = b.new_zeros(*b.shape[:-2], rank, b.shape[-1])
            factors_b[name] = tensors[f"{name}.b"] = zero.requires_grad_()
        # The label gives the batch a random stream that no phase of training uses.
        phase = Phase(roles=frozenset(), label="weights")
        drawn = steps.batch_source.draw([owner], phase, self.round_number, step=0, repeat=0).to(self.state.rows.device)
        num_losses = steps.batch_source.loss_counts(drawn).sum().clamp(min=1)
        gradients = {name: torch.zeros_like(b[0]) for name, b in factors_b.items()}
        for micro_batch in drawn.split(steps.pass_size.sequences, dim=1):
            batch: Any = steps.batch_source.read("train", [owner], micro_batch)
            with torch.enable_grad():
                losses, _penalty = steps.model.losses(tensors, [owner], batch)
                added = torch.autograd.grad(losses.sum() / num_losses.to(losses), list(factors_b.values()))
            for name, gradient in zip(factors_b, added, strict=True):
                gradients[name] += gradient[0]
        scale = float(self.scales[user])
        return {name: gradients[name][..., : a.shape[-1], :].to(self.state.rows) / scale for name, a, _b in pairs}

    def validate(self, candidate: Float[Tensor, " columns"], user: int) -> float:
        """Return the mean validation loss in nats of a user with another model than its own, to choose between models.

        Args:
            candidate: Parameters of the other model.
            user: Position of the user in the cohort.
        """
        owner = self.owners[user]

        def parameters_of(numbers: Sequence[int]) -> Float[Tensor, "slots columns"]:
            """Return the candidate, which is the only model, once for each place in a pass; ``numbers`` are all 0."""
            return candidate.expand(len(numbers), -1)

        only_candidate = Models(parameters_of=parameters_of, owners=[owner])
        return self.scorer.mean_loss(only_candidate, splits=[self.trainers[owner].valid], model_numbers=[0])

    # ---------------------------------------------------------------- helpers

    def _with_data(self) -> Iterator[tuple[list[int], list[int]]]:
        """Yield groups of users that have training data, with at most as many users as fit into one pass.

        Yields:
            Positions of the users of a group in the cohort, and the numbers of their trainers.
        """
        positions_with_data = [
            position for position, owner in enumerate(self.owners) if len(self.trainers[owner].train)
        ]
        for positions in cohorts(positions_with_data, self.steps.pass_size.users):
            yield positions, [self.owners[position] for position in positions]

    def _train_sweep(self, owners: Sequence[int]) -> TrainSweep:
        """Return an object that computes the losses of models on all training data of some users.

        Args:
            owners: Numbers of the users.
        """
        return TrainSweep(
            self.steps.batch_source, owners, self.round_number, self.steps.pass_size, self.state.rows.device
        )

    def _loss_function(self, rows: Float[Tensor, "users columns"], owners: Sequence[int]) -> Losses:
        """Return a function that computes the losses of a model of each user on a batch of the user's data.

        The losses are ``(users, 1, batch, ...)``; the axis of size 1 is that of several models of a user elsewhere.

        Args:
            rows: Parameters of the model of each user.
            owners: Numbers of the users, whose data and LoRA ranks belong to the models.
        """
        tensors, model = self.steps.tensors(rows), self.steps.model

        def losses_of(batch: Any) -> Float[Tensor, "users models batch ..."]:
            """Return the losses, without the penalty of the model."""
            losses, _penalty = model.losses(tensors, owners, batch)
            return losses.unsqueeze(1)  # one model

        return losses_of

    def _component_loss_function(self, tensors: Tree, owners: Sequence[int]) -> Losses:
        """Return a function that maps a batch of each user to its losses under each component of the mixture.

        Args:
            tensors: Tensors of the users by name, ``(users, *shape)``.
            owners: Numbers of the users' trainers.

        Returns:
            The function; its losses are ``(users, clusters, ...)``.
        """
        return lambda batch: self.steps.model.component_losses(tensors, owners, batch)
