"""A method is made once for each run, and travels with the run's plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.federation.tiny import tiny

import comingle
from comingle import methods
from comingle.config import parse_recipe
from comingle.methods.base import Method
from comingle.methods.baselines import fedavg
from comingle.runs.session import prepare


@pytest.fixture
def made() -> list[Method]:
    """Every object of a registered method ``counted`` that is made."""
    every: list[Method] = []

    def counted() -> Method:
        every.append(fedavg())
        return every[-1]

    methods.register("counted", counted)
    return every


def test_a_run_makes_its_method_once(tmp_path: Path, made: list[Method]) -> None:
    done = comingle.run(tiny(tmp_path, "counted"), out=tmp_path / "run")
    federation = done.federation
    assert len(made) == 1
    assert all(part is made[0] for part in (federation.clients.plan.method, federation.server.method))
    comingle.run(tiny(tmp_path, "counted"), out=tmp_path / "run", resume=True)
    assert len(made) == 2


def test_so_do_a_run_on_data_that_was_read_before_and_a_run_that_is_opened(tmp_path: Path, made: list[Method]) -> None:
    recipe = parse_recipe(tiny(tmp_path, "counted"))
    run_data = prepare(recipe)
    made.clear()
    comingle.run(recipe, run_data=run_data, out=tmp_path / "run")
    assert len(made) == 1
    comingle.load(tmp_path / "run")
    assert len(made) == 2


def test_a_run_records_all_settings_of_its_method(tmp_path: Path) -> None:
    recipe = parse_recipe(tiny(tmp_path, "fedprox"))
    metrics = comingle.run(recipe, out=tmp_path / "run").metrics
    assert metrics["resolved_method_settings"] == methods.settings_of("fedprox")
    assert "method_settings" not in metrics
    changed = comingle.run(recipe.with_changes({"method.proximal": 0.5})).metrics
    assert changed["resolved_method_settings"] == methods.settings_of("fedprox") | {"proximal": 0.5}
    assert changed["method_settings"] == {"proximal": 0.5}
