"""Tables of our numbers beside the paper's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from string import ascii_lowercase
from types import MappingProxyType
from typing import Any, TypedDict

from comingle.reports import comparisons
from comingle.reports.comparisons import (
    DEFAULT_BASELINE,
    BaselineComparison,
    BaselineComparisonRecord,
    Results,
    baseline_methods,
    baseline_of,
    baseline_text,
    compare_with_baseline,
)
from comingle.reports.formatting import Table
from comingle.reports.tables import (
    escape_latex,
    latex_label,
    latex_number,
    latex_verdicts,
    table_environment,
    tabular,
)
from comingle.utils.records import MEASURES, write_json, write_text
from comingle.utils.terminal import literal_text
from comingle_papers.reproduce.plan import Plan
from comingle_papers.reproduce.published import Note, parse_printed

_LISTED = 8
"""Largest number of pairs of rows that a sentence lists."""
_MOSTLY = 0.8
"""Share of pairs in the paper's order above which a sentence says that the order is mostly reproduced."""

Entry = tuple[float, float | None]
"""Mean and standard deviation over seeds; the deviation is None where unknown."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """Comparison of the paper's order of some rows with ours.

    ``tau`` is Kendall's tau-b and ``p_value`` that of the test for independent orders; both are None for fewer than
    two rows, or where all values of one side are equal. ``agreeing`` counts the pairs of rows with the same order.
    ``swapped`` are pairs (the better row of the paper first) whose order is reversed here by more than the sum of their
    deviations; in ``unclear`` pairs the difference is smaller, in the paper or here.
    """

    rows: int
    pairs: int
    agreeing: int
    tau: float | None
    p_value: float | None
    swapped: tuple[tuple[str, str], ...]
    unclear: tuple[tuple[str, str], ...]
    deviations: bool
    """True if our deviations are known; with one seed they are not."""


def ranks(means: Mapping[str, float], *, lower_is_better: bool = True) -> dict[str, int]:
    """Return the rank of each row, 1 for the best; equal numbers share the better rank, as in 1, 2, 2, 4."""
    sign = 1 if lower_is_better else -1
    rank_by_row: dict[str, int] = {}
    for row, mean in means.items():
        num_better = sum(sign * other < sign * mean for other in means.values())
        rank_by_row[row] = 1 + num_better
    return rank_by_row


def compare_orders(paper: Mapping[str, Entry], ours: Mapping[str, Entry], *, lower_is_better: bool = True) -> Order:
    """Compare the paper's order of rows with ours, pair by pair, for the rows that both have.

    A pair agrees if its difference has the same sign in the paper and here, or is zero in both. Any other pair is
    swapped if both differences exceed the sum of the two rows' standard deviations, and unclear otherwise.

    Args:
        paper: The paper's mean and standard deviation, by row.
        ours: Our mean and standard deviation, by row.
        lower_is_better: Whether the smallest mean is the best.
    """
    rows = [row for row in paper if row in ours]
    paper_means = {row: mean for row, (mean, _) in paper.items()}
    our_means = {row: mean for row, (mean, _) in ours.items()}
    pairs = list(combinations(rows, 2))
    agreeing = 0
    swapped: list[tuple[str, str]] = []
    unclear: list[tuple[str, str]] = []
    for first, second in pairs:
        paper_difference = paper_means[second] - paper_means[first]
        our_difference = our_means[second] - our_means[first]
        has_same_sign = paper_difference * our_difference > 0
        if has_same_sign or paper_difference == our_difference == 0:
            agreeing += 1
            continue
        first_is_better = paper_difference >= 0 if lower_is_better else paper_difference <= 0
        better_first = (first, second) if first_is_better else (second, first)
        is_clear_in_paper = abs(paper_difference) > _summed_deviations(paper, first, second)
        is_clear_here = abs(our_difference) > _summed_deviations(ours, first, second)
        if is_clear_in_paper and is_clear_here:
            swapped.append(better_first)
        else:
            unclear.append(better_first)
    tau, p_value = _kendall([paper_means[row] for row in rows], [our_means[row] for row in rows])
    our_deviations = [ours[row][1] for row in rows]
    return Order(
        rows=len(rows),
        pairs=len(pairs),
        agreeing=agreeing,
        tau=tau,
        p_value=p_value,
        swapped=tuple(swapped),
        unclear=tuple(unclear),
        deviations=any(deviation is not None for deviation in our_deviations),
    )


def _summed_deviations(entries: Mapping[str, Entry], first: str, second: str) -> float:
    """Return the sum of two rows' standard deviations, above which a difference of their means is clear.

    An unknown deviation counts as zero.

    Args:
        entries: Mean and standard deviation, by row.
        first: The first row.
        second: The second row.
    """
    _, first_deviation = entries[first]
    _, second_deviation = entries[second]
    return (first_deviation or 0.0) + (second_deviation or 0.0)


def _kendall(paper: list[float], ours: list[float]) -> tuple[float | None, float | None]:
    """Return Kendall's tau-b, which compares the orders of two lists of numbers, and its p-value.

    Both are None for fewer than two rows, or where all numbers of one list are equal.

    Args:
        paper: The paper's numbers, by row.
        ours: Our numbers, in the same order of rows.
    """
    if len(paper) < 2:
        return None, None
    from scipy.stats import kendalltau  # takes half a second to import

    result: Any = kendalltau(paper, ours)
    tau, p_value = float(result.statistic), float(result.pvalue)
    if math.isnan(tau):  # all numbers of one list are equal
        return None, None
    return tau, p_value


def sentence(label: str, order: Order, reference: str = "paper") -> str:
    """Return a sentence that says whether our results have the published order of rows.

    Such as "News: tau = 0.67 (p = 0.33) over 4 rows; the order is mostly reproduced: 5 of 6 pairs are ...".

    Args:
        label: The column's label, with which the sentence begins.
        order: The comparison of the two orders.
        reference: The source of the published numbers.
    """
    if order.rows < 2:
        return f"{label}: {order.rows} row with numbers on both sides, so there is no order to compare."
    if order.tau is None:
        return f"{label}: all numbers of one side are equal, so there is no order to compare."
    head = f"{label}: tau = {order.tau:.2f} (p = {order.p_value:.2g}) over {order.rows} rows; "
    if order.agreeing == order.pairs:
        return head + f"the {reference}'s order is reproduced."
    agreement = f"{order.agreeing} of {order.pairs} pairs are in the {reference}'s order"
    if not order.swapped:
        unclear = _list_pairs(order.unclear)
        return f"{head}{agreement}, and the others differ by no more than their deviations: {unclear}."
    is_mostly_reproduced = order.agreeing > _MOSTLY * order.pairs
    verdict = "the order is mostly reproduced" if is_mostly_reproduced else "the order is not reproduced"
    beyond = "beyond the deviations" if order.deviations else "with one seed, so that our deviations are unknown"
    swapped = f"reversed, {beyond}: {_list_pairs(order.swapped)}"
    unclear = f"; within the deviations: {_list_pairs(order.unclear)}" if order.unclear else ""
    return f"{head}{verdict}: {agreement}; {swapped}{unclear}."


def _list_pairs(pairs: tuple[tuple[str, str], ...]) -> str:
    """Return pairs of rows as text, ``A before B, C before D and 3 more``, with at most 8 pairs."""
    text = ", ".join(f"{better} before {worse}" for better, worse in pairs[:_LISTED])
    num_others = len(pairs) - _LISTED
    if num_others > 0:
        text += f" and {num_others} more"
    return text


_NUMBER_FORMATS = {"mean_test_accuracy": ",.1f", "mean_test_rouge1": ".3f", "mean_test_loss": ",.3g"}
_DEFAULT_FORMAT = ",.2f"

Scores = Mapping[tuple[str, str], Sequence[float]]
"""Every seed's score, by (row, column)."""


CellNumbers = Mapping[str, float | int | None]
"""``mean``, ``std`` and ``rank`` of a cell."""


class CellRecord(TypedDict):
    """A cell of a table: our scores, the paper's, and the numbers of its notes."""

    ours: CellNumbers | None
    scores: list[float]
    paper: CellNumbers | None
    notes: list[int]


class _Column(TypedDict):
    name: str
    label: str
    seeds: list[int]
    base: list[str]
    cells: dict[str, CellRecord]
    order: dict[str, object]
    sentence: str  # whether our results have the paper's order of rows; empty if they are not compared


class ColumnRecord(_Column):
    """A column of a table, with each row compared to the baseline where the baseline was run."""

    against: BaselineComparisonRecord | None


class _TableNotes(TypedDict):
    missing: list[str]
    left_out: dict[str, str]
    diverged: list[str]
    about: list[str]
    notes: list[str]


class _PaperTable(_TableNotes):
    name: str
    title: str
    source: str
    metric: str
    reference: str
    better: str
    scale: str
    about_scale: str
    seeds: list[int]
    rows: dict[str, str]
    columns: list[ColumnRecord]


class PaperTable(_PaperTable, total=False):
    """A table of a paper beside ours, the content of ``table.json``."""

    measured: Sequence[str]
    repeats: dict[str, str]
    """Labels of columns by the label of a column that has the same runs."""


def build_table(
    plan: Plan,
    scores: Scores,
    *,
    diverged: Sequence[str] = (),
    results: Mapping[str, Results] = MappingProxyType({}),
    baseline: str | None = None,
) -> PaperTable:
    """Return a table as plain data, the content of ``table.json``.

    Its key ``about`` has the experiment's notes on the whole table, ``notes`` those on single cells, to which the cells
    refer by index. A column's ``against`` compares each row with the baseline.

    Args:
        plan: The plan of the table: its rows, columns and runs.
        scores: Every seed's score, by (row, column).
        diverged: Descriptions of runs that diverged.
        results: Each user's metric, nested by column, row, seed and user; a column without results is not compared with
            the baseline.
        baseline: A row or a method to compare the others with; None for the default.

    Raises:
        RecipeError: No row is the baseline.
    """
    experiment = plan.experiment
    baseline = baseline_row(plan, baseline)
    columns: list[ColumnRecord] = []
    for column in plan.columns:
        comparison = _compare_with_baseline(plan, results.get(column, {}), baseline)
        columns.append({**_column_record(plan, column, scores), "against": comparison})
    return {
        "name": plan.name,
        "title": experiment.title,
        "source": f"{plan.study.source}; {experiment.source}",
        "metric": experiment.metric,
        "reference": experiment.reference,
        "better": experiment.better,
        "scale": plan.scale,
        "about_scale": plan.scaled.about,
        "seeds": list(plan.seeds),
        "rows": {row: experiment.rows[row].label or row for row in experiment.rows if row not in plan.missing},
        "columns": columns,
        "missing": list(plan.missing),
        "left_out": dict(plan.left_out),
        "diverged": list(diverged),
        "about": [note.text for note in experiment.notes if not _is_on_cells(note)],
        "notes": [note.text for note in experiment.notes if _is_on_cells(note)],
        "repeats": {plan.label(column): plan.label(first) for column, first in repeated_columns(plan).items()},
    }


def repeated_columns(plan: Plan) -> dict[str, str]:
    """Find columns that have exactly the runs of an earlier column, so that a table can say that they repeat it.

    Returns:
        The name of the earlier column, by that of the later one.
    """
    first_column_by_runs: dict[frozenset[tuple[str, str]], str] = {}
    repeated: dict[str, str] = {}
    for column in plan.columns:
        runs = frozenset((cell.row, cell.folder) for cell in plan.cells if cell.column == column)
        if not runs:
            continue
        first_column = first_column_by_runs.setdefault(runs, column)
        if first_column != column:
            repeated[column] = first_column
    return repeated


def baseline_row(plan: Plan, wanted: str | None) -> str:
    """Return the name of the row with which a table compares its other rows.

    Each row of the table has runs of one method. Without ``wanted`` the baseline is the first row with the method
    ``local`` (users who train alone), or the first row of the table if there is none. Several names, as in
    ``local,fedavg``, are returned as one text: the other rows are then compared with the best of these.

    Args:
        plan: The plan of the table: its rows, columns and runs.
        wanted: Value of the option ``--against``: a row, or a method for the first row with that method, or several of
            these with commas between them; None without the option.

    Raises:
        RecipeError: No row matches.
    """
    first_row_by_method: dict[str, str] = {}
    for row in plan.rows:
        first_row_by_method.setdefault(plan.experiment.rows[row].method, row)
    if wanted is None:
        row_of_local = first_row_by_method.get(DEFAULT_BASELINE)
        return baseline_of(plan.rows, row_of_local)  # the first row if there is no row of "local"
    wanted_rows: list[str] = []
    for name in baseline_methods(wanted):  # split at commas
        is_row = name in plan.rows
        wanted_rows.append(name if is_row else first_row_by_method.get(name, name))
    return baseline_of(plan.rows, ",".join(wanted_rows))  # an error for a name that is no row and no method


def _compare_with_baseline(plan: Plan, results: Results, baseline: str) -> BaselineComparisonRecord | None:
    """Test for each row of one column whether it differs from the baseline row; return the verdicts for ``table.json``.

    Return None if the table's metric is not in :data:`MEASURES`, if the baseline was not run, or if no other row has
    enough seeds.

    Args:
        plan: The plan of the table: its rows, columns and runs.
        results: The column's results, each user's metric, nested by row, seed and user.
        baseline: The baseline row, or several rows separated by commas; the best of these is used.
    """
    measure = plan.experiment.metric.removeprefix("mean_test_")
    baseline_rows = baseline_methods(baseline)
    was_run = all(row in results for row in baseline_rows)
    if measure not in MEASURES or not was_run:
        return None
    comparison = compare_with_baseline(results, measure, baseline)
    if comparison is None:
        return None
    # The comparison has the keys of rows; show their labels.
    labels = {row: plan.experiment.rows[row].label or row for row in results}
    verdicts = tuple(replace(verdict, method=labels[verdict.method]) for verdict in comparison.verdicts)
    baseline_label = baseline_text([labels[row] for row in baseline_rows])
    return replace(comparison, baseline=baseline_label, verdicts=verdicts).as_dict()


def _column_record(plan: Plan, name: str, scores: Scores) -> _Column:
    """Return a column of ``table.json``: numbers and ranks of all rows, and how well their order fits the paper's.

    Only rows with both our number and the paper's are ranked, and only their order is compared.

    Args:
        plan: The plan of the table: its rows, columns and runs.
        name: The column.
        scores: Every seed's score, by (row, column).
    """
    lower_is_better = plan.experiment.better == "lower"
    paper = _paper_numbers(plan, name)
    ours = {row: _mean_and_deviation(scores[row, name]) for row in plan.rows if (row, name) in scores}
    common_rows = [row for row in plan.rows if row in paper and row in ours]
    common_paper = {row: paper[row] for row in common_rows}
    common_ours = {row: ours[row] for row in common_rows}
    paper_ranks = ranks({row: mean for row, (mean, _) in common_paper.items()}, lower_is_better=lower_is_better)
    our_ranks = ranks({row: mean for row, (mean, _) in common_ours.items()}, lower_is_better=lower_is_better)
    order = compare_orders(common_paper, common_ours, lower_is_better=lower_is_better)

    cells: dict[str, CellRecord] = {}
    for row in plan.rows:
        cells[row] = {
            "ours": _cell_numbers(ours.get(row), our_ranks.get(row)),
            "scores": list(scores.get((row, name), [])),
            "paper": _cell_numbers(paper.get(row), paper_ranks.get(row)),
            "notes": _note_indices(plan, row, name),
        }
    label = plan.label(name)
    is_quick_test = plan.scale == "smoke"  # with models so small that their order means nothing
    order_sentence = ""
    if paper and not is_quick_test:
        order_sentence = sentence(label, order, plan.experiment.reference)
    return {
        "name": name,
        "label": label,
        "seeds": sorted({cell.seed for cell in plan.cells if cell.column == name}),
        "base": sorted({cell.recipe.base for cell in plan.cells if cell.column == name}),
        "cells": cells,
        "order": asdict(order),
        "sentence": order_sentence,
    }


def _paper_numbers(plan: Plan, column: str) -> dict[str, Entry]:
    """Return the numbers that the paper printed in a column, by row; rows without one are left out."""
    column_index = plan.experiment.column_names.index(column)
    numbers: dict[str, Entry] = {}
    for name, row in plan.experiment.rows.items():
        printed = None if row.paper is None else row.paper[column_index]  # such as "46.36 (0.16)"
        if printed is not None:
            numbers[name] = parse_printed(printed)
    return numbers


def _note_indices(plan: Plan, row: str, column: str) -> list[int]:
    """Return the indices of the notes on a cell in the list ``notes`` of ``table.json``, which has all notes on cells.

    Args:
        plan: The plan of the table: its rows, columns and runs.
        row: Row of the cell.
        column: Column of the cell.
    """
    notes_on_cells = [note for note in plan.experiment.notes if _is_on_cells(note)]
    return [index for index, note in enumerate(notes_on_cells) if row in note.rows and column in note.columns]


def _is_on_cells(note: Note) -> bool:
    """Return whether a note refers to some cells, not to the whole table."""
    return bool(note.rows or note.columns)


def _mean_and_deviation(values: Sequence[float]) -> Entry:
    """Return mean and sample standard deviation over seeds; the deviation is None for one seed."""
    mean = statistics.fmean(values)
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return mean, deviation


def _cell_numbers(mean_and_deviation: Entry | None, rank: int | None) -> CellNumbers | None:
    """Return the numbers of a cell for ``table.json``; None without a mean.

    Args:
        mean_and_deviation: Mean and standard deviation over seeds; None if there is no number.
        rank: Rank of the row; None if it is not ranked.
    """
    if mean_and_deviation is None:
        return None
    mean, deviation = mean_and_deviation
    return {"mean": mean, "std": deviation, "rank": rank}


# -------------------------------------------------------------------- as text


def write_tables(folder: Path, table: PaperTable) -> None:
    """Write a table to ``table.md``, for readers, and to ``table.json``, for programs.

    Args:
        folder: The folder to write to, created if it does not exist.
        table: The table.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "table.json", dict(table))
    write_text(folder / "table.md", markdown(table))


def markdown(table: PaperTable) -> str:
    """Return a table as Markdown: our numbers and the paper's with ranks, remarks, and comparisons with a baseline."""
    headings, rows = _text_grid(table)
    lines = [f"# {table['title']}", "", *_subtitle_lines(table), ""]
    lines += [table_line(headings), "|" + "---|" * len(headings)]
    lines += [table_line(row) for row in rows]
    lines.append("")
    lines += [f"- {remark}" for remark in remarks(table)]
    for label, comparison in column_verdicts(table):
        lines += ["", f"## {label}: better, level or worse", "", *comparisons.markdown(comparison)]
    return "\n".join(lines) + "\n"


def latex(table: PaperTable) -> str:
    """Return a table in LaTeX: our numbers beside the paper's, then comparisons of the methods with a baseline.

    Each column has a ``table`` environment that says whether each method is better than the baseline, level with it or
    worse, unless the column is not compared.
    """
    headings, rows = _text_grid(table)
    latex_headings = [escape_latex(heading) for heading in headings]
    latex_rows = [[escape_latex(row), *map(latex_number, cells)] for row, *cells in rows]
    body = tabular(latex_headings, latex_rows)
    caption = " ".join([f"{table['title']}.", *_subtitle_lines(table)])
    label = latex_label(table["name"])
    environments = [table_environment(caption, [body], " ".join(remarks(table)), label=label)]
    for column in table["columns"]:
        record = column.get("against")
        if record:
            comparison = BaselineComparison.read(record)
            column_label = latex_label(table["name"], column["name"])
            environments.append(latex_verdicts(comparison, column_label, prefix=column["label"]))
    return "% needs \\usepackage{booktabs}\n" + "\n".join(environments)


def column_verdicts(table: PaperTable) -> list[tuple[str, BaselineComparison]]:
    """Return label and comparison with the baseline of each column that has such a comparison."""
    verdicts: list[tuple[str, BaselineComparison]] = []
    for column in table["columns"]:
        record = column.get("against")
        if record:
            verdicts.append((column["label"], BaselineComparison.read(record)))
    return verdicts


def render(table: PaperTable) -> Table:
    """Return a table of ours and the paper's numbers for the terminal; those of the paper are dimmed."""
    headings, rows = _text_grid(table)
    title_lines = [table["title"], *_subtitle_lines(table)]
    rendered = Table(title="\n".join(title_lines), title_justify="left", box=None)
    method_heading, *number_headings = headings
    rendered.add_column(method_heading, justify="left", no_wrap=True)
    for heading in number_headings:
        is_published = heading == table["reference"]
        rendered.add_column(heading, justify="right", style="dim" if is_published else "")
    for row in rows:
        rendered.add_row(*map(literal_text, row))
    return rendered


def remarks(table: PaperTable) -> list[str]:
    """Return the remarks printed below a table: on the order of rows, on lacking seeds and runs, and notes on cells.

    A note begins with its letter, "(a)", which is also printed in the cells that it is about.

    Args:
        table: The table beside the paper's, the content of ``table.json``.
    """
    columns = table["columns"]
    # A column's sentence says whether its rows have the paper's order; empty if they are not compared.
    lines = [column["sentence"] for column in columns if column["sentence"]]
    for column in columns:
        if column["seeds"] != table["seeds"]:
            lines.append(f"{column['label']}: seeds {', '.join(map(str, column['seeds']))} only.")
    lines += [f"{text}." for text in table["about"]]  # notes on the whole table
    if table["missing"]:
        lines.append(f"Missing, since the method is not implemented: {', '.join(table['missing'])}.")
    lines += [f"{later} repeats the runs of {earlier}." for later, earlier in table.get("repeats", {}).items()]
    lines += [f"Left out: {column} ({reason})." for column, reason in table["left_out"].items()]
    lines += [f"Diverged: {run}" for run in table["diverged"]]
    lines += table.get("measured", ())  # on which machines the runs were measured; only of tables from an archive
    used_notes = {index for column in columns for cell in column["cells"].values() for index in cell["notes"]}
    lines += [f"({_note_letter(index)}) {table['notes'][index]}." for index in sorted(used_notes)]
    return lines


def _subtitle_lines(table: PaperTable) -> list[str]:
    """Return the lines below the title: source, scale and base models, and how to read the numbers."""
    seeds = [str(seed) for seed in table["seeds"]]
    number_meaning = f"mean (std) over seeds {', '.join(seeds)}" if len(seeds) > 1 else f"seed {seeds[0]}"
    bases = sorted({base for column in table["columns"] for base in column["base"]})
    base_names = ", ".join(Path(base).name or base for base in bases)
    rank_meaning = "; #: rank among the rows with numbers on both sides" if _has_reference(table) else ""
    return [
        f"{table['source']}.",
        f"Scale {table['scale']}: {table['about_scale']}. Base: {base_names}.",
        f"Ours: {number_meaning}, {table['better']} is better{rank_meaning}.",
    ]


def _has_reference(table: PaperTable) -> bool:
    """Return whether any cell of the table has a number of the paper."""
    cells = [cell for column in table["columns"] for cell in column["cells"].values()]
    return any(cell["paper"] for cell in cells)


def _text_grid(table: PaperTable) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows of a table as text; rows without any number are left out.

    Each column of the table becomes two columns of text, our numbers and the paper's; or only ours, if the table has no
    number of the paper. The letters of a cell's notes follow its last number.
    """
    has_reference = _has_reference(table)
    headings = ["method"]
    for column in table["columns"]:
        headings.append(column["label"])
        if has_reference:
            headings.append(table["reference"])
    number_format = _NUMBER_FORMATS.get(table["metric"], _DEFAULT_FORMAT)
    rows: list[list[str]] = []
    for row, label in table["rows"].items():
        texts: list[str] = []
        for column in table["columns"]:
            cell = column["cells"].get(row)
            if cell is None:
                texts += ["", ""] if has_reference else [""]
                continue
            texts.append(_format_numbers(cell["ours"], number_format))
            if has_reference:
                texts.append(_format_numbers(cell["paper"], number_format))
            texts[-1] += "".join(f" ({_note_letter(index)})" for index in cell["notes"])
        if any(texts):
            rows.append([label, *texts])
    return headings, rows


def _format_numbers(numbers: CellNumbers | None, number_format: str) -> str:
    """Return a cell as text, ``46.36 (0.16) #2``: mean, deviation and rank, as far as they are known.

    Args:
        numbers: The numbers; None for an empty cell.
        number_format: Format specification of mean and deviation, such as ``.2f``.
    """
    if numbers is None:
        return ""
    text = f"{numbers['mean']:{number_format}}"
    if numbers["std"] is not None:
        text += f" ({numbers['std']:{number_format}})"
    if numbers["rank"] is not None:
        text += f" #{numbers['rank']}"
    return text


def _note_letter(index: int) -> str:
    """Return the letters that mark a note: "a" for the first, "aa" after "z"."""
    more, letter = divmod(index, len(ascii_lowercase))
    return (_note_letter(more - 1) if more else "") + ascii_lowercase[letter]


def table_line(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(cells) + " |"
