"""Published figures drawn from the runs of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comingle.utils.errors import RunError
from comingle_papers.reproduce.counted import draw_usage
from comingle_papers.reproduce.plan import Plan
from comingle_papers.reproduce.runner import Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from comingle.reports.runs import Entry
    from comingle.reports.tokens import TokenView


LENGTH = 160
"""Tokens of a prompt at most."""


def draw_routes(plan: Plan, entries: Mapping[tuple[str, str], Any]) -> Iterator[tuple[str, Figure]]:
    """For each column and row the prompts of its data set, by the models of the first seed.

    Raises:
        RunError: users are not those whom there are prompts for.
    """
    from comingle.reports.tokens import own_texts_figure, tokens_figure

    plot = plan.experiment.plot
    assert plot is not None
    for (row, column), entry in entries.items():
        view = prompts_view(plan, column, entry)
        layers = list(dict.fromkeys(layer_of(name, view.layers) for name in plot.tokens))  # one of a single layer
        if plot.own:
            yield f"{column}-{row}", own_texts_figure(view, layers)
        else:
            for layer in layers:
                yield f"{column}-{row}-layer{layer}", tokens_figure(view, layer)


def layer_of(name: str, layers: int) -> int:
    """The number of the first, middle or last of so many layers; of twelve the paper shows 0, 5 and 11."""
    return {"first": 0, "middle": (layers - 1) // 2, "last": layers - 1}[name]


def prompts_view(plan: Plan, column: str, entry: Any) -> TokenView:
    """The prompts in everybody's model, each owned by the user who has text of its kind."""
    import comingle
    from comingle.runs.views import view_of

    run = comingle.load(entry.first.folder)
    prompts, users = (
        plan.study.prompts[plan.column_of(column).data],
        [user.name for user in run.federation.clients.users],
    )
    if len(prompts) != len(users):
        raise RunError(f"{plan.name}: prompts for {', '.join(prompts)}, and users {', '.join(users)}")
    view = view_of(run, entry.label, list(prompts.items()), users, LENGTH)
    owned = zip(view.texts, users, strict=True)  # names differ where text is from the hub, their order does not
    return replace(view, texts=tuple(replace(text, owner=user) for text, user in owned), in_distribution=True)


Entries = Mapping[tuple[str, str], Any]
"""The runs of all seeds as an ``Entry`` of the reports, by (row, column)."""
Figures = Iterator[tuple[str, Any]]
"""Figures with the ends of their names."""


def draw(plan: Plan, outcomes: Mapping[str, Outcome], folder: Path) -> list[Path]:
    """Draw a figure into files of a folder.

    Raises:
        RunError: matplotlib is not installed, or no run has what the figure shows.
    """
    try:
        from comingle.reports.canvas import save
    except ImportError:
        raise RunError("figures need the package matplotlib: pip install 'comingle[reports]'") from None
    assert plan.experiment.plot is not None
    kinds: dict[str, Callable[[Plan, Entries], Figures]] = {
        "curves": _curves,
        "scores": _scores,
        "sweep": _sweep,
        "usage": lambda plan, entries: draw_usage(plan, entries, folder),
        "tokens": draw_routes,
    }
    stem = plan.name.partition("/")[2]
    figures = list(kinds[plan.experiment.plot.kind](plan, read_entries(plan, outcomes)))
    if not figures:
        raise RunError(f"{plan.name}: no finished run has what this figure shows")
    return [path for end, figure in figures for path in save(figure, folder, f"{stem}-{end}")]


def read_entries(plan: Plan, outcomes: Mapping[str, Outcome]) -> dict[tuple[str, str], Entry]:
    """The finished runs, those of one row and column together, named as the rows are."""
    from comingle.reports.runs import Entry, read_run

    runs: dict[tuple[str, str], list[Any]] = {}
    for cell in plan.cells:
        outcome = outcomes.get(cell.folder)
        if outcome is not None and not outcome.diverged:
            runs.setdefault((cell.row, cell.column), []).append(read_run(outcome.folder))
    rows = plan.experiment.rows
    return {
        key: Entry(label=rows[key[0]].label or key[0], runs=tuple(runs_of_key)) for key, runs_of_key in runs.items()
    }


def _curves(plan: Plan, entries: Entries) -> Figures:
    """For each column the test results of every row: mean, then each user (CoMiGS: Figures 5 to 7, 9, 11 to 13)."""
    from comingle.reports.figures import curves_figure

    plot = plan.experiment.plot
    assert plot is not None
    for column in plan.columns:
        shown = [entries[row, column] for row in plan.rows if (row, column) in entries]
        if shown:
            # What was measured before training is left out: the base's perplexity alone would set the scale.
            yield column, curves_figure(shown, start=False, measure=plot.measure)
        if plot.mixtures:
            yield from _mixtures([(row, entries[row, column]) for row in plan.rows if (row, column) in entries], column)


def _mixtures(entries: Sequence[tuple[str, Entry]], column: str) -> Figures:
    """For each row whose users learn to mix adaptors, users x adaptors over the rounds of the first seed."""
    from comingle.reports.figures import mixtures_figure, read_mixtures

    for row, entry in entries:
        mixtures = read_mixtures(entry.first.folder)
        if mixtures is not None and mixtures.learned:
            yield f"{column}-{row}-mixtures", mixtures_figure(mixtures)


def _scores(plan: Plan, entries: Entries) -> Figures:
    """For each column and row every layer's expert scores (CoMiGS: Figures 4 and 10)."""
    from comingle.reports.figures import scores_figure

    for (row, column), entry in entries.items():
        if entry.first.routed:
            yield f"{column}-{row}", scores_figure(entry)


def _sweep(plan: Plan, entries: Entries) -> Figures:
    """For each column the last test perplexity over one setting, a line for each of another (CoMiGS: Figure 8)."""
    from comingle.reports.runs import Spread, final

    plot = plan.experiment.plot
    assert plot is not None
    for column in plan.columns:
        lines: dict[Any, dict[Any, Spread]] = {}
        for cell in plan.cells:
            entry = entries.get((cell.row, column))
            settings = cell.recipe.method.settings
            if cell.column == column and entry is not None and (last := final(entry)) is not None:
                lines.setdefault(settings[plot.series], {})[settings[plot.x]] = last
        if lines:
            yield column, _sweep_figure(lines, x=plot.x, series=plot.series)


def _sweep_figure(lines: Mapping[Any, Mapping[Any, Any]], *, x: str, series: str) -> Figure:
    from comingle.reports.canvas import draw as draw_axes
    from comingle.reports.canvas import styles

    def paint(figure: Any, axes: list[Any]) -> None:
        looks = styles([str(value) for value in sorted(lines)])
        for value, style in zip(sorted(lines), looks, strict=True):
            points = sorted(lines[value].items())
            axes[0].errorbar(
                [at for at, _ in points],
                [point.mean for _, point in points],
                yerr=[point.std or 0.0 for _, point in points],
                color=style.colour.light,
                linestyle=style.line,
                marker=style.marker,
                label=f"{series} {value}",
            )
        values_of_x = [at for points in lines.values() for at in points]
        if min(values_of_x) > 0 and max(values_of_x) > 20 * min(values_of_x):
            axes[0].set_xscale("log")
        axes[0].set_xlabel(x)
        axes[0].set_ylabel("test perplexity")
        axes[0].legend()

    return draw_axes(1, 1, (4.6, 3.2), paint)
