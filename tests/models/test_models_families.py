from __future__ import annotations

import pytest
import torch

from comingle.models.base import Base
from comingle.models.loading import lm_head, load_base
from comingle.models.random_bases import FAMILIES, parse_random
from comingle.utils.errors import BaseModelError


def random_base(name: str, **options: object) -> Base:
    return load_base(f"random:{name}", device="cpu", **({"dtype": "float32"} | options))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_runs_frozen_and_its_head_is_understood(family: str, dtype: str) -> None:
    base = random_base(family, dtype=dtype)
    parameters = list(base.model.parameters())
    assert {p.dtype for p in parameters} == {base.dtype} == {getattr(torch, dtype)}
    assert not any(p.requires_grad for p in parameters)
    assert not any(module.training for module in base.model.modules())
    assert base.model.config.use_cache is False
    head = lm_head(base)
    assert head.weight.shape == (259, 32)
    assert (head.bias is not None) == (family == "phi")


@pytest.mark.parametrize("family", FAMILIES)
def test_generates_silently(family: str, capfd: pytest.CaptureFixture[str]) -> None:
    base = random_base(family)
    tokens = base.tokenizer("once", return_tensors="pt")  # type: ignore[misc]
    generated = base.model.generate(**tokens, max_new_tokens=3, do_sample=False)
    assert generated.shape[0] == 1
    assert 4 < generated.shape[1] <= 7
    assert capfd.readouterr() == ("", "")


def test_overrides_set_the_shape() -> None:
    config = random_base("llama?layers=3&dim=64&heads=8&kv_heads=2&mlp=40&vocab=300&ctx=50").model.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (3, 64, 8)
    assert (config.num_key_value_heads, config.intermediate_size) == (2, 40)
    assert (config.vocab_size, config.max_position_embeddings) == (300, 50)


def test_defaults_are_tiny_and_a_gpt2_has_its_usual_size() -> None:
    assert random_base("gpt2").model.num_parameters() < 100_000
    _, shape = parse_random("random:gpt2?layers=12&dim=768&heads=12&vocab=50257")
    assert (shape.layers, shape.dim, shape.heads, shape.vocab, shape.ctx) == (12, 768, 12, 50257, 1024)


def weights(base: Base) -> torch.Tensor:
    return torch.cat([p.flatten().to(torch.float32) for p in base.model.parameters()])


def test_the_seed_decides_the_weights_and_nothing_else_moves() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first = random_base("gpt2", seed=1)
    assert torch.equal(torch.rand(3), expected)  # the caller's random stream is untouched
    assert torch.equal(weights(first), weights(random_base("gpt2", seed=1)))
    assert not torch.equal(weights(first), weights(random_base("gpt2", seed=2)))
    rounded = weights(first).to(torch.bfloat16).to(torch.float32)
    assert torch.equal(rounded, weights(random_base("gpt2", seed=1, dtype="bfloat16")))


def test_biases_and_norms_are_not_trivial() -> None:
    for name, parameter in random_base("gpt2").model.named_parameters():
        if parameter.ndim == 1:
            assert parameter.std() > 0.01, name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("random:gpt3", "family 'gpt3'.* gpt2, llama, .*'gpt2'"),
        ("random:", "family ''"),
        ("random:gpt2?layer=3", "override 'layer'.* layers, dim, .*'layers'"),
        ("random:gpt2?kv_heads=2", "override 'kv_heads'"),
        ("random:gpt2?dim", "dim: got ''"),
        ("random:gpt2?dim=0", "dim: got '0'"),
        ("random:gpt2?dim=1e3", "dim: got '1e3'"),
        ("random:gpt2?dim=48", "dim: got 48.* 32"),
        ("random:llama?kv_heads=3", r"kv_heads: got 3.*\(4\)"),
        ("random:gpt2?vocab=258", "vocab: got 258.* 259"),
    ],
)
def test_a_wrong_name_is_one_line_that_helps(name: str, message: str) -> None:
    with pytest.raises(BaseModelError, match=message) as caught:
        load_base(name)
    assert "\n" not in str(caught.value)
    assert repr(name) in str(caught.value)


def test_an_attention_the_family_lacks_is_refused() -> None:
    with pytest.raises(BaseModelError, match="attention 'sdpa'") as caught:
        random_base("gemma2", attention="sdpa")
    assert "\n" not in str(caught.value)
