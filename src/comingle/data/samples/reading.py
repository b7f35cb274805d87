"""Users' samples from a recipe or a program: npz files and folders of images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor, nn
from torch.utils.data import Dataset

from comingle.data.samples import samples
from comingle.data.samples.images import (
    SUFFIXES,
    Look,
    Pictures,
    class_folders,
    find_splits,
    read_folder,
    split_named,
    visible,
)
from comingle.data.samples.samples import (
    SPLITS,
    Samples,
    UserSamples,
    as_samples,
    check,
    hold_out,
    is_pair,
    read_arrays,
    read_samples,
    take,
    told_unseen,
    unseen_labels,
)
from comingle.data.samples.section import SampleSource, SamplesSection
from comingle.data.streaming import FirstUsers, Rows, StreamingReader
from comingle.models.scoring import CROSS_ENTROPY, MSE, Loss, LossFunction, find_loss
from comingle.utils.errors import DataError, RecipeError, list_names
from comingle.utils.records import expand_home
from comingle.utils.seeds import generator

Augment = Callable[[Sequence[int], Tensor, torch.Generator], Tensor]
"""Changes train inputs ``(users, batch, ...)`` of the given users at random."""

MakeNet = Callable[..., nn.Module]
"""A net of no arguments, or of the shape of one input and the number of outputs."""


@dataclass(frozen=True, kw_only=True)
class Population:
    """Everybody; ``classes`` is the number of the net's outputs: classes, or dimensions of a regression's target."""

    users: Sequence[UserSamples]
    loss: str | Loss
    classes: int
    input_shape: tuple[int, ...]
    net: str | MakeNet
    """Trained where the recipe names none: of the registry, or what a program makes."""
    labels: tuple[str, ...] = ()
    """Names of the classes, where they have some."""

    @property
    def measure(self) -> Loss:
        """The loss itself."""
        return self.loss if isinstance(self.loss, Loss) else find_loss(self.loss, classes=False)

    @property
    def augmentation(self) -> Augment | None:
        """What changes train inputs at random."""
        return None


def part(name: str, splits: Mapping[str, Samples], *, valid: float, test: float, seed: int) -> UserSamples:
    """A user of these splits; ``test`` and ``valid`` are shares that are held out of "train" for those that lack.

    Which samples are held out follows from the seed and the user's name.

    Raises:
        DataError: so few samples that none can be spared.
    """
    train = splits["train"]
    if not len(train):
        raise DataError(f"user {name!r}: train holds no samples, needs at least 1")
    if "test" in splits and "valid" in splits:
        return UserSamples(name=name, train=train, valid=splits["valid"], test=splits["test"])
    train = take(train, torch.randperm(len(train), generator=generator("samples", name, seed)))
    parts = dict(splits)
    if "test" not in splits:
        valid /= 1 - test  # it is a share of all
        train, parts["test"] = _held_out(name, train, "test", test)
    if "valid" not in splits:
        train, parts["valid"] = _held_out(name, train, "valid", valid) if valid else (train, train.first(0))
    return UserSamples(name=name, train=train, valid=parts["valid"], test=parts["test"])


def _held_out(name: str, samples: Samples, split: str, share: float) -> tuple[Samples, Samples]:
    kept, held = hold_out(_labels(samples), share)
    if not len(held):
        got = f"{len(samples)} samples, one of each class" if len(samples) > 1 else "1 sample"
        raise DataError(f"user {name!r}: {got}, of which none can be spared for data.split.{split}; give more")
    return take(samples, kept), take(samples, held)


def _labels(samples: Samples) -> Int64[Tensor, " n"]:
    """Classes; a regression has none to keep."""
    targets = samples.targets
    if not targets.is_floating_point() and bool((targets >= 0).all()):
        return targets.long()
    return torch.zeros(len(targets), dtype=torch.int64)


TAKEN = f"{samples.TAKEN}, or {{train, valid, test}} of these"


def takes(data: object) -> bool:
    """Whether this may be a user's samples."""
    if isinstance(data, Mapping):
        return bool(data) and set(data) <= set(SPLITS) and all(_is_one(one) for one in data.values())
    return isinstance(data, UserSamples) or _is_one(data)


def _is_one(data: object) -> bool:
    return isinstance(data, Samples | Dataset) or is_pair(data)


def read_given(name: str, data: object, *, valid: float, test: float, seed: int) -> UserSamples:
    """A user's samples, parted where they have no splits.

    Raises:
        DataError: they are none, or too few.
    """
    where = f"user {name!r}"
    if not takes(data):
        raise DataError(f"{where}: got {type(data).__name__}; allowed: {TAKEN}")
    if isinstance(data, UserSamples):
        return data
    splits = data if isinstance(data, Mapping) else {"train": data}
    if isinstance(data, Mapping) and not {"train", "test"} <= set(data):
        raise DataError(f"{where}: splits {', '.join(map(repr, data))}; allowed: 'train' and 'test', maybe 'valid'")
    alone = not isinstance(data, Mapping)
    read = {split: read_samples(one, where if alone else f"{where}: {split}") for split, one in splits.items()}
    return part(name, read, valid=valid, test=test, seed=seed)


_NAMES = (("inputs", "targets"), ("x", "y"), ("X", "y"))
_SUFFIXES = {"train": ("train",), "valid": ("valid", "val"), "test": ("test",)}


def look_of(section: SamplesSection) -> Look:
    """How a recipe's images are read."""
    size = section.image_size
    return Look(size=(size, size) if isinstance(size, int) else size, grey=section.grayscale)


@dataclass(kw_only=True)
class Remarks:
    """Choices made while folders of images are read, each said once for all users."""

    renamed: dict[str, str] = field(default_factory=dict)
    """Users whose validation split is their test split, with its folder's name."""
    unread: dict[str, Counter[str]] = field(default_factory=dict)
    """Users with files that are not read, which are counted by their suffix."""

    def add_splits(self, user: str, folder: Path, splits: Mapping[str, Path]) -> None:
        """Note which split is tested on, and what lies beside the splits in a user's folder."""
        if "test" in splits:
            if split_named(splits["test"].name) != "test":
                self.renamed[user] = splits["test"].name
            self.add_unread(user, Counter(path.name for path in visible(folder) if path not in splits.values()))

    def add_unread(self, user: str, unread: Counter[str]) -> None:
        """Count a user's files that are not read."""
        if unread:
            self.unread[user] = self.unread.get(user, Counter()) + unread

    @property
    def lines(self) -> list[str]:
        """One line for each kind of remark."""
        lines = []
        if self.renamed:
            folder = next(iter(self.renamed.values()))
            lines.append(f"no test split, so {folder} is the held-out test split of {list_names(self.renamed)}")
        if self.unread:
            counts = sum(self.unread.values(), Counter[str]())
            found = list_names(f"{count} {suffix}" for suffix, count in counts.most_common())
            users = list_names(self.unread)
            lines.append(f"not read as images of a class: {found}, of {users}; read: {' '.join(SUFFIXES)}")
        return lines


def read_source(user: str, source: SampleSource, look: Look, remarks: Remarks) -> dict[str, Samples | Pictures]:
    """Read one user's samples by split.

    Raises:
        DataError: a source is missing or unreadable.
    """
    where, key = f"user {user!r}", f"data.users.{user}"
    parts: dict[str, Samples | Pictures] = {}
    if source.path is not None:
        path = expand_home(source.path)
        if _is_file(path, where):
            return dict(read_npz(path, where))
        splits = find_splits(path, key)
        remarks.add_splits(user, path, splits)
    else:
        given = {split: getattr(source, split) for split in SPLITS}
        splits = {split: expand_home(place) for split, place in given.items() if place is not None}
    for split, path in splits.items():
        if _is_file(path, where):
            parts[split] = read_npz(path, where)["train"]
        else:
            pictures = parts[split] = read_folder(path, look, key if len(splits) == 1 else f"{key}.{split}")
            remarks.add_unread(user, pictures.unread)
    return parts


def _is_file(path: Path, where: str) -> bool:
    if not path.exists():
        raise DataError(f"{where}: {path}: no such file or folder")
    if path.is_file() and path.suffix.lower() != ".npz":
        raise DataError(
            f"{where}: {path}: allowed: an .npz file, or a folder with a subfolder of images for each class"
        )
    return path.is_file()


def read_npz(path: Path, where: str) -> dict[str, Samples]:
    """``inputs`` and ``targets``, or ``x`` and ``y``; or for splits ``x_train``, ``y_train``, ``x_test`` and so on.

    Raises:
        DataError: no npz file, or arrays that are missing or do not fit each other.
    """
    arrays = read_arrays(path)
    for x, y in _NAMES:
        whole = (x, y) if {x, y} <= arrays.keys() else None
        parts = {
            split: (f"{x}_{name}", f"{y}_{name}")
            for split, names in _SUFFIXES.items()
            for name in names
            if {f"{x}_{name}", f"{y}_{name}"} <= arrays.keys()
        }
        if whole or {"train", "test"} <= parts.keys():
            chosen = {"train": whole} if whole else parts
            return {s: as_samples(arrays[a], arrays[b], f"{where}: {path}") for s, (a, b) in chosen.items()}
    found = list_names(arrays) or "nothing"
    raise DataError(
        f"{where}: {path}: found {found}; allowed: inputs and targets, or x and y (or x_train, y_train ...)"
    )


def shared_classes(own: Iterable[tuple[str, Collection[str]]], named: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """The classes ``named``, or else those of all users together, none where nobody has any; and who lacks some.

    Of each user a number alone is kept.

    Raises:
        DataError: somebody has one that is not among those named.
    """
    bits, masks = {label: 1 << place for place, label in enumerate(named)}, dict[str, int]()
    for name, has in own:
        if named and (more := sorted(set(has) - set(named))):
            raise DataError(f"user {name!r}: class {more[0]!r}; allowed: data.classes, {list_names(named)}")
        masks[name] = sum(bits.setdefault(label, 1 << len(bits)) for label in set(has))
    if not any(masks.values()):
        return (), ""
    classes = named or tuple(sorted(bits))
    lacking = [name for name, mask in masks.items() if mask != sum(bits.values())]
    if not lacking:
        return classes, ""
    missing = list_names(label for label in classes if not masks[lacking[0]] & bits[label])
    some = f"{len(lacking)} of {len(masks)} users lack some, as {lacking[0]!r} lacks {missing}"
    return classes, f"{len(classes)} classes are those of all users together: {list_names(classes)}; {some}"


def numbered(
    section: SamplesSection, name: str, splits: Mapping[str, Samples | Pictures], labels: Sequence[str]
) -> dict[str, Samples]:
    """A user's samples, with the numbers of their classes among ``labels``, which there are for images alone.

    Raises:
        DataError: there are images and arrays, or settings for images where there are none.
    """
    if labels and any(isinstance(one, Samples) for one in splits.values()):
        raise DataError(f"user {name!r}: an .npz file, but others have folders of images; give all the same")
    if not labels and (section.image_size is not None or section.grayscale):
        raise DataError("data.image_size and grayscale are for folders of images; the users have .npz files")
    return {split: _samples(one, labels) for split, one in splits.items()}


def _samples(one: Samples | Pictures, labels: Sequence[str]) -> Samples:
    if isinstance(one, Samples):
        return one
    number = {label: i for i, label in enumerate(labels)}
    targets = torch.from_numpy(np.array([number[label] for label in one.labels], dtype=np.int64))
    return Samples(inputs=one.pixels.permute(0, 3, 1, 2).contiguous().float() / 255, targets=targets)


class SamplesReader(StreamingReader[UserSamples, UserSamples]):
    """Reads users' samples; whether targets are classes or numbers follows from those of the first user.

    Args:
        data: the recipe's section.
        seed: seed of the splits.
        given: the samples of each user, where a program hands them over.
        net: the net in place of the usual one.
        loss: the loss in place of the recipe's.
    """

    def __init__(
        self,
        data: SamplesSection,
        seed: int,
        *,
        given: Mapping[str, object] | None = None,
        net: MakeNet | None = None,
        loss: str | LossFunction | None = None,
    ):
        super().__init__(data, seed)
        self.section = data
        if given is not None and (data.image_size is not None or data.grayscale):
            raise RecipeError("data.image_size and grayscale are for folders of images; scale what is handed over")
        self.given, self.net = given, net
        self._loss, self._losses = loss or data.loss, dict[bool, Loss]()
        self._shares = {"valid": data.split.valid, "test": data.split.test, "seed": seed}
        self.labels, self._lacking, self._remarks = tuple[str, ...](), "", Remarks()
        self._first: UserSamples | None = None
        self._unchanged: UserSamples | None = None
        """The first user as it was read, before class numbers become real numbers."""
        self._whole, self._most = False, 0
        self._seen, self._unseen = set[int](), FirstUsers()

    def sources(self) -> list[str]:
        """Return files and folders."""
        return [path for source in (self.section.users or {}).values() for path in _paths(source)]

    def read(self, rows: Rows) -> Generator[UserSamples, None, None]:
        """Yield users' samples in splits; classes are those of all users' folders."""
        if self.given is not None:
            yield from (read_given(name, held, **self._shares) for name, held in self.given.items())
            return
        users, look = self.section.users or {}, look_of(self.section)
        own = ((name, _classes_in(name, source)) for name, source in users.items())
        self.labels, self._lacking = shared_classes(own, self.section.labels)
        for name, source in users.items():
            found = read_source(name, source, look, self._remarks)
            yield part(name, numbered(self.section, name, found, self.labels), **self._shares)

    def encode(self, read: UserSamples) -> UserSamples:
        """Return the user, with real numbers for targets where the loss takes no classes.

        Raises:
            DataError: targets are real numbers, but those of the first user were classes.
        """
        user = read
        if self._first is None:
            self._whole, self._unchanged = _is_whole(user), user
        if self._whole and not _is_whole(user):
            self._whole = False
            assert self._unchanged is not None
            check([self._unchanged, user], classes=self._limit)
        if self._whole and not self.loss.classes:
            user = as_real(user)
        self._first = self._first or user
        if self.loss.classes and self._whole:
            self._count_classes(user)
        return user

    def _count_classes(self, user: UserSamples) -> None:
        parts = (one.targets for one in (user.train, user.valid, user.test) if len(one))
        self._most = max(self._most, *(int(targets.max()) + 1 for targets in parts))
        if len(self._seen) < 2:  # of which one alone would be refused
            self._seen.update(user.train.targets.unique()[:2].tolist())
        if labels := unseen_labels(user):
            self._unseen.add(user.name, labels)

    @property
    def loss(self) -> Loss:
        """The loss that was chosen, or the usual one of such targets."""
        if self._whole not in self._losses:
            usual = CROSS_ENTROPY if self._whole else MSE
            self._losses[self._whole] = usual if self._loss is None else find_loss(self._loss, classes=self._whole)
        return self._losses[self._whole]

    @property
    def _limit(self) -> int | None:
        """The number of classes; a very large number where it is not known before all samples have been read."""
        return (len(self.labels) or self.section.outputs or 2**62) if self.loss.classes else None

    def inspect(self, read: UserSamples, user: UserSamples) -> None:
        """Refuse samples that do not fit those of the first user."""
        assert self._first is not None
        check([user] if user is self._first else [self._first, user], classes=self._limit)

    def summary(self) -> tuple[dict[str, Any], list[str]]:
        """Return shapes, outputs and classes, and warnings about classes that users lack or do not train on.

        Raises:
            DataError: no users, or all samples are of one class.
        """
        if self._first is None:
            raise DataError("no users; at least one is needed")
        train, classes = self._first.train, self.loss.classes
        named = max(len(self.labels), self.section.outputs or 0)
        outputs = (named or max(1, self._most)) if classes else train.targets.shape[-1]
        lines = [*self._remarks.lines, *([self._lacking] if self._lacking else [])]
        if classes and self._whole:
            lines += check_classes(self._seen, outputs, self.section.outputs, self.labels)
        if self._unseen.count:
            lines.append(told_unseen(self._unseen.first, self._unseen.count, self.users))
        about = {"outputs": outputs, "whole": self._whole, "labels": list(self.labels)}
        return {"shape": list(train.inputs.shape[1:]), **about}, lines

    def common(self, users: Sequence[UserSamples], about: Mapping[str, Any]) -> Population:
        """Return the task that users share."""
        shape, self._whole = tuple(about["shape"]), about["whole"]
        return Population(
            users=users,
            loss=self.loss,
            classes=about["outputs"],
            input_shape=shape,
            net=usual_net(shape) if self.net is None else self.net,
            labels=tuple(about["labels"]),
        )


def _is_whole(user: UserSamples) -> bool:
    return not any(part.targets.is_floating_point() for part in (user.train, user.test))


def _paths(source: SampleSource) -> list[str]:
    return [path for path in (source.path, source.train, source.valid, source.test) if path is not None]


def _classes_in(user: str, source: SampleSource) -> set[str]:
    """Return the classes by the names of folders alone; none where a folder is missing, as reading it says so."""
    folders = [folder for path in _paths(source) if (folder := expand_home(path)).is_dir()]
    if source.path is not None:  # else these are splits themselves
        folders = [split for folder in folders for split in find_splits(folder, f"data.users.{user}").values()]
    return {one.name for folder in folders for one in class_folders(folder)}


def usual_net(shape: Sequence[int]) -> str:
    """Which net is trained on inputs of a shape where nobody names one."""
    return "cnn" if len(shape) == 3 and min(shape[1:]) >= 4 else "mlp"


def check_classes(seen: Collection[int], outputs: int, given: int | None, labels: Sequence[str]) -> list[str]:
    """Refuse one class alone, as when the given folder is one level too high: any net would be right always.

    Returns the warning where train samples are of one class of several.

    Args:
        seen: classes of train samples; where they are fewer than there are, this is said.
        outputs: classes that there are.
        given: their number, where the recipe has it, as one user of a federation may have one class of many.
        labels: their names, if they have some.

    Raises:
        DataError: there is one.
    """
    name = f" ({labels[min(seen)]})" if labels else ""
    if outputs == 1 and not any(seen):
        raise DataError(
            f"samples: one class alone{name}, so there is nothing to learn; give samples of two or more, or "
            "data.classes where others have them"
        )
    if len(seen) == 1 and outputs > 1 and given is None:
        return [f"all train samples are of class {min(seen)}{name}, so any net learns to predict only it"]
    return []


def as_real(user: UserSamples) -> UserSamples:
    """Whole targets as real numbers, for a regression."""

    def real(samples: Samples) -> Samples:
        return Samples(inputs=samples.inputs, targets=samples.targets.float().reshape(-1, 1))

    return replace(user, train=real(user.train), valid=real(user.valid), test=real(user.test))
