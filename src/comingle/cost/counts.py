"""What each user trains, sends and computes.

A user's step is the engine's own, run on tensors without data; its products are counted as they happen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn

from comingle.cost.memory import Rehearsal, empty_batch, empty_inputs, quietly
from comingle.cost.records import Block, Flops, Linear, UserCost, backward, forward, measure
from comingle.methods.base import Phase
from comingle.models.adapted import AdaptedModel
from comingle.models.lora import IN, OUT, base_weight
from comingle.protocol.messages import LOSS, Download, Upload
from comingle.protocol.wire import packed_bytes
from comingle.training.backends.local import InProcess
from comingle.training.client import Clients
from comingle.training.settings import exchanged_after
from comingle.utils.trees import ATTENTION, GENERALIST, ROUTER, SPECIALIST, Tree


def message_bytes(federation: InProcess, names: Sequence[str]) -> list[tuple[int, int]]:
    """Bytes that each of the users called ``names`` sends in an exchange, and receives in one.

    ``federation`` may hold fewer where all are alike: then its last user stands for the rest. Users' names are part of
    messages, and so is the number of the round, which has one digit here.
    """
    clients = federation.clients
    if not clients.shares:
        return [(0, 0)] * len(names)
    known: dict[int, tuple[Upload, Download]] = {}
    sizes = []
    for i, name in enumerate(names):
        at = min(i, len(clients.trainers) - 1)
        if at not in known:
            known[at] = upload_of(federation, at), download_of(federation, at, names)
        sent, received = (packed_bytes(replace(message, users=(name,)))[0] for message in known[at])
        if (sums := federation.server.sums) is not None:
            size = federation.server.size
            sent, received = sums.sent_bytes(name, size), received + sums.received_bytes(name, size)
        sizes.append((sent, received))
    return sizes


def mean_bytes(messages: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Of users who are alike but for the lengths of their names, to the nearest byte."""
    sent, received = zip(*messages, strict=True)
    return round(fmean(sent)), round(fmean(received))


def upload_of(federation: InProcess, user: int) -> Upload:
    """What a user sends in an exchange."""
    return federation.clients.upload([user], 1, {LOSS: torch.zeros(1)}, counts=True)


def download_of(federation: InProcess, user: int, names: Sequence[str]) -> Download:
    """What a user receives once all of ``names`` have taken part; between peers in shapes alone."""
    clients, server = federation.clients, federation.server
    if not clients.method.server.peer_to_peer:
        return server.download([clients.trainers[user].name])
    sent = {name: t.to("meta") for name, t in upload_of(federation, user).tensors.items()}
    tensors = {name: t.unsqueeze(1).expand(1, len(names), *t.shape[1:]) for name, t in sent.items()}
    return Download(version=1, users=(names[user],), tensors=tensors, ranks=server.ranks[[user]], senders=tuple(names))


def count_exchanges(federation: InProcess) -> int:
    """How many there are in a whole run."""
    clients, method, plan = federation.clients, federation.clients.method, federation.clients.plan
    rounds = plan.training.rounds if method.trains else 0
    return sum(exchanged_after(plan, clients.shares, done) for done in range(1, rounds + 1))


ROLES = (ATTENTION, GENERALIST, SPECIALIST, ROUTER)


def count_users(federation: InProcess, names: tuple[str, ...]) -> list[UserCost]:
    """The costs of the users called ``names``, those who are alike together.

    ``federation`` may hold fewer users than there are names where all are alike: then the last stands for the rest.
    """
    clients = federation.clients
    pooled = clients.method.placement.pooled
    rows = clients.row_of if not pooled else clients.row_of[:1]
    entries, parameters = own_entries(clients), _parameters(clients)
    if pooled:
        names = (f"all {len(names)} users as one",)
    messages, alike = message_bytes(federation, names), dict[tuple[Any, ...], list[int]]()
    for i in range(len(names)):
        alike.setdefault(tuple(entries[rows[min(i, len(rows) - 1)]].tolist()), []).append(i)
    costs = []
    for key, members in alike.items():
        row = rows[min(members[0], len(rows) - 1)]
        counts_of_row = {role: counts[row % len(clients.trainers)] for role, counts in parameters.items()}
        shape = Shape(clients, row, dict(zip((s.name for s in clients.model.layout.slots), key, strict=True)))
        sent, received = mean_bytes([messages[i] for i in members])
        costs.append(_user(shape, tuple(names[i] for i in members), counts_of_row, sent, received))
    return costs


def _user(shape: Shape, names: tuple[str, ...], parameters: dict[str, int], sent: int, received: int) -> UserCost:
    clients, row = shape.clients, shape.row
    plan, method = clients.plan, clients.method
    # As much text as is trained on, under every model that is chosen from, and no step.
    passes = shape.forward() * (method.server.server_models * method.client.sweeps * plan.training.local_steps)
    for phase in clients.phases:
        steps = plan.iterations // phase.every * phase.steps / plan.training.rounds
        steps *= phase.rounds_of(plan.training.rounds) / plan.training.rounds
        passes += shape.training(phase) * (steps * method.placement.copies)
    return UserCost(
        names=names,
        experts=int(shape.adapted.adapters.present[row % len(clients.trainers)].sum()),
        parameters=parameters,
        upload_bytes=sent,
        download_bytes=received,
        forward=shape.forward(),
        training=passes * (1 / plan.training.local_steps),
        round=passes * (clients.batch_size * plan.training.context),
    )


def _parameters(clients: Clients) -> dict[str, list[int]]:
    """Each trainer's trained parameters by role, in all copies."""
    layout, users = clients.model.layout, len(clients.trainers)
    trained = clients.mask.cpu() & layout.mask(clients.method.client.trained)
    roles = [*ROLES, *sorted(layout.roles - set(ROLES))]
    counts = {role: (trained & layout.mask([role])).sum(1).view(-1, users).sum(0).tolist() for role in roles}
    return {role: count for role, count in counts.items() if role in ROLES or any(count)}


def own_entries(clients: Clients) -> Int[Tensor, "rows slots"]:
    """How many entries of each slot a row really has, padding left out."""
    mask, layout = clients.mask.cpu(), clients.model.layout
    return torch.stack([mask[:, layout.starts[s.name] :][:, : s.size].sum(1) for s in layout.slots], 1)


@dataclass(frozen=True)
class Shape:
    """The matrix products of one row of a federation; ``entries`` are its entries in each slot."""

    clients: Clients
    row: int
    entries: dict[str, int]

    @property
    def adapted(self) -> AdaptedModel:
        """Only adapters over one base are counted here."""
        return cast(AdaptedModel, self.clients.model)

    def forward(self) -> Flops:
        """One token's forward pass."""
        return forward(self._blocks(frozenset()), outside(self.adapted))

    def training(self, phase: Phase) -> Flops:
        """One token's forward and backward pass in a phase; nothing where the row has nothing that it trains."""
        slots = [s.name for s in self.clients.model.layout.touching(phase.reached).slots]
        left = replace(self, entries=self._left(phase.without)) if phase.without else self
        blocks, head = left._blocks(frozenset(slots)), outside(self.adapted)
        spent = backward(blocks, head)
        return forward(blocks, head) + spent if spent.total else spent

    def _left(self, without: frozenset[str]) -> dict[str, int]:
        """What a pass without some roles has in each slot."""
        layout = self.clients.model.layout
        there = layout.views((self.clients.mask.cpu() & ~layout.mask(without))[self.row : self.row + 1].double())
        return {name: int(t.sum()) for name, t in there.items()}

    def _blocks(self, trained: frozenset[str]) -> list[Block]:
        entries = self.entries

        def linear(name: str, module: nn.Module) -> Linear:
            a, b = f"{name}.a", f"{name}.b"
            weight = base_weight(module)[0].numel()
            beside = [entries.get(f"{name}.{end}", 0) for end in (IN, OUT)]  # in one product with A and with B
            own = {"a": entries[a] + beside[0], "b": entries[b] + beside[1]}
            return Linear(weight=weight, **own, trains_a=a in trained, trains_b=b in trained)

        adapters, blocks = self.adapted.adapters, []
        for name, mlp in adapters.experts.items():
            layer = name.removesuffix("mlp")
            # In every known layout the output projection is the last of the attention's linears.
            *reads, writes = [linear(n, m.linear) for n, m in adapters.attention.items() if n.startswith(layer)]
            router = entries.get(f"{name}.router", 0)
            trains_router = router > 0 and f"{name}.router" in trained
            if router and (beside := getattr(mlp.router.gating, "multiplies", None)) is not None:
                router += beside(
                    int(adapters.present[self.row % len(self.clients.trainers)].sum()),
                    entries[f"{name}.up.a"],
                    base_weight(mlp.first["up"])[0].shape[1],
                )
            blocks.append(
                Block(
                    reads=tuple(reads),
                    writes=writes,
                    scores=self._scores(),
                    first=tuple(linear(f"{name}.{key}", inner) for key, inner in mlp.first.items()),
                    last=linear(f"{name}.down", mlp.last),
                    router=router,
                    trains_router=trains_router,
                    whole=mlp.mix == "output",
                    parallel=self._parallel(),
                )
            )
        return blocks

    def _scores(self) -> int:
        """Multiply-adds of one token's query with the keys of a whole window (masked ones are computed too)."""
        config = self.adapted.network.config
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        return self.clients.plan.training.context * heads * size

    def _parallel(self) -> bool:
        config = self.adapted.network.config
        return bool(getattr(config, "use_parallel_residual", config.model_type == "phi"))


def outside(model: AdaptedModel) -> int:
    """Entries of all matrices outside the decoder layers: the head."""
    adapted = {id(m.linear) for m in model.adapters.attention.values()}
    for mlp in model.adapters.experts.values():
        adapted |= {id(m) for m in (*mlp.first.values(), mlp.last)}
    linears = [m for m in model.network.modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"]
    return sum(base_weight(m)[0].numel() for m in linears if id(m) not in adapted)


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
    steps, size = clients.plan.training.local_steps, clients.batch_size
    return Load(sizes=(size,), epochs=steps, sweeps=steps, swept=steps * size, unit=clients.plan.training.context)


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
