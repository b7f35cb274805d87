"""Comparisons: several methods and seeds on the same users, base and budget."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import fmean
from threading import Thread
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from comingle.config import Recipe
from comingle.config.files import load_recipe, read_text
from comingle.config.sections import MethodSection
from comingle.methods import REGISTRY, make, settings_in_comparison, settings_of
from comingle.methods.user_files import check_origin
from comingle.reports.comparisons import (
    TUNING,
    ComparisonTable,
    TriedCandidate,
    TunedMethod,
    Tuning,
    baseline_methods,
    baseline_of,
    edge_notes,
    folder_name,
    methods_in_table,
    read_tuning,
    require_same_users,
    tuned_keys,
)
from comingle.reports.formatting import format_duration
from comingle.reports.tables import write_comparison
from comingle.runs.folders import check_folder, first_difference, with_bos_of_run
from comingle.runs.given import NOTHING, Given
from comingle.runs.progress import Reporter, loading, reporting
from comingle.runs.results import Run
from comingle.runs.session import prepare, require_specialists, run_in
from comingle.training.client import Clients, finetuned
from comingle.training.events import Observer
from comingle.training.kinds.base import RunData, check_recipe
from comingle.utils.errors import ComingleError, RecipeError, RunError, did_you_mean, list_names
from comingle.utils.inputs import check_base, check_users, read_inputs, recorded_date
from comingle.utils.records import read_metrics, write_json
from comingle.utils.terminal import errors

_log = logging.getLogger("comingle")

Group = TypeVar("Group")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class _GroupProcess(Generic[Group]):
    """A running process and the group that it works on."""

    process: BaseProcess
    group: Group
    slot: int
    """Number from 0 that no other running process has; it selects the GPU."""


def in_processes(
    groups: Sequence[Group],
    work: Callable[[Group], Iterable[Result]],
    *,
    jobs: int,
    label: Callable[[Group], str] = str,
) -> Iterator[Result]:
    """Run ``work`` for every group in its own process; yield all results in order of arrival.

    If a group fails, the other groups still finish, and then its error is raised. Ctrl-C stops all processes at once.

    Args:
        groups: The groups, such as lists of runs; they must pickle.
        work: Yields the results of a group; it and the results must pickle.
        jobs: The largest number of processes at a time.
        label: Returns the name of a group, for the error message if its process is killed.

    Raises:
        ComingleError: A group failed; the error of the first one is raised.
    """
    context = multiprocessing.get_context("spawn")  # a fork would copy torch's threads in an unknown state
    num_processes = min(jobs, len(groups))  # these share the cores
    waiting_groups = list(groups)
    errors_of_groups: list[Exception] = []
    running: dict[Connection, _GroupProcess[Group]] = {}  # by the connection that receives the results

    def start_process(group: Group) -> None:
        """Start a process that works on a group."""
        used_slots = {started.slot for started in running.values()}
        slot = min(set(range(jobs)) - used_slots)  # determines the process's GPU
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_work_group, args=(sender, work, group, num_processes, slot))
        process.start()
        sender.close()  # only the new process has it open now, so its end ends the connection
        running[receiver] = _GroupProcess(process=process, group=group, slot=slot)

    try:
        while waiting_groups or running:
            while waiting_groups and len(running) < jobs:
                start_process(waiting_groups.pop(0))
            readable = wait(list(running))
            readable_oldest_first = [connection for connection in running if connection in readable]
            for connection in readable_oldest_first:
                try:
                    result_or_error = connection.recv()
                except EOFError:  # the process has ended
                    ended = running.pop(connection)
                    ended.process.join()
                    exit_code = ended.process.exitcode
                    if exit_code:
                        errors_of_groups.append(RunError(_process_error(label(ended.group), exit_code)))
                    continue
                if isinstance(result_or_error, Exception):
                    errors_of_groups.append(result_or_error)
                else:
                    yield result_or_error
    finally:
        for started in running.values():
            started.process.terminate()
        for started in running.values():
            started.process.join()
    if errors_of_groups:
        raise errors_of_groups[0]


def _process_error(group: str, exit_code: int) -> str:
    """Return the error message for a process that was killed or crashed.

    Args:
        group: The name of the group of runs.
        exit_code: The exit status, such as 1; -9 if signal 9 killed the process.
    """
    if exit_code < 0:
        signal_number = -exit_code
        how = f"was killed by signal {signal_number} ({signal.strsignal(signal_number)})"
    else:
        how = f"ended with status {exit_code}"
    return f"{group}: its process {how}; continue with --resume; fewer --jobs need less memory"


def _work_group(
    connection: Connection, work: Callable[[Any], Iterable[object]], group: object, num_processes: int, slot: int
) -> None:
    """Run ``work`` for a group in a child process; send its results, or the error that stops it, to the parent.

    Args:
        connection: Connection to the parent process.
        work: Yields the results of a group.
        group: The argument of ``work``, such as a list of runs.
        num_processes: The number of processes that share the cores.
        slot: The number of the GPU to use, modulo the number of GPUs.
    """
    import torch

    from comingle.methods.user_files import load_files_of_command
    from comingle.runs.distributed import take_gpu

    Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent stops this one
    take_gpu(slot)
    torch.set_num_threads(max(1, torch.get_num_threads() // num_processes))
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


def folders_of(runs: Iterable[Key], folder: Path) -> dict[Key, Path]:
    """Return the folder of each run of a comparison, such as ``folder / "fedavg-seed0"`` for ``("fedavg", 0)``.

    Args:
        runs: Label of the method and seed of each run.
        folder: The folder of the comparison.
    """
    return {(label, seed): folder / f"{folder_name(label)}-seed{seed}" for label, seed in runs}


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
    """Return the recipe of each run of a comparison, by label of the method and seed.

    A label is a method's name, such as ``"fedprox"``; for a method that occurs several times, its name and settings,
    such as ``"fedprox:proximal=0.1"``. The recipe's method keeps the recipe's settings; others have their defaults.

    Args:
        recipe: The recipe of the comparison.
        methods: Names, ``NAME:KEY=VALUE:...``, or mappings of ``name`` and settings.
        seeds: Seeds; each method runs with each of them.
        for_all: Settings by key for all methods that have a setting of this name, except those passed as mappings.

    Raises:
        RecipeError: A method occurs twice or is unknown, a setting or seed is wrong, each seed would evaluate a
            different sample of users, or a method cannot train the recipe's users.
    """
    num_seeds = len(set(seeds))
    if recipe.evaluation.users and num_seeds > 1:
        raise RecipeError(
            f"evaluation.users: got {recipe.evaluation.users} with {num_seeds} seeds, each of which draws other "
            "users, so users cannot be compared across seeds; allowed: null (all users), or one seed"
        )
    parsed: list[dict[str, Any]] = []  # name and settings of each method as passed, for its label
    complete: list[dict[str, Any]] = []  # the same, with the settings of `recipe` and `for_all` added
    for method in methods:
        if isinstance(method, Mapping):
            parsed.append(dict(method))
            complete.append(dict(method))
        else:
            method_of_text = parse_method(method)
            name = method_of_text["name"]
            other_settings = settings_in_comparison(name, recipe.method.name, recipe.method.settings, for_all)
            parsed.append(method_of_text)
            # Settings in the text, such as "fedprox:proximal=0.1", take precedence.
            complete.append({**other_settings, **method_of_text})
    labels = _labels_of_methods(parsed)
    recipes: dict[Key, Recipe] = {}
    for seed in seeds:
        for label, method in zip(labels, complete, strict=True):
            recipes[label, seed] = recipe.with_changes({"method": method, "seed": seed}, where="--seeds")
    _check_distinct({label: run_recipe.method for (label, _seed), run_recipe in recipes.items()})
    for run_recipe in recipes.values():
        check_recipe(run_recipe)
        require_specialists(run_recipe)  # a comparison does not choose numbers of specialists
    return recipes


def _labels_of_methods(methods: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the label of each method: its name, or its name and settings if several methods have this name.

    Args:
        methods: The name and the passed settings of each method, such as ``{"name": "fedprox", "proximal": 0.1}``.

    Raises:
        RecipeError: Two methods have the same label, or labels that give the same folder name.
    """
    names = [method["name"] for method in methods]
    labels: list[str] = []
    for method in methods:
        occurs_once = names.count(method["name"]) == 1
        labels.append(method["name"] if occurs_once else _label_with_settings(method))
    seen_folder_names: set[str] = set()
    for label in labels:
        if folder_name(label) in seen_folder_names:
            raise RecipeError(f"methods: got {label!r} twice; give each once")
        seen_folder_names.add(folder_name(label))
    return labels


def _check_distinct(methods: Mapping[str, MethodSection]) -> None:
    """Check that no two methods of a comparison have the same name and the same settings, defaults included.

    Args:
        methods: Name and settings of each method, by label.

    Raises:
        RecipeError: Two methods are the same.
    """
    checked: dict[str, tuple[str, dict[str, Any]]] = {}  # name and all settings of each method so far, by label
    for label, method in methods.items():
        name_and_settings = (method.name, settings_of(method.name) | method.settings)
        for other_label, other in checked.items():
            if other == name_and_settings:
                raise RecipeError(f"methods: {other_label!r} and {label!r} have the same settings; leave one out")
        checked[label] = name_and_settings


_KEYS_OF_ONE_RUN = ("method", "seed")
"""Keys of a recipe in which the runs of a comparison may differ."""


def labels_for_table(folder: Path, finished: Mapping[Path, str], *, failed: Collection[Path] = ()) -> dict[Path, str]:
    """Return the labels of all runs for the table of a comparison, by run folder.

    The table has the runs of this command, and the runs of earlier commands in the same folder that have the same base,
    data and users. Other runs are left out with a warning.

    Args:
        folder: The folder of the comparison.
        finished: The labels of this command's finished runs, by run folder.
        failed: Folders of this command's runs that failed, which are left out without a warning.

    Returns:
        The labels: this command's methods first, the others in the order of the ``table.json`` that an earlier command
        wrote; runs of a method by seed.
    """
    table_labels = {folder_name(label): label for label in methods_in_table(folder)}
    comparable = _ComparableRuns(finished)
    for path in sorted(file.parent for file in folder.glob("*/recipe.yaml")):
        if path in finished or path in failed:
            continue
        try:
            comparable.add(path, table_labels)
        except (ComingleError, OSError) as error:
            _log.warning("%s: left out of the comparison: %s", path, error)
    # Methods of this command come first, in its order, and then those of the table that an earlier command wrote.
    ordered_labels = list(dict.fromkeys([*finished.values(), *table_labels.values()]))

    def order_key(path: Path) -> tuple[int, str, int]:
        """Return the sort key of a run: the position of its method (last if new), its label, and its seed."""
        label = comparable.labels[path]
        position = ordered_labels.index(label) if label in ordered_labels else len(ordered_labels)
        return position, label, comparable.recipes[path].seed

    return {path: comparable.labels[path] for path in sorted(comparable.labels, key=order_key)}


class _ComparableRuns:
    """The runs of a comparison, to which comparable ones of earlier commands can be added."""

    def __init__(self, finished: Mapping[Path, str]):
        """Start with the finished runs of this command; :meth:`add` adds runs of earlier commands, if comparable.

        Runs are comparable if their recipes differ only in method, seed and tuned keys, and they have the same users.

        Args:
            finished: Labels of these runs, by run folder.
        """
        self.labels = dict(finished)
        """Labels by run folder."""
        self.recipes = {path: load_recipe(path) for path in finished}
        """Recipes by run folder."""
        self._first = next(iter(finished))  # the run that others are compared with
        self._users = set(read_metrics(self._first)["users"])  # names of the evaluated users

    def add(self, path: Path, table_labels: Mapping[str, str]) -> None:
        """Add a run of an earlier command, if it can be compared with the others.

        Args:
            path: The run folder, such as ``fedprox-seed0``.
            table_labels: Labels in the ``table.json`` that an earlier command wrote, by name of the run folder without
                the seed, such as ``fedprox``; empty without such a table.

        Raises:
            ComingleError: The run cannot be compared with the others; the message is the reason.
        """
        if not (path / "metrics.json").is_file():
            raise RunError("it has not finished; run its method with --resume to add it")
        recipe = load_recipe(path)
        users = read_metrics(path)["users"]
        # All recipes of a comparison differ only in method, seed and tuned keys, so comparing with one suffices.
        first_recipe = self.recipes[self._first]
        tuned = {key: value_at(first_recipe, key) for key in tuned_keys(path.parent) if not key.startswith("method.")}
        untuned = recipe.with_changes(tuned) if tuned else recipe
        difference = first_difference(untuned, first_recipe, ignored=_KEYS_OF_ONE_RUN)
        if difference:
            raise RunError(f"its recipe differs from that of {self._first.name}: {difference}")
        if set(users) != self._users:
            raise RunError(f"its users are {list_names(users)}, those of {self._first.name} {list_names(self._users)}")
        self._check_inputs(path, recipe)
        label = self._label_of_run(path, recipe, table_labels)
        for other, other_recipe in self.recipes.items():
            if recipe.fingerprint == other_recipe.fingerprint:
                raise RunError(f"its recipe and seed are those of {other.name}")
            if self.labels[other] == label and recipe.method != other_recipe.method:
                difference = first_difference(recipe, other_recipe, ignored=("seed",))
                raise RunError(f"its method has other settings than that of {other.name}: {difference}")
        if recipe.method.name in REGISTRY:  # a table can also show a run whose method is not known here
            check_origin(path, recipe.method.name)  # warns if the Python file of the method has changed
        self.labels[path] = label
        self.recipes[path] = recipe

    def _check_inputs(self, path: Path, recipe: Recipe) -> None:
        """Check that a run used the same base as the first run, and the same data as a run with the same seed.

        Args:
            path: The run folder.
            recipe: Settings of the run (its recipe).

        Raises:
            RunError: The run used another base or other data, or its folder has no record of them.
        """
        inputs = read_inputs(path)
        first_inputs = read_inputs(self._first)
        check_base(path, inputs, first_inputs.base, first_inputs.tokenizer)
        # Runs with other seeds may split the data differently.
        with_same_seed = [other for other, other_recipe in self.recipes.items() if other_recipe.seed == recipe.seed]
        if with_same_seed:
            check_users(path, inputs, read_inputs(with_same_seed[0]))

    @staticmethod
    def _label_of_run(path: Path, recipe: Recipe, table_labels: Mapping[str, str]) -> str:
        """Return the label of the method of an earlier command's run, such as ``fedprox:proximal=0.1``.

        The first of these that exists:

        1. The label in the ``table.json`` that an earlier command wrote.
        2. The method's name and settings, if the run folder is named after both.
        3. The name of the run folder without the seed.

        Args:
            path: The run folder, such as ``fedprox-seed0``.
            recipe: Settings of the run (its recipe).
            table_labels: Labels in the ``table.json`` that an earlier command wrote, by name of the run folder without
                the seed, such as ``fedprox``; empty without such a table.
        """
        name_without_seed = path.name.rpartition("-seed")[0] or path.name
        if table_labels.get(name_without_seed):
            return table_labels[name_without_seed]
        label_with_settings = _label_with_settings({"name": recipe.method.name, **recipe.method.settings})
        if folder_name(label_with_settings) == name_without_seed:
            return label_with_settings
        return name_without_seed


def write_table(
    folder: Path, finished: Mapping[Path, str], against: str | None, *, failed: Collection[Path] = ()
) -> tuple[ComparisonTable, dict[Path, str]]:
    """Write the table of a comparison: the runs of this command, and comparable ones of earlier commands.

    Args:
        folder: The folder of the comparison.
        finished: The labels of this command's finished runs, by run folder.
        against: The baseline, such as ``"local,fedavg"``; None for the default baseline. The default baseline is also
            used if one of these methods has no finished run.
        failed: Folders of this command's runs that failed.

    Returns:
        The table, and the labels of its runs by run folder.
    """
    labels = labels_for_table(folder, finished, failed=failed)
    baseline = against
    if against is not None:
        finished_methods = set(labels.values())
        if not finished_methods.issuperset(baseline_methods(against)):
            baseline = None  # the default baseline
    table = write_comparison(folder, list(labels), baseline, labels)
    return table, labels


def check_baseline(recipes: Mapping[Key, Recipe], folder: Path | None, against: str | None) -> None:
    """Check that the baseline is one of the methods that run now, or of those in the table of an earlier command.

    Args:
        recipes: The runs, by label of the method and seed.
        folder: The folder of the comparison, which may have a table; None without a folder.
        against: The baseline, such as ``"local"`` or ``"local,fedavg"``; None for the default baseline.

    Raises:
        RecipeError: The baseline is not among the methods.
    """
    methods = [label for label, _seed in recipes]
    if folder is not None:
        methods += methods_in_table(folder)
    distinct_methods = list(dict.fromkeys(methods))
    baseline_of(distinct_methods, against)  # raises if the baseline is not among them


def parse_method(text: str) -> dict[str, Any]:
    """Read ``NAME`` or ``NAME:KEY=VALUE:KEY=VALUE`` as a mapping of name and settings; values are read as YAML.

    Raises:
        RecipeError: A setting is not of the form KEY=VALUE or occurs twice, or its value is not YAML.
    """
    name, *settings = text.split(":")
    method: dict[str, Any] = {"name": name.strip()}
    for setting in settings:
        key, equals, value = (part.strip() for part in setting.partition("="))
        is_key_and_value = key != "" and equals != ""
        if not is_key_and_value or key in method:
            raise RecipeError(f"methods: {text!r}: give NAME:KEY=VALUE, each key once, such as fedprox:proximal=0.1")
        method[key] = read_text(value, f"methods: {text!r}")
    return method


def _label_with_settings(method: Mapping[str, Any]) -> str:
    """Return a method's name and settings in the form ``NAME:KEY=VALUE:...`` that :func:`parse_method` reads.

    Args:
        method: For example ``{"name": "fedprox", "proximal": 0.1}``, or as in a recipe
            ``{"name": "fedprox", "settings": {"proximal": 0.1}}``.
    """
    settings = {key: value for key, value in method.items() if key not in ("name", "settings")}
    settings.update(method.get("settings", {}))
    pairs = [f"{key}={_compact(value)}" for key, value in settings.items()]
    return ":".join([str(method["name"]), *pairs])


def _compact(value: object) -> str:
    """Return a setting's value without spaces and quotes, for a label: ``[1,2]`` for ``[1, 2]``, ``true`` for True."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).replace(" ", "").replace("'", "")


def run_recipes(
    recipes: Mapping[Key, Recipe],
    folder: Path | None,
    reporter: Reporter,
    *,
    resume: bool = False,
    force: bool = False,
    given: Given = NOTHING,
    on_data: Callable[[RunData], None] = lambda run_data: None,
    all_recipes: Mapping[Key, Recipe] | None = None,
    validates: bool = False,
    are_candidates: bool = False,
) -> Iterator[tuple[Key, Run | ComingleError]]:
    """Run recipes one after another; yield each run, or the error that stopped it, such as a divergence.

    The base is read once, the users' data once for each seed.

    Args:
        recipes: The runs, by label of the method and seed.
        folder: The folder that has a folder for each run; None writes nothing.
        reporter: Shows progress to the user of the command.
        resume: Whether to resume the runs that have started.
        force: Whether to replace existing run folders.
        given: Objects that a program passes instead of names and paths in the recipe.
        on_data: Called with the data of the first seed before the first run.
        all_recipes: All runs of the comparison, if ``recipes`` are only some of them.
        validates: Whether users need validation data even if no method does.
        are_candidates: Whether the runs are candidates of :func:`tune_recipes`; their metrics then also have the mean
            validation loss.

    Raises:
        ComingleError: A folder, the base or the data cannot be used, or one seed skips other users than another seed.
    """
    if all_recipes is None:
        all_recipes = recipes
    # If one method needs validation data, users without it are skipped for all methods, so all have the same users.
    methods = [make(recipe.method.name, **recipe.method.settings) for recipe in all_recipes.values()]
    validates = validates or any(method.client.needs_validation for method in methods)
    folders: dict[Key, Path] = {}
    if folder is not None:
        folders = folders_of(recipes, folder)
    recipes = with_bos_of_comparison(recipes, folders, resume=resume)
    is_resumed = check_folders(recipes, folders, resume=resume, force=force)  # by run
    resumed_folders = [folders[key] for key in recipes if is_resumed.get(key)]
    if resumed_folders:  # chat templates may write the date, which must be that of the first start
        given = replace(given, date=recorded_date(resumed_folders[0]))
    first_run = next(iter(recipes), None)
    for key, run_data in _data_of_runs(recipes, reporter, validates=validates, given=given):
        if key == first_run:
            if are_candidates and not any(len(user.valid) for user in run_data.users):
                raise RecipeError(
                    "--tune: picks by validation loss, but no user has validation data; allowed: a valid split"
                )
            on_data(run_data)
        method_label, seed = key
        run_number = list(all_recipes).index(key) + 1
        noun = "candidate" if are_candidates else "run"
        title = f"{noun} {run_number} of {len(all_recipes)} · {method_label}, seed {seed}"

        # The default value keeps this run's `title` in the function when the loop goes on to the next run.
        def make_observers(clients: Clients, title: str = title) -> list[Observer]:
            return [reporter.watch(clients, title)]

        try:
            result = run_in(
                folders.get(key),
                recipes[key],
                run_data,
                resume=is_resumed.get(key, False),
                force=force,
                observers=make_observers,
            )
            if are_candidates:
                result.metrics[_VALID_LOSS] = _mean_valid_loss(result)
        except ComingleError as error:
            result = error
        yield key, result


def _data_of_runs(
    recipes: Mapping[Key, Recipe], reporter: Reporter, *, validates: bool, given: Given
) -> Iterator[tuple[Key, RunData]]:
    """Yield each run with its data, which is read when the first run of a seed needs it; the base is loaded once.

    Args:
        recipes: The runs, by label of the method and seed; runs of a seed follow each other.
        reporter: Shows progress to the user of the command.
        validates: Whether every user needs validation data.
        given: Objects that a program passes instead of names and paths in the recipe.

    Raises:
        ComingleError: The base or the data cannot be used, or one seed skips other users than another seed.
    """
    has_several_seeds = len({seed for _method, seed in recipes}) > 1
    run_data: RunData | None = None
    seed_of_data: int | None = None
    users_of_seeds: dict[str, list[str]] = {}
    for key, recipe in recipes.items():
        _method, seed = key
        if run_data is None or seed != seed_of_data:
            base = None if run_data is None else run_data.base
            with reporter.waiting(loading(recipe)):
                run_data = prepare(recipe, base=base, validates=validates, given=given)
            seed_of_data = seed
            skips_small_users = getattr(recipe.data, "on_small_user", "") == "skip"
            if has_several_seeds and skips_small_users:  # each seed splits the data, so it may skip other users
                users_of_seeds[f"seed {seed}"] = sorted(run_data.users.names)
                require_same_users(list(users_of_seeds.items()))
        yield key, run_data


def with_bos_of_comparison(
    recipes: Mapping[Key, Recipe], folders: Mapping[Key, Path], *, resume: bool
) -> Mapping[Key, Recipe]:
    """Return the recipes without begin-of-text (BOS) tokens if an older version, without them, started one of the runs.

    Otherwise resumed runs would change their data, or new ones would not be comparable with them.

    Args:
        recipes: The recipe of each run, by label of the method and seed.
        folders: The folder of each run.
        resume: Whether the comparison is resumed; if not, the recipes are returned unchanged.
    """
    for key, run_folder in folders.items():
        recipe = with_bos_of_run(run_folder, recipes[key], resume=resume)  # the same object if nothing changes
        was_started_by_older_version = recipe is not recipes[key]
        if was_started_by_older_version:  # treat all runs like this one, so that they stay comparable
            return {other: with_bos_of_run(run_folder, old, resume=True) for other, old in recipes.items()}
    return recipes


def check_folders(
    recipes: Mapping[Key, Recipe], folders: Mapping[Key, Path], *, resume: bool, force: bool
) -> dict[Key, bool]:
    """Check that all runs of a comparison may be written to their folders; return for each run whether it is resumed.

    Args:
        recipes: The recipe of each run, by label of the method and seed.
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


def run_recipes_in_processes(
    recipes: Mapping[Key, Recipe],
    folder: Path,
    *,
    jobs: int,
    resume: bool = False,
    force: bool = False,
    quiet: bool = False,
    on_data: Callable[[RunData], None] = lambda run_data: None,
    all_recipes: Mapping[Key, Recipe] | None = None,
    validates: bool = False,
    are_candidates: bool = False,
) -> Iterator[Ended]:
    """Run recipes in several processes; yield the metrics or the error of each run, in the order in which they end.

    Runs of a seed share a process, which reads the data once, unless there are more jobs than seeds. In a terminal no
    progress is shown, since the bars of several processes would overwrite each other.

    Args:
        recipes: The recipe of each run, by label of the method and seed.
        folder: The folder that has a folder for each run.
        jobs: The number of runs at a time.
        resume: Whether to resume the runs that have started.
        force: Whether to replace existing run folders.
        quiet: Whether to print no progress.
        on_data: Called with the data of the first seed before the first run, in the process of this run; it must
            pickle.
        all_recipes: As in :func:`run_recipes`.
        validates: As in :func:`run_recipes`.
        are_candidates: As in :func:`run_recipes`.

    Raises:
        ComingleError: There is a problem that concerns all runs, such as data that cannot be read.
    """
    folders = folders_of(recipes, folder)
    recipes = with_bos_of_comparison(recipes, folders, resume=resume)  # begin-of-text tokens as in a resumed run
    check_folders(recipes, folders, resume=resume, force=force)
    hides_progress = quiet or errors.is_terminal
    run_group = partial(
        _run_group,
        all_recipes=recipes,
        folder=folder,
        resume=resume,
        force=force,
        quiet=hides_progress,
        on_data=on_data,
        validates=validates,
        are_candidates=are_candidates,
    )
    groups = split_by_seed(list(recipes), jobs)
    yield from in_processes(groups, run_group, jobs=jobs, label=_group_name)


def split_by_seed(keys: Sequence[Key], jobs: int) -> list[list[Key]]:
    """Return groups of runs with the same seed, which read the same data; each group runs in one process.

    There is a group for each seed. With more jobs than seeds, the runs of each seed are divided into several groups.

    Args:
        keys: Method and seed of each run.
        jobs: The number of processes at a time.
    """
    keys_by_seed: dict[int, list[Key]] = {}
    for method, seed in keys:
        keys_by_seed.setdefault(seed, []).append((method, seed))
    groups_per_seed = math.ceil(jobs / len(keys_by_seed))
    groups: list[list[Key]] = []
    for keys_of_seed in keys_by_seed.values():
        num_groups = min(groups_per_seed, len(keys_of_seed))
        for first in range(num_groups):
            groups.append(keys_of_seed[first::groups_per_seed])  # runs 0, 2, 4 ... and 1, 3, 5 ... for two groups
    return groups


def _group_name(keys: Sequence[Key]) -> str:
    """Return the name of a group of runs with the same seed, such as ``"fedavg, local, seed 0"``."""
    methods = ", ".join(method for method, _seed in keys)
    _method, seed = keys[0]
    return f"{methods}, seed {seed}"


def _run_group(
    keys: Sequence[Key],
    all_recipes: Mapping[Key, Recipe],
    on_data: Callable[[RunData], None],
    quiet: bool,
    **options: Any,
) -> Iterator[Ended]:
    """Run a group of a comparison's runs one after another; yield each run's metrics, or the error that stopped it.

    Args:
        keys: The runs of the group.
        all_recipes: The recipes of all runs of the comparison, also of other groups.
        on_data: Called with the data of the first seed, but only in the group that has the comparison's first run.
        quiet: Whether to print no progress.
        options: Options of :func:`run_recipes`.
    """
    first_run = next(iter(all_recipes))
    if keys[0] == first_run:
        options["on_data"] = on_data
    recipes = {key: all_recipes[key] for key in keys}
    with reporting(quiet=quiet) as reporter:
        for key, result in run_recipes(recipes, reporter=reporter, all_recipes=all_recipes, **options):
            if isinstance(result, ComingleError):
                yield key, result
            else:
                yield key, result.metrics


# -------------------------------------------------------------------- tuning

_VALID_LOSS = "mean_valid_loss"
"""Key of the metrics of candidates, in memory only: the mean validation loss over users."""

_UNTUNED_KEYS = (
    "rounds",
    "local_steps",
    "local_epochs",
    "batch_size",
    "max_seconds_per_round",
    "context",
    "participation",
)
"""Keys of ``training`` with which candidates would differ in budget, or in the text that they are validated on."""


def _mean_valid_loss(run: Run) -> float | None:
    """Return the mean over users of the validation loss of a run's final models; None if it is not finite."""
    clients = run.federation.clients
    with finetuned(clients):  # if the method fine-tunes models for evaluation only
        mean = fmean(clients.validate().values())
    return mean if math.isfinite(mean) else None


def value_at(recipe: Recipe, dotted_key: str) -> Any:
    """Return the value of a key such as "training.rounds"; None if the recipe does not have it."""
    value: Any = recipe.model_dump(mode="json")
    if dotted_key.startswith("method."):
        key = dotted_key.removeprefix("method.")
        return (settings_of(recipe.method.name) | recipe.method.settings).get(key)
    for name in dotted_key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


class Candidate(NamedTuple):
    """A combination of candidate values for a method, and the recipe with them."""

    values: dict[str, Any]
    recipe: Recipe
    key: Key
    """Label of the candidate's run, such as "fedavg:learning_rate=0.003", and its seed."""


def candidates_of(recipes: Mapping[Key, Recipe], tune: Mapping[str, Sequence[Any]]) -> dict[str, list[Candidate]]:
    """Return the candidates of each method with the first seed, by label: all combinations of the values.

    Methods that train nothing, or have none of the keys, have no candidates.

    Args:
        recipes: The runs of the comparison, by label of the method and seed.
        tune: Candidate values by recipe key, such as ``{"training.experts.learning_rate": [1e-3, 3e-3]}``. A key
            ``method.KEY`` is for every method that has this setting.

    Raises:
        RecipeError: A key is unknown or would change the budget, a value is wrong or given twice, a key has fewer than
            two values, or users have no validation data that is not trained on.
    """
    for key, values in tune.items():
        _check_tuned_key(key, values, recipes)
    first_seed = next(seed for _label, seed in recipes)
    candidates: dict[str, list[Candidate]] = {}
    for (label, seed), recipe in recipes.items():
        if seed != first_seed or not make(recipe.method.name, **recipe.method.settings).trains:
            continue
        known_keys = settings_of(recipe.method.name)
        keys = [key for key in tune if not key.startswith("method.") or key.removeprefix("method.") in known_keys]
        if not keys:
            continue
        _check_validation(recipe)
        candidates[label] = []
        for values in product(*(tune[key] for key in keys)):
            changed = recipe.with_changes(dict(zip(keys, values, strict=True)), where="--tune")
            check_recipe(changed)
            as_read = {key: value_at(changed, key) for key in keys}
            if as_read in [other.values for other in candidates[label]]:
                raise RecipeError(f"--tune: got {_values_text(as_read)} twice; give each value once")
            candidates[label].append(Candidate(as_read, changed, _key_of_candidate(label, as_read, first_seed)))
    if not candidates:
        raise RecipeError(
            f"--tune: got {list_names(dict.fromkeys(label for label, _seed in recipes))}; none of them trains and has "
            f"a setting of {list_names(tune)}; leave it out"
        )
    return candidates


def _check_tuned_key(key: str, values: Sequence[Any], recipes: Mapping[Key, Recipe]) -> None:
    """Check that a key may be tuned and has two candidates or more; its existence is checked later.

    Args:
        key: A recipe key, such as "training.experts.learning_rate".
        values: Its candidate values.
        recipes: The runs of the comparison, by label of the method and seed.

    Raises:
        RecipeError: It may not be tuned, no method has it, a variant sets it, or there are fewer than two values.
    """
    section, _dot, name = key.partition(".")
    allowed = f"training.KEY, but not {', '.join(_UNTUNED_KEYS)}; adapters.KEY; floral.KEY; method.KEY"
    changes_budget = section == "training" and name in _UNTUNED_KEYS
    if changes_budget or section not in ("training", "adapters", "floral", "method") or not name:
        raise RecipeError(f"--tune {key}: candidates have equal data and budgets; allowed: {allowed}")
    if len(values) < 2:
        raise RecipeError(f"--tune {key}: got {len(values)} value; allowed: 2 or more, separated by commas")
    if section != "method":
        return
    known_keys = list(dict.fromkeys(known for recipe in recipes.values() for known in settings_of(recipe.method.name)))
    if name not in known_keys:
        known = ", ".join(known_keys) or "no settings"
        raise RecipeError(
            f"--tune {key}: no setting of these methods.{did_you_mean(name, known_keys)} Allowed: {known}"
        )
    for label, _seed in recipes:
        if name in parse_method(label):
            raise RecipeError(f"--tune {key}: {label!r} sets it; leave out one of them")


def _check_validation(recipe: Recipe) -> None:
    """Check that a run can be picked by its validation loss.

    Raises:
        RecipeError: It trains on the validation data.
    """
    try:
        # select: best has the same requirement: validation data that is not trained on
        check_recipe(recipe.with_changes({"evaluation.select": "best"}))
    except RecipeError as error:
        raise RecipeError(f"--tune: picks by validation loss, for which {error}") from None


def _key_of_candidate(label: str, values: Mapping[str, Any], seed: int) -> Key:
    """Return label and seed of the run of a candidate.

    Args:
        label: Label of the method.
        values: The candidate's values by recipe key.
        seed: The first seed.
    """
    return f"{label}:{_values_text(values)}", seed


def _values_text(values: Mapping[str, Any]) -> str:
    """Return candidate values as text, such as "learning_rate=0.003"; whole keys if their ends are equal."""
    names = [key.rpartition(".")[2] for key in values]
    if len(set(names)) < len(names):
        names = list(values)
    return ":".join(f"{name}={_compact(value)}" for name, value in zip(names, values.values(), strict=True))


class RunAll(Protocol):
    """A function that runs recipes in a folder, and yields the run, its metrics or its error for each."""

    def __call__(
        self,
        recipes: Mapping[Key, Recipe],
        folder: Path | None,
        *,
        all_recipes: Mapping[Key, Recipe] | None = None,
        validates: bool,
        are_candidates: bool = False,
    ) -> Iterable[tuple[Key, Run | dict[str, Any] | ComingleError]]:
        """Run the recipes; the options are those of :func:`run_recipes`."""
        ...


@dataclass(frozen=True, kw_only=True)
class TuningResult:
    """The result of :func:`tune_recipes`."""

    recipes: dict[Key, Recipe]
    """All runs of the comparison, with the picked values. Methods whose candidates all failed have the first seed."""
    outcomes: dict[Key, dict[str, Any] | ComingleError]
    """Metrics of each method's picked candidate, or the error of a method whose candidates all failed.

    Methods that an earlier command tuned are not in it.
    """
    record: Tuning
    """Candidates and picked values."""

    def outcomes_of_all_runs(
        self, folder: Path | None, run_all: RunAll
    ) -> Iterator[tuple[Key, Run | dict[str, Any] | ComingleError]]:
        """Yield the outcome of every run; train those that tuning did not train.

        Args:
            folder: The folder of the comparison; None writes nothing.
            run_all: Runs recipes.
        """
        yield from self.outcomes.items()
        remaining = {key: recipe for key, recipe in self.recipes.items() if key not in self.outcomes}
        if remaining:
            yield from run_all(remaining, folder, all_recipes=self.recipes, validates=True)


def tune_recipes(
    recipes: Mapping[Key, Recipe],
    tune: Mapping[str, Sequence[Any]],
    folder: Path | None,
    run_all: RunAll,
    *,
    resume: bool = False,
    force: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> TuningResult:
    """Train every candidate of every method with the first seed, and pick by mean validation loss over users.

    Runs of candidates are in ``folder / "tuning"``. The picked one becomes the method's run with the first seed.

    Args:
        recipes: The runs of the comparison, by label of the method and seed.
        tune: Candidate values by recipe key.
        folder: The folder of the comparison; None writes nothing.
        run_all: Runs recipes.
        resume: Whether to resume candidates that have started, and keep values that have been picked.
        force: Whether to replace existing run folders.
        say: Prints a line of progress.

    Raises:
        ComingleError: As :func:`candidates_of`; or the folder has a comparison that is neither resumed nor replaced, or
            was tuned otherwise.
    """
    candidates = candidates_of(recipes, tune)
    first_seed = next(seed for _label, seed in recipes)
    record: Tuning = {"seed": first_seed, "keys": _values_by_key(candidates, tune), "methods": {}}
    if folder is not None:
        record["methods"] = _earlier_picks(recipes, record, folder, candidates, resume=resume, force=force)
    untuned = {label: candidates[label] for label in candidates if label not in record["methods"]}
    num_remaining_runs = sum(label not in candidates or seed != first_seed for label, seed in recipes)
    outcomes = _train_candidates(untuned, folder, run_all, num_remaining_runs=num_remaining_runs, say=say)

    picked_outcomes: dict[Key, dict[str, Any] | ComingleError] = {}
    failed: list[str] = []
    for label, method_candidates in untuned.items():
        tried = [_tried(candidate, outcomes[candidate.key]) for candidate in method_candidates]
        index = _index_of_lowest_loss(tried)
        if index is None:
            picked_outcomes[label, first_seed] = _no_finite_loss_error(method_candidates, outcomes)
            failed.append(label)
            continue
        picked = method_candidates[index]
        record["methods"][label] = TunedMethod(picked=picked.values, candidates=tried)
        metrics = outcomes[picked.key]
        assert isinstance(metrics, dict)
        picked_outcomes[label, first_seed] = {key: value for key, value in metrics.items() if key != _VALID_LOSS}
    if folder is not None:
        _write_picks(folder, record, recipes, force=force)
    new_methods = {label: method for label, method in record["methods"].items() if label in untuned}
    for note in edge_notes({**record, "methods": new_methods}):
        _log.warning("--tune: %s", note)
    return TuningResult(recipes=_with_picks(recipes, record, failed), outcomes=picked_outcomes, record=record)


def _values_by_key(
    candidates: Mapping[str, Sequence[Candidate]], tune: Mapping[str, Sequence[Any]]
) -> dict[str, list[Any]]:
    """Return the distinct values of each tuned key as the recipes read them: 0.001 for "1e-3".

    Args:
        candidates: The candidates of each method.
        tune: Candidate values by recipe key, for the order of the keys.
    """
    values_by_key: dict[str, list[Any]] = {key: [] for key in tune}
    for candidate in chain.from_iterable(candidates.values()):
        for key, value in candidate.values.items():
            if value not in values_by_key[key]:
                values_by_key[key].append(value)
    return values_by_key


def _train_candidates(
    candidates: Mapping[str, Sequence[Candidate]],
    folder: Path | None,
    run_all: RunAll,
    *,
    num_remaining_runs: int,
    say: Callable[[str], None],
) -> dict[Key, dict[str, Any] | ComingleError]:
    """Train candidates, with a line of progress for each; return their metrics or errors.

    Args:
        candidates: The candidates of each method.
        folder: The folder of the comparison; None writes nothing.
        run_all: Runs recipes.
        num_remaining_runs: Number of runs that follow, for the time that is left.
        say: Prints a line of progress.
    """
    to_run = {candidate.key: candidate.recipe for candidate in chain.from_iterable(candidates.values())}
    if not to_run:
        return {}
    outcomes: dict[Key, dict[str, Any] | ComingleError] = {}
    candidates_folder = None if folder is None else folder / TUNING
    started = time.perf_counter()
    for key, outcome in run_all(to_run, candidates_folder, validates=True, are_candidates=True):
        outcomes[key] = outcome.metrics if isinstance(outcome, Run) else outcome
        num_left = len(to_run) - len(outcomes) + num_remaining_runs
        time_left = (time.perf_counter() - started) / len(outcomes) * num_left
        label, seed = key
        line = f"{len(outcomes)} of {len(to_run)} candidates ended · {label}, seed {seed} · "
        line += _outcome_text(outcomes[key])
        say(f"{line} · about {format_duration(time_left)} left, with the {num_remaining_runs} runs that follow")
    return outcomes


def _outcome_text(outcome: dict[str, Any] | ComingleError) -> str:
    """Return the validation loss of a candidate, or why it failed, as text."""
    if isinstance(outcome, ComingleError):
        return f"failed: {outcome}"
    loss = outcome[_VALID_LOSS]
    return "validation loss not finite" if loss is None else f"validation loss {loss:.4f}"


def _tried(candidate: Candidate, outcome: dict[str, Any] | ComingleError) -> TriedCandidate:
    """Return the record of a candidate: its values, and its validation loss or error."""
    if isinstance(outcome, ComingleError):
        return {"values": candidate.values, "mean_valid_loss": None, "error": str(outcome)}
    return {"values": candidate.values, "mean_valid_loss": outcome[_VALID_LOSS]}


def _index_of_lowest_loss(tried: Sequence[TriedCandidate]) -> int | None:
    """Return the index of the candidate with the lowest validation loss, the first of equal ones; None without any."""
    losses = {index: loss for index, one in enumerate(tried) if (loss := one["mean_valid_loss"]) is not None}
    return min(losses, key=lambda index: losses[index], default=None)


def _no_finite_loss_error(
    candidates: Sequence[Candidate], outcomes: Mapping[Key, dict[str, Any] | ComingleError]
) -> RunError:
    """Return the error of a method whose candidates have no finite loss.

    Args:
        candidates: The candidates of the method.
        outcomes: Metrics or error of each candidate.
    """
    text = _outcome_text(outcomes[candidates[0].key])
    return RunError(f"no candidate of --tune has a finite loss; {_values_text(candidates[0].values)}: {text}")


def _with_picks(recipes: Mapping[Key, Recipe], record: Tuning, failed: Collection[str]) -> dict[Key, Recipe]:
    """Return the runs of a comparison with the picked values.

    Args:
        recipes: The runs, by label of the method and seed.
        record: The picked values.
        failed: Labels of the methods whose candidates all failed, which keep their first seed only.
    """
    tuned: dict[Key, Recipe] = {}
    for (label, seed), recipe in recipes.items():
        method = record["methods"].get(label)
        if label not in failed or seed == record["seed"]:
            tuned[label, seed] = recipe.with_changes(method["picked"], where="--tune") if method else recipe
    return tuned


def _write_picks(folder: Path, record: Tuning, recipes: Mapping[Key, Recipe], *, force: bool) -> None:
    """Write the record of the tuning, and move the runs of picked candidates to the folders of their methods.

    Args:
        folder: The folder of the comparison.
        record: Candidates and picked values.
        recipes: The runs of the comparison; other methods in the record stay where they are.
        force: Whether to replace run folders.

    Raises:
        RunError: The folder of a method has another run, which is not to be replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{TUNING}.json", record)
    targets = folders_of(recipes, folder)
    for label, method in record["methods"].items():
        key = label, record["seed"]
        if key in recipes:
            candidate_key = _key_of_candidate(label, method["picked"], record["seed"])
            source = folders_of([candidate_key], folder / TUNING)[candidate_key]
            target = targets[key]
            if not source.exists():  # an earlier command has moved it
                continue
            if target.exists() and not force:  # --force was interrupted before it replaced the run
                raise RunError(f"{target}: is not the picked run, which is in {source}; --force replaces it")
            if target.exists():
                shutil.rmtree(target)
            source.rename(target)


def _earlier_picks(
    recipes: Mapping[Key, Recipe],
    record: Tuning,
    folder: Path,
    candidates: Collection[str],
    *,
    resume: bool,
    force: bool,
) -> dict[str, Any]:
    """Return the methods of a resumed comparison that have been tuned; check that its folder may be written to.

    Args:
        recipes: The runs of the comparison, by label of the method and seed.
        record: Candidates and seed of this command.
        folder: The folder of the comparison.
        candidates: Labels of the methods that have candidates.
        resume: Whether to resume the comparison.
        force: Whether to replace its runs.

    Raises:
        RunError: The folder has a comparison that is neither resumed nor replaced, or was tuned otherwise.
    """
    earlier = read_tuning(folder)
    file = folder / f"{TUNING}.json"
    if not resume:
        if earlier is not None and not force:
            raise RunError(
                f"{file}: exists; --resume continues the comparison, --force replaces it, --out names another"
            )
        check_folders(recipes, folders_of(recipes, folder), resume=False, force=force)
        return {}
    if earlier is not None:
        for name in ("seed", "keys"):
            if earlier[name] != record[name]:
                raise RunError(f"{file}: --tune: {name} were {earlier[name]} and are {record[name]}; use another --out")
    tuned = {} if earlier is None else dict(earlier["methods"])
    for key, run_folder in folders_of(recipes, folder).items():
        if key[0] in candidates and key[0] not in tuned and run_folder.exists():
            raise RunError(f"{run_folder}: exists and was not tuned; use another --out")
    return tuned
