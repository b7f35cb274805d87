"""Where the command line prints to, and what it says while something short is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from comingle.utils.terminal import Terminal, errors

# No terminal: nothing is wrapped.
console = Terminal(width=None if Terminal().is_terminal else 160)


@contextmanager
def status(message: str) -> Iterator[None]:
    """A line that says what is being waited for, while it lasts; in a terminal only."""
    if not errors.is_terminal:
        yield
        return
    with errors.status(message):
        yield
