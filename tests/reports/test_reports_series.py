"""Means over seeds, gains over baselines, the ledger: against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from comingle.reports.comparisons import compare_with_baseline
from comingle.reports.formatting import change, interval_text
from comingle.reports.runs import (
    Entry,
    Evaluation,
    Gain,
    RunRecord,
    Spread,
    baseline_comparison,
    baselines,
    common_measures,
    cost,
    expert_curves,
    final_result,
    gains,
    gains_of_entries,
    learning_curve,
    read_entries,
    verdicts,
)


def curve(ann: float | None, bob: float) -> dict[int, dict[str, float | None]]:
    return {0: {"ann": 10.0, "bob": 20.0}, 2: {"ann": ann, "bob": bob}}


def entry(write_run: Any, method: str, *ends: tuple[float | None, float], **options: Any) -> Any:
    paths = [write_run(f"{method}-{seed}", method, curve(*end), seed=seed, **options) for seed, end in enumerate(ends)]
    return read_entries(paths)[0]


def test_a_curve_is_the_mean_over_seeds_with_the_sample_deviation(write_run: Any) -> None:
    found = learning_curve(entry(write_run, "local", (4.0, 8.0), (6.0, 8.0)), "ann")
    assert found.iterations == (0, 20)
    assert [value.mean for value in found.values] == [10, 5]
    assert [value.std for value in found.values] == pytest.approx([0, math.sqrt(2)])
    mean = learning_curve(entry(write_run, "fedavg", (4.0, 8.0)))
    assert mean.values == (Spread(mean=15.0), Spread(mean=6.0))


def test_a_baseline_of_several_may_be_of_methods_that_occur_twice(write_run: Any) -> None:
    """The first of them, as where it is the only baseline."""
    local = entry(write_run, "local", (4.0, 8.0), (6.0, 8.0))
    fedavg = entry(write_run, "fedavg", (5.0, 7.0), (5.0, 9.0))
    entries = [local, *(replace(fedavg, label=f"fedavg (rate {n})") for n in (1, 2))]
    found = baseline_comparison(entries, "local,fedavg")
    assert found == baseline_comparison(entries, "local,fedavg (rate 1)")
    assert found is not None
    assert found.baseline == "the better of local and fedavg (rate 1)"


def test_a_loss_that_is_not_finite_leaves_a_gap_and_no_final_number(write_run: Any) -> None:
    one = entry(write_run, "local", (None, 8.0), (6.0, 8.0))
    assert learning_curve(one, "ann").values[1] == Spread(mean=6.0)
    assert final_result(one, "ann") is None
    assert final_result(one, "bob") == Spread(mean=8.0, std=0.0)


def test_gains_are_paired_by_seed_best_first(write_run: Any) -> None:
    local = entry(write_run, "local", (4.0, 8.0), (8.0, 8.0))
    ours = entry(write_run, "comigs", (5.0, 6.0), (10.0, 4.0))
    found = gains(ours, local)
    # Of bob -25% and -50% are known; the geometric mean of 0.75 and 0.5 is 0.612.
    assert [(g.user, g.verdict) for g in found] == [("bob", "level"), ("ann", "harmed")]
    assert [g.change.mean for g in found] == pytest.approx([100 * (math.sqrt(0.375) - 1), 25.0])
    half_width = 12.7062 * math.log(0.75 / 0.5) / 2
    ends = [100 * (math.sqrt(0.375) * math.exp(end) - 1) for end in (-half_width, half_width)]
    assert found[0].interval == pytest.approx(ends, rel=1e-4)
    assert found[0].change.std == pytest.approx(math.sqrt(2) * 12.5)
    assert [g.text for g in found] == ["-38.8%", "+25.0%"]
    assert found[1].change.std == 0.0  # in both seeds the same quarter, though the perplexities differ


def test_a_users_interval_is_that_of_a_comparison_of_this_user(write_run: Any) -> None:
    """A perplexity cannot fall by more than 100%, and the report prints what `comingle compare` would."""
    seeds = [(4.0, 8.0), (8.0, 8.0), (5.0, 8.0)]
    local = entry(write_run, "local", *seeds)
    ours = entry(write_run, "comigs", (9.0, 8.0), (5.0, 8.0), (10.0, 8.0))
    ann = next(gain for gain in gains(ours, local) if gain.user == "ann")
    results = {
        "local": {seed: {"ann": ends[0]} for seed, ends in enumerate(seeds)},
        "comigs": {0: {"ann": 9.0}, 1: {"ann": 5.0}, 2: {"ann": 10.0}},
    }
    compared = compare_with_baseline(results, "perplexity", "local")
    assert compared is not None
    (verdict,) = compared.verdicts
    assert ann.interval is not None
    assert ann.interval[0] > -100
    assert (ann.change.mean, *ann.interval) == pytest.approx((verdict.change, verdict.low, verdict.high))


def test_long_ends_of_intervals_have_an_exponent() -> None:
    assert interval_text((-99.9, 3.14e25), "perplexity") == "-99.9 to +3.1e+25"


def scored(method: str, **users: dict[str, float | None]) -> Entry:
    """A run of one evaluation that is compared by accuracy."""
    evaluation = Evaluation(round=1, iterations=7, measure="accuracy", results=users, experts={}, scores={})
    record = RunRecord(
        folder=Path(method), method=method, seed=0, base="net:mnist", planned_rounds=1, users=tuple(users), recipe={},
        evaluations=(evaluation,), rounds=(), metrics=None,
    )  # fmt: skip
    return Entry(label=method, runs=(record,))


def test_accuracies_differ_by_points_and_more_is_better() -> None:
    ours = scored("floral", ann={"accuracy": 0.9, "loss": 0.2}, bob={"accuracy": 0.4, "loss": 2.0})
    theirs = scored("fedavg", ann={"accuracy": 0.8, "loss": 0.7}, bob={"accuracy": 0.5, "loss": 1.0})
    one_seed = {"ann": "higher (one seed)", "bob": "lower (one seed)"}
    assert {g.user: g.verdict for g in gains(ours, theirs)} == one_seed
    assert [g.text for g in gains(ours, theirs)] == ["+10.0\u00a0points", "-10.0\u00a0points"]
    assert [g.user for g in gains(theirs, ours)] == ["bob", "ann"]
    assert final_result(ours) == Spread(mean=(0.9 + 0.4) / 2)
    assert learning_curve(ours, "ann").values == (Spread(mean=0.9),)
    assert learning_curve(ours, measure="loss").values == (Spread(mean=1.1),)
    assert learning_curve(ours, "ann", "perplexity").values == ()


def test_losses_differ_by_a_factor(write_run: Any) -> None:
    local = entry(write_run, "local", (2.0, 0.5), (2.0, 0.5), measure="loss")
    ours = entry(write_run, "floral", (2e-1, 1.0), (2e-3, 4.0), measure="loss")
    found = gains(ours, local)
    assert [(g.user, g.text, g.verdict) for g in found] == [("ann", "×0.01", "level"), ("bob", "×4", "level")]
    assert found[0].change.std == pytest.approx(math.sqrt(2))  # a tenth and a thousandth: one power of ten to each side
    nothing = entry(write_run, "fedavg", (0.0, 1.0), (1.0, 1.0), measure="loss")
    assert [g.user for g in gains(nothing, local)] == ["bob"]


def test_what_else_was_measured_is_known(write_run: Any) -> None:
    nets = entry(write_run, "floral", (0.5, 0.75), measure="accuracy")
    assert common_measures([nets]) == ["accuracy", "loss"]
    assert learning_curve(nets, "ann", "loss").values[-1] == Spread(mean=1.0)
    assert common_measures([entry(write_run, "local", (4.0, 8.0))]) == ["perplexity"]


@pytest.mark.parametrize(
    ("ends", "verdict"),
    [
        ([10.01], "level"),
        ([10.05], "level"),
        ([9.8], "lower (one seed)"),
        ([20.0], "higher (one seed)"),
        ([9.0, 10.5], "level"),
        ([10.01, 10.02], "level"),
        ([10.1, 10.1001], "harmed"),
        ([9.0, 9.1, 9.2], "gained"),
        ([10.9, 11.0, 11.1], "harmed"),
        ([9.0, 9.8, 10.0], "level"),
        ([10.0, 10.0], "level"),
    ],
)
def test_gained_and_harmed_need_seeds_and_an_interval(write_run: Any, ends: list[float], verdict: str) -> None:
    local = entry(write_run, "local", *[(10.0, 8.0)] * len(ends))
    ours = entry(write_run, "comigs", *[(end, 8.0) for end in ends])
    assert {g.user: g.verdict for g in gains(ours, local)} == {"ann": verdict, "bob": "level"}


@pytest.mark.parametrize("measure", ["accuracy", "rouge1", "loss", "perplexity"])
def test_verdicts_go_from_the_best_to_the_worst(measure: str) -> None:
    better, worse = (0.9, 0.1) if measure in ("accuracy", "rouge1") else (0.1, 0.9)
    sides = [
        Gain(user="ann", measure=measure, change=Spread(mean=c))
        for c in (change(v, 0.5, measure) for v in (better, worse))
        if c
    ]
    assert [gain.verdict for gain in sides] == [verdicts(measure)[1], verdicts(measure)[3]]


def test_a_geometric_mean_is_the_exponential_of_the_mean_loss(write_run: Any) -> None:
    one = entry(write_run, "local", (10.0, 1e6), (10.0, 1e4))
    found = final_result(one, geometric=True)
    assert found is not None
    assert found.mean == pytest.approx((1e7**0.5 + 1e5**0.5) / 2)
    assert [v.mean for v in learning_curve(one, geometric=True).values] == pytest.approx([200**0.5, found.mean])
    assert final_result(entry(write_run, "fedavg", (None, 8.0)), geometric=True) is None


def test_how_much_each_user_trains_on_is_read(write_run: Any) -> None:
    assert entry(write_run, "local", (4.0, 8.0)).first.amounts == {"ann": 100, "bob": 100}


def test_only_shared_seeds_are_compared(write_run: Any) -> None:
    local = entry(write_run, "local", (4.0, 8.0))
    ours = entry(write_run, "comigs", (2.0, 8.0), (400.0, 8.0))
    assert {g.user: g.change for g in gains(ours, local)} == {"ann": Spread(mean=-50.0), "bob": Spread(mean=0.0)}
    assert [e.method for e in baselines([ours, local])] == ["local"]
    assert [e.method for e, _ in gains_of_entries([ours, local], local)] == ["comigs"]


def test_expert_scores_keep_users_layers_and_experts_apart(write_run: Any) -> None:
    experts = {"ann": ["generalist", "specialist"], "bob": ["generalist"]}
    told = [{2: {"ann": [[0.3 + s, 0.7 - s], [0.5, 0.5]], "bob": [[1.0], [1.0]]}} for s in (0.0, 0.2)]
    paths = [write_run(f"r{i}", "comigs", curve(4, 8), seed=i, scores=s, experts=experts) for i, s in enumerate(told)]
    (one,) = read_entries(paths)
    ann = expert_curves(one, "ann")
    assert [expert.name for expert in ann] == ["generalist", "specialist"]
    assert [layer.values[0].mean for layer in ann[0].layers] == [pytest.approx(0.4), 0.5]
    assert [layer.values[0].mean for layer in ann[1].layers] == [pytest.approx(0.6), 0.5]
    assert ann[0].layers[0].iterations == (20,)  # the evaluation before training told none
    assert [expert.name for expert in expert_curves(one, "bob")] == ["generalist"]
    assert expert_curves(entry(write_run, "local", (4.0, 8.0)), "ann") == []


def test_the_ledger_adds_what_was_counted(write_run: Any) -> None:
    found = cost(entry(write_run, "fedavg", (4.0, 8.0), (4.0, 8.0), upload_bytes=500))
    assert (found.upload_bytes, found.download_bytes, found.rounds) == (500, 1000, 2)
    assert (found.upload_bytes_per_user_round, found.download_bytes_per_user_round) == (250, 7)
    assert found.wall_seconds is not None
    assert (found.wall_seconds.mean, found.wall_seconds.std) == pytest.approx((3.5, math.sqrt(0.5)))
    assert (found.trainable_parameters, found.peak_memory_bytes) == (1234, 2e9)
    assert found.dtype_and_device == "float32 on cpu"


def test_speed_is_in_what_data_is_counted_in(write_run: Any) -> None:
    found = cost(entry(write_run, "floral", (0.5, 0.75), (0.5, 0.75), measure="accuracy"))
    assert found.per_second is not None
    assert found.per_second.mean == 10.5


def test_an_unfinished_run_has_bytes_but_no_measurements(write_run: Any) -> None:
    found = cost(entry(write_run, "fedavg", (4.0, 8.0), upload_bytes=500, finished=False))
    assert (found.upload_bytes, found.wall_seconds, found.trainable_parameters) == (500, None, None)
