"""Tables from run folders, without torch."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from comingle.reports.comparisons import compare_runs, read_comparison
from comingle.reports.tables import (
    markdown,
    megabytes,
    render_comparison,
    render_curve,
    render_run,
    render_with_verdicts,
    sizes,
    write_comparison,
)
from comingle.utils.errors import RunError
from comingle.utils.records import read_metrics, write_json


def run_folder(folder: Path, *, method: str = "local", seed: int = 0, scores: dict[str, float]) -> Path:
    """A finished run with made-up results."""
    folder.mkdir(parents=True)
    users = {
        name: {
            "test_perplexity": score,
            "test_loss_nats": math.log(score) if math.isfinite(score) else score,
            "test_tokens": 1000,
            "train_tokens": 5000,
            "valid_tokens": 500,
            "trainable_parameters": 1234,
            "upload_bytes_per_round": 2_500_000,
        }
        for name, score in scores.items()
    }
    metrics = {
        "method": method,
        "seed": seed,
        "base": "tiny",
        "rounds": 2,
        "users": users,
        "mean_test_perplexity": sum(scores.values()) / len(scores),
        "upload_bytes_per_user_round": 2_500_000.0,
        "download_bytes_per_user_round": 2_500_000.0,
        "trainable_parameters": 1234,
        "tokens_per_second": 1000.0 * (1 + seed),
        "wall_seconds": 10.0 * (1 + seed),
        "peak_memory_bytes": 1_500_000_000,
        "dtype": "float32",
        "device": "cpu",
    }
    write_json(folder / "metrics.json", metrics)
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Two methods, two seeds, by hand: local 2 and 4, 4 and 6; fedavg 3 and 5, 3 and 7."""
    scores = [("local", 0, 2, 4), ("local", 1, 4, 6), ("fedavg", 0, 3, 5), ("fedavg", 1, 3, 7)]
    return [
        run_folder(tmp_path / f"{method}-seed{seed}", method=method, seed=seed, scores={"ann": ann, "bob": bob})
        for method, seed, ann, bob in scores
    ]


def printed(table: Any) -> str:
    console = Console(width=160, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_means_and_deviations_are_those_of_the_textbook(folders: list[Path]) -> None:
    local, fedavg = compare_runs(folders)["methods"]
    assert local["mean_test_perplexity"] == {"mean": 4, "std": pytest.approx(math.sqrt(2))}
    assert local["users"] == {
        "ann": {"mean": 3, "std": pytest.approx(math.sqrt(2))},
        "bob": {"mean": 5, "std": pytest.approx(math.sqrt(2))},
    }
    assert fedavg["mean_test_perplexity"] == {"mean": 4.5, "std": pytest.approx(math.sqrt(0.5))}
    assert fedavg["users"]["ann"] == {"mean": 3, "std": 0}
    assert (local["seeds"], local["wall_seconds"], local["tokens_per_second"]) == ([0, 1], 15, 1500)


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("a|b", r"a\|b"),
        ("a\\|b", r"a\\\|b"),
        ("<b>x", r"\<b\>x"),
        ("[/red]x", r"\[/red\]x"),
        ("`*x*`", r"\`\*x\*\`"),
        ("_x_ y_z", r"\_x\_ y_z"),
        ("grüße 你好", "grüße 你好"),
    ],
)
def test_a_name_is_one_cell_of_the_markdown_table(tmp_path: Path, name: str, written: str) -> None:
    head, rule, *rows = markdown(compare_runs([run_folder(tmp_path / "run", scores={name: 1, "z": 2})])).splitlines()[
        2:
    ]
    assert head.startswith(f"| method | {written} | z | mean |")
    assert {len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in (head, rule, *rows)} == {head.count(" | ") + 2}


def test_methods_whose_privacy_budget_was_spent_are_named(folders: list[Path], tmp_path: Path) -> None:
    for folder in folders[3:]:  # of two seeds the second: who is drawn differs, and so what is spent
        file = folder / "metrics.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"planned_rounds": 6}))
    table = write_comparison(tmp_path, folders)
    said = "fedavg: the privacy budget was spent after round 2 of 6"
    assert said in (tmp_path / "table.md").read_text()
    assert said in "".join(printed(one) for one in render_with_verdicts(table))
    assert [row["rounds"] for row in table["methods"]] == [[2, 2], [2, 2]]
    assert "local: the" not in markdown(table)


def test_the_markdown_table(folders: list[Path], tmp_path: Path) -> None:
    table = write_comparison(tmp_path, folders)
    assert (
        (tmp_path / "table.md").read_text()
        == markdown(table)
        == (
            "Table: test perplexity of each user (lower is better), mean (std) over seeds 0, 1\n"
            "\n"
            "| method | ann | bob | mean | geometric mean | trainable | upload / round | seconds |\n"
            "|---|---|---|---|---|---|---|---|\n"
            "| local | 3.00 (1.41) | 5.00 (1.41) | 4.00 (1.41) | 3.86 (1.46) | 1,234 | 2.50 MB | 15 |\n"
            "| fedavg | 3.00 (0.00) | 6.00 (1.41) | 4.50 (0.71) | 4.23 (0.50) | 1,234 | 2.50 MB | 15 |\n"
            "\n"
            "Table: against local: geometric mean of test perplexity over 2 users and seeds 0, 1 (lower is better)\n"
            "\n"
            "| method | change | interval | verdict | p over users | ahead | worst |\n"
            "|---|---|---|---|---|---|---|\n"
            "| fedavg | +13.2% | -89.9 to +1174.0 | level | – | 1 of 4 | +50.0% |\n"
            "\n"
            "better, worse: the interval of the mean change excludes 0; level: it contains 0, so no change is shown. "
            "Users and seeds both count as random.\n"
            "No p over users: Wilcoxon's test needs at least 6 users to reach p = 0.05; here are 2.\n"
            "ahead: number of results, one per user and seed, that beat the baseline's; worst: the largest deficit.\n"
        )
    )
    assert read_comparison(tmp_path) == table == json.loads((tmp_path / "table.json").read_text())


def test_a_geometric_mean_is_not_ruled_by_one_user(tmp_path: Path) -> None:
    """Beside the mean of 10 and 1,000,000 stands the exponential of their mean loss, in every table of perplexities."""
    folder = run_folder(tmp_path / "run", scores={"ann": 10.0, "vie": 1e6})
    (row,) = compare_runs([folder])["methods"]
    assert row["mean_test_perplexity"]["mean"] == 500_005
    assert row["geometric_mean_test_perplexity"] == {"mean": pytest.approx(math.sqrt(1e7)), "std": 0}
    shown = printed(render_run(read_metrics(folder)))
    assert [line.split()[-1] for line in shown.splitlines() if "mean" in line] == ["500,005.00", "3,162.28"]
    event = {"event": "evaluation", "round": 1, "mean_test_perplexity": 500_005.0, **read_metrics(folder)}
    assert "1 500,005.00 3,162.28 10.00" in " ".join(printed(render_curve([event])).split())


def test_a_federation_whose_users_report_nothing_is_one_sentence_and_names_who_took_no_part(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", scores={"ann": 10.0, "bob": 9.0})
    reported = read_metrics(folder) | {"untold": ["cem", "dan"], "absent": ["dan"]}
    for metrics in (reported, {**reported, "users": {}, "untold": ["ann", "bob", "cem", "dan"]}):
        lines = [" ".join(line.split()) for line in printed(render_run(metrics)).splitlines()]
        (private,) = (line for line in lines if line.startswith("not reported to the server: "))
        assert private.endswith("cem")
        assert [line for line in lines if line.startswith("did not take part: ")] == ["did not take part: dan"]
        assert any("tells" in line for line in lines) == (not metrics["users"])
        assert any(line.startswith("mean ") for line in lines) == bool(metrics["users"])


def test_other_measures_have_one_mean(tmp_path: Path) -> None:
    folder = net_folder(tmp_path / "net", method="floral", accuracies=[0.5, 1.0])
    assert "geometric" not in json.dumps(compare_runs([folder])) + printed(render_run(read_metrics(folder)))


def test_no_number_is_marked_as_the_best(folders: list[Path]) -> None:
    """Which is better is said where an interval shows it."""
    assert [row.style for part in render_comparison(compare_runs(folders)) for row in part.rows] == [None] * 4


def test_an_older_table_without_geometric_means_is_shown(folders: list[Path]) -> None:
    table = compare_runs(folders)
    for row in table["methods"]:
        del row["geometric_mean_test_perplexity"]
    assert "| geometric" not in markdown(table)


def test_an_older_table_without_a_baseline_is_shown(folders: list[Path], tmp_path: Path) -> None:
    table = write_comparison(tmp_path, folders)
    del table["against"]
    for row in table["methods"]:
        del row["results"]
    write_json(tmp_path / "table.json", table)
    shown = "".join(printed(part) for part in render_with_verdicts(read_comparison(tmp_path)))
    assert "fedavg" in shown
    assert "against" not in shown


def test_the_terminal_table_has_the_same_cells(folders: list[Path]) -> None:
    table = compare_runs(folders)
    results, costs, _, _, against, _ = (printed(part).splitlines() for part in render_with_verdicts(table))
    cells = [line.strip("| ").split(" | ") for line in markdown(table).splitlines() if line.startswith("| ")]
    for row, *lines in zip(cells, results[-3:], costs[-3:], strict=False):
        assert all(cell in " ".join(lines) for cell in row)
    for row, line in zip(cells[3:], against[-2:], strict=True):
        assert all(cell in line for cell in row)


def net_folder(folder: Path, *, method: str, accuracies: list[float], upload_bytes: int = 40) -> Path:
    """A finished run of small nets with made-up accuracies."""
    folder.mkdir(parents=True)
    users = {
        f"user-{number}": {
            "test_accuracy": accuracy, "test_loss": 9.0, "test_samples": 33, "train_samples": 7, "valid_samples": 0,
            "trainable_parameters": 10, "upload_bytes_per_round": upload_bytes,
        }
        for number, accuracy in enumerate(accuracies)
    }  # fmt: skip
    metrics = {
        "method": method, "seed": 0, "base": "net:mnist", "rounds": 2, "measure": "accuracy", "unit": "samples",
        "users": users, "mean_test_accuracy": sum(accuracies) / len(accuracies),
        "upload_bytes_per_user_round": float(upload_bytes), "download_bytes_per_user_round": 40.0,
        "trainable_parameters": 10, "samples_per_second": 123.0, "wall_seconds": 0.26, "peak_memory_bytes": 10**9,
        "dtype": "float32", "device": "cpu",
    }  # fmt: skip
    write_json(folder / "metrics.json", metrics)
    return folder


def test_accuracies_are_per_cent_and_nothing_is_marked(tmp_path: Path) -> None:
    folders = [
        net_folder(tmp_path / method, method=method, accuracies=found)
        for method, found in {"fedavg": [0.5, 0.25], "floral": [1.0, 0.755]}.items()
    ]
    table = write_comparison(tmp_path, folders)
    assert (tmp_path / "table.md").read_text() == (
        "Table: test accuracy of each user (per cent, higher is better), seed 0\n"
        "\n"
        "| method | user-0 | user-1 | mean | trainable | upload / round | seconds |\n"
        "|---|---|---|---|---|---|---|\n"
        "| fedavg | 50.0% | 25.0% | 37.5% | 10 | 40 B | 0.3 |\n"
        "| floral | 100.0% | 75.5% | 87.8% | 10 | 40 B | 0.3 |\n"
    )
    (shown,) = render_comparison(table)
    assert [row.style for row in shown.rows] == [None, None]
    one = printed(render_run(read_metrics(folders[1])))
    assert one.startswith("floral, seed 0: test accuracy (per cent, higher is better)")
    assert all(part in one for part in ("accuracy", "test samples", "33", "75.5%", "87.8%", "40 B", "123 samples/s"))
    assert "perplexity" not in one
    assert "token" not in one


def test_a_comparison_says_of_how_many_users_its_means_are(tmp_path: Path) -> None:
    folders = []
    for method, found in {"fedavg": [0.5, 0.25], "floral": [1.0, 0.755]}.items():
        folders.append(net_folder(tmp_path / method, method=method, accuracies=found))
        interval = [0.3, 0.45] if method == "fedavg" else None
        sample = {"users": 2, "of": 1000, "interval": interval}
        write_json(folders[-1] / "metrics.json", {**read_metrics(folders[-1]), "sample": sample})
    table = write_comparison(tmp_path, folders)
    told = "mean of 2 of 1,000 users; fedavg: 95% interval 30.0% to 45.0%"
    assert f"\n\n{told}\n" in (tmp_path / "table.md").read_text()
    assert told in "\n".join(printed(part) for part in render_with_verdicts(table))


def test_of_many_users_only_the_mean_is_shown_and_said(tmp_path: Path) -> None:
    table = compare_runs([net_folder(tmp_path / "many", method="floral", accuracies=[0.5] * 9)])
    assert markdown(table).startswith("Table: mean test accuracy of 9 users (per cent, higher is better), seed 0\n")
    assert "user-0" not in markdown(table)


def test_a_column_of_bytes_has_one_unit() -> None:
    assert sizes([268, 0, 9999]) == ["268 B", "0 B", "9,999 B"]
    assert sizes([268, None, 2_500_000]) == ["0.00 MB", "–", "2.50 MB"]
    assert sizes([]) == []


def test_a_single_seed_shows_no_deviation(folders: list[Path]) -> None:
    table = compare_runs([folders[0], folders[2]])
    assert table["methods"][0]["mean_test_perplexity"] == {"mean": 3, "std": 0}
    assert "| local | 2.00 | 4.00 | 3.00 |" in markdown(table)
    assert "(lower is better), seed 0\n" in markdown(table)


def test_a_perplexity_beyond_all_numbers_is_said_so(tmp_path: Path) -> None:
    folders = [
        run_folder(tmp_path / str(i), seed=i, scores={"ann": s, "bob": 2.0}) for i, s in enumerate((3.0, math.inf))
    ]
    assert read_metrics(folders[1])["mean_test_perplexity"] is None
    table = compare_runs(folders)
    assert table["methods"][0]["users"]["ann"] == {"mean": None, "std": None}
    assert "| local | not finite | 2.00 (0.00) | not finite | not finite |" in markdown(table)
    assert "not finite" in printed(next(render_comparison(table)))
    assert "not finite" in printed(render_run(read_metrics(folders[1])))


def test_a_run_is_shown_with_its_circumstances(folders: list[Path]) -> None:
    shown = printed(render_run(read_metrics(folders[0])))
    assert shown.startswith("local, seed 0: test perplexity (lower is better)")
    for part in (
        "2.00",
        "4.00",
        "3.00",
        "1,000",
        "1,234",
        "2.50 MB",
        "tiny",
        "float32 on cpu",
        "1,000 tokens/s",
        "1.5 GB",
    ):
        assert part in shown


def test_a_curve_has_a_row_for_each_evaluation() -> None:
    events = [
        {"event": "start"},
        {"event": "evaluation", "round": 2, "users": {"ann": {"test_perplexity": 3.5}}, "mean_test_perplexity": 3.5},
        {"event": "evaluation", "round": 4, "users": {"ann": {"test_perplexity": None}}, "mean_test_perplexity": None},
    ]
    lines = [line.split() for line in printed(render_curve(events)).splitlines()]
    assert ["round", "mean", "geometric", "mean", "ann"] in lines
    assert ["2", "3.50", "3.50", "3.50"] in lines
    assert ["4", *["not", "finite"] * 3] in lines
    assert "round" in printed(render_curve([]))


def test_what_is_no_run_is_refused(tmp_path: Path, folders: list[Path]) -> None:
    with pytest.raises(RunError, match="no such run folder"):
        compare_runs([*folders, tmp_path / "missing"])
    with pytest.raises(RunError, match="not the folder of a comparison"):
        read_comparison(tmp_path)
    (tmp_path / "table.json").write_text("{")
    with pytest.raises(RunError, match="not the folder of a comparison"):
        read_comparison(tmp_path)


def test_sizes_are_in_megabytes() -> None:
    assert [megabytes(count) for count in (0, 18_688, 4_720_000, 2.5e9)] == [
        "0.00 MB",
        "0.02 MB",
        "4.72 MB",
        "2,500.00 MB",
    ]
