"""FLOPs of work that no formula is written for: it is run on tensors without data, and its products are added up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop

FEW, MANY = 2, 4
"""Sizes of the two runs that a line is drawn through; batch norm takes no fewer than two."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """FLOPs of ``n`` items at once: ``fixed + each * n``."""

    fixed: float = 0.0
    each: float = 0.0

    def flops(self, times: float, items: float) -> float:
        """FLOPs of doing it so many times on so many items in all."""
        return self.fixed * times + self.each * items

    def times(self, count: int) -> Work:
        """The work done so many times on the same items."""
        return Work(fixed=self.fixed * count, each=self.each * count)


def measure(work: Callable[[int], object]) -> Work:
    """The line through two runs of ``work``, which takes a number of items; FLOPs of products are linear in them."""
    few, many = counted(lambda: work(FEW)), counted(lambda: work(MANY))
    each = (many - few) / (MANY - FEW)
    return Work(fixed=few - FEW * each, each=each)


def counted(work: Callable[[], object]) -> int:
    """FLOPs of matrix products and convolutions, forward and backward."""
    with FlopCounterMode(display=False, custom_mapping=_FORMULAS) as counter:
        work()
    return counter.get_total_flops()


def _convolution_backward(out: Sequence[int], x: Any, weight: Sequence[int], *rest: Any, **_: Any) -> int:
    # torch's own formula takes a grouped convolution's weight gradient for a full one, and stacked models are groups.
    wanted = rest[-1][:2]
    return 2 * out[0] * math.prod(out[2:]) * math.prod(weight) * sum(wanted)


_aten = torch.ops.aten
_FORMULAS = {
    _aten.convolution_backward: _convolution_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}
"""Beside what torch counts by itself."""
