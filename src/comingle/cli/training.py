"""Shared code of the commands that train."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.text import Text

from comingle.cli.options import default_folder, read_recipe
from comingle.data.splits import REPEATED
from comingle.data.streaming import LISTED
from comingle.runs.distributed import read_shared, run_sharded
from comingle.runs.folders import as_begun, check_folder
from comingle.runs.given import Given
from comingle.runs.progress import LOADING, reporting
from comingle.runs.session import prepare, run_in, warn_unread
from comingle.training.backends.launched import LOST, MEETING, PARENT, Place
from comingle.training.backends.ranks import joined
from comingle.training.kinds.base import RunData
from comingle.utils.errors import RankLostError, RunError
from comingle.utils.files import list_checkpoints
from comingle.utils.inputs import recorded_date
from comingle.utils.terminal import errors, words

if TYPE_CHECKING:
    from comingle.runs.results import Run
    from comingle.training.client import Clients
    from comingle.training.events import Observer


_POLL_SECONDS = 0.05
_GRACE_SECONDS = 10.0
"""So long the others have to notice by themselves that one has ended."""

_HEARD_SECONDS, _END_SECONDS = 2.0, 5.0
_INTERRUPTED, _BUG = 130, 1


def launch(count: int, folder: Path) -> None:
    """Run this very command in ``count`` processes, to their end.

    Raises:
        RunError: one of them was ended; says which, and how the run in ``folder`` goes on.
        KeyboardInterrupt: they were interrupted.
        SystemExit: one of them has said what is wrong.
    """
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory(prefix="comingle-") as place:
        children = [_start(rank, count, Path(place) / "meeting", reading) for rank in range(count)]
        os.close(reading)
        try:
            _wait(children)
        except KeyboardInterrupt:
            _end(children, signal.SIGINT)
            raise
        finally:
            ended = [child.poll() is not None for child in children]
            _end(children, signal.SIGTERM)
            os.close(writing)  # which ends whoever is left
    _tell([child.returncode if here else LOST for child, here in zip(children, ended, strict=True)], folder)


def _start(rank: int, count: int, meeting: Path, pipe: int) -> subprocess.Popen[bytes]:
    own = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count}
    environment = {**os.environ, **{key: str(value) for key, value in own.items()}}
    environment |= {MEETING: str(meeting), PARENT: str(pipe)}
    if sys.platform.startswith("linux"):
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nothing leaves this machine
    command = [sys.executable, "-m", "comingle", *sys.argv[1:]]
    return subprocess.Popen(command, env=environment, pass_fds=(pipe,))


def _wait(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Until all have ended, or one has failed and the others have had time to notice."""
    deadline = float("inf")
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        if deadline == float("inf") and any(child.returncode for child in children):
            deadline = time.monotonic() + _GRACE_SECONDS
        time.sleep(_POLL_SECONDS)


def _end(children: Sequence[subprocess.Popen[bytes]], first: signal.Signals) -> None:
    """End whoever is still there, with more force each time."""
    if first is signal.SIGINT:  # from a terminal they have heard it, and once is enough
        _await(children, _HEARD_SECONDS)
    for how in (first, signal.SIGTERM, signal.SIGKILL):
        for child in children:
            if child.poll() is None:
                child.send_signal(how)
        _await(children, _END_SECONDS)


def _await(children: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _tell(codes: Sequence[int], folder: Path) -> None:
    """Say of those who have ended what they have not said themselves."""
    for rank, code in enumerate(codes):
        if code < 0:
            name = signal.Signals(-code).name
            memory = ", as when memory runs out" if name == "SIGKILL" else ""
            newest = list_checkpoints(folder)[-1:]
            where = newest[0].name if newest else "the beginning"
            goes_on = f"the same command with --resume goes on from {where}"
            raise RunError(f"process {rank} of {len(codes)} was ended by {name}{memory}; {goes_on}")
    if _INTERRUPTED in codes:
        raise KeyboardInterrupt
    if said := [code for code in codes if code not in (0, LOST)]:
        raise SystemExit(_BUG if _BUG in said else said[0])
    if any(codes):
        raise RunError(f"the processes lost each other; the same command with --resume goes on with {folder}")


T = TypeVar("T")


def warn_overlaps(materials: RunData) -> None:
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
                run = run_in if ranks is None else partial(run_sharded, ranks=ranks)
                done = run(folder, recipe, materials, resume=resume, force=force, observers=watch)
        return (folder, done) if leads else None
    except RankLostError:
        if PARENT in os.environ:
            raise SystemExit(LOST) from None  # who has started all of them says which has ended
        raise


def _alone(work: Callable[[], T]) -> T:
    return work()
