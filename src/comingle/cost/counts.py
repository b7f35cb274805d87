"""Counts of what each user trains, sends and computes.

The engine runs a user's step on tensors without data, and its matrix products are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import cast

import torch
from jaxtyping import Int
from torch import Tensor, nn

from comingle.cost.memory import Rehearsal, fake_batch, fake_inputs, ignore_grad_warning
from comingle.cost.records import Block, Flops, Linear, UserCost, backward, forward, measure_flops
from comingle.methods.base import Phase
from comingle.models.adapted import AdaptedModel
from comingle.models.lora import IN, OUT, weight_shape
from comingle.protocol.messages import LOSS, Download, Upload
from comingle.protocol.wire import packed_bytes
from comingle.training.backends.local import InProcess
from comingle.training.client import Clients
from comingle.training.settings import exchanged_after
from comingle.utils.trees import ATTENTION, GENERALIST, ROUTER, SPECIALIST, Tree


def message_bytes(federation: InProcess, names: Sequence[str]) -> list[tuple[int, int]]:
    """Return the bytes that each user uploads and downloads in one exchange, including messages of a secure sum.

    The sizes include the user's name and the round's number, which messages contain; the number has one digit here. If
    the federation shares nothing, all sizes are 0.

    Args:
        federation: The federation. If all users have tensors of the same sizes, it may have fewer users than there are
            names; messages of its last user are then counted for all further names.
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
        (upload_bytes,) = packed_bytes(replace(upload, users=(name,)))
        (download_bytes,) = packed_bytes(replace(download, users=(name,)))
        if (secure_sum := federation.server.sums) is not None:
            num_entries = federation.server.size  # of one upload
            upload_bytes = secure_sum.sent_bytes(name, num_entries)  # masked messages replace the plain upload
            download_bytes += secure_sum.received_bytes(name, num_entries)
        sizes.append((upload_bytes, download_bytes))
    return sizes


def mean_bytes(message_sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the users' mean upload bytes and mean download bytes, both rounded.

    The users have messages of the same tensors, whose sizes differ only in the lengths of the users' names.

    Args:
        message_sizes: A pair (upload bytes, download bytes) for each user.
    """
    upload_bytes, download_bytes = zip(*message_sizes, strict=True)
    return round(fmean(upload_bytes)), round(fmean(download_bytes))


def upload_of(federation: InProcess, user: int) -> Upload:
    """Return the message that a user uploads in an exchange; its loss is 0, as the value does not change its size."""
    return federation.clients.upload([user], 1, {LOSS: torch.zeros(1)}, counts=True)


def download_of(federation: InProcess, user: int, names: Sequence[str]) -> Download:
    """Return the message that a user downloads after an exchange of all users.

    In a peer-to-peer method, which has no server, the message contains the uploads of all participants. The tensors of
    this message are on the meta device: they have shapes but no data.

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
    lora_ranks = server.ranks[[user]]  # (1,): the user's
    # The version, a number of rounds, only matters for the length of the message.
    return Download(version=1, users=(names[user],), tensors=tensors, ranks=lora_ranks, senders=tuple(names))


def count_exchanges(federation: InProcess) -> int:
    """Return the number of rounds of a run after which users upload and the server aggregates."""
    clients, method, plan = federation.clients, federation.clients.method, federation.clients.plan
    rounds = plan.training.rounds if method.trains else 0
    return sum(exchanged_after(plan, clients.shares, done) for done in range(1, rounds + 1))


ROLES = (ATTENTION, GENERALIST, SPECIALIST, ROUTER)


def count_users(federation: InProcess, names: tuple[str, ...]) -> list[UserCost]:
    """Return the costs of the users of a language model, one entry for each group of users with equal tensor sizes.

    A pooled method, which trains one model on the data of all users, has one entry.

    Args:
        federation: The federation. If all users have tensors of the same sizes, it may have fewer users than there are
            names; the costs of its last user then are those of all further names.
        names: Names of the users.
    """
    clients = federation.clients
    rows = clients.row_of  # row of each user's model in the state
    if clients.method.placement.pooled:
        rows, names = rows[:1], (f"all {len(names)} users as one",)
    rows_by_name = [rows[min(i, len(rows) - 1)] for i in range(len(names))]
    num_entries, parameters = unpadded_entries(clients), _parameters_by_role(clients)
    message_sizes = message_bytes(federation, names)
    # Indices in `names` of the users with equal tensor sizes, by the numbers of entries of their tensors (slots).
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, row in enumerate(rows_by_name):
        groups.setdefault(tuple(num_entries[row].tolist()), []).append(i)
    costs = []
    slot_names = [slot.name for slot in clients.model.layout.slots]
    for entries_of_slots, indices in groups.items():
        row = rows_by_name[indices[0]]
        # Rows are the first copies of all users' models, then the second copies, and further.
        trainer = row % len(clients.trainers)
        parameters_of_user = {role: counts[trainer] for role, counts in parameters.items()}
        shape = Shape(clients, row, dict(zip(slot_names, entries_of_slots, strict=True)))
        upload_bytes, download_bytes = mean_bytes([message_sizes[i] for i in indices])
        group_names = tuple(names[i] for i in indices)
        costs.append(_user_cost(shape, group_names, parameters_of_user, upload_bytes, download_bytes))
    return costs


def _user_cost(
    shape: Shape, names: tuple[str, ...], parameters: dict[str, int], upload_bytes: int, download_bytes: int
) -> UserCost:
    """Return the costs of users with equal tensor sizes, from the model of one of them.

    The FLOPs of a round are first counted with one token per local step: ``sweep + sum over phases of steps * copies *
    training``. Here ``sweep`` are the forward passes of methods whose users choose among models, ``copies`` is the
    number of models that a user trains, and ``training`` are the FLOPs of a token's forward and backward pass. The sum
    is then multiplied by the tokens of a batch, ``batch_size * context``.

    Args:
        shape: The matrix products of that model.
        names: Names of the users.
        parameters: Their trained parameters by role.
        upload_bytes: Bytes that each of them uploads in an exchange.
        download_bytes: Bytes that each of them downloads in an exchange.
    """
    clients, plan, method = shape.clients, shape.clients.plan, shape.clients.method
    # In a sweep, users that choose among several models compute the loss of each, on as much text as they train on.
    num_models = method.server.server_models if method.client.sweeps else 0
    flops = shape.forward() * (num_models * plan.training.most_local_steps)
    for phase in clients.phases:
        # Mean steps per round: a phase takes `steps` steps at every `every`-th of the run's local steps
        # (`plan.iterations`), in some of the rounds.
        steps = plan.iterations // phase.every * phase.steps / plan.training.rounds
        steps *= phase.rounds_of(plan.training.rounds) / plan.training.rounds
        flops += shape.training(phase) * (steps * method.placement.copies)  # each copy of a user's model is trained
    return UserCost(
        names=names,
        experts=shape.num_experts,
        parameters=parameters,
        upload_bytes=upload_bytes,
        download_bytes=download_bytes,
        forward=shape.forward(),
        training=flops * (1 / plan.training.most_local_steps),  # mean of a token in the local steps
        round=flops * (clients.batch_size * plan.training.context),
    )


def _parameters_by_role(clients: Clients) -> dict[str, list[int]]:
    """Return the number of parameters that each user trains, by role: for each role a list with one number per user.

    A role is a part of the model, such as "attention" or "router". A method may keep several copies of a user's model;
    their parameters are added. The usual roles are always listed, others only if they have parameters.
    """
    layout, num_users = clients.model.layout, len(clients.trainers)
    trained = clients.mask.cpu() & layout.mask(clients.method.client.trained)
    roles = [*ROLES, *sorted(layout.roles - set(ROLES))]
    counts = {}
    for role in roles:
        counts_of_rows = (trained & layout.mask([role])).sum(1)
        # Rows are the first copies of all users' models, then the second copies, and further.
        counts[role] = counts_of_rows.view(-1, num_users).sum(0).tolist()
    return {role: count for role, count in counts.items() if role in ROLES or any(count)}


def unpadded_entries(clients: Clients) -> Int[Tensor, "rows slots"]:
    """Return the number of entries of each tensor of each user's model, without padding.

    A row of the state is one model: its tensors, called slots, flattened side by side. Tensors of a smaller LoRA rank
    are padded to the largest rank; there the clients' mask ``(rows, columns)`` is False.
    """
    mask, layout = clients.mask.cpu(), clients.model.layout
    counts = []
    for slot in layout.slots:
        start = layout.starts[slot.name]
        counts.append(mask[:, start : start + slot.size].sum(1))
    return torch.stack(counts, 1)


@dataclass(frozen=True)
class Shape:
    """Sizes of the matrices of one user's model: a frozen base with this user's adapters.

    Args:
        clients: Clients of the federation.
        row: Row of the user's model in the state.
        entries: Number of entries of each adapter tensor (slot), by name, without padding.
    """

    clients: Clients
    row: int
    entries: dict[str, int]

    @property
    def adapted(self) -> AdaptedModel:
        """The model, which is a base with adapters; no other model is counted here."""
        return cast(AdaptedModel, self.clients.model)

    @property
    def num_experts(self) -> int:
        """Number of experts in each MLP of this user's model."""
        trainer = self.row % len(self.clients.trainers)  # with several copies per user, row copy * trainers + i
        return int(self.adapted.adapters.present[trainer].sum())

    def forward(self) -> Flops:
        """Return the FLOPs of one token's forward pass."""
        return forward(self._to_blocks(frozenset()), head_entries(self.adapted))

    def training(self, phase: Phase) -> Flops:
        """Return the FLOPs of one token's forward and backward pass in a phase.

        A phase that trains no tensor of this model takes no FLOPs, since it runs no pass at all.
        """
        # `reached`: roles for which the phase computes gradients; `without`: roles that it leaves out of the model.
        trained_slots = [slot.name for slot in self.clients.model.layout.touching(phase.reached).slots]
        used = replace(self, entries=self._entries_without(phase.without)) if phase.without else self
        blocks, head = used._to_blocks(frozenset(trained_slots)), head_entries(self.adapted)
        backward_flops = backward(blocks, head)
        return forward(blocks, head) + backward_flops if backward_flops.total else backward_flops

    def _entries_without(self, without: frozenset[str]) -> dict[str, int]:
        """Return the number of entries of each adapter tensor, by name, in a pass that leaves out some roles.

        Tensors of the roles that are left out have 0 entries. Padding is not counted.

        Args:
            without: Roles (parts of the model, such as "router") that are left out.
        """
        layout = self.clients.model.layout
        # The mask is False where this user's tensors are padded to the sizes of other users' tensors.
        remaining = self.clients.mask.cpu() & ~layout.mask(without)
        views = layout.views(remaining[self.row : self.row + 1].double())  # (1, *shape) by name: 1.0 where it remains
        return {name: int(t.sum()) for name, t in views.items()}

    def _to_blocks(self, trained: frozenset[str]) -> list[Block]:
        """Return the sizes of the matrices in each decoder layer, with this user's adapters.

        They determine the FLOPs of a pass through the layer.

        Args:
            trained: Names of the adapter tensors (slots) that the pass trains.
        """
        adapters, blocks = self.adapted.adapters, []
        for name, mlp in adapters.experts.items():
            layer = name.removesuffix("mlp")  # prefix of the names in this decoder layer
            attention = [
                self._to_linear(linear_name, adapter.linear, trained)
                for linear_name, adapter in adapters.attention.items()
                if linear_name.startswith(layer)
            ]
            # In every known layout the output projection is the last of the attention's linears.
            *reads, writes = attention
            router_entries = self.entries.get(f"{name}.router", 0)  # 0 without a router
            trains_router = router_entries > 0 and f"{name}.router" in trained
            # Some gatings take products beyond those with the router's own matrix, which count like its entries.
            if router_entries and (count_products := getattr(mlp.router.gating, "multiply_adds", None)) is not None:
                input_width = weight_shape(mlp.first["up"])[1]
                router_entries += count_products(self.num_experts, self.entries[f"{name}.up.a"], input_width)
            blocks.append(
                Block(
                    reads=tuple(reads),
                    writes=writes,
                    scores=self._score_products(),
                    first=tuple(self._to_linear(f"{name}.{key}", m, trained) for key, m in mlp.first.items()),
                    last=self._to_linear(f"{name}.down", mlp.last, trained),
                    router=router_entries,
                    trains_router=trains_router,
                    whole=mlp.mix == "output",  # experts' outputs are mixed in a single autograd function
                    parallel=self._has_parallel_mlp(),
                )
            )
        return blocks

    def _to_linear(self, name: str, module: nn.Module, trained: frozenset[str]) -> Linear:
        """Return the numbers of entries of a linear layer's weight and of its LoRA's factors A and B.

        Args:
            name: Name of the layer, with which the names of its LoRA's tensors start: ``NAME.a`` and ``NAME.b``.
            module: The linear layer.
            trained: Names of the adapter tensors that the pass trains.
        """
        a, b = f"{name}.a", f"{name}.b"
        # Some methods add a frozen change to the weight, a product of two factors (a residual). One factor is
        # multiplied together with A, the other together with B.
        residual_in, residual_out = (self.entries.get(f"{name}.{end}", 0) for end in (IN, OUT))
        return Linear(
            weight=num_weights(module),
            a=self.entries[a] + residual_in,
            b=self.entries[b] + residual_out,
            trains_a=a in trained,
            trains_b=b in trained,
        )

    def _score_products(self) -> int:
        """Return the multiply-adds of one token's query with the keys of the whole context, masked keys included."""
        config = self.adapted.network.config
        num_heads = config.num_attention_heads
        # Only some configurations have `head_dim`, as in others the heads divide the hidden size.
        head_size = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        return self.clients.plan.training.context * num_heads * head_size

    def _has_parallel_mlp(self) -> bool:
        """Return whether the MLP reads the same input as the attention, as in GPT-NeoX and Phi."""
        config = self.adapted.network.config
        return bool(getattr(config, "use_parallel_residual", config.model_type == "phi"))


def head_entries(model: AdaptedModel) -> int:
    """Return the number of entries of all matrices outside the decoder layers, such as the head.

    Linear layers without adapters are taken to be outside the decoder layers. Embeddings are looked up, not multiplied,
    so they do not count.
    """
    adapted = {id(m.linear) for m in model.adapters.attention.values()}
    for mlp in model.adapters.experts.values():
        adapted |= {id(m) for m in (*mlp.first.values(), mlp.last)}
    # Conv1D is the linear layer of GPT-2 in transformers.
    linears = [m for m in model.network.modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"]
    return sum(num_weights(m) for m in linears if id(m) not in adapted)


def num_weights(linear: nn.Module) -> int:
    """Return the number of entries of a linear layer's weight, without its bias."""
    return weight_shape(linear).numel()


@dataclass(frozen=True, kw_only=True)
class Load:
    """Local work of one user in a round.

    Args:
        sizes: Sizes of the batches of one epoch, in sequences or samples.
        epochs: Number of epochs.
        sweep_batches: Number of batches in one sweep over all training data.
        sweep_items: Number of sequences or samples in one sweep.
        unit: Tokens per sequence, or 1 for samples.
    """

    sizes: tuple[int, ...]
    epochs: int
    sweep_batches: int
    sweep_items: int
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
    """Return the local work of a user of a language model in a round, which is the same for all users.

    Local work is described in epochs. Steps on text draw random windows instead, so each local step is described as an
    epoch of one batch. Some methods also compute losses on training data without training; such a sweep reads as much
    text as the local steps.
    """
    steps, size = clients.plan.training.most_local_steps, clients.batch_size
    context = clients.plan.training.context
    return Load(sizes=(size,), epochs=steps, sweep_batches=steps, sweep_items=steps * size, unit=context)


def count_stacked(rehearsal: Rehearsal, loads: Mapping[str, Load], base: BaseFlops) -> list[UserCost]:
    """Return the costs of the users of a net or of a client-level mixture, one entry for each group with equal loads.

    In a client-level mixture each user has one vector of weights for adapter sets or models, as in FLoRAL. The formulas
    for FLOPs of token-level experts do not apply to nets and such mixtures, so FLOPs are measured on fake tensors.

    Args:
        rehearsal: The run's federation, on fake tensors.
        loads: Each user's local work in a round, by name.
        base: FLOPs of the base alone, which are reported separately. All further FLOPs count as the adapters'.
    """
    clients, names_by_load = rehearsal.federation.clients, dict[Load, list[str]]()
    for name, load in loads.items():
        names_by_load.setdefault(load, []).append(name)
    measured, parameters = _MeasuredFlops(rehearsal), _stacked_parameters(clients)
    message_sizes = dict(zip(loads, message_bytes(rehearsal.federation, list(loads)), strict=True))
    costs = []
    for load, names in names_by_load.items():
        base_forward, base_round = base(load)
        # `each` are the FLOPs of one sequence or sample, `unit` is its number of tokens (1 for a sample).
        forward_total = measured.forward.each / load.unit
        forward = base_forward + Flops(lora=forward_total - base_forward.total)
        round_total = measured.round(load)
        # A method without training takes no FLOPs in a round, not even those of the base.
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
                training=round_flops * (1 / (load.items * load.unit)),  # items: sequences or samples of a round
                round=round_flops,
                unit=rehearsal.steps.batch_source.unit.removesuffix("s"),
            )
        )
    return costs


def measured_base(rehearsal: Rehearsal) -> BaseFlops:
    """Return a function that gives the FLOPs of training a net with FedAvg, to compare other methods with.

    Args:
        rehearsal: A federation with the method FedAvg, on fake tensors (shapes without values).

    Returns:
        Function from a user's local work in a round to two FLOPs: of the forward pass of one token or sample, and of
        the round.
    """
    measured = _MeasuredFlops(rehearsal)
    return lambda load: (Flops(net=measured.forward.each / load.unit), Flops(net=measured.round(load)))


class _MeasuredFlops:
    """Measured FLOPs of one user, by kind of work.

    Args:
        rehearsal: The run's federation, on fake tensors.
    """

    def __init__(self, rehearsal: Rehearsal):
        """Measure a forward pass, a step of each phase, and a sweep over all training data.

        Each is a linear function of the number of sequences or samples.

        Args:
            rehearsal: The run's federation, on fake tensors (shapes without values).
        """
        self.rehearsal, self.clients = rehearsal, rehearsal.federation.clients
        self.cohort = rehearsal.cohort([0])  # the first user stands for all
        self.forward = measure_flops(self._predict)
        # phase=phase: a lambda without it would use the last phase
        self.steps = {phase: measure_flops(lambda n, phase=phase: self._step(phase, n)) for phase in self._phases()}
        # Some methods compute losses on all training data, to weigh the components of a mixture or to choose a model. A
        # sweep is one pass of each component, or of each model that the user chooses from.
        method = self.clients.method
        if method.client.sweeps and method.placement.mixture is not None:
            self.sweep = measure_flops(self._sweep)
        else:
            self.sweep = self.forward.times(method.server.server_models * method.client.sweeps)

    def round(self, load: Load) -> float:
        """Return the FLOPs of a user's round.

        These are the FLOPs of a sweep (losses on all training data, without training, if the method needs them), of the
        steps of each phase, and of steps that client hooks take before the phases.

        Args:
            load: The user's local work in the round.
        """
        total = self.sweep.flops(load.sweep_batches, load.sweep_items)
        for phase in self.clients.phases:
            # A phase takes `steps` steps after every `every`-th batch, on batches of mean size.
            num_steps = load.steps // phase.every * phase.steps
            total += self.steps[phase].flops(num_steps, num_steps * load.items / load.steps)
        for phase in self.clients.method.client.before:
            total += self.steps[phase].flops(phase.steps, load.first(phase.steps))
        return total

    def _phases(self) -> tuple[Phase, ...]:
        """Return the phases of a round, and those that hooks run before them."""
        return (*self.clients.phases, *self.clients.method.client.before)

    def _tensors(self) -> Tree:
        """Return the fake tensors of the one model that is measured, by name."""
        return self.rehearsal.steps.tensors(self.cohort.part.rows)

    @torch.no_grad()
    def _predict(self, count: int) -> None:
        """Run a forward pass on ``count`` sequences or samples."""
        self.rehearsal.steps.model.predict(self._tensors(), [0], fake_inputs(self.rehearsal, 1, count))

    def _step(self, phase: Phase, count: int) -> None:
        """Compute a phase's gradients on ``count`` sequences or samples."""
        with ignore_grad_warning():
            self.rehearsal.steps.gradient(self.cohort, fake_batch(self.rehearsal, 1, count), phase)

    @torch.no_grad()
    def _sweep(self, count: int) -> None:
        """Compute the losses of each component of a mixture on ``count`` sequences or samples."""
        model, batch_source = self.rehearsal.steps.model, self.rehearsal.steps.batch_source
        batch = batch_source.read("train", [0], fake_batch(self.rehearsal, 1, count))
        model.component_losses(self._tensors(), [0], batch)


def _stacked_parameters(clients: Clients) -> dict[str, int]:
    """Return a user's trained parameters by role; all users have the same."""
    layout = clients.model.layout
    counts = {role: int(layout.mask([role]).sum()) for role in sorted(layout.roles & clients.method.client.trained)}
    return {role: count for role, count in counts.items() if count}
