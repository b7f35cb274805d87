"""The function that the ServerApp runs: the server of a federation's file, in its run folder.

The folder of a continuous federation has the runs ``0001``, ``0002``, ..., each with its plan, ``0001.yaml``. A run
continues the one before (``continue_from``). The plan is written when a run is due, and the run of the last plan is
resumed after the process was killed.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from comingle.federation.files import load_plan, save_plan
from comingle.federation.flower.channel import Channel
from comingle.federation.messages import Task, check_reported, unpack_answer
from comingle.federation.public import public_part, run_name
from comingle.federation.run_folder import Plan, has_ended, run_federation
from comingle.methods.user_files import load_files_of_command
from comingle.runs.continuation import users_without_budget
from comingle.training.events import AN_EVENT, Observer
from comingle.utils.errors import ComingleError, MessageError, RecipeError, RunError
from comingle.utils.files import list_checkpoints
from comingle.utils.records import FEDERATION, JsonObject, expand_home


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
        return load_plan(expand_home(file), continue_from=continue_from, continuous=is_continuous)

    with _warnings_shown(say):
        if is_continuous:
            ContinuousServer(load, channel, folder, say=say, observers=[show]).run_forever()
        has_begun = (folder / "recipe.yaml").exists()
        run_federation(load(), channel, folder, resume=has_begun, observers=[show])


COUNT_SECONDS = 20.0
"""Time between two questions to the clients how much of their data is new.

A question and its answer take a client 20 ms of CPU time, so 0.1% of a core.
"""

COUNT_TIMEOUT_SECONDS = 30.0
"""How long the server waits for these answers. A client that takes longer has the answer ready at the next question."""

RETRY_SECONDS = 60.0
"""Time after which a run that failed is resumed."""

MAX_EARLIER_RUNS = 100
"""Number of latest runs whose names clients are sent, to find the last one in which they took part."""


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
                    time.sleep(COUNT_SECONDS)
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
        plan = replace(load_plan(self._plan_file(number)), earlier=self._earlier_runs(number))
        allow = getattr(self._channel, "allow", None)  # not all transports know who may join
        if allow is not None:
            allow(plan.users)
        has_begun = (folder / "recipe.yaml").exists()
        participation = plan.recipe.training.participation
        who = ", ".join(participation[0] if isinstance(participation, list) else plan.users)
        self._say(f"run {number:04d}: {'resumed' if has_begun else 'started'} with {who}")
        run_federation(plan, self._channel, folder, resume=has_begun, observers=self._observers)
        self._say(f"run {number:04d}: ended; waiting for new data")

    def plan_next(self) -> bool:
        """Write the plan of the next run if it is due, and return whether it is.

        Raises:
            RecipeError: The plan of the first run cannot be used.
        """
        number = self.last_planned + 1
        try:
            plan = self._load()
            changes = self._changes(plan, number)
            if changes is None:
                return False
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
        return True

    def _changes(self, plan: Plan, number: int) -> JsonObject | None:
        """Return how the recipe of the next run differs from the server's file; None if no run is due.

        Args:
            plan: Content of the server's file.
            number: Number of the run.
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
        new = self._count_new(plan, number)
        ready = [name for name in plan.users if new.get(name, 0) >= when.new_tokens]
        refused = users_without_budget(self._run_folder(number - 1), recipe) & set(plan.users)
        self._show_refused(refused & set(ready))
        ready = [name for name in ready if name not in refused]
        num_users = min(when.users, len(plan.users) - len(refused))
        if not ready or len(ready) < num_users or len(new) < plan.network.min_participants:
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
        return new

    def _earlier_runs(self, number: int) -> tuple[str, ...]:
        """Return the names in messages of the latest runs before one, the newest first."""
        first = max(1, number - MAX_EARLIER_RUNS)
        folders = [self._run_folder(earlier) for earlier in range(number - 1, first - 1, -1)]
        return tuple(run_name(folder) for folder in folders if (folder / FEDERATION).exists())

    def _run_folder(self, number: int) -> Path:
        return self._folder / f"{number:04d}"

    def _plan_file(self, number: int) -> Path:
        return self._folder / f"{number:04d}.yaml"


class _WarningHandler(logging.Handler):
    """Shows warnings to the operator, except those that are also events."""

    def __init__(self, say: Callable[[str], None]):
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
