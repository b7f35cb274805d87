"""Place of this process among several, set by torchrun or by ``comingle run --processes``, and its end by SIGTERM.

Does not import torch, so that it can be read first.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from comingle.utils.errors import RunError

MEETING, PARENT = "COMINGLE_MEETING", "COMINGLE_PARENT"
"""Environment variables of ``--processes``: a file for the rendezvous, and a pipe that closes with the parent."""

LOST = 3
"""Exit code of a process that ends because another one has ended."""

_NEEDED = ("RANK", "WORLD_SIZE")
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Place of a process among several.

    Attributes:
        rank: Rank of the process.
        size: Number of processes.
        local_rank: Rank on this machine.
        local_size: Number of processes on this machine.
        restarts: Number of restarts by the launcher.
        rendezvous_file: File in which processes find each other; empty for the address that torchrun sets.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    restarts: int = 0
    rendezvous_file: str = ""

    @property
    def is_first_process(self) -> bool:
        """True in the process that has the server and writes the logs."""
        return self.rank == 0


def find_place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Return the rank of this process and the number of processes, as a launcher has set them; None if it is alone.

    Raises:
        RunError: The launcher has set impossible values.
    """
    rendezvous_file = environment.get(MEETING, "")  # empty with torchrun, which sets an address instead
    needed = _NEEDED if rendezvous_file else (*_NEEDED, *_ADDRESS)
    has_launcher = all(key in environment for key in needed)
    if not has_launcher:
        return None
    try:
        rank = int(environment["RANK"])
        size = int(environment["WORLD_SIZE"])
        local_rank = int(environment.get("LOCAL_RANK", rank))
        local_size = int(environment.get("LOCAL_WORLD_SIZE", size))
        restarts = int(environment.get("TORCHELASTIC_RESTART_COUNT", 0))
    except ValueError as error:
        raise RunError(f"launcher: RANK, WORLD_SIZE and the local ranks must be whole numbers; {error}") from None
    if not 0 <= rank < size:
        raise RunError(f"launcher: got RANK={rank} and WORLD_SIZE={size}; allowed: RANK from 0 to WORLD_SIZE - 1")
    if size == 1:
        return None
    return Place(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        restarts=restarts,
        rendezvous_file=rendezvous_file,
    )


def require_single_process(verb: str) -> None:
    """Raise an error if a launcher has started several processes, which would all write the same folder.

    Args:
        verb: The function that needs a single process, for the message.

    Raises:
        RunError: A launcher has started several processes.
    """
    place = find_place()
    if place is not None:
        raise RunError(
            f"{verb}: runs in a single process, but a launcher has started {place.size}; only comingle.run supports "
            f"several; call {verb} from a separate program, without torchrun"
        )


def should_print_errors(environment: Mapping[str, str] = os.environ, *, interrupted: bool = False) -> bool:
    """Return whether this process prints errors; of several processes with the same error only the first one does.

    Args:
        environment: Environment variables.
        interrupted: Whether the error is an interruption, which a parent process reports itself.
    """
    has_parent = PARENT in environment  # started by --processes
    if interrupted and has_parent:
        return False
    has_launcher = all(key in environment for key in _NEEDED)  # started by torchrun, or by --processes
    return not has_launcher or environment["RANK"] == "0"


_sigterm_events: list[threading.Event] = []
"""Events of the blocks of :func:`interrupt_on_sigterm` that are entered, outermost first."""


@contextmanager
def interrupt_on_sigterm() -> Iterator[threading.Event]:
    """Treat SIGTERM as KeyboardInterrupt within the block, so that cleanup code ends child processes.

    Yields:
        An event that is set by SIGTERM, also while an inner block is entered. A loop in the block should check it, as
        Python drops exceptions in destructors and callbacks.
    """
    received = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield received  # Python allows signal handlers only in the main thread.
        return

    def interrupt(*_: object) -> None:
        for event in _sigterm_events:
            event.set()
        raise KeyboardInterrupt

    _sigterm_events.append(received)
    earlier_handler = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, earlier_handler)
        _sigterm_events.remove(received)
