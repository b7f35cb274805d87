"""A client of a federation: its session with the server, and the steps of its tasks.

A task is a list of steps, carried out in order:

    join       read the public part of the federation, and check that this user can take part
    receive    apply a download
    hear       store the current models as the best ones, if the server's verdict says so
    train      take the local steps of a round
    upload     send the shared tensors
    advertise  secure sums: send the keys of a sum
    share      secure sums: read the other users' keys; send each a share of this user's secrets
    mask       secure sums: send the shared tensors behind masks
    unmask     secure sums: send the shares that remove the masks from a sum of enough users
    finish     carry out the method's final step, after the last round
    evaluate   score the model on the user's own test data
    choose     restore the models of the best round
    end        the run has ended: save the user's model

Between the runs of a continuous federation, the only step of a task is "count": report how much data is new.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from comingle.config import Recipe, parse_recipe
from comingle.config.sections import ContinuationSection, with_older_defaults
from comingle.config.settings import MEMORY, Terms
from comingle.data.populations import as_users
from comingle.federation.client_store import (
    COUNTED,
    MODEL,
    ClientStore,
    FixedRun,
    check_run_limit,
    fix_data,
    own_account,
    read_fixed_run,
    record_training,
    rounds_if_early,
    run_folder,
    save_model,
    sources_digest,
    start_ledger,
)
from comingle.federation.conditions import DeviceConditions
from comingle.federation.messages import (
    Answer,
    Task,
    check_address,
    check_download,
    check_task,
    check_verdict,
    deleted_runs,
    earlier_runs,
    unpack_task,
)
from comingle.federation.participant import LEVELS_WITH_SCORES, TELLS, Own, Tells
from comingle.federation.public import (
    ENDED,
    Public,
    plan_of,
    read_public,
    remote_data,
    tokens_of,
    trains_whole_epochs,
)
from comingle.methods import own_errors
from comingle.models.base import Base, digests_of
from comingle.models.hardware import private_bytes, resolve_device, resolve_dtype, return_freed_memory
from comingle.models.kernels import expert_mlp
from comingle.models.loading import is_public
from comingle.privacy.secure_client import (
    Session,
    keys_message,
    masked_message,
    read_all_keys,
    read_sealed_shares,
    read_survivors,
    shares_message,
)
from comingle.privacy.secure_sum import VECTOR, as_words
from comingle.protocol.messages import LOSS, LOWEST, Download, Upload, validation_report
from comingle.protocol.wire import pack, unpack
from comingle.runs.continuation import (
    EarlierData,
    add_replay,
    copy_users_state,
    lacks_references,
    read_earlier_data,
)
from comingle.runs.given import Given
from comingle.runs.guard import ClientGuard, is_guarded, plan_alone
from comingle.runs.session import (
    check_and_set_up,
    chooses_specialists,
    describe,
    memory_limit,
    prepare,
    prepare_earlier,
    use_chosen_settings,
)
from comingle.training.checkpoints import read_progress, read_state
from comingle.training.client import Clients, finetuned, finish, settle, train
from comingle.training.evaluation import amounts, data_amounts, measure_of, measured, users_metrics, users_routing
from comingle.training.kinds.base import NETS, RunData, kind_of
from comingle.training.plan import keep_key, terms_of
from comingle.training.settings import warn_of_untrained
from comingle.utils.errors import (
    BaseModelError,
    ComingleError,
    DataError,
    DeclinedError,
    DivergenceError,
    MessageError,
    RecipeError,
    RunError,
    list_names,
)
from comingle.utils.files import list_checkpoints
from comingle.utils.inputs import DATE, INPUTS, SPLITS, Inputs, read_inputs, write_inputs
from comingle.utils.records import PUBLIC, client_runs, convert_disk_errors, expand_home, write_json

Received = Download | Upload | None
"""The server's message for a step of a secure sum; None for the first step, which needs none."""


def advertise(store: ClientStore, task: Task, message: Received) -> Upload:
    """Begin a secure sum with new secrets of this user, and return the message with the user's public keys.

    Args:
        store: What the client has of the run: the user's data, model and progress.
        task: The server's task that asks for this first step of secure aggregation.
        message: Unused: in this first step the server sends nothing.
    """
    session = store.sessions.begin(_terms(store, task), task.user)
    public_keys = session.advertise()
    return keys_message(task.user, session.terms.round, public_keys)


def share(store: ClientStore, task: Task, message: Received) -> Upload:
    """Split this user's secrets into shares, one for each other user, and return them encrypted for their receivers.

    Args:
        store: What the client has of the run: the user's data, model and progress.
        task: The server's task that asks for this second step of secure aggregation.
        message: The other users' public keys.
    """
    session = _current_session(store, task)
    own_keys = session.advertise()  # the keys that this user has sent in the step "advertise"
    public_keys_by_user = read_all_keys(message, task.user, session.terms.round, own_keys)
    encrypted_shares_by_user = session.share(public_keys_by_user)
    return shares_message(task.user, session.terms.round, encrypted_shares_by_user)


def mask(store: ClientStore, task: Task, message: Received) -> Upload:
    """Return this user's upload with masks added, which the server can remove only from the sum over users.

    Args:
        store: What the client has of the run: the user's data, model and progress.
        task: The server's task that asks for this third step of secure aggregation.
        message: Shares of the other users' secrets, which they encrypted for this user.
    """
    session = _current_session(store, task)
    round_number = session.terms.round
    encrypted_shares = read_sealed_shares(message, task.user, round_number)
    only_user = 0  # this client group has a single user
    upload = store.clients.upload([only_user], round_number, {})
    # All shared tensors, rounded to integers and concatenated: with integers, masks cancel exactly.
    unmasked = as_words(upload.tensors[VECTOR][only_user])
    masked = session.mask(encrypted_shares, unmasked)
    return masked_message(task.user, round_number, masked)


def unmask(store: ClientStore, task: Task, message: Received) -> Upload:
    """Return the shares of other users' secrets with which the server removes the masks from the sum.

    This is the last step of secure aggregation, after the server has added the masked uploads.

    Args:
        store: The user's part of the run, with its secrets of this sum.
        task: The server's task that asks for this step.
        message: Names of the users whose masked uploads are in the sum.

    Raises:
        MessageError: No sum of this round was begun, or fewer users than the threshold are in the sum, which would
            reveal too much of each upload.
    """
    session = _current_session(store, task)
    users_in_sum = read_survivors(message, task.user, session.terms.round)
    shares_by_user = session.unmask(users_in_sum)
    return shares_message(task.user, session.terms.round, shares_by_user)


SUM_STEPS: dict[str, Callable[[ClientStore, Task, Received], Upload]] = {
    "advertise": advertise,
    "share": share,
    "mask": mask,
    "unmask": unmask,
}


def _current_session(store: ClientStore, task: Task) -> Session:
    """Return the state of the secure sum to which a task belongs, such as the user's keys.

    A secure sum lets the server see only the sum of the uploads. It takes several tasks; the first one ("advertise")
    creates the state.
    """
    return store.sessions.current(_terms(store, task))


def _terms(store: ClientStore, task: Task) -> Terms:
    """Return the terms of a round's secure sum: round, users, threshold and number of entries.

    The client derives them from the recipe, so a hostile server cannot set a lower threshold.

    Raises:
        MessageError: The federation uses no secure aggregation.
    """
    clients = store.clients
    if clients.plan.sums is None:
        raise MessageError("task: got a step of secure aggregation, which this federation does not use")
    num_entries = clients.model.layout.count(clients.method.shared)
    round_number = task.round + 1  # Tasks count rounds from 0, terms from 1.
    return terms_of(clients.plan, task.run, round_number, num_entries)


def open_store(
    folder: Path,
    own: Own,
    public: Public,
    bases: dict[Any, Base] | None = None,
    say: Say = lambda line: None,
) -> ClientStore:
    """Read the user's data and base model, and open the user's part of a run in its state after the last task.

    Args:
        folder: Folder of the run; created if it is new.
        own: The user's own settings, such as the paths of its data.
        public: What all users may know of the federation, such as its recipe and their names.
        bases: Base models that the clients of this process share; a base that is loaded here is added. None to share
            none.
        say: Called with each line to show to the user.

    Raises:
        MessageError: Recipe, base, shapes or labels differ between server and user; names both values.
        ComingleError: The user's data or base cannot be used.
    """
    public.check()
    fixed = read_fixed_run(folder)
    if fixed is not None:
        own = own.model_copy(update={"data": fixed.data})
    recipe = _own_recipe(own, public)
    _raise_unless_expected(own, public)
    recipe = _with_choices(folder, recipe, public, own, say)
    if fixed is not None and fixed.continues:  # this user may have been absent from the server's last run
        recipe = recipe.with_changes({"continue_from.run": fixed.continues})
    # Between rounds other programs use the device, so freed memory is returned to the system.
    method = check_and_set_up(recipe, keeps_memory=False)
    date_in_prompts = str(public.settings.get(DATE, ""))  # empty if the chat template writes no date
    own_data = prepare(recipe, given=Given(date=date_in_prompts, loaded_bases=bases), method=method)
    _raise_unless_same_base(own, public, own_data)
    earlier = _read_earlier_data(folder, recipe, own_data)
    train_data, replayed = add_replay(recipe, own_data, earlier)  # own data, and a share of earlier data (data.replay)
    run_data = _data_of_run(own, public, recipe, train_data)  # with the names of all users
    _raise_unless_same_settings(own, public, own_data)
    clients = run_data.kind.clients(recipe, run_data, plan_of(public, recipe))
    starts_now = not list_checkpoints(folder)
    if recipe.continue_from is not None and starts_now:
        _start_from_earlier_run(clients, recipe.continue_from, folder.parent, say)
    guard = _guard_of(folder, public, recipe, run_data, clients)
    if guard is not None and recipe.continue_from is not None and starts_now:
        section = recipe.continue_from
        guard.continue_from(run_folder(folder.parent, section.run), moments=section.moments)

    answers_folder = folder / "answers"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if (account := own_account(clients)) is not None:
        start_ledger(folder, account, _earlier_folder(folder, recipe, fixed))
    answers_folder.mkdir(exist_ok=True)
    if not (folder / PUBLIC).exists():
        write_json(folder / PUBLIC, public.as_dict())
    store = ClientStore(
        folder=folder,
        public=public,
        recipe=recipe,
        own_data=own_data,
        clients=clients,
        state_before_first_task=clients.state.copy(compact=True),  # stores a tensor of zeros as a single zero
        earlier=earlier,
        guard=guard,
    )
    has_answered = any(answers_folder.glob("*.bin"))  # whether this client has answered a task of the run
    inputs = describe(own_data, recipe)
    if replayed:
        inputs.users[own.name].given[REPLAYED] = replayed[own.name]
    _check_inputs(folder, own, inputs, has_answered=has_answered)
    if recipe.continue_from is not None and starts_now:
        store.save_start()
    keep_key(folder, *clients.mechanisms, begun=has_answered)  # the key from which privacy noise is drawn
    store.remove_drafts()
    store.load_newest()
    return store


REPLAYED = "data.replay"
"""Key of the recorded amount of data of the earlier run that a client trains on again."""


def _earlier_folder(folder: Path, recipe: Recipe, fixed: FixedRun | None) -> Path | None:
    """Return the folder of the user's previous run, whose privacy losses add to those of a new run; None without one.

    Its ledger records every upload or step with noise of this user, in it and in the runs before it.

    Args:
        folder: Folder of the run.
        recipe: The user's recipe, in which ``continue_from`` has the name of the earlier run.
        fixed: The run, if its federation is continuous.
    """
    name = recipe.continue_from.run if recipe.continue_from is not None else ""
    if fixed is not None:  # the user may have released something in a run from which it has no state
        name = fixed.ledger or fixed.continues
    earlier = run_folder(folder.parent, name)
    return earlier if name and earlier.exists() else None


def _read_earlier_data(folder: Path, recipe: Recipe, own_data: RunData) -> Sequence[EarlierData]:
    """Return the user's data of the earlier run that a federation continues, if it took part to its end.

    Args:
        folder: Folder of the new run; that of the earlier run is beside it.
        recipe: The user's recipe, in which ``continue_from`` has the name of the earlier run.
        own_data: The user's own data, and the base model.
    """
    if recipe.continue_from is None:
        return ()
    model = run_folder(folder.parent, recipe.continue_from.run) / MODEL
    if not model.exists():
        return ()
    recipe = recipe.with_changes({"continue_from.run": str(model)})
    return read_earlier_data(recipe, own_data, partial(prepare_earlier, own_data.base))


def _start_from_earlier_run(clients: Clients, section: ContinuationSection, state: Path, say: Say) -> None:
    """Copy the user's tensors at the end of the earlier run; a user without any starts as a new one.

    Args:
        clients: The client group of the user, changed in place.
        section: The recipe's section, with the name of the earlier run.
        state: The user's state folder.
        say: Called with a line for the user.

    Raises:
        RecipeError: The tensors have other shapes.
        RunError: The stored state is damaged.
    """
    checkpoints = list_checkpoints(run_folder(state, section.run))
    if not checkpoints:
        say(
            f"continues run {section.run}, of which {state} has no model: starts as a new user; if the user took part, "
            "stop, and name its earlier folder with --state"
        )
        clients.state.versions.fill_(-1)  # when it joins, it asks the server for the shared tensors
        return
    newest = checkpoints[-1]
    progress = read_progress(newest)
    users_state, _no_server_state = read_state(newest, progress, clients.model.layout)
    copy_users_state(clients, users_state, progress.trainers, newest, moments=section.moments)
    # The server sends the shared tensors if these are not the newest.
    clients.state.versions.fill_(-1 if lacks_references(clients, users_state) else 0)
    say(f"continues run {section.run}: starts from this user's model at its end")


def _guard_of(folder: Path, public: Public, recipe: Recipe, run_data: RunData, clients: Clients) -> ClientGuard | None:
    """Create the guard of a user before the first task, if the recipe has ``evaluation.guard``; else return None.

    Args:
        folder: Folder of the run.
        public: What all users may know of the federation, such as its recipe and their names.
        recipe: The user's recipe.
        run_data: The base model and the user's data.
        clients: The client group of the user.
    """
    if not is_guarded(clients.plan.evaluation, clients.method):
        return None
    local = run_data.kind.clients(recipe, run_data, plan_alone(clients.plan))
    return ClientGuard(run=folder, recipe=recipe, clients=clients, local=local, fingerprint=public.digest)


def _data_of_run(own: Own, public: Public, recipe: Recipe, own_data: RunData) -> RunData:
    """Return the data of a run as this client has it: the names of all users, and the data of its own user.

    Args:
        own: The user's own settings.
        public: Public part of the federation, with the names of all users.
        recipe: Settings of the run, with the user's own.
        own_data: The data and base model of this user alone.
    """
    run_data = remote_data(public, recipe, own_data.base)  # users with names, without data
    own_index = public.users.index(own.name)
    all_users = list(run_data.users)
    (own_user,) = own_data.users
    all_users[own_index] = own_user
    users = as_users(all_users)
    common = run_data.common  # data that all users share; it has the list of users too
    if common is not None:
        common = replace(common, users=users)
    users_here = (own_index,)  # users whose data is on this machine
    # `unread=False`: this process has the user's data, and checks it before training.
    return replace(run_data, users=users, common=common, here=users_here, unread=False)


def _check_inputs(folder: Path, own: Own, current: Inputs, *, has_answered: bool) -> None:
    """Check that the run's folder belongs to this user and that the user's data has not changed.

    Before the client's first answer the user may still change the data, so ``current`` is only recorded.

    Args:
        folder: Folder of the run.
        own: The user's own settings, of which only the name is used.
        current: The user's name, and digests of the data as it is now.
        has_answered: Whether the client has answered a task of this run.

    Raises:
        RunError: The folder is another user's.
        DataError: The data has changed.
    """
    if not has_answered or not (folder / INPUTS).exists():
        write_inputs(folder, current)
        return
    try:
        recorded = read_inputs(folder)
    except RunError:
        raise RunError(f"{folder / INPUTS}: damaged; delete {folder} to restart this run") from None
    if list(recorded.users) != [own.name]:
        owner = list_names(recorded.users)
        raise RunError(f"{folder}: belongs to user {owner}, not to {own.name!r}; use another --state")
    recorded_digests, current_digests = recorded.users[own.name].digests, current.users[own.name].digests
    changed_splits = [split for split in SPLITS if recorded_digests[split] != current_digests[split]]
    recorded_replay, current_replay = (inputs.users[own.name].given.get(REPLAYED, 0) for inputs in (recorded, current))
    if recorded_replay != current_replay:
        raise DataError(
            f"{folder}: user {own.name!r}: replays {current_replay} of the earlier run; at the start "
            f"{recorded_replay}; restore the earlier data, or join again with another --state"
        )
    if changed_splits:
        raise DataError(
            f"{folder}: user {own.name!r}: the {' and '.join(changed_splits)} data changed since the run began; "
            "restore it, or join again with another --state"
        )


def known_public(folder: Path) -> Public | None:
    """Return the stored public part of a run's federation; None if the user has not joined it before.

    Args:
        folder: Folder of the run.

    Raises:
        RunError: The file is damaged.
    """
    path = folder / PUBLIC
    if not path.exists():
        return None
    try:
        return read_public(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: damaged ({error}); delete {folder} to restart this run") from None


LIGHT_TOKENS = 256
"""Number of tokens in a pass of a client in a 16-bit format; 512 take 5% less time and 100 MB more (SmolLM2-135M)."""


def _own_recipe(own: Own, public: Public) -> Recipe:
    """Return the user's recipe: the federation's, with the user's data, base and runtime.

    A user without a setting for the base uses the federation's, which must not be a local path.

    Args:
        own: The user's own settings: name, data, base and runtime.
        public: Public part of the federation, with its recipe and the names of its users.

    Raises:
        MessageError: The user is not one of the federation, or the server names a local path as base.
        RecipeError: A setting of the user is wrong.
    """
    if own.name not in public.users:
        raise MessageError(f"user {own.name!r}: not a user of this federation; allowed: {', '.join(public.users)}")
    content: dict[str, Any] = dict(with_older_defaults(public.recipe))  # adds a key that older recipes lack
    content["data"] = own.data_section(content["data"])
    if own.base is not None:
        content["base"] = own.base
    else:
        _refuse_local_path(public.whole_recipe().base)
    runtime = own.runtime_section(content.get("runtime", {}))
    runtime.setdefault("users_per_step", 1)  # this client trains a single user
    runtime["store"] = MEMORY  # which fits into memory, whatever the federation's recipe says
    content["runtime"] = runtime
    recipe = parse_recipe(content, where=f"user {own.name!r}")
    return recipe.with_changes(_lighter_runtime(recipe), where=f"user {own.name!r}")


def _lighter_runtime(recipe: Recipe) -> dict[str, Any]:
    """Return runtime settings with which training a language model in a 16-bit format needs less memory on a CPU.

    For example ``{"runtime.native_code": True, "runtime.micro_batch": 2}``, without keys that the recipe sets. These
    settings change rounding. In float32 the result is therefore empty, since a client then has to compute the same
    numbers as a simulation.
    """
    runtime, device = recipe.runtime, resolve_device(recipe.runtime.device)
    trains_language_model = kind_of(recipe).needs_base
    if not trains_language_model:
        return {}
    if runtime.memory is not None:  # `_with_choices` then chooses these settings
        return {}
    dtype = resolve_dtype(runtime.dtype, device)
    is_16_bit = dtype.itemsize <= 2
    has_native_code = expert_mlp.fits(device, dtype)  # on a CPU only
    if not is_16_bit or not has_native_code:
        return {}
    texts_per_pass = max(1, LIGHT_TOKENS // recipe.training.context)
    settings = {"native_code": True, "micro_batch": texts_per_pass}
    return {f"runtime.{key}": value for key, value in settings.items() if key not in runtime.model_fields_set}


TOKENIZER_BYTES = 50_000_000
"""Memory of a tokenizer, of the user's data and of what is imported for them; measured with SmolLM2-135M."""

CHOICE = "memory.json"
"""File with the settings that this device has chosen, and the inputs of the choice."""


def _with_choices(folder: Path, recipe: Recipe, public: Public, own: Own, say: Say) -> Recipe:
    """Replace the settings of a recipe that it leaves to the device, and return the recipe.

    These are the number of the user's specialist experts (``method.specialists: auto``), and with a limit
    ``runtime.memory`` settings that reduce memory, such as fewer texts in a forward pass. They are chosen when a run
    begins and stored in its folder (``memory.json``). They are chosen again if the recipe or the user's settings of the
    device change; but the number of specialists stays once the user has trained them.

    Args:
        folder: Folder of the run on the client.
        recipe: The recipe of the federation with the user's own settings.
        public: Settings of the federation that all users have, with the names of all users.
        own: The user's own settings, such as the paths of its data and limits of its device.
        say: Called with each line to show to the user.

    Raises:
        RecipeError: No settings fit.
        RunError: The process that chooses the settings fails.
    """
    if recipe.runtime.memory is None and not chooses_specialists(recipe):
        return recipe
    path = folder / CHOICE
    depends_on = {"recipe": public.digest, "base": recipe.base, "runtime": own.runtime}
    choice, num_trained_specialists = None, None
    with suppress(OSError, ValueError, KeyError):  # no file, or a damaged one
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["depends_on"] == depends_on:
            choice = stored
        if any((folder / "answers").glob("*.bin")):
            num_trained_specialists = stored["specialists"]
    if choice is None:
        say(f"choosing {_left_to_device(recipe)}, once; this takes up to a minute")
        if num_trained_specialists is not None:
            recipe = recipe.with_changes({"method.specialists": num_trained_specialists})
        choice = _choose_in_new_process(recipe, public, own)
        choice.setdefault("specialists", num_trained_specialists)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_json(path, {"depends_on": depends_on, **choice})
    if choice["specialists"] is not None:
        say(f"method.specialists auto: {choice['specialists']}")
        recipe = recipe.with_changes({"method.specialists": choice["specialists"]})
    if recipe.runtime.memory is None:
        return recipe
    return use_chosen_settings(recipe, choice["changes"], choice["text"], say)


def _left_to_device(recipe: Recipe) -> str:
    """Describe for messages which settings of a recipe the device chooses, such as "settings for runtime.memory 8GB".

    These are ``method.specialists: auto``, and the settings that follow from a memory limit.
    """
    chosen = []
    if chooses_specialists(recipe):
        chosen.append("method.specialists")
    if recipe.runtime.memory is not None:
        chosen.append(f"settings for runtime.memory {recipe.runtime.memory}")
    return " and ".join(chosen)


def _choose_in_new_process(recipe: Recipe, public: Public, own: Own) -> dict[str, Any]:
    """Choose settings that depend on this device's memory, in a new process, whose imports take no memory here.

    Args:
        recipe: Settings of the run, with the user's own.
        public: Public part of the federation, with the names of all users.
        own: The user's own settings.

    Returns:
        For ``runtime.memory`` the settings by recipe key under "changes", and a line for the user under "text"; for
        ``method.specialists: auto`` the number under "specialists".

    Raises:
        RecipeError: No settings fit.
        RunError: The process fails.
    """
    request = {
        "recipe": recipe.model_dump(mode="json", exclude_unset=True),
        "limit": memory_limit(recipe),
        "names": list(public.users),
        "here": [public.users.index(own.name)],  # users whose data is on this machine
        "process": private_bytes() + TOKENIZER_BYTES,  # memory of this process, in bytes
    }
    command = [sys.executable, "-m", "comingle.cost.planning"]
    finished = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True)
    if finished.returncode != 0:
        error_lines = finished.stderr.strip().splitlines() or [f"exit code {finished.returncode}"]
        raise RunError(f"user {own.name!r}: {_left_to_device(recipe)} could not be chosen: {error_lines[-1]}")
    choice = json.loads(finished.stdout.splitlines()[-1])
    if "error" in choice:
        raise RecipeError(f"user {own.name!r}: {choice['error']}")
    return choice


def _refuse_local_path(name: str) -> None:
    """Raise an error if the server names a local path as base. It could otherwise find out which files exist here.

    Args:
        name: Name of the base in the server's recipe.

    Raises:
        MessageError: The name is a local path.
        BaseModelError: The name is both a public model and a local folder.
    """
    if name.startswith(NETS):  # a net that is built here with random weights, so no file is read
        return
    if not is_public(name):
        raise MessageError(
            f"base: the server names a local path, {name!r}; give its path here as --base FOLDER, or as `base` in the "
            "client's file"
        )
    if expand_home(name).exists():
        raise BaseModelError(
            f"base: {name!r} is a name on the hub and a folder here; set `base` in the client's file to the one to use"
        )


def _raise_unless_expected(own: Own, public: Public) -> None:
    """Raise an error if the federation's recipe or base is not the one that the user's settings name.

    Args:
        own: The user's own settings; ``expects`` has no digest, or digests under "recipe" and "base".
        public: Public part of the federation, with the digests of its recipe and base.

    Raises:
        MessageError: A digest differs.
    """
    server_digests: Mapping[str, str] = {"recipe": public.digest, "base": public.base}
    for part, expected_digest in own.expects.items():
        server_digest = server_digests[part]
        if server_digest != expected_digest:
            raise MessageError(f"user {own.name!r}: expects {part} {expected_digest}; the server has {server_digest}")


def _shorten(digest: str) -> str:
    """Return a digest with the first 8 digits of each part, such as "0123abcd:4567ef01"; "none" if it is empty."""
    return ":".join(part[:8] for part in digest.split(":")) or "none"


def _raise_unless_same_base(own: Own, public: Public, own_data: RunData) -> None:
    """Raise an error if this client's base model or tokenizer has another digest than the server's.

    Args:
        own: The user's own settings.
        public: Public part of the federation, with the server's digests.
        own_data: The user's data and base model.

    Raises:
        MessageError: A digest differs. A note, which is not sent to the server, names the client's base.
    """
    for part, own_digest in digests_of(own_data.base).items():  # "base" and "tokenizer"
        server_digest = getattr(public, part)
        # A tokenizer's digest is "TOKENS:TEMPLATE", or only "TOKENS" in older versions.
        matches_older_version = own_digest == tokens_of(server_digest) or tokens_of(own_digest) == server_digest
        if own_digest == server_digest or matches_older_version:
            continue
        error = MessageError(
            f"{part}: the server has {_shorten(server_digest)} of base {public.recipe.get('base', '')!r}, this "
            f"client {_shorten(own_digest)}; use the same base (--base)"
        )
        if own_data.base is not None:
            error.add_note(f"this client's base is {str(own.base or own_data.base.name)!r}")
        raise error


def _raise_unless_same_settings(own: Own, public: Public, own_data: RunData) -> None:
    """Raise an error if the shapes or labels of the user's data are not those of the server.

    Args:
        own: The user's own settings, such as the paths of its data.
        public: Public part of the federation; ``settings`` has shapes and labels.
        own_data: The user's data.

    Raises:
        MessageError: A value differs.
    """
    own_settings = own_data.kind.settings(own_data)
    for key, server_value in public.settings.items():
        if key not in own_settings:
            continue
        own_value = own_settings[key]
        is_number_of_classes = key == "classes" and isinstance(server_value, int)
        if is_number_of_classes and own_value <= server_value:
            continue  # the server counts the classes of all users; this user's data may have fewer
        is_same = json.dumps(own_value) == json.dumps(server_value)  # in JSON, tuples and lists are equal
        if not is_same:
            raise MessageError(f"user {own.name!r}: {key}: got {own_value} from the data; allowed: {server_value}")


logger = logging.getLogger("comingle")

REVERTED_NOTICE = "the last answer was late or lost; the server continued without it, so this client undoes the task"
"""Line for the user."""

Say = Callable[[str], None]
"""Called with each line to show to the user."""

COUNT = ("count",)
"""Steps of the task of a client between the runs of a continuous federation."""

CHANGING = frozenset({"receive", "train", "finish", "choose"})
"""Steps that change the user's model."""


class Client:
    """One user's side of a session with the server."""

    def __init__(
        self,
        folder: Path,
        own: Own,
        *,
        bases: dict[Any, Base] | None = None,
        conditions: DeviceConditions | None = None,
        say: Say = lambda line: None,
        refuse: Say = lambda line: None,
        end: Callable[[], None] = lambda: None,
        publish: Callable[[ClientStore], None] | None = None,
    ) -> None:
        """Create a client without an open run; :meth:`handle` opens the run of each task.

        Args:
            folder: The user's state folder, which holds a folder for each run.
            own: The user's own settings: its name and data, and what it allows the server to see.
            bases: Base models that the clients of this process share; a base that this client loads is added. None to
                share none.
            conditions: Conditions under which this device trains, and its limit on uploads; None for those of ``own``.
            say: Called with each line to show to the user.
            refuse: Called with the reason if this user cannot join before its settings are changed.
            end: Called when the user's model has been saved, at the end of a federation.
            publish: Called with the user's part of a run after each task that has changed its model.
        """
        self.folder, self.own, self.say, self.refuse, self.end = folder, own, say, refuse, end
        self._bases, self._publish = bases, publish
        self._conditions = conditions or own.conditions(folder, say=say)
        self._store: ClientStore | None = None  # the user's part of the run of the last task
        self._run = ""  # name of this run

    def handle(self, data: bytes, deadline: float = math.inf) -> bytes:
        """Carry out a task and return the answer; if the task fails, the answer has the reason.

        Args:
            data: The task as the server has sent it.
            deadline: Time until which the server waits for the answer, in seconds since 1970. A task that cannot be
                completed by then because of this device's conditions is declined.

        Raises:
            MessageError: The bytes are no task, or one of another user.
        """
        task = unpack_task(data)
        check_address(task, self.own.name)
        is_join = task.todo == ("join",)
        try:
            with convert_disk_errors(self.folder):
                if is_join:
                    answer = self._join(task).pack()
                elif task.todo == COUNT:
                    answer = self._count(task).pack()
                else:
                    answer = self._carry_out(task, data, deadline)
        except ComingleError as error:
            line = "; ".join([str(error), *getattr(error, "__notes__", ())])  # notes are for the user only
            self.say(line)
            may_be_temporary = isinstance(error, RunError)  # such as a full disk
            if isinstance(error, DataError) and "since" in task.arguments:  # too little text so far, for example
                may_be_temporary = True
            if is_join and not may_be_temporary:
                self.refuse(line)
            answer = _refusal(task, error).pack()
        except Exception as error:  # a bug, perhaps triggered by a hostile server, must not end the client
            logger.exception("task %d of run %s", task.serial, task.run)
            message_in_one_line = " ".join(str(error).split())
            self.say(f"task {task.serial}: {type(error).__name__}: {message_in_one_line}".rstrip())
            answer = _refusal(task, error).pack()
        finally:
            return_freed_memory()  # The client may be idle for long.
        self._conditions.count_upload(len(answer))
        return answer

    def publish_newest_run(self) -> None:
        """Serve the model of the run that this user has joined last; called once, when the client is created.

        Does nothing if no model is to be served (``publish``) or no run was joined. Errors are shown to the user.
        """
        if self._publish is None:
            return
        folders = client_runs(self.folder)
        if not folders:
            return
        try:
            store = self._open(folders[-1].name.removeprefix("run-"))
        except ComingleError as error:
            self.say(str(error))
            return
        self._publish_model(store)

    def _publish_model(self, store: ClientStore) -> None:
        """Pass the user's current model to the function that serves it to the user's programs, if there is one.

        An error does not end the client; it is shown to the user.
        """
        if self._publish is None:
            return
        try:
            self._publish(store)
        except Exception as error:
            logger.exception("publishing the model of user %s", self.own.name)
            self.say(f"the model is not served: {' '.join(str(error).split())}")

    # ---------------------------------------------------------------- which task

    def _join(self, task: Task) -> Answer:
        """Open the federation of a join task, and report what the server needs to know of this client.

        These are, by key:

            unit          the unit of its data, such as tokens
            steps         its local steps per round
            done          number of the last task that it has carried out
            back          number of the earliest task after which it can restore its state
            examples      number of examples, only if privacy protects single examples
            amounts       amounts of training and test data, in the unit of its data
            skipped_rows  number of rows of its data that could not be used
            works         number of tokens or samples that it trains on in a round, and number that an evaluation scores
            specialists   number of specialists that it has chosen, only with ``method.specialists: auto``

        The last four are reported only if the user's setting ``tells`` allows it.

        Raises:
            MessageError: The federation does not suit this user, or has changed since the user joined.
            ComingleError: The user's data or base cannot be used.
        """
        public = read_public(task.arguments.get("public"))
        stored_public = known_public(self._folder(task.run))
        if stored_public is not None and stored_public.digest != public.digest:
            raise MessageError(
                f"run {task.run}: the recipe has changed from {stored_public.digest} to {public.digest} since user "
                f"{self.own.name!r} joined"
            )
        self._delete_runs(deleted_runs(task))
        check_run_limit(self.folder, task.run, self.own.max_runs)
        earlier = earlier_runs(task)
        has_answered = any((self._folder(task.run) / "answers").glob("*.bin"))
        if earlier is not None and self._run != task.run and not has_answered:
            public.check()
            fix_data(self.folder, task.run, self.own, earlier)
        store = self._enter(task.run, public)
        self._publish_model(store)
        clients = store.clients
        self.say(upload_notice(store))
        reports_scores = store.reporting_level(self.own) in LEVELS_WITH_SCORES  # and with them amounts of data
        reports_specialists = chooses_specialists(public.whole_recipe()) and reports_scores
        is_continuous = earlier is not None
        self.say(
            report_notice(store, self.own, reports_specialists=reports_specialists, reports_new_data=is_continuous)
        )
        warn_of_untrained(clients.plan, clients.steps.local_steps)
        unit = clients.batch_source.unit
        reported: dict[str, Any] = {
            "unit": unit,
            "steps": clients.steps.local_steps,
            "done": store.serial,
            "back": store.revertible_tasks()[0],
            **store.public_counts,  # "examples"
        }
        if store.recipe.continue_from is not None and int(clients.state.versions.min()) < 0:
            reported["downloads"] = True
        if reports_scores:
            only_trainer = clients.trainers[0]  # this client group has a single user
            reported["amounts"] = amounts(only_trainer, unit)
            if store.own_data.skipped_rows:
                reported["skipped_rows"] = store.own_data.skipped_rows
            _num_users, trained_amount, scored_amount = data_amounts(clients)
            reported["works"] = [trained_amount, scored_amount]
        if reports_specialists:
            reported["specialists"] = store.recipe.method.settings["specialists"]
        return Answer(run=task.run, serial=task.serial, user=task.user, reported=reported)

    def _delete_runs(self, names: Sequence[str]) -> None:
        """Delete this user's folders of runs that the server has deleted as another user has left."""
        folders = [self._folder(name) for name in names if self._folder(name).exists()]
        if self._run in names:
            self._store, self._run = None, ""
        for folder in folders:
            shutil.rmtree(folder)
        if folders:
            self.say(
                f"a user has left: this user's models of {len(folders)} runs are deleted, and it goes back to the run "
                "before; if no state of that run is here (a client keeps 3 runs), it starts as a new user"
            )

    def _count(self, task: Task) -> Answer:
        """Report how much data this user has beyond that with which it has trained last, in tokens or conversations.

        The data is read only if the paths, sizes or times of its files have changed since the last count.

        Raises:
            ComingleError: The federation does not suit this user.
        """
        public = read_public(task.arguments.get("public"))
        path, own = self.folder / COUNTED, self.own
        current = {"sources": sources_digest(own.data, self.folder), "recipe": public.digest}
        counted: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            counted = json.loads(path.read_text(encoding="utf-8"))
        has_changed = any(counted.get(key) != value for key, value in current.items())
        if has_changed:
            counted = {**current, "amount": self._amount(public)}
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_json(path, counted)
        trained = 0
        for run in earlier_runs(task) or ():
            fixed = read_fixed_run(self._folder(run))
            if fixed is not None:
                trained = fixed.trained
                break
        new = max(0, int(counted["amount"]) - trained)
        if has_changed:
            unit = "tokens" if public.recipe["data"].get("kind") == "text" else "conversations"
            self.say(f"user {own.name!r}: {new:,} {unit} are new; the server sees this number")
        return Answer(run=task.run, serial=task.serial, user=task.user, reported={"new": new})

    def _amount(self, public: Public) -> int:
        """Return the number of tokens or conversations that a run would read now; 0 if it could not use the data.

        Args:
            public: What all users may know of the federation, such as its recipe and their names.
        """
        public.check()
        recipe = _own_recipe(self.own, public)
        base = None if self._store is None else self._store.own_data.base
        is_limited = recipe.runtime.memory is not None  # then a run may load the base in another format
        given = Given(loaded_bases=None if is_limited else self._bases)
        try:
            own_data = prepare(recipe, base=base, given=given, method=check_and_set_up(recipe, keeps_memory=False))
            run_data = _data_of_run(self.own, public, recipe, own_data)
            run_data.kind.clients(recipe, run_data, plan_of(public, recipe))  # checks the splits
        except DataError as error:
            self.say(f"takes part in no run so far: {error}")
            return 0
        return sum(describe(own_data, recipe).users[self.own.name].counts.values())

    def _carry_out(self, task: Task, data: bytes, deadline: float) -> bytes:
        """Carry out a task, store its answer and the new state, and return the answer's bytes.

        If the task was carried out before, return the stored answer. If the task fails, its changes are reverted.

        Args:
            task: What the server asks of the client, such as local steps.
            data: Its bytes, which identify a repeated task.
            deadline: Time until which the server waits for the answer, in seconds since 1970.

        Raises:
            DeclinedError: The conditions of this device do not allow the task in time.
        """
        store = self._open(task.run)
        stored_answer = store.stored_answer(task.serial, data)
        if stored_answer is not None:
            return stored_answer
        steps_follow_from_data = trains_whole_epochs(store.recipe)
        check_task(task, store.clients.plan, TaskRunner.STEPS, steps_follow_from_data=steps_follow_from_data)
        replaces_earlier_task = task.serial <= store.serial  # whose answer the server has not received
        if replaces_earlier_task:
            self.say(REVERTED_NOTICE)
            store.revert_to(task.serial - 1)
        if task.serial != store.serial + 1:
            raise MessageError(f"task: got task {task.serial} for user {self.own.name!r}; allowed: {store.serial + 1}")
        if needs_conditions(task):
            self._await_conditions(store, task, deadline)
        served_before = None if store.guard is None else store.guard.model
        try:
            with own_errors(store.clients.method):  # names file and line of an error in a user's own method
                answer = TaskRunner(store, self.own, task, self._conditions).run().pack()
            store.commit(task.serial, data, answer)
            self.say(_describe_answer(store, task, answer))
            if store.guard is not None and store.guard.model != served_before:
                self.say(f"serves the {store.guard.model} model from now on: it has the lowest validation loss")
            if "train" in task.todo:
                record_training(store.folder, self.own.name)
            if "end" in task.todo and not task.arguments.get("continuous"):
                self.end()
        except BaseException:
            store.revert()
            raise
        has_changed_model = any(step in CHANGING for step in task.todo)
        if has_changed_model:
            self._publish_model(store)
        return answer

    def _await_conditions(self, store: ClientStore, task: Task, deadline: float) -> None:
        """Wait until this device's conditions, such as "plugged-in", allow a task.

        Args:
            store: What the client has of the run: the user's data, model and progress.
            task: What the server asks of the client, such as local steps.
            deadline: Time until which the server waits for the answer, in seconds since 1970.

        Raises:
            DeclinedError: The conditions do not allow the task in time.
        """
        clients, only_user = store.clients, 0  # this client group has a single user
        num_steps, upload_bytes = 0, 0
        if "train" in task.todo:
            num_copies = clients.method.placement.copies  # of the model; the method trains each of them
            num_models = 1 if store.guard is None else 2  # with the local one
            num_steps = clients.batch_source.steps(only_user) * num_copies * num_models
        begins_upload = "upload" in task.todo or "advertise" in task.todo  # "advertise" with secure aggregation
        if begins_upload and self.own.max_upload_per_day is not None:
            upload_bytes = clients.upload_bytes()[only_user]
        self._conditions.begin_task(num_steps, upload_bytes, deadline)

    def _folder(self, run: str) -> Path:
        return run_folder(self.folder, run)

    def _open(self, run: str) -> ClientStore:
        """Return the store of a run that this user has joined, from memory or from disk.

        Raises:
            MessageError: The user has not joined this run.
        """
        if self._store is not None and self._run == run:
            return self._store
        public = known_public(self._folder(run))
        if public is None:  # the user has changed or deleted the state folder
            raise MessageError(
                f"run {run}: user {self.own.name!r} has no state of it in this folder; it joins again before its next "
                "task"
            )
        return self._enter(run, public)

    def _enter(self, run: str, public: Public) -> ClientStore:
        """Return the store of a run, from memory if it is the run of the last task.

        Args:
            run: Name of the run.
            public: Public part of the run's federation.
        """
        if self._store is not None and self._run == run:
            return self._store
        store = open_store(self._folder(run), self.own, public, self._bases, self.say)
        store.clients.clock = self._conditions.training_clock  # stands still while training is paused
        if store.guard is not None:
            store.guard.local.clock = self._conditions.training_clock
        self._store, self._run = store, run
        return store


class TaskRunner:
    """Carries out the steps of one task that the server has sent to this user's client."""

    def __init__(self, store: ClientStore, own: Own, task: Task, conditions: DeviceConditions):
        """Create the runner of a task; :meth:`run` carries the task out.

        Args:
            store: What the client has of the run: the user's data, model and progress.
            own: The user's own settings, which say what the server may see.
            task: What the server asks of the client, such as local steps.
            conditions: Conditions of this device, which are checked between local steps.
        """
        self.store, self.own, self.task, self.clients, self.guard = store, own, task, store.clients, store.guard
        self.conditions = conditions
        self.reporting_level = store.reporting_level(own)  # "all", "scores", "losses" or "nothing"
        # Whether the client reports test scores, and with them amounts of data and durations.
        self.reports_scores = self.reporting_level in LEVELS_WITH_SCORES
        self.reported: dict[str, Any] = {}  # values for the answer
        self.sent: list[bytes] = []  # messages for the answer
        self.unread_messages = list(task.messages)  # in the order of the steps that read them
        # The largest number of local steps of any client; 0 until all clients have joined.
        most_steps = int(task.arguments.get("local_steps", 0))
        if most_steps:
            self.clients.steps.most_steps = most_steps

    def run(self) -> Answer:
        """Carry out all steps in order, and return the answer with the values that they report and their messages.

        Raises:
            MessageError: A message of the task fails a check.
            ComingleError: A step fails.
        """
        started = time.perf_counter()
        for step in self.task.todo:
            self._carry_out_step(step)
        if self.reports_scores:
            self.reported["seconds"] = time.perf_counter() - started
        task = self.task
        return Answer(
            run=task.run, serial=task.serial, user=task.user, reported=self.reported, messages=tuple(self.sent)
        )

    def _carry_out_step(self, step: str) -> None:
        """Carry out one step of the task, such as "receive" or "train"."""
        self.STEPS[step](self)

    def _next_download(self) -> Download:
        """Remove the first unread message from the task, and return it.

        Raises:
            MessageError: It is damaged, or it is not a download.
        """
        message = unpack(self.unread_messages.pop(0))
        if not isinstance(message, Download):
            raise MessageError("task: got an upload; allowed: a download")
        return message

    def _receive(self) -> None:
        """Check the download that is the next message of the task, and copy its tensors into the user's model."""
        download, clients = self._next_download(), self.clients
        check_download(
            download,
            clients.model.layout,
            clients.method,
            user=self.own.name,
            users=self.store.public.users,
            rounds=clients.plan.training.rounds,
            rank=int(clients.model.ranks.max()),
            version=min(clients.state.versions.tolist()),
        )
        clients.receive(download)
        if self.guard is not None:
            self.guard.receive(download)

    def _hear(self) -> None:
        """Carry out the step "hear": receive the server's verdict on the last validation.

        The verdict says whether the mean validation loss of all users is the lowest so far. If so, the client stores a
        copy of its current model, which becomes the result unless a later round is better.
        """
        verdict = self._next_download()
        check_verdict(verdict, LOWEST, user=self.own.name, rounds=self.clients.plan.training.rounds)
        self.clients.receive_verdict(verdict)

    def _train(self) -> None:
        """Take the local steps of a round, and report their number, tokens, seconds and loss as far as is allowed.

        If the privacy budget is spent or the result is not finite, ``reported["left_out"]`` says so, and the user
        uploads nothing in this round. With a guard the local model is trained too.
        """
        why_not_allowed = self.store.charge_steps(self.task.round)  # empty if the privacy budget allows the steps
        if why_not_allowed:
            self.reported["left_out"] = why_not_allowed
            return
        self._take_local_steps()
        if self.guard is not None:
            self.guard.train(self.task.round, self.conditions.end_step)

    def _take_local_steps(self) -> None:
        """Take the local steps of a round on the model that takes part in it, and report as :meth:`_train` says."""
        only_user = 0  # this client group has a single user
        try:
            result = train(self.clients, [only_user], self.task.round, self.conditions.end_step)
        except DivergenceError as error:
            self._restore_before_training()
            self.reported["left_out"] = str(error)
            return
        if self.reports_scores:
            self.reported["tokens"] = result.tokens
            self.reported["train_seconds"] = result.seconds - self.conditions.paused_seconds
        if self.clients.plan.reports_steps:
            self.reported["local_steps"] = result.steps[only_user]
        if result.rejected:  # not finite, and the method has restored the model
            self.reported["left_out"] = result.rejected[only_user]
            return
        is_private = self.clients.plan.privacy is not None  # the loss has no noise, so it must not be reported
        if self.reporting_level != "nothing" and not is_private:
            self.reported["train_loss"] = result.losses[only_user]

    def _restore_before_training(self) -> None:
        """Undo the local steps of this task, because their result is not finite.

        Only states between tasks are stored. So restore the state before the task, and carry out its steps before
        "train" again, such as "receive".
        """
        self.store.revert()
        self.unread_messages = list(self.task.messages)
        for step in self.task.todo:
            if step == "train":
                break
            self._carry_out_step(step)

    def _upload(self) -> None:
        """Send the shared tensors, unless the user is left out of this round or its privacy budget is spent.

        Raises:
            MessageError: The federation uses secure aggregation, so a plain upload would reveal the tensors.
        """
        if self.clients.plan.sums is not None:
            raise MessageError(
                "task: got step 'upload'; this federation uses secure aggregation, so uploads are masked"
            )
        if "left_out" in self.reported:
            return
        report = {}
        if "train_loss" in self.reported:
            report[LOSS] = torch.tensor([self.reported["train_loss"]])
        only_user = 0  # this client group has a single user
        round_number = self.task.round + 1  # Tasks count rounds from 0, uploads from 1.
        data = pack(self.clients.upload([only_user], round_number, report))
        why_not_allowed = self.store.charge_upload(data)  # empty if the privacy budget allows the upload
        if why_not_allowed:
            self.reported["left_out"] = why_not_allowed
        else:
            self.sent.append(data)

    def _secure_sum(self, step: str) -> None:
        """Carry out a step of a secure sum and send its message, unless the user is left out of this round.

        Args:
            step: "advertise", "share", "mask" or "unmask".
        """
        if "left_out" in self.reported:
            return
        message = None
        is_first_step = step == "advertise"  # the server sends no message for it
        if not is_first_step:
            message = unpack(self.unread_messages.pop(0))
        answer = SUM_STEPS[step](self.store, self.task, message)
        self.sent.append(pack(answer))

    def _finish(self) -> None:
        """Carry out the method's final step on this client, after the last round."""
        finish(self.clients)

    def _evaluate(self) -> None:
        """Evaluate the model on the user's own test data, and report what the user's option ``--tells`` allows.

        If the recipe selects the best round, the server needs the validation loss, which is sent in any case.
        """
        clients = self.clients
        rounds_done = self.task.arguments.get("done")  # None in the final evaluation
        settle(clients)  # computes tensors that follow from trained ones
        only_user = 0  # this client group has a single user
        losses = {}
        with finetuned(clients, rounds_done):  # if the method fine-tunes models for the evaluation only
            scores = clients.evaluate()
            selects_best_round = bool(clients.state.best)
            if selects_best_round:
                losses = clients.validate()
        if losses and rounds_done is not None:
            self.sent.append(pack(validation_report(losses, rounds_done)))
        self.reported["measure"] = measure_of(scores)
        self.reported["evaluated"] = True
        own_scores = measured(scores[only_user])
        are_finite = all(math.isfinite(value) for value in own_scores.values())
        if self.reports_scores and are_finite:
            self.reported["score"] = own_scores
            self.reported["metrics"] = users_metrics(clients, scores)[self.own.name]
        if self.reporting_level == "all":  # also the mean weights of experts or components
            self.reported.update(users_routing(clients, scores)[self.own.name])
        if self.guard is not None:
            num_rounds = self.task.round if rounds_done is None else rounds_done
            self.guard.choose(self.task.serial, num_rounds, done=rounds_done)

    def _choose(self) -> None:
        """Restore the user's model of the best round, which the client has stored, after the last round."""
        self.clients.restore_best_round()

    def _end(self) -> None:
        """Evaluate and save the user's final model at the end of the federation."""
        if self.guard is not None:
            rounds = self.task.round
            self.guard.end(self.task.serial, rounds, done=rounds_if_early(self.store, rounds))
        save_model(self.store, self.own, rounds=self.task.round)
        self.store.sessions.end()  # deletes the secrets of the last secure sum

    STEPS: ClassVar[dict[str, Callable[[TaskRunner], None]]] = {
        "receive": _receive,
        "hear": _hear,
        "train": _train,
        "upload": _upload,
        **{step: lambda runner, step=step: runner._secure_sum(step) for step in SUM_STEPS},
        "finish": _finish,
        "evaluate": _evaluate,
        "choose": _choose,
        "end": _end,
    }


def needs_conditions(task: Task) -> bool:
    """Return whether a task has to wait until this device's conditions, such as "plugged-in", hold.

    Tasks that train or evaluate have to wait. Tasks after the last round do not, so that the user gets its model.
    """
    trains_or_evaluates = "train" in task.todo or "evaluate" in task.todo
    is_after_last_round = "finish" in task.todo or "choose" in task.todo
    return trains_or_evaluates and not is_after_last_round


def upload_notice(store: ClientStore) -> str:
    """Return one line for the user: which tensors leave this machine in a round, and what stays here.

    For example ``"user 'ann': generalist (9,216 bytes) leave this machine each round you take part in; router,
    specialist, text and optimiser state stay"``.
    """
    clients, method = store.clients, store.clients.method
    only_user = 0  # this client group has a single user
    name = clients.users[only_user].name
    roles = clients.model.layout.roles
    trained_but_local = sorted(roles & (method.client.trained - method.shared))
    stays = f"{', '.join([*trained_but_local, 'text and optimiser state'])} stay"
    if not clients.shares:
        return f"user {name!r}: method {method.name} sends only the metrics that `tells` allows; {stays}"
    shared_roles = ", ".join(sorted(method.shared & roles))
    upload_bytes = clients.upload_bytes()[only_user]
    uses_secure_sum = clients.plan.sums is not None
    masked = ", masked," if uses_secure_sum else ""
    leaves = f"{shared_roles} ({upload_bytes:,} bytes) leave this machine{masked} each round you take part in"
    return f"user {name!r}: {leaves}; {stays}"


_REPORTED: dict[Tells, tuple[str, ...]] = {
    "losses": ("training losses",),
    "scores": ("test scores", "amounts of data", "durations"),
    "all": ("mean weights of experts or components",),
}
"""Numbers that each value of ``tells`` adds to those of the values above it."""


def report_notice(store: ClientStore, own: Own, *, reports_specialists: bool, reports_new_data: bool = False) -> str:
    """Return one line for the user: which numbers leave this machine beside the tensors, and how to change that.

    Args:
        store: What the client has of the run: the user's data, model and progress.
        own: The user's settings; ``tells`` decides which optional numbers leave.
        reports_specialists: Whether the number of specialists leaves, which this device has chosen.
        reports_new_data: Whether the amount of new data leaves, since the federation is continuous.
    """
    plan, level = store.clients.plan, store.reporting_level(own)
    is_private = plan.privacy is not None
    optional: list[str] = []  # numbers that leave because of `tells`, such as "training losses"
    if level != "nothing":
        levels = list(_REPORTED)
        up_to_level = levels[: levels.index(level) + 1]  # each level includes those before it
        for included_level in up_to_level:
            optional.extend(_REPORTED[included_level])
    if is_private and "training losses" in optional:
        optional.remove("training losses")  # they have no noise
    if reports_specialists:
        optional.append("the number of specialists")

    always = ["the number of local steps"]  # numbers that leave with every value of `tells`
    if reports_new_data:
        always.append("the amount of new data")
    selects_best_round = bool(store.clients.state.best)
    if selects_best_round:
        always.append("validation losses")
    if store.public_counts:
        always.append("the number of examples")
    is_weighted_by_data = plan.training.weighting != "uniform" and not is_private
    if is_weighted_by_data and "amounts of data" not in optional:
        always.append("the amount of training data")

    listed = ", ".join(always)
    change = f"change this with --tells {'|'.join(TELLS)}"
    if not optional:
        return f"user {own.name!r}: the server also sees {listed}; no losses or scores (tells: {level}); {change}"
    return f"user {own.name!r}: the server also sees {', '.join(optional)} (tells: {level}) and {listed}; {change}"


def _describe_answer(store: ClientStore, task: Task, answer: bytes) -> str:
    """Return one line for the user after a task, such as ``"round 3: 9,216 bytes leave this machine"``.

    After the last task of a federation, the line says where the user's model is.

    Args:
        store: What the client has of the run: the user's data, model and progress.
        task: The task that was carried out.
        answer: The bytes of the answer.
    """
    if "end" in task.todo:
        ended = "the run has ended, the next one starts with new data" if task.arguments.get("continuous") else ENDED
        return f"{ended}; {store.folder / MODEL} is the model of user {task.user!r}"
    # Tasks count rounds from 0.
    done = f"round {task.round + 1}" if "train" in task.todo else ", ".join(task.todo)
    return f"{done}: {len(answer):,} bytes leave this machine"


_REASONS_FOR_SERVER = {
    "RecipeError": "invalid settings",
    "DataError": "invalid data",
    "BadRowsError": "invalid data",
    "NoTextError": "invalid data",
    "BaseModelError": "unusable base model",
    "RunError": "unusable state folder",
}


def _refusal(task: Task, error: Exception) -> Answer:
    """Return the answer to a task that failed, without private data, which the text of an error may contain.

    Args:
        task: What the server asks of the client, such as local steps.
        error: The error with which it failed.
    """
    error_class = type(error).__name__
    is_about_message = isinstance(error, MessageError)
    is_declined = isinstance(error, DeclinedError)
    if is_about_message or is_declined:  # their texts contain no private data
        reason = str(error)
    else:
        general_reason = _REASONS_FOR_SERVER.get(error_class, "internal error")  # such as "invalid data"
        reason = f"user {task.user!r}: {general_reason}; the client's log has the details"
    reported = {"refused": reason, "kind": error_class}
    return Answer(run=task.run, serial=task.serial, user=task.user, reported=reported)
