"""FDLoRA: a global and a personal LoRA for each user, fused at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.methods.base import Method, Placement
from comingle.methods.client import Client, Part, joint
from comingle.methods.cohort import Cohort
from comingle.methods.server import MODEL_PREFIX, Mean, Received, ServerSetup
from comingle.methods.settings import BelowOne, Count, NotNegative
from comingle.utils.trees import ATTENTION, GENERALIST, Tree


def fdlora(*, outer_rate: NotNegative = 0.7, outer_momentum: BelowOne = 0.9, fusion_steps: Count = 30) -> Method:
    """FDLoRA: a global LoRA that is averaged and a personal one that is not, fused at the end on validation text.

    Source: Qi et al. 2024, "FDLoRA: Personalized Federated Learning of Large Language Model via Dual LoRA Tuning",
    arXiv:2406.07925; in CoMiGS (Fan et al. 2025, arXiv:2409.13931), 4.2.
    Shared: attention and 1 LoRA expert per MLP of the global copy.  Local: the personal copy.  Frozen: the base.
    Client: inner steps on training text, on both copies; at the end w_global * global + w_personal * personal, with
    ``fusion_steps`` gradient-free (Nelder-Mead) evaluations of each user's validation text.
    Server: outer steps with Nesterov momentum on the users' mean change; with rate 1 and momentum 0 that is the mean.
    Differs from the paper: both copies start equal and are trained from the first round on the same batches, instead of
    one after the other; the outer optimiser's settings are those of DiLoCo (Douillard et al. 2023); the search has no
    penalty on the weights.  Before the end a user is evaluated with its personal copy; the end is behind the last
    exchange whatever ``evaluation.model`` says.  Attention has 2 sets too, so more parameters are trained than by the
    other methods.
    """
    return Method(
        name="fdlora",
        placement=Placement(shared=frozenset({ATTENTION, GENERALIST}), copies=2),
        client=Client(phases=joint(routed=False), parts=(Fuse(fusion_steps),)),
        server=OuterSteps(rate=outer_rate, momentum=outer_momentum),
    )


@dataclass(frozen=True, kw_only=True)
class OuterSteps(Mean):
    """``v = m v + g;  theta = theta - rate (g + m v)``, g = theta minus the mean upload (Nesterov's form)."""

    rate: float
    momentum: float

    def start(self, setup: ServerSetup) -> Tree:
        """The global model, and its velocity."""
        model = super().start(setup)
        return model | {f"{name}.velocity": torch.zeros_like(t) for name, t in model.items()}

    def step(self, kept: Tree, sums: Tree, received: Received) -> None:
        """One outer step."""
        for name, average in sums.items():
            theta, velocity = kept[MODEL_PREFIX + name], kept[f"{MODEL_PREFIX}{name}.velocity"]
            change = theta - average
            velocity.mul_(self.momentum).add_(change)
            theta.sub_(change + self.momentum * velocity, alpha=self.rate)

    def download(self, kept: Tree, users: Sequence[int]) -> Tree:
        """The global model."""
        return super().download({name: t for name, t in kept.items() if not name.endswith(".velocity")}, users)


@dataclass(frozen=True)
class Fuse(Part):
    """For each user the weights of (global, personal) with the lowest validation loss that ``steps`` tries find."""

    steps: int
    language_only = True
    validates = True
    finishes = True

    def finish(self, cohort: Cohort) -> Float[Tensor, "users columns"]:
        """The fused models."""
        copies = cohort.copies()

        def best(user: int) -> Float[Tensor, " columns"]:
            def fused(weights: Float[Tensor, " copies"]) -> Float[Tensor, " columns"]:
                return torch.tensordot(weights.to(copies), copies[:, user], dims=1)

            return fused(lowest(lambda weights: cohort.validate(fused(weights), user), self.steps))

        return torch.stack([best(user) for user in range(copies.shape[1])])


def lowest(loss: Callable[[Float[Tensor, " copies"]], float], steps: int) -> Float[Tensor, " copies"]:
    """Nelder-Mead from (1, 0), (0, 1) and (0.7, 0.7), so never worse than either copy alone."""
    from scipy.optimize import minimize

    corners = [(1.0, 0.0), (0.0, 1.0), (0.7, 0.7)]
    options = {"initial_simplex": corners, "maxfev": max(steps, len(corners))}
    minimum = minimize(lambda w: loss(torch.tensor(w)), corners[0], method="Nelder-Mead", options=options)
    return torch.tensor(minimum.x)
