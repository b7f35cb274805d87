"""All users of a federation in one process, as a batch dimension over one frozen base.

A cohort of users takes a local step in one forward and backward pass. The objective is the sum over users of each
user's mean loss, so a user's gradient is what it would have computed alone; nothing else couples users within a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from comingle.data.batches import random_windows
from comingle.data.seeds import generator
from comingle.engines.exchange import averaging_weights, exchange
from comingle.engines.federation import Federation
from comingle.engines.optimizers import learning_rate, update
from comingle.engines.state import State
from comingle.engines.training import cohorts
from comingle.errors import DivergenceError
from comingle.methods.base import Context, Phase
from comingle.trees import flatten

Tick = Callable[[], None]
"""Called after every local iteration of a cohort."""


@dataclass(frozen=True, kw_only=True)
class LocalRound:
    """What one round of local work yielded: mean training loss per participant (nats), training tokens, seconds."""

    losses: dict[int, float]
    tokens: int
    seconds: float


def diverged(user: str, what: str) -> DivergenceError:
    """The error for a user who has left the real numbers."""
    advice = "try a smaller training.experts.learning_rate, or training.experts.clip_norm: 1.0"
    return DivergenceError(f"user {user!r}: {what}; the last checkpoint is kept; {advice}")


class Simulation(Federation):
    """The work of a round: local steps of everybody who takes part, and the exchange that ends it."""

    # ---------------------------------------------------------------- local work

    def local_round(self, members: Sequence[int], round_number: int, tick: Tick = lambda: None) -> LocalRound:
        """Local iterations of every member, cohort by cohort.

        Raises:
            DivergenceError: a user's loss is not finite; names the user and the round.
        """
        started = time.perf_counter()
        losses: dict[int, float] = {}
        copies = range(self.method.copies)
        for cohort in cohorts([c * len(self.trainers) + m for c in copies for m in members], self.portions.users):
            part = self.state.take(cohort)
            before = part.rows.clone() if self.method.resize else None
            history = []
            for step in range(self.training.local_steps):
                history.append(self._iteration(part, cohort, round_number, step))
                tick()
            found = torch.stack(history)
            self._check_finite(found, part.rows, cohort, round_number)
            if before is not None:
                self._resize(before, part)
            self.state.put(cohort, part)
            losses |= dict(zip(self.owners(cohort), found.mean(0).tolist(), strict=True))
        if self.method.resize:
            self.resized()
        passes = len(members) * len(copies) * self.training.local_steps
        tokens = passes * self.batch_size * self.training.context
        return LocalRound(losses=losses, tokens=tokens, seconds=time.perf_counter() - started)

    def _resize(self, before: Float[Tensor, "users columns"], part: State) -> None:
        assert self.method.resize is not None
        views = self.model.layout.views
        part.ranks.copy_(self.method.resize(views(before), views(part.rows), part.ranks))

    def _iteration(self, part: State, cohort: Sequence[int], round_number: int, step: int) -> Float[Tensor, " users"]:
        """One local iteration of a cohort: each phase for the users for whom it is due. Returns the training losses."""
        losses = torch.zeros(len(cohort))
        for phase in self.phases:
            due = [i for i, n in enumerate(part.iterations.tolist()) if (n + 1) % phase.every == 0]
            if not due:
                continue
            some = len(due) < len(cohort)
            sub = part.take(due) if some else part
            found = self._phase(phase, sub, [cohort[i] for i in due], round_number, step)
            if some:
                part.put(due, sub)
            if phase.optimizer == "experts":
                losses[due] = found
        part.iterations += 1
        return losses

    def _phase(
        self, phase: Phase, part: State, users: Sequence[int], round_number: int, step: int
    ) -> Float[Tensor, " users"]:
        """The optimiser steps of one phase, in place on ``part``. Returns the mean loss of each user."""
        total = torch.zeros(len(users))
        for i in range(phase.steps):
            windows = self.windows(phase, users, round_number, step, i)
            losses, gradient = self.gradient(part.rows, users, windows, phase)
            self._step(phase, part, users, gradient, round_number * self.training.local_steps + step)
            total += losses
        return total / phase.steps

    def _step(
        self, phase: Phase, part: State, users: Sequence[int], gradient: Float[Tensor, "users span"], iteration: int
    ) -> None:
        """One optimiser step on the columns that ``phase`` trains, in place."""
        if phase.optimizer == "router":
            settings = self.training.router
            part.router_steps += 1
            count = part.router_steps
        else:
            settings, count = self.training.experts, part.iterations + 1
        span = self.model.layout.span(self.model.layout.only(phase.roles))
        if self.padded:
            gradient = gradient * self.mask[list(users)][:, span]
        rate = learning_rate(settings, iteration, self.training.iterations)
        update(settings, rate, part.rows[:, span], gradient, part.first[:, span], part.second[:, span], count)

    def windows(
        self, phase: Phase, users: Sequence[int], round_number: int, step: int, repeat: int
    ) -> Int[Tensor, "users batch window"]:
        """A fresh random batch for each user, from (seed, user, round, purpose, step, repeat) and nothing else."""
        drawn = [
            random_windows(
                trainer.valid if phase.stream == "valid" else trainer.train,
                count=self.batch_size,
                context=self.training.context,
                generator=generator(self.training.seed, trainer.name, round_number, phase.optimizer, step, repeat),
            )
            for trainer in (self.trainers[i] for i in self.owners(users))
        ]
        return torch.stack(drawn)

    def gradient(
        self,
        rows: Float[Tensor, "users columns"],
        users: Sequence[int],
        windows: Int[Tensor, "users batch window"],
        phase: Phase,
    ) -> tuple[Float[Tensor, " users"], Float[Tensor, "users span"]]:
        """Each user's mean loss, and its gradient with respect to the columns that the phase trains.

        Only these tensors require a gradient, so nothing is computed or kept for the others.
        """
        tensors = self.tensors(rows)
        trained = [slot.name for slot in self.model.layout.only(phase.roles).slots]
        for name in trained:
            tensors[name] = tensors[name].detach().requires_grad_()
        leaves, regularise = [tensors[name] for name in trained], self.method.regulariser
        total, gradient = torch.zeros(len(users)), 0.0
        for part in windows.to(rows.device).split(self.portions.sequences, dim=1):
            share = part.shape[1] / windows.shape[1]
            losses, penalty = self.model.losses(tensors, self.owners(users), part)
            means = losses.mean((1, 2))
            objective = means + self.training.balance_weight * penalty
            if regularise is not None:
                objective = objective + regularise(tensors, self.state.ranks[list(users)])
            grads = torch.autograd.grad(objective.sum() * share, leaves, materialize_grads=True)
            gradient = gradient + flatten(grads).to(rows.dtype)
            total += share * means.detach().float().cpu()
        assert isinstance(gradient, Tensor)
        return total, gradient

    def _check_finite(
        self,
        losses: Float[Tensor, "steps users"],
        rows: Float[Tensor, "users columns"],
        cohort: Sequence[int],
        round_number: int,
    ) -> None:
        # The rows too: what breaks in the last step shows in no loss of this round, and the exchange would spread it.
        for step, user in (~losses.isfinite()).nonzero().tolist():
            what = f"training loss is {losses[step, user].item()} in round {round_number + 1}, local step {step + 1}"
            raise diverged(self.name(cohort[user]), what)
        for user in (~rows.isfinite().all(1)).nonzero().flatten().tolist():
            raise diverged(self.name(cohort[user]), f"not all tensors are finite after round {round_number + 1}")

    # ---------------------------------------------------------------- between rounds

    def exchange(self, members: Sequence[int]) -> None:
        """The exchange that ends a round: members upload, the server answers, everybody can download."""
        users = len(self.trainers)
        tokens = [len(t.train) for t in self.trainers]
        weights = averaging_weights(members, tokens, weighted=self.training.weighting == "tokens")
        device = self.state.rows.device
        context = Context(
            weights=weights.to(device),
            ranks=self.state.ranks[:users],
            scales=self.model.adapters.scales.to(device),
            validate=lambda: self.cross_validate(members),
            memory=self.state.server,
        )
        exchange(self.method, self.model.layout, self.state.rows[:users], context)
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
            return self.score([self.trainers[user].valid], [own.start + user])[0].mean_nats

        rows[own] = finish(copies, validate)
