"""What kinds on a language model have in common: the base with adapters or with a client-level mixture."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch

from comingle.config import Recipe
from comingle.config.settings import AdapterSettings, Targets
from comingle.data.samples.samples import SPLITS
from comingle.engines.state import NEEDS_CLUSTERS
from comingle.methods.base import Method
from comingle.models.adapted import AdaptedModel, adapt
from comingle.models.base import Base, tokenizer_of
from comingle.models.ensembles import EnsembleModel, ensemble
from comingle.models.floral.wrapper import adaptor_size
from comingle.models.floral_language import MixedLanguageModel, mix_language_model
from comingle.models.hardware import require_room
from comingle.models.injection import ExpertCounts
from comingle.models.loading import backbone
from comingle.models.lora import lora_scale
from comingle.models.model import Model
from comingle.utils.errors import RecipeError
from comingle.utils.trees import BASE

COMPILE_FROM, OVERHEAD = 5e12, 8e6
"""``compile: auto`` compiles from this many training tokens times base parameters on: below, it takes longer than it
saves. Compiling takes some tens of seconds whatever the model; SmolLM2-135M gets there with 35,000 tokens. What
a token takes of any model, and compiled code saves most of, counts as ``OVERHEAD`` parameters: stories260K gets there
with 610,000."""

NETS = "net:"
"""How a recipe's ``base`` names a net, as "net:mlp"."""

ADAPTOR_SETS = "adaptor sets"

_FOR_NETS = "nets are for users with samples (data.kind: samples)"


def require_rows(base: Base, user: Any) -> None:
    """Refuse a user's tokens that the base has no rows for.

    Raises:
        DataError: it has none for some.
    """
    parts = [getattr(user, split) for split in SPLITS]
    begin = [] if base.begin is None else [base.begin]
    for tokens in (begin, *(part if isinstance(part, torch.Tensor) else part.windows for part in parts)):
        base.require_rows(tokens, f"user {user.name!r}")


def rows_key(base: Base) -> list[int]:
    """Return the rows of the base's embedding where its tokenizer has more tokens, as only then some are refused."""
    return [base.rows] if base.rows < len(tokenizer_of(base)) else []  # type: ignore[arg-type]


def check_on_language(recipe: Recipe, method: Method) -> None:
    """Whether the method and the base are for users of a language model.

    Raises:
        RecipeError: they are not.
    """
    if recipe.base.startswith(NETS):
        raise RecipeError(f"base: got {recipe.base!r} for text; allowed: a language model; {_FOR_NETS}")
    needs = method.placement.needs
    if BASE in {role.partition(".")[0] for role in needs}:
        what = ", ".join(sorted(needs))
        raise RecipeError(f"method {method.name}: is about {what}, and a language model's base is frozen; {_FOR_NETS}")
    if (mixture := method.placement.mixture) is None or mixture.trains_apart:
        return
    if mixture.of != "adaptors":
        raise RecipeError(f"method {method.name}: mixes whole models, which are small nets; {_FOR_NETS}")
    if mixture.optimal and not recipe.data.cluster_numbers:
        raise RecipeError(f"method {method.name}: {NEEDS_CLUSTERS}")
    if mixture.optimal and mixture.clusters < (true := len(set(recipe.data.cluster_numbers.values()))):
        raise RecipeError(
            f"method {method.name}: clusters is {mixture.clusters}; allowed: from {true}, as data.clusters"
        )
    if mixture.centre:
        raise RecipeError(f"method {method.name}: centre moves a mean into the base, which is frozen; leave it out")
    if not isinstance(rank := recipe.adapters.rank, int):
        raise RecipeError(f"method {method.name}: adapters.rank is {rank}; components have one rank for all users")


def language_model(recipe: Recipe, base: Base, method: Method, trainers: int, tokens: int) -> Model:
    """The base as the method trains it, for so many trainers and training tokens."""
    mixture = method.placement.mixture
    if mixture is not None and not mixture.trains_apart:
        return mix_base(recipe, base, method, trainers)
    return adapt_base(recipe, base, method, trainers, tokens)


def adapt_base(recipe: Recipe, base: Base, method: Method, trainers: int, tokens: int) -> AdaptedModel | EnsembleModel:
    """The base with the adapters that the recipe and the method ask for, for so many trainers and training tokens.

    Whole models whose predictions are mixed have generalists for experts, as many as the mixture says.
    """
    section, mixture = recipe.adapters, method.placement.mixture
    targets = Targets(**as_settings(section.targets, Targets)) if section.targets else None
    settings = AdapterSettings(**{**as_settings(section, AdapterSettings), "targets": targets})
    if method.placement.pooled and not isinstance(settings.rank, int):  # the one trainer can afford what anybody can
        settings = replace(settings, rank=max(settings.rank))
    specialists = method.placement.specialists_of(trainers)
    counts = ExpertCounts(generalists=method.placement.generalists, specialists=specialists)
    if mixture is not None:
        counts = ExpertCounts(generalists=mixture.experts, specialists=(0,) * trainers)
    compiled = recipe.runtime.compile
    if compiled == "auto":
        compiled = method.trains and tokens * (base.model.num_parameters() + OVERHEAD) >= COMPILE_FROM
    placement = method.placement
    model = adapt(
        base,
        settings,
        counts,
        routed=placement.routed,
        gating=placement.gating,
        compiled=bool(compiled),
        residual=placement.residual,
        checkpointed=recipe.runtime.gradient_checkpointing,
    )
    for name in recipe.runtime.gpu:
        from comingle.models.cuda_graphs import recorded
        from comingle.models.gpu_experts import with_triton

        model = {"graphs": recorded, "triton": with_triton}[name](model)
    if mixture is None:
        return model
    return ensemble(model, mixture, generalists=method.placement.generalists, specialists=max(specialists))


def mix_base(recipe: Recipe, base: Base, method: Method, users: int) -> MixedLanguageModel:
    """A frozen language model with the method's mixture of adaptors, of the rank and alpha that LoRA has elsewhere.

    Raises:
        RecipeError: a mixture of whole models, or ranks of each user's own.
    """
    check_on_language(recipe, method)
    _check_plain(recipe, method)
    mixture, section = method.placement.mixture, recipe.adapters
    assert mixture is not None
    assert isinstance(section.rank, int)
    alpha = lora_scale(section.alpha, section.rank)
    size = adaptor_size(backbone(base.model), rank=section.rank, bias=False, norm=False)
    require_room(f"method {method.name}", mixture.clusters, size, ADAPTOR_SETS)
    return mix_language_model(base, mixture, users=users, rank=section.rank, alpha=alpha)


def _check_plain(recipe: Recipe, method: Method) -> None:
    for key, found in {
        "quantise": recipe.quantise != "none",
        "runtime.gradient_checkpointing": recipe.runtime.gradient_checkpointing,
        "runtime.gpu": recipe.runtime.gpu,
    }.items():
        if found:
            raise RecipeError(f"{key}: method {method.name} wraps every linear by itself; allowed: methods of LoRAs")


def as_settings(section: Any, kind: type) -> dict[str, Any]:
    """The fields of a pydantic section that a frozen dataclass of the inside has too, lists as tuples."""
    values = {f.name: getattr(section, f.name) for f in fields(kind)}
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
