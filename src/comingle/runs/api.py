"""The Python API: run a recipe, and open finished runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from comingle.config import Recipe, load_recipe
from comingle.config.settings import MEMORY, protects_examples
from comingle.data.populations import LazyPopulation
from comingle.methods import own_errors
from comingle.methods.base import Method
from comingle.methods.user_files import check_origin
from comingle.models.folders import digest_tokenizer
from comingle.models.hardware import torch_defaults
from comingle.runs.folders import as_begun, check_folder
from comingle.runs.given import NOTHING, AnyBase, AnyMethod, AnyRecipe, Given, Loss, given_of, lending, recipe_with
from comingle.runs.progress import LOADING, reporting
from comingle.runs.results import Run
from comingle.runs.session import build, describe, get_ready, method_of, prepare, run_in, warn_unread
from comingle.training.checkpoints import Progress
from comingle.training.client import STORES, Clients
from comingle.training.events import JsonMapping, Observer
from comingle.training.kinds.base import Kind, RunData, kind_of, lazy_user
from comingle.utils.errors import DataError, RunError
from comingle.utils.files import list_checkpoints
from comingle.utils.inputs import DATE, POPULATION, Inputs, check_base, check_users, read_inputs, recorded_date
from comingle.utils.records import is_server, logger, read_metrics, resume_command

PerUser = Callable[[list[Any]], Any]
"""What of a list with a value for each user of a population counts."""


def of_one_user(recipe: Recipe, value: PerUser) -> Recipe:
    """The recipe of somebody alone: ``value`` takes what counts of lists of ranks and specialists.

    Nobody else takes part in a round: no mean over others selects one, nobody is there to be summed with, or hostile.
    """
    alone = {"evaluation.select": "last", "aggregation": "mean"}
    return without_sums(recipe).with_changes({**per_user(recipe, value), **alone})


def without_sums(recipe: Recipe) -> Recipe:
    """The recipe with nothing that a user alone cannot do: of one upload there is no sum that hides it.

    Nor does it hide examples in steps of which nothing is sent.
    """
    privacy = recipe.privacy
    without = privacy is not None and (privacy.secure_aggregation is not None or protects_examples(privacy.mechanism))
    return recipe.with_changes({"privacy": None}) if without else recipe


def per_user(recipe: Recipe, value: PerUser) -> dict[str, Any]:
    """Changes of what a recipe lists user by user; who takes part when is everybody, always."""
    changes: dict[str, Any] = {}
    if isinstance(recipe.adapters.rank, list):
        changes["adapters.rank"] = value(recipe.adapters.rank)
    specialists = recipe.method.settings.get("specialists")
    if isinstance(specialists, list):
        changes["method.settings.specialists"] = value(specialists)
    if isinstance(recipe.training.participation, list):
        changes["training.participation"] = 1.0
    return changes


def reopen(folder: Path, recipe: Recipe, inputs: Inputs, method: Method, given: Given = NOTHING) -> RunData:
    """Return the data of a finished run, which is read when something asks for it.

    Users' data that is not what the run has read is refused then, another base at once.

    Args:
        folder: The run folder.
        recipe: The recipe.
        inputs: What the run has read.
        method: The method of the recipe.
        given: What a program passes instead of names and paths in the recipe.

    Raises:
        RunError: nothing says what the run has read, or the base or its tokenizer changed.
        BaseModelError: the base cannot be used.
    """
    given = replace(given, date=str(inputs.settings.get(DATE, "")))
    kind = kind_of(recipe)
    given.check_base(recipe)
    base = given.load_base(recipe) if kind.needs_base else None

    @cache
    def read() -> Sequence[Any]:
        try:
            with lending([given.method]):
                materials = prepare(recipe, base=base, given=given, method=method)
        except DataError as error:
            raise DataError(f"{folder}: this needs the users' data, which is not in a run folder: {error}") from None
        check_users(folder, inputs, describe(materials, recipe))
        return materials.users

    @cache
    def by_name() -> dict[str, Any]:
        return {user.name: user for user in read()}

    if base is not None:
        check_base(folder, inputs, base.digest, digest_tokenizer(base.tokenizer))
    if POPULATION in inputs.settings:
        users = _in_files(folder, recipe, kind, read)
    else:
        users = tuple(
            lazy_user(kind.user, name, lambda name=name: by_name()[name], cluster=of_user.cluster)
            for name, of_user in inputs.users.items()
        )
    return kind.reopened(base, users, inputs.settings, net=given.net)


def _in_files(folder: Path, recipe: Recipe, kind: Kind, read: Callable[[], Sequence[Any]]) -> LazyPopulation:
    """Users who are too many to be listed; ``read`` yields them by number, when somebody's data is asked for."""
    store: Any = None if recipe.runtime.store == MEMORY else STORES[recipe.runtime.store]
    names = store.names(folder) if hasattr(store, "names") else None
    if names is None:
        raise RunError(f"{folder}: a program handed its users over, who are too many to be listed; resume it to go on")

    def make(number: int) -> Any:
        return lazy_user(kind.user, names[number], lambda: read()[number])

    return LazyPopulation(names, make, digest="")


@torch_defaults()
def run(
    recipe: AnyRecipe | None = None,
    *,
    users: Mapping[str, object] | None = None,
    base: AnyBase | None = None,
    method: AnyMethod | None = None,
    loss: Loss | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
    observers: Sequence[Observer] = (),
    materials: RunData | None = None,
    progress: bool = False,
    **changes: object,
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
        changes: keys of the recipe to replace, as ``seed=1`` or ``**{"training.rounds": 3}``. A mapping keeps the
            rest of its section, as ``training={"rounds": 3}``; None in place of a section has its defaults.

    Raises:
        ComingleError: whatever the user can correct, in one line.
    """
    given = given_of(users, base, method, loss)
    with lending([method]) as [named], reporting(quiet=not progress) as reporter:
        read = recipe_with(recipe, given, base=base, method=named, changes=changes)
        folder = Path(out) if out is not None else None
        if folder is not None:
            read = as_begun(folder, read, resume=resume)
            check_folder(folder, read, resume=resume, force=force)
        elif resume:
            raise RunError("resume: no run folder; give out=FOLDER of the run to go on with")
        with reporter.waiting(LOADING):
            if resume and folder is not None:
                given = replace(given, date=recorded_date(folder))
            made = method_of(read, checked=materials is not None)
            materials = materials or prepare(read, given=given, method=made)

        def watch(clients: Clients) -> list[Observer]:
            warn_unread(read, clients.method)
            return [*observers, reporter.watch(clients)]

        done = run_in(folder, read, materials, resume=resume, force=force, method=made, observers=watch)
        for warning in done.metrics.get("warnings", ()):
            logger.warning("%s: %s", read.method.name, warning)
        return done


@torch_defaults()
def load(
    folder: str | Path,
    *,
    users: Mapping[str, object] | None = None,
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
    if is_server(folder):
        raise RunError(
            f"{folder}: of a federation's server, which has nobody's model; open a user's own: STATE/run-*/model"
        )
    metrics, recipe = read_metrics(folder), load_recipe(folder)
    given = given_of(users, base, method, loss)
    with lending([method]) as [named]:
        _check_method(folder, recipe, named)
        inputs, made = read_inputs(folder), get_ready(recipe)
        materials = reopen(folder, recipe, inputs, made, given)
        with own_errors(made):
            federation = build(recipe, materials, method=made)
            if federation.clients.method.trains:
                _check_round(folder, metrics, federation.restore(folder, recipe.fingerprint))
                federation.clients.choose()
    settings = materials.kind.settings(materials)
    return Run(folder=folder, recipe=recipe, metrics=metrics, federation=federation, settings=settings)


def _check_method(folder: Path, recipe: Recipe, named: object) -> None:
    """Whether the method that is handed over, if one is, is the run's, and the run's is known."""
    name = named["name"] if isinstance(named, Mapping) else named
    if name not in (None, recipe.method.name):
        raise RunError(f"{folder}: method: got {name!r}, and the run is of {recipe.method.name!r}")
    check_origin(folder, recipe.method.name)


def _check_round(folder: Path, metrics: JsonMapping, progress: Progress) -> None:
    newest = list_checkpoints(folder)[-1]
    if progress.round != metrics["rounds"]:
        raise RunError(
            f"{newest}: the run has {metrics['rounds']} rounds, its last checkpoint {progress.round}; "
            f"{resume_command(folder)} goes on from there"
        )
