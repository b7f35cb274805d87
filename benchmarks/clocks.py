"""Clocks for benchmarks: wall time, or on a busy machine the processor time of one thread."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import comingle  # noqa: F401 (before torch, which reads GOMP_SPINCOUNT)

# isort: split
import torch


@dataclass(frozen=True, kw_only=True)
class Clock:
    """A clock and the number of threads that it is read with."""

    name: str
    threads: int
    now: Callable[[], float]

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of a line of results that describe the clock."""
        return {"threads": self.threads, "clock": self.name}


def add_clock(parser: argparse.ArgumentParser) -> None:
    """Add the options ``--threads`` and ``--cpu-time``."""
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="time the processor, not the clock; with --threads 1")


def select_clock(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Clock:
    """Return the clock that the options select, and set the number of threads of the process."""
    if args.cpu_time and (args.threads != 1 or torch.cuda.is_available()):
        parser.error("--cpu-time needs --threads 1 and no GPU: waiting threads would count as work")
    torch.set_num_threads(args.threads)
    if args.cpu_time:
        return Clock(name="processor", threads=1, now=time.process_time)
    return Clock(name="wall", threads=args.threads, now=time.perf_counter)
