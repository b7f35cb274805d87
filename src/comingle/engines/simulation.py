"""All users of a federation in one process, as a batch dimension over one frozen base.

A cohort of users takes a local step in one forward and backward pass (:mod:`comingle.engines.steps`); nothing couples
users within a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.engines.exchange import averaging_weights, build_reports, exchange
from comingle.engines.faults import diverged, find_broken
from comingle.engines.federation import AnyScore
from comingle.engines.optimizers import learning_rate
from comingle.engines.state import State
from comingle.engines.steps import Steps
from comingle.engines.surveys import Survey
from comingle.engines.training import cohorts
from comingle.methods.base import Context, Reroute, Resize
from comingle.trees import CLIENT_ROUTER

TUNING = "tuning"
"""Label of the phases that tune: their batches have a random stream of their own."""

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


class Simulation(Steps):
    """The work of a round: local steps of everybody who takes part, and the exchange that ends it."""

    skipped: Mapping[str, str] = MappingProxyType({})
    """Users who were left out beforehand, and why."""

    def left_out(self) -> dict[str, dict[str, str]]:
        """They as the start event and the metrics have them; nothing where nobody was."""
        return {"skipped_users": dict(self.skipped)} if self.skipped else {}

    # ---------------------------------------------------------------- local work

    def local_round(self, members: Sequence[int], round_number: int, tick: Tick = lambda: None) -> LocalRound:
        """Local iterations of every member, cohort by cohort.

        Raises:
            DivergenceError: a user's loss is not finite; names the user and the round.
        """
        started, self.round_number = time.perf_counter(), round_number
        losses: dict[int, float] = {}
        rejected: dict[int, str] = {}
        self.blamed = {}
        copies = range(self.method.copies)
        working = [copy * len(self.trainers) + member for copy in copies for member in members]
        began = self.began = self._remember(working) if self._looks_back else None
        for cohort in cohorts(working, self.portions.users):
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
            self.state.put(cohort, part)
            losses |= dict(zip(self.owners(cohort), (found.sum(0) / steps).tolist(), strict=True))
        if self.method.resize:
            self.resized()
        seen = len(copies) * sum(self.feed.seen(member) for member in members)
        losses = {user: loss for user, loss in losses.items() if user not in rejected}
        return LocalRound(losses=losses, rejected=rejected, tokens=seen, seconds=time.perf_counter() - started)

    @contextmanager
    def tuned(self, done: int | None = None, members: Sequence[int] | None = None) -> Iterator[None]:
        """Where the method tunes: everybody's tensors as another local round makes them, until the end of the block.

        Its batches have a random stream of their own, and nothing of it is left behind. Learning rates are those of the
        round after ``done`` (None: of the round with whose models the run ends; at most of the last). Another one
        within such a block changes nothing.
        """
        if not self.method.tunes or any(phase.label == TUNING for phase in self.phases):
            yield
            return
        last = self.training.rounds - 1
        state, phases, number, began = self.state, self.phases, self.round_number, self.began
        self.state = state.copy()
        self.phases = [replace(phase, label=TUNING) for phase in phases]
        try:
            everyone = range(len(self.trainers))
            done = self.chosen_round if done is None else done
            self.local_round(everyone if members is None else members, min(done, last))
            yield
        finally:
            self.state, self.phases, self.round_number, self.began = state, phases, number, began

    def evaluate(self, done: int | None = None) -> Sequence[AnyScore]:
        """Test score of every user with the model that it has after ``done`` rounds (None: at the end)."""
        with self.tuned(done):
            return super().evaluate()

    def validate(self) -> float:
        """Mean validation loss of the models that users have at the end, or in the block of :meth:`tuned`."""
        with self.tuned():
            return super().validate()

    @property
    def chosen_round(self) -> int:
        """After how many rounds users have had the models with which the run ends."""
        if self.state.best:
            return int(self.state.best["round"])
        return self.training.rounds if self.method.phases else 0

    def choose(self) -> None:
        """End with the models of the best round, where that is asked for."""
        if self.state.best:
            self.state = self.state.recalled()
            self.resized()

    def _begin(self, part: State, cohort: Sequence[int], round_number: int) -> None:
        """What a round starts with: some columns as they were before any training, and phases before the others."""
        if self.method.resets:
            columns = self.model.layout.mask(self.method.resets).to(part.rows.device)
            part.rows[:, columns] = self.start[list(cohort)][:, columns]
        if self.mixture is not None and self.mixture.at == "samples":
            self._share_out(part, cohort, round_number)
        for phase in self.method.before:
            self._phase(phase, part, cohort, round_number, -1)

    @torch.no_grad()
    def _share_out(self, part: State, cohort: Sequence[int], round_number: int) -> None:
        """Every training sample's own mixture, for this round, and each user's as their mean (FedEM, eq. 7 and 8)."""
        owners, tensors = self.owners(cohort), self.tensors(part.rows)
        survey = Survey(self.feed, owners, round_number, self.portions, part.rows.device)
        prior = self.stacked.shares(tensors)
        found = survey.responsibilities(prior, lambda batch: self.stacked.component_losses(tensors, owners, batch))
        self.responsibilities |= dict(zip(owners, found, strict=True))
        means = torch.stack([own.mean(1) for own in found])
        smallest = torch.finfo(means.dtype).tiny  # or a component would be lost for good
        self.model.layout.views(part.rows)[CLIENT_ROUTER].copy_(means.clamp(min=smallest).log())

    @torch.no_grad()
    def _reroute(self, reroute: Reroute) -> None:
        """Everybody's router out of each received component's loss on the own training data."""
        rate = learning_rate(self.training.router, self.round_number, self.training.rounds)
        theta = self.model.layout.views(self.state.rows)[CLIENT_ROUTER]
        for cohort in cohorts([i for i, t in enumerate(self.trainers) if len(t.train)], self.portions.users):
            tensors = self.tensors(self.state.rows[cohort])
            survey = Survey(self.feed, cohort, self.round_number, self.portions, self.state.rows.device)
            losses = survey.means(lambda batch, c=cohort, t=tensors: self.stacked.component_losses(t, c, batch))
            theta[cohort] = reroute(losses, rate).to(theta)

    @property
    def _looks_back(self) -> bool:
        """Whether what a user began a round with is asked for later in the round."""
        return bool(self.method.resize) or self.method.proximal > 0 or self.method.forgiving

    def _resize(self, resize: Resize, before: Float[Tensor, "users columns"], part: State) -> None:
        part.ranks.copy_(resize(self.model.layout.views(before), self.model.layout.views(part.rows), part.ranks))

    def _remember(self, working: Sequence[int]) -> Float[Tensor, "rows columns"]:
        """What some rows are now; memory that nobody looks at holds the place of the others."""
        found = torch.empty_like(self.state.rows)
        found[list(working)] = self.state.rows[list(working)]
        return found

    def _leave_out(self, broken: dict[int, str], part: State, cohort: Sequence[int]) -> dict[int, str]:
        """Users who are not finite end the run; where the server is forgiving, they have not taken part."""
        for user, what in broken.items():
            if self.began is None or not self.method.forgiving:
                suspects = self.suspects(cohort[user], part.rows[user])
                raise diverged(self.name(cohort[user]), what, suspects)
            part.rows[user] = self.began[cohort[user]]
            part.first[user], part.second[user] = 0, 0
        return {self.owners(cohort)[user]: what for user, what in broken.items()}

    # ---------------------------------------------------------------- between rounds

    def exchange(self, members: Sequence[int]) -> None:
        """The exchange that ends a round: members upload, the server answers, everybody can download."""
        users = len(self.trainers)
        tokens = [len(t.train) for t in self.trainers]
        weights = averaging_weights(members, tokens, weighted=self.weighted)
        device = self.state.rows.device
        context = Context(
            weights=weights.to(device),
            ranks=self.state.ranks[:users],
            scales=self.model.scales.to(device),
            validate=lambda: self.cross_validate(members),
            memory=self.state.server,
            assess=lambda models: self.assess(models, self.state.rows[:users]),
            reports=build_reports(self.method, self.model.layout, self.state.rows[:users], members),
            clustered=self.clustered,
            centre=None if self.mixture is None else self.stacked.centre,
        )
        exchange(self.method, self.model.layout, self.state.rows[:users], context, members)
        if self.method.reroute is not None:
            self._reroute(self.method.reroute)
        if self.padded:  # a server may answer users of unequal size alike
            self.state.rows.mul_(self.mask)

    def finish(self) -> None:
        """What a method does once, after the last exchange: the last copies become the users' models."""
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
