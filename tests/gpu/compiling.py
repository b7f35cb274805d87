"""Compile the Triton kernels for a GPU of compute capability 9.0, without one; print the names of those that are."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from comingle.models import gpu
from comingle.models.kernels import triton_kernels

WIDE = {"gates", "last", "d_z", "d_gates", "d_b_0", "d_b_1", "d_a"}
NUMBERS = {"n": "i32", "hidden": "i32", "span": "i32", "scale": "fp32", "z_user": "i64", "z_row": "i32"}
SIZES: dict[str, Any] = {"ACT": 1, "FIRST": 2, "BIASED_0": True, "BIASED_1": True, "EXPERTS": 2, "RANK": 8, "WIDE": 16}
SIZES |= {"TOKENS": gpu.TILE_TOKENS, "COLUMNS": gpu.TILE_COLUMNS, "PRECISION": "tf32"}


def kind_of(parameter: Any) -> str:
    if parameter.is_constexpr:
        return "constexpr"
    return NUMBERS.get(parameter.name, "*fp32" if parameter.name in WIDE else "*bf16")


for function in (triton_kernels.forward, triton_kernels.backward, triton_kernels.backward_factors):
    kinds = {parameter.name: kind_of(parameter) for parameter in function.params}
    numbered = enumerate(function.params)
    # As with sizes and addresses that are multiples of 16, for which code is special.
    even = {(i,): [["tt.divisibility", 16]] for i, one in numbered if kind_of(one)[0] == "*" or one.name == "hidden"}
    made = triton.compile(ASTSource(function, kinds, SIZES, even), target=GPUTarget("cuda", 90, 32))
    assert made.asm["cubin"]
    print(function.__name__)
