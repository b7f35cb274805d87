"""Native code for a few rows of one token each, against plain float64 and against itself; when it is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from comingle.models import decoding
from comingle.models.injection import RoutedMLP
from comingle.models.kernels import expert_mlp
from comingle.models.lora import LoraLinear

SHAPES = [(8, 2, 8, 64, 192), (3, 3, 5, 20, 35), (1, 1, 1, 7, 9), (13, 2, 4, 130, 65)]
"""Rows, experts, rank, width, hidden: whole vectors and blocks, and what is left over of them."""
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Values that bfloat16 has."""
    return (0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16().double()


def close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    error = (got.double() - expected).norm() / expected.norm()
    assert float(error) < ROUNDING[dtype]


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "experts", "rank", "width", "hidden"), SHAPES)
@pytest.mark.slow
def test_a_linear_with_loras(
    library: Path, rows: int, experts: int, rank: int, width: int, hidden: int, bias: bool, dtype: torch.dtype
) -> None:
    x, weight, a, b = (
        drawn(rows, 1, width),
        drawn(hidden, width, seed=1),
        drawn(rows, rank, width),
        drawn(rows, rank, hidden),
    )
    offset = drawn(hidden, seed=2) if bias else torch.zeros(hidden, dtype=torch.float64)
    linear = nn.Linear(width, hidden, bias=bias)
    linear.weight.data = weight
    if bias:
        linear.bias.data = offset
    lora = LoraLinear(linear.to(dtype), scale=0.7)
    lora.factors = (a.to(dtype), b.to(dtype))
    with torch.no_grad():
        got, plain = lora(x.to(dtype)), expert_mlp.RowsLinear(lora.linear)(x.to(dtype))  # type: ignore[arg-type]
    base = torch.einsum("oi,rti->rto", weight, x) + offset
    close(plain, base, dtype)
    close(got, base + 0.7 * torch.einsum("rko,rki,rti->rto", b, a, x), dtype)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("act", ["gelu", "gelu_new", "relu", "silu"])
@pytest.mark.parametrize(("rows", "experts", "rank", "width", "hidden"), SHAPES)
def test_a_mixture(
    library: Path,
    rows: int,
    experts: int,
    rank: int,
    width: int,
    hidden: int,
    act: str,
    gated: bool,
    dtype: torch.dtype,
) -> None:
    names = ["gate", "up"] if gated else ["up"]
    block = RoutedMLP(
        first={name: nn.Linear(width, hidden) for name in names},
        last=nn.Linear(hidden, width, bias=False),
        act=act,
        scale=0.7,
        mix="output",
    ).to(dtype)
    sides = dict.fromkeys(names, (width, hidden)) | {"down": (hidden, width)}
    factors = {
        name: (drawn(rows, experts, rank, i), drawn(rows, experts, rank, o, seed=3)) for name, (i, o) in sides.items()
    }
    block.factors = {name: (a.to(dtype), b.to(dtype)) for name, (a, b) in factors.items()}
    gates = drawn(rows, 1, experts).softmax(-1)
    block.router.forward = lambda x: gates.float()  # type: ignore[method-assign]
    x = drawn(rows, 1, width, seed=4)
    with torch.no_grad():
        got = block(x.to(dtype))
    weights: dict[str, Any] = {name: block.first[name] for name in names} | {"down": block.last}

    def naive(name: str, of: Tensor, row: int, expert: int) -> Tensor:
        a, b = (factor[row, expert] for factor in factors[name])
        bias = 0 if weights[name].bias is None else weights[name].bias.double()
        return weights[name].weight.double() @ of + bias + 0.7 * (b.T @ (a @ of))

    expected = torch.zeros(rows, 1, width, dtype=torch.float64)
    for row in range(rows):
        for expert in range(experts):
            h = expert_mlp.ACTIVATIONS[act](naive(names[0], x[row, 0], row, expert))[0]
            h = h * naive("up", x[row, 0], row, expert) if gated else h
            expected[row, 0] += gates[row, 0, expert] * naive("down", h, row, expert)
    close(got, expected.detach(), dtype)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_a_row_is_what_it_is_alone(library: Path, turned: bool, dtype: torch.dtype) -> None:
    """Bit for bit, in whatever company and with however many threads; and close to float64."""
    rows = 23  # whole blocks of every size and a row
    x, a, b = drawn(rows, 1, 50), drawn(rows, 4, 50), drawn(rows, 4, 91)
    weight = drawn(50, 91).t() if turned else drawn(91, 50)
    expected = torch.einsum("oi,rti->rto", weight, x) + 0.5 * torch.einsum("rko,rki,rti->rto", b, a, x)
    x, a, b, weights = x.to(dtype), a.to(dtype), b.to(dtype), (weight.to(dtype), None)
    with torch.no_grad():
        together = expert_mlp.linear(weights, x, (a, b), 0.5)
        for count in range(1, rows):
            some = slice(rows - count, rows)
            assert torch.equal(expert_mlp.linear(weights, x[some], (a[some], b[some]), 0.5), together[some])
        torch.set_num_threads(3)
        assert torch.equal(expert_mlp.linear(weights, x, (a, b), 0.5), together)
        torch.set_num_threads(1)
    for row in range(rows):
        close(together[row], expected[row], dtype)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_weights_that_lie_turned(library: Path, dtype: torch.dtype) -> None:
    """As GPT-2 has them; whole chunks of outputs, and what is left over of the last."""
    x, weight, bias = drawn(6, 1, 33), drawn(33, 150, seed=1), drawn(150, seed=2)
    with torch.no_grad():
        got = expert_mlp.linear((weight.to(dtype).t(), bias.to(dtype)), x.to(dtype))
    close(got, x @ weight + bias, dtype)


def test_texts_of_one_user_share_its_adapters(library: Path) -> None:
    """Bit for bit as if each text had a copy of them."""
    x, a, b = drawn(6, 1, 33).float(), drawn(2, 4, 33).float(), drawn(2, 4, 70, seed=1).float()
    linear = nn.Linear(33, 70)
    linear.weight.data = drawn(70, 33).float()
    lora = LoraLinear(linear, scale=0.5)
    block = RoutedMLP(first={"up": linear}, last=nn.Linear(70, 33), act="gelu", scale=0.5, mix="output")
    factors = {"up": (a, b), "down": (drawn(2, 4, 70).float(), drawn(2, 4, 33, seed=3).float())}
    gates = drawn(6, 2).softmax(-1).float()
    with torch.no_grad():
        got = []
        for copies in (1, 3):
            lora.factors = (a.repeat_interleave(copies, 0), b.repeat_interleave(copies, 0))
            wide = {
                n: [f.unflatten(1, (2, 2)).repeat_interleave(copies, 0) for f in pair] for n, pair in factors.items()
            }
            block.factors = {n: (of[0], of[1]) for n, of in wide.items()}
            block.router.forward = lambda x: gates.view(*x.shape[:2], 2)  # type: ignore[method-assign]
            got.append((lora(x), block(x)))
    for one, other in zip(*got, strict=True):
        assert torch.equal(one, other)


def supports(x: torch.Tensor, users: int, weight: torch.Tensor) -> bool:
    return expert_mlp.fits_rows(x, users) and expert_mlp.fits_weight(weight, x)


def test_what_it_is_not_for(library: Path) -> None:
    x, weight = drawn(4, 1, 8).float(), drawn(8, 8).float()
    assert not supports(x, 4, weight)  # a gradient may be wanted
    with torch.no_grad():
        assert supports(x, 4, weight)
        assert supports(x, 2, weight)  # two texts of each user
        assert not supports(x.bfloat16(), 2, weight.bfloat16())
        assert not supports(x.view(2, 2, 8), 2, weight)  # two tokens of each text
        assert not supports(x, 4, drawn(8, 16).float()[:, ::2])
        assert not supports(x, 4, weight.bfloat16())
        assert not supports(x.double(), 4, weight.double())
        assert not supports(torch.zeros(65, 1, 8), 65, weight)
        expert_mlp.disable()
        assert not supports(x, 4, weight)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(("heads", "groups", "head"), [(6, 2, 40), (5, 1, 64), (4, 4, 8)])
def test_a_prompt_read_at_once_is_as_read_token_by_token(
    library: Path, heads: int, groups: int, head: int, dtype: torch.dtype
) -> None:
    """Bit for bit: heads with the same keys are computed together only for many rows. And close to float32."""
    config = LlamaConfig(
        vocab_size=50, hidden_size=heads * head, intermediate_size=70, num_hidden_layers=2, head_dim=head,
        num_attention_heads=heads, num_key_value_heads=groups, initializer_range=0.1,
    )  # fmt: skip
    network = LlamaForCausalLM(config).to(dtype).eval()
    ids, n = torch.arange(45).unsqueeze(0), 45
    with torch.inference_mode():
        native = decoding.NativeNetwork(network, 1)
        whole, parts = DynamicCache(), DynamicCache()
        logits = native.read(ids, torch.arange(n).unsqueeze(0), [0], whole)
        for i in range(n):
            last = native.read(ids[:, i : i + 1], torch.tensor([[i]]), [0], parts)
        assert torch.equal(logits, last)
        assert torch.equal(whole.layers[1].values, parts.layers[1].values)  # type: ignore[arg-type]
        expected = network.float()(ids).logits[:, -1].double()
    error = (logits.double() - expected).norm() / expected.norm()
    assert float(error) < (1e-4 if dtype == torch.float32 else 5e-2)


def test_parts_of_a_prompt_are_read_into_memory_for_all_of_it(library: Path) -> None:
    """Bit for bit as the prompt at once."""
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=70, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1,
    )  # fmt: skip
    native = decoding.NativeNetwork(LlamaForCausalLM(config).eval(), 1)
    ids, positions = torch.arange(45).unsqueeze(0), torch.arange(45).unsqueeze(0)
    whole, cache = DynamicCache(), DynamicCache()
    addresses, logits = set[int](), list[Tensor | None]()
    with torch.inference_mode():
        expected = native.read(ids, positions, [0], whole)
        for start in range(0, 45, 20):
            tokens = slice(start, start + 20)
            part = native.make_prompt_batch(ids[:, tokens], positions[:, tokens], cache, num_left=45 - start)
            native._run([part])
            addresses.add(cache.layers[0].keys.data_ptr())  # type: ignore[union-attr]
            logits.append(part.logits)
    assert len(addresses) == 1
    assert logits[:-1] == [None, None]
    assert torch.equal(logits[-1], expected)  # type: ignore[arg-type]
    assert torch.equal(cache.layers[1].values, whole.layers[1].values)  # type: ignore[arg-type]
