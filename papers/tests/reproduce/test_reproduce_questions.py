"""FedMerge's Table 5: questions as a data set of a study, the paper's settings, and runs of every row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from comingle.config import Recipe
from comingle.models.lora import lora_scale
from comingle.utils.records import read_metrics
from comingle_papers.questions import LABELS
from comingle_papers.reproduce.plan import Plan, RunSelection, plan
from comingle_papers.reproduce.runner import run_cells, scores
from comingle_papers.reproduce.tables import build_table, markdown

ROWS = ("local", "fedit", "fedlora", "fedmerge-5")


@pytest.fixture(autouse=True)
def no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMINGLE_DATA", raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Nine short questions of each kind in two languages, laid out as the data that ``--data`` names."""
    for name in ("xnli", "xquad"):
        (tmp_path / name).mkdir()
    pairs = [
        {"id": i, "lang": who, "premise": f"{who}{i}", "hypothesis": "h", "label": LABELS[i % 3]}
        for who in ("en", "de")
        for i in range(9)
    ]
    texts = [
        {"lang": who, "context": f"text {i}", "qas": [{"id": i, "question": f"{who}?", "answer": f"text {i}"}]}
        for who in ("en", "de")
        for i in range(9)
    ]
    for name, rows in {"xnli": pairs, "xquad": texts}.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return tmp_path


def planned(scale: str = "paper", **wanted: Any) -> Plan:
    return plan("fedmerge/table5", RunSelection(scale=scale, **wanted))


def recipes(scale: str, row: str = "fedmerge-5", **wanted: Any) -> dict[str, Recipe]:
    return {cell.column: cell.recipe for cell in planned(scale, seeds=[0], methods=[row], **wanted).cells}


# ---------------------------------------------------------------- settings


def test_the_paper_scale_has_the_settings_of_section_4_7() -> None:
    for column, (train, test) in {"xnli": (300, 200), "xquad": (600, None)}.items():
        recipe = recipes("paper")[column]
        asked, training = recipe.data.questions, recipe.training
        assert asked is not None
        assert (asked.name, asked.path, asked.languages, asked.train, asked.test) == (column, None, None, train, test)
        assert (asked.valid, recipe.evaluation.select) == (train // 10, "best")
        assert recipe.base == "meta-llama/Meta-Llama-3-8B"
        assert (training.rounds, training.batch_size, training.context, training.local_epochs) == (20, 8, 512, 1)
        assert recipe.method.settings == {"models": 5, "weight_step": 0.01}
        assert recipe.adapters.rank == 8
        # Alpaca-LoRA's: alpha 16 over rank 8, AdamW at 3e-4 without decay.
        assert lora_scale(recipe.adapters.alpha, 8) == pytest.approx(16 / 8, rel=1e-4)
        experts = training.experts
        assert (experts.name, experts.learning_rate, experts.weight_decay) == ("adamw", 3e-4, 0)


def test_numbers_are_those_of_the_paper(shared_data: Path) -> None:
    source = shared_data.parent / "papers" / "fedmerge.md"
    if not source.is_file():
        pytest.skip(f"PAPER ABSENT: {source} does not exist")
    paper = source.read_text(encoding="utf-8")
    lines = paper[paper.index("Table 5: ") :].splitlines()
    printed = {cells[0].lower(): cells[1:] for line in lines[:8] if len(cells := line.split("\t")) == 5}
    rows = planned().experiment.rows
    assert [row.label.partition(",")[0] for row in rows.values()] == printed["dataset"]
    for number, column in enumerate(("xnli", "xquad")):
        assert [float((row.paper or [])[number] or "nan") for row in rows.values()] == [*map(float, printed[column])]


def test_the_cpu_scale_is_small_and_has_its_own_base_and_rates() -> None:
    found = recipes("cpu")
    assert {recipe.base for recipe in found.values()} == {"smollm2-135m"}
    rates = {column: recipe.training.experts.learning_rate for column, recipe in found.items()}
    assert rates == {"xnli": 1e-3, "xquad": 2e-3}
    asked = {column: recipe.data.questions for column, recipe in found.items()}
    assert {column: one.languages for column, one in asked.items() if one is not None} == {
        "xnli": ["en", "fr", "es", "de"],
        "xquad": ["en", "es", "de"],
    }
    assert planned("cpu").seeds == (0, 1, 2)
    for recipe in found.values():  # one evaluation, as models answer slowly
        assert recipe.evaluation.every == recipe.training.rounds
        assert (recipe.evaluation.first, recipe.evaluation.select) == (False, "last")


# ---------------------------------------------------------------- where questions come from


def test_questions_come_from_the_folder_or_the_hub(folder: Path) -> None:
    def paths(scale: str, **wanted: Any) -> dict[str, str | None]:
        asked = {column: recipe.data.questions for column, recipe in recipes(scale, **wanted).items()}
        return {column: one.path for column, one in asked.items() if one is not None}

    assert paths("cpu", data=folder) == {name: str(folder / name) for name in ("xnli", "xquad")}
    assert paths("cpu") == {"xnli": None, "xquad": None}  # which are the hub's
    (folder / "xquad" / "xquad.jsonl").unlink()
    (folder / "xquad").rmdir()
    assert paths("cpu", data=folder) == {"xnli": str(folder / "xnli"), "xquad": None}
    small = planned("smoke", data=folder)
    assert small.columns == ("xnli",)
    assert small.left_out == {"xquad": f"{folder}/xquad does not exist, and this scale does not use the hub"}
    with pytest.raises(Exception, match="xnli: there is no folder; give --data FOLDER"):
        planned("smoke")


def test_a_table_tells_what_its_own_scale_is() -> None:
    found = build_table(planned("cpu", seeds=[0]), {})
    assert found["about_scale"].startswith("SmolLM2-135M in place of LLaMA3-8B")
    studys = build_table(plan("fedmerge/table4", RunSelection(scale="cpu", seeds=[0])), {})
    assert studys["about_scale"].startswith("MNIST in place of CIFAR-100")


def test_estimates_grow_with_rounds_users_and_questions() -> None:
    def weight(column: str = "xnli", **changes: Any) -> float:
        named = {key.replace("__", "."): value for key, value in changes.items()}
        (cell,) = planned("cpu", seeds=[0], methods=["fedit"], columns=[column], changes=named).cells
        return cell.work

    questions = 5 * 500 + 200  # five rounds, and one evaluation
    assert weight() == pytest.approx(4 * 512 * questions)
    assert weight(data__questions__languages=["en", "de"]) == pytest.approx(2 * 512 * questions)
    assert weight(training__rounds=10) == pytest.approx(4 * 512 * (10 * 500 + 2 * 200))
    assert weight(evaluation__first=True) == pytest.approx(4 * 512 * (questions + 200))
    assert weight("xquad", data__questions__test=None) > weight("xquad", data__questions__test=1)


# ---------------------------------------------------------------- runs


@pytest.mark.slow
def test_every_row_runs_and_is_told_by_rouge(folder: Path, tmp_path: Path) -> None:
    short = {"training.context": 300, "training.rounds": 1}
    xnli = planned("smoke", data=folder, columns=["xnli"], changes=short)
    xquad = planned("smoke", data=folder, columns=["xquad"], methods=["fedmerge-5"], changes=short)
    outcomes = {outcome.cell.folder: outcome for outcome in run_cells([*xnli.cells, *xquad.cells], tmp_path / "out")}
    assert [cell.row for cell in xnli.cells] == list(ROWS)
    found = scores(outcomes, xnli.cells, "mean_test_rouge1")
    for cell in xnli.cells:
        metrics = read_metrics(outcomes[cell.folder].folder)
        assert metrics["measure"] == "accuracy"
        users = [metrics["users"][name]["test_rouge1"] for name in ("en", "de")]
        assert found[cell.row, "xnli"] == [pytest.approx(sum(users) / 2)]
    (other,) = xquad.cells
    metrics = read_metrics(outcomes[other.folder].folder)
    assert scores(outcomes, [other], "mean_test_rouge1") == {("fedmerge-5", "xquad"): [metrics["mean_test_rouge1"]]}


def test_the_mean_over_users_stands_for_what_models_are_not_compared_by(folder: Path, tmp_path: Path) -> None:
    found = planned("smoke", data=folder, columns=["xnli"], methods=["fedit"], changes={"training.context": 300})
    outcomes = {outcome.cell.folder: outcome for outcome in run_cells(found.cells, tmp_path / "out")}
    (cell,) = found.cells
    path = outcomes[cell.folder].folder / "metrics.json"
    metrics = read_metrics(path.parent)
    for name, rouge in {"en": 0.5, "de": 0.75}.items():
        metrics["users"][name]["test_rouge1"] = rouge
    path.write_text(json.dumps(metrics), encoding="utf-8")
    ours = scores(outcomes, found.cells, "mean_test_rouge1")
    assert ours == {("fedit", "xnli"): [0.625]}  # as the paper prints it, not in per cent
    assert "| FedIT | 0.625 #1 | 0.770 #1 |" in markdown(build_table(found, ours))


def test_real_questions_are_answered(shared_data: Path, tmp_path: Path) -> None:
    found = planned("smoke", data=shared_data, columns=["xnli"], methods=["fedmerge-5"])
    outcomes = {outcome.cell.folder: outcome for outcome in run_cells(found.cells, tmp_path)}
    (told,) = scores(outcomes, found.cells, "mean_test_rouge1").values()
    assert 0 <= told[0] <= 1


@pytest.mark.slow
def test_every_row_runs_on_real_questions(shared_data: Path, tmp_path: Path) -> None:
    found = planned("smoke", data=shared_data)
    outcomes = {outcome.cell.folder: outcome for outcome in run_cells(found.cells, tmp_path)}
    assert scores(outcomes, found.cells, "mean_test_rouge1").keys() == {(r, c) for r in ROWS for c in ("xnli", "xquad")}
