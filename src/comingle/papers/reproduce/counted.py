"""Tables that are counted and not run: users and clusters of tasks, sizes of nets, compute of a forward pass."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from comingle.config import Recipe
from comingle.cost.records import Plan as Costs
from comingle.methods import make
from comingle.models.nets import make_net
from comingle.papers.reproduce.plan import Cell, Plan
from comingle.papers.tasks.settings import TASKS
from comingle.training.kinds.base import NETS
from comingle.utils.errors import RecipeError

_IMAGE = (3, 32, 32)


def count_cells(plan: Plan, costs: Costs | None = None) -> dict[tuple[str, str], float]:
    """Return what each cell of a table of costs counts, by row and column.

    Args:
        plan: the table; a row's ``count`` says what is counted.
        costs: the counted costs of its methods, in the order of its cells, for ``forward``.

    Raises:
        RecipeError: a cell's recipe has nothing of that kind.
    """
    found: dict[tuple[str, str], float] = {}
    for number, cell in enumerate(plan.cells):
        what = plan.experiment.rows[cell.row].count
        assert what is not None, f"{plan.name}: {cell.row} counts nothing"
        found[cell.row, cell.column] = _forward(costs, number) if what == "forward" else _COUNTS[what](cell)
    return found


def _forward(costs: Costs | None, number: int) -> float:
    """What adapters and routers add to the frozen base's forward pass, in per cent."""
    assert costs is not None
    return 100 * (costs.methods[number].users[0].forward.total / costs.base_flops - 1)


def _users(cell: Cell) -> float:
    return _of_task(cell.recipe, "users")


def _clusters(cell: Cell) -> float:
    return _of_task(cell.recipe, "clusters")


def _of_task(recipe: Recipe, what: str) -> int:
    section = recipe.data.model_dump().get("task")
    if not section:
        raise RecipeError(f"reproduce: {what} are counted on tasks; got a recipe without data.task")
    return section[what] or getattr(TASKS[section["name"]], what)


def _participation(cell: Cell) -> float:
    share = cell.recipe.training.participation
    assert isinstance(share, float | int)
    return 100 * share


def _parameters(cell: Cell) -> float:
    """Parameters of all models that the server begins with, without the classifier, in multiples of ResNet-9's.

    FedMerge's Table 1 has these ratios without the classifier, whose size depends on the number of classes.
    """
    method = make(cell.recipe.method.name, **cell.recipe.method.settings)
    return method.server.server_models * _body(cell.recipe.base.removeprefix(NETS)) / _body("resnet9")


def _body(name: str) -> int:
    net = make_net(name, _IMAGE, 10, seed=0)
    (*_, head) = [module for module in net.modules() if isinstance(module, nn.Linear)]
    return sum(p.numel() for p in net.parameters()) - sum(p.numel() for p in head.parameters())


_COUNTS: dict[str, Callable[[Cell], float]] = {
    "users": _users,
    "clusters": _clusters,
    "participation": _participation,
    "parameters": _parameters,
}
