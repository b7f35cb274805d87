"""Two runs on the same processors: threads that wait for each other must not keep those from work who they wait for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ASKS = """
import os, sys
from comingle.cli import main
early = "torch" in sys.modules
sys.argv = ["comingle", "methods", "local"]
try:
    main()
finally:
    print(early, os.environ.get("GOMP_SPINCOUNT"), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_waiting_threads_soon_sleep_unless_the_user_says_otherwise(given: dict[str, str], spins: str) -> None:
    """torch reads it when it is imported, which therefore comes later."""
    clean = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    told = subprocess.run([sys.executable, "-c", ASKS], env=clean | given, capture_output=True, text=True, check=True)
    assert told.stderr.split() == ["False", spins]
