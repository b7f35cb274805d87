"""Runs and uploads go the ways that docs/architecture.md describes."""

from __future__ import annotations

import os
import re
import traceback
from pathlib import Path

import pytest
import yaml
from tests.federation.tiny import tiny

import comingle
from comingle.cli import app
from comingle.config import parse_recipe
from comingle.training import cohort_state

PACKAGE = Path(comingle.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


class ArrivedError(BaseException):
    """Stops a run at its first optimiser step; no handler of the library catches it."""


def test_a_run_goes_the_documented_way(recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    way: list[str] = []

    def arrive(*_: object, **__: object) -> None:
        way.extend(
            f"{Path(frame.filename).relative_to(PACKAGE)}: {frame.name}"
            for frame in traceback.extract_stack()
            if frame.filename.startswith(str(PACKAGE))
        )
        raise ArrivedError

    content = yaml.safe_load(recipe_file.read_text())
    recipe_file.write_text(yaml.safe_dump({**content, "evaluation": {"first": False}}))
    monkeypatch.setattr(cohort_state, "update", arrive)
    with pytest.raises(ArrivedError):
        app(["run", str(recipe_file), "--out", str(tmp_path / "run")], standalone_mode=False)
    section = PAGE.read_text().partition("## From `comingle run`")[2].partition("\n## ")[0]
    documented = re.findall(r"^\| `(\S+: \w+)`", section, re.M)
    assert [step for step in way if step in documented] == documented
    assert documented[-1] == way[-1]
    assert {step.partition(":")[0] for step in way} == {step.partition(":")[0] for step in documented}
    assert len({step.partition(":")[0] for step in way}) <= 25


@pytest.mark.slow
def test_an_upload_goes_the_documented_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr")
    from comingle.federation.launch import federate

    trace = tmp_path / "trace"
    trace.mkdir()
    paths = [str(Path(__file__).parent / "tracing"), str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv("UPLOAD_TRACE", str(trace))
    recipe = tiny(tmp_path, "fedavg", users=1)
    federate(parse_recipe(recipe), tmp_path / "run")
    lines = sorted(line.split(" ", 1) for file in trace.iterdir() for line in file.read_text().splitlines())
    steps = [step for _, step in lines]
    way = steps[: steps.index("training/server.py: aggregate") + 1]
    way = way[-1 - way[::-1].index("training/client.py: upload") :]

    section = PAGE.read_text().partition("## From a client's upload")[2].partition("\n## ")[0]
    documented = re.findall(r"^\| \w+ \| `(\S+: \w+)`", section, re.M)
    remaining = iter(way)
    assert [step for step in documented if step not in remaining] == []  # each one comes after the one before
    files = {step.partition(":")[0] for step in documented}
    assert {step.partition(":")[0] for step in way} == files
    assert len(files) <= 15
