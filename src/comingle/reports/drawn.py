"""Figures as parts of the page: their legends, their pictures and the numbers in them, each with ids of its own."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup, escape
from matplotlib.figure import Figure

from comingle.reports.canvas import Key, Panels, draw_key, svg
from comingle.reports.sheets import Sheet, data_uri

_ROOM = 1.2
"""CSS pixels for each point of a panel's width, before another one is put beside it."""


class Drawn:
    """Turns figures into markup whose colours follow the page's theme."""

    def __init__(self, variables: dict[str, str]):
        self._variables, self._count = variables, 0

    def wide(self, figure: Figure, label: str, name: str, sheet: Sheet) -> Markup:
        """One picture that keeps its shape: where it does not fit, it scrolls in its frame."""
        frame = Markup('<div class="frame" tabindex="0" role="region" aria-label="{}">{}</div>')
        return _plot([frame.format(label, self._svg(figure, label))], name, sheet)

    def panels(self, panels: Panels, label: str, name: str, *, phone: Panels | None = None) -> Markup:
        """Panels side by side as far as there is room; ``phone`` takes their place on a narrow screen."""
        inner = [self._keys(panels.keys), self._grid(panels, label, "" if phone is None else "desk")]
        if phone is not None:
            inner.append(self._grid(phone, label, "phone"))
        return _plot(inner, name, panels.sheet)

    def _grid(self, panels: Panels, label: str, screen: str) -> Markup:
        drawn = [(figure, figure.axes[0].get_title("left")) for figure in panels.parts()]
        pictures = [self._svg(figure, f"{label}: {title}" if title else label) for figure, title in drawn]
        frames = Markup("\n").join(Markup('<div class="frame">{}</div>').format(picture) for picture in pictures)
        room = round(72 * panels.size[0] * _ROOM)
        return Markup('<div class="panels {}" style="--room:{}px">{}</div>').format(screen, room, frames)

    def _keys(self, keys: Sequence[Key]) -> Markup:
        marks = [
            Markup('<span class="key">{}{}</span>').format(self._svg(draw_key(mark), ""), label) for mark, label in keys
        ]
        return Markup('<div class="keys">{}</div>').format(Markup(" ").join(marks)) if marks else Markup("")

    def _svg(self, figure: Figure, label: str) -> Markup:
        self._count += 1
        return Markup(svg(figure, f"f{self._count}", str(escape(label)), self._variables))


def _plot(inner: Sequence[Markup], name: str, sheet: Sheet) -> Markup:
    link = Markup('<a class="csv" download="{}.csv" href="{}">CSV of this figure</a>').format(name, data_uri(sheet))
    return Markup("<figure>{}{}</figure>").format(Markup("\n").join(inner), link)
