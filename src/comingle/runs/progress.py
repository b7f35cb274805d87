"""Progress of runs, on stderr: a bar in a terminal, one line that changes in a notebook, lines elsewhere."""

from __future__ import annotations

import math
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
from comingle.reports.formatting import format_duration
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
"""Operation before the first round, as progress shows it."""

_LOADING_NET = "loading the net and the users' data"


def loading(recipe: Recipe) -> str:
    """Return the message that is shown while the data of a recipe, and its base model or net, are loaded."""
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


def cohort_steps(clients: Clients) -> Callable[[int], int]:
    """Return a function that counts cohort steps: ``count(n)`` is their number in the first ``n`` rounds.

    A cohort step is one local step of one cohort, the users that are trained in one batch. If a method trains several
    copies of each user's tensors, each copy counts as a user of a cohort.

    Args:
        clients: The clients of the run, in this process.
    """
    plan = clients.plan
    names = clients.population_names
    copies = clients.method.placement.copies
    cohort_size = clients.pass_size.users
    local_steps = clients.steps.local_steps
    has_all_users = len(names) == len(clients.trainers)  # False if several processes share the users
    if isinstance(plan.participation, float | int) and has_all_users:  # all rounds have equally many participants
        num_copies = sample_size(plan.participation, len(names)) * copies
        num_cohorts = math.ceil(num_copies / cohort_size)
        steps_per_round = num_cohorts * local_steps

        def count_in_equal_rounds(rounds: int) -> int:
            return rounds * steps_per_round

        return count_in_equal_rounds

    # The recipe may list the participants of each round; after the last round of the list, the list begins anew.
    rounds_in_list = len(plan.participation) if isinstance(plan.participation, Sequence) else 1
    names_here = set(clients.names)  # each process counts only the steps of its own users
    steps_in_list: list[int] = []  # of each round
    for round_number in range(rounds_in_list):
        users_here = [number for number in participants(plan, round_number, names) if names[number] in names_here]
        repeated_for_copies = users_here * copies  # [0, 2, 0, 2] for users 0 and 2 with 2 copies each
        num_cohorts = len(cohorts(repeated_for_copies, cohort_size))
        steps_in_list.append(num_cohorts * local_steps)

    def count_in_listed_rounds(rounds: int) -> int:
        whole_lists, further_rounds = divmod(rounds, rounds_in_list)
        return whole_lists * sum(steps_in_list) + sum(steps_in_list[:further_rounds])

    return count_in_listed_rounds


class RunProgress:
    """Progress of a run in cohort steps (:func:`cohort_steps`), counted from its events, and the time left.

    Args:
        clients: The clients of the run.
        title: The name of the run; by default its method and seed.
    """

    def __init__(self, clients: Clients, title: str | None):
        """Start to count at the first round.

        Args:
            clients: The users who are trained.
            title: The name of the run; None for its method and seed.
        """
        self.title = title or f"{clients.method.name}, seed {clients.plan.seed}"
        self._count_cohort_steps = cohort_steps(clients)  # from a number n of rounds to the steps in the first n
        self.rounds = clients.plan.training.rounds if clients.method.trains else 0
        self.all_steps = self._count_cohort_steps(self.rounds)
        self.round = 0
        self.steps_done = 0
        self.steps_before_resume: int | None = None  # those done before this process; None before the first step
        self.evaluating = False  # whether an evaluation runs
        self.alone = False  # whether users train alone, after the last round of the federation
        self.result = ""  # the newest test result, as text to print
        self.resumed_line = ""  # a line to print at the first step of a resumed run
        self._began = time.perf_counter()

    def __call__(self, event: Event) -> None:
        """Update the progress by an event of the run: a step of a cohort, an evaluation or the end."""
        if event["event"] == "step":
            self.round = event["round"]
            self.evaluating = event.get("evaluating", False)  # the event says that an evaluation begins
            self.alone = event.get("alone", False)
            if not self.evaluating and not self.alone:
                self._count_steps(event["advance"])  # number of cohort steps since the last event
        elif event["event"] == "evaluation":
            self.result = f"test {_test_result(event)} after round {event['round']}"
        elif event["event"] == "end":
            self.result = f"test {_test_result(event)}"

    def _count_steps(self, advance: int) -> None:
        """Count the cohort steps of an event; at the first one, count also those of the rounds before the checkpoint.

        Only a resumed run has such rounds, which this process does not train.

        Args:
            advance: The number of cohort steps since the last event.
        """
        if self.steps_before_resume is None:  # the first event
            rounds_before = self.round - 1  # 0 unless the run is resumed
            self.steps_before_resume = self._count_cohort_steps(rounds_before)
            self.steps_done = self.steps_before_resume
            self._began = time.perf_counter()
            if rounds_before > 0:
                self.resumed_line = f"{self.title} · resumed from the checkpoint of round {rounds_before}"
        self.steps_done += advance

    @property
    def seconds(self) -> float:
        """Seconds since the first local step."""
        return time.perf_counter() - self._began

    @property
    def time_left(self) -> str:
        """Estimated time left at the speed so far, such as " · about 3 h left"; empty before the first step."""
        if self.steps_before_resume is None or self.alone:
            return ""
        steps_taken_here = self.steps_done - self.steps_before_resume
        steps_left = self.all_steps - self.steps_done
        if steps_taken_here <= 0 or steps_left == 0:
            return ""
        seconds_left = self.seconds * steps_left / steps_taken_here
        return f" · about {format_duration(seconds_left)} left"

    @property
    def position(self) -> str:
        """Where the run is, such as "round 2/10, local step 30 of 200" or "evaluating after round 2/10"."""
        if self.evaluating:
            return f"evaluating after round {self.round}/{self.rounds}"
        if self.alone:
            return f"each user alone, round {self.round}/{self.rounds}"
        return f"round {self.round}/{self.rounds}, local step {self.steps_done:,} of {self.all_steps:,}"


def _test_result(event: Event) -> str:
    """Return the mean test result as text, such as "perplexity 31.2"; also how many users, if not all were scored."""
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
        """Show nothing while an operation such as loading the base runs; ``message`` is not used."""
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
    """Return the columns of a bar, as in "fedavg · round 2 ━━━━━ 30/200 0:01:12 left 0:06:48"."""
    return (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )


class Bars:
    """Reporter with a bar that advances with the local steps of cohorts."""

    def __init__(self, progress: Progress):
        """Show bars in a progress display of rich."""
        self._progress = progress

    @contextmanager
    def waiting(self, message: str) -> Iterator[None]:
        """Show an indeterminate bar while the context is entered."""
        bar = self._progress.add_task(message, total=None)
        try:
            yield
        finally:
            self._progress.remove_task(bar)

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
        bar = self._progress.add_task(printable(run_progress.title), total=run_progress.all_steps or None)

        def update_bar(event: Event) -> None:
            """Move the bar by an event."""
            had_begun = run_progress.steps_before_resume is not None  # whether an earlier event was a step
            run_progress(event)
            if run_progress.resumed_line:
                self.say(run_progress.resumed_line)
                run_progress.resumed_line = ""
            if not had_begun and run_progress.steps_before_resume is not None:  # this event is the first step
                self._progress.reset(bar, completed=run_progress.steps_before_resume)
            if event["event"] != "step":
                status = run_progress.result
            elif run_progress.evaluating:  # an event "step" also says that an evaluation begins
                status = "evaluating"
            elif run_progress.alone:
                status = f"each user alone, round {run_progress.round}"
            else:
                status = f"round {run_progress.round}"
            description = printable(f"{run_progress.title} · {status}")
            self._progress.update(bar, completed=run_progress.steps_done, description=description)

        return update_bar

    def clear(self) -> None:
        """Remove all bars."""
        for bar in self._progress.task_ids:
            self._progress.remove_task(bar)


# -------------------------------------------------------------------- lines


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _notebook_line() -> Callable[[str], None]:
    """Return a function that writes a line below a notebook's cell, in place of the line before."""
    import importlib

    display = importlib.import_module("IPython.display").display
    handle = display({"text/plain": ""}, raw=True, display_id=True)

    def replace_line(line: str) -> None:
        handle.update({"text/plain": line}, raw=True)

    return replace_line


class Lines:
    """Reporter that prints a line per round and per long operation, at least one every :data:`LONG_SECONDS`.

    Runs of up to :data:`FEW_ROUNDS` rounds print each round. Longer runs print the first round, and later ones if there
    was no line for :data:`PAUSE_SECONDS`, so that thousands of short rounds do not fill a log.
    """

    def __init__(self, write: Callable[[str], None], *, stamped: bool = True):
        """Create a reporter; entering its context starts the thread that prints the progress of long operations.

        Args:
            write: Writes a line.
            stamped: Whether lines begin with the date and the time.
        """
        self._write = write
        self._stamped = stamped
        self._describe_operation: Callable[[], str] | None = None  # returns a line; None: no long operation runs
        self._last_line_at = time.perf_counter()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._print_long_operations, name="comingle-progress", daemon=True)

    def __enter__(self) -> Lines:
        """Start the thread that prints long operations."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    @contextmanager
    def waiting(self, message: str) -> Iterator[None]:
        """Print the message now, and again with the time that has passed after every :data:`LONG_SECONDS`."""
        began = time.perf_counter()

        def describe_wait() -> str:
            return f"still {message} after {format_duration(time.perf_counter() - began)}"

        self.say(message)
        self._describe_operation = describe_wait  # called by the thread
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
        printed_result = ""  # the last result that was printed
        is_first_round = True

        def describe_round() -> str:
            return f"{run_progress.title} · {run_progress.position}{run_progress.time_left}"

        def print_round(event: Event) -> None:
            """Print the training loss of a round that has ended, and the test result if there is a new one."""
            nonlocal printed_result
            losses = event["train_loss_nats"].values()
            loss = f"training loss {fmean(losses):.4g}" if losses else "no participants"
            new_result = ""
            if run_progress.result != printed_result:
                new_result = f" · {run_progress.result}"
            printed_result = run_progress.result
            position = f"round {event['round']}/{run_progress.rounds}"
            self.say(f"{run_progress.title} · {position} · {loss}{new_result}{run_progress.time_left}")

        def print_event(event: Event) -> None:
            """Print a line when a round ends, unless many short rounds would fill the log, and when the run ends."""
            nonlocal is_first_round
            run_progress(event)
            if run_progress.resumed_line:
                self.say(run_progress.resumed_line)
                run_progress.resumed_line = ""
            if event["event"] == "step":
                self._describe_operation = describe_round  # called by the thread
            elif event["event"] == "round":
                may_skip = run_progress.rounds > FEW_ROUNDS and not is_first_round
                had_recent_line = time.perf_counter() - self._last_line_at < PAUSE_SECONDS
                is_first_round = False
                if not (may_skip and had_recent_line):
                    print_round(event)
            elif event["event"] == "end":
                self._describe_operation = None
                duration = format_duration(run_progress.seconds)
                self.say(f"{run_progress.title} · done after {duration} · {run_progress.result}")

        return print_event

    def clear(self) -> None:
        """Keep all lines."""

    def say(self, line: str) -> None:
        """Print one line, with the date and the time in front unless the reporter is for a notebook."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S ") if self._stamped else ""
        self._last_line_at = time.perf_counter()
        self._write(stamp + printable(line))

    def _print_long_operations(self) -> None:
        """Print the current operation whenever there was no line for :data:`LONG_SECONDS`; runs in a thread."""
        while True:
            seconds_to_wait = self._last_line_at + LONG_SECONDS - time.perf_counter()
            has_ended = self._ended.wait(timeout=max(0.01, seconds_to_wait))  # at least 10 ms: no busy-waiting
            if has_ended:
                return
            was_line_printed = time.perf_counter() - self._last_line_at < LONG_SECONDS
            if was_line_printed:
                continue
            self._last_line_at = time.perf_counter()
            describe_operation = self._describe_operation  # read once, since the main thread may set it to None
            if describe_operation is not None:
                self.say(describe_operation())
