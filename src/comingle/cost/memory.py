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
from typing import Any, Literal, NamedTuple

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
from comingle.models.base import Base
from comingle.protocol.messages import LOSS
from comingle.runs.guard import is_guarded
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
from comingle.training.storage.files import RecordLayout, record_layouts
from comingle.utils.records import logger
from comingle.utils.trees import Tree, restrict


def text_of_equal_cost(
    kind: Kind, recipes: Sequence[Recipe], users: int | None, load_base: Callable[[], Base]
) -> tuple[list[Recipe], set[str], str]:
    """Return recipes in which the users' data, such as conversations, is replaced with text that costs as much.

    If the run keeps users on disk, and the base's tokenizer is cached, users are read one after another, else all at
    once.

    Args:
        kind: The recipes' kind of data.
        recipes: Recipes that differ in their method alone.
        users: Number of users given with ``--users``, in place of their data; None if the data is read.
        load_base: Returns the base; weights are not needed.

    Returns:
        The recipes with text, the names of users with too little data, and a note on what the costs leave out.

    Raises:
        DataError: A run would refuse data that is on this machine.
    """
    run_data = None
    if users is None and reads_user_data(kind, recipes[0]):
        run_data = _read_one_by_one(kind, recipes, load_base)
    if run_data is None or run_data.users.in_memory:
        # `as_text` reads all users at once if the costs depend on their data, and none if their number is given.
        return kind.as_text(recipes, users)
    note = NOTE if isinstance(kind, ConversationsKind) else ""
    return conversations_as_text(kind, recipes, run_data.users), set(run_data.skipped), note


@singledispatch
def reads_user_data(kind: Kind, recipe: Recipe) -> bool:
    """Return whether the costs of a recipe depend on its users' data, which is then read before costs are counted.

    False for kinds of data without an implementation below, among them samples and those of plug-ins.
    """
    return False


@reads_user_data.register
def _reads_conversations(kind: ConversationsKind, recipe: Recipe) -> bool:
    """Return whether the users' conversations are read before costs are counted, as costs depend on how many there are.

    False if the recipe is of a run to which a program passed the conversations, since the recipe does not name them.
    """
    return not recipe.data.given


@reads_user_data.register
def _reads_text(kind: TextKind, recipe: Recipe) -> bool:
    """Return whether the users' text is read before costs are counted: if all of it is on this machine.

    Costs of text on other machines, or passed by a program, are counted from the number of users alone.
    """
    if recipe.data.given:  # a program passed the text
        return False
    is_local, _note = check_local_text(section(recipe))
    return is_local


def _read_one_by_one(kind: Kind, recipes: Sequence[Recipe], load_base: Callable[[], Base]) -> RunData | None:
    """Read users one after another, as a run that keeps its users on disk (``runtime.store``) does.

    Args:
        kind: The recipes' kind of data.
        recipes: Recipes that differ in their method alone.
        load_base: Returns the base; weights are not needed.

    Returns:
        The data; None if the recipes keep users in memory, or the base's tokenizer is not cached.
    """
    recipe = recipes[0]
    if recipe.runtime.store == MEMORY:
        return None
    tokenizer = local_tokenizer(recipe.base)
    if tokenizer is None:
        return None
    base = replace(load_base(), tokenizer=tokenizer)
    needs_validation_data = anybody_validates(recipes)  # if at least one of the methods needs it
    request = DataRequest(recipe=recipe, load_base=lambda: base, validates=needs_validation_data)
    return STORES[recipe.runtime.store].read(kind, request)


def conversations_as_text(kind: Kind, recipes: Sequence[Recipe], users: UserCollection) -> list[Recipe]:
    """Return recipes in which conversations are replaced with text that takes as many local steps per round.

    ``comingle cost`` counts costs for text only, so a recipe with conversations is first converted to one with text.
    Recipes are returned unchanged if their data is no conversations or the users' numbers of conversations are unknown.

    Args:
        kind: The recipes' kind of data: text, conversations or samples.
        recipes: Recipes that differ in their method alone.
        users: The users of the run, after their data was read.
    """
    if not isinstance(kind, ConversationsKind) or users.sizes is None:
        return list(recipes)
    train_sizes = users.sizes[:, 0].tolist()  # columns: numbers of train, valid and test conversations
    num_conversations = dict(zip(users.names, train_sizes, strict=True))
    return [as_text_recipe(recipe, num_conversations) for recipe in recipes]


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
        params_record: Bytes of the model and of the method's state in a record on disk.
        moments_record: Bytes of the optimiser moments in a record on disk.
    """

    params: int
    moments: int
    params_record: int
    moments_record: int

    @property
    def record(self) -> int:
        """Bytes of a user on disk: the records of its model and of its optimiser moments."""
        return self.params_record + self.moments_record


def user_bytes(state: State, store: str) -> UserBytes:
    """Return the bytes of one user's tensors in memory, and in the files of a run that keeps users on disk.

    On disk, a user has one record (a block of fixed size) for its parameters and one for its optimiser moments.

    Args:
        state: Tensors of all users, in memory. All users have the same sizes.
        store: Value of ``runtime.store``, which determines the number format of stored moments.
    """
    dtype_of_stored_moments = STORES[store].moments
    layouts: Mapping[str, RecordLayout] = record_layouts(state, dtype_of_stored_moments)
    moments_bytes = params_bytes = 0
    for name, tensor in state.tensors().items():
        first_user = tensor[:1]  # the leading dimension is that of users
        if name in MOMENTS:
            moments_bytes += first_user.nbytes
        else:
            params_bytes += first_user.nbytes
    return UserBytes(
        params=params_bytes,
        moments=moments_bytes,
        params_record=layouts["params"].bytes,
        moments_record=layouts["moments"].bytes,
    )


def expected_participants(users: int, participants: int, rounds: int) -> float:
    """Return the expected number of users that have taken part at least once.

    ``U (1 - (1 - p)^R)`` with U users, R rounds and a fraction ``p = participants / U`` drawn at random in each round.

    Args:
        users: Size of the population.
        participants: Participants per round.
        rounds: Number of rounds.
    """
    return users * (1 - (1 - participants / users) ** rounds)


@dataclass(frozen=True, kw_only=True)
class Writes:
    """Numbers that determine how often a run that keeps users on disk writes their records.

    A user has a record of its model and one of its optimiser moments. A changed record is written to a new place; the
    overwritten one stays on disk as long as a checkpoint refers to it.

    Args:
        users: Size of the population.
        participants: Participants per round.
        evaluated_users: Users in one evaluation.
        rounds: Number of rounds.
        evaluate_every: Rounds between evaluations.
        checkpoint_every: Rounds between checkpoints.
        kept_checkpoints: Number of checkpoints that are kept.
    """

    users: int
    participants: int
    evaluated_users: int
    rounds: int
    evaluate_every: int
    checkpoint_every: int
    kept_checkpoints: int

    @property
    def rounds_with_old_records(self) -> int:
        """Largest number of rounds whose superseded records are still on disk, as a checkpoint refers to them.

        With a checkpoint every 5 rounds and 2 kept checkpoints, this is 15 in a run of 20 rounds or more: those of 3
        checkpoints, since the records of a deleted checkpoint are freed only when the next one is written.
        """
        rounds_after_first_checkpoint = max(0, self.rounds - self.checkpoint_every)
        return min(self.checkpoint_every * (self.kept_checkpoints + 1), rounds_after_first_checkpoint)

    def max_model_records(self) -> float:
        """Return the largest number of models that are on disk at the same time: current ones and older versions.

        A user has a model on disk once it has trained or was evaluated. Training and evaluation write a new version;
        the superseded one stays as long as a checkpoint refers to it.
        """
        num_trained = expected_participants(self.users, self.participants, self.rounds)
        share_never_trained = 1 - num_trained / self.users
        num_current = num_trained + self.evaluated_users * share_never_trained
        old_rounds = self.rounds_with_old_records
        num_evaluations = math.ceil(old_rounds / self.evaluate_every)
        num_checkpoints = old_rounds // self.checkpoint_every
        # Of the versions that evaluations write, a checkpoint refers to those of the last evaluation before it.
        superseded_by_evaluations = self.evaluated_users * min(num_evaluations, num_checkpoints)
        return num_current + self._superseded_by_steps(num_current) + superseded_by_evaluations

    def max_moment_records(self) -> float:
        """Return the largest number of stored optimiser moments on disk, one record per user and older version.

        Only users who took part have moments.
        """
        num_current = expected_participants(self.users, self.participants, self.rounds)
        return num_current + self._superseded_by_steps(num_current)

    def _superseded_by_steps(self, num_current: float) -> float:
        """Return the number of records on disk that local steps have superseded and checkpoints still refer to.

        A user's record is written to a new place after its local steps; the older one stays. Each checkpoint refers to
        the records that the rounds after it supersede, at most one per user: with 10 participants and a checkpoint
        every 5 rounds to 50.

        Args:
            num_current: Number of users with a record.
        """
        num_checkpoints = self.rounds_with_old_records / self.checkpoint_every
        return num_checkpoints * min(num_current, self.participants * self.checkpoint_every)


def store_bytes(user: UserBytes, writes: Writes) -> int:
    """Return the largest size of all users' states on disk during a run that keeps users there, in bytes.

    A user's model and its optimiser moments are stored as two records, of which older versions stay for checkpoints.

    Args:
        user: Bytes of one user's records.
        writes: Numbers of users and rounds that determine how many records, old ones included, are on disk.
    """
    model_bytes = user.params_record * writes.max_model_records()
    return int(model_bytes + user.moments_record * writes.max_moment_records())


ProcessKind = Literal["text", "samples"]

FALLBACK_BYTES = 430_000_000
"""Used if a process cannot be measured: the value on Linux with torch 2.13."""

CLIENT_BYTES = 290_000_000
"""Memory of the process of ``comingle client`` without base, user's tensors and files that it shares with others.

Measured with SmolLM2-135M on Linux with torch 2.13.
"""

_TIMEOUT_SECONDS = 120
"""Largest time that the measured process may take."""


def measured_process_bytes(kind: ProcessKind, device: torch.device) -> int:
    """Return the bytes of a process without model and data (Python and its libraries); 0 for a run on a GPU.

    On a GPU only the GPU's memory is counted, in which these bytes are not. They are measured by running the smallest
    model in a process of its own, which takes several seconds; the result is cached.

    Args:
        kind: Kind of data of the planned run, which determines the libraries that are loaded.
        device: Device of the planned run.
    """
    return _measure_process(kind) if device.type == "cpu" else 0


@cache
def _measure_process(kind: ProcessKind) -> int:
    """Run the smallest model in a process of its own and return its peak resident memory, in bytes.

    Return :data:`FALLBACK_BYTES` if the process fails or takes too long.

    Args:
        kind: Kind of data on which the model is trained.
    """
    command = [sys.executable, "-m", "comingle.cost.memory", kind]
    try:
        finished = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
        last_word = finished.stdout.split()[-1]
        return int(last_word)
    except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
        logger.info("the memory of a process could not be measured (%s); assuming %d bytes", error, FALLBACK_BYTES)
        return FALLBACK_BYTES


def _smallest_recipe(kind: ProcessKind, folder: Path) -> dict[str, object]:
    """Return a recipe of one FedAvg step with the smallest model for a kind of data.

    A process that runs it has little in memory beside Python and its libraries, whose bytes are measured this way.

    Args:
        kind: The kind of data, "text" or "samples", on which the loaded libraries depend.
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
    """Run the smallest recipe and print the process's peak memory in bytes.

    The only command-line argument is the recipe's kind of data, "text" or "samples".
    """
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
to 1.0 in four runs of 20 rounds, and 0.6 to 0.7 in three whole runs. In bfloat16 on a processor with AMX 1.0 to 1.3
(Gemma 2, four runs), because oneDNN keeps a product's working memory for the next product of its shape."""

CHECKPOINTED_GAPS = {"cpu": 2.0}
"""As :data:`ALLOCATOR_GAPS`, with ``runtime.gradient_checkpointing``. Passes are smaller but allocate as many blocks.

Measured: 1.5 to 2.5 in whole runs on three shapes."""


class LiveBytes(TorchDispatchMode):
    """Context that counts the bytes of live tensors created within it: ``live`` now and ``peak`` at most.

    Storages are counted, not tensors: a view costs nothing.
    """

    def __init__(self) -> None:
        """Start with no tensors: only those that are created in the ``with`` block are counted."""
        super().__init__()
        self.live = self.peak = 0  # bytes of tensors now, and at most so far
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # counted ones, by address

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        """Run an operation of torch, which calls this for each, and count the memory that its results allocate."""
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        input_addresses = {tensor.untyped_storage()._cdata for tensor in inputs}
        result = func(*args, **(kwargs or {}))
        for output in tree_leaves(result):
            if not isinstance(output, Tensor):
                continue
            storage = output.untyped_storage()
            is_view_of_input = storage._cdata in input_addresses
            if not is_view_of_input:
                self._add(storage)
        self.peak = max(self.peak, self.live)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        """Add the bytes of a tensor's memory to those in use until it is freed, unless they are counted already."""
        address = storage._cdata  # the same for all tensors that view the storage
        if address not in self._storages:
            size = storage.nbytes()
            subtract_when_freed = functools.partial(self._remove, address, size)
            self._storages[address] = weakref.ref(storage, subtract_when_freed)
            self.live += size

    def _remove(self, address: int, size: int, _dead_reference: object) -> None:
        """Subtract the bytes of a tensor's memory from those in use; called when it is freed.

        Args:
            address: Address of the storage, the key of its weak reference.
            size: Its bytes.
        """
        self._storages.pop(address, None)
        self.live -= size


class Fakes:
    """Fake tensors, which have a shape but no data, by the real tensors that they replace."""

    def __init__(self) -> None:
        """Start without fake tensors; :meth:`of` makes them."""
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}  # (real, fake) by id(real)

    def of(self, real: Tensor, device: torch.device) -> Tensor:
        """Return a fake tensor in place of a real one, of the same shape and dtype but without values, on ``device``.

        The same real tensor gets the same fake one in every call, so that shared weights stay shared.
        """
        if id(real) not in self._pairs:
            with self._mode:
                fake = torch.empty(real.shape, dtype=real.dtype, device=device)
            if isinstance(real, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=False)
            self._pairs[id(real)] = (real, fake)  # the reference to `real` keeps its id from being reused
        _real, fake = self._pairs[id(real)]
        return fake

    def size_of(self, module: nn.Module) -> int:
        """Return the bytes of all parameters and buffers of a module with real tensors, shared ones once.

        A model calls this before :meth:`replace`, to know how many bytes its weights would take.
        """
        return storage_bytes(module)

    def replace(self, module: nn.Module, device: torch.device) -> None:
        """Replace all parameters and buffers of a module, in place, with fake tensors (shapes without values).

        Tensors that several modules share stay shared.

        Args:
            module: The module.
            device: Device that the fake tensors claim to be on.
        """
        for inner in module.modules():
            for tensors in (inner._parameters, inner._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = self.of(tensor, device)  # pyright: ignore[reportArgumentType]


def storage_bytes(module: nn.Module) -> int:
    """Return the bytes of all parameters and buffers of a module, shared ones once."""
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


TRACED_BATCHES = 2
"""Micro-batches that are traced. From the second one on all are alike: gradients are added to their sum."""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """A federation whose steps run on fake tensors (shapes without values) instead of weights and data.

    If all users are alike, the federation has fewer users than the run: those of one pass.

    Args:
        federation: The federation.
        steps: Its steps, with a model and data without values.
        fakes: The fake tensors.
        weights_bytes: Bytes of the frozen weights.
        num_trainers: Number of trainers of the run; 1 if a pooled method trains one model on the data of all users.
        num_participants: Largest number of participants in a round of the run.
        store: Where users are kept, as ``runtime.store``.
        checkpointed: Whether gradient checkpointing recomputes layers.
        data_bytes: Bytes of all users' samples in memory.
        reads_cohorts: Whether only the samples of the cohort in training are in memory.
        process_bytes: Bytes of a process without model and data.
        peaks: Cache of :func:`_largest_step`, by its other arguments.
    """

    federation: InProcess
    steps: Steps
    fakes: Fakes
    weights_bytes: int
    num_trainers: int
    num_participants: int
    store: str = MEMORY
    checkpointed: bool = False
    data_bytes: int = 0
    reads_cohorts: bool = False
    process_bytes: int = 0
    peaks: dict[tuple[tuple[int, ...], PassSize], StepBytes] = field(default_factory=dict)

    def with_pass_size(self, pass_size: PassSize) -> Steps:
        """Return a copy of the steps with other numbers of users and sequences in one forward and backward pass."""
        steps = replace(self.steps)
        steps.pass_size = pass_size
        return steps

    def cohort(self, rows: Sequence[int]) -> Cohort:
        """Return a cohort (users trained in one batch) whose parameters and moments are fake: shapes without values.

        Args:
            rows: Indices of the cohort's models among all models, the rows of ``clients.state``.
        """
        clients, device = self.federation.clients, self.steps.model.device
        cohort = clients.cohort(list(rows), 0)  # round 0; the round does not change shapes
        state = cohort.state
        fake_state = replace(
            state,
            rows=self.fakes.of(state.rows, device),
            first=self.fakes.of(state.first, device),
            second=self.fakes.of(state.second, device),
        )
        return replace(cohort, state=fake_state)


def rehearse(
    federation: InProcess,
    num_trainers: int,
    *,
    num_participants: int | None = None,
    store: str = MEMORY,
    checkpointed: bool = False,
    data_bytes: int = 0,
    reads_cohorts: bool = False,
    process_bytes: int = 0,
) -> Rehearsal:
    """Replace a federation's frozen weights, in place, and data with fake tensors, to measure costs of its steps.

    Fake tensors have shapes but no values: they take no memory and no time.

    Args:
        federation: The federation. If all users are alike, it may have fewer users than the run.
        num_trainers: Number of trainers of the run; 1 if a pooled method trains one model on the data of all users.
        num_participants: Largest number of participants in a round; None for all trainers.
        store: Where users are kept, as ``runtime.store``.
        checkpointed: Whether gradient checkpointing recomputes layers.
        data_bytes: Bytes of all users' samples in memory.
        reads_cohorts: Whether only the samples of the cohort in training are in memory.
        process_bytes: Bytes of a process without model and data.
    """
    clients = federation.clients
    device = clients.model.device
    fakes = Fakes()
    model, weights_bytes = clients.model.without_weights(fakes)
    batch_source = clients.batch_source.without_data(lambda real: fakes.of(real, device))
    steps = replace(clients.steps, model=model, source=batch_source)
    if num_participants is None:
        num_participants = num_trainers
    return Rehearsal(
        federation=federation,
        steps=steps,
        fakes=fakes,
        num_trainers=num_trainers,
        num_participants=min(num_participants, num_trainers),
        store=store,
        checkpointed=checkpointed,
        weights_bytes=weights_bytes,
        data_bytes=data_bytes,
        reads_cohorts=reads_cohorts,
        process_bytes=process_bytes,
    )


def peak_memory(rehearsal: Rehearsal, *, one_user: bool = False, pass_size: PassSize | None = None) -> MemoryCost:
    """Return the peak memory of a run on this machine, from one step on fake tensors and the sizes of all users.

    Args:
        rehearsal: The run's federation, on fake tensors (shapes without values).
        one_user: Return the peak on a device that trains only one user, the one with the largest model.
        pass_size: Numbers of users and sequences in one forward and backward pass; None for those of the run.
    """
    clients, state = rehearsal.federation.clients, rehearsal.federation.clients.state
    device_type = clients.model.device.type
    pass_size = pass_size or rehearsal.steps.pass_size
    num_rows = 1 if one_user else min(pass_size.users, len(state.rows))
    first_row = 0
    if num_rows == 1:  # the user with the largest model needs the most memory
        unpadded_sizes = clients.mask.sum(1)
        first_row = int(unpadded_sizes.argmax())
    rows = tuple(range(first_row, first_row + num_rows))
    step = _largest_step(rehearsal, rows, pass_size)
    num_trainers = 1 if one_user else rehearsal.num_trainers
    # The rehearsal's federation may have fewer users than the run; bytes of its users are multiplied by this.
    user_ratio = num_trainers / len(clients.trainers)
    kept_gradients_bytes = 0
    if GRADIENTS in state.kept:  # some methods store all users' gradients of one phase for a later phase
        kept_gradients_bytes = int(user_ratio * state.kept[GRADIENTS].nbytes)
    exchange_bytes = _exchange_bytes(rehearsal, one_user=one_user)
    # Free blocks between live tensors, as a fraction of the peak.
    gaps_by_device = CHECKPOINTED_GAPS if rehearsal.checkpointed else ALLOCATOR_GAPS
    gaps = gaps_by_device.get(device_type, 0.0)
    keeps_users_on_disk = not one_user and rehearsal.store != MEMORY
    if keeps_users_on_disk:
        models_bytes, moments_bytes = _loaded_users_bytes(rehearsal, pass_size)
    else:
        models_bytes, moments_bytes = _all_users_bytes(rehearsal, user_ratio)
    if not one_user:
        models_bytes += _server_bytes(rehearsal.federation, user_ratio)
    users_with_data = num_trainers  # whose samples are in memory
    if rehearsal.reads_cohorts:
        users_with_data = min(pass_size.users, num_trainers)
    return MemoryCost(
        weights_bytes=rehearsal.weights_bytes,
        adapters_bytes=models_bytes,
        moments_bytes=moments_bytes,
        gradients_bytes=step.gradients + kept_gradients_bytes,
        activations_bytes=step.passes - step.gradients,
        update_bytes=step.update - step.gradients,
        allocator_bytes=int(gaps * max(step.peak, exchange_bytes)),
        data_bytes=rehearsal.data_bytes * users_with_data // rehearsal.num_trainers,
        process_bytes=rehearsal.process_bytes,
        exchange_bytes=exchange_bytes,
    )


def _all_users_bytes(rehearsal: Rehearsal, user_ratio: float) -> tuple[int, int]:
    """Return the bytes of the models, and of the optimiser moments, of all users of a run that keeps them in memory.

    Args:
        rehearsal: The run's federation, on fake tensors (shapes without values). It may have fewer users than the run.
        user_ratio: Number of users of the run, divided by that of the rehearsal's federation.
    """
    clients, state = rehearsal.federation.clients, rehearsal.federation.clients.state
    models_bytes = state.rows.nbytes
    models_bytes += clients.initial.nbytes  # values before training, if the method resets to them; else empty
    # The mask is False at the padding of a row. If all rows have the same mask, one mask in memory is expanded to all
    # users; `nbytes` would count it for each of them.
    models_bytes += clients.mask.untyped_storage().nbytes()
    moments_bytes = state.first.nbytes + state.second.nbytes
    if is_guarded(clients.plan.evaluation, clients.method):  # the users as they train alone
        models_bytes, moments_bytes = 2 * models_bytes, 2 * moments_bytes
    models_bytes += sum(t.nbytes for t in state.best.values())  # copies of the best round, if it is selected
    return int(user_ratio * models_bytes), int(user_ratio * moments_bytes)


def _loaded_users_bytes(rehearsal: Rehearsal, pass_size: PassSize) -> tuple[int, int]:
    """Return the bytes in memory of models, and of optimiser moments, if users are kept on disk.

    Only the users that are trained in one batch (a cohort) are then in memory, and those that are read or written.

    Args:
        rehearsal: The run's federation, on fake tensors (shapes without values).
        pass_size: Numbers of users and sequences in one forward and backward pass; its users are a cohort.
    """
    clients = rehearsal.federation.clients
    copies = clients.method.placement.copies  # models per user
    user = user_bytes(clients.state, rehearsal.store)
    cohort_size = min(pass_size.users, rehearsal.num_participants * copies)
    # Besides the cohort in training, memory holds records (models or moments in their format on disk) that are
    # prefetched for the next cohorts, and records that wait to be written. Each record that waits is taken for a model.
    num_model_records = PREFETCHED_COHORTS + MAX_PENDING_WRITES
    models_bytes = cohort_size * (user.params + num_model_records * user.params_record)
    models_bytes += INDEX_BYTES * rehearsal.num_trainers * copies  # where each record begins on disk
    models_bytes += clients.mask[:1].nbytes  # one mask serves all users
    moments_bytes = cohort_size * (user.moments + PREFETCHED_COHORTS * user.moments_record)
    return models_bytes, moments_bytes


def _exchange_bytes(rehearsal: Rehearsal, *, one_user: bool) -> int:
    """Return the peak bytes of messages in an exchange, when all participants have made their uploads.

    The upload of one user is measured. If users are on disk, a download may need more memory than the uploads.

    Args:
        rehearsal: The run's federation, on fake tensors (shapes without values).
        one_user: Whether the machine trains only one user and keeps it in memory.
    """
    clients = rehearsal.federation.clients
    if not clients.shares:
        return 0
    with LiveBytes() as live:
        clients.upload([0], 1, {LOSS: torch.zeros(1)}, counts=True)  # of user 0 in round 1 with loss 0
    upload_bytes = live.peak
    if one_user:
        return upload_bytes
    if rehearsal.store == MEMORY:
        return upload_bytes * rehearsal.num_participants
    user = user_bytes(clients.state, rehearsal.store)
    # Uploads: each participant's model is read first, so its record and its unpacked tensors are in memory.
    read_bytes = user.params_record + user.params
    uploads_bytes = rehearsal.num_participants * (upload_bytes + read_bytes)
    # Downloads: while one record is packed, up to MAX_PENDING_WRITES others wait to be written.
    downloaded_bytes = user.params + (1 + MAX_PENDING_WRITES) * user.params_record
    num_evaluated = clients.plan.evaluation.users or rehearsal.num_trainers
    users_at_once = min(clients.users_per_message, num_evaluated)
    return max(uploads_bytes, users_at_once * downloaded_bytes)


def _server_bytes(federation: InProcess, user_ratio: float) -> int:
    """Return the bytes of the server's tensors in a run, from a federation that may have fewer users than the run.

    Args:
        federation: The users and the server of a run.
        user_ratio: Number of users of the run, divided by that of the federation.
    """
    server = federation.server
    names_with_user_rows = federation.clients.method.server.by_user  # tensors with a row for each user
    total = 0
    for name, tensor in server.kept.items():
        total += tensor.nbytes * (user_ratio if name in names_with_user_rows else 1)
    return int(total)


def _largest_step(rehearsal: Rehearsal, rows: tuple[int, ...], pass_size: PassSize) -> StepBytes:
    """Return the peak bytes of the largest step of a cohort (users trained in one batch). Results are cached.

    A step of the phase that trains the most parameters is measured, as other phases keep no more activations. If an
    evaluation may read more data at once, its peak is measured too, and the larger one is returned.

    Args:
        rehearsal: The run's federation, on fake tensors (shapes without values).
        rows: Indices of the cohort's models among all models, the rows of ``clients.state``.
        pass_size: Numbers of users and sequences in one forward and backward pass.
    """
    if (rows, pass_size) in rehearsal.peaks:
        return rehearsal.peaks[rows, pass_size]
    layout = rehearsal.steps.model.layout
    steps = rehearsal.with_pass_size(pass_size)
    # By number of parameters that a phase trains (columns of the state), ascending.
    phases = sorted(rehearsal.federation.clients.phases, key=lambda phase: layout.touching(phase.roles).columns)
    largest = StepBytes(passes=0, update=0, gradients=0)
    if phases:
        largest = step_peak(rehearsal, rows, phases[-1], steps)
    if not phases or steps.batch_source.scores_more:  # evaluation passes are larger than training passes
        evaluation_bytes = _evaluation_peak(rehearsal, rows, steps)
        if evaluation_bytes > largest.peak:
            largest = StepBytes(passes=evaluation_bytes, update=0, gradients=0)
    rehearsal.peaks[rows, pass_size] = largest
    return largest


class StepBytes(NamedTuple):
    """Bytes of an optimiser step beside parameters and moments.

    Args:
        passes: The most that the forward and backward passes use, with gradients.
        update: The most that the update of the parameters uses, with gradients.
        gradients: Bytes of the gradients.
    """

    passes: int
    update: int
    gradients: int

    @property
    def peak(self) -> int:
        """Peak bytes of the step: in its forward and backward passes, or in the update of the parameters."""
        return max(self.passes, self.update)


def step_peak(rehearsal: Rehearsal, rows: Sequence[int], phase: Phase, steps: Steps | None = None) -> StepBytes:
    """Measure the peak bytes of one optimiser step of a phase: its micro-batches and the update of the parameters.

    At most :data:`TRACED_BATCHES` micro-batches are run, as more would not raise the peak.

    Args:
        rehearsal: The run's federation, on fake tensors (shapes without values).
        rows: Indices of the models that are trained together, the rows of ``clients.state``.
        phase: The phase, which says which parameters the step trains.
        steps: Steps with other numbers of users and sequences per pass than the rehearsal's; None for its own.
    """
    steps = steps or rehearsal.steps
    layout = steps.model.layout
    cohort = rehearsal.cohort(rows)
    num_users = len(rows)
    micro_batch_size = steps.pass_size.sequences
    batch_size = min(rehearsal.federation.clients.batch_size, TRACED_BATCHES * micro_batch_size)
    batch = fake_batch(rehearsal, num_users, batch_size)
    micro_batch = fake_batch(rehearsal, num_users, micro_batch_size)
    has_private_examples = steps.private is not None and steps.private.applies(phase, layout)
    with ignore_grad_warning(), _accept_fakes(rehearsal), LiveBytes() as live:
        if has_private_examples:
            gradients = _private_gradients(cohort, phase, steps, batch, micro_batch)
        else:
            _losses, gradients = steps.gradient(cohort, batch, phase)  # splits the batch into micro-batches
        gradients_bytes = sum(gradient.nbytes for gradient in gradients.values())
        peak_of_passes = live.peak
        live.peak = live.live  # start again, to measure the peak of the update
        steps.descend(phase, cohort, gradients, 0)  # as local step 0; the number of the step changes no sizes
    return StepBytes(passes=peak_of_passes, update=live.peak, gradients=gradients_bytes)


def _private_gradients(cohort: Cohort, phase: Phase, steps: Steps, batch: Tensor, micro_batch: Tensor) -> Tree:
    """Compute fake gradients with example-level privacy, which take the memory of :meth:`.PrivateSteps.step`.

    The peak of memory is measured meanwhile, so the values do not matter. Shared tensors get the sum of the clipped
    gradients of single examples, plus zeros that take the memory of noise. Tensors that stay local get plain gradients,
    which are in memory at the same time.

    Args:
        cohort: The users who are trained in one batch, with their tensors.
        phase: The kind of local step: which tensors it trains, and on which split of the data.
        steps: The steps.
        batch: Fake batch for the tensors that stay local.
        micro_batch: Fake examples for the shared tensors; stands for each of :data:`TRACED_BATCHES` micro-batches.
    """
    private, model, num_users = steps.private, steps.model, len(cohort.rows)
    assert private is not None
    layout = model.layout
    shared_names = private.noised_names(phase, layout)
    # Some methods train several copies of a user's model. Only the first is shared; all of another is trained plainly.
    has_further_copies = max(cohort.rows) >= steps.trainers
    plain_names = private.plain_names(phase, layout, everything=has_further_copies)
    plain_gradients = Tree()
    if plain_names:
        _losses, plain_gradients = steps.gradient(cohort, batch, phase, names=plain_names)
    shared_roles = layout.roles - private.local_roles(layout)
    shared_tensors = restrict(model.tensors(cohort.state.rows), layout, shared_roles)
    sums = Tree()
    for _ in range(TRACED_BATCHES):
        sums_of_pass, _ = private.clipped_sums_of_batch(
            model,
            steps.batch_source,
            shared_tensors,
            shared_names,
            cohort.owners,
            micro_batch,
            bound=1.0,  # any clip norm
        )
        sums = {name: t + sums[name] if name in sums else t for name, t in sums_of_pass.items()}
    noised = {name: (t + torch.zeros_like(t)).to(cohort.state.rows.dtype) for name, t in sums.items()}
    return private.merge(layout, phase, plain_gradients, noised, noised_users=range(num_users), users=num_users)


@torch.no_grad()
def _evaluation_peak(rehearsal: Rehearsal, rows: Sequence[int], steps: Steps) -> int:
    """Return the peak bytes of one forward pass of an evaluation.

    Args:
        rehearsal: The run's federation, on fake tensors (shapes without values).
        rows: Indices of the models that are evaluated together, the rows of ``clients.state``.
        steps: The rehearsal's steps, perhaps with another number of users and sequences per forward pass.
    """
    clients = rehearsal.federation.clients
    # Sequences or samples of each user in one forward pass.
    items_per_user = steps.batch_source.scored_at_once(clients.users, steps.pass_size)
    inputs = fake_inputs(rehearsal, len(rows), items_per_user)
    with ignore_grad_warning(), _accept_fakes(rehearsal), LiveBytes() as live:
        Scorer(steps=steps).predict(clients.models, rows, inputs)
    return live.peak


def fake_batch(rehearsal: Rehearsal, num_users: int, count: int) -> Int[Tensor, "users count ..."]:
    """Return a training batch of fake tensors, which have shapes but no data.

    Args:
        rehearsal: The federation on fake tensors whose steps read the batch.
        num_users: Number of users.
        count: Sequences or samples of each user.

    Returns:
        Windows of fake tokens, or indices that all refer to the first sample.
    """
    fakes, device = rehearsal.fakes, rehearsal.steps.model.device
    return rehearsal.steps.batch_source.blank(num_users, count, lambda on_meta: fakes.of(on_meta, device))


def fake_inputs(
    rehearsal: Rehearsal, num_users: int, count: int
) -> Int[Tensor, "users count _"] | Float[Tensor, "users ..."]:
    """Return a model's inputs in an evaluation, as fake tensors, which have shapes but no data.

    Args:
        rehearsal: The federation on fake tensors whose models are evaluated.
        num_users: Number of users.
        count: Sequences or samples of each user.
    """
    fakes, device = rehearsal.fakes, rehearsal.steps.model.device
    return rehearsal.steps.batch_source.blank_inputs(num_users, count, lambda on_meta: fakes.of(on_meta, device))


def _accept_fakes(rehearsal: Rehearsal) -> AbstractContextManager[None]:
    """Return a context in which a net's native code accepts tensors without data, if the net has native code."""
    native_net = getattr(rehearsal.steps.model, "native_net", None)
    return getattr(native_net, "accepting_fakes", nullcontext)()


@contextmanager
def ignore_grad_warning() -> Iterator[None]:
    """Suppress torch's warning about reading ``.grad`` of a non-leaf tensor, which torch itself triggers here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor", category=UserWarning)
        yield
