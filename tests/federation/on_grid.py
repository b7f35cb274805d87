"""A federation on Flower's grid in this process: the real ClientApp, ServerApp and channel, a node for each user."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.federation.direct import nodes_of
from tests.federation.grid import LocalGrid, run_app

from comingle.config import parse_recipe
from comingle.federation.files import save_plan
from comingle.federation.flower.client_app import User, make_client_app
from comingle.federation.flower.server_app import encode_names, make_server_app
from comingle.federation.server_app import run_federation_app
from comingle.utils.records import read_metrics


def federated_on_grid(content: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], LocalGrid]:
    """The metrics of a recipe's federation, and the grid, with all that was sent."""
    plan, nodes = nodes_of(parse_recipe(content), folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_plan(folder / "federation.yaml", plan)
    grid, one_at_a_time = LocalGrid(), threading.Lock()

    def ask(user: User, task: bytes, deadline: float) -> bytes:
        with one_at_a_time:  # as on machines of their own: they share this one's memory and modules
            return nodes[user.name].handle(task, deadline)

    for name in plan.users:
        grid.join(make_client_app(ask, print), name=name, state=str(folder / name))
    out = folder / "server"
    run_app(
        make_server_app(run_federation_app),
        grid,
        federation=str(folder / "federation.yaml"),
        out=str(out),
        users=encode_names(plan.users),
    )
    return read_metrics(out), grid
