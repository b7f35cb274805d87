"""``comingle compare`` over seeds, side by side, and with runs that fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from comingle.config import load_recipe
from comingle.reports.comparisons import read_comparison, with_baseline
from comingle.reports.runs import baseline_comparison, read_entries
from comingle.reports.tables import latex
from comingle.runs import compare, comparison
from comingle.runs.compare import split_by_seed
from comingle.training.client import Clients
from comingle.utils.errors import DivergenceError
from comingle.utils.records import read_metrics

# What a shell starts in the background ignores Ctrl-C: the program is told to hear it again.
HEAR = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
COMINGLE = [sys.executable, "-c", HEAR + "from comingle.cli import main; main()"]
METHODS = ("--methods", "pretrained,local,fedavg")


@pytest.fixture(scope="module")
def short(write_recipe: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe of one round."""
    recipe = write_recipe(tmp_path_factory.mktemp("short") / "project")
    content = yaml.safe_load(recipe.read_text())
    content["training"] |= {"rounds": 1, "local_steps": 2}
    recipe.write_text(yaml.safe_dump(content))
    return recipe


def table(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "table.json").read_text())


def losses(folder: Path) -> dict[str, Any]:
    return {path.parent.name: read_metrics(path.parent)["users"] for path in folder.glob("*/metrics.json")}


def test_three_seeds_by_default_and_a_verdict_for_each_method(comingle: Any, short: Path, tmp_path: Path) -> None:
    answer = comingle("compare", short, *METHODS, "--out", tmp_path / "out")
    assert (answer.code, answer.err) == (0, "")
    found = table(tmp_path / "out")
    assert [row["seeds"] for row in found["methods"]] == [[0, 1, 2]] * 3
    assert found["against"]["baseline"] == "local"
    assert [one["method"] for one in found["against"]["methods"]] == ["pretrained", "fedavg"]
    assert "against local: geometric mean of test perplexity over 3 users and seeds 0, 1, 2" in answer.out
    for one in found["against"]["methods"]:
        assert one["verdict"] in answer.out
    assert comingle("show", tmp_path / "out").out.strip() in answer.out
    turned = comingle("show", tmp_path / "out", "--against", "fedavg")
    assert "against fedavg: " in turned.out
    assert table(tmp_path / "out") == found  # showing writes nothing


def test_changed_settings_and_untrained_routers_are_in_the_table(comingle: Any, short: Path, tmp_path: Path) -> None:
    options = ("--methods", "local-moe-tr,fedprox", "--seeds", "0", "--out", tmp_path / "out")
    answer = comingle("compare", short, *options, "--set", "method.proximal=0.5")
    assert answer.code == 0
    moe, fedprox = table(tmp_path / "out")["methods"]
    assert (moe.get("untrained"), moe.get("method_settings")) == (["router"], None)
    assert (fedprox.get("untrained"), fedprox.get("method_settings")) == (None, {"proximal": 0.5})
    assert "fedprox proximal=0.5" in " ".join(answer.out.split())
    assert "local-moe-tr ‡" in (tmp_path / "out" / "table.md").read_text()


def test_another_baseline_is_asked_for(comingle: Any, short: Path, tmp_path: Path) -> None:
    options = ("--methods", "pretrained,fedavg", "--seeds", "0,1", "--out", tmp_path / "out")
    assert comingle("compare", short, *options).code == 0
    assert table(tmp_path / "out")["against"]["baseline"] == "pretrained"
    assert comingle("compare", short, *options, "--resume", "--against", "fedavg").code == 0
    assert table(tmp_path / "out")["against"]["baseline"] == "fedavg"


def test_all_views_have_the_methods_of_all_commands(
    comingle: Any, short: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "out"
    options = ("--seeds", "0,1", "--out", folder)
    assert comingle("compare", short, "--methods", "local,fedavg", *options).code == 0
    alone = comingle("run", short, "--set", "training.local_steps=1", "--out", folder / "ditto-seed0")
    assert alone.code == 0  # with another recipe
    added = comingle("compare", short, "--methods", "pretrained,local", *options, "--resume", "--against", "fedavg")
    assert added.code == 0
    (warning,) = [line for line in caplog.messages if "left out" in line]
    assert "ditto-seed0: left out of the comparison: " in warning
    assert "training.local_steps was 1 and is 2" in warning
    methods = ["pretrained", "local", "fedavg"]
    found = table(folder)
    assert {row["method"]: row["seeds"] for row in found["methods"]} == {method: [0, 1] for method in methods}
    assert [one["method"] for one in found["against"]["methods"]] == ["pretrained", "local"]
    files = [tmp_path / name for name in ("table.tex", "users.csv")]
    assert comingle("show", folder, "--latex", files[0], "--csv", files[1]).code == 0
    entries = read_entries([folder])
    texts = [
        added.out,
        comingle("show", folder).out,
        (folder / "table.md").read_text(),
        *(f.read_text() for f in files),
    ]
    for text in texts:
        assert all(method in text for method in methods)
        assert "ditto" not in text
    assert [entry.label for entry in entries] == methods
    of_report = baseline_comparison(entries, "fedavg")
    assert of_report is not None
    assert of_report.as_dict() == found["against"]


# ---------------------------------------------------------------- runs that fail


def test_a_run_that_fails_is_named_and_the_others_go_on(
    comingle: Any, short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's numbers leave the real ones in one of six runs."""

    def watch(clients: Clients, *options: Any) -> Any:
        if clients.method.name == "fedavg" and clients.plan.seed == 1:
            clients.state.rows[0, 0] = torch.nan
        return lambda event: None

    monkeypatch.setattr("comingle.runs.progress.Lines.watch", lambda self, clients, title=None: watch(clients))
    answer = comingle("compare", short, "--methods", "local,fedavg", "--out", tmp_path / "out")
    assert answer.code == 2
    (line,) = answer.err.splitlines()
    assert line.startswith(
        "comingle: 1 of 6 runs failed and are not in the table: fedavg, seed 1: user 'ann': test loss"
    )
    found = {row["method"]: row["seeds"] for row in table(tmp_path / "out")["methods"]}
    assert found == {"local": [0, 1, 2], "fedavg": [0, 2]}
    assert "fedavg: seeds 0, 2 alone" in answer.out
    assert table(tmp_path / "out")["against"]["methods"][0]["seeds"] == [0, 2]


def test_where_all_fail_the_first_is_told(comingle: Any, short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise DivergenceError("left the numbers")

    monkeypatch.setattr(compare, "run_in", fail)
    answer = comingle("compare", short, "--methods", "local,fedavg", "--seeds", "0,1")
    assert (answer.code, answer.err) == (2, "comingle: left the numbers\n")


# ---------------------------------------------------------------- side by side


def test_runs_of_a_seed_share_a_process_unless_there_are_more_jobs() -> None:
    keys = [(method, seed) for seed in (0, 1, 2) for method in "abcd"]
    assert [len(some) for some in split_by_seed(keys, 2)] == [4, 4, 4]
    assert all(len({seed for _, seed in some}) == 1 for some in split_by_seed(keys, 8))
    for jobs in (1, 2, 3, 4, 8, 100):
        assert sorted(key for some in split_by_seed(keys, jobs) for key in some) == sorted(keys)
        assert len(split_by_seed(keys, jobs)) >= min(jobs, 12)


@pytest.mark.slow
def test_side_by_side_is_the_same_as_one_after_the_other(short: Path, tmp_path: Path) -> None:
    for jobs in ("1", "2"):
        assert command(short, tmp_path / jobs, "--jobs", jobs).wait(900) == 0, said(tmp_path / jobs).read_text()
    assert losses(tmp_path / "1") == losses(tmp_path / "2")
    tables = [
        [{k: v for k, v in row.items() if "second" not in k} for row in table(tmp_path / jobs)["methods"]]
        for jobs in ("1", "2")
    ]
    assert tables[0] == tables[1]
    told = said(tmp_path / "2").read_text()
    assert "9 of 9 runs ended · " in told
    assert "run 9 of 9 · fedavg, seed 2 · round 1/1 · training loss" in told


@pytest.mark.slow
def test_an_interruption_stops_every_process_and_the_runs_go_on(short: Path, tmp_path: Path) -> None:
    """The terminal sends Ctrl-C to the whole group of processes; a notebook to the first of them alone."""
    long = ("--set", "training.rounds=6", "--set", "checkpoints.every=1", "--seeds", "0,1")
    running = command(short, tmp_path / "out", "--jobs", "2", *long)
    while not list((tmp_path / "out").glob("local-seed0/checkpoints/round-000[1-9]/checkpoint.json")):
        assert running.poll() is None
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    assert running.wait(120) == 130
    (last,) = [line for line in said(tmp_path / "out").read_text().splitlines() if line.startswith("comingle: ")]
    assert last.startswith("comingle: stopped")
    assert "--resume" in last
    assert not (tmp_path / "out" / "table.json").exists()
    again = command(short, tmp_path / "out", "--jobs", "2", *long, "--resume")
    assert again.wait(900) == 0
    assert "local, seed 0 · round 1/6 · " not in said(tmp_path / "out").read_text()
    recipe = load_recipe(short).with_changes({"training.rounds": 6})
    whole = comparison.compare(recipe, ["pretrained", "local", "fedavg"], seeds=[0, 1]).metrics
    expected = {f"{method}-seed{seed}": metrics["users"] for (method, seed), metrics in whole.items()}
    assert losses(tmp_path / "out") == expected


@pytest.mark.slow
def test_a_process_that_is_killed_is_named_and_the_others_go_on(short: Path, tmp_path: Path) -> None:
    long = ("--set", "training.rounds=6", "--seeds", "0,1")
    running = command(short, tmp_path / "out", "--jobs", "2", *long)
    holder = tmp_path / "out" / "local-seed0" / ".holder"
    while not holder.exists():
        assert running.poll() is None
        time.sleep(0.02)
    os.kill(int(holder.read_text().split()[1]), signal.SIGKILL)
    assert running.wait(900) == 2
    told = "comingle: pretrained, local, fedavg, seed 0: its process was killed by signal 9 (Killed)"
    assert said(tmp_path / "out").read_text().splitlines()[-1].startswith(told)
    assert (tmp_path / "out" / "fedavg-seed1" / "metrics.json").exists()


def command(recipe: Path, out: Path, *options: str) -> subprocess.Popen[bytes]:
    """``comingle compare`` in a process of its own; what it says is in a file beside its folder."""
    words = [*COMINGLE, "compare", str(recipe), *METHODS, "--out", str(out), *options]
    with said(out).open("wb") as file:
        return subprocess.Popen(words, stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"})


def said(out: Path) -> Path:
    return out.with_suffix(".txt")


# ---------------------------------------------------------------- sheets


def test_every_users_results_are_written_as_csv_and_parquet(comingle: Any, short: Path, tmp_path: Path) -> None:
    pandas: Any = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    folder, files = tmp_path / "out", (tmp_path / "users.csv", tmp_path / "users.parquet")
    assert comingle("compare", short, "--methods", "pretrained,local", "--seeds", "0,1", "--out", folder).code == 0
    answer = comingle("show", folder, "--csv", files[0], "--parquet", files[1])
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.count("12 rows") == 2  # three users of four runs
    sheet = pandas.read_csv(files[0])
    pandas.testing.assert_frame_equal(sheet, pandas.read_parquet(files[1]), check_dtype=False)
    found = {(row.run, row.user): row.test_perplexity for row in sheet.itertuples()}
    expected = {
        (run, user): one["test_perplexity"] for run, users in losses(folder).items() for user, one in users.items()
    }
    assert found == pytest.approx(expected)
    for option, file in zip(("--csv", "--parquet"), files, strict=True):
        again = comingle("show", folder, option, file)
        assert (again.code, again.err) == (
            2,
            f"comingle: {file}: exists; --force replaces it, {option} names another\n",
        )
        again = comingle("show", folder, option, folder)
        assert (again.code, again.err.count("\n")) == (2, 1)
        assert again.err.startswith(f"comingle: {folder}: ")
        assert option in again.err
    assert comingle("show", folder, "--csv", files[0], "--force").code == 0


def test_tables_are_written_for_latex(comingle: Any, short: Path, tmp_path: Path) -> None:
    folder, file = tmp_path / "out", tmp_path / "table.tex"
    assert comingle("compare", short, "--methods", "pretrained,local", "--out", folder).code == 0
    answer = comingle("show", folder, "--latex", file, "--csv", tmp_path / "users.csv")
    assert (answer.code, answer.err, answer.out.count("\n")) == (0, "", 2)
    assert file.read_text(encoding="utf-8") == latex(read_comparison(folder), name=folder.name)
    again = comingle("show", folder, "--latex", file)
    assert (again.code, again.err) == (2, f"comingle: {file}: exists; --force replaces it, --latex names another\n")
    run = folder / "local-seed0"
    assert comingle("show", run, "--latex", file, "--force").code == 0
    rows = file.read_text(encoding="utf-8").partition("midrule")[2].partition("bottomrule")[0]
    assert rows.count("local &") == 1
    assert "textbf" not in rows
    nothing = comingle("show", tmp_path, "--latex", tmp_path / "other.tex")
    assert (nothing.code, nothing.err.count("\n")) == (2, 1)
    assert not (tmp_path / "other.tex").exists()


def test_a_baseline_adds_verdicts_to_latex_and_is_refused_for_rows(comingle: Any, short: Path, tmp_path: Path) -> None:
    folder, file = tmp_path / "out", tmp_path / "table.tex"
    assert comingle("compare", short, "--methods", "pretrained,local", "--seeds", "0,1", "--out", folder).code == 0
    against = ("show", folder, "--against", "pretrained")
    assert comingle(*against, "--latex", file).code == 0
    table = with_baseline(read_comparison(folder), "pretrained")
    assert file.read_text(encoding="utf-8") == latex(table, name=folder.name)
    for option in ("--csv", "--parquet"):
        refused = comingle(*against, option, tmp_path / "rows")
        assert (refused.code, refused.err.count("\n")) == (2, 1)
        assert refused.err.startswith(f"comingle: --against: got it with {option}")
        assert not (tmp_path / "rows").exists()
    alone = comingle("show", folder / "local-seed0", "--against", "local", "--latex", file, "--force")
    assert (alone.code, "is not the folder of a comparison" in alone.err) == (2, True)


def test_a_baseline_is_for_comparisons(comingle: Any, short: Path, tmp_path: Path) -> None:
    assert comingle("run", short, "--set", "method=pretrained", "--out", tmp_path / "run").code == 0
    answer = comingle("show", tmp_path / "run", "--against", "local")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert "is not the folder of a comparison" in answer.err
