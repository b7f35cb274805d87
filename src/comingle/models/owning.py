"""A user's adapters put into the weights of a plain base, outside of the federation."""

from __future__ import annotations

import copy

from comingle.adapters import watching
from comingle.models.adapted import AdaptedModel
from comingle.models.changes import averaged, changes_of_adapted
from comingle.models.pretrained import PreTrainedModel
from comingle.utils.trees import Tree


def why_not_merged(model: AdaptedModel, row: int) -> str:
    """Why no weights can hold the model of user ``row``; empty where they can: one expert, or all mixed per linear."""
    experts = int(model.adapters.present[row].sum())
    mlps = model.adapters.experts.values()
    if experts == 1:
        return ""
    if watching.routed(model.adapters):
        return f"{experts} experts are chosen token by token"
    if any(mlp.mix == "output" for mlp in mlps):
        return f"{experts} experts are averaged after the MLP's nonlinearity"
    return ""


def merge_adapters(model: AdaptedModel, tensors: Tree, row: int) -> PreTrainedModel:
    """A copy of the base with ``W + s sum_j p_j B_j A_j`` for every adapted weight W.

    Only where :func:`why_not_merged` knows no reason. p is uniform over the user's experts.
    """
    merged = copy.deepcopy(model.base.model)
    for change in averaged(changes_of_adapted(model, tensors, row)):
        change.add_to(merged.get_parameter(f"{change.name}.weight"))
    return merged
