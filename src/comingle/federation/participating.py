"""A participant's processes: a SuperNode, and behind it the worker that answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from comingle.errors import RecipeError
from comingle.federation.files import Participant, load_participant, save_participant
from comingle.transports.flower.supernode import SuperNode, participate
from comingle.transports.flower.users import User


def take_part(file: Path | None, given: Mapping[str, Any], *, default: Path, say: Callable[[str], None]) -> None:
    """Take part in a federation until it ends, or until somebody interrupts; what is ``given`` comes before the file.

    Without a file one is written to the state folder, so that the same without options goes on.

    Raises:
        ComingleError: something about the participant is missing or wrong, or the server refuses it.
    """
    participant = _participant(file, given, default)
    if not participant.server:
        raise RecipeError(f"user {participant.name!r}: no server; give --server HOST:PORT")
    if not _is_address(participant.server):
        raise RecipeError(f"--server: got {participant.server!r}; allowed: HOST:PORT, as 192.0.2.1:9092")
    state = Path(participant.state)
    known = state / "participant.yaml"
    save_participant(known, participant)
    node = SuperNode(
        user=User(name=participant.name, state=state, config=known),
        server=participant.server,
        say=say,
        authority=Path(participant.certificates) if participant.certificates else None,
        key=Path(participant.key) if participant.key else None,
    )
    say(f"{participant.name}: waiting for {participant.server}; everything private stays in {state}")
    participate(node)


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


def _is_address(server: str) -> bool:
    host, colon, port = server.rpartition(":")
    return bool(host and colon and port.isdecimal() and int(port) < 1 << 16)
