"""A user's steps in a sum behind masks, each of them a message to the server."""

from __future__ import annotations

from collections.abc import Callable

from comingle.config.settings import Terms
from comingle.federation.home import Home
from comingle.federation.tasks import Task
from comingle.privacy.secure_client import (
    Session,
    keys_message,
    masked_message,
    read_roster,
    read_sealed,
    read_survivors,
    shares_message,
)
from comingle.privacy.secure_sum import VECTOR, as_words
from comingle.protocol.messages import Download, Upload
from comingle.training.privacy import terms_of
from comingle.utils.errors import MessageError

Message = Download | Upload | None


def advertise(home: Home, task: Task, message: Message) -> Upload:
    """The keys of a sum that begins."""
    session = home.sessions.begin(_terms(home, task), task.user)
    return keys_message(task.user, session.terms.round, session.advertise())


def share(home: Home, task: Task, message: Message) -> Upload:
    """For each other user its shares of this one's secrets, sealed."""
    session = _current(home, task)
    roster = read_roster(message, task.user, session.terms.round, session.advertise())
    return shares_message(task.user, session.terms.round, session.share(roster))


def mask(home: Home, task: Task, message: Message) -> Upload:
    """What is shared, behind masks."""
    session, done = _current(home, task), task.round + 1
    sealed = read_sealed(message, task.user, done)
    whole = as_words(home.clients.upload([0], done, {}).tensors[VECTOR][0])
    return masked_message(task.user, done, session.mask(sealed, whole))


def unmask(home: Home, task: Task, message: Message) -> Upload:
    """The shares that take the masks off the sum of enough users."""
    session = _current(home, task)
    survivors = read_survivors(message, task.user, session.terms.round)
    return shares_message(task.user, session.terms.round, session.unmask(survivors))


PARTS: dict[str, Callable[[Home, Task, Message], Upload]] = {
    "advertise": advertise,
    "share": share,
    "mask": mask,
    "unmask": unmask,
}


def _current(home: Home, task: Task) -> Session:
    return home.sessions.current(_terms(home, task))


def _terms(home: Home, task: Task) -> Terms:
    clients = home.clients
    if clients.training.sums is None:
        raise MessageError("task: a sum behind masks; this federation has none")
    return terms_of(clients.training, task.run, task.round + 1, clients.model.layout.count(clients.method.shared))
