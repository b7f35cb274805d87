"""What the training verbs share beyond options; imports torch, so only from inside a verb."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.text import Text

from comingle.cli.options import default_folder, read_recipe
from comingle.data.splits import REPEATED
from comingle.data.text.streams import LISTED
from comingle.runs.distributed import build_sharded, read_shared
from comingle.runs.folders import as_begun, check_folder
from comingle.runs.given import Given
from comingle.runs.progress import LOADING, reporting
from comingle.runs.session import build, prepare, run_in, warn_unread
from comingle.training.backends.launched import LOST, PARENT, Place
from comingle.training.backends.ranks import joined
from comingle.training.kinds.base import Materials
from comingle.utils.errors import RankLostError
from comingle.utils.inputs import recorded_date
from comingle.utils.terminal import errors, words

if TYPE_CHECKING:
    from comingle.runs.results import Run
    from comingle.training.client import Clients
    from comingle.training.events import Observer

T = TypeVar("T")


def warn_overlaps(materials: Materials) -> None:
    """Say which users' held-out text also occurs in their training text."""
    overlaps = materials.overlaps()
    told = [
        f"user {overlap.user}: {overlap.valid} of {overlap.valid_documents} validation and "
        f"{overlap.test} of {overlap.test_documents} test {materials.documents} are {REPEATED}"
        for overlap in overlaps[:LISTED]
    ]
    if more := len(overlaps) - len(told):
        told.append(f"so are {materials.documents} of {more} more users")
    for line in told:
        errors.print(Text.assemble(("warning: ", "yellow"), words(line)), highlight=False, soft_wrap=True)


def train_here(
    place: Place | None,
    path: Path,
    sets: list[str] | None,
    seed: int | None,
    out: Path | None,
    *,
    resume: bool,
    force: bool,
    quiet: bool,
) -> tuple[Path, Run] | None:
    """Train the users of a recipe, or those whom this process has; what came of it, in the process that leads.

    Raises:
        ComingleError: what a user can correct.
    """
    leads = place is None or place.leads
    try:
        with nullcontext() if place is None else joined(place) as ranks:
            each = _alone if ranks is None else ranks.each
            recipe = each(lambda: read_recipe(path, sets, seed))
            folder = out or default_folder(path, recipe.method.name, recipe.seed)
            if ranks is not None and ranks.has_opened(folder):
                resume, force = True, False
            recipe = each(partial(as_begun, folder, recipe, resume=resume))
            each(lambda: check_folder(folder, recipe, resume=resume, force=force) if leads else None)
            with reporting(quiet=quiet or not leads) as reporter:

                def watch(clients: Clients) -> list[Observer]:
                    return [reporter.watch(clients)]

                with reporter.waiting(LOADING):
                    given = Given(date=recorded_date(folder) if resume else "")
                    materials = prepare(recipe, given=given) if ranks is None else read_shared(recipe, ranks, given)
                    warn_overlaps(materials)
                if leads:
                    warn_unread(recipe)
                building = build if ranks is None else partial(build_sharded, ranks=ranks)
                opened = (lambda folder: None) if ranks is None else ranks.opened
                how = {"resume": resume, "force": force, "building": building, "opened": opened}
                done = run_in(folder, recipe, materials, observers=watch, **how)
        return (folder, done) if leads else None
    except RankLostError:
        if PARENT in os.environ:
            raise SystemExit(LOST) from None  # who has started all of them says which has ended
        raise


def _alone(work: Callable[[], T]) -> T:
    return work()
