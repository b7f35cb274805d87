"""Tables and figures whose numbers are counted, without training.

Nothing is taken from the paper: a federation is built as for a run, and its numbers are counted. Figures show multiples
of the column's net, so that FedAvg on that net is at 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from comingle.config import Recipe
from comingle.cost.counts import download_of, upload_of
from comingle.cost.planning import with_method
from comingle.cost.records import Plan as Costs
from comingle.data.populations import as_users
from comingle.data.samples.samples import UserSamples
from comingle.methods import make
from comingle.models.nets import make_net
from comingle.protocol.messages import LOSS
from comingle.runs.session import prepare
from comingle.training.backends.local import federate
from comingle.training.kinds.base import NETS
from comingle.training.kinds.nets import build_nets
from comingle.training.plan import make_plan
from comingle.training.server import ServerHalf
from comingle.utils.errors import RecipeError
from comingle.utils.records import write_json, write_text
from comingle_papers.reproduce.plan import Cell, Plan
from comingle_papers.reproduce.published import parse_printed
from comingle_papers.reproduce.tables import table_line
from comingle_papers.tasks.image_tasks import TASKS
from comingle_papers.tasks.kind import Task

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from comingle.reports.canvas import Style
    from comingle.reports.runs import Entry, Spread


AXIS_LABELS = {"server": "kept by the server", "communicate": "sent by a user in a round", "client": "held by a user"}
"""Axis labels of the counted quantities."""

_KEPT_SAMPLES = 8
"""Samples kept of each user; the number of samples does not change the number of parameters."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Numbers of tensor entries that a method stores and sends, or multiples of such a count.

    ``server``: stored by the server between rounds: the models that it averages or merges, and its state for each user.
    ``communicate``: sent by a user in a round.
    ``received``: received by a user in a round.
    ``client``: stored by a user between rounds: its parameters and its state.
    """

    server: float
    communicate: float
    received: float
    client: float

    def over(self, unit: float) -> Usage:
        """Return the usage in multiples of ``unit``, such as the number of parameters of a net."""
        return Usage(**{name: value / unit for name, value in asdict(self).items()})


def count_usage(recipe: Recipe, task: Task) -> Usage:
    """Count how many numbers (entries of tensors) a method stores and sends when it trains a task's net.

    All users store and send equally many numbers, so a federation with the task's first user alone is built. Only the
    server's numbers depend on how many users the task has.

    Args:
        recipe: The recipe, which names the method and the net.
        task: The task, with all its users.

    Raises:
        RecipeError: The method does not support nets.
    """
    user = _reduce_samples(task.users[0])  # a few samples are enough, as their number changes no count
    recipe = with_method(recipe, recipe.method.name)  # all take part: a list of participants may lack this user
    method = make(recipe.method.name, **recipe.method.settings)
    # Weighted means send a count of samples, which is not a parameter.
    plan = make_plan(recipe, method, [user.name]).updated("training", weighting="uniform")
    task_of_user = replace(task, users=as_users([user]))
    federation = federate(build_nets(recipe, task_of_user, plan))
    clients = federation.clients
    sent_tensors: list[Tensor] = []
    received_tensors: list[Tensor] = []
    if clients.shares:  # else the method trains locally and sends nothing
        upload = upload_of(federation, user=0)
        sent_tensors += upload.tensors.values()
        # Users also upload values such as numbers of local steps. Losses do not count, as they are for the log only.
        sent_tensors += [tensor for name, tensor in upload.reports.items() if name != LOSS]
        received_tensors += download_of(federation, user=0, names=[user.name]).tensors.values()
    (mask_of_user,) = clients.mask  # false for the padding of smaller ranks
    num_parameters = int(mask_of_user.sum())
    size_of_user_state = sum(tensor.numel() for tensor in clients.state.kept.values())  # such as control variates
    return Usage(
        server=_count_server_state(federation.server, len(task.users)),
        communicate=sum(tensor.numel() for tensor in sent_tensors),
        received=sum(tensor.numel() for tensor in received_tensors),
        client=num_parameters + size_of_user_state,
    )


def _count_server_state(server: ServerHalf, num_users: int) -> int:
    """Count the numbers (entries of tensors) that the server of a run with many users stores between rounds.

    Args:
        server: The server of a run with a single user, which was built for counting.
        num_users: The number of users for which to count; the server stores some tensors for each user.
    """
    names_of_tensors_per_user = server.method.server.by_user
    total = 0
    for name, tensor in server.kept.items():  # its state between rounds
        num_copies = num_users if name in names_of_tensors_per_user else 1
        total += num_copies * tensor.numel()
    return total


def _reduce_samples(user: UserSamples) -> UserSamples:
    """Keep only a user's first few samples, so that the run in which a method's parameters are counted is fast."""
    return replace(
        user,
        train=user.train.first(_KEPT_SAMPLES),
        valid=user.valid.first(_KEPT_SAMPLES),
        test=user.test.first(_KEPT_SAMPLES),
    )


def plan_usage(plan: Plan) -> dict[tuple[str, str], Usage]:
    """Count how many numbers a method stores and sends (its usage), by row and column of a plan.

    The result is in multiples of what a user of FedAvg stores, which is one copy of the column's net.

    Raises:
        DataError: The images of a task cannot be read.
    """
    usage: dict[tuple[str, str], Usage] = {}
    for column in plan.columns:
        cell_by_row = _cells_of_column(plan, column)
        if not cell_by_row:
            continue
        any_recipe = next(iter(cell_by_row.values())).recipe  # all recipes of a column have the same task
        assert any_recipe.data.kind == "task", f"{plan.name}: usage is counted on nets"
        task = prepare(any_recipe).common
        fedavg_recipe = with_method(any_recipe, "fedavg").with_changes({"base": NETS + column_net(plan, column)})
        size_of_net = count_usage(fedavg_recipe, task).client
        for row, cell in cell_by_row.items():
            usage[row, column] = count_usage(cell.recipe, task).over(size_of_net)
    return usage


def column_net(plan: Plan, column: str) -> str:
    """Return the name of a column's net, such as "resnet9"; rows may train another net, named in their ``base``."""
    cell_by_row = _cells_of_column(plan, column)
    bases = [cell.recipe.base for row, cell in cell_by_row.items() if not plan.experiment.rows[row].base]
    if bases:
        base = bases[0]
    else:  # every row names another net
        published_base = plan.column_of(column).base
        base = plan.scaled.stand_in(published_base)
    return base.removeprefix(NETS)


def _cells_of_column(plan: Plan, column: str) -> dict[str, Cell]:
    """Return one cell of each row of a column, by row: that of the first seed, as other seeds have the same counts."""
    cell_by_row: dict[str, Cell] = {}
    for cell in plan.cells:  # ordered by seed
        if cell.column == column:
            cell_by_row.setdefault(cell.row, cell)
    return cell_by_row


# -------------------------------------------------------------------- files and figures


def draw_usage(plan: Plan, entries: Mapping[tuple[str, str], Entry], folder: Path) -> Iterator[tuple[str, Figure]]:
    """Write how many numbers methods store and send (``usage.md``, ``usage.json``), and yield a figure.

    The figure shows test results against these numbers.

    Args:
        plan: The plan of the figure: its rows, columns and runs.
        entries: The finished runs, by row and column; without any, nothing is written or yielded.
        folder: Where the files are written.

    Yields:
        The suffix of the figure's file name, and the figure.
    """
    if not entries:
        return
    usage = plan_usage(plan)
    write_usage(folder, plan, usage)
    yield "usage", usage_figure(plan, entries, usage)


def write_usage(folder: Path, plan: Plan, usage_by_cell: Mapping[tuple[str, str], Usage]) -> None:
    """Write how many numbers (entries of tensors) methods store and send, to ``usage.json`` and ``usage.md``.

    Args:
        folder: The folder to write to.
        plan: The plan of the figure: its rows, columns and runs.
        usage_by_cell: The counts of each method, by row and column, in multiples of the parameters of the column's net.
    """
    folder.mkdir(parents=True, exist_ok=True)
    by_column: dict[str, dict[str, object]] = {column: {} for column in plan.columns}
    headings = ["column", "method", "server", "sent", "received", "held by a user"]
    lines = [f"# {plan.experiment.title}", "", "In multiples of the column's net.", ""]
    lines += [table_line(headings), "|" + "---|" * len(headings)]
    for (row, column), usage in usage_by_cell.items():
        by_column[column][row] = asdict(usage)
        values = [usage.server, usage.communicate, usage.received, usage.client]
        row_label = plan.experiment.rows[row].label or row
        lines.append(table_line([plan.label(column), row_label, *(f"{value:.2f}" for value in values)]))
    write_json(folder / "usage.json", by_column)
    write_text(folder / "usage.md", "\n".join(lines) + "\n")


def usage_figure(
    plan: Plan, entries: Mapping[tuple[str, str], Entry], usage_by_cell: Mapping[tuple[str, str], Usage]
) -> Figure:
    """Draw test results against how many numbers methods store or send (their usage), with one line per method.

    The figure has a row of panels for each kind of usage (``plot.usage``), and in each row a panel for each column of
    the table.

    Args:
        plan: The plan of the figure: its rows, columns and runs.
        entries: The finished runs, by row and column.
        usage_by_cell: The usage, by row and column, in multiples of the column's net.
    """
    from comingle.reports.canvas import draw, styles
    from comingle.reports.formatting import axis_label

    assert plan.experiment.plot is not None
    kinds = plan.experiment.plot.usage  # such as "server"
    rows_by_line = _group_rows_by_line(plan)
    methods = [plan.experiment.rows[rows[0]].method for rows in rows_by_line.values()]
    style_by_line = dict(zip(rows_by_line, styles(methods), strict=True))
    any_entry = next(iter(entries.values()))
    measure = any_entry.first.measure  # all runs of a table have the same metric

    def paint(figure: Figure, axes: list[Axes]) -> None:
        for index, panel in enumerate(axes):
            panel_row, panel_column = divmod(index, len(plan.columns))  # panels are numbered row by row
            kind, column = kinds[panel_row], plan.columns[panel_column]
            for line, rows in rows_by_line.items():
                points = _points_of_line(rows, column, kind, entries, usage_by_cell)
                _draw_line(panel, points, style_by_line[line])
            _format_axes(panel, measure, f"{AXIS_LABELS[kind]},\nmultiples of {column_net(plan, column)}")
            if panel_row == 0:
                panel.set_title(plan.label(column))
            if panel_column == 0:
                panel.set_ylabel(axis_label(measure))
        rows_with_runs = {row for row, _ in entries}
        drawn_lines = [line for line, rows in rows_by_line.items() if not rows_with_runs.isdisjoint(rows)]
        _draw_legend(figure, {line: style_by_line[line] for line in drawn_lines})

    num_rows, num_columns = len(kinds), len(plan.columns)
    has_one_panel = num_rows * num_columns == 1
    panel_inches = (4.6, 3.2) if has_one_panel else (3.3, 2.5)  # width and height
    return draw(num_rows, num_columns, panel_inches, paint)


def _group_rows_by_line(plan: Plan) -> dict[str, list[str]]:
    """Return the rows of each line of the figure, by the line's name.

    Rows whose labels are equal up to the first comma are on one line, such as "FedMerge, 2 models" and "FedMerge, 4
    models".
    """
    lines: dict[str, list[str]] = {}
    for row in plan.rows:
        label = plan.experiment.rows[row].label or row
        name_of_line = label.partition(",")[0]
        lines.setdefault(name_of_line, []).append(row)
    return lines


Point = tuple[float, "Spread", float]
"""Position on the x axis, test results, and the area of the mark."""


def _points_of_line(
    rows: list[str],
    column: str,
    kind: str,
    entries: Mapping[tuple[str, str], Entry],
    usage_by_cell: Mapping[tuple[str, str], Usage],
) -> list[Point]:
    """Return the points of one line in one panel: usage, test results over seeds, and area of the mark.

    Rows without finished runs have no point.

    Args:
        rows: The rows of the line, from few or small models to many or large ones, which get larger marks.
        column: The column of the panel.
        kind: The attribute of ``Usage`` on the x axis.
        entries: The finished runs, by row and column.
        usage_by_cell: The usage, by row and column.
    """
    from comingle.reports.runs import final_result

    points: list[Point] = []
    for position, row in enumerate(rows):
        entry = entries.get((row, column))
        test_results = None if entry is None else final_result(entry)
        if test_results is None:
            continue
        usage = getattr(usage_by_cell[row, column], kind)
        mark_area = 26.0 + 9.0 * position  # in square points; larger for later rows
        points.append((usage, test_results, mark_area))
    return points


def _draw_line(axis: Axes, points: list[Point], style: Style) -> None:
    """Draw the points of one line with error bars of one standard deviation; draw nothing without points.

    Args:
        axis: Axes of the panel.
        points: The points of the line: position on the x axis, spread of the test results over seeds, area of the mark.
        style: Colour, dashes and marker of the line.
    """
    from comingle.reports.canvas import PAPER

    if not points:
        return
    x_values = [x for x, _, _ in points]
    means = [spread.mean for _, spread, _ in points]
    deviations = [spread.std or 0.0 for _, spread, _ in points]
    areas = [area for _, _, area in points]
    colour = style.colour.light
    axis.errorbar(x_values, means, yerr=deviations, color=colour, linestyle=style.line, linewidth=1.2, elinewidth=0.9)
    edge = {"edgecolors": PAPER.light, "linewidths": 0.5}  # separates overlapping marks
    axis.scatter(x_values, means, s=areas, color=colour, marker=style.marker, zorder=3, **edge)


def _format_axes(axis: Axes, measure: str, x_label: str) -> None:
    """Format both axes of a panel; the x axis includes zero.

    Args:
        axis: Axes of the panel.
        measure: The metric on the y axis, which determines the format of its ticks.
        x_label: The label of the x axis.
    """
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    from comingle.reports.formatting import tick

    axis.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))  # at most 6 intervals between round numbers
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value, measure)))
    axis.set_xlim(left=min(0.0, axis.get_xlim()[0]))
    axis.set_xlabel(x_label)


def _draw_legend(figure: Figure, style_by_line: Mapping[str, Style]) -> None:
    """Draw a legend of the lines above all panels, titled with the meaning of the marks' sizes.

    Args:
        figure: The figure with all panels.
        style_by_line: The style of each line, by its name.
    """
    from matplotlib.lines import Line2D

    from comingle.reports.canvas import legend_above

    handles = [
        Line2D([], [], color=style.colour.light, linestyle=style.line, marker=style.marker)
        for style in style_by_line.values()
    ]
    title = "larger marks: more models, or a larger net"
    legend_above(figure, handles, list(style_by_line), title=title, alignment="left")


_IMAGE = (3, 32, 32)
"""Channels, height and width of the images of CIFAR."""


def count_cells(plan: Plan, costs: Costs | None = None) -> dict[tuple[str, str], float]:
    """Count the quantity of each cell of a table of costs, such as parameters or users, by row and column.

    Args:
        plan: The table; a row's ``count`` names the quantity to count.
        costs: The costs of the cells' methods, one entry per cell in the order of ``plan.cells``; needed only for the
            quantity ``forward``, the extra computation of a forward pass.

    Raises:
        RecipeError: A cell's recipe does not have that quantity.
    """
    counts: dict[tuple[str, str], float] = {}
    for index, cell in enumerate(plan.cells):
        quantity = plan.experiment.rows[cell.row].count
        assert quantity is not None, f"{plan.name}: {cell.row} counts no quantity"
        if quantity == "forward":
            count = _forward_overhead(costs, index)
        else:
            count_quantity = _COUNTS[quantity]
            count = count_quantity(cell)
        counts[cell.row, cell.column] = count
    return counts


def _forward_overhead(costs: Costs | None, cell_index: int) -> float:
    """Return the cost that adapters and routers add to the frozen base's forward pass, in per cent of its FLOPs.

    Args:
        costs: The costs of the cells' methods, in the order of the plan's cells.
        cell_index: Position of the cell in the plan.
    """
    assert costs is not None
    any_user = costs.methods[cell_index].users[0]  # all users of a method cost the same
    return 100 * (any_user.forward.total / costs.base.flops - 1)


def _count_users(cell: Cell) -> float:
    """Return the number of users of a cell's task."""
    return _task_value(cell.recipe, "users")


def _count_clusters(cell: Cell) -> float:
    """Return the number of clusters of a cell's task."""
    return _task_value(cell.recipe, "clusters")


def _task_value(recipe: Recipe, key: str) -> int:
    """Return a number of a recipe's task: that of the recipe, or the task's default if the recipe has none.

    Args:
        recipe: Settings of the run.
        key: Key of ``data.task``: "users" or "clusters".

    Raises:
        RecipeError: The recipe has no task.
    """
    task_section = recipe.data.model_dump().get("task")
    if not task_section:
        raise RecipeError(f"reproduce: {key} are counted on tasks; got a recipe without data.task")
    default = getattr(TASKS[task_section["name"]], key)
    return task_section[key] or default


def _participation_percent(cell: Cell) -> float:
    """Return the share of users who participate in a round, in per cent."""
    share = cell.recipe.training.participation
    assert isinstance(share, float | int), "tables of costs need a fraction; got a list of each round's participants"
    return 100 * share


def _parameter_ratio(cell: Cell) -> float:
    """Return how many parameters the server's models have together, in multiples of one ResNet-9.

    As in FedMerge's Table 1, the classifier does not count, since its size depends on the number of classes.
    """
    method = make(cell.recipe.method.name, **cell.recipe.method.settings)
    num_models = method.server.server_models
    net = cell.recipe.base.removeprefix(NETS)
    return num_models * _body_parameters(net) / _body_parameters("resnet9")


def _body_parameters(name: str) -> int:
    """Count the parameters of a net without its classifier (the last linear layer), to compare nets for any classes."""
    num_classes = 10  # any number, as the classifier does not count
    net = make_net(name, _IMAGE, num_classes, seed=0)
    linear_layers = [module for module in net.modules() if isinstance(module, nn.Linear)]
    classifier = linear_layers[-1]
    num_parameters = sum(parameter.numel() for parameter in net.parameters())
    return num_parameters - sum(parameter.numel() for parameter in classifier.parameters())


_COUNTS: dict[str, Callable[[Cell], float]] = {
    "users": _count_users,
    "clusters": _count_clusters,
    "participation": _participation_percent,
    "parameters": _parameter_ratio,
}


Counts = Mapping[tuple[str, str], float]
"""The counted value of each cell, by row and column."""

_TABLE3_HEADINGS = ["what", "paper", "counted as the paper does", "true"]


def write_costs(folder: Path, plan: Plan, counts: Counts, costs: Costs | None) -> list[str]:
    """Write ``table.md`` and ``table.json`` of a table of costs, and return the lines of ``table.md``.

    CoMiGS's Table 3 comes first where ``costs`` are given, then the counted rows beside the paper's numbers.

    Args:
        folder: The folder to write to.
        plan: The table.
        counts: The counted values, by row and column.
        costs: The costs of the methods of CoMiGS's Table 3, if the plan has them.
    """
    counted = [
        {"row": row, "column": column, "counted": count, "paper": _paper_value(plan, row, column)}
        for (row, column), count in counts.items()
    ]
    source_line = f"{plan.study.source}; {plan.experiment.source}."
    if costs is None:
        content: dict[str, object] = {}
        table3_lines = []
    else:
        source_line += f" Base {costs.base.name}, {costs.base.dtype}. MiB = 2^20 bytes."
        content = dict(costs.as_dict())
        table3_lines = [*_table3_lines(costs), ""]
    content["counted"] = counted
    lines = [f"# {plan.experiment.title}", "", source_line, "", *table3_lines, *_counted_lines(plan, counts), ""]
    lines += [f"- {note.text}" for note in plan.experiment.notes]
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "table.json", content)
    write_text(folder / "table.md", "\n".join(lines).rstrip() + "\n")
    return lines


def _counted_lines(plan: Plan, counts: Counts) -> list[str]:
    """Return a table in Markdown: for each row and column our value, counted without a run, and the paper's.

    Args:
        plan: The plan of the table: its rows and columns.
        counts: The counted values, such as numbers of parameters, by row and column.
    """
    headings = [""]
    for column in plan.columns:
        headings += [plan.label(column), plan.experiment.reference]
    lines = [table_line(headings), "|" + "---|" * len(headings)]
    for row in plan.rows:
        cells = [plan.experiment.rows[row].label or row]
        for column in plan.columns:
            paper = _paper_value(plan, row, column)
            cells += [f"{counts[row, column]:.4g}", "" if paper is None else f"{paper:g}"]
        lines.append(table_line(cells))
    return lines


def _paper_value(plan: Plan, row: str, column: str) -> float | None:
    """Return the number that the paper printed for a cell; None where it printed none."""
    printed_cells = plan.experiment.rows[row].paper
    if printed_cells is None:
        return None
    printed = printed_cells[plan.experiment.column_names.index(column)]  # such as "46.36 (0.16)"
    if printed is None:
        return None
    mean, _ = parse_printed(printed)
    return mean


def _table3_lines(costs: Costs) -> list[str]:
    """Return CoMiGS's Table 3 in Markdown: what a CoMiGS model costs more than one of FedAvg, in compute and memory.

    Each difference is given as the paper prints it, as its way of counting gives for our model, and as counted here.
    Below the table a line explains how the two counts differ.

    Args:
        costs: The counted costs; ``costs.table3`` has the differences, in FLOPs or bytes.
    """
    lines = [table_line(_TABLE3_HEADINGS), "|" + "---|" * len(_TABLE3_HEADINGS)]
    for cost in costs.table3:
        counted_as_in_paper = _format_difference(cost.theirs, cost.theirs_share, cost.unit)
        actual = _format_difference(cost.true, cost.true_share, cost.unit)
        lines.append(table_line([cost.what, cost.paper, counted_as_in_paper, actual]))
    lines.append("")
    lines += [f"- {cost.what}: {cost.why}" for cost in costs.table3]
    return lines


def _format_difference(value: float | None, share: float | None, unit: str) -> str:
    """Return a difference of two costs as text with its sign, such as "+1.500 MiB (+3.00%)".

    Args:
        value: The difference, in FLOPs or bytes; None if it was not counted.
        share: The difference as a share of the compared cost, if known.
        unit: "FLOPs", shown as TFLOPs or MFLOPs; any other unit is shown in MiB.
    """
    if value is None:
        return "not counted"
    if unit != "FLOPs":
        difference = f"{value / 2**20:+,.3f} MiB"
    elif abs(value) >= 1e11:
        difference = f"{value / 1e12:+,.2f} TFLOPs"
    else:
        difference = f"{value / 1e6:+,.3f} MFLOPs"
    return difference if share is None else f"{difference} ({share:+.2%})"
