"""FLOPs of a plan against torch's counter on real forward and backward passes, and against counting by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from comingle.cost.counts import Shape, count_users, unpadded_entries
from comingle.cost.records import Block, Flops, Linear, backward, forward
from comingle.training.client import Clients, train

WITHIN = 0.001
"""Of the counter's number: the same products are counted, so it is exact but for what autograd may skip."""

CHANGES = {"training.batch_size": 2, "training.context": 16, "adapters.rank": 4}
CASES = [
    *[("llama", "output", method) for method in ("local", "comigs-1g1s", "fedsa-lora", "feddpa", "fedamole")],
    ("llama", "output", "fedlease"),
    *[
        (family, "output", method)
        for family in ("llama", "gpt2", "gemma2", "phi", "gpt_neox", "opt")
        for method in ("comigs-1gxs", "ffa-lora")
    ],
    *[(family, "linear", method) for family in ("gpt2", "phi") for method in ("comigs-1g1s", "ffa-lora")],
]


def _added_product(out: Any, a: Sequence[int], b: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * a[0] * a[1] * a[2] * b[2]


def counted(work: Any) -> int:
    """torch's count; it knows ``baddbmm`` but not its in-place form."""
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.baddbmm_: _added_product}) as counter:
        work()
    return counter.get_total_flops()


def shape_of(clients: Clients, row: int = 0) -> Shape:
    names = [slot.name for slot in clients.model.layout.slots]
    return Shape(clients, row, dict(zip(names, unpadded_entries(clients)[row].tolist(), strict=True)))


@pytest.mark.parametrize(("family", "mix", "method"), CASES)
def test_flops_are_those_of_torchs_counter(family: str, mix: str, method: str, federate: Any) -> None:
    changes = {**CHANGES, "adapters.mix": mix}
    clients = federate(method, base=f"random:{family}", dtype="float32", changes=changes).clients
    shape, members = shape_of(clients), [0, 1, 2]
    tokens = len(members) * clients.batch_size * clients.plan.training.context
    for phase in clients.phases:
        windows = clients.batch_source.draw(members, phase, 0, 0, 0)
        found = counted(lambda w=windows, p=phase: clients.steps.gradient(clients.cohort(members, 0), w, p))
        assert shape.training(phase).total * tokens == pytest.approx(found, rel=WITHIN), phase
    with torch.no_grad():
        found = counted(lambda: clients.scorer.predict(clients.models, members, windows))
    assert shape.forward().total * tokens == pytest.approx(found, rel=WITHIN)


def test_a_user_of_a_smaller_size_computes_what_it_would_alone(federate: Any) -> None:
    """In a cohort it is padded to the size of the others; a plan counts its own products."""
    together = federate({"name": "comigs-1gxs", "specialists": [1, 3]}, users=("ann", "bob"), changes=CHANGES).clients
    for row, specialists in enumerate((1, 3)):
        method = {"name": "comigs-1gxs", "specialists": specialists}
        alone = federate(method, users=("ann",), changes=CHANGES).clients
        for phase, own in zip(together.phases, alone.phases, strict=True):
            windows = alone.batch_source.draw([0], own, 0, 0, 0)
            found = counted(lambda s=alone, w=windows, p=own: s.steps.gradient(s.cohort([0], 0), w, p))
            tokens = alone.batch_size * alone.plan.training.context
            assert shape_of(together, row).training(phase).total * tokens == pytest.approx(found, rel=WITHIN)


@pytest.mark.slow
def test_a_round_is_the_sum_of_its_steps(federate: Any) -> None:
    """Six rounds of two steps with routers after every third iteration: four times two router steps."""
    method = {"name": "comigs-1g1s", "router_every": 3, "router_steps": 2}
    federation = federate(method, users=("ann", "bob"), dtype="float32", changes={**CHANGES, "training.rounds": 6})
    clients = federation.clients
    (cost,) = count_users(federation, ("ann", "bob"))
    found = counted(lambda: [train(clients, [0, 1], number) for number in range(6)])
    assert cost.round.total * 2 * 6 == pytest.approx(found, rel=WITHIN)
    experts, router = clients.phases
    one, other = shape_of(clients).training(experts), shape_of(clients).training(router)
    tokens = clients.batch_size * clients.plan.training.context
    assert cost.round.total == pytest.approx((2 * one.total + 8 / 6 * other.total) * tokens)
    assert cost.training.total == pytest.approx(cost.round.total / tokens / 2)


def test_two_copies_are_trained_twice(federate: Any) -> None:
    federation = federate("fdlora", users=("ann",), dtype="float32", changes=CHANGES)
    (cost,) = count_users(federation, ("ann",))
    found = counted(lambda: train(federation.clients, [0], 0))
    assert cost.round.total == pytest.approx(found, rel=WITHIN)


@pytest.mark.parametrize("experts", [1, 3])
def test_the_naive_way_is_that_of_a_loop_over_whole_mlps(experts: int, federate: Any) -> None:
    """A loop that runs the base's MLP for each expert, with LoRA beside every linear, counted by torch."""
    federation = federate(
        {"name": "comigs-1gxs", "specialists": experts - 1}, users=("ann",), dtype="float32", changes=CHANGES
    )
    (cost,) = count_users(federation, ("ann",))
    dim = federation.clients.model.network.config.hidden_size
    hidden = federation.clients.model.network.config.intermediate_size

    def loop() -> None:
        x = torch.randn(1, dim)
        for _ in range(experts):
            for d_in, d_out in ((dim, hidden), (dim, hidden), (hidden, dim)):
                z = torch.randn(1, d_in)
                z @ torch.randn(d_in, d_out)
                z @ torch.randn(d_in, 4) @ torch.randn(4, d_out)
        if experts > 1:
            x @ torch.randn(dim, experts)

    layers = len(federation.clients.model.adapters.experts)
    others = cost.forward.attention + cost.forward.head
    attention_lora = 2 * cost.parameters["attention"]
    naive = cost.forward.naive(cost.experts)
    assert naive - others - attention_lora == pytest.approx(layers * counted(loop))
    assert (naive > cost.forward.total) == (experts > 1)


# ---------------------------------------------------------------- by hand


def linear(weight: int = 100, **more: Any) -> Linear:
    return Linear(weight=weight, **more)


def test_a_block_by_hand() -> None:
    """The rules of the module's docstring on round numbers."""
    trained = {"a": 10, "b": 10, "trains_a": True, "trains_b": True}
    block = Block(
        qkv=(linear(**trained),),
        attention_out=linear(**trained),
        score_products=7,
        mlp_in=(linear(**trained),),
        mlp_out=linear(**trained),
        router=5,
        trains_router=True,
    )
    once = forward([block], 1000)
    assert once == Flops(attention=2 * (200 + 14), mlp=400, head=2000, lora=160, router=10)
    assert once.overhead == pytest.approx(170 / 2828)
    assert once.naive(3) == once.total + 800
    back = backward([block], 1000)
    # Of the first layer's reading linear neither W nor A needs a gradient of the input.
    assert back == Flops(attention=2 * (100 + 28), mlp=400, head=2000, lora=2 * (30 + 40 + 80), router=20)
    assert backward([block, block], 0).attention == back.attention + 2 * (200 + 28)


def test_nothing_trained_takes_no_backward_pass() -> None:
    block = Block(qkv=(linear(),), attention_out=linear(), score_products=7, mlp_in=(linear(),), mlp_out=linear())
    assert backward([block, block], 1000) == Flops()
    assert backward([], 1000).overhead == 0
