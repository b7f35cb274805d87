"""Packed 8-bit weights: what is stored, products against integers in numpy, and those of other processors."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from comingle.models.injection import RoutedMLP
from comingle.models.kernels import expert_mlp
from comingle.models.lora import LoraLinear
from comingle.models.quantised import INTEGERS, PACKED, QuantisedLinear, quantise_linear

SHAPES = [(1, 64, 96), (8, 130, 64), (13, 37, 50), (70, 16, 32)]
"""Tokens, d_out, d_in: whole groups and blocks, and what is left over of them."""
CPU = torch.device("cpu")


def packed_of(weight: Tensor, bias: Tensor | None = None) -> QuantisedLinear:
    return quantise_linear(weight, None if bias is None else nn.Parameter(bias, requires_grad=False), PACKED, CPU)


def blocks_of(values: np.ndarray) -> np.ndarray:
    """Rows as blocks of 32, padded with zeros."""
    rows, width = values.shape
    return np.pad(values, ((0, 0), (0, -width % 32))).reshape(rows, -1, 32)


def by_definition(x: np.ndarray, levels: np.ndarray, scales: np.ndarray, *, fine: bool) -> np.ndarray:
    """The product of inputs ``(n, d_in)``, rounded, with levels ``(d_out, blocks, 32)`` and their scales."""
    inputs = blocks_of(x)
    largest = np.abs(inputs).max(2).astype(np.float32)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    whole = np.rint(inputs * inverse[..., None])
    if fine:
        whole = np.rint((inputs * inverse[..., None] - whole) * 254) / 254 + whole
    sums = np.einsum("nbi,obi->nob", whole.astype(np.float64), levels)
    return (sums * scales * (largest / np.float32(127))[:, None].astype(np.float64)).sum(2)


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize(("n", "d_out", "d_in"), SHAPES)
def test_products_are_those_of_the_rounded_numbers(library: Path, n: int, d_out: int, d_in: int, fine: bool) -> None:
    weight, x, bias = torch.randn(d_out, d_in), torch.randn(n, d_in), torch.randn(d_out)
    x[0, :32] = 0  # a block without a largest number
    linear = packed_of(weight, bias)
    unpacked = linear.unpack().numpy().astype(np.float64)
    blocks = blocks_of(weight.numpy())
    scales = (np.abs(blocks).max(2) / np.float32(127)).astype(np.float64)
    levels = np.rint(blocks_of(unpacked) / scales[..., None]).astype(np.int64)
    assert np.allclose(blocks_of(unpacked), levels * scales[..., None], rtol=1e-6)  # whole numbers times scales
    assert np.abs(levels).max() <= 127
    assert np.abs(blocks_of(unpacked) - blocks).max() <= 0.5001 * scales.max()
    with torch.no_grad():
        got = linear.multiply(x, fine=fine).numpy()
    expected = by_definition(x.numpy(), levels, scales, fine=fine) + bias.numpy()
    assert np.abs(got - expected).max() < 1e-6 * np.abs(expected).max() * d_in**0.5
    error = np.linalg.norm(got - x.numpy() @ unpacked.T - bias.numpy())
    assert error / np.linalg.norm(expected) < (1e-4 if fine else 1e-2)


def whole_numbers(rows: int, width: int) -> Tensor:
    """Numbers from -127 to 127 that packing and rounding keep: each block of 32 has the largest."""
    numbers = torch.randint(-127, 128, (rows, width)).float()
    numbers[:, ::32] = 127
    return numbers


@pytest.mark.parametrize(("n", "d_out", "d_in"), SHAPES)
def test_products_of_whole_numbers_are_exact(library: Path, n: int, d_out: int, d_in: int) -> None:
    weight, x = whole_numbers(d_out, d_in), whole_numbers(n, d_in)
    linear = packed_of(weight)
    assert torch.equal(linear.unpack(), weight)
    with torch.no_grad():
        got = linear.multiply(x, fine=False)
        assert torch.equal(linear(x), got)  # nothing is left to refine
    assert np.array_equal(got.numpy(), x.numpy().astype(np.int64) @ weight.numpy().astype(np.int64).T)


def test_a_token_is_what_it_is_alone(library: Path) -> None:
    """Bit for bit, beside any others and with any number of threads."""
    linear, x = packed_of(torch.randn(100, 96)), torch.randn(77, 96)
    with torch.no_grad():
        together = linear(x)
        for row in (0, 3, 64, 76):
            assert torch.equal(linear(x[row : row + 1])[0], together[row])
        torch.set_num_threads(3)
        assert torch.equal(linear(x), together)
        torch.set_num_threads(1)


def test_large_weights_are_packed_in_parts() -> None:
    weight = torch.randn(2100, 32)
    packed, scales = INTEGERS.pack(weight)
    parts = [INTEGERS.pack(weight[start : start + 1024]) for start in (0, 1024, 2048)]
    assert torch.equal(packed, torch.cat([part for part, _ in parts]))
    assert torch.equal(scales, torch.cat([part for _, part in parts]))
    assert packed.nbytes + scales.nbytes == 2112 * 36  # per 32 weights of 2,112 padded rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_on_packed_weights(library: Path, dtype: torch.dtype) -> None:
    """A linear and a mixture with LoRAs, beside the same modules with unpacked weights."""

    def modules(linear: Any) -> tuple[LoraLinear, RoutedMLP]:
        torch.manual_seed(0)
        weights = {name: torch.randn(64 if name == "down" else 96, 96 if name == "down" else 64) / 8 for name in NAMES}
        layers = {name: linear(weight.to(dtype)) for name, weight in weights.items()}
        torch.manual_seed(1)
        block = RoutedMLP(
            first={"gate": layers["gate"], "up": layers["up"]}, last=layers["down"], act="silu", scale=0.5, mix="output"
        )
        block.factors = {
            name: ((torch.randn(3, 2, 4, w.shape[1]) / 8).to(dtype), (torch.randn(3, 2, 4, w.shape[0]) / 8).to(dtype))
            for name, w in weights.items()
        }
        block.router.weight, block.router.present = torch.randn(3, 2, 64).to(dtype), torch.ones(3, 2, dtype=torch.bool)
        lora = LoraLinear(layers["up"], scale=0.5)
        lora.factors = ((torch.randn(3, 4, 64) / 8).to(dtype), (torch.randn(3, 4, 96) / 8).to(dtype))
        return lora, block

    def plain(weight: Tensor) -> nn.Linear:
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight.data = packed_of(weight).unpack()
        return linear

    x = torch.randn(3, 5, 64).to(dtype)
    with torch.no_grad():
        for ours, theirs in zip(modules(packed_of), modules(plain), strict=True):
            got, expected = ours(x).double(), theirs(x).double()
            assert 0 < float((got - expected).norm() / expected.norm()) < 0.02
    x.requires_grad_()
    for ours, theirs in zip(modules(packed_of), modules(plain), strict=True):  # with a gradient they are unpacked
        assert torch.equal(ours(x), theirs(x))


NAMES = ("gate", "up", "down")
OTHER_PROCESSORS = {
    "no VNNI": ["-march=native", "-mno-avx512vnni", "-mno-avx512f"],
    "no AVX2": ["-march=native", "-mno-avx512f", "-mno-avx2"],
    "no extensions": ["-march=x86-64"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_PROCESSORS)
def test_other_instructions_compute_the_same(
    compiled_once: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = expert_mlp._compiler()
    assert compiler is not None
    flags = [flag for flag in expert_mlp.FLAGS if flag != "-march=native"]
    source = Path(expert_mlp.__file__).with_name("mixture_packed.h")
    (tmp_path / "source.cpp").write_text(f'#include "{source}"')
    command = [compiler, *flags, *OTHER_PROCESSORS[name], str(tmp_path / "source.cpp"), "-o", str(tmp_path / "made.so")]
    subprocess.run(command, check=True)
    assert expert_mlp.enable(compiled_once)
    linear, x = packed_of(torch.randn(100, 96)), torch.randn(13, 96)
    with torch.no_grad():
        expected = linear(x)
        monkeypatch.setattr(expert_mlp, "_library", ctypes.CDLL(str(tmp_path / "made.so")))
        got = linear(x)
    expert_mlp.disable()
    if name == "no extensions":  # without a fused multiply-add
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(got, expected)
