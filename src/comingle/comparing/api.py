"""In Python: methods compared on the same users, and advice out of short runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from comingle.comparing import trials
from comingle.comparing.advising import advise_runs
from comingle.comparing.comparing import compare_runs, labels_of, recipes_of
from comingle.comparing.results import Comparison
from comingle.models.hardware import torch_defaults
from comingle.progress import reporting
from comingle.reports.advice import Advice
from comingle.reports.comparisons import baseline_of
from comingle.reports.tables import write_comparison
from comingle.runs.given import AnyBase, AnyMethod, AnyRecipe, Loss, given_of, lending, recipe_with
from comingle.runs.results import Run
from comingle.training.backends.launched import require_alone
from comingle.utils.errors import ComingleError, RecipeError


@torch_defaults()
def compare(
    recipe: AnyRecipe | None = None,
    methods: Sequence[AnyMethod] = (),
    *,
    seeds: Sequence[int] = trials.SEEDS,
    users: Mapping[str, Any] | None = None,
    base: AnyBase | None = None,
    loss: Loss | None = None,
    out: str | Path | None = None,
    against: str | None = None,
    resume: bool = False,
    force: bool = False,
    progress: bool = False,
    **changes: Any,
) -> Comparison:
    """Run several methods with several seeds on the same base, data and budget; as ``comingle compare``.

    The recipe's own method has its settings and another its defaults; a mapping, or a text such as
    ``"fedprox:proximal=0.1"``, gives a method settings of its own. One method may be there with several settings; each
    is then called ``NAME:KEY=VALUE``.
    With ``out`` each run has a folder there, beside ``table.md`` and ``table.json``, where methods are held
    ``against`` a baseline: ``local``, or the first. Models are not kept in memory: open a run's folder for them.
    Everything else is as in :func:`run`.

    Raises:
        ComingleError: whatever the user can correct, in one line; of settings before anything is trained.
    """
    require_alone("compare")
    if not methods:
        raise RecipeError("methods: none given; `comingle methods` lists them")
    given, folder = given_of(users, base, None, loss), Path(out) if out is not None else None
    with lending(list(methods)) as named, reporting(quiet=not progress) as reporter:
        read = recipe_with(recipe, given, base=base, method=None, changes=changes)
        recipes = recipes_of(read, named, list(seeds))
        baseline_of(list(dict.fromkeys(method for method, _ in recipes)), against)
        runs = compare_runs(recipes, folder, reporter, resume=resume, force=force, given=given)
        metrics = {key: _metrics(found) for key, found in runs}
    if folder is not None:
        places = labels_of(recipes, folder)
        write_comparison(folder, list(places), against, places)
    return Comparison(folder=folder, metrics=metrics, baseline=against)


def _metrics(found: Run | ComingleError) -> dict[str, Any]:
    if isinstance(found, ComingleError):
        raise found
    return found.metrics


@torch_defaults()
def advise(
    recipe: AnyRecipe | None = None,
    methods: Sequence[str] = trials.METHODS,
    *,
    seeds: Sequence[int] | None = None,
    rounds: int = trials.ROUNDS,
    users: Mapping[str, Any] | None = None,
    base: AnyBase | None = None,
    loss: Loss | None = None,
    progress: bool = False,
    **changes: Any,
) -> Advice:
    """Whether training together pays, for whom and by which method, out of short runs; as ``comingle advise``.

    Runs ``local`` and each of ``methods`` with everybody, and the first of them with smaller groups: each pair of three
    to five users, all but one of six to twelve. Nothing is written. Everything else is as in :func:`run`.

    Args:
        methods: names; each shares something.
        seeds: of each run; intervals need two. Without them there are three or five, by how much data there is.
        rounds: of each run, whatever the recipe says.

    Returns:
        What the runs allow to be said: ``print`` shows it as a paragraph, ``records()`` has every number.

    Raises:
        ComingleError: whatever the user can correct, in one line.
    """
    require_alone("advise")
    given = given_of(users, base, None, loss)
    with reporting(quiet=not progress) as reporter:
        read = recipe_with(recipe, given, base=base, method=None, changes={**changes, **trials.shortened(rounds)})
        return advise_runs(read, methods, None if seeds is None else list(seeds), reporter, given=given)
