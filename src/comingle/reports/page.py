"""HTML report of runs as a self-contained page, with a token view (CoMiGS, Figures 3 and 14 to 19)."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from comingle.config.settings import protects_examples
from comingle.reports.canvas import (
    INK,
    LINE,
    MUTED,
    PAPER,
    Colour,
    Key,
    Panels,
    draw,
    draw_key,
    expert_class,
    expert_colour,
    expert_css,
    legend_above,
    rgb,
    styles,
    svg,
)
from comingle.reports.comparisons import BETTER, WORSE, BaselineComparison, heading, notes, rows_of
from comingle.reports.figures import (
    MAX_PANELS,
    Mixtures,
    bytes_panels,
    curves_panels,
    is_population,
    max_users_with_bars,
    mixtures_figure,
    population_panels,
    read_mixtures,
    scores_panels,
    users_panels,
)
from comingle.reports.formatting import best_of, negligible_change_text, rule, worst_of
from comingle.reports.runs import (
    Entry,
    Gain,
    RunRecord,
    Spread,
    baseline_comparison,
    baselines,
    brief_list,
    common_measures,
    compared,
    cost,
    differing_settings,
    epsilon_text,
    expert_curves,
    final,
    verdicts,
)
from comingle.reports.tables import cost_rows, upload_weight_tables
from comingle.utils.errors import RunError
from comingle.utils.inputs import Inputs, read_inputs
from comingle.utils.records import describe_sample, number, read_metrics

COLUMNS = 56
"""Characters per line in the token view."""
ADVANCE = 0.602
"""Width of a letter of DejaVu Sans Mono, as a fraction of the font size."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text in tokens; ``owner`` is the user whose test set contains it, or None."""

    name: str
    owner: str | None
    tokens: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TokenView:
    """Gates of texts under the models of users of one run.

    Args:
        label: Name of the run.
        users: The users.
        experts: Names of each user's experts.
        texts: The texts.
        gates: ``gates[text][user]`` has the shape (layers, tokens, experts of the user).
        in_distribution: Whether a user's test text is distributed as its training text.
    """

    label: str
    users: tuple[str, ...]
    experts: tuple[tuple[str, ...], ...]
    texts: tuple[Text, ...]
    gates: tuple[tuple[np.ndarray, ...], ...]
    in_distribution: bool = True

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.gates[0][0])


def pack_gates(gates: np.ndarray) -> str:
    """Return gates in thousandths as little-endian 16-bit integers in base64."""
    return base64.b64encode(np.rint(gates.astype(np.float64) * 1000).astype("<u2").tobytes()).decode("ascii")


def as_data(views: Sequence[TokenView]) -> list[dict[str, object]]:
    """Return token views as JSON for the page's script; ``classes`` are the CSS classes of the experts' colours."""
    return [
        {
            "label": view.label,
            "layers": view.layers,
            "inDistribution": view.in_distribution,
            "users": [
                {"name": user, "experts": list(experts), "classes": [expert_class(name) for name in experts]}
                for user, experts in zip(view.users, view.experts, strict=True)
            ],
            "texts": [{"name": text.name, "owner": text.owner, "tokens": list(text.tokens)} for text in view.texts],
            "gates": [[pack_gates(gates) for gates in of_text] for of_text in view.gates],
        }
        for view in views
    ]


# -------------------------------------------------------------------- token view


@dataclass(frozen=True, kw_only=True)
class _TokenCell:
    """A text under one user's model at one layer; ``gates`` has the shape (tokens, experts)."""

    title: str
    tokens: Sequence[str]
    experts: Sequence[str]
    gates: np.ndarray


def tokens_figure(view: TokenView, layer: int) -> Figure:
    """Return a figure of texts (rows) x users' models (columns) with each token on the colour of its top expert.

    Args:
        view: Tokens of some texts, and their gates under the models of some users.
        layer: The layer whose gates count.
    """
    rows = [
        [
            _token_cell(view, row, column, layer, f"text: {text.name}, model: {user}{_remark(view, text, user)}")
            for column, user in enumerate(view.users)
        ]
        for row, text in enumerate(view.texts)
    ]
    return _tokens_grid(view, rows, f"{view.label}, layer {layer}")


def own_texts_figure(view: TokenView, layers: Sequence[int]) -> Figure:
    """Return a figure of layers (rows) x users (columns): each user's text under its own model (CoMiGS, Figure 3).

    Args:
        view: The token view; users without a text of their own are left out.
        layers: The layers whose gates count, from top to bottom.
    """
    owners = [text.owner for text in view.texts]
    # Index of the text, index of the user, and the user.
    own = [(owners.index(user), column, user) for column, user in enumerate(view.users) if user in owners]
    rows = [
        [_token_cell(view, row, column, layer, f"{user}, layer {layer}") for row, column, user in own]
        for layer in layers
    ]
    return _tokens_grid(view, rows, view.label)


def _remark(view: TokenView, text: Text, user: str) -> str:
    """Return a note for a user's own text under its own model, if its test text is like its training text."""
    return " (in distribution)" if text.owner == user and view.in_distribution else ""


def _token_cell(view: TokenView, row: int, column: int, layer: int, title: str) -> _TokenCell:
    """Return the cell of a text under a user's model.

    Args:
        view: Tokens of some texts, and their gates under the models of some users.
        row: Index of the text.
        column: Index of the user.
        layer: The layer.
        title: Title of the cell.
    """
    gates = view.gates[row][column][layer]
    return _TokenCell(title=title, tokens=view.texts[row].tokens, experts=view.experts[column], gates=gates)


def _tokens_grid(view: TokenView, rows: Sequence[Sequence[_TokenCell]], title: str) -> Figure:
    """Return a figure of equal cells with as many lines as the longest text needs, and a legend of the experts.

    Args:
        view: Tokens of some texts, and their gates under the models of some users.
        rows: The cells, row by row.
        title: Title of the figure.
    """
    cells = [cell for row in rows for cell in row]
    last_lines = [_token_positions(cell.tokens)[-1][1] if cell.tokens else 0 for cell in cells]
    lines = max(last_lines) + 1

    def paint(figure: Figure, axes: list[Axes]) -> None:
        """Paint all cells and the legend."""
        for axis, cell in zip(axes, cells, strict=True):
            _paint_tokens(axis, cell, lines)
            axis.set_title(cell.title, fontsize=7)
        names = max(view.experts, key=len)  # of a user with the most experts
        patches = [Patch(color=expert_colour(name).light) for name in names]
        legend_above(figure, patches, names, title=title)
        _fit_letters(figure, axes)

    height = max(1.1, 0.35 + 0.115 * lines)  # inches of a cell: for the title, and for each line
    return draw(len(rows), len(rows[0]), (3.6, height), paint)


def _fit_letters(figure: Figure, axes: Sequence[Axes]) -> None:
    """Set the font size of tokens so that :data:`COLUMNS` letters fill the width of each of the axes.

    :func:`_token_positions` assumes this width.
    """
    figure.draw_without_rendering()  # computes the layout, on which the width of the axes depends
    width_points = axes[0].get_window_extent().width / figure.dpi * 72
    letter_width = width_points / COLUMNS
    font_size = letter_width / ADVANCE  # ADVANCE is the width of a letter at font size 1
    for axis in axes:
        for text in axis.texts:
            text.set_fontsize(font_size)


def _paint_tokens(axis: Axes, cell: _TokenCell, lines: int) -> None:
    """Paint each token of a cell on the colour of its top expert.

    Args:
        axis: The axes, on which a letter is 1 wide and a line 1 high.
        cell: The cell.
        lines: Number of lines of the axes.
    """
    axis.set_axis_off()
    axis.set_xlim(0, COLUMNS)
    axis.set_ylim(lines, 0)
    positions, top_experts = _token_positions(cell.tokens), cell.gates.argmax(-1)
    for token, (column, line), top_expert in zip(cell.tokens, positions, top_experts, strict=True):
        visible_text = visible(token)
        if not visible_text:
            continue
        colour = expert_colour(cell.experts[int(top_expert)]).light
        # y grows downwards: the box is almost as high as the line, and the letters' baseline is in its lower part.
        axis.barh(line + 0.5, len(visible_text), 0.95, left=column, color=colour, alpha=0.75, linewidth=0)
        axis.text(column, line + 0.78, visible_text, family="monospace", clip_on=True)


def visible(token: str) -> str:
    """Return a token on one line, with a sign for line breaks and for other characters that cannot be printed."""
    return "".join("⏎" if c == "\n" else c if c.isprintable() else "·" for c in token)


def _token_positions(tokens: Sequence[str]) -> list[tuple[int, int]]:
    """Return column and line of every token, in lines of :data:`COLUMNS` letters; a token is not split."""
    positions, column, line = [], 0, 0
    for token in tokens:
        width = len(visible(token))
        if column and column + width > COLUMNS:  # start a new line
            column, line = 0, line + 1
        positions.append((column, line))
        column += width
    return positions


def _affects_test_data(key: str) -> bool:
    """Return whether a recipe key affects the test data; the amount of training data does not."""
    return key.startswith("data.") and "max_train" not in key and key != "data.task.fraction"


def notices(entries: Sequence[Entry]) -> list[str]:
    """Return sentences on what limits a comparison of these entries.

    These are reasons not to compare them (:func:`comparability_warnings`), runs that have not finished, runs that
    evaluated only a sample of the users, and routers that were never trained.
    """
    lines = comparability_warnings(entries)
    for entry in entries:
        for run in entry.runs:
            name = run.folder.name
            if run.metrics is None:
                last = run.evaluations[-1].round
                lines.append(f"{name} has not finished: evaluated after round {last} of {run.planned_rounds}.")
            elif sample := describe_sample(run.metrics):
                lines.append(f"{name}: {sample}.")
        if (metrics := entry.first.metrics) and (roles := metrics.get("untrained")):
            lines.append(f"{entry.label}: {' and '.join(roles)} never trained, since the run has too few local steps.")
    return lines


def comparability_warnings(entries: Sequence[Entry]) -> list[str]:
    """Return sentences on why numbers of these entries should not be compared.

    Reasons are different base models, recipes with different test data or other settings apart from the method's, and
    files that changed between runs.
    """
    runs = [run for entry in entries for run in entry.runs]
    lines = []
    bases = sorted({run.base for run in runs})
    if len(bases) > 1:
        lines.append(f"These runs have different bases ({', '.join(bases)}): do not compare their numbers.")
    # The recipe's settings of the test data, as text because values may be lists.
    test_data_settings = {repr([(key, value) for key, value in run.key if _affects_test_data(key)]) for run in runs}
    if len(test_data_settings) > 1:
        if runs[0].unit == "tokens":
            reason = "read their text in different ways: their perplexities"
        else:
            reason = "have different tasks: their numbers"
        lines.append(f"These runs {reason} may not be comparable.")
    if keys := differing_settings(runs):
        lines.append(
            f"These runs differ in {brief_list(keys, ' and ')}, not only in method and seed: this may be the cause of "
            "differences between their results."
        )
    return lines + _changed_inputs(runs)


def _changed_inputs(runs: Sequence[RunRecord]) -> list[str]:
    """Return sentences on runs that read different data or another base although their recipes are equal.

    Each run is compared, by the digests that it recorded, with the first run that has the same seed, base, tokenizer
    and settings of the data. Runs without digests are left out.
    """
    lines: list[str] = []
    first_runs: dict[str, tuple[RunRecord, Inputs]] = {}  # the first run of each recipe for data, and its inputs
    for run in runs:
        try:
            inputs = read_inputs(run.folder)
        except RunError:  # a run of an older version, which recorded no digests
            continue
        data_settings = [(key, value) for key, value in run.key if key.startswith("data.") or key == "training.context"]
        recipe_key = repr((run.seed, run.base, inputs.tokenizer, data_settings))
        first_run, first_inputs = first_runs.setdefault(recipe_key, (run, inputs))
        changed = ["the base"] if inputs.base != first_inputs.base else []  # the sentence names the first change
        changed += [
            f"the data of {name}" for name, user in inputs.users.items() if user != first_inputs.users.get(name)
        ]
        if changed:
            lines.append(
                f"{run.folder} and {first_run.folder} have the same recipe, but {changed[0]} changed in between: do "
                "not compare their numbers."
            )
    return lines


Sheet = Sequence[Sequence[object]]
"""A header and rows."""


def csv_text(sheet: Sheet) -> str:
    """Return comma-separated values; None is an empty cell, and numbers have all their digits."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(sheet)
    return file.getvalue()


def data_uri(sheet: Sheet) -> str:
    """Return a data URI with the sheet as a CSV file."""
    return "data:text/csv;charset=utf-8;base64," + base64.b64encode(csv_text(sheet).encode()).decode("ascii")


def user_records(runs: Sequence[Path]) -> list[dict[str, object]]:
    """Return one record for each user of each finished run.

    Each has the run's folder, method, seed, base and rounds, the user, and all results and costs that were measured for
    the user.

    Raises:
        RunError: None of the runs has finished.
    """
    finished = [run for run in runs if (run / "metrics.json").exists()]
    records: list[dict[str, object]] = []
    for run in finished or runs[:1]:  # of an unfinished run, read_metrics raises the error
        metrics = read_metrics(run)
        about_run = {"run": run.name, **{key: metrics[key] for key in ("method", "seed", "base", "rounds")}}
        records += [{**about_run, "user": user, **of_user} for user, of_user in metrics["users"].items()]
    return records


def sheet_of(records: Sequence[Mapping[str, object]]) -> list[list[object]]:
    """Return a sheet with a column for every key of the records; missing values are None."""
    head = list(dict.fromkeys(key for record in records for key in record))
    return [[*head], *([record.get(key) for key in head] for record in records)]


def mixtures_sheet(mixtures: Mixtures) -> list[list[object]]:
    """Return a sheet (a header and rows) with each user's weight of each component at each evaluation.

    The columns of ``mixtures.values`` are sorted for the figure. ``mixtures.order`` has the component's number in the
    run for each column.
    """
    rows: list[list[object]] = [["seed", "round", "user", "true_cluster", "component", "weight"]]
    clusters = mixtures.clusters or (None,) * len(mixtures.users)
    for round_number, weights_of_users in zip(mixtures.rounds, mixtures.values, strict=True):
        for user, cluster, weights in zip(mixtures.users, clusters, weights_of_users, strict=True):
            for component, weight in zip(mixtures.order, weights, strict=True):
                rows.append([mixtures.seed, round_number, user, cluster, component, float(weight)])
    return rows


def tokens_sheet(view: TokenView, layer: int) -> list[list[object]]:
    """Return a sheet (a header and rows) with the gates of one layer of a token view.

    It has a row for each text, user's model, token of the text and expert of the model.

    Args:
        view: Tokens of some texts, and their gates under the models of some users.
        layer: The layer.
    """
    rows: list[list[object]] = [["text", "model", "layer", "token_number", "token", "expert", "probability"]]
    for text, gates_of_users in zip(view.texts, view.gates, strict=True):
        for user, experts, gates in zip(view.users, view.experts, gates_of_users, strict=True):
            for position, (token, gates_of_token) in enumerate(zip(text.tokens, gates[layer], strict=True)):
                for expert, gate in zip(experts, gates_of_token, strict=True):
                    rows.append([text.name, user, layer, position, token, expert, float(gate)])
    return rows


_MIN_SCALE = 1.2
"""CSS pixels per point of a panel's width that are needed before another panel is put next to it."""


class FigureMarkup:
    """Converts figures to markup whose colours follow the page's theme.

    Args:
        variables: CSS variables by colour.
    """

    def __init__(self, variables: dict[str, str]):
        self._variables, self._count = variables, 0  # the count makes the ids of each figure unique

    def wide(self, figure: Figure, label: str, name: str, sheet: Sheet) -> Markup:
        """Return one figure with fixed proportions, which scrolls in its frame if it is too wide.

        Args:
            figure: The figure.
            label: Text for screen readers.
            name: Name, without suffix, of the CSV file of the figure's numbers that readers can download.
            sheet: Content of the CSV file.
        """
        frame = Markup('<div class="frame" tabindex="0" role="region" aria-label="{}">{}</div>')
        return _figure_markup([frame.format(label, self._svg(figure, label))], name, sheet)

    def panels(self, panels: Panels, label: str, name: str, *, phone: Panels | None = None) -> Markup:
        """Return panels side by side as far as they fit.

        Args:
            panels: Functions that draw the panels, with sizes, labels, legend and data.
            label: Text for screen readers.
            name: Name, without suffix, of the CSV file of the figure's numbers that readers can download.
            phone: Panels that replace them on narrow screens.
        """
        inner = [self._legend(panels.keys), self._grid(panels, label, "" if phone is None else "desk")]
        if phone is not None:
            inner.append(self._grid(phone, label, "phone"))
        return _figure_markup(inner, name, panels.sheet)

    def _grid(self, panels: Panels, label: str, screen: str) -> Markup:
        """Return one picture per panel, side by side as far as they fit.

        Args:
            panels: Functions that draw the panels, with sizes, labels, legend and data.
            label: Text for screen readers, to which each panel's title is added.
            screen: CSS class that shows the panels only on wide (``desk``) or narrow (``phone``) screens; empty for
                all screens.
        """
        titled = [(figure, figure.axes[0].get_title("left")) for figure in panels.parts()]
        pictures = [self._svg(figure, f"{label}: {title}" if title else label) for figure, title in titled]
        frames = Markup("\n").join(Markup('<div class="frame">{}</div>').format(picture) for picture in pictures)
        room = round(72 * panels.size[0] * _MIN_SCALE)  # CSS pixels that a panel needs; 72 points per inch
        return Markup('<div class="panels {}" style="--room:{}px">{}</div>').format(screen, room, frames)

    def _legend(self, keys: Sequence[Key]) -> Markup:
        """Return a legend with the mark and the label of each key; empty without keys."""
        template = Markup('<span class="key">{}{}</span>')
        # Marks are decoration for screen readers, as the label follows.
        spans = [template.format(self._svg(draw_key(mark), label=""), label) for mark, label in keys]
        return Markup('<div class="keys">{}</div>').format(Markup(" ").join(spans)) if spans else Markup("")

    def _svg(self, figure: Figure, label: str) -> Markup:
        """Return a figure as inline SVG with a unique prefix for its ids; without a label it is decoration."""
        self._count += 1
        return Markup(svg(figure, f"f{self._count}", str(escape(label)), self._variables))


def _figure_markup(inner: Sequence[Markup], name: str, sheet: Sheet) -> Markup:
    """Return an HTML figure with a link to a CSV file of its numbers.

    Args:
        inner: Pictures and legends as markup.
        name: Name of the file without suffix.
        sheet: Content of the file.
    """
    link = Markup('<a class="csv" download="{}.csv" href="{}">CSV of this figure</a>').format(name, data_uri(sheet))
    return Markup("<figure>{}{}</figure>").format(Markup("\n").join(inner), link)


MAX_USER_COLUMNS = 8
"""Largest number of users with a column each in the table of results; else it has the worst and the best user."""
MAX_NAMES = 12
"""Largest number of names in a cell."""
LISTED_SEEDS = 8
"""Largest number of seeds that the heading lists."""
_CLASSES = {"gained": "gain", "harmed": "harm", BETTER: "gain", WORSE: "harm"}


def render_page(
    entries: Sequence[Entry],
    views: Sequence[TokenView] = (),
    *,
    baseline: str | None = None,
) -> str:
    """Return the page as HTML, from the template ``report.html``.

    The template escapes all values, since names and texts come from users.

    Args:
        entries: Entries, each the runs of one recipe with different seeds, all with the same users.
        views: Tokens of some texts, and their gates under the models of some users, for the page's interactive view.
        baseline: The baseline of verdicts; None for ``local`` or else the first entry.
    """
    palette = _palette(entries)
    # In figures each colour becomes a CSS variable, which has another value in the dark theme.
    drawn = FigureMarkup({colour.light: f"var(--c{colour.light[1:]})" for colour in palette})
    environment = Environment(
        loader=PackageLoader("comingle.reports", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    first = entries[0].first
    users = list(first.users)
    mixtures = [
        _mixtures_section(entry.label, learned, drawn) for entry in entries if (learned := _learned_mixtures(entry))
    ]
    components = {mixture["component"] for mixture in mixtures}
    return environment.get_template("report.html").render(
        heading=_heading(entries),
        base=first.base,
        task=first.task,
        measure=first.measure,
        rule=rule(first.measure),
        unit=first.unit,
        users=users,
        seeds=sorted({run.seed for entry in entries for run in entry.runs}),
        rounds=max(entry.first.planned_rounds for entry in entries),
        notices=notices(entries),
        palette=palette,
        experts=expert_css(),
        channels=lambda colour: " ".join(map(str, rgb(colour))),  # "R G B", for CSS
        results=_results_table(entries, users),
        # The verdict on each entry against the baseline: better, level or worse.
        against=_verdicts_table(baseline_comparison(entries, baseline)),
        panels=MAX_PANELS,  # of users, in figures of each user
        population=is_population(users),
        deltas=sorted({run.spent["delta"] for entry in entries for run in entry.runs if run.spent}),
        # Whether privacy is per example, rather than per user.
        examples=any(protects_examples((e.first.recipe.get("privacy") or {}).get("mechanism", "")) for e in entries),
        level=negligible_change_text(first.measure),  # with a single seed, smaller changes get the verdict "level"
        curves=list(_curve_figures(entries, drawn)),
        gains=[section for one in baselines(entries) if (section := _gains_section(entries, one, drawn))],
        costs=cost_rows([cost(entry) for entry in entries]),
        judged=upload_weight_tables(entries),  # weights that robust aggregation rules gave to the uploads
        bytes_figure=drawn.panels(bytes_panels(entries), f"test {first.measure} against uploaded bytes", "bytes"),
        mixtures=mixtures,
        # The word for a component of a mixture, such as "adaptor set", if all entries have the same.
        component=components.pop() if len(components) == 1 else "component",
        scores=[_scores_section(entry, entries, drawn) for entry in entries if entry.first.routed],
        views=as_data(views),
        owners=any(text.owner for view in views for text in view.texts),  # whether texts are users' test data
    )


def _heading(entries: Sequence[Entry]) -> str:
    """Return the methods, their task or data, and the seeds, in one line."""
    labels = brief_list([entry.label for entry in entries], " and ")
    subjects = brief_list(list(dict.fromkeys(entry.first.subject for entry in entries)), " and ")
    seeds = sorted({run.seed for entry in entries for run in entry.runs})
    named = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    return f"{labels} on {subjects}, {named if len(seeds) <= LISTED_SEEDS else f'{len(seeds)} seeds'}"


def _palette(entries: Sequence[Entry]) -> list[Colour]:
    """Return the distinct colours in the figures of these entries."""
    colours = [INK, MUTED, LINE, PAPER, *(style.colour for style in styles([entry.method for entry in entries]))]
    for entry in entries:
        experts = {name for names in entry.first.evaluations[-1].experts.values() for name in names}
        colours += [expert_colour(name) for name in sorted(experts)]
    return list({colour.light: colour for colour in colours}.values())


# -------------------------------------------------------------------- results


def _spread_text(value: Spread | None, measure: str) -> str:
    """Return a mean with its deviation over seeds as text.

    Args:
        value: Mean and standard deviation; None if a result is not finite.
        measure: Name of the measure of these results, such as "perplexity".
    """
    if value is None:
        return "not finite"
    deviation = "" if value.std is None else f" ({number(value.std, measure)})"
    return f"{number(value.mean, measure)}{deviation}"


def _results_table(entries: Sequence[Entry], users: Sequence[str]) -> dict[str, object]:
    """Return the table of final results for the page's template: a row per entry, and columns of users and means.

    For more than :data:`MAX_USER_COLUMNS` users, two columns replace those of single users: the worst and the best user
    of each entry. Private runs have a column of epsilons.

    Args:
        entries: Entries, each the runs of one recipe with different seeds, all with the same users.
        users: Names of the users.

    Returns:
        ``head``, the names of the columns; ``rows``, each entry's ``label`` and ``cells``; and for a second, transposed
        table ``labels``, all entries' labels, and ``users``, pairs of a user and its cells, one for each entry. It is
        empty if the first table has columns of all users.
    """
    measure = entries[0].first.measure
    by_user = {user: [final(entry, user) for entry in entries] for user in users}
    means = {"mean": [final(entry) for entry in entries]}
    if measure == "perplexity":
        means["geometric mean"] = [final(entry, geometric=True) for entry in entries]

    def columns_of(results: Mapping[str, list[Spread | None]]) -> list[tuple[str, list[str]]]:
        """Return the heading and the cells, one for each entry, of each column."""
        return [(name, [_spread_text(result, measure) for result in column]) for name, column in results.items()]

    user_columns = columns_of(by_user)
    if len(users) <= MAX_USER_COLUMNS:
        columns = user_columns
    else:
        columns = [_extreme_column(by_user, measure, worst=worst) for worst in (True, False)]
    columns = [*columns, *columns_of(means)]
    if any(entry.first.spent for entry in entries):  # at least one entry is private
        columns.append(("epsilon", [epsilon_text(entry) for entry in entries]))
    cells_of_entries = zip(*(cells for _, cells in columns), strict=True)
    rows = zip(entries, cells_of_entries, strict=True)
    return {
        "head": [name for name, _ in columns],
        "rows": [{"label": entry.label, "cells": cells} for entry, cells in rows],
        "labels": [entry.label for entry in entries],
        "users": user_columns if len(users) > MAX_USER_COLUMNS else [],
    }


def _extreme_column(by_user: dict[str, list[Spread | None]], measure: str, *, worst: bool) -> tuple[str, list[str]]:
    """Return a column that names each entry's worst or best user by the mean over seeds, with this user's result.

    The cell of an entry is "not finite" if a user has no finite result.

    Args:
        by_user: Each user's results, one for each entry.
        measure: Name of the measure of these results, such as "perplexity".
        worst: Whether to take the worst user instead of the best.
    """
    pick = worst_of(measure) if worst else best_of(measure)
    cells = []
    for results_of_entry in zip(*by_user.values(), strict=True):  # one for each user
        finite = {user: result for user, result in zip(by_user, results_of_entry, strict=True) if result is not None}
        if len(finite) < len(results_of_entry):
            cells.append(_spread_text(None, measure))
        else:
            name = pick(finite, key=lambda user: finite[user].mean)
            cells.append(f"{_spread_text(finite[name], measure)} · {name}")
    return ("worst user" if worst else "best user"), cells


def _verdicts_table(comparison: BaselineComparison | None) -> dict[str, object] | None:
    """Return the table of verdicts for the page's template; None without a comparison.

    ``classes`` are the CSS classes by verdict, which colour its cell.
    """
    if comparison is None:
        return None
    head, rows = rows_of(comparison)
    return {"heading": heading(comparison), "head": head, "rows": rows, "notes": notes(comparison), "classes": _CLASSES}


def _curve_figures(entries: Sequence[Entry], drawn: FigureMarkup) -> Iterator[tuple[str, Markup]]:
    """Yield titles and figures of learning curves: with and without the first evaluation, for each common measure.

    Args:
        entries: Entries, each the runs of one recipe with different seeds, all with the same users.
        drawn: Converts figures to markup.
    """
    measures = common_measures(entries)
    for measure in measures:
        prefix = f"{measure} " if len(measures) > 1 else ""
        for start, span in ((True, "from the start"), (False, "without the start, so that late differences show")):
            panels = curves_panels(entries, start=start, measure=measure)
            label, file = f"test {measure} during training, {span}", f"curves-{measure}{'' if start else '-late'}"
            yield prefix + span, drawn.panels(panels, label, file)


def _gains_section(entries: Sequence[Entry], baseline: Entry, drawn: FigureMarkup) -> dict[str, object] | None:
    """Return the section on each user's change against a baseline, for the page's template.

    Args:
        entries: Entries, each the runs of one recipe with different seeds, all with the same users.
        baseline: The entry that the others are compared with.
        drawn: Converts figures to markup.

    Returns:
        ``figure``, bars of the users' changes; ``population``, figures of all users' changes, None for few users; a
        table with a column for each of ``kinds``, the verdicts, and ``rows`` that list the users of each verdict for an
        entry; ``single``, whether verdicts of single seeds occur; ``room``, the largest number of users with bars.
        None if nothing can be compared.
    """
    measure, pairs = baseline.first.measure, compared(entries, baseline)
    bars = users_panels(entries, baseline)
    if bars is None:
        return None
    columns = [verdict for verdict in verdicts(measure) if _has_column(verdict, pairs)]
    # Verdicts are ordered from the best to the worst. Columns of bad ones list the worst users first.
    after_level = verdicts(measure).index("level") + 1
    bad_verdicts = verdicts(measure)[after_level:]
    rows = []
    for entry, gains_of_entry in pairs:
        cells = []
        for verdict in columns:
            names = [gain.named_text for gain in gains_of_entry if gain.verdict == verdict]
            cells.append((_CLASSES.get(verdict, ""), _names_markup(names, worst_first=verdict in bad_verdicts)))
        rows.append({"label": entry.label, "cells": cells})
    label, file = f"change of each user's test {measure} against {baseline.label}", f"users-against-{baseline.method}"
    population = population_panels(entries, baseline) if is_population(entries[0].first.users) else None
    return {
        "baseline": baseline.label,
        "figure": drawn.panels(bars, label, file, phone=users_panels(entries, baseline, width=4.2)),
        "population": (
            None
            if population is None
            else drawn.panels(population, f"all users, against {baseline.label}", f"all-{file}")
        ),
        "kinds": columns,
        "single": any("one seed" in verdict for verdict in columns),
        "rows": rows,
        "room": max_users_with_bars(len(pairs)),  # for the sentence on users without a bar
    }


def _has_column(verdict: str, pairs: Sequence[tuple[Entry, Sequence[Gain]]]) -> bool:
    """Return whether the page's table of users by verdict has a column for a verdict.

    "level" always has a column. "gained" and "harmed" need intervals, so they have a column if at least one gain is
    over several seeds. The verdicts that end in "(one seed)" have a column if at least one gain is of one seed.

    Args:
        verdict: One of :func:`comingle.reports.runs.verdicts`.
        pairs: Pairs of an entry (runs of one recipe with different seeds) and its users' gains.
    """
    if verdict == "level":
        return True
    is_of_one_seed = "one seed" in verdict
    return any((gain.change.std is None) == is_of_one_seed for _, gains_of_entry in pairs for gain in gains_of_entry)


def _names_markup(names: list[str], *, worst_first: bool) -> Markup:
    """Return users' names as markup that does not wrap within a name.

    More than :data:`MAX_NAMES` names become their number and the first :data:`MAX_NAMES` of them.

    Args:
        names: The names, best first.
        worst_first: Begin with the worst user if not all names are listed.
    """
    listed = names
    if len(names) > MAX_NAMES:
        by_importance = names[::-1] if worst_first else names
        listed = by_importance[:MAX_NAMES]
    with_commas = [*(f"{name}," for name in listed[:-1]), *listed[-1:]]
    joined = Markup(" ").join(Markup('<span class="name">{}</span>').format(name) for name in with_commas)
    if len(names) <= MAX_NAMES:
        return joined or Markup("none")
    return Markup("{} users: {} and {} more").format(len(names), joined, len(names) - MAX_NAMES)


# -------------------------------------------------------------------- mixtures and scores


def _learned_mixtures(entry: Entry) -> list[Mixtures]:
    """Return the mixtures of an entry's runs that have learned ones."""
    by_run = [read_mixtures(run.folder) for run in entry.runs]
    return [mixtures for mixtures in by_run if mixtures is not None and mixtures.learned]


def _mixtures_section(label: str, by_run: Sequence[Mixtures], drawn: FigureMarkup) -> dict[str, object]:
    """Return the section on an entry's client-level mixtures, for the page's template.

    Args:
        label: Label of the entry.
        by_run: The mixtures of each run; the figure and the weights are those of the first.
        drawn: Converts figures to markup.

    Returns:
        ``label``; ``component``, the word for a component; ``sets``, the components' numbers in the order of columns;
        ``seed`` of the first run; ``figure``; ``runs``, a row for each run (seed, how well mixtures recover the true
        clusters, entropy and aggregation mismatch); ``true``, whether true clusters are known; ``users``, each user
        with its true cluster and its last weights.
    """
    first = by_run[0]
    clusters = first.clusters or [None] * len(first.users)

    def first_to_last(values: Sequence[float] | None) -> str:
        """Return the values at the first and the last evaluation as text; a dash if they are unknown."""
        return "–" if values is None else f"{values[0]:.2f} to {values[-1]:.2f}"

    return {
        "label": label,
        "component": first.component,
        "sets": first.order,
        "seed": first.seed,
        "figure": drawn.wide(
            mixtures_figure(first),
            f"weight of each {first.component} for each user over the rounds",
            f"mixtures-{first.method}",
            mixtures_sheet(first),
        ),
        "runs": [
            [
                str(mixtures.seed),
                "–" if mixtures.recovery is None else f"{mixtures.recovery[-1]:.2f}",
                first_to_last(mixtures.entropy),
                first_to_last(mixtures.mismatch),
            ]
            for mixtures in by_run
        ],
        "true": first.clusters is not None,
        "users": [
            (user, cluster, [f"{weight:.2f}" for weight in weights])
            for user, cluster, weights in zip(first.users, clusters, first.values[-1], strict=True)
        ],
    }


def _scores_section(
    entry: Entry, entries: Sequence[Entry], drawn: FigureMarkup
) -> tuple[str, Markup, list[tuple[str, str, list[str]]]]:
    """Return an entry's label, the figure of its expert scores, and the table of its last scores.

    Args:
        entry: The entry, which has routers.
        entries: All entries, by which users are ranked if there are too many for the figure.
        drawn: Converts figures to markup.
    """
    panels = scores_panels(entry, entries)
    figure = drawn.panels(panels, f"expert scores of {entry.label}", f"scores-{entry.method}")
    return entry.label, figure, _score_rows(entry)


def _score_rows(entry: Entry) -> list[tuple[str, str, list[str]]]:
    """Return the rows of the table below an entry's figure of scores: user, expert, and its last score in each layer.

    A score is the expert's mean gate.
    """
    return [
        (user, expert.name, [f"{curve.values[-1].mean:.2f}" for curve in expert.layers])
        for user in entry.first.users
        for expert in expert_curves(entry, user)
    ]
