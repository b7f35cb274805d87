"""``comingle data``: look at the users of a recipe before training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from comingle.cli.options import RecipePath, Sets, read_recipe

if TYPE_CHECKING:
    from rich.table import Table

    from comingle.data.answers import UserAnswers
    from comingle.data.tasks import Task


def data(
    recipe: RecipePath,
    sets: Sets = None,
    everybody: Annotated[bool, typer.Option("--all", help="List everybody, also beyond 24 users.")] = False,
) -> None:
    """Preview a recipe's users: token counts, split sizes, overlaps and two samples each; or how many samples.

    Beyond 24 users the table has the distribution, and the users with least and most.
    """
    read = read_recipe(recipe, sets)
    from rich.table import Table
    from rich.text import Text

    from comingle.cli.progress import console, status
    from comingle.cli.training import warn_overlaps
    from comingle.data.preview import LISTED_USERS, choose_rows, summarise
    from comingle.materials import prepare
    from comingle.nets import net_name
    from comingle.terminal import printable, words

    with status("reading and tokenising"):
        materials = prepare(read)
    if materials.task is not None:
        console.print(_samples(net_name(read, materials.task), materials.task, everybody))
        return
    if materials.answers:
        console.print(_questions(read.base, materials.answers))
        return
    summaries = [summarise(text, user) for text, user in zip(materials.texts, materials.users, strict=True)]
    title = words(f"{read.base}: documents and tokens", "table.title")
    table = Table("user", title=title, title_justify="left", box=None)
    for split in ("train", "valid", "test"):
        table.add_column(f"{split} docs", justify="right")
        table.add_column(f"{split} tokens", justify="right")
    kinds = [(split, kind) for split in ("train", "valid", "test") for kind in ("documents", "tokens")]
    rows = choose_rows({one["user"]: [one[k][s] for s, k in kinds] for one in summaries}, by=1, everybody=everybody)
    for name, cells in rows:
        table.add_row(words(name), *cells)
    console.print(table)
    if materials.skipped:
        console.print(words(f"left out, as they have too little text: {len(materials.skipped):,}"))
        shown = list(materials.skipped.items())[: None if everybody else LISTED_USERS]
        for name, why in shown:
            console.print(words(f"  {name}: {why}"))
    listed = {name for name, _ in rows}
    for one in (one for one in summaries if one["user"] in listed):
        for split, sample in one["samples"].items():
            begun = Text.assemble(words(one["user"], "bold"), " ", (f"{split}:", "dim"), " ")
            console.print(begun + printable(sample, keep="\n\t"), highlight=False)
    warn_overlaps(materials)


def _samples(net: str, task: Task, everybody: bool) -> Table:
    """The net that is trained, how many samples each user of a task has, and its true cluster where there is one."""
    from rich.table import Table

    from comingle.data.preview import choose_rows
    from comingle.terminal import words

    shape = " x ".join(str(size) for size in task.input_shape)
    table = Table("user", "cluster", title=f"net:{net}: samples of {shape}", title_justify="left", box=None)
    for split in ("train", "valid", "test"):
        table.add_column(split, justify="right")
    clusters = {user.name: str(user.cluster) for user in task.users if user.cluster is not None}
    counts = {user.name: [len(part) for part in (user.train, user.valid, user.test)] for user in task.users}
    for name, cells in choose_rows(counts, by=0, everybody=everybody):
        table.add_row(words(name), clusters.get(name, "-"), *cells)
    return table


def _questions(base: str, users: Sequence[UserAnswers]) -> Table:
    """How many questions each user has, and how long they are: with their prompts, and the answers alone."""
    from rich.table import Table

    from comingle.terminal import words

    table = Table("user", title=words(f"{base}: questions", "table.title"), title_justify="left", box=None)
    for name in ("train", "valid", "test", "tokens, mean", "at most", "answer at most"):
        table.add_column(name, justify="right")
    for user in users:
        parts = (user.train, user.valid, user.test)
        sizes = [len(part.tokens(number)) for part in parts for number in range(len(part))]
        counts = [len(part) for part in parts]
        told = [*counts, round(sum(sizes) / len(sizes)), max(sizes), user.test.limit]
        table.add_row(words(user.name), *(f"{number:,}" for number in told))
    return table
