"""SCAFFOLD: steps corrected by what everybody's steps are on average, and by what one's own are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.methods.base import MODEL, Client, ClientHook, Cohort, Method, Placement, joint
from comingle.methods.server import MODEL_PREFIX as KEPT
from comingle.methods.server import Mean, Received, Reported, ServerSetup, model_of
from comingle.methods.settings import NotNegative
from comingle.utils.trees import Tree


def scaffold(*, server_rate: NotNegative = 1.0) -> Method:
    """SCAFFOLD: each step is moved by ``-rate (c - c_i)``, so that users with other data do not drift apart.

    Source: Karimireddy et al. 2020, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
    arXiv:1910.06378, Algorithm 1 with option II; ``server_rate`` is its eta_g.
    Shared: attention, 2 averaged LoRA experts per MLP; a net with its statistics; the server's c comes with each
    download.  Local: c_i.  Frozen: a language model's base.
    Client: joint steps on training data, each followed by that; then ``c_i = c_i - c + (x - y_i) / sum of rates``.
    Server: ``x = x + eta_g (mean of y_i - x)`` and ``c = c + 1/N sum_i (c_i's change)`` over the round's users.
    Differs from the paper: users send their rates' sum, of which and y_i the server computes the change of c_i: half
    the upload.  With plain descent at a constant rate all is as in the paper; of other optimisers the step is what is
    controlled.  Of compressed uploads c has what was sent, c_i what was meant.  x is a mean by ``training.weighting``;
    ``evaluation.model: exchanged`` scores it, the default y_i.
    """
    return Method(
        name="scaffold",
        placement=Placement(generalists=2, shared=MODEL),
        client=Client(phases=joint(routed=False), parts=(Controlled(),)),
        server=ControlledMean(rate=server_rate),
    )


OWN, ALL, RATES = "scaffold.own.", "scaffold.all.", "rates"
CONTROL, USERS = "control.", "users"


class Controlled(ClientHook):
    """A user's c_i, and the server's c as it was received."""

    looks_back = True

    def start(self, names: Sequence[str], seed: int) -> Tree:
        """The sum of a round's learning rates."""
        return {RATES: torch.zeros(len(names), dtype=torch.float64)}

    def start_like(self, tensors: Tree) -> Tree:
        """Both are zero at first."""
        return {kind + name: torch.zeros_like(t) for kind in (OWN, ALL) for name, t in tensors.items()}

    def receive(self, cohort: Cohort, models: Tree, senders: Sequence[str]) -> Tree:
        """The model; c is kept."""
        for name, t in models.items():
            cohort.kept[ALL + name].copy_(t[:, 1])
        return {name: t[:, 0] for name, t in models.items()}

    def begin(self, cohort: Cohort) -> None:
        """No step has been taken."""
        cohort.kept[RATES].zero_()

    def stepped(self, cohort: Cohort, trained: Tree, rate: float) -> None:
        """The step's correction."""
        for name, t in trained.items():
            t.sub_(cohort.kept[ALL + name] - cohort.kept[OWN + name], alpha=rate)
        cohort.kept[RATES] += rate

    def end(self, cohort: Cohort) -> None:
        """The next c_i: the mean of the steps that were taken, without their corrections."""
        for name in (n.removeprefix(OWN) for n in cohort.kept if n.startswith(OWN)):
            steps = mean_step(cohort.began[name], cohort.tensors[name], cohort.kept[RATES])
            cohort.kept[OWN + name] += steps - cohort.kept[ALL + name]

    def report(self, cohort: Cohort) -> Tree:
        """The sum of the learning rates."""
        return {RATES: cohort.kept[RATES]}

    @property
    def reports(self) -> Mapping[str, Reported]:
        """No less than 0."""
        return {RATES: Reported(most=1e9)}


def mean_step(before: Tensor, after: Tensor, rates: Float[Tensor, " users"]) -> Float[Tensor, "users ..."]:
    """``(x - y_i) / sum of rates`` of tensors ``(users, *shape)``."""
    return (before - after) / rates.to(after).clamp(min=1e-12).view(-1, *[1] * (after.dim() - 1))


@dataclass(frozen=True, kw_only=True)
class ControlledMean(Mean):
    """Keeps c beside the model, and hands out both."""

    rate: float
    kind = "stack"
    clipped_mean = False
    knows_starts = False
    one_rank = True  # what is beyond a user's rank has not moved, and would count as if it had

    def start(self, setup: ServerSetup) -> Tree:
        """The model, c = 0, and how many users there are."""
        model = super().start(setup) | {USERS: torch.tensor(len(setup.users))}
        return model | {CONTROL + name: torch.zeros_like(t) for name, t in model_of(model).items()}

    def step(self, kept: Tree, sums: Tree, received: Received) -> None:
        """Of both; c first, out of the model as users had received it."""
        for name, mean in sums.items():
            model, control, sent = kept[KEPT + name], kept[CONTROL + name], received.tensors[name]
            steps = mean_step(model.expand_as(sent), sent, received.reports[RATES])
            control += (steps - control).sum(0) / kept[USERS]
            model.lerp_(mean.to(model), self.rate)

    def download(self, kept: Tree, users: Sequence[int]) -> Tree:
        """The model and c."""
        both = {name: torch.stack([t, kept[CONTROL + name]]) for name, t in model_of(kept).items()}
        return {name: t.expand(len(users), *t.shape) for name, t in both.items()}
