"""Some users, worked on in one batch: their part of the state, and what a method may ask of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from comingle.engines.optimizers import learning_rate
from comingle.engines.scoring import Models
from comingle.engines.state import State
from comingle.engines.sweeps import Losses, TrainSweep
from comingle.engines.training import cohorts
from comingle.methods.client import Phase
from comingle.trees import CLIENT_ROUTER, Tree, assign

if TYPE_CHECKING:
    from comingle.engines.client import Clients


@dataclass(kw_only=True)
class Cohort:
    """Users whose tensors are ``part``; ``rows`` are their rows in the state of ``clients``.

    ``before`` is what they began the round with, where that is asked for. ``mask`` is None where nobody's tensors are
    padded. ``sample_shares`` are each user's training samples' own mixtures ``(clusters, samples)``.
    """

    clients: Clients
    rows: list[int]
    part: State
    round_number: int
    before: Float[Tensor, "users columns"] | None = None
    mask: Bool[Tensor, "users columns"] | None = None
    sample_shares: list[Float[Tensor, "clusters samples"]] | None = None

    @property
    def owners(self) -> list[int]:
        """Number of the trainer to whom each row belongs."""
        return self.clients.owners(self.rows)

    @property
    def names(self) -> list[str]:
        """Its name."""
        return [self.clients.name(row) for row in self.rows]

    @property
    def tensors(self) -> Tree:
        """Views of the cohort's tensors."""
        return self.clients.model.layout.views(self.part.rows)

    @property
    def began(self) -> Tree:
        """What they were when the round began."""
        assert self.before is not None
        return self.clients.model.layout.views(self.before)

    @property
    def own(self) -> Tree:
        """What parts of the method keep of each user."""
        return self.part.own

    @property
    def ranks(self) -> Int[Tensor, " users"]:
        """LoRA ranks."""
        return self.part.ranks

    @property
    def router_rate(self) -> float:
        """The router's learning rate in this round."""
        training = self.clients.training
        return learning_rate(training.router, self.round_number, training.rounds)

    @contextmanager
    def some(self, at: Sequence[int]) -> Iterator[Cohort]:
        """The cohort of some of these users; what is changed of it is changed here."""
        if list(at) == list(range(len(self.rows))):
            yield self
            return
        sub = self._of(at, self.part.take(at))
        yield sub
        self.part.put(at, sub.part)

    def only(self, at: Sequence[int]) -> Cohort:
        """The cohort of some of these users, for a look: its rows are a copy, and it has nothing to take steps with."""
        return self._of(at, replace(self.part, rows=self.part.rows[list(at)], ranks=self.part.ranks[list(at)]))

    def _of(self, at: Sequence[int], part: State) -> Cohort:
        return replace(
            self,
            rows=[self.rows[i] for i in at],
            part=part,
            before=None if self.before is None else self.before[list(at)],
            mask=None if self.mask is None else self.mask[list(at)],
            sample_shares=None if self.sample_shares is None else [self.sample_shares[i] for i in at],
        )

    # ---------------------------------------------------------------- what parts of a method ask for

    def reset(self, roles: frozenset[str]) -> None:
        """Make the tensors of some roles what they were before any training."""
        columns = self.clients.model.layout.mask(roles).to(self.part.rows.device)
        self.part.rows[:, columns] = self.clients.initial[self.rows][:, columns]

    def take_steps(self, phase: Phase) -> None:
        """The optimiser steps of a phase, before the others."""
        self.clients.steps.take(self, phase, -1)

    @torch.no_grad()
    def component_losses(self) -> Float[Tensor, "users clusters"]:
        """Mean training loss in nats under each component; 0 for users without data."""
        model, mixture = self.clients.stacked, self.clients.method.placement.mixture
        assert mixture is not None
        losses = self.part.rows.new_zeros(len(self.rows), mixture.clusters)
        for some, owners in self._with_data():
            tensors = self.clients.steps.tensors(self.part.rows[some])
            lost = self._sweep(owners).means(lambda batch, o=owners, t=tensors: model.component_losses(t, o, batch))
            losses[some] = lost.to(losses)
        return losses

    @torch.no_grad()
    def divide_samples(self) -> None:
        """Every training sample's own mixture, for this round, and each user's as their mean (FedEM, eq. 7 and 8)."""
        tensors, owners, model = self.clients.steps.tensors(self.part.rows), self.owners, self.clients.stacked
        sweep = self._sweep(owners)
        prior = model.shares(tensors)
        shares = sweep.responsibilities(prior, lambda batch: model.component_losses(tensors, owners, batch))
        self.sample_shares = shares
        means = torch.stack([own.mean(1) for own in shares])
        smallest = torch.finfo(means.dtype).tiny  # or a component would be lost for good
        self.tensors[CLIENT_ROUTER].copy_(means.clamp(min=smallest).log())

    def shares_of(self, drawn: Int[Tensor, "users batch"]) -> Float[Tensor, "users clusters batch"]:
        """What of :attr:`sample_shares` belongs to these samples; anything where there is none."""
        assert self.sample_shares is not None
        numbers = drawn.to(self.part.rows.device).clamp(min=0)
        return torch.stack([shares[:, own] for shares, own in zip(self.sample_shares, numbers, strict=True)])

    @torch.no_grad()
    def training_losses(self, models: Tree) -> Float[Tensor, "users models"]:
        """Mean loss in nats of each model on each user's training data, as it is drawn for the round.

        What a user does not share is as in its row. Users without data have zeros.
        """
        layout, shared = self.clients.model.layout, self.clients.method.shared
        count = next(iter(models.values())).shape[1]
        losses = torch.zeros(len(self.rows), count, dtype=self.part.rows.dtype)
        for some, owners in self._with_data():
            sweep = self._sweep(owners)
            for number in range(count):
                own = self.part.rows[some]
                assign(layout.views(own), layout, shared, {n: t[some, number] for n, t in models.items()})
                losses[some, number] = sweep.means(self._losses(own, owners))[:, 0].to(losses)
        return losses

    def validation_losses(self, models: Tree) -> Float[Tensor, "users models"]:
        """Mean validation loss in nats of each model on each user's text; what is not shared is as in its row."""
        layout, shared = self.clients.model.layout, self.clients.method.shared
        count = next(iter(models.values())).shape[1]
        pairs = [(user, model) for user in range(len(self.rows)) for model in range(count)]

        def rows(numbers: Sequence[int]) -> Float[Tensor, "slots columns"]:
            users, chosen = ([pairs[n][k] for n in numbers] for k in (0, 1))
            own = self.part.rows[users]
            assign(layout.views(own), layout, shared, {n: t[users, chosen] for n, t in models.items()})
            return own if self.mask is None else own.mul_(self.mask[users])

        owners = [self.owners[user] for user, _ in pairs]
        sets = [self.clients.trainers[owner].valid for owner in owners]
        scores = self.clients.scorer.score(Models(rows=rows, owners=owners), sets, range(len(pairs)))
        return torch.tensor([score.mean_loss for score in scores], dtype=torch.float64).view(-1, count)

    def copies(self) -> Float[Tensor, "copies users columns"]:
        """Every set of tensors that the users train: the cohort holds all copies of each, one after the other."""
        return self.part.rows.clone().view(self.clients.method.placement.copies, -1, self.part.rows.shape[1])

    def validate(self, candidate: Float[Tensor, " columns"], user: int) -> float:
        """Mean validation loss in nats of one user (by place) with these tensors as its model."""
        owner = self.owners[user]
        models = Models(rows=lambda numbers: candidate.expand(len(numbers), -1), owners=[owner])
        return self.clients.scorer.mean_loss(models, [self.clients.trainers[owner].valid], [0])

    # ---------------------------------------------------------------- helpers

    def _with_data(self) -> Iterator[tuple[list[int], list[int]]]:
        """Those who have training data, as many as go through the model at once: their places, and who they are."""
        trainers, owners = self.clients.trainers, self.owners
        some = [i for i, owner in enumerate(owners) if len(trainers[owner].train)]
        for group in cohorts(some, self.clients.portions.users):
            yield group, [owners[i] for i in group]

    def _sweep(self, owners: Sequence[int]) -> TrainSweep:
        clients = self.clients
        return TrainSweep(clients.feed, owners, self.round_number, clients.portions, self.part.rows.device)

    def _losses(self, rows: Float[Tensor, "users columns"], owners: Sequence[int]) -> Losses:
        """What the models of these rows lose on their users' batches."""
        tensors, model = self.clients.steps.tensors(rows), self.clients.model
        return lambda batch: model.losses(tensors, owners, batch)[0].unsqueeze(1)
