"""A user's sums with others, on disk: each goes forward only, and of a round there is one.

What is written here is never undone with the tasks that wrote it. A server that begins a round again, with other users
or other models, gets either the bytes that it had, or keys that nothing was ever masked with; and nothing any more of a
round whose sum this user has helped to unmask.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comingle.config.settings import Terms
from comingle.privacy.secure_client import Record, Session
from comingle.privacy.secure_sum import KEY
from comingle.utils.errors import MessageError, RunError
from comingle.utils.records import told_in_one_line, write_text

SECURE = "secure.json"
"""The file, in the folder of a run."""


@dataclass(frozen=True, kw_only=True)
class Sessions:
    """The sums of a run; ``folder`` is the user's alone."""

    folder: Path

    def begin(self, terms: Terms, name: str) -> Session:
        """A sum with new keys; the one before is forgotten.

        Raises:
            MessageError: the round's sum is known already, or that of a later one.
        """
        if terms.round <= (known := self._read()["unmasked"]):
            raise MessageError(
                f"secure aggregation: round {terms.round} again; user {name!r} has helped to unmask round {known}"
            )
        return Session(terms=terms, name=name, seed=secrets.token_bytes(KEY), save=self._save)

    def current(self, terms: Terms) -> Session:
        """The sum that has begun.

        Raises:
            MessageError: it is another, or there is none.
        """
        record = self._read()["session"]
        if record is None or (session := Session.of(record, self._save)).terms != terms:
            raise MessageError(f"secure aggregation: no sum of round {terms.round} has begun here")
        return session

    def end(self) -> None:
        """Forget all secrets, for good."""
        if self._path.exists():
            write_text(self._path, json.dumps({**self._read(), "session": None}), private=True)

    @property
    def _path(self) -> Path:
        return self.folder / SECURE

    def _read(self) -> dict[str, Any]:
        if not self._path.exists():
            return {"unmasked": 0, "session": None}
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            return {"unmasked": int(content["unmasked"]), "session": content["session"]}
        except (ValueError, KeyError, TypeError):
            raise RunError(f"{self._path}: damaged; nobody can say what was masked, so the run cannot go on") from None

    def _save(self, record: Record) -> None:
        """On disk before anything of it leaves."""
        was = self._read()["unmasked"]
        unmasked = record["terms"]["round"] if "unmask" in record["done"] else 0
        with told_in_one_line(self.folder):
            text = json.dumps({"unmasked": max(was, unmasked), "session": record})
            write_text(self._path, text, private=True)
