"""Readers of users' samples from a recipe or a program: npz files and folders of images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn
from torch.utils.data import Dataset

from comingle.data.populations import UserCollection, as_users
from comingle.data.samples import samples
from comingle.data.samples.images import (
    SUFFIXES,
    BrokenImagesError,
    ImageFormat,
    Images,
    class_folders,
    find_splits,
    list_visible,
    read_folder,
    split_named,
)
from comingle.data.samples.samples import (
    SPLITS,
    Samples,
    UserSamples,
    as_samples,
    check,
    describe_unseen,
    hold_out,
    is_pair,
    read_arrays,
    read_samples,
    select_samples,
    unseen_labels,
)
from comingle.data.samples.section import SampleSource, SamplesSection
from comingle.data.streaming import FirstUsers, Rows, StreamingReader
from comingle.models.scoring import CROSS_ENTROPY, MSE, Loss, LossFunction, find_loss
from comingle.utils.errors import DataError, RecipeError, list_names
from comingle.utils.records import expand_home
from comingle.utils.seeds import generator

Augment = Callable[[Sequence[int], Tensor, torch.Generator], Tensor]
"""Function that randomly transforms train inputs ``(users, batch, ...)`` of the given users."""

MakeNet = Callable[..., nn.Module]
"""Function that creates a net, without arguments or from the shape of one input and the number of outputs."""


@dataclass(frozen=True, kw_only=True)
class Population:
    """Users with samples, and the task that they share.

    Args:
        users: The users.
        loss: Loss, or its name.
        classes: Number of outputs of the net: classes, or dimensions of a regression's targets.
        input_shape: Shape of one input.
        net: Net to train if the recipe names none: a registered name, or a function that creates it.
        labels: Names of the classes, if they have names.
    """

    users: UserCollection[UserSamples]
    loss: str | Loss
    classes: int
    input_shape: tuple[int, ...]
    net: str | MakeNet
    labels: tuple[str, ...] = ()

    @property
    def measure(self) -> Loss:
        """The loss as an object that computes it, also if ``loss`` is a name or a function."""
        return self.loss if isinstance(self.loss, Loss) else find_loss(self.loss, classes=False)

    @property
    def augmentation(self) -> Augment | None:
        """Random transformation of train inputs; None for no augmentation."""
        return None


def split_samples(name: str, splits: Mapping[str, Samples], *, valid: float, test: float, seed: int) -> UserSamples:
    """Return a user with three splits; hold out missing test and valid splits from train.

    The seed and the user's name determine which samples are held out.

    Args:
        name: Name of the user.
        splits: Samples by split; "train" is required.
        valid: Fraction of all samples for a missing validation split.
        test: Fraction of all samples for a missing test split.
        seed: Seed of the shuffle.

    Raises:
        DataError: There are too few samples to hold any out.
    """
    train = splits["train"]
    if not len(train):
        raise DataError(f"user {name!r}: train has no samples; at least 1 is needed")
    if "test" in splits and "valid" in splits:
        return UserSamples(name=name, train=train, valid=splits["valid"], test=splits["test"])
    train = select_samples(train, torch.randperm(len(train), generator=generator("samples", name, seed)))
    valid_share = valid
    if "test" in splits:
        test_samples = splits["test"]
    else:
        train, test_samples = _hold_out_share(name, train, "test", test)
        valid_share = valid / (1 - test)  # of the samples that remain without the test samples
    if "valid" in splits:
        valid_samples = splits["valid"]
    elif valid_share:
        train, valid_samples = _hold_out_share(name, train, "valid", valid_share)
    else:
        valid_samples = train.first(0)  # none
    return UserSamples(name=name, train=train, valid=valid_samples, test=test_samples)


def _hold_out_share(name: str, samples: Samples, split: str, share: float) -> tuple[Samples, Samples]:
    """Hold out a share of the samples of each class.

    Args:
        name: Name of the user, for error messages.
        samples: The samples, shuffled.
        split: Split to hold out, for error messages.
        share: Fraction to hold out.

    Returns:
        Remaining and held-out samples.

    Raises:
        DataError: There are too few samples to hold any out.
    """
    remaining, held_out = hold_out(_class_numbers(samples), share)  # indices
    if len(held_out) == 0:  # as the last sample of a class is not held out
        got = f"{len(samples)} samples, one of each class" if len(samples) > 1 else "1 sample"
        raise DataError(f"user {name!r}: {got}: too few to hold out any for data.split.{split}; give more")
    return select_samples(samples, remaining), select_samples(samples, held_out)


def _class_numbers(samples: Samples) -> Int64[Tensor, " n"]:
    """Return the class of each sample, to hold out the same fraction of each class (:func:`hold_out`).

    Targets that are no class numbers, such as real or negative numbers, give zeros: one class for all samples.
    """
    targets = samples.targets
    if not targets.is_floating_point() and bool((targets >= 0).all()):
        return targets.long()
    return torch.zeros(len(targets), dtype=torch.int64)


ALLOWED_SAMPLES = f"{samples.ALLOWED_SAMPLES}, or {{train, valid, test}} of these"
"""Allowed data of a user, for error messages."""


def may_be_user_samples(data: object) -> bool:
    """Return whether an object may be a user's samples, judged by its type."""
    if isinstance(data, Mapping):
        return bool(data) and set(data) <= set(SPLITS) and all(_is_samples(item) for item in data.values())
    return isinstance(data, UserSamples) or _is_samples(data)


def _is_samples(data: object) -> bool:
    """Return whether an object may be samples without splits: a ``Dataset``, ``Samples`` or a pair of arrays."""
    return isinstance(data, Samples | Dataset) or is_pair(data)


def read_given(name: str, data: object, *, valid: float, test: float, seed: int) -> UserSamples:
    """Return a user's samples that a program passes, split by fractions if they have no splits.

    Args:
        name: Name of the user.
        data: Samples, or a mapping from splits to samples; ``UserSamples`` are returned unchanged.
        valid: Fraction for a missing validation split.
        test: Fraction for a missing test split.
        seed: Seed of the shuffle.

    Raises:
        DataError: The data has another type, or too few samples.
    """
    where = f"user {name!r}"
    if not may_be_user_samples(data):
        raise DataError(f"{where}: got {type(data).__name__}; allowed: {ALLOWED_SAMPLES}")
    if isinstance(data, UserSamples):
        return data
    if not isinstance(data, Mapping):
        splits = {"train": read_samples(data, where)}
    elif "train" in data and "test" in data:
        splits: dict[str, Samples] = {}
        for split, samples_of_split in data.items():
            splits[split] = read_samples(samples_of_split, f"{where}: {split}")
    else:
        raise DataError(
            f"{where}: got splits {', '.join(map(repr, data))}; allowed: 'train', 'test' and optionally 'valid'"
        )
    return split_samples(name, splits, valid=valid, test=test, seed=seed)


_ARRAY_NAMES = (("inputs", "targets"), ("x", "y"), ("X", "y"))
"""Names of the arrays of inputs and targets in an npz file."""
_SPLIT_SUFFIXES = {"train": ("train",), "valid": ("valid", "val"), "test": ("test",)}
"""Suffixes of array names by split."""


def image_format_of(section: SamplesSection) -> ImageFormat:
    """Return the size and colours to which a recipe's images are converted."""
    size = section.image_size
    if isinstance(size, int):
        size = (size, size)
    return ImageFormat(size=size, grey=section.grayscale)


@dataclass(kw_only=True)
class Remarks:
    """Notes on folders of images, each logged once for all users."""

    renamed_splits: dict[str, str] = field(default_factory=dict)
    """Folder name of the validation split that is used as the test split, by user."""
    unread_files: dict[str, Counter[str]] = field(default_factory=dict)
    """Numbers of files that are not read, by user and suffix."""

    def add_folder(self, user: str, folder: Path, splits: Mapping[str, Path]) -> None:
        """Record notes for the user on how a folder of images is divided into splits.

        If the folder has no test split, one note says that its validation split is used as test split. Another one has
        the number of files outside of the splits' subfolders, which are not read.

        Args:
            user: Name of the user.
            folder: Folder of the user.
            splits: Subfolder that is used for each split (:func:`comingle.data.samples.images.find_splits`).
        """
        if "test" not in splits:  # the folder is not divided into splits
            return
        test_folder = splits["test"].name
        has_no_test_folder = split_named(test_folder) != "test"  # but for example a folder "val"
        if has_no_test_folder:
            self.renamed_splits[user] = test_folder
        outside = [path.name for path in list_visible(folder) if path not in splits.values()]
        self.add_unread(user, Counter(outside))

    def add_unread(self, user: str, num_files: Counter[str]) -> None:
        """Record a user's files that are not read.

        Args:
            user: Name of the user.
            num_files: Numbers of files by suffix, or by name for files without one.
        """
        if num_files:
            self.unread_files[user] = self.unread_files.get(user, Counter()) + num_files

    @property
    def lines(self) -> list[str]:
        """Lines for the log: one on validation splits used as test splits, one on files that are not read, if any."""
        lines = []
        if self.renamed_splits:
            example = next(iter(self.renamed_splits.values()))
            lines.append(f"no test split; using {example} as the test split of {list_names(self.renamed_splits)}")
        if self.unread_files:
            counts = sum(self.unread_files.values(), Counter[str]())
            found = list_names(f"{count} {suffix}" for suffix, count in counts.most_common())
            users = list_names(self.unread_files)
            lines.append(
                f"skipped files that are not images of a class: {found}, of {users}; allowed: {' '.join(SUFFIXES)}"
            )
        return lines


def read_source(
    user: str, source: SampleSource, image_format: ImageFormat, remarks: Remarks
) -> dict[str, Samples | Images]:
    """Read one user's samples by split, from one source that may have splits, or from one source per split.

    Args:
        user: Name of the user.
        source: The user's entry in the recipe.
        image_format: Size and colours of images.
        remarks: Collects notes for the log.

    Raises:
        BrokenImagesError: Images are truncated or damaged; the error has those of all splits.
        DataError: A source is missing or unreadable.
    """
    where, key = f"user {user!r}", f"data.users.{user}"
    if source.path is not None:
        path = expand_home(source.path)
        if _is_npz_file(path, where):
            return dict(read_npz(path, where))
        path_by_split = find_splits(path, key)
        remarks.add_folder(user, path, path_by_split)
    else:
        path_by_split: dict[str, Path] = {}
        for split in SPLITS:
            path_in_recipe = getattr(source, split)
            if path_in_recipe is not None:
                path_by_split[split] = expand_home(path_in_recipe)

    broken: list[Path] = []
    samples_by_split: dict[str, Samples | Images] = {}
    for split, path in path_by_split.items():
        if _is_npz_file(path, where):
            samples_by_split[split] = read_npz(path, where)["train"]  # all samples of a file without splits
            continue
        key_of_split = key if len(path_by_split) == 1 else f"{key}.{split}"
        try:
            images = read_folder(path, image_format, key_of_split)
        except BrokenImagesError as error:  # read the other splits too, to name all broken files at once
            broken += error.files
            continue
        remarks.add_unread(user, images.unread)
        samples_by_split[split] = images
    if broken:
        raise BrokenImagesError(broken)
    return samples_by_split


def _is_npz_file(path: Path, where: str) -> bool:
    """Return whether a user's source is an .npz file; False for a folder.

    Raises:
        DataError: The path does not exist or is another kind of file.
    """
    if not path.exists():
        raise DataError(f"{where}: {path}: no such file or folder")
    if path.is_file() and path.suffix.lower() != ".npz":
        raise DataError(
            f"{where}: {path}: got a file with suffix {path.suffix!r}; allowed: an .npz file, or a folder with a "
            "subfolder of images for each class"
        )
    return path.is_file()


def read_npz(path: Path, where: str) -> dict[str, Samples]:
    """Return the samples of an npz file by split.

    Its arrays are ``inputs`` and ``targets``, or ``x`` and ``y``, all of split "train"; or ``x_train``, ``y_train``,
    ``x_test`` and so on.

    Args:
        path: Path of the file.
        where: Name of the user, for error messages.

    Raises:
        DataError: The file is not an npz file, or its arrays are missing or do not fit each other.
    """
    arrays = read_arrays(path)
    for inputs_name, targets_name in _ARRAY_NAMES:  # pairs such as "x" and "y"
        names_by_split = _array_names_by_split(arrays, inputs_name, targets_name)
        if "train" in names_by_split:
            samples_by_split: dict[str, Samples] = {}
            for split, (inputs, targets) in names_by_split.items():
                samples_by_split[split] = as_samples(arrays[inputs], arrays[targets], f"{where}: {path}")
            return samples_by_split
    found = list_names(arrays) or "nothing"
    raise DataError(
        f"{where}: {path}: found {found}; allowed: inputs and targets, or x and y (or x_train, y_train ...)"
    )


def _array_names_by_split(arrays: Collection[str], inputs_name: str, targets_name: str) -> dict[str, tuple[str, str]]:
    """Find the pairs of inputs and targets among the names of arrays, with or without splits.

    Args:
        arrays: Names of the arrays in a file.
        inputs_name: Name of inputs without a split, such as "x".
        targets_name: Name of targets without a split, such as "y".

    Returns:
        ``{"train": ("x", "y")}``, or ``{"train": ("x_train", "y_train"), "test": ("x_test", "y_test")}`` and possibly
        valid; empty if arrays are missing.
    """
    if inputs_name in arrays and targets_name in arrays:
        return {"train": (inputs_name, targets_name)}
    names_by_split: dict[str, tuple[str, str]] = {}
    for split, suffixes in _SPLIT_SUFFIXES.items():
        for suffix in suffixes:
            inputs, targets = f"{inputs_name}_{suffix}", f"{targets_name}_{suffix}"
            if inputs in arrays and targets in arrays:
                names_by_split[split] = (inputs, targets)
    if "train" in names_by_split and "test" in names_by_split:
        return names_by_split
    return {}


def collect_classes(
    classes_of_users: Iterable[tuple[str, Collection[str]]], recipe_classes: tuple[str, ...]
) -> tuple[tuple[str, ...], list[str]]:
    """Return the classes of all users, and notes on users that lack some and on names that may be misspelt.

    The classes are those in the recipe or, if it names none, all classes that a user has, sorted. The result is empty
    if no user has a class, as with arrays instead of images.

    Args:
        classes_of_users: Name and classes of each user.
        recipe_classes: Classes in the recipe; empty if it names none.

    Returns:
        The classes, and the notes.

    Raises:
        DataError: A user has a class that is not in the recipe.
    """
    # Bit masks, since there may be many users: with {"cat": 1, "dog": 2, "cow": 4}, a user with cat and cow has 5.
    bit_of_class = {label: 1 << number for number, label in enumerate(recipe_classes)}
    masks: dict[str, int] = {}  # by user
    for user, labels in classes_of_users:
        unknown = sorted(set(labels) - set(recipe_classes))
        if recipe_classes and unknown:
            allowed = list_names(recipe_classes)
            raise DataError(f"user {user!r}: got class {unknown[0]!r}; allowed: {allowed} (data.classes)")
        masks[user] = 0
        for label in set(labels):
            next_bit = 1 << len(bit_of_class)
            masks[user] |= bit_of_class.setdefault(label, next_bit)
    if not any(masks.values()):
        return (), []
    classes = recipe_classes or tuple(sorted(bit_of_class))
    all_bits = sum(bit_of_class.values())
    notes: list[str] = []
    incomplete_users = [user for user, mask in masks.items() if mask != all_bits]
    if incomplete_users:
        example = incomplete_users[0]
        missing = list_names(label for label in classes if not masks[example] & bit_of_class[label])
        advice = "" if recipe_classes else f"; to allow no others, set data.classes: [{list_names(classes)}]"
        notes.append(
            f"training goes on, and all users' models have an output for every class: {len(incomplete_users)} of "
            f"{len(masks)} users lack some of the {len(classes)} classes over all users ({list_names(classes)}), for "
            f"example {example!r} lacks {missing}{advice}"
        )
    if not recipe_classes:
        notes += _spelling_notes(classes, bit_of_class, masks)
    return classes, notes


def _spelling_notes(classes: Sequence[str], bit_of_class: Mapping[str, int], masks: Mapping[str, int]) -> list[str]:
    """Return notes on classes whose names differ only in case, and on classes of a single user.

    Both may be folders with misspelt names.

    Args:
        classes: Names of the classes.
        bit_of_class: A power of two for each class, such as ``{"cat": 1, "dog": 2, "cow": 4}``.
        masks: Sum of the bits of each user's classes, such as 5 for a user with cat and cow.
    """
    notes: list[str] = []
    classes_by_folded_name: dict[str, list[str]] = {}
    for label in classes:
        classes_by_folded_name.setdefault(label.casefold(), []).append(label)
    alike = [" and ".join(labels) for labels in classes_by_folded_name.values() if len(labels) > 1]
    if alike:
        notes.append(f"classes differ only in case: {list_names(alike)}; rename the folders if they mean the same")

    # Masks of the classes that at least one user has, and that at least two users have.
    seen_once, seen_twice = 0, 0
    for mask in masks.values():
        seen_twice |= seen_once & mask
        seen_once |= mask
    single = [label for label in classes if not seen_twice & bit_of_class[label]]  # classes of one user
    if len(masks) > 1 and single:
        listed: list[str] = []
        for label in single[:_LISTED]:
            only_user = next(user for user, mask in masks.items() if mask & bit_of_class[label])
            listed.append(f"{label} ({only_user!r})")
        more = f" and {len(single) - _LISTED} more" if len(single) > _LISTED else ""
        notes.append(f"classes of one user only: {', '.join(listed)}{more}; rename the folders if they are misspelt")
    return notes


_LISTED = 10
"""Largest number of classes of a single user in a note."""


def number_classes(
    section: SamplesSection, name: str, splits: Mapping[str, Samples | Images], class_names: Sequence[str]
) -> dict[str, Samples]:
    """Convert a user's images to tensors and their class names to numbers; leave samples as they are.

    Args:
        section: The recipe's section.
        name: Name of the user.
        splits: Samples or images by split.
        class_names: Names of the classes in the order of their numbers; empty if no user has images.

    Raises:
        DataError: Some users have images and others arrays, or image settings are given without images.
    """
    users_have_images = len(class_names) > 0
    has_samples = any(isinstance(data_of_split, Samples) for data_of_split in splits.values())
    if users_have_images and has_samples:
        raise DataError(
            f"user {name!r}: got an .npz file, but other users have folders of images; use one format for all"
        )
    if not users_have_images and (section.image_size is not None or section.grayscale):
        raise DataError("data.image_size and grayscale are for folders of images; the users have .npz files")
    return {split: _as_samples(data_of_split, class_names) for split, data_of_split in splits.items()}


def _as_samples(images: Samples | Images, class_names: Sequence[str]) -> Samples:
    """Return images as samples: inputs ``(n, channels, height, width)`` in [0, 1], classes as numbers.

    Args:
        images: Images; samples are returned unchanged.
        class_names: Names of the classes in the order of their numbers.
    """
    if isinstance(images, Samples):
        return images
    number_of_class = {class_name: number for number, class_name in enumerate(class_names)}
    class_numbers = np.array([number_of_class[label] for label in images.labels], dtype=np.int64)
    return Samples(inputs=pixels_as_inputs(images.pixels), targets=torch.from_numpy(class_numbers))


def pixels_as_inputs(pixels: UInt8[Tensor, "n h w c"]) -> Float[Tensor, "n c h w"]:
    """Return images as inputs of a net, in [0, 1]."""
    return pixels.permute(0, 3, 1, 2).contiguous().float() / 255


class SamplesReader(StreamingReader[UserSamples, UserSamples]):
    """Reader of users' samples; the first user's targets determine whether targets are classes or real numbers."""

    def __init__(
        self,
        data: SamplesSection,
        seed: int,
        *,
        given: Mapping[str, object] | None = None,
        net: MakeNet | None = None,
        loss: str | LossFunction | None = None,
    ):
        """Initialise the reader.

        Args:
            data: The section ``data`` of the recipe.
            seed: Seed of the splits.
            given: Samples by user, if a program passes them.
            net: Function that creates the net, instead of the default net.
            loss: Loss instead of the recipe's.

        Raises:
            RecipeError: A program passes samples, and the recipe has settings for folders of images.
        """
        super().__init__(data, seed)
        self.section = data
        if given is not None and (data.image_size is not None or data.grayscale):
            raise RecipeError("data.image_size and grayscale are for folders of images; scale the images that you pass")
        self.given, self.net = given, net
        self._split_options = {"valid": data.split.valid, "test": data.split.test, "seed": seed}
        self._remarks = Remarks()
        self.labels: tuple[str, ...] = ()
        self._class_notes: list[str] = []

        self._chosen_loss = loss or data.loss  # None for the default loss
        self._losses: dict[bool, Loss] = {}
        """Loss for whole-number targets (True) and for real targets (False), as far as needed so far."""
        self._targets_are_whole = False
        self._first_user: UserSamples | None = None
        self._first_user_as_read: UserSamples | None = None
        """First user before :meth:`encode`, which may convert whole targets to real numbers."""

        self._num_classes = 0
        """Largest class number of all users, plus 1."""
        self._train_classes: set[int] = set()
        """Classes of train samples; if there are many, a few of them, at least two."""
        self._users_with_unseen_classes = FirstUsers()
        """Users whose held-out samples have classes that their train samples lack."""

    def sources(self) -> list[str]:
        """Return the files and folders of all users, whose changes make a cache of the encoded users invalid."""
        users = self.section.users or {}
        return [path for source in users.values() for path in _paths_of(source)]

    def read(self, rows: Rows) -> Generator[UserSamples, None, None]:
        """Yield users' samples in splits, by the recipe's fractions where users have no splits.

        The classes are collected from the folders of all users first, so that all users number them alike.

        Args:
            rows: Not used, as no file has rows of several users.
        """
        if self.given is not None:
            for name, data in self.given.items():
                yield read_given(name, data, **self._split_options)
            return
        users = self.section.users or {}
        image_format = image_format_of(self.section)
        classes_of_users = ((name, _classes_in(name, source)) for name, source in users.items())
        self.labels, self._class_notes = collect_classes(classes_of_users, self.section.labels)
        broken: list[Path] = []
        for name, source in users.items():
            try:
                samples_or_images = read_source(name, source, image_format, self._remarks)
            except BrokenImagesError as error:  # read the other users too, to name all broken files at once
                broken += error.files
                continue
            if broken:  # the samples are not needed: an error will be raised
                continue
            samples_by_split = number_classes(self.section, name, samples_or_images, self.labels)
            yield split_samples(name, samples_by_split, **self._split_options)
        if broken:
            raise BrokenImagesError(broken)

    def encode(self, unencoded: UserSamples) -> UserSamples:
        """Return the user with targets of the type that the loss needs: class numbers (int64), or real numbers.

        Users are encoded one after another, and the first one decides the type: if its targets are whole numbers, those
        of all others must be too.

        Args:
            unencoded: The user's samples as read.

        Raises:
            DataError: The targets are real numbers, but those of the first user were whole numbers. The opposite is
                found later, when all users are checked.
        """
        user = unencoded
        is_first = self._first_user is None
        if is_first:
            self._targets_are_whole = _has_whole_targets(user)
            self._first_user_as_read = user
        elif self._targets_are_whole and not _has_whole_targets(user):
            # Let `check` raise the error. The task counts as a regression now, whose default loss is MSE and whose
            # `_class_limit` is None, so the error is about the whole numbers of the first user.
            self._targets_are_whole = False
            assert self._first_user_as_read is not None
            check([self._first_user_as_read, user], classes=self._class_limit)
        if self._targets_are_whole and not self.loss.classes:  # a regression on whole numbers
            user = with_real_targets(user)
        if is_first:
            self._first_user = user
        if self.loss.classes and self._targets_are_whole:
            self._count_classes(user)
        return user

    def _count_classes(self, user: UserSamples) -> None:
        """Record the classes of a user, whose targets are class numbers, for :meth:`summary`."""
        for samples_of_split in (user.train, user.valid, user.test):
            if len(samples_of_split):
                largest_class = int(samples_of_split.targets.max())
                self._num_classes = max(self._num_classes, largest_class + 1)
        if len(self._train_classes) < 2:  # two classes are enough to know that there is more than one
            self._train_classes.update(user.train.targets.unique()[:2].tolist())
        unseen_classes = unseen_labels(user)  # in valid or test, but not in train
        if unseen_classes:
            self._users_with_unseen_classes.add(user.name, unseen_classes)

    @property
    def loss(self) -> Loss:
        """Loss of the program or recipe; by default cross-entropy if all targets are whole numbers, else MSE.

        It may change while users are read, since only then it is known whether all targets are whole numbers.
        """
        are_whole = self._targets_are_whole
        if are_whole not in self._losses:
            if self._chosen_loss is not None:
                loss = find_loss(self._chosen_loss, classes=are_whole)
            else:
                loss = CROSS_ENTROPY if are_whole else MSE
            self._losses[are_whole] = loss
        return self._losses[are_whole]

    @property
    def _class_limit(self) -> int | None:
        """Upper bound of the class numbers, for :func:`check`; None for a regression, which has no classes.

        It is the number of classes if the recipe or the folders of images give it. Otherwise the number follows only
        when all samples have been read, so until then any class number is allowed (2**62).
        """
        if not self.loss.classes:
            return None
        return len(self.labels) or self.section.outputs or 2**62

    def inspect(self, unencoded: UserSamples, user: UserSamples) -> None:
        """Check a user's samples and, for users after the first, that they fit those of the first user.

        Args:
            unencoded: The samples as read, which are not needed.
            user: The samples after :meth:`encode`, which sets the first user.
        """
        assert self._first_user is not None
        if user is self._first_user:
            check([user], classes=self._class_limit)
        else:
            check([self._first_user, user], classes=self._class_limit)

    def summary(self) -> tuple[dict[str, Any], list[str]]:
        """Return what the users have in common, and warnings about classes that users lack or do not train on.

        Returns:
            The shape of an input, the number of outputs, whether targets are whole numbers, and the names of the
            classes, for :meth:`common`; and the warnings.

        Raises:
            DataError: There are no users, or all samples have the same class.
        """
        if self._first_user is None:
            raise DataError("no users; at least one is needed")
        train = self._first_user.train
        if self.loss.classes:
            # By folders of images or by the recipe (`section.outputs`); else the largest class number plus 1.
            num_named_classes = max(len(self.labels), self.section.outputs or 0)
            num_outputs = num_named_classes or max(1, self._num_classes)
        else:  # the length of a target
            num_outputs = train.targets.shape[-1]
        warnings = [*self._remarks.lines, *self._class_notes]
        if self.loss.classes and self._targets_are_whole:
            warnings += check_classes(self._train_classes, num_outputs, self.section.outputs, self.labels)
        unseen = self._users_with_unseen_classes
        if unseen.count > 0:
            warnings.append(describe_unseen(unseen.first, unseen.count, self.num_users))
        facts = {
            "shape": list(train.inputs.shape[1:]),
            "outputs": num_outputs,
            "whole": self._targets_are_whole,
            "labels": list(self.labels),
        }
        return facts, warnings

    def common(self, users: Sequence[UserSamples], facts: Mapping[str, Any]) -> Population:
        """Return the users with the task that they share: loss, net, and shapes of inputs and outputs.

        Args:
            users: The users.
            facts: Facts about all users, from :meth:`summary` or from the cache: ``shape`` of an input, number of
                ``outputs``, ``whole`` (whether targets are whole numbers) and ``labels`` (names of the classes).
        """
        shape = tuple(facts["shape"])
        self._targets_are_whole = facts["whole"]  # users from the cache were not read here; `loss` depends on it
        net = default_net(shape) if self.net is None else self.net
        return Population(
            users=as_users(users),
            loss=self.loss,
            classes=facts["outputs"],
            input_shape=shape,
            net=net,
            labels=tuple(facts["labels"]),
        )


def _has_whole_targets(user: UserSamples) -> bool:
    """Return whether a user's train and test targets are whole numbers, which may be classes."""
    return not any(part.targets.is_floating_point() for part in (user.train, user.test))


def _paths_of(source: SampleSource) -> list[str]:
    """Return a user's files and folders in the recipe."""
    return [path for path in (source.path, source.train, source.valid, source.test) if path is not None]


def _classes_in(user: str, source: SampleSource) -> set[str]:
    """Return a user's classes from folder names; skip missing folders, for which reading raises an error later."""
    classes: set[str] = set()
    for folder in map(expand_home, _paths_of(source)):
        if not folder.is_dir():
            continue
        split_folders = [folder]
        if source.path is not None:  # one folder, which may have a subfolder for each split
            split_folders = list(find_splits(folder, f"data.users.{user}").values())
        for split_folder in split_folders:
            classes.update(class_folder.name for class_folder in class_folders(split_folder))
    return classes


def default_net(shape: Sequence[int]) -> str:
    """Return the name of the default net for inputs of a shape: "cnn" for images from 4 x 4 pixels on, else "mlp"."""
    is_image = len(shape) == 3 and min(shape[1:]) >= 4
    return "cnn" if is_image else "mlp"


def check_classes(
    train_classes: Collection[int], num_outputs: int, num_recipe_classes: int | None, labels: Sequence[str]
) -> list[str]:
    """Check that there is more than one class; return a warning if the train samples have a single one.

    With a single class, any net is always right. The cause is often a given folder that is one level too high.

    Args:
        train_classes: Classes of the train samples of all users here, as numbers from 0. If there are many, any two of
            them are enough.
        num_outputs: Number of classes that the net distinguishes.
        num_recipe_classes: Number of classes in the recipe; None if it has none. With a number, there is no warning, as
            other users of a federation may have the other classes.
        labels: Names of the classes; empty if they have none.

    Returns:
        The warning, as a list of zero or one lines.

    Raises:
        DataError: There is only one class.
    """
    name = f" ({labels[min(train_classes)]})" if labels else ""
    has_only_class_0 = not any(train_classes)  # no number above 0
    if num_outputs == 1 and has_only_class_0:
        raise DataError(
            f"samples: only one class{name}, so there is nothing to learn; give samples of two or more classes, or set "
            "data.classes if other users have more"
        )
    may_be_mistake = num_outputs > 1 and num_recipe_classes is None
    if len(train_classes) == 1 and may_be_mistake:
        (only_class,) = train_classes
        return [f"all train samples have class {only_class}{name}, so any net learns to predict only this class"]
    return []


def with_real_targets(user: UserSamples) -> UserSamples:
    """Return the user with whole-number targets as real numbers of shape ``(n, 1)``, for a regression."""

    def with_real(samples: Samples) -> Samples:
        return Samples(inputs=samples.inputs, targets=samples.targets.float().reshape(-1, 1))

    return replace(user, train=with_real(user.train), valid=with_real(user.valid), test=with_real(user.test))
