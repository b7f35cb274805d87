"""What no phase trains stays as it is, bit for bit; what a phase trains moves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from comingle.adapters.inject import ATTENTION
from comingle.engines.simulation import Simulation

PLAIN = {"training.experts.weight_decay": 0.0, "training.router.weight_decay": 0.0}


def members(sim: Simulation) -> list[int]:
    return list(range(len(sim.trainers)))


def trained_mask(sim: Simulation) -> Tensor:
    return sim.mask & sim.model.layout.mask(sim.method.trained)


def per_expert(sim: Simulation, flags: Tensor) -> dict[str, Tensor]:
    """Whether any entry of an expert's piece of a tensor is set: ``(users, experts)`` by tensor."""
    tensors = sim.model.layout.views(flags.double())
    return {s.name: tensors[s.name].reshape(len(flags), len(s.roles), -1).any(-1) for s in sim.model.layout.slots}


def test_the_base_is_bit_identical_after_a_round(federate: Any, method: dict[str, Any]) -> None:
    sim = federate(method)
    parameters = dict(sim.model.base.model.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    sim.local_round(members(sim), 0)
    sim.exchange(members(sim))
    for name, parameter in parameters.items():
        assert torch.equal(parameter, before[name]), name
        assert parameter.grad is None, name
    inside = {parameter.data_ptr() for parameter in sim.model.network.parameters()}
    assert inside == {parameter.data_ptr() for parameter in parameters.values()}


def test_roles_that_no_phase_trains_are_bit_identical(federate: Any, method: dict[str, Any]) -> None:
    sim = federate(method, changes={"training.local_steps": 3})
    frozen = ~sim.model.layout.mask(sim.method.trained)
    assert bool(frozen.any()) == (method["name"] in ("pretrained", "ffa-lora"))
    before = sim.state.rows.clone()
    sim.local_round(members(sim), 0)
    sim.exchange(members(sim))
    assert torch.equal(sim.state.rows[:, frozen], before[:, frozen])
    assert not sim.state.first[:, frozen].any()
    assert not sim.state.second[:, frozen].any()


def test_every_trained_tensor_of_every_user_moves(federate: Any, trained: dict[str, Any]) -> None:
    """Within ``router_every`` iterations, without any help from weight decay; padding stays zero."""
    sim = federate(trained, changes={"training.local_steps": trained.get("router_every", 2), **PLAIN})
    before = sim.state.rows.clone()
    sim.local_round(members(sim), 0)
    moved, real = per_expert(sim, sim.state.rows != before), per_expert(sim, trained_mask(sim))
    for name in real:
        assert torch.equal(moved[name], real[name]), name
    for tensor in (sim.state.rows, sim.state.first, sim.state.second):
        assert not tensor[~sim.mask].any()


def test_b_moves_first_and_a_after_it(federate: Any, trained: dict[str, Any]) -> None:
    """B starts at zero, so A has no gradient before B has made a step, nor has a router that mixes equal experts."""
    sim = federate(trained, changes=PLAIN)
    real = per_expert(sim, trained_mask(sim))
    experts = [name for name in real if not name.endswith(".router")]
    for step in range(2):
        before = sim.state.rows.clone()
        sim._phase(sim.phases[0], sim.state, range(len(sim.mask)), 0, step)
        moved = per_expert(sim, sim.state.rows != before)
        for name in experts:
            due = name.endswith(".b") or step > 0
            assert torch.equal(moved[name], real[name] & due), (name, step)


def test_padding_is_never_a_parameter(federate: Any) -> None:
    """Users with 1, 2 and 3 experts: counted are the parameters that each really has."""
    sim = federate({"name": "comigs", "specialists": [0, 1, 2]})
    one, two, three = sim.trainable_parameters()
    slots = sim.model.layout.slots
    router = sum(slot.size // 3 for slot in slots if slot.name.endswith(".router"))
    expert = sum(slot.size // 3 for slot in slots if slot.roles[0] != ATTENTION and not slot.name.endswith(".router"))
    attention = sum(slot.size for slot in slots if slot.roles == (ATTENTION,))
    assert [one, two, three] == [
        attention + expert,
        attention + 2 * (expert + router),
        attention + 3 * (expert + router),
    ]
