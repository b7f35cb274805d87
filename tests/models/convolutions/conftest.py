"""Native code that is compiled once."""

from __future__ import annotations

from pathlib import Path

import pytest

from comingle.models.kernels import convolutions


@pytest.fixture(scope="session", autouse=True)
def compiled_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the library in it."""
    cache = tmp_path_factory.mktemp("layers")
    if not convolutions.enable(cache):
        pytest.skip("no C++ compiler that makes the native code")
    return cache
