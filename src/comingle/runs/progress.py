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

from comingle.config import Recipe
from comingle.privacy.accounting import sample_size
from comingle.training.client import Clients
from comingle.training.events import Event, Observer
from comingle.training.kinds.base import kind_of
from comingle.training.settings import cohorts, participants
from comingle.utils.records import describe_sample, measure_of, number
from comingle.utils.terminal import errors, printable

LONG_SECONDS = 30.0
"""Longest time without a line."""

FEW_ROUNDS = 100
"""Longer runs print a round only if there was no line for :data:`PAUSE_SECONDS`."""

PAUSE_SECONDS = 5.0

LOADING = "loading the base model and the users' data"
_LOADING_NET = "loading the net and the users' data"


def loading(recipe: Recipe) -> str:
    """Return what is shown while the data of a recipe, and its base model or net, are loaded."""
    return LOADING if kind_of(recipe).needs_base else _LOADING_NET


@runtime_checkable
class Reporter(Protocol):
    """Prints the progress of long operations."""

    def waiting(self, message: str) -> AbstractContextManager[object]:
        """Show a message while the context is entered."""
        ...

    def say(self, line: str) -> None:
        """Print one line."""
        ...

    def watch(self, clients: Clients, title: str | None = None) -> Observer:
        """Return an observer that shows a run's events; observe one run at a time."""
        ...

    def clear(self) -> None:
        """Remove the display of runs that have ended."""
        ...


@contextmanager
def reporting(*, quiet: bool = False) -> Iterator[Reporter]:
    """Yield a reporter: a bar in a terminal, one changing line in a notebook, lines elsewhere, or nothing if quiet."""
    if quiet:
        yield Silent()
    elif errors.is_jupyter:
        with Lines(_notebook_line(), stamped=False) as lines:
            yield lines
    elif errors.is_terminal:
        with Progress(*_bar_columns(), console=errors) as progress:
            yield Bars(progress)
    else:
        with Lines(_to_stderr) as lines:
            yield lines


def steps_before(clients: Clients) -> Callable[[int], int]:
    """Return a function from a number ``n`` of rounds to the number of cohort steps in the first ``n`` rounds.

    A cohort step is one local step of one cohort, the users that are trained in one batch. Progress is shown in this
    unit. If a method trains several copies of each user's tensors, each copy counts as a user of a cohort. If the
    recipe lists the participants of its rounds, the list repeats periodically.

    Args:
        clients: The clients of the run, in this process.
    """
    plan, names = clients.plan, clients.population_names
    copies, cohort_size = clients.method.placement.copies, clients.pass_size.users
    local_steps = clients.steps.local_steps
    has_all_users = len(names) == len(clients.trainers)  # else several processes share the users
    if isinstance(plan.participation, float | int) and has_all_users:  # all rounds have equally many participants
        num_rows = sample_size(plan.participation, len(names)) * copies
        steps_per_round = -(-num_rows // cohort_size) * local_steps  # cohorts, rounded up, times steps
        return lambda rounds: rounds * steps_per_round
    names_here = set(clients.names)  # if several processes share a run, each process counts only its own users
    period = len(plan.participation) if isinstance(plan.participation, Sequence) else 1
    steps_of_rounds: list[int] = []  # of one period
    for round_number in range(period):
        users_here = [number for number in participants(plan, round_number, names) if names[number] in names_here]
        steps_of_rounds.append(len(cohorts(users_here * copies, cohort_size)) * local_steps)
    return lambda rounds: rounds // period * sum(steps_of_rounds) + sum(steps_of_rounds[: rounds % period])


def format_duration(seconds: float) -> str:
    """Return a duration in the largest unit that makes it 2 or more, such as "90 s" or "3 h"."""
    for unit_seconds, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit_seconds:
            return f"{seconds / unit_seconds:.0f} {unit}"
    return f"{seconds:.0f} s"


class RunProgress:
    """Progress of a run from its events, and the estimated time left; a resumed run starts in the middle.

    Args:
        clients: The clients of the run.
        title: The name of the run; by default its method and seed.
    """

    def __init__(self, clients: Clients, title: str | None):
        # The unit of progress is a cohort step: one local step of the users that are trained in one batch.
        self.title = title or f"{clients.method.name}, seed {clients.plan.seed}"
        self._steps_before = steps_before(clients)  # maps a number n of rounds to the cohort steps in the first n
        self.rounds = clients.plan.training.rounds if clients.method.trains else 0
        self.total = self._steps_before(self.rounds)
        self.round = 0
        # Cohort steps that are done, and those of them that a resumed run had done before; -1 before the first event.
        self.done, self.done_before = 0, -1
        self.evaluating = False  # whether an evaluation runs
        self.result = ""  # the newest test result, as text to print
        self.resumed_line = ""  # at the first step of a resumed run: a line to print that says so
        self._began = time.perf_counter()

    def __call__(self, event: Event) -> None:
        """Update the progress by an event."""
        if event["event"] == "step":
            self.round, self.evaluating = event["round"], event.get("evaluating", False)
            if not self.evaluating:
                self._count_steps(event["advance"])
        elif event["event"] == "evaluation":
            self.result = f"test {_test_result(event)} after round {event['round']}"
        elif event["event"] == "end":
            self.result = f"test {_test_result(event)}"

    def _count_steps(self, advance: int) -> None:
        """Count cohort steps; at the first event of a resumed run, also those of the rounds before it.

        Args:
            advance: The number of cohort steps since the last event.
        """
        if self.done_before < 0:  # the first event: round `self.round` is running, which is 1 in a run from the start
            rounds_before = self.round - 1
            self.done_before = self.done = self._steps_before(rounds_before)
            self._began = time.perf_counter()
            if rounds_before > 0:
                self.resumed_line = f"{self.title} · resumed from the checkpoint of round {rounds_before}"
        self.done += advance

    @property
    def seconds(self) -> float:
        """Seconds since the first local step."""
        return time.perf_counter() - self._began

    @property
    def left(self) -> str:
        """Estimated time left at the speed so far, such as " · about 3 h left"; empty before the first step."""
        steps_taken, steps_left = self.done - self.done_before, self.total - self.done
        if self.done_before < 0 or steps_taken <= 0 or not steps_left:
            return ""
        return f" · about {format_duration(self.seconds * steps_left / steps_taken)} left"

    @property
    def place(self) -> str:
        """Round and local step, or the evaluation that runs."""
        if self.evaluating:
            return f"evaluating after round {self.round}/{self.rounds}"
        return f"round {self.round}/{self.rounds}, local step {self.done:,} of {self.total:,}"


def _test_result(event: Event) -> str:
    """Return the mean test result of an evaluation as text, with the number of users if not all were evaluated."""
    measure = measure_of(event)
    result = number(event[f"mean_test_{measure}"], measure)
    sample = describe_sample(event)
    if sample:
        return f"{measure} {result} ({sample})"
    return f"{measure} {result}"


# -------------------------------------------------------------------- nothing


class Silent:
    """Reporter that prints nothing."""

    @contextmanager
    def waiting(self, message: str) -> Iterator[None]:
        """Show nothing."""
        yield

    def say(self, line: str) -> None:
        """Print nothing."""

    def watch(self, clients: Clients, title: str | None = None) -> Observer:
        """Return an observer that does nothing."""
        return lambda event: None

    def clear(self) -> None:
        """Do nothing."""


# -------------------------------------------------------------------- bars


def _bar_columns() -> tuple[ProgressColumn, ...]:
    """Return the columns of a bar: description, bar, steps done of all steps, time elapsed and time left."""
    time_left = (TextColumn("left"), TimeRemainingColumn())
    description = TextColumn("{task.description}", markup=False)
    return (description, BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), *time_left)


class Bars:
    """Reporter with a bar that advances with the local steps of cohorts."""

    def __init__(self, progress: Progress):
        self._progress = progress

    @contextmanager
    def waiting(self, message: str) -> Iterator[None]:
        """Show an indeterminate bar while the context is entered."""
        task = self._progress.add_task(message, total=None)
        try:
            yield
        finally:
            self._progress.remove_task(task)

    def say(self, line: str) -> None:
        """Print one line above the bars."""
        self._progress.console.print(printable(line), markup=False, highlight=False, soft_wrap=True)

    def watch(self, clients: Clients, title: str | None = None) -> Observer:
        """Return an observer that moves a new bar with a run's events.

        Args:
            clients: The clients of the run, whose plan determines the number of steps.
            title: Name of the run beside the bar; None for its method and seed.
        """
        run_progress = RunProgress(clients, title)
        task = self._progress.add_task(printable(run_progress.title), total=run_progress.total or None)

        def update_bar(event: Event) -> None:
            """Move the bar by an event."""
            done_before = run_progress.done_before
            run_progress(event)
            if run_progress.resumed_line:
                self.say(run_progress.resumed_line)
                run_progress.resumed_line = ""
            if run_progress.done_before != done_before:  # the first step: a resumed run starts from there
                self._progress.reset(task, completed=run_progress.done_before)
            if event["event"] != "step":
                status = run_progress.result
            elif run_progress.evaluating:
                status = "evaluating"
            else:
                status = f"round {run_progress.round}"
            description = printable(f"{run_progress.title} · {status}")
            self._progress.update(task, completed=run_progress.done, description=description)

        return update_bar

    def clear(self) -> None:
        """Remove all bars."""
        for task in self._progress.task_ids:
            self._progress.remove_task(task)


# -------------------------------------------------------------------- lines


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _notebook_line() -> Callable[[str], None]:
    """Return a function that writes below a notebook's cell, each line over the last one."""
    import importlib

    display = importlib.import_module("IPython.display").display
    handle = display({"text/plain": ""}, raw=True, display_id=True)
    return lambda line: handle.update({"text/plain": line}, raw=True)


class Lines:
    """Reporter that prints a line per round and per long operation, at least one every :data:`LONG_SECONDS`.

    Runs of up to :data:`FEW_ROUNDS` rounds print each round. Longer runs print the first round, and later ones if there
    was no line for :data:`PAUSE_SECONDS`, so that thousands of short rounds do not fill a log.
    """

    def __init__(self, write: Callable[[str], None], *, stamped: bool = True):
        """Create a reporter; entering its context starts the thread that prints long operations.

        Args:
            write: Writes a line.
            stamped: Whether lines begin with the date and the time.
        """
        self._write, self._stamped = write, stamped
        self._describe_operation: Callable[[], str] | None = None  # returns a line; None: no long operation runs
        self._last_line_at = time.perf_counter()
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._print_overdue, name="comingle-progress", daemon=True)

    def __enter__(self) -> Lines:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watcher.join()

    @contextmanager
    def waiting(self, message: str) -> Iterator[None]:
        """Print the message now, and again whenever there was no line for :data:`LONG_SECONDS`."""
        began = time.perf_counter()
        self.say(message)
        self._describe_operation = lambda: f"still {message} after {format_duration(time.perf_counter() - began)}"
        try:
            yield
        finally:
            self._describe_operation = None

    def watch(self, clients: Clients, title: str | None = None) -> Observer:
        """Return an observer that prints rounds, with the mean training loss over users, and the end of the run.

        While a round takes longer than :data:`LONG_SECONDS`, a thread prints the local step that the round has reached.

        Args:
            clients: The clients of the run, whose plan determines the number of rounds and steps.
            title: Name of the run, with which each line begins; None for its method and seed.
        """
        run_progress = RunProgress(clients, title)
        printed_result, is_first_round = "", True

        def print_event(event: Event) -> None:
            """Print a line when a round ends, unless many short rounds would fill the log, and when the run ends."""
            nonlocal printed_result, is_first_round
            run_progress(event)
            if run_progress.resumed_line:
                self.say(run_progress.resumed_line)
                run_progress.resumed_line = ""
            if event["event"] == "step":
                # Called by the thread if no other line is printed for a while.
                self._describe_operation = lambda: f"{run_progress.title} · {run_progress.place}{run_progress.left}"
            elif event["event"] == "round":
                may_skip = run_progress.rounds > FEW_ROUNDS and not is_first_round
                is_first_round = False
                if may_skip and time.perf_counter() - self._last_line_at < PAUSE_SECONDS:
                    return
                losses = event["train_loss_nats"].values()
                loss = f"training loss {fmean(losses):.4g}" if losses else "no participants"
                result = ""
                if run_progress.result != printed_result:  # there is a new test result
                    result = f" · {run_progress.result}"
                printed_result = run_progress.result
                round_of = f"round {event['round']}/{run_progress.rounds}"
                self.say(f"{run_progress.title} · {round_of} · {loss}{result}{run_progress.left}")
            elif event["event"] == "end":
                self._describe_operation = None
                duration = format_duration(run_progress.seconds)
                self.say(f"{run_progress.title} · done after {duration} · {run_progress.result}")

        return print_event

    def clear(self) -> None:
        """Keep all lines."""

    def say(self, line: str) -> None:
        """Print one line, with the time in front where lines are stamped."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S ") if self._stamped else ""
        self._last_line_at = time.perf_counter()
        self._write(stamp + printable(line))

    def _print_overdue(self) -> None:
        """Print the current operation whenever there was no line for :data:`LONG_SECONDS`, in a thread of its own."""
        while True:
            seconds_left = self._last_line_at + LONG_SECONDS - time.perf_counter()
            has_ended = self._ended.wait(max(0.01, seconds_left))  # at least 10 ms, so as not to busy-wait
            if has_ended:
                return
            if time.perf_counter() - self._last_line_at < LONG_SECONDS:  # there was a line in the meantime
                continue
            self._last_line_at = time.perf_counter()
            describe_operation = self._describe_operation  # read once, since the main thread may set it to None
            if describe_operation is not None:
                self.say(describe_operation())
