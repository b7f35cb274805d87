"""Families that comingle does not know: refused with the linears found, adapted by the targets given."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from transformers import BloomConfig, BloomForCausalLM, Starcoder2Config, Starcoder2ForCausalLM

from comingle.config import parse_recipe
from comingle.config.settings import AdaptersSection, TargetsSection
from comingle.models.injection import Adapters, ExpertCounts, inject
from comingle.models.kernels.expert_mlp import ACTIVATIONS
from comingle.models.layouts import KNOWN, activation_name, decoder_layers, find_targets
from comingle.models.loading import load_base
from comingle.models.random_bases import FAMILIES
from comingle.utils.errors import BaseModelError

ONE = ExpertCounts(generalists=1, specialists=(0,))
TARGETS = TargetsSection(attention=("mixer.value", "mixer.out"), up="ffn.wide", down="ffn.narrow", mlp="ffn")


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value, self.out, self.extra = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.value(x)).cumsum(1)) + self.extra(x)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(F.silu(self.wide(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.ffn = Mixer(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(x)
        return x + self.ffn(x)


class Handmade(nn.Module):
    def __init__(self, act: str = "silu", layer: type[nn.Module] = Layer) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_act=act)
        self.blocks = nn.ModuleList([layer() for _ in range(2)])
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def bind_random(adapters: Adapters) -> dict[str, Tensor]:
    rows = torch.randn(1, adapters.layout.columns, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tensors = adapters.layout.views(rows * 0.2)
    adapters.bind(tensors, [0])
    return tensors


@pytest.mark.parametrize("family", FAMILIES)
def test_known_families_are_recognised(family: str) -> None:
    model = load_base(f"random:{family}", device="cpu").model
    own = {"gpt2": "gpt2", "phi": "phi", "gpt_neox": "gpt_neox", "opt": "opt"}.get(family, "llama")
    assert find_targets(model) == KNOWN[own]
    assert len(decoder_layers(model)) == 2


def test_an_unknown_family_is_refused_with_its_linears_and_the_remedy() -> None:
    with pytest.raises(BaseModelError) as caught:
        inject(Handmade(), AdaptersSection(), ONE, routed=False)
    message = str(caught.value)
    for name in ("mixer.value", "mixer.out", "mixer.extra", "ffn.wide", "ffn.narrow"):
        assert f"'{name}'" in message
    assert message.startswith("Handmade: ")
    assert "adapters: {targets: {attention: [...], up: NAME, down: NAME, gate: NAME or null, mlp: NAME" in message
    assert "\n" not in message


def test_a_known_family_with_one_more_linear_is_refused_whole() -> None:
    model = load_base("random:llama", device="cpu").model
    for layer in decoder_layers(model):
        layer.self_attn.extra_proj = nn.Linear(32, 32)
    with pytest.raises(BaseModelError, match=r"LlamaForCausalLM: .*'self_attn\.extra_proj'"):
        find_targets(model)


def test_given_targets_work_on_an_unknown_family() -> None:
    """Against the same model with ``W + s B A`` in its weights; the linear that is not named stays as it is."""
    model, expected = Handmade(), Handmade()
    expected.load_state_dict(model.state_dict())
    adapters = inject(model, AdaptersSection(rank=2, alpha=3.0, targets=TARGETS), ONE, routed=False)
    tensors = bind_random(adapters)
    names = {"mixer.value": "mixer.value", "mixer.out": "mixer.out", "mlp.up": "ffn.wide", "mlp.down": "ffn.narrow"}
    with torch.no_grad():
        for i, block in enumerate(expected.blocks):
            for ours, theirs in names.items():
                a, b = (tensors[f"layers.{i}.{ours}.{key}"].view(2, -1) for key in "ab")
                block.get_submodule(theirs).weight += 3.0 / 2**0.5 * b.T @ a
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(model(x), expected(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"up": "ffn.broad"},
            r"up: .*'ffn\.broad'.*; got \['ffn\.narrow', 'ffn\.wide', 'mixer\.extra'",
        ),
        ({"attention": ("mixer.value", "mixer.key")}, r"attention: .*'mixer\.key'"),
        ({"gate": "ffn.gate"}, r"gate: .*'ffn\.gate'"),
        ({"down": "blocks.0.ffn.narrow"}, r"down: .*'blocks\.0\.ffn\.narrow'.* 'ffn\.narrow'\.$"),
        ({"down": "narrow"}, r"down: .*'narrow'.* 'ffn\.narrow'\.$"),
        ({"down": "ffn.narow"}, r"down: .*'ffn\.narow'.* 'ffn\.narrow'\?"),
        ({"mlp": "fnn"}, r"mlp: 'fnn' .* \[\]; .* \['ffn\.narrow', 'ffn\.wide'\]"),
        ({"mlp": "mixer"}, r"mlp: 'mixer' .* \['mixer\.extra', 'mixer\.out', 'mixer\.value'\]"),
        ({"mlp": ""}, r"mlp: '' .* \[\]"),
        (
            {"up": "mixer.extra"},
            r"mlp: 'ffn' .* \['ffn\.narrow', 'ffn\.wide'\]; .*'mixer\.extra'",
        ),
    ],
)
def test_wrong_targets_are_refused(wrong: dict[str, object], message: str) -> None:
    settings = AdaptersSection(targets=TARGETS.model_copy(update=wrong))
    with pytest.raises(BaseModelError, match=r"adapters\.targets\." + message):
        inject(Handmade(), settings, ONE, routed=False)


def test_a_layer_with_the_mlp_in_itself_needs_an_activation_module() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer, self.fc1, self.fc2 = Mixer(), nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.fc2(F.silu(self.fc1(x + self.mixer(x))))

    targets = TargetsSection(attention=("mixer.value",), up="fc1", down="fc2")
    with pytest.raises(BaseModelError, match=r"adapters\.targets\.mlp: ''.* got \['fc1', 'fc2'\]"):
        inject(Handmade(layer=Flat), AdaptersSection(targets=targets), ONE, routed=False)


BLOOM = TargetsSection(
    attention=("self_attention.query_key_value", "self_attention.dense"),
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    mlp="mlp",
    activation="gelu_new",
)


def test_an_mlp_that_is_handed_the_residual_too_is_refused() -> None:
    """Bloom's is; the mixture in its place would be called with it, and lose it."""
    model = BloomForCausalLM(BloomConfig(vocab_size=300, hidden_size=32, n_layer=2, n_head=4)).eval()
    with pytest.raises(BaseModelError, match=r"BloomForCausalLM: .*'mlp\.dense_4h_to_h'"):
        inject(model, AdaptersSection(), ONE, routed=False)
    message = r"BloomForCausalLM: .*\(BloomMLP\) .*hidden_states, residual"
    with pytest.raises(BaseModelError, match=message) as caught:
        inject(model, AdaptersSection(targets=BLOOM), ONE, routed=False)
    assert "\n" not in str(caught.value)


def test_the_example_of_the_docs_works() -> None:
    text = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text(encoding="utf-8")
    content = yaml.safe_load(text.split("For StarCoder2:")[1].split("```yaml")[1].split("```")[0])
    content |= {"method": "fedavg", "data": {"users": {"ann": "unused"}}}
    section = parse_recipe(content).adapters.targets
    assert section is not None
    fields = section.model_dump()
    config = Starcoder2Config(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = Starcoder2ForCausalLM(config).eval()
    with pytest.raises(BaseModelError, match="Starcoder2ForCausalLM"):
        find_targets(model)
    targets = TargetsSection(**fields)
    adapters = inject(model, AdaptersSection(rank=2, targets=targets), ONE, routed=False)
    assert (len(adapters.attention), len(adapters.experts)) == (8, 2)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(BaseModelError, match=r"Handmade: .*'relu2'; allowed: \['gelu', .*'silu'"):
        inject(Handmade(act="relu2"), AdaptersSection(targets=TARGETS), ONE, routed=False)


def test_targets_may_name_the_activation() -> None:
    model = Handmade(act="relu2")
    assert activation_name(model, TARGETS.model_copy(update={"activation": "gelu"})) == "gelu"
    with pytest.raises(BaseModelError, match=r"Handmade: .*'gelu_10'"):
        activation_name(model, TARGETS.model_copy(update={"activation": "gelu_10"}))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_activation_is_that_of_the_family(family: str) -> None:
    """The name that we read computes what the module in the model computes."""
    model = load_base(f"random:{family}", dtype="float64", device="cpu").model
    layer = decoder_layers(model)[0]
    own = [m for n, m in layer.named_modules() if n.split(".")[-1] in ("act", "act_fn", "activation_fn")]
    x = torch.linspace(-5, 5, 101, dtype=torch.float64)
    found = ACTIVATIONS[activation_name(model, find_targets(model))](x)[0]
    torch.testing.assert_close(found, own[-1](x))


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(BaseModelError, match=r"^Linear: .* got \[''\]"):
        decoder_layers(nn.Linear(2, 2))
