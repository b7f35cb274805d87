"""Names of the attention and MLP linears in each model family.

A :class:`~comingle.config.settings.TargetsSection` names them relative to a decoder layer. A known layout is chosen by
comparing its names with those of the model's layers, so a family that uses Llama's names works without being listed. A
layer with a linear that no layout names is not adapted partially: the model is rejected, and the error lists the names
found.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from comingle.config.settings import TargetsSection
from comingle.models.kernels.expert_mlp import ACTIVATIONS
from comingle.utils.errors import BaseModelError, did_you_mean

_QKVO = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")

KNOWN: dict[str, TargetsSection] = {
    "llama": TargetsSection(attention=_QKVO, gate="mlp.gate_proj", up="mlp.up_proj", down="mlp.down_proj", mlp="mlp"),
    "gpt2": TargetsSection(attention=("attn.c_attn", "attn.c_proj"), up="mlp.c_fc", down="mlp.c_proj", mlp="mlp"),
    "gpt_neox": TargetsSection(
        attention=("attention.query_key_value", "attention.dense"),
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        mlp="mlp",
    ),
    "phi": TargetsSection(attention=(*_QKVO[:3], "self_attn.dense"), up="mlp.fc1", down="mlp.fc2", mlp="mlp"),
    "opt": TargetsSection(attention=(*_QKVO[:3], "self_attn.out_proj"), up="fc1", down="fc2"),
}
"""Layouts by family. "llama" also fits SmolLM, Qwen 2 and 3, Gemma 2 and 3, Mistral and others."""


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the decoder layers: the longest ``ModuleList`` in the model whose modules have the same type.

    Raises:
        BaseModelError: The model has no such list.
    """
    uniform_lists = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            types = {type(item) for item in module}
            if len(types) == 1:
                uniform_lists.append(module)
    if not uniform_lists:
        raise BaseModelError(f"{type(model).__name__}: no list of decoder layers found; got {_linears(model)}")
    return max(uniform_lists, key=len)


def linear_names(module: nn.Module) -> Iterator[str]:
    """Yield the names of the linears below ``module``: ``nn.Linear`` and GPT-2's ``Conv1D``."""
    for name, submodule in module.named_modules():
        if isinstance(submodule, nn.Linear) or type(submodule).__name__ == "Conv1D":
            yield name


def find_targets(model: nn.Module, targets: TargetsSection | None = None) -> TargetsSection:
    """Return the names of the linears of each decoder layer that get adapters.

    Args:
        model: The base model.
        targets: Names from the recipe, which are checked and returned; None to choose the known family whose names
            equal those of the layers' linears.

    Raises:
        BaseModelError: The family is unknown, or a layer lacks a target; the error lists the linears found.
    """
    layer = decoder_layers(model)[0]  # all layers have the same linears
    linears = set(linear_names(layer))
    if targets is not None:
        for key, name in targets.named():
            if name not in linears:
                raise BaseModelError(
                    f"adapters.targets.{key}: no linear named {name!r} in a decoder layer; got {sorted(linears)}."
                    + _name_hint(name, linears)
                )
        _raise_unless_whole_mlp(targets, linears)
        return targets
    for known in KNOWN.values():
        if known.names == linears:
            return known
    raise BaseModelError(
        f"{type(model).__name__}: unknown family, its layers have the linears {sorted(linears)}; name them in the "
        "recipe: adapters: {targets: {attention: [...], up: NAME, down: NAME, gate: NAME or null, "
        "mlp: NAME of the MLP module}}, all relative to a decoder layer (docs/recipes.md has an example)"
    )


def _name_hint(name: str, linears: set[str]) -> str:
    """Return a hint for a name that has a wrong prefix, such as "up_proj" for "mlp.up_proj", or is misspelt.

    Args:
        name: The name in the recipe.
        linears: The names of the linears in a decoder layer.
    """
    with_other_prefix = []
    for linear in sorted(linears):
        if name.endswith(f".{linear}") or linear.endswith(f".{name}"):
            with_other_prefix.append(linear)
    if with_other_prefix:
        return f" Names are relative to a decoder layer: {with_other_prefix[0]!r}."
    return did_you_mean(name, sorted(linears))


def _raise_unless_whole_mlp(targets: TargetsSection, linears: set[str]) -> None:
    """Raise an error unless the module ``targets.mlp``, which adapters replace, holds the MLP's linears and no others.

    Args:
        targets: Target modules; ``mlp`` is empty if the decoder layer itself holds the linears.
        linears: Names of all linears in a decoder layer.

    Raises:
        BaseModelError: Linears are missing, or there are others.
    """
    mlp_linears = targets.names - set(targets.attention)
    if targets.mlp:
        held = {name for name in linears if name.startswith(f"{targets.mlp}.")}
    else:  # the layer itself holds the MLP's linears
        held = {name for name in (targets.up, targets.down) if "." not in name}
    if held != mlp_linears:
        raise BaseModelError(
            f"adapters.targets.mlp: {targets.mlp!r} holds the linears {sorted(held)}; it must be the module that "
            f"holds exactly {sorted(mlp_linears)} (empty only where the layer itself holds up and down, without a gate)"
        )


def activation_name(model: nn.Module, targets: TargetsSection) -> str:
    """Return the MLP's activation, by its name in transformers.

    Args:
        model: The model, whose configuration names the activation.
        targets: Target modules; its ``activation`` takes precedence.

    Raises:
        BaseModelError: The activation's derivative is not implemented.
    """
    # Families name the setting differently; Gemma 2 has both of the first two and uses the first.
    keys = ("hidden_activation", "hidden_act", "activation_function", "hidden_activation_fn", "activation")
    activation = targets.activation
    for key in keys:
        configured = getattr(model.config, key, None)
        if not activation and isinstance(configured, str):
            activation = configured
    if activation not in ACTIVATIONS:
        raise BaseModelError(
            f"{type(model).__name__}: MLP activation {activation!r}; allowed: {sorted(ACTIVATIONS)}; where one of them "
            "is the same function, name it in the recipe: adapters.targets.activation"
        )
    return activation


def _linears(model: nn.Module) -> list[str]:
    """Return the names of some linears, for messages."""
    return sorted(linear_names(model))[:8]
