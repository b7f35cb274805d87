"""Nets with what torch's modules may have: parts used twice, norms and dropout of every kind, buffers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from people import classes, numbers, recipe_of, run_of
from torch import Tensor, nn
from torch.nn import functional as F

import comingle
from comingle.runs.results import Run
from comingle.utils.errors import ComingleError

USERS = {n: {k: (numbers(c, 1, 8, 8, seed=c), classes(c, 3, c)) for k, c in parts.items()} for n, parts in {
    "ada": {"train": 12, "valid": 5, "test": 9}, "bob": {"train": 17, "valid": 6, "test": 8},
}.items()}  # fmt: skip


def seeded(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(*(layer() for layer in layers)).double()

    return make


def losses_by_hand(make: Callable[[], nn.Module], rounds: int) -> dict[str, float]:
    """Each user by itself: plain SGD on all of its samples at once."""
    found = {}
    for name, user in USERS.items():
        net, (x, y) = make().train(), user["train"]
        optimiser = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(rounds):
            optimiser.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimiser.step()
        found[name] = F.cross_entropy(net.eval()(user["test"][0]), user["test"][1]).item()
    return found


def losses(run: Run) -> dict[str, float]:
    return {name: user["test_loss"] for name, user in run.metrics["users"].items()}


def local(make: Callable[[], nn.Module], **changes: Any) -> Run:
    return run_of(recipe_of("local", **{"training.rounds": 3, "evaluation.model": "local", **changes}), USERS, make)


class Twice(nn.Module):
    """One layer by two names, and a weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.middle, self.other = nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.again, self.last = self.middle, nn.Linear(8, 3)
        self.other.weight = self.middle.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.first(x.flatten(1)).relu()).relu()
        return self.last(self.other(self.again(x).relu()).relu())


def sequence_of_linears() -> nn.Module:
    torch.manual_seed(3)
    again = nn.Linear(8, 8)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), again, nn.ReLU(), again, nn.Linear(8, 3)).double()


def with_convolution_and_relu_twice() -> nn.Module:
    torch.manual_seed(3)
    relu, again = nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)
    front = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), relu, again, relu, again]
    return nn.Sequential(*front, nn.Flatten(), nn.Linear(144, 8), relu, nn.Linear(8, 3)).double()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("make", [Twice, sequence_of_linears, with_convolution_and_relu_twice])
def test_what_a_net_has_twice_it_uses_twice(make: Callable[[], nn.Module], compiled: bool) -> None:
    run = local(make, **{"runtime.compile": compiled})
    assert losses(run) == pytest.approx(losses_by_hand(make, 3), rel=1e-6)
    for name, user in USERS.items():
        x, y = user["test"]
        said = F.cross_entropy(torch.as_tensor(run.user(name).predict(x)), y).item()
        assert said == pytest.approx(losses(run)[name], rel=1e-6)


@pytest.mark.parametrize("at_once", [None, 1])
@pytest.mark.parametrize("norm", [{}, {"affine": False}])
def test_batch_norm_sees_a_users_own_batch(norm: dict[str, bool], at_once: int | None) -> None:
    parts = [lambda: nn.Conv2d(1, 4, 3), lambda: nn.BatchNorm2d(4, **norm), nn.ReLU, nn.Flatten]
    make = seeded(*parts, lambda: nn.Linear(144, 3))
    run = local(make, **{"runtime.users_per_step": at_once})
    assert losses(run) == pytest.approx(losses_by_hand(make, 3), rel=1e-9)


def test_running_instance_norm_sees_a_users_own_samples() -> None:
    norm = lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True)  # noqa: E731
    make = seeded(lambda: nn.Conv2d(1, 4, 3), norm, nn.ReLU, nn.Flatten, lambda: nn.Linear(144, 3))
    assert losses(local(make)) == pytest.approx(losses_by_hand(make, 3), rel=1e-9)


class Functional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training)


@pytest.mark.parametrize("drop", [nn.Dropout, nn.Dropout2d, nn.AlphaDropout, Functional])
def test_randomness_is_of_the_seed_and_outlives_a_stop(tmp_path: Path, drop: Callable[[], nn.Module]) -> None:
    make = seeded(lambda: nn.Conv2d(1, 4, 3), drop, nn.Flatten, lambda: nn.Linear(144, 3))
    recipe = recipe_of(**{"training.rounds": 4, "training.batch_size": 6, "checkpoints.every": 1})

    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["round"] == 3 and event["advance"]:
            raise KeyboardInterrupt

    def run(**options: Any) -> Run:
        return comingle.run(recipe, users=USERS, base=make, **options)

    torch.manual_seed(7)
    whole = run()
    assert losses(run()) == losses(whole)
    with pytest.raises(KeyboardInterrupt):
        run(out=tmp_path / "cut", observers=[stop])
    assert losses(run(out=tmp_path / "cut", resume=True)) == losses(whole)
    shutil.rmtree(tmp_path / "cut")


class Shifted(nn.Module):
    """Inputs less a mean that never changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.last = nn.Linear(64, 3)
        self.register_buffer("mean", torch.full((64,), 0.25))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x.flatten(1) - self.get_buffer("mean"))


class Counting(Shifted):
    """Whose mean is that of a batch, kept for evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.get_buffer("mean").copy_(x.flatten(1).mean(0))
        return super().forward(x)


def test_a_buffer_that_stays_is_no_statistic() -> None:
    run = local(Shifted, **{"training.batch_size": 1, "runtime.micro_batch": 1})
    assert [event["tokens"] for event in run.events_in_memory if event["event"] == "round"] == [29, 29, 29]
    whole = local(Shifted)
    assert losses(whole) == pytest.approx(losses_by_hand(Shifted, 3), rel=1e-9)


def test_a_buffer_that_training_changes_is_of_a_users_own_batch() -> None:
    assert losses(local(Counting)) == pytest.approx(losses_by_hand(Counting, 3), rel=1e-9)
    with pytest.raises(ComingleError, match=r"got 1; .*net:Counting"):
        local(Counting, **{"training.batch_size": 1})


class Masked(Shifted):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((3,), float("-inf")))


def old_weight_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.utils.weight_norm(nn.Linear(64, 3)))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Masked, "^net 'Masked': mask .*finite"),
        (seeded(nn.Flatten, lambda: nn.BatchNorm1d(64, momentum=None)), " 1 .*momentum None"),
        (
            seeded(nn.Flatten, lambda: nn.BatchNorm1d(64, track_running_stats=False)),
            " 1 .*track_running_stats=False; allowed: True",
        ),
        (lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), r" 1\.weight .*shape"),
        (old_weight_norm, "^net 'old_weight_norm': .*copied: "),
    ],
)
def test_a_net_that_users_cannot_have_is_one_line(make: Any, message: str) -> None:
    with pytest.raises(ComingleError, match=message) as error:
        run_of(recipe_of(), USERS, make)
    assert "\n" not in str(error.value)
