"""Users shared out over processes: real ones, with gloo, that leave behind what one process leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from outcomes import tensors, told, unequal

from comingle.runs import api
from comingle.utils.files import list_checkpoints
from comingle.utils.records import read_metrics

DRIVER = Path(__file__).with_name("shard_driver.py")
ROUNDING: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}
"""Of a sum of three users in float32 against the exact one, over two rounds of AdamW's steps."""

SHORT = {
    "runtime.users_per_step": 1,
    "runtime.shard_sums": "ordered",
    "training.rounds": 2,
    "training.local_steps": 2,
}
KILLED = -9


pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Played:
    """Runs by name, below one folder; how their processes ended, and what they said."""

    folder: Path
    codes: Mapping[str, list[list[int]]]
    said: str

    def __getitem__(self, name: str) -> Path:
        return self.folder / name


def play(folder: Path, recipe: Path, runs: Mapping[str, list[dict[str, Any]]]) -> Played:
    """Each run in one or more goes, one after another."""
    cases = [{"recipe": str(recipe), "out": str(folder / name), **go} for name, goes in runs.items() for go in goes]
    path = folder / "cases.json"
    path.write_text(json.dumps(cases))
    done = subprocess.run([sys.executable, str(DRIVER), str(path)], capture_output=True, text=True, check=True)
    codes = iter(json.loads(Path(f"{path}.codes").read_text()))
    return Played(folder, {name: [next(codes) for _ in goes] for name, goes in runs.items()}, done.stderr)


def go(processes: int, sets: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"processes": processes, "sets": [f"{key}={value}" for key, value in (SHORT | dict(sets)).items()], **more}


FEDAVG, FEDMERGE = {"method": "fedavg"}, {"method": "{name: fedmerge, models: 2}"}
REDUCED = FEDAVG | {"runtime.shard_sums": "reduced"}
NORMALISED = FEDAVG | {
    "training.local_steps": "{cem: 2, ann: 1, bob: 3}",
    "training.batch_size": "{ann: 2, bob: 1, cem: 1}",
    "training.normalise_steps": "true",
}
WHOLE = {"training.rounds": 4, "training.local_steps": 3}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, write_recipe: Callable[[Path], Path]) -> Played:
    folder = tmp_path_factory.mktemp("sharded")
    runs = {
        "comigs-1": [go(1, WHOLE)],
        "comigs-3": [go(3, WHOLE)],
        "resumed": [
            go(1, WHOLE, kill=[0, 2]),
            go(3, WHOLE, resume=True, kill=[1, 3]),
            go(2, WHOLE, resume=True),
        ],
        "fedavg-1": [go(1, FEDAVG)],
        "reduced-2": [go(2, REDUCED)],
        "reduced-3": [go(3, REDUCED)],
        "fedmerge-1": [go(1, FEDMERGE)],
        "fedmerge-2": [go(2, FEDMERGE)],
        "normalised-1": [go(1, NORMALISED)],
        "normalised-2": [go(2, NORMALISED | {"runtime.shard_sums": "reduced"})],
        "too-many": [go(4, {})],
        "unlike": [go(2, {}, sets_of={"1": go(2, {"runtime.dtype": "float64"})["sets"]})],
        "broken": [go(3, WHOLE, fail=[2, "round-0003"])],
    }
    return play(folder, write_recipe(folder / "project"), runs)


def test_three_processes_leave_behind_what_one_does(played: Played) -> None:
    """Tensors of users and server, events and metrics, to the last bit."""
    assert played.codes["comigs-3"] == [[0, 0, 0]]
    assert unequal(played["comigs-1"], played["comigs-3"]) == []


def test_a_server_that_looks_at_each_upload_has_them_all(played: Played) -> None:
    assert unequal(played["fedmerge-1"], played["fedmerge-2"]) == []


def test_changes_are_normalised_by_the_steps_of_users_in_all_processes(played: Played) -> None:
    assert unequal(played["normalised-1"], played["normalised-2"]) == []


def test_reduced_sums_do_not_depend_on_the_number_of_processes(played: Played) -> None:
    assert unequal(played["reduced-2"], played["reduced-3"]) == []


def test_reduced_sums_are_those_of_one_process_to_rounding(played: Played) -> None:
    one, two = tensors(played["fedavg-1"]), tensors(played["reduced-2"])
    for name, expected in one.items():
        torch.testing.assert_close(two[name], expected, **ROUNDING, msg=name)
    bytes_sent = [
        [event.get(key) for event in told(played[run])]
        for run in ("fedavg-1", "reduced-2")
        for key in ("upload_bytes", "download_bytes")
    ]
    assert bytes_sent[:2] == bytes_sent[2:]  # those of users' messages, however they are moved


def test_any_number_of_processes_goes_on_with_what_another_has_written(played: Played) -> None:
    """One, of whom one is killed; three, of whom one is killed; two, to the end."""
    first, second, third = played.codes["resumed"]
    assert first == [KILLED]
    assert second[1] == KILLED
    assert all(second)
    assert third == [0, 0]
    newest = list_checkpoints(played["resumed"])[-1]
    assert sorted(path.name for path in newest.glob("*.safetensors")) == [
        "server.safetensors",
        "users-0-of-2.safetensors",
        "users-1-of-2.safetensors",
    ]
    assert unequal(played["comigs-1"], played["resumed"]) == []


def test_a_process_that_is_left_behind_says_so_in_one_line(played: Played) -> None:
    lost = [line for line in played.said.splitlines() if "another process of this run has ended" in line]
    assert {line.partition(":")[0] for line in lost} == {"0", "2"}


def test_more_processes_than_users_are_refused_and_nothing_is_written(played: Played) -> None:
    assert played.codes["too-many"] == [[2, 2, 2, 2]]
    assert "0: processes: got 4 for 3 users; allowed: 1 to 3" in played.said
    assert not played["too-many"].exists()


def test_processes_that_compute_in_unlike_formats_are_refused(played: Played) -> None:
    assert played.codes["unlike"] == [[2, 2]]
    assert "0: runtime: process 0 uses cpu in float32, process 1 cpu in float64; set runtime.device" in played.said
    assert not played["unlike"].exists()


def test_a_disk_that_takes_no_more_ends_all_and_leaves_the_older_checkpoints(played: Played) -> None:
    assert played.codes["broken"] == [[2, 2, 2]]
    lines = [line for line in played.said.splitlines() if "round-0003: cannot be written to" in line]
    assert len(lines) == 1
    assert lines[0].startswith("0: ")
    assert "No space left on device" in lines[0]
    found = [path.name for path in (played["broken"] / "checkpoints").iterdir()]
    assert sorted(found) == ["round-0001", "round-0002"]


def test_everything_that_opens_a_run_opens_that_of_several_processes(played: Played) -> None:
    one, three = (api.load(played[run]) for run in ("comigs-1", "comigs-3"))
    for name in one.users:
        mine: Any = one.user(name)
        theirs: Any = three.user(name)
        assert all(torch.equal(t, theirs.tensors[key]) for key, t in mine.tensors.items())


PRIVATE = "mechanism: central, noise_multiplier: 1.0, clip_norm: 1.0, noise: reproducible"
CASES = {
    "ifca": {"method": "{name: ifca, models: 2}"},
    "pcl": {"method": "{name: pcl, exchange_from: 1}"},
    "flexlora": {"method": "flexlora"},
    "fdlora": {"method": "fdlora"},
    "floral": {"method": "floral"},
    "half": {"training.participation": 0.4, "training.rounds": 4},
    "best": FEDAVG | {"evaluation.select": "best"},
    "median": FEDAVG | {"aggregation.rule": "median"},
    "int8": FEDAVG | {"training.uploads": "int8"},
    "exchanged": FEDAVG | {"evaluation.model": "exchanged"},
    "auto": FEDAVG
    | {"evaluation.every": "auto", "evaluation.first": False}
    | {"training.rounds": 14, "data.max_test_tokens": 90},
    "private": FEDAVG | {"privacy": f"{{{PRIVATE}}}"},
    "summed": FEDAVG | {"privacy": "{mechanism: none, secure_aggregation: {threshold: 0.51}}"},
    "examples": FEDAVG | {"privacy": f"{{{PRIVATE.replace('central', 'example')}}}"},
    "stacking": {"method": "stacking"},
    "scaffold": {"method": "scaffold"},
    "fedalt": {"method": "fedalt"},
    "fedamole": {"method": "fedamole"},
    "feddpa": {"method": "feddpa"},
    "fedlease": {"method": "{name: fedlease, max_experts: 2}"},
    "fedtreelora": {"method": "{name: fedtreelora, threshold: -1}"},
    "alone": {"method": "local"},
}


def test_methods_and_settings_are_those_of_one_process(tmp_path: Path, write_recipe: Callable[[Path], Path]) -> None:
    runs = {f"{name}-{n}": [go(n, sets)] for name, sets in CASES.items() for n in (1, 2)}
    runs |= {f"comigs-{n}": [go(n, {})] for n in (1, 2, 4)}
    runs["examples-reduced"] = [go(2, CASES["examples"] | {"runtime.shard_sums": "reduced"})]
    recipe = write_recipe(tmp_path / "project")
    text = (tmp_path / "project" / "texts" / "ann.txt").read_text()
    (tmp_path / "project" / "texts" / "dan.txt").write_text(text[::-1])
    recipe.write_text(recipe.read_text().replace("    cem:", "    dan: texts/dan.txt\n    cem:"))
    played = play(tmp_path, recipe, runs)
    assert {name: codes for name, [codes] in played.codes.items() if any(codes)} == {}
    for name in CASES:
        assert unequal(played[f"{name}-1"], played[f"{name}-2"]) == [], name
    for n in (2, 4):
        assert unequal(played["comigs-1"], played[f"comigs-{n}"]) == []
    one, reduced = (read_metrics(played[run])["privacy"] for run in ("examples-1", "examples-reduced"))
    assert one == reduced  # each round counts once
    evaluated = [event["round"] for event in told(played["auto-2"]) if event["event"] == "evaluation"]
    assert evaluated == [7, 14]  # neither the shortest period, 5, nor the end alone


def test_warnings_are_those_of_one_process(tmp_path: Path, write_recipe: Callable[[Path], Path]) -> None:
    """What is said of one user, whichever process has that one, and what each could say of all: once each."""
    recipe = write_recipe(tmp_path / "project")
    (tmp_path / "project" / "texts" / "dan.txt").write_text("x")
    recipe.write_text(recipe.read_text().replace("    cem:", "    dan: texts/dan.txt\n    cem:"))
    privacy = "{mechanism: none, secure_aggregation: {threshold: 0.51, range: 1.0e-4}}"
    sets, said = FEDAVG | {"privacy": privacy, "data.on_small_user": "skip"}, []
    for n in (1, 2):
        folder = tmp_path / str(n)
        folder.mkdir()
        said.append(sorted(play(folder, recipe, {"run": [go(n, sets)]}).said.splitlines()))
    assert said[0] == said[1]
    cut = {line.partition(",")[0] for line in said[0] if "are clipped to the range" in line}
    assert cut == {f"user {name!r}" for name in ("ann", "bob", "cem")}
    assert sum("1 of 4 users" in line for line in said[0]) == 1


def test_nets_are_those_of_one_process(tmp_path: Path) -> None:
    recipe = tmp_path / "nets.yaml"
    recipe.write_text(
        "data: {task: {name: mlp-norm, users: 4, clusters: 2, test_samples: 9}}\n"
        "training: {rounds: 2, batch_size: 40, weighting: samples}\n"
        "floral: {rank: 2}\n"
        "runtime: {device: cpu, threads: 1, users_per_step: 2, shard_sums: ordered}\n"
    )
    methods = {"fedavg": "fedavg", "ifca": "{name: ifca, models: 2}", "floral": "floral"}
    runs = {
        f"{name}-{n}": [{"processes": n, "sets": [f"method={method}"]}]
        for name, method in methods.items()
        for n in (1, 2)
    }
    played = play(tmp_path, recipe, runs)
    assert {name: codes for name, [codes] in played.codes.items() if any(codes)} == {}
    for name in methods:
        assert unequal(played[f"{name}-1"], played[f"{name}-2"]) == [], name
