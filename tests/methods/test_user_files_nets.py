"""A file of a user's own may register nets alone."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from comingle.methods import user_files
from comingle.models.nets import NETS
from comingle.utils.errors import PluginError

NET = """
from torch import nn
from comingle.models.nets import NETS

NETS.register("only-here", lambda shape, outputs: nn.Linear(shape[0], outputs))
"""


def test_a_file_that_registers_a_net_alone_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(user_files.FILES, "")
    (tmp_path / "net.py").write_text(NET)
    assert user_files.load_file(tmp_path / "net.py") == []
    assert "only-here" in NETS


def test_a_file_that_registers_nothing_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv(user_files.FILES, "")
    (tmp_path / "empty.py").write_text("answer = 42\n")
    with pytest.raises(PluginError, match=r"empty\.py: registers nothing"):
        user_files.load_file(tmp_path / "empty.py")


def test_a_run_folder_records_the_file_of_its_net(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(user_files.FILES, "")
    monkeypatch.setenv(user_files.REPORTED_CHANGES, "")
    path = tmp_path / "net.py"
    path.write_text(NET.replace("only-here", "recorded-here"))
    user_files.load_file(path)
    user_files.write_origin(tmp_path, "fedavg", "recorded-here")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    record = {"net": {"name": "recorded-here", "file": str(path), "sha256": digest}}
    assert json.loads((tmp_path / user_files.ORIGIN).read_text()) == record
    user_files.check_origin(tmp_path, "fedavg")
    assert not caplog.messages
    path.write_text(path.read_text() + "# changed\n")
    user_files.check_origin(tmp_path, "fedavg")
    (line,) = caplog.messages
    assert "net 'recorded-here'" in line
    assert digest[:8] in line
