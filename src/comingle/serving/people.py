"""Everybody of a run as models to speak with; the run's training state is let go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from comingle.adapters import native
from comingle.errors import DataError, RunError, did_you_mean
from comingle.kinds.base import kind_of
from comingle.models.cache import cache_folder
from comingle.models.personal import PersonalModel
from comingle.recipes import load_recipe
from comingle.records import read_metrics
from comingle.runs.api import load
from comingle.serving.rows import prepare

TURNS = ("conversations", "questions")
"""Kinds of data that are made of turns."""
WORTH_COMPILING = 10_000_000
"""Parameters of a base from which on compiled code is waited for, seconds once on a machine; smaller ones are fast."""


@dataclass(frozen=True, kw_only=True)
class People:
    """The users' models of a run by name, and whether they answer (in turns) or continue a text.

    They answer where they were trained on conversations, or their base has a chat template.
    """

    models: dict[str, PersonalModel]
    answers: bool


def open_people(run: Path, method: str | None = None) -> People:
    """The users' models of a finished run; of a comparison's folder, the run of ``method``.

    Raises:
        RunError: no finished run, or several and ``method`` does not say which.
        DataError: the models are nets, which say nothing.
        BaseModelError: the base is gone or has changed.
    """
    folder = find_run(run, method)
    opened = load(folder)
    if not kind_of(opened.recipe).needs_base:
        raise DataError(f"{folder}: {opened.federation.clients.model.name} predicts and generates no text")
    models = {name: cast(PersonalModel, opened.user(name)) for name in opened.users}
    base = next(iter(models.values())).model.base
    wanted = opened.recipe.runtime.compile is not False and base.model.num_parameters() >= WORTH_COMPILING
    if wanted and native.fits(base.device, base.dtype):
        native.enable(cache_folder() / "native")
    prepare(base.model)
    template = getattr(base.tokenizer, "chat_template", None)
    return People(models=models, answers=kind_of(opened.recipe).name in TURNS or bool(template))


def names_in(run: Path) -> list[str]:
    """Who is in a run, without its models.

    Raises:
        RunError: not a finished run.
    """
    return list(read_metrics(run)["users"])


def find_run(run: Path, method: str | None = None) -> Path:
    """A run's folder; within a comparison's, the run of ``method`` with the lowest seed.

    Raises:
        RunError: several runs and no method, a method that is not there, or none at all.
    """
    if (run / "recipe.yaml").exists() or not run.is_dir():
        if method is not None and (run / "recipe.yaml").exists() and (got := _method(run)) != method:
            raise RunError(f"--method {method}: {run} is a run of {got}; give the folder of a comparison")
        return run  # a folder that is missing is refused where it is read
    runs = sorted(path.parent for path in run.glob("*/metrics.json"))
    known = list(dict.fromkeys(map(_method, runs)))
    if method is None and len(known) > 1:
        raise RunError(f"{run}: runs of {', '.join(known)}; say which with --method")
    chosen = [one for one in runs if method in (None, _method(one))]
    if not chosen and runs:
        raise RunError(f"{run}: no run of {method!r}; there are: {', '.join(known)}.{did_you_mean(str(method), known)}")
    return min(chosen, key=lambda one: load_recipe(one).seed) if chosen else run


def _method(run: Path) -> str:
    return load_recipe(run).method.name


def require_user(name: str, known: list[str]) -> str:
    """The name of somebody who is there.

    Raises:
        DataError: nobody of that name.
    """
    if name not in known:
        raise DataError(f"no user {name!r}; there are: {', '.join(known)}.{did_you_mean(name, known)}")
    return name
