"""kill -9 at any moment, then resume: the same numbers, bit for bit, as if nothing had happened."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from kill_driver import MOMENTS

from comingle.config import Recipe, load_recipe
from comingle.runs import api
from comingle.utils.errors import RunError
from comingle.utils.files import seal
from comingle.utils.records import read_metrics
from resuming import final, kill, moments_of, state, told

# Two of three users take part in each round; checkpoints every round, of which two are kept.
SETTINGS = {"training.participation": 0.6, "training.experts.clip_norm": 1.0, "training.weighting": "tokens"}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def recipe(stage: Path, write_recipe: Any) -> Path:
    path = write_recipe(stage)
    path.write_text(load_recipe(path).with_changes(SETTINGS).as_yaml())
    return path


@pytest.fixture(scope="module")
def whole(recipe: Path, stage: Path) -> Path:
    """The run that nothing interrupts."""
    api.run(recipe, out=stage / "whole")
    return stage / "whole"


@pytest.fixture(scope="module")
def killed(recipe: Path, stage: Path, request: pytest.FixtureRequest) -> Path:
    """One run folder for each moment at which a process was killed."""
    return kill(recipe, stage / "killed", *moments_of(request))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are killed after a fork")
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.slow
def test_a_killed_run_resumes_as_if_nothing_had_happened(recipe: Path, whole: Path, killed: Path, moment: str) -> None:
    folder = killed / moment
    assert not (folder / "metrics.json").exists()
    left = [path.name for path in (folder / "checkpoints").glob(".round-*")]
    assert bool(left) == (moment in {"half of the tensors written", "tensors written, no json", "written, not renamed"})

    api.run(recipe, out=folder, resume=True)
    assert final(folder) == final(whole)
    assert told(folder) == told(whole)
    assert [e["round"] for e in told(folder) if e["event"] == "round"] == [1, 2, 3, 4]
    expected, found = state(whole), state(folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert kept == ["round-0003", "round-0004"]
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == [".lock"]


def test_a_finished_run_resumes_to_itself(recipe: Path, whole: Path, stage: Path) -> None:
    folder = stage / "again"
    shutil.copytree(whole, folder)
    before = read_metrics(folder)["wall_seconds"]
    for _ in range(2):  # scored again, which is no further work on the run
        api.run(recipe, out=folder, resume=True)
        assert read_metrics(folder)["wall_seconds"] == before
    (folder / "metrics.json").unlink()
    api.run(recipe, out=folder, resume=True)
    assert final(folder) == final(whole)
    assert told(folder) == told(whole)


def test_resuming_may_use_the_machine_differently(recipe: Path, whole: Path, stage: Path) -> None:
    """Runtime, and when to evaluate and to save, are no part of what a run computes."""
    folder = stage / "other machine"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "checkpoints" / "round-0004")
    (folder / "metrics.json").unlink()
    changes = {"runtime.users_per_step": 1, "checkpoints.every": 4, "evaluation.every": 4}
    done = api.run(load_recipe(recipe).with_changes(changes), out=folder, resume=True)
    expected = final(whole)["mean_test_perplexity"]
    assert done.metrics["mean_test_perplexity"] == pytest.approx(expected, rel=1e-4)


# ---------------------------------------------------------------- what cannot be gone on with


@pytest.fixture
def stopped(whole: Path, tmp_path: Path) -> Path:
    """A run after three of four rounds."""
    folder = tmp_path / "stopped"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "checkpoints" / "round-0004")
    (folder / "metrics.json").unlink()
    shutil.copytree(folder / "checkpoints" / "round-0003", folder / "checkpoints" / "round-0002")
    return folder


def refused(recipe: Path | Recipe, folder: Path | None, **options: Any) -> str:
    with pytest.raises(RunError) as caught:
        api.run(recipe, out=folder, **{"resume": True, **options})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_truncated_checkpoint_is_named_and_can_be_left_out(recipe: Path, whole: Path, stopped: Path) -> None:
    newest = stopped / "checkpoints" / "round-0003"
    content = (newest / "state.safetensors").read_bytes()
    (newest / "state.safetensors").write_bytes(content[:-1])
    message = refused(recipe, stopped)
    assert "round-0002" in message
    assert f"`rm -r {newest}`" in message
    shutil.rmtree(newest)
    api.run(recipe, out=stopped, resume=True)  # round-0002 is a copy of round 3 here
    assert final(stopped) == final(whole)


def test_a_checkpoint_of_another_recipe_is_refused(recipe: Path, stopped: Path) -> None:
    path = stopped / "checkpoints" / "round-0003" / "checkpoint.json"
    path.write_text(path.read_text().replace('"fingerprint": "', '"fingerprint": "0'))
    seal(path.parent)
    assert "round-0003: belongs to another recipe (0" in refused(recipe, stopped)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"training.rounds": 5}, "training.rounds was 4 and is 5"),
        ({"method": "local"}, "method.name was 'comigs-1g1s' and is 'local'"),
        ({"method.router_every": 3}, "method.settings.router_every was 2 and is 3"),
        ({"evaluation.select": "best"}, "evaluation.select was 'last' and is 'best'"),
        ({"evaluation.model": "exchanged"}, "evaluation.model was 'local' and is 'exchanged'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_recipe_is_refused_with_what_differs(
    recipe: Path, stopped: Path, changes: dict[str, Any], said: str
) -> None:
    message = refused(load_recipe(recipe).with_changes(changes), stopped)
    assert f"{stopped}: belongs to another recipe, {said}; use another --out" == message


def test_there_must_be_something_to_resume(recipe: Path, tmp_path: Path) -> None:
    assert "nowhere: nothing to resume: no recipe.yaml" in refused(recipe, tmp_path / "nowhere")
    assert "resume: no run folder" in refused(recipe, None)


def test_an_unfinished_run_cannot_be_opened(stopped: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no metrics.json; `comingle run --resume .*`"):
        api.load(stopped)
    with pytest.raises(RunError, match="no such run folder"):
        api.load(tmp_path / "nowhere")
    (stopped / "metrics.json").write_text('{"mean_test')
    with pytest.raises(RunError, match=r"metrics.json: not JSON .*`comingle run --resume .*`"):
        api.load(stopped)
