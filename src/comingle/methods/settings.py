"""Allowed values of a method's settings, as annotations of its constructor's parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from comingle.config.settings import AUTO, values_in
from comingle.utils.errors import LARGEST, did_you_mean, is_number


@dataclass(frozen=True, kw_only=True)
class Range:
    """Numbers from ``least`` to ``most``: ``above`` excludes ``least`` itself, ``below`` excludes ``most``."""

    least: float = -LARGEST
    most: float = LARGEST
    above: bool = False
    below: bool = False

    def describe(self, kind: type) -> str:
        """Return a description of the allowed values, such as "numbers from 0 to 1" or "numbers from 0, below 1".

        Args:
            kind: Type of the setting: int or float.
        """
        if kind is int:  # bounds of whole numbers are always included: `above` and `below` are for floats
            return f"whole numbers from {self.least:,} to {self.most:,}"
        is_unlimited = self.least == -LARGEST and self.most == LARGEST
        if is_unlimited:
            return "numbers"
        least, most = f"{self.least:g}", f"{self.most:g}"
        if self.above and self.below:
            return f"numbers above {least}, below {most}"
        if self.above:
            return f"numbers above {least}, up to {most}"
        if self.below:
            return f"numbers from {least}, below {most}"
        return f"numbers from {least} to {most}"

    def fits(self, kind: type, value: Any) -> bool:
        """Return whether a value is a number within the range; booleans are not numbers.

        Args:
            kind: Type of the setting: int, which also refuses floats, or float.
            value: The value.
        """
        if not is_number(value):
            return False
        if kind is int and not isinstance(value, int):
            return False
        is_large_enough = value > self.least if self.above else value >= self.least
        is_small_enough = value < self.most if self.below else value <= self.most
        return is_large_enough and is_small_enough


Count = Annotated[int, Range(least=1, most=10_000_000)]
CountOrNone = Annotated[int, Range(least=0, most=10_000_000)]
"""A count, or 0."""
Models = Annotated[int, Range(least=1, most=10_000)]
"""Number of components or models of a federation."""
Experts = Annotated[int, Range(least=0, most=1_000)]
"""Number of experts in each block."""
ExpertsOfUsers = Annotated[int | Sequence[int] | Mapping[str, int] | Literal["auto"], Range(least=0, most=1_000)]
"""Number of experts in each block: one for all users, a list or a mapping with one for each, or "auto"."""
NotNegative = Annotated[float, Range(least=0)]
Positive = Annotated[float, Range(least=0, above=True)]
Share = Annotated[float, Range(least=0, most=1)]
BelowOne = Annotated[float, Range(least=0, most=1, below=True)]

_SYNONYMS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("mu", "proximal_mu", "prox_mu", "prox"), ("proximal", "nearness")),
    **dict.fromkeys(
        ("lambda", "lam", "lamda", "lambda_", "reg", "penalty"), ("nearness", "regularisation", "proximal")
    ),
    **dict.fromkeys(("k", "n_clusters", "num_clusters", "c"), ("clusters", "models")),
    **dict.fromkeys(("m", "n_models", "num_models", "components", "n_components"), ("models", "clusters")),
    **dict.fromkeys(("num_experts", "n_experts", "experts"), ("specialists", "experts", "models")),
    **dict.fromkeys(("server_lr", "server_learning_rate", "global_lr"), ("server_rate", "global_rate", "outer_rate")),
    **dict.fromkeys(("outer_lr", "outer_learning_rate"), ("outer_rate", "server_rate")),
    **dict.fromkeys(("server_momentum", "beta", "beta1"), ("outer_momentum", "momentum")),
    **dict.fromkeys(("router_interval", "update_every"), ("router_every", "exchange_every")),
    **dict.fromkeys(("tau", "temp"), ("temperature", "router_every")),
}
"""Names of settings in papers and other libraries, and the settings that they may stand for."""


def setting_hint(key: str, known: Collection[str]) -> str:
    """Return a hint for an unknown setting, such as " Did you mean 'proximal'?" for "mu", or an empty string.

    Args:
        key: The unknown setting, perhaps a name in papers or in other libraries.
        known: The method's settings.
    """
    for synonym in _SYNONYMS.get(key.lower(), ()):
        if synonym in known:
            return f" Did you mean {synonym!r}?"
    return did_you_mean(key, known)


Fits = Callable[[Any], bool]


def allowed_values(constructor: Callable[..., object]) -> dict[str, tuple[str, Fits]]:
    """Return the allowed values of each setting of a method, from the annotations of the method's constructor.

    Args:
        constructor: Function that returns the method; its parameters are the settings.

    Returns:
        By setting a description for messages, such as "numbers from 0 to 1", and a function that tests a value.
    """
    hints = get_type_hints(constructor, include_extras=True)
    return {key: _allowed_by_annotation(hint) for key, hint in hints.items() if key != "return"}


def _allowed_by_annotation(hint: Any) -> tuple[str, Fits]:
    """Return the allowed values of a setting: a description for messages, and a function that tests a value.

    Args:
        hint: Annotation of the setting, such as ``bool``, ``Literal["mean", "sum"]`` or ``Annotated[int, Range(...)]``.
    """
    is_annotated = hasattr(hint, "__metadata__")  # Annotated[TYPE, ...]
    setting_type = hint.__origin__ if is_annotated else hint
    metadata = hint.__metadata__ if is_annotated else ()
    ranges = [item for item in metadata if isinstance(item, Range)]
    if get_origin(setting_type) is Literal:
        choices = get_args(setting_type)
        return ", ".join(map(str, choices)), lambda value: value in choices
    if not ranges:
        return allowed_by_type(setting_type)
    allowed_range = ranges[0]
    types = get_args(setting_type) or (setting_type,)  # the types of a union, or the single type
    number_type = int if int in types else float
    description = allowed_range.describe(number_type)
    has_values_by_user = len(types) > 1  # int | Sequence[int] | Mapping[str, int]
    if Literal["auto"] in types:
        return f"{description}, or auto", lambda value: value == AUTO or _all_fit(allowed_range, number_type, value)
    if has_values_by_user:
        return description, lambda value: _all_fit(allowed_range, number_type, value)
    return description, lambda value: allowed_range.fits(number_type, value)


def _all_fit(allowed_range: Range, number_type: type, value: object) -> bool:
    """Return whether a number, or all numbers of a list or a mapping, are within a range; False if there are none.

    Args:
        allowed_range: The range.
        number_type: Type of the numbers: int or float.
        value: The value, such as ``3``, ``[3, 0]`` or ``{"ada": 3, "ben": 0}``.
    """
    numbers = values_in(value)
    if not numbers:  # an empty list or mapping, which has no value for any user
        return False
    return all(allowed_range.fits(number_type, number) for number in numbers)


def allowed_by_type(kind: object) -> tuple[str, Fits]:
    """Return, for a setting without a range, a description of the allowed values and a function that tests a value.

    Args:
        kind: Type of the setting. All values are allowed for types other than bool, int, float and str.
    """
    if kind is bool:
        return "true, false", lambda v: isinstance(v, bool)
    if kind is int:
        return "whole numbers", lambda v: isinstance(v, int) and not isinstance(v, bool)
    if kind is float:
        return "numbers", is_number
    if kind is str:
        return "text", lambda v: isinstance(v, str)
    return "anything", lambda v: True
