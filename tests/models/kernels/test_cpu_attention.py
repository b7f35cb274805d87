"""Native causal attention against softmax written out in float64; where a family's own attention is called instead."""

from __future__ import annotations

import math
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from comingle.config.settings import AdaptersSection
from comingle.models.adapted import AdaptedModel, adapt
from comingle.models.injection import ExpertCounts
from comingle.models.kernels import cpu, expert_mlp
from comingle.models.kernels import expert_mlp as mixtures
from comingle.models.loading import load_base
from comingle.models.random_bases import FAMILIES

DTYPES = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
"""Relative errors of whole tensors that rounding explains."""


def heads(batch: int, heads: int, groups: int, n: int, width: int) -> list[Tensor]:
    """q, k, v and what reaches the output, laid out as a fused projection gives them."""
    fused = torch.randn(batch, n, (heads + 2 * groups) * width).split(
        [heads * width, groups * width, groups * width], 2
    )
    tensors = [t.unflatten(2, (-1, width)).transpose(1, 2) for t in fused]
    return [*tensors, torch.randn(batch, heads, n, width)]


def written_out(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    times = q.shape[1] // k.shape[1]
    scores = scale * q @ k.repeat_interleave(times, 1).mT
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -math.inf).softmax(-1) @ v.repeat_interleave(times, 1)


def solve(function: Any, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def own(scale: float) -> Any:
    return lambda q, k, v: cpu.causal_attention(q, k, v, scale)[0]


def check(given: list[Tensor], dtype: torch.dtype, scale: float = 0.4, times: float = 1.0) -> None:
    rounded = [t.to(dtype) for t in given]
    found = solve(own(scale), *rounded)
    wanted = solve(lambda q, k, v: written_out(q, k, v, scale), *[t.double() for t in rounded])
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == dtype
        assert (one.double() - other).norm() <= times * DTYPES[dtype] * other.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [2, 3, 16, 31, 32, 33, 64, 100, 129])
@pytest.mark.parametrize("width", [7, 8, 16, 64, 80])
def test_sizes_that_fill_no_block(n: int, width: int, dtype: torch.dtype, library: None) -> None:
    check(heads(2, 2, 2, n, width), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "groups"), [(4, 2), (6, 1), (3, 3)])
def test_heads_that_share_keys(count: int, groups: int, dtype: torch.dtype, library: None) -> None:
    check(heads(3, count, groups, 70, 32), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores(dtype: torch.dtype, library: None) -> None:
    """Exponentials of the scores themselves would overflow; scores are rounded as they are large."""
    check([12 * t for t in heads(1, 2, 2, 50, 16)], dtype, scale=0.4, times=20)


@pytest.mark.parametrize("dtype", DTYPES)
def test_later_tokens_change_nothing(dtype: torch.dtype, library: None) -> None:
    given = [t.to(dtype) for t in heads(1, 2, 2, 77, 24)]
    other = [t.clone() for t in given]
    for t in other[:3]:
        t[:, :, 40:] = torch.randn_like(t[:, :, 40:])
    for t in (given[3], other[3]):
        t[:, :, 40:] = 0
    for one, two in zip(solve(own(1.0), *given), solve(own(1.0), *other), strict=True):
        assert torch.equal(one[:, :, :40], two[:, :, :40])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_head_is_the_same_beside_others_and_with_any_number_of_threads(dtype: torch.dtype, library: None) -> None:
    given = [t.to(dtype) for t in heads(3, 4, 2, 45, 16)]
    alone = solve(own(1.0), *[t[1:2] for t in given])
    torch.set_num_threads(2)
    together = solve(own(1.0), *given)
    assert all(torch.equal(one, other[1:2]) for one, other in zip(alone, together, strict=True))


def test_a_number_that_is_none_arrives(library: None) -> None:
    q, k, v, d_out = heads(1, 1, 1, 40, 16)
    q[0, 0, 20, 3] = math.nan
    found = solve(own(1.0), q, k, v, d_out)[0]
    assert torch.equal(found.isnan().any(-1)[0, 0], torch.arange(40) == 20)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names an x86-64 level")
@pytest.mark.parametrize("processor", ["x86-64-v3", "x86-64-v2"])
def test_processors_without_wide_registers(processor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_mlp, "FLAGS", [*expert_mlp.FLAGS, f"-march={processor}"])  # the last one counts
    monkeypatch.setattr(cpu, "_library", None)
    if not cpu.enable(tmp_path):
        pytest.skip("no C++ compiler that makes the native code")
    for dtype in DTYPES:
        for n, width in [(3, 7), (100, 64), (33, 8)]:
            check(heads(2, 4, 2, n, width), dtype)


# ---------------------------------------------------------------- in models


def model_of(family: str, how: str, **options: Any) -> AdaptedModel:
    grouped = "&kv_heads=2" if FAMILIES[family].grouped else ""
    base = load_base(f"random:{family}?layers=2&dim=32&heads=4{grouped}", dtype="float32", device="cpu", attention=how)
    for name, value in options.items():
        setattr(base.model.config, name, value)
    counts = ExpertCounts(generalists=1, specialists=(1,))
    return adapt(base, AdaptersSection(), counts, routed=True, compiled=False, native_code=True)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    call = cpu.causal_attention
    monkeypatch.setattr(cpu, "causal_attention", lambda *args: calls.append(1) or call(*args))
    return calls


def logits(model: AdaptedModel, ids: Tensor, **options: Any) -> Tensor:
    rows = dict(model.layout.views(torch.zeros(model.mask().shape)))
    model.adapters.bind(rows, [0])
    with torch.no_grad():
        return model.network(ids, use_cache=False, **options).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_as_with_its_own_attention(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(0, 256, (3, 19))
    padding = torch.ones_like(ids)
    padding[1, :5] = 0
    calls = counted(monkeypatch)
    ours = model_of(family, "auto")
    found = [logits(ours, ids), logits(ours, ids, attention_mask=padding)]
    capped = family == "gemma2"  # its scores are capped, which only its own attention does
    assert len(calls) == (0 if capped else 2)  # two layers, without padding alone
    plain = model_of(family, "eager")
    torch.testing.assert_close(found[0], logits(plain, ids), rtol=1e-5, atol=1e-5)
    theirs = logits(plain, ids, attention_mask=padding)
    seen = padding.bool()
    torch.testing.assert_close(found[1][seen], theirs[seen], rtol=1e-5, atol=1e-5)
    assert len(calls) == (0 if capped else 2)


def test_without_native_code_it_is_the_own_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after another model, for which the code was switched off."""
    calls = counted(monkeypatch)
    ids = torch.randint(0, 256, (2, 19))
    model = model_of("llama", "auto")
    mixtures.disable()
    torch.testing.assert_close(logits(model, ids), logits(model_of("llama", "eager"), ids), rtol=1e-5, atol=1e-5)
    assert not calls


@pytest.mark.parametrize("says", [None, True, False])
def test_a_module_that_does_not_say_is_causal(says: bool | None, library: None) -> None:
    """As transformers' other attentions take it; what is not causal has no mask at all."""
    from transformers.models.llama import modeling_llama

    module = torch.nn.Linear(1, 1)
    module.__class__ = type("Attention", (torch.nn.Linear,), {"__module__": modeling_llama.__name__})
    module.num_key_value_groups = 1  # type: ignore[assignment]
    if says is not None:
        module.is_causal = says  # type: ignore[assignment]
    q, k, v, _ = heads(1, 2, 2, 9, 16)
    found = cpu.attend(module, q, k, v, None, scaling=0.3)[0].transpose(1, 2)
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.3)
    torch.testing.assert_close(found, whole if says is False else written_out(q, k, v, 0.3))


def test_windows_that_are_shorter_than_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    ids = torch.randint(0, 256, (2, 19))
    found = logits(model_of("mistral", "auto", sliding_window=4), ids)
    assert not calls
    torch.testing.assert_close(found, logits(model_of("mistral", "eager", sliding_window=4), ids))
    assert (found - logits(model_of("mistral", "eager", sliding_window=40), ids)).abs().max() > 1e-4


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_answers_are_those_of_its_own_attention(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt at once, then token by token behind a cache."""
    calls = counted(monkeypatch)
    ids = torch.randint(1, 256, (2, 9))
    said = []
    for how in ("auto", "eager"):
        model = model_of(family, how)
        rows = dict(model.layout.views(torch.zeros(model.mask().shape)))
        model.adapters.bind(rows, [0])
        generate: Any = model.network.generate
        said.append(generate(ids, max_new_tokens=6, do_sample=False, use_cache=True))
    assert torch.equal(*said)
    assert len(calls) == 2


@pytest.mark.parametrize("how", ["eager", "sdpa"])
def test_an_attention_that_somebody_chose_stays(how: str) -> None:
    assert model_of("llama", how).network.config._attn_implementation == how


def test_the_base_keeps_its_own() -> None:
    model = model_of("llama", "auto")
    assert model.network.config._attn_implementation == cpu.NAME
    assert model.base.model.config._attn_implementation == "eager"


def test_a_model_that_computes_attention_in_another_order_keeps_its_own() -> None:
    model = model_of("gpt2", "auto", reorder_and_upcast_attn=True)
    assert model.network.config._attn_implementation == "eager"


def test_a_family_that_nobody_has_compared_keeps_its_own() -> None:
    """Its attention says that it is not causal, and its mask alone makes it so."""
    from transformers import PegasusConfig, PegasusForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 50, "d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2}
    config = PegasusConfig(**sizes, decoder_ffn_dim=16, is_decoder=True)
    config._attn_implementation = "eager"
    network = PegasusForCausalLM(config)
    cpu.use_attention(network)
    assert network.config._attn_implementation == "eager"


def test_a_scale_below_zero_is_left_to_the_own_one(monkeypatch: pytest.MonkeyPatch, library: None) -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention

    calls = counted(monkeypatch)
    module = model_of("llama", "eager").network.model.layers[0].self_attn
    assert isinstance(module, LlamaAttention)
    q, k, v, _ = heads(1, 4, 2, 9, 8)
    found = cpu.attend(module, q, 9 * k, v, None, scaling=-8.0)[0].transpose(1, 2)
    torch.testing.assert_close(found, written_out(q, 9 * k, v, -8.0))
    assert not calls


def test_weights_are_given_to_those_who_ask() -> None:
    ids = torch.randint(0, 256, (1, 7))
    model = model_of("llama", "auto")
    rows = dict(model.layout.views(torch.zeros(model.mask().shape)))
    model.adapters.bind(rows, [0])
    with torch.no_grad():
        seen = model.network(ids, use_cache=False, output_attentions=True).attentions
    assert [tuple(t.shape) for t in seen] == [(1, 4, 7, 7)] * 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_layer_has_the_same_gradients(library: None) -> None:
    given = heads(2, 4, 2, 40, 16)
    compiled = torch.compile(own(0.3), fullgraph=True)
    for one, other in zip(solve(compiled, *given), solve(own(0.3), *given), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
