"""Copies of the tensors of all users."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from comingle.training.state import State, initial_state
from comingle.utils.trees import Layout, Slot


def test_a_compact_copy_is_equal_and_keeps_no_zeros() -> None:
    users, columns = 2, 1000
    state = State(
        rows=torch.randn(users, columns),
        first=torch.zeros(users, columns),
        second=torch.zeros(users, columns),
        iterations=torch.zeros(users, dtype=torch.int64),
        router_steps=torch.zeros(users, dtype=torch.int64),
        ranks=torch.full((users,), 8),
        versions=torch.zeros(users, dtype=torch.int64),
    )
    compact = state.copy(compact=True)
    assert all(torch.equal(t, compact.tensors()[name]) for name, t in state.tensors().items())
    assert compact.first.untyped_storage().nbytes() == compact.first.element_size()
    restored = compact.copy()
    restored.first += 1  # a copy of it has memory of its own
    assert not compact.first.any()
    state.rows.zero_()
    assert compact.rows.any()


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc")
def test_a_state_before_training_takes_the_memory_of_its_parameters() -> None:
    users, columns = 40, 250_000  # 40 MB of parameters, and as many of each moment
    slot = Slot(name="weight", shape=(columns,), roles=("attention",), init=lambda shape, _: torch.ones(shape))
    mask = torch.ones(1, columns, dtype=torch.bool).expand(users, columns)
    common = {"local": torch.zeros(columns, dtype=torch.bool), "ranks": torch.zeros(users, dtype=torch.int64)}
    before = resident_bytes()
    state = initial_state(Layout(slots=(slot,)), mask, names=[f"u{i}" for i in range(users)], seed=0, **common)
    assert state.first.shape == state.second.shape == state.rows.shape
    assert resident_bytes() - before < 1.5 * state.rows.nbytes
    assert not state.first.any()
    state.second += 1  # like other memory once it is written to
    assert bool((state.second == 1).all())
