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
        self.place, self._launcher_store = place, launcher_store
        self.rank, self.size, self.leads = place.rank, place.size, place.leads

    def barrier(self) -> None:
        """Wait until all processes have come here.

        If a process went on alone and ended, others would wait for it in their rendezvous.
        """
        self._all_gather_number(0)  # returns only once every process has sent a number, whatever it is

    def opened(self, folder: Path) -> None:
        """Record that this run's folder was opened, for as long as the launcher lives."""
        if self.leads:
            self._launcher_store.set(str(folder.absolute()), "opened")

    def has_opened(self, folder: Path) -> bool:
        """Return whether an earlier attempt of the launcher has opened the folder of this run."""
        return self.share(lambda: self._launcher_store.check([str(folder.absolute())]))

    # ---------------------------------------------------------------- doing the same

    def each(self, work: Callable[[], T]) -> T:
        """Call ``work`` in every process and return its result in this one; if it fails in one, fail in all.

        Without this, the processes in which ``work`` succeeded would wait forever for the one that failed.

        Raises:
            ComingleError: The error of the first process that failed, raised in rank 0; other processes exit silently.
            RankLostError: A process has ended.
        """
        result, failure = None, None
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
        own = self.each(work)
        content = _to_json(own)
        lengths = self._all_gather_number(len(content))  # receivers need to know the size of a message
        if not self.leads:
            self._send(content)
            return [own]
        received = [json.loads(self._receive(rank, lengths[rank])) for rank in range(1, self.size)]
        return [own, *received]

    def share(self, work: Callable[[], T]) -> T:
        """Call ``work`` in rank 0 and return its result, which must be JSON, in every process."""
        own = self.each(lambda: work() if self.leads else None)
        content = _to_json(own) if self.leads else b""
        length = self._all_gather_number(len(content))[0]
        tensor = _tensor(content) if self.leads else torch.empty(length, dtype=torch.uint8)
        with _peer_errors():
            dist.broadcast(tensor, 0)
        return own if self.leads else json.loads(bytes(tensor.numpy()))  # type: ignore[return-value]

    def _raise_everywhere(self, failure: Exception | None) -> None:
        """Fail in every process if one has failed; the first one of these sends its error to all others.

        A user's mistake is reported once, by rank 0. A bug is raised where it occurred, with its traceback.

        Args:
            failure: Error of this process; None if it succeeded.

        Raises:
            ComingleError: The error of the first process that failed, in rank 0.
            SystemExit: A process has failed, in other ranks.
        """
        content = b"" if failure is None else _to_json([type(failure).__name__, " ".join(str(failure).split())])
        lengths = self._all_gather_number(len(content))
        failed_ranks = [rank for rank, length in enumerate(lengths) if length]
        if not failed_ranks:
            return
        first = failed_ranks[0]
        tensor = _tensor(content) if self.rank == first else torch.empty(lengths[first], dtype=torch.uint8)
        with _peer_errors():
            dist.broadcast(tensor, first)
        if failure is not None and not isinstance(failure, ComingleError):
            raise failure  # a bug, which needs its traceback
        if not self.leads:
            raise SystemExit(2)
        raise failure or _error_of_rank(first, *json.loads(bytes(tensor.numpy())))

    # ---------------------------------------------------------------- tensors

    def collect(self, tree: Tree) -> list[Tree]:
        """Return the tensors of all processes in rank 0, in the order of the ranks; an empty list in others."""
        descriptions = self.gather(lambda: _describe(tree))
        if not self.leads:
            self._send_tensors(tree, 0)
            return []
        return [tree, *(self._receive_tensors(descriptions[rank], rank) for rank in range(1, self.size))]

    def scatter(self, work: Callable[[], Sequence[tuple[object, Tree]]]) -> tuple[Any, Tree]:
        """Call ``work`` in rank 0, which returns a result and tensors for each rank; return those of this rank.

        Args:
            work: Returns a result, which must be JSON, and tensors by name, for each rank in order.
        """
        result_of_rank: list[tuple[Any, Tree]] = []  # filled in rank 0
        self.each(lambda: result_of_rank.extend(work()) if self.leads else None)
        contents = [_to_json([result, _describe(tree)]) for result, tree in result_of_rank]
        # The lengths of the messages in rank 0; in other ranks zeros, which the broadcast overwrites.
        lengths = torch.tensor([len(content) for content in contents] or [0] * self.size)
        with _peer_errors():
            dist.broadcast(lengths, 0)
        if not self.leads:
            result, described = json.loads(self._receive(0, int(lengths[self.rank])))
            return result, self._receive_tensors(described, 0)
        for rank in range(1, self.size):
            self._send(contents[rank], rank)
            self._send_tensors(result_of_rank[rank][1], rank)
        return result_of_rank[0]

    def broadcast(self, tree: Tree) -> Tree:
        """Return the tensors of rank 0, by name, in every process; the argument of other processes is ignored."""
        shapes_and_dtypes = self.share(lambda: _describe(tree))  # of rank 0: what the others must allocate to receive
        if self.leads:
            tensors = {name: t.contiguous() for name, t in tree.items()}
        else:
            tensors = _empty_tensors(shapes_and_dtypes)
        for t in tensors.values():
            with _peer_errors():  # if another process has ended
                dist.broadcast(_as_bytes(t), 0)  # bytes, as not every backend supports every dtype
        return tensors

    def _send_tensors(self, tree: Tree, rank: int) -> None:
        """Send tensors to a rank, one after another; empty ones are skipped, as their description says all."""
        for t in tree.values():
            if t.numel():
                with _peer_errors():
                    dist.send(_as_bytes(t.contiguous()), rank)

    def _receive_tensors(self, described: list[Any], rank: int) -> Tree:
        """Receive tensors that :meth:`_send_tensors` sends from a rank.

        Args:
            described: Their description; see :func:`_describe`.
            rank: The sender.
        """
        tree = _empty_tensors(described)
        for t in tree.values():
            if t.numel():
                with _peer_errors():
                    dist.recv(_as_bytes(t), rank)
        return tree

    def largest(self, values: Tensor) -> Tensor:
        """Return the maximum of each value over all processes, in every process."""
        with _peer_errors():
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def total(self, values: Tensor) -> Tensor:
        """Return the sums of the entries of an integer tensor over all processes; only rank 0's result has them.

        Works in place.
        """
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

    def _send(self, content: bytes, rank: int = 0) -> None:
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
    """Join the process group of a run; leave it on exit.

    Raises:
        RankLostError: A process did not join.
    """
    if PARENT in os.environ:  # started by ``--processes``: end with the launcher
        threading.Thread(target=_exit_with_parent, args=(int(os.environ[PARENT]),), daemon=True).start()
    with _peer_errors():
        store = _rendezvous_store(f"file://{place.meeting}" if place.meeting else "env://", place.rank, place.size)
        # The store may have addresses of an earlier run of this program, or of an attempt before a restart. So each run
        # and each attempt has a prefix of its own. ``launcher_store`` has no such prefix for attempts: it records which
        # run folders were opened, and must outlast restarts.
        run_number = next(_RUN_NUMBERS)
        launcher_store = PrefixStore(f"comingle/runs/{run_number}", _without_prefixes(store))
        store = PrefixStore(f"comingle/{place.restarts}/{run_number}", store)
        backend = _GPU_BACKENDS if torch.cuda.is_available() and dist.is_nccl_available() else _CPU_BACKEND
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=PROCESS_TIMEOUT)
    try:
        ranks = Ranks(place, launcher_store)
        ranks.barrier()  # a process that ended early would leave the others waiting for it
        yield ranks
    finally:
        dist.destroy_process_group()


@cache
def _rendezvous_store(url: str, rank: int, size: int) -> Store:
    """Return the key-value store in which processes find each other; cached, as all runs of a program share it.

    Without torchrun the first process serves the store, so it must stay open while others join the next run.

    Args:
        url: Address of the rendezvous: a file or environment variables.
        rank: Rank of this process.
        size: Number of processes.
    """
    store, _, _ = next(rendezvous(url, rank, size))  # the others are the rank and the size
    return store


def _without_prefixes(store: Store) -> Store:
    """Return the store without the prefix that torchrun gives each attempt, so that entries outlast attempts."""
    return _without_prefixes(store.underlying_store) if isinstance(store, PrefixStore) else store


def _exit_with_parent(pipe: int) -> None:
    """Wait in a thread until the parent process ends, and then end this process.

    Args:
        pipe: File descriptor of a pipe that only the parent has open for writing, and to which it never writes.
    """
    os.read(pipe, 1)  # returns when the pipe is closed, also if the parent is killed
    os._exit(LOST)


@contextmanager
def _peer_errors() -> Iterator[None]:
    """Convert errors of torch.distributed in the block to a :class:`RankLostError`."""
    try:
        yield
    except RuntimeError as error:
        message = str(error).strip() or type(error).__name__
        message = re.sub(r"^\[[^]]*\] ", "", message)  # the source file of torch
        first_sentence = re.split(r"[.] |\n", message)[0][:_MAX_ERROR_LENGTH]
        raise RankLostError(f"another process of this run has ended ({first_sentence})") from None


def _error_of_rank(rank: int, kind: str, text: str) -> ComingleError:
    """Return the error of another process under its own type, or as a ``RunError`` if it is a bug.

    Args:
        rank: Rank of that process.
        kind: Name of the class of the error.
        text: Its message.
    """
    error_class = getattr(errors, kind, None)
    if isinstance(error_class, type) and issubclass(error_class, ComingleError):
        return error_class(text)
    return errors.RunError(f"process {rank}: {kind}: {text}")


def _describe(tree: Tree) -> list[Any]:
    """Return name, dtype, shape and device type of each tensor, for JSON."""
    return [[name, str(t.dtype).removeprefix("torch."), list(t.shape), t.device.type] for name, t in tree.items()]


def _empty_tensors(described: list[Any]) -> Tree:
    """Return uninitialised tensors to receive into, from the description that a sender makes by :func:`_describe`.

    They are on the same type of device as those of the sender, such as the GPU of this process.

    Args:
        described: Name, dtype, shape and device type of each tensor.
    """
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device=device) for name, dtype, shape, device in described
    }


def _as_bytes(t: Tensor) -> Tensor:
    """Return a view of the memory as bytes, which every backend supports."""
    return t.detach().view(-1).view(torch.uint8)


def _to_json(content: object) -> bytes:
    return json.dumps(content).encode()


def _tensor(content: bytes) -> Tensor:
    """Return bytes as a writable uint8 tensor."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
