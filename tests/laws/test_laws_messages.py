"""What crosses between users and the server: messages alone, of those who take part, without anything local."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from comingle.methods import REGISTRY, make, settings_of
from comingle.methods.settings import allowed_values
from comingle.protocol.messages import LOSS, Download, Upload
from comingle.protocol.wire import pack, packed_bytes, unpack
from comingle.training.backends import local as inprocess
from comingle.training.backends.local import InProcess
from comingle.utils.trees import ADAPTOR, BASE, CLIENT_ROUTER
from federations import download_all, local_round, play_round

RANKED = {"fedavg", "comigs-1g1s", "hetlora", "flexlora", "pcl", "fdlora"}
"""Methods that are also tried with ranks per user."""

ROUNDS = 2
HALF = {"training.participation": 0.5, "training.rounds": ROUNDS, "evaluation.model": "exchanged"}


def played(federation: InProcess) -> tuple[dict[str, Tensor], list[dict[int, float]]]:
    """Everything that both halves have after two rounds with half of the users, and everybody's losses."""
    users = len(federation.clients.trainers)
    members = [[user for user in range(users) if (user + number) % 2 == 0] for number in range(ROUNDS)]
    losses = [play_round(federation, number, members[number]).losses for number in range(ROUNDS)]
    download_all(federation)
    kept = {f"server/{name}": t for name, t in federation.server.state.items()}
    return federation.clients.state.tensors() | kept, losses


def equal(one: InProcess, two: InProcess) -> None:
    """Both bit for bit, but for zeros' signs in padding."""
    (wanted, losses), (found, again) = played(one), played(two)
    assert again == losses
    assert found.keys() == wanted.keys()
    for name, t in wanted.items():
        assert torch.equal(found[name], t), name
    assert (one.clock.upload_bytes, one.clock.download_bytes) == (two.clock.upload_bytes, two.clock.download_bytes)


def soon(method: dict[str, Any]) -> dict[str, Any]:
    """The method with exchanges from the first round on."""
    early = {"exchange_from": 1, "exchange_every": 1}
    return {**method, **{key: n for key, n in early.items() if key in settings_of(method["name"])}}


@pytest.mark.sampled(7)
def test_messages_on_a_wire_change_nothing(federate: Any, federated: dict[str, Any]) -> None:
    one, two = (federate(soon(federated), dtype="float32", changes=HALF) for _ in range(2))
    two.serialise = True
    equal(one, two)


@pytest.mark.sampled(4)
def test_messages_of_nets_on_a_wire_change_nothing(federate_nets: Any, netted: dict[str, Any]) -> None:
    one, two = (federate_nets(netted, changes={**HALF, "runtime.dtype": "float32"}) for _ in range(2))
    two.serialise = True
    equal(one, two)


@pytest.mark.parametrize("name", sorted(RANKED))
def test_messages_of_users_of_unequal_rank_on_a_wire_change_nothing(federate: Any, name: str) -> None:
    changes = {**HALF, "adapters.rank": [2, 3, 1]}
    one, two = (federate(soon({"name": name}), dtype="float32", changes=changes) for _ in range(2))
    two.serialise = True
    equal(one, two)


# ---------------------------------------------------------------- who is heard


def poisoned_round(federation: InProcess, members: Sequence[int], poison: bool) -> tuple[Any, ...]:
    """What the server has and what participants have after a round, absent users' rows maybe being NaN meanwhile."""
    clients, users = federation.clients, len(federation.clients.trainers)
    work = local_round(federation, members, 0)
    rows, taking_part = clients.state.rows, [row for row in range(len(clients.state.rows)) if row % users in members]
    before, away = rows.clone(), [row for row in range(len(rows)) if row not in taking_part]
    if poison:
        rows[away] = torch.nan
    if clients.shares:
        federation.upload(members, 1, work.losses)
        federation.aggregate()
    rows[away] = before[away]
    federation.download(members)
    return federation.server.state, clients.state.rows[taking_part], before


def heard(make_federation: Any, users: int) -> None:
    members = [user for user in range(users) if user != 1]
    (kept, theirs, _), (server, found, _) = (poisoned_round(make_federation(), members, p) for p in (False, True))
    assert torch.equal(found, theirs)
    assert server.keys() == kept.keys()
    for name, t in kept.items():
        assert torch.equal(server[name], t), name


@pytest.mark.sampled(7)
def test_only_participants_reach_the_server(federate: Any, federated: dict[str, Any]) -> None:
    heard(lambda: federate(soon(federated)), 3)


@pytest.mark.sampled(7)
def test_only_participants_reach_the_server_with_nets(federate_nets: Any, netted: dict[str, Any]) -> None:
    heard(lambda: federate_nets(netted), 4)


def aggregated(federation: InProcess, members: list[int]) -> tuple[dict[str, Tensor], list[Download]]:
    """What the server has after these users' uploads in this order, and what it sends to the first and the third.

    They are answered together, and the third is by itself.
    """
    clients, server = federation.clients, federation.server
    work = local_round(federation, sorted(members), 0)
    server.aggregate(clients.upload(members, 1, {LOSS: torch.tensor([work.losses[member] for member in members])}))
    kept = {} if server.method.server.peer_to_peer else server.state  # a relay keeps them in their order
    names = [clients.trainers[member].name for member in (0, 2)]
    return kept, [*server.download(names).split(), server.download(names[1:])]


def by_name(make_federation: Any) -> None:
    """Uploads and downloads count by whose they are, not by the place at which they stand."""
    (kept, sent), (server, found) = (aggregated(make_federation(), members) for members in ([0, 2], [2, 0]))
    for name, t in kept.items():
        torch.testing.assert_close(server[name], t, rtol=1e-9, atol=1e-11, msg=name)
    for one, other in [*zip(sent, found, strict=True), sent[1:]]:
        for name, t in one.tensors.items():
            at = [other.senders.index(sender) for sender in one.senders] or slice(None)
            torch.testing.assert_close(other.tensors[name][:, at], t, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.sampled(7)
def test_messages_count_by_name(federate: Any, federated: dict[str, Any]) -> None:
    by_name(lambda: federate(soon(federated)))


@pytest.mark.sampled(7)
def test_messages_of_nets_count_by_name(federate_nets: Any, netted: dict[str, Any]) -> None:
    by_name(lambda: federate_nets(netted))


@pytest.mark.parametrize("name", sorted(RANKED))
def test_messages_of_users_of_unequal_rank_count_by_name(federate: Any, name: str) -> None:
    by_name(lambda: federate(soon({"name": name}), changes={"adapters.rank": [2, 3, 1]}))


def test_an_upload_is_of_those_who_took_part_and_a_copy(federate: Any, federated: dict[str, Any]) -> None:
    clients = federate(federated).clients
    sent = clients.upload([2, 0], 1, {})
    assert sent.users == ("cem", "ann")
    assert all(len(t) == 2 for t in [*sent.tensors.values(), *sent.reports.values(), sent.ranks])
    before = {name: t.clone() for name, t in sent.tensors.items()}
    clients.state.rows += 1.0
    assert all(torch.equal(sent.tensors[name], t) for name, t in before.items())


def test_users_report_the_mixture_that_they_have_after_their_local_steps(federate_nets: Any) -> None:
    federation = federate_nets({"name": "floral", "clusters": 2})
    clients = federation.clients
    mixture, views = clients.method.placement.mixture, clients.model.layout.views(clients.state.rows)
    before = mixture.shares(views[CLIENT_ROUTER]).clone()
    local_round(federation, [0, 3], 0)
    said = clients.upload([3, 0], 1, {}).reports["mixture"]
    assert torch.equal(said, mixture.shares(views[CLIENT_ROUTER])[[3, 0]])
    assert not torch.equal(said, before[[3, 0]])


# ---------------------------------------------------------------- nothing local leaves

SETTINGS = 200
MARK = 0x7FF8_0000_0000_0000
"""A NaN whose last bits are free to say which entry it is."""


def marked(federation: InProcess, seed: int) -> None:
    """Every entry that a user does not share becomes a NaN of its own."""
    clients = federation.clients
    rows, local = clients.state.rows, ~clients.model.layout.mask(clients.method.shared)
    assert rows.dtype == torch.float64
    numbers = torch.arange(rows.numel()).view_as(rows) + (seed % 1000 + 1) * 1_000_000
    rows[:, local] = (numbers + MARK).view(torch.float64)[:, local]


def carries_mark(t: Tensor) -> bool:
    """Whether any entry is one of the marks; plain NaN is none."""
    return bool((t.contiguous().view(torch.int64) > MARK).any()) if t.dtype == torch.float64 else bool(t.isnan().any())


def marks_in(packed: bytes) -> int:
    """How many marks there are at any offset of these bytes: a mark's upper bytes are F8 7F behind two zero bytes."""
    return packed.count(b"\x00\x00\xf8\x7f")


def random_case(draw: random.Random) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """A method, its settings and a recipe's changes."""
    name = draw.choice([n for n in REGISTRY if make(n).shared])
    known, settings = settings_of(name), {}
    for key in ("generalists", "models", "clusters"):
        if key in known:
            fits = allowed_values(REGISTRY[name])[key][1]
            settings[key] = draw.choice([n for n in range(2 if key != "generalists" else 1, 4) if fits(n)])
    if "chosen" in known:
        settings["chosen"] = draw.randint(1, settings["models"])
    if "specialists" in known:
        settings["specialists"] = draw.choice([0, 1, 2, [0, 1, 2], [3, 1, 1]])
    made = make(name)
    same_rank = {"models", "clusters"} & known.keys() or made.placement.mixture is not None or made.server.one_rank
    rank = draw.randint(1, 4) if same_rank else draw.choice([1, 3, [1, 2, 3], [4, 1, 2]])
    return name, settings, {"adapters.rank": rank, "seed": draw.randint(0, 99)}


@pytest.mark.parametrize("number", range(SETTINGS))
@pytest.mark.sampled(18)
def test_an_upload_holds_nothing_local(federate: Any, federate_nets: Any, number: int) -> None:
    name, settings, changes = random_case(random.Random(number))
    method = {"name": name, **settings}
    placement = make(name).placement
    for_nets = bool({BASE, ADAPTOR} & {role.partition(".")[0] for role in placement.shared}) or placement.gated
    if for_nets and (placement.mixture is not None or placement.gated or placement.needs or number % 5 == 0):
        small = {"seed": changes["seed"], "data.task.clusters": min(2, settings.get("clusters", 2))}
        federation = federate_nets(method, changes=small)
    else:
        federation = federate(method, changes=changes)
    check_upload(federation, number)


def check_upload(federation: InProcess, seed: int) -> None:
    clients = federation.clients
    everyone = list(range(len(clients.trainers)))
    clean = clients.upload(everyone, 1, {"loss": torch.zeros(len(everyone))})
    marked(federation, seed)
    local = ~clients.model.layout.mask(clients.method.shared)
    assert carries_mark(clients.state.rows) == bool(local.any())
    sent = clients.upload(everyone, 1, {"loss": torch.zeros(len(everyone))})
    assert {name: t.shape for name, t in sent.tensors.items()} == {n: t.shape for n, t in clean.tensors.items()}
    for part, plain in zip(sent.split(), clean.split(), strict=True):
        back = unpack(pack(part))
        assert isinstance(back, Upload)
        assert not any(carries_mark(t) for t in back.tensors.values())
        reported = set(back.reports) - {"mixture"}  # a router's mixture is what the method says that it reports
        assert not any(carries_mark(back.reports[name].double()) for name in reported)
        if "mixture" not in back.reports:
            assert marks_in(pack(part)) == marks_in(pack(plain))
            assert pack(part) == pack(plain)


def test_the_search_for_marks_finds_what_leaks(federate: Any) -> None:
    """The law can fail: an upload of everything is caught."""
    federation = federate({"name": "comigs-1g1s"})
    marked(federation, 1)
    clients = federation.clients
    views = clients.model.layout.views(clients.state.rows)
    leak = Upload(round=1, users=("ann",), tensors={n: t[:1] for n, t in views.items()}, ranks=torch.tensor([2]))
    assert any(carries_mark(t) for t in leak.tensors.values())
    assert marks_in(pack(leak)) > 100


# ---------------------------------------------------------------- bytes


def count_messages(federation: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """All messages of two rounds, each of whose counted bytes are those that are packed."""
    crossed: list[Download | Upload] = []

    def spy(message: Download | Upload) -> list[int]:
        crossed.extend(message.split())
        return packed_bytes(message)

    monkeypatch.setattr(inprocess, "packed_bytes", spy)
    lengths, upwards, downwards = [], 0, 0
    for number in range(ROUNDS):
        crossed.clear()
        play_round(federation, number)
        lengths = [len(pack(message)) for message in crossed]
        assert [packed_bytes(message) for message in crossed] == [[length] for length in lengths]
        upwards += sum(n for n, m in zip(lengths, crossed, strict=True) if isinstance(m, Upload))
        downwards += sum(n for n, m in zip(lengths, crossed, strict=True) if isinstance(m, Download))
    assert (federation.clock.upload_bytes, federation.clock.download_bytes) == (upwards, downwards)
    assert bool(upwards) == federation.clients.shares


@pytest.mark.sampled(12)
def test_bytes_counted_are_bytes_packed(
    federate: Any, federated: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    count_messages(federate(soon(federated), dtype="float32"), monkeypatch)


@pytest.mark.sampled(7)
def test_bytes_counted_of_nets_are_bytes_packed(
    federate_nets: Any, netted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    count_messages(federate_nets(netted), monkeypatch)
