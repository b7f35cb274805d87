"""What a process says of its own memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from comingle.models.hardware import peak_memory_bytes

ASK = "from comingle.models.hardware import peak_memory_bytes; print(peak_memory_bytes())"
PARENT = f"""
import subprocess, sys
held = bytearray(b"x") * 1_500_000_000
print(subprocess.run([sys.executable, "-c", {ASK!r}], capture_output=True, text=True, check=True).stdout)
"""


def test_every_gpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on ``cuda:1`` does not make that the current one."""
    held = {0: 0, 1: 2**50}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda gpu=0: held[gpu])
    assert peak_memory_bytes() > 2**50


@pytest.mark.slow
def test_a_peak_is_not_inherited_from_the_process_that_started_this_one() -> None:
    """Linux hands a parent's ``ru_maxrss`` on through fork and exec; ``comingle cost`` once counted pytest's."""
    alone, below = (
        int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for code in (ASK, PARENT)
    )
    assert abs(below - alone) < 0.1 * alone
