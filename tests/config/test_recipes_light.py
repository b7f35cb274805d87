"""What may be imported without torch, which takes seconds."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module", ["comingle.config", "comingle.cli", "comingle.utils.files", "comingle.utils.registry"]
)
def test_it_imports_no_torch(module: str) -> None:
    program = f"import sys, {module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
