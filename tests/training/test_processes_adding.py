"""Sums over users that are shared out in any way: the same to the last bit, and as exact as float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from comingle.training.backends.distributed import (
    choose_shifts,
    integer_sums,
    largest_terms,
    sum_over_processes,
    sums_from_integers,
)
from comingle.utils.errors import DivergenceError

USERS = 7


def uploads() -> dict[str, Tensor]:
    """Magnitudes from 1e-6 to 1e3, a tensor of components, and one of zeros."""
    draw = torch.Generator().manual_seed(0)
    wide = torch.randn(USERS, 5, 8, generator=draw) * 10 ** torch.linspace(-6, 3, 8)
    return {"wide": wide, "clustered": torch.randn(USERS, 3, 4, generator=draw), "zeros": torch.zeros(USERS, 2)}


def weights() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    plain = torch.rand(USERS, generator=draw, dtype=torch.float64)
    return {
        "wide": plain / plain.sum(),
        "clustered": torch.rand(USERS, 3, generator=draw, dtype=torch.float64),
        "zeros": plain,
    }


def added(edges: list[int]) -> dict[str, Tensor]:
    """The sums as processes find them that have users ``edges[i]`` to ``edges[i + 1]``."""
    spans = [slice(*edge) for edge in pairwise(edges)]
    parts = [({n: t[s] for n, t in uploads().items()}, {n: t[s] for n, t in weights().items()}) for s in spans]
    largest = torch.stack([largest_terms(*part) for part in parts]).amax(0)
    shifts = choose_shifts(largest, USERS)
    total = torch.stack([integer_sums(*part, shifts) for part in parts]).sum(0)
    return sums_from_integers(total, uploads(), shifts)


@pytest.mark.parametrize("edges", [[0, 3, 7], [0, 0, 7], [0, 1, 2, 3, 4, 5, 6, 7]], ids=str)
def test_sums_do_not_depend_on_who_has_whom(edges: list[int]) -> None:
    whole, parts = added([0, USERS]), added(edges)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_sums_are_those_of_float64_rounded_once() -> None:
    tensors, by = uploads(), weights()
    expected = {
        "wide": torch.einsum("u,u...->...", by["wide"].float().double(), tensors["wide"].double()),
        "clustered": torch.einsum("uc,uc...->c...", by["clustered"].float().double(), tensors["clustered"].double()),
        "zeros": torch.zeros(2, dtype=torch.float64),
    }
    found = added([0, 2, USERS])
    for name, wanted in expected.items():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name], wanted.float(), rtol=2**-24, atol=1e-12)


def test_one_process_has_the_same() -> None:
    found = sum_over_processes(
        uploads(), weights(), USERS, reduce_max=lambda values: values, reduce_sum=lambda values: values
    )
    assert all(torch.equal(t, found[name]) for name, t in added([0, 4, USERS]).items())


def test_what_is_not_finite_has_no_sum() -> None:
    broken = uploads()
    broken["wide"][3, 0, 0] = float("nan")
    with pytest.raises(DivergenceError, match="not finite"):
        choose_shifts(largest_terms(broken, weights()), USERS)


@pytest.mark.parametrize("size", [5e-324, 1e-310, 1e-300, 2.0**-963, 1.0, 2.0**1020])
def test_terms_of_any_size_have_a_sum(size: float) -> None:
    """Of three users, as exact as float64 has it: where powers of two are beyond it, too."""
    tensors = {"x": torch.tensor([[size, 0.0], [size, size], [size, -size]], dtype=torch.float64)}
    ones = {"x": torch.ones(3, dtype=torch.float64)}
    found = sum_over_processes(tensors, ones, 3, reduce_max=lambda values: values, reduce_sum=lambda values: values)
    assert found["x"].tolist() == [3 * size, 0.0]
