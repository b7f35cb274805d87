"""The section ``data`` of users who are made for a task that is not language."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from comingle.config.data import Count, DataSection, Fraction, Positive, Section, keys_of_text, plain_name
from comingle.data.samples.section import NO_WINDOWS, UNREAD


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
    task: Annotated[TaskSection, BeforeValidator(plain_name)]

    label: ClassVar[str] = "data.task"
    marks: ClassVar[tuple[str, ...]] = ("task",)
    implementation: ClassVar[str] = "comingle.papers.tasks.kind:KIND"
    has_base: ClassVar[bool] = True
    accepted: ClassVar[Mapping[str, str]] = {"task": "a name, or a mapping with name"}
    unread: ClassVar[Mapping[str, str]] = {
        **UNREAD,
        **keys_of_text(
            add_bos_token="a task has samples, which have no tokens",
            split="a task has its own train and test samples",
            held_out="a task has its own test samples",
            on_small_user=NO_WINDOWS,
            limits=(
                "data.task.fraction makes train samples fewer",
                "a task has its own samples",
                "data.task.test_samples makes test samples fewer",
            ),
        ),
    }
