"""The thread that steps an engine, and the queue in front of it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from comingle.serving.engine import Engine, Request

logger = logging.getLogger("comingle")


class Overloaded(Exception):
    """As many requests wait as may."""


class Worker:
    """Steps ``engine`` in a thread of its own; at most ``queue`` requests wait for a row."""

    def __init__(self, engine: Engine, *, queue: int) -> None:
        self.engine, self.queue = engine, queue
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="comingle-serving", daemon=True)
        self._thread.start()

    def ask(self, requests: list[Request]) -> None:
        """Queue requests: all of them, or none.

        Raises:
            Overloaded: not all of them find a place.
            DataError: one cannot be answered.
        """
        for request in requests:
            self.engine.check(request)
        with self._changed:
            waiting = sum(not request.cancelled for request in tuple(self.engine.waiting))
            if self._closed or waiting + len(requests) > self.queue + self.engine.free:
                raise Overloaded(f"{waiting} requests wait already; try again later")
            self.engine.waiting.extend(requests)
            self._changed.notify()

    def call(self, job: Callable[[], Any]) -> Future[Any]:
        """Have something computed between two steps, as the modules belong to the step under way."""
        future: Future[Any] = Future()
        with self._changed:
            if len(self._jobs) >= self.queue:
                raise Overloaded(f"{len(self._jobs)} requests wait already; try again later")
            self._jobs.append((job, future))
            self._changed.notify()
        return future

    def close(self) -> None:
        """End the thread after the step under way."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._jobs or self.engine.busy)
                if self._closed:
                    return
            while self._jobs:
                self._compute(*self._jobs.popleft())
            try:
                if self.engine.busy:
                    self.engine.step()
            except Exception as error:  # whatever it is, those who wait are told, and the next are answered
                logger.exception("a step failed")
                self.engine.drop(error)

    def _compute(self, job: Callable[[], Any], future: Future[Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(job())
        except Exception as error:
            future.set_exception(error)
