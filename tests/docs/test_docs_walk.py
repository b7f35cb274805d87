"""The way from ``comingle run`` to the first optimiser step is the one that docs/architecture.md describes."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import pytest
import yaml

import comingle
from comingle.cli import app
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
