"""The run folder of a federation's server, and its status file."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from comingle.config import Recipe
from comingle.config.settings import AUTO
from comingle.federation.backend import NetworkBackend
from comingle.federation.flower.channel import Channel
from comingle.federation.public import Public, ServerContext, check_remote_clients, public_part, read_public
from comingle.federation.server_session import NetworkSection, ServerSession, start_session
from comingle.methods import own_errors
from comingle.protocol.messages import LOWEST, validation_reply
from comingle.runs.folders import open_folder, with_bos_of_run
from comingle.runs.given import Given
from comingle.training.checkpoints import (
    Clock,
    Progress,
    load_checkpoint,
    progress_of,
    prune_checkpoints,
    read_progress,
    save_checkpoint,
)
from comingle.training.evaluation import end_event, period, start_event, warn_of_share
from comingle.training.events import EventLog, Observer
from comingle.training.kinds.base import kind_of
from comingle.training.plan import keep_key
from comingle.training.rounds import Evaluations, outcome_warnings, run_rounds
from comingle.training.settings import untrained_entry
from comingle.training.state import State, initial_state
from comingle.utils.errors import RunError
from comingle.utils.files import list_checkpoints
from comingle.utils.inputs import SPLITS, Inputs, UserInputs, recorded_date
from comingle.utils.records import (
    FEDERATION,
    PARTICIPANTS,
    JsonMapping,
    JsonObject,
    read_evaluations,
    read_events,
    read_metrics,
    write_json,
)
from comingle.utils.trees import Tree

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
        """Write the file before the first event: all clients are expected; counts are those of an earlier process.

        Args:
            folder: The run folder.
            users: Names of the users.
            rounds: Number of planned rounds.
        """
        self._path, self._rounds = folder / PARTICIPANTS, rounds
        self._round, self._measure = 0, ""  # the last round, and the measure of test scores, such as "loss"
        self._privacy: dict[str, float] = {}  # epsilon and delta; empty without privacy
        earlier = self._read()
        self._clients = {name: ClientStatus(**earlier.get(name, {})) for name in users}
        for client in self._clients.values():  # of an earlier process only the counts are valid
            client.state, client.why = "expected", ""
        self._written = 0.0  # when the file was written last, on the monotonic clock
        self._write()

    def __call__(self, event: JsonMapping) -> None:
        """Update the status with an event of the run, and write the file.

        An event "step" is one client's answer to a task. As these events are frequent, they write the file only if the
        last write was more than :data:`WRITE_SECONDS` ago. All other events write it at once.
        """
        # Events about a single client, such as "step", name its user.
        if (client := self._clients.get(event.get("user", ""))) is not None:
            self._update_client(client, event)
        if event["event"] == "round":
            self._round = event["round"]
            for name, loss in event["train_loss_nats"].items():
                self._clients[name].train_loss_nats = loss
        elif event["event"] == "privacy":
            self._privacy = {key: event[key] for key in ("epsilon", "delta")}
            for name, client in self._clients.items():
                client.epsilon = event.get("users", {}).get(name, event["epsilon"])
        elif event["event"] == "aggregation":
            # `counted` is the weight that a robust rule (the recipe's section "aggregation") gave each upload. Without
            # such a rule the event has no weights.
            for name, weight in event.get("counted", {}).items():
                self._clients[name].counted = weight
        elif event["event"] == "evaluation":
            for name, scores in event["users"].items():
                key, self._clients[name].test = next(iter(scores.items()))  # the first one, such as "test_loss"
                self._measure = key.removeprefix("test_")
        if event["event"] != "step" or time.monotonic() - self._written > WRITE_SECONDS:
            self._write()

    def _update_client(self, client: ClientStatus, event: JsonMapping) -> None:
        """Update the status of a client with an event about it.

        Its state is "away" after an event "failed" and "here" after any other, which also sets the time when it was
        last seen. An event "step" is the answer to a task: it sets the round and adds the bytes of the messages.
        """
        client.state = "away" if event["event"] == "failed" else "here"
        client.why = event.get("reason", "")
        if client.state == "here":
            client.seen = time.time()
        if event["event"] == "step":
            client.round = min(event["round"], self._rounds)  # The tasks that end a run have a higher number.
            client.upload_bytes += event["upload_bytes"]
            client.download_bytes += event["download_bytes"]

    def _read(self) -> JsonObject:
        """Return the clients' status from the file of an earlier process; empty if it cannot be read."""
        try:
            users = json.loads(self._path.read_text(encoding="utf-8"))["users"]
            return {name: asdict(ClientStatus(**one)) for name, one in users.items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return {}  # The file is for display only.

    def _write(self) -> None:
        """Write the round, the measure of test scores, and all clients' status; with privacy also epsilon and delta."""
        clients = {name: asdict(client) for name, client in self._clients.items()}
        content = {"round": self._round, "rounds": self._rounds, "measure": self._measure, "users": clients}
        content |= {"privacy": self._privacy} if self._privacy else {}
        write_json(self._path, content)
        self._written = time.monotonic()


_SESSION_PREFIX = "federation/"
"""Prefix of the session's tensors in a checkpoint."""
_ENDING = "ending"
KEPT_CHECKPOINTS = 2
"""Number of newest checkpoints that a server keeps."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A federation to run.

    Args:
        recipe: Recipe without data sources.
        users: Names of the users.
        settings: Shapes and labels of networks.
        network: Timeouts, and how many clients the server needs.
    """

    recipe: Recipe
    users: tuple[str, ...]
    settings: JsonObject
    network: NetworkSection = field(default_factory=NetworkSection)


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
    # A resumed run continues with the begin-of-text tokens, and the date in prompts, with which it began.
    plan = replace(plan, recipe=with_bos_of_run(folder, plan.recipe, resume=resume))
    date = recorded_date(folder) if resume else ""
    kind, base, settings = kind_of(plan.recipe), None, dict(plan.settings)
    if kind.needs_base:
        base = Given(date=date).load_base(plan.recipe)
        # Settings that follow from the base, such as the date in prompts. They need no user's data.
        settings |= kind.settings(kind.reopened(base, (), plan.settings))
    public = public_part(plan.recipe, plan.users, settings, base)
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
    with opening, own_errors(context.method):  # converts exceptions of a user-defined method's code to PluginError
        return _run_rounds(public, context, plan, channel, folder, observers)


def _run_rounds(
    public: Public, context: ServerContext, plan: Plan, channel: Channel, folder: Path, observers: Sequence[Observer]
) -> JsonObject:
    """Wait for clients, run or resume the rounds, and notify the clients of the end.

    A run resumes from its newest checkpoint. The rounds after it are repeated, so their events are cut from the event
    log. If the run was stopped after its last round, while it notified the clients of the end, it only notifies them.

    Args:
        public: Public part of the federation.
        context: Recipe, method and settings.
        plan: The federation.
        channel: Transport of messages to clients.
        folder: The run folder.
        observers: Receive events, in addition to the event log and the status file.

    Returns:
        The metrics.
    """
    run, has_begun = _read_or_create_name(folder, public)
    newest_checkpoint = list_checkpoints(folder)[-1:] if has_begun else []  # a list of one, or empty
    progress = read_progress(newest_checkpoint[0]) if newest_checkpoint else None
    path, rounds_are_done = folder / "events.jsonl", _is_ending(folder)
    # If all rounds are done, the whole log stays. Otherwise only the events up to the checkpoint stay, as the rounds
    # after it are repeated.
    checkpoint_bytes = 0 if progress is None else progress.events_bytes
    log = EventLog(path, keep_bytes=path.stat().st_size if rounds_are_done else checkpoint_bytes)
    evaluations = Evaluations(read_evaluations(folder) if log.size_bytes else ())
    all_observers = [log, StatusFile(folder, plan.users, context.planned_rounds), evaluations, *observers]

    def observe(event: JsonObject) -> None:
        for observer in all_observers:
            observer(event)

    try:
        session = start_session(run, public, context, channel, observe, plan.network)
        # The key seeds privacy noise. A resumed run must have its old key, so that a repeated round has the same noise.
        keep_key(folder, *session.server.mechanisms, anew=not has_begun, begun=progress is not None)
        if progress is not None:
            _restore(session, newest_checkpoint[0], progress)
        session.join()
        if progress is None:
            _resolve_eval_interval(session)
        if log.size_bytes == 0 or progress is None:
            started = start_event(context.plan, session.model.name, _amounts(session))
            observe(started | _skipped_rows(session))

        start = progress.round if progress else 0
        budget_is_spent = progress is not None and progress.stopped  # then the run has ended after `start` rounds
        backend = NetworkBackend(session, stopped_after=start if budget_is_spent else None)

        def save(done: int, clock: Clock) -> None:
            log.to_disk()
            _save(session, folder, done, log.size_bytes, stopped=backend.stopped_after is not None)

        if not rounds_are_done:
            clock = session.clock
            reported = run_rounds(backend, observe=observe, checkpoint=save, first_round=start, clock=clock)
            log.to_disk()
            metrics = _final_metrics(session, folder, backend.summarise(reported).as_dict(), evaluations)
            observe(end_event(metrics))
            log.to_disk()
            _write_identity(folder, run, public, ending=True)  # until the clients are notified
            write_json(folder / "metrics.json", metrics)
        metrics = read_metrics(folder)
        session.end(metrics["rounds"])
        _write_identity(folder, run, public)
    finally:
        log.close()
    return metrics


def _final_metrics(session: ServerSession, folder: Path, metrics: JsonObject, evaluations: Evaluations) -> JsonObject:
    """Complete the metrics of a finished run and return them.

    Adds the number of skipped rows, the privacy spent and warnings about the outcome. The key ``untold`` lists users
    without metrics, because they keep their metrics private or have not answered. The key ``absent`` lists users that
    never joined.

    Args:
        session: The session.
        folder: The run folder, with the events of all processes of the run.
        metrics: Metrics of the users and the run, which are changed.
        evaluations: First and last evaluation events of the run, and the validation losses of all.
    """
    metrics |= _skipped_rows(session) | session.server.mechanisms.metrics
    evaluations.add_valid_losses(metrics)
    metrics |= outcome_warnings(session.context.method, evaluations, metrics)
    metrics |= untrained_entry(session.context.plan, session.local_steps)
    if without_metrics := [name for name in session.public.users if name not in metrics["users"]]:
        metrics["untold"] = without_metrics
        took_part = {event["user"] for event in read_events(folder) if event["event"] == "joined"} | set(session.joined)
        if absent := [name for name in without_metrics if name not in took_part]:
            metrics["absent"] = absent
    return metrics


def has_ended(folder: Path) -> bool:
    """Return whether a federation has ended and its connected clients have been notified."""
    return (folder / "metrics.json").exists() and not _is_ending(folder)


def _is_ending(folder: Path) -> bool:
    """Return whether the metrics are written and clients have yet to be notified of the end."""
    path = folder / FEDERATION
    reported = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return bool(reported.get(_ENDING)) and (folder / "metrics.json").exists()


def _read_or_create_name(folder: Path, public: Public) -> tuple[str, bool]:
    """Return the run's name in messages to clients, which is stored in the run folder; a new run gets a random one.

    Args:
        folder: The run folder.
        public: Public part of the federation, stored with the name.

    Returns:
        The name, and whether it was stored before.

    Raises:
        RunError: The folder belongs to a run of another federation.
    """
    path = folder / FEDERATION
    if path.exists():
        content = json.loads(path.read_text(encoding="utf-8"))
        recorded = read_public(content["public"])
        if recorded.digest != public.digest:
            raise RunError(f"{folder}: belongs to another federation ({recorded.digest}, not {public.digest})")
        return str(content["run"]), True
    run = secrets.token_hex(8)
    _write_identity(folder, run, public)
    return run, False


def _write_identity(folder: Path, run: str, public: Public, *, ending: bool = False) -> None:
    """Write the run's name and public part, and a flag while clients are being notified of the end."""
    write_json(folder / FEDERATION, {"run": run, "public": public.as_dict(), **({_ENDING: True} if ending else {})})


def _resolve_eval_interval(session: ServerSession) -> None:
    """Replace ``evaluation.every: auto`` with a number of rounds, as a local run does.

    Evaluation may take only a share of the training time. So the number depends on how many tokens or samples clients
    train on in a round, and how many they score in an evaluation. Clients may report both when they join ("works"). If
    no client reports them, the setting stays as it is.
    """
    plan, num_users = session.context.plan, len(session.public.users)
    reported = [values.get("works", (0, 0)) for values in session.joined.values()]  # (0, 0): not reported
    trained_and_scored = [(trained, scored) for trained, scored in reported if trained]
    if plan.evaluation.every == AUTO and session.context.method.trains and trained_and_scored:
        num_reporting = len(trained_and_scored)
        trained_amount = sum(trained for trained, _ in trained_and_scored)
        scored_amount = sum(scored for _, scored in trained_and_scored)
        # An evaluation scores all users, or as many as `evaluation.users`, not only those that report.
        num_evaluated = min(plan.evaluation.users or num_users, num_users)
        scored_in_evaluation = scored_amount * num_evaluated // num_reporting
        amounts = [num_reporting, trained_amount, scored_in_evaluation]
        warn_of_share(plan, amounts, num_users)  # how long clients evaluate is unknown here
        _evaluate_every(session, period(plan, amounts, num_users))


def _evaluate_every(session: ServerSession, rounds: int) -> None:
    """Set the interval between evaluations."""
    plan = session.context.plan.updated("evaluation", every=rounds)
    session.context = replace(session.context, plan=plan)


def _amounts(session: ServerSession) -> dict[str, JsonObject]:
    """Return the amounts of data of clients that report them."""
    joined = session.joined
    return {name: dict(joined.get(name, {}).get("amounts", {})) for name in session.public.users}


def _skipped_rows(session: ServerSession) -> dict[str, int]:
    """Return the number of rows that reporting clients have skipped; empty if there are none."""
    rows = sum(one.get("skipped_rows", 0) for one in session.joined.values())
    return {"skipped_rows": rows} if rows else {}


# ---------------------------------------------------------------- the server's own state


def _save(session: ServerSession, folder: Path, done: int, events_bytes: int, *, stopped: bool) -> None:
    """Write a checkpoint of the server and delete older ones.

    Args:
        session: The session.
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
    server_tensors = session.server.state | _session_tensors(session)
    save_checkpoint(folder, session.model.layout, _state_without_users(session), server_tensors, progress)
    prune_checkpoints(folder, KEPT_CHECKPOINTS)


def _session_tensors(session: ServerSession) -> Tree:
    """Return the numbers that a server knows besides its method's state as tensors, for a checkpoint.

    Four tensors have an entry for each client, in the order of the users:

        serials         the number of its last task
        versions        the version of the shared tensors that it has
        verdicts        the verdict on the mean validation loss that it gets with its next task: 0 (none), 1 (not the
                        lowest so far) or 2 (the lowest)
        verdict_rounds  the round of the verdict

    Three are single numbers: local steps per round, the best round, and the interval between evaluations.
    """
    clients = list(session.clients.values())
    verdicts = [client.verdict for client in clients]
    numbers = {
        "serials": [client.serial for client in clients],
        "versions": [client.version + 1 for client in clients],  # stored as 0 if the client has none, version -1
        "verdicts": [1 + int(verdict.tensors[LOWEST]) if verdict else 0 for verdict in verdicts],
        "verdict_rounds": [verdict.version if verdict else 0 for verdict in verdicts],
        "local_steps": session.local_steps,
        "best_round": session.best_round,
        "evaluate_every": session.context.plan.period,
    }
    return {_SESSION_PREFIX + name: torch.tensor(value) for name, value in numbers.items()}


def _restore(session: ServerSession, checkpoint: Path, progress: Progress) -> None:
    """Restore the server's state and the session's numbers (:func:`_session_tensors`) from a checkpoint.

    Args:
        session: The session of a server before its first round, which is changed.
        checkpoint: Folder of the checkpoint.
        progress: Its progress: rounds, clock, and whether the privacy budget was spent.
    """
    server, names = session.server, session.public.users
    expected = server.state | _session_tensors(session)  # names and shapes of the stored tensors
    # The first result is the state of users, of which a server has none.
    _, stored = load_checkpoint(checkpoint, session.model.layout, _state_without_users(session), expected)
    session_names = [name for name in stored if name.startswith(_SESSION_PREFIX)]
    numbers = {name.removeprefix(_SESSION_PREFIX): stored.pop(name) for name in session_names}
    server.restore(stored)
    if progress.round < session.context.plan.training.rounds and not progress.stopped:
        # Users may have uploaded in the round after the checkpoint, which is now repeated, perhaps with other
        # participants. Their uploads were revealed twice, so a round is charged to the privacy budgets of all users.
        server.mechanisms.charge(range(len(names)))
    session.local_steps, session.best_round = int(numbers["local_steps"]), int(numbers["best_round"])
    _evaluate_every(session, int(numbers["evaluate_every"]))
    per_client = (numbers[name].tolist() for name in ("serials", "versions", "verdicts", "verdict_rounds"))
    for (name, client), serial, version, verdict, verdict_round in zip(
        session.clients.items(), *per_client, strict=True
    ):
        # The checkpoint has the version plus 1, and the verdict on the mean validation loss as a number: 0 (none), 1
        # (not the lowest so far) or 2 (the lowest).
        client.serial, client.version = serial, version - 1
        client.verdict = validation_reply([name], verdict_round, lowest=verdict == 2) if verdict else None
    session.clock = progress.clock


def _state_without_users(session: ServerSession) -> State:
    """Return an empty state of users, for the checkpoints of a server.

    The format of checkpoints requires the users' tensors, of which a server has none.
    """
    layout = session.model.layout
    empty_mask = torch.zeros(0, layout.columns, dtype=torch.bool)
    return initial_state(
        layout,
        empty_mask,
        names=[],
        local=empty_mask.new_zeros(layout.columns),  # no column is local
        ranks=torch.zeros(0, dtype=torch.int64),  # LoRA ranks of no users
        seed=0,  # not used, as there are no tensors to initialise
    )
