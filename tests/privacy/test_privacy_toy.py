"""A privacy mechanism in one file: registered by name, used by a recipe in a run, a federation and a cost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.federation.direct import federated
from tests.federation.tiny import one_base, tiny

import comingle
from comingle.config import Recipe, parse_recipe
from comingle.config.settings import MECHANISMS, Mechanism
from comingle.methods.base import Method
from comingle.privacy.base import REFERENCE, Update
from comingle.privacy.mechanisms import DifferentialPrivacy
from comingle.privacy.noise import clipped
from comingle.runs.session import build, prepare
from comingle.utils.errors import RecipeError
from comingle.utils.records import read_events

ADDED = 0.25


class Toy(DifferentialPrivacy):
    """Clips what users upload and adds a constant."""

    def supports(self, method: Method, recipe: Recipe) -> None:
        super().supports(method, recipe)
        if self.privacy.delta > 0.1:
            raise RecipeError(f"privacy.delta: got {self.privacy.delta:g}; with privacy.mechanism: toy up to 0.1")

    def client_update(self, update: Update) -> Update:
        changes = clipped(update.changes, update.bounds)
        return replace(update, changes={name: t + ADDED for name, t in changes.items()})


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with MECHANISMS.temporarily_registered("toy", Mechanism(implementation=Toy, noise_at="upload")):
        yield


def recipe(folder: Path, **privacy: Any) -> dict[str, Any]:
    changes = {"evaluation__model": "exchanged", "training__rounds": 2}
    toy = {"mechanism": "toy", "noise_multiplier": 1.0, "noise": "reproducible", "accountant": "rdp", **privacy}
    return {**tiny(folder, "fedavg", **changes), "privacy": toy}


def test_a_run_uploads_what_the_mechanism_makes(tmp_path: Path) -> None:
    done = comingle.run(recipe(tmp_path, clip_norm=1e-9), out=tmp_path / "run")
    assert done.metrics["privacy"]["mechanism"] == "toy"
    assert done.metrics["privacy"]["releases"] == 2
    assert done.metrics["privacy"]["epsilon"] > 0
    clients = done.federation.clients
    first = build(done.recipe, prepare(done.recipe)).clients.state.kept
    for name, t in clients.state.kept.items():
        if name.startswith(REFERENCE):  # two rounds of hardly any change and twice the constant
            torch.testing.assert_close(t, first[name] + 2 * ADDED, rtol=0, atol=1e-5)
    spent = [event["epsilon"] for event in read_events(tmp_path / "run") if event["event"] == "privacy"]
    assert 0 < spent[0] < spent[1] == done.metrics["privacy"]["epsilon"]


def test_users_elsewhere_upload_the_same(tmp_path: Path) -> None:
    content = recipe(tmp_path)
    here = comingle.run(content)
    with one_base():
        there, channel = federated(content, tmp_path / "there")
    assert there["privacy"] == here.metrics["privacy"]
    clients = here.federation.clients
    for at, name in enumerate(clients.names):
        home = channel.nodes[name]._store
        assert home is not None
        own = [trainer.name for trainer in home.clients.trainers].index(name)
        assert torch.equal(clients.state.rows[at], home.clients.state.rows[own])
        ledger = json.loads((home.folder / "privacy.json").read_text())  # its noise is the user's own
        assert len(ledger["releases"]) == 2


def test_costs_say_what_it_spends(tmp_path: Path, comingle: Any) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe(tmp_path)))
    assert "at delta 1e-05, toy noise of 1 times the clip norm (1.0), 2 exchanges, by RDP" in comingle("cost", path).out


def test_it_refuses_what_it_does_not_cover(tmp_path: Path) -> None:
    for changes, why in (
        ({"delta": 0.2}, "privacy.delta: got 0.2; .*0.1"),
        ({"clip_norm": "adaptive"}, "privacy.clip_norm: adaptive .*toy: a number"),
        ({"noise_multiplier": None}, "privacy: .*noise_multiplier, or epsilon"),
    ):
        with pytest.raises(RecipeError, match=why):
            comingle.run(recipe(tmp_path, **changes))


def test_an_unknown_mechanism_is_refused_with_all_that_are_registered(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="'central', 'local', 'example', 'none' or 'toy'; got 'tay'"):
        parse_recipe(recipe(tmp_path, mechanism="tay"))
