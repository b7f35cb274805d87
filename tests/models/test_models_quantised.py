"""A base of 8 or 4 bits a weight: what it weighs, what it computes, and what of it is kept for the backward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from comingle.config import load_recipe, parse_recipe
from comingle.cost.memory import LiveBytes
from comingle.models.kernels import cpu
from comingle.models.loading import load_base
from comingle.models.quantised import CODES, QuantisedLinear, packed_parameters
from comingle.runs import api
from comingle.runs.session import build, prepare
from comingle.training.client import train
from comingle.utils.errors import RecipeError, RunError
from comingle.utils.files import cache_folder

WIDE = {"base": "random:llama?layers=6&dim=128&heads=4", "training.local_steps": 1}
ERRORS = {"8bit": 0.02, "4bit": 0.12}
"""Of a weight's norm; NF4 of normal numbers has 0.092."""


def weights(model: torch.nn.Module) -> int:
    return sum({id(t): t.nbytes for t in (*model.parameters(), *model.buffers())}.values())


@pytest.mark.parametrize("bits", ["8bit", "4bit"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_weights_are_packed_and_near_what_they_were(bits: Any, family: str) -> None:
    name = f"random:{family}?layers=2&dim=64&heads=4&mlp=256"
    plain, packed = (load_base(name, dtype="float32", device="cpu", quantise=kind) for kind in ("none", bits))
    found = [m for m in packed.model.modules() if isinstance(m, QuantisedLinear)]
    assert len(found) == 2 * (7 if family == "llama" else 4)
    numbers = sum(m.in_features * m.out_features for m in found)
    saved = (weights(plain.model) - weights(packed.model)) / numbers
    assert saved == pytest.approx(
        4 - {"8bit": 1 + 4 / 256, "4bit": 0.5 + 4 / 64}[bits], rel=0.15
    )  # and a code for each
    tokens = torch.arange(20).view(2, 10) + 5
    theirs, ours = (base.model(input_ids=tokens).logits for base in (plain, packed))
    assert not torch.equal(theirs, ours)
    assert (theirs - ours).norm() / theirs.norm() < 4 * ERRORS[bits]


def by_definition(weight: torch.Tensor, values: list[float], block: int) -> list[float]:
    """The nearest value of the table times the largest magnitude of its block, number by number."""
    found, numbers = [], weight.flatten().tolist()
    for start in range(0, len(numbers), block):
        part = numbers[start : start + block]
        scale = max(map(abs, part))
        found += [scale * min(values, key=lambda value: abs(value * scale - number)) for number in part]
    return found


@pytest.mark.parametrize("shape", [(24, 32), (7, 13), (1, 3)])
def test_each_weight_becomes_the_nearest_value_of_its_block(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape) / 50
    # QLoRA's quantiles: of -1 to 0 the averages of 8 intervals and of 0 to 1 those of 9, of equal probability.
    offset = (1 - 1 / (2 * 15) + 1 - 1 / (2 * 16)) / 2
    quantile = torch.distributions.Normal(0, 1).icdf
    positive = quantile(torch.linspace(offset, 0.5, 9)[:-1])
    negative = quantile(torch.linspace(offset, 0.5, 8)[:-1])
    nf4 = torch.cat([-negative, torch.zeros(1), positive.flip(0)])
    assert torch.allclose(CODES["4bit"].values, nf4 / nf4.abs().max(), atol=1e-6)
    for bits, code in CODES.items():
        packed, scales = code.pack(weight)
        assert len(packed) == (weight.numel() + 1) // 2 if bits == "4bit" else weight.numel()
        unpacked = code.unpack(packed, scales, weight.shape, torch.float32)
        expected = by_definition(weight, code.values.tolist(), {"8bit": 256, "4bit": 64}[bits])
        assert unpacked.flatten().tolist() == pytest.approx(expected, rel=1e-6)
    assert code.unpack(*code.pack(torch.zeros(shape)), weight.shape, torch.float32).abs().max() == 0


def test_bytes_are_those_of_bitsandbytes() -> None:
    """NF4 exactly; of 8 bits its search on CPUs misses the nearest value for two or three weights of a thousand."""
    theirs = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    packed, scales = CODES["4bit"].pack(weight)
    their_packed, state = theirs.quantize_nf4(weight, blocksize=64)
    assert torch.equal(packed, their_packed.flatten())
    assert torch.equal(scales, state.absmax)
    unpacked = CODES["4bit"].unpack(packed, scales, weight.shape, torch.bfloat16)
    state.dtype = torch.bfloat16
    assert torch.equal(unpacked, theirs.dequantize_4bit(their_packed, state))
    packed, scales = CODES["8bit"].pack(weight)
    their_packed, state = theirs.quantize_blockwise(weight, blocksize=256)
    assert torch.equal(CODES["8bit"].values, state.code)
    assert torch.equal(scales, state.absmax)
    assert (packed != their_packed.flatten()).float().mean() < 0.005


@pytest.mark.parametrize("bits", ["8bit", "4bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_code_unpacks_the_same_weights(bits: Any, dtype: torch.dtype, processor: str) -> None:
    code = CODES[bits]
    assert cpu.enable(cache_folder() / "native")
    for shape in ((64, 96), (7, 13), (1, 3)):
        weight = torch.randn(shape)
        packed, scales = code.pack(weight)
        found = cpu.look_up(packed, scales, code.values, weight.numel(), code.block, dtype)
        assert found is not None
        blocks = code.table(packed.device)[packed.int()].flatten()[: weight.numel()].split(code.block)
        expected = torch.cat([block * scale for block, scale in zip(blocks, scales, strict=True)]).to(dtype)
        assert torch.equal(found, expected)


def test_no_compiler_unpacks_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(7, 13)
    for code in CODES.values():
        packed, scales = code.pack(weight)
        native = code.unpack(packed, scales, weight.shape, torch.bfloat16)
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "look_up", lambda *_: None)
            assert torch.equal(code.unpack(packed, scales, weight.shape, torch.bfloat16), native)


@pytest.mark.parametrize("family", ["llama", "gpt2"])  # GPT-2 stores its weights transposed
def test_a_folder_is_packed_once_and_mapped(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMINGLE_CACHE", str(tmp_path / "cache"))
    base = load_base(f"random:{family}?layers=2&dim=64&heads=4&mlp=256", dtype="float32", device="cpu")
    assert base.tokenizer is not None
    base.model.save_pretrained(tmp_path / "base")
    base.tokenizer.save_pretrained(tmp_path / "base")
    settings: Any = {"dtype": "bfloat16", "device": "cpu", "quantise": "8bit"}
    mapped = load_base(str(tmp_path / "base"), **settings)
    kept = list((tmp_path / "cache/quantised").glob("*/model.safetensors"))
    assert len(kept) == 1
    # As packed in memory, from weights of the same rounding.
    in_memory = load_base(f"random:{family}?layers=2&dim=64&heads=4&mlp=256", **{**settings, "dtype": "float32"})
    for name, t in in_memory.model.state_dict().items():
        found = mapped.model.state_dict()[name]
        assert torch.equal(found, t.to(found.dtype)), name
    assert mapped.digest == load_base(str(tmp_path / "base"), dtype="float32").digest
    with safe_open(kept[0], framework="pt") as file:
        packed = file.get_slice(next(n for n in file.keys() if n.endswith("packed")))  # noqa: SIM118
        assert packed.get_dtype() == "U8"
    written = kept[0].stat().st_mtime_ns
    again = load_base(str(tmp_path / "base"), **settings)
    assert kept[0].stat().st_mtime_ns == written
    assert str(kept[0]) in Path("/proc/self/maps").read_text()
    tokens = torch.arange(20).view(2, 10) + 5
    assert torch.equal(again.model(input_ids=tokens).logits, mapped.model(input_ids=tokens).logits)


def test_a_full_disk_packs_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = load_base("random:llama", dtype="float32", device="cpu")
    base.model.save_pretrained(tmp_path / "base")
    (tmp_path / "cache").write_text("no folder")
    monkeypatch.setenv("COMINGLE_CACHE", str(tmp_path / "cache"))
    found = load_base(str(tmp_path / "base"), dtype="float32", device="cpu", quantise="4bit")
    assert found.quantised == "4bit"
    assert any(isinstance(m, QuantisedLinear) for m in found.model.modules())


def test_no_unpacked_weight_waits_for_the_backward_pass(recipe_file: Path) -> None:
    """A pass with a packed base holds the weights of one layer more, not of six."""
    peaks = {}
    for bits in ("none", "4bit"):
        recipe = load_recipe(recipe_file).with_changes({**WIDE, "quantise": bits})
        federation = build(recipe, prepare(recipe))
        with LiveBytes() as live:
            train(federation.clients, [0, 1, 2], 0)
        peaks[bits] = live.peak
    layer = 4 * sum(p.numel() for p in load_base(WIDE["base"], dtype="float32").model.model.layers[0].parameters())
    assert peaks["4bit"] - peaks["none"] < 1.5 * layer


def test_building_a_model_holds_one_unpacked_weight(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file).with_changes({**WIDE, "quantise": "4bit"})
    run_data = prepare(recipe)
    weights_of_layers = 4 * packed_parameters(run_data.base.model)
    with LiveBytes() as live:
        federation = build(recipe, run_data)
    assert live.peak - live.live < weights_of_layers / 6  # beside the state of the federation
    assert federation.clients.state.rows.nbytes < live.live


def test_gradients_are_those_of_the_unpacked_weights(recipe_file: Path) -> None:
    """The same base, whose weights were rounded to 4 bits and written back, trains to the same adapters."""
    packed = load_base("random:llama", dtype="float32", device="cpu", quantise="4bit")
    plain = load_base("random:llama", dtype="float32", device="cpu")
    with torch.no_grad():
        for name, module in packed.model.named_modules():
            if isinstance(module, QuantisedLinear):
                plain.model.get_submodule(name).weight.copy_(module.weight)
    rows = []
    recipe = load_recipe(recipe_file).with_changes({"training.rounds": 1})
    for base in (packed, plain):
        federation = build(recipe, prepare(recipe, base=base))
        train(federation.clients, [0, 1, 2], 0)
        rows.append(federation.clients.state.rows)
    assert torch.equal(*rows) or torch.allclose(*rows, atol=1e-6)


def test_a_run_is_told_apart_and_resumed(recipe_file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file).with_changes({"quantise": "8bit", "training.rounds": 1})
    done = api.run(recipe, out=tmp_path / "run")
    with pytest.raises(RunError, match="quantise"):
        api.run(recipe.with_changes({"quantise": "none"}), out=tmp_path / "run", resume=True)
    with pytest.raises(RunError, match="quantise: none"):
        done.user("ann").export(tmp_path / "out")
    assert done.user("ann").generate("some", max_new_tokens=3)


def test_what_it_is_not_for_is_refused(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    wrapped = recipe.with_changes({"method": "floral"})
    run_data = prepare(wrapped)
    with pytest.raises(RecipeError, match="quantise: method floral"):
        build(wrapped.with_changes({"quantise": "4bit"}), run_data)
    with pytest.raises(RecipeError, match=r"runtime\.gpu: method floral"):
        build(wrapped.with_changes({"runtime.gpu": ["graphs"]}), run_data)
    with pytest.raises(RecipeError, match="quantise"):
        parse_recipe({"data": {"users": {"a": "b"}}, "quantise": "2bit"})
    base = load_base("random:llama", dtype="float32", device="cpu")
    with pytest.raises(RecipeError, match=r"quantise: .*allowed: none"):
        api.run({"quantise": "4bit"}, users={"ann": ["x" * 2000]}, base=(base.model, base.tokenizer))


@pytest.mark.parametrize("method", ["comigs-1g1s", "stacking"])  # of which a step has one model, and several
@pytest.mark.slow
def test_checkpointing_changes_no_bit_and_keeps_less(recipe_file: Path, method: str) -> None:
    rows, peaks = [], []
    for checkpointed in (False, True):
        recipe = load_recipe(recipe_file).with_changes(
            {
                **WIDE,
                "method": method,
                "adapters.balance": "uniform",
                "runtime.gradient_checkpointing": checkpointed,
            }
        )
        federation = build(recipe, prepare(recipe))
        with LiveBytes() as live:
            train(federation.clients, [0, 1, 2], 0)
        rows.append(federation.clients.state.rows)
        peaks.append(live.peak)
    assert torch.equal(*rows)
    assert peaks[1] < 0.6 * peaks[0]


@pytest.mark.slow
def test_a_plan_sees_what_checkpointing_saves(recipe_file: Path) -> None:
    from comingle.cost.planning import plan

    wide = load_recipe(recipe_file).with_changes(WIDE)
    small = wide.with_changes({"runtime.gradient_checkpointing": True})
    passes = [plan(recipe).methods[0].machine.pass_bytes for recipe in (wide, small)]
    assert passes[1] < 0.6 * passes[0]
