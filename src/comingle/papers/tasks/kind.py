"""Users with samples of a task that is made or read by its name; each trains a copy of a net."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from comingle.config import Recipe
from comingle.data.samples.samples import warn_unseen
from comingle.models.base import Base
from comingle.papers.tasks.making import Task, make_task
from comingle.papers.tasks.section import TaskDataSection, TaskSection
from comingle.training.kinds.base import LoadBase, Materials
from comingle.training.kinds.samples import NetKind

SETTINGS = ("loss", "classes", "clusters", "augment", "input_shape", "net", "shift")
"""What a task says besides its users."""


class TaskKind(NetKind):
    """Samples with targets, and the net that a paper trains on them."""

    name = "task"

    def read(self, recipe: Recipe, load_base: LoadBase, *, validates: bool) -> Materials:
        """The task brings its net; no base is loaded."""
        return self.materials(prepare_task(cast(TaskDataSection, recipe.data).task, recipe.data_seed))

    def materials(self, task: Task) -> Materials:
        """Those of a task, which may be made in Python; labels that somebody does not train on are said once."""
        if task.loss == "cross_entropy":
            warn_unseen(task.users)
        return Materials(kind=self, base=None, users=task.users, common=task)

    def of_users(self, recipe: Recipe, users: int) -> Recipe:
        """A task makes as many as it is asked for."""
        return recipe.with_changes({"data.task.users": users})

    def settings(self, materials: Materials) -> dict[str, Any]:
        """The task's."""
        return {key: getattr(materials.common, key) for key in SETTINGS}

    def reopened(
        self, base: Base | None, users: Sequence[Any], settings: Mapping[str, Any], *, net: Any = None
    ) -> Materials:
        """The task as it was."""
        task = Task(users=tuple(users), **{**settings, "input_shape": tuple(settings["input_shape"])})
        return Materials(kind=self, base=base, users=users, common=task, unread=True)


def prepare_task(section: TaskSection, seed: int) -> Task:
    """The users and samples of a recipe's task."""
    return make_task(section.name, **section.model_dump(exclude={"name"}, exclude_unset=True), seed=seed)


KIND = TaskKind()
