"""Users' conversations as tokens of the base, none longer than the context."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from comingle.data.bad_rows import BadRows
from comingle.data.pack import list_small
from comingle.data.samples import SPLITS
from comingle.kinds.conversations.answers import UserAnswers, as_answers
from comingle.kinds.conversations.reading import Placed, UserConversations
from comingle.kinds.conversations.section import ConversationsSection
from comingle.models.chat_templates import ChatTemplate, Encoded
from comingle.utils.errors import DataError

logger = logging.getLogger("comingle")


def encode_users(
    data: ConversationsSection,
    users: Sequence[UserConversations],
    template: ChatTemplate,
    context: int,
    bad: BadRows | None = None,
) -> list[UserAnswers]:
    """Encode the conversations of all users as windows; warn of those longer than ``context`` tokens.

    Args:
        data: The recipe's section.
        users: Users with messages.
        template: Template of the base.
        context: Length of a window in tokens.
        bad: Collects conversations that the template refuses; None for a collection of its own.

    Raises:
        DataError: The base's template refuses messages.
    """
    bad = bad or BadRows(data.on_bad_row)
    encoder = Encoder(data, template, context, bad)
    encoded = [encoder.encode(user) for user in users]
    bad.settle()
    for note in encoder.notes:
        logger.warning("%s", note)
    return encoded


class Encoder:
    """Users' conversations as windows, one user after another."""

    def __init__(self, data: ConversationsSection, template: ChatTemplate, context: int, bad: BadRows):
        self.data, self.context, self.template, self.bad = data, context, template, bad
        self.counts, self.ends = Counter[str](), self.template.ends()

    def encode(self, user: UserConversations) -> UserAnswers:
        """Encode a user's conversations; those that the base's template refuses are bad rows."""
        data = self.data
        parts = {
            split: [
                fitting
                for placed in getattr(user, split)
                for encoded in self._turns(user.name, placed)
                if (fitting := _fit(encoded, self.context, data.too_long == "cut", self.counts))
            ]
            for split in SPLITS
        }
        limit = max((one.longest for part in parts.values() for one in part), default=1)
        train, valid, test = (
            as_answers(
                part,
                limit=limit,
                measures=data.measures,
                ends=self.ends,
                prompts=data.loss_on == "all" and split == "train",
            )
            for split, part in parts.items()
        )
        return UserAnswers(name=user.name, train=train, valid=valid, test=test)

    def _turns(self, name: str, placed: Placed) -> list[Encoded]:
        where, messages = placed
        with self.bad.row(f"user {name!r}: {where}"):
            encoded = self.template.encode_turns(messages)
            if self.data.loss_on == "all" and (len(encoded) > 1 or any(one.masked is None for one in encoded)):
                raise DataError(
                    "data.loss_on: got all, and the base's chat template writes earlier turns anew as a conversation "
                    "goes on; allowed: responses"
                )
            self.counts["calls"] += sum(one.unwritten_calls for one in encoded)
            return encoded
        return []

    @property
    def told(self) -> str:
        """How many were too long; empty where none was."""
        cut, out = self.counts["cut"], self.counts["left out"]
        longer = f"{cut + out} of {self.counts['all']} conversations are longer than {self.context} tokens"
        return f"{longer} (training.context): {cut} cut at whole turns, {out} left out" if cut + out else ""

    @property
    def notes(self) -> list[str]:
        """Warnings about all users: conversations that were too long, and tool calls that the template leaves out."""
        calls = self.counts["calls"]
        lost = f"{calls} responses call tools, which the base's chat template does not write; they carry no loss"
        return [*filter(None, [self.told, lost if calls else ""])]


def _fit(encoded: Encoded, context: int, cuts: bool, counts: Counter[str]) -> Encoded | None:
    """The conversation, or its first turns, in at most ``context`` tokens; None where that leaves no response."""
    counts["all"] += 1
    if len(encoded) <= context:
        return encoded
    kept = [(start, stop) for start, stop in encoded.responses if stop <= context] if cuts else []
    counts["cut" if kept else "left out"] += 1
    if not kept:
        return None
    tokens, references = encoded.tokens[: kept[-1][1]], encoded.references[: len(kept)]
    masked = tuple(span for span in encoded.masked or () if span[1] <= len(tokens))
    return replace(encoded, tokens=tokens, responses=tuple(kept), references=references, masked=masked)


def find_small(users: Sequence[Any], *, needs_validation: bool) -> dict[str, str]:
    """Who lacks conversations that will be used, and which."""
    wanted = ("train", "valid", "test") if needs_validation else ("train", "test")
    small = {user.name: [split for split in wanted if not len(getattr(user, split))] for user in users}
    return {name: f"no conversations in {' and '.join(splits)}" for name, splits in small.items() if splits}


def check_small(users: Sequence[Any], *, needs_validation: bool) -> None:
    """Whether everybody has the conversations that will be used; all who have not are named at once.

    Raises:
        DataError: some have not.
    """
    if small := find_small(users, needs_validation=needs_validation):
        raise too_few(list_small(small), len(small), len(users))


def too_few(told: str, small: int, users: int) -> DataError:
    """What is said where so many of all users lack conversations, of some of whom it is ``told``."""
    skip = ", or leave such users out with data.on_small_user: skip" if small < users else ""
    count = f"{small} of {users} users have too few conversations: " if small > 1 else "user "
    return DataError(f"{count}{told}; give more of them, other fractions, or a longer training.context{skip}")


def enough(data: ConversationsSection, users: Sequence[Any], validates: bool) -> tuple[list[Any], Mapping[str, str]]:
    """All users; or those with enough conversations where others are left out, which a warning says, and their lack.

    Raises:
        DataError: nobody would be left.
    """
    if data.on_small_user != "skip":
        return list(users), {}
    small = find_small(users, needs_validation=validates)
    if len(small) == len(users):
        raise DataError(f"all {len(users)} users have too few conversations: {list_small(small)}")
    if small:
        told = f"{len(small)} of {len(users)} users are left out, as they have too few conversations"
        logger.warning("%s: %s", told, list_small(small))
    return [user for user in users if user.name not in small], small
