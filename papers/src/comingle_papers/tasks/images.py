"""Labelled images from IDX, npz and parquet files and from the hub, and the users who hold them.

Every setting of FedMerge (section 4.1) is groups of images, each dealt out to a number of consecutive users:

    personal   all images are one group; each label's are parted by shares drawn from Dir(alpha) (Hsu et al. 2019)
    cluster    a group is the images of some labels; 50 users in 5 clusters are 6, 5, 8, 13 and 18
    domain     a group is the images of one domain

Dirichlet shares come from the partitioner of ``flwr-datasets``, which is needed for them alone.

Files of a folder are found by name, for a data set NAME and each split:

    IDX   NAME-train-images-ubyte and NAME-train-labels-ubyte, or the original train-images-idx3-ubyte,
          t10k-labels-idx1-ubyte and so on, plain or compressed by .gz or .xz
    npz   NAME-train.npz and NAME-test.npz, or NAME.npz with x_train, y_train, x_test and y_test

A data set in domains has no splits: NAME.npz, or NAME with the length of its images' sides, as pacs32.npz.
"""

from __future__ import annotations

import io
import math
import struct
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from comingle.data.files import OPENERS, UNREADABLE, open_bytes
from comingle.data.row_files import Table, describe_cause
from comingle.data.samples.samples import UserSamples, find_unseen, hold_out, list_labels, read_arrays, select_samples
from comingle.data.tables import iterate_batches, open_splits
from comingle.utils.errors import DataError, RecipeError, list_names
from comingle.utils.names import HUB_PREFIX
from comingle.utils.records import expand_home
from comingle.utils.seeds import derive, generator


def hold_out_valid(user: UserSamples, share: float) -> UserSamples:
    """Move a share of a user's train samples to its validation split; the same share of each label.

    Args:
        user: The user with its data.
        share: Share of the train samples; 0 changes nothing.

    Raises:
        DataError: The share is above 0 and no sample can be spared.
    """
    if share <= 0:
        return user
    targets = user.train.targets
    is_regression = targets.is_floating_point()
    labels = torch.zeros(len(targets), dtype=torch.int64) if is_regression else targets.long()
    kept, held_out = hold_out(labels, share)
    if not len(held_out):
        got = f"{len(targets)} train samples of {len(labels.unique())} labels"
        raise DataError(
            f"user {user.name!r}: valid={share} of {got}: no sample can be held out; allowed: 0, or more samples"
        )
    return replace(user, train=select_samples(user.train, kept), valid=select_samples(user.train, held_out))


def check_labels(users: Sequence[UserSamples]) -> None:
    """Check that each user's train samples have every label of its valid and test samples, so that it can learn them.

    Raises:
        DataError: A user lacks a label in its train samples.
    """
    for user in users:
        for split, samples in (("valid", user.valid), ("test", user.test)):
            unseen_labels = find_unseen(user, samples)
            if unseen_labels:
                raise DataError(
                    f"user {user.name!r}: {split} holds labels that train does not: {list_labels(unseen_labels)}; "
                    "allowed: those of train"
                )


Key = tuple[str | int, ...]

_PUBLISHED_SIZES = (6, 5, 8, 13, 18)
"""Users per cluster in FedMerge, of 50 users."""
_ATTEMPTS = 20
"""Seeds that are tried; for each the partitioner draws up to eleven times."""
_MIN_SAMPLES = 4
"""Smallest number of samples of a user: one for testing, one for validation, two for training, as batch norm needs."""
_FAR_BELOW_AVERAGE = 20
"""Ratio of the average number of samples to the smallest number that a partition must give a user."""


def cluster_sizes(users: int, clusters: int) -> list[int]:
    """Return each cluster's number of users: in FedMerge's proportions for five clusters, else as equal as possible.

    Each cluster first gets one user. The remaining users are distributed to meet the proportions: numbers are rounded
    down, and the clusters with the largest remainders get one more user.

    Args:
        users: Number of users, at least one per cluster.
        clusters: Number of clusters.
    """
    has_published_number = clusters == len(_PUBLISHED_SIZES)
    proportions = _PUBLISHED_SIZES if has_published_number else (1,) * clusters
    num_remaining = users - clusters
    # Users that a cluster should have beyond its first, before these numbers are scaled to add up to ``num_remaining``.
    wanted = [max(0.0, users * proportion / sum(proportions) - 1) for proportion in proportions]
    wanted_sum = sum(wanted) or 1  # the sum is 0 if every cluster has one user
    exact = [num_remaining * number / wanted_sum for number in wanted]
    rounded = [int(number) for number in exact]
    num_unassigned = num_remaining - sum(rounded)
    by_remainder = sorted(range(clusters), key=lambda cluster: rounded[cluster] - exact[cluster])  # largest first
    for cluster in by_remainder[:num_unassigned]:
        rounded[cluster] += 1
    return [1 + number for number in rounded]


def choose_labels(classes: int, clusters: int, per_cluster: int | None, key: Key) -> list[list[int]]:
    """Draw each cluster's labels, so that each label is in at least one cluster.

    Each cluster takes the labels that the fewest clusters have so far.

    Args:
        classes: Number of labels.
        clusters: Number of clusters.
        per_cluster: Number of labels of each cluster; clusters share labels if there are too few. None puts every
            label into exactly one cluster.
        key: Key of the random stream: the name of the task, also for error messages, and the seed.

    Raises:
        RecipeError: There are more clusters than labels, or ``per_cluster`` leaves labels out or exceeds their number.
    """
    where = f"task {key[0]!r}"
    if clusters > classes:
        raise RecipeError(f"{where}: clusters={clusters}; allowed: 1 to {classes}, the number of labels")
    min_per_cluster = math.ceil(classes / clusters)
    if per_cluster is not None and not min_per_cluster <= per_cluster <= classes:
        allowed = f"{min_per_cluster}, so that every label is used, to {classes}, all labels"
        raise RecipeError(f"{where}: labels_per_cluster={per_cluster}; allowed: {allowed}")
    order = torch.randperm(classes, generator=generator(*key, "labels"))
    if per_cluster is None:
        return [sorted(part.tolist()) for part in order.tensor_split(clusters)]
    num_clusters_of_label = torch.zeros(classes, dtype=torch.int64)
    labels_of_clusters = []
    for cluster in range(clusters):
        shuffled = torch.randperm(classes, generator=generator(*key, "labels", cluster))
        by_use = num_clusters_of_label[shuffled].argsort(stable=True)  # labels of equal use stay in random order
        least_used = shuffled[by_use[:per_cluster]]
        num_clusters_of_label[least_used] += 1
        labels_of_clusters.append(sorted(least_used.tolist()))
    return labels_of_clusters


def group_by_labels(
    labels: Int64[Tensor, " n"], labels_of_clusters: Sequence[Sequence[int]], users_per_cluster: Sequence[int], key: Key
) -> list[Int64[Tensor, " _"]]:
    """Return the indices of each cluster's images: the images whose labels the cluster has.

    Clusters that have a label in common get disjoint parts of its images, in proportion to their numbers of users.

    Args:
        labels: The label of each image.
        labels_of_clusters: The labels of each cluster.
        users_per_cluster: The number of users of each cluster.
        key: Key of the random stream.
    """
    parts_of_clusters: list[list[Tensor]] = [[] for _ in labels_of_clusters]
    largest_label = max(max(cluster_labels) for cluster_labels in labels_of_clusters)
    for label in range(largest_label + 1):
        clusters = [cluster for cluster, its_labels in enumerate(labels_of_clusters) if label in its_labels]
        images_of_label = _shuffle((labels == label).nonzero().flatten(), *key, "label", label)
        num_users = torch.tensor([float(users_per_cluster[cluster]) for cluster in clusters], dtype=torch.float64)
        ends = (num_users.cumsum(0) / num_users.sum() * len(images_of_label)).round().long()
        borders = ends[:-1]  # between the parts
        for cluster, part in zip(clusters, images_of_label.tensor_split(borders), strict=True):
            parts_of_clusters[cluster].append(part)
    return [torch.cat(parts) for parts in parts_of_clusters]


def deal_images(
    groups: Sequence[Int64[Tensor, " _"]],
    users_per_group: Sequence[int],
    labels: Int64[Tensor, " n"],
    *,
    alpha: float | None,
    key: Key,
    names: Sequence[str] = (),
) -> list[Int64[Tensor, " _"]]:
    """Deal each group's images out to its users; return the indices of each user's images, in random order.

    Args:
        groups: The indices of each group's images.
        users_per_group: The number of users of each group.
        labels: The label of each image.
        alpha: Concentration of the Dirichlet shares of each label; None deals evenly.
        key: Key of the random stream: the name of the task, also for error messages, and the seed.
        names: Names of the groups for error messages; empty if there is a single group.

    Raises:
        DataError: A user gets no image, or Dirichlet shares cannot be drawn.
    """
    images_of_users: list[Tensor] = []
    for number, (group, num_users) in enumerate(zip(groups, users_per_group, strict=True)):
        shuffled_group = _shuffle(group, *key, "group", number)
        where = f"task {key[0]!r}"
        if names:
            where += f", {names[number]}"
        if len(shuffled_group) < num_users:
            got = f"{len(shuffled_group)} images for {num_users} user{'s' * (num_users > 1)}"
            raise DataError(f"{where}: {got}; allowed: at least one per user: more images, or fewer users")
        if alpha is None or num_users == 1:
            images_of_users += shuffled_group.tensor_split(num_users)
        else:
            labels_of_group = labels[shuffled_group]
            parts = draw_dirichlet(labels_of_group, num_users, alpha=alpha, key=(*key, number), where=where)
            images_of_users += [shuffled_group[part] for part in parts]
    return images_of_users


def _shuffle(indices: Int64[Tensor, " n"], *key: str | int) -> Int64[Tensor, " n"]:
    """Return indices in random order, from the random stream of a key."""
    return indices[torch.randperm(len(indices), generator=generator(*key))]


def draw_dirichlet(
    labels: Int64[Tensor, " n"], users: int, *, alpha: float, key: Key, where: str = ""
) -> list[Int64[Tensor, " _"]]:
    """Partition each label's samples among users by shares drawn from Dir(alpha), in random order for each user.

    As in FedMerge's public code, a user that has the average number of samples gets no more, and the whole draw is
    repeated until each user has enough samples: one for each label, but no more than a twentieth of the average, and at
    least four.

    Args:
        labels: The label of each sample.
        users: Number of users.
        alpha: Concentration of the Dirichlet distribution.
        key: Key of the random stream, which begins with the name of the task.
        where: Name of the data, for error messages; empty for the name of the task.

    Returns:
        The indices of each user's samples.

    Raises:
        DataError: ``flwr-datasets`` is missing, or no draw of about two hundred gave each user enough samples.
    """
    partitioners = _import_partitioners()
    num_samples, num_labels = len(labels), len(labels.unique())
    columns = {"label": labels.tolist(), "row": list(range(num_samples))}
    twentieth_of_average = num_samples // (_FAR_BELOW_AVERAGE * users)
    min_samples = max(_MIN_SAMPLES, min(num_labels, twentieth_of_average))
    for attempt in range(_ATTEMPTS):
        partitioner = partitioners.DirichletPartitioner(
            num_partitions=users,
            partition_by="label",
            alpha=float(alpha),
            min_partition_size=min_samples,
            self_balancing=True,
            seed=derive(*key, "dirichlet", attempt),
        )
        partitioner.dataset = import_module("datasets").Dataset.from_dict(columns)
        parts = _load_partitions(partitioner, users)
        # With a tiny alpha all shares may be 0; the partitioner's result then lacks or repeats samples.
        has_each_sample_once = torch.equal(torch.cat(parts).sort().values, torch.arange(num_samples))
        if has_each_sample_once:
            return parts
    got = f"no draw of alpha={alpha} gives each of {users} users {min_samples} of {num_samples} images"
    raise DataError(f"{where or f'task {key[0]!r}'}: {got}; allowed: fewer users, a larger alpha or more images")


def _load_partitions(partitioner: Any, users: int) -> list[Int64[Tensor, " _"]]:
    """Return the indices of each user's samples, as drawn by a partitioner; a single empty tensor if the draw fails.

    The partitioner gives up after eleven draws in which a user got too few samples. The caller notices that samples are
    missing, and draws again with another seed.

    Args:
        partitioner: A partitioner of ``flwr-datasets`` with its data.
        users: Number of users.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of each repeated draw
            # ``[:]`` reads a column as a list.
            rows_of_users = [partitioner.load_partition(user)["row"][:] for user in range(users)]
    except ValueError:
        return [torch.arange(0)]
    return [torch.tensor(rows, dtype=torch.int64) for rows in rows_of_users]


def _import_partitioners() -> ModuleType:
    """Import the partitioners of ``flwr-datasets``.

    Raises:
        DataError: The package is missing.
    """
    try:
        return import_module("flwr_datasets.partitioner")
    except ImportError as error:
        raise DataError(
            "splitting labels by Dirichlet shares (alpha) needs the package flwr-datasets: "
            "pip install 'comingle-papers[flower]'"
        ) from error


def iterate_values(source: str, columns: Sequence[Sequence[str]], *, split: str) -> Iterator[tuple[object, ...]]:
    """Yield the decoded rows of one split of a data set, one value per column; an image is a ``PIL.Image``.

    Args:
        source: A data set as ``hub:NAME?config=C``.
        columns: For each column its possible names, such as ``("label", "fine_label")``; the first that the data set
            has is read.
        split: The split to read.

    Raises:
        DataError: The source or split is unknown, a column has none of its names, or rows cannot be read.
    """
    with open_splits(source, decoded=True) as splits:
        for found_split, rows in splits:
            if found_split != split:
                continue
            assert not isinstance(rows, Table)  # with ``decoded`` rows are a data set, never a table
            names = _choose_columns(rows.column_names, columns, source)
            for batch in iterate_batches(rows.select_columns(names), source):
                yield from zip(*(batch[name] for name in names), strict=True)
            return
        split_names = list_names(found_split for found_split, _ in splits)
        raise DataError(f"{source}: no split {split!r}; found: {split_names}")


def _choose_columns(existing: Sequence[str], wanted: Sequence[Sequence[str]], where: str) -> list[str]:
    """Return the name of each wanted column: the first of its possible names that the data set has.

    Args:
        existing: Names of the columns of the data set.
        wanted: For each column its possible names, such as ``("label", "fine_label")``.
        where: Name of the data, for error messages.

    Raises:
        DataError: The data set has none of a column's names.
    """
    chosen: list[str] = []
    for possible_names in wanted:
        found = [name for name in possible_names if name in existing]
        if not found:
            raise DataError(f"{where}: no column {' or '.join(possible_names)}; found: {list_names(existing)}")
        chosen.append(found[0])
    return chosen


_IDX_BYTES = 0x08
"""Code of unsigned bytes in the header of an IDX file."""


def read_idx(path: Path) -> UInt8[Tensor, "*shape"]:
    """Read an IDX file of unsigned bytes, the format of MNIST's original files.

    The file consists of two zero bytes, a byte for the type, one for the number of axes, the axes' lengths as
    big-endian uint32, and the values.

    Raises:
        DataError: The file is missing, is not an IDX file of bytes, or has more or fewer values than its lengths say.
    """
    content = _read_bytes(path)
    if len(content) < 4 or content[:2] != b"\0\0":
        raise DataError(f"{path}: not an IDX file; it should begin with two zero bytes")
    value_type, num_axes = content[2], content[3]
    if value_type != _IDX_BYTES:
        raise DataError(f"{path}: IDX values of type 0x{value_type:02x}; allowed: 0x{_IDX_BYTES:02x}, unsigned bytes")
    header_bytes = 4 + 4 * num_axes
    if len(content) < header_bytes:
        raise DataError(f"{path}: truncated within its header of {header_bytes} bytes, got {len(content)}")
    shape = struct.unpack(f">{num_axes}I", content[4:header_bytes])  # big-endian uint32
    values = np.frombuffer(content, np.uint8, offset=header_bytes)
    if len(values) != np.prod(shape, dtype=np.int64):
        expected = " x ".join(map(str, shape))
        raise DataError(f"{path}: {len(values)} values, but its header says {expected}; truncated or damaged")
    return torch.from_numpy(values.reshape(shape).copy())


def _read_bytes(path: Path) -> bytes:
    """Return the content of a file, decompressed where its name ends in .gz or .xz.

    Raises:
        DataError: The file is missing or cannot be read.
    """
    try:
        with open_bytes(path) as file:
            return file.read()
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except UNREADABLE as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def decode_jpegs(jpeg: np.ndarray, offset: np.ndarray, path: Path) -> np.ndarray:
    """Decode JPEG images of one size from concatenated bytes: image i is ``jpeg[offset[i]:offset[i + 1]]``.

    Args:
        jpeg: The bytes of all images.
        offset: The n + 1 positions of the images.
        path: The file, for error messages.

    Raises:
        DataError: Offsets do not fit the bytes, an image is damaged, sizes differ, or Pillow is missing.
    """
    is_valid = (
        offset.ndim == 1
        and offset.dtype.kind in "iu"
        and len(offset) >= 2
        and int(offset[-1]) == len(jpeg)
        and bool((np.diff(offset.astype(int)) >= 0).all())
    )
    if not is_valid:
        raise DataError(f"{path}: offset should rise from 0 to {len(jpeg)}, the length of jpeg; truncated or damaged")
    pillow = _import_pillow(path)
    content = jpeg.tobytes()
    starts, ends = offset[:-1].tolist(), offset[1:].tolist()
    try:
        images = [_open_image(pillow, content[start:end]) for start, end in zip(starts, ends, strict=True)]
    except Exception as error:  # Pillow's readers raise errors of many types
        raise DataError(f"{path}: a damaged JPEG image: {describe_cause(error)}") from error
    return stack_images(images, str(path))


def _import_pillow(path: Path) -> ModuleType:
    """Import Pillow's module ``Image``.

    Raises:
        DataError: Pillow is not installed; the message names the file to read.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(f"{path}: reading images needs the package pillow: pip install 'comingle[data]'") from error
    return Image


def _open_image(pillow: ModuleType, content: bytes) -> np.ndarray:
    """Decode an image from the bytes of its file."""
    with pillow.open(io.BytesIO(content)) as image:
        return np.asarray(image)


def shrink_to_square(image: Any, largest: int) -> Any:
    """Resize a Pillow image to a square (Lanczos) if one of its sides is longer than ``largest``."""
    from PIL import Image

    if max(image.size) <= largest:
        return image
    return image.resize((largest, largest), Image.Resampling.LANCZOS)


def stack_images(images: Sequence[np.ndarray], where: str) -> np.ndarray:
    """Stack images along a new first axis.

    Args:
        images: The images as arrays.
        where: Name of their source, for error messages.

    Raises:
        DataError: There is no image, or sizes or modes differ.
    """
    shapes = dict.fromkeys(image.shape for image in images)
    if len(shapes) != 1:
        got = list_names(" x ".join(map(str, shape)) for shape in shapes) or "none"
        raise DataError(f"{where}: images must be of one size and mode, got {got}")
    return np.stack(images)


_SPLITS = {"train": "train", "test": "t10k"}
"""Splits, with their names in MNIST's original files."""
# Usual names of the arrays and columns; the first that exists is read. CIFAR-100 has fine and coarse labels.
_IMAGE_KEYS = ("images", "image", "img", "x", "data")
_LABEL_KEYS = ("labels", "label", "fine_label", "y")
_DOMAIN_KEYS = ("domain",)
_DOMAIN_IMAGE_SIDES = ("", "32", "64", "128", "224", "227")
"""Lengths of sides that may follow a data set's name in its file name."""


@dataclass(frozen=True, kw_only=True)
class Images:
    """Grey images ``(n, h, w)`` or colour images ``(n, c, h, w)`` with their labels.

    ``domains`` are indices into ``domain_names``, where the data set has domains.
    """

    pixels: UInt8[Tensor, "n h w"] | UInt8[Tensor, "n c h w"]
    labels: Int64[Tensor, " n"]
    domains: Int64[Tensor, " n"] | None = None
    domain_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.pixels)

    def as_floats(self, indices: Int64[Tensor, " m"]) -> Float[Tensor, "m c h w"]:
        """Return the images at these indices with values from 0 to 1; grey images get one channel."""
        images = self.pixels[indices].float() / 255
        is_grey = images.dim() == 3
        return images[:, None] if is_grey else images


def check_images(images: Images, *, classes: int, coloured: bool, where: str) -> None:
    """Check that images have the task's channels and labels.

    Args:
        images: The images.
        classes: Number of labels.
        coloured: Whether images must have three channels.
        where: Name of the data, for error messages.

    Raises:
        DataError: Channels or labels differ.
    """
    shape = tuple(images.pixels.shape)
    if coloured:
        has_right_channels = len(shape) == 4 and shape[1] == 3
        allowed = "3 channels, as (n, 3, height, width)"
    else:
        has_right_channels = len(shape) == 3
        allowed = "grey ones, as (n, height, width)"
    if not has_right_channels:
        raise DataError(f"{where} have shape {shape}; allowed: {allowed}")
    if len(images) == 0:
        return
    low, high = int(images.labels.min()), int(images.labels.max())
    if low < 0 or high >= classes:
        raise DataError(f"{where} have labels from {low} to {high}; allowed: 0 to {classes - 1}")


def read_images(name: str, source: str | Path) -> dict[str, Images]:
    """Read the splits "train" and "test" of a data set from a folder or from ``hub:OWNER/NAME``.

    Args:
        name: The data set, as in file names.
        source: The folder, or the name on the hub.

    Raises:
        DataError: A folder, file or split is missing, or a file has another format than its name says.
    """
    if str(source).startswith(HUB_PREFIX):
        return {split: read_hub(str(source), split) for split in _SPLITS}
    folder = expand_home(source)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; it should contain the images of {name}")
    return {split: _read_split(folder, name, split) for split in _SPLITS}


def read_domains(name: str, source: str | Path, *, largest: int) -> Images:
    """Read all images of a data set with domains, from a folder or the split "train" of ``hub:OWNER/NAME``.

    Args:
        name: Name of the data set.
        source: The folder, or the name on the hub.
        largest: Longest side of an image in pixels. Larger images of the hub are resized to squares of this size
            (Lanczos); those of a folder are not.

    Raises:
        DataError: A folder or file is missing or has another format than its name says, or images have no domains.
    """
    if str(source).startswith(HUB_PREFIX):
        return read_hub(str(source), "train", largest=largest, domains=True)
    folder = expand_home(source)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; it should contain the images of {name}")
    path = _find_domain_file(folder, name)
    if path is None:
        possible_names = ", ".join(f"{name}{side}.npz" for side in _DOMAIN_IMAGE_SIDES)
        raise DataError(f"{folder}: no images of {name}; looked for {possible_names}")
    images = read_npz(path)
    if images.domains is None:
        raise DataError(
            f"{path}: got no array 'domain'; add it, with a number or a name for each image; an optional array "
            "'domains' has the names of the numbers"
        )
    return images


def _first_file(paths: Sequence[Path]) -> Path | None:
    """Return the first path that is a file; None if there is none."""
    for path in paths:
        if path.is_file():
            return path
    return None


def _find_domain_file(folder: Path, name: str) -> Path | None:
    """Return the npz file of a data set with domains, such as ``pacs.npz`` or ``pacs32.npz``; None if there is none."""
    return _first_file([folder / f"{name}{side}.npz" for side in _DOMAIN_IMAGE_SIDES])


def has_images(name: str, folder: Path) -> bool:
    """Return whether the folder holds files of this data set under a name that the readers look for."""
    if _find_domain_file(folder, name):
        return True
    return all(_find_idx(folder, name, split, "images") or _find_npz(folder, name, split) for split in _SPLITS)


def _read_split(folder: Path, name: str, split: str) -> Images:
    """Read one split of a data set from a folder: IDX files if there are any, else npz.

    Args:
        folder: Path of the folder.
        name: Name of the data set.
        split: "train" or "test".

    Raises:
        DataError: Files are missing or damaged.
    """
    idx_images = _find_idx(folder, name, split, "images")
    idx_labels = _find_idx(folder, name, split, "labels")
    if idx_images and idx_labels:
        return read_idx_pair(idx_images, idx_labels)
    if idx_images:
        labels_name = _idx_stems(name, split, "labels")[0]
        raise DataError(f"{idx_images}: no labels beside it; looked for {labels_name}[.gz|.xz]")
    npz = _find_npz(folder, name, split)
    if npz is None:
        images_name = _idx_stems(name, split, "images")[0]
        looked_for = f"{images_name}[.gz|.xz], {name}-{split}.npz or {name}.npz"
        raise DataError(f"{folder}: no {split} images of {name}; looked for {looked_for}")
    return read_npz(npz, split=split)


def _find_idx(folder: Path, name: str, split: str, kind: str) -> Path | None:
    """Return the IDX file of a split's images or labels, plain or compressed; None if there is none.

    Args:
        folder: Path of the folder.
        name: Name of the data set.
        split: "train" or "test".
        kind: "images" or "labels".
    """
    stems = _idx_stems(name, split, kind)
    return _first_file([folder / f"{stem}{suffix}" for stem in stems for suffix in OPENERS])


def _idx_stems(name: str, split: str, kind: str) -> list[str]:
    """Return the possible names of an IDX file, without ``.gz`` or ``.xz``.

    MNIST's train images are in ``mnist-train-images-ubyte``, or in the original ``train-images-idx3-ubyte``. Some
    copies of the original have a dot instead of the second hyphen.

    Args:
        name: Name of the data set.
        split: "train" or "test".
        kind: "images" or "labels".
    """
    stems = [f"{name}-{split}-{kind}-ubyte"]
    if name == "mnist":
        original_split = _SPLITS[split]
        num_axes = 3 if kind == "images" else 1
        stems.append(f"{original_split}-{kind}-idx{num_axes}-ubyte")
        stems.append(f"{original_split}-{kind}.idx{num_axes}-ubyte")
    return stems


def _find_npz(folder: Path, name: str, split: str) -> Path | None:
    """Return the npz file of a split, or the file that has both splits; None if there is neither.

    Args:
        folder: Path of the folder.
        name: Name of the data set.
        split: "train" or "test".
    """
    return _first_file([folder / f"{name}-{split}.npz", folder / f"{name}.npz"])


def read_idx_pair(images: Path, labels: Path) -> Images:
    """Read an IDX file of images ``(n, h, w)`` and one of their labels ``(n)``.

    Args:
        images: The file of the images.
        labels: The file of the labels.

    Raises:
        DataError: A file is missing or damaged, or axes or lengths do not match.
    """
    pixels = read_idx(images)
    label_values = read_idx(labels)
    for path, values, num_axes in ((images, pixels, 3), (labels, label_values, 1)):
        if values.dim() != num_axes:
            raise DataError(f"{path}: {values.dim()} axes; allowed: {num_axes}")
    return _convert_pair(pixels, label_values, f"{images} and {labels.name}")


def read_npz(path: Path, *, split: str | None = None) -> Images:
    """Read an npz file: ``images`` and ``labels`` (or x and y, x_train and y_train ...), or concatenated JPEG bytes.

    A file of JPEG bytes has the arrays ``jpeg`` (bytes), ``offset`` (n + 1 positions) and ``label``. In other files
    channels may be the last axis.

    Args:
        path: Path of the file.
        split: The split to read from a file of several; None for a file without splits.

    Raises:
        DataError: The file is missing or not an npz file, or arrays are missing, of the wrong type or of different
            lengths.
    """
    arrays = read_arrays(path)
    labels = arrays[_find_key(arrays, _LABEL_KEYS, split, path, "labels")]
    has_jpegs = "jpeg" in arrays and "offset" in arrays
    if has_jpegs:
        pixels = decode_jpegs(arrays["jpeg"], arrays["offset"], path)
    else:
        pixels = arrays[_find_key(arrays, _IMAGE_KEYS, split, path, "images")]
    images = _convert_pair(pixels, labels, str(path))
    if "domain" not in arrays:
        return images
    domain_names = arrays.get("domains")
    if domain_names is None:
        return _with_domains(images, arrays["domain"], None, str(path))
    if domain_names.ndim != 1:
        raise DataError(f"{path}: domains has {domain_names.ndim} axes; allowed: 1, a name for each number in domain")
    return _with_domains(images, arrays["domain"], list(map(str, domain_names)), str(path))


def _with_domains(images: Images, domains: np.ndarray, names: Sequence[str] | None, where: str) -> Images:
    """Return images with the domain of each.

    Args:
        images: The images.
        domains: For each image its domain: an index into ``names``, or a name. Names get indices in alphabetical order.
        names: Names of the domains if ``domains`` are indices; None for "domain-0" and so on.
        where: Name of the data, for error messages.

    Raises:
        DataError: Domains are of the wrong type or number, or an index has no name.
    """
    if domains.shape != (len(images),):
        raise DataError(f"{where}: {len(images)} images but domains of shape {domains.shape}; one is needed per image")
    has_indices = domains.dtype.kind in "iu"  # integers with or without sign
    has_names = domains.dtype.kind in "US"  # text or bytes
    if not has_indices and not has_names:
        raise DataError(f"{where}: domains are {domains.dtype}; allowed: whole numbers, or names")
    if has_names:
        unique_names, domains = np.unique(domains.astype(str), return_inverse=True)
        names = unique_names.tolist()
    low, high = (int(domains.min()), int(domains.max())) if len(domains) else (0, 0)
    if names is None:
        names = [f"domain-{number}" for number in range(high + 1)]
    if low < 0 or high >= len(names):
        raise DataError(f"{where}: domains go from {low} to {high}; allowed: 0 to {len(names) - 1}, those with names")
    return replace(images, domains=torch.as_tensor(domains.astype(np.int64)), domain_names=tuple(names))


def _find_key(arrays: Mapping[str, object], keys: Sequence[str], split: str | None, path: Path, what: str) -> str:
    """Return the key of images or labels in an npz file: the first that exists of ``x_train`` ..., then of ``x`` ...

    Args:
        arrays: The file's content.
        keys: Possible keys without split, such as ``("images", "x")``.
        split: The split; None for a file without splits.
        path: The file, for error messages.
        what: "images" or "labels", for error messages.

    Raises:
        DataError: The file has none of them.
    """
    candidates = list(keys)
    if split:
        candidates = [f"{key}_{split}" for key in keys] + candidates
    for key in candidates:
        if key in arrays:
            return key
    raise DataError(f"{path}: no {what} in it; found: {list_names(arrays)}; allowed names: {', '.join(candidates)}")


def read_hub(source: str, split: str, *, largest: int | None = None, domains: bool = False) -> Images:
    """Read one split of a data set ``hub:NAME?config=C``, or of a folder with the same layout.

    Args:
        source: Name of the data set.
        split: The split to read.
        largest: Resize images with longer sides to squares of this size; None keeps them.
        domains: Whether to read the images' domains.

    Raises:
        DataError: The data set, split or column is unknown, or images differ in size.
    """
    where = f"{source} {split}"
    columns = [_IMAGE_KEYS, _LABEL_KEYS]
    if domains:
        columns.append(_DOMAIN_KEYS)
    images, labels, domain_names = [], [], []
    for image, label, *domain in iterate_values(source, columns, split=split):
        resized = image if largest is None else shrink_to_square(image, largest)
        images.append(np.asarray(resized))
        labels.append(label)
        domain_names += domain  # empty without domains
    labelled_images = _convert_pair(stack_images(images, where), np.asarray(labels), where)
    if not domains:
        return labelled_images
    return _with_domains(labelled_images, np.asarray(domain_names), names=None, where=where)  # numbers have no names


def _convert_pair(pixels: object, labels: object, where: str) -> Images:
    """Check images and labels and convert them to tensors, with channels before height and width.

    Args:
        pixels: Images of shape (n, h, w), (n, c, h, w) or (n, h, w, c), as bytes.
        labels: Labels of shape (n) or (n, 1), as integers.
        where: Name of the data, for error messages.

    Raises:
        DataError: Types or shapes differ from these.
    """
    label_array = np.asarray(labels)
    if label_array.dtype.kind not in "iu":
        raise DataError(f"{where}: labels are {label_array.dtype}; allowed: whole numbers")
    label_tensor = torch.as_tensor(label_array.astype(np.int64))
    if label_tensor.dim() == 2 and label_tensor.shape[1] == 1:  # CIFAR's labels in Keras
        label_tensor = label_tensor.flatten()

    pixel_array = np.asarray(pixels)
    if pixel_array.dtype != np.uint8 or pixel_array.ndim not in (3, 4):
        got = f"{pixel_array.dtype} with {pixel_array.ndim} axes"
        raise DataError(f"{where}: images are {got}; allowed: uint8 with 3 (grey) or 4 axes")
    if label_tensor.dim() != 1 or len(label_tensor) != len(pixel_array):
        raise DataError(
            f"{where}: {len(pixel_array)} images but labels of shape {tuple(label_tensor.shape)}; one is needed per "
            "image"
        )
    images = torch.as_tensor(pixel_array)
    has_channels_last = images.dim() == 4 and images.shape[-1] in (1, 3) and images.shape[1] not in (1, 3)
    if has_channels_last:
        images = images.permute(0, 3, 1, 2).contiguous()
    return Images(pixels=images, labels=label_tensor)
