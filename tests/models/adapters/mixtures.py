"""A mixture of experts with made-up tensors, solved by the PyTorch path and by what else computes its hidden part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from comingle.models import injection as experts
from comingle.models.kernels import expert_mlp

ACTS: dict[str, Any] = {
    act.__name__: act for act in (expert_mlp.gelu_tanh, expert_mlp.gelu_erf, expert_mlp.silu, expert_mlp.relu)
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    act: Any
    first: int
    x: Tensor
    gates: Tensor
    factors: list[Tensor]
    weights: list[Tensor]
    dy: Tensor

    def to(self, dtype: torch.dtype) -> Problem:
        cast: Callable[[list[Tensor]], list[Tensor]] = lambda tensors: [t.to(dtype) for t in tensors]  # noqa: E731
        return Problem(
            act=self.act,
            first=self.first,
            x=self.x.to(dtype),
            gates=self.gates.to(torch.promote_types(dtype, torch.float32)),
            factors=cast(self.factors),
            weights=cast(self.weights),
            dy=self.dy.to(dtype),
        )

    def at(self, device: str) -> Problem:
        """The same on a device."""
        moved = {name: [t.to(device) for t in getattr(self, name)] for name in ("factors", "weights")}
        alone = {name: getattr(self, name).to(device) for name in ("x", "gates", "dy")}
        return replace(self, **moved, **alone)

    def users(self, chosen: slice) -> Problem:
        """The same for some of the users."""
        return Problem(
            act=self.act,
            first=self.first,
            x=self.x[chosen],
            gates=self.gates[chosen],
            factors=[f[chosen].contiguous() for f in self.factors],
            weights=self.weights,
            dy=self.dy[chosen],
        )

    def solve(self, function: Any, train: tuple[bool, bool, bool] = (True, True, True)) -> list[Tensor]:
        """Output, and gradients of those of (x, gates, factors) that are trained."""
        x, gates = self.x.clone().requires_grad_(train[0]), self.gates.clone().requires_grad_(train[1])
        factors = [f.clone().requires_grad_(train[2]) for f in self.factors]
        y = function(self.act, 0.7, x, gates, self.first, *factors, *self.weights)
        leaves = [t for t in (x, gates, *factors) if t.requires_grad]
        return [y.detach(), *(torch.autograd.grad(y, leaves, self.dy) if leaves else [])]


def by_part(part: Any) -> Any:
    """The path of native code, called as ``_Mixture.apply`` is; ``part`` has its two passes."""

    def mixture(act: Any, scale: float, x: Tensor, gates: Tensor, first: int, *rest: Tensor) -> Tensor:
        factors, weights = rest[: 2 * first + 2], rest[2 * first + 2 :]
        alias, z = experts._InputProducts.apply(x, torch.cat([a.flatten(1, 2) for a in factors[0 : 2 * first : 2]], 1))
        given = (*factors[1 : 2 * first : 2], *factors[-2:], *weights)
        return experts._NativeMixture.apply(part, act, scale, alias if x.requires_grad else x, z, gates, first, *given)

    return mixture


reference = experts._Mixture.apply


def problem(
    act: str = "gelu_tanh",
    *,
    first: int = 1,
    users: int = 2,
    n: int = 37,
    experts: int = 2,
    rank: int = 8,
    width: int = 24,
    hidden: int = 300,
) -> Problem:
    draw = torch.Generator().manual_seed(users + n + experts + rank + hidden)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        # Values that bf16 has: then the formats differ by their arithmetic alone.
        return (torch.randn(shape, generator=draw) * scale).bfloat16().double()

    factors, weights = [], []
    for _ in range(first):
        factors += [normal(users, experts, rank, width, scale=width**-0.5), normal(users, experts, rank, hidden)]
        weights += [normal(hidden, width, scale=width**-0.5), normal(hidden)]
    factors += [normal(users, experts, rank, hidden, scale=hidden**-0.5), normal(users, experts, rank, width)]
    weights += [normal(width, hidden, scale=hidden**-0.5), normal(width)]
    return Problem(
        act=ACTS[act],
        first=first,
        x=normal(users, n, width),
        gates=normal(users, n, experts).softmax(-1),
        factors=factors,
        weights=weights,
        dy=normal(users, n, width),
    )


def errors(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    """Relative distances in the Euclidean norm."""
    pairs = zip(found, expected, strict=True)
    return [float((f.double().cpu() - e.cpu()).norm() / e.norm().cpu().clamp(min=1e-300)) for f, e in pairs]


def check_mixture(part: Any, given: Problem, dtype: torch.dtype, train: tuple[bool, bool, bool]) -> None:
    """Float32 is right to rounding; bf16 is as right as the PyTorch path in bf16, give or take single roundings."""
    narrow = given.to(dtype)
    assert part.supports(narrow.x, given.act, given.factors[0].shape[-2])
    expected = [t.cpu() for t in given.solve(reference, train)]
    found = errors(narrow.solve(by_part(part), train), expected)
    if dtype == torch.float32:
        assert max(found) < 1e-5
        return
    usual = errors(narrow.solve(reference, train), expected)
    assert all(mine < 1.3 * its + 2**-6 for mine, its in zip(found, usual, strict=True)), (found, usual)
