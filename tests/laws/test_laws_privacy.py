"""Nothing of a user reaches another but what the method shares, and that is the mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from comingle.methods import make
from comingle.methods.base import Method
from comingle.methods.clustered import ChooseModel
from comingle.methods.mixtures import Entropic
from comingle.methods.momentum_clustering import Momentum
from comingle.protocol.messages import COUNT, LOSS, Upload
from comingle.training.backends.local import InProcess
from comingle.utils.trees import ATTENTION, GENERALIST, ROUTER, SPECIALIST, restrict
from federations import crossing, exchange, local_round, message_bytes

EVERYONE = [0, 1, 2]
SHORT = {"training.local_steps": 3}


def meant_for_others(method: Method) -> set[str]:
    """Roles that users keep to themselves, but for those whose servers keep something of each user for the others."""
    return {SPECIALIST, ROUTER} & method.shared if method.server.by_user else set()


def travels(method: Method, name: str) -> bool:
    """Whether a method's placement says that a tensor of a shared role travels, by the tensor's name."""
    factors = {f".{part}" for role in method.shared if (part := role.partition(".")[2]) in ("a", "b", "r")} or {
        ".a",
        ".b",
    }
    factors |= {".router"} if ROUTER in method.shared else set()
    last_mlp_stays = f"{GENERALIST}.body" in method.shared  # of a base of one layer
    return name.endswith(tuple(factors)) and not (last_mlp_stays and name.startswith("layers.0.mlp"))


def sent_by(federation: InProcess) -> Upload:
    """What everybody would send now."""
    everyone = range(len(federation.clients.trainers))
    return federation.clients.upload(everyone, 1, {LOSS: torch.zeros(len(everyone))})


def documented_bytes(federation: InProcess, row: int) -> int:
    """The length of what a user sends, by the documented format: shared tensors, its loss, and what its method says."""
    clients, user = federation.clients, federation.clients.trainers[row]
    tensors = restrict(clients.model.layout.views(clients.state.rows), clients.model.layout, clients.method.shared)
    reports = {LOSS: torch.zeros(())}
    if clients.plan.training.weighting != "uniform":
        reports[COUNT] = torch.tensor(len(user.train))
    for part in clients.method.client.parts:
        for name, report in part.reports.items():
            reports[name] = torch.zeros(report.shape, dtype=torch.int64 if report.whole else torch.float64)
    rank = int(clients.state.ranks[row])
    header = {"kind": "upload", "round": 1, "user": user.name, "rank": rank}
    return message_bytes({name: t[row] for name, t in tensors.items()}, header, reports)


@pytest.mark.sampled(7)
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
    parts = federation.clients.method.client.parts
    # Routers out of the components that all have made.
    rerouted = {"router"} if any(isinstance(part, Entropic) for part in parts) else set()
    method = federation.clients.method
    local = ~federation.clients.model.layout.mask(method.shared | method.received | rerouted)
    assert torch.equal(after_exchange[0][[0, 2]][:, local], after_exchange[1][[0, 2]][:, local])
    heard = not torch.equal(after_exchange[0][0], after_exchange[1][0])
    if any(isinstance(part, ChooseModel | Momentum) for part in parts):  # nobody need be in Ann's cluster
        return
    assert heard == bool(federation.clients.model.layout.mask(federation.clients.method.shared).any())


@pytest.mark.sampled(27)
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
    uploads = sent_by(federation).tensors
    first_copy = federation.clients.state.rows[: len(federation.clients.trainers)]
    expected, roles = {}, {name.partition(".")[0] for name in federation.clients.method.shared}
    sent = meant_for_others(federation.clients.method)
    assert roles <= {ATTENTION, GENERALIST, "base", "statistics"} | sent
    for slot in federation.clients.model.layout.slots:
        goes = travels(federation.clients.method, slot.name)
        places = [i for i, role in enumerate(slot.roles) if goes and role in roles]
        if places:
            tensor = federation.clients.model.layout.views(first_copy)[slot.name]
            expected[slot.name] = tensor if slot.roles == (ATTENTION,) else tensor[:, places]
    assert uploads.keys() == expected.keys()
    assert all(torch.equal(uploads[name], expected[name]) for name in expected)
    assert any(name.endswith(".router") for name in uploads) == (ROUTER in sent)


def test_bytes_counted_are_bytes_sent(federate: Any, method: dict[str, Any]) -> None:
    """The whole message, as documented, of each user."""
    federation = federate(method)
    clients = federation.clients
    counted = clients.upload_bytes()
    if not clients.method.shared:
        assert not any(counted)
        return
    assert counted == [documented_bytes(federation, row) for row in clients.trainers_of(clients.row_of)]


def test_bytes_of_users_of_unequal_rank_leave_padding_out(federate: Any) -> None:
    """Users of ranks 1, 2 and 4 send what each would send if all had its rank."""
    ranks = (1, 2, 4)
    mixed = federate("fedavg", changes={"adapters.rank": list(ranks)}).clients.upload_bytes()
    alike = [federate("fedavg", changes={"adapters.rank": rank}).clients.upload_bytes() for rank in ranks]
    assert mixed == [counted[user] for user, counted in enumerate(alike)]
    assert len(set(mixed)) == len(ranks)


def test_what_is_not_shared_costs_nothing(federate: Any) -> None:
    for name in ("pretrained", "local", "centralized", "local-moe", "local-moe-tr", "comigs-2s"):
        assert federate(name).clients.upload_bytes() == [0, 0, 0]


def test_the_papers_share_of_what_travels(federate: Any) -> None:
    """CoMiGS-1G1S sends attention and one of two experts; FedAvg, as large save the routers, sends all that it has."""
    comigs, fedavg = federate("comigs-1g1s"), federate("fedavg")
    sent, sent_by_fedavg = (sum(t[0].numel() for t in sent_by(f).tensors.values()) for f in (comigs, fedavg))
    assert sent_by_fedavg == fedavg.clients.trainable_parameters()[0]
    routers = sum(slot.size for slot in comigs.clients.model.layout.slots if slot.name.endswith(".router"))
    assert comigs.clients.trainable_parameters()[0] == fedavg.clients.trainable_parameters()[0] + routers
    specialists = comigs.clients.model.layout.mask({SPECIALIST}).sum().item()
    assert sent == sent_by_fedavg - specialists


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
    period = {"router_every": 2, "router_steps": 1} if len(make(shared).client.phases) > 1 else {}
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
    """Or what it makes once, before users train beside it."""
    federation = federate(method)
    method_of = federation.clients.method
    trained, shared = (
        federation.clients.model.layout.mask(roles)
        for roles in (method_of.client.trained | method_of.placement.once, method_of.shared)
    )
    assert not (shared & ~trained).any()
    local = {SPECIALIST, ROUTER} - meant_for_others(federation.clients.method)
    assert not (shared & federation.clients.model.layout.mask(local)).any()


@pytest.mark.parametrize("name", ["fedavg", "floral", "ifca", "pcl", "local"])
def test_what_is_said_beside_the_tensors_is_counted(federate: Any, name: str) -> None:
    """Where means are weighted a user says how much it has; mixtures and choices are sent, and not received."""
    by_count, uniform = (federate(name, changes={"training.weighting": w}) for w in ("tokens", "uniform"))
    said = {
        "floral": {"mixture": torch.zeros(4, dtype=torch.float64)},
        "ifca": {"choice": torch.tensor(0)},
    }.get(name, {})
    for federation, count in ((uniform, {}), (by_count, {COUNT: torch.tensor(120)})):
        reports = {LOSS: torch.zeros(()), **said, **count}
        tensors = sent_by(federation).tensors
        users = zip(federation.clients.trainers, federation.clients.state.ranks.tolist(), strict=True)
        expected = [
            message_bytes(
                {n: t[0] for n, t in tensors.items()},
                {"kind": "upload", "round": 1, "user": user.name, "rank": rank},
                reports,
            )
            for user, rank in users
        ]
        assert federation.clients.upload_bytes() == (expected if tensors else [0, 0, 0])
        check_download(federation, name, tensors)


def check_download(federation: InProcess, name: str, tensors: dict[str, Tensor]) -> None:
    """IFCA's users receive five models, PCL's two members each other's; nobody receives reports."""
    models = {"ifca": 5}.get(name, 1)
    received = 0
    for user in (0, 2) if tensors else ():
        rank = int(federation.clients.state.ranks[user])
        owner = federation.clients.name(user)
        header: dict[str, Any] = {"kind": "download", "version": 1, "user": owner, "rank": rank}
        header |= {"senders": ["ann", "cem"]} if name == "pcl" else {}
        received += message_bytes({n: t[:1].expand(models, *t.shape[1:]) for n, t in tensors.items()}, header, {})
    federation.download(range(3))  # what there is before the first round
    assert crossing(federation, [0, 2])[1] == received
