"""The words of measures: their unit, which way is better, and what a change is called."""

from __future__ import annotations

import math

import pytest

from comingle.reports.formatting import (
    axis_label,
    byte_unit,
    change,
    change_label,
    change_text,
    format_duration,
    interval_text,
    is_worse,
    tick,
    unit_and_direction,
)
from comingle.utils.records import MEASURES, number


def test_a_duration_is_in_the_largest_unit_that_makes_it_two_or_more() -> None:
    seconds = (-1, 0.2, 59.4, 119, 120, 7199, 7200, 172800)
    shown = ["0 s", "0 s", "59 s", "119 s", "2 min", "120 min", "2 h", "2 days"]
    assert [format_duration(value) for value in seconds] == shown


def test_every_measure_says_its_unit_and_which_way_is_better() -> None:
    assert {name: unit_and_direction(name) for name in MEASURES} == {
        "perplexity": "lower is better",
        "accuracy": "per cent, higher is better",
        "exact_match": "per cent, higher is better",
        "rouge1": "from 0 to 1, higher is better",
        "loss": "lower is better",
    }
    labels = ["test perplexity", "test accuracy, %", "test exact_match, %", "test rouge1", "test loss"]
    assert [axis_label(name) for name in MEASURES] == labels


@pytest.mark.parametrize(
    ("measure", "value", "cell", "at_a_tick"),
    [
        ("perplexity", 1234.567, "1,234.57", "1,234.57"),
        ("perplexity", 200.0, "200.00", "200"),
        ("accuracy", 0.1234, "12.3%", "12.34"),
        ("accuracy", 0.825, "82.5%", "82.5"),
        ("accuracy", 0.55, "55.0%", "55"),
        ("accuracy", 0.005, "0.5%", "0.5"),
        ("rouge1", 0.7834, "0.783", "0.7834"),
        ("loss", 0.000123456, "0.000123", "0.000123456"),
        ("loss", 2.5, "2.5", "2.5"),
    ],
)
def test_numbers_are_in_the_unit_of_their_measure(measure: str, value: float, cell: str, at_a_tick: str) -> None:
    assert number(value, measure) == cell
    assert number(None, measure) == "not finite"
    assert tick(value, measure) == at_a_tick


@pytest.mark.parametrize(
    ("measure", "value", "baseline", "expected", "text", "worse"),
    [
        ("perplexity", 30.0, 40.0, -25.0, "-25.0%", False),
        ("perplexity", 50.0, 40.0, 25.0, "+25.0%", True),
        ("accuracy", 0.9, 0.7, 20.0, "+20.0\u00a0points", False),
        ("accuracy", 0.7, 1.0, -30.0, "-30.0\u00a0points", True),
        ("rouge1", 0.783, 0.77, 1.3, "+1.3\u00a0points", False),
        ("loss", 1e-6, 1e-2, -4.0, "×0.0001", False),
        ("loss", 0.6, 0.2, math.log10(3), "×3", True),
        ("loss", 0.20014, 0.2, math.log10(1.0007), "×1.00070", True),
        ("loss", 0.2, 0.2, 0.0, "×1", False),
    ],
)
def test_changes_are_told_as_their_measure_is_compared(
    measure: str, value: float, baseline: float, expected: float, text: str, worse: bool
) -> None:
    found = change(value, baseline, measure)
    assert found == pytest.approx(expected)
    assert found is not None
    assert change_text(found, measure) == text
    assert is_worse(found, measure) == worse


def test_a_change_that_has_no_number_is_none() -> None:
    assert change(0.0, 1.0, "loss") is change(1.0, 0.0, "loss") is change(1.0, 0.0, "perplexity") is None
    assert change(0.5, 0.0, "accuracy") == 50  # nothing right is a result like another


def test_the_ends_of_the_axis_are_where_the_measure_has_them() -> None:
    assert change_label("perplexity", "local").endswith("against local, % (left: better, right: worse)")
    assert change_label("accuracy", "local").endswith("percentage points (left: worse, right: better)")
    assert change_label("rouge1", "local").endswith("points of 0.01 (left: worse, right: better)")
    assert change_label("loss", "local").endswith("multiple of that of local (left: better, right: worse)")


def test_few_bytes_are_counted_one_by_one() -> None:
    assert byte_unit(0) == byte_unit(9_999) == (1.0, "B")
    assert byte_unit(10_000) == (1e6, "MB")


@pytest.mark.parametrize(("measure", "text"), [("accuracy", "+0.0\u00a0points"), ("perplexity", "+0.0%")])
def test_no_change_has_no_minus_sign(measure: str, text: str) -> None:
    assert change_text(-0.04, measure) == text


def test_an_end_near_0_keeps_its_sign() -> None:
    """It says whether the interval contains 0."""
    assert interval_text((-8.17, -0.04), "perplexity") == "-8.17 to -0.04"
    assert interval_text((0.0, 2.0), "accuracy") == "+0.0 to +2.0"
