"""Progress of runs, on stderr: a bar in a terminal, one line that changes in a notebook, lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from statistics import fmean
from typing import Protocol, runtime_checkable

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from comingle.privacy.accounting import sample_size
from comingle.training.client import Clients
from comingle.training.events import Event, Observer
from comingle.training.settings import cohorts, participants
from comingle.utils.records import measure_of, number, sample_told
from comingle.utils.terminal import errors, printable

LONG_SECONDS = 30.0
"""After so long without a line there is another one, whatever is being done."""

FEW_ROUNDS = 100
"""Longer runs print a round only where there was no line for :data:`PAUSE_SECONDS`."""

PAUSE_SECONDS = 5.0

LOADING = "loading the base model and the users' data"


@runtime_checkable
class Reporter(Protocol):
    """Tells of what takes long."""

    def waiting(self, message: str) -> AbstractContextManager[object]:
        """Tells what is being waited for, while it lasts."""
        ...

    def say(self, line: str) -> None:
        """Print one line."""
        ...

    def watch(self, clients: Clients, title: str | None = None) -> Observer:
        """An observer of a run's events that tells of them; of one run at a time."""
        ...

    def clear(self) -> None:
        """Take away what tells of runs that have ended."""
        ...


@contextmanager
def reporting(*, quiet: bool = False) -> Iterator[Reporter]:
    """What suits the place: a bar in a terminal, one line that changes in a notebook, lines elsewhere, or nothing."""
    if quiet:
        yield Silent()
    elif errors.is_jupyter:
        with Lines(_notebook(), stamped=False) as lines:
            yield lines
    elif errors.is_terminal:
        with Progress(*_columns(), console=errors) as progress:
            yield Bars(progress)
    else:
        with Lines(_to_stderr) as lines:
            yield lines


def steps_before(clients: Clients) -> Callable[[int], int]:
    """How many local iterations of cohorts there are before a round; which of them have how many comes round again."""
    plan, names = clients.plan, clients.population_names
    copies, most, each = clients.method.placement.copies, clients.portions.users, clients.steps.local_steps
    if isinstance(plan.participation, float | int) and len(names) == len(clients.trainers):
        whole = -(-sample_size(plan.participation, len(names)) * copies // most) * each
        return lambda rounds: rounds * whole
    here = set(clients.names)
    period = len(plan.participation) if isinstance(plan.participation, Sequence) else 1
    present = [[n for n in participants(plan, r, names) if names[n] in here] for r in range(period)]
    steps = [len(cohorts(who * copies, most)) * each for who in present]
    return lambda rounds: rounds // period * sum(steps) + sum(steps[: rounds % period])


def about(seconds: float) -> str:
    """A duration in round numbers."""
    for size, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"


class Course:
    """How far a run is, out of its events, and how long the rest may take; a resumed one starts in its middle."""

    def __init__(self, clients: Clients, title: str | None):
        self.title = title or f"{clients.method.name}, seed {clients.plan.seed}"
        self._before = steps_before(clients)
        self.rounds = clients.plan.training.rounds if clients.method.trains else 0
        self.total = self._before(self.rounds)
        self.round, self.done, self.started_at = 0, 0, -1
        self.evaluating, self.result = False, ""
        self._began = time.perf_counter()

    def __call__(self, event: Event) -> None:
        """Take one event."""
        if event["event"] == "step":
            self.round, self.evaluating = event["round"], event.get("evaluating", False)
            if not self.evaluating:
                self._step(event["advance"])
        elif event["event"] == "evaluation":
            self.result = f"test {_found(event)} after round {event['round']}"
        elif event["event"] == "end":
            self.result = f"test {_found(event)}"

    def _step(self, advance: int) -> None:
        if self.started_at < 0:
            self.started_at = self.done = self._before(self.round - 1)
            self._began = time.perf_counter()
        self.done += advance

    @property
    def seconds(self) -> float:
        """Since the first local iteration."""
        return time.perf_counter() - self._began

    @property
    def left(self) -> str:
        """How long the rest may take, from what has been done so far; nothing where that cannot be said."""
        done, rest = self.done - self.started_at, self.total - self.done
        return f" · about {about(self.seconds * rest / done)} left" if self.started_at >= 0 < done and rest else ""

    @property
    def place(self) -> str:
        """What is being done."""
        if self.evaluating:
            return f"evaluating after round {self.round}/{self.rounds}"
        return f"round {self.round}/{self.rounds}, local step {self.done:,} of {self.total:,}"


def _found(event: Event) -> str:
    measure = measure_of(event)
    sample = f" ({told})" if (told := sample_told(event)) else ""
    return f"{measure} {number(event[f'mean_test_{measure}'], measure)}{sample}"


# -------------------------------------------------------------------- nothing


class Silent:
    """Says nothing."""

    @contextmanager
    def waiting(self, message: str) -> Iterator[None]:
        """Only waits."""
        yield

    def say(self, line: str) -> None:
        """Print nothing."""

    def watch(self, clients: Clients, title: str | None = None) -> Observer:
        """An observer that does nothing."""
        return lambda event: None

    def clear(self) -> None:
        """There is nothing to take away."""


# -------------------------------------------------------------------- bars


def _columns() -> tuple[ProgressColumn, ...]:
    left = (TextColumn("left"), TimeRemainingColumn())
    told = TextColumn("{task.description}", markup=False)
    return (told, BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), *left)


class Bars:
    """Moves a bar by local iterations of cohorts."""

    def __init__(self, progress: Progress):
        self._progress = progress

    @contextmanager
    def waiting(self, message: str) -> Iterator[None]:
        """A bar without an end, while it lasts."""
        task = self._progress.add_task(message, total=None)
        try:
            yield
        finally:
            self._progress.remove_task(task)

    def say(self, line: str) -> None:
        """Print one line above the bars."""
        self._progress.console.print(printable(line), markup=False, highlight=False, soft_wrap=True)

    def watch(self, clients: Clients, title: str | None = None) -> Observer:
        """A bar of its own for a run."""
        course = Course(clients, title)
        task = self._progress.add_task(printable(course.title), total=course.total or None)

        def take(event: Event) -> None:
            was = course.started_at
            course(event)
            if course.started_at != was:
                self._progress.reset(task, completed=course.started_at)  # a resumed run has done so much before
            training = event["event"] == "step" and not course.evaluating
            doing = f"round {course.round}" if training else "evaluating" if event["event"] == "step" else course.result
            self._progress.update(task, completed=course.done, description=printable(f"{course.title} · {doing}"))

        return take

    def clear(self) -> None:
        """Take away all bars."""
        for task in self._progress.task_ids:
            self._progress.remove_task(task)


# -------------------------------------------------------------------- lines


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _notebook() -> Callable[[str], None]:
    """Writes to one place below a notebook's cell, each line over the one before."""
    import importlib

    display = importlib.import_module("IPython.display").display
    handle = display({"text/plain": ""}, raw=True, display_id=True)
    return lambda line: handle.update({"text/plain": line}, raw=True)


class Lines:
    """Lines for rounds and for whatever takes long, at least one every :data:`LONG_SECONDS`.

    Each round has a line in runs of up to :data:`FEW_ROUNDS`. In longer ones the first round has, and later ones where
    there was no line for :data:`PAUSE_SECONDS`, so that thousands of short rounds do not fill a log.
    """

    def __init__(self, say: Callable[[str], None], *, stamped: bool = True):
        self._write, self._stamped = say, stamped
        self._doing: Callable[[], str] | None = None  # nothing that takes long
        self._said_at = time.perf_counter()
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._speak_up, name="comingle-progress", daemon=True)

    def __enter__(self) -> Lines:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watcher.join()

    @contextmanager
    def waiting(self, message: str) -> Iterator[None]:
        """A line when it begins."""
        began = time.perf_counter()
        self.say(message)
        self._doing = lambda: f"still {message} after {about(time.perf_counter() - began)}"
        try:
            yield
        finally:
            self._doing = None

    def watch(self, clients: Clients, title: str | None = None) -> Observer:
        """Lines for rounds of a run, with the training loss, mean over users, and one for its end."""
        course, told, begun = Course(clients, title), "", False

        def take(event: Event) -> None:
            nonlocal told, begun
            course(event)
            if event["event"] == "step":
                self._doing = lambda: f"{course.title} · {course.place}{course.left}"
            elif event["event"] == "round":
                begun, waits = True, begun and course.rounds > FEW_ROUNDS
                if waits and time.perf_counter() - self._said_at < PAUSE_SECONDS:
                    return
                losses = event["train_loss_nats"].values()
                loss = f"training loss {fmean(losses):.4g}" if losses else "nobody was drawn"
                new = f" · {course.result}" if course.result != told else ""
                told = course.result
                self.say(f"{course.title} · round {event['round']}/{course.rounds} · {loss}{new}{course.left}")
            elif event["event"] == "end":
                self._doing = None
                self.say(f"{course.title} · done after {about(course.seconds)} · {course.result}")

        return take

    def clear(self) -> None:
        """Lines stay."""

    def say(self, line: str) -> None:
        """Print one line, with the time in front where lines are stamped."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S ") if self._stamped else ""
        self._said_at = time.perf_counter()
        self._write(stamp + printable(line))

    def _speak_up(self) -> None:
        while not self._ended.wait(max(0.01, self._said_at + LONG_SECONDS - time.perf_counter())):
            if time.perf_counter() - self._said_at < LONG_SECONDS:  # there was a line in the meantime
                continue
            self._said_at = time.perf_counter()
            if (doing := self._doing) is not None:
                self.say(doing())
