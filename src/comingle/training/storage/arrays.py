"""Users with samples, read in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from comingle.config import Recipe
from comingle.data.populations import Crowd
from comingle.data.samples.images import class_folders, find_splits
from comingle.data.samples.reading import Population, Remarks, look_of, numbered, part, read_source, shared_classes
from comingle.data.samples.samples import Samples, UserSamples, check, told_unseen, unseen_labels
from comingle.models.base import Base
from comingle.models.scoring import CROSS_ENTROPY, MSE, Loss, find_loss
from comingle.training.kinds.base import Materials
from comingle.training.kinds.samples import SamplesKind, as_real, check_classes, section, usual_net
from comingle.training.storage.population import Spool
from comingle.training.storage.readers import Some, Turns, in_turn
from comingle.utils.errors import DataError
from comingle.utils.records import expand_home

_ANY = 2**62
"""Classes, where their number is not known before all samples have been read."""


class SampleTurns(Turns[tuple[str, Mapping[str, Samples]]]):
    """Samples; whether targets are classes or numbers is what those of the first user are."""

    nothing, too_little, skips = "samples", "too few samples", False

    def __init__(self, kind: SamplesKind, recipe: Recipe):
        self.kind, self.data, self.seed = kind, section(recipe), recipe.data_seed
        self.look, self.labels, self.lacking = look_of(self.data), tuple[str, ...](), ""
        self.remarks = Remarks()
        self.first: UserSamples | None = None
        self.begun: UserSamples | None = None
        """The first as it was read, before whole targets become real numbers."""
        self.whole, self.most, self.users, self.unseen = False, 0, 0, Some()
        self.seen: set[int] = set()
        """The first classes that are trained on, of which one alone would be refused."""

    def sources(self) -> list[str]:
        """Files and folders."""
        return [path for one in (self.data.users or {}).values() for path in _paths(one)]

    def readers(self, spool: Spool) -> Iterator[tuple[str, Callable[[], tuple[str, Mapping[str, Samples]]]]]:
        """One user after another, when everybody's classes are known."""
        own = ((name, _classes_in(name, source)) for name, source in (self.data.users or {}).items())
        self.labels, self.lacking = shared_classes(own, self.data.labels)
        for name, source in (self.data.users or {}).items():
            yield name, partial(self._read, name, source)

    def _read(self, name: str, source: Any) -> tuple[str, Mapping[str, Samples]]:
        found = read_source(name, source, self.look, self.remarks)
        return name, numbered(self.data, name, found, self.labels)

    def nobody(self, name: str) -> tuple[str, Mapping[str, Samples]]:
        """Nobody is without samples."""
        raise AssertionError(name)

    def encode(self, read: tuple[str, Mapping[str, Samples]]) -> UserSamples:
        """Samples in splits that fit those of the first user.

        Raises:
            DataError: they do not.
        """
        name, splits = read
        user = part(name, splits, valid=self.data.split.valid, test=self.data.split.test, seed=self.seed)
        if self.first is None:
            self.whole, self.begun = _is_whole(user), user
        if self.whole and not _is_whole(user):  # so targets are none of classes, and the first user's are refused
            self.whole, self.first = False, self.begun
        user = as_real(user) if self.whole and not self.loss(self.whole).classes else user
        users = [user] if self.first is None else [self.first, user]
        check(users, classes=(len(self.labels) or self.data.outputs or _ANY) if self.loss(self.whole).classes else None)
        self.first, self.users = self.first or user, self.users + 1
        if self.loss(self.whole).classes:
            parts = (one.targets for one in (user.train, user.valid, user.test) if len(one))
            self.most = max(self.most, *(int(targets.max()) + 1 for targets in parts))
            if len(self.seen) < 2:
                self.seen.update(user.train.targets.unique()[:2].tolist())
            if labels := unseen_labels(user):
                self.unseen.add(name, labels)
        return user

    def loss(self, whole: bool) -> Loss:
        """That of the recipe, or of such targets."""
        named = self.data.loss
        return find_loss(named, classes=whole) if named is not None else CROSS_ENTROPY if whole else MSE

    def lack(self, user: UserSamples) -> None:
        """Samples have no windows to be too short for."""

    def refused(self, small: Some, users: int) -> DataError:
        """Nobody has too little."""
        raise AssertionError(small.told)

    def end(self) -> tuple[dict[str, Any], list[str]]:
        """Shapes, outputs and classes; who lacks some of these, and who is tested on labels that are not trained on."""
        assert self.first is not None
        train, classes = self.first.train, self.loss(self.whole).classes
        named = max(len(self.labels), self.data.outputs or 0)
        outputs = (named or max(1, self.most)) if classes else train.targets.shape[-1]
        if classes:
            check_classes(self.seen, outputs, self.data.outputs, self.labels)
        told = [*self.remarks.lines, *([self.lacking] if self.lacking else [])]
        told += [told_unseen(self.unseen.first, self.unseen.count, self.users)] if self.unseen.count else []
        about = {"outputs": outputs, "whole": self.whole, "labels": list(self.labels)}
        return {"shape": list(train.inputs.shape[1:]), **about}, told

    def materials(self, users: Crowd, about: dict[str, Any]) -> Materials:
        """Users who are read when they are asked for, and what they have in common."""
        shape = tuple(about["shape"])
        common = Population(
            users=users,
            loss=self.loss(about["whole"]),
            classes=about["outputs"],
            input_shape=shape,
            net=usual_net(shape),
            labels=tuple(about["labels"]),
        )
        return Materials(kind=self.kind, base=None, users=users, common=common, unread=True)


def _is_whole(user: UserSamples) -> bool:
    return not any(part.targets.is_floating_point() for part in (user.train, user.test))


def _paths(source: Any) -> list[str]:
    """Where one user's samples are."""
    return [path for path in (source.path, source.train, source.valid, source.test) if path is not None]


def _classes_in(user: str, source: Any) -> set[str]:
    """By the names of folders alone; none where there is no folder, which reading it says better."""
    folders = [folder for path in _paths(source) if (folder := expand_home(path)).is_dir()]
    if source.path is not None:  # else these are splits themselves
        folders = [split for folder in folders for split in find_splits(folder, f"data.users.{user}").values()]
    return {one.name for folder in folders for one in class_folders(folder)}


@in_turn.register
def _of_samples(kind: SamplesKind, recipe: Recipe, base: Base | None, validates: bool) -> Turns[Any] | None:
    return SampleTurns(kind, recipe) if section(recipe).users else None
