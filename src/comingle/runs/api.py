"""The verbs of Python: run a recipe, compare methods on it, and open what has been run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from comingle.engines.checkpoints import Progress, list_checkpoints
from comingle.engines.checksums import resume_command
from comingle.engines.client import Clients
from comingle.engines.events import Observer
from comingle.errors import ComingleError, RecipeError, RunError
from comingle.kinds.base import Materials
from comingle.methods import REGISTRY
from comingle.progress import LOADING, reporting
from comingle.recipes import Recipe, load_recipe
from comingle.records import read_metrics
from comingle.reports.advice import Advice
from comingle.reports.against import baseline_of
from comingle.reports.audit import Audit, check_targets, write_audit
from comingle.reports.tables import write_comparison
from comingle.runs import trials
from comingle.runs.advising import advise_runs
from comingle.runs.auditing import audit_run
from comingle.runs.comparing import compare_runs, folders_of, recipes_of
from comingle.runs.folders import check_folder
from comingle.runs.given import AnyBase, AnyMethod, AnyRecipe, Loss, given_of, lending, recipe_with
from comingle.runs.joining import Joined, join_run, newcomer
from comingle.runs.opening import reopen
from comingle.runs.results import Comparison, Run
from comingle.runs.session import build, prepare, restore, run_in, warn_unread


def run(
    recipe: AnyRecipe | None = None,
    *,
    users: Mapping[str, Any] | None = None,
    base: AnyBase | None = None,
    method: AnyMethod | None = None,
    loss: Loss | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
    observers: Sequence[Observer] = (),
    materials: Materials | None = None,
    progress: bool = False,
    **changes: Any,
) -> Run:
    """Train everybody's model, by a recipe and by what a program has in hand.

    With ``out`` everything is written to that folder, from which ``resume=True`` goes on after an interruption; what
    was handed over is not in it, and is handed over again then. Without ``out`` nothing is written.

    Args:
        recipe: a :class:`comingle.Recipe`, the path of a YAML file or a run folder, or a mapping of a recipe's keys to
            values; without it all keys have their defaults. With ``users`` it needs no ``data``.
        users: everybody's data by name, in place of the recipe's own users. One user's is a list of texts, a file or
            folder, or a ``datasets.Dataset`` with a column ``text``; rows with ``messages`` or with a prompt and a
            response, as a list or a ``datasets.Dataset``; samples, as a ``torch.utils.data.Dataset`` or tensors; or a
            mapping of ``train``, ``valid`` and ``test`` to one of these. All users have the same kind. The recipe's
            ``data`` may still say how it is split and how much of it is kept.
        base: a name; ``(model, tokenizer)`` of transformers, whose weights are shared and never changed; or, for
            samples, a function that makes an ``nn.Module``.
        method: a name; a :class:`comingle.methods.base.Method`; a function that makes one; or a mapping with such a
            ``name`` and settings.
        loss: of each sample, as a function of outputs and targets; a loss by name is ``data={"loss": NAME}``.
        out: the run folder.
        resume: go on with the run in that folder.
        force: replace it.
        observers: called with each event, a mapping with ``event``.
        materials: the base and the users' data of an earlier :func:`comingle.runs.session.prepare`.
        progress: tell on stderr how far the run is, in a notebook below the cell.
        changes: keys of the recipe to replace, as ``seed=1`` or ``**{"training.rounds": 3}``.

    Raises:
        ComingleError: whatever the user can correct, in one line.
    """
    given = given_of(users, base, method, loss)
    with lending([method]) as [named], reporting(quiet=not progress) as reporter:
        read = recipe_with(recipe, given, base=base, method=named, changes=changes)
        folder = Path(out) if out is not None else None
        if folder is not None:
            check_folder(folder, read, resume=resume, force=force)
        elif resume:
            raise RunError("resume: no run folder; give out=FOLDER of the run to go on with")
        with reporter.waiting(LOADING):
            materials = materials or prepare(read, given=given)

        def watch(clients: Clients) -> list[Observer]:
            warn_unread(read)
            return [*observers, reporter.watch(clients)]

        return run_in(folder, read, materials, resume=resume, force=force, observers=watch)


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

    The recipe's own method has its settings and another its defaults; a mapping gives a method settings of its own.
    With ``out`` each run has a folder there, beside ``table.md`` and ``table.json``, where methods are held
    ``against`` a baseline: ``local``, or the first. Models are not kept in memory: open a run's folder for them.
    Everything else is as in :func:`run`.

    Raises:
        ComingleError: whatever the user can correct, in one line; of settings before anything is trained.
    """
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
        write_comparison(folder, list(folders_of(recipes, folder).values()), against)
    return Comparison(folder=folder, metrics=metrics)


def _metrics(found: Run | ComingleError) -> dict[str, Any]:
    if isinstance(found, ComingleError):
        raise found
    return found.metrics


def load(
    folder: str | Path,
    *,
    users: Mapping[str, Any] | None = None,
    base: AnyBase | None = None,
    method: AnyMethod | None = None,
    loss: Loss | None = None,
) -> Run:
    """Open a finished run, to talk to its users' models or predict with them, out of its folder and its base alone.

    The users' data is read when something asks for it: to score models on it, or for methods that tune on it. What a
    program handed over to :func:`run` is handed over again: ``base`` and ``method`` always, ``users`` where their data
    is asked for.

    Raises:
        RunError: not a finished run of comingle, its base changed, or its method is not known here.
        BaseModelError: its base was handed over, and is not now.
    """
    folder = Path(folder)
    metrics, recipe = read_metrics(folder), load_recipe(folder)
    given = given_of(users, base, method, loss)
    with lending([method]) as [named]:
        _check_method(folder, recipe, named)
        materials = reopen(folder, recipe, given)
        federation = build(recipe, materials)
        if federation.clients.method.trains:
            _check_round(folder, metrics, restore(federation, folder, recipe))
            federation.clients.choose()
    settings = materials.kind.settings(materials)
    return Run(folder=folder, recipe=recipe, metrics=metrics, federation=federation, settings=settings)


def _check_method(folder: Path, recipe: Recipe, named: Any) -> None:
    """Whether the method that is handed over, if one is, is the run's, and the run's is known."""
    name = named["name"] if isinstance(named, Mapping) else named
    if name not in (None, recipe.method.name):
        raise RunError(f"{folder}: method: got {name!r}, and the run is of {recipe.method.name!r}")
    if recipe.method.name not in REGISTRY:
        raise RunError(
            f"{folder}: no method {recipe.method.name!r} here; where a program handed it over, give it again: "
            "comingle.load(FOLDER, method=...)"
        )


def _check_round(folder: Path, metrics: dict[str, Any], progress: Progress) -> None:
    newest = list_checkpoints(folder)[-1]
    if progress.round != metrics["rounds"]:
        raise RunError(
            f"{newest}: the run has {metrics['rounds']} rounds, its last checkpoint {progress.round}; "
            f"{resume_command(newest)} goes on from there"
        )


def join(
    run: Run | str | Path,
    *,
    name: str,
    data: Any,
    out: str | Path | None = None,
    rounds: int | None = None,
    local_step: bool = False,
    force: bool = False,
    base: AnyBase | None = None,
    loss: Loss | None = None,
    progress: bool = False,
) -> Joined:
    """Let somebody join a federation that is over, while nobody else trains; as ``comingle join``.

    Args:
        run: a finished run, or its folder, which is only read.
        name: the newcomer's.
        data: a path, or what :func:`run` takes of one user.
        out: the run folder of this one user, as :func:`load` opens it; None writes nothing.
        rounds: of the newcomer's own training, by default as many as the run had.
        local_step: one round more, in which what was taken is trained too.
        force: replace that folder.
        base, loss: what a program handed over to :func:`run`, again.
        progress: tell on stderr how far it is.

    Raises:
        ComingleError: a name of the run, data of another kind or too little, or a run from which nothing can be taken.
    """
    opened = run if isinstance(run, Run) else load(run, base=base, loss=loss)
    with reporting(quiet=not progress) as reporter:
        who = newcomer(opened, name, data, rounds=rounds, local_step=local_step)
        given = given_of(None, base, None, loss)
        return join_run(opened, who, Path(out) if out is not None else None, reporter, given=given, force=force)


def advise(
    recipe: AnyRecipe | None = None,
    methods: Sequence[str] = trials.METHODS,
    *,
    seeds: Sequence[int] = trials.SEEDS,
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
        seeds: of each run; intervals need two.
        rounds: of each run, whatever the recipe says.

    Returns:
        What the runs allow to be said: ``print`` shows it as a paragraph, ``records()`` has every number.

    Raises:
        ComingleError: whatever the user can correct, in one line.
    """
    given = given_of(users, base, None, loss)
    with reporting(quiet=not progress) as reporter:
        read = recipe_with(recipe, given, base=base, method=None, changes={**changes, **trials.shortened(rounds)})
        return advise_runs(read, methods, list(seeds), reporter, given=given)


def audit(
    run: Run | str | Path,
    *,
    trials: int | None = None,
    rounds: int = 3,
    out: str | Path | None = None,
    force: bool = False,
    users: Mapping[str, Any] | None = None,
    base: AnyBase | None = None,
    progress: bool = False,
) -> Audit:
    """Attack a finished run of text or samples, and say what leaks; as ``comingle audit``.

    Args:
        run: a finished run, or its folder, which is only read.
        trials: runs with canaries, by default as many as toss about 40 coins.
        rounds: of each of them, or fewer where the run had fewer.
        out: a folder for ``audit.json`` and ``audit.md``, which may be the run's; None writes nothing.
        force: replace these files.
        users: everybody's data, where a program handed it over to :func:`run`, again.
        base: what a program handed over to :func:`run`, again.
        progress: tell on stderr how far it is.

    Raises:
        ComingleError: no finished run, nothing that is shared, or files that are there already.
    """
    for name, value in (("trials", 1 if trials is None else trials), ("rounds", rounds)):
        if value < 1:
            raise RecipeError(f"{name}: got {value}; allowed: a whole number from 1")
    if out is not None:
        check_targets(Path(out), force=force)
    opened = run if isinstance(run, Run) else load(run, users=users, base=base)
    with reporting(quiet=not progress) as reporter:
        found = audit_run(opened, reporter, trials=trials, rounds=rounds, given=given_of(users, base))
    if out is not None:
        write_audit(Path(out), found)
    return found
