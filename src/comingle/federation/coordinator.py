"""The server's side of a federation whose users are elsewhere: who is asked what, who is waited for, what is kept.

The rounds are those of :func:`comingle.engines.rounds.run_rounds`; what is said between two of them is in tasks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from comingle.engines.clock import Clock
from comingle.engines.events import Observer
from comingle.engines.server import ServerHalf
from comingle.engines.starting import start_server
from comingle.errors import MessageError, RunError
from comingle.federation.claims import check_steps, works_of
from comingle.federation.patience import Patience
from comingle.federation.public import House, Public
from comingle.federation.tasks import Answer, Task, unpack_answer
from comingle.federation.telling import check_told
from comingle.models.model import Model
from comingle.privacy.ledger import Ledger
from comingle.protocol.messages import Download
from comingle.protocol.wire import pack
from comingle.transports.channel import Channel

logger = logging.getLogger("comingle")

AN_EVENT = {"is_an_event": True}
"""Marks a warning in the log of which an event tells as well."""

_JOIN = ("join",)
AGAIN_SECONDS = 1.0
"""So long is waited before somebody who failed, or is not there, is asked again."""


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
    """Who was waited for in vain, and is not waited for again before it is there."""
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
        """Tell everybody what the federation is about; wait for all of them, or for enough.

        Raises:
            RunError: too few take part; says why.
        """
        tasks = {name: self._task(name, _JOIN, serial=0, about=self._about) for name in self.public.users}
        for name, answer in self._exchange(tasks, self.patience.join_timeout).items():
            self._welcome(name, answer)
        if len(self.joined) < self.patience.min_participants:
            there = f"{len(self.joined)} of {len(self.public.users)} users have joined"
            waits = f"network.join_timeout is {self.patience.join_timeout:g} s"
            raise RunError(f"{there}; needed: {self.patience.min_participants}; {waits}")

    def _welcome(self, name: str, answer: Answer) -> None:
        self.joined[name] = answer.told
        if isinstance(self.server.guard, Ledger):
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
        self._admit(set(steps) & set(self.channel.present()), self.patience.round_timeout, {})
        tasks = {
            name: self._with_messages(name, todo, number, about or {}, [messages[name]] if name in messages else [])
            for name, todo in steps.items()
        }
        answers = self._exchange(tasks, self.patience.round_timeout if seconds is None else seconds)
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

    # ---------------------------------------------------------------- waiting

    def _exchange(self, tasks: Mapping[str, Task], seconds: float) -> dict[str, Answer]:
        """The answers that come in time. Who fails is asked again until then, once it is there."""
        packed = {name: task.pack() for name, task in tasks.items()}
        answers: dict[str, Answer] = {}
        failed: dict[str, str] = {}
        ends, pending = time.monotonic() + seconds, set(tasks)
        while pending:
            here = pending & set(self.channel.present())
            if any(tasks[name].todo != _JOIN for name in here):
                self._admit(here, max(0.0, ends - time.monotonic()), failed)
                pending -= self.refusing.keys()
                here &= self.joined.keys()
            self.away -= here
            left = max(0.0, ends - time.monotonic())
            for name, got in self.channel.exchange({n: packed[n] for n in sorted(here)}, timeout=left):
                answer = self._understood(name, tasks[name], got)
                if isinstance(answer, str):  # it did not get there, or back
                    self._complain(failed, name, answer)
                    continue
                pending.discard(name)
                if answer.refused:
                    self.joined.pop(name, None)  # it is told what all is about again, and may say how far it is
                    self._complain(failed, name, answer.refused, gone=True)
                    continue
                answers[name] = answer
                self.observe(
                    {
                        "event": "step",
                        "advance": 1,
                        "round": tasks[name].round + 1,
                        "user": name,
                        "upload_bytes": _length(answer),
                        "download_bytes": _length(tasks[name]),
                    }
                )
            if not pending - self.away or time.monotonic() + AGAIN_SECONDS > ends:
                break
            if pending:
                time.sleep(AGAIN_SECONDS)
        for name in sorted(pending):
            if name not in self.away:
                self._complain(failed, name, failed.get(name, f"no answer in {seconds:g} s"), gone=True)
            self.away.add(name)
        return answers

    def _admit(self, here: Collection[str], seconds: float, failed: dict[str, str]) -> None:
        """Tell those of some users what the federation is about who have not joined."""
        seconds = min(seconds, self.patience.join_timeout)
        joins = {name: self._task(name, _JOIN, serial=0, about=self._about) for name in here if name not in self.joined}
        packed = {name: task.pack() for name, task in joins.items()}
        for name, got in self.channel.exchange(packed, timeout=seconds) if joins else ():
            answer = self._understood(name, joins[name], got)
            if isinstance(answer, str):
                self._complain(failed, name, answer)
            elif answer.refused:
                self._complain(self.refusing, name, answer.refused)
            else:
                self.refusing.pop(name, None)
                self._welcome(name, answer)

    @property
    def _about(self) -> dict[str, Any]:
        return {"public": self.public.as_dict()}

    def _understood(self, name: str, task: Task, got: bytes | str) -> Answer | str:
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

    def _complain(self, failed: dict[str, str], name: str, why: str, *, gone: bool = False) -> None:
        """Once for each reason."""
        if gone or failed.get(name) != why:
            logger.warning("user %r: %s", name, f"{why}; the others go on" if gone else why, extra=AN_EVENT)
        if failed.get(name) != why:
            self.observe({"event": "failed", "user": name, "reason": why})
        failed[name] = why


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
    server = start_server(model, house.method, public.users, house.training)
    server.check_rounds(house.training)
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
    if isinstance(server.guard, Ledger):
        server.guard.works = lambda: works_of(house, coordinator.examples)
    coordinator.versions = dict.fromkeys(public.users, coordinator.first_version)
    return coordinator
