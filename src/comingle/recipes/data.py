"""The section ``data`` of a recipe: who the users are and what they have; each kind has one of its own."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from pydantic import model_validator

from comingle.errors import did_you_mean
from comingle.recipes.fields import Fraction, Section

Anchor = Callable[[Any], Any]
"""Makes a relative path, or every one of a list, absolute where it exists beside the recipe."""


class DataSection(Section):
    """What all kinds' sections have, besides their keys."""

    kind: Any  # a word in each

    label: ClassVar[str]
    """How messages call such data."""
    marks: ClassVar[tuple[str, ...]] = ()
    """Keys by which a recipe that does not name its kind is known to be of this one."""
    implementation: ClassVar[str]
    """Where the kind itself is, as ``package.module:NAME``: what reads, trains on and scores such data."""
    unread: ClassVar[Mapping[str, str]] = {}
    """Settings of a recipe that such data leaves unread, and what is there instead."""
    weightings: ClassVar[tuple[str, ...]] = ("uniform", "samples")
    """What users' weights may be."""
    accepted: ClassVar[Mapping[str, str]] = {}
    """What a key of the section accepts where pydantic would name one of several types."""
    has_base: ClassVar[bool] = False
    """Whether such data brings a model of its own where a recipe names no base."""

    @model_validator(mode="before")
    @classmethod
    def _of_other_kinds(cls, content: Any) -> Any:
        """Keys that other kinds have, each with what is there instead."""
        for key in content if isinstance(content, Mapping) else ():
            if key not in cls.model_fields and (instead := cls.unread.get(f"data.{key}")):
                raise ValueError(f"{key} is not read for {cls.label}; {instead}")
        return content

    @property
    def names(self) -> list[str]:
        """The users, as far as the recipe itself names them."""
        return []

    @property
    def in_distribution(self) -> bool:
        """Whether what users are tested on is of the kind that they train on."""
        return True

    def anchored(self, anchor: Anchor) -> dict[str, Any]:
        """Keys whose paths are relative to the recipe's file, with what ``anchor`` makes of them."""
        return {}


class SplitSection(Section):
    """How a user's data is parted: by fractions, or as given by the source's own splits."""

    valid: Fraction = 0.1
    test: Fraction = 0.1
    given: bool = False
    train_name: str = "train"
    valid_name: str | None = None
    test_name: str = "test"


SECTIONS = {
    "text": "comingle.kinds.text.section:TextSection",
    "task": "comingle.kinds.tasks.section:TaskDataSection",
    "questions": "comingle.kinds.questions.section:QuestionsDataSection",
}
"""The sections of the kinds that are here; named, not imported, as kinds stand on recipes."""


def section_of(content: Mapping[str, Any]) -> type[DataSection]:
    """The section that checks such data: of the kind that it names, or else of the one whose keys it has.

    Raises:
        ValueError: no such kind, or none of their keys, or several.
    """
    if (kind := content.get("kind")) is not None:
        if kind not in SECTIONS:
            raise ValueError(f"no kind {kind!r}.{did_you_mean(str(kind), SECTIONS)} Allowed: {', '.join(SECTIONS)}")
        return load_section(kind)
    marks = {mark: section for section in map(load_section, SECTIONS) for mark in section.marks}
    given = [mark for mark in marks if content.get(mark) is not None]
    if len(given) != 1:
        *others, last = marks
        raise ValueError(f"give one of {', '.join(others)} and {last}")
    return marks[given[0]]


def load_section(kind: str) -> type[DataSection]:
    """The section of a kind."""
    return load_object(SECTIONS[kind])


def load_object(place: str) -> Any:
    """What stands at ``package.module:NAME``."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
