"""Weights & Biases and MLflow get the numbers of a run; each test needs its package (extras ``wandb``, ``mlflow``)."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from comingle.config import load_recipe
from comingle.runs import api
from comingle.training.events import check_trackers, mlflow_name, scalars
from comingle.utils.errors import DivergenceError, RecipeError
from comingle.utils.records import read_events

# What the packages leave open, or warn of, is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")


def run(recipe_file: Path, folder: Path, tracker: str, **options: Any) -> list[dict[str, Any]]:
    changes = {"runtime.track": [tracker], "training.rounds": 2, "evaluation.every": 1}
    api.run(load_recipe(recipe_file).with_changes(changes), out=folder, **options)
    return list(read_events(folder))


def expected(events: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Each number of the event log by name: rounds and values."""
    found: dict[str, list[tuple[int, float]]] = {}
    for event in events:
        for name, value in scalars(event).items():
            found.setdefault(name, []).append((event["round"], value))
    assert found["train_loss_nats/ann"][0][0] == 1
    assert [number for number, _ in found["mean_test_perplexity"]] == [0, 1, 2]
    return found


def stop(event: dict[str, Any]) -> None:
    if event["event"] == "round":
        raise DivergenceError("stopped")


# ---------------------------------------------------------------- MLflow


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """MLflow with a store of its own."""
    mlflow = pytest.importorskip("mlflow", reason="NO MLFLOW TEST: pip install 'comingle[mlflow]'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    return mlflow.MlflowClient()


def test_mlflow_has_every_number_and_the_recipe(client: Any, recipe_file: Path, tmp_path: Path) -> None:
    events = run(recipe_file, tmp_path / "mine", "mlflow")
    experiment = client.get_experiment_by_name("comingle")
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("mine", "FINISHED")
    for name, values in expected(events).items():
        history = client.get_metric_history(found.info.run_id, mlflow_name(name))
        assert [(one.step, one.value) for one in history] == values
    assert [one.path for one in client.list_artifacts(found.info.run_id)] == ["recipe.yaml"]


def test_a_run_that_failed_is_one_that_failed(client: Any, recipe_file: Path, tmp_path: Path) -> None:
    with pytest.raises(DivergenceError):
        run(recipe_file, tmp_path / "mine", "mlflow", observers=[stop])
    (found,) = client.search_runs([client.get_experiment_by_name("comingle").experiment_id])
    assert found.info.status == "FAILED"


# ---------------------------------------------------------------- Weights & Biases


def test_wandb_has_every_number_and_the_recipe(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline it writes a folder."""
    pytest.importorskip("wandb", reason="NO W&B TEST: pip install 'comingle[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    events = run(recipe_file, tmp_path / "all" / "mine", "wandb")
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    found: dict[str, list[tuple[int, float]]] = {}
    about: dict[str, Any] = {}
    for record in records(file):
        if record.HasField("run"):
            config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            about = {"name": record.run.display_name, "group": record.run.run_group, "config": config}
        for item in record.history.item:
            name = item.key or "/".join(item.nested_key)
            if not name.startswith("_"):
                found.setdefault(name, []).append((record.history.step.num, json.loads(item.value_json)))
    assert (about["name"], about["group"]) == ("mine", "all")
    assert about["config"]["training"]["rounds"] == 2
    assert found == expected(events)


def records(file: Path) -> Iterator[Any]:
    """The records of a file of W&B, which is a log as LevelDB has it, behind seven bytes."""
    messages = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data, place, whole = file.read_bytes(), 7, b""
    while place < len(data):
        if (left := 32768 - place % 32768) < 7:  # no room for another header in this block
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield messages.Record.FromString(whole)
            whole = b""


# ---------------------------------------------------------------- without the packages


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_said_before_anything_is_read(
    name: str, recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(
        RecipeError, match=rf"^runtime\.track: {name} is not installed: pip install 'comingle\[{name}\]'$"
    ):
        run(recipe_file, tmp_path / "out", name)
    assert not (tmp_path / "out").exists()
    check_trackers([])


def test_another_tracker_is_refused(recipe_file: Path) -> None:
    with pytest.raises(RecipeError, match=r"runtime\.track"):
        load_recipe(recipe_file).with_changes({"runtime.track": ["neptune"]})


def test_where_a_run_is_told_of_does_not_change_what_it_is(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    assert recipe.with_changes({"runtime.track": ["mlflow"]}).fingerprint == recipe.fingerprint


def test_names_that_mlflow_does_not_take_stay_apart() -> None:
    assert mlflow_name("test_perplexity/ann-1.b c") == "test_perplexity/ann-1.b c"
    assert mlflow_name("x/b<b>ob") == "x/b_3c_b_3e_ob"
    assert mlflow_name("x/<") != mlflow_name("x/>")
