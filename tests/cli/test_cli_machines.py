"""``comingle cost --machines``: seconds and money, with what is measured taken as known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from comingle.cost import machines
from comingle.cost.machines import Measurement
from comingle.cost.timing import Collectives, Parts

PARTS = Parts(
    training_core_seconds=0.5,
    message_core_seconds=0.01,
    evaluation_core_seconds=0.2,
    aggregation_core_seconds=0.003,
    report_seconds=0.0005,
    fixed_seconds=0.02,
    hop_seconds=1e-4,
    bus_rate=1e9,
    collectives=Collectives(),
)
FOUND = Measurement(
    parts=PARTS, parts_below_cohort=PARTS, cohort=8, needs_only_sums=True, same_download=True, summed_numbers=100,
    state_bytes=10**6,
    disk=1e8,
    amounts=(8, 80_000, 8_000),
)  # fmt: skip


FLOATS = ("--price", "--link", "--latency", "--disk", "--step")


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "measure", lambda *args: FOUND)


@pytest.mark.slow
def test_a_plan_for_machines_is_a_table_and_json(known: None, comingle: Any, recipe_file: Path) -> None:
    words = ["--method", "fedavg", "--machines", 4, "--processes", 2, "--cores", 8, "--price", 3]
    answer = comingle("cost", recipe_file, *words)
    assert (answer.code, answer.err) == (0, "")
    for word in (
        "4 machines with 2 processes on 8 cores each, 3 an hour each",
        "1,000,000",
        "money",
        "binds",
        "compute",
    ):
        assert word in answer.out, word
    time = json.loads(comingle("cost", recipe_file, *words, "--json").out)["time"]
    (method,) = time["methods"]
    assert [row["users"] for row in method["rows"]] == [10**4, 10**6, 10**8]  # three users are fewer than processes
    last = method["rows"][-1]
    parts = sum(last[f"{name}_seconds"] for name in ("compute", "server", "network", "disk"))
    assert last["round_seconds"] == pytest.approx(parts)
    assert last["money"] == pytest.approx(4 * 3 * last["run_seconds"] / 3600)
    assert method["parts"]["disk"] == FOUND.disk


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--price", 2], "--machines N"),
        (["--machines", 2, "--gpus", 2, "--processes", 2], "--gpus and --processes: got both"),
        (["--machines", 2, "--gpus", 8], "give --step SECONDS"),
        *((["--machines", 2, option, "nan"], f"{option}: got nan; give a finite number") for option in FLOATS),
        (["--machines", 2, "--link", "inf"], "--link: got inf; give a finite number"),
        (["--machines", 10**9], "--machines: 1,000,000,000 processes in all; allowed: up to 100,000,000 processes"),
    ],
)
def test_machines_that_make_no_sense(
    words: list[Any], message: str, comingle: Any, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "on_gpu", lambda: False)
    answer = comingle("cost", recipe_file, *words)
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert message in answer.err
