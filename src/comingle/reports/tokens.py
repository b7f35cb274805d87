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

from comingle.reports.canvas import draw, legend_above
from comingle.reports.colours import expert_class, expert_colour

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


def tokens_figure(view: TokenView, layer: int) -> Figure:
    """Texts (rows) x users' models (columns), every token on the colour of its top expert in ``layer``."""
    lines = max(_place(text.tokens)[-1][1] + 1 if text.tokens else 1 for text in view.texts)

    def paint(figure: Figure, axes: list[Axes]) -> None:
        for number, axis in enumerate(axes):
            row, column = divmod(number, len(view.users))
            text, user = view.texts[row], view.users[column]
            _cell(axis, text, view.experts[column], view.gates[row][column][layer], lines)
            remark = " (in distribution)" if text.owner == user and view.in_distribution else ""
            axis.set_title(f"text: {text.name}, model: {user}{remark}", fontsize=7)
        names = max(view.experts, key=len)
        patches = [_patch(name) for name in names]
        legend_above(figure, patches, names, title=f"{view.label}, layer {layer}")
        _fit(figure, axes)

    return draw(len(view.texts), len(view.users), (3.6, max(1.1, 0.35 + 0.115 * lines)), paint)


def _patch(name: str) -> Patch:
    return Patch(color=expert_colour(name).light)


def _fit(figure: Figure, axes: Sequence[Axes]) -> None:
    """Make the letters as wide as the place that :func:`_place` gave them."""
    figure.draw_without_rendering()
    points = axes[0].get_window_extent().width / figure.dpi * 72
    for axis in axes:
        for text in axis.texts:
            text.set_fontsize(points / COLUMNS / ADVANCE)


def _cell(axis: Axes, text: Text, experts: Sequence[str], gates: np.ndarray, lines: int) -> None:
    axis.set_axis_off()
    axis.set_xlim(0, COLUMNS)
    axis.set_ylim(lines, 0)
    for token, (column, line), top in zip(text.tokens, _place(text.tokens), gates.argmax(-1), strict=True):
        shown = visible(token)
        if not shown:
            continue
        colour = expert_colour(experts[int(top)]).light
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
