"""FedMerge's image tasks: users who differ by their labels, their cluster of labels, or their domain.

Source: FedMerge, section 4.1; what it leaves open is as in its public code. The data set's own train and test images
are pooled, dealt out (:mod:`.groups`), and each user's are split: a sixth is for testing, a tenth of the
others for validation, label by label, so that train, validation and test images of a user have the same distribution
and every label is trained on (:mod:`comingle.data.samples.samples`).

    personal   50 users; the images of each label are parted by shares drawn from Dir(0.1)
    cluster    the labels are drawn into five clusters of equally many; 6, 5, 8, 13 and 18 of 50 consecutive users have
               one each, dealt evenly, as in the paper. Its public code draws sizes at random, gives each cluster 30 of
               100 labels, so that clusters overlap, and parts each label by Dir(10): ``labels_per_cluster: 30`` and
               ``alpha: 10`` do the latter two
    domain     PACS, one domain a user; more users than domains share a domain evenly

Differs from the public code: it holds out test and validation images of the personal setting regardless of labels, and
in the cluster setting keeps the data set's own test images for testing; it has no validation images of PACS, and no
partition of it. Images are not augmented, as there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int64
from torch import Tensor

from comingle.data.samples.samples import Samples, UserSamples, hold_out, list_labels
from comingle.papers.tasks.groups import Key, choose_labels, cluster_sizes, deal, group_by_labels
from comingle.papers.tasks.images import Images
from comingle.papers.tasks.settings import REDUCED_MINIMUM, TEST_SHARE, Setting
from comingle.papers.tasks.transforms import normalise
from comingle.utils.errors import DataError, RecipeError


def pool_images(parts: Sequence[Images], where: str) -> Images:
    """All images as one data set.

    Raises:
        DataError: images of different sizes.
    """
    shapes = dict.fromkeys(tuple(part.pixels.shape[1:]) for part in parts)
    if len(shapes) > 1:
        raise DataError(f"{where}: images of sizes {', '.join(map(str, shapes))}; allowed: one size in train and test")
    return Images(pixels=torch.cat([part.pixels for part in parts]), labels=torch.cat([part.labels for part in parts]))


def make_skewed(
    name: str,
    setting: Setting,
    images: Images,
    *,
    seed: int,
    users: int,
    clusters: int,
    alpha: float | None,
    labels_per_cluster: int | None,
    fraction: float,
    test_samples: int | None,
) -> tuple[UserSamples, ...]:
    """The users of a task; the first of a cluster (or domain) come after the last of the one before.

    ``fraction`` is how many of their train images users keep, at least one of each label.

    Raises:
        RecipeError: numbers of users, clusters or labels that do not fit.
        DataError: a user without images, or with too few of each label to hold any out.
    """
    key: Key = (name, seed)
    groups, sizes, called = _group(setting, images, users, clusters, labels_per_cluster, key)
    parts = deal(groups, sizes, images.labels, alpha=alpha, key=key, names=called)
    owners = [group for group, size in enumerate(sizes) for _ in range(size)]
    names = _names(images, sizes)
    dealt = []
    for k, part in enumerate(parts):
        train, test = _split(images.labels, part, fraction, names[k])
        dealt.append(
            UserSamples(
                name=names[k],
                train=_samples(images, train, setting),
                valid=_samples(images, train[:0], setting),
                test=_samples(images, test[:test_samples], setting),
                cluster=None if setting.partition == "personal" else owners[k],
            )
        )
    return tuple(dealt)


def _group(
    setting: Setting, images: Images, users: int, clusters: int, labels_per_cluster: int | None, key: Key
) -> tuple[list[Int64[Tensor, " _"]], list[int], list[str]]:
    """The images of each group, how many users share them, and what it is called where there are several."""
    if setting.partition == "personal":
        return [torch.arange(len(images))], [users], []
    if setting.partition == "domain":
        return _group_by_domain(images, users, key)
    sizes = cluster_sizes(users, clusters)
    chosen = choose_labels(setting.classes, clusters, labels_per_cluster, key)
    called = [
        f"cluster {number} (labels {list_labels(labels_of_cluster)})" for number, labels_of_cluster in enumerate(chosen)
    ]
    return group_by_labels(images.labels, chosen, sizes, key), sizes, called


def _group_by_domain(images: Images, users: int, key: Key) -> tuple[list[Int64[Tensor, " _"]], list[int], list[str]]:
    assert images.domains is not None
    count = len(images.domain_names)
    if users < count:
        raise RecipeError(f"task {key[0]!r}: users={users}; allowed: from {count}, one for each domain")
    groups = [(images.domains == domain).nonzero().flatten() for domain in range(count)]
    called = [f"domain {name!r}" for name in images.domain_names]
    return groups, [len(part) for part in torch.arange(users).tensor_split(count)], called


def _names(images: Images, sizes: Sequence[int]) -> list[str]:
    """Users are named after their domain where they have one, and numbered where it has several."""
    if not images.domain_names:
        return [f"user-{k}" for k in range(sum(sizes))]
    return [
        domain if size == 1 else f"{domain}-{k}"
        for domain, size in zip(images.domain_names, sizes, strict=True)
        for k in range(size)
    ]


def _split(
    labels: Int64[Tensor, " n"], part: Int64[Tensor, " m"], fraction: float, name: str
) -> tuple[Int64[Tensor, " train"], Int64[Tensor, " test"]]:
    kept, held = hold_out(labels[part], TEST_SHARE)
    if not len(held):
        got = f"no two of {len(part)} images have one label, so none can be spared for testing"
        raise DataError(
            f"user {name!r}: {got}; allowed: more images, fewer users, or a larger alpha where there is one"
        )
    train = part[kept]
    wanted = max(REDUCED_MINIMUM, round(fraction * len(train)))
    return train[hold_out(labels[train], 1 - wanted / len(train))[0]], part[held]


def _samples(images: Images, places: Int64[Tensor, " m"], setting: Setting) -> Samples:
    pixels = images.reals(places)
    return Samples(
        inputs=normalise(pixels, *setting.colours) if setting.colours else pixels, targets=images.labels[places]
    )
