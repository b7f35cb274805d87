"""Tables of costs: counted by ``comingle.cost`` and :mod:`comingle.papers.reproduce.counted`, nothing is trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from comingle.cost.records import Plan as Costs
from comingle.papers.reproduce.plan import Plan
from comingle.papers.reproduce.published import printed
from comingle.papers.reproduce.tables import table_line
from comingle.utils.records import write_json, write_text

Counts = Mapping[tuple[str, str], float]
"""What each cell counts, by row and column."""

_HEAD = ["what", "paper", "counted as the paper does", "true"]


def write_costs(folder: Path, plan: Plan, counts: Counts, costs: Costs | None) -> list[str]:
    """Write ``table.md`` and ``table.json`` of a table of costs, and return the lines of the first.

    CoMiGS's Table 3 comes first where there are ``costs``, then what the rows count beside the paper's numbers.
    """
    about = f"{plan.study.source}; {plan.experiment.source}."
    if costs is not None:
        about += f" Base {costs.base}, {costs.dtype}. MiB = 2^20 bytes."
    lines = [f"# {plan.experiment.title}", "", about, ""]
    lines += [*_table3(costs), ""] if costs is not None else []
    lines += [*_counted(plan, counts), "", *(f"- {note.text}" for note in plan.experiment.notes)]
    folder.mkdir(parents=True, exist_ok=True)
    counted = [
        {"row": row, "column": column, "counted": count, "paper": _paper(plan, row, column)}
        for (row, column), count in counts.items()
    ]
    write_json(folder / "table.json", {**(costs.as_dict() if costs is not None else {}), "counted": counted})
    write_text(folder / "table.md", "\n".join(lines).rstrip() + "\n")
    return lines


def _counted(plan: Plan, counts: Counts) -> list[str]:
    """What the rows count, in Markdown: for each column ours and the paper's."""
    heads = [part for column in plan.columns for part in (plan.label(column), plan.experiment.reference)]
    lines = [table_line(["", *heads]), "|" + "---|" * (1 + len(heads))]
    for row in plan.rows:
        cells = [plan.experiment.rows[row].label or row]
        for column in plan.columns:
            paper = _paper(plan, row, column)
            cells += [f"{counts[row, column]:.4g}", "" if paper is None else f"{paper:g}"]
        lines.append(table_line(cells))
    return lines


def _paper(plan: Plan, row: str, column: str) -> float | None:
    cells = plan.experiment.rows[row].paper
    cell = None if cells is None else cells[plan.experiment.column_names.index(column)]
    return None if cell is None else printed(cell)[0]


def _table3(costs: Costs) -> list[str]:
    """CoMiGS's Table 3 in Markdown: the paper's words, its way of counting, what is true, and why they differ."""
    lines = [table_line(_HEAD), "|" + "---|" * len(_HEAD)]
    for one in costs.table3:
        theirs = _difference(one.theirs, one.theirs_share, one.unit)
        lines.append(table_line([one.what, one.paper, theirs, _difference(one.true, one.true_share, one.unit)]))
    return [*lines, "", *(f"- {one.what}: {one.why}" for one in costs.table3)]


def _difference(value: float | None, share: float | None, unit: str) -> str:
    if value is None:
        return "not counted"
    share_of = "" if share is None else f" ({share:+.2%})"
    if unit == "FLOPs":
        return (f"{value / 1e12:+,.2f} TFLOPs" if abs(value) >= 1e11 else f"{value / 1e6:+,.3f} MFLOPs") + share_of
    return f"{value / 2**20:+,.3f} MiB{share_of}"
