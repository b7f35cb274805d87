"""Which images go to which user.

Every setting of FedMerge (section 4.1) is groups of images, each dealt out to a number of consecutive users:

    personal   all images are one group; each label's are parted by shares drawn from Dir(alpha) (Hsu et al. 2019)
    cluster    a group is the images of some labels; 50 users in 5 clusters are 6, 5, 8, 13 and 18
    domain     a group is the images of one domain

Dirichlet shares come from the partitioner of ``flwr-datasets``, which is needed for them alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from comingle.data.samples.samples import UserSamples, find_unseen, hold_out, list_labels, take
from comingle.utils.errors import DataError, RecipeError
from comingle.utils.seeds import derive, generator


def hold_out_valid(user: UserSamples, share: float) -> UserSamples:
    """The user with ``share`` of the train samples as validation samples; a regression has no labels to keep.

    Raises:
        DataError: a share above 0 of samples of which none can be spared.
    """
    if share <= 0:
        return user
    targets = user.train.targets
    labels = torch.zeros(len(targets), dtype=torch.int64) if targets.is_floating_point() else targets.long()
    kept, held = hold_out(labels, share)
    if not len(held):
        got = f"{len(targets)} train samples of {len(labels.unique())} labels"
        raise DataError(f"user {user.name!r}: valid={share} of {got}: none can be spared; allowed: 0, or more samples")
    return replace(user, train=take(user.train, kept), valid=take(user.train, held))


def check_labels(users: Sequence[UserSamples]) -> None:
    """Whether users have seen, in training, every label that they are validated and tested on.

    Raises:
        DataError: some user has not.
    """
    for user in users:
        for split, samples in (("valid", user.valid), ("test", user.test)):
            if unseen := find_unseen(user, samples):
                raise DataError(
                    f"user {user.name!r}: {split} holds labels that train does not: {list_labels(unseen)}; "
                    "allowed: those of train"
                )


Key = tuple[str | int, ...]

_PUBLISHED_SIZES = (6, 5, 8, 13, 18)
"""Users of FedMerge's clusters, out of 50."""
_ATTEMPTS = 20
_FEWEST = 4
"""One sample for testing, one for validation, and two for training, as batch norm needs."""
_FAR_BELOW_AVERAGE = 20


def cluster_sizes(users: int, clusters: int) -> list[int]:
    """How many users each cluster has: in the proportions of FedMerge where there are five, else as equal as can be.

    By largest remainder, and at least one each.
    """
    published = clusters == len(_PUBLISHED_SIZES)
    parts = _PUBLISHED_SIZES if published else (1,) * clusters
    spare = users - clusters
    # One user each is set apart, and the others make the proportions right.
    quota = [max(0.0, users * part / sum(parts) - 1) for part in parts]
    scaled = [spare * q / (sum(quota) or 1) for q in quota]
    sizes = [int(q) for q in scaled]
    by_remainder = sorted(range(clusters), key=lambda c: sizes[c] - scaled[c])
    for cluster in by_remainder[: spare - sum(sizes)]:
        sizes[cluster] += 1
    return [1 + size for size in sizes]


def choose_labels(classes: int, clusters: int, per_cluster: int | None, key: Key) -> list[list[int]]:
    """The labels of each cluster: drawn so that every label is used, and none more than once oftener than another.

    Without ``per_cluster`` every label is in one cluster; with it, clusters overlap where labels are too few.

    Raises:
        RecipeError: more clusters than labels, or a number of labels that leaves some out or is more than there are.
    """
    where = f"task {key[0]!r}"
    if clusters > classes:
        raise RecipeError(f"{where}: clusters={clusters}; allowed: 1 to {classes}, the number of labels")
    if per_cluster is not None and not -(-classes // clusters) <= per_cluster <= classes:
        allowed = f"{-(-classes // clusters)}, so that every label is used, to {classes}, all labels"
        raise RecipeError(f"{where}: labels_per_cluster={per_cluster}; allowed: {allowed}")
    order = torch.randperm(classes, generator=generator(*key, "labels"))
    if per_cluster is None:
        return [sorted(part.tolist()) for part in order.tensor_split(clusters)]
    uses = torch.zeros(classes, dtype=torch.int64)
    chosen_labels = []
    for cluster in range(clusters):
        shuffled = torch.randperm(classes, generator=generator(*key, "labels", cluster))
        of_cluster = shuffled[uses[shuffled].argsort(stable=True)[:per_cluster]]  # the least used, in random order
        uses[of_cluster] += 1
        chosen_labels.append(sorted(of_cluster.tolist()))
    return chosen_labels


def group_by_labels(
    labels: Int64[Tensor, " n"], chosen: Sequence[Sequence[int]], sizes: Sequence[int], key: Key
) -> list[Int64[Tensor, " _"]]:
    """The images of each cluster; those of a label of several clusters are parted by the clusters' numbers of users."""
    groups: list[list[Tensor]] = [[] for _ in chosen]
    for label in range(max(max(labels_of_cluster) for labels_of_cluster in chosen) + 1):
        holders = [cluster for cluster, labels_of_cluster in enumerate(chosen) if label in labels_of_cluster]
        images = _shuffled((labels == label).nonzero().flatten(), *key, "label", label)
        weights = torch.tensor([float(sizes[cluster]) for cluster in holders], dtype=torch.float64)
        borders = (weights.cumsum(0) / weights.sum() * len(images)).round().long()
        for cluster, part in zip(holders, images.tensor_split(borders[:-1]), strict=True):
            groups[cluster].append(part)
    return [torch.cat(parts) for parts in groups]


def deal(
    groups: Sequence[Int64[Tensor, " _"]],
    sizes: Sequence[int],
    labels: Int64[Tensor, " n"],
    *,
    alpha: float | None,
    key: Key,
    names: Sequence[str] = (),
) -> list[Int64[Tensor, " _"]]:
    """The images of each user, in random order: group g is dealt to ``sizes[g]`` users, evenly without ``alpha``.

    ``names`` say in errors which group it is, where there are several.

    Raises:
        DataError: some user gets nothing, or Dirichlet shares cannot be drawn.
    """
    parts: list[Tensor] = []
    for number, (group, size) in enumerate(zip(groups, sizes, strict=True)):
        shuffled_group = _shuffled(group, *key, "group", number)
        where = ", ".join([f"task {key[0]!r}", *names[number : number + 1]])
        if len(shuffled_group) < size:
            got = f"{len(shuffled_group)} images for {size} user{'s' * (size > 1)}"
            raise DataError(f"{where}: {got}; allowed: at least one for each, so more images, or fewer users")
        if alpha is None or size == 1:
            parts += shuffled_group.tensor_split(size)
        else:
            shares = draw_dirichlet(labels[shuffled_group], size, alpha=alpha, key=(*key, number), where=where)
            parts += [shuffled_group[part] for part in shares]
    return parts


def _shuffled(places: Int64[Tensor, " n"], *key: str | int) -> Int64[Tensor, " n"]:
    return places[torch.randperm(len(places), generator=generator(*key))]


def draw_dirichlet(
    labels: Int64[Tensor, " n"], users: int, *, alpha: float, key: Key, where: str = ""
) -> list[Int64[Tensor, " _"]]:
    """Each label's samples parted among the users by shares drawn from Dir(alpha), in random order for each user.

    As in FedMerge's public code, users who have their average number of samples get no more, and the whole draw is
    repeated until everybody has at least as many samples as there are labels. Where that is more than a twentieth of
    the average, which hardly any draw gives, a twentieth is enough, and four samples always are needed.

    Raises:
        DataError: no ``flwr-datasets``, or no such draw out of some two hundred.
    """
    partitioners, rows = _import_partitioners(), {"label": labels.tolist(), "row": list(range(len(labels)))}
    least = max(_FEWEST, min(len(labels.unique()), len(labels) // (_FAR_BELOW_AVERAGE * users)))
    for attempt in range(_ATTEMPTS):
        partitioner = partitioners.DirichletPartitioner(
            num_partitions=users,
            partition_by="label",
            alpha=float(alpha),
            min_partition_size=least,
            self_balancing=True,
            seed=derive(*key, "dirichlet", attempt),
        )
        partitioner.dataset = import_module("datasets").Dataset.from_dict(rows)
        parts = _load_all(partitioner, users)
        # Shares of a tiny alpha may all be 0, and what the partitioner makes of that is no partition.
        if torch.equal(torch.cat(parts).sort().values, torch.arange(len(labels))):
            return parts
    got = f"no draw of alpha={alpha} gives each of {users} users {least} of {len(labels)} images"
    raise DataError(f"{where or f'task {key[0]!r}'}: {got}; allowed: fewer users, a larger alpha or more images")


def _load_all(partitioner: Any, users: int) -> list[Int64[Tensor, " _"]]:
    """Everybody's rows, and nobody's where the partitioner gave up: it does after eleven draws."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of every draw that it repeats
            partitions = [partitioner.load_partition(user)["row"][:] for user in range(users)]
    except ValueError:
        return [torch.arange(0)]
    return [torch.tensor(rows, dtype=torch.int64) for rows in partitions]


def _import_partitioners() -> Any:
    try:
        return import_module("flwr_datasets.partitioner")
    except ImportError as error:
        raise DataError(
            "parting labels by Dirichlet shares (alpha) needs the package flwr-datasets: "
            "pip install 'comingle-papers[flower]'"
        ) from error
