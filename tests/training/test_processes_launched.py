"""How a process finds out that it is one of several, and whose users it has."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comingle.config import parse_recipe
from comingle.runs.distributed import _check_alike, divide_users, select_gpu
from comingle.training.backends.distributed import Sharded
from comingle.training.backends.launched import Place, find_place, should_print_errors
from comingle.utils.errors import RecipeError, RunError

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_a_process_among_several_knows_its_place() -> None:
    place = find_place(TORCHRUN | ADDRESS | {"TORCHELASTIC_RESTART_COUNT": "2"})
    assert place == Place(rank=1, size=4, local_rank=1, local_size=2, restarts=2)
    assert not place.is_first_process


@pytest.mark.parametrize("environment", [{}, TORCHRUN, TORCHRUN | ADDRESS | {"RANK": "0", "WORLD_SIZE": "1"}])
def test_others_are_alone(environment: dict[str, str]) -> None:
    assert find_place(environment) is None


@pytest.mark.parametrize("wrong", [{"RANK": "4"}, {"RANK": "one"}, {"WORLD_SIZE": "many"}], ids=str)
def test_what_makes_no_sense_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(RunError, match=r"^launcher: "):
        find_place(TORCHRUN | ADDRESS | wrong)


def test_one_of_them_speaks() -> None:
    assert should_print_errors({})
    assert should_print_errors(TORCHRUN | {"RANK": "0"})
    assert not should_print_errors(TORCHRUN)


@pytest.mark.parametrize(
    ("users", "processes", "at_once", "sizes"),
    [(5, 2, 1, [2, 3]), (4, 4, 2, [1, 1, 1, 1]), (8, 2, 3, [3, 5]), (7, 3, 2, [2, 2, 3]), (6, 1, 4, [6])],
)
def test_cohorts_stay_whole_where_there_are_enough(users: int, processes: int, at_once: int, sizes: list[int]) -> None:
    found = divide_users(users, processes, at_once)
    assert [len(span) for span in found] == sizes
    assert found[0].start == 0
    assert found[-1].stop == users
    assert all(before.stop == after.start for before, after in pairwise(found))


def test_more_processes_than_users_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"^processes: got 4 for 3 users; allowed: 1 to 3"):
        divide_users(3, 4, 1)


@pytest.mark.parametrize(
    ("device", "gpus", "message"),
    [("auto", 1, "2 processes on a machine with 1 GPUs"), ("cuda:1", 4, "got 'cuda:1' for 2 processes")],
)
def test_each_process_needs_a_gpu_of_its_own(
    device: str, gpus: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    recipe = parse_recipe({"data": {"users": {"ann": "x.txt"}}, "runtime": {"device": device}})
    with pytest.raises(RecipeError, match=message):
        select_gpu(recipe, Place(rank=1, size=2, local_rank=1, local_size=2))


def test_each_process_takes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    place = Place(rank=3, size=4, local_rank=1, local_size=2)
    for device in ("auto", "cpu"):
        select_gpu(parse_recipe({"data": {"users": {"ann": "x.txt"}}, "runtime": {"device": device}}), place)
    assert taken == [1]


def test_a_gpu_beside_none_is_refused() -> None:
    """Every process says what it computes on; the first one tells of the first that differs."""

    def federation(*others: str) -> Sharded:
        made: Any = object.__new__(Sharded)
        made.clients = SimpleNamespace(model=SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32))
        made.ranks = SimpleNamespace(gather=lambda own: [own(), *others], run_in_first=lambda work: work())
        return made

    told = "runtime: process 0 .*cpu in float32, process 2 cuda in float32; set runtime.device and runtime.dtype"
    with pytest.raises(RecipeError, match=told):
        _check_alike(federation("cpu in float32", "cuda in float32"))
    _check_alike(federation("cpu in float32"))


LEAVES = """
import os, sys
from comingle.training.backends.launched import Place
from comingle.training.backends.ranks import joined
with joined(Place(rank=int(sys.argv[1]), size=2, local_rank=0, local_size=1, rendezvous_file=sys.argv[2])) as ranks:
    import torch._dynamo
    ranks.run_in_first(lambda: 1)
    within = len(os.listdir("/proc/self/task"))
print(within, len(os.listdir("/proc/self/task")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
@pytest.mark.slow
def test_no_thread_is_left_that_a_process_could_die_of_as_it_ends(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", LEAVES, str(rank), str(tmp_path / "meeting")],
            stdout=subprocess.PIPE,
            env=environment,
        )
        for rank in range(2)
    ]
    for child in children:
        within, after = map(int, child.communicate(timeout=120)[0].split())
        assert within > after == 1
