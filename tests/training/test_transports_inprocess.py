"""The transport in one process: what it moves, for whom, and what it counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from comingle.protocol.messages import LOSS, VALIDATION, Download, Upload
from comingle.protocol.wire import pack
from comingle.training.backends import local
from comingle.training.backends.local import InProcess
from comingle.utils.errors import MessageError
from federations import download_all, everyone, exchange, message_bytes

MEMBERS = [0, 2]
BEST = {"evaluation.select": "best"}


def damaged(message: Download | Upload) -> bytes:
    """What arrives without its last byte."""
    return pack(message)[:-1]


STEPS: dict[str, Callable[[InProcess], None]] = {
    "download": lambda federation: federation.download(everyone(federation)),
    "upload": lambda federation: federation.upload(MEMBERS, 1, dict.fromkeys(MEMBERS, 1.0)),
    "select": lambda federation: federation.report_losses(1, {"ann": 1.0, "cem": 2.0}),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_with_serialise_every_message_is_packed_and_unpacked(
    federate: Any, monkeypatch: pytest.MonkeyPatch, step: Callable[[InProcess], None]
) -> None:
    federation = federate({"name": "fedmerge", "models": 2}, changes=BEST)
    federation.serialise = True
    monkeypatch.setattr(local, "pack", damaged)
    with pytest.raises(MessageError, match=r"^message: got \d+ bytes, .* \d+; allowed"):
        step(federation)


def test_an_upload_carries_each_users_own_loss(federate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    federation: InProcess = federate("fedavg")
    arrived: list[Upload] = []
    monkeypatch.setattr(federation.server, "aggregate", arrived.append)
    federation.upload([2, 0], 1, {0: 0.25, 1: 0.5, 2: 0.75})
    federation.aggregate()
    assert arrived[0].users == ("cem", "ann")
    assert arrived[0].reports[LOSS].tolist() == [0.75, 0.25]


def shared_addresses(federation: InProcess) -> list[bool]:
    """Whether each tensor of an upload of users 0 and 1 lies in the memory of the users' tensors."""
    federation.upload([0, 1], 1, dict.fromkeys([0, 1], 1.0))
    assert federation._upload_of_round is not None
    storage = federation.clients.state.rows.untyped_storage().data_ptr()
    return [t.untyped_storage().data_ptr() == storage for t in federation._upload_of_round.tensors.values()]


@pytest.mark.parametrize(
    ("method", "changes", "shared"),
    [
        ("fedavg", {}, True),
        ("fedprox", {}, True),
        ("flora-stacking", {}, False),  # its server keeps the uploads
        ("fedavg", {"aggregation.rule": "median"}, False),
        ("fedavg", {"privacy.clip_norm": 1.0, "privacy.noise_multiplier": 1.0}, False),
    ],
)
def test_only_a_server_that_adds_up_uploads_reads_the_users_own_tensors(
    federate: Any, method: str, changes: dict[str, Any], shared: bool
) -> None:
    addresses = shared_addresses(federate(method, changes=changes))
    assert any(addresses) == shared
    assert all(addresses) == shared


def test_validation_losses_are_counted_and_the_best_round_alone_is_remembered(federate: Any) -> None:
    federation = federate("fedavg", changes=BEST)
    for done, (loss, best) in enumerate([(2.0, 1), (2.5, 1), (1.5, 3)], start=1):
        before, received = federation.clock.upload_bytes, federation.clock.download_bytes
        federation.clients.state.rows.fill_(float(done))
        federation.report_losses(done, {"ann": loss, "cem": loss})
        header = {"kind": "upload", "round": done, "rank": 0}
        reports = {VALIDATION: torch.tensor(loss, dtype=torch.float64)}
        wanted = sum(message_bytes({}, header | {"user": name}, reports) for name in ("ann", "cem"))
        assert federation.clock.upload_bytes - before == wanted
        answer = {"lowest_loss": torch.tensor([int(best == done)])}
        header = {"kind": "download", "version": done, "rank": 0}
        wanted = sum(message_bytes(answer, header | {"user": name}, {}) for name in ("ann", "cem"))
        assert federation.clock.download_bytes - received == wanted
        assert federation.clients.chosen_round == best
        assert bool((federation.clients.state.best["rows"] == best).all())


def test_peers_hear_at_once_of_all_who_took_part_and_the_relay_forgets(federate: Any) -> None:
    federation = download_all(federate({"name": "pcl", "exchange_from": 1}))
    absent = federation.clients.state.rows[1].clone()
    exchange(federation, MEMBERS, 1, download=False)
    assert federation.clients.state.versions.tolist() == [1, 0, 1]
    assert not federation.server.kept
    received = federation.clock.download_bytes
    download_all(federation)  # nothing is left for who was absent
    assert federation.clock.download_bytes == received
    assert torch.equal(federation.clients.state.rows[1], absent)
