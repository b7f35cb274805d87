"""``comingle plot``: the report's figures one by one, as PNG and SVG."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from comingle.cli.report import Length, Replace, Runs, Texts, Users, check_target, require_packages
from comingle.errors import RecipeError, RunError, did_you_mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from comingle.reports.runs import Entry

Figures = Iterator[tuple[str, "Figure"]]
KINDS = ("curves", "scores", "users", "bytes", "mixtures", "tokens")


def plot(
    runs: Runs,
    figure: Annotated[
        list[str] | None,
        typer.Option("--figure", help=f"Which: {', '.join(KINDS)}; repeat it. Default: all but tokens."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder to write to (default: RUN/figures).")] = None,
    layer: Annotated[
        list[int] | None, typer.Option("--layer", help="Layers of the token view (default: first, middle, last).")
    ] = None,
    text: Texts = None,
    users: Users = None,
    tokens: Length = 120,
    force: Replace = False,
) -> None:
    """Write single figures of runs as PNG and SVG. The figure tokens shows the users' test text, or --text."""
    require_packages("plot")
    from comingle.cli.progress import console, status
    from comingle.reports.figures import save
    from comingle.reports.runs import read_entries

    kinds = figure or [kind for kind in KINDS if kind != "tokens"]
    for kind in kinds:
        if kind not in KINDS:
            raise RecipeError(f"--figure {kind!r}: allowed: {', '.join(KINDS)}.{did_you_mean(kind, KINDS)}")
    entries, folder = read_entries(runs), out or runs[0] / "figures"
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder}: is a file; --out names a folder")
    with status("drawing"):
        drawn = [
            pair
            for kind in kinds
            for pair in _draw(kind, entries, lambda: _tokens(entries, text, users, tokens, layer))
        ]
    if not drawn:
        raise RunError(
            f"{runs[0]}: nothing to draw for {', '.join(kinds)}: no token routers, or nothing to compare with"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, _ in drawn:
        for ending in (".png", ".svg"):
            check_target(folder / f"{name}{ending}", force=force)
    for name, one in drawn:
        save(one, folder, name)
        console.print(f"{folder / name}.png  {folder / name}.svg", highlight=False)


def _draw(kind: str, entries: list[Entry], tokens: Callable[[], Figures]) -> Figures:
    from comingle.reports import figures
    from comingle.reports.series import baselines

    if kind == "curves":
        yield "curves", figures.curves_figure(entries)
        yield "curves-late", figures.curves_figure(entries, start=False)
    elif kind == "scores":
        for entry in entries:
            if entry.first.routed:
                yield f"scores-{file_name(entry.label)}", figures.scores_figure(entry)
    elif kind == "users":
        for baseline in baselines(entries):
            if (found := figures.users_figure(entries, baseline)) is not None:
                yield f"users-against-{file_name(baseline.label)}", found
    elif kind == "bytes":
        yield "bytes", figures.bytes_figure(entries)
    elif kind == "mixtures":
        yield from _mixtures(entries)
    else:
        yield from tokens()


def _mixtures(entries: list[Entry]) -> Figures:
    """Of every run whose users mix adaptors at the level of the client."""
    from comingle.reports.mixtures import mixtures_figure, read_mixtures

    for entry in entries:
        for run in entry.runs:
            if (found := read_mixtures(run.folder)) is not None:
                seed = f"-seed{run.seed}" if len(entry.runs) > 1 else ""
                yield f"mixtures-{file_name(entry.label)}{seed}", mixtures_figure(found)


def _tokens(
    entries: list[Entry], text: list[str] | None, users: str | None, length: int, layers: list[int] | None
) -> Figures:
    from comingle.cli.views import route_texts
    from comingle.reports.tokens import tokens_figure

    for view in route_texts(entries, text, users, length):
        for layer in layers or sorted({0, (view.layers - 1) // 2, view.layers - 1}):
            if not 0 <= layer < view.layers:
                raise RecipeError(f"--layer {layer}: {view.label} has layers 0 to {view.layers - 1}")
            yield f"tokens-{file_name(view.label)}-layer{layer}", tokens_figure(view, layer)


def file_name(label: str) -> str:
    """A label as part of a file's name."""
    return re.sub(r"[^\w.-]+", "-", label).strip("-")
