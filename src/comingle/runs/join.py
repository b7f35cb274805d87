"""A user joins a finished federation.

The method's placement, client and server determine what the newcomer receives and trains. The newcomer downloads the
shared roles. If the method has local roles (specialists, a router, a mixture vector), the newcomer trains these and
freezes the downloaded ones. If the server has state of each user (merging weights), it updates the newcomer's and
freezes the rest. If the whole model is shared, the newcomer fine-tunes it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from comingle.config import Recipe
from comingle.config.settings import largest
from comingle.methods.base import Method
from comingle.models.hardware import torch_defaults
from comingle.reports.formatting import html_of
from comingle.reports.tables import render_joined
from comingle.runs.api import load, recipe_for_one_user
from comingle.runs.folders import check_folder, open_folder
from comingle.runs.given import AnyBase, Given, Loss, given_of
from comingle.runs.guard import without_own_models
from comingle.runs.progress import Reporter, loading, reporting
from comingle.runs.results import Run
from comingle.runs.session import build, describe, execute, prepare
from comingle.training.backends.launched import require_single_process
from comingle.training.backends.local import InProcess
from comingle.training.client import Clients
from comingle.training.cohort import Models
from comingle.training.cohort_state import FrozenColumns
from comingle.training.evaluation import measure_of, measured
from comingle.training.kinds.base import RunData, kind_of_users
from comingle.utils.errors import DataError, RecipeError, RunError
from comingle.utils.files import locked
from comingle.utils.records import PUBLIC, JsonObject, convert_disk_errors, write_json


@contextmanager
def temporary_folder_for(folder: Path, recipe: Recipe, joined: Path | None, *, force: bool) -> Iterator[Path]:
    """Yield the path of a temporary folder for a newcomer's run, such as ``.ada.joining/ada`` for the folder ``ada``.

    The caller moves the temporary folder to the run folder when the run has ended, so a run folder is never incomplete.
    On exit everything that is left in the temporary folder is deleted.

    Args:
        folder: The run folder, which is not created.
        recipe: The recipe of the newcomer's run.
        joined: The folder of the run to join; None without one.
        force: Whether to replace what is in the run folder.

    Raises:
        RunError: The run folder cannot be used, overlaps the run to join, or another process writes to it.
    """
    check_folder(folder, recipe, resume=False, force=force, is_resumable=False)
    if joined is not None:
        source, target = joined.resolve(), folder.resolve()
        if source.is_relative_to(target) or target.is_relative_to(source):
            raise RunError(f"{folder}: overlaps the run to join, which is only read; use another --out")
    locked_folder = folder.with_name(f".{folder.name}.joining")
    temporary_folder = locked_folder / folder.name
    with convert_disk_errors(locked_folder):
        locked_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            with locked(locked_folder):
                shutil.rmtree(temporary_folder, ignore_errors=True)  # left by a process that was killed
                try:
                    yield temporary_folder
                finally:
                    shutil.rmtree(locked_folder, ignore_errors=True)
        except OSError:  # the lock file cannot be written, for example on a full disk
            shutil.rmtree(locked_folder, ignore_errors=True)
            raise


JOINED = "joined.json"
_PASSED = ("net", "loss")
"""Settings of a run on samples that a program may have passed, and then passes again for the newcomer."""
_LIMITS = ("max_train_tokens", "max_valid_tokens", "max_test_tokens")
"""Keys of ``data`` that may be a mapping of users' names to limits; it does not have the newcomer's name."""


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A newcomer's run and its baselines.

    ``rows`` has for ``pretrained``, ``local``, ``shared`` and ``joined`` the test result and the number of the
    newcomer's ``train_tokens`` (or ``train_samples``) that training used.
    """

    run: Run
    name: str
    measure: str
    rows: Mapping[str, Mapping[str, Any]]

    def _repr_html_(self) -> str:
        """Return the comparison table and the newcomer's run, for a notebook."""
        return html_of([render_joined(self.name, self.measure, self.rows)]) + self.run._repr_html_()


@dataclass(frozen=True, kw_only=True)
class Newcomer:
    """The user who joins; ``passed`` is data that a program passes, None where the recipe names its path."""

    name: str
    recipe: Recipe
    passed: Mapping[str, Any] | None
    fine_tuning_rounds: int
    """Number of final rounds in which the newcomer fine-tunes the downloaded roles."""


def prepare_newcomer(
    run: Run, name: str, data: object, *, rounds: int | None, local_step: bool, adapter: str | None = None
) -> Newcomer:
    """Check that a new user can join a run, without reading the user's data; return the user's recipe and data.

    Args:
        run: The run to join.
        name: The newcomer's name.
        data: A path, or data that a program passes.
        rounds: The number of rounds; None: as many as the run had.
        local_step: Whether to add a last round that trains the downloaded roles too, not only the local ones.
        adapter: Folder, or name on the hub, of the PEFT adapter from which the newcomer's local LoRAs start.

    Raises:
        DataError: The name is taken, or the recipe generates this kind of data.
        RunError: The run has nothing to download.
        RecipeError: ``local_step`` is set, but the method has no local roles, so every round trains all roles.
    """
    method = run.federation.clients.method
    if name in run.users:
        raise DataError(f"--name: got {name!r}, a user of the run; give another name than: {', '.join(run.users)}")
    check_joinable(run, method)
    if local_step and not freezes_downloaded(run.federation.clients):
        raise RecipeError(f"--local-step: {method.name} has no local roles to train first; leave --local-step out")
    is_path = isinstance(data, str | os.PathLike)
    passed = None if is_path else {name: data}
    if passed is not None:
        kind_of_users(passed, run.recipe.data.model_dump())  # raises if the data is of another kind than the run's
    # The newcomer gets the largest rank, number of specialists and so on of all users.
    recipe = recipe_for_one_user(run.recipe.for_users(run.users), largest)
    fine_tuning_rounds = 1 if local_step else 0
    num_rounds = (rounds or recipe.training.rounds) + fine_tuning_rounds
    changes: dict[str, Any] = {"training.rounds": num_rounds, "data": _newcomer_section(run, name, data)}
    changes["adapters.start"] = None if adapter is None else {name: adapter}
    return Newcomer(
        name=name,
        recipe=recipe.with_changes(changes, where="--data"),
        passed=passed,
        fine_tuning_rounds=fine_tuning_rounds,
    )


def check_joinable(run: Run, method: Method) -> None:
    """Check that the run has a server with a model that a new user can download.

    Raises:
        RunError: The method pools all text, shares nothing or is peer-to-peer; the run has one user; or its server has
            not aggregated yet.
    """
    where = run.folder or "the run"
    if method.placement.pooled:
        raise RunError(f"{where}: {method.name} trains one model on all users' text; add the user there and run again")
    if not method.shared:
        raise RunError(f"{where}: {method.name} shares nothing, so there is nothing to join; train with method local")
    if method.server.peer_to_peer:
        raise RunError(
            f"{where}: users of {method.name} exchange models directly, so its server has nothing to download"
        )
    if run.folder is not None and _is_single_user(run.folder):
        raise RunError(f"{where}: the run of one user, without a server to download from; give a run of `comingle run`")
    if run.federation.server.version == 0:
        raise RunError(
            f"{where}: its server has not aggregated anything (training.rounds: {run.recipe.training.rounds}, "
            "evaluated before the exchange); allowed: a run of more rounds, or with evaluation.model: exchanged"
        )


def _is_single_user(folder: Path) -> bool:
    """Return whether a run folder belongs to a single user, so that no other user can join it.

    Such a folder was written by ``comingle join``, or by the client of a federation in its state folder.
    """
    is_joined_user = (folder / JOINED).exists()
    parent = folder.parent
    is_client = (parent / PUBLIC).exists() and (parent / "answers").is_dir()  # what every client's state folder has
    return is_joined_user or is_client


def _newcomer_section(run: Run, name: str, data: object) -> dict[str, Any]:
    """Return the recipe's section ``data`` for a newcomer: that of the run, with the newcomer as its only user.

    Args:
        run: The run to join.
        name: The newcomer's name.
        data: A path, or data that a program passes; the section then has ``given: true`` and no path.

    Raises:
        DataError: The run's data is generated, so that no user can be added.
    """
    section = run.recipe.data
    if "users" not in type(section).model_fields:
        raise DataError(f"--data: the run's users have {section.label}, which the recipe generates; no user can join")
    content = section.model_dump(mode="json", exclude_unset=True)
    dataset = content.pop("dataset", None) or {}
    for key in ("users", "given", "held_out"):  # keys that describe the run's users, not the newcomer
        content.pop(key, None)
    for key in _LIMITS:
        has_limit_per_user = isinstance(content.get(key), dict)  # such as {"ada": 1000}, without the newcomer
        if has_limit_per_user:
            del content[key]
    content["kind"] = section.kind
    # The newcomer's net needs the classes of all users of the run, some of which its own data may lack.
    has_class_targets = bool(run.settings.get("whole"))  # targets that are whole numbers are classes
    if has_class_targets:
        class_names = list(run.settings["labels"])
        num_classes = run.settings["classes"]
        content["classes"] = class_names if class_names else num_classes
    if "on_small_user" in content:  # skipping the only user would leave nothing to train
        content["on_small_user"] = "refuse"
    # The newcomer's data is not from the run's data set, so the names of the data set's splits do not apply to it.
    if dataset and "split" in content:
        content["split"] = {key: value for key, value in content["split"].items() if key in ("valid", "test")}
    if not isinstance(data, str | os.PathLike):
        return content | {"given": True}
    path = os.fspath(data)
    expanded_path = os.path.expanduser(path)
    if os.path.exists(expanded_path):  # else the name of a data set on the hub, or a wrong path
        path = os.path.abspath(expanded_path)
    source: dict[str, Any] = {"path": path}
    if "text" in dataset:  # the column with the text
        source["column"] = dataset["text"]
    return content | {"users": {name: source}}


def freezes_downloaded(clients: Clients) -> bool:
    """Return whether users have anything local to train, so that a newcomer trains it and freezes what it downloads.

    That is a mixture vector, a copy of the model, or a local role.
    """
    method, layout = clients.method, clients.model.layout
    has_local_mixture_vector = method.placement.mixture is not None
    has_local_copies = method.placement.copies > 1
    if has_local_mixture_vector or has_local_copies:
        return True
    # A user's tensors are stored as one row of numbers; `layout.mask` marks the numbers of some roles.
    is_trained_and_local = layout.mask(method.client.trained) & ~layout.mask(method.received)
    return bool(is_trained_and_local.any())


def join_run(
    run: Run,
    new_user: Newcomer,
    folder: Path | None,
    reporter: Reporter,
    *,
    given: Given,
    force: bool = False,
) -> Joined:
    """Train a newcomer and its baselines on its data, and write the newcomer's run folder.

    Args:
        run: The run to join.
        new_user: The newcomer's name, recipe and data.
        folder: The run folder; None writes nothing.
        reporter: Shows progress to the user of the command.
        given: Objects that a program passes instead of names and paths in the recipe.
        force: Whether to replace what is in the folder.

    Raises:
        ComingleError: The data is of another kind or too little, or the folder exists.
    """
    if folder is None:
        return _train_newcomer(run, new_user, folder=None, reporter=reporter, given=given)
    # A newcomer's run cannot be resumed, so it is moved to its folder only when it has ended.
    with temporary_folder_for(folder, new_user.recipe, run.folder, force=force) as temporary_folder:
        joined = _train_newcomer(run, new_user, temporary_folder, reporter, given=given)
        # Check again, as another process may have created the folder during training.
        check_folder(folder, new_user.recipe, resume=False, force=force, is_resumable=False)
        shutil.rmtree(folder, ignore_errors=True)
        temporary_folder.rename(folder)
    run_in_folder = replace(joined.run, folder=folder)
    return replace(joined, run=run_in_folder)


def _train_newcomer(run: Run, new_user: Newcomer, folder: Path | None, reporter: Reporter, *, given: Given) -> Joined:
    """Train a user who joins a finished run, and two baselines; evaluate the downloaded model before training, too.

    The baselines are ``pretrained``, the base model without training, and ``local``, trained on the newcomer's data
    alone.

    Args:
        run: The run to join.
        new_user: The newcomer's name, recipe and data; ``passed`` is the data if a program passes it.
        folder: A new run folder for the newcomer's run; None writes nothing.
        reporter: Shows progress to the user of the command.
        given: Objects that a program passes instead of names and paths in the recipe.

    Returns:
        The newcomer's run, and four test results: of the two baselines, of the downloaded model before training
        (``shared``), and of the model after training (``joined``).
    """
    base = getattr(run.federation.clients.model, "base", None)  # nets of users with samples have none
    with reporter.waiting(loading(new_user.recipe)):
        run_data = prepare(new_user.recipe, base=base, given=replace(given, users=new_user.passed))
    _check_alike(run, new_user, run_data)
    federation = build(new_user.recipe, run_data, store="memory")
    num_rounds = new_user.recipe.training.rounds
    num_frozen_rounds = num_rounds - new_user.fine_tuning_rounds  # in them, downloaded tensors are not trained
    download_state(federation, run, rounds=num_frozen_rounds)
    clients = federation.clients
    newcomer_number = 0  # the only user of its federation
    test_data = [clients.users[newcomer_number].test]
    shared_scores = clients.scorer.score(_shared_models(clients), test_data, [newcomer_number])
    measure = measure_of(shared_scores)
    shared_result = measured(shared_scores[0])  # test results by key, such as "test_perplexity"
    train_key = f"train_{clients.batch_source.unit}"  # tokens or samples that training used
    result_by_model = {"shared": shared_result | {train_key: 0}}
    # With `finetunes` the newcomer is scored after one more local round, so the baselines get one more round too.
    num_extra_rounds = 1 if clients.method.client.finetunes else 0
    for method in ("pretrained", "local"):
        result_by_model[method] = _train_baseline(new_user, run_data, method, num_rounds + num_extra_rounds, reporter)
    finished_run = _run_newcomer(federation, new_user, run_data, folder, reporter)
    amount_per_extra_round = clients.batch_source.trained_amount(newcomer_number)
    amount_trained = _amount_trained(finished_run, clients) + num_extra_rounds * amount_per_extra_round
    user_metrics = finished_run.metrics["users"][new_user.name]
    joined_result = {key: value for key, value in user_metrics.items() if key in shared_result}
    result_by_model["joined"] = joined_result | {train_key: amount_trained}
    rows = {model: result_by_model[model] for model in ("pretrained", "local", "shared", "joined")}  # in this order
    joined = Joined(run=finished_run, name=new_user.name, measure=measure, rows=rows)
    if folder is not None:
        write_json(folder / JOINED, {"user": new_user.name, "measure": measure, "rows": rows})
    return joined


def _shared_models(clients: Clients) -> Models:
    """Return the models with which a newcomer is evaluated before its training: only what it has downloaded.

    If its model is a mixture of downloaded and local models, the local ones get a mixture weight of 0.
    """
    rows = without_own_models(clients, clients.state.rows)  # the only row has all parameters of the newcomer
    return replace(clients.models, parameters_of=lambda user_numbers: rows[list(user_numbers)])


def _check_alike(run: Run, new_user: Newcomer, run_data: RunData) -> None:
    """Check that a newcomer's data has the settings of the run, such as net, loss, input shape and classes of samples.

    Raises:
        DataError: A setting differs.
    """
    settings_of_newcomer = run_data.kind.settings(run_data)
    for key, wanted in run.settings.items():
        got = settings_of_newcomer[key]
        if got != wanted:
            hint = "; pass it again" if key in _PASSED else ""  # a program has passed it to the run
            setting = key.replace("_", " ")
            raise DataError(f"user {new_user.name!r}: {setting}: got {got!r}; allowed: the run's, {wanted!r}{hint}")


def download_state(federation: InProcess, run: Run, *, rounds: int) -> None:
    """Copy the state of a run's server to the newcomer's server, and download it to the newcomer.

    State per user, such as merging weights, is not copied; the newcomer has its own. If the method has local roles, the
    downloaded roles are frozen in the newcomer's first ``rounds`` rounds.

    Args:
        federation: The newcomer's federation.
        run: The run to join.
        rounds: The number of rounds in which downloaded roles are frozen.
    """
    clients, server, method = federation.clients, federation.server, federation.clients.method
    run_state = run.federation.server.kept  # the server's tensors by name
    names_per_user = method.server.by_user  # of the server's tensors with a row per user
    new_state = dict(server.kept)
    for name in server.kept:
        if name not in names_per_user:
            new_state[name] = run_state[name].clone()
    server.kept = new_state
    # The server must not update, by the newcomer's uploads alone, state that it has learned from all users of the run.
    server.method = replace(method, server=method.server.settled())
    clients.plan = replace(clients.plan, method=server.method)
    clients.state.versions.fill_(-1)  # the only user has downloaded no version, not even the initial version 0
    if freezes_downloaded(clients):
        clients.steps.frozen_columns = FrozenColumns(columns=clients.model.layout.mask(method.received), rounds=rounds)
    federation.download([0])  # number of the only user


def _train_baseline(new_user: Newcomer, run_data: RunData, method: str, rounds: int, reporter: Reporter) -> JsonObject:
    """Train a baseline, with which the newcomer's result is compared, on the newcomer's data alone.

    Args:
        new_user: The newcomer's name, recipe and data.
        run_data: The base model and the newcomer's data.
        method: ``pretrained`` or ``local``.
        rounds: The number of rounds, as many as the newcomer's run has.
        reporter: Shows progress to the user of the command.

    Returns:
        The test results by key, and the number of tokens or samples that training used, in ``train_tokens`` or
        ``train_samples``.
    """
    changes: dict[str, object] = {"method": method, "training.rounds": rounds, "evaluation.first": False}
    if method == "pretrained":
        changes["adapters.start"] = None
    recipe = new_user.recipe.with_changes(changes)
    federation = build(recipe, run_data, store="memory")
    observers = [reporter.watch(federation.clients, f"{new_user.name} · {method}")]
    baseline_run = execute(federation, recipe, None, observers=observers)
    user_metrics = baseline_run.metrics["users"][new_user.name]
    # Only test results, which are floats; integers such as `test_tokens` are sizes of the test data.
    result: JsonObject = {}
    for key, value in user_metrics.items():
        if key.startswith("test_") and isinstance(value, float):
            result[key] = value
    clients = federation.clients
    result[f"train_{clients.batch_source.unit}"] = _amount_trained(baseline_run, clients)
    return result


def _amount_trained(run: Run, clients: Clients) -> int:
    """Return the number of tokens or samples that a newcomer's run has trained on.

    Some methods train several copies of each user's model on the same data, which then counts once.

    Args:
        run: The newcomer's run.
        clients: Its clients, whose method says how many copies there are.
    """
    # The key "tokens" counts samples if the users have samples.
    amount = sum(event["tokens"] for event in run.events if event["event"] == "round")
    return amount // clients.method.placement.copies


def _run_newcomer(
    federation: InProcess, new_user: Newcomer, run_data: RunData, folder: Path | None, reporter: Reporter
) -> Run:
    """Train the newcomer for the rounds of its recipe, and write the run folder.

    Args:
        federation: The newcomer's federation, which has downloaded the run's model.
        new_user: The newcomer's name, recipe and data.
        run_data: The base model and the newcomer's data.
        folder: A new run folder; None writes nothing.
        reporter: Shows progress to the user of the command.
    """
    observers = [reporter.watch(federation.clients, f"{new_user.name} joins")]
    if folder is None:
        return execute(federation, new_user.recipe, None, observers=observers)
    # The folder is a temporary one of this process, so there is nothing of value to replace.
    with open_folder(folder, new_user.recipe, describe(run_data, new_user.recipe), resume=False, force=True):
        return execute(federation, new_user.recipe, folder, observers=observers)


@torch_defaults()
def join(
    run: Run | str | Path,
    *,
    name: str,
    data: object,
    out: str | Path | None = None,
    rounds: int | None = None,
    local_step: bool = False,
    adapter: str | Path | None = None,
    force: bool = False,
    base: AnyBase | None = None,
    loss: Loss | None = None,
    progress: bool = False,
) -> Joined:
    """Add a user to a finished federation, while no other user trains, like ``comingle join``.

    Args:
        run: A finished run, or its folder, which is only read.
        name: The newcomer's name.
        data: A path, or the data of one user as in :func:`run`.
        out: The run folder of this user, which :func:`load` opens; None writes nothing.
        rounds: The number of the newcomer's rounds. None: as many as the run had.
        local_step: Whether to add a round that trains the downloaded roles too.
        adapter: A PEFT adapter from which this user's own LoRAs start: its folder, or its name on the hub.
        force: Whether to replace the folder ``out``.
        base: The base that was passed to :func:`run`.
        loss: The loss that was passed to :func:`run`.
        progress: Whether to print progress to stderr.

    Raises:
        ComingleError: The name is taken, the data is of another kind or too little, or the run has nothing to download.
    """
    require_single_process("join")  # in a run of several processes, each has only a part of the users
    if not isinstance(run, Run):
        run = load(run, base=base, loss=loss)
    folder = Path(out) if out is not None else None
    with reporting(quiet=not progress) as reporter:
        start = None if adapter is None else str(adapter)
        new_user = prepare_newcomer(run, name, data, rounds=rounds, local_step=local_step, adapter=start)
        given = given_of(users=None, base=base, loss=loss)
        return join_run(run, new_user, folder, reporter, given=given, force=force)
