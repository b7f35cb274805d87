"""The two halves: each goes on from its own state alone, neither holds anything of the other's, messages are copies."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import pytest
import torch

from comingle.config import load_recipe
from comingle.protocol.messages import LOSS, LOWEST, VALIDATION, Upload
from comingle.protocol.wire import packed_bytes
from comingle.runs import api
from comingle.training.backends.local import InProcess
from comingle.training.client import Clients
from comingle.training.rounds import run_rounds
from comingle.training.server import ServerHalf
from comingle.training.settings import participants
from comingle.training.state import State
from comingle.utils.records import read_events
from federations import everyone, exchange, play_round
from resuming import StoppedError, stop_in_round_3

METHODS: dict[str, Any] = {
    "fedavg": "fedavg",
    "comigs": {"name": "comigs-1g1s", "router_every": 2, "router_steps": 1},
    "fedmerge": {"name": "fedmerge", "models": 2},
    "ifca": {"name": "ifca", "models": 2},
    "fdlora": "fdlora",
    "floral": {"name": "floral", "clusters": 2, "adaptor_server_rate": 0.5},
    "pcl": {"name": "pcl", "exchange_from": 1},
    "hetlora": {"name": "hetlora", "gamma": 0.5, "regularisation": 10.0},
}
HALF = {"training.rounds": 4, "training.participation": 0.5, "training.experts.learning_rate": 0.05}

over_methods = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def play(federation: InProcess, first: int, last: int) -> None:
    """Rounds ``first`` to ``last`` - 1, with those who take part in a run."""
    clients = federation.clients
    for number in range(first, last):
        play_round(federation, number, participants(clients.plan, number, [t.name for t in clients.trainers]))


@over_methods
@pytest.mark.sampled(1)
def test_each_half_goes_on_from_its_own_state_alone(federate: Any, method: Any) -> None:
    whole = federate(method, dtype="float32", changes=HALF)
    play(whole, 0, 2)
    users, server = whole.clients.state.copy(), {name: t.clone() for name, t in whole.server.state.items()}
    sent = whole.clock.upload_bytes, whole.clock.download_bytes
    rest = federate(method, dtype="float32", changes=HALF)
    rest.clients.state = users
    rest.clients.update_masks()
    rest.server.restore(server)
    for federation in (whole, rest):
        play(federation, 2, 4)
        federation.download(everyone(federation))
    for name, t in whole.clients.state.tensors().items():
        assert torch.equal(rest.clients.state.tensors()[name], t), name
    assert rest.server.state.keys() == whole.server.state.keys()
    for name, t in whole.server.state.items():
        assert torch.equal(rest.server.state[name], t), name
    assert (whole.clock.upload_bytes - sent[0], whole.clock.download_bytes - sent[1]) == (
        rest.clock.upload_bytes,
        rest.clock.download_bytes,
    )
    assert rest.clock.upload_bytes > 0
    assert rest.clock.download_bytes > 0


def validated(*losses: float) -> Upload:
    """Users' report of their validation losses."""
    reports = {VALIDATION: torch.tensor(losses, dtype=torch.float64)}
    return Upload(round=1, users=("ann", "bob"), tensors={}, ranks=torch.zeros(2, dtype=torch.int64), reports=reports)


def lowest(server: ServerHalf, *losses: float) -> bool:
    """What the server answers to users who report these."""
    return server.judge(validated(*losses)).tensors[LOWEST].flatten().tolist() == [1, 1]


def test_the_server_says_whether_a_mean_loss_is_the_lowest_also_after_it_was_restored(federate: Any) -> None:
    server, rest = federate("fedavg").server, federate("fedavg").server
    assert [lowest(server, *losses) for losses in ((3.0, 1.0), (2.5, 1.5), (1.0, 4.0))] == [True, False, False]
    rest.restore(server.state)
    assert [lowest(rest, *losses) for losses in ((2.5, 1.6), (1.0, 2.0))] == [False, True]
    assert rest.best.loss == 1.5


# ---------------------------------------------------------------- neither holds what is the other's


def reachable(start: object) -> Iterator[object]:
    """Everything that an object leads to, but through classes, modules and the names of a function's module."""
    seen, waiting = {id(start)}, [start]
    while waiting:
        here = waiting.pop()
        yield here
        found: list[Any] = gc.get_referents(here)
        if isinstance(here, FunctionType):
            found = [here.__closure__, here.__defaults__, here.__kwdefaults__]
        for there in found:
            if id(there) not in seen and not isinstance(there, (type, ModuleType, BuiltinFunctionType)):
                seen.add(id(there))
                waiting.append(there)


def memory(start: object) -> set[int]:
    """Where the tensors lie that an object leads to."""
    tensors = [found for found in reachable(start) if isinstance(found, torch.Tensor)]
    return {t.untyped_storage().data_ptr() for t in tensors if t.untyped_storage().nbytes()}


@over_methods
def test_the_server_holds_no_row_and_the_clients_nothing_of_the_servers(federate: Any, method: Any) -> None:
    federation = federate(method, dtype="float32", changes=HALF)
    play(federation, 0, 2)
    federation.download(everyone(federation))
    server, clients = federation.server, federation.clients
    assert clients.state.rows.untyped_storage().data_ptr() in memory(clients)  # the walk finds what is there
    own = {t.untyped_storage().data_ptr() for t in clients.state.tensors().values() if t.numel()}
    assert not own & memory(server)
    assert not any(isinstance(found, (Clients, State)) for found in reachable(server))
    kept = {t.untyped_storage().data_ptr() for t in server.kept.values() if t.numel()}
    assert kept <= memory(server)
    assert not kept & memory(clients)
    assert not any(isinstance(found, ServerHalf) for found in reachable(clients))


@over_methods
def test_uploads_are_copies(federate: Any, method: Any) -> None:
    clients = federate(method, dtype="float32", changes=HALF).clients
    message = clients.upload([0, 1], 1, {LOSS: torch.zeros(2)})
    assert message.tensors
    sent = {name: t.clone() for name, t in (message.tensors | message.reports).items()}
    ranks, rows = message.ranks.clone(), clients.state.rows.clone()
    clients.state.rows += 1
    clients.state.ranks += 1
    for t in clients.state.kept.values():
        t += 1
    assert torch.equal(message.ranks, ranks)
    for name, t in (message.tensors | message.reports).items():
        assert torch.equal(t, sent[name]), name
        t += 3
    assert torch.equal(clients.state.rows, rows + 1)


# ---------------------------------------------------------------- who downloads when


def test_the_absent_download_when_they_take_part_or_are_evaluated_and_once_a_version(federate: Any) -> None:
    """Of five downloads in three rounds, two are of those who come back, three before the evaluation."""
    in_turn = {"training.rounds": 3, "training.participation": [["ann"], ["bob"], ["cem"]]}
    federation = federate("fedavg", changes={**in_turn, "evaluation.every": 3, "evaluation.first": False})
    message = federation.server.download(("ann",))
    received = []
    for number in range(3):
        play_round(federation, number, [number])
        received.append(federation.clock.download_bytes)
        assert federation.clients.state.versions.tolist() == [0, 1, 2][: number + 1] + [0] * (2 - number)
    assert received == [0, sum(packed_bytes(message)), 2 * sum(packed_bytes(message))]
    for _ in range(2):
        federation.download(everyone(federation))
        assert federation.clock.download_bytes == 5 * sum(packed_bytes(message))
    assert federation.clients.state.versions.tolist() == [3, 3, 3]


@pytest.mark.parametrize(("model", "behind"), [("local", 1), ("exchanged", 0)])
def test_the_absent_are_evaluated_with_what_the_server_has(federate: Any, model: str, behind: int) -> None:
    """Local models are those before a round's exchange: who is absent has the model of the round before."""
    in_turn = {"training.rounds": 3, "training.participation": [["ann"], ["bob"], ["cem"]]}
    federation = federate("fedavg", changes={**in_turn, "evaluation.model": model, "evaluation.every": 1})
    versions: dict[int, list[int]] = {}

    def observe(event: dict[str, Any]) -> None:
        if event["event"] == "evaluation":
            versions[event["round"]] = federation.clients.state.versions.tolist()

    run_rounds(federation, observe=observe)
    assert versions == {0: [0, 0, 0], **{done: [done - behind] * 3 for done in (1, 2, 3)}}


def test_versions_are_rounds_also_where_not_every_round_ends_with_an_exchange(federate: Any) -> None:
    federation = federate("fedavg")
    for done in (3, 6):
        exchange(federation, [0, 2], done)
        message = federation.server.download(["ann"])
        assert (message.version, federation.server.version) == (done, done)
        assert federation.clients.state.versions.tolist() == [done] * 3


def test_peers_answer_those_alone_who_have_sent_something(federate: Any) -> None:
    federation = federate(METHODS["pcl"])
    clients, server, names = federation.clients, federation.server, ["ann", "bob", "cem"]
    assert server.with_download(names) == []
    server.aggregate(clients.upload([2, 0], 1, {LOSS: torch.zeros(2)}))
    assert server.with_download(names) == ["ann", "cem"]


@pytest.mark.parametrize("method", [METHODS["pcl"], "fedavg", METHODS["fedmerge"]], ids=["pcl", "fedavg", "fedmerge"])
@pytest.mark.sampled(1)
def test_a_resumed_run_has_sent_and_received_what_the_undisturbed_one_has(
    recipe_file: Path, tmp_path: Path, method: Any
) -> None:
    recipe = load_recipe(recipe_file).with_changes({"method": method, "training.participation": 0.5})

    whole = api.run(recipe, out=tmp_path / "whole")
    with pytest.raises(StoppedError):
        api.run(recipe, out=tmp_path / "cut", observers=[stop_in_round_3])
    rest = api.run(recipe, out=tmp_path / "cut", resume=True)
    told = [
        [(e["round"], e["upload_bytes"], e["download_bytes"]) for e in read_events(folder) if e["event"] == "round"]
        for folder in (tmp_path / "whole", tmp_path / "cut")
    ]
    assert told[0] == told[1]
    assert [number for number, *_ in told[0]] == [1, 2, 3, 4]
    for key in ("upload_bytes_per_user_round", "download_bytes_per_user_round", "users"):
        assert rest.metrics[key] == whole.metrics[key], key
    assert whole.metrics["download_bytes_per_user_round"] > 0
    assert torch.equal(rest.federation.clients.state.rows, whole.federation.clients.state.rows)
