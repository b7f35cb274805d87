"""``data.held_out: mixture`` of users who are read in turn: what everybody gives lies in files until it is dealt.

Files have as many pieces as the mixture itself: each user's, of each user. In memory is what one user gives, or gets.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from comingle.config import Recipe
from comingle.data.samples.samples import SPLITS
from comingle.data.splits import UserText, deal, quota_of, take_turns
from comingle.data.text.streams import find_shortage
from comingle.kinds.text.kind import TextKind, section
from comingle.models.base import Base
from comingle.store.grouping import Spool
from comingle.store.language import TextTurns
from comingle.store.tokens import PopulationWriter
from comingle.store.turns import Turns, in_turn

HELD_OUT = ("valid", "test")


class Pieces:
    """Lists of documents, one after another in a file, read by their numbers."""

    def __init__(self, path: Path):
        self._paths = path.with_suffix(".pieces"), path.with_suffix(".ends")
        self._files: list[Any] = [open(one, "wb") for one in self._paths]  # noqa: SIM115 (closed by finish or remove)
        self._end = 0

    def add(self, documents: Any) -> None:
        """One more; half a pair of surrogates, which a document may have, is written as such."""
        content = json.dumps(list(documents)).encode()
        self._end += len(content)
        self._files[0].write(content)
        self._files[1].write(self._end.to_bytes(8, "little"))

    def finish(self) -> None:
        """All are there, and can be read."""
        for file in self._files:
            file.close()
        self._ends = np.memmap(self._paths[1], dtype="<i8", mode="r")
        self._files = [open(self._paths[0], "rb")]  # noqa: SIM115 (closed by remove)

    def __getitem__(self, number: int) -> list[str]:
        start = int(self._ends[number - 1]) if number else 0
        self._files[0].seek(start)
        return json.loads(self._files[0].read(int(self._ends[number]) - start))

    def remove(self) -> None:
        """Delete what was written."""
        for file in self._files:
            file.close()
        for path in self._paths:
            path.unlink(missing_ok=True)


class Mixture:
    """Users' own text, then the mixtures; :func:`comingle.data.splits.mix_held_out` without a list of all."""

    def __init__(self, folder: Path, seed: int):
        self.folder, self.seed, self.names = folder, seed, list[str]()
        self._own = Pieces(folder / "own")
        self._sizes: dict[str, list[int]] = {split: [] for split in HELD_OUT}
        self._dealt: dict[str, Pieces] = {}

    def add(self, text: UserText) -> None:
        """One more user."""
        self.names.append(text.name)
        for split in SPLITS:
            self._own.add(getattr(text, split))
        for split, sizes in self._sizes.items():
            sizes.append(sum(map(len, getattr(text, split))))

    def texts(self) -> Iterator[tuple[str, Callable[[], UserText]]]:
        """Everybody with a mixture of all to be tested on, in the order in which they came.

        Raises:
            DataError: somebody has nothing to give.
        """
        self._own.finish()
        order = sorted(range(len(self.names)), key=self.names.__getitem__)
        quotas = {split: quota_of(self._named(sizes), split) for split, sizes in self._sizes.items()}
        for split in (split for split, quota in quotas.items() if quota):
            self._dealt[split] = pieces = Pieces(self.folder / split)
            for giver in order:
                own = self._own[3 * giver + SPLITS.index(split)]
                for share in deal(own, quotas[split], len(order), split, self.seed, self.names[giver]):
                    pieces.add(share)
            pieces.finish()
        places = {user: place for place, user in enumerate(order)}
        for user, name in enumerate(self.names):
            yield name, partial(self._text, user, places[user], order)

    def _named(self, sizes: list[int]) -> dict[str, int]:
        return dict(zip(self.names, sizes, strict=True))

    def _text(self, user: int, place: int, order: list[int]) -> UserText:
        count = len(order)
        held_out = {
            split: take_turns({self.names[giver]: pieces[at * count + place] for at, giver in enumerate(order)})
            for split, pieces in self._dealt.items()
        }
        return UserText(name=self.names[user], train=tuple(self._own[3 * user]), **held_out)

    def remove(self) -> None:
        """Delete what was written."""
        for pieces in (self._own, *self._dealt.values()):
            pieces.remove()


class MixedTurns(TextTurns):
    """Users whose own text has been read, with a mixture to be tested on; who has too little of it is not left out."""

    def __init__(self, kind: TextKind, recipe: Recipe, base: Base, validates: bool):
        super().__init__(kind, recipe, base, validates)
        self.skips = False
        self.mixture: Mixture | None = None

    def before(self, folder: Path) -> Iterator[Turns[UserText]]:
        """Everybody's own text."""
        self.mixture = Mixture(folder, self.recipe.data_seed)
        yield _Own(self, self.mixture)

    def readers(self, spool: Spool) -> Iterator[tuple[str, Callable[[], UserText]]]:
        """In the order in which they came."""
        assert self.mixture is not None
        yield from self.mixture.texts()

    def close(self) -> None:
        """The files go."""
        if self.mixture is not None:
            self.mixture.remove()


class _Own(TextTurns):
    """Users' own text; who has too little of it is left out, where the recipe asks for that."""

    def __init__(self, whole: MixedTurns, mixture: Mixture):
        super().__init__(whole.kind, whole.recipe, whole.base, whole.validates)
        self.mixture = mixture

    def encode(self, read: UserText) -> Any:
        """Tokenised where that decides who is left out."""
        return self.packed(read) if self.skips else read

    def lack(self, user: Any) -> Any:
        """The first stream that is too short."""
        context = self.recipe.training.context
        return find_shortage(user, context=context, needs_validation=self.validates) if self.skips else None

    def keep(self, writer: PopulationWriter, read: UserText, user: Any) -> None:
        """For the mixture."""
        self.mixture.add(read)


@in_turn.register
def _of_text(kind: TextKind, recipe: Recipe, base: Base | None, validates: bool) -> Turns[Any] | None:
    if base is None or (data := section(recipe)).given:
        return None
    return (MixedTurns if data.held_out == "mixture" else TextTurns)(kind, recipe, base, validates)
