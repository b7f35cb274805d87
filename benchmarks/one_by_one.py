"""Baseline: the usual implementation in float32, with users trained one after another and a full MLP per expert.

Plain PyTorch on transformers' GPT-2: a LoRA beside every linear, ``sum_j p_j MLP_j(x)`` with the base products computed
once per expert, all logits, ``torch.optim.AdamW``. Users share the base weights, so memory is not compared here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import comingle  # noqa: F401 (before torch, which reads GOMP_SPINCOUNT)

# isort: split
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comingle.models.loading import load_base
from comingle.models.model import share_weights

RANK, SCALE = 8, 16 / math.sqrt(8)


class Lora(nn.Module):
    """LoRA beside a frozen linear of GPT-2."""

    def __init__(self, linear: Any):
        super().__init__()
        self.linear = linear
        d_in, d_out = linear.weight.shape  # Conv1D
        self.a = nn.Linear(d_in, RANK, bias=False)
        self.b = nn.Linear(RANK, d_out, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + SCALE * self.b(self.a(x))


class Expert(nn.Module):
    """MLP of GPT-2 with a LoRA beside each linear."""

    def __init__(self, mlp: Any):
        super().__init__()
        self.fc, self.proj, self.act = Lora(mlp.c_fc), Lora(mlp.c_proj), mlp.act

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.act(self.fc(x)))


class Mixture(nn.Module):
    """Softmax-weighted sum of the outputs of all experts."""

    def __init__(self, mlp: Any, experts: int, width: int):
        super().__init__()
        self.experts = nn.ModuleList(Expert(mlp) for _ in range(experts))
        self.router = nn.Linear(width, experts, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        return sum(gates[..., j : j + 1] * expert(x) for j, expert in enumerate(self.experts))  # type: ignore[return-value]


def one_by_one(
    name: str,
    *,
    users: int,
    batch: int,
    context: int,
    vocab: int,
    experts: int,
    dtype: str = "float32",
    device: str = "cpu",
) -> Callable[[], None]:
    """Return a function that takes one local step of every user, one user after another.

    Args:
        name: The base model.
        users: Number of users.
        batch: Sequences per user and step.
        context: Tokens per sequence.
        vocab: Upper bound of the random token ids.
        experts: Experts per mixture.
        dtype: Type of the base and of the adapters.
        device: Device to train on.
    """
    loaded = load_base(name, dtype=dtype, device=device, attention="sdpa")
    base = loaded.model
    networks, optimizers = [], []
    for _ in range(users):
        network: Any = share_weights(base)
        for block in network.transformer.h:
            block.attn.c_attn, block.attn.c_proj = Lora(block.attn.c_attn), Lora(block.attn.c_proj)
            block.mlp = Mixture(block.mlp, experts, base.config.hidden_size)
        nn.Module.to(network, loaded.device, loaded.dtype)
        trained = [p for p in network.parameters() if p.requires_grad]
        networks.append(network)
        optimizers.append(torch.optim.AdamW(trained, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01))
    tokens = torch.randint(vocab, (users, batch, context + 1), device=loaded.device)

    def step() -> None:
        for network, optimizer, user_tokens in zip(networks, optimizers, tokens, strict=True):
            logits = network(user_tokens[:, :-1]).logits
            loss = F.cross_entropy(logits.flatten(0, 1), user_tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return step
