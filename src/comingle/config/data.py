"""The section ``data`` of a recipe."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from comingle.utils import registry
from comingle.utils.errors import LARGEST, PluginError

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


PATHS = ("path", "train", "valid", "test")
"""Keys that say where a user's own data is."""

Anchor = Callable[[Any], Any]
"""Makes a relative path, or every one of a list, absolute where it exists beside the recipe."""


class DataSection(Section):
    """What all kinds' sections have, besides their keys."""

    kind: Any  # a word in each
    given: Literal[True] | None = None
    """A program hands the users' data over: nothing says where to read it."""
    seed: Annotated[int, Field(ge=0, strict=True)] | None = None
    """The seed of splits, samples and partitions; None: the recipe's ``seed``, which draws all else."""

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
    def cluster_numbers(self) -> dict[str, int]:
        """The number of each user's true cluster, where the recipe names them."""
        return {}

    @property
    def in_distribution(self) -> bool:
        """Whether what users are tested on is of the kind that they train on."""
        return True

    def anchored(self, anchor: Anchor) -> dict[str, Any]:
        """Keys whose paths are relative to the recipe's file, with what ``anchor`` makes of them."""
        return {}


class OwnUsersSection(DataSection):
    """The section of users with data of their own, of whom a recipe may say which are alike."""

    clusters: dict[str, str] | None = None
    """The true cluster of each user, for methods that know it."""

    @field_validator("clusters", mode="before")
    @classmethod
    def _labels(cls, clusters: Any) -> Any:
        """Accept numbers as labels."""
        if not isinstance(clusters, Mapping):
            return clusters
        plain = {str(name): label for name, label in clusters.items()}
        return {n: str(label) if type(label) is int else label for n, label in plain.items()}

    @property
    def cluster_numbers(self) -> dict[str, int]:
        """The number of each named user's cluster, in the alphabetical order of the labels."""
        labels = sorted(set((self.clusters or {}).values()))
        return {name: labels.index(label) for name, label in (self.clusters or {}).items()}


class SplitSection(Section):
    """How a user's data is parted: by fractions, or as given by the source's own splits."""

    valid: Fraction = 0.1
    test: Fraction = 0.1
    given: bool = False
    train_name: str = "train"
    valid_name: str | None = None
    test_name: str = "test"


KINDS: registry.Registry[type[DataSection]] = registry.Registry(
    "comingle.kinds",
    {
        "text": "comingle.data.text.section:TextSection",
        "samples": "comingle.data.samples.section:SamplesSection",
        "conversations": "comingle.data.conversations.section:ConversationsSection",
    },
)
"""The section ``data`` of each kind."""


def section_of(content: Mapping[str, Any]) -> type[DataSection]:
    """The section that checks such data: of the kind that it names, or else of the one whose keys it has.

    Raises:
        ValueError: no such kind, or none of their keys, or several.
    """
    if (kind := content.get("kind")) is not None:
        if not isinstance(kind, str) or kind not in KINDS:
            raise ValueError(f"no kind {kind!r}.{KINDS.hint(str(kind))} Allowed: {', '.join(KINDS)}")
        return KINDS[kind]
    marks = {mark: section for section in _loadable() for mark in section.marks}
    given = [mark for mark in marks if content.get(mark) is not None]
    if len({marks[mark] for mark in given}) != 1:
        *others, last = marks
        raise ValueError(f"give one of {', '.join(others)} and {last}")
    return marks[given[0]]


def _loadable() -> Iterator[type[DataSection]]:
    """All sections but those of plug-ins that cannot be used; who asks for one by its name is told so."""
    for kind in KINDS:
        with suppress(PluginError):
            yield KINDS[kind]


ON_LANGUAGE: Mapping[str, str] = {"floral": "adaptors on a language model take adapters.rank and adapters.alpha"}
"""Settings of nets, which no users of a language model read."""

_PASSES = {"data.train_on_valid": "rounds are passes, which would be longer with more to train on"}

_LIMITS = ("data.max_train_tokens", "data.max_valid_tokens", "data.max_test_tokens")


def steps_of(what: str) -> dict[str, str]:
    """Iterations, where users pass over what they have."""
    return {"training.local_steps": f"passes over a user's {what} are counted by training.local_epochs"}


def keys_of_text(*, limits: str | tuple[str, str, str], **instead: str) -> dict[str, str]:
    """Keys of ``data`` that text has, by name; ``limits`` are what there is instead of those on tokens of the splits.

    One text stands for all three of them.
    """
    each = (limits,) * len(_LIMITS) if isinstance(limits, str) else limits
    return _PASSES | {f"data.{key}": text for key, text in instead.items()} | dict(zip(_LIMITS, each, strict=True))
