"""What pydantic finds wrong with a recipe, said in one line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ValidationError

from comingle.errors import did_you_mean

_BRANCHES = ("function-", "constrained-", "list[", "dict[", "literal[")
"""How pydantic calls the branches of a union within a place."""


def first_problem(error: ValidationError, model: type[BaseModel]) -> str:
    """The mistake that explains the others, in one line: its place, what was got, what is allowed."""
    # A misspelt key explains the missing one; of the branches of a union, the one that got furthest was meant.
    problem = max(error.errors(), key=lambda p: (p["type"] == "extra_forbidden", len(p["loc"])))
    place = ".".join(str(p) for p in problem["loc"] if not str(p).startswith(_BRANCHES))
    if problem["type"] == "extra_forbidden":
        known = _known_keys(problem["loc"], model)
        return f"unknown key {place!r}.{did_you_mean(str(problem['loc'][-1]), known)} Allowed: {', '.join(known)}"
    if problem["type"] == "missing":
        return f"key {place!r} is missing"
    reason = re.sub("a valid dictionary( or instance of .*)?", "a mapping", problem["msg"]).removeprefix(
        "Value error, "
    )
    got = problem.get("input")
    shown = "" if isinstance(got, dict | list | BaseModel) else f"; got {got!r}"
    if problem["type"] == "string_type" and got is not None and shown:  # what YAML makes of no, 1 or 2024-01-01
        shown += "; in quotes it would be text"
    return f"{place or 'recipe'}: {reason}{shown}"


def _known_keys(place: Iterable[str | int], model: Any) -> list[str]:
    """Keys of the section in which ``place`` lies."""
    for part in list(place)[:-1]:
        field = model.model_fields.get(str(part)) if hasattr(model, "model_fields") else None
        annotation = field.annotation if field else model
        model = _section(annotation) or model
    return list(model.model_fields)


def _section(annotation: Any) -> Any:
    """The section class inside an annotation such as ``dict[str, UserSource] | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((s for a in getattr(annotation, "__args__", ()) if (s := _section(a))), None)
