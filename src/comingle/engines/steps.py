"""A cohort's optimiser steps: one forward and backward pass for all of its users.

The objective is the sum over users of each user's mean loss, so a user's gradient is what it would have computed alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from comingle.data.seeds import generator
from comingle.engines.faults import broke_first
from comingle.engines.federation import Federation
from comingle.engines.optimizers import descend, learning_rate, update
from comingle.engines.state import State
from comingle.methods.base import Phase
from comingle.trees import CLIENT_ROUTER, STATISTICS, Tree, flatten


class Steps(Federation):
    """Local iterations, in place on what a cohort has taken from the state."""

    began: Float[Tensor, "rows columns"] | None = None
    """Everybody's tensors at the start of the round, where they are asked for later in it."""

    def __init__(self, *args: Any, **options: Any):
        self.responsibilities: dict[int, Float[Tensor, "clusters samples"]] = {}
        """How much each training sample of a trainer belongs to each component, in this round."""
        self.blamed: dict[int, tuple[str, ...]] = {}
        """Optimisers that made a row leave the real numbers, in this round."""
        super().__init__(*args, **options)

    def _pull_back(self, gradients: Tree, part: State, users: Sequence[int]) -> None:
        """Adds the gradient of ``proximal |theta - theta_0|^2``, theta_0 what a user began the round with."""
        assert self.began is not None
        now, before = (self.model.layout.views(rows) for rows in (part.rows, self.began[list(users)]))
        for name, gradient in gradients.items():
            gradients[name] = gradient + 2 * self.method.proximal * (now[name] - before[name])

    def _iteration(
        self, part: State, cohort: Sequence[int], round_number: int, step: int, active: Bool[Tensor, " users"]
    ) -> Float[Tensor, " users"]:
        """One local iteration of a cohort: each phase for the active users for whom it is due.

        Returns the training losses, 0 for whoever has no iteration left in this round.
        """
        losses = torch.zeros(len(cohort))
        numbered = list(enumerate(zip(part.iterations.tolist(), active.tolist(), strict=True)))
        for phase in self.phases:
            due = [i for i, (n, works) in numbered if works and (n + 1) % phase.every == 0]
            if not due:
                continue
            some = len(due) < len(cohort)
            sub = part.take(due) if some else part
            found = self._phase(phase, sub, [cohort[i] for i in due], round_number, step)
            if some:
                part.put(due, sub)
            if phase.optimizer != "router":
                losses[due] = found
        part.iterations += active.to(part.iterations)
        return losses

    def _phase(
        self, phase: Phase, part: State, users: Sequence[int], round_number: int, step: int
    ) -> Float[Tensor, " users"]:
        """The optimiser steps of one phase, in place on ``part``. Returns the mean loss of each user."""
        total = torch.zeros(len(users))
        for i in range(phase.steps):
            drawn = self.feed.draw(self.owners(users), phase, round_number, step, i)
            noise = self._noise(users, round_number, phase.purpose, step, i)
            with self.model.randomness(self.training.seed, self.name(users[0]), round_number, step, i):
                losses, gradients = self.gradient(part.rows, users, drawn, phase, noise)
            for place in (~losses.isfinite()).nonzero().flatten().tolist():  # before the step spoils all that it trains
                self.suspects(users[place], part.rows[place])
            if self.method.proximal:
                self._pull_back(gradients, part, users)
            self._step(phase, part, users, gradients, round_number * self.local_steps + max(step, 0))
            total += losses
        return total / phase.steps

    def suspects(self, row: int, values: Float[Tensor, " columns"]) -> tuple[str, ...]:
        """Which optimisers may have made a row leave the real numbers: as its tensors were when that first showed."""
        if row not in self.blamed:
            trained: dict[str, frozenset[str]] = {}
            for phase in (*self.method.before, *self.phases):
                for name, roles in phase.optimizers:
                    trained[name] = trained.get(name, frozenset()) | roles
            self.blamed[row] = broke_first(self.model.layout, values, trained)
        return self.blamed[row]

    def _noise(self, users: Sequence[int], *place: str | int) -> Float[Tensor, "users clusters"] | None:
        """Noise on the users' router logits, each user's from a stream of its own; None where there is none."""
        mixture = self.mixture
        if mixture is None or not mixture.noise:
            return None
        streams = (generator(self.training.seed, self.name(user), "router noise", *place) for user in users)
        drawn = torch.stack([torch.randn(mixture.clusters, generator=stream) for stream in streams])
        return mixture.noise * drawn.to(self.model.device, self.model.dtype)

    def _step(self, phase: Phase, part: State, users: Sequence[int], gradients: Tree, iteration: int) -> None:
        """One optimiser step on the columns that ``phase`` trains, in place; ``gradients`` is used up."""
        layout = self.model.layout
        for name, roles in phase.optimizers:
            if name == "router":
                part.router_steps += 1
            settings = self.training.router if name == "router" else self.training.experts
            count = part.router_steps if name == "router" else part.iterations + 1
            own, rate = layout.only(roles), learning_rate(settings, iteration, self.iterations)
            if settings.memoryless and not self.padded:  # a gradient as large as everybody's nets is not copied
                views = layout.views(part.rows)
                for slot in own.slots:
                    descend(settings, rate, views[slot.name], gradients.pop(slot.name))
                continue
            span = layout.span(own)
            gradient = flatten([gradients.pop(slot.name) for slot in own.slots])
            if self.padded:
                gradient *= self.mask[list(users)][:, span]
            moments = part.first[:, span], part.second[:, span]
            update(settings, rate, part.rows[:, span], gradient, *moments, count)

    def gradient(
        self,
        rows: Float[Tensor, "users columns"],
        users: Sequence[int],
        drawn: Int[Tensor, "users batch ..."],
        phase: Phase,
        noise: Float[Tensor, "users clusters"] | None = None,
    ) -> tuple[Float[Tensor, " users"], Tree]:
        """Each user's mean loss, and its gradient with respect to the tensors that the phase trains.

        Only these tensors require a gradient, so nothing is computed or kept for the others.
        """
        whole, statistics = self.feed.counted(drawn), self.model.layout.only({STATISTICS}).slots
        if statistics and len(whole.unique()) > 1:
            return self._gradient_by_size(rows, users, drawn, phase, noise)
        tensors, owners = self.tensors(rows), self.owners(users)
        if noise is not None:  # the gradient at the logits with noise is that of the logits
            tensors[CLIENT_ROUTER] = tensors[CLIENT_ROUTER] + noise
        for slot in statistics:  # changed in place, and views of what must not change
            tensors[slot.name] = tensors[slot.name].clone()
        trained = [slot.name for slot in self.model.layout.only(phase.roles).slots]
        for name in trained:
            tensors[name] = tensors[name].detach().requires_grad_()
        total, gradients = torch.zeros(len(users)), Tree()
        for part in drawn.to(rows.device).split(self.portions.sequences, dim=1):
            counted = self.feed.counted(part)
            share = counted.to(rows.dtype) / whole.to(rows)
            batch: Any = self.feed.read(phase.stream, owners, part)
            own = {"shares": self._own_shares(owners, part)} if self.responsibilities else {}
            losses, penalty = self.model.losses(tensors, owners, batch, train=True, **own)
            means = losses.flatten(1).sum(1) / counted.clamp(min=1)
            objective = means + self.training.balance_weight * penalty
            if self.method.regulariser is not None:
                objective = objective + self.method.regulariser(tensors, self.state.ranks[list(users)])
            leaves = [tensors[name] for name in trained]
            found = torch.autograd.grad((objective * share).sum(), leaves, materialize_grads=True)
            grads = dict(zip(trained, found, strict=True))
            if self.mixture is not None and self.mixture.precondition:
                grads = self.stacked.precondition(tensors, grads)
            for name, gradient in grads.items():
                earlier = gradients.get(name)
                gradients[name] = gradient.to(rows.dtype) if earlier is None else earlier + gradient
            total += (share * means.detach()).float().cpu()
        self._keep_statistics(rows, tensors)
        return total, gradients

    def _own_shares(
        self, owners: Sequence[int], drawn: Int[Tensor, "users batch"]
    ) -> Float[Tensor, "users clusters batch"]:
        """What of :attr:`responsibilities` belongs to these samples; anything where there is none."""
        numbers = drawn.to(self.state.rows.device).clamp(min=0)
        return torch.stack([self.responsibilities[o][:, own] for o, own in zip(owners, numbers, strict=True)])

    def _gradient_by_size(
        self,
        rows: Float[Tensor, "users columns"],
        users: Sequence[int],
        drawn: Int[Tensor, "users batch"],
        phase: Phase,
        noise: Float[Tensor, "users clusters"] | None = None,
    ) -> tuple[Float[Tensor, " users"], Tree]:
        """:meth:`gradient` of users with equal batches at a time: batch norm would see what fills the others."""
        sizes = self.feed.counted(drawn)
        total, trained = torch.zeros(len(users)), self.model.layout.only(phase.roles).slots
        gradients = {slot.name: rows.new_empty(len(users), *slot.shape) for slot in trained}
        for size in sizes.unique().tolist():
            at = (sizes == size).nonzero().flatten()
            some = rows[at]
            own = None if noise is None else noise[at]
            total[at], found = self.gradient(some, [users[i] for i in at.tolist()], drawn[at, :size], phase, own)
            rows[at] = some  # with the running statistics that this pass has changed
            for name, gradient in found.items():
                gradients[name][at] = gradient
        return total, gradients

    def _keep_statistics(self, rows: Float[Tensor, "users columns"], tensors: Tree) -> None:
        """Running statistics, which a forward pass changes in its own copy."""
        statistics = self.model.layout.only({STATISTICS}).slots
        views = self.model.layout.views(rows) if statistics else {}
        for slot in statistics:
            views[slot.name].copy_(tensors[slot.name])
