"""Every kind of figure shows what was run, under the paper's names."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.quick import quick

from comingle.utils.errors import RunError
from comingle_papers.reproduce.plan import RunSelection, plan
from comingle_papers.reproduce.published import load_experiment
from comingle_papers.reproduce.runner import draw, layer_of, read_entries, run_cells

SHOWN = {
    "figure3": (["slimpajama-comigs-1g1s"], ["stackexchange, layer 0", "books, layer 0", "CoMiGS-1G1S"]),
    "figure4": (
        ["ag-news-comigs-1g1s", "ag-news-pfedmoe"],
        ["World: generalist", "Sci/Tech: generalist", "generalist (solid 1, blank 0)"],
    ),
    "figure5": (["multilingual"], ["de", "fr", "(2,8,8,2)", "(2,2,2,2)", "test perplexity"]),
    "figure8": (["slimpajama"], ["router_every 10", "router_every 60", "router_steps"]),
    "figure16": (
        ["slimpajama-comigs-1g1s-layer0"],
        ["text: code, model: code (in distribution)", "text: code, model: books", "CoMiGS-1G1S, layer 0"],
    ),
    "figure17": (
        ["ag-news-comigs-1g1s-layer0"],
        ["text: Sports, model: Sports (in distribution)", "text: Sports, model: World", "generalist", "specialist"],
    ),
    "figure9": (["multilingual", "slimpajama", "ag-news"], ["mean over users", "local", "comigs-2s"]),
}


@pytest.mark.parametrize("name", quick(SHOWN, "figure5"))
@pytest.mark.slow
def test_every_kind_of_figure_shows_what_was_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comingle_papers.reproduce.runner.MAX_PROMPT_TOKENS", 12)  # tokens, each of which is drawn
    methods = ["local", "comigs-2s"] if name == "figure9" else None
    found = plan(f"comigs/{name}", RunSelection(scale="smoke", methods=methods))
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
        assert all(text.count(f">{word}<") == 1 for word in words if ", layer" in word)  # first and last are one here


@pytest.mark.slow
def test_entries_are_the_runs_of_all_seeds(tmp_path: Path) -> None:
    wanted = RunSelection(scale="smoke", methods=["4-4-2-2"], seeds=[0, 1])
    found = plan("comigs/figure12", wanted)
    outcomes = {outcome.cell.folder: outcome for outcome in run_cells(found.cells, tmp_path)}
    (entry,) = read_entries(found, outcomes).values()
    assert (entry.label, [run.seed for run in entry.runs]) == ("(4,4,2,2)", [0, 1])


def test_a_figure_without_runs_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="comigs/figure4: no finished run"):
        draw(plan("comigs/figure4", RunSelection(scale="smoke")), {}, tmp_path)


def test_each_kind_of_text_has_a_prompt_of_its_own() -> None:
    study, _ = load_experiment("comigs/figure14")
    for data, prompts in study.prompts.items():
        assert list(prompts) == study.data[data].users
        assert all(len(text.split()) > 25 for text in prompts.values())
    for number, (where, data) in enumerate(
        [(w, d) for d in ("slimpajama", "ag-news") for w in ("first", "middle", "last")], start=14
    ):
        _, experiment = load_experiment(f"comigs/figure{number}")
        assert experiment.plot is not None
        assert (experiment.plot.tokens, experiment.column_names) == ([where], [data])


def test_of_twelve_layers_the_papers_are_shown() -> None:
    assert [layer_of(name, 12) for name in ("first", "middle", "last")] == [0, 5, 11]


def test_the_sweep_of_hetlora_has_the_papers_values() -> None:
    _, experiment = load_experiment("comigs/hetlora")
    assert [row.settings for row in experiment.rows.values()] == [
        {"regularisation": value, "gamma": 0.99} for value in (5e-2, 5e-3, 5e-4)
    ]


@pytest.mark.slow
def test_the_sweep_of_hetlora_is_drawn_over_decades(tmp_path: Path) -> None:
    found = plan("comigs/hetlora", RunSelection(scale="smoke", columns=["slimpajama-2442"]))
    outcomes = {outcome.cell.folder: outcome for outcome in run_cells(found.cells, tmp_path)}
    _, svg = draw(found, outcomes, tmp_path)
    text = svg.read_text(encoding="utf-8")
    assert all(f">{word}<" in text for word in ("gamma 0.99", "regularisation", "test perplexity"))
