"""What a recipe says of routers, as the inside has it."""

from __future__ import annotations

from typing import Any, Literal, Protocol, runtime_checkable


@runtime_checkable
class Gating(Protocol):
    """A method's own way of weighing experts, of all of a model's routers alike; ``str`` says it in words."""

    def start(self, experts: int, rank: int, width: int) -> tuple[int, Any]:
        """How many rows, of the width that it reads, a router has for so many experts, and what draws them.

        Of no more rows than experts, the last experts' in order, users have those of experts that they have.
        """
        ...

    def __call__(self, router: Any, products: Any, x: Any) -> Any:
        """Gates ``(users, n, experts)`` that sum to one, of ``x (users, n, width)`` and its products with all rows."""


Balance = Literal["none", "uniform", "generalist"]
"""Which load on the experts the balancing penalty asks for: none, equal, or half of it on the generalist."""
