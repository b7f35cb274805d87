"""A whole federation on one machine: a server, and for each user processes and a folder of its own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from comingle.config import Recipe
from comingle.federation.files import Participant, save_participant, save_plan
from comingle.federation.participating import Words, read_reason
from comingle.federation.patience import Patience
from comingle.federation.public import public_part
from comingle.federation.splitting import split_recipe
from comingle.runs.folders import as_begun, check_folder
from comingle.transports.flower.calling import FOLDER as WORKER
from comingle.transports.flower.calling import LOG
from comingle.transports.flower.certificates import make_key
from comingle.transports.flower.fate import FOLDER as FLOWER
from comingle.transports.flower.server_app import spell
from comingle.transports.flower.superlink import SuperLink, coordinate
from comingle.transports.flower.supernode import SuperNode
from comingle.transports.flower.users import UNFIT, User
from comingle.utils.errors import RunError
from comingle.utils.files import list_checkpoints
from comingle.utils.names import as_folder
from comingle.utils.records import read_metrics

_SHOWN = 3
"""So many users' reasons are told where a federation has failed."""

USERS, PLAN, FILE = "users", "federation.yaml", "participant.yaml"


def federate(
    recipe: Recipe,
    folder: Path,
    *,
    resume: bool = False,
    force: bool = False,
    patience: Patience | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Run a recipe with every user in processes of its own; the metrics that the server has of them.

    The run folder is that of the server, ``FOLDER/users/NAME`` are the users' own.

    Raises:
        ComingleError: users elsewhere cannot do what the recipe asks for, the folder cannot be used, or a user or the
            server cannot go on.
    """
    recipe = as_begun(folder, recipe, resume=resume)
    plan, owns = split_recipe(recipe, patience)
    without_data = public_part(recipe, plan.users, plan.settings, None).whole_recipe()
    check_folder(folder, without_data, resume=resume, force=force)
    if force:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    save_plan(folder / PLAN, plan)
    threads = {"threads": max(1, (os.cpu_count() or 1) // len(owns))}  # all of them share this machine's cores
    for own in owns:
        own = own if recipe.runtime.threads else own.model_copy(update={"runtime": threads})
        state = folder / USERS / as_folder(own.name)
        save_participant(state / FILE, Participant(**own.model_dump(exclude_defaults=True), state="."))
    # A key each, so that no other program of this machine can take part.
    keys = {own.name: make_key(folder / USERS / as_folder(own.name) / FLOWER, own.name) for own in owns}
    link = SuperLink(
        folder=folder,
        say=say,
        keys={name: public for name, (_, public) in keys.items()},
        run_config={"federation": str((folder / PLAN).absolute()), "users": spell(plan.users)},
    )
    for own in owns:
        (folder / USERS / as_folder(own.name) / UNFIT).unlink(missing_ok=True)  # of an earlier time
    nodes = [
        _node(folder / USERS / as_folder(name), name, link.address, private, say) for name, (private, _) in keys.items()
    ]
    words = {node.user.name: Words(node.user.state / WORKER / LOG) for node in nodes}
    try:
        coordinate(link, lambda: _tend(nodes, plan.patience.min_participants))
    except RunError as error:
        raise RunError(str(error) + ("" if list_checkpoints(folder) else _told(words))) from None
    finally:
        for node in nodes:
            node.stop()
    return read_metrics(folder)


def _node(state: Path, name: str, server: str, key: Path, say: Callable[[str], None]) -> SuperNode:
    state = state.absolute()
    user = User(name=name, state=state, config=state / FILE)
    return SuperNode(user=user, server=server, key=key, say=lambda line: say(f"{name}: {line}"))


def _told(words: Mapping[str, Words]) -> str:
    """What workers have said on this machine, which is everybody's: the last line of each of the first few."""
    told = {
        name: [line for line in of_user.new() if "leave this machine" not in line] for name, of_user in words.items()
    }
    lines = [f"{name}: {said[-1]}" for name, said in told.items() if said]
    return "".join(f"; {line}" for line in lines[:_SHOWN])


def _tend(nodes: Sequence[SuperNode], needed: int) -> None:
    """Keep the users' processes at work.

    Raises:
        RunError: too few users are left who fit the federation; here nobody repairs their settings meanwhile.
    """
    unfit = [node for node in nodes if read_reason(node.user.state)]
    if len(nodes) - len(unfit) < needed:
        raise RunError(f"{len(nodes) - len(unfit)} of {len(nodes)} users have joined; needed: {needed}")
    for node in nodes:
        node.tend()
