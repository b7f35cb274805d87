"""Request schemas and errors of the OpenAI API, and the thread that runs the engine."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from fastapi import Request as Http
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from comingle.models.generation import Sampling
from comingle.serving.access import ApiError, Metrics, TextTimer
from comingle.serving.answers import DONE, Answer, Choice, event
from comingle.serving.engine import Engine, Piece, Request

if TYPE_CHECKING:
    from comingle.serving.models import EnginePool

Result = TypeVar("Result")

UNSUPPORTED = "unsupported"
"""Error type for a key of the OpenAI API with a value that is not supported."""

_LONGEST_STOP = 1000
_NULL_OR_EMPTY: tuple[Any, ...] = (None, "", [], {})


def _accept_only(*allowed: object) -> BeforeValidator:
    """Return a validator for a key of the OpenAI API that this server does not implement.

    It refuses every value except those with which the key has no effect, such as 1 for ``best_of``.

    Args:
        allowed: The accepted values, which the validator replaces with None.
    """
    message = "not supported here"
    allowed_in_message = [json.dumps(item) for item in allowed if item not in _NULL_OR_EMPTY]
    if allowed_in_message:
        message += f"; allowed: {', '.join(allowed_in_message)}"

    def equals(value: object, item: object) -> bool:
        """Return whether two JSON values are equal. In Python True also equals 1, and False equals 0."""
        return value == item and isinstance(value, bool) == isinstance(item, bool)

    def refuse_others(value: object) -> None:
        if not any(equals(value, item) for item in allowed):
            raise PydanticCustomError(UNSUPPORTED, "{message}", {"message": message})

    return BeforeValidator(refuse_others)


NullOrEmpty = Annotated[None, _accept_only(*_NULL_OR_EMPTY)]
"""A key of the OpenAI API that is not supported: null or empty."""


def _as_list(value: object) -> object:
    """Return the stop strings of a request as a list, given null, a single string or a list."""
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


def _join_parts(content: object) -> object:
    """Join a message's list of text parts, such as ``[{"type": "text", "text": "Hello"}]``, to one text.

    Content of another form is returned unchanged; pydantic then accepts or refuses it.
    """
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return content

    def unsupported_part(kind_or_key: object) -> PydanticCustomError:
        message = f"a part with {str(kind_or_key)!r:.40} is not supported here; allowed: text"
        return PydanticCustomError(UNSUPPORTED, "{message}", {"message": message})

    for part in content:
        kind = part.get("type", "text")
        if kind != "text":  # such as "image_url"
            raise unsupported_part(kind)
        other_keys = {key for key, item in part.items() if item is not None} - {"type", "text"}
        if other_keys:
            raise unsupported_part(min(other_keys))
    texts = [part.get("text") for part in content]
    if not all(isinstance(text, str) for text in texts):
        return content
    return "".join(texts)


Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=_LONGEST_STOP)]], BeforeValidator(_as_list), Field(max_length=4)
]


class _Strict(BaseModel):
    """JSON object that refuses unknown keys and does not convert types."""

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
        """Return the sampling settings; keys that the request omits have the API's defaults, such as temperature 1.

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
    def _refuse_usage_without_stream(self) -> _Request:
        """Refuse ``stream_options`` for an answer that is not streamed, as the OpenAI API does."""
        if self.includes_usage and not self.stream:
            raise ValueError("stream_options: only with stream: true")
        return self

    @property
    def includes_usage(self) -> bool:
        """True if a stream's last chunk contains the numbers of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatMessage(_Strict):
    """A message of a conversation; also the server's own answer, as clients send it back with its null keys."""

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
        """Return role and content for a chat template; "developer" becomes "system", as templates do not know it."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.content}


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
    def _refuse_top_logprobs_without_logprobs(self) -> ChatRequest:
        """Refuse a number of ``top_logprobs`` in a request without ``logprobs: true``, as the OpenAI API does."""
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs: true")
        return self

    @property
    def max_new_tokens(self) -> int | None:
        """Largest number of new tokens; None if the request has no limit."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        """How many of the most likely tokens to return at each step; None if no log probabilities are requested."""
        if not self.logprobs:
            return None
        return self.top_logprobs or 0


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
        """Largest number of new tokens; the API's default is 16."""
        return self.max_tokens or 16

    @property
    def num_top_logprobs(self) -> int | None:
        """How many of the most likely tokens to return at each step; None if no log probabilities are requested."""
        return self.logprobs


class RouteRequest(_Strict):
    """Body of ``POST /v1/route``, an extension that returns the experts that tokens are routed to."""

    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    prompt: str | None = None
    text: str = Field(min_length=1)


def invalid_request(error: ValidationError) -> ApiError:
    """Return the API's error for an invalid request body.

    A body may have several problems. The error reports the first unsupported key, or else the first problem.

    Args:
        error: The problems that pydantic has found.
    """
    problems = error.errors(include_url=False, include_input=False)
    unsupported_keys = [problem for problem in problems if problem["type"] in ("extra_forbidden", UNSUPPORTED)]
    problem = unsupported_keys[0] if unsupported_keys else problems[0]
    key = ".".join(str(part) for part in problem["loc"])  # such as "messages.0.role"; empty if the body is no JSON
    message = problem["msg"]
    if unsupported_keys:
        if problem["type"] == "extra_forbidden":
            message = "not supported here"
        return ApiError(400, f"{key}: {message}", code="unsupported_parameter", param=key)
    if not key:
        return ApiError(400, message)
    return ApiError(400, f"{key}: {message}", param=key)


def model_not_found(name: str) -> ApiError:
    """Return the same error for a model that does not exist and for one that the key does not open."""
    return ApiError(404, f"no model {name!r} for this key", code="model_not_found", param="model")


class PieceQueue:
    """Transfers the pieces of an answer's texts from the engine's thread to the event loop."""

    def __init__(self, metrics: Metrics | None) -> None:
        """Create an empty queue; to be called in the event loop, where pieces of text are taken from it.

        Args:
            metrics: Counts tokens and times; None to count nothing.
        """
        self.loop = asyncio.get_running_loop()
        self.queue = asyncio.Queue[tuple[int, Piece]]()  # index of a text of the answer, and the text's next piece
        self.requests: list[Request] = []  # one per text; set before `pieces` is called
        self.on_end: Callable[[int], object] = lambda num_new_tokens: None
        """Called once with the number of generated tokens, when the texts have ended or the client is gone."""
        self._metrics = metrics
        self._timers: list[TextTimer] = []  # one per text; none without metrics

    def callback(self, text_index: int, num_prompt_tokens: int) -> Callable[[Piece], None]:
        """Return a function that adds a piece of a text to the queue; the engine's thread calls it."""
        timer = None
        if self._metrics is not None:
            timer = TextTimer(self._metrics, num_prompt_tokens)
            self._timers.append(timer)

        def on_piece(piece: Piece) -> None:
            if timer is not None:
                _count_piece(timer, piece)
            if not self.loop.is_closed():  # a closed loop means that the server has stopped
                self.loop.call_soon_threadsafe(self.queue.put_nowait, (text_index, piece))

        return on_piece

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """Yield the index of a text and its next piece, as pieces are generated, until all texts have ended.

        If the caller stops iterating earlier, the requests are cancelled.

        Raises:
            ApiError: The model failed.
        """
        num_unfinished, num_new_tokens = len(self.requests), 0
        try:
            while num_unfinished:
                text_index, piece = await self.queue.get()
                num_new_tokens += piece.sampled is not None
                if isinstance(piece.error, ApiError):
                    raise piece.error
                if piece.error is not None:
                    raise ApiError(500, "the model failed on this request; the server's log has the details")
                if piece.finish is not None:
                    num_unfinished -= 1
                yield text_index, piece
        finally:
            for request in self.requests:
                request.cancelled = True
            for timer in self._timers:  # does nothing for texts that have ended
                timer.end("abort")
            self.on_end(num_new_tokens)


def _count_piece(timer: TextTimer, piece: Piece) -> None:
    """Count the token of a piece, and the end of its text if it is the last one."""
    if piece.sampled is not None:
        timer.add_token(piece.cached_tokens)
    if piece.error is not None:
        timer.end("error")
    elif piece.finish is not None:
        timer.end(piece.finish)


async def collect_choices(piece_queue: PieceQueue, ends: Sequence[int]) -> list[Choice]:
    """Wait until all texts have ended, and return them.

    Args:
        piece_queue: Yields the pieces of the texts.
        ends: Tokens that end a text.
    """
    choices = [Choice() for _ in piece_queue.requests]
    async with aclosing(piece_queue.pieces()) as pieces:
        async for text_index, piece in pieces:
            choices[text_index].add(piece, ends)
    return choices


async def stream(
    piece_queue: PieceQueue, answer: Answer, ends: Sequence[int], *, includes_usage: bool
) -> AsyncIterator[str]:
    """Yield an answer as server-sent events, one per piece of text.

    Args:
        piece_queue: Yields the pieces of the texts.
        answer: Formats the events.
        ends: Tokens that end a text.
        includes_usage: Whether to add an event with the numbers of tokens at the end.
    """
    choices = [Choice() for _ in piece_queue.requests]
    try:
        async with aclosing(piece_queue.pieces()) as pieces:
            if answer.chat:
                yield answer.chunk([answer.first_choice(index) for index in range(len(choices))])
            async for text_index, piece in pieces:
                tokens = choices[text_index].add(piece, ends)
                # A token that only begins a character has a log probability, but no text yet.
                has_logprobs = answer.wants_logprobs and bool(tokens)
                if piece.text or piece.finish or has_logprobs:
                    yield answer.chunk([answer.choice_chunk(text_index, piece.text, tokens, piece.finish)])
    except ApiError as error:
        yield event(error.body())
        return
    if includes_usage:
        yield answer.chunk([], answer.usage(choices))
    yield DONE


async def result_while_connected(http: Http, work: Awaitable[Result]) -> Result | None:
    """Return the result of ``work``; if the client disconnects before it is done, cancel it and return None."""

    async def wait_for_disconnect() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    work_task = asyncio.ensure_future(work)
    disconnect_task = asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait([work_task, disconnect_task], return_when=asyncio.FIRST_COMPLETED)
        return work_task.result() if work_task.done() else None
    finally:
        work_task.cancel()
        disconnect_task.cancel()
        await asyncio.gather(work_task, disconnect_task, return_exceptions=True)


logger = logging.getLogger("comingle")


class Overloaded(Exception):
    """The queue of waiting requests is full."""


class Worker:
    """Thread that generates the texts of all requests, as an engine is not thread-safe.

    Other threads submit requests for text, and functions to call between two generated tokens.
    """

    def __init__(
        self, engine: Engine | EnginePool, *, max_waiting: int, when_idle: Callable[[], object] = lambda: None
    ) -> None:
        """Start the thread, which generates text for requests until the worker is closed.

        Args:
            engine: Object that generates the texts of several requests in one batch, a token of each in a step. No
                other thread may use it from now on.
            max_waiting: Largest number of requests that wait until the batch has a free row. It is also the largest
                number of functions that wait to be called by the thread (:meth:`call`).
            when_idle: Called by the thread when all requests have been answered.
        """
        self.engine, self.max_waiting, self._when_idle = engine, max_waiting, when_idle
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()  # functions to call between two steps
        self._changed = threading.Condition()  # notified of new requests and jobs, and by `close`
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="comingle-serving", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True if the thread runs."""
        return self._thread.is_alive()

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a row, without cancelled ones."""
        return sum(not request.cancelled for request in tuple(self.engine.waiting))

    def submit(self, requests: list[Request]) -> None:
        """Append requests to the engine's queue, either all of them or none.

        Raises:
            Overloaded: More requests than ``max_waiting`` would wait, in addition to those for which a row is free.
            DataError: A request cannot be answered.
        """
        for request in requests:
            self.engine.engine_of(request.name).raise_unless_valid(request)
        with self._changed:
            num_waiting = self.num_waiting
            max_queued = self.max_waiting + self.engine.num_free_rows
            if self._closed or num_waiting + len(requests) > max_queued:
                raise Overloaded(f"{num_waiting} requests are already waiting; try again later")
            self.engine.waiting.extend(requests)
            self._changed.notify()

    def call(self, job: Callable[[], Result]) -> Future[Result]:
        """Call a function in the engine's thread, between two steps of the engine, and return a future of its result.

        Raises:
            Overloaded: ``max_waiting`` functions are already waiting, or the worker is closed.
        """
        future: Future[Result] = Future()
        with self._changed:
            if self._closed:
                raise Overloaded("the server is stopping; try again later")
            if len(self._jobs) >= self.max_waiting:
                raise Overloaded(f"{len(self._jobs)} requests are already waiting; try again later")
            self._jobs.append((job, future))
            self._changed.notify()
        return future

    def replace_engine(self, engine: Engine | EnginePool) -> None:
        """Use another engine from now on; return when the old one has completed the answers in progress.

        Requests that wait for a row are answered by the new engine. Not to be called by the worker's own thread.

        Args:
            engine: The new engine.
        """

        def complete_and_replace() -> None:
            with self._changed:  # `submit` appends to the waiting requests of the current engine
                old, self.engine = self.engine, engine
                engine.waiting.extend(old.waiting)
                old.waiting.clear()
            try:
                while old.busy:
                    old.step()
            except Exception as error:  # ends the answers in progress; later ones are answered
                logger.exception("a generation step failed")
                old.fail_all(error)

        future: Future[None] = Future()
        with self._changed:  # not by `call`, which may refuse a job if many are waiting
            if self._closed:
                return
            self._jobs.append((complete_and_replace, future))
            self._changed.notify()
        with suppress(CancelledError):  # the worker was closed before it could replace the engine
            future.result()

    def fail_all(self, error: Exception) -> None:
        """End all requests with an error after the current step."""
        with self._changed:
            self._jobs.append((lambda: self.engine.fail_all(error), Future()))
            self._changed.notify()

    def close(self) -> None:
        """End the thread after the current step, and cancel the functions that it has not called."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        for _job, future in self._jobs:
            future.cancel()

    def _run(self) -> None:
        """Call waiting jobs and run a step of the engine, in turn, until the worker is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._jobs or self.engine.busy)
                if self._closed:
                    return
            while self._jobs:
                job, future = self._jobs.popleft()
                self._call_job(job, future)
            try:
                if self.engine.busy:
                    self.engine.step()
                    if not self.engine.busy:
                        self._when_idle()
            except Exception as error:  # ends the current requests; later ones are answered
                logger.exception("a generation step failed")
                self.engine.fail_all(error)

    def _call_job(self, job: Callable[[], Result], future: Future[Result]) -> None:
        """Call a function unless its future was cancelled, and set its result or error in the future."""
        was_cancelled = not future.set_running_or_notify_cancel()
        if was_cancelled:
            return
        try:
            future.set_result(job())
        except Exception as error:
            future.set_exception(error)
