"""What users with conversations hold, in a form to print."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comingle.data.answers import UserAnswers
from comingle.data.partition import UserText
from comingle.data.preview import choose_rows
from comingle.kinds.base import Materials
from comingle.kinds.text.preview import beginnings, left_out, shorten
from comingle.recipes import Recipe
from comingle.terminal import words

if TYPE_CHECKING:
    from rich.console import RenderableType

_COLUMNS = ("train", "valid", "test", "tokens, mean", "at most", "answer at most")


def preview_answers(recipe: Recipe, materials: Materials, what: str, *, everybody: bool) -> list[RenderableType]:
    """A table of how many each user has, and how long they are: whole, and the responses alone."""
    from rich.table import Table

    table = Table("user", title=words(f"{recipe.base}: {what}", "table.title"), title_justify="left", box=None)
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for name, cells in choose_rows({user.name: _sizes(user) for user in materials.users}, by=0, everybody=everybody):
        table.add_row(words(name), *cells)
    return [table]


def _sizes(user: UserAnswers) -> list[int]:
    parts = (user.train, user.valid, user.test)
    sizes = [len(part.tokens(number)) for part in parts for number in range(len(part))] or [0]
    return [*map(len, parts), round(sum(sizes) / len(sizes)), max(sizes), user.test.limit]


def preview_conversations(recipe: Recipe, materials: Materials, *, everybody: bool) -> list[RenderableType]:
    """The same, who was left out, and the beginning of a train and of a test conversation of those in the table."""
    tables = preview_answers(recipe, materials, "conversations", everybody=everybody)
    listed = dict(choose_rows({user.name: _sizes(user) for user in materials.users}, by=0, everybody=everybody))
    shown = [line for text in materials.texts if text.name in listed for line in beginnings(text.name, _samples(text))]
    return [*tables, *left_out(materials, "too few conversations", everybody), *shown]


def _samples(text: UserText) -> dict[str, str]:
    return {split: shorten(documents[0]) for split in ("train", "test") if (documents := getattr(text, split))}
