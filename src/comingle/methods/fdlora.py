"""FDLoRA: a global and a personal LoRA for each user, fused at the end."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.adapters.inject import ATTENTION, GENERALIST
from comingle.methods.base import Beginning, Context, Finish, Method, Server, Validate
from comingle.methods.clients import joint
from comingle.methods.servers import mean
from comingle.trees import Tree


def fdlora(*, outer_rate: float = 0.7, outer_momentum: float = 0.9, fusion_steps: int = 30) -> Method:
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
        generalists=1,
        shared=frozenset({ATTENTION, GENERALIST}),
        phases=joint(routed=False),
        copies=2,
        server=outer_steps(outer_rate, outer_momentum),
        memory=_outer_memory,
        finish=fuse(fusion_steps),
        validates=True,
    )


def outer_steps(rate: float, momentum: float) -> Server:
    """``v = m v + g;  theta = theta - rate (g + m v)``, g = theta minus the mean upload (Nesterov's form)."""

    def step(uploads: Tree, context: Context) -> Tree:
        downloads = {}
        for name, average in mean(uploads, context).items():
            theta, velocity = context.memory[name], context.memory[f"{name}.velocity"]
            change = theta - average[:1]
            velocity.mul_(momentum).add_(change)
            theta.sub_(change + momentum * velocity, alpha=rate)
            downloads[name] = theta.expand_as(average)
        return downloads

    return step


def _outer_memory(beginning: Beginning) -> Tree:
    """The global model, and its velocity."""
    start = {name: t[:1].clone() for name, t in beginning.starts.items()}
    return start | {f"{name}.velocity": torch.zeros_like(t) for name, t in start.items()}


def fuse(steps: int) -> Finish:
    """For each user the weights of (global, personal) with the lowest validation loss that ``steps`` tries find."""

    def finish(copies: Float[Tensor, "copies users columns"], validate: Validate) -> Float[Tensor, "users columns"]:
        def best(user: int) -> Float[Tensor, " columns"]:
            def fused(weights: Float[Tensor, " copies"]) -> Float[Tensor, " columns"]:
                return torch.tensordot(weights.to(copies), copies[:, user], dims=1)

            return fused(lowest(lambda weights: validate(fused(weights), user), steps))

        return torch.stack([best(user) for user in range(copies.shape[1])])

    return finish


def lowest(loss: Callable[[Float[Tensor, " copies"]], float], steps: int) -> Float[Tensor, " copies"]:
    """Nelder-Mead from (1, 0), (0, 1) and (0.7, 0.7), so never worse than either copy alone."""
    from scipy.optimize import minimize

    corners = [(1.0, 0.0), (0.0, 1.0), (0.7, 0.7)]
    options = {"initial_simplex": corners, "maxfev": max(steps, len(corners))}
    found = minimize(lambda w: loss(torch.tensor(w)), corners[0], method="Nelder-Mead", options=options)
    return torch.tensor(found.x)
