"""The run folder of a federation's server, and its status file."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from pydantic import field_validator

from comingle.config import Recipe, load_recipe
from comingle.config.settings import ACCOUNT, AUTO, KEY, Count, NotNegative, Section
from comingle.federation.backend import NetworkBackend
from comingle.federation.flower.channel import Channel
from comingle.federation.public import Public, ServerContext, check_remote_clients, public_part, read_public
from comingle.federation.server_session import NetworkSection, ServerSession, start_session
from comingle.methods import own_errors
from comingle.methods.user_files import ORIGIN
from comingle.privacy.accounting import account_writer
from comingle.protocol.messages import LOWEST, validation_reply
from comingle.runs.continuation import (
    check_constant_rates,
    check_equal,
    check_private_continuation,
    check_same_ranks,
    continuation_entry,
    continue_account,
    keeps_earlier_best,
    newest_checkpoint,
    restore_account,
    restore_server,
)
from comingle.runs.folders import open_folder, with_bos_of_run
from comingle.runs.given import Given
from comingle.training.checkpoints import (
    Clock,
    Progress,
    load_checkpoint,
    progress_of,
    prune_checkpoints,
    read_progress,
    read_state,
    rows_of_names,
    save_checkpoint,
)
from comingle.training.evaluation import end_event, evaluation_interval, start_event, warn_of_share
from comingle.training.events import EventLog, Observer
from comingle.training.kinds.base import kind_of
from comingle.training.plan import keep_key
from comingle.training.rounds import Evaluations, outcome_warnings, run_rounds
from comingle.training.server import VERSION, start_server
from comingle.training.settings import untrained_entry
from comingle.training.state import State, initial_state
from comingle.utils.errors import RunError
from comingle.utils.files import list_checkpoints
from comingle.utils.inputs import SPLITS, Inputs, UserInputs, read_inputs, recorded_date, write_inputs
from comingle.utils.records import (
    FEDERATION,
    PARTICIPANTS,
    JsonMapping,
    JsonObject,
    read_evaluations,
    read_events,
    read_metrics,
    write_json,
    write_text,
)
from comingle.utils.trees import Layout, Tree

WRITE_SECONDS = 0.5
"""Shortest time between two writes of the status file within a round."""


@dataclass(kw_only=True)
class ClientStatus:
    """Status of one client, an entry of ``participants.json``.

    Args:
        state: "expected", "here" or "away".
        round: Last round that it has answered.
        seen: Time of its last answer, in seconds since 1970.
        upload_bytes: Bytes of its messages in this run.
        download_bytes: Bytes of the messages to it in this run.
        train_loss_nats: Its last training loss, if it reports one.
        test: Its last test score, if it reports one.
        epsilon: Spent privacy budget, if the recipe has ``privacy``.
        counted: Weight of its last upload under the rule of ``aggregation``, if there is one.
        why: Reason of its last failure, or why it declined its last task.
    """

    state: str = "expected"
    round: int = 0
    seen: float | None = None
    upload_bytes: int = 0
    download_bytes: int = 0
    train_loss_nats: float | None = None
    test: float | None = None
    epsilon: float | None = None
    counted: float | None = None
    why: str = ""


class StatusFile:
    """Observer that writes ``participants.json`` from a server's events; a resumed run continues its counts."""

    def __init__(self, folder: Path, users: Sequence[str], rounds: int):
        """Write the file before the first event, with the counts of an earlier process of the run if there was one.

        Args:
            folder: The run folder.
            users: Names of the users.
            rounds: Number of planned rounds.
        """
        self._path, self._rounds = folder / PARTICIPANTS, rounds
        self._round = 0  # the last round
        self._measure = ""  # of test scores, such as "loss"
        self._privacy: dict[str, float] = {}  # epsilon and delta; empty without privacy
        status_of_earlier_process = self._read()
        self._clients: dict[str, ClientStatus] = {}
        for name in users:
            client = ClientStatus(**status_of_earlier_process.get(name, {}))
            client.state, client.why = "expected", ""  # not connected to this process yet
            self._clients[name] = client
        self._time_of_write = 0.0  # of the last write, on the monotonic clock
        self._write()

    def __call__(self, event: JsonMapping) -> None:
        """Update the status with an event of the run, and write the file.

        After the frequent events "step", the file is only written if :data:`WRITE_SECONDS` have passed.
        """
        client = self._clients.get(event.get("user", ""))  # None if the event is not about a single client
        if client is not None:
            self._update_client(client, event)
        if event["event"] == "round":
            self._round = event["round"]
            for name, loss in event["train_loss_nats"].items():
                self._clients[name].train_loss_nats = loss
        elif event["event"] == "privacy":
            self._privacy = {"epsilon": event["epsilon"], "delta": event["delta"]}
            epsilon_by_user = event.get("users", {})
            for name, client in self._clients.items():
                client.epsilon = epsilon_by_user.get(name, event["epsilon"])
        elif event["event"] == "aggregation":
            weight_by_user = event.get("counted", {})  # from the robust rule of the section "aggregation"
            for name, weight in weight_by_user.items():
                self._clients[name].counted = weight
        elif event["event"] == "evaluation":
            for name, scores in event["users"].items():
                first_key = next(iter(scores))  # such as "test_loss"
                self._clients[name].test = scores[first_key]
                self._measure = first_key.removeprefix("test_")
        is_frequent = event["event"] == "step"
        seconds_since_write = time.monotonic() - self._time_of_write
        if not is_frequent or seconds_since_write > WRITE_SECONDS:
            self._write()

    def _update_client(self, client: ClientStatus, event: JsonMapping) -> None:
        """Update a client's entry in the status file, which the operator sees, with an event about this client.

        The state is "away" after a failure, else "here" (connected); ``why`` is the reason of a failure, or empty.
        """
        client.why = event.get("reason", "")
        if event["event"] == "failed":
            client.state = "away"
        else:
            client.state = "here"
            client.seen = time.time()
        if event["event"] == "step":  # the client has answered a task
            client.round = min(event["round"], self._rounds)  # tasks after the last round have a higher number
            client.upload_bytes += event["upload_bytes"]
            client.download_bytes += event["download_bytes"]

    def _read(self) -> JsonObject:
        """Return the clients' status from the file of an earlier process; empty if it is missing or damaged."""
        try:
            users = json.loads(self._path.read_text(encoding="utf-8"))["users"]
            return {name: asdict(ClientStatus(**status)) for name, status in users.items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return {}  # no error, since the file is for display only

    def _write(self) -> None:
        """Write the round, the measure of test scores, and all clients' status; with privacy also epsilon and delta."""
        clients = {name: asdict(client) for name, client in self._clients.items()}
        content: JsonObject = {
            "round": self._round,
            "rounds": self._rounds,
            "measure": self._measure,
            "users": clients,
        }
        if self._privacy:
            content["privacy"] = self._privacy
        write_json(self._path, content)
        self._time_of_write = time.monotonic()


_SESSION_PREFIX = "federation/"
"""Prefix of the session's tensors in a checkpoint."""
_NO_VERDICT, _IS_NOT_LOWEST, _IS_LOWEST = 0, 1, 2
"""Whether a client's next task says that the mean validation loss is the lowest so far, in a checkpoint."""
_ENDING = "ending"
KEPT_CHECKPOINTS = 2
"""Number of newest checkpoints that a server keeps."""


_SECONDS_OF_UNIT = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


class WhenSection(Section):
    """Section ``rounds.when``: the condition under which a run of a continuous federation starts.

    ``users`` users, or all if there are fewer, must have ``new_tokens`` new tokens or conversations each.
    ``at_most_every`` is the least time between the starts of two runs: seconds, or a text such as 30s, 10m, 1h or 1d.
    """

    users: Count = 1
    new_tokens: Count = 500
    at_most_every: NotNegative = 0.0

    @field_validator("at_most_every", mode="before")
    @classmethod
    def _in_seconds(cls, duration: object) -> object:
        """Convert a text such as "10m" to seconds; pydantic then checks numbers."""
        if not isinstance(duration, str):
            return duration
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd]?)\s*", duration)
        if match is None:
            raise ValueError("allowed: a number with a unit, such as 30s, 10m, 1h or 1d")
        return float(match[1]) * _SECONDS_OF_UNIT[match[2]]


class RoundsSection(Section):
    """Section ``rounds`` of a server's file, for ``comingle server --continuous``.

    ``keep`` is the number of finished runs whose folders the server keeps when it starts another one; all if None.
    """

    when: WhenSection = WhenSection()
    keep: Count | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A federation to run.

    Args:
        recipe: Recipe without data sources.
        users: Names of the users.
        settings: Shapes and labels of networks.
        network: Timeouts, and how many clients the server needs.
        rounds: When the next run starts, if the federation is continuous; else None.
        earlier: Names of the latest earlier runs, if the federation is continuous, the newest first; else None.
        deleted: Names of runs that were deleted as a user has left, which clients delete too.
    """

    recipe: Recipe
    users: tuple[str, ...]
    settings: JsonObject
    network: NetworkSection = field(default_factory=NetworkSection)
    rounds: RoundsSection | None = None
    earlier: tuple[str, ...] | None = None
    deleted: tuple[str, ...] = ()


def run_federation(
    plan: Plan,
    channel: Channel,
    folder: Path,
    *,
    resume: bool = False,
    force: bool = False,
    observers: Sequence[Observer] = (),
) -> JsonObject:
    """Run a federation in its run folder and return its metrics.

    Args:
        plan: The federation.
        channel: Transport of messages to clients.
        folder: The run folder.
        resume: Whether to continue a run that was stopped.
        force: Whether to replace an existing run.
        observers: Receive events, in addition to the event log and the status file.

    Raises:
        ComingleError: The plan needs all users' data in one place, the folder cannot be used, or too few clients
            answered.
    """
    check_remote_clients(plan.recipe)
    # A resumed run has the begin-of-text tokens, and the date in prompts, with which it was started.
    recipe = with_bos_of_run(folder, plan.recipe, resume=resume)
    date = recorded_date(folder) if resume else ""
    if resume:
        recipe = with_recorded_name(folder, recipe)
    plan = replace(plan, recipe=recipe)

    kind = kind_of(recipe)
    settings = dict(plan.settings)
    base = None
    if kind.needs_base:
        base = Given(date=date).load_base(recipe)
        no_users = ()
        data_on_server = kind.reopened(base, no_users, plan.settings)  # the base, and no user's data
        settings_of_base = kind.settings(data_on_server)  # such as the date in prompts
        settings.update(settings_of_base)
    public = public_part(recipe, plan.users, settings, base)
    context = ServerContext.of(public, base)
    unknown_data = UserInputs(counts={}, digests=dict.fromkeys(SPLITS, ""))  # the server has no user's data
    inputs = Inputs(
        kind=context.data.kind.name,
        base=public.base,
        tokenizer=public.tokenizer,
        users=dict.fromkeys(plan.users, unknown_data),
        settings=settings,
    )
    pooled = context.method.placement.pooled  # whether the method trains one model on all users' data
    opening = open_folder(folder, context.recipe, inputs, resume=resume, force=force, pooled=pooled)
    with opening, own_errors(context.method):  # names file and line of an error in a user-defined method
        return _run_rounds(public, context, plan, channel, folder, observers)


def _run_rounds(
    public: Public, context: ServerContext, plan: Plan, channel: Channel, folder: Path, observers: Sequence[Observer]
) -> JsonObject:
    """Wait for clients, run the rounds or resume them from the newest checkpoint, and return the metrics.

    If all rounds were done before, the clients are only notified of the end.

    Args:
        public: What all users may know of the federation, such as its recipe and their names.
        context: Recipe, method and settings.
        plan: The federation.
        channel: Transport of messages to clients.
        folder: The run folder.
        observers: Receive events, in addition to the event log and the status file.
    """
    run, has_begun = _read_or_create_name(folder, public)
    rounds_are_done = _is_ending(folder)  # in an earlier process, which has not notified all clients
    checkpoint, progress = None, None
    if has_begun and list_checkpoints(folder):
        checkpoint = list_checkpoints(folder)[-1]
        progress = read_progress(checkpoint)

    log = _open_event_log(folder, progress, rounds_are_done=rounds_are_done)
    evaluations = Evaluations(read_evaluations(folder) if log.size_bytes else ())
    all_observers = [log, StatusFile(folder, plan.users, context.planned_rounds), evaluations, *observers]

    def observe(event: JsonObject) -> None:
        for observer in all_observers:
            observer(event)

    try:
        session = start_session(run, public, context, channel, observe, plan.network)
        session.earlier, session.deleted = plan.earlier, plan.deleted
        # From the key, privacy noise is drawn. A resumed run keeps it, so that repeated rounds have the same noise.
        keep_key(folder, *session.server.mechanisms, overwrite=not has_begun, begun=progress is not None)
        all_observers.append(account_writer(folder, session.server.mechanisms.account))
        if checkpoint is not None and progress is not None:
            restore_account(session.server, folder)
            _restore(session, checkpoint, progress)
        continues: JsonObject | None = None
        if plan.recipe.continue_from is not None and progress is None:
            continues = _start_from_run(session, Path(plan.recipe.continue_from.run))
        session.join()
        if progress is None:
            _resolve_eval_interval(session)
        has_no_start_event = progress is None or log.size_bytes == 0
        if has_no_start_event:
            started = start_event(context.plan, session.model.name, _amounts(session))
            if continues is not None:
                started["continues"] = continues
            observe({**started, **_skipped_rows_entry(session), **_specialists_entry(session)})

        first_round, stopped_after = 0, None
        if progress is not None:
            first_round = progress.round
            budget_is_spent = progress.stopped
            if budget_is_spent:
                stopped_after = progress.round
        backend = NetworkBackend(session, stopped_after=stopped_after)

        def save(done: int, clock: Clock) -> None:
            log.to_disk()
            _save(session, folder, done, log.size_bytes, stopped=backend.stopped_after is not None)

        if not rounds_are_done:
            clock = session.clock
            reported = run_rounds(
                backend,
                observe=observe,
                checkpoint=save,
                first_round=first_round,
                clock=clock,
                scores_start=keeps_earlier_best(plan.recipe),
            )
            log.to_disk()
            metrics = _final_metrics(session, folder, backend.summarise(reported).as_dict(), evaluations)
            observe(end_event(metrics))
            log.to_disk()
            _write_identity(folder, run, public, ending=True)
            write_json(folder / "metrics.json", metrics)
        metrics = read_metrics(folder)
        session.end(metrics["rounds"])  # notifies the clients
        _write_identity(folder, run, public, ending=False)
    finally:
        log.close()
    return metrics


def with_recorded_name(folder: Path, recipe: Recipe) -> Recipe:
    """Return a recipe in which ``continue_from`` names the earlier run as in a run to resume, instead of its path.

    So a run is resumed even if the earlier one was deleted.

    Args:
        folder: The run folder of the server.
        recipe: The recipe; returned unchanged if it continues no run, or the folder has none yet.
    """
    path = folder / FEDERATION
    if recipe.continue_from is None or not list_checkpoints(folder):
        return recipe
    recorded = read_public(json.loads(path.read_text(encoding="utf-8"))["public"])
    return recipe.with_changes({"continue_from": recorded.recipe.get("continue_from")})


def _start_from_run(session: ServerSession, run: Path) -> JsonObject:
    """Copy the state of the server at the end of another federation to that of a new one.

    Users of both federations who had the newest shared tensors at that end need no download before the first round.

    Args:
        session: The session before its first round, which is changed.
        run: Run folder of the earlier federation.

    Returns:
        The entry "continues" of the new federation's start event.

    Raises:
        RecipeError: The federation cannot continue the other one, for example because it has another method.
    """
    checkpoint, progress = newest_checkpoint(run, of_server=True)
    recipe, public = session.context.recipe, session.public
    earlier_recipe, earlier_inputs = load_recipe(run), read_inputs(run)
    compared = {
        "method": (recipe.method.name, earlier_recipe.method.name),
        "data.kind": (recipe.data.kind, earlier_inputs.kind),
        "base": (public.base, earlier_inputs.base),
    }
    check_equal(compared, run)
    check_same_ranks(recipe, public.users, earlier_recipe, list(earlier_inputs.users), run)
    check_private_continuation(recipe, earlier_recipe, run)
    assert recipe.continue_from is not None
    if recipe.continue_from.moments:
        check_constant_rates(recipe.training)
    _no_users, state = read_state(checkpoint, progress, session.model.layout)
    continue_account(session.server, run, state)
    restore_server(session.server, state, progress.trainers, checkpoint)
    newest = int(state[VERSION])
    selects_best = earlier_recipe.evaluation.select == "best"  # clients then have restored an earlier model
    versions = (state[f"{_SESSION_PREFIX}versions"] - 1).tolist()  # stored as version + 1
    version_by_user = dict(zip(progress.trainers, versions, strict=True))
    for name, client in session.clients.items():
        has_newest = version_by_user.get(name) == newest and not selects_best
        client.version = 0 if has_newest else -1  # with -1 the client gets a download
    replayed: JsonObject = {}  # amounts of earlier data in the training data, which only clients know
    return {**continuation_entry(checkpoint, progress, public.users), "replayed": replayed}


def _open_event_log(folder: Path, progress: Progress | None, *, rounds_are_done: bool) -> EventLog:
    """Open the event log of a new or resumed run, without the events of rounds that the run will repeat.

    Args:
        folder: The run folder.
        progress: Progress of the checkpoint from which the run resumes; None if the run starts anew.
        rounds_are_done: Whether an earlier process has done all rounds, so that none is repeated.
    """
    path = folder / "events.jsonl"
    bytes_to_keep = 0  # a new run begins with an empty log
    if rounds_are_done:
        bytes_to_keep = path.stat().st_size
    elif progress is not None:
        bytes_to_keep = progress.events_bytes  # length of the log at the checkpoint
    return EventLog(path, keep_bytes=bytes_to_keep)


def _final_metrics(session: ServerSession, folder: Path, metrics: JsonObject, evaluations: Evaluations) -> JsonObject:
    """Add to the metrics of a finished run what the server knows, such as the privacy spent, and return them.

    Args:
        session: The run's server, which sends tasks to clients and reads their answers.
        folder: The run folder, with the events of all processes of the run.
        metrics: Metrics of the users and the run, which are changed. The new key ``untold`` lists users without
            metrics, and ``absent`` those of them that have never joined.
        evaluations: First and last evaluation events of the run, and the validation losses of all.
    """
    metrics.update(_skipped_rows_entry(session))
    metrics.update(session.server.mechanisms.metrics)
    evaluations.add_valid_losses(metrics)
    metrics.update(untrained_entry(session.context.plan, session.local_steps))
    metrics.update(outcome_warnings(session.context.method, evaluations, metrics))
    without_metrics = [name for name in session.public.users if name not in metrics["users"]]
    if without_metrics:
        metrics["untold"] = without_metrics
        ever_joined = {event["user"] for event in read_events(folder) if event["event"] == "joined"}
        ever_joined.update(session.joined)
        absent = [name for name in without_metrics if name not in ever_joined]
        if absent:
            metrics["absent"] = absent
    return metrics


def has_ended(folder: Path) -> bool:
    """Return whether a federation has ended and its connected clients have been notified."""
    return (folder / "metrics.json").exists() and not _is_ending(folder)


def _is_ending(folder: Path) -> bool:
    """Return whether all rounds are done, but not all clients have been notified of the end.

    The run's file :data:`FEDERATION` says so from the time at which the metrics are complete.
    """
    identity_file, metrics_file = folder / FEDERATION, folder / "metrics.json"
    if not identity_file.exists() or not metrics_file.exists():
        return False
    identity = json.loads(identity_file.read_text(encoding="utf-8"))
    return bool(identity.get(_ENDING))


def _read_or_create_name(folder: Path, public: Public) -> tuple[str, bool]:
    """Return the run's name in messages to clients; a new run gets a random one, which is stored in the run folder.

    Args:
        folder: The run folder.
        public: Public part of the federation, stored with the name.

    Returns:
        The name, and whether the run has begun in an earlier process.

    Raises:
        RunError: The folder belongs to a run of another federation.
    """
    path = folder / FEDERATION
    if path.exists():
        content = json.loads(path.read_text(encoding="utf-8"))
        recorded = read_public(content["public"])
        if recorded.digest != public.digest:
            raise RunError(f"{folder}: belongs to another federation ({recorded.digest}, not {public.digest})")
        has_begun = True
        return str(content["run"]), has_begun
    run, has_begun = secrets.token_hex(8), False
    _write_identity(folder, run, public, ending=False)
    return run, has_begun


def _write_identity(folder: Path, run: str, public: Public, *, ending: bool) -> None:
    """Write the run's name and public part to ``federation.json``.

    Args:
        folder: The run folder.
        run: Name of the run.
        public: What all users may know of the federation, such as its recipe and their names.
        ending: Whether the clients are being notified of the end.
    """
    content: JsonObject = {"run": run, "public": public.as_dict()}
    if ending:
        content[_ENDING] = True
    write_json(folder / FEDERATION, content)


def _resolve_eval_interval(session: ServerSession) -> None:
    """Replace ``evaluation.every: auto`` with a number of rounds, so that evaluation takes little of the training time.

    The number follows from the amounts of data on which clients train and are evaluated. If no client has reported
    them, nothing is replaced.
    """
    plan, num_users = session.context.plan, len(session.public.users)
    is_auto = plan.evaluation.every == AUTO
    if not is_auto or not session.context.method.trains:
        return
    trained_amounts, scored_amounts = [], []  # in tokens or samples, per round and per evaluation
    for joined in session.joined.values():
        trained_amount, scored_amount = joined.get("works", (0, 0))  # zeros if the client keeps them private
        if trained_amount:
            trained_amounts.append(trained_amount)
            scored_amounts.append(scored_amount)
    num_reporting = len(trained_amounts)
    if num_reporting == 0:
        return
    # An evaluation also scores users that have not reported, with about the same amounts.
    num_evaluated = min(plan.evaluation.users or num_users, num_users)
    scored_in_evaluation = sum(scored_amounts) * num_evaluated // num_reporting
    amounts = [num_reporting, sum(trained_amounts), scored_in_evaluation]  # as `data_amounts` returns them
    warn_of_share(plan, amounts, num_users)  # if evaluations take much of the time at every interval
    interval = evaluation_interval(plan, amounts, num_users)  # in rounds
    _evaluate_every(session, interval)


def _evaluate_every(session: ServerSession, rounds: int) -> None:
    """Set the interval between evaluations, in rounds, once it was chosen from the clients' data or restored."""
    plan = session.context.plan.updated("evaluation", every=rounds)
    session.context = replace(session.context, plan=plan)


def _amounts(session: ServerSession) -> dict[str, JsonObject]:
    """Return each user's amounts of training and test data; empty for users that do not report them."""
    amounts_by_user = {}
    for name in session.public.users:
        reported = session.joined.get(name, {})
        amounts_by_user[name] = dict(reported.get("amounts", {}))
    return amounts_by_user


def _skipped_rows_entry(session: ServerSession) -> dict[str, int]:
    """Return the entry "skipped_rows" of the start event and the metrics: the number of rows that clients have skipped.

    Returns:
        The entry; an empty mapping if clients have skipped none.
    """
    num_rows = sum(reported.get("skipped_rows", 0) for reported in session.joined.values())
    return {"skipped_rows": num_rows} if num_rows else {}


def _specialists_entry(session: ServerSession) -> dict[str, dict[str, int]]:
    """Return the entry "specialists" of a run's start event: the numbers that clients have chosen, by user.

    Returns:
        The entry; an empty mapping if no client reports a number.
    """
    numbers = {name: joined["specialists"] for name, joined in session.joined.items() if "specialists" in joined}
    return {"specialists": numbers} if numbers else {}


# ---------------------------------------------------------------- the server's own state


def _save(session: ServerSession, folder: Path, done: int, events_bytes: int, *, stopped: bool) -> None:
    """Write a checkpoint of the server and delete older ones.

    Args:
        session: The run's server, which sends tasks to clients and reads their answers.
        folder: The run folder.
        done: Number of rounds that are done.
        events_bytes: Length of the event log, to which a resumed run cuts it.
        stopped: Whether the privacy budget is spent.
    """
    progress = progress_of(
        done,
        session.public.digest,
        session.public.users,
        clock=session.clock,
        events_bytes=events_bytes,
        stopped=stopped,
    )
    server_tensors = {**session.server.state, **_session_tensors(session)}
    save_checkpoint(folder, session.model.layout, _state_without_users(session.model.layout), server_tensors, progress)
    prune_checkpoints(folder, KEPT_CHECKPOINTS)


def _session_tensors(session: ServerSession) -> Tree:
    """Return as tensors, for a checkpoint, what a resumed session must know of its clients and of earlier rounds.

    A verdict says whether the last validation loss was the lowest so far. A client that was away has yet to get it.
    """
    clients = list(session.clients.values())
    verdicts, verdict_rounds = [], []
    for client in clients:
        if client.verdict is None:  # the client has received all verdicts
            verdicts.append(_NO_VERDICT)
            verdict_rounds.append(0)
        else:
            is_lowest_loss = bool(client.verdict.tensors[LOWEST])
            verdicts.append(_IS_LOWEST if is_lowest_loss else _IS_NOT_LOWEST)
            verdict_rounds.append(client.verdict.version)
    numbers = {
        # An entry for each client:
        "serials": [client.serial for client in clients],
        "versions": [client.version + 1 for client in clients],  # 0 if it has downloaded nothing
        "verdicts": verdicts,
        "verdict_rounds": verdict_rounds,
        # Single numbers:
        "local_steps": session.local_steps,
        "best_round": session.best_round,
        "evaluate_every": session.context.plan.evaluation_interval,
    }
    return {_SESSION_PREFIX + name: torch.tensor(value) for name, value in numbers.items()}


def _restore(session: ServerSession, checkpoint: Path, progress: Progress) -> None:
    """Restore a server from a checkpoint: its state, and what its session knows (:func:`_session_tensors`).

    The session knows the largest number of local steps, the best round, and for each client its last task and version,
    and the verdict that it has not received: whether the last validation loss was the lowest so far.

    Args:
        session: The session of a server before its first round, which is changed.
        checkpoint: Folder of the checkpoint.
        progress: Its progress: rounds, clock, and whether the privacy budget was spent.
    """
    server, users = session.server, session.public.users
    expected = {**server.state, **_session_tensors(session)}  # names and shapes of the stored tensors
    _users_state, stored = load_checkpoint(
        checkpoint, session.model.layout, _state_without_users(session.model.layout), expected
    )
    numbers: Tree = {}
    for name in list(stored):
        if name.startswith(_SESSION_PREFIX):
            numbers[name.removeprefix(_SESSION_PREFIX)] = stored.pop(name)
    server.restore(stored)
    repeats_round = progress.round < session.context.plan.training.rounds and not progress.stopped
    if repeats_round:
        # Each user may have uploaded in this round before the server stopped, and uploads again: both cost budget.
        server.mechanisms.charge(range(len(users)))
    session.local_steps, session.best_round = int(numbers["local_steps"]), int(numbers["best_round"])
    _evaluate_every(session, int(numbers["evaluate_every"]))
    for i, (name, client) in enumerate(session.clients.items()):
        client.serial = int(numbers["serials"][i])
        client.version = int(numbers["versions"][i]) - 1  # stored as version + 1
        verdict = int(numbers["verdicts"][i])
        if verdict == _NO_VERDICT:
            client.verdict = None
        else:
            round_number = int(numbers["verdict_rounds"][i])
            client.verdict = validation_reply([name], round_number, lowest=verdict == _IS_LOWEST)
    session.clock = progress.clock


def _state_without_users(layout: Layout) -> State:
    """Return a state without users: a checkpoint needs a state, and a server has no user's tensors."""
    empty_mask = torch.zeros(0, layout.columns, dtype=torch.bool)
    return initial_state(
        layout,
        empty_mask,
        names=[],
        local=empty_mask.new_zeros(layout.columns),  # no column is local
        ranks=torch.zeros(0, dtype=torch.int64),  # LoRA ranks of no users
        seed=0,  # not used, as there are no tensors to initialise
    )


# ---------------------------------------------------------------- users who leave

_OF_CLIENTS = frozenset(_SESSION_PREFIX + name for name in ("serials", "versions", "verdicts", "verdict_rounds"))
"""Keys of tensors with an entry for each client in a server's checkpoint."""


def copy_server_without(run: Path, target: Path, user: str) -> None:
    """Copy the run folder of a federation's server without the state, scores and records of a user.

    The run keeps its name, so that clients continue from it.

    Args:
        run: Folder of a run that has ended, which is only read.
        target: Folder of the copy.
        user: Name of the user.

    Raises:
        RunError: The run has not ended.
        RecipeError: The run has no other user.
    """
    from comingle.runs.leaving import recipe_without, without_name

    metrics, checkpoint = read_metrics(run), list_checkpoints(run)[-1]
    identity = json.loads((run / FEDERATION).read_text(encoding="utf-8"))
    recorded, inputs, progress = read_public(identity["public"]), read_inputs(run), read_progress(checkpoint)
    recipe = recipe_without(recorded.whole_recipe(), recorded.users, user, of_server=True)
    remaining = tuple(name for name in recorded.users if name != user)
    base = Given(date=recorded_date(run)).load_base(recipe) if kind_of(recipe).needs_base else None
    public = replace(
        public_part(recipe, remaining, recorded.settings, base=None),
        base=recorded.base,
        tokenizer=recorded.tokenizer,
        version=recorded.version,
        format=recorded.format,
    )
    context = ServerContext.of(public, base)
    model = context.model()
    layout = model.layout
    by_user = _OF_CLIENTS | start_server(model, remaining, context.plan).by_user
    _no_users, state = read_state(checkpoint, progress, layout)
    for name in by_user & state.keys():
        num_rows = len(state[name])
        if num_rows >= len(recorded.users):  # else one value for all users
            state[name] = state[name][rows_of_names(recorded.users, remaining, num_rows // len(recorded.users))]

    target.mkdir(parents=True, mode=0o700)
    write_inputs(target, replace(inputs, users={name: inputs.users[name] for name in remaining}))
    write_text(target / "recipe.yaml", context.recipe.as_yaml())
    for file in (KEY, ACCOUNT, ORIGIN):  # the account keeps the user, who may return
        if (run / file).exists():
            shutil.copy(run / file, target / file)
    events = [without_name(event, user) for event in read_events(run) if event.get("user") != user]
    text = "".join(f"{json.dumps(event)}\n" for event in events)
    write_text(target / "events.jsonl", text)
    write_json(target / "metrics.json", _metrics_without(metrics, user))
    if (run / PARTICIPANTS).exists():
        status = json.loads((run / PARTICIPANTS).read_text(encoding="utf-8"))
        write_json(target / PARTICIPANTS, without_name(status, user))
    progress_without = progress_of(
        progress.round,
        public.digest,
        remaining,
        clock=progress.clock,
        events_bytes=len(text.encode()),
        stopped=progress.stopped,
    )
    save_checkpoint(target, layout, _state_without_users(layout), state, progress_without)
    _write_identity(target, str(identity["run"]), public, ending=False)


def _metrics_without(metrics: JsonObject, user: str) -> JsonObject:
    """Return the metrics of a server's run without a user, with means over the others."""
    from comingle.runs.leaving import without_name

    changed: JsonObject = without_name(metrics, user)
    for key in changed:
        scores = [of_user.get(key.removeprefix("mean_")) for of_user in changed["users"].values()]
        if key.startswith("mean_") and scores and None not in scores:
            changed[key] = sum(scores) / len(scores)
    return changed
