"""``runtime.users_per_step: auto``: before training, the largest pass that fits into what the device has free."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from comingle.config import Recipe
from comingle.costing.nets import rehearse_nets
from comingle.costing.passes import Rehearsal, memory
from comingle.costing.planning import rehearse_text
from comingle.costing.reading import as_long
from comingle.costing.summaries import NONE_FITS, smaller_pass, with_method
from comingle.data.populations import Crowd, names_of
from comingle.models.base import logger
from comingle.models.hardware import free_bytes
from comingle.training.kinds.base import Materials, kind_of
from comingle.training.settings import Portions
from comingle.utils.errors import RecipeError

FREE_SHARE = {"cuda": 0.9}
"""How much of a GPU's free memory is planned with: its allocator leaves gaps, which were never measured."""


def fit(recipe: Recipe, materials: Materials) -> Portions:
    """How many users, and sequences of each, go through the model at once: by default, or fewer where that is too much.

    Of several processes each asks for its own users. Base and data are loaded: what they take is not free any more.

    Raises:
        RecipeError: one sequence of one user is too much.
    """
    stage = _rehearsed(with_method(recipe, recipe.method.name), materials, recipe.training.participation)
    device = stage.steps.model.device
    here = stage.weights_bytes + stage.process_bytes + stage.data_bytes
    free = int(FREE_SHARE.get(device.type, 1.0) * free_bytes(device)) + here
    machine, chosen = memory(stage), stage.steps.portions
    if machine.total_bytes > free:
        smaller = smaller_pass(stage, machine, free)
        if smaller is None:
            needs = f"needs {machine.total_bytes / 1e9:,.2f} GB, {free / 1e9:,.2f} are free on {device}"
            raise RecipeError(f"runtime.users_per_step: auto: {needs}; {NONE_FITS}")
        chosen = smaller
    logger.info("users_per_step: auto: %d users with %d sequences or samples each", chosen.users, chosen.sequences)
    return chosen


def _rehearsed(recipe: Recipe, materials: Materials, participation: Any) -> Rehearsal:
    kind, users, everybody = kind_of(recipe), materials.present, names_of(materials.users)
    if kind.read_for_costs:
        return rehearse_nets(recipe, replace(materials.common, users=users), participation, everybody)
    (as_text,) = as_long(kind, [recipe], users) if isinstance(users, Crowd) else kind.as_text([recipe], len(users))[0]
    assert materials.base is not None
    return rehearse_text(as_text, materials.base, tuple(everybody), participation, materials.here)
