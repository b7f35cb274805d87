"""Where a recipe's users are kept on disk: what they read, what they learn, and for which methods that can be."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from comingle.config import Recipe
from comingle.data.populations import Crowd
from comingle.training.client import Clients
from comingle.training.kinds.base import Kind, LoadBase, Materials
from comingle.training.state import MOMENTS
from comingle.training.storage import arrays, language  # noqa: F401 (kinds whose users are read in turn)
from comingle.training.storage.disk import OnDisk
from comingle.training.storage.files import FOLDER
from comingle.training.storage.population import NAMES, Names, read_about, read_population
from comingle.training.storage.readers import SKIPPED, in_turn, populated
from comingle.utils.errors import DataError, RecipeError

logger = logging.getLogger("comingle")


@dataclass(frozen=True, kw_only=True)
class Store:
    """What an entry point offers; ``moments`` is the dtype of what optimisers remember, None for their own."""

    moments: torch.dtype | None = None

    def __call__(self, clients: Clients) -> OnDisk:
        """Everything as it would be in memory, to the last bit, but for what ``moments`` are rounded to.

        Raises:
            RecipeError: what the recipe asks for looks at everybody at once, or there are no moments to round.
        """
        check_storable(clients)
        remembered = clients.training.experts.moments | clients.training.router.moments
        if self.moments is not None and not MOMENTS & remembered:
            raise RecipeError("runtime.store: disk-bf16 rounds moments, and no optimiser here has any; allowed: disk")
        return OnDisk(clients.begin, clients.rows, self.moments, names=clients.names)

    def read(self, kind: Kind, recipe: Recipe, load_base: LoadBase, *, validates: bool) -> Materials:
        """A recipe's users, who are read in turn into a file unless they are there; or all at once, as without a store.

        Raises:
            ComingleError: as :meth:`comingle.training.kinds.base.Kind.read`.
        """
        base = load_base() if kind.needs_base else None
        turns = in_turn(kind, recipe, base, validates)
        if turns is None:
            return kind.read(recipe, lambda: base or load_base(), validates=validates)
        folder, was_there = populated(recipe, turns)
        try:
            users, about = read_population(folder), read_about(folder)
        except DataError:  # torn, in a cache that anything may happen to
            shutil.rmtree(folder, ignore_errors=True)
            folder, was_there = populated(recipe, turns)
            users, about = read_population(folder), read_about(folder)
        for line in (*(about["heard"] if was_there else []), *about["told"]):
            logger.warning("%s", line)
        skipped = Skipped(folder / SKIPPED, about["skipped"])
        return replace(turns.materials(users, about), skipped=skipped)

    def names(self, folder: Path) -> Names | None:
        """Those of a run's users, who were read in turn; None where nobody has written them down."""
        return Names(folder / FOLDER) if (folder / FOLDER / NAMES).is_file() else None


class Skipped(Mapping[str, str]):
    """Users who were left out, and what they have too little of: read from a file when somebody looks."""

    def __init__(self, path: Path, count: int):
        self.path, self.count = path, count

    def __len__(self) -> int:
        return self.count

    def items(self) -> Any:
        """One after another."""
        with open(self.path, encoding="utf-8") as lines:
            yield from (tuple(json.loads(line)) for line in lines)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.items())

    def __getitem__(self, name: str) -> str:
        for one, what in self.items():
            if one == name:
                return what
        raise KeyError(name)


on_disk = Store()
on_disk_bf16 = Store(moments=torch.bfloat16)


def check_storable(clients: Clients) -> None:
    """Whether nothing in the recipe looks at everybody at once.

    Raises:
        RecipeError: something does.
    """
    if clients.method.placement.pooled:
        raise RecipeError(f"method {clients.method.name}: has one model, for which runtime.store: memory is enough")
    if clients.training.select == "best" and isinstance(clients.users, Crowd):
        clients.require_validation(clients.users.about.get("valid", 1) > 0)
