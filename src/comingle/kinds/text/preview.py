"""What users with text hold, in a form to print."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from comingle.data.pack import UserData
from comingle.data.partition import UserText
from comingle.data.preview import LISTED_USERS, choose_rows
from comingle.kinds.base import Materials
from comingle.recipes import Recipe
from comingle.terminal import printable, words

if TYPE_CHECKING:
    from rich.console import RenderableType

_SPLITS = ("train", "valid", "test")
_SAMPLE_CHARACTERS = 160


def preview(recipe: Recipe, materials: Materials, *, everybody: bool) -> list[RenderableType]:
    """A table of documents and tokens, who was left out, and the beginnings of documents of those in the table."""
    from rich.table import Table

    summaries = [summarise(text, user) for text, user in zip(materials.texts, materials.users, strict=True)]
    title = words(f"{recipe.base}: documents and tokens", "table.title")
    table = Table("user", title=title, title_justify="left", box=None)
    for split in _SPLITS:
        table.add_column(f"{split} docs", justify="right")
        table.add_column(f"{split} tokens", justify="right")
    kinds = [(split, kind) for split in _SPLITS for kind in ("documents", "tokens")]
    rows = choose_rows({one["user"]: [one[k][s] for s, k in kinds] for one in summaries}, by=1, everybody=everybody)
    for name, cells in rows:
        table.add_row(words(name), *cells)
    listed = {name for name, _ in rows}
    shown = [one for one in summaries if one["user"] in listed]
    lines = [line for one in shown for line in beginnings(one["user"], one["samples"])]
    return [table, *left_out(materials, "too little text", everybody), *lines]


def left_out(materials: Materials, why: str, everybody: bool) -> list[RenderableType]:
    """Who was left out, and why."""
    if not materials.skipped:
        return []
    shown = list(materials.skipped.items())[: None if everybody else LISTED_USERS]
    told = f"left out, as they have {why}: {len(materials.skipped):,}"
    return [words(told), *(words(f"  {name}: {what}") for name, what in shown)]


def beginnings(name: str, samples: Mapping[str, str]) -> list[RenderableType]:
    """A line for the beginning of a document of each split."""
    from rich.text import Text

    return [
        Text.assemble(words(name, "bold"), " ", (f"{split}:", "dim"), " ") + Text(printable(sample, keep="\n\t"))
        for split, sample in samples.items()
    ]


def summarise(text: UserText, data: UserData) -> dict[str, Any]:
    """Documents, characters and tokens of every split, and the beginning of a train and of a test document.

    Keys: ``user``; ``documents``, ``characters`` and ``tokens``, each a count for ``train``, ``valid`` and ``test``;
    ``samples``, at most one text for ``train`` and ``test``, white space collapsed. Tokens are those kept after limits;
    documents and characters are all there are.
    """
    documents = {split: getattr(text, split) for split in _SPLITS}
    return {
        "user": text.name,
        "documents": {split: len(documents[split]) for split in _SPLITS},
        "characters": {split: sum(map(len, documents[split])) for split in _SPLITS},
        "tokens": {split: len(getattr(data, split)) for split in _SPLITS},
        "samples": {split: shorten(documents[split][0]) for split in ("train", "test") if documents[split]},
    }


def shorten(document: str) -> str:
    """Its beginning in one line."""
    line = " ".join(document.split())
    return line if len(line) <= _SAMPLE_CHARACTERS else line[: _SAMPLE_CHARACTERS - 1] + "…"
