"""The section ``data`` of users who are asked questions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from comingle.recipes.data import Anchor, DataSection
from comingle.recipes.fields import Count, Section, Source


class QuestionsSection(Section):
    """Users who are asked the same questions, each in a language of its own: see ``comingle.kinds.questions.sets``."""

    name: str
    path: Source | None = None
    languages: Annotated[list[str], Field(min_length=1)] | None = None
    train: Count | None = None
    valid: Annotated[int, Field(ge=0, strict=True)] = 0
    test: Count | None = None
    train_on_prompts: bool = False


class QuestionsDataSection(DataSection):
    """Questions by name, the same for all users."""

    kind: Literal["questions"] = "questions"
    questions: QuestionsSection

    label: ClassVar[str] = "data.questions"
    marks: ClassVar[tuple[str, ...]] = ("questions",)
    implementation: ClassVar[str] = "comingle.kinds.questions.kind:KIND"
    accepted: ClassVar[Mapping[str, str]] = {"questions": "a name, or a mapping with name"}
    unread: ClassVar[Mapping[str, str]] = {
        "training.local_steps": "passes over a user's samples are counted by training.local_epochs",
        "floral": "adaptors on a language model take adapters.rank and adapters.alpha",
        "data.split": "data.questions.train, valid and test say how many questions there are",
        "data.held_out": "all users have the same questions",
        "data.on_small_user": "all users have the same questions",
        "data.max_train_tokens": "data.questions.train says how many questions there are",
        "data.max_valid_tokens": "data.questions.valid says how many questions there are",
        "data.max_test_tokens": "data.questions.test says how many questions there are",
    }

    @field_validator("questions", mode="before")
    @classmethod
    def _plain_name(cls, section: Any) -> Any:
        return {"name": section} if isinstance(section, str) else section

    def anchored(self, anchor: Anchor) -> dict[str, Any]:
        """The questions' folder."""
        content = self.model_dump(mode="json", exclude_unset=True, include={"questions"})
        if (path := content["questions"].get("path")) is not None:
            content["questions"]["path"] = anchor(path)
        return content
