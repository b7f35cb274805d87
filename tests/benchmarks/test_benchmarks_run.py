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
        assert line["comingle"].get("is_repeatable") is (True if row == "blazefl" else None)
        if "skipped" in line:
            assert line["comingle"]["turns"][0] > 0
            continue
        assert line["times"] > 0
        assert ("seconds" in line["behind"]) == (line["times"] <= 1)
        assert line["peer"].get("difference", 0) < 1e-5


FORKED = """
import os, sys, time
memory = os.urandom(1 << 20) * 100
reads, writes = os.pipe()
child = os.fork()
if not child:
    own = os.urandom(1 << 20) * 30
    os.write(writes, b"1")
    sys.stdin.readline()
    os._exit(0)
os.read(reads, 1)
print("ready", flush=True)
os.waitpid(child, 0)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
def test_memory_that_a_forked_child_shares_counts_once() -> None:
    start = f"import json, peers, subprocess, sys; command = [sys.executable, '-c', {FORKED!r}]; "
    start += (
        "pipes = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE}; made = subprocess.Popen(command, **pipes); "
    )
    start += "made.stdout.readline(); found = peers.tree_bytes(made.pid) >> 20; made.communicate(b''); "
    found = printed(start + "print(json.dumps({'mib': found}))")["mib"]
    assert 130 <= found < 160  # 100 of the parent, 30 of the child, and Python


ANSWERS = """
import json, sys
print(json.dumps({}), flush=True)
for number, line in enumerate(sys.stdin):
    answer = {"loss": 0.5} if line == "score\\n" else {"seconds": number, "cpu_seconds": 2 * number}
    print(json.dumps(answer), flush=True)
"""


def test_peers_are_compared_by_their_turns_after_the_first_ones() -> None:
    """The workers are processes that answer at once: that they take 0, 1, 2, ... seconds."""
    start = f"import json, peers, pathlib, sys, tempfile; command = [sys.executable, '-c', {ANSWERS!r}]; "
    start += "log = pathlib.Path(tempfile.mkdtemp()) / 'log'\n"
    measured = printed(
        start + "with peers.start(command, log) as worker: print(json.dumps(peers.measure({'us': worker}, 3, 2)['us']))"
    )
    assert measured.pop("peak_mib") > 1
    assert measured == {"turns": [2, 3, 4], "cpu_seconds": 6, "loss": 0.5}

    ours = {"turns": [1.0, 2.0, 4.0], "peak_mib": 100, "loss": 0.5}
    theirs = {"turns": [2.0, 2.0, 16.0], "peak_mib": 50, "loss": 0.6}
    found = {"comingle": ours, "peft": theirs, "opacus": {"turns": [1.0, 1.0, 1.0], "peak_mib": 300}}
    script = f"import json, peers; found = {found}; names = ['peft', 'opacus']; "
    line, other = printed(
        script + "print(json.dumps([peers.comparison_line('small', 'float32', n, found) for n in names]))"
    )
    assert line == {
        "row": "small",
        "dtype": "float32",
        "name": "peft",
        "comingle": {"seconds": 2.0, "peak_mib": 100, "loss": 0.5},
        "peer": {"seconds": 2.0, "peak_mib": 50, "loss": 0.6},
        "times": 2.0,  # the turns' 2, 1 and 4
        "memory_times": 0.5,
        "behind": ["memory"],
    }
    assert (other["times"], other["memory_times"], other["behind"]) == (0.5, 3.0, ["seconds"])
