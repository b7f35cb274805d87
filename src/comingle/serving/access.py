"""Sockets, keys, limits and error responses of the API server. The module does not import torch."""

from __future__ import annotations

import ipaddress
import logging
import socket
import stat
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from comingle.utils.errors import ComingleError, DataError, RunError, require_user
from comingle.utils.records import write_text

if TYPE_CHECKING:
    from fastapi.responses import JSONResponse

logger = logging.getLogger("comingle")

MIN_KEY_LENGTH = 16
"""Minimum length of a key in characters; shorter keys can be guessed."""


class Keys:
    """The keys that give access to users' models.

    Args:
        names: All users; a collection to which users may be added later.
        keys: Key by user; None to give everyone who reaches the server access to all models.
    """

    def __init__(self, names: Collection[str], keys: Mapping[str, str] | None) -> None:
        self.names = names
        self._digests = None if keys is None else {name: _digest(key) for name, key in keys.items()}

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
        for name, digest in self._digests.items():
            if hmac.compare_digest(given_digest, digest):  # in constant time, so that its duration reveals nothing
                users.append(name)
        return tuple(users)


def _digest(key: str) -> bytes:
    """Return the SHA-256 of a key; comparing digests takes the same time for every wrong key."""
    import hashlib  # loads OpenSSL, which `comingle --help` does not need

    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def read_keys(path: Path, names: Iterable[str]) -> dict[str, str]:
    """Read the users' keys from a YAML file with lines of ``USER: KEY``.

    Args:
        path: The file. Users that it does not list have no key, so their models cannot be used.
        names: All users.

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
    known_users, keys = list(names), dict[str, str]()
    for name, key in content.items():
        require_user(str(name), known_users, f"--keys {path}: ")
        if not isinstance(key, str) or len(key) < MIN_KEY_LENGTH:
            raise DataError(f"--keys {path}: the key of {name!r} is not a text of at least {MIN_KEY_LENGTH} characters")
        fits_http_header = key.isascii() and key.isprintable() and " " not in key
        if not fits_http_header:
            raise DataError(f"--keys {path}: the key of {name!r} has characters that HTTP headers do not allow")
        if key in keys.values():
            raise DataError(f"--keys {path}: {name!r} has the key of another user; keys must be unique")
        keys[name] = key
    if is_readable_by_others:
        logger.warning("--keys %s: other users of this machine can read it; restrict it with chmod 600", path)
    return keys


def make_keys(path: Path, names: Iterable[str]) -> None:
    """Write a new key for every user to a file that only its owner can read.

    Raises:
        RunError: The file exists or cannot be written.
    """
    import secrets

    import yaml

    if path.exists():
        raise RunError(f"--make-keys {path}: exists; choose another name, or delete it first")
    keys = {name: f"sk-{secrets.token_urlsafe(24)}" for name in names}
    try:
        write_text(path, yaml.safe_dump(keys, sort_keys=False, allow_unicode=True), private=True)
    except OSError as error:
        raise RunError(f"--make-keys {path}: cannot be written: {error.strerror}") from None


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


def check_host(host: str, keys: Mapping[str, str] | None) -> None:
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


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the server.

    Args:
        max_tokens: New tokens per text.
        rate: Requests per user and minute.
        rows: Texts that are generated at the same time.
        queue: Texts that wait for a row.
        body_bytes: Size of the body of an HTTP request.
        choices: Texts per HTTP request.
    """

    max_tokens: int = 1024
    rate: int = 600
    rows: int = 16
    queue: int = 64
    body_bytes: int = 1 << 20
    choices: int = 16


class Rates:
    """Rate limits by token buckets: a user's bucket holds ``rate`` requests, and refills at ``rate`` per minute."""

    def __init__(self, rate: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate, self.clock = rate, clock
        self._buckets: dict[str, tuple[float, float]] = {}  # by user: requests left, and the time of the last request

    def take_request(self, name: str) -> float:
        """Count a request of a user against the rate limit, by a token bucket that holds a minute's requests.

        Args:
            name: The user.

        Returns:
            Seconds to wait until a request is allowed; 0 if this one is.
        """
        now = self.clock()
        capacity = float(self.rate)
        requests_left, last_time = self._buckets.get(name, (capacity, now))
        refill = (now - last_time) * self.rate / MINUTE
        requests_left = min(capacity, requests_left + refill)
        if requests_left >= 1:
            self._buckets[name] = (requests_left - 1, now)
            return 0.0
        self._buckets[name] = (requests_left, now)
        return (1 - requests_left) * MINUTE / self.rate


UVICORN_OPTIONS: dict[str, Any] = {
    "ws": "none",  # the API uses no WebSockets
    "log_level": "warning",
    "access_log": False,
    "timeout_graceful_shutdown": 5,  # seconds that answers in progress have to end
}
"""Options of ``uvicorn.Config`` for the API."""


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
