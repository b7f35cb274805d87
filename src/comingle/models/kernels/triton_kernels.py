"""Triton kernels for the hidden layer of a mixture of LoRA experts; the formulas are at the top of ``mixture.cpp``.

A program computes a tile: some tokens of a user times some columns of the hidden width. Sums over columns are written
as one partial sum per chunk of columns, sums over tokens as one per range of tokens, so the order of additions depends
on sizes alone. Tiles are multiplied in the tensors' number format and accumulated in float32. Ranks are padded with
zeros to the minimum size of a tensor-core product.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run on the CPU in Triton's interpreter (``TRITON_INTERPRET=1``)."""
_WIDENED = tl.constexpr(INTERPRETED)


@triton.jit
def _dot(left, right, PRECISION: tl.constexpr):
    """Return the product of two tiles in float32.

    Args:
        left: Left tile.
        right: Right tile.
        PRECISION: Rounding of float32 inputs on tensor cores: "ieee" (none) or "tf32".
    """
    if _WIDENED:  # in Triton's interpreter (for tests), which multiplies bfloat16 as integers
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, input_precision=PRECISION)


@triton.jit
def _activation(x, ACT: tl.constexpr):
    """Return value and derivative of an activation, by the formulas of :mod:`~comingle.models.kernels.expert_mlp`.

    Args:
        x: Input of the activation.
        ACT: Code of the activation: 0 for GELU with tanh, 1 for GELU with erf, 2 for SiLU, else ReLU.
    """
    if ACT == 0:  # gelu_tanh, with 2 sqrt(2 / pi) and 3 * 0.044715
        square = x * x
        s = tl.sigmoid(1.5957691216057308 * x * (1 + 0.044715 * square))
        value = x * s
        slope = s + value * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * square)
    elif ACT == 1:  # gelu_erf, with 1 / sqrt(2) and 1 / sqrt(2 pi)
        cdf = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        value = x * cdf
        slope = cdf + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    elif ACT == 2:  # silu
        s = tl.sigmoid(x)
        value = x * s
        slope = s + value * (1 - s)
    else:  # relu; propagates NaN
        value = tl.where(x < 0, 0.0, x)
        slope = tl.where(x > 0, 1.0, 0.0)
    return value, slope


@triton.jit
def _load_base(base, bias, offsets, inside, c, hidden, BIASED: tl.constexpr):
    """Load a tile of the base's pre-activations (tokens times hidden columns) in float32, and add the bias.

    Args:
        base: Address of the pre-activations.
        bias: Address of the bias.
        offsets: Offset of each entry of the tile from ``base``.
        inside: Mask of the entries within the tensor.
        c: Indices of the tile's columns.
        hidden: Number of columns of the tensor.
        BIASED: Whether there is a bias.
    """
    tile = tl.load(base + offsets, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        tile += tl.load(bias + c, mask=c < hidden, other=0.0).to(tl.float32)[None, :]
    return tile


@triton.jit
def _load_columns(start, row, valid, first_column, RANK: tl.constexpr, PADDED_RANK: tl.constexpr):
    """Load ``RANK`` columns of some rows from ``first_column`` on, padded with zeros to ``PADDED_RANK`` columns.

    Args:
        start: Address of the tensor.
        row: Offset of each row from that address.
        valid: Mask of the rows within the tensor.
        first_column: Index of the first column to load.
        RANK: Number of columns to load.
        PADDED_RANK: Number of columns with padding, a power of two.
    """
    r = tl.arange(0, PADDED_RANK)
    columns = first_column + r
    addresses = start + row[:, None] + columns[None, :]
    is_inside = valid[:, None] & (r < RANK)[None, :]
    return tl.load(addresses, mask=is_inside, other=0.0)


@triton.jit
def _load_factor(factor, expert, c, hidden, RANK: tl.constexpr, PADDED_RANK: tl.constexpr):
    """Load some columns of one expert's factor ``(rank, hidden)``, padded with zeros to ``PADDED_RANK`` rows.

    Args:
        factor: Address of the factors of all experts of all users.
        expert: Index of the expert among those of all users, ``user * experts + j``.
        c: Indices of the columns.
        hidden: Number of columns of a factor.
        RANK: Number of rows of a factor.
        PADDED_RANK: Number of rows with padding, a power of two.
    """
    r = tl.arange(0, PADDED_RANK)
    offsets = (expert * RANK + r)[:, None] * hidden + c[None, :]
    is_inside = (r < RANK)[:, None] & (c < hidden)[None, :]
    return tl.load(factor + offsets, mask=is_inside, other=0.0)


@triton.jit
def forward(
    base_0, base_1, bias_0, bias_1, z, gates, b_0, b_1, a, mixed, partial_sums,
    n, hidden, scale, z_user_stride, z_token_stride,
    ACT: tl.constexpr, NUM_FIRST: tl.constexpr, BIASED_0: tl.constexpr, BIASED_1: tl.constexpr, EXPERTS: tl.constexpr,
    RANK: tl.constexpr, PADDED_RANK: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute ``mixed = sum_j p_j h_j`` over experts j, and partial sums of ``h_j A_j^T`` for the last layer's LoRA.

    h_j are an expert's hidden activations, p_j its probability. ``h_j A_j^T`` is a sum over hidden columns; each
    program writes the sum over its chunk of columns, and the caller adds them up.

    In a gated MLP layer 0 is gate and layer 1 is up. In a plain MLP layer 0 is up, and there is no layer 1.

    Grid: chunks of hidden columns, blocks of tokens, users.

    Args:
        base_0: The base's pre-activations of layer 0.
        base_1: The base's pre-activations of layer 1; any address in plain MLPs.
        bias_0: Bias of layer 0; any address without bias.
        bias_1: Bias of layer 1; any address without bias.
        z: Products of the input with A of layers 0 and 1, ``(users, n, NUM_FIRST * experts * rank)``.
        gates: The experts' probabilities, ``(users, n, experts)``.
        b_0: B of layer 0.
        b_1: B of layer 1.
        a: A of the last layer.
        mixed: Output: the mixture of hidden activations, ``(users, n, hidden)``.
        partial_sums: Output: the partial sums of ``h_j A_j^T``, ``(chunks, users, n, experts * rank)``.
        n: Tokens of a user.
        hidden: Hidden width.
        scale: LoRA scale.
        z_user_stride: Stride of ``z`` between users.
        z_token_stride: Stride of ``z`` between tokens.
        ACT: Code of the activation.
        NUM_FIRST: Number of layers that read the MLP's input: 2 in gated MLPs, else 1.
        BIASED_0: Whether layer 0 has a bias.
        BIASED_1: Whether layer 1 has a bias.
        EXPERTS: Number of experts.
        RANK: LoRA rank.
        PADDED_RANK: The rank padded to a power of two that tensor cores support.
        TOKENS: Tokens of a tile.
        COLUMNS: Columns of a tile.
        PRECISION: Input precision of products.
    """
    # This program computes a tile: tokens t of one user times hidden columns c. Where the tile reaches over the end,
    # nothing is loaded or stored.
    chunk = tl.program_id(0)
    user = tl.program_id(2).to(tl.int64)
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    c = chunk * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.arange(0, PADDED_RANK)
    valid = t < n
    token = user * n + t  # index among the tokens of all users
    inside = valid[:, None] & (c < hidden)[None, :]
    offsets = token[:, None] * hidden + c[None, :]
    row = user * z_user_stride + t.to(tl.int64) * z_token_stride  # offset in `z`
    pre_0 = _load_base(base_0, bias_0, offsets, inside, c, hidden, BIASED_0)
    pre_1 = pre_0
    if NUM_FIRST == 2:
        pre_1 = _load_base(base_1, bias_1, offsets, inside, c, hidden, BIASED_1)
    mixture = tl.zeros((TOKENS, COLUMNS), tl.float32)
    num_users = tl.num_programs(2)
    sums_row = (chunk * num_users * n + token) * (EXPERTS * RANK)  # offset in `partial_sums`
    for j in tl.static_range(EXPERTS):
        expert = user * EXPERTS + j  # index of expert j among the experts of all users
        z_0 = _load_columns(z, row, valid, j * RANK, RANK, PADDED_RANK)
        factor_0 = _load_factor(b_0, expert, c, hidden, RANK, PADDED_RANK)
        h, _ = _activation(pre_0 + scale * _dot(z_0, factor_0, PRECISION), ACT)
        if NUM_FIRST == 2:
            z_1 = _load_columns(z, row, valid, (EXPERTS + j) * RANK, RANK, PADDED_RANK)
            factor_1 = _load_factor(b_1, expert, c, hidden, RANK, PADDED_RANK)
            h *= pre_1 + scale * _dot(z_1, factor_1, PRECISION)
        p = tl.load(gates + token * EXPERTS + j, mask=valid, other=0.0)
        mixture += p[:, None] * h
        factor_last = _load_factor(a, expert, c, hidden, RANK, PADDED_RANK)
        product = _dot(h.to(factor_last.dtype), tl.trans(factor_last), PRECISION)
        addresses = partial_sums + sums_row[:, None] + (j * RANK + r)[None, :]
        tl.store(addresses, product, mask=valid[:, None] & (r < RANK)[None, :])
    tl.store(mixed + offsets, mixture.to(mixed.dtype.element_ty), mask=inside)


@triton.jit
def _expert_backward(
    pre_0, pre_1, d_mixed, z_0, z_1, d_gated, p, b_0, b_1, a, scale,
    ACT: tl.constexpr, NUM_FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Recompute the hidden activations h of one expert, and return them with gradients.

    In a gated MLP ``h = act(gate) up`` with ``gate = pre_0 + scale z_0 b_0`` and ``up = pre_1 + scale z_1 b_1``; in a
    plain MLP ``h = act(pre_0 + scale z_0 b_0)``.

    Args: Tiles of one expert.

        pre_0: The base's pre-activations of layer 0 (gate, or up in plain MLPs), tokens times hidden columns.
        pre_1: The base's pre-activations of layer 1 (up in gated MLPs).
        d_mixed: Gradient of the mixture ``sum_j p_j h_j``.
        z_0: Products of the input with A of layer 0, tokens times ranks.
        z_1: Products of the input with A of layer 1.
        d_gated: Gradient of ``p scale h a^T``, tokens times ranks.
        p: The expert's probability for each token.
        b_0: B of layer 0, ranks times hidden columns.
        b_1: B of layer 1.
        a: A of the last layer, ranks times hidden columns.
        scale: LoRA scale.
        ACT: Code of the activation.
        NUM_FIRST: Number of layers that read the MLP's input: 2 in gated MLPs, else 1.
        PRECISION: Input precision of products.

    Returns:
        h, the gradients of ``pre_0`` and ``pre_1`` (not to be used in plain MLPs), and the gradient of the product
        ``h a^T``.
    """
    value, slope = _activation(pre_0 + scale * _dot(z_0, b_0, PRECISION), ACT)
    d_product = (scale * p[:, None] * d_gated.to(tl.float32)).to(a.dtype)
    d_h = p[:, None] * d_mixed + _dot(d_product, a, PRECISION)
    h = value
    d_pre_0 = d_h * slope
    d_pre_1 = d_h
    if NUM_FIRST == 2:
        up = pre_1 + scale * _dot(z_1, b_1, PRECISION)
        h = value * up
        d_pre_0 = d_pre_0 * up
        d_pre_1 = d_h * value
    return h, d_pre_0, d_pre_1, d_product


@triton.jit
def backward(
    base_0, base_1, bias_0, bias_1, z, gates, b_0, b_1, a, d_mixed, d_gated, d_base_0, d_base_1, d_z, d_gates,
    n, hidden, scale, z_user_stride, z_token_stride,
    ACT: tl.constexpr, NUM_FIRST: tl.constexpr, BIASED_0: tl.constexpr, BIASED_1: tl.constexpr, EXPERTS: tl.constexpr,
    RANK: tl.constexpr, PADDED_RANK: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients with respect to the base's pre-activations, ``z`` and the gates.

    The gradients of ``z`` and of the gates are sums over hidden columns; each program writes the sum over its chunk of
    columns, and the caller adds them up. The caller also multiplies the gradient of ``z`` by ``scale``, and adds the
    gradient of the gates through the last layer's LoRA, ``<d_gated_j, z_last_j>``.

    Grid: chunks of hidden columns, blocks of tokens, users.

    Args: Those of :func:`forward` without its outputs, and

        d_mixed: Gradient of the mixture ``sum_j p_j h_j``, ``(users, n, hidden)``.
        d_gated: Gradient of ``p_j z_last_j`` with ``z_last_j = scale h_j A_j^T``, ``(users, n, experts * rank)``.
        d_base_0: Output: gradient of ``base_0``.
        d_base_1: Output: gradient of ``base_1``; not written in plain MLPs.
        d_z: Output: partial sums of the gradient of ``z`` without the factor ``scale``, ``(chunks, users, n,
            NUM_FIRST * experts * rank)``.
        d_gates: Output: partial sums of ``<d_mixed, h_j>``, ``(chunks, users, n, experts)``.
    """
    # This program computes a tile: tokens t of one user times hidden columns c.
    chunk = tl.program_id(0)
    user = tl.program_id(2).to(tl.int64)
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    c = chunk * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.arange(0, PADDED_RANK)
    valid = t < n
    token = user * n + t  # index among the tokens of all users
    inside = valid[:, None] & (c < hidden)[None, :]
    offsets = token[:, None] * hidden + c[None, :]
    row = user * z_user_stride + t.to(tl.int64) * z_token_stride  # offset in `z`
    d_gated_row = token * (EXPERTS * RANK)  # offset in `d_gated`
    pre_0 = _load_base(base_0, bias_0, offsets, inside, c, hidden, BIASED_0)
    pre_1 = pre_0
    if NUM_FIRST == 2:
        pre_1 = _load_base(base_1, bias_1, offsets, inside, c, hidden, BIASED_1)
    d_mixture = tl.load(d_mixed + offsets, mask=inside, other=0.0).to(tl.float32)
    d_pre_0_total = tl.zeros((TOKENS, COLUMNS), tl.float32)  # over experts
    d_pre_1_total = tl.zeros((TOKENS, COLUMNS), tl.float32)
    num_users = tl.num_programs(2)
    sums_row = chunk * num_users * n + token  # row of the partial sums
    in_rank = valid[:, None] & (r < RANK)[None, :]
    for j in tl.static_range(EXPERTS):
        expert = user * EXPERTS + j  # index of expert j among the experts of all users
        p = tl.load(gates + token * EXPERTS + j, mask=valid, other=0.0)
        factor_0 = _load_factor(b_0, expert, c, hidden, RANK, PADDED_RANK)
        factor_1 = _load_factor(b_1, expert, c, hidden, RANK, PADDED_RANK)
        factor_last = _load_factor(a, expert, c, hidden, RANK, PADDED_RANK)
        z_0 = _load_columns(z, row, valid, j * RANK, RANK, PADDED_RANK)
        first_column_1 = ((NUM_FIRST - 1) * EXPERTS + j) * RANK  # in plain MLPs z_1 is z_0, and not used
        z_1 = _load_columns(z, row, valid, first_column_1, RANK, PADDED_RANK)
        d_gated_j = _load_columns(d_gated, d_gated_row, valid, j * RANK, RANK, PADDED_RANK)
        h, d_pre_0, d_pre_1, _ = _expert_backward(
            pre_0, pre_1, d_mixture, z_0, z_1, d_gated_j, p, factor_0, factor_1, factor_last,
            scale, ACT, NUM_FIRST, PRECISION,
        )  # fmt: skip
        tl.store(d_gates + sums_row * EXPERTS + j, tl.sum(d_mixture * h, 1), mask=valid)
        d_pre_0_total += d_pre_0
        addresses = d_z + (sums_row * (NUM_FIRST * EXPERTS) + j)[:, None] * RANK + r[None, :]
        d_z_0 = _dot(d_pre_0.to(factor_0.dtype), tl.trans(factor_0), PRECISION)
        tl.store(addresses, d_z_0, mask=in_rank)
        if NUM_FIRST == 2:
            d_pre_1_total += d_pre_1
            d_z_1 = _dot(d_pre_1.to(factor_1.dtype), tl.trans(factor_1), PRECISION)
            tl.store(addresses + EXPERTS * RANK, d_z_1, mask=in_rank)
    tl.store(d_base_0 + offsets, d_pre_0_total.to(d_base_0.dtype.element_ty), mask=inside)
    if NUM_FIRST == 2:
        tl.store(d_base_1 + offsets, d_pre_1_total.to(d_base_1.dtype.element_ty), mask=inside)


@triton.jit
def backward_factors(
    base_0, base_1, bias_0, bias_1, z, gates, b_0, b_1, a, d_mixed, d_gated, d_b_0, d_b_1, d_a,
    n, hidden, scale, z_user_stride, z_token_stride, span,
    ACT: tl.constexpr, NUM_FIRST: tl.constexpr, BIASED_0: tl.constexpr, BIASED_1: tl.constexpr, EXPERTS: tl.constexpr,
    RANK: tl.constexpr, PADDED_RANK: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the LoRA factors: B of the first layers and A of the last.

    The gradients are sums over all tokens; each program writes the sum over its range of ``span`` tokens, and the
    caller adds them up.

    Grid: chunks of hidden columns, ranges of ``span`` tokens, experts of all users.

    Args: Those of :func:`backward` without its outputs, and

        d_b_0: Output: partial sums of the gradient of ``b_0``, ``(ranges, users, experts, rank, hidden)``.
        d_b_1: Output: partial sums of the gradient of ``b_1``, of the same shape; not written in plain MLPs.
        d_a: Output: partial sums of the gradient of ``a``, of the same shape.
        span: Tokens of a range.
    """
    # This program sums over a range of one user's tokens, tile by tile, for expert j and hidden columns c.
    token_range = tl.program_id(1)
    expert = tl.program_id(2).to(tl.int64)  # index among the experts of all users
    user = expert // EXPERTS
    j = expert % EXPERTS
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.arange(0, PADDED_RANK)
    factor_0 = _load_factor(b_0, expert, c, hidden, RANK, PADDED_RANK)
    factor_1 = _load_factor(b_1, expert, c, hidden, RANK, PADDED_RANK)
    factor_last = _load_factor(a, expert, c, hidden, RANK, PADDED_RANK)
    sum_b_0 = tl.zeros((PADDED_RANK, COLUMNS), tl.float32)
    sum_b_1 = tl.zeros((PADDED_RANK, COLUMNS), tl.float32)
    sum_a = tl.zeros((PADDED_RANK, COLUMNS), tl.float32)
    for start in range(token_range * span, tl.minimum(n, token_range * span + span), TOKENS):
        t = start + tl.arange(0, TOKENS)
        valid = t < n
        token = user * n + t  # index among the tokens of all users
        inside = valid[:, None] & (c < hidden)[None, :]
        offsets = token[:, None] * hidden + c[None, :]
        row = user * z_user_stride + t.to(tl.int64) * z_token_stride  # offset in `z`
        pre_0 = _load_base(base_0, bias_0, offsets, inside, c, hidden, BIASED_0)
        pre_1 = pre_0
        if NUM_FIRST == 2:
            pre_1 = _load_base(base_1, bias_1, offsets, inside, c, hidden, BIASED_1)
        d_mixture = tl.load(d_mixed + offsets, mask=inside, other=0.0).to(tl.float32)
        z_0 = _load_columns(z, row, valid, j * RANK, RANK, PADDED_RANK)
        first_column_1 = ((NUM_FIRST - 1) * EXPERTS + j) * RANK  # in plain MLPs z_1 is z_0, and not used
        z_1 = _load_columns(z, row, valid, first_column_1, RANK, PADDED_RANK)
        d_gated_j = _load_columns(d_gated, token * (EXPERTS * RANK), valid, j * RANK, RANK, PADDED_RANK)
        p = tl.load(gates + token * EXPERTS + j, mask=valid, other=0.0)
        h, d_pre_0, d_pre_1, d_product = _expert_backward(
            pre_0, pre_1, d_mixture, z_0, z_1, d_gated_j, p, factor_0, factor_1, factor_last,
            scale, ACT, NUM_FIRST, PRECISION,
        )  # fmt: skip
        sum_b_0 += _dot(tl.trans(z_0), d_pre_0.to(z_0.dtype), PRECISION)
        sum_a += _dot(tl.trans(d_product), h.to(d_product.dtype), PRECISION)
        if NUM_FIRST == 2:
            sum_b_1 += _dot(tl.trans(z_1), d_pre_1.to(z_1.dtype), PRECISION)
    num_experts = tl.num_programs(2)  # of all users
    rows = (token_range * num_experts + expert) * RANK + r  # of the partial sums
    offsets_of_sums = rows[:, None] * hidden + c[None, :]
    mask = (r < RANK)[:, None] & (c < hidden)[None, :]
    tl.store(d_b_0 + offsets_of_sums, sum_b_0 * scale, mask=mask)
    tl.store(d_a + offsets_of_sums, sum_a, mask=mask)
    if NUM_FIRST == 2:
        tl.store(d_b_1 + offsets_of_sums, sum_b_1 * scale, mask=mask)
