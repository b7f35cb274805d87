"""What the sections of a recipe are made of."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from comingle.utils.errors import LARGEST

Count = Annotated[int, Field(ge=1, le=10**15, strict=True)]
"""Above it are only slips of the hand, and numbers that no tensor can count."""
Steps = Annotated[int, Field(ge=1, le=10_000_000, strict=True)]
"""What is done one after the other."""
Positive = Annotated[float, Field(gt=0, le=LARGEST)]
NotNegative = Annotated[float, Field(ge=0, le=LARGEST)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Source = Annotated[str, Field(min_length=1)]
TokenLimit = Count | dict[str, Count] | None
"""How many tokens of a split are kept: one number for all users, or one for each user named."""


class Section(BaseModel):
    """A mapping whose keys are all known."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def plain_name(section: Any, *, key: str = "name") -> Any:
    """A section that may be written as its name alone, which it has under ``key``."""
    return {key: section} if isinstance(section, str) else section


def number_in(value: Any) -> Any:
    """The number in a text such as "1e-3", which YAML 1.1 takes for text; anything else as it is."""
    exponential = isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value)
    return float(value) if exponential else value
