"""On a GPU every method does what it does on the CPU: on text, on nets, and with everything that stands beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import ON_NETS, ON_TEXT, VARIANTS, method, net_recipe, question_recipe, text_recipe
from on_device import apart, play, recipe_of

# Client-level mixtures run a base's attention (sdpa, as nothing else is said on a GPU) under torch.vmap.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")

UNEQUAL = ("comigs-1g1s", "hetlora", "flexlora", "fedsa-lora")

BESIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "half of the users, the best round": (
        "fedmerge",
        {"training.participation": 0.5, "evaluation.select": "best", "evaluation.every": 1},
    ),
    "two users a pass, micro-batches": ("comigs-1g1s", {"runtime.users_per_step": 2, "runtime.micro_batch": 1}),
    "uploads as int8": ("fedavg", {"training.uploads": "int8"}),
    "sums alone": ("fedavg", {"privacy": {"mechanism": "none", "clip_norm": 1.0, "secure_aggregation": {}}}),
    **{
        rule: ("fedavg", {"aggregation": {"rule": rule, "hostile": 0.2}})
        for rule in ("median", "trimmed-mean", "geometric-median", "norm-bound")
    },
    "gates clipped to the best expert": ("comigs-2s", {"adapters.top_k": 1, "adapters.balance": "uniform"}),
    "gates in rank space": ("comigs-1g1s", {"adapters.mix": "linear"}),
}


NOISE = {"clip_norm": 0.1, "noise_multiplier": 1.0, "noise": "reproducible"}


def check(content: dict[str, Any], device: str, rounding: float, **changes: Any) -> None:
    here, there = play(recipe_of(content, "cpu", **changes)), play(recipe_of(content, device, **changes))
    assert there.rows.isfinite().all()
    assert apart(here, there) <= rounding
    assert there.losses == pytest.approx(here.losses, rel=rounding)


@pytest.mark.parametrize("name", ON_TEXT)
def test_on_text(tmp_path: Path, device: str, rounding: float, name: str) -> None:
    check(text_recipe(tmp_path, method(name)), device, rounding)


@pytest.mark.parametrize("name", ON_NETS)
def test_on_nets(device: str, rounding: float, name: str) -> None:
    check(net_recipe(method(name)), device, rounding)


@pytest.mark.parametrize("title", VARIANTS)
def test_variants(tmp_path: Path, device: str, rounding: float, title: str) -> None:
    name, settings = VARIANTS[title]
    own = method(name, **settings)
    if name in ON_NETS:
        check(net_recipe(own), device, rounding)
    if "centre" not in settings:  # which moves the base, and a language model's is frozen
        check(text_recipe(tmp_path, own), device, rounding)


@pytest.mark.parametrize("name", UNEQUAL)
def test_users_of_unequal_ranks(tmp_path: Path, device: str, rounding: float, name: str) -> None:
    check(text_recipe(tmp_path, method(name)), device, rounding, **{"adapters.rank": [4, 1, 2, 3]})


@pytest.mark.parametrize("title", BESIDE)
def test_what_stands_beside_a_method(tmp_path: Path, device: str, rounding: float, title: str) -> None:
    name, changes = BESIDE[title]
    check(text_recipe(tmp_path, method(name)), device, rounding, **changes)


@pytest.mark.parametrize("mechanism", ["central", "local", "example"])
def test_noise(tmp_path: Path, device: str, rounding: float, mechanism: str) -> None:
    """Which follows from every bit of what it hides, so that on another device it is another one."""
    privacy = {"privacy": {**NOISE, "mechanism": mechanism}}
    there = play(recipe_of(text_recipe(tmp_path, method("fedavg")), device, **privacy))
    assert there.rows.isfinite().all()
    assert (there.rows - there.start).norm() > 0


@pytest.mark.parametrize("name", ["comigs-1g1s", "fedmerge", "ifca"])
def test_on_questions(tmp_path: Path, device: str, rounding: float, name: str) -> None:
    # AdamW turns rounding of a gradient near its epsilon into a visible part of a step; the few steps here have such.
    check(question_recipe(tmp_path, method(name)), device, max(rounding, 1e-3))


@pytest.mark.parametrize("base", ["random:gpt2", "random:gemma2", "random:qwen3", "random:gpt_neox"])
def test_other_families(tmp_path: Path, device: str, rounding: float, base: str) -> None:
    check(text_recipe(tmp_path, method("comigs-1g1s")), device, rounding, base=base)


@pytest.mark.parametrize("net", ["cnn", "mnist", "cifar10", "resnet9", "resnet9-group"])
@pytest.mark.parametrize("name", ["fedavg", "floral"])
def test_convolutions_and_norms(tmp_path: Path, device: str, rounding: float, net: str, name: str) -> None:
    draw = np.random.default_rng(0)
    for user in ("ann", "bob"):
        x, y = draw.normal(size=(12, 3, 16, 16)).astype(np.float32), draw.integers(3, size=12)
        np.savez(tmp_path / f"{user}.npz", x=x, y=y)
    content = {
        **net_recipe(method(name)),
        "base": f"net:{net}",
        "data": {"kind": "samples", "users": {user: str(tmp_path / f"{user}.npz") for user in ("ann", "bob")}},
    }
    check(content, device, rounding, **{"training.batch_size": 4, "evaluation.model": "local"})


def test_bfloat16_is_near_float32(tmp_path: Path, device: str) -> None:
    content = text_recipe(tmp_path, method("comigs-1g1s"))
    wide = play(recipe_of(content, "cpu", **{"runtime.dtype": "float32"}))
    narrow = play(recipe_of(content, device, **{"runtime.dtype": "bfloat16"}))
    assert narrow.rows.isfinite().all()
    assert narrow.losses == pytest.approx(wide.losses, rel=0.01)
