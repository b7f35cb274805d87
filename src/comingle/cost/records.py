"""Cost records of a plan: parameters, bytes, FLOPs and memory; FLOPs by formula or measured on fake tensors.

A product with a matrix of n entries takes n multiply-adds, 2 n FLOPs, per token. Elementwise operations, norms, softmax
and embeddings are left out, as usual (CoMiGS App. B.1 of the earlier version follows Chowdhery et al. 2022, App. B).

In the backward pass a frozen matrix takes one product, the gradient of its input, or none if nothing before it is
trained. A LoRA takes one product for each gradient: of A, of B, and of the inputs of both. The experts of a block share
the products with base weights (:mod:`comingle.models.injection`); the naive implementation, one whole MLP per expert,
does not.

Table 3 of the paper is for GPT2-124M in bfloat16 and 128 tokens. Its figures are those of the routers (18,432 entries:
4.7 MFLOPs, 0.035 MiB) and of one expert's LoRA on the MLPs (737,280 entries: 1.41 MiB). Its percentages are shares of
the LoRA of two such experts. So its MB are MiB, and none of them include the attention's LoRA.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop

FEW, MANY = 2, 4
"""Numbers of items in the two runs that determine a line. Batch norm needs at least two items."""


@dataclass(frozen=True, kw_only=True)
class LinearFlops:
    """FLOPs of a call on ``n`` samples or sequences at once: ``per_call + per_item * n``."""

    per_call: float = 0.0
    per_item: float = 0.0

    def flops(self, num_calls: float, num_items: float) -> float:
        """Return the FLOPs of several forward or training passes of a model.

        Args:
            num_calls: Number of passes; each costs ``per_call``, whatever its size.
            num_items: Number of samples or sequences in all passes together; each costs ``per_item``.
        """
        return self.per_call * num_calls + self.per_item * num_items

    def times(self, count: int) -> LinearFlops:
        """Return the FLOPs of ``count`` calls on the same items."""
        return LinearFlops(per_call=self.per_call * count, per_item=self.per_item * count)


def measure_flops(work: Callable[[int], object]) -> LinearFlops:
    """Return the FLOPs of ``work(n)`` as a linear function of n, the number of sequences or samples.

    ``work`` runs with 2 and with 4 items (:data:`FEW` and :data:`MANY`), as two points determine a line.
    """
    flops_of_few = count_flops(lambda: work(FEW))
    flops_of_many = count_flops(lambda: work(MANY))
    per_item = (flops_of_many - flops_of_few) / (MANY - FEW)
    return LinearFlops(per_call=flops_of_few - FEW * per_item, per_item=per_item)


def count_flops(work: Callable[[], object]) -> int:
    """Run ``work`` and return the FLOPs of its matrix products and convolutions, forward and backward."""
    with FlopCounterMode(display=False, custom_mapping=_FORMULAS) as counter:  # _FORMULAS: where torch's do not suffice
        work()
    return counter.get_total_flops()


def _convolution_backward(out: Sequence[int], x: object, weight: Sequence[int], *rest: Any, **_: object) -> int:
    """Return the FLOPs of a convolution's backward pass.

    The gradient of the input takes as many FLOPs as the forward pass, and so does the gradient of the weight. Torch's
    own formula is too large for grouped convolutions, by a factor of the number of groups. Here a group is the model of
    one user.

    Args:
        out: Shape of the gradient of the output.
        x: Shape of the input.
        weight: Shape of the weight, ``(channels_out, channels_in of one group, *kernel)``.
        rest: The operation's other arguments. The last of them is a list of three booleans: whether the gradients of
            input, weight and bias are wanted.
    """
    wants_input, wants_weight, _wants_bias = rest[-1]  # the gradient of a bias takes no multiplications
    batch_size, _channels, *output_positions = out
    # Every entry of the weight is used once per output position.
    forward_flops = 2 * batch_size * math.prod(output_positions) * math.prod(weight)
    return forward_flops * (wants_input + wants_weight)


_aten = torch.ops.aten
_FORMULAS = {
    _aten.convolution_backward: _convolution_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}
"""FLOP formulas that replace or extend those of torch."""


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A frozen linear with one user's LoRA.

    Args:
        weight: Entries of W.
        a: Entries of the LoRA factors A of all experts.
        b: Entries of the LoRA factors B of all experts.
        trains_a: Whether A is trained.
        trains_b: Whether B is trained.
    """

    weight: int
    a: int = 0
    b: int = 0
    trains_a: bool = False
    trains_b: bool = False

    @property
    def trained(self) -> bool:
        """True if any part of the LoRA is trained."""
        return self.trains_a or self.trains_b


@dataclass(frozen=True, kw_only=True)
class Block:
    """One decoder layer: attention, then a mixture of experts in place of the MLP.

    Args:
        qkv: The attention linears that project the layer's input to queries, keys and values.
        attention_out: The attention's output projection.
        score_products: Multiply-adds of one token's query with the keys: context * heads * head size. The weighted mean
            of the values takes as many.
        mlp_in: The linears that read the MLP's input.
        mlp_out: The linear that writes the MLP's output.
        router: Entries of the router.
        trains_router: Whether the router is trained.
        one_autograd_function: Whether the mixture is one autograd function, which always computes the gradient of its
            input.
        parallel_mlp: Whether the MLP reads the same input as the attention.
    """

    qkv: tuple[Linear, ...]
    attention_out: Linear
    score_products: int
    mlp_in: tuple[Linear, ...]
    mlp_out: Linear
    router: int = 0
    trains_router: bool = False
    one_autograd_function: bool = True
    parallel_mlp: bool = False


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs of a token or a sample by purpose.

    ``net`` is a small net that is trained as a whole. ``lora`` are adapters; for nets and client-level mixtures it is
    everything beyond one pass of the base.
    """

    attention: float = 0.0
    mlp: float = 0.0
    head: float = 0.0
    lora: float = 0.0
    router: float = 0.0
    net: float = 0.0

    def __add__(self, other: Flops) -> Flops:
        """Return the sum, part by part."""
        return Flops(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def __mul__(self, times: float) -> Flops:
        """Return each part multiplied by ``times``."""
        return Flops(**{f.name: getattr(self, f.name) * times for f in fields(self)})

    @property
    def base(self) -> float:
        """FLOPs of the base alone: attention, MLPs and head, or a net."""
        return self.attention + self.mlp + self.head + self.net

    @property
    def total(self) -> float:
        """FLOPs of the base model and all that adapters add: LoRA and router."""
        return self.base + self.lora + self.router

    @property
    def overhead(self) -> float:
        """FLOPs that the adapters add, as a fraction of the base's; 0 if the base has none."""
        return self.total / self.base - 1 if self.base else 0.0

    def naive(self, experts: int) -> float:
        """Return the total of the naive implementation, which runs the MLP once for each of ``experts`` experts."""
        return self.total + (experts - 1) * self.mlp


def forward(blocks: Sequence[Block], head: int) -> Flops:
    """Return the FLOPs of one token's forward pass: 2 (a multiplication and an addition) for each entry of each matrix.

    Args:
        blocks: The decoder layers.
        head: Number of entries of all matrices outside of them.
    """
    total = Flops(head=2.0 * head)
    for block in blocks:
        attention = [*block.qkv, block.attention_out]
        mlp = [*block.mlp_in, block.mlp_out]
        attention_weights = sum(linear.weight for linear in attention)
        lora_entries = sum(linear.a + linear.b for linear in attention + mlp)
        total += Flops(
            # Products of the query with all keys, and as many for the weighted mean of the values.
            attention=2.0 * (attention_weights + 2 * block.score_products),
            mlp=2.0 * sum(linear.weight for linear in mlp),
            lora=2.0 * lora_entries,
            router=2.0 * block.router,
        )
    return total


def backward(blocks: Sequence[Block], head: int) -> Flops:
    """Return the FLOPs of one token's backward pass, which ends at the first trained tensor; 0 if nothing is trained.

    Args:
        blocks: The decoder layers, first to last.
        head: Number of entries of all matrices outside of them, which are frozen.
    """
    total = Flops()
    needs_gradient = False  # of the current block's input: whether anything before the block is trained
    for block in blocks:
        block_flops, needs_gradient = _block_backward(block, input_needs_grad=needs_gradient)
        total += block_flops
    head_input_needs_gradient = needs_gradient
    if head_input_needs_gradient:
        total = total + Flops(head=2.0 * head)
    return total


def _block_backward(block: Block, *, input_needs_grad: bool) -> tuple[Flops, bool]:
    """Return the FLOPs of a decoder layer's backward pass, and whether the gradient of its output is needed.

    A gradient is one product with a matrix, of 2 FLOPs per entry. The gradient of a linear's input is needed if
    anything before the linear is trained.

    Args:
        block: The decoder layer.
        input_needs_grad: Whether the gradient of its input is needed, because an earlier layer trains something.
    """
    values_need_grad = input_needs_grad or any(linear.trained for linear in block.qkv)  # also queries and keys
    attention_needs_grad = values_need_grad or block.attention_out.trained  # the output of the attention
    flops = _attention_backward(block, input_needs_grad=input_needs_grad, values_need_grad=values_need_grad)
    trains_mlp = block.trains_router or any(linear.trained for linear in (*block.mlp_in, block.mlp_out))
    output_needs_grad = attention_needs_grad or trains_mlp
    if not output_needs_grad:
        return flops, False
    mlp_input_needs_grad = input_needs_grad if block.parallel_mlp else attention_needs_grad
    return flops + _mlp_backward(block, input_needs_grad=mlp_input_needs_grad), True


def _attention_backward(block: Block, *, input_needs_grad: bool, values_need_grad: bool) -> Flops:
    """Return the FLOPs of the backward pass of a decoder layer's attention.

    Args:
        block: The decoder layer.
        input_needs_grad: Whether the gradient of the layer's input is needed.
        values_need_grad: Whether the gradients of queries, keys and values are needed.
    """
    flops = Flops()
    linears = [(linear, input_needs_grad) for linear in block.qkv] + [(block.attention_out, values_need_grad)]
    for linear, needs_input_grad in linears:
        if needs_input_grad or linear.trained:
            weight_flops = 2.0 * linear.weight * needs_input_grad
            flops += Flops(attention=weight_flops, lora=_lora_backward(linear, needs_input_grad))
    if values_need_grad:
        flops += Flops(attention=2.0 * 4 * block.score_products)  # gradients of queries, keys, probabilities and values
    return flops


def _mlp_backward(block: Block, *, input_needs_grad: bool) -> Flops:
    """Return the FLOPs of the backward pass of a decoder layer's mixture of experts and its router.

    Args:
        block: The decoder layer.
        input_needs_grad: Whether the gradient of the mixture's input is needed.
    """
    flops = Flops()
    # A mixture of experts that is one autograd function computes the gradient of its input in any case.
    computes_input_grad = input_needs_grad or block.one_autograd_function
    linears = [(linear, computes_input_grad) for linear in block.mlp_in] + [(block.mlp_out, True)]
    for linear, needs_input_grad in linears:
        # With `mix: linear` the gates multiply `A x`, so the router's gradient needs the gradient of this product.
        needs_inner_grad = needs_input_grad or block.trains_router or linear.trains_a
        weight_flops = 2.0 * linear.weight * needs_input_grad
        flops += Flops(mlp=weight_flops, lora=_lora_backward(linear, needs_input_grad, needs_inner_grad))
    router_products = int(block.trains_router) + int(input_needs_grad)  # gradients of its weight and of its input
    return flops + Flops(router=2.0 * block.router * router_products)


def _lora_backward(linear: Linear, needs_input_grad: bool, needs_inner_grad: bool = True) -> float:
    """Return the FLOPs of the gradients of a LoRA ``B A x``, for one token.

    Each gradient that is needed takes one product:

        gradient of A      2 FLOPs per entry of A, if A is trained
        gradient of x      2 FLOPs per entry of A
        gradient of B      2 FLOPs per entry of B, if B is trained
        gradient of A x    2 FLOPs per entry of B

    Args:
        linear: The sizes of the LoRA (``a`` and ``b`` entries), and which factors are trained.
        needs_input_grad: Whether the gradient of the input x is needed.
        needs_inner_grad: Whether the gradient of ``A x`` is needed.
    """
    products_with_a = int(linear.trains_a) + int(needs_input_grad)
    products_with_b = int(linear.trains_b) + int(needs_inner_grad)
    return 2.0 * (linear.a * products_with_a + linear.b * products_with_b)


PAPER_BYTES = 2  # bfloat16


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Numbers of entries of one user's tensors, as Table 3 of the paper compares them.

    Args:
        attention: Entries of the attention's LoRA.
        expert: Entries of one expert's LoRA on all MLPs.
        router: Entries of all routers.
    """

    attention: int
    expert: int
    router: int


@dataclass(frozen=True, kw_only=True)
class Account:
    """Counted costs of one method for one user in one round; ``forward_flops`` are those of a whole context."""

    forward_flops: float
    round_flops: float
    state_bytes: int
    upload_bytes: int


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One column of Table 3: CoMiGS-1G1S minus FedAvg, as the paper counts and as counted here.

    Args:
        what: Name of the compared quantity.
        unit: Unit of the values.
        paper: The figure that the paper prints.
        theirs: The difference as the paper counts, for this model; None if the paper does not count it.
        theirs_share: The same as a fraction of what the paper compares it with; None if the paper does not count it.
        true: The difference as counted here.
        true_share: The counted difference as a fraction of FedAvg's costs.
        why: Why they differ.
    """

    what: str
    unit: str
    paper: str
    theirs: float | None
    theirs_share: float | None
    true: float
    true_share: float
    why: str


def table3_columns(sizes: Sizes, context: int, fedavg: Account, comigs: Account) -> list[Difference]:
    """Return the columns of the CoMiGS paper's Table 3 for another model: the costs of CoMiGS-1G1S minus FedAvg's.

    The second column, FLOPs of training, is not in the paper.

    Args:
        sizes: Numbers of entries of the attention's LoRA, of one expert's LoRA on the MLPs, and of the routers.
        context: Tokens of a sequence.
        fedavg: Counted costs of FedAvg.
        comigs: Counted costs of CoMiGS-1G1S.

    Returns:
        Columns in FLOPs and bytes. ``theirs`` is the difference by the paper's way of counting, with 2 bytes per entry
        (bfloat16); ``true`` is the difference of the counted costs.
    """
    mlp_lora = 2 * sizes.expert  # a generalist and a specialist
    router_share = sizes.router / mlp_lora  # as the paper counts: without the base and the LoRA of attention
    uploaded = _millions(sizes.attention + sizes.expert)
    all_lora = _millions(sizes.attention + mlp_lora)
    return [
        Difference(
            what="compute of a forward pass",
            unit="FLOPs",
            paper="+5 MFLOPs (+1.25%)",
            theirs=2.0 * sizes.router * context,
            theirs_share=router_share,
            **_true_difference(comigs.forward_flops, fedavg.forward_flops),
            why="The paper divides the FLOPs of the routers by those of the experts' LoRA on the MLPs; relative to the "
            "whole pass, including the base, the share is far smaller.",
        ),
        Difference(
            what="compute of a round's training",
            unit="FLOPs",
            paper="not counted",
            theirs=None,
            theirs_share=None,
            **_true_difference(comigs.round_flops, fedavg.round_flops),
            why="Routers are trained in separate passes, which FedAvg does not have.",
        ),
        Difference(
            what="memory for what is trained",
            unit="bytes",
            paper="+0.035 MB (+1.25%)",
            theirs=float(sizes.router * PAPER_BYTES),
            theirs_share=router_share,
            **_true_difference(comigs.state_bytes, fedavg.state_bytes),
            why="Here routers are float32 and have two optimizer moments each; the share is relative to all LoRA, "
            "including attention. The paper's MB are MiB of bfloat16.",
        ),
        Difference(
            what="upload of a round",
            unit="bytes",
            paper="-1.41 MB (-50%)",
            theirs=-float(sizes.expert * PAPER_BYTES),
            theirs_share=-0.5,
            **_true_difference(comigs.upload_bytes, fedavg.upload_bytes),
            why=f"LoRA of attention is uploaded, too: {uploaded} of {all_lora} LoRA parameters, as float32. The paper "
            "counts only the experts of the MLPs, as MiB of bfloat16.",
        ),
    ]


def _true_difference(comigs: float, fedavg: float) -> dict[str, float]:
    """Return the fields ``true`` (CoMiGS minus FedAvg) and ``true_share`` (as a fraction of FedAvg) of a Difference."""
    return {"true": float(comigs - fedavg), "true_share": comigs / fedavg - 1}


def _millions(count: int) -> str:
    """Return a number in millions, such as ``0.295M``."""
    return f"{count / 1e6:.3f}M"


@dataclass(frozen=True, kw_only=True)
class UserCost:
    """Costs of one user.

    Args:
        names: Names of the users with these costs.
        experts: Number of token-level experts; 0 without such experts.
        parameters: Trained parameters by role.
        upload_bytes: Bytes sent in one exchange. As messages contain the user's name, this is a mean over ``names``.
        download_bytes: Bytes received in one exchange, likewise.
        forward: FLOPs of one token's forward pass.
        training: FLOPs of one token's forward and backward pass with experts, as a mean over the phases of a round.
        round: FLOPs of a round's training.
        unit: Unit of the data: "token" or "sample".
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
        """Number of trained parameters of all roles."""
        return sum(self.parameters.values())

    def as_dict(self) -> dict[str, object]:
        """Return nested dictionaries for JSON: the fields, with totals.

        FLOPs also have ``base`` (without adapters) and ``overhead``, the fraction that the adapters add to it.
        ``naive_total`` and ``naive_overhead`` are for an implementation that runs the whole MLP once per expert.
        """
        all_flops = {
            f"forward_flops_per_{self.unit}": self.forward,
            f"training_flops_per_{self.unit}": self.training,
            "training_flops_per_round": self.round,
        }
        with_totals = {}
        for name, flops in all_flops.items():
            naive_total = flops.naive(self.experts)
            with_totals[name] = {
                **asdict(flops),
                "base": flops.base,
                "total": flops.total,
                "overhead": flops.overhead,
                "naive_total": naive_total,
                "naive_overhead": naive_total / flops.base - 1 if flops.base else 0.0,
            }
        other_fields = asdict(self)
        for flops_field in ("forward", "training", "round"):
            del other_fields[flops_field]
        return {**other_fields, "trainable_parameters": self.trainable_parameters, **with_totals}


@dataclass(frozen=True, kw_only=True)
class MemoryCost:
    """Bytes in memory at the peak of a run.

    Args:
        weights_bytes: Frozen weights.
        adapters_bytes: Trainable tensors of all users, with padding and masks. With users on disk, only of the cohorts
            that are in memory.
        moments_bytes: Optimiser moments, of the same users.
        gradients_bytes: Gradients of the users of one pass.
        activations_bytes: Everything else that a pass allocates.
        update_bytes: What the update of the parameters allocates beside gradients; no pass runs at that time.
        allocator_bytes: Gaps of the memory allocator.
        data_bytes: Samples.
        process_bytes: Python and its libraries.
        exchange_bytes: Messages while all participants of a round upload. No pass runs at that time.
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
    update_bytes: int = 0

    @property
    def pass_bytes(self) -> int:
        """Peak bytes that one optimiser step allocates: gradients, beside either activations or the update's buffers.

        Activations are freed before the update of the parameters begins.
        """
        return self.gradients_bytes + max(self.activations_bytes, self.update_bytes)

    @property
    def fixed_bytes(self) -> int:
        """Bytes that are in use during the whole run: weights, users' tensors and data, Python and its libraries."""
        users_bytes = self.adapters_bytes + self.moments_bytes + self.data_bytes
        return self.weights_bytes + users_bytes + self.process_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes at the peak of a run: during a step, or while messages are exchanged, whichever takes more."""
        return self.fixed_bytes + max(self.pass_bytes, self.exchange_bytes) + self.allocator_bytes

    def as_dict(self) -> dict[str, int]:
        """Return the bytes by name, with totals."""
        return {**asdict(self), "pass_bytes": self.pass_bytes, "total_bytes": self.total_bytes}


@dataclass(frozen=True, kw_only=True)
class MemoryChoice:
    """Settings of a run, and what it needs with them.

    Args:
        changes: Values by recipe key; keys that the recipe sets are not among them.
        needed_bytes: Memory at the peak.
        slowdown: Estimated time of a step, divided by the time with the first choice.
    """

    changes: dict[str, Any]
    needed_bytes: int
    slowdown: float

    @property
    def settings(self) -> str:
        """The changed settings in words, such as ``"dtype bfloat16, micro_batch 4"``.

        Compilation and native code are left out, as they are changed in any case. Without other changes, it is "full
        passes": as many users and sequences go through the model at once as by default.
        """
        shown = []
        for full_key, value in self.changes.items():
            key = full_key.removeprefix("runtime.")
            if key in ("native_code", "compile"):
                continue
            shown.append(key if value is True else f"{key} {value}")
        return ", ".join(shown) or "full passes"

    def describe(self, limit: int) -> str:
        """Return the settings, memory and time in one line.

        Args:
            limit: Bytes that the run may use.
        """
        memory = f"needs {self.needed_bytes / 1e6:,.0f} of {limit / 1e6:,.0f} MB"
        return f"{self.settings}; {memory}, {self.slowdown:.1f} times the time of full passes"


@dataclass(frozen=True, kw_only=True)
class MethodCost:
    """Costs of one method.

    Args:
        method: The method's name.
        users: Costs of the users, one entry for each group of users that are alike.
        exchanges: Number of exchanges in a run.
        users_per_step: Users that are trained at once on this machine.
        micro_batch: Sequences of each of them in a pass.
        machine: Memory on this machine, with all users.
        own_device: Memory on a device of one user, the user with the largest model.
        fits: Whether ``machine`` fits into free memory.
        advice: Settings that make it fit; empty if it fits.
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
    """Largest size of the users' records on disk; 0 if users are kept in memory."""
    privacy: dict[str, Any] = field(default_factory=dict)
    """Forecast of the privacy budget that a run spends; empty without privacy."""

    def as_dict(self, rounds: int) -> dict[str, object]:
        """Return nested dictionaries, for JSON.

        Each user also gets ``upload_bytes_per_user_round``, its mean upload over all rounds: half of ``upload_bytes``
        if every second round ends with an exchange.

        Args:
            rounds: Number of rounds of a run.
        """
        exchanges_per_round = self.exchanges / max(1, rounds)
        users = []
        for user in self.users:
            mean_upload_bytes = user.upload_bytes * exchanges_per_round
            users.append({**user.as_dict(), "upload_bytes_per_user_round": mean_upload_bytes})
        entries: dict[str, object] = {
            "method": self.method,
            "users": users,
            "machine": self.machine.as_dict(),
            "own_device": self.own_device.as_dict(),
            "exchanges": self.exchanges,
            "users_per_step": self.users_per_step,
            "micro_batch": self.micro_batch,
            "fits": self.fits,
            "advice": self.advice,
            "store_bytes": self.store_bytes,
        }
        if self.privacy:
            entries["privacy"] = self.privacy
        return entries


@dataclass(frozen=True, kw_only=True)
class BaseCost:
    """Size of a frozen base; for samples of the net.

    Args:
        name: Name of the base.
        parameters: Number of its parameters.
        dtype: Type of its parameters, such as "bfloat16".
        flops: FLOPs of one token's or sample's forward pass through it alone.
    """

    name: str
    parameters: int
    dtype: str
    flops: float


@dataclass(frozen=True, kw_only=True)
class MemoryChoices:
    """Settings from which ``runtime.memory`` chooses, and its value in bytes."""

    limit_bytes: int
    choices: tuple[MemoryChoice, ...]

    def as_dict(self) -> dict[str, object]:
        """Return the limit and the possible settings with the memory that each needs, for JSON."""
        choices = [{"settings": choice.settings, **asdict(choice)} for choice in self.choices]
        return {"limit_bytes": self.limit_bytes, "choices": choices}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Costs of a recipe with one or several methods.

    For samples ``unit`` is "sample", ``local_steps`` is the largest of all users, and there is neither a context nor a
    Table 3. ``note`` says what the numbers leave out. With ``runtime.memory`` the costs are those with the settings
    that it chooses from ``memory``.
    """

    base: BaseCost
    device: str
    users: tuple[str, ...]
    rounds: int
    local_steps: int
    batch_size: int
    context: int
    free_bytes: int
    methods: tuple[MethodCost, ...]
    table3: tuple[Difference, ...]
    unit: str = "token"
    note: str = ""
    memory: MemoryChoices | None = None

    def as_dict(self) -> dict[str, object]:
        """Return nested dictionaries, for JSON.

        Keys are the names of the fields, except ``base``, ``base_parameters``, ``dtype`` and
        ``base_forward_flops_per_token`` (or ``_sample``) of the base, and ``comigs_1g1s_minus_fedavg`` (Table 3).
        ``memory`` is there with ``runtime.memory`` only.
        """
        entries: dict[str, object] = {
            "base": self.base.name,
            "base_parameters": self.base.parameters,
            "dtype": self.base.dtype,
        }
        same_names = (
            "device", "users", "rounds", "local_steps", "batch_size", "context", "free_bytes", "unit", "note",
        )  # fmt: skip
        entries |= {name: getattr(self, name) for name in same_names}
        entries[f"base_forward_flops_per_{self.unit}"] = self.base.flops
        entries["methods"] = [method.as_dict(self.rounds) for method in self.methods]
        entries["comigs_1g1s_minus_fedavg"] = [asdict(column) for column in self.table3]
        if self.memory is not None:
            entries["memory"] = self.memory.as_dict()
        return entries
