"""Many users at a glance, and budgets that are not equal."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from comingle.reports.comparisons import compare_runs
from comingle.reports.formatting import (
    best_first,
    is_unequal,
    median_parameter_count,
    parameter_count_note,
    user_at_quantile,
)
from comingle.reports.tables import markdown, render_run, render_with_verdicts
from comingle.utils.records import read_metrics, write_json


def folder_of(
    folder: Path, scores: list[float], *, method: str = "local", measure: str = "accuracy", trainable: int = 10
) -> Path:
    """A finished run of nets; user N has score N of the list."""
    folder.mkdir(parents=True)
    users = {
        f"user-{number:03}": {
            f"test_{measure}": score, "test_samples": 33, "train_samples": 7, "valid_samples": 0,
            "trainable_parameters": trainable, "upload_bytes_per_round": 40,
        }
        for number, score in enumerate(scores)
    }  # fmt: skip
    metrics = {
        "method": method, "seed": 0, "base": "net:mnist", "rounds": 2, "measure": measure, "unit": "samples",
        "users": users, f"mean_test_{measure}": sum(scores) / len(scores),
        "upload_bytes_per_user_round": 40.0, "download_bytes_per_user_round": 40.0,
        "trainable_parameters": trainable, "samples_per_second": 123.0, "wall_seconds": 0.26,
        "peak_memory_bytes": 10**9, "dtype": "float32", "device": "cpu",
    }  # fmt: skip
    write_json(folder / "metrics.json", metrics)
    return folder


def printed(*parts: Any) -> str:
    console = Console(width=160, color_system=None)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return capture.get()


def verdict_rows(text: str) -> dict[str, str]:
    """The first number behind each name."""
    cells = [line.split() for line in text.splitlines() if line.split()]
    return {line[0]: line[1] for line in cells if len(line) > 1}


@pytest.mark.parametrize(("count", "all_shown"), [(24, True), (25, False)])
def test_beyond_24_users_a_run_shows_the_best_the_worst_and_the_spread(
    tmp_path: Path, count: int, all_shown: bool
) -> None:
    run = folder_of(tmp_path / "run", [number / 100 for number in range(count)])
    text = printed(render_run(read_metrics(run)))
    names = [line.split()[0] for line in text.splitlines() if line.strip().startswith("user-")]
    assert (len(names) == count) == all_shown
    if all_shown:
        return
    assert names == [f"user-{n:03}" for n in (24, 23, 22, 21, 20, 4, 3, 2, 1, 0)]
    assert "best 5 of 25 (--all " in text
    found = verdict_rows(text)
    assert (found["25%"], found["median"], found["75%"], found["90%"]) == ("18.0%", "12.0%", "6.0%", "2.0%")
    assert "mean" in text
    all_users = printed(render_run(read_metrics(run), all_users=True))
    assert all_users.count("user-") == 25
    assert "median" not in all_users


def test_of_losses_the_lowest_is_best_and_what_is_not_finite_comes_last(tmp_path: Path) -> None:
    scores = [float(number) for number in range(1, 31)]
    run = folder_of(tmp_path / "run", [*scores[:-1], math.inf], measure="perplexity")
    text = printed(render_run(read_metrics(run)))
    names = [line.split()[0] for line in text.splitlines() if line.strip().startswith("user-")]
    assert names[0] == "user-000"
    assert names[-1] == "user-029"
    assert "not finite" in text


def test_users_are_ordered_by_what_is_better() -> None:
    scores = {"a": 2.0, "b": None, "c": 1.0}
    assert best_first(scores, "perplexity") == ["c", "a", "b"]
    assert best_first(scores, "accuracy") == ["a", "c", "b"]
    names = [str(number) for number in range(11)]
    assert [user_at_quantile(names, share) for share in (0, 0.1, 0.25, 0.5, 1)] == ["0", "1", "3", "5", "10"]
    assert user_at_quantile(["only"], 0.9) == "only"


def test_a_comparison_of_many_shows_the_spread_and_everybody_if_asked(tmp_path: Path) -> None:
    folders = [
        folder_of(tmp_path / method, [(number + more) / 100 for number in range(30)], method=method)
        for method, more in {"local": 0, "floral": 20}.items()
    ]
    table = compare_runs(folders)
    head, first, second = [line for line in markdown(table).splitlines() if line.startswith("| ")]
    assert head.startswith("| method | best | median | worst | mean |")
    assert first.startswith("| local | 29.0% | 14.0% | 0.0% | 14.5% |")
    assert second.startswith("| floral | 49.0% | 34.0% | 20.0% | 34.5% |")
    assert "user-000" not in printed(*render_with_verdicts(table))
    all_users = printed(*render_with_verdicts(table, all_users=True))
    assert all_users.count("user-") == 30
    assert "user-029  29.0%   49.0%" in all_users


# ---------------------------------------------------------------- budgets


def test_methods_that_train_much_more_or_less_are_marked(tmp_path: Path) -> None:
    budgets = {"pretrained": 0, "local": 1000, "fedavg": 1100, "fedit": 899, "ifca": 3000, "comigs": 1000}
    folders = [
        folder_of(tmp_path / method, [0.5, 0.6], method=method, trainable=count) for method, count in budgets.items()
    ]
    table = compare_runs(folders)
    cells = {line.split(" | ")[0].strip("| "): line.split(" | ")[4] for line in markdown(table).splitlines()[4:-2]}
    assert cells == {
        "pretrained": "0", "local": "1,000", "fedavg": "1,100", "fedit": "899 †", "ifca": "3,000 †", "comigs": "1,000",
    }  # fmt: skip
    note = "† trains over 10% more or fewer parameters than the median method, which trains 1,000"
    assert markdown(table).endswith(f"|\n\n{note}\n")
    assert printed(*render_with_verdicts(table)).splitlines()[-1] == note


def test_equal_budgets_have_no_note(tmp_path: Path) -> None:
    folders = [folder_of(tmp_path / name, [0.5], method=name, trainable=n) for name, n in {"a": 100, "b": 109}.items()]
    assert "†" not in markdown(compare_runs(folders))
    assert "†" not in printed(*render_with_verdicts(compare_runs(folders)))


def test_the_median_parameter_count_is_the_median_of_those_that_train() -> None:
    assert median_parameter_count([0, 5, 3, 9]) == 5
    assert median_parameter_count([7, 3]) == 3
    assert median_parameter_count([0, 0]) is None
    assert parameter_count_note([0, 0]) == ""
    assert [is_unequal(count, 100) for count in (0, 89, 90, 110, 111)] == [False, True, False, False, True]
