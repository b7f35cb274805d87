"""Several runs at a time, each group of them in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any, TypeVar

from comingle.utils.errors import ComingleError, RunError

Group = TypeVar("Group")
Found = TypeVar("Found")


def in_processes(
    groups: Sequence[Group], work: Callable[[Group], Iterable[Found]], *, jobs: int, told: Callable[[Group], str] = str
) -> Iterator[Found]:
    """What ``work`` yields of every group, as it comes, ``jobs`` groups at a time; everything must pickle.

    Where there are GPUs each process has one of its own, as far as they suffice.

    A group that fails does not stop the others: its error is raised when they are done. Whoever stops here, as with
    Ctrl-C, stops the processes at once, and what they have written can be resumed; they end, too, when this process
    is killed.

    Raises:
        ComingleError: of the first group that failed; ``told`` names one whose process just ended.
    """
    context = multiprocessing.get_context("spawn")  # a fork would copy torch's threads in an unknown state
    left, failed = list(groups), []
    running: dict[Connection, tuple[BaseProcess, Group, int]] = {}
    try:
        while left or running:
            while left and len(running) < jobs:
                group = left.pop(0)
                place = min(set(range(jobs)) - {taken for *_, taken in running.values()})
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_work_group, args=(theirs, work, group, min(jobs, len(groups)), place))
                process.start()
                theirs.close()
                running[ours] = process, group, place
            ready = wait(list(running))
            for connection in [one for one in running if one in ready]:
                try:
                    found = connection.recv()
                except EOFError:
                    process, group, _ = running.pop(connection)
                    process.join()
                    failed += [RunError(_ended(told(group), process.exitcode))] if process.exitcode else []
                    continue
                if isinstance(found, Exception):
                    failed.append(found)
                else:
                    yield found
    finally:
        for process, *_ in running.values():
            process.terminate()
        for process, *_ in running.values():
            process.join()
    if failed:
        raise failed[0]


def _ended(group: str, code: int) -> str:
    how = f"was killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"ended with status {code}"
    return f"{group}: its process {how}; --resume goes on, and fewer --jobs need less memory"


def _work_group(
    connection: Connection, work: Callable[[Any], Iterable[Any]], group: Any, jobs: int, place: int
) -> None:
    """In a process of its own: send what comes, and what a user can do something about."""
    import torch

    from comingle.methods.user_files import load_files_of_command
    from comingle.processes.sharing import take_gpu

    Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; whoever started us stops us
    take_gpu(place)
    torch.set_num_threads(max(1, torch.get_num_threads() // jobs))
    try:
        load_files_of_command()
        for found in work(group):
            connection.send(found)
    except (ComingleError, OSError, MemoryError) as error:
        connection.send(error)


def _end_with_parent() -> None:
    """End this process as soon as whoever started it is gone, killed perhaps, and can no longer end it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
