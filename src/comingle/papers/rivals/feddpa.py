"""FedDPA: a global and a local LoRA, mixed by how near the text is to what the user has trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.methods.base import Method, Placement
from comingle.methods.client import Client, Part
from comingle.methods.cohort import ROUTERS, Cohort, Phase
from comingle.methods.server import Mean
from comingle.methods.settings import Count, Range
from comingle.models.lora import init_zero
from comingle.models.routers import Router
from comingle.utils.trees import ATTENTION, GENERALIST, ROUTER, SPECIALIST, Init, lora_pairs

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


class FromGlobal(Part):
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
class Similarity(Part):
    """Sets the routers so that the local LoRA's weight is ``scaling / S sum_s cos(x, x_s)`` over S instances."""

    scaling: float
    instances: int
    roles = ROUTERS
    language_only = True

    def settle(self, cohort: Cohort) -> None:
        """The mean of cosines is the product of x / |x| with the mean of unit vectors."""
        for name, mean in cohort.router_directions(self.instances).items():
            cohort.tensors[name][:, 0] = self.scaling * mean
