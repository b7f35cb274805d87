"""The whole protocol in one process: every user a session, every message packed and unpacked."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from comingle.config.settings import Terms
from comingle.masking import messages
from comingle.masking.collecting import SumCollector
from comingle.masking.session import Session
from comingle.privacy.secure.sizes import KEY
from comingle.protocol.messages import Download, Upload
from comingle.protocol.wire import pack, unpack

Answers = Callable[[str, str], bool]
"""Whether a user answers in a step."""


@dataclass(kw_only=True)
class Rehearsal:
    """One sum of ``uploads``, entries modulo ``2^word`` by user. ``received`` is all that the server gets, by step."""

    terms: Terms
    uploads: Mapping[str, np.ndarray]
    answers: Answers = lambda step, name: True
    received: list[tuple[str, str, bytes]] = field(default_factory=list)
    sent: list[tuple[str, str, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.server = SumCollector(terms=self.terms)
        self.users = {
            name: Session(terms=self.terms, name=name, seed=secrets.token_bytes(KEY), save=lambda record: None)
            for name in self.uploads
        }

    def total(self, largest: int) -> np.ndarray:
        """The sum of who is in it, ``server.survivors``.

        Raises:
            NoSumError: too few have answered in a step.
        """
        server, done = self.server, self.terms.round
        for name, user in self.users.items():
            if self.answers("advertise", name):
                message = self._up("advertise", name, messages.keys_message(name, done, user.advertise()))
                server.advertised(name, messages.read_keys(message, name, done))
        server.require(server.roster, "have advertised")
        for name in [one for one in server.roster if self.answers("share", one)]:
            self._share(name, done)
        server.require(server.sealed, "have shared")
        for name in [one for one in server.sharers if self.answers("mask", one)]:
            self._mask(name, done)
        server.require(server.survivors, "have masked")
        for name in [one for one in server.survivors if self.answers("unmask", one)]:
            self._unmask(name, done)
        return server.total(largest)

    def _share(self, name: str, done: int) -> None:
        user, others = self.users[name], [one for one in self.server.roster if one != name]
        asked = self._down("share", name, messages.roster_message(name, done, self.server.roster))
        sealed = user.share(messages.read_roster(asked, name, done, user.advertise()))
        message = self._up("share", name, messages.shares_message(name, done, sealed))
        self.server.shared(name, messages.read_shares(message, name, done, others, sealed=True))

    def _mask(self, name: str, done: int) -> None:
        terms = self.terms
        asked = self._down("mask", name, messages.sealed_message(name, done, self.server.sealed_for(name)))
        masked = self.users[name].mask(messages.read_sealed(asked, name, done), self.uploads[name])
        message = self._up("mask", name, messages.masked_message(name, done, masked))
        self.server.added(name, messages.read_masked(message, name, done, terms.entries, terms.word))

    def _unmask(self, name: str, done: int) -> None:
        asked = self._down("unmask", name, messages.survivors_message(name, done, self.server.survivors))
        opened = self.users[name].unmask(messages.read_survivors(asked, name, done))
        message = self._up("unmask", name, messages.shares_message(name, done, opened))
        self.server.unmasked(name, messages.read_shares(message, name, done, self.server.sharers, sealed=False))

    def _up(self, step: str, name: str, message: Upload) -> Upload | Download:
        self.received.append((step, name, pack(message)))
        return unpack(self.received[-1][2])

    def _down(self, step: str, name: str, message: Download) -> Upload | Download:
        self.sent.append((step, name, pack(message)))
        return unpack(self.sent[-1][2])


def rehearsed(terms: Terms, uploads: Mapping[str, np.ndarray], largest: int) -> np.ndarray:
    """The sum of these uploads, in a federation that adds in no other way (``InProcess.masked``).

    Raises:
        NoSumError: too few users.
    """
    return Rehearsal(terms=terms, uploads=uploads).total(largest)
