"""The methods, one page each, and their registry."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from comingle.errors import LARGEST, RecipeError, did_you_mean, is_number
from comingle.methods.base import Method
from comingle.methods.centralized import centralized
from comingle.methods.comigs import comigs, comigs_1g1s, comigs_1gxs, comigs_2g, comigs_2s, comigs_tr
from comingle.methods.ensemble import ensemble, ensemble_optimal, local_adaptor
from comingle.methods.factors import fedsa_lora, ffa_lora
from comingle.methods.fdlora import fdlora
from comingle.methods.fedavg import fedavg, fedavg_plus
from comingle.methods.fedem import fedem
from comingle.methods.fedit import fedit, fedlora
from comingle.methods.fedmerge import fedmerge, fedmerge_fixed
from comingle.methods.flexlora import flexlora
from comingle.methods.floral import floral, floral_mfl, floral_optimal
from comingle.methods.hetlora import hetlora
from comingle.methods.ifca import ifca
from comingle.methods.local import local
from comingle.methods.mfl import fml, mfl
from comingle.methods.moe import fedavg_moe, fedavg_moe_tr, local_moe, local_moe_tr
from comingle.methods.pcl import pcl
from comingle.methods.pfedmoe import pfedmoe
from comingle.methods.pretrained import pretrained

REGISTRY: dict[str, Callable[..., Method]] = {
    "pretrained": pretrained,
    "centralized": centralized,
    "local": local,
    "fedavg": fedavg,
    "ffa-lora": ffa_lora,
    "fedsa-lora": fedsa_lora,
    "pcl": pcl,
    "fdlora": fdlora,
    "hetlora": hetlora,
    "flexlora": flexlora,
    "local-moe": local_moe,
    "fedavg-moe": fedavg_moe,
    "pfedmoe": pfedmoe,
    "local-moe-tr": local_moe_tr,
    "fedavg-moe-tr": fedavg_moe_tr,
    "comigs-tr": comigs_tr,
    "comigs": comigs,
    "comigs-1g1s": comigs_1g1s,
    "comigs-2g": comigs_2g,
    "comigs-2s": comigs_2s,
    "comigs-1gxs": comigs_1gxs,
    "floral": floral,
    "floral-optimal": floral_optimal,
    "floral-mfl": floral_mfl,
    "local-adaptor": local_adaptor,
    "ensemble": ensemble,
    "ensemble-optimal": ensemble_optimal,
    "mfl": mfl,
    "fml": fml,
    "fedmerge": fedmerge,
    "fedmerge-fixed": fedmerge_fixed,
    "fedavg+": fedavg_plus,
    "ifca": ifca,
    "fedem": fedem,
    "fedit": fedit,
    "fedlora": fedlora,
}


def settings_of(name: str) -> dict[str, Any]:
    """The settings that a method takes, with their defaults.

    Raises:
        RecipeError: an unknown method, with the nearest known one.
    """
    parameters = inspect.signature(_constructor(name)).parameters.values()
    return {p.name: p.default for p in parameters if p.name != "name"}


def settings_beside(name: str, chosen: str, settings: Mapping[str, Any], for_all: Mapping[str, Any]) -> dict[str, Any]:
    """What a method gets of a recipe whose ``chosen`` method has ``settings``: these if it is that, defaults if not.

    What is ``for_all`` goes to every method that has such a setting.
    """
    known = settings_of(name)
    common = {key: value for key, value in for_all.items() if key in known}
    return {**{key: value for key, value in settings.items() if name == chosen and key not in for_all}, **common}


def make(name: str, **settings: Any) -> Method:
    """The method called ``name`` with the given settings.

    Raises:
        RecipeError: an unknown method or setting, with the nearest known one, or a value out of range.
    """
    known = settings_of(name)
    for key, value in settings.items():
        if key not in known:
            allowed = ", ".join(sorted(known)) or "no settings"
            raise RecipeError(f"method {name}: no setting {key!r}.{did_you_mean(key, known)} Allowed: {allowed}")
        _check(name, key, value)
    method = _constructor(name)(**settings)
    specialists = method.placement.specialists
    if method.placement.generalists + min((specialists,) if isinstance(specialists, int) else specialists) < 1:
        raise RecipeError(f"method {name}: generalists + specialists is 0 for some user; at least 1 expert is needed")
    return method


def _constructor(name: str) -> Callable[..., Method]:
    if name not in REGISTRY:
        raise RecipeError(f"method: no method {name!r}.{did_you_mean(name, REGISTRY)} Allowed: {', '.join(REGISTRY)}")
    return REGISTRY[name]


def _check(name: str, key: str, value: Any) -> None:
    """A value of the kind and in the range of its default; ``specialists`` may be a list of numbers."""
    allowed = _allowed(key, settings_of(name)[key])
    values = value if key == "specialists" and isinstance(value, list | tuple) else [value]
    if not values or not all(allowed[1](v) for v in values):
        raise RecipeError(f"method {name}: {key} is {value!r}; allowed: {allowed[0]}")


def _allowed(key: str, default: Any) -> tuple[str, Callable[[Any], bool]]:
    """What a setting may be, in words and as a test."""
    if isinstance(default, str):
        words = ("head", "all") if default in ("head", "all") else ("train", "valid")
        return ", ".join(words), lambda v: v in words
    if isinstance(default, bool):
        return "true, false", lambda v: isinstance(v, bool)
    if key == "temperature":
        return f"numbers above 0, up to {LARGEST:.0e}", lambda v: is_number(v) and v > 0
    if isinstance(default, float):
        below_one = key in ("gamma", "outer_momentum")
        words = "numbers from 0" + (", below 1" if below_one else f" to {LARGEST:.0e}")
        return words, lambda v: is_number(v) and v >= 0 and not (below_one and v >= 1)
    least = 0 if key in ("generalists", "specialists", "warmup_steps") else 1
    most = next((most for keys, most in _MOST.items() if key in keys), 10_000_000)
    words = f"whole numbers from {least} to {most:,}"
    return words, lambda v: isinstance(v, int) and not isinstance(v, bool) and least <= v <= most


_MOST = {("generalists", "specialists"): 1_000, ("clusters", "models", "chosen"): 10_000}
"""How many experts each block may have, and how many components or models a federation."""
