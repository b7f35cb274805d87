"""A participant's processes: a client, and behind it the worker that answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.request import getproxies, proxy_bypass

from comingle.federation.files import Participant, load_participant, save_participant
from comingle.federation.own import ENDED
from comingle.transports.flower.answering import Answer, certificate_problem, problem_of, who_answers
from comingle.transports.flower.calling import FOLDER as WORKER
from comingle.transports.flower.calling import LOG
from comingle.transports.flower.processes import LOCAL_HOSTS, split_address
from comingle.transports.flower.supernode import SuperNode, participate
from comingle.transports.flower.users import UNFIT, User
from comingle.utils.errors import RecipeError, RunError
from comingle.utils.files import locked

LINGER_SECONDS = 5.0

SAYS = "comingle: "
"""How the lines of a worker begin that are for people."""


def take_part(
    file: Path | None, given: Mapping[str, Any], *, default: Path, say: Callable[[str], None], stays: bool = False
) -> None:
    """Take part in a federation until it ends, or until somebody interrupts; what is ``given`` comes before the file.

    With ``stays`` the participant waits for the next federation when one has ended.
    Without a file one is written to the state folder, so that the same without options goes on.

    Raises:
        ComingleError: something about the participant is missing or wrong, or the server refuses it.
    """
    participant = _participant(file, given, default)
    if not participant.server:
        raise RecipeError(f"user {participant.name!r}: no server; give --server HOST:PORT")
    if not _is_address(participant.server):
        raise RecipeError(f"--server: got {participant.server!r}; allowed: HOST:PORT, as 192.0.2.1:9092")
    _require_files(participant)
    found = who_answers(participant.server)
    if problem := problem_of(participant.server, found, secure=bool(participant.certificates)):
        raise RecipeError(f"user {participant.name!r}: {problem}")
    authority = participant.certificates
    if authority and (problem := certificate_problem(participant.server, Path(authority))):
        raise RecipeError(f"user {participant.name!r}: {problem}")
    if found is Answer.OTHER:
        say(f"{participant.name}: {found.value} answers at {participant.server}; is that the right --server?")
    if proxy := _proxy_of(participant.server, secure=bool(participant.certificates)):
        host = split_address(participant.server)[0]
        say(f"{participant.name}: uses the proxy {proxy} for {participant.server}; bypass it with no_proxy={host}")
    state = Path(participant.state)
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    with locked(state):
        _take_part(participant, participant.server, state, say, stays=stays)


def _take_part(participant: Participant, server: str, state: Path, say: Callable[[str], None], *, stays: bool) -> None:
    known = state / "participant.yaml"
    save_participant(known, participant)
    node = SuperNode(
        user=User(name=participant.name, state=state, config=known),
        server=server,
        say=say,
        authority=Path(participant.certificates) if participant.certificates else None,
        key=Path(participant.key) if participant.key else None,
    )
    say(f"{participant.name}: waiting for {server}; everything private stays in {state}")
    words = Words(state / WORKER / LOG)
    (state / UNFIT).unlink(missing_ok=True)  # of an earlier time
    try:
        participate(node, Ending(words, say, state, stays=stays))
    finally:
        _relay(words, say)


class Ending:
    """Return whether a participant's processes may end, some seconds after the reason, so that the server hears of it.

    With ``stays`` they end neither with a federation nor when this user does not fit one.
    """

    def __init__(self, words: Words, say: Callable[[str], None], state: Path, *, stays: bool):
        self._words, self._say, self._state, self._stays = words, say, state, stays
        self._ended: float | None = None

    def __call__(self) -> bool:
        """Say what the worker has said meanwhile.

        Raises:
            RunError: this user cannot take part with its settings.
        """
        ended = _relay(self._words, self._say)
        reason = read_reason(self._state)
        if (ended or reason) and not self._stays and self._ended is None:
            self._ended = time.monotonic()
        if self._ended is None or time.monotonic() - self._ended <= LINGER_SECONDS:
            return False
        if reason:
            raise RunError(f"cannot take part: {reason}")
        return True


def read_reason(state: Path) -> str:
    """Return why the user of a state folder cannot take part, as its worker has found; nothing where it can."""
    try:
        return (state / UNFIT).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _relay(words: Words, say: Callable[[str], None]) -> bool:
    """Say what the worker has said; whether that was the end."""
    lines = words.new()
    for line in lines:
        say(line)
    return any(line.startswith(ENDED) for line in lines)


class Words:
    """What a worker prints for the person at this machine, from now on."""

    def __init__(self, log: Path):
        self._log = log
        self._read = log.stat().st_size if log.exists() else 0

    def new(self) -> list[str]:
        """Whole lines that have not been read."""
        if not self._log.exists():
            return []
        with self._log.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        lines = whole.decode(errors="replace").splitlines()
        return [line.removeprefix(SAYS) for line in lines if line.startswith(SAYS)]


def _participant(file: Path | None, given: Mapping[str, Any], default: Path) -> Participant:
    if file is None and default.exists():
        file = default
    if file is not None:
        return load_participant(file, **given)
    content: dict[str, Any] = {"state": str(default.parent.absolute())}
    content |= {key: value for key, value in given.items() if value is not None}
    if "data" not in content:
        raise RecipeError(f"user {content['name']!r}: nothing says where its data is; give --data PATH, or a file")
    return Participant(**content)


def _require_files(participant: Participant) -> None:
    """See that the files are there that processes would look for later, again and again.

    Raises:
        RecipeError: one is not.
    """
    data = participant.data
    paths = {"key": participant.key, "certificates": participant.certificates}
    if isinstance(data, str) and not set(data) & set(":*?["):  # a file or folder, not what stands for others
        paths["data"] = data
    for what, path in paths.items():
        if path and not Path(path).exists():
            raise RecipeError(f"user {participant.name!r}: {what}: {path} does not exist")


def _proxy_of(server: str, *, secure: bool) -> str:
    """Return the proxy that the environment names for a server; empty where there is none."""
    host = split_address(server)[0]
    if host in LOCAL_HOSTS or proxy_bypass(host):
        return ""
    proxies = getproxies()
    return proxies.get("https" if secure else "http") or proxies.get("all") or ""


def _is_address(server: str) -> bool:
    host, colon, port = server.rpartition(":")
    return bool(host and colon and port.isdecimal() and int(port) < 1 << 16)
