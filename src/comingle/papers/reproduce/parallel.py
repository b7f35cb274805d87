"""Several runs at a time, each in a process of its own: for bases so small that one run cannot use two cores."""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

from comingle.engines.client import Clients
from comingle.engines.events import Observer
from comingle.models.hardware import take_gpu
from comingle.papers.reproduce.plan import Cell
from comingle.papers.reproduce.runner import Outcome, run_cells, title_of, unique
from comingle.progress import reporting
from comingle.terminal import errors

_POLL_SECONDS = 0.5
_outcomes: Any = None  # in a worker, the queue to its parent


def run_parallel(
    cells: Sequence[Cell], out: Path, *, jobs: int, force: bool = False, quiet: bool = True
) -> Iterator[Outcome]:
    """Like :func:`comingle.papers.reproduce.runner.run_cells`, ``jobs`` runs at a time, in the order in which they end.

    Cells of one column and seed stay together, since they share their text. Unless ``quiet``, and where stderr is no
    terminal, each tells of its rounds. Where there are GPUs each job has one of its own, as far as they suffice.

    Raises:
        ComingleError: whatever a worker raises; the others are stopped after their run.
    """
    context = multiprocessing.get_context("spawn")  # a fork would copy torch's threads in an unknown state
    results = context.Queue()
    groups = [list(group) for _, group in groupby(unique(cells), key=lambda cell: (cell.column, cell.seed))]
    begun = results, context.Value("i", 0)
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=begun) as pool:
        futures = [pool.submit(_work, group, out, force, quiet) for group in groups]
        try:
            yield from _collect(futures, results)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _collect(futures: Sequence[Future[None]], results: Any) -> Iterator[Outcome]:
    """Outcomes until every group is done; what a worker raised is raised here."""
    ended = False
    while True:
        try:
            yield results.get(timeout=0 if ended else _POLL_SECONDS)
        except queue.Empty:
            if ended:
                break
            ended = all(future.done() for future in futures) or any(_failed(future) for future in futures)
    for future in futures:
        if future.done() and not future.cancelled():
            future.result()


def _failed(future: Future[None]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is not None


def _begin(results: Any, begun: Any) -> None:
    global _outcomes
    _outcomes = results
    with begun.get_lock():
        number, begun.value = begun.value, begun.value + 1
    take_gpu(number)


def _work(cells: Sequence[Cell], out: Path, force: bool, quiet: bool) -> None:
    try:
        with reporting(quiet=quiet or errors.is_terminal) as reporter:  # several bars would write over each other

            def observers(cell: Cell, clients: Clients) -> list[Observer]:
                return [reporter.watch(clients, title_of(cell))]

            for outcome in run_cells(cells, out, force=force, observers=observers, waiting=reporter.waiting):
                _outcomes.put(outcome)
    except KeyboardInterrupt:  # Ctrl-C reaches every process; the parent says so once
        return
