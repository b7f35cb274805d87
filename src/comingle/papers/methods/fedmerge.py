"""FedMerge: a soup of models on the server, from which everybody gets one merged model of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from comingle.methods.base import Method, Placement
from comingle.methods.client import MODEL, Client, Part, joint
from comingle.methods.cohort import Cohort
from comingle.methods.settings import Count, Models, NotNegative, Range
from comingle.papers.methods.pruning import Keys
from comingle.papers.methods.soup_server import Merge
from comingle.utils.errors import RecipeError
from comingle.utils.trees import Tree


def fedmerge(
    *,
    models: Models = 5,
    softmax: bool = True,
    column_normalize: bool = True,
    models_first: bool = True,
    inner_product_keys: Keys = "head",
    inner_product_share: Annotated[float, Range(least=0, most=1, above=True)] = 1.0,
    weight_step: NotNegative = 0.01,
    global_rate: NotNegative = 1.0,
    global_iterations: Count = 1,
    proximal: NotNegative = 0.0,
) -> Method:
    """FedMerge: d models and everybody's merging weights live on the server; one merged model travels each way.

    Source: Chen et al. 2025, "FedMerge: Federated Personalization via Model Merging", arXiv:2504.06768, Algorithm 1.
    Shared: the net with its statistics; on a language model attention and 1 LoRA expert per MLP.  Local: nothing.
    Frozen: a language model's base.
    Client: joint steps on the merged model, as in FedAvg; ``proximal`` times |theta - theta_i|^2 is added to the loss.
    Server: the models by eq. 5 and 8, then the weights by eq. 6 and 9 (before the models without ``models_first``),
    their largest entry by ``weight_step``; with ``softmax`` the weights are that of logits (appendix D).  Inner
    products are over the last layer ("head", the public code's pruning; all of LoRA, which has none) or other keys, and
    over a share of each update's largest numbers there (section 3 names pruning, and not how).
    Differs from the paper: with eq. 5 the models would move d times less than "the global model is replaced" says, so
    what moves a model is a mean over its users, as in the public code (``column_normalize``; false is eq. 5); weights
    below zero (without ``softmax``) count there with their magnitude.  A model of which nobody present has a part stays
    as it is.  That code moves weights first; its ``proximal`` is 0.01.  The search for the step is in closed form.
    Users' shares in eq. 5 and 6 are ``training.weighting``, one setting for all methods that a recipe compares: equal
    by default, the paper's n_i / n with ``samples`` (or ``tokens``), as the published recipes say.
    """

    return Method(
        name="fedmerge",
        placement=Placement(shared=MODEL),
        client=Client(
            phases=joint(routed=False), parts=(Proximal(proximal),) if proximal else (), drops_nonfinite=True
        ),
        server=Merge(
            models=models,
            softmax=softmax,
            column_normalize=column_normalize,
            models_first=models_first,
            keys=inner_product_keys,
            share=inner_product_share,
            weight_step=weight_step,
            global_rate=global_rate,
            global_iterations=global_iterations,
        ),
    )


def fedmerge_fixed(
    *,
    models: Models = 15,
    chosen: Models = 5,
    weights: Literal["even", "random"] = "even",
    global_rate: NotNegative = 1.0,
) -> Method:
    """FedMerge with frozen merging weights: each user merges some models, drawn at random, in equal or random parts.

    Source: Chen et al. 2025 (FedMerge, arXiv:2504.06768), Table 4, "Fixed (``chosen`` / ``models``)".
    Shared: as by ``fedmerge``.  Local: nothing.  Frozen: a language model's base.
    Client: as by ``fedmerge``.  Server: the models alone move.
    Differs from the paper: none known; Table 4's caption has even weights, the text below it random ones, of no named
    distribution: ours are uniform on the simplex.
    """
    if chosen > models:
        raise RecipeError(f"method fedmerge-fixed: chosen is {chosen} of {models} models; allowed: 1 to {models}")

    server = Merge(models=models, weight_step=0.0, global_rate=global_rate, chosen=chosen, random=weights == "random")
    return replace(fedmerge(), name="fedmerge-fixed", server=server)


@dataclass(frozen=True)
class Proximal(Part):
    """Adds ``weight |theta - theta_0|^2`` to the objective, theta_0 what the user began the round with."""

    weight: float
    looks_back = True

    def correct(self, cohort: Cohort, gradients: Tree) -> None:
        """Its gradient, ``2 weight (theta - theta_0)``."""
        now, before = cohort.tensors, cohort.began
        for name, gradient in gradients.items():
            gradients[name] = gradient + 2 * self.weight * (now[name] - before[name])
