"""``comingle evaluate``: scores of lm-eval on users' models, without an export."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from comingle.reports.tables import render_task_scores
from comingle.runs import api

PACKAGES = (
    "lm-eval==0.4.13", "evaluate", "pytablewriter", "sacrebleu", "scikit-learn", "sqlitedict", "word2number",
    "DataProperty", "mbstrdecoder", "tabledata", "typepy", "tcolorpy", "pathvalidate", "portalocker", "tabulate",
    "chardet", "python-dateutil", "pytz", "lxml", "narwhals",
)  # fmt: skip
"""lm-eval, and those of its dependencies that the development environment lacks."""

QUESTIONS = [
    {"question": "red", "choices": [" green", " blue!"], "answer": 0},
    {"question": "a cat and", "choices": [" a dog", " zebra"], "answer": 1},
    {"question": "one two three", "choices": [" four", " x"], "answer": 0},
]


@pytest.fixture(scope="module")
def run(write_recipe: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    recipe = write_recipe(folder / "project")
    content = yaml.safe_load(recipe.read_text())
    recipe.write_text(yaml.safe_dump({**content, "runtime": {"dtype": "float32"}}))
    api.run(recipe, out=folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task of questions with choices, and one of perplexity."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}},
        "test_split": "test",
        "metadata": {"version": 1.0},
    }
    choices = {
        "task": "colours",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    perplexity = {
        "task": "perplexity",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    }
    for task in (choices, perplexity):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump({**common, **task}))
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment in which lm-eval can be imported; it is no development dependency, as it takes 150 MB."""
    folder = tmp_path_factory.mktemp("lm_eval")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, *PACKAGES], check=True
    )
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(folder)])}


@pytest.mark.slow
def test_scores_are_those_of_the_exported_model(
    comingle: Any, run: Path, tasks: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """The export is scored by lm-eval's own command, which does not import comingle."""
    command = [sys.executable, "-m", "comingle", "evaluate", str(run), "--tasks", str(tasks), "--quiet"]
    command += ["--user", "bob", "--user", "ann", "--pretrained", "--out", str(tmp_path / "scores.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert list(scores) == ["pretrained", "bob", "ann"]

    assert comingle("export", run, "--user", "bob", "--to", tmp_path / "bob").code == 0
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--include_path", str(tasks), "--device", "cpu"]
    command += ["--model_args", f"pretrained={tmp_path / 'bob'},dtype=float32", "--tasks", "colours,perplexity"]
    subprocess.run([*command, "--output_path", str(tmp_path / "theirs")], env=environment, check=True)
    (written,) = (tmp_path / "theirs").rglob("results_*.json")
    theirs = json.loads(written.read_text())["results"]
    ours = scores["bob"]["results"]
    assert ours["colours"] == pytest.approx(
        {key.removesuffix(",none"): value for key, value in theirs["colours"].items() if key.endswith(",none")}
    )
    assert ours["perplexity"]["bits_per_byte"] == pytest.approx(theirs["perplexity"]["bits_per_byte,none"], rel=1e-5)
    perplexities = {name: score["results"]["perplexity"]["word_perplexity"] for name, score in scores.items()}
    assert len(set(perplexities.values())) == 3  # three models
    for name in scores:
        assert f"perplexity  bits_per_byte    {name}" in done.stdout
    assert scores["bob"]["n-samples"]["colours"]["effective"] == len(QUESTIONS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "colors"], "comingle: --task colors: unknown; allowed: colours"),
        (["--user", "nobody"], "nobody"),
        (["--task", "damaged"], "comingle: tasks damaged: "),
    ],
)
def test_a_mistake_is_one_line(
    run: Path, tasks: Path, environment: dict[str, str], tmp_path: Path, arguments: list[str], message: str
) -> None:
    folder = tmp_path / "tasks"
    folder.mkdir()
    for file in tasks.glob("*.yaml"):
        (folder / file.name).write_text(file.read_text())
    damaged = yaml.safe_load((tasks / "colours.yaml").read_text()) | {"task": "damaged", "test_split": "nowhere"}
    (folder / "damaged.yaml").write_text(yaml.safe_dump(damaged))
    command = [sys.executable, "-m", "comingle", "evaluate", str(run), "--tasks", str(folder), "--quiet", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert message in done.stderr


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_without_lm_eval_the_extra_is_named(comingle: Any, run: Path, tasks: Path) -> None:
    said = comingle("evaluate", run, "--tasks", tasks)
    assert (said.code, said.err) == (2, "comingle: comingle evaluate needs lm_eval: pip install 'comingle[evaluate]'\n")


def test_the_table_has_a_row_for_each_task_metric_and_user() -> None:
    def score(accuracy: float) -> dict[str, Any]:
        results = {"colours": {"acc": accuracy, "acc_stderr": 0.1}, "group": {"acc": accuracy}}
        return {"results": results, "n-samples": {"colours": {"effective": 7}}}

    table = render_task_scores({"ann": score(0.5), "bob": score(0.25)})
    columns = [list(map(str, column.cells)) for column in table.columns]
    assert list(zip(*columns, strict=True)) == [
        ("colours", "acc", "ann", "0.5", "0.1", "7"),
        ("colours", "acc", "bob", "0.25", "0.1", "7"),
        ("group", "acc", "ann", "0.5", "", ""),
        ("group", "acc", "bob", "0.25", "", ""),
    ]
