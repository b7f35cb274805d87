"""Section ``data`` of recipes whose users have conversations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from comingle.config.settings import (
    ON_LANGUAGE,
    Count,
    Source,
    TokenLimit,
    UserFiles,
    unread_keys_of_text,
    unread_local_steps,
)
from comingle.data.conversations.messages import Columns
from comingle.data.text.section import DocumentsSection, UsersRows
from comingle.utils.errors import did_you_mean, list_names

Measure = Literal["rouge1", "exact_match", "accuracy"]
"""Names of measures that need generated responses."""


class ConversationRows(UsersRows):
    """Rows that hold conversations; ``max_conversations`` keeps the first of each user and split."""

    max_conversations: Count | None = None
    """Keep the first conversations of each user and split."""


class UserChats(UserFiles):
    """Conversations of one user; ``max_conversations`` overrides ``data.max_conversations``."""

    max_conversations: Count | None = None
    """Limit on this user's conversations in each split; has priority over ``data.max_conversations``."""


class ConversationsSection(DocumentsSection[UserChats, ConversationRows]):
    """Users with conversations, in files or in rows of a data set."""

    kind: Literal["conversations"] = "conversations"
    messages: str = "messages"
    """The column with the messages; ShareGPT's ``conversations`` is also recognised."""
    prompt: str | Annotated[list[Source], Field(min_length=1)] = "prompt"
    """The column with the prompt, or several columns, joined with blank lines; other names than ``prompt`` have
    priority over ``messages``.
    """
    response: str = "response"
    """The column with the response."""
    loss_on: Literal["responses", "all"] = "responses"
    """The part that training predicts; validation and test always use the responses."""
    too_long: Literal["cut", "leave_out"] = "cut"
    """Conversations of more than ``training.context`` tokens: keep the first whole turns, or drop them."""
    max_conversations: TokenLimit = None
    """Limit on the conversations of each user and split: one number for all users, or one for each user named."""
    scores: tuple[Measure, ...] = ()
    """``rouge1``, ``exact_match``, ``accuracy``: scores of responses that the models write themselves."""
    labels: tuple[Source, ...] = ()
    """The possible responses, for ``accuracy``."""

    sources: ClassVar[str] = "users and dataset"
    example: ClassVar[str] = "path/to/chats.jsonl"
    label: ClassVar[str] = "conversations"
    implementation: ClassVar[str] = "comingle.training.kinds.conversations:KIND"
    unread: ClassVar[Mapping[str, str]] = {
        **unread_local_steps("conversations"),
        **ON_LANGUAGE,
        **unread_keys_of_text(
            add_bos_token="conversations begin with it if the base model uses it",
            held_out="each user is tested on its own conversations",
            limits="give fewer rows, or set data.max_conversations",
        ),
    }
    accepted: ClassVar[Mapping[str, str]] = {
        "users": "a mapping from names to files, for example {alice: path/to/chats.jsonl}",
        "users.*": "a path, or a mapping with path, or with train, test and optionally valid",
        "dataset.path": "a path or a hub name, or a list of them",
        "dataset.users": "a list of names, or the number of users",
        "prompt": "a column, or a list of columns",
        "max_conversations": "a positive whole number, or a mapping from users to such numbers",
    }

    @model_validator(mode="after")
    def _check_lists(self) -> ConversationsSection:
        """Check that ``labels`` and the score ``accuracy`` are given together, and that no list has duplicates."""
        scores_accuracy = "accuracy" in self.scores
        has_labels = len(self.labels) > 0
        if scores_accuracy != has_labels:
            raise ValueError("scores: [accuracy] and labels require each other; labels lists all possible responses")
        for key, items in (("scores", self.scores), ("labels", self.labels), ("prompt", self.columns.prompt)):
            repeated = [item for item, count in Counter(items).items() if count > 1]
            if repeated:
                raise ValueError(f"{key}: {repeated[0]!r} is listed twice; list each item once")
        return self

    @model_validator(mode="after")
    def _limits_are_for_users(self) -> ConversationsSection:
        """Check that ``max_conversations`` limits only users in the recipe."""
        if self.users is None or not isinstance(self.max_conversations, dict):
            return self
        for name in self.max_conversations:
            if name not in self.users:
                hint = did_you_mean(name, self.users)
                raise ValueError(f"max_conversations: no user {name!r}; allowed: {list_names(self.users)}.{hint}")
        return self

    def max_conversations_of(self, name: str) -> int | None:
        """Return the largest number of conversations that a user keeps in each split, from the first on; None for all.

        The limit of the user's own entry overrides ``dataset.max_conversations``, which overrides the section's limit.
        """
        if self.users and name in self.users:
            own_limit = self.users[name].max_conversations
            if own_limit is not None:
                return own_limit
        if self.dataset is not None and self.dataset.max_conversations is not None:
            return self.dataset.max_conversations
        if isinstance(self.max_conversations, Mapping):
            return self.max_conversations.get(name)
        return self.max_conversations

    @property
    def measures(self) -> tuple[str, ...]:
        """Names of the measures that are reported for test sets; the first is the one by which models are compared."""
        return (*self.scores, "perplexity", "loss_nats")

    @property
    def columns(self) -> Columns:
        """Columns of a row that hold messages."""
        return Columns.read({"messages": self.messages, "prompt": self.prompt, "response": self.response})
