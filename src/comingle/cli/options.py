"""Options, console and warnings that commands share."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from comingle.utils.errors import PluginError, RecipeError, RunError
from comingle.utils.terminal import Terminal, errors, words

if TYPE_CHECKING:
    from rich.table import Table

    from comingle.config import Recipe


warnings.filterwarnings("ignore", ".*will be removed in Click 9", DeprecationWarning)  # typer on the newest click


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


def require_flower() -> None:
    """See that Flower is installed.

    Raises:
        PluginError: it is not; says how to install it.
    """
    if find_spec("flwr") is None:
        raise PluginError("flwr is not installed; `pip install 'comingle[flower]'` installs what the network needs")


def speaker(*, quiet: bool) -> Callable[[str], None]:
    """Prints a line with the time of day, unless nothing is to be said."""

    def say(line: str) -> None:
        if not quiet:
            console.print(words(f"{time.strftime('%T')}  {line}"))

    return say


@contextmanager
def table_of_participants(folder: Path, *, everybody: bool, quiet: bool) -> Iterator[None]:
    """In a terminal a table that changes, below the lines that are said; elsewhere those alone."""
    from rich.live import Live

    from comingle.reports.tables import render_participants

    if quiet or not console.is_terminal:
        yield
        return

    def now() -> Table:
        return render_participants(folder, everybody=everybody)

    with Live(console=console, get_renderable=now, refresh_per_second=2, transient=True):
        yield


_SHOWN = 80

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe file, or a run folder.")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a key, as training.rounds=3.")
]
Seed = Annotated[int | None, typer.Option("--seed", help="Random seed (default: the recipe's).")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing of progress.")]
Everybody = Annotated[bool, typer.Option("--all", help="Show every user, however many there are.")]


def named(out: str | Path) -> Path:
    """What ``--out`` names; an empty name, as of a shell's variable that is not set, is not the current folder."""
    if not str(out).strip():
        raise typer.BadParameter("is empty; give it a name, or leave --out out")
    return Path(out)


def possible(out: Path | None) -> Path | None:
    """Whether a folder can have the name given by ``--out``.

    Raises:
        RunError: it cannot.
    """
    if out is not None:
        from comingle.utils.records import check_name

        try:
            check_name(out)
        except RunError as error:
            raise RunError(f"--out {error}") from None
    return out


def finite(context: object, option: Any, value: float | None) -> float | None:
    """What an option that wants a number is given, as a callback of click's: comparisons with bounds let NaN pass.

    Raises:
        RecipeError: it is infinite, or no number.
    """
    if value is not None and not math.isfinite(value):
        raise RecipeError(f"{option.opts[0]}: got {value}; give a finite number")
    return value


def out_option(told: str) -> object:
    """``--out`` of a verb, with what its help says."""
    return typer.Option("--out", metavar="<path>", help=told, parser=named, callback=possible)


Out = Annotated[Path | None, out_option("Folder to write to (default: below runs/).")]


def _not_both(context: Any, given: bool) -> bool:
    """Called for each of the two; the first that was read is among the parameters by then."""
    if given and (context.params.get("resume") or context.params.get("force")):
        raise RecipeError("--resume and --force: got both; --resume keeps what is there, --force replaces it")
    return given


Resume = Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.", callback=_not_both)]
Force = Annotated[bool, typer.Option("--force", help="Replace what is in the folder.", callback=_not_both)]


def changes(sets: list[str] | None) -> dict[str, object]:
    """``--set`` options as a mapping; values are read as YAML.

    Raises:
        RecipeError: not of the form KEY=VALUE, a key twice, or a value that is not YAML.
    """
    from comingle.config.files import read_text

    by_key: dict[str, Any] = {}
    for item in sets or []:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise RecipeError(f"--set {shorten(item)!r}: give KEY=VALUE, as training.rounds=3")
        if key.strip() in by_key:
            raise RecipeError(f"--set {shorten(item)!r}: {shorten(key.strip())!r} a second time; give each key once")
        by_key[key.strip()] = read_text(value, f"--set {shorten(item)!r}")
    return by_key


def method_settings(sets: list[str] | None, methods: Sequence[str]) -> dict[str, object]:
    """Settings given as ``--set method.KEY=VALUE``, which are for every one of the methods that has them.

    Raises:
        RecipeError: none of the methods has such a setting.
    """
    from comingle.methods import settings_of
    from comingle.methods.settings import setting_hint

    keys = {key: value for key, value in changes(sets).items() if key.startswith("method.")}
    keys = {key.removeprefix("method.").removeprefix("settings."): value for key, value in keys.items()}
    given = {key: value for key, value in keys.items() if key not in ("name", "settings")}
    known = {key: None for name in methods for key in settings_of(name)}
    for key in given:
        if key not in known:
            allowed = ", ".join(known) or "no settings"
            hint = f".{found}" if (found := setting_hint(key, known)) else ""
            raise RecipeError(f"--set method.{key}: none of {', '.join(methods)} has it; allowed: {allowed}{hint}")
    return given


def shorten(text: str) -> str:
    """The text, or its beginning where it would fill a screen."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def read_recipe(path: Path, sets: list[str] | None, seed: int | None = None) -> Recipe:
    """A recipe with the options' changes.

    Raises:
        RecipeError: the recipe or a change is wrong.
    """
    from comingle.config import load_recipe

    wanted, recipe = changes(sets), load_recipe(path)
    if path.is_dir() and "method" not in wanted and "method.name" not in wanted:
        from comingle.methods.user_files import check_origin

        check_origin(path, recipe.method.name)
    recipe = recipe.with_changes(wanted, where="--set") if wanted else recipe
    return recipe if seed is None else recipe.with_changes({"seed": seed}, where="--seed")


def default_folder(path: Path, method: str, seed: int) -> Path:
    """Where a run of a recipe goes: ``runs/RECIPE-METHOD-seedN``; a run folder is its own place."""
    return path if path.is_dir() else Path("runs") / f"{path.stem}-{method}-seed{seed}"
