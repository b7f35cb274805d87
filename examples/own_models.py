"""Keep several models on the server: each user trains the one that fits its data best (IFCA)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

import comingle
from comingle.methods.base import MODEL, Client, ClientHook, Cohort, Method, Placement, joint
from comingle.methods.server import Mean, Received, Reported, ServerSetup, weighted_sums
from comingle.utils.trees import Tree

CHOICE = "choice"


@dataclass(frozen=True)
class Choose(ClientHook):
    """Choose the model with the lowest training loss, and report its number."""

    models: int
    sweeps = True  # request the losses of several models on all training data

    def start(self, names: Sequence[str], seed: int) -> Tree:
        """Begin with different models: before training all have the same loss."""
        return {CHOICE: torch.tensor([sum(name.encode()) % self.models for name in names])}

    def receive(self, cohort: Cohort, models: Tree, senders: Sequence[str]) -> Tree:
        """Return the chosen model of each user; among equally good ones the current one.

        Args:
            cohort: The users.
            models: Downloaded models, ``(users, models, *shape)``.
            senders: Not used.
        """
        choice, losses = cohort.kept[CHOICE], cohort.training_losses(models).cpu()
        users = torch.arange(len(choice))
        best, current = losses.argmin(1), choice.cpu()
        choice.copy_(torch.where(losses[users, current] <= losses[users, best], current, best))
        return {name: t[users, choice] for name, t in models.items()}

    def report(self, cohort: Cohort) -> Tree:
        """Return the number of each user's model."""
        return {CHOICE: cohort.kept[CHOICE]}

    @property
    def reports(self) -> Mapping[str, Reported]:
        """Numbers from 0."""
        return {CHOICE: Reported(most=self.models - 1, whole=True)}


@dataclass(frozen=True, kw_only=True)
class Candidates(Mean):
    """Server with several models, each the mean of the users who chose it."""

    models: int
    clipped_mean = False  # the weights of the mean depend on the reports
    first_download = True  # users choose before the first round

    @property
    def server_models(self) -> int:
        """Number of models."""
        return self.models

    def start(self, setup: ServerSetup) -> Tree:
        """Keep the initial models, ``(models, *shape)``."""
        return {name: t.clone() for name, t in setup.models.items()}

    def aggregate(self, kept: Tree, received: Received) -> None:
        """Replace each model that was chosen by the mean of its uploads."""
        for number in range(self.models):
            weights = received.weights * (received.reports[CHOICE] == number)
            if weights.sum() > 0:
                uploads, share = received.tensors, weights / weights.sum()
                for name, mean in weighted_sums(uploads, dict.fromkeys(uploads, share)).items():
                    kept[name][number] = mean

    def download(self, kept: Tree, users: Sequence[int]) -> Tree:
        """Return all models for each user, ``(users, models, *shape)``."""
        return {name: t.expand(len(users), *t.shape) for name, t in kept.items()}

    def starts(self, kept: Tree, received: Received) -> Tree:
        """Return the model that each participant trained from."""
        return {name: t[received.reports[CHOICE].to(t.device)] for name, t in kept.items()}


def chosen(*, models: int = 2) -> Method:
    """Make the method; the keyword argument with a default is its setting."""
    return Method(
        name="chosen",
        placement=Placement(shared=MODEL),
        client=Client(phases=joint(routed=False), parts=(Choose(models),)),
        server=Candidates(models=models),
    )


if __name__ == "__main__":
    step = {"ada": 1, "ben": 1, "cem": 7, "dan": 7}  # two groups
    texts = {n: [f"{i}, {i + s}, {i + 2 * s}, {i + 3 * s}" for i in range(90)] for n, s in step.items()}
    training = {"rounds": 4, "local_steps": 8, "batch_size": 4, "context": 32, "experts": {"learning_rate": 0.02}}
    recipe = {"base": "random:llama?layers=1&dim=32", "training": training}
    print(comingle.compare(recipe, ["fedavg", chosen], seeds=[0], users=texts))
