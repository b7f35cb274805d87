"""Every user of every run as rows."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from comingle.reports.page import csv_text, sheet_of, user_records
from comingle.utils.errors import RunError


def finished(folder: Path, method: str, seed: int, users: dict[str, dict[str, Any]]) -> Path:
    folder.mkdir()
    metrics = {"method": method, "seed": seed, "base": "tiny", "rounds": 2, "users": users}
    (folder / "metrics.json").write_text(json.dumps(metrics))
    return folder


def test_a_row_for_each_user_of_each_finished_run(tmp_path: Path) -> None:
    one = finished(tmp_path / "local-seed0", "local", 0, {"ann": {"test_perplexity": 3.5}, "b,ob": {"test_loss": None}})
    two = finished(tmp_path / "fedavg-seed1", "fedavg", 1, {"ann": {"test_perplexity": 4.0, "test_loss": 1.25}})
    (tmp_path / "begun").mkdir()
    records = user_records([one, tmp_path / "begun", two])
    rows = list(csv.DictReader(csv_text(sheet_of(records)).splitlines()))
    about = {"base": "tiny", "rounds": "2"}
    first = {"run": "local-seed0", "method": "local", "seed": "0", **about}
    assert rows == [
        {**first, "user": "ann", "test_perplexity": "3.5", "test_loss": ""},
        {**first, "user": "b,ob", "test_perplexity": "", "test_loss": ""},
        {"run": "fedavg-seed1", "method": "fedavg", "seed": "1", **about, "user": "ann", "test_perplexity": "4.0",
         "test_loss": "1.25"},
    ]  # fmt: skip


def test_runs_that_have_not_finished_are_refused(tmp_path: Path) -> None:
    (tmp_path / "begun").mkdir()
    with pytest.raises(RunError, match=r"no metrics\.json"):
        user_records([tmp_path / "begun"])
