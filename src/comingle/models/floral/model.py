"""A model with one adaptor per cluster in every layer, and one router per user.

The relative parameter budget ``rho`` (FLoRAL section 3.2) allows an adaptor ``rho`` times the entries of its base
weight, so ``rank = floor(rho * base entries / parameters of rank 1)``: ``floor(rho m n / (m + n))`` for a linear layer.
The public code uses one rank for all forms of convolution; here the rank depends on the cost of each form.
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
"""Convolutions that can be adapted."""

ADAPTABLE = "Linear, Conv1D (GPT-2), Conv1d, Conv2d, BatchNorm, InstanceNorm, LayerNorm and GroupNorm with gamma"


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is an ``nn.Linear`` or GPT-2's Conv1D, but not of a subclass."""
    if type(module) is nn.Linear:
        return True
    pytorch_utils = sys.modules.get("transformers.pytorch_utils")  # None if transformers was not imported
    return pytorch_utils is not None and type(module) is pytorch_utils.Conv1D


def is_adaptable(module: nn.Module) -> bool:
    """Return whether there is an adaptor for this type of layer, and the layer has a floating-point weight."""
    weight = module._parameters.get("weight")
    is_known_type = is_linear(module) or type(module) in (*CONVS, *PLAIN_NORMS, *BATCH_NORMS)
    return is_known_type and weight is not None and weight.is_floating_point()


def find_layers(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> dict[str, nn.Module]:
    """Return the layers that get adaptors, by name.

    The output head of a language model gets none, nor does a layer that shares a parameter with a layer without
    adaptors, such as an embedding.

    Args:
        model: The model.
        wanted: Returns whether an adaptable layer gets an adaptor.

    Raises:
        RecipeError: Two of the layers share a parameter, one of them has two names, or the model has adaptors already.
    """
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLayer):
            raise RecipeError(f"floral: layer {name!r} has adaptors already; wrap the plain model")
    heads = _output_heads(model)
    candidates: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if is_adaptable(module) and wanted(module) and id(module) not in heads:
            candidates[name] = module
    _check_registered_once(candidates)
    owners = _parameter_owners(model)  # the modules that hold each parameter
    candidate_ids = {id(module) for module in candidates.values()}
    layers: dict[str, nn.Module] = {}
    for name, module in candidates.items():
        owner_names = _owners_of_parameters(module, owners)
        shares_with_unadapted = not set(owner_names) <= candidate_ids
        if shares_with_unadapted:
            continue
        for owner_id, owner_name in owner_names.items():
            if owner_id != id(module) and owner_name != name:
                raise RecipeError(f"floral: layers {name!r} and {owner_name!r} share a parameter; give each its own")
        layers[name] = module
    return layers


def unadapted_leaves(model: nn.Module, adapted: dict[str, nn.Module]) -> tuple[str, ...]:
    """Return the modules that hold parameters directly but get no adaptor, such as "head (Linear)".

    A module that has parameters only in its submodules does not count.

    Args:
        model: The model.
        adapted: The modules that get adaptors, by name.
    """
    adapted_ids = {id(module) for module in adapted.values()}
    leaves: list[str] = []
    for name, module in model.named_modules():
        has_parameters = any(p is not None for p in module._parameters.values())
        if has_parameters and id(module) not in adapted_ids:
            leaves.append(f"{name or 'model'} ({type(module).__name__})")
    return tuple(leaves)


def _check_registered_once(layers: dict[str, nn.Module]) -> None:
    """Raise a :class:`RecipeError` if a layer is registered in the model under two names."""
    first_names: dict[int, str] = {}  # by the id of the layer
    for name, module in layers.items():
        first = first_names.setdefault(id(module), name)
        if first != name:
            raise RecipeError(f"floral: {first!r} and {name!r} are one layer; register it once (it may run many times)")


def _parameter_owners(model: nn.Module) -> dict[int, dict[int, str]]:
    """Return the modules that hold each parameter, to find parameters that several modules share.

    The result has the form ``{id(parameter): {id(module): "layers.0.mlp"}}``.
    """
    owners: dict[int, dict[int, str]] = defaultdict(dict)
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)][id(module)] = name
    return owners


def _owners_of_parameters(module: nn.Module, owners: dict[int, dict[int, str]]) -> dict[int, str]:
    """Return the names of all modules that hold a parameter of ``module``, by the modules' ``id``.

    They are ``module`` itself and modules that share a parameter with it. A layer gets an adaptor only if it shares no
    parameter, since an adaptor changes the weight of its layer alone.

    Args:
        module: The module.
        owners: Modules that hold each parameter of the model, ``{id(parameter): {id(module): name}}``, from
            :func:`_parameter_owners`.
    """
    names: dict[int, str] = {}
    for parameter in module._parameters.values():
        if parameter is not None:
            names.update(owners[id(parameter)])
    return names


def _output_heads(model: nn.Module) -> set[int]:
    """Return the ``id`` of each output head of language models within a model."""
    heads = set()
    for module in model.modules():
        heads.update(id(head) for head in _output_head(module))
    return heads


def _output_head(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the output head of a language model of transformers; nothing for other modules."""
    get_head = getattr(module, "get_output_embeddings", None)
    if callable(get_head):
        with contextlib.suppress(AttributeError, NotImplementedError):  # transformers models without a head
            if isinstance(head := get_head(), nn.Module):
                yield head


logger = logging.getLogger("comingle")


def check_size(rank: int | None, budget: float | None) -> None:
    """Check that exactly one of rank and budget is given, and is in range.

    Args:
        rank: Rank of every adaptor.
        budget: Parameters of an adaptor divided by those of its base weight.

    Raises:
        RecipeError: Both or neither are given, the rank is no integer from 1, or the budget is not in (0, 1].
    """
    if (rank is None) == (budget is None):
        raise RecipeError(f"floral: got rank={rank} and budget={budget}; allowed: exactly one of the two")
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
        raise RecipeError(f"floral rank: got {rank!r}; allowed: a whole number of at least 1")
    if budget is not None and not (is_number(budget) and 0 < budget <= 1):
        raise RecipeError(f"floral budget: got {budget!r}; allowed: a fraction of the base above 0 and at most 1")


def affordable_rank(geometry: Geometry, budget: float) -> int:
    """Return the largest rank within a budget, or 0 if not even rank 1 fits.

    Args:
        geometry: Shapes of the factors at rank 1.
        budget: Largest number of an adaptor's parameters, divided by that of its base weight.
    """
    max_parameters = budget * geometry.base_size
    return math.floor(max_parameters / geometry.size + 1e-9)  # for rounding errors: 0.29 * 100 is 28.999999999999996


def log_excess(
    budget: float, layers_over_budget: Collection[str], num_layers: int, *, clusters: int, growth: float
) -> None:
    """Log a warning if rank 1, the smallest, exceeds the budget in some layers.

    Args:
        budget: Largest number of an adaptor's parameters, divided by that of its base weight.
        layers_over_budget: Names of the layers in which rank 1 exceeds the budget.
        num_layers: Number of all low-rank layers.
        clusters: Number of clusters.
        growth: Parameters of all clusters' adaptors divided by those of the base, such as 0.25.
    """
    if not layers_over_budget:
        return
    logger.warning(
        "floral: rank 1 exceeds budget %g in %d of %d low-rank layers (%s); "
        "%d clusters add %+.0f%% parameters, the budget allows %+.0f%%; use fewer clusters or "
        "a rank in place of a budget",
        budget, len(layers_over_budget), num_layers, shorten(layers_over_budget), clusters, 100 * growth,
        100 * budget * clusters,
    )  # fmt: skip


def log_limited(rank: int, limited: Collection[str], num_layers: int) -> None:
    """Log a warning if the weights of some layers are too small for the rank.

    Args:
        rank: The rank in the settings.
        limited: Names of the layers that got a smaller rank.
        num_layers: Number of all low-rank layers.
    """
    if not limited:
        return
    logger.warning(
        "floral: rank %d exceeds the full rank of %d of %d low-rank layers (%s); using the full rank in these",
        rank, len(limited), num_layers, shorten(limited),
    )  # fmt: skip


def shorten(names: Collection[str], most: int = 5) -> str:
    """Return the first ``most`` names and the number of the others, such as "a, b, c, d, e and 3 more"."""
    shown = ", ".join(list(names)[:most])
    num_others = len(names) - most
    return f"{shown} and {num_others} more" if num_others > 0 else shown


Role = Literal["base", "adaptor", "router", "statistics"]


class FloralModel(nn.Module):
    """A model with adapted layers and a router over the clusters; made by :func:`floral`.

    Args:
        model: The model with adapted layers.
        router: A softmax over the clusters.
        mixture: The holder from which the layers read the mixture.
        unadapted: Modules with parameters but without adaptors, as "lm_head (Linear)".
    """

    router: ClientRouter

    def __init__(self, model: nn.Module, *, router: ClientRouter, mixture: Mixture, unadapted: tuple[str, ...]):
        """Combine a model that already has adapted layers with a router.

        Args:
            model: The model with adapted layers.
            router: The router over the clusters.
            mixture: Holder from which all adapted layers read the mixture of the current forward pass.
            unadapted: Modules with parameters that have no adaptor, such as "head (Linear)".
        """
        super().__init__()
        self.model = model
        self.router = router
        self.unadapted = unadapted
        self._mixture = mixture

    @property
    def num_clusters(self) -> int:
        """The number of clusters C, which is the number of adaptors of each layer."""
        return self.router.theta.shape[-1]

    def forward(self, *args: object, mixture: Tensor | None = None, **kwargs: object) -> object:
        """Run the model with the router's mixture, or with ``mixture``.

        Args:
            *args: Arguments of the model.
            mixture: Weights of the clusters, of shape (clusters,) or that of the router's logits; None: those of an
                enclosing :meth:`mixing`, or else the router's.
            **kwargs: Keyword arguments of the model.

        Raises:
            RecipeError: The mixture has another shape.
        """
        previous = self._set_mixture(mixture)
        try:
            return self.model(*args, **kwargs)
        finally:
            self._mixture.value = previous

    @contextmanager
    def mixing(self, mixture: Tensor | None = None) -> Iterator[None]:
        """Set the mixture of the layers in the context, for calls of the layers outside of :meth:`forward`.

        Such calls are those of ``model.generate``, or of a backward pass with gradient checkpointing.

        Args:
            mixture: Weights of the clusters, of shape (clusters,) or that of the router's logits; None: those of an
                enclosing :meth:`mixing`, or else the router's.

        Raises:
            RecipeError: The mixture has another shape.
        """
        previous = self._set_mixture(mixture)
        try:
            yield
        finally:
            self._mixture.value = previous

    def _set_mixture(self, mixture: Tensor | None) -> Tensor | None:
        """Set the weights with which all layers mix their clusters' adapters, and return the previous weights.

        The layers read them in a forward pass. The caller restores the previous ones after it.

        Args:
            mixture: Weights of the clusters. None keeps the weights if some are set, and otherwise takes those of the
                user's router.

        Raises:
            RecipeError: The mixture has neither the shape (clusters,) nor that of the router's logits.
        """
        previous = self._mixture.value
        if mixture is not None:
            self._check_shape(mixture)
            self._mixture.value = mixture
        elif previous is None:
            self._mixture.value = self.router.mixture()
        return previous

    def _check_shape(self, mixture: Tensor) -> None:
        """Raise a :class:`RecipeError` for a shape other than (clusters,) or that of the router's logits."""
        if mixture.shape not in ((self.num_clusters,), self.router.theta.shape):
            raise RecipeError(f"mixture: got shape {tuple(mixture.shape)}; allowed: {tuple(self.router.theta.shape)}")

    def layers(self) -> dict[str, AdaptedLayer]:
        """Return the adapted layers by name, such as "model.fc1"."""
        return {name: module for name, module in self.named_modules() if isinstance(module, AdaptedLayer)}

    def pairs(self) -> Pairs:
        """Return the names of all adaptors with those of the base's tensors that they change.

        ``factors`` are the pairs A and B of low-rank adaptors, ``offsets`` the adaptors of biases and norms. They are
        needed to precondition gradients, and to move the adaptors' mean into the base.
        """
        factors, offsets = [], []
        for name, layer in self.layers().items():
            layer_pairs = layer.pairs(f"{name}.")
            factors += layer_pairs.factors
            offsets += layer_pairs.offsets
        return Pairs(factors=tuple(factors), offsets=tuple(offsets))

    @torch.no_grad()
    def merge(self, mixture: Tensor | None = None) -> nn.Module:
        """Return a copy of the model without adaptors, to whose tensors the mixed adaptors are added.

        Its outputs are those of this model in eval mode.

        Args:
            mixture: Weights of the clusters, of shape (clusters,) or that of the router's logits; None: the router's,
                without noise.

        Raises:
            RecipeError: The mixture has another shape, or a batch norm cannot be merged.
        """
        if mixture is None:
            mixture = softmax_mixture(self.router.theta, self.router.temperature)
        else:
            self._check_shape(mixture)
        model = copy.deepcopy(self.model)
        adapted = [(name, module) for name, module in model.named_modules() if isinstance(module, AdaptedLayer)]
        for name, layer in adapted:
            shares = layer.alpha * layer.mixture_of_layer(mixture)
            model = replace_module(model, name, layer.merge_into_base(shares))
        return model


def replace_module(root: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """Replace a submodule in place and return the root.

    Args:
        root: The model.
        name: Dotted name of the submodule; "" replaces the root itself.
        module: The new submodule.
    """
    if not name:
        return module
    parent, _, last = name.rpartition(".")
    root.get_submodule(parent).register_module(last, module)
    return root


def roles(model: FloralModel) -> dict[str, Role]:
    """Return the role of every parameter and every floating-point buffer, by name.

    "statistics" are running means and variances, of the base and of the adaptors. Other buffers count as "base".
    """
    adaptor_names: set[str] = set()
    for prefix, layer in model.layers().items():
        adaptor_names.update(f"{prefix}.{name}" for name, _ in layer.named_parameters(recurse=False))
    by_name: dict[str, Role] = {}
    for name, _ in model.named_parameters():
        if name.startswith("router."):
            by_name[name] = "router"
        elif name in adaptor_names:
            by_name[name] = "adaptor"
        else:
            by_name[name] = "base"
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            by_name[name] = "statistics" if name.endswith(("running_mean", "running_var")) else "base"
    return by_name


def initialisers(model: FloralModel) -> dict[str, Init]:
    """Return the initialiser of every adaptor and router parameter, by name."""
    by_name: dict[str, Init] = {}
    for prefix, layer in model.layers().items():
        for name, initialiser in layer.initialisers().items():
            by_name[f"{prefix}.{name}"] = initialiser
    by_name[CLIENT_ROUTER] = init_zero
    return by_name


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Numbers of parameters: of the base, and of all adaptors together."""

    base: int
    adaptors: int


def sizes(model: FloralModel) -> Sizes:
    """Count the parameters of the base and of the adaptors."""
    role_by_name = roles(model)
    counts: dict[Role, int] = defaultdict(int)
    for name, parameter in model.named_parameters():
        counts[role_by_name[name]] += parameter.numel()
    return Sizes(base=counts["base"], adaptors=counts["adaptor"])
