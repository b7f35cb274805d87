"""Fixtures for tests of native code: compiled once for all processes and runs, with equal draws on one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from comingle.utils.files import cache_folder


@pytest.fixture(autouse=True)
def seeded_on_one_thread() -> Iterator[None]:
    """Equal draws in every run; one thread, fastest for tiny tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
    torch.set_num_threads(threads)


def compile_once(library: str, enable: Callable[[Path], bool]) -> Path:
    """Return the folder of native libraries in the user's cache, after ``enable`` has compiled one in it if need be."""
    cache = cache_folder() / "native"
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    with FileLock(cache / f"{library}.lock"):  # the second process finds what the first has compiled
        if not enable(cache):
            pytest.skip("no C++ compiler that makes the native code")
    return cache
