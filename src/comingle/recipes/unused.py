"""Settings that the users' data leave unread: refused, so that nothing is ignored in silence.

Text is read in windows by adapters on a language model, questions in passes; a task's samples are read in passes by
nets that are trained whole. A setting that only another kind reads must be left at its default, which recipes of run
folders spell out.
"""

from __future__ import annotations

from typing import Any

from comingle.errors import RecipeError
from comingle.recipes.sections import Recipe

_ON_TASKS = {
    "training.local_steps": "passes over a user's samples are counted by training.local_epochs",
    "training.context": "samples have no windows",
    "training.balance_weight": "nets have no token routers",
    "adapters": "the section floral is for adaptors in nets",
    "data.split": "a task has its own train and test samples",
    "data.held_out": "a task has its own test samples",
    "data.on_small_user": "samples have no windows to be too short for",
    "data.max_train_tokens": "data.task.fraction makes train samples fewer",
    "data.max_valid_tokens": "a task has its own samples",
    "data.max_test_tokens": "data.task.test_samples makes test samples fewer",
}
"""What a task never reads, and what is there instead."""

_ON_QUESTIONS = {
    "training.local_steps": _ON_TASKS["training.local_steps"],
    "floral": "adaptors on a language model take adapters.rank and adapters.alpha",
    "data.split": "data.questions.train, valid and test say how many questions there are",
    "data.held_out": "all users have the same questions",
    "data.on_small_user": "all users have the same questions",
    "data.max_train_tokens": "data.questions.train says how many questions there are",
    "data.max_valid_tokens": "data.questions.valid says how many questions there are",
    "data.max_test_tokens": "data.questions.test says how many questions there are",
}
"""What questions never read, and what is there instead."""

_ON_TEXT = {
    "training.local_epochs": "local iterations on text are counted by training.local_steps",
    "floral": "adaptors on a language model take adapters.rank and adapters.alpha",
}
"""What text never reads, and what is there instead."""

_KINDS = {"data.task": _ON_TASKS, "data.questions": _ON_QUESTIONS, "text": _ON_TEXT}
_WEIGHTINGS = {"text": ("uniform", "tokens")}
"""What users' weights may be; by samples where it is not text."""


def check_used(recipe: Recipe) -> None:
    """Whether the recipe's users have the kind of data that its settings are for.

    Raises:
        RecipeError: a setting that would not be read, or a word of the other kind.
    """
    sections = {"data.task": recipe.data.task, "data.questions": recipe.data.questions}
    kind = next((name for name, section in sections.items() if section is not None), "text")
    for place, instead in _KINDS[kind].items():
        for key, value in changed(recipe, place):
            raise RecipeError(f"{key}: got {value!r}, which is not read for {kind}; {instead}")
    allowed = _WEIGHTINGS.get(kind, ("uniform", "samples"))
    if (got := recipe.training.weighting) not in allowed:
        raise RecipeError(f"training.weighting: got {got!r} for {kind}; allowed: {', '.join(allowed)}")


def changed(recipe: Recipe, place: str) -> list[tuple[str, Any]]:
    """The values at a dotted key, or below it, that are not the defaults."""
    section: Any = recipe
    *path, last = place.split(".")
    for part in path:
        section = getattr(section, part)
    value, default = getattr(section, last), type(section).model_fields[last].default
    if not hasattr(value, "model_fields_set"):
        return [(place, value)] if value != default else []
    return [place_changed for name in type(value).model_fields for place_changed in changed(recipe, f"{place}.{name}")]
