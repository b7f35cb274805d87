"""A plan: parameters, bytes, FLOPs and memory of each method; FLOPs by formula or measured on fake tensors.

A product with a matrix of n entries is n multiply-adds, 2 n FLOPs, for each token. Elementwise work, norms, softmax and
embeddings are left out, as usual (CoMiGS App. B.1 of the earlier version follows Chowdhery et al. 2022, App. B).

In the backward pass a frozen matrix costs one product, the gradient of its input, and none where nothing that is
trained lies before it. A LoRA costs one product for each gradient: of A, of B, and two of inputs. The experts of a
block share the products with base weights (:mod:`comingle.models.injection`); the naive way, one whole MLP per expert,
does not.

Table 3 is for GPT2-124M in bfloat16, 128 tokens. Its figures are those of the routers (18,432 entries: 4.7 MFLOPs,
0.035 MiB) and of one expert's LoRA on the MLPs (737,280 entries: 1.41 MiB); its percentages are shares of the LoRA of
two such experts. So its MB are MiB, and the attention's LoRA is in none of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
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


def _convolution_backward(out: Sequence[int], x: object, weight: Sequence[int], *rest: Any, **_: object) -> int:
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


PAPER_BYTES = 2  # bfloat16


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Entries of one user's attention LoRA, of one expert's LoRA on all MLPs, and of its routers."""

    attention: int
    expert: int
    router: int


@dataclass(frozen=True, kw_only=True)
class Account:
    """What one of the two methods really takes: of one user, in one round, with one pass of ``context`` tokens."""

    forward_flops: float
    round_flops: float
    state_bytes: int
    upload_bytes: int


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One column of Table 3: the paper's words, its way of counting on this model, what is true, and why they differ.

    Values are CoMiGS-1G1S minus FedAvg; shares are fractions. ``theirs`` is None where the paper does not count it.
    """

    what: str
    unit: str
    paper: str
    theirs: float | None
    theirs_share: float | None
    true: float
    true_share: float
    why: str


def table3(sizes: Sizes, context: int, fedavg: Account, comigs: Account) -> list[Difference]:
    """The columns of Table 3 for another model, and training, which it leaves out.

    Values are in FLOPs and bytes; ``theirs`` counts bytes as bfloat16.
    """
    share = sizes.router / (2 * sizes.expert)
    lora = sizes.attention + 2 * sizes.expert
    return [
        Difference(
            what="compute of a forward pass",
            unit="FLOPs",
            paper="+5 MFLOPs (+1.25%)",
            theirs=2.0 * sizes.router * context,
            theirs_share=share,
            **_true(comigs.forward_flops, fedavg.forward_flops),
            why="The paper divides the routers' products by those of the experts' LoRA on the MLPs; against the whole "
            "pass, the base included, the share is far smaller.",
        ),
        Difference(
            what="compute of a round's training",
            unit="FLOPs",
            paper="not counted",
            theirs=None,
            theirs_share=None,
            **_true(comigs.round_flops, fedavg.round_flops),
            why="Routers are trained in passes of their own, which FedAvg does not have.",
        ),
        Difference(
            what="memory for what is trained",
            unit="bytes",
            paper="+0.035 MB (+1.25%)",
            theirs=float(sizes.router * PAPER_BYTES),
            theirs_share=share,
            **_true(comigs.state_bytes, fedavg.state_bytes),
            why="Here routers are float32 and have two moments of the optimiser each; the share is of all LoRA, the "
            "attention's included. The paper's MB are MiB of bfloat16.",
        ),
        Difference(
            what="upload of a round",
            unit="bytes",
            paper="-1.41 MB (-50%)",
            theirs=-float(sizes.expert * PAPER_BYTES),
            theirs_share=-0.5,
            **_true(comigs.upload_bytes, fedavg.upload_bytes),
            why=f"The attention's LoRA travels too: {_millions(sizes.attention + sizes.expert)} of {_millions(lora)} "
            "LoRA parameters, as float32. The paper counts the experts of the MLPs alone, as MiB of bfloat16.",
        ),
    ]


def _true(comigs: float, fedavg: float) -> dict[str, float]:
    return {"true": float(comigs - fedavg), "true_share": comigs / fedavg - 1}


def _millions(count: int) -> str:
    return f"{count / 1e6:.3f}M"


@dataclass(frozen=True, kw_only=True)
class UserCost:
    """What a user trains, sends and computes; ``names`` are the users for whom this is the same.

    ``parameters`` are those that are trained, by role. Bytes are of one exchange, a mean where users' names, which go
    with every message, differ in length. ``forward`` is one token's forward pass, ``training`` one token's forward and
    backward pass (experts, mean over what a round does), ``round`` a round's training. The naive figures are for one
    whole MLP per expert. ``unit`` is what data is counted in where it is not tokens; without token-level experts
    ``experts`` is 0.
    """

    names: tuple[str, ...]
    experts: int
    parameters: dict[str, int]
    upload_bytes: int
    download_bytes: int
    forward: Flops
    training: Flops
    round: Flops
    unit: str = "token"

    @property
    def trainable_parameters(self) -> int:
        """All that are trained."""
        return sum(self.parameters.values())

    def as_dict(self) -> dict[str, object]:
        """Return nested dictionaries, with totals."""
        flops = {
            name: {
                **asdict(spent),
                "base": spent.base,
                "total": spent.total,
                "overhead": spent.overhead,
                "naive_total": spent.naive(self.experts),
                "naive_overhead": _over(spent.naive(self.experts), spent.base),
            }
            for name, spent in (
                (f"forward_flops_per_{self.unit}", self.forward),
                (f"training_flops_per_{self.unit}", self.training),
                ("training_flops_per_round", self.round),
            )
        }
        plain = {key: value for key, value in asdict(self).items() if key not in ("forward", "training", "round")}
        return {**plain, "trainable_parameters": self.trainable_parameters, **flops}


def _over(total: float, base: float) -> float:
    return total / base - 1 if base else 0.0


@dataclass(frozen=True, kw_only=True)
class MemoryCost:
    """Bytes at the worst moment of a run.

    ``adapters_bytes`` are the trainable tensors of all users with padding and masks, ``moments_bytes`` the optimiser's,
    ``gradients_bytes`` those of the users of one pass, ``activations_bytes`` everything else that the pass holds,
    ``allocator_bytes`` what the memory allocator keeps in gaps, ``data_bytes`` a task's samples, ``process_bytes``
    Python and its libraries. ``exchange_bytes`` are messages while all who take part in a round send theirs, which is
    not at the same time as a pass. With users on disk ``adapters_bytes`` and ``moments_bytes`` are those of the cohorts
    that are in memory.
    """

    weights_bytes: int
    adapters_bytes: int
    moments_bytes: int
    gradients_bytes: int
    activations_bytes: int
    allocator_bytes: int
    data_bytes: int = 0
    process_bytes: int = 0
    exchange_bytes: int = 0

    @property
    def pass_bytes(self) -> int:
        """What a pass holds at its worst moment."""
        return self.gradients_bytes + self.activations_bytes

    @property
    def fixed_bytes(self) -> int:
        """What is there all the time."""
        held = self.weights_bytes + self.adapters_bytes + self.moments_bytes + self.data_bytes
        return held + self.process_bytes

    @property
    def total_bytes(self) -> int:
        """Everything."""
        return self.fixed_bytes + max(self.pass_bytes, self.exchange_bytes) + self.allocator_bytes

    def as_dict(self) -> dict[str, int]:
        """With totals."""
        return asdict(self) | {"pass_bytes": self.pass_bytes, "total_bytes": self.total_bytes}


_PLAIN = ("exchanges", "users_per_step", "micro_batch", "fits", "advice", "store_bytes")


@dataclass(frozen=True, kw_only=True)
class MethodCost:
    """One method: its users, its exchanges over the whole run, and its memory.

    ``machine`` is this machine with all users, ``users_per_step`` at once with ``micro_batch`` sequences each;
    ``own_device`` is a device that holds the one user who has most. ``advice`` says how to make it fit; empty where it
    does.
    """

    method: str
    users: tuple[UserCost, ...]
    exchanges: int
    users_per_step: int
    micro_batch: int
    machine: MemoryCost
    own_device: MemoryCost
    fits: bool
    advice: str
    store_bytes: int = 0
    """What users' records take on disk at most; 0 where they are in memory."""
    privacy: dict[str, Any] = field(default_factory=dict)
    """Forecast of the privacy spent, see :func:`comingle.cost.planning.with_privacy`; empty without privacy."""

    def as_dict(self) -> dict[str, object]:
        """Return nested dictionaries."""
        users = {"users": [user.as_dict() for user in self.users]}
        memory = {"machine": self.machine.as_dict(), "own_device": self.own_device.as_dict()}
        plain = {key: getattr(self, key) for key in _PLAIN}
        revealed = {"privacy": self.privacy} if self.privacy else {}
        return {"method": self.method, **users, **memory, **plain, **revealed}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A recipe's costs. ``base_flops`` is a token's forward pass through the frozen base alone.

    For a task the base is its net, ``unit`` is "sample", ``local_steps`` are those of the user who takes most, and
    there is no context and no Table 3. ``note`` says what the numbers leave out.
    """

    base: str
    base_parameters: int
    dtype: str
    device: str
    users: tuple[str, ...]
    rounds: int
    local_steps: int
    batch_size: int
    context: int
    base_flops: float
    free_bytes: int
    methods: tuple[MethodCost, ...]
    table3: tuple[Difference, ...]
    unit: str = "token"
    note: str = ""

    def as_dict(self) -> dict[str, object]:
        """Return nested dictionaries, for JSON."""
        plain = {
            key: getattr(self, key)
            for key in (
                "base", "base_parameters", "dtype", "device", "users", "rounds", "local_steps", "batch_size", "context",
                "free_bytes", "unit", "note",
            )
        }  # fmt: skip
        return {
            **plain,
            f"base_forward_flops_per_{self.unit}": self.base_flops,
            "methods": [method.as_dict() for method in self.methods],
            "comigs_1g1s_minus_fedavg": [asdict(column) for column in self.table3],
        }
