"""The pages of the documentation, and what stands in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
README = REPOSITORY / "README.md"
DOCS = REPOSITORY / "docs"
RESEARCH = REPOSITORY / "papers" / "docs"
PAGES = [
    README,
    *(REPOSITORY / name for name in ("CONTRIBUTING.md", "SECURITY.md")),
    *sorted(DOCS.rglob("*.md")),
    *sorted(RESEARCH.rglob("*.md")),
]


def read(page: str | Path) -> str:
    """Return a page by its path, or by its name below ``docs`` or ``papers/docs``."""
    path = DOCS / page if (DOCS / page).exists() else RESEARCH / page
    return path.read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def table_rows(page: str) -> Iterator[list[str]]:
    """The cells of every row of every table that begins with code."""
    for line in page.splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def table_at(page: str, start: str) -> str:
    """The table whose first line begins so."""
    return page[page.index(start) :].partition("\n\n")[0]
