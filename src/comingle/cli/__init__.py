"""The command line: one small file per verb, heavy imports inside the verbs."""

from __future__ import annotations

import logging
import os
import sys

import typer

from comingle.cli.compare import compare
from comingle.cli.cost import cost
from comingle.cli.data import data
from comingle.cli.demo import demo
from comingle.cli.methods import methods
from comingle.cli.plot import plot
from comingle.cli.report import report
from comingle.cli.reproduce import reproduce
from comingle.cli.run import run
from comingle.cli.show import show
from comingle.cli.theory import theory
from comingle.errors import ComingleError

app = typer.Typer(
    name="comingle",
    help="Fine-tune one small language model together, each on private text; each ends up with a personal model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in (demo, run, compare, methods, data, cost, show, report, plot, reproduce, theory):
    app.command()(verb)


@app.callback(invoke_without_command=False)
def _options(verbose: bool = typer.Option(False, "--verbose", "-v", help="Say what is loaded and from where.")) -> None:
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("comingle").setLevel(logging.INFO if verbose else logging.WARNING)


def main() -> None:
    """Entry point: a user's mistake is one line and exit code 2, an interruption is 130."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        app()
    except ComingleError as error:
        print(f"comingle: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except (KeyboardInterrupt, SystemExit) as stop:  # typer turns the former into the latter, with code 130
        if isinstance(stop, SystemExit) and stop.code != 130:
            raise
        print("\ncomingle: stopped; the same command with --resume goes on from the last checkpoint", file=sys.stderr)
        raise SystemExit(130) from None
