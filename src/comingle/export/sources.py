"""What a user's model is made of: which form of it is exact, and what stands in that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from comingle.export.networks import Routing, why_not_sparse
from comingle.models import routing
from comingle.models.adapted import AdaptedModel
from comingle.models.floral_language import MixedLanguageModel
from comingle.models.lora import base_weight
from comingle.models.merging import Change, averaged, changes_of_adapted, changes_of_mixed, why_not_merged
from comingle.models.personal import About
from comingle.utils.trees import Tree


@dataclass(frozen=True, kw_only=True)
class Source:
    """A user's model, as :class:`comingle.models.personal.PersonalModel` has it.

    ``logits`` are what it says of tokens.
    """

    name: str
    model: AdaptedModel | MixedLanguageModel
    tensors: Tree
    row: int
    about: About | None
    logits: Callable[[Int[Tensor, "batch n"]], Float[Tensor, "batch n vocab"]]


def why_not_plain(source: Source) -> str:
    """Why no weights of the base can hold the model; empty where they can."""
    model = source.model
    return why_not_merged(model, source.row) if isinstance(model, AdaptedModel) else ""


def is_mixture(source: Source) -> bool:
    """Whether experts are mixed behind a nonlinearity."""
    return bool(why_not_plain(source))


def instead(source: Source) -> str:
    """The format to take for a mixture."""
    exact = not why_not_sparse(source.model.base.model.config) and not unlike_any(source)
    return f"--format {'transformers is exact' if exact else 'merged-approximately measures what a plain model loses'}"


def unlike_any(source: Source) -> str:
    """How experts are mixed, where no architecture mixes them so; empty where one does."""
    mlps = source.model.adapters.experts.values() if isinstance(source.model, AdaptedModel) else ()
    if any(mlp.mix == "linear" for mlp in mlps):
        return "mixed inside every linear"
    return next((str(mlp.router.gating) for mlp in mlps if mlp.router.gating is not None), "")


def changes_of(source: Source) -> list[Change]:
    """One for each adapted linear, every expert in full."""
    if isinstance(source.model, AdaptedModel):
        return changes_of_adapted(source.model, source.tensors, source.row)
    return changes_of_mixed(source.model, source.tensors)


def plain_changes(source: Source) -> list[Change]:
    """The same of a model that the base's weights can hold."""
    return averaged(changes_of(source))


def routing_of(source: Source) -> Routing:
    """The routers of the experts that the user has; zeros where they are averaged."""
    model = source.model
    assert isinstance(model, AdaptedModel)
    present, found = model.adapters.present[source.row], []
    for name, mlp in model.adapters.experts.items():
        weight = source.tensors.get(f"{name}.router")
        width = base_weight(mlp.first["up"])[0].shape[1]
        found.append(torch.zeros(int(present.sum()), width) if weight is None else weight[0].cpu()[present])
    top_k = next(iter(model.adapters.experts.values())).router.top_k
    experts = len(found[0])
    return Routing(top_k=min(top_k, experts) if routing.routed(model.adapters) else experts, gates=found)
