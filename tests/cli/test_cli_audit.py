"""``comingle audit``, through the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from comingle.runs import api


@pytest.mark.slow
def test_a_page_is_told_and_written_once(comingle: Any, run: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    said = comingle("audit", run, "--trials", 1, "--rounds", 1, "--out", tmp_path / "page")
    assert said.code == 0, said.err
    total = 1 + 8 + 2  # with canaries, for reference, and for tokens of one upload
    assert f"{total} short runs of 1 round, about " in "\n".join(said.progress)
    for number, what in (
        (1, "canaries"),
        (2, "reference models"),
        (9, "reference models"),
        (11, "tokens of one upload"),
    ):
        assert any(f"run {number} of {total} · {what}" in line for line in said.progress)
    written = json.loads((tmp_path / "page" / "audit.json").read_text())
    assert [proof["view"] for proof in written["proofs"]] == ["server", "users"]
    assert {one["user"] for one in written["members"]} == {"ann", "bob", "cem"}
    assert (written["trials"], written["rounds"], written["delta"]) == (1, 1, 1e-5)
    markdown = (tmp_path / "page" / "audit.md").read_text()
    assert "1 run of 1 round of their own" in markdown
    for sentence in written["verdict"]:
        assert sentence in said.out
        assert sentence in markdown
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    again = comingle("audit", run, "--trials", 1, "--out", tmp_path / "page")
    assert (again.code, again.err.count("\n")) == (2, 1)
    assert "--force" in again.err


@pytest.mark.parametrize("shadows", [1, 2])
def test_too_few_reference_models_are_refused_at_once(comingle: Any, tmp_path: Path, shadows: int) -> None:
    said = comingle("audit", tmp_path / "none", "--shadows", shadows)
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert said.err.startswith(f"comingle: --shadows: got {shadows}; allowed: 0, or a whole number from 3")


def test_runs_that_cannot_be_audited_are_one_line(comingle: Any, run: Path, recipe: Path, tmp_path: Path) -> None:
    short: dict[str, Any] = {"training.rounds": 1}
    alone, unfinished = tmp_path / "alone", tmp_path / "unfinished"
    api.run(recipe, method="local", out=alone, **short)
    api.run(recipe, out=unfinished, **short)
    (unfinished / "metrics.json").unlink()
    for folder, what in (
        (tmp_path / "none", "none"),
        (unfinished, "unfinished"),
        (alone, "local shares"),
    ):
        said = comingle("audit", folder)
        assert (said.code, said.err.count("\n")) == (2, 1), said.err
        assert what in said.err
        assert not (folder / "audit.json").exists()
    file = tmp_path / "file"
    file.write_text("")
    said = comingle("audit", run, "--out", file)
    assert (said.code, said.err.count("\n")) == (2, 1)
