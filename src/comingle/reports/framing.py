"""Tables for the terminal whose title and caption have the width of the terminal, not that of their columns."""

from __future__ import annotations

from collections.abc import Iterator

from rich import table
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text, TextType


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
