"""Native code that is compiled once; equal draws in every run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.native_code import compile_once, seeded_on_one_thread

from comingle.models.kernels import cpu
from comingle.models.kernels import expert_mlp as mixtures

__all__ = ["seeded_on_one_thread"]  # around each of these tests


@pytest.fixture(scope="session")
def compiled_once() -> Path:
    """Return the cache folder with the libraries in it."""
    compile_once("cpu", cpu.enable)  # other tests compile the mixture meanwhile
    cache = compile_once("mixture", mixtures.enable)
    mixtures.disable()
    return cache


@pytest.fixture
def library(compiled_once: Path, processor: str) -> Iterator[None]:
    """The native code switched on, and off again."""
    assert mixtures.enable(compiled_once)
    assert cpu.enable(compiled_once)
    yield
    mixtures.disable()
