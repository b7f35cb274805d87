"""One recipe on two devices: what it ends with on each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from comingle.config import Recipe, parse_recipe
from comingle.runs.session import build, prepare
from comingle.training.backends.local import InProcess
from comingle.training.rounds import run_rounds


@dataclass(frozen=True, kw_only=True)
class Played:
    """Everybody's tensors before and after a run, on the CPU, and the mean training loss of each round."""

    start: Tensor
    rows: Tensor
    losses: list[float]
    federation: InProcess


def recipe_of(content: dict[str, Any], device: str, **changes: Any) -> Recipe:
    """Two rounds with optimisers that do not divide by what may be nearly zero, where rounding alone would decide."""
    smooth = {"training.rounds": 2, "training.experts.eps": 1e-4, "training.router.eps": 1e-4}
    return parse_recipe(content).with_changes(smooth | {"runtime.device": device} | changes)


def play(recipe: Recipe) -> Played:
    """The rounds of a run that writes nothing, evaluations included."""
    federation, events = build(recipe, prepare(recipe)), list[dict[str, Any]]()
    start = federation.clients.state.rows.cpu().clone()
    run_rounds(federation, observe=events.append)
    rows = federation.clients.state.rows
    assert rows.device.type == torch.device(recipe.runtime.device).type
    losses = [loss for e in events if e["event"] == "round" for loss in e["train_loss_nats"].values()]
    return Played(start=start, rows=rows.cpu(), losses=losses, federation=federation)


def apart(one: Played, other: Played) -> float:
    """How far two runs' tensors are from each other, as a fraction of how far training took them."""
    way = (one.rows - one.start).norm()
    difference = (one.rows - other.rows).norm()
    return float(difference / way) if way else float(difference)
