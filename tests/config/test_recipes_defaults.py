"""A section of the YAML has the defaults of what it becomes, which are written there alone."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import pytest
from pydantic import BaseModel

from comingle.config import sections
from comingle.config.settings import (
    Training,
)

EVALUATION = {"every": "evaluate_every", "first": "evaluate_first", "model": "evaluate", "users": "evaluate_users"}
PAIRS: dict[str, tuple[type[BaseModel], type, dict[str, str]]] = {
    "training": (sections.TrainingSection, Training, {}),
    "evaluation": (sections.EvaluationSection, Training, EVALUATION),
    "checkpoints": (sections.CheckpointSection, Training, {"every": "checkpoint_every"}),
    "runtime": (sections.RuntimeSection, Training, {}),
}
"""A section, the dataclass that it becomes, and the fields that have another name there."""


def defaults(kind: Any) -> dict[str, Any]:
    """The fields of a dataclass with their defaults; ``MISSING`` where there is none."""
    return {f.name: f.default_factory() if f.default_factory is not MISSING else f.default for f in fields(kind)}


def plain(value: Any) -> Any:
    """A section or a dataclass as a dictionary."""
    if isinstance(value, BaseModel):
        return value.model_dump()
    return {f.name: getattr(value, f.name) for f in fields(value)} if is_dataclass(value) else value


@pytest.mark.parametrize("name", PAIRS)
def test_a_sections_default_is_the_dataclasses(name: str) -> None:
    section, kind, renamed = PAIRS[name]
    used = defaults(kind)
    common = {key: renamed.get(key, key) for key in section.model_fields if renamed.get(key, key) in used}
    assert common
    assert renamed.items() <= common.items()
    for key, other in common.items():
        field = section.model_fields[key]
        assert plain(MISSING if field.is_required() else field.default) == plain(used[other]), key
