"""Counts of what each user trains, sends and computes.

The engine runs a user's step on tensors without data, and its matrix products are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import cast

import torch
from jaxtyping import Int
from torch import Tensor, nn

from comingle.cost.memory import Rehearsal, fake_batch, fake_inputs, ignore_grad_warning
from comingle.cost.records import Block, Flops, Linear, LinearFlops, UserCost, backward, forward, measure_flops
from comingle.methods.base import Phase
from comingle.models.adapted import AdaptedModel
from comingle.models.injection import RoutedMLP
from comingle.models.lora import IN, MIDDLE, OUT, weight_shape
from comingle.protocol.messages import LOSS, Download, Upload
from comingle.protocol.wire import packed_bytes
from comingle.training.backends.local import InProcess
from comingle.training.client import Clients
from comingle.training.settings import exchanged_after
from comingle.utils.trees import ATTENTION, GENERALIST, ROUTER, SPECIALIST, Tree


def message_bytes(federation: InProcess, names: Sequence[str], *, version: int = 1) -> list[tuple[int, int]]:
    """Return the bytes that each user uploads and downloads in one exchange, including messages of a secure sum.

    Messages contain the user's name, so sizes depend on it. All sizes are 0 if the federation shares nothing.

    Args:
        federation: The federation. If all users are alike, it may have fewer users than names. Its last user then
            stands for each further name.
        names: Names of the users.
        version: Version that the users have downloaded before; 0 for the exchange with tensors that are sent once.

    Returns:
        One pair (upload bytes, download bytes) per name.
    """
    clients, server = federation.clients, federation.server
    if not clients.shares:
        return [(0, 0)] * len(names)
    messages: dict[int, tuple[Upload, Download]] = {}  # upload and download by index of the user in the federation
    sizes = []
    for i, name in enumerate(names):
        index = min(i, len(clients.trainers) - 1)
        if index not in messages:
            messages[index] = upload_of(federation, index, version), download_of(federation, index, names, version)
        upload, download = messages[index]
        (upload_bytes,) = packed_bytes(replace(upload, users=(name,)))
        (download_bytes,) = packed_bytes(replace(download, users=(name,)))
        if server.sums is not None:  # a secure sum: masked messages replace the plain upload
            num_entries = server.size  # of one upload
            upload_bytes = server.sums.sent_bytes(name, num_entries)
            download_bytes += server.sums.received_bytes(name, num_entries)
        sizes.append((upload_bytes, download_bytes))
    return sizes


def mean_bytes(message_sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the users' mean upload bytes and mean download bytes, both rounded.

    Args:
        message_sizes: A pair (upload bytes, download bytes) for each user.
    """
    upload_bytes, download_bytes = zip(*message_sizes, strict=True)
    return round(fmean(upload_bytes)), round(fmean(download_bytes))


def upload_of(federation: InProcess, user: int, version: int = 1) -> Upload:
    """Return a message of the size that a user uploads in an exchange, to count its bytes.

    Its round and training loss are placeholders, since they do not change the size.

    Args:
        federation: The users and the server of a run.
        user: The user's index in the federation.
        version: Version that the user has downloaded; 0 for an upload with tensors that are sent once.
    """
    placeholder_loss = {LOSS: torch.zeros(1)}
    return federation.clients.upload([user], 1, placeholder_loss, counts=True, version=version)


def download_of(federation: InProcess, user: int, names: Sequence[str], version: int = 1) -> Download:
    """Return the message that a user downloads after an exchange of all users.

    In a peer-to-peer method, which has no server, it contains the uploads of all users, on the meta device.

    Args:
        federation: The users and the server of a run.
        user: The user's index in the federation.
        names: Names of all users.
        version: Version that the user has downloaded before; 0 for a download with tensors that are sent once.
    """
    clients, server = federation.clients, federation.server
    if not clients.method.server.peer_to_peer:
        return server.download([clients.trainers[user].name], once=version < 1)
    tensors = {}
    for name, uploaded in upload_of(federation, user).tensors.items():
        without_data = uploaded.to("meta")  # (1 sender, *shape)
        one_receiver = without_data.unsqueeze(1)  # (1 receiver, 1 sender, *shape)
        tensors[name] = one_receiver.expand(1, len(names), *uploaded.shape[1:])  # (1 receiver, senders, *shape)
    return Download(
        version=1,  # the round; only its number of digits changes the size of the message
        users=(names[user],),
        tensors=tensors,
        ranks=server.ranks[[user]],  # LoRA rank of the user, shape (1,)
        senders=tuple(names),
    )


def count_exchanges(federation: InProcess) -> int:
    """Return the number of rounds of a run that end with an exchange: users upload and the server aggregates.

    Some methods exchange only after every few rounds, or never.
    """
    clients = federation.clients
    plan = clients.plan
    if not clients.method.trains:
        return 0
    rounds_done = range(1, plan.training.rounds + 1)
    return sum(exchanged_after(plan, clients.shares, done) for done in rounds_done)


ROLES = (ATTENTION, GENERALIST, SPECIALIST, ROUTER)
"""Roles of the tensors that users of a language model train."""


def count_users(federation: InProcess, names: tuple[str, ...]) -> list[UserCost]:
    """Return the costs of the users of a language model, one entry for each group of users with equal tensor sizes.

    A pooled method, which trains one model on the data of all users, has one entry.

    Args:
        federation: The federation. If all users are alike, it may have fewer users than names. The further names then
            get the costs of its last user.
        names: Names of the users.
    """
    clients = federation.clients
    slot_names = [slot.name for slot in clients.model.layout.slots]  # a slot is a tensor of a user's model
    rows = clients.row_of  # row of each user's model in the state
    if clients.method.placement.pooled:
        rows, names = rows[:1], (f"all {len(names)} users as one",)
    last = len(rows) - 1
    rows_by_name = [rows[min(i, last)] for i in range(len(names))]  # such as [0, 1, 2, 2, 2] for 5 names and 3 users
    sizes_by_row = unpadded_entries(clients)
    parameters_by_role = _parameters_by_role(clients)
    message_sizes = message_bytes(federation, names)
    indices_by_sizes: dict[tuple[int, ...], list[int]] = {}  # indices in `names` of users with equal tensor sizes
    for i, row in enumerate(rows_by_name):
        sizes = tuple(sizes_by_row[row].tolist())
        indices_by_sizes.setdefault(sizes, []).append(i)
    costs = []
    for sizes, indices in indices_by_sizes.items():
        row = rows_by_name[indices[0]]  # the first user of the group stands for all
        trainer = row % len(clients.trainers)  # rows: first models of all users, then their second models, and so on
        upload_bytes, download_bytes = mean_bytes([message_sizes[i] for i in indices])
        cost = _user_cost(
            Shape(clients, row, dict(zip(slot_names, sizes, strict=True))),
            names=tuple(names[i] for i in indices),
            parameters={role: counts[trainer] for role, counts in parameters_by_role.items()},
            upload_bytes=upload_bytes,
            download_bytes=download_bytes,
        )
        costs.append(cost)
    return costs


def _user_cost(
    shape: Shape, names: tuple[str, ...], parameters: dict[str, int], upload_bytes: int, download_bytes: int
) -> UserCost:
    """Return the costs of users with equal tensor sizes, from the model of one of them.

    Args:
        shape: The matrix products of that model.
        names: Names of the users.
        parameters: Their trained parameters by role.
        upload_bytes: Bytes that each of them uploads in an exchange.
        download_bytes: Bytes that each of them downloads in an exchange.
    """
    clients, method = shape.clients, shape.clients.method
    plan, training = clients.plan, clients.plan.training
    # FLOPs of a round as if each batch had one token. They are multiplied by the tokens of a batch below.
    # Users that choose among several models compute the loss of each (a sweep), on as much text as they train on.
    num_swept_models = method.server.server_models if method.client.sweeps else 0
    flops = shape.forward() * (num_swept_models * training.most_local_steps)
    for phase in clients.phases:
        # A phase takes `phase.steps` steps after every `phase.every`-th local step, but only in every `phase.turns`-th
        # round. These are its mean steps per round, over the `plan.iterations` local steps of the run.
        steps_per_round = plan.iterations // phase.every * phase.steps / training.rounds
        steps_per_round *= phase.rounds_of(training.rounds) / training.rounds
        flops += shape.training(phase) * (steps_per_round * method.placement.copies)  # copies: models per user
    tokens_per_batch = clients.batch_size * training.context
    return UserCost(
        names=names,
        experts=shape.num_experts,
        parameters=parameters,
        upload_bytes=upload_bytes,
        download_bytes=download_bytes,
        forward=shape.forward(),
        training=flops * (1 / training.most_local_steps),  # of one token, as a mean over the local steps
        round=flops * tokens_per_batch,
    )


def _parameters_by_role(clients: Clients) -> dict[str, list[int]]:
    """Return the number of parameters that each user trains, by role, such as ``{"attention": [64, 64], ...}``.

    If a method keeps several copies of a user's model, their parameters are added. The roles in :data:`ROLES` are
    always listed, others only if they have parameters.
    """
    layout, num_users = clients.model.layout, len(clients.trainers)
    trained = clients.mask.cpu() & layout.mask(clients.method.client.trained)
    other_roles = sorted(layout.roles - set(ROLES))
    parameters: dict[str, list[int]] = {}
    for role in [*ROLES, *other_roles]:
        counts_of_rows = (trained & layout.mask([role])).sum(1)
        # With 2 users, a and b, that have 2 models each, the rows are those of a's first model, b's first, a's second
        # and b's second.
        counts_of_models = counts_of_rows.view(-1, num_users)  # (models of a user, users)
        counts = counts_of_models.sum(0).tolist()
        if role in ROLES or any(counts):
            parameters[role] = counts
    return parameters


def unpadded_entries(clients: Clients) -> Int[Tensor, "rows slots"]:
    """Return the number of entries of each tensor (slot) of each user's model (row), without padding.

    In a row, tensors of a smaller LoRA rank are padded to the largest rank.
    """
    mask, layout = clients.mask.cpu(), clients.model.layout  # mask (rows, columns): False for padding
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
        """Return the FLOPs of training on one token: of its forward pass, and of the gradients that are needed.

        Args:
            phase: The kind of local step: which tensors it trains, and which roles (such as the router) it leaves out
                of the model. The result is 0 if it trains no tensor of this model.
        """
        trained_layout = self.clients.model.layout.touching(phase.reached)  # tensors that get gradients in the phase
        trained_slots = frozenset(slot.name for slot in trained_layout.slots)
        shape_in_phase = self
        if phase.without:  # roles that the phase leaves out of the model
            shape_in_phase = replace(self, entries=self._entries_without(phase.without))
        blocks = shape_in_phase._to_blocks(trained_slots)  # sizes of the matrices in each decoder layer
        head = head_entries(self.adapted)  # and outside of them
        backward_flops = backward(blocks, head)
        if not backward_flops.total:
            return backward_flops
        return forward(blocks, head) + backward_flops

    def _entries_without(self, without: frozenset[str]) -> dict[str, int]:
        """Return the number of entries of each adapter tensor, by name, without padding.

        Args:
            without: Roles (parts of the model, such as "router") whose tensors count as 0 entries.
        """
        layout = self.clients.model.layout
        remaining = self.clients.mask.cpu() & ~layout.mask(without)  # the clients' mask is False for padding
        own_row = remaining[self.row : self.row + 1].double()  # (1, columns): 1.0 where an entry remains
        tensor_by_name = layout.views(own_row)  # the row split into tensors of shape (1, *shape)
        return {name: int(t.sum()) for name, t in tensor_by_name.items()}

    def _to_blocks(self, trained: frozenset[str]) -> list[Block]:
        """Return the sizes of the matrices in each decoder layer, with this user's adapters.

        Args:
            trained: Names of the adapter tensors (slots) that the pass trains.
        """
        adapters, blocks = self.adapted.adapters, []
        for name, mlp in adapters.experts.items():
            layer_prefix = name.removesuffix("mlp")
            attention = [
                self._to_linear(linear_name, adapter.linear, trained)
                for linear_name, adapter in adapters.attention.items()
                if linear_name.startswith(layer_prefix)
            ]
            *qkv, attention_out = attention  # the output projection is last in every known layout
            mlp_in = [self._to_linear(f"{name}.{key}", linear, trained) for key, linear in mlp.first.items()]
            router_products = self._router_products(name, mlp)
            block = Block(
                qkv=tuple(qkv),
                attention_out=attention_out,
                score_products=self._score_products(),
                mlp_in=tuple(mlp_in),
                mlp_out=self._to_linear(f"{name}.down", mlp.last, trained),
                router=router_products,
                trains_router=router_products > 0 and f"{name}.router" in trained,
                one_autograd_function=mlp.mix == "output",  # with "linear" each linear layer mixes
                parallel_mlp=self._has_parallel_mlp(),
            )
            blocks.append(block)
        return blocks

    def _router_products(self, name: str, mlp: RoutedMLP) -> int:
        """Return the multiply-adds of one token in a layer's router: its entries, and what its gating computes further.

        Args:
            name: Name of the layer's MLP.
            mlp: The MLP, with experts.
        """
        router_entries = self.entries.get(f"{name}.router", 0)
        if not router_entries:  # no router
            return 0
        count_further_products = getattr(mlp.router.gating, "multiply_adds", None)
        if count_further_products is None:  # the gating only multiplies by the router
            return router_entries
        input_width = weight_shape(mlp.first["up"])[1]
        return router_entries + count_further_products(self.num_experts, self.entries[f"{name}.up.a"], input_width)

    def _to_linear(self, name: str, module: nn.Module, trained: frozenset[str]) -> Linear:
        """Return the numbers of entries of a linear layer's weight and of its LoRA's factors A and B.

        Args:
            name: Name of the layer. Its LoRA's tensors are ``NAME.a`` and ``NAME.b``.
            module: The linear layer.
            trained: Names of the adapter tensors that the pass trains.
        """
        a, b = f"{name}.a", f"{name}.b"
        # Some methods add a frozen low-rank product to the weight (a residual). One of its factors is multiplied
        # together with A, the other together with B.
        middle = self.entries.get(f"{name}.{MIDDLE}", 0)  # multiplied after A
        residual_in = self.entries.get(f"{name}.{IN}", 0)
        residual_out = self.entries.get(f"{name}.{OUT}", 0)
        return Linear(
            weight=num_weights(module),
            a=self.entries[a] + middle + residual_in,
            b=self.entries[b] + residual_out,
            trains_a=a in trained or f"{name}.{MIDDLE}" in trained,
            trains_b=b in trained,
        )

    def _score_products(self) -> int:
        """Return the multiply-adds of one token's query with the keys of the whole context, masked keys included."""
        config = self.adapted.network.config
        num_heads = config.num_attention_heads
        head_size = getattr(config, "head_dim", None)  # some configurations have it
        if head_size is None or head_size == 0:
            head_size = config.hidden_size // num_heads
        return self.clients.plan.training.context * num_heads * head_size

    def _has_parallel_mlp(self) -> bool:
        """Return whether the MLP reads the same input as the attention, as in GPT-NeoX and Phi."""
        config = self.adapted.network.config
        is_phi = config.model_type == "phi"
        return bool(getattr(config, "use_parallel_residual", is_phi))


def head_entries(model: AdaptedModel) -> int:
    """Return the number of entries of the matrices outside the decoder layers: those of linear layers without adapters.

    Embeddings are looked up, not multiplied, so they do not count.
    """
    adapted = [adapter.linear for adapter in model.adapters.attention.values()]
    for mlp in model.adapters.experts.values():
        adapted += [*mlp.first.values(), mlp.last]
    adapted_ids = {id(linear) for linear in adapted}
    total = 0
    for module in model.network.modules():
        is_linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # Conv1D: linear layer of GPT-2
        if is_linear and id(module) not in adapted_ids:
            total += num_weights(module)
    return total


def num_weights(linear: nn.Module) -> int:
    """Return the number of entries of a linear layer's weight, without its bias."""
    return weight_shape(linear).numel()


@dataclass(frozen=True, kw_only=True)
class LocalWork:
    """Batches that one user reads in a round.

    Items are sequences or samples. A sweep is a pass over all training data without gradients, with which users of some
    methods choose a model.

    Args:
        batch_sizes: Items in each batch of one epoch, such as ``(32, 32, 7)``.
        epochs: Number of epochs in a round.
        sweep_batches: Number of batches in one sweep.
        sweep_items: Number of items in one sweep.
        tokens_per_item: Tokens per sequence; 1 for samples.
    """

    batch_sizes: tuple[int, ...]
    epochs: int
    sweep_batches: int
    sweep_items: int
    tokens_per_item: int = 1

    @property
    def steps(self) -> int:
        """Number of batches in a round."""
        return len(self.batch_sizes) * self.epochs

    @property
    def items(self) -> int:
        """Number of sequences or samples in a round."""
        return sum(self.batch_sizes) * self.epochs

    def items_of_first(self, num_batches: int) -> int:
        """Return the number of sequences or samples in the first batches that a user trains on in a round.

        Args:
            num_batches: Number of these batches. After the last batch of an epoch the first one follows again.
        """
        return sum(self.batch_sizes[i % len(self.batch_sizes)] for i in range(num_batches))


BaseFlops = Callable[[LocalWork], tuple[Flops, Flops]]
"""Function from a user's local work to the FLOPs of the base alone, without adapters.

It returns the FLOPs of the forward pass of one token or sample, and those of a round with one pass per local step.
"""


def local_work_on_text(clients: Clients) -> LocalWork:
    """Return the local work of a user of a language model in a round, which is the same for all users.

    Text has no epochs, as each step draws random windows. So each local step is described as an epoch of one batch.
    Some methods also compute the losses of several models before they train (a sweep).
    """
    training, batch_size = clients.plan.training, clients.batch_size
    steps = training.most_local_steps
    return LocalWork(
        batch_sizes=(batch_size,),
        epochs=steps,
        sweep_batches=steps,  # a sweep reads as much text as the local steps
        sweep_items=steps * batch_size,
        tokens_per_item=training.context,
    )


def count_stacked(
    rehearsal: Rehearsal, work_by_user: Mapping[str, LocalWork], flops_of_base: BaseFlops
) -> list[UserCost]:
    """Return the costs of users whose models are stacked, one entry per group of users with equal local work.

    These are small nets and client-level mixtures, whose tensors have an axis of users (``comingle.models.stacked``).
    A client-level mixture has adapter sets or whole models, which each user weights with one vector, as in FLoRAL. The
    formulas for token-level experts do not apply, so FLOPs are measured on fake tensors.

    Args:
        rehearsal: The run's federation, on fake tensors (shapes without values).
        work_by_user: Each user's local work in a round, by name.
        flops_of_base: Function that returns the FLOPs of the base alone. The measured FLOPs beyond these count as LoRA.
    """
    clients = rehearsal.federation.clients
    names_by_work: dict[LocalWork, list[str]] = {}
    for name, work in work_by_user.items():
        names_by_work.setdefault(work, []).append(name)
    measured = _MeasuredFlops(rehearsal)
    parameters = _stacked_parameters(clients)
    all_names = list(work_by_user)
    message_sizes = dict(zip(all_names, message_bytes(rehearsal.federation, all_names), strict=True))
    costs = []
    for work, names in names_by_work.items():
        base_forward, base_round = flops_of_base(work)
        forward_per_token = measured.forward.per_item / work.tokens_per_item  # per sample, if items are samples
        forward = base_forward + Flops(lora=forward_per_token - base_forward.total)
        round_total = measured.round(work)
        round_flops = Flops()  # a method without training takes no FLOPs, not even those of the base
        if round_total:
            round_flops = base_round + Flops(lora=round_total - base_round.total)
        tokens_per_round = work.items * work.tokens_per_item
        upload_bytes, download_bytes = mean_bytes([message_sizes[name] for name in names])
        cost = UserCost(
            names=tuple(names),
            experts=0,  # no token-level experts
            parameters=parameters,
            upload_bytes=upload_bytes,
            download_bytes=download_bytes,
            forward=forward,
            training=round_flops * (1 / tokens_per_round),
            round=round_flops,
            unit=rehearsal.steps.batch_source.unit.removesuffix("s"),  # such as "sample"
        )
        costs.append(cost)
    return costs


def measured_base(rehearsal: Rehearsal) -> BaseFlops:
    """Return a function that gives the FLOPs of training a net with FedAvg, with which other methods are compared.

    Args:
        rehearsal: A federation with the method FedAvg, on fake tensors (shapes without values).

    Returns:
        Function from a user's local work to the FLOPs of the forward pass of one token or sample, and of a round.
    """
    measured = _MeasuredFlops(rehearsal)

    def flops_of_net(work: LocalWork) -> tuple[Flops, Flops]:
        """Return the FLOPs of a forward pass and of a round."""
        forward_per_token = measured.forward.per_item / work.tokens_per_item
        return Flops(net=forward_per_token), Flops(net=measured.round(work))

    return flops_of_net


class _MeasuredFlops:
    """Measured FLOPs of one user, by kind of work.

    Args:
        rehearsal: The run's federation, on fake tensors (shapes without values).
    """

    def __init__(self, rehearsal: Rehearsal):
        """Measure a forward pass, a step of each phase, and a sweep, by numbers of batches and samples.

        Args:
            rehearsal: The run's federation, on fake tensors (shapes without values).
        """
        self.rehearsal, self.clients = rehearsal, rehearsal.federation.clients
        self.cohort = rehearsal.cohort([0])  # the first user stands for all
        self.forward = measure_flops(self._predict)
        self.step_by_phase: dict[Phase, LinearFlops] = {}
        for phase in (*self.clients.phases, *self.clients.method.client.before):
            self.step_by_phase[phase] = measure_flops(partial(self._step, phase))
        # In a sweep a user computes losses on all training data, with every component of a mixture or with every model
        # of the server that it may choose, which is a forward pass each. Other methods have none.
        method = self.clients.method
        if method.client.sweeps and method.placement.mixture is not None:
            self.sweep = measure_flops(self._sweep)
        else:
            num_models = method.server.server_models if method.client.sweeps else 0
            self.sweep = self.forward.times(num_models)

    def round(self, work: LocalWork) -> float:
        """Return the FLOPs of a user's round: the steps of all phases, and a forward pass on all data if needed.

        Methods that choose or weight models first compute losses on all training data of the user (a sweep).

        Args:
            work: Numbers of batches and items (sequences or samples) that the user reads in the round.
        """
        total = self.sweep.flops(work.sweep_batches, work.sweep_items)
        for phase in self.clients.phases:
            num_steps = work.steps // phase.every * phase.steps  # `phase.steps` after every `phase.every`-th batch
            num_items = num_steps * work.items / work.steps  # in batches of mean size
            total += self.step_by_phase[phase].flops(num_steps, num_items)
        for phase in self.clients.method.client.before:  # run before the others, on the first batches of the round
            total += self.step_by_phase[phase].flops(phase.steps, work.items_of_first(phase.steps))
        return total

    def _tensors(self) -> Tree:
        """Return the fake tensors of the one model that is measured, by name."""
        return self.rehearsal.steps.tensors(self.cohort.state.rows)

    @torch.no_grad()
    def _predict(self, count: int) -> None:
        """Run a user's forward pass on ``count`` sequences or samples; :func:`measure_flops` counts its FLOPs."""
        self.rehearsal.steps.model.predict(self._tensors(), [0], fake_inputs(self.rehearsal, 1, count))

    def _step(self, phase: Phase, count: int) -> None:
        """Compute the gradients of one step of a phase; :func:`measure_flops` counts the FLOPs that this takes.

        Args:
            phase: Phase of the method, which says which parameters the step trains.
            count: Number of sequences or samples in the batch; the tensors are fake (shapes without values).
        """
        with ignore_grad_warning():
            self.rehearsal.steps.gradient(self.cohort, fake_batch(self.rehearsal, 1, count), phase)

    @torch.no_grad()
    def _sweep(self, count: int) -> None:
        """Compute the losses of each component of a client-level mixture; :func:`measure_flops` counts its FLOPs.

        Users compute them on all training data, to weight the components.

        Args:
            count: Number of sequences or samples; the tensors are fake (shapes without values).
        """
        model, batch_source = self.rehearsal.steps.model, self.rehearsal.steps.batch_source
        batch = batch_source.read("train", [0], fake_batch(self.rehearsal, 1, count))
        model.component_losses(self._tensors(), [0], batch)


def _stacked_parameters(clients: Clients) -> dict[str, int]:
    """Return a user's number of trained parameters by role (part of the model), without roles that have none.

    For models that are stacked over users (nets and client-level mixtures), where all users have the same number.
    """
    layout = clients.model.layout
    trained_roles = sorted(layout.roles & clients.method.client.trained)
    counts = {role: int(layout.mask([role]).sum()) for role in trained_roles}
    return {role: count for role, count in counts.items() if count}
