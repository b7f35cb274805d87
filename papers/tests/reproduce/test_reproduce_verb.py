"""``comingle reproduce`` from end to end at scale smoke: every row, and what interruptions leave behind."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from comingle.cost.planning import federate_bare
from comingle.cost.skeleton import load_skeleton
from comingle.methods import REGISTRY
from comingle.utils.errors import RunError
from comingle.utils.records import read_metrics
from comingle_papers.reproduce import runner
from comingle_papers.reproduce.plan import RunSelection, plan
from comingle_papers.reproduce.published import list_experiments, load_experiment
from comingle_papers.reproduce.runner import RUNS, run_cells
from comingle_papers.reproduce.tables import build_table, repeated_columns

SMOKE = ("--scale", "smoke", "--columns", "multilingual")


@pytest.fixture(autouse=True)
def no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMINGLE_DATA", raising=False)


@pytest.mark.slow
def test_every_row_of_table_1_runs(comingle: Any, tmp_path: Path) -> None:
    answer = comingle("reproduce", "comigs/table1", *SMOKE, "--out", tmp_path)
    assert answer.code == 0, answer.err
    table = json.loads((tmp_path / "table1" / "table.json").read_text())
    rows = load_experiment("comigs/table1")[1].rows
    assert list(table["rows"]) == list(rows)
    (column,) = table["columns"]
    ours = {row: cell["ours"]["mean"] for row, cell in column["cells"].items()}
    runs = {read_metrics(path)["method"]: read_metrics(path) for path in (tmp_path / RUNS).iterdir()}
    assert ours == {row: runs[row]["mean_test_perplexity"] for row in rows}
    assert sorted(cell["ours"]["rank"] for cell in column["cells"].values()) == list(range(1, 11))
    assert "tau" not in answer.out  # numbers of scale smoke have no order
    assert "1/10 multilingual · pretrained · seed 0" in answer.err
    assert re.search(r"9/10 multilingual · comigs-2g · seed 0: [\d.]+ · \d+ s · about \d+ (s|min) left", answer.err)
    assert (tmp_path / "table1" / "table.md").read_text().count("\n| ") == 11


@pytest.mark.slow
def test_the_field_runs_row_by_row(comingle: Any, tmp_path: Path) -> None:
    """What came before and after the three papers, on text that every machine has; other rows run in their tables."""
    every = load_experiment("field/2026")[1].rows
    rows = {name: row for name, row in every.items() if name in ("local", "comigs-1g1s") or rival(row.method)}
    smoke = ("--scale", "smoke", "--columns", "languages", "--methods", ",".join(rows))
    answer = comingle("reproduce", "field/2026", *smoke, "--out", tmp_path)
    assert answer.code == 0, answer.err
    table = json.loads((tmp_path / "2026" / "table.json").read_text())
    assert list(table["rows"]) == list(every)
    assert len(rows) == 2 + len({name for name in REGISTRY if rival(name)} - {"fedbn"})  # which is about norms
    (column,) = table["columns"]
    runs = {read_metrics(path)["method"]: read_metrics(path) for path in (tmp_path / RUNS).iterdir()}
    ours = {row: column["cells"][row]["ours"]["mean"] for row in rows}
    assert ours == {row: runs[one.method]["mean_test_perplexity"] for row, one in rows.items()}


def rival(name: str) -> bool:
    """Whether a method is a plug-in of this package."""
    return ".rivals." in REGISTRY[name].__module__


@pytest.mark.slow
def test_the_field_is_held_to_two_budgets() -> None:
    """In a model of Llama's shape: as many trained parameters as FedAvg's, or as many bytes sent, by a tenth."""
    base = load_skeleton("random:llama?layers=5&dim=64&heads=8&kv_heads=4&mlp=172", dtype="float32", device="cpu")
    cells = plan("field/2026", RunSelection(scale="smoke", columns=["languages", "languages-sent"])).cells
    costs = {}
    for cell in cells:
        clients = federate_bare(cell.recipe, base, ("ann",)).clients
        clients.state.versions.fill_(1)  # after the first exchange, in which Fed-SB also sends its factors
        costs[cell.row, cell.column] = clients.trainable_parameters()[0], clients.upload_bytes()[0]
    for (row, column), (trained, sent) in costs.items():
        if column == "languages":
            assert trained == pytest.approx(costs["fedavg", column][0], rel=0.1), row
        elif sent:
            assert sent == pytest.approx(costs["fedavg", column][1], rel=0.1), row


@pytest.mark.slow
def test_a_table_of_tasks_runs_beside_the_public_code(comingle: Any, tmp_path: Path) -> None:
    answer = comingle("reproduce", "floral/table3", "--scale", "smoke", "--out", tmp_path)
    assert answer.code == 0, answer.err
    table = json.loads((tmp_path / "table3" / "table.json").read_text())
    rows = load_experiment("floral/table3")[1].rows
    assert list(table["rows"]) == list(rows)
    runs = {path.name: read_metrics(path)["mean_test_loss"] for path in (tmp_path / RUNS).iterdir()}
    folders = {
        (cell.row, cell.column): cell.folder for cell in plan("floral/table3", RunSelection(scale="smoke")).cells
    }
    assert [column["name"] for column in table["columns"]] == ["linear", "mlp"]
    for column in table["columns"]:
        ours = {row: cell["ours"]["mean"] for row, cell in column["cells"].items()}
        assert ours == {row: runs[folders[row, column["name"]]] for row in rows}
        assert column["cells"]["floral"]["paper"]["rank"] == 3  # after the two with optimal routing, or the ensembles
        assert column["order"]["rows"] == 8
    assert "Base: net:linear, net:mlp." in " ".join(answer.out.split())
    assert re.search(r"20/20 mlp · momentum-code · seed 0: [\d.]+ · \d+ s", answer.err)
    text = (tmp_path / "table3" / "table.md").read_text()
    assert "| method | Synthetic linear | public code | Synthetic MLP | public code |" in text
    assert text.count("\n| ") == 1 + len(rows)


@pytest.mark.parametrize(
    ("name", "needs", "ways"),
    [
        ("comigs/table1", "openai-community/gpt2, wikimedia/wikipedia", ["--scale cpu --measured comigs-cpu"]),
        ("floral/table1", "mnist, cifar10, cifar100", ["floral-cpu", "--scale paper --measured floral-paper"]),
        ("fedmerge/table5", "meta-llama/Meta-Llama-3-8B", []),
    ],
)
def test_without_a_network_it_says_at_once_what_can_be_run(
    name: str, needs: str, ways: list[str], comingle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "is_hub_reachable", lambda endpoint: False)
    monkeypatch.setattr(runner, "cached_folder", lambda repository: None)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "none"))
    answer = comingle("reproduce", name, "--out", tmp_path / "out")
    assert (answer.code, answer.out, answer.err.count("\n"), answer.progress) == (2, "", 1, ())
    assert answer.err.startswith(f"comingle: reproduce {name}: needs {needs}")
    assert "https://huggingface.co" in answer.err
    assert all(way in answer.err for way in ["--scale cpu --data FOLDER", *ways])
    assert not (tmp_path / "out").exists()


def test_what_needs_no_hub_does_not_ask_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Generated samples, local text on a random base, and what the hub's cache holds."""
    asked: list[str] = []
    monkeypatch.setattr(runner, "is_hub_reachable", lambda endpoint: asked.append(endpoint) or False)
    for task, wanted in (("floral/table3", RunSelection(scale="cpu")), ("comigs/table1", RunSelection(scale="smoke"))):
        runner.check_hub(plan(task, wanted))
    assert asked == []
    monkeypatch.setattr(runner, "cached_folder", lambda repository: tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    for name in ("wikimedia___wikipedia", "google___wiki40b"):
        (tmp_path / name).mkdir()
    cached = plan("comigs/table1", RunSelection(columns=["multilingual"]))
    runner.check_hub(cached)
    assert asked == []
    (tmp_path / "google___wiki40b").rmdir()
    with pytest.raises(RunError, match="needs google/wiki40b from the hub"):
        runner.check_hub(cached)
    assert len(asked) == 1


@pytest.mark.slow
def test_the_leak_and_the_control_run_beside_the_clean_runs(comingle: Any, tmp_path: Path) -> None:
    """Local training takes no turns, so clean and leak are one run; everything else is another number."""
    columns = ["ag-news", "ag-news-leak", "ag-news-control"]
    options = ("--columns", ",".join(columns), "--methods", "local,comigs-2s", "--scale", "smoke", "--out", tmp_path)
    answer = comingle("reproduce", "comigs/leak", *options)
    assert answer.code == 0, answer.err
    table = json.loads((tmp_path / "leak" / "table.json").read_text())
    ours = {
        (column["name"], row): column["cells"][row]["ours"]["mean"]
        for column in table["columns"]
        for row in ("local", "comigs-2s")
    }
    assert ours["ag-news", "local"] == ours["ag-news-leak", "local"]
    assert len(set(ours.values())) == len(list((tmp_path / RUNS).iterdir())) == 5
    assert [column["cells"]["local"]["paper"] is None for column in table["columns"]] == [False, False, True]
    assert "control has no number of the paper" in " ".join(answer.out.split())


@pytest.mark.slow
def test_a_subset_then_all_the_rest(comingle: Any, tmp_path: Path) -> None:
    first = comingle("reproduce", "comigs/table1", *SMOKE, "--methods", "local,fedavg", "--out", tmp_path)
    assert first.code == 0
    assert json.loads((tmp_path / "table1" / "table.json").read_text())["columns"][0]["order"]["rows"] == 2
    refused = comingle("reproduce", "comigs/table1", *SMOKE, "--out", tmp_path)
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "table1: exists; --resume continues it" in refused.err
    more = ("--methods", "local,fedavg,pcl", "--out", tmp_path)
    again = comingle("reproduce", "comigs/table1", *SMOKE, *more, "--resume")
    assert again.code == 0
    assert re.search(r"local · seed 0: [\d.]+ · already done", again.err)
    assert re.search(r"pcl · seed 0: [\d.]+ · \d+ s", again.err)
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / RUNS).glob("*/metrics.json")}
    assert len(stamps) == 3
    assert comingle("reproduce", "comigs/table1", *SMOKE, *more, "--force").code == 0
    assert all(path.stat().st_mtime_ns > stamp for path, stamp in stamps.items())
    # Table 5 has these rows too, and finds their runs.
    other = comingle("reproduce", "comigs/table5", *SMOKE, *more)
    assert other.err.count("already done") == 3


@pytest.mark.slow
def test_an_interrupted_run_goes_on_where_it_was(comingle: Any, tmp_path: Path) -> None:
    changes = ("--set", "training.rounds=3", "--set", "checkpoints.every=1", "--methods", "comigs-1g1s")
    whole = comingle("reproduce", "comigs/table1", *SMOKE, *changes, "--out", tmp_path / "whole")
    assert whole.code == 0

    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "round" and event["round"] == 3:
            raise KeyboardInterrupt

    wanted = RunSelection(
        scale="smoke",
        columns=["multilingual"],
        methods=["comigs-1g1s"],
        changes={"training.rounds": 3, "checkpoints.every": 1},
    )
    cells = plan("comigs/table1", wanted).cells
    torn = tmp_path / "torn"
    with pytest.raises(KeyboardInterrupt):
        list(run_cells(cells, torn, observers=lambda cell, sim: [stop]))
    assert not list(torn.glob("runs/*/metrics.json"))
    answer = comingle("reproduce", "comigs/table1", *SMOKE, *changes, "--out", torn, "--resume")
    assert answer.code == 0, answer.err
    (one,), (two,) = (list((folder / RUNS).iterdir()) for folder in (tmp_path / "whole", torn))
    assert read_metrics(one)["users"] == read_metrics(two)["users"]
    rounds = [json.loads(line) for line in (two / "events.jsonl").read_text().splitlines()]
    assert [event["round"] for event in rounds if event["event"] == "round"] == [1, 2, 3]


@pytest.mark.slow
def test_a_run_that_diverges_does_not_stop_the_others(comingle: Any, tmp_path: Path) -> None:
    wild = ("--set", "training.experts.learning_rate=1e30", "--methods", "pretrained,local")
    answer = comingle("reproduce", "comigs/table1", *SMOKE, *wild, "--out", tmp_path)
    assert answer.code == 0, answer.err
    assert "local · seed 0: diverged" in answer.err
    assert "Diverged: multilingual, local: user 'de': " in answer.out
    cells = json.loads((tmp_path / "table1" / "table.json").read_text())["columns"][0]["cells"]
    assert cells["local"]["ours"] is None
    assert cells["pretrained"]["ours"]["rank"] == 1


def test_the_list_and_the_dry_run_start_nothing(comingle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    listed = comingle("reproduce")
    assert (listed.code, listed.err) == (0, "")
    assert all(f"{name} " in listed.out for name in list_experiments())
    dry = comingle("reproduce", "comigs/table2", "--scale", "cpu", "--base", "random:llama", "--dry-run", "--seeds", 1)
    assert dry.code == 0
    # Six columns of five rows; with active parameters two columns of one data set are one run.
    assert dry.out.count(" seed 1 ") == 30 - 6
    assert "left out: ag-news-llama-2444 (not at scale cpu" in dry.out
    assert not list(tmp_path.iterdir())


def test_repeated_columns_are_named(comingle: Any) -> None:
    experiment = "comigs/table1"
    small = plan(experiment, RunSelection(scale="smoke", methods=["local"], columns=["multilingual", "slimpajama"]))
    assert repeated_columns(small) == {}
    first, _ = small.cells
    repeated = replace(small, cells=(first, replace(first, column="slimpajama")))
    assert repeated_columns(repeated) == {"slimpajama": "multilingual"}
    assert build_table(repeated, {})["repeats"] == {"SlimPajama": "Multilingual"}


@pytest.mark.slow
def test_a_reproduced_table_is_written_for_latex_and_other_commands_name_what_reads_it(
    comingle: Any, tmp_path: Path
) -> None:
    arguments = ("reproduce", "comigs/table1", *SMOKE, "--methods", "local", "--out", tmp_path / "out")
    assert comingle(*arguments).code == 0
    table = tmp_path / "out" / "table1"
    for options in ((), ("--latex", tmp_path / "no.tex"), ("--against", "local")):
        shown = comingle("show", table, *options)
        assert (shown.code, shown.out, shown.err.count("\n")) == (2, "", 1)
        command = f"comingle reproduce comigs/table1 --scale smoke --out {tmp_path / 'out'} --resume"
        assert command in shown.err
    assert not (tmp_path / "no.tex").exists()
    for folder in (table, tmp_path / "out"):
        reported = comingle("report", folder)
        assert (reported.code, reported.err.count("\n")) == (2, 1)
        (run,) = (tmp_path / "out" / RUNS).iterdir()
        assert str(run.parent) in reported.err
        assert run.name in reported.err
    again = comingle(*arguments, "--resume", "--latex", tmp_path / "table.tex")
    assert again.code == 0
    source = (tmp_path / "table.tex").read_text()
    assert r"\label{tab:comigs-table1}" in source
    assert source.count(r"\begin{table}") == 1  # one seed has no verdicts
    mean = json.loads((table / "table.json").read_text())["columns"][0]["cells"]["local"]["ours"]["mean"]
    assert f"& {mean:,.2f} \\#1 & 54.38 (0.32) \\#1" in source


def test_mistakes_are_one_line_and_exit_code_2(comingle: Any) -> None:
    for arguments, message in {
        ("comigs/table9",): "no table or figure 'comigs/table9'. Did you mean 'comigs/",
        ("comigs/table1", "--scale", "smok"): "--scale 'smok': unknown. Did you mean 'smoke'?",
        ("comigs/table1", "--scale", "smoke", "--methods", "fedsgd"): "--methods: no 'fedsgd' in it",
        ("comigs/table1", "--scale", "smoke", "--seeds", "one"): "--seeds 'one': give whole numbers",
    }.items():
        answer = comingle("reproduce", *arguments)
        assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1), arguments
        assert message in answer.err


@pytest.mark.slow
def test_several_runs_at_a_time_find_the_same(comingle: Any, tmp_path: Path) -> None:
    options = (*SMOKE, "--methods", "local,fedavg", "--seeds", "0,1")
    for jobs in (1, 2):
        answer = comingle("reproduce", "comigs/table1", *options, "--jobs", jobs, "--out", tmp_path / str(jobs))
        assert answer.code == 0, answer.err
    one, two = (json.loads((tmp_path / name / "table1" / "table.json").read_text()) for name in "12")
    assert one == two


@pytest.mark.slow
def test_costs_are_printed_as_they_are_documented(comingle: Any, tmp_path: Path) -> None:
    """Without a network, as only the base's shape counts; every line of the documentation's tables is printed."""
    page = (Path(__file__).parents[2] / "docs" / "results.md").read_text(encoding="utf-8")
    for name, start, end in (
        ("comigs/table3", "## Table 3: costs", "## Table 5: all baselines"),
        ("fedmerge/table1", "### Parameter scales (Table 1)", "### Cluster and Personal"),
        ("floral/table6", "### Data sets (Table 6)", "### Synthetic tasks"),
    ):
        answer = comingle("reproduce", name, "--out", tmp_path)
        assert answer.code == 0, answer.err
        section = page[page.index(start) : page.index(end)]
        documented = [line for line in section.splitlines() if line.startswith("|")]
        assert len(documented) > 3, name
        printed = answer.out.splitlines()
        assert [line for line in documented if line not in printed] == [], name
        text = (tmp_path / name.partition("/")[2] / "table.md").read_text()
        assert all(line in text for line in documented)


def test_counted_numbers_are_the_paper_s(comingle: Any, tmp_path: Path) -> None:
    for name, close in (("fedmerge/table1", 0.011), ("floral/table6", 0.0)):
        assert comingle("reproduce", name, "--out", tmp_path).code == 0
        cells = json.loads((tmp_path / name.partition("/")[2] / "table.json").read_text())["counted"]
        assert all(abs(cell["counted"] - cell["paper"]) <= close for cell in cells), name
        assert len(cells) == {"fedmerge/table1": 12, "floral/table6": 15}[name]


@pytest.mark.slow
def test_table_3_is_counted_and_trains_nothing(comingle: Any, tmp_path: Path) -> None:
    small = "random:gpt2?layers=2&dim=32&heads=2"
    answer = comingle("reproduce", "comigs/table3", "--base", small, "--out", tmp_path)
    assert answer.code == 0, answer.err
    assert not (tmp_path / RUNS).exists()
    text = (tmp_path / "table3" / "table.md").read_text()
    # On two layers of width 32: routers 2 x 2 x 32 entries, 2 FLOPs each for 128 tokens; of the LoRA of two experts,
    # rank 8 on both linears, 2 x 2 x 2 x 8 x (32 + 128), that is 0.62%.
    assert f"| +5 MFLOPs (+1.25%) | +{2 * 128 * 128 / 1e6:.3f} MFLOPs (+{128 / 10240:.2%}) |" in text
    assert "| -1.41 MB (-50%) | " in text
    refused = comingle("reproduce", "comigs/table3", "--base", small, "--out", tmp_path)
    assert (refused.code, refused.err.count("\n")) == (2, 1)
