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

    Other methods cycle through the remaining colours. Each further cycle has another line style.
    """
    free_indices = [index for index in range(len(_METHOD_COLOURS)) if index not in _FIXED_COLOURS.values()]
    chosen: list[Style] = []
    num_others = 0
    for position, method in enumerate(methods):
        has_occurred = method in methods[:position]  # a method can occur again with other settings
        if method in _FIXED_COLOURS and not has_occurred:
            colour_index, line = _FIXED_COLOURS[method], "-"
        else:
            cycle, index_in_cycle = divmod(num_others, len(free_indices))
            colour_index, line = free_indices[index_in_cycle], _LINE_STYLES[cycle % len(_LINE_STYLES)]
            num_others += 1
        marker = _MARKERS[colour_index % len(_MARKERS)]
        if method == "pretrained":  # a horizontal line, not a curve
            line, marker = ":", ""
        chosen.append(Style(colour=_METHOD_COLOURS[colour_index], line=line, marker=marker))
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
    """Return the CSS class and the background colour of each expert: ``g1``, ``g2`` (generalists), ``s1`` and so on."""
    classes = []
    for role, colours in _EXPERT_COLOURS.items():
        for number, colour in enumerate(colours, 1):
            classes.append((f"{role[0]}{number}", colour))
    return classes


def expert_class(name: str) -> str:
    """Return an expert's CSS class in :func:`expert_css`: "s2" for "specialist 2"."""
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
    width, height = size
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
        FigureCanvasAgg(figure)
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        paint(figure, axes)
    return figure


MIN_FONT_PIXELS = 10
"""Smallest font size on the page, in pixels. Figures that would need smaller letters scroll in their frame."""

Key = tuple[Line2D | Patch, str]
"""A mark of a legend and its label."""


@dataclass(frozen=True, kw_only=True)
class Panels:
    """A figure of equal panels, with its legend and its data.

    A file has all panels in one picture. The page has one picture per panel, side by side as far as they fit.

    Args:
        painters: Functions that fill the panels; None leaves a panel empty.
        columns: Number of columns in a file.
        size: Width and height of a panel, in inches.
        sheet: A header and rows with the numbers of the figure.
        legend: Marks and labels of the legend.
        x_label: Label of the x axis.
        y_label: Label of the y axis.
        note: Explanation of bands or whiskers below all panels of a file; the page has its own.
    """

    painters: Sequence[Callable[[Axes], None] | None]
    columns: int
    size: tuple[float, float]
    sheet: Sequence[Sequence[object]]
    legend: Sequence[Key] = ()
    x_label: str = ""
    y_label: str = ""
    note: str = ""

    def figure(self) -> Figure:
        """Return all panels in one picture with the legend; only the panels at the left and the bottom have labels."""
        num_panels = len(self.painters)
        num_rows = math.ceil(num_panels / self.columns)

        def paint(figure: Figure, axes: list[Axes]) -> None:
            """Paint all panels, label the outer ones and add the legend."""
            for number, paint_panel in enumerate(self.painters):
                is_lowest = number + self.columns >= num_panels
                is_leftmost = number % self.columns == 0
                axes[number].set_xlabel(self.x_label if is_lowest else "")
                axes[number].set_ylabel(self.y_label if is_leftmost else "")
                if paint_panel is None:  # keeps a place empty, so that all rows have the same columns
                    axes[number].set_axis_off()
                else:
                    paint_panel(axes[number])
            for axis in axes[num_panels:]:  # the last row may not be full
                axis.set_axis_off()
            if self.legend:
                legend_above(figure, [mark for mark, _ in self.legend], [label for _, label in self.legend])
            if self.note:
                figure.supxlabel(self.note, fontsize="small", color=MUTED.light)

        return draw(num_rows, self.columns, self.size, paint)

    def parts(self) -> list[Figure]:
        """Return a picture for each panel, with axis labels but without the legend; empty panels are left out."""
        return [self._part(paint_panel) for paint_panel in self.painters if paint_panel is not None]

    def _part(self, paint_panel: Callable[[Axes], None]) -> Figure:
        """Return a picture of one panel with axis labels."""

        def paint(_: Figure, axes: list[Axes]) -> None:
            """Paint the panel on the only axes of the picture, and label them."""
            (axis,) = axes
            axis.set_xlabel(self.x_label)
            axis.set_ylabel(self.y_label)
            paint_panel(axis)

        return draw(1, 1, self.size, paint)


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
        artist.update_from(mark)  # colours, line style, marker and hatch, not the position
        artist.set_transform(figure.transFigure)
        figure.add_artist(artist)
    return figure


def short(name: str, most: int = 26) -> str:
    """Shorten a name to ``most`` characters by cutting its middle: "specia…list 2"."""
    if len(name) <= most:
        return name
    half = (most - 1) // 2
    return f"{name[:half]}…{name[-half:]}"


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write ``name.png`` and ``name.svg`` on white.

    Args:
        figure: The figure to write.
        folder: An existing folder.
        name: Name of the files without suffix.

    Returns:
        The paths of both files.
    """
    png_path, svg_path = folder / f"{name}.png", folder / f"{name}.svg"
    with mpl.rc_context(SETTINGS):
        figure.savefig(png_path, dpi=160, facecolor=PAPER.light)
        # Without a date, so that equal figures are equal files.
        figure.savefig(svg_path, facecolor=PAPER.light, metadata={"Date": None})
    return [png_path, svg_path]


def svg(figure: Figure, prefix: str, label: str, variables: dict[str, str]) -> str:
    """Return a figure as inline SVG for a page.

    The SVG does not shrink below the width at which all letters have at least :data:`MIN_FONT_PIXELS` pixels.

    Args:
        figure: The figure to convert.
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
    text = re.sub("#[0-9a-f]{6}", lambda match: variables.get(match[0], match[0]), text)  # colours

    width, height = _size_in_points(text, "width"), _size_in_points(text, "height")
    font_sizes = [float(size) for size in re.findall(r"<text[^>]*font(?:-size)?:[^;\">]*?([\d.]+)px", text)]
    # At a width of W pixels, letters of size s have s * W / width pixels.
    min_width = width * MIN_FONT_PIXELS / min(font_sizes) if font_sizes else 0.0
    max_width = max(min_width, width * 1.45)  # pixels per point, so that letters of 9 points have 13 pixels
    style = f"min-width:{math.ceil(min_width)}px;max-width:{max_width:.0f}px"
    role = f'role="img" aria-label="{label}"' if label else 'aria-hidden="true"'
    opening = f'<svg {role} viewBox="0 0 {width} {height}" style="{style}"'
    return re.sub(r"<svg [^>]*>", f'{opening} xmlns:xlink="http://www.w3.org/1999/xlink">', text, count=1)


def _size_in_points(svg_text: str, attribute: str) -> float:
    """Return the value of the first attribute ``width="12.5pt"`` or ``height="12.5pt"``."""
    match = re.search(rf'{attribute}="([\d.]+)pt"', svg_text)
    assert match is not None
    return float(match[1])


def legend_above(figure: Figure, handles: Sequence[Any], labels: Sequence[str], **options: Any) -> None:
    """Add a legend above all axes, with as many columns as fit, at most 5.

    Args:
        figure: The figure that gets the legend.
        handles: Marks of the legend.
        labels: Text beside each mark.
        options: Further options of matplotlib's legend.
    """
    letter_width, mark_width = 5.6, 44  # mean widths in points
    widest_label = letter_width * max(len(label) for label in labels) + mark_width
    figure_width = 72 * figure.get_figwidth()  # an inch has 72 points
    num_fitting = int(figure_width // widest_label)
    num_columns = max(1, min(len(labels), 5, num_fitting))
    figure.legend(handles, labels, loc="outside upper left", ncols=num_columns, **options)


def label_points(figure: Figure, axis: Axes, points: Sequence[tuple[float, float, str]]) -> None:
    """Label each point at one of four positions, the first where the label covers no other label and no point.

    The positions are, in order, above right, below right, above left and below left. If none is free, the label is
    above right.

    Args:
        figure: The figure that contains ``axis``.
        axis: Its axes with the points.
        points: Position and label of each point, in data coordinates.
    """
    figure.draw_without_rendering()  # computes the layout
    units_per_pixel = 72 / figure.dpi  # the unit is a typographic point, 1/72 inch
    positions = []  # in this unit
    for data_x, data_y, _ in points:
        x_pixels, y_pixels = axis.transData.transform((data_x, data_y))
        positions.append((float(x_pixels) * units_per_pixel, float(y_pixels) * units_per_pixel))
    # Left, bottom, right and top of each occupied area; at first those of the marks, which are 8 points wide.
    taken_boxes = [(x - 4, y - 4, x + 4, y + 4) for x, y in positions]
    for (x, y), (data_x, data_y, text) in zip(positions, points, strict=True):
        width, height = 5.6 * len(text), 10  # 5.6 is the mean width of a letter
        above_right, below_right = (8.0, 5.0), (8.0, -13.0)
        above_left, below_left = (-8.0 - width, 5.0), (-8.0 - width, -13.0)
        chosen_offset = above_right
        for offset in (above_right, below_right, above_left, below_left):
            box = _label_box(x, y, offset, width, height)
            if not any(_overlaps(box, taken) for taken in taken_boxes):
                chosen_offset = offset
                break
        taken_boxes.append(_label_box(x, y, chosen_offset, width, height))
        axis.annotate(text, (data_x, data_y), textcoords="offset points", xytext=chosen_offset, fontsize=9)


def _label_box(
    x: float, y: float, offset: tuple[float, float], width: float, height: float
) -> tuple[float, float, float, float]:
    """Return left, bottom, right and top of a label at an offset from a point."""
    right, up = offset
    return x + right, y + up, x + right + width, y + up + height


def _overlaps(box: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Return whether two boxes (left, bottom, right, top) overlap."""
    return box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]
