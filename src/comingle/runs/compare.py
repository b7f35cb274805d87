"""Comparisons: several methods and seeds on the same users, base and budget."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from types import MappingProxyType
from typing import Any, TypeVar

from comingle.config import Recipe
from comingle.config.files import load_recipe, read_text
from comingle.config.sections import MethodSection
from comingle.methods import REGISTRY, make, settings_in_comparison, settings_of
from comingle.methods.user_files import check_origin
from comingle.reports.comparisons import (
    ComparisonTable,
    baseline_methods,
    baseline_of,
    folder_name,
    methods_in_table,
    require_same_users,
)
from comingle.reports.tables import write_comparison
from comingle.runs.folders import check_folder, first_difference, with_bos_of_run
from comingle.runs.given import NOTHING, Given
from comingle.runs.progress import Reporter, loading, reporting
from comingle.runs.results import Run
from comingle.runs.session import prepare, run_in
from comingle.training.client import Clients
from comingle.training.events import Observer
from comingle.training.kinds.base import RunData, check_recipe
from comingle.utils.errors import ComingleError, RecipeError, RunError, list_names
from comingle.utils.inputs import check_base, check_users, read_inputs, recorded_date
from comingle.utils.records import read_metrics
from comingle.utils.terminal import errors

_log = logging.getLogger("comingle")

Group = TypeVar("Group")
Result = TypeVar("Result")


def in_processes(
    groups: Sequence[Group],
    work: Callable[[Group], Iterable[Result]],
    *,
    jobs: int,
    label: Callable[[Group], str] = str,
) -> Iterator[Result]:
    """Run ``work`` for every group in a process of its own; yield all results in order of arrival.

    Each process has its own GPU as long as there are enough. A group that fails does not stop the others: its error is
    raised when they are done. An interrupt, such as Ctrl-C, stops the processes at once, and what they have written can
    be resumed. The processes also end when this process is killed.

    Args:
        groups: The groups, such as lists of runs; they must pickle.
        work: Yields the results of a group; it and the results must pickle.
        jobs: The number of processes at a time.
        label: Returns the name of a group for the message if its process ends without an error, for example killed.

    Raises:
        ComingleError: A group failed; the error of the first one is raised.
    """
    context = multiprocessing.get_context("spawn")  # a fork would copy torch's threads in an unknown state
    waiting, errors_of_groups = list(groups), []
    running: dict[Connection, tuple[BaseProcess, Group, int]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                group = waiting.pop(0)
                # The lowest number that no running process has; it selects the GPU.
                slot = min(set(range(jobs)) - {used for *_, used in running.values()})
                receiver, sender = context.Pipe(duplex=False)
                num_processes = min(jobs, len(groups))  # these share the cores
                process = context.Process(target=_work_group, args=(sender, work, group, num_processes, slot))
                process.start()
                sender.close()  # so that the end of the process ends the connection
                running[receiver] = process, group, slot
            readable = wait(list(running))
            for connection in [connection for connection in running if connection in readable]:  # oldest first
                try:
                    received = connection.recv()
                except EOFError:  # the process has ended
                    process, group, _ = running.pop(connection)
                    process.join()
                    if process.exitcode:
                        errors_of_groups.append(RunError(_process_error(label(group), process.exitcode)))
                    continue
                if isinstance(received, Exception):
                    errors_of_groups.append(received)
                else:
                    yield received
    finally:
        for process, *_ in running.values():
            process.terminate()
        for process, *_ in running.values():
            process.join()
    if errors_of_groups:
        raise errors_of_groups[0]


def _process_error(group: str, code: int) -> str:
    """Return the message for a process that ended without an error of its own, for example for lack of memory.

    Args:
        group: The name of the group of runs.
        code: The exit status; the negative number of a signal if one killed the process.
    """
    how = f"was killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"ended with status {code}"
    return f"{group}: its process {how}; continue with --resume; fewer --jobs need less memory"


def _work_group(
    connection: Connection, work: Callable[[Any], Iterable[object]], group: object, jobs: int, slot: int
) -> None:
    """Work on a group in a child process; send its results, and errors that a user can correct, to the parent.

    Args:
        connection: Connects to the parent.
        work: Yields the results of a group.
        group: The group.
        jobs: The number of processes at a time, which share the cores.
        slot: The number of this process among those that run, which selects its GPU.
    """
    import torch

    from comingle.methods.user_files import load_files_of_command
    from comingle.runs.distributed import take_gpu

    Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent stops this one
    take_gpu(slot)
    torch.set_num_threads(max(1, torch.get_num_threads() // jobs))
    try:
        load_files_of_command()  # users' files that define methods, for example; a new process has not loaded them
        for result in work(group):
            connection.send(result)
    except (ComingleError, OSError, MemoryError) as error:
        connection.send(error)


def _end_with_parent() -> None:
    """Wait until the parent process is gone, for example killed, then end this process. Runs in a thread of its own."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])  # returns when the parent ends
        os.kill(os.getpid(), signal.SIGTERM)


Key = tuple[str, int]
"""The label of a method (its name, or its name and settings) and a seed."""


def folders_of(recipes: Mapping[Key, Recipe], folder: Path) -> dict[Key, Path]:
    """Return the folder of each run of a comparison.

    Args:
        recipes: The runs, by label of the method and seed.
        folder: The folder of the comparison.
    """
    return {(label, seed): folder / f"{folder_name(label)}-seed{seed}" for label, seed in recipes}


def labels_of(recipes: Mapping[Key, Recipe], folder: Path) -> dict[Path, str]:
    """Return the label of the method of each run, by the folder of the run.

    Args:
        recipes: The runs, by label of the method and seed.
        folder: The folder of the comparison.
    """
    return {run_folder: label for (label, _seed), run_folder in folders_of(recipes, folder).items()}


def recipes_of(
    recipe: Recipe, methods: Sequence[Any], seeds: Sequence[int], for_all: Mapping[str, Any] = MappingProxyType({})
) -> dict[Key, Recipe]:
    """Return the recipe of each run of a comparison.

    The recipe's method has the recipe's settings, other methods their defaults. The label of a method is its name, or
    ``NAME:KEY=VALUE:...`` where it occurs with several settings. All problems are raised before any training.

    Args:
        recipe: The recipe of the comparison.
        methods: Names, ``NAME:KEY=VALUE:...``, or mappings of ``name`` and settings.
        seeds: The seeds.
        for_all: Settings by key. Each applies to all methods that have a setting of this name, except for methods that
            are given as a mapping.

    Returns:
        The recipes by label of the method and seed.

    Raises:
        RecipeError: A method occurs twice or is unknown, a setting or seed is wrong, each seed would evaluate other
            users, or a method cannot train the recipe's users.
    """
    if recipe.evaluation.users and len(set(seeds)) > 1:
        raise RecipeError(
            f"evaluation.users: got {recipe.evaluation.users} with {len(set(seeds))} seeds, each of which draws other "
            "users, so users cannot be compared across seeds; allowed: null (all users), or one seed"
        )
    parsed = [dict(method) if isinstance(method, Mapping) else parse_method(method) for method in methods]
    # A method that was passed as a mapping has all its settings. A method that was passed by name gets the recipe's
    # settings, if it is the recipe's method, and those in `for_all`; settings in its text take precedence.
    complete = [
        method if isinstance(as_passed, Mapping) else _with_settings(recipe, method["name"], for_all) | method
        for as_passed, method in zip(methods, parsed, strict=True)
    ]
    names = [method["name"] for method in parsed]
    labels = [method["name"] if names.count(method["name"]) == 1 else _label(method) for method in parsed]
    folder_names = [folder_name(label) for label in labels]
    for i, (label, name) in enumerate(zip(labels, folder_names, strict=True)):
        if name in folder_names[:i]:
            raise RecipeError(f"methods: got {label!r} twice; give each once")
    recipes = {
        (label, seed): recipe.with_changes({"method": method, "seed": seed}, where="--seeds")
        for seed in seeds
        for label, method in zip(labels, complete, strict=True)
    }
    _check_distinct({label: run_recipe.method for (label, _seed), run_recipe in recipes.items()})
    for run_recipe in recipes.values():
        check_recipe(run_recipe)
    return recipes


def _check_distinct(methods: Mapping[str, MethodSection]) -> None:
    """Check that no two methods of a comparison have the same name and the same settings.

    Defaults are filled in, so that a method with a default written out equals the same method without it.

    Args:
        methods: Name and settings of each method, by label.

    Raises:
        RecipeError: Two methods are the same.
    """
    complete = {label: (method.name, settings_of(method.name) | method.settings) for label, method in methods.items()}
    labels = list(complete)
    for i, label in enumerate(labels):
        same = next((other for other in labels[:i] if complete[other] == complete[label]), None)
        if same is not None:
            raise RecipeError(f"methods: {same!r} and {label!r} have the same settings; leave one out")


_OF_ONE_RUN = ("method", "seed")
"""Keys of a recipe in which the runs of a comparison may differ."""


def comparison_runs(folder: Path, finished: Mapping[Path, str], *, failed: Collection[Path] = ()) -> dict[Path, str]:
    """Return the runs for the table of a comparison: those of this command, and comparable ones of earlier commands.

    An earlier command may have written runs of other methods or seeds to the same folder. Such a run is comparable if
    it has finished, has the same base, data and users, and its recipe differs only in method and seed. A run that is
    not comparable is left out with a warning.

    Args:
        folder: The folder of the comparison.
        finished: The labels of this command's finished runs, by run folder.
        failed: Folders of this command's runs that failed, which are left out without a warning.

    Returns:
        The labels by run folder: this command's methods first, the others as in the last table, and each method's runs
        in the order of the seeds.
    """
    earlier_labels = {folder_name(label): label for label in methods_in_table(folder)}
    comparable = _ComparableRuns(finished)
    for path in sorted(file.parent for file in folder.glob("*/recipe.yaml")):
        if path in finished or path in failed:
            continue
        try:
            comparable.add(path, earlier_labels)
        except (ComingleError, OSError) as error:
            _log.warning("%s: left out of the comparison: %s", path, error)
    # Methods of this command come first, in its order, and then those of the last table.
    ranks = {label: rank for rank, label in enumerate(dict.fromkeys([*finished.values(), *earlier_labels.values()]))}

    def order_key(path: Path) -> tuple[int, str, int]:
        """Return the key by which runs are sorted: rank of the method, label for methods without a rank, and seed."""
        label = comparable.labels[path]
        return ranks.get(label, len(ranks)), label, comparable.recipes[path].seed

    return {path: comparable.labels[path] for path in sorted(comparable.labels, key=order_key)}


class _ComparableRuns:
    """The runs of a comparison, to which comparable ones of earlier commands can be added."""

    def __init__(self, finished: Mapping[Path, str]):
        """Start with the finished runs of this command.

        Args:
            finished: Labels of these runs, by run folder.
        """
        self.labels = dict(finished)
        """Labels by run folder."""
        self.recipes = {path: load_recipe(path) for path in finished}
        """Recipes by run folder."""
        self._first = next(iter(finished))  # the run that others are compared with
        self._users = set(read_metrics(self._first)["users"])  # names of the evaluated users

    def add(self, path: Path, labels: Mapping[str, str]) -> None:
        """Add a run of an earlier command, if it can be compared with the others.

        Args:
            path: The run folder.
            labels: Labels of methods in the comparison's last table. The keys are the names of run folders, without the
                ending ``-seedN``.

        Raises:
            ComingleError: The run cannot be compared with the others; the message is the reason.
        """
        if not (path / "metrics.json").is_file():
            raise RunError("it has not finished; run its method with --resume to add it")
        recipe, users = load_recipe(path), read_metrics(path)["users"]
        # All recipes of a comparison differ only in method and seed, so comparing with one of them suffices.
        if difference := first_difference(recipe, self.recipes[self._first], ignored=_OF_ONE_RUN):
            raise RunError(f"its recipe differs from that of {self._first.name}: {difference}")
        if set(users) != self._users:
            raise RunError(f"its users are {list_names(users)}, those of {self._first.name} {list_names(self._users)}")
        self._check_inputs(path, recipe)
        label = self._label_of_run(path, recipe, labels)
        for other, other_recipe in self.recipes.items():
            if recipe.fingerprint == other_recipe.fingerprint:
                raise RunError(f"its recipe and seed are those of {other.name}")
            if self.labels[other] == label and recipe.method != other_recipe.method:
                difference = first_difference(recipe, other_recipe, ignored=("seed",))
                raise RunError(f"its method has other settings than that of {other.name}: {difference}")
        if recipe.method.name in REGISTRY:  # warns if the method's file has changed; only reading needs no method
            check_origin(path, recipe.method.name)
        self.labels[path], self.recipes[path] = label, recipe

    def _check_inputs(self, path: Path, recipe: Recipe) -> None:
        """Check that a run can be compared: it used the same base, and the same data as another run with its seed.

        Runs with different seeds may split the data differently, so their data is not compared.

        Args:
            path: The run folder.
            recipe: The run's recipe.

        Raises:
            RunError: The run used another base or other data, or its folder has no record of them.
        """
        inputs, first_inputs = read_inputs(path), read_inputs(self._first)
        check_base(path, inputs, first_inputs.base, first_inputs.tokenizer)
        same_seed = next((other for other, known in self.recipes.items() if known.seed == recipe.seed), None)
        if same_seed is not None:
            check_users(path, inputs, read_inputs(same_seed))

    @staticmethod
    def _label_of_run(path: Path, recipe: Recipe, labels: Mapping[str, str]) -> str:
        """Return the label of a run of an earlier command: that in the table, or one that fits the folder's name."""
        stem = path.name.rpartition("-seed")[0] or path.name
        with_settings = _label({"name": recipe.method.name, **recipe.method.settings})
        return labels.get(stem) or (with_settings if folder_name(with_settings) == stem else stem)


def write_table(
    folder: Path, finished: Mapping[Path, str], against: str | None, *, failed: Collection[Path] = ()
) -> tuple[ComparisonTable, dict[Path, str]]:
    """Write the table of a comparison: the runs of this command, and comparable ones of earlier commands.

    Args:
        folder: The folder of the comparison.
        finished: The labels of this command's finished runs, by run folder.
        against: The baseline: methods separated by commas. The default baseline is used if one of these methods has no
            finished run.
        failed: Folders of this command's runs that failed.

    Returns:
        The table, and the labels of its runs by run folder.
    """
    labels = comparison_runs(folder, finished, failed=failed)
    has_baseline = against is not None and set(baseline_methods(against)) <= set(labels.values())
    baseline = against if has_baseline else None
    return write_comparison(folder, list(labels), baseline, labels), labels


def check_baseline(recipes: Mapping[Key, Recipe], folder: Path | None, against: str | None) -> None:
    """Check that the baseline is among the methods of a command, or of the table that its folder has.

    Args:
        recipes: The runs, by label of the method and seed.
        folder: The folder of the comparison; None without one.
        against: The baseline, or several methods separated by commas; None for the default one.

    Raises:
        RecipeError: The baseline is not among the methods.
    """
    earlier = [] if folder is None else methods_in_table(folder)
    methods = dict.fromkeys([*(label for label, _ in recipes), *earlier])  # each once
    baseline_of(list(methods), against)  # only for its error


def parse_method(text: str) -> dict[str, Any]:
    """Read ``NAME`` or ``NAME:KEY=VALUE:KEY=VALUE`` as a mapping of name and settings; values are read as YAML.

    Raises:
        RecipeError: A setting is not of the form KEY=VALUE or occurs twice, or its value is not YAML.
    """
    name, *settings = text.split(":")
    method: dict[str, Any] = {"name": name.strip()}
    for setting in settings:
        key, equals, value = (part.strip() for part in setting.partition("="))
        if not equals or not key or key in method:
            raise RecipeError(f"methods: {text!r}: give NAME:KEY=VALUE, each key once, such as fedprox:proximal=0.1")
        method[key] = read_text(value, f"methods: {text!r}")
    return method


def _label(method: Mapping[str, Any]) -> str:
    """Return a method's name and settings in the form ``NAME:KEY=VALUE:...`` that :func:`parse_method` reads.

    Args:
        method: Either a mapping of ``name`` and settings, or a mapping of ``name`` and ``settings`` as in a recipe.
    """
    settings = {**method, **method.get("settings", {})}
    pairs = [f"{key}={_compact(value)}" for key, value in settings.items() if key not in ("name", "settings")]
    return ":".join([str(method["name"]), *pairs])


def _compact(value: object) -> str:
    """Return a setting's value for a label: booleans as in YAML, no spaces and no quotes."""
    return str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "").replace("'", "")


def _with_settings(recipe: Recipe, name: str, for_all: Mapping[str, object]) -> dict[str, Any]:
    """Return a method's name with its settings: the recipe's if it is the recipe's method, and ``for_all``."""
    return {"name": name, **settings_in_comparison(name, recipe.method.name, recipe.method.settings, for_all)}


def compare_runs(
    recipes: Mapping[Key, Recipe],
    folder: Path | None,
    reporter: Reporter,
    *,
    resume: bool = False,
    force: bool = False,
    given: Given = NOTHING,
    ready: Callable[[RunData], None] = lambda run_data: None,
    among: Mapping[Key, Recipe] | None = None,
) -> Iterator[tuple[Key, Run | ComingleError]]:
    """Run recipes one after another, on demand, and yield each run or its error.

    The base is read once, the users' data once for each seed. A run that fails, for example because it diverges, yields
    its error and does not stop the others.

    Args:
        recipes: The runs.
        folder: The folder that has a folder for each run; None writes nothing.
        reporter: The progress reporter.
        resume: Whether to resume the runs that have started.
        force: Whether to replace existing run folders.
        given: Objects that a program passes instead of names and paths in the recipe.
        ready: Called with the data of the first seed before the first run.
        among: All runs of the comparison, if ``recipes`` are only some of them.

    Raises:
        ComingleError: A folder cannot be used, which is checked before anything is read; the base or the data cannot be
            used; or another seed leaves out other users, which is known when its data is read.
    """
    among = among or recipes
    # If one method needs validation data, users without it are skipped for all methods, which are then comparable.
    validates = any(make(run.method.name, **run.method.settings).client.needs_validation for run in among.values())
    folders = folders_of(recipes, folder) if folder is not None else {}
    recipes = with_bos_of_comparison(recipes, folders, resume=resume)
    resumed = check_folders(recipes, folders, resume=resume, force=force)
    started_folder = next((folders[key] for key in recipes if resumed.get(key)), None)
    if started_folder is not None:  # chat templates may write the date, which must be that of the first start
        given = replace(given, date=recorded_date(started_folder))
    run_data: RunData | None = None
    last_seed = None
    users_of_seeds: dict[str, list[str]] = {}
    for key, recipe in recipes.items():
        method, seed = key
        if run_data is None or seed != last_seed:
            is_first = run_data is None
            base = run_data.base if run_data else None
            with reporter.waiting(loading(recipe)):
                run_data, last_seed = prepare(recipe, base=base, validates=validates, given=given), seed
            # Seeds may split the data so that other users have too little of it and are skipped.
            if len({s for _, s in recipes}) > 1 and getattr(recipe.data, "on_small_user", "") == "skip":
                users_of_seeds[f"seed {seed}"] = sorted(run_data.users.names)
                require_same_users(list(users_of_seeds.items()))
            if is_first:
                ready(run_data)
        title = f"run {list(among).index(key) + 1} of {len(among)} · {method}, seed {seed}"

        # The default value keeps this run's `title` in the function when the loop goes on to the next run.
        def make_observers(clients: Clients, title: str = title) -> list[Observer]:
            return [reporter.watch(clients, title)]

        run_folder, resumes = folders.get(key), resumed.get(key, False)
        try:
            result = run_in(run_folder, recipe, run_data, resume=resumes, force=force, observers=make_observers)
        except ComingleError as error:
            result = error
        yield key, result


def with_bos_of_comparison(
    recipes: Mapping[Key, Recipe], folders: Mapping[Key, Path], *, resume: bool
) -> Mapping[Key, Recipe]:
    """Return the recipes of a comparison to resume, all with begin-of-text tokens or all without.

    Older versions of this package added no begin-of-text tokens. If an older version started one of the runs, all runs
    go without these tokens, since otherwise the runs could not be compared.

    Args:
        recipes: The runs.
        folders: The folder of each run.
        resume: Whether the comparison is resumed; if not, the recipes are returned unchanged.
    """
    # The recipe of each run, with the setting of the run in the folder if there is one.
    started = {key: with_bos_of_run(run_folder, recipes[key], resume=resume) for key, run_folder in folders.items()}
    # `with_bos_of_run` returns a new recipe only for runs of an older version.
    older_run = next((folders[key] for key, recipe in started.items() if recipe is not recipes[key]), None)
    if older_run is None:
        return recipes
    return {key: with_bos_of_run(older_run, recipe, resume=True) for key, recipe in recipes.items()}


def check_folders(
    recipes: Mapping[Key, Recipe], folders: Mapping[Key, Path], *, resume: bool, force: bool
) -> dict[Key, bool]:
    """Check that all runs of a comparison may be written to their folders; return for each run whether it is resumed.

    Args:
        recipes: The runs.
        folders: The folder of each run.
        resume: Whether to resume the runs that have started.
        force: Whether to replace existing run folders.

    Raises:
        RunError: One of the folders cannot be written to.
    """
    resumed = {key: resume and (run_folder / "recipe.yaml").exists() for key, run_folder in folders.items()}
    for key, run_folder in folders.items():
        check_folder(run_folder, recipes[key], resume=resumed[key], force=force)
    return resumed


Ended = tuple[Key, dict[str, Any] | ComingleError]
"""A run that has ended, with its metrics or the error that stopped it."""


def compare_in_processes(
    recipes: Mapping[Key, Recipe],
    folder: Path,
    *,
    jobs: int,
    resume: bool = False,
    force: bool = False,
    quiet: bool = False,
    ready: Callable[[RunData], None] = lambda run_data: None,
) -> Iterator[Ended]:
    """Run recipes in several processes; yield the metrics or the error of each run, in the order in which they end.

    Runs of a seed share a process, which reads the data once, unless there are more jobs than seeds. Progress is
    printed only if stderr is not a terminal, where the bars of several processes would write over each other.

    Args:
        recipes: The runs.
        folder: The folder that has a folder for each run.
        jobs: The number of runs at a time.
        resume: Whether to resume the runs that have started.
        force: Whether to replace existing run folders.
        quiet: Whether to print no progress.
        ready: Function that is called with the data of the first seed before the first run. The function must pickle,
            since it is sent to the process of this run.

    Raises:
        ComingleError: There is a problem that concerns all runs, such as data that cannot be read.
    """
    recipes = with_bos_of_comparison(recipes, folders_of(recipes, folder), resume=resume)
    check_folders(recipes, folders_of(recipes, folder), resume=resume, force=force)
    silent = quiet or errors.is_terminal
    work = partial(_run_group, among=recipes, folder=folder, resume=resume, force=force, quiet=silent, ready=ready)
    yield from in_processes(split_by_seed(list(recipes), jobs), work, jobs=jobs, label=_label_of)


def split_by_seed(keys: Sequence[Key], jobs: int) -> list[list[Key]]:
    """Return groups of runs; each group runs in one process, which reads the data once.

    Runs with the same seed have the same splits of the data, so they form a group. With more jobs than seeds, the runs
    of each seed are divided into several groups, so that no job is idle.

    Args:
        keys: Method and seed of each run.
        jobs: The number of processes at a time.
    """
    seeds = list(dict.fromkeys(seed for _, seed in keys))
    groups_per_seed = -(-jobs // len(seeds))  # rounded up
    groups: list[list[Key]] = []
    for seed in seeds:
        runs_of_seed = [key for key in keys if key[1] == seed]
        groups += [runs_of_seed[i::groups_per_seed] for i in range(groups_per_seed)]
    return [group for group in groups if group]


def _label_of(keys: Sequence[Key]) -> str:
    """Return the name of a group of runs, which have one seed, for an error message."""
    (_, seed), methods = keys[0], ", ".join(method for method, _ in keys)
    return f"{methods}, seed {seed}"


def _run_group(
    keys: Sequence[Key], among: Mapping[Key, Recipe], ready: Callable[[RunData], None], quiet: bool, **options: Any
) -> Iterator[Ended]:
    """Run some runs of a comparison one after another, in a process of their own, and yield their metrics or errors.

    The results are sent to the parent process, so they are metrics instead of runs with all models.

    Args:
        keys: The runs of the group.
        among: The recipes of all runs of the comparison, also of other groups.
        ready: Called with the data of the first seed, by the group that has the comparison's first run.
        quiet: Whether to print no progress.
        options: Options of :func:`compare_runs`.
    """
    has_first_run = keys[0] == next(iter(among))
    if has_first_run:
        options["ready"] = ready
    recipes = {key: among[key] for key in keys}
    with reporting(quiet=quiet) as reporter:
        for key, result in compare_runs(recipes, reporter=reporter, among=among, **options):
            yield key, result if isinstance(result, ComingleError) else result.metrics
