"""The section ``data`` of users who are made for a task that is not language."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from comingle.kinds.samples.section import UNREAD
from comingle.recipes.data import DataSection
from comingle.recipes.fields import Count, Fraction, Positive, Section


class TaskSection(Section):
    """Users made for a task that is not language: see ``comingle.papers.tasks.making``."""

    name: str
    users: Count | None = None
    clusters: Count | None = None
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    shift: str | None = None
    path: str | None = None
    test_samples: Count | None = None
    valid: Fraction | None = None
    alpha: Positive | None = None
    labels_per_cluster: Count | None = None


class TaskDataSection(DataSection):
    """A task by name, which makes users and their samples."""

    kind: Literal["task"] = "task"
    task: TaskSection

    label: ClassVar[str] = "data.task"
    marks: ClassVar[tuple[str, ...]] = ("task",)
    implementation: ClassVar[str] = "comingle.papers.tasks.kind:KIND"
    has_base: ClassVar[bool] = True
    accepted: ClassVar[Mapping[str, str]] = {"task": "a name, or a mapping with name"}
    unread: ClassVar[Mapping[str, str]] = {
        **UNREAD,
        "data.split": "a task has its own train and test samples",
        "data.held_out": "a task has its own test samples",
        "data.on_small_user": "samples have no windows to be too short for",
        "data.max_train_tokens": "data.task.fraction makes train samples fewer",
        "data.max_valid_tokens": "a task has its own samples",
        "data.max_test_tokens": "data.task.test_samples makes test samples fewer",
    }

    @field_validator("task", mode="before")
    @classmethod
    def _plain_name(cls, section: Any) -> Any:
        return {"name": section} if isinstance(section, str) else section
