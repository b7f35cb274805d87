"""Copies of the tensors of all users."""

from __future__ import annotations

import torch

from comingle.training.state import State


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
