"""Who takes part in a federation and how everybody fares, kept in its run folder for whoever watches."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from comingle.utils.records import PARTICIPANTS, write_json

WRITE_SECONDS = 0.5
"""The file is written no more often than that while a round lasts."""


@dataclass(kw_only=True)
class Seat:
    """What is known of one user.

    ``state`` is "expected", "here" or "away"; ``seen`` the time of its last answer (seconds since 1970); bytes are
    those of its messages in this run. Losses and scores are there if the user tells them, ``epsilon`` where the recipe
    has ``privacy``, and ``counted``, how much of its last upload did, where it has a rule of ``aggregation``.
    """

    state: str = "expected"
    round: int = 0
    seen: float | None = None
    upload_bytes: int = 0
    download_bytes: int = 0
    train_loss_nats: float | None = None
    test: float | None = None
    epsilon: float | None = None
    counted: float | None = None
    why: str = ""


class Board:
    """An observer of a coordinator's events, which keeps ``participants.json``; a run that goes on goes on counting."""

    def __init__(self, folder: Path, users: Sequence[str], rounds: int):
        self._path, self._rounds, self._round, self._measure = folder / PARTICIPANTS, rounds, 0, ""
        self._privacy: dict[str, float] = {}
        known = self._known()
        self._seats = {name: Seat(**known.get(name, {})) for name in users}
        for seat in self._seats.values():
            seat.state, seat.why = "expected", ""
        self._written = 0.0
        self._write()

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Take one event."""
        if (seat := self._seats.get(event.get("user", ""))) is not None:
            self._take(seat, event)
        if event["event"] == "round":
            self._round = event["round"]
            for name, loss in event["train_loss_nats"].items():
                self._seats[name].train_loss_nats = loss
        elif event["event"] == "privacy":
            self._privacy = {key: event[key] for key in ("epsilon", "delta")}
            for name, seat in self._seats.items():
                seat.epsilon = event.get("users", {}).get(name, event["epsilon"])
        elif event["event"] == "aggregation":
            for name, share in event.get("counted", {}).items():
                self._seats[name].counted = share
        elif event["event"] == "evaluation":
            for name, scores in event["users"].items():
                key, self._seats[name].test = next(iter(scores.items()))
                self._measure = key.removeprefix("test_")
        if event["event"] != "step" or time.monotonic() - self._written > WRITE_SECONDS:
            self._write()

    def _take(self, seat: Seat, event: Mapping[str, Any]) -> None:
        seat.state, seat.why = "away" if event["event"] == "failed" else "here", event.get("reason", "")
        if seat.state == "here":
            seat.seen = time.time()
        if event["event"] == "step":
            seat.round = min(event["round"], self._rounds)  # what ends a run comes after its last round
            seat.upload_bytes += event["upload_bytes"]
            seat.download_bytes += event["download_bytes"]

    def _known(self) -> dict[str, Any]:
        try:
            users = json.loads(self._path.read_text(encoding="utf-8"))["users"]
            return {name: asdict(Seat(**one)) for name, one in users.items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return {}  # it only tells people; nothing is computed from it

    def _write(self) -> None:
        seats = {name: asdict(seat) for name, seat in self._seats.items()}
        content = {"round": self._round, "rounds": self._rounds, "measure": self._measure, "users": seats}
        content |= {"privacy": self._privacy} if self._privacy else {}
        write_json(self._path, content)
        self._written = time.monotonic()
