"""The server's session with its clients: sends tasks and waits for answers.

The rounds are those of :func:`comingle.training.rounds.run_rounds`; messages are wrapped in tasks
(:mod:`comingle.federation.messages`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from comingle.config.settings import Count, Positive, Section
from comingle.federation.flower.channel import Channel
from comingle.federation.messages import Answer, Task, check_reported, unpack_answer
from comingle.federation.public import Public, ServerContext
from comingle.models.model import Model
from comingle.privacy.accounting import Work
from comingle.protocol.messages import Download
from comingle.protocol.wire import pack
from comingle.training.checkpoints import Clock
from comingle.training.events import AN_EVENT, Observer
from comingle.training.server import ServerHalf, start_server
from comingle.utils.errors import MessageError, RunError


class NetworkSection(Section):
    """Section ``network``: timeouts in seconds, how many clients the server needs, and how much data it accepts.

    A round ends when all clients with a task have answered, or after ``round_timeout`` if ``min_participants`` have;
    with fewer, the run ends and can be resumed. ``join_timeout`` limits the wait for all clients before the first
    round. ``max_samples`` is the largest number of samples or conversations of a user.
    """

    min_participants: Count = 1
    round_timeout: Positive = 3600.0
    join_timeout: Positive = 300.0
    max_samples: Count = 1_000_000


logger = logging.getLogger("comingle")

_JOIN = ("join",)
END_SECONDS = 60.0
"""How long the server waits for clients to acknowledge the end of the run."""
RETRY_SECONDS = 1.0
"""Pause before the server resends a task to a client that failed or is absent."""
_REFUSED_SECONDS = 5.0
"""Pause before the server resends the join task to a client that refused, while too few have joined."""
_REJOIN_INTERVAL_SECONDS, _REJOIN_WAIT_SECONDS = 60.0, 10.0
"""Interval between join tasks for a connected client whose join timed out, and how long a round waits for each."""
_LOADING_TIMEOUTS = 10
"""How long the server waits for connected clients that are still loading, in multiples of ``join_timeout``."""
_MAX_LISTED_REFUSALS = 3


@dataclass(kw_only=True)
class ClientSession:
    """The server's record of one client: its progress in the run, and whether it takes part.

    Args:
        serial: Number of the last task that it has answered.
        version: Version of the server's state that it has downloaded.
        verdict: Message that says whether its model is the best so far, if it has not received it yet.
        joined: Values that it reported when it joined; None before it joins and after it refuses a task.
        examples: Number of its examples, if single examples are protected; None before it joins.
        refusal: Why it does not join; empty if it does.
        declined: Why it declined its last task; empty if it did not.
        is_present: Whether it was connected when the channel was last asked.
        is_away: Whether it timed out; the server does not wait for it until it reconnects or joins.
        join_asked: When it got its first join task since it connected, in seconds of the monotonic clock.
        rejoin_wait_began: When it last got, refused or missed a join task; the next one is due 60 s later.
    """

    serial: int = 0
    version: int = 0
    verdict: Download | None = None
    joined: Mapping[str, Any] | None = None
    examples: int | None = None
    refusal: str = ""
    declined: str = ""
    is_present: bool = False
    is_away: bool = False
    join_asked: float | None = None
    rejoin_wait_began: float | None = None

    def reset_join(self) -> None:
        """Discard refusals and times of earlier attempts to join."""
        self.refusal, self.join_asked, self.rejoin_wait_began = "", None, None


@dataclass(kw_only=True)
class ServerSession:
    """The server of a run: sends tasks to clients on other machines, and reads their answers.

    Args:
        run: Name of the run in messages to clients.
        public: What all users may know of the federation, such as its recipe and their names.
        context: Recipe, method and settings.
        model: The model of all users.
        server: Holds and aggregates the shared state.
        channel: Transport of messages to clients.
        observe: Receives events.
        network: Section ``network`` of the server's file.
        clock: Counts time and bytes.
        clients: Sessions by user, in the order of the users.
        local_steps: Largest number of local steps that a client takes in a round.
        best_round: Number of rounds after which the mean validation loss was lowest.
        earlier: Names of earlier runs of a continuous federation, the newest first; None if it is not continuous.
        deleted: Names of runs that were deleted as a user has left, which clients delete too.
    """

    run: str
    public: Public
    context: ServerContext
    model: Model
    server: ServerHalf
    channel: Channel
    observe: Observer
    network: NetworkSection = field(default_factory=NetworkSection)
    clock: Clock = field(default_factory=Clock)
    clients: dict[str, ClientSession] = field(default_factory=dict)
    local_steps: int = 0
    best_round: int = 0
    earlier: tuple[str, ...] | None = None
    deleted: tuple[str, ...] = ()

    @property
    def first_version(self) -> int:
        """Version of the shared tensors that is recorded for a client before its first download: -1 or 0.

        The server's version is 0 before the first round, and clients with a lower one get a download. So with -1 they
        download before the first round. With 0 they begin it with their own initial tensors.
        """
        return -1 if self.context.method.server.first_download else 0

    def largest_rank(self, name: str) -> int:
        """Return the LoRA rank with which a user begins; a method may reduce it."""
        ranks = self.model.ranks.expand(len(self.public.users))
        return int(ranks[self.public.users.index(name)])

    def most_steps(self, name: str) -> int:
        """Return the largest number of local steps per round that a client can report without being refused.

        Users report the number if it differs between them, as their uploads may be weighted by it. It is 0 if they do
        not report it.

        Args:
            name: Name of the user.
        """
        if not self.context.plan.reports_steps:
            return 0
        return self.context.most_steps(self.network.max_samples, name)

    @property
    def joined(self) -> dict[str, Mapping[str, Any]]:
        """Values that clients reported when they joined, by user."""
        return {name: client.joined for name, client in self.clients.items() if client.joined is not None}

    # ---------------------------------------------------------------- tasks

    def join(self) -> None:
        """Send all clients a join task, and wait until all have joined or ``network.join_timeout`` has passed.

        In a continuous federation, users without new text are not awaited if they are not connected.

        Raises:
            RunError: Fewer than ``network.min_participants`` clients have joined.
        """
        participation = self.context.plan.participation
        if self.earlier and isinstance(participation, tuple):
            connected, awaited = set(self.channel.present()), {number for users in participation for number in users}
            for number, name in enumerate(self.public.users):
                self.clients[name].is_away = number not in awaited and name not in connected
        join_tasks = TaskQueue(self, self.public.users, self.network.join_timeout)
        join_tasks.run()
        num_joined, num_needed = len(self.joined), self.network.min_participants
        if num_joined >= num_needed:
            return
        parts = [
            f"{num_joined} of {len(self.public.users)} users have joined",
            f"needed: {num_needed}",
            f"network.join_timeout is {self.network.join_timeout:g} s",
        ]
        refusals = [client.refusal for client in self.clients.values() if client.refusal]
        raise RunError("; ".join([*parts, *refusals[:_MAX_LISTED_REFUSALS]]))

    def end(self, rounds: int) -> None:
        """Notify all clients that the run has ended, after ``rounds`` rounds, and whether another one will follow."""
        steps_by_user = dict.fromkeys(self.public.users, ("end",))
        arguments = {} if self.earlier is None else {"continuous": True}
        self.ask(steps_by_user, rounds, arguments=arguments, seconds=END_SECONDS)

    def ask(
        self,
        steps: Mapping[str, Sequence[str]],
        number: int,
        *,
        arguments: Mapping[str, Any] | None = None,
        seconds: float | None = None,
        messages: Mapping[str, bytes] = MappingProxyType({}),
    ) -> dict[str, Answer]:
        """Send each client a task and return the answers that arrive in time, by user.

        Args:
            steps: Steps of each client's task, by user. Steps that need the newest download begin with "receive".
            number: Number in the tasks: the round, from 0, if they train; otherwise the number of rounds that are done.
            arguments: Values that the steps need (:class:`Task`), the same for all tasks.
            seconds: Timeout; ``network.round_timeout`` by default.
            messages: Messages for steps other than "receive", by user.
        """

        def make_task(name: str) -> Task:
            other_messages = [messages[name]] if name in messages else []
            return self._task_with_messages(name, steps[name], number, arguments or {}, other_messages)

        timeout = self.network.round_timeout if seconds is None else seconds
        queue = TaskQueue(self, list(steps), timeout, make_task)
        answers = queue.run()
        for name, answer in answers.items():
            task, client = queue.tasks[name], self.clients[name]
            client.serial = task.serial
            if "receive" in task.todo:  # the client has downloaded the newest version
                client.version = self.server.version
            if "hear" in task.todo:  # the client has received the verdict
                client.verdict = None
            self.clock.download_bytes += _message_bytes(task)
            self.clock.upload_bytes += _message_bytes(answer)
        return answers

    def _task_with_messages(
        self, name: str, todo: Sequence[str], number: int, arguments: Mapping[str, Any], other_messages: Sequence[bytes]
    ) -> Task:
        """Return a client's next task, with the messages that its steps need.

        Without anything to download, the step "receive" is removed. The step "hear" is added if the client has not yet
        heard the verdict whether its model is the best so far.

        Args:
            name: Name of the user.
            todo: Steps of the task; "receive" is the first of them if there is one.
            number: The round, from 0.
            arguments: Values that the steps need (:class:`Task`).
            other_messages: Messages for steps other than "receive" and "hear".
        """
        client = self.clients[name]
        steps, messages = list(todo), list(other_messages)  # messages are in the order of the steps that read them
        if "receive" in steps:
            if self._is_stale(name):
                messages.insert(0, pack(self.server.download([name], once=client.version < 1)))
            else:
                steps.remove("receive")
        if client.verdict is not None:
            steps.insert(0, "hear")
            messages.insert(0, pack(client.verdict))
        serial = client.serial + 1
        return self._task(name, tuple(steps), serial, number=number, arguments=arguments, messages=tuple(messages))

    def _is_stale(self, name: str) -> bool:
        """Return whether a client has to download the newest version of the shared tensors."""
        shares_nothing = not self.model.layout.mask(self.context.method.shared).any()
        has_newest_version = self.clients[name].version >= self.server.version
        if shares_nothing or has_newest_version:
            return False
        return bool(self.server.with_download([name]))  # the server may have no download for this user

    def join_task(self, name: str) -> Task:
        """Return the task that sends a client the public part of the federation."""
        arguments: dict[str, Any] = {"public": self.public.as_dict()}
        if self.earlier is not None:
            arguments["since"] = list(self.earlier)
        if self.deleted:
            arguments["deleted"] = list(self.deleted)
        return self._task(name, _JOIN, 0, arguments=arguments)

    def _task(
        self,
        name: str,
        todo: tuple[str, ...],
        serial: int,
        *,
        number: int = 0,
        arguments: Mapping[str, Any],
        messages: tuple[bytes, ...] = (),
    ) -> Task:
        """Return a task of this run.

        Args:
            name: Name of the user.
            todo: Names of the steps.
            serial: Number of the task among the client's tasks; 0 for a join task.
            number: The round, from 0.
            arguments: Values that the steps need (:class:`Task`). The largest number of local steps of any client is
                added once a client has joined.
            messages: Messages that the steps read, in their order.
        """
        if self.local_steps > 0:
            arguments = {**arguments, "local_steps": self.local_steps}
        return Task(
            run=self.run, serial=serial, user=name, todo=todo, round=number, arguments=arguments, messages=messages
        )

    # ---------------------------------------------------------------- answers

    def read_answer(self, name: str, task: Task, reply: bytes | str) -> Answer | str:
        """Return a client's answer to a task, or one line that says what is wrong with it.

        Args:
            name: Name of the user.
            task: What the server asks of the client, such as local steps.
            reply: The bytes of the answer, or one line that says why there are none.
        """
        if isinstance(reply, str):
            return reply
        try:
            answer = unpack_answer(reply)
            answer = replace(answer, reported=check_reported(answer.reported))
            has_joined = task.todo == _JOIN and not answer.refused
            if has_joined:
                local_steps = int(answer.reported.get("steps", 1))
                self.context.check_steps(local_steps, self.network.max_samples)
        except MessageError as error:
            return str(error)
        answers_this_task = (answer.run, answer.serial, answer.user) == (task.run, task.serial, name)
        if not answers_this_task:
            run, user = answer.run[:70], answer.user[:70]  # texts of a faulty client may be long
            return f"answer: got task {answer.serial} of run {run!r} and user {user!r}; allowed: task {task.serial}"
        return answer

    def record_join(self, name: str, reported: Mapping[str, Any]) -> None:
        """Record that a client has joined, and the values that it has reported.

        Args:
            name: Name of the user.
            reported: For example ``{"examples": 120, "steps": 8, "done": 9, "back": 5}``: examples of the user, local
                steps per round, the client's last task, and the earliest task to which it can revert.
        """
        client = self.clients[name]
        client.joined = reported
        client.examples = int(reported.get("examples", 0))
        self.observe({"event": "joined", "user": name})
        if reported.get("downloads") and client.serial == 0:
            client.version = -1  # older than any version of the server, so it gets the shared tensors
        self._record_local_steps(name, int(reported.get("steps", 1)))
        last_task = int(reported.get("done", client.serial))
        earliest_task = int(reported.get("back", 0))
        self._align_tasks(name, last_task, earliest_task)

    def _record_local_steps(self, name: str, steps: int) -> None:
        """Update ``local_steps``, the largest number of local steps of any client.

        The schedule of the learning rate depends on it, so it stays the same once a client has carried out a task.

        Args:
            name: Name of the user.
            steps: Number of local steps per round of the user's client.
        """
        training_has_begun = any(client.serial > 0 for client in self.clients.values())
        if not training_has_begun:
            self.local_steps = max(self.local_steps, steps)
        elif steps > self.local_steps:
            schedule = f"the schedule has {self.local_steps}, so further steps use the final learning rate"
            self._note(name, f"takes {steps} local steps per round; {schedule}")

    def _align_tasks(self, name: str, last_task: int, earliest_task: int) -> None:
        """Continue from the client's last task if the client cannot revert to the last task that the server knows.

        For example, the server knows task 3, and the client has carried out task 9 and can revert to task 5: the server
        continues from task 9.

        Args:
            name: Name of the user.
            last_task: Number of the last task that the client has carried out.
            earliest_task: Number of the earliest task to which the client can revert.
        """
        client = self.clients[name]
        known_task = client.serial
        client_can_revert = earliest_task <= known_task <= last_task  # it does so when it gets the next task
        if client_can_revert:
            return
        if last_task < known_task:
            why = f"has lost its state after task {last_task}"
        else:
            why = f"has completed {last_task} tasks, not {known_task}"
        self._note(name, f"{why}; continuing from task {last_task}")
        client.serial = last_task
        client.version = self.first_version  # so that it gets the newest download

    def _note(self, name: str, what: str) -> None:
        """Log a fact about a client that readers of its results should know, such as that it has lost its state.

        Args:
            name: Name of the user.
            what: The fact, which follows the user's name in the log.
        """
        logger.warning("user %r: %s", name, what)
        self.observe({"event": "noted", "user": name, "what": what})

    def log_failure(self, name: str, why: str, *, last_logged: str | None, is_left_out: bool = False) -> None:
        """Log why a client failed, as a warning and as an event of the run; do not log a reason twice in a row.

        Args:
            name: Name of the user.
            why: Reason of the failure, for the log.
            last_logged: The reason that was logged last for this client; None if there is none.
            is_left_out: Whether the round continues without this client; the warning then says so in any case.
        """
        is_new_reason = why != last_logged
        if is_left_out:
            logger.warning("user %r: %s; the round continues without it", name, why, extra=AN_EVENT)
        elif is_new_reason:
            logger.warning("user %r: %s", name, why, extra=AN_EVENT)
        if is_new_reason:
            self.observe({"event": "failed", "user": name, "reason": why})

    def log_decline(self, name: str, why: str) -> None:
        """Log that a client declined its task, as a warning and as an event of the run.

        Args:
            name: Name of the user.
            why: The reason, which begins with "declined".
        """
        self.clients[name].declined = why
        logger.warning("user %r: %s; the round continues without it", name, why, extra=AN_EVENT)
        self.observe({"event": "declined", "user": name, "reason": why})


class TaskQueue:
    """Sends tasks to several clients concurrently and collects their answers until a timeout.

    A client that has not joined gets a join task first, which does not delay the others.
    """

    def __init__(
        self,
        session: ServerSession,
        users: Sequence[str],
        seconds: float,
        make_task: Callable[[str], Task] | None = None,
    ):
        """Create the queue of one task for each client; :meth:`run` sends them.

        Args:
            session: The run's server, which sends tasks to clients and reads their answers.
            users: Names of the clients' users.
            seconds: Timeout for all answers.
            make_task: Returns the task for a user's client. None to send only join tasks, before the first round.
        """
        self.session, self.seconds, self.make_task = session, seconds, make_task
        self.pending = set(users)  # users whose clients have not answered yet
        self.tasks: dict[str, Task] = {}  # by user, without join tasks
        self.answers: dict[str, Answer] = {}  # by user
        # Times are on the monotonic clock, dictionaries by user.
        self._began = time.monotonic()
        self._deadline = self._began + seconds
        self._packed: dict[str, bytes] = {}  # bytes of the task that was sent last
        self._join_sent: dict[str, float] = {}  # when this queue sent a client a join task
        self._paused_until: dict[str, float] = {}  # when a client that failed may get a task again
        self._logged_failures: dict[str, str] = {}  # why a client failed, as logged last
        self._loss_reasons: dict[str, str] = {}  # why the last request or reply was lost

    @property
    def _sends_only_joins(self) -> bool:
        """True if this is the queue of join tasks, before the first round."""
        return self.make_task is None

    def run(self) -> dict[str, Answer]:
        """Send the tasks and return the answers that arrive in time, by user.

        Tasks of clients that fail are sent again until the timeout.
        """
        session = self.session
        for name in self.pending:
            session.clients[name].declined = ""
        while self.pending:
            requests = _DueRequests(self._due_requests)  # the channel reads them repeatedly, as clients connect
            for name, reply in session.channel.exchange(requests, timeout=self._remaining_seconds()):
                self._process_reply(name, reply)
            if self._joined_client_needs_task():
                continue  # sends the task, even after the timeout
            if not self._awaited() or not self._may_retry():
                break  # no answer is missing, or there is no time for another try
            time.sleep(RETRY_SECONDS)
        self._mark_pending_as_away()
        return self.answers

    def _mark_pending_as_away(self) -> None:
        """Mark clients that have not answered as away, unless they are still loading, and log why."""
        for name in sorted(self.pending):
            if self._is_loading(name):
                continue
            client = self.session.clients[name]
            is_logged_already = client.is_away or bool(client.refusal)
            if not is_logged_already:
                reason = self._loss_reasons.get(name, f"no answer in {self.seconds:g} s")
                self._log_failure(name, reason, is_left_out=True)
            client.is_away = True

    def _joined_client_needs_task(self) -> bool:
        """Return whether a connected client has joined during this round, but has not been sent the round's task.

        A client that the server does not know yet is first asked to join, and then gets the task.
        """
        if self._sends_only_joins:  # before the first round there is no other task
            return False
        for name in self.pending:
            needs_task = self._has_joined(name) and name not in self.tasks
            if needs_task and self.session.clients[name].is_present:
                return True
        return False

    def _remaining_seconds(self) -> float:
        """Return the time until the queue's deadline; 0 after it."""
        return max(0.0, self._deadline - time.monotonic())

    def _may_retry(self) -> bool:
        """Return whether there is time to send the missing tasks again before the deadline.

        If only join tasks are sent, the deadline is first extended for clients that are still loading their models.
        """

        def has_time() -> bool:
            return time.monotonic() + RETRY_SECONDS <= self._deadline

        if not has_time() and self._sends_only_joins:
            self._extend_deadline_for_loading()
        return has_time()

    def _extend_deadline_for_loading(self) -> None:
        """Wait longer for clients that are loading their models, if the run would have enough clients with them.

        The deadline is extended by ``seconds``, until the queue has waited ``_loading_seconds`` in all.
        """
        now, session = time.monotonic(), self.session
        loading = []  # clients that have got a join task, and neither failed nor refused
        for name in sorted(self._join_sent.keys() & self.pending):
            client = session.clients[name]
            if client.is_present and not client.refusal and name not in self._logged_failures:
                loading.append(name)
        would_be_enough = len(session.joined) + len(loading) >= session.network.min_participants
        may_wait = now < self._began + self._loading_seconds
        if loading and would_be_enough and may_wait:
            logger.warning("still waiting for connected clients that are loading: %s", ", ".join(loading))
            self._deadline = now + self.seconds

    def _awaited(self) -> set[str]:
        """Return the clients that have not answered their task yet, and for which :meth:`run` keeps waiting.

        It never waits for clients that are away. Once ``min_participants`` clients have joined, it does not wait for
        those that refuse to join either.
        """
        have_enough_joined = len(self.session.joined) >= self.session.network.min_participants
        awaited = set()
        for name in self.pending:
            client = self.session.clients[name]
            if client.is_away:
                continue
            if client.refusal and have_enough_joined:
                continue
            awaited.add(name)
        return awaited

    # ---------------------------------------------------------------- requests

    def _due_requests(self) -> dict[str, bytes]:
        """Return the requests that connected clients get now, by user.

        A client that has joined gets its task. Another client gets a join task if it may join now.
        """
        now = time.monotonic()
        connected = set(self.session.channel.present())
        self._update_presence(connected, now)
        requests = {}
        for name in sorted(connected & self.pending):
            is_paused = self._paused_until.get(name, 0.0) > now
            if is_paused:
                continue
            if self._has_joined(name) or self._may_join(name, now):
                requests[name] = self._request(name)
        return requests

    def _update_presence(self, connected: Set[str], now: float) -> None:
        """Record which clients are connected, and let those that have just connected join at once.

        Args:
            connected: Names of the connected clients.
            now: Time on the monotonic clock.
        """
        clients = self.session.clients
        just_connected = {name for name in connected & clients.keys() if not clients[name].is_present}
        for name, client in clients.items():
            client.is_present = name in connected
            can_take_task = name in connected & self.pending and self._has_joined(name)
            if name in just_connected or can_take_task:
                client.is_away = False
        for name in just_connected & self.pending:
            clients[name].reset_join()
            self._paused_until.pop(name, None)
        if just_connected and self._sends_only_joins:  # the timeout starts again
            self._deadline = max(self._deadline, now + self.seconds)

    def _has_joined(self, name: str) -> bool:
        """Return whether a client takes part in the run, so that it gets tasks other than the join task."""
        return self.session.clients[name].joined is not None

    def _request(self, name: str) -> bytes:
        """Return the bytes of a client's task, or of its join task if it has not joined.

        Later calls return the same bytes, so that the channel recognises a request that it has already sent.
        """
        if self.make_task is None or not self._has_joined(name):
            if name not in self._join_sent:
                now = time.monotonic()
                self._join_sent[name] = now
                client = self.session.clients[name]
                if client.join_asked is None:  # its first join task since it has connected
                    client.join_asked = now
                self._packed[name] = self.session.join_task(name).pack()
        elif name not in self.tasks:
            self.tasks[name] = self.make_task(name)
            self._packed[name] = self.tasks[name].pack()
        return self._packed[name]

    def _may_join(self, name: str, now: float) -> bool:
        """Return whether a connected client that has not joined gets a join task now, or still has time to answer one.

        Before the first round, always True. During a round, a client has ``_loading_seconds`` to answer; a client that
        has not answered by then is marked as away here.

        Args:
            name: Name of the user.
            now: Time on the monotonic clock.
        """
        if self._sends_only_joins:
            return True
        client = self.session.clients[name]
        if client.is_away:
            return self._may_rejoin(name, now)
        has_got_join_task = client.join_asked is not None
        if not has_got_join_task or self._is_loading(name):
            return True
        self._log_failure(name, f"has not joined in {self._loading_seconds:g} s", is_left_out=True)
        client.is_away, client.rejoin_wait_began = True, now
        return False

    def _may_rejoin(self, name: str, now: float) -> bool:
        """Return whether a client that is away gets another join task now, or still has time to answer one.

        It gets one every 60 s, and has 10 s to answer it. If it gets one now, the next 60 s are counted from this call.

        Args:
            name: Name of the user.
            now: Time on the monotonic clock.
        """
        client = self.session.clients[name]
        has_task = name in self._join_sent
        if has_task:
            return now - self._join_sent[name] <= _REJOIN_WAIT_SECONDS
        began = client.rejoin_wait_began
        if began is not None and now - began < _REJOIN_INTERVAL_SECONDS:
            return False
        client.rejoin_wait_began = now
        return True

    def _is_loading(self, name: str) -> bool:
        """Return whether a client that got a join task during a round may still be loading its base model and data."""
        client = self.session.clients[name]
        if self._sends_only_joins or self._has_joined(name) or not client.is_present:
            return False
        if client.join_asked is None:  # it has not got a join task yet
            return False
        seconds_since_join_task = time.monotonic() - client.join_asked
        return seconds_since_join_task <= self._loading_seconds

    @property
    def _loading_seconds(self) -> float:
        """How long a connected client may take to load and join: 10 times ``network.join_timeout``."""
        return _LOADING_TIMEOUTS * self.session.network.join_timeout

    # ---------------------------------------------------------------- answers

    def _process_reply(self, name: str, reply: bytes | str) -> None:
        """Process a client's reply to its join task or task.

        Args:
            name: Name of the user.
            reply: The bytes of the answer, or one line that says why there are none.
        """
        if name not in self.pending:
            return
        is_join = name not in self.tasks  # a client gets its task only after it has joined
        task = self.session.join_task(name) if is_join else self.tasks[name]
        answer = self.session.read_answer(name, task, reply)
        if isinstance(answer, str):
            why_lost = answer
            self._process_loss(name, why_lost)
            return
        self._logged_failures.pop(name, None)  # the client works now, so its next failure is logged in any case
        if is_join:
            self._process_join(name, task, answer)
        elif answer.declined:  # the conditions of the device do not allow the task
            self.pending.discard(name)
            self.session.log_decline(name, answer.refused)
        elif answer.refused:  # the task has failed, so the client has to join again
            self.pending.discard(name)
            self.session.clients[name].joined = None
            self._log_failure(name, answer.refused, is_left_out=True)
        else:
            self._finish(name, task, answer)

    def _process_loss(self, name: str, reason: str) -> None:
        """Record why a client's request or reply was lost; before the deadline, log it and pause until the next try.

        After the deadline there is no other try: the client is marked as away, and the reason is logged then.

        Args:
            name: Name of the user.
            reason: Why the request or the reply was lost, in one line.
        """
        self._loss_reasons[name] = reason
        if self._remaining_seconds() > 0:
            self._pause(name, RETRY_SECONDS)
            self._log_failure(name, reason)

    def _process_join(self, name: str, task: Task, answer: Answer) -> None:
        """Process the answer to a join task: record that the client has joined, or why it refuses to.

        Before the first round, a client that refuses gets the join task again after 5 s. During a round, it is marked
        as away, and gets another join task in a later round.

        Args:
            name: Name of the user.
            task: The task by which the client was asked to join.
            answer: The client's answer.
        """
        client = self.session.clients[name]
        if answer.refused:
            self.session.log_failure(name, answer.refused, last_logged=client.refusal)
            client.refusal = answer.refused
            self._pause(name, _REFUSED_SECONDS)
            if not self._sends_only_joins:
                self.pending.discard(name)
                client.is_away, client.rejoin_wait_began = True, time.monotonic()
            return
        client.reset_join()
        client.is_away = False
        self.session.record_join(name, answer.reported)
        if self._sends_only_joins:  # otherwise the client stays pending, and gets its task of the round
            # The timeout counts from the last client that has joined.
            self._deadline = max(self._deadline, time.monotonic() + self.seconds)
            self._finish(name, task, answer)

    def _log_failure(self, name: str, why: str, *, is_left_out: bool = False) -> None:
        """Log why a client failed; repeated failures of this queue with the same reason become a single event.

        Args:
            name: Name of the user.
            why: Reason of the failure, for the log.
            is_left_out: Whether the round continues without this client.
        """
        self.session.log_failure(name, why, last_logged=self._logged_failures.get(name), is_left_out=is_left_out)
        self._logged_failures[name] = why

    def _finish(self, name: str, task: Task, answer: Answer) -> None:
        """Store a client's answer to its task, and emit an event "step" for progress bars and the event log.

        Args:
            name: Name of the user.
            task: What the server asks of the client, such as local steps.
            answer: The client's answer.
        """
        self.pending.discard(name)
        self.answers[name] = answer
        self.session.observe(
            {
                "event": "step",
                "advance": 1,  # how far a progress bar moves
                "round": task.round + 1,
                "user": name,
                "upload_bytes": _message_bytes(answer),
                "download_bytes": _message_bytes(task),
            }
        )

    def _pause(self, name: str, seconds: float) -> None:
        """Send a client no request for some seconds after a failure; then send its task again, or a new join task."""
        self._paused_until[name] = time.monotonic() + seconds
        self._join_sent.pop(name, None)


class _DueRequests(Mapping[str, bytes]):
    """Requests by user; each iteration calls ``compute`` for those that are due, and earlier ones stay readable."""

    def __init__(self, compute: Callable[[], dict[str, bytes]]):
        self._compute = compute
        self._known: dict[str, bytes] = {}

    def __getitem__(self, name: str) -> bytes:
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        """Compute the requests that are due now, store them for :meth:`__getitem__`, and return their users."""
        due = self._compute()
        self._known.update(due)
        return iter(list(due))

    def __len__(self) -> int:
        return len(self._compute())


def _message_bytes(message: Task | Answer) -> int:
    """Return the bytes of the uploads or downloads that a task or an answer carries, without its header."""
    return sum(len(part) for part in message.messages)


def start_session(
    run: str, public: Public, context: ServerContext, channel: Channel, observe: Observer, network: NetworkSection
) -> ServerSession:
    """Return a new session, in which no client has joined; warn if the noise for privacy exceeds the users' updates.

    Args:
        run: Name of the run in messages to clients.
        public: What all users may know of the federation, such as its recipe and their names.
        context: Recipe, method and settings.
        channel: Transport of messages to clients.
        observe: Receives events.
        network: Section ``network`` of the server's file.

    Raises:
        RecipeError: The method's server does not support these users, or a round has too few users for the privacy
            mechanisms.
    """
    model = context.model()
    server = start_server(model, public.users, context.plan)
    server.check_rounds(context.plan)
    server.warn_of_noise(context.plan)
    session = ServerSession(
        run=run,
        public=public,
        context=context,
        model=model,
        server=server,
        channel=channel,
        observe=observe,
        network=network,
    )
    session.clients = {name: ClientSession(version=session.first_version) for name in public.users}

    def compute_work_by_user() -> dict[str, Work]:
        """Return the work of each user, from the numbers of examples that clients have reported so far."""
        clients = session.clients.items()
        num_examples_by_user = {name: client.examples for name, client in clients if client.examples is not None}
        return context.work_by_user(num_examples_by_user)

    # The epsilon of example-level privacy follows from these amounts, which clients report only when they join.
    server.mechanisms.set_works(compute_work_by_user)
    return session
