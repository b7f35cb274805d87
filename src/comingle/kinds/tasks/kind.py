"""Users with samples of a task that is made or read by its name; each trains a copy of a net."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from comingle.data.samples import UserSamples
from comingle.data.splits import warn_unseen
from comingle.data.tasks import Task
from comingle.engines.client import Clients
from comingle.engines.training import Training
from comingle.kinds.base import Kind, LoadBase, Materials
from comingle.kinds.tasks.building import build_nets, check_on_nets, net_name, prepare_task
from comingle.kinds.tasks.section import TaskDataSection
from comingle.methods.base import Method
from comingle.models.base import Base
from comingle.models.model import Model
from comingle.models.personal_net import PersonalNet, personal_net
from comingle.models.stacked import StackedModel
from comingle.recipes import Recipe
from comingle.terminal import words
from comingle.trees import Tree

if TYPE_CHECKING:
    from rich.console import RenderableType

SETTINGS = ("loss", "classes", "clusters", "augment", "input_shape", "net", "shift")
"""What a task says besides its users."""


class TaskKind(Kind):
    """Samples with targets."""

    name, user, needs_base, read_for_costs = "task", UserSamples, False, True

    def check(self, recipe: Recipe, method: Method) -> None:
        """Adapters in a language model and routers of tokens are none of nets."""
        check_on_nets(method)

    def read(self, recipe: Recipe, load_base: LoadBase, *, validates: bool) -> Materials:
        """The task brings its net; no base is loaded."""
        return self.materials(prepare_task(cast(TaskDataSection, recipe.data).task, recipe.seed))

    def materials(self, task: Task) -> Materials:
        """Those of a task, which may be made in Python; labels that somebody does not train on are said once."""
        if task.loss == "cross_entropy":
            warn_unseen(task.users)
        return Materials(kind=self, base=None, users=task.users, common=task)

    def clients(self, recipe: Recipe, materials: Materials, method: Method, training: Training) -> Clients:
        """Everybody's copy of the task's net."""
        return build_nets(recipe, materials.common, method, training, unread=materials.unread)

    def personal(self, name: str, model: Model, tensors: Tree, row: int) -> PersonalNet:
        """One that predicts."""
        return personal_net(name, cast(StackedModel, model), tensors)

    def settings(self, materials: Materials) -> dict[str, Any]:
        """The task's."""
        return {key: getattr(materials.common, key) for key in SETTINGS}

    def reopened(self, base: Base | None, users: tuple[Any, ...], settings: Mapping[str, Any]) -> Materials:
        """The task as it was."""
        task = Task(users=users, **{**settings, "input_shape": tuple(settings["input_shape"])})
        return Materials(kind=self, base=base, users=users, common=task, unread=True)

    def preview(self, recipe: Recipe, materials: Materials, *, everybody: bool) -> list[RenderableType]:
        """The net that is trained, how many samples each user has, and its true cluster where there is one."""
        from rich.table import Table

        from comingle.data.preview import choose_rows

        task = materials.common
        shape = " x ".join(str(size) for size in task.input_shape)
        title = f"net:{net_name(recipe, task)}: samples of {shape}"
        table = Table("user", "cluster", title=title, title_justify="left", box=None)
        for split in ("train", "valid", "test"):
            table.add_column(split, justify="right")
        clusters = {user.name: str(user.cluster) for user in task.users if user.cluster is not None}
        counts = {user.name: [len(part) for part in (user.train, user.valid, user.test)] for user in task.users}
        for name, cells in choose_rows(counts, by=0, everybody=everybody):
            table.add_row(words(name), clusters.get(name, "-"), *cells)
        return [table]


KIND = TaskKind()
