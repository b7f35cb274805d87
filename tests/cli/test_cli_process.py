"""What only a process of its own can show: what is imported, and how it stops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from comingle.config import load_recipe
from comingle.runs import api
from comingle.utils.files import list_checkpoints
from comingle.utils.records import read_events

# What a shell starts in the background ignores Ctrl-C, and so do its children: the program is told to hear it again.
HEAR = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
COMINGLE = [sys.executable, "-c", HEAR + "from comingle.cli import main; main()"]
VERBS = ["demo", "run", "compare", "methods", "data", "cost", "show", "report", "plot", "reproduce", "theory"]
HEAVY = ["torch", "transformers", "datasets", "numpy", "scipy", "matplotlib", "safetensors", "yaml", "jaxtyping"]
HEAVY += ["jinja2", "psutil", "PIL"]

HELP = """
import json, sys
from comingle.cli import main

def quiet(*words):
    sys.argv = ["comingle", *words]
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, words

for verb in sys.argv[1:]:
    quiet(verb, "--help")
quiet("--help")
print(json.dumps(sorted(sys.modules)))
"""


def test_help_imports_nothing_heavy() -> None:
    """So that it answers at once; a measured time would depend on the machine."""
    done = subprocess.run([sys.executable, "-c", HELP, *VERBS], capture_output=True, text=True, check=True)
    *lines, modules = done.stdout.splitlines()
    assert {name.partition(".")[0] for name in json.loads(modules)}.isdisjoint(HEAVY)
    overview = "\n".join(lines[-60:])
    assert all(verb in overview for verb in VERBS)


def test_the_overview_does_not_import_pydantic_either() -> None:
    """Which typer may do for a verb's own help."""
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    assert {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}.isdisjoint(
        [*HEAVY, "pydantic"]
    )


@pytest.mark.slow
def test_an_interruption_exits_130_and_leaves_a_run_that_can_be_resumed(
    comingle: Any, recipe_file: Path, tmp_path: Path
) -> None:
    run, rounds = tmp_path / "run", 50
    changes = {
        "training.rounds": rounds,
        "training.local_steps": 1,
        "training.batch_size": 1,
        "evaluation.every": rounds,
    }
    options = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    command = ["run", str(recipe_file), "--out", str(run), "--quiet", *options]
    process = subprocess.Popen(
        [*COMINGLE, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=quiet()
    )
    while not list_checkpoints(run) and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130, err
    assert err.strip().startswith("comingle: stopped")
    assert "--resume" in err
    assert not (run / "metrics.json").exists()

    resumed = comingle(*command, "--resume")
    assert (resumed.code, resumed.err) == (0, "")
    done = json.loads((run / "metrics.json").read_text())
    assert [event["round"] for event in read_events(run) if event["event"] == "round"] == list(range(1, rounds + 1))
    whole = api.run(load_recipe(run))
    assert done["users"] == whole.metrics["users"]


def quiet() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_a_mistake_in_a_process_of_its_own(tmp_path: Path) -> None:
    command = [*COMINGLE, "run", str(tmp_path / "mine.yaml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"comingle: {tmp_path / 'mine.yaml'}: no such recipe.\n"


def test_the_package_itself_imports_nothing_heavy() -> None:
    code = "import comingle, json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {name.partition(".")[0] for name in json.loads(done.stdout)}.isdisjoint(HEAVY)


def test_reports_never_import_torch() -> None:
    code = "import comingle.reports.tables, comingle.reports.tables, json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {name.partition(".")[0] for name in json.loads(done.stdout)}.isdisjoint(
        {"torch", "transformers", "datasets"}
    )


def test_names_of_the_package_are_those_it_says() -> None:
    import comingle

    assert all(getattr(comingle, name) is not None for name in comingle.__all__)
    missing: Any = "nothing"
    with pytest.raises(AttributeError, match="module 'comingle' has no attribute 'nothing'"):
        getattr(comingle, missing)
