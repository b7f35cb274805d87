"""Measures what a local round really holds, in a process of its own: prints bytes over the built federation.

    MALLOC_MMAP_THRESHOLD_=65536 python tests/cost/memory_driver.py RECIPE

With that threshold glibc gives every large block back at once, so the peak of resident memory is that of live tensors.
With ``keep`` as a second argument the allocator is set as a run sets it.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from dataclasses import replace
from pathlib import Path

import torch

from comingle.config import load_recipe
from comingle.data.populations import as_users
from comingle.data.text.streams import UserData
from comingle.models.hardware import keep_buffers
from comingle.models.loading import load_base
from comingle.runs.session import build
from comingle.training.client import train
from comingle.training.kinds.base import RunData
from comingle.training.kinds.text import KIND as TEXT


def resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def main() -> None:
    recipe = load_recipe(sys.argv[1])
    torch.set_num_threads(1)
    if "keep" in sys.argv[2:]:
        keep_buffers()
    base = load_base(recipe.base, dtype=recipe.runtime.dtype, device="cpu", quantise=recipe.quantise)
    stream = torch.randint(200, (16 * recipe.training.context,), dtype=torch.int32)
    users = [UserData(name=name, train=stream, valid=stream, test=stream) for name in recipe.data.users or {}]
    clients = build(recipe, RunData(kind=TEXT, base=base, users=as_users(users))).clients
    # One sequence first: the buffers of the matrix library belong to the process, not to the pass.
    steps = replace(clients.steps)
    steps.pass_size = replace(clients.pass_size, sequences=1)
    window = torch.randint(200, (1, 1, recipe.training.context + 1))
    steps.gradient(clients.cohort([0], 0), window, clients.phases[0])
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    for number in range(recipe.training.rounds):
        train(clients, range(len(clients.trainers)), number)
    print(resident("VmHWM") - before)


if __name__ == "__main__":
    main()
