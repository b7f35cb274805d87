"""Runs in notebooks: the HTML of runs on text, joined runs, and nets."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import comingle
from comingle.cli import main
from comingle.reports.tables import curve_svg
from comingle.runs.join import join
from comingle.runs.results import Run

HOSTILE = "b<script>alert(1)</script>&\"'ob"
SVG = "{http://www.w3.org/2000/svg}"


class Fragment(HTMLParser):
    """Tags, attributes and the text of each table cell and note."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.cells: list[str] = []
        self._open = False
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        if tag in ("td", "th", "p"):
            self.cells.append("")
            self._open = True
        elif tag == "br":
            self.cells[-1] += "\n"

    def handle_endtag(self, tag: str) -> None:
        self._open = self._open and tag not in ("td", "th", "p")

    def handle_data(self, data: str) -> None:
        if self._open:
            self.cells[-1] += data


def parsed(html: str) -> tuple[Fragment, ElementTree.Element]:
    """Parse the fragment, and its SVG as XML."""
    fragment = Fragment(html)
    assert "script" not in fragment.tags
    assert not any(name.startswith("on") or name in ("src", "href") for name in fragment.attributes)
    return fragment, ElementTree.fromstring(html[html.index("<svg") :])


def curves(svg: ElementTree.Element) -> dict[str, list[tuple[float, float]]]:
    """Return the points of each named line."""
    found: dict[str, list[tuple[float, float]]] = {}
    for group in svg.iter(f"{SVG}g"):
        points = found.setdefault(group.findtext(f"{SVG}title") or "", [])
        for line in group.iter(f"{SVG}polyline"):
            points += [(float(x), float(y)) for x, y in (pair.split(",") for pair in line.attrib["points"].split())]
        points += [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in group.iter(f"{SVG}circle")]
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    recipe = comingle.Recipe(
        base="random:llama?layers=1&dim=32",
        data={
            "users": {"ada": "demo:library", HOSTILE: "demo:reference"},
            "max_train_tokens": 2_000,
            "max_valid_tokens": 300,
            "max_test_tokens": 300,
        },
        method="fedavg",
        training={"rounds": 3, "local_steps": 1, "batch_size": 2, "context": 32},
        evaluation={"every": 1},
    )
    return comingle.run(recipe, out=tmp_path_factory.mktemp("runs") / "toy")


def check(run: Run) -> Fragment:
    """Check that the HTML names every user with its result, and that the curve has every evaluation."""
    fragment, svg = parsed(run._repr_html_())
    evaluations = [event for event in run.events if event["event"] == "evaluation"]
    lines = curves(svg)
    assert list(lines) == [*run.users, "mean"]
    assert {len(points) for points in lines.values()} == {len(evaluations)}
    assert all(0 <= x <= 480 and 0 <= y <= 200 for points in lines.values() for x, y in points)
    assert {*run.users} <= {*fragment.cells}
    return fragment


@pytest.mark.slow
def test_the_html_of_a_run_has_the_table_of_show_and_the_curve(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["comingle", "show", str(run.folder)])
    with pytest.raises(SystemExit):
        main()
    terminal = capsys.readouterr().out.partition("by round")[0].rpartition("\n")[0]
    numbers = re.compile(r"\d[\d,.]*")
    assert sorted(numbers.findall(" ".join(check(run).cells))) == sorted(numbers.findall(terminal))


def test_lower_perplexities_are_lower_in_the_curve(run: Run) -> None:
    _, svg = parsed(run._repr_html_())
    for name, points in curves(svg).items():
        events = [event for event in run.events if event["event"] == "evaluation"]
        values = [
            event["mean_test_perplexity"] if name == "mean" else event["users"][name]["test_perplexity"]
            for event in events
        ]
        order = sorted(range(len(values)), key=values.__getitem__)
        heights = [points[i][1] for i in order]
        assert heights == sorted(heights, reverse=True)


def test_a_run_whose_events_are_gone_shows_its_table(run: Run, tmp_path: Path) -> None:
    html = Run(
        folder=tmp_path / "gone", recipe=run.recipe, metrics=run.metrics, federation=run.federation
    )._repr_html_()
    assert "<svg" not in html
    assert HOSTILE in Fragment(html).cells


def test_a_joined_run_and_its_comparison_have_html(run: Run, tmp_path: Path) -> None:
    text = "A bird sat in the old tree and sang of the river, the hill and the rain.\n" * 60
    joined = join(run, name=HOSTILE[::-1], data=[text], out=tmp_path / "eve")
    check(joined.run)
    fragment, _ = parsed(joined._repr_html_())
    assert {"pretrained", "local", "shared", "joined"} <= {*fragment.cells}


def images(seed: int) -> Any:
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.rand(30, 1, 6, 6, generator=draw), torch.arange(30) % 3
    x[torch.arange(30), 0, 2 * y] += 1
    return x, y


def test_nets_of_floral_have_html() -> None:
    sgd = {"name": "sgd", "learning_rate": 0.1, "schedule": "constant", "weight_decay": 0}
    recipe = {
        "training": {"rounds": 2, "batch_size": 8, "experts": sgd, "router": sgd},
        "evaluation": {"model": "exchanged"},
        "runtime": {"device": "cpu", "dtype": "float64"},
    }
    users = {"ann": images(0), HOSTILE: images(1)}
    done = comingle.run(recipe, users=users, base="net:mlp", method={"name": "floral", "clusters": 2})
    fragment = check(done)
    assert "test samples" in fragment.cells


def evaluation(number: int, users: dict[str, float | None], measure: str = "perplexity") -> dict[str, Any]:
    known = [value for value in users.values() if value is not None]
    return {
        "event": "evaluation",
        "round": number,
        "users": {name: {f"test_{measure}": value} for name, value in users.items()},
        f"mean_test_{measure}": sum(known) / len(known) if len(known) == len(users) else None,
    }


def test_values_that_are_not_finite_interrupt_the_line() -> None:
    events = [evaluation(i, {"ann": None if i == 2 else 9.0 - i, "bob": 5.0}) for i in range(5)]
    lines = curves(ElementTree.fromstring(curve_svg(events)))
    assert {name: len(points) for name, points in lines.items()} == {"ann": 4, "bob": 5, "mean": 4}


def test_many_users_have_no_line_each() -> None:
    events = [evaluation(i, {f"user-{j}": 3.0 + i for j in range(30)}) for i in range(2)]
    assert list(curves(ElementTree.fromstring(curve_svg(events)))) == ["mean"]


@pytest.mark.parametrize(
    "events", [[], [{"event": "start"}], [evaluation(0, {"ann": None})]], ids=["none", "unevaluated", "not-finite"]
)
def test_without_a_finite_mean_there_is_no_curve(events: list[dict[str, Any]]) -> None:
    assert curve_svg(events) == ""


def test_one_evaluation_and_losses_of_zero_are_points() -> None:
    lines = curves(ElementTree.fromstring(curve_svg([evaluation(0, {"ann": 0.0}, "loss")])))
    assert {name: len(points) for name, points in lines.items()} == {"ann": 1, "mean": 1}
