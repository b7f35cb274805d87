"""Gradients stay in the dtype that they were computed in until a step takes them: nobody's step may differ by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from comingle.config.settings import OptimizerSection
from comingle.training import cohort_state
from comingle.training.backends.local import InProcess
from comingle.training.cohort_state import descend
from comingle.training.steps import Steps
from comingle.utils.trees import Tree
from federations import everyone, local_round

Federate = Callable[..., InProcess]

BASE = "random:llama?layers=1&dim=32"
SGD = {"name": "sgd", "learning_rate": 0.3, "schedule": "constant", "weight_decay": 0.1}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": SGD,
    "momentum": {**SGD, "momentum": 0.9},
    "clipped": {**SGD, "clip_norm": 0.01},
    "adamw": {"name": "adamw"},
}
METHODS = ["fedavg", "comigs-1g1s", "floral", "ditto", "hetlora", "scaffold"]


def rows_after_a_round(federate: Federate, method: str, **changes: Any) -> Tensor:
    federation = federate(method, base=BASE, dtype="bfloat16", changes=changes)
    local_round(federation, everyone(federation), 0)
    return federation.clients.state.rows.clone()


def first_gradients(federate: Federate, method: str, **changes: Any) -> set[torch.dtype]:
    federation = federate(method, base=BASE, dtype="bfloat16", changes=changes)
    clients = federation.clients
    federation.download(everyone(federation))
    cohort, phase = clients.cohort(list(range(clients.num_rows)), 0), clients.method.client.phases[0]
    gradients = clients.steps.gradient(cohort, clients.batch_source.draw(cohort.owners, phase, 0, 0, 0), phase)[1]
    return {gradient.dtype for gradient in gradients.values()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", METHODS)
def test_a_round_is_that_of_wide_gradients(
    federate: Federate, monkeypatch: pytest.MonkeyPatch, method: str, optimizer: str
) -> None:
    changes = {"training.experts": OPTIMIZERS[optimizer], "training.router": OPTIMIZERS[optimizer]}
    found = rows_after_a_round(federate, method, **changes)
    as_it_is = Steps._forward_backward

    def wide(self: Steps, *args: Any, **kwargs: Any) -> tuple[Tensor, Tree]:
        losses, gradients = as_it_is(self, *args, **kwargs)
        return losses, Tree({name: gradient.float() for name, gradient in gradients.items()})

    monkeypatch.setattr(Steps, "_forward_backward", wide)
    assert torch.equal(found, rows_after_a_round(federate, method, **changes))
    assert found.isfinite().all()


def test_what_is_changed_or_added_up_before_a_step_is_wide(federate: Federate) -> None:
    assert first_gradients(federate, "fedavg") == {torch.bfloat16}
    assert first_gradients(federate, "fedavg", **{"runtime.micro_batch": 1}) == {torch.float32}
    assert first_gradients(federate, "ditto") == {torch.float32}


@pytest.mark.parametrize("piece", [1, 7, 40, 1 << 20])
@pytest.mark.parametrize("shape", [(5,), (5, 4, 3), (5, 0), (1, 8)])
def test_a_step_widens_piece_by_piece(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], piece: int) -> None:
    monkeypatch.setattr(cohort_state, "ENTRIES_CONVERTED_AT_ONCE", piece)
    draw = torch.Generator().manual_seed(0)
    values, gradient = (torch.randn(shape, generator=draw) for _ in range(2))
    wanted = (values - 0.5 * 0.1 * values) - 0.5 * gradient.bfloat16().float()
    settings = OptimizerSection(name="sgd", weight_decay=0.1)
    descend(settings, 0.5, values, gradient.bfloat16())
    torch.testing.assert_close(values, wanted, rtol=1e-6, atol=1e-7)
