"""Gradient inversion: a user's input out of one upload of a net whose first layer is linear.

One step moves row i of that layer by ``-rate g_i x`` and its bias by ``-rate g_i``, so their ratio is the input x,
whatever the rate (Geiping et al. 2020, arXiv:2003.14053, Proposition 3.1). With several samples or steps the ratio is a
mean of inputs with weights of either sign; an optimiser with moments bends it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.audits.canaries import SERVER, Watched, published
from comingle.config import Recipe
from comingle.data.samples.samples import UserSamples
from comingle.reports.audit import Inversion
from comingle.runs.advise import shortened
from comingle.runs.session import build, execute
from comingle.training.client import Clients
from comingle.training.events import Observer
from comingle.training.kinds.base import Materials
from comingle.utils.errors import RunError
from comingle.utils.trees import Layout, Tree

Watch = Callable[[Clients], Sequence[Observer]]


def invert(recipe: Recipe, materials: Materials, watch: Watch) -> list[Inversion]:
    """What comes back of everybody's first sample out of a step on it alone, and of any out of an upload of the run's.

    Raises:
        RunError: the net's first layer is not linear with a bias, or not shared.
    """
    one = {"training.batch_size": 1, "training.local_epochs": 1}
    first = tuple(replace(user, train=user.train.first(1)) for user in materials.users)
    alone = replace(materials, users=first, common=replace(materials.common, users=first))
    whole = shortened(1) | {"evaluation.model": "exchanged"}
    return [
        _attack_net("one step on one sample", recipe.with_changes(whole | one), alone, watch),
        _attack_net("one round as the run has it", recipe.with_changes(whole), materials, watch),
    ]


def _attack_net(what: str, recipe: Recipe, materials: Materials, watch: Watch) -> Inversion:
    plain = build(recipe, materials, store="memory")
    names = first_layer(plain.clients.model.layout, plain.clients.method.shared)
    start = published(plain.server)
    found: dict[int, Tensor | None] = {}

    def look(who: str, users: Sequence[int], tensors: Tree) -> None:
        if who != SERVER:
            return
        for row, user in enumerate(users):
            weight, bias = ((tensors[name][row, 0] - start[name][user, 0]).double() for name in names)
            found[user] = ratio(weight, bias)

    federation = Watched(clients=plain.clients, server=plain.server, look=look)
    execute(federation, recipe, None, observers=watch(plain.clients))
    users: Sequence[UserSamples] = materials.users
    errors, guesses = [], []
    for number, inverted in found.items():
        inputs = users[number].train.inputs.flatten(1).double()
        if inverted is None or inverted.numel() != inputs.shape[1]:
            raise RunError(
                f"method {recipe.method.name}: the first linear layer does not read the inputs; no inversion"
            )
        errors.append(nearest(inverted, inputs))
        others = [user.test.inputs.flatten(1).double() for user in users]
        guesses.append(nearest(torch.cat(others).mean(0), inputs))
    return Inversion(what=what, errors=errors, guesses=guesses)


def first_layer(layout: Layout, shared: frozenset[str]) -> tuple[str, str]:
    """The names of the first layer's weight and bias.

    Raises:
        RunError: it is not linear, has no bias, or is not shared.
    """
    slots = {slot.name: slot for slot in layout.slots}
    weight = next((slot for slot in layout.slots if slot.name.endswith("weight")), None)
    bias = slots.get(weight.name.removesuffix("weight") + "bias") if weight is not None else None
    if weight is None or bias is None or len(weight.shape) != 2:
        raise RunError("the net's first layer is not linear with a bias; gradients are inverted there alone")
    if not all(all(slot.chosen(set(shared))) for slot in (weight, bias)):
        raise RunError("the net's first layer stays with its user, so there is no upload to invert")
    return weight.name, bias.name


def ratio(weight: Float[Tensor, "rows columns"], bias: Float[Tensor, " rows"]) -> Float[Tensor, " columns"] | None:
    """Of the row whose bias moved most; None where no bias moved."""
    row = int(bias.abs().argmax())
    return None if float(bias[row]) == 0 else weight[row] / bias[row]


def nearest(guess: Float[Tensor, " columns"], inputs: Float[Tensor, "samples columns"]) -> float:
    """``|guess - x| / |x|`` of the input that it is nearest to."""
    return float(((inputs - guess).norm(dim=1) / inputs.norm(dim=1).clamp(min=1e-12)).min())
