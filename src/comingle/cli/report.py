"""``comingle report``: look inside runs, on one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from comingle.cli.options import console, named, status
from comingle.utils.errors import RunError
from comingle.utils.files import check_target, require_packages

if TYPE_CHECKING:
    from comingle.reports.runs import Entry

Runs = Annotated[
    list[Path], typer.Argument(metavar="RUN", help="Run folders, or folders of comparisons: all runs inside.")
]
Texts = Annotated[
    list[str] | None,
    typer.Option("--text", help="A text file, or a text, to route; repeat it. Default: the users' own test text."),
]
Users = Annotated[
    str | None, typer.Option("--users", help="Users in the token view, separated by commas (default: the first 6).")
]
Length = Annotated[int, typer.Option("--tokens", min=1, help="How many first tokens of each text are routed.")]
Replace = Annotated[bool, typer.Option("--force", help="Replace files that are already there.")]


def report(
    runs: Runs,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="<path>", parser=named, help="File to write (default: RUN/report.html)."),
    ] = None,
    text: Texts = None,
    users: Users = None,
    tokens: Length = 120,
    against: Annotated[
        str | None,
        typer.Option(
            "--against", metavar="METHODS", help="Baseline of the verdicts: the best of these (default: local)."
        ),
    ] = None,
    no_tokens: Annotated[
        bool, typer.Option("--no-tokens", help="No token view: no model is loaded, and no text is on the page.")
    ] = False,
    force: Replace = False,
) -> None:
    """Write one self-contained HTML page about runs: curves, gains, costs, expert scores, and a token view.

    Unless --text or --no-tokens is given, the page holds the beginning of each user's test text, which may be private.
    """
    require_packages("comingle report")
    from comingle.cli.compare import split_names
    from comingle.reports.page import render_page
    from comingle.reports.runs import held, read_entries
    from comingle.runs.views import route_texts
    from comingle.utils.records import write_text

    path = out or runs[0] / "report.html"
    entries = read_entries(runs)
    check_target(path, force=force)
    held(entries, against)  # refused before anything is drawn
    with status("loading models and routing texts"):
        views = [] if no_tokens else route_texts(entries, text, None if users is None else split_names(users), tokens)
    with status("drawing"):
        page = render_page(entries, views, baseline=against)
    try:
        write_text(path, page)
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror}") from None
    warn_unlike(entries)
    console.print(f"{path}  {len(page.encode()) / 1e6:.2f} MB; open it in a browser", highlight=False)
    if any(one.owner for view in views for one in view.texts):
        console.print("it shows the beginning of each user's test text; --no-tokens leaves text out", style="dim")


def warn_unlike(entries: Sequence[Entry]) -> None:
    """Say why numbers of these runs should not be compared, where that is so."""
    from comingle.reports.page import unlike
    from comingle.utils.terminal import errors, words

    for line in unlike(entries):
        errors.print(Text.assemble(("warning: ", "yellow"), words(line)), highlight=False, soft_wrap=True)
