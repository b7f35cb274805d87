"""OpenAI-compatible server over one engine: models, completions and chats of all users."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from comingle.models.personal import PersonalModel
from comingle.serving import engine as engines
from comingle.serving.access import (
    UVICORN_OPTIONS,
    ApiError,
    Keys,
    Limits,
    Rates,
    cross_site_page,
    hostname,
    is_loopback,
    url_of,
)
from comingle.serving.answers import Answer, Prompts
from comingle.serving.engine import Engine
from comingle.serving.schemas import (
    ChatRequest,
    CompletionRequest,
    Overloaded,
    PieceQueue,
    RouteRequest,
    Worker,
    collect_choices,
    invalid_request,
    model_not_found,
    stream,
    while_connected,
)
from comingle.utils.errors import ComingleError

PAGE = Path(__file__).parent / "page" / "index.html"
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)


def make_app(
    engine: Engine,
    keys: Keys,
    limits: Limits,
    *,
    answers: bool = True,
    when_idle: Callable[[], object] = lambda: None,
) -> FastAPI:
    """Return the server as an ASGI application, which runs the engine until it shuts down.

    Args:
        engine: The users' models.
        keys: Which keys open which models.
        limits: Limits on requests.
        answers: Whether the models answer messages rather than continue a text; decides how the page starts.
        when_idle: Called by the engine's thread when all requests have been answered.
    """
    service = Service(engine, keys, limits, answers=answers, when_idle=when_idle)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.worker.close()

    app = FastAPI(title="comingle", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.service = service
    app.add_exception_handler(ApiError, lambda _, error: error.response())  # type: ignore[attr-defined,arg-type]
    app.add_exception_handler(HTTPException, _http_error)  # type: ignore[arg-type]
    app.add_exception_handler(
        Exception, lambda *_: ApiError(500, "internal error; the server's log has the details").response()
    )
    app.middleware("http")(service.refuse_cross_site)
    app.get("/")(service.page)
    app.get("/v1/models")(service.models)
    app.get("/v1/models/{name:path}")(service.model)
    app.post("/v1/chat/completions")(service.chat)
    app.post("/v1/completions")(service.complete)
    app.post("/v1/route")(service.route)
    return app


async def _http_error(request: Request, error: HTTPException) -> Response:
    return ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}").response()


class Service:
    """Request handlers and their shared state."""

    def __init__(
        self, engine: Engine, keys: Keys, limits: Limits, *, answers: bool, when_idle: Callable[[], object]
    ) -> None:
        self.engine, self.keys, self.limits, self.answers = engine, keys, limits, answers
        self.rates = Rates(limits.rate)
        self.worker = Worker(engine, queue=limits.queue, when_idle=when_idle)
        self.prompts = Prompts(next(iter(engine.models.values())).model.base)
        self.started = int(time.time())

    # ------------------------------------------------------------ who asks

    async def refuse_cross_site(
        self, request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        """Refuse requests that a page of another site sends through a browser on this machine, if there are no keys.

        Without keys, the server trusts programs on this machine. A page that is open in a browser could reach it too,
        directly or by a host name that points to this machine (DNS rebinding).
        """
        host = hostname(request.headers.get("host", ""))
        if not self.keys.required and not is_loopback(host):
            return ApiError(400, f"got host {host!r}; without keys the server answers only this machine").response()
        if not self.keys.required and (page := cross_site_page(request.headers)):
            message = f"got a request from {page}; allowed without keys: the server's own page, and programs"
            return ApiError(403, message).response()
        return await call_next(request)

    def _accessible_users(self, request: Request) -> tuple[str, ...]:
        """Return the users whose models the request's key opens.

        Raises:
            ApiError: The key opens no model.
        """
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        names = self.keys.users_of(key.strip() if scheme.lower() == "bearer" else "")
        if self.keys.required and not names:
            raise ApiError(401, "invalid or missing key; send it as Authorization: Bearer KEY", code="invalid_api_key")
        return names

    def _admit(self, request: Request, name: str) -> None:
        """Check that the request's key opens a user's model, and count the request against the user's rate limit.

        Args:
            request: The request, with the key in a header.
            name: The user whose model it names.

        Raises:
            ApiError: The key does not open this model, or the user has sent too many requests within a minute.
        """
        if name not in self._accessible_users(request):
            raise model_not_found(name)
        if wait := self.rates.take_request(name):
            message = f"user {name!r} has sent {self.limits.rate} requests within a minute"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after=wait)

    async def _read_body(self, request: Request, kind: type[Body]) -> Body:
        """Read and validate the body of a request.

        Args:
            request: The request.
            kind: Pydantic class of the body.

        Raises:
            ApiError: The body is too large or invalid, or the client has disconnected.
        """
        body = bytearray()
        try:
            async for part in request.stream():
                body += part
                if len(body) > self.limits.body_bytes:
                    raise ApiError(400, f"request body too large; allowed: {self.limits.body_bytes:,} bytes")
        except ClientDisconnect:
            raise ApiError(499, "the client disconnected before its request was read") from None
        try:
            return kind.model_validate_json(bytes(body))
        except ValidationError as error:
            raise invalid_request(error) from None

    # ------------------------------------------------------------ models

    async def page(self) -> Response:
        """Return the chat page. The attribute ``data-keys`` tells its script to ask for a key."""
        text = PAGE.read_text(encoding="utf-8")
        if self.keys.required:
            text = text.replace("<html ", "<html data-keys ", 1)
        headers = {"Content-Security-Policy": CONTENT_SECURITY_POLICY, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(text, headers=headers)

    async def models(self, request: Request) -> dict[str, object]:
        """List the users whose models the key opens."""
        return {"object": "list", "data": [self._describe(name) for name in self._accessible_users(request)]}

    async def model(self, request: Request, name: str) -> dict[str, object]:
        """Return the entry of one user's model."""
        if name not in self._accessible_users(request):
            raise model_not_found(name)
        return self._describe(name)

    def _describe(self, name: str) -> dict[str, object]:
        """Return a model's entry in the OpenAI format, with two fields for the chat page."""
        own = {"answers": self.answers, "routed": self.engine.models[name].model.routed}
        return {"id": name, "object": "model", "created": self.started, "owned_by": "comingle", **own}

    # ------------------------------------------------------------ answers

    async def chat(self, request: Request) -> Response:
        """Handle ``POST /v1/chat/completions``: answer messages."""
        self._accessible_users(request)  # refuses an invalid key before the body is read
        parsed = await self._read_body(request, ChatRequest)
        self._admit(request, parsed.model)
        messages = [message.plain() for message in parsed.messages]
        prompt = self._refuse_invalid(lambda: self.prompts.of_messages(messages), "messages")
        ends = self._refuse_invalid(self.prompts.chat_ends, "messages")
        return await self._respond(request, parsed, [prompt], ends=ends)

    async def complete(self, request: Request) -> Response:
        """Handle ``POST /v1/completions``: continue texts."""
        self._accessible_users(request)  # refuses an invalid key before the body is read
        parsed = await self._read_body(request, CompletionRequest)
        self._admit(request, parsed.model)
        prompt = "" if parsed.prompt is None else parsed.prompt  # null begins a new document
        prompts = self._refuse_invalid(lambda: self.prompts.of_texts(prompt))
        return await self._respond(request, parsed, prompts, ends=None)  # None: the base's own end tokens

    async def route(self, request: Request) -> Response:
        """Handle ``POST /v1/route``: return the expert that each token of an answer is routed to, in every layer."""
        self._accessible_users(request)  # refuses an invalid key before the body is read
        parsed = await self._read_body(request, RouteRequest)
        self._admit(request, parsed.model)
        if parsed.messages is not None and parsed.prompt is not None:
            raise ApiError(400, "prompt: got messages too; allowed: one of the two", param="prompt")
        messages = [message.plain() for message in parsed.messages or ()]

        def prompt_tokens() -> list[int]:
            """Return the tokens before the answer: of the messages, or else of the prompt."""
            if messages:
                return self.prompts.of_messages(messages)
            (tokens,) = self.prompts.of_texts(parsed.prompt or "")  # without a prompt the answer begins a document
            return tokens

        prompt = self._refuse_invalid(prompt_tokens)
        # `split_special_tokens`: "<|im_end|>" in the answer is read as characters, not as the special token.
        text: Any = self.engine.tokenizer(parsed.text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        self._refuse_invalid(lambda: self.prompts.base.require_rows(text, "the text"), "text")
        self._require_room(len(prompt) + len(text), 0, "text")  # 0: no tokens are generated
        try:
            job = self.worker.call(lambda: self.engine.route(parsed.model, prompt, list(text)))
            routing = await asyncio.wrap_future(job)
        except Overloaded as error:
            raise ApiError(503, str(error), code="overloaded", retry_after=1) from None
        except ComingleError as error:
            raise ApiError(400, str(error), code="no_routers") from None
        return JSONResponse({"experts": routing.experts, "tokens": routing.tokens, "gates": routing.gates.tolist()})

    def _refuse_invalid(self, call: Callable[[], T], param: str = "prompt") -> T:
        """Return the result of a function, and convert its error to one of the API.

        Args:
            call: Computes something from a request, such as the tokens of its prompt.
            param: The key of the request that the error names.

        Raises:
            ApiError: The function has raised a :class:`ComingleError`.
        """
        try:
            return call()
        except ComingleError as error:
            raise ApiError(400, str(error), param=param) from None

    def _require_room(self, prompt_tokens: int, new_tokens: int, param: str) -> None:
        """Check that prompt and new tokens fit the model's context.

        Args:
            prompt_tokens: Number of tokens in the prompt.
            new_tokens: Number of tokens to generate; 0 for a request that only reads.
            param: Key of the prompt in the request, for the error.

        Raises:
            ApiError: Prompt and new tokens together are longer than the context.
        """
        limit = self.engine.context_length
        if limit is not None and prompt_tokens + new_tokens > limit:
            message = f"the context length of this model is {limit:,} tokens; the prompt has {prompt_tokens:,}"
            message += f", and {new_tokens:,} new ones are requested" if new_tokens else ""
            raise ApiError(400, message, code="context_length_exceeded", param=param)

    def _new_tokens(self, prompt_tokens: int, max_new_tokens: int | None, param: str) -> int:
        """Return the number of new tokens to allow: the requested one, or else the most that server and context allow.

        Args:
            prompt_tokens: Number of tokens in the prompt.
            max_new_tokens: The requested number; None if there is none.
            param: Key of the prompt in the request, for the error if prompt and answer exceed the context.

        Raises:
            ApiError: The number is above the server's limit, or prompt and answer exceed the context.
        """
        if max_new_tokens is not None and max_new_tokens > self.limits.max_tokens:
            raise ApiError(
                400,
                f"max_tokens: got {max_new_tokens:,}; allowed: up to {self.limits.max_tokens:,}",
                param="max_tokens",
            )
        limit = self.limits.max_tokens
        if self.engine.context_length is not None:
            limit = min(limit, self.engine.context_length - prompt_tokens)
        # Without room for a single token, ask for one, which the check refuses.
        new_tokens = max(1, limit) if max_new_tokens is None else max_new_tokens
        self._require_room(prompt_tokens, new_tokens, param)
        return new_tokens

    async def _respond(
        self, http: Request, parsed: ChatRequest | CompletionRequest, prompts: Sequence[list[int]], *, ends: object
    ) -> Response:
        """Generate all choices for all prompts, and return the response: streamed, or whole once all have ended.

        Choice i of a prompt samples with the seed of the request plus i.

        Args:
            http: The HTTP request.
            parsed: Its body.
            prompts: Tokens of each prompt.
            ends: Tokens that end an answer, as an ``eos_token_id`` of transformers; None for those of the base.

        Raises:
            ApiError: Too many or too long answers are requested, or the queue is full.
        """
        count = parsed.n or 1
        if count * len(prompts) > self.limits.choices:
            message = f"got {count * len(prompts)} answers in one request; allowed: up to {self.limits.choices}"
            raise ApiError(400, message, param="n")
        # A request may have any whole number as its seed, but random generators take 64 bits at most.
        seed = secrets.randbits(48) if parsed.seed is None else parsed.seed % 2**63
        piece_queue, requests = PieceQueue(), list[engines.Request]()
        for prompt in prompts:
            param = "messages" if isinstance(parsed, ChatRequest) else "prompt"
            new_tokens = self._new_tokens(len(prompt), parsed.max_new_tokens, param)
            for number in range(count):
                sampling = replace(parsed.sampling(new_tokens, (seed + number) % 2**63), eos_token_id=ends)
                on_piece = piece_queue.callback(len(requests))
                requests.append(
                    engines.Request(
                        name=parsed.model,
                        prompt=prompt,
                        sampling=sampling,
                        on_piece=on_piece,
                        logprobs=parsed.num_top_logprobs,
                        continues=isinstance(parsed, CompletionRequest),
                    )
                )
        answer = Answer(
            chat=isinstance(parsed, ChatRequest),
            model=parsed.model,
            tokenizer=self.engine.tokenizer,
            wants_logprobs=parsed.num_top_logprobs is not None,
            prompt_tokens=sum(map(len, prompts)),
        )
        try:
            self.worker.submit(requests)
        except Overloaded as error:
            raise ApiError(503, str(error), code="overloaded", retry_after=1) from None
        except ComingleError as error:
            raise ApiError(400, str(error)) from None
        # Tokens that end a text; they are the same for all texts of the answer.
        piece_queue.requests, stops = requests, self.engine.ends(requests[0])
        if parsed.stream:
            events = stream(piece_queue, answer, stops, usage=parsed.includes_usage)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        choices = await while_connected(http, collect_choices(piece_queue, stops))
        if choices is None:  # the client has disconnected, so no one reads the response
            return Response(status_code=499)
        return JSONResponse(answer.body(choices))


def serve(
    models: Mapping[str, PersonalModel],
    sock: socket.socket,
    *,
    keys: Mapping[str, str] | None,
    limits: Limits,
    answers: bool,
    ready: Callable[[str], None],
) -> None:
    """Answer requests until the process receives a signal to stop.

    Args:
        models: Model by user.
        sock: The socket to listen on.
        keys: API key by user; None: requests need no key.
        limits: Limits on requests.
        answers: Whether the models answer messages rather than continue a text.
        ready: Called with the URL before the first request.
    """
    app = make_app(Engine(models, rows=limits.rows), Keys(models, keys), limits, answers=answers)
    server = uvicorn.Server(uvicorn.Config(app, **UVICORN_OPTIONS))
    ready(url_of(sock))
    server.run(sockets=[sock])
