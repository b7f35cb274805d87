"""A global and a local LoRA per user: FedIT, FedLoRA, FDLoRA, FedDPA and SDFLoRA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.methods.base import ROUTERS, Client, ClientHook, Cohort, Method, Phase, Placement, joint
from comingle.methods.heterogeneous_ranks import Redistribute
from comingle.methods.server import MODEL_PREFIX, Mean, Received, ServerSetup
from comingle.methods.settings import BelowOne, Count, NotNegative, Range
from comingle.methods.single_factor import NewOptimisers
from comingle.models.lora import init_zero
from comingle.models.routers import Router
from comingle.utils.trees import ATTENTION, GENERALIST, ROUTER, SPECIALIST, Init, Tree, lora_pairs

SHARED = frozenset({ATTENTION, GENERALIST})


def fedit() -> Method:
    """FedIT: federated averaging of one LoRA.

    Source: Zhang et al. 2024, "Towards Building the FederatedGPT: Federated Instruction Tuning", arXiv:2305.05644; in
    FedMerge (Chen et al. 2025, arXiv:2504.06768), Table 5.
    Shared: attention, 1 expert per MLP.  Local: nothing.  Frozen: the base.
    Client: joint steps on training text.  Server: mean of A and of B over users.
    Differs from the paper: LoRA is where ``adapters`` says, on attention and MLP; the paper adapts attention alone.
    """
    return Method(
        name="fedit",
        placement=Placement(shared=SHARED),
        client=Client(phases=(Phase(roles=SHARED),)),
        server=Mean(),
    )


def fedlora() -> Method:
    """FedLoRA: a small adapter that all share, beside a model of each user's own.

    Source: Yi et al. 2023, "FedLoRA: Model-Heterogeneous Personalized Federated Learning with LoRA Tuning",
    arXiv:2310.13283; in FedMerge (Chen et al. 2025, arXiv:2504.06768), Table 5.
    Shared: attention, 1 expert per MLP.  Local: 1 expert per MLP, averaged with the shared one.  Frozen: the base.
    Client: joint steps on training text.  Server: mean over users.
    Differs from the paper: there each user has a whole model of its own, of any architecture, and model and adapter
    are trained in turns.  Over one frozen language model, where FedMerge compares it without saying how, what is a
    user's own is an expert, and both are trained together.
    """
    return Method(
        name="fedlora",
        placement=Placement(specialists=1, shared=SHARED),
        client=Client(phases=joint(routed=False)),
        server=Mean(),
    )


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
class Fuse(ClientHook):
    """For each user the weights of (global, personal) with the lowest validation loss that ``steps`` tries find."""

    steps: int
    language_only = True
    validates = True

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


GLOBAL = frozenset({ATTENTION, GENERALIST})


def feddpa(
    *, scaling: Annotated[float, Range(least=0, most=1)] = 0.5, instances: Count = 5, afterwards: bool = False
) -> Method:
    """FedDPA: a global LoRA that is averaged and a local one of each user, weighed by similarity when they are used.

    Source: Yang et al. 2024, "Dual-Personalizing Adapter for Federated Foundation Models", NeurIPS 2024,
    arXiv:2403.19211, and its public code (Lydia-yang/FedDPA), whose defaults these are.
    Shared: attention, 1 LoRA expert per MLP.  Local: 1 LoRA expert per MLP; for each MLP the mean direction of
    ``instances`` training prompts (a router that nothing trains).  Frozen: the base.
    Client: FedDPA-T, a step on the local LoRA, with the frozen global one at one half each; a step on the global LoRA
    alone.  With ``afterwards`` FedDPA-F: rounds train the global LoRA, and at each evaluation and at the end a local
    round trains the local one, from the global, which is then forgotten.
    When they are used, the local LoRA's weight is ``scaling`` times the mean cosine of the text's hidden state with
    those at the end of ``instances`` training prompts; the global one has the rest.  Server: mean over users.
    Differs from the paper: the weight is computed at every token, from the hidden state there, in which the text so far
    is: at the end of a prompt that is the paper's instance, and nothing that follows can leak into a prediction, as it
    would from a whole window where no prompt is. It is computed in each MLP from what that reads, where the public code
    has one from the last layer's states under the local LoRA; a negative cosine counts as 0.  Instances are read with
    both LoRA at one half, of FedDPA-F with the global one; in plain text they are random windows.  Both LoRA are
    experts of a whole MLP whose outputs are mixed (in the linears with ``adapters: {mix: linear}``, as in the paper),
    and attention has a global one alone.  Steps on the two alternate from the first round on, where the code trains the
    local LoRA first, for all of its epochs, from the second round on.  The public code was at hand, which has nothing
    of FedDPA-F but how it is used, and of the paper its abstract and introduction.  ``adapters.top_k`` is not read.
    """
    own = Phase(roles=frozenset({SPECIALIST}), without=ROUTERS, label="local")
    everybodys = Phase(roles=GLOBAL, without=frozenset({SPECIALIST, ROUTER}))
    similarity = Similarity(scaling, instances)
    client = Client(phases=(own, everybodys), parts=(similarity,))
    if afterwards:
        client = Client(phases=(everybodys,), tuning=(own,), finetunes=True, parts=(FromGlobal(), similarity))
    return Method(
        name="feddpa",
        placement=Placement(specialists=1, routed=True, gating=Near(), shared=GLOBAL),
        client=client,
        server=Mean(),
    )


@dataclass(frozen=True)
class Near:
    """Weighs by how near what a router reads is to directions that it holds."""

    def __str__(self) -> str:
        return "weighed by similarity"

    def start(self, experts: int, rank: int, width: int) -> tuple[int, Init]:
        """The first expert has what the others leave, and no direction of its own; without any it has all."""
        return experts - 1, init_zero

    def __call__(
        self, router: Router, products: Float[Tensor, "users n others"], x: Float[Tensor, "users n width"]
    ) -> Float[Tensor, "users n experts"]:
        """``p_j = (phi x)_j / |x|`` of each expert but the first, between 0 and 1; the first has what they leave of 1.

        With ``phi_j`` the mean of unit vectors that is the mean cosine of x with them. Where the others would come to
        more than 1 they share it.
        """
        length = x.to(products.dtype).norm(dim=-1, keepdim=True).clamp(min=torch.finfo(products.dtype).tiny)
        others = (products / length).clamp(0, 1) * router.present[:, None, 1:]
        others = others / others.sum(-1, keepdim=True).clamp(min=1)
        return torch.cat([1 - others.sum(-1, keepdim=True), others], -1)


class FromGlobal(ClientHook):
    """The local LoRA is the global one until it is trained."""

    language_only = True

    def begin(self, cohort: Cohort) -> None:
        """What it is trained from."""
        for _, *factors in lora_pairs(cohort.tensors):
            for t in factors:
                if t.dim() == 4:  # an MLP's, which has both
                    t[:, 1] = t[:, 0]

    settle = begin


@dataclass(frozen=True)
class Similarity(ClientHook):
    """Sets the routers so that the local LoRA's weight is ``scaling / S sum_s cos(x, x_s)`` over S instances."""

    scaling: float
    instances: int
    roles = ROUTERS
    language_only = True

    def settle(self, cohort: Cohort) -> None:
        """The mean of cosines is the product of x / |x| with the mean of unit vectors."""
        for name, mean in cohort.router_directions(self.instances).items():
            cohort.tensors[name][:, 0] = self.scaling * mean


def sdflora() -> Method:
    """SDFLoRA: each user has a shared LoRA, stacked and compressed to its rank by the server, and a private one.

    Source: Shen et al. 2026, "SDFLoRA: Selective Decoupled Federated LoRA for Privacy-preserving Fine-tuning with
    Heterogeneous Clients", arXiv:2601.11219 (second version), and its public code.  Ranks are ``adapters.rank``.
    Shared: attention, 1 LoRA expert per MLP.  Local: 1 LoRA expert per MLP.  Frozen: the base.
    Client: joint steps on both on training text, with a new optimiser each round, as shared factors are others then.
    Server: the stack of the shared factors, whose product is ``sum_u p_u s_u B_u A_u``, cut to each user's rank by its
    singular values; privacy's noise (``mechanism: local``) reaches the shared LoRA alone.
    Differs from the paper: both LoRA are experts of a whole MLP whose outputs are averaged (in the linears with
    ``adapters: {mix: linear}``), in the place of a learnt weighted sum in each linear; the attention has a shared LoRA
    alone; both LoRA have one rank.  The paper's abstract and code were at hand, not its equations.
    """
    return Method(
        name="sdflora",
        placement=Placement(specialists=1, shared=frozenset({ATTENTION, GENERALIST})),
        client=Client(phases=joint(routed=False), parts=(NewOptimisers(),)),
        server=Redistribute(),
    )
