"""Fixtures for tests of native code: compiled once for all processes of a run, with equal draws on one thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock


@pytest.fixture(autouse=True)
def seeded_on_one_thread() -> Iterator[None]:
    """Equal draws in every run; one thread, fastest for tiny tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
    torch.set_num_threads(threads)


def compile_once(factory: pytest.TempPathFactory, name: str, library: str, enable: Callable[[Path], bool]) -> Path:
    """A cache folder of this name with a library that ``enable`` compiles; processes of pytest-xdist share it."""
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    cache = (factory.getbasetemp() if alone else factory.getbasetemp().parent) / name
    cache.mkdir(mode=0o700, exist_ok=True)
    with FileLock(f"{cache}-{library}.lock"):  # the second process finds what the first has compiled
        if not enable(cache):
            pytest.skip("no C++ compiler that makes the native code")
    return cache
