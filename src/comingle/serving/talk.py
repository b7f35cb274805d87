"""The way of an answer from the engine's thread to a client that may go away at any time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import Request as Http

from comingle.serving.answers import DONE, Answer, Choice, event
from comingle.serving.engine import Piece, Request
from comingle.serving.errors import Refused


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
