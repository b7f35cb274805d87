"""HTML pages about runs, in Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar, cast

from comingle.comparing.results import Comparison
from comingle.comparing.views import route_texts
from comingle.models.hardware import torch_defaults
from comingle.reports.page import check_target, require_packages
from comingle.reports.runs import held, read_entries
from comingle.runs.results import Run
from comingle.training.backends.launched import require_alone
from comingle.utils.errors import RunError
from comingle.utils.records import write_text

AnyRun: TypeAlias = str | Path | Run | Comparison
"""A run or a comparison, or the folder of one."""
One = TypeVar("One")


@torch_defaults()
def report(
    runs: AnyRun | Sequence[AnyRun],
    *,
    out: str | Path | None = None,
    text: str | Sequence[str] | None = None,
    users: str | Sequence[str] | None = None,
    tokens: int = 120,
    against: str | None = None,
    token_view: bool = True,
    force: bool = False,
) -> Path:
    """Write one self-contained HTML page about runs, as ``comingle report``, and return its path.

    Unless ``text`` is given or ``token_view`` is false, the page holds the beginning of each user's test text, which
    may be private.

    Args:
        runs: runs, comparisons, or folders of these; each needs a folder.
        out: the file to write; by default ``report.html`` in the first folder.
        text: text files, or texts, to route; by default the users' own test text.
        users: the users in the token view; by default the first six.
        tokens: how many first tokens of each text are routed.
        against: the baseline of the verdicts, or several with commas between, of which the best counts; by default
            ``local``.
        token_view: route texts; without it no model is loaded, and no text is on the page.
        force: replace a file that is already there.

    Raises:
        ComingleError: a run has no folder or cannot be read, the runs are of different users, there is no such user or
            baseline, or the page cannot be written.
    """
    require_alone("report")
    require_packages("comingle.report")
    from comingle.reports.page import render_page

    folders = [_folder(run) for run in _listed(runs)]
    if not folders:
        raise RunError("runs: none given; give a run, a comparison or a folder")
    if tokens < 1:
        raise RunError(f"tokens: got {tokens}; allowed: whole numbers from 1; token_view=False leaves them out")
    path = folders[0] / "report.html" if out is None else Path(out)
    entries = read_entries(folders)
    check_target(path, force=force, option="out", replace="force=True")
    held(entries, against)  # refused before models are loaded
    texts = None if text is None else _listed(text)
    views = route_texts(entries, texts, None if users is None else _listed(users), tokens) if token_view else []
    page = render_page(entries, views, baseline=against)
    try:
        write_text(path, page)
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror}") from None
    return path


def _listed(given: One | Sequence[One]) -> list[One]:
    if isinstance(given, Sequence) and not isinstance(given, str):
        return [*given]
    return [cast("One", given)]  # a text, too, is a sequence


def _folder(run: AnyRun) -> Path:
    """Return the folder of a run.

    Raises:
        RunError: it was made without ``out``.
    """
    if not isinstance(run, Run | Comparison):
        return Path(run)
    if run.folder is None:
        raise RunError(f"{run!r}: has no folder to read; give comingle.run or comingle.compare out=FOLDER")
    return run.folder
