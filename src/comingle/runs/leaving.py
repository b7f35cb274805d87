"""A user leaves a run, and is forgotten.

There are two ways. ``exact`` trains the other users again, from the last run in which the user took no part: the result
is that of runs in which the user never took part. ``forward`` removes the user's own tensors, scores and records, and
leaves in the shared tensors what the user's uploads have changed.

In both ways the folders of all runs with the user are replaced by folders without it. A certificate in each new folder
states the way, and digests of the checkpoints before and after.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from comingle.config import Recipe, load_recipe
from comingle.config.settings import ACCOUNT, KEY
from comingle.methods.user_files import ORIGIN
from comingle.runs.api import load, reopen_data, run
from comingle.runs.continuation import ancestors_of, copy_rows, copy_users_state, restore_server
from comingle.runs.folders import LEFT, SKIPPED, certificates_of
from comingle.runs.given import NOTHING
from comingle.runs.guard import LOCAL, build_local
from comingle.runs.results import Run
from comingle.runs.session import build, check_and_set_up, prepare
from comingle.training.checkpoints import Clock, digest_of_checkpoint, progress_of, read_progress
from comingle.training.evaluation import metrics_of
from comingle.training.kinds.base import RunData
from comingle.utils.errors import ComingleError, DataError, RecipeError, RunError, list_names
from comingle.utils.files import delete_unchanged, file_digest, list_checkpoints, locked
from comingle.utils.inputs import SPLITS, read_inputs, recorded_date, write_inputs
from comingle.utils.names import as_folder
from comingle.utils.records import (
    DRAFT,
    JsonObject,
    convert_disk_errors,
    is_server,
    read_events,
    read_metrics,
    write_json,
    write_text,
)

Mode = Literal["exact", "forward"]

STATEMENTS: dict[Mode, str] = {
    "exact": "the models are those of runs in which the user never took part; nothing of the user's data is in them",
    "forward": "the user's own tensors and records are deleted; what its uploads changed in shared tensors remains",
}
"""Statement of a certificate, by mode."""

NOT_SEARCHED = "exports, backups, models that are being served, and runs in other folders than these"
"""Places in which a user's traces are not looked for, in a certificate."""


@dataclass(frozen=True, kw_only=True)
class Removal:
    """Plan of the removal of a user.

    Args:
        user: Name of the user.
        mode: How the user is removed.
        runs: Folders to replace, the earliest first: the run that the user leaves, and those it continues, directly or
            through other runs, back to the first one with the user.
        rounds: Number of rounds to train again; 0 for ``forward``.
        seconds: Seconds that these rounds took the first time.
        live: Folder of the ``comingle live`` that the runs belong to; None for other runs.
    """

    user: str
    mode: Mode
    runs: tuple[Path, ...]
    rounds: int
    seconds: float
    live: Path | None = None

    @property
    def branches(self) -> list[Path]:
        """Runs that continue these in another line, and are not changed."""
        return find_branches(self.runs, {run.parent for run in self.runs})

    @property
    def files(self) -> list[Path]:
        """Files that are deleted, in order."""
        in_runs = sorted(path for folder in self.runs for path in folder.rglob("*") if path.is_file())
        return [*in_runs, *self.documents]

    @property
    def documents(self) -> list[Path]:
        """Files with documents of the user that a live run has received."""
        if self.live is None:
            return []
        uploads = [path for path in sorted((self.live / "files").glob("*.json")) if _uploaders(path) == [self.user]]
        return [*(path for path in self._places if _has_documents(path, self.user)), *uploads]

    @property
    def unrelated(self) -> list[Path]:
        """Files in the places of the user's documents that have none, and are not deleted."""
        return [path for path in self._places if not _has_documents(path, self.user)]

    @property
    def _places(self) -> list[Path]:
        """Files with the names under which a live run stores documents of the user."""
        if self.live is None:
            return []
        texts = sorted((self.live / "texts" / as_folder(self.user)).glob("*"))
        incoming = self.live / "incoming" / f"{as_folder(self.user)}.jsonl"
        return [path for path in [*texts, incoming] if path.is_file()]


def plan_removal(folder: Path, user: str, mode: Mode) -> Removal:
    """Return what the removal of a user from a run replaces and costs.

    Args:
        folder: The run folder, or that of ``comingle live``, whose last run is meant.
        user: Name of the user.
        mode: How the user is to be removed.

    Raises:
        RunError: The folder is no finished run with this and other users, or an earlier run that is needed is gone.
        RecipeError: The run's users cannot leave one by one, as they are made together, for example.
    """
    folder = folder.resolve()  # a link would be replaced instead of the folder
    live = _live_folder(folder)
    if live is not None and folder != live:
        raise RunError(f"{folder}: belongs to {live} of `comingle live`; name that folder")
    if live is not None:
        folder = _last_run(live)
    finish_replacement(folder)
    runs_of_comparison = [path.parent for path in sorted(folder.glob("*/recipe.yaml"))]
    if runs_of_comparison and not (folder / "recipe.yaml").exists():
        names = ", ".join(run_folder.name for run_folder in runs_of_comparison)
        raise RunError(f"{folder}: holds {len(runs_of_comparison)} runs, {names}; name one folder after the other")
    if is_server(folder):
        raise RunError(f"{folder}: a federation's server; use `comingle leave`, or federation.server_app in Python")
    runs = [folder, *(Path(ancestor["run"]) for ancestor in reversed(ancestors_of(folder)))]  # the latest first
    runs_with_user: list[Path] = []
    for position, run_folder in enumerate(runs):
        finish_replacement(run_folder)
        if not run_folder.exists():
            if mode == "exact":
                raise RunError(f"{run_folder}: {folder} continues this run, which is gone; allowed: --mode forward")
            continue
        if position and mode == "exact" and continues_from_before(runs[position - 1], run_folder, user):
            runs_with_user = runs[:position]
        if user in read_inputs(run_folder).users:
            runs_with_user = runs[: position + 1]  # later runs without the user continue what it has trained
    only_documents = Removal(user=user, mode=mode, runs=(), rounds=0, seconds=0.0, live=live)
    if not runs_with_user and only_documents.documents:  # they wait, or an earlier removal was interrupted
        return only_documents
    if not runs_with_user:
        raise RunError(f"{folder}: no user {user!r}; allowed: {list_names(read_inputs(folder).users)}")
    if mode == "forward":
        runs_with_user = [each for each in runs_with_user if each.exists() and user in read_inputs(each).users]
    rounds, seconds = 0, 0.0
    for run_folder in runs_with_user:
        recipe, metrics = load_recipe(run_folder), read_metrics(run_folder)  # refuses runs that have not finished
        recipe_without(recipe, list(read_inputs(run_folder).users), user)  # refuses users who cannot leave
        is_private = recipe.privacy is not None and recipe.privacy.noisy
        if mode == "exact" and is_private:
            raise RunError(
                f"{run_folder}: has differential privacy, so training again would spend the other users' budgets "
                "twice; allowed: --mode forward"
            )
        if mode == "exact" and not trains_alone(recipe, user):
            rounds += metrics["rounds"]
            seconds += metrics["wall_seconds"]
    return Removal(
        user=user,
        mode=mode,
        runs=tuple(reversed(runs_with_user)),
        rounds=rounds,
        seconds=seconds,
        live=live,
    )


def find_branches(runs: Sequence[Path], parents: Collection[Path]) -> list[Path]:
    """Return the run folders that continue some runs, directly or through others, and are none of them.

    Args:
        runs: The run folders, without links.
        parents: Folders in which run folders are looked for.
    """
    branches: list[Path] = []
    for parent in sorted(parents):
        for events in sorted(parent.glob("*/events.jsonl")):
            run_folder = events.parent.resolve()
            if run_folder in runs:
                continue
            try:
                ancestors = {Path(ancestor["run"]) for ancestor in ancestors_of(run_folder)}
            except ComingleError:  # a folder with damaged events
                continue
            if ancestors & set(runs):
                branches.append(run_folder)
    return branches


def continues_from_before(run_folder: Path, earlier: Path, user: str) -> bool:
    """Return whether a run still continues an earlier one as it was with a user who has left it exactly.

    It does so if the removal was interrupted between the two runs.

    Args:
        run_folder: Folder of the run.
        earlier: Folder of the run that it continues.
        user: Name of the user.
    """
    has_left = any((one["user"], one["mode"]) == (user, "exact") for one in certificates_of(earlier))
    start = next(event for event in read_events(run_folder) if event["event"] == "start")
    return has_left and start["continues"]["checkpoint"] != digest_of_checkpoint(list_checkpoints(earlier)[-1])


def _live_folder(folder: Path) -> Path | None:
    """Return the folder of the ``comingle live`` that a folder is or belongs to; None if there is none."""
    for candidate in (folder, folder.parent.parent):
        if (candidate / "incoming").is_dir() and (candidate / "runs").is_dir():
            return candidate
    return None


def _last_run(live: Path) -> Path:
    """Return the folder of the last run of a live folder, which must have ended.

    Raises:
        RunError: A run is planned or has not ended.
    """
    plans = sorted((live / "runs").glob("*.yaml"))
    if not plans or not (plans[-1].with_suffix("") / "metrics.json").exists():
        raise RunError(f"{live}: its last run has not ended; start `comingle live` again until it has, then stop it")
    return plans[-1].with_suffix("")


def _uploaders(upload: Path) -> list[str]:
    """Return the users whose keys have uploaded a file; empty for a file that is no upload."""
    try:
        return list(json.loads(upload.read_text(encoding="utf-8"))["owners"])
    except (ValueError, TypeError, LookupError):
        return []


def _has_documents(path: Path, user: str) -> bool:
    """Return whether a file has documents of a user that a live run has received, or is a draft of such a file."""
    if path.name.endswith(DRAFT):  # left by a process that was killed
        return True
    lines = [line for line in path.read_bytes().split(b"\n") if line]
    owners = set[str]()
    for line in lines:
        with suppress(ValueError, TypeError, LookupError):  # such as the incomplete last line of a killed process
            owners.add(json.loads(line)["user"])
    return user in owners or not lines


def remove_user(
    removal: Removal, say: Callable[[str], None] = lambda line: None, *, progress: bool = False
) -> JsonObject:
    """Carry out the removal of a user, and return the certificate of the last run.

    Mode ``exact`` trains every run again without the user, the earliest first, as each continues from the one before.
    Mode ``forward`` copies only the last run without the user, and deletes the earlier ones. Each folder is replaced as
    soon as its new run is complete. After an interruption the same removal continues with the folders that are left.
    The certificates have a digest of each file with documents; a file that has changed since is named and not deleted.

    Args:
        removal: The plan.
        say: Called with a line for each run.
        progress: Whether to print the progress of training.

    Raises:
        ComingleError: The data of other users has changed or cannot be read, or the disk is full.
    """
    with locked(removal.live) if removal.live is not None else nullcontext():  # while it is served it is in use
        copies = {path: file_digest(path) for path in removal.documents}
        certificate = _replace_runs(removal, copies, say, progress=progress)
        for path in [*delete_unchanged(copies), *removal.unrelated]:
            say(f"{path}: not deleted, as it is no copy of {removal.user}'s documents")
        if removal.live is not None:
            with suppress(OSError):  # it has other files
                (removal.live / "texts" / as_folder(removal.user)).rmdir()
            for plan in sorted((removal.live / "runs").glob("*.yaml")):
                recipe = load_recipe(plan)
                if removal.user in recipe.data.names:
                    write_text(plan, recipe_without(recipe, recipe.data.names, removal.user).as_yaml())
    return certificate


def _replace_runs(
    removal: Removal, copies: Mapping[Path, str], say: Callable[[str], None], *, progress: bool
) -> JsonObject:
    """Replace the runs with a user by runs without it, and return the certificate of the last one.

    Args:
        removal: The plan.
        copies: SHA-256 of each file with documents of the user.
        say: Called with a line for each run.
        progress: Whether to print the progress of training.
    """
    certificate: JsonObject = {}
    branches = [str(branch) for branch in removal.branches]
    date = datetime.now().isoformat(timespec="seconds")
    if removal.mode == "exact":
        for folder in removal.runs:
            if not trains_alone(load_recipe(folder), removal.user):
                _read_data(folder, removal.user)  # refuses changed data before anything is replaced
    # Only the last run is copied. The exact mode needs all, except those that would not have taken place.
    replaced = removal.runs[-1:]
    if removal.mode == "exact":
        replaced = tuple(each for each in removal.runs if not trains_alone(load_recipe(each), removal.user))
    for folder in replaced:
        temporary = temporary_folder(folder)
        shutil.rmtree(temporary.parent, ignore_errors=True)  # left by a process that was killed
        say(f"{folder}: {'training again' if removal.mode == 'exact' else 'removing'} without {removal.user}")
        with convert_disk_errors(folder), locked(folder):
            before = digest_of_checkpoint(list_checkpoints(folder)[-1])
            files = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
            files += map(str, copies)
            if removal.mode == "exact":
                dropped = [each for each in removal.runs if each not in replaced]
                _train_again(folder, temporary, removal.user, dropped, progress)
            else:
                _copy_without(folder, temporary, removal.user)
            certificate = {
                "user": removal.user,
                "mode": removal.mode,
                "date": date,
                "statement": STATEMENTS[removal.mode],
                "checkpoint_before": before,
                "checkpoint_after": digest_of_checkpoint(list_checkpoints(temporary)[-1]),
                "rounds_trained_again": read_metrics(temporary)["rounds"] if removal.mode == "exact" else 0,
                "deleted": files,
                "copies": {str(path): digest for path, digest in copies.items()},
                "searched": sorted({str(path) for run in removal.runs for path in (run, run.parent)}),
                "not_searched": NOT_SEARCHED,
                "not_changed": branches,
            }
            write_json(temporary / LEFT, {"left": [*certificates_of(folder), certificate]})
        finish_replacement(folder)
    for folder in removal.runs:
        if folder not in replaced:
            shutil.rmtree(folder)
            if removal.live is not None and removal.mode == "exact":
                folder.with_suffix(".yaml").unlink(missing_ok=True)
            say(f"{folder}: deleted")
    return certificate


def temporary_folder(folder: Path) -> Path:
    """Return the folder in which a run without a user is made, such as ``.june.leaving/june``."""
    return folder.with_name(f".{folder.name}.leaving") / folder.name


def finish_replacement(folder: Path) -> None:
    """Move a complete run without a user to its place, and delete the run with the user; do nothing if there is none.

    The certificate is written last, so a folder with one is complete. A process that was killed here is completed by
    the next call; at any time one of the two runs is in its place or in the temporary folder.

    Args:
        folder: Folder of the run to replace.
    """
    temporary = temporary_folder(folder)
    outgoing = temporary.with_name("outgoing")
    if (temporary / LEFT).exists():
        if folder.exists():
            folder.rename(outgoing)
        temporary.rename(folder)
    if outgoing.exists() and folder.exists():
        shutil.rmtree(outgoing)
    if temporary.parent.exists() and not any(temporary.parent.iterdir()):
        temporary.parent.rmdir()


def recipe_without(recipe: Recipe, names: Sequence[str], user: str, *, of_server: bool = False) -> Recipe:
    """Return a recipe without one of its users.

    Args:
        recipe: The recipe.
        names: Names of the users of its run, in order.
        user: Name of the user to leave out; the recipe may lack it.
        of_server: Whether the recipe is that of a federation's server, which has no sources of data.

    Raises:
        RecipeError: The recipe does not name its users' data one by one, or a round would have no participant.
    """
    remaining = [name for name in names if name != user]
    if not remaining:
        raise RecipeError(f"{user!r} is the only user of the run; delete its folder")
    content = recipe.data.model_dump(mode="json", exclude_unset=True)
    changes: dict[str, Any] = {}
    if content.get("users"):
        changes["data.users"] = {name: source for name, source in content["users"].items() if name != user}
    elif content.get("dataset"):
        changes["data.dataset.users"] = remaining
    elif not of_server:
        raise RecipeError(f"data: got {recipe.data.kind} without a source for each user; allowed: users or dataset")
    if content.get("clusters"):
        changes["data.clusters"] = {name: label for name, label in content["clusters"].items() if name != user}
    for key, values in recipe.for_users(names).values_of_users().items():
        changes[key] = dict(zip(names, values, strict=True))
        changes[key].pop(user, None)
    if trains_alone(recipe, user):
        changes["training.participation"] = 1.0  # of a finished run, whose tensors are copied
    elif isinstance(recipe.training.participation, list):
        rounds = [[name for name in members if name != user] for members in recipe.training.participation]
        if not all(rounds):
            raise RecipeError(f"training.participation: a round has no other user than {user!r}")
        changes["training.participation"] = rounds
    return recipe.with_changes(changes)


def trains_alone(recipe: Recipe, user: str) -> bool:
    """Return whether a user is the only participant of all rounds, as in a live run on this user's new documents."""
    participation = recipe.training.participation
    return isinstance(participation, list) and all(members == [user] for members in participation)


def _read_data(folder: Path, user: str) -> tuple[Recipe, RunData]:
    """Return a run's recipe without a user, and the data of the others, which must be that of the run.

    Raises:
        DataError: The data of another user has changed or cannot be read.
    """
    recorded = read_inputs(folder)
    names = list(recorded.users)
    recipe = load_recipe(folder)
    if user in names:
        recipe = recipe_without(recipe, names, user)
    given = replace(NOTHING, date=recorded_date(folder))  # chat templates may write the date of the run's start
    run_data = prepare(recipe, given=given, method=check_and_set_up(recipe))
    for name, digests in run_data.digests.items():
        changed = [split for split in SPLITS if digests[split] != recorded.users[name].digests[split]]
        if changed:
            raise DataError(
                f"{folder}: the {' and '.join(changed)} data of user {name!r} has changed since the run; restore it, "
                "or use --mode forward"
            )
    return recipe, run_data


def _train_again(folder: Path, target: Path, user: str, dropped: Sequence[Path], progress: bool) -> None:
    """Train a run without a user.

    Args:
        folder: The run folder, which is only read.
        target: Folder of the new run.
        user: Name of the user.
        dropped: Runs that would not have taken place without the user.
        progress: Whether to print the progress.
    """
    recipe, run_data = _read_data(folder, user)
    if recipe.continue_from is not None:
        ancestors = [Path(ancestor["run"]) for ancestor in ancestors_of(folder)]  # absolute paths
        parent = [ancestor for ancestor in ancestors if ancestor not in dropped][-1]
        recipe = recipe.with_changes({"continue_from.run": str(parent)})
    run(recipe, out=target, run_data=run_data, progress=progress)


def _copy_without(folder: Path, target: Path, user: str) -> None:
    """Copy a finished run without the tensors, scores and records of a user; reads no user's data.

    Args:
        folder: The run folder, which is only read.
        target: Folder of the copy.
        user: Name of the user.
    """
    finished = load(folder)
    recorded = read_inputs(folder)
    names = list(recorded.users)
    recipe = recipe_without(finished.recipe, names, user)
    # The final models are copied, also if they are those of the best round.
    recipe = recipe.with_changes({"continue_from": None, "data.replay": 0.0, "evaluation.select": "last"})
    inputs = replace(recorded, users={name: of_user for name, of_user in recorded.users.items() if name != user})
    method = check_and_set_up(recipe)
    run_data = reopen_data(folder, recipe, inputs, method)
    new = build(recipe.with_changes({"adapters.start": None}), run_data, method=method)
    old, checkpoint = finished.federation, list_checkpoints(folder)[-1]
    trainers = list(old.clients.names)
    copy_users_state(new.clients, old.clients.state.tensors(), trainers, checkpoint, moments=True)
    copy_rows(old.clients.state.versions, new.clients.state.versions, trainers, new.clients.names, "versions")
    restore_server(new.server, old.server.state, trainers, checkpoint)
    new.server.version = old.server.version

    target.mkdir(parents=True, mode=0o700)
    write_inputs(target, inputs)
    write_text(target / "recipe.yaml", recipe.as_yaml())
    # The account keeps the user: what was published of its data remains published if it returns.
    for name in (KEY, ACCOUNT, ORIGIN, SKIPPED):
        if (folder / name).exists():
            shutil.copy(folder / name, target / name)
    events = [without_name(event, user) for event in read_events(folder) if event.get("user") != user]
    text = "".join(f"{json.dumps(event)}\n" for event in events)
    write_text(target / "events.jsonl", text)
    write_json(target / "metrics.json", _metrics_without(finished, user))
    progress = read_progress(checkpoint)
    progress_without = progress_of(
        progress.round,
        recipe.fingerprint,
        new.clients.population_names,
        clock=progress.clock,
        events_bytes=len(text.encode()),
        stopped=progress.stopped,
    )
    new.save(target, progress_without, keep=recipe.checkpoints.keep)
    local = build_local(new, recipe, run_data)
    if local is not None and finished.local is not None:  # with evaluation.guard
        tensors = finished.local.clients.state.tensors()
        copy_users_state(local.clients, tensors, trainers, list_checkpoints(folder / LOCAL)[-1], moments=True)
        local.save(target / LOCAL, progress_without, keep=recipe.checkpoints.keep)


def _metrics_without(finished: Run, user: str) -> JsonObject:
    """Return the metrics of a run without a user, with the means over the others; all else stays as recorded."""
    clients, metrics = finished.federation.clients, without_name(finished.metrics, user)
    over_others = metrics_of(  # only its means are used, so it needs neither the run's time nor the selected round
        metrics["users"],
        clients.model,
        clients.plan,
        Clock(),
        rounds=metrics["rounds"],
        selected=metrics["rounds"],
        measure=metrics["measure"],
        unit=clients.batch_source.unit,
    ).as_dict()
    means = {key: value for key, value in over_others.items() if key in metrics and "mean" in key}
    return {**metrics, **means}


def without_name(value: Any, name: str) -> Any:
    """Return the content of an event without the entries of a user, in mappings and lists at any depth."""
    if isinstance(value, dict):
        return {key: without_name(entry, name) for key, entry in value.items() if key != name}
    if isinstance(value, list):
        return [without_name(entry, name) for entry in value if entry != name]
    return value
