"""A user's own model, when a federation is over: a run folder of this one user, which ``comingle.load`` opens."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor

from comingle.config import Recipe
from comingle.federation.home import Home
from comingle.federation.own import Own
from comingle.runs.api import of_one_user
from comingle.runs.session import build, describe
from comingle.training.checkpoints import progress_of, save_checkpoint
from comingle.training.client import Clients, finetuned
from comingle.training.evaluation import Clock, summarise
from comingle.training.state import GRADIENTS, State
from comingle.utils.inputs import write_inputs
from comingle.utils.records import write_json, write_text

MODEL = "model"


def keep_model(home: Home, own: Own, *, rounds: int) -> Path:
    """Write the user's model after so many rounds; padding to the ranks and experts of others is left out.

    It is scored once more, so what is written is known to say the same.

    Raises:
        ComingleError: the data or the base cannot be read any more, or the disk does not take it.
    """
    recipe = _of_one_user(home, own)
    federation = build(recipe, home.read, store="memory")
    clients = federation.clients
    _fill(clients, home.clients)
    clients.stopped_after = rounds if 0 <= rounds < clients.rounds_done else None
    with finetuned(clients):
        metrics = summarise(clients, clients.evaluate(), Clock()).as_dict() | clients.left_out
    folder = home.folder / MODEL
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    write_inputs(folder, describe(home.read, recipe))
    write_text(folder / "recipe.yaml", recipe.as_yaml())
    progress = progress_of(metrics["rounds"], recipe.fingerprint, [own.name])
    save_checkpoint(folder, clients.model.layout, clients.state, federation.server.state, progress)
    write_json(folder / "metrics.json", metrics)
    return folder


def _of_one_user(home: Home, own: Own) -> Recipe:
    """The user's own recipe, with its own rank and specialists in the place of everybody's."""
    number = home.public.users.index(own.name)
    return of_one_user(home.recipe, lambda values: values[number])


def _fill(clients: Clients, of_all: Clients) -> None:
    """A single user's state out of one that is as wide as everybody's."""
    wide, own = of_all.model.layout, clients.model.layout
    for mine, whole in zip(_matrices(clients.state), _matrices(of_all.state), strict=True):
        if mine.shape[1]:  # an optimiser may remember nothing
            views = wide.views(whole)
            mine.copy_(torch.cat([_cut(views[slot.name], slot.shape).flatten(1) for slot in own.slots], 1))
    for name in ("iterations", "router_steps", "ranks", "versions"):
        getattr(clients.state, name).copy_(getattr(of_all.state, name))
    copied = [name for name in clients.state.kept if name != GRADIENTS]
    clients.state.kept |= {name: of_all.state.kept[name].clone() for name in copied}
    clients.resized()


def _matrices(state: State) -> tuple[Tensor, ...]:
    left = (state.kept[GRADIENTS],) if GRADIENTS in state.kept else ()
    return state.rows, state.first, state.second, *left


def _cut(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Without what stands behind the user's own experts and ranks."""
    return tensor[(slice(None), *(slice(size) for size in shape))]
