"""``comingle cost``: what a recipe will cost, before any training."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from comingle.cli.machines import (
    LATENCY,
    LINK,
    Cores,
    Disk,
    Gpus,
    Latency,
    Link,
    Machines,
    Price,
    Processes,
    Step,
    cluster_of,
)
from comingle.cli.options import RecipePath, Sets, method_settings, read_recipe


def cost(
    recipe: RecipePath,
    method: Annotated[
        list[str] | None, typer.Option("--method", help="A method; repeat it, or separate several by commas.")
    ] = None,
    users: Annotated[
        int | None, typer.Option("--users", help="Number of users, where their text is out of reach.")
    ] = None,
    sets: Sets = None,
    machines: Machines = None,
    processes: Processes = None,
    gpus: Gpus = None,
    cores: Cores = None,
    price: Price = None,
    link: Link = LINK,
    latency: Latency = LATENCY,
    disk: Disk = None,
    step: Step = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Count parameters, bytes, FLOPs and memory of a recipe before any training, and say whether it fits.

    With --machines, seconds and money of a round and a run for populations of several sizes.
    """
    read = read_recipe(recipe, sets)
    hardware = {"cores": cores, "price": price, "link": link, "latency": latency, "disk": disk}
    threads = read.runtime.threads
    cluster = cluster_of(machines, gpus=gpus, processes=processes, threads=threads, step=step, **hardware)
    from comingle.cli.compare import split_names
    from comingle.cli.progress import console, status
    from comingle.cost.machines import plan_times
    from comingle.cost.planning import plan
    from comingle.reports.costs import render_plan, render_times, verdicts

    names = split_names(",".join(method)) if method else []
    for_all = method_settings(sets, names or [read.method.name])
    with status("counting"):
        costs = plan(read, names, users=users, for_all=for_all)
    planned = costs.as_dict()
    if cluster is not None:
        with status("measuring"):
            planned["time"] = plan_times(read, costs, cluster, step=step, for_all=for_all)
    if as_json:
        print(json.dumps(planned, indent=2))
        return
    for part in render_plan(planned):
        console.print(part, highlight=False)
    for line, fits in verdicts(planned):
        console.print(line, style="green" if fits else "bold red", highlight=False)
    for part in render_times(planned["time"]) if "time" in planned else ():
        console.print(part, highlight=False)
