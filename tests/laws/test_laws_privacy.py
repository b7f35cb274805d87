"""Nothing of a user reaches another but what the method shares, and that is the mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comingle.engines.exchange import WIRE_DTYPE, build_uploads, upload_bytes
from safetensors.torch import save
from torch import Tensor

from comingle.adapters.inject import ATTENTION, GENERALIST, ROUTER, SPECIALIST
from comingle.methods import make
from comingle.methods.base import Method
from comingle.methods.server import mean
from comingle.transports.inprocess import InProcess
from federations import exchange, local_round

EVERYONE = [0, 1, 2]
SHORT = {"training.local_steps": 3}
FACTORS = {"ffa-lora": (".b",), "fedsa-lora": (".a",)}
"""What travels of each LoRA, where that is not both factors."""


def wire_bytes(tensors: dict[str, Tensor]) -> int:
    """Bytes of the tensors in a safetensors file, without its header."""
    content = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    return len(content) - 8 - int.from_bytes(content[:8], "little")


def real_uploads(federation: InProcess, method: Method, row: int) -> dict[str, Tensor]:
    """What a user sends, experts that it does not have left out."""
    uploads = build_uploads(method, federation.clients.model.layout, federation.clients.state.rows)
    real = build_uploads(method, federation.clients.model.layout, federation.clients.mask.double())
    present = {name: real[name][row].flatten(1).any(1) for name in uploads}
    return {name: uploads[name][row][keep].to(WIRE_DTYPE) for name, keep in present.items() if keep.any()}


def test_a_users_text_never_moves_another_users_tensors(
    federate: Any, make_user: Any, federated: dict[str, Any]
) -> None:
    before_exchange, after_exchange = [], []
    for text in ("", "another text"):
        federation = federate(federated, users=("ann", make_user("bob", text=text), "cem"), changes=SHORT)
        local_round(federation, EVERYONE, 0)
        before_exchange.append(federation.clients.state.rows.clone())
        exchange(federation, EVERYONE)
        after_exchange.append(federation.clients.state.rows.clone())
    assert not torch.equal(before_exchange[0][1], before_exchange[1][1])
    assert torch.equal(before_exchange[0][[0, 2]], before_exchange[1][[0, 2]])
    rerouted = {"router"} if federation.clients.method.reroute else set()  # out of the components that all have made
    local = ~federation.clients.model.layout.mask(federation.clients.method.shared | rerouted)
    assert torch.equal(after_exchange[0][[0, 2]][:, local], after_exchange[1][[0, 2]][:, local])
    heard = not torch.equal(after_exchange[0][0], after_exchange[1][0])
    if federation.clients.method.picks:  # nobody need be in Ann's cluster
        return
    assert heard == bool(federation.clients.model.layout.mask(federation.clients.method.shared).any())


@pytest.mark.parametrize("weighting", ["uniform", "tokens"])
@pytest.mark.parametrize("members", [[0, 1, 2], [0, 2]], ids=["all", "without bob"])
def test_the_exchange_is_the_mean_of_what_is_shared(
    federate: Any, make_user: Any, averaged: dict[str, Any], weighting: str, members: list[int]
) -> None:
    users = [make_user("ann", train=100), make_user("bob", train=200), make_user("cem", train=300)]
    federation = federate(averaged, users=users, changes={"training.weighting": weighting})
    local_round(federation, members, 0)
    before = federation.clients.state.rows.clone()
    exchange(federation, members)
    shared = federation.clients.model.layout.mask(federation.clients.method.shared)
    assert torch.equal(federation.clients.state.rows[:, ~shared], before[:, ~shared])
    share = {user: (100.0, 200.0, 300.0)[user] if weighting == "tokens" else 1.0 for user in members}
    expected = sum(before[user] * weight for user, weight in share.items()) / sum(share.values())
    for row in EVERYONE:  # the absent download too
        assert torch.equal(federation.clients.state.rows[row, shared], federation.clients.state.rows[0, shared])
        torch.testing.assert_close(federation.clients.state.rows[row, shared], expected[shared], rtol=1e-12, atol=1e-15)
    assert not federation.clients.state.rows[~federation.clients.mask].any()


def test_only_shared_roles_are_uploaded(federate: Any, method: dict[str, Any]) -> None:
    federation = federate(method)
    uploads = build_uploads(federation.clients.method, federation.clients.model.layout, federation.clients.state.rows)
    expected, roles = {}, {name.partition(".")[0] for name in federation.clients.method.shared}
    assert roles <= {ATTENTION, GENERALIST, "base", "statistics"}
    for slot in federation.clients.model.layout.slots:
        travels = slot.name[-2:] in FACTORS.get(federation.clients.method.name, (".a", ".b"))
        places = [i for i, role in enumerate(slot.roles) if travels and role in roles]
        if places:
            tensor = federation.clients.model.layout.views(federation.clients.state.rows)[slot.name]
            expected[slot.name] = tensor if slot.roles == (ATTENTION,) else tensor[:, places]
    assert uploads.keys() == expected.keys()
    assert all(torch.equal(uploads[name], expected[name]) for name in expected)
    assert not any(name.endswith(".router") for name in uploads)


def test_bytes_counted_are_bytes_sent(federate: Any, method: dict[str, Any]) -> None:
    federation = federate(method)
    rows = range(len(federation.clients.trainers))
    picked = 4 * bool(federation.clients.method.picks)  # which model a user took
    sent = [wire_bytes(real_uploads(federation, federation.clients.method, row)) + picked for row in rows]
    assert federation.clients.upload_bytes() == [
        sent[row] for row in federation.clients.owners(federation.clients.row_of)
    ]
    assert all(sent) == bool(federation.clients.method.shared)


def test_bytes_of_unequal_users_leave_padding_out(federate: Any) -> None:
    """A method that would share everything: users of 1, 2 and 3 experts send what they have."""
    federation = federate({"name": "comigs", "specialists": [0, 1, 2]})
    everything = Method(name="all", shared=frozenset({ATTENTION, GENERALIST, SPECIALIST, ROUTER}), server=mean)
    counted = upload_bytes(everything, federation.clients.model.layout, federation.clients.mask)
    assert counted == [wire_bytes(real_uploads(federation, everything, row)) for row in EVERYONE]
    assert counted == [4 * count for count in federation.clients.trainable_parameters()]


def test_what_is_not_shared_costs_nothing(federate: Any) -> None:
    for name in ("pretrained", "local", "centralized", "local-moe", "local-moe-tr", "comigs-2s"):
        assert federate(name).upload_bytes() == [0, 0, 0]


def test_the_papers_share_of_what_travels(federate: Any) -> None:
    """CoMiGS-1G1S sends attention and one of two experts; FedAvg, as large save the routers, sends all that it has."""
    comigs, fedavg = federate("comigs-1g1s"), federate("fedavg")
    assert fedavg.clients.upload_bytes()[0] == 4 * fedavg.clients.trainable_parameters()[0]
    routers = sum(slot.size for slot in comigs.clients.model.layout.slots if slot.name.endswith(".router"))
    assert comigs.clients.trainable_parameters()[0] == fedavg.clients.trainable_parameters()[0] + routers
    specialists = comigs.clients.model.layout.mask({SPECIALIST}).sum().item()
    assert comigs.clients.upload_bytes()[0] == fedavg.clients.upload_bytes()[0] - 4 * specialists


SAME_ALONE = [
    ("fedavg", "local"),
    ("fedavg-moe", "local-moe"),
    ("pfedmoe", "local-moe"),
    ("fedavg-moe-tr", "local-moe-tr"),
    ("comigs-tr", "local-moe-tr"),
    ("comigs-2g", "comigs-2s"),
    ("comigs-1g1s", "comigs-2s"),
]


@pytest.mark.parametrize(("shared", "alone"), SAME_ALONE, ids=[f"{a} is {b}" for a, b in SAME_ALONE])
def test_one_user_alone_makes_sharing_nothing(federate: Any, shared: str, alone: str) -> None:
    """The mean of one is that one: from the same start, over two rounds and an exchange, bit for bit."""
    period = {"router_every": 2, "router_steps": 1} if len(make(shared).phases) > 1 else {}
    first, second = (federate({"name": name, **period}, users=("ann",)) for name in (shared, alone))
    second.clients.state.rows.copy_(first.clients.state.rows)
    for number in range(2):
        for federation in (first, second):
            local_round(federation, [0], number)
        before = first.clients.state.rows.clone()
        exchange(first, [0])
        exchange(second, [0])
        assert torch.equal(first.clients.state.rows, before)
        assert torch.equal(first.clients.state.rows, second.clients.state.rows)


def test_a_method_shares_only_what_it_trains(federate: Any, method: dict[str, Any]) -> None:
    federation = federate(method)
    trained, shared = (
        federation.clients.model.layout.mask(roles)
        for roles in (federation.clients.method.client.trained, federation.clients.method.shared)
    )
    assert not (shared & ~trained).any()
    assert not (shared & federation.clients.model.layout.mask({SPECIALIST, ROUTER})).any()


@pytest.mark.parametrize("name", ["fedavg", "floral", "ifca", "pcl", "local"])
def test_what_is_said_beside_the_tensors_is_counted(federate: Any, name: str) -> None:
    """Where means are weighted a user says how much it has; mixtures and choices are sent, and not received."""
    by_count, uniform = (federate(name, changes={"training.weighting": w}) for w in ("tokens", "uniform"))
    uploads = build_uploads(uniform.clients.method, uniform.clients.model.layout, uniform.clients.state.rows)
    tensors = sum(t[0].numel() for t in uploads.values()) * 4
    said = {"fedavg": 0, "floral": 4 * 4, "ifca": 4, "pcl": 0, "local": 0}[name]
    counts = 4 if name in ("fedavg", "floral", "ifca") else 0
    assert uniform.clients.upload_bytes() == [tensors + said] * 3
    assert by_count.clients.upload_bytes() == [tensors + said + counts] * 3
    models = {"ifca": 5, "pcl": 1, "floral": 1, "fedavg": 1, "local": 1}[name]
    for federation in (uniform, by_count):  # with two members PCL's each receive one model
        assert federation.exchanged_bytes([0, 2])[1] == 2 * models * tensors
