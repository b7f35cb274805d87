"""Clusters and mixtures of whole models: IFCA and FedEM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from comingle.methods.base import MODEL, Client, ClientHook, Cohort, Method, Phase, Placement, joint
from comingle.methods.fedmerge import mix, soup_of, start_soup
from comingle.methods.server import Mean, Received, Reported, ServerSetup
from comingle.methods.settings import Models
from comingle.models.routers import ClientMixture
from comingle.utils.seeds import generator
from comingle.utils.trees import ADAPTOR, STATISTICS, Tree


def ifca(*, models: Models = 5) -> Method:
    """IFCA: each user picks the one of k models with the lowest loss on its training data, and trains it.

    Source: Ghosh et al. 2020, "An Efficient Framework for Clustered Federated Learning", arXiv:2006.04088, Algorithm 1
    with model averaging.
    Shared: the net with its statistics; on a language model attention and 1 LoRA expert per MLP.  Local: nothing.
    Frozen: a language model's base.
    Client: downloads all models, picks one by the loss on all of its training data, takes joint steps on it, uploads it
    with its number.
    Server: each model becomes the weighted mean of the uploads for it; a model that no participant picked is unchanged.
    Differs from the paper: means are weighted by training samples if ``training.weighting`` says so.  Among equally
    good models a user keeps the one it has, at first a random one: before training the models' LoRA do not differ.

    Args:
        models: Number of models on the server.
    """

    return Method(
        name="ifca",
        placement=Placement(shared=MODEL),
        client=Client(phases=joint(routed=False), parts=(ChooseModel(models),)),
        server=CandidateModels(models=models),
    )


@dataclass(frozen=True)
class ChooseModel(ClientHook):
    """Client hook of IFCA: picks the model with the lowest loss on the training data, and reports its number."""

    models: int
    sweeps = True

    def start(self, names: Sequence[str], seed: int) -> Tree:
        """Return a random number of a model for each user: models start equally good, and a user then keeps its own."""
        generators = [generator(seed, name, "ifca") for name in names]
        return {CHOICE: torch.cat([torch.randint(self.models, (1,), generator=each) for each in generators])}

    def receive(self, cohort: Cohort, models: Tree, senders: Sequence[str]) -> Tree:
        """Return the model that each user picks.

        Args:
            cohort: Users who are trained in one batch, with their tensors and state.
            models: All models, ``(users, models, *shape)``.
            senders: Not used.
        """
        choice, losses = cohort.kept[CHOICE], cohort.training_losses(models)
        # Among equally good models a user keeps its previous choice.
        choice.copy_(best_model(losses, choice.to(losses.device)))
        return {name: t[torch.arange(len(choice)), choice] for name, t in models.items()}

    def report(self, cohort: Cohort) -> Tree:
        """Return the number of each user's model."""
        return {CHOICE: cohort.kept[CHOICE]}

    @property
    def reports(self) -> Mapping[str, Reported]:
        """Number of a model, from 0."""
        return {CHOICE: Reported(most=self.models - 1, whole=True)}

    def shares(self, cohort: Cohort) -> Float[Tensor, "users models"]:
        """Return the choices in one-hot form."""
        return torch.nn.functional.one_hot(cohort.kept[CHOICE], self.models).double()


@dataclass(frozen=True, kw_only=True)
class CandidateModels(Mean):
    """Server of IFCA: averages each model over the users who picked it; other models are unchanged."""

    models: int
    clipped_mean = False
    first_download = True

    @property
    def server_models(self) -> int:
        """Number of models that users pick from."""
        return self.models

    def start(self, setup: ServerSetup) -> Tree:
        """Return the initial models."""
        return start_soup(setup.models)

    def aggregate(self, kept: Tree, received: Received) -> None:
        """Set each model that a participant picked to the weighted mean of its uploads.

        Args:
            kept: State of the server, with the models ``(models, *shape)``; changed in place.
            received: The uploads, with the index of the model that each participant picked.
        """
        models, choice = soup_of(kept), received.reports[CHOICE]
        weights = torch.nn.functional.one_hot(choice, self.models).double() * received.weights.unsqueeze(1)
        totals = weights.sum(0)  # of the participants who picked each model
        picked = totals > 0
        shares = weights[:, picked] / totals[picked]
        for name, means in mix(received.tensors, shares.T).items():
            models[name][picked] = means

    def download(self, kept: Tree, users: Sequence[int]) -> Tree:
        """Return all models for each user, expanded without copying."""
        return {name: t.unsqueeze(0).expand(len(users), *t.shape) for name, t in soup_of(kept).items()}

    def starts(self, kept: Tree, received: Received) -> Tree:
        """Return the model from which each participant trained, as it stood before the round: the one it reports."""
        return {name: t[received.reports[CHOICE].to(t.device)] for name, t in soup_of(kept).items()}


CHOICE = "choice"
"""Key of the number of a user's model."""


def best_model(losses: Float[Tensor, "users models"], before: Int[Tensor, " users"]) -> Int[Tensor, " users"]:
    """Return the index of the model with the lowest loss for each user.

    If several models have the lowest loss, a user keeps its current model if possible, else gets the first of them.

    Args:
        losses: Loss of each user under each model.
        before: Index of each user's current model.
    """
    is_best = losses == losses.min(1, keepdim=True).values
    is_current = torch.nn.functional.one_hot(before, losses.shape[1])
    preference = is_best * (1 + is_current)  # 2 for the current model if it is a best one, 1 for other best ones
    return preference.argmax(1)


def fedem(*, models: Models = 3) -> Method:
    """FedEM: M whole models; each sample has its own weights on them, and each user mixes their predictions.

    Source: Marfoq et al. 2021, "Federated Multi-Task Learning under a Mixture of Distributions", arXiv:2108.10252,
    Algorithm 2 (FedEM), eq. 7, 8 and 11.
    Shared: M models with their running statistics.  Local: the mixture pi, M numbers.  Frozen: nothing.
    Client: q_m(s) ~ pi_m exp(-loss_m(s)) for all training samples s under the downloaded models, then pi = mean_s q(s),
    then joint steps on sum_m q_m(s) loss_m(s) with q fixed.  Server: mean of each model over users.
    Differs from the paper: none known.  A user predicts sum_m pi_m p_m(y|x); for a regression, the mean of the outputs.

    Args:
        models: Number M of models that all users train and mix.
    """
    roles = frozenset({ADAPTOR})
    return Method(
        name="fedem",
        placement=Placement(
            shared=roles | {STATISTICS}, mixture=ClientMixture(clusters=models, of="models", at="samples")
        ),
        client=Client(phases=(Phase(roles=roles),), parts=(DivideSamples(),)),
        server=Mean(),
    )


class DivideSamples(ClientHook):
    """Computes the models' weights for each sample at the start of a round."""

    sweeps = True

    def begin(self, cohort: Cohort) -> None:
        """Compute the weights under the downloaded models."""
        cohort.divide_samples()
