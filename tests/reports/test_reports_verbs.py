"""``comingle report`` and ``comingle plot`` from a recipe to files, through the real command line."""

from __future__ import annotations

import csv
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

from comingle.cli import main
from comingle.cli.compare import compare_methods
from comingle.config import load_recipe


@pytest.fixture(scope="module")
def compared(write_recipe: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods, two seeds, and one more user than has a specialist."""
    folder = tmp_path_factory.mktemp("report")
    changes = {"method": {"name": "comigs-1gxs", "specialists": [1, 2, 0], "router_every": 2, "router_steps": 1}}
    recipe = load_recipe(write_recipe(folder)).with_changes({**changes, "training.rounds": 2})
    compare_methods(recipe, ["local", "comigs-1gxs"], [0, 1], folder / "runs", resume=False, force=False)
    return folder / "runs"


@pytest.fixture
def comingle(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["comingle", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out + captured.err

    return run


def views(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="token-data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found[1]) if found else None


@pytest.mark.slow
def test_a_page_is_written_once_and_holds_the_users_text(comingle: Any, compared: Path) -> None:
    code, said = comingle("report", compared, "--tokens", 9)
    assert code == 0, said
    path = compared / "report.html"
    assert str(path) in said
    assert "--no-tokens" in said
    (view,) = views(path.read_text(encoding="utf-8"))
    assert view["label"] == "comigs-1gxs, seed 0"
    assert [(t["name"], t["owner"], len(t["tokens"])) for t in view["texts"]] == [
        (n, n, 9) for n in ("ann", "bob", "cem")
    ]
    assert [user["experts"] for user in view["users"]] == [
        ["generalist", "specialist"], ["generalist", "specialist 1", "specialist 2"], ["generalist"]
    ]  # fmt: skip
    before = path.read_bytes()
    code, said = comingle("report", compared)
    assert (code, path.read_bytes()) == (2, before)
    assert f"{path}: exists; --force replaces it, --out names another" in said
    assert comingle("report", compared, "--force", "--no-tokens")[0] == 0
    assert views(path.read_text(encoding="utf-8")) is None


@pytest.mark.slow
def test_given_texts_take_the_place_of_the_users(comingle: Any, compared: Path, tmp_path: Path) -> None:
    (tmp_path / "poem.txt").write_text("roses are", encoding="utf-8")
    out = tmp_path / "page.html"
    words = ["--text", tmp_path / "poem.txt", "--text", "</script>", "--users", "cem,ann"]
    code, said = comingle("report", compared / "comigs-1gxs-seed1", "--out", out, *words)
    assert code == 0, said
    (view,) = views(out.read_text(encoding="utf-8"))
    assert ["".join(t["tokens"]) for t in view["texts"]] == ["roses are", "</script>"]
    assert [t["name"] for t in view["texts"]] == ["poem.txt", "text 2"]
    assert [u["name"] for u in view["users"]] == ["cem", "ann"]


@pytest.mark.slow
def test_plots_are_png_and_svg(comingle: Any, compared: Path, tmp_path: Path) -> None:
    code, said = comingle("plot", compared, "--out", tmp_path / "all")
    assert code == 0, said
    names = ["bytes", "curves", "curves-late", "scores-comigs-1gxs", "users-against-local"]
    written = {path.name for path in (tmp_path / "all").iterdir()}
    assert written == {f"{name}.{kind}" for name in names for kind in ("png", "svg", "csv")}
    rows = list(csv.DictReader((tmp_path / "all" / "curves.csv").open(encoding="utf-8")))
    assert {row["method"] for row in rows} == {"local", "comigs-1gxs"}
    metrics = [json.loads((compared / f"local-seed{s}" / "metrics.json").read_text()) for s in (0, 1)]
    end = [row for row in rows if (row["of"], row["method"]) == ("bob", "local")][-1]
    values = [one["users"]["bob"]["test_perplexity"] for one in metrics]
    assert float(end["mean_over_seeds"]) == pytest.approx(statistics.mean(values))
    assert float(end["std_over_seeds"]) == pytest.approx(statistics.stdev(values))
    words = ["--figure", "tokens", "--layer", 1, "--tokens", 6, "--text", "abc def", "--out", tmp_path / "tokens"]
    code, said = comingle("plot", compared, *words)
    assert code == 0, said
    assert (tmp_path / "tokens" / "tokens-comigs-1gxs-seed-0-layer1.svg").is_file()
    rows = list(csv.DictReader((tmp_path / "tokens" / "tokens-comigs-1gxs-seed-0-layer1.csv").open(encoding="utf-8")))
    assert [r["token"] for r in rows if (r["model"], r["expert"]) == ("bob", "specialist 2")] == list("abc de")
    of_bob = [float(r["probability"]) for r in rows if r["model"] == "bob" and r["token_number"] == "0"]
    assert (len(of_bob), sum(of_bob)) == (3, pytest.approx(1, abs=1e-3))
    code, said = comingle("plot", compared, "--out", tmp_path / "all", "--figure", "curves")
    assert code == 2
    assert "curves.png: exists; --force" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["report", "nowhere"], "nowhere: no such run folder"),
        (["report", "RUNS", "--users", "anne"], "no user 'anne'"),
        (["report", "RUNS", "--text", " "], "text ' ': "),
        (["report", "RUNS", "--out", "nowhere/page.html"], "nowhere: no such folder"),
        (["report", "RUNS", "--out", "."], ".: is a folder"),
        (["plot", "RUNS", "--figure", "curve"], "--figure 'curve': allowed: curves, scores"),
        (["plot", "RUNS", "--figure", "tokens", "--layer", "2"], "--layer 2: comigs-1gxs, seed 0 has layers 0 to 1"),
        (["plot", "RUNS/local-seed0", "--figure", "scores"], "nothing to draw for scores: no "),
    ],
    ids=lambda value: " ".join(value[:4]) if isinstance(value, list) else "",
)
def test_mistakes_are_one_line(
    comingle: Any, compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    out = [] if "--out" in words else ["--out", "new"]
    code, told = comingle(*[word.replace("RUNS", str(compared)) for word in words], *out)
    assert code == 2
    assert said in told
    assert told.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
