"""Counts of what each user trains, sends and computes.

The engine runs a user's step on tensors without data, and its matrix products are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn

from comingle.cost.memory import Rehearsal, empty_batch, empty_inputs, ignore_grad_warning
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
    """Return the bytes that each user uploads and downloads in one exchange, including messages of a secure sum.

    A message contains the user's name and the round's number, which has one digit here. If the federation shares
    nothing, all sizes are 0.

    Args:
        federation: The federation. If all users are alike it may have fewer users than there are names; its last user
            then stands for the rest.
        names: Names of the users.

    Returns:
        One pair (upload bytes, download bytes) per name.
    """
    clients = federation.clients
    if not clients.shares:
        return [(0, 0)] * len(names)
    messages: dict[int, tuple[Upload, Download]] = {}  # by the user's index in the federation
    sizes = []
    for i, name in enumerate(names):
        user = min(i, len(clients.trainers) - 1)
        if user not in messages:
            messages[user] = upload_of(federation, user), download_of(federation, user, names)
        upload, download = messages[user]
        upload_bytes = packed_bytes(replace(upload, users=(name,)))[0]
        download_bytes = packed_bytes(replace(download, users=(name,)))[0]
        if (secure_sum := federation.server.sums) is not None:
            entries = federation.server.size
            upload_bytes = secure_sum.sent_bytes(name, entries)  # masked uploads replace the plain one
            download_bytes += secure_sum.received_bytes(name, entries)
        sizes.append((upload_bytes, download_bytes))
    return sizes


def mean_bytes(messages: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the mean upload and download bytes, rounded, from a pair (upload bytes, download bytes) per user.

    It is meant for users whose messages differ only in the lengths of the users' names.
    """
    upload_bytes, download_bytes = zip(*messages, strict=True)
    return round(fmean(upload_bytes)), round(fmean(download_bytes))


def upload_of(federation: InProcess, user: int) -> Upload:
    """Return the message that a user uploads in an exchange."""
    return federation.clients.upload([user], 1, {LOSS: torch.zeros(1)}, counts=True)


def download_of(federation: InProcess, user: int, names: Sequence[str]) -> Download:
    """Return the message that a user downloads after an exchange of all users.

    In a peer-to-peer method, which has no server, it contains the uploads of all participants. Its tensors then have
    shapes but no data.

    Args:
        federation: The federation.
        user: The user's index in the federation.
        names: Names of all participants.
    """
    clients, server = federation.clients, federation.server
    if not clients.method.server.peer_to_peer:
        return server.download([clients.trainers[user].name])
    uploaded = {name: t.to("meta") for name, t in upload_of(federation, user).tensors.items()}
    # (1, *shape) of one sender becomes (1 receiver, senders, *shape).
    tensors = {name: t.unsqueeze(1).expand(1, len(names), *t.shape[1:]) for name, t in uploaded.items()}
    return Download(version=1, users=(names[user],), tensors=tensors, ranks=server.ranks[[user]], senders=tuple(names))


def count_exchanges(federation: InProcess) -> int:
    """Return the number of rounds of a run after which users upload and the server aggregates."""
    clients, method, plan = federation.clients, federation.clients.method, federation.clients.plan
    rounds = plan.training.rounds if method.trains else 0
    return sum(exchanged_after(plan, clients.shares, done) for done in range(1, rounds + 1))


ROLES = (ATTENTION, GENERALIST, SPECIALIST, ROUTER)


def count_users(federation: InProcess, names: tuple[str, ...]) -> list[UserCost]:
    """Return the costs of the users of a language model, one entry for each group of users with equal tensors.

    A pooled method, which trains one model on the data of all users, has one entry.

    Args:
        federation: The federation. If all users are alike it may have fewer users than there are names; its last user
            then stands for the rest.
        names: Names of the users.
    """
    clients = federation.clients
    pooled = clients.method.placement.pooled
    rows = clients.row_of if not pooled else clients.row_of[:1]
    entries, parameters = own_entries(clients), _parameters_by_role(clients)
    if pooled:
        names = (f"all {len(names)} users as one",)
    message_sizes = message_bytes(federation, names)
    alike: dict[tuple[Any, ...], list[int]] = {}  # indices of users by their numbers of entries in each slot
    for i in range(len(names)):
        row = rows[min(i, len(rows) - 1)]
        alike.setdefault(tuple(entries[row].tolist()), []).append(i)
    costs = []
    slot_names = [slot.name for slot in clients.model.layout.slots]
    for entries_of_slots, members in alike.items():
        row = rows[min(members[0], len(rows) - 1)]
        parameters_of_user = {role: counts[row % len(clients.trainers)] for role, counts in parameters.items()}
        shape = Shape(clients, row, dict(zip(slot_names, entries_of_slots, strict=True)))
        upload_bytes, download_bytes = mean_bytes([message_sizes[i] for i in members])
        group_names = tuple(names[i] for i in members)
        costs.append(_user_cost(shape, group_names, parameters_of_user, upload_bytes, download_bytes))
    return costs


def _user_cost(
    shape: Shape, names: tuple[str, ...], parameters: dict[str, int], upload_bytes: int, download_bytes: int
) -> UserCost:
    """Return the costs of users that are alike, from one of their rows.

    Args:
        shape: The matrix products of the row.
        names: Names of the users.
        parameters: Their trained parameters by role.
        upload_bytes: Bytes that each of them uploads in an exchange.
        download_bytes: Bytes that each of them downloads in an exchange.
    """
    clients, row = shape.clients, shape.row
    plan, method = clients.plan, clients.method
    # FLOPs of a round, for one token of each local step. Users that choose among several models first compute the loss
    # of each on as much text as they train on.
    passes = shape.forward() * (method.server.server_models * method.client.sweeps * plan.training.local_steps)
    for phase in clients.phases:
        # Mean steps per round: a phase takes `steps` steps at every `every`-th local step, in some of the rounds.
        steps = plan.iterations // phase.every * phase.steps / plan.training.rounds
        steps *= phase.rounds_of(plan.training.rounds) / plan.training.rounds
        passes += shape.training(phase) * (steps * method.placement.copies)
    return UserCost(
        names=names,
        experts=int(shape.adapted.adapters.present[row % len(clients.trainers)].sum()),
        parameters=parameters,
        upload_bytes=upload_bytes,
        download_bytes=download_bytes,
        forward=shape.forward(),
        training=passes * (1 / plan.training.local_steps),
        round=passes * (clients.batch_size * plan.training.context),
    )


def _parameters_by_role(clients: Clients) -> dict[str, list[int]]:
    """Return each trainer's number of trained parameters by role: one list, in the order of the trainers, per role.

    A method may keep several copies of a user's model; their parameters are added. The usual roles are always listed,
    others only if they have parameters.
    """
    layout, users = clients.model.layout, len(clients.trainers)
    trained = clients.mask.cpu() & layout.mask(clients.method.client.trained)
    roles = [*ROLES, *sorted(layout.roles - set(ROLES))]
    counts = {}
    for role in roles:
        counts_of_rows = (trained & layout.mask([role])).sum(1)
        counts[role] = counts_of_rows.view(-1, users).sum(0).tolist()  # rows are copies of all users, one after another
    return {role: count for role, count in counts.items() if role in ROLES or any(count)}


def own_entries(clients: Clients) -> Int[Tensor, "rows slots"]:
    """Return the number of entries in each slot (tensor) of each row, without padding.

    A row has one user's tensors side by side. Tensors of a smaller rank are padded to the largest, and the mask is
    False at the padding.
    """
    mask, layout = clients.mask.cpu(), clients.model.layout
    masks_of_slots = [mask[:, layout.starts[slot.name] :][:, : slot.size] for slot in layout.slots]
    return torch.stack([slot_mask.sum(1) for slot_mask in masks_of_slots], 1)


@dataclass(frozen=True)
class Shape:
    """Matrix products of one row of a federation; ``entries`` maps each slot to its number of entries in this row."""

    clients: Clients
    row: int
    entries: dict[str, int]

    @property
    def adapted(self) -> AdaptedModel:
        """The model, which is a base with adapters; no other model is counted here."""
        return cast(AdaptedModel, self.clients.model)

    def forward(self) -> Flops:
        """Return the FLOPs of one token's forward pass."""
        return forward(self._to_blocks(frozenset()), outside(self.adapted))

    def training(self, phase: Phase) -> Flops:
        """Return the FLOPs of one token's forward and backward pass in a phase.

        They are 0 if the phase trains nothing of the row. Roles in ``phase.without`` take no
        part in the pass.
        """
        trained_slots = [slot.name for slot in self.clients.model.layout.touching(phase.reached).slots]
        remaining = replace(self, entries=self._entries_without(phase.without)) if phase.without else self
        blocks, head = remaining._to_blocks(frozenset(trained_slots)), outside(self.adapted)
        backward_flops = backward(blocks, head)
        return forward(blocks, head) + backward_flops if backward_flops.total else backward_flops

    def _entries_without(self, without: frozenset[str]) -> dict[str, int]:
        """Return the row's number of entries in each slot when some roles are left out of the pass."""
        layout = self.clients.model.layout
        remaining = self.clients.mask.cpu() & ~layout.mask(without)
        views = layout.views(remaining[self.row : self.row + 1].double())
        return {name: int(t.sum()) for name, t in views.items()}

    def _to_blocks(self, trained: frozenset[str]) -> list[Block]:
        """Return the model's decoder layers with their numbers of entries in this row.

        Args:
            trained: Names of the slots that the pass trains.
        """
        entries = self.entries

        def linear(name: str, module: nn.Module) -> Linear:
            """Return a linear with the row's LoRA on it; ``name`` is the prefix of the LoRA's slots."""
            a, b = f"{name}.a", f"{name}.b"
            weight = base_weight(module)[0].numel()
            # The factors of a residual are fused into the products with A and B.
            at_input, at_output = (entries.get(f"{name}.{end}", 0) for end in (IN, OUT))
            return Linear(
                weight=weight,
                a=entries[a] + at_input,
                b=entries[b] + at_output,
                trains_a=a in trained,
                trains_b=b in trained,
            )

        adapters, blocks = self.adapted.adapters, []
        for name, mlp in adapters.experts.items():
            layer = name.removesuffix("mlp")
            # In every known layout the output projection is the last of the attention's linears.
            *reads, writes = [linear(n, m.linear) for n, m in adapters.attention.items() if n.startswith(layer)]
            router = entries.get(f"{name}.router", 0)  # 0 without a router
            trains_router = router > 0 and f"{name}.router" in trained
            # Some gatings take products beyond those with the router's own matrix.
            if router and (count_products := getattr(mlp.router.gating, "multiply_adds", None)) is not None:
                router += count_products(
                    int(adapters.present[self.row % len(self.clients.trainers)].sum()),
                    entries[f"{name}.up.a"],
                    base_weight(mlp.first["up"])[0].shape[1],
                )
            blocks.append(
                Block(
                    reads=tuple(reads),
                    writes=writes,
                    scores=self._score_products(),
                    first=tuple(linear(f"{name}.{key}", inner) for key, inner in mlp.first.items()),
                    last=linear(f"{name}.down", mlp.last),
                    router=router,
                    trains_router=trains_router,
                    whole=mlp.mix == "output",
                    parallel=self._has_parallel_mlp(),
                )
            )
        return blocks

    def _score_products(self) -> int:
        """Return the multiply-adds of one token's query with the keys of the whole context, masked keys included."""
        config = self.adapted.network.config
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        return self.clients.plan.training.context * heads * size

    def _has_parallel_mlp(self) -> bool:
        """Return whether the MLP reads the same input as the attention, as in GPT-NeoX and Phi."""
        config = self.adapted.network.config
        return bool(getattr(config, "use_parallel_residual", config.model_type == "phi"))


def outside(model: AdaptedModel) -> int:
    """Return the number of entries of all matrices outside the decoder layers, that is of the head.

    Embeddings are looked up, not multiplied, so they do not count.
    """
    adapted = {id(m.linear) for m in model.adapters.attention.values()}
    for mlp in model.adapters.experts.values():
        adapted |= {id(m) for m in (*mlp.first.values(), mlp.last)}
    linears = [m for m in model.network.modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"]
    return sum(base_weight(m)[0].numel() for m in linears if id(m) not in adapted)


@dataclass(frozen=True, kw_only=True)
class Load:
    """Local work of one user in a round.

    Args:
        sizes: Sizes of the batches of one epoch, in sequences or samples.
        epochs: Number of epochs.
        sweeps: Number of batches in one sweep over all training data.
        swept: Number of sequences or samples in one sweep.
        unit: Tokens per sequence, or 1 for samples.
    """

    sizes: tuple[int, ...]
    epochs: int
    sweeps: int
    swept: int
    unit: int = 1

    @property
    def steps(self) -> int:
        """Number of batches in a round."""
        return len(self.sizes) * self.epochs

    @property
    def items(self) -> int:
        """Number of sequences or samples in a round."""
        return sum(self.sizes) * self.epochs

    def first(self, steps: int) -> int:
        """Return the number of sequences or samples in the first ``steps`` batches; batches repeat after the last."""
        return sum(self.sizes[i % len(self.sizes)] for i in range(steps))


BaseFlops = Callable[[Load], tuple[Flops, Flops]]
"""FLOPs of the base alone: one token's or sample's forward pass, and a round with one pass per step."""


def text_load(clients: Clients) -> Load:
    """Return the local work of a user of a language model, which is the same for all users."""
    steps, size = clients.plan.training.local_steps, clients.batch_size
    return Load(sizes=(size,), epochs=steps, sweeps=steps, swept=steps * size, unit=clients.plan.training.context)


def count_stacked(stage: Rehearsal, loads: Mapping[str, Load], base: BaseFlops) -> list[UserCost]:
    """Return the costs of the users of a stacked model, one entry for each group of users with equal loads.

    A stacked model is a net, or a client-level mixture of adapters. Its FLOPs are measured, not derived from a formula.

    Args:
        stage: The rehearsal that is measured.
        loads: Each user's local work by name.
        base: FLOPs of the base alone, which are reported separately from those of the method.
    """
    clients, names_by_load = stage.federation.clients, dict[Load, list[str]]()
    for name, load in loads.items():
        names_by_load.setdefault(load, []).append(name)
    measured, parameters = _MeasuredFlops(stage), _stacked_parameters(clients)
    message_sizes = dict(zip(loads, message_bytes(stage.federation, list(loads)), strict=True))
    costs = []
    for load, names in names_by_load.items():
        base_forward, base_round = base(load)
        # Measured FLOPs beyond those of the base count as the adapters'.
        forward = base_forward + Flops(lora=measured.forward.each / load.unit - base_forward.total)
        round_total = measured.round(load)
        round_flops = base_round + Flops(lora=round_total - base_round.total) if round_total else Flops()
        upload_bytes, download_bytes = mean_bytes([message_sizes[name] for name in names])
        costs.append(
            UserCost(
                names=tuple(names),
                experts=0,
                parameters=parameters,
                upload_bytes=upload_bytes,
                download_bytes=download_bytes,
                forward=forward,
                training=round_flops * (1 / (load.items * load.unit)),
                round=round_flops,
                unit=stage.steps.batch_source.unit.removesuffix("s"),
            )
        )
    return costs


def measured_base(stage: Rehearsal) -> BaseFlops:
    """Return the FLOPs of a net alone, as FedAvg trains it."""
    counts = _MeasuredFlops(stage)
    return lambda load: (Flops(net=counts.forward.each / load.unit), Flops(net=counts.round(load)))


class _MeasuredFlops:
    """Measured FLOPs of one user, by kind of work.

    Args:
        stage: The rehearsal, whose steps run on fake tensors.
    """

    def __init__(self, stage: Rehearsal):
        """Measure a forward pass, a step of each phase, and a sweep over all training data."""
        self.stage, self.clients = stage, stage.federation.clients
        self.cohort = stage.cohort([0])
        self.forward = measure(self._predict)
        self.steps = {phase: measure(lambda n, phase=phase: self._step(phase, n)) for phase in self._phases()}
        # A sweep computes losses on all training data: of each component, or of each model that the user chooses from.
        method = self.clients.method
        if method.client.sweeps and method.placement.mixture is not None:
            self.sweep = measure(self._sweep)
        else:
            self.sweep = self.forward.times(method.server.server_models * method.client.sweeps)

    def round(self, load: Load) -> float:
        """Return the FLOPs of a user's round: sweeps over its data, the steps of each phase, and those before them."""
        total = self.sweep.flops(load.sweeps, load.swept)
        for phase in self.clients.phases:
            calls = load.steps // phase.every * phase.steps
            total += self.steps[phase].flops(calls, calls * load.items / load.steps)
        for phase in self.clients.method.client.before:
            total += self.steps[phase].flops(phase.steps, load.first(phase.steps))
        return total

    def _phases(self) -> tuple[Phase, ...]:
        """Return the phases of a round, and those that hooks run before them."""
        return (*self.clients.phases, *self.clients.method.client.before)

    def _tensors(self) -> Tree:
        return self.stage.steps.tensors(self.cohort.part.rows)

    @torch.no_grad()
    def _predict(self, count: int) -> None:
        """Run a forward pass on ``count`` sequences or samples."""
        self.stage.steps.model.predict(self._tensors(), [0], empty_inputs(self.stage, 1, count))

    def _step(self, phase: Phase, count: int) -> None:
        """Compute a phase's gradients on ``count`` sequences or samples."""
        with ignore_grad_warning():
            self.stage.steps.gradient(self.cohort, empty_batch(self.stage, 1, count), phase)

    @torch.no_grad()
    def _sweep(self, count: int) -> None:
        """Compute each component's losses on ``count`` sequences or samples."""
        model, batch_source = self.stage.steps.model, self.stage.steps.batch_source
        batch = batch_source.read("train", [0], empty_batch(self.stage, 1, count))
        model.component_losses(self._tensors(), [0], batch)


def _stacked_parameters(clients: Clients) -> dict[str, int]:
    """Return a user's trained parameters by role; all users have the same."""
    layout = clients.model.layout
    counts = {role: int(layout.mask([role]).sum()) for role in sorted(layout.roles & clients.method.client.trained)}
    return {role: count for role, count in counts.items() if count}
