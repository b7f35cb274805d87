"""The function that adds mixtures of adaptors to any model: ``floral(model, rank=8, num_clusters=4)``."""

from __future__ import annotations

import copy as copying
import logging
from dataclasses import dataclass

import torch
from torch import nn

from comingle.models.floral.layers import (
    CONV_FORMS,
    AdaptedConv,
    AdaptedLayer,
    AdaptedLinear,
    ConvForm,
    Geometry,
    Mixture,
    conv_geometry,
    linear_geometry,
)
from comingle.models.floral.model import (
    ADAPTABLE,
    CONVS,
    FloralModel,
    affordable_rank,
    check_size,
    find_layers,
    is_linear,
    log_excess,
    log_limited,
    replace_module,
    shorten,
    sizes,
    unadapted_leaves,
)
from comingle.models.floral.norms import BATCH_NORMS, AdaptedBatchNorm, AdaptedNorm
from comingle.models.routers import ClientRouter
from comingle.utils.errors import RecipeError, did_you_mean, is_number

logger = logging.getLogger("comingle")


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Settings of one call of :func:`floral`, and what follows from them for a layer.

    Either ``rank`` or ``budget`` is set. ``budget`` is the largest number of parameters of a layer's low-rank adaptor,
    as a fraction of the parameters of the layer's weight.
    """

    num_clusters: int
    rank: int | None
    budget: float | None
    alpha: float
    conv: str
    lora: bool
    bias: bool
    norm: bool
    batch_nora: bool
    mixture: Mixture
    warn: bool = True

    def wants(self, module: nn.Module) -> bool:
        """Return whether a layer of a type that can be adapted gets an adaptor under these settings."""
        if is_linear(module) or type(module) in CONVS:
            low_rank = self.lora if is_linear(module) else self.conv != "none"
            return low_rank or (self.bias and module._parameters.get("bias") is not None)
        return self.norm

    def rank_one_geometry(self, module: nn.Module) -> Geometry | None:
        """Return the shapes that a layer's low-rank adaptor would have at rank 1; None if the layer gets none.

        With a budget of parameters, the final rank is the number of adaptors of this size that fit into the budget.
        """
        if is_linear(module):
            return linear_geometry(module) if self.lora else None
        if not isinstance(module, CONVS) or self.conv == "none":
            return None
        return conv_geometry(
            self.conv,
            d_in=module.in_channels,
            d_out=module.out_channels,
            kernel=tuple(module.kernel_size),
            groups=module.groups,
        )

    def geometry(self, module: nn.Module) -> Geometry | None:
        """Return the shapes of a layer's low-rank adaptor; None if the layer gets none.

        The rank is the one of the settings, or the largest one within the budget of parameters, but at least 1. It is
        limited to the largest rank that the layer's weight can have.
        """
        rank_one = self.rank_one_geometry(module)
        if rank_one is None:
            return None
        rank = self.rank if self.budget is None else max(1, affordable_rank(rank_one, self.budget))
        assert rank is not None
        form = self.conv if type(module) in CONVS else "channel"  # a linear has no kernel to divide: any form will do
        return rank_one.with_rank(rank, form)

    def over_budget(self, layers: dict[str, nn.Module]) -> list[str]:
        """Return the names of the layers in which even a low-rank adaptor of rank 1 exceeds the budget of parameters.

        Such a layer gets rank 1 nevertheless. Without a budget the list is empty.

        Args:
            layers: Layers of the model by name.
        """
        if self.budget is None:
            return []
        rank_ones = {name: self.rank_one_geometry(module) for name, module in layers.items()}
        return [name for name, rank_one in rank_ones.items() if rank_one and affordable_rank(rank_one, self.budget) < 1]

    def limited(self, layers: dict[str, nn.Module]) -> list[str]:
        """Return the names of the layers whose weights are too small for an adaptor of the rank in the settings.

        Empty if the settings have a budget in place of a rank.

        Args:
            layers: Layers of the model by name.
        """
        if self.rank is None:
            return []
        names = []
        for name, module in layers.items():
            rank_one, final = self.rank_one_geometry(module), self.geometry(module)
            # The factors' common axis, `width`, grows in proportion to the rank.
            if rank_one and final and final.width < self.rank * rank_one.width:
                names.append(name)
        return names

    def adapt(self, base: nn.Module) -> AdaptedLayer:
        """Return a layer with its adaptors."""
        common = {"num_clusters": self.num_clusters, "alpha": self.alpha, "mixture": self.mixture}
        if type(base) in BATCH_NORMS:
            return AdaptedBatchNorm(base, nora=self.batch_nora, **common)
        if not is_linear(base) and type(base) not in CONVS:
            return AdaptedNorm(base, **common)
        kind = AdaptedLinear if is_linear(base) else AdaptedConv
        return kind(base, geometry=self.geometry(base), bias=self.bias, **common)


def floral(
    model: nn.Module,
    *,
    num_clusters: int,
    rank: int | None = None,
    budget: float | None = None,
    alpha: float = 1.0,
    conv: ConvForm = "balanced-2d",
    lora: bool = True,
    bias: bool = True,
    norm: bool = True,
    batch_nora: bool = False,
    temperature: float = 1.0,
    noise: float = 0.0,
    per_layer: bool = False,
    copy: bool = True,
    generator: torch.Generator | None = None,
    warn: bool = True,
) -> FloralModel:
    """Add ``num_clusters`` adaptors to every layer of ``model``, and one router (FLoRAL sections 3.2 and 5).

    Every adaptor starts at zero, so the result computes the same function as ``model``. Adapted layers are exactly of
    the types ``nn.Linear``, ``nn.Conv1d``, ``nn.Conv2d``, transformers' Conv1D, batch, instance, layer and group norm.
    Others are unchanged and listed in ``unadapted``: embeddings, RMS norms, transposed convolutions, subclasses such as
    the output projection of ``nn.MultiheadAttention``, a language model's head, and layers that share a parameter with
    one of these.

    Args:
        model: Any module.
        num_clusters: Number of clusters C, and so of adaptors of each layer.
        rank: Rank of every low-rank adaptor, limited to the rank of its layer's weight. Either this or ``budget``.
        budget: Parameters of an adaptor divided by those of its base weight, in (0, 1]; the rank is at least 1.
        alpha: Factor of every adaptor's output.
        conv: How the two factors of a convolution's adaptor divide the kernel (FLoRAL App. F.1). "balanced-2d" gives
            one dimension to each factor, "in" both to the inner and "out" both to the outer factor, "channel" both to
            the cheaper factor. "linear" and "filter" are variants of "channel" and "balanced-2d"
            (:mod:`comingle.models.floral.layers`). "none" adds no low-rank adaptors to convolutions.
        lora: Add low-rank adaptors to linear layers.
        bias: Add bias adaptors to linear layers and convolutions that have a bias.
        norm: Add gain and shift adaptors to norms that have gain and shift.
        batch_nora: Rescale the adaptors of batch norms by the ratio of local and base statistics (BatchNorA, FLoRAL
            eq. 42).
        temperature: Temperature of the router's softmax.
        noise: Standard deviation of the router's noise in training.
        per_layer: Give the router a softmax per layer (section 7), in the order of :meth:`FloralModel.layers`.
        copy: Deep-copy the model first; otherwise change it in place.
        generator: Generator of the initial values; None: torch's global one.
        warn: Log a warning if rank 1 exceeds the budget of some layers.

    Raises:
        RecipeError: A setting is out of range, there is nothing to adapt, layers share parameters or are registered
            twice, or the model cannot be copied.
    """
    if not isinstance(model, nn.Module):
        raise RecipeError(f"floral model: got {type(model).__name__}; allowed: a torch.nn.Module")
    check_size(rank, budget)
    check_settings(alpha, conv)
    check_flags(lora=lora, bias=bias, norm=norm, batch_nora=batch_nora, copy=copy, warn=warn)
    mixture, router = Mixture(), ClientRouter(num_clusters, temperature=temperature, noise=noise)
    plan = _Plan(
        num_clusters=num_clusters, rank=rank, budget=budget, alpha=alpha, conv=conv, lora=lora, bias=bias, norm=norm,
        batch_nora=batch_nora, mixture=mixture, warn=warn,
    )  # fmt: skip
    wrapped = _add_adaptors(model, plan, router, copy=copy, generator=generator)
    return _route_by_layer(wrapped) if per_layer else wrapped


def adaptor_size(
    model: nn.Module,
    *,
    rank: int | None = None,
    budget: float | None = None,
    conv: ConvForm = "balanced-2d",
    lora: bool = True,
    bias: bool = True,
    norm: bool = True,
) -> int:
    """Return the number of entries of the low-rank factors that :func:`floral` would add to ``model`` for each cluster.

    Adaptors of biases and norms are small and not counted.

    Args:
        model: Any module, without adaptors.
        rank: Rank of every low-rank adaptor, limited to the rank of its layer's weight. Either this or ``budget``.
        budget: Parameters of an adaptor divided by those of its base weight, in (0, 1].
        conv: Form of convolutions; "none" adds no low-rank adaptors to them.
        lora: Add low-rank adaptors to linear layers.
        bias: Does not change the number; accepted so that the settings of :func:`floral` can be passed on.
        norm: Does not change the number, like ``bias``.

    Raises:
        RecipeError: Not exactly one of rank and budget is given, one is out of range, or layers share parameters.
    """
    check_size(rank, budget)
    # The number of clusters, alpha, the kind of batch norm and the mixture do not matter for the size of one cluster.
    plan = _Plan(
        num_clusters=1, rank=rank, budget=budget, alpha=1.0, conv=conv, lora=lora, bias=bias, norm=norm,
        batch_nora=False, mixture=Mixture(),
    )  # fmt: skip
    geometries = [plan.geometry(module) for module in find_layers(model, plan.wants).values()]
    return sum(geometry.size for geometry in geometries if geometry is not None)


def _add_adaptors(
    model: nn.Module, plan: _Plan, router: ClientRouter, *, copy: bool, generator: torch.Generator | None
) -> FloralModel:
    """Add adaptors and a router to a model.

    Args:
        model: Any module.
        plan: Settings of the adaptors.
        router: The router, which is moved to the adaptors' device.
        copy: Deep-copy the model first.
        generator: Generator of the initial values; None: torch's global one.

    Raises:
        RecipeError: No layer can be adapted, or the model cannot be copied.
    """
    layers = find_layers(model, plan.wants)
    unadapted = unadapted_leaves(model, layers)
    if not layers:
        raise RecipeError(
            f"floral: no layer of {type(model).__name__} can be adapted with these settings; got "
            f"{shorten(unadapted) or 'no parameters'}; allowed: {ADAPTABLE}"
        )
    model = _deep_copy(model) if copy else model
    wrapped = FloralModel(_adapt_layers(model, layers, plan), router=router, mixture=plan.mixture, unadapted=unadapted)
    _initialise(wrapped, generator)
    _log_sizes(wrapped, plan)
    return wrapped


def _route_by_layer(model: FloralModel) -> FloralModel:
    """Replace the router by one with a softmax per layer, in place, and return the model.

    Logits start at their initial values again. The new router has the device, dtype and mode of the old one.
    """
    layers, shared_router = list(model.layers().values()), model.router
    for place, layer in enumerate(layers):  # the row of the layer in the mixture
        layer.layer_index = place
    temperature, noise = shared_router.temperature, shared_router.noise
    router = ClientRouter(model.num_clusters, temperature=temperature, noise=noise, layers=len(layers))
    model.router = router.to(shared_router.theta).train(shared_router.training)
    return model


def _deep_copy(model: nn.Module) -> nn.Module:
    """Return a deep copy; raise a :class:`RecipeError` for models that have none."""
    try:
        return copying.deepcopy(model)
    except (RuntimeError, TypeError) as error:  # tensors with a graph (torch.nn.utils.weight_norm), locks
        name, reason = type(model).__name__, str(error).splitlines()[0]
        raise RecipeError(f"floral model: {name} cannot be copied ({reason}); give copy=False") from None


def check_settings(alpha: float, conv: str) -> None:
    """Check two settings of :func:`floral`.

    Args:
        alpha: Factor of the adaptors' outputs.
        conv: How the two factors of a convolution's adaptor divide the kernel, one of ``CONV_FORMS``.

    Raises:
        RecipeError: The scale is not finite, or the form is unknown.
    """
    if not is_number(alpha):
        raise RecipeError(f"floral alpha: got {alpha!r}; allowed: a finite number")
    if conv not in CONV_FORMS:
        raise RecipeError(
            f"floral conv: got {conv!r}; allowed: {', '.join(CONV_FORMS)}.{did_you_mean(str(conv), CONV_FORMS)}"
        )


def check_flags(**flags: bool) -> None:
    """Check that the settings are booleans.

    Raises:
        RecipeError: A setting is not a boolean. The text "no", for example, would count as true in an ``if``.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise RecipeError(f"floral {name}: got {value!r}; allowed: True or False")


def _adapt_layers(model: nn.Module, layers: dict[str, nn.Module], plan: _Plan) -> nn.Module:
    """Replace layers by adapted ones, in place; return the model, or the adapted layer if the model is a single layer.

    Args:
        model: The model.
        layers: The layers to adapt, by name.
        plan: Settings of the adaptors.
    """
    for name in layers:
        model = replace_module(model, name, plan.adapt(model.get_submodule(name)))
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            # Its fast path in eval mode bypasses the forward of its linear layers; 0 disables it.
            module.activation_relu_or_gelu = 0
    return model


def _initialise(model: FloralModel, generator: torch.Generator | None) -> None:
    """Draw the adaptors' initial values, and give the router their device and the model's training mode.

    The router computes in float32, or in the adaptors' dtype if that is wider. Layers without adaptors are logged.

    Args:
        model: The model with adaptors.
        generator: Generator of the initial values; None: torch's global one.
    """
    for layer in model.layers().values():
        layer.reset(generator)
    first = next(p for layer in model.layers().values() for p in layer.parameters(recurse=False))  # of the adaptors
    model.router.to(device=first.device, dtype=torch.promote_types(first.dtype, torch.float32))
    model.train(model.model.training)  # the wrapper was created in training mode
    if model.unadapted:
        logger.debug("floral: no adaptors in %s", shorten(model.unadapted, 20))


def _log_sizes(model: FloralModel, plan: _Plan) -> None:
    """Log a warning if some adaptors have a smaller rank than asked for, or more parameters than the budget allows.

    ``plan.warn`` switches off only the warning about the budget.
    """
    # Names in the caller's model, which is the submodule "model" of the wrapper.
    bases = {name.removeprefix("model."): layer.base for name, layer in model.layers().items()}
    num_low_rank = sum(plan.rank_one_geometry(base) is not None for base in bases.values())  # layers, without norms
    if plan.rank is not None:  # the caller gave a rank, so there is no budget to exceed
        log_limited(plan.rank, plan.limited(bases), num_low_rank)
        return
    if not plan.warn:
        return
    assert plan.budget is not None
    parameters = sizes(model)
    log_excess(
        plan.budget, plan.over_budget(bases), num_low_rank,
        clusters=plan.num_clusters, growth=parameters.adaptors / parameters.base,
    )  # fmt: skip
