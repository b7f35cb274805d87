"""The one call ``floral``: what it wraps, what it leaves, and what users of PyTorch expect of the result."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from clusters import scatter
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import comingle
from comingle.models.floral.model import FloralModel, initialisers, roles, sizes
from comingle.models.floral.wrapper import check_settings, floral
from comingle.utils.errors import RecipeError


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 6), nn.LayerNorm(6),
        nn.Linear(6, 3),
    ).double()  # fmt: skip


def images() -> Tensor:
    return torch.randn(5, 2, 4, 4, dtype=torch.float64)


def llama(**settings: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 13, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, **settings)).double()


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=13, n_positions=16, n_embd=8, n_layer=2, n_head=2)).double().eval()


# ---------------------------------------------------------------- what is wrapped


def test_every_parameter_and_floating_buffer_has_a_role_and_every_adaptor_a_start() -> None:
    model = comingle.floral(network(), num_clusters=3, rank=2)
    kinds = roles(model)
    floating = [name for name, tensor in model.state_dict().items() if tensor.is_floating_point()]
    assert sorted(kinds) == sorted(floating)
    adaptors = {name for name, kind in kinds.items() if kind == "adaptor"}
    assert adaptors == {f"model.{name}" for name in (
        "0.a", "0.b", "0.bias", "1.weight", "1.bias", "4.a", "4.b", "4.bias", "5.weight", "5.bias", "6.a", "6.b",
        "6.bias",
    )}  # fmt: skip
    assert {name for name, kind in kinds.items() if kind == "statistics"} == {
        f"model.1.{base}running_{name}" for base in ("", "base.") for name in ("mean", "var")
    }
    assert [name for name, kind in kinds.items() if kind == "router"] == ["router.theta"]
    assert set(initialisers(model)) == adaptors | {"router.theta"}
    assert all(model.get_parameter(name).shape[0] == 3 for name in adaptors)


def test_the_initial_values_can_be_drawn_again_each_from_its_own_stream() -> None:
    model = floral(network(), num_clusters=3, rank=2, generator=torch.Generator().manual_seed(5))
    for name, draw in initialisers(model).items():
        shape = tuple(model.get_parameter(name).shape)
        value = draw(shape, torch.Generator().manual_seed(7))
        assert value.shape == shape
        assert torch.equal(value, draw(shape, torch.Generator().manual_seed(7)))
        fan_in = {"model.0.a": 2 * 3, "model.4.a": 64, "model.6.a": 6}.get(name)  # of (1, 3) kernels on 2 channels
        if fan_in is None:
            assert not value.any()
        else:
            assert 0.8 < value.abs().max() / (6 / fan_in) ** 0.5 <= 1
            assert not torch.allclose(value[0], value[1])  # clusters start apart
    again = floral(network(), num_clusters=3, rank=2, generator=torch.Generator().manual_seed(5))
    assert torch.equal(again.get_parameter("model.4.a"), model.get_parameter("model.4.a"))


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"lora": False}, {"0.a", "0.b", "0.bias", "4.bias", "6.bias"}),
        ({"conv": "none"}, {"0.bias", "4.a", "4.b", "4.bias", "6.a", "6.b", "6.bias"}),
        ({"bias": False}, {"0.a", "0.b", "4.a", "4.b", "6.a", "6.b"}),
        ({"lora": False, "conv": "none"}, {"0.bias", "4.bias", "6.bias"}),
        ({"lora": False, "bias": False}, {"0.a", "0.b"}),
        ({"conv": "none", "bias": False}, {"4.a", "4.b", "6.a", "6.b"}),
    ],
)
def test_the_ablations_of_table_5(settings: dict[str, Any], kept: set[str]) -> None:
    model = floral(network(), num_clusters=2, rank=1, norm=False, **settings)
    assert {name for name, kind in roles(model).items() if kind == "adaptor"} == {f"model.{name}" for name in kept}
    x = images()
    torch.testing.assert_close(model(x), model.merge()(x), rtol=0, atol=0)


@pytest.mark.parametrize("make", [llama, lambda: llama(tie_word_embeddings=True), gpt2], ids=["llama", "tied", "gpt2"])
def test_any_causal_language_model_through_the_same_call(make: Callable[[], nn.Module]) -> None:
    base = make()
    model = floral(base, rank=2, num_clusters=3)
    tokens = torch.randint(13, (2, 6))
    assert torch.equal(model(tokens).logits, base(tokens).logits)
    gpt = type(base).__name__.startswith("GPT2")
    blocks = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", "ln_1", "ln_2"]
    if not gpt:
        blocks = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    path = "model.transformer.h" if gpt else "model.model.layers"
    expected = {f"{path}.{layer}.{name}" for layer in range(2) for name in blocks}
    assert set(model.layers()) == (expected | {"model.transformer.ln_f"} if gpt else expected)
    assert "lm_head (Linear)" in model.unadapted
    scatter(model)
    merged = model.merge()
    assert type(merged) is type(base)
    torch.testing.assert_close(merged(tokens).logits, model(tokens).logits)
    with model.mixing(torch.eye(3, dtype=torch.float64)[1]), torch.no_grad():
        alone = model.model(tokens).logits
    torch.testing.assert_close(alone, model.merge(torch.eye(3, dtype=torch.float64)[1])(tokens).logits)


def test_a_tied_head_stays_tied() -> None:
    base = gpt2()
    model = floral(base, rank=2, num_clusters=2)
    assert model.get_parameter("model.transformer.wte.weight") is model.model.get_parameter("lm_head.weight")
    merged = model.merge()
    assert merged.get_parameter("transformer.wte.weight") is merged.get_parameter("lm_head.weight")


class TiedOnly(nn.Module):
    """A head tied to an embedding, and a module that runs twice."""

    def __init__(self, hidden: nn.Module | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.hidden = hidden
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        return self.head(x if self.hidden is None else self.hidden(self.hidden(x)))


def test_a_layer_that_runs_twice_works() -> None:
    base = TiedOnly(nn.Linear(4, 4)).double()
    model, tokens = floral(base, rank=1, num_clusters=2), torch.tensor([[0, 3, 4]])
    assert torch.equal(model(tokens), base(tokens))
    scatter(model)
    torch.testing.assert_close(model(tokens), model.merge()(tokens))
    assert model.unadapted == ("embedding (Embedding)", "head (Linear)")


def test_subclasses_and_what_reads_weights_past_the_forward_are_safe() -> None:
    base = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True), 1, enable_nested_tensor=False
    ).double()
    model, x = floral(base, rank=2, num_clusters=2), torch.randn(2, 3, 8, dtype=torch.float64)
    scatter(model)
    trained = model(x).detach()
    model.eval()
    with torch.no_grad():  # where PyTorch would take its fast path
        torch.testing.assert_close(model(x), trained)
        torch.testing.assert_close(model.merge()(x), trained)
    assert "layers.0.self_attn.out_proj (NonDynamicallyQuantizableLinear)" in model.unadapted


# ---------------------------------------------------------------- as users of PyTorch expect


def test_the_original_is_copied_unless_told_otherwise() -> None:
    base = network()
    kept = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = floral(base, num_clusters=2, rank=2)
    scatter(model)
    model(images())
    assert all(torch.equal(tensor, kept[name]) for name, tensor in base.state_dict().items())
    assert floral(base, num_clusters=2, rank=2, copy=False).model is base


def test_state_dict_deepcopy_and_modes(tmp_path: Path) -> None:
    model, x = floral(network(), num_clusters=2, rank=2, batch_nora=True), images()
    scatter(model)
    model(x)
    twin = copy.deepcopy(model)  # right after a forward pass
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other = floral(network(), num_clusters=2, rank=2, batch_nora=True)
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    for one in (model, twin, other):
        one.eval()
        assert not any(module.training for module in one.modules())
    assert torch.equal(model(x), twin(x))
    assert torch.equal(model(x), other(x))
    twin.router.theta.data += torch.tensor([3.0, 0.0])
    assert not torch.allclose(model(x), twin(x))  # the copy reads its own router
    assert len(model.state_dict()) == len({id(t) for t in model.state_dict(keep_vars=True).values()})
    assert not floral(network().eval(), num_clusters=2, rank=2).training


def test_a_mixture_does_not_outlive_its_call() -> None:
    model, x = floral(network().eval(), num_clusters=2, rank=2), images()
    scatter(model)
    before = model(x)
    model(x, mixture=torch.tensor([1.0, 0.0]))
    assert torch.equal(model(x), before)
    with pytest.raises(RuntimeError, match="inside model"):
        model.model(x)
    with pytest.raises(RecipeError, match=r"mixture: got shape \(3,\).*\(2,\)"):
        model(x, mixture=torch.ones(3))
    with pytest.raises(RecipeError, match=r"mixture: got shape \(1, 2\).*\(2,\)"):
        model.merge(torch.ones(1, 2))


def test_gradient_checkpointing_within_mixing() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inside, x, use_reentrant=False)

    model, x = floral(Checkpointed().double(), num_clusters=2, rank=1), torch.randn(3, 4, dtype=torch.float64)
    scatter(model)
    with model.mixing():
        model(x).square().sum().backward()
    got = [p.grad for p in model.parameters()]
    with model.mixing():
        expected = torch.autograd.grad(model.get_submodule("model.inside")(x).square().sum(), list(model.parameters()))
    torch.testing.assert_close(got, list(expected))


COMPILED = """
import torch
from torch import nn
from comingle.models.floral.wrapper import floral
torch.manual_seed(0)
base = nn.Sequential(nn.Conv2d(2, 4, 3, padding="same"), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3))
model = floral(base.double(), num_clusters=2, rank=2)
with torch.no_grad():
    for p in model.parameters():
        p += 0.3 * torch.randn_like(p)
x, alone = torch.randn(5, 2, 4, 4, dtype=torch.float64), torch.tensor([1.0, 0.0], dtype=torch.float64)
quick = torch.compile(model, backend="eager", fullgraph=True)
one, two = (torch.autograd.grad(m(x).square().sum(), list(model.parameters())) for m in (model, quick))
torch.testing.assert_close(one, two)
with torch.no_grad():
    torch.testing.assert_close(model.eval()(x, mixture=alone), quick(x, mixture=alone))
print("compiled as a whole")
"""


@pytest.mark.slow
def test_the_whole_model_compiles() -> None:
    """In a process of its own: the run-time checks of annotations cannot be traced."""
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "compiled as a whole\n", done.stderr


# ---------------------------------------------------------------- faults


def shared_weight() -> nn.Module:
    base = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    base[1].weight = base[0].weight
    return base


def one_layer_twice() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer)


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (network, {"rank": 0}, "floral rank: got 0;"),
        (network, {"budget": 0.0}, "floral budget: got 0.0;"),
        (network, {"budget": 1.5}, "floral budget: got 1.5;"),
        (network, {}, "floral: got rank=None and budget=None;"),
        (network, {"rank": 1, "budget": 0.1}, "floral: got rank=1 and budget=0.1;"),
        (network, {"rank": 1, "num_clusters": 0}, "num_clusters: got 0;"),
        (network, {"rank": 1, "alpha": float("nan")}, "floral alpha: got nan;"),
        (nn.ReLU, {"rank": 1}, "ReLU .*no parameters; allowed: Linear, "),
        (lambda: nn.Embedding(3, 2), {"rank": 1}, "Embedding .*model \\(Embedding\\);"),
        (lambda: nn.ConvTranspose2d(3, 2, 1), {"rank": 1}, "model \\(ConvTranspose2d\\); allowed: Linear, "),
        (TiedOnly, {"rank": 1}, "embedding \\(Embedding\\), head \\(Linear\\); allowed: Linear, "),
        (shared_weight, {"rank": 1}, "floral: layers '0' and '1'"),
        (one_layer_twice, {"rank": 1}, "floral: '0' and '2'"),
        (lambda: floral(nn.Linear(2, 2), rank=1, num_clusters=1), {"rank": 1}, "floral: layer 'model'"),
    ],
)
def test_each_fault_is_one_clear_line(make: Callable[[], nn.Module], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as error:
        floral(make(), **{"num_clusters": 2, **settings})
    assert "\n" not in str(error.value)


def test_an_unknown_form_of_convolution_is_named() -> None:
    """Asked of the check itself: in tests the run-time check of ``floral``'s annotations comes first."""
    with pytest.raises(RecipeError) as error:
        check_settings(1.0, "chanel")
    message = str(error.value)
    assert message.startswith("floral conv: got 'chanel';")
    assert "balanced-2d, channel, in, out, filter, linear, none" in message
    assert message.endswith("'channel'?")


# ---------------------------------------------------------------- budgets


def ranks(base: nn.Module, **settings: Any) -> list[int]:
    model = floral(base, num_clusters=2, **settings)
    return [pair.geometry.width for pair in model.pairs().factors]


def test_a_budget_becomes_the_largest_rank_that_each_form_affords() -> None:
    assert ranks(nn.Linear(784, 200), budget=0.1) == [int(0.1 * 784 * 200 / 984)]
    assert ranks(nn.Linear(200, 200), budget=0.29) == [29]  # 0.29 * 100, which binary floats put below 29
    for form in ("balanced-2d", "channel", "in", "out", "linear"):
        for groups in (1, 4):
            layer = nn.Conv2d(32, 64, (5, 3), groups=groups)
            model = floral(layer, num_clusters=1, budget=0.5, conv=form, bias=False)
            (rank,), used = [pair.geometry.width for pair in model.pairs().factors], sizes(model).adaptors
            assert rank > 1
            assert used <= 0.5 * layer.weight.numel() < used + used // rank, form
    # "filter" has rank * d_out channels in between: 8 (8 * 7 + 8 * 7) parameters for a rank, 3136 in the base.
    assert ranks(nn.Conv2d(8, 8, 7), budget=1.0, conv="filter") == [3 * 8]


def test_a_rank_is_cut_where_the_layer_can_have_no_more() -> None:
    assert ranks(nn.Sequential(nn.Linear(10, 3), nn.Linear(20, 30)), rank=8) == [3, 8]
    assert ranks(nn.Conv2d(4, 4, 3, groups=4), rank=8) == [3]


def test_one_line_says_where_the_least_rank_breaks_the_budget(caplog: pytest.LogCaptureFixture) -> None:
    """The growth of the paper's two synthetic tasks: 97% of Linear(10, 3), 120% of the net 10-20-1."""
    floral(nn.Linear(10, 3), num_clusters=2, budget=0.01)
    floral(nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 1)), num_clusters=4, budget=0.01)
    facts = [
        ("budget 0.01", "1 of 1 low-rank layers (model)", "2 clusters", "+97%", "+2%"),
        ("budget 0.01", "2 of 2 low-rank layers (0, 2)", "4 clusters", "+120%", "+4%"),
    ]
    for message, expected in zip(caplog.messages, facts, strict=True):
        assert [fact for fact in expected if fact not in message] == []
    caplog.clear()
    floral(nn.Linear(300, 300), num_clusters=2, budget=0.01)
    floral(nn.Linear(10, 3), num_clusters=2, rank=1)
    assert not caplog.messages


def test_the_router_has_the_models_precision_and_settings() -> None:
    model = floral(network(), num_clusters=2, rank=1, temperature=0.5, noise=0.1)
    assert isinstance(model, FloralModel)
    assert (model.router.theta.dtype, model.router.temperature, model.router.noise) == (torch.float64, 0.5, 0.1)
    half = floral(nn.Linear(4, 3).bfloat16(), num_clusters=2, rank=1)
    assert half.router.theta.dtype == torch.float32
    assert half(torch.randn(2, 4).bfloat16()).dtype == torch.bfloat16
