"""A model with the clusters' adaptors in it, and one router."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from comingle.adapters.clustered.layer import AdaptedLayer, Mixture, Pairs
from comingle.adapters.lora import init_zero
from comingle.routers.client import ClientRouter
from comingle.routers.mixtures import softmax_mixture
from comingle.utils.errors import RecipeError
from comingle.utils.trees import CLIENT_ROUTER, Init

Role = Literal["base", "adaptor", "router", "statistics"]


class FloralModel(nn.Module):
    """What :func:`floral` returns: ``model`` with its layers adapted, and ``router``, a softmax over the clusters.

    ``unadapted`` names the leaves with parameters that have no adaptor, as "lm_head (Linear)".
    """

    router: ClientRouter

    def __init__(self, model: nn.Module, *, router: ClientRouter, mixture: Mixture, unadapted: tuple[str, ...]):
        super().__init__()
        self.model = model
        self.router = router
        self.unadapted = unadapted
        self._mixture = mixture

    @property
    def num_clusters(self) -> int:
        """C, the number of adaptors at each layer."""
        return self.router.theta.shape[-1]

    def forward(self, *args: Any, mixture: Tensor | None = None, **kwargs: Any) -> Any:
        """The model with the router's mixture, or with the one given (optimal routing, one cluster alone).

        Raises:
            RecipeError: a mixture that is neither of shape (clusters,) nor the router's.
        """
        before = self._enter(mixture)
        try:
            return self.model(*args, **kwargs)
        finally:
            self._mixture.value = before

    @contextmanager
    def mixing(self, mixture: Tensor | None = None) -> Iterator[None]:
        """Within, the layers use this mixture (the router's, if None): for calls beside :meth:`forward`.

        Such are ``model.generate`` and a backward pass with gradient checkpointing, which runs layers again.

        Raises:
            RecipeError: a mixture that is not of shape (clusters,).
        """
        before = self._enter(mixture)
        try:
            yield
        finally:
            self._mixture.value = before

    def _enter(self, mixture: Tensor | None) -> Tensor | None:
        before = self._mixture.value
        if mixture is None:
            mixture = self.router.mixture() if before is None else before
        else:
            self._check(mixture)
        self._mixture.value = mixture
        return before

    def _check(self, mixture: Tensor) -> None:
        if mixture.shape not in ((self.num_clusters,), self.router.theta.shape):
            raise RecipeError(f"mixture: got shape {tuple(mixture.shape)}, needs {tuple(self.router.theta.shape)}")

    def layers(self) -> dict[str, AdaptedLayer]:
        """The adapted layers by name, "model.fc1" for example."""
        return {name: module for name, module in self.named_modules() if isinstance(module, AdaptedLayer)}

    def pairs(self) -> Pairs:
        """The names of all adaptors' tensors and of what they change, for preconditioning and centering."""
        by_layer = [layer.pairs(f"{name}.") for name, layer in self.layers().items()]
        return Pairs(
            factors=tuple(pair for pairs in by_layer for pair in pairs.factors),
            offsets=tuple(offset for pairs in by_layer for offset in pairs.offsets),
        )

    @torch.no_grad()
    def merge(self, mixture: Tensor | None = None) -> nn.Module:
        """A plain copy of the original architecture with the mixed adaptors folded into its tensors.

        ``mixture`` is the router's, without noise, if None. Batch norms are folded with their meaning in eval mode.

        Raises:
            RecipeError: a mixture that is not of shape (clusters,).
        """
        if mixture is None:
            mixture = softmax_mixture(self.router.theta, self.router.temperature)
        else:
            self._check(mixture)
        model = copy.deepcopy(self.model)
        adapted = [(name, module) for name, module in model.named_modules() if isinstance(module, AdaptedLayer)]
        for name, layer in adapted:
            model = replace_module(model, name, layer.fold(layer.alpha * layer.of_mixture(mixture)))
        return model


def replace_module(root: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """Put ``module`` in the place ``name`` of ``root``; "" is the root itself. Returns the root."""
    if not name:
        return module
    parent, _, last = name.rpartition(".")
    root.get_submodule(parent).register_module(last, module)
    return root


def roles(model: FloralModel) -> dict[str, Role]:
    """For every parameter and every floating buffer what it is.

    "statistics" are running means and variances: the base's have ".base." in their name or belong to a norm without
    adaptors; a batch norm's adaptors have ``running_mean`` and ``running_var`` of their own.
    """
    adaptor_names = {
        f"{prefix}.{name}"
        for prefix, layer in model.layers().items()
        for name, _ in layer.named_parameters(recurse=False)
    }
    by_name: dict[str, Role] = {}
    for name, _ in model.named_parameters():
        by_name[name] = "router" if name.startswith("router.") else "adaptor" if name in adaptor_names else "base"
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            by_name[name] = "statistics" if name.endswith(("running_mean", "running_var")) else "base"
    return by_name


def initialisers(model: FloralModel) -> dict[str, Init]:
    """For every adaptor and router parameter how its initial value is drawn, out of its shape and a generator.

    Base parameters are not in it: they keep the values that the module has.
    """
    by_name = {
        f"{prefix}.{name}": draw
        for prefix, layer in model.layers().items()
        for name, draw in layer.initialisers().items()
    }
    return {**by_name, CLIENT_ROUTER: init_zero}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Parameters of the base and of all adaptors together."""

    base: int
    adaptors: int


def sizes(model: FloralModel) -> Sizes:
    """Count the parameters of each role."""
    kinds = roles(model)
    counts = {name: p.numel() for name, p in model.named_parameters()}
    return Sizes(
        base=sum(n for name, n in counts.items() if kinds[name] == "base"),
        adaptors=sum(n for name, n in counts.items() if kinds[name] == "adaptor"),
    )
