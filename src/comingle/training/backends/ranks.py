"""Several processes of one run, which do the same and tell each other what each has found: `torch.distributed`.

Numbers and words travel as JSON, tensors as their bytes; nothing that is received is executed. Tensors on GPUs go
through NCCL, all else through gloo.
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
import torch.distributed.nn  # read while there is a group, its functions' defaults would keep that and its threads
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from comingle.training.backends.launched import LOST, PARENT, Place
from comingle.utils import errors
from comingle.utils.errors import ComingleError, RankLostError
from comingle.utils.trees import Tree

T = TypeVar("T")

PROCESS_TIMEOUT = timedelta(hours=6)
"""So long one process waits for another that is still there; one that has ended is noticed at once."""

_SHOWN = 200
_JOINED = count()
_GLOO = "gloo"
_BOTH = "cpu:gloo,cuda:nccl"


class Ranks:
    """This process among several. Each method is called by all of them, in the same order."""

    def __init__(self, place: Place, kept: Store):
        self.place, self._kept = place, kept
        self.rank, self.size, self.leads = place.rank, place.size, place.leads

    def meet(self) -> None:
        """Return when everybody is here: who leaves while others still look for each other keeps them waiting."""
        self._numbers(0)

    def opened(self, folder: Path) -> None:
        """Remember, for as long as the launcher lives, that this run's folder has been opened."""
        if self.leads:
            self._kept.set(str(folder.absolute()), "opened")

    def has_opened(self, folder: Path) -> bool:
        """Whether the launcher's processes before these have, for this very run."""
        return self.share(lambda: self._kept.check([str(folder.absolute())]))

    # ---------------------------------------------------------------- doing the same

    def each(self, work: Callable[[], T]) -> T:
        """Do something in every process; its result here.

        Raises:
            ComingleError: what the first process that failed says, at the one that leads; the others end silently.
            RankLostError: a process has ended.
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
        """The same; every process's result at the one that leads, elsewhere one's own."""
        own = self.each(work)
        sent = _packed(own)
        lengths = self._numbers(len(sent))
        if not self.leads:
            self._send(sent)
            return [own]
        received = [json.loads(self._receive(rank, lengths[rank])) for rank in range(1, self.size)]
        return [own, *received]

    def share(self, work: Callable[[], T]) -> T:
        """Do something in the process that leads; its result everywhere."""
        own = self.each(lambda: work() if self.leads else None)
        content = _packed(own) if self.leads else b""
        length = self._numbers(len(content))[0]
        tensor = _tensor(content) if self.leads else torch.empty(length, dtype=torch.uint8)
        with _peer_errors():
            dist.broadcast(tensor, 0)
        return own if self.leads else json.loads(bytes(tensor.numpy()))  # type: ignore[return-value]

    def _agree(self, failure: Exception | None) -> None:
        """End here too what has failed anywhere."""
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
            raise failure  # a fault of ours, which needs its traceback
        if not self.leads:
            raise SystemExit(2)
        raise failure or _error(first, *json.loads(bytes(tensor.numpy())))

    # ---------------------------------------------------------------- tensors

    def collect(self, tree: Tree) -> list[Tree]:
        """Every process's tensors at the one that leads, in the order of the ranks; elsewhere nothing."""
        found = self.gather(lambda: _described(tree))
        if self.leads:
            return [tree, *(self._take(described, rank) for rank, described in enumerate(found[1:], 1))]
        self._give(tree, 0)
        return []

    def scatter(self, work: Callable[[], Sequence[tuple[object, Tree]]]) -> tuple[Any, Tree]:
        """The words and tensors that the process that leads has made for this one."""
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
        """The tensors of the process that leads, everywhere; what others call with is not looked at."""
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
        """The largest of each value over all processes, everywhere."""
        with _peer_errors():
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def total(self, values: Tensor) -> Tensor:
        """The sum of each value over all processes, at the one that leads; whole numbers, so in any order."""
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
    """The processes of a run, for as long as this is entered.

    Raises:
        RankLostError: some did not come.
    """
    if PARENT in os.environ:
        threading.Thread(target=_end_with, args=(int(os.environ[PARENT]),), daemon=True).start()
    with _peer_errors():
        store = _meet(f"file://{place.meeting}" if place.meeting else "env://", place.rank, place.size)
        # A launcher's second attempt, or a program's second run, may find the addresses of the first in the same store.
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
    """Where processes find each other, for all runs of a program.

    Without torchrun the first process is the server, which must not end with a run while others come for the next.
    """
    return next(rendezvous(url, rank, size))[0]


def _of_launcher(store: Store) -> Store:
    """Where words outlast an attempt; torchrun gives each attempt a prefix of its own."""
    return _of_launcher(store.underlying_store) if isinstance(store, PrefixStore) else store


def _end_with(pipe: int) -> None:
    """Nobody else would end what a parent has started that was killed."""
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
    """What another process has said, as this one says it."""
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, ComingleError):
        return known(text)
    return errors.RunError(f"process {rank}: {kind}: {text}")


def _described(tree: Tree) -> list[Any]:
    """Name, dtype, shape and kind of device of each tensor, as JSON has them."""
    return [[name, str(t.dtype).removeprefix("torch."), list(t.shape), t.device.type] for name, t in tree.items()]


def _blank(described: list[Any]) -> Tree:
    """Tensors to be filled: one process's GPU is another's."""
    return {
        name: torch.empty(shape, dtype=getattr(torch, kind), device=place) for name, kind, shape, place in described
    }


def _bytes_of(t: Tensor) -> Tensor:
    """The same memory; every backend takes bytes."""
    return t.detach().view(-1).view(torch.uint8)


def _packed(content: object) -> bytes:
    return json.dumps(content).encode()


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
