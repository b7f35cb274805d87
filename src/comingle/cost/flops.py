"""Floating-point operations, by formula or measured on tensors without data.

A product with a matrix of n entries is n multiply-adds, 2 n FLOPs, for each token. Elementwise work, norms, softmax and
embeddings are left out, as usual (CoMiGS App. B.1 of the earlier version follows Chowdhery et al. 2022, App. B).

In the backward pass a frozen matrix costs one product, the gradient of its input, and none where nothing that is
trained lies before it. A LoRA costs one product for each gradient: of A, of B, and two of inputs. The experts of a
block share the products with base weights (:mod:`comingle.models.experts`); the naive way, one whole MLP per expert,
does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
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


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A frozen linear with one user's LoRA: entries of W, of A and of B (of all experts), and which are trained."""

    weight: int
    a: int = 0
    b: int = 0
    trains_a: bool = False
    trains_b: bool = False

    @property
    def trained(self) -> bool:
        """Whether its LoRA has any gradient of its own."""
        return self.trains_a or self.trains_b


@dataclass(frozen=True, kw_only=True)
class Block:
    """One decoder layer: attention, then the mixture of experts in place of the MLP.

    ``reads`` are the attention linears that read the layer's input, ``writes`` is the output projection. ``scores`` are
    the multiply-adds of queries with keys for one token: context * heads * size of a head; the mean of values takes
    as many. ``first`` read the MLP's input, ``last`` writes its output. ``router`` is the number of its entries.
    Where the mixture is ``whole``, one function, it computes the gradient of its input whether that is needed or not.
    In a ``parallel`` layer the MLP reads what the attention reads.
    """

    reads: tuple[Linear, ...]
    writes: Linear
    scores: int
    first: tuple[Linear, ...]
    last: Linear
    router: int = 0
    trains_router: bool = False
    whole: bool = True
    parallel: bool = False


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs of a token or a sample by what they are spent on.

    ``net`` is a small net that is trained whole. ``lora`` are adapters; of nets and client-level mixtures, whatever is
    spent beside one pass of the base.
    """

    attention: float = 0.0
    mlp: float = 0.0
    head: float = 0.0
    lora: float = 0.0
    router: float = 0.0
    net: float = 0.0

    def __add__(self, other: Flops) -> Flops:
        """Sum, part by part."""
        return Flops(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def __mul__(self, times: float) -> Flops:
        """Each part ``times`` as often."""
        return Flops(**{f.name: getattr(self, f.name) * times for f in fields(self)})

    @property
    def base(self) -> float:
        """What the base alone would take: attention, MLPs and head, or a net."""
        return self.attention + self.mlp + self.head + self.net

    @property
    def total(self) -> float:
        """Everything."""
        return self.base + self.lora + self.router

    @property
    def overhead(self) -> float:
        """What the adapters add, as a fraction of the base; 0 where there is nothing."""
        return self.total / self.base - 1 if self.base else 0.0

    def naive(self, experts: int) -> float:
        """Total of the naive way: the whole MLP once for each of ``experts`` experts."""
        return self.total + (experts - 1) * self.mlp


def forward(blocks: Sequence[Block], head: int) -> Flops:
    """FLOPs of one token's forward pass; ``head`` is the number of entries of all matrices outside the blocks."""
    total = Flops(head=2.0 * head)
    for block in blocks:
        attention = [*block.reads, block.writes]
        mlp = [*block.first, block.last]
        total += Flops(
            attention=2.0 * (sum(linear.weight for linear in attention) + 2 * block.scores),
            mlp=2.0 * sum(linear.weight for linear in mlp),
            lora=2.0 * sum(linear.a + linear.b for linear in attention + mlp),
            router=2.0 * block.router,
        )
    return total


def backward(blocks: Sequence[Block], head: int) -> Flops:
    """FLOPs of one token's backward pass down to the first tensor that is trained; none where nothing is."""
    total, live = Flops(), False
    for block in blocks:
        spent, live = _block_backward(block, live)
        total += spent
    return total + Flops(head=2.0 * head) if live else total


def _block_backward(block: Block, live: bool) -> tuple[Flops, bool]:
    """A block's backward pass, and whether its output has a gradient; ``live``: whether its input needs one."""
    attended = live or any(linear.trained for linear in block.reads)
    written = attended or block.writes.trained
    mlp = (*block.first, block.last)
    spent = Flops()
    for linear, wanted in [*((linear, live) for linear in block.reads), (block.writes, attended)]:
        if wanted or linear.trained:
            spent += Flops(attention=2.0 * linear.weight * wanted, lora=_lora_backward(linear, wanted))
    if attended:
        spent += Flops(attention=2.0 * 4 * block.scores)  # gradients of queries, keys, probabilities and values
    read = live if block.parallel else written
    if not (written or block.trains_router or any(linear.trained for linear in mlp)):
        return spent, live
    for linear, wanted in [*((linear, read or block.whole) for linear in block.first), (block.last, True)]:
        inner = wanted or block.trains_router or linear.trains_a
        spent += Flops(mlp=2.0 * linear.weight * wanted, lora=_lora_backward(linear, wanted, inner))
    return spent + Flops(router=2.0 * block.router * (int(block.trains_router) + int(read))), True


def _lora_backward(linear: Linear, wanted: bool, inner: bool = True) -> float:
    """Gradients of A and B where trained, of the input if ``wanted``, of what is between A and B if ``inner``."""
    return 2.0 * (linear.b * (int(inner) + int(linear.trains_b)) + linear.a * (int(linear.trains_a) + int(wanted)))
