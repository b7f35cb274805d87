"""Colours, styles and layout of figures.

Methods have the colours of Okabe and Ito, and line styles and markers that identify them without colour. Generalists
are orange and specialists blue, as in the CoMiGS paper; further experts have other hues.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

LineStyle = Literal["-", "--", "-.", ":"]


@dataclass(frozen=True)
class Colour:
    """The same colour on a light and on a dark background."""

    light: str
    dark: str


INK = Colour("#1c2128", "#e4e8ec")
MUTED = Colour("#59636e", "#a3adb8")
LINE = Colour("#d5dbe1", "#39424c")
PAPER = Colour("#ffffff", "#15191e")

# Indices of the colours of methods that look the same in every report.
_FIXED_COLOURS = {"pretrained": 7, "local": 2, "fedavg": 3}
_METHOD_COLOURS = (
    Colour("#d55e00", "#ff8f4a"),
    Colour("#0072b2", "#5aaee8"),
    Colour("#00805d", "#2fcb9f"),
    Colour("#a8508a", "#e79cc9"),
    Colour("#3a9bd3", "#9bd8f7"),
    Colour("#b07900", "#f2bd4b"),
    Colour("#6f4bb2", "#b798ec"),
    Colour("#6b6f75", "#b4b9bf"),
    Colour("#7d5a35", "#cfa272"),
)
_LINE_STYLES: tuple[LineStyle, ...] = ("-", "--", "-.", ":")
_MARKERS = "osD^vPX*<>hd"

# Backgrounds of tokens and fills of heat maps, for light and dark pages.
_EXPERT_COLOURS = {
    "generalist": (Colour("#f0892b", "#9a4904"), Colour("#d9b52c", "#806410")),
    "specialist": (
        Colour("#4a94d8", "#1f69b3"),
        Colour("#35b592", "#0c6b50"),
        Colour("#a885d6", "#7247ad"),
        Colour("#98a2ad", "#5d6873"),
        Colour("#e07aa5", "#a83a6e"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Style:
    """Colour, line style and marker of a method."""

    colour: Colour
    line: LineStyle
    marker: str


def styles(methods: Sequence[str]) -> list[Style]:
    """Return a style for each method; pretrained, local and fedavg look the same in every report.

    Other methods get the remaining colours in turn, with another line style after each turn.
    """
    free_colours = [number for number in range(len(_METHOD_COLOURS)) if number not in _FIXED_COLOURS.values()]
    chosen: list[Style] = []
    num_others = 0
    for number, method in enumerate(methods):
        colour, line = _FIXED_COLOURS.get(method), "-"
        has_occurred = method in methods[:number]  # a method can occur again with other settings
        if colour is None or has_occurred:
            turn, position = divmod(num_others, len(free_colours))
            colour, line = free_colours[position], _LINE_STYLES[turn % len(_LINE_STYLES)]
            num_others += 1
        marker = _MARKERS[colour % len(_MARKERS)]
        if method == "pretrained":  # a horizontal line, not a curve
            line, marker = ":", ""
        chosen.append(Style(colour=_METHOD_COLOURS[colour], line=line, marker=marker))
    return chosen


def expert_kind(name: str) -> tuple[str, int]:
    """Return the role of an expert and its number from 0: ``("specialist", 1)`` for "specialist 2"."""
    role, _, number = name.partition(" ")
    return role, int(number) - 1 if number else 0


def expert_colour(name: str) -> Colour:
    """Return the background colour of tokens whose top expert this is."""
    role, number = expert_kind(name)
    return _EXPERT_COLOURS[role][number % len(_EXPERT_COLOURS[role])]


def rgb(colour: str) -> tuple[int, int, int]:
    """Convert ``#rrggbb`` to three numbers from 0 to 255."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def expert_css() -> list[tuple[str, Colour]]:
    """Return the class name (g1, g2, s1 ...) and the background colour of each expert."""
    return [(f"{role[0]}{n + 1}", colour) for role, kinds in _EXPERT_COLOURS.items() for n, colour in enumerate(kinds)]


def expert_class(name: str) -> str:
    """Return the class name of an expert in :func:`expert_css`."""
    role, number = expert_kind(name)
    return f"{role[0]}{number % len(_EXPERT_COLOURS[role]) + 1}"


SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "comingle",  # reproducible ids
    "text.parse_math": False,  # names and texts may contain dollar signs
    "svg.fonttype": "none",  # text elements instead of paths: searchable, and in the page's font
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": LINE.light,
    "axes.labelcolor": MUTED.light,
    "axes.titlecolor": INK.light,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE.light,
    "grid.linewidth": 0.6,
    "text.color": INK.light,
    "xtick.color": MUTED.light,
    "ytick.color": MUTED.light,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
}


def draw(rows: int, columns: int, size: tuple[float, float], paint: Callable[[Figure, list[Axes]], None]) -> Figure:
    """Draw a figure with a grid of axes.

    Args:
        rows: Number of rows.
        columns: Number of columns.
        size: Width and height of each of the axes, in inches.
        paint: Called with the figure and its axes, row by row.
    """
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
        FigureCanvasAgg(figure)
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        paint(figure, axes)
    return figure


SMALLEST = 10
"""Smallest font size on the page, in pixels. Figures that would need smaller letters scroll in their frame."""

Key = tuple[Line2D | Patch, str]
"""A mark of a legend and its label."""


@dataclass(frozen=True, kw_only=True)
class Panels:
    """A figure of equal panels, with its legend and its data.

    A file has all panels in one picture. The page has one picture per panel, side by side as far as they fit.

    Args:
        paint: Functions that fill the panels; None leaves a place empty.
        columns: Number of columns in a file.
        size: Width and height of a panel, in inches.
        sheet: A header and rows with the numbers of the figure.
        keys: The legend.
        below: Label of the x axis.
        left: Label of the y axis.
        note: Explanation of bands or whiskers below all panels of a file; the page has its own.
    """

    paint: Sequence[Callable[[Axes], None] | None]
    columns: int
    size: tuple[float, float]
    sheet: Sequence[Sequence[object]]
    keys: Sequence[Key] = ()
    below: str = ""
    left: str = ""
    note: str = ""

    def figure(self) -> Figure:
        """Return all panels in one picture with the legend; only the panels at the left and the bottom have labels."""

        def paint(figure: Figure, axes: list[Axes]) -> None:
            """Fill all panels, label the outer ones and add the legend."""
            # The last row of the grid can have more axes than panels are left.
            for number, (axis, fill) in enumerate(zip(axes, self.paint, strict=False)):
                is_lowest = number + self.columns >= len(self.paint)
                is_leftmost = number % self.columns == 0
                axis.set_xlabel(self.below if is_lowest else "")
                axis.set_ylabel(self.left if is_leftmost else "")
                if fill is None:
                    axis.set_axis_off()
                else:
                    fill(axis)
            for axis in axes[len(self.paint) :]:
                axis.set_axis_off()
            if self.keys:
                legend_above(figure, [mark for mark, _ in self.keys], [label for _, label in self.keys])
            if self.note:
                figure.supxlabel(self.note, fontsize="small", color=MUTED.light)

        rows = -(-len(self.paint) // self.columns)  # rounded up
        return draw(rows, self.columns, self.size, paint)

    def parts(self) -> list[Figure]:
        """Return a picture for each panel, with axis labels but without the legend; empty places are left out."""
        return [draw(1, 1, self.size, partial(self._draw_panel, fill)) for fill in self.paint if fill]

    def _draw_panel(self, fill: Callable[[Axes], None], _figure: Figure, axes: list[Axes]) -> None:
        """Fill the only panel of a figure and label its axes; called by :func:`draw` for each panel of :meth:`parts`.

        Args:
            fill: Draws the panel's content on its axes.
            _figure: The figure, not used.
            axes: The figure's axes, of which there is one.
        """
        (axis,) = axes
        axis.set_xlabel(self.below)
        axis.set_ylabel(self.left)
        fill(axis)


def draw_key(mark: Line2D | Patch) -> Figure:
    """Return the mark of a legend as a small picture."""
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(0.4, 0.16))
        FigureCanvasAgg(figure)
        # Positions and sizes are fractions of the picture. A line has its marker in the middle.
        if isinstance(mark, Line2D):
            artist: Any = Line2D([0.02, 0.5, 0.98], [0.5] * 3, markevery=[1])
        else:
            artist = Rectangle((0.2, 0.05), 0.6, 0.9)
        artist.update_from(mark)
        artist.set_transform(figure.transFigure)
        figure.add_artist(artist)
    return figure


def short(name: str, most: int = 26) -> str:
    """Shorten a name to ``most`` characters by cutting its middle."""
    half = (most - 1) // 2
    return name if len(name) <= most else f"{name[:half]}…{name[-half:]}"


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write ``name.png`` and ``name.svg`` on white.

    Args:
        figure: The figure.
        folder: An existing folder.
        name: Name of the files without suffix.

    Returns:
        The paths of both files.
    """
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    with mpl.rc_context(SETTINGS):
        figure.savefig(paths[0], dpi=160, facecolor=PAPER.light)
        # Without a date, so that equal figures are equal files.
        figure.savefig(paths[1], facecolor=PAPER.light, metadata={"Date": None})
    return paths


def svg(figure: Figure, prefix: str, label: str, variables: dict[str, str]) -> str:
    """Return a figure as inline SVG for a page.

    The SVG does not shrink below the width at which all letters have at least :data:`SMALLEST` pixels.

    Args:
        figure: The figure.
        prefix: Prefix of all ids in the SVG, which must be unique on the page.
        label: Text for screen readers; without it the figure is decoration.
        variables: CSS variables by colour, so that colours follow the page's theme.
    """
    with mpl.rc_context(SETTINGS):
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]  # without the XML declaration
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{prefix}-", text)  # ids and references to them
    text = re.sub("#[0-9a-f]{6}", lambda colour: variables.get(colour[0], colour[0]), text)
    width, height = (float(re.search(rf'{side}="([\d.]+)pt"', text)[1]) for side in ("width", "height"))  # type: ignore[index]
    # The smallest text decides how far the SVG may shrink. It may grow to 1.45 pixels per point.
    font_sizes = [float(size) for size in re.findall(r"<text[^>]*font(?:-size)?:[^;\">]*?([\d.]+)px", text)]
    least_width = width * SMALLEST / min(font_sizes) if font_sizes else 0.0
    sides = f"min-width:{math.ceil(least_width)}px;max-width:{max(least_width, width * 1.45):.0f}px"
    role = f'role="img" aria-label="{label}"' if label else 'aria-hidden="true"'
    opening = f'<svg {role} viewBox="0 0 {width} {height}" style="{sides}"'
    return re.sub(r"<svg [^>]*>", f'{opening} xmlns:xlink="http://www.w3.org/1999/xlink">', text, count=1)


def legend_above(figure: Figure, handles: Sequence[Any], labels: Sequence[str], **options: Any) -> None:
    """Add a legend above all axes, with as many columns as fit.

    Args:
        figure: The figure.
        handles: Marks of the legend.
        labels: Their labels.
        options: Further options of matplotlib's legend.
    """
    # In points: about 5.6 for a character, and 44 for the mark before a label and the gap behind it.
    widest = 5.6 * max(map(len, labels)) + 44
    figure_points = 72 * figure.get_figwidth()  # an inch has 72 points
    columns = max(1, min(len(labels), 5, int(figure_points // widest)))
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, **options)


def label_points(figure: Figure, axis: Axes, points: Sequence[tuple[float, float, str]]) -> None:
    """Label each point on the first of four sides where the label covers no other label and no point.

    If there is no such side, the label is right above the point.

    Args:
        figure: The figure.
        axis: Its axes with the points.
        points: Position and label of each point, in data coordinates.
    """
    figure.draw_without_rendering()  # computes the layout
    points_per_pixel = 72 / figure.dpi
    pixels = [axis.transData.transform(point[:2]) for point in points]
    places = [(float(x) * points_per_pixel, float(y) * points_per_pixel) for x, y in pixels]
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in places]  # boxes of the points, and of labels so far
    for (x, y), (data_x, data_y, text) in zip(places, points, strict=True):
        width = 5.6 * len(text)  # mean width of a letter, in points
        # Offsets of the label: right above, right below, left above, left below.
        sides = [(8.0, 5.0), (8.0, -13.0), (-8.0 - width, 5.0), (-8.0 - width, -13.0)]
        boxes = [(x + right, y + up, x + right + width, y + up + 10) for right, up in sides]
        free = [number for number, box in enumerate(boxes) if not any(_overlaps(box, other) for other in taken)]
        chosen = free[0] if free else 0  # 0 is right above
        taken.append(boxes[chosen])
        axis.annotate(text, (data_x, data_y), textcoords="offset points", xytext=sides[chosen], fontsize=9)


def _overlaps(box: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Return whether two boxes (left, bottom, right, top) overlap."""
    return box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]
