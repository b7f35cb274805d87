"""``comingle.run`` in a program that a launcher has started several times: one run of all of its processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from comingle.models.hardware import torch_defaults
from comingle.processes.sharing import build_sharded, read_shared
from comingle.progress import LOADING, reporting
from comingle.runs import api
from comingle.runs.folders import as_begun, check_folder
from comingle.runs.given import AnyBase, AnyMethod, AnyRecipe, Loss, given_of, lending, recipe_with
from comingle.runs.results import Run
from comingle.runs.session import run_in, warn_unread
from comingle.training.backends.launched import find_place
from comingle.training.backends.ranks import joined
from comingle.training.client import Clients
from comingle.training.events import Observer
from comingle.training.kinds.base import Materials
from comingle.utils.errors import RunError
from comingle.utils.inputs import recorded_date


@torch_defaults()
def run(
    recipe: AnyRecipe | None = None,
    *,
    users: Mapping[str, Any] | None = None,
    base: AnyBase | None = None,
    method: AnyMethod | None = None,
    loss: Loss | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
    observers: Sequence[Observer] = (),
    materials: Materials | None = None,
    progress: bool = False,
    **changes: Any,
) -> Run:
    """As :func:`comingle.runs.api.run`, by every process of a program, with the same arguments.

    Users are shared out, the first process writes the folder ``out`` and calls the observers. Each opens it when all
    have ended, and returns the whole run. A launcher's second attempt goes on with what its first has written.

    Raises:
        ComingleError: whatever the user can correct, in one line, at the first process; the others end silently.
    """
    place = find_place()
    assert place is not None, "comingle.run of one process is another"
    if out is None:
        raise RunError(f"out: got none, in one of {place.size} processes; give out=FOLDER, which all of them see")
    folder, given = Path(out), given_of(users, base, method, loss)
    with joined(place) as ranks, lending([method]) as [named]:
        read = ranks.each(lambda: recipe_with(recipe, given, base=base, method=named, changes=changes))
        if ranks.has_opened(folder):
            resume, force = True, False
        read = ranks.each(partial(as_begun, folder, read, resume=resume))
        ranks.each(lambda: check_folder(folder, read, resume=resume, force=force) if place.leads else None)
        with reporting(quiet=not (progress and place.leads)) as reporter:
            with reporter.waiting(LOADING):
                given = replace(given, date=recorded_date(folder) if resume else "")
                here = read_shared(read, ranks, given, materials)

            def watch(clients: Clients) -> list[Observer]:
                warn_unread(read)
                return [*observers, reporter.watch(clients)]

            building = partial(build_sharded, ranks=ranks)
            how = {"resume": resume, "force": force}
            run_in(folder, read, here, **how, observers=watch, building=building, opened=ranks.opened)
    return api.load(folder, users=users, base=_handed(base), method=method, loss=loss)


def _handed(base: AnyBase | None) -> AnyBase | None:
    """What a run folder does not know by its name."""
    return None if isinstance(base, str) else base
