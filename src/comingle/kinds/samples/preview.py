"""What ``comingle data`` shows of users with samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comingle.data.preview import choose_rows
from comingle.data.rows import list_names
from comingle.kinds.language import NETS
from comingle.kinds.samples.population import Population
from comingle.terminal import words

if TYPE_CHECKING:
    from rich.console import RenderableType


def preview(net: str, population: Population, *, everybody: bool) -> list[RenderableType]:
    """The net that is trained, how many samples each user has, and its true cluster where there is one."""
    from rich.table import Table

    shape = " x ".join(str(size) for size in population.input_shape)
    title = f"{NETS}{net}: samples of {shape}"
    if population.labels:
        title += f", classes {list_names(population.labels)}"
    table = Table("user", "cluster", title=words(title), title_justify="left", box=None)
    for split in ("train", "valid", "test"):
        table.add_column(split, justify="right")
    clusters = {user.name: str(user.cluster) for user in population.users if user.cluster is not None}
    counts = {user.name: [len(part) for part in (user.train, user.valid, user.test)] for user in population.users}
    for name, cells in choose_rows(counts, by=0, everybody=everybody):
        table.add_row(words(name), clusters.get(name, "-"), *cells)
    return [table]
