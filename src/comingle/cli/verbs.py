"""The verbs that installed packages add: named in every listing, imported when they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from comingle import plugins
from comingle.errors import PluginError, RecipeError
from comingle.processes.launched import find_place

GROUP = "comingle.verbs"

IN_SEVERAL = "run"
"""The one verb that a launcher may start in several processes."""


class Verbs(TyperGroup):
    """The core's verbs, and behind them those of plug-ins."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._core = set(self.commands)
        for name in plugins.load(GROUP):
            self.commands.setdefault(name, TyperCommand(name))  # its name alone, for listings and suggestions

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb that is called.

        Raises:
            RecipeError: a launcher has started several processes of a verb that runs in one.
        """
        found = super().resolve_command(ctx, args)
        if found[0] != IN_SEVERAL and find_place() is not None:
            raise RecipeError(f"{found[0]}: runs in one process; several are for `comingle {IN_SEVERAL}`")
        return found

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A verb; one that cannot be used says so where it is listed, and again, as a mistake, when it is called."""
        plugin = plugins.load(GROUP).get(cmd_name)
        if plugin is None:
            if cmd_name not in self._core and (hint := plugins.stale_hint(GROUP, cmd_name)):
                raise PluginError(f"no verb {cmd_name!r}.{hint}")
            return super().get_command(ctx, cmd_name)
        try:
            if cmd_name in self._core:
                raise plugins.taken(plugin)
            verb = plugin.load()
            if not callable(verb):
                raise PluginError(f"{GROUP}: {cmd_name!r} is {type(verb).__name__}; allowed: a function for typer")
        except PluginError as error:
            return _broken(cmd_name, error)
        return _command(cmd_name, verb)


def _command(name: str, verb: Callable[..., Any], **settings: Any) -> Any:
    alone = typer.Typer(add_completion=False)
    alone.command(name, **settings)(verb)
    return typer.main.get_command(alone)


def _broken(name: str, error: PluginError) -> Any:
    def refuse() -> None:
        raise error

    anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    return _command(name, refuse, help=str(error), add_help_option=False, context_settings=anything)
