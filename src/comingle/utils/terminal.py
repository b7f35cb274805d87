"""Safe terminal output: users' names, paths and texts are never interpreted as markup or control sequences."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

# C0 and C1 controls, line and paragraph separators, bidirectional controls, surrogates
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object, keep: str = "") -> str:
    """Return a text with control characters replaced by escapes, except those in ``keep``.

    >>> printable("red \\x1b[31m")
    'red \\\\x1b[31m'
    """

    def escape(match: re.Match[str]) -> str:
        """Return the escape of a control character, unless it is kept."""
        character = match[0]
        if character in keep:
            return character
        return character.encode("unicode_escape").decode("ascii")

    return _CONTROL_CHARACTERS.sub(escape, str(text))


def literal_text(text: object, style: str = "") -> Text:
    """Return a text for rich that is printed literally and on one line: markup and line breaks have no effect."""
    return Text(printable(text), style=style)


class Terminal(Console):
    """Console that prints markup, names of emoji and control characters literally."""

    def __init__(self, **options: Any):
        """Create a console that prints text as it is, without markup and emoji codes."""
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Convert a string to text; control characters are escaped before its width is measured."""
        return super().render_str(printable(text, keep="\n\t"), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield segments with control characters escaped, as printed text might otherwise control the terminal.

        Rich's own control codes, such as those of a progress bar, stay as they are.
        """
        for text, style, control in super().render(renderable, options):
            is_control_code = bool(control)
            shown = text if is_control_code else printable(text, keep="\n\t")
            yield Segment(shown, style, control)


errors = Terminal(stderr=True)
"""Console for warnings and progress; output on the same console does not break a progress bar."""
