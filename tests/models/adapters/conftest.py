"""Makes ``naive`` importable in every import mode; equal draws in every run; one thread, fastest for tiny tensors;
and native code that is compiled once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.native_code import compile_once, seeded_on_one_thread

from comingle.models.kernels import expert_mlp

if (here := str(Path(__file__).parent)) not in sys.path:
    sys.path.insert(0, here)


__all__ = ["seeded_on_one_thread"]  # around each of these tests


@pytest.fixture(scope="session")
def compiled_once() -> Path:
    """Return the cache folder with the library in it."""
    expert_mlp._loaded = None
    cache = compile_once("mixture", expert_mlp.enable)
    expert_mlp.disable()
    return cache


@pytest.fixture
def library(compiled_once: Path, processor: str) -> Iterator[Path]:
    """The native code switched on, and off again."""
    assert expert_mlp.enable(compiled_once)
    yield compiled_once
    expert_mlp.disable()
