"""Check before the first run that a plan's bases, text and images can be had."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from comingle.models.loading import cached_folder, hub_answers, is_offline, is_public
from comingle.papers.recipes import published_runs
from comingle.papers.reproduce.plan import Cell, Plan
from comingle.utils.errors import RunError
from comingle.utils.names import HUB_PREFIX, parse_hub_name
from comingle.utils.records import expand_home

_LISTED = 3


def check_reach(plan: Plan) -> None:
    """Refuse a plan that reads the hub where the hub is out of reach.

    The hub's own client would retry for half a minute, and then name one file.

    Raises:
        RunError: something is neither in the hub's cache nor within reach; says what can be run instead.
    """
    missing = _missing(plan)
    if not missing:
        return
    from huggingface_hub import constants

    if not is_offline() and hub_answers(constants.ENDPOINT):
        return
    why = "HF_HUB_OFFLINE is set" if is_offline() else f"the hub ({constants.ENDPOINT}) is out of reach"
    listed = ", ".join(missing[:_LISTED]) + (f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else "")
    raise RunError(f"reproduce {plan.name}: needs {listed} from the hub, and {why}; {_advice(plan)}")


def _advice(plan: Plan) -> str:
    """Commands that need no network."""
    ways = []
    if "cpu" in plan.study.scales:
        ways.append("--scale cpu --data FOLDER runs it on local files (docs/results.md says how FOLDER is laid out)")
    paper = plan.name.partition("/")[0]
    ways += [
        f"--scale {name.removeprefix(f'{paper}-')} --measured {name} prints published runs"
        for name in published_runs()
        if name.startswith(f"{paper}-")
    ]
    return "; ".join(ways) or "--scale smoke runs it on text that every machine has"


def _missing(plan: Plan) -> list[str]:
    """Names of what is on the hub and not in its cache."""
    names: dict[str, None] = {}
    for cell in plan.cells:
        base = cell.recipe.base
        if "/" in base and is_public(base) and not expand_home(base).exists() and cached_folder(base) is None:
            names[base] = None
        for name in _data_sets(plan, cell):
            names[name] = None
    return list(names)


def _data_sets(plan: Plan, cell: Cell) -> Iterator[str]:
    """Data sets of the hub that a cell reads and the hub's cache lacks."""
    content = cell.recipe.data.model_dump()
    for source in _strings(content):
        if source.startswith(HUB_PREFIX) and not _is_cached(name := parse_hub_name(source).name):
            yield name
    data = plan.study.data[plan.column_of(cell.column).data]
    made = content.get("task") or content.get("questions") or {}
    if (data.images or data.questions) and made.get("path") is None:
        yield data.images or data.label


def _strings(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict):
        yield from (found for part in content.values() for found in _strings(part))
    elif isinstance(content, list | tuple):
        yield from (found for part in content for found in _strings(part))


def _is_cached(name: str) -> bool:
    """Return whether ``datasets`` has kept a data set; it is not imported for that, which takes seconds."""
    from huggingface_hub import constants

    folder = os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets"
    return (Path(folder) / name.replace("/", "___")).is_dir()
