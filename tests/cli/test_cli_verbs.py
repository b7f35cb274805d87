"""Every verb does what it says, with a random base on a little text."""

from __future__ import annotations

import json
import math
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from comingle.cli.compare import DEMO_METHODS, DEMO_PROMPTS, split_names, split_seeds
from comingle.config import load_recipe
from comingle.methods import REGISTRY, make, settings_of
from comingle.methods.settings import allowed_values

QUICK = ("--set", "training.rounds=1", "--set", "training.local_steps=1")
METRICS = {
    "method",
    "seed",
    "users",
    "mean_test_perplexity",
    "upload_bytes_per_user_round",
    "trainable_parameters",
    "tokens_per_second",
    "wall_seconds",
    "peak_memory_bytes",
}


def plain(text: str) -> str:
    """Output with its table's blanks collapsed."""
    return re.sub(r"[ \t]+", " ", text)


# ---------------------------------------------------------------- run and show


def test_run_writes_a_folder_and_prints_every_user(comingle: Any, recipe_file: Path, tmp_path: Path) -> None:
    answer = comingle("run", recipe_file, "--out", tmp_path / "run", *QUICK, "--seed", 7)
    assert (answer.code, answer.err) == (0, "")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names - {"tensorboard", ".lock"} == {
        "recipe.yaml",
        "inputs.json",
        "events.jsonl",
        "metrics.json",
        "checkpoints",
    }
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics.keys() >= METRICS
    assert (metrics["method"], metrics["seed"]) == ("comigs-1g1s", 7)
    sent = {"upload_bytes_per_user_round", "download_bytes_per_user_round"}
    for key in METRICS - {"method", "seed", "users"} - sent:
        assert metrics[key] > 0, key
    assert all(metrics[key] == 0 for key in sent)  # a single round, whose local models count
    assert metrics["peak_memory_bytes"] > 10_000_000
    assert metrics["wall_seconds"] > 0.001
    for name, user in metrics["users"].items():
        assert f"{name} {user['test_perplexity']:,.2f} 59 " in plain(answer.out)
    assert f"mean {metrics['mean_test_perplexity']:,.2f}" in plain(answer.out)
    assert f"geometric mean {metrics['geometric_mean_test_perplexity']:,.2f}" in plain(answer.out)
    losses = [user["test_loss_nats"] for user in metrics["users"].values()]
    assert metrics["geometric_mean_test_perplexity"] == pytest.approx(math.exp(statistics.mean(losses)), rel=1e-12)
    assert f"{tmp_path / 'run'}/" in answer.out
    assert load_recipe(tmp_path / "run").training.rounds == 1


def test_run_without_out_goes_below_runs(
    comingle: Any, recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert comingle("run", recipe_file, "--set", "method=pretrained", "--seed", 3).code == 0
    assert (tmp_path / "runs" / "tiny-pretrained-seed3" / "metrics.json").is_file()


def test_set_reads_values_as_yaml(comingle: Any, recipe_file: Path, tmp_path: Path) -> None:
    changes = [
        "training.experts.learning_rate=1e-3",
        "training.participation=[[ann], [bob, cem]]",
        "method={name: comigs, specialists: [0, 1, 2]}",
        "runtime.compile=false",
        "data.max_valid_tokens=null",
    ]
    options = [word for change in changes for word in ("--set", change)]
    assert comingle("run", recipe_file, "--out", tmp_path / "run", *options, *QUICK).code == 0
    found = load_recipe(tmp_path / "run")
    assert found.training.experts.learning_rate == 0.001
    assert found.training.participation == [["ann"], ["bob", "cem"]]
    assert found.method.settings == {"specialists": [0, 1, 2]}
    data: Any = found.data
    assert data.max_valid_tokens is None


def test_show_prints_a_run_and_its_curve(comingle: Any, recipe_file: Path, tmp_path: Path) -> None:
    ran = comingle("run", recipe_file, "--out", tmp_path / "run", "--set", "training.local_steps=1")
    shown = comingle("show", tmp_path / "run")
    assert (shown.code, shown.err) == (0, "")
    table = plain(ran.out).partition("tokens/s")[0]
    assert plain(shown.out).startswith(table)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    for event in (e for e in events if e["event"] == "evaluation"):
        scores = " ".join(f"{user['test_perplexity']:.2f}" for user in event["users"].values())
        means = f"{event['mean_test_perplexity']:.2f} {event['geometric_mean_test_perplexity']:.2f}"
        assert f"{event['round']} {means} {scores}" in plain(shown.out)


# ---------------------------------------------------------------- compare


@pytest.fixture
def compared(comingle: Any, recipe_file: Path, tmp_path: Path) -> tuple[Path, Any]:
    """Three methods with two seeds each."""
    options = ("--methods", "pretrained,local,comigs-1g1s", "--seeds", "0,1")
    answer = comingle("compare", recipe_file, *options, "--out", tmp_path / "out", *QUICK)
    assert (answer.code, answer.err) == (0, "")
    return tmp_path / "out", answer


def test_compare_tables_hold_means_and_deviations_over_seeds(compared: tuple[Path, Any], comingle: Any) -> None:
    folder, answer = compared
    table = json.loads((folder / "table.json").read_text())
    markdown = (folder / "table.md").read_text()
    assert [row["method"] for row in table["methods"]] == ["pretrained", "local", "comigs-1g1s"]
    lines = [line for line in markdown.splitlines() if line.startswith("| ")]
    assert lines[0] == "| method | ann | bob | cem | mean | geometric mean | trainable | upload / round | seconds |"
    for row, line in zip(table["methods"], lines[1:4], strict=True):
        runs = [json.loads((folder / f"{row['method']}-seed{seed}" / "metrics.json").read_text()) for seed in (0, 1)]
        assert row["seeds"] == [run["seed"] for run in runs] == [0, 1]
        means = [run["mean_test_perplexity"] for run in runs]
        assert row["mean_test_perplexity"] == {"mean": statistics.mean(means), "std": statistics.stdev(means)}
        middles = [run["geometric_mean_test_perplexity"] for run in runs]
        expected = {"mean": pytest.approx(statistics.mean(middles)), "std": pytest.approx(statistics.stdev(middles))}
        assert row["geometric_mean_test_perplexity"] == expected
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[0].removesuffix(" ‡") == row["method"]  # the mark of routers that were never trained
        for name, cell in zip(("ann", "bob", "cem"), cells[1:4], strict=True):
            values = [run["users"][name]["test_perplexity"] for run in runs]
            assert row["users"][name] == {"mean": statistics.mean(values), "std": statistics.stdev(values)}
            assert cell == f"{statistics.mean(values):,.2f} ({statistics.stdev(values):.2f})"
        assert cells[4] == f"{statistics.mean(means):,.2f} ({statistics.stdev(means):.2f})"
        assert " ".join(cells[:5]) in plain(answer.out)
    assert "mean (std) over seeds 0, 1" in markdown
    assert "mean (std) over seeds 0, 1" in answer.out
    shown = comingle("show", folder)
    assert shown.code == 0
    assert plain(shown.out).strip() in plain(answer.out)


def test_compare_gives_every_method_the_same_text_and_budget(compared: tuple[Path, Any]) -> None:
    folder, _ = compared
    starts = [json.loads(path.read_text().splitlines()[0]) for path in folder.glob("*-seed0/events.jsonl")]
    assert len(starts) == 3
    assert all(start["users"] == starts[0]["users"] for start in starts)
    recipes = [load_recipe(folder / f"{name}-seed0") for name in ("local", "comigs-1g1s")]
    assert recipes[0].training == recipes[1].training
    assert recipes[1].method.settings == {"router_every": 2, "router_steps": 1}
    assert recipes[0].method.settings == {}


def test_settings_of_the_recipe_are_its_own_methods_and_those_of_the_line_are_for_all(
    comingle: Any, recipe_file: Path, tmp_path: Path
) -> None:
    def settings(*sets: str) -> list[dict[str, int]]:
        options = (*QUICK, "--out", tmp_path / "both", "--force", *(f"--set={key}" for key in sets))
        answer = comingle("compare", recipe_file, "--methods", "comigs-2g,comigs-1g1s,local", "--seeds", 0, *options)
        assert (answer.code, answer.err) == (0, "")
        names = ("comigs-2g", "comigs-1g1s", "local")
        return [load_recipe(tmp_path / "both" / f"{name}-seed0").method.settings for name in names]

    assert settings() == [{}, {"router_every": 2, "router_steps": 1}, {}]
    assert settings("method.router_every=1") == [{"router_every": 1}, {"router_every": 1, "router_steps": 1}, {}]
    answer = comingle("compare", recipe_file, "--methods", "local,pretrained", "--set", "method.router_every=1")
    assert answer.code == 2
    assert re.search("--set method.router_every: .*local, pretrained", answer.err)
    assert len(answer.err.splitlines()) == 1


def test_compare_equals_single_runs(
    compared: tuple[Path, Any], comingle: Any, recipe_file: Path, tmp_path: Path
) -> None:
    folder, _ = compared
    comingle("run", recipe_file, "--out", tmp_path / "one", *QUICK, "--seed", 1, "--set", "method=local")
    found = [
        json.loads((path / "metrics.json").read_text())["users"] for path in (tmp_path / "one", folder / "local-seed1")
    ]
    assert found[0] == found[1]


def test_compare_resumes_what_is_missing(compared: tuple[Path, Any], comingle: Any, recipe_file: Path) -> None:
    folder, _ = compared
    tables = [(folder / "table.json").read_text()]
    finished = (folder / "local-seed0" / "events.jsonl").read_text()
    for path in (folder / "comigs-1g1s-seed1" / "metrics.json", folder / "table.json"):
        path.unlink()
    options = ("--methods", "pretrained,local,comigs-1g1s", "--seeds", "0,1")
    answer = comingle("compare", recipe_file, *options, "--out", folder, *QUICK, "--resume")
    assert (answer.code, answer.err) == (0, "")
    tables.append((folder / "table.json").read_text())
    rows = [
        [
            {k: v for k, v in row.items() if "seconds" not in k and k != "tokens_per_second"}
            for row in json.loads(t)["methods"]
        ]
        for t in tables
    ]
    assert rows[0] == rows[1]
    assert (folder / "local-seed0" / "events.jsonl").read_text() == finished


def test_a_single_seed_has_no_deviation(comingle: Any, recipe_file: Path, tmp_path: Path) -> None:
    answer = comingle("compare", recipe_file, "--methods", "pretrained", "--seeds", 0, "--out", tmp_path / "out")
    assert answer.code == 0
    row = json.loads((tmp_path / "out" / "table.json").read_text())["methods"][0]
    assert row["mean_test_perplexity"]["std"] == 0
    assert "(" not in (tmp_path / "out" / "table.md").read_text().splitlines()[-1]


def test_names_and_seeds_are_split() -> None:
    assert split_names("local, fedavg,local,") == ["local", "fedavg"]
    assert split_seeds("2, 0,1") == [2, 0, 1]


# ---------------------------------------------------------------- data and methods


@pytest.mark.slow
def test_logged_warnings_of_a_run_are_marked_as_such(recipe_file: Path, tmp_path: Path) -> None:
    """In a process of its own, as pytest replaces the handlers of the log."""
    sets = ["method.router_every=9", "training.rounds=1", "training.local_steps=1"]
    command = [sys.executable, "-m", "comingle", "run", str(recipe_file), "--out", str(tmp_path / "run"), "--quiet"]
    done = subprocess.run(
        [*command, *(word for one in sets for word in ("--set", one))], capture_output=True, text=True, check=True
    )
    lines = [line for line in done.stderr.splitlines() if "stays untrained" in line]
    assert [line.startswith("warning: method comigs-1g1s: ") for line in lines] == [True]


def test_data_previews_every_user(comingle: Any, recipe_file: Path) -> None:
    answer = comingle("data", recipe_file)
    assert (answer.code, answer.err) == (0, "")
    out = plain(answer.out)
    for name in ("ann", "bob", "cem"):
        row = re.search(rf"^ ?{name} ((?:[\d,]+ ){{5}}[\d,]+)", out, re.MULTILINE)
        assert row, out
        documents, tokens = (list(map(int, row[1].replace(",", "").split()))[i::2] for i in (0, 1))
        assert documents[0] >= 1
        assert tokens[2] == 60
        assert f"{name} train: " in out
        assert f"{name} test: " in out
    text = (recipe_file.parent / "texts" / "ann.txt").read_text().split()
    sample = re.search(r"ann train: (\S+ \S+ \S+)", out)
    assert sample
    assert sample[1] in " ".join(text)


def test_data_reports_overlapping_documents(comingle: Any, recipe_file: Path) -> None:
    folder = recipe_file.parent / "texts" / "twice"
    folder.mkdir()
    for name in "abcdefghij":
        (folder / f"{name}.txt").write_text((recipe_file.parent / "texts" / "ann.txt").read_text())
    answer = comingle("data", recipe_file, "--set", f"data.users.dan={folder}")
    assert answer.code == 0
    assert re.search(
        r"warning: user dan: \d of \d validation and \d of \d test documents are in the training text", answer.err
    )


def test_methods_lists_the_registry(comingle: Any) -> None:
    answer = comingle("methods")
    assert (answer.code, answer.err) == (0, "")
    listed = [line.split()[0] for line in answer.out.splitlines() if line.strip()]
    assert listed[1:] == list(REGISTRY)


@pytest.mark.parametrize("name", REGISTRY)
def test_methods_tells_where_a_method_comes_from(comingle: Any, name: str) -> None:
    answer = comingle("methods", name)
    assert (answer.code, answer.err) == (0, "")
    lines = [line.strip() for line in answer.out.splitlines() if line.strip()]
    assert lines[0] == name
    for label in ("Source: ", "Shared: ", "Client: ", "Differs from the paper: ", "Placement: ", "Settings: "):
        assert [line for line in lines if line.startswith(label) and len(line) > len(label)], label
    assert re.search(r"(^|  )Local: \S", answer.out, re.MULTILINE)
    assert re.search(r"(^|  )Frozen: \S", answer.out, re.MULTILINE)
    assert re.search(r"(^|  )Server: \S", answer.out, re.MULTILINE)
    assert re.search(r"arXiv:\d{4}\.\d{5}", answer.out)
    (placement,) = (line for line in lines if line.startswith("Placement: "))
    shared = placement.partition("shared: ")[2].partition(";")[0]
    named = {role.partition(".")[0] for role in shared.split(", ")} - {"none"}
    assert named <= {role.partition(".")[0] for role in make(name).shared}
    assert bool(named) == bool(make(name).shared)
    allowed = [line for line in lines if line.startswith("Allowed: ")]
    assert all(f"{key}: {allowed_values(REGISTRY[name])[key][0]}" in allowed[0] for key in settings_of(name))
    settings = lines[-1].removeprefix("Settings: ")
    assert settings == (", ".join(f"{key}: {value}" for key, value in settings_of(name).items()) or "none")


# ---------------------------------------------------------------- demo


@pytest.mark.slow
def test_the_demo_ends_with_a_table_a_sample_of_each_user_and_what_next(comingle: Any, tmp_path: Path) -> None:
    tiny = {
        "base": "random:llama",
        "data.max_train_tokens": 200,
        "data.max_valid_tokens": 60,
        "data.max_test_tokens": 60,
        "training.rounds": 1,
        "training.local_steps": 1,
        "training.batch_size": 1,
        "training.context": 16,
        "runtime.threads": 1,
    }
    options = [word for key, value in tiny.items() for word in ("--set", f"{key}={value}")]
    answer = comingle("demo", "--out", tmp_path / "demo", *options)
    assert (answer.code, answer.err) == (0, "")
    table = json.loads((tmp_path / "demo" / "table.json").read_text())
    assert (
        [row["method"] for row in table["methods"]] == DEMO_METHODS == ["pretrained", "local", "fedavg", "comigs-1g1s"]
    )
    after_table = answer.out.rpartition("greedy")[2]
    assert list(table["methods"][0]["users"]) == list(DEMO_PROMPTS)
    for name, prompt in DEMO_PROMPTS.items():
        assert f"{name}: {prompt}" in after_table
    advised = re.search(r"comingle show (\S+)", after_table)
    assert advised
    assert comingle("show", advised[1]).code == 0


def test_help_tells_what_arguments_mean_in_whole_paragraphs(comingle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some pairs of typer and click forget an argument's help, and typer keeps a docstring's own line breaks."""
    monkeypatch.setenv("COLUMNS", "100")
    told = comingle("audit", "--help").out
    assert all(word in told for word in ("RUN", "--trials", "--shadows", "(default: RUN)"))
    lines = [line.strip() for line in told.splitlines()]
    first = next(at for at, line in enumerate(lines) if line.startswith("Text and conversations: bound epsilon"))
    paragraph = lines[first : lines.index("", first)]
    assert all(len(line) > 85 for line in paragraph[:-1]), paragraph
