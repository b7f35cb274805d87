"""Users with folders of images, read in turn: whose classes are those of all is seen by the folders' names alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from comingle.data.crowds import Crowd
from comingle.data.samples import Samples
from comingle.kinds.base import Materials
from comingle.kinds.samples.folders import class_folders, find_splits
from comingle.kinds.samples.kind import SamplesKind, section
from comingle.kinds.samples.reading import check_named, told_lacking
from comingle.models.base import Base
from comingle.recipes import Recipe
from comingle.store.arrays import SampleTurns, paths_of
from comingle.store.grouping import Spool
from comingle.store.turns import Turns, in_turn


class ImageTurns(SampleTurns):
    """Images and arrays; where somebody has images, all have them."""

    def __init__(self, kind: SamplesKind, recipe: Recipe):
        super().__init__(kind, recipe)
        self.lacking = ""

    def readers(self, spool: Spool) -> Iterator[tuple[str, Callable[[], tuple[str, Mapping[str, Samples]]]]]:
        """One user after another, when everybody's classes are known."""
        self.labels = self._labels()
        yield from super().readers(spool)

    def _labels(self) -> tuple[str, ...]:
        """The classes that are named, or those of all users together; of each user there is a number alone.

        Raises:
            DataError: somebody has one that is not among those named.
        """
        bits, masks = dict[str, int](), list[int]()
        for name, source in (self.data.users or {}).items():
            has = {label for path in paths_of(source) for label in _classes_in(Path(path).expanduser())}
            if self.data.labels and has:
                check_named(name, has, self.data.labels)
            masks.append(sum(1 << bits.setdefault(label, len(bits)) for label in has))
        classes = self.data.labels if bits and self.data.labels else tuple(sorted(bits))
        wanted = [(label, 1 << bits[label] if label in bits else 0) for label in classes]
        every = sum(bit for _, bit in wanted)
        missing = [not all(bit for _, bit in wanted) or mask != every for mask in masks]
        if any(missing):
            at = missing.index(True)
            lacks = [label for label, bit in wanted if not masks[at] & bit]
            first = list(self.data.users or {})[at], lacks
            self.lacking = told_lacking(classes, first, sum(missing), len(masks))
        return classes

    def end(self) -> tuple[dict[str, Any], list[str]]:
        """The classes' names besides, and who lacks some."""
        about, told = super().end()
        return {**about, "labels": list(self.labels)}, [*filter(None, [self.lacking]), *told]

    def materials(self, users: Crowd, about: dict[str, Any]) -> Materials:
        """With the classes' names."""
        self.labels = tuple(about["labels"])
        return super().materials(users, about)


def _classes_in(path: Path) -> list[str]:
    """The classes of a source; none where there is no folder, which reading it says better."""
    folders = find_splits(path).values() if path.is_dir() else ()
    return [one.name for folder in folders for one in class_folders(folder)]


@in_turn.register
def _of_samples(kind: SamplesKind, recipe: Recipe, base: Base | None, validates: bool) -> Turns[Any] | None:
    return ImageTurns(kind, recipe) if section(recipe).users else None
