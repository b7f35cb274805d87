"""The command line: one small file per verb, heavy imports inside the verbs; plug-ins add verbs of their own."""

from __future__ import annotations

import io
import logging
import os
import sys
from types import MappingProxyType

from comingle.cli import libraries  # noqa: F401 (before typer is imported)

# isort: split
import typer

from comingle import __version__
from comingle.cli.advise import advise
from comingle.cli.audit import audit
from comingle.cli.chat import chat
from comingle.cli.client import client
from comingle.cli.compare import compare
from comingle.cli.cost import cost
from comingle.cli.data import data
from comingle.cli.demo import demo
from comingle.cli.export import export
from comingle.cli.federate import federate
from comingle.cli.join import join
from comingle.cli.methods import methods
from comingle.cli.plot import plot
from comingle.cli.report import report
from comingle.cli.run import run
from comingle.cli.serve import serve
from comingle.cli.server import server
from comingle.cli.show import show
from comingle.cli.verbs import Verbs
from comingle.training.backends.launched import speaks
from comingle.utils.errors import ComingleError, UnknownMethodError, lacks_memory
from comingle.utils.terminal import printable

VERBS = (
    demo, run, compare, advise, methods, data, cost, show, report, plot, export, join, audit, chat, serve, federate,
    server, client,
)  # fmt: skip


class Core(Verbs):
    """The core's verbs, in the order in which they are listed."""

    own = MappingProxyType({verb.__name__: verb for verb in VERBS})


app = typer.Typer(
    name="comingle",
    cls=Core,
    help="Fine-tune one small language model together, each on private text; each ends up with a personal model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"comingle {__version__}")
        raise typer.Exit
    return wanted


@app.callback(invoke_without_command=False)
def _options(
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Say what is loaded and from where."),
    version: bool = typer.Option(False, "--version", help="Show the version.", callback=_show_version, is_eager=True),
) -> None:
    logging.basicConfig(level=logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_Formatter("%(message)s"))
    logging.getLogger("comingle").setLevel(logging.INFO if verbose else logging.WARNING)


class _Formatter(logging.Formatter):
    """Messages hold names and paths, which are not obeyed."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), keep="\n\t")


_AGAIN = {
    **dict.fromkeys(("client", "server"), "; the same command goes on from where it was"),
    **dict.fromkeys(
        ("compare", "demo", "federate", "reproduce", "run"),
        "; the same command with --resume goes on from the last checkpoint",
    ),
}
"""How a verb that was interrupted goes on; others have nothing to go on with."""


def _replace_unknown_characters() -> None:
    """Print ``?`` in place of characters that the terminal or the log does not have, rather than end in an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def main() -> None:
    """Entry point: a user's mistake is one line and exit code 2, an interruption is 130, a bug of ours a traceback."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # before they are imported
    _replace_unknown_characters()
    try:
        app()
    except BrokenPipeError:  # whoever read us has enough, as in `comingle methods | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the last flush does not fail too
        raise SystemExit(1) from None
    except (KeyboardInterrupt, SystemExit) as stop:  # typer turns the former into the latter, with code 130
        if isinstance(stop, SystemExit) and stop.code != 130:
            raise
        if speaks(interrupted=True):
            print(f"\ncomingle: stopped{_AGAIN.get(sys.argv[1] if sys.argv[1:] else '', '')}", file=sys.stderr)
        raise SystemExit(130) from None
    except Exception as error:
        if (line := _line(error)) is None:
            raise
        if speaks():
            print(f"comingle: {printable(line)}", file=sys.stderr)
        raise SystemExit(2) from None


def _line(error: Exception) -> str | None:
    """What is said of an error that a user can do something about; None of a mistake of ours."""
    if isinstance(error, UnknownMethodError):
        return f"{error}; for a method of your own: --plugin FILE"
    if isinstance(error, ComingleError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:  # the system's, not a library's
        where = " to ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
        return f"{where}: {error.strerror}" if where else error.strerror
    if lacks_memory(error):
        return f"out of memory ({str(error) or 'no more is said'}); `comingle cost` counts what a recipe needs"
    return None
