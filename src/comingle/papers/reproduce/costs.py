"""Tables of costs: counted by ``comingle.costing``, nothing is trained."""

from __future__ import annotations

from pathlib import Path

from comingle.costing import Plan as Costs
from comingle.papers.reproduce.plan import Plan
from comingle.papers.reproduce.tables import table_line
from comingle.records import write_json, write_text


def write_costs(folder: Path, plan: Plan, counted: Costs) -> None:
    """``table.md`` and ``table.json`` of a table of costs: the paper's words, its way of counting, what is true."""
    lines = [
        f"# {plan.experiment.title}",
        "",
        f"{plan.study.source}; {plan.experiment.source}. Scale {plan.scale}, base {counted.base}, {counted.dtype}. "
        "MiB = 2^20 bytes.",
        "",
        table_line(["what", "paper", "counted as the paper does", "true", "why"]),
        "|---|---|---|---|---|",
    ]
    for one in counted.table3:
        theirs = _difference(one.theirs, one.theirs_share, one.unit)
        lines.append(
            table_line([one.what, one.paper, theirs, _difference(one.true, one.true_share, one.unit), one.why])
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "table.json", counted.as_dict())
    write_text(folder / "table.md", "\n".join(lines) + "\n")


def _difference(value: float | None, share: float | None, unit: str) -> str:
    if value is None:
        return "not counted"
    size, name = (value / 1e6, "MFLOPs") if unit == "FLOPs" else (value / 2**20, "MiB")
    return f"{size:+,.3f} {name}" + ("" if share is None else f" ({share:+.2%})")
