"""Methods held against a baseline: which way is better, what is shown, and what so few users cannot show."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.stats
from rich.console import Console

from comingle.reports.comparisons import (
    BaselineComparison,
    Results,
    baseline_of,
    compare_with_baseline,
    holm,
    notes,
    render,
    two_way,
    verdict_rows,
)
from comingle.reports.formatting import additive_difference, as_change, change, interval_text
from comingle.utils.errors import RecipeError

wilcoxon: Any = scipy.stats.wilcoxon  # what scipy returns has no types

MEASURES = ["perplexity", "loss", "accuracy", "exact_match", "rouge1"]


def results(users: int, seeds: int, noise: float = 0.01, **factors: float) -> Results:
    """``local`` has 10 times a noise for each user and seed; others ``factors`` times as much, with a noise too."""
    draws = np.random.default_rng(0)

    def of(factor: float) -> dict[int, dict[str, float | None]]:
        return {
            seed: {f"user-{u}": float(factor * 10 * np.exp(noise * draws.normal())) for u in range(users)}
            for seed in range(seeds)
        }

    return {"local": of(1.0), **{name: of(factor) for name, factor in factors.items()}}


def held(found: Results, measure: str = "perplexity", baseline: str = "local") -> BaselineComparison:
    against = compare_with_baseline(found, measure, baseline)
    assert against is not None
    return against


def verdicts(against: BaselineComparison) -> dict[str, str]:
    return {one.method: one.verdict for one in against.verdicts}


# ---------------------------------------------------------------- verdicts


@pytest.mark.parametrize("measure", MEASURES)
def test_the_direction_is_that_of_the_measure(measure: str) -> None:
    lower, higher = ("worse", "better") if measure in ("accuracy", "exact_match", "rouge1") else ("better", "worse")
    found = held(results(4, 3, down=0.8, same=1.0, up=1.2), measure)
    assert verdicts(found) == {"down": lower, "same": "level", "up": higher}


def test_a_change_is_the_ratio_of_geometric_means() -> None:
    found = results(5, 3, noise=0.3, other=0.9)
    (one,) = held(found).verdicts
    means = {
        name: math.exp(np.mean([math.log(v or 0) for users in of.values() for v in users.values()]))
        for name, of in found.items()
    }
    assert one.change == pytest.approx(100 * (means["other"] / means["local"] - 1))


def test_an_interval_is_of_log_ratios_paired_by_user_and_seed() -> None:
    found = results(5, 3, noise=0.3, other=0.9)
    (one,) = held(found).verdicts
    table = np.array(
        [
            [math.log((found["other"][s][u] or 0) / (found["local"][s][u] or 0)) for s in range(3)]
            for u in found["local"][0]
        ]
    )
    assert (one.low, one.high) == pytest.approx(tuple(100 * (math.exp(end) - 1) for end in two_way(table).interval()))
    assert one.confidence == 0.95


def test_points_are_told_of_shares_and_factors_of_losses() -> None:
    halves: Results = {
        "local": {s: {"a": 0.5, "b": 0.5} for s in (0, 1)},
        "x": {s: {"a": 0.25, "b": 0.25} for s in (0, 1)},
    }
    cells = {measure: verdict_rows(held(halves, measure))[1][0][1:3] for measure in ("accuracy", "loss", "perplexity")}
    assert cells == {
        "accuracy": ["-25.0\u00a0points", "–"],  # counts may tie
        "loss": ["×0.5", "×0.5 to ×0.5"],
        "perplexity": ["-50.0%", "-50.00 to -50.00"],
    }


def test_accuracies_that_tie_are_level_and_count_as_no_proof_for_others() -> None:
    local = {s: {"a": 0.5 + s / 24} for s in (0, 1, 2)}
    tied = {s: {"a": 0.25 + s / 24} for s in (0, 1, 2)}
    other = {s: {"a": 0.75 + s / 20} for s in (0, 1, 2)}
    against = held({"local": local, "tied": tied, "other": other}, "accuracy")
    assert verdicts(against) == {"tied": "level", "other": "better"}
    assert {one.method: one.confidence for one in against.verdicts} == {"tied": None, "other": pytest.approx(0.975)}


def test_intervals_of_shares_end_at_100_points() -> None:
    found = held({"local": {0: {"a": 0.5}, 1: {"a": 0.5}}, "x": {0: {"a": 0.25}, 1: {"a": 0.75}}}, "accuracy")
    assert [(one.low, one.high) for one in found.verdicts] == [(-100, 100)]


@pytest.mark.parametrize("measure", MEASURES)
def test_a_difference_comes_back_as_the_change_of_a_user(measure: str) -> None:
    found = additive_difference(0.3, 0.4, measure)
    assert found is not None
    assert as_change(found, measure) == pytest.approx(change(0.3, 0.4, measure))


def test_more_methods_need_more() -> None:
    """One method that alone would be shown to be better is not, among nine others that say nothing."""
    few = results(4, 3, noise=0.02, good=0.94)
    many = {**few, **{f"m{i}": results(4, 3, noise=0.02 + 0.001 * i)["local"] for i in range(9)}}
    alone, among = held(few).verdicts[0], held(many).verdicts[0]
    assert (alone.verdict, alone.confidence) == ("better", 0.95)
    assert (among.verdict, among.confidence) == ("level", pytest.approx(1 - 0.05 / 10))
    assert (among.low or 0) < (alone.low or 0) < 0 < (among.high or 0)


def test_wilcoxon_is_over_users_and_holm_over_methods() -> None:
    found = results(9, 3, noise=0.05, a=0.99, b=0.97, c=1.0)
    by_user = {
        name: [np.mean([math.log((of[s][u] or 0) / (found["local"][s][u] or 0)) for s in of]) for u in of[0]]
        for name, of in found.items()
        if name != "local"
    }
    expected = holm([float(wilcoxon(values, method="exact").pvalue) for values in by_user.values()])
    assert [one.p_value for one in held(found).verdicts] == pytest.approx(expected)


# ---------------------------------------------------------------- what cannot be said


def test_four_users_have_no_p_value_and_are_told_why() -> None:
    found = held(results(4, 3, good=0.5))
    assert found.verdicts[0].p_value is None
    assert "at least 6 users" in notes(found)[1]  # 2 / 2^6 is below 0.05, 2 / 2^5 is not
    assert notes(found)[1].endswith("here are 4.")
    assert "at least 7 users" in notes(held(results(4, 3, good=0.5, bad=2.0)))[1]
    assert held(results(6, 3, good=0.5)).verdicts[0].p_value == pytest.approx(2 / 2**6)
    assert held(results(6, 3, good=0.5, bad=2.0)).verdicts[0].p_value is None


def test_one_seed_says_nothing() -> None:
    assert compare_with_baseline(results(9, 1, good=0.5), "perplexity", "local") is None
    assert compare_with_baseline(results(9, 3), "perplexity", "local") is None


def test_a_method_with_fewer_seeds_is_paired_with_those_it_has() -> None:
    found = {**results(4, 3, good=0.5, other=1.0)}
    found["other"] = {2: found["other"][2]}
    found["good"] = {seed: found["good"][seed] for seed in (0, 2)}
    against = held(found)
    assert verdicts(against) == {"good": "better", "other": "one seed"}
    assert [one.seeds for one in against.verdicts] == [(0, 2), (2,)]
    assert against.num_tested == 1
    assert verdict_rows(against)[1][1][:5] == ["other", "–", "–", "one seed", "–"]


@pytest.mark.parametrize("value", [None, math.inf, math.nan, 0.0])
def test_a_result_without_a_number_has_no_verdict(value: float | None) -> None:
    found: Any = results(4, 3, good=0.5, lost=0.5)
    found["lost"][1]["user-2"] = value
    assert verdicts(held(found)) == {"good": "better", "lost": "not finite"}


def test_intervals_beyond_all_numbers_are_told() -> None:
    assert interval_text((-4.0, 5000.0), "loss").startswith("×0.0001 to ×1")
    assert as_change(1e6, "perplexity") > 1e300


# ---------------------------------------------------------------- the baseline, and what is printed


def test_the_baseline_is_local_or_the_first_or_what_is_asked_for() -> None:
    assert baseline_of(["fedavg", "local"], None) == "local"
    assert baseline_of(["fedavg", "comigs"], None) == "fedavg"
    assert baseline_of(["fedavg", "local"], "fedavg") == "fedavg"
    with pytest.raises(
        RecipeError, match=r"--against 'fedavgg': not among the methods.*'fedavg'.*Allowed: fedavg, local"
    ):
        baseline_of(["fedavg", "local"], "fedavgg")


def test_another_baseline_turns_the_verdict_round() -> None:
    found = results(4, 3, good=0.8)
    assert verdicts(held(found, baseline="good")) == {"local": "worse"}


def test_a_narrow_terminal_has_room() -> None:
    found = held({**results(12, 3, **{f"fedavg-moe-tr-{i}": 0.5 + 0.2 * i for i in range(6)})})
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        for part in render(found):
            console.print(part)
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= 100
    assert any(line.split()[0] == "fedavg-moe-tr-0" and "better" in line for line in lines)


# ---------------------------------------------------------------- several as one baseline, and single results


@pytest.mark.parametrize("measure", MEASURES)
def test_the_better_of_two_is_taken_user_by_user_and_seed_by_seed(measure: str) -> None:
    found = results(5, 3, noise=0.4, fedavg=1.0, mixed=1.0)
    lower = measure in ("perplexity", "loss")
    against = held(found, measure, "local,fedavg")
    (mixed,) = [one for one in against.verdicts if one.method == "mixed"]
    factors, changes = [], []
    for seed in range(3):
        for user in found["local"][seed]:
            both: list[Any] = [found["local"][seed][user], found["fedavg"][seed][user]]
            mine: Any = found["mixed"][seed][user]
            best = (min if lower else max)(both)
            factors.append(mine < best if lower else mine > best)
            changes.append(change(mine, best, measure))
    assert (mixed.ahead, mixed.pairs) == (sum(factors), 15)
    assert 0 < mixed.ahead < 15
    assert mixed.worst == pytest.approx((max if lower else min)(changes))
    assert against.baseline == "the better of local and fedavg"
    assert [one.method for one in against.verdicts] == ["local", "fedavg", "mixed"]
    assert {one.ahead for one in against.verdicts[:2]} == {0}  # neither is ahead of the better of the two


def test_one_of_several_that_is_not_finite_leaves_no_better_one() -> None:
    found: Any = results(4, 2, fedavg=1.0, mixed=0.1)
    found["fedavg"][1]["user-2"] = math.inf
    (mixed,) = [one for one in held(found, baseline="local,fedavg").verdicts if one.method == "mixed"]
    assert (mixed.verdict, mixed.ahead, mixed.pairs, mixed.worst) == ("not finite", 7, 8, None)


def test_single_results_are_counted_of_one_seed_too() -> None:
    found = {**results(4, 3, good=0.5, other=2.0)}
    found["other"] = {2: found["other"][2]}
    rows = {row[0]: row[-2:] for row in verdict_rows(held(found))[1]}
    assert rows["good"][0] == "12 of 12"
    assert rows["other"][0] == "0 of 4"
    assert float(rows["other"][1].strip("+%")) > 90


def test_several_are_asked_for_with_commas() -> None:
    names = ["local", "fedavg", "fedit", "comigs"]
    assert baseline_of(names, "fedavg, local") == "fedavg,local"
    assert baseline_of(names, "local,local") == "local"
    with pytest.raises(RecipeError, match="--against 'fedavgg': not among the methods"):
        baseline_of(names, "local,fedavgg")
    against = compare_with_baseline(
        {name: results(4, 2)["local"] for name in names}, "perplexity", "local,fedavg,fedit"
    )
    assert against is not None
    assert against.baseline == "the best of local, fedavg and fedit"
    assert BaselineComparison.read(against.as_dict()) == against
