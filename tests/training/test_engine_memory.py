"""A pass that needs more memory than there is: said in one line with the setting to lower, and avoided by `auto`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from comingle.config import load_recipe
from comingle.cost import planning
from comingle.cost.memory import LiveBytes
from comingle.methods import REGISTRY
from comingle.runs.session import build, prepare
from comingle.training.client import train
from comingle.training.kinds import nets
from comingle.training.settings import PassSize
from comingle.utils.errors import RecipeError

DRIVER = Path(__file__).with_name("memory_driver.py")
WIDE = {"base": "random:llama?layers=2&dim=128", "training.context": 64, "training.batch_size": 16}


class Full(TorchDispatchMode):
    """An allocator that has no block of more than so many bytes, as a full GPU says it."""

    def __init__(self, most: int):
        super().__init__()
        self.most = most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        floats = (t for t in tree_leaves(made) if isinstance(t, torch.Tensor) and t.is_floating_point())
        if any(t.untyped_storage().nbytes() > self.most for t in floats):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return made


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of address space are Linux's")
def test_a_machine_without_memory_names_the_setting(recipe_file: Path) -> None:
    def played(*changes: str, most: int) -> subprocess.CompletedProcess[str]:
        given = [f"{key}={value}" for key, value in WIDE.items()]
        command = [sys.executable, str(DRIVER), str(recipe_file), str(most), *given, *changes]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **QUIET})

    full = played("training.batch_size=512", "runtime.micro_batch=512", "runtime.users_per_step=3", most=150_000_000)
    assert full.returncode == 2, full.stderr
    assert re.fullmatch(r"runtime: .*cpu.* 3 users with 512 .*; try runtime\.users_per_step=1, or auto\n", full.stdout)
    assert played("training.rounds=1", most=400_000_000).returncode == 0


QUIET = {"COMINGLE_NO_TYPECHECK": "1", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, r"3 users with 2 .*; try runtime\.users_per_step=1\b"),
        ({"runtime.users_per_step": 1}, r"1 user with 2 .*; try runtime\.micro_batch=1\b"),
        (
            {"runtime.users_per_step": 1, "runtime.micro_batch": 1},
            r"1 user with 1 .*; try .*training\.context .*adapters\.rank",
        ),
    ],
)
def test_a_full_gpu_names_what_is_next_to_lower(
    federate: Callable[..., Any], changes: dict[str, Any], told: str
) -> None:
    federation = federate("comigs-1g1s", changes=changes)
    with pytest.raises(RecipeError, match=told), Full(1000):
        train(federation.clients, [0, 1, 2], 0)
    with pytest.raises(RecipeError, match=r"^runtime: "), Full(1000):
        federation.clients.evaluate()


def test_other_mistakes_are_not_taken_for_memory(federate: Callable[..., Any]) -> None:
    class Broken(Full):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit") as caught, Broken(0):
        train(federate("fedavg").clients, [0], 0)
    assert not isinstance(caught.value, RecipeError)


def peak_of(recipe: Any, run_data: Any) -> tuple[int, PassSize]:
    """Bytes that a round adds at most to what is there before, and in what portions it went."""
    federation = build(recipe, run_data)
    with LiveBytes() as live:
        train(federation.clients, [0, 1, 2], 0)
    return live.peak, federation.clients.pass_size


def test_inputs_limit_the_users_of_a_pass(federate_nets: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch norm depends on the number of users in the last bits, so its passes are as large as before."""
    plain, normed = (federate_nets("fedavg", changes={"data.task.name": name}).clients for name in ("mlp", "mlp-norm"))
    train(plain, [0, 1, 2, 3], 0)
    inputs = plain.batch_source.banks["train"].inputs
    monkeypatch.setattr(nets, "INPUT_BYTES_PER_PASS", 2 * 40 * inputs[0].nbytes)
    limited = federate_nets("fedavg", changes={"data.task.name": "mlp"}).clients
    assert limited.pass_size.users == 2 < plain.pass_size.users
    train(limited, [0, 1, 2, 3], 0)
    assert torch.equal(limited.state.rows, plain.state.rows)
    assert normed.pass_size.users > 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["comigs-1g1s", "floral"])
def test_auto_finds_a_pass_that_fits(recipe_file: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    recipe = load_recipe(recipe_file).with_changes({**WIDE, "method": name, "training.local_steps": 1})
    run_data, automatic = prepare(recipe), recipe.with_changes({"runtime.users_per_step": "auto"})
    whole, pass_size = peak_of(recipe, run_data)
    monkeypatch.setattr(planning, "free_bytes", lambda device: 10**12)
    assert peak_of(automatic, run_data)[1] == pass_size
    monkeypatch.setattr(planning, "free_bytes", lambda device: whole // 2)
    least, chosen = peak_of(automatic, run_data)
    assert least <= whole // 2
    assert chosen.users * chosen.sequences < pass_size.users * pass_size.sequences
    monkeypatch.setattr(planning, "free_bytes", lambda device: 1000)
    with pytest.raises(RecipeError, match=r"users_per_step: auto: .* GB.*adapters\.rank"):
        build(automatic, run_data)


@pytest.mark.slow
def test_auto_plans_for_every_kind_and_method(recipe_file: Path, federate_nets: Callable[..., Any]) -> None:
    """What is not given is as large as without `auto`, wherever there is room."""
    recipe = load_recipe(recipe_file).with_changes({"runtime.users_per_step": "auto"})
    run_data = prepare(recipe)
    for name in ("centralized", "pretrained", "fdlora", "stacking"):
        assert name in REGISTRY
        assert build(recipe.with_changes({"method": name}), run_data).clients.pass_size.users > 1
    assert federate_nets("floral", changes={"runtime.users_per_step": "auto"}).clients.pass_size.users > 1
