"""Runs that are taken out of a file, made again, and put into it: tables without data or runs, and what is refused."""

from __future__ import annotations

import json
import lzma
import os
import random
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from comingle.utils.errors import RecipeError, RunError
from comingle.utils.records import read_metrics
from comingle_papers.reproduce.archive import find_archived, merge_records, plan_of, read_archive, write_archive
from comingle_papers.reproduce.plan import Cell, RunSelection, plan
from comingle_papers.reproduce.published import ASSUMED_FOLDER, list_experiments, with_placeholder
from comingle_papers.reproduce.runner import MEASURED, RUNS, run_cells, scores
from comingle_papers.reproduce.tables import build_table

PUBLISHED = Path(__file__).parents[2] / "measured"
BASE = "random:llama?layers=1&dim=32"
TINY = {
    "data.max_train_tokens": 200,
    "data.max_valid_tokens": 60,
    "data.max_test_tokens": 60,
    "training.rounds": 2,
    "training.local_steps": 1,
    "training.batch_size": 1,
    "training.context": 16,
    "runtime.threads": 1,
}
SETS = [part for key, value in TINY.items() for part in ("--set", f"{key}={value}")]
LEAK = ("comigs/leak", "--scale", "cpu", "--columns", "multilingual", "--jobs", 1, *SETS)


@pytest.fixture(autouse=True)
def no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMINGLE_DATA", raising=False)


def write_folder(folder: Path, *, seed: int = 0) -> Path:
    """FOLDER with a text of its own for each of four languages, and a base that is enough of one to be planned with."""
    words = [f"{chr(97 + i % 26)}{i}" for i in range(200)]
    draw = random.Random(seed)
    rows = [
        {"category": of, "split": split, "text": " ".join(draw.choices(words, k=80))}
        for of in ("de", "fr", "it", "nl")
        for split in ("train", "test")
        for _ in range(8)
    ]
    path = folder / "wiki_ner" / "wiki_ner.jsonl.xz"
    path.parent.mkdir(parents=True)
    path.write_bytes(lzma.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    (folder / "models" / "stories260K").mkdir(parents=True)
    return folder


def leak(folder: Path, *, methods: str = "local", seeds: str = "0") -> tuple[Any, ...]:
    """The command of one column on such a folder."""
    return ("reproduce", *LEAK, "--base", BASE, "--data", folder, "--methods", methods, "--seeds", seeds)


def planned(folder: Path, **wanted: Any) -> Cell:
    """The one run of local training."""
    columns, methods = ["multilingual"], ["local"]
    return plan(
        "comigs/leak", RunSelection(scale="cpu", data=folder, columns=columns, methods=methods, **wanted)
    ).cells[0]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, two runs on it in ``out``, and ``file.jsonl.xz`` with them."""
    place = tmp_path_factory.mktemp("made")
    wanted = RunSelection(
        scale="cpu", base=BASE, data=write_folder(place / "data"), columns=["multilingual"], seeds=[0], changes=TINY
    )
    cells = plan("comigs/leak", replace(wanted, methods=["local", "fedavg"])).cells
    assert len(list(run_cells(cells, place / "out"))) == 2
    return place


@pytest.fixture
def file(made: Path, tmp_path: Path, comingle: Callable[..., Any]) -> Path:
    """A file with the two runs."""
    path = tmp_path / "file.jsonl.xz"
    answer = comingle(*leak(made / "data", methods="local,fedavg"), "--out", made / "out", "--measured", path, "--add")
    assert answer.code == 0, answer.err
    assert f"{path}: 2 runs added, 0 were in it, 2 now; 0 of the 2 that are asked for are not finished" in flat(answer)
    return path


def flat(answer: Any) -> str:
    """What was printed, without the ends of lines that the width of the terminal makes."""
    return " ".join(answer.out.split())


# -------------------------------------------------------------------- what a run is called


def test_a_run_has_one_name_wherever_the_folder_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = write_folder(tmp_path / "a" / "data"), write_folder(tmp_path / "elsewhere")
    name = planned(here).folder
    assert planned(there).folder == planned(ASSUMED_FOLDER).folder == name
    monkeypatch.chdir(here)
    link = tmp_path / "link"
    link.symlink_to(here)
    for base in (
        "models/stories260K",
        "../data/models/stories260K",
        here / "models/stories260K",
        link / "models/stories260K",
    ):
        assert planned(here, base=str(base)).folder == name, base
    assert planned(link).folder == name
    shutil.copytree(here / "models" / "stories260K", here / "models" / "other")
    shutil.copytree(here / "models" / "stories260K", tmp_path / "outside")
    others = [planned(here, base=str(base)).folder for base in ("models/other", tmp_path / "outside", BASE)]
    others += [planned(here, changes={"training.rounds": 3}).folder, planned(here, seeds=[1]).folder]
    assert len({name, *others}) == 6


def test_only_what_lies_in_the_folder_is_placed(tmp_path: Path) -> None:
    content = {"path": [f"{tmp_path}/x/y.xz", f"{tmp_path}-2/x", "hub:a/b"], "base": str(tmp_path), "seed": 0}
    assert with_placeholder(content, tmp_path) == {
        "path": ["{data}/x/y.xz", f"{tmp_path}-2/x", "hub:a/b"],
        "base": "{data}",
        "seed": 0,
    }
    assert with_placeholder(content, None) == content


# -------------------------------------------------------------------- what is finished


def test_a_finished_run_is_taken_where_the_folder_has_moved_to(made: Path, comingle: Any, tmp_path: Path) -> None:
    shutil.copytree(made / "out", tmp_path / "out")
    moved = shutil.copytree(made / "data", tmp_path / "moved")
    answer = comingle(*leak(moved, methods="local,fedavg"), "--out", tmp_path / "out")
    assert answer.code == 0, answer.err
    assert answer.err.count("already done") == 2


def test_a_finished_run_on_other_text_is_refused(made: Path, comingle: Any, tmp_path: Path) -> None:
    shutil.copytree(made / "out", tmp_path / "out")
    other = write_folder(tmp_path / "other", seed=1)
    answer = comingle(*leak(other), "--out", tmp_path / "out")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert "the data of 'de' was " in answer.err
    assert "when it was measured, and is " in answer.err


def test_a_run_that_was_begun_where_the_folder_was_begins_anew(made: Path, comingle: Any, tmp_path: Path) -> None:
    (was,) = (path for path in (made / "out" / RUNS).iterdir() if path.name.startswith("local"))
    begun = shutil.copytree(was, tmp_path / "out" / RUNS / was.name)
    for name in (MEASURED, "metrics.json"):
        (begun / name).unlink()
    answer = comingle(*leak(shutil.copytree(made / "data", tmp_path / "moved")), "--out", tmp_path / "out")
    assert answer.code == 0, answer.err
    assert read_metrics(begun)["users"] == read_metrics(was)["users"]


def test_a_folder_of_another_run_and_a_damaged_one_are_refused(made: Path, comingle: Any, tmp_path: Path) -> None:
    (was,) = (path for path in (made / "out" / RUNS).iterdir() if path.name.startswith("local"))
    (other,) = (path for path in (made / "out" / RUNS).iterdir() if path.name.startswith("fedavg"))
    for content, message in {
        (other / MEASURED).read_text(): f"belongs to another run, {other.name}; use another --out",
        "{": "damaged (",
        "{}": "damaged (KeyError('computed')); delete it",
    }.items():
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        (shutil.copytree(was, tmp_path / "out" / RUNS / was.name) / MEASURED).write_text(content)
        answer = comingle(*leak(made / "data"), "--out", tmp_path / "out")
        assert (answer.code, answer.err.count("\n")) == (2, 1), answer.err
        assert message in answer.err


# -------------------------------------------------------------------- tables out of a file


@pytest.mark.slow
def test_a_table_out_of_a_file_is_the_table_of_its_runs(comingle: Any, tmp_path: Path) -> None:
    smoke = ("reproduce", "comigs/table1", "--scale", "smoke", "--columns", "multilingual")
    some = (*smoke, "--methods", "local,fedavg", "--seeds", "0,1")
    path, out = tmp_path / "smoke.jsonl.xz", tmp_path / "out"
    assert comingle(*some, "--out", out).code == 0
    assert comingle(*some, "--out", out, "--measured", path, "--add").code == 0
    answer = comingle(*smoke, "--seeds", "0,1", "--measured", path, "--out", tmp_path / "new")
    assert answer.code == 0, answer.err
    assert [one.name for one in (tmp_path / "new").iterdir()] == ["table1-measured"]  # no runs
    ours = json.loads((out / "table1" / "table.json").read_text())
    theirs = json.loads((tmp_path / "new" / "table1-measured" / "table.json").read_text())
    told = theirs.pop("measured")
    assert theirs == ours
    assert [one["change"] is None for one in theirs["columns"][0]["against"]["methods"]] == [False]
    assert "our numbers are from smoke.jsonl.xz, measured 20" in told[0]
    assert ": 4 with comingle " in told[0]
    assert told[1].startswith("smoke.jsonl.xz lacks 16 of 20 runs: multilingual · pretrained, seed 0, ")
    assert all(" ".join(one.split()) in flat(answer) for one in told)
    assert told[0] in (tmp_path / "new" / "table1-measured" / "table.md").read_text()


def test_neither_the_data_nor_its_place_is_needed(file: Path, comingle: Any, tmp_path: Path) -> None:
    answer = comingle("reproduce", *LEAK, "--base", BASE, "--seeds", 0, "--measured", file, "--out", tmp_path / "new")
    assert answer.code == 0, answer.err
    assert "lacks 13 of 15 runs: multilingual · centralized, seed 0, " in flat(answer)
    text = lzma.decompress(file.read_bytes()).decode()
    assert str(tmp_path.parent) not in text  # nor told


@pytest.mark.parametrize("name", ["comigs-cpu", "comigs-cpu.jsonl.xz", "papers/measured/comigs-cpu.jsonl.xz"])
def test_published_runs_are_found_from_any_folder(
    name: str, comingle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = comingle("reproduce", "comigs/table5", "--scale", "cpu", "--methods", "local,fedavg", "--measured", name)
    assert answer.code == 0, answer.err
    assert "29.33 (0.04)" in answer.out  # seeds 0 and 1, the scale's


def test_no_other_file_takes_the_place_of_a_missing_one(comingle: Any, tmp_path: Path) -> None:
    for path in (tmp_path / "comigs-cpu.jsonl.xz", Path("mine", "comigs-cpu.jsonl.xz"), Path("comigs-gpu")):
        answer = comingle("reproduce", "comigs/table5", "--scale", "cpu", "--measured", path)
        assert (answer.code, answer.out) == (2, "")
        assert answer.err.startswith(f"comingle: --measured {path}: No such file or directory; give a path, or one of")
        assert "comigs-cpu, field-cpu, floral-cpu, floral-paper, users-cpu" in answer.err


def test_missing_seeds_of_a_row_are_told_first(file: Path) -> None:
    records = read_archive(file)
    wanted = RunSelection(scale="cpu", base=BASE, columns=["multilingual"], seeds=[0, 1], changes=TINY)
    shown, found, told = find_archived(plan_of(records, "comigs/leak", wanted), records, file)
    assert told[1].startswith(
        "file.jsonl.xz lacks 28 of 30 runs: multilingual · local, seed 1, multilingual · fedavg, seed 1, "
    )
    assert (shown.rows, shown.columns, shown.seeds, len(found)) == (("local", "fedavg"), ("multilingual",), (0,), 2)


@pytest.mark.slow
def test_runs_that_diverged_are_kept_as_such(comingle: Any, tmp_path: Path) -> None:
    wild = ("--set", "training.experts.learning_rate=1e30", "--methods", "pretrained,local")
    smoke = ("reproduce", "comigs/table1", "--scale", "smoke", "--columns", "multilingual", *wild)
    path = tmp_path / "wild.jsonl.xz"
    assert comingle(*smoke, "--out", tmp_path).code == 0
    assert comingle(*smoke, "--out", tmp_path, "--measured", path, "--add").code == 0
    answer = comingle(*smoke, "--out", tmp_path, "--measured", path)
    assert answer.code == 0, answer.err
    assert "Diverged: multilingual, local: user 'de': " in answer.out
    checked = comingle(*smoke, "--out", tmp_path, "--measured", path, "--check", 9)
    assert checked.code == 0, checked.err
    assert "multilingual · local, seed 0: published diverged, here diverged (0.000% apart)" in flat(checked)


# -------------------------------------------------------------------- made again, and more of them


def test_published_runs_are_made_again_and_compared(file: Path, made: Path, comingle: Any, tmp_path: Path) -> None:
    options = ("--measured", file, "--out", tmp_path / "new", "--check", 1)
    answer = comingle(*leak(made / "data", methods="local,fedavg"), *options)
    assert answer.code == 0, answer.err
    (folder,) = (tmp_path / "new" / RUNS).iterdir()
    result = f"{read_metrics(folder)['mean_test_perplexity']:,.2f}"
    assert f"multilingual · local, seed 0: published {result}, here {result} (0.000% apart)" in flat(answer)

    records = read_archive(file)
    wrong = records[folder.name]
    metrics = {**(wrong.metrics or {}), "mean_test_perplexity": 1.02 * read_metrics(folder)["mean_test_perplexity"]}
    write_archive(file, [replace(wrong, metrics=metrics)])
    answer = comingle(*leak(made / "data"), *options)
    assert (answer.code, len(re.findall(rf"--check {re.escape(str(file))}: 1 of 1 .* 0\.5%", answer.err))) == (
        2,
        1,
    )
    assert f", here {result} (1.961% apart)" in flat(answer)


def test_other_text_is_not_compared(file: Path, comingle: Any, tmp_path: Path) -> None:
    other = write_folder(tmp_path / "other", seed=1)
    answer = comingle(*leak(other), "--measured", file, "--out", tmp_path / "new", "--check", 1)
    assert answer.code == 2
    assert "multilingual · local, seed 0: local-seed0-" in answer.err
    assert "the data of 'de' was " in answer.err
    assert "published" not in answer.out.partition("leak-measured")[2]


@pytest.mark.slow
def test_more_seeds_are_added_and_again_nothing_changes(file: Path, made: Path, comingle: Any, tmp_path: Path) -> None:
    out, before = tmp_path / "new", file.read_bytes()
    add = ("--out", out, "--measured", file, "--add")
    assert comingle(*leak(made / "data", seeds="0,1"), "--out", out).code == 0
    answer = comingle(*leak(made / "data", seeds="0,1,2"), *add)
    assert "1 runs added, 1 were in it, 3 now; 1 of the 3 that are asked for are not finished" in flat(answer)
    after = file.read_bytes()
    assert after != before
    assert comingle(*leak(made / "data", seeds="0,1,2"), *add).code == 0
    assert file.read_bytes() == after


@pytest.mark.slow
def test_runs_on_other_text_are_not_added_whatever_their_seed(file: Path, comingle: Any, tmp_path: Path) -> None:
    other, out, before = write_folder(tmp_path / "other", seed=1), tmp_path / "new", file.read_bytes()
    for seed in (0, 1):
        assert comingle(*leak(other, seeds=str(seed)), "--out", out, "--force").code == 0
        answer = comingle(*leak(other, seeds=str(seed)), "--out", out, "--measured", file, "--add")
        assert (answer.code, answer.err.count("\n")) == (2, 1), answer.err
        assert "the data of 'de' was " in answer.err
        assert file.read_bytes() == before


def test_a_contradiction_is_an_error_that_names_the_run(file: Path) -> None:
    records = read_archive(file)
    record = next(iter(records.values()))
    assert record.metrics is not None
    mean = record.metrics["mean_test_perplexity"]

    def other(value: float | None) -> Any:
        return replace(record, metrics={**(record.metrics or {}), "mean_test_perplexity": value})

    assert merge_records(file, records, [other(1.004 * mean)]) == records  # rounding: what was first stays
    for new, by in ((other(1.006 * mean), "0.60%"), (other(None), "inf%"), (replace(record, metrics=None), "inf%")):
        with pytest.raises(RunError, match=f"{record.run}: differs by {by}"):
            merge_records(file, records, [new])
    with pytest.raises(RunError, match=f"{record.run}: the base was "):
        merge_records(file, records, [replace(record, inputs={**record.inputs, "the base": "other"})])


# -------------------------------------------------------------------- mistakes


def test_a_damaged_file_is_one_line(file: Path, comingle: Any) -> None:
    whole = file.read_bytes()
    lines = lzma.decompress(whole).decode().splitlines()
    renamed = json.dumps({**json.loads(lines[0]), "run": "local-seed0-0000000000000000"})
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for content in (b"", b"text", whole[:-20], bytes(flipped), *map(packed, (renamed, "[]", "{}", "{", "\xff"))):
        file.write_bytes(content)
        answer = comingle("reproduce", *LEAK, "--measured", file)
        assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1), (content[:20], answer.err)
        assert f"--measured {file}: damaged, or of another version (" in answer.err
    file.unlink()
    answer = comingle("reproduce", *LEAK, "--measured", file)
    assert (answer.code, answer.err.count(f"--measured {file}: {os.strerror(2)}")) == (2, 1)


def packed(text: str) -> bytes:
    return lzma.compress(text.encode("latin-1"))


def test_what_cannot_be_asked_for_is_one_line(file: Path, made: Path, comingle: Any, tmp_path: Path) -> None:
    measured, out = ("--measured", file), ("--out", tmp_path / "none")
    for arguments, message in {
        (*LEAK, "--add"): "--add: give a file with --measured FILE",
        (*LEAK, "--check", 2): "--check: give a file with --measured FILE",
        (*LEAK, *measured, "--add", "--check", 2): "--add and --check: got both",
        (
            *LEAK,
            *measured,
        ): "none of the 45 runs that are asked for is in it, as multilingual · centralized, seed 0; it has 2",
        ("comigs/table3", *measured): "comigs/table3 is counted",
        (*leak(made / "data")[1:], *measured, *out, "--add"): "none of the 1 runs that are asked for is finished there",
    }.items():
        answer = comingle("reproduce", *arguments)
        assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1), answer.err
        assert message in answer.err


# -------------------------------------------------------------------- what is published


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(PUBLISHED.glob("*.jsonl.xz")), ids=lambda path: path.name)
def test_published_runs_are_those_of_the_tables_as_they_are(path: Path) -> None:
    """Whoever changes a table's settings measures it again, or takes its runs out of the file."""
    records = read_archive(path)
    paper, _, scale = path.name.removesuffix(".jsonl.xz").partition("-")
    wanted = RunSelection(scale=scale, seeds=sorted({record.computed["seed"] for record in records.values()}))
    tables = [name for name, one in list_experiments().items() if name.startswith(f"{paper}/") and one.kind == "runs"]
    known: set[str] = set()
    for name in tables:
        with suppress(RecipeError):  # nothing of it is at this scale
            known |= {cell.folder for cell in plan_of(records, name, wanted).cells}
    assert sorted(records.keys() - known) == []
    assert "/" not in "".join(record.made["machine"] for record in records.values())
    assert path.stat().st_size < 300_000


def test_documented_orders_of_table_5_are_those_of_the_published_runs() -> None:
    """Kendall's tau, its p-value and the pairs in papers/docs/results.md, out of the file and the recipe's numbers."""
    records, wanted = read_archive(PUBLISHED / "comigs-cpu.jsonl.xz"), RunSelection(scale="cpu", seeds=[0, 1, 2])
    shown, found, _ = find_archived(plan_of(records, "comigs/table5", wanted), records, PUBLISHED)
    columns = build_table(shown, scores(found, shown.cells, shown.experiment.metric))["columns"]
    page = (Path(__file__).parents[2] / "docs" / "results.md").read_text(encoding="utf-8")
    section = page[page.index("## Table 5: all baselines") : page.index("## Table 6: load balancing")]
    taus = re.findall(r"(\d\.\d\d) \(p = ([\d.]+)\)", section[section.index("| Kendall's tau") :].partition("\n")[0])
    orders = [column["order"] for column in columns]
    assert [float(tau) for tau, _ in taus] == [round(order["tau"], 2) for order in orders]
    assert [float(p) for _, p in taus] == [float(f"{order['p_value']:.1g}") for order in orders]
    first, second, third = (str(order["agreeing"]) for order in orders)
    assert f"*What holds:* {first}, {second} and {third} of {orders[0]['pairs']} pairs" in section
    for column in columns:
        for row, cell in column["cells"].items():
            (line,) = [line for line in section.splitlines() if line.startswith(f"| {row} |")]
            assert f"#{cell['ours']['rank']}" in line, (row, column["name"])
