"""The engine's thread and its answers to clients."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from typing import Any

from fastapi import Request as Http

from comingle.serving.answers import DONE, Answer, Choice, event
from comingle.serving.engine import Engine, Piece, Request
from comingle.serving.schemas import Refused


class Talk:
    """The way of pieces from the engine's thread to the event loop."""

    def __init__(self) -> None:
        self.loop, self.queue = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Piece]]()
        self.requests: list[Request] = []

    def teller(self, number: int) -> Callable[[Piece], None]:
        """Hands over the pieces of one text."""

        def tell(piece: Piece) -> None:
            if not self.loop.is_closed():
                self.loop.call_soon_threadsafe(self.queue.put_nowait, (number, piece))

        return tell

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """All pieces of all texts; whoever stops listening has them all cancelled."""
        left = len(self.requests)
        try:
            while left:
                number, piece = await self.queue.get()
                if piece.error is not None:
                    raise Refused(500, "the model failed on this; the server's log says why")
                left -= piece.finish is not None
                yield number, piece
        finally:
            for request in self.requests:
                request.cancelled = True


async def whole(talk: Talk, ends: Sequence[int]) -> list[Choice]:
    """All texts, when they have ended."""
    choices = [Choice() for _ in talk.requests]
    async with aclosing(talk.pieces()) as pieces:
        async for number, piece in pieces:
            choices[number].add(piece, ends)
    return choices


async def stream(talk: Talk, answer: Answer, ends: Sequence[int], *, usage: bool) -> AsyncIterator[str]:
    """The texts as they come, as server-sent events."""
    choices = [Choice() for _ in talk.requests]
    try:
        async with aclosing(talk.pieces()) as pieces:
            if answer.chat:
                yield answer.chunk([answer.first(number) for number in range(len(choices))])
            async for number, piece in pieces:
                said = choices[number].add(piece, ends)
                if piece.text or piece.finish or (answer.probable and said):
                    yield answer.chunk([answer.part(number, piece.text, said, piece.finish)])
    except Refused as error:
        yield event(error.body())
        return
    if usage:
        yield answer.chunk([], answer.usage(choices))
    yield DONE


async def while_connected(http: Http, work: Any) -> Any:
    """What ``work`` comes to; None where the client goes away first, and then it is cancelled."""

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
