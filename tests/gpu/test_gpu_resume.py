"""A run goes on where it was, on whatever device; and what it leaves is of use on any."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from cases import method, net_recipe, question_recipe, text_recipe
from on_device import recipe_of

import comingle
from comingle.runs import api

KINDS = ("text", "net", "questions")


def content_of(kind: str, folder: Path) -> dict[str, Any]:
    own = method("floral" if kind == "net" else "comigs-1g1s")
    if kind == "net":
        return net_recipe(own)
    return (text_recipe if kind == "text" else question_recipe)(folder, own)


def scores(metrics: dict[str, Any]) -> list[float]:
    """Everybody's, by whatever is measured."""
    of_users = metrics["users"].values()
    return [v for user in of_users for key, v in user.items() if key.startswith("test_") and "tokens" not in key]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("there", [True, False], ids=["to the CPU", "from the CPU"])
def test_a_run_goes_on_on_another_device(tmp_path: Path, device: str, rounding: float, kind: str, there: bool) -> None:
    first, second = (device, "cpu") if there else ("cpu", device)
    content, more = content_of(kind, tmp_path), {"training.rounds": 3}
    whole = api.run(recipe_of(content, "cpu", **more), out=tmp_path / "whole").metrics
    api.run(recipe_of(content, first, **more), out=tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "round-0003")
    done = api.run(recipe_of(content, second, **more), out=tmp_path / "run", resume=True)
    assert done.federation.clients.state.rows.device.type == second
    assert scores(done.metrics) == pytest.approx(scores(whole), rel=rounding)


def test_a_personal_model_generates_routes_and_leaves(tmp_path: Path, device: str) -> None:
    content = text_recipe(tmp_path, method("comigs-1g1s"))
    done = api.run(recipe_of(content, device), out=tmp_path / "run")
    said = [run.user("ann").generate("some words", max_new_tokens=5) for run in (done, comingle.load(tmp_path / "run"))]
    assert said[0] == said[1]
    routing = done.user("ann").route("some words")
    assert routing.gates.device.type == "cpu"
    done.user("ann").export(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()
