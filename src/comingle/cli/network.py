"""What the verbs of a federation have in common."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec

from comingle.errors import PluginError


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
    from comingle.terminal import words

    def say(line: str) -> None:
        if not quiet:
            console.print(words(f"{time.strftime('%T')}  {line}"))

    return say
