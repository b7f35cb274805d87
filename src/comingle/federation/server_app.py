"""The function that the ServerApp runs: the server of a federation's file, in its run folder.

The folder of a continuous federation has the runs ``0001``, ``0002``, ..., each with its plan, ``0001.yaml``. A run
continues the one before (``continue_from``). The plan is written when a run is due, and the run of the last plan is
resumed after the process was killed.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from comingle.config import load_recipe
from comingle.federation.client_store import KEPT_RUNS
from comingle.federation.files import load_plan, save_plan
from comingle.federation.flower.channel import Channel
from comingle.federation.flower.processes import FOLDER as FLOWER
from comingle.federation.messages import Task, check_reported, unpack_answer
from comingle.federation.public import public_part, run_name
from comingle.federation.run_folder import Plan, copy_server_without, has_ended, run_federation
from comingle.methods.user_files import load_files_of_command
from comingle.runs.continuation import ancestors_of, users_without_budget
from comingle.runs.folders import LEFT, certificates_of, is_continuous_server
from comingle.runs.leaving import (
    NOT_SEARCHED,
    STATEMENTS,
    Mode,
    find_branches,
    finish_replacement,
    recipe_without,
    temporary_folder,
)
from comingle.training.checkpoints import digest_of_checkpoint, digest_of_tensors
from comingle.training.events import AN_EVENT, Observer
from comingle.utils.errors import ComingleError, MessageError, RecipeError, RunError
from comingle.utils.files import HOLDER, LOCK, list_checkpoints, locked
from comingle.utils.names import as_folder
from comingle.utils.records import (
    FEDERATION,
    JsonObject,
    convert_disk_errors,
    expand_home,
    is_server,
    read_metrics,
    write_json,
)


def run_federation_app(channel: Channel, config: Mapping[str, Any], folder: Path, say: Callable[[str], None]) -> None:
    """Run or resume the federation of the file ``config["federation"]``.

    Args:
        channel: Transport of messages to clients.
        config: Run config of the Flower app; ``continue_from`` has the folder of an earlier run to continue, and
            ``continuous`` says whether runs follow one another without an end.
        folder: The run folder.
        say: Called with each line to show to the operator.

    Raises:
        ComingleError: The file or the folder cannot be used, or too few clients answered.
    """
    file = str(config.get("federation") or "").strip()
    if not file:
        raise RecipeError("run config: no 'federation'; give --run-config 'federation=\"FILE\"'")
    load_files_of_command()  # Python files with the user's own methods, given with ``--plugin``

    def show(event: Mapping[str, Any]) -> None:
        _show_event(say, event)

    is_continuous = bool(config.get("continuous"))

    def load() -> Plan:
        continue_from = str(config.get("continue_from") or "")
        plan = load_plan(expand_home(file), continue_from=continue_from, continuous=is_continuous)
        return without_users_who_left(plan, folder)

    with _warnings_shown(say):
        if is_continuous:
            ContinuousServer(load, channel, folder, say=say, observers=[show]).run_forever()
        has_begun = (folder / "recipe.yaml").exists()
        run_federation(load(), channel, folder, resume=has_begun, observers=[show])
        complete_certificates(folder)


COUNT_SECONDS = 20.0
"""Time between two questions to the clients how much of their data is new, after an answer that has changed."""

MAX_COUNT_SECONDS = 40.0
"""Longest time between two questions, after answers that stay the same.

A question takes a client 20 ms of CPU time, nearly all of it for Flower's messages. Longer times would not leave enough
of a minute to start a run.
"""

_COUNT_GROWTH = 1.5
"""Factor by which the pause between questions for new data grows while the answers stay the same."""

COUNT_TIMEOUT_SECONDS = 30.0
"""How long the server waits for these answers. A client that takes longer has the answer ready at the next question."""

RETRY_SECONDS = 60.0
"""Time after which a run that failed is resumed."""

MAX_EARLIER_RUNS = 100
"""Number of latest runs whose names clients are sent, to find the last one in which they took part."""


OLD_RUNS = "old_runs.json"
"""File in the folder of a continuous server with the names of runs deleted because of ``rounds.keep``, newest first."""


def _deleted_names(folder: Path) -> list[str]:
    """Return the names of the runs that a continuous server has deleted because of ``rounds.keep``, newest first."""
    try:
        return [str(name) for name in json.loads((folder / OLD_RUNS).read_text(encoding="utf-8"))]
    except FileNotFoundError:
        return []


class ContinuousServer:
    """Starts a run whenever enough users have enough new data, or resumes the last one."""

    def __init__(
        self,
        load: Callable[[], Plan],
        channel: Channel,
        folder: Path,
        *,
        say: Callable[[str], None],
        observers: Sequence[Observer] = (),
    ) -> None:
        """Create the server of a folder, which may have earlier runs.

        Args:
            load: Returns the content of the server's file, which is read before each run.
            channel: Transport of messages to clients.
            folder: Folder of all runs.
            say: Called with each line to show to the operator.
            observers: Receive the events of all runs.
        """
        self._load, self._channel, self._folder = load, channel, folder
        self._say, self._observers = say, observers
        self._last_problem = ""  # why no run can be planned, as shown last
        self._shown_refused = set[str]()
        self._last_counts: dict[str, int] | None = None  # the clients' last answers
        self._count_seconds = COUNT_SECONDS  # until the next question

    def run_forever(self) -> NoReturn:
        """Resume the run that is planned, and plan one whenever it is due, until the process ends.

        Raises:
            RecipeError: The first run cannot start because of the server's file.
        """
        while True:
            number = self.last_planned
            try:
                if number and not has_ended(self._run_folder(number)):
                    self.run()
                elif not self.plan_next():
                    time.sleep(self._count_seconds)
            except ComingleError as error:
                number = self.last_planned
                folder = self._run_folder(number)
                if not isinstance(error, RunError) and not list_checkpoints(folder):  # the file has to be corrected
                    self._plan_file(number).unlink(missing_ok=True)
                    shutil.rmtree(folder, ignore_errors=True)
                    if number <= 1:
                        raise
                self._say(f"run {number:04d}: {error}; trying again in {RETRY_SECONDS:.0f} s")
                time.sleep(RETRY_SECONDS)

    @property
    def last_planned(self) -> int:
        """Number of the last run that has a plan; 0 if there is none."""
        return max((int(path.stem) for path in self._folder.glob("[0-9]*.yaml")), default=0)

    def run(self) -> None:
        """Start or resume the run that was planned last.

        Raises:
            ComingleError: The plan or the folder cannot be used, or too few clients answered.
        """
        number = self.last_planned
        folder = self._run_folder(number)
        plan = load_plan(self._plan_file(number))
        plan = replace(plan, earlier=self._earlier_runs(number), deleted=deleted_runs(self._folder))
        allow = getattr(self._channel, "allow", None)  # not all transports know who may join
        if allow is not None:
            allow(plan.users)
        has_begun = (folder / "recipe.yaml").exists()
        participation = plan.recipe.training.participation
        who = ", ".join(participation[0] if isinstance(participation, list) else plan.users)
        self._say(f"run {number:04d}: {'resumed' if has_begun else 'started'} with {who}")
        run_federation(plan, self._channel, folder, resume=has_begun, observers=self._observers)
        complete_certificates(self._folder)
        self._say(f"run {number:04d}: ended; waiting for new data")

    def plan_next(self) -> bool:
        """Write the plan of the next run (its recipe and participants) if one is due, and return whether it is.

        A run is due if enough users have enough new data since the last one. If the server's file is wrong, the
        operator is shown why, once, and no run is planned.

        Raises:
            RecipeError: The server's file is wrong before the first run.
        """
        number = self.last_planned + 1
        try:
            content = self._load()
            plan = without_users_who_left(content, self._folder)
            changes = self._changes(plan, number)  # of the recipe, for this run
            if changes is None or self._load() != content:
                return False  # not due, or the file was changed while the clients were asked
            plan = replace(plan, recipe=plan.recipe.with_changes(changes))
        except RecipeError as error:
            if number == 1:
                raise
            if str(error) != self._last_problem:
                self._say(f"{error}; no run starts before this is corrected")
            self._last_problem = str(error)
            return False
        self._last_problem = ""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        save_plan(self._plan_file(number), plan)
        assert plan.rounds is not None
        if plan.rounds.keep is not None:
            self._delete_runs_before(number - plan.rounds.keep)
        return True

    def _delete_runs_before(self, first_kept: int) -> None:
        """Delete the oldest runs, and record their names for clients that return and look for their last run.

        Args:
            first_kept: Number of the first run that is kept.
        """
        for run in _numbered_runs(self._folder):
            if int(run.name) >= first_kept:
                return
            try:
                names = _deleted_names(self._folder)
                if is_server(run) and run_name(run) not in names:
                    write_json(self._folder / OLD_RUNS, [run_name(run), *names][:MAX_EARLIER_RUNS])
                _delete_run(run)
            except OSError as error:
                self._say(f"rounds.keep: {run}: cannot be deleted ({error.strerror}); restart the server to try again")

    def _changes(self, plan: Plan, number: int) -> JsonObject | None:
        """Return the recipe keys that the next run sets, beyond the server's file; None if no run is due.

        A run is due if enough connected users have enough new data, and the last run began long enough ago. It
        continues the last run, and only the users with new data take part; the others keep their models.

        Args:
            plan: Content of the server's file.
            number: Number of the run, from 1. The first run is always due.
        """
        recipe = plan.recipe
        changes: dict[str, Any] = {"seed": recipe.seed + number - 1, "data.seed": recipe.data_seed}
        if number == 1:
            if recipe.continue_from is None:
                changes["data.replay"] = 0.0  # there is nothing to replay yet
            return changes
        assert plan.rounds is not None
        when = plan.rounds.when
        seconds_since_start = time.time() - self._plan_file(number - 1).stat().st_mtime
        if seconds_since_start < when.at_most_every:
            return None
        new = self._count_new(plan, number)  # amount of new data of each connected user
        ready = [name for name in plan.users if new.get(name, 0) >= when.new_tokens]
        refused = users_without_budget(self._run_folder(number - 1), recipe) & set(plan.users)  # privacy budget
        self._show_refused(refused & set(ready))
        ready = [name for name in ready if name not in refused]
        num_needed = min(when.users, len(plan.users) - len(refused))
        if not ready or len(ready) < num_needed or len(new) < plan.network.min_participants:
            return None
        moments = recipe.continue_from is not None and recipe.continue_from.moments
        changes["continue_from"] = {"run": self._run_folder(number - 1).name, "moments": moments}
        if len(ready) < len(plan.users):  # the others keep their models
            changes["training.participation"] = [ready] * recipe.training.rounds
        return changes

    def _show_refused(self, refused: frozenset[str] | set[str]) -> None:
        """Show once that users with new data take part in no further run, as their privacy budget is spent."""
        if refused - self._shown_refused:
            self._shown_refused |= refused
            self._say(f"{', '.join(sorted(refused))}: the privacy budget is spent; no further run trains on new data")

    def _count_new(self, plan: Plan, number: int) -> dict[str, int]:
        """Ask the connected clients how much of their data is new, and return the numbers by user.

        Args:
            plan: Content of the server's file.
            number: Number of the next run.
        """
        recipe = plan.recipe.with_changes({"continue_from": None, "data.replay": 0.0})
        public = public_part(recipe, plan.users, plan.settings, base=None)
        earlier = self._earlier_runs(number)
        arguments = {"public": public.as_dict(), "since": list(earlier)}
        tasks = {
            name: Task(run=earlier[0], serial=0, user=name, todo=("count",), arguments=arguments)
            for name in self._channel.present()
            if name in plan.users
        }
        requests = {name: task.pack() for name, task in tasks.items()}
        new: dict[str, int] = {}
        for name, reply in self._channel.exchange(requests, timeout=COUNT_TIMEOUT_SECONDS):
            if isinstance(reply, str):  # why there is no reply
                continue
            try:
                answer = unpack_answer(reply)
                reported = check_reported(answer.reported)
            except MessageError as error:
                self._say(f"{name}: {error}")
                continue
            if (answer.run, answer.serial, answer.user) == (tasks[name].run, 0, name) and not answer.refused:
                new[name] = int(reported.get("new", 0))
        is_unchanged = new == self._last_counts
        self._count_seconds = (
            min(self._count_seconds * _COUNT_GROWTH, MAX_COUNT_SECONDS) if is_unchanged else COUNT_SECONDS
        )
        self._last_counts = new
        return new

    def _earlier_runs(self, number: int) -> tuple[str, ...]:
        """Return the names in messages of the latest runs before one, the newest first."""
        first = max(1, number - MAX_EARLIER_RUNS)
        folders = [self._run_folder(earlier) for earlier in range(number - 1, first - 1, -1)]
        names = tuple(run_name(folder) for folder in folders if (folder / FEDERATION).exists())
        return (*names, *_deleted_names(self._folder))[:MAX_EARLIER_RUNS]

    def _run_folder(self, number: int) -> Path:
        """Return the folder of a run, named by its number."""
        return self._folder / f"{number:04d}"

    def _plan_file(self, number: int) -> Path:
        """Return the file with the recipe and participants of a run, named by its number."""
        return self._folder / f"{number:04d}.yaml"


class _WarningHandler(logging.Handler):
    """Shows warnings to the operator, except those that are also events."""

    def __init__(self, say: Callable[[str], None]):
        """Pass warnings to a function that shows them to the operator."""
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        """Show a warning, unless it is also an event of the run, which :func:`_show_event` shows."""
        is_event = any(hasattr(record, attribute) for attribute in AN_EVENT)  # logged with ``extra=AN_EVENT``
        if not is_event:
            self._say(record.getMessage())


@contextmanager
def _warnings_shown(say: Callable[[str], None]) -> Iterator[None]:
    """Show warnings of comingle to the operator while the block runs."""
    handler, logger = _WarningHandler(say), logging.getLogger("comingle")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _show_event(say: Callable[[str], None], event: Mapping[str, Any]) -> None:
    """Show an event of the run to the operator in one line, if it is of a kind that matters to an operator.

    Args:
        say: Called with the line.
        event: Line of ``events.jsonl``; its key ``event`` is the kind.
    """
    kind = event["event"]
    if kind == "joined":
        say(f"{event['user']} has joined")
    elif kind in ("failed", "rejected", "declined"):
        say(f"{event['user']}: {event['reason']}")
    elif kind == "no_sum":  # too few uploads of a round, so the model is unchanged
        say(str(event["reason"]))
    elif kind == "aggregation" and event.get("left_out"):
        say(f"round {event['round']}: {event['rule']} left out {', '.join(event['left_out'])}")
    elif kind == "round":
        say(f"round {event['round']}: {event['upload_bytes']:,} bytes up, {event['download_bytes']:,} down")
    elif kind == "evaluation" and event["users"]:  # Users with scores; without them there is no mean.
        say(f"after round {event['round']}: {_mean_score_text(event)}")


def _mean_score_text(event: Mapping[str, Any]) -> str:
    """Return the mean test score of an evaluation event as text, such as "mean test loss 2.1 over 3 users".

    The event has the mean under a key that ends with the name of the measure, such as "mean_test_loss".
    """
    prefix = "mean_test_"
    key = next(key for key in event if key.startswith(prefix))
    measure = key.removeprefix(prefix)
    return f"mean test {measure} {event[key]:.4g} over {len(event['users'])} users"


# ---------------------------------------------------------------- users who leave


def without_users_who_left(plan: Plan, folder: Path) -> Plan:
    """Return a plan without users who have left a federation, with the names of the runs deleted for them.

    Args:
        plan: Content of the server's file.
        folder: Folder of the server.

    Raises:
        RecipeError: No user remains, or a round would have no participant.
    """
    for name in [certificate["user"] for certificate in certificates_of(folder)]:
        if name in plan.users:
            recipe = recipe_without(plan.recipe, plan.users, name, of_server=True)
            plan = replace(plan, recipe=recipe, users=tuple(user for user in plan.users if user != name))
    return replace(plan, deleted=deleted_runs(folder))


def deleted_runs(folder: Path) -> tuple[str, ...]:
    """Return the names in messages of the runs that were deleted as users have left with ``exact``."""
    return tuple(run for certificate in certificates_of(folder) for run in certificate.get("deleted_runs", ()))


@dataclass(frozen=True, kw_only=True)
class ServerRemoval:
    """Plan of the removal of a user from a federation's server.

    Args:
        folder: Folder of the server.
        user: Name of the user.
        mode: How the user is removed.
        runs: Run folders to delete or to replace, the earliest first.
        before: The last run before these; None if the user was there from the start.
        rounds: Largest number of rounds that the others train again; 0 for ``forward``.
        keys: Files of the user's key, which are deleted.
    """

    folder: Path
    user: str
    mode: Mode
    runs: tuple[Path, ...]
    before: Path | None
    rounds: int
    keys: tuple[Path, ...] = ()

    @property
    def files(self) -> list[Path]:
        """Files that are deleted, or replaced by files without the user."""
        folders = [*self.runs, *(_server_folder(run) / FLOWER for run in self.runs)]
        found = {path for folder in folders for path in folder.rglob("*") if path.is_file()}
        found.update(plan for plan in map(_plan_of, self.runs) if plan.exists())
        return [*sorted(path for path in found if path.name not in (LOCK, HOLDER)), *self.keys]

    @property
    def branches(self) -> list[Path]:
        """Runs that continue these in another line, and are not changed."""
        return find_branches(self.runs, {_server_folder(run).parent for run in self.runs})

    @property
    def notes(self) -> list[str]:
        """Lines for the operator who removes a user: what the other users have to do, and what is not deleted.

        A removal is "exact" (the others train again without the user) or "forward" (the models stay).
        """
        notes = []
        if self.mode == "exact":
            start = "the beginning" if self.before is None else f"{self.before}"
            notes.append(
                f"train again: up to {self.rounds} rounds from {start}, when the server is started again as before; "
                "the clients of the others have to be connected, and train on their text as it is then; at the end the "
                f"server adds the rounds and the digest of the result to {LEFT}"
            )
        is_forgotten = self.before is not None and len(self.runs) >= KEPT_RUNS and is_continuous_server(self.folder)
        if self.mode == "exact" and is_forgotten:
            notes.append(
                f"{len(self.runs)} runs are replaced; clients keep {KEPT_RUNS}: those without a state of {self.before} "
                "start as new users"
            )
        key = "" if self.keys else f"{self.user}'s key, if there is one (--certificates FOLDER), "
        notes.append(
            f"not deleted here: {key}the name in the server's file (--remove-user), and {self.user}'s state folder "
            "(`comingle leave STATE_FOLDER`)"
        )
        return notes


def plan_server_removal(folder: Path, user: str, mode: Mode, certificates: Path | None = None) -> ServerRemoval:
    """Return what the removal of a user from a federation's server deletes and costs.

    Args:
        folder: Folder of the server.
        user: Name of the user.
        mode: How the user is to be removed.
        certificates: Folder of certificates and keys, from which the user's key is deleted; None to keep it.

    Raises:
        RunError: The server has no such user, an earlier run that is needed is gone, or a run has not ended.
        RecipeError: The user cannot be removed in this way, or there is no such folder of certificates.
    """
    keys = () if certificates is None else _files_of_key(certificates, user)
    folder = folder.resolve()
    if _server_folder(folder) != folder:
        raise RunError(f"{folder}: belongs to {folder.parent} of `comingle server --continuous`; name that folder")
    finish_removals(folder)
    runs = _runs_of(folder)
    with_user = [number for number, run in enumerate(runs) if user in _names_in(run)]
    if not with_user:
        has_left = any(certificate["user"] == user for certificate in certificates_of(folder))
        hint = f"has left; {folder / LEFT} is the certificate" if has_left else "is no user of this federation"
        raise RunError(f"{folder}: {user!r} {hint}")
    first = with_user[0]
    if mode == "forward":
        affected = [runs[number] for number in with_user]
        for run in affected:
            _check_forward(run, user, is_last=run == runs[-1])
        return ServerRemoval(
            folder=folder, user=user, mode=mode, runs=tuple(affected), before=None, rounds=0, keys=keys
        )
    gone = [run for run in runs if not run.exists() and not _plan_of(run).exists()]
    if gone:
        raise RunError(f"{gone[0]}: {folder} continues this run, which is gone; allowed: --mode forward")
    affected = runs[first:]
    rounds_by_server: dict[Path, int] = {}  # runs of a continuous server are replaced by a single one
    for run in affected:
        recipe = load_recipe(run) if (run / "recipe.yaml").exists() else load_plan(_plan_of(run)).recipe
        if (run / "users").exists():
            raise RecipeError(
                f"--mode: got exact for {run} of `comingle federate`; allowed: forward, or `comingle federate --force` "
                "with a recipe without the user"
            )
        if recipe.privacy is not None and recipe.privacy.noisy:
            raise RecipeError(
                f"--mode: got exact for {run} with differential privacy, so training again would spend the other "
                "users' budgets twice; allowed: forward"
            )
        rounds_by_server[_server_folder(run)] = recipe.training.rounds
    return ServerRemoval(
        folder=folder,
        user=user,
        mode=mode,
        runs=tuple(affected),
        before=runs[first - 1] if first else None,
        rounds=sum(rounds_by_server.values()),
        keys=keys,
    )


def _files_of_key(certificates: Path, user: str) -> tuple[Path, ...]:
    """Return the files of a user's key that exist in a folder of certificates.

    Raises:
        RecipeError: The folder has no keys of users.
    """
    from comingle.federation.flower.certificates import USERS, quote_name

    if not (certificates / USERS).is_dir():
        raise RecipeError(f"--certificates: got {certificates}; allowed: a folder that --make-certificates has written")
    files = [certificates.resolve() / USERS / f"{quote_name(user)}{suffix}" for suffix in (".pub", ".key")]
    return tuple(path for path in files if path.exists())


def _check_forward(run: Path, user: str, *, is_last: bool) -> None:
    """Check that a user can be removed from a run.

    Raises:
        RunError: The run has not ended; the last one of a continuous server is planned again instead.
        RecipeError: The run has no other user.
    """
    if not (is_last and _plan_of(run).exists() and not has_ended(run)):
        read_metrics(run)
    if (run / FEDERATION).exists():
        recipe_without(load_recipe(run), list(_names_in(run)), user, of_server=True)


def remove_from_server(removal: ServerRemoval, say: Callable[[str], None] = lambda line: None) -> JsonObject:
    """Carry out the removal of a user from a federation's server, and return the certificate.

    The user's key is deleted first. Then the certificate is written, so the user is refused from then on, and
    :func:`finish_removals` continues after an interruption. With ``exact`` the runs are deleted; when the server is
    started it trains again, and completes the certificate.

    Args:
        removal: What has to be deleted or trained again.
        say: Called with a line for each run.

    Raises:
        RunError: The server is running, or the disk is full.
    """
    servers = list(dict.fromkeys(map(_server_folder, removal.runs)))
    certificate: JsonObject = {}
    with ExitStack() as stack:
        for server in servers:
            stack.enter_context(convert_disk_errors(server))
            stack.enter_context(locked(_lock_folder(server)))
        for path in removal.keys:
            path.unlink(missing_ok=True)
        for server in servers:
            _delete_logs(server)
            of_server = [run for run in removal.runs if _server_folder(run) == server]
            certificate = _certificate(removal, of_server)
            if removal.mode == "exact" or server not in of_server:
                _record(server, certificate)
        for server in reversed(servers):
            if removal.mode == "exact":
                say(f"{server}: deleting the runs with {removal.user}")
                finish_removals(server)
        if removal.mode == "forward":
            for run in removal.runs:
                say(f"{run}: removing {removal.user}")
                _replace_without(run, removal.user, _certificate(removal, [run]))
            for server in servers:
                _record_digests(server, removal)
    return certificate


def finish_removals(folder: Path) -> None:
    """Delete the runs of a server that certificates name; does nothing if they are deleted already.

    Args:
        folder: Folder of the server, or of its only run.
    """
    deleted = deleted_runs(folder)
    if is_server(folder):
        if run_name(folder) in deleted:
            for path in sorted(folder.iterdir(), key=lambda path: path.name == FEDERATION):  # its name is needed last
                if path.name not in (LEFT, LOCK, HOLDER, FLOWER):
                    _delete(path)
        return
    for leftover in folder.glob(f".*{_DELETED}"):
        _delete(leftover)
    runs = _numbered_runs(folder)
    for run in runs:
        finish_replacement(run)
    users = {certificate["user"] for certificate in certificates_of(folder) if certificate["mode"] == "exact"}
    numbers = [
        number
        for number, run in enumerate(runs)
        if users & _names_in(run) or (is_server(run) and run_name(run) in deleted)
    ]
    for run in reversed(runs[min(numbers) :] if numbers else ()):  # so that no run continues one that is gone
        _delete_run(run)


def _delete_run(run: Path) -> None:
    """Delete a run of a continuous server and its plan, which is then missing only together with the later ones."""
    _plan_of(run).unlink(missing_ok=True)
    if run.exists():
        renamed = run.with_name(f".{run.name}{_DELETED}")
        _delete(renamed)
        run.rename(renamed)
        _delete(renamed)


_DELETED = ".deleted"
"""Suffix of hidden folders that are being deleted."""


def _delete(path: Path) -> None:
    """Delete a file or a folder, if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _delete_logs(folder: Path) -> None:
    """Delete logs and status of a server's process, which name the users."""
    for path in (folder / FLOWER).glob("*"):
        if path.name not in (LOCK, HOLDER):
            _delete(path)


def _certificate(removal: ServerRemoval, runs: Sequence[Path]) -> JsonObject:
    """Return the certificate of a user's removal from the runs of one server: what is deleted and trained again.

    It is written before anything is changed.

    Args:
        removal: The removal, which may concern the runs of several servers.
        runs: Those of its runs that belong to the server, the earliest first.
    """
    deleted_files = replace(removal, runs=tuple(runs)).files
    certificate: JsonObject = {
        "user": removal.user,
        "mode": removal.mode,
        "date": datetime.now().isoformat(timespec="seconds"),
        "statement": STATEMENTS[removal.mode],
        "checkpoint_before": _digest(runs[-1]),
        "checkpoint_after": None if removal.before is None else _digest(removal.before),
        "rounds_to_train_again": removal.rounds,
        "deleted": [str(path) for path in deleted_files],
        "searched": [str(removal.folder), *map(str, runs)],
        "not_searched": NOT_SEARCHED,
        "not_changed": [str(branch) for branch in removal.branches],
    }
    if removal.mode == "exact":
        certificate["deleted_runs"] = [run_name(run) for run in runs if is_server(run)]
        certificate["trained_again_in"] = runs[0].name
        certificate["rounds_trained_again"] = None  # until it is complete
    return certificate


def complete_certificates(folder: Path) -> None:
    """Complete the certificates of ``exact`` when the others have trained again: with rounds, digests and a date.

    The digest ``tensors_after`` is that of the shared model in a federation in which the user never took part. Without
    such certificates the function does nothing.

    Args:
        folder: Folder of the server, or of its only run.
    """
    certificates, deleted = certificates_of(folder), deleted_runs(folder)
    completed = False
    for certificate in certificates:
        is_complete = certificate.get("rounds_trained_again", 0) is not None  # or of an earlier version
        if is_complete:
            continue
        run = folder if is_server(folder) else folder / certificate["trained_again_in"]
        if is_server(run) and has_ended(run) and run_name(run) not in deleted:
            certificate["rounds_trained_again"] = read_metrics(run)["rounds"]
            certificate["checkpoint_after"] = _digest(run)
            certificate["tensors_after"] = digest_of_tensors(list_checkpoints(run)[-1])
            certificate["date_trained_again"] = datetime.now().isoformat(timespec="seconds")
            completed = True
    if completed:
        write_json(folder / LEFT, {"left": certificates})


def _digest(run: Path) -> str | None:
    """Return the digest of a run's last checkpoint; None if it has none."""
    checkpoints = list_checkpoints(run)
    return digest_of_checkpoint(checkpoints[-1]) if checkpoints else None


def _record(folder: Path, certificate: JsonObject) -> None:
    """Write the certificate of a user's removal, a record of what was deleted, to ``left.json`` in a folder.

    If the file has a certificate of the same user, from a removal that was interrupted, both become one.

    Args:
        folder: Folder of the server or of a run.
        certificate: The certificate.
    """
    others = [each for each in certificates_of(folder) if each["user"] != certificate["user"]]
    for earlier in certificates_of(folder):
        if earlier["user"] == certificate["user"]:
            merged = {key: [*earlier.get(key, ()), *certificate.get(key, ())] for key in ("deleted", "deleted_runs")}
            certificate = {**certificate, **merged, "checkpoint_before": earlier["checkpoint_before"]}
    write_json(folder / LEFT, {"left": [*others, certificate]})


def _record_digests(server: Path, removal: ServerRemoval) -> None:
    """Complete the certificate of a user's removal with the digest of the last checkpoint without the user.

    Args:
        server: Folder of a continuous server, which has several runs.
        removal: What was removed, in mode "forward", in which the runs were replaced by those without the user.
    """
    last = [run for run in removal.runs if _server_folder(run) == server][-1]
    certificates = certificates_of(server)
    for certificate in certificates:
        if certificate["user"] == removal.user:
            certificate["checkpoint_after"] = _digest(last)
    write_json(server / LEFT, {"left": certificates})


def _replace_without(run: Path, user: str, certificate: JsonObject) -> None:
    """Replace a run, and its plan, by those without a user; delete the run if it has not ended.

    Args:
        run: The run folder.
        user: Name of the user.
        certificate: Certificate for the new folder.
    """
    if not has_ended(run) and _plan_of(run).exists():  # it is planned again
        _delete_run(run)
        return
    temporary, recorded = temporary_folder(run), certificates_of(run)
    _delete(temporary.parent)  # left by a process that was killed
    copy_server_without(run, temporary, user)
    for state in (run / "users").glob("*"):  # of `comingle federate`
        if state.name != as_folder(user):
            shutil.copytree(state, temporary / "users" / state.name)
    for plan in (run / "federation.yaml", _plan_of(run)):
        target = temporary / plan.name if plan.parent == run else plan
        if plan.exists():
            target_plan = load_plan(plan)
            recipe = recipe_without(target_plan.recipe, target_plan.users, user, of_server=True)
            if recipe.continue_from is not None and Path(recipe.continue_from.run).parent == plan.parent:
                recipe = recipe.with_changes({"continue_from.run": Path(recipe.continue_from.run).name})
            remaining = tuple(name for name in target_plan.users if name != user)
            at_most = min(target_plan.network.min_participants, len(remaining))
            network = target_plan.network.model_copy(update={"min_participants": at_most})
            save_plan(target, replace(target_plan, recipe=recipe, users=remaining, network=network))
    certificate = {**certificate, "checkpoint_after": _digest(temporary)}
    write_json(temporary / LEFT, {"left": [*recorded, certificate]})
    finish_replacement(run)


def _server_folder(run: Path) -> Path:
    """Return the folder of the server of a run: the one above it if the server is continuous, else the run folder."""
    return run.parent if _plan_of(run).exists() else run


def _lock_folder(server: Path) -> Path:
    """Return the folder that a server's process locks."""
    return server / FLOWER if (server / FLOWER).exists() else server


def _plan_of(run: Path) -> Path:
    """Return the path of the plan of a run of a continuous server; for other runs there is no such file."""
    return run.with_suffix(".yaml") if run.name.isdigit() else run / ".no-plan"


def _numbered_runs(folder: Path) -> list[Path]:
    """Return the run folders of a continuous server, also of a run that is only planned, the earliest first."""
    names = {path.stem for path in folder.glob("[0-9]*.yaml")}
    names.update(path.name for path in folder.glob("[0-9]*") if path.is_dir())
    names.update(path.name[1:].removesuffix(".leaving") for path in folder.glob(".[0-9]*.leaving"))
    return [folder / name for name in sorted(names)]


def _runs_of(folder: Path) -> list[Path]:
    """Return the run folders of a server, and those that they continue, the earliest first."""
    runs = _numbered_runs(folder) if is_continuous_server(folder) else [folder]
    has_events = bool(runs) and (runs[0] / "events.jsonl").exists()
    ancestors = [Path(ancestor["run"]) for ancestor in ancestors_of(runs[0])] if has_events else []
    return [*ancestors, *runs]


def _names_in(run: Path) -> set[str]:
    """Return the names of the users of a run and of its plan; empty if there is neither."""
    names: set[str] = set()
    if (run / FEDERATION).exists():
        names.update(json.loads((run / FEDERATION).read_text(encoding="utf-8"))["public"]["users"])
    if _plan_of(run).exists():
        names.update(load_plan(_plan_of(run)).users)
    return names
