"""A method as a file of ``comingle.methods`` would have it, which ``pytest -p`` loads before it collects the laws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from comingle.methods import register
from comingle.methods.base import MODEL, Client, Method, Placement, joint
from comingle.methods.server import MODEL_PREFIX, Mean, Received
from comingle.methods.settings import Range
from comingle.utils.trees import Tree


@dataclass(frozen=True, kw_only=True)
class PartWay(Mean):
    """Moves the model by a part of the way to the mean."""

    rate: float

    def step(self, kept: Tree, sums: Tree, received: Received) -> None:
        """``model += rate (mean - model)``."""
        for name, mean in sums.items():
            kept[MODEL_PREFIX + name].lerp_(mean, self.rate)


def toy(*, rate: Annotated[float, Range(least=0.0, most=1.0)] = 0.5) -> Method:
    """Toy: federated averaging whose server goes a part of the way.

    Source: none.  Shared: attention, 2 averaged LoRA experts per MLP; a net.  Local: nothing.  Frozen: the base.
    Client: joint steps on training data.  Server: a part of the way to the mean over users.
    """
    return Method(
        name="toy",
        placement=Placement(generalists=2, shared=MODEL),
        client=Client(phases=joint(routed=False)),
        server=PartWay(rate=rate),
    )


register("toy", toy)
