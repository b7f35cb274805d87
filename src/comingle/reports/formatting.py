"""Formats of measures and tables, for the terminal and HTML.

Accuracies are stored in [0, 1] and shown in per cent. Whether lower or higher is better is in
:data:`comingle.utils.records.MEASURES`.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from rich import table
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text, TextType

from comingle.utils.records import MEASURES, SHARES, JsonMapping
from comingle.utils.terminal import printable

MOST_ROWS = 24
"""Largest number of users that get a row each. For more users a table shows the best, the worst and quantiles."""

FEW = 5
"""Number of best users, and of worst users, in a shortened table."""

QUANTILES = {"10% of users": 0.1, "25%": 0.25, "median": 0.5, "75%": 0.75, "90%": 0.9}
"""Quantiles in a shortened table, from the best user (0) to the worst (1)."""

TOLERANCE = 0.1
"""Largest relative difference between parameter budgets that count as equal."""


def format_duration(seconds: float) -> str:
    """Return a duration in the largest unit that makes it 2 or more, such as "90 s" or "3 h"; at least "0 s"."""
    for unit_seconds, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit_seconds:
            return f"{seconds / unit_seconds:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def epsilon_of(privacy: JsonMapping) -> float:
    """Return the epsilon of an entry "privacy"; infinity where a file has null, as JSON has no infinity."""
    epsilon = privacy["epsilon"]
    return math.inf if epsilon is None else epsilon


def best_first(scores: Mapping[str, float | None], measure: str) -> list[str]:
    """Sort users by score, best first; users without a finite score come last."""
    sign = 1 if MEASURES[measure] == "lower" else -1

    def sort_key(user: str) -> float:
        score = scores[user]
        return math.inf if score is None else sign * score

    return sorted(scores, key=sort_key)


def user_at_quantile(best_to_worst: Sequence[str], quantile: float) -> str:
    """Return the user at a quantile, from the best (0) to the worst (1), rounded to the nearest user."""
    return best_to_worst[math.floor(quantile * (len(best_to_worst) - 1) + 0.5)]


def median_parameter_count(counts: Sequence[int]) -> int | None:
    """Return the lower median of the positive numbers of trained parameters; None without any."""
    trained = [count for count in counts if count]
    return statistics.median_low(trained) if trained else None


def is_unequal(count: int, median: int | None) -> bool:
    """Return whether a method's number of trained parameters differs from the median by more than 10%.

    Args:
        count: The method's number of trained parameters. 0, of a method without training, is never unequal.
        median: The median over all methods that train; None if none does.
    """
    if count == 0 or median is None:
        return False
    return abs(count - median) > TOLERANCE * median


def parameter_count_note(counts: Sequence[int]) -> str:
    """Return the note that explains the mark † of methods with unequal numbers of trained parameters, or "".

    Args:
        counts: Number of trained parameters of each method.
    """
    median = median_parameter_count(counts)
    if not any(is_unequal(count, median) for count in counts):
        return ""
    return f"† trains over {TOLERANCE:.0%} more or fewer parameters than the median method, which trains {median:,}"


def unit_and_direction(measure: str) -> str:
    """Return the unit of a measure, if it has one, and its better direction: "per cent, higher is better"."""
    better = f"{MEASURES[measure]} is better"
    if measure in SHARES:
        return f"per cent, {better}"
    if measure == "rouge1":
        return f"from 0 to 1, {better}"
    return better


def axis_label(measure: str) -> str:
    """Return the axis label of a measure with its unit."""
    return f"test {measure}, %" if measure in SHARES else f"test {measure}"


def tick(value: float, measure: str) -> str:
    """Return the tick label of a value, such as "1,250" or "12.5"; shares are in per cent."""
    if measure in SHARES:
        value = 100 * value
    if value < 10:
        return f"{value:g}"
    return f"{value:,.2f}".rstrip("0").removesuffix(".")  # "12.50" becomes "12.5", and "12.00" becomes "12"


def sparse_tick(value: float, measure: str) -> str:
    """Return the label of a minor tick of a logarithmic axis, empty except for 2 and 5 times a power of ten.

    Labels of all minor ticks would overlap.
    """
    leading_digit = round(value / 10 ** math.floor(math.log10(value)))
    return tick(value, measure) if leading_digit in (2, 5) else ""


def byte_unit(largest: float) -> tuple[float, str]:
    """Return the unit of a column of byte counts as divisor and name: bytes below 10,000, else megabytes."""
    return (1.0, "B") if largest < 10_000 else (1e6, "MB")


# -------------------------------------------------------------------- one user against a baseline

_POINTS = {**dict.fromkeys(SHARES, "percentage points"), "rouge1": "points of 0.01"}
"""Measures with values from 0 to 1, and the units of their changes."""
_LARGEST_EXPONENT = 700.0
"""Largest logarithm whose exponential is a finite float; ends of intervals can be beyond it."""
_LARGE_BOUND = 1e6
"""Ends of intervals are printed with an exponent from here on. With two seeds they can be this large."""


def change(value: float, baseline: float, measure: str) -> float | None:
    """Return the change of a result against a baseline; None if it is undefined.

    It is in percentage points for accuracies and ROUGE-1, in per cent of the baseline for perplexities, and
    ``log10(value / baseline)`` for losses, which span many orders of magnitude.

    Args:
        value: The result that is compared with the baseline's.
        baseline: The baseline's result.
        measure: Name of the measure of both, such as "perplexity".
    """
    if measure in _POINTS:
        return 100 * (value - baseline)
    if measure == "loss":
        return math.log10(value / baseline) if value > 0 and baseline > 0 else None
    if baseline == 0:
        return None
    return 100 * (value / baseline - 1)


def additive_difference(value: float | None, baseline: float | None, measure: str) -> float | None:
    """Return the difference between a result and a baseline's in the unit in which means are taken.

    It is ``value - baseline`` for accuracies and ROUGE-1, and ``log(value / baseline)`` for perplexities and losses.
    :func:`as_change` converts a mean of such differences to the unit of :func:`change`.

    Args:
        value: The result that is compared with the baseline's.
        baseline: The baseline's result.
        measure: Name of the measure of both, such as "perplexity".

    Returns:
        The difference; None if a result is missing or not finite, or the logarithm is undefined.
    """
    if value is None or baseline is None or not math.isfinite(value - baseline):
        return None
    if measure in _POINTS:
        return value - baseline
    return math.log(value / baseline) if value > 0 and baseline > 0 else None


def as_change(mean: float, measure: str) -> float:
    """Convert a mean of :func:`additive_difference` to the unit of :func:`change`: log(0.9) becomes -10 per cent."""
    if measure in _POINTS:
        return 100 * mean
    if measure == "loss":
        return mean / math.log(10)  # from the natural to the common logarithm
    log_ratio = min(mean, _LARGEST_EXPONENT)  # so that the exponential is finite
    return 100 * math.expm1(log_ratio)


def clip_points(change: float, measure: str) -> float:
    """Clip a change of accuracies or ROUGE-1 to -100 to 100 points; return changes of other measures as they are."""
    return max(-100.0, min(100.0, change)) if measure in _POINTS else change


def is_worse(difference: float, measure: str) -> bool:
    """Return whether a change, or a difference between a result and the baseline's, is for the worse."""
    return difference < 0 if MEASURES[measure] == "higher" else difference > 0


def best_of(measure: str) -> Callable[..., Any]:
    """Return the function that picks the best of several results or changes: ``min`` or ``max``."""
    return min if MEASURES[measure] == "lower" else max


def worst_of(measure: str) -> Callable[..., Any]:
    """Return the function that picks the worst of several results or changes: ``min`` or ``max``."""
    return max if MEASURES[measure] == "lower" else min


def negligible_change(measure: str) -> float:
    """Return the size, in the unit of :func:`change`, below which a change seen with one seed counts as noise."""
    return math.log10(1.01) if measure == "loss" else 1.0


def negligible_change_text(measure: str) -> str:
    """Return the largest change that counts as none, such as "1%", for sentences (:func:`negligible_change`).

    Args:
        measure: Name of the measure that changes, such as "perplexity" or "accuracy".
    """
    if measure == "loss":
        return "a factor of 1.01"
    return "1 point" if measure in _POINTS else "1%"


def factor_text(factor: float) -> str:
    """Return a factor with three significant digits, or with enough digits to show that it is not 1.

    >>> factor_text(0.0625), factor_text(1.00072), factor_text(1.0)
    ('×0.0625', '×1.00072', '×1')
    """
    distance = abs(factor - 1)
    is_almost_one = 0 < distance < 0.005  # three significant digits would print 1
    if not is_almost_one:
        return f"×{factor:.3g}"
    zeros = -math.floor(math.log10(distance)) - 1  # between the decimal point and the first digit of the distance
    digits = min(9, zeros + 2)
    return f"×{factor:.{digits}f}"


def change_text(difference: float, measure: str) -> str:
    """Return a change in the unit of :func:`change` as text: "-9.7%", "+1.2 points", or for losses "×0.8".

    A change that rounds to 0 is "+0.0", never "-0.0".
    """
    if measure == "loss":
        return factor_text(10**difference)
    unit = "\u00a0points" if measure in _POINTS else "%"
    return f"{difference:+z.1f}{unit}"


def interval_text(bounds: tuple[float, float], measure: str) -> str:
    """Return the confidence interval of a change as text: "-12.0 to -7.4", or factors for losses: "×0.8 to ×0.95".

    Intervals narrower than 1 have two digits after the point: "-0.42 to -0.12". Ends near 0 have up to four.

    Args:
        bounds: Both ends, in the unit of :func:`change`; for losses, log10 of factors.
        measure: Name of the measure of the results, such as "perplexity".
    """
    low, high = bounds
    if measure == "loss":
        largest_exponent = _LARGEST_EXPONENT / math.log(10)  # of a power of ten that is a finite float
        low_factor, high_factor = 10 ** min(low, largest_exponent), 10 ** min(high, largest_exponent)
        return f"{factor_text(low_factor)} to {factor_text(high_factor)}"
    digits = 1 if high - low >= 1 else 2
    while digits < 4 and (_rounds_to_zero(low, digits) or _rounds_to_zero(high, digits)):
        digits += 1
    return f"{_bound_text(low, digits)} to {_bound_text(high, digits)}"


def _rounds_to_zero(bound: float, digits: int) -> bool:
    """Return whether an end of an interval that is not 0 would be printed as 0."""
    return bound != 0 and round(bound, digits) == 0


def _bound_text(bound: float, digits: int) -> str:
    """Return an end of an interval as text: "+12.3", or "+1.2e+07" from a million on."""
    return f"{bound:+z.{digits}f}" if abs(bound) < _LARGE_BOUND else f"{bound:+.1e}"


def change_label(measure: str, baseline: str, *, short: bool = False) -> str:
    """Return the axis label of changes against a baseline.

    Args:
        measure: Name of the measure of the results, such as "perplexity".
        baseline: Name of the baseline.
        short: Leave out which direction is better.
    """
    unit = "multiple" if measure == "loss" else _POINTS.get(measure, "%")  # such as "percentage points"
    if short:
        return f"change against {baseline}, {unit}"
    lower_is_better = MEASURES[measure] == "lower"
    directions = "(left: better, right: worse)" if lower_is_better else "(left: worse, right: better)"
    if measure == "loss":
        return f"test loss as a multiple of that of {baseline} {directions}"
    return f"change of test {measure} against {baseline}, {unit} {directions}"


# Characters that end a cell, start HTML, or change the font; underscores within words do not.
_MARKDOWN = re.compile(r"[\\`*\[\]<>|]|(?<![^\W_])_|_(?![^\W_])")


def markdown_line(cells: Sequence[str]) -> str:
    r"""Return a row of a Markdown table with special characters escaped.

    >>> markdown_line(["a|b", "_x_"])
    '| a\\|b | \\_x\\_ |'
    """
    escaped = [_MARKDOWN.sub(r"\\\g<0>", cell) for cell in cells]
    return f"| {' | '.join(escaped)} |"


class Table(table.Table):
    """Subclass of rich's table whose title and caption may be wider than its columns."""

    title: TextType | None
    caption: TextType | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType | Segment]:
        """Yield title, table and caption, instead of wrapping title and caption at the width of the columns."""
        title, caption = self.title, self.caption
        self.title = self.caption = None  # so that rich renders the body only
        try:
            body = list(super().__rich_console__(console, options))
        finally:
            self.title, self.caption = title, caption
        yield from _full_width_text(console, title, "table.title")
        yield from body
        yield from _full_width_text(console, caption, "table.caption")


def _full_width_text(console: Console, text: TextType | None, style: str) -> Iterator[RenderableType | Segment]:
    """Yield a table's title or caption, if any, as text that wraps at the width of the console, not of the table."""
    if text:
        yield text if isinstance(text, Text) else console.render_str(text, style=style)


def html_of(parts: Iterable[table.Table | Text]) -> str:
    """Return tables and notes as one HTML fragment for a notebook, without scripts, all text escaped."""
    fragments = []
    for part in parts:
        fragments.append(_html_table(part) if isinstance(part, table.Table) else _html_note(part))
    return f"<div>{''.join(fragments)}</div>"


def _html_table(source: table.Table) -> str:
    """Return a table of rich as HTML with its title and caption."""
    columns = source.columns
    header = "".join(_html_cell("th", column, column.header) for column in columns)
    body = ""
    cells_of_columns = [column.cells for column in columns]  # rich stores cells by column
    for row in zip(*cells_of_columns, strict=False):
        cells = "".join(_html_cell("td", column, cell) for column, cell in zip(columns, row, strict=True))
        body += f"<tr>{cells}</tr>"
    footer = ""
    if source.show_footer:
        cells = "".join(_html_cell("td", column, column.footer) for column in columns)
        footer = f"<tfoot><tr>{cells}</tr></tfoot>"
    return (
        f"{_html_note(source.title)}<table><thead><tr>{header}</tr></thead><tbody>{body}</tbody>{footer}</table>"
        f"{_html_note(source.caption)}"
    )


def _html_cell(tag: str, column: table.Column, cell: RenderableType) -> str:
    """Return a cell of rich as HTML; ``tag`` is ``th`` or ``td``."""
    align = "right" if column.justify == "right" else "left"
    return f'<{tag} style="text-align: {align}">{_html_text(cell)}</{tag}>'


def _html_note(note: TextType | None) -> str:
    return f"<p>{_html_text(note)}</p>" if note else ""


def _html_text(cell: RenderableType) -> str:
    """Return the plain text of a cell with its line breaks; control characters become escapes."""
    return escape(printable(cell.plain if isinstance(cell, Text) else cell, keep="\n")).replace("\n", "<br>")
