"""The token view: which expert each token of a text went to, in each layer (CoMiGS, Figures 3 and 14 to 19)."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from comingle.reports.canvas import draw, expert_class, expert_colour, legend_above

COLUMNS = 56
"""Characters of a line in the drawn token view."""
ADVANCE = 0.602
"""Width of a letter of DejaVu Sans Mono, in font sizes."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text in tokens; ``owner`` is the user whose test set it is from, or None."""

    name: str
    owner: str | None
    tokens: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TokenView:
    """Texts x users under one run: ``gates[text][user]`` is ``(layers, tokens, experts of the user)``.

    ``experts[user]`` names the experts, ``in_distribution`` says whether a user's test text is like what it trains on.
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
    """Gates in thousandths as little-endian 16-bit numbers in base64."""
    return base64.b64encode(np.rint(gates.astype(np.float64) * 1000).astype("<u2").tobytes()).decode("ascii")


def as_data(views: Sequence[TokenView]) -> list[dict[str, Any]]:
    """The views for the page's script."""
    return [
        {
            "label": view.label,
            "layers": view.layers,
            "inDistribution": view.in_distribution,
            "users": [
                {"name": user, "experts": list(experts), "classes": [expert_class(name) for name in experts]}
                for user, experts in zip(view.users, view.experts, strict=True)
            ],
            "texts": [{"name": t.name, "owner": t.owner, "tokens": list(t.tokens)} for t in view.texts],
            "gates": [[pack_gates(gates) for gates in row] for row in view.gates],
        }
        for view in views
    ]


# -------------------------------------------------------------------- drawn


@dataclass(frozen=True, kw_only=True)
class _Cell:
    """A text in one user's model, seen at one layer: ``gates`` are ``(tokens, experts)``."""

    title: str
    tokens: Sequence[str]
    experts: Sequence[str]
    gates: np.ndarray


def tokens_figure(view: TokenView, layer: int) -> Figure:
    """Texts (rows) x users' models (columns), every token on the colour of its top expert in ``layer``."""
    rows = [
        [
            _cell_of(view, row, column, layer, f"text: {text.name}, model: {user}{_remark(view, text, user)}")
            for column, user in enumerate(view.users)
        ]
        for row, text in enumerate(view.texts)
    ]
    return _grid(view, rows, f"{view.label}, layer {layer}")


def own_texts_figure(view: TokenView, layers: Sequence[int]) -> Figure:
    """Layers (rows) x users (columns), in each cell the user's own text in its own model (CoMiGS, Figure 3)."""
    owners = [text.owner for text in view.texts]
    own = [(column, owners.index(user), user) for column, user in enumerate(view.users) if user in owners]
    rows = [[_cell_of(view, row, column, at, f"{user}, layer {at}") for column, row, user in own] for at in layers]
    return _grid(view, rows, view.label)


def _remark(view: TokenView, text: Text, user: str) -> str:
    return " (in distribution)" if text.owner == user and view.in_distribution else ""


def _cell_of(view: TokenView, row: int, column: int, layer: int, title: str) -> _Cell:
    gates = view.gates[row][column][layer]
    return _Cell(title=title, tokens=view.texts[row].tokens, experts=view.experts[column], gates=gates)


def _grid(view: TokenView, rows: Sequence[Sequence[_Cell]], title: str) -> Figure:
    """Cells of as many lines as the longest text has, below the names of the experts."""
    cells = [cell for row in rows for cell in row]
    lines = max(_place(cell.tokens)[-1][1] + 1 if cell.tokens else 1 for cell in cells)

    def paint(figure: Figure, axes: list[Axes]) -> None:
        for axis, cell in zip(axes, cells, strict=True):
            _paint(axis, cell, lines)
            axis.set_title(cell.title, fontsize=7)
        names = max(view.experts, key=len)
        patches = [_patch(name) for name in names]
        legend_above(figure, patches, names, title=title)
        _fit(figure, axes)

    return draw(len(rows), len(rows[0]), (3.6, max(1.1, 0.35 + 0.115 * lines)), paint)


def _patch(name: str) -> Patch:
    return Patch(color=expert_colour(name).light)


def _fit(figure: Figure, axes: Sequence[Axes]) -> None:
    """Make the letters as wide as the place that :func:`_place` gave them."""
    figure.draw_without_rendering()
    points = axes[0].get_window_extent().width / figure.dpi * 72
    for axis in axes:
        for text in axis.texts:
            text.set_fontsize(points / COLUMNS / ADVANCE)


def _paint(axis: Axes, cell: _Cell, lines: int) -> None:
    axis.set_axis_off()
    axis.set_xlim(0, COLUMNS)
    axis.set_ylim(lines, 0)
    for token, (column, line), top in zip(cell.tokens, _place(cell.tokens), cell.gates.argmax(-1), strict=True):
        shown = visible(token)
        if not shown:
            continue
        colour = expert_colour(cell.experts[int(top)]).light
        axis.barh(line + 0.5, len(shown), 0.95, left=column, color=colour, alpha=0.75, linewidth=0)
        axis.text(column, line + 0.78, shown, family="monospace", clip_on=True)


def visible(token: str) -> str:
    """A token on one line: a line break is a sign."""
    return "".join("⏎" if c == "\n" else c if c.isprintable() else "·" for c in token)


def _place(tokens: Sequence[str]) -> list[tuple[int, int]]:
    """Column and line of every token."""
    places, column, line = [], 0, 0
    for token in tokens:
        width = len(visible(token))
        if column and column + width > COLUMNS:
            column, line = 0, line + 1
        places.append((column, line))
        column += width
    return places
