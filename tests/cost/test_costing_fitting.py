"""A pass that fits is found in each of several processes, for recipes that say something of all users."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from comingle.config import Recipe, load_recipe, parse_recipe
from comingle.cost import planning
from comingle.cost.planning import fit, rehearse_text
from comingle.runs.distributed import keep_users
from comingle.runs.session import prepare

SUMS = {"mechanism": "none", "secure_aggregation": {"threshold": 0.51}}
NOISE = {
    "mechanism": "central",
    "epsilon": 8.0,
    "delta": 1e-2,
    "sampling": "fixed",
    "clip_norm": 1.0,
    "accountant": "rdp",
}
OF_ALL = {
    "ranks": {"adapters.rank": [2, 4, 3]},
    "specialists": {"method": {"name": "comigs-1gxs", "specialists": [1, 3, 2]}},
    "sums": {"method": "fedavg", "privacy": SUMS},
    "noise": {"method": "fedavg", "privacy": NOISE, "training.participation": 0.4},
    "participation": {"training.participation": [["ann", "cem"], ["bob"]]},
}


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assume a process's own memory."""
    monkeypatch.setattr(planning, "measured_process_bytes", lambda *_: 1)


def fits_everywhere(recipe: Recipe) -> None:
    """One process has all users; three have one each."""
    run_data = prepare(recipe)
    whole = fit(recipe, run_data)
    for number in range(3):
        assert fit(recipe, keep_users(run_data, range(number, number + 1))) == whole


@pytest.mark.slow
@pytest.mark.parametrize("changes", OF_ALL.values(), ids=OF_ALL)
def test_what_a_recipe_says_of_all_users_holds_where_some_are(recipe_file: Path, changes: dict[str, Any]) -> None:
    fits_everywhere(load_recipe(recipe_file).with_changes({"runtime.users_per_step": "auto"} | changes))


def test_sums_of_nets_are_of_all_users_too(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for name in ("ann", "bob", "cem"):
        np.savez(tmp_path / f"{name}.npz", inputs=draw.normal(size=(12, 5)), targets=draw.integers(0, 3, 12))
    content = {
        "method": "fedavg",
        "data": {"kind": "samples", "users": {n: str(tmp_path / f"{n}.npz") for n in ("ann", "bob", "cem")}},
        "training": {"rounds": 1, "batch_size": 2},
        "privacy": SUMS,
        "runtime": {"device": "cpu", "users_per_step": "auto"},
    }
    fits_everywhere(parse_recipe(content))


def test_those_who_are_here_are_rehearsed_with_what_is_theirs(recipe_file: Path) -> None:
    """In adapters as wide as everybody's, as in a run."""
    recipe = load_recipe(recipe_file).with_changes(OF_ALL["ranks"])
    base = prepare(recipe).base
    assert base is not None
    names = ("ann", "bob", "cem")
    whole, some = (
        rehearse_text(recipe, base, names, own_indices=here).federation.clients for here in (None, range(1, 3))
    )
    assert list(some.names) == ["bob", "cem"]
    assert some.model.ranks.tolist() == [4, 3]
    assert some.model.layout.columns == whole.model.layout.columns
    assert torch.equal(some.mask, whole.mask[1:])
