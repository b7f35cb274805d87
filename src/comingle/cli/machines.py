"""The options of ``comingle cost`` that say on which machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from comingle.cli.options import finite
from comingle.utils.errors import RecipeError

if TYPE_CHECKING:
    from comingle.cost.timing import Cluster

LINK, LATENCY = 1.25e9, 1e-4
"""10 Gbit/s, and 0.1 ms: what machines of one room usually have."""

Machines = Annotated[
    int | None, typer.Option("--machines", min=1, help="Plan seconds and money on so many machines; measures here.")
]
Processes = Annotated[int | None, typer.Option("--processes", min=1, help="Processes on each machine (default: 1).")]
Gpus = Annotated[int | None, typer.Option("--gpus", min=1, help="GPUs of each machine, a process for each.")]
Cores = Annotated[int | None, typer.Option("--cores", min=1, help="Cores of each machine (default: as here).")]
Price = Annotated[
    float | None, typer.Option("--price", min=0, callback=finite, help="Money for a machine and an hour.")
]
Link = Annotated[float, typer.Option("--link", min=1, callback=finite, help="Bytes a second between two machines.")]
Latency = Annotated[
    float, typer.Option("--latency", min=0, callback=finite, help="Seconds that a message takes between two machines.")
]
Disk = Annotated[
    float | None,
    typer.Option("--disk", min=1, callback=finite, help="Bytes a second to a machine's disk (default: measured here)."),
]
Step = Annotated[
    float | None,
    typer.Option(
        "--step",
        min=0,
        callback=finite,
        help="Seconds of a local step of one user in a process (default: measured here).",
    ),
]


def cluster_of(
    machines: int | None,
    *,
    gpus: int | None,
    processes: int | None,
    threads: int | None,
    step: float | None,
    **others: Any,
) -> Cluster | None:
    """The machines that the options describe; None where nothing is to be planned.

    Raises:
        RecipeError: options that are for machines without any, or that contradict each other.
    """
    if machines is None:
        told = {"gpus": gpus, "processes": processes, "step": step, **others}
        unread = [name for name, value in told.items() if value not in (None, LINK, LATENCY)]
        if unread:
            raise RecipeError(f"--{unread[0]}: is read with --machines N alone")
        return None
    if gpus is not None and processes is not None:
        raise RecipeError("--gpus and --processes: got both; each GPU has a process, so give one of them")
    from comingle.cost.machines import on_gpu
    from comingle.cost.timing import Cluster
    from comingle.runs.distributed import cores

    if gpus is not None and step is None and not on_gpu():
        raise RecipeError("--gpus: no GPU here on which a step could be measured; give --step SECONDS")
    others["cores"] = others["cores"] or cores()
    others["disk"] = others["disk"] or 0.0
    count = gpus or processes or 1
    return Cluster(machines=machines, processes=count, gpus=gpus is not None, threads=threads, **others)
