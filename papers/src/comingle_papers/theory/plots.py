"""Figures and folders of ``comingle theory``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comingle.utils.errors import RunError
from comingle.utils.records import write_json, write_text
from comingle_papers.theory.checks import BLOCKS, EXAMPLE, F1, F2, LOCAL
from comingle_papers.theory.claims import Curve
from comingle_papers.theory.coupled import P2

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# Okabe and Ito's colours, which colour-blind readers can tell apart; dashes say the same once more.
STYLES: dict[str, tuple[str, Any]] = {
    F1: ("#D55E00", "--"),
    EXAMPLE: ("#009E73", "-."),
    BLOCKS: ("#E69F00", (0, (5, 1.5))),
    F2: ("#000000", (0, (4, 1, 1, 1, 1, 1))),
    LOCAL: ("#CC79A7", ":"),
    P2: ("#56B4E9", "--"),
}
MEASURED, OTHERS = "#0072B2", "#B0B0B0"
TOUCHES = 1e-11
"""The slope near the solution is drawn through the last residual above this one, where rounding does not bend it."""
FLOOR = 1e-15
"""Below this share of the first residual everything is rounding."""
SETTINGS: dict[Any, Any] = {"svg.hashsalt": "comingle", "svg.fonttype": "none", "font.size": 9, "axes.titlesize": 9}


def draw_residuals(curves: list[Curve], folder: Path) -> list[Path]:
    """Write ``residuals.png`` and ``residuals.svg``: one panel for each scheme, residuals relative to the first.

    One instance is drawn with its predictions, the first that has a bound; the others, with bounds of their own, thin.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    schemes = list(dict.fromkeys(curve.scheme for curve in curves))
    columns = min(3, len(schemes))
    rows = -(-len(schemes) // columns)
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(3.9 * columns, 2.9 * rows + 0.6), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(rows, columns, squeeze=False)
        for place, scheme in zip(grid.flat, schemes, strict=False):
            _panel(place, [curve for curve in curves if curve.scheme == scheme])
        for place in list(grid.flat)[len(schemes) :]:
            place.set_axis_off()
        lines = {label: line for place in grid.flat for line, label in zip(*_labelled(place), strict=True)}
        figure.legend(
            lines.values(), lines.keys(), loc="outside lower center", ncols=min(4, 2 * columns), frameon=False
        )
        paths = [folder / f"residuals.{kind}" for kind in ("png", "svg")]
        for path in paths:
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def _labelled(place: Axes) -> Any:
    return place.get_legend_handles_labels()


def _panel(place: Axes, curves: list[Curve]) -> None:
    chosen = next((curve for curve in curves if set(curve.rates) - {LOCAL}), curves[0])
    shown = max(3, _visible(chosen))
    for curve in curves:
        if curve is not chosen:
            upto = max(2, _visible(curve))
            place.semilogy(range(upto), _relative(curve)[:upto], color=OTHERS, linewidth=0.8, label="other instances")
    measured = _relative(chosen)[:shown]
    for name, rate in chosen.rates.items():
        colour, dashes = STYLES[name]
        start = max(k for k, value in enumerate(measured) if value > TOUCHES) if name == LOCAL else 0
        line = [measured[start] * rate ** (k - start) for k in range(shown)]
        place.semilogy(range(shown), line, linestyle=dashes, color=colour, linewidth=1.8, label=name)
    every = max(1, shown // 12)
    style = {"color": MEASURED, "markersize": 4, "linewidth": 1.2, "markevery": every, "label": "measured"}
    place.semilogy(range(len(measured)), measured, "o-", **style)
    _frame(place, chosen, shown)


def _frame(place: Axes, chosen: Curve, shown: int) -> None:
    from matplotlib.ticker import MaxNLocator

    place.set_ylim(FLOOR / 3, 5)
    place.set_xlim(-0.02 * shown, shown - 1 + 0.02 * shown)
    place.xaxis.set_major_locator(MaxNLocator(integer=True))
    place.set_title(chosen.scheme.replace(", ", "\n", 1))
    place.set_xlabel("step")
    place.set_ylabel("distance / first" if chosen.scheme.startswith(("quadratic", "coupled")) else "(F − F*) / first")
    place.grid(visible=True, color="#E4E4E4", linewidth=0.6)


def _relative(curve: Curve) -> list[float]:
    """Residuals over the first one; what rounding took to zero or below sits on the floor."""
    return [max(value / curve.residuals[0], FLOOR) for value in curve.residuals]


def _visible(curve: Curve) -> int:
    """How many residuals there are until the first that is all rounding, that one included."""
    relative = _relative(curve)
    return next((k + 1 for k, value in enumerate(relative) if value <= FLOOR), len(relative))


FILES = ("recipe.yaml", "theory.json", "residuals.png", "residuals.svg")


def check_folder(folder: Path, *, force: bool) -> None:
    """Whether results may be written to a folder; touches nothing.

    Raises:
        RunError: it is a file, holds results and ``force`` is not given, holds anything else, or cannot be written to.
    """
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder}: is a file; --out names a folder")
    names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    strange = [name for name in names if name not in FILES]
    if strange:
        raise RunError(f"{folder}: holds {strange[0]!r}, which is none of {', '.join(FILES)}; use another --out")
    if names and not force:
        raise RunError(f"{folder}: exists; --force replaces it, --out names another")
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    try:  # now, not after the computation
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise RunError(f"{folder}: cannot be written to: {error.strerror}") from None


def write_folder(folder: Path, recipe: str, results: dict[str, Any], curves: list[Curve]) -> None:
    """Write recipe, results and figures, each in place of an earlier one.

    Raises:
        RunError: it cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "recipe.yaml", recipe)
        write_json(folder / "theory.json", results)
        draw_residuals(curves, folder)
    except OSError as error:
        raise RunError(f"{folder}: cannot be written to: {error.strerror}") from None
