"""One run in several processes, from Python and from the command line."""

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
from comingle.data.populations import LazyPopulation, names_of
from comingle.methods.base import Method
from comingle.models.hardware import torch_defaults
from comingle.privacy import secure_sum
from comingle.privacy.accounting import Work
from comingle.runs import api
from comingle.runs.folders import as_begun, check_folder
from comingle.runs.given import NOTHING, AnyBase, AnyMethod, AnyRecipe, Given, Loss, given_of, lending, recipe_with
from comingle.runs.progress import LOADING, reporting
from comingle.runs.results import Run
from comingle.runs.session import fitted, method_of, prepare, run_in, warn_unread
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
from comingle.utils.errors import RecipeError, RunError
from comingle.utils.inputs import recorded_date


class _OfOwnUsers(logging.Handler):
    """What a process says that is not the first, which speaks for all: errors, and warnings of one user's upload."""

    def speak(self) -> None:
        """From now on, of all that is said below ``comingle``, and no more than that."""
        logger = logging.getLogger("comingle")
        logger.addHandler(self)  # not a filter, which would not see what the loggers of modules say
        logger.propagate = False
        logger.setLevel(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        """Hand it on to whoever listens."""
        if record.levelno >= logging.ERROR or record.pathname == secure_sum.__file__:
            logging.getLogger().handle(record)


_OWN = _OfOwnUsers()


def read_shared(
    recipe: Recipe, ranks: Ranks, method: Method, given: Given = NOTHING, materials: RunData | None = None
) -> RunData:
    """Return the base model and the data of the users of this process.

    Args:
        recipe: The recipe.
        ranks: The processes of the run.
        method: The method of the recipe.
        given: What a program passes instead of names and paths in the recipe.
        materials: The base model and the data of all users, if they are read already.

    Raises:
        ComingleError: as :func:`comingle.runs.session.prepare`, or there are more processes than users or GPUs.
    """
    if not ranks.leads:
        _OWN.speak()
    ranks.each(lambda: check_device(recipe, ranks.place))
    take_threads(recipe, ranks.place)
    date = ranks.share(lambda: given.date or datetime.now().isoformat(timespec="seconds"))
    everybody = ranks.each(lambda: materials or prepare(recipe, given=replace(given, date=date), method=method))
    at_once = recipe.runtime.users_per_step
    at_once = at_once if isinstance(at_once, int) else 1
    mine = ranks.each(lambda: spans(len(everybody.users), ranks.size, at_once)[ranks.rank])
    return share_out(everybody, mine)


def spans(users: int, processes: int, at_once: int) -> list[range]:
    """Whose users each process has: equally many, or where there are enough cohorts of ``at_once`` whole ones.

    Raises:
        RecipeError: somebody would have none.
    """
    if users < processes:
        raise RecipeError(
            f"processes: got {processes} for {users} users; allowed: 1 to {users}, a user or more for each"
        )
    unit = at_once if len(cohorts(range(users), at_once)) >= processes else 1
    units = len(cohorts(range(users), unit))
    edges = [min(users, unit * (units * rank // processes)) for rank in range(processes + 1)]
    return [range(*edge) for edge in pairwise(edges)]


def share_out(materials: RunData, here: range) -> RunData:
    """The same with the data of those who are here alone; others have names."""

    if isinstance(materials.users, LazyPopulation):  # of whom nobody is read before somebody asks
        return replace(materials, here=here, shared_out=True)

    def left(user: AnyUser) -> AnyUser:
        def elsewhere() -> Any:
            raise AssertionError(f"user {user.name!r} is in another process")

        return lazy_user(materials.kind.user, user.name, elsewhere, cluster=getattr(user, "cluster", None))

    users = tuple(user if number in here else left(user) for number, user in enumerate(materials.users))
    common = replace(materials.common, users=users) if hasattr(materials.common, "users") else materials.common
    names = {users[number].name for number in here}
    texts = tuple(text for text in materials.texts if text.name in names)
    return replace(materials, users=users, common=common, texts=texts, here=tuple(here), shared_out=True)


def build_sharded(recipe: Recipe, materials: RunData, method: Method, ranks: Ranks) -> Sharded:
    """This process's part of a recipe's federation, before the first round.

    Raises:
        ComingleError: settings, data and base do not fit each other, or there are more processes than users.
    """
    recipe = ranks.each(lambda: fitted(recipe, materials))
    plan = make_plan(recipe, method, names_of(materials.users))
    plan = plan.updated("runtime", store=recipe.runtime.store)
    federation = ranks.each(lambda: _built(recipe, materials, plan, ranks))
    clients = federation.clients
    _check_alike(federation)
    most = ranks.gather(lambda: clients.steps.local_steps)
    clients.steps.most_steps = ranks.share(lambda: max(most))
    counts = ranks.gather(lambda: len(clients.trainers))
    federation.shards = ranks.share(lambda: counts)
    if (private := clients.steps.private) is not None:
        parts = ranks.gather(lambda: {name: asdict(work) for name, work in private.works(clients.batch_source).items()})
        shared = ranks.share(lambda: {name: work for part in parts for name, work in part.items()})
        works = {name: Work(**work) for name, work in shared.items()}
        federation.server.mechanisms.set_works(lambda: works)
    if plan.evaluation.select == "best":
        valid = ranks.gather(lambda: any(len(user.valid) for user in clients.users))
        ranks.share(lambda: clients.require_validation(any(valid)))
    if not federation.leads:
        federation.server.kept = {}
    return federation


def run_sharded(
    folder: Path,
    recipe: Recipe,
    materials: RunData,
    *,
    resume: bool,
    force: bool,
    method: Method,
    observers: Callable[[Clients], Sequence[Observer]],
    ranks: Ranks,
) -> Run:
    """Run a recipe's federation in its folder, as one of several processes; the one that leads writes the folder.

    Raises:
        ComingleError: as :func:`build_sharded` and :func:`comingle.runs.session.run_in`.
    """

    def enter(entered: ExitStack, entering: AbstractContextManager[None]) -> None:
        ranks.share(lambda: entered.enter_context(entering))
        ranks.opened(folder)

    building = partial(build_sharded, ranks=ranks)
    return run_in(
        folder,
        recipe,
        materials,
        resume=resume,
        force=force,
        method=method,
        observers=observers,
        building=building,
        entering=enter,
    )


def _built(recipe: Recipe, materials: RunData, plan: RunPlan, ranks: Ranks) -> Sharded:
    if plan.method.placement.pooled:
        raise RecipeError(f"method {plan.method.name}: trains one model on everybody's data; allowed: one process")
    names = names_of(materials.users)
    whole = materials.kind.model(recipe, materials, plan)
    server = start_server(whole, names, plan)
    server.check_rounds(plan)
    here = materials.here
    assert here is not None
    clients = materials.kind.clients(recipe, materials, plan)
    clients.population_names = names
    clients.state.shard(ranks.rank, ranks.size, range(here[0], here[-1] + 1), len(names))
    return Sharded(
        clients=clients, server=server, ranks=ranks, first=here[0], ordered=recipe.runtime.shard_sums == "ordered"
    )


def _check_alike(federation: Sharded) -> None:
    """Whether all processes compute on the same kind of device, in the same format.

    Raises:
        RecipeError: they do not.
    """
    model, ranks = federation.clients.model, federation.ranks
    found = ranks.gather(lambda: [model.device.type, str(model.dtype).removeprefix("torch.")])

    def check() -> None:
        for rank, other in enumerate(found):
            if other != found[0]:
                told = f"process 0 has {' in '.join(found[0])}, process {rank} {' in '.join(other)}"
                raise RecipeError(f"runtime: {told}; set runtime.device and runtime.dtype, so that all are alike")

    ranks.share(check)


def check_device(recipe: Recipe, place: Place) -> None:
    """Give this process a GPU of its own, where the recipe computes on GPUs.

    Raises:
        RecipeError: there are not enough of them on this machine, or the recipe names one for all.
    """
    device, gpus = recipe.runtime.device, torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.startswith("cuda:"):
        raise RecipeError(f"runtime.device: got {device!r} for {place.size} processes, each with a GPU; allowed: cuda")
    if device == "cpu" or not gpus:
        return
    if place.local_size > gpus:
        told = f"{place.local_size} processes on a machine with {gpus} GPUs"
        raise RecipeError(f"runtime.device: {told}; allowed: a process for each GPU, or cpu")
    take_gpu(place.local_rank)


def take_gpu(number: int) -> None:
    """Have this process, one of several on this machine, compute on a GPU of its own where there are enough of them."""
    if torch.cuda.is_available():
        torch.cuda.set_device(number % torch.cuda.device_count())


def take_threads(recipe: Recipe, place: Place) -> None:
    """Share this machine's cores, unless somebody has said how."""
    if recipe.runtime.threads is None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cores() // place.local_size))


def cores() -> int:
    """How many this process may use."""
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
    materials: RunData | None = None,
    progress: bool = False,
    **changes: object,
) -> Run:
    """As :func:`comingle.runs.api.run`, by every process of a program, with the same arguments.

    Users are shared out, the first process writes the folder ``out`` and calls the observers. Each opens it when all
    have ended, and returns the whole run. A launcher's second attempt goes on with what its first has written.

    Raises:
        ComingleError: whatever the user can correct, in one line, at the first process; the others end silently.
    """
    place = find_place()
    assert place is not None, "comingle.run of one process is another"
    if out is None:
        raise RunError(f"out: got none, in one of {place.size} processes; give out=FOLDER, which all of them see")
    folder, given = Path(out), given_of(users, base, method, loss)
    with joined(place) as ranks, lending([method]) as [named]:
        read = ranks.each(lambda: recipe_with(recipe, given, base=base, method=named, changes=changes))
        if ranks.has_opened(folder):
            resume, force = True, False
        read = ranks.each(partial(as_begun, folder, read, resume=resume))
        ranks.each(lambda: check_folder(folder, read, resume=resume, force=force) if place.leads else None)
        with reporting(quiet=not (progress and place.leads)) as reporter:
            with reporter.waiting(LOADING):
                given = replace(given, date=recorded_date(folder) if resume else "")
                made = ranks.each(lambda: method_of(read, checked=materials is not None))
                here = read_shared(read, ranks, made, given, materials)

            def watch(clients: Clients) -> list[Observer]:
                warn_unread(read, clients.method)
                return [*observers, reporter.watch(clients)]

            run_sharded(folder, read, here, resume=resume, force=force, method=made, observers=watch, ranks=ranks)
    return api.load(folder, users=users, base=_handed(base), method=method, loss=loss)


def _handed(base: AnyBase | None) -> AnyBase | None:
    """What a run folder does not know by its name."""
    return None if isinstance(base, str) else base
