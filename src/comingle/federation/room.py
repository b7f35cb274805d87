"""The runs in a user's own folder: no more than the user allows, whatever a server begins."""

from __future__ import annotations

from pathlib import Path

from comingle.federation.keeping import MODEL
from comingle.utils.errors import RunError


def run_folder(state: Path, run: str) -> Path:
    """Where all that is private lies of a run."""
    return state / f"run-{run}"


def check_room(state: Path, run: str, most: int) -> None:
    """Whether a run is known, or there is room for one more.

    Raises:
        RunError: there is none; names what may be removed, of those that have ended the oldest first.
    """
    known = sorted(state.glob("run-*"), key=lambda folder: folder.stat().st_mtime)
    if run_folder(state, run) in known or len(known) < most:
        return
    ended = [folder for folder in known if (folder / MODEL).exists()]
    oldest, why = (ended[0], "which has ended") if ended else (known[0], "the oldest, which has not ended")
    raise RunError(
        f"{state}: has {len(known)} runs, and max_runs in the participant's file allows no more than {most}; make "
        f"room, as by `rm -r {oldest}`, {why}"
    )
