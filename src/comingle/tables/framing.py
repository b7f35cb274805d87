"""Tables for the terminal, whose title and caption have the width of the terminal, and the same tables as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from rich import table
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text, TextType

from comingle.utils.terminal import printable


class Table(table.Table):
    """Rich's, but that what stands above and below few columns is not broken at their width."""

    title: TextType | None
    caption: TextType | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType | Segment]:
        """Title, table, caption."""
        title, caption = self.title, self.caption
        self.title = self.caption = None
        try:
            body = list(super().__rich_console__(console, options))
        finally:
            self.title, self.caption = title, caption
        yield from _lines(console, title, "table.title")
        yield from body
        yield from _lines(console, caption, "table.caption")


def _lines(console: Console, told: TextType | None, style: str) -> Iterator[RenderableType | Segment]:
    if told:
        yield told if isinstance(told, Text) else console.render_str(told, style=style)


def html_of(parts: Iterable[table.Table | Text]) -> str:
    """Return tables and notes as one HTML fragment for a notebook, without scripts, all text escaped."""
    return (
        "<div>"
        + "".join(_html_table(one) if isinstance(one, table.Table) else _html_note(one) for one in parts)
        + "</div>"
    )


def _html_table(shown: table.Table) -> str:
    head = "".join(_html_cell("th", one, one.header) for one in shown.columns)
    rows = zip(*(one.cells for one in shown.columns), strict=False)
    body = "".join(
        "<tr>" + "".join(_html_cell("td", one, cell) for one, cell in zip(shown.columns, row, strict=True)) + "</tr>"
        for row in rows
    )
    foot = "".join(_html_cell("td", one, one.footer) for one in shown.columns)
    foot = f"<tfoot><tr>{foot}</tr></tfoot>" if shown.show_footer else ""
    return (
        f"{_html_note(shown.title)}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody>{foot}</table>"
        f"{_html_note(shown.caption)}"
    )


def _html_cell(tag: str, column: table.Column, cell: RenderableType) -> str:
    align = "right" if column.justify == "right" else "left"
    return f'<{tag} style="text-align: {align}">{_html_text(cell)}</{tag}>'


def _html_note(told: TextType | None) -> str:
    return f"<p>{_html_text(told)}</p>" if told else ""


def _html_text(cell: RenderableType) -> str:
    """Return the plain text of a cell with its line breaks; control characters become escapes."""
    return escape(printable(cell.plain if isinstance(cell, Text) else cell, keep="\n")).replace("\n", "<br>")
