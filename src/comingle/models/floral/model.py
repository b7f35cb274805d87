"""A model with one adaptor per cluster in every layer, and one router per user.

``rho`` allows an adaptor ``rho`` times the entries of its base weight (FLoRAL section 3.2, "Relative parameter
budget"), so ``rank = floor(rho * base / parameters of one rank)``: for a linear ``floor(rho m n / (m + n))``. The
public code gives every form of convolution one rank; here each form is sized by what it really costs.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from comingle.models.floral.layers import AdaptedLayer, Geometry, Mixture, Pairs
from comingle.models.floral.norms import BATCH_NORMS, PLAIN_NORMS
from comingle.models.lora import init_zero
from comingle.models.routers import ClientRouter, softmax_mixture
from comingle.utils.errors import RecipeError, is_number
from comingle.utils.trees import CLIENT_ROUTER, Init

CONVS = (nn.Conv1d, nn.Conv2d)
ADAPTABLE = "Linear, Conv1D (GPT-2), Conv1d, Conv2d, BatchNorm, InstanceNorm, LayerNorm and GroupNorm with gamma"


def is_linear(module: nn.Module) -> bool:
    """``nn.Linear`` or GPT-2's Conv1D, and none of their subclasses: those may use their weight in another way."""
    gpt2 = sys.modules.get("transformers.pytorch_utils")
    return type(module) is nn.Linear or (gpt2 is not None and type(module) is gpt2.Conv1D)


def is_adaptable(module: nn.Module) -> bool:
    """Whether there is an adaptor for this type, and the layer has a floating weight of its own."""
    weight = module._parameters.get("weight")
    known = is_linear(module) or type(module) in (*CONVS, *PLAIN_NORMS, *BATCH_NORMS)
    return known and weight is not None and weight.is_floating_point()


def find_layers(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> dict[str, nn.Module]:
    """The layers that get adaptors, by name.

    Left out are layers that share a parameter with one that gets none (a head tied to its embedding), and the output
    head of a language model.

    Raises:
        RecipeError: two of the layers share a parameter, or one of them has two names, or the model has adaptors.
    """
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLayer):
            raise RecipeError(f"floral: layer {name!r} has adaptors already; wrap the plain model")
    heads = _output_heads(model)
    layers = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if is_adaptable(module) and wanted(module) and id(module) not in heads
    }
    _check_names(layers)
    owners = _owners(model)
    chosen = {id(module) for module in layers.values()}
    partners = {name: _partners(module, owners) for name, module in layers.items()}
    free = {name: module for name, module in layers.items() if set(partners[name]) <= chosen}
    for name in free:
        others = [other for key, other in partners[name].items() if other != name and key != id(free[name])]
        if others:
            raise RecipeError(f"floral: layers {name!r} and {others[0]!r} share a parameter; give each its own")
    return free


def unadapted_leaves(model: nn.Module, adapted: dict[str, nn.Module]) -> tuple[str, ...]:
    """Modules with parameters of their own that got no adaptor, as "head (Linear)"."""
    chosen = {id(module) for module in adapted.values()}
    return tuple(
        f"{name or 'model'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if id(module) not in chosen and any(p is not None for p in module._parameters.values())
    )


def _check_names(layers: dict[str, nn.Module]) -> None:
    seen: dict[int, str] = {}
    for name, module in layers.items():
        if (first := seen.setdefault(id(module), name)) != name:
            raise RecipeError(f"floral: {first!r} and {name!r} are one layer; register it once (it may run many times)")


def _owners(model: nn.Module) -> dict[int, dict[int, str]]:
    """For each parameter the modules that hold it, by identity, with their first name."""
    owners: dict[int, dict[int, str]] = defaultdict(dict)
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)][id(module)] = name
    return owners


def _partners(module: nn.Module, owners: dict[int, dict[int, str]]) -> dict[int, str]:
    """All modules that hold one of this module's parameters, itself too."""
    held = [owners[id(p)] for p in module._parameters.values() if p is not None]
    return {key: name for holders in held for key, name in holders.items()}


def _output_heads(model: nn.Module) -> set[int]:
    return {id(head) for module in model.modules() for head in _output_head(module)}


def _output_head(module: nn.Module) -> Iterator[nn.Module]:
    get = getattr(module, "get_output_embeddings", None)
    if callable(get):
        with contextlib.suppress(AttributeError, NotImplementedError):  # transformers' models without a head
            if isinstance(head := get(), nn.Module):
                yield head


logger = logging.getLogger("comingle")


def check_size(rank: int | None, budget: float | None) -> None:
    """Exactly one of the two, and in range.

    Raises:
        RecipeError: both or neither, a rank below 1 or not whole, a budget outside (0, 1].
    """
    if (rank is None) == (budget is None):
        raise RecipeError(f"floral: got rank={rank} and budget={budget}, needs exactly one of the two")
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
        raise RecipeError(f"floral rank: got {rank!r}, needs a whole number of at least 1")
    if budget is not None and not (is_number(budget) and 0 < budget <= 1):
        raise RecipeError(f"floral budget: got {budget!r}, needs a share of the base above 0 and at most 1")


def affordable_rank(geometry: Geometry, budget: float) -> int:
    """The largest rank within ``budget`` of the base weight, 0 where not even one fits; ``geometry`` is of rank 1."""
    # 0.29 * 100 is 28.999999999999996 in binary; the nudge keeps a rank that fits exactly.
    return math.floor(budget * geometry.base_size / geometry.size + 1e-9)


def log_excess(budget: float, over: Collection[str], layers: int, *, clusters: int, growth: float) -> None:
    """One line where the minimum rank of 1 broke the budget in the layers named in ``over``; nothing otherwise.

    ``growth`` is the number of adaptor parameters of all clusters over that of the base's parameters.
    """
    if over:
        logger.warning(
            "floral: rank 1 is more than budget %g allows in %d of %d low-rank layers (%s); "
            "%d clusters add %+.0f%% parameters where the budget allows %+.0f%%",
            budget, len(over), layers, shorten(over), clusters, 100 * growth, 100 * budget * clusters,
        )  # fmt: skip


def log_cut(rank: int, cut: Collection[str], layers: int) -> None:
    """One line where ``rank`` is more than the weights of the layers named in ``cut`` can have; nothing otherwise."""
    if cut:
        logger.warning(
            "floral: rank %d is more than a weight can have in %d of %d low-rank layers (%s); they get all that it can",
            rank, len(cut), layers, shorten(cut),
        )  # fmt: skip


def shorten(names: Collection[str], most: int = 5) -> str:
    """The names, or the first few and how many more there are."""
    shown = ", ".join(list(names)[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


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

    def forward(self, *args: object, mixture: Tensor | None = None, **kwargs: object) -> object:
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
