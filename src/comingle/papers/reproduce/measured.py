"""What a finished run of a table was measured with: what it computes, what made it, digests of what it has read.

A run's name is a digest of what it computes (:func:`comingle.papers.reproduce.plan.name_of`), the same on every
machine. It does not cover what text and base hold: a run stands for what is here only if it has read the same.
"""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import torch

import comingle
from comingle.papers.reproduce.plan import Cell, name_of
from comingle.utils.digests import digest_all
from comingle.utils.errors import RunError
from comingle.utils.inputs import POPULATION, Inputs
from comingle.utils.records import write_json

MEASURED = "measured.json"
"""In a finished run's folder: what it computes, and by what it was made."""
DIVERGED = "diverged.txt"
"""In the folder of a run whose training left the real numbers: why."""
_DIGITS = 16


def write_measured(folder: Path, cell: Cell) -> None:
    """Mark a run as finished, with what made it."""
    write_json(folder / MEASURED, {"computed": cell.computed, "made": _made()})


def is_measured(folder: Path) -> bool:
    """Whether a folder holds the result of the run that it is called after.

    Raises:
        RunError: it holds another one's, or is damaged.
    """
    return (folder / MEASURED).exists() and bool(read_measured(folder))


def read_diverged(folder: Path) -> str:
    """Why a run diverged; empty where it did not."""
    path = folder / DIVERGED
    return path.read_text(encoding="utf-8").strip() if path.exists() else ""


def read_measured(folder: Path) -> dict[str, Any]:
    """What a run computes, and what made it.

    Raises:
        RunError: it is another run's, or damaged.
    """
    path = folder / MEASURED
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if name_of(content["computed"]) != folder.name:
            raise RunError(f"{path}: of another run, {name_of(content['computed'])}; use another --out")
        return {key: content[key] for key in ("computed", "made")}
    except (OSError, ValueError, TypeError, KeyError) as error:
        if isinstance(error, RunError):
            raise
        raise RunError(f"{path}: damaged ({error!r}); delete it, and the run is made anew") from None


def _made() -> dict[str, str]:
    """By which version, when, and on what kind of machine."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    processor = [line.partition(": ")[2] for line in lines if line.startswith("model name")][:1]
    cards = [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    machine = [platform.machine(), *processor, *cards, f"torch {torch.__version__}"]
    today = date.today().isoformat()
    return {"version": comingle.__version__, "commit": _commit(), "date": today, "machine": ", ".join(machine)}


def _commit() -> str:
    """The commit of a checkout, marked where files differ from it; empty for what is installed."""
    root = Path(comingle.__file__).parents[2]
    if not (root / ".git").exists():
        return ""
    asked = ("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12")
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def said(inputs: Inputs) -> dict[str, str]:
    """Digests of a run's base and of everybody's data.

    The tokenizer's is left out: it changes with its library, and what it makes of the text is in the data's.
    """
    found = {"the base": inputs.base} if inputs.base else {}
    found |= {f"the data of {name!r}": digest_all(user.digests) for name, user in inputs.users.items()}
    found |= {"the users": digest_all(inputs.settings[POPULATION])} if POPULATION in inputs.settings else {}
    return {what: digest[:_DIGITS] for what, digest in found.items()}


def check_same(where: object, was: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Whether a run was measured with what is here, as :func:`said` of both.

    Raises:
        RunError: it was not; says what differs.
    """
    for what in [*was, *now]:
        if was.get(what) != now.get(what):
            raise RunError(
                f"{where}: {what} was {was.get(what, 'not there')} when it was measured, and is "
                f"{now.get(what, 'not there')}; take what it was measured with, or another --out"
            )
