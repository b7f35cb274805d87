"""What the adapters must equal: one user, one expert, one token at a time, with every ``W + s B A`` written out.

Nothing of comingle's adapters, routers or loss is used here. A user's model is a copy of the plain base whose attention
linears have a materialised weight and whose MLPs are Python loops over copies of the original MLP.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode


class _Double(TorchFunctionMode):
    """Runs what a model asks to be computed in float32 in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def swap(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(swap, args), **{k: swap(v) for k, v in (kwargs or {}).items()})


@contextmanager
def honest_double() -> Iterator[None]:
    """Norms, softmaxes and rotations of transformers cast to float32; a comparison to 1e-9 needs that they do not."""
    with _Double():
        yield


@dataclass(frozen=True)
class Family:
    """Where a family keeps its layers, and in them its MLP and the linears of the MLP (by our keys)."""

    layers: str
    linears: dict[str, str]
    mlp: str = "mlp"


_LLAMA = Family("model.layers", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"})

FAMILIES = {
    "gpt2": Family("transformer.h", {"up": "c_fc", "down": "c_proj"}),
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma2": _LLAMA,
    "gemma3": _LLAMA,
    "mistral": _LLAMA,
    "phi": Family("model.layers", {"up": "fc1", "down": "fc2"}),
    "gpt_neox": Family("gpt_neox.layers", {"up": "dense_h_to_4h", "down": "dense_4h_to_h"}),
    "opt": Family("model.decoder.layers", {"up": "fc1", "down": "fc2"}, mlp=""),
}


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How a user's experts are mixed: LoRA scale, top-k, what is mixed, which load-balancing term."""

    scale: float
    top_k: int = 2
    mix: str = "output"
    balance: str = "generalist"


class Materialised(nn.Module):
    """The original linear, called with the weight ``W + s B A``."""

    def __init__(self, linear: nn.Module, a: Tensor, b: Tensor, scale: float):
        super().__init__()
        self.linear, self.a, self.b, self.scale = linear, a, b, scale

    def forward(self, x: Tensor) -> Tensor:
        delta = self.scale * torch.einsum("ro,ri->oi", self.b, self.a)
        turned = delta if isinstance(self.linear, nn.Linear) else delta.T  # Conv1D keeps (d_in, d_out)
        return functional_call(self.linear, {"weight": self.linear.weight + turned}, (x,))


def top_k_softmax(logits: Tensor, top_k: int) -> list[Tensor]:
    """Softmax over the ``top_k`` largest of one token's logits, zero elsewhere."""
    kept = sorted(range(len(logits)), key=lambda j: -logits[j].item())[:top_k]
    total = sum(torch.exp(logits[j]) for j in kept)
    return [torch.exp(logits[j]) / total if j in kept else logits.new_zeros(()) for j in range(len(logits))]


def penalty(logits: Tensor, top_k: int, balance: str) -> Tensor:
    """One user's load-balancing term by loops over tokens ``(tokens, experts)``: CoMiGS eq. 10 and 11, or Fedus.

    Eq. 10 times 2n, which makes it Fedus et al.'s ``n sum_j f_j P_j`` at n = 2.
    """
    tokens, n = logits.shape
    share, probability = [0.0] * n, [logits.new_zeros(()) for _ in range(n)]
    for token in logits:
        for j in sorted(range(n), key=lambda j: -token[j].item())[:top_k]:
            share[j] += 1 / tokens
        for j, p in enumerate(top_k_softmax(token, n)):
            probability[j] = probability[j] + p / tokens
    terms = [f * p for f, p in zip(share, probability, strict=True)]
    if balance == "uniform":
        return n * sum(terms[1:], terms[0])
    weight = 1 / ((n - 1) ** 2 + 1)
    return 2 * n * (weight * terms[0] + sum(((n - 1) * weight * t for t in terms[1:]), logits.new_zeros(())))


@dataclass
class Gating:
    """One block's gates, token by token; an average where there is no router or a single expert."""

    experts: int
    router: Tensor | None
    rules: Rules
    logits: list[Tensor] = field(default_factory=list)

    def __call__(self, x: Tensor) -> list[Tensor]:
        """Each expert's gates, with the shape of ``x`` but a last axis of 1."""
        rows = x.reshape(-1, x.shape[-1])
        if self.router is None:
            return [torch.full_like(x[..., :1], 1 / self.experts) for _ in range(self.experts)]
        logits = rows @ self.router.T
        self.logits[:] = [logits]
        gates = torch.stack([torch.stack(top_k_softmax(token, self.rules.top_k)) for token in logits])
        return [g.view(*x.shape[:-1], 1) for g in gates.T]


class Mixture(nn.Module):
    """``y = sum_j p_j MLP_j(x)``, one whole MLP per expert."""

    def __init__(self, experts: list[nn.Module], gating: Gating):
        super().__init__()
        self.experts, self.gating = nn.ModuleList(experts), gating

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for expert, p in zip(self.experts, self.gating(x), strict=True):
            total = total + p * expert(x)
        return total


class MixedLinear(nn.Module):
    """``W x + b + s sum_j p_j B_j A_j x``, with the gates that the block's MLP computed from its input."""

    def __init__(self, linear: nn.Module, a: Tensor, b: Tensor, scale: float, gates: list[Tensor]):
        super().__init__()
        self.linear, self.a, self.b, self.scale, self.gates = linear, a, b, scale, gates

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        for a, b, p in zip(self.a, self.b, self.gates, strict=True):
            y = y + self.scale * p * torch.einsum("ro,ri,...i->...o", b, a, x)
        return y


class Reference:
    """One user's model out of a copy of the plain base and the user's tensors, named as in the layout."""

    def __init__(self, plain: nn.Module, family: str, tensors: dict[str, Tensor], rules: Rules):
        self.model, self.rules, self.gatings = copy.deepcopy(plain), rules, []
        self.tensors, self.family = tensors, FAMILIES[family]
        for i, layer in enumerate(self.model.get_submodule(self.family.layers)):
            self._adapt_attention(f"layers.{i}", layer)
            self._adapt_mlp(f"layers.{i}.mlp", layer)

    def losses(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """Loss of every position, from the model's own logits, and the load-balancing term averaged over blocks."""
        logits = self.model(input_ids=windows[:, :-1], use_cache=False).logits
        losses = -logits.log_softmax(-1).gather(-1, windows[:, 1:, None]).squeeze(-1)
        terms = [penalty(g.logits[0], self.rules.top_k, self.rules.balance) for g in self.gatings if g.logits]
        return losses, torch.stack(terms).mean() if terms else losses.new_zeros(())

    def _pair(self, name: str) -> tuple[Tensor, Tensor]:
        return self.tensors[f"{name}.a"], self.tensors[f"{name}.b"]

    def _adapt_attention(self, name: str, layer: nn.Module) -> None:
        own = {f"{self.family.mlp}.{key}".strip(".") for key in self.family.linears.values()}
        for key, linear in list(layer.named_modules()):
            is_linear = isinstance(linear, nn.Linear) or type(linear).__name__ == "Conv1D"
            if is_linear and key not in own:
                layer.set_submodule(key, Materialised(linear, *self._pair(f"{name}.{key}"), self.rules.scale))

    def _adapt_mlp(self, name: str, layer: nn.Module) -> None:
        pairs = {key: self._pair(f"{name}.{key}") for key in self.family.linears}
        experts = len(pairs["up"][0])
        gating = Gating(experts, self.tensors.get(f"{name}.router"), self.rules)
        self.gatings.append(gating)
        if self.rules.mix == "linear":
            self._mix_linears(layer, pairs, gating)
            return
        mixture = Mixture([self._expert(layer, pairs, j) for j in range(experts)], gating)
        if self.family.mlp:
            setattr(layer, self.family.mlp, mixture)
            return
        # The layer itself holds the linears: what they compute is replaced by the mixture of the first one's input.
        seen: list[Tensor] = []
        layer.get_submodule("fc1").register_forward_pre_hook(lambda _, args: seen.__setitem__(slice(None), args))
        layer.get_submodule("fc2").register_forward_hook(lambda *_: mixture(seen[0]))

    def _expert(self, layer: nn.Module, pairs: dict[str, tuple[Tensor, Tensor]], j: int) -> nn.Module:
        """A copy of the original MLP in which every linear has expert j's weights."""
        if not self.family.mlp:
            first, act, last = (copy.deepcopy(layer.get_submodule(n)) for n in ("fc1", "activation_fn", "fc2"))
            up, down = ((a[j], b[j]) for a, b in (pairs["up"], pairs["down"]))
            scale = self.rules.scale
            return nn.Sequential(Materialised(first, *up, scale), act, Materialised(last, *down, scale))
        mlp = copy.deepcopy(layer.get_submodule(self.family.mlp))
        for key, own in self.family.linears.items():
            a, b = pairs[key]
            setattr(mlp, own, Materialised(mlp.get_submodule(own), a[j], b[j], self.rules.scale))
        return mlp

    def _mix_linears(self, layer: nn.Module, pairs: dict[str, tuple[Tensor, Tensor]], gating: Gating) -> None:
        gates: list[Tensor] = []
        holder = layer.get_submodule(self.family.mlp)
        for key, own in self.family.linears.items():
            setattr(holder, own, MixedLinear(holder.get_submodule(own), *pairs[key], self.rules.scale, gates))
        start = holder if self.family.mlp else layer.get_submodule("fc1")
        start.register_forward_pre_hook(lambda _, args: gates.__setitem__(slice(None), gating(args[0])))
