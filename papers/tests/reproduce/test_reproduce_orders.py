"""Kendall's tau against a count by hand, ranks, and what is said in words."""

from __future__ import annotations

import math
import random
from itertools import combinations

import pytest

from comingle_papers.reproduce.tables import Entry, _note_letter, compare_orders, ranks, sentence


def entries(*means: float, std: float | None = None) -> dict[str, Entry]:
    return {name: (mean, std) for name, mean in zip("abcdefghij", means, strict=False)}


def test_ranks_share_the_better_place() -> None:
    assert ranks({"a": 3.0, "b": 1.0, "c": 1.0, "d": 2.0}) == {"a": 4, "b": 1, "c": 1, "d": 3}
    assert ranks({"a": 3.0, "b": 1.0, "c": 2.0}, lower_is_better=False) == {"a": 1, "b": 3, "c": 2}


def test_tau_counted_by_hand() -> None:
    # Pairs ab, ac, ad, bc, bd, cd; the second list turns bc round alone: (5 - 1) / 6.
    order = compare_orders(entries(1, 2, 3, 4), entries(10, 30, 20, 40))
    assert (order.rows, order.pairs, order.agreeing) == (4, 6, 5)
    assert order.tau == pytest.approx(4 / 6)
    assert order.swapped == (("b", "c"),)
    assert order.unclear == ()
    # Exact two-sided test: of the 24 orders of four, 4 have tau >= 2/3, 4 have tau <= -2/3.
    assert order.p_value == pytest.approx(8 / 24)


def test_tau_equals_its_definition_with_ties() -> None:
    draw = random.Random(0)
    for _ in range(20):
        paper = [float(draw.randint(0, 5)) for _ in range(8)]
        ours = [float(draw.randint(0, 5)) for _ in range(8)]
        signs = [
            (math.copysign(p != q, q - p), math.copysign(o != r, r - o))
            for (p, o), (q, r) in combinations(zip(paper, ours, strict=True), 2)
        ]
        concordant = sum(a * b for a, b in signs)
        normal = math.sqrt(sum(a != 0 for a, _ in signs) * sum(b != 0 for _, b in signs))
        assert compare_orders(entries(*paper), entries(*ours)).tau == pytest.approx(concordant / normal)


def test_only_rows_with_both_numbers_count() -> None:
    order = compare_orders(entries(1, 2, 3), {"a": (1.0, None), "c": (2.0, None), "z": (0.0, None)})
    assert (order.rows, order.tau) == (2, pytest.approx(1.0))


def test_the_paper_s_better_one_is_named_first_whatever_the_direction() -> None:
    lower = compare_orders(entries(2, 1), entries(1, 2))
    higher = compare_orders(entries(2, 1), entries(1, 2), lower_is_better=False)
    assert (lower.swapped, higher.swapped) == ((("b", "a"),), (("a", "b"),))


def test_differences_within_the_deviations_are_set_apart() -> None:
    noisy = {"a": (1.5, 0.3), "b": (1.0, 0.3)}
    assert compare_orders(entries(1, 2, std=0.1), noisy).unclear == (("a", "b"),)
    clear = {"a": (1.7, 0.3), "b": (1.0, 0.3)}
    assert compare_orders(entries(1, 2, std=0.1), clear).swapped == (("a", "b"),)
    assert compare_orders(entries(1, 2, std=0.5), clear).unclear == (("a", "b"),)


def test_sentences() -> None:
    full = compare_orders(entries(1, 2, 3), entries(4, 5, 6))
    assert sentence("News", full) == "News: tau = 1.00 (p = 0.33) over 3 rows; the paper's order is reproduced."
    some = compare_orders(entries(1, 2, 3, 4), entries(10, 30, 20, 40))
    assert sentence("News", some) == (
        "News: tau = 0.67 (p = 0.33) over 4 rows; the order is mostly reproduced: 5 of 6 pairs are in the paper's "
        "order; reversed, with one seed, so that our deviations are unknown: b before c."
    )
    seeds = compare_orders(entries(1, 2, 3, 4), entries(10, 30, 20, 40, std=1.0))
    assert sentence("News", seeds).endswith("reversed, beyond the deviations: b before c.")
    none = compare_orders(entries(1, 2, 3), entries(3, 2, 1))
    assert "the order is not reproduced: 0 of 3 pairs" in sentence("News", none)
    noise = compare_orders(entries(1, 2, std=2.0), entries(2, 1))
    assert sentence("News", noise).endswith("and the others differ by no more than their deviations: a before b.")
    long = compare_orders(entries(*range(6)), entries(*range(6, 0, -1)))
    assert sentence("News", long).endswith("b before e and 7 more.")


def test_what_cannot_be_compared_is_said() -> None:
    assert sentence("News", compare_orders({}, {})) == (
        "News: 0 row with numbers on both sides, so there is no order to compare."
    )
    flat = compare_orders(entries(1, 1, 1), entries(1, 2, 3))
    assert (flat.tau, flat.p_value) == (None, None)
    assert "all numbers of one side are equal" in sentence("News", flat)


def test_notes_after_the_letter_z_have_two_letters() -> None:
    numbers = (0, 25, 26, 51, 52, 701, 702)
    assert [_note_letter(number) for number in numbers] == ["a", "z", "aa", "az", "ba", "zz", "aaa"]
    assert len({_note_letter(number) for number in range(2000)}) == 2000
