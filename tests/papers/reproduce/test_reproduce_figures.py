"""Every kind of figure shows what was run, under the paper's names."""

from __future__ import annotations

from pathlib import Path

import pytest

from comingle.errors import RunError
from comingle.papers.reproduce.figures import draw, read_entries
from comingle.papers.reproduce.plan import Wanted, plan
from comingle.papers.reproduce.runner import run_cells

SHOWN = {
    "figure4": (
        ["ag-news-comigs-1g1s", "ag-news-pfedmoe"],
        ["World: generalist", "Sci/Tech: generalist", "generalist (solid 1, blank 0)"],
    ),
    "figure5": (["multilingual"], ["de", "fr", "(2,8,8,2)", "(2,2,2,2)", "test perplexity"]),
    "figure8": (["slimpajama"], ["router_every 10", "router_every 60", "router_steps"]),
    "figure9": (["multilingual", "slimpajama", "ag-news"], ["mean over users", "local", "comigs-2s"]),
}


@pytest.mark.parametrize(
    "name", ["figure5", *[pytest.param(name, marks=pytest.mark.slow) for name in SHOWN if name != "figure5"]]
)
def test_every_kind_of_figure_shows_what_was_run(name: str, tmp_path: Path) -> None:
    methods = ["local", "comigs-2s"] if name == "figure9" else None
    found = plan(f"comigs/{name}", Wanted(scale="smoke", methods=methods))
    outcomes = {outcome.cell.folder: outcome for outcome in run_cells(found.cells, tmp_path)}
    entries = read_entries(found, outcomes)
    assert entries.keys() == {(cell.row, cell.column) for cell in found.cells}
    ends, words = SHOWN[name]
    paths = draw(found, outcomes, tmp_path)
    assert [path.name for path in paths] == [f"{name}-{end}.{kind}" for end in ends for kind in ("png", "svg")]
    for png, svg in zip(paths[::2], paths[1::2], strict=True):
        assert png.read_bytes().startswith(b"\x89PNG")
        text = svg.read_text(encoding="utf-8")
        assert [word for word in words if f">{word}<" not in text] == []
        assert ">pcl<" not in text


def test_entries_are_the_runs_of_all_seeds(tmp_path: Path) -> None:
    wanted = Wanted(scale="smoke", methods=["4-4-2-2"], seeds=[0, 1])
    found = plan("comigs/figure12", wanted)
    outcomes = {outcome.cell.folder: outcome for outcome in run_cells(found.cells, tmp_path)}
    (entry,) = read_entries(found, outcomes).values()
    assert (entry.label, [run.seed for run in entry.runs]) == ("(4,4,2,2)", [0, 1])


def test_a_figure_without_runs_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="comigs/figure4: no finished run has what this figure shows"):
        draw(plan("comigs/figure4", Wanted(scale="smoke")), {}, tmp_path)
