"""Native code that is compiled once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.native_code import compile_once

from comingle.models.kernels import convolutions


@pytest.fixture(scope="session", autouse=True)
def compiled_layers() -> Path:
    """Return the cache folder with the library in it."""
    return compile_once("convolutions", convolutions.enable)


@pytest.fixture
def layers(compiled_layers: Path, processor: str) -> None:
    """The native code for this machine or another one."""
    assert convolutions.enable(compiled_layers)
