"""Where users' tensors are kept changes nothing that is computed, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from comingle.training.backends.local import InProcess
from comingle.training.rounds import run_rounds
from comingle.training.storage.disk import OnDisk
from comingle.utils.errors import RecipeError

ABSENT = {"training.participation": 0.6, "training.rounds": 3, "runtime.users_per_step": 2}


def outcome(federation: InProcess) -> tuple[dict[str, torch.Tensor], list[Any], dict[str, torch.Tensor]]:
    """Everybody's tensors after all rounds, their scores, and what the server keeps."""
    scores = run_rounds(federation, observe=lambda event: None)
    state = federation.clients.state
    whole = state.take(list(range(federation.clients.num_rows))).tensors()
    return whole, [score.measures for score in scores], federation.server.state


def require_equal(memory: InProcess, disk: InProcess) -> None:
    assert isinstance(disk.clients.state, OnDisk)
    expected, found = outcome(memory), outcome(disk)
    for one, other in ((expected[0], found[0]), (expected[2], found[2])):
        assert one.keys() == other.keys()
        assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert expected[1] == found[1]


@pytest.mark.sampled(7)
def test_on_disk_is_in_memory(federated: dict[str, Any], federate: Callable[..., InProcess]) -> None:
    memory, disk = (federate(federated, changes=ABSENT | {"runtime.store": store}) for store in ("memory", "disk"))
    require_equal(memory, disk)


@pytest.mark.slow
def test_nets_on_disk_are_nets_in_memory(netted: dict[str, Any], federate_nets: Callable[..., InProcess]) -> None:
    memory, disk = (federate_nets(netted, changes=ABSENT | {"runtime.store": store}) for store in ("memory", "disk"))
    require_equal(memory, disk)


@pytest.mark.parametrize("uploads", ["int8", "bfloat16"])
def test_what_rounding_took_away_is_on_disk_too(uploads: str, federate: Callable[..., InProcess]) -> None:
    changes = ABSENT | {"training.uploads": uploads}
    memory, disk = (
        federate("fedavg", dtype="float32", changes=changes | {"runtime.store": store}) for store in ("memory", "disk")
    )
    require_equal(memory, disk)


BEST = {"evaluation.select": "best", "evaluation.every": 1, "training.experts.learning_rate": 10.0}


@pytest.mark.parametrize("chosen", ["local", "comigs-1g1s", {"name": "fedmerge", "models": 2}])
@pytest.mark.parametrize("users", [None, 2])
def test_the_best_round_on_disk_is_that_in_memory(chosen: Any, users: int | None, federate: Any) -> None:
    """With a rate at which the last round is not the best; also where it is chosen by a sample."""
    changes = ABSENT | BEST | {"evaluation.users": users}
    memory, disk = (federate(chosen, changes=changes | {"runtime.store": store}) for store in ("memory", "disk"))
    require_equal(memory, disk)
    assert disk.clients.chosen_round == memory.clients.chosen_round < 3


def test_what_has_one_model_is_refused(federate: Callable[..., InProcess]) -> None:
    with pytest.raises(RecipeError, match=r"method centralized: .*runtime\.store: memory"):
        federate("centralized", changes={"runtime.store": "disk"})
