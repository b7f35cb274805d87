"""What outputs for samples are worth beside their targets: one number a sample, by a loss that has a name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from comingle.utils.errors import PluginError, RecipeError
from comingle.utils.registry import Registry

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""Losses ``(n,)`` of outputs ``(n, outputs)`` and targets: class numbers ``(n,)`` or real numbers ``(n, d)``."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss and its name; of ``classes``, outputs are logits and targets class numbers, so there is an accuracy."""

    name: str
    function: LossFunction
    classes: bool
    paired: bool = False
    """Whether it takes an output for each class, or for each number of a target."""

    def __call__(self, outputs: Float[Tensor, "*batch outputs"], targets: Tensor) -> Float[Tensor, "*batch"]:
        """Loss of every sample.

        Raises:
            RecipeError: the function gave something else than one number a sample.
        """
        batch = outputs.shape[:-1]
        losses: Any = self.function(outputs.flatten(0, -2), targets.flatten(0, len(batch) - 1))
        count = batch.numel()
        got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        if got != (count,):
            hint = "; use reduction='none'" if got == () else ""
            raise RecipeError(f"loss {self.name!r}: got {got} for {count} samples; allowed: one loss for each{hint}")
        return losses.view(batch)


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def _mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """``torch.nn.MSELoss``'s mean over the outputs.

    FLoRAL's text has half the sum of squares (appendix G.1), its code and its reference numbers this.
    """
    return (outputs - targets).square().mean(-1)


def _of_outputs(name: str, loss: Callable[..., Tensor]) -> Loss:
    def mean(outputs: Tensor, targets: Tensor) -> Tensor:
        return loss(outputs, targets, reduction="none").mean(-1)

    return Loss(name=name, function=mean, classes=False, paired=True)


CROSS_ENTROPY = Loss(name="cross_entropy", function=_cross_entropy, classes=True, paired=True)
"""In nats."""
MSE = Loss(name="mse", function=_mse, classes=False, paired=True)

_OWN: Mapping[str, Any] = {
    "cross_entropy": CROSS_ENTROPY,
    "mse": MSE,
    "l1": _of_outputs("l1", F.l1_loss),
    "smooth_l1": _of_outputs("smooth_l1", F.smooth_l1_loss),
    "bce": _of_outputs("bce", F.binary_cross_entropy_with_logits),
}

LOSSES: Registry[Any] = Registry("comingle.losses", _OWN)
"""By name: a :class:`Loss`, or a function of outputs and targets; real ones are means over the outputs of a sample."""


def find_loss(named: str | Loss | LossFunction, *, classes: bool) -> Loss:
    """A loss by name, or made of a function, of which ``classes`` says whether targets are class numbers.

    Raises:
        RecipeError: no such loss.
        PluginError: a plug-in's is no function.
    """
    found: Any = named
    if isinstance(named, str):
        if named not in LOSSES:
            raise RecipeError(f"no loss {named!r}.{LOSSES.hint(named)} Allowed: {', '.join(LOSSES)}")
        found = LOSSES[named]
    if isinstance(found, Loss):
        return found
    name = named if isinstance(named, str) else getattr(named, "__name__", type(named).__name__)
    if not callable(found):
        raise PluginError(f"loss {name!r}: got {type(found).__name__}; allowed: a function of outputs and targets")
    function: Any = found
    return Loss(name=name, function=function, classes=classes)


@dataclass(frozen=True, kw_only=True)
class SampleScore:
    """A user's mean loss over ``samples`` samples, in nats for classes; accuracy is in [0, 1], None for a regression.

    Both are NaN without samples.
    """

    mean_loss: float
    accuracy: float | None
    samples: int

    expert_scores = ()
    """There are no experts."""

    @property
    def measures(self) -> dict[str, float]:
        """What is reported; the first is what models are compared by."""
        return (
            {"loss": self.mean_loss} if self.accuracy is None else {"accuracy": self.accuracy, "loss": self.mean_loss}
        )
