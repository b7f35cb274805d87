"""Native code that is compiled once; equal draws in every run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from comingle.adapters import native as mixtures
from comingle.cpu import native


@pytest.fixture(autouse=True)
def seeded_on_one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the libraries in it; processes of pytest-xdist share one."""
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    cache = tmp_path_factory.mktemp("native") if alone else tmp_path_factory.getbasetemp().parent / "native"
    with FileLock(f"{cache}.lock"):  # who comes second finds what the first has compiled
        if not (mixtures.enable(cache) and native.enable(cache)):
            pytest.skip("no C++ compiler that makes the native code")
    mixtures.disable()
    return cache


@pytest.fixture
def library(compiled_once: Path) -> Iterator[None]:
    """The native code switched on, and off again."""
    assert mixtures.enable(compiled_once)
    assert native.enable(compiled_once)
    yield
    mixtures.disable()
