"""Reports and tables of runs in Python: pages of ``comingle.report``, and tables in notebooks."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import comingle
from comingle.cli import main
from comingle.runs.comparison import Comparison
from comingle.runs.results import Run

HOSTILE = "b<script>alert(1)</script>&ob"


class Cells(HTMLParser):
    """The texts of cells and notes, and the tags of a fragment."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        if tag in ("td", "th", "p"):
            self.texts.append("")
        elif tag == "br":
            self.texts[-1] += "\n"

    def handle_data(self, data: str) -> None:
        self.texts[-1] += data


def parsed(fragment: str) -> Cells:
    found = Cells()
    found.feed(fragment)
    return found


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["comingle", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code


@pytest.fixture(scope="module")
def recipe() -> comingle.Recipe:
    return comingle.Recipe(
        base="random:llama?layers=1&dim=32",
        data={
            "users": {"ada": "demo:library", HOSTILE: "demo:reference"},
            "max_train_tokens": 2_000,
            "max_valid_tokens": 300,
            "max_test_tokens": 300,
        },
        method={"name": "comigs-1g1s", "router_every": 1, "router_steps": 1},
        training={"rounds": 1, "local_steps": 1, "batch_size": 2, "context": 32},
    )


@pytest.fixture(scope="module")
def run(recipe: comingle.Recipe, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return comingle.run(recipe, out=tmp_path_factory.mktemp("runs") / "toy")


@pytest.fixture(scope="module")
def compared(recipe: comingle.Recipe, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    out = tmp_path_factory.mktemp("compared")
    return comingle.compare(recipe, ["local", "fedavg"], seeds=[0, 1], out=out, against="fedavg")


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--no-tokens"], ["--text", "one two"], ["--users", "ada"]])
def test_the_page_is_that_of_the_command(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    given: dict[str, Any] = {
        "": {},
        "--no-tokens": {"token_view": False},
        "--text": {"text": "one two"},
        "--users": {"users": "ada"},
    }[options[0] if options else ""]
    page = comingle.report(run, out=tmp_path / "python.html", **given)
    assert page == tmp_path / "python.html"
    command(monkeypatch, "report", run.folder, "--out", tmp_path / "command.html", *options)
    assert page.read_bytes() == (tmp_path / "command.html").read_bytes()


@pytest.mark.slow
def test_runs_folders_and_comparisons_are_taken_together(compared: Comparison, tmp_path: Path) -> None:
    assert compared.folder is not None
    folder = next(compared.folder.glob("local-seed0"))
    page = comingle.report([compared, str(folder)], out=tmp_path / "page.html", token_view=False, against="fedavg")
    assert "fedavg" in page.read_text(encoding="utf-8")
    assert comingle.report(compared, token_view=False) == compared.folder / "report.html"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"tokens": 0}, "tokens: got 0"),
        ({"users": "nobody"}, "'nobody'"),
        ({"text": " "}, "text ' '"),
        ({"against": "fedavg"}, "'fedavg'"),
        ({"out": "missing/page.html"}, "missing"),
    ],
)
def test_mistakes_are_refused_in_one_line(run: Run, given: dict[str, Any], told: str) -> None:
    with pytest.raises(comingle.ComingleError, match=told) as caught:
        comingle.report(run, **given)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_file_is_replaced_only_by_force(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("mine", encoding="utf-8")
    with pytest.raises(comingle.ComingleError, match="force=True"):
        comingle.report(run, out=page, token_view=False)
    assert page.read_text(encoding="utf-8") == "mine"
    comingle.report(run, out=page, token_view=False, force=True)
    assert page.read_text(encoding="utf-8") != "mine"


def test_runs_without_a_folder_are_refused(recipe: comingle.Recipe) -> None:
    with pytest.raises(comingle.ComingleError, match="out=FOLDER"):
        comingle.report(comingle.run(recipe, method="local"))
    with pytest.raises(comingle.ComingleError, match="runs: got none"):
        comingle.report([])


@pytest.mark.slow
def test_a_comparison_in_a_notebook_shows_the_tables_of_show(
    compared: Comparison, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    capsys.readouterr()
    command(monkeypatch, "show", compared.folder)
    terminal = capsys.readouterr().out
    cells = parsed(compared._repr_html_() or "")
    assert {*cells.tags} <= {"div", "p", "table", "thead", "tbody", "tfoot", "tr", "th", "td", "br"}
    assert HOSTILE in cells.texts
    numbers = re.compile(r"\d[\d,.]*")
    assert sorted(numbers.findall(" ".join(cells.texts))) == sorted(numbers.findall(terminal))
    assert any("against fedavg" in one or "than fedavg" in one for one in cells.texts)


def test_an_empty_comparison_has_no_table() -> None:
    assert Comparison(folder=None, metrics={})._repr_html_() is None
