"""Benchmarks that nobody runs every day still run, at toy size; ``make check`` reads their types."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
SHAPE = {"layers": 1, "dim": 32, "heads": 2, "vocab": 300, "users": 2, "batch": 2}


def printed(script: str) -> dict[str, Any]:
    """The line of JSON that a script prints, run where benchmarks lie."""
    done = subprocess.run([sys.executable, "-c", script], cwd=FOLDER, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_the_roofline_measures_each_shape() -> None:
    start = "import sys, roofline; sys.argv = ['roofline.py', '--shapes', 'toy', '--iters', '1']; "
    found = printed(start + f"roofline.SHAPES['toy'] = {SHAPE}; roofline.main()")["toy"]
    assert found["limit_tokens_per_s"] > found["tokens_per_s"] > 0
    assert 0 <= found["roofline_share"] < 1  # of products too small to keep a processor busy
    assert found["adapter_efficiency"] > 0


@pytest.mark.slow
def test_attention_is_timed_both_ways() -> None:
    start = "import sys, roofline, attending; roofline.SHAPES['toy'] = {}; sys.argv = ['', *{}]; attending.main()"
    asked = ["--shape", "toy", "--contexts", "16", "--dtype", "float32", "--iters", "1"]
    assert printed(start.format(SHAPE, asked))["16"]["times"] > 0
    assert printed(start.format(SHAPE, [*asked, "--only", "eager"]))["16"]["peak_bytes"] > 0


@pytest.mark.slow
def test_answers_are_the_same_together() -> None:
    shape = ["--users", "2", "--questions", "2", "--prompt", "8", "--new", "4", "--repeats", "1"]
    assert printed(f"import sys, answering; sys.argv = ['answering.py', *{shape}]; answering.main()")["ratio"] > 0


@pytest.mark.slow
def test_answers_while_a_live_run_trains() -> None:
    options = ["--base", "random:llama?layers=1&dim=32", "--rounds", "2", "--steps", "2", "--answers", "3"]
    found = printed(f"import sys, live; sys.argv = ['live.py', *{options}]; live.main()")
    assert found["changed_after_seconds"] > 0
    assert found["p95_ratio"] > 0


@pytest.mark.slow
def test_adapters_of_many_users_are_served_from_disk() -> None:
    options = ["--base", "random:llama?layers=1&dim=32", "--many", "2", "9", "--cache-users", "4", "--requests", "12"]
    found = printed(
        f"import sys, serving; sys.argv = ['', *{[*options, '--new', '3', '--repeats', '1']}]; serving.main()"
    )
    assert found["of_fewest"]["2"] == 1
    assert found["reads"]["9"] > 0
    assert found["edge_ratio"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("row", ["sixteen", "opacus", "flower", "blazefl"])
def test_peers_take_turns_beside_comingle(row: str) -> None:
    """Where the peer is not installed, comingle's side still runs."""
    options = ["--rows", row, "--dtypes", "float32", "--toy", "--turns", "1", "--ours-alone"]
    command = [sys.executable, "peers.py", *options]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines
    for line in lines:
        assert line["comingle"]["peak_mib"] > 0
        if "skipped" in line:
            assert line["comingle"]["turns"][0] > 0
            continue
        assert line["times"] > 0
        assert ("seconds" in line["behind"]) == (line["times"] <= 1)
        assert line["peer"].get("difference", 0) < 1e-5
