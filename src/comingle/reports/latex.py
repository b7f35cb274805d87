"""Comparisons as LaTeX tables of the package booktabs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from comingle.reports.tables import cost_columns, note_of, score_columns, title_of
from comingle.tables.measures import best_of
from comingle.tables.run_tables import users_with_column
from comingle.utils.records import measure_of, number
from comingle.utils.terminal import printable

_CHARACTERS = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "`": r"\textasciigrave{}",
    "'": r"\textquotesingle{}",
    "[": "{[}",  # at the start of a row an option of the row before
    "*": "{*}",
    "†": r"\textdagger{}",
    "–": r"\textendash{}",
    "±": r"$\pm$",
    "·": r"\textperiodcentered{}",
}
_SPECIAL = re.compile("|".join(map(re.escape, _CHARACTERS)))
_HYPHENS = re.compile("-(?=-)")
"""Hyphens that would become a dash with the next one."""

CellSpread = dict[str, float | None]
"""``mean`` and ``std`` over seeds, each None where it is not finite."""


def escape_latex(text: object) -> str:
    """Return a text that LaTeX typesets as it is, on one line.

    >>> escape_latex("50% of a_b")
    '50\\\\% of a\\\\_b'
    """
    return _HYPHENS.sub("-{}", _SPECIAL.sub(lambda match: _CHARACTERS[match[0]], printable(text)))


def latex(table: dict[str, Any], *, everybody: bool = False) -> str:
    """Return a comparison as a ``table`` environment for the package booktabs.

    A row is a method, a column a user, a mean over users or a cost; with several seeds costs are a tabular of their own
    below. Cells are means over seeds, with the standard
    deviation where a method has several seeds. The best mean of a column is bold, as are those that are printed alike;
    nothing is bold if there is one method.

    Args:
        table: the table of :func:`comingle.reports.comparisons.compare_metrics`.
        everybody: of more users than have a column, add a table with a row for each; the best of a row is bold.
    """
    rows, measure = table["methods"], measure_of(table["methods"][0])
    methods = [escape_latex(row["method"]) for row in rows]
    seeds = [len(row["seeds"]) for row in rows]
    scores = [(escape_latex(name), _latex_cells(values, seeds, measure)) for name, values in score_columns(table)]
    costs = [(escape_latex(name), [escape_latex(cell) for cell in cells]) for name, cells in cost_columns(table)]
    columns = [("method", methods), *scores]
    parted = [columns, [columns[0], *costs]] if max(seeds) > 1 else [[*columns, *costs]]  # deviations leave no room
    best = "; best in bold" if len(rows) > 1 else ""
    title = title_of(table, spread="mean ± std")
    bodies = [_tabular([name for name, _ in one], zip(*(c for _, c in one), strict=True)) for one in parted]
    parts = [_environment(f"{title}{best}", bodies, note_of(table))]
    users = rows[0]["users"]
    if everybody and not users_with_column(users):
        body = [
            [escape_latex(name), *_latex_cells([row["users"][name] for row in rows], seeds, measure)] for name in users
        ]
        parts.append(_environment(f"every user: {title}{best}", [_tabular(["user", *methods], body)], ""))
    return "% needs \\usepackage{booktabs}\n" + "\n".join(parts)


def _latex_cells(values: Sequence[CellSpread], seeds: Sequence[int], measure: str) -> list[str]:
    """Return the cells of methods that are compared with each other."""
    finite = [mean for value in values if (mean := value["mean"]) is not None and math.isfinite(mean)]
    best = number(best_of(measure)(finite), measure) if finite and len(values) > 1 else None
    cells = []
    for value, count in zip(values, seeds, strict=True):
        told = number(value["mean"], measure)
        std = value["std"] if count > 1 else None
        cell = escape_latex(told if std is None else f"{told} ± {number(std, measure)}")
        cells.append(rf"\textbf{{{cell}}}" if told == best else cell)
    return cells


def _environment(caption: str, tabulars: Sequence[str], note: str) -> str:
    lines = [
        r"\begin{table}",
        r"  \centering",
        r"  \small",
        rf"  \caption{{{escape_latex(caption[0].upper() + caption[1:])}}}",
        "\n  \\par\\medskip\n".join(tabulars),
        *([rf"  \par\smallskip\footnotesize {escape_latex(note)}"] if note else []),
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _tabular(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [
        rf"  \begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
        r"    \toprule",
        *_lines([head]),
        r"    \midrule",
        *_lines(rows),
        r"    \bottomrule",
        r"  \end{tabular}",
    ]
    return "\n".join(lines)


def _lines(rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"    {' & '.join(row)} \\\\" for row in rows]
