"""A global and a local LoRA per user: FedIT, FedLoRA, FDLoRA, FedDPA and SDFLoRA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.methods.base import ROUTERS, Client, ClientHook, Cohort, Method, Phase, Placement, joint
from comingle.methods.heterogeneous_ranks import Redistribute
from comingle.methods.partial_sharing import NewOptimisers
from comingle.methods.server import MODEL_PREFIX, Mean, Received, ServerSetup
from comingle.methods.settings import BelowOne, Count, NotNegative, Range
from comingle.models.lora import init_zero
from comingle.models.routers import Router
from comingle.utils.trees import ATTENTION, GENERALIST, ROUTER, SPECIALIST, Init, Tree, lora_pairs

SHARED = frozenset({ATTENTION, GENERALIST})
"""Roles of a LoRA that all users share."""


def fedit() -> Method:
    """FedIT: federated averaging of one LoRA.

    Source: Zhang et al. 2024, "Towards Building the FederatedGPT: Federated Instruction Tuning", arXiv:2305.05644; in
    FedMerge (Chen et al. 2025, arXiv:2504.06768), Table 5.
    Shared: attention, 1 expert per MLP.  Local: nothing.  Frozen: the base.
    Client: local steps on training text.  Server: mean of A and of B over users.
    Differs from the paper: LoRA is where ``adapters`` puts it, on attention and MLP; the paper adapts attention alone.
    """
    return Method(
        name="fedit",
        placement=Placement(shared=SHARED),
        client=Client(phases=(Phase(roles=SHARED),)),
        server=Mean(),
    )


def fedlora() -> Method:
    """FedLoRA: a LoRA that all users share, and a local one for each user, trained together.

    Source: Yi et al. 2023, "FedLoRA: Model-Heterogeneous Personalized Federated Learning with LoRA Tuning",
    arXiv:2310.13283; in FedMerge (Chen et al. 2025, arXiv:2504.06768), Table 5.
    Shared: attention, 1 expert per MLP.  Local: 1 expert per MLP, averaged with the shared one.  Frozen: the base.
    Client: local steps on training text.  Server: mean over users.
    Differs from the paper: in the paper each user has a whole model, of any architecture, and trains it in turns with a
    shared adapter.  Here, as in FedMerge's comparison, all have the same frozen language model, and the local part is a
    LoRA expert.
    """
    return Method(
        name="fedlora",
        placement=Placement(specialists=1, shared=SHARED),
        client=Client(phases=joint(routed=False)),
        server=Mean(),
    )


def fdlora(*, outer_rate: NotNegative = 0.7, outer_momentum: BelowOne = 0.9, fusion_steps: Count = 30) -> Method:
    """FDLoRA: each user trains a global LoRA, which the server averages, and a personal one; at the end it fuses both.

    Source: Qi et al. 2024, "FDLoRA: Personalized Federated Learning of Large Language Model via Dual LoRA Tuning",
    arXiv:2406.07925; a baseline in CoMiGS (Fan et al. 2025, arXiv:2409.13931), section 4.2.
    Shared: the global LoRA (attention, 1 expert per MLP).  Local: the personal LoRA, of the same shapes.  Frozen: the
    base.
    Client: local steps on training text, which train both LoRA together.  After the last round a user's LoRA becomes
    ``a * global + b * personal``; Nelder-Mead searches the a and b with the lowest validation loss.
    Server: a step with Nesterov momentum towards the mean over users; with rate 1 and momentum 0 the mean itself.
    Differs from the paper: both LoRA start equal and are trained on the same batches, where the paper trains one after
    the other.  The server's default settings are those of DiLoCo (Douillard et al. 2023).  The search has no penalty on
    a and b.  Before the last round users are evaluated with the personal LoRA.

    Args:
        outer_rate: Learning rate of the server's outer steps.
        outer_momentum: Nesterov momentum of the server's outer steps, from 0 to below 1.
        fusion_steps: Evaluations of the validation text in the search for a user's two fusion weights.
    """
    return Method(
        name="fdlora",
        placement=Placement(shared=SHARED, copies=2),  # the global and the personal LoRA
        client=Client(phases=joint(routed=False), parts=(Fuse(steps=fusion_steps),)),
        server=OuterSteps(rate=outer_rate, momentum=outer_momentum),
    )


@dataclass(frozen=True, kw_only=True)
class OuterSteps(Mean):
    """Server that moves its model theta towards the mean upload by steps with Nesterov momentum."""

    rate: float
    momentum: float

    def start(self, setup: ServerSetup) -> Tree:
        """Return the initial global model, and for each tensor the velocity of Nesterov momentum, at first zero."""
        model = super().start(setup)
        velocities = {f"{name}.velocity": torch.zeros_like(t) for name, t in model.items()}
        return {**model, **velocities}

    def step(self, kept: Tree, sums: Tree, received: Received) -> None:
        """Take one Nesterov step, ``v = m v + g`` and ``theta = theta - rate (g + m v)``.

        The gradient g is the model theta minus the mean upload, v the velocity and m the momentum.

        Args:
            kept: State of the server: tensors by name, updated in place.
            sums: Mean upload.
            received: The uploads, not used.
        """
        for name, mean_upload in sums.items():
            theta, velocity = kept[MODEL_PREFIX + name], kept[f"{MODEL_PREFIX}{name}.velocity"]
            gradient = theta - mean_upload
            velocity.mul_(self.momentum).add_(gradient)
            theta.sub_(gradient + self.momentum * velocity, alpha=self.rate)

    def download(self, kept: Tree, users: Sequence[int]) -> Tree:
        """Return the global model for each user, without the momentum that the server also has in its state.

        Args:
            kept: State of the server: the model's tensors, and for each of them the velocity of its momentum.
            users: Numbers of the users who download.
        """
        without_velocity = {name: t for name, t in kept.items() if not name.endswith(".velocity")}
        return super().download(without_velocity, users)


@dataclass(frozen=True)
class Fuse(ClientHook):
    """Client hook of FDLoRA: at the end it replaces each user's two models by a weighted sum of them.

    ``steps`` is the number of evaluations in the search for the weights.
    """

    steps: int
    language_only = True
    validates = True

    def finish(self, cohort: Cohort) -> Float[Tensor, "users columns"]:
        """Return for each user the weighted sum of its two models that has the lowest validation loss found."""
        models = cohort.copies()  # (2, users, columns): each user's global model and its personal model
        num_users = models.shape[1]

        def best_fusion(user: int) -> Float[Tensor, " columns"]:
            """Search the best weights of one user, given by its index, and return its fused model."""
            global_and_personal = models[:, user]

            def fuse(weights: Float[Tensor, " copies"]) -> Float[Tensor, " columns"]:
                """Return the weighted sum of the user's two models."""
                return torch.tensordot(weights.to(models), global_and_personal, dims=1)

            def validation_loss(weights: Float[Tensor, " copies"]) -> float:
                """Return the validation loss of the user's fused model."""
                return cohort.validate(fuse(weights), user)

            best_weights = minimise_loss(validation_loss, self.steps)
            return fuse(best_weights)

        return torch.stack([best_fusion(user) for user in range(num_users)])


def minimise_loss(loss: Callable[[Float[Tensor, " copies"]], float], steps: int) -> Float[Tensor, " copies"]:
    """Return the weights of a user's global and personal model with the lowest loss that Nelder-Mead finds.

    The search starts at (1, 0), (0, 1) and (0.7, 0.7), so the result is never worse than one model alone.

    Args:
        loss: Returns the loss of a pair of weights.
        steps: Largest number of evaluations of ``loss``; at least the 3 starting points are evaluated.
    """
    from scipy.optimize import minimize

    def loss_of_array(weights: Any) -> float:
        """Call ``loss`` with the NumPy array of weights that SciPy passes."""
        return loss(torch.tensor(weights))

    starting_points = [(1.0, 0.0), (0.0, 1.0), (0.7, 0.7)]
    options = {"initial_simplex": starting_points, "maxfev": max(steps, len(starting_points))}
    minimum = minimize(loss_of_array, starting_points[0], method="Nelder-Mead", options=options)
    return torch.tensor(minimum.x)


def feddpa(
    *, scaling: Annotated[float, Range(least=0, most=1)] = 0.5, instances: Count = 5, afterwards: bool = False
) -> Method:
    """FedDPA: a global LoRA that is averaged and a local one for each user, weighted by similarity at inference.

    Source: Yang et al. 2024, "Dual-Personalizing Adapter for Federated Foundation Models", NeurIPS 2024,
    arXiv:2403.19211, and its public code (Lydia-yang/FedDPA), whose defaults these are.
    Shared: the global LoRA: attention, 1 expert per MLP.  Local: the local LoRA, 1 expert per MLP; an untrained router
    with the mean direction of ``instances`` training prompts in each MLP.  Frozen: the base.
    Client: FedDPA-T by default, which takes a step on the local LoRA, in a model that averages both LoRA, and then one
    on the global LoRA alone.  With ``afterwards`` FedDPA-F: rounds train the global LoRA; before each evaluation, and
    at the end, a local round trains a copy of it as the local LoRA.  At inference the local LoRA's weight is
    ``scaling`` times the mean cosine between a token's hidden state and those at the ends of the prompts; the global
    LoRA has the rest.
    Server: mean over users.
    Differs from the paper: each token has its own weight, where the paper has one for each text; so no later token
    can leak into a prediction.  The weight is computed in each MLP from its input; the public code computes one from
    the last layer under the local LoRA.  A negative cosine counts as 0.  The prompts' hidden states are computed with
    the mean of both LoRA, for FedDPA-F with the global one.  In text without prompts, random windows take their place.
    Both LoRA are experts of a whole MLP whose outputs are mixed; ``adapters: {mix: linear}`` mixes in each linear, as
    in the paper.  Attention has a global LoRA only.  Steps on the two LoRA alternate from the first round on; the code
    trains the local LoRA first, for all of its epochs, from the second round on.  ``adapters.top_k`` is ignored.  We
    had the public code, which covers only the use of FedDPA-F, and the paper's abstract and introduction.

    Args:
        scaling: Largest weight of the local LoRA, from 0 to 1: that of texts most similar to the training text.
        instances: Training prompts (or windows of text without prompts) with which a text is compared.
        afterwards: Train the local LoRA after the last round, starting from the global one (FedDPA-F), instead of in
            each round (FedDPA-T).
    """
    # Without its router a model averages its experts, here the local and the global LoRA.
    local_phase = Phase(roles=frozenset({SPECIALIST}), without=ROUTERS, label="local")
    global_phase = Phase(roles=SHARED, without=frozenset({SPECIALIST, ROUTER}))
    similarity = Similarity(scaling, instances)
    if afterwards:  # FedDPA-F
        client = Client(phases=(global_phase,), tuning=(local_phase,), finetunes=True, parts=(FromGlobal(), similarity))
    else:  # FedDPA-T
        client = Client(phases=(local_phase, global_phase), parts=(similarity,))
    return Method(
        name="feddpa",
        placement=Placement(specialists=1, routed=True, gating=SimilarityGating(), shared=SHARED),
        client=client,
        server=Mean(),
    )


@dataclass(frozen=True)
class SimilarityGating:
    """Gating that weighs experts by the similarity of the router's input to stored directions."""

    def __str__(self) -> str:
        """Return how experts are weighted, to complete an error message "its experts are ..."."""
        return "weighted by similarity"

    def start(self, experts: int, rank: int, width: int) -> tuple[int, Init]:
        """Return the number of rows of an MLP's router tensor ``(rows, width)``, and its initialiser.

        Each expert but the first has one row: a direction, at first zero.

        Args:
            experts: Number of experts.
            rank: LoRA rank, not used.
            width: Width of the router's input, not used.
        """
        return experts - 1, init_zero

    def __call__(
        self, router: Router, products: Float[Tensor, "users n directions"], x: Float[Tensor, "users n width"]
    ) -> Float[Tensor, "users n experts"]:
        """Return the experts' weights ``phi_j x / |x|``, clamped to [0, 1]; the first expert has the rest.

        ``phi_j`` is the direction of expert j, a row of the router. Weights that sum to more than 1 are divided by
        their sum.

        Args:
            router: The router; ``present`` ``(users, experts)`` is 1 for the experts that a user has, else 0.
            products: Products ``phi_j x`` for n tokens of each user and all experts j but the first.
            x: Inputs of the MLP.
        """
        smallest = torch.finfo(products.dtype).tiny  # avoids a division by 0
        length = x.to(products.dtype).norm(dim=-1, keepdim=True).clamp(min=smallest)
        cosines = (products / length).clamp(0, 1)
        is_present = router.present[:, None, 1:]  # (users, 1, directions): the first expert has no direction
        weights = cosines * is_present
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1)
        first_weight = 1 - weights.sum(-1, keepdim=True)
        return torch.cat([first_weight, weights], -1)


class FromGlobal(ClientHook):
    """Client hook of FedDPA-F: initialises the local LoRA with the global one."""

    language_only = True

    def begin(self, cohort: Cohort) -> None:
        """Copy the downloaded global LoRA, the first expert of each MLP, to the local one, the second expert.

        Runs before the local steps, so that each round trains the local LoRA from the newest global one.
        """
        for _name, a, b in lora_pairs(cohort.tensors):
            for factor in (a, b):
                belongs_to_mlp = factor.dim() == 4  # (users, experts, rank, width); attention has no local LoRA
                if belongs_to_mlp:
                    global_lora = factor[:, 0]
                    factor[:, 1] = global_lora

    settle = begin  # for users who are scored without a local round


@dataclass(frozen=True)
class Similarity(ClientHook):
    """Client hook of FedDPA: gives the local LoRA a larger weight for tokens that are similar to training prompts.

    For a token with the input x the weight is ``scaling / S sum_s cos(x, x_s)``, where x_s are the inputs at the ends
    of S training prompts.
    """

    scaling: float
    instances: int
    roles = ROUTERS
    language_only = True

    def settle(self, cohort: Cohort) -> None:
        """Compute the users' routers from their training prompts, before models are scored; no optimiser trains them.

        A router mixes a global and a local LoRA. It has a single row, ``scaling / S sum_s x_s / |x_s|`` with its inputs
        x_s at the ends of S prompts. For a token with the input x the weight of the local LoRA is the product of the
        row with ``x / |x|``: large if the token is similar to the prompts.

        Args:
            cohort: The users, with their tensors, which are changed in place.
        """
        for name, mean_direction in cohort.router_directions(self.instances).items():
            router = cohort.tensors[name]  # (users, 1, width)
            router[:, 0] = self.scaling * mean_direction


def sdflora() -> Method:
    """SDFLoRA: each user has a private LoRA, and a shared one that the server stacks and compresses to the user's rank.

    Source: Shen et al. 2026, "SDFLoRA: Selective Decoupled Federated LoRA for Privacy-preserving Fine-tuning with
    Heterogeneous Clients", arXiv:2601.11219 (second version), and its public code.  Ranks are ``adapters.rank``.
    Shared: attention, 1 LoRA expert per MLP.  Local: 1 LoRA expert per MLP.  Frozen: the base.
    Client: local steps on training text, which train both LoRA together, with a new optimiser each round, as the shared
    factors change.
    Server: an SVD of the users' mean change ``sum_u p_u s_u B_u A_u``, with aggregation weight p_u and LoRA scale s_u,
    truncated to each user's rank.  Privacy noise (``mechanism: local``) reaches the shared LoRA only.
    Differs from the paper: both LoRA are experts of a whole MLP whose outputs are averaged (in each linear with
    ``adapters: {mix: linear}``), where the paper learns weights for them in each linear.  Attention has a shared LoRA
    only.  Both LoRA have the same rank.  Written from the public code and the abstract.
    """
    return Method(
        name="sdflora",
        placement=Placement(specialists=1, shared=SHARED),
        client=Client(phases=joint(routed=False), parts=(NewOptimisers(),)),
        server=Redistribute(),
    )
