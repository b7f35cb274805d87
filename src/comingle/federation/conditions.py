"""Conditions under which a device trains, set by the client's user, and limits on its use. The module imports no torch.

Conditions are checked before a task that trains or evaluates, and every few seconds between local steps. While one does
not hold, training is paused. A task that cannot be completed in time is declined with a reason.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from datetime import time as TimeOfDay
from pathlib import Path
from typing import Any

import psutil

from comingle.utils.errors import DeclinedError, RecipeError, RunError
from comingle.utils.records import write_text

CHECK_SECONDS = 2.0
"""Shortest time between two checks of the conditions during local steps, and pause between two checks while waiting."""
REPLY_SECONDS = 5.0
"""Time before a task's deadline at which a paused client declines it, so that the server gets the reply."""
_REPLY_SHARE = 0.1
"""Largest share of a task's time that is reserved for the reply."""

IDLE_PERCENT = 25.0
"""Load of other processes, as a percentage of all cores, below which a device is idle."""
_SAMPLE_SECONDS, _STALE_SECONDS = 1.0, 10.0
"""Shortest time over which the load is measured, and age above which a measurement is not used."""
_BUSY = ("user", "nice", "system", "irq", "softirq")
"""Kinds of processor time that count as load; a system lacks some of them."""

LocalTime = Callable[[], datetime]
"""Returns the current time in the device's time zone."""
Wait = Callable[[float], object]
"""Waits up to some seconds, in which other work may be done."""


def local_time() -> datetime:
    """Return the current time in the device's time zone."""
    return datetime.now(UTC).astimezone()


class Condition(ABC):
    """A condition that has to hold while a device trains."""

    @abstractmethod
    def unmet(self, now: datetime) -> str:
        """Return why the condition does not hold, as a short phrase; an empty string if it holds.

        Args:
            now: The current local time.
        """

    def seconds_until_met(self, now: datetime) -> float:
        """Return the time in seconds until the condition can hold at the earliest; 0 if this is unknown."""
        return 0.0


class IdleCondition(Condition):
    """Other processes use less than :data:`IDLE_PERCENT` of all cores."""

    def __init__(self, wait: Wait = time.sleep, *, max_percent: float = IDLE_PERCENT) -> None:
        """Create the condition; the load is measured when it is checked.

        Args:
            wait: Waits while the load is measured, if the last measurement is too old.
            max_percent: Load of others, as a percentage of all cores, from which on the device is not idle.
        """
        self._wait, self._max_percent = wait, max_percent
        self._process = psutil.Process()
        self._sample: tuple[float, float] | None = None  # time on the monotonic clock, processor seconds of others
        self._percent = 0.0  # result of the last measurement

    def unmet(self, now: datetime) -> str:
        """Return the load by other processes as a phrase if the device is not idle; an empty string if it is.

        Args:
            now: Not used, as the condition does not depend on the time.
        """
        percent = self.measure()
        if percent < self._max_percent:
            return ""
        return f"not idle: others use {percent:.0f}% of the processor (allowed: below {self._max_percent:g}%)"

    def measure(self) -> float:
        """Return the load of other processes since the last call, as a percentage of all cores.

        If the last call is more than 10 seconds ago, the load is measured in the next second. Less than a second after
        a measurement, its result is returned again.
        """
        now, seconds_of_others = self._read()
        if self._sample is None or now - self._sample[0] > _STALE_SECONDS:
            sample_time, sample_seconds = now, seconds_of_others
            while now - sample_time < _SAMPLE_SECONDS:
                self._wait(_SAMPLE_SECONDS - (now - sample_time))
                now, seconds_of_others = self._read()
        else:
            sample_time, sample_seconds = self._sample
            is_too_short = now - sample_time < _SAMPLE_SECONDS
            if is_too_short:
                return self._percent
        available_seconds = (now - sample_time) * (psutil.cpu_count() or 1)
        self._percent = max(0.0, 100.0 * (seconds_of_others - sample_seconds) / available_seconds)
        self._sample = now, seconds_of_others
        return self._percent

    def _read(self) -> tuple[float, float]:
        """Return the time on the monotonic clock, and the processor seconds that other processes have used so far."""
        of_system, of_this_process = psutil.cpu_times(), self._process.cpu_times()
        seconds_of_all = sum(getattr(of_system, kind, 0.0) for kind in _BUSY)
        return time.monotonic(), seconds_of_all - of_this_process.user - of_this_process.system


def _read_battery() -> Any:
    """Return psutil's record of the battery; None if the device has none or its system does not say."""
    return psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None


class PluggedInCondition(Condition):
    """The device is connected to power. A device without a battery always is."""

    def __init__(self, read: Callable[[], Any] = _read_battery) -> None:
        """Create the condition.

        Args:
            read: Returns a record of the battery with the attribute ``power_plugged``; None without a battery.
        """
        self._read = read

    def unmet(self, now: datetime) -> str:
        """Return "not plugged in" if the condition does not hold, else an empty string.

        It holds for a device without a battery. With a battery, it does not hold if the system cannot tell whether the
        device is plugged in.

        Args:
            now: Not used, as the condition does not depend on the time.
        """
        battery = self._read()  # None without a battery
        if battery is None or battery.power_plugged:
            return ""
        return "not plugged in"


class TimeWindowCondition(Condition):
    """The local time is in a daily window, which may include midnight."""

    def __init__(self, start: TimeOfDay, end: TimeOfDay) -> None:
        """Create the condition.

        Args:
            start: Beginning of the window.
            end: Its end, which does not belong to it. If it is before ``start``, it is on the next day.
        """
        self._start, self._end = start, end

    def unmet(self, now: datetime) -> str:
        """Return for example "outside 22:00-06:00" if the time is outside the window, else an empty string."""
        time_of_day = now.time()
        if self._start < self._end:
            is_inside = self._start <= time_of_day < self._end
        else:  # the window includes midnight
            is_inside = time_of_day >= self._start or time_of_day < self._end
        return "" if is_inside else f"outside {self._start:%H:%M}-{self._end:%H:%M}"

    def seconds_until_met(self, now: datetime) -> float:
        """Return the time until the window begins; 0 within it."""
        is_inside = not self.unmet(now)
        if is_inside:
            return 0.0
        begins_tomorrow = now.time() >= self._start
        day = now.date() + timedelta(days=1) if begins_tomorrow else now.date()
        # `astimezone` accounts for clocks that are changed until then.
        begin = datetime.combine(day, self._start).astimezone(now.tzinfo)
        return (begin - now).total_seconds()


_WINDOW = re.compile(r"between\s+(\d{1,2}:\d{2})\s*-\s*(\d{1,2}:\d{2})")


def parse_condition(text: str, wait: Wait = time.sleep) -> Condition:
    """Return the condition that a text describes: ``idle``, ``plugged-in`` or ``between 22:00-06:00``.

    Args:
        text: The text.
        wait: Waits while the load is measured, for ``idle``.

    Raises:
        RecipeError: The text describes no condition.
    """
    if text == "idle":
        return IdleCondition(wait)
    if text == "plugged-in":
        return PluggedInCondition()
    allowed = 'idle, plugged-in, "between 22:00-06:00" (in quotes, with two different times)'
    error = RecipeError(f"got {text!r}; allowed: {allowed}")
    window = _WINDOW.fullmatch(text.strip())
    if window is None:
        raise error
    try:
        start, end = (datetime.strptime(time_text, "%H:%M").time() for time_text in window.groups())
    except ValueError:  # an hour above 23 or a minute above 59
        raise error from None
    if start == end:
        raise error
    return TimeWindowCondition(start, end)


UPLOADS = "uploads.json"
"""File in a state folder: the local date, and the bytes sent since its midnight."""


class UploadCounter:
    """Bytes of a user's answers since local midnight, stored in its state folder, and their limit."""

    def __init__(self, folder: Path, max_bytes: int | None, clock: LocalTime = local_time) -> None:
        """Create the counter of the bytes that a user uploads in a day, to keep them below the user's limit.

        Args:
            folder: The user's state folder, in which a file stores the count.
            max_bytes: Limit on the bytes per day; None for no limit, so that nothing is counted.
            clock: Returns the local time, from which the day follows.
        """
        self._path, self._max_bytes, self._clock = folder / UPLOADS, max_bytes, clock

    def objection(self, upload_bytes: int) -> str:
        """Return why an upload may not be sent today, as a short phrase; an empty string if it may.

        Args:
            upload_bytes: Size of the upload.
        """
        if self._max_bytes is None:
            return ""
        sent_bytes = self.sent_today()
        if sent_bytes + upload_bytes <= self._max_bytes:
            return ""

        def in_megabytes(num_bytes: int) -> str:
            return f"{num_bytes / 1e6:,.2f} MB"

        return (
            f"{in_megabytes(sent_bytes)} were sent today, the upload has {in_megabytes(upload_bytes)}; "
            f"allowed: {in_megabytes(self._max_bytes)} per day"
        )

    def add(self, sent_bytes: int) -> None:
        """Count bytes that are about to be sent.

        Raises:
            OSError: The disk cannot be written to.
        """
        if self._max_bytes is not None:
            content = {"date": self._today(), "bytes": self.sent_today() + sent_bytes}
            write_text(self._path, json.dumps(content), private=True)

    def sent_today(self) -> int:
        """Return the bytes that were counted since local midnight.

        Raises:
            RunError: The file is damaged.
        """
        if not self._path.exists():
            return 0
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            is_of_today = content["date"] == self._today()
            return int(content["bytes"]) if is_of_today else 0
        except (ValueError, KeyError, TypeError):
            raise RunError(f"{self._path}: damaged; delete it to count from 0 again") from None

    def _today(self) -> str:
        """Return today's date, as the uploads of a day are limited."""
        return self._clock().date().isoformat()


class DeviceConditions:
    """Conditions of one user's client: waits until they hold, or declines a task."""

    def __init__(
        self,
        conditions: Sequence[Condition] = (),
        *,
        uploads: UploadCounter | None = None,
        say: Callable[[str], None] = lambda line: None,
        wait: Wait = time.sleep,
        clock: LocalTime = local_time,
    ) -> None:
        """Create the conditions of a client without a task.

        Args:
            conditions: Conditions that all have to hold while the device trains.
            uploads: Counts bytes that are sent; None without a limit.
            say: Called with each line to show to the user.
            wait: Waits between two checks of conditions that do not hold.
            clock: Returns the local time.
        """
        self._conditions, self._uploads = tuple(conditions), uploads
        self._say, self._wait, self._clock = say, wait, clock
        self._deadline = math.inf  # in seconds since 1970; time for the reply is subtracted
        self._steps_left = 0  # local steps of the current task
        self._checked_at = self._step_began = 0.0  # on the monotonic clock
        self._step_seconds = 0.0  # of the last local step, without pauses
        self.paused_seconds = 0.0
        """Total time of the pauses within the local steps of the current task."""

    def begin_task(self, steps: int, upload_bytes: int, deadline: float) -> None:
        """Wait until a task may begin.

        Args:
            steps: Number of its local steps; 0 if it only evaluates.
            upload_bytes: Size of its upload; 0 if it has none.
            deadline: Time until which the server waits for the answer, in seconds since 1970.

        Raises:
            DeclinedError: The task cannot be completed in time, or its upload exceeds the limit of today.
        """
        if upload_bytes > 0 and self._uploads is not None:
            objection = self._uploads.objection(upload_bytes)
            if objection:
                raise DeclinedError(f"declined: {objection}")
        self._deadline = deadline
        if not math.isinf(deadline):
            seconds_for_task = deadline - self._clock().timestamp()
            self._deadline -= min(REPLY_SECONDS, _REPLY_SHARE * seconds_for_task)  # time for sending the answer
        self._steps_left = steps
        self._wait_until_met()
        self.paused_seconds, self._step_began = 0.0, time.monotonic()

    def end_step(self) -> None:
        """Record that a local step has ended, and pause before the next one while a condition does not hold.

        Raises:
            DeclinedError: The remaining steps cannot be completed in time.
        """
        now = time.monotonic()
        self._step_seconds = now - self._step_began
        self._steps_left -= 1
        check_is_due = now - self._checked_at >= CHECK_SECONDS
        if self._steps_left > 0 and check_is_due:
            self._wait_until_met()
            self.paused_seconds += time.monotonic() - now
        self._step_began = time.monotonic()

    def training_clock(self) -> float:
        """Return the seconds of a clock that stops during pauses within local steps."""
        return time.perf_counter() - self.paused_seconds

    def count_upload(self, sent_bytes: int) -> None:
        """Count an answer that is about to be sent towards the user's daily upload limit, if there is one.

        Args:
            sent_bytes: Size of the answer.
        """
        if self._uploads is not None:
            self._uploads.add(sent_bytes)

    def _wait_until_met(self) -> None:
        """Wait until all conditions hold.

        Raises:
            DeclinedError: The remaining local steps cannot be taken in time once the conditions hold.
        """
        began, last_reason = time.monotonic(), ""  # why the conditions did not hold at the last check
        while True:
            now = self._clock()
            reason, seconds_until_met = self._unmet(now)
            has_waited = last_reason != ""
            if not reason and not has_waited:  # no time was lost, so the deadline is not checked
                break
            training_seconds = self._steps_left * self._step_seconds
            seconds_left = self._deadline - now.timestamp()
            if seconds_until_met + training_seconds >= seconds_left:
                raise DeclinedError(f"declined: {reason or last_reason}")
            if not reason:
                self._say(f"training continues after {time.monotonic() - began:.0f} s")
                break
            is_new_reason = reason.partition(":")[0] != last_reason.partition(":")[0]  # numbers follow after the colon
            if is_new_reason:
                self._say(f"paused: {reason}")
            last_reason = reason
            self._wait(min(CHECK_SECONDS, seconds_left))
        self._checked_at = time.monotonic()

    def _unmet(self, now: datetime) -> tuple[str, float]:
        """Return why a condition does not hold, and the seconds until all may hold; ("", 0) if all hold.

        Args:
            now: The current local time.
        """
        for condition in self._conditions:
            reason = condition.unmet(now)
            if reason:
                return reason, max(other.seconds_until_met(now) for other in self._conditions)
        return "", 0.0


THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Environment variables with the number of threads of numeric libraries, read when these are imported."""


def limit_threads(max_threads: int) -> None:
    """Limit the threads of numeric libraries in this process and in processes that it starts, before torch is imported.

    Args:
        max_threads: Largest number of threads. Lower limits in the environment stay.
    """
    for variable in THREADS:
        current = os.environ.get(variable, "")
        is_lower = current.isdecimal() and 0 < int(current) < max_threads
        if not is_lower:
            os.environ[variable] = str(max_threads)


def lower_priority(niceness: int) -> None:
    """Lower the priority of this process and of those that it starts.

    Args:
        niceness: Increment of the niceness, from 0 to 19. On Windows, which has classes of priorities instead, values
            from 1 mean "below normal" and from 10 "idle".
    """
    if sys.platform == "win32":
        priority_class = psutil.IDLE_PRIORITY_CLASS if niceness >= 10 else psutil.BELOW_NORMAL_PRIORITY_CLASS
        psutil.Process().nice(priority_class)
    else:
        os.nice(niceness)
