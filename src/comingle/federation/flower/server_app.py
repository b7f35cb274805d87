"""The Flower ``ServerApp`` that runs a federation's rounds and sends its messages through Flower's grid.

Its run config has ``federation``, the path of the server's file, and ``out``, the run folder, where it also writes its
status (:mod:`comingle.federation.flower.processes`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from comingle.config.files import read_yaml
from comingle.federation.flower.channel import Channel, GridChannel
from comingle.federation.flower.processes import StatusWriter
from comingle.runs.folders import certificates_of
from comingle.utils.errors import ComingleError, RecipeError
from comingle.utils.records import expand_home

RUN_FUNCTION = "comingle.federation.server_app", "run_federation_app"
"""Function that runs the rounds. It is imported by name, because its module imports this package."""

RunFunction = Callable[[Channel, Mapping[str, Any], Path, Callable[[str], None]], None]
"""Runs the rounds; gets the channel, the run config, the run folder, and a function that shows a line."""


def make_server_app(run: RunFunction) -> ServerApp:
    """Return the Flower app that calls ``run`` for the rounds and writes its status to the run folder.

    After a ComingleError the status says that the operator has to fix something; after any other exception a restart
    may succeed.

    Args:
        run: Runs the rounds.
    """
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        """Run the federation, and record how it ends."""
        folder = _folder(context.run_config)
        status = StatusWriter.begin(folder)
        try:
            config = context.run_config
            read_allowed = partial(_read_names, config, folder) if config.get("continuous") else tuple
            channel = GridChannel(grid, status.say, allowed=_names(config), read_allowed=read_allowed)
            run(channel, config, folder, status.say)
        except ComingleError as error:
            status.fail(str(error))
            raise
        except Exception as error:
            status.fail_unexpectedly(f"{type(error).__name__}: {error}")
            raise
        status.finish()

    return server_app


def _folder(run_config: Mapping[str, object]) -> Path:
    """Return the run folder, the value "out" of a Flower run's config.

    Raises:
        RecipeError: The config has no such value.
    """
    out = str(run_config.get("out") or "").strip()
    if not out:
        raise RecipeError("run config: no 'out'; give --run-config 'out=\"FOLDER\"'")
    return expand_home(out)


def _names(run_config: Mapping[str, Any]) -> list[str]:
    """Return the names of users that :func:`encode_names` has encoded; an empty list if any user may join."""
    return [unquote(name) for name in str(run_config.get("users") or "").split()]


def _read_names(run_config: Mapping[str, object], folder: Path) -> Sequence[str]:
    """Return the names of the users in the server's file as it is now, except users who have left.

    Args:
        run_config: The run config, with the path of the file.
        folder: Folder of the server.

    Returns:
        The names; none if the file cannot be read.
    """
    try:
        names = read_yaml(expand_home(str(run_config["federation"])))["participants"]
    except (ComingleError, LookupError, TypeError):
        return ()
    left = {certificate["user"] for certificate in certificates_of(folder)}
    return [name for name in names if name not in left] if isinstance(names, list) else ()


def encode_names(names: Sequence[str]) -> str:
    """Encode names for a run config, separated by spaces."""
    return " ".join(quote(name, safe="") for name in names)


def _run_federation(channel: Channel, run_config: Mapping[str, Any], folder: Path, say: Callable[[str], None]) -> None:
    """Call :data:`RUN_FUNCTION`, which runs the rounds, with the arguments of :data:`RunFunction`.

    It is imported only here, because its module imports this package.
    """
    module_name, function_name = RUN_FUNCTION
    run = getattr(importlib.import_module(module_name), function_name)
    run(channel, run_config, folder, say)


app = make_server_app(_run_federation)
