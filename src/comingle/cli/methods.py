"""``comingle methods``: what there is, and where each method comes from."""

from __future__ import annotations

from typing import Annotated

import typer


def methods(name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One method, in full.")] = None) -> None:
    """List the methods, or print a method's source, placement, client, server and deviations."""
    import inspect

    from rich.table import Table

    from comingle.cli.options import console
    from comingle.methods import REGISTRY, settings_of
    from comingle.utils.errors import PluginError
    from comingle.utils.terminal import words

    if name is not None:
        settings = settings_of(name)  # refuses an unknown name
        console.print(name, style="bold", highlight=False)
        console.print(inspect.getdoc(REGISTRY[name]) or "", highlight=False)
        shown = ", ".join(f"{key}: {value}" for key, value in settings.items()) or "none"
        console.print(f"Settings: {shown}", highlight=False, soft_wrap=True)
        return
    table = Table("method", "what it does", box=None, pad_edge=False)
    for key in REGISTRY:
        try:
            table.add_row(key, (inspect.getdoc(REGISTRY[key]) or "").partition("\n")[0])
        except PluginError as error:
            table.add_row(key, words(str(error), "red"))
    console.print(table)
