"""Runs beside each other (``compare --jobs``, ``reproduce --jobs``): each process has a GPU of its own."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comingle.runs import compare
from comingle.runs.compare import in_processes


def twice(group: int) -> Iterator[int]:
    yield 2 * group


class Inline:
    """A process that has done its work as soon as it is started; it notes which place it was given."""

    places: list[int]
    exitcode = 0

    def __init__(self, target: Any, args: tuple[Any, ...]):
        self.target, self.args = target, args

    def start(self) -> None:
        connection, work, group, _, place = self.args
        self.places.append(place)
        for found in work(group):
            connection.send(found)

    def join(self) -> None:
        """It is over."""


def test_a_place_is_given_to_one_process_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    Inline.places = []
    context = SimpleNamespace(Process=Inline, Pipe=multiprocessing.Pipe)
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: context)
    found = list(in_processes([1, 2, 3, 4, 5], twice, jobs=3))
    assert sorted(found) == [2, 4, 6, 8, 10]
    assert Inline.places[:3] == [0, 1, 2]
    assert set(Inline.places) == {0, 1, 2}


@pytest.mark.parametrize(("gpus", "expected"), [(4, [0, 1, 2]), (2, [0, 1, 0]), (1, [0, 0, 0]), (0, [])])
def test_each_process_computes_on_the_gpu_of_its_place(
    gpus: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    ours, theirs = multiprocessing.Pipe(duplex=False)
    for place in range(3):
        compare._work_group(theirs, twice, place, 3, place)
    assert taken == expected
    assert [ours.recv() for _ in range(3)] == [0, 2, 4]


WITHOUT_END = """
import os, sys, time
from comingle.runs.compare import in_processes

def work(group):
    yield os.getpid()
    time.sleep(600)

if __name__ == "__main__":
    for found in in_processes([1, 2], work, jobs=2):
        print(found, flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.slow
def test_the_processes_of_a_killed_one_end(how: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "without_end.py"
    script.write_text(WITHOUT_END)
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    children = [int(parent.stdout.readline()) for _ in range(2)]
    parent.send_signal(how)
    parent.wait()
    parent.stdout.close()
    last = time.monotonic() + 60
    while any(_runs(child) for child in children):
        assert time.monotonic() < last, "they go on"
        time.sleep(0.1)


def _runs(process: int) -> bool:
    """Whether it is there, and not just waiting to be collected."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
