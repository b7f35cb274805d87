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
from comingle.reports.comparisons import (
    BETTER,
    WORSE,
    BaselineComparison,
    edge_notes,
    heading,
    notes,
    read_tuning,
    tuned_keys,
    tuning_rows,
    tuning_title,
    verdict_rows,
)
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
from comingle.reports.formatting import best_of, negligible_change_text, unit_and_direction, worst_of
from comingle.reports.runs import (
    Entry,
    Gain,
    RunRecord,
    Spread,
    baseline_comparison,
    baselines,
    brief_list,
    common_measures,
    continuation_line,
    cost,
    differing_settings,
    epsilon_text,
    expert_curves,
    final_result,
    forgetting_lines,
    gains_of_entries,
    served_lines,
    verdicts,
)
from comingle.reports.tables import cost_rows, upload_weight_tables
from comingle.utils.errors import RunError, list_names
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
    """Encode gates compactly for the page's script: thousandths as little-endian 16-bit integers in base64."""
    thousandths = np.rint(gates.astype(np.float64) * 1000).astype("<u2")
    return base64.b64encode(thousandths.tobytes()).decode("ascii")


def views_as_json(views: Sequence[TokenView]) -> list[dict[str, object]]:
    """Return token views as JSON for the page's script; ``classes`` are the CSS classes of the experts' colours."""
    json_views: list[dict[str, object]] = []
    for view in views:
        users = []
        for user, experts in zip(view.users, view.experts, strict=True):
            classes = [expert_class(name) for name in experts]
            users.append({"name": user, "experts": list(experts), "classes": classes})
        texts = [{"name": text.name, "owner": text.owner, "tokens": list(text.tokens)} for text in view.texts]
        gates = []  # gates[text][user], each as a base64 string
        for gates_of_text in view.gates:
            gates.append([pack_gates(gates_of_user) for gates_of_user in gates_of_text])
        json_views.append(
            {
                "label": view.label,
                "layers": view.layers,
                "inDistribution": view.in_distribution,
                "users": users,
                "texts": texts,
                "gates": gates,
            }
        )
    return json_views


# -------------------------------------------------------------------- token view


@dataclass(frozen=True, kw_only=True)
class _TokenCell:
    """A text under one user's model, with the gates (tokens x experts) of one layer."""

    title: str
    tokens: Sequence[str]
    experts: Sequence[str]
    gates: np.ndarray


def tokens_figure(view: TokenView, layer: int) -> Figure:
    """Return a figure of texts (rows) x users' models (columns) with each token on the colour of its top expert.

    Args:
        view: Tokens of some texts, and their gates under the models of some users.
        layer: Index of the layer whose gates count.
    """
    rows = []
    for text_index, text in enumerate(view.texts):
        cells = []
        for user_index, user in enumerate(view.users):
            title = f"text: {text.name}, model: {user}"
            if text.owner == user and view.in_distribution:
                title += " (in distribution)"
            cells.append(_token_cell(view, text_index, user_index, layer, title))
        rows.append(cells)
    return _tokens_grid(view, rows, f"{view.label}, layer {layer}")


def own_texts_figure(view: TokenView, layers: Sequence[int]) -> Figure:
    """Return a figure of layers (rows) x users (columns): each user's text under its own model (CoMiGS, Figure 3).

    Args:
        view: The token view; users that own none of its texts are left out.
        layers: The layers whose gates count, from top to bottom.
    """
    owners = [text.owner for text in view.texts]
    rows = []
    for layer in layers:
        cells = []
        for user_index, user in enumerate(view.users):
            if user in owners:
                text_index = owners.index(user)
                cells.append(_token_cell(view, text_index, user_index, layer, f"{user}, layer {layer}"))
        rows.append(cells)
    return _tokens_grid(view, rows, view.label)


def _token_cell(view: TokenView, text_index: int, user_index: int, layer: int, title: str) -> _TokenCell:
    """Return the cell of a text under a user's model.

    Args:
        view: Tokens of some texts, and their gates under the models of some users.
        text_index: Index of the text in ``view.texts``.
        user_index: Index of the user in ``view.users``.
        layer: Index of the layer whose gates the cell has.
        title: Heading above the text, such as "text: a, model: ann".
    """
    gates = view.gates[text_index][user_index][layer]
    tokens, experts = view.texts[text_index].tokens, view.experts[user_index]
    return _TokenCell(title=title, tokens=tokens, experts=experts, gates=gates)


def _tokens_grid(view: TokenView, rows: Sequence[Sequence[_TokenCell]], title: str) -> Figure:
    """Return a figure of equal cells, high enough for the longest text, and a legend of the experts.

    Args:
        view: Tokens of some texts, and their gates under the models of some users.
        rows: The cells, row by row.
        title: Title of the figure.
    """
    cells = [cell for row in rows for cell in row]
    num_lines = max(_num_lines(cell.tokens) for cell in cells)

    def paint(figure: Figure, axes: list[Axes]) -> None:
        """Paint all cells and the legend."""
        for axis, cell in zip(axes, cells, strict=True):
            _paint_tokens(axis, cell, num_lines)
            axis.set_title(cell.title, fontsize=7)
        expert_names = max(view.experts, key=len)  # those of the user with the most experts
        patches = [Patch(color=expert_colour(name).light) for name in expert_names]
        legend_above(figure, patches, expert_names, title=title)
        _fit_letters(figure, axes)

    title_height, line_height = 0.35, 0.115  # inches
    cell_height = max(1.1, title_height + line_height * num_lines)
    return draw(len(rows), len(rows[0]), (3.6, cell_height), paint)


def _num_lines(tokens: Sequence[str]) -> int:
    """Return the number of lines that a text's tokens fill when wrapped to the width of a cell; at least 1."""
    if not tokens:
        return 1
    _, last_line = _token_positions(tokens)[-1]
    return last_line + 1


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


def _paint_tokens(axis: Axes, cell: _TokenCell, num_lines: int) -> None:
    """Paint each token of a cell on the colour of its top expert.

    Args:
        axis: The axes, on which a letter is 1 wide and a line 1 high.
        cell: The text's tokens and their gates.
        num_lines: Height of the axes in lines of text.
    """
    axis.set_axis_off()
    axis.set_xlim(0, COLUMNS)
    axis.set_ylim(num_lines, 0)  # y grows downwards
    positions = _token_positions(cell.tokens)
    top_experts = cell.gates.argmax(-1)
    for token, (column, line), top_expert in zip(cell.tokens, positions, top_experts, strict=True):
        text = visible(token)
        if not text:
            continue
        colour = expert_colour(cell.experts[int(top_expert)]).light
        centre, baseline = line + 0.5, line + 0.78
        axis.barh(centre, len(text), 0.95, left=column, color=colour, alpha=0.75, linewidth=0)
        axis.text(column, baseline, text, family="monospace", clip_on=True)


def visible(token: str) -> str:
    """Return a token on one line, with a sign for line breaks and for other characters that cannot be printed."""
    return "".join(_visible_character(character) for character in token)


def _visible_character(character: str) -> str:
    """Return a sign for a character that cannot be printed: "⏎" for a line break, "·" for others."""
    if character == "\n":
        return "⏎"
    return character if character.isprintable() else "·"


def _token_positions(tokens: Sequence[str]) -> list[tuple[int, int]]:
    """Return column and line of every token, in lines of :data:`COLUMNS` letters; a token is not split."""
    positions = []
    column, line = 0, 0
    for token in tokens:
        width = len(visible(token))
        if column > 0 and column + width > COLUMNS:  # start a new line
            column = 0
            line += 1
        positions.append((column, line))
        column += width
    return positions


def _affects_test_data(key: str) -> bool:
    """Return whether a recipe key affects the test data; the amount of training data does not."""
    return key.startswith("data.") and "max_train" not in key and key not in ("data.task.fraction", "data.replay")


def notices(entries: Sequence[Entry]) -> list[str]:
    """Return sentences that warn readers of these entries' results, such as "run-1 has not finished: ..."."""
    sentences = comparability_warnings(entries)
    for entry in entries:
        for run in entry.runs:
            name = run.folder.name
            if run.metrics is None:
                last_round = run.evaluations[-1].round
                sentences.append(
                    f"{name} has not finished: evaluated after round {last_round} of {run.planned_rounds}."
                )
                continue
            sample = describe_sample(run.metrics)  # empty if all users were evaluated
            if sample:
                sentences.append(f"{name}: {sample}.")
            sentences += [f"{name}: {warning}." for warning in run.metrics.get("warnings", ())]
        untrained_roles = (entry.first.metrics or {}).get("untrained")
        if untrained_roles:
            roles = " and ".join(untrained_roles)
            sentences.append(f"{entry.label}: {roles} never trained, since the run has too few local steps.")
    return sentences


def comparability_warnings(entries: Sequence[Entry]) -> list[str]:
    """Return sentences on why numbers of these entries should not be compared.

    The runs may have different bases, test data or settings, or read files that changed between runs.
    """
    runs = [run for entry in entries for run in entry.runs]
    warnings = []
    bases = sorted({run.base for run in runs})
    if len(bases) > 1:
        warnings.append(f"These runs have different bases ({', '.join(bases)}): do not compare their numbers.")

    distinct_data_settings: set[str] = set()  # as text, because lists cannot be in a set
    for run in runs:
        data_settings = [(key, value) for key, value in run.settings if _affects_test_data(key)]
        distinct_data_settings.add(repr(data_settings))
    if len(distinct_data_settings) > 1:
        if runs[0].unit == "tokens":
            reason = "read their text in different ways: their perplexities"
        else:
            reason = "have different tasks: their numbers"
        warnings.append(f"These runs {reason} may not be comparable.")

    tuned = {key for folder in {run.folder.parent for run in runs} for key in tuned_keys(folder)}
    keys = [key for key in differing_settings(runs) if key not in tuned]
    if keys:
        warnings.append(
            f"These runs differ in {brief_list(keys, ' and ')}, not only in method and seed: this may be the cause of "
            "differences between their results."
        )
    return warnings + _changed_inputs(runs)


def _changed_inputs(runs: Sequence[RunRecord]) -> list[str]:
    """Return sentences on runs whose base or data changed although their recipes name the same files.

    Each run's digests are compared with those of the first run with the same seed, base, tokenizer and data settings.
    """
    sentences: list[str] = []
    first_run_by_sources: dict[str, tuple[RunRecord, Inputs]] = {}
    for run in runs:
        try:
            inputs = read_inputs(run.folder)  # digests of the base and of each user's data
        except RunError:  # a run of an older version, which recorded no digests
            continue
        data_settings = [
            (key, value) for key, value in run.settings if key.startswith("data.") or key == "training.context"
        ]
        sources = repr((run.seed, run.base, inputs.tokenizer, data_settings))
        if sources not in first_run_by_sources:
            first_run_by_sources[sources] = (run, inputs)
            continue
        first_run, first_inputs = first_run_by_sources[sources]
        changed = []
        if inputs.base != first_inputs.base:
            changed.append("the base")
        for name, digests in inputs.users.items():
            if digests != first_inputs.users.get(name):
                changed.append(f"the data of {name}")
        if changed:
            sentences.append(
                f"{run.folder} and {first_run.folder} have the same recipe, but {changed[0]} changed in between: do "
                "not compare their numbers."
            )
    return sentences


Sheet = Sequence[Sequence[object]]
"""A header and rows."""


def csv_text(sheet: Sheet) -> str:
    """Return comma-separated values; None is an empty cell, and numbers have all their digits."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(sheet)
    return file.getvalue()


def data_uri(sheet: Sheet) -> str:
    """Return a data URI with the sheet as a CSV file."""
    content = base64.b64encode(csv_text(sheet).encode()).decode("ascii")
    return f"data:text/csv;charset=utf-8;base64,{content}"


def user_records(runs: Sequence[Path]) -> list[dict[str, object]]:
    """Return one record for each user of each finished run.

    A record is ``{"run": ..., "method": ..., "seed": ..., "base": ..., "rounds": ..., "user": ...}`` and the user's
    results and costs.

    Raises:
        RunError: None of the runs has finished.
    """
    finished = [run for run in runs if (run / "metrics.json").exists()]
    if not finished:
        finished = list(runs[:1])  # read_metrics raises the error
    records: list[dict[str, object]] = []
    for run in finished:
        metrics = read_metrics(run)
        for user, results in metrics["users"].items():
            record: dict[str, object] = {"run": run.name}
            for key in ("method", "seed", "base", "rounds"):
                record[key] = metrics[key]
            record["user"] = user
            record.update(results)
            records.append(record)
    return records


def sheet_of(records: Sequence[Mapping[str, object]]) -> list[list[object]]:
    """Return a header with all keys of the records, and a row for each record; missing values are None."""
    keys = list(dict.fromkeys(key for record in records for key in record))
    rows = [[record.get(key) for key in keys] for record in records]
    return [[*keys], *rows]


def mixtures_sheet(mixtures: Mixtures) -> list[list[object]]:
    """Return a header and rows with each user's weight of each component at each evaluation."""
    rows: list[list[object]] = [["seed", "round", "user", "true_cluster", "component", "weight"]]
    clusters = mixtures.clusters or (None,) * len(mixtures.users)
    for round_number, weights_of_users in zip(mixtures.rounds, mixtures.weights, strict=True):
        for user, cluster, weights in zip(mixtures.users, clusters, weights_of_users, strict=True):
            for component, weight in zip(mixtures.component_ids, weights, strict=True):
                rows.append([mixtures.seed, round_number, user, cluster, component, float(weight)])
    return rows


def tokens_sheet(view: TokenView, layer: int) -> list[list[object]]:
    """Return a header and rows with the gates of one layer: a row for each text, user's model, token and expert.

    Args:
        view: Tokens of some texts, and their gates under the models of some users.
        layer: Index of the layer whose gates are written.
    """
    rows: list[list[object]] = [["text", "model", "layer", "token_number", "token", "expert", "probability"]]
    for text, gates_of_users in zip(view.texts, view.gates, strict=True):
        for user, experts, gates_of_user in zip(view.users, view.experts, gates_of_users, strict=True):
            gates_of_layer = gates_of_user[layer]  # (tokens, experts)
            for position, (token, gates) in enumerate(zip(text.tokens, gates_of_layer, strict=True)):
                for expert, gate in zip(experts, gates, strict=True):
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
        """Convert figures with the names of CSS variables for their colours."""
        self._variables = variables
        self._num_figures = 0  # makes the ids of each figure unique

    def wide(self, figure: Figure, label: str, name: str, sheet: Sheet) -> Markup:
        """Return one figure with fixed proportions, which scrolls in its frame if it is too wide.

        Args:
            figure: The figure to show.
            label: Text for screen readers.
            name: Name, without suffix, of the CSV file of the figure's numbers that readers can download.
            sheet: Content of the CSV file.
        """
        template = Markup('<div class="frame" tabindex="0" role="region" aria-label="{}">{}</div>')
        frame = template.format(label, self._svg(figure, label))
        return _figure_markup([frame], name, sheet)

    def panels(self, panels: Panels, label: str, name: str, *, phone: Panels | None = None) -> Markup:
        """Return panels side by side as far as they fit.

        Args:
            panels: Functions that draw the panels, with sizes, labels, legend and data.
            label: Text for screen readers.
            name: Name, without suffix, of the CSV file of the figure's numbers that readers can download.
            phone: Other panels for narrow screens; None for the same ones.
        """
        content = [self._legend(panels.legend)]
        if phone is None:
            content.append(self._grid(panels, label, css_class=""))
        else:
            content.append(self._grid(panels, label, css_class="desk"))
            content.append(self._grid(phone, label, css_class="phone"))
        return _figure_markup(content, name, panels.sheet)

    def _grid(self, panels: Panels, label: str, *, css_class: str) -> Markup:
        """Return one picture per panel, side by side as far as they fit.

        Args:
            panels: Functions that draw the panels, with sizes, labels, legend and data.
            label: Text for screen readers, to which each panel's title is added.
            css_class: ``desk`` (only on wide screens), ``phone`` (only on narrow ones) or empty.
        """
        frames = []
        for figure in panels.parts():
            title = figure.axes[0].get_title("left")
            picture = self._svg(figure, f"{label}: {title}" if title else label)
            frames.append(Markup('<div class="frame">{}</div>').format(picture))
        width_inches, _ = panels.size
        width_points = 72 * width_inches
        min_width = round(width_points * _MIN_SCALE)  # in CSS pixels
        template = Markup('<div class="panels {}" style="--room:{}px">{}</div>')  # the style sheet reads --room
        return template.format(css_class, min_width, Markup("\n").join(frames))

    def _legend(self, keys: Sequence[Key]) -> Markup:
        """Return a legend with the mark and the label of each key; empty without keys."""
        if not keys:
            return Markup("")
        spans = []
        for mark, label in keys:
            picture = self._svg(draw_key(mark), label="")  # screen readers skip it and read the label behind it
            spans.append(Markup('<span class="key">{}{}</span>').format(picture, label))
        return Markup('<div class="keys">{}</div>').format(Markup(" ").join(spans))

    def _svg(self, figure: Figure, label: str) -> Markup:
        """Return a figure as inline SVG with a unique prefix for its ids; without a label it is decoration."""
        self._num_figures += 1
        return Markup(svg(figure, f"f{self._num_figures}", str(escape(label)), self._variables))


def _figure_markup(content: Sequence[Markup], name: str, sheet: Sheet) -> Markup:
    """Return an HTML figure with a link to a CSV file of its numbers.

    Args:
        content: Pictures and legends as markup.
        name: Name of the CSV file without suffix.
        sheet: Content of the CSV file.
    """
    link = Markup('<a class="csv" download="{}.csv" href="{}">CSV of this figure</a>').format(name, data_uri(sheet))
    return Markup("<figure>{}{}</figure>").format(Markup("\n").join(content), link)


MAX_USER_COLUMNS = 8
"""Largest number of users with a column each in the table of results; else it has the worst and the best user."""
MAX_NAMES = 12
"""Largest number of names in a cell."""
LISTED_SEEDS = 8
"""Largest number of seeds that the heading lists."""
_CLASS_BY_VERDICT = {"gained": "gain", "harmed": "harm", BETTER: "gain", WORSE: "harm"}
"""CSS class of a cell by its verdict."""


def render_page(
    entries: Sequence[Entry],
    views: Sequence[TokenView] = (),
    *,
    baseline: str | None = None,
) -> str:
    """Return the page as HTML, from the template ``report.html``.

    Args:
        entries: Entries, each the runs of one recipe with different seeds, all with the same users.
        views: Tokens of some texts, and their gates under the models of some users, for the page's interactive view.
        baseline: The baseline of verdicts; None for ``local`` or else the first entry.
    """
    environment = Environment(
        loader=PackageLoader("comingle.reports", "templates"),
        autoescape=True,  # names and texts come from users
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    palette = _palette(entries)
    # Colours in figures become CSS variables, "#1c2128" becomes "var(--c1c2128)", with other values in the dark theme.
    variable_by_colour = {colour.light: f"var(--c{colour.light[1:]})" for colour in palette}
    converter = FigureMarkup(variable_by_colour)
    first = entries[0].first
    users = list(first.users)
    all_runs = [run for entry in entries for run in entry.runs]

    mixtures = _mixtures_sections(entries, converter)
    component_names = {section["component"] for section in mixtures}  # such as "adaptor set"
    curves = list(_curve_figures(entries, converter))
    gains = [_gains_section(entries, entry, converter) for entry in baselines(entries)]
    bytes_label = f"test {first.measure} against uploaded bytes"
    return environment.get_template("report.html").render(
        heading=_heading(entries),
        base=first.base,
        task=first.task,
        measure=first.measure,
        unit_and_direction=unit_and_direction(first.measure),
        unit=first.unit,
        users=users,
        seeds=sorted({run.seed for run in all_runs}),
        rounds=max(entry.first.planned_rounds for entry in entries),
        notices=notices(entries),
        palette=palette,
        experts=expert_css(),
        channels=_css_channels,  # a function, which the template calls
        results=_results_table(entries, users),
        verdicts=_verdicts_table(baseline_comparison(entries, baseline)),
        tunings=_tuning_tables(entries),
        max_panels=MAX_PANELS,
        is_population=is_population(users),
        deltas=sorted({run.spent["delta"] for run in all_runs if run.spent}),
        protects_examples=any(_protects_examples(entry) for entry in entries),
        negligible_change=negligible_change_text(first.measure),
        curves=curves,
        gains=[section for section in gains if section is not None],
        costs=cost_rows([cost(entry) for entry in entries]),
        specialists=[_specialists_of(entry) for entry in entries if entry.first.start.get("specialists")],
        continuations=_continuations(entries),
        upload_weights=upload_weight_tables(entries),
        bytes_figure=converter.panels(bytes_panels(entries), bytes_label, "bytes"),
        mixtures=mixtures,
        component=component_names.pop() if len(component_names) == 1 else "component",
        scores=[_scores_section(entry, entries, converter) for entry in entries if entry.first.has_routers],
        views=views_as_json(views),
        shows_users_texts=any(text.owner for view in views for text in view.texts),
    )


def _specialists_of(entry: Entry) -> dict[str, str]:
    """Return an entry's label and how many specialist experts each user has, as text, such as "ada 3, ben 1"."""
    numbers = list_names(f"{name} {number}" for name, number in entry.first.start["specialists"].items())
    return {"label": entry.label, "numbers": numbers}


def _continuations(entries: Sequence[Entry]) -> list[str]:
    """Return lines for entries that continue another run, such as "fedavg continues runs/may after 20 rounds"."""
    lines: list[str] = []
    for entry in entries:
        if "continues" in entry.first.start:
            lines.append(f"{entry.label} {continuation_line(entry.first.start['continues'])}")
        metrics = entry.first.metrics or {}
        lines += [f"{entry.label}, {line}" for line in [*forgetting_lines(metrics), *served_lines(metrics)]]
    return lines


def _css_channels(colour: str) -> str:
    """Return a colour such as "#2b7bc4" for CSS: "43 123 196"."""
    return " ".join(map(str, rgb(colour)))


def _protects_examples(entry: Entry) -> bool:
    """Return whether the privacy of an entry is per example, rather than per user."""
    privacy = entry.first.recipe.get("privacy") or {}
    return protects_examples(privacy.get("mechanism", ""))


def _heading(entries: Sequence[Entry]) -> str:
    """Return the methods, their tasks or data, and the seeds, such as "fedavg and local on mnist, seeds 0, 1"."""
    labels = brief_list([entry.label for entry in entries], " and ")
    subjects = brief_list(list(dict.fromkeys(entry.first.subject for entry in entries)), " and ")
    seeds = sorted({run.seed for entry in entries for run in entry.runs})
    if len(seeds) == 1:
        seeds_text = f"seed {seeds[0]}"
    elif len(seeds) <= LISTED_SEEDS:
        seeds_text = f"seeds {', '.join(map(str, seeds))}"
    else:
        seeds_text = f"{len(seeds)} seeds"
    return f"{labels} on {subjects}, {seeds_text}"


def _palette(entries: Sequence[Entry]) -> list[Colour]:
    """Return the distinct colours in the figures of these entries; the page defines a CSS variable for each."""
    methods = [entry.method for entry in entries]
    colours = [INK, MUTED, LINE, PAPER]
    colours += [style.colour for style in styles(methods)]
    for entry in entries:
        last_evaluation = entry.first.evaluations[-1]
        expert_names: set[str] = set()
        for experts_of_user in last_evaluation.experts.values():
            expert_names.update(experts_of_user)
        colours += [expert_colour(name) for name in sorted(expert_names)]
    colour_by_code = {colour.light: colour for colour in colours}
    return list(colour_by_code.values())


# -------------------------------------------------------------------- results


def _spread_text(value: Spread | None, measure: str) -> str:
    """Return a mean with its deviation over seeds as text, such as "12.3 (0.4)".

    Args:
        value: Mean and standard deviation; None if a result is not finite.
        measure: Name of the measure of these results, such as "perplexity".
    """
    if value is None:
        return "not finite"
    mean = number(value.mean, measure)
    if value.std is None:
        return mean
    return f"{mean} ({number(value.std, measure)})"


def _results_table(entries: Sequence[Entry], users: Sequence[str]) -> dict[str, object]:
    """Return the table of final results for the page's template: a row per entry, and columns of users and means.

    For more than :data:`MAX_USER_COLUMNS` users, two columns replace those of single users: the worst and the best user
    of each entry. Private runs have a column of epsilons.

    Args:
        entries: Entries, each the runs of one recipe with different seeds, all with the same users.
        users: Names of the users.

    Returns:
        ``head``, the names of the columns, and ``rows``, each entry's ``label`` and ``cells``. If users lack columns,
        ``users`` has the rows of a second table, such as ``("ann", ["12.3", "11.8"])``, and ``labels`` its columns.
    """
    measure = entries[0].first.measure
    results_by_user = {user: [final_result(entry, user) for entry in entries] for user in users}
    user_columns = []
    for user, results in results_by_user.items():
        user_columns.append((user, [_spread_text(result, measure) for result in results]))

    users_have_columns = len(users) <= MAX_USER_COLUMNS
    if users_have_columns:
        columns = list(user_columns)
    else:
        columns = [
            _extreme_column(results_by_user, measure, worst=True),
            _extreme_column(results_by_user, measure, worst=False),
        ]
    columns.append(("mean", [_spread_text(final_result(entry), measure) for entry in entries]))
    if measure == "perplexity":
        geometric_means = [final_result(entry, geometric=True) for entry in entries]
        columns.append(("geometric mean", [_spread_text(mean, measure) for mean in geometric_means]))
    if any(entry.first.spent for entry in entries):  # at least one entry is private
        columns.append(("epsilon", [epsilon_text(entry) for entry in entries]))

    rows = []
    for i, entry in enumerate(entries):
        rows.append({"label": entry.label, "cells": [cells[i] for _, cells in columns]})
    return {
        "head": [heading for heading, _ in columns],
        "rows": rows,
        "labels": [entry.label for entry in entries],
        "users": [] if users_have_columns else user_columns,
    }


def _extreme_column(
    results_by_user: dict[str, list[Spread | None]], measure: str, *, worst: bool
) -> tuple[str, list[str]]:
    """Return the heading and the cells of a column: ``("best user", ["12.3 (0.4) · ann", "11.8 (0.2) · bob"])``.

    There is a cell for each entry. It is "not finite" if any user's result is.

    Args:
        results_by_user: Each user's results, one for each entry.
        measure: Name of the measure of these results, such as "perplexity".
        worst: Whether to take the worst user instead of the best.
    """
    heading = "worst user" if worst else "best user"
    min_or_max = worst_of(measure) if worst else best_of(measure)
    cells = []
    for results_of_entry in zip(*results_by_user.values(), strict=True):
        finite = {}
        for user, result in zip(results_by_user, results_of_entry, strict=True):
            if result is not None:
                finite[user] = result
        if len(finite) < len(results_by_user):
            cells.append("not finite")
            continue
        extreme_user = min_or_max(finite, key=lambda user: finite[user].mean)
        cells.append(f"{_spread_text(finite[extreme_user], measure)} · {extreme_user}")
    return heading, cells


def _verdicts_table(comparison: BaselineComparison | None) -> dict[str, object] | None:
    """Return the table of verdicts (better, level or worse) for the page's template; None without a comparison."""
    if comparison is None:
        return None
    header, rows = verdict_rows(comparison)
    return {
        "heading": heading(comparison),
        "head": header,
        "rows": rows,
        "notes": notes(comparison),
        "classes": _CLASS_BY_VERDICT,
    }


def _tuning_tables(entries: Sequence[Entry]) -> list[dict[str, object]]:
    """Return what ``compare --tune`` picked in the comparisons of the entries, as tables for the page's template."""
    tables: list[dict[str, object]] = []
    for folder in dict.fromkeys(entry.first.folder.parent for entry in entries):
        tuning = read_tuning(folder)
        if tuning is not None:
            head, rows = tuning_rows(tuning)
            tables.append({"title": tuning_title(tuning), "head": head, "rows": rows, "notes": edge_notes(tuning)})
    return tables


def _curve_figures(entries: Sequence[Entry], converter: FigureMarkup) -> Iterator[tuple[str, Markup]]:
    """Yield titles and figures of learning curves: with and without the first evaluation, for each common measure.

    Args:
        entries: Entries, each the runs of one recipe with different seeds, all with the same users.
        converter: Converts figures to markup.
    """
    measures = common_measures(entries)
    for measure in measures:
        for start, suffix in ((True, ""), (False, "-late")):
            span = "from the start" if start else "without the start, so that late differences show"
            title = f"{measure} {span}" if len(measures) > 1 else span
            panels = curves_panels(entries, start=start, measure=measure)
            label = f"test {measure} during training, {span}"
            yield title, converter.panels(panels, label, f"curves-{measure}{suffix}")


def _gains_section(entries: Sequence[Entry], baseline: Entry, converter: FigureMarkup) -> dict[str, object] | None:
    """Return the section on each user's change against a baseline, for the page's template.

    Args:
        entries: Entries, each the runs of one recipe with different seeds, all with the same users.
        baseline: The entry that the others are compared with.
        converter: Converts figures to markup.

    Returns:
        The values of the template; None if nothing can be compared.
    """
    bars = users_panels(entries, baseline)
    if bars is None:
        return None
    measure, gains_by_entry = baseline.first.measure, gains_of_entries(entries, baseline)
    file = f"users-against-{baseline.method}"
    label = f"change of each user's test {measure} against {baseline.label}"
    narrow_bars = users_panels(entries, baseline, width=4.2)
    bars_figure = converter.panels(bars, label, file, phone=narrow_bars)

    population_figure = None
    if is_population(entries[0].first.users):
        population = population_panels(entries, baseline)
        if population is not None:
            population_figure = converter.panels(population, f"all users, against {baseline.label}", f"all-{file}")

    best_to_worst = verdicts(measure)
    bad_verdicts = best_to_worst[best_to_worst.index("level") + 1 :]  # those behind "level"
    columns = [verdict for verdict in best_to_worst if _has_column(verdict, gains_by_entry)]
    rows = []
    for entry, gains in gains_by_entry:
        cells = []
        for verdict in columns:
            names = [gain.named_text for gain in gains if gain.verdict == verdict]
            css_class = _CLASS_BY_VERDICT.get(verdict, "")
            cells.append((css_class, _names_markup(names, worst_first=verdict in bad_verdicts)))
        rows.append({"label": entry.label, "cells": cells})
    return {
        "baseline": baseline.label,
        "figure": bars_figure,
        "population": population_figure,
        "verdicts": columns,
        "has_single_seed": any("one seed" in verdict for verdict in columns),
        "rows": rows,
        "max_users": max_users_with_bars(len(gains_by_entry)),
    }


def _has_column(verdict: str, gains_by_entry: Sequence[tuple[Entry, Sequence[Gain]]]) -> bool:
    """Return whether the page's table of users by verdict has a column for a verdict.

    "level" always has one, "lower (one seed)" if an entry has one seed, "gained" if an entry has several, and so on.

    Args:
        verdict: One of :func:`comingle.reports.runs.verdicts`.
        gains_by_entry: Pairs of an entry (runs of one recipe with different seeds) and its users' gains.
    """
    if verdict == "level":
        return True
    needs_one_seed = "one seed" in verdict
    for _, gains in gains_by_entry:
        for gain in gains:
            has_one_seed = gain.change.std is None
            if has_one_seed == needs_one_seed:
                return True
    return False


def _names_markup(names: list[str], *, worst_first: bool) -> Markup:
    """Return users' names as markup that does not wrap within a name, such as "40 users: ann, bob and 38 more".

    Args:
        names: The names, best first; at most :data:`MAX_NAMES` of them are listed.
        worst_first: Begin with the worst user if not all names are listed.
    """
    if not names:
        return Markup("none")
    listed = names
    num_hidden = len(names) - MAX_NAMES
    if num_hidden > 0:
        by_importance = names[::-1] if worst_first else names
        listed = by_importance[:MAX_NAMES]
    *all_but_last, last = listed
    parts = [*(f"{name}," for name in all_but_last), last]
    spans = [Markup('<span class="name">{}</span>').format(part) for part in parts]
    joined = Markup(" ").join(spans)
    if num_hidden > 0:
        return Markup("{} users: {} and {} more").format(len(names), joined, num_hidden)
    return joined


# -------------------------------------------------------------------- mixtures and scores


def _learned_mixtures(entry: Entry) -> list[Mixtures]:
    """Return the client-level mixtures of an entry's runs that were learned, so that users mix several components."""
    mixtures_of_runs = [read_mixtures(run.folder) for run in entry.runs]
    return [mixtures for mixtures in mixtures_of_runs if mixtures is not None and mixtures.learned]


def _mixtures_sections(entries: Sequence[Entry], converter: FigureMarkup) -> list[dict[str, object]]:
    """Return the section of each entry with learned mixtures."""
    sections = []
    for entry in entries:
        learned_mixtures = _learned_mixtures(entry)
        if learned_mixtures:
            sections.append(_mixtures_section(entry.label, learned_mixtures, converter))
    return sections


def _mixtures_section(label: str, mixtures_of_runs: Sequence[Mixtures], converter: FigureMarkup) -> dict[str, object]:
    """Return the section on an entry's client-level mixtures, for the page's template.

    Args:
        label: Label of the entry.
        mixtures_of_runs: The mixtures of each run; the figure and the table of weights show the first run.
        converter: Converts figures to markup.
    """

    def first_to_last(values: Sequence[float] | None) -> str:
        """Return the values at the first and the last evaluation, such as "1.39 to 0.02"; a dash if unknown."""
        return "–" if values is None else f"{values[0]:.2f} to {values[-1]:.2f}"

    first = mixtures_of_runs[0]
    figure_label = f"weight of each {first.component} for each user over the rounds"
    figure = converter.wide(mixtures_figure(first), figure_label, f"mixtures-{first.method}", mixtures_sheet(first))
    rows_of_runs = []
    for mixtures in mixtures_of_runs:
        rand_index = "–" if mixtures.rand_index is None else f"{mixtures.rand_index[-1]:.2f}"
        entropy, mismatch = first_to_last(mixtures.entropy), first_to_last(mixtures.mismatch)
        rows_of_runs.append([str(mixtures.seed), rand_index, entropy, mismatch])
    true_clusters = first.clusters or [None] * len(first.users)
    last_weights = first.weights[-1]
    rows_of_users = []
    for user, cluster, weights in zip(first.users, true_clusters, last_weights, strict=True):
        rows_of_users.append((user, cluster, [f"{weight:.2f}" for weight in weights]))
    return {
        "label": label,
        "component": first.component,
        "component_ids": first.component_ids,
        "seed": first.seed,
        "figure": figure,
        "runs": rows_of_runs,
        "has_true_clusters": first.clusters is not None,
        "users": rows_of_users,
    }


def _scores_section(
    entry: Entry, entries: Sequence[Entry], converter: FigureMarkup
) -> tuple[str, Markup, list[tuple[str, str, list[str]]]]:
    """Return an entry's label, the figure of its expert scores, and the table of its last scores.

    Args:
        entry: The entry, which has routers.
        entries: All entries, by which users are ranked if there are too many for the figure.
        converter: Converts figures to markup.
    """
    panels = scores_panels(entry, entries)
    figure = converter.panels(panels, f"expert scores of {entry.label}", f"scores-{entry.method}")
    return entry.label, figure, _score_rows(entry)


def _score_rows(entry: Entry) -> list[tuple[str, str, list[str]]]:
    """Return a row for each user and expert: ``("ann", "generalist", ["0.61", "0.58"])``, the mean gate in each layer.

    The gates are those of the last evaluation.
    """
    rows = []
    for user in entry.first.users:
        for expert in expert_curves(entry, user):
            last_gates = [f"{curve.values[-1].mean:.2f}" for curve in expert.layers]
            rows.append((user, expert.name, last_gates))
    return rows
