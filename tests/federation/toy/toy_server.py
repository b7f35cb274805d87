"""The real ServerApp with rounds that send the same to everybody, and go on from what the run folder has of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from comingle.federation.flower.channel import Channel
from comingle.federation.flower.server_app import make_server_app
from comingle.utils.errors import RunError
from comingle.utils.records import write_text


def coordinate(channel: Channel, config: Mapping[str, Any], folder: Path, say: Callable[[str], None]) -> None:
    path = folder / "rounds.json"
    rounds = json.loads(path.read_text()) if path.exists() else []
    while len(rounds) < config["rounds"]:
        gather(channel, config["users"].split(), config["timeout"])
        began = time.time()
        request: bytes = str(config["request"]).replace("ROUND", str(len(rounds))).encode()
        requests = dict.fromkeys(str(config["users"]).split(), request)
        replies = {
            name: reply.decode() if isinstance(reply, bytes) else f"failed: {reply}"
            for name, reply in channel.exchange(requests, timeout=config["timeout"])
        }
        rounds.append({"began": began, "seconds": time.time() - began, "replies": replies})
        write_text(path, json.dumps(rounds))
        say(f"round {len(rounds)} is done")


def gather(channel: Channel, names: list[str], timeout: float) -> None:
    until = time.monotonic() + timeout
    while not set(names) <= set(channel.present()):
        if time.monotonic() > until:
            raise RunError(f"users: {', '.join(channel.present()) or 'nobody'} came; wanted: {', '.join(names)}")
        time.sleep(0.2)


app = make_server_app(coordinate)
