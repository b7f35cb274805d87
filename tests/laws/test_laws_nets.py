"""The laws for nets that are trained whole: users are a batch dimension there too, and nothing else couples them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from comingle.data.samples.samples import Samples
from comingle.methods.base import Method
from comingle.methods.mixtures import Entropic
from comingle.methods.momentum_clustering import Centres
from comingle.protocol.messages import COUNT, LOSS, Upload
from comingle.training.backends.local import InProcess
from comingle.training.evaluation import merged_mixtures_event, mixtures_of_users
from comingle.utils.trees import CLIENT_ROUTER
from federations import download_all, exchange, local_round, replace_user

EXACT = {"rtol": 1e-9, "atol": 1e-12}
EVERYONE = [0, 1, 2, 3]


def trained(federation: InProcess, rounds: int = 2) -> Tensor:
    for number in range(rounds):
        if number:
            exchange(federation, EVERYONE)
        local_round(federation, EVERYONE, number)
    return federation.clients.state.rows


def reroutes(method: Method) -> bool:
    """Whether users make their router out of the components that they have received."""
    return any(isinstance(part, Entropic) for part in method.client.parts)


def sent_by(federation: InProcess, loss: float = 0.0) -> Upload:
    """What everybody would send now."""
    return federation.clients.upload(EVERYONE, 1, {LOSS: torch.full((len(EVERYONE),), loss)})


@pytest.mark.sampled(4)
def test_a_cohort_equals_its_users_trained_one_at_a_time(federate_nets: Any, netted: dict[str, Any]) -> None:
    together = trained(federate_nets(netted))
    for users_per_step in (1, 3):
        apart = trained(federate_nets(netted, changes={"runtime.users_per_step": users_per_step}))
        torch.testing.assert_close(apart, together, **EXACT)


@pytest.mark.sampled(9)
def test_nobodys_data_moves_anybody_else_within_a_round(federate_nets: Any, netted: dict[str, Any]) -> None:
    federation, other = federate_nets(netted), federate_nets(netted)
    bank = other.clients.batch_source.banks["train"]
    start, count = int(bank.starts[1]), int(bank.counts[1])
    bank.targets[start : start + count] += 3.0
    one, two = trained(federation, 1), trained(other, 1)
    assert torch.equal(one[[0, 2, 3]], two[[0, 2, 3]])
    assert not torch.equal(one[1], two[1])


def test_what_is_trained_moves_and_nothing_else_does(federate_nets: Any, normless: dict[str, Any]) -> None:
    # Without batch norm, behind which a bias has no gradient but rounding.
    federation = federate_nets(normless, changes={"data.task.name": "mlp"})
    layout = federation.clients.model.layout
    before = federation.clients.state.rows.clone()
    trained(federation)
    moved = (federation.clients.state.rows != before).any(0)
    method = federation.clients.method
    rerouted = reroutes(method) or (method.placement.mixture and method.placement.mixture.at == "samples")
    expected = set(method.client.trained) | ({"router"} if rerouted else set()) | {"statistics"}
    for slot in layout.slots:
        span = slice(layout.starts[slot.name], layout.starts[slot.name] + slot.size)
        changes = bool(moved[span].any())
        assert changes == bool(set(slot.roles) & expected), slot.name


def test_only_what_is_shared_leaves(federate_nets: Any, netted: dict[str, Any]) -> None:
    federation = federate_nets(netted)
    clients, message = federation.clients, sent_by(federation)
    wanted = {slot.name for slot in clients.model.layout.slots if all(slot.role_mask(clients.method.shared))}
    assert set(message.tensors) == wanted
    views = clients.model.layout.views(clients.state.rows)
    assert all(torch.equal(message.tensors[name], views[name][EVERYONE]) for name in wanted)
    wanted_reports = said(clients.method)
    if clients.method.placement.mixture is not None and clients.method.placement.mixture.per_layer:
        wanted_reports["mixture"] = views[CLIENT_ROUTER].shape[1:]
    assert {name: t.shape[1:] for name, t in message.reports.items()} == wanted_reports


def said(method: Method) -> dict[str, torch.Size]:
    """What each user says beside tensors: its loss, its amount of data, its mixture, the model it took, its rates."""
    numbers = {LOSS: torch.Size(), COUNT: torch.Size()}
    reports = [part.reports for part in method.client.parts]
    return numbers | {name: torch.Size(said.shape) for some in reports for name, said in some.items()}


def test_an_exchange_leaves_what_is_local(federate_nets: Any, netted: dict[str, Any]) -> None:
    federation = federate_nets(netted)
    trained(federation, 1)
    rerouted = {"router"} if reroutes(federation.clients.method) else set()  # out of what has been received
    local = ~federation.clients.model.layout.mask(federation.clients.method.shared | rerouted)
    before = federation.clients.state.rows.clone()
    exchange(federation, EVERYONE)
    assert torch.equal(federation.clients.state.rows[:, local], before[:, local])
    assert torch.equal(federation.clients.state.rows[len(EVERYONE) :], before[len(EVERYONE) :])  # other copies
    server = federation.clients.method.server
    if server.first_download or isinstance(server, Centres):  # everybody gets a model of their own
        return
    for name in sent_by(federation).tensors:
        values = federation.clients.model.layout.views(federation.clients.state.rows)[name][EVERYONE]
        torch.testing.assert_close(values, values[:1].expand_as(values), **EXACT)


@pytest.mark.sampled(9)
def test_micro_batches_change_nothing_without_batch_norm(federate_nets: Any, normless: dict[str, Any]) -> None:
    changes = {"data.task.name": "mlp"}
    whole = trained(federate_nets(normless, changes=changes))
    parts = trained(federate_nets(normless, changes={**changes, "runtime.micro_batch": 7}))
    torch.testing.assert_close(parts, whole, **EXACT)


@pytest.mark.sampled(4)
def test_users_of_unequal_size_take_their_own_number_of_steps(federate_nets: Any, netted: dict[str, Any]) -> None:
    """Whoever has fewer samples has fewer steps, and is what it would be alone."""

    def cut(federation: InProcess) -> InProcess:
        clients = federation.clients
        few = clients.trainers[2]
        short = Samples(inputs=few.train.inputs[:43], targets=few.train.targets[:43])
        replace_user(clients, 2, replace(few, train=short))
        return federation

    together, apart = cut(federate_nets(netted)), cut(federate_nets(netted, changes={"runtime.users_per_step": 1}))
    # Preconditioning multiplies rounding by up to 1e5.
    torch.testing.assert_close(trained(together), trained(apart), rtol=1e-6, atol=1e-7)
    assert together.clients.state.iterations.tolist() == [6, 6, 4, 6] * together.clients.method.placement.copies


@pytest.mark.parametrize("name", ["floral", "ensemble", "local-adaptor", "fedavg"])
def test_absent_users_train_nothing(federate_nets: Any, name: str) -> None:
    federation = federate_nets(name)
    before = federation.clients.state.rows.clone()
    local_round(federation, [0, 3], 0)
    assert torch.equal(federation.clients.state.rows[[1, 2]], before[[1, 2]])
    local = ~federation.clients.model.layout.mask(federation.clients.method.shared)
    exchange(federation, [0, 3])
    assert torch.equal(federation.clients.state.rows[1:3, local], before[1:3, local])


def test_evaluations_say_what_is_mixed(federate_nets: Any, netted: dict[str, Any]) -> None:
    federation = download_all(federate_nets(netted))
    event = merged_mixtures_event(federation.clients, federation.server, mixtures_of_users(federation.clients))
    models = netted["name"].startswith(("ensemble", "mfl", "fml", "fedmerge", "ifca", "fedem"))
    mixes = models or netted["name"].startswith("floral")
    assert event.get("component") == ({True: "model", False: "adaptor set"}[models] if mixes else None)
