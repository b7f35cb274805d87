"""Tables out of scores that are worked out by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from comingle.utils.errors import RecipeError
from comingle_papers.reproduce.plan import Plan, RunSelection, plan
from comingle_papers.reproduce.tables import build_table, latex, markdown, remarks, write_tables

SCORES = {
    ("local", "multilingual"): [10.0, 12.0],
    ("fedavg", "multilingual"): [14.0, 14.2],
    ("comigs-2s", "multilingual"): [9.0, 9.5],
    ("local", "slimpajama"): [5.0],
}


@pytest.fixture
def small() -> Plan:
    """Three rows and two columns of Table 1."""
    wanted = RunSelection(
        scale="smoke",
        methods=["local", "fedavg", "comigs-2s"],
        columns=["multilingual", "slimpajama"],
        seeds=[0, 1],
    )
    return plan("comigs/table1", wanted)


def test_means_deviations_ranks_and_tau(small: Plan) -> None:
    smoke = build_table(small, SCORES)
    assert [column["sentence"] for column in smoke["columns"]] == ["", ""]
    table = build_table(replace(small, scale="cpu"), SCORES)
    multilingual, slimpajama = table["columns"]
    cells = multilingual["cells"]
    assert cells["local"]["ours"] == {"mean": 11.0, "std": pytest.approx(2**0.5), "rank": 2}
    assert cells["local"]["paper"] == {"mean": 54.38, "std": 0.32, "rank": 2}
    assert [cells[row]["ours"]["rank"] for row in ("fedavg", "comigs-2s")] == [3, 1]
    assert [cells[row]["paper"]["rank"] for row in ("fedavg", "comigs-2s")] == [3, 1]
    assert multilingual["order"]["tau"] == pytest.approx(1.0)
    assert multilingual["sentence"].endswith("over 3 rows; the paper's order is reproduced.")
    assert slimpajama["cells"]["local"]["ours"] == {"mean": 5.0, "std": None, "rank": 1}
    assert slimpajama["cells"]["fedavg"]["ours"] is None
    assert slimpajama["cells"]["fedavg"]["paper"] == {"mean": 23.27, "std": 0.05, "rank": None}
    assert "no order to compare" in slimpajama["sentence"]


def test_markdown(small: Plan, tmp_path: Path) -> None:
    table = build_table(small, SCORES, diverged=["multilingual, pcl: user 'de' left"])
    text = markdown(table)
    assert "| method | Multilingual | paper | SlimPajama | paper |\n|---|---|---|---|---|\n" in text
    assert "| local | 11.00 (1.41) #2 | 54.38 (0.32) #2 | 5.00 #1 | 26.95 (0.14) #1 |" in text
    assert "| comigs-2s | 9.25 (0.35) #1 | 46.36 (0.16) #1 (a) |  | 22.51 (0.08) |" in text
    assert "pretrained" not in text
    assert "- Diverged: multilingual, pcl: user 'de' left\n" in text
    assert "- (a) in our copy of the paper these three stand in one cell" in text
    assert "(b)" not in text  # the note on pfedmoe, which was not run
    write_tables(tmp_path / "new", table)
    assert json.loads((tmp_path / "new" / "table.json").read_text()) == json.loads(json.dumps(table))
    assert (tmp_path / "new" / "table.md").read_text() == text


def test_what_was_not_run_is_told(small: Plan) -> None:
    told = remarks(build_table(replace(small, missing=("new",), left_out={"x": "no text"}), {}))
    assert "Missing, since the method is not implemented: new." in told
    assert "Left out: x (no text)." in told


def test_columns_with_fewer_seeds_are_told(small: Plan) -> None:
    fewer = replace(small, cells=tuple(c for c in small.cells if c.column == "multilingual" or c.seed == 0))
    told = remarks(build_table(fewer, SCORES))
    assert [one for one in told if one.endswith(" only.")] == ["SlimPajama: seeds 0 only."]
    assert not [one for one in remarks(build_table(small, SCORES)) if one.endswith(" only.")]


def test_higher_can_be_better(small: Plan) -> None:
    higher = replace(small, experiment=small.experiment.model_copy(update={"better": "higher"}))
    cells = build_table(higher, SCORES)["columns"][0]["cells"]
    assert [cells[row]["ours"]["rank"] for row in ("local", "fedavg", "comigs-2s")] == [2, 1, 3]


# ---------------------------------------------------------------- against a baseline


def test_latex_has_the_numbers_and_the_verdicts_of_columns(small: Plan) -> None:
    source = latex(build_table(small, SCORES, results=RESULTS))
    assert r"local & 11.00 (1.41) \#2 & 54.38 (0.32) \#2 & 5.00 \#1 & 26.95 (0.14) \#1" in source
    labels = re.findall(r"\\label\{(.*)\}", source)
    assert labels == ["tab:comigs-table1", "tab:comigs-table1-multilingual"]
    assert "$-" in source


def users(*by_seed: tuple[float, float]) -> dict[int, dict[str, float | None]]:
    return {seed: {"ann": ann, "bob": bob} for seed, (ann, bob) in enumerate(by_seed)}


RESULTS = {
    "multilingual": {
        "local": users((10.0, 20.0), (11.0, 22.0)),
        "fedavg": users((20.0, 40.0), (22.0, 44.0)),
        "comigs-2s": users((9.0, 21.0), (12.0, 20.0)),
    },
    "slimpajama": {"local": users((5.0, 5.0)), "fedavg": users((6.0, 6.0))},
}


def test_rows_are_held_against_local_where_there_are_several_seeds(small: Plan) -> None:
    table = build_table(small, SCORES, results=RESULTS)
    multilingual, slimpajama = table["columns"]
    assert slimpajama["against"] is None
    found = {one["method"]: one["verdict"] for one in multilingual["against"]["methods"]}
    assert found == {"fedavg": "worse", "comigs-2s": "level"}
    text = markdown(table)
    assert f"## {multilingual['label']}: better, level or worse" in text
    assert "Table: against local: geometric mean of test perplexity over 2 users and seeds 0, 1" in text
    assert "| fedavg | +100.0% | +100.00 to +100.00 | worse | – |" in text
    assert "## SlimPajama: better" not in text


def test_another_row_is_the_baseline(small: Plan) -> None:
    table = build_table(small, SCORES, results=RESULTS, baseline="fedavg")
    found = table["columns"][0]["against"]
    assert (found["baseline"], found["methods"][0]["verdict"]) == ("fedavg", "better")
    with pytest.raises(RecipeError, match="--against 'fedav': not among the methods"):
        build_table(small, SCORES, results=RESULTS, baseline="fedav")


def test_a_baseline_that_was_not_run_gives_no_verdicts(small: Plan) -> None:
    some = {"multilingual": {row: found for row, found in RESULTS["multilingual"].items() if row != "local"}}
    assert build_table(small, SCORES, results=some)["columns"][0]["against"] is None
