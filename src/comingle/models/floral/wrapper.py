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
    """Settings of one call of :func:`floral`, and the adaptors that each layer gets under them.

    Either ``rank`` or ``budget`` is set; ``budget`` is the largest number of parameters of a layer's low-rank adaptor,
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
        """Return whether an adaptable layer gets an adaptor under these settings."""
        is_norm = not is_linear(module) and type(module) not in CONVS
        if is_norm:
            return self.norm
        gets_low_rank_adaptor = self.lora if is_linear(module) else self.conv != "none"
        gets_bias_adaptor = self.bias and module._parameters.get("bias") is not None
        return gets_low_rank_adaptor or gets_bias_adaptor

    def rank_one_geometry(self, module: nn.Module) -> Geometry | None:
        """Return the shapes of the layer's low-rank adaptor at rank 1; None if the layer gets none.

        An adaptor of rank r has r times the parameters of this one.
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
        """Return the shapes of the layer's low-rank adaptor; None if the layer gets none.

        The rank is that of the settings, or the largest within the budget, but at least 1. ``with_rank`` limits it to
        the largest rank that the layer's weight can have.
        """
        rank_one = self.rank_one_geometry(module)
        if rank_one is None:
            return None
        if self.budget is not None:
            rank = max(1, affordable_rank(rank_one, self.budget))
        else:
            assert self.rank is not None
            rank = self.rank
        if is_linear(module):
            return rank_one.with_rank(rank)
        return rank_one.with_rank(rank, form=self.conv)

    def layers_over_budget(self, layers: dict[str, nn.Module]) -> list[str]:
        """Return the layers in which even an adaptor of rank 1 has more parameters than the budget allows.

        The budget (``floral.budget``) bounds a layer's adaptors as a share of its own parameters. A warning names these
        layers; without a budget there are none.

        Args:
            layers: Layers of the model by name.
        """
        if self.budget is None:
            return []
        names: list[str] = []
        for name, module in layers.items():
            rank_one = self.rank_one_geometry(module)
            if rank_one is not None and affordable_rank(rank_one, self.budget) < 1:
                names.append(name)
        return names

    def layers_below_rank(self, layers: dict[str, nn.Module]) -> list[str]:
        """Return the names of the layers whose weights are too small for the rank, for a warning; none with a budget.

        Args:
            layers: Layers of the model by name.
        """
        if self.rank is None:
            return []
        names: list[str] = []
        for name, module in layers.items():
            rank_one, limited = self.rank_one_geometry(module), self.geometry(module)
            if rank_one is None or limited is None:  # no low-rank adaptor
                continue
            width_without_limit = self.rank * rank_one.width  # the width grows in proportion to the rank
            if limited.width < width_without_limit:
                names.append(name)
        return names

    def adapt(self, base: nn.Module) -> AdaptedLayer:
        """Return an adapted layer with ``base`` as its base layer."""
        common = {"num_clusters": self.num_clusters, "alpha": self.alpha, "mixture": self.mixture}
        if is_linear(base):
            return AdaptedLinear(base, geometry=self.geometry(base), bias=self.bias, **common)
        if type(base) in CONVS:
            return AdaptedConv(base, geometry=self.geometry(base), bias=self.bias, **common)
        if type(base) in BATCH_NORMS:
            return AdaptedBatchNorm(base, nora=self.batch_nora, **common)
        return AdaptedNorm(base, **common)


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
    router = ClientRouter(num_clusters, temperature=temperature, noise=noise)
    plan = _Plan(
        num_clusters=num_clusters, rank=rank, budget=budget, alpha=alpha, conv=conv, lora=lora, bias=bias, norm=norm,
        batch_nora=batch_nora, mixture=Mixture(), warn=warn,
    )  # fmt: skip
    wrapped = _add_adaptors(model, plan, router, copy=copy, generator=generator)
    if per_layer:
        _replace_router_by_layerwise(wrapped)
    return wrapped


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

    Args:
        model: Any module, without adaptors.
        rank: Rank of every low-rank adaptor, limited to the rank of its layer's weight. Either this or ``budget``.
        budget: Parameters of an adaptor divided by those of its base weight, in (0, 1].
        conv: Form of convolutions; "none" adds no low-rank adaptors to them.
        lora: Add low-rank adaptors to linear layers.
        bias: As in :func:`floral`, but without effect on the number, as adaptors of biases are not counted.
        norm: As in :func:`floral`, but without effect on the number, as adaptors of norms are not counted.

    Raises:
        RecipeError: Not exactly one of rank and budget is given, one is out of range, or layers share parameters.
    """
    check_size(rank, budget)
    # num_clusters, alpha, batch_nora and mixture do not matter here.
    plan = _Plan(
        num_clusters=1, rank=rank, budget=budget, alpha=1.0, conv=conv, lora=lora, bias=bias, norm=norm,
        batch_nora=False, mixture=Mixture(),
    )  # fmt: skip
    layers = find_layers(model, plan.wants)
    geometries = [plan.geometry(module) for module in layers.values()]
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
    if copy:
        model = _deep_copy(model)
    adapted = _adapt_layers(model, layers, plan)
    wrapped = FloralModel(adapted, router=router, mixture=plan.mixture, unadapted=unadapted)
    _initialise(wrapped, generator)
    _log_sizes(wrapped, plan)
    return wrapped


def _replace_router_by_layerwise(model: FloralModel) -> None:
    """Replace the model's router, which has one mixture for all layers, by one with a mixture per layer.

    :func:`floral` calls it with ``per_layer=True``. The new logits start equal for all clusters.
    """
    layers = list(model.layers().values())
    for index, layer in enumerate(layers):
        layer.layer_index = index  # the layer reads this row of the mixture weights (layers, clusters)
    old = model.router
    new = ClientRouter(model.num_clusters, temperature=old.temperature, noise=old.noise, layers=len(layers))
    model.router = new.to(old.theta).train(old.training)  # the device, dtype and mode of the old router


def _deep_copy(model: nn.Module) -> nn.Module:
    """Return a deep copy; raise a :class:`RecipeError` for models that cannot be copied."""
    try:
        return copying.deepcopy(model)
    except (RuntimeError, TypeError) as error:  # for example because of locks, or tensors with a graph
        name, reason = type(model).__name__, str(error).splitlines()[0]
        raise RecipeError(f"floral model: {name} cannot be copied ({reason}); give copy=False") from None


def check_settings(alpha: float, conv: str) -> None:
    """Check two settings of :func:`floral`.

    Args:
        alpha: Factor of the adaptors' outputs.
        conv: How the two factors of a convolution's adaptor divide the kernel, one of ``CONV_FORMS``.

    Raises:
        RecipeError: ``alpha`` is not a finite number, or ``conv`` is not in ``CONV_FORMS``.
    """
    if not is_number(alpha):
        raise RecipeError(f"floral alpha: got {alpha!r}; allowed: a finite number")
    if conv not in CONV_FORMS:
        raise RecipeError(
            f"floral conv: got {conv!r}; allowed: {', '.join(CONV_FORMS)}.{did_you_mean(str(conv), CONV_FORMS)}"
        )


def check_flags(**flags: bool) -> None:
    """Raise a :class:`RecipeError` if a setting is not a boolean, such as the text "no"."""
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
        base = model.get_submodule(name)
        model = replace_module(model, name, plan.adapt(base))
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            # Disables a fast path in eval mode, which does not call the linear layers' forward.
            module.activation_relu_or_gelu = 0
    return model


def _initialise(model: FloralModel, generator: torch.Generator | None) -> None:
    """Draw the adaptors' initial values, and match the new modules to the caller's model.

    The router gets the adaptors' device, and their dtype or float32, whichever is wider. All modules get the training
    or eval mode of the caller's model.

    Args:
        model: The model with adaptors.
        generator: Generator of the initial values; None: torch's global one.
    """
    layers = model.layers().values()
    for layer in layers:
        layer.reset(generator)
    first_layer = next(iter(layers))
    first_adaptor = next(first_layer.parameters(recurse=False))
    router_dtype = torch.promote_types(first_adaptor.dtype, torch.float32)  # at least float32
    model.router.to(device=first_adaptor.device, dtype=router_dtype)
    caller_model = model.model
    model.train(caller_model.training)
    if model.unadapted:
        logger.debug("floral: no adaptors in %s", shorten(model.unadapted, 20))


def _log_sizes(model: FloralModel, plan: _Plan) -> None:
    """Log a warning if some adaptors have a smaller rank than asked for, or exceed the budget (if ``plan.warn``)."""
    # Adapted layers by their names in the caller's model, for the warning: "model.fc1" of the wrapper is its "fc1".
    bases = {name.removeprefix("model."): layer.base for name, layer in model.layers().items()}
    num_low_rank_layers = sum(plan.rank_one_geometry(base) is not None for base in bases.values())
    if plan.rank is not None:
        log_limited(plan.rank, plan.layers_below_rank(bases), num_low_rank_layers)
        return
    if not plan.warn:
        return
    assert plan.budget is not None
    parameters = sizes(model)
    log_excess(
        plan.budget,
        plan.layers_over_budget(bases),
        num_low_rank_layers,
        clusters=plan.num_clusters,
        growth=parameters.adaptors / parameters.base,
    )
