"""What each user of a federation trains, sends and computes, read off the engine's own objects."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn

from comingle.costing.flops import Block, Flops, Linear, backward, forward
from comingle.costing.messages import mean_bytes, message_bytes
from comingle.costing.records import UserCost
from comingle.methods.base import Phase
from comingle.models.adapted import AdaptedModel
from comingle.models.lora import IN, OUT, base_weight
from comingle.training.backends.local import InProcess
from comingle.training.client import Clients
from comingle.utils.trees import ATTENTION, GENERALIST, ROUTER, SPECIALIST

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
    training, method = clients.training, clients.method
    # As much text as is trained on, under every model that is chosen from, and no step.
    passes = shape.forward() * (method.server.server_models * method.client.sweeps * training.local_steps)
    for phase in clients.phases:
        steps = training.iterations // phase.every * phase.steps / training.rounds
        steps *= phase.rounds_of(training.rounds) / training.rounds
        passes += shape.training(phase) * (steps * method.placement.copies)
    return UserCost(
        names=names,
        experts=int(shape.adapted.adapters.present[row % len(clients.trainers)].sum()),
        parameters=parameters,
        upload_bytes=sent,
        download_bytes=received,
        forward=shape.forward(),
        training=passes * (1 / training.local_steps),
        round=passes * (clients.batch_size * training.context),
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
        return self.clients.training.context * heads * size

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
