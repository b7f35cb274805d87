"""Request schemas and errors of the OpenAI API, and the thread that runs the engine."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Request as Http
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from comingle.models.generation import Sampling
from comingle.serving.access import ApiError
from comingle.serving.answers import DONE, Answer, Choice, event
from comingle.serving.engine import Engine, Piece, Request

Result = TypeVar("Result")

UNSUPPORTED = "unsupported"
"""Error type for a key of the OpenAI API with a value that is not supported."""

_LONGEST_STOP = 1000
_NULL_OR_EMPTY: tuple[Any, ...] = (None, "", [], {})


def _accept_only(*allowed: object) -> BeforeValidator:
    """Return a validator for a key of the OpenAI API that this server does not implement.

    It accepts only values with which the key changes nothing, such as ``"n": 1`` for the number of answers, and
    replaces them by None. Every other value is an error, whose message lists the accepted ones that are not empty.

    Args:
        allowed: The accepted values.
    """
    listed = [json.dumps(item) for item in allowed if item not in _NULL_OR_EMPTY]
    message = f"not supported here{'; allowed: ' if listed else ''}{', '.join(listed)}"

    def check(value: object) -> None:
        # In Python True equals 1 and False equals 0.
        if not any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in allowed):
            raise PydanticCustomError(UNSUPPORTED, "{message}", {"message": message})

    return BeforeValidator(check)


NullOrEmpty = Annotated[None, _accept_only(*_NULL_OR_EMPTY)]
"""A key of the OpenAI API that is not supported: null or empty."""


def _as_list(value: object) -> object:
    return [] if value is None else [value] if isinstance(value, str) else value


def _join_parts(value: object) -> object:
    """Join the content of a message that consists of parts ``{"type": "text", "text": ...}`` to one text.

    Other values are returned unchanged, for pydantic to accept or to report.
    """
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        return value
    for part in value:
        kind = part.get("type", "text")
        other_keys = {key for key, item in part.items() if item is not None} - {"type", "text"}
        if kind != "text" or other_keys:
            # The message names one problem, cut to 40 characters: the kind of the part, or its first other key.
            unsupported = str(min(other_keys) if kind == "text" else kind)
            message = f"a part with {unsupported!r:.40} is not supported here; allowed: text"
            raise PydanticCustomError(UNSUPPORTED, "{message}", {"message": message})
    texts = [part.get("text") for part in value]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else value


Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=_LONGEST_STOP)]], BeforeValidator(_as_list), Field(max_length=4)
]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Strict):
    """Options of a stream; ``include_usage`` adds a last chunk with the numbers of tokens."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingKeys(_Strict):
    """Request keys that decide how tokens are sampled."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    stop: Stops = []
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    # Not supported.
    frequency_penalty: Annotated[None, _accept_only(None, 0)] = None
    presence_penalty: Annotated[None, _accept_only(None, 0)] = None
    logit_bias: NullOrEmpty = None
    # Extensions that other servers of this API have.
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=10)

    def sampling(self, max_new_tokens: int, seed: int) -> Sampling:
        """Return the sampling settings, with the API's defaults: temperature 1, no truncation.

        Args:
            max_new_tokens: Largest number of new tokens.
            seed: Seed of the random stream.
        """
        return Sampling(
            max_new_tokens=max_new_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            stop=tuple(self.stop),
            seed=seed,
        )


class _Request(SamplingKeys):
    """Keys of both kinds of completions. ``user`` and similar labels have no effect."""

    model: str
    n: int | None = Field(default=None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    user: str | None = None

    @model_validator(mode="after")
    def _is_streamed(self) -> _Request:
        if self.includes_usage and not self.stream:
            raise ValueError("stream_options: only with stream: true")
        return self

    @property
    def includes_usage(self) -> bool:
        """Whether a stream's last chunk contains the numbers of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatMessage(_Strict):
    """One turn; accepts the server's own answers as clients send them back, null keys included."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_join_parts)]
    # Not supported: templates do not use them.
    name: NullOrEmpty = None
    refusal: NullOrEmpty = None
    annotations: NullOrEmpty = None
    audio: NullOrEmpty = None
    function_call: NullOrEmpty = None
    tool_calls: NullOrEmpty = None
    tool_call_id: NullOrEmpty = None

    def plain(self) -> dict[str, str]:
        """Return the message as chat templates expect it."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class _WithoutTools(_Request):
    """Keys for tools, which are not supported."""

    function_call: Annotated[None, _accept_only(None, "none", "auto")] = None
    functions: NullOrEmpty = None
    parallel_tool_calls: Annotated[None, _accept_only(None, True)] = None
    tool_choice: Annotated[None, _accept_only(None, "none", "auto")] = None
    tools: NullOrEmpty = None
    web_search_options: Annotated[None, _accept_only(None)] = None


class _TextAlone(_WithoutTools):
    """Keys for other modalities and hosted services, which are not supported."""

    audio: Annotated[None, _accept_only(None)] = None
    modalities: Annotated[None, _accept_only(None, [], ["text"])] = None
    moderation: Annotated[None, _accept_only(None)] = None
    prediction: Annotated[None, _accept_only(None)] = None
    prompt_cache_options: Annotated[
        None, _accept_only(None, {}, {"mode": "implicit"}, {"ttl": "30m"}, {"mode": "implicit", "ttl": "30m"})
    ] = None
    prompt_cache_retention: Annotated[None, _accept_only(None, "in_memory")] = None
    reasoning_effort: Annotated[None, _accept_only(None, "none")] = None
    response_format: Annotated[None, _accept_only(None, {"type": "text"})] = None
    service_tier: Annotated[None, _accept_only(None, "auto", "default")] = None
    store: Annotated[None, _accept_only(None, False)] = None
    verbosity: Annotated[None, _accept_only(None, "medium")] = None


class ChatRequest(_TextAlone):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _has_probabilities(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs: true")
        return self

    @property
    def max_new_tokens(self) -> int | None:
        """Limit on new tokens."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of most likely tokens to return with each token's log probability; None for no probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(_Request):
    """Body of ``POST /v1/completions``; a prompt is a text, tokens, a list of either, or null for a new document."""

    prompt: str | list[str] | list[int] | list[list[int]] | None
    logprobs: int | None = Field(default=None, ge=0, le=5)
    # Not supported.
    echo: Annotated[None, _accept_only(None, False)] = None
    best_of: Annotated[None, _accept_only(None, 1)] = None
    suffix: NullOrEmpty = None

    @property
    def max_new_tokens(self) -> int | None:
        """Limit on new tokens; the API's default is 16."""
        return self.max_tokens or 16

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of most likely tokens to return with each token's log probability; None for no probabilities."""
        return self.logprobs


class RouteRequest(_Strict):
    """Body of ``POST /v1/route``, an extension that returns the experts that tokens are routed to."""

    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    prompt: str | None = None
    text: str = Field(min_length=1)


def invalid_request(error: ValidationError) -> ApiError:
    """Return the API's error for an invalid body: about an unsupported key if there is one, else its first problem."""
    problems = error.errors(include_url=False, include_input=False)
    unsupported = [problem for problem in problems if problem["type"] in ("extra_forbidden", UNSUPPORTED)]
    problem = (unsupported or problems)[0]
    key = ".".join(str(part) for part in problem["loc"])  # such as "messages.0.role"; empty if the body is no JSON
    if unsupported:
        message = problem["msg"] if problem["type"] == UNSUPPORTED else "not supported here"
        return ApiError(400, f"{key}: {message}", code="unsupported_parameter", param=key)
    return ApiError(400, f"{key}: {problem['msg']}" if key else problem["msg"], param=key or None)


def model_not_found(name: str) -> ApiError:
    """Return the error for an unknown model or one that the key does not open, without revealing which."""
    return ApiError(404, f"no model {name!r} for this key", code="model_not_found", param="model")


class PieceQueue:
    """Transfers pieces from the engine's thread to the event loop."""

    def __init__(self) -> None:
        self.loop, self.queue = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Piece]]()
        self.requests: list[Request] = []

    def callback(self, number: int) -> Callable[[Piece], None]:
        """Return a callback for the engine's thread that queues the pieces of the text with this index."""

        def on_piece(piece: Piece) -> None:
            # A closed loop means that the server has stopped, so the answer has no reader.
            if not self.loop.is_closed():
                self.loop.call_soon_threadsafe(self.queue.put_nowait, (number, piece))

        return on_piece

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """Yield the pieces of all texts as they are generated, each with the index of its text, until all have ended.

        If the caller stops iterating earlier, the requests are cancelled.

        Raises:
            ApiError: The model failed.
        """
        unfinished = len(self.requests)  # each request generates one text
        try:
            while unfinished:
                number, piece = await self.queue.get()
                if piece.error is not None:
                    raise ApiError(500, "the model failed on this request; the server's log has the details")
                unfinished -= piece.finish is not None
                yield number, piece
        finally:
            for request in self.requests:
                request.cancelled = True


async def collect_choices(piece_queue: PieceQueue, ends: Sequence[int]) -> list[Choice]:
    """Wait until all texts have ended, and return them.

    Args:
        piece_queue: Source of the pieces.
        ends: Tokens that end a text.
    """
    choices = [Choice() for _ in piece_queue.requests]
    async with aclosing(piece_queue.pieces()) as pieces:
        async for number, piece in pieces:
            choices[number].add(piece, ends)
    return choices


async def stream(piece_queue: PieceQueue, answer: Answer, ends: Sequence[int], *, usage: bool) -> AsyncIterator[str]:
    """Yield an answer as server-sent events.

    Args:
        piece_queue: Source of the pieces.
        answer: Values common to all chunks.
        ends: Tokens that end a text.
        usage: Whether to add a chunk with the numbers of tokens.
    """
    choices = [Choice() for _ in piece_queue.requests]
    try:
        async with aclosing(piece_queue.pieces()) as pieces:
            if answer.chat:
                yield answer.chunk([answer.first_choice(number) for number in range(len(choices))])
            async for number, piece in pieces:
                tokens = choices[number].add(piece, ends)
                # A token may add no text yet, for example if it is a part of a character; clients that have requested
                # log probabilities get its log probability anyway.
                if piece.text or piece.finish or (answer.wants_logprobs and tokens):
                    yield answer.chunk([answer.choice_chunk(number, piece.text, tokens, piece.finish)])
    except ApiError as error:
        yield event(error.body())
        return
    if usage:
        yield answer.chunk([], answer.usage(choices))
    yield DONE


async def while_connected(http: Http, work: Awaitable[Result]) -> Result | None:
    """Return the result of ``work``; cancel it and return None if the client disconnects first."""

    async def wait_for_disconnect() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    working, disconnected = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait([working, disconnected], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        disconnected.cancel()
        await asyncio.gather(working, disconnected, return_exceptions=True)


logger = logging.getLogger("comingle")


class Overloaded(Exception):
    """The queue of waiting requests is full."""


class Worker:
    """Runs an engine in a thread of its own; at most ``queue`` requests wait for a row."""

    def __init__(self, engine: Engine, *, queue: int, when_idle: Callable[[], object] = lambda: None) -> None:
        """Start the thread.

        Args:
            engine: The engine, which no other thread may use from now on.
            queue: Largest number of requests that wait for a row.
            when_idle: Called by the thread when all requests have been answered.
        """
        self.engine, self.queue, self._when_idle = engine, queue, when_idle
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()  # functions to call between two steps
        self._changed = threading.Condition()  # notified of new requests and jobs, and at the end
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="comingle-serving", daemon=True)
        self._thread.start()

    def submit(self, requests: list[Request]) -> None:
        """Queue requests for the engine, all or none. Those that find a free row do not count as waiting.

        Raises:
            Overloaded: The queue has no room for all.
            DataError: A request cannot be answered.
        """
        for request in requests:
            self.engine.check(request)
        with self._changed:
            waiting = sum(not request.cancelled for request in tuple(self.engine.waiting))
            if self._closed or waiting + len(requests) > self.queue + self.engine.free:
                raise Overloaded(f"{waiting} requests are already waiting; try again later")
            self.engine.waiting.extend(requests)
            self._changed.notify()

    def call(self, job: Callable[[], Result]) -> Future[Result]:
        """Queue a function for the engine's thread and return the future of its result.

        The function runs between two steps of the engine, since it may use the network with a batch of its own.

        Args:
            job: The function.

        Raises:
            Overloaded: ``queue`` functions are already waiting.
        """
        future: Future[Result] = Future()
        with self._changed:
            if len(self._jobs) >= self.queue:
                raise Overloaded(f"{len(self._jobs)} requests are already waiting; try again later")
            self._jobs.append((job, future))
            self._changed.notify()
        return future

    def close(self) -> None:
        """End the thread after the current step."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        """Generate tokens while there are requests; run jobs of other threads between two steps."""
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
                    if not self.engine.busy:
                        self._when_idle()
            except Exception as error:  # Fail the current requests, and keep answering later ones.
                logger.exception("a generation step failed")
                self.engine.fail_all(error)

    def _compute(self, job: Callable[[], Result], future: Future[Result]) -> None:
        """Run a function unless it was cancelled, and store its result or error in its future."""
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(job())
        except Exception as error:
            future.set_exception(error)
