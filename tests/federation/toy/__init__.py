"""Small server and client programs without torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from comingle.federation.flower.client import ClientProcess

SERVER_APP = "tests.federation.toy.toy_server:app"


def toy_client(
    name: str,
    state: Path,
    server: str,
    say: Callable[[str], None],
    *,
    key: Path | None = None,
    authority: Path | None = None,
) -> ClientProcess:
    """A process of ``toy_client.py``."""
    given = {"--key": key, "--authority": authority}
    command = [sys.executable, str(Path(__file__).with_name("toy_client.py"))]
    command += ["--name", name, "--state", str(state), "--server", server]
    command += [word for option, path in given.items() if path for word in (option, str(path))]
    return ClientProcess(name=name, state=state, command=command, say=say)
