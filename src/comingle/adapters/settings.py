"""What a recipe says of adapters, as the inside has it.

Recipes take their defaults from here, and are read without torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from comingle.routers.settings import Balance

RANK = 8
"""Of everybody's experts."""


@dataclass(frozen=True, kw_only=True)
class Targets:
    """Names of the linears to adapt, relative to a decoder layer.

    ``mlp`` is the module that a routed MLP replaces; empty where the layer itself holds the MLP's linears (OPT). Then
    the mixture takes the place of ``up`` and the activation and ``down`` become identities. ``activation`` names a
    transformers activation; None reads it from the model's configuration.
    """

    attention: tuple[str, ...]
    up: str
    down: str
    gate: str | None = None
    mlp: str = ""
    activation: str | None = None

    def named(self) -> Iterator[tuple[str, str]]:
        """Key and name of each linear."""
        yield from (("attention", name) for name in self.attention)
        yield from ((key, name) for key in ("up", "down", "gate") if (name := getattr(self, key)))

    @property
    def names(self) -> set[str]:
        """All linears named."""
        return {name for _, name in self.named()}


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """Shape of the adapters: LoRA rank and alpha, top-k of the router, how experts are mixed, load balancing.

    ``rank`` is one number for all users or one per user; a user with a smaller rank than another is padded and masked.
    """

    rank: int | tuple[int, ...] = RANK
    alpha: float = 16.0
    top_k: int = 2
    mix: Literal["output", "linear"] = "output"
    balance: Balance = "generalist"
    targets: Targets | None = None
