"""Clusters and mixtures of whole models: IFCA and FedEM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from comingle.methods.base import MODEL, Client, ClientHook, Cohort, Method, Phase, Placement, joint
from comingle.methods.fedmerge import mix, server_models_in, state_from_models
from comingle.methods.server import Mean, Received, Reported, ServerSetup
from comingle.methods.settings import Models
from comingle.models.routers import ClientMixture
from comingle.utils.seeds import generator
from comingle.utils.trees import ADAPTOR, STATISTICS, Tree


def ifca(*, models: Models = 5) -> Method:
    """IFCA: each user picks the one of k models with the lowest loss on its training data, and trains it.

    Source: Ghosh et al. 2020, "An Efficient Framework for Clustered Federated Learning", arXiv:2006.04088, Algorithm 1
    with model averaging.
    Shared: a whole net, with running statistics of its norm layers; on a language model attention and 1 LoRA expert per
    MLP.  Local: nothing.
    Frozen: a language model's base.
    Client: downloads all models, picks the one with the lowest loss on all of its training data, takes local steps on
    it, and uploads it with its index.
    Server: each model becomes the weighted mean of the uploads for it; a model that no participant picked is unchanged.
    Differs from the paper: means are weighted by ``training.weighting``.  Among equally good models a user keeps the
    one it has, at first a random one, because all LoRA give the same loss before training.

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
        """Return the index of a random model for each user, which it keeps as long as all models are equally good."""
        generators = [generator(seed, name, "ifca") for name in names]
        choices = [torch.randint(self.models, (1,), generator=each) for each in generators]
        return {CHOICE: torch.cat(choices)}

    def receive(self, cohort: Cohort, models: Tree, senders: Sequence[str]) -> Tree:
        """Return for each user the model with the lowest training loss, and store its index in ``cohort.kept``.

        Args:
            cohort: Users who are trained in one batch, with their tensors and state.
            models: All models, ``(users, models, *shape)``.
            senders: Not used.
        """
        choice = cohort.kept[CHOICE]  # the previous one, until it is replaced
        losses = cohort.training_losses(models)
        choice.copy_(best_model(losses, choice.to(losses.device)))
        users = torch.arange(len(choice))
        return {name: t[users, choice] for name, t in models.items()}

    def report(self, cohort: Cohort) -> Tree:
        """Return the index of the model that each user has picked."""
        return {CHOICE: cohort.kept[CHOICE]}

    @property
    def reports(self) -> Mapping[str, Reported]:
        """Specification of the report "choice", which the server checks: the index of a model."""
        return {CHOICE: Reported(most=self.models - 1, whole=True)}

    def shares(self, cohort: Cohort) -> Float[Tensor, "users models"]:
        """Return each user's weight on each model, for display: 1 for the model that it has picked, 0 for others."""
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
        """Return the server's initial state: all models, which differ."""
        return state_from_models(setup.models)

    def aggregate(self, kept: Tree, received: Received) -> None:
        """Set each model to the weighted mean over the participants who picked it; models without any stay unchanged.

        Args:
            kept: State of the server, with the models ``(models, *shape)``; changed in place.
            received: The uploads, with the index of the model that each participant picked.
        """
        models, choice = server_models_in(kept), received.reports[CHOICE]
        has_picked = torch.nn.functional.one_hot(choice, self.models).double()  # (users, models), of 0 and 1
        weights = has_picked * received.weights.unsqueeze(1)
        total_by_model = weights.sum(0)
        is_picked = total_by_model > 0
        shares = weights[:, is_picked] / total_by_model[is_picked]
        for name, means in mix(received.tensors, shares.T).items():
            models[name][is_picked] = means

    def download(self, kept: Tree, users: Sequence[int]) -> Tree:
        """Return all models for each user, expanded without copying."""
        return {name: t.unsqueeze(0).expand(len(users), *t.shape) for name, t in server_models_in(kept).items()}

    def starts(self, kept: Tree, received: Received) -> Tree:
        """Return the model that each participant picked, as it was before the participant trained it.

        Robust aggregation and step normalisation measure a participant's change from it.
        """
        choice = received.reports[CHOICE]
        return {name: models[choice.to(models.device)] for name, models in server_models_in(kept).items()}


CHOICE = "choice"
"""Key of the index of a user's model."""


def best_model(losses: Float[Tensor, "users models"], before: Int[Tensor, " users"]) -> Int[Tensor, " users"]:
    """Return the index of the model with the lowest loss for each user.

    If several models have the lowest loss, a user keeps its previous model if that is one of them, else it gets the
    first.

    Args:
        losses: Loss of each user under each model.
        before: Index of each user's previous model.
    """
    num_models = losses.shape[1]
    is_best = losses == losses.min(1, keepdim=True).values
    is_previous = torch.nn.functional.one_hot(before, num_models)
    preference = is_best * (1 + is_previous)  # 2 for the previous model if it is best, 1 for other best ones, else 0
    return preference.argmax(1)


def fedem(*, models: Models = 3) -> Method:
    """FedEM: all users train M whole models, with a weight for each sample and model, and mix their predictions.

    Source: Marfoq et al. 2021, "Federated Multi-Task Learning under a Mixture of Distributions", arXiv:2108.10252,
    Algorithm 2 (FedEM), eq. 7, 8 and 11.
    Shared: M models with their running statistics.  Local: the mixture pi, M numbers.  Frozen: nothing.
    Client: computes weights q_m(s) ~ pi_m exp(-loss_m(s)) of each training sample s under the downloaded models m, and
    pi = mean_s q(s).  Then local steps on sum_m q_m(s) loss_m(s) with q fixed.
    Server: mean of each model over users.
    Differs from the paper: no difference is known.  A user predicts sum_m pi_m p_m(y|x), in a regression the mean of
    the models' outputs with the weights pi.

    Args:
        models: Number M of models that all users train and mix.
    """
    components = frozenset({ADAPTOR})  # this role is also that of whole models which users mix
    mixture = ClientMixture(clusters=models, of="models", at="samples")
    return Method(
        name="fedem",
        placement=Placement(shared=components | {STATISTICS}, mixture=mixture),
        client=Client(phases=(Phase(roles=components),), parts=(DivideSamples(),)),
        server=Mean(),
    )


class DivideSamples(ClientHook):
    """Client hook of FedEM: gives each training sample its own weights on the models, at the start of a round."""

    sweeps = True

    def begin(self, cohort: Cohort) -> None:
        """Weigh the downloaded models for each training sample by its losses under them, before local steps (FedEM).

        Args:
            cohort: Users who are trained in one batch, with their tensors and state.
        """
        cohort.divide_samples()
