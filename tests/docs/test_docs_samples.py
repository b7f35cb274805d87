"""The Python examples of the page on samples run one after the other."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from documents import DOCS, blocks, read
from PIL import Image

import comingle
from comingle.models.nets import NETS


def test_the_examples_run_as_they_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = read(DOCS / "samples.md")
    for user, name, number in product(("ada", "bob"), ("cat", "dog"), range(10)):
        path = tmp_path / "photos" / user / name / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (20, 20), 20 * number + (name == "dog")).save(path)
    Image.new("L", (20, 20), 7).save(tmp_path / "new.png")
    photos, floral = blocks(page, "yaml")
    for recipe, text in (("photos", photos), ("floral", floral)):
        (tmp_path / f"{recipe}.yaml").write_text(text)
        comingle.run(tmp_path / f"{recipe}.yaml", out=tmp_path / "runs" / recipe, **{"training.rounds": 1})
    names: dict[str, Any] = {}
    found = blocks(page, "python")
    assert len(found) == 5
    for code in found:
        exec(code, names)
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] in ("cat", "dog")
    assert "tensor([" in printed
    assert names["run"].federation.clients.model.loss.name == "smoothed"
    assert "mine" in NETS
