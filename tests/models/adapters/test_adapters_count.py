from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, GPT2Config

from comingle.config.settings import AdaptersSection
from comingle.models.injection import ExpertCounts, inject


def test_gpt2_124m_with_two_experts_trains_1_935_360_parameters() -> None:
    """What the paper's public code trains: attention, two experts per MLP, routers."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(GPT2Config())
    adapters = inject(
        model, AdaptersSection(rank=8), ExpertCounts(generalists=1, specialists=(1, 1, 1, 1)), routed=True
    )
    layout = adapters.layout
    counts = {role: int(layout.mask([role]).sum()) for role in sorted(layout.roles)}
    assert counts == {"attention": 442_368, "generalist": 737_280, "router": 18_432, "specialist": 737_280}
    assert layout.columns == 1_935_360
    assert adapters.mask().sum(1).tolist() == [1_935_360] * 4


def test_two_generalists_without_a_router_count_the_same_but_for_the_router() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(GPT2Config())
    adapters = inject(model, AdaptersSection(rank=8), ExpertCounts(generalists=2, specialists=(0,)), routed=False)
    assert adapters.layout.roles == {"attention", "generalist"}
    assert adapters.layout.columns == 1_935_360 - 18_432
