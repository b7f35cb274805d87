"""Users' models of a run, loaded for serving."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from comingle.config import Recipe, load_recipe
from comingle.models.base import Base
from comingle.models.kernels import expert_mlp
from comingle.models.personal import PersonalModel
from comingle.runs.api import load
from comingle.serving.rows import prepare
from comingle.training.kinds.base import kind_of
from comingle.utils.errors import DataError, RunError, did_you_mean
from comingle.utils.files import cache_folder
from comingle.utils.inputs import read_inputs
from comingle.utils.records import read_metrics


def find_run(folder: Path, method: str | None = None, seed: int | None = None) -> Path:
    """Return the folder of one run, in a folder that may be that of a comparison of several runs.

    Args:
        folder: Folder of a run, or of a comparison, which contains runs.
        method: The method of the run to find in a comparison; None if it has only one.
        seed: The seed of that run; None for the lowest.

    Raises:
        RunError: The comparison has several methods and ``method`` is None, or no run matches.
    """
    if (folder / "recipe.yaml").exists() or not folder.is_dir():
        return _single_run(folder, method, seed)
    recipes = [(load_recipe(path.parent), path.parent) for path in sorted(folder.glob("*/metrics.json"))]
    if not recipes:
        return folder  # The caller reports the error when it reads the folder.
    runs = [(_label(recipe, path), recipe.seed, path) for recipe, path in recipes]
    known = list(dict.fromkeys(label for label, _seed, _path in runs))
    if method is None and len(known) > 1:
        raise RunError(f"{folder}: is a comparison; say which run with --method: {', '.join(known)}")
    name = method if method is not None else known[0]
    if name not in known:
        raise RunError(f"{folder}: no run of {name!r}; allowed: {', '.join(known)}.{did_you_mean(name, known)}")
    by_seed = {number: path for label, number, path in runs if label == name}
    if seed is not None and seed not in by_seed:
        raise RunError(f"--seed: got {seed}; allowed for {name}: {', '.join(map(str, sorted(by_seed)))}")
    return by_seed[min(by_seed) if seed is None else seed]


def _label(recipe: Recipe, path: Path) -> str:
    """Return the name of a comparison's run for the option ``--method``.

    The name is that of the method. If the comparison has several variants of the method, with different settings, the
    settings follow: a run in the folder ``METHOD-KEY=VALUE-seed0`` is called ``METHOD:KEY=VALUE``.

    Args:
        recipe: The run's recipe.
        path: The run's folder.
    """
    method, variant = recipe.method.name, path.name.rpartition("-seed")[0]
    if variant.startswith(f"{method}-") and "=" in variant:
        return f"{method}:{variant.removeprefix(method + '-')}"
    return method


def _single_run(folder: Path, method: str | None, seed: int | None) -> Path:
    """Return the folder of a single run, after checking that method and seed, if given, are those of the run."""
    if method is None and seed is None:
        return folder
    recipe = load_recipe(folder)
    for option, wanted, got in (("--method", method, recipe.method.name), ("--seed", seed, recipe.seed)):
        if wanted not in (None, got):
            message = f"is a single run, with {option} {got}; omit {option}"
            raise RunError(f"{folder}: {message}")
    return folder


TURN_KINDS = ("conversations", "questions")
"""Kinds of data that consist of turns."""
MIN_COMPILED_PARAMETERS = 10_000_000
"""Number of parameters from which a base is worth compiled code, which takes seconds once per machine."""


@dataclass(frozen=True, kw_only=True)
class UserModels:
    """The users' models of a run.

    Args:
        models: Models by user.
        answers: Whether they answer messages rather than continue a text: they were trained on conversations, or their
            base has a chat template.
    """

    models: dict[str, PersonalModel]
    answers: bool


def open_models(run: Path, method: str | None = None) -> UserModels:
    """Load the users' models of a finished run; in a comparison's folder, of the run of ``method``.

    Raises:
        RunError: There is no finished run, or there are several and ``method`` is None.
        DataError: The models generate no text.
        BaseModelError: The base is missing or has changed.
    """
    folder = find_run(run, method)
    opened = load(folder)
    if not kind_of(opened.recipe).needs_base:
        raise DataError(f"{folder}: {opened.federation.clients.model.name} does not generate text")
    models = {name: cast(PersonalModel, opened.user(name)) for name in opened.users}
    base = next(iter(models.values())).model.base  # the same for all users
    # Native code (C++ kernels for a CPU) takes seconds to compile, which is too long for a small base.
    may_compile = opened.recipe.runtime.compile is not False  # True, or "auto"
    is_worth_compiling = base.model.num_parameters() >= MIN_COMPILED_PARAMETERS
    if may_compile and is_worth_compiling and expert_mlp.fits(base.device, base.dtype):
        expert_mlp.enable(cache_folder() / "native")
    prepare(base.model)  # stores weights in an order that is faster for few rows
    return UserModels(models=models, answers=answers_messages(opened.recipe, base))


def answers_messages(recipe: Recipe, base: Base) -> bool:
    """Return whether models answer messages rather than continue a text.

    They do if they were trained on conversations, or if their base has a chat template.
    """
    return kind_of(recipe).name in TURN_KINDS or bool(getattr(base.tokenizer, "chat_template", None))


def users_in(run: Path) -> list[str]:
    """Return the users of a run without loading models.

    If the users are stored on disk, a run has no list of all of them. Then only those with results in ``metrics.json``
    are returned, which are a sample if the recipe sets ``evaluation.users``.

    Raises:
        RunError: The run is not finished.
    """
    evaluated_users = list(read_metrics(run)["users"])
    return list(read_inputs(run).users) or evaluated_users  # inputs list no users if they are stored on disk
