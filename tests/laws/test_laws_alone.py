"""A cohort is its users: trained together or alone, in large portions or small, everybody gets the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from comingle.training.backends.local import InProcess
from comingle.utils.seeds import generator
from comingle.utils.trees import SPECIALIST
from federations import download_all, exchange, local_round

USERS = ("ann", "bob", "cem")
EXACT = {"rtol": 1e-9, "atol": 1e-12}
SHORT = {"training.local_steps": 4}


def trained_rows(federation: InProcess, rounds: int = 1) -> Tensor:
    """Everybody's tensors after some rounds, before the last exchange."""
    everyone = list(range(len(federation.clients.trainers)))
    for number in range(rounds):
        if number:
            exchange(federation, everyone)
        local_round(federation, everyone, number)
    return federation.clients.state.rows


def own_experts(federation: InProcess, row: int) -> dict[str, Tensor]:
    """What one user really has of each tensor, ``(experts, ...)``, padding cut off."""
    tensors, mask = (
        federation.clients.model.layout.views(federation.clients.state.rows),
        federation.clients.model.layout.views(federation.clients.mask.double()),
    )
    pieces = {slot.name: (len(slot.roles), -1) for slot in federation.clients.model.layout.slots}
    real = {name: mask[name][row].reshape(shape).any(1) for name, shape in pieces.items()}
    return {name: tensors[name][row].reshape(shape)[real[name]] for name, shape in pieces.items() if real[name].any()}


def settings_alone(method: dict[str, Any], row: int) -> dict[str, Any]:
    specialists = method.get("specialists")
    return {**method, "specialists": specialists[row]} if isinstance(specialists, list) else method


@pytest.mark.sampled(7)
def test_a_cohort_equals_its_users_trained_alone(federate: Any, federated: dict[str, Any]) -> None:
    together = download_all(federate(federated, changes=SHORT))
    begun = together.clients.state.rows.clone()
    trained_rows(together)
    for row, name in enumerate(USERS):
        alone = download_all(federate(settings_alone(federated, row), users=(name,), changes=SHORT))
        server = together.clients.method.server
        if server.first_download and server.by_user and SPECIALIST in together.clients.method.shared:
            # Users begin with experts that have chosen them among all users.
            alone.clients.state.rows.copy_(begun[row])
        trained_rows(alone)
        expected, found = own_experts(alone, 0), own_experts(together, row)
        assert found.keys() == expected.keys()
        for key in expected:
            torch.testing.assert_close(found[key], expected[key], **EXACT, msg=f"{name}: {key}")


@pytest.mark.slow
@pytest.mark.parametrize("users_per_step", [1, 2])
def test_users_per_step_changes_nothing(federate: Any, trained: dict[str, Any], users_per_step: int) -> None:
    rounds = 3 - users_per_step  # the second round, after an exchange, is worth its time once
    whole = federate(trained, changes=SHORT)
    parts = federate(trained, changes={**SHORT, "runtime.users_per_step": users_per_step})
    assert parts.clients.pass_size.users == users_per_step
    torch.testing.assert_close(trained_rows(parts, rounds), trained_rows(whole, rounds), **EXACT)
    for few, many in zip(parts.clients.evaluate(), whole.clients.evaluate(), strict=True):
        assert few.tokens == many.tokens
        assert few.loss_nats == pytest.approx(many.loss_nats, rel=1e-9)


@pytest.mark.sampled(10)
def test_micro_batches_change_nothing(federate: Any, trained: dict[str, Any]) -> None:
    """But for the load-balancing penalty: a product of means over the whole batch, it is the one thing they change."""
    changes = {**SHORT, "training.batch_size": 3, "adapters.balance": "none"}
    compare_micro_batches(federate, trained, changes, micro_batch=2)


@pytest.mark.parametrize("name", ["comigs-1g1s", "pfedmoe"])
def test_micro_batches_change_nothing_with_two_experts(federate: Any, name: str) -> None:
    """With two experts that every token picks the penalty is constant."""
    compare_micro_batches(federate, name, {**SHORT, "training.batch_size": 3}, micro_batch=1)


def compare_micro_batches(federate: Any, method: Any, changes: dict[str, Any], *, micro_batch: int) -> None:
    whole = federate(method, changes=changes)
    parts = federate(method, changes={**changes, "runtime.micro_batch": micro_batch})
    assert (whole.clients.pass_size.sequences, parts.clients.pass_size.sequences) == (
        whole.clients.batch_size,
        micro_batch,
    )
    torch.testing.assert_close(trained_rows(parts), trained_rows(whole), **EXACT)


def drawn(federation: InProcess, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[Any, ...], Tensor]:
    """Every batch that is drawn in two rounds, by user, phase, round, step and repeat, the same for all copies."""
    found: dict[tuple[Any, ...], Tensor] = {}
    original = federation.clients.batch_source.draw
    times: dict[tuple[Any, ...], int] = {}

    def spy(trainers: Any, phase: Any, round_number: int, step: int, repeat: int) -> Tensor:
        windows = original(trainers, phase, round_number, step, repeat)
        for user, batch in zip(trainers, windows, strict=True):
            key = (federation.clients.name(user), phase.purpose, round_number, step, repeat)
            assert torch.equal(found.setdefault(key, batch), batch)
            times[key] = times.get(key, 0) + 1
        return windows

    monkeypatch.setattr(federation.clients.batch_source, "draw", spy)
    trained_rows(federation, 2)
    assert set(times.values()) == {federation.clients.method.placement.copies}
    return found


@pytest.mark.sampled(7)
def test_random_streams_belong_to_their_user(
    federate: Any, federated: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not to the users beside it, nor to the portions, nor to torch's own generator, which stays untouched."""
    if isinstance(federated.get("specialists"), list):
        federated = {**federated, "specialists": 1}
    global_state = torch.get_rng_state()
    federation = federate(federated, changes=SHORT)
    start = federation.clients.model.layout.views(federation.clients.state.rows.clone())
    few = drawn(federation, monkeypatch)
    assert torch.equal(torch.get_rng_state(), global_state)

    torch.manual_seed(1)
    other = federate(federated, users=("zoe", *USERS), changes={**SHORT, "runtime.users_per_step": 2})
    for name, tensor in other.clients.model.layout.views(other.clients.state.rows).items():
        assert torch.equal(tensor[1 : 1 + len(USERS)], start[name][: len(USERS)]), name
    many = drawn(other, monkeypatch)
    assert few.keys() == {key for key in many if key[0] != "zoe"}
    assert all(torch.equal(many[key], windows) for key, windows in few.items())
    torch.set_rng_state(global_state)


@pytest.mark.sampled(5)
def test_every_batch_is_fresh(federate: Any, alternating: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches differ between users, rounds, purposes, steps, repeats and seeds."""
    changes = {"training.local_steps": 3}
    batches = drawn(federate(alternating, changes=changes), monkeypatch)
    batches |= {
        ("seed", *k): v for k, v in drawn(federate(alternating, changes={**changes, "seed": 1}), monkeypatch).items()
    }
    assert len({tuple(batch.flatten().tolist()) for batch in batches.values()}) == len(batches)


def test_windows_come_from_the_stream_that_the_phase_names(federate: Any, alternating: dict[str, Any]) -> None:
    federation = federate(alternating)
    for phase in federation.clients.method.client.phases:
        windows = federation.clients.batch_source.draw([0, 1, 2], phase, 0, 0, 0)
        for user, batch in zip(federation.clients.trainers, windows, strict=True):
            stream = (user.valid if phase.stream == "valid" else user.train).long()
            places = stream.unfold(0, 17, 1)
            assert all((places == window).all(1).any() for window in batch)


def test_a_user_starts_from_its_name_and_the_seed(federate: Any) -> None:
    """Documented streams: (seed, owner, "init", tensor), owner "server" for what is shared."""
    federation = federate("comigs-1g1s", changes={"seed": 5})
    slot = next(slot for slot in federation.clients.model.layout.slots if slot.name.endswith("mlp.up.a"))
    rows = federation.clients.model.layout.views(federation.clients.state.rows)[slot.name]
    common = slot.init(slot.shape, generator(5, "server", "init", slot.name))
    own = slot.init(slot.shape, generator(5, "bob", "init", slot.name))
    assert torch.equal(rows[1, 0], common[0].double())
    assert torch.equal(rows[1, 1], own[1].double())
