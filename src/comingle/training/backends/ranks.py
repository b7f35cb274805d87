"""Processes of one run that exchange results with ``torch.distributed``.

Results travel as JSON and tensors as bytes; nothing that is received is executed. Tensors on GPUs use NCCL, all others
gloo.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn  # if imported later, defaults of its functions would keep the group alive
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from comingle.training.backends.launched import LOST, PARENT, Place
from comingle.utils import errors
from comingle.utils.errors import ComingleError, RankLostError
from comingle.utils.trees import Tree

T = TypeVar("T")

PROCESS_TIMEOUT = timedelta(hours=6)
"""Time that a process waits for another live one; a process that has ended is noticed at once."""

_MAX_ERROR_LENGTH = 200
"""Number of characters of torch's message that the error of a lost process shows."""

_RUN_NUMBERS = count()
"""Numbers of the runs of this program, for keys of their own in the store that they share."""

_CPU_BACKEND = "gloo"
_GPU_BACKENDS = "cpu:gloo,cuda:nccl"


class Ranks:
    """One process among several; every process calls each method, in the same order.

    Args:
        place: Place of the process.
        launcher_store: Store whose entries outlast restarts by the launcher.
    """

    def __init__(self, place: Place, launcher_store: Store):
        """Create the connection with the other processes of a run, which the launcher has started."""
        self.place, self._launcher_store = place, launcher_store
        self.rank, self.size, self.is_first_process = place.rank, place.size, place.is_first_process

    def barrier(self) -> None:
        """Wait until all processes have called this method."""
        any_number = 0
        self._all_gather_number(any_number)  # returns once every process has sent a number

    def record_opened(self, folder: Path) -> None:
        """Record that this run's folder was opened: :meth:`has_opened` is then true after a restart by the launcher."""
        if self.is_first_process:
            self._launcher_store.set(str(folder.absolute()), "opened")

    def has_opened(self, folder: Path) -> bool:
        """Return whether this program has opened the run's folder already, before the launcher restarted it."""
        key = str(folder.absolute())
        return self.run_in_first(lambda: self._launcher_store.check([key]))

    # ---------------------------------------------------------------- doing the same

    def run_in_all(self, work: Callable[[], T]) -> T:
        """Call ``work`` in every process and return its result in this one; if it fails in one, fail in all.

        Without this, the processes in which ``work`` succeeded would wait forever for the one that failed.

        Raises:
            ComingleError: The error of the first process that failed, raised in rank 0; other processes exit silently.
            RankLostError: A process has ended.
        """
        result: T | None = None
        failure: Exception | None = None
        try:
            result = work()
        except RankLostError:
            raise
        except Exception as error:
            failure = error
        self._raise_everywhere(failure)
        return result  # type: ignore[return-value]  (there is no failure)

    def gather(self, work: Callable[[], object]) -> list[Any]:
        """Call ``work`` in every process; return all results in rank 0, and ``[own result]`` in other ranks.

        Results must be JSON.
        """
        own_result = self.run_in_all(work)
        message = _to_json(own_result)
        lengths = self._all_gather_number(len(message))  # receivers need to know the size of a message
        if not self.is_first_process:
            self._send(message, 0)
            return [own_result]
        results = [own_result]
        for rank in range(1, self.size):
            results.append(json.loads(self._receive(rank, lengths[rank])))
        return results

    def run_in_first(self, work: Callable[[], T]) -> T:
        """Call ``work`` in rank 0 and return its result, which must be JSON, in every process."""

        def run_if_first() -> T | None:
            return work() if self.is_first_process else None

        result = self.run_in_all(run_if_first)
        message = _to_json(result) if self.is_first_process else b""
        length, *_zeros = self._all_gather_number(len(message))  # of the message of rank 0
        message_tensor = _tensor(message) if self.is_first_process else torch.empty(length, dtype=torch.uint8)
        with _peer_errors():
            dist.broadcast(message_tensor, 0)
        if self.is_first_process:
            return result  # type: ignore[return-value]
        return json.loads(bytes(message_tensor.numpy()))

    def _raise_everywhere(self, failure: Exception | None) -> None:
        """Fail in every process if one has failed.

        A user's mistake is reported once, by rank 0. A bug is raised where it occurred, with its traceback.

        Args:
            failure: Error of this process; None if it succeeded.

        Raises:
            ComingleError: The error of the first process that failed, in rank 0.
            SystemExit: A process has failed, in other ranks.
        """
        message = b""
        if failure is not None:
            one_line = " ".join(str(failure).split())
            message = _to_json([type(failure).__name__, one_line])
        lengths = self._all_gather_number(len(message))
        failed_ranks = [rank for rank, length in enumerate(lengths) if length]
        if not failed_ranks:
            return
        first_failed = failed_ranks[0]
        is_sender = self.rank == first_failed
        message_tensor = _tensor(message) if is_sender else torch.empty(lengths[first_failed], dtype=torch.uint8)
        with _peer_errors():
            dist.broadcast(message_tensor, first_failed)
        is_bug = failure is not None and not isinstance(failure, ComingleError)
        if failure is not None and (is_bug or self.is_first_process):
            raise failure
        if not self.is_first_process:
            raise SystemExit(2)
        class_name, text = json.loads(bytes(message_tensor.numpy()))
        raise _error_of_rank(first_failed, class_name, text)

    # ---------------------------------------------------------------- tensors

    def gather_tensors(self, tree: Tree) -> list[Tree]:
        """Return the tensors of all processes in rank 0, in the order of the ranks; an empty list in others."""
        descriptions = self.gather(lambda: _describe(tree))
        if not self.is_first_process:
            self._send_tensors(tree, 0)
            return []
        trees = [tree]
        for rank in range(1, self.size):
            trees.append(self._receive_tensors(descriptions[rank], rank))
        return trees

    def scatter(self, work: Callable[[], Sequence[tuple[object, Tree]]]) -> tuple[Any, Tree]:
        """Call ``work`` in rank 0, which returns a result and tensors for each rank; return those of this rank.

        Args:
            work: Returns a result, which must be JSON, and tensors by name, for each rank in order.
        """
        results_and_tensors: list[tuple[Any, Tree]] = []  # by rank; filled in rank 0

        def run_if_first() -> None:
            if self.is_first_process:
                results_and_tensors.extend(work())

        self.run_in_all(run_if_first)
        messages = [_to_json([result, _describe(tree)]) for result, tree in results_and_tensors]
        if self.is_first_process:
            lengths = torch.tensor([len(message) for message in messages])
        else:
            lengths = torch.zeros(self.size, dtype=torch.int64)  # to receive into
        with _peer_errors():
            dist.broadcast(lengths, 0)
        if not self.is_first_process:
            own_length = int(lengths[self.rank])
            result, description = json.loads(self._receive(0, own_length))
            return result, self._receive_tensors(description, 0)
        for rank in range(1, self.size):
            _result, tree = results_and_tensors[rank]
            self._send(messages[rank], rank)
            self._send_tensors(tree, rank)
        return results_and_tensors[0]

    def broadcast(self, tree: Tree) -> Tree:
        """Return the tensors of rank 0, by name, in every process; the argument of other processes is ignored."""
        description = self.run_in_first(lambda: _describe(tree))
        own_tensors = {name: t.contiguous() for name, t in tree.items()}
        tensors = own_tensors if self.is_first_process else _empty_tensors(description)
        for t in tensors.values():
            with _peer_errors():
                dist.broadcast(_as_bytes(t), 0)  # bytes, as not every backend supports every dtype
        return tensors

    def _send_tensors(self, tree: Tree, rank: int) -> None:
        """Send tensors to another process, one after another.

        Args:
            tree: The tensors by name. Empty tensors are not sent; the receiver knows all shapes already.
            rank: Number of the process, its rank in ``torch.distributed``.
        """
        for t in tree.values():
            if t.numel():
                with _peer_errors():
                    dist.send(_as_bytes(t.contiguous()), rank)

    def _receive_tensors(self, description: list[Any], rank: int) -> Tree:
        """Receive tensors that :meth:`_send_tensors` sends from a rank.

        Args:
            description: Names, dtypes and shapes of the tensors; see :func:`_describe`.
            rank: The sender.
        """
        tree = _empty_tensors(description)
        for t in tree.values():
            if t.numel():
                with _peer_errors():
                    dist.recv(_as_bytes(t), rank)
        return tree

    def reduce_max(self, values: Tensor) -> Tensor:
        """Return the maximum of each entry over all processes, in every process; works in place."""
        with _peer_errors():
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def reduce_sum(self, values: Tensor) -> Tensor:
        """Add up an integer tensor over all processes, in place; only the result in rank 0 is the sum."""
        assert values.dtype == torch.int64
        with _peer_errors():
            dist.reduce(values, 0, dist.ReduceOp.SUM)
        return values

    # ---------------------------------------------------------------- bytes

    def _all_gather_number(self, number: int) -> list[int]:
        """Return the number that each process passes, by rank, in every process."""
        own = torch.tensor([number])
        gathered = [torch.zeros_like(own) for _ in range(self.size)]
        with _peer_errors():
            dist.all_gather(gathered, own)
        return [int(t) for t in gathered]

    def _send(self, content: bytes, rank: int) -> None:
        """Send bytes to a rank, which must know their length."""
        with _peer_errors():
            dist.send(_tensor(content), rank)

    def _receive(self, rank: int, length: int) -> bytes:
        """Return ``length`` bytes that a rank sends."""
        tensor = torch.empty(length, dtype=torch.uint8)
        with _peer_errors():
            dist.recv(tensor, rank)
        return bytes(tensor.numpy())


@contextmanager
def joined(place: Place) -> Iterator[Ranks]:
    """Join the ``torch.distributed`` process group of a run; leave it on exit.

    Args:
        place: Rank of this process and number of processes. ``place.restarts`` counts how often torchrun has restarted
            the processes; each such attempt has keys of its own in the store.

    Raises:
        RankLostError: A process did not join.
    """
    if PARENT in os.environ:  # started by ``--processes``: end with the launcher
        threading.Thread(target=_exit_with_parent, args=(int(os.environ[PARENT]),), daemon=True).start()
    with _peer_errors():
        # Processes find each other by a file, or by the address in torchrun's environment variables.
        url = f"file://{place.rendezvous_file}" if place.rendezvous_file else "env://"
        store = _rendezvous_store(url, place.rank, place.size)
        run_number = next(_RUN_NUMBERS)
        # The store may have keys of earlier runs, and of attempts before a restart; prefixes keep them apart.
        # ``launcher_store`` is for all attempts of a run.
        launcher_store = PrefixStore(f"comingle/runs/{run_number}", _without_prefixes(store))
        store_of_attempt = PrefixStore(f"comingle/{place.restarts}/{run_number}", store)
        has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
        dist.init_process_group(
            _GPU_BACKENDS if has_nccl else _CPU_BACKEND,
            store=store_of_attempt,
            rank=place.rank,
            world_size=place.size,
            timeout=PROCESS_TIMEOUT,
        )
    try:
        ranks = Ranks(place, launcher_store)
        ranks.barrier()  # a process that ended early would leave the others waiting for it
        yield ranks
    finally:
        dist.destroy_process_group()


@cache
def _rendezvous_store(url: str, rank: int, size: int) -> Store:
    """Return the key-value store in which processes find each other.

    The store is cached, as rank 0 may serve it: it must stay open while other processes join the next run.

    Args:
        url: Address of the rendezvous: ``"file://PATH"``, or ``"env://"`` for torchrun's environment variables.
        rank: Rank of this process.
        size: Number of processes.
    """
    store, _rank, _size = next(rendezvous(url, rank, size))
    return store


def _without_prefixes(store: Store) -> Store:
    """Return the store below all prefixes; torchrun gives each attempt a prefix, so that attempts share no entries."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _exit_with_parent(pipe: int) -> None:
    """Wait in a thread until the parent process ends, and then end this process.

    Args:
        pipe: File descriptor of a pipe that only the parent has open for writing, and to which it never writes.
    """
    os.read(pipe, 1)  # returns when the pipe is closed, also if the parent is killed
    os._exit(LOST)


@contextmanager
def _peer_errors() -> Iterator[None]:
    """Raise a :class:`RankLostError` if torch.distributed fails in the block, as it does if another process ends."""
    try:
        yield
    except RuntimeError as error:
        message = str(error).strip() or type(error).__name__
        message = re.sub(r"^\[[^]]*\] ", "", message)  # the source file of torch
        first_sentence = re.split(r"[.] |\n", message)[0][:_MAX_ERROR_LENGTH]
        raise RankLostError(f"another process of this run has ended ({first_sentence})") from None


def _error_of_rank(rank: int, class_name: str, text: str) -> ComingleError:
    """Return the error of another process under its own class, or as a ``RunError`` if it is a bug.

    Args:
        rank: Rank of that process.
        class_name: Name of the class of the error, such as ``"RecipeError"``.
        text: Its message.
    """
    error_class = getattr(errors, class_name, None)
    if isinstance(error_class, type) and issubclass(error_class, ComingleError):
        return error_class(text)
    return errors.RunError(f"process {rank}: {class_name}: {text}")


def _describe(tree: Tree) -> list[Any]:
    """Return name, dtype, shape and device type of each tensor, such as ``["lora_a", "float32", [4, 8], "cpu"]``."""
    description: list[Any] = []
    for name, t in tree.items():
        dtype = str(t.dtype).removeprefix("torch.")
        description.append([name, dtype, list(t.shape), t.device.type])
    return description


def _empty_tensors(description: list[Any]) -> Tree:
    """Return uninitialised tensors to receive into, on the same type of device as those of the sender.

    Args:
        description: Name, dtype, shape and device type of each tensor; see :func:`_describe`.
    """
    tensors: Tree = {}
    for name, dtype, shape, device_type in description:
        tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype), device=device_type)
    return tensors


def _as_bytes(t: Tensor) -> Tensor:
    """Return a view of the memory as bytes, which every backend supports."""
    return t.detach().view(-1).view(torch.uint8)


def _to_json(content: object) -> bytes:
    return json.dumps(content).encode()


def _tensor(content: bytes) -> Tensor:
    """Return bytes as a writable uint8 tensor."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
