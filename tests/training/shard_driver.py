"""Runs recipes in several processes each, as torchrun would, without importing everything anew for each of them.

    python shard_driver.py CASES.json

CASES is a list of mappings: ``recipe`` and ``out``, how many ``processes``, ``sets`` as the command line has them
(those of one process alone in ``sets_of``), whether to ``resume``; ``kill``, a process and the round in which it kills
itself (SIGKILL) after its first local step; ``fail``, a process and the checkpoint in which its disk is full. Processes
are forked after all imports. Writes the exit codes of each case to ``CASES.json.codes``.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers.models.llama.modeling_llama  # noqa: F401 (imported at first use otherwise)

from comingle.cli.training import train_here
from comingle.training.backends import distributed, local
from comingle.training.backends.launched import Place
from comingle.utils.errors import ComingleError


def kill_in(number: int) -> None:
    """Have this process die in a round (from 1), after a local step."""
    original = local.train

    def train(clients: Any, members: Any, round_number: int, tick: Any = lambda: None) -> Any:
        def die() -> None:
            tick()
            os.kill(os.getpid(), signal.SIGKILL)

        return original(clients, members, round_number, die if round_number + 1 == number else tick)

    local.train = train


def fill_disk_in(name: str) -> None:
    """Have the disk take no more of this process's tensors in a checkpoint of this name."""
    original = distributed.write_tensors

    def write(path: Path, tensors: Any) -> None:
        if name in path.parent.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        original(path, tensors)

    distributed.write_tensors = write


def work(case: dict[str, Any], rank: int, meeting: str) -> int:
    size = case["processes"]
    place = Place(
        rank=rank,
        size=size,
        local_rank=rank,
        local_size=size,
        restarts=case.get("restarts", 0),
        rendezvous_file=meeting,
    )
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(size)
    torch.set_num_threads(1)
    if (killed := case.get("kill")) and killed[0] == rank:
        kill_in(killed[1])
    if (failing := case.get("fail")) and failing[0] == rank:
        fill_disk_in(failing[1])
    sets = case.get("sets_of", {}).get(str(rank), case.get("sets"))
    options = {"resume": case.get("resume", False), "force": False, "quiet": True}
    try:
        train_here(place if size > 1 else None, Path(case["recipe"]), sets, None, Path(case["out"]), **options)
    except ComingleError as error:
        print(f"{rank}: {error}", file=sys.stderr, flush=True)
        return 2
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def play(case: dict[str, Any]) -> list[int]:
    children = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(case["processes"]):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    code = work(case, rank, f"{folder}/meeting")
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            children.append(child)
        return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


if __name__ == "__main__":
    cases = json.loads(Path(sys.argv[1]).read_text())
    Path(f"{sys.argv[1]}.codes").write_text(json.dumps([play(case) for case in cases]))
