"""Runs in several processes, from Python and from the command line."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from comingle.config import Recipe
from comingle.data.populations import as_users
from comingle.methods.base import Method
from comingle.models.hardware import torch_defaults
from comingle.privacy import secure_sum
from comingle.privacy.accounting import Work
from comingle.runs import api
from comingle.runs.folders import check_folder, with_bos_of_run
from comingle.runs.given import (
    NOTHING,
    AnyBase,
    AnyMethod,
    AnyRecipe,
    Given,
    Loss,
    given_of,
    recipe_with,
    registered_methods,
)
from comingle.runs.progress import loading, reporting
from comingle.runs.results import Run
from comingle.runs.session import method_of, prepare, resolve_users_per_step, run_in, warn_unread, with_start
from comingle.training.backends.distributed import Sharded
from comingle.training.backends.launched import Place, find_place
from comingle.training.backends.ranks import Ranks, joined
from comingle.training.batch_sources import AnyUser
from comingle.training.client import Clients
from comingle.training.events import Observer
from comingle.training.kinds.base import RunData, lazy_user
from comingle.training.plan import make_plan
from comingle.training.server import start_server
from comingle.training.settings import RunPlan, cohorts
from comingle.training.steps import PrivateSteps
from comingle.utils.errors import RecipeError, RunError
from comingle.utils.inputs import recorded_date
from comingle.utils.records import JsonObject


class _RankHandler(logging.Handler):
    """Log handler of processes other than the first: passes on errors, and warnings about one user's upload."""

    def install(self) -> None:
        """Handle the log records of ``comingle`` from now on, to drop those that every process of a run repeats."""
        logger = logging.getLogger("comingle")
        # A handler, not a filter: filters of a logger do not see the records of the loggers below it.
        logger.addHandler(self)
        logger.propagate = False  # records do not reach the root logger's handlers
        logger.setLevel(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        """Pass errors, and warnings about this process's users, on to the root logger; drop all other records.

        Every process of a run logs the others alike, so those of the first process are enough.
        """
        # Warnings of secure sums are about the uploads of this process's users.
        if record.levelno >= logging.ERROR or record.pathname == secure_sum.__file__:
            logging.getLogger().handle(record)


_RANK_HANDLER = _RankHandler()


def read_users_of_process(
    recipe: Recipe, ranks: Ranks, method: Method, given: Given = NOTHING, run_data: RunData | None = None
) -> RunData:
    """Set up this process of a run, and return the base model and the data of its share of the users.

    Every process calls this function. ``ranks.run_in_all`` raises in all processes if the function raises in one;
    ``ranks.run_in_first`` returns the result of process 0 in all of them.

    Args:
        recipe: The recipe, which names the base and the data.
        ranks: The processes of the run.
        method: The method of the recipe.
        given: Objects that a program passes instead of names and paths in the recipe.
        run_data: The base model and the data of all users, if they are read already.

    Raises:
        ComingleError: The base or the users' data cannot be used, or there are more processes than users or GPUs.
    """
    is_process_0 = ranks.is_first_process
    if not is_process_0:
        _RANK_HANDLER.install()  # so that a message that every process logs appears once, from process 0
    ranks.run_in_all(lambda: select_gpu(recipe, ranks.place))
    take_threads(recipe, ranks.place)

    # Chat templates may write the date into prompts, so all processes use the date of process 0.
    date = ranks.run_in_first(lambda: given.date or datetime.now().isoformat(timespec="seconds"))
    given = replace(given, date=date)
    data_of_all = ranks.run_in_all(lambda: run_data or prepare(recipe, given=given, method=method))

    cohort_size = recipe.runtime.users_per_step
    if not isinstance(cohort_size, int):  # "auto": chosen later, so the division does not depend on it
        cohort_size = 1
    users_by_process = ranks.run_in_all(lambda: divide_users(len(data_of_all.users), ranks.size, cohort_size))
    return keep_users(data_of_all, users_by_process[ranks.rank])


def divide_users(num_users: int, num_processes: int, cohort_size: int) -> list[range]:
    """Divide the users of a run evenly among processes; return the numbers of the users of each process.

    Cohorts are not divided if there is at least one for every process: 6 users in cohorts of 2 for 2 processes give
    ``[range(0, 2), range(2, 6)]``.

    Args:
        num_users: The number of users.
        num_processes: The number of processes.
        cohort_size: The number of users in a cohort.

    Raises:
        RecipeError: A process would have no user.
    """
    if num_users < num_processes:
        raise RecipeError(
            f"processes: got {num_processes} for {num_users} users; allowed: 1 to {num_users}, at least one user each"
        )
    num_cohorts = len(cohorts(range(num_users), cohort_size))
    unit_size = cohort_size if num_cohorts >= num_processes else 1
    num_units = len(cohorts(range(num_users), unit_size))
    bounds: list[int] = []  # process p has the users from bounds[p] to before bounds[p + 1]
    for rank in range(num_processes + 1):
        first_unit = num_units * rank // num_processes
        bounds.append(min(num_users, unit_size * first_unit))  # the last unit may have fewer users
    return [range(start, end) for start, end in pairwise(bounds)]


def keep_users(run_data: RunData, here: range) -> RunData:
    """Return a run's data without the data of other processes' users; only their names and clusters are left.

    Args:
        run_data: The data of all users.
        here: Numbers of the users of this process, among all users.
    """
    if not run_data.users.in_memory:  # reads a user's data on first access, so there is nothing to drop
        return replace(run_data, here=here, is_shard=True)

    def without_data(user: AnyUser) -> AnyUser:
        """Return a stand-in for another process's user, with name and cluster; reading its data is an error."""

        def raise_error() -> Any:
            raise AssertionError(f"user {user.name!r} is in another process")

        return lazy_user(run_data.kind.user, user.name, raise_error, cluster=getattr(user, "cluster", None))

    users = as_users(user if number in here else without_data(user) for number, user in enumerate(run_data.users))
    common = run_data.common  # what users have in common, such as a task; it may list the users too
    if hasattr(common, "users"):
        common = replace(common, users=users)
    names_here = {users[number].name for number in here}
    texts = tuple(text for text in run_data.texts if text.name in names_here)
    return replace(run_data, users=users, common=common, texts=texts, here=tuple(here), is_shard=True)


def build_sharded(recipe: Recipe, run_data: RunData, method: Method, ranks: Ranks) -> Sharded:
    """Return this process's shard of a recipe's federation, before the first round.

    Every process calls this function. ``ranks.run_in_all`` raises in all processes if the function raises in one;
    ``ranks.gather`` collects the results in process 0; ``ranks.run_in_first`` returns the result of process 0 in all.

    Args:
        recipe: The recipe of the run.
        run_data: The base model and the data of the users of this process.
        method: The method of the recipe.
        ranks: The processes of the run.

    Raises:
        ComingleError: Settings, data and base do not fit together, or there are more processes than users.
    """
    recipe = ranks.run_in_all(lambda: resolve_users_per_step(recipe, run_data))
    plan = make_plan(recipe, method, run_data.users.names)
    plan = with_start(plan.updated("runtime", store=recipe.runtime.store), recipe, run_data.users.names)
    federation = ranks.run_in_all(lambda: _build_shard(recipe, run_data, plan, ranks))
    clients = federation.clients
    _check_alike(federation)
    # In epochs, users with more data take more steps. All processes must agree on the largest number.
    steps_by_process = ranks.gather(lambda: clients.steps.local_steps)
    clients.steps.most_steps = ranks.run_in_first(lambda: max(steps_by_process))
    trainers_by_process = ranks.gather(lambda: len(clients.trainers))
    federation.shards = ranks.run_in_first(lambda: trainers_by_process)  # for checkpoints
    if clients.steps.private is not None:  # DP-SGD
        # The privacy accountant needs each user's numbers of examples, steps and rounds.
        works_by_user = _gather_works(clients.steps.private, clients, ranks)
        federation.server.mechanisms.set_works(lambda: works_by_user)
    if plan.evaluation.select == "best":  # needs validation data, which the users of another process may have
        has_validation = ranks.gather(lambda: any(len(user.valid) for user in clients.users))
        ranks.run_in_first(lambda: clients.require_validation(any(has_validation)))
    if not federation.is_first_process:
        # Free the server's state, which only process 0 needs.
        federation.server.kept, federation.server.best.tensors = {}, {}
    return federation


def _gather_works(private: PrivateSteps, clients: Clients, ranks: Ranks) -> dict[str, Work]:
    """Return every user's numbers of examples, steps and rounds by name, from which DP-SGD's epsilon follows.

    Every process calls this function and gets the numbers of all users.

    Args:
        private: The DP-SGD of this process's users.
        clients: The clients of this process.
        ranks: The processes of the run.
    """

    def works_here() -> dict[str, JsonObject]:
        """Return the work of this process's users as dicts, which can be sent."""
        return {name: asdict(work) for name, work in private.works(clients.batch_source).items()}

    works_by_process = ranks.gather(works_here)  # in process 0

    def merge() -> dict[str, JsonObject]:
        """Return the work of the users of all processes; called in process 0."""
        merged: dict[str, JsonObject] = {}
        for works in works_by_process:
            merged.update(works)
        return merged

    works_of_all = ranks.run_in_first(merge)  # the same in every process
    return {name: Work(**fields) for name, fields in works_of_all.items()}


def run_sharded(
    folder: Path,
    recipe: Recipe,
    run_data: RunData,
    *,
    resume: bool,
    force: bool,
    method: Method,
    observers: Callable[[Clients], Sequence[Observer]],
    ranks: Ranks,
) -> Run:
    """Run a recipe's federation as one of several processes; process 0 writes the folder.

    Args:
        folder: The run folder.
        recipe: The recipe of the run.
        run_data: The base model and the data of the users of this process.
        resume: Whether to resume from the newest checkpoint in the folder.
        force: Whether to replace what is in the folder.
        method: The method of the recipe.
        observers: Makes observers of the events, in process 0.
        ranks: The processes of the run.

    Raises:
        ComingleError: Settings, data and base do not fit together, the folder cannot be used, or a loss is not finite.
    """

    def enter(contexts: ExitStack, folder_context: AbstractContextManager[None]) -> None:
        """Open the folder in process 0 while the others wait, and record that it is open, for a restart.

        Args:
            contexts: Stack that keeps the folder open until the end of the run.
            folder_context: Opens the folder.
        """
        ranks.run_in_first(lambda: contexts.enter_context(folder_context))
        ranks.record_opened(folder)

    build_federation = partial(build_sharded, ranks=ranks)
    return run_in(
        folder,
        recipe,
        run_data,
        resume=resume,
        force=force,
        method=method,
        observers=observers,
        build_federation=build_federation,
        enter_folder=enter,
    )


def _build_shard(recipe: Recipe, run_data: RunData, plan: RunPlan, ranks: Ranks) -> Sharded:
    """Return this process's shard of a federation: a server for all users, and clients for this process's users.

    Args:
        recipe: The recipe of the run.
        run_data: The base model and the data of the users of this process.
        plan: The plan of the run.
        ranks: The processes of the run.

    Raises:
        RecipeError: The method pools all users' data.
    """
    if plan.method.placement.pooled:
        raise RecipeError(f"method {plan.method.name}: trains one model on all users' data; allowed: one process")
    names = run_data.users.names
    model = run_data.kind.model(recipe, run_data, plan)
    server = start_server(model, names, plan)
    server.check_rounds(plan)
    here = run_data.here  # numbers of this process's users among all users
    assert here is not None
    clients = run_data.kind.clients(recipe, run_data, plan)
    clients.population_names = names
    first_user, last_user = here[0], here[-1]  # `here` are consecutive numbers
    # A store on disk must know which users' tensors this process keeps.
    clients.state.shard(ranks.rank, ranks.size, range(first_user, last_user + 1), len(names))
    # Sums in the order of the users do not depend on the number of processes.
    sums_in_user_order = recipe.runtime.shard_sums == "ordered"
    return Sharded(clients=clients, server=server, ranks=ranks, first=first_user, ordered=sums_in_user_order)


def _check_alike(federation: Sharded) -> None:
    """Check that all processes use the same type of device and the same dtype.

    Raises:
        RecipeError: The devices or dtypes differ.
    """
    model, ranks = federation.clients.model, federation.ranks
    dtype = str(model.dtype).removeprefix("torch.")
    used_by_process = ranks.gather(lambda: f"{model.device.type} in {dtype}")  # such as "cuda in bfloat16"

    def compare_with_process_0() -> None:
        """Raise an error if a process uses another device or dtype than process 0."""
        for rank, used in enumerate(used_by_process):
            if used != used_by_process[0]:
                raise RecipeError(
                    f"runtime: process 0 uses {used_by_process[0]}, process {rank} {used}; set runtime.device and "
                    "runtime.dtype to the same for all"
                )

    ranks.run_in_first(compare_with_process_0)  # its error is raised in all processes


def select_gpu(recipe: Recipe, place: Place) -> None:
    """Select a different GPU for each process, if the recipe uses GPUs.

    Args:
        recipe: The recipe, whose ``runtime.device`` says whether to use GPUs.
        place: The rank of this process, among all processes and among those on this machine.

    Raises:
        RecipeError: This machine has too few GPUs, or the recipe names one GPU for all processes.
    """
    device = recipe.runtime.device
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.startswith("cuda:"):
        raise RecipeError(f"runtime.device: got {device!r} for {place.size} processes; allowed: cuda")
    if device == "cpu" or not num_gpus:
        return
    if place.local_size > num_gpus:
        counts = f"got {place.local_size} processes on a machine with {num_gpus} GPUs"
        raise RecipeError(f"runtime.device: {counts}; allowed: one process per GPU, or cpu")
    take_gpu(place.local_rank)


def take_gpu(number: int) -> None:
    """Select GPU ``number``, modulo the number of GPUs; do nothing without GPUs."""
    if torch.cuda.is_available():
        torch.cuda.set_device(number % torch.cuda.device_count())


def take_threads(recipe: Recipe, place: Place) -> None:
    """Set torch's number of threads to this process's share of the machine's cores.

    Does nothing if the recipe sets ``runtime.threads``, or the environment ``OMP_NUM_THREADS``.

    Args:
        recipe: The recipe of the run.
        place: The rank of this process, and the number of processes on this machine.
    """
    if recipe.runtime.threads is None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cores() // place.local_size))


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    """Run a recipe like :func:`comingle.runs.api.run`, called by every process of a program with the same arguments.

    Each process has a share of the users. Process 0 writes the folder ``out`` and calls the observers. When all have
    ended, each process opens the folder and returns the whole run. If the launcher restarts the program, the run
    resumes.

    Args:
        recipe: As in :func:`comingle.runs.api.run`, which describes all arguments in detail.
        users: The users' data.
        base: The base model.
        method: The method.
        loss: The loss.
        out: The run folder, which all processes see; required.
        resume: Whether to resume the run in ``out``.
        force: Whether to replace the run in ``out``.
        observers: Functions that process 0 calls with each event.
        run_data: The base and the users' data, if they are read already.
        progress: Whether process 0 prints progress.
        changes: Keys of the recipe to replace.

    Raises:
        ComingleError: There is a problem that the user can correct; process 0 has the message, of one line, and the
            others end silently.
    """
    place = find_place()
    assert place is not None, "a single process calls comingle.runs.api.run"
    if out is None:
        raise RunError(f"out: got None in one of {place.size} processes; give out=FOLDER, which all of them see")
    folder, given = Path(out), given_of(users, base, method, loss)
    # Recipes name methods, so a passed method is registered under its name until the run has ended.
    with joined(place) as ranks, registered_methods([method]) as [named_method]:
        # `ranks.run_in_all` calls a function in every process; if it fails in one of them, all stop.
        full_recipe = ranks.run_in_all(
            lambda: recipe_with(recipe, given, base=base, method=named_method, changes=changes)
        )
        if ranks.has_opened(folder):  # the launcher has restarted the program, which goes on with its own run
            resume, force = True, False
        full_recipe = ranks.run_in_all(partial(with_bos_of_run, folder, full_recipe, resume=resume))
        ranks.run_in_first(partial(check_folder, folder, full_recipe, resume=resume, force=force))
        with reporting(quiet=not (progress and place.is_first_process)) as reporter:
            with reporter.waiting(loading(full_recipe)):
                # A chat template may write the date into prompts; a resumed run keeps that of its start.
                given = replace(given, date=recorded_date(folder) if resume else "")
                # A program that passes `run_data` has read it with `prepare`, which checks the recipe.
                run_method = ranks.run_in_all(lambda: method_of(full_recipe, checked=run_data is not None))
                shard = read_users_of_process(full_recipe, ranks, run_method, given, run_data)

            def make_observers(clients: Clients) -> list[Observer]:
                warn_unread(full_recipe, clients.method)
                return [*observers, reporter.watch(clients)]

            run_sharded(
                folder,
                full_recipe,
                shard,
                resume=resume,
                force=force,
                method=run_method,
                observers=make_observers,
                ranks=ranks,
            )
    return api.load(folder, users=users, base=_passed_base(base), method=method, loss=loss)


def _passed_base(base: AnyBase | None) -> AnyBase | None:
    """Return the base for opening the run: one that a program passed, and None for a name, which the recipe has."""
    return None if isinstance(base, str) else base
