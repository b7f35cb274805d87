"""A strategy is told the role of each tensor that it receives, and the table of the documentation is true."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import comingle
from comingle.methods import make
from comingle.methods.server import Mean, Received, ServerSetup
from comingle.utils.trees import Tree

PAGE = Path(__file__).parents[2] / "docs" / "own-method.md"
TEXTS = {n: [f"{n} counts {i}, then {i * 7 % 50} and {i % 5}." for i in range(60)] for n in ("ada", "ben", "cem")}
RECIPE: dict[str, Any] = {
    "base": "random:llama?layers=2&dim=32",
    "adapters": {"rank": 4},
    "training": {"rounds": 1, "local_steps": 1, "batch_size": 1, "context": 16},
    "evaluation": {"model": "exchanged", "first": False},
}


@dataclass(frozen=True, kw_only=True)
class Listens(Mean):
    """A mean that keeps what it is told."""

    told: list[Received]
    setups: list[ServerSetup]

    def start(self, setup: ServerSetup) -> Tree:
        self.setups.append(setup)
        return super().start(setup)

    def aggregate(self, kept: Tree, received: Received) -> None:
        self.told.append(received)
        super().aggregate(kept, received)


def told(method: str, **changes: Any) -> tuple[Received, ServerSetup]:
    """What the server of a method is told, in a run with one round."""
    server = Listens(told=[], setups=[])
    comingle.run(RECIPE, users=TEXTS, method=replace(make(method), name="listening", server=server), **changes)
    return server.told[-1], server.setups[-1]


@pytest.mark.parametrize(
    ("method", "roles"),
    [
        ("fedavg", {"attention", "generalist"}),
        ("ffa-lora", {"attention", "generalist"}),
        ("comigs-1g1s", {"attention", "generalist"}),  # its experts' tensors hold specialists too, which stay
    ],
)
def test_every_tensor_has_its_role(method: str, roles: set[str]) -> None:
    received, setup = told(method)
    assert received.roles.keys() == received.tensors.keys()
    assert setup.roles.keys() == setup.models.keys()
    assert {role for of in received.roles.values() for role in of if "." not in role} == roles
    for name, of in received.roles.items():
        assert ("attention" in of) == ("attn" in name)
        assert f"{'attention' if 'attn' in name else 'generalist'}.{name.rpartition('.')[2]}" in of


@pytest.mark.parametrize(
    "changes",
    [
        {"privacy": {"noise_multiplier": 0.01, "accountant": "rdp"}},
        {"aggregation": "median"},
    ],
)
def test_also_where_the_upload_is_nobodys(changes: dict[str, Any]) -> None:
    received, _ = told("fedavg", **changes)
    assert len(received.weights) == 1
    assert received.roles.keys() == received.tensors.keys()


def test_the_table_is_true() -> None:
    received, _ = told("fedavg")
    sizes = {"U": 3, "E": 2, "R": 4, "D": 32, "M": 88}
    rows = re.findall(
        r"^\| `(layers[^`]+)` \| `\(([^)]+)\)` \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(rows) == 6
    for name, shape, roles in rows:
        assert tuple(received.tensors[name].shape) == tuple(sizes[letter] for letter in shape.split(", "))
        assert received.roles[name] == set(re.findall(r"`([^`]+)`", roles))


def test_nets_too() -> None:
    server = Listens(told=[], setups=[])
    data = {name: torch.utils.data.TensorDataset(torch.randn(20, 3), torch.randn(20, 1)) for name in "ab"}
    recipe: dict[str, Any] = {"training": {"rounds": 1}, "data": {"loss": "mse"}, "evaluation": {"model": "exchanged"}}
    method = replace(make("fedavg"), name="listening", server=server)
    comingle.run(recipe, users=data, base=lambda: torch.nn.Linear(3, 1), method=method)
    assert server.told[-1].roles["weight"] == {"base", "base.head"}
