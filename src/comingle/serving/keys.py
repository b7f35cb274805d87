"""Keys and limits of the server: which models a key opens, and how much may be asked."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from comingle.utils.errors import ComingleError, DataError, RunError, require_user
from comingle.utils.records import write_text

logger = logging.getLogger("comingle")

SHORTEST = 16
"""Characters of a key, at least: shorter ones can be guessed."""


class Keys:
    """Opens models. ``keys`` maps users to keys; None: everybody's models are open to all who reach the server."""

    def __init__(self, names: Iterable[str], keys: Mapping[str, str] | None) -> None:
        self.names = tuple(names)
        self._digests = None if keys is None else {name: _digest(key) for name, key in keys.items()}

    @property
    def needed(self) -> bool:
        """Whether a request needs a key."""
        return self._digests is not None

    def opens(self, key: str) -> tuple[str, ...]:
        """The users whose models a key opens; compared with everybody's, in a time that tells nothing."""
        if self._digests is None:
            return self.names
        given = _digest(key)
        return tuple([name for name, known in self._digests.items() if hmac.compare_digest(given, known)])


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def read_keys(path: Path, names: Iterable[str]) -> dict[str, str]:
    """The keys in a YAML file of ``USER: KEY``. A user without one cannot be reached.

    Raises:
        DataError: not such a file, a user that does not exist, a key that is too short, or one key for two users.
    """
    from comingle.config.files import read_text

    try:
        content: Any = read_text(path.read_text(encoding="utf-8"), str(path))
        open_to_others = path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--keys {path}: cannot be read as UTF-8 text ({type(error).__name__})") from None
    if not isinstance(content, Mapping) or not content:
        raise DataError(f"--keys {path}: expected lines of USER: KEY")
    known, keys = list(names), dict[str, str]()
    for name, key in content.items():
        require_user(str(name), known, f"--keys {path}: ")
        if not isinstance(key, str) or len(key) < SHORTEST:
            raise DataError(f"--keys {path}: the key of {name!r} is no text of at least {SHORTEST} characters")
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise DataError(f"--keys {path}: the key of {name!r} has characters that no header carries as they are")
        if key in keys.values():
            raise DataError(f"--keys {path}: {name!r} has the key of another user; each needs its own")
        keys[name] = key
    if open_to_others:
        logger.warning("--keys %s: others on this machine can read it; chmod 600 keeps it private", path)
    return keys


def make_keys(path: Path, names: Iterable[str]) -> None:
    """Write a new key for every user, to a file that its owner alone can read.

    Raises:
        RunError: the file exists, or cannot be written.
    """
    import yaml

    if path.exists():
        raise RunError(f"--make-keys {path}: exists; another name, or delete it first")
    keys = {name: f"sk-{secrets.token_urlsafe(24)}" for name in names}
    try:
        write_text(path, yaml.safe_dump(keys, sort_keys=False, allow_unicode=True), private=True)
    except OSError as error:
        raise RunError(f"--make-keys {path}: cannot be written: {error.strerror}") from None


def is_loopback(host: str) -> bool:
    """Whether an address reaches this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def hostname(place: str) -> str:
    """Return the name in ``HOST:PORT``; empty where there is none."""
    try:
        return urlsplit(f"//{place}").hostname or ""
    except ValueError:
        return ""


def foreign_page(headers: Mapping[str, str]) -> str:
    """Name the page of another site that a browser makes a request for; empty where there is none.

    Browsers name a page's ``Origin``, or say that the request crosses sites; other programs send neither header.
    """
    origin = headers.get("origin")
    if origin is not None and origin.lower().partition("://")[2] != headers.get("host", "").lower():
        return f"a page of {origin!r}"
    return "a page of another site" if headers.get("sec-fetch-site") == "cross-site" else ""


def check_host(host: str, keys: Mapping[str, str] | None) -> None:
    """Without keys, only this machine.

    Raises:
        ComingleError: others could reach the models.
    """
    if keys is None and not is_loopback(host):
        raise ComingleError(
            f"--host {host}: without --keys only this machine may ask (127.0.0.1); --make-keys FILE writes a key for "
            "each user, --keys FILE uses them"
        )


MINUTE = 60.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """``max_tokens`` new tokens for each answer, ``rate`` requests of each user's in a minute, ``rows`` that are
    answered at once, ``queue`` that wait, ``body_bytes`` of a request, ``choices`` of one request."""

    max_tokens: int = 1024
    rate: int = 600
    rows: int = 16
    queue: int = 64
    body_bytes: int = 1 << 20
    choices: int = 16


class Rates:
    """As many requests of each user's as fit into a minute: a bucket that fills as time goes by."""

    def __init__(self, rate: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate, self.clock = rate, clock
        self._left: dict[str, tuple[float, float]] = {}

    def wait(self, name: str) -> float:
        """Take one request out of a user's bucket: 0, or, where it is empty, the seconds until there is one again."""
        now = self.clock()
        left, last = self._left.get(name, (float(self.rate), now))
        left = min(float(self.rate), left + (now - last) * self.rate / MINUTE)
        taken = left >= 1
        self._left[name] = (left - taken, now)
        return 0.0 if taken else (1 - left) * MINUTE / self.rate
