"""Makes ``naive`` importable in every import mode; equal draws in every run; one thread, fastest for tiny tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if (here := str(Path(__file__).parent)) not in sys.path:
    sys.path.insert(0, here)


@pytest.fixture(autouse=True)
def seeded_on_one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
    torch.set_num_threads(threads)
