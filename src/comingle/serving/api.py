"""OpenAI-compatible server over one engine: models, completions and chats of all users."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from comingle.serving import engine as engines
from comingle.serving.access import (
    DAY,
    GRACE_SECONDS,
    METRICS_EXTRA,
    UVICORN_OPTIONS,
    ApiError,
    Buckets,
    Keys,
    Limits,
    Metrics,
    Rates,
    WatchedKeys,
    cross_site_page,
    hostname,
    is_loopback,
    url_of,
)
from comingle.serving.answers import Answer, Prompts
from comingle.serving.engine import Engine
from comingle.serving.models import EnginePool, Source
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
    result_while_connected,
    stream,
)
from comingle.utils.errors import ComingleError, DataError, RunError
from comingle.utils.records import logger

PAGE = Path(__file__).parent / "page" / "index.html"
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)


def make_app(
    engine: Engine | EnginePool,
    keys: Keys,
    limits: Limits,
    *,
    answers: bool | Callable[[str], bool] = True,
    when_idle: Callable[[], object] = lambda: None,
) -> FastAPI:
    """Return the server as an ASGI application, which runs the engine until it shuts down.

    Args:
        engine: The users' models.
        keys: Which keys open which models.
        limits: Limits on requests.
        answers: Whether the models answer messages rather than continue a text, or a function that says so of a user's;
            decides what the chat page shows first.
        when_idle: Called by the engine's thread when all requests have been answered.
    """
    service = Service(engine, keys, limits, answers=answers, when_idle=when_idle)

    @asynccontextmanager
    async def close_worker_at_shutdown(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.worker.close()

    app = FastAPI(title="comingle", docs_url=None, redoc_url=None, openapi_url=None, lifespan=close_worker_at_shutdown)
    app.state.service = service
    app.add_exception_handler(ApiError, lambda _, error: service.refuse(error))  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, _http_error)  # type: ignore[arg-type]
    app.add_exception_handler(
        Exception, lambda *_: ApiError(500, "internal error; the server's log has the details").response()
    )
    app.middleware("http")(service.refuse_cross_site)
    app.get("/")(service.page)
    app.get("/health")(service.health)
    app.get("/metrics")(service.metrics_page)
    app.get("/v1/models")(service.models)
    app.get("/v1/models/{name:path}")(service.model)
    app.post("/v1/chat/completions")(service.chat)
    app.post("/v1/completions")(service.complete)
    app.post("/v1/route")(service.route)
    return app


async def _http_error(request: Request, error: HTTPException) -> Response:
    """Return the response to a request that no handler takes, such as 404, in the OpenAI API's form."""
    return ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}").response()


def _metrics_of(worker: Worker, base: str) -> Metrics | None:
    """Return the metrics of a worker's engine; None if prometheus-client is not installed.

    Args:
        worker: The worker.
        base: Name of the base. The path of a local folder is not shown, as it may contain a user's name.
    """
    model_name = "local" if Path(base).exists() else base
    try:
        return Metrics(
            model_name,
            num_running=lambda: worker.engine.num_running,  # the engine may be replaced
            num_waiting=lambda: worker.num_waiting,
            num_prefix_bytes=lambda: worker.engine.num_prefix_bytes,
            num_adapter_bytes=lambda: worker.engine.num_adapter_bytes,
        )
    except ImportError:
        return None


class Service:
    """Handlers of the API's requests, for the models of one run's users."""

    def __init__(
        self,
        engine: Engine | EnginePool,
        keys: Keys,
        limits: Limits,
        *,
        answers: bool | Callable[[str], bool],
        when_idle: Callable[[], object],
    ) -> None:
        """Start a worker for the engine; arguments as in :func:`make_app`."""
        self.engine, self.keys, self.limits = engine, keys, limits
        self.answers: Callable[[str], bool] = answers if callable(answers) else lambda _name: answers
        self.rates = Rates(limits.rate)
        self.quotas = None if limits.tokens_per_day is None else Buckets(limits.tokens_per_day, DAY)
        self.worker = Worker(engine, max_waiting=limits.queue, when_idle=when_idle)
        base = engine.base  # the same for all users
        self.metrics = _metrics_of(self.worker, "" if base is None else base.name)
        self.started = int(time.time())
        self.health_details: Callable[[], Mapping[str, object]] = dict
        """Returns what ``/health`` says besides its status; nothing by default."""

    # ------------------------------------------------------------ who asks

    async def refuse_cross_site(
        self, request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        """Refuse requests that pages of other sites send through a browser on this machine, if keys are not required.

        Without keys, the server answers programs on this machine only. A page in a browser could otherwise reach it
        too: by the address 127.0.0.1, or by a host name that resolves to it (DNS rebinding).
        """
        if self.keys.required:
            return await call_next(request)
        host = hostname(request.headers.get("host", ""))
        if not is_loopback(host):
            return ApiError(400, f"got host {host!r}; without keys the server answers only this machine").response()
        page = cross_site_page(request.headers)
        if page:
            message = f"got a request from {page}; allowed without keys: the server's own page, and programs"
            return ApiError(403, message).response()
        return await call_next(request)

    def accessible_users(self, request: Request) -> tuple[str, ...]:
        """Return the users whose models the request's key opens; all users if keys are not required.

        Raises:
            ApiError: The key is missing or opens no model.
        """
        scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
        key = credentials.strip() if scheme.lower() == "bearer" else ""
        names = self.keys.users_of(key)
        if self.keys.required and not names:
            raise ApiError(401, "invalid or missing key; send it as Authorization: Bearer KEY", code="invalid_api_key")
        return names

    def _admit(self, request: Request, name: str) -> None:
        """Refuse a request if its key does not open a user's model, or if the user's rate limit is reached.

        Args:
            request: The request, with the key in a header.
            name: The user.

        Raises:
            ApiError: The request is refused.
        """
        if name not in self.accessible_users(request):
            raise model_not_found(name)
        wait_seconds = self.rates.take_request(name)
        if wait_seconds > 0:
            message = f"user {name!r} has sent {self.limits.rate} requests within a minute"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after=wait_seconds)

    def _take_tokens(self, name: str, amount: int) -> None:
        """Count tokens against a user's quota, if there is one.

        Args:
            name: The user.
            amount: Number of tokens of a prompt and, as far as they are not known yet, the most tokens of its answer.

        Raises:
            ApiError: The quota has fewer left.
        """
        if self.quotas is None:
            return
        wait_seconds = self.quotas.take(name, amount)
        if wait_seconds > 0:
            left, allowed = int(self.quotas.left(name)), self.limits.tokens_per_day
            message = (
                f"this request may need {amount:,} tokens; left for user {name!r}: {left:,} of {allowed:,} per day"
            )
            raise ApiError(429, message, code="insufficient_quota", retry_after=wait_seconds)

    async def read_body(self, request: Request, body_class: type[Body]) -> Body:
        """Read and validate the body of a request.

        Args:
            request: The request.
            body_class: Pydantic class of the body.

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
            return body_class.model_validate_json(bytes(body))
        except ValidationError as error:
            raise invalid_request(error) from None

    def replace_engine(self, engine: Engine | EnginePool) -> None:
        """Answer requests that arrive from now on with the models of another engine.

        Answers in progress are completed by the old engine. Not to be called by the engine's thread, for whose current
        answers this method waits.

        Args:
            engine: The new engine; its models have the same tokenizer.
        """
        self.worker.replace_engine(engine)
        self.engine = engine
        if not self.keys.required:  # then every user of the engine is served; else those with a key
            self.keys.names = engine.models

    def refuse(self, error: ApiError) -> Response:
        """Return the response of an error, and count it."""
        if self.metrics is not None:
            self.metrics.refused.labels(str(error.status)).inc()
        return error.response()

    # ------------------------------------------------------------ state of the server

    async def health(self) -> Response:
        """Return status 200 while the engine's thread runs, else 503."""
        if not self.worker.alive:
            raise ApiError(503, "the engine has ended; restart the server")
        details = self.health_details()
        return JSONResponse(details) if details else Response()

    async def metrics_page(self) -> Response:
        """Return the metrics in the Prometheus text format; status 501 without the package."""
        if self.metrics is None:
            return PlainTextResponse(f"/metrics {METRICS_EXTRA}\n", status_code=501)
        return Response(self.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def end_answers(self) -> None:
        """End answers in progress and requests that wait, since the server stops; any thread may call it."""
        self.worker.fail_all(ApiError(503, "the server is stopping; try again later", retry_after=10))

    # ------------------------------------------------------------ models

    async def page(self) -> Response:
        """Return the chat page."""
        html = PAGE.read_text(encoding="utf-8")
        if self.keys.required:  # the page's script looks for this attribute, and asks for a key
            html = html.replace("<html ", "<html data-keys ", 1)
        headers = {"Content-Security-Policy": CONTENT_SECURITY_POLICY, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(html, headers=headers)

    async def models(self, request: Request) -> dict[str, object]:
        """List the users whose models the key opens."""
        return {"object": "list", "data": [self._describe(name) for name in self.accessible_users(request)]}

    async def model(self, request: Request, name: str) -> dict[str, object]:
        """Return the description of one user's model."""
        if name not in self.accessible_users(request):
            raise model_not_found(name)
        return self._describe(name)

    def _engine_of(self, name: str) -> Engine:
        """Return the engine of a user's model.

        Raises:
            ApiError: The model was unloaded meanwhile.
        """
        try:
            return self.engine.engine_of(name)
        except DataError:
            raise model_not_found(name) from None

    def _prompts_of(self, name: str) -> Prompts:
        """Return what encodes prompts for a user's model; runs may differ in the begin-of-text token."""
        return Prompts(self._engine_of(name).base)

    def _describe(self, name: str) -> dict[str, object]:
        """Return a model's entry in the OpenAI format, with two more fields for the chat page."""
        return {
            "id": name,
            "object": "model",
            "created": self.started,
            "owned_by": "comingle",
            "answers": self.answers(name),  # whether it answers messages rather than continues a text
            "routed": self._engine_of(name).routed,  # whether it has routers, whose gates the page can show
        }

    # ------------------------------------------------------------ answers

    async def chat(self, request: Request) -> Response:
        """Handle ``POST /v1/chat/completions``: answer messages."""
        self.accessible_users(request)  # refuses an invalid key before the body is read
        parsed = await self.read_body(request, ChatRequest)
        self._admit(request, parsed.model)
        messages = [message.plain() for message in parsed.messages]
        prompts = self._prompts_of(parsed.model)
        prompt = self._call_or_refuse(lambda: prompts.of_messages(messages), "messages")
        ends = self._call_or_refuse(prompts.chat_ends, "messages")
        return await self._respond(request, parsed, [prompt], ends=ends)

    async def complete(self, request: Request) -> Response:
        """Handle ``POST /v1/completions``: continue texts."""
        self.accessible_users(request)  # refuses an invalid key before the body is read
        parsed = await self.read_body(request, CompletionRequest)
        self._admit(request, parsed.model)
        prompt = "" if parsed.prompt is None else parsed.prompt  # null begins a new document
        prompts = self._call_or_refuse(lambda: self._prompts_of(parsed.model).of_texts(prompt))
        return await self._respond(request, parsed, prompts, ends=None)  # None: the base's own end tokens

    async def route(self, request: Request) -> Response:
        """Handle ``POST /v1/route``: return the expert that each token of a text is routed to, in every layer."""
        self.accessible_users(request)  # refuses an invalid key before the body is read
        parsed = await self.read_body(request, RouteRequest)
        self._admit(request, parsed.model)
        if parsed.messages is not None and parsed.prompt is not None:
            raise ApiError(400, "prompt: got messages too; allowed: one of the two", param="prompt")
        messages = [message.plain() for message in parsed.messages or ()]

        engine, prompts = self._engine_of(parsed.model), self._prompts_of(parsed.model)

        def encode_prompt() -> list[int]:
            """Return the tokens before the text: the messages, the prompt, or only the begin-of-text token."""
            if messages:
                return prompts.of_messages(messages)
            (tokens,) = prompts.of_texts(parsed.prompt or "")
            return tokens

        prompt = self._call_or_refuse(encode_prompt)
        # `split_special_tokens`: "<|im_end|>" in the text is read as characters, not as the special token.
        text: Any = engine.tokenizer(parsed.text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

        def check_tokens() -> None:
            """Raise an error if the base's embedding has no row for a token of the text."""
            engine.base.require_rows(text, "the text")

        self._call_or_refuse(check_tokens, "text")
        self._refuse_too_long(engine, len(prompt) + len(text), num_new_tokens=0, param="text")
        self._take_tokens(parsed.model, len(prompt) + len(text))
        try:
            engine = self._engine_of(parsed.model)
            routing_future = self.worker.call(lambda: engine.route(parsed.model, prompt, list(text)))
            routing = await asyncio.wrap_future(routing_future)
        except Overloaded as error:
            raise ApiError(503, str(error), code="overloaded", retry_after=1) from None
        except ComingleError as error:
            raise ApiError(400, str(error), code="no_routers") from None
        return JSONResponse({"experts": routing.experts, "tokens": routing.tokens, "gates": routing.gates.tolist()})

    def _call_or_refuse(self, compute: Callable[[], T], param: str = "prompt") -> T:
        """Call a function and return its result; raise its :class:`ComingleError` as an :class:`ApiError`.

        Args:
            compute: Computes something from a request, such as the tokens of its prompt.
            param: The key of the request that the error names.

        Raises:
            ApiError: The function has raised a :class:`ComingleError`.
        """
        try:
            return compute()
        except ComingleError as error:
            raise ApiError(400, str(error), param=param) from None

    def _refuse_too_long(self, engine: Engine, num_prompt_tokens: int, *, num_new_tokens: int, param: str) -> None:
        """Raise an error if prompt and new tokens together are longer than the model's context.

        Args:
            engine: The engine of the model.
            num_prompt_tokens: Number of tokens in the prompt.
            num_new_tokens: Number of tokens to generate; may be 0.
            param: The key of the request that the error names.

        Raises:
            ApiError: They are longer.
        """
        context_length = engine.context_length
        if context_length is None or num_prompt_tokens + num_new_tokens <= context_length:
            return
        message = f"the context length of this model is {context_length:,} tokens; the prompt has {num_prompt_tokens:,}"
        if num_new_tokens:
            message += f", and {num_new_tokens:,} new ones are requested"
        raise ApiError(400, message, code="context_length_exceeded", param=param)

    def _num_new_tokens(self, engine: Engine, num_prompt_tokens: int, requested: int | None, param: str) -> int:
        """Return the largest number of tokens to generate: the requested number, or else as many as are allowed.

        Args:
            engine: The engine of the model.
            num_prompt_tokens: Number of tokens in the prompt.
            requested: The requested number; None if the request has none.
            param: The key of the prompt in the request, for the error.

        Raises:
            ApiError: The requested number is above the server's limit, or prompt and answer exceed the context.
        """
        limit = self.limits.max_tokens
        if requested is not None:
            if requested > limit:
                raise ApiError(400, f"max_tokens: got {requested:,}; allowed: up to {limit:,}", param="max_tokens")
            num_new_tokens = requested
        else:
            context_length = engine.context_length
            room = limit if context_length is None else context_length - num_prompt_tokens
            num_new_tokens = max(1, min(limit, room))  # at least 1, which is refused below if there is no room
        self._refuse_too_long(engine, num_prompt_tokens, num_new_tokens=num_new_tokens, param=param)
        return num_new_tokens

    async def _respond(
        self, http: Request, parsed: ChatRequest | CompletionRequest, prompts: Sequence[list[int]], *, ends: object
    ) -> Response:
        """Generate an answer and return the response, either streamed or complete.

        Args:
            http: The HTTP request.
            parsed: Its body.
            prompts: Tokens of each prompt.
            ends: Tokens that end a text, as an ``eos_token_id`` of transformers; None for those of the base.

        Raises:
            ApiError: Too many or too long texts are requested, or the queue is full.
        """
        piece_queue = PieceQueue(self.metrics)
        piece_queue.requests = self._engine_requests(parsed, prompts, ends=ends, piece_queue=piece_queue)
        answer = Answer(
            chat=isinstance(parsed, ChatRequest),
            model=parsed.model,
            tokenizer=self._engine_of(parsed.model).tokenizer,
            wants_logprobs=parsed.num_top_logprobs is not None,
            prompt_tokens=sum(len(prompt) for prompt in prompts),
        )
        prompt_tokens = sum(len(request.prompt) for request in piece_queue.requests)
        largest_answer = sum(request.sampling.max_new_tokens for request in piece_queue.requests)
        self._take_tokens(parsed.model, prompt_tokens + largest_answer)
        if (quotas := self.quotas) is not None:
            piece_queue.on_end = lambda num_new: quotas.take(parsed.model, num_new - largest_answer)
        try:
            self.worker.submit(piece_queue.requests)
        except (Overloaded, ComingleError) as error:
            if self.quotas is not None:
                self.quotas.take(parsed.model, -prompt_tokens - largest_answer)
            if isinstance(error, Overloaded):
                raise ApiError(503, str(error), code="overloaded", retry_after=1) from None
            raise ApiError(400, str(error)) from None
        first_request = piece_queue.requests[0]
        end_tokens = self._engine_of(first_request.name).ends(first_request)  # the same for all texts of the answer
        if parsed.stream:
            events = stream(piece_queue, answer, end_tokens, includes_usage=parsed.includes_usage)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        choices = await result_while_connected(http, collect_choices(piece_queue, end_tokens))
        if choices is None:  # the client has disconnected
            return Response(status_code=499)
        return JSONResponse(answer.body(choices))

    def _engine_requests(
        self,
        parsed: ChatRequest | CompletionRequest,
        prompts: Sequence[list[int]],
        *,
        ends: object,
        piece_queue: PieceQueue,
    ) -> list[engines.Request]:
        """Return the engine's requests for an API request: ``n`` for each prompt, with the seeds s, s + 1, ...

        Args:
            parsed: The API request.
            prompts: Tokens of each prompt.
            ends: Tokens that end a text, as an ``eos_token_id`` of transformers; None for those of the base.
            piece_queue: Receives the generated pieces.

        Raises:
            ApiError: Too many or too long texts are requested.
        """
        texts_per_prompt = parsed.n or 1
        num_texts = texts_per_prompt * len(prompts)
        if num_texts > self.limits.choices:
            message = f"got {num_texts} answers in one request; allowed: up to {self.limits.choices}"
            raise ApiError(400, message, param="n")
        # A request's seed may be negative; the remainder is not.
        first_seed = secrets.randbits(48) if parsed.seed is None else parsed.seed % 2**63
        param = "messages" if isinstance(parsed, ChatRequest) else "prompt"
        requests: list[engines.Request] = []
        engine = self._engine_of(parsed.model)
        for prompt in prompts:
            num_new_tokens = self._num_new_tokens(engine, len(prompt), parsed.max_new_tokens, param)
            for i in range(texts_per_prompt):
                seed = (first_seed + i) % 2**63
                sampling = replace(parsed.sampling(num_new_tokens, seed), eos_token_id=ends)
                request = engines.Request(
                    name=parsed.model,
                    prompt=prompt,
                    sampling=sampling,
                    on_piece=piece_queue.callback(len(requests), len(prompt)),
                    logprobs=parsed.num_top_logprobs,
                    continues=isinstance(parsed, CompletionRequest),
                )
                requests.append(request)
        return requests


class GracefulServer(uvicorn.Server):
    """A server that completes answers in progress for :data:`GRACE_SECONDS` when a signal stops it."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Accept no more requests, and end the answers that take too long."""
        super().handle_exit(sig, frame)
        timer = threading.Timer(GRACE_SECONDS, self._service.end_answers)
        timer.daemon = True
        timer.start()


class LoadAdapter(BaseModel):
    """Body of ``POST /v1/load_lora_adapter``, as in vLLM."""

    model_config = ConfigDict(extra="forbid", strict=True)

    lora_name: str = ""
    lora_path: str
    load_inplace: bool = False


class UnloadAdapter(BaseModel):
    """Body of ``POST /v1/unload_lora_adapter``, as in vLLM."""

    model_config = ConfigDict(extra="forbid", strict=True)

    lora_name: str


class ModelLoader:
    """Loads and unloads models while the server runs, and takes up newer checkpoints."""

    def __init__(self, pool: EnginePool, service: Service, operator_key: str | None) -> None:
        """Start without checking for newer checkpoints, which :meth:`watch` does.

        Args:
            pool: The models; only the service's worker changes it.
            service: The service.
            operator_key: Key for loading and unloading over HTTP; None to refuse it.
        """
        self.pool, self.service, self._operator_key = pool, service, operator_key
        self._lock = threading.Lock()  # one source is opened at a time
        self._versions = {source: source.version for source in pool.sources}
        self._problems: dict[Source, str] = {}  # why newer models could not be loaded, which is logged once
        self._stopped = threading.Event()

    def add_to(self, app: FastAPI) -> None:
        """Add the operator's requests to a server."""
        app.post("/v1/load_lora_adapter")(self.load)
        app.post("/v1/unload_lora_adapter")(self.unload)

    def _check_operator(self, request: Request) -> None:
        """Raise an error unless a request has the operator's key."""
        if self._operator_key is None:
            raise ApiError(403, "models are loaded only by servers that were started with --operator-key FILE")
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secrets.compare_digest(key.strip().encode(), self._operator_key.encode()):
            raise ApiError(401, "the operator's key is needed: Authorization: Bearer KEY", code="invalid_api_key")

    async def load(self, request: Request) -> Response:
        """Handle ``POST /v1/load_lora_adapter``: load a run, a user's state folder or a PEFT adapter."""
        self._check_operator(request)
        body = await self.service.read_body(request, LoadAdapter)
        source = Source(path=Path(body.lora_path), name=body.lora_name or None)
        try:
            names = await asyncio.to_thread(self._load, source, replaces=body.load_inplace)
        except ComingleError as error:
            raise ApiError(400, str(error), param="lora_path") from None
        return PlainTextResponse(f"Success: LoRA adapter {', '.join(map(repr, names))} added successfully.\n")

    async def unload(self, request: Request) -> Response:
        """Handle ``POST /v1/unload_lora_adapter``: unload one source of models by its name or a user's name."""
        self._check_operator(request)
        name = (await self.service.read_body(request, UnloadAdapter)).lora_name
        source = self.pool.source_of(name)
        if source is None:
            raise ApiError(404, f"no model {name!r}", code="model_not_found", param="lora_name")
        await asyncio.to_thread(self._unload, source)
        return PlainTextResponse(f"Success: LoRA adapter {name!r} removed successfully.\n")

    def _load(self, source: Source, *, replaces: bool) -> list[str]:
        """Open a source and add its models; return their names.

        Args:
            source: The source.
            replaces: Whether it may be loaded already.

        Raises:
            ComingleError: It cannot be opened, or a name is taken.
        """
        with self._lock:
            if source in self.pool.sources and not replaces:
                raise RunError(f"{source.path}: is loaded already; reload it with load_inplace: true")
            version = source.version
            opened = source.open(self.pool.base)
            self.service.worker.call(lambda: self.pool.add(source, opened)).result()
            self._versions[source] = version
            return list(opened.models)

    def _unload(self, source: Source) -> None:
        """Remove a source's models."""
        with self._lock:
            self.service.worker.call(lambda: self.pool.remove(source)).result()
            self._versions.pop(source, None)

    def reload_changed(self) -> int:
        """Load the newer checkpoints and adapters of all sources; return how many sources had one.

        A source that cannot be opened, such as a run that is being written, keeps its models, and is tried again when
        it has changed again.
        """
        num_reloaded = 0
        for source, version in list(self._versions.items()):
            try:
                newest = source.version
                if newest == version:
                    continue
                self._versions[source] = newest
                names = self._load(source, replaces=True)
                self._problems.pop(source, None)
                logger.info("%s: newer models answer now", source.path)
                num_reloaded += 1
                if self.service.metrics is not None:
                    self.service.metrics.model_updates.inc(len(names))
            except (ComingleError, OSError, Overloaded) as error:
                if self._problems.get(source) != str(error):
                    self._problems[source] = str(error)
                    logger.warning("%s: the models stay as they were: %s", source.path, error)
        return num_reloaded

    def watch(self, seconds: float) -> None:
        """Look for newer checkpoints in a thread, until :meth:`stop`.

        Args:
            seconds: Time between two looks.
        """

        def look() -> None:
            while not self._stopped.wait(seconds):
                self.reload_changed()

        threading.Thread(target=look, name="comingle-reload", daemon=True).start()

    def stop(self) -> None:
        """End :meth:`watch`."""
        self._stopped.set()


RELOAD_SECONDS = 5.0
"""Time between two looks for newer checkpoints."""


def serve(
    pool: EnginePool,
    sock: socket.socket,
    *,
    keys: Path | None,
    limits: Limits,
    ready: Callable[[str], None],
    operator_key: str | None = None,
) -> None:
    """Answer requests until the process receives a signal to stop.

    Args:
        pool: The models.
        sock: The socket to listen on.
        keys: File with users' keys, which is read again when it changes; None if requests need no key.
        limits: Limits on requests.
        ready: Called once with the server's URL, before the first request is answered.
        operator_key: Key with which models are loaded and unloaded over HTTP; None to refuse that.
    """
    access = Keys(pool.models, None) if keys is None else WatchedKeys(keys, pool.models)
    app = make_app(pool, access, limits, answers=pool.answers)
    loader = ModelLoader(pool, app.state.service, operator_key)
    loader.add_to(app)
    server = GracefulServer(uvicorn.Config(app, **UVICORN_OPTIONS), app.state.service)
    ready(url_of(sock))
    loader.watch(RELOAD_SECONDS)
    try:
        server.run(sockets=[sock])
    finally:
        loader.stop()
