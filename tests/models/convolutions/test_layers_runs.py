"""Runs of nets with convolutions: in native code they are the same runs, to rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import comingle
from comingle.models.kernels import convolutions
from comingle.models.nets import make_net
from comingle.models.scoring import CROSS_ENTROPY
from comingle.models.side_by_side import MIN_IMAGES, native_net
from comingle.models.stacked import StackedModel, stack
from comingle.runs.given import given_of, recipe_with
from comingle.runs.session import build, prepare
from comingle.training.kinds.nets import COMPILE_FROM
from comingle.utils.seeds import generator


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What native code is called for."""
    found: list[str] = []
    plain = convolutions.run
    monkeypatch.setattr(
        convolutions, "run", lambda name, *given, **tensors: (found.append(name), plain(name, *given, **tensors))
    )
    return found


def samples(count: int, seed: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, 1, 8, 8, generator=generator("runs", seed)), torch.arange(count) % 3)


def run(tmp_path: Path, base: str, compiled: Any, rounds: int = 2) -> Any:
    users = {name: samples(count, seed) for seed, (name, count) in enumerate({"ada": 40, "bob": 31}.items())}
    return comingle.run(
        users=users, base=base, method="fedavg", out=tmp_path / f"{base[4:]}-{compiled}",
        training={"rounds": rounds, "batch_size": 14},
        runtime={"compile": compiled, "device": "cpu", "dtype": "float32", "threads": 1},
    )  # fmt: skip


@pytest.mark.parametrize("base", ["net:cnn", "net:resnet9", "net:resnet9-group"])
def test_a_run_in_native_code_is_the_same_run(tmp_path: Path, calls: list[str], base: str) -> None:
    plain = run(tmp_path, base, False)
    assert not calls
    compiled = run(tmp_path, base, True)
    assert {"forward", "backward"} == set(calls)
    for user in plain.users:
        one, other = plain.user(user).model.state_dict(), compiled.user(user).model.state_dict()
        for name, value in one.items():
            if value.is_floating_point():
                torch.testing.assert_close(other[name], value, rtol=1e-3, atol=1e-4)


def test_a_short_run_is_not_worth_compiling(tmp_path: Path, calls: list[str]) -> None:
    run(tmp_path, "net:cnn", "auto", rounds=1)
    assert not calls


@pytest.mark.parametrize(("rounds", "users"), [(COMPILE_FROM - 1, 3), (COMPILE_FROM, 3), (COMPILE_FROM, 1)])
def test_users_do_not_decide_what_is_compiled(rounds: int, users: int) -> None:
    """Or whoever is alone on a machine would have other bits than among others."""
    given = given_of({f"user{n}": samples(9, n) for n in range(users)}, None, None, None)
    changes = {"method": "fedavg", "training": {"rounds": rounds}, "base": "net:cnn", "runtime": {"device": "cpu"}}
    recipe = recipe_with({}, given, base=None, method=None, changes=changes)
    model: Any = build(recipe, prepare(recipe, given=given)).clients.model
    assert model.compiled == (rounds >= COMPILE_FROM)


def stacked(**changes: Any) -> tuple[StackedModel, dict[str, Tensor]]:
    net = make_net("cnn", (1, 8, 8), 3, seed=0)
    model = stack([net], name="cnn", users=2, loss=CROSS_ENTROPY, **changes)
    return model, {
        slot.name: slot.init(slot.shape, generator("slot")).expand(2, *slot.shape) for slot in model.layout.slots
    }


@pytest.mark.parametrize(("batch", "dtype"), [(MIN_IMAGES - 1, torch.float32), (MIN_IMAGES, torch.bfloat16)])
def test_what_native_code_is_not_made_for_stays_under_vmap(calls: list[str], batch: int, dtype: torch.dtype) -> None:
    model, tensors = stacked(compiled=True, dtype=dtype)
    outputs = model.predict(
        {n: t.to(dtype) for n, t in tensors.items()}, [0, 1], torch.randn(2, batch, 1, 8, 8).to(dtype)
    )
    assert outputs.shape == (2, batch, 3)
    assert not calls


def test_nothing_is_compiled_for_another_device_or_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "enable", lambda cache: pytest.fail("compiled"))
    assert native_net(make_net("cnn", (1, 8, 8), 3).bfloat16()) is None
    assert native_net(make_net("cnn", (1, 8, 8), 3).to("meta")) is None
    assert native_net(make_net("mlp", (64,), 3)) is None


def test_whoever_counts_operations_sees_them(calls: list[str]) -> None:
    """Tensors that only stand for others have no memory that native code could read."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    model, tensors = stacked(compiled=True)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        own: dict[str, Tensor] = {name: mode.from_tensor(t) for name, t in tensors.items()}
        assert model.predict(own, [0, 1], torch.randn(2, MIN_IMAGES, 1, 8, 8)).shape == (2, MIN_IMAGES, 3)
    assert not calls
