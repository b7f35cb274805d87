"""What users with nets of their own, or with a client-level mixture, train, send and compute.

A user's step is the engine's own, run on tensors without data; its products are counted as they happen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from comingle.costing.passes import Rehearsal, empty_batch, empty_inputs, quietly
from comingle.costing.records import UserCost
from comingle.engines.feeds import TextFeed
from comingle.engines.simulation import Simulation
from comingle.evaluation.costs.flops import Flops
from comingle.evaluation.costs.measured import measure
from comingle.methods.client import Phase
from comingle.trees import Tree


@dataclass(frozen=True, kw_only=True)
class Load:
    """A user's local work of a round: ``epochs`` times batches of these ``sizes``, in sequences or samples.

    A sweep, which stands for all of its training data, has ``swept`` of them in ``sweeps`` batches. ``unit`` is the
    number of tokens or samples of each.
    """

    sizes: tuple[int, ...]
    epochs: int
    sweeps: int
    swept: int
    unit: int = 1

    @property
    def steps(self) -> int:
        """Batches of a round."""
        return len(self.sizes) * self.epochs

    @property
    def items(self) -> int:
        """Sequences or samples of a round."""
        return sum(self.sizes) * self.epochs

    def first(self, steps: int) -> int:
        """How many are in the first so many batches, which begin again after the last."""
        return sum(self.sizes[i % len(self.sizes)] for i in range(steps))


Base = Callable[[Load], tuple[Flops, Flops]]
"""FLOPs of the base alone: one token's or sample's forward pass, and a round with one pass a step."""


def text_load(sim: Simulation) -> Load:
    """The same for all users."""
    steps, size = sim.training.local_steps, sim.batch_size
    return Load(sizes=(size,), epochs=steps, sweeps=steps, swept=steps * size, unit=sim.training.context)


def count_stacked(stage: Rehearsal, loads: Mapping[str, Load], base: Base) -> list[UserCost]:
    """The costs of the users with these loads, those who are alike together."""
    sim, alike = stage.sim, dict[Load, list[str]]()
    for name, load in loads.items():
        alike.setdefault(load, []).append(name)
    counts = _Counts(stage)
    sent, parameters = sim.upload_bytes()[0], _parameters(sim)
    found = []
    for load, names in alike.items():
        forward, passes = base(load)
        forward += Flops(lora=counts.forward.each / load.unit - forward.total)
        spent = counts.round(load)
        passes = passes + Flops(lora=spent - passes.total) if spent else Flops()
        found.append(
            UserCost(
                names=tuple(names),
                experts=0,
                parameters=parameters,
                upload_bytes=sent,
                download_bytes=sim.download_bytes(sent, sent),
                forward=forward,
                training=passes * (1 / (load.items * load.unit)),
                round=passes,
                unit="token" if isinstance(sim.feed, TextFeed) else "sample",
            )
        )
    return found


def measured_base(stage: Rehearsal) -> Base:
    """A net alone, as FedAvg trains it."""
    counts = _Counts(stage)
    return lambda load: (Flops(net=counts.forward.each / load.unit), Flops(net=counts.round(load)))


class _Counts:
    """FLOPs of one user, by kind of work."""

    def __init__(self, stage: Rehearsal):
        self.stage, sim = stage, stage.sim
        self.rows = stage.fakes.of(sim.state.rows[:1].clone(), sim.model.device)
        self.forward = measure(self._predict)
        self.steps = {phase: measure(lambda n, phase=phase: self._step(phase, n)) for phase in self._phases()}
        # Losses on all training data: under each component, or under each model that is picked from.
        alone = sim.method.reroute is not None or (sim.mixture is not None and sim.mixture.at == "samples")
        self.sweep = measure(self._sweep) if alone else self.forward.times(sim.method.picks)

    def round(self, load: Load) -> float:
        """A round's local work."""
        method = self.stage.sim.method
        total = self.sweep.flops(load.sweeps, load.swept)
        for phase in self.stage.sim.phases:
            times = load.steps // phase.every * phase.steps
            total += self.steps[phase].flops(times, times * load.items / load.steps)
        for phase in method.before:
            total += self.steps[phase].flops(phase.steps, load.first(phase.steps))
        return total

    def _phases(self) -> tuple[Phase, ...]:
        return (*self.stage.sim.phases, *self.stage.sim.method.before)

    def _tensors(self) -> Tree:
        return self.stage.sim.tensors(self.rows)

    @torch.no_grad()
    def _predict(self, count: int) -> None:
        self.stage.sim.model.predict(self._tensors(), [0], empty_inputs(self.stage, 1, count))

    def _step(self, phase: Phase, count: int) -> None:
        with quietly():
            self.stage.sim.gradient(self.rows, [0], empty_batch(self.stage, 1, count), phase)

    @torch.no_grad()
    def _sweep(self, count: int) -> None:
        sim = self.stage.sim
        batch = sim.feed.read("train", [0], empty_batch(self.stage, 1, count))
        sim.stacked.component_losses(self._tensors(), [0], batch)


def _parameters(sim: Simulation) -> dict[str, int]:
    """A user's trained parameters by role; all users have the same."""
    layout = sim.model.layout
    counts = {role: int(layout.mask([role]).sum()) for role in sorted(layout.roles & sim.method.trained)}
    return {role: count for role, count in counts.items() if count}
