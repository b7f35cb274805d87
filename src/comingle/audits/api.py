"""In Python: an audit of a finished run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comingle.audits.auditing import SHADOWS, audit_run
from comingle.audits.shadows import FEWEST
from comingle.models.hardware import torch_defaults
from comingle.reports.audit import Audit, check_targets, write_audit
from comingle.runs.api import load
from comingle.runs.given import AnyBase, given_of
from comingle.runs.progress import reporting
from comingle.runs.results import Run
from comingle.training.backends.launched import require_alone
from comingle.utils.errors import RecipeError


@torch_defaults()
def audit(
    run: Run | str | Path,
    *,
    trials: int | None = None,
    rounds: int = 3,
    shadows: int = SHADOWS,
    out: str | Path | None = None,
    force: bool = False,
    users: Mapping[str, Any] | None = None,
    base: AnyBase | None = None,
    progress: bool = False,
) -> Audit:
    """Attack a finished run of text, conversations or samples, and say what leaks; as ``comingle audit``.

    Args:
        run: a finished run, or its folder, which is only read.
        trials: runs with canaries, by default as many as toss about 40 coins.
        rounds: of each of them, or fewer where the run had fewer.
        shadows: runs with halves of users' training data, as reference models for membership; 0 does without.
        out: a folder for ``audit.json`` and ``audit.md``, which may be the run's; None writes nothing.
        force: replace these files.
        users: everybody's data, where a program handed it over to :func:`run`, again.
        base: what a program handed over to :func:`run`, again.
        progress: tell on stderr how far it is.

    Raises:
        ComingleError: no finished run, nothing that is shared, or files that are there already.
    """
    require_alone("audit")
    for name, value in (("trials", 1 if trials is None else trials), ("rounds", rounds)):
        if value < 1:
            raise RecipeError(f"{name}: got {value}; allowed: a whole number from 1")
    if shadows < 0 or 0 < shadows < FEWEST:
        raise RecipeError(f"shadows: got {shadows}; allowed: 0, or a whole number from {FEWEST}")
    if out is not None:
        check_targets(Path(out), force=force)
    opened = run if isinstance(run, Run) else load(run, users=users, base=base)
    with reporting(quiet=not progress) as reporter:
        found = audit_run(opened, reporter, trials=trials, rounds=rounds, shadows=shadows, given=given_of(users, base))
    if out is not None:
        write_audit(Path(out), found)
    return found
