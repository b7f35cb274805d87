"""All users of a federation in one process, as a batch dimension over one frozen base.

A cohort of users takes a local step in one forward and backward pass. The objective is the sum over users of each
user's mean loss, so a user's gradient is what it would have computed alone; nothing else couples users within a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from comingle.adapters import watching
from comingle.data.batches import random_windows
from comingle.data.pack import UserData
from comingle.data.seeds import generator
from comingle.engines.exchange import averaging_weights, exchange, upload_bytes
from comingle.engines.optimizers import learning_rate, update
from comingle.engines.state import State, initial_state
from comingle.engines.training import Training, cohorts, portions
from comingle.errors import DivergenceError
from comingle.evaluation.perplexity import Score, score_streams
from comingle.methods.base import Method, Phase
from comingle.models.adapted import AdaptedModel
from comingle.trees import Tree, flatten

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


class Simulation:
    """The users, their state, and the work of one round.

    ``trainers`` own rows of the state: the users themselves, or the single pooled trainer of an upper bound. ``users``
    are always the real ones; ``row_of`` maps each to the row whose model it uses.
    """

    def __init__(
        self,
        model: AdaptedModel,
        method: Method,
        training: Training,
        *,
        trainers: Sequence[UserData],
        users: Sequence[UserData],
        state: State | None = None,
    ):
        self.model, self.method, self.training = model, method, training
        self.trainers, self.users = list(trainers), list(users)
        self.row_of = [0] * len(users) if method.pooled else list(range(len(users)))
        # A pooled trainer sees as many sequences a step as its users would have together.
        self.batch_size = training.batch_size * (len(users) if method.pooled else 1)
        self.portions = portions(training, model.base.device, self.batch_size)
        self.mask = model.mask()
        self.padded = not bool(self.mask.all())
        # Where nobody has more than one expert there is no router, and nothing to do in its phase.
        self.phases = [phase for phase in method.phases if model.layout.only(phase.roles).slots]
        names = [t.name for t in self.trainers]
        self.state = state or self._initial(names)

    def _initial(self, names: Sequence[str]) -> State:
        return initial_state(
            self.model.layout,
            self.mask,
            names=names,
            shared=self.method.shared,
            seed=self.training.seed,
            # Parameters and moments are float32 also over a bf16 base; a float64 base is for tests.
            dtype=torch.promote_types(self.model.base.dtype, torch.float32),
        )

    # ---------------------------------------------------------------- local work

    def local_round(self, members: Sequence[int], round_number: int, tick: Tick = lambda: None) -> LocalRound:
        """Local iterations of every member, cohort by cohort.

        Raises:
            DivergenceError: a user's loss is not finite; names the user and the round.
        """
        started = time.perf_counter()
        losses: dict[int, float] = {}
        for cohort in cohorts(members, self.portions.users):
            part = self.state.take(cohort)
            history = []
            for step in range(self.training.local_steps):
                history.append(self._iteration(part, cohort, round_number, step))
                tick()
            found = torch.stack(history)
            self._check_finite(found, part.rows, cohort, round_number)
            self.state.put(cohort, part)
            losses |= dict(zip(cohort, found.mean(0).tolist(), strict=True))
        tokens = len(members) * self.training.local_steps * self.batch_size * self.training.context
        return LocalRound(losses=losses, tokens=tokens, seconds=time.perf_counter() - started)

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
                self.trainers[u].valid if phase.stream == "valid" else self.trainers[u].train,
                count=self.batch_size,
                context=self.training.context,
                generator=generator(
                    self.training.seed, self.trainers[u].name, round_number, phase.optimizer, step, repeat
                ),
            )
            for u in users
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
        tensors = self._tensors(rows)
        trained = [slot.name for slot in self.model.layout.only(phase.roles).slots]
        for name in trained:
            tensors[name] = tensors[name].detach().requires_grad_()
        leaves = [tensors[name] for name in trained]
        total, gradient = torch.zeros(len(users)), 0.0
        for part in windows.to(rows.device).split(self.portions.sequences, dim=1):
            share = part.shape[1] / windows.shape[1]
            losses, penalty = self.model.losses(tensors, users, part)
            means = losses.mean((1, 2))
            objective = (means + self.training.balance_weight * penalty).sum() * share
            grads = torch.autograd.grad(objective, leaves, materialize_grads=True)
            gradient = gradient + flatten(grads).to(rows.dtype)
            total += share * means.detach().float().cpu()
        assert isinstance(gradient, Tensor)
        return total, gradient

    def _tensors(self, rows: Float[Tensor, "users columns"]) -> Tree:
        """Named tensors in the base's dtype, each contiguous so that products need no copies of them."""
        dtype = self.model.base.dtype
        return {name: t.to(dtype).contiguous() for name, t in self.model.layout.views(rows).items()}

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
            raise diverged(self.trainers[cohort[user]].name, what)
        for user in (~rows.isfinite().all(1)).nonzero().flatten().tolist():
            raise diverged(
                self.trainers[cohort[user]].name, f"not all tensors are finite after round {round_number + 1}"
            )

    # ---------------------------------------------------------------- between rounds

    def exchange(self, members: Sequence[int]) -> None:
        """The exchange that ends a round: members upload, the server answers, everybody can download."""
        tokens = [len(t.train) for t in self.trainers]
        weights = averaging_weights(members, tokens, weighted=self.training.weighting == "tokens")
        exchange(self.method, self.model.layout, self.state.rows, weights.to(self.state.rows.device))

    def evaluate(self) -> list[Score]:
        """Test score of every user with the model that it has now, and how much each of its experts said."""
        streams = [user.test for user in self.users]
        batch = min(16, self.portions.users * self.portions.sequences)
        slots = max(1, self.portions.users * self.portions.sequences // batch)
        adapters, context = self.model.adapters, self.training.context
        if not watching.routed(adapters):
            return score_streams(self.losses, streams, self.row_of, context=context, batch=batch, slots=slots)
        with watching.watched(adapters):
            said = partial(watching.gates, adapters)
            return score_streams(
                self.losses, streams, self.row_of, context=context, batch=batch, slots=slots, gates=said
            )

    def losses(
        self, rows: Sequence[int], windows: Int[Tensor, "slots batch window"]
    ) -> Float[Tensor, "slots batch context"]:
        """Losses of each slot's windows with the model of row ``rows[slot]``."""
        tensors = self._tensors(self.state.rows[list(rows)])
        return self.model.losses(tensors, rows, windows.to(self.model.base.device))[0]

    # ---------------------------------------------------------------- counts

    def trainable_parameters(self) -> list[int]:
        """Number of parameters that each user really trains."""
        trained = self.model.layout.mask(self.method.trained).to(self.mask.device)
        rows = (self.mask & trained).sum(1).tolist()
        return [rows[row] for row in self.row_of]

    def upload_bytes(self) -> list[int]:
        """Bytes that each user sends in a round in which it takes part; a download has the same size."""
        sent = upload_bytes(self.method, self.model.layout, self.mask)
        return [sent[row] for row in self.row_of]
