"""Questions that are read one language after another are those that are read all at once."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from comingle.config import Recipe, parse_recipe
from comingle.data.population_files import write_users
from comingle.data.populations import LazyPopulation
from comingle.data.samples.samples import SPLITS
from comingle.models.loading import load_base
from comingle.runs import api
from comingle.runs.session import prepare
from comingle.training.kinds.base import DataRequest, kind_of
from comingle.utils.errors import ComingleError
from comingle_papers.questions import LABELS, QUESTIONS

LANGUAGES = QUESTIONS["xnli"].languages


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is read goes with the test."""
    monkeypatch.setenv("COMINGLE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_xnli(path: Path, languages: tuple[str, ...], count: int, length: int = 3) -> Path:
    """Mixed rows; the last language lacks the first question, and has them in another order."""
    rows = [
        {"id": i, "lang": who, "premise": f"{who} {i}", "hypothesis": f"{i} " * (i % length), "label": LABELS[i % 3]}
        for i in range(count)
        for who in languages
        if (i, who) != (0, languages[-1])
    ]
    rows.sort(key=lambda row: -row["id"] if row["lang"] == languages[-1] else 0)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def recipe_of(questions: Mapping[str, Any], store: str, **training: Any) -> Recipe:
    return parse_recipe(
        {
            "base": "random:llama",
            "method": "fedavg",
            "adapters": {"rank": 2},
            "data": {"kind": "questions", "questions": dict(questions)},
            "training": {"rounds": 2, "batch_size": 2, "context": 300, **training},
            "runtime": {"device": "cpu", "dtype": "float32", "compile": False, "store": store},
        }
    )


def contents(part: Any) -> list[Any]:
    return [one.tolist() if hasattr(one, "tolist") else one for one in part.contents]


@pytest.mark.parametrize("more", [{}, {"valid": 2, "train_on_prompts": True, "languages": ["de", "fr", "ar"]}])
def test_languages_in_turn_are_those_that_are_read_at_once(tmp_path: Path, more: dict[str, Any]) -> None:
    path = write_xnli(tmp_path / "xnli.jsonl", LANGUAGES, 16, 30)
    questions = {"name": "xnli", "path": str(path), "train": 5, "test": 3, **more}
    # Of 15 questions that all have 6 are too long.
    memory, disk = (prepare(recipe_of(questions, store, context=190)).users for store in ("memory", "disk"))
    assert isinstance(disk, LazyPopulation)
    assert list(disk.names) == [user.name for user in memory] == more.get("languages", list(LANGUAGES))
    for one, other in zip(memory, disk, strict=True):
        for split in SPLITS:
            assert contents(getattr(one, split)) == contents(getattr(other, split))


def test_a_run_with_languages_in_turn_is_that_in_memory(tmp_path: Path) -> None:
    path = write_xnli(tmp_path / "xnli.jsonl", LANGUAGES[:3], 9)
    questions = {"name": "xnli", "path": str(path), "train": 4, "test": 2, "languages": list(LANGUAGES[:3])}
    found = []
    for store in ("memory", "disk"):
        metrics = dict(api.run(recipe_of(questions, store)).metrics)
        found.append({key: metrics[key] for key in ("users", "mean", "measure") if key in metrics})
    assert found[0] == found[1]
    assert "users" in found[0]


def test_what_is_wrong_with_questions_is_said_in_the_same_words(tmp_path: Path) -> None:
    path = write_xnli(tmp_path / "xnli.jsonl", LANGUAGES[:2], 4)
    twice = tmp_path / "twice.jsonl"
    twice.write_text(path.read_text() * 2)
    few = {"name": "xnli", "path": str(path), "train": 2, "test": 1, "languages": list(LANGUAGES[:2])}
    for questions in (few | {"test": 9}, few | {"path": str(twice)}, few | {"languages": ["zh"]}, few | {"path": "x"}):
        told = []
        for store in ("memory", "disk"):
            with pytest.raises(ComingleError) as caught:
                prepare(recipe_of(questions, store))
            told.append(str(caught.value))
        assert told[0] == told[1]
    for store in ("memory", "disk"):
        recipe = recipe_of(few, store).with_changes({"method": "comigs-1g1s"})
        with pytest.raises(ComingleError, match=r"^user 'ar': valid .*0 questions"):
            api.run(recipe)


def test_one_language_is_in_memory_at_a_time(tmp_path: Path) -> None:
    """A language's questions are 60,000 bytes of text, and more as tokens."""

    def peak(languages: tuple[str, ...]) -> int:
        path = write_xnli(tmp_path / "xnli.jsonl", languages, 60, 500)
        recipe = recipe_of({"name": "xnli", "path": str(path), "languages": [*languages], "train": 9}, "disk")
        recipe = recipe.with_changes({"training.context": 2000, "data.questions.test": 5})
        base = load_base(recipe.base)
        reader = kind_of(recipe).reader(DataRequest(recipe=recipe, load_base=lambda: base, validates=False))
        assert reader is not None
        folder = tmp_path / str(len(languages))
        folder.mkdir()
        tracemalloc.start()
        write_users(reader, folder)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    few, many = peak(LANGUAGES[:3]), peak(LANGUAGES[:12])
    assert (many - few) / 9 < 12_000
