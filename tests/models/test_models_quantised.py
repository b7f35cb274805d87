"""A base of 8 or 4 bits a weight: what it weighs, what it computes, and what of it is kept for the backward pass."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from comingle.config import load_recipe, parse_recipe
from comingle.cost.memory import LiveBytes
from comingle.models.loading import load_base
from comingle.models.quantised import QuantisedLinear
from comingle.runs import api
from comingle.runs.session import build, prepare
from comingle.training.client import train
from comingle.utils.errors import BaseModelError, RecipeError, RunError

WIDE = {"base": "random:llama?layers=6&dim=128&heads=4", "training.local_steps": 1}
ERRORS = {"8bit": 0.02, "4bit": 0.12}
"""Of a weight's norm; NF4 of normal numbers has 0.092."""


@pytest.fixture
def bits_of() -> Any:
    return pytest.importorskip("bitsandbytes", reason="extra quantised")


def weights(model: torch.nn.Module) -> int:
    return sum({id(t): t.nbytes for t in (*model.parameters(), *model.buffers())}.values())


@pytest.mark.parametrize("bits", ["8bit", "4bit"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_weights_are_packed_and_near_what_they_were(bits_of: Any, bits: Any, family: str) -> None:
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


def test_no_unpacked_weight_waits_for_the_backward_pass(bits_of: Any, recipe_file: Path) -> None:
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


def test_gradients_are_those_of_the_unpacked_weights(bits_of: Any, recipe_file: Path) -> None:
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


def test_a_run_is_told_apart_and_resumed(bits_of: Any, recipe_file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file).with_changes({"quantise": "8bit", "training.rounds": 1})
    done = api.run(recipe, out=tmp_path / "run")
    with pytest.raises(RunError, match="quantise"):
        api.run(recipe.with_changes({"quantise": "none"}), out=tmp_path / "run", resume=True)
    with pytest.raises(RunError, match="quantise: none"):
        done.user("ann").export(tmp_path / "out")
    assert done.user("ann").generate("some", max_new_tokens=3)


def test_what_it_is_not_for_is_refused(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    with pytest.raises(BaseModelError, match=r"pip install 'comingle\[quantised\]'"):
        load_base("random:llama", quantise="4bit")
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
