"""Sockets, keys, limits, metrics and error responses of the API server. The module does not import torch."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from comingle.utils.errors import ComingleError, DataError, RunError, require_user
from comingle.utils.names import name_problem

if TYPE_CHECKING:
    from fastapi.responses import JSONResponse
    from prometheus_client import CollectorRegistry

logger = logging.getLogger("comingle")

MIN_KEY_LENGTH = 16
"""Minimum length of a key in characters; shorter keys can be guessed."""


KeyOrKeys = str | tuple[str, ...]
"""A user's key; several while an old and a new key are both valid."""


def _as_tuple(keys: KeyOrKeys) -> tuple[str, ...]:
    return (keys,) if isinstance(keys, str) else keys


class Keys:
    """The keys that give access to users' models.

    Args:
        names: All users; a collection to which users may be added later.
        keys: One or several keys by user; None to give everyone who reaches the server access to all models.
    """

    def __init__(self, names: Collection[str], keys: Mapping[str, KeyOrKeys] | None) -> None:
        self.names = names
        self._digests: list[tuple[str, bytes]] | None = None  # user and digest of each key
        if keys is not None:
            self._digests = [(name, _digest(key)) for name, of_user in keys.items() for key in _as_tuple(of_user)]

    @property
    def required(self) -> bool:
        """True if a request needs a key."""
        return self._digests is not None

    def users_of(self, key: str) -> tuple[str, ...]:
        """Return the users whose models a key opens; all users if no keys are required."""
        import hmac  # loads OpenSSL, which `comingle --help` does not need

        if self._digests is None:
            return tuple(self.names)
        given_digest = _digest(key)
        users = []
        for name, digest in self._digests:
            if hmac.compare_digest(given_digest, digest):  # in constant time, so that its duration reveals nothing
                users.append(name)
        return tuple(users)


def _digest(key: str) -> bytes:
    """Return the SHA-256 of a key; comparing digests takes the same time for every wrong key."""
    import hashlib  # loads OpenSSL, which `comingle --help` does not need

    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


class WatchedKeys(Keys):
    """Keys from a file that an operator may change while the server runs, to replace keys, or add or remove users."""

    def __init__(self, path: Path, known: Collection[str] | None = None) -> None:
        """Read the file.

        Args:
            path: The file.
            known: Users with a model, a collection that may change; None if the users are those in the file.

        Raises:
            DataError: It cannot be used.
        """
        self._path, self._known = path, known
        self._version: tuple[int, ...] = ()  # of the file that was read
        super().__init__([], {})
        self._read()

    def users_of(self, key: str) -> tuple[str, ...]:
        """Return the users whose models a key opens, by the file as it is now."""
        try:
            self._read()
        except (ComingleError, OSError, UnicodeError) as error:  # it is being edited: the last keys remain valid
            logger.warning("%s", error)
        users = super().users_of(key)
        return users if self._known is None else tuple(name for name in users if name in self._known)

    def _read(self) -> None:
        """Replace names and keys by those in the file if it has changed since it was read.

        Raises:
            DataError: The file cannot be used; names and keys stay as they were.
        """
        if not self._path.exists():  # all access is withdrawn
            self._version = ()
            super().__init__([], {})
            return
        status = self._path.stat()
        version = (status.st_mtime_ns, status.st_ino, status.st_size)
        if version == self._version:
            return
        is_empty = not self._path.read_text(encoding="utf-8").strip()  # all access is withdrawn
        keys = {} if is_empty else read_keys(self._path, None)
        super().__init__(list(keys), keys)
        self._version = version


def read_keys(path: Path, names: Iterable[str] | None) -> dict[str, KeyOrKeys]:
    """Read the users' keys from a YAML file with lines of ``USER: KEY``, or ``USER: [KEY, KEY]`` for several.

    Args:
        path: The file. Users that it does not list have no key, so their models cannot be used.
        names: All users; None if they are those in the file.

    Raises:
        DataError: The file has another form, a user does not exist, a key is invalid, or two users have the same key.
    """
    from comingle.config.files import read_text

    try:
        content: Any = read_text(path.read_text(encoding="utf-8"), str(path))
        is_readable_by_others = path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--keys {path}: cannot be read as UTF-8 text ({type(error).__name__})") from None
    if not isinstance(content, Mapping) or not content:
        raise DataError(f"--keys {path}: allowed: lines of USER: KEY")
    if names is None and (problem := name_problem([str(name) for name in content])):
        raise DataError(f"--keys {path}: {problem}")
    known_users = list(map(str, content) if names is None else names)
    keys, owners = dict[str, KeyOrKeys](), dict[str, str]()
    for name, given in content.items():
        require_user(str(name), known_users, f"--keys {path}: ")
        own_keys: list[Any] = given if isinstance(given, list) and given else [given]
        for key in own_keys:
            if problem := _key_problem(key):
                raise DataError(f"--keys {path}: the key of {name!r} {problem}")
            if key in owners:
                raise DataError(f"--keys {path}: {name!r} has the key of {owners[key]!r}; keys must be unique")
            owners[key] = name
        keys[name] = tuple(own_keys) if isinstance(given, list) else own_keys[0]
    if is_readable_by_others:
        logger.warning("--keys %s: other users of this machine can read it; restrict it with chmod 600", path)
    return keys


def _key_problem(key: object) -> str:
    """Return why a value in a file cannot be a key; empty if it can."""
    if not isinstance(key, str) or len(key) < MIN_KEY_LENGTH:
        return f"is not a text of at least {MIN_KEY_LENGTH} characters"
    fits_http_header = key.isascii() and key.isprintable() and " " not in key
    return "" if fits_http_header else "has characters that HTTP headers do not allow"


def make_keys(path: Path, names: Iterable[str]) -> None:
    """Write a new key for every user to a file that only its owner can read.

    Raises:
        RunError: The file exists or cannot be written.
    """
    import secrets

    import yaml

    from comingle.utils.records import write_text

    if path.exists():
        raise RunError(f"--make-keys {path}: exists; choose another name, or delete it first")
    keys = {name: f"sk-{secrets.token_urlsafe(24)}" for name in names}
    try:
        write_text(path, yaml.safe_dump(keys, sort_keys=False, allow_unicode=True), private=True)
    except OSError as error:
        raise RunError(f"--make-keys {path}: cannot be written: {error.strerror}") from None


def read_operator_key(path: Path, where: str) -> str:
    """Return the operator's key, which is written to a file of the operator only if there is none.

    Args:
        path: The file.
        where: The option that needs the key, for errors.

    Raises:
        RunError: The file cannot be read, or has no key.
    """
    import secrets

    from comingle.utils.records import write_text

    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_text(path, secrets.token_urlsafe(24) + "\n", private=True)
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{where}: {path}: cannot be read: {error}") from None
    if len(key) < MIN_KEY_LENGTH:
        raise RunError(f"{where}: {path}: has no key of at least {MIN_KEY_LENGTH} characters; delete it for a new one")
    return key


def is_loopback(host: str) -> bool:
    """Return whether a host is reachable from this machine only: "localhost", 127.0.0.1 or [::1], for example."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def hostname(address: str) -> str:
    """Return the host of ``HOST:PORT``, or an empty string if there is none."""
    try:
        return urlsplit(f"//{address}").hostname or ""
    except ValueError:
        return ""


def cross_site_page(headers: Mapping[str, str]) -> str:
    """Return a description of the web page of another site that sent a request; empty if there is no such page.

    Browsers set one of the headers ``Origin`` and ``Sec-Fetch-Site``; other programs set neither.

    Args:
        headers: Headers of the request.
    """
    origin = headers.get("origin")  # such as "https://example.com"
    if origin is not None:
        _scheme, _, origin_host = origin.lower().partition("://")
        own_host = headers.get("host", "").lower()
        if origin_host != own_host:
            return f"a page of {origin!r}"
    if headers.get("sec-fetch-site") == "cross-site":
        return "a page of another site"
    return ""


def check_host(host: str, keys: Mapping[str, KeyOrKeys] | None) -> None:
    """Raise an error if a server without keys would listen on an address that other machines can reach.

    Args:
        host: The address to listen on.
        keys: Key by user; None for a server without keys.

    Raises:
        ComingleError: Other machines could reach the models.
    """
    if keys is None and not is_loopback(host):
        raise ComingleError(
            f"--host {host}: without --keys the server answers only this machine (127.0.0.1); write a key for each "
            "user with --make-keys FILE and use them with --keys FILE"
        )


MINUTE = 60.0
DAY = 86_400.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the server.

    Args:
        max_tokens: New tokens per text.
        rate: Requests per user and minute.
        rows: Texts that are generated at the same time.
        queue: Texts that wait for a row.
        prompt_tokens: Tokens of prompts that are read between two tokens of other texts; None: by device.
        prefix_bytes: Size of the cache of prompts' prefixes.
        body_bytes: Size of the body of an HTTP request.
        choices: Texts per HTTP request.
        tokens_per_day: Tokens of prompts and answers per user and day; None for no limit.
    """

    max_tokens: int = 1024
    rate: int = 600
    rows: int = 16
    queue: int = 64
    prompt_tokens: int | None = None
    prefix_bytes: int = 256 << 20
    body_bytes: int = 1 << 20
    choices: int = 16
    tokens_per_day: int | None = None


class Buckets:
    """Token buckets of users: each holds ``capacity``, is full at first, and refills to it within ``seconds``."""

    def __init__(self, capacity: float, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity, self.seconds, self.clock = float(capacity), seconds, clock
        self._buckets: dict[str, tuple[float, float]] = {}  # by user: what is left, and when that was

    def left(self, name: str) -> float:
        """Return what is left in a user's bucket."""
        now = self.clock()
        left, then = self._buckets.get(name, (self.capacity, now))
        return min(self.capacity, left + (now - then) * self.capacity / self.seconds)

    def take(self, name: str, amount: float) -> float:
        """Take from a user's bucket unless there is too little in it.

        Args:
            name: The user.
            amount: How much; a negative amount is given back.

        Returns:
            Seconds to wait until there is enough; 0 if it was taken.
        """
        left = self.left(name)
        missing = max(0.0, amount - left)
        self._buckets[name] = (left if missing else min(self.capacity, left - amount), self.clock())
        return missing * self.seconds / self.capacity


class Rates(Buckets):
    """Rate limits: a user's bucket holds ``rate`` requests, and refills at ``rate`` per minute."""

    def __init__(self, rate: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(rate, MINUTE, clock)

    def take_request(self, name: str) -> float:
        """Count a request of a user; return the seconds to wait until it is allowed, 0 if it is allowed now."""
        return self.take(name, 1)


GRACE_SECONDS = 5.0
"""Time that answers in progress have to end when the server is stopped; then they end with an error."""

NICENESS = 10
"""Niceness of threads that train beside answers; on a busy processor they get a tenth of the time of the others."""

UVICORN_OPTIONS: dict[str, Any] = {
    "ws": "none",  # the API uses no WebSockets
    "log_level": "warning",
    "access_log": False,
    "timeout_graceful_shutdown": round(GRACE_SECONDS) + 3,  # seconds; no answer should be left by then
}
"""Options of ``uvicorn.Config`` for the API."""

if os.environ.get("COMINGLE_LOG") == "json":
    UVICORN_OPTIONS["log_config"] = None  # its records reach the root logger, which writes JSON


def prefer_answers() -> None:
    """Lower the priority of the calling thread, which trains, and of the threads that it starts; only on Linux."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):  # some sandboxes forbid it
            os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket.

    Args:
        host: Address to listen on, such as "127.0.0.1" or "[::1]".
        port: Port; 0 for any free one.

    Raises:
        RunError: The address is in use or does not exist.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), port), family=family, backlog=2048)
    except OSError as error:
        raise RunError(f"--host {host} --port {port}: cannot listen there: {error.strerror or error}") from None


def url_of(sock: socket.socket) -> str:
    """Return the URL of a listening socket, such as "http://127.0.0.1:8000"."""
    host, port = sock.getsockname()[:2]
    is_ipv6 = ":" in host
    return f"http://[{host}]:{port}" if is_ipv6 else f"http://{host}:{port}"


ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class ApiError(Exception):
    """Error that becomes the response to a request, in the OpenAI API's form."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        """Create the error.

        Args:
            status: HTTP status.
            message: The error message.
            code: Error code of the OpenAI API; None if the API has no code for this error.
            param: The offending key of the request; None if there is none.
            retry_after: Seconds after which the client may retry; None if a retry does not help.
        """
        super().__init__(message)
        self.status, self.code, self.param, self.retry_after = status, code, param, retry_after

    def body(self) -> dict[str, object]:
        """Return the error body of the OpenAI API."""
        error_type = ERROR_TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": error_type, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return the HTTP response."""
        from fastapi.responses import JSONResponse

        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, round(self.retry_after)))  # HTTP allows only whole seconds
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), status_code=self.status, headers=headers)


METRICS_EXTRA = "needs prometheus-client: pip install 'comingle[app]'"
"""End of the message if the package is missing."""

# Upper bounds of histogram buckets in seconds, as in vLLM.
_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_TEXT_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class Metrics:
    """Metrics of a server of models, for ``GET /metrics``.

    Metrics with the prefix ``vllm:`` have the meaning that they have in vLLM, those with ``comingle:`` are our own.
    Nothing is labelled with a user's name, since another user may read them.
    """

    def __init__(
        self,
        model_name: str,
        *,
        num_running: Callable[[], int],
        num_waiting: Callable[[], int],
        num_prefix_bytes: Callable[[], int] = lambda: 0,
        num_adapter_bytes: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Create metrics that are all zero.

        Args:
            model_name: Value of the label ``model_name``: the base, which all users share.
            num_running: Returns the number of texts that are being generated.
            num_waiting: Returns the number of texts that wait for a row.
            num_prefix_bytes: Returns the size of the cache of prompts' prefixes.
            num_adapter_bytes: Returns the size of the adapters in memory that may be evicted.
            clock: Returns a time in seconds.

        Raises:
            ImportError: prometheus-client is not installed.
        """
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry: CollectorRegistry = CollectorRegistry()
        self.clock = clock
        labels, registry = ("model_name",), self.registry

        def gauge(name: str, text: str, value: Callable[[], int]) -> None:
            Gauge(name, text, labels, registry=registry).labels(model_name).set_function(value)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, labels, registry=registry).labels(model_name)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, labels, registry=registry, buckets=buckets).labels(model_name)

        gauge("vllm:num_requests_running", "Texts that are being generated.", num_running)
        gauge("vllm:num_requests_waiting", "Texts that wait for a row of the batch.", num_waiting)
        gauge("comingle:prefix_cache_bytes", "Size of the keys and values of prompts' prefixes.", num_prefix_bytes)
        gauge(
            "comingle:adapter_cache_bytes",
            "Size of users' adapters in memory, besides those of rows.",
            num_adapter_bytes,
        )
        self.prefix_queries = counter(
            "vllm:prefix_cache_queries", "Tokens of prompts that were looked up in the cache."
        )
        self.prefix_hits = counter("vllm:prefix_cache_hits", "Tokens of prompts that were found in the cache.")
        self.prompt_tokens = counter("vllm:prompt_tokens", "Tokens of prompts that were read.")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens that were generated.")
        self.first_token_seconds = histogram(
            "vllm:time_to_first_token_seconds", "Seconds from a request to its first token.", _FIRST_TOKEN_SECONDS
        )
        self.token_seconds = histogram(
            "vllm:inter_token_latency_seconds", "Seconds between two tokens of a text.", _TOKEN_SECONDS
        )
        self.text_seconds = histogram(
            "vllm:e2e_request_latency_seconds", "Seconds from a request to the end of its text.", _TEXT_SECONDS
        )
        ended = Counter(
            "vllm:request_success",
            "Texts that have ended, by reason: stop, length, abort (the client has disconnected) or error.",
            (*labels, "finished_reason"),
            registry=registry,
        )
        # A child for each reason, so that all are shown from the start.
        self.ended = {reason: ended.labels(model_name, reason) for reason in ("stop", "length", "abort", "error")}
        self.refused = Counter(
            "comingle:requests_refused",
            "Requests answered with an error, by HTTP status.",
            ("status",),
            registry=registry,
        )
        self.model_updates = counter("comingle:model_updates", "Models of users that were replaced by newer ones.")

    def page(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry)


class TextTimer:
    """Times of one text, from its request to its last token, for :class:`Metrics`."""

    def __init__(self, metrics: Metrics, num_prompt_tokens: int) -> None:
        """Start when the request has arrived."""
        self._metrics, self._num_prompt_tokens = metrics, num_prompt_tokens
        self._arrived_at = metrics.clock()
        self._last_token_at: float | None = None  # None before the first token
        self._has_ended = False

    def add_token(self, cached_tokens: int = 0) -> None:
        """Count a token that was generated.

        Args:
            cached_tokens: With the first token, how many tokens of the prompt were cached.
        """
        metrics, now = self._metrics, self._metrics.clock()
        if self._last_token_at is None:  # the prompt has been read
            metrics.prompt_tokens.inc(self._num_prompt_tokens)
            metrics.prefix_queries.inc(self._num_prompt_tokens)
            metrics.prefix_hits.inc(cached_tokens)
            metrics.first_token_seconds.observe(now - self._arrived_at)
        else:
            metrics.token_seconds.observe(now - self._last_token_at)
        metrics.generation_tokens.inc()
        self._last_token_at = now

    def end(self, reason: str) -> None:
        """Count the end of the text; only the first call counts.

        Args:
            reason: "stop", "length", "abort" or "error".
        """
        if self._has_ended:
            return
        self._has_ended = True
        self._metrics.ended[reason].inc()
        is_complete = reason in ("stop", "length")
        if is_complete:
            self._metrics.text_seconds.observe(self._metrics.clock() - self._arrived_at)
