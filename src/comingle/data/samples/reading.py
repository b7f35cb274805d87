"""Users' samples from a recipe or a program: npz files and folders of images."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor, nn
from torch.utils.data import Dataset

from comingle.data.samples import samples
from comingle.data.samples.images import SUFFIXES, Look, Pictures, find_splits, read_folder, split_named, visible
from comingle.data.samples.samples import (
    SPLITS,
    Samples,
    UserSamples,
    as_samples,
    hold_out,
    is_pair,
    read_arrays,
    read_samples,
    take,
)
from comingle.data.samples.section import SampleSource, SamplesSection
from comingle.models.scoring import Loss, find_loss
from comingle.utils.errors import DataError, list_names
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


def takes(data: Any) -> bool:
    """Whether this may be a user's samples."""
    if isinstance(data, Mapping):
        return bool(data) and set(data) <= set(SPLITS) and all(_is_one(one) for one in data.values())
    return isinstance(data, UserSamples) or _is_one(data)


def _is_one(data: Any) -> bool:
    return isinstance(data, Samples | Dataset) or is_pair(data)


def read_given(name: str, data: Any, *, valid: float, test: float, seed: int) -> UserSamples:
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


logger = logging.getLogger("comingle")

_NAMES = (("inputs", "targets"), ("x", "y"), ("X", "y"))
_SUFFIXES = {"train": ("train",), "valid": ("valid", "val"), "test": ("test",)}


def read_users(section: SamplesSection, seed: int) -> tuple[tuple[UserSamples, ...], tuple[str, ...]]:
    """Everybody, and the names of the classes where they are folders' names.

    Raises:
        DataError: a source is missing or unreadable, or they do not fit each other.
    """
    assert section.users is not None
    look, remarks = look_of(section), Remarks()
    found = {name: read_source(name, source, look, remarks) for name, source in section.users.items()}
    labels, lacking = shared_classes(((name, _classes_of(splits)) for name, splits in found.items()), section.labels)
    for line in [*remarks.lines, *([lacking] if lacking else [])]:
        logger.warning("%s", line)
    shares = {"valid": section.split.valid, "test": section.split.test, "seed": seed}
    users = {name: numbered(section, name, splits, labels) for name, splits in found.items()}
    return tuple(part(name, splits, **shares) for name, splits in users.items()), labels


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


def _classes_of(splits: Mapping[str, Samples | Pictures]) -> set[str]:
    return {label for one in splits.values() if isinstance(one, Pictures) for label in one.classes}


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
