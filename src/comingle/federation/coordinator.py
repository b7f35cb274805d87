"""The server's side of a federation over the network: which client is asked what, and how long it waits.

The rounds are those of :func:`comingle.training.rounds.run_rounds`; messages are wrapped in tasks
(:mod:`comingle.federation.messages`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from comingle.federation.checks import check_told
from comingle.federation.flower.channel import Channel
from comingle.federation.messages import Answer, Task, check_steps, unpack_answer, works_of
from comingle.federation.public import House, Public
from comingle.models.model import Model
from comingle.protocol.messages import Download
from comingle.protocol.wire import pack
from comingle.training.evaluation import Clock
from comingle.training.events import AN_EVENT, Observer
from comingle.training.server import ServerHalf, start_server
from comingle.utils.errors import MessageError, RunError


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long the server waits, for how many, and what it believes of them.

    A round ends when everybody who was asked has answered, or after ``round_timeout`` seconds with those who have, if
    they are ``min_participants``; else the run ends, to be gone on with. ``join_timeout`` is how long the first round
    waits for everybody. ``max_samples`` is how many samples or conversations a user may have.
    """

    min_participants: int = 1
    round_timeout: float = 3600.0
    join_timeout: float = 300.0
    max_samples: int = 1_000_000


logger = logging.getLogger("comingle")

_JOIN = ("join",)
END_SECONDS = 60.0
"""How long the server waits for users to hear that all is over."""
AGAIN_SECONDS = 1.0
"""Pause before a user who failed, or is absent, is asked again."""
_REFUSED_SECONDS = 5.0
"""Pause before a user who has refused to join is asked again, while too few have joined."""
_REMIND_SECONDS, _REMINDER_SECONDS = 60.0, 10.0
"""How often a user whose join timed out is asked again while it stays connected, and how long a round then waits."""
_LOADING_TIMEOUTS = 10
"""Users who have come and are still loading are waited for up to so many times ``join_timeout``."""
_REASONS = 3


@dataclass(kw_only=True)
class Coordinator:
    """The server half at work with users elsewhere.

    ``serials`` are the numbers of the users' last tasks, ``versions`` what each has last downloaded, ``verdicts`` what
    each is still to hear of its models; ``local_steps`` are those of the user who has most, in a round.
    """

    run: str
    public: Public
    house: House
    model: Model
    server: ServerHalf
    channel: Channel
    observe: Observer
    patience: Patience = field(default_factory=Patience)
    clock: Clock = field(default_factory=Clock)
    serials: dict[str, int] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    verdicts: dict[str, Download] = field(default_factory=dict)
    away: set[str] = field(default_factory=set)
    """Users who were waited for in vain. They are not waited for again before they return, or have joined."""
    seen: set[str] = field(default_factory=set)
    """Users who were present when the channel was last asked."""
    join_asked: dict[str, float] = field(default_factory=dict)
    """When each user was first asked to join since it came, in seconds of the monotonic clock."""
    reminded: dict[str, float] = field(default_factory=dict)
    """When each user whose join timed out or was refused was last asked again."""
    joined: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    examples: dict[str, int] = field(default_factory=dict)
    """How many examples each user has, where privacy hides each of them."""
    refusing: dict[str, str] = field(default_factory=dict)
    """Who does not want to join, and why."""
    local_steps: int = 0
    best_round: int = 0
    """After how many rounds the mean validation loss was lowest, where that is looked for."""

    @property
    def first_version(self) -> int:
        """What users have who have not downloaded anything."""
        return -1 if self.house.method.server.first_download else 0

    def largest_rank(self, name: str) -> int:
        """The LoRA rank that a user begins with, from which a method may take some away."""
        ranks = self.model.ranks.expand(len(self.public.users))
        return int(ranks[self.public.users.index(name)])

    @property
    def shares(self) -> bool:
        """Whether users have anything to send."""
        return bool(self.model.layout.mask(self.house.method.shared).any())

    # ---------------------------------------------------------------- asking

    def join(self) -> None:
        """Tell all users what the federation is about; wait for all of them, or for enough.

        ``network.join_timeout`` counts from the last user who came or joined. Users who have come and are still
        loading are waited for beyond that. A user who refuses is waited for only while too few have joined.

        Raises:
            RunError: too few take part; says why.
        """
        _Exchange(self, self.public.users, self.patience.join_timeout).run()
        if len(self.joined) < self.patience.min_participants:
            there = f"{len(self.joined)} of {len(self.public.users)} users have joined"
            waits = f"network.join_timeout is {self.patience.join_timeout:g} s"
            reasons = "".join(f"; {why}" for why in list(self.refusing.values())[:_REASONS])
            raise RunError(f"{there}; needed: {self.patience.min_participants}; {waits}{reasons}")

    def end(self, rounds: int) -> None:
        """Tell all users that the federation is over, once the server has written down what came of it."""
        self.ask(dict.fromkeys(self.public.users, ("end",)), rounds, seconds=END_SECONDS)

    def welcome(self, name: str, answer: Answer) -> None:
        """Note a user who has joined, and where it is in the run."""
        self.joined[name] = answer.told
        self.examples[name] = int(answer.told.get("examples", 0))
        self.observe({"event": "joined", "user": name})
        if self.serials.get(name, 0) == 0 and not any(self.serials.values()):
            self.local_steps = max(self.local_steps, int(answer.told.get("steps", 1)))
        elif (steps := int(answer.told.get("steps", 1))) > self.local_steps:
            told = f"takes {steps} steps a round, the schedule is of {self.local_steps}: its rates stay at their end"
            self._note(name, told)
        done, was = int(answer.told.get("done", self.serials[name])), self.serials[name]
        if done < was or was < int(answer.told.get("back", 0)):
            why = (
                f"has lost what it did after task {done}" if done < was else f"has done {done} tasks and not just {was}"
            )
            self._note(name, f"{why}, and goes on from there")
            self.serials[name], self.versions[name] = done, self.first_version

    def _note(self, name: str, told: str) -> None:
        """Something about a user that changes what a run's numbers mean."""
        logger.warning("user %r: %s", name, told)
        self.observe({"event": "noted", "user": name, "what": told})

    def ask(
        self,
        steps: Mapping[str, Sequence[str]],
        number: int,
        *,
        about: Mapping[str, Any] | None = None,
        seconds: float | None = None,
        messages: Mapping[str, bytes] = MappingProxyType({}),
    ) -> dict[str, Answer]:
        """Have these users do these steps, behind whatever they have not heard of yet; who answers, and what.

        Steps that nobody can take without a download of the newest version begin with "receive". ``messages`` are what
        other steps need.
        """

        def task_of(name: str) -> Task:
            more = [messages[name]] if name in messages else []
            return self._with_messages(name, steps[name], number, about or {}, more)

        timeout = self.patience.round_timeout if seconds is None else seconds
        exchange = _Exchange(self, list(steps), timeout, task_of)
        answers, tasks = exchange.run(), exchange.tasks
        for name in answers:
            task = tasks[name]
            self.serials[name] = task.serial
            if "receive" in task.todo:
                self.versions[name] = self.server.version
            if "hear" in task.todo:
                self.verdicts.pop(name, None)
            self.clock.download_bytes += _length(task)
            self.clock.upload_bytes += _length(answers[name])
        return answers

    def _with_messages(
        self, name: str, todo: Sequence[str], number: int, about: Mapping[str, Any], more: Sequence[bytes]
    ) -> Task:
        messages, steps = list(more), list(todo)
        if "receive" in steps:
            if self._is_behind(name):
                messages.insert(0, pack(self.server.download([name])))
            else:
                steps.remove("receive")
        if name in self.verdicts:
            messages.insert(0, pack(self.verdicts[name]))
            steps.insert(0, "hear")
        return self._task(name, tuple(steps), number=number, about=about, messages=tuple(messages))

    def _is_behind(self, name: str) -> bool:
        if not self.shares or self.versions[name] >= self.server.version:
            return False
        return bool(self.server.answers([name]))

    def _task(
        self,
        name: str,
        todo: tuple[str, ...],
        *,
        serial: int | None = None,
        number: int = 0,
        about: Mapping[str, Any],
        messages: tuple[bytes, ...] = (),
    ) -> Task:
        serial = self.serials.get(name, 0) + 1 if serial is None else serial
        about = {**about, "local_steps": self.local_steps} if self.local_steps else about
        return Task(run=self.run, serial=serial, user=name, todo=todo, round=number, about=about, messages=messages)

    # ---------------------------------------------------------------- answers

    def join_task(self, name: str) -> Task:
        """The task that tells a user what the federation is about."""
        return self._task(name, _JOIN, serial=0, about={"public": self.public.as_dict()})

    def read_answer(self, name: str, task: Task, got: bytes | str) -> Answer | str:
        """Return a user's answer to a task, or one line that says what is wrong with it."""
        if isinstance(got, str):
            return got
        try:
            answer = unpack_answer(got)
            answer = replace(answer, told=check_told(answer.told))
            if task.todo == _JOIN and not answer.refused:
                check_steps(int(answer.told.get("steps", 1)), self.house, self.patience.max_samples)
        except MessageError as error:
            return str(error)
        if (answer.run, answer.serial, answer.user) != (task.run, task.serial, name):
            of, user = answer.run[:70], answer.user[:70]
            return f"answers task {answer.serial} of run {of!r} as {user!r}; asked was task {task.serial}"
        return answer

    def complain(self, failed: dict[str, str], name: str, why: str, *, gone: bool = False) -> None:
        """Log why a user failed, once for each reason."""
        if gone or failed.get(name) != why:
            logger.warning("user %r: %s", name, f"{why}; the others go on" if gone else why, extra=AN_EVENT)
        if failed.get(name) != why:
            self.observe({"event": "failed", "user": name, "reason": why})
        failed[name] = why


class _Exchange:
    """Tasks sent to several users concurrently, and their answers until a timeout.

    A user who has not joined is sent a join task first, which does not delay the others. Without ``task_of``, users are
    only sent join tasks.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        users: Sequence[str],
        seconds: float,
        task_of: Callable[[str], Task] | None = None,
    ):
        self.coordinator, self.seconds, self.task_of = coordinator, seconds, task_of
        self.pending, self.tasks, self.answers = set(users), dict[str, Task](), dict[str, Answer]()
        self._began = time.monotonic()
        self._ends = self._began + seconds
        self._packed: dict[str, bytes] = {}
        self._asked: dict[str, float] = {}  # joins of this exchange
        self._paused: dict[str, float] = {}  # until when a user who failed is not asked
        self._failed: dict[str, str] = {}  # as it was logged
        self._reasons: dict[str, str] = {}

    def run(self) -> dict[str, Answer]:
        """Return the answers that arrive in time. A user who fails is asked again until then."""
        while self.pending:
            due = _Due(self._due)
            for name, got in self.coordinator.channel.exchange(due, timeout=self._left()):
                self._take(name, got)
            if self._has_just_joined():
                continue  # whoever joined in time gets its task, even where the time is over now
            if not self._awaited() or not self._goes_on():
                break
            time.sleep(AGAIN_SECONDS)
        for name in sorted(self.pending):
            if name not in self.coordinator.away | self.coordinator.refusing.keys() and not self._is_loading(name):
                why = self._reasons.get(name, f"no answer in {self.seconds:g} s")
                self.coordinator.complain(self._failed, name, why, gone=True)
            if not self._is_loading(name):
                self.coordinator.away.add(name)
        return self.answers

    def _has_just_joined(self) -> bool:
        """Return whether a user is present and has joined, and was not asked to do its task yet."""
        ready = self.pending & self.coordinator.joined.keys() & self.coordinator.seen
        return self.task_of is not None and bool(ready - self.tasks.keys())

    def _left(self) -> float:
        return max(0.0, self._ends - time.monotonic())

    def _goes_on(self) -> bool:
        """Return whether there is time for another try; extends the time for users who are still loading."""
        now, timeout = time.monotonic(), self.seconds
        if self.task_of is None and now + AGAIN_SECONDS > self._ends:
            loading = {name for name in self._asked if name in self.pending and name in self.coordinator.seen}
            loading -= self._failed.keys() | self.coordinator.refusing.keys()
            enough = len(self.coordinator.joined) + len(loading) >= self.coordinator.patience.min_participants
            if loading and enough and now < self._began + self._loading_seconds:
                logger.warning("still waiting for %s, who have come and are loading", ", ".join(sorted(loading)))
                self._ends = now + timeout
        return now + AGAIN_SECONDS <= self._ends

    def _awaited(self) -> set[str]:
        """Users for whose answers the exchange waits."""
        coordinator = self.coordinator
        awaited = self.pending - coordinator.away
        if len(coordinator.joined) >= coordinator.patience.min_participants:
            awaited -= coordinator.refusing.keys()
        return awaited

    # ---------------------------------------------------------------- what to ask

    def _due(self) -> dict[str, bytes]:
        """Return the request of each user who is present and is to be asked, or still works on its answer."""
        coordinator, now = self.coordinator, time.monotonic()
        present = set(coordinator.channel.present())
        came, here = present - coordinator.seen, present & self.pending
        coordinator.seen = present
        coordinator.away -= came | (here & coordinator.joined.keys())
        for name in came & self.pending:
            for known in (coordinator.refusing, coordinator.join_asked, coordinator.reminded, self._paused):
                known.pop(name, None)
        if came and self.task_of is None:
            self._ends = max(self._ends, now + self.seconds)
        return {
            name: self._request(name)
            for name in sorted(here)
            if self._paused.get(name, 0.0) <= now and (name in coordinator.joined or self._may_join(name, now))
        }

    def _request(self, name: str) -> bytes:
        if self.task_of is None or name not in self.coordinator.joined:
            if name not in self._asked:
                self._asked[name] = time.monotonic()
                self.coordinator.join_asked.setdefault(name, self._asked[name])
                self._packed[name] = self.coordinator.join_task(name).pack()
        elif name not in self.tasks:
            self.tasks[name] = self.task_of(name)
            self._packed[name] = self.tasks[name].pack()
        return self._packed[name]

    def _may_join(self, name: str, now: float) -> bool:
        """Whether a user is asked to join, or its answer to that is waited for; a round does not wait long for it."""
        coordinator = self.coordinator
        if self.task_of is None:
            return True
        if name in coordinator.away:
            if name in self._asked:
                return now - self._asked[name] <= _REMINDER_SECONDS
            if now - coordinator.reminded.get(name, -_REMIND_SECONDS) < _REMIND_SECONDS:
                return False
            coordinator.reminded[name] = now
            return True
        if name not in coordinator.join_asked or self._is_loading(name):
            return True
        why = f"has not joined in {self._loading_seconds:g} s"
        coordinator.complain(self._failed, name, why, gone=True)
        coordinator.away.add(name)
        coordinator.reminded[name] = now
        return False

    def _is_loading(self, name: str) -> bool:
        """Whether a user who has come during the rounds still has time to join, in this round or the next ones."""
        coordinator = self.coordinator
        if self.task_of is None or name in coordinator.joined or name not in coordinator.seen:
            return False
        asked = coordinator.join_asked.get(name)
        return asked is not None and time.monotonic() - asked <= self._loading_seconds

    @property
    def _loading_seconds(self) -> float:
        return _LOADING_TIMEOUTS * self.coordinator.patience.join_timeout

    # ---------------------------------------------------------------- what was answered

    def _take(self, name: str, got: bytes | str) -> None:
        """Take a user's reply, or the line that says why there is none."""
        coordinator = self.coordinator
        if name not in self.pending:
            return
        joins = name not in self.tasks
        task = coordinator.join_task(name) if joins else self.tasks[name]
        answer = coordinator.read_answer(name, task, got)
        if isinstance(answer, str):  # the request did not get there, or the reply not back
            self._reasons[name] = answer
            if self._left():
                self._pause(name, AGAIN_SECONDS)
                coordinator.complain(self._failed, name, answer)
            return
        self._failed.pop(name, None)
        if joins:
            self._take_join(name, answer)
        elif answer.refused:
            self.pending.discard(name)
            coordinator.joined.pop(name, None)  # it is told what the federation is about again, and says how far it is
            coordinator.complain(self._failed, name, answer.refused, gone=True)
        else:
            self._finish(name, task, answer)

    def _take_join(self, name: str, answer: Answer) -> None:
        coordinator = self.coordinator
        if answer.refused:
            coordinator.complain(coordinator.refusing, name, answer.refused)
            self._pause(name, _REFUSED_SECONDS)
            if self.task_of is not None:
                self.pending.discard(name)
                coordinator.away.add(name)
                coordinator.reminded[name] = time.monotonic()
            return
        for known in (coordinator.refusing, coordinator.join_asked, coordinator.reminded):
            known.pop(name, None)
        coordinator.away.discard(name)
        coordinator.welcome(name, answer)
        if self.task_of is None:
            self._ends = max(self._ends, time.monotonic() + self.seconds)
            self._finish(name, coordinator.join_task(name), answer)

    def _finish(self, name: str, task: Task, answer: Answer) -> None:
        self.pending.discard(name)
        self.answers[name] = answer
        self.coordinator.observe(
            {
                "event": "step",
                "advance": 1,
                "round": task.round + 1,
                "user": name,
                "upload_bytes": _length(answer),
                "download_bytes": _length(task),
            }
        )

    def _pause(self, name: str, seconds: float) -> None:
        self._paused[name] = time.monotonic() + seconds
        self._asked.pop(name, None)


class _Due(Mapping[str, bytes]):
    """The requests that are due, looked up again at each iteration; those that were due once stay readable."""

    def __init__(self, look: Callable[[], dict[str, bytes]]):
        self._look, self._known = look, dict[str, bytes]()

    def __getitem__(self, name: str) -> bytes:
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        due = self._look()
        self._known |= due
        return iter(list(due))

    def __len__(self) -> int:
        return len(self._look())


def _length(said: Task | Answer) -> int:
    return sum(len(message) for message in said.messages)


def new_coordinator(
    run: str, public: Public, house: House, channel: Channel, observe: Observer, patience: Patience
) -> Coordinator:
    """The server before the first round.

    Raises:
        RecipeError: the method's server cannot serve such users.
    """
    model = house.model()
    server = start_server(model, public.users, house.plan)
    server.check_rounds(house.plan)
    server.warn_of_noise(house.plan)
    coordinator = Coordinator(
        run=run,
        public=public,
        house=house,
        model=model,
        server=server,
        channel=channel,
        observe=observe,
        patience=patience,
        serials=dict.fromkeys(public.users, 0),
    )
    server.set_works(lambda: works_of(house, coordinator.examples))
    coordinator.versions = dict.fromkeys(public.users, coordinator.first_version)
    return coordinator
