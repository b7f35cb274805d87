"""A method that no test knows obeys the laws: they are asked of whatever is registered."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

LAWS = Path(__file__).parent
FILES = (
    *(f"laws/test_laws_{law}.py" for law in ("alone", "frozen", "messages", "nets", "order", "privacy", "servers")),
    *(f"laws/test_laws_{law}.py" for law in ("settings", "store")),
    "cost/test_costing_bytes.py",
    "privacy/test_examples_runs.py",
    "privacy/test_privacy_mechanisms.py",
    "privacy/test_secure_sums.py",
)


@pytest.mark.slow
def test_a_method_in_one_file_obeys_the_laws() -> None:
    files = [str(LAWS.parent / name) for name in FILES]
    options = ["-p", "tests.laws.toy_method", "-p", "no:cacheprovider", "-q"]
    asked = [*options, "-m", "", "-k", "toy or every_method_says", *files]
    environment = {**os.environ, "COMINGLE_NO_TYPECHECK": "1"}
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *asked],
        cwd=LAWS.parents[1],
        env=environment,
        capture_output=True,
        text=True,
    )
    last = done.stdout.strip().splitlines()[-1]
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert int(re.match(r"(\d+) passed", last)[1]) > 40, last  # type: ignore[index]
