"""All users of a federation in one process, as a batch dimension over one frozen base.

A cohort of users takes a local step in one forward and backward pass. The objective is the sum over users of each
user's mean loss, so a user's gradient is what it would have computed alone; nothing else couples users within a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from comingle.engines.exchange import averaging_weights, build_reports, exchange
from comingle.engines.faults import diverged, find_broken
from comingle.engines.federation import Federation
from comingle.engines.optimizers import descend, learning_rate, update
from comingle.engines.state import State
from comingle.engines.training import cohorts
from comingle.methods.base import Context, Phase, Reroute, Resize
from comingle.trees import CLIENT_ROUTER, STATISTICS, Tree, flatten

Tick = Callable[[], None]
"""Called after every local iteration of a cohort."""


@dataclass(frozen=True, kw_only=True)
class LocalRound:
    """What one round of local work yielded: mean training loss per participant, training tokens or samples, seconds.

    ``rejected`` says whose work is left out, and why.
    """

    losses: dict[int, float]
    rejected: dict[int, str]
    tokens: int
    seconds: float


class Simulation(Federation):
    """The work of a round: local steps of everybody who takes part, and the exchange that ends it."""

    began: Float[Tensor, "rows columns"] | None = None
    """Everybody's tensors at the start of the round, where they are asked for later in it."""

    # ---------------------------------------------------------------- local work

    def local_round(self, members: Sequence[int], round_number: int, tick: Tick = lambda: None) -> LocalRound:
        """Local iterations of every member, cohort by cohort.

        Raises:
            DivergenceError: a user's loss is not finite; names the user and the round.
        """
        started = time.perf_counter()
        losses: dict[int, float] = {}
        rejected: dict[int, str] = {}
        copies = range(self.method.copies)
        began = self.began = self.state.rows.clone() if self._looks_back else None
        for cohort in cohorts([c * len(self.trainers) + m for c in copies for m in members], self.portions.users):
            part = self.state.take(cohort)
            self._begin(part, cohort, round_number)
            steps = torch.tensor([self.feed.steps(owner) for owner in self.owners(cohort)])
            history = []
            for step in range(int(steps.max())):
                history.append(self._iteration(part, cohort, round_number, step, step < steps))
                tick()
            found = torch.stack(history)
            rejected |= self._leave_out(find_broken(found, part.rows, round_number), part, cohort)
            if self.method.resize is not None and began is not None:
                self._resize(self.method.resize, began[cohort], part)
            if self.method.reroute is not None:
                self._reroute(part, cohort, round_number, self.method.reroute)
            self.state.put(cohort, part)
            losses |= dict(zip(self.owners(cohort), (found.sum(0) / steps).tolist(), strict=True))
        if self.method.resize:
            self.resized()
        seen = len(copies) * sum(self.feed.seen(member) for member in members)
        losses = {user: loss for user, loss in losses.items() if user not in rejected}
        return LocalRound(losses=losses, rejected=rejected, tokens=seen, seconds=time.perf_counter() - started)

    def _begin(self, part: State, cohort: Sequence[int], round_number: int) -> None:
        """What a round starts with: some columns as they were before any training, and phases before the others."""
        if self.method.resets:
            columns = self.model.layout.mask(self.method.resets).to(part.rows.device)
            part.rows[:, columns] = self.start[list(cohort)][:, columns]
        for phase in self.method.before:
            self._phase(phase, part, cohort, round_number, -1)

    @torch.no_grad()
    def _reroute(self, part: State, cohort: Sequence[int], round_number: int, reroute: Reroute) -> None:
        """A user's router out of each component's loss on its training data."""
        owners, tensors = self.owners(cohort), self.tensors(part.rows)
        total, counts = torch.zeros(()), torch.zeros(len(cohort), dtype=torch.int64)
        for drawn in self.feed.sweep(owners, round_number):
            drawn = drawn.to(part.rows.device)
            batch: Any = self.feed.read("train", owners, drawn)
            losses = self.stacked.component_losses(tensors, owners, batch)
            total = total + losses.flatten(2).sum(2)
            counts += self.feed.counted(drawn).cpu()
        rate = learning_rate(self.training.router, round_number, self.training.rounds)
        router = self.model.layout.views(part.rows)[CLIENT_ROUTER]
        router.copy_(reroute(total / counts.to(total).unsqueeze(1), rate))

    @property
    def _looks_back(self) -> bool:
        """Whether what a user began a round with is asked for later in the round."""
        return bool(self.method.resize) or self.method.proximal > 0 or self.method.forgiving

    def _resize(self, resize: Resize, before: Float[Tensor, "users columns"], part: State) -> None:
        part.ranks.copy_(resize(self.model.layout.views(before), self.model.layout.views(part.rows), part.ranks))

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
            with self.model.randomness(self.training.seed, self.name(users[0]), round_number, step, i):
                losses, gradients = self.gradient(part.rows, users, drawn, phase)
            if self.method.proximal:
                self._pull_back(gradients, part, users)
            self._step(phase, part, users, gradients, round_number * self.local_steps + max(step, 0))
            total += losses
        return total / phase.steps

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
    ) -> tuple[Float[Tensor, " users"], Tree]:
        """Each user's mean loss, and its gradient with respect to the tensors that the phase trains.

        Only these tensors require a gradient, so nothing is computed or kept for the others.
        """
        whole, statistics = self.feed.counted(drawn), self.model.layout.only({STATISTICS}).slots
        if statistics and len(whole.unique()) > 1:
            return self._gradient_by_size(rows, users, drawn, phase)
        tensors, owners = self.tensors(rows), self.owners(users)
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
            losses, penalty = self.model.losses(tensors, owners, batch, train=True)
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

    def _gradient_by_size(
        self,
        rows: Float[Tensor, "users columns"],
        users: Sequence[int],
        drawn: Int[Tensor, "users batch"],
        phase: Phase,
    ) -> tuple[Float[Tensor, " users"], Tree]:
        """:meth:`gradient` of users with equal batches at a time: batch norm would see what fills the others."""
        sizes = self.feed.counted(drawn)
        total, trained = torch.zeros(len(users)), self.model.layout.only(phase.roles).slots
        gradients = {slot.name: rows.new_empty(len(users), *slot.shape) for slot in trained}
        for size in sizes.unique().tolist():
            at = (sizes == size).nonzero().flatten()
            some = rows[at]
            total[at], found = self.gradient(some, [users[i] for i in at.tolist()], drawn[at, :size], phase)
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

    def _leave_out(self, broken: dict[int, str], part: State, cohort: Sequence[int]) -> dict[int, str]:
        """Users who are not finite end the run; where the server is forgiving, they have not taken part."""
        for user, what in broken.items():
            if self.began is None or not self.method.forgiving:
                raise diverged(self.name(cohort[user]), what)
            part.rows[user] = self.began[cohort[user]]
            part.first[user], part.second[user] = 0, 0
        return {self.owners(cohort)[user]: what for user, what in broken.items()}

    # ---------------------------------------------------------------- between rounds

    def exchange(self, members: Sequence[int]) -> None:
        """The exchange that ends a round: members upload, the server answers, everybody can download."""
        users = len(self.trainers)
        tokens = [len(t.train) for t in self.trainers]
        weights = averaging_weights(members, tokens, weighted=self.training.weighting != "uniform")
        device = self.state.rows.device
        context = Context(
            weights=weights.to(device),
            ranks=self.state.ranks[:users],
            scales=self.model.scales.to(device),
            validate=lambda: self.cross_validate(members),
            memory=self.state.server,
            reports=build_reports(self.method, self.model.layout, self.state.rows[:users]),
            clustered=self.clustered,
        )
        exchange(self.method, self.model.layout, self.state.rows[:users], context)
        if self.mixture is not None and self.mixture.centre:
            views = self.model.layout.views(self.state.rows)
            for name, centred in self.stacked.centre(views).items():
                views[name].copy_(centred)
        if self.padded:  # a server may answer users of unequal size alike
            self.state.rows.mul_(self.mask)

    def finish(self) -> None:
        """What a method does once, after the last local steps: the last copies become the users' models."""
        finish = self.method.finish
        if finish is None:
            return
        users = len(self.trainers)
        rows = self.state.rows
        own = slice(len(rows) - users, len(rows))
        copies = rows.clone().view(self.method.copies, users, -1)

        def validate(candidate: Float[Tensor, " columns"], user: int) -> float:
            rows[own][user] = candidate
            return self.score([self.trainers[user].valid], [own.start + user])[0].mean_loss

        rows[own] = finish(copies, validate)
