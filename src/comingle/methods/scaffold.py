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
    """SCAFFOLD: FedAvg whose local steps are corrected, so that users with different data do not drift apart.

    Source: Karimireddy et al. 2020, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
    arXiv:1910.06378, Algorithm 1 with option II; ``server_rate`` is its eta_g.
    Shared: attention, 2 averaged LoRA experts per MLP; a whole net, with running statistics of its norm layers; the
    server's c comes with each download.  Local: c_i.  Frozen: a language model's base.
    Client: local steps on training data from the model x to y_i, each corrected by ``-rate (c - c_i)`` with the control
    variates c of all users and c_i of the user.  Then ``c_i = c_i - c + (x - y_i) / sum of rates``.
    Server: ``x = x + server_rate (mean of y_i - x)`` and ``c = c + 1/N sum_i (new c_i - old c_i)`` over the round's
    participants i, of N users in all.
    Differs from the paper: users upload the sum of their learning rates instead of the change of c_i, which the server
    computes from that sum and y_i.  With plain descent at a constant rate all is as in the paper; with other optimisers
    the control variates are means of steps, not of gradients.  With compressed uploads, c follows the compressed y_i
    and c_i the exact one.  The mean of y_i is weighted by ``training.weighting``.  Users are evaluated with y_i, or
    with x if ``evaluation.model`` is ``exchanged``.

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
    """Client hook of SCAFFOLD: corrects each step by ``-rate (c - c_i)``.

    c_i is the user's own control variate, c the mean of all users', which is downloaded.
    """

    looks_back = True

    def start(self, names: Sequence[str], seed: int) -> Tree:
        """Return the hook's initial state: for each user a sum of learning rates, 0 before any step."""
        return {SUM_OF_RATES: torch.zeros(len(names), dtype=torch.float64)}

    def start_like(self, tensors: Tree) -> Tree:
        """Return the initial control variates of each user, its own c_i and the downloaded mean c: all zero.

        Args:
            tensors: Shared tensors ``(users, *shape)``; the control variates have the same shapes.
        """
        own = {OWN_CONTROL + name: torch.zeros_like(t) for name, t in tensors.items()}
        downloaded = {DOWNLOADED_CONTROL + name: torch.zeros_like(t) for name, t in tensors.items()}
        return {**own, **downloaded}

    def receive(self, cohort: Cohort, models: Tree, senders: Sequence[str]) -> Tree:
        """Store the downloaded c, with which steps are corrected, and return the model x to continue with.

        c is the mean of all users' control variates.

        Args:
            cohort: Users who are trained in one batch, with their tensors and state.
            models: Model and c, ``(users, 2, *shape)``.
            senders: Not used.
        """
        downloaded_model = {}
        for name, model_and_control in models.items():
            downloaded_model[name] = model_and_control[:, 0]
            cohort.kept[DOWNLOADED_CONTROL + name].copy_(model_and_control[:, 1])
        return downloaded_model

    def begin(self, cohort: Cohort) -> None:
        """Reset the sum of learning rates to 0, for the local steps of a new round."""
        cohort.kept[SUM_OF_RATES].zero_()

    def stepped(self, cohort: Cohort, trained: Tree, rate: float) -> None:
        """Correct an optimiser step by ``-rate (c - c_i)``, and add its learning rate to the round's sum.

        c_i is the user's control variate, an estimate of its mean gradient, and c the mean of all users' control
        variates, which the user has downloaded. The sum of rates is uploaded; the server divides by it to get the
        user's mean step.

        Args:
            cohort: Users who are trained in one batch, with their tensors and state.
            trained: Tensors that the step updated, changed in place.
            rate: Learning rate of the step.
        """
        for name, t in trained.items():
            c, c_i = cohort.kept[DOWNLOADED_CONTROL + name], cohort.kept[OWN_CONTROL + name]
            t.sub_(c - c_i, alpha=rate)
        cohort.kept[SUM_OF_RATES] += rate

    def end(self, cohort: Cohort) -> None:
        """Update the user's control variate after the local steps: ``c_i = c_i - c + (x - y_i) / sum of rates``.

        c is the downloaded mean of all users' control variates, x the model at the start of the round, and y_i the
        trained one. This is option II of SCAFFOLD's Algorithm 1.
        """
        for key, c_i in cohort.kept.items():
            if not key.startswith(OWN_CONTROL):
                continue
            name = key.removeprefix(OWN_CONTROL)
            c = cohort.kept[DOWNLOADED_CONTROL + name]
            x, y_i = cohort.began[name], cohort.tensors[name]
            c_i += mean_step(x, y_i, cohort.kept[SUM_OF_RATES]) - c

    def report(self, cohort: Cohort) -> Tree:
        """Return the sum of the learning rates of each user's steps in the round."""
        return {SUM_OF_RATES: cohort.kept[SUM_OF_RATES]}

    @property
    def reports(self) -> Mapping[str, Reported]:
        """Specification of the report "rates", which the server checks: a sum of learning rates, at least 0."""
        return {SUM_OF_RATES: Reported(most=1e9)}


def mean_step(before: Tensor, after: Tensor, rates: Float[Tensor, " users"]) -> Float[Tensor, "users ..."]:
    """Return each user's change in a round, ``(x - y_i) / sum of rates``: with plain SGD the mean of its gradients.

    Args:
        before: Tensors x ``(users, *shape)`` at the start of the round.
        after: Tensors y_i ``(users, *shape)`` at the end of the round.
        rates: Sum of the learning rates of each user's steps.
    """
    sum_of_rates = rates.to(after).clamp(min=1e-12)  # avoids 0 / 0 for a user who has taken no step
    return (before - after) / sum_of_rates.view(-1, *[1] * (after.dim() - 1))


@dataclass(frozen=True, kw_only=True)
class ControlledMean(Mean):
    """Server of SCAFFOLD: keeps the model x and c, the mean of the users' control variates, and sends both."""

    rate: float
    kind = "stack"
    clipped_mean = False
    knows_starts = False
    one_rank = True  # columns above a user's rank are not trained, but would count as if they had moved

    def start(self, setup: ServerSetup) -> Tree:
        """Return the initial state: the model x, the control variate c = 0 for each of its tensors, and N.

        c is the mean of the users' control variates, N the number of all users, by which :meth:`step` divides.

        Args:
            setup: The users, and their initial models.
        """
        state = super().start(setup)
        controls = {CONTROL + name: torch.zeros_like(t) for name, t in model_of(state).items()}
        return {**state, NUM_USERS: torch.tensor(len(setup.users)), **controls}

    def step(self, kept: Tree, sums: Tree, received: Received) -> None:
        """Set c to ``c + 1/N sum_i (s_i - c)``, then the model x to ``x + rate (y - x)``.

        ``s_i = (x - y_i) / sum of rates`` is the mean local step of participant i, N the number of all users.

        Args:
            kept: State of the server: tensors by name, updated in place.
            sums: Mean upload y.
            received: The uploads y_i, with each user's sum of learning rates.
        """
        N = kept[NUM_USERS]
        for name, y in sums.items():
            x, c, y_i = kept[MODEL_PREFIX + name], kept[CONTROL + name], received.tensors[name]
            s_i = mean_step(x.expand_as(y_i), y_i, received.reports[SUM_OF_RATES])
            c += (s_i - c).sum(0) / N
            x.lerp_(y.to(x), self.rate)

    def download(self, kept: Tree, users: Sequence[int]) -> Tree:
        """Return the model and c, the mean control variate, for each user: the same for all, ``(users, 2, *shape)``."""
        download = {}
        for name, x in model_of(kept).items():
            model_and_control = torch.stack([x, kept[CONTROL + name]])
            download[name] = model_and_control.expand(len(users), *model_and_control.shape)
        return download
