"""A type checker finds nothing wrong with the programs that the first pages and the examples show."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from documents import DOCS, README, REPOSITORY, blocks

SETTINGS = {"pythonVersion": "3.11", "typeCheckingMode": "standard", "reportMissingModuleSource": False}
WRONG = 'import comingle\n\ncomingle.load("runs/toy").user("ada").answer()\n'


def complaints(folder: Path) -> list[str]:
    """What pyright says of the programs in a folder, as ``name:line rule``."""
    (folder / "pyrightconfig.json").write_text(json.dumps(SETTINGS | {"extraPaths": [str(REPOSITORY / "src")]}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, str(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    )
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] == len(list(folder.glob("*.py")))
    return sorted(
        f"{Path(one['file']).name}:{one['range']['start']['line'] + 1} {one['message']}"
        for one in found["generalDiagnostics"]
    )


@pytest.mark.slow
def test_programs_that_we_show_have_types(tmp_path: Path) -> None:
    pytest.importorskip("pyright")
    for page in (README, *(DOCS / name for name in ("python.md", "samples.md", "conversations.md", "federation.md"))):
        shown = "\n".join(blocks(page.read_text(encoding="utf-8"), "python"))
        (tmp_path / f"page_{page.stem.lower()}.py").write_text(shown, encoding="utf-8")
    for example in (REPOSITORY / "examples").glob("*.py"):
        shutil.copy(example, tmp_path)
    (tmp_path / "wrong.py").write_text(WRONG)
    first, *others = complaints(tmp_path)[::-1]
    assert others == []
    assert first.startswith('wrong.py:3 Cannot access attribute "answer"')  # so the others were looked at
