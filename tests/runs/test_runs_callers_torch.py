"""Settings of torch that a caller has made neither change numbers nor end a run, and are the caller's again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn

import comingle
from comingle.data.samples.samples import Samples

TEXTS = {
    name: [f"the cat number {i} sat on mat {i * k} and saw" for i in range(60)]
    for k, name in enumerate(("ada", "ben", "cem"), start=1)
}
RECIPE: dict[str, Any] = {
    "base": "random:llama?layers=1&dim=32",
    "training": {"rounds": 2, "local_steps": 1, "batch_size": 2, "context": 32},
    "runtime": {"dtype": "float32", "device": "cpu"},
    "evaluation": {"first": False},
}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def gradients_off() -> Iterator[None]:
    torch.set_grad_enabled(False)
    try:
        yield
    finally:
        torch.set_grad_enabled(True)


def settings() -> dict[str, AbstractContextManager[Any]]:
    return {
        "float64": default_dtype(torch.float64),
        "bfloat16": default_dtype(torch.bfloat16),
        "no_grad": torch.no_grad(),
        "grad off": gradients_off(),
        "inference_mode": torch.inference_mode(),
        "autocast": torch.autocast("cpu", dtype=torch.bfloat16),
        "within meta": torch.device("meta"),
        "default meta": default_device("meta"),
    }


def seen() -> tuple[Any, ...]:
    """How torch is set."""
    grad = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return *grad, torch.is_autocast_enabled("cpu"), torch.get_default_dtype(), torch.get_default_device()


def losses(metrics: dict[str, Any]) -> list[float]:
    return [value for user in metrics["users"].values() for key, value in user.items() if key.startswith("test_")]


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))


def samples(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(60, 6, generator=generator), torch.arange(60) % 3


SAMPLES = {"ada": samples(0), "bob": samples(1)}
INPUTS = samples(2)[0]


def of_language(folder: Path) -> list[Any]:
    """Everything that is done with language models."""
    run = comingle.run(RECIPE, users=TEXTS, method="fedit", out=folder / "run")
    loaded = comingle.load(folder / "run", users=TEXTS)
    ada = loaded.user("ada")
    tokens = torch.arange(2, 34, device="cpu")
    routed = comingle.run(RECIPE, users=TEXTS, method="comigs-1g1s").user("ben")
    return [
        losses(run.metrics),
        ada.generate("the cat", max_new_tokens=4, temperature=0.8, seed=1),
        ada.perplexity("the cat sat on a mat"),
        ada.score(tokens, context=16).perplexity,
        ada.logits(tokens.view(1, -1)).sum().item(),
        sum(float(p.double().sum()) for p in ada.merge().parameters()),
        ada.export(folder / "exported").form,
        routed.route("the cat sat").gates.sum().item(),
    ]


def of_nets(folder: Path) -> list[Any]:
    """Everything that is done with nets."""
    recipe = {"training": {"rounds": 2, "batch_size": 8}, "runtime": RECIPE["runtime"]}
    run = comingle.run(recipe, users=SAMPLES, base=make_net, method={"name": "floral", "clusters": 2})
    bob = run.user("bob")
    batch = Samples(inputs=INPUTS, targets=SAMPLES["bob"][1])
    return [losses(run.metrics), bob.predict(INPUTS).sum().item(), bob.evaluate(batch).mean_loss]


@cache
def plain(everything: Callable[[Path], list[Any]]) -> list[Any]:
    with TemporaryDirectory() as folder:
        return everything(Path(folder))


@pytest.mark.parametrize("name", list(settings()))
@pytest.mark.parametrize("everything", [of_language, of_nets])
@pytest.mark.sampled(2)
def test_numbers_are_those_of_a_new_process(tmp_path: Path, name: str, everything: Any) -> None:
    with settings()[name]:
        before = seen()
        found = everything(tmp_path)
        assert seen() == before
    assert found == plain(everything)


def of_several_runs(folder: Path) -> list[Any]:
    """Comparisons, advice, joins and audits."""
    two = {name: TEXTS[name] for name in ("ada", "ben")}
    run = comingle.run(RECIPE, users=two, method="fedavg")
    compared = comingle.compare(RECIPE, ["fedavg"], users=two, seeds=[0])
    joined = comingle.join(run, name="dan", data=TEXTS["cem"])
    advice = comingle.advise(RECIPE, ["fedavg"], users=two, seeds=[0], rounds=2)
    audit = comingle.audit(run, trials=2, rounds=1, shadows=0, users=two)
    return [
        [mean["mean_test_perplexity"] for mean in compared.means()],
        losses(joined.run.metrics),
        [record["change"] for record in advice.records()],
        repr(audit),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inference_mode", "float64", "within meta"])
def test_several_runs_are_those_of_a_new_process(tmp_path: Path, name: str) -> None:
    with settings()[name]:
        found = of_several_runs(tmp_path)
    assert found == plain(of_several_runs)


def test_a_base_that_was_loaded_in_inference_mode_is_trained_on() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from comingle.models.random_bases import byte_tokenizer

    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )

    def found(mode: AbstractContextManager[Any]) -> list[float]:
        torch.manual_seed(0)
        with mode:
            model = LlamaForCausalLM(config)
            run = comingle.run(RECIPE | {"base": "given"}, users=TEXTS, base=(model, byte_tokenizer()), method="fedavg")
        return losses(run.metrics)

    assert found(torch.inference_mode()) == found(torch.enable_grad())


def test_settings_are_put_back_after_a_mistake() -> None:
    with default_dtype(torch.float64), torch.inference_mode():
        before = seen()
        with pytest.raises(comingle.ComingleError):
            comingle.run(RECIPE, users=TEXTS, method="fedavgg")
        assert seen() == before
