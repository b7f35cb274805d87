"""Users with samples, and what they have in common: the loss, the shapes, the net."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from comingle.data.samples import UserSamples
from comingle.models.scoring import Loss, find_loss

Augment = Callable[[Sequence[int], Tensor, torch.Generator], Tensor]
"""Changes train inputs ``(users, batch, ...)`` of the given users at random."""

MakeNet = Callable[..., nn.Module]
"""A net of no arguments, or of the shape of one input and the number of outputs."""


@dataclass(frozen=True, kw_only=True)
class Population:
    """Everybody; ``classes`` is the number of the net's outputs: classes, or dimensions of a regression's target."""

    users: Sequence[UserSamples]
    loss: str | Loss
    classes: int
    input_shape: tuple[int, ...]
    net: str | MakeNet
    """Trained where the recipe names none: of the registry, or what a program makes."""
    labels: tuple[str, ...] = ()
    """Names of the classes, where they have some."""

    @property
    def measure(self) -> Loss:
        """The loss itself."""
        return self.loss if isinstance(self.loss, Loss) else find_loss(self.loss, classes=False)

    @property
    def augmentation(self) -> Augment | None:
        """What changes train inputs at random."""
        return None
