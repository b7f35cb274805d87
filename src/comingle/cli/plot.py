"""``comingle plot``: the report's figures one by one, as PNG and SVG, with their numbers as CSV."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from comingle.cli.options import console, named, status
from comingle.cli.report import Length, Replace, Runs, Texts, Users, warn_unlike
from comingle.utils.errors import RecipeError, RunError, did_you_mean
from comingle.utils.files import check_target, require_packages

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from comingle.reports.canvas import Panels
    from comingle.reports.page import Sheet
    from comingle.reports.runs import Entry

Figures = Iterator[tuple[str, "Figure", "Sheet"]]
"""Names, pictures, and the numbers in them."""
KINDS = ("curves", "scores", "users", "bytes", "mixtures", "tokens")


def plot(
    runs: Runs,
    figure: Annotated[
        list[str] | None,
        typer.Option("--figure", help=f"Which: {', '.join(KINDS)}; repeat it. Default: all but tokens."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="<path>", parser=named, help="Folder to write to (default: RUN/figures)."),
    ] = None,
    layer: Annotated[
        list[int] | None, typer.Option("--layer", help="Layers of the token view (default: first, middle, last).")
    ] = None,
    text: Texts = None,
    users: Users = None,
    tokens: Length = 120,
    force: Replace = False,
) -> None:
    """Write single figures of runs as PNG, SVG and CSV. The figure tokens shows the users' test text, or --text."""
    require_packages("comingle plot")
    from comingle.reports.canvas import save
    from comingle.reports.page import csv_text
    from comingle.reports.runs import read_entries
    from comingle.utils.records import write_text

    kinds = figure or [kind for kind in KINDS if kind != "tokens"]
    for kind in kinds:
        if kind not in KINDS:
            raise RecipeError(f"--figure {kind!r}: allowed: {', '.join(KINDS)}.{did_you_mean(kind, KINDS)}")
    entries, folder = read_entries(runs), out or runs[0] / "figures"
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder}: is a file; --out names a folder")
    with status("drawing"):
        drawn = [
            one for kind in kinds for one in _draw(kind, entries, lambda: _tokens(entries, text, users, tokens, layer))
        ]
    if not drawn:
        raise RunError(
            f"{runs[0]}: nothing to draw for {', '.join(kinds)}: no token routers, or nothing to compare with"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, _, _ in drawn:
        for ending in (".png", ".svg", ".csv"):
            check_target(folder / f"{name}{ending}", force=force)
    warn_unlike(entries)
    for name, one, sheet in drawn:
        save(one, folder, name)
        write_text(folder / f"{name}.csv", csv_text(sheet))
        console.print(f"{folder / name}.png  {folder / name}.svg  {folder / name}.csv", highlight=False)


def _draw(kind: str, entries: list[Entry], tokens: Callable[[], Figures]) -> Figures:
    if kind == "mixtures":
        yield from _mixtures(entries)
    elif kind == "tokens":
        yield from tokens()
    else:
        for name, panels in _panels(kind, entries):
            if panels is not None:
                yield name, panels.figure(), panels.sheet


def _panels(kind: str, entries: list[Entry]) -> Iterator[tuple[str, Panels | None]]:
    from comingle.reports.figures import (
        bytes_panels,
        curves_panels,
        is_population,
        population_panels,
        scores_panels,
        users_panels,
    )
    from comingle.reports.runs import baselines

    if kind == "curves":
        yield "curves", curves_panels(entries)
        yield "curves-late", curves_panels(entries, start=False)
    elif kind == "bytes":
        yield "bytes", bytes_panels(entries)
    elif kind == "scores":
        for entry in entries:
            if entry.first.routed:
                yield f"scores-{file_name(entry.label)}", scores_panels(entry, entries)
    else:
        for baseline in baselines(entries):
            yield f"users-against-{file_name(baseline.label)}", users_panels(entries, baseline)
            if is_population(entries[0].first.users):
                yield f"population-against-{file_name(baseline.label)}", population_panels(entries, baseline)


def _mixtures(entries: list[Entry]) -> Figures:
    """Of every run whose users mix adaptors at the level of the client."""
    from comingle.reports.figures import mixtures_figure, read_mixtures
    from comingle.reports.page import mixtures_sheet

    for entry in entries:
        for run in entry.runs:
            if (learned := read_mixtures(run.folder)) is not None:
                seed = f"-seed{run.seed}" if len(entry.runs) > 1 else ""
                yield f"mixtures-{file_name(entry.label)}{seed}", mixtures_figure(learned), mixtures_sheet(learned)


def _tokens(
    entries: list[Entry], text: list[str] | None, users: str | None, length: int, layers: list[int] | None
) -> Figures:
    from comingle.cli.compare import split_names
    from comingle.reports.page import tokens_sheet
    from comingle.reports.tokens import tokens_figure
    from comingle.runs.views import route_texts

    for view in route_texts(entries, text, None if users is None else split_names(users), length):
        for layer in layers or sorted({0, (view.layers - 1) // 2, view.layers - 1}):
            if not 0 <= layer < view.layers:
                raise RecipeError(f"--layer {layer}: {view.label} has layers 0 to {view.layers - 1}")
            name = f"tokens-{file_name(view.label)}-layer{layer}"
            yield name, tokens_figure(view, layer), tokens_sheet(view, layer)


def file_name(label: str) -> str:
    """A label as part of a file's name."""
    return re.sub(r"[^\w.-]+", "-", label).strip("-")
