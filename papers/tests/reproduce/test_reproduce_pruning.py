"""FedMerge's inner products over other keys, and frozen random weights, as tables that can be run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from comingle.methods import make
from comingle.methods.fedmerge import Merge
from comingle_papers.reproduce.plan import RunSelection, plan
from comingle_papers.reproduce.published import load_experiment
from comingle_papers.reproduce.runner import run_cells, scores


def server_of(name: str, row: str) -> Merge:
    one = load_experiment(name)[1].rows[row]
    return cast(Merge, make(one.method, **one.settings).server)


def test_each_row_prunes_otherwise() -> None:
    rows = load_experiment("fedmerge/pruning")[1].rows
    found = {row: (server_of("fedmerge/pruning", row).keys, server_of("fedmerge/pruning", row).share) for row in rows}
    assert found == {
        "head": ("head", 1.0),
        "body": ("body", 1.0),
        "first": ("first", 1.0),
        "trained": ("trained", 1.0),
        "largest": ("trained", 0.01),
    }


def test_table_4_has_both_of_its_fixed_weights() -> None:
    assert [server_of("fedmerge/table4", row).random for row in ("fixed-5", "fixed-5-random")] == [False, True]
    assert server_of("fedmerge/table4", "fixed-5-random").chosen == 5


@pytest.mark.slow
def test_every_row_runs_on_images(tmp_path: Path, shared_data: Path) -> None:
    settings: dict[str, Any] = {"scale": "smoke", "data": shared_data, "columns": ["cluster-mnist"]}
    found = plan("fedmerge/pruning", RunSelection(**settings))
    random = plan("fedmerge/table4", RunSelection(**settings, methods=["fixed-5-random"]))
    cells = (*found.cells, *random.cells)
    outcomes = {outcome.cell.folder: outcome for outcome in run_cells(cells, tmp_path)}
    assert len(outcomes) == 6
    measured = scores(outcomes, cells, found.experiment.metric)
    assert all(0 <= values[0] <= 100 for values in measured.values())
    assert len(measured) == 6
