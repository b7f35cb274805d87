"""Whether this process is one of several of a run, and which: as torchrun or `comingle run --processes` started it.

Read before torch is imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from comingle.utils.errors import RunError

MEETING, PARENT = "COMINGLE_MEETING", "COMINGLE_PARENT"
"""What `--processes` tells those that it starts: by which file they find each other, and a pipe that ends with it."""

LOST = 3
"""Exit code of a process that ended because another one had: whoever started both knows which."""

_NEEDED = ("RANK", "WORLD_SIZE")
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Process ``rank`` of ``size``, ``local_rank`` of ``local_size`` on this machine, started ``restarts`` times anew.

    ``meeting`` is the file by which they find each other; without one they do by the address that torchrun gives.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    restarts: int = 0
    meeting: str = ""

    @property
    def leads(self) -> bool:
        """Whether it has the server, and speaks for all."""
        return self.rank == 0


def find_place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Where this process stands among several; None where it is alone.

    Raises:
        RunError: what a launcher has said makes no sense.
    """
    meeting = environment.get(MEETING, "")
    if any(key not in environment for key in (*_NEEDED, *(() if meeting else _ADDRESS))):
        return None
    try:
        rank, size = (int(environment[key]) for key in _NEEDED)
        local_rank = int(environment.get("LOCAL_RANK", rank))
        local_size = int(environment.get("LOCAL_WORLD_SIZE", size))
        restarts = int(environment.get("TORCHELASTIC_RESTART_COUNT", 0))
    except ValueError as error:
        raise RunError(f"launcher: RANK, WORLD_SIZE and their kin are whole numbers; {error}") from None
    if not 0 <= rank < size:
        raise RunError(f"launcher: RANK is {rank} of WORLD_SIZE {size}; allowed: from 0, below it")
    if size == 1:
        return None
    return Place(rank=rank, size=size, local_rank=local_rank, local_size=local_size, restarts=restarts, meeting=meeting)


def require_alone(verb: str) -> None:
    """For what each of several processes would do by itself, all of it, into the same folder.

    Raises:
        RunError: a launcher has started several.
    """
    if (place := find_place()) is not None:
        raise RunError(
            f"{verb}: runs in one process, and this is one of {place.size} that a launcher has started; several are "
            "for comingle.run: call this in a program of its own, without torchrun"
        )


def speaks(environment: Mapping[str, str] = os.environ, *, interrupted: bool = False) -> bool:
    """Whether mistakes are told by this process: of several that find the same, one speaks.

    That they were ``interrupted`` is told by who started them.
    """
    if interrupted and PARENT in environment:
        return False
    return environment.get("RANK", "0") == "0" or any(key not in environment for key in _NEEDED)
