"""The Python API: run a recipe, and open finished runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

from comingle.config import Recipe, load_recipe
from comingle.config.settings import MEMORY, protects_examples, values_in
from comingle.data.populations import LazyPopulation
from comingle.methods import own_errors
from comingle.methods.base import Method
from comingle.methods.user_files import check_origin
from comingle.models.base import Base
from comingle.models.folders import digest_tokenizer
from comingle.models.hardware import torch_defaults
from comingle.models.quantised import PACKED
from comingle.runs.continuation import check_earlier_run
from comingle.runs.folders import check_folder, with_bos_of_run
from comingle.runs.given import (
    NOTHING,
    AnyBase,
    AnyMethod,
    AnyRecipe,
    Given,
    Loss,
    base_key,
    given_of,
    recipe_with,
    registered_methods,
)
from comingle.runs.guard import LOCAL, build_local, saved_shared_models
from comingle.runs.progress import loading, reporting
from comingle.runs.results import Run
from comingle.runs.session import (
    build,
    check_and_set_up,
    choose_settings,
    default_method_note,
    describe,
    method_of,
    prepare,
    run_in,
    warn_unread,
)
from comingle.training.checkpoints import CheckpointState, Progress, newest_checkpoint
from comingle.training.client import STORES, Clients
from comingle.training.events import Observer
from comingle.training.kinds.base import Kind, RunData, kind_of, lazy_user
from comingle.training.state import check_names
from comingle.utils.errors import DataError, RunError
from comingle.utils.files import list_checkpoints
from comingle.utils.inputs import DATE, POPULATION, Inputs, check_base, check_users, read_inputs, recorded_date
from comingle.utils.records import JsonMapping, is_server, logger, read_metrics, resume_command

SelectUsers = Callable[[list[Any]], Any]
"""Returns the values of some users, given a list with a value for each user: one value, or a list of values."""


def recipe_for_one_user(recipe: Recipe, select: SelectUsers) -> Recipe:
    """Return the recipe of a run with only one of the users.

    Settings that need several users are removed: selection by mean validation loss, the guard, robust aggregation and
    privacy of uploads.

    Args:
        recipe: A recipe of several users.
        select: Returns the user's value from a list of all users' values; 4 from ``adapters.rank: [8, 4, 8]``.
    """
    changes = changes_for_users(recipe, select)
    changes["evaluation.select"] = "last"
    changes["evaluation.guard"] = None
    changes["aggregation"] = "mean"
    changes["continue_from"] = None
    changes["data.replay"] = 0.0
    return without_upload_privacy(recipe).with_changes(changes)


def without_upload_privacy(recipe: Recipe) -> Recipe:
    """Return the recipe for a single user, who uploads nothing: without ``privacy`` if that protects uploads.

    Secure aggregation and example-level differential privacy protect uploads.
    """
    privacy = recipe.privacy
    if privacy is None:
        return recipe
    protects_uploads = privacy.secure_aggregation is not None or protects_examples(privacy.mechanism)
    if not protects_uploads:
        return recipe
    return recipe.with_changes({"privacy": None})


def changes_for_users(recipe: Recipe, select: SelectUsers) -> dict[str, Any]:
    """Return the changes to a recipe's settings that leave only some of its users, by dotted recipe key.

    For runs of one user or of a group of users; the data itself is selected elsewhere. If the recipe lists the
    participants of its rounds by name, all of these users participate in every round instead.

    Args:
        recipe: A recipe of several users, with a value for each, such as ``adapters.rank: [8, 4, 8]``. If a setting is
            a mapping by user name, ``select`` gets the list of the mapping's values.
        select: Returns the values of the remaining users from such a list, for example ``[8, 8]``.
    """
    values_by_key = recipe.values_of_users()
    changes: dict[str, Any] = {key: select(values_in(values)) for key, values in values_by_key.items()}
    if isinstance(recipe.training.participation, list):
        changes["training.participation"] = 1.0
    return changes


def reopen_data(folder: Path, recipe: Recipe, inputs: Inputs, method: Method, given: Given = NOTHING) -> RunData:
    """Return the base and the users of a finished run, and check that neither has changed since the run.

    The base model is loaded and checked now, the users' data on first access.

    Args:
        folder: The run folder.
        recipe: Settings of the run (its recipe).
        inputs: The record of the base and the users that the run has read, with their digests.
        method: The method of the recipe.
        given: Objects that a program passes instead of names and paths in the recipe.

    Raises:
        RunError: There is no record of what the run read, or the base or its tokenizer has changed.
        BaseModelError: The base cannot be used.
    """
    # Chat templates may write the date into prompts, which must be as in the run.
    given = replace(given, date=str(inputs.settings.get(DATE, "")))
    kind = kind_of(recipe)
    given.check_base(recipe)
    given.check_net(recipe, in_python="call NETS.register, or comingle.load(FOLDER, base=FUNCTION)")
    base = None
    if kind.needs_base:
        base = given.load_base(recipe)
        check_base(folder, inputs, base.digest, digest_tokenizer(base.tokenizer))

    @cache
    def read_users() -> Sequence[Any]:
        """Read all users as the run did, and check that their data has not changed; called on first access."""
        try:
            with registered_methods([given.method]):
                run_data = prepare(recipe, base=base, given=given, method=method)
        except DataError as error:
            raise DataError(f"{folder}: this needs the users' data, which is not in a run folder: {error}") from None
        check_users(folder, inputs, describe(run_data, recipe))
        return run_data.users

    @cache
    def users_by_name() -> dict[str, Any]:
        """Return all users with their data by name."""
        return {user.name: user for user in read_users()}

    def lazy_user_of(name: str) -> Any:
        """Return a user whose data is read on first access."""
        return lazy_user(kind.user, name, lambda: users_by_name()[name], cluster=inputs.users[name].cluster)

    if POPULATION in inputs.settings:  # too many users for a record of each of them
        users = _reopened_population(folder, recipe, kind, read_users)
    else:
        users = tuple(lazy_user_of(name) for name in inputs.users)
    return kind.reopened(base, users, inputs.settings, net=given.make_net)


def _reopened_population(
    folder: Path, recipe: Recipe, kind: Kind, read_users: Callable[[], Sequence[Any]]
) -> LazyPopulation:
    """Return the users of a finished run that stored them on disk; each user's data is read on first access.

    Args:
        folder: The run folder, whose store has the users' names.
        recipe: The run's recipe, which names the store of the users.
        kind: The kind of data.
        read_users: Returns all users with their data.

    Raises:
        RunError: A program passed the users, so that no file has their names.
    """
    names = STORES[recipe.runtime.store].names(folder)
    if names is None:
        raise RunError(f"{folder}: a program passed its users, too many to list; resume the run to continue")

    def lazy_user_of(number: int) -> Any:
        return lazy_user(kind.user, names[number], lambda: read_users()[number])

    return LazyPopulation(names, lazy_user_of, digest="")  # no digest, since `read_users` checks the data that it reads


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
    run_data: RunData | None = None,
    progress: bool = False,
    **changes: object,
) -> Run:
    """Train all users' models from a recipe and from objects that a program passes.

    With ``out`` everything is written to that folder, and ``resume=True`` resumes from it after an interruption. The
    folder does not contain objects that the program passed; pass them again then. Without ``out`` nothing is written.

    Args:
        recipe: A :class:`comingle.Recipe`, the path of a YAML file or a run folder, or a mapping of recipe keys to
            values. Without it all keys have their defaults. With ``users`` it needs no ``data``.
        users: Each user's data by name, in place of the recipe's users. A user's data is a list of texts, a file or
            folder, or a ``datasets.Dataset`` with a column ``text``; rows with ``messages`` or with a prompt and a
            response, as a list or a ``datasets.Dataset``; samples, as a ``torch.utils.data.Dataset`` or tensors; or a
            mapping of ``train``, ``valid`` and ``test`` to one of these. All users have the same kind. The recipe's
            ``data`` may still set how it is split and how much of it is kept.
        base: The name of a base model; a pair ``(model, tokenizer)`` of transformers, whose weights all users share
            and training never changes; or, if the users' data is samples, a function that returns an ``nn.Module``.
        method: The name of a method; a :class:`comingle.methods.base.Method`; a function that returns a method; or a
            mapping of ``name`` to any of these, and of settings to values.
        loss: A function of outputs and targets that returns one loss per sample. Set a loss by name with
            ``data={"loss": NAME}``.
        out: The run folder.
        resume: Whether to resume the run in ``out``.
        force: Whether to replace the run in ``out``.
        observers: Functions that are called with each event, a mapping with the key ``event``.
        run_data: The base and the users' data of an earlier :func:`comingle.runs.session.prepare`.
        progress: Whether to print progress to stderr, or below the cell in a notebook.
        changes: Keys of the recipe to replace, such as ``seed=1`` or ``**{"training.rounds": 3}``. A mapping keeps the
            rest of its section, as in ``training={"rounds": 3}``; None resets a section to its defaults.

    Raises:
        ComingleError: There is a problem that the user can correct; the message is one line.
    """
    if "materials" in changes:
        warnings.warn("comingle.run(materials=) is now run_data=", DeprecationWarning, stacklevel=3)
        run_data = cast(RunData, changes.pop("materials"))
    given = given_of(users, base, method, loss)
    with registered_methods([method]) as [named_method], reporting(quiet=not progress) as reporter:
        full_recipe = recipe_with(recipe, given, base=base, method=named_method, changes=changes)
        folder = None if out is None else Path(out)
        resumed_folder = folder if resume else None
        if folder is not None:
            # The default of data.add_bos_token has changed; a run that began with the old default keeps it.
            full_recipe = with_bos_of_run(folder, full_recipe, resume=resume)
        is_loaded = run_data is not None
        # The recipe may leave numbers of specialists, and settings that save memory, to this machine.
        full_recipe = choose_settings(full_recipe, reporter.say, resumed=resumed_folder, is_loaded=is_loaded)
        if folder is not None:
            check_folder(folder, full_recipe, resume=resume, force=force)
        elif resume:
            raise RunError("resume: no run folder; give out=FOLDER of the run to resume")
        if not resume:
            check_earlier_run(full_recipe)
        note = default_method_note(full_recipe)
        if note:
            reporter.say(note)
        with reporter.waiting(loading(full_recipe)):
            if resumed_folder is not None:  # chat templates may write the date, which must be that of the start
                given = replace(given, date=recorded_date(resumed_folder))
            # If the data is loaded, `prepare` has checked the recipe already.
            run_method = method_of(full_recipe, checked=is_loaded)
            if run_data is None:
                run_data = prepare(full_recipe, given=given, method=run_method)

        def make_observers(clients: Clients) -> list[Observer]:
            warn_unread(full_recipe, clients.method)
            return [*observers, reporter.watch(clients)]

        finished = run_in(
            folder,
            full_recipe,
            run_data,
            resume=resume,
            force=force,
            method=run_method,
            observers=make_observers,
        )
        for warning in finished.metrics.get("warnings", ()):
            logger.warning("%s: %s", full_recipe.method.name, warning)
        return finished


def load(
    folder: str | Path,
    *,
    users: Mapping[str, object] | None = None,
    base: AnyBase | None = None,
    method: AnyMethod | None = None,
    loss: Loss | None = None,
) -> Run:
    """Open a finished run from its folder and its base, to chat or predict with its users' models.

    The users' data is read on first access: to score models, or for methods that fine-tune on it. Pass again what a
    program passed to :func:`run`: ``base`` and ``method`` always, ``users`` where their data is accessed.

    Args:
        folder: The run folder.
        users: The users' data that was passed to :func:`run`.
        base: The base that was passed to :func:`run`.
        method: The method that was passed to :func:`run`.
        loss: The loss that was passed to :func:`run`.

    Raises:
        RunError: The folder is not a finished run, its base changed, or its method is not known here.
        BaseModelError: A program passed its base, and ``base`` is missing here.
    """
    return _load(Path(folder), given_of(users, base, method, loss), method)


def load_on_demand(folder: Path, base: Base | None = None) -> tuple[Run, bool]:
    """Open a finished run for serving; if possible, each user's tensors are read when its model is accessed.

    They are read at once if the method fine-tunes at the end or if ``evaluation.guard`` has chosen other models.

    Args:
        folder: The run folder.
        base: A base in memory, which must be that of the run; None to load it.

    Returns:
        The run, and whether it has left the tensors on disk.

    Raises:
        ComingleError: As :func:`load`, or the run has another base.
    """
    given = NOTHING
    if base is not None and not is_server(folder):
        recipe, inputs = load_recipe(folder), read_inputs(folder)
        quantised = "" if recipe.quantise == "none" else recipe.quantise
        is_served_packed = base.quantised == PACKED and recipe.quantise != "4bit"
        is_same = inputs.base == base.digest and (base.quantised == quantised or is_served_packed)
        if not is_same:
            raise RunError(f"{folder}: got a run on the base {recipe.base!r}; allowed here: runs on {base.name!r}")
        given = replace(NOTHING, loaded_bases={base_key(recipe): base})
    run = _load(folder, given, None, on_demand=True)
    clients = run.federation.clients
    return run, not clients.state.in_memory and not clients.method.client.finetunes


@torch_defaults()
def _load(folder: Path, given: Given, method: AnyMethod | None, *, on_demand: bool = False) -> Run:
    """Open a finished run; see :func:`load`.

    Args:
        folder: The run folder.
        given: Objects that a program passes instead of names and paths in the recipe.
        method: The method that was passed to :func:`run`.
        on_demand: Leave users' tensors in the checkpoint until a model is accessed, if that is possible; then neither
            users can be trained nor does the server have its state.
    """
    if is_server(folder):
        raise RunError(
            f"{folder}: a federation's server, which has no user's model; open a user's run folder: STATE/run-*/model"
        )
    metrics = read_metrics(folder)
    recipe = load_recipe(folder)
    with registered_methods([method]) as [named_method]:
        _check_method(folder, recipe, named_method)
        inputs = read_inputs(folder)
        run_method = check_and_set_up(recipe)
        run_data = reopen_data(folder, recipe, inputs, run_method, given)
        with own_errors(run_method):
            stored = on_demand and _can_stay_stored(folder, recipe, run_method, metrics)
            # Trained tensors are read from the checkpoint, so an adapter to start from may be gone.
            initial = recipe.with_changes({"adapters.start": None}) if run_method.trains else recipe
            federation = build(initial, run_data, method=run_method, store="disk" if stored else None)
            local = None
            if stored:
                clients = federation.clients
                newest, progress = newest_checkpoint(folder, recipe.fingerprint)
                check_names(newest, progress.trainers, clients.population_names)
                if progress.round < metrics["rounds"]:  # else it may be newer, of a run that goes on
                    _check_round(folder, metrics, progress)
                clients.state = CheckpointState(newest, progress, clients.model.layout, clients.state, clients.names)
            elif federation.clients.method.trains:
                progress = federation.restore(folder, recipe.fingerprint)
                _check_round(folder, metrics, progress)  # the checkpoint may be older than the metrics
                federation.clients.restore_best_round()  # if the recipe selects the round with the lowest loss
            if not stored:
                local = build_local(federation, recipe, run_data)
            if local is not None:
                local.restore(folder / LOCAL, recipe.fingerprint)
            shared = saved_shared_models(federation.clients, folder)
    settings = run_data.kind.settings(run_data)  # for samples their shapes, classes, loss and net
    return Run(
        folder=folder,
        recipe=recipe,
        metrics=metrics,
        federation=federation,
        local=local,
        shared=shared,
        settings=settings,
    )


def _can_stay_stored(folder: Path, recipe: Recipe, method: Method, metrics: JsonMapping) -> bool:
    """Return whether the models of a run in memory are rows of its checkpoint, which can be read one by one.

    Args:
        folder: The run folder.
        recipe: Settings of the run.
        method: The method of the recipe.
        metrics: The content of ``metrics.json``.
    """
    is_trained_as_is = method.trains and not method.client.finetunes and not method.placement.pooled
    if recipe.runtime.store != MEMORY or "served" in metrics or not is_trained_as_is or not list_checkpoints(folder):
        return False
    _newest, progress = newest_checkpoint(folder, recipe.fingerprint)
    return not progress.shards and not progress.population


def _check_method(folder: Path, recipe: Recipe, passed: object) -> None:
    """Check that the passed method, if there is one, is the run's, and that the run's method is registered.

    Args:
        folder: The run folder.
        recipe: Settings of the run (its recipe).
        passed: The name of the passed method, or a mapping with its ``name`` and settings; None if none was passed.

    Raises:
        RunError: The passed method is not the run's, or the run's method is not registered.
    """
    name = passed["name"] if isinstance(passed, Mapping) else passed
    is_other_method = name is not None and name != recipe.method.name
    if is_other_method:
        raise RunError(f"{folder}: method: got {name!r}; allowed: the run's, {recipe.method.name!r}")
    check_origin(folder, recipe.method.name)  # raises if the method is not registered


def _check_round(folder: Path, metrics: JsonMapping, progress: Progress) -> None:
    """Check that the restored checkpoint is of the last round, which ``metrics.json`` describes.

    Args:
        folder: The run folder.
        metrics: The content of ``metrics.json``.
        progress: Progress at the restored checkpoint.

    Raises:
        RunError: The checkpoint is of another round.
    """
    if progress.round == metrics["rounds"]:
        return
    newest_checkpoint = list_checkpoints(folder)[-1]
    raise RunError(
        f"{newest_checkpoint}: the run has {metrics['rounds']} rounds, its last checkpoint {progress.round}; "
        f"{resume_command(folder)} continues from there"
    )
