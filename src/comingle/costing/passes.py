"""What a federation's memory holds at its worst moment: one pass of the largest cohort, run without data."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from comingle.costing.records import MemoryCost
from comingle.engines.samples import SCORED_PER_SLOT, SampleFeed
from comingle.engines.simulation import Simulation
from comingle.engines.training import Portions
from comingle.evaluation.costs.memory import ALLOCATOR_GAPS, Fakes, LiveBytes, storage_bytes
from comingle.methods.client import Phase
from comingle.models.adapted import AdaptedModel
from comingle.models.mixed import MixedLanguageModel

TRACED_BATCHES = 2
"""From the second micro-batch on every further one does the same, with the sum of gradients at hand."""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """A federation whose model has no data, and the fakes that stand for it.

    ``trainers`` is their true number, ``data_bytes`` what is kept of their samples, ``process_bytes`` what a process
    holds in any case, ``known`` what has been found out about passes.
    """

    sim: Simulation
    fakes: Fakes
    weights_bytes: int
    trainers: int
    data_bytes: int = 0
    process_bytes: int = 0
    known: dict[tuple[tuple[int, ...], Portions], tuple[int, int]] = field(default_factory=dict)


def rehearse(sim: Simulation, trainers: int, *, data_bytes: int = 0, process_bytes: int = 0) -> Rehearsal:
    """Put fakes in the place of everything frozen, and of samples, in place."""
    fakes, model, device, size = Fakes(), sim.model, sim.model.device, 0
    if isinstance(model, (AdaptedModel, MixedLanguageModel)):
        network = model.network if isinstance(model, AdaptedModel) else model.base.model
        size, head = storage_bytes(network), model.head
        bias = None if head.bias is None else fakes.of(head.bias, device)
        sim.model = replace(model, head=replace(head, weight=fakes.of(head.weight, device), bias=bias))
        fakes.replace(network if isinstance(model, AdaptedModel) else model.net, device)
    if isinstance(sim.feed, SampleFeed):
        for name, bank in sim.feed.banks.items():
            inputs, targets = fakes.of(bank.inputs, device), fakes.of(bank.targets, device)
            sim.feed.banks[name] = replace(bank, inputs=inputs, targets=targets)
        sim.feed.augment = None  # done before the pass, and small beside it
    always = {"weights_bytes": size, "data_bytes": data_bytes, "process_bytes": process_bytes}
    return Rehearsal(sim=sim, fakes=fakes, trainers=trainers, **always)


def memory(stage: Rehearsal, *, own: bool = False, portions: Portions | None = None) -> MemoryCost:
    """The worst moment on this machine, or (``own``) on a device with nobody but the user who has most.

    ``portions`` tries out other numbers of users and sequences in a pass.
    """
    sim, chosen = stage.sim, portions or stage.sim.portions
    count = 1 if own else min(chosen.users, len(sim.state.rows))
    first = int(sim.mask.sum(1).argmax()) if count == 1 else 0
    peak, gradients = _worst_pass(stage, tuple(range(first, first + count)), chosen)
    state = sim.state
    share = (1 if own else stage.trainers) / len(sim.trainers)
    server = sum(t.numel() * t.element_size() for t in state.server.values()) * (not own)
    gaps = ALLOCATOR_GAPS.get(sim.model.device.type, 0.0)
    return MemoryCost(
        weights_bytes=stage.weights_bytes,
        adapters_bytes=int(share * (state.rows.nbytes + sim.start.nbytes + sim.mask.untyped_storage().nbytes()))
        + server,
        moments_bytes=int(share * (state.first.nbytes + state.second.nbytes)),
        gradients_bytes=gradients,
        activations_bytes=peak - gradients,
        allocator_bytes=int(gaps * peak),
        data_bytes=stage.data_bytes // (stage.trainers if own else 1),
        process_bytes=stage.process_bytes,
    )


def _worst_pass(stage: Rehearsal, rows: tuple[int, ...], portions: Portions) -> tuple[int, int]:
    """Peak bytes of a step of a cohort, and how many of them are its gradients.

    Of several phases that which trains most tensors: the others keep the same activations, or fewer.
    """
    sim, layout = stage.sim, stage.sim.model.layout
    if (rows, portions) not in stage.known:
        before, sim.portions = sim.portions, portions
        try:
            phases = sorted(sim.phases, key=lambda phase: layout.only(phase.roles).columns)
            found = step_peak(stage, rows, phases[-1]) if phases else (0, 0)
            if not phases or isinstance(sim.feed, SampleFeed):  # more samples are scored at once than trained on
                found = max(found, (_evaluation_peak(stage, rows), 0))
        finally:
            sim.portions = before
        stage.known[rows, portions] = found
    return stage.known[rows, portions]


def step_peak(stage: Rehearsal, rows: Sequence[int], phase: Phase) -> tuple[int, int]:
    """Peak bytes of one optimiser step of a phase, micro-batches and update, and the bytes of its gradients."""
    sim, device = stage.sim, stage.sim.model.device
    part = sim.state.take(rows)
    rows_now, first, second = (stage.fakes.of(t, device) for t in (part.rows, part.first, part.second))
    part = replace(part, rows=rows_now, first=first, second=second)
    drawn = empty_batch(stage, len(rows), min(sim.batch_size, TRACED_BATCHES * sim.portions.sequences))
    with quietly(), LiveBytes() as live:
        gradients = sim.gradient(part.rows, rows, drawn, phase)[1]
        size = sum(gradient.nbytes for gradient in gradients.values())
        sim._step(phase, part, rows, gradients, 0)
    return live.peak, size


@torch.no_grad()
def _evaluation_peak(stage: Rehearsal, rows: Sequence[int]) -> int:
    """One pass of an evaluation, which is all that a method without training does."""
    sim = stage.sim
    count = sim.portions.sequences
    if isinstance(sim.feed, SampleFeed):
        count = min(SCORED_PER_SLOT, max(len(user.test) for user in sim.users))
    inputs = empty_inputs(stage, len(rows), count)
    with quietly(), LiveBytes() as live:
        sim.predict(rows, inputs)
    return live.peak


def empty_batch(stage: Rehearsal, users: int, count: int) -> Int[Tensor, "users count ..."]:
    """A batch to train on, as the engine draws it: windows without data, or the first sample again and again."""
    if isinstance(stage.sim.feed, SampleFeed):
        return torch.zeros(users, count, dtype=torch.int64)
    windows = torch.empty(users, count, stage.sim.training.context + 1, dtype=torch.int64, device="meta")
    return stage.fakes.of(windows, stage.sim.model.device)


def empty_inputs(stage: Rehearsal, users: int, count: int) -> Int[Tensor, "users count _"] | Float[Tensor, "users ..."]:
    """What :meth:`Simulation.predict` takes, without data."""
    if not isinstance(stage.sim.feed, SampleFeed):
        return empty_batch(stage, users, count)
    bank = stage.sim.feed.banks["train"].inputs
    inputs = torch.empty(users, count, *bank.shape[1:], dtype=bank.dtype, device="meta")
    return stage.fakes.of(inputs, stage.sim.model.device)


@contextmanager
def quietly() -> Iterator[None]:
    """Without torch's warning that it looks at ``.grad`` of something in the middle, which it does itself here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor", category=UserWarning)
        yield
