"""The verbs that installed packages add: named in every listing, imported when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import getdoc
from pathlib import Path
from typing import Any, ClassVar

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup
from typer.utils import get_params_from_function

from comingle.training.backends.launched import find_place
from comingle.utils import registry
from comingle.utils.errors import PluginError, RecipeError

GROUP = "comingle.verbs"

IN_SEVERAL = "run"
"""The one verb that a launcher may start in several processes."""


class Verbs(TyperGroup):
    """The core's ``own`` verbs by name, and behind them those of plug-ins; each is made when it is called."""

    own: ClassVar[Mapping[str, Callable[..., None]]] = {}

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._lists = False
        for name in (*self.own, *registry.load(GROUP)):
            self.commands.setdefault(name, TyperCommand(name))  # its name alone, for suggestions

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """A line for each verb, for which none of the core's is made."""
        self._lists = True
        super().format_help(ctx, formatter)
        self._lists = False

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb that is called.

        Raises:
            RecipeError: a launcher has started several processes of a verb that runs in one.
        """
        try:
            found = super().resolve_command(ctx, args)
        except Exception as error:
            if "Did you mean" in getattr(error, "message", ""):  # typer's hint, which click from 8.4 on gives itself
                vars(error).update(possibilities=None)
            raise
        if found[0] != IN_SEVERAL and find_place() is not None:
            raise RecipeError(f"{found[0]}: runs in one process; several are for `comingle {IN_SEVERAL}`")
        return found

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A verb; one that cannot be used says so where it is listed, and again, as a mistake, when it is called."""
        plugin, own = registry.load(GROUP).get(cmd_name), self.own.get(cmd_name)
        if plugin is None:
            if own is not None:
                return TyperCommand(cmd_name, help=getdoc(own)) if self._lists else _command(cmd_name, own)
            return None
        try:
            if own is not None:
                raise registry.taken(plugin)
            verb = plugin.load()
            if not callable(verb):
                raise PluginError(f"{GROUP}: {cmd_name!r} is {type(verb).__name__}; allowed: a function for typer")
        except PluginError as error:
            return _broken(cmd_name, error)
        return _command(cmd_name, verb)


def _command(name: str, verb: Callable[..., Any], **settings: Any) -> Any:
    alone = typer.Typer(add_completion=False)
    alone.command(name, **{"help": _flowing(getdoc(verb) or ""), **settings})(verb)
    made = typer.main.get_command(alone)
    if not any("--plugin" in parameter.opts for parameter in made.params):
        made.params.append(_plugin_option())
    told = get_params_from_function(verb)
    for parameter in made.params:  # typer before 0.21 on click 8.5 forgets what an argument means
        if isinstance(parameter, TyperArgument) and not parameter.help:
            parameter.help = told[parameter.name].default.help
    return made


def _plugin_option() -> Any:
    """Return the option that loads a user's own methods before a command reads its other options."""

    def load(context: typer.Context, paths: list[Path] | None) -> None:
        if not paths or context.resilient_parsing:
            return
        from comingle.methods.user_files import load_file

        for path in paths:
            load_file(path)

    told = "Load methods of your own from a Python file; may be repeated."
    option = typer.Option(
        None,
        "--plugin",
        metavar="<file>",
        help=told,
        expose_value=False,
        is_eager=True,
        callback=load,
        show_default=False,
    )

    def command(plugin: list[Path] | None = option) -> None: ...

    alone = typer.Typer(add_completion=False)
    alone.command()(command)  # typer makes the option, whose class takes other arguments from version to version
    (made,) = (p for p in typer.main.get_command(alone).params if "--plugin" in p.opts)
    return made


def _flowing(text: str) -> str:
    """Text whose paragraphs are a line each, for a terminal of any width; lists stay as they are."""
    parts = text.split("\n\n")
    return "\n\n".join(part if "\n " in part or "\n-" in part else part.replace("\n", " ") for part in parts)


def _broken(name: str, error: PluginError) -> Any:
    def refuse() -> None:
        raise error

    anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    return _command(name, refuse, help=str(error), add_help_option=False, context_settings=anything)
