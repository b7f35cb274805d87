"""Every byte between a client's processes and the server's, as a proxy between them has seen it."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr")

from tests.federation.proxy import Proxy
from tests.federation.test_federate import nothing_is_left, recipe_of
from tests.federation.test_federation_wire import Numbers, pairs_in, pairs_of
from tests.federation.test_out_there import SECONDS, Place, command, wait_for

from comingle.config import Recipe
from comingle.runs import api
from comingle.training.client import Clients
from comingle.utils.trees import Layout

pytestmark = pytest.mark.slow
__all__ = ["nothing_is_left"]  # around each of these tests too

WORDS_CHARACTERS = 12


class Seen:
    """What a user had of its own, and what it shares, whenever it wrote that to its disk: as pairs of neighbours."""

    def __init__(self, state: Path, layout: Layout, shared: frozenset[str]) -> None:
        self.state, self.layout, self.mask = state, layout, layout.mask(shared)
        self.own: dict[str, list[Numbers]] = {}
        self.shared: dict[str, list[Numbers]] = {}

    def look(self) -> bool:
        for path in self.state.glob("run-*/checkpoints/round-*/state.safetensors"):
            if path.parent.name not in self.own:
                with suppress(FileNotFoundError):  # which has been removed just now
                    self._take(path.parent.name, load_file(path))
        return False

    def _take(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        own, shared = [pairs_of(tensors[moment]) for moment in ("first", "second")], list[Numbers]()
        for slot in self.layout.slots:
            flat = tensors[f"user/{slot.name}"].flatten()
            columns = self.mask[self.layout.starts[slot.name] : self.layout.starts[slot.name] + slot.size]
            own.append(pairs_of(flat[~columns]))
            shared.append(pairs_of(flat[columns]))
        self.own[name], self.shared[name] = own, shared

    @property
    def all_shared(self) -> Numbers:
        return np.unique(np.concatenate([one for each in self.shared.values() for one in each]))

    @property
    def secret(self) -> Numbers:
        return np.setdiff1d(np.concatenate([one for each in self.own.values() for one in each]), self.all_shared)


def test_nothing_private_is_in_any_byte_between_the_processes(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "comigs-1g1s")
    clients: Clients = api.run(recipe, out=tmp_path / "together").federation.clients
    seen = Seen(tmp_path / "apart" / "users" / "ann", clients.model.layout, clients.method.shared)
    here = Place.of(tmp_path, recipe)
    with (
        Proxy(here.port) as proxy,
        command(tmp_path, "server", *here.server()) as server,
        command(tmp_path, "ann", *here.client("ann", proxy.own)),
        command(tmp_path, "bob", *here.client("bob", here.port)),
    ):
        wait_for(lambda: seen.look() or server.poll() is not None)
        assert server.wait(SECONDS) == 0
    seen.look()
    assert len(seen.own) > 3
    assert len(seen.secret) > 1000
    heard = (tmp_path / "ann.txt").read_text()
    stays = "leave this machine each round you take part in; router, specialist, text and optimiser state stay"
    assert heard.index(stays) < heard.index("round 1: ")
    sent = pairs_in(bytes(proxy.carried[0]) + bytes(proxy.carried[1]))
    assert np.intersect1d(sent, seen.all_shared).size > 1000, "the comparison finds nothing, not even what is sent"
    assert np.intersect1d(sent, seen.secret).size == 0
    assert_no_text(bytes(proxy.carried[0]), Path(here.users["ann"]).read_bytes())


def assert_no_text(sent: bytes, text: bytes) -> None:
    """Neither as text, nor as numbers of its characters, which a tokenizer of bytes makes of it."""
    assert len(sent) > 10_000
    for at in range(0, len(text) - WORDS_CHARACTERS, WORDS_CHARACTERS // 2):
        words = text[at : at + WORDS_CHARACTERS]
        for width in (1, 4, 8):
            assert b"".join(byte.to_bytes(width, "little") for byte in words) not in sent, words


def test_bytes_on_the_wire_are_little_more_than_the_messages(tmp_path: Path) -> None:
    """Of messages of some 20 MB: what Flower says besides, and how often it asks, is a small part."""
    recipe = large(recipe_of(tmp_path, "fedavg"))
    here = Place.of(tmp_path, recipe)
    with (
        Proxy(here.port) as proxy,
        command(tmp_path, "server", *here.server()) as server,
        command(tmp_path, "ann", *here.client("ann", proxy.own)),
        command(tmp_path, "bob", *here.client("bob", here.port)),
    ):
        assert server.wait(SECONDS) == 0
    known = json.loads((tmp_path / "apart" / "participants.json").read_text())["users"]["ann"]
    for way, (carried, packed) in {
        "up": (proxy.carried[0], known["upload_bytes"]),
        "down": (proxy.carried[1], known["download_bytes"]),
    }.items():
        assert packed > 2 * 15_000_000
        assert packed < len(carried) <= 1.02 * packed, (way, len(carried) / packed)


def large(recipe: Recipe) -> Recipe:
    changes = {"base": "random:llama?dim=512&layers=2", "adapters.rank": 256, "training.local_steps": 1}
    return recipe.with_changes(changes | {"evaluation.every": 3, "training.batch_size": 1})
