"""Allowed values of a method's settings, as annotations of its constructor's parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from comingle.config.settings import values_in
from comingle.utils.errors import LARGEST, did_you_mean, is_number


@dataclass(frozen=True, kw_only=True)
class Range:
    """Numbers from ``least`` to ``most``; ``above`` excludes the least, ``below`` the most."""

    least: float = -LARGEST
    most: float = LARGEST
    above: bool = False
    below: bool = False

    def describe(self, kind: type) -> str:
        """Return a description of the allowed values, for messages, such as "numbers from 0 to 1".

        Args:
            kind: Type of the setting: int or float.
        """
        if kind is int:
            return f"whole numbers from {self.least:,} to {self.most:,}"
        if self.least == -LARGEST and self.most == LARGEST:  # the defaults: any number that a setting may have
            return "numbers"
        most = f"{self.most:g}"
        if self.above:
            return f"numbers above {self.least:g}, {'below' if self.below else 'up to'} {most}"
        return f"numbers from {self.least:g}{', below' if self.below else ' to'} {most}"

    def fits(self, kind: type, value: Any) -> bool:
        """Return whether a value is allowed; booleans are not numbers.

        Args:
            kind: Type of the setting: int, which also refuses floats, or float.
            value: The value.
        """
        if not is_number(value) or (kind is int and not isinstance(value, int)):
            return False
        is_large_enough = value > self.least if self.above else value >= self.least
        return is_large_enough and (value < self.most if self.below else value <= self.most)


Count = Annotated[int, Range(least=1, most=10_000_000)]
CountOrNone = Annotated[int, Range(least=0, most=10_000_000)]
"""A count, or 0."""
Models = Annotated[int, Range(least=1, most=10_000)]
"""Number of components or models of a federation."""
Experts = Annotated[int, Range(least=0, most=1_000)]
"""Number of experts in each block."""
ExpertsOfUsers = Annotated[int | Sequence[int] | Mapping[str, int], Range(least=0, most=1_000)]
"""Number of experts in each block: one for all users, or a list or a mapping with one for each."""
NotNegative = Annotated[float, Range(least=0)]
Positive = Annotated[float, Range(least=0, above=True)]
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
    """Return a hint for an unknown setting: a setting that is called so elsewhere, or the nearest spelling."""
    synonym = next((name for name in _SYNONYMS.get(key.lower(), ()) if name in known), None)
    return f" Did you mean {synonym!r}?" if synonym else did_you_mean(key, known)


Fits = Callable[[Any], bool]


def allowed_values(constructor: Callable[..., object]) -> dict[str, tuple[str, Fits]]:
    """Return the allowed values of each setting of a constructor: a description and a test.

    Settings without a range must have the type of their annotation.
    """
    hints = get_type_hints(constructor, include_extras=True)
    return {key: _allowed_by_annotation(hint) for key, hint in hints.items() if key != "return"}


def _allowed_by_annotation(hint: Any) -> tuple[str, Fits]:
    """Return the allowed values of a setting: a description for messages, and a function that tests a value.

    Args:
        hint: Annotation of the setting, such as ``bool``, ``Literal["mean", "sum"]`` or ``Annotated[int, Range(...)]``.
    """
    # Annotated[TYPE, Range(...)] has its range in __metadata__ and TYPE in __origin__.
    limit = next((item for item in getattr(hint, "__metadata__", ()) if isinstance(item, Range)), None)
    plain = hint.__origin__ if hasattr(hint, "__metadata__") else hint
    if get_origin(plain) is Literal:
        choices = get_args(plain)
        return ", ".join(map(str, choices)), lambda v: v in choices
    if limit is None:
        return allowed_by_type(plain)
    kinds = get_args(plain) or (plain,)  # the types of a union, or the single type
    # With several kinds, such as int | Sequence[int], a list or a mapping is allowed too: one number for each user.
    kind, accepts_lists = int if int in kinds else float, len(kinds) > 1
    return limit.describe(kind), lambda v: _fits(limit, kind, v, accepts_lists)


def _fits(limit: Range, kind: type, value: object, accepts_lists: bool) -> bool:
    """Return whether a setting's value is within a range.

    A list or a mapping fits if it has an element and all elements are within the range.

    Args:
        limit: The range.
        kind: Type of the numbers: int or float.
        value: The setting's value.
        accepts_lists: Whether the setting also accepts a list of numbers, or a mapping from users to numbers.
    """
    values = values_in(value) if accepts_lists else [value]
    return bool(values) and all(limit.fits(kind, each) for each in values)


def allowed_by_type(kind: object) -> tuple[str, Fits]:
    """Return the allowed values of a setting without a range: a description for messages, and a test of a value.

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
