"""The app that a SuperLink runs: lets a coordinator talk to users through Flower's grid.

An ordinary Flower ``ServerApp``. Its run config has ``federation``, the path of the coordinator's file, and ``out``,
the run folder. There it also says how it fares, for whoever has started it: see :mod:`comingle.federation.flower.fate`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from comingle.federation.flower.channel import Channel, GridChannel
from comingle.federation.flower.fate import Fate
from comingle.utils.errors import ComingleError, RecipeError
from comingle.utils.records import expand_home

COORDINATE = "comingle.federation.server_app", "coordinate_app"
"""What runs the rounds; by name, since it stands above all transports, and Flower wants the app to lie here."""

Coordinate = Callable[[Channel, Mapping[str, Any], Path, Callable[[str], None]], None]
"""Gets the channel, the run config, the run folder, and what says one line to whoever watches."""


def make_server_app(coordinate: Coordinate) -> ServerApp:
    """The app around whatever runs the rounds; a mistake of the person's (ComingleError) is said in one line."""
    made = ServerApp()

    @made.main()
    def main(grid: Grid, context: Context) -> None:
        """Everything, from the first hello to the end of the run."""
        folder = _folder(context.run_config)
        fate = Fate.begin(folder)
        try:
            channel = GridChannel(grid, fate.say, allowed=_names(context.run_config))
            coordinate(channel, context.run_config, folder, fate.say)
        except ComingleError as error:
            fate.fail(str(error))
            raise
        except Exception as error:
            fate.break_off(f"{type(error).__name__}: {error}")
            raise
        fate.finish()

    return made


def _folder(run_config: Mapping[str, Any]) -> Path:
    out = str(run_config.get("out") or "").strip()
    if not out:
        raise RecipeError("run config: no 'out'; give --run-config 'out=\"FOLDER\"'")
    return expand_home(out)


def _names(run_config: Mapping[str, Any]) -> list[str]:
    """Who may take part: names as :func:`spell` writes them; nothing for everybody."""
    return [unquote(name) for name in str(run_config.get("users") or "").split()]


def spell(names: Sequence[str]) -> str:
    """Names as a run config can have them, with blanks between them."""
    return " ".join(quote(name, safe="") for name in names)


def _coordinate(channel: Channel, run_config: Mapping[str, Any], folder: Path, say: Callable[[str], None]) -> None:
    module, name = COORDINATE
    getattr(importlib.import_module(module), name)(channel, run_config, folder, say)


app = make_server_app(_coordinate)
