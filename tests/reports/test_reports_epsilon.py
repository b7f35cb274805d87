"""An unbounded epsilon is null in files; it is the largest of all."""

from __future__ import annotations

import math

import pytest

from comingle.reports.comparisons import _most_revealing_privacy
from comingle.reports.formatting import epsilon_of
from comingle.reports.tables import _participants_title


def test_the_seed_without_a_bound_is_the_most_revealing() -> None:
    seeds = [{"privacy": {"epsilon": epsilon, "delta": 1e-5}} for epsilon in (3.0, None, 8.0)]
    assert _most_revealing_privacy([*seeds, {}])["epsilon"] is None
    assert _most_revealing_privacy([seeds[0], seeds[2]])["epsilon"] == 8.0


@pytest.mark.parametrize(("epsilon", "text"), [(None, "inf"), (2.5, "2.5")])
def test_the_table_of_clients_names_it(epsilon: float | None, text: str) -> None:
    content = {"users": {}, "round": 1, "rounds": 2, "privacy": {"epsilon": epsilon, "delta": 1e-5}}
    assert f"epsilon {text} at delta" in _participants_title(content)
    assert epsilon_of(content["privacy"]) == (math.inf if epsilon is None else epsilon)
