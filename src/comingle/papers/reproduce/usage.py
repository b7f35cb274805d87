"""Accuracy against parameters (FedMerge, Figures 3, 4 and 6): what server and users hold, and what they exchange.

Nothing is taken from the paper: a federation is built as for a run, and its numbers are counted. They are shown in
multiples of the column's net, so that FedAvg on it is at 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comingle.config import Recipe
from comingle.cost.counts import download_of, upload_of
from comingle.cost.summaries import with_method
from comingle.data.samples.samples import UserSamples
from comingle.methods import make
from comingle.papers.reproduce.plan import Cell, Plan
from comingle.papers.reproduce.tables import table_line
from comingle.papers.tasks.making import Task
from comingle.protocol.messages import LOSS
from comingle.runs.session import prepare, training_settings
from comingle.training.backends.local import federate
from comingle.training.kinds.base import NETS
from comingle.training.kinds.nets import build_nets
from comingle.training.server import ServerHalf
from comingle.utils.records import write_json, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from comingle.reports.canvas import Style
    from comingle.reports.runs import Spread

WORDS = {"server": "kept by the server", "communicate": "sent by a user in a round", "client": "held by a user"}
"""What is counted, in the words of an axis."""

_FEW = 8
"""Samples of each user that are kept: how many there are changes no number of parameters."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Numbers that the server keeps between rounds, that a user sends and receives in one, and that it holds.

    The running statistics of batch norm count: they travel. ``server`` has the models that it averages or merges, and
    what it remembers of every user. ``client`` is everything that is a user's and outlasts its local steps.
    """

    server: float
    communicate: float
    received: float
    client: float

    def over(self, unit: float) -> Usage:
        """In multiples of ``unit``."""
        return Usage(**{name: value / unit for name, value in asdict(self).items()})


def count_usage(recipe: Recipe, task: Task) -> Usage:
    """The usage of a method on a task's net. All users of nets have the same, so one is built.

    Raises:
        RecipeError: the method is not for nets.
    """
    user = _with_few(task.users[0])
    recipe = with_method(recipe, recipe.method.name)  # where participation names others
    method = make(recipe.method.name, **recipe.method.settings)
    # Weighted means need a count of samples, which is no parameter.
    settings = replace(training_settings(recipe, [user.name]), weighting="uniform")
    federation = federate(build_nets(recipe, replace(task, users=(user,)), method, settings))
    clients = federation.clients
    sent, received = (), ()
    if clients.shares:
        upload = upload_of(federation, 0)
        said = [t for name, t in upload.reports.items() if name != LOSS]
        sent, received = (*upload.tensors.values(), *said), download_of(federation, 0, [user.name]).tensors.values()
    return Usage(
        server=_server(federation.server, len(task.users)),
        communicate=sum(t.numel() for t in sent),
        received=sum(t.numel() for t in received),
        client=int(clients.mask[0].sum()) + sum(t.numel() for t in clients.state.kept.values()),
    )


def _server(server: ServerHalf, users: int) -> int:
    """What it keeps between rounds, with a row for each of so many users where it was built for one."""
    rows = server.method.server.by_user
    return sum(t.numel() * (users if name in rows else 1) for name, t in server.kept.items())


def _with_few(user: UserSamples) -> UserSamples:
    return replace(user, train=user.train.first(_FEW), valid=user.valid.first(_FEW), test=user.test.first(_FEW))


def plan_usage(plan: Plan) -> dict[tuple[str, str], Usage]:
    """What each row and column of a plan uses, in multiples of the column's net.

    Raises:
        DataError: a task's images cannot be read.
    """
    usage: dict[tuple[str, str], Usage] = {}
    for column in plan.columns:
        cells = _cells(plan, column)
        if not cells:
            continue
        first = next(iter(cells.values())).recipe
        assert first.data.kind == "task", f"{plan.name}: usage is counted on nets"
        task = prepare(first).common
        plain = with_method(first, "fedavg").with_changes({"base": NETS + column_net(plan, column)})
        unit = count_usage(plain, task).client
        usage |= {(row, column): count_usage(cell.recipe, task).over(unit) for row, cell in cells.items()}
    return usage


def column_net(plan: Plan, column: str) -> str:
    """The net that a column's rows train unless they name their own."""
    cells = _cells(plan, column)
    named = [cell.recipe.base for row, cell in cells.items() if not plan.experiment.rows[row].base]
    return (named[0] if named else plan.scaled.stand_in(plan.column_of(column).base)).removeprefix(NETS)


def _cells(plan: Plan, column: str) -> dict[str, Cell]:
    """A column's runs with the first seed, by row."""
    cells: dict[str, Cell] = {}
    for cell in plan.cells:
        if cell.column == column:
            cells.setdefault(cell.row, cell)
    return cells


# -------------------------------------------------------------------- files and figures


def draw_usage(plan: Plan, entries: Mapping[tuple[str, str], Any], folder: Path) -> Iterator[tuple[str, Figure]]:
    """A row of panels for each kind of usage, a panel for each column; ``usage.md`` and ``usage.json`` beside them."""
    if not entries:
        return
    used = plan_usage(plan)
    write_usage(folder, plan, used)
    yield "usage", usage_figure(plan, entries, used)


def write_usage(folder: Path, plan: Plan, used: Mapping[tuple[str, str], Usage]) -> None:
    """The numbers of the figure: ``usage.json`` by column and row, and ``usage.md``."""
    folder.mkdir(parents=True, exist_ok=True)
    by_column = {c: {row: asdict(one) for (row, column), one in used.items() if column == c} for c in plan.columns}
    write_json(folder / "usage.json", by_column)
    lines = [f"# {plan.experiment.title}", "", "In multiples of the column's net.", ""]
    lines += [table_line(["column", "method", "server", "sent", "received", "held by a user"]), "|" + "---|" * 6]
    for (row, column), one in used.items():
        numbers = [f"{value:.2f}" for value in (one.server, one.communicate, one.received, one.client)]
        lines.append(table_line([plan.label(column), plan.experiment.rows[row].label or row, *numbers]))
    write_text(folder / "usage.md", "\n".join(lines) + "\n")


def usage_figure(plan: Plan, entries: Mapping[tuple[str, str], Any], used: Mapping[tuple[str, str], Usage]) -> Figure:
    """Test results against usage, a line for each method, its marks larger for more models or a larger net."""
    from comingle.reports.canvas import draw, styles
    from comingle.reports.formatting import axis_label

    assert plan.experiment.plot is not None
    kinds, lines = plan.experiment.plot.usage, _lines(plan)
    looks = dict(zip(lines, styles([plan.experiment.rows[rows[0]].method for rows in lines.values()]), strict=True))
    measure = next(iter(entries.values())).first.measure

    def paint(figure: Figure, axes: list[Axes]) -> None:
        for number, axis in enumerate(axes):
            kind, column = kinds[number // len(plan.columns)], plan.columns[number % len(plan.columns)]
            for name, rows in lines.items():
                _line(axis, _points(rows, column, kind, entries, used), looks[name])
            _label(axis, measure, f"{WORDS[kind]},\nmultiples of {column_net(plan, column)}")
            if number < len(plan.columns):
                axis.set_title(plan.label(column))
            if number % len(plan.columns) == 0:
                axis.set_ylabel(axis_label(measure))
        shown = {row for row, _ in entries}
        _legend(figure, {name: looks[name] for name, rows in lines.items() if any(row in shown for row in rows)})

    alone = len(kinds) * len(plan.columns) == 1
    return draw(len(kinds), len(plan.columns), (4.6, 3.2) if alone else (3.3, 2.5), paint)


def _lines(plan: Plan) -> dict[str, list[str]]:
    """Rows by the part of their label before a comma."""
    lines: dict[str, list[str]] = {}
    for row in plan.rows:
        label = plan.experiment.rows[row].label or row
        lines.setdefault(label.partition(",")[0], []).append(row)
    return lines


Point = tuple[float, "Spread", float]
"""Where it is, what was found there, and the area of its mark."""


def _points(
    rows: list[str],
    column: str,
    kind: str,
    entries: Mapping[tuple[str, str], Any],
    used: Mapping[tuple[str, str], Usage],
) -> list[Point]:
    from comingle.reports.runs import final

    points: list[Point] = []
    for place, row in enumerate(rows):
        entry = entries.get((row, column))
        if entry is not None and (last := final(entry)) is not None:
            points.append((getattr(used[row, column], kind), last, 26.0 + 9.0 * place))
    return points


def _line(axis: Axes, points: list[Point], style: Style) -> None:
    from comingle.reports.canvas import PAPER

    if not points:
        return
    at, spreads, areas = (list(part) for part in zip(*points, strict=True))
    means, colour = [spread.mean for spread in spreads], style.colour.light
    bars = [spread.std or 0.0 for spread in spreads]
    axis.errorbar(at, means, yerr=bars, color=colour, linestyle=style.line, linewidth=1.2, elinewidth=0.9)
    edge = {"edgecolors": PAPER.light, "linewidths": 0.5}  # so that marks above each other can be told apart
    axis.scatter(at, means, s=areas, color=colour, marker=style.marker, zorder=3, **edge)


def _label(axis: Axes, measure: str, below: str) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    from comingle.reports.formatting import tick

    axis.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))  # whole per cents
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value, measure)))
    axis.set_xlim(left=min(0.0, axis.get_xlim()[0]))
    axis.set_xlabel(below)


def _legend(figure: Figure, looks: Mapping[str, Style]) -> None:
    from matplotlib.lines import Line2D

    from comingle.reports.canvas import legend_above

    handles = [Line2D([], [], color=s.colour.light, linestyle=s.line, marker=s.marker) for s in looks.values()]
    about = "larger marks: more models, or a larger net"
    legend_above(figure, handles, list(looks), title=about, alignment="left")
