"""What is printed: users' names, paths and texts as they are, never as markup, never as commands to the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

# C0 and C1 controls, line and paragraph separators, what reorders a line from right to left, halves of characters
_COMMANDS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object, keep: str = "") -> str:
    """A text on one line, with an escape in place of every character that a terminal would obey, but those to keep.

    >>> printable("red \\x1b[31m")
    'red \\\\x1b[31m'
    """
    return _COMMANDS.sub(
        lambda match: match[0] if match[0] in keep else match[0].encode("unicode_escape").decode("ascii"), str(text)
    )


def words(text: object, style: str = "") -> Text:
    """A text on one line for rich: what looks like markup is none."""
    return Text(printable(text), style=style)


class Terminal(Console):
    """A console that obeys nothing in what it prints: no markup, no names of emoji, no control characters."""

    def __init__(self, **options: Any):
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """A plain string, with escapes before anything is measured."""
        return super().render_str(printable(text, keep="\n\t"), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Segments of what is printed; rich's own control codes stay."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text, keep="\n\t"), style, control)


errors = Terminal(stderr=True)
"""For warnings and progress: a bar moves aside only for what is printed on its own console."""
