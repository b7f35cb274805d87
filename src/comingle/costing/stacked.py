"""What users with nets of their own, or with a client-level mixture, train, send and compute.

A user's step is the engine's own, run on tensors without data; its products are counted as they happen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from comingle.costing.flops import Flops
from comingle.costing.measured import measure
from comingle.costing.messages import mean_bytes, message_bytes
from comingle.costing.passes import Rehearsal, empty_batch, empty_inputs, quietly
from comingle.costing.records import UserCost
from comingle.methods.base import Phase
from comingle.training.client import Clients
from comingle.utils.trees import Tree


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


BaseFlops = Callable[[Load], tuple[Flops, Flops]]
"""FLOPs of the base alone: one token's or sample's forward pass, and a round with one pass a step."""


def text_load(clients: Clients) -> Load:
    """The same for all users."""
    steps, size = clients.training.local_steps, clients.batch_size
    return Load(sizes=(size,), epochs=steps, sweeps=steps, swept=steps * size, unit=clients.training.context)


def count_stacked(stage: Rehearsal, loads: Mapping[str, Load], base: BaseFlops) -> list[UserCost]:
    """The costs of the users with these loads, those who are alike together."""
    clients, alike = stage.federation.clients, dict[Load, list[str]]()
    for name, load in loads.items():
        alike.setdefault(load, []).append(name)
    counts, parameters = _Counts(stage), _stacked_parameters(clients)
    messages = dict(zip(loads, message_bytes(stage.federation, list(loads)), strict=True))
    costs = []
    for load, names in alike.items():
        forward, passes = base(load)
        forward += Flops(lora=counts.forward.each / load.unit - forward.total)
        spent = counts.round(load)
        passes = passes + Flops(lora=spent - passes.total) if spent else Flops()
        sent, received = mean_bytes([messages[name] for name in names])
        costs.append(
            UserCost(
                names=tuple(names),
                experts=0,
                parameters=parameters,
                upload_bytes=sent,
                download_bytes=received,
                forward=forward,
                training=passes * (1 / (load.items * load.unit)),
                round=passes,
                unit=stage.steps.feed.unit.removesuffix("s"),
            )
        )
    return costs


def measured_base(stage: Rehearsal) -> BaseFlops:
    """A net alone, as FedAvg trains it."""
    counts = _Counts(stage)
    return lambda load: (Flops(net=counts.forward.each / load.unit), Flops(net=counts.round(load)))


class _Counts:
    """FLOPs of one user, by kind of work."""

    def __init__(self, stage: Rehearsal):
        self.stage, self.clients = stage, stage.federation.clients
        self.cohort = stage.cohort([0])
        self.forward = measure(self._predict)
        self.steps = {phase: measure(lambda n, phase=phase: self._step(phase, n)) for phase in self._phases()}
        # Losses on all training data: under each component, or under each model that is chosen from.
        method = self.clients.method
        if method.client.sweeps and method.placement.mixture is not None:
            self.sweep = measure(self._sweep)
        else:
            self.sweep = self.forward.times(method.server.server_models * method.client.sweeps)

    def round(self, load: Load) -> float:
        """A round's local work."""
        total = self.sweep.flops(load.sweeps, load.swept)
        for phase in self.clients.phases:
            times = load.steps // phase.every * phase.steps
            total += self.steps[phase].flops(times, times * load.items / load.steps)
        for phase in self.clients.method.client.before:
            total += self.steps[phase].flops(phase.steps, load.first(phase.steps))
        return total

    def _phases(self) -> tuple[Phase, ...]:
        return (*self.clients.phases, *self.clients.method.client.before)

    def _tensors(self) -> Tree:
        return self.stage.steps.tensors(self.cohort.part.rows)

    @torch.no_grad()
    def _predict(self, count: int) -> None:
        self.stage.steps.model.predict(self._tensors(), [0], empty_inputs(self.stage, 1, count))

    def _step(self, phase: Phase, count: int) -> None:
        with quietly():
            self.stage.steps.gradient(self.cohort, empty_batch(self.stage, 1, count), phase)

    @torch.no_grad()
    def _sweep(self, count: int) -> None:
        model, batch = (
            self.stage.steps.model,
            self.stage.steps.feed.read("train", [0], empty_batch(self.stage, 1, count)),
        )
        model.component_losses(self._tensors(), [0], batch)


def _stacked_parameters(clients: Clients) -> dict[str, int]:
    """A user's trained parameters by role; all users have the same."""
    layout = clients.model.layout
    counts = {role: int(layout.mask([role]).sum()) for role in sorted(layout.roles & clients.method.client.trained)}
    return {role: count for role, count in counts.items() if count}
