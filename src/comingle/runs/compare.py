"""Comparisons: several methods and seeds on the same users, base and budget."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from types import MappingProxyType
from typing import Any, TypeVar

from comingle.config import Recipe
from comingle.config.files import read_text
from comingle.data.populations import names_of
from comingle.methods import make, settings_in_comparison, settings_of
from comingle.reports.comparisons import folder_name, require_same_users
from comingle.runs.folders import as_begun, check_folder
from comingle.runs.given import NOTHING, Given
from comingle.runs.progress import LOADING, Reporter, reporting
from comingle.runs.results import Run
from comingle.runs.session import prepare, run_in
from comingle.training.client import Clients
from comingle.training.events import Observer
from comingle.training.kinds.base import RunData, check_recipe
from comingle.utils.errors import ComingleError, RecipeError, RunError
from comingle.utils.inputs import recorded_date
from comingle.utils.terminal import errors

Group = TypeVar("Group")
Found = TypeVar("Found")


def in_processes(
    groups: Sequence[Group], work: Callable[[Group], Iterable[Found]], *, jobs: int, told: Callable[[Group], str] = str
) -> Iterator[Found]:
    """What ``work`` yields of every group, as it comes, ``jobs`` groups at a time; everything must pickle.

    Where there are GPUs each process has one of its own, as far as they suffice.

    A group that fails does not stop the others: its error is raised when they are done. Whoever stops here, as with
    Ctrl-C, stops the processes at once, and what they have written can be resumed; they end, too, when this process
    is killed.

    Raises:
        ComingleError: of the first group that failed; ``told`` names one whose process just ended.
    """
    context = multiprocessing.get_context("spawn")  # a fork would copy torch's threads in an unknown state
    left, failed = list(groups), []
    running: dict[Connection, tuple[BaseProcess, Group, int]] = {}
    try:
        while left or running:
            while left and len(running) < jobs:
                group = left.pop(0)
                place = min(set(range(jobs)) - {taken for *_, taken in running.values()})
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_work_group, args=(theirs, work, group, min(jobs, len(groups)), place))
                process.start()
                theirs.close()
                running[ours] = process, group, place
            ready = wait(list(running))
            for connection in [one for one in running if one in ready]:
                try:
                    found = connection.recv()
                except EOFError:
                    process, group, _ = running.pop(connection)
                    process.join()
                    failed += [RunError(_ended(told(group), process.exitcode))] if process.exitcode else []
                    continue
                if isinstance(found, Exception):
                    failed.append(found)
                else:
                    yield found
    finally:
        for process, *_ in running.values():
            process.terminate()
        for process, *_ in running.values():
            process.join()
    if failed:
        raise failed[0]


def _ended(group: str, code: int) -> str:
    how = f"was killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"ended with status {code}"
    return f"{group}: its process {how}; --resume goes on, and fewer --jobs need less memory"


def _work_group(
    connection: Connection, work: Callable[[Any], Iterable[object]], group: object, jobs: int, place: int
) -> None:
    """In a process of its own: send what comes, and what a user can do something about."""
    import torch

    from comingle.methods.user_files import load_files_of_command
    from comingle.runs.distributed import take_gpu

    Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; whoever started us stops us
    take_gpu(place)
    torch.set_num_threads(max(1, torch.get_num_threads() // jobs))
    try:
        load_files_of_command()
        for found in work(group):
            connection.send(found)
    except (ComingleError, OSError, MemoryError) as error:
        connection.send(error)


def _end_with_parent() -> None:
    """End this process as soon as whoever started it is gone, killed perhaps, and can no longer end it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)


Key = tuple[str, int]
"""A method, by its name or by its name and settings, and a seed."""


def folders_of(recipes: Mapping[Key, Recipe], folder: Path) -> dict[Key, Path]:
    """Where each run of a comparison is."""
    return {(label, seed): folder / f"{folder_name(label)}-seed{seed}" for label, seed in recipes}


def labels_of(recipes: Mapping[Key, Recipe], folder: Path) -> dict[Path, str]:
    """Return the label of each run's folder."""
    return {place: label for (label, _), place in folders_of(recipes, folder).items()}


def recipes_of(
    recipe: Recipe, methods: Sequence[Any], seeds: Sequence[int], for_all: Mapping[str, Any] = MappingProxyType({})
) -> dict[Key, Recipe]:
    """The recipe of each run. A method is a name, ``NAME:KEY=VALUE:...``, or a mapping of ``name`` and settings. The
    recipe's own method has its settings, another its defaults; ``for_all`` goes to whichever has such a setting. A
    method that is there once is called by its name, one with several settings by ``NAME:KEY=VALUE:...``.

    Raises:
        RecipeError: a method twice or unknown, a wrong setting or seed, other users with each seed, or a method for
            other users: said before the first hour of training.
    """
    if recipe.evaluation.users and len(set(seeds)) > 1:
        raise RecipeError(
            f"evaluation.users: {recipe.evaluation.users} with {len(set(seeds))} seeds, each of which draws others, so "
            "that nobody can be held against itself; allowed: all users (null), or one seed"
        )
    given = [dict(m) if isinstance(m, Mapping) else parse_method(m) for m in methods]
    chosen = [
        m if isinstance(written, Mapping) else _method(recipe, m["name"], for_all) | m
        for written, m in zip(methods, given, strict=True)
    ]
    names = [m["name"] for m in given]
    labels = [m["name"] if names.count(m["name"]) == 1 else _label(m) for m in given]
    places = [folder_name(label) for label in labels]
    for i, (label, place) in enumerate(zip(labels, places, strict=True)):
        if place in places[:i]:
            raise RecipeError(f"methods: {label!r} twice; each is compared once")
    recipes = {
        (label, s): recipe.with_changes({"method": m, "seed": s}, where="--seeds")
        for s in seeds
        for label, m in zip(labels, chosen, strict=True)
    }
    whole = {label: settings_of(one.method.name) | one.method.settings for (label, _), one in recipes.items()}
    for i, label in enumerate(labels):
        alike = (other for j, other in enumerate(labels[:i]) if names[j] == names[i] and whole[other] == whole[label])
        if same := next(alike, None):
            raise RecipeError(f"methods: {same!r} and {label!r} have the same settings; each is compared once")
    for one in recipes.values():
        check_recipe(one)
    return recipes


def parse_method(text: str) -> dict[str, Any]:
    """Read ``NAME`` or ``NAME:KEY=VALUE:KEY=VALUE`` as a mapping of name and settings; values are read as YAML.

    Raises:
        RecipeError: a setting is not of the form KEY=VALUE, is there twice, or its value is not YAML.
    """
    name, *settings = text.split(":")
    found: dict[str, Any] = {"name": name.strip()}
    for setting in settings:
        key, equals, value = (part.strip() for part in setting.partition("="))
        if not equals or not key or key in found:
            raise RecipeError(f"methods: {text!r}: give NAME:KEY=VALUE, each key once, as fedprox:proximal=0.1")
        found[key] = read_text(value, f"methods: {text!r}")
    return found


def _label(method: Mapping[str, Any]) -> str:
    """Return a method's name with the settings that it is given, as :func:`parse_method` reads them."""
    settings = {**method, **method.get("settings", {})}
    told = [f"{key}={_short(value)}" for key, value in settings.items() if key not in ("name", "settings")]
    return ":".join([str(method["name"]), *told])


def _short(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "").replace("'", "")


def _method(recipe: Recipe, name: str, for_all: Mapping[str, object]) -> dict[str, Any]:
    return {"name": name, **settings_in_comparison(name, recipe.method.name, recipe.method.settings, for_all)}


def compare_runs(
    recipes: Mapping[Key, Recipe],
    folder: Path | None,
    reporter: Reporter,
    *,
    resume: bool = False,
    force: bool = False,
    given: Given = NOTHING,
    ready: Callable[[RunData], None] = lambda materials: None,
    among: Mapping[Key, Recipe] | None = None,
) -> Iterator[tuple[Key, Run | ComingleError]]:
    """Run the recipes one after another, as they are asked for, each in a folder below ``folder`` (None: in none).

    The base is read once, the users' data once for each seed; ``ready`` looks at the first of it. With ``resume`` those
    that were begun go on. A run that fails, as one that diverges, gives its error and does not stop the others.
    ``among`` are all runs of the comparison, of which these are some.

    Raises:
        ComingleError: what is wrong with a folder, before anything is read, and with the base or the data; other
            users are left out with another seed, which is known when that one's data is read.
    """
    among = among or recipes
    # Users who are too small are left out of all methods, or of none.
    validates = any(make(one.method.name, **one.method.settings).client.needs_validation for one in among.values())
    folders = folders_of(recipes, folder) if folder is not None else {}
    recipes = as_compared(recipes, folders, resume=resume)
    again = check_folders(recipes, folders, resume=resume, force=force)
    begun = next((folders[key] for key in recipes if again.get(key)), None)
    given = given if begun is None else replace(given, date=recorded_date(begun))
    materials: RunData | None = None
    last_seed = None
    left: dict[str, list[str]] = {}
    for key, one in recipes.items():
        method, seed = key
        if materials is None or seed != last_seed:
            base, first = (materials.base, False) if materials else (None, True)
            with reporter.waiting(LOADING):
                materials, last_seed = prepare(one, base=base, validates=validates, given=given), seed
            if len({s for _, s in recipes}) > 1 and getattr(one.data, "on_small_user", "") == "skip":
                left[f"seed {seed}"] = sorted(names_of(materials.users))
                require_same_users(list(left.items()))
            if first:
                ready(materials)
        title = f"run {list(among).index(key) + 1} of {len(among)} · {method}, seed {seed}"

        def watch(clients: Clients, title: str = title) -> list[Observer]:
            return [reporter.watch(clients, title)]

        place = folders.get(key)
        try:
            found = run_in(place, one, materials, resume=again.get(key, False), force=force, observers=watch)
        except ComingleError as error:
            found = error
        yield key, found


def as_compared(recipes: Mapping[Key, Recipe], folders: Mapping[Key, Path], *, resume: bool) -> Mapping[Key, Recipe]:
    """Return the recipes of a comparison to resume: where an older version began one of the runs, all are as it was."""
    begun = {key: as_begun(place, recipes[key], resume=resume) for key, place in folders.items()}
    older = next((folders[key] for key, one in begun.items() if one is not recipes[key]), None)
    return recipes if older is None else {k: as_begun(older, one, resume=True) for k, one in recipes.items()}


def check_folders(
    recipes: Mapping[Key, Recipe], folders: Mapping[Key, Path], *, resume: bool, force: bool
) -> dict[Key, bool]:
    """Which runs have been begun and go on.

    Raises:
        RunError: one of the folders cannot be written to.
    """
    again = {key: resume and (place / "recipe.yaml").exists() for key, place in folders.items()}
    for key, place in folders.items():
        check_folder(place, recipes[key], resume=again[key], force=force)
    return again


Ended = tuple[Key, dict[str, Any] | ComingleError]
"""A run that has ended: its metrics, or what stopped it."""


def compare_beside(
    recipes: Mapping[Key, Recipe],
    folder: Path,
    *,
    jobs: int,
    resume: bool = False,
    force: bool = False,
    quiet: bool = False,
    ready: Callable[[RunData], None] = lambda materials: None,
) -> Iterator[Ended]:
    """As :func:`comingle.runs.compare.compare_runs`, ``jobs`` runs at a time, in the order in which they end.

    Runs of a seed share a process, which reads the data once, unless there are more jobs than seeds. Unless ``quiet``,
    and where stderr is no terminal, each tells of its rounds.

    Raises:
        ComingleError: what concerns all runs, as data that cannot be read.
    """
    recipes = as_compared(recipes, folders_of(recipes, folder), resume=resume)
    check_folders(recipes, folders_of(recipes, folder), resume=resume, force=force)
    silent = quiet or errors.is_terminal  # several bars would write over each other
    work = partial(_run_cells, among=recipes, folder=folder, resume=resume, force=force, quiet=silent, ready=ready)
    yield from in_processes(portions(list(recipes), jobs), work, jobs=jobs, told=_told)


def portions(keys: Sequence[Key], jobs: int) -> list[list[Key]]:
    """Runs that share a process: those of a seed, or parts of them, so that there are as many groups as jobs."""
    seeds = list(dict.fromkeys(seed for _, seed in keys))
    parts = -(-jobs // len(seeds))
    by_seed = [[key for key in keys if key[1] == seed] for seed in seeds]
    return [some for of_seed in by_seed for i in range(parts) if (some := of_seed[i::parts])]


def _told(keys: Sequence[Key]) -> str:
    (_, seed), methods = keys[0], ", ".join(method for method, _ in keys)
    return f"{methods}, seed {seed}"


def _run_cells(
    keys: Sequence[Key], among: Mapping[Key, Recipe], ready: Callable[[RunData], None], quiet: bool, **options: Any
) -> Iterator[Ended]:
    first = {"ready": ready} if keys[0] == next(iter(among)) else {}
    some = {key: among[key] for key in keys}
    with reporting(quiet=quiet) as reporter:
        for key, found in compare_runs(some, reporter=reporter, among=among, **first, **options):
            yield key, found if isinstance(found, ComingleError) else found.metrics
