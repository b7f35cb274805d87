"""What the verbs of a federation have in common."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from comingle.utils.errors import PluginError

if TYPE_CHECKING:
    from rich.table import Table


def require_flower() -> None:
    """See that Flower is installed.

    Raises:
        PluginError: it is not; says how to install it.
    """
    if find_spec("flwr") is None:
        raise PluginError("flwr is not installed; `pip install 'comingle[flower]'` installs what the network needs")


def speaker(*, quiet: bool) -> Callable[[str], None]:
    """Prints a line with the time of day, unless nothing is to be said."""
    from comingle.cli.progress import console
    from comingle.utils.terminal import words

    def say(line: str) -> None:
        if not quiet:
            console.print(words(f"{time.strftime('%T')}  {line}"))

    return say


@contextmanager
def table_of_participants(folder: Path, *, everybody: bool, quiet: bool) -> Iterator[None]:
    """In a terminal a table that changes, below the lines that are said; elsewhere those alone."""
    from rich.live import Live

    from comingle.cli.progress import console
    from comingle.reports.tables import render_participants

    if quiet or not console.is_terminal:
        yield
        return

    def now() -> Table:
        return render_participants(folder, everybody=everybody)

    with Live(console=console, get_renderable=now, refresh_per_second=2, transient=True):
        yield
