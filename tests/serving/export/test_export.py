"""Exported models say what ours do, opened by stock libraries; and nothing of another user is in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from comingle.models.loading import load_base
from comingle.models.personal import PersonalModel, why_not_merged
from comingle.utils.errors import DataError
from exporting import FAMILIES, IDS, RANKS, check_same, greedy, of_text, own_logits, trained

# PEFT asks transformers by an older name.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

SPARSE = {"llama": "MixtralForCausalLM", "mistral": "MixtralForCausalLM", "qwen3": "Qwen3MoeForCausalLM"}
FAMILY_SUBSET = [
    ("comigs-1g1s", "llama"),
    ({"name": "comigs", "specialists": [0, 2, 1]}, "qwen3"),
    ({"name": "comigs", "specialists": [0, 2, 1]}, "mistral"),
    ("fedavg", "llama"),
    ("fedit", "gpt2"),
    ({"name": "floral", "clusters": 2}, "llama"),
    ({"name": "fedmerge", "models": 2}, "mistral"),
]
GRID = [(method, family) for method in of_text() if method != "fedbn" for family in FAMILIES]  # whose norms are trained


def mixed(person: PersonalModel) -> bool:
    return bool(getattr(person.model, "adapters", None) and why_not_merged(person.model, person.row))


def test_of_text_is_most_of_the_registry() -> None:
    assert {"pretrained", "comigs-1g1s", "floral", "fedmerge", "hetlora", "fdlora", "pcl"} <= set(of_text())


WEIGHED = ("feddpa", "fedamole", "fedlease", "fedtreelora")
"""Methods whose experts are weighed as in no architecture of transformers."""


def round_trip(person: PersonalModel, family: str, folder: Path, *, weighed: bool = False) -> None:
    """Through every format that the model has; refused where there is none."""
    if mixed(person) and (weighed or family not in SPARSE):
        why = "its experts are weighted by" if weighed else f"no sparse mixture .*{family}; allowed: "
        with pytest.raises(DataError, match=f"{why}.*--format merged-approximately"):
            person.export(folder / "t")
    else:
        person.export(folder / "t")
        network = AutoModelForCausalLM.from_pretrained(folder / "t")
        assert not mixed(person) or type(network).__name__ == SPARSE[family]
        check_same(person, network)
    if mixed(person):
        with pytest.raises(DataError, match=r"is not one LoRA: . experts"):
            person.export(folder / "p", format="peft")
    else:
        check_same(person, with_peft(person, folder / "p"))
    assert {path.name for path in folder.iterdir()} <= {"t", "p"}  # what is refused leaves nothing


def with_peft(person: PersonalModel, folder: Path) -> Any:
    peft = pytest.importorskip("peft")
    person.export(folder, format="peft")
    plain = load_base(person.model.base.name, dtype="float32", device="cpu").model
    return peft.PeftModel.from_pretrained(plain, folder)


@pytest.mark.parametrize(("method", "family"), FAMILY_SUBSET)
@pytest.mark.sampled(1)
def test_stock_libraries_open_the_same_model(federate: Any, tmp_path: Path, method: Any, family: str) -> None:
    round_trip(trained(federate, method, base=f"random:{family}").user("bob"), family, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "family"), GRID)
def test_every_method_on_every_family(federate: Any, tmp_path: Path, method: str, family: str) -> None:
    run = trained(federate, method, base=f"random:{family}")
    for name in run.users[:2]:
        (tmp_path / name).mkdir()
        round_trip(run.user(name), family, tmp_path / name, weighed=method in WEIGHED)


@pytest.mark.parametrize("method", ["hetlora", "flexlora"])
@pytest.mark.slow
def test_a_users_own_rank_is_the_adapters(federate: Any, tmp_path: Path, method: str) -> None:
    run = trained(federate, method, RANKS)
    for name, rank in (("ann", 1), ("cem", 2)):
        check_same(run.user(name), with_peft(run.user(name), tmp_path / name))
        assert json.loads((tmp_path / name / "adapter_config.json").read_text())["r"] == rank


def test_a_client_level_mixture_is_one_lora_of_rank_clusters_times_rank(federate: Any, tmp_path: Path) -> None:
    person = trained(federate, {"name": "floral", "clusters": 3}).user("bob")
    check_same(person, with_peft(person, tmp_path / "p"))
    assert json.loads((tmp_path / "p" / "adapter_config.json").read_text())["r"] == 3 * 2


def test_experts_that_are_averaged_in_the_weights_are_one_lora(federate: Any, tmp_path: Path) -> None:
    person = trained(federate, "fedavg", {"adapters.mix": "linear"}).user("bob")
    check_same(person, with_peft(person, tmp_path / "p"))


def test_gates_inside_linears_are_refused(federate: Any, tmp_path: Path) -> None:
    person = trained(federate, "comigs-1g1s", {"adapters.mix": "linear"}).user("bob")
    with pytest.raises(DataError, match=r"'bob': .*linear.*--format merged-approximately"):
        person.export(tmp_path / "t")
    assert person.export(tmp_path / "m", format="merged-approximately").lost


# -------------------------------------------------------------------- settings of bases


LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

SLIDES = {"use_sliding_window": True, "sliding_window": 6}


def own_base(folder: Path, family: str, **settings: Any) -> str:
    """A random base with settings of its own, as a folder."""
    base = load_base(f"random:{family}", dtype="float32", device="cpu")
    config = base.model.config
    config.update(settings)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    base.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 16}}),
        ("llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-2}),
        ("mistral", {"sliding_window": 6}),
        ("qwen3", {**SLIDES, "layer_types": ["sliding_attention"] * 2}),
        ("qwen3", {"attention_bias": True, "head_dim": 16}),
    ],
)
@pytest.mark.sampled(1)
def test_settings_of_the_base_are_kept(federate: Any, tmp_path: Path, family: str, settings: dict[str, Any]) -> None:
    base = own_base(tmp_path / "base", family, **settings)
    person = trained(federate, "comigs-1g1s", base=base).user("bob")
    usual = trained(federate, "comigs-1g1s", base=own_base(tmp_path / "usual", family)).user("bob")
    assert (own_logits(person) - own_logits(usual)).abs().max() > 1e-3  # the settings matter to what is compared
    person.export(tmp_path / "t")
    check_same(person, AutoModelForCausalLM.from_pretrained(tmp_path / "t"))


@pytest.mark.parametrize(
    ("family", "settings", "why"),
    [
        ("llama", {"mlp_bias": True}, "its MLPs have biases"),
        ("llama", {"attention_bias": True}, "its attention has biases"),
        ("qwen3", {**SLIDES, "layer_types": ["full_attention", "sliding_attention"]}, "a sliding window"),
        ("gemma2", {}, "gemma2; allowed: llama, mistral, qwen3"),
    ],
)
@pytest.mark.sampled(1)
def test_bases_without_a_sparse_form_are_refused(
    federate: Any, tmp_path: Path, family: str, settings: dict[str, Any], why: str
) -> None:
    base = own_base(tmp_path / "base", family, **settings)
    person = trained(federate, "comigs-1g1s", base=base).user("bob")
    with pytest.raises(DataError, match=f"{why}.*--format merged-approximately"):
        person.export(tmp_path / "t")


def test_a_network_that_says_something_else_is_not_written(
    federate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here: a base whose blocks do something that no setting tells of."""
    person = trained(federate, "fedit").user("bob")
    own = own_logits(person)
    monkeypatch.setattr(PersonalModel, "logits", lambda self, ids: own_logits(self, ids) * 1.01)
    with pytest.raises(ValueError, match=r"^user .*logits.* 1\.0%"):
        person.export(tmp_path / "t")
    assert not list(tmp_path.iterdir())
    assert torch.equal(own, own_logits(person))


# -------------------------------------------------------------------- what is in a folder


def written(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("format", ["transformers", "gguf", "merged-approximately"])
def test_nothing_of_another_users_is_in_an_export(federate: Any, tmp_path: Path, format: str) -> None:
    """Whatever stands in the others' rows, the bytes are the same; and they are not when it is the user's own."""
    run = trained(federate, {"name": "comigs", "specialists": [1, 1, 2]})
    run.user("bob").export(tmp_path / "a" / "bob", format=format)
    rows = run.federation.clients.state.rows
    rows[[0, 2]] = 7.0
    run.user("bob").export(tmp_path / "b" / "bob", format=format)
    assert written(tmp_path / "a" / "bob") == written(tmp_path / "b" / "bob")
    views = run.federation.clients.model.layout.views(rows)
    views["layers.1.mlp.down.b"][1, 1] += 0.1  # bob's specialist
    run.user("bob").export(tmp_path / "c" / "bob", format=format)
    assert written(tmp_path / "a" / "bob") != written(tmp_path / "c" / "bob")


def test_an_export_has_as_many_experts_as_its_user(federate: Any, tmp_path: Path) -> None:
    run = trained(federate, {"name": "comigs", "specialists": [0, 1, 3]})
    experts = {}
    for name in run.users:
        run.user(name).export(tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        experts[name] = (config.get("num_local_experts"), config.get("num_experts_per_tok"))
    assert experts == {"ann": (None, None), "bob": (2, 2), "cem": (4, 2)}


def test_experts_are_the_base_with_a_lora_each(federate: Any, tmp_path: Path) -> None:
    """By the formula, out of the user's tensors alone."""
    person = trained(federate, "comigs-1g1s").user("bob")
    person.export(tmp_path / "t")
    weights = load_file(tmp_path / "t" / "model.safetensors")
    found = [t for name, t in weights.items() if "layers.0" in name and ("w2" in name or "down_proj" in name)]
    found = list(found[0]) if found[0].ndim == 3 else found
    a, b = (person.tensors[f"layers.0.mlp.down.{factor}"][0] for factor in "ab")
    base = person.model.base.model.get_parameter("model.layers.0.mlp.down_proj.weight")
    scale = 16 / 2**0.5
    for expert, weight in enumerate(found):
        torch.testing.assert_close(weight, base + scale * b[expert].mT @ a[expert])
    gate = next(t for name, t in weights.items() if "layers.0" in name and name.endswith("gate.weight"))
    assert torch.equal(gate, person.tensors["layers.0.mlp.router"][0])


def test_the_tokenizer_travels_with_it(federate: Any, tmp_path: Path) -> None:
    person = trained(federate, "fedit").user("bob")
    for format in ("transformers", "peft", "merged-approximately"):
        person.export(tmp_path / format, format=format)
        again = AutoTokenizer.from_pretrained(tmp_path / format)
        assert again("a cat\n")["input_ids"] == person.model.base.tokenizer("a cat\n")["input_ids"]


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_weights_have_the_format_asked_for(federate: Any, tmp_path: Path, dtype: str, size: int) -> None:
    person = trained(federate, "comigs-1g1s", dtype="float64").user("bob")
    person.export(tmp_path / "t", dtype=dtype)
    weights = load_file(tmp_path / "t" / "model.safetensors")
    assert {t.element_size() for t in weights.values()} == {size}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "t")
    assert str(again.dtype) == f"torch.{dtype}"
    tolerance = 1e-4 if size == 4 else 0.1
    torch.testing.assert_close(again(input_ids=IDS).logits.double(), own_logits(person), rtol=0, atol=tolerance)


# -------------------------------------------------------------------- approximately


def test_the_loss_of_fixed_gates_is_measured(federate: Any, tmp_path: Path) -> None:
    run = trained(federate, "comigs-1g1s", base="random:gpt2")
    person, valid = run.user("bob"), run.federation.clients.users[1].valid
    lost = person.export(tmp_path / "m", format="merged-approximately").lost
    before, after = lost.values()
    assert before == pytest.approx(person.score(valid, context=16).perplexity, rel=1e-5)
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert type(network).__name__ == "GPT2LMHeadModel"
    plain = PersonalModel(name="bob", model=person.model, tensors=person.tensors, row=person.row)
    stream = [valid[i : i + 17].long() for i in range(0, len(valid) - 1, 16)]
    with torch.no_grad():
        nats = [
            torch.nn.functional.cross_entropy(network(input_ids=s[None, :-1]).logits[0], s[1:], reduction="sum")
            for s in stream
        ]
    assert after == pytest.approx(float((sum(nats) / (len(valid) - 1)).exp()), rel=1e-5)
    assert after != pytest.approx(before, rel=1e-4)
    with pytest.raises(DataError, match=r"^user 'bob': .*validation data"):
        plain.export(tmp_path / "n", format="merged-approximately")
    assert greedy(network)


def test_gates_are_fixed_at_their_mean(federate: Any, tmp_path: Path) -> None:
    """Layer by layer, over the tokens of the validation text: what ``route`` says on average."""
    run = trained(federate, {"name": "comigs", "specialists": [0, 2, 1]})
    person, valid = run.user("bob"), run.federation.clients.users[1].valid
    person.export(tmp_path / "m", format="merged-approximately")
    gates = person.route(valid[:-1], context=16).gates.mean(1)  # the last token predicts nothing
    a, b = (person.tensors[f"layers.1.mlp.up.{factor}"][0] for factor in "ab")
    base = person.model.base.model.get_parameter("model.layers.1.mlp.up_proj.weight")
    change = torch.einsum("e,ero,eri->oi", gates[1].float(), b, a) * 16 / 2**0.5
    weight = load_file(tmp_path / "m" / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    assert (weight - base - change).norm() < 0.01 * change.norm()  # route rounds to float16
    assert (change - gates[1].float().mean() * (b.mT @ a).sum(0) * 16 / 2**0.5).norm() > 0.1 * change.norm()


def test_every_base_has_the_approximate_form(federate: Any, tmp_path: Path) -> None:
    for family in ("opt", "gemma3", "gpt_neox"):
        person = trained(federate, "comigs-1g1s", base=f"random:{family}").user("bob")
        lost = person.export(tmp_path / family, format="merged-approximately").lost
        assert max(lost.values()) / min(lost.values()) < 1.2
