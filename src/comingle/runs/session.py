"""Steps from a recipe to a run."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from comingle.config import Recipe, load_recipe
from comingle.config.files import changed_settings
from comingle.config.settings import AUTO, MEMORY, parse_bytes
from comingle.data.populations import digest_names
from comingle.data.samples.samples import SPLITS
from comingle.data.sources import check_sources
from comingle.methods import make, own_errors, settings_of
from comingle.methods.base import Method
from comingle.models.base import Base, digests_of, with_date
from comingle.models.hardware import (
    free_bytes,
    keep_buffers,
    private_bytes,
    resolve_device,
    return_buffers,
    torch_defaults,
)
from comingle.models.loading import GIVEN, adapter_folder
from comingle.models.lora import read_peft
from comingle.models.scoring import CROSS_ENTROPY
from comingle.privacy.accounting import account_writer
from comingle.runs.continuation import (
    EarlierData,
    add_replay,
    check_replay,
    forgetting,
    keeps_earlier_best,
    read_earlier_data,
    replayed_digests,
    restore_account,
    start_from_run,
)
from comingle.runs.folders import SKIPPED, open_folder
from comingle.runs.given import NOTHING, Given
from comingle.runs.guard import build_local, choose_served, continue_local, is_guarded, served_in, train_local
from comingle.runs.results import Run
from comingle.training.backends.local import InProcess, federate
from comingle.training.batch_sources import AnyScore
from comingle.training.checkpoints import Clock, progress_of
from comingle.training.client import STORES, Clients
from comingle.training.evaluation import (
    amounts,
    end_event,
    sample_entry,
    start_event,
    summarise,
    users_metrics,
)
from comingle.training.events import (
    MAX_SERIES,
    TRACKERS,
    Event,
    EventLog,
    Observer,
    QuantileTracker,
    TrackedRun,
    Tracker,
    tensorboard,
)
from comingle.training.kinds.base import DataRequest, RunData, check_recipe, kind_of
from comingle.training.plan import make_plan
from comingle.training.rounds import Checkpoint, Evaluations, outcome_warnings, run_rounds
from comingle.training.settings import RunPlan, untrained_entry
from comingle.utils.errors import DivergenceError, RecipeError, RunError, did_you_mean, list_names
from comingle.utils.files import list_checkpoints
from comingle.utils.inputs import POPULATION, Inputs, UserInputs
from comingle.utils.records import JsonMapping, JsonObject, finite, read_evaluations, read_metrics, write_text
from comingle.utils.registry import load_object

_CHOOSE_WITHIN_MEMORY = "comingle.cost.planning:choose_within"
_CHOOSE_SPECIALISTS = "comingle.cost.planning:choose_specialists"
_FIT = "comingle.cost.planning:fit"  # the search for the largest pass that fits into memory


def resolve_users_per_step(recipe: Recipe, run_data: RunData) -> Recipe:
    """Return the recipe with ``runtime.users_per_step: auto`` replaced by the largest number that fits into memory.

    ``runtime.micro_batch``, the number of sequences of each user in a pass, is set together with it.

    Raises:
        RecipeError: Not even the smallest pass fits, or a setting by user, such as ``adapters.rank: {anna: 8}``, names
            an unknown user or lacks one.
    """
    recipe = recipe.for_users(run_data.users.names)  # {anna: 8, ben: 4} becomes [8, 4]
    if recipe.runtime.users_per_step != AUTO:
        return recipe
    find_largest_pass = load_object(_FIT)  # loaded by name, since its module imports this one
    largest_pass = find_largest_pass(recipe, run_data)
    return recipe.with_changes(
        {"runtime.users_per_step": largest_pass.users, "runtime.micro_batch": largest_pass.sequences}, where="runtime"
    )


_KEYS_CHOSEN_FOR_MEMORY = ("dtype", "native_code", "compile", "gradient_checkpointing", "micro_batch", "users_per_step")
"""Keys of ``runtime`` that ``runtime.memory`` may choose; it also chooses ``quantise``."""


def lacks_chosen_settings(recipe: Recipe) -> bool:
    """Return whether settings, such as ``runtime.dtype``, are still to be chosen so that a run fits ``runtime.memory``.

    A recipe in which they have been chosen sets all of them (:func:`with_chosen_settings`). Commands that do not choose
    settings refuse other recipes with ``runtime.memory``.
    """
    if recipe.runtime.memory is None:
        return False
    sets_all_of_runtime = recipe.runtime.model_fields_set.issuperset(_KEYS_CHOSEN_FOR_MEMORY)
    sets_quantise = "quantise" in recipe.model_fields_set
    return not (sets_all_of_runtime and sets_quantise)


def with_chosen_settings(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """Return the recipe with the settings chosen for ``runtime.memory``.

    Keys that may be chosen, but keep their values, are set explicitly too. This marks the choice as done
    (:func:`lacks_chosen_settings`).

    Args:
        recipe: The recipe with ``runtime.memory``.
        changes: The chosen values by recipe key, such as ``{"runtime.dtype": "bfloat16"}``.
    """
    values = {f"runtime.{key}": getattr(recipe.runtime, key) for key in _KEYS_CHOSEN_FOR_MEMORY}
    values["quantise"] = recipe.quantise
    values.update(changes)
    return recipe.with_changes(values, where="runtime.memory")


def choose_settings(
    recipe: Recipe,
    say: Callable[[str], None],
    *,
    resumed: Path | None = None,
    processes: int = 1,
    is_loaded: bool = False,
) -> Recipe:
    """Return the recipe with values for all keys that it leaves to this machine; unchanged without such keys.

    A recipe may leave open the number of specialists of each user (``method.specialists: auto``), and the settings with
    which the run fits into ``runtime.memory``. The numbers are chosen first, since memory depends on them.

    Args:
        recipe: The recipe, which may leave settings to this machine.
        say: Called with a line that names the chosen numbers, and with one that names the chosen settings.
        resumed: Folder of the run to resume, which keeps the values of its start; None for a new run.
        processes: Number of processes of the run.
        is_loaded: Whether base and data are loaded already.

    Raises:
        RecipeError: No settings fit, there are several processes, or a program passes the base or the users.
        BaseModelError: The base cannot be used.
    """

    def check_can_choose(got: str) -> None:
        """Check that values can be chosen: in a single process, before base and users are loaded by the recipe's names.

        Args:
            got: Beginning of the error's message, such as "method.specialists: got 'auto'".
        """
        if is_loaded or recipe.data.given or recipe.base == GIVEN:
            raise RecipeError(f"{got}; allowed: with a base and users that the recipe names")
        if processes > 1:
            raise RecipeError(f"{got} and {processes} processes; allowed: in one process")

    earlier_recipe = None
    if resumed is not None and (resumed / "recipe.yaml").exists():
        earlier_recipe = load_recipe(resumed)
    if chooses_specialists(recipe):
        check_can_choose("method.specialists: got 'auto'")
        recipe = _with_specialists(recipe, earlier_recipe, say)
    if recipe.runtime.memory is not None:
        check_can_choose(f"runtime.memory: got {recipe.runtime.memory!r}")
        recipe = _within_memory(recipe, earlier_recipe, say)
    return recipe


def _with_specialists(recipe: Recipe, earlier_recipe: Recipe | None, say: Callable[[str], None]) -> Recipe:
    """Return the recipe with a number of specialists for each user in place of ``method.specialists: auto``.

    Args:
        recipe: The recipe with ``method.specialists: auto``.
        earlier_recipe: Recipe of the run to resume, with its numbers; None for a new run.
        say: Called with a line that names the numbers.
    """
    if earlier_recipe is not None:
        numbers = earlier_recipe.method.settings["specialists"]
    else:
        choose_specialists = load_object(_CHOOSE_SPECIALISTS)  # loaded by name, since its module imports this one
        numbers = choose_specialists(recipe, memory_limit(recipe), kind_of(recipe).names_of(recipe))
    shown = list_names(f"{name} {number}" for name, number in numbers.items())
    say(f"method.specialists auto: {shown}")
    return recipe.with_changes({"method.specialists": numbers})


def _within_memory(recipe: Recipe, earlier_recipe: Recipe | None, say: Callable[[str], None]) -> Recipe:
    """Return the recipe with settings chosen to fit into ``runtime.memory``.

    Args:
        recipe: The recipe with ``runtime.memory``.
        earlier_recipe: Recipe of the run to resume, with its settings; None for a new run.
        say: Called with a line that names the chosen settings.
    """
    if earlier_recipe is not None:
        changes = {f"runtime.{key}": getattr(earlier_recipe.runtime, key) for key in _KEYS_CHOSEN_FOR_MEMORY}
        changes["quantise"] = earlier_recipe.quantise
        return use_chosen_settings(recipe, changes, "as in the run that is resumed", say)
    limit_bytes = memory_limit(recipe)
    user_names = kind_of(recipe).names_of(recipe)
    choose_settings_within = load_object(_CHOOSE_WITHIN_MEMORY)  # loaded by name, since its module imports this one
    choice = choose_settings_within(recipe, limit_bytes, user_names)
    return use_chosen_settings(recipe, choice.changes, choice.describe(limit_bytes), say)


def chooses_specialists(recipe: Recipe) -> bool:
    """Return whether the recipe leaves the numbers of specialists to the devices (``method.specialists: auto``)."""
    return recipe.method.settings.get("specialists") == AUTO


def require_specialists(recipe: Recipe) -> None:
    """Check that the numbers of specialists are known, for commands that do not choose them.

    Raises:
        RecipeError: The recipe has ``method.specialists: auto``.
    """
    if chooses_specialists(recipe):
        raise RecipeError("method.specialists: got 'auto'; allowed: numbers for this command")


def memory_limit(recipe: Recipe) -> int:
    """Return how many bytes the process may use: ``runtime.memory``, or else the memory that is free."""
    if recipe.runtime.memory not in (None, AUTO):
        return parse_bytes(recipe.runtime.memory)
    device = resolve_device(recipe.runtime.device)
    limit_bytes = free_bytes(device)
    if device.type == "cpu":
        limit_bytes += private_bytes()  # memory that this process uses already, and can use for the run
    return limit_bytes


def use_chosen_settings(
    recipe: Recipe, changes: Mapping[str, Any], description: str, say: Callable[[str], None]
) -> Recipe:
    """Return the recipe with the settings that were chosen for ``runtime.memory``, and report them.

    From then on this process returns freed memory to the system, as a run must stay below ``runtime.memory``.

    Args:
        recipe: The recipe with ``runtime.memory``.
        changes: The chosen values by recipe key, such as ``{"runtime.dtype": "bfloat16"}``.
        description: The chosen settings and the memory that they need, in one line.
        say: Called with the description.
    """
    return_buffers()
    say(f"runtime.memory {recipe.runtime.memory}: {description}")
    full_recipe = with_chosen_settings(recipe, changes)
    if full_recipe.quantise != recipe.quantise:
        logger.warning(
            "quantise: %s, chosen for runtime.memory: %s; results differ from those of the unquantised base",
            full_recipe.quantise,
            recipe.runtime.memory,
        )
    return full_recipe


def _specialists_entry(method: Method, names: Sequence[str]) -> dict[str, dict[str, int]]:
    """Return the entry "specialists" of a run's start event: the number of specialists by user.

    Args:
        method: The method of the run.
        names: Names of all users.

    Returns:
        The entry; an empty mapping if the method has one number for all users.
    """
    numbers = method.placement.specialists
    if not isinstance(numbers, tuple):  # one number for all users
        return {}
    return {"specialists": dict(zip(names, numbers, strict=True))}


def run_trackers(folder: Path, recipe: Recipe, users: int) -> Iterator[Tracker]:
    """Yield the run's trackers: TensorBoard if it is installed, and those of the recipe.

    Args:
        folder: The run folder.
        recipe: The recipe, which names trackers in ``runtime.track``.
        users: The number of users. With more than ``MAX_SERIES``, trackers log quantiles instead of per-user series.
    """
    for tracker in _per_user_trackers(folder, recipe):
        if users <= MAX_SERIES:
            yield tracker
        else:
            yield QuantileTracker(tracker)


def _per_user_trackers(folder: Path, recipe: Recipe) -> Iterator[Tracker]:
    """Yield TensorBoard, if it is installed, and the recipe's trackers; each logs a series for every user."""
    board = tensorboard(folder / "tensorboard")  # None if it is not installed
    if board is not None:
        yield board
    run_folder = folder.resolve()
    run = TrackedRun(
        name=run_folder.name,
        group=run_folder.parent.name,
        recipe=recipe.model_dump(mode="json"),
        text=recipe.as_yaml(),
    )
    for name in recipe.runtime.track:
        yield TRACKERS[name](run)


def checkpoint_writer(federation: InProcess, recipe: Recipe, folder: Path | None, log: EventLog | None) -> Checkpoint:
    """Return a function that writes checkpoints to the run folder.

    Args:
        federation: The federation whose clients and server are saved.
        recipe: The recipe, whose fingerprint a checkpoint records.
        folder: The run folder; None: the function does nothing.
        log: The log of events; None if another process writes it.
    """
    clients = federation.clients

    def write_checkpoint(rounds_done: int, clock: Clock) -> None:
        """Write a checkpoint after ``rounds_done`` rounds."""
        if folder is None:
            return
        events_bytes = 0
        if log is not None:
            # A resumed run cuts its log to the size in the checkpoint, so the events must be on disk first.
            log.to_disk()
            events_bytes = log.size_bytes
        if clients.state.in_memory:
            names: Sequence[str] = clients.population_names
            digest_of_names = ""
        else:  # there may be millions of users, so only a digest of their names is stored
            names = []
            digest_of_names = digest_names(clients.population_names)
        progress = progress_of(
            rounds_done,
            recipe.fingerprint,
            names,
            clock=clock,
            events_bytes=events_bytes,
            population=digest_of_names,
            stopped=clients.stopped_after is not None,
        )
        federation.save(folder, progress, keep=recipe.checkpoints.keep)

    return write_checkpoint


logger = logging.getLogger("comingle")


# -------------------------------------------------------------------- prepare


@torch_defaults()
def prepare(
    recipe: Recipe,
    *,
    base: Base | None = None,
    validates: bool | None = None,
    given: Given = NOTHING,
    method: Method | None = None,
) -> RunData:
    """Load the base model and read the users' data.

    Args:
        recipe: The recipe, which names the base and the data.
        base: The base model, if it is loaded already.
        validates: Whether every user needs validation data; users without any are refused or skipped. None: yes if the
            method uses it.
        given: Objects that a program passes instead of names and paths in the recipe.
        method: The result of :func:`check_and_set_up` for the recipe; None: it is called now.

    Raises:
        RecipeError: The method is unknown, or not for such users, or a setting has no effect; raised before loading.
        BaseModelError: The base cannot be used.
        DataError: A user's data cannot be used.
    """
    if method is None:
        method = check_and_set_up(recipe)
    if validates is None:
        validates = method.client.needs_validation
    given.check(recipe)
    if given.users is None:
        check_sources(recipe.data)
    kind = kind_of(recipe)

    def load_run_base() -> Base:
        """Return the base model, whose chat template writes the date of the run's start if it writes a date."""
        if base is None:
            return given.load_base(recipe)
        return with_date(base, given.date)

    request = DataRequest(
        recipe=recipe,
        load_base=load_run_base,
        validates=validates,
        given=given.users,
        net=given.make_net,
        loss=given.loss,
    )
    store_name = recipe.runtime.store
    if given.users is not None:  # data that a program passes is in memory already
        store_name = MEMORY
    run_data = STORES[store_name].read(kind, request)
    return with_clusters(recipe, run_data)  # adds users' true clusters, if the recipe has `data.clusters`


def with_clusters(recipe: Recipe, run_data: RunData) -> RunData:
    """Return the data with each user's true cluster, if the recipe has ``data.clusters``.

    Learned mixtures are compared with the true clusters; methods such as ``floral-optimal`` are given them.

    Args:
        recipe: The recipe of the run.
        run_data: The base model and the users' data.

    Raises:
        RecipeError: A user has no cluster, a cluster is of an unknown user, or users are not in memory.
    """
    clusters = recipe.data.cluster_numbers  # by user
    if not clusters:
        return run_data
    where = "data.clusters"
    if not run_data.users.in_memory:
        raise RecipeError(f"{where}: got runtime.store: {recipe.runtime.store}; allowed: memory")
    names = run_data.users.names
    for name in clusters:
        if name not in names and name not in run_data.skipped:
            raise RecipeError(f"{where}: no user {name!r}; allowed: {list_names(names)}.{did_you_mean(name, names)}")
    missing = [name for name in names if name not in clusters]
    if missing:
        raise RecipeError(
            f"{where}: no cluster for {list_names(missing)}; give one for every user, such as {{{missing[0]}: a}}"
        )
    return run_data.with_users(replace(user, cluster=clusters[user.name]) for user in run_data.users)


def check_and_set_up(recipe: Recipe, *, keeps_memory: bool = True) -> Method:
    """Check the recipe, set up memory allocation and threads of this process, and return the recipe's method.

    Args:
        recipe: The recipe of the run that this process starts.
        keeps_memory: Whether to keep freed buffers, which makes later steps faster. With ``runtime.memory`` they are
            never kept.

    Raises:
        RecipeError: As :func:`check_recipe`; or the recipe has ``runtime.memory`` or ``method.specialists: auto``, and
            the caller has not chosen the settings that it leaves open.
    """
    method = check_recipe(recipe)
    if lacks_chosen_settings(recipe):
        raise RecipeError(
            f"runtime.memory: got {recipe.runtime.memory!r}; allowed: null for this command; `comingle cost` shows "
            "settings that fit"
        )
    require_specialists(recipe)
    if keeps_memory and recipe.runtime.memory is None:
        keep_buffers()
    if recipe.runtime.threads:
        torch.set_num_threads(recipe.runtime.threads)
    return method


def method_of(recipe: Recipe, *, checked: bool) -> Method:
    """Return the recipe's method, and check the recipe and set up torch for it, unless that is done.

    Args:
        recipe: The recipe, which names the method and its settings.
        checked: Whether :func:`check_and_set_up` was called for the recipe already, when the data was read.

    Raises:
        RecipeError: As :func:`check_recipe`.
    """
    if checked:
        return make(recipe.method.name, **recipe.method.settings)
    return check_and_set_up(recipe)


def default_method_note(recipe: Recipe) -> str:
    """Return a line that names the default method; empty if the recipe names a method."""
    if "method" in recipe.model_fields_set:
        return ""
    return f"method {recipe.method.name}: the default, as the recipe has no method"


def warn_unread(recipe: Recipe, method: Method) -> None:
    """Warn of settings in the recipe that have no effect with its method or optimisers.

    Only single runs call this: in a comparison such settings may be for other methods.
    """
    name, placement = recipe.method.name, method.placement
    unread_by_reason: dict[str, list[str]] = {}  # sections (floral) or keys (adapters.top_k) without effect
    learns_adaptors = placement.mixture is not None and placement.mixture.of == "adaptors"
    if not learns_adaptors:
        unread_by_reason[f"method {name}: has no adaptors in nets"] = ["floral"]
    data: Any = recipe.data
    reads_dataset = getattr(data, "dataset", None) is not None
    if reads_dataset and not data.split.given:
        unread_by_reason["data.split.given: is false and splits are drawn"] = ["data.dataset.split"]
    if not placement.routed:
        unread_by_reason[f"method {name}: has no router of tokens"] = ["adapters.top_k"]
    optimisers = {"training.experts": recipe.training.experts, "training.router": recipe.training.router}
    if not is_guarded(recipe.evaluation, method):
        unread_by_reason[f"method {name}: users have no shared and personal tensors"] = ["evaluation.guard"]
    if recipe.continue_from is None:
        unread_by_reason["without continue_from no data is replayed"] = ["data.replay"]
    for section, optimiser in optimisers.items():
        unread_keys = [f"{section}.betas", f"{section}.eps"]  # of AdamW only
        if optimiser.name == "adamw":
            unread_keys = [f"{section}.momentum"]
        unread_by_reason[f"{section}: {optimiser.name} has no such settings"] = unread_keys
    for reason, sections_or_keys in unread_by_reason.items():
        keys_in_recipe: list[str] = []
        for section_or_key in sections_or_keys:
            keys_in_recipe += [key for key, _value in changed_settings(recipe, section_or_key)]
        if keys_in_recipe:
            logger.warning("%s, so these keys have no effect: %s", reason, ", ".join(keys_in_recipe))


def describe(run_data: RunData, recipe: Recipe) -> Inputs:
    """Return digests of a run's base and data, to notice changes when the run is resumed or opened.

    They are written to the run folder. Users on disk, who may be millions, have one common digest; users in memory have
    one each.

    Args:
        run_data: The base model and the users' data.
        recipe: The recipe of the run, which may set a value for each user.
    """
    kind = run_data.kind.name
    digests_of_base = digests_of(run_data.base)
    settings = run_data.kind.settings(run_data)
    if not run_data.users.in_memory:
        settings[POPULATION] = {
            "users": len(run_data.users),
            "names": digest_names(run_data.users.names),
            "data": run_data.users.digest,
        }
        return Inputs(kind=kind, **digests_of_base, users={}, settings=settings)
    # Recipe keys with a value for each user, such as {"adapters.rank": [8, 4, 8]}.
    values_by_key = recipe.for_users(run_data.users.names).values_of_users()
    if "method.specialists" in values_by_key:
        values_by_key["specialists"] = values_by_key.pop("method.specialists")  # as in records of earlier versions
    users: dict[str, UserInputs] = {}
    # The users whose data this process has, with their numbers among all users.
    for number, user in zip(run_data.numbers, run_data.present, strict=True):
        values_of_user = {key: values[number] for key, values in values_by_key.items() if number < len(values)}
        users[user.name] = UserInputs(
            counts={split: len(getattr(user, split)) for split in SPLITS},
            digests=run_data.digests[user.name],
            cluster=getattr(user, "cluster", None),  # the true one, of users that were generated in clusters
            given=values_of_user,  # the user's values of such recipe keys
        )
    return Inputs(kind=kind, **digests_of_base, users=users, settings=settings)


# -------------------------------------------------------------------- build


def build(recipe: Recipe, run_data: RunData, *, method: Method | None = None, store: str | None = None) -> InProcess:
    """Return the clients and the server of a recipe before the first round.

    Args:
        recipe: The recipe of the run.
        run_data: The base model and the users' data.
        method: The method of the recipe; None: it is made now.
        store: Where users' tensors are, such as ``"memory"``; None: as in the recipe's ``runtime.store``.

    Raises:
        ComingleError: Settings, data and base do not fit each other.
    """
    require_specialists(recipe)
    recipe = resolve_users_per_step(recipe, run_data)
    if method is None:
        method = make(recipe.method.name, **recipe.method.settings)
    plan = make_plan(recipe, method, run_data.users.names)
    plan = with_start(plan.updated("runtime", store=store or recipe.runtime.store), recipe, run_data.users.names)
    federation = federate(run_data.kind.clients(recipe, run_data, plan))
    federation.server.check_rounds(plan)
    return federation


def with_start(plan: RunPlan, recipe: Recipe, names: Sequence[str]) -> RunPlan:
    """Return a plan with the adapters of the recipe's ``adapters.start``, which are read; unchanged without any.

    Args:
        plan: The plan.
        recipe: The recipe.
        names: Names of all users, in order.

    Raises:
        RecipeError: A list of adapters has another length than there are users.
        BaseModelError: An adapter cannot be read.
    """
    start = recipe.for_users(names).adapters.start
    if start is None:
        return plan
    if isinstance(start, str):
        return replace(plan, start=read_peft(adapter_folder(start, "adapters.start")))
    if len(start) != len(names):
        raise RecipeError(f"adapters.start: {len(start)} adapters for {len(names)} users; give one, or one per user")
    start_by_name = {}
    for name, adapter in zip(names, start, strict=True):
        if adapter is not None:
            start_by_name[name] = read_peft(adapter_folder(adapter, f"adapters.start.{name}"))
    return replace(plan, start=start_by_name)


def run_in(
    folder: Path | None,
    recipe: Recipe,
    run_data: RunData,
    *,
    resume: bool,
    force: bool,
    method: Method | None = None,
    observers: Callable[[Clients], Sequence[Observer]] = lambda clients: (),
    build_federation: Callable[..., InProcess] = build,
    enter_folder: Callable[[ExitStack, AbstractContextManager[None]], object] = ExitStack.enter_context,
) -> Run:
    """Build a recipe's federation and run it in its folder.

    Args:
        folder: The run folder; None writes nothing.
        recipe: The recipe of the run.
        run_data: The base model and the users' data.
        resume: Whether to resume from the newest checkpoint in the folder.
        force: Whether to replace what is in the folder.
        method: The method of the recipe; None: it is made now.
        observers: Returns observers of the run's events, given its clients. In a run of several processes, only the
            first one calls it.
        build_federation: :func:`build`; in a run of several processes, a function that builds this process's shard.
        enter_folder: Enters the context that opens the folder. In a run of several processes, only the first one does.

    Raises:
        ComingleError: As :func:`build`, :func:`comingle.runs.folders.open_folder` and :func:`execute`.
    """
    if method is None:
        method = make(recipe.method.name, **recipe.method.settings)
    with ExitStack() as contexts:
        contexts.enter_context(own_errors(method))  # names the file of a plug-in in errors that its code raises

        # A run that continues an earlier one may train again on a share of the earlier data (data.replay).
        earlier: Sequence[EarlierData] = ()
        if recipe.continue_from is not None:
            earlier = read_earlier_data(recipe, run_data, partial(prepare_earlier, run_data.base))
        train_data, replayed_here = add_replay(recipe, run_data, earlier)  # amounts, of this process's users

        federation = build_federation(recipe, train_data, method=method)
        local = build_local(federation, recipe, train_data)  # the users as they train alone; None without a guard
        replayed = federation.merge_users(lambda: replayed_here)
        digests = federation.merge_users(lambda: replayed_digests(earlier, replayed_here))
        run_observers: Sequence[Observer] = ()
        if federation.is_first_process:
            run_observers = observers(federation.clients)

        has_checkpoint = folder is not None and resume and bool(list_checkpoints(folder))
        continues: JsonObject | None = None
        # A resumed run has already started from the earlier run, so its checkpoint is restored instead.
        if recipe.continue_from is not None and not has_checkpoint:
            continues = start_from_run(federation, recipe, _merged_inputs(federation, run_data, recipe))
            continues["replayed"] = replayed
            if digests:
                continues["replayed_digests"] = digests

        if folder is not None:
            if has_checkpoint:
                restore_account(federation.server, folder)  # the privacy budget that is spent
            inputs = _merged_inputs(federation, run_data, recipe)  # digests of base and data, of all processes
            is_pooled = method.placement.pooled
            opened_folder = open_folder(folder, recipe, inputs, resume=resume, force=force, pooled=is_pooled)
            # Only the first process enters it, which has the numbers of all users; its errors end all processes.
            check = partial(check_replay, folder, replayed, digests)
            enter_folder(contexts, _with_check(opened_folder, check, is_needed=has_checkpoint))
        settings = run_data.kind.settings(run_data)
        finished = execute(
            federation,
            recipe,
            folder,
            resume=resume and folder is not None,
            observers=run_observers,
            num_classes=_num_classes(settings),
            continues=continues,
            earlier=earlier,
            local=local,
        )
    return replace(finished, settings=settings)


def _num_classes(settings: JsonMapping) -> int | None:
    """Return the number of classes of nets trained with cross-entropy, to warn of results at chance; else None.

    Args:
        settings: Facts about the data that the run folder stores, such as the loss and the number of classes.
    """
    return settings["classes"] if settings.get("loss") == CROSS_ENTROPY.name else None


@contextmanager
def _with_check(opening: AbstractContextManager[None], check: Callable[[], None], *, is_needed: bool) -> Iterator[None]:
    """Run a check if it is needed, then enter another context.

    Args:
        opening: The context.
        check: Raises an error.
        is_needed: Whether to run the check.
    """
    if is_needed:
        check()
    with opening:
        yield


def prepare_earlier(base: Base | None, recipe: Recipe, date: str) -> RunData:
    """Read the data of an earlier run, to load its users' final models.

    Validation data is not used for that, so users without it are not refused.

    Args:
        base: The base model, which is loaded already; None for a run of nets.
        recipe: Recipe of the earlier run.
        date: Date that chat templates wrote in the earlier run; the same date gives the same tokens.
    """
    return prepare(recipe, base=base, validates=False, given=Given(date=date), method=check_recipe(recipe))


def _merged_inputs(federation: InProcess, run_data: RunData, recipe: Recipe) -> Inputs:
    """Return the record of the base and the data that the run has read.

    With several processes, the first one gets the users of all processes and the others only their own.
    """

    def inputs_here() -> dict[str, Any]:
        """Return the record of this process's users as a dict, which can be sent to another process."""
        return asdict(describe(run_data, recipe))

    record = federation.merge_users(inputs_here)
    users = {name: UserInputs(**record_of_user) for name, record_of_user in record.pop("users").items()}
    return Inputs(users=users, **record)


def _recorded_wall_seconds(folder: Path, rounds: int) -> JsonObject:
    """Return the run's ``{"wall_seconds": ...}`` from ``metrics.json``, or ``{}`` if the file is of another round.

    A finished run that is resumed only repeats its evaluation, so its training time stays as recorded.

    Args:
        folder: The run folder.
        rounds: Number of rounds that are done.
    """
    try:
        recorded = read_metrics(folder)
    except RunError:  # there are no metrics, or the file is damaged
        return {}
    if recorded.get("rounds") != rounds:
        return {}
    return {"wall_seconds": recorded["wall_seconds"]}


def _settings_entry(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Return the settings of the method for a run's metrics.

    Returns:
        ``resolved_method_settings`` with all settings, and ``method_settings`` with those that differ from the
        defaults. Each of the two is left out if it would be empty.
    """
    defaults = settings_of(recipe.method.name)
    changed = {key: value for key, value in recipe.method.settings.items() if value != defaults.get(key)}
    resolved: dict[str, Any] = {}
    for key, value in {**defaults, **recipe.method.settings}.items():
        if value is None or isinstance(value, str | int | float | list | tuple | dict):
            resolved[key] = value
        else:  # a default of a user's own method may be an object that JSON cannot hold
            resolved[key] = str(value)
    entries: dict[str, dict[str, Any]] = {}
    if changed:
        entries["method_settings"] = changed
    if resolved:
        entries["resolved_method_settings"] = resolved
    return entries


def _write_skipped_users(folder: Path, skipped: Mapping[str, object]) -> None:
    """Write the skipped users to the run folder as a JSON object, with one line per user.

    Args:
        folder: The run folder.
        skipped: Why each user was skipped, by name.
    """
    lines = [f"  {json.dumps(name)}: {json.dumps(reason)}" for name, reason in skipped.items()]
    write_text(folder / SKIPPED, "{\n" + ",\n".join(lines) + "\n}\n")


def _metrics_of_run(
    federation: InProcess,
    recipe: Recipe,
    scores: Sequence[AnyScore],
    clock: Clock,
    evaluations: Evaluations,
    num_classes: int | None,
) -> JsonObject:
    """Return the content of ``metrics.json``: test results, costs, warnings and settings of the method.

    If several processes share a run, each one calls this function with its shard; the first one gets the metrics of all
    users.

    Args:
        federation: The federation after the last round.
        recipe: The recipe, for the settings of its method.
        scores: Final scores of the users of this process.
        clock: Time, tokens and bytes of the run.
        evaluations: All evaluations of the run.
        num_classes: Number of classes of nets trained with cross-entropy; None for other models.
    """
    clients = federation.clients
    metrics_of_users = federation.merge_users(lambda: users_metrics(clients, scores))
    metrics = summarise(clients, scores, clock, metrics_of_users).as_dict()
    metrics.update(clients.left_out)  # skipped users and rows
    metrics.update(federation.server.mechanisms.metrics)  # such as the epsilon of differential privacy
    if federation.is_first_process:
        # The confidence interval of the mean, if only a sample of the users was evaluated.
        metrics.update(sample_entry(clients, metrics_of_users, metrics["measure"]))
    evaluations.add_valid_losses(metrics)
    # Roles, such as the router, that were never trained because the run has too few local steps.
    metrics.update(untrained_entry(clients.plan, clients.steps.local_steps))
    metrics.update(outcome_warnings(clients.method, evaluations, metrics, num_classes=num_classes))
    metrics.update(_settings_entry(recipe))
    return metrics


def _amounts_of_all_users(federation: InProcess) -> JsonObject:
    """Return the amount of data of each user of all processes, by name, for the start event.

    Every process calls this function. Only the first one gets the users of all processes, others get their own.
    """
    clients = federation.clients

    def amounts_here() -> JsonObject:
        """Return the amount of data of each user of this process, by name."""
        return {user.name: amounts(user, clients.batch_source.unit) for user in clients.scored_users}

    return federation.merge_users(amounts_here)


def _restore(federation: InProcess, recipe: Recipe, folder: Path | None, *, resume: bool) -> tuple[int, Clock, int]:
    """Restore the newest checkpoint in the run folder, if the run is resumed and there is one.

    Args:
        federation: The federation, whose clients and server are restored.
        recipe: The recipe, whose fingerprint the checkpoint must have.
        folder: The run folder, which is open; None if the run has none.
        resume: Whether to resume from the newest checkpoint in the folder.

    Returns:
        The number of rounds that are done; time, tokens and bytes of these rounds; and the length in bytes of
        ``events.jsonl`` at the checkpoint, since a resumed run repeats later events. Without a checkpoint all are 0.
    """
    if folder is None or not federation.open_folder(folder, resume=resume):
        return 0, Clock(), 0
    progress = federation.restore(folder, recipe.fingerprint)
    return progress.round, progress.clock, progress.events_bytes


def execute(
    federation: InProcess,
    recipe: Recipe,
    folder: Path | None,
    *,
    resume: bool = False,
    observers: Sequence[Observer] = (),
    num_classes: int | None = None,
    continues: JsonObject | None = None,
    earlier: Sequence[EarlierData] = (),
    local: InProcess | None = None,
) -> Run:
    """Run the rounds of a federation and write its events, checkpoints and metrics.

    If several processes share a run, each one calls this function with its shard of the federation. Only the first
    one writes events and metrics.

    Args:
        federation: The federation, before its first round.
        recipe: The recipe of the run.
        folder: The run folder, which is open; None writes nothing.
        resume: Whether to resume from the newest checkpoint in the folder.
        observers: Functions that are called with each event.
        num_classes: Number of classes of nets trained with cross-entropy; None for other models.
        continues: Result of :func:`comingle.runs.continuation.start_from_run`, for the start event; None for a run that
            continues no other.
        earlier: Data of the runs that this one continues, to measure forgetting.
        local: The users as they train alone, for ``evaluation.guard``; None without a guard.

    Returns:
        The run. Without a folder it also holds the events.

    Raises:
        RunError: The checkpoint to resume from is damaged or belongs to another recipe.
        DivergenceError: A user's loss is not finite.
    """
    clients, is_first_process = federation.clients, federation.is_first_process
    federation.keep_key(folder, resume=resume)  # set the key from which privacy noise is drawn; store it in the folder
    if is_first_process:
        federation.server.warn_of_noise(clients.plan)
    # kept_bytes: length of events.jsonl at the checkpoint; later events are deleted, as their rounds are repeated.
    rounds_done, clock, kept_bytes = _restore(federation, recipe, folder, resume=resume)
    log: EventLog | None = None
    trackers: list[Tracker] = []
    if folder is not None and is_first_process:
        log = EventLog(folder / "events.jsonl", keep_bytes=kept_bytes)
        trackers = list(run_trackers(folder, recipe, len(clients.population_names)))
    evaluations = Evaluations()
    if folder is not None and kept_bytes > 0:
        evaluations = Evaluations(read_evaluations(folder))  # those before the checkpoint
    event_receivers: list[Observer] = [*trackers, *observers, evaluations]
    if log is not None:
        event_receivers.insert(0, log)
    if folder is not None and is_first_process and clients.state.in_memory:
        event_receivers.append(account_writer(folder, federation.server.mechanisms.account))
    events_in_memory: list[dict[str, Any]] = []

    def observe(event: Event) -> None:
        """Pass an event to the log, the trackers and all observers; keep it in memory if there is no log."""
        if log is None and event["event"] != "step":
            events_in_memory.append(finite(event))  # as in the log, where JSON has no NaN
        for receive in event_receivers:
            receive(event)

    if folder is not None and clients.skipped and is_first_process:
        _write_skipped_users(folder, clients.skipped)

    try:
        amounts_of_all = _amounts_of_all_users(federation)
        # The log of a resumed run already has a start event, unless the log was deleted.
        log_was_lost = log is not None and log.size_bytes == 0
        if log_was_lost or kept_bytes == 0:
            start = start_event(clients.plan, clients.model.name, amounts_of_all)
            if continues is not None:
                start["continues"] = continues
            observe({**start, **clients.left_out, **_specialists_entry(clients.method, clients.population_names)})
        write_checkpoint = checkpoint_writer(federation, recipe, folder, log)
        scores = run_rounds(
            federation,
            observe=observe,
            checkpoint=write_checkpoint,
            first_round=rounds_done,
            clock=clock,
            scores_start=keeps_earlier_best(recipe),
        )
        if scores is None:
            scores = []
        if local is not None:
            if recipe.continue_from is not None:
                section = recipe.continue_from
                continue_local(local.clients, Path(section.run), moments=section.moments)
            train_local(local, federation, recipe, folder, observe, resume=resume)
        metrics = _metrics_of_run(federation, recipe, scores, clock, evaluations, num_classes)
        if forgotten := forgetting(federation, earlier):
            metrics["earlier"] = forgotten
        if local is not None:
            since = None if folder is None else folder.name
            metrics["served"] = choose_served(
                federation, local, recipe, users=metrics["users"], since=since, earlier=served_in(recipe)
            )
            observe({"event": "served", "round": metrics["rounds"], "users": metrics["served"]})
        had_finished = resume and rounds_done == metrics["rounds"]
        if folder is not None and had_finished:  # this process has trained nothing, so keep the recorded time
            metrics.update(_recorded_wall_seconds(folder, rounds_done))
        observe(end_event(metrics))
    except DivergenceError as error:
        checkpoints = [] if folder is None else list_checkpoints(folder)
        if not checkpoints:
            raise
        raise DivergenceError(f"{error}; the last checkpoint is {checkpoints[-1].name}") from error
    finally:
        if log is not None:
            log.close()
        for tracker in trackers:
            tracker.close()
    if folder is not None:
        federation.write_record(folder / "metrics.json", metrics)
    return Run(
        folder=folder,
        recipe=recipe,
        metrics=metrics,
        federation=federation,
        local=local,
        events_in_memory=tuple(events_in_memory),
    )
