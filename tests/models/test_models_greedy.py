"""Prompts of any length in one batch: what is said after one is what is said after it alone."""

from __future__ import annotations

import pytest
import torch

from comingle.models.generation import continue_greedily
from comingle.models.loading import load_base
from comingle.models.scoring import PAD

LENGTHS = (3, 40, 30, 25, 3, 39)


@pytest.mark.parametrize("limit", [4, 12, 37, 60])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.sampled(1)
def test_others_prompts_change_nothing(kind: str, limit: int) -> None:
    network = load_base(f"random:{kind}?layers=2&dim=32&ctx=40", dtype="float64", device="cpu").model
    drawn = torch.randint(3, 200, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(0))
    prompts = torch.stack([row.where(torch.arange(40) >= 40 - n, PAD) for row, n in zip(drawn, LENGTHS, strict=True)])
    together = continue_greedily(network, prompts, limit)
    for row, length in zip(range(len(LENGTHS)), LENGTHS, strict=True):
        alone = continue_greedily(network, prompts[row : row + 1, -length:], limit)[0]
        room = max(1, min(limit, 40 - length))  # no base knows places beyond its last
        assert len(alone) == room
        assert together[row, :room].tolist() == alone.tolist()
        assert (together[row, room:] == PAD).all()
