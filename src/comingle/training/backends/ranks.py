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

_SHOWN = 200
_JOINED = count()
_GLOO = "gloo"
_BOTH = "cpu:gloo,cuda:nccl"


class Ranks:
    """One process among several; every process calls each method, in the same order."""

    def __init__(self, place: Place, kept: Store):
        self.place, self._kept = place, kept
        self.rank, self.size, self.leads = place.rank, place.size, place.leads

    def meet(self) -> None:
        """Wait for all processes; one that left early would leave others waiting in their rendezvous."""
        self._numbers(0)

    def opened(self, folder: Path) -> None:
        """Record that this run's folder was opened, for as long as the launcher lives."""
        if self.leads:
            self._kept.set(str(folder.absolute()), "opened")

    def has_opened(self, folder: Path) -> bool:
        """Return whether an earlier attempt of the launcher has opened the folder of this run."""
        return self.share(lambda: self._kept.check([str(folder.absolute())]))

    # ---------------------------------------------------------------- doing the same

    def each(self, work: Callable[[], T]) -> T:
        """Call ``work`` in every process and return its result here.

        Raises:
            ComingleError: The error of the first process that failed, raised in rank 0; other processes exit silently.
            RankLostError: A process has ended.
        """
        done, failure = None, None
        try:
            done = work()
        except RankLostError:
            raise
        except Exception as error:
            failure = error
        self._agree(failure)
        return done  # type: ignore[return-value]  (there is no failure)

    def gather(self, work: Callable[[], object]) -> list[Any]:
        """Call ``work`` in every process; return all results in rank 0, in others a list with their own."""
        own = self.each(work)
        sent = _packed(own)
        lengths = self._numbers(len(sent))
        if not self.leads:
            self._send(sent)
            return [own]
        received = [json.loads(self._receive(rank, lengths[rank])) for rank in range(1, self.size)]
        return [own, *received]

    def share(self, work: Callable[[], T]) -> T:
        """Call ``work`` in rank 0 and return its result in every process."""
        own = self.each(lambda: work() if self.leads else None)
        content = _packed(own) if self.leads else b""
        length = self._numbers(len(content))[0]
        tensor = _tensor(content) if self.leads else torch.empty(length, dtype=torch.uint8)
        with _peer_errors():
            dist.broadcast(tensor, 0)
        return own if self.leads else json.loads(bytes(tensor.numpy()))  # type: ignore[return-value]

    def _agree(self, failure: Exception | None) -> None:
        """Fail in every process if one has failed."""
        said = b"" if failure is None else _packed([type(failure).__name__, " ".join(str(failure).split())])
        lengths = self._numbers(len(said))
        failed = [rank for rank, length in enumerate(lengths) if length]
        if not failed:
            return
        first = failed[0]
        tensor = _tensor(said) if self.rank == first else torch.empty(lengths[first], dtype=torch.uint8)
        with _peer_errors():
            dist.broadcast(tensor, first)
        if failure is not None and not isinstance(failure, ComingleError):
            raise failure  # a bug, which needs its traceback
        if not self.leads:
            raise SystemExit(2)
        raise failure or _error(first, *json.loads(bytes(tensor.numpy())))

    # ---------------------------------------------------------------- tensors

    def collect(self, tree: Tree) -> list[Tree]:
        """Return the tensors of all processes in rank 0, in the order of the ranks; an empty list in others."""
        found = self.gather(lambda: _described(tree))
        if self.leads:
            return [tree, *(self._take(described, rank) for rank, described in enumerate(found[1:], 1))]
        self._give(tree, 0)
        return []

    def scatter(self, work: Callable[[], Sequence[tuple[object, Tree]]]) -> tuple[Any, Tree]:
        """Call ``work`` in rank 0, which returns a result and tensors for each rank; return those of this rank."""
        made: list[tuple[Any, Tree]] = []
        self.each(lambda: made.extend(work()) if self.leads else None)
        contents = [_packed([said, _described(tree)]) for said, tree in made]
        lengths = torch.tensor([len(content) for content in contents] or [0] * self.size)
        with _peer_errors():
            dist.broadcast(lengths, 0)
        if not self.leads:
            said, described = json.loads(self._receive(0, int(lengths[self.rank])))
            return said, self._take(described, 0)
        for rank in range(1, self.size):
            self._send(contents[rank], rank)
            self._give(made[rank][1], rank)
        return made[0]

    def broadcast(self, tree: Tree) -> Tree:
        """Return the tensors of rank 0 in every process; the argument of other processes is ignored."""
        described = self.share(lambda: _described(tree))
        whole = {name: t.contiguous() for name, t in tree.items()} if self.leads else _blank(described)
        for t in whole.values():
            with _peer_errors():
                dist.broadcast(_bytes_of(t), 0)
        return whole

    def _give(self, tree: Tree, rank: int) -> None:
        for t in tree.values():
            if t.numel():
                with _peer_errors():
                    dist.send(_bytes_of(t.contiguous()), rank)

    def _take(self, described: list[Any], rank: int) -> Tree:
        tree = _blank(described)
        for t in tree.values():
            if t.numel():
                with _peer_errors():
                    dist.recv(_bytes_of(t), rank)
        return tree

    def largest(self, values: Tensor) -> Tensor:
        """Return the maximum of each value over all processes, in every process."""
        with _peer_errors():
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def total(self, values: Tensor) -> Tensor:
        """Return the sum of each integer over all processes, in rank 0."""
        assert values.dtype == torch.int64
        with _peer_errors():
            dist.reduce(values, 0, dist.ReduceOp.SUM)
        return values

    # ---------------------------------------------------------------- bytes

    def _numbers(self, own: int) -> list[int]:
        mine = torch.tensor([own])
        theirs = [torch.zeros_like(mine) for _ in range(self.size)]
        with _peer_errors():
            dist.all_gather(theirs, mine)
        return [int(t) for t in theirs]

    def _send(self, content: bytes, rank: int = 0) -> None:
        with _peer_errors():
            dist.send(_tensor(content), rank)

    def _receive(self, rank: int, length: int) -> bytes:
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
    if PARENT in os.environ:
        threading.Thread(target=_end_with, args=(int(os.environ[PARENT]),), daemon=True).start()
    with _peer_errors():
        store = _meet(f"file://{place.meeting}" if place.meeting else "env://", place.rank, place.size)
        # A restart by the launcher, or a second run of a program, may find old addresses in the same store.
        number = next(_JOINED)
        kept = PrefixStore(f"comingle/runs/{number}", _of_launcher(store))
        store = PrefixStore(f"comingle/{place.restarts}/{number}", store)
        backend = _BOTH if torch.cuda.is_available() and dist.is_nccl_available() else _GLOO
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=PROCESS_TIMEOUT)
    try:
        ranks = Ranks(place, kept)
        ranks.meet()
        yield ranks
    finally:
        dist.destroy_process_group()


@cache
def _meet(url: str, rank: int, size: int) -> Store:
    """Return the store of the rendezvous, which all runs of a program share.

    Without torchrun the first process serves the store, and must outlive a run while others join the next one.
    """
    return next(rendezvous(url, rank, size))[0]


def _of_launcher(store: Store) -> Store:
    """Return the store without the prefix that torchrun gives each attempt; its entries outlast attempts."""
    return _of_launcher(store.underlying_store) if isinstance(store, PrefixStore) else store


def _end_with(pipe: int) -> None:
    """End this process when its parent is killed, which closes the pipe."""
    os.read(pipe, 1)
    os._exit(LOST)


@contextmanager
def _peer_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        why = re.sub(r"^\[[^]]*\] ", "", str(error).strip() or type(error).__name__)
        first = re.split(r"[.] |\n", why)[0][:_SHOWN]
        raise RankLostError(f"another process of this run has ended ({first})") from None


def _error(rank: int, kind: str, text: str) -> ComingleError:
    """Return the error of another process under its own type."""
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, ComingleError):
        return known(text)
    return errors.RunError(f"process {rank}: {kind}: {text}")


def _described(tree: Tree) -> list[Any]:
    """Return name, dtype, shape and device type of each tensor, for JSON."""
    return [[name, str(t.dtype).removeprefix("torch."), list(t.shape), t.device.type] for name, t in tree.items()]


def _blank(described: list[Any]) -> Tree:
    """Return empty tensors to receive into; device types are kept, device numbers are not."""
    return {
        name: torch.empty(shape, dtype=getattr(torch, kind), device=place) for name, kind, shape, place in described
    }


def _bytes_of(t: Tensor) -> Tensor:
    """Return a view of the memory as bytes, which every backend supports."""
    return t.detach().view(-1).view(torch.uint8)


def _packed(content: object) -> bytes:
    return json.dumps(content).encode()


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
