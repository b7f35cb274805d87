"""What users tell in words, checked before it gets into events, metrics and logs.

A user may be mistaken or mean harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError, field_validator

from comingle.config.data import Section, Steps
from comingle.config.hints import first_problem
from comingle.utils.errors import MessageError
from comingle.utils.records import MEASURES

_LONGEST = 400
_Key = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
_Amount = Annotated[int, Field(ge=0, le=10**15, strict=True)]
_Whole = Annotated[int, Field(strict=True, ge=-(10**15), le=10**15)]
_Number = _Whole | Annotated[float, Field(strict=True)]
_Share = Annotated[float, Field(ge=0, le=1.001, strict=True)]  # rounded
_Shares = Annotated[list[_Share], Field(max_length=1000)]
_NotNegative = Annotated[float, Field(ge=0, strict=True)]


class _Told(Section):
    """Every word that an answer may have."""

    refused: str = ""
    kind: str = ""
    unit: _Key = ""
    steps: Steps = 1
    done: _Amount = 0
    back: _Amount = 0
    examples: _Amount = 0
    amounts: dict[_Key, _Amount] = {}  # noqa: RUF012 (pydantic copies it)
    skipped_rows: _Amount = 0
    works: tuple[_Amount, _Amount] = (0, 0)
    seconds: _NotNegative = 0.0
    tokens: _Amount = 0
    train_seconds: _NotNegative = 0.0
    train_loss: _Number = 0.0
    left_out: str = ""
    measure: str = ""
    evaluated: Literal[True] = True
    score: dict[_Key, _Number] = {}  # noqa: RUF012
    metrics: dict[_Key, _Number | None] = {}  # noqa: RUF012
    gates: Annotated[list[_Shares], Field(max_length=1000)] = []  # noqa: RUF012
    mixture: _Shares = []  # noqa: RUF012

    @field_validator("refused", "kind", "left_out")
    @classmethod
    def _one_line(cls, text: str) -> str:
        """Nothing that moves a terminal's cursor or begins another line of a log."""
        line = "".join(sign if sign.isprintable() else " " for sign in text[: 2 * _LONGEST])
        return " ".join(line.split())[:_LONGEST]

    @field_validator("measure")
    @classmethod
    def _known(cls, measure: str) -> str:
        if measure not in MEASURES:
            raise ValueError(f"allowed: {', '.join(MEASURES)}")
        return measure


def check_told(told: Mapping[str, Any]) -> dict[str, Any]:
    """What a user told, and nothing else.

    Raises:
        MessageError: a word that is none of an answer's, or one of another type; names the first one.
    """
    try:
        return _Told(**told).model_dump(exclude_unset=True)
    except (ValidationError, TypeError) as error:
        why = first_problem(error, _Told) if isinstance(error, ValidationError) else "its words are no names"
        raise MessageError(f"answer: {_Told._one_line(why)}") from None
