"""Peak memory of a pass and of a process, and bytes of users on disk.

A pass runs on *fake* tensors, which have a shape, a dtype and a device but no data. Every tensor that an operation
creates, in forward and backward passes and in hand-written gradients, is counted until its last reference is gone. So
nothing is assumed about what a module saves for its backward pass.
"""

from __future__ import annotations

import functools
import math
import subprocess
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, singledispatch
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from comingle.config import Recipe
from comingle.config.settings import MEMORY
from comingle.cost.records import MemoryCost
from comingle.data.populations import UserCollection
from comingle.data.text.reading import check_local_text, local_tokenizer
from comingle.methods.base import Phase
from comingle.models.base import Base, logger
from comingle.protocol.messages import LOSS
from comingle.training.backends.local import InProcess
from comingle.training.client import STORES
from comingle.training.cohort import Cohort, Scorer
from comingle.training.kinds.base import DataRequest, Kind, RunData
from comingle.training.kinds.conversations import NOTE, ConversationsKind, as_text_recipe
from comingle.training.kinds.text import TextKind, anybody_validates, section
from comingle.training.settings import PassSize
from comingle.training.state import GRADIENTS, MOMENTS, State
from comingle.training.steps import Steps
from comingle.training.storage.disk import MAX_PENDING_WRITES
from comingle.training.storage.files import Form, forms_of
from comingle.utils.trees import Tree, restrict


def as_text(
    kind: Kind, recipes: Sequence[Recipe], users: int | None, load_base: Callable[[], Base]
) -> tuple[list[Recipe], set[str], str]:
    """Return recipes with text that costs as much as the users' data.

    Costs are counted for text, so other data, such as conversations, is replaced with text of equal length. It does the
    same as :meth:`comingle.training.kinds.base.Kind.as_text`, but if the run keeps users on disk, at most one user's
    data is in memory. Without a cached tokenizer of the base all users are read at once.

    Args:
        kind: The recipes' kind of data.
        recipes: Recipes that differ in their method alone.
        users: Number of users if their data is not read, else None.
        load_base: Returns the base; weights are not needed.

    Returns:
        The recipes with text, the names of users with too little data, and a note on what the costs leave out.

    Raises:
        DataError: A run would refuse data that is on this machine.
    """
    reads = users is None and is_read(kind, recipes[0])
    run_data = _read_from_disk(kind, recipes, load_base) if reads else None
    if run_data is None or run_data.users.in_memory:
        return kind.as_text(recipes, users)
    note = NOTE if isinstance(kind, ConversationsKind) else ""
    return as_long(kind, recipes, run_data.users), set(run_data.skipped), note


@singledispatch
def is_read(kind: Kind, recipe: Recipe) -> bool:
    """Return whether users' data is read before costs are counted in tokens."""
    return False


@is_read.register
def _reads_conversations(kind: ConversationsKind, recipe: Recipe) -> bool:
    """Return whether conversations are read: always, unless a program passed them."""
    return not recipe.data.given


@is_read.register
def _reads_text(kind: TextKind, recipe: Recipe) -> bool:
    """Return whether text is read: if all of it is on this machine."""
    return not recipe.data.given and check_local_text(section(recipe))[0]


def _read_from_disk(kind: Kind, recipes: Sequence[Recipe], load_base: Callable[[], Base]) -> RunData | None:
    """Read the data as a run of the first recipe does, if it keeps users on disk.

    Returns:
        The data; None if the run keeps users in memory or the base's tokenizer is not cached.
    """
    recipe = recipes[0]
    if recipe.runtime.store == MEMORY or (tokenizer := local_tokenizer(recipe.base)) is None:
        return None
    base = replace(load_base(), tokenizer=tokenizer)
    request = DataRequest(recipe=recipe, load_base=lambda: base, validates=anybody_validates(recipes))
    return STORES[recipe.runtime.store].read(kind, request)


def as_long(kind: Kind, recipes: Sequence[Recipe], users: UserCollection) -> list[Recipe]:
    """Return recipes in which conversations of counted users are replaced with text that costs as much.

    Recipes of other kinds of data, or of users whose sizes are not counted, are returned unchanged.

    Args:
        kind: The recipes' kind of data.
        recipes: Recipes that differ in their method alone.
        users: Users whose sizes have been counted.
    """
    if not isinstance(kind, ConversationsKind) or users.sizes is None:
        return list(recipes)
    counts = dict(zip(users.names, users.sizes[:, 0].tolist(), strict=True))
    return [as_text_recipe(recipe, counts) for recipe in recipes]


PREFETCHED_COHORTS = 1
"""Cohorts whose records are prefetched while another one trains."""

INDEX_BYTES = 20
"""Bytes in memory for each user of a run: the offsets of its two records (8 bytes each) and its version (4 bytes)."""


@dataclass(frozen=True, kw_only=True)
class UserBytes:
    """Bytes of one user's tensors and records.

    Args:
        params: Bytes of the model and of the method's state.
        moments: Bytes of optimiser moments.
        params_record: Bytes of the first on disk.
        moments_record: Bytes of the second on disk.
    """

    params: int
    moments: int
    params_record: int
    moments_record: int

    @property
    def record(self) -> int:
        """Bytes of both records."""
        return self.params_record + self.moments_record


def user_bytes(state: State, store: str) -> UserBytes:
    """Return the sizes of one user of a state that is in memory, with records in the format of ``store``."""
    forms: Mapping[str, Form] = forms_of(state, STORES[store].moments)
    sizes = {name: t[:1].nbytes for name, t in state.tensors().items()}
    moments = sum(size for name, size in sizes.items() if name in MOMENTS)
    return UserBytes(
        params=sum(sizes.values()) - moments,
        moments=moments,
        params_record=forms["params"].bytes,
        moments_record=forms["moments"].bytes,
    )


def expected_participants(users: int, present: int, rounds: int) -> float:
    """Return the expected number of users that have taken part at least once.

    ``U (1 - (1 - p)^R)`` with U users, R rounds and a fraction ``p = present / U`` drawn at random in each round.

    Args:
        users: Size of the population.
        present: Participants per round.
        rounds: Number of rounds.
    """
    return users * (1 - (1 - present / users) ** rounds)


@dataclass(frozen=True, kw_only=True)
class Writes:
    """How often a run writes records.

    Args:
        users: Size of the population.
        present: Participants per round.
        evaluated: Users in one evaluation.
        rounds: Number of rounds.
        evaluate_every: Rounds between evaluations.
        every: Rounds between checkpoints.
        keep: Number of checkpoints that are kept.
    """

    users: int
    present: int
    evaluated: int
    rounds: int
    evaluate_every: int
    every: int
    keep: int

    @property
    def kept_rounds(self) -> int:
        """Largest number of rounds for which overwritten records are kept.

        The space of a record is freed once no checkpoint refers to it, which is known when the next one is written.
        """
        return min(self.every * (self.keep + 1), max(0, self.rounds - self.every))

    def models(self) -> float:
        """Return the largest number of model records on disk at the same time.

        These are the records of users that have trained or were evaluated, and overwritten records that checkpoints
        still refer to.
        """
        current = expected_participants(self.users, self.present, self.rounds)
        current += self.evaluated * (1 - current / self.users)  # evaluated users that never took part
        evaluations = math.ceil(self.kept_rounds / self.evaluate_every)
        # Evaluations overwrite records too, but each checkpoint refers to those of one evaluation at most.
        from_evaluations = self.evaluated * min(evaluations, self.kept_rounds // self.every)
        return current + self._num_overwritten(current) + from_evaluations

    def moments(self) -> float:
        """Return the largest number of records of optimiser moments, which only participants have."""
        current = expected_participants(self.users, self.present, self.rounds)
        return current + self._num_overwritten(current)

    def _num_overwritten(self, current: float) -> float:
        """Return the number of overwritten records that checkpoints still refer to.

        For the rounds between two checkpoints these are at most one for each user that has a record, and at most one
        for each participant of each round.

        Args:
            current: Number of users with a record.
        """
        return self.kept_rounds / self.every * min(current, self.present * self.every)


def store_bytes(user: UserBytes, writes: Writes) -> int:
    """Return the largest size of the store at the end of a run, in bytes, for the expected number of participants."""
    return int(user.params_record * writes.models() + user.moments_record * writes.moments())


ProcessKind = Literal["text", "samples"]

FALLBACK_BYTES = 430_000_000
"""Used if a process cannot be measured: the value on Linux with torch 2.13."""

_SECONDS = 120
"""Largest time that the process may take."""


def process_bytes(kind: ProcessKind, device: torch.device) -> int:
    """Return the bytes of a process without model and data: Python and its libraries; 0 on a GPU.

    It is the peak resident memory of a run of the smallest model in a process of its own. The result is cached; the
    first call takes several seconds.

    Args:
        kind: Kind of the smallest model's data.
        device: Device of the run that is planned. Memory of a GPU holds no Python.
    """
    return _measure_process(kind) if device.type == "cpu" else 0


@cache
def _measure_process(kind: ProcessKind) -> int:
    """Run the smallest model in a process of its own and return its peak resident memory, in bytes.

    Returns:
        The memory, or :data:`FALLBACK_BYTES` if the process fails or takes too long.
    """
    try:
        command = [sys.executable, "-m", "comingle.cost.memory", kind]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
        return int(done.stdout.split()[-1])
    except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
        logger.info("the memory of a process could not be measured (%s); assuming %d bytes", error, FALLBACK_BYTES)
        return FALLBACK_BYTES


def _smallest_recipe(kind: ProcessKind, folder: Path) -> dict[str, object]:
    """Return a recipe of one FedAvg step with the smallest model of a kind.

    Args:
        kind: The kind of data.
        folder: Folder to which the data of its only user is written.
    """
    if kind == "samples":
        np.savez(folder / "samples.npz", x=np.zeros((20, 10), np.float32), y=np.zeros((20, 1), np.float32))
        data = {"kind": "samples", "users": {"one": str(folder / "samples.npz")}}
        return {"method": "fedavg", "data": data, "training": {"rounds": 1}, "runtime": {"device": "cpu"}}
    (folder / "text.txt").write_text("some words\n\n" * 300, encoding="utf-8")
    return {
        "base": "random:llama?layers=1",
        "method": "fedavg",
        "data": {"users": {"one": str(folder / "text.txt")}},
        "training": {"rounds": 1, "local_steps": 1, "batch_size": 1, "context": 8},
        "runtime": {"device": "cpu", "dtype": "float32", "compile": False},
    }


def main() -> None:
    """Run the smallest recipe of a kind and print the process's peak memory in bytes."""
    from comingle.config import parse_recipe
    from comingle.models.hardware import peak_memory_bytes
    from comingle.runs.api import run

    kind: Any = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        run(parse_recipe(_smallest_recipe(kind, Path(folder))))
    print(peak_memory_bytes())


if __name__ == "__main__":
    main()


ALLOCATOR_GAPS = {"cpu": 0.7}
"""Memory that the allocator keeps beyond live tensors, as a fraction of a pass's peak: an estimate, not a bound.

On the CPU ``runtime.keep_buffers`` trades memory for speed: freed blocks stay with the process, with gaps between
them that no shape predicts. Measured: 0.3 to 1.0 in 20 runs on five shapes (more after five rounds than after one), 0.7
to 1.0 in four runs of 20 rounds, and 0.6 to 0.7 in three whole runs."""

CHECKPOINTED_GAPS = {"cpu": 2.0}
"""As :data:`ALLOCATOR_GAPS`, with ``runtime.gradient_checkpointing``. Passes are smaller but allocate as many blocks.

Measured: 1.5 to 2.5 in whole runs on three shapes."""


class LiveBytes(TorchDispatchMode):
    """Context that counts the bytes of live tensors created within it: ``live`` now and ``peak`` at most.

    Storages are counted, not tensors: a view costs nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        """Run an operation and count the storages that it creates; outputs may also be views of its inputs."""
        input_storages = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in input_storages:
                self._add(t.untyped_storage())
        self.peak = max(self.peak, self.live)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that an operation created, until it is freed."""
        key = storage._cdata
        if key not in self._known:
            size = storage.nbytes()
            self._known[key] = weakref.ref(storage, functools.partial(self._remove, key, size))
            self.live += size

    def _remove(self, key: int, size: int, _: object) -> None:
        """Subtract a storage that was freed; the last argument is its dead weak reference."""
        self._known.pop(key, None)
        self.live -= size


class Fakes:
    """Fake tensors by the real tensors that they replace, one fake for each real tensor."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._by_id: dict[int, tuple[Tensor, Tensor]] = {}  # real and fake tensor by the id of the real one

    def of(self, real: Tensor, device: torch.device) -> Tensor:
        """Return the fake of a real tensor: same shape and dtype, on ``device``."""
        if id(real) not in self._by_id:
            with self._mode:
                fake = torch.empty(real.shape, dtype=real.dtype, device=device)
            fake = nn.Parameter(fake, requires_grad=False) if isinstance(real, nn.Parameter) else fake
            self._by_id[id(real)] = (real, fake)  # a reference to the real tensor, so that its id is not reused
        return self._by_id[id(real)][1]

    def size_of(self, module: nn.Module) -> int:
        """Return the bytes of all parameters and buffers of a module with real tensors, shared ones once."""
        return storage_bytes(module)

    def replace(self, module: nn.Module, device: torch.device) -> None:
        """Replace all parameters and buffers of a module with fakes, in place; shared tensors stay shared."""
        for inner in module.modules():
            for store in (inner._parameters, inner._buffers):
                for name, tensor in store.items():
                    if tensor is not None:
                        store[name] = self.of(tensor, device)  # pyright: ignore[reportArgumentType]


def storage_bytes(module: nn.Module) -> int:
    """Return the bytes of all parameters and buffers of a module, shared ones once."""
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


TRACED_BATCHES = 2
"""Micro-batches that are traced. From the second one on all are alike: gradients are added to their sum."""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """A federation whose steps run on fake tensors instead of weights and data.

    Args:
        federation: The federation, with as many users as needed.
        steps: Its steps, with a model and data without values.
        fakes: The fake tensors.
        weights_bytes: Bytes of the frozen weights.
        trainers: True number of trainers.
        present: Largest number of participants in a round.
        store: Where users are kept, as ``runtime.store``.
        checkpointed: Whether gradient checkpointing recomputes layers.
        data_bytes: Bytes of all users' samples in memory.
        reads_cohorts: Whether only the samples of the cohort in training are in memory.
        process_bytes: Bytes of a process without model and data.
        known: Cache of peaks by rows and portions.
    """

    federation: InProcess
    steps: Steps
    fakes: Fakes
    weights_bytes: int
    trainers: int
    present: int
    store: str = MEMORY
    checkpointed: bool = False
    data_bytes: int = 0
    reads_cohorts: bool = False
    process_bytes: int = 0
    known: dict[tuple[tuple[int, ...], PassSize], tuple[int, int]] = field(default_factory=dict)

    def with_pass_size(self, pass_size: PassSize) -> Steps:
        """Return a copy of the steps with other numbers of users and sequences in a pass."""
        steps = replace(self.steps)
        steps.pass_size = pass_size
        return steps

    def cohort(self, rows: Sequence[int]) -> Cohort:
        """Return a cohort of users without data."""
        clients, device = self.federation.clients, self.steps.model.device
        cohort = clients.cohort(list(rows), 0)
        part = {name: self.fakes.of(getattr(cohort.part, name), device) for name in ("rows", "first", "second")}
        return replace(cohort, part=replace(cohort.part, **part))


def rehearse(
    federation: InProcess,
    trainers: int,
    *,
    present: int | None = None,
    store: str = MEMORY,
    checkpointed: bool = False,
    data_bytes: int = 0,
    reads_cohorts: bool = False,
    process_bytes: int = 0,
) -> Rehearsal:
    """Return a rehearsal of a federation: replace the frozen weights, in place, and the data with fake tensors.

    Args:
        federation: The federation, with as many users as needed.
        trainers: True number of trainers.
        present: Largest number of participants in a round; None for all trainers.
        store: Where users are kept, as ``runtime.store``.
        checkpointed: Whether gradient checkpointing recomputes layers.
        data_bytes: Bytes of all users' samples in memory.
        reads_cohorts: Whether only the samples of the cohort in training are in memory.
        process_bytes: Bytes of a process without model and data.
    """
    clients = federation.clients
    fakes, device = Fakes(), clients.model.device
    model, size = clients.model.without_weights(fakes)
    batch_source = clients.batch_source.without_data(lambda real: fakes.of(real, device))
    steps = replace(clients.steps, model=model, source=batch_source)
    return Rehearsal(
        federation=federation,
        steps=steps,
        fakes=fakes,
        trainers=trainers,
        present=min(trainers if present is None else present, trainers),
        store=store,
        checkpointed=checkpointed,
        weights_bytes=size,
        data_bytes=data_bytes,
        reads_cohorts=reads_cohorts,
        process_bytes=process_bytes,
    )


def memory(stage: Rehearsal, *, alone: bool = False, pass_size: PassSize | None = None) -> MemoryCost:
    """Return the peak memory of a run on this machine, from one pass on fake tensors and the sizes of all users.

    Args:
        stage: The rehearsal that is measured.
        alone: Return the peak on a device of one user instead: the user with the largest model.
        pass_size: Numbers of users and sequences in a pass, if not those of the run.
    """
    clients, chosen = stage.federation.clients, pass_size or stage.steps.pass_size
    num_rows = 1 if alone else min(chosen.users, len(clients.state.rows))
    first_row = int(clients.mask.sum(1).argmax()) if num_rows == 1 else 0  # of one user, that with the largest model
    peak, gradients = _worst_pass(stage, tuple(range(first_row, first_row + num_rows)), chosen)
    state = clients.state
    share = (1 if alone else stage.trainers) / len(clients.trainers)  # the federation may have fewer users than the run
    # Gradients that one phase keeps for another.
    kept_gradients = int(share * state.kept[GRADIENTS].nbytes) if GRADIENTS in state.kept else 0
    exchange = _exchange_bytes(stage, alone=alone)
    gaps = (CHECKPOINTED_GAPS if stage.checkpointed else ALLOCATOR_GAPS).get(clients.model.device.type, 0.0)
    users_read = min(chosen.users, stage.trainers) if stage.reads_cohorts else stage.trainers
    on_disk = not alone and stage.store != MEMORY
    adapters, moments = _stored_users(stage, chosen) if on_disk else _users_in_memory(stage, share)
    return MemoryCost(
        weights_bytes=stage.weights_bytes,
        adapters_bytes=adapters + (0 if alone else _server_bytes(stage.federation, share)),
        moments_bytes=moments,
        gradients_bytes=gradients + kept_gradients,
        activations_bytes=peak - gradients,
        allocator_bytes=int(gaps * max(peak, exchange)),
        data_bytes=stage.data_bytes * (1 if alone else users_read) // stage.trainers,
        process_bytes=stage.process_bytes,
        exchange_bytes=exchange,
    )


def _users_in_memory(stage: Rehearsal, share: float) -> tuple[int, int]:
    """Return the bytes of models and of optimiser moments of all users of a run, which are in memory.

    Args:
        stage: The rehearsal that is measured.
        share: Number of users of the run, divided by that of the rehearsal's federation.
    """
    clients = stage.federation.clients
    state = clients.state
    models = state.rows.nbytes + clients.initial.nbytes + clients.mask.untyped_storage().nbytes()
    models += sum(t.nbytes for t in state.best.values())
    return int(share * models), int(share * (state.first.nbytes + state.second.nbytes))


def _stored_users(stage: Rehearsal, pass_size: PassSize) -> tuple[int, int]:
    """Return the bytes of models and of optimiser moments in memory while users are stored on disk.

    Args:
        stage: The rehearsal that is measured.
        pass_size: Number of users in a pass, which are in memory.
    """
    clients = stage.federation.clients
    user, copies = user_bytes(clients.state, stage.store), clients.method.placement.copies
    rows = stage.trainers * copies
    at_once = min(pass_size.users, stage.present * copies)
    # The cohort in training, prefetched ones, those waiting to be written (models or moments, counted once), and the
    # record offsets of all users.
    num_records = PREFETCHED_COHORTS + MAX_PENDING_WRITES
    models = at_once * (user.params + num_records * user.params_record) + INDEX_BYTES * rows
    return models + clients.mask[:1].nbytes, at_once * (user.moments + PREFETCHED_COHORTS * user.moments_record)


def _exchange_bytes(stage: Rehearsal, *, alone: bool) -> int:
    """Return the bytes of messages while all participants of a round upload, extrapolated from one user's upload.

    With users on disk, participants' tensors are read for that, and downloads before an evaluation, made for a limited
    number of users at once, may need more.

    Args:
        stage: The rehearsal that is measured.
        alone: Whether only one user's messages are on the machine.
    """
    clients = stage.federation.clients
    if not clients.shares:
        return 0
    with LiveBytes() as live:
        clients.upload([0], 1, {LOSS: torch.zeros(1)}, counts=True)
    if alone or stage.store == MEMORY:
        return live.peak * (1 if alone else stage.present)
    user = user_bytes(clients.state, stage.store)
    evaluated = min(clients.users_per_message, clients.plan.evaluation.users or stage.trainers)
    read = user.params_record + user.params  # of a model to send: its record and the unpacked tensors
    # While one record is packed, up to MAX_PENDING_WRITES others wait to be written.
    downloaded = user.params + (1 + MAX_PENDING_WRITES) * user.params_record
    return max(stage.present * (live.peak + read), evaluated * downloaded)


def _server_bytes(federation: InProcess, share: float) -> int:
    """Return the bytes of the server's state.

    Args:
        federation: The rehearsal's federation.
        share: Number of users of the run, divided by that of this federation; scales tensors with a row per user.
    """
    server, rows = federation.server, federation.clients.method.server.by_user
    return int(sum(t.nbytes * (share if name in rows else 1) for name, t in server.kept.items()))


def _worst_pass(stage: Rehearsal, rows: tuple[int, ...], pass_size: PassSize) -> tuple[int, int]:
    """Return the peak bytes of a cohort's step or evaluation, whichever is larger, and the bytes of its gradients.

    Of several phases the one that trains the most tensors is measured: the others keep at most as many activations.
    Results are cached.

    Args:
        stage: The rehearsal that is measured.
        rows: Rows of the cohort.
        pass_size: Numbers of users and sequences in a pass.
    """
    layout = stage.steps.model.layout
    if (rows, pass_size) not in stage.known:
        steps = stage.with_pass_size(pass_size)
        phases = sorted(stage.federation.clients.phases, key=lambda phase: layout.touching(phase.roles).columns)
        largest = step_peak(stage, rows, phases[-1], steps) if phases else (0, 0)
        if not phases or steps.batch_source.scores_more:  # an evaluation may read more at once than a step
            largest = max(largest, (_evaluation_peak(stage, rows, steps), 0))
        stage.known[rows, pass_size] = largest
    return stage.known[rows, pass_size]


def step_peak(stage: Rehearsal, rows: Sequence[int], phase: Phase, steps: Steps | None = None) -> tuple[int, int]:
    """Return the peak bytes of one optimiser step of a phase, and the bytes of its gradients.

    The step consists of :data:`TRACED_BATCHES` micro-batches and the update.

    Args:
        stage: The rehearsal that is measured.
        rows: Rows of the cohort.
        phase: The phase.
        steps: Steps with other portions; None for those of the rehearsal.
    """
    steps, cohort = steps or stage.steps, stage.cohort(rows)
    traced = TRACED_BATCHES * steps.pass_size.sequences
    batch = empty_batch(stage, len(rows), min(stage.federation.clients.batch_size, traced))
    examples = empty_batch(stage, len(rows), steps.pass_size.sequences)
    is_private = steps.private is not None and steps.private.applies(phase, steps.model.layout)
    with ignore_grad_warning(), _shapes_only(stage), LiveBytes() as live:
        if is_private:
            gradients = _private_gradients(cohort, phase, steps, batch, examples)
        else:
            gradients = steps.gradient(cohort, batch, phase)[1]
        size = sum(gradient.nbytes for gradient in gradients.values())
        steps.descend(phase, cohort, gradients, 0)
    return live.peak, size


def _private_gradients(cohort: Cohort, phase: Phase, steps: Steps, batch: Tensor, examples: Tensor) -> Tree:
    """Return gradients as :meth:`comingle.training.steps.PrivateSteps.step` does, to measure its memory.

    Per-example gradients exist besides the gradients of tensors that stay local. Passes are full. Noise is drawn for
    one user at a time and is no larger than the sums, so it is left out.

    Args:
        cohort: The cohort.
        phase: The phase, in which example-level privacy applies.
        steps: The steps.
        batch: A batch for the tensors that stay local.
        examples: A full pass of examples for the shared tensors.
    """
    private, model, users = steps.private, steps.model, len(cohort.rows)
    assert private is not None
    layout, leaves, copied = (
        model.layout,
        private.shared_leaves(phase, model.layout),
        max(cohort.rows) >= steps.trainers,
    )
    names = private.local_leaves(phase, layout, everything=copied)
    local = steps.gradient(cohort, batch, phase, names=names)[1] if names else Tree()
    tensors = restrict(model.tensors(cohort.part.rows), layout, layout.roles - private.local_roles(layout))
    sums = Tree()
    for _ in range(TRACED_BATCHES):
        more, _ = private.clipped_sums_of_batch(
            model, steps.batch_source, tensors, leaves, cohort.owners, examples, bound=1.0
        )
        sums = {name: t + sums[name] if name in sums else t for name, t in more.items()}
    noisy = {name: (t + torch.zeros_like(t)).to(cohort.part.rows.dtype) for name, t in sums.items()}
    return private.merge(layout, phase, local, noisy, range(users), users)


@torch.no_grad()
def _evaluation_peak(stage: Rehearsal, rows: Sequence[int], steps: Steps) -> int:
    """Return the peak bytes of one forward pass of an evaluation, the only work of a method without training."""
    clients = stage.federation.clients
    count = steps.batch_source.scored_at_once(clients.users, steps.pass_size)
    inputs = empty_inputs(stage, len(rows), count)
    with ignore_grad_warning(), _shapes_only(stage), LiveBytes() as live:
        Scorer(steps=steps).predict(clients.models, rows, inputs)
    return live.peak


def empty_batch(stage: Rehearsal, users: int, count: int) -> Int[Tensor, "users count ..."]:
    """Return a batch to train on without data.

    Args:
        stage: The rehearsal.
        users: Number of users.
        count: Sequences or samples of each user.

    Returns:
        Windows of fake tokens, or indices that all refer to the first sample.
    """
    return stage.steps.batch_source.blank(users, count, lambda meta: stage.fakes.of(meta, stage.steps.model.device))


def empty_inputs(stage: Rehearsal, users: int, count: int) -> Int[Tensor, "users count _"] | Float[Tensor, "users ..."]:
    """Return the inputs of :meth:`Scorer.predict` without data.

    Args:
        stage: The rehearsal.
        users: Number of users.
        count: Sequences or samples of each user.
    """
    return stage.steps.batch_source.blank_inputs(
        users, count, lambda meta: stage.fakes.of(meta, stage.steps.model.device)
    )


def _shapes_only(stage: Rehearsal) -> AbstractContextManager[None]:
    """Return a context in which a net's input form accepts tensors without data, if the net has such a form."""
    form = getattr(stage.steps.model, "form", None)
    return getattr(form, "accepting_fakes", nullcontext)()


@contextmanager
def ignore_grad_warning() -> Iterator[None]:
    """Suppress torch's warning about reading ``.grad`` of a non-leaf tensor, which torch itself triggers here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor", category=UserWarning)
        yield
