"""The Python examples of the page on samples run one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from documents import DOCS, blocks, read

from comingle.models.nets import NETS


def test_the_examples_run_as_they_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    found = blocks(read(DOCS / "samples.md"), "python")
    assert len(found) == 3
    for code in found:
        exec(code, names)
    assert "tensor([" in capsys.readouterr().out
    assert names["run"].federation.clients.model.loss.name == "smoothed"
    assert "mine" in NETS
    assert list(tmp_path.iterdir()) == []
