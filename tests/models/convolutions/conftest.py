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
