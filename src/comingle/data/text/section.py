"""Section ``data`` of recipes whose users have text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Generic, Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from comingle.config.settings import (
    ON_LANGUAGE,
    Count,
    Files,
    OwnUsersSection,
    Section,
    Source,
    SplitSection,
    TokenLimit,
    UserFiles,
)
from comingle.data.row_files import OnBadRow
from comingle.utils.names import name_problem


class UserSource(UserFiles):
    """Text of one user.

    ``column`` applies to files of rows. ``max_train_tokens`` overrides ``data.max_train_tokens`` for this user.
    """

    column: str = "text"
    """The column with the documents, if a source is a file of rows."""
    max_train_tokens: Count | None = None
    """Keep the first tokens of this user's training text; has priority over ``data.max_train_tokens``."""


class UsersRows(Section):
    """Rows of a data set (files, a folder, or a hub name), grouped into users by a column."""

    path: Source | Annotated[list[Source], Field(min_length=1)]
    """A hub name, plain or as ``hub:NAME?...``, a file, a list of files, a folder of them, or a folder written by
    ``save_to_disk``.
    """
    user: str
    """The column with the user's name; ``meta.set`` is the field ``set`` of a column ``meta``."""
    split: str | None = None
    """The column with a row's split; by default the data set's own splits."""
    users: list[str] | Count | None = None
    """The users to take, in this order, or the number of users whose rows come first; by default all."""
    config: str | None = None
    """Configuration of a hub data set."""

    @field_validator("users")
    @classmethod
    def _check_names(cls, users: list[str] | int | None) -> list[str] | int | None:
        """Check that listed names are valid user names, and that there is at least one."""
        if not isinstance(users, list):  # a number of users, or None
            return users
        if problem := name_problem(users):
            raise ValueError(problem)
        if not users:
            raise ValueError("no users; name at least one")
        return users


class DatasetSource(UsersRows):
    """Rows that hold text."""

    text: str = "text"
    """The column with the document."""
    max_documents: Count | None = None
    """Keep the first documents of each user and split."""


_LIMIT = "a positive whole number, or a mapping from users to such numbers"


Rows = TypeVar("Rows", bound=UsersRows)


class DocumentsSection(OwnUsersSection[Files], Generic[Files, Rows]):
    """Base class of the sections of text and conversations.

    ``Files`` is the type of a user's entry, ``Rows`` that of the data set.
    """

    dataset: Rows | None = None
    """Rows of a data set, grouped into users by a column."""
    split: SplitSection = SplitSection()
    """The division of a user's data."""
    on_small_user: Literal["refuse", "skip"] = "refuse"
    """Users with too little text for one training window, a needed validation window or a test: stop and name them all,
    or leave them out. Skipped users are listed in a warning and under ``skipped_users`` in ``events.jsonl`` and
    ``metrics.json``. Lists with one entry for each user then refer to those that stay.
    """
    on_bad_row: OnBadRow = "refuse"
    """Rows that cannot be used: stop and name them all, or leave them out. A warning lists skipped rows, and
    ``skipped_rows`` counts them; in a federation the count covers clients that report their amounts of data.
    """
    deduplicate: bool = False
    """Keep one of a user's documents that are equal except for case and white space; across given splits that of test,
    else of valid. A warning counts the others.
    """

    sources: ClassVar[str]
    """Names of the mutually exclusive keys, for messages; exactly one must be given."""
    example: ClassVar[str]
    """File of a user, as an example in messages."""

    @model_validator(mode="after")
    def _check_users(self) -> DocumentsSection:
        """Check that the recipe names its users in one way: listed users, a data set, or users that a program passes.

        Listed users must not be empty. They name their own files for splits, so ``split.given`` is not allowed.
        """
        given_sources = [source for source in (self.users, self.dataset, self.given) if source is not None]
        if len(given_sources) != 1:
            raise ValueError(f"give one of {self.sources}")
        if self.users is not None and self.split.given:
            raise ValueError("split.given is for dataset; for users give train, valid and test of each user instead")
        if self.users is not None and not self.users:
            raise ValueError(f"no users; name at least one, for example `users: {{alice: {self.example}}}`")
        return self


class TextSection(DocumentsSection[UserSource, DatasetSource]):
    """Users with text, in files or in rows of a data set."""

    kind: Literal["text"] = "text"
    held_out: Literal["own", "mixture"] = "own"
    """``mixture``: each user's valid and test are equal parts of all users' (CoMiGS's out-of-distribution task)."""
    train_on_valid: bool = False
    """Train experts on the validation text too, in the same number of steps: a control for methods whose routers or
    mixtures learn from it. Not with ``evaluation.select: best``.
    """
    add_bos_token: bool = True
    """Begin every window and every text with the base's begin-of-text token, if its tokenizer does so (Llama 2 and 3,
    Mistral, Gemma). The token counts towards ``training.context`` and is never predicted. No effect on GPT-2, SmolLM2
    and Qwen. Runs made before this key existed keep ``false``.
    """
    max_train_tokens: TokenLimit = None
    """Keep the first tokens of each user's training text: one number for all users, or one for each user named, as
    ``{ada: 50000, ben: 200000}``.
    """
    max_valid_tokens: TokenLimit = None
    """Limit on the validation text, as ``max_train_tokens``."""
    max_test_tokens: TokenLimit = None
    """Limit on the test text, as ``max_train_tokens``."""

    sources: ClassVar[str] = "users, dataset, questions and task"
    example: ClassVar[str] = "path/to/text"
    label: ClassVar[str] = "text"
    marks: ClassVar[tuple[str, ...]] = ("users", "dataset")
    implementation: ClassVar[str] = "comingle.training.kinds.text:KIND"
    weightings: ClassVar[tuple[str, ...]] = ("uniform", "tokens")
    unread: ClassVar[Mapping[str, str]] = {
        "training.local_epochs": "on text, training.local_steps sets the length of a round",
        **ON_LANGUAGE,
    }
    accepted: ClassVar[Mapping[str, str]] = {
        "users": "a mapping from names to texts, for example {alice: path/to/text}",
        "users.*": "a path, or a mapping with path, or with train, test and optionally valid",
        "dataset.path": "a path or a hub name, or a list of them",
        "dataset.users": "a list of names, or the number of users",
        "max_train_tokens": _LIMIT,
        "max_valid_tokens": _LIMIT,
        "max_test_tokens": _LIMIT,
    }

    @property
    def in_distribution(self) -> bool:
        """True if users are tested on their own text, not on a mixture of all users' text."""
        return self.held_out == "own"
