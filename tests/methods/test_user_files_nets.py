"""A file of a user's own may register nets alone."""

from __future__ import annotations

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
