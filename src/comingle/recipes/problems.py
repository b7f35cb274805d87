"""What pydantic finds wrong with a recipe, said in one line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from comingle.recipes.data import DataSection
from comingle.recipes.other_names import other_name_hint, section_in
from comingle.utils.errors import did_you_mean

_BRANCHES = ("function-", "constrained-", "list[", "dict[", "literal[")
"""How pydantic calls the branches of a union within a place."""

_PLAIN = ("str", "int", "float", "bool")
"""Likewise, where a branch is a plain type."""

_NAMED = "a name, or a mapping with name"
_ACCEPTED = {
    "method": _NAMED,
    "adapters.rank": "a whole number from 1, or a list with one for each user",
    "training.participation": "a number above 0 and up to 1, or a list with the names of each round",
    "runtime.compile": "auto, true or false",
    "evaluation.every": "auto, or a whole number from 1",
}
"""What is accepted where pydantic would name one of several kinds."""

_USERS = ["data", "users"]
_KINDS: Mapping[type, str] = {list: "a list", dict: "a mapping"}
_WRONG_KINDS = ("_type", "_parsing", "literal_error", "int_from_float")


def first_problem(error: ValidationError, model: type[BaseModel], data: type[DataSection] | None = None) -> str:
    """The mistake that explains the others, in one line: its place, what was got, what is allowed.

    ``data`` is the section that was chosen for the key of that name.
    """
    accepted = _ACCEPTED | {f"data.{key}": words for key, words in (data.accepted if data else {}).items()}
    # A misspelt key explains the missing one; of the branches of a union, the one that got furthest was meant.
    problem = max(error.errors(), key=lambda p: (p["type"] == "extra_forbidden", len(p["loc"])))
    parts = _parts(problem["loc"], accepted)
    place = ".".join(parts)
    if problem["type"] == "extra_forbidden":
        known = _known_keys(problem["loc"], model, data)
        hint = other_name_hint(parts, known, model, data) or did_you_mean(parts[-1], known)
        return f"unknown key {place!r}.{hint} Allowed: {', '.join(known)}"
    if problem["type"] == "missing":
        return f"key {place!r} is missing"
    shown = _shown(problem)
    wanted = accepted.get("data.users.*" if parts[:2] == _USERS and len(parts) == 3 else place)
    if wanted and problem["type"].endswith(_WRONG_KINDS):
        return f"{place}: give {wanted}{shown or '; got ' + _KINDS.get(type(problem['input']), 'a section')}"
    reason = re.sub("a valid dictionary( or instance of .*)?", "a mapping", problem["msg"])
    return f"{place + ': ' if place else ''}{reason.removeprefix('Value error, ')}{shown}"


def _parts(loc: Sequence[str | int], accepted: Mapping[str, str]) -> list[str]:
    """A place without pydantic's names of branches."""
    parts = [str(part) for part in loc if not str(part).startswith(_BRANCHES)]
    above = ".".join(parts[:-1])
    return parts[:-1] if parts[-1:] and parts[-1] in _PLAIN and above in accepted and above != "data.users" else parts


def _shown(problem: Mapping[str, Any]) -> str:
    """What was got, where that is no list or mapping."""
    got = problem.get("input")
    if isinstance(got, dict | list | BaseModel):
        return ""
    # What YAML makes of no, 1 or 2024-01-01 was meant as a name.
    quoted = "; in quotes it would be text" if problem["type"] == "string_type" and got is not None else ""
    return f"; got {got!r}{quoted}"


def _known_keys(place: Iterable[str | int], model: Any, data: type[DataSection] | None) -> list[str]:
    """Keys of the section in which ``place`` lies."""
    for part in list(place)[:-1]:
        if part == "data" and data is not None:
            model = data
            continue
        field = model.model_fields.get(str(part)) if hasattr(model, "model_fields") else None
        annotation = field.annotation if field else model
        model = section_in(annotation) or model
    return list(model.model_fields)
