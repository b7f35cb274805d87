"""What no phase trains stays as it is, bit for bit; what a phase trains moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from comingle.methods.base import Method
from comingle.methods.fedamole import PairGating
from comingle.training.backends.local import InProcess
from comingle.training.client import settle
from comingle.utils.trees import ATTENTION, GENERALIST, ROUTER, SPECIALIST
from federations import download_all, exchange, local_round, take_phase

LORA = (ATTENTION, GENERALIST, SPECIALIST)

PLAIN = {"training.experts.weight_decay": 0.0, "training.router.weight_decay": 0.0}


def freezes(method: Method) -> bool:
    """Whether the method has something on a language model beside the base and does not train it."""
    trained = method.client.trained
    one_factor = any((f"{role}.a" in trained) != (f"{role}.b" in trained) for role in LORA)
    downloads_more = method.received & {*LORA, ROUTER} - {role.partition(".")[0] for role in trained}
    return (
        not trained
        or one_factor
        or bool(downloads_more)
        or method.placement.residual is not None
        or method.placement.middle
    )


def members(federation: InProcess) -> list[int]:
    return list(range(len(federation.clients.trainers)))


def trained_mask(federation: InProcess) -> Tensor:
    return federation.clients.mask & federation.clients.model.layout.mask(federation.clients.method.client.trained)


def made_once(federation: InProcess) -> Tensor:
    """What a hook of the method makes in the first round, and no phase trains."""
    return federation.clients.model.layout.mask(federation.clients.method.placement.once)


def per_expert(federation: InProcess, flags: Tensor) -> dict[str, Tensor]:
    """Whether any entry of an expert's piece of a tensor is set: ``(users, experts)`` by tensor."""
    tensors = federation.clients.model.layout.views(flags.double())
    return {
        s.name: tensors[s.name].reshape(len(flags), len(s.roles), -1).any(-1)
        for s in federation.clients.model.layout.slots
    }


def filled(federation: InProcess, real: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same without places that a server has left empty, whose A is zero, and routers that have one expert alone."""
    there = per_expert(federation, federation.clients.state.rows != 0)

    def used(name: str) -> Tensor | bool:
        if name[-2:] in (".a", ".b"):
            return there[f"{name[:-1]}a"]
        if name.endswith("router"):
            return there[f"{name.removesuffix('router')}up.a"].sum(1, keepdim=True) > 1
        return True  # such as FedEx-LoRA's residual

    return {name: flags & used(name) for name, flags in real.items()}


@pytest.mark.sampled(15)
def test_the_base_is_bit_identical_after_a_round(federate: Any, method: dict[str, Any]) -> None:
    federation = federate(method)
    parameters = dict(federation.clients.model.base.model.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    local_round(federation, members(federation), 0)
    exchange(federation, members(federation))
    for name, parameter in parameters.items():
        assert torch.equal(parameter, before[name]), name
        assert parameter.grad is None, name
    inside = {parameter.data_ptr() for parameter in federation.clients.model.network.parameters()}
    assert inside == {parameter.data_ptr() for parameter in parameters.values()}


@pytest.mark.sampled(15)
def test_roles_that_no_phase_trains_are_bit_identical(federate: Any, method: dict[str, Any]) -> None:
    federation = download_all(federate(method, changes={"training.local_steps": 3}))
    frozen = ~federation.clients.model.layout.mask(federation.clients.method.client.trained)
    assert bool(frozen.any()) == freezes(federation.clients.method)
    before = federation.clients.state.rows.clone()
    local_round(federation, members(federation), 0)
    unchanged = frozen & ~made_once(federation)
    assert torch.equal(federation.clients.state.rows[:, unchanged], before[:, unchanged])
    exchange(federation, members(federation))
    kept = frozen & ~federation.clients.model.layout.mask(federation.clients.method.received)
    assert torch.equal(federation.clients.state.rows[:, kept], before[:, kept])
    assert not federation.clients.state.first[:, frozen].any()
    assert not federation.clients.state.second[:, frozen].any()


@pytest.mark.sampled(15)
def test_every_trained_tensor_of_every_user_moves(federate: Any, trained: dict[str, Any]) -> None:
    """Within ``router_every`` iterations, without any help from weight decay; padding stays zero."""
    changes = {"training.local_steps": trained.get("router_every", 2), **PLAIN}
    federation = download_all(federate(trained, changes=changes))
    real = filled(federation, per_expert(federation, trained_mask(federation) | made_once(federation)))
    before = federation.clients.state.rows.clone()
    for number in range(max(phase.turns for phase in federation.clients.phases)):
        local_round(federation, members(federation), number)
    settle(federation.clients)
    moved = per_expert(federation, federation.clients.state.rows != before)
    for name in real:
        assert torch.equal(moved[name], real[name]), name
    for tensor in (federation.clients.state.rows, federation.clients.state.first, federation.clients.state.second):
        assert not tensor[~federation.clients.mask].any()


@pytest.mark.sampled(15)
def test_b_moves_first_and_a_after_it(federate: Any, trained: dict[str, Any]) -> None:
    """B starts at zero, so A has no gradient before B has made a step, nor has a router that mixes equal experts.

    What is between a frozen B of zeros and A never has one.
    """
    federation = download_all(federate(trained, changes=PLAIN))
    layout, phase = federation.clients.model.layout, federation.clients.phases[0]
    real = filled(federation, per_expert(federation, trained_mask(federation) & layout.mask(phase.roles)))
    # This method's router reads the A of experts and moves it.
    pairs = isinstance(federation.clients.method.placement.gating, PairGating)
    routing = (".router", *((".up.a",) if pairs else ()))
    experts = [name for name in real if not name.endswith(routing)]
    for step in range(2):
        before = federation.clients.state.rows.clone()
        take_phase(federation.clients, phase, 0, step)
        moved = per_expert(federation, federation.clients.state.rows != before)
        for name in experts:
            due = name.endswith(".b") or (step > 0 and not name.endswith(".r"))
            assert torch.equal(moved[name], real[name] & due), (name, step)


def test_padding_is_never_a_parameter(federate: Any) -> None:
    """Users with 1, 2 and 3 experts: counted are the parameters that each really has."""
    federation = federate({"name": "comigs", "specialists": [0, 1, 2]})
    one, two, three = federation.clients.trainable_parameters()
    slots = federation.clients.model.layout.slots
    router = sum(slot.size // 3 for slot in slots if slot.name.endswith(".router"))
    expert = sum(slot.size // 3 for slot in slots if slot.roles[0] != ATTENTION and not slot.name.endswith(".router"))
    attention = sum(slot.size for slot in slots if slot.roles == (ATTENTION,))
    assert [one, two, three] == [
        attention + expert,
        attention + 2 * (expert + router),
        attention + 3 * (expert + router),
    ]
