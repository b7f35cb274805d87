"""Methods of a user's own from a file on the command line: ``--plugin FILE``."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from comingle.config import load_recipe
from comingle.utils.errors import RecipeError

PLAIN = '''
from comingle.methods.base import Method, Placement
from comingle.methods.base import MODEL, Client, joint
from comingle.methods.server import Mean
from helper_of_the_test import NAME

def near(*, pull: float = 0.5) -> Method:
    """Stay near.

    Source: none.
    """
    return Method(
        name=NAME, placement=Placement(shared=MODEL), client=Client(phases=joint(routed=False)), server=Mean()
    )

if __name__ == "__main__":
    raise SystemExit("not here")
'''

RECIPE = """
base: random:gpt2?layers=1&dim=16&heads=2
data: {users: {ada: {path: ada.txt}, ben: {path: ben.txt}}}
training: {rounds: 1, local_steps: 1, batch_size: 1, context: 16}
evaluation: {first: false}
runtime: {threads: 1}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugin")
    for name in ("ada", "ben"):
        (folder / f"{name}.txt").write_text("\n\n".join(f"{name} has {i} pears and {i * 7}." for i in range(60)))
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "near.py").write_text(PLAIN)
    (folder / "helper_of_the_test.py").write_text('NAME = "near"\n')
    return folder


def comingle(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, as a plug-in stays loaded in one."""
    environment = {key: value for key, value in os.environ.items() if key != "COMINGLE_PLUGINS"}
    command = [sys.executable, "-m", "comingle", *words]
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_run_of_a_method_from_a_file_is_opened_with_the_file_alone(place: Path) -> None:
    ran = comingle(place, "run", "recipe.yaml", "--plugin", "near.py", "--set", "method=near", "--out", "run", "-q")
    assert ran.returncode == 0, ran.stderr
    assert json.loads((place / "run/plugins.json").read_text())["file"] == str(place / "near.py")
    assert "near.py" not in (place / "run/recipe.yaml").read_text()
    for words in (["run", "run", "--resume"], ["cost", "run"], ["chat", "run", "--user", "ada"]):
        without = comingle(place, *words)
        assert without.returncode == 2
        assert f"no method 'near' here; it came from {place}/near.py: give --plugin {place}/near.py" in without.stderr
        assert len(without.stderr.splitlines()) == 1
    assert comingle(place, "run", "run", "--resume", "--plugin", "near.py", "-q").returncode == 0
    assert comingle(place, "show", "run").returncode == 0  # which needs no method
    again = (place / "near.py").read_text() + "\n# changed\n"
    (place / "other").mkdir()
    (place / "other/near.py").write_text(again)
    changed = comingle(place, "run", "run", "--resume", "--plugin", "other/near.py", "-q")
    assert changed.returncode == 0
    was, now = (hashlib.sha256((place / name).read_bytes()).hexdigest()[:8] for name in ("near.py", "other/near.py"))
    assert changed.stderr.count("method 'near' has changed since the run began: ") == 1
    assert f"{place}/other/near.py had sha256 {was}, now {now}" in changed.stderr


@pytest.mark.slow
def test_the_process_that_measures_rounds_loads_it(place: Path) -> None:
    words = ["cost", "recipe.yaml", "--plugin", "near.py", "--method", "near", "--machines", "1"]
    found = comingle(place, *words)
    assert (found.returncode, "Traceback" in found.stderr) == (0, False), found.stderr


NET = """
from math import prod
from torch import nn
from comingle.models.nets import NETS

NETS.register("small", lambda shape, outputs: nn.Linear(prod(shape), outputs))
"""


@pytest.mark.slow
def test_every_process_of_a_command_loads_a_file_with_a_net(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for name in ("ada", "ben"):
        np.savez(tmp_path / f"{name}.npz", x=draw.random((20, 6), dtype=np.float32), y=np.arange(20) % 2)
    users = "{ada: ada.npz, ben: ben.npz}"
    recipe = f"base: net:small\nmethod: fedavg\ndata: {{kind: samples, users: {users}}}\n"
    (tmp_path / "recipe.yaml").write_text(recipe + "training: {rounds: 1, batch_size: 4}\nruntime: {threads: 1}\n")
    (tmp_path / "net.py").write_text(NET)
    for words in (
        ["cost", "recipe.yaml", "--method", "floral", "--machines", "1"],
        ["compare", "recipe.yaml", "--methods", "fedavg,local", "--seeds", "0", "--jobs", "2", "--out", "c"],
        ["run", "recipe.yaml", "--processes", "2", "--out", "p"],
        ["federate", "recipe.yaml", "--out", "f"],
    ):
        done = comingle(tmp_path, *words, "--plugin", "net.py")
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


@pytest.mark.slow
def test_every_process_of_a_command_loads_it(place: Path) -> None:
    words = ["recipe.yaml", "--plugin", "near.py", "-q"]
    beside = comingle(
        place, "compare", *words, "--methods", "near,local", "--seeds", "0,1", "--jobs", "2", "--out", "c"
    )
    assert beside.returncode == 0, beside.stderr
    assert "near" in beside.stdout
    shared = comingle(place, "run", *words, "--set", "method=near", "--processes", "2", "--out", "p")
    assert shared.returncode == 0, shared.stderr
    federated = comingle(place, "federate", *words, "--set", "method=near", "--out", "f")
    assert federated.returncode == 0, federated.stderr


@pytest.mark.slow
def test_methods_lists_it_and_a_recipe_never_runs_it(place: Path) -> None:
    (place / "two.py").write_text(PLAIN.replace("NAME,", '"two",').replace("def near", "def two"))
    listed = comingle(place, "methods", "--plugin", "near.py", "--plugin", "two.py")
    assert "near" in listed.stdout
    assert "two" in listed.stdout
    shown = comingle(place, "methods", "near", "--plugin", "near.py")
    assert "Settings: pull: 0.5" in shown.stdout
    for key in ("plugin", "plugins"):
        (place / "asks.yaml").write_text(RECIPE + f"{key}: near.py\n")
        with pytest.raises(RecipeError, match=f"unknown key '{key}'"):
            load_recipe(place / "asks.yaml")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        ("x = 1\n", "registers nothing; allowed: functions annotated to return a Method"),
        ("def (", "bad.py:1: SyntaxError: "),
        ("def halve(n):\n    return n / 0\nhalve(1)\n", "bad.py:2, in halve: ZeroDivisionError: division by zero"),
        ("import no_such_module_of_the_test\n", "ModuleNotFoundError: No module named 'no_such_module_of_the_test'"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
        (PLAIN.replace("NAME,", '"fedavg",'), "--plugin bad.py: method 'fedavg'"),
        (PLAIN.replace("pull: float = 0.5", "pull: float"), "has no default; each setting needs one"),
        (PLAIN.replace("name=NAME", "name=NAME / 2"), "bad.py:13, in near: TypeError: "),
    ],
)
@pytest.mark.sampled(1)
def test_a_file_that_cannot_be_used_is_one_line(place: Path, content: str | None, said: str) -> None:
    (place / "bad.py").unlink(missing_ok=True)
    if content is not None:
        (place / "bad.py").write_text(content)
    found = comingle(place, "methods", "--plugin", "bad.py")
    assert found.returncode == 2
    assert said in found.stderr
    assert len(found.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_function_without_annotation_is_skipped_with_its_place_and_what_to_write(place: Path) -> None:
    bare = PLAIN.replace("near", "bare").replace(" -> Method", "")
    (place / "bare.py").write_text(PLAIN.replace("NAME,", '"kept",').replace("def near", "def kept") + bare)
    line = 1 + (place / "bare.py").read_text().splitlines().index("def bare(*, pull: float = 0.5):")
    listed = comingle(place, "methods", "--plugin", "bare.py")
    assert listed.returncode == 0, listed.stderr
    assert f"{place}/bare.py:{line}: bare is no method" in listed.stderr
    assert "`def bare(...) -> Method:`" in listed.stderr
    asked = comingle(place, "methods", "bare", "--plugin", "bare.py")
    assert asked.returncode == 2
    assert f"a function in {place}/bare.py:{line} whose return value is not annotated" in asked.stderr.splitlines()[-1]
    (place / "bare.py").write_text(bare)
    alone = comingle(place, "methods", "--plugin", "bare.py")
    assert alone.returncode == 2
    assert "Functions without `-> Method`: bare." in alone.stderr


@pytest.mark.slow
def test_a_comparison_goes_on_after_its_file_has_changed(place: Path) -> None:
    (place / "file").mkdir()
    file = place / "file/near.py"
    file.write_text(PLAIN)
    words = ["compare", "recipe.yaml", "--plugin", str(file), "--methods", "near", "-q", "--out", "changes"]
    assert comingle(place, *words, "--seeds", "0,1,2").returncode == 0
    was = hashlib.sha256(file.read_bytes()).hexdigest()
    for name in ("metrics.json", "checkpoints"):  # as where the third run was stopped before its first checkpoint
        path = place / "changes/near-seed2" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    file.write_text(PLAIN + "\n# changed\n")
    again = comingle(place, *words, "--seeds", "0,1,2", "--resume", "--jobs", "2")
    assert again.returncode == 0, again.stderr
    warnings = [line for line in again.stderr.splitlines() if "has changed since the run began" in line]
    assert ["near-seed0" in line for line in warnings] == [True, False]  # each finished run, once
    advice = "its results are those of the old file; --force trains again, or use another --out"
    assert all(line.endswith(advice) for line in warnings)
    now = hashlib.sha256(file.read_bytes()).hexdigest()
    kept = [json.loads((place / f"changes/near-seed{n}/plugins.json").read_text())["sha256"] for n in range(3)]
    assert kept == [was, was, now]
