"""Where the attention and MLP linears of a model family are.

A :class:`Targets` names them relative to a decoder layer. The known ones are matched by the names that a layer really
has, so a family that spells its layers like Llama works without being listed; a layer with any linear that a layout
does not name is never adapted in part: it is refused with the names found.
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
"""By the family whose spelling it is; "llama" serves Llama, SmolLM, Qwen 2 and 3, Gemma 2 and 3, Mistral and others."""


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The list of decoder layers: the longest list of equal modules in the model.

    Raises:
        BaseModelError: the model has no such list.
    """
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len({type(x) for x in m}) == 1]
    if not lists:
        raise BaseModelError(f"{type(model).__name__}: no list of decoder layers found; got {_linears(model)}")
    return max(lists, key=len)


def linear_names(module: nn.Module) -> Iterator[str]:
    """Names of the linears below ``module``: ``nn.Linear`` and GPT-2's ``Conv1D``."""
    return (n for n, m in module.named_modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D")


def find_targets(model: nn.Module, targets: TargetsSection | None = None) -> TargetsSection:
    """The targets for ``model``: those given, checked, or the known layout that names exactly its layers' linears.

    Raises:
        BaseModelError: an unknown family, or targets that a layer does not have; names the linears found.
    """
    layer = decoder_layers(model)[0]
    linears = set(linear_names(layer))
    if targets is not None:
        for key, name in targets.named():
            if name not in linears:
                raise BaseModelError(
                    f"adapters.targets.{key}: no linear named {name!r} in a decoder layer; got {sorted(linears)}."
                    + _relative(name, linears)
                )
        _check_mlp(targets, linears)
        return targets
    for known in KNOWN.values():
        if known.names == linears:
            return known
    raise BaseModelError(
        f"{type(model).__name__}: unknown family, its layers have the linears {sorted(linears)}; name them in the "
        "recipe: adapters: {targets: {attention: [...], up: NAME, down: NAME, gate: NAME or null, "
        "mlp: NAME of the MLP module}}, all relative to a decoder layer (docs/recipes.md has an example)"
    )


def _relative(name: str, linears: set[str]) -> str:
    """A hint for a name that is right but for where it starts."""
    near = sorted(n for n in linears if name.endswith(f".{n}") or n.endswith(f".{name}"))
    return f" Names are relative to a decoder layer: {near[0]!r}." if near else did_you_mean(name, sorted(linears))


def _check_mlp(targets: TargetsSection, linears: set[str]) -> None:
    """The module that a mixture replaces holds the MLP's linears and no other, or something would be lost silently."""
    of_mlp = targets.names - set(targets.attention)
    if targets.mlp:
        inside = {name for name in linears if name.startswith(f"{targets.mlp}.")}
    else:
        inside = {name for name in (targets.up, targets.down) if "." not in name}
    if inside != of_mlp:
        raise BaseModelError(
            f"adapters.targets.mlp: {targets.mlp!r} holds the linears {sorted(inside)}; it must be the module that "
            f"holds exactly {sorted(of_mlp)} (empty only where the layer itself holds up and down, without a gate)"
        )


def activation_name(model: nn.Module, targets: TargetsSection) -> str:
    """The MLP's activation, by transformers' name.

    Raises:
        BaseModelError: an activation without a known derivative here.
    """
    config = model.config
    keys = ("hidden_activation", "hidden_act", "activation_function", "hidden_activation_fn", "activation")
    activation = targets.activation or next((v for k in keys if isinstance(v := getattr(config, k, None), str)), None)
    if activation not in ACTIVATIONS:
        raise BaseModelError(
            f"{type(model).__name__}: MLP activation {activation!r}; allowed: {sorted(ACTIVATIONS)}; where one of them "
            "is the same function, name it in the recipe: adapters.targets.activation"
        )
    return activation


def _linears(model: nn.Module) -> list[str]:
    return sorted(linear_names(model))[:8]
