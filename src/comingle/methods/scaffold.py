"""SCAFFOLD: local steps corrected by the difference between a user's and the average control variate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.methods.base import MODEL, Client, ClientHook, Cohort, Method, Placement, joint
from comingle.methods.server import MODEL_PREFIX, Mean, Received, Reported, ServerSetup, model_of
from comingle.methods.settings import NotNegative
from comingle.utils.trees import Tree


def scaffold(*, server_rate: NotNegative = 1.0) -> Method:
    """SCAFFOLD: each step is corrected by ``-rate (c - c_i)``, so that users with different data do not drift apart.

    Source: Karimireddy et al. 2020, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
    arXiv:1910.06378, Algorithm 1 with option II; ``server_rate`` is its eta_g.
    Shared: attention, 2 averaged LoRA experts per MLP; a net with its statistics; the server's c comes with each
    download.  Local: c_i.  Frozen: a language model's base.
    Client: joint steps on training data, each followed by the correction; then ``c_i = c_i - c + (x - y_i) / sum of
    rates``.
    Server: ``x = x + eta_g (mean of y_i - x)`` and ``c = c + 1/N sum_i (new c_i - old c_i)`` over the round's
    users, N being the number of all users.
    Differs from the paper: users do not send the change of c_i, which halves the upload; the server computes it from
    y_i and from the sum of the user's learning rates, which is sent.  With plain descent at a constant rate all is as
    in the paper; with other optimisers the control variates are of steps, not gradients.  With compressed uploads, c
    follows the compressed y_i and c_i the exact one.  x is a mean by ``training.weighting``; ``evaluation.model:
    exchanged`` scores it, the default y_i.

    Args:
        server_rate: Size of the server's step towards the mean of the uploads; 1 takes the mean.
    """
    return Method(
        name="scaffold",
        placement=Placement(generalists=2, shared=MODEL),
        client=Client(phases=joint(routed=False), parts=(Controlled(),)),
        server=ControlledMean(rate=server_rate),
    )


OWN_CONTROL, DOWNLOADED_CONTROL, SUM_OF_RATES = "scaffold.own.", "scaffold.all.", "rates"
CONTROL, NUM_USERS = "control.", "users"


class Controlled(ClientHook):
    """Client hook of SCAFFOLD: keeps a user's control variate c_i and the last downloaded average c, corrects steps."""

    looks_back = True

    def start(self, names: Sequence[str], seed: int) -> Tree:
        """Return a zero sum of learning rates."""
        return {SUM_OF_RATES: torch.zeros(len(names), dtype=torch.float64)}

    def start_like(self, tensors: Tree) -> Tree:
        """Return the initial state of users: zeros for their control variate c_i and the downloaded average c.

        Args:
            tensors: Shared tensors before any training, ``(users, *shape)``, for their names and shapes.
        """
        return {
            prefix + name: torch.zeros_like(t)
            for prefix in (OWN_CONTROL, DOWNLOADED_CONTROL)
            for name, t in tensors.items()
        }

    def receive(self, cohort: Cohort, models: Tree, senders: Sequence[str]) -> Tree:
        """Store the downloaded c and return the model x, with which the user continues.

        Args:
            cohort: Users who are trained in one batch, with their tensors and state.
            models: Model and c, ``(users, 2, *shape)``.
            senders: Not used.
        """
        for name, t in models.items():
            cohort.kept[DOWNLOADED_CONTROL + name].copy_(t[:, 1])
        return {name: t[:, 0] for name, t in models.items()}

    def begin(self, cohort: Cohort) -> None:
        """Reset the sum of learning rates."""
        cohort.kept[SUM_OF_RATES].zero_()

    def stepped(self, cohort: Cohort, trained: Tree, rate: float) -> None:
        """Apply SCAFFOLD's correction after an optimiser step, ``-rate (c - c_i)``, and add up the learning rates.

        Args:
            cohort: Users who are trained in one batch, with their tensors and state.
            trained: Tensors that the step updated, changed in place.
            rate: Learning rate of the step.
        """
        for name, t in trained.items():
            t.sub_(cohort.kept[DOWNLOADED_CONTROL + name] - cohort.kept[OWN_CONTROL + name], alpha=rate)
        cohort.kept[SUM_OF_RATES] += rate

    def end(self, cohort: Cohort) -> None:
        """Set c_i to ``c_i - c + (x - y_i) / sum of rates``: the mean of the round's steps without their corrections.

        x is the model at the start of the round, y_i at its end.
        """
        for name in (n.removeprefix(OWN_CONTROL) for n in cohort.kept if n.startswith(OWN_CONTROL)):
            steps = mean_step(cohort.began[name], cohort.tensors[name], cohort.kept[SUM_OF_RATES])
            cohort.kept[OWN_CONTROL + name] += steps - cohort.kept[DOWNLOADED_CONTROL + name]

    def report(self, cohort: Cohort) -> Tree:
        """Return the sum of learning rates."""
        return {SUM_OF_RATES: cohort.kept[SUM_OF_RATES]}

    @property
    def reports(self) -> Mapping[str, Reported]:
        """A number of at least 0."""
        return {SUM_OF_RATES: Reported(most=1e9)}


def mean_step(before: Tensor, after: Tensor, rates: Float[Tensor, " users"]) -> Float[Tensor, "users ..."]:
    """Return each user's mean update per unit of learning rate, ``(x - y_i) / sum of rates``.

    With plain SGD that is the mean gradient of the user's steps. SCAFFOLD's control variates are such means.

    Args:
        before: Tensors x ``(users, *shape)`` at the start of the round.
        after: Tensors y ``(users, *shape)`` at the end of the round.
        rates: Sum of the learning rates of each user's steps.
    """
    # 1e-12 avoids 0 / 0 for a user who has taken no step.
    return (before - after) / rates.to(after).clamp(min=1e-12).view(-1, *[1] * (after.dim() - 1))


@dataclass(frozen=True, kw_only=True)
class ControlledMean(Mean):
    """Server of SCAFFOLD: keeps the average control variate c with the model x, and sends both."""

    rate: float
    kind = "stack"
    clipped_mean = False
    knows_starts = False
    one_rank = True  # columns above a user's rank are not trained, but would count as if they had moved

    def start(self, setup: ServerSetup) -> Tree:
        """Return the model, c = 0, and the number of users."""
        model = super().start(setup) | {NUM_USERS: torch.tensor(len(setup.users))}
        return model | {CONTROL + name: torch.zeros_like(t) for name, t in model_of(model).items()}

    def step(self, kept: Tree, sums: Tree, received: Received) -> None:
        """Update the average control variate, ``c = c + 1/N sum_i (s_i - c)``, then the model, ``x = x + eta (y - x)``.

        ``s_i = (x - y_i) / sum of rates`` is the mean local step of a participant i, s_i - c the change of its c_i, N
        the number of all users and y the mean upload. c is updated first, because s_i needs the x that users
        downloaded.

        Args:
            kept: State of the server: tensors by name, updated in place.
            sums: Mean upload y.
            received: The uploads y_i, with each user's sum of learning rates.
        """
        for name, mean in sums.items():
            model, control, sent = kept[MODEL_PREFIX + name], kept[CONTROL + name], received.tensors[name]
            steps = mean_step(model.expand_as(sent), sent, received.reports[SUM_OF_RATES])
            control += (steps - control).sum(0) / kept[NUM_USERS]
            model.lerp_(mean.to(model), self.rate)

    def download(self, kept: Tree, users: Sequence[int]) -> Tree:
        """Return the model and c, ``(users, 2, *shape)``."""
        both = {name: torch.stack([t, kept[CONTROL + name]]) for name, t in model_of(kept).items()}
        return {name: t.expand(len(users), *t.shape) for name, t in both.items()}
