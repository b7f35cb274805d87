"""What stands above and below a table."""

from __future__ import annotations

import io

import pytest
from rich.text import TextType

from comingle.reports.formatting import Table
from comingle.utils.terminal import Terminal, literal_text

LONG = "words " * 15 + "end"


def printed(table: Table, width: int) -> list[str]:
    file = io.StringIO()
    Terminal(file=file, width=width).print(table)
    return [line.rstrip() for line in file.getvalue().splitlines()]


@pytest.mark.parametrize("told", [LONG, literal_text(LONG)], ids=["str", "Text"])
def test_a_title_and_a_caption_are_as_wide_as_the_terminal(told: TextType) -> None:
    table = Table("a", "b", title=told, caption=told, box=None)
    table.add_row("1", "2")
    assert printed(table, 120) == [LONG, " a  b", " 1  2", LONG]
    assert max(map(len, printed(table, 40))) <= 40
    assert (table.title, table.caption) == (told, told)


def test_a_table_without_either_is_that_of_rich() -> None:
    table = Table("a", box=None)
    table.add_row("1")
    assert printed(table, 20) == [" a", " 1"]
