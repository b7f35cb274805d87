"""Tasks as a kind of data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BeforeValidator, Field

from comingle.config import Recipe
from comingle.config.data import Count, DataSection, Fraction, Positive, Section, keys_of_text, plain_name
from comingle.data.samples.samples import warn_unseen
from comingle.data.samples.section import NO_WINDOWS, UNREAD
from comingle.models.base import Base
from comingle.training.kinds.base import LoadBase, RunData
from comingle.training.kinds.samples import NetKind
from comingle_papers.tasks.making import Task, make_task


class TaskSection(Section):
    """Users made for a task that is not language: see ``comingle_papers.tasks.making``."""

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
    implementation: ClassVar[str] = "comingle_papers.tasks.kind:KIND"
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


SETTINGS = ("loss", "classes", "clusters", "augment", "input_shape", "net", "shift")
"""What a task says besides its users."""


class TaskKind(NetKind):
    """Samples with targets, and the net that a paper trains on them."""

    name = "task"

    def read(self, recipe: Recipe, load_base: LoadBase, *, validates: bool) -> RunData:
        """The task brings its net; no base is loaded."""
        return self.materials(prepare_task(cast(TaskDataSection, recipe.data).task, recipe.data_seed))

    def materials(self, task: Task) -> RunData:
        """Those of a task, which may be made in Python; labels that somebody does not train on are said once."""
        if task.loss == "cross_entropy":
            warn_unseen(task.users)
        return RunData(kind=self, base=None, users=task.users, common=task)

    def of_users(self, recipe: Recipe, users: int) -> Recipe:
        """A task makes as many as it is asked for."""
        return recipe.with_changes({"data.task.users": users})

    def settings(self, materials: RunData) -> dict[str, Any]:
        """The task's."""
        return {key: getattr(materials.common, key) for key in SETTINGS}

    def reopened(
        self, base: Base | None, users: Sequence[Any], settings: Mapping[str, Any], *, net: Any = None
    ) -> RunData:
        """The task as it was."""
        task = Task(users=tuple(users), **{**settings, "input_shape": tuple(settings["input_shape"])})
        return RunData(kind=self, base=base, users=users, common=task, unread=True)


def prepare_task(section: TaskSection, seed: int) -> Task:
    """The users and samples of a recipe's task."""
    return make_task(section.name, **section.model_dump(exclude={"name"}, exclude_unset=True), seed=seed)


KIND = TaskKind()
