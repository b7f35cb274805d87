"""The section ``data`` of a recipe: who the users are and what they have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from comingle.data.names import name_problem
from comingle.recipes.fields import Count, Fraction, Positive, Section, Source, TokenLimit


class UserSource(Section):
    """One user's text: one source to be split, or the splits one by one. ``column`` is for files with rows.

    ``max_train_tokens`` is this user's own and comes before ``data.max_train_tokens``.
    """

    path: Source | None = None
    train: Source | None = None
    valid: Source | None = None
    test: Source | None = None
    column: str = "text"
    max_train_tokens: Count | None = None

    @model_validator(mode="after")
    def _one_or_splits(self) -> UserSource:
        if (self.path is None) == (self.train is None) or (self.path and (self.valid or self.test)):
            raise ValueError("give either path alone, or train and test (and valid)")
        if self.train is not None and self.test is None:
            raise ValueError("train without test; give test too")
        return self


class DatasetSource(Section):
    """Rows of a data set (files, a folder, or a hub name), grouped into users by a column."""

    path: str | list[str]
    user: str
    text: str = "text"
    split: str | None = None
    users: list[str] | Count | None = None
    config: str | None = None
    max_documents: Count | None = None

    @field_validator("users")
    @classmethod
    def _names(cls, users: Any) -> Any:
        if isinstance(users, list) and (problem := name_problem(users) or ("" if users else "zero users; name one")):
            raise ValueError(problem)
        return users


class SplitSection(Section):
    """How a user's text is parted: by fractions, or as given by the source's own splits."""

    valid: Fraction = 0.1
    test: Fraction = 0.1
    given: bool = False
    train_name: str = "train"
    valid_name: str | None = None
    test_name: str = "test"


class TaskSection(Section):
    """Users made for a task that is not language: see ``comingle.data.tasks``."""

    name: str
    users: Count | None = None
    clusters: Count | None = None
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    shift: str | None = None
    path: str | None = None
    test_samples: Count | None = None
    valid: Fraction | None = None
    alpha: Positive | None = None
    labels_per_cluster: Count | None = None


class QuestionsSection(Section):
    """Users who are asked the same questions, each in a language of its own: see ``comingle.data.questions``."""

    name: str
    path: Source | None = None
    languages: Annotated[list[str], Field(min_length=1)] | None = None
    train: Count | None = None
    valid: Annotated[int, Field(ge=0, strict=True)] = 0
    test: Count | None = None
    train_on_prompts: bool = False


class DataSection(Section):
    """Who the users are and what they read."""

    users: dict[str, UserSource] | None = None
    dataset: DatasetSource | None = None
    task: TaskSection | None = None
    questions: QuestionsSection | None = None
    split: SplitSection = SplitSection()
    held_out: Literal["own", "mixture"] = "own"
    on_small_user: Literal["refuse", "skip"] = "refuse"
    max_train_tokens: TokenLimit = None
    max_valid_tokens: TokenLimit = None
    max_test_tokens: TokenLimit = None

    @field_validator("users", mode="before")
    @classmethod
    def _plain_paths(cls, users: Any) -> Any:
        if not isinstance(users, Mapping):
            return users
        if problem := name_problem(str(name) for name in users):
            raise ValueError(problem)
        return {str(name): {"path": s} if isinstance(s, str) else s for name, s in users.items()}

    @field_validator("task", "questions", mode="before")
    @classmethod
    def _plain_name(cls, section: Any) -> Any:
        return {"name": section} if isinstance(section, str) else section

    @model_validator(mode="after")
    def _somebody(self) -> DataSection:
        if [self.users, self.dataset, self.task, self.questions].count(None) != 3:
            raise ValueError("give one of users, dataset, task and questions")
        if self.users is not None and self.split.given:
            raise ValueError("split.given is for dataset; for users give train, valid and test of each user instead")
        if self.users is not None and not self.users:
            raise ValueError("zero users; name at least one, as `users: {alice: path/to/text}`")
        return self
