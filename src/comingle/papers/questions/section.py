"""The section ``data`` of users who are asked questions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from comingle.config.data import (
    ON_LANGUAGE,
    Anchor,
    Count,
    DataSection,
    Section,
    Source,
    keys_of_text,
    plain_name,
    steps_of,
)


class QuestionsSection(Section):
    """Users who are asked the same questions, each in a language of its own: see ``comingle.papers.questions.sets``."""

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
    questions: Annotated[QuestionsSection, BeforeValidator(plain_name)]

    label: ClassVar[str] = "data.questions"
    marks: ClassVar[tuple[str, ...]] = ("questions",)
    implementation: ClassVar[str] = "comingle.papers.questions.kind:KIND"
    accepted: ClassVar[Mapping[str, str]] = {"questions": "a name, or a mapping with name"}
    unread: ClassVar[Mapping[str, str]] = {
        **steps_of("questions"),
        **ON_LANGUAGE,
        **keys_of_text(
            add_bos_token="prompts begin with it where texts of the base do",
            split="data.questions.train, valid and test say how many questions there are",
            held_out="all users have the same questions",
            on_small_user="all users have the same questions",
            limits=(
                "data.questions.train says how many questions there are",
                "data.questions.valid says how many questions there are",
                "data.questions.test says how many questions there are",
            ),
        ),
    }

    def anchored(self, anchor: Anchor) -> dict[str, Any]:
        """The questions' folder."""
        content = self.model_dump(mode="json", exclude_unset=True, include={"questions"})
        if (path := content["questions"].get("path")) is not None:
            content["questions"]["path"] = anchor(path)
        return content
