"""Activations against torch and transformers; the elementwise kernels against autograd, written out and compiled."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from comingle.config.settings import AdaptersSection
from comingle.models.adapted import adapt
from comingle.models.injection import ExpertCounts
from comingle.models.kernels import expert_mlp
from comingle.models.kernels.expert_mlp import ACTIVATIONS
from comingle.models.loading import load_base
from comingle.models.loss import softmax_parts

TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_value_and_derivative_are_those_of_torch(name: str) -> None:
    x = (
        torch.cat([torch.linspace(-12, 12, 2001), torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4])])
        .double()
        .requires_grad_()
    )
    expected = TORCH[name](x)
    (slope,) = torch.autograd.grad(expected.sum(), x)
    found, found_slope = ACTIVATIONS[name](x.detach())
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found_slope, slope, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_name_means_the_same_in_transformers(name: str) -> None:
    x = torch.linspace(-12, 12, 2001, dtype=torch.float64)
    # gelu_fast writes sqrt(2 / pi) with ten digits there.
    torch.testing.assert_close(ACTIVATIONS[name](x)[0], ACT2FN[name](x), rtol=1e-9, atol=1e-11)


def test_names_of_other_functions_are_not_taken_for_ours() -> None:
    assert not ACTIVATIONS.keys() & {"quick_gelu", "gelu_10", "relu2", "relu6", "mish", "tanh"}


SHAPE = {"users": 2, "experts": 3, "n": 4, "hidden": 24}
SHARED, HIDDEN = ("users", "n", "hidden"), ("users", "experts", "n", "hidden")


def draw(*axes: str, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn([SHAPE[axis] for axis in axes], dtype=torch.float64).to(dtype)


def inputs(gated: bool, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor, Tensor]:
    """Base products and LoRA terms of one or two linears, gates, and the gradients of the mixture and of ``h``."""
    bases = [draw(*SHARED, dtype=dtype) for _ in range(1 + gated)]
    loras = [draw(*HIDDEN, dtype=dtype) for _ in range(1 + gated)]
    gates = draw("users", "n", "experts").softmax(-1).to(torch.promote_types(dtype, torch.float32))
    return bases, loras, gates, draw(*SHARED, dtype=dtype), draw(*HIDDEN, dtype=dtype)


def run(
    act: Any, bases: list[Tensor], loras: list[Tensor], gates: Tensor, d_mixed: Tensor, d_h: Tensor
) -> tuple[Tensor, ...]:
    """Forward and backward kernels: h, mixture, gradients of LoRA terms, base products, gates. Inputs are copied."""
    h, slopes, mixed = expert_mlp.activate(act, bases, [t.clone() for t in loras], gates, True)
    d_loras, d_bases, d_gates = expert_mlp.activate_backward(h, slopes, gates, d_mixed, d_h.clone())
    return h, mixed, *d_loras, *d_bases, d_gates


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", ["gelu_new", "gelu", "silu", "relu"])
def test_kernels_equal_autograd(name: str, gated: bool) -> None:
    bases, loras, gates, d_mixed, d_h = inputs(gated, torch.float64)
    leaves = [t.clone().requires_grad_() for t in (*loras, *bases, gates)]
    sums = [leaves[i] + leaves[1 + gated + i].unsqueeze(1) for i in range(1 + gated)]
    h = TORCH[name](sums[0]) * (sums[1] if gated else 1)
    mixed = torch.einsum("une,uenh->unh", leaves[-1], h)
    gradients = torch.autograd.grad([mixed, h], leaves, [d_mixed, d_h])
    found = run(ACTIVATIONS[name], bases, loras, gates, d_mixed, d_h)
    torch.testing.assert_close(found, (h.detach(), mixed.detach(), *gradients), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gated", [False, True])
def test_bf16_kernels_are_rounded_once(gated: bool) -> None:
    """bf16 tensors are computed in float32: each result is the float32 one, rounded."""
    act = ACTIVATIONS["silu"]
    bases, loras, gates, d_mixed, d_h = inputs(gated, torch.bfloat16)
    h, slopes, mixed = expert_mlp.activate(act, bases, [t.clone() for t in loras], gates, True)
    wide = expert_mlp.activate(act, [t.float() for t in bases], [t.float() for t in loras], gates, True)
    assert torch.equal(h, wide[0].bfloat16())
    assert torch.equal(mixed, wide[2].bfloat16())
    assert all(torch.equal(mine, other.bfloat16()) for mine, other in zip(slopes, wide[1], strict=True))
    found = expert_mlp.activate_backward(h, slopes, gates, d_mixed, d_h.clone())
    expected = expert_mlp.activate_backward(h.float(), [s.float() for s in slopes], gates, d_mixed.float(), d_h.float())
    for mine, other in zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True):
        assert torch.equal(mine, other.bfloat16())
    assert torch.equal(found[2], expected[2])  # gates have float32 gradients


@pytest.mark.parametrize("gated", [False, True])
def test_without_a_backward_pass_no_slopes_are_kept(gated: bool) -> None:
    bases, loras, gates, d_mixed, d_h = inputs(gated, torch.float64)
    h, slopes, mixed = expert_mlp.activate(ACTIVATIONS["silu"], bases, [t.clone() for t in loras], gates, False)
    assert not slopes
    expected = run(ACTIVATIONS["silu"], bases, loras, gates, d_mixed, d_h)
    assert torch.equal(h, expected[0])
    assert torch.equal(mixed, expected[1])


@pytest.fixture
def fusing() -> Iterator[None]:
    """Compilation on, its failures loud, everything back afterwards."""
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("torch.compile needs a C++ compiler")
    before = expert_mlp.is_fusing()
    with torch._dynamo.config.patch(suppress_errors=False):
        expert_mlp.set_fusing(True)
        torch._dynamo.config.suppress_errors = False
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        yield
        torch._dynamo.reset()
        expert_mlp.set_fusing(before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about itself
@pytest.mark.parametrize("gated", [False, True])
def test_compiled_kernels_equal_written_out_ones(gated: bool, fusing: None) -> None:
    """With jaxtyping's import hook off: Dynamo cannot trace a checked function."""
    if hasattr(expert_mlp.wide, "__wrapped__"):
        pytest.skip("jaxtyping's import hook is on")
    act = ACTIVATIONS["silu" if gated else "gelu_new"]
    given = inputs(gated, torch.float32)
    found = run(act, *given)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    expert_mlp.set_fusing(False)
    torch.testing.assert_close(found, run(act, *given), rtol=1e-5, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_softmax_equals_the_written_out_one(fusing: None) -> None:
    if hasattr(expert_mlp.wide, "__wrapped__"):
        pytest.skip("jaxtyping's import hook is on")
    logits, ids = torch.randn(7, 40), torch.arange(7)
    found = softmax_parts(logits, ids)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    expert_mlp.set_fusing(False)
    torch.testing.assert_close(found, softmax_parts(logits, ids), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_compiled_model_equals_the_written_out_one(family: str, fusing: None) -> None:
    if hasattr(expert_mlp.wide, "__wrapped__"):
        pytest.skip("jaxtyping's import hook is on")
    base = load_base(f"random:{family}?layers=2&dim=32&heads=4", dtype="float32", device="cpu")
    counts = ExpertCounts(generalists=1, specialists=(0, 2))
    windows = torch.randint(0, 256, (2, 2, 7))
    found = []
    for compiled in (True, False):
        model = adapt(base, AdaptersSection(rank=4), counts, routed=True, compiled=compiled)
        torch._dynamo.config.suppress_errors = False
        rows = torch.randn(model.mask().shape, generator=torch.Generator().manual_seed(0)) * 0.1 * model.mask()
        tensors = {name: t.clone().requires_grad_() for name, t in model.layout.views(rows).items()}
        losses, penalties = model.losses(tensors, [0, 1], windows)
        objective = (losses.mean((1, 2)) + 0.3 * penalties).sum()
        found.append((losses.detach(), *torch.autograd.grad(objective, list(tensors.values()))))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 3
    # Or each process would compile anew what holds LoRA's autograd function.
    assert not torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_bypass"]
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)


def test_importing_the_kernels_does_not_load_the_compiler() -> None:
    """It takes two seconds, and it warns, at every start of a run that may not need it."""
    code = "import sys, comingle.models.kernels.expert_mlp; sys.exit('torch._inductor.compile_fx' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "error", "-c", code], check=False).returncode == 0
