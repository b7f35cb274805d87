"""Every test runs on a GPU, marked `gpu`, and where there is none on a pretended one (`pretend.py`), marked `slow`.

``COMINGLE_TEST_DEVICE=cpu pytest -m gpu tests/gpu`` runs the former on the CPU, to see what is wrong with themselves.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path[:0] = [
    str(Path(__file__).parent),
    *(str(Path(__file__).parents[1] / folder) for folder in ("golden", "models/adapters")),
]
from pretend import pretending  # noqa: E402

WHERE = os.environ.get("COMINGLE_TEST_DEVICE", "cuda")


@pytest.fixture(params=[pytest.param(WHERE, marks=pytest.mark.gpu), pytest.param("pretended", marks=pytest.mark.slow)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """What a recipe calls the device."""
    there = torch.cuda.is_available()
    if request.param == "pretended":
        if there:
            pytest.skip("a real GPU is here")
        with pretending():
            yield "cuda"
        return
    if request.param != "cpu" and not there:
        pytest.skip("no CUDA GPU here")
    # Convolutions in TF32 are the default: ten bits of mantissa are no comparison with float32.
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    yield request.param
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture
def rounding(request: pytest.FixtureRequest) -> float:
    """By how much results may differ from the CPU's, of what training changes: a pretended GPU has its
    kernels, in other layouts of memory."""
    return 1e-4 if request.node.callspec.params["device"] in ("pretended", "cpu") else 1e-2
