"""In Python: somebody joins a federation that is over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from comingle.joining.joining import Joined, join_run, newcomer
from comingle.models.hardware import torch_defaults
from comingle.progress import reporting
from comingle.runs.api import load
from comingle.runs.given import AnyBase, Loss, given_of
from comingle.runs.results import Run
from comingle.training.backends.launched import require_alone


@torch_defaults()
def join(
    run: Run | str | Path,
    *,
    name: str,
    data: Any,
    out: str | Path | None = None,
    rounds: int | None = None,
    local_step: bool = False,
    force: bool = False,
    base: AnyBase | None = None,
    loss: Loss | None = None,
    progress: bool = False,
) -> Joined:
    """Let somebody join a federation that is over, while nobody else trains; as ``comingle join``.

    Args:
        run: a finished run, or its folder, which is only read.
        name: the newcomer's.
        data: a path, or what :func:`run` takes of one user.
        out: the run folder of this one user, as :func:`load` opens it; None writes nothing.
        rounds: of the newcomer's own training, by default as many as the run had.
        local_step: one round more, in which what was taken is trained too.
        force: replace that folder.
        base, loss: what a program handed over to :func:`run`, again.
        progress: tell on stderr how far it is.

    Raises:
        ComingleError: a name of the run, data of another kind or too little, or a run from which nothing can be taken.
    """
    require_alone("join")
    opened = run if isinstance(run, Run) else load(run, base=base, loss=loss)
    with reporting(quiet=not progress) as reporter:
        who = newcomer(opened, name, data, rounds=rounds, local_step=local_step)
        given = given_of(None, base, None, loss)
        return join_run(opened, who, Path(out) if out is not None else None, reporter, given=given, force=force)
