"""FLoRAL's image tasks: images dealt out at random, and shifted by the user's cluster.

User k is in cluster k mod C. Images of cluster c are turned by 360 / C * c degrees (shift "rotate"), or their labels
become y + c modulo the number of classes ("labels"); test images are shifted as train images are. Without a shift
(cifar100) cluster c holds the labels that are c modulo C, and they stay numbers out of 100: a net that can fit 10
labels but not 100, which must find out whose labels it will be asked for, is what the task is about. Mapped to 10, the
labels of different clusters would contradict each other, which is the label shift of the other tasks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Int64
from torch import Tensor

from comingle.data.samples.samples import Samples, UserSamples
from comingle.papers.tasks import transforms
from comingle.papers.tasks.images import Images
from comingle.papers.tasks.settings import Setting, Shift
from comingle.utils.errors import RecipeError
from comingle.utils.seeds import generator


def make_shifted(
    name: str,
    setting: Setting,
    images_of_split: Mapping[str, Images],
    *,
    seed: int,
    users: int,
    clusters: int,
    shift: Shift | None,
    test_samples: int | None,
) -> tuple[UserSamples, ...]:
    """The users of a task, out of the splits "train" and "test"; ``test_samples`` is the most of a user.

    Raises:
        RecipeError: more users than images.
    """
    if users > (most := min(len(images) for images in images_of_split.values())):
        raise RecipeError(f"task {name!r}: users={users}; allowed: 1 to {most}, one image of each split for everybody")
    dealt: dict[str, list[Samples]] = {}
    for split, images in images_of_split.items():
        parts = _deal(images.labels, users, clusters if shift is None else None, generator("task", name, seed, split))
        parts = parts if split == "train" else [part[:test_samples] for part in parts]
        dealt[split] = [_shifted(images, part, k % clusters, clusters, shift, setting) for k, part in enumerate(parts)]
    return tuple(
        UserSamples(name=f"user-{k}", train=train, valid=train.first(0), test=test, cluster=k % clusters)
        for k, (train, test) in enumerate(zip(dealt["train"], dealt["test"], strict=True))
    )


def _deal(
    labels: Int64[Tensor, " n"], users: int, clusters: int | None, generator: torch.Generator
) -> list[Int64[Tensor, " _"]]:
    """Whose images are whose, as equal in number as possible; with ``clusters``, label y goes to cluster y mod C."""
    order = torch.randperm(len(labels), generator=generator)
    if clusters is None:
        return list(order.tensor_split(users))
    parts = [order[:0]] * users
    for cluster in range(clusters):
        of_cluster = order[labels[order] % clusters == cluster]
        members = range(cluster, users, clusters)
        for user, part in zip(members, of_cluster.tensor_split(len(members)), strict=True):
            parts[user] = part
    return parts


def _shifted(
    images: Images, part: Int64[Tensor, " m"], cluster: int, clusters: int, shift: Shift | None, setting: Setting
) -> Samples:
    """The images of one user as real numbers, shifted as the user's cluster is."""
    pixels, labels = images.reals(part), images.labels[part]
    if shift == "rotate":
        pixels = transforms.rotate(pixels, 360 * cluster / clusters)  # before normalising: corners become black
    elif shift == "labels":
        labels = (labels + cluster) % setting.classes
    return Samples(inputs=transforms.normalise(pixels, *setting.colours) if setting.colours else pixels, targets=labels)
