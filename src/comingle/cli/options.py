"""Options, console and checks that commands share."""

from __future__ import annotations

import json
import math
import os
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from comingle.utils.errors import PluginError, RecipeError, RunError
from comingle.utils.terminal import Terminal, errors, literal_text

if TYPE_CHECKING:
    from rich.table import Table

    from comingle.config import Recipe


warnings.filterwarnings(
    "ignore", ".*will be removed in Click 9", DeprecationWarning
)  # from typer with the newest click


# Without a terminal lines are not wrapped at 80 columns.
console = Terminal(width=None if Terminal().is_terminal else 160)


@contextmanager
def status(message: str) -> Iterator[None]:
    """Show a message with a spinner on standard error while the block runs, if standard error is a terminal."""
    if not errors.is_terminal:  # ``errors`` is the console of standard error
        yield
        return
    with errors.status(message):
        yield


def require_flower(*, complete: bool = True) -> None:
    """Check that Flower is installed.

    Args:
        complete: Check also the packages that Flower imports in a server, but not in a client. An installation for
            small devices (``docs/install.md``) lacks them.

    Raises:
        PluginError: Flower or one of these packages is missing. The message says how to install it.
    """
    if find_spec("flwr") is None:
        raise PluginError("flwr is not installed; install it with `pip install 'comingle[flower]'`")
    if not complete:
        return
    for name in ("alembic", "sqlalchemy", "uvicorn"):
        if find_spec(name) is None:
            raise PluginError(
                f"{name} is not installed, which flwr needs for all but `comingle client`, for which "
                "`pip install 'comingle[device]'` suffices; install it with `pip install 'comingle[flower]'`"
            )


LOG_VARIABLE = "COMINGLE_LOG"
"""Environment variable: with the value "json" services write each line as a JSON object."""

_hidden_names: list[str] = []
"""Names of users, in the order of their numbers in JSON lines."""


def logs_json() -> bool:
    """Return whether lines are written as JSON.

    Raises:
        RecipeError: The environment variable has another value.
    """
    value = os.environ.get(LOG_VARIABLE, "")
    if value not in ("", "json"):
        raise RecipeError(f"{LOG_VARIABLE}: got {shorten(value)!r}; allowed: json, or unset it")
    return value == "json"


def hide_names(names: Iterable[str]) -> None:
    """Write these users' names as numbers in JSON lines, which are often collected where others read them."""
    _hidden_names[:] = names


def json_line(level: str, message: str, **fields: object) -> str:
    """Return a JSON object with the time in UTC, the level, the message and further fields; it names no user."""
    from datetime import UTC, datetime

    if _hidden_names:
        numbers = {name: f"user {number}" for number, name in enumerate(_hidden_names, start=1)}
        longest_first = sorted(numbers, key=len, reverse=True)
        pattern = "|".join(re.escape(name) for name in longest_first)
        message = re.sub(rf"(?<!\w)(?:{pattern})(?!\w)", lambda match: numbers[match[0]], message)
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": now, "level": level, "message": message, **fields}, default=str)


def line_printer(*, quiet: bool) -> Callable[[str], None]:
    """Return a function that prints a line behind the time of day, or as JSON; if ``quiet``, it prints nothing."""
    as_json = logs_json()

    def print_line(line: str) -> None:
        if quiet:
            return
        if as_json:
            print(json_line("info", line), flush=True)
        else:
            console.print(literal_text(f"{time.strftime('%T')}  {line}"))

    return print_line


@contextmanager
def show_participants(folder: Path, *, all_users: bool, quiet: bool) -> Iterator[None]:
    """Show a live table of participants below printed lines while the block runs, in terminals only.

    Args:
        folder: The run folder, whose status file the table shows.
        all_users: Show all participants, not only the first 24.
        quiet: Show no table.
    """
    from rich.live import Live

    from comingle.reports.tables import render_participants

    if quiet or not console.is_terminal or logs_json():
        yield
        return

    def current_table() -> Table:
        return render_participants(folder, all_users=all_users)

    with Live(console=console, get_renderable=current_table, refresh_per_second=2, transient=True):
        yield


_MAX_CHARACTERS = 80
"""Length to which :func:`shorten` shortens a text."""

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe file, or a run folder.")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, for example training.rounds=3.")
]
Seed = Annotated[int | None, typer.Option("--seed", help="Use this random seed (default: the recipe's).")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")]
AllUsers = Annotated[bool, typer.Option("--all", help="Show all users, however many there are.")]


def parse_path(out: str | Path) -> Path:
    """Convert the text given with ``--out`` or a similar option to a path; typer calls it as the option's parser.

    It refuses an empty text, as of ``--out "$FOLDER"`` with an unset variable: ``Path("")`` is the current folder.
    """
    if not str(out).strip():
        raise typer.BadParameter("is empty; give a path, or omit the option")
    return Path(out)


def check_out(out: Path | None) -> Path | None:
    """Check that the file system allows a folder with the name given by ``--out``; return the path unchanged.

    Typer calls it as the option's callback.

    Raises:
        RunError: The name is not allowed, for example because it is too long.
    """
    if out is not None:
        from comingle.utils.records import check_name

        try:
            check_name(out)
        except RunError as error:
            raise RunError(f"--out {error}") from None
    return out


def finite(context: object, option: Any, value: float | None) -> float | None:
    """Check that the value of a number option is finite, and return it; the option's callback.

    Bounds of options do not refuse NaN, which is neither below nor above them.

    Args:
        context: Not used; click passes it.
        option: The option, which the message names.
        value: The option's value; None if it is not given.

    Raises:
        RecipeError: The value is infinite or NaN.
    """
    if value is not None and not math.isfinite(value):
        raise RecipeError(f"{option.opts[0]}: got {value}; give a finite number")
    return value


def out_option(help_text: str) -> object:
    """Return the option ``--out`` with the given help text."""
    return typer.Option("--out", metavar="<path>", help=help_text, parser=parse_path, callback=check_out)


Out = Annotated[Path | None, out_option("Write to this folder (default: a folder in runs/).")]


def _check_exclusive(context: Any, is_given: bool) -> bool:
    """Refuse ``--resume`` together with ``--force``; return the option's value unchanged.

    It is the callback of both options, which click parses one after the other.

    Args:
        context: The context of click; ``params`` has the options that were parsed before.
        is_given: Whether the option for which it is called is given.
    """
    other_is_given = context.params.get("resume") or context.params.get("force")
    if is_given and other_is_given:
        raise RecipeError("--resume and --force: got both; --resume continues a run, --force replaces it")
    return is_given


Resume = Annotated[bool, typer.Option("--resume", help="Resume an interrupted run.", callback=_check_exclusive)]
Force = Annotated[
    bool, typer.Option("--force", help="Replace earlier results in the folder.", callback=_check_exclusive)
]


def parse_sets(sets: list[str] | None) -> dict[str, object]:
    """Parse ``--set KEY=VALUE`` options: ``["training.rounds=3"]`` becomes ``{"training.rounds": 3}``; values are YAML.

    Args:
        sets: The texts KEY=VALUE; None if the option is not given.

    Raises:
        RecipeError: An option is not of the form KEY=VALUE, a key occurs twice, or a value is not YAML.
    """
    from comingle.config.files import read_text

    value_by_key: dict[str, object] = {}
    for text in sets or []:
        option = f"--set {shorten(text)!r}"
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key:
            raise RecipeError(f"{option}: give KEY=VALUE, for example training.rounds=3")
        if key in value_by_key:
            raise RecipeError(f"{option}: duplicate key {shorten(key)!r}; give each key once")
        value_by_key[key] = read_text(value, option)
    return value_by_key


def method_settings(sets: list[str] | None, methods: Sequence[str]) -> dict[str, object]:
    """Return the settings given as ``--set method.KEY=VALUE``: ``{"proximal": 0.1}`` for "method.proximal=0.1".

    Args:
        sets: Values of ``--set``, which may also change other settings; None if the option is not given.
        methods: Names of the methods of the command.

    Raises:
        RecipeError: None of the methods has such a setting.
    """
    from comingle.methods import settings_of
    from comingle.methods.settings import setting_hint

    settings = {}
    for dotted_key, value in parse_sets(sets).items():
        if dotted_key.startswith("method."):
            key = dotted_key.removeprefix("method.").removeprefix("settings.")  # both spellings are allowed
            replaces_method = key in ("name", "settings")
            if not replaces_method:
                settings[key] = value
    known_keys = list(dict.fromkeys(key for name in methods for key in settings_of(name)))
    for key in settings:
        if key not in known_keys:
            allowed = ", ".join(known_keys) or "no settings"
            message = f"--set method.{key}: no setting of {', '.join(methods)}; allowed: {allowed}"
            hint = setting_hint(key, known_keys)
            raise RecipeError(f"{message}.{hint}" if hint else message)
    return settings


def shorten(text: str) -> str:
    """Shorten a text to its first 80 characters and "...", for messages."""
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."


def read_recipe(path: Path, sets: list[str] | None, seed: int | None = None) -> Recipe:
    """Read a recipe and apply the changes that ``--set`` and ``--seed`` make to it.

    Args:
        path: A recipe file or a run folder.
        sets: Values of ``--set``.
        seed: Value of ``--seed``.

    Raises:
        RecipeError: The recipe or a change is wrong.
    """
    from comingle.config import load_recipe

    overrides = parse_sets(sets)
    recipe = load_recipe(path)
    keeps_method = "method" not in overrides and "method.name" not in overrides
    if path.is_dir() and keeps_method:
        from comingle.methods.user_files import check_origin

        check_origin(path, recipe.method.name)  # a user's own method must be loaded with --plugin
    if overrides:
        recipe = recipe.with_changes(overrides, where="--set")
    if seed is not None:
        recipe = recipe.with_changes({"seed": seed}, where="--seed")
    return recipe


def default_folder(path: Path, method: str, seed: int) -> Path:
    """Return the run folder of a recipe, such as ``runs/demo-fedavg-seed0``, or the path itself if it is a run folder.

    Args:
        path: A recipe file or a run folder.
        method: Name of the method.
        seed: The random seed of the run.
    """
    if path.is_dir():
        return path
    return Path("runs") / f"{path.stem}-{method}-seed{seed}"


ContinueFrom = Annotated[
    Path | None,
    typer.Option("--continue-from", metavar="RUN", help="Start from the users' models at the end of another run."),
]


def with_continuation(sets: list[str] | None, continue_from: Path | None) -> list[str] | None:
    """Return the values of ``--set``, and after them one for ``--continue-from`` if it is given."""
    if continue_from is None:
        return sets
    return [*(sets or []), f"continue_from.run={json.dumps(str(continue_from.resolve()))}"]
